"""BM25 over bm25s' index files, memory-mapped, with hits that are defined in every corner.

What bm25s leaves open is settled here: passages that share no term with the query are not hits,
equal scores come in corpus order, `top_k` may exceed the corpus, and a query without known terms has
no hits. Index files are those of bm25s 0.3 (`bm25s.BM25.load` reads them).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Literal, Protocol

import bm25s
import numpy as np
from numpy.typing import NDArray

from retrieval_index.analysis import Analyzer, BM25Parameters
from retrieval_index.passages import PassageList, PassageStore
from retrieval_index.postings import Matrix, count_terms, merge_shards
from retrieval_index.types import Hit, Passage, RetrievalError

Backend = Literal["auto", "numpy", "numba"]
Ranking = tuple[NDArray[np.int64], NDArray[np.float32]]  # passages and their scores, best first

# File names of bm25s; the first three are the arrays of the matrix.
MATRIX_FILES = {
    "data": "data.csc.index.npy",
    "indices": "indices.csc.index.npy",
    "indptr": "indptr.csc.index.npy",
}
VOCABULARY_FILE = "vocab.index.json"
PARAMETERS_FILE = "params.index.json"

# Numba compiles for some 3 s at a machine's first search, and takes 0.2 s in later processes. Below this
# size numpy answers thousands of queries a second and the wait does not pay (docs/retrieval.md).
NUMBA_PASSAGES = 50_000


class _Passages(Protocol):
    def __len__(self) -> int: ...
    def fetch(self, rows: Sequence[int]) -> dict[int, Passage]: ...


def indexed_text(passage: Passage) -> str:
    """What of a passage is searched: title, space, text."""
    return f"{passage.title} {passage.text}" if passage.title else passage.text


class BM25Index:
    """A `Retriever` over a BM25 score matrix. Safe to use from several threads."""

    def __init__(
        self, matrix: Matrix, passages: _Passages, parameters: BM25Parameters, *, backend: Backend = "auto"
    ) -> None:
        """Put an index together; `load` and `from_passages` are the usual ways.

        Raises:
            ValueError: an unknown backend.
            RetrievalError: matrix and passages differ in number, or numba is wanted and not there.
        """
        if matrix.passages != len(passages):
            raise RetrievalError(
                f"the BM25 matrix has {matrix.passages} rows but {len(passages)} passages are stored;"
                " build the index again"
            )
        self.parameters = parameters
        self.backend = choose_backend(backend, matrix.passages)
        self._matrix = matrix
        self._passages = passages
        self._analyzer = Analyzer(parameters)

    @classmethod
    def from_passages(
        cls,
        passages: Iterable[Passage],
        parameters: BM25Parameters | None = None,
        *,
        backend: Backend = "auto",
    ) -> BM25Index:
        """Index passages in memory, for corpora that come and go (one per question, tests)."""
        parameters = parameters or BM25Parameters()
        stored = PassageList(passages)
        analyzer = Analyzer(parameters)
        texts = (indexed_text(stored[row]) for row in range(len(stored)))
        shard = count_terms(texts, analyzer.words, analyzer.terms)
        matrix = merge_shards(lambda _: shard, 1, k1=parameters.k1, b=parameters.b)
        return cls(matrix, stored, parameters, backend=backend)

    @classmethod
    def load(
        cls, directory: str | os.PathLike[str], parameters: BM25Parameters, *, backend: Backend = "auto"
    ) -> BM25Index:
        """Open the index files in a directory; arrays and passages stay on disk (memory-mapped).

        Only the vocabulary is read into memory. `retrieval_index.open_index` calls this after it has
        checked the manifest.
        """
        return cls(load_matrix(Path(directory)), PassageStore(directory), parameters, backend=backend)

    def __len__(self) -> int:
        return len(self._passages)

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Hit]]:
        """Return the `top_k` best passages of each query; see `Retriever.search`.

        Raises:
            TypeError: `queries` is one string, or holds something else than strings.
            ValueError: `top_k` is below 1.
        """
        rankings = self.rank(queries, top_k)
        rows = [ranked.tolist() for ranked, _ in rankings]
        passages = self._passages.fetch(list(chain.from_iterable(rows)))
        return [
            [Hit(passages[row], score) for row, score in zip(own, scores.tolist(), strict=True)]
            for own, (_, scores) in zip(rows, rankings, strict=True)
        ]

    def rank(self, queries: Sequence[str], top_k: int) -> list[Ranking]:
        """The same as row numbers and scores, without fetching the passages."""
        check_search(queries, top_k)
        columns = [self._columns(query) for query in queries]
        depth = min(top_k, self._matrix.passages)
        if self.backend == "numba":
            return self._rank_compiled(columns, depth)
        return [best(self.scores(own), depth) for own in columns]

    def scores(self, columns: Sequence[int]) -> NDArray[np.float32]:
        """Score every passage (N,) for the terms in these columns; repeated terms count again."""
        matrix = self._matrix
        total = np.zeros(matrix.passages, np.float32)
        for column in columns:
            span = slice(matrix.indptr[column], matrix.indptr[column + 1])
            total[matrix.indices[span]] += matrix.data[span]  # a column names each passage once
        return total

    def _columns(self, query: str) -> list[int]:
        vocabulary = self._matrix.vocabulary
        return [vocabulary[term] for term in self._analyzer.analyse(query) if term in vocabulary]

    def _rank_compiled(self, columns: list[list[int]], depth: int) -> list[Ranking]:
        """The same by the compiled loop, which visits only the passages that share a term with a query."""
        from retrieval_index.kernel import rank_queries  # numba takes a second to load

        matrix = self._matrix
        starts = np.cumsum([0, *(len(own) for own in columns)], dtype=np.int64)
        flat = np.fromiter(chain.from_iterable(columns), np.int64, int(starts[-1]))
        rows, scores, found = rank_queries(
            flat, starts, depth, matrix.data, matrix.indices, matrix.indptr, matrix.passages
        )
        return [(rows[number, :count], scores[number, :count]) for number, count in enumerate(found.tolist())]


def best(scores: NDArray[np.float32], depth: int) -> Ranking:
    """The `depth` highest positive scores (N,), best first, equal scores in order of place."""
    rows = np.flatnonzero(scores > 0)
    values = scores[rows]
    if len(rows) > depth > 0:
        last = np.partition(values, len(rows) - depth)[len(rows) - depth]
        kept = values >= last  # with all that tie with the last place: the sort below chooses among them
        rows, values = rows[kept], values[kept]
    order = np.argsort(-values, kind="stable")[:depth]
    return rows[order], values[order]


def check_search(queries: Sequence[str], top_k: int) -> None:
    """Refuse what is not a batch of queries, the same way in every index."""
    if isinstance(queries, str):
        raise TypeError("search takes a list of queries, got one string; write [query]")
    for query in queries:
        if not isinstance(query, str):
            raise TypeError(f"a query must be a string, got {type(query).__name__}")
    if top_k < 1:
        raise ValueError(f"top_k must be 1 or more, got {top_k}")


def choose_backend(backend: str, passages: int) -> Literal["numpy", "numba"]:
    """Settle "auto": numba where it is installed and the corpus is large enough to repay compiling.

    Raises:
        ValueError: an unknown name.
        RetrievalError: numba is wanted and not installed.
    """
    if backend not in ("auto", "numpy", "numba"):
        raise ValueError(f"unknown backend {backend!r}; choose auto, numpy or numba")
    if backend == "numpy" or (backend == "auto" and passages < NUMBA_PASSAGES):
        return "numpy"
    if find_spec("numba"):
        return "numba"
    if backend == "numba":
        raise RetrievalError("the numba backend needs numba: pip install numba, or choose backend='numpy'")
    return "numpy"


def save_matrix_extras(matrix: Matrix, parameters: BM25Parameters, directory: Path) -> None:
    """Write vocabulary and bm25s' parameter file beside the arrays."""
    vocabulary = json.dumps(matrix.vocabulary, ensure_ascii=False, separators=(",", ":"))
    (directory / VOCABULARY_FILE).write_text(vocabulary, encoding="utf-8")
    settings = {
        "k1": parameters.k1,
        "b": parameters.b,
        "delta": 0.5,
        "method": parameters.method,
        "idf_method": parameters.method,
        "dtype": "float32",
        "int_dtype": "int32",
        "num_docs": matrix.passages,
        "version": bm25s.__version__,
        "backend": "numpy",
    }
    (directory / PARAMETERS_FILE).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def load_matrix(directory: Path) -> Matrix:
    """Map the three arrays and read the vocabulary."""
    arrays = {
        # A plain array view over the map: indexing a np.memmap costs several times as much.
        name: np.asarray(np.load(directory / file, mmap_mode="r", allow_pickle=False))
        for name, file in MATRIX_FILES.items()
    }
    vocabulary = json.loads((directory / VOCABULARY_FILE).read_text(encoding="utf-8"))
    settings = json.loads((directory / PARAMETERS_FILE).read_text(encoding="utf-8"))
    return Matrix(vocabulary, arrays["data"], arrays["indices"], arrays["indptr"], settings["num_docs"])
