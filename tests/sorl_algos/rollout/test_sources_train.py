"""Training on each source: what is promised to be equal is, and an asynchronous run trains, resumes and ends."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from sorl_algos.config import TrainConfig
from sorl_algos.learner import make_learner
from sorl_algos.metrics import read_metrics
from sorl_algos.models import Policy, save_language_model
from sorl_algos.rollout.async_source import AsyncSource
from sorl_algos.rollout.engine import Sampling
from sorl_algos.rollout.hf import HFEngine
from sorl_algos.rollout.renderer import Renderer
from sorl_algos.rollout.source import StreamSource, SyncSource
from sorl_algos.run import EvalSet, Run
from sorl_algos.trainer import train
from tests.fakes import FakeRetriever
from tests.sorl_algos.small_game import PASSAGES, QUESTIONS, make_env, small_config


def trained(config: TrainConfig, make_model: Any, tokenizer: Any, kind: Any, **options: Any) -> Any:
    """Weights after training with a source of this kind; sampled in float64, where rounding moves no token."""
    torch.set_num_threads(1)
    policy = Policy(make_model())
    learner = make_learner(config, policy)
    own = HFEngine(make_model(dtype=torch.float64), tokenizer, kv_cache_mb=2.0)
    source = kind(
        make_env(8, reward="contains"), own, Renderer(tokenizer), QUESTIONS,
        questions_per_update=config.questions_per_update, group_size=config.group_size,
        sampling=Sampling(max_tokens=5), seed=config.seed, max_total_tokens=120, **options,
    )  # fmt: skip
    try:
        train(config, learner, source, pad_id=0, source_metrics=source.metrics)
    finally:
        source.close()
    return dict(policy.state_dict())


@pytest.mark.parametrize(
    ("kind", "options"), [(StreamSource, {"window_ms": 0.5}), (AsyncSource, {"max_staleness": 0, "window_ms": 0.5})]
)
def test_streaming_trains_to_the_weights_of_lockstep(
    kind: Any, options: dict[str, Any], make_model: Any, tokenizer: Any, tmp_path: Path
) -> None:
    config = small_config(tmp_path / "lockstep", algorithm="grpo", critic="none", kl_loss_coef=0.0, eval_limit=0)
    lockstep = trained(config, make_model, tokenizer, SyncSource)
    other = dataclasses.replace(config, run_dir=tmp_path / "other")
    ours = trained(other, make_model, tokenizer, kind, **options)
    assert all(torch.equal(ours[name], weight) for name, weight in lockstep.items())
    # the proof that they did something: the tokens that were trained on are the same, and there were some
    first, second = (read_metrics(run.run_dir / "metrics.jsonl") for run in (config, other))
    assert [line["tokens"] for line in first] == [line["tokens"] for line in second]
    assert [line["policy_loss"] for line in first] == [line["policy_loss"] for line in second]


class Quiet:
    """A Progress that says nothing, and interrupts at a chosen update."""

    def begin(self, stage: str, total: int) -> None:
        return None

    def advance(self, steps: int = 1, note: str = "") -> None:
        return None


@pytest.fixture(scope="module")
def model(make_model: Any, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("models") / "tiny"
    save_language_model(make_model(), tokenizer, directory)
    return str(directory)


def run_of(run_dir: Path, model: str, **changes: Any) -> Run:
    settings: dict[str, Any] = {
        "model": model, "max_searches": 1, "max_turn_tokens": 4, "max_total_tokens": 90, "eval_limit": 2,
        "eval_every": 1, "max_observation_words": 20, "source": "async", "kv_cache_mb": 2.0, "lr": 1e-2,
    }  # fmt: skip
    return Run(
        small_config(run_dir, **settings | changes),
        retriever=FakeRetriever(passages=PASSAGES),
        train_questions=QUESTIONS,
        dev_questions=QUESTIONS,
        eval_sets=[EvalSet("test", QUESTIONS)],
        progress=Quiet(),
    )


def test_an_asynchronous_run_trains_resumes_and_ends(model: str, tmp_path: Path) -> None:
    first = run_of(tmp_path, model, updates=3)
    assert isinstance(first.source, AsyncSource)
    assert isinstance(first.engine, HFEngine)
    assert first.engine.model is not first.learner.raw_policy.lm, "the engine samples while the policy's weights change"
    assert first.execute()["finished"]
    again = run_of(tmp_path, model, updates=5)
    assert again.execute()["updates_run"] == 2
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [line["update"] for line in lines] == [0, 1, 2, 3, 4]
    # The first batch of a run is fresh, each later one was begun before the update that it is trained in. At update 3
    # the second run has only just begun: what was in flight when the first one ended was played anew.
    assert [line["staleness_max"] for line in lines] == [0.0, 1.0, 1.0, 0.0, 1.0]
    assert sum(line["dropped_stale_episodes"] for line in lines) == 0
    assert not [thread for thread in threading.enumerate() if thread.name == "episodes"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"source": "later"}, "unknown source 'later'; known: sync, stream, async"),
        ({"queue_groups": 4}, "queue_groups is 4 and source 'sync'"),
        ({"source": "async", "queue_groups": 0}, "queue_groups is 0"),
        ({"max_staleness": -1}, "max_staleness is -1"),
        ({"kv_cache_mb": 5.0, "engine": "vllm"}, "kv_cache_mb is for engine 'hf'"),
        ({"retrieval_window_ms": -1.0}, "retrieval_window_ms is -1.0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainConfig(**changes)
