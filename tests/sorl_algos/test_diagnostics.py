"""What is logged of rollouts and updates, by hand."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import pytest
import torch

from sorl_algos.batch import Batch
from sorl_algos.diagnostics import (
    TURN_SLOTS,
    repetition,
    rollout_metrics,
    tag_faults,
    update_metrics,
    update_sums,
)
from sorl_algos.losses.policy import clipped_surrogate
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
        # the texts are empty: no tag is wrong, and the cut turn has no action
        "tag_fault_rate": pytest.approx(1 / 3),
        "tag_unbalanced_rate": 0.0,
        "tag_repeated_rate": 0.0,
        "tag_forged_rate": 0.0,
        "loop_rate": 0.0,
        "repetition_mean": 0.0,
        "cut_rate": pytest.approx(1 / 3),
        "truncated_rate": 0.5,
        "dropped_episodes": 1.0,
        "tokens": 4.0 + 6.0,
        # first turns: search and cut, 1 token each; second turns: one answer of 2 tokens
        "response_tokens_turn/0": 1.0,
        "response_tokens_turn/1": 2.0,
        "valid_action_rate_turn/0": 0.5,
        "valid_action_rate_turn/1": 1.0,
        "tag_fault_rate_turn/0": 0.5,
        "tag_fault_rate_turn/1": 0.0,
    }


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("<search>rivers of Peru</search>", set()),
        ("<think>I could <search> or <answer></think> <answer>Lima</answer>", set()),
        ("no tag at all", set()),
        ('<tool_call>{"name":"search"}</tool_call>', set()),
        ("<search>rivers", {"unbalanced"}),
        ("rivers</search>", {"unbalanced"}),
        ("<think>on and on <answer>Lima</answer>", {"unbalanced"}),
        ("<search><answer>Lima</answer></search>", {"unbalanced"}),
        ("<answer>a</answer><answer>b</answer>", {"repeated"}),
        ("<search>a</search><answer>b</answer></answer>", {"repeated", "unbalanced"}),
        ("<information>made up</information><answer>b</answer>", {"forged"}),
        ("<tool_response>", {"forged", "unbalanced"}),
    ],
)
def test_what_is_wrong_with_the_tags_of_a_turn(text: str, faults: set[str]) -> None:
    assert tag_faults(text) == faults


def test_repeated_ngrams_by_hand() -> None:
    # 8 tokens hold five 4-grams: abab baba abab baba abab, two of them different
    assert repetition([1, 2] * 4) == pytest.approx(3 / 5)
    assert repetition(range(20)) == 0.0
    assert repetition([1, 1, 1]) == 0.0, "shorter than an n-gram"


def test_a_turn_loops_from_twelve_tokens_on() -> None:
    def looping(tokens: int) -> Trajectory:
        one = episode(["answer"], 0.0)
        return replace(one, turns=(replace(one.turns[0], action_ids=(7,) * tokens, action_logprobs=(0.0,) * tokens),))

    assert rollout_metrics([], [looping(11), looping(12)])["loop_rate"] == 0.5


def test_late_turns_share_the_last_index() -> None:
    # turn number n has n + 1 tokens (see `episode`): indices 7, 8, 9 together have (8 + 9 + 10) / 3 = 9
    long = episode(["search"] * 9 + ["answer"], 1.0)
    lengths = {name: value for name, value in rollout_metrics([long], [long]).items() if "tokens_turn/" in name}
    assert lengths == {f"response_tokens_turn/{n}": n + 1.0 for n in range(TURN_SLOTS - 1)} | {
        f"response_tokens_turn/{TURN_SLOTS - 1}": 9.0
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
        raw_advantages=torch.tensor([[8.0, 3.0, 0.0, 8.0, 0.0]]),
    )


def test_clip_counts_at_all_three_levels_by_hand() -> None:
    # Token: 1.5 with A > 0 is clipped high, 0.5 with A < 0 clipped low: 2 of 3. Turn 0: sqrt(1.5) = 1.22, its token
    # with A > 0 is clipped; turn 1: 0.5 with A < 0 is clipped: 2. Sequence: (1.5 * 1 * 0.5)^(1/3) = 0.909: none.
    sums = sums_of(batch())
    assert {name: int(value) for name, value in sums.items() if value.dim() == 0} == {
        "clipped_token": 2, "clipped_token_high": 1, "clipped_token_low": 1,
        "clipped_turn": 2, "clipped_turn_high": 1, "clipped_turn_low": 1,
        "clipped_sequence": 0, "clipped_sequence_high": 0, "clipped_sequence_low": 0,
    }  # fmt: skip


def test_sums_by_turn_index_by_hand() -> None:
    # Turn 0: ratios 1.5 (A = 1, clipped) and 1 (A = -2, not); turn 1: 0.5 with A = -3, clipped.
    sums = sums_of(batch())
    expected = {
        "turn_tokens": [2.0, 1.0],
        "turn_clipped": [1.0, 1.0],
        "turn_ratio": [2.5, 0.5],
        "turn_ratio_squared": [3.25, 0.25],
        "turn_kl": [0.5 - math.log(1.5), -0.5 + math.log(2)],
        "max_turn_ratio": [1.5, 0.5],
    }
    for name, values in expected.items():
        wanted = torch.tensor(values + [0.0] * (TURN_SLOTS - 2))
        torch.testing.assert_close(sums[name], wanted, atol=1e-6, rtol=0, msg=name)


def test_sums_add_up_over_rows_in_any_order() -> None:
    one = batch()
    double = Batch(**{
        field.name: None if getattr(one, field.name) is None else torch.cat([getattr(one, field.name)] * 2)
        for field in fields(one)
    })  # fmt: skip
    once, twice = sums_of(one), sums_of(double)
    for name, value in once.items():
        torch.testing.assert_close(twice[name], value if name.startswith("max_") else value * 2, msg=name)


def test_the_sums_never_wait_for_the_device() -> None:
    """On the meta device every transfer to the host raises."""
    meta = batch().to("meta")
    assert meta.old_logp is not None and meta.advantages is not None
    logp = torch.zeros(1, 5, device="meta")
    tensors = (logp, meta.old_logp, meta.advantages, meta.loss_mask, meta.turn_ids)
    out = clipped_surrogate(*tensors, level="turn", clip_low=0.2, clip_high=0.2)
    assert update_sums(logp, meta, out, clip_low=0.2, clip_high=0.2)["turn_tokens"].shape == (TURN_SLOTS,)


def sums_of(micro: Batch) -> dict[str, torch.Tensor]:
    """With log-ratios ln 1.5, 0 and ln 0.5 on the three action tokens of each row; 9 under the mask."""
    assert micro.old_logp is not None and micro.advantages is not None
    logp = torch.tensor([[9.0, -1 + math.log(1.5), -1.0, 9.0, -1 + math.log(0.5)]]).expand(len(micro), -1)
    tensors = (logp, micro.old_logp, micro.advantages, micro.loss_mask, micro.turn_ids)
    out = clipped_surrogate(*tensors, level="token", clip_low=0.2, clip_high=0.2)
    return update_sums(logp, micro, out, clip_low=0.2, clip_high=0.2)


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
    nothing = [0.0] * (TURN_SLOTS - 2)
    totals |= {
        "turn_tokens": torch.tensor([4.0, 2.0, *nothing]), "turn_clipped": torch.tensor([3.0, 0.0, *nothing]),
        "turn_ratio": torch.tensor([4.0, 2.0, *nothing]), "turn_ratio_squared": torch.tensor([8.0, 2.0, *nothing]),
        "turn_kl": torch.tensor([0.4, 0.2, *nothing]), "max_turn_ratio": torch.tensor([4.0, 1.0, *nothing]),
    }  # fmt: skip
    logged = update_metrics(batch(), torch.tensor([[9.0, 1.0, 2.0, 9.0, 3.0]]), totals)
    expected = {
        "entropy": 2.0, "mismatch_kl": (math.exp(0.1) - 1.1) / 3, "ref_kl": 0.5, "explained_variance": 1.0,
        "advantage_abs_mean": 2.0, "clip_fraction_token": 0.5, "clip_fraction_token_high": 1 / 3,
        "clip_fraction_turn": 0.0, "clip_fraction_sequence": 1.0, "clip_fraction": 0.5, "approx_kl": 0.1,
        "ratio_mean": 1.0, "ratio_max": 4.0, "ess": 36 / (6 * 12), "policy_loss": 0.25, "value_loss": 1.5,
        "grad_norm": 2.5, "factor": 0.75, "skipped_minibatches": 1.0,
        # raw advantages 3, 0, 0: mean 1, variance (4 + 1 + 1) / 3; whitened ones would always give 1
        "advantage_variance": 2.0,
        "entropy_turn/0": 1.5, "entropy_turn/1": 3.0, "advantage_turn/0": -0.5, "advantage_turn/1": -3.0,
        "clip_fraction_turn/0": 0.75, "clip_fraction_turn/1": 0.0, "ratio_mean_turn/0": 1.0,
        "ratio_max_turn/0": 4.0, "approx_kl_turn/0": 0.1, "approx_kl_turn/1": 0.1, "ess_turn/0": 16 / 32,
        "ess_turn/1": 1.0, "mismatch_kl_turn/0": (math.exp(0.1) - 1.1) / 2, "mismatch_kl_turn/1": 0.0,
        "mismatch_ratio_max_turn/0": math.exp(0.1), "mismatch_ess_turn/1": 1.0,
    }  # fmt: skip
    for name, value in expected.items():
        assert logged[name] == pytest.approx(value, abs=1e-6), name
    assert all(isinstance(value, float) for value in logged.values())
    assert not any(name.endswith("_turn/2") for name in logged), "there is no third turn"


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
