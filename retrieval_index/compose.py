"""Indexes made of indexes: fusion and re-ranking as directories that open like any other.

Such a directory holds a manifest alone. It names its parts by paths relative to itself, so that all can
be moved together, and by the digest of each part's manifest: a part that was built again since is
refused, for the results would change under the same name.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from retrieval_index.hybrid import HybridRetriever
from retrieval_index.manifest import MANIFEST_FILE, Manifest, read_manifest
from retrieval_index.staging import check_output, locked, partial_of, publish, write_atomically
from retrieval_index.types import RetrievalError, Retriever

OpenPart = Callable[[Path], Retriever]


def compose_hybrid(
    output: str | os.PathLike[str],
    parts: Sequence[str | os.PathLike[str]],
    *,
    weights: Sequence[float] | None = None,
    k: float = 60.0,
    depth: int = 100,
) -> Manifest:
    """Write an index that fuses others; see `HybridRetriever` for the numbers.

    Raises:
        ValueError: fewer than two parts, or numbers that `HybridRetriever` refuses.
        RetrievalError: a part that is no index, or parts of different corpora.
    """
    if len(parts) < 2:
        raise ValueError(f"fusion needs two indexes or more, got {len(parts)}")
    weights = [1.0] * len(parts) if weights is None else [float(weight) for weight in weights]
    HybridRetriever([_Nothing()] * len(parts), weights=weights, k=k, depth=depth)  # checks the numbers
    numbers = {"weights": weights, "k": float(k), "depth": depth}
    return _compose(Path(output), "hybrid", [Path(part) for part in parts], numbers)


def compose_rerank(
    output: str | os.PathLike[str], part: str | os.PathLike[str], *, model: str = "minilm", depth: int = 50
) -> Manifest:
    """Write an index that re-ranks another with a cross-encoder; see `RerankRetriever`.

    Raises:
        ValueError: depth below 1.
        RetrievalError: the part is no index.
    """
    if depth < 1:
        raise ValueError(f"depth must be 1 or more, got {depth}")
    return _compose(Path(output), "rerank", [Path(part)], {"model": model, "depth": depth})


def open_hybrid(directory: Path, manifest: Manifest, open_part: OpenPart) -> HybridRetriever:
    """Open the parts of a fused index."""
    parts = _parts(directory, manifest)
    numbers = manifest.parameters
    try:
        return HybridRetriever(
            [open_part(part) for part in parts], weights=numbers["weights"], k=numbers["k"], depth=numbers["depth"]
        )
    except (KeyError, ValueError) as error:
        raise RetrievalError(f"{directory} has parameters unknown to this version: {error!r}") from error


def open_rerank(
    directory: Path, manifest: Manifest, open_part: OpenPart, *, scorer: Any = None, device: str | None = None
) -> Retriever:
    """Open the part of a re-ranked index, and the cross-encoder unless a scorer is given."""
    from retrieval_index.rerank import CrossEncoderScorer, RerankRetriever

    [part] = _parts(directory, manifest)
    try:
        model, depth = manifest.parameters["model"], manifest.parameters["depth"]
    except KeyError as error:
        raise RetrievalError(f"{directory} has parameters unknown to this version: {error!r}") from error
    return RerankRetriever(open_part(part), scorer or CrossEncoderScorer(model, device=device), depth=depth)


def _compose(output: Path, kind: str, parts: list[Path], numbers: dict[str, Any]) -> Manifest:
    manifests = [read_manifest(part) for part in parts]
    first = manifests[0]
    for part, other in zip(parts, manifests, strict=True):
        if other.corpus_hashes != first.corpus_hashes:
            raise RetrievalError(
                f"{parts[0]} ({first.passages} passages) and {part} ({other.passages} passages) index different"
                " corpora; build them from the same files"
            )
        if part.resolve() == output.resolve():
            raise RetrievalError(f"{output} cannot be a part of itself; name another directory")
    base = output.resolve()
    named = [
        {"path": os.path.relpath(part.resolve(), base).replace(os.sep, "/"), "version": _version(part)}
        for part in parts
    ]
    manifest = Manifest(
        kind=kind, passages=first.passages, parameters={"parts": named, **numbers}, corpus=first.corpus, files=()
    )
    check_output(output)
    partial = partial_of(output)
    with locked(partial):
        write_atomically(partial / MANIFEST_FILE, manifest.as_json())
        publish(partial, output)
    return manifest


def _parts(directory: Path, manifest: Manifest) -> list[Path]:
    found = []
    try:
        named = [(str(part["path"]), str(part["version"])) for part in manifest.parameters["parts"]]
    except (KeyError, TypeError) as error:
        raise RetrievalError(f"{directory} does not name its parts; compose it again") from error
    for name, version in named:
        part = Path(os.path.normpath(directory.resolve() / name))
        read_manifest(part)
        if _version(part) != version:
            raise RetrievalError(f"{part} was built again since {directory} was composed of it; compose it again")
        found.append(part)
    return found


def _version(part: Path) -> str:
    return hashlib.sha256((part / MANIFEST_FILE).read_bytes()).hexdigest()[:16]


class _Nothing:
    """Stands for a part whose numbers are checked before it is opened."""

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Any]]:
        return [[] for _ in queries]
