"""From per-token losses to one scalar, over counts that are global per optimiser step.

Every reduction has the signature (per_token, mask, turn_ids, counts, *, norm_length=None), so that a table
can hold them. The counts cover all micro-batches and ranks: the scalars of the micro-batches then add up to
the scalar of the whole mini-batch, however it was split. With counts of zero the loss is 0, still attached to
the graph.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sorl_algos.losses.segments import count_segments, masked, segment_ids_of, segment_sizes

Number = Tensor | int | float


@dataclass(frozen=True, slots=True)
class Counts:
    """Action tokens, turns and sequences of one optimiser step; sequences without action tokens do not count.

    Numbers or 0-d tensors (so that counting needs no transfer to the host).
    """

    tokens: Number
    turns: Number
    sequences: Number

    def __add__(self, other: "Counts") -> "Counts":
        """Counts of two disjoint parts of a mini-batch together."""
        return Counts(self.tokens + other.tokens, self.turns + other.turns, self.sequences + other.sequences)


Reduction = Callable[..., Tensor]


@torch.no_grad()
def counts_of(mask: Tensor, turn_ids: Tensor) -> Counts:
    """Counts of a (B, T) batch as 0-d long tensors."""
    on = mask.to(torch.bool)
    turns = count_segments(segment_ids_of(on, turn_ids, "turn"))
    return Counts(tokens=on.sum(), turns=turns.sum(), sequences=on.any(dim=1).sum())


def _over(total: Tensor, count: Number) -> Tensor:
    """total / count; a count of zero belongs to a total of zero and leaves it."""
    return total / (count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1))


def token_mean(
    per_token: Tensor, mask: Tensor, turn_ids: Tensor, counts: Counts, *, norm_length: float | None = None
) -> Tensor:
    """Sum over action tokens / all action tokens (DAPO, arXiv 2503.14476)."""
    return _over(masked(per_token, mask).sum(), counts.tokens)


def turn_mean(
    per_token: Tensor, mask: Tensor, turn_ids: Tensor, counts: Counts, *, norm_length: float | None = None
) -> Tensor:
    """Mean over all turns of each turn's token mean."""
    values = masked(per_token, mask)
    sizes = segment_sizes(segment_ids_of(mask, turn_ids, "turn"), values.dtype)
    return _over((values / sizes).sum(), counts.turns)


def sequence_mean_token_mean(
    per_token: Tensor, mask: Tensor, turn_ids: Tensor, counts: Counts, *, norm_length: float | None = None
) -> Tensor:
    """Mean over sequences of each sequence's token mean (GRPO, arXiv 2402.03300)."""
    values = masked(per_token, mask)
    lengths = mask.to(torch.bool).sum(dim=1).clamp(min=1)
    return _over((values.sum(dim=1) / lengths).sum(), counts.sequences)


def sequence_mean_token_sum(
    per_token: Tensor, mask: Tensor, turn_ids: Tensor, counts: Counts, *, norm_length: float | None = None
) -> Tensor:
    """Mean over sequences of each sequence's token sum."""
    return _over(masked(per_token, mask).sum(), counts.sequences)


def sequence_mean_token_sum_norm(
    per_token: Tensor, mask: Tensor, turn_ids: Tensor, counts: Counts, *, norm_length: float | None = None
) -> Tensor:
    """Mean over sequences of each sequence's token sum / a constant length (Dr. GRPO, arXiv 2503.20783).

    norm_length: tokens, the same for every batch (for example the token budget of an episode); the padded
    width would make the loss depend on padding. Raises ValueError when it is missing or not positive.
    """
    if norm_length is None or norm_length <= 0:
        raise ValueError(f"sequence_mean_token_sum_norm needs a positive norm_length in tokens, got {norm_length}")
    return _over(masked(per_token, mask).sum(), counts.sequences) / norm_length


REDUCTIONS: dict[str, Reduction] = {
    "token_mean": token_mean,
    "turn_mean": turn_mean,
    "sequence_mean_token_mean": sequence_mean_token_mean,
    "sequence_mean_token_sum": sequence_mean_token_sum,
    "sequence_mean_token_sum_norm": sequence_mean_token_sum_norm,
}
