"""open_index: from a directory to a Retriever, whatever kind of index it holds."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sized
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from retrieval_index.analysis import BM25Parameters
from retrieval_index.corpus import CorpusPaths
from retrieval_index.manifest import Manifest, check_corpus, check_files, read_manifest
from retrieval_index.types import RetrievalError, Retriever


@dataclass(frozen=True, slots=True)
class OpenOptions:
    """How an index is searched; what does not concern its kind is passed by.

    Args:
        backend: BM25: "auto", "numpy" or "numba".
        device: dense: "auto", "cpu" or "gpu", for FAISS.
        encoder_device: dense and re-ranking: where the model runs ("cpu", "cuda:0"); None: a GPU if any.
        nprobe, ef_search: dense: how thoroughly a search looks; None: as the index was built for.
        encoder: dense: an `Encoder` in the place of the one that the manifest names.
        scorer: re-ranking: a `PairScorer` in the place of the one that the manifest names.
        threads: lucene: how many search side by side.
    """

    backend: str = "auto"
    device: str = "auto"
    encoder_device: str | None = None
    nprobe: int | None = None
    ef_search: int | None = None
    encoder: Any = field(default=None, repr=False)
    scorer: Any = field(default=None, repr=False)
    threads: int = 1


def open_index(
    path: str | os.PathLike[str],
    *,
    verify: bool = False,
    corpus: CorpusPaths | None = None,
    **options: Any,
) -> Retriever:
    """Open a finished index.

    Args:
        path: directory that scripts/build_index.py or scripts/compose_index.py made.
        verify: read every file and compare its SHA-256 with the manifest (sizes are always compared).
        corpus: the corpus files it should have been built from; anything else is refused.
        options: see `OpenOptions`.

    Raises:
        RetrievalError: no index there, an unfinished or damaged one, a newer format, another corpus.
    """
    directory = Path(path)
    manifest = read_manifest(directory)
    check_files(directory, manifest, verify=verify)
    if corpus is not None:
        check_corpus(directory, manifest, corpus)
    try:
        opener = _OPENERS[manifest.kind]
    except KeyError:
        raise RetrievalError(f"{directory} is an index of unknown kind {manifest.kind!r}; update the package") from None
    index = opener(directory, manifest, OpenOptions(**options), verify)
    size = len(index) if isinstance(index, Sized) else manifest.passages
    if size != manifest.passages:
        raise RetrievalError(
            f"{directory} stores {size} passages, its manifest says {manifest.passages}; build it again"
        )
    return index


def _open_bm25(directory: Path, manifest: Manifest, options: OpenOptions, _verify: bool) -> Retriever:
    from retrieval_index.bm25 import BM25Index

    try:
        parameters = BM25Parameters(**manifest.parameters)
    except (TypeError, ValueError) as error:
        raise RetrievalError(f"{directory} has parameters unknown to this version: {error}") from error
    return BM25Index.load(directory, parameters, backend=options.backend)  # type: ignore[arg-type]


def _open_dense(directory: Path, manifest: Manifest, options: OpenOptions, _verify: bool) -> Retriever:
    try:
        from retrieval_index.dense import DenseIndex
    except ModuleNotFoundError as error:
        raise RetrievalError(
            f"{directory} is a dense index and needs {error.name}: pip install 'sorl[dense]'"
        ) from error

    return DenseIndex.load(
        directory,
        manifest.parameters,
        encoder=options.encoder,
        encoder_device=options.encoder_device,
        device=options.device,
        nprobe=options.nprobe,
        ef_search=options.ef_search,
    )


def _open_lucene(directory: Path, manifest: Manifest, options: OpenOptions, _verify: bool) -> Retriever:
    from retrieval_index.lucene import LuceneIndex

    return LuceneIndex.load(directory, manifest.parameters, threads=options.threads)


def _open_hybrid(directory: Path, manifest: Manifest, options: OpenOptions, verify: bool) -> Retriever:
    from retrieval_index.compose import open_hybrid

    return open_hybrid(directory, manifest, lambda part: _again(part, options, verify))


def _open_rerank(directory: Path, manifest: Manifest, options: OpenOptions, verify: bool) -> Retriever:
    from retrieval_index.compose import open_rerank

    return open_rerank(
        directory,
        manifest,
        lambda part: _again(part, options, verify),
        scorer=options.scorer,
        device=options.encoder_device,
    )


def _again(path: Path, options: OpenOptions, verify: bool) -> Retriever:
    names = OpenOptions.__dataclass_fields__
    return open_index(path, verify=verify, **{name: getattr(options, name) for name in names})


_OPENERS: Mapping[str, Callable[[Path, Manifest, OpenOptions, bool], Retriever]] = {
    "bm25": _open_bm25,
    "dense": _open_dense,
    "hybrid": _open_hybrid,
    "lucene": _open_lucene,
    "rerank": _open_rerank,
}
