"""Instruments of a run: what is logged of rollouts and updates, in the glossary's words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sorl_algos.batch import Batch
from sorl_algos.losses.policy import clip_fractions
from sorl_algos.losses.segments import RATIO_LEVELS, masked
from sorl_algos.losses.value import explained_variance
from sorl_env.trajectory import Trajectory


def rollout_metrics(trajectories: Sequence[Trajectory], kept: Sequence[Trajectory]) -> dict[str, float]:
    """Means over the episodes of a rollout batch (those kept for training), and how many were dropped."""
    turns = [turn for item in kept for turn in item.turns]
    kinds = [note["action_kind"] for item in kept for note in item.info["turns"]]
    episodes = max(len(kept), 1)
    return {
        "reward_mean": sum(turn.reward for turn in turns) / episodes,
        "em_train": sum(item.info["scores"].get("exact_match", 0.0) for item in kept) / episodes,
        "searches_mean": sum(item.info["searches"] for item in kept) / episodes,
        "turns_mean": len(turns) / episodes,
        "response_tokens_mean": sum(len(turn.action_ids) for turn in turns) / episodes,
        "valid_action_rate": sum(kind in ("search", "answer") for kind in kinds) / max(len(kinds), 1),
        "cut_rate": sum(turn.truncated for turn in turns) / max(len(turns), 1),
        "truncated_rate": sum(item.stop != "answered" for item in kept) / episodes,
        "dropped_episodes": float(len(trajectories) - len(kept)),
        "tokens": float(sum(len(turn.action_ids) + len(turn.observation_ids) for turn in turns)),
    }


@torch.no_grad()
def update_sums(logp: Tensor, micro: Batch, *, clip_low: float, clip_high: float) -> dict[str, Tensor]:
    """Clip counts of a micro-batch at all three ratio levels, whatever the algorithm's own (sums over tokens)."""
    assert micro.old_logp is not None
    counts = clip_fractions(
        logp,
        micro.old_logp,
        micro.loss_mask,
        micro.turn_ids,
        clip_low=clip_low,
        clip_high=clip_high,
        advantages=micro.advantages,
    )
    return {name: value for name, value in counts.items() if name != "tokens"}


@torch.no_grad()
def update_metrics(batch: Batch, entropy: Tensor, totals: dict[str, Tensor]) -> dict[str, float]:
    """Turns the sums of an update's optimiser steps into the logged quantities.

    Fractions are over action tokens of all steps; ``factor``, ``rho`` and norms are means over the steps.
    """
    assert batch.old_logp is not None
    tokens = batch.loss_mask.sum().clamp(min=1)
    mismatch = masked(batch.old_logp - batch.rollout_logp, batch.loss_mask)
    logged: dict[str, Any] = {
        "entropy": masked(entropy, batch.loss_mask).sum() / tokens,
        # tokens were sampled by the engine: KL(engine || trainer), k3
        "mismatch_kl": masked(torch.expm1(mismatch) - mismatch, batch.loss_mask).sum() / tokens,
    }
    if batch.ref_logp is not None:
        logged["ref_kl"] = masked(batch.old_logp - batch.ref_logp, batch.loss_mask).sum() / tokens
    if batch.values is not None and batch.returns is not None:
        logged["explained_variance"] = explained_variance(batch.values, batch.returns, batch.loss_mask)
    if batch.advantages is not None:
        logged["advantage_abs_mean"] = masked(batch.advantages.abs(), batch.loss_mask).sum() / tokens
    steps = totals.get("steps", torch.ones(()))
    if "skipped_minibatches" in totals:
        logged["skipped_minibatches"] = totals["skipped_minibatches"]
    if "tokens" in totals:
        seen = totals["tokens"].clamp(min=1)
        for level in RATIO_LEVELS:
            for suffix in ("", "_high", "_low"):
                logged[f"clip_fraction_{level}{suffix}"] = totals[f"clipped_{level}{suffix}"] / seen
        squares = totals["sum_ratio_squared"]
        logged |= {
            "clip_fraction": totals["clipped_tokens"] / seen,
            "approx_kl": totals["sum_kl"] / seen,
            "ratio_mean": totals["sum_ratio"] / seen,
            "ratio_max": totals["max_ratio"],
            # Kish: (sum w)^2 / (n sum w^2), 1 when all ratios are equal
            "ess": totals["sum_ratio"].square() / (seen * squares.clamp(min=1e-12)),
            "policy_loss": totals["policy_loss"] / steps,
        }
        if "factors" in totals:
            logged["factor"] = totals["sum_factor"] / totals["factors"].clamp(min=1)
            logged["rho"] = totals["max_rho"]
    if "value_loss" in totals:
        logged["value_loss"] = totals["value_loss"] / steps
    for name, value in totals.items():
        if name.startswith("step/"):
            logged[name.removeprefix("step/")] = value / steps
    # One transfer to the host for the whole update.
    names = list(logged)
    values = torch.stack([torch.as_tensor(logged[name]).float().cpu() for name in names]).tolist()
    return dict(zip(names, values, strict=True))
