"""Continuous batching and kept keys and values: what the exact path gives, with less to read."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from sorl_algos.rollout.engine import Completion, EngineError, Sampling
from sorl_algos.rollout.hf import HFEngine
from sorl_algos.rollout.hf_slots import CAPACITY_STEP

PROMPTS = [[7, 8, 9], [10], [11, 12, 13, 14, 15, 16], [9, 8], [20, 21, 22, 23]]
KV_MB = 4.0  # the small model has 2 layers of 32 numbers each for keys and values: 512 bytes a token


def sharp(make_model: Any, seed: int = 0, **options: Any) -> Any:
    """A model whose distributions are far from uniform, so that greedy choices are no ties."""
    model = make_model(seed, **options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
    return model


def same(ours: list[Completion], exact: list[Completion]) -> None:
    assert [c.token_ids for c in ours] == [c.token_ids for c in exact]
    assert [c.stop for c in ours] == [c.stop for c in exact]
    for mine, theirs in zip(ours, exact, strict=True):
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)


def next_turn(prompts: list[list[int]], completions: list[Completion], observation: list[int]) -> list[list[int]]:
    return [[*p, *c.token_ids, *observation] for p, c in zip(prompts, completions, strict=True)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_turns_on_kept_keys_equal_turns_read_from_the_beginning(
    make_model: Any, tokenizer: Any, temperature: float
) -> None:
    model, sampling = sharp(make_model), Sampling(max_tokens=9, temperature=temperature, seeds=(3, 1, 4, 1, 5))
    exact, kept = HFEngine(model, tokenizer), HFEngine(model, tokenizer, kv_cache_mb=KV_MB)
    prompts = PROMPTS
    for turn in range(3):
        expected = exact.generate(prompts, sampling)
        same(kept.generate(prompts, sampling), expected)
        prompts = next_turn(prompts, expected, [40 + turn, 41, 42])
    # of turns 2 and 3 only the last sampled token and the observation are read: 4 tokens in each of 10 prompts
    assert kept._slots().read_tokens == sum(map(len, PROMPTS)) + 10 * 4


def test_rows_join_and_leave_and_others_do_not_notice(make_model: Any, tokenizer: Any) -> None:
    model = sharp(make_model)
    prompts = [[5 + (7 * n + k) % 60 for k in range(1 + n % 9)] for n in range(24)]
    sampling = Sampling(max_tokens=30, seeds=tuple(range(24)), budgets=tuple(1 + 5 * n % 29 for n in range(24)))
    exact = HFEngine(model, tokenizer).generate(prompts, sampling)
    for kv_cache_mb in (0.0, KV_MB):
        engine = HFEngine(model, tokenizer, max_batch=5, kv_cache_mb=kv_cache_mb)

        async def one(number: int, engine: HFEngine = engine) -> Completion:
            await asyncio.sleep(0.002 * (number % 5))
            own = Sampling(max_tokens=30, seeds=(number,), budgets=(1 + 5 * number % 29,))
            return await engine.agenerate(prompts[number], own)

        async def play(engine: HFEngine = engine) -> list[Completion]:
            return await asyncio.gather(*(one(number) for number in range(24)))

        same(asyncio.run(play()), exact)


def test_a_tight_memory_forgets_the_oldest_and_changes_nothing(make_model: Any, tokenizer: Any) -> None:
    model, sampling = sharp(make_model), Sampling(max_tokens=9, seeds=(3, 1, 4, 1, 5))
    row = 512 * CAPACITY_STEP / 2**20
    exact = HFEngine(model, tokenizer)
    for rows in (1, 3):
        kept = HFEngine(model, tokenizer, kv_cache_mb=row * rows)
        prompts = PROMPTS
        for _ in range(3):
            expected = exact.generate(prompts, sampling)
            same(kept.generate(prompts, sampling), expected)
            assert kept._slots().kept_rows <= rows
            prompts = next_turn(prompts, expected, [40, 41])


def test_slots_grow_while_rows_are_kept(make_model: Any, tokenizer: Any) -> None:
    model, sampling = sharp(make_model), Sampling(max_tokens=4, temperature=0)
    exact, kept = HFEngine(model, tokenizer), HFEngine(model, tokenizer, kv_cache_mb=KV_MB)
    prompts = PROMPTS
    for _ in range(4):
        expected = exact.generate(prompts, sampling)
        same(kept.generate(prompts, sampling), expected)
        prompts = next_turn(prompts, expected, list(range(5, 45)))  # 40 tokens: past one capacity step by turn 3
    assert max(map(len, prompts)) > 2 * CAPACITY_STEP
    assert kept._slots().reused_tokens > 0


def test_one_row_too_many_for_the_memory_is_refused(make_model: Any, tokenizer: Any) -> None:
    engine = HFEngine(make_model(), tokenizer, kv_cache_mb=512 * CAPACITY_STEP / 2**20)
    with pytest.raises(ValueError, match=r"a row of 103 tokens needs 0.1 MB .* raise kv_cache_mb"):
        engine.generate([[4, 5, 6]], Sampling(max_tokens=100))


@pytest.mark.parametrize("told", [True, False])
def test_new_weights_forget_what_was_kept(make_model: Any, tokenizer: Any, told: bool) -> None:
    """Told by update_weights, or not: an optimiser may have changed weights that policy and engine share."""
    model, other = sharp(make_model), sharp(make_model, seed=7)
    engine, sampling = HFEngine(model, tokenizer, kv_cache_mb=KV_MB), Sampling(max_tokens=6, temperature=0)
    first = engine.generate(PROMPTS, sampling)
    prompts = next_turn(PROMPTS, first, [40, 41])
    if told:
        engine.update_weights(other.named_parameters(), 1)
    else:
        with torch.no_grad():
            for own, theirs in zip(model.parameters(), other.parameters(), strict=True):
                own.copy_(theirs)
    same(engine.generate(prompts, sampling), HFEngine(other, tokenizer).generate(prompts, sampling))
    assert engine._slots().reused_tokens == 0


def test_weights_do_not_change_under_a_completion(make_model: Any, tokenizer: Any) -> None:
    model = make_model()
    engine = HFEngine(model, tokenizer)

    async def play() -> None:
        task = asyncio.create_task(engine.agenerate([4, 5], Sampling(max_tokens=200)))
        await asyncio.sleep(0.01)
        with pytest.raises(RuntimeError, match="weights cannot change while completions are being sampled"):
            engine.update_weights(model.named_parameters(), 1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        engine.update_weights(model.named_parameters(), 2)  # nobody waits any more

    asyncio.run(play())
    assert engine.policy_version == 2


def test_a_cancelled_row_leaves_and_the_others_finish(make_model: Any, tokenizer: Any) -> None:
    model = sharp(make_model)
    engine, sampling = HFEngine(model, tokenizer, kv_cache_mb=KV_MB), Sampling(max_tokens=12, temperature=0)

    async def play() -> Completion:
        tasks = [asyncio.create_task(engine.agenerate(prompt, sampling)) for prompt in PROMPTS]
        await asyncio.sleep(0.005)
        for task in tasks[:-1]:
            task.cancel()
        return await tasks[-1]

    same([asyncio.run(play())], HFEngine(model, tokenizer).generate(PROMPTS[-1:], sampling))


class Broken(torch.nn.Module):
    """A model that fails at its second forward, and works again after it."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.config, self.generation_config, self.device, self.dtype = (
            model.config, model.generation_config, model.device, model.dtype,
        )  # fmt: skip
        self.model, self.calls = model, 0

    def forward(self, **inputs: Any) -> Any:
        self.calls += 1
        if self.calls == 2:
            raise MemoryError("no memory for the second forward")
        return self.model(**inputs)


