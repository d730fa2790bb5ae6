"""Timing of things that are compared: interleaved, so that a busy machine slows all of them alike."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of each round: of this process's processor time, and by the clock on the wall."""

    cpu: list[float]
    wall: list[float]


def interleaved(tasks: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, Times]:
    """Each task once a round, in an order that turns from round to round; one round before is not counted."""
    found = {name: Times([], []) for name in tasks}
    names = list(tasks)
    for task in tasks.values():
        task()
    gc.collect()
    gc.disable()
    try:
        for number in range(rounds):
            turned = number % len(names)
            for name in names[turned:] + names[:turned]:
                cpu, wall = time.process_time(), time.perf_counter()
                tasks[name]()
                found[name].cpu.append(time.process_time() - cpu)
                found[name].wall.append(time.perf_counter() - wall)
            gc.collect()
    finally:
        gc.enable()
    return found


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times as long one takes as the other: median of the rounds, and their quartiles."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f})"


def ratio(above: list[float], below: list[float]) -> Ratio:
    """Of the two times of each round: what slows a whole round cancels."""
    rounds = [a / b for a, b in zip(above, below, strict=True)]
    if len(rounds) < 2:
        return Ratio(rounds[0], rounds[0], rounds[0])
    low, _, high = statistics.quantiles(rounds, n=4)
    return Ratio(statistics.median(rounds), low, high)
