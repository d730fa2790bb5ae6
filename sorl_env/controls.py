"""Retrievers that answer the question "what does the search bring?": controls of an evaluation.

| control | what a search finds |
|---|---|
| ``EmptyIndex`` | nothing |
| ``RandomPassages`` | passages drawn from the whole corpus by a hash, but none that the question's row names |
| ``OraclePassages`` | the passages that the question's row names, whatever was asked |

The last two know the question from the ``Query`` that an episode hands on. What they give depends on the question and
the number of the search alone: neither on batches, nor on the model, nor on what was asked before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Protocol

import numpy as np

from retrieval_index.types import Hit, Passage, RetrievalError, Retriever
from sorl_env.actions import Query
from sorl_env.questions import Question

PASSAGE_FIELDS = ("positive_ids", "supporting_ids", "supporting_pmids", "pmids", "pmid")


class Passages(Protocol):
    """A sequence of passages that may be too large for memory."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int, /) -> Passage: ...


class RetrievalFailed(RuntimeError):
    """A search failed, and with it an evaluation, which must not count it as a wrong answer."""


class EmptyIndex:
    """Finds nothing."""

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Hit]]:
        return [[] for _ in queries]


class RandomPassages:
    """Finds ``top_k`` different passages, drawn uniformly without looking at the query.

    Args:
        passages: the corpus.
        named: for each question id the ids of passages that must not be drawn (see ``named_passages``).
        seed: another seed draws others.

    Raises ValueError for an empty corpus.
    """

    def __init__(
        self, passages: Passages, named: Mapping[str, Sequence[str]] | None = None, *, seed: int = 0
    ) -> None:
        if not len(passages):
            raise ValueError("random passages need a corpus with at least one passage")
        self.passages, self.named, self.seed = passages, dict(named or {}), seed

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Hit]]:
        return [self._one(query, top_k) for query in queries]

    def _one(self, query: str, top_k: int) -> list[Hit]:
        whose, number = (query.question_id, query.number) if isinstance(query, Query) else (query, 0)
        digest = blake2b(f"{self.seed}:{number}:{whose}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
        generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
        unwanted = set(self.named.get(whose, ()))
        found: dict[str, Hit] = {}
        # one draw more for each passage that may have to be passed over
        wanted = min(len(self.passages), top_k + len(unwanted))
        for row in generator.choice(len(self.passages), size=wanted, replace=False):
            passage = self.passages[int(row)]
            if passage.id not in unwanted and len(found) < top_k:
                found[passage.id] = Hit(passage, 0.0)
        return list(found.values())


class OraclePassages:
    """Finds the passages that the question's row names, in the row's order.

    Where they are more than ``top_k``, search number n begins at place n * top_k, round and round: a question of two
    hops that gets one passage a search sees the first, then the second.

    Args:
        passages: for each question id its passages, best first.
    """

    def __init__(self, passages: Mapping[str, Sequence[Passage]]) -> None:
        self.passages = dict(passages)

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Hit]]:
        return [self._one(query, top_k) for query in queries]

    def _one(self, query: str, top_k: int) -> list[Hit]:
        if not isinstance(query, Query):
            raise TypeError("the oracle must know whose question it answers; hand it the query of an Episode")
        own = self.passages.get(query.question_id, ())
        if not own:
            raise RetrievalError(
                f"the oracle has no passage for question {query.question_id!r}; leave out questions that name none"
            )
        start = 0 if len(own) <= top_k else query.number * top_k % len(own)
        turned = [*own[start:], *own[:start]]
        return [Hit(passage, 1.0 / rank) for rank, passage in enumerate(turned[:top_k], start=1)]


class Unfailing:
    """Hands on what another retriever finds; turns its failure into one that ends the evaluation.

    An environment that hears of a RetrievalError ends the episode and goes on, which is right for training.
    """

    def __init__(self, retriever: Retriever) -> None:
        self.retriever = retriever

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Hit]]:
        try:
            return self.retriever.search(queries, top_k)
        except RetrievalError as error:
            raise RetrievalFailed(f"{error}; nothing is lost: the same command goes on from here") from error


def named_passages(question: Question) -> tuple[str, ...]:
    """Ids of the passages that a question's row names (``PASSAGE_FIELDS``), each once, in the row's order.

    A PubMed number stands for the passage of that id and for ``pmid-NUMBER``, as corpora of abstracts call it.
    """
    for field in PASSAGE_FIELDS:
        value = question.metadata.get(field)
        if value:
            ids = [value] if isinstance(value, (str, int)) else value
            spelt = ("{}", "pmid-{}") if "pmid" in field else ("{}",)
            return tuple(dict.fromkeys(form.format(one) for one in ids for form in spelt))
    return ()


def find_named(questions: Iterable[Question], passages: Iterable[Passage]) -> dict[str, list[Passage]]:
    """For each question that names passages of the corpus: those passages. One pass over the corpus.

    A question none of whose passages is there is left out.
    """
    named = {question.id: named_passages(question) for question in questions}
    wanted = {one for ids in named.values() for one in ids}
    found = {passage.id: passage for passage in passages if passage.id in wanted}
    kept = {question_id: [found[one] for one in ids if one in found] for question_id, ids in named.items()}
    return {question_id: own for question_id, own in kept.items() if own}


def each(passages: Passages) -> Iterator[Passage]:
    """The passages one after another."""
    return (passages[row] for row in range(len(passages)))
