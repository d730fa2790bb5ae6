"""Presets for real hardware: every name constructs, fits its GPUs, and is what the paper trains with."""

from __future__ import annotations

import os

import pytest

from sorl_algos.architectures import find_architecture
from sorl_algos.budget import GB, Hardware, estimate
from sorl_algos.hardware_presets import (
    ALGORITHMS,
    GPUS,
    MODELS,
    RECIPE_OF,
    SOURCES,
    gpus_of,
    hardware_preset,
    hardware_presets,
)
from sorl_algos.rollout.vllm import _other_gpu

PRESETS = hardware_presets()


def test_the_grammar_gives_every_combination() -> None:
    plain = {name for name in PRESETS if not name.endswith("-split")}
    assert len(plain) == len(MODELS) * 2 * len(ALGORITHMS) * len(GPUS) == 72
    assert {"qwen2.5-7b-nq-so_ppo-8gpu", "qwen2.5-1.5b-med-grpo-1gpu", "qwen2.5-3b-nq-ppo-4gpu-split"} <= set(PRESETS)
    assert len({config.run_dir for _, config in PRESETS.values()}) == len(PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_it_fits_80_gb_and_its_work_can_be_shared_out(name: str) -> None:
    _, config = PRESETS[name]
    gpus = gpus_of(name)
    assert gpus is not None
    # 1 GB for an encoder of queries beside it
    budget = estimate(config, find_architecture(config.model), Hardware(gpus, 80 * GB, index_bytes=GB))
    assert budget.fits, budget.refusal()
    # and no preset leaves out what the paper has for no reason: a smaller share of the memory would not be used
    assert budget.cache_tokens > 16 * config.max_total_tokens
    assert {config.questions, config.eval_questions} <= set(SOURCES) and str(config.index) in RECIPE_OF


def test_the_papers_settings() -> None:
    # docs/algorithms.md and the paper's section on training: section 10 of the definitions
    config = hardware_preset("qwen2.5-7b", "nq", "so_ppo", 8)
    assert (config.episodes_per_update, config.minibatch_sequences, config.optimiser_steps_per_update) == (512, 256, 2)
    assert (config.lr, config.critic_lr, config.clip_low, config.clip_high) == (1e-6, 1e-5, 0.2, 0.2)
    assert (config.gamma, config.lam, config.kl_reward_coef, config.max_grad_norm) == (1, 1, 0.001, 1)
    assert (config.max_searches, config.top_k, config.max_turn_tokens, config.max_total_tokens) == (3, 3, 500, 4596)
    assert (config.critic, config.lora_rank, config.reward) == ("own", 0, "exact_match")
    grouped = hardware_preset("qwen2.5-3b", "nq", "so_grpo", 8)
    assert (grouped.group_size, grouped.critic, grouped.max_searches) == (5, "none", 4)
    assert grouped.minibatch_sequences % grouped.group_size == 0 and grouped.optimiser_steps_per_update == 2
    medical = hardware_preset("qwen2.5-1.5b", "med", "ppo", 4)
    assert (medical.max_searches, medical.env, medical.reward) == (6, "MedicalQA-v0", "choice_accuracy")


def test_where_vllm_has_its_own_gpus_the_episodes_are_corrected_for_their_age() -> None:
    config = hardware_preset("qwen2.5-7b", "nq", "so_ppo", 8, split=True)
    assert (config.engine_gpus, config.source, config.max_staleness) == ("own", "async", 1)
    assert config.correction == "truncated_is"


@pytest.mark.parametrize(("name", "gpus"), [("qwen2.5-7b-nq-ppo-8gpu-split", 8), ("a-1gpu", 1), ("smoke", None)])
def test_a_name_says_how_many_gpus(name: str, gpus: int | None) -> None:
    assert gpus_of(name) == gpus


def test_an_engine_of_its_own_takes_a_gpu_of_the_second_half(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with _other_gpu(True, gpus=8):
        assert os.environ["LOCAL_RANK"] == "5"  # 1 + 4: where vLLM looks for its GPU
    with _other_gpu(False, gpus=8):
        assert os.environ["LOCAL_RANK"] == "1"
    too_few = r"needs a GPU 5 for rank 1, but there are 4; start half as many"
    with pytest.raises(ValueError, match=too_few), _other_gpu(True, gpus=4):
        pass
    assert os.environ["LOCAL_RANK"] == "1"
