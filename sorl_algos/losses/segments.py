"""Segments: the sets of action tokens that share one importance ratio.

A segment is one token, one turn, or all action tokens of a sequence. Everything here is scatter and gather
over the columns of a row; no Python loop, no transfer to the host.
"""

from typing import Literal

import torch
from torch import Tensor

RatioLevel = Literal["token", "turn", "sequence"]
Pooling = Literal["mean", "sum"]

RATIO_LEVELS: tuple[RatioLevel, ...] = ("token", "turn", "sequence")
LOG_RATIO_BOUND = 20.0  # exp(20) = 4.9e8: far past any clip, far from overflow, also when squared


def at_least_float32(x: Tensor) -> Tensor:
    """Lift half precision (and integers) to float32; leave float32 and float64 alone."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def masked(x: Tensor, mask: Tensor) -> Tensor:
    """`x` where `mask` holds, 0 elsewhere; what lies under the mask reaches neither value nor gradient.

    Selection, not multiplication: 0 * inf and 0 * NaN are NaN.
    """
    return torch.where(mask.to(torch.bool), at_least_float32(x), 0.0)


def turn_ids_from_mask(mask: Tensor) -> Tensor:
    """Number the runs of action tokens of each row.

    mask: (B, T), true on action tokens. Returns (B, T) long: 0, 1, 2 ... on the first, second, third ... run,
    -1 elsewhere. Two turns are always parted by an observation token, so runs are turns.
    """
    on = mask.to(torch.bool)
    before = torch.nn.functional.pad(on, (1, 0))[:, :-1]
    run = (on & ~before).long().cumsum(dim=1) - 1
    return torch.where(on, run, -1)


def segment_ids_of(mask: Tensor, turn_ids: Tensor, level: RatioLevel) -> Tensor:
    """Segment of each action token at a ratio level: (B, T) long, unique within a row, -1 off the mask."""
    on = mask.to(torch.bool)
    if level == "token":
        ids = torch.arange(on.shape[1], device=on.device).expand_as(on)
    elif level == "turn":
        ids = turn_ids
    elif level == "sequence":
        ids = torch.zeros_like(turn_ids)
    else:
        raise ValueError(f"unknown ratio level {level!r}; known: {', '.join(RATIO_LEVELS)}")
    return torch.where(on, ids, -1)


def segment_sum(x: Tensor, segment_ids: Tensor) -> Tensor:
    """Give every token the sum of `x` over its segment; 0 where the id is negative.

    x: (B, T); segment_ids: (B, T) long, each below T, equal within a segment of a row, negative = no segment.
    The gradient of each output reaches all tokens of its segment.
    """
    member = segment_ids >= 0
    slots = torch.where(member, segment_ids, x.shape[1])  # tokens without a segment share one spare slot
    x = torch.where(member, x, 0.0)
    sums = x.new_zeros(x.shape[0], x.shape[1] + 1).scatter_add(1, slots, x)
    return torch.where(member, sums.gather(1, slots), 0.0)


def segment_sizes(segment_ids: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Give every token its segment's size in tokens; 1 where the id is negative, so that one may divide."""
    ones = torch.ones_like(segment_ids, dtype=dtype)
    return torch.where(segment_ids >= 0, segment_sum(ones, segment_ids), 1.0)


def segment_mean(log_ratio: Tensor, segment_ids: Tensor) -> Tensor:
    """Give every token the mean of `log_ratio` over its segment; 0 where the id is negative.

    log_ratio: (B, T); segment_ids: (B, T) long as in `segment_sum`. Observation tokens (negative id) enter
    neither the sum nor the length.
    """
    return segment_sum(log_ratio, segment_ids) / segment_sizes(segment_ids, log_ratio.dtype)


def count_segments(segment_ids: Tensor) -> Tensor:
    """Number of different non-negative ids of each row: (B,) long."""
    width = segment_ids.shape[1]
    slots = torch.where(segment_ids >= 0, segment_ids, width)
    present = torch.zeros(segment_ids.shape[0], width + 1, dtype=torch.long, device=segment_ids.device)
    return present.scatter(1, slots, 1)[:, :width].sum(dim=1)


def token_log_ratio(logp: Tensor, old_logp: Tensor, mask: Tensor) -> Tensor:
    """l_t = logp - old_logp on action tokens, kept within +-20; 0 elsewhere. `old_logp` is a constant."""
    difference = masked(logp, mask) - masked(old_logp, mask).detach()
    return difference.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def level_ratio(
    logp: Tensor,
    old_logp: Tensor,
    mask: Tensor,
    turn_ids: Tensor,
    level: RatioLevel,
    pooling: Pooling = "mean",
) -> Tensor:
    """Importance ratio w of each token at a ratio level: (B, T), 1 off the mask, differentiable in `logp`.

    pooling="mean" is the length-normalised geometric mean (GSPO, arXiv 2507.18071; turn level: arXiv
    2511.20718); "sum" is the product ratio, its exponent bounded at +-20 as a whole.
    """
    log_ratio = token_log_ratio(logp, old_logp, mask)
    ids = segment_ids_of(mask, turn_ids, level)
    if pooling == "mean":
        return segment_mean(log_ratio, ids).exp()
    if pooling == "sum":
        return segment_sum(log_ratio, ids).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    raise ValueError(f"unknown pooling {pooling!r}; known: mean, sum")
