"""Trajectory sources: all the trainer knows of rollouts is that it can iterate them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from sorl_algos.lora import save_adapter
from sorl_algos.models import full_weights
from sorl_algos.rollout.collect import collect
from sorl_algos.rollout.engine import AsyncRolloutEngine, RolloutEngine, Sampling
from sorl_algos.rollout.renderer import Renderer
from sorl_algos.rollout.streaming import LoopThread, stream
from sorl_env.trajectory import Trajectory


class TrajectorySource(Protocol):
    """Gives one rollout batch after another, sampled by the policy that was published last."""

    def publish(self, policy: Any, version: int) -> None: ...

    def __next__(self) -> list[Trajectory]: ...


HandOver = Callable[[Any, Any, int], None]
"""Gives an engine a policy's weights: ``hand_over(engine, policy, version)``. Every rank calls it."""


def hand_over_weights(engine: RolloutEngine, policy: Any, version: int) -> None:
    """All weights of the policy's language model, adapters merged."""
    engine.update_weights(full_weights(policy), version)


@dataclass(frozen=True, slots=True)
class AdapterHandOver:
    """The policy's adapter alone, through ``directory``, to an engine with `update_adapter` that has the base."""

    directory: Path

    def __call__(self, engine: Any, policy: Any, version: int) -> None:
        engine.update_adapter(save_adapter(policy.lm, self.directory), version)


def seed_of_update(seed: int, update: int) -> int:
    """What the episodes of an update draw their tokens from, beside their place and turn."""
    return seed * 1_000_003 + update


def share_of(questions_per_update: int, ranks: int) -> int:
    """Questions of an update that each rank plays. Raises ValueError where they cannot be shared out evenly."""
    if questions_per_update % ranks:
        raise ValueError(
            f"questions_per_update ({questions_per_update}) cannot be shared by {ranks} ranks; choose a multiple"
        )
    return questions_per_update // ranks


class SyncSource:
    """Publishes, then collects in lockstep. What it plays depends on (seed, version) alone, so a resumed run needs
    no state of it.

    Args:
        env, engine, renderer: as for `collect`.
        questions: a `sorl_env.questions.QuestionSet`; update v plays its seeded batch number v.
        questions_per_update: questions of a batch, over all ranks.
        group_size: episodes of each question.
        on_episodes: progress callback.
        hand_over: how `publish` gives the engine the policy's weights.
        rank, ranks: which share of the batch this process plays: whole groups, one stretch a rank, so that the ranks
            together play what one rank alone would have played, token for token.

    Raises:
        ValueError: the questions of an update cannot be shared out evenly.
    """

    def __init__(
        self,
        env: Any,
        engine: RolloutEngine,
        renderer: Renderer,
        questions: Any,
        *,
        questions_per_update: int,
        group_size: int,
        sampling: Sampling,
        seed: int,
        max_total_tokens: int | None = None,
        on_episodes: Callable[[int], None] | None = None,
        hand_over: HandOver = hand_over_weights,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        self.env, self.engine, self.renderer, self.questions = env, engine, renderer, questions
        self.questions_per_update, self.group_size = questions_per_update, group_size
        self.share = share_of(questions_per_update, ranks)
        self.first = rank * self.share
        self.sampling, self.seed, self.max_total_tokens = sampling, seed, max_total_tokens
        self.on_episodes, self.hand_over = on_episodes, hand_over
        self.version = 0

    def publish(self, policy: Any, version: int) -> None:
        """Hands the policy's language-model weights to the engine."""
        self.hand_over(self.engine, policy, version)
        self.version = version

    def __iter__(self) -> SyncSource:
        return self

    def __next__(self) -> list[Trajectory]:
        chosen = self.questions.batch(
            self.seed, self.version * self.questions_per_update + self.first, self.share
        )
        repeated = [question for question in chosen for _ in range(self.group_size)]
        # Two places of one batch may hold the same question (a small set); their groups stay apart.
        groups = [self.first + place for place in range(len(chosen)) for _ in range(self.group_size)]
        return self._collect(
            repeated,
            sampling=self.sampling,
            group_ids=groups,
            seed=seed_of_update(self.seed, self.version),
            first_place=self.first * self.group_size,
            max_total_tokens=self.max_total_tokens,
            on_episodes=self.on_episodes,
        )

    def _collect(self, questions: list[Any], **options: Any) -> list[Trajectory]:
        return collect(self.env, self.engine, self.renderer, questions, **options)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing is sampled while this lasts; nothing goes on between batches anyway."""
        yield

    def metrics(self) -> dict[str, float]:
        """What there is to say of the last batch beside its trajectories: nothing."""
        return {}

    def close(self) -> None:
        """Ends what goes on: nothing."""


class StreamSource(SyncSource):
    """As SyncSource, but every episode of a batch goes at its own pace: the same trajectories, sooner.

    Args:
        engine: one with ``agenerate``.
        live_episodes, window_ms: as for `sorl_algos.rollout.streaming.stream`.
        others: as for `SyncSource`.
    """

    def __init__(
        self,
        env: Any,
        engine: AsyncRolloutEngine,
        renderer: Renderer,
        questions: Any,
        *,
        live_episodes: int | None = None,
        window_ms: float = 3.0,
        **options: Any,
    ) -> None:
        super().__init__(env, engine, renderer, questions, **options)
        self._stream_options = {"live_episodes": live_episodes, "window_ms": window_ms}
        self._async_engine = engine
        self._thread = LoopThread("episodes")  # one for all batches: an engine may belong to its loop

    def _collect(self, questions: list[Any], **options: Any) -> list[Trajectory]:
        options |= self._stream_options
        return self._thread.run(stream(self.env, self._async_engine, self.renderer, questions, **options))

    def close(self) -> None:
        """Ends the thread of the episodes."""
        self._thread.close()
