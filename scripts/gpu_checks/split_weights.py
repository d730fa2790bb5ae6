"""A rank of the item fsdp: one model whole, the same split over the ranks, one step of each. Rank 0 prints JSON."""

from __future__ import annotations

import copy
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu_checks.models import TEXTS, model_name
from sorl_algos.models import Policy, load_language_model
from sorl_algos.sharding import shard, whole

LR = 1e-3


def split_share(module: torch.nn.Module) -> float:
    """Of all weights, what lies on this rank."""
    weights = list(module.parameters())
    own = sum((w.to_local() if isinstance(w, DTensor) else w).numel() for w in weights)
    return own / sum(weight.numel() for weight in weights)


def main() -> None:
    cpu = "--cpu" in sys.argv
    device = torch.device("cpu" if cpu else f"cuda:{os.environ['LOCAL_RANK']}")
    if not cpu:
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if cpu else "nccl")
    dtype = None if cpu and "--bf16" not in sys.argv else torch.bfloat16
    model, tokenizer = load_language_model(model_name(cpu))
    policies = [Policy(one, compute_dtype=dtype, checkpointing=True) for one in (model, copy.deepcopy(model))]
    policies[0].to(device)
    shard(policies[1], device=device, compute_dtype=dtype)
    ids = torch.nn.utils.rnn.pad_sequence(
        [torch.tensor(tokenizer.encode(text)) for text in TEXTS], batch_first=True, padding_value=-1
    ).to(device)
    real = ids >= 0
    chosen = real.clone()
    chosen[:, 0] = False
    ids = ids.clamp(min=0)
    logp, gradients = [], []
    for policy in policies:
        optimizer = torch.optim.AdamW(policy.parameters(), lr=LR, weight_decay=0.0)
        scores = policy(ids, real, chosen).logp
        (-scores.sum() / chosen.sum()).backward()
        logp.append(scores.detach()[chosen])
        gradients.append([whole(weight.grad).detach().clone() for weight in policy.parameters()])
        optimizer.step()
    pairs = list(zip(*gradients, strict=True))
    apart = sum(float((one - other).square().sum()) for one, other in pairs) ** 0.5
    weights = list(zip(policies[0].parameters(), policies[1].parameters(), strict=True))
    # Adam's first step is about the rate in each weight; where a gradient is about zero its sign may turn.
    steps = sum(float((one.detach() - whole(other.detach())).abs().sum()) for one, other in weights)
    found = {
        "ranks": dist.get_world_size(),
        "dtype": str(dtype or torch.float32),
        "share_of_weights": split_share(policies[1]),
        "mean_gap": float((logp[0] - logp[1]).abs().mean()),
        "gradient_gap": apart / sum(float(one.square().sum()) for one, _ in pairs) ** 0.5,
        "step_gap": steps / sum(one.numel() for one, _ in weights) / LR,
        "peak_memory_gb": 0.0 if cpu else torch.cuda.max_memory_allocated() / 1e9,
    }
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
