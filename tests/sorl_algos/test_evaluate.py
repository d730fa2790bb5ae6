"""Scores of a set of questions and their intervals."""

from __future__ import annotations

import math
from typing import Any

import pytest

from sorl_algos.evaluate import Evaluation, evaluate, interval, searches
from sorl_algos.rollout.renderer import Renderer
from tests.fakes import FakeRetriever, ScriptedEngine
from tests.sorl_algos.small_game import QUESTIONS, good_player, make_env


def scores_of(tokenizer: Any, script: Any, env: Any = None, questions: Any = None, **options: Any) -> Evaluation:
    settings: dict[str, Any] = {"name": "dev", "max_turn_tokens": 30, "max_total_tokens": None}
    return evaluate(
        env or make_env(2),
        ScriptedEngine(tokenizer, script),
        Renderer(tokenizer),
        list(QUESTIONS) if questions is None else questions,
        **settings | options,
    )


def two_of_three(prompt: str) -> str:
    if "Ecuador" in prompt and "<information>" in prompt:
        return "<answer> Quito city</answer>"  # F1 of 2/3: one of two words right, all of the gold found
    return good_player(prompt)


def test_scores_by_hand(tokenizer: Any) -> None:
    finished: list[int] = []
    result = scores_of(tokenizer, two_of_three, on_episodes=finished.append)
    assert (result.n, result.failed, len(result.trajectories)) == (3, 0, 3)
    assert result.means() == pytest.approx(
        {"exact_match": 2 / 3, "f1": (1 + 1 + 2 / 3) / 3, "searches": 1.0, "answered": 1.0}
    )
    assert finished == [2, 1]  # three questions in two slots
    row = result.to_dict("before")
    assert (row["name"], row["set"], row["stage"], row["n"], row["failed"]) == ("dev before", "dev", "before", 3, 0)
    assert row["exact_match"]["low"] <= row["exact_match"]["mean"] <= row["exact_match"]["high"]


def test_searches_that_were_not_carried_out_do_not_count(tokenizer: Any) -> None:
    result = scores_of(tokenizer, lambda prompt: "<search> capital of Peru</search>")
    assert result.means()["searches"] == 2.0  # two allowed; the third turn asks in vain
    assert [searches(item) for item in result.trajectories] == [2, 2, 2]
    assert result.means()["answered"] == 0.0


def test_failed_episodes_are_counted_and_not_scored(tokenizer: Any) -> None:
    def answers_peru_at_once(prompt: str) -> str:
        return "<answer> Lima</answer>" if "Peru" in prompt else "<search> x</search>"

    result = scores_of(tokenizer, answers_peru_at_once, make_env(3, FakeRetriever(fails=True)))
    assert (result.n, result.failed) == (1, 2) and result.means()["exact_match"] == 1.0
    with pytest.raises(ValueError, match="all 3 episodes of 'dev' failed in retrieval; is the retriever up"):
        scores_of(tokenizer, lambda prompt: "<search> x</search>", make_env(3, FakeRetriever(fails=True)))


def test_no_question_is_an_error(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="evaluation set 'dev' holds no question"):
        scores_of(tokenizer, good_player, questions=[])


def test_evaluation_is_greedy_by_default(tokenizer: Any) -> None:
    engine = ScriptedEngine(tokenizer, good_player)
    evaluate(
        make_env(3), engine, Renderer(tokenizer), list(QUESTIONS), name="dev", max_turn_tokens=9, max_total_tokens=80
    )
    assert {sampling.temperature for _, sampling in engine.calls} == {0.0}
    assert {sampling.max_tokens for _, sampling in engine.calls} == {9}


def test_the_interval_of_equal_scores_is_a_point_and_more_scores_narrow_it() -> None:
    assert interval([0.5] * 7) == {"mean": 0.5, "low": 0.5, "high": 0.5}
    few, many = interval([0.0, 1.0] * 10), interval([0.0, 1.0] * 500)
    assert few["low"] < many["low"] < 0.5 < many["high"] < few["high"]
    assert interval([0.0, 1.0, 1.0], seed=3) == interval([0.0, 1.0, 1.0], seed=3)


def test_the_interval_is_close_to_the_normal_one() -> None:
    # 400 coin flips with mean 0.3: standard error sqrt(0.21 / 400) = 0.0229, 1.96 of them to each side.
    found = interval([1.0] * 120 + [0.0] * 280)
    half = 1.96 * math.sqrt(0.21 / 400)
    assert found["mean"] == pytest.approx(0.3)
    assert found["low"] == pytest.approx(0.3 - half, abs=0.006) and found["high"] == pytest.approx(
        0.3 + half, abs=0.006
    )