def test_a_failure_reaches_everyone_who_waits_and_the_engine_goes_on(make_model: Any, tokenizer: Any) -> None:
    model = sharp(make_model)
    engine, sampling = HFEngine(Broken(model), tokenizer), Sampling(max_tokens=5, temperature=0)

    async def play() -> list[Any]:
        return await asyncio.gather(*(engine.agenerate(p, sampling) for p in PROMPTS), return_exceptions=True)

    assert [type(result) for result in asyncio.run(play())] == [MemoryError] * len(PROMPTS)
    same(asyncio.run(play()), HFEngine(model, tokenizer).generate(PROMPTS, sampling))


@pytest.mark.parametrize("kv_cache_mb", [0.0, KV_MB])
def test_weights_that_are_not_finite_are_an_error_and_leave_no_trace(
    make_model: Any, tokenizer: Any, kv_cache_mb: float
) -> None:
    good, bad = sharp(make_model), sharp(make_model)
    with torch.no_grad():
        bad.model.layers[0].mlp.down_proj.weight[3] = torch.nan
    engine, sampling = HFEngine(make_model(), tokenizer, kv_cache_mb=kv_cache_mb), Sampling(max_tokens=4, temperature=0)
    engine.update_weights(bad.named_parameters(), 1)
    with pytest.raises(EngineError, match="not finite; the weights of version 1"):
        engine.generate(PROMPTS, sampling)
    engine.update_weights(good.named_parameters(), 2)
    same(engine.generate(PROMPTS, sampling), HFEngine(good, tokenizer).generate(PROMPTS, sampling))


def test_bad_calls_are_refused(make_model: Any, tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="the prompt is empty"):
        asyncio.run(HFEngine(make_model(), tokenizer).agenerate([], Sampling()))
    model = make_model()
    model.config.layer_types = ["sliding_attention", "full_attention"]
    with pytest.raises(ValueError, match=r"layers of kind sliding_attention.*kv_cache_mb 0"):
        HFEngine(model, tokenizer, kv_cache_mb=1.0).generate([[4]], Sampling())
