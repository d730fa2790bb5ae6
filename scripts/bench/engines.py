"""Search in this process: our indexes, and the libraries below them called directly."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Search = Callable[[Sequence[str], int], Any]


def rate(search: Search, queries: Sequence[str], *, batch: int, top_k: int, seconds: float) -> float:
    """Queries a second in batches, after a quarter of the time for warming up (compilers, page faults)."""
    _ask(search, queries, batch, top_k, seconds / 4)
    return _ask(search, queries, batch, top_k, seconds)


def _ask(search: Search, queries: Sequence[str], batch: int, top_k: int, seconds: float) -> float:
    done, start, started = 0, 0, time.perf_counter()
    while (passed := time.perf_counter() - started) < seconds or not done:
        piece = [queries[(start + number) % len(queries)] for number in range(batch)]
        search(piece, top_k)
        start, done = (start + batch) % len(queries), done + batch
    return done / passed


def bm25s_direct(index: Path, parameters: dict[str, Any], backend: str) -> Search:
    """bm25s as its documentation shows it: load, tokenize, retrieve. It returns row numbers and scores."""
    import bm25s

    model = bm25s.BM25.load(index, mmap=True)
    if backend == "numba":
        model.activate_numba_scorer()
    model.backend = backend
    stemmer = None
    if parameters["stemmer"] != "none":
        import Stemmer

        stemmer = Stemmer.Stemmer(parameters["stemmer"])

    def search(queries: Sequence[str], top_k: int) -> Any:
        tokens = bm25s.tokenize(list(queries), stopwords="en", stemmer=stemmer, show_progress=False)
        return model.retrieve(tokens, k=top_k, show_progress=False, n_threads=1)

    return search


def lucene_direct(index: Path, threads: int) -> Search:
    """pyserini's batch_search: Anserini's searcher, names and scores only."""
    from retrieval_index.lucene import FOLDER, start_jvm

    java = start_jvm()
    searcher = java.autoclass("io.anserini.search.SimpleSearcher")(str(index / FOLDER))
    searcher.set_bm25(0.9, 0.4)
    array = java.autoclass("java.util.ArrayList")

    def search(queries: Sequence[str], top_k: int) -> Any:
        texts, names = array(), array()
        for number, query in enumerate(queries):
            texts.add(query)
            names.add(str(number))
        found = searcher.batch_search(texts, names, top_k, threads)
        return {entry.getKey(): entry.getValue() for entry in found.entrySet().toArray()}

    return search
