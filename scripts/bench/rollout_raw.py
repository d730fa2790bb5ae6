"""The same prompts through an engine alone: ours, vLLM's own `LLM.generate`, transformers' own `generate`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from sorl_algos.rollout.engine import RolloutEngine, Sampling

Asked = Sequence[tuple[list[int], int, int]]  # prompt, seed, budget


@dataclass(frozen=True, slots=True)
class Raw:
    """What one engine did with all the prompts."""

    tokens: int
    seconds: float

    @classmethod
    def of(cls, engine: RolloutEngine, asked: Asked, sampling: Sampling) -> Raw:
        """Our engine, in one call."""
        prompts, seeds, budgets = zip(*asked, strict=True)
        began = time.perf_counter()
        completions = engine.generate(
            prompts, replace(sampling, seeds=seeds, budgets=budgets, max_tokens=max(budgets))
        )
        seconds = time.perf_counter() - began
        return cls(sum(len(completion.token_ids) for completion in completions), seconds)


def vllm_generate(engine: Any, asked: Asked, sampling: Sampling) -> Raw:
    """vLLM's own object, called as its documentation shows: the same parameters, no code of ours around it."""
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": prompt} for prompt, _, _ in asked]
    parameters = [
        SamplingParams(
            temperature=sampling.temperature, max_tokens=budget, seed=seed % 2**63, stop=list(sampling.stop),
            include_stop_str_in_output=True, logprobs=0,
        )
        for _, seed, budget in asked
    ]  # fmt: skip
    began = time.perf_counter()
    with torch.compiler.set_stance("force_eager"):  # as in our engine: nothing compiled at the first call
        outputs = engine._llm.generate(prompts, parameters, use_tqdm=False)
    seconds = time.perf_counter() - began
    return Raw(sum(len(output.outputs[0].token_ids) for output in outputs), seconds)


def transformers_generate(model: Any, tokenizer: Any, asked: Asked, sampling: Sampling, batch: int) -> Raw:
    """`model.generate` in batches of like lengths, padded on the left, with its own stop strings and sampling.

    It has no seed for a row, so its tokens are others. Those after the end of a row are not counted.
    """
    ordered = sorted(asked, key=lambda one: len(one[0]))
    pad, tokens, seconds = tokenizer.pad_token_id, 0, 0.0
    torch.manual_seed(0)
    for start in range(0, len(ordered), batch):
        rows = ordered[start : start + batch]
        longest, budget = max(len(prompt) for prompt, _, _ in rows), max(one[2] for one in rows)
        ids = torch.full((len(rows), longest), pad)
        mask = torch.zeros_like(ids)
        for place, (prompt, _, _) in enumerate(rows):
            ids[place, longest - len(prompt) :], mask[place, longest - len(prompt) :] = torch.tensor(prompt), 1
        began = time.perf_counter()
        made = model.generate(
            ids, attention_mask=mask, max_new_tokens=budget, do_sample=sampling.temperature > 0,
            temperature=sampling.temperature or None, top_k=0, top_p=1.0, stop_strings=list(sampling.stop),
            tokenizer=tokenizer, pad_token_id=pad,
        )[:, longest:]  # fmt: skip
        seconds += time.perf_counter() - began
        ended = (made != pad).flip(-1).cumsum(-1).gt(0).flip(-1)  # up to the last token that is no padding
        tokens += int(ended.sum())
    return Raw(tokens, seconds)
