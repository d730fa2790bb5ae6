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


def all_sum(tensor: Tensor) -> Tensor:
    """The sum of a tensor over all ranks."""
    if world_size() > 1:
        tensor = tensor.clone()
        dist.all_reduce(tensor)
    return tensor


def global_counts(minibatch: Batch) -> Counts:
    """Action tokens, turns and sequences of the minibatch over all ranks: one all-reduce, before any loss."""
    own = counts_of(minibatch.loss_mask, minibatch.turn_ids)
    total = all_sum(torch.stack([torch.as_tensor(x) for x in (own.tokens, own.turns, own.sequences)]))
    return Counts(*total.unbind())
