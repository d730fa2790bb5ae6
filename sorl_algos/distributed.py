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


_LOGGED = ("old_logp", "ref_logp", "values", "advantages", "raw_advantages", "returns")


def actions_of_all_ranks(batch: Batch, entropy: Tensor) -> tuple[Batch, Tensor]:
    """The action tokens of all ranks' batches, for the log: one row ``(1, N)`` and its entropies, on every rank.

    What does not belong to one token is empty in it. Without a process group the batch comes back as it is.
    """
    if world_size() == 1:
        return batch, entropy
    names = [name for name in _LOGGED if getattr(batch, name) is not None]
    tensors = [batch.loss_mask, batch.turn_ids, batch.rollout_logp, entropy, *(getattr(batch, name) for name in names)]
    own = torch.stack([tensor[batch.loss_mask].to(entropy.dtype) for tensor in tensors])  # the first row: all ones
    longest = agreed_maximum(own.shape[1], own.device)
    own = torch.nn.functional.pad(own, (0, longest - own.shape[1]))
    found = [torch.empty_like(own) for _ in range(world_size())]
    dist.all_gather(found, own)
    together = torch.cat(found, dim=1)
    on, turn_ids, rollout_logp, entropies, *rest = together[:, together[0] > 0].unsqueeze(1).unbind()
    nothing = torch.zeros_like(on)
    row = Batch(
        token_ids=nothing.long(),
        attention_mask=on.bool(),
        loss_mask=on.bool(),
        turn_ids=turn_ids.long(),
        rewards=nothing,
        rollout_logp=rollout_logp,
        group_ids=nothing.sum(1).long(),
    )
    return row.replace(**dict(zip(names, rest, strict=True))), entropies
