"""Peak memory of token log-probabilities with their gradient: ours against plain log-softmax over whole logits.

`python scripts/bench_memory.py [--vocabulary 150000 --tokens 4096 --hidden 64]`. Each way runs in a process of its own,
which reports how far its largest resident size grew over what it had before the work; then both are compared.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from typing import Any

WAYS = {
    "naive": "log_softmax over (T, V) logits, entropy from it",
    "naive, no entropy": "log_softmax over (T, V) logits",
    "ours": "token_scores",
    "ours, bf16": "token_scores, products in bf16",
}


def rise_of(way: str, vocabulary: int, tokens: int, hidden_size: int) -> dict[str, Any]:
    """Runs one way in this process: peak rise in bytes, seconds, and sums to compare by."""
    import torch

    from sorl_algos.token_scores import token_scores

    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, hidden_size, generator=generator, requires_grad=True)
    weight = (torch.randn(vocabulary, hidden_size, generator=generator) / hidden_size**0.5).requires_grad_()
    targets = torch.randint(vocabulary, (tokens,), generator=generator)
    weight.grad, hidden.grad = torch.zeros_like(weight), torch.zeros_like(hidden)  # as when gradients accumulate
    torch.nn.functional.linear(hidden[:1], weight[:100]).sum().backward()  # libraries that load on first use
    weight.grad.zero_(), hidden.grad.zero_()
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    entropy = torch.zeros(())
    if way.startswith("ours"):
        dtype = torch.bfloat16 if way.endswith("bf16") else None
        logp, entropy = token_scores(hidden, targets, weight, compute_dtype=dtype)
    else:
        full = torch.nn.functional.linear(hidden, weight).log_softmax(-1)
        logp = full.gather(-1, targets[:, None]).squeeze(-1)
        if way == "naive":
            with torch.no_grad():
                entropy = -(full.exp() * full).sum(-1)
    (logp * torch.linspace(-1, 1, tokens)).sum().backward()
    seconds = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    unit = 1 if sys.platform == "darwin" else 1024  # Linux counts kilobytes
    samples = {
        "logp": logp[:: max(1, tokens // 64)].tolist(),
        "entropy": entropy[:: max(1, tokens // 64)].tolist() if entropy.dim() else [],
        "to_hidden": hidden.grad[:: max(1, tokens // 64)].flatten().tolist(),
        "to_weight": weight.grad[:: max(1, vocabulary // 64)].flatten().tolist(),
    }
    return {"rise_bytes": (peak - before) * unit, "seconds": seconds, "samples": samples}


def worst_difference(one: list[float], other: list[float]) -> float:
    """Over samples; 0 where one way has none."""
    return max((abs(a - b) for a, b in zip(one, other, strict=False)), default=0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=150_000)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--way", choices=list(WAYS), help="run this one here and print JSON")
    options = parser.parse_args()
    size = (options.vocabulary, options.tokens, options.hidden)
    if options.way:
        print(json.dumps(rise_of(options.way, *size)))
        return
    flags = [f"--{name}={getattr(options, name)}" for name in ("vocabulary", "tokens", "hidden")]
    found: dict[str, dict[str, Any]] = {}
    for way in WAYS:
        command = [sys.executable, __file__, *flags, f"--way={way}"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            print(f"{way}: did not end well ({done.returncode}; out of memory?)\n{done.stderr[-500:]}", file=sys.stderr)
            raise SystemExit(1)
        found[way] = json.loads(done.stdout)
    base = found["naive"]
    print("{1} tokens, vocabulary {0}, hidden size {2}; forward and backward".format(*size))
    columns = ("logp", "to_hidden", "to_weight", "entropy")
    print(f"{'way':18} {'peak rise, MB':>14} {'naive / it':>11} {'seconds':>8}  worst difference: {', '.join(columns)}")
    for way, result in found.items():
        ratio = base["rise_bytes"] / max(result["rise_bytes"], 1)
        gaps = (worst_difference(result["samples"][name], base["samples"][name]) for name in columns)
        rise, seconds = result["rise_bytes"] / 2**20, result["seconds"]
        print(f"{way:18} {rise:14.0f} {ratio:11.1f} {seconds:8.1f}  {', '.join(f'{gap:.1e}' for gap in gaps)}")


if __name__ == "__main__":
    main()
