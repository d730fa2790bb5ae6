"""Made-up metrics of healthy and collapsing runs, to judge the alarm by.

    python -m tests.sorl_algos.collapses

prints, over 200 seeds of each kind, how early the alarm comes and how often it comes for nothing. Levels, noise and
drifts of the healthy lines are those of the bundled quickstart (64 episodes an update); the collapses are ours: each
moves its own instrument by a factor e in `pace` updates from the 60th on, and the reward follows it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from sorl_algos.alarm import Alarm

ONSET = 60
Row = dict[str, float | None]


@dataclass
class Instruments:
    """What the metrics would be without noise; `success` is the true rate behind the reward."""

    success: float
    entropy: float
    length: float
    valid: float = 0.995
    faults: float = 0.005
    loops: float = 0.0
    cut: float = 0.003
    clip: float = 0.002
    kl: float = 2e-4
    ratio_max: float = 1.25
    ess: float = 0.999
    grad_norm: float = 1.1


def healthy(update: int, kind: str) -> Instruments:
    """A learning curve: success from 0.1 to 0.55 in about 25 updates, entropy from 0.7 to 0.35, a little longer."""
    learnt = 1 / (1 + math.exp(-(update - 15) / 5))
    found = Instruments(
        success=0.1 + 0.45 * learnt, entropy=0.35 + 0.35 * math.exp(-update / 25), length=12 + 3 * learnt
    )
    if kind == "sharpening":  # entropy keeps falling, answers grow to three times their length
        found.entropy = 0.03 + 0.67 * math.exp(-update / 40)
        found.length = 12 * (1 + update / 100)
    if kind == "reuse":  # dozens of optimiser steps on each rollout batch
        found.clip, found.kl, found.ratio_max, found.ess = 0.25, 0.03, 30.0, 0.7
    if kind == "from scratch":  # tags are learnt in the run
        found.valid = 0.2 + 0.79 * learnt
        found.faults = 1 - found.valid
    return found


HEALTHY = ("quickstart", "small batch", "sharpening", "reuse", "from scratch")


def collapsing(kind: str, late: float, pace: float, found: Instruments) -> Instruments:
    """`found` as it is `late` updates into a collapse."""
    if late <= 0:
        return found
    grown = math.exp(min(late / pace, 12.0))
    start = found.entropy
    if kind == "entropy blow-up":  # the reward halves when the entropy has risen by ln 2
        found.entropy = min(start * grown, 8.0)
        found.success *= math.exp(start - found.entropy)
    elif kind == "entropy collapse":  # one answer for all questions: halves at a ninth of the entropy
        found.entropy = start / grown
        found.success *= 0.2 + 0.8 * min(1.0, 1 / (0.3 * grown))
    elif kind == "ratio explosion":  # damage adds up: halves when the KL of the updates adds up to 0.35
        found.kl *= grown
        found.ratio_max *= grown
        found.ess = 1 / (1 + 1e-4 * grown**2)
        found.clip = min(0.9, found.clip * grown)
        found.grad_norm *= grown**0.5
        found.success *= math.exp(-2 * found.kl * pace)
    elif kind == "tag degeneration":  # a turn with a fault earns nothing
        found.faults = 1 - math.exp(-late / (3 * pace))
        found.valid = 1 - found.faults
        found.success *= found.valid
    elif kind == "length blow-up":  # what reaches the limit of 24 tokens a turn is cut and earns nothing
        found.length = min(found.length * grown, 72.0)
        found.cut = max(0.0, 1 - math.exp(-((found.length - 15.0) / 30.0)))
        found.success *= 1 - found.cut
    elif kind == "loops":
        found.loops = 1 - math.exp(-late / (3 * pace))
        found.success *= 1 - found.loops
    elif kind == "silent":  # no instrument but the reward sees it: it halves in 3.5 paces
        found.success *= math.exp(-late / (5 * pace))
    else:
        raise ValueError(kind)
    return found


COLLAPSES = (
    "entropy blow-up", "entropy collapse", "ratio explosion", "tag degeneration", "length blow-up", "loops", "silent",
)  # fmt: skip


def lines(kind: str, seed: int, updates: int, *, pace: float = 5.0) -> Iterator[tuple[Row, float]]:
    """The metrics of each update, noise and odd spikes included, and the true success rate behind them."""
    rng = random.Random(f"{kind} {seed}")
    episodes = 16 if kind == "small batch" else 64
    drift = 0.0
    for update in range(updates):
        found = healthy(update, kind)
        if kind in COLLAPSES:
            found = collapsing(kind, update - ONSET, pace, found)
        drift = 0.6 * drift + rng.gauss(0, 0.1)
        spike = math.exp(rng.uniform(1, 4)) if rng.random() < 0.03 else 1.0

        def share(rate: float, count: int) -> float:
            return sum(rng.random() < rate for _ in range(count)) / count

        turns = episodes * 2
        row: Row = {
            "reward_mean": share(found.success, episodes),
            "entropy": found.entropy * math.exp(drift),
            "valid_action_rate": share(found.valid, turns),
            "tag_fault_rate": share(found.faults, turns),
            "loop_rate": share(found.loops, turns),
            "cut_rate": share(found.cut, turns),
            "response_tokens_mean": found.length * math.exp(rng.gauss(0, 0.05)),
            "skipped_minibatches": 0.0,
        }
        if update >= 2:  # the critic alone learns first
            row |= {
                "approx_kl": found.kl * spike * math.exp(rng.gauss(0, 0.7)),
                "clip_fraction": min(1.0, found.clip * math.exp(rng.gauss(0, 0.4))),
                "ratio_max": 1 + (found.ratio_max - 1) * spike * math.exp(rng.gauss(0, 0.6)),
                "ess": max(0.0, found.ess - 0.02 * (spike - 1) / 50 - abs(rng.gauss(0, 0.03))),
                "grad_norm": found.grad_norm * spike**0.5 * math.exp(rng.gauss(0, 0.2)),
            }
        yield row, found.success


def first_alarm(kind: str, seed: int, updates: int, *, pace: float = 5.0) -> tuple[int | None, int | None, str]:
    """Update of the first alarm, update at which the true rate is below half of its best, the alarm's rules."""
    alarm, best = Alarm(), 0.0
    fired = halved = None
    rules = ""
    for update, (row, success) in enumerate(lines(kind, seed, updates, pace=pace)):
        best = max(best, success)
        begun = alarm.update(row)
        if begun and fired is None:
            fired, rules = update, ", ".join(begun)
        if halved is None and success < best / 2:
            halved = update
        if fired is not None and (halved is not None or kind in HEALTHY):
            break
    return fired, halved, rules


def main(seeds: int = 200) -> None:
    for kind in HEALTHY:
        found = [first_alarm(kind, seed, 200) for seed in range(seeds)]
        false = [rules for fired, _, rules in found if fired is not None]
        print(f"{kind:18} 200 updates: false alarm in {len(false)} of {seeds} {sorted(set(false))}", flush=True)
    for kind in COLLAPSES:
        for pace in (3.0, 5.0, 10.0, 20.0):
            found = [first_alarm(kind, seed, 260, pace=pace) for seed in range(seeds)]
            true = [(fired, halved) for fired, halved, _ in found if fired is not None and fired >= ONSET]
            leads = sorted(halved - fired for fired, halved in true if halved is not None)
            early = sum(fired is not None and fired < ONSET for fired, _, _ in found)
            before = sum(lead > 0 for lead in leads)
            half = found[0][1]
            print(
                f"{kind:18} pace {pace:4.0f}, halved at {half}: before that in {before} of {seeds}, "
                f"{early} before the onset, lead {leads[0]} / {leads[len(leads) // 2]} / {leads[-1]} updates "
                f"(least, median, most), by {sorted({rules for _, _, rules in found})[:4]}",
                flush=True,
            )


if __name__ == "__main__":
    main()
