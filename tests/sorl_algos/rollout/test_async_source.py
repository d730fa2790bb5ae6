"""AsyncSource: batches in the order of the questions, whole groups, staleness, weights, failures, endings."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from sorl_algos.models import Policy
from sorl_algos.rollout.async_source import admitted, staleness
from sorl_algos.rollout.engine import Sampling
from sorl_algos.rollout.hf import HFEngine
from sorl_algos.rollout.renderer import Renderer
from sorl_algos.rollout.source import SyncSource
from tests.fakes import FakeRetriever, ScriptedEngine
from tests.sorl_algos.rollout.async_fakes import TEN, AsyncScripted, Weights, async_source, shuffled
from tests.sorl_algos.small_game import PASSAGES, QUESTIONS, good_player, make_env


def answer(prompt: str) -> str:
    return "<answer> x</answer>"


@contextmanager
def closing(source: Any) -> Iterator[Any]:
    try:
        yield source
    finally:
        source.close()


def until(holds: Any, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "what should happen did not"
        time.sleep(0.001)


def seeds_of(calls: Any) -> list[int]:
    return [seed for _, sampling in calls for seed in sampling.seeds or ()]


def test_staleness_by_hand() -> None:
    # the trainer at version 10: what began at 10, 9, 8 may be two versions old, 7 may not; a group by its oldest
    limit = {"trainer_version": 10, "max_staleness": 2}
    assert [admitted([version], **limit) for version in (10, 9, 8, 7)] == [True, True, True, False]
    assert admitted([8, 10], **limit) and not admitted([7, 10, 10], **limit)
    assert staleness([8, 10], 10) == 2


@pytest.mark.parametrize("order", [0, 1])
def test_batches_are_those_of_lockstep_whatever_ends_first(tokenizer: Any, order: int) -> None:
    scripted = ScriptedEngine(tokenizer, answer)
    lockstep = SyncSource(
        make_env(4, questions=TEN), scripted, Renderer(tokenizer), TEN,
        questions_per_update=2, group_size=2, sampling=Sampling(max_tokens=6), seed=0,
    )  # fmt: skip
    engine = AsyncScripted(tokenizer, answer, shuffled(order))
    with closing(async_source(tokenizer, engine, max_staleness=2)) as source:
        for version in range(6):
            lockstep.publish(Weights, version)
            source.publish(Weights, version)
            expected, ours = next(lockstep), next(source)
            assert [(item.question_id, item.group_id) for item in ours] == [
                (item.question_id, item.group_id) for item in expected
            ]
            assert all(0 <= version - item.policy_version <= 2 for item in ours)
            assert [item.turns for item in ours] == [item.turns for item in expected]
    assert set(seeds_of(scripted.calls)) <= set(seeds_of(engine.calls))
    assert source.dropped_groups == 0


def test_with_no_staleness_a_run_is_that_of_lockstep(tokenizer: Any, make_model: Any) -> None:
    """Sampled tokens and all: nothing begins before the weights of its update are there. (float64: see the test of
    streaming against lockstep.)"""
    policy = Policy(make_model(dtype=torch.float64))
    options: dict[str, Any] = {
        "questions_per_update": 2, "group_size": 2, "seed": 0, "sampling": Sampling(max_tokens=6),
    }  # fmt: skip
    lockstep = SyncSource(
        make_env(4, questions=TEN), HFEngine(policy.lm, tokenizer), Renderer(tokenizer), TEN, **options
    )
    engine = HFEngine(make_model(dtype=torch.float64), tokenizer)
    with closing(async_source(tokenizer, engine, max_staleness=0)) as source:
        for version in (3, 4):  # as after resuming at update 3
            lockstep.publish(policy, version)
            source.publish(policy, version)
            expected, ours = next(lockstep), next(source)
            ids = [[turn.action_ids for turn in item.turns] for item in ours]
            assert ids == [[turn.action_ids for turn in item.turns] for item in expected]
            assert {item.policy_version for item in ours} == {version}
            assert source.metrics()["staleness_max"] == 0.0


def test_episodes_go_on_while_the_trainer_trains(tokenizer: Any) -> None:
    engine = AsyncScripted(tokenizer, answer)
    with closing(async_source(tokenizer, engine, max_staleness=1)) as source:
        source.publish(Weights, 0)
        next(source)
        until(lambda: len(engine.order) == 8)  # the next update's four too, and no more than that
        time.sleep(0.02)
        assert len(engine.order) == 8
        source.publish(Weights, 1)
        assert {item.policy_version for item in next(source)} == {0}
        assert source.metrics() == {
            "staleness_mean": 1.0, "staleness_max": 1.0, "dropped_stale_episodes": 0.0, "retried_episodes": 0.0,
        }  # fmt: skip


def test_what_grew_too_old_is_dropped_whole_and_counted(tokenizer: Any) -> None:
    # A queue of 8 groups under version 0. Updates of 2 groups: update 0 takes the first two; the trainer then jumps
    # to version 2, where what began under version 0 is too old: 6 groups of 2 episodes go, and new ones are played.
    engine = AsyncScripted(tokenizer, answer)
    with closing(async_source(tokenizer, engine, max_staleness=1, queue_groups=8)) as source:
        source.publish(Weights, 0)
        until(lambda: len(engine.order) == 16)
        first = next(source)
        until(lambda: len(engine.order) == 20)  # two more groups fill the queue, still under version 0
        source.publish(Weights, 2)
        late = next(source)
        assert {item.policy_version for item in first} == {0} and {item.policy_version for item in late} == {2}
        assert source.dropped_groups == 8
        assert source.metrics()["dropped_stale_episodes"] == 16.0
        stream = [question.id for question in TEN.batch(0, 0, 12)]
        assert [item.question_id for item in first[::2]] == stream[:2]
        assert [item.question_id for item in late[::2]] == stream[10:12], "the questions that follow take their place"
        assert [item.group_id for item in late] == [0, 0, 1, 1]


def test_no_completion_spans_two_versions(tokenizer: Any) -> None:
    events: list[Any] = []
    engine = AsyncScripted(tokenizer, good_player, shuffled(3))
    source = async_source(
        tokenizer, engine, questions=QUESTIONS, env=make_env(5), max_staleness=2, on_event=events.append
    )
    with closing(source):
        for version in range(5):
            source.publish(Weights, version)
            assert all(len(item.turns) == 2 for item in next(source))
    assert all(begun == ended for begun, ended in engine.versions_seen)
    live: set[int] = set()
    for what, number, _ in events:
        if what == "start":
            live.add(number)
        elif what == "finish":
            live.remove(number)
        elif what == "apply":
            assert not live, "new weights while episodes were under way"


def test_a_batch_waits_for_its_own_groups_and_for_no_later_one(tokenizer: Any) -> None:
    released = threading.Event()
    last = TEN.batch(0, 3, 1)[0].text  # of the update after

    async def before(prompt: str, seed: int) -> None:
        while last in prompt and not released.is_set():
            await asyncio.sleep(0.001)

    engine = AsyncScripted(tokenizer, answer, before)
    with closing(async_source(tokenizer, engine, max_staleness=1)) as source:
        source.publish(Weights, 0)
        assert len(next(source)) == 4
        threading.Timer(0.02, released.set).start()
        source.publish(Weights, 1)  # waits for the straggler
        assert released.is_set()
        assert len(next(source)) == 4


def test_failed_searches_are_handed_over_marked(tokenizer: Any) -> None:
    env = make_env(4, FakeRetriever(passages=PASSAGES, fails=True))
    engine = AsyncScripted(tokenizer, good_player)
    with closing(async_source(tokenizer, engine, questions=QUESTIONS, env=env)) as source:
        source.publish(Weights, 0)
        assert [item.stop for item in next(source)] == ["retrieval_error"] * 4  # the trainer drops and counts them


@pytest.mark.parametrize("failures", [1, 2])
def test_a_crashed_episode_is_played_once_more_and_then_ends_the_run(tokenizer: Any, failures: int) -> None:
    crashes = [0]

    async def before(prompt: str, seed: int) -> None:
        if TEN.batch(0, 1, 1)[0].text in prompt and crashes[0] < failures:
            crashes[0] += 1
            await asyncio.sleep(0.002)
            raise ConnectionError("the request was lost")

    engine = AsyncScripted(tokenizer, answer, before)
    # one group member alone fails: the first to ask
    with closing(async_source(tokenizer, engine, live_episodes=1)) as source:
        source.publish(Weights, 0)
        if failures == 1:
            assert len(next(source)) == 4
            assert source.metrics()["retried_episodes"] == 1.0
            return
        with pytest.raises(ConnectionError, match="the request was lost"):
            next(source)
        with pytest.raises(ConnectionError, match="the request was lost"):
            source.publish(Weights, 1)


def test_while_paused_nothing_is_sampled(tokenizer: Any) -> None:
    engine = AsyncScripted(tokenizer, answer, shuffled(1))
    with closing(async_source(tokenizer, engine, max_staleness=5, slots=2)) as source:
        with source.paused():  # as for an evaluation before training
            pass
        time.sleep(0.01)
        assert not engine.order, "nothing was published yet"
        source.publish(Weights, 0)
        with source.paused():
            seen = len(engine.order)
            time.sleep(0.02)
            assert len(engine.order) == seen < 24
        until(lambda: len(engine.order) == 24)


def test_a_version_that_is_there_already_is_not_handed_over_again(tokenizer: Any) -> None:
    engine = AsyncScripted(tokenizer, answer)
    with closing(async_source(tokenizer, engine)) as source:
        for version in (4, 4, 5):
            source.publish(Weights, version)
    assert engine.versions == [4, 5]


def test_closing_ends_what_hangs(tokenizer: Any) -> None:
    async def before(prompt: str, seed: int) -> None:
        await asyncio.sleep(3600)

    source = async_source(tokenizer, AsyncScripted(tokenizer, answer, before))
    source.publish(Weights, 0)
    begun = time.monotonic()
    source.close()
    source.close()
    assert time.monotonic() - begun < 10
    assert not any(thread.name == "episodes" and thread.is_alive() for thread in [source._thread._thread])
    with pytest.raises(RuntimeError, match="was closed"):
        next(source)


def test_what_makes_no_sense_is_refused(tokenizer: Any) -> None:
    engine = AsyncScripted(tokenizer, answer)
    with pytest.raises(ValueError, match="cannot be shared by 3 ranks"):
        async_source(tokenizer, engine, ranks=3)
    with pytest.raises(ValueError, match="max_staleness is -1"):
        async_source(tokenizer, engine, max_staleness=-1)
    with closing(async_source(tokenizer, engine)) as source, pytest.raises(RuntimeError, match="call publish"):
        next(source)
