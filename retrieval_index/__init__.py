"""Build, open, serve and query a passage index. Knows nothing of reinforcement learning.

Only the types load at once; everything else loads on first use, so that importing this package
costs nothing and needs no search library.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from retrieval_index.types import Hit, Passage, RetrievalError, Retriever

if TYPE_CHECKING:
    from retrieval_index.analysis import BM25Parameters
    from retrieval_index.build import build_bm25
    from retrieval_index.build_dense import build_dense
    from retrieval_index.client import RetrieverClient
    from retrieval_index.corpus import read_corpus
    from retrieval_index.lucene import build_lucene
    from retrieval_index.opening import open_index

_HOME = {
    "BM25Parameters": "retrieval_index.analysis",
    "build_bm25": "retrieval_index.build",
    "build_dense": "retrieval_index.build_dense",
    "build_lucene": "retrieval_index.lucene",
    "read_corpus": "retrieval_index.corpus",
    "RetrieverClient": "retrieval_index.client",
    "open_index": "retrieval_index.opening",
}

__all__ = [
    "BM25Parameters",
    "Hit",
    "Passage",
    "RetrievalError",
    "Retriever",
    "RetrieverClient",
    "build_bm25",
    "build_dense",
    "build_lucene",
    "open_index",
    "read_corpus",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
