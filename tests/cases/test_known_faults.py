"""Every case of the file that SORL_CASES names. SORL_CASES_COMPONENT=loss tries those of one component.

A case whose op the product has no code for is skipped, with that reason: it is no pass.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.cases.ops import CASES, read_cases, run_case

COMPONENT = os.environ.get("SORL_CASES_COMPONENT")
FOUND = read_cases(CASES, COMPONENT) if CASES.is_file() else []
ABSENT = f"no case of component {COMPONENT}" if CASES.is_file() else f"no case file {CASES}; set SORL_CASES"


@pytest.mark.skipif(not FOUND, reason=ABSENT)
@pytest.mark.parametrize("case", FOUND or [{"id": "none"}], ids=lambda case: case["id"])
def test_case(case: dict[str, Any]) -> None:
    outcome = run_case(case)
    if outcome.verdict == "unmapped":
        pytest.skip(f"{outcome.op}: {'; '.join(outcome.findings)}")
    assert outcome.verdict == "passed", "\n".join(outcome.findings)
