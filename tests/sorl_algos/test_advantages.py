"""Advantage estimators: against loops over the definitions, by hand, invariances and edges."""

import math

import pytest
import torch
from torch import Tensor

from sorl_algos.advantages import (
    gae,
    group_advantages,
    last_action_index,
    leave_one_out,
    place_outcome_reward,
    reward_to_go,
    rewards_with_kl,
    spread,
    turn_gae,
    whiten,
    whiten_sums,
)
from tests.sorl_algos import reference_loops as loops
from tests.sorl_algos.proofs import random_batch, same

DISCOUNTS = [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0), (0.0, 0.5), (1.0, 0.7)]


def row(*numbers: float) -> Tensor:
    return torch.tensor([numbers], dtype=torch.float64)


# --- GAE


@pytest.mark.parametrize(("gamma", "lam"), DISCOUNTS)
@pytest.mark.parametrize("with_bootstrap", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_gae_equals_the_loop(gamma: float, lam: float, with_bootstrap: bool, seed: int) -> None:
    batch = random_batch(seed, width=21)
    data = [x.tolist() for x in (batch.rewards, batch.values, batch.mask)]
    bootstrap = batch.advantages[:, 0] if with_bootstrap else None
    after = None if bootstrap is None else bootstrap.tolist()
    got = gae(batch.rewards, batch.values, batch.mask, gamma=gamma, lam=lam, bootstrap=bootstrap)
    expected = loops.gae(*data, gamma, lam, after)
    same("gae: advantages = loop", got[0], expected[0], tolerance=1e-12)
    same("gae: returns = loop", got[1], expected[1], tolerance=1e-12)
    got = turn_gae(batch.rewards, batch.values, batch.mask, batch.turn_ids, gamma=gamma, lam=lam, bootstrap=bootstrap)
    expected = loops.turn_gae(*data, gamma, lam, after)
    same("turn_gae: advantages = loop", got[0], expected[0], tolerance=1e-12)
    same("turn_gae: returns = loop", got[1], expected[1], tolerance=1e-12)
    got = gae(batch.rewards, batch.values, batch.mask, gamma=gamma, lam=lam, cross_observations=True)
    expected = loops.legacy_gae(*data, gamma, lam)
    same("gae across observations (legacy) = loop", got[0], expected[0], tolerance=1e-12)
    same("gae across observations (legacy) = loop", got[1], expected[1], tolerance=1e-12)


def test_gae_steps_over_observations_by_hand() -> None:
    # gamma 0.99, lam 0.95, decay 0.9405; action values 0.2, 0.3, 0.5, 0.4; the critic's 9s are never read.
    # delta: -0.2 + 0.297, -0.3 + 0.495, -0.5 + 0.396, 1 - 0.4 = 0.097, 0.195, -0.104, 0.6.
    # A3 = 0.6; A2 = -0.104 + 0.9405 * 0.6 = 0.4603; A1 = 0.195 + 0.9405 * 0.4603 = 0.627912;
    # A0 = 0.097 + 0.9405 * 0.627912 = 0.687551.
    mask = row(1, 1, 0, 0, 0, 1, 1)
    rewards = row(0, 0, 0, 0, 0, 0, 1)
    values = row(0.2, 0.3, 9, 9, 9, 0.5, 0.4)
    advantages, returns = gae(rewards, values, mask, gamma=0.99, lam=0.95)
    expected = row(0.687551, 0.627912, 0, 0, 0, 0.4603, 0.6)
    torch.testing.assert_close(advantages, expected, atol=1e-6, rtol=0)
    expected = row(0.887551, 0.927912, 0, 0, 0, 0.9603, 1.0)
    torch.testing.assert_close(returns, expected, atol=1e-6, rtol=0)


def test_gae_equals_gae_with_the_observations_removed() -> None:
    batch = random_batch(seed=9, rows=3)
    whole, _ = gae(batch.rewards, batch.values, batch.mask, gamma=0.97, lam=0.9)
    for b in range(1, 3):
        on = batch.mask[b]
        rewards, values = batch.rewards[b : b + 1, on], batch.values[b : b + 1, on]
        alone, _ = gae(rewards, values, torch.ones_like(rewards), gamma=0.97, lam=0.9)
        same("gae = gae with observations deleted", whole[b, on], alone[0], tolerance=1e-14)


def test_paper_setting_gives_outcome_minus_value() -> None:
    # gamma = lam = 1: the advantage is the sum of the rewards to come minus the value.
    batch = random_batch(seed=1)
    advantages, returns = gae(batch.rewards, batch.values, batch.mask, gamma=1.0, lam=1.0)
    to_go = reward_to_go(batch.rewards, batch.mask, gamma=1.0)
    same("gamma = lam = 1: returns = reward to go", returns, to_go, tolerance=1e-13)
    same(
        "gamma = lam = 1: A = reward to go - V",
        advantages,
        to_go - batch.values * batch.mask,
        tolerance=1e-13,
    )


def test_reward_to_go_runs_through_observations() -> None:
    # gamma 0.5, reward 2 at the end, four actions: 0.25, 0.5, 1, 2. A reset at the observation would give 0,
    # 0, 1, 2.
    to_go = reward_to_go(row(0, 0, 0, 0, 2), row(1, 1, 0, 1, 1), gamma=0.5)
    assert to_go.tolist() == [[0.25, 0.5, 0.0, 1.0, 2.0]]


def test_turn_gae_by_hand() -> None:
    # Turns (V 0.5, reward 0) and (V 0.25, reward 0.125 + 1); gamma 0.5, lam 1.
    # A1 = 1.125 - 0.25 = 0.875; A0 = 0.5 * 0.25 - 0.5 + 0.5 * 0.875 = 0.0625. Values inside a turn are not
    # read.
    mask, ids = row(1, 1, 0, 1, 1, 1), torch.tensor([[0, 0, -1, 1, 1, 1]])
    rewards, values = row(0, 0, 0, 0.125, 0, 1), row(0.5, 7, 7, 0.25, 7, 7)
    advantages, returns = turn_gae(rewards, values, mask, ids, gamma=0.5, lam=1.0)
    assert advantages.tolist() == [[0.0625, 0.0625, 0.0, 0.875, 0.875, 0.875]]
    assert returns.tolist() == [[0.5625, 0.5625, 0.0, 1.125, 1.125, 1.125]]


def test_turns_of_one_token_make_turn_gae_gae() -> None:
    batch = random_batch(seed=2)
    mask = torch.zeros_like(batch.mask)
    mask[:, ::2] = True
    ids = torch.tensor(loops.turn_ids(mask.tolist()))
    token = gae(batch.rewards, batch.values, mask, gamma=0.9, lam=0.8)
    turn = turn_gae(batch.rewards, batch.values, mask, ids, gamma=0.9, lam=0.8)
    assert torch.equal(token[0], turn[0]) and torch.equal(token[1], turn[1])


def test_legacy_form_runs_credit_through_retrieved_tokens() -> None:
    # lam 0: the token before the observation looks at the observation's value (9) instead of the next
    # action's (0.5)
    values, mask, rewards = row(0.3, 9, 0.5), row(1, 0, 1), row(0, 0, 1)
    right, _ = gae(rewards, values, mask, gamma=1.0, lam=0.0)
    legacy, _ = gae(rewards, values, mask, gamma=1.0, lam=0.0, cross_observations=True)
    torch.testing.assert_close(right, row(0.2, 0, 0.5), atol=1e-12, rtol=0)
    torch.testing.assert_close(legacy, row(8.7, -8.5, 0.5), atol=1e-12, rtol=0)


@pytest.mark.parametrize("seed", range(2))
def test_gae_padding_order_and_poison(seed: int) -> None:
    batch = random_batch(seed)
    clean = gae(batch.rewards, batch.values, batch.mask, gamma=0.9, lam=0.8)[0]
    order = torch.tensor([4, 1, 3, 0, 2])
    moved = gae(batch.rewards[order], batch.values[order], batch.mask[order], gamma=0.9, lam=0.8)[0]
    assert torch.equal(moved, clean[order])
    nan = float("nan")
    wide = [
        torch.nn.functional.pad(torch.where(batch.mask, x, nan), (3, 2), value=nan)
        for x in (batch.rewards, batch.values)
    ]
    padded = gae(*wide, torch.nn.functional.pad(batch.mask, (3, 2)), gamma=0.9, lam=0.8)[0]
    same("gae: padding, NaN under the mask", padded[:, 3:-2], clean, tolerance=1e-15)
    assert padded[:, :3].eq(0).all() and padded[:, -2:].eq(0).all()


def test_bootstrap_is_the_value_after_the_last_action() -> None:
    # Reward 0, V 0.5, value afterwards 2, gamma 0.9: delta = 1.8 - 0.5.
    advantages, _ = gae(row(0, 0), row(0.5, 9), row(1, 0), gamma=0.9, lam=1.0, bootstrap=torch.tensor([2.0]))
    torch.testing.assert_close(advantages, row(1.3, 0), atol=1e-12, rtol=0)


def test_long_rows_keep_float32_precision() -> None:
    # 4096 rewards of 0.001 with lam = gamma = 1: the first token's sum is 4.096.
    ones = torch.ones(1, 4096)
    advantages, _ = gae(0.001 * ones, torch.zeros_like(ones), ones, gamma=1.0, lam=1.0)
    assert advantages[0, 0].item() == pytest.approx(4.096, rel=1e-6)


# --- groups


@pytest.mark.parametrize("seed", range(6))
def test_group_estimators_equal_the_loops(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    returns = torch.randn(12, generator=generator, dtype=torch.float64)
    ids = torch.randint(0, 5, (12,), generator=generator) * 7 - 3
    for scale in ("std", "none"):
        expected = loops.group_advantages(returns.tolist(), ids.tolist(), scale)
        got = group_advantages(returns, ids, scale=scale)
        same(f"group_advantages ({scale}) = loop", got, expected, tolerance=1e-12)
    expected = loops.leave_one_out(returns.tolist(), ids.tolist())
    same("leave_one_out = loop", leave_one_out(returns, ids), expected, tolerance=1e-13)
    order = torch.randperm(12, generator=generator)
    moved = group_advantages(returns[order], ids[order], scale="std")
    same(
        "groups: row order changes nothing",
        moved,
        group_advantages(returns, ids, scale="std")[order],
        tolerance=1e-13,
    )


def test_groups_are_formed_by_id_not_by_neighbours() -> None:
    # p: 1, 0 (mean 0.5, sample std 0.707107); q: 10, 8 (mean 9, std 1.414214): all +-0.707107.
    got = group_advantages(torch.tensor([1.0, 10.0, 0.0, 8.0]), torch.tensor([5, 2, 5, 2]), scale="std")
    expected = torch.tensor([0.707107, 0.707107, -0.707107, -0.707107])
    torch.testing.assert_close(got, expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, 1e-3, 1e6, 1 / 3])
def test_group_without_variance_is_exactly_zero(value: float) -> None:
    for dtype in (torch.float32, torch.float64):
        returns = torch.full((7,), value, dtype=dtype)  # the rounded mean of seven thirds is not a third
        for scale in ("std", "none"):
            assert group_advantages(returns, torch.zeros(7, dtype=torch.long), scale=scale).eq(0.0).all()
        assert leave_one_out(returns, torch.zeros(7, dtype=torch.long)).eq(0.0).all()


def test_group_of_one_is_zero_everywhere() -> None:
    returns, ids = torch.tensor([1.0, 3.0, 5.0]), torch.tensor([0, 1, 1])
    for got in (
        group_advantages(returns, ids, scale="std"),
        group_advantages(returns, ids, scale="none"),
        leave_one_out(returns, ids),
    ):
        assert got[0].item() == 0.0 and got.isfinite().all() and got[2] > 0


def test_leave_one_out_by_hand() -> None:
    # 1 minus the mean of 0, 0, 1 = 2/3; 0 minus the mean of 1, 0, 1 = -2/3.
    got = leave_one_out(torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.zeros(4, dtype=torch.long))
    torch.testing.assert_close(got, torch.tensor([2 / 3, -2 / 3, -2 / 3, 2 / 3]))


def test_unknown_scale_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown group scale 'var'; known: std, none"):
        # type: ignore[arg-type]
        group_advantages(torch.ones(2), torch.zeros(2, dtype=torch.long), scale="var")


# --- whitening, placing, KL in the reward


@pytest.mark.parametrize("seed", range(3))
def test_whiten_equals_the_loop_and_ranks_agree(seed: int) -> None:
    batch = random_batch(seed)
    whole = whiten(batch.rewards, batch.mask)
    same("whiten = loop", whole, loops.whiten(batch.rewards.tolist(), batch.mask.tolist()), tolerance=1e-12)
    sums = whiten_sums(batch.rewards[:2], batch.mask[:2]) + whiten_sums(batch.rewards[2:], batch.mask[2:])
    parts = [whiten(batch.rewards[i], batch.mask[i], sums=sums) for i in (slice(0, 2), slice(2, 5))]
    same("whiten: two ranks = one", torch.cat(parts), whole, tolerance=1e-14)


def test_whiten_by_hand() -> None:
    # 1, 3 (mean 2, sample variance 2): -+0.707107; the observation's 50 stays out.
    got = whiten(row(1, 50, 3), row(1, 0, 1))
    torch.testing.assert_close(got, row(-math.sqrt(0.5), 0, math.sqrt(0.5)), atol=1e-8, rtol=0)


def test_whiten_of_one_or_no_or_equal_tokens_is_zero() -> None:
    nan = float("nan")
    assert whiten(torch.tensor([[3.0, 7.0]]), torch.tensor([[1, 0]])).tolist() == [[0.0, 0.0]]
    assert whiten(torch.tensor([[nan, 7.0]]), torch.tensor([[0, 0]])).tolist() == [[0.0, 0.0]]
    equal = whiten(torch.full((1, 9), 0.1), torch.ones(1, 9))
    assert equal.abs().max().item() < 1e-6


def test_outcome_goes_on_the_last_action_token() -> None:
    # Counting ones would point at 2 (an observation) and 4 (padding).
    mask = torch.tensor([[1, 1, 0, 0, 1, 0], [1, 1, 1, 1, 0, 0], [0, 0, 0, 0, 0, 0]])
    assert last_action_index(mask).tolist() == [4, 3, -1]
    placed = place_outcome_reward(torch.tensor([1.0, 2.0, 3.0]), mask)
    assert placed.tolist() == [[0, 0, 0, 0, 1, 0], [0, 0, 0, 2, 0, 0], [0, 0, 0, 0, 0, 0]]


def test_spread_gives_each_row_its_own_action_tokens() -> None:
    mask = torch.tensor([[1, 1, 0, 0], [0, 0, 1, 1]])
    assert spread(torch.tensor([0.5, 0.5]), mask).tolist() == [[0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.5, 0.5]]
    assert spread(torch.tensor([2.0, float("nan")]), torch.tensor([[1], [0]])).tolist() == [[2.0], [0.0]]


def test_rewards_with_kl_by_hand() -> None:
    # Penalty 0.1 * (logp - ref_logp) on action tokens: 0.1 * 0.5 and 0.1 * -1.
    nan = float("nan")
    got = rewards_with_kl(row(0, nan, 1), row(-1, nan, -2), row(-1.5, 0, -1), row(1, 0, 1), coefficient=0.1)
    torch.testing.assert_close(got, row(-0.05, 0, 1.1), atol=1e-12, rtol=0)


def test_no_estimator_carries_a_gradient() -> None:
    batch = random_batch(0)
    values = batch.values.clone().requires_grad_()
    advantages, returns = gae(batch.rewards, values, batch.mask, gamma=1.0, lam=1.0)
    assert not advantages.requires_grad and not returns.requires_grad
    assert not whiten(values, batch.mask).requires_grad
