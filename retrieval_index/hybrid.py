"""Several retrievers as one: reciprocal-rank fusion."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

from retrieval_index.types import Hit, Passage, RetrievalError, Retriever


class HybridRetriever:
    """Fuses the rankings of several retrievers over one corpus.

    The score of a passage is the sum over the retrievers of weight / (k + rank), rank from 1, of those
    that found it (Cormack, Clarke and Büttcher, SIGIR 2009). Scores of the retrievers themselves, which
    have no common scale, do not count. A passage that no retriever found is no hit.
    """

    def __init__(
        self,
        retrievers: Sequence[Retriever],
        *,
        weights: Sequence[float] | None = None,
        k: float = 60.0,
        depth: int = 100,
    ) -> None:
        """Fuse these retrievers.

        Args:
            weights: one for each retriever, above 0; 1 by default.
            k: how little the first ranks stand out; 60 in the paper.
            depth: how far down each ranking is read (at least the `top_k` of a search).

        Raises:
            ValueError: no retriever, weights that do not fit, numbers out of range.
        """
        weights = [1.0] * len(retrievers) if weights is None else list(weights)
        if not retrievers:
            raise ValueError("fusion needs at least one retriever")
        if len(weights) != len(retrievers):
            raise ValueError(f"{len(weights)} weights for {len(retrievers)} retrievers; give one for each")
        if not all(isfinite(weight) and weight > 0 for weight in weights):
            raise ValueError(f"weights must be above 0, got {weights}")
        if not (isfinite(k) and k >= 0) or depth < 1:
            raise ValueError(f"k must be 0 or more and depth 1 or more, got {k} and {depth}")
        self._retrievers, self._weights, self._k, self._depth = list(retrievers), weights, k, depth

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Hit]]:
        """Return the `top_k` best passages of each query; see `Retriever.search`.

        Raises:
            RetrievalError: a retriever failed, or they index different corpora.
        """
        depth = max(self._depth, top_k)
        rankings = [retriever.search(queries, depth) for retriever in self._retrievers]
        for ranking in rankings:
            if len(ranking) != len(queries):
                raise RetrievalError(f"a retriever answered {len(ranking)} of {len(queries)} queries")
        return [self.fuse(list(own))[:top_k] for own in zip(*rankings, strict=True)]

    def fuse(self, rankings: Sequence[Sequence[Hit]]) -> list[Hit]:
        """Fuse one query's rankings, one for each retriever.

        Equal scores come in the order in which the passages are first met, down the first ranking, then
        down the second, and so on.
        """
        passages: dict[str, Passage] = {}
        scores: dict[str, float] = {}
        for weight, ranking in zip(self._weights, rankings, strict=True):
            for rank, hit in enumerate(ranking, start=1):
                passage = hit.passage
                if passages.setdefault(passage.id, passage) != passage:
                    raise RetrievalError(
                        f"passage {passage.id} has two texts: the fused indexes are of different corpora;"
                        " build them from the same one"
                    )
                scores[passage.id] = scores.get(passage.id, 0.0) + weight / (self._k + rank)
        best = sorted(scores, key=lambda name: -scores[name])  # stable: equal scores stay as met
        return [Hit(passages[name], scores[name]) for name in best]
