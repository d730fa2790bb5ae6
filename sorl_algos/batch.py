"""Trajectories (tuples of ids) become a Batch (padded tensors). Column t of every tensor speaks of token t."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from sorl_env.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class Batch:
    """Padded tensors of one rollout batch; ``(B, T)`` unless said. Later fields are None until their stage fills them.

    token_ids long; attention_mask, loss_mask bool; turn_ids long (-1: not an action token);
    rewards: a turn's reward on its last action token; rollout_logp: the engine's log-probability when sampling;
    old_logp, ref_logp, values: by the trainer before the first minibatch; weights: multiply the policy loss (see
    `losses.corrections`); counted_mask bool: action tokens that its denominators count (None: all of them);
    raw_advantages: as estimated, before whitening; group_ids: ``(B,)`` long; places: ``(B,)`` long, the episode's place
    in the list that was collated.
    """

    token_ids: Tensor
    attention_mask: Tensor
    loss_mask: Tensor
    turn_ids: Tensor
    rewards: Tensor
    rollout_logp: Tensor
    group_ids: Tensor
    places: Tensor | None = None
    old_logp: Tensor | None = None
    ref_logp: Tensor | None = None
    values: Tensor | None = None
    advantages: Tensor | None = None
    returns: Tensor | None = None
    weights: Tensor | None = None
    counted_mask: Tensor | None = None
    raw_advantages: Tensor | None = None

    def __post_init__(self) -> None:
        shape = self.token_ids.shape
        for field in fields(self):
            tensor = getattr(self, field.name)
            expected = shape[:1] if field.name in ("group_ids", "places") else shape
            if tensor is not None and tensor.shape != expected:
                raise ValueError(
                    f"Batch.{field.name} has shape {tuple(tensor.shape)}, expected {tuple(expected)}"
                )

    def __len__(self) -> int:
        return self.token_ids.shape[0]

    def replace(self, **changes: Any) -> Batch:
        return replace(self, **changes)

    def _map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        present = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}
        return Batch(**{name: function(tensor) for name, tensor in present.items()})

    def to(self, device: torch.device | str) -> Batch:
        return self._map(lambda tensor: tensor.to(device))

    def rows(self, index: Tensor | slice, *, longest: int | None = None) -> Batch:
        """The chosen sequences, cut to the ``longest`` of them (padding is on the right; None: looked up)."""
        if longest is None:
            attention = self.attention_mask[index]
            longest = max(int(attention.sum(-1).max()), 1) if len(attention) else 1
        return self._map(lambda tensor: tensor[index] if tensor.dim() == 1 else tensor[index][:, :longest])

    def lengths(self) -> Tensor:
        """Tokens of each sequence ``(B,)``."""
        return self.attention_mask.sum(-1)

    def silent(self) -> Batch:
        """The same tokens with none of them an action: a forward of it takes part, and adds nothing."""
        return self.replace(
            loss_mask=torch.zeros_like(self.loss_mask),
            turn_ids=torch.full_like(self.turn_ids, -1),
            counted_mask=None if self.counted_mask is None else torch.zeros_like(self.loss_mask),
        )

    def pieces(self, sequences: int, tokens: int | None = None) -> list[tuple[Tensor, Batch]]:
        """Micro-batches and the rows ``(n,)`` that each holds, short sequences first.

        Rows of like length go together, so that little of a forward is padding: at most ``sequences`` rows and
        ``tokens`` positions, padding included, each. A row longer than ``tokens`` is alone.
        """
        lengths = self.lengths().tolist()  # the one transfer to the host
        order = sorted(range(len(self)), key=lengths.__getitem__)
        cut: list[list[int]] = []
        for row in order:
            full = not cut or len(cut[-1]) == sequences
            if full or (tokens is not None and (len(cut[-1]) + 1) * lengths[row] > tokens):
                cut.append([])
            cut[-1].append(row)
        device = self.token_ids.device
        return [
            (index, self.rows(index, longest=max(lengths[rows[-1]], 1)))
            for rows in cut
            for index in [torch.tensor(rows, device=device)]
        ]

    def microbatches(self, sequences: int, tokens: int | None = None) -> list[Batch]:
        """The micro-batches of `pieces` alone."""
        return [micro for _, micro in self.pieces(sequences, tokens)]


def collate(trajectories: Sequence[Trajectory], pad_id: int, *, group_ids: Sequence[Any] | None = None) -> Batch:
    """Pads trajectories on the right. Masks come from the turns' lengths, never from token values.

    Args:
        trajectories: at least one.
        pad_id: written where ``attention_mask`` is False; may equal the end token.
        group_ids: hashable group of each trajectory; default its own ``group_id``.

    Raises:
        ValueError: no trajectory.
    """
    if not trajectories:
        raise ValueError("cannot collate an empty list of trajectories; every episode of the batch was dropped")
    lengths = [
        sum(len(turn.observation_ids) + len(turn.action_ids) for turn in item.turns) for item in trajectories
    ]
    shape = (len(trajectories), max(lengths))
    token_ids = torch.full(shape, pad_id, dtype=torch.long)
    attention = torch.arange(shape[1])[None] < torch.tensor(lengths)[:, None]
    turn_ids = torch.full(shape, -1, dtype=torch.long)
    rewards, rollout_logp = torch.zeros(shape), torch.zeros(shape)
    for row, item in enumerate(trajectories):
        ids: list[int] = []
        for number, turn in enumerate(item.turns):
            ids.extend(turn.observation_ids)
            start, end = len(ids), len(ids) + len(turn.action_ids)
            ids.extend(turn.action_ids)
            turn_ids[row, start:end] = number
            rollout_logp[row, start:end] = torch.tensor(turn.action_logprobs)
            rewards[row, end - 1] = turn.reward
        token_ids[row, : len(ids)] = torch.tensor(ids)
    groups = [item.group_id for item in trajectories] if group_ids is None else list(group_ids)
    numbers = {group: number for number, group in enumerate(dict.fromkeys(groups))}
    return Batch(
        token_ids=token_ids,
        attention_mask=attention,
        loss_mask=turn_ids >= 0,
        turn_ids=turn_ids,
        rewards=rewards,
        rollout_logp=rollout_logp,
        group_ids=torch.tensor([numbers[group] for group in groups]),
        places=torch.arange(len(trajectories)),
    )
