"""What a re-ranker learns from: for each question one passage that answers it among others that do not.

The questions come from files, the passages from an index: what it finds is what a re-ranker will have to
put in order. Labels are weak where only answers are known: a passage that holds one may speak of
something else. Standard library alone; training itself is in `reranker_training`.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retrieval_index.quality import first_with_answer, normal_words
from retrieval_index.rerank import pair_text
from retrieval_index.types import Hit, Retriever

_SEARCH_TOGETHER = 256


@dataclass(frozen=True, slots=True)
class TrainingQuestion:
    """A question and what tells the passages that answer it.

    Args:
        text: the question.
        answers: an answer-bearing passage holds one of them; yes and no are left out.
        positive_ids: passages known to answer it.
    """

    text: str
    answers: tuple[str, ...] = ()
    positive_ids: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class TrainingList:
    """A question, one passage that answers it and passages that do not, as the cross-encoder reads them.

    Args:
        place: of the positive (from 0) among all of these in the retriever's own order.
    """

    question: str
    positive: str
    negatives: tuple[str, ...]
    place: int = 0

    @property
    def texts(self) -> list[str]:
        """The positive, then the negatives."""
        return [self.positive, *self.negatives]


@dataclass(frozen=True, slots=True)
class Mined:
    """What became of the questions; the numbers add up to all of them."""

    lists: int
    unlabelled: int  # yes/no questions without positive_ids
    no_positive: int  # no hit answers the question
    no_negative: int  # every hit does, or it is the only one


def load_questions(paths: Iterable[str | os.PathLike[str]]) -> list[TrainingQuestion]:
    """Read questions, ``{"question", "golden_answers", "positive_ids"}`` a line; one of the last two will do.

    A question that comes again (in other case or punctuation) is read once, the first time.

    Raises:
        ValueError: a line that is no question; names file and line. No question at all.
        OSError: a file cannot be read.
    """
    found: dict[str, TrainingQuestion] = {}
    names = [Path(path) for path in paths]
    for path in names:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    question = _question(line, f"{path}, line {number}")
                    found.setdefault(normal_words(question.text), question)
    if not found:
        raise ValueError(f"there is no question in {', '.join(map(str, names)) or 'no file'}")
    return list(found.values())


def _question(line: str, where: str) -> TrainingQuestion:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: not JSON ({error})") from error
    if not isinstance(row, dict) or not isinstance(row.get("question"), str) or not row["question"].strip():
        raise ValueError(f'{where}: an object with a text under "question" is wanted')
    answers = _texts(row, "golden_answers", where)
    positives = _texts(row, "positive_ids", where)
    if not answers and not positives:
        raise ValueError(f'{where}: "golden_answers" or "positive_ids" are wanted, to tell which passages are right')
    telling = tuple(answer for answer in answers if normal_words(answer).strip() not in ("", "yes", "no"))
    return TrainingQuestion(row["question"].strip(), telling, frozenset(positives))


def _texts(row: dict[str, Any], key: str, where: str) -> list[str]:
    values = row.get(key) or []
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ValueError(f'{where}: "{key}" must be a list of texts')
    return values


def without(
    questions: Sequence[TrainingQuestion], excluded: Iterable[str], *, similarity: float = 0.8
) -> list[TrainingQuestion]:
    """The questions that are none of the excluded ones, and nearly none.

    Args:
        excluded: texts of questions, such as those of evaluation sets.
        similarity: a question goes when the words that it shares with an excluded one are at least this
            part of the words of both (Jaccard), case and punctuation aside; 1 for the same words alone.

    Raises:
        ValueError: similarity is not above 0 and up to 1.
    """
    if not 0 < similarity <= 1:
        raise ValueError(f"similarity must be above 0 and at most 1, got {similarity}")
    sets = [frozenset(normal_words(text).split()) for text in excluded]
    holders: dict[str, list[int]] = {}
    for number, words in enumerate(sets):
        for word in words:
            holders.setdefault(word, []).append(number)

    def near(question: TrainingQuestion) -> bool:
        own = frozenset(normal_words(question.text).split())
        # A near one lacks at most this many of our words, so it holds one of any group that is one larger.
        lacking = int((1 - similarity) * len(own) + 1e-9)
        rare = sorted(own, key=lambda word: (len(holders.get(word, ())), word))[: lacking + 1]
        candidates = {number for word in rare for number in holders.get(word, ())}
        return any(len(own & sets[n]) >= similarity * len(own | sets[n]) - 1e-9 for n in candidates)

    return [question for question in questions if not near(question)]


def split_held_out(
    questions: Sequence[TrainingQuestion], share: float
) -> tuple[list[TrainingQuestion], list[TrainingQuestion]]:
    """Set a share of the questions aside, by a hash of their words: the same ones on every run.

    Returns:
        Those to train on, and those held out.

    Raises:
        ValueError: the share is not from 0 to below 1.
    """
    if not 0 <= share < 1:
        raise ValueError(f"the held-out share must be from 0 to below 1, got {share}")
    aside = [hash_share(question.text) < share for question in questions]
    kept = [question for question, out in zip(questions, aside, strict=True) if not out]
    return kept, [question for question, out in zip(questions, aside, strict=True) if out]


def hash_share(text: str) -> float:
    """A number from 0 to below 1 that a question's words decide, evenly spread."""
    return int.from_bytes(hashlib.sha256(normal_words(text).encode()).digest()[:7]) / 2**56


