"""Clocks at the seams: where the time of a rollout goes, measured without touching what is between the seams."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import gymnasium

import sorl_env  # noqa: F401  (registers the environments)
from sorl_algos.rollout.collect import collect
from sorl_algos.rollout.engine import Completion, Sampling
from sorl_algos.rollout.renderer import Renderer
from sorl_algos.rollout.streaming import stream

PARTS = ("engine", "retriever", "environment", "glue")


@dataclass
class Clock:
    """Seconds of each part.

    In lockstep one part follows another, and glue is what is left of the wall's time. In a stream, "engine" is the
    time in which at least one completion was under way, the retriever works beside it, and glue is what the
    coroutines of the episodes did themselves, from where one is resumed to where it waits again.
    """

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    wall: float = 0.0
    cpu: float = 0.0
    tokens: int = 0
    episodes: int = 0
    asked: list[tuple[list[int], int, int]] = field(default_factory=list)
    """Prompt, seed and budget of every completion."""
    _resumed: dict[Any, float] = field(default_factory=dict)
    _under_way: int = 0
    _since: float = 0.0

    @contextmanager
    def on(self, part: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            passed = time.perf_counter() - began
            self.seconds[part] += passed
            task = _task()
            if part == "environment" and task in self._resumed:
                self._resumed[task] += passed  # not glue

    @contextmanager
    def run(self) -> Iterator[None]:
        began, spent = time.perf_counter(), time.process_time()
        yield
        self.wall, self.cpu = time.perf_counter() - began, time.process_time() - spent

    def finish(self, trajectories: Sequence[Any], *, lockstep: bool) -> Clock:
        self.tokens = sum(len(turn.action_ids) for item in trajectories for turn in item.turns)
        self.episodes = len(trajectories)
        if lockstep:
            self.seconds["environment"] -= self.seconds["retriever"]  # one call of the vector environment holds both
            self.seconds["glue"] = self.wall - sum(self.seconds[part] for part in PARTS[:3])
        return self

    def resume(self) -> None:
        """The coroutine of an episode goes on."""
        if (task := _task()) is not None:
            self._resumed.setdefault(task, time.perf_counter())

    def wait(self) -> None:
        """It waits, or is over."""
        if (began := self._resumed.pop(_task(), None)) is not None:
            self.seconds["glue"] += time.perf_counter() - began

    def ask(self) -> None:
        if self._under_way == 0:
            self._since = time.perf_counter()
        self._under_way += 1

    def answered(self) -> None:
        self._under_way -= 1
        if self._under_way == 0:
            self.seconds["engine"] += time.perf_counter() - self._since


def _task() -> Any:
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None  # no loop in this thread: lockstep, or the retriever's


class TimedEngine:
    """An engine, and the time it took."""

    def __init__(self, engine: Any, clock: Clock) -> None:
        self.engine, self.clock = engine, clock

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Completion]:
        assert sampling.seeds and sampling.budgets
        self.clock.asked += zip(map(list, prompts), sampling.seeds, sampling.budgets, strict=True)
        with self.clock.on("engine"):
            return self.engine.generate(prompts, sampling)

    async def agenerate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        self.clock.wait()
        self.clock.ask()
        try:
            return await self.engine.agenerate(prompt_ids, sampling)
        finally:
            self.clock.answered()
            self.clock.resume()

    def update_weights(self, weights: Any, version: int) -> None:
        self.engine.update_weights(weights, version)


class TimedRetriever:
    def __init__(self, retriever: Any, clock: Clock) -> None:
        self.retriever, self.clock = retriever, clock

    def search(self, queries: Sequence[str], top_k: int) -> Any:
        with self.clock.on("retriever"):
            return self.retriever.search(queries, top_k)


class TimedEnv:
    """A vector environment, as `collect` and `stream` see it."""

    def __init__(self, env: Any, clock: Clock) -> None:
        self.env, self.clock = env, clock
        self.num_envs, self.stop_strings = env.num_envs, env.stop_strings
        self.search = env.search

    def reset(self, **options: Any) -> Any:
        with self.clock.on("environment"):
            return self.env.reset(**options)

    def step(self, actions: Sequence[str]) -> Any:
        with self.clock.on("environment"):
            return self.env.step(actions)

    def episode(self, question_id: str) -> TimedEpisode:
        self.clock.resume()
        with self.clock.on("environment"):
            return TimedEpisode(self.env.episode(question_id), self.clock)


class TimedEpisode:
    def __init__(self, episode: Any, clock: Clock) -> None:
        self.episode, self.clock = episode, clock

    def begin(self) -> str:
        with self.clock.on("environment"):
            return self.episode.begin()

    def query(self, action: str) -> Any:
        with self.clock.on("environment"):
            query = self.episode.query(action)
        if query is not None:
            self.clock.wait()
        return query

    def advance(self, action: str, hits: Any = None, error: bool = False) -> Any:
        self.clock.resume()
        with self.clock.on("environment"):
            return self.episode.advance(action, hits, error)


def play(
    world: Mapping[str, Any], engine: Any, tokenizer: Any, settings: dict[str, Any], *, slots: int, lockstep: bool
) -> Clock:
    """Every question of the world once; ``settings`` are those of `collect` and `stream`."""
    clock = Clock()
    timed = {"retriever": TimedRetriever(world["retriever"], clock)}
    env = gymnasium.make_vec("SearchQA-v0", num_envs=slots, **{**world, **timed})
    arguments: Any = (TimedEnv(env, clock), TimedEngine(engine, clock), Renderer(tokenizer), list(world["questions"]))
    with clock.run():
        if lockstep:
            trajectories = collect(*arguments, **settings)
        else:
            trajectories = asyncio.run(stream(*arguments, **settings, on_episodes=lambda count: clock.wait()))
    return clock.finish(trajectories, lockstep=lockstep)


def row(name: str, clock: Clock, *, lockstep: bool) -> str:
    """One line of the table of episodes."""
    shares = " | ".join(f"{100 * clock.seconds[part] / clock.wall:.1f}" for part in PARTS)
    style = "lockstep" if lockstep else "streaming"
    rates = f"{clock.tokens / clock.wall:,.0f} | {clock.episodes / clock.wall:.2f}"
    return f"| {name} | {style} | {rates} | {clock.tokens:,} | {shares} |"


def medians(tasks: Mapping[str, Callable[[], Any]], rounds: int, seconds: Callable[[Any], float]) -> dict[str, Any]:
    """The result with the median time of each task; the tasks take turns."""
    results: dict[str, list[Any]] = {name: [] for name in tasks}
    for _ in range(rounds):
        for name, task in tasks.items():
            results[name].append(task())
    return {name: sorted(given, key=seconds)[(rounds - 1) // 2] for name, given in results.items()}
