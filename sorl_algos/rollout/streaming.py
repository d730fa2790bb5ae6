"""Episodes as coroutines: each awaits the engine and the retriever on its own, so that none waits for a straggler."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Generic, TypeVar

from sorl_algos.rollout.collect import Ask, Play, PlaySettings, settings_for
from sorl_algos.rollout.engine import AsyncRolloutEngine, Completion, RolloutEngine, Sampling
from sorl_algos.rollout.renderer import Renderer
from sorl_env.trajectory import Trajectory

Item = TypeVar("Item")
Answer = TypeVar("Answer")
Result = TypeVar("Result")


class Window(Generic[Item, Answer]):
    """Makes batches of what is asked within a few milliseconds. Made for one event loop.

    Args:
        call: answers a batch, one answer an item, in order; it runs in a thread of its own, one call at a time.
        window_s: how long the first question of a batch waits for others.
    """

    def __init__(self, call: Callable[[list[Item]], Sequence[Answer]], window_s: float) -> None:
        self.call, self.window_s = call, window_s
        self._waiting: list[tuple[Item, asyncio.Future[Answer]]] = []
        self._task: asyncio.Task[None] | None = None
        self._worker = ThreadPoolExecutor(1, "window")

    async def ask(self, item: Item) -> Answer:
        """The answer to one item. Raises what ``call`` raised for its batch."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Answer] = loop.create_future()
        self._waiting.append((item, future))
        if self._task is None or self._task.done():
            self._task = loop.create_task(self._serve(loop))
        return await future

    async def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        while self._waiting:
            await asyncio.sleep(self.window_s)
            batch, self._waiting = self._waiting, []
            try:
                answers = await loop.run_in_executor(self._worker, self.call, [item for item, _ in batch])
                if len(answers) != len(batch):
                    raise RuntimeError(f"{len(answers)} answers to a batch of {len(batch)}")
            except Exception as error:
                for _, future in batch:
                    if not future.done():
                        future.set_exception(error)
                continue
            for (_, future), answer in zip(batch, answers, strict=True):
                if not future.done():
                    future.set_result(answer)

    def close(self) -> None:
        self._worker.shutdown(wait=False, cancel_futures=True)


class Gathered:
    """``agenerate`` for an engine that can only ``generate``: prompts that come within a window are one call.

    A call takes as long as its longest completion, and the next one waits for it; an engine that lets single rows
    join and leave (HFEngine, VLLMEngine) needs no such wrapper.
    """

    def __init__(self, engine: RolloutEngine, *, window_ms: float = 3.0) -> None:
        self.engine = engine
        self._window: Window[tuple[Sequence[int], Sampling], Completion] = Window(self._call, window_ms / 1e3)

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Completion]:
        return self.engine.generate(prompts, sampling)

    def update_weights(self, weights: Any, version: int) -> None:
        self.engine.update_weights(weights, version)

    async def agenerate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        return await self._window.ask((prompt_ids, sampling))

    def _call(self, asked: list[tuple[Sequence[int], Sampling]]) -> list[Completion]:
        answers: dict[int, Completion] = {}
        alike: dict[Sampling, list[int]] = {}
        for place, (_, sampling) in enumerate(asked):
            alike.setdefault(replace(sampling, seeds=None, budgets=None), []).append(place)
        for sampling, places in alike.items():
            given = [asked[place][1] for place in places]
            seeds = [one.seeds[0] if one.seeds else 0 for one in given]
            budgets = [one.budgets[0] if one.budgets else one.max_tokens for one in given]
            batch = replace(sampling, seeds=tuple(seeds), budgets=tuple(budgets))
            done = self.engine.generate([asked[place][0] for place in places], batch)
            answers |= dict(zip(places, done, strict=True))
        return [answers[place] for place in range(len(asked))]


class Player:
    """Plays single episodes of a vector environment as coroutines. Made for one event loop.

    Args:
        env: a vector environment of sorl_env; its slots are not used, only its rules, questions and retriever.
        engine: awaited for every action.
        window_ms: how long a search waits for others to share a retriever call with.
    """

    def __init__(self, env: Any, engine: AsyncRolloutEngine, *, window_ms: float = 3.0) -> None:
        self.env, self.engine = env, engine
        self._search: Window[str, Any] = Window(self._hits, window_ms / 1e3)

    async def play(self, settings: PlaySettings, question: Any, group_id: Any, place: int) -> Trajectory:
        """One episode, from its question to its trajectory; arguments as for `Play`.

        A failed search ends it with ``stop="retrieval_error"``; whatever else fails is raised.
        """
        episode = self.env.episode(getattr(question, "id", question))
        play = Play(settings, question, group_id, place, episode.begin())
        while play.stop is None and (ask := play.ask()) is not None:
            action = play.said(await self._generate(ask, settings.sampling))
            query = episode.query(action)
            hits = await self._search.ask(query) if query is not None else None
            step = episode.advance(action, hits, error=query is not None and hits is None)
            play.heard(step.observation, step.reward, step.info)
        return play.trajectory()

    async def _generate(self, ask: Ask, sampling: Sampling) -> Completion:
        return await self.engine.agenerate(
            ask.prompt_ids, replace(sampling, seeds=(ask.seed,), budgets=(ask.budget,))
        )

    def _hits(self, queries: list[str]) -> Sequence[Any]:
        found = self.env.search(queries)
        return [None] * len(queries) if found is None else found

    def close(self) -> None:
        self._search.close()


async def stream(
    env: Any,
    engine: AsyncRolloutEngine,
    renderer: Renderer,
    questions: Sequence[Any],
    *,
    sampling: Sampling | None = None,
    group_ids: Sequence[Any] | None = None,
    seed: int = 0,
    first_place: int = 0,
    max_total_tokens: int | None = None,
    live_episodes: int | None = None,
    window_ms: float = 3.0,
    on_episodes: Callable[[int], None] | None = None,
) -> list[Trajectory]:
    """Plays every question once like `collect`, every episode at its own pace: the same trajectories, sooner.

    Args:
        live_episodes: episodes under way at one time; default the environment's ``num_envs``. A new one begins as
            soon as another is over.
        window_ms: as for `Player`.

    Returns:
        Trajectories in the order of the questions, equal to `collect`'s where the engine's completion depends on
        the prompt and its seed alone (up to rounding in the log-probabilities, which depends on the batch).
    """
    settings = settings_for(env, renderer, sampling, seed, max_total_tokens)
    places = asyncio.Semaphore(live_episodes or env.num_envs)
    player = Player(env, engine, window_ms=window_ms)

    async def one(place: int) -> Trajectory:
        async with places:
            group = None if group_ids is None else group_ids[place]
            trajectory = await player.play(settings, questions[place], group, first_place + place)
        if on_episodes:
            on_episodes(1)
        return trajectory

    try:
        async with asyncio.TaskGroup() as tasks:
            begun = [tasks.create_task(one(place)) for place in range(len(questions))]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None  # the others fell with it
    finally:
        player.close()
    return [task.result() for task in begun]


class LoopThread:
    """An event loop in a thread of its own. What awaits between two calls goes on meanwhile."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """The coroutine's result. An interrupt of the waiting thread (Ctrl-C) cancels it there."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    @property
    def closed(self) -> bool:
        return self.loop.is_closed()

    def close(self) -> None:
        """Cancels what is under way and ends the thread. May be called twice."""
        if self.closed:
            return
        self.run(_cancel_others())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
