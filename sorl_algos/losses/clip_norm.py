"""Clipping-triggered normalisation (arXiv 2511.20718): hold back an update that rests on clipped tokens.

Two steps: sums that add up over micro-batches and ranks, then one factor. What the estimators measure and the
evidence for each is in docs/algorithms.md.
"""

import torch
from torch import Tensor

from sorl_algos.losses.segments import masked

RHO_EPSILON = 1e-8


@torch.no_grad()
def clip_sums(ratio: Tensor, advantages: Tensor, mask: Tensor, *, clip_low: float, clip_high: float) -> Tensor:
    """Sums behind the coefficient ratio over all action tokens: (4,), additive over micro-batches and ranks.

    ratio, advantages, mask: (B, T). The entries: sum of (w A)^2 and count over the tokens with w outside
    [1 - clip_low, 1 + clip_high] (either side, whatever the sign of A), then the same over the other action
    tokens.
    """
    return clip_sums_per_sequence(ratio, advantages, mask, clip_low=clip_low, clip_high=clip_high).sum(dim=0)


@torch.no_grad()
def clip_sums_per_sequence(
    ratio: Tensor, advantages: Tensor, mask: Tensor, *, clip_low: float, clip_high: float
) -> Tensor:
    """`clip_sums` of each row: (B, 4), for one factor per sequence."""
    on = mask.to(torch.bool)
    ratio = masked(ratio, on)
    squares = (ratio * masked(advantages, on)).square()
    clipped = on & ((ratio < 1.0 - clip_low) | (ratio > 1.0 + clip_high))
    other = on & ~clipped
    parts = [
        torch.where(clipped, squares, 0.0).sum(dim=1),
        clipped.sum(dim=1).to(squares.dtype),
        torch.where(other, squares, 0.0).sum(dim=1),
        other.sum(dim=1).to(squares.dtype),
    ]
    return torch.stack(parts, dim=1)


@torch.no_grad()
def ess_sums_per_sequence(ratio: Tensor, mask: Tensor) -> Tensor:
    """Sums behind the effective sample size of each row: (B, 3), additive: of w, of w^2, and the count of tokens."""
    on = mask.to(torch.bool)
    ratio = masked(ratio, on)
    return torch.stack([ratio.sum(dim=1), ratio.square().sum(dim=1), on.sum(dim=1).to(ratio.dtype)], dim=1)


@torch.no_grad()
def ess_factor(sums: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Factor and rho of the effective sample size from its sums (..., 3): rho = N sum w^2 / (sum w)^2 (Kish 1965).

    rho is 1 where all ratios agree and N where one of them outweighs all others; 0 without tokens.
    """
    total, squares, count = sums.unbind(dim=-1)
    tiny = torch.finfo(sums.dtype).tiny
    rho = count * squares / total.square().clamp(min=tiny)
    return factor_of(rho, threshold), rho


@torch.no_grad()
def normalisation_factor(sums: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Factor and rho of the coefficient ratio from its sums.

    sums: (..., 4) of `clip_sums`. Returns (factor, rho), each (...): rho = RMS of w A over clipped tokens
    divided by the RMS over the others (+1e-8); 0 where nothing is clipped; against a unit RMS where every
    token is clipped.
    """
    clipped_squares, clipped_count, other_squares, other_count = sums.unbind(dim=-1)
    clipped_rms = (clipped_squares / clipped_count.clamp(min=1.0)).sqrt()
    other_rms = (other_squares / other_count.clamp(min=1.0)).sqrt()
    # with no token left to compare with, an ordinary (whitened) coefficient stands in: RMS 1
    against = torch.where(other_count > 0, other_rms + RHO_EPSILON, 1.0)
    rho = clipped_rms / against
    return factor_of(rho, threshold), rho


@torch.no_grad()
def factor_of(rho: Tensor, threshold: float) -> Tensor:
    """1 where rho <= threshold, else 1 / rho; never above 1. For all estimators; NaN stays NaN."""
    return torch.where(rho <= threshold, torch.ones_like(rho), 1.0 / rho).clamp(max=1.0)
