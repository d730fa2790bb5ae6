"""Rewards: what an episode earns, judged from the policy's own words alone.

A reward function gets the texts of the policy's turns and the question, never a prompt or an observation, so
a tag that stands in either of them cannot earn anything. It is called once, when the episode ends.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, TypeAlias

from sorl_env.actions import answer_of, is_blank
from sorl_env.choices import choice_of, gold_of, options_of
from sorl_env.judge import llm_judge
from sorl_env.legacy import mirage_legacy, search_r1_legacy
from sorl_env.normalize import normalize_answer
from sorl_env.questions import Question

__all__ = [
    "REWARDS", "RewardFn", "RewardSpec", "WeightedSum", "answer_of", "answer_scores", "choice_accuracy",
    "contains", "contains_score", "exact_match", "exact_match_score", "format_reward", "format_valid",
    "llm_judge", "math_equal", "mirage_legacy", "normalize_answer", "resolve_reward", "search_r1_legacy", "token_f1",
    "token_f1_score",
]  # fmt: skip


class RewardFn(Protocol):
    """The reward of an episode. ``action_texts`` holds the policy's turns in order, as they were written."""

    def __call__(self, action_texts: Sequence[str], question: Question) -> float: ...


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


def choice_accuracy(action_texts: Sequence[str], question: Question) -> float:
    """1.0 if the answer chooses the right option; one that chooses none, or two, is wrong (rules:
    ``choices``).
    """
    gold, answer = gold_of(question), answer_of(action_texts)
    return float(answer is not None and choice_of(answer, options_of(question)) == gold)


def math_equal(action_texts: Sequence[str], question: Question) -> float:
    """1.0 if the answer is mathematically equal to a gold answer (rules: ``math_answers``; needs
    math-verify).
    """
    from sorl_env.math_answers import math_equal_score

    return _best(math_equal_score, action_texts, question)


def format_reward(action_texts: Sequence[str], question: Question) -> float:
    """1.0 if the whole episode keeps the form (think search information)* think answer, whatever it
    answers.
    """
    if any("<information>" in text or "</information>" in text for text in action_texts):
        return 0.0  # only the environment writes that block
    return float(format_valid("<information>…</information>".join(action_texts)))


def answer_scores(action_texts: Sequence[str], question: Question) -> dict[str, float]:
    """What evaluation reports of every episode, whatever its reward.

    exact_match, f1, contains; for a question of kind "choice" also choice_accuracy and unparseable (1.0 where
    an answer was given that chooses no option). exact_match is choice_accuracy for one of kind "choice" (a letter and
    the option's text are the same answer), and mathematical equality for one of kind "math".
    """
    answer = answer_of(action_texts)
    scores = _text_scores(answer, question.answers)
    if question.kind == "choice":
        chosen = None if answer is None else choice_of(answer, options_of(question))
        scores["exact_match"] = scores["choice_accuracy"] = float(chosen == gold_of(question))
        scores["unparseable"] = float(answer is not None and chosen is None)
    elif question.kind == "math":
        scores["exact_match"] = math_equal(action_texts, question)
    return scores


def _text_scores(answer: str | None, golds: Sequence[str]) -> dict[str, float]:
    """The three scores that compare texts, best over the gold answers; the answer is normalised once."""
    predicted = "" if answer is None else normalize_answer(answer)
    f1 = inside = 0.0
    for gold in golds if predicted else ():
        wanted = _normal_gold(gold)
        if predicted == wanted:
            return {"exact_match": 1.0, "f1": 1.0, "contains": 1.0}
        f1, inside = max(f1, _f1(predicted, wanted)), max(inside, _contains(wanted, predicted))
    return {"exact_match": 0.0, "f1": f1, "contains": inside}


_FEW_WORDS = 16
_normal_gold = lru_cache(maxsize=65_536)(normalize_answer)  # gold answers come again with every episode of a question


def exact_match_score(prediction: str, gold: str) -> float:
    """Equality after ``normalize_answer``; an empty prediction equals nothing."""
    normalized = normalize_answer(prediction)
    return float(bool(normalized) and normalized == _normal_gold(gold))


def token_f1_score(prediction: str, gold: str) -> float:
    """Harmonic mean of precision and recall over the multisets of normalised words (SQuAD's F1)."""
    return _f1(normalize_answer(prediction), _normal_gold(gold))


