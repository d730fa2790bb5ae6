"""MedicalQA-v0 and its bundled book."""

from __future__ import annotations

import warnings
from collections import Counter

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env

import sorl_env  # noqa: F401  (registers the environments)
from sorl_env.choices import choice_of, gold_of, options_of, without_options
from sorl_env.medical import medical_passages, medical_questions, medical_retriever
from sorl_env.normalize import normalize_answer
from sorl_env.questions import Question
from tests.fakes import FakeRetriever

SCURVY = "vitamin-c-deficiency/1"


def test_the_book() -> None:
    passages, questions = medical_passages(), medical_questions("all")
    assert len(passages) >= 80 and len(questions) >= 160
    assert len({passage.text for passage in passages}) == len(passages)
    assert len({question.text for question in questions}) == len(questions)
    letters = Counter(question.answers[0] for question in questions)
    assert set(letters) == set("ABCD") and min(letters.values()) >= 0.15 * len(questions)
    for passage in passages:
        assert 20 <= len(passage.text.split()) <= 80
    for question in questions:
        options = options_of(question)
        assert len(options) == len({normalize_answer(option) for option in options.values()}) == 4
        for letter, option in options.items():
            assert choice_of(option, options) == letter
        assert gold_of(question) == question.answers[0]


def test_every_question_finds_its_passage_by_its_text_alone() -> None:
    questions = medical_questions("all")
    found = medical_retriever().search([question.text for question in questions], 3)
    for question, hits in zip(questions, found, strict=True):
        assert question.metadata["supporting_ids"][0] in [hit.passage.id for hit in hits], question.text


def test_splits_share_no_passage() -> None:
    seen: dict[str, str] = {}
    for split in ("train", "dev", "test"):
        for question in medical_questions(split):
            assert seen.setdefault(question.metadata["supporting_ids"][0], split) == split
    assert sum(len(medical_questions(split)) for split in ("train", "dev", "test")) == len(medical_questions("all"))
    with pytest.raises(ValueError, match="unknown split 'val'; known: train"):
        medical_questions("val")


def test_check_env_finds_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(gymnasium.make("MedicalQA-v0").unwrapped)


def test_an_episode_by_letter_and_by_text() -> None:
    env = gymnasium.make("MedicalQA-v0", split="all", prompt="short")
    question = medical_questions("all").by_id(SCURVY)
    options = options_of(question)
    for answer, reward in ((gold_of(question), 1.0), ("vitamin c", 1.0), ("Vitamin A", 0.0), ("a vitamin", 0.0)):
        observation, _ = env.reset(options={"question_id": SCURVY})
        lines = [f"{letter}) {option}" for letter, option in options.items()]
        assert observation == "\n".join([f"Question: {question.text}", *lines]) + "\n"
        observation, *_, info = env.step("<search>bleeding gums and poor wound healing</search>")
        assert "Title: Vitamin C deficiency" in observation
        _, got, terminated, _, info = env.step(f"<answer>{answer}</answer>")
        assert (got, terminated) == (reward, True)
        assert info["scores"]["unparseable"] == float(answer == "a vitamin")


def test_six_turns() -> None:
    env = gymnasium.make("MedicalQA-v0")
    env.reset(seed=0)
    stops = [env.step("<search>blood</search>")[4]["stop"] for _ in range(6)]
    assert stops == [None] * 5 + ["turn_limit"]


def test_options_stay_out_of_queries_unless_allowed() -> None:
    question = Question(
        "q", "What treats gout attacks?", ("A",), "choice", {"options": ["Colchicine", "Vitamin C", "Iron", "gout"]}
    )
    assert without_options("colchicine for gout", question) == "for gout"  # "gout" is in the question itself
    assert without_options("vitamin-C or vitamin C12", question) == "or vitamin C12"
    assert without_options("Colchicine, iron", question) == ""

    def sent(query: str, **rules: bool) -> str:
        retriever = FakeRetriever()
        env = gymnasium.make("MedicalQA-v0", retriever=retriever, questions=[question], **rules)
        env.reset(seed=0)
        env.step(f"<search>{query}</search>")
        return retriever.calls[0][0][0]

    assert sent("Colchicine dose") == "dose"
    assert sent("Colchicine") == "What treats gout attacks?"
    assert sent("Colchicine", options_in_query=True) == "Colchicine"


def test_many_at_once() -> None:
    vector = gymnasium.make_vec("MedicalQA-v0", num_envs=2, split="all")
    gold = gold_of(medical_questions("all").by_id(SCURVY))
    vector.reset(options={"question_ids": [SCURVY, SCURVY]})
    rewards = vector.step([f"<answer>{gold}</answer>", "<answer>E</answer>"])[1]
    assert rewards.tolist() == [1.0, 0.0]
