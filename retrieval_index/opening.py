"""open_index: from a directory to a Retriever, whatever kind of index it holds."""

from __future__ import annotations

import os
from pathlib import Path

from retrieval_index.analysis import BM25Parameters
from retrieval_index.corpus import CorpusPaths
from retrieval_index.manifest import check_corpus, check_files, read_manifest
from retrieval_index.types import RetrievalError, Retriever


def open_index(
    path: str | os.PathLike[str],
    *,
    verify: bool = False,
    corpus: CorpusPaths | None = None,
    backend: str = "auto",
) -> Retriever:
    """Open a finished index.

    Args:
        path: directory that `build_bm25` or scripts/build_index.py made.
        verify: read every file and compare its SHA-256 with the manifest (sizes are always compared).
        corpus: the corpus files it should have been built from; anything else is refused.
        backend: how BM25 is searched: "auto", "numpy" or "numba".

    Raises:
        RetrievalError: no index there, an unfinished or damaged one, a newer format, another corpus.
    """
    directory = Path(path)
    manifest = read_manifest(directory)
    check_files(directory, manifest, verify=verify)
    if corpus is not None:
        check_corpus(directory, manifest, corpus)
    if manifest.kind != "bm25":
        raise RetrievalError(f"{directory} is an index of unknown kind {manifest.kind!r}; update the package")

    from retrieval_index.bm25 import BM25Index

    try:
        parameters = BM25Parameters(**manifest.parameters)
    except (TypeError, ValueError) as error:
        raise RetrievalError(f"{directory} has parameters unknown to this version: {error}") from error
    index = BM25Index.load(directory, parameters, backend=backend)  # type: ignore[arg-type]
    if len(index) != manifest.passages:
        raise RetrievalError(
            f"{directory} stores {len(index)} passages, its manifest says {manifest.passages}; build it again"
        )
    return index
