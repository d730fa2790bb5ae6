"""TRL's GRPO loss on the fixed tensors."""

import importlib
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from other_trainers.tensors import BETA, CLIP_HIGH, CLIP_LOW, NORM_LENGTH, with_gradient


def trl_results(x: dict[str, Tensor]) -> dict[str, Any]:
    """`GRPOTrainer._compute_loss` with log-probabilities handed to it, so that no model is needed."""
    trainer = importlib.import_module("trl").GRPOTrainer
    results: dict[str, Any] = {}
    for loss_type, level, beta in (
        ("grpo", "token", 0.0),
        ("grpo", "token", BETA),
        ("grpo", "sequence", 0.0),
        ("dapo", "token", 0.0),
        ("dr_grpo", "token", 0.0),
        ("cispo", "token", 0.0),
    ):
        for kind in ("advantages", "sequence_advantages"):

            def run(
                logp: Tensor,
                loss_type: str = loss_type,
                level: str = level,
                beta: float = beta,
                kind: str = kind,
            ) -> Tensor:
                one = SimpleNamespace(num_processes=1, reduce=lambda t, reduction: t, gather=lambda t: t)
                stand_in = SimpleNamespace(
                    _get_per_token_logps_and_entropies=lambda *a, **k: (logp, torch.zeros_like(logp), None),
                    _metrics=defaultdict(lambda: defaultdict(list)),
                    _entropy_bonus_enabled=False,
                    accelerator=one,
                    args=SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
                    aux_loss_enabled=False,
                    beta=beta,
                    current_gradient_accumulation_steps=1,
                    epsilon_high=CLIP_HIGH,
                    epsilon_low=CLIP_LOW,
                    importance_sampling_level=level,
                    loss_type=loss_type,
                    max_completion_length=NORM_LENGTH,
                    model=SimpleNamespace(training=True),
                    off_policy_mask_threshold=None,
                    top_entropy_quantile=1.0,
                    use_vllm=False,
                )
                ids = torch.zeros(4, 12, dtype=torch.long)
                inputs = {
                    "prompt_ids": ids[:, :1],
                    "prompt_mask": ids[:, :1],
                    "completion_ids": ids,
                    "completion_mask": torch.ones_like(x["mask"]),
                    "tool_mask": x["mask"],
                    "advantages": x[kind],
                    "old_per_token_logps": x["old_logp"],
                    "ref_per_token_logps": x["ref_logp"],
                    "num_items_in_batch": x["mask"].sum(),
                }
                return trainer._compute_loss(stand_in, None, inputs)

            with_kl = " with kl" if beta else ""
            results[f"{loss_type} at {level} level{with_kl} | {kind}"] = with_gradient(run, x["logp"])
    return results
