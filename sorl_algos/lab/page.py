"""The lab's page: tables, and for every regime the curves of every arm: the mean over seeds, and each seed."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from sorl_algos.lab.cells import REGIMES
from sorl_algos.lab.summary import Record, summarise
from sorl_algos.metrics import write_text_atomically
from sorl_algos.report_assets.chart import Points, Series, legend, legend_entry, line_chart
from sorl_algos.report_assets.markup import Html, number, scrolling, tag

# Short name in the results, heading, value that the axis must reach.
PLOTS = (
    ("em", "Held-out exact match", 0.0),
    ("reward", "Reward of the rollouts", 0.0),
    ("clip", "Clip fraction at the algorithm's own level", 0.0),
    ("kl", "Approximate KL of the last step's policy to the rollout's", 0.0),
    ("c_norm", "Norm of the clipping-bias term C", 0.0),
    ("rho", "Trigger rho, largest of the update", 0.0),
    ("factor", "Normalisation factor, mean of the update", 1.0),
    ("adv_var", "Variance of the advantages before whitening", 0.0),
    ("entropy", "Entropy", 0.0),
    ("ratio_max", "Largest ratio", 1.0),
)
FEW_LINES = 8
"""Arms of one chart; more of them go into further charts."""


def write_page(records: Sequence[Record], output: Path) -> Path:
    """Writes ``report.html`` for these records, whole or not at all. It needs no network.

    Raises:
        ValueError: no records.
    """
    if not records:
        raise ValueError("there are no results to report; run a grid first")
    assets = resources.files("sorl_algos.report_assets")
    style = assets.joinpath("style.css").read_text(encoding="utf-8")
    script = assets.joinpath("script.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; form-action 'none'"
    head = tag(
        "head",
        Html('<meta charset="utf-8">'),
        Html(f'<meta http-equiv="Content-Security-Policy" content="{policy}">'),
        Html('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        Html('<meta name="color-scheme" content="light dark">'),
        tag("title", "SORL stability lab"),
        Html(f"<style>{style}</style>"),
    )
    regimes = list(dict.fromkeys(record["regime"] for record in records))
    body = tag(
        "body",
        tag(
            "main",
            tag(
                "header",
                tag("span", "SORL stability lab", class_="kicker"),
                tag("h1", f"{len(records)} runs in {len(regimes)} regimes"),
                class_="head",
            ),
            tag("section", tag("h2", "Results"), scrolling(_table(records)), id="results"),
            [_regime(records, regime) for regime in regimes],
        ),
        Html('<div id="read-out" role="status" hidden></div>'),
        Html(f"<script>{script}</script>"),
    )
    output.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomically(output, "<!doctype html>\n" + tag("html", head, body, lang="en"))
    return output


def _table(records: Sequence[Record]) -> Html:
    names = ("regime", "arm", "runs", "collapsed", "final EM", "best EM", "area", "clipped", "first alarm")
    rows = []
    for own in summarise(records):
        share, low, high = own.rate
        shown = (
            own.regime,
            own.label,
            str(own.runs),
            f"{share:.0%} ({low:.0%} to {high:.0%})",
            f"{own.final['mean']:.3f} ({own.final['low']:.3f} to {own.final['high']:.3f})",
            f"{own.best['mean']:.3f}",
            f"{own.area['mean']:.3f}",
            number(own.clip, 3),
            "–" if own.alarm is None else f"update {own.alarm:.0f} ({own.alarms} runs)",
        )
        rows.append(tag("tr", [tag("td", cell) for cell in shown]))
    head = tag("tr", [tag("th", name, scope="col") for name in names])
    return tag("table", tag("thead", head), tag("tbody", rows), class_="plain")


def _regime(records: Sequence[Record], regime: str) -> Html:
    own = [record for record in records if record["regime"] == regime]
    labels = list(dict.fromkeys(record["label"] for record in own))
    parts = []
    for start in range(0, len(labels), FEW_LINES):
        shown = labels[start : start + FEW_LINES]
        figures = [figure for plot in PLOTS if (figure := _figure(own, shown, *plot))]
        entries = [legend_entry(label, place) for place, label in enumerate(shown)]
        parts += [legend(entries), tag("div", figures, class_="grid")]
    about = REGIMES[regime].about if regime in REGIMES else ""
    lead = f"{about}. Thick: the mean over seeds; dotted: every seed."
    return tag("section", tag("h2", regime), tag("p", lead, class_="lead"), parts, id=regime)


def _figure(records: Sequence[Record], labels: Sequence[str], short: str, title: str, reach: float) -> Html | None:
    series: list[Series] = []
    for colour, label in enumerate(labels):
        runs = [_points(record, short) for record in records if record["label"] == label]
        runs = [points for points in runs if points]
        if len(runs) > 1:
            series += [Series(f"{label}, a seed", points, colour, dash=2) for points in runs]
        if runs:
            series.append(Series(label, mean_curve(runs), colour))
    if not series:
        return None
    return tag("figure", tag("figcaption", title), line_chart(series, title=title, floor=reach, raw=False))


def _points(record: Record, short: str) -> list[tuple[float, float]]:
    values = record["curves"].get(short, [])
    return [(float(update), value) for update, value in enumerate(values) if value is not None]


def mean_curve(runs: Sequence[Points]) -> list[tuple[float, float]]:
    """The mean over runs at every update that any of them has; runs that ended earlier no longer count."""
    found: dict[float, list[float]] = {}
    for points in runs:
        for x, y in points:
            found.setdefault(x, []).append(y)
    return [(x, sum(values) / len(values)) for x, values in sorted(found.items())]
