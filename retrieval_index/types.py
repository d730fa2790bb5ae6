"""The retrieval seam: what every index, wrapper, client and environment agrees on.

Nothing here imports anything but the standard library, so that an environment can speak of
passages and hits without installing a search library.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class Passage:
    """One unit of a corpus.

    Args:
        id: name of the passage, unique in its corpus, not empty.
        title: title of the page or article it was cut from; may be empty.
        text: the passage itself, without the title; may be empty.

    Raises:
        ValueError: the id is empty.
    """

    id: str
    title: str
    text: str

    def __post_init__(self) -> None:
        if not self.id:
            raise ValueError(f"a passage needs an id that is not empty (title {self.title!r})")

    @property
    def contents(self) -> str:
        """Title and text in the one-string form of Search-R1's corpora: ``"Title"`` newline text."""
        return f'"{self.title}"\n{self.text}'


@dataclass(frozen=True, slots=True)
class Hit:
    """A passage that a query found, with the score the index gave it (higher is better)."""

    passage: Passage
    score: float


@runtime_checkable
class Retriever(Protocol):
    """Anything that answers a batch of queries with scored passages."""

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Hit]]:
        """Return one list for each query, best hit first, at most `top_k` long.

        A query that matches nothing gets an empty list; it is never filled up with passages that
        do not match.

        Raises:
            RetrievalError: the search failed. Failure is never reported as a passage.
        """
        ...


class RetrievalError(RuntimeError):
    """A search or an index that cannot be used. The message names the thing and the remedy."""
