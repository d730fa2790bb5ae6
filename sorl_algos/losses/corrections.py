"""Off-policy corrections between the policy that sampled and the policy that trains.

The mismatch of a token is old_logp - rollout_logp: what the trainer computes against what the engine
reported, both at the sampling temperature. One ratio at three levels (token, turn, sequence), four uses of
it; each returns weights that multiply a per-token loss and the mask from which denominators are counted.
Weights carry no gradient.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from sorl_algos.losses.segments import Pooling, RatioLevel, level_ratio, masked, token_log_ratio


@dataclass(frozen=True, slots=True)
class Correction:
    """What a correction hands to the loss.

    weights: (B, T), multiply the per-token loss; 0 on rejected tokens and off the mask.
    mask: (B, T) bool, the tokens that denominators count: all action tokens, or only those kept.
    metrics: detached 0-d tensors; names starting with `max_` combine by maximum, the others by addition.
    """

    weights: Tensor
    mask: Tensor
    metrics: dict[str, Tensor]


@torch.no_grad()
def mismatch_ratio(
    old_logp: Tensor,
    rollout_logp: Tensor,
    mask: Tensor,
    turn_ids: Tensor,
    *,
    level: RatioLevel,
    pooling: Pooling = "mean",
) -> Tensor:
    """pi_old / mu of each token at a level: (B, T), detached, 1 off the mask; pooled like the policy's."""
    return level_ratio(old_logp, rollout_logp, mask, turn_ids, level, pooling)


@torch.no_grad()
def truncated_is(
    old_logp: Tensor,
    rollout_logp: Tensor,
    mask: Tensor,
    turn_ids: Tensor,
    *,
    level: RatioLevel,
    cap: float,
    pooling: Pooling = "mean",
) -> Correction:
    """Truncated importance sampling (Ionides 2008; for samplers Yao et al. 2025): weight min(ratio, cap)."""
    ratio = mismatch_ratio(old_logp, rollout_logp, mask, turn_ids, level=level, pooling=pooling)
    on = mask.to(torch.bool)
    return _correction(ratio.clamp(max=_positive("cap", cap)), on, on, on, ratio)


@torch.no_grad()
def icepop(
    old_logp: Tensor,
    rollout_logp: Tensor,
    mask: Tensor,
    turn_ids: Tensor,
    *,
    level: RatioLevel,
    low: float,
    high: float,
    rejected_leave_denominator: bool,
    pooling: Pooling = "mean",
) -> Correction:
    """IcePop (Ling team 2025): the ratio itself as weight inside [low, high], zero outside."""
    ratio = mismatch_ratio(old_logp, rollout_logp, mask, turn_ids, level=level, pooling=pooling)
    on = mask.to(torch.bool)
    kept = on & _inside(ratio, low, high)
    return _correction(ratio, on, kept, kept if rejected_leave_denominator else on, ratio)


@torch.no_grad()
def rejection(
    old_logp: Tensor,
    rollout_logp: Tensor,
    mask: Tensor,
    turn_ids: Tensor,
    *,
    level: RatioLevel,
    low: float,
    high: float,
    rejected_leave_denominator: bool,
    pooling: Pooling = "mean",
) -> Correction:
    """Drop every segment whose ratio lies outside [low, high]; weight 1 on the others."""
    ratio = mismatch_ratio(old_logp, rollout_logp, mask, turn_ids, level=level, pooling=pooling)
    on = mask.to(torch.bool)
    kept = on & _inside(ratio, low, high)
    return _correction(torch.ones_like(ratio), on, kept, kept if rejected_leave_denominator else on, ratio)


@torch.no_grad()
def decoupled_weights(
    proximal_logp: Tensor,
    behaviour_logp: Tensor,
    mask: Tensor,
    turn_ids: Tensor,
    *,
    level: RatioLevel,
    cap: float | None = None,
    pooling: Pooling = "mean",
) -> Correction:
    """Decoupled PPO (Hilton et al., arXiv 2110.00641; AReaL, 2505.24298): weight pi_prox / mu, at most `cap`.

    It multiplies the surrogate clipped around pi_prox, that is `clipped_surrogate` with old_logp =
    proximal_logp: clipping around the behaviour policy would throw away stale but usable samples.
    """
    ratio = mismatch_ratio(proximal_logp, behaviour_logp, mask, turn_ids, level=level, pooling=pooling)
    on = mask.to(torch.bool)
    weights = ratio if cap is None else ratio.clamp(max=_positive("cap", cap))
    return _correction(weights, on, on, on, ratio)


@torch.no_grad()
def mismatch_by_turn(
    old_logp: Tensor, rollout_logp: Tensor, mask: Tensor, turn_ids: Tensor, *, turns: int
) -> dict[str, Tensor]:
    """Mismatch of each turn index, over the batch: five (turns,) tensors; later turns count with the last
    index.

    `tokens`, `sum_mismatch_kl` (k3 of KL(mu || pi)), `sum_weight`, `sum_weight_squared` add up over
    micro-batches; `max_ratio` combines by maximum (0 where a turn index has no token). See
    `effective_sample_size`.
    """
    on = mask.to(torch.bool)
    log_ratio = token_log_ratio(old_logp, rollout_logp, on)
    weight = masked(log_ratio.exp(), on)
    kl = torch.expm1(log_ratio) - log_ratio
    slot = torch.where(on, turn_ids.clamp(max=turns - 1), turns).flatten()  # off the mask: a spare slot

    def per_turn(x: Tensor) -> Tensor:
        return x.new_zeros(turns + 1).scatter_add(0, slot, x.flatten())[:turns]

    return {
        "tokens": per_turn(on.to(weight.dtype)),
        "sum_mismatch_kl": per_turn(kl),
        "sum_weight": per_turn(weight),
        "sum_weight_squared": per_turn(weight.square()),
        "max_ratio": weight.new_zeros(turns + 1).scatter_reduce(0, slot, weight.flatten(), "amax")[:turns],
    }


def effective_sample_size(sum_weight: Tensor, sum_weight_squared: Tensor, count: Tensor) -> Tensor:
    """Kish's (sum w)^2 / (n sum w^2), a fraction in 0 ... 1; 1 for equal weights, 0 where there are none."""
    tiny = torch.finfo(sum_weight.dtype).tiny
    return sum_weight.square() / (sum_weight_squared * count).clamp(min=tiny)


def _positive(name: str, value: float) -> float:
    if not value > 0:
        raise ValueError(f"{name} must be positive, got {value}")
    return value


def _inside(ratio: Tensor, low: float, high: float) -> Tensor:
    if not 0 <= low < high:
        raise ValueError(f"the kept interval needs 0 <= low < high, got [{low}, {high}]")
    return (ratio >= low) & (ratio <= high)


def _correction(weights: Tensor, on: Tensor, kept: Tensor, counted: Tensor, ratio: Tensor) -> Correction:
    weights = torch.where(kept, weights, 0.0)
    seen = torch.where(on, ratio, 0.0)
    metrics = {
        "tokens": on.sum(),
        "rejected_tokens": (on & ~kept).sum(),
        "truncated_tokens": (kept & (weights < ratio)).sum(),
        "sum_weight": weights.sum(),
        "sum_weight_squared": weights.square().sum(),
        "max_mismatch_ratio": seen.amax() if seen.numel() else seen.sum(),
    }
    return Correction(weights, counted, metrics)
