"""Question sets in the forms in which they were published, read and written."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from sorl_env import parquet
from sorl_env.question_sets import PUBLIC_SETS, read_questions, write_questions
from sorl_env.questions import Question, QuestionSet, load_questions
from sorl_env.verl_rows import question_from_verl, question_to_verl

SCRIPT = Path(__file__).parents[2] / "scripts" / "prepare_data.py"
DAPO = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\nWhat is $1+1$?\n\nThe sum, please."
    '\n\nRemember to put your answer on its own line after "Answer:".'
)


def verl_row(content: str, truth: Any, **more: Any) -> dict[str, Any]:
    prompt = [{"role": "user", "content": content}]
    return {"data_source": "set", "prompt": prompt, "reward_model": {"style": "rule", "ground_truth": truth}} | more


FORMS: list[tuple[str, dict[str, Any], Question]] = [
    (
        "FlashRAG",
        {"id": "test_0", "question": "who?", "golden_answers": ["A", "B"], "metadata": {"x": 1}},
        Question("test_0", "who?", ("A", "B"), "open"),
    ),
    (
        "Search-R1",
        verl_row("Be brief. Question: who wrote it?\n", {"target": ["A"]}, extra_info={"index": 3, "split": "train"}),
        Question("set/train/3", "who wrote it?", ("A",), "open"),
    ),
    (
        "DAPO",
        verl_row(DAPO, "2", ability="MATH", extra_info={"index": "ab-c"}),
        Question("set/train/ab-c", "What is $1+1$?\n\nThe sum, please.", ("2",), "math"),
    ),
    (
        "MedMCQA",
        {"id": "m", "question": "?", "opa": "w", "opb": "x", "opc": "y", "opd": "z", "cop": 2, "exp": "long"},
        Question("m", "?", ("C",), "choice"),
    ),
    (
        "MedQA",
        {"question": "?", "answer": "x", "options": {"A": "w", "B": "x"}, "answer_idx": "B"},
        Question("rows_1", "?", ("B",), "choice"),
    ),
    (
        "PubMedQA",
        {"pubid": 7, "question": "Does it?", "context": {"contexts": ["One.", "Two."]}, "final_decision": "maybe"},
        Question("7", "Does it?", ("C",), "choice"),
    ),
    (
        "MMLU",
        {"question": "?", "subject": "anatomy", "choices": ["w", "x", "y", "z"], "answer": 3},
        Question("rows_1", "?", ("D",), "choice"),
    ),
    (
        "BioASQ yes/no",
        {"id": "b", "body": "?", "type": "yesno", "exact_answer": "no"},
        Question("b", "?", ("B",), "choice"),
    ),
    (
        "BioASQ factoid",
        {"id": "b", "body": "?", "type": "factoid", "exact_answer": [["x", "X1"], "y"]},
        Question("b", "?", ("x", "X1", "y"), "open"),
    ),
    ("AIME", {"id": 60, "problem": "?", "answer": "204", "year": "2024"}, Question("60", "?", ("204",), "math")),
    ("MATH-500", {"unique_id": "a/1", "problem": "?", "answer": "x"}, Question("a/1", "?", ("x",), "math")),
    ("GSM8K", {"question": "?", "answer": "2+2=4\n#### 4"}, Question("rows_1", "?", ("4",), "math")),
]  # fmt: skip


def write_lines(path: Path, rows: list[Any]) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize(("form", "row", "expected"), FORMS, ids=[form for form, _, _ in FORMS])
def test_every_form_is_read(tmp_path: Path, form: str, row: dict[str, Any], expected: Question) -> None:
    [question] = read_questions(write_lines(tmp_path / "rows.jsonl", [row]))[0]
    shown = (question.id, question.text, question.answers, question.kind)
    assert shown == (expected.id, expected.text, expected.answers, expected.kind)
    if question.kind == "choice":
        assert question.answers[0] in question.metadata["options"]


def test_the_context_of_pubmedqa_is_kept_and_explanations_are_not(tmp_path: Path) -> None:
    rows = [FORMS[5][1], FORMS[3][1]]
    pubmed, medmcqa = read_questions(write_lines(tmp_path / "rows.jsonl", rows))[0]
    assert pubmed.metadata["context"] == "One. Two."
    assert set(medmcqa.metadata) == {"options"}


@pytest.mark.skipif(find_spec("datasets") is None, reason="datasets is not installed")
def test_rows_come_through_the_library_of_the_hub(tmp_path: Path) -> None:
    """A folder stands for a data set of the hub: the same code path, the same typed columns."""
    ragged = {"question": "?", "answer": "y", "options": {"A": "w", "B": "x", "C": "y"}, "answer_idx": "C"}
    medqa = [FORMS[4][1], ragged]  # two options, three options: the column fills the first row up with None
    folders = {"medqa": medqa, "dapo": [FORMS[2][1]], "pubmedqa": [FORMS[5][1]], "flash": [FORMS[0][1]]}
    for name, rows in folders.items():
        write_lines(tmp_path / name / "test.jsonl", rows)
    found = {name: read_questions(f"hub:{tmp_path / name}", split="test")[0] for name in folders}
    assert [question.metadata["options"] for question in found["medqa"]] == [{"A": "w", "B": "x"}, ragged["options"]]
    assert found["medqa"].ids == ("medqa_1", "medqa_2") and found["medqa"][1].answers == ("C",)
    for name, form in (("dapo", 2), ("pubmedqa", 5), ("flash", 0)):
        [question], expected = found[name], FORMS[form][2]
        assert (question.text, question.answers, question.kind) == (expected.text, expected.answers, expected.kind)
    with pytest.raises(ValueError, match=r"split dev\) cannot be read: .*A local file .*works as well"):
        read_questions(f"hub:{tmp_path / 'flash'}", split="dev")


def test_json_files_of_mirage_and_bioasq(tmp_path: Path) -> None:
    row = {"question": "?", "options": {"A": "w", "B": "x"}, "answer": "B"}
    mirage = tmp_path / "benchmark.json"
    mirage.write_text(
        json.dumps({"medqa": {"0": row, "1": row | {"question": "!"}}, "mmlu": {"0": row | {"question": "."}}})
    )
    assert [question.id for question in read_questions(mirage)[0]] == ["medqa/0", "medqa/1", "mmlu/0"]
    assert [question.id for question in read_questions(mirage, config="mmlu")[0]] == ["mmlu/0"]
    with pytest.raises(ValueError, match="holds no set 'x'; it holds medqa, mmlu"):
        read_questions(mirage, config="x")
    bioasq = tmp_path / "golden.json.gz"
    bioasq.write_bytes(gzip.compress(json.dumps({"questions": [FORMS[7][1]]}).encode()))
    assert read_questions(bioasq)[0][0].answers == ("B",)


def test_hidden_labels_and_repetitions_are_left_out_and_counted(tmp_path: Path) -> None:
    medmcqa = FORMS[3][1]
    rows = [
        medmcqa,
        medmcqa | {"id": "again"},
        medmcqa | {"id": "h", "cop": -1},
        {"id": "s", "body": "?", "type": "summary"},
    ]
    questions, left_out = read_questions(write_lines(tmp_path / "rows.jsonl", rows))
    assert questions.ids == ("m",)
    assert left_out.total() == 3 and left_out["the same question again"] == 1 and left_out["its label is hidden"] == 1


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([FORMS[3][1] | {"cop": 4}], "line 1: gold index 4|gold index 4"),
        ([{"id": "a", "question": "?"}], r"line 1: no field 'golden_answers'"),
        ([{"id": "a", "question": text, "answer": "x"} for text in "?!"], "line 2: id 'a' occurs twice"),
        ([[1]], "line 1: expected a JSON object"),
        ([FORMS[5][1] | {"final_decision": "perhaps"}], "perhaps"),
        ([FORMS[3][1] | {"cop": -1}], "gave no question; rows left out"),
        ([verl_row("x", None, prompt=[])], "no user message"),
    ],
)  # fmt: skip
def test_a_broken_row_is_an_error_that_names_it(tmp_path: Path, rows: list[Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        read_questions(write_lines(tmp_path / "rows.jsonl", rows))


def test_an_unknown_source_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"neither a file nor a known set; known: nq, .*hub:owner/name"):
        read_questions("nqq")
    for_search = {"nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle"}
    for_medicine = {"medqa", "medmcqa", "pubmedqa", "mmlu_medical"}
    for_math = {"dapo_math_17k", "aime_2024", "aime_2025", "math_500"}
    assert for_search | for_medicine | for_math <= set(PUBLIC_SETS)


QUESTIONS = QuestionSet(
    [
        Question("1", "wer?\u2028ü", ("Zoë", "B"), "open", {"hops": 2, "titles": ["T"]}),
        Question("2", "which?", ("B",), "choice", {"options": {"A": "w", "B": "x"}}),
        Question("3", "1+1", ("2",), "math"),
    ],
    "mine",
)


@pytest.mark.parametrize("name", ["q.jsonl", "q.jsonl.gz", "q.parquet"])
def test_what_is_written_is_read_back(tmp_path: Path, name: str) -> None:
    assert write_questions(tmp_path / "deep" / name, QUESTIONS, name="mine") == 3
    assert read_questions(tmp_path / "deep" / name)[0] == QUESTIONS
    assert [path.name for path in (tmp_path / "deep").iterdir()] == [name]
    if name != "q.parquet":
        assert load_questions(tmp_path / "deep" / name) == QUESTIONS


def test_verl_rows_have_verls_form_and_lose_nothing() -> None:
    row = question_to_verl(QUESTIONS[1], data_source="medqa", split="dev", index=4, prompt="short")
    assert row["prompt"] == [{"role": "user", "content": "Question: which?\nA) w\nB) x\n"}]
    assert row["reward_model"] == {"style": "rule", "ground_truth": {"target": ["B"]}}
    assert (row["data_source"], row["ability"]) == ("medqa", "medical")
    assert (row["extra_info"]["split"], row["extra_info"]["index"]) == ("dev", 4)
    assert question_from_verl(row) == QUESTIONS[1]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "q.parquet"
    write_questions(path, QUESTIONS, name="mine")
    before = path.read_bytes()
    with pytest.raises(ValueError, match="does not fit its column"):
        write_questions(path, [Question("1", "half \ud83d a pair", ("x",))], name="mine")
    assert path.read_bytes() == before and len(list(tmp_path.iterdir())) == 1
    with pytest.raises(ValueError, match=r"use .jsonl, .jsonl.gz, or .parquet"):
        write_questions(tmp_path / "q.csv", QUESTIONS, name="mine")


def test_a_damaged_parquet_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "q.parquet").write_bytes(b"PAR1 nonsense")
    with pytest.raises(ValueError, match=r"q\.parquet is not a parquet file, or is damaged"):
        list(parquet.read_rows(tmp_path / "q.parquet"))
    with pytest.raises(FileNotFoundError):
        list(parquet.read_rows(tmp_path / "none.parquet"))


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=60)


def test_the_script(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "rows.jsonl", [FORMS[0][1], FORMS[9][1]])
    dry = run(str(source), "--dry-run")
    assert dry.returncode == 0 and "2 questions" in dry.stdout and "nothing was written" in dry.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]
    done = run(str(source), "--output", str(tmp_path / "out.parquet"), "--prompt", "short")
    assert done.returncode == 0, done.stderr
    assert next(parquet.read_rows(tmp_path / "out.parquet"))["prompt"][0]["content"] == "Question: who?\n"
    wrong = run(str(tmp_path / "none"), "--dry-run")
    assert (
        wrong.returncode == 2 and "neither a file nor a known set" in wrong.stderr and "Traceback" not in wrong.stderr
    )
