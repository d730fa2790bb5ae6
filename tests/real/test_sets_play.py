"""Every real question set is read by the way of prepare_data, plays in its environment, and survives verl's rows."""

from __future__ import annotations

import os
from pathlib import Path

import gymnasium
import pytest

import sorl_env  # noqa: F401  (registers the environments)
from retrieval_index.types import Passage
from sorl_env.question_sets import read_questions, write_questions
from sorl_env.questions import Question
from tests.fakes import FakeRetriever

DATA = Path(os.environ.get("SORL_DATA") or Path(__file__).resolve().parents[2] / ".." / "shared" / "data").resolve()
SETS = sorted(path for folder in ("qa", "qa_extra", "mcq", "math") for path in (DATA / folder).glob("*.jsonl*"))

pytestmark = pytest.mark.skipif(not SETS, reason=f"no real data at {DATA}; set SORL_DATA")

IDS = {"open": "SearchQA-v0", "choice": "MedicalQA-v0", "math": "MathQA-v0"}


def gold_turn(question: Question) -> str:
    answer = question.answers[0]
    return f"\\boxed{{{answer}}}" if question.kind == "math" else f"<answer>{answer}</answer>"


def test_all_sets_are_there() -> None:
    assert len(SETS) == 23


@pytest.mark.parametrize("path", SETS or [Path("none")], ids=lambda path: path.name)
def test_a_set_loads_and_plays(path: Path, tmp_path: Path) -> None:
    questions, left_out = read_questions(path)
    assert left_out.total() <= 0.01 * len(questions), left_out
    [kind] = {question.kind for question in questions}
    sample = questions.sample_by_hash(40)
    retriever = FakeRetriever(passages=[Passage("p", "Title", "the of a in what who is which")])
    envs = gymnasium.make_vec(IDS[kind], num_envs=len(sample), questions=questions, retriever=retriever)
    observations, _ = envs.reset(options={"question_ids": [question.id for question in sample]})
    assert all(question.text in seen for question, seen in zip(sample, observations, strict=True))
    if kind != "math":
        envs.step(["<search>what is the</search>"] * len(sample))
        assert len(retriever.calls) == 1
    *_, infos = envs.step([gold_turn(question) for question in sample])
    assert set(infos["stop"]) == {"answered"}
    score = "choice_accuracy" if kind == "choice" else "exact_match"
    assert all(scores[score] == 1.0 for scores in infos["scores"])
    write_questions(tmp_path / "verl.parquet", sample, name=path.stem)
    assert read_questions(tmp_path / "verl.parquet")[0] == sample
