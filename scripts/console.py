"""What the scripts show on a terminal: progress bars, tables, and one line about bad options."""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table


def settle_processor() -> None:
    """Threads that wait must not spin while others work; and oneDNN and torch keep the kernels of few shapes only.

    In bf16 each holds some megabytes, and the shapes of padded batches are ever new: with the thousand that both keep
    by default a process grows by gigabytes. To be called before the first tensor.
    """
    settings = {"KMP_BLOCKTIME": "0", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16", "LRU_CACHE_CAPACITY": "16"}
    for name, value in settings.items():
        os.environ.setdefault(name, value)


class RichProgress:
    """Draws one bar a stage (the Progress of `sorl_algos.run`)."""

    def __init__(self, *, shown: bool = True) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
        )
        self._progress = Progress(*columns, console=Console(quiet=not shown))
        self._task: TaskID | None = None

    def __enter__(self) -> RichProgress:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def begin(self, stage: str, total: int) -> None:
        self._task = self._progress.add_task(stage, total=total, note="")

    def advance(self, steps: int = 1, note: str = "") -> None:
        assert self._task is not None
        self._progress.update(self._task, advance=steps, note=note)


_TITLES = {
    "test": "held-out questions",
    "test_unseen": "unseen entities",
    "test_empty_index": "held-out, empty index",
    "dev": "dev questions",
}


def results_table(evaluations: list[dict[str, Any]]) -> None:
    """Prints exact match (95 % interval), F1 and searches, before and after."""
    table = Table(title="before and after training")
    for column in ("questions", "n", "exact match before", "exact match after", "F1 after", "searches after"):
        table.add_column(column, justify="left" if column == "questions" else "right")
    names = list(dict.fromkeys(entry["set"] for entry in evaluations))
    by_key = {(entry["set"], entry["stage"]): entry for entry in evaluations}
    for name in names:
        before, after = by_key.get((name, "before")), by_key.get((name, "after"))
        shown = after or before
        assert shown is not None
        table.add_row(
            _TITLES.get(name, name),
            str(shown["n"]),
            _with_interval(before),
            _with_interval(after),
            f"{after['f1']['mean']:.3f}" if after else "-",
            f"{after['searches']['mean']:.2f}" if after else "-",
        )
    Console().print(table)


def _with_interval(entry: dict[str, Any] | None) -> str:
    if entry is None:
        return "-"
    score = entry["exact_match"]
    return f"{score['mean']:.3f} ({score['low']:.3f} to {score['high']:.3f})"


def in_one_line(parse: Callable[[], Any]) -> Any:
    """What a tyro parser returns; its boxed message about bad options becomes one line.

    Raises:
        ValueError: bad options; the text names them, and options that look alike.
    """
    boxed = io.StringIO()
    try:
        with contextlib.redirect_stderr(boxed):
            return parse()
    except SystemExit as end:
        if end.code != 2:  # --help
            raise
    # The box: its title, the message, a rule, and what may help. Without UTF-8 a rule stands below the title too.
    lines = [text for line in boxed.getvalue().splitlines() if (text := line.strip("│╭╮╰╯ "))][1:]
    rules = [number for number, line in enumerate(lines) if set(line) <= {"─", "-"}]
    if rules[:1] == [0]:
        lines, rules = lines[1:], [number - 1 for number in rules[1:]]
    rule = rules[0] if rules else len(lines)
    message = " ".join(lines[:rule])
    message = re.sub(r"^Error parsing TrainConfig: ", "", message)
    alike = dict.fromkeys(name for line in lines[rule:] for name in re.findall(r"^(--[\w-]+) ", line))
    meant = f"; did you mean {', '.join(list(alike)[:3])}?" if alike and "Unrecognized" in message else ""
    raise ValueError(f"{message}{meant} (--help after a preset lists all options)")
