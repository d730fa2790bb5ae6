"""Sources that put a distance between the policy that samples and the policy that trains, of a known size."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from sorl_env.trajectory import Trajectory

Weights = list[tuple[str, Tensor]]


class DistantSource:
    """Wraps a source whose engine has weights of its own, and gives it older or altered ones.

    Args:
        inner: a SyncSource; its engine must not share tensors with the policy.
        staleness: the engine samples with the weights published so many versions ago (the first, until there are so
            many).
        mismatch: as in `Regime`.
        seed: of the noise; each version has noise of its own.
    """

    def __init__(self, inner: Any, *, staleness: int = 0, mismatch: str = "", seed: int = 0) -> None:
        self.inner, self.staleness, self.mismatch, self.seed = inner, staleness, mismatch, seed
        self._past: deque[tuple[int, Weights]] = deque(maxlen=staleness + 1)

    def publish(self, policy: Any, version: int) -> None:
        """Keeps a copy of these weights and hands the engine those that are due."""
        kept = [(name, value.detach().clone()) for name, value in policy.lm.named_parameters()]
        if self._past and self._past[-1][0] == version:
            self._past.pop()  # published again, after an evaluation
        self._past.append((version, kept))
        oldest_version, oldest = self._past[0]
        self.inner.engine.update_weights(altered(oldest, self.mismatch, self.seed + oldest_version), oldest_version)
        self.inner.version = version  # it decides which questions are played

    def __iter__(self) -> DistantSource:
        return self

    def __next__(self) -> list[Trajectory]:
        return next(self.inner)


def altered(weights: Weights, mismatch: str, seed: int) -> Iterator[tuple[str, Tensor]]:
    """The weights, rounded to bfloat16 or with relative normal noise (see `Regime.mismatch`).

    Raises:
        ValueError: neither "", "bfloat16" nor a number.
    """
    if mismatch in ("", "bfloat16"):
        for name, value in weights:
            yield name, value.to(torch.bfloat16).to(value.dtype) if mismatch else value
        return
    scale = float(mismatch)
    generator = torch.Generator().manual_seed(seed)
    for name, value in weights:
        noise = torch.randn(value.shape, generator=generator, dtype=torch.float32).to(value)
        spread = value.std() if value.numel() > 1 else torch.zeros_like(value.sum())
        yield name, value + scale * spread * noise
