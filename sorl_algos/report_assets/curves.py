"""The curves of the page, grouped by the question that they answer; several runs share each chart."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from sorl_algos.report_assets.chart import (
    Guide,
    Mark,
    Series,
    legend,
    legend_entry,
    line_chart,
    smoothing_window,
    swatch,
)
from sorl_algos.report_assets.glossary import GROUPS, OTHERS, Plot
from sorl_algos.report_assets.markup import Html, join, number, tag
from sorl_algos.report_assets.runs import Named, find_number

FEW_RUNS = 3  # with more of them the thin lines hide each other


def curves_section(runs: Sequence[Named]) -> Html:
    met = {name for _, run in runs for name in run.metrics}
    if not met:
        return tag(
            "section",
            tag("h2", "Curves"),
            tag("p", "No metrics have been written yet.", class_="faint"),
            id="curves",
        )
    drawn: set[str] = set()
    groups = []
    for title, meaning, plots in GROUPS:
        figures = [figure for plot in plots if (figure := _figure(runs, plot, drawn))]
        if figures:
            groups.append(
                join([tag("h3", title), tag("p", meaning, class_="lead"), tag("div", figures, class_="grid")])
            )
    names = dict.fromkeys(_together(name) for name in sorted(met - drawn))
    others = [Plot(name.replace("_turn/*", " by turn"), ((name, ""),), OTHERS.get(name, "")) for name in names]
    rest = [figure for plot in others if (figure := _figure(runs, plot, drawn))]
    window = max(smoothing_window(len(points)) for _, run in runs for points in run.metrics.values())
    span = f"the mean of the last {window}\N{NO-BREAK SPACE}updates"
    if window == 1:
        smoothing = ""
    elif len(runs) <= FEW_RUNS:
        smoothing = f" The thin line is every update, the thick one {span}."
    else:
        smoothing = f" Each line is {span}."
    return tag(
        "section",
        tag("h2", "Curves"),
        tag("p", f"Point at a curve to read its values.{smoothing}", class_="lead"),
        legend([legend_entry(label, index) for index, (label, _) in enumerate(runs)])
        if len(runs) > 1
        else None,
        groups,
        tag(
            "details",
            tag("summary", f"All other metrics ({len(rest)})"),
            tag("div", rest, class_="grid small"),
            class_="fold",
        )
        if rest
        else None,
        id="curves",
    )


def _figure(runs: Sequence[Named], plot: Plot, drawn: set[str]) -> Html | None:
    """The chart of a plot, None if no run has its metrics. Adds the metrics that it shows to `drawn`.

    One run: each variant has its own colour. Several: the colour is the run's, dashes tell the variant.
    """
    several = len(runs) > 1
    met = sorted({name for _, run in runs for name in run.metrics})
    variants = [
        (name, label or _variant(name))
        for pattern, label in plot.metrics
        for name in met
        if fnmatchcase(name, pattern)
    ]
    if not variants:
        return None
    drawn.update(name for name, _ in variants)
    series = [
        Series(
            label=" ".join(filter(None, (run_label if several else "", label))) or plot.title,
            points=run.metrics.get(name, []),
            colour=index if several else variant,
            dash=variant if several else 0,
            markers=name.startswith("eval/"),
        )
        for index, (run_label, run) in enumerate(runs)
        for variant, (name, label) in enumerate(variants)
    ]
    labelled = [(variant, label) for variant, (_, label) in enumerate(variants) if label]
    entries = [
        tag("span", swatch(None if several else variant, variant if several else 0), label, class_="entry")
        for variant, label in labelled
    ]
    chart = line_chart(
        series,
        title=plot.title,
        guide=_guide(runs, plot),
        floor=plot.floor,
        ceiling=plot.ceiling,
        raw=len(runs) <= FEW_RUNS,
        marks=_marks(runs),
    )
    return tag(
        "figure",
        tag("figcaption", tag("h4", plot.title), tag("p", plot.meaning)),
        legend(entries) if len(entries) > 1 or plot.title.startswith("Held") else None,
        chart,
    )


def _together(name: str) -> str:
    """A metric, or the pattern of all turns of one."""
    return f"{name.rpartition('_turn/')[0]}_turn/*" if "_turn/" in name else name


def _variant(name: str) -> str:
    """What tells a metric from the others of its chart: the question set, or the turn (counted from 1)."""
    if name.startswith("eval/"):
        return name.split("/")[1]
    turn = name.rpartition("_turn/")[2]
    return f"turn {int(turn) + 1}" if "_turn/" in name and turn.isdigit() else ""


def _marks(runs: Sequence[Named]) -> list[Mark]:
    """One for each update at which an alarm began."""
    several = len(runs) > 1
    return [
        Mark(
            update,
            f"{f'{label}, ' if several else ''}alarm at update {update:.0f}: "
            + "; ".join(line.text for line in run.alarms if line.update == update),
            index if several else None,
        )
        for index, (label, run) in enumerate(runs)
        for update in dict.fromkeys(line.update for line in run.alarms)
    ]


def _guide(runs: Sequence[Named], plot: Plot) -> Guide | None:
    if plot.guide:
        return Guide(*plot.guide)
    if plot.metrics[0][0] == "rho":
        thresholds = {
            find_number(run.config, "threshold", "normalisation_threshold", "norm_threshold")
            for _, run in runs
        }
        if len(thresholds) == 1 and (threshold := thresholds.pop()) is not None:
            return Guide(threshold, f"threshold {number(threshold)}")
    return None
