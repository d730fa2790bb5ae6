"""Compares two results of scripts/evaluate.py question by question: is the second better, and is that chance?

python scripts/compare_results.py results/base/world_test.json results/runs_quickstart/world_test.json
python scripts/compare_results.py A.json B.json --allow prompt --output comparison.json
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro
from console import in_one_line
from evaluation_table import print_comparison
from train import checked

from sorl_algos.evaluation.compare import compare
from sorl_algos.evaluation.results import read_result, write_atomically


@dataclass(frozen=True)
class Arguments:
    first: tyro.conf.Positional[Path]
    """Result file A."""
    second: tyro.conf.Positional[Path]
    """Result file B, of the same questions."""
    allow: tuple[Literal["data", "prompt"], ...] = ()
    """What may differ: the questions (those in common are compared), the prompt."""
    seed: int = 0
    """Of the bootstrap."""
    output: Path | None = None
    """Write the comparison as JSON too."""


def main() -> None:
    arguments = checked(lambda: in_one_line(lambda: tyro.cli(Arguments, description=__doc__)))
    first, second = (checked(lambda path=path: read_result(path)) for path in (arguments.first, arguments.second))
    found = checked(lambda: compare(first, second, allow=arguments.allow, seed=arguments.seed))
    print_comparison(found, str(arguments.first), str(arguments.second))
    if arguments.output is not None:
        write_atomically(arguments.output, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
