"""AsyncSource: episodes go on while the trainer trains; what grew too old meanwhile is dropped, and counted."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from sorl_algos.rollout.collect import settings_for
from sorl_algos.rollout.engine import AsyncRolloutEngine, Sampling
from sorl_algos.rollout.renderer import Renderer
from sorl_algos.rollout.source import HandOver, hand_over_weights, seed_of_update, share_of
from sorl_algos.rollout.streaming import LoopThread, Player
from sorl_env.trajectory import Trajectory

ATTEMPTS = 2  # an episode that fails is played once more; the second failure ends the run

Event = tuple[str, int, int]
"""``("start" | "finish" | "retry", episode, version)`` or ``("request" | "apply", version, version before)``."""


def staleness(versions: Sequence[int], trainer_version: int) -> int:
    """Versions between the oldest of these and the trainer's. ``versions``: of the policy when each episode began."""
    return trainer_version - min(versions)


def admitted(versions: Sequence[int], *, trainer_version: int, max_staleness: int) -> bool:
    """Whether a group is trained on: as a whole or not at all, by its oldest member; the limit is inclusive."""
    return staleness(versions, trainer_version) <= max_staleness


class AsyncSource:
    """Plays episodes in a thread of its own, ahead of the trainer by as much as the limit of staleness lets it.

    Groups are handed over whole and in the order of the questions, whichever was finished first; the tokens of an
    episode are drawn from (seed, update, place, turn), where update and place are its questions' position in the
    stream of questions. So the batches do not depend on the order in which episodes end; only which version of the
    weights an episode began with depends on time. No episode spans two versions: new weights wait until the episodes
    under way are over, and no new one begins meanwhile.

    Args:
        env, engine, renderer, questions, questions_per_update, group_size, sampling, seed, max_total_tokens,
        on_episodes, rank, ranks: as for `SyncSource`. The engine must have weights of its own: the trainer changes
            the policy's while this source samples.
        max_staleness: versions that a group's oldest episode may lie behind when its group is trained on. Older
            groups are dropped and counted; the questions that follow take their place.
        queue_groups: groups begun and not yet handed over, at most. Default: as many as cannot grow too old, so that
            nothing is dropped.
        live_episodes: episodes under way at one time; default the environment's ``num_envs``.
        window_ms: how long a search waits for others.
        on_event: told of every `Event`, in the order in which they happen.

    Raises:
        ValueError: questions that cannot be shared by the ranks, or a limit that makes no sense.
    """

    def __init__(
        self,
        env: Any,
        engine: AsyncRolloutEngine,
        renderer: Renderer,
        questions: Any,
        *,
        questions_per_update: int,
        group_size: int,
        sampling: Sampling,
        seed: int,
        max_total_tokens: int | None = None,
        max_staleness: int = 1,
        queue_groups: int | None = None,
        live_episodes: int | None = None,
        window_ms: float = 3.0,
        on_episodes: Callable[[int], None] | None = None,
        on_event: Callable[[Event], None] | None = None,
        hand_over: HandOver = hand_over_weights,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        self.engine, self.questions, self.group_size, self.seed = engine, questions, group_size, seed
        self.questions_per_update, self.share = questions_per_update, share_of(questions_per_update, ranks)
        self.first = rank * self.share
        self.max_staleness, self.queue_groups = max_staleness, queue_groups
        if max_staleness < 0 or (queue_groups is not None and queue_groups < 1):
            raise ValueError(
                f"max_staleness is {max_staleness} and queue_groups {queue_groups}; the first must not be negative, "
                "the second at least 1"
            )
        self.live_episodes = live_episodes or env.num_envs
        self.on_episodes, self.on_event, self.hand_over = on_episodes, on_event, hand_over
        self.version = -1
        self.dropped_groups = 0
        self.retried_episodes = 0
        self._last: dict[str, float] = {}
        self._retried_before = 0
        self._settings = settings_for(env, renderer, sampling, seed, max_total_tokens)
        self._player = Player(env, engine, window_ms=window_ms)
        self._groups: dict[int, list[Trajectory | None]] = {}
        self._front = 0  # the group that is handed over next
        self._begun = 0  # episodes
        self._live: set[asyncio.Task[None]] = set()
        self._holding = 0
        self._failure: BaseException | None = None
        self._thread = LoopThread("episodes")
        self._changed = asyncio.Event()
        self._closing = weakref.finalize(self, _close, self._thread, self._player)

    # --- What the trainer calls ----------------------------------------------------------------------------------

    def publish(self, policy: Any, version: int) -> None:
        """Waits for the episodes under way, hands the weights to the engine, and lets new episodes begin.

        The same version again changes nothing. Raises what an episode failed with.
        """
        if version != self.version:
            self._run(self._publish(policy, version))

    def __iter__(self) -> AsyncSource:
        return self

    def __next__(self) -> list[Trajectory]:
        """The next batch, as soon as its groups are whole. Raises what an episode failed with."""
        if self.version < 0:
            raise RuntimeError("nothing was published yet; call publish() before the first batch")
        return self._run(self._take())

    @contextmanager
    def paused(self) -> Iterator[None]:
        """While this lasts nothing is sampled or searched: engine, retriever and processor are free."""
        self._run(self._hold())
        try:
            yield
        finally:
            if not self._thread.closed:
                self._thread.loop.call_soon_threadsafe(self._release)

    def metrics(self) -> dict[str, float]:
        """Of the last batch: staleness of its groups; and what was dropped or tried again since the one before."""
        return dict(self._last)

    def close(self) -> None:
        """Ends what is under way. The source is of no use afterwards; may be called twice."""
        self._closing()

    def _run(self, coroutine: Any) -> Any:
        if self._thread.closed:
            coroutine.close()
            raise RuntimeError("this source was closed; make a new one")
        return self._thread.run(coroutine)

    # --- In the thread of the episodes ---------------------------------------------------------------------------

    async def _publish(self, policy: Any, version: int) -> None:
        self._tell("request", version, self.version)
        await self._hold()
        try:
            # not in this loop: an engine may need it to take the weights
            await asyncio.get_running_loop().run_in_executor(None, self.hand_over, self.engine, policy, version)
            if self.version < 0:  # a resumed run goes on with the questions of its update
                self._front, self._begun = version * self.share, version * self.share * self.group_size
            self._tell("apply", version, self.version)
            self.version = version
        finally:
            self._release()

    async def _hold(self) -> None:
        """Lets no episode begin, and waits for those under way."""
        self._holding += 1
        try:
            await self._until(lambda: not self._live)
        except BaseException:
            self._release()
            raise

    def _release(self) -> None:
        self._holding -= 1
        self._begin()

    async def _take(self) -> list[Trajectory]:
        batch: list[list[Trajectory]] = []
        dropped, ages = self.dropped_groups, []
        while len(batch) < self.share:
            await self._until(lambda: None not in self._groups.get(self._front, [None]))
            group = [item for item in self._groups.pop(self._front) if item is not None]
            self._front += 1
            versions = [item.policy_version for item in group]
            if admitted(versions, trainer_version=self.version, max_staleness=self.max_staleness):
                batch.append([replace(item, group_id=self.first + len(batch)) for item in group])
                ages.append(staleness(versions, self.version))
            else:
                self.dropped_groups += 1
            self._begin()  # there is room in the queue
        self._last = {
            "staleness_mean": sum(ages) / len(ages),
            "staleness_max": float(max(ages)),
            "dropped_stale_episodes": float((self.dropped_groups - dropped) * self.group_size),
            "retried_episodes": float(self.retried_episodes - self._retried_before),
        }
        self._retried_before = self.retried_episodes
        return [item for group in batch for item in group]

    def _begin(self) -> None:
        """Starts episodes while the queue, the engine and a pending update let it."""
        if self.version < 0:
            return
        while not self._holding and self._failure is None and len(self._live) < self.live_episodes:
            number = self._begun // self.group_size
            if not self._may_begin(number):
                return
            self._groups.setdefault(number, [None] * self.group_size)
            self._start(self._begun)
            self._begun += 1

    def _may_begin(self, number: int) -> bool:
        if self.queue_groups is not None:
            return number < self._front + self.queue_groups
        update = (number - self.dropped_groups) // self.share  # the one that this group will be part of
        return update <= self.version + self.max_staleness

    def _start(self, episode: int, attempt: int = 1) -> None:
        task = asyncio.get_running_loop().create_task(self._play(episode))
        self._live.add(task)
        task.add_done_callback(lambda done: self._ended(done, episode, attempt))
        self._tell("start" if attempt == 1 else "retry", episode, self.version)

    async def _play(self, episode: int) -> None:
        number, member = divmod(episode, self.group_size)
        update, place = divmod(number, self.share)
        place += self.first
        [question] = self.questions.batch(self.seed, update * self.questions_per_update + place, 1)
        settings = replace(self._settings, seed=seed_of_update(self.seed, update))
        version = self.version
        trajectory = await self._player.play(settings, question, number, place * self.group_size + member)
        self._groups[number][member] = replace(trajectory, policy_version=version)
        self._tell("finish", episode, version)
        if self.on_episodes:
            self.on_episodes(1)

    def _ended(self, task: asyncio.Task[None], episode: int, attempt: int) -> None:
        self._live.discard(task)
        if not task.cancelled():
            error = task.exception()
            if error is None:
                self._begin()
            elif attempt < ATTEMPTS and self._failure is None:
                self.retried_episodes += 1
                self._start(episode, attempt + 1)
            else:
                self._failure = self._failure or error
        self._changed.set()

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            if self._failure is not None:
                raise self._failure
            self._changed.clear()
            await self._changed.wait()
        if self._failure is not None:
            raise self._failure

    def _tell(self, what: str, number: int, version: int) -> None:
        if self.on_event:
            self.on_event((what, number, version))


def _close(thread: LoopThread, player: Player) -> None:
    thread.close()
    player.close()
