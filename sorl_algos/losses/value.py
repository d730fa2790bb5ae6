"""Critic loss per token and the critic's explained variance."""

import torch
from torch import Tensor

from sorl_algos.losses.segments import masked


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, clip_range: float | None
) -> Tensor:
    """Clipped squared error 0.5 max((V - R)^2, (V_clipped - R)^2) per token: (B, T), 0 off the mask.

    V_clipped keeps V within clip_range of `old_values`, which are those stored at rollout; None switches the
    clipping off. The larger error counts, so leaving the trust region is never rewarded (PPO's reference
    implementation; Engstrom et al., arXiv 2005.12729). Only `values` carries a gradient.
    """
    values = masked(values, mask)
    returns = masked(returns, mask).detach()
    squared = (values - returns).square()
    if clip_range is None:
        return 0.5 * squared
    if clip_range <= 0:
        raise ValueError(f"clip_range of the value loss must be positive (None switches it off), got {clip_range}")
    old_values = masked(old_values, mask).detach()
    clipped = old_values + (values - old_values).clamp(-clip_range, clip_range)
    return 0.5 * torch.maximum(squared, (clipped - returns).square())


@torch.no_grad()
def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """1 - Var(R - V) / Var(R) over action tokens, a 0-d tensor: 1 is perfect, 0 no better than the mean.

    0 where the returns do not vary beyond rounding (or there are none): nothing could be explained.
    """
    on = mask.to(torch.bool)
    count = on.sum().clamp(min=1)

    def variance(x: Tensor) -> Tensor:
        return masked(x - x.sum() / count, on).square().sum() / count

    returns = masked(returns, on)
    total = variance(returns)
    values = masked(values, on)
    rest = variance(returns - values)
    precision = torch.finfo(returns.dtype)
    # Equal returns, made as advantage + value, leave the rounding of values behind.
    size = (returns.square().sum() + values.square().sum()) / count
    rounding = 16.0 * precision.eps**2 * size
    return torch.where(total > rounding, 1.0 - rest / total.clamp(min=precision.tiny), 0.0)
