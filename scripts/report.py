"""Write the HTML report of one training run, or of several laid over each other.

python scripts/report.py runs/quickstart
python scripts/report.py runs/ppo runs/so_ppo --output comparison.html
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

from sorl_algos.report import write_report


@dataclass(frozen=True)
class Arguments:
    """Write the HTML report of one training run, or of several laid over each other."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Directories of training runs."""
    output: Path | None = None
    """The page; default: report.html in the run's directory, for several runs in the current one."""


def main() -> int:
    arguments = tyro.cli(Arguments, description=__doc__)
    output = arguments.output
    if output is None:
        output = arguments.runs[0] / "report.html" if len(arguments.runs) == 1 else Path("report.html")
    try:
        print(write_report(arguments.runs, output))
    except (ValueError, OSError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
