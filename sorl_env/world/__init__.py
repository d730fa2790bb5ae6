"""The bundled world: a corpus of true facts, questions about it, and a retriever over it.

Nothing is downloaded and nothing but numpy is imported. ATTRIBUTION.md names the sources;
scripts/make_world.py makes the two data files.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from retrieval_index.types import Passage
from sorl_env.questions import Question, QuestionSet
from sorl_env.world.retriever import WorldRetriever

CORPUS_PATH = Path(__file__).with_name("corpus.jsonl.gz")
QUESTIONS_PATH = Path(__file__).with_name("questions.jsonl.gz")
SPLITS = ("train", "dev", "test", "test_unseen")

__all__ = [
    "CORPUS_PATH",
    "QUESTIONS_PATH",
    "SPLITS",
    "WorldRetriever",
    "unseen_passage_ids",
    "world_passages",
    "world_questions",
    "world_retriever",
]


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        yield from map(json.loads, lines)


@cache
def _corpus() -> tuple[tuple[Passage, ...], frozenset[str]]:
    passages, unseen = [], set()
    for row in _rows(CORPUS_PATH):
        passages.append(Passage(row["id"], row["title"], row["text"]))
        if row["unseen"]:
            unseen.add(row["id"])
    return tuple(passages), frozenset(unseen)


@cache
def _questions() -> dict[str, QuestionSet]:
    parts: dict[str, list[Question]] = {split: [] for split in SPLITS}
    for row in _rows(QUESTIONS_PATH):
        question = Question(row["id"], row["question"], tuple(row["golden_answers"]), row["kind"], row["metadata"])
        parts[row["split"]].append(question)
    return {split: QuestionSet(part, f"world/{split}") for split, part in parts.items()}


def world_passages() -> list[Passage]:
    """All passages, in corpus order."""
    return list(_corpus()[0])


def unseen_passage_ids() -> frozenset[str]:
    """Ids of the passages about entities that only `test_unseen` asks about.

    Pre-training leaves them out, so that a model cannot know those answers without searching.
    """
    return _corpus()[1]


def world_questions(split: str) -> QuestionSet:
    """The questions of one split: "train", "dev", "test", or "test_unseen".

    No entity that a `test_unseen` question speaks of occurs in a question of another split. Each
    question's metadata holds `hops`, `relations`, `entities`, and for scripted demonstrations one
    entry per hop of `supporting_ids`, `queries` and `hop_answers` (the last one answers the question).
    """
    try:
        return _questions()[split]
    except KeyError:
        raise ValueError(f"unknown split {split!r}; known: {', '.join(SPLITS)}") from None


@cache
def world_retriever() -> WorldRetriever:
    """BM25 over the corpus, built once in each process (under a second)."""
    return WorldRetriever(_corpus()[0])
