"""Scripted demonstrations: episodes played by a rule instead of a model, for the supervised warm start.

A script sees what an agent would see, plus the question's own notes (``metadata``: a good query and the answer of
each hop). `MixedScript` plays well or badly by a coin, so that the warm start teaches the form of the game and all
of its moves, and leaves the choice between them to reinforcement learning.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sorl_algos.rollout.renderer import Renderer
from sorl_env.trajectory import Trajectory, Turn

# Candidate answers a careless reader would copy: capitalised phrases and numbers.
_NAME = r"[^\W\d_a-z][\w'’.-]*"
_JOINT = r"(?: (?:of|the|and|de|da|do|del|la))? (?=[^\W\d_a-z])"
_SPAN = re.compile(rf"{_NAME}(?:{_JOINT}{_NAME})*|\+?\d[\d.,]*\d|\d")
# The subject in a passage's title: "Lima, Peru" and "Mercury (element)" give "Lima" and "Mercury".
_TITLE = re.compile(r"\(Title: ([^(),<]+?)(?: \(|,|\))")


class Script(Protocol):
    """Chooses the action text of a turn from what stands on the table."""

    def __call__(self, question: Any, observation: str, turn: int, rng: random.Random) -> str: ...


@dataclass(frozen=True, slots=True)
class MixedScript:
    """Plays a question whose metadata holds ``queries`` and ``hop_answers``, well or badly by a coin.

    A poor query leaves out what is asked about (or asks about something else); a poor answer is the title of the
    first passage (or another span of what was read).

    Attributes:
        good_query: chance of the good query at a search.
        good_answer: chance of the right answer where it was read.
        guess: chance of answering without any search.
        max_searches: as in the environment; the answer comes at the latest after that many.
        common_words: words that many queries share; a poor query keeps only those.
        foreign_subjects: names that queries about something else may use.
    """

    good_query: float = 1.0
    good_answer: float = 1.0
    guess: float = 0.0
    max_searches: int = 3
    common_words: frozenset[str] = frozenset()
    foreign_subjects: tuple[str, ...] = ()

    def __call__(self, question: Any, observation: str, turn: int, rng: random.Random) -> str:
        queries, hops = question.metadata["queries"], question.metadata["hop_answers"]
        if turn == 0 and rng.random() < self.guess:
            return answer_text(_some_span(question.text, rng))
        found = turn == 0 or hops[min(turn, len(hops)) - 1] in observation
        if turn < min(len(queries), self.max_searches) and found:
            return search_text(self._query(queries[turn], rng))
        if hops[-1] in observation and rng.random() < self.good_answer:
            return answer_text(hops[-1])
        title = _TITLE.search(observation)
        if title is not None and rng.random() < 0.8:
            return answer_text(title.group(1))
        return answer_text(_some_span(observation, rng))

    def _query(self, query: str, rng: random.Random) -> str:
        if rng.random() < self.good_query:
            return query
        vague = [word for word in query.split() if word in self.common_words]
        if self.foreign_subjects and (not vague or rng.random() < 0.25):
            return " ".join([rng.choice(self.foreign_subjects), *vague[-2:]])
        return " ".join(vague[-2:]) or "place"


def common_words(questions: Sequence[Any], share: float = 0.01) -> frozenset[str]:
    """Words that stand in at least this share of the questions' queries: those of relations, not of names."""
    queries = [query for question in questions for query in question.metadata["queries"]]
    counts = Counter(word for query in queries for word in set(query.split()))
    return frozenset(word for word, count in counts.items() if count >= share * len(queries))


def _some_span(text: str, rng: random.Random) -> str:
    spans = [span.strip(" .,'") for span in _SPAN.findall(text)]
    spans = [span for span in spans if span and span not in ("Doc", "Title", "Question")]
    return rng.choice(spans) if spans else "unknown"


def search_text(query: str) -> str:
    """A search action. The blank lets a word be the same token here as in the middle of a sentence."""
    return f"<search> {query}</search>"


def answer_text(answer: str) -> str:
    """An answer action; see `search_text` for the blank."""
    return f"<answer> {answer}</answer>"


def demonstrate(
    env: Any,
    renderer: Renderer,
    questions: Sequence[Any],
    script: Script,
    *,
    seed: int,
    rewrite: Callable[[Any, random.Random], Callable[[str], str]] | None = None,
    on_episodes: Callable[[int], None] | None = None,
) -> list[Trajectory]:
    """Plays the script through a vector environment; actions are encoded once, as if they had been sampled.

    Args:
        rewrite: makes, for one question, a function that rewrites every text of the episode (other names for its
            entities, say); the environment and the script never see the rewritten form.
    """
    trajectories: list[Trajectory] = []
    encode = renderer.tokenizer.encode
    for start in range(0, len(questions), env.num_envs):
        wave = list(questions[start : start + env.num_envs])
        rngs = [random.Random(f"{seed}:{start + slot}") for slot in range(len(wave))]
        forms = [
            rewrite(question, rng) if rewrite else _unchanged
            for question, rng in zip(wave, rngs, strict=True)
        ]
        names = [question.id for question in wave]
        observations, infos = env.reset(options={"question_ids": names + [None] * (env.num_envs - len(wave))})
        turns: list[list[Turn]] = [[] for _ in wave]
        live, turn = list(range(len(wave))), 0
        while live:
            actions = [""] * env.num_envs
            for slot in live:
                actions[slot] = script(wave[slot], observations[slot], turn, rngs[slot])
            shown, (observations, rewards, _, _, infos) = observations, env.step(actions)
            for slot in live:
                text, action = forms[slot](shown[slot]), forms[slot](actions[slot])
                ids = tuple(encode(action, add_special_tokens=False, split_special_tokens=True))
                turns[slot].append(
                    Turn(
                        observation_ids=tuple(renderer.first(text) if turn == 0 else renderer.next(text)),
                        action_ids=ids,
                        action_logprobs=(0.0,) * len(ids),
                        reward=float(rewards[slot]),
                        observation_text=text,
                        action_text=action,
                    )
                )
            live = [slot for slot in live if infos["stop"][slot] is None]
            turn += 1
        trajectories += [
            Trajectory(tuple(turns[slot]), question.id, question.id, 0, infos["stop"][slot], {})
            for slot, question in enumerate(wave)
        ]
        if on_episodes:
            on_episodes(len(wave))
    return trajectories


def _unchanged(text: str) -> str:
    return text


def renamed(others: Mapping[str, str]) -> Callable[[str], str]:
    """A rewriter that puts another name in place of each key, wherever it stands as whole words, in either case."""
    table = dict(others)
    for name, other in others.items():
        table.setdefault(name[:1].upper() + name[1:], other[:1].upper() + other[1:])
        table.setdefault(name[:1].lower() + name[1:], other[:1].lower() + other[1:])
    if not table:
        return _unchanged
    longest_first = sorted(table, key=len, reverse=True)
    pattern = re.compile("|".join(rf"(?<!\w){re.escape(name)}(?!\w)" for name in longest_first))
    return lambda text: pattern.sub(lambda match: table[match.group()], text)
