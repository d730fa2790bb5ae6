"""What is logged of rollouts and updates, by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from sorl_algos.batch import Batch
from sorl_algos.diagnostics import rollout_metrics, update_metrics, update_sums
from sorl_env.trajectory import Trajectory, Turn


def episode(kinds: list[str], reward: float, stop: str = "answered", cut: bool = False) -> Trajectory:
    turns = tuple(
        Turn((1, 2), (3,) * (number + 1), (-1.0,) * (number + 1), 0.0, "", "", truncated=cut)
        for number in range(len(kinds))
    )
    turns = (*turns[:-1], replace(turns[-1], reward=reward))
    notes = [{"action_kind": kind, "retrieved_ids": [], "retrieved_titles": []} for kind in kinds]
    info = {"scores": {"exact_match": reward}, "searches": kinds.count("search"), "turns": notes}
    return Trajectory(turns, "q", "q", 0, stop, info)


def test_rollout_metrics_by_hand() -> None:
    # Two episodes of 2 and 1 turns; sampled tokens 1 + 2 and 1; a third was dropped.
    kept = [
        episode(["search", "answer"], 1.0),
        episode(["cut"], 0.0, stop="turn_limit", cut=True),
    ]
    dropped = episode(["search"], 0.0, stop="retrieval_error")
    assert rollout_metrics([*kept, dropped], kept) == {
        "reward_mean": 0.5,
        "em_train": 0.5,
        "searches_mean": 0.5,
        "turns_mean": 1.5,
        "response_tokens_mean": 2.0,
        "valid_action_rate": pytest.approx(2 / 3),
        "cut_rate": pytest.approx(1 / 3),
        "truncated_rate": 0.5,
        "dropped_episodes": 1.0,
        "tokens": 4.0 + 6.0,
    }


def test_no_kept_episode_gives_zeros_not_a_division_by_zero() -> None:
    assert all(math.isfinite(value) for value in rollout_metrics([], []).values())


def batch() -> Batch:
    # One row: o, a a (turn 0), o, a (turn 1); log-ratios ln 1.5, 0 and ln 0.5 against old_logp = -1.
    mask = torch.tensor([[False, True, True, False, True]])
    return Batch(
        token_ids=torch.zeros(1, 5, dtype=torch.long),
        attention_mask=torch.ones(1, 5, dtype=torch.bool),
        loss_mask=mask,
        turn_ids=torch.tensor([[-1, 0, 0, -1, 1]]),
        rewards=torch.zeros(1, 5),
        rollout_logp=torch.tensor([[9.0, -1.0, -1.1, 9.0, -1.0]]),
        group_ids=torch.zeros(1, dtype=torch.long),
        old_logp=torch.full((1, 5), -1.0),
        ref_logp=torch.full((1, 5), -1.5),
        values=torch.tensor([[7.0, 0.0, 1.0, 7.0, 2.0]]),
        returns=torch.tensor([[5.0, 0.0, 1.0, 5.0, 2.0]]),
        advantages=torch.tensor([[8.0, 1.0, -2.0, 8.0, -3.0]]),
    )


def test_clip_counts_at_all_three_levels_by_hand() -> None:
    # Token: 1.5 with A > 0 is clipped high, 0.5 with A < 0 clipped low: 2 of 3. Turn 0: sqrt(1.5) = 1.22, its token
    # with A > 0 is clipped; turn 1: 0.5 with A < 0 is clipped: 2. Sequence: (1.5 * 1 * 0.5)^(1/3) = 0.909: none.
    logp = torch.tensor([[0.0, -1 + math.log(1.5), -1.0, 0.0, -1 + math.log(0.5)]])
    sums = update_sums(logp, batch(), clip_low=0.2, clip_high=0.2)
    assert {name: int(value) for name, value in sums.items()} == {
        "clipped_token": 2, "clipped_token_high": 1, "clipped_token_low": 1,
        "clipped_turn": 2, "clipped_turn_high": 1, "clipped_turn_low": 1,
        "clipped_sequence": 0, "clipped_sequence_high": 0, "clipped_sequence_low": 0,
    }  # fmt: skip


def test_update_metrics_by_hand() -> None:
    # Mismatch of the three tokens: 0, 0.1, 0: KL(engine || trainer) = (e^0.1 - 1 - 0.1) / 3.
    totals = {
        name: torch.tensor(value)
        for name, value in {
            "tokens": 6.0, "clipped_token": 3.0, "clipped_token_high": 2.0, "clipped_token_low": 1.0,
            "clipped_turn": 0.0, "clipped_turn_high": 0.0, "clipped_turn_low": 0.0, "clipped_sequence": 6.0,
            "clipped_sequence_high": 6.0, "clipped_sequence_low": 0.0, "clipped_tokens": 3.0, "sum_kl": 0.6,
            "sum_ratio": 6.0, "sum_ratio_squared": 12.0, "max_ratio": 4.0, "policy_loss": 0.5, "value_loss": 3.0,
            "step/grad_norm": 5.0, "step/factor": 1.5, "steps": 2.0, "skipped_minibatches": 1.0,
        }.items()
    }  # fmt: skip
    logged = update_metrics(batch(), torch.tensor([[9.0, 1.0, 2.0, 9.0, 3.0]]), totals)
    expected = {
        "entropy": 2.0, "mismatch_kl": (math.exp(0.1) - 1.1) / 3, "ref_kl": 0.5, "explained_variance": 1.0,
        "advantage_abs_mean": 2.0, "clip_fraction_token": 0.5, "clip_fraction_token_high": 1 / 3,
        "clip_fraction_turn": 0.0, "clip_fraction_sequence": 1.0, "clip_fraction": 0.5, "approx_kl": 0.1,
        "ratio_mean": 1.0, "ratio_max": 4.0, "ess": 36 / (6 * 12), "policy_loss": 0.25, "value_loss": 1.5,
        "grad_norm": 2.5, "factor": 0.75, "skipped_minibatches": 1.0,
    }  # fmt: skip
    for name, value in expected.items():
        assert logged[name] == pytest.approx(value, abs=1e-6), name
    assert all(isinstance(value, float) for value in logged.values())


def test_factors_taken_inside_the_loss_are_averaged() -> None:
    totals = {
        "tokens": torch.tensor(3.0), "sum_factor": torch.tensor(3.0), "factors": torch.tensor(4),
        "max_rho": torch.tensor(7.0), "steps": torch.tensor(2.0), "policy_loss": torch.tensor(0.0),
        "sum_kl": torch.tensor(0.0), "sum_ratio": torch.tensor(3.0), "sum_ratio_squared": torch.tensor(3.0),
        "max_ratio": torch.tensor(1.0), "clipped_tokens": torch.tensor(0),
        **{f"clipped_{level}{end}": torch.tensor(0) for level in ("token", "turn", "sequence")
           for end in ("", "_high", "_low")},
    }  # fmt: skip
    logged = update_metrics(batch(), torch.zeros(1, 5), totals)
    assert logged["factor"] == 0.75 and logged["rho"] == 7.0 and logged["ess"] == 1.0


def test_an_update_without_any_step_is_still_logged() -> None:
    bare = batch().replace(ref_logp=None, values=None, returns=None, advantages=None)
    logged = update_metrics(bare, torch.zeros(1, 5), {"skipped_minibatches": torch.tensor(2.0)})
    assert logged["skipped_minibatches"] == 2.0 and "policy_loss" not in logged
