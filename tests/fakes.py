"""Fakes that implement the seams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from retrieval_index.types import Hit, Passage, RetrievalError


class FakeRetriever:
    """A Retriever that knows its answers: ``table[query]``, or else passages sharing a word with the query.

    ``calls`` records ``(queries, top_k)`` of every search; with ``fails`` every search raises RetrievalError.
    """

    def __init__(
        self,
        table: Mapping[str, Sequence[Passage]] | None = None,
        passages: Sequence[Passage] = (),
        fails: bool = False,
    ) -> None:
        self.table = dict(table or {})
        self.passages = tuple(passages)
        self.fails = fails
        self.calls: list[tuple[list[str], int]] = []

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Hit]]:
        self.calls.append((list(queries), top_k))
        if self.fails:
            raise RetrievalError("http://secret-host:8000 refused the connection")
        return [self._one(query)[:top_k] for query in queries]

    def _one(self, query: str) -> list[Hit]:
        if query in self.table:
            return [Hit(passage, 1.0 / rank) for rank, passage in enumerate(self.table[query], start=1)]
        words = set(query.lower().split())
        scored = [
            Hit(p, float(len(words & set(f"{p.title} {p.text}".lower().split())))) for p in self.passages
        ]
        return sorted((hit for hit in scored if hit.score > 0), key=lambda hit: -hit.score)
