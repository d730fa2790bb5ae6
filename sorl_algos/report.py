"""The run report: one self-contained HTML page of results, curves and trajectories of one or several runs.

The page needs no network. Texts of models and passages are escaped where they enter (markup.py of
`report_assets`), and the page's policy lets no script run but the one it came with, known by its hash.
"""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from sorl_algos.metrics import write_text_atomically
from sorl_algos.report_assets.chart import legend_entry
from sorl_algos.report_assets.curves import curves_section
from sorl_algos.report_assets.episodes import card, overview, pairs
from sorl_algos.report_assets.markup import Html, join, scrolling, tag
from sorl_algos.report_assets.results import results_section, score_of
from sorl_algos.report_assets.runs import Named, Run, find, find_number, read_run

SHOWN_EPISODES = 10
SHOWN_ALARMS = 12


def write_report(run_dirs: Path | Sequence[Path], output: Path) -> Path:
    """Write the report of one run, or of several laid over each other, and return its path.

    What is missing (an interrupted run, no evaluation yet, values that are not finite) leaves a note on the
    page. The file appears whole or not at all. Raises ValueError naming a directory that holds no run.
    """
    directories = [run_dirs] if isinstance(run_dirs, Path) else list(run_dirs)
    if not directories:
        raise ValueError("no run directory given; name at least one directory of a training run")
    runs = [read_run(Path(directory)) for directory in directories]
    page = _page(list(zip(_labels(runs), runs, strict=True)))
    output = Path(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomically(output, "<!doctype html>\n" + page)
    return output


def _labels(runs: Sequence[Run]) -> list[str]:
    """A short name for each run, all different: its algorithm if that tells them apart, or directory."""
    algorithms = [find(run.config, "algorithm") or run.path.resolve().name for run in runs]
    names = algorithms if len(set(algorithms)) == len(runs) else [run.path.resolve().name for run in runs]
    if len(set(names)) < len(runs):
        names = ["/".join(run.path.resolve().parts[-2:]) for run in runs]
    counts = Counter(names)
    return [name if counts[name] == 1 else f"{name} ({index + 1})" for index, name in enumerate(names)]


def _page(runs: Sequence[Named]) -> Html:
    assets = resources.files("sorl_algos.report_assets")
    style = assets.joinpath("style.css").read_text(encoding="utf-8")
    script = assets.joinpath("script.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; form-action 'none'"
    )
    title = " · ".join(label for label, _ in runs) + " · SORL run report"
    head = tag(
        "head",
        Html('<meta charset="utf-8">'),
        Html(f'<meta http-equiv="Content-Security-Policy" content="{policy}">'),
        Html('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        Html('<meta name="color-scheme" content="light dark">'),
        tag("title", title),
        Html(f"<style>{style}</style>"),
    )
    body = tag(
        "body",
        tag(
            "main",
            _header(runs),
            _notes(runs),
            _alarms(runs),
            results_section(runs),
            curves_section(runs),
            _trajectories(runs),
            _configuration(runs),
        ),
        Html('<div id="read-out" role="status" hidden></div>'),
        Html(f"<script>{script}</script>"),
    )
    return tag("html", head, body, lang="en")


# What ran


def _header(runs: Sequence[Named]) -> Html:
    links = [
        ("results", "Results"),
        ("curves", "Curves"),
        ("trajectories", "Trajectories"),
        ("configuration", "Configuration"),
    ]
    facts = [_facts(run) for _, run in runs]
    rows = [name for name in facts[0] if any(fact[name] for fact in facts)]
    if len(runs) == 1:
        shown = tag(
            "dl", [tag("div", tag("dt", name), tag("dd", facts[0][name])) for name in rows], class_="facts"
        )
    else:
        head = tag(
            "tr",
            tag("th"),
            [tag("th", legend_entry(label, index), scope="col") for index, (label, _) in enumerate(runs)],
        )
        lines = [
            tag("tr", tag("th", name, scope="row"), [tag("td", fact[name] or "–") for fact in facts])
            for name in rows
        ]
        shown = scrolling(tag("table", tag("thead", head), tag("tbody", lines), class_="plain"))
    return tag(
        "header",
        tag(
            "div",
            tag("span", "SORL run report", class_="kicker"),
            tag("nav", [tag("a", text, href=f"#{anchor}") for anchor, text in links], aria_label="Sections"),
            class_="top",
        ),
        tag("h1", _headline(runs)),
        shown,
        class_="head",
    )


def _headline(runs: Sequence[Named]) -> str:
    """What came of it; more than three runs are told as the means of each algorithm."""
    groups: dict[str, list[tuple[float, float]]] = {}
    for label, run in runs:
        before, after = score_of(run, "test", "before"), score_of(run, "test", "after")
        if before and after:
            name = label if len(runs) <= 3 else find(run.config, "algorithm") or label
            groups.setdefault(name, []).append((before.mean, after.mean))
    if not groups:
        return "Training run: " + ", ".join(label for label, _ in runs)
    changes = []
    for name, scores in groups.items():
        before_mean, after_mean = (sum(column) / len(scores) for column in zip(*scores, strict=True))
        count = f" (mean of {len(scores)} runs)" if len(scores) > 1 else ""
        changes.append(
            f"{name} {before_mean:.2f} → {after_mean:.2f}".replace(" ", "\N{NO-BREAK SPACE}") + count
        )
    return "Exact match on held-out questions: " + ", ".join(changes)


def _facts(run: Run) -> dict[str, str]:
    config, planned = run.config, find_number(run.config, "updates")
    done = f"{run.updates} of {planned:.0f}" if planned and planned != run.updates else f"{run.updates}"
    model = find(config, "model", "policy", "base_model", "model_path") or ""
    return {
        "model": Path(model).name or model,
        "algorithm": find(config, "algorithm") or "",
        "dataset": find(config, "dataset", "questions", "environment", "env_id", "env", "world") or "",
        "updates": done,
        "minutes": "" if run.minutes is None else f"{run.minutes:.1f}",
        "seed": find(config, "seed") or "",
        "alarm": _first_alarm(run),
        "hardware": find(config, "hardware", "device") or "",
        "revision": (find(config, "git_revision", "revision", "git") or "")[:12],
    }


def _first_alarm(run: Run) -> str:
    if run.alarms:
        return f"at update {run.alarms[0].update:.0f}"
    return "none" if "alarm" in run.metrics else ""


def _alarms(runs: Sequence[Named]) -> Html | None:
    """What the collapse alarm said, first things first."""
    lines = [
        tag(
            "li",
            tag("b", f"{label}: ") if len(runs) > 1 else None,
            f"update {line.update:.0f}: {line.text} ",
            tag("span", line.rule.replace("_", " "), class_="faint"),
        )
        for label, run in runs
        for line in run.alarms
    ]
    if not lines:
        return None
    more = tag("li", f"{len(lines) - SHOWN_ALARMS} more in alarms.jsonl") if len(lines) > SHOWN_ALARMS else None
    return tag(
        "aside",
        tag("h2", "The collapse alarm went off"),
        tag("p", "A dotted line marks these updates in every curve."),
        tag("ul", lines[:SHOWN_ALARMS], more),
        class_="notes alarmed",
    )


def _notes(runs: Sequence[Named]) -> Html | None:
    lines = []
    for label, run in runs:
        found = list(run.notes)
        planned = find_number(run.config, "updates")
        if planned and run.updates < planned:
            done = f"The run has {run.updates} of its {planned:.0f} updates"
            found.insert(0, f"{done}: it was stopped early or still goes on.")
        stages = {stage for _, stage in run.evaluations}
        if run.evaluations and "after" not in stages:
            found.append("There is no evaluation after training (yet).")
        lines += [tag("li", tag("b", f"{label}: ") if len(runs) > 1 else None, note) for note in found]
    return (
        tag("aside", tag("h2", "This report is partial"), tag("ul", lines), class_="notes") if lines else None
    )


# Trajectories


def _trajectories(runs: Sequence[Named]) -> Html:
    parts = []
    for index, (label, run) in enumerate(runs):
        shown = pairs(run.episodes)
        if not shown:
            if len(runs) > 1:
                parts.append(tag("p", f"{label}: no trajectories have been written yet.", class_="faint"))
            continue
        cards = [
            card(pair, f"run{index}-question{place}", _clip_range(run))
            for place, pair in enumerate(shown[:SHOWN_EPISODES])
        ]
        left = len(shown) - SHOWN_EPISODES
        more = tag("p", f"{left} more in the run's directory.", class_="faint") if left > 0 else None
        inner = join([overview(shown[:SHOWN_EPISODES], f"run{index}-question"), cards, more])
        if len(runs) == 1:
            parts.append(inner)
        else:
            parts.append(
                tag(
                    "details",
                    tag("summary", legend_entry(label, index)),
                    inner,
                    class_="fold",
                    open="" if not parts else None,
                )
            )
    key = tag(
        "p",
        tag("span", "turn 1", class_="key t0"),
        tag("span", "turn 2", class_="key t1"),
        tag("span", "turn 3", class_="key t2"),
        " what the policy wrote, one colour a turn; ",
        tag("span", "grey", class_="key masked"),
        " what it read: masked, no gradient flows through it. The ratio is the turn's probability under the trained"
        " policy against the starting one (length-normalised): above 1, training made it likelier. The advantage is the"
        " turn's mean by the trained critic.",
        class_="lead",
    )
    return tag(
        "section",
        tag("h2", "The same questions, before and after"),
        [key, *parts]
        if any(pairs(run.episodes) for _, run in runs)
        else tag("p", "No trajectories have been written yet.", class_="faint"),
        id="trajectories",
    )


def _clip_range(run: Run) -> tuple[float, float] | None:
    low, high = find_number(run.config, "clip_low"), find_number(run.config, "clip_high")
    return None if low is None or high is None else (1 - low, 1 + high)


# Configuration


def _configuration(runs: Sequence[Named]) -> Html:
    flat = [dict(_flatten(run.config)) for _, run in runs]
    names = list(dict.fromkeys(name for settings in flat for name in settings))
    different = {name for name in names if len({settings.get(name) for settings in flat}) > 1}
    names.sort(key=lambda name: name not in different)
    head = tag(
        "tr",
        tag("th", "setting", scope="col"),
        [
            tag("th", legend_entry(label, index) if len(runs) > 1 else "value", scope="col")
            for index, (label, _) in enumerate(runs)
        ],
    )
    rows = [
        tag(
            "tr",
            tag("th", name, scope="row"),
            [tag("td", settings.get(name, "–")) for settings in flat],
            class_="different" if name in different else None,
        )
        for name in names
    ]
    table = scrolling(tag("table", tag("thead", head), tag("tbody", rows), class_="plain settings"))
    summary = f"{len(names)} settings" + (
        f", {len(different)} of them different between the runs" if different else ""
    )
    return tag(
        "section",
        tag("h2", "Configuration"),
        tag("details", tag("summary", summary), table, class_="fold")
        if names
        else tag("p", "No configuration was found.", class_="faint"),
        id="configuration",
    )


def _flatten(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", ", ".join(map(str, value)) if isinstance(value, list) else str(value)
