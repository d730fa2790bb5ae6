"""Rewards: what an episode earns, judged from the policy's own words alone.

A reward function gets the texts of the policy's turns and the question, never a prompt or an observation, so
a tag that stands in either of them cannot earn anything. It is called once, when the episode ends.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

from sorl_env.actions import CutText, elements, is_blank
from sorl_env.normalize import answer_tokens, normalize_answer
from sorl_env.questions import Question

__all__ = [
    "REWARDS", "RewardFn", "answer_of", "answer_scores", "contains", "contains_score", "exact_match",
    "exact_match_score", "format_valid", "normalize_answer", "resolve_reward", "token_f1", "token_f1_score",
]  # fmt: skip


class RewardFn(Protocol):
    """The reward of an episode. ``action_texts`` holds the policy's turns in order, as they were written."""

    def __call__(self, action_texts: Sequence[str], question: Question) -> float: ...


def answer_of(action_texts: Sequence[str]) -> str | None:
    """The answer that the policy gave, or None: the last complete ``<answer>`` that was reached.

    In a turn whose first action is a search, nothing after the search was reached. A turn that was cut gives
    none.
    """
    for text in reversed(action_texts):
        if isinstance(text, CutText):
            continue
        found = list(elements(text))
        if found and found[0].name == "answer":
            last = [element for element in found if element.name == "answer"][-1]
            return None if is_blank(last.content) else last.content.strip()
    return None


def exact_match(action_texts: Sequence[str], question: Question) -> float:
    """1.0 if the normalised answer equals a normalised gold answer, otherwise 0.0."""
    return _best(exact_match_score, action_texts, question)


def token_f1(action_texts: Sequence[str], question: Question) -> float:
    """The best token F1 of the answer against the gold answers, in 0 … 1."""
    return _best(token_f1_score, action_texts, question)


def contains(action_texts: Sequence[str], question: Question) -> float:
    """1.0 if a gold answer stands in the answer as whole words.

    Lenient (lists and negations pass): meant for evaluation, not for training.
    """
    return _best(contains_score, action_texts, question)


def answer_scores(action_texts: Sequence[str], question: Question) -> dict[str, float]:
    """What evaluation reports of every episode, whatever its reward: exact_match, f1, contains."""
    return {
        "exact_match": exact_match(action_texts, question),
        "f1": token_f1(action_texts, question),
        "contains": contains(action_texts, question),
    }


def exact_match_score(prediction: str, gold: str) -> float:
    """Equality after ``normalize_answer``; an empty prediction equals nothing."""
    normalized = normalize_answer(prediction)
    return float(bool(normalized) and normalized == normalize_answer(gold))


def token_f1_score(prediction: str, gold: str) -> float:
    """Harmonic mean of precision and recall over the multisets of normalised words (SQuAD's F1)."""
    predicted, wanted = Counter(answer_tokens(prediction)), Counter(answer_tokens(gold))
    common = (predicted & wanted).total()
    return 2.0 * common / (predicted.total() + wanted.total()) if common else 0.0


def contains_score(prediction: str, gold: str) -> float:
    """Whether the normalised gold stands in the normalised prediction, from word limit to word limit."""
    inside, outside = normalize_answer(gold), normalize_answer(prediction)
    if not inside:
        return 0.0
    if any(ord(char) >= 0x2E80 for char in inside):
        return float(inside in outside)  # scripts of East Asia put no blanks between words
    return float(f" {inside} " in f" {outside} ")


_SPLIT = re.compile(r"(</?(?:think|search|information|answer)>)")
_AFTER = {  # which block may follow which; None is the start
    None: ("think",),
    "think": ("search", "answer"),
    "search": ("information",),
    "information": ("think",),
    "answer": (),
}


def format_valid(transcript: str) -> bool:
    """Whether a whole transcript is (think search information)* think answer, with only white space between.

    No tag may stand inside a block; queries and answers must not be blank. One pass over the text.
    """
    pieces = _SPLIT.split(transcript)
    if pieces[0].strip() or len(pieces) == 1:
        return False
    last: str | None = None
    for start in range(1, len(pieces), 4):
        if start + 3 >= len(pieces) or pieces[start + 3].strip():
            return False
        opening, content, closing = pieces[start : start + 3]
        name = opening[1:-1]
        if name not in _AFTER[last] or closing != f"</{name}>":
            return False
        if name in ("search", "answer") and is_blank(content):
            return False
        last = name
    return last == "answer"


REWARDS: dict[str, RewardFn] = {
    "exact_match": exact_match,
    "token_f1": token_f1,
    "contains": contains,
}


def resolve_reward(reward: str | RewardFn) -> RewardFn:
    """The function named in REWARDS, or the function itself. Raises ValueError for an unknown name."""
    if isinstance(reward, str):
        try:
            return REWARDS[reward]
        except KeyError:
            raise ValueError(f"unknown reward {reward!r}; known: {', '.join(sorted(REWARDS))}") from None
    if not callable(reward):
        raise ValueError(
            f"reward must be a name or a function (action_texts, question) -> float, got {reward!r}"
        )
    return reward


def checked_reward(reward_fn: RewardFn, action_texts: Sequence[str], question: Question) -> float:
    """The reward as a finite float. Raises ValueError, naming question and function, for anything else."""
    value = float(reward_fn(action_texts, question))
    if not math.isfinite(value):
        name = getattr(reward_fn, "__name__", repr(reward_fn))
        raise ValueError(
            f"reward {name} gave {value} for question {question.id!r}; it must be a finite number"
        )
    return value


def _best(score: Callable[[str, str], float], action_texts: Sequence[str], question: Question) -> float:
    answer = answer_of(action_texts)
    if answer is None:
        return 0.0
    return max(score(answer, gold) for gold in question.answers)
