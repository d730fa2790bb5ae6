"""Learning-rate schedules: pure functions of the update, so that a resumed run needs no state of them."""

from __future__ import annotations

import math
from typing import Literal

Schedule = Literal["constant", "linear", "cosine"]


def rate_share(
    moved: int, *, schedule: Schedule, warmup_updates: int, total_updates: int, final_share: float = 0.0
) -> float:
    """Share of the full learning rate in the update before which the weights moved ``moved`` times.

    Linear warm-up to 1 over ``warmup_updates``; then constant, or down to ``final_share``, which would be reached at
    ``total_updates`` (the last update, ``moved = total_updates - 1``, still has a little more). Past the end it stays.
    0 while ``moved`` is negative: the critic learns alone.
    """
    if moved < 0:
        return 0.0
    if moved < warmup_updates:
        return (moved + 1) / (warmup_updates + 1)
    if schedule == "constant":
        return 1.0
    progress = min(1.0, (moved - warmup_updates) / max(1, total_updates - warmup_updates))
    rest = 1.0 - progress if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return final_share + (1.0 - final_share) * rest
