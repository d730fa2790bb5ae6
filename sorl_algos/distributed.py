"""What several ranks must agree on: counts before a loss, sums after it."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from sorl_algos.batch import Batch
from sorl_algos.losses.reduce import Counts, counts_of


def world_size() -> int:
    """Number of ranks; 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """This process's number; 0 without a process group. Rank 0 writes files."""
    return dist.get_rank() if world_size() > 1 else 0


def all_sum(tensor: Tensor) -> Tensor:
    """The sum of a tensor over all ranks."""
    if world_size() > 1:
        tensor = tensor.clone()
        dist.all_reduce(tensor)
    return tensor


def all_max(tensor: Tensor) -> Tensor:
    """The largest of a tensor over all ranks, entry by entry."""
    if world_size() > 1:
        tensor = tensor.clone()
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor


def agreed_maximum(number: int, device: torch.device) -> int:
    """The largest of a whole number over all ranks: how many forwards each has to take part in."""
    return number if world_size() == 1 else int(all_max(torch.tensor(number, device=device)))


def any_rank(flag: bool, device: torch.device) -> bool:
    """Whether it holds on any rank; all ranks must ask."""
    return bool(agreed_maximum(int(flag), device))


def global_counts(minibatch: Batch) -> Counts:
    """Action tokens, turns and sequences of the minibatch over all ranks: one all-reduce, before any loss."""
    own = counts_of(minibatch.loss_mask, minibatch.turn_ids)
    total = all_sum(torch.stack([torch.as_tensor(x) for x in (own.tokens, own.turns, own.sequences)]))
    return Counts(*total.unbind())
