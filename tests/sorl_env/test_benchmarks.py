"""Benchmarks by name: groups, files of a data directory, bundled sets, and what is said when one is missing."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

from sorl_env.benchmarks import ENVIRONMENTS, GROUPS, environment_of, expand, find_set
from sorl_env.questions import Question, QuestionSet

DATA = Path(os.environ.get("SORL_DATA") or Path(__file__).resolve().parents[2] / ".." / "shared" / "data").resolve()


def write(path: Path, *rows: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())


OPEN = {"id": "1", "question": "Who?", "golden_answers": ["x"]}


def test_groups_stand_for_their_sets() -> None:
    assert [len(sets) for sets in GROUPS.values()] == [7, 5, 2]
    assert expand(["aime", "nq", "x.jsonl"]) == ["aime_2024", "aime_2025", "nq", "x.jsonl"]
    with pytest.raises(ValueError, match="'nq' is given twice"):
        expand(["qa", "nq"])


def test_a_set_is_found_in_the_directory_or_a_folder_of_it(tmp_path: Path) -> None:
    write(tmp_path / "nq.jsonl", OPEN)
    write(tmp_path / "math" / "aime2024.jsonl.gz", {"id": "1", "problem": "1+1?", "answer": "2"})
    write(tmp_path / "deep" / "mine.jsonl", OPEN, OPEN | {"id": "2"})
    name, questions, path, left_out = find_set("nq", tmp_path)
    assert (name, len(questions), path, left_out) == ("nq", 1, tmp_path / "nq.jsonl", {})
    name, questions, path, _ = find_set("aime_2024", tmp_path)
    assert (name, questions[0].kind, path) == ("aime_2024", "math", tmp_path / "math" / "aime2024.jsonl.gz")
    name, questions, _, left_out = find_set(str(tmp_path / "deep" / "mine.jsonl"), None)
    assert (name, len(questions), dict(left_out)) == ("mine", 1, {"the same question again": 1})


def test_a_mark_in_the_rows_selects_a_part_of_a_set(tmp_path: Path) -> None:
    """As PubMedQA's file marks the rows of its official test."""
    row = {"question": "Does it?", "options": {"A": "yes", "B": "no", "C": "maybe"}, "answer": "B"}
    marks = ({"official_test": True}, {"official_test": False}, {}, {"official_test": True})
    rows = [row | {"id": str(number), "question": f"{number}?"} | mark for number, mark in enumerate(marks)]
    write(tmp_path / "mcq" / "pubmedqa.jsonl", *rows)
    path = tmp_path / "mcq" / "pubmedqa.jsonl"
    for name in ("pubmedqa:official_test", f"{path}:official_test"):
        short, questions, found, left_out = find_set(name, tmp_path)
        assert (short, found, list(questions.ids)) == ("pubmedqa_official_test", path, ["0", "3"])
        assert left_out == {"not marked official_test": 2} and environment_of(questions) == "MedicalQA-v0"
    assert len(find_set("pubmedqa", tmp_path)[1]) == 4
    with pytest.raises(ValueError, match=r'no row of .*pubmedqa\.jsonl has "test": true; name the whole set, pubmedqa'):
        find_set("pubmedqa:test", tmp_path)
    with pytest.raises(ValueError, match="holds no file of set 'pubmedq'"):
        find_set("pubmedq:official_test", tmp_path)


def test_bundled_sets_need_no_file() -> None:
    for name, size in (("world:test", None), ("medical:test", None), ("math:dev", 200)):
        short, questions, path, _ = find_set(name)
        assert short == name.replace(":", "_") and path is None and len(questions) == (size or len(questions)) > 0
    with pytest.raises(ValueError, match="unknown split 'tset'"):
        find_set("world:tset")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nq", "prepare_data.py nq --output .*nq.jsonl"),
        ("bioasq", "hand it out as a file: python scripts/prepare_data.py FILE"),
        ("nqq", "known sets: nq, triviaqa, .* groups: qa, medical, aime"),
        ("no/such.jsonl", "question file no/such.jsonl does not exist"),
    ],
)
def test_a_missing_set_says_what_makes_it(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_set(name, tmp_path)


def test_a_name_needs_a_directory(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give --data DIR"):
        find_set("nq", None)
    with pytest.raises(ValueError, match="does not exist; make it with"):
        find_set("nq", tmp_path / "none")


def test_the_environment_goes_by_kind() -> None:
    def a_set(*kinds: str) -> QuestionSet:
        return QuestionSet(Question(str(n), "?", ("x",), kind) for n, kind in enumerate(kinds))

    assert environment_of(a_set("open", "two_hop")) == ENVIRONMENTS["open"]
    assert environment_of(a_set("choice")) == "MedicalQA-v0"
    assert environment_of(a_set("math")) == "MathQA-v0"
    with pytest.raises(ValueError, match="mixes questions of kinds choice, open"):
        environment_of(a_set("choice", "open"))


@pytest.mark.skipif(not DATA.is_dir(), reason=f"no real data at {DATA}; set SORL_DATA")
def test_every_set_of_the_groups_is_found_in_the_real_data() -> None:
    for group, environment in (("qa", "SearchQA-v0"), ("medical", "MedicalQA-v0"), ("aime", "MathQA-v0")):
        for name in GROUPS[group]:
            assert environment_of(find_set(name, DATA)[1]) == environment
