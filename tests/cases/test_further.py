"""Our own further examples of each kind of fault, in the same form; the reason is in each case.

Each expected value, changed alone, must make its case fail: nothing in an expectation is decoration.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cases.judge import PROSE, problems
from tests.cases.ops import OPS, read_cases

CASES = read_cases(Path(__file__).with_name("further.jsonl"))


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            if key not in PROSE and key != "any_of":
                yield from leaves(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from leaves(item, (*path, index))
    else:
        yield path, value


def other(key: Any, value: Any) -> Any:
    """A value that is wrong where ``value`` is right."""
    if isinstance(value, bool):
        return not value
    if value is None:
        return "something"
    if isinstance(value, str):
        return "zz" + value
    if str(key).endswith(("_at_most", "_under_s")):
        return -1e6
    return 2 if str(key).endswith("_not") else value + 0.37


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['id']} {case['kind']}")
def test_case(case: dict[str, Any]) -> None:
    answer = OPS[case["input"]["op"]](case["input"])
    assert problems(case["expected"], answer) == []
    for path, value in leaves(case["expected"]):
        if path == ("property",):
            continue  # prose for a property
        changed = copy.deepcopy(case["expected"])
        place: Any = changed
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = other(path[-1], value)
        assert problems(changed, answer), path
