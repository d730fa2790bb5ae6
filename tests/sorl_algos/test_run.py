"""A whole run on the small game: what it writes, resuming at every stage, what may change and what may not."""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from sorl_algos.config import TrainConfig
from sorl_algos.demonstrations import answer_text, demonstrate, search_text
from sorl_algos.metrics import read_metrics
from sorl_algos.models import Policy, load_language_model, save_language_model
from sorl_algos.report import write_report
from sorl_algos.rollout.renderer import Renderer
from sorl_algos.run import EmptyIndex, EvalSet, Run, check_resumable, git_revision, package_versions
from sorl_algos.warmup import supervised
from tests.fakes import FakeRetriever
from tests.sorl_algos.small_game import CAPITALS, PASSAGES, QUESTIONS, make_env, small_config


class Noted:
    """A Progress that notes its stages and, at a chosen step, does something."""

    def __init__(self, at: tuple[str, int] | None = None, action: Any = None) -> None:
        self.stages: list[str] = []
        self.steps: dict[str, int] = {}
        self.at, self.action = at, action

    def begin(self, stage: str, total: int) -> None:
        self.stages.append(stage)
        self.steps[stage] = 0

    def advance(self, steps: int = 1, note: str = "") -> None:
        stage = self.stages[-1]
        self.steps[stage] += steps
        if self.at == (stage, self.steps[stage]):
            self.action()


