"""How fast episodes are played: engines in lockstep and streaming, beside what the engines' libraries do alone.

python scripts/bench_rollout.py --questions ../shared/data/qa/nq.jsonl --index runs/bench_retrieval/bm25
python scripts/bench_rollout.py ... --models base:short runs/warm/model:short --dtype bfloat16

The first table is equal work: the prompts that a lockstep run asked for, with their seeds and budgets, each engine as
it is called alone. The second is whole episodes on real questions and a real index. Rounds of both are interleaved,
so that a busy machine slows all alike; the round with the median time is shown. vLLM's rows are left out, with the
reason, where it is not installed.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("KMP_BLOCKTIME", "0")  # threads that wait must not spin while others work

import torch
from bench.rollout import Clock, medians, play, row
from bench.rollout_raw import Raw, transformers_generate, vllm_generate

from retrieval_index import open_index
from sorl_algos.models import load_language_model, resolve_model
from sorl_algos.rollout.engine import Sampling
from sorl_algos.rollout.hf import HFEngine
from sorl_env.questions import load_questions


def measure(options: argparse.Namespace, model_name: str, prompt: str, world: dict[str, Any]) -> None:
    directory = resolve_model(model_name)
    model, tokenizer = load_language_model(directory, dtype=getattr(torch, options.dtype))
    sampling = Sampling(options.max_turn_tokens, options.temperature, stop=("</search>", "</answer>"))
    settings = {"sampling": sampling, "max_total_tokens": options.max_total_tokens, "seed": options.seed}

    def run(engine: Any, *, lockstep: bool) -> Clock:
        return play(world | {"prompt": prompt}, engine, tokenizer, settings, slots=options.slots, lockstep=lockstep)

    size = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    print(f"\n## {model_name}, {size:.1f} M parameters, {options.dtype}, prompt {prompt!r}\n", flush=True)
    engines: dict[str, Callable[[], Any]] = {
        "HFEngine": lambda: HFEngine(model, tokenizer, max_batch=options.slots),
        "HFEngine, keys kept": lambda: HFEngine(
            model, tokenizer, max_batch=options.slots, kv_cache_mb=options.kv_cache_mb
        ),
    }
    if "hf" not in options.engines:
        engines.clear()
    try:
        if "vllm" not in options.engines:
            raise ValueError("not asked for")
        from sorl_algos.rollout.vllm import VLLMEngine

        vllm = VLLMEngine(
            directory, dtype=options.dtype, max_model_tokens=options.max_total_tokens, max_batch=options.slots
        )
    except ValueError as error:
        print(f"vLLM is left out: {error}\n")
    else:

        def fresh() -> Any:
            vllm.update_weights(model.named_parameters(), 0)  # empties the cache of prefixes
            return vllm

        engines["VLLMEngine"] = fresh
        run(vllm, lockstep=False)  # warm
    if not engines:
        return
    asked = run(next(iter(engines.values()))(), lockstep=True).asked  # warm, too
    raw: dict[str, Callable[[], Raw]] = {}
    if "HFEngine" in engines:
        raw["transformers.generate"] = lambda: transformers_generate(model, tokenizer, asked, sampling, options.slots)
        raw["HFEngine.generate"] = lambda: Raw.of(engines["HFEngine"](), asked, sampling)
    if "VLLMEngine" in engines:
        raw["vllm.LLM.generate"] = lambda: vllm_generate(engines["VLLMEngine"](), asked, sampling)
        raw["VLLMEngine.generate"] = lambda: Raw.of(engines["VLLMEngine"](), asked, sampling)
    found = medians(raw, options.rounds, lambda result: result.seconds)
    print(f"| equal work: {len(asked)} prompts | generated tokens/s | tokens |\n|---|---|---|")
    for name, result in found.items():
        print(f"| {name} | {result.tokens / result.seconds:,.0f} | {result.tokens:,} |")
    if "VLLMEngine.generate" in found:
        ours, theirs = (found[name] for name in ("VLLMEngine.generate", "vllm.LLM.generate"))
        rate = ours.tokens / ours.seconds / (theirs.tokens / theirs.seconds)
        print(f"\nVLLMEngine.generate: {rate:.2f} of vllm.LLM.generate")
    tasks = {
        f"{name}/{lockstep}": (lambda make=make, lockstep=lockstep: run(make(), lockstep=lockstep))
        for name, make in engines.items()
        for lockstep in (True, False)
    }
    clocks = medians(tasks, options.rounds, lambda clock: clock.wall)
    head = "| engine | | tokens/s | episodes/s | tokens | engine % | retriever % | environment % | glue % |"
    print(f"\n{head}\n|---|---|---|---|---|---|---|---|---|")
    for name in engines:
        for lockstep in (True, False):
            print(row(name, clocks[f"{name}/{lockstep}"], lockstep=lockstep))
    for name in engines:
        lockstep, streaming = clocks[f"{name}/True"], clocks[f"{name}/False"]
        gain, spared = lockstep.wall / streaming.wall, lockstep.cpu / streaming.cpu
        print(f"\n{name}: streaming is {gain:.2f} times as fast as lockstep ({spared:.2f} by processor time)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=Path, required=True, help="a JSONL file of questions")
    parser.add_argument("--index", type=Path, required=True, help="a built BM25 index")
    parser.add_argument("--models", nargs="+", default=["base:short", "smollm2:search_r1"], help="MODEL:PROMPT")
    parser.add_argument("--engines", nargs="+", choices=("hf", "vllm"), default=("hf", "vllm"))
    parser.add_argument("--episodes", type=int, default=128)
    parser.add_argument("--slots", type=int, default=16, help="episodes at one time")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--max-turn-tokens", type=int, default=128)
    parser.add_argument("--max-total-tokens", type=int, default=1024)
    parser.add_argument("--kv-cache-mb", type=float, default=2048.0)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    world: dict[str, Any] = {
        "retriever": open_index(options.index),
        "questions": load_questions(options.questions).sample_by_hash(options.episodes),
        "max_searches": 3, "top_k": 1, "max_observation_words": 60,
    }  # fmt: skip
    print(
        f"{options.episodes} questions of {options.questions.name}, {options.slots} at one time, BM25 over "
        f"{len(world['retriever']):,} passages, {options.threads} threads, median of {options.rounds} rounds"
    )
    for spec in options.models:
        name, _, prompt = spec.rpartition(":")
        measure(options, name, prompt, world)


if __name__ == "__main__":
    main()
