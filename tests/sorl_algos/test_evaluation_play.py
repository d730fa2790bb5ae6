"""Whole sets, played in batches: the files, stops and resumptions, seeds, refusals."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from sorl_algos.evaluation.identity import differences, json_digest, question_digest, tensors_digest, weights_digest
from sorl_algos.evaluation.play import Plan, SeededByPrompt, longest_prompt, open_log, play
from sorl_algos.evaluation.results import episode_row, read_result, scores_of
from sorl_algos.models import save_language_model
from sorl_algos.rollout.collect import collect
from sorl_algos.rollout.engine import Completion, Sampling
from sorl_algos.rollout.hf import HFEngine
from sorl_algos.rollout.renderer import Renderer
from sorl_env.questions import Question
from tests.fakes import FakeRetriever, ScriptedEngine
from tests.sorl_algos.small_game import QUESTIONS, good_player, make_env

SESSION = {"code": "abc", "batch": 2}


def make_plan(**changes: Any) -> Plan:
    settings: dict[str, Any] = {
        "name": "capitals",
        "questions": list(QUESTIONS),
        "kind": "open",
        "make_env": lambda slots: make_env(slots),
        "identity": {"data": {"name": "capitals", "sha256": "d"}, "prompt": {"sha256": "p"}},
        "sampling": Sampling(max_tokens=30, temperature=0.0),
        "batch": 2,
    }
    return Plan(**settings | changes)


def one_wrong(prompt: str) -> str:
    if "Chile" in prompt and "<information>" in prompt:
        return "<answer> Quito</answer>"
    if "Ecuador" in prompt:
        return "no action at all"
    return good_player(prompt)


class DiesAfter:
    """An engine that is killed after so many calls."""

    def __init__(self, engine: Any, calls: int) -> None:
        self.engine, self.left = engine, calls

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Completion]:
        if self.left == 0:
            raise KeyboardInterrupt
        self.left -= 1
        return self.engine.generate(prompts, sampling)

    def update_weights(self, weights: Any, version: int) -> None: ...


def test_scores_by_hand(tokenizer: Any, tmp_path: Path) -> None:
    heard: list[int] = []
    engine = ScriptedEngine(tokenizer, one_wrong)
    result = play(
        make_plan(), engine, Renderer(tokenizer), tmp_path, session=SESSION, on_episodes=heard.append
    )
    means = {name: score["mean"] for name, score in result["scores"].items()}
    # Peru: search, right answer. Chile: search, wrong answer. Ecuador: three turns without an action.
    assert means == pytest.approx(
        {
            "exact_match": 1 / 3, "f1": 1 / 3, "contains": 1 / 3, "searches": 2 / 3, "turns": 7 / 3,
            "valid_action_rate": 2 / 3, "answered": 2 / 3, "action_tokens": means["action_tokens"],
        }
    )  # fmt: skip
    assert result["stops"] == {"answered": 2, "turn_limit": 1} and result["n"] == 3
    assert result["per_question"]["exact_match"] == [1.0, 0.0, 0.0]
    assert result["headline"] == "exact_match" and heard == [0, 2, 1]
    assert read_result(tmp_path / "capitals.json") == json.loads(json.dumps(result))
    rows = [json.loads(line) for line in (tmp_path / "capitals.questions.jsonl").read_text().splitlines()]
    assert rows[0]["identity"] == make_plan().identity and rows[1] == {"session": SESSION}
    assert (rows[2]["id"], rows[2]["answer"], rows[2]["gold"], rows[2]["retrieved"]) == (
        "q0", "Lima", ["Lima"], [["p0"], []],
    )  # fmt: skip
    assert rows[3]["answer"] == "Quito" and rows[4]["answer"] is None and rows[4]["stop"] == "turn_limit"


def test_a_finished_set_is_not_played_again(tokenizer: Any, tmp_path: Path) -> None:
    first = play(make_plan(), ScriptedEngine(tokenizer, one_wrong), Renderer(tokenizer), tmp_path, session=SESSION)
    nobody = DiesAfter(None, 0)
    assert play(make_plan(), nobody, Renderer(tokenizer), tmp_path, session={"code": "later"}) == first
    with pytest.raises(KeyboardInterrupt):
        play(make_plan(), nobody, Renderer(tokenizer), tmp_path, session=SESSION, restart=True)
    assert not (tmp_path / "capitals.json").exists()


@pytest.mark.parametrize("calls", [0, 3, 6])
def test_stopped_anywhere_and_gone_on_gives_the_same_files(
    tokenizer: Any, make_model: Any, tmp_path: Path, calls: int
) -> None:
    """A sampling model, two samples of three questions in batches of two: 12 engine calls at most."""
    engine = HFEngine(make_model(3), tokenizer)
    plan = make_plan(sampling=Sampling(max_tokens=6, temperature=1.0), samples=2, seed=5)
    straight = play(plan, engine, Renderer(tokenizer), tmp_path / "straight", session=SESSION)
    with pytest.raises(KeyboardInterrupt):
        play(plan, DiesAfter(engine, calls), Renderer(tokenizer), tmp_path / "cut", session=SESSION)
    log = tmp_path / "cut" / "capitals.questions.jsonl"
    log.write_bytes(log.read_bytes()[: -1 if calls % 2 else None])  # as if the last line had been cut
    with pytest.raises(ValueError, match="has not finished; run its command again"):
        read_result(tmp_path / "cut" / "capitals.json")
    assert play(plan, engine, Renderer(tokenizer), tmp_path / "cut", session=SESSION) == straight
    for name in ("capitals.json", "capitals.questions.jsonl"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "straight" / name).read_bytes()


def test_batches_of_any_size_give_the_same_numbers(tokenizer: Any, make_model: Any, tmp_path: Path) -> None:
    renderer = Renderer(tokenizer)
    found = []
    for batch in (1, 2, 3, 64):
        engine = HFEngine(make_model(3), tokenizer, max_batch=batch)
        plan = make_plan(sampling=Sampling(max_tokens=6, temperature=1.0), samples=2, seed=5, batch=batch)
        found.append(play(plan, engine, renderer, tmp_path / str(batch), session=SESSION))
    assert all(result == found[0] for result in found)
    other = make_plan(sampling=Sampling(max_tokens=6, temperature=1.0), samples=2, seed=6)
    log = open_log(other, tmp_path / "other")
    result = play(other, HFEngine(make_model(3), tokenizer), renderer, tmp_path / "other", session=SESSION)
    assert not log.rows and result["per_question"]["action_tokens"] != found[0]["per_question"]["action_tokens"]


def test_a_session_under_other_code_is_recorded(tokenizer: Any, tmp_path: Path) -> None:
    engine = ScriptedEngine(tokenizer, one_wrong)
    with pytest.raises(KeyboardInterrupt):
        play(make_plan(batch=1), DiesAfter(engine, 3), Renderer(tokenizer), tmp_path, session={"code": "a"})
    result = play(make_plan(batch=1), engine, Renderer(tokenizer), tmp_path, session={"code": "b"})
    assert result["sessions"] == [{"code": "a"}, {"code": "b"}]


def test_another_evaluation_in_the_directory_is_refused(tokenizer: Any, tmp_path: Path) -> None:
    play(make_plan(), ScriptedEngine(tokenizer, one_wrong), Renderer(tokenizer), tmp_path, session=SESSION)
    other = make_plan(identity={"data": {"name": "capitals", "sha256": "d"}, "prompt": {"sha256": "q"}})
    with pytest.raises(ValueError, match=r"holds results with prompt.sha256='p', this evaluation has 'q'; .*--restart"):
        open_log(other, tmp_path)
    (tmp_path / "capitals.questions.jsonl").write_text('{"some": "thing"}\n')
    with pytest.raises(ValueError, match="is no file of an evaluation"):
        open_log(make_plan(), tmp_path)


def test_a_failed_search_is_no_wrong_answer(tokenizer: Any, tmp_path: Path) -> None:
    plan = make_plan(make_env=lambda slots: make_env(slots, FakeRetriever(fails=True)))
    with pytest.raises(RuntimeError, match=r"the search failed for 2 of 2 questions .*The same command goes on"):
        play(plan, ScriptedEngine(tokenizer, good_player), Renderer(tokenizer), tmp_path, session=SESSION)
    assert open_log(plan, tmp_path).rows == {}


def test_plans_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match="'capitals' holds no question"):
        make_plan(questions=[])
    with pytest.raises(ValueError, match="greedy decoding are all the same"):
        make_plan(samples=2)
    with pytest.raises(ValueError, match="must be 1 or more"):
        make_plan(batch=0)


def test_a_prompt_without_room_is_refused_before_anything_is_played(tokenizer: Any) -> None:
    renderer = Renderer(tokenizer)
    lengths = {q.id: len(renderer.first(f"Question: {q.text}\n")) for q in QUESTIONS}
    longest = max(lengths.values())
    assert longest_prompt(make_plan(max_total_tokens=longest + 1), renderer)[0] == longest
    with pytest.raises(ValueError, match=f"prompt of {longest} tokens, but max_total_tokens is {longest}"):
        longest_prompt(make_plan(max_total_tokens=longest), renderer)


def test_seeds_go_by_seed_sample_and_prompt_alone() -> None:
    class Notes:
        def generate(self, prompts: Any, sampling: Sampling) -> list[Completion]:
            self.seeds = sampling.seeds
            return []

        def update_weights(self, weights: Any, version: int) -> None: ...

    engine = Notes()

    def seeds(seed: int, sample: int, *prompts: list[int]) -> tuple[int, ...]:
        SeededByPrompt(engine, seed, sample).generate(prompts, Sampling(seeds=(7,) * len(prompts)))
        return engine.seeds

    assert seeds(0, 0, [1, 2], [3]) == seeds(0, 0, [3], [1, 2])[::-1]
    assert len({*seeds(0, 0, [1, 2], [12], [1], [2]), *seeds(1, 0, [1]), *seeds(0, 1, [1])}) == 6


def test_scores_of_each_kind_of_question(tokenizer: Any) -> None:
    row = {
        "scores": {"exact_match": 1.0, "f1": 0.5, "contains": 1.0, "choice_accuracy": 0.0, "unparseable": 1.0},
        "stop": "answered", "searches": 2, "turns": 4, "valid_turns": 3, "action_tokens": 9,
    }  # fmt: skip
    both = {"searches": 2.0, "turns": 4.0, "valid_action_rate": 0.75, "answered": 1.0, "action_tokens": 9.0}
    assert scores_of(row, "open") == {"exact_match": 1.0, "f1": 0.5, "contains": 1.0} | both
    assert scores_of(row, "choice") == {"choice_accuracy": 0.0, "unparseable": 1.0} | both
    assert scores_of(row, "math") == {"math_equal": 1.0} | both
    [trajectory] = collect(
        make_env(1), ScriptedEngine(tokenizer, lambda _: "<answer>Lima</answer>"), Renderer(tokenizer), [QUESTIONS[0]]
    )
    assert episode_row(trajectory, QUESTIONS[0], 0, "Lima")["scores"]["exact_match"] == 1.0


def test_digests_tell_apart_what_differs(make_model: Any, tokenizer: Any, tmp_path: Path) -> None:
    questions = [
        Question("a", "What?", ("x",)),
        Question("b", "What?", ("x",)),
        Question("a", "What?", ("x", "y")),
        Question("a", "What?", ("x",), "choice", {"options": {"A": "x"}}),
        Question("a", "What?", ("x",), "choice", {"options": {"A": "y"}}),
    ]
    assert len({question_digest(question) for question in questions}) == 5
    assert question_digest(questions[0]) == question_digest(Question("a", "What?", ("x",), "open", {"source": "z"}))
    assert json_digest({"a": 1, "b": 2}) == json_digest({"b": 2, "a": 1})
    assert tensors_digest(make_model(1)) == tensors_digest(make_model(1)) != tensors_digest(make_model(2))
    for name, seed in (("one", 1), ("same", 1), ("other", 2)):
        save_language_model(make_model(seed), tokenizer, tmp_path / name)
    assert weights_digest(tmp_path / "one") == weights_digest(tmp_path / "same") != weights_digest(tmp_path / "other")
    with pytest.raises(ValueError, match="holds no weight file"):
        weights_digest(tmp_path)


def test_differences_of_nested_records() -> None:
    old, new = {"a": {"b": 1, "c": 2}, "d": 3, "gone": 4}, {"a": {"b": 1, "c": 5}, "d": 3, "new": 6}
    assert differences(old, new) == [("a.c", 2, 5), ("gone", 4, None), ("new", None, 6)]