def _f1(predicted: str, wanted: str) -> float:
    words, gold_words = predicted.split(), wanted.split()
    shared = set(words).intersection(gold_words)
    if not shared:
        return 0.0
    if len(words) <= _FEW_WORDS >= len(gold_words):  # nearly always, and several times faster than counters
        common = sum(min(words.count(word), gold_words.count(word)) for word in shared)
    else:
        common = (Counter(words) & Counter(gold_words)).total()
    return 2.0 * common / (len(words) + len(gold_words))


def contains_score(prediction: str, gold: str) -> float:
    """Whether the normalised gold stands in the normalised prediction, from word limit to word limit."""
    return _contains(_normal_gold(gold), normalize_answer(prediction))


def _contains(inside: str, outside: str) -> float:
    if not inside:
        return 0.0
    if not inside.isascii() and any(ord(char) >= 0x2E80 for char in inside):
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
    "choice_accuracy": choice_accuracy,
    "math_equal": math_equal,
    "format": format_reward,
    "llm_judge": llm_judge,
    "search_r1_legacy": search_r1_legacy,
    "mirage_legacy": mirage_legacy,
}

RewardSpec: TypeAlias = str | Mapping[str, float] | RewardFn


@dataclass(frozen=True, slots=True)
class WeightedSum:
    """The sum of named rewards, each times its weight."""

    parts: tuple[tuple[str, float], ...]

    def __post_init__(self) -> None:
        for name, weight in self.parts:
            _named(name)
            if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not math.isfinite(weight):
                raise ValueError(f"the weight of reward {name!r} must be a finite number, got {weight!r}")
        if not self.parts:
            raise ValueError(f"a weighted sum needs at least one reward; known: {', '.join(sorted(REWARDS))}")

    def __call__(self, action_texts: Sequence[str], question: Question) -> float:
        return math.fsum(weight * REWARDS[name](action_texts, question) for name, weight in self.parts)


def resolve_reward(reward: RewardSpec) -> RewardFn:
    """The reward function meant by ``reward``.

    A name in REWARDS; a sum of names with weights, as a mapping or as text (``"exact_match + 0.1*format"``);
    or a function ``(action_texts, question) -> float``. Raises ValueError for anything else, with the known
    names.
    """
    if isinstance(reward, str):
        terms = [_term(term) for term in reward.split("+")]
        return _named(terms[0][0]) if len(terms) == 1 and terms[0][1] == 1.0 else WeightedSum(tuple(terms))
    if isinstance(reward, Mapping):
        return WeightedSum(tuple(reward.items()))
    if not callable(reward):
        raise ValueError(f"reward must be a name or a function (action_texts, question) -> float, got {reward!r}")
    return reward


_NEED_OPTIONS = frozenset(("choice_accuracy", "mirage_legacy"))


def check_questions_fit(reward: RewardSpec, questions: Iterable[Question]) -> None:
    """Raises ValueError, naming reward and question, where a named reward cannot score one of the questions.

    choice_accuracy and mirage_legacy need options, and an answer that is one of them.
    """
    fn = reward if not isinstance(reward, (str, Mapping)) else resolve_reward(reward)
    parts = [name for name, _ in fn.parts] if isinstance(fn, WeightedSum) else [
        name for name, known in REWARDS.items() if known is fn
    ]  # fmt: skip
    for name in _NEED_OPTIONS.intersection(parts):
        for question in questions:
            try:
                gold_of(question)
            except ValueError as error:
                raise ValueError(f"reward {name} does not fit these questions: {error}") from None


def _term(term: str) -> tuple[str, float]:
    weight, star, name = term.rpartition("*")
    try:
        return name.strip(), float(weight) if star else 1.0
    except ValueError:
        raise ValueError(f"{term.strip()!r} is not a weighted reward; write it as 0.1*format") from None


def _named(name: str) -> RewardFn:
    try:
        return REWARDS[name]
    except KeyError:
        raise ValueError(f"unknown reward {name!r}; known: {', '.join(sorted(REWARDS))}") from None


def checked_reward(reward_fn: RewardFn, action_texts: Sequence[str], question: Question) -> float:
    """The reward as a finite float. Raises ValueError, naming question and function, for anything else."""
    value = float(reward_fn(action_texts, question))
    if not math.isfinite(value):
        name = getattr(reward_fn, "__name__", repr(reward_fn))
        raise ValueError(f"reward {name} gave {value} for question {question.id!r}; it must be a finite number")
    return value


def _best(score: Callable[[str, str], float], action_texts: Sequence[str], question: Question) -> float:
    return _best_of(score, answer_of(action_texts), question)


def _best_of(score: Callable[[str, str], float], answer: str | None, question: Question) -> float:
    return 0.0 if answer is None else max(score(answer, gold) for gold in question.answers)
