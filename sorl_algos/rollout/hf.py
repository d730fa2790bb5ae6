"""HFEngine: batched sampling with transformers. Exact, runs anywhere; the yardstick for every other engine."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sorl_algos.rollout.engine import Completion, EngineError, Sampling, StopReason
from sorl_algos.rollout.hf_slots import Request, SlotDecoder


class HFEngine:
    """Samples from a transformers causal language model.

    Prompts may be ragged (they are padded on the left); a row leaves the batch as soon as it has finished. Each
    prompt draws its random numbers from its own seed, so its completion does not depend on its neighbours.

    Args:
        model: the language model. Given the policy's own module, `update_weights` has nothing to copy.
        tokenizer: used to read the text of sampled tokens, to find stop strings; nothing is ever encoded.
        max_batch: prompts decoded at one time.
        kv_cache_mb: memory for the keys and values of rows under way and of finished rows, which are kept for the
            next turn of their episode until the weights change. 0: nothing is kept, and `generate` reads every
            prompt from its beginning: the exact path that the other one is tested against.

    `generate` and `agenerate` may be called from different threads; both wait while weights change.
    """

    def __init__(self, model: Any, tokenizer: Any, *, max_batch: int = 256, kv_cache_mb: float = 0.0) -> None:
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.max_batch = max_batch
        self.kv_cache_mb = kv_cache_mb
        self.policy_version = 0
        self.pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
        eos = model.generation_config.eos_token_id
        if eos is None:
            eos = tokenizer.eos_token_id
        self.eos_ids = frozenset(eos if isinstance(eos, (list, tuple)) else [] if eos is None else [eos])
        self._stop_tokens: dict[tuple[str, ...], np.ndarray] = {}
        self._decoder: SlotDecoder | None = None
        self._changes_seen = -1
        self._futures: dict[Request, asyncio.Future[Completion]] = {}
        self._driver: asyncio.Task[None] | None = None
        self._worker: ThreadPoolExecutor | None = None
        self._lock = threading.RLock()

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copies weights by name (those that already share storage are left) and stamps later completions.

        Raises:
            ValueError: a name the model does not have, or a shape that differs.
            RuntimeError: completions are being sampled; a completion belongs to one version of the weights.
        """
        own = dict(self.model.named_parameters())
        with self._lock, torch.no_grad():
            if self._decoder is not None:
                self._decoder.forget()
            for name, value in weights:
                if name not in own:
                    raise ValueError(f"weight {name!r} is not a parameter of the engine's model")
                if own[name].shape != value.shape:
                    raise ValueError(
                        f"weight {name!r} has shape {tuple(value.shape)}, the engine's {tuple(own[name].shape)}"
                    )
                if own[name].data_ptr() != value.data_ptr():
                    own[name].copy_(value)
            self.policy_version = version

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Completion]:
        """One completion a prompt, in order.

        Raises:
            ValueError: an empty prompt, or seeds or budgets whose number differs from the prompts'.
            EngineError: a log-probability that is not finite.
        """
        for number, prompt in enumerate(prompts):
            if not prompt:
                raise ValueError(f"prompt {number} is empty; a causal model needs at least one token to start from")
        for name in ("seeds", "budgets"):
            given = getattr(sampling, name)
            if given is not None and len(given) != len(prompts):
                raise ValueError(f"{len(given)} {name} for {len(prompts)} prompts; give one each")
        if self.kv_cache_mb:
            return self._generate_in_slots(prompts, sampling)
        # Like lengths go together, so that little of the prefill is padding.
        order = sorted(range(len(prompts)), key=lambda row: len(prompts[row]))
        results: list[Completion | None] = [None] * len(prompts)
        for start in range(0, len(order), self.max_batch):
            rows = order[start : start + self.max_batch]
            seeds = [_seed_of(sampling, row) for row in rows]
            budgets = [_budget_of(sampling, row) for row in rows]
            done = self._generate([prompts[row] for row in rows], sampling, seeds, budgets)
            for row, completion in zip(rows, done, strict=True):
                results[row] = completion
        return [completion for completion in results if completion is not None]

    async def agenerate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """One completion. Calls that are awaited together are decoded together, each joining and leaving on its own.

        Args:
            sampling: with one seed and one budget, if any.

        Raises:
            ValueError: an empty prompt, or one that the memory for keys and values cannot hold.
        """
        if not prompt_ids:
            raise ValueError("the prompt is empty; a causal model needs at least one token to start from")
        loop = asyncio.get_running_loop()
        request = self._request(prompt_ids, sampling, 0)
        if self._worker is None:
            # a new thread would use as many threads of its own as there are cores
            self._worker = ThreadPoolExecutor(1, "sampling", torch.set_num_threads, (torch.get_num_threads(),))
        self._slots().add(request)
        future = self._futures[request] = loop.create_future()
        if self._driver is None or self._driver.done():
            self._driver = loop.create_task(self._drive(self._worker))
        try:
            return await future
        finally:
            request.cancelled = True  # if it is not over: its row is given up
            self._futures.pop(request, None)

    async def _drive(self, worker: ThreadPoolExecutor) -> None:
        """Takes steps for as long as there is work, and answers those who wait for it."""
        try:
            while self._slots().busy:
                await asyncio.get_running_loop().run_in_executor(worker, self._step)
                for request in [request for request in self._futures if request.finished]:
                    future = self._futures.pop(request)
                    if not future.done():
                        future.set_result(self._completion(request))
                await asyncio.sleep(0)  # whoever was answered may ask again before the next token
        except Exception as error:
            waiting, self._futures = self._futures, {}
            for future in waiting.values():
                if not future.done():
                    future.set_exception(error)

    def _step(self) -> None:
        with self._lock:
            decoder = self._slots()
            if not decoder.live_rows:
                # A policy that shares its weights with this engine may have been trained since, without a word to us.
                changes = sum(parameter._version for parameter in self.model.parameters())
                if changes != self._changes_seen:
                    decoder.drop_kept()
                    self._changes_seen = changes
            try:
                for request in decoder.step():
                    self._check(request.logprobs)
            except BaseException:
                decoder.abandon()
                raise

    def _slots(self) -> SlotDecoder:
        if self._decoder is None:
            self._decoder = SlotDecoder(
                self.model,
                sample=sample_tokens,
                ends=self._ends,
                max_rows=self.max_batch,
                budget_bytes=int(self.kv_cache_mb * 2**20) if self.kv_cache_mb else None,
                keep=bool(self.kv_cache_mb),
            )
        return self._decoder

    def _request(self, prompt: Sequence[int], sampling: Sampling, row: int) -> Request:
        uniforms = _uniforms([_seed_of(sampling, row)], _budget_of(sampling, row))[0]
        return Request(list(prompt), replace(sampling, seeds=None, budgets=None), uniforms)

    def _generate_in_slots(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Completion]:
        with self._lock:
            requests = [self._request(prompt, sampling, row) for row, prompt in enumerate(prompts)]
            for request in requests:
                self._slots().add(request)
            while not all(request.finished for request in requests):
                self._step()
            return [self._completion(request) for request in requests]

    def _check(self, logprobs: Sequence[float]) -> None:
        if not all(map(math.isfinite, logprobs)):
            raise EngineError(
                f"a log-probability is not finite; the weights of version {self.policy_version} hold NaN or infinity"
            )

    def _completion(self, request: Request) -> Completion:
        return Completion(
            tuple(request.token_ids), tuple(request.logprobs), request.stop, self.policy_version
        )

    def _ends(self, token_ids: list[int], sampling: Sampling) -> StopReason | None:
        if token_ids[-1] in self.eos_ids:
            return "eos"
        if self._tokens_that_may_stop(sampling.stop)[token_ids[-1]] and self._ends_with_stop(token_ids, sampling.stop):
            return "stop"
        return None

    @torch.inference_mode()
    def _generate(
        self, prompts: list[Sequence[int]], sampling: Sampling, seeds: list[int], budgets: list[int]
    ) -> list[Completion]:
        from transformers import DynamicCache

        device = self.model.device
        longest = max(map(len, prompts))
        ids = torch.full((len(prompts), longest), self.pad_id, dtype=torch.long)
        mask = torch.zeros((len(prompts), longest + max(budgets)), dtype=torch.long)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.as_tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        ids, mask = ids.to(device), mask.to(device)
        positions = (mask[:, :longest].cumsum(-1) - 1).clamp(min=0)
        uniforms = torch.from_numpy(_uniforms(seeds, max(budgets))).to(device)

        cache = DynamicCache(config=self.model.config)
        live = list(range(len(prompts)))
        sampled: list[list[int]] = [[] for _ in prompts]
        logprobs: list[list[float]] = [[] for _ in prompts]
        reasons: list[StopReason] = ["length"] * len(prompts)
        step_ids, step_positions, width = ids, positions, longest
        for step in range(max(budgets)):
            logits = self.model(
                input_ids=step_ids,
                attention_mask=mask[:, :width],
                position_ids=step_positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            ).logits[:, -1]
            tokens, token_logp = sample_tokens(logits, uniforms[:, step], sampling)
            keep = []
            for place, (row, token, logp) in enumerate(
                zip(live, tokens.tolist(), token_logp.tolist(), strict=True)
            ):
                sampled[row].append(token)
                logprobs[row].append(logp)
                reason = self._ends(sampled[row], sampling)
                if reason is not None:
                    reasons[row] = reason
                elif len(sampled[row]) < budgets[row]:
                    keep.append(place)
            if not keep:
                break
            if len(keep) < len(live):
                index = torch.tensor(keep, device=device)
                cache.batch_select_indices(index)
                mask, uniforms, tokens = mask[index], uniforms[index], tokens[index]
                step_positions = step_positions[index]
                live = [live[place] for place in keep]
            step_ids, step_positions = tokens[:, None], step_positions[:, -1:] + 1
            width += 1
        for logps in logprobs:
            self._check(logps)
        return [
            Completion(tuple(token_ids), tuple(logps), reason, self.policy_version)
            for token_ids, logps, reason in zip(sampled, logprobs, reasons, strict=True)
        ]

    def _tokens_that_may_stop(self, stop: tuple[str, ...]) -> np.ndarray:
        """Which tokens can complete a stop string: those whose text holds its last character, or is no whole text."""
        if stop not in self._stop_tokens:
            last = {string[-1] for string in stop}
            flags = np.zeros(max(self.model.config.vocab_size, len(self.tokenizer)), dtype=bool)
            for token, text in enumerate(self.tokenizer.batch_decode([[i] for i in range(len(self.tokenizer))])):
                flags[token] = bool(last) and ("\ufffd" in text or any(char in text for char in last))
            self._stop_tokens[stop] = flags
        return self._stop_tokens[stop]

    def _ends_with_stop(self, token_ids: list[int], stop: tuple[str, ...]) -> bool:
        # A stop string may begin some tokens back and end inside the last token, which is kept whole. Every token
        # is at least one byte, so the longest stop string spans at most that many tokens before the last.
        span = max(len(string.encode()) for string in stop)
        before = self.tokenizer.decode(token_ids[-span - 1 : -1], skip_special_tokens=False)
        after = self.tokenizer.decode(token_ids[-span - 1 :], skip_special_tokens=False)
        return any(after.count(string) > before.count(string) for string in stop)


