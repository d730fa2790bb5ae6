"""Bundled medical passages and four-option questions, written by hand from settled textbook knowledge.

``textbook.txt`` holds them in reading order: ``# title``, a passage, then questions as
``? question | right option | wrong option | wrong option | wrong option``. They are made to test and to teach
searching; they are no medical advice.
"""

from __future__ import annotations

import re
from functools import cache
from hashlib import blake2b
from pathlib import Path

from retrieval_index.types import Passage
from sorl_env.questions import Question, QuestionSet
from sorl_env.world.retriever import WorldRetriever

TEXTBOOK_PATH = Path(__file__).with_name("textbook.txt")
SPLITS = ("train", "dev", "test")
_LETTERS = "ABCD"


def medical_passages() -> list[Passage]:
    """All passages, in the order of the book."""
    return list(_book()[0])


def medical_questions(split: str) -> QuestionSet:
    """The questions of one split: "train" (about 60 %), "dev" or "test", or "all".

    All questions on one passage are in the same split. Their metadata holds ``options`` and
    ``supporting_ids``. Raises ValueError for an unknown split.
    """
    if split == "all":
        return QuestionSet(_book()[1], "medical/all")
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}; known: {', '.join((*SPLITS, 'all'))}")
    chosen = (q for q in _book()[1] if _split_of(q.metadata["supporting_ids"][0]) == split)
    return QuestionSet(chosen, f"medical/{split}")


@cache
def medical_retriever() -> WorldRetriever:
    """BM25 over the passages, built once in each process."""
    return WorldRetriever(_book()[0])


@cache
def _book() -> tuple[tuple[Passage, ...], tuple[Question, ...]]:
    passages: list[Passage] = []
    questions: list[Question] = []
    for entry in re.split(r"^# ", TEXTBOOK_PATH.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        title, text, *asked = [line for line in entry.splitlines() if line.strip()]
        name = re.sub(r"\W+", "-", title.lower()).strip("-")
        passages.append(Passage(name, title, text))
        for number, line in enumerate(asked, start=1):
            questions.append(_question(f"{name}/{number}", line, name))
    return tuple(passages), tuple(questions)


def _question(question_id: str, line: str, passage_id: str) -> Question:
    text, *options = [part.strip() for part in line.removeprefix("? ").split(" | ")]
    # the right option comes first in the book; its letter is drawn from the question's id
    ranked = sorted(options, key=lambda option: _digest(f"{question_id}:{option}"))
    letter = _LETTERS[ranked.index(options[0])]
    metadata = {"options": dict(zip(_LETTERS, ranked, strict=True)), "supporting_ids": [passage_id]}
    return Question(question_id, text, (letter,), "choice", metadata)


def _split_of(passage_id: str) -> str:
    place = _digest(passage_id)[0] / 256
    return "train" if place < 0.6 else "dev" if place < 0.8 else "test"


def _digest(text: str) -> bytes:
    return blake2b(text.encode(), digest_size=8).digest()