def make_lists(
    questions: Sequence[TrainingQuestion],
    retriever: Retriever,
    *,
    depth: int = 50,
    negatives: int = 7,
    seed: int = 0,
) -> tuple[list[TrainingList], Mined]:
    """Search every question and label what is found.

    The positive is the first hit named in `positive_ids`, or else the first that holds an answer; a right
    passage that the retriever does not find cannot be re-ranked either. Negatives are drawn from the hits
    that are neither named nor hold an answer.

    Args:
        depth: hits looked at for each question.
        negatives: of each list at most.
        seed: of the draw, which depends on nothing else but the question.

    Raises:
        ValueError: depth below 2 or negatives below 1.
        RetrievalError: the retriever failed.
    """
    if depth < 2 or negatives < 1:
        raise ValueError(f"depth must be 2 or more and negatives 1 or more, got {depth} and {negatives}")
    lists: list[TrainingList] = []
    unlabelled = no_positive = no_negative = 0
    for question, hits in _searched(questions, retriever, depth):
        right = [rank for rank, hit in enumerate(hits) if _answers(question, hit)]
        named = [rank for rank in right if hits[rank].passage.id in question.positive_ids]
        if not question.answers and not question.positive_ids:
            unlabelled += 1
        elif not right:
            no_positive += 1
        elif len(right) == len(hits):
            no_negative += 1
        else:
            wrong = sorted(set(range(len(hits))) - set(right))
            drawn = random.Random(f"{seed} {question.text}").sample(wrong, min(negatives, len(wrong)))
            lists.append(_list(question, hits, (named or right)[0], sorted(drawn)))
    return lists, Mined(len(lists), unlabelled, no_positive, no_negative)


def _searched(
    questions: Sequence[TrainingQuestion], retriever: Retriever, depth: int
) -> Iterator[tuple[TrainingQuestion, list[Hit]]]:
    for start in range(0, len(questions), _SEARCH_TOGETHER):
        piece = questions[start : start + _SEARCH_TOGETHER]
        yield from zip(piece, retriever.search([question.text for question in piece], depth), strict=True)


def _answers(question: TrainingQuestion, hit: Hit) -> bool:
    return hit.passage.id in question.positive_ids or first_with_answer([hit], question.answers) is not None


def _list(question: TrainingQuestion, hits: Sequence[Hit], positive: int, negatives: Sequence[int]) -> TrainingList:
    return TrainingList(
        question=question.text,
        positive=pair_text(hits[positive].passage),
        negatives=tuple(pair_text(hits[rank].passage) for rank in negatives),
        place=sum(rank < positive for rank in negatives),
    )
