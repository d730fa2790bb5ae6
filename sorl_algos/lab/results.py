"""The lab's results file: one JSON object a line for each finished run, written whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sorl_algos.lab.cells import Cell
from sorl_algos.lab.collapse import SCORE

# What of each metric line is kept, and under which name.
CURVES = {
    SCORE: "em",
    "reward_mean": "reward",
    "clip_fraction": "clip",
    "clip_fraction_token": "clip_token",
    "clip_fraction_turn": "clip_turn",
    "approx_kl": "kl",
    "excess_norm": "c_norm",
    "grad_norm": "grad_norm",
    "rho": "rho",
    "factor": "factor",
    "advantage_variance": "adv_var",
    "entropy": "entropy",
    "ratio_max": "ratio_max",
    "ess": "ess",
    "explained_variance": "ev",
    "valid_action_rate": "valid",
}
DIGITS = 4


def curves(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[float | None]]:
    """The kept metrics of every update; None where a line lacks one. Metrics that no line has are left out."""
    found = {}
    for name, short in CURVES.items():
        values = [row.get(name) for row in rows]
        if any(value is not None for value in values):
            found[short] = [None if value is None else float(f"{value:.{DIGITS}g}") for value in values]
    return found


def key(record: Mapping[str, Any]) -> tuple[str, str]:
    """Which run a record is of: the cell's name and the digest of its settings."""
    return record["cell"], record["digest"]


def name(cell: Cell) -> str:
    """One text for a cell: ``regime/label/seed``."""
    return f"{cell.regime}/{cell.label}/{cell.seed}"


def read(path: Path) -> list[dict[str, Any]]:
    """The records of a results file; [] if there is none. A last line that a crash cut short is left out."""
    if not path.exists():
        return []
    records = []
    for line in path.read_text(encoding="utf-8").split("\n"):
        try:
            records.append(json.loads(line))
        except ValueError:
            continue
    return records


def append(path: Path, record: Mapping[str, Any]) -> None:
    """Adds one line. The file is written anew beside and put in place, so it is whole at every moment."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(old, separators=(",", ":")) for old in [*read(path), record]]
    temporary = path.with_name(f"{path.name}.partial-{os.getpid()}")
    with temporary.open("w", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def missing(cells: Iterable[Cell], records: Sequence[Mapping[str, Any]]) -> list[Cell]:
    """The cells without a result of just these settings, in order, each once."""
    done = {key(record) for record in records}
    wanted: dict[tuple[str, str], Cell] = {}
    for cell in cells:
        own = (name(cell), cell.digest())
        if own not in done:
            wanted.setdefault(own, cell)
    return list(wanted.values())
