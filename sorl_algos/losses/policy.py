"""Policy losses per token. Reduction to a scalar is a second step (`reduce`), over global counts.

Sources: PPO (arXiv 1707.06347), GSPO (2507.18071), turn level (2511.20718), dual clip (1912.09729),
CISPO (2506.13585), REINFORCE (Williams 1992).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from sorl_algos.losses.segments import (
    RATIO_LEVELS,
    Pooling,
    RatioLevel,
    level_ratio,
    masked,
    token_log_ratio,
)


@dataclass(frozen=True, slots=True)
class LossOutput:
    """What every policy loss returns.

    per_token: (B, T) loss to minimise, 0 off the mask.
    clip_excess: (B, T) part of the free (unclipped) surrogate that the clip threw away, 0 off the mask;
        differentiable: the gradient of its reduction is the clipping-bias term C, and
        grad(reduced -per_token) = grad(reduced free surrogate) - C.
    ratio: (B, T) detached ratio of the loss's level, 1 off the mask.
    metrics: detached 0-d tensors. A name that starts with `max_` is combined over micro-batches and ranks by
        maximum; every other is a sum over action tokens, combined by addition and divided by `tokens` at the
        end.
    """

    per_token: Tensor
    clip_excess: Tensor
    ratio: Tensor
    metrics: dict[str, Tensor]


def clipped_surrogate(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    turn_ids: Tensor,
    *,
    level: RatioLevel,
    clip_low: float,
    clip_high: float,
    pooling: Pooling = "mean",
    dual_clip: float | None = None,
) -> LossOutput:
    """Clipped surrogate at token (PPO), turn or sequence (GSPO) level.

    free = w A, held = clip(w, 1 - clip_low, 1 + clip_high) A, loss = -min(free, held).
    With `dual_clip` c > 1 the loss of a token with A < 0 is at most -c A; what that bound discards counts as
    clip excess too, so that loss = -(free - excess) holds always.

    All tensors (B, T); `old_logp` and `advantages` are constants; the gradient flows through every
    log-probability of a segment. Raises ValueError for an unknown level or pooling, or dual_clip <= 1.
    """
    if dual_clip is not None and dual_clip <= 1.0:
        raise ValueError(f"dual_clip must be above 1 (it bounds the ratio of bad actions), got {dual_clip}")
    on = mask.to(torch.bool)
    advantages = masked(advantages, on).detach()
    ratio = level_ratio(logp, old_logp, on, turn_ids, level, pooling)
    free = ratio * advantages
    held = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    kept = torch.minimum(free, held)
    if dual_clip is not None:
        kept = torch.where(advantages < 0, torch.maximum(kept, dual_clip * advantages), kept)
    # torch.minimum halves the gradient between equals, and both halves then reach the ratio: nothing is lost
    per_token = torch.where(on, -kept, 0.0)
    clip_excess = torch.where(on, free - kept, 0.0)
    metrics = _policy_metrics(logp, old_logp, advantages, on, ratio)
    metrics |= _clip_counts(ratio.detach(), advantages, on, clip_low, clip_high, dual_clip)
    return LossOutput(per_token, clip_excess, ratio.detach(), metrics)


def cispo(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    turn_ids: Tensor,
    *,
    level: RatioLevel,
    clip_low: float,
    clip_high: float,
    pooling: Pooling = "mean",
) -> LossOutput:
    """CISPO (arXiv 2506.13585): the ratio is clipped as a constant weight, so no token loses its gradient.

    loss = -sg(clip(w, 1 - clip_low, 1 + clip_high)) A logp. The paper sets no lower bound: clip_low = 1.
    `clip_excess` is sg(w - clip(w)) A logp: the same weight identity as for the clipped surrogate.
    """
    on = mask.to(torch.bool)
    ratio = level_ratio(logp, old_logp, on, turn_ids, level, pooling).detach()
    weight = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return _score_function(logp, old_logp, advantages, on, ratio, weight)


def reinforce(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    turn_ids: Tensor,
    *,
    level: RatioLevel,
    pooling: Pooling = "mean",
) -> LossOutput:
    """REINFORCE (Williams 1992): loss = -sg(w) A logp, never clipped.

    On the sampling policy w is 1 and this is the published form; later mini-batches of the same rollout are
    weighted by their ratio. `clip_excess` is 0.
    """
    on = mask.to(torch.bool)
    ratio = level_ratio(logp, old_logp, on, turn_ids, level, pooling).detach()
    return _score_function(logp, old_logp, advantages, on, ratio, ratio)


def _score_function(
    logp: Tensor, old_logp: Tensor, advantages: Tensor, on: Tensor, ratio: Tensor, weight: Tensor
) -> LossOutput:
    """Loss -weight A logp with a constant weight; the excess is what the full ratio would have added."""
    advantages = masked(advantages, on).detach()
    score = masked(logp, on)
    metrics = _policy_metrics(logp, old_logp, advantages, on, ratio)
    high, low = on & (weight < ratio), on & (weight > ratio)
    metrics |= {
        "clipped_tokens": (high | low).sum(),
        "clipped_tokens_high": high.sum(),
        "clipped_tokens_low": low.sum(),
        "dual_clipped_tokens": torch.zeros_like(high.sum()),
    }
    return LossOutput(
        per_token=torch.where(on, -weight * advantages * score, 0.0),
        clip_excess=torch.where(on, (ratio - weight) * advantages * score, 0.0),
        ratio=ratio,
        metrics=metrics,
    )


@torch.no_grad()
def clip_fractions(
    logp: Tensor,
    old_logp: Tensor,
    mask: Tensor,
    turn_ids: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    advantages: Tensor | None = None,
    pooling: Pooling = "mean",
) -> dict[str, Tensor]:
    """How many action tokens are clipped at each of the three levels: additive counts, to divide by `tokens`.

    Without `advantages` a token counts when its ratio lies outside the interval (two-sided); with them only
    when the clip is active (above the interval and A > 0, or below it and A < 0). Keys: `tokens`, and for
    each level `clipped_<level>`, `clipped_<level>_high`, `clipped_<level>_low`.
    """
    on = mask.to(torch.bool)
    counts = {"tokens": on.sum()}
    for level in RATIO_LEVELS:
        ratio = level_ratio(logp, old_logp, on, turn_ids, level, pooling)
        high, low = _outside(ratio, on, clip_low, clip_high)
        if advantages is not None:
            high, low = high & (advantages > 0), low & (advantages < 0)
        counts[f"clipped_{level}"] = (high | low).sum()
        counts[f"clipped_{level}_high"] = high.sum()
        counts[f"clipped_{level}_low"] = low.sum()
    return counts


def _outside(ratio: Tensor, on: Tensor, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    return on & (ratio > 1.0 + clip_high), on & (ratio < 1.0 - clip_low)


def _clip_counts(
    ratio: Tensor, advantages: Tensor, on: Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> dict[str, Tensor]:
    """Tokens whose gradient the clip removes: above the interval with A > 0, below it with A < 0."""
    high, low = _outside(ratio, on, clip_low, clip_high)
    high, low = high & (advantages > 0), low & (advantages < 0)
    dual = torch.zeros_like(high) if dual_clip is None else on & (advantages < 0) & (ratio > dual_clip)
    return {
        "clipped_tokens": (high | low).sum(),
        "clipped_tokens_high": high.sum(),
        "clipped_tokens_low": low.sum(),
        "dual_clipped_tokens": dual.sum(),
    }


@torch.no_grad()
def _policy_metrics(logp: Tensor, old_logp: Tensor, advantages: Tensor, on: Tensor, ratio: Tensor) -> dict[str, Tensor]:
    """Sums over action tokens that describe the step; see `LossOutput.metrics`."""
    log_ratio = token_log_ratio(logp, old_logp, on)
    weight = torch.where(on, ratio, 0.0)
    return {
        "tokens": on.sum(),
        # tokens come from the old policy, so KL(old || new) = E[exp(l) - 1 - l] (k3) = E[-l] (k1)
        "sum_kl": (torch.expm1(log_ratio) - log_ratio).sum(),
        "sum_kl_k1": -log_ratio.sum(),
        "sum_ratio": weight.sum(),
        "sum_ratio_squared": weight.square().sum(),
        "sum_advantage": advantages.sum(),
        "max_ratio": weight.amax() if weight.numel() else weight.sum(),
    }
