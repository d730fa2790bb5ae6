"""Every real question set loads, and its own gold answers earn full reward."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sorl_env.choices import choice_of, gold_of, options_of
from sorl_env.questions import load_questions
from sorl_env.rewards import choice_accuracy, exact_match, math_equal

DATA = Path(
    os.environ.get("SORL_DATA") or Path(__file__).resolve().parents[2] / ".." / "shared" / "data"
).resolve()

pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason=f"no real data at {DATA}; set SORL_DATA")

# rows as the README beside the data gives them
QA = {
    "qa/nq": 702, "qa/triviaqa": 699, "qa/popqa": 696, "qa/bamboogle": 98, "qa/hotpotqa": 846,
    "qa/2wikimultihopqa": 1016, "qa/musique": 207, "qa/squad_xquad": 839, "qa/bioasq_factoid": 524,
    "qa_extra/nq_open_rest": 1843, "qa_extra/webquestions": 1427, "qa_extra/musique_r1s500": 313,
}  # fmt: skip
MCQ = {
    "mcq/medqa_usmle": 910, "mcq/medmcqa": 1442, "mcq/mmlu_med": 728, "mcq/pubmedqa": 692,
    "mcq/bioasq_yn": 428, "mcq/scifact_claims": 753,
}  # fmt: skip
MATH = {
    "math/aime2024": 30, "math/aime2025": 30, "math/math500": 500, "math/gsm8k_test": 1319,
    "math/dapo_math_3k": 3000,
}  # fmt: skip


def path_of(name: str) -> Path:
    plain = DATA / f"{name}.jsonl"
    return plain if plain.is_file() else DATA / f"{name}.jsonl.gz"


@pytest.mark.parametrize(("name", "rows"), QA.items())
def test_open_questions(name: str, rows: int) -> None:
    questions = load_questions(path_of(name))
    assert len(questions) == rows
    for question in questions:
        for gold in question.answers:
            assert exact_match([f"<answer>{gold}</answer>"], question) == 1.0, (question.id, gold)
        assert exact_match(["<answer>no such thing at all</answer>"], question) == 0.0


@pytest.mark.parametrize(("name", "rows"), MCQ.items())
def test_multiple_choice(name: str, rows: int) -> None:
    questions = load_questions(path_of(name))
    assert len(questions) == rows
    by_text = 0
    for question in questions:
        assert question.kind == "choice"
        gold, options = gold_of(question), options_of(question)
        for letter in options:
            for form in (
                letter,
                letter.lower(),
                f"({letter})",
                f"The answer is {letter}.",
                f"{letter}) {options[letter]}",
            ):
                reward = choice_accuracy([f"<answer>{form}</answer>"], question)
                assert reward == float(letter == gold), (question.id, form, options)
        by_text += choice_of(options[gold], options) == gold
    assert by_text >= 0.98 * rows  # the rest: options that are equal save for what normalisation folds


@pytest.mark.parametrize(("name", "rows"), MATH.items())
def test_mathematics(name: str, rows: int) -> None:
    questions = load_questions(path_of(name), kind="math")
    assert len(questions) == rows
    for question in questions:
        [gold] = question.answers
        assert math_equal([f"<answer>\\boxed{{{gold}}}</answer>"], question) == 1.0, (question.id, gold)
        if gold.lstrip("-").isdigit():
            wrong = str(int(gold) + 1)
            assert math_equal([f"<answer>{wrong}</answer>"], question) == 0.0
