"""Settings: every bad value is named, with a remedy; sizes fit together; rows of the table and their overrides."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sorl_algos.algorithms import ALGORITHMS, CoefficientRatio, GradientNorm
from sorl_algos.config import TrainConfig

POSITIVE = (
    "questions_per_update", "group_size", "max_turn_tokens", "max_total_tokens", "minibatch_sequences", "passes",
    "microbatch_sequences", "updates", "eval_every", "save_every", "keep_checkpoints", "top_k",
    "max_observation_words", "lr", "critic_lr", "max_grad_norm", "temperature", "value_clip", "stop_after_minutes",
    "max_query_chars", "max_turn_words", "max_total_words",
)  # fmt: skip
NOT_NEGATIVE = (
    "max_searches", "lr_warmup_updates", "critic_warmup_updates", "kl_reward_coef", "kl_loss_coef", "weight_decay",
    "eval_limit", "test_limit", "clip_low", "clip_high", "max_skipped_minibatches",
    "invalid_penalty", "search_cost",
)  # fmt: skip


@pytest.mark.parametrize("name", POSITIVE)
@pytest.mark.parametrize("value", [0, -1, float("nan")])
def test_what_must_be_positive(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"{name} is {value}; it must be greater than 0"):
        TrainConfig(**{name: value})


@pytest.mark.parametrize("name", NOT_NEGATIVE)
@pytest.mark.parametrize("value", [-1, float("nan")])
def test_what_must_not_be_negative(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"{name} is {value}; it must not be negative"):
        TrainConfig(**{name: value})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm": "sopo"}, "unknown algorithm 'sopo'; known: .*so_ppo"),
        ({"reduction": "mean"}, "unknown reduction 'mean'; known: token_mean"),
        ({"advantages": "gea"}, "unknown advantages 'gea'; known: gae"),
        ({"level": "word"}, "unknown level 'word'; known: token, turn, sequence"),
        ({"normalisation": "clip"}, "unknown normalisation 'clip'; known: none, coefficient_ratio"),
        ({"algorithm": "ppo", "threshold": 2.0}, "threshold .*no normalisation; choose one of"),
        ({"threshold": 0.0}, "threshold of a normalisation must be positive"),
        ({"dual_clip": 1.0}, "dual_clip must be above 1, got 1.0"),
        ({"pooling": "max"}, "unknown pooling 'max'; known: mean, sum"),
        ({"gamma": 0.0}, "gamma is 0.0 and lam 1.0; both must lie between 0 and 1"),
        ({"gamma": 1.1}, "gamma is 1.1"),
        ({"lam": -0.1}, "lam -0.1"),
        ({"lam": float("nan")}, "lam nan"),
        ({"clip_low": 1.0}, "clip_low is 1.0; .*must be below 1"),
        (
            {"max_turn_tokens": 512},
            r"max_turn_tokens \(512\) must be below max_total_tokens \(512\), or no prompt fits",
        ),
        (
            {"questions_per_update": 4, "minibatch_sequences": 8},
            r"minibatch_sequences \(8\) is more than the 4 episodes of an update",
        ),
        (
            {"questions_per_update": 12, "minibatch_sequences": 8},
            "the 12 episodes of an update cannot be cut into minibatches of 8; choose a divisor",
        ),
        ({"algorithm": "grpo"}, "'grpo' compares the episodes of a group, but group_size is 1; use at least 2"),
        (
            {"algorithm": "grpo", "group_size": 4, "questions_per_update": 3, "minibatch_sequences": 6},
            r"minibatch_sequences \(6\) is no multiple of group_size \(4\); a group would be split",
        ),
        ({"env": "SearchQA"}, "unknown env 'SearchQA'; known: SearchQA-v0, MedicalQA-v0, MathQA-v0, or module:Id"),
        ({"dialect": "json"}, "unknown dialect 'json'; known: search_r1, tool_call, boxed"),
        ({"chat_style": "chats"}, "unknown chat_style 'chats'; known: continuation, chat"),
        ({"dialect": "boxed"}, "'boxed' .*has no search, but max_searches is 3; set it to 0"),
        ({"env": "MathQA-v0"}, "'boxed' .*has no search, but max_searches is 3; set it to 0"),
        ({"critic": "none"}, "'so_ppo' needs a critic, but critic is 'none'; use 'shared' or 'own'"),
        ({"lr_schedule": "step"}, "unknown lr_schedule 'step'; known: constant, linear, cosine"),
        ({"lr_final_share": 1.5}, "lr_final_share is 1.5; it is a share of lr, between 0 and 1"),
        ({"kl_loss_estimator": "k4"}, "unknown kl_loss_estimator 'k4'; known: k1, k2, k3"),
        ({"kl_target": 0.1}, "kl_target steers the KL's coefficients, and both are 0; give --kl-reward-coef"),
        ({"correction": "tis"}, "unknown correction 'tis'; known: none, truncated_is, icepop"),
        ({"correction": "icepop"}, "'icepop' drops tokens; say with rejected_leave_denominator"),
        (
            {"correction": "rejection", "rejected_leave_denominator": True, "correction_low": 2.0},
            r"correction_low \(2.0\) must be below correction_high \(2.0\)",
        ),
        (
            {"correction": "truncated_is", "old_logprobs": "engine"},
            "old_logprobs 'engine' puts the engine's in their place; use one of the two",
        ),
        ({"microbatch_tokens": 100}, r"microbatch_tokens \(100\) is less than .* \(max_total_tokens 512\); raise it"),
        ({"loss": "mse"}, "unknown loss 'mse'; known: clipped, cispo, reinforce"),
        ({"norm_length": 0.0}, "norm_length must be a positive number of tokens"),
    ],
)
def test_bad_values_are_named_with_a_remedy(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainConfig(**changes)


@pytest.mark.parametrize("name", [*ALGORITHMS, "st_ppo"])
def test_every_row_makes_a_configuration(name: str) -> None:
    config = TrainConfig(algorithm=name, group_size=4, questions_per_update=16)
    assert config.algorithm_row() == ALGORITHMS["so_ppo" if name == "st_ppo" else name]
    assert config.episodes_per_update == 64 and config.optimiser_steps_per_update == 2


def test_columns_can_be_overridden() -> None:
    row = TrainConfig(
        algorithm="ppo", level="turn", normalisation="gradient_norm", threshold=0.5, reduction="turn_mean",
        advantages="turn_gae", dual_clip=3.0, pooling="sum",
    ).algorithm_row()  # fmt: skip
    assert (row.level, row.reduction, row.advantages) == ("turn", "turn_mean", "turn_gae")
    assert (row.dual_clip, row.pooling, row.normalisation) == (3.0, "sum", GradientNorm(0.5))
    row = TrainConfig(threshold=2.0, scope="microbatch", trigger_level="turn").algorithm_row()
    assert row.normalisation == CoefficientRatio(2.0, "turn", "microbatch")
    assert TrainConfig(normalisation="none").algorithm_row().normalisation is None
    assert TrainConfig(algorithm="rloo", group_size=2, critic="none").algorithm_row().group_based


def test_the_optimiser_steps_are_counted() -> None:
    config = TrainConfig(questions_per_update=6, group_size=4, minibatch_sequences=8, passes=3)
    assert config.episodes_per_update == 24 and config.optimiser_steps_per_update == 9


def test_the_whole_is_written_as_json() -> None:
    row = json.loads(TrainConfig(index=Path("an/index")).to_json())
    assert row["index"] == "an/index" and row["lr"] == 2e-4 and row["stop_after_minutes"] is None
