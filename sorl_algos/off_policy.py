"""Correction for what separates the policy that sampled from the policy that trains, as a stage of an update."""

from __future__ import annotations

import torch
from torch import Tensor

from sorl_algos.batch import Batch
from sorl_algos.config import TrainConfig
from sorl_algos.distributed import all_max, all_sum
from sorl_algos.losses import corrections
from sorl_algos.losses.corrections import Correction, effective_sample_size


def correction_of(batch: Batch, config: TrainConfig) -> Correction:
    """Weights and counted tokens of the rollout batch by the correction that the settings name (not "none")."""
    assert batch.old_logp is not None
    tensors = (batch.old_logp, batch.rollout_logp, batch.loss_mask, batch.turn_ids)
    level, pooling, low, high = (
        config.correction_level, config.correction_pooling, config.correction_low, config.correction_high
    )  # fmt: skip
    if config.correction == "truncated_is":
        return corrections.truncated_is(*tensors, level=level, pooling=pooling, cap=high)
    if config.correction == "decoupled":
        return corrections.decoupled_weights(*tensors, level=level, pooling=pooling, cap=high)
    drop = corrections.icepop if config.correction == "icepop" else corrections.rejection
    leave = bool(config.rejected_leave_denominator)
    return drop(*tensors, level=level, pooling=pooling, low=low, high=high, rejected_leave_denominator=leave)


def correct(batch: Batch, config: TrainConfig) -> tuple[Batch, dict[str, Tensor]]:
    """Fills ``weights`` and ``counted_mask``; returns also what is logged, over all ranks (0-d tensors).

    ``correction_rejected`` and ``correction_truncated``: shares of the action tokens; ``correction_max_ratio``: the
    largest ratio of trainer to engine at the level; ``correction_ess``: effective sample size of the weights, a
    fraction.
    """
    if config.correction == "none":
        return batch, {}
    found = correction_of(batch, config)
    names = ("tokens", "rejected_tokens", "truncated_tokens", "sum_weight", "sum_weight_squared")
    sums = all_sum(torch.stack([found.metrics[name].to(torch.float64) for name in names]))
    tokens, rejected, truncated, weight, squared = sums.unbind()
    report = {
        "correction_rejected": rejected / tokens.clamp(min=1),
        "correction_truncated": truncated / tokens.clamp(min=1),
        "correction_max_ratio": all_max(found.metrics["max_mismatch_ratio"]),
        "correction_ess": effective_sample_size(weight, squared, tokens),
    }
    return batch.replace(weights=found.weights, counted_mask=found.mask), report
