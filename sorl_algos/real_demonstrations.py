"""Demonstrations on questions that nobody wrote queries for: the script searches, names what it read, and answers.

A question is used where one of the passages that its row names (``positive_ids``, ``pmid`` ...) is among the hits of
a query made of the question's own words, and, unless it has options, where the shown text of the passages holds an
accepted answer. Everything else is left out.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from sorl_algos.demonstrations import answer_text, demonstrate, search_text
from sorl_algos.rollout.renderer import Renderer
from sorl_env.trajectory import Trajectory

LONGEST_ANSWER_WORDS = 6
_NOT_SEARCHED = frozenset(
    "a an the of in on at to for from by with as and or is are was were be been do does did has have had will would "
    "can could what which who whom whose when where why how many much that this there it its their his her he she "
    "they you your i".split()
)
_HEADER = re.compile(r"(?:\n|>)Doc \d+(?:\(Title: (?P<title>.*?)\))? (?=\S)")
_UNKNOWN = "unknown"


def in_dev(question_id: str, *, share: float, seed: int) -> bool:
    """Whether a question belongs to the held-out part: a hash of seed and id below ``share``."""
    digest = blake2b(f"{seed}:{question_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64


def keywords(text: str) -> str:
    """The question's words without its function words; the whole question where nothing else is left."""
    words = re.findall(r"\w[\w'’.-]*\w|\w", text)
    kept = [word for word in words if word.lower() not in _NOT_SEARCHED]
    return " ".join(kept) or " ".join(words)


Named = Callable[[Any], Sequence[str]]
"""Ids of the passages that a question's row names."""


def positive_ids(question: Any) -> Sequence[str]:
    """The row's ``positive_ids``."""
    return question.metadata.get("positive_ids", ())


def find_queries(
    questions: Sequence[Any], retriever: Any, *, top_k: int, named: Named = positive_ids
) -> dict[str, str]:
    """For each question that has one, a query whose first ``top_k`` hits hold a passage that its row names.

    Tried are the question's keywords, then the question as it stands. One retriever call for each.
    """
    found: dict[str, str] = {}
    left = [question for question in questions if named(question)]
    for make in (keywords, lambda text: text.rstrip(" ?")):
        queries = [make(question.text) for question in left]
        for question, query, hits in zip(left, queries, retriever.search(queries, top_k), strict=True):
            if {hit.passage.id for hit in hits} & set(named(question)):
                found[question.id] = query
        left = [question for question in left if question.id not in found]
    return found


@dataclass(frozen=True, slots=True)
class Reading:
    """Where an observation holds the answer: the answer as it stands there, and the passage's title ("": none)."""

    answer: str
    title: str


def read(observation: str, question: str, answers: Iterable[str]) -> Reading | None:
    """The place with an accepted answer whose sentence shares most words with the question; None: there is none.

    Long answers are left out, and "yes" and "no", which no place in a passage gives.

    Args:
        observation: passages as the environment shows them.
    """
    answers = [a for a in answers if len(a.split()) <= LONGEST_ANSWER_WORDS and a.lower() not in ("yes", "no")]
    asked = {word.lower() for word in keywords(question).split()}
    best: tuple[int, Reading] | None = None
    for title, text in _passages(observation):
        for sentence in re.split(r"(?<=[.!?]) |\n", text):
            shared = len(asked & {word.lower() for word in re.findall(r"\w[\w'’.-]*\w|\w", sentence)})
            for answer in answers:
                match = re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", sentence, re.IGNORECASE)
                if match and (best is None or shared > best[0]):
                    best = shared, Reading(match.group(), title)
    return best[1] if best else None


def _passages(observation: str) -> list[tuple[str, str]]:
    """Title and text of each passage of an observation."""
    starts = list(_HEADER.finditer(observation))
    ends = [start.start() for start in starts[1:]] + [len(observation)]
    return [
        (start["title"] or "", observation[start.end() : end].replace("</information>", ""))
        for start, end in zip(starts, ends, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class ReadingScript:
    """Searches once with the question's query, then names the passage and gives the answer as it stands there.

    A question with options gets the right option's text.

    The step between names passage and answer and quotes no more. A causal model knows of a token of the passage what
    stands before it (the question, and the sentence so far), so it can find where an answer begins; where a quotation
    around the answer begins it cannot.
    """

    queries: Mapping[str, str]

    def __call__(self, question: Any, observation: str, turn: int, rng: random.Random) -> str:
        if turn == 0:
            return f"<think>I should look this up.</think>{search_text(self.queries[question.id])}"
        if options := question.metadata.get("options"):
            chosen = options[question.answers[0]]
            return f"<think>The passage suggests {chosen}.</think>{answer_text(chosen)}"
        found = read(observation, question.text, question.answers)
        if found is None:
            return answer_text(_UNKNOWN)
        where = found.title or "the passage"
        return f"<think>According to {where}, it is {found.answer}.</think>{answer_text(found.answer)}"


def real_demonstrations(
    env: Any,
    renderer: Renderer,
    questions: Sequence[Any],
    retriever: Any,
    *,
    top_k: int,
    seed: int,
    max_tokens: int,
    named: Named = positive_ids,
    on_episodes: Callable[[int], None] | None = None,
) -> list[Trajectory]:
    """Plays every question that a query was found for; keeps the episodes that were rewarded in full and are short.

    Args:
        env: a vector environment over these questions, whose ``top_k`` is the one given here.
        max_tokens: longer episodes are left out.
    """
    queries = find_queries(questions, retriever, top_k=top_k, named=named)
    usable = [question for question in questions if question.id in queries]
    played = demonstrate(env, renderer, usable, ReadingScript(queries), seed=seed, on_episodes=on_episodes)
    return [
        item for item in played if len(item.turns) == 2 and item.turns[-1].reward == 1.0 and _tokens(item) <= max_tokens
    ]


def _tokens(trajectory: Trajectory) -> int:
    return sum(len(turn.observation_ids) + len(turn.action_ids) for turn in trajectory.turns)
