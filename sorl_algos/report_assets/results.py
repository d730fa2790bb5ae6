"""The results of the page: exact match before and after with intervals, drawn, in words, as a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sorl_algos.report_assets.chart import legend_entry
from sorl_algos.report_assets.glossary import SCORES, SETS
from sorl_algos.report_assets.markup import Child, Html, join, scrolling, signed, tag
from sorl_algos.report_assets.runs import Evaluation, Interval, Named, Run


def score_of(run: Run, set_name: str, stage: str, name: str = "exact_match") -> Interval | None:
    evaluation = run.evaluations.get((set_name, stage))
    return evaluation.scores.get(name) if evaluation else None


LEAD = "Exact match with its 95 % bootstrap interval. The hollow mark is before training, the full one after."


def results_section(runs: Sequence[Named]) -> Html:
    met = {set_name for _, run in runs for set_name, _ in run.evaluations}
    sets = [name for name in SETS if name in met] + sorted(met - set(SETS))
    if not sets:
        content: list[Child] = [tag("p", "No evaluation has been written yet.", class_="faint")]
    else:
        content = [
            tag("p", LEAD, class_="lead"),
            _intervals(runs, sets),
            _readings(runs) if len(runs) <= 3 else None,
            _result_table(runs, sets),
        ]
    return tag("section", tag("h2", "Before and after"), content, id="results")


def _intervals(runs: Sequence[Named], sets: Sequence[str]) -> Html:
    rows: list[Html] = []
    for set_name in sets:
        title, meaning = set_title(set_name)
        rows.append(tag("div", tag("b", title), tag("span", meaning, class_="faint"), class_="set"))
        for index, (label, run) in enumerate(runs):
            scores = {stage: score_of(run, set_name, stage) for stage in ("before", "after")}
            text = " → ".join(f"{score.mean:.2f}" if score else "?" for score in scores.values())
            marks = [_mark(stage, score) for stage, score in scores.items() if score]
            rows.append(
                tag(
                    "div",
                    tag("span", legend_entry(label, index) if len(runs) > 1 else None, class_="who"),
                    tag("div", marks, class_=f"strip c{index % 8}"),
                    tag("span", text, class_="value"),
                    class_="row",
                )
            )
    scale = tag(
        "div",
        [
            tag("span", text, style=f"left:{left}%")
            for left, text in ((0, "0"), (25, ".25"), (50, ".5"), (75, ".75"), (100, "1"))
        ],
        class_="scale",
    )
    rows.append(tag("div", tag("span", class_="who"), scale, tag("span", class_="value"), class_="row"))
    return tag("div", rows, class_="intervals" if len(runs) > 1 else "intervals single")


def _mark(stage: str, score: Interval) -> Html:
    low, high = score.bounds
    left, width, middle = (max(0.0, min(100.0, 100 * share)) for share in (low, high - low, score.mean))
    exact = f"{stage}: {score.mean:.3f} ({low:.3f} to {high:.3f})"
    return join(
        [
            tag("i", class_=f"whisker {stage}", style=f"left:{left:.2f}%;width:{width:.2f}%"),
            tag("i", class_=f"mean {stage}", style=f"left:{middle:.2f}%", title=exact),
        ]
    )


def _readings(runs: Sequence[Named]) -> Iterator[Html]:
    """What the table says, in words, a paragraph for each run."""
    for label, run in runs:
        sentences = []
        before, after = score_of(run, "test", "before"), score_of(run, "test", "after")
        empty = score_of(run, "test_empty_index", "after")
        if before and after:
            verb = "rose" if after.mean > before.mean else "fell" if after.mean < before.mean else "stayed"
            sure = "do not overlap" if _apart(before, after) else "overlap, so this may be chance"
            tail = f"; the two intervals {sure}" if before.spread and after.spread else ""
            change = f"{verb} from {before.mean:.2f} to {after.mean:.2f}"
            sentences.append(f"Exact match on held-out questions {change}{tail}. ")
        if after and empty:
            if empty.mean < after.mean / 2:
                judged = "so most of the score comes from searching"
            else:
                judged = "so searching explains no more than half of the score"
            sentences.append(f"With an empty index the trained policy scores {empty.mean:.2f}, {judged}.")
        if sentences:
            yield tag("p", tag("b", f"{label}: ") if len(runs) > 1 else None, sentences)


def _apart(one: Interval, other: Interval) -> bool:
    return one.bounds[1] < other.bounds[0] or other.bounds[1] < one.bounds[0]


def _result_table(runs: Sequence[Named], sets: Sequence[str]) -> Html:
    known = {name for _, run in runs for found in run.evaluations.values() for name in found.scores}
    scores = [name for name in SCORES if name in known] + sorted(known - set(SCORES))
    names = [
        tag("th", legend_entry(label, index), colspan=3, scope="colgroup", class_="run")
        for index, (label, _) in enumerate(runs)
    ]
    stages = [[tag("th", text, scope="col") for text in ("before", "after", "change")] for _ in runs]
    head = [tag("tr", tag("th"), names) if len(runs) > 1 else None, tag("tr", tag("th"), stages)]
    bodies = []
    for set_name in sets:
        sizes = [f"n = {found.n}" for _, run in runs for found in _both(run, set_name) if found.n is not None]
        title = tag(
            "th", set_title(set_name)[0], tag("span", *sizes[:1], class_="n"), colspan=1 + 3 * len(runs)
        )
        rows = [
            tag(
                "tr",
                tag("td", SCORES.get(name, name)),
                [_result_cells(run, set_name, name) for _, run in runs],
            )
            for name in scores
            if any(name in found.scores for _, run in runs for found in _both(run, set_name))
        ]
        bodies.append(tag("tbody", tag("tr", title), rows))
    return scrolling(tag("table", tag("thead", head), bodies, class_="results"))


def set_title(name: str) -> tuple[str, str]:
    """Title and meaning of a question set; an unknown set is called what the run calls it."""
    return SETS.get(name, (name.replace("_", " "), ""))


def _both(run: Run, set_name: str) -> list[Evaluation]:
    found = (run.evaluations.get((set_name, stage)) for stage in ("after", "before"))
    return [evaluation for evaluation in found if evaluation]


def _result_cells(run: Run, set_name: str, name: str) -> list[Html]:
    before, after = score_of(run, set_name, "before", name), score_of(run, set_name, "after", name)
    digits = 2 if name == "searches" else 3
    change = tag("td", "–", class_="number")
    if before and after:
        difference = after.mean - before.mean
        clear = name != "searches" and before.spread and after.spread and _apart(before, after)
        better = "" if not clear else " good" if difference > 0 else " bad"
        change = tag("td", signed(difference, digits), class_=f"number{better}")
    return [
        tag("td", _interval_cell(before, digits), class_="number first"),
        tag("td", _interval_cell(after, digits), class_="number"),
        change,
    ]


def _interval_cell(score: Interval | None, digits: int) -> Html:
    if score is None:
        return join(["–"])
    span = f"{score.bounds[0]:.{digits}f} to {score.bounds[1]:.{digits}f}"
    return join([f"{score.mean:.{digits}f}", tag("small", span) if score.spread else None])
