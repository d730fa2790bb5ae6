"""Questions: loading, its errors, selection and resumable order."""

from __future__ import annotations

import copy
import gzip
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sorl_env.questions import Question, QuestionSet, UnknownQuestion, load_questions

ORDER_OF_SEED_0 = ("q4", "q1", "q5", "q3", "q2", "q0")


def numbered(count: int) -> QuestionSet:
    return QuestionSet(
        Question(f"q{i}", f"Question {i}?", (str(i),), "even" if i % 2 == 0 else "odd") for i in range(count)
    )


def write(path: Path, *rows: Any) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows), encoding="utf-8")
    return path


def test_every_spelling_of_answers(tmp_path: Path) -> None:
    path = write(
        tmp_path / "q.jsonl",
        {"id": "a", "question": " Where? ", "golden_answers": ["Lima", "Lima", " ", "City of Kings"]},
        {"id": 7, "question": "How many?", "answer": 12},
        {"id": "c", "problem": "1+1", "answers": ["2", 2.5], "kind": "math", "level": 3},
        {"id": "d", "question": "Which?", "answer": {"value": "Lisbon", "aliases": ["Lisbonne"]}},
        {"id": "e", "question": "Pick", "options": {"A": "x", "B": "y"}, "answer": "B"},
    )
    a, seven, c, d, e = load_questions(path)
    assert a == Question("a", "Where?", ("Lima", "City of Kings"))
    assert seven == Question("7", "How many?", ("12",))
    assert c == Question("c", "1+1", ("2", "2.5"), "math", {"level": 3})
    assert d.answers == ("Lisbon", "Lisbonne")
    assert (e.kind, e.metadata["options"]) == ("choice", {"A": "x", "B": "y"})


def test_tolerates_mark_returns_blank_lines_gzip_and_line_separators(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl.gz"
    lines = [
        '{"id": "a", "question": "x\u2028y", "answer": "1"}',
        "",
        '{"id": "b", "question": "ü", "answer": "2"}',
    ]
    path.write_bytes(gzip.compress("\ufeff".encode() + "\r\n".join(lines).encode()))
    assert [question.text for question in load_questions(path)] == ["x\u2028y", "ü"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"id": "b", "question": ', "not valid JSON"),
        ("[1]", "expected a JSON object"),
        ({"question": "x", "answer": "1"}, "'id' is missing"),
        ({"id": "", "question": "x", "answer": "1"}, "'id' is missing"),
        ({"id": True, "question": "x", "answer": "1"}, "'id' is missing"),
        ({"id": "b", "answer": "1"}, "'question' is missing"),
        ({"id": "b", "question": "  ", "answer": "1"}, "'question' is missing"),
        ({"id": "b", "question": "x"}, "no field 'golden_answers'"),
        ({"id": "b", "question": "x", "golden_answers": []}, "holds no answer"),
        ({"id": "b", "question": "x", "answers": ["", "  "]}, "holds no answer"),
        ({"id": "b", "question": "x", "answer": [None]}, "texts or numbers"),
        ({"id": "b", "question": "x", "answer": True}, "texts or numbers"),
        ('{"id": "b", "question": "x", "answer": NaN}', "no number"),
        ({"id": "a", "question": "x", "answer": "1"}, "is on line 1 already"),
        ("[" * 100_000, "not valid JSON"),
    ],
)
def test_bad_rows_name_file_and_line(tmp_path: Path, row: Any, message: str) -> None:
    path = write(tmp_path / "bad.jsonl", {"id": "a", "question": "x", "answer": "1"}, row)
    with pytest.raises(ValueError, match=r"bad\.jsonl, line 2: ") as caught:
        load_questions(path)
    assert message in str(caught.value)


