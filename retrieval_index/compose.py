"""Indexes made of indexes: fusion and re-ranking as directories that open like any other.

Such a directory holds a manifest alone. It names its parts by paths relative to itself, so that all can
be moved together, and by the digest of each part's manifest: a part that was built again since is
refused, for the results would change under the same name. A cross-encoder that is a directory is named by
its relative path as well, so that the index opens from any working directory.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from retrieval_index.hybrid import HybridRetriever
from retrieval_index.manifest import MANIFEST_FILE, Manifest, read_manifest
from retrieval_index.rerank import RERANKERS, CrossEncoderScorer, RerankRetriever
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

    Args:
        model: a name of `RERANKERS`, of the hub, or a directory.

    Raises:
        ValueError: depth below 1, or a model that can only be a directory and is none.
        RetrievalError: the part is no index.
    """
    if depth < 1:
        raise ValueError(f"depth must be 1 or more, got {depth}")
    numbers: dict[str, Any] = {"depth": depth}
    if model in RERANKERS:
        numbers["model"] = model
    elif model and Path(model).is_dir():
        numbers["model_path"] = _relative(Path(model), Path(output))
    elif not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", model):  # a name of the hub: owner/name, or one word
        raise ValueError(f"there is no model {model!r}: neither a directory nor a name of the hub; check the path")
    else:
        numbers["model"] = model
    return _compose(Path(output), "rerank", [Path(part)], numbers)


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
    [part] = _parts(directory, manifest)
    try:
        depth, path = manifest.parameters["depth"], manifest.parameters.get("model_path")
        model = manifest.parameters["model"] if path is None else str(_place(directory, path))
    except (KeyError, TypeError) as error:
        raise RetrievalError(f"{directory} has parameters unknown to this version: {error!r}") from error
    if path is not None and scorer is None and not Path(model).is_dir():
        raise RetrievalError(f"the cross-encoder {model} of {directory} is not there; move it back or compose it again")
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
    named = [{"path": _relative(part, output), "version": _version(part)} for part in parts]
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
        part = _place(directory, name)
        read_manifest(part)
        if _version(part) != version:
            raise RetrievalError(f"{part} was built again since {directory} was composed of it; compose it again")
        found.append(part)
    return found


def _relative(path: Path, base: Path) -> str:
    return os.path.relpath(path.resolve(), base.resolve()).replace(os.sep, "/")


def _place(base: Path, name: str) -> Path:
    return Path(os.path.normpath(base.resolve() / name))


def _version(part: Path) -> str:
    return hashlib.sha256((part / MANIFEST_FILE).read_bytes()).hexdigest()[:16]


class _Nothing:
    """Stands for a part whose numbers are checked before it is opened."""

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Any]]:
        return [[] for _ in queries]
