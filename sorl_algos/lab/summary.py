"""What the runs of a cell have in common: collapse rates, scores, differences paired by seed; as Markdown tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sorl_algos.evaluation.statistics import interval, paired_difference

Record = Mapping[str, Any]


@dataclass(frozen=True)
class CellSummary:
    """The runs of one arm in one regime, over seeds.

    Args:
        final, best, area: mean, low and high (bootstrap over seeds, 95 %) of the verdicts' scores.
        clip: mean clip fraction over all updates of all runs.
        kl: mean of each run's median approximate KL.
        alarm: median update of the first alarm among the runs in which it rang; None where it never did.
    """

    label: str
    regime: str
    runs: int
    collapses: int
    final: dict[str, float]
    best: dict[str, float]
    area: dict[str, float]
    clip: float
    kl: float
    alarms: int
    alarm: float | None

    @property
    def rate(self) -> tuple[float, float, float]:
        """Share of collapsed runs with its Wilson interval."""
        return wilson(self.collapses, self.runs)


def wilson(successes: int, trials: int, z: float = 1.959964) -> tuple[float, float, float]:
    """A share and its score interval (Wilson 1927), 95 % by default.

    Raises:
        ValueError: no trials, or more successes than trials.
    """
    if not 0 <= successes <= trials or not trials:
        raise ValueError(f"{successes} of {trials} is no share")
    share = successes / trials
    centre = (share + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z / (1 + z * z / trials) * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    return share, max(0.0, centre - half), min(1.0, centre + half)


def summarise(records: Sequence[Record]) -> list[CellSummary]:
    """One summary for each regime and label, in order of first appearance."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        groups.setdefault((record["regime"], record["label"]), []).append(record)
    return [_summary(label, regime, own) for (regime, label), own in groups.items()]


def _summary(label: str, regime: str, records: Sequence[Record]) -> CellSummary:
    clips = [value for record in records for value in record["curves"].get("clip", []) if value is not None]
    kls = [_median(record["curves"].get("kl", [])) for record in records]
    rang = [record["alarm_update"] for record in records if record["alarm_update"] is not None]
    return CellSummary(
        label=label,
        regime=regime,
        runs=len(records),
        collapses=sum(bool(record["collapsed"]) for record in records),
        **{name: interval([record[name] for record in records]) for name in ("final", "best", "area")},
        clip=sum(clips) / max(len(clips), 1),
        kl=sum(kls) / len(kls),
        alarms=len(rang),
        alarm=_median(rang) if rang else None,
    )


def _median(values: Sequence[float | None]) -> float:
    ordered = sorted(value for value in values if value is not None)
    if not ordered:
        return math.nan
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def compare(records: Sequence[Record], first: str, second: str, regime: str, score: str = "final") -> dict[str, float]:
    """``second - first`` of a score, paired by seed: mean, low, high, p, and the number of seeds.

    Raises:
        ValueError: fewer than two seeds in common.
    """
    by_seed: dict[str, dict[int, float]] = {first: {}, second: {}}
    for record in records:
        if record["regime"] == regime and record["label"] in by_seed:
            by_seed[record["label"]][record["seed"]] = record[score]
    seeds = sorted(by_seed[first].keys() & by_seed[second].keys())
    if len(seeds) < 2:
        raise ValueError(f"{first} and {second} have {len(seeds)} seeds in common in {regime}; two are needed")
    found = paired_difference([by_seed[first][seed] for seed in seeds], [by_seed[second][seed] for seed in seeds])
    return {**found, "seeds": len(seeds)}


def table(records: Sequence[Record]) -> str:
    """A Markdown table of all cells, regimes together."""
    lines = [
        "| regime | arm | runs | collapsed (95 %) | final EM (95 %) | best | area | clipped | KL | alarm at |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for own in sorted(summarise(records), key=lambda cell: cell.regime):
        share, low, high = own.rate
        final = own.final
        alarm = "–" if own.alarm is None else f"{own.alarm:.0f} ({own.alarms} of {own.runs})"
        lines.append(
            f"| {own.regime} | {own.label} | {own.runs} | {share:.0%} ({low:.0%} to {high:.0%}) "
            f"| {final['mean']:.3f} ({final['low']:.3f} to {final['high']:.3f}) | {own.best['mean']:.3f} "
            f"| {own.area['mean']:.3f} | {own.clip:.3f} | {own.kl:.2g} | {alarm} |"
        )
    return "\n".join(lines)


def paired_table(records: Sequence[Record], baseline: str, score: str = "final") -> str:
    """A Markdown table of every arm against one, paired by seed, in every regime that has both."""
    lines = [
        f"| regime | arm | seeds | {score} EM against {baseline} (95 %) | p |",
        "|---|---|---|---|---|",
    ]
    for own in sorted(summarise(records), key=lambda cell: cell.regime):
        if own.label == baseline:
            continue
        try:
            found = compare(records, baseline, own.label, own.regime, score)
        except ValueError:
            continue
        lines.append(
            f"| {own.regime} | {own.label} | {found['seeds']:.0f} | {found['mean']:+.3f} "
            f"({found['low']:+.3f} to {found['high']:+.3f}) | {found['p']:.3f} |"
        )
    return "\n".join(lines)