@pytest.fixture(scope="module")
def model(make_model: Any, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The directory of a saved model that names one of the cities, or searches, at random."""

    def play(question: Any, observation: str, turn: int, rng: random.Random) -> str:
        if turn == 0 and rng.random() < 0.3:
            return search_text("Peru")
        return answer_text(rng.choice(list(CAPITALS.values())))

    directory, policy = tmp_path_factory.mktemp("models") / "tiny", Policy(make_model())
    played = demonstrate(make_env(8, max_searches=1), Renderer(tokenizer), list(QUESTIONS) * 16, play, seed=0)
    supervised(policy, played, steps=80, batch_sequences=8, lr=5e-3, pad_id=tokenizer.pad_token_id, seed=0)
    save_language_model(policy.lm, tokenizer, directory)
    return str(directory)


def config_for(run_dir: Path, model: str, **changes: Any) -> TrainConfig:
    settings: dict[str, Any] = {
        "model": model, "max_searches": 1, "top_k": 1, "max_turn_tokens": 4, "max_total_tokens": 90,
        "eval_limit": 2, "eval_every": 2, "max_observation_words": 20,
    }  # fmt: skip
    return small_config(run_dir, **settings | changes)


def run_of(config: TrainConfig, progress: Any = None) -> Run:
    return Run(
        config,
        retriever=FakeRetriever(passages=PASSAGES),
        train_questions=QUESTIONS,
        dev_questions=QUESTIONS,
        eval_sets=[
            EvalSet("test", QUESTIONS),
            EvalSet("alone", QUESTIONS[:1], empty_index=True),
            EvalSet("later", QUESTIONS[1:], stages=("after",)),
        ],
        progress=progress or Noted(),
    )


def entries(run_dir: Path) -> list[dict[str, Any]]:
    return json.loads((run_dir / "evaluations.json").read_text(encoding="utf-8"))


def shown(run_dir: Path, stage: str) -> list[dict[str, Any]]:
    text = (run_dir / f"trajectories_{stage}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize("algorithm", ["so_ppo", "grpo"])
def test_what_a_run_writes(algorithm: str, model: str, tmp_path: Path) -> None:
    progress, config = Noted(), config_for(tmp_path, model, algorithm=algorithm, lr=1e-2)
    summary = run_of(config, progress).execute()
    assert summary["finished"] and summary["updates_run"] == 2
    assert progress.stages == ["evaluating before training", f"training {algorithm}", "evaluating after training"]
    assert progress.steps == {progress.stages[0]: 2, progress.stages[1]: 2, progress.stages[2]: 3}

    written = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert (written["algorithm"], written["lr"], written["dataset"]) == (algorithm, 1e-2, "world:train")
    assert written["algorithm_row"]["level"] == ("turn" if algorithm == "so_ppo" else "token")
    assert written["normalisation_threshold"] == (3.0 if algorithm == "so_ppo" else None)
    assert {"torch", "transformers", "python"} <= written["versions"].keys() and "threads" in written["hardware"]

    assert [(entry["name"], entry["n"]) for entry in entries(tmp_path)] == [
        ("test before", 3), ("alone before", 1), ("test after", 3), ("alone after", 1), ("later after", 2),
    ]  # fmt: skip
    assert summary["evaluations"] == entries(tmp_path)
    assert all({"mean", "low", "high"} == entry["f1"].keys() for entry in entries(tmp_path))

    for stage in ("before", "after"):
        rows = shown(tmp_path, stage)
        assert [row["question_id"] for row in rows] == list(QUESTIONS.ids)
        assert rows[0]["answers"] == ["Lima"] and rows[0]["stop"] in ("answered", "turn_limit", "length_limit")
        turns = [turn for row in rows for turn in row["turns"]]
        assert all(turn["ratio"] > 0 for turn in turns)
        assert any(abs(turn["ratio"] - 1) > 1e-3 for turn in turns), "the policy has moved"
        assert all((turn["advantage"] is not None) == (algorithm == "so_ppo") for turn in turns)
        assert set(turns[0]) == {
            "observation_text", "action_text", "ratio", "advantage", "reward", "retrieved", "action_kind",
        }  # fmt: skip
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert 0 < sum(line["reward_mean"] for line in lines) < 2, "some answers should be right, and some wrong"
    assert "eval/dev/exact_match" in lines[1] and "eval/dev/exact_match" not in lines[0]

    trained, _ = load_language_model(str(tmp_path / "policy"))
    start, _ = load_language_model(model)
    assert not torch.equal(trained.lm_head.weight, start.lm_head.weight)
    report = write_report(tmp_path, tmp_path / "report.html")
    assert "What is the capital of Peru?" in report.read_text(encoding="utf-8")


def test_a_finished_run_is_not_done_again_and_more_updates_go_on(model: str, tmp_path: Path) -> None:
    run_of(config_for(tmp_path, model)).execute()
    before, text = entries(tmp_path), (tmp_path / "trajectories_after.jsonl").read_text()
    progress = Noted()
    again = run_of(config_for(tmp_path, model), progress).execute()
    assert again["updates_run"] == 0 and again["finished"]
    assert progress.stages == ["training so_ppo"] and progress.steps == {"training so_ppo": 0}
    assert entries(tmp_path) == before and (tmp_path / "trajectories_after.jsonl").read_text() == text
    more = run_of(config_for(tmp_path, model, updates=3)).execute()
    assert (more["updates_run"], more["updates_done"]) == (1, 3)
    after = [entry["updates_done"] for entry in entries(tmp_path) if entry["stage"] == "after"]
    assert after == [3, 3, 3]
    assert entries(tmp_path)[:2] == before[:2]


def test_an_interrupted_run_goes_on_to_the_same_end(model: str, tmp_path: Path) -> None:
    run_of(config_for(tmp_path / "straight", model, updates=3)).execute()

    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGINT)

    config = config_for(tmp_path / "cut", model, updates=3, save_every=100)
    summary = run_of(config, Noted(("training so_ppo", 1), interrupt)).execute()
    assert (summary["updates_done"], summary["finished"]) == (1, False)
    assert {entry["stage"] for entry in entries(tmp_path / "cut")} == {"before"}
    assert not (tmp_path / "cut" / "policy").exists()
    summary = run_of(config).execute()
    assert (summary["updates_run"], summary["finished"]) == (2, True)
    assert entries(tmp_path / "cut") == entries(tmp_path / "straight")
    for stage in ("before", "after"):
        assert shown(tmp_path / "cut", stage) == shown(tmp_path / "straight", stage)
    trained, straight = (load_language_model(str(tmp_path / name / "policy"))[0] for name in ("cut", "straight"))
    for name, value in straight.state_dict().items():
        assert torch.equal(trained.state_dict()[name], value), name


@pytest.mark.parametrize("stage", ["evaluating before training", "evaluating after training"])
def test_a_run_killed_while_evaluating_scores_the_rest(stage: str, model: str, tmp_path: Path) -> None:
    class Killed(Exception):
        pass

    def kill() -> None:
        raise Killed

    run_of(config_for(tmp_path / "straight", model)).execute()
    config = config_for(tmp_path / "cut", model)
    with pytest.raises(Killed):
        run_of(config, Noted((stage, 1), kill)).execute()
    progress = Noted()
    run_of(config, progress).execute()
    assert progress.steps[stage] == (1 if "before" in stage else 2)
    assert entries(tmp_path / "cut") == entries(tmp_path / "straight")
    assert shown(tmp_path / "cut", "after") == shown(tmp_path / "straight", "after")
    assert shown(tmp_path / "cut", "before") == shown(tmp_path / "straight", "before")


def test_a_run_out_of_time_is_evaluated_as_it_stands(model: str, tmp_path: Path) -> None:
    summary = run_of(config_for(tmp_path, model, updates=9, stop_after_minutes=1e-9)).execute()
    assert (summary["updates_done"], summary["finished"]) == (1, False)
    assert [entry["updates_done"] for entry in entries(tmp_path) if entry["stage"] == "after"] == [1, 1, 1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lr": 0.5}, r"holds a run with lr=0.001, this one has 0.5; give another --run-dir"),
        ({"algorithm": "ppo"}, "holds a run with algorithm='so_ppo', this one has 'ppo'"),
        ({"seed": 1}, "holds a run with seed=0, this one has 1"),
    ],
)
def test_another_run_in_the_directory_is_refused(
    changes: dict[str, Any], message: str, model: str, tmp_path: Path
) -> None:
    config = config_for(tmp_path, model)
    (tmp_path / "config.json").write_text(config.to_json(), encoding="utf-8")
    check_resumable(config_for(tmp_path, model, updates=99, save_every=7, stop_after_minutes=5))
    check_resumable(config_for(tmp_path, model, microbatch_sequences=1, max_skipped_minibatches=99))
    with pytest.raises(ValueError, match=message):
        run_of(config_for(tmp_path, model, **changes))


def test_a_decaying_rate_holds_the_number_of_updates(model: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(config_for(tmp_path, model, lr_schedule="cosine").to_json(), encoding="utf-8")
    check_resumable(config_for(tmp_path, model, lr_schedule="cosine"))
    with pytest.raises(ValueError, match=r"holds a run with updates=\d+, this one has 99"):
        check_resumable(config_for(tmp_path, model, lr_schedule="cosine", updates=99))


def test_nothing_is_written_before_the_parts_are_there(model: str, tmp_path: Path) -> None:
    for changes in ({"model": "nonesuch"}, {"prompt": "nonesuch"}, {"reward": "nonesuch"}):
        with pytest.raises(ValueError, match=r"unknown .*nonesuch.*known"):
            run_of(config_for(tmp_path / "new", **{"model": model} | changes))
    assert not (tmp_path / "new").exists()


def test_a_critic_is_made_only_where_it_is_read(model: str, tmp_path: Path) -> None:
    def critics(**changes: Any) -> tuple[bool, bool]:
        run = run_of(config_for(tmp_path, model, **changes))
        return run.learner.raw_policy.value_head is not None, run.learner.critic is not None

    assert critics() == (True, False) and critics(critic="own") == (False, True)
    assert critics(algorithm="grpo") == critics(algorithm="grpo", critic="own") == (False, False)


def test_equal_seeds_start_equal_whatever_was_drawn_before(model: str, tmp_path: Path) -> None:
    heads = []
    for draws in (0, 5):
        torch.rand(draws)
        heads.append(run_of(config_for(tmp_path, model)).learner.raw_policy.value_head.inner.weight)
    assert torch.equal(*heads)


def test_the_empty_index_finds_nothing() -> None:
    assert EmptyIndex().search(["a", "b"], 3) == [[], []]


def test_versions_and_revision() -> None:
    assert package_versions()["torch"] == torch.__version__
    assert git_revision() == "" or len(git_revision().rstrip("+")) == 12
