"""Read again what another retriever found, pair by pair, with a cross-encoder."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Any, Protocol

from retrieval_index.bm25 import check_search
from retrieval_index.encoder import length_batches, unusable
from retrieval_index.types import Hit, Passage, RetrievalError, Retriever

# Short names of cross-encoders; any other hub name or directory is taken as it is.
RERANKERS = {
    "minilm": "cross-encoder/ms-marco-MiniLM-L6-v2",
    "bge": "BAAI/bge-reranker-base",
    "medcpt": "ncbi/MedCPT-Cross-Encoder",
}


class PairScorer(Protocol):
    """Says how well passages fit queries; higher is better."""

    def score(self, pairs: Sequence[tuple[str, str]]) -> Sequence[float]:
        """One number for each pair of query and passage text."""


class CrossEncoderScorer:
    """A `PairScorer` through the cross-encoders of sentence-transformers."""

    def __init__(
        self, model: str = "minilm", *, device: str | None = None, max_tokens: int = 512, dtype: str | None = None
    ) -> None:
        """Load a model.

        Args:
            model: a name of `RERANKERS`, of the hub, or a directory.
            device: "cpu", "cuda:0" ...; None: a GPU where there is one.
            max_tokens: of a pair; what is longer is cut.
            dtype: "float32" or "bfloat16"; None: bfloat16 on a GPU that has it, float32 elsewhere.

        Raises:
            RuntimeError: sentence-transformers is not installed, or cannot be imported; says why.
            RetrievalError: the model cannot be loaded.
        """
        try:
            import torch
            from sentence_transformers import CrossEncoder
        except ImportError as error:
            raise unusable("re-ranking", "sentence-transformers", error) from error
        name = RERANKERS.get(model, model)
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        if dtype is None:
            dtype = "bfloat16" if device.startswith("cuda") and torch.cuda.is_bf16_supported() else "float32"
        try:
            self._model: Any = CrossEncoder(
                name,
                max_length=max_tokens,
                device=device,
                num_labels=1,
                model_kwargs={"dtype": getattr(torch, dtype)},
            )
        except (OSError, ValueError) as error:
            raise RetrievalError(f"the cross-encoder {name} cannot be loaded ({error}); check its name") from error

    def score(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        """One number for each pair; pairs of like length are read together."""
        scores = [0.0] * len(pairs)
        for rows in length_batches([len(query) + len(text) for query, text in pairs], most=128):
            batch = [pairs[row] for row in rows]
            found = self._model.predict(batch, batch_size=len(batch), show_progress_bar=False)
            for row, value in zip(rows, found, strict=True):
                scores[row] = float(value)
        return scores


class RerankRetriever:
    """The best of a retriever's hits, in a scorer's order.

    A passage that the retriever did not find is no hit, whatever the scorer would say of it. Scores are
    the scorer's; equal ones stay in the retriever's order.
    """

    def __init__(self, retriever: Retriever, scorer: PairScorer, *, depth: int = 50) -> None:
        """Re-rank a retriever.

        Args:
            depth: hits read again for each query (at least the `top_k` of a search).

        Raises:
            ValueError: depth below 1.
        """
        if depth < 1:
            raise ValueError(f"depth must be 1 or more, got {depth}")
        self._retriever, self._scorer, self._depth = retriever, scorer, depth

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Hit]]:
        """Return the `top_k` best passages of each query; see `Retriever.search`.

        Raises:
            RetrievalError: the retriever failed, or the scorer gave something else than numbers.
        """
        check_search(queries, top_k)
        found = self._retriever.search(queries, max(self._depth, top_k))
        if len(found) != len(queries):
            raise RetrievalError(f"the retriever answered {len(found)} of {len(queries)} queries")
        pairs = [
            (query, pair_text(hit.passage))
            for query, hits in zip(queries, found, strict=True)
            for hit in hits
        ]
        scores = [float(score) for score in self._scorer.score(pairs)] if pairs else []
        if len(scores) != len(pairs) or not all(map(isfinite, scores)):
            raise RetrievalError(f"the cross-encoder gave {len(scores)} scores for {len(pairs)} pairs, or no numbers")
        own = iter(scores)
        return [_sorted(hits, [next(own) for _ in hits])[:top_k] for hits in found]


def pair_text(passage: Passage) -> str:
    """A passage as a cross-encoder reads it: title, space, text."""
    return f"{passage.title} {passage.text}".strip()


def _sorted(hits: Sequence[Hit], scores: Sequence[float]) -> list[Hit]:
    order = sorted(range(len(hits)), key=lambda rank: -scores[rank])  # stable
    return [Hit(hits[rank].passage, scores[rank]) for rank in order]
