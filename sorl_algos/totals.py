"""Sums for the log: names starting with ``max_`` combine by maximum, all others by addition."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sorl_algos.distributed import all_max, all_sum, world_size

_OF_STEPS = ("step/", "steps", "skipped_minibatches")


def add_totals(totals: dict[str, Tensor], new: dict[str, Tensor]) -> None:
    """Adds the entries of ``new`` (0-d tensors) to ``totals``, in place."""
    for name, value in new.items():
        if name not in totals:
            totals[name] = value
        else:
            totals[name] = (torch.maximum if name.startswith("max_") else torch.add)(totals[name], value)


def totals_over_ranks(totals: dict[str, Tensor]) -> dict[str, Tensor]:
    """The sums of all ranks' micro-batches: two all-reduces. Every rank holds the same names and shapes.

    What a whole optimiser step reports (``step/...`` and counts of steps) is the same on every rank already.
    """
    if world_size() == 1:
        return totals
    steps = {name: value for name, value in totals.items() if name.startswith(_OF_STEPS)}
    largest = sorted(name for name in totals if name.startswith("max_"))
    added = sorted(name for name in totals if name not in steps and name not in largest)
    return steps | _together(totals, added, all_sum) | _together(totals, largest, all_max)


def _together(totals: dict[str, Tensor], names: list[str], reduce: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    if not names:
        return {}
    whole = reduce(torch.cat([totals[name].double().flatten() for name in names]))
    parts = whole.split([totals[name].numel() for name in names])
    return {name: part.view_as(totals[name]) for name, part in zip(names, parts, strict=True)}
