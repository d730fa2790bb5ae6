"""Run the cases and print the count: ``python -m tests.cases [--component NAME] [--file CASES.jsonl]``."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

from tests.cases.ops import CASES, read_cases, run_case, tally

VERDICTS = ("passed", "failed", "unmapped")


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.cases", description=__doc__)
    parser.add_argument("--component", help="the cases of this component alone")
    parser.add_argument("--file", type=Path, default=CASES, help=f"the cases (default: {CASES})")
    arguments = parser.parse_args()
    if not arguments.file.is_file():
        parser.error(f"there is no case file {arguments.file}; set SORL_CASES")
    outcomes = [run_case(case) for case in read_cases(arguments.file, arguments.component)]
    if not outcomes:
        parser.error(f"no case of component {arguments.component!r} in {arguments.file}")
    for outcome in outcomes:
        if outcome.verdict != "passed":
            print(f"{outcome.verdict:9} {outcome.case_id} ({outcome.op}): {'; '.join(outcome.findings)}")
    table = tally(outcomes)
    print(f"\n{'component':12}" + "".join(f"{verdict:>10}" for verdict in VERDICTS))
    for component, counts in [*table.items(), ("all", sum(table.values(), Counter()))]:
        print(f"{component:12}" + "".join(f"{counts[verdict]:>10}" for verdict in VERDICTS))
    return int(any(outcome.verdict == "failed" for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
