"""Engines of the asynchronous seam that do as they are told, and the small game played by them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import torch

from sorl_algos.rollout.async_source import AsyncSource
from sorl_algos.rollout.engine import Completion, Sampling
from sorl_algos.rollout.renderer import Renderer
from sorl_env.questions import Question, QuestionSet
from tests.fakes import ScriptedEngine
from tests.sorl_algos.small_game import make_env

TEN = QuestionSet(Question(f"t{number}", f"What is {number}?", ("x",)) for number in range(10))


Before = Callable[[str, int], Awaitable[None]]


class Weights:
    """A policy without weights."""

    lm = torch.nn.Module()


class AsyncScripted(ScriptedEngine):
    """ScriptedEngine with `agenerate`. ``before`` is awaited with the prompt's text and seed before each answer.

    ``order`` holds the seeds in the order in which they were answered, ``versions_seen`` the version at the start
    and at the end of each answer.
    """

    def __init__(self, tokenizer: Any, script: Any, before: Before | None = None) -> None:
        super().__init__(tokenizer, script)
        self.before = before
        self.order: list[int] = []
        self.versions_seen: list[tuple[int, int]] = []

    async def agenerate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        begun = self.versions[-1] if self.versions else 0
        assert sampling.seeds and len(sampling.seeds) == 1
        if self.before:
            await self.before(self.tokenizer.decode(list(prompt_ids)), sampling.seeds[0])
        self.order.append(sampling.seeds[0])
        self.versions_seen.append((begun, self.versions[-1] if self.versions else 0))
        [completion] = self.generate([prompt_ids], sampling)
        return completion


def shuffled(seed: int, longest_s: float = 0.004) -> Before:
    """Waits that put the answers into an order of their own for each ``seed``."""

    async def before(prompt: str, request: int) -> None:
        await asyncio.sleep(longest_s * random.Random(f"{seed}:{request}").random())

    return before


def async_source(
    tokenizer: Any, engine: Any, *, questions: QuestionSet = TEN, slots: int = 8, **changes: Any
) -> AsyncSource:
    """Two questions an update, two episodes each."""
    settings: dict[str, Any] = {"questions_per_update": 2, "group_size": 2, "seed": 0, "window_ms": 0.5}
    env = changes.pop("env", None) or make_env(slots, questions=questions)
    return AsyncSource(
        env, engine, Renderer(tokenizer), questions, sampling=Sampling(max_tokens=6), **settings | changes
    )
