"""OPS: from the name of an op to the product code that a case of it tries, and the running of cases."""

from __future__ import annotations

import json
import os
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cases.judge import problems
from tests.cases.learning_ops import LEARNING_OPS
from tests.cases.rollout_ops import ROLLOUT_OPS
from tests.cases.system_ops import SYSTEM_OPS
from tests.cases.text_ops import TEXT_OPS
from tests.cases.trajectory_ops import TRAJECTORY_OPS

CASES = Path(
    os.environ.get("SORL_CASES")
    or Path(__file__).resolve().parents[2] / ".." / "shared" / "cases" / "known_faults.jsonl"
).resolve()

# An op gives facts, or None where the product has no code for this use of it.
OPS: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    **TEXT_OPS, **TRAJECTORY_OPS, **LEARNING_OPS, **ROLLOUT_OPS, **SYSTEM_OPS,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Outcome:
    """``verdict``: "passed", "failed" or "unmapped" (no product code, or an op that is not known)."""

    case_id: str
    component: str
    op: str
    verdict: str
    findings: tuple[str, ...] = ()


def read_cases(path: Path, component: str | None = None) -> list[dict[str, Any]]:
    """The cases of a JSONL file, or those of one component (in any letter case)."""
    cases = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return [case for case in cases if component is None or case["component"].lower() == component.lower()]


def run_case(case: Mapping[str, Any]) -> Outcome:
    """Try one case. What an op raises is a finding, never an error of the runner."""
    given = case["input"]
    place = (case["id"], case["component"], given.get("op", "?"))
    op = OPS.get(given.get("op", ""))
    if op is None:
        return Outcome(*place, "unmapped", ("no product code is mapped to this op",))
    try:
        answer = op(given)
    except Exception as error:  # whatever the product does, the other cases run
        where = traceback.extract_tb(error.__traceback__)[-1]
        return Outcome(*place, "failed", (f"{type(error).__name__}: {error} ({where.name}, line {where.lineno})",))
    if answer is None:
        return Outcome(*place, "unmapped", ("the product has no code for this use of the op",))
    found = problems(case["expected"], answer)
    return Outcome(*place, "failed" if found else "passed", tuple(found))


def tally(outcomes: list[Outcome]) -> dict[str, Counter[str]]:
    """Verdicts by component, in the order of the file."""
    table: dict[str, Counter[str]] = {}
    for outcome in outcomes:
        table.setdefault(outcome.component, Counter())[outcome.verdict] += 1
    return table
