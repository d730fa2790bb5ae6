"""Episodes as coroutines: the trajectories of lockstep, whatever the order; searches share calls; failures end it."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest
import torch

from sorl_algos.models import Policy, load_language_model
from sorl_algos.rollout.collect import collect
from sorl_algos.rollout.engine import Sampling
from sorl_algos.rollout.hf import HFEngine
from sorl_algos.rollout.renderer import Renderer
from sorl_algos.rollout.source import StreamSource, SyncSource
from sorl_algos.rollout.streaming import Gathered, LoopThread, Window, stream
from sorl_env.trajectory import Trajectory
from sorl_env.world import world_questions, world_retriever
from tests.fakes import FakeRetriever, ScriptedEngine
from tests.sorl_algos.rollout.async_fakes import AsyncScripted, shuffled
from tests.sorl_algos.small_game import PASSAGES, QUESTIONS, good_player, make_env

NINE = list(QUESTIONS) * 3


def numbers_apart(trajectories: list[Trajectory]) -> tuple[list[Any], list[float]]:
    """All but the log-probabilities, whose last digits depend on the batch; and those."""
    rest = [
        (
            [(t.observation_ids, t.action_ids, t.reward, t.observation_text, t.action_text) for t in item.turns],
            [t.truncated for t in item.turns],
            (item.question_id, item.group_id, item.policy_version, item.stop, item.info),
        )
        for item in trajectories
    ]
    return rest, [logp for item in trajectories for turn in item.turns for logp in turn.action_logprobs]


def same(ours: list[Trajectory], theirs: list[Trajectory]) -> None:
    mine, expected = numbers_apart(ours), numbers_apart(theirs)
    assert mine[0] == expected[0]
    assert mine[1] == pytest.approx(expected[1], abs=1e-4)


@pytest.mark.parametrize("order", [0, 1, 2])
def test_the_order_of_answers_changes_nothing(tokenizer: Any, order: int) -> None:
    engine, renderer = ScriptedEngine(tokenizer, good_player), Renderer(tokenizer)
    expected = collect(make_env(9), engine, renderer, NINE, seed=4)
    scripted = AsyncScripted(tokenizer, good_player, shuffled(order))
    streamed = asyncio.run(stream(make_env(4), scripted, renderer, NINE, seed=4, window_ms=0.5))
    assert streamed == expected
    seeds = [seed for _, sampling in engine.calls for seed in sampling.seeds or ()]
    assert sorted(scripted.order) == sorted(seeds)
    assert scripted.order != seeds, "the answers should have come in another order"


def test_searches_that_come_together_are_one_call(tokenizer: Any) -> None:
    retriever = FakeRetriever(passages=PASSAGES)
    engine = AsyncScripted(tokenizer, good_player)
    asyncio.run(stream(make_env(9, retriever), engine, Renderer(tokenizer), NINE, window_ms=20))
    assert [len(queries) for queries, _ in retriever.calls] == [9]


def test_a_straggler_holds_nobody(tokenizer: Any) -> None:
    ended: list[int] = []
    released = asyncio.Event()

    async def before(prompt: str, seed: int) -> None:
        if "Peru" in prompt and "<information>" not in prompt:
            await released.wait()  # until all others, both their turns, are over

    def on_episodes(count: int) -> None:
        ended.append(count)
        if len(ended) == 6:
            released.set()

    engine = AsyncScripted(tokenizer, good_player, before)
    played = stream(make_env(9), engine, Renderer(tokenizer), NINE, window_ms=0.5, on_episodes=on_episodes)
    trajectories = asyncio.run(asyncio.wait_for(played, 20))
    assert [item.question_id for item in trajectories] == [question.id for question in NINE] and len(ended) == 9


def test_no_more_episodes_at_once_than_there_are_slots(tokenizer: Any) -> None:
    live, most = [0], [0]

    async def before(prompt: str, seed: int) -> None:
        live[0] += 1
        most[0] = max(most[0], live[0])
        await asyncio.sleep(0.001)
        live[0] -= 1

    engine = AsyncScripted(tokenizer, good_player, before)
    asyncio.run(stream(make_env(3), engine, Renderer(tokenizer), NINE, window_ms=0.5))
    assert most[0] == 3


def test_a_failed_search_ends_its_episodes_only(tokenizer: Any) -> None:
    env = make_env(3, FakeRetriever(passages=PASSAGES, fails=True))
    said = {"Peru": "<search> capital of Peru</search>"}
    engine = AsyncScripted(
        tokenizer, lambda prompt: next((text for land, text in said.items() if land in prompt), "<answer> x</answer>")
    )
    played = asyncio.run(stream(env, engine, Renderer(tokenizer), list(QUESTIONS), window_ms=0.5))
    assert [item.stop for item in played] == ["retrieval_error", "answered", "answered"]


def test_an_engine_that_fails_ends_the_batch_with_its_own_error(tokenizer: Any) -> None:
    cancelled: list[int] = []

    async def before(prompt: str, seed: int) -> None:
        if "Chile" in prompt:
            raise ConnectionError("the engine is gone")
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(seed)
            raise

    engine = AsyncScripted(tokenizer, good_player, before)
    with pytest.raises(ConnectionError, match="the engine is gone"):
        asyncio.run(stream(make_env(3), engine, Renderer(tokenizer), list(QUESTIONS)))
    assert len(cancelled) == 2


@pytest.mark.parametrize("kv_cache_mb", [0.0, 8.0])
def test_streaming_equals_lockstep_on_the_base_model(kv_cache_mb: float) -> None:
    """Sampled at temperature 1, several turns, real searches of the bundled world; in float64, where rounding that
    depends on the batch (1e-16) does not move a token over an edge of the inverse CDF."""
    torch.set_num_threads(1)
    model, tokenizer = load_language_model("base", dtype=torch.float64)
    policy, questions = Policy(model), world_questions("train")
    options: dict[str, Any] = {
        "questions_per_update": 4, "group_size": 2, "seed": 1, "max_total_tokens": 300,
        "sampling": Sampling(max_tokens=16),
    }  # fmt: skip
    env = make_env(5, questions=questions, retriever=world_retriever(), max_searches=2, max_observation_words=20)
    lockstep = SyncSource(env, HFEngine(model, tokenizer), Renderer(tokenizer), questions, **options)
    engine = HFEngine(model, tokenizer, kv_cache_mb=kv_cache_mb)
    streaming = StreamSource(env, engine, Renderer(tokenizer), questions, window_ms=0.5, **options)
    for source in (lockstep, streaming):
        source.publish(policy, 3)
    expected, ours = next(lockstep), next(streaming)
    streaming.close()
    assert len({len(item.turns) for item in expected}) > 1, "episodes should differ in their number of turns"
    same(ours, expected)


def test_an_engine_without_agenerate_is_asked_in_batches(tokenizer: Any) -> None:
    plain = ScriptedEngine(tokenizer, good_player)
    renderer = Renderer(tokenizer)
    played = asyncio.run(stream(make_env(9), Gathered(plain, window_ms=30), renderer, NINE, seed=4, window_ms=1))
    assert played == collect(make_env(9), ScriptedEngine(tokenizer, good_player), renderer, NINE, seed=4)
    assert [len(prompts) for prompts, _ in plain.calls] == [9, 9]


def test_a_window_that_answers_too_little_is_an_error_and_not_silence() -> None:
    async def play() -> None:
        window: Window[int, int] = Window(lambda items: items[1:], 0.001)
        with pytest.raises(RuntimeError, match="1 answers to a batch of 2"):
            await asyncio.gather(window.ask(1), window.ask(2))
        window.close()

    asyncio.run(asyncio.wait_for(play(), 20))


def test_closing_a_loop_thread_cancels_what_is_under_way() -> None:
    thread, seen = LoopThread("test"), threading.Event()

    async def wait() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            seen.set()

    pending = asyncio.run_coroutine_threadsafe(wait(), thread.loop)
    time.sleep(0.01)
    thread.close()
    assert seen.wait(5) and pending.cancelled() and thread.closed
    thread.close()