def sample_tokens(logits: Tensor, uniforms: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Tokens ``(B,)`` drawn by inverse CDF from ``logits (B, V)``, and their log-probabilities ``(B,)``."""
    logits = logits.float()
    if sampling.temperature == 0:
        tokens = logits.argmax(-1)
        return tokens, logits.gather(-1, tokens[:, None]).squeeze(-1) - logits.logsumexp(-1)
    logp = (logits / sampling.temperature).log_softmax(-1)
    filtered = _filter(logp, sampling)
    cumulative = filtered.double().exp().cumsum(-1)
    target = uniforms[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, target, right=True).squeeze(-1).clamp(max=logits.shape[-1] - 1)
    return tokens, logp.gather(-1, tokens[:, None]).squeeze(-1)


def _filter(logp: Tensor, sampling: Sampling) -> Tensor:
    if sampling.top_k:
        threshold = logp.topk(min(sampling.top_k, logp.shape[-1]), -1).values[:, -1:]
        logp = logp.masked_fill(logp < threshold, -torch.inf)
    if sampling.top_p < 1:
        ordered, index = logp.sort(-1, descending=True)
        mass_before = ordered.exp().cumsum(-1) - ordered.exp()
        drop = mass_before >= sampling.top_p
        logp = logp.masked_fill(drop.scatter(-1, index, drop), -torch.inf)
    return logp


def _seed_of(sampling: Sampling, row: int) -> int:
    return sampling.seeds[row] if sampling.seeds else row


def _budget_of(sampling: Sampling, row: int) -> int:
    return min(sampling.max_tokens, sampling.budgets[row]) if sampling.budgets else sampling.max_tokens


def _uniforms(seeds: Sequence[int], count: int) -> np.ndarray:
    """Uniform numbers ``(len(seeds), count)`` in [0, 1), a counter-based stream for each seed."""
    return np.stack([np.random.Generator(np.random.Philox(key=seed % 2**64)).random(count) for seed in seeds])
