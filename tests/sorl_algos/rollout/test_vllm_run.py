"""A whole run with vLLM as its engine, two updates: what the engine says stays what the trained policy would say."""

from __future__ import annotations

from pathlib import Path

import pytest

from sorl_algos.config import TrainConfig
from sorl_algos.metrics import read_metrics
from sorl_algos.rollout.engine import Sampling
from sorl_algos.rollout.hf import HFEngine
from sorl_algos.rollout.vllm import VLLMEngine
from sorl_algos.run import EvalSet, Run, check_resumable
from sorl_env.world import world_questions, world_retriever
from tests.sorl_algos.rollout.vllm_checks import TAGS, logprob_errors, needs_vllm, same_up_to_ties


class Silent:
    def begin(self, stage: str, total: int) -> None: ...

    def advance(self, steps: int = 1, note: str = "") -> None: ...


def config_for(run_dir: Path, **changes: object) -> TrainConfig:
    settings: dict[str, object] = {
        "engine": "vllm", "questions_per_update": 8, "minibatch_sequences": 8, "microbatch_sequences": 8, "updates": 2,
        "max_total_tokens": 384, "lr": 1e-3, "lr_warmup_updates": 0, "critic_warmup_updates": 0, "eval_limit": 0,
    }  # fmt: skip
    return TrainConfig(run_dir=run_dir, **settings | changes)  # type: ignore[arg-type]


def test_settings_of_the_engine_are_checked_and_kept_on_resuming(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown engine 'vlm'; known: hf, vllm"):
        config_for(tmp_path, engine="vlm")
    with pytest.raises(ValueError, match=r"engine_memory_share is 1\.5"):
        config_for(tmp_path, engine_memory_share=1.5)
    (tmp_path / "config.json").write_text(config_for(tmp_path).to_json())
    check_resumable(config_for(tmp_path, engine_memory_share=0.6))
    with pytest.raises(ValueError, match="engine='vllm'"):
        check_resumable(config_for(tmp_path, engine="hf"))


@needs_vllm
def test_two_updates_with_vllm(tmp_path: Path) -> None:
    questions = world_questions("test").sample_by_hash(6)
    run = Run(
        config_for(tmp_path),
        retriever=world_retriever(),
        train_questions=world_questions("train"),
        dev_questions=questions,
        eval_sets=[EvalSet("test", questions)],
        progress=Silent(),
    )
    assert isinstance(run.engine, VLLMEngine)
    try:
        summary = run.execute()
        assert summary["finished"] and summary["updates_run"] == 2
        rows = read_metrics(tmp_path / "metrics.jsonl")
        # rollout_logp by vLLM, old_logp by the trainer, both in float32
        assert [abs(row["mismatch_kl"]) < 1e-4 for row in rows] == [True, True]
        assert all(row["grad_norm"] > 0 for row in rows)
        # the evaluation after training was played by the trained policy
        prompts = [run.renderer.first(question.text) for question in questions]
        greedy = Sampling(max_tokens=12, temperature=0, stop=TAGS)
        ours, policy = run.engine.generate(prompts, greedy), run.learner.raw_policy.lm
        assert {c.policy_version for c in ours} == {2}
        assert logprob_errors(policy, prompts, ours, 0.0).max() < 1e-3
        assert same_up_to_ties(policy, prompts, ours, HFEngine(policy, run.tokenizer).generate(prompts, greedy)) >= 5
    finally:
        run.engine.close()
