"""Comparisons of two results: what is computed, and what is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from sorl_algos.evaluation.compare import compare
from sorl_algos.evaluation.results import read_result, write_result


def result(exact: list[float], f1: list[float], *, start: int = 0, data: str = "d" * 64, prompt: str = "p" * 64) -> Any:
    ids = [f"q{number}" for number in range(start, start + len(exact))]
    return {
        "schema": 1,
        "identity": {
            "data": {"name": "nq", "sha256": data, "questions": len(ids)},
            "prompt": {"name": "short", "sha256": prompt},
            "model": {"name": "a"},
        },
        "headline": "exact_match",
        "scores": {"exact_match": {}, "f1": {}},
        "per_question": {"id": ids, "digest": [f"digest of {one}" for one in ids], "exact_match": exact, "f1": f1},
    }


def test_numbers_by_hand() -> None:
    first = result([1, 0, 0, 0, 1], [1.0, 0.5, 0.0, 0.0, 1.0])
    second = result([0, 1, 1, 1, 1], [0.0, 1.0, 1.0, 1.0, 1.0])
    second["identity"]["model"]["name"] = "b"
    found = compare(first, second)
    exact, f1 = found["scores"]["exact_match"], found["scores"]["f1"]
    assert (exact["first"], exact["second"], exact["difference"]["mean"]) == (0.4, 0.8, pytest.approx(0.4))
    # one question that just the first got right, three that just the second did: 2 (1 + 4) / 16
    assert (exact["only_first"], exact["only_second"], exact["mcnemar"]) == (1, 3, 0.625)
    assert f1["difference"]["mean"] == pytest.approx((-1 + 0.5 + 1 + 1 + 0) / 5) and "mcnemar" not in f1
    assert found["differs"] == [["model.name", "a", "b"]] and (found["n"], found["left_out"]) == (5, [0, 0])
    assert compare(first, second) == found


def test_questions_are_paired_by_id_not_by_place() -> None:
    first, second = result([1, 0, 0], [1, 0, 0]), result([1, 0, 0], [1, 0, 0])
    for column in second["per_question"].values():
        column.reverse()
    assert compare(first, second)["scores"]["exact_match"]["difference"]["p"] == 1.0


def test_other_data_or_another_prompt_is_refused_unless_told() -> None:
    first, second = result([1, 0, 1, 0], [1] * 4), result([1, 1, 0], [1] * 3, start=2, data="e" * 64, prompt="r" * 64)
    with pytest.raises(ValueError, match=r"different data: 'nq' \(dddddddddddd, 4 questions\) .* --allow data"):
        compare(first, second)
    with pytest.raises(ValueError, match=r"different prompt: 'short' \(pppp.* and 'short' \(rrrr.* --allow prompt"):
        compare(first, second, allow=("data",))
    found = compare(first, second, allow=("data", "prompt"))
    assert (found["n"], found["left_out"]) == (2, [2, 1])  # q2 and q3
    assert found["scores"]["exact_match"]["first"] == 0.5 and found["scores"]["exact_match"]["second"] == 1.0


def test_what_can_never_be_compared() -> None:
    first = result([1, 0], [1, 0])
    with pytest.raises(ValueError, match="no question in common"):
        compare(first, result([1, 0], [1, 0], start=5, data="e"), allow=("data",))
    changed = copy.deepcopy(first)
    changed["per_question"]["digest"][1] = "other"
    with pytest.raises(ValueError, match="question 'q1' has another text or other gold answers"):
        compare(first, changed)
    with pytest.raises(ValueError, match="other kinds of questions: exact_match and math_equal"):
        compare(first, first | {"headline": "math_equal"})
    with pytest.raises(ValueError, match="unknown part 'model'; data and prompt may"):
        compare(first, first, allow=("model",))


def test_result_files_go_out_and_come_back(tmp_path: Path) -> None:
    made = result([1, 0], [1.0, 0.25])
    write_result(tmp_path / "r.json", made)
    assert read_result(tmp_path / "r.json") == made
    assert (tmp_path / "r.json").read_text().count("\n") < 30  # a column is one line


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no such file"),
        ("[]", "is no result of scripts/evaluate.py"),
        ("nonsense", "is no result of scripts/evaluate.py"),
        ('{"schema": 7}', "result of format 7, this version reads 1"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "r.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_result(tmp_path / "r.json")
