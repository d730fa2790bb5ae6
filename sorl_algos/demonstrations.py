"""Scripted demonstrations: episodes played by a rule instead of a model, for the supervised warm start.

A script sees what an agent would see, plus the question's own notes (``metadata``: a good query and the answer of
each hop). `MixedScript` plays well or badly by a coin, so that the warm start teaches the form of the game and all
of its moves, and leaves the choice between them to reinforcement learning.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sorl_algos.rollout.renderer import Renderer
from sorl_env.trajectory import Trajectory, Turn

# Candidate answers a careless reader would copy: capitalised phrases and numbers.
_SPAN = re.compile(r"(?:[^\W\d_a-z][\w'’.-]*(?: (?:of|the|and|de|da|do|del|la) (?=[^\W\d_a-z])| (?=[^\W\d_a-z]))?)+|\+?\d[\d.,]*\d|\d")


class Script(Protocol):
    """Chooses the action text of a turn from what stands on the table."""

    def __call__(self, question: Any, observation: str, turn: int, rng: random.Random) -> str: ...


@dataclass(frozen=True, slots=True)
class MixedScript:
    """Plays a question whose metadata holds ``queries`` and ``hop_answers``.

    Attributes:
        good_query: chance of the good query at a search; else a poor one (wrong subject, or a vague one).
        good_answer: chance of the right answer where it is known; else another span of what was read.
        guess: chance of answering without any search.
        max_searches: as in the environment; the answer comes at the latest after that many.
    """

    good_query: float = 1.0
    good_answer: float = 1.0
    guess: float = 0.0
    max_searches: int = 2
    foreign_subjects: tuple[str, ...] = ()

    def __call__(self, question: Any, observation: str, turn: int, rng: random.Random) -> str:
        queries, hops = question.metadata["queries"], question.metadata["hop_answers"]
        read = 0 if turn == 0 else hops_read(observation, hops, turn)
        if turn == 0 and rng.random() < self.guess:
            return answer_text(self._span(question.text, rng))
        if turn < min(len(queries), self.max_searches) and (turn == 0 or read >= turn):
            return search_text(self._query(queries[turn], rng))
        right = hops[-1] in observation
        if right and rng.random() < self.good_answer:
            return answer_text(hops[-1])
        return answer_text(self._span(observation, rng))

    def _query(self, query: str, rng: random.Random) -> str:
        if rng.random() < self.good_query:
            return query
        words = query.split()
        kind = rng.random()
        if kind < 0.4 and self.foreign_subjects:
            return f"{rng.choice(self.foreign_subjects)} {words[-1]}"
        if kind < 0.7 and len(words) > 1:
            return words[-1]
        return " ".join(rng.sample(words, max(1, len(words) // 2)))

    def _span(self, text: str, rng: random.Random) -> str:
        spans = [span.strip(" .,'") for span in _SPAN.findall(text)]
        spans = [span for span in spans if span and span not in ("Doc", "Title", "Question")]
        return rng.choice(spans) if spans else "unknown"


def search_text(query: str) -> str:
    """A search action. The blank lets a word be the same token here as in the middle of a sentence."""
    return f"<search> {query}</search>"


def answer_text(answer: str) -> str:
    """An answer action; see `search_text` for the blank."""
    return f"<answer> {answer}</answer>"


def hops_read(observation: str, hop_answers: Sequence[str], turn: int) -> int:
    """Hops whose answer stands in what the last search returned: ``turn`` if it does, else 0."""
    return turn if hop_answers[min(turn, len(hop_answers)) - 1] in observation else 0


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
                ids = tuple(encode(action, add_special_tokens=False))
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
