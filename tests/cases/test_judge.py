"""The judge of cases: what passes, and above all what does not."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cases.judge import Raised, problems
from tests.cases.ops import run_case, tally


@pytest.mark.parametrize(
    ("expected", "answer"),
    [
        ({"scores": [1.0, 0]}, {"scores": [1.0, 0.0]}),
        ({"loss": 0.5, "tol": 0.01, "never": 0.2}, {"loss": 0.509}),
        ({"property": "f(f(x)) = f(x)"}, {"property": True}),
        ({"steps": [{"reward": 1.0}]}, {"steps": [{"reward": 1.0, "terminated": True}]}),
        ({"query_len_at_most": 5, "query_starts_with": "ab"}, {"query_len": 5, "query": "abc"}),
        ({"exit_code_not": 0, "message_names": ["6", "4"]}, Raised(ValueError("6 is no multiple of 4"))),
        ({"any_of": [{"raises": "KeyError"}, {"value": 3.0, "documented": "skipped"}]}, {"value": 3.0}),
        ({"any_of": ["drop it", "keep it"]}, {"outcome": "keep it"}),
        ({"mean": {"finite": True, "without_empty_rows": 0.5}}, {"mean": 0.5}),
        ({"results": ["refused (why)", "ok"]}, {"results": ["refused", "ok"]}),
        ({"also": ["one", "two"]}, {"also": {"one": True, "two": True}}),
    ],
)
def test_what_passes(expected: dict[str, Any], answer: Any) -> None:
    assert problems(expected, answer) == []


@pytest.mark.parametrize(
    ("expected", "answer", "says"),
    [
        ({"scores": [1.0, 0]}, {"scores": [1.0]}, "scores"),
        ({"loss": 0.5}, {"other": 0.5}, "not reported"),
        ({"loss": 0.5, "tol": 0.01}, {"loss": 0.52}, "expected 0.5"),
        ({"tol": 0.1, "loss": 0.25, "never": 0.2}, {"loss": 0.2}, "never"),
        ({"property": "f(f(x)) = f(x)"}, {"property": False}, "property"),
        ({"steps": [{"reward": 1.0}]}, {"steps": [{"terminated": True}]}, "steps"),
        ({"query_len_at_most": 5}, {"query_len": 6}, "query_len_at_most"),
        ({"message_names": ["6"]}, Raised(ValueError("got 16 and 6.5")), "message_names"),
        ({"raises": "KeyError"}, Raised(ValueError("x")), "raises"),
        ({"any_of": [{"value": 3.0}, {"documented_policy": "any"}]}, {"value": 4.0}, "no alternative"),
        ({"any_of": ["drop it"]}, {}, "no alternative"),
        ({"mean": {"finite": True, "without_empty_rows": 0.5}}, {"mean": 0.25}, "mean"),
        ({"value": True}, {"value": 1}, "value"),
        ({"value": 1}, {"value": True}, "value"),
        ({"value": None}, {"value": 0}, "value"),
        ({"text": "a"}, {"text": "b"}, "text"),
        ({"also": ["one", "two"]}, {"also": {"one": True}}, "also"),
        ({}, {"deep": [{"loss": float("nan")}]}, "nan"),
    ],
)
def test_what_does_not(expected: dict[str, Any], answer: Any, says: str) -> None:
    assert says in "; ".join(problems(expected, answer))


def test_an_unknown_op_and_an_op_without_product_code_are_no_passes() -> None:
    log = {"op": "event_log", "partial_rollout": True, "events": ["start r1 (v0)"]}
    outcomes = [
        run_case({"id": "1", "component": "x", "input": {"op": "no such op"}, "expected": {}}),
        run_case({"id": "2", "component": "x", "input": log, "expected": {}}),
        run_case({"id": "3", "component": "y", "input": {"op": "token_f1"}, "expected": {}}),
    ]
    assert [outcome.verdict for outcome in outcomes] == ["unmapped", "unmapped", "failed"]
    assert "KeyError" in outcomes[2].findings[0]
    assert tally(outcomes) == {"x": {"unmapped": 2}, "y": {"failed": 1}}
