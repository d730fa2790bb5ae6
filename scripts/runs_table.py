"""Prints a Markdown table of finished runs, one line a run: `python scripts/runs_table.py runs/quickstart_*`."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro


@dataclass(frozen=True)
class Arguments:
    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Run directories with config.json and evaluations.json."""


def row(run: Path) -> dict[str, Any]:
    """What one line of the table shows. Raises ValueError for a directory without finished evaluations."""
    try:
        config = json.loads((run / "config.json").read_text(encoding="utf-8"))
        entries = json.loads((run / "evaluations.json").read_text(encoding="utf-8"))
        lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    except FileNotFoundError as error:
        raise ValueError(f"{run} is not a finished run: {error.filename} is missing") from None
    scores = {(entry["set"], entry["stage"]): entry for entry in entries}
    if not any(stage == "after" for _, stage in scores):
        raise ValueError(f"{run} has no evaluation after training; run its train.py command again to finish it")
    last = json.loads(lines[-1])
    return {"config": config, "scores": scores, "minutes": last["time_s"] / 60, "updates": last["update"] + 1}


def cell(scores: dict[Any, Any], name: str) -> str:
    """Exact match before and after, with the interval after."""
    before, after = scores.get((name, "before")), scores.get((name, "after"))
    if after is None:
        return "-"
    match = after["exact_match"]
    start = f"{before['exact_match']['mean']:.3f} → " if before else ""
    return f"{start}{match['mean']:.3f} ({match['low']:.3f}-{match['high']:.3f})"


def table(rows: list[dict[str, Any]]) -> str:
    """The Markdown table."""
    names = list(dict.fromkeys(name for item in rows for name, _ in item["scores"]))
    head = ["algorithm", "seed", *[f"{name}: exact match" for name in names], "searches", "updates", "minutes"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for item in rows:
        config, scores = item["config"], item["scores"]
        searches = scores[(names[0], "after")]["searches"]["mean"]
        cells = [config["algorithm"], str(config["seed"]), *[cell(scores, name) for name in names]]
        cells += [f"{searches:.2f}", str(item["updates"]), f"{item['minutes']:.1f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    try:
        print(table([row(run) for run in tyro.cli(Arguments, description=__doc__).runs]))
    except ValueError as error:
        print(f"runs_table: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