def test_bad_files(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none\.jsonl"):
        load_questions(tmp_path / "none.jsonl")
    with pytest.raises(ValueError, match="no question"):
        load_questions(write(tmp_path / "empty.jsonl", ""))
    (tmp_path / "latin.jsonl").write_bytes(b'{"id": "a", "question": "\xfc", "answer": "1"}')
    with pytest.raises(ValueError, match=r"latin\.jsonl, line 1: not UTF-8"):
        load_questions(tmp_path / "latin.jsonl")
    packed = gzip.compress(json.dumps({"id": "a", "question": "x" * 5000, "answer": "1"}).encode())
    (tmp_path / "cut.jsonl.gz").write_bytes(packed[:-12])
    with pytest.raises(ValueError, match="damaged gzip"):
        load_questions(tmp_path / "cut.jsonl.gz")


@pytest.mark.parametrize("answers", [(), ("",), (" ",), "Paris"])
def test_question_needs_an_answer(answers: Any) -> None:
    with pytest.raises(ValueError, match="'q1'"):
        Question("q1", "Where?", answers)


def test_lookup_names_near_misses() -> None:
    questions = numbered(30)
    assert questions.by_id("q17").text == "Question 17?"
    with pytest.raises(UnknownQuestion, match="'q1'"):
        questions.by_id("Q1")
    with pytest.raises(KeyError):
        questions.by_id(None)  # type: ignore[arg-type]


def test_double_ids_are_refused() -> None:
    with pytest.raises(ValueError, match="'x' occurs twice"):
        QuestionSet([Question("x", "a", ("1",)), Question("y", "a", ("1",)), Question("x", "b", ("2",))])


def test_selection() -> None:
    questions = numbered(10)
    assert questions.select(["q3", "q1"]).ids == ("q3", "q1")
    assert questions.filter("odd").ids == ("q1", "q3", "q5", "q7", "q9")
    assert questions.filter(where=lambda q: q.id > "q7").ids == ("q8", "q9")
    assert questions[2:4].ids == ("q2", "q3")
    assert questions[-1].id == "q9"
    assert questions[0] in questions and Question("q0", "other", ("1",)) not in questions


def test_sample_by_hash_grows_without_swapping() -> None:
    questions = numbered(50)
    small, large = questions.sample_by_hash(10), questions.sample_by_hash(20)
    assert set(small.ids) < set(large.ids)
    assert list(large.ids) == [i for i in questions.ids if i in set(large.ids)]
    assert questions.sample_by_hash(99) == questions
    # dropping a question that was not chosen changes nothing
    unused = next(i for i in questions.ids if i not in large.ids)
    assert questions.filter(where=lambda q: q.id != unused).sample_by_hash(20) == large


def test_order_is_fixed_for_all_time() -> None:
    # written down from the first run: a change would break every resumed run
    assert numbered(6).order(0).ids == ORDER_OF_SEED_0
    assert numbered(6).order(1).ids != ORDER_OF_SEED_0


@given(st.integers(1, 13), st.integers(0, 5), st.integers(0, 40), st.integers(0, 30), st.integers(0, 30))
def test_stream_can_be_cut_anywhere(size: int, seed: int, start: int, first: int, second: int) -> None:
    questions = numbered(size)
    whole = questions.batch(seed, start, first + second)
    assert whole == questions.batch(seed, start, first) + numbered(size).batch(seed, start + first, second)


@given(st.integers(1, 13), st.integers(0, 5))
def test_every_pass_shows_every_question_once(size: int, seed: int) -> None:
    questions = numbered(size)
    stream = questions.stream(seed)
    for _ in range(3):
        assert sorted(next(stream).id for _ in range(size)) == sorted(questions.ids)
    assert next(questions.stream(seed, start=size)) == questions.batch(seed, size, 1)[0]


def test_bad_positions() -> None:
    with pytest.raises(ValueError, match="negative"):
        numbered(3).batch(0, -1, 2)
    with pytest.raises(ValueError, match="empty"):
        QuestionSet([]).batch(0, 0, 1)


def test_copies() -> None:
    questions = numbered(4)
    assert copy.deepcopy(questions) is questions
    assert pickle.loads(pickle.dumps(questions)) == questions
    assert hash(questions) == hash(numbered(4))
