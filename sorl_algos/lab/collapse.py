"""When a run counts as collapsed. Written down before the runs were made; docs/experiments.md repeats it.

A run has collapsed when

1. the mean of the held-out exact match over the last 10 updates falls below half of its own best so far and stays
   there to the end (a best below 0.05 is no peak to fall from), or
2. at its end the alarm stands for entropy (collapse or explosion), for tags, for invalid actions or for loops, or
3. a loss or gradient was not finite, so that the run ended early.

A run whose rollouts earned nothing in 10 updates in a row is ended there: without reward nothing is left to learn
from. Its last score counts for the rest of the run. (Added when only token PPO had been run.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sorl_algos.alarm import Alarm

WINDOW = 10
"""Updates of the mean."""
SHARE = 0.5
LEAST_BEST = 0.05
DEGENERATE = ("entropy_collapse", "entropy_explosion", "tag_degeneration", "invalid_actions", "loops")
SCORE = "eval/dev/exact_match"
FRUITLESS = 10
"""Updates in a row without any reward, after which a run is ended."""


class Fruitless:
    """Counts updates in a row without any reward: ``on_update`` sees each, ``__call__`` says whether to end."""

    def __init__(self) -> None:
        self.updates = 0

    def on_update(self, update: int, metrics: Mapping[str, float]) -> None:
        self.updates = 0 if metrics["reward_mean"] > 0 else self.updates + 1

    def __call__(self) -> bool:
        return self.updates >= FRUITLESS


@dataclass(frozen=True)
class Verdict:
    """What became of a run.

    Args:
        collapsed, reason: "score", "alarm:RULE" or "non_finite"; "" where it did not.
        collapse_update: first update of the final stretch below half; the last update for the other reasons.
        alarm_update, alarm_reason: when the alarm first rang, for anything.
        first, final, best, area: of the running mean of the held-out exact match: at the first evaluation, at the
            end, at its best, and on average over the run.
        ended_early: whether it was ended for want of reward.
    """

    collapsed: bool
    reason: str
    collapse_update: int | None
    alarm_update: int | None
    alarm_reason: str
    first: float
    final: float
    best: float
    area: float
    ended_early: bool = False


def running_score(rows: Sequence[Mapping[str, Any]]) -> list[tuple[int, float]]:
    """(update, mean held-out exact match of the evaluations of the last `WINDOW` updates) at every evaluation."""
    seen = [(int(row["update"]), float(row[SCORE])) for row in rows if row.get(SCORE) is not None]
    means = []
    for update, _ in seen:
        recent = [value for at, value in seen if update - WINDOW < at <= update]
        means.append((update, sum(recent) / len(recent)))
    return means


def judge(rows: Sequence[Mapping[str, Any]], *, finished: bool, planned: int | None = None) -> Verdict:
    """Applies the definition to the metric lines of a run.

    Args:
        finished: whether the run came to its end (False: it was stopped by losses that were not finite).
        planned: updates that the run was to have; None: as many as there are lines.

    Raises:
        ValueError: no evaluation among the lines.
    """
    means = running_score(rows)
    if not means:
        raise ValueError("a run without held-out scores cannot be judged; evaluate at least once")
    best_so_far, below_since = 0.0, None
    for update, value in means:
        best_so_far = max(best_so_far, value)
        if best_so_far >= LEAST_BEST and value < SHARE * best_so_far:
            below_since = update if below_since is None else below_since
        else:
            below_since = None
    alarm, rang, why = Alarm(), None, ""
    for row in rows:
        begun = alarm.update({name: value for name, value in row.items() if not name.startswith("eval/")})
        if begun and rang is None:
            rang, why = int(row["update"]), next(iter(begun))
    standing = next((name for name in DEGENERATE if name in alarm.active), "")
    last = int(rows[-1]["update"])
    reason, when = "", None
    if not finished:
        reason, when = "non_finite", last
    elif below_since is not None:
        reason, when = "score", below_since
    elif standing:
        reason, when = f"alarm:{standing}", last
    values = [value for _, value in means]
    planned = planned or len(rows)
    # Every evaluation stands for as many updates; those that were not made count as the last one.
    missed = (planned - len(rows)) * len(values) / len(rows)
    return Verdict(
        collapsed=bool(reason),
        reason=reason,
        collapse_update=when,
        alarm_update=rang,
        alarm_reason=why,
        first=values[0],
        final=values[-1],
        best=max(values),
        area=(sum(values) + missed * values[-1]) / (len(values) + missed),
        ended_early=finished and len(rows) < planned,
    )
