"""Measure which algorithms stay stable: a grid of small runs on the bundled world, many seeds, resumable.

`stability_lab.py run GRID` makes the runs of a grid that the results file lacks, each in a process of its own; the
same command goes on where it stopped. `report` writes report.html and the Markdown tables beside the results.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import tyro

from sorl_algos.lab import results
from sorl_algos.lab.cells import GRIDS, Cell
from sorl_algos.lab.schedule import side_by_side


@dataclass(frozen=True)
class Arguments:
    """Run a grid of the stability lab, or report what has been run."""

    what: tyro.conf.Positional[Literal["run", "report", "list"]]
    grid: tyro.conf.Positional[str] = "smoke"
    """smoke, tuning, search, reuse, other or ablations."""
    smoke: bool = False
    """The grid smoke (two minutes)."""
    output: Path = Path("docs/stability")
    """Where results.jsonl, report.html and tables.md lie."""
    processes: int = 1  # one thread each
    seeds: int | None = None
    """Only the first so many seeds of the grid."""
    only: tuple[str, ...] = ()
    """Only these arms."""
    regimes: tuple[str, ...] = ()
    """Only these regimes."""
    minutes: float | None = None
    """Begin no further run after so many minutes."""
    work: Path = Path("runs/lab")
    """Where runs live while they run."""
    cell: Annotated[str | None, tyro.conf.arg(help="One cell as JSON: how the script calls itself.")] = None


def selected(arguments: Arguments) -> list[Cell]:
    grid = "smoke" if arguments.smoke else arguments.grid
    if grid not in GRIDS:
        raise ValueError(f"the lab has no grid {grid!r}; it has {', '.join(GRIDS)}")
    return [
        cell
        for cell in GRIDS[grid]()
        if (arguments.seeds is None or cell.seed < arguments.seeds)
        and (not arguments.only or cell.arm in arguments.only)
        and (not arguments.regimes or cell.regime in arguments.regimes)
    ]


def start(cell: Cell, work: Path) -> subprocess.Popen[str]:
    """The run of one cell in a process of its own; its last line of output is the record."""
    text = json.dumps([cell.arm, cell.regime, cell.seed, cell.changes])
    command = [sys.executable, __file__, "run", "--cell", text, "--work", str(work)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "KMP_BLOCKTIME": "0"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ)


def run_here(text: str, work: Path) -> None:
    """Run one cell in this process and print its record."""
    from sorl_algos.lab.one_run import run_cell
    from sorl_env.world import world_questions, world_retriever

    arm, regime, seed, changes = json.loads(text)
    cell = Cell(arm, regime, seed, tuple((name, value) for name, value in changes))
    folder = work / f"{cell.digest()}-{os.getpid()}"
    try:
        record = run_cell(
            cell,
            folder,
            retriever=world_retriever(),
            train_questions=world_questions("train"),
            dev_questions=world_questions("dev"),
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(record, separators=(",", ":")))


def work_off(arguments: Arguments) -> int:
    """Make the runs that are missing; returns how many failed."""
    path = arguments.output / "results.jsonl"
    waiting, failed = results.missing(selected(arguments), results.read(path)), 0
    print(f"{len(waiting)} of {len(selected(arguments))} runs are to be made", flush=True)
    begin = partial(start, work=arguments.work)
    ends = side_by_side(waiting, begin, processes=arguments.processes, minutes=arguments.minutes)
    for cell, left, ended in ends:
        if ended.returncode:
            failed += 1
            print(f"{results.name(cell)} failed: {ended.stderr.strip()[-400:]}", file=sys.stderr, flush=True)
            continue
        record = json.loads(ended.stdout.strip().splitlines()[-1])
        results.append(path, record)
        what = f"collapsed ({record['reason']})" if record["collapsed"] else "stable"
        print(
            f"{record['cell']}: {record['first']:.3f} to {record['final']:.3f}, best {record['best']:.3f}, {what}, "
            f"{record['minutes']:.1f} min; {left} left",
            flush=True,
        )
    return failed


def report(arguments: Arguments) -> None:
    from sorl_algos.lab.page import write_page
    from sorl_algos.lab.summary import paired_table, table

    records = results.read(arguments.output / "results.jsonl")
    page = write_page(records, arguments.output / "report.html")
    text = f"{table(records)}\n\n{paired_table(records, 'ppo')}\n\n{paired_table(records, 'grpo')}\n"
    (arguments.output / "tables.md").write_text(text, encoding="utf-8")
    print(f"{text}\n{page}: {page.stat().st_size / 1e6:.2f} MB")


def main() -> int:
    arguments = tyro.cli(Arguments, description=__doc__)
    try:
        if arguments.cell is not None:
            run_here(arguments.cell, arguments.work)
        elif arguments.what == "list":
            waiting = results.missing(selected(arguments), results.read(arguments.output / "results.jsonl"))
            print("\n".join(map(results.name, waiting)))
        elif arguments.what == "report":
            report(arguments)
        else:
            return 1 if work_off(arguments) else 0
    except (ValueError, OSError) as error:
        print(f"stability_lab: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; the same command goes on", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
