"""Two-turn batches worked by hand, for each algorithm: both signs of the advantage, clipped and unclipped.

One layout serves all. Columns: prompt, a a, observation, a a (a = action token), so turn 0 holds columns 1
and 2, turn 1 columns 4 and 5. Ratios are given as numbers and turned into log-probabilities (old_logp is 0);
the prompt and the observation carry log-probabilities and advantages that must not be read (9).
"""

import math

import pytest
import torch
from torch import Tensor

from sorl_algos.advantages import gae, group_advantages, leave_one_out, spread, turn_gae
from sorl_algos.algorithms import algorithm
from sorl_algos.losses.clip_norm import normalisation_factor
from sorl_algos.losses.policy import cispo, clipped_surrogate, reinforce
from sorl_algos.losses.reduce import counts_of
from sorl_algos.losses.segments import turn_ids_from_mask

torch.set_num_threads(1)
ACTIONS = [1, 2, 4, 5]
CLIPS = {"clip_low": 0.2, "clip_high": 0.2}


def place(rows: list[list[float]], elsewhere: float = 9.0) -> Tensor:
    """Four numbers a row onto the action columns."""
    out = torch.full((len(rows), 6), elsewhere, dtype=torch.float64)
    out[:, ACTIONS] = torch.tensor(rows, dtype=torch.float64)
    return out


def layout(rows: int) -> tuple[Tensor, Tensor]:
    mask = torch.zeros(rows, 6, dtype=torch.bool)
    mask[:, ACTIONS] = True
    return mask, turn_ids_from_mask(mask)


def on_actions(x: Tensor) -> list[list[float]]:
    assert x[:, [0, 3]].eq(0).all()
    return x[:, ACTIONS].tolist()


def close(expected: list[list[float]]) -> list[object]:
    return [pytest.approx(row, abs=1e-9) for row in expected]


# Row 0: token ratios 4 and 1 (turn 0), 1/4 and 1 (turn 1). Turn ratios sqrt(4) = 2 and sqrt(1/4) = 1/2;
# sequence 1. Row 1: token ratios 1.1 and 1.1, 0.5 and 2: turn ratios 1.1 and 1; sequence (1.21)^(1/4) =
# 1.048809.
RATIOS = [[4.0, 1.0, 0.25, 1.0], [1.1, 1.1, 0.5, 2.0]]
PLUS, MINUS = [[1.0] * 4] * 2, [[-1.0] * 4] * 2
Q = 1.21**0.25


@pytest.mark.parametrize(
    ("level", "advantage", "loss", "excess"),
    [
        # A = +1: held at 1.2 from above, never from below. Excess = w - 1.2 where w > 1.2.
        ("token", PLUS, [[-1.2, -1, -0.25, -1], [-1.1, -1.1, -0.5, -1.2]], [[2.8, 0, 0, 0], [0, 0, 0, 0.8]]),
        # A = -1: held at 0.8 from below. Excess = -w + 0.8 where w < 0.8.
        ("token", MINUS, [[4, 1, 0.8, 1], [1.1, 1.1, 0.8, 2]], [[0, 0, 0.55, 0], [0, 0, 0.3, 0]]),
        ("turn", PLUS, [[-1.2, -1.2, -0.5, -0.5], [-1.1, -1.1, -1, -1]], [[0.8, 0.8, 0, 0], [0, 0, 0, 0]]),
        ("turn", MINUS, [[2, 2, 0.8, 0.8], [1.1, 1.1, 1, 1]], [[0, 0, 0.3, 0.3], [0, 0, 0, 0]]),
        ("sequence", PLUS, [[-1] * 4, [-Q] * 4], [[0] * 4] * 2),
        ("sequence", MINUS, [[1] * 4, [Q] * 4], [[0] * 4] * 2),
    ],
)
def test_clipped_surrogate(
    level: str, advantage: list[list[float]], loss: list[list[float]], excess: list[list[float]]
) -> None:
    mask, ids = layout(2)
    logp, old_logp = place(RATIOS).log(), torch.zeros(2, 6, dtype=torch.float64)
    out = clipped_surrogate(logp, old_logp, place(advantage), mask, ids, level=level, **CLIPS)
    assert on_actions(out.per_token) == close(loss)
    assert on_actions(out.clip_excess) == close(excess)


@pytest.mark.parametrize(
    ("level", "gradient"),
    [
        # Row 0, A = +1. Token level: -w where free (1, 1/4, 1), 0 where held (4).
        ("token", [0.0, -1.0, -0.25, -1.0]),
        # Turn level: turn 0 (w = 2) is held, turn 1 is free: each token gets -w mean(A) = -1/2 (Lemma 4.1).
        ("turn", [0.0, 0.0, -0.5, -0.5]),
        # Sequence level: w = 1, free: -1 each.
        ("sequence", [-1.0, -1.0, -1.0, -1.0]),
    ],
)
def test_gradient_of_the_clipped_surrogate(level: str, gradient: list[float]) -> None:
    mask, ids = layout(1)
    logp = place(RATIOS[:1]).log().requires_grad_()
    out = clipped_surrogate(logp, torch.zeros_like(logp), place(PLUS[:1]), mask, ids, level=level, **CLIPS)
    (got,) = torch.autograd.grad(out.per_token.sum(), logp)
    assert on_actions(got) == close([gradient])


def test_mixed_advantages_within_a_turn() -> None:
    # Turn level, A = (3, -1 | -2, 1): turn 0 has w = 2, so A = 3 is held at 1.2 * 3 while A = -1 stays free
    # (-2); turn 1 has w = 1/2, so A = -2 is held at 0.8 * -2 while A = 1 stays free.
    # The free tokens' gradients reach the whole turn: turn 0 gets -(2 / 2) * (-1) = 1 on each token, turn 1
    # -(0.5 / 2) * 1 = -0.25.
    mask, ids = layout(1)
    logp = place(RATIOS[:1]).log().requires_grad_()
    out = clipped_surrogate(logp, torch.zeros_like(logp), place([[3, -1, -2, 1]]), mask, ids, level="turn", **CLIPS)
    assert on_actions(out.per_token) == close([[-3.6, 2.0, 1.6, -0.5]])
    assert on_actions(out.clip_excess) == close([[2.4, 0.0, 0.6, 0.0]])
    (got,) = torch.autograd.grad(out.per_token.sum(), logp)
    assert on_actions(got) == close([[1.0, 1.0, -0.25, -0.25]])


def test_product_ratio() -> None:
    # pooling "sum": turn 1 of row 1 has product 0.5 * 2 = 1, turn 0 1.21, held at 1.2.
    mask, ids = layout(1)
    logp = place(RATIOS[1:]).log()
    out = clipped_surrogate(
        logp, torch.zeros_like(logp), place(PLUS[:1]), mask, ids, level="turn", pooling="sum", **CLIPS
    )
    assert on_actions(out.per_token) == close([[-1.2, -1.2, -1.0, -1.0]])


def test_cispo_and_reinforce() -> None:
    # Row 0, A = 2. Weights clip(4) = 1.2, 1, clip(1/4) = 0.8, 1; loss -weight * 2 * log w with logp = log w:
    # -2.4 ln 4, 0, +1.6 ln 4, 0; gradients -2 * weight. REINFORCE: weights 4, 1, 1/4, 1.
    mask, ids = layout(1)
    logp = place(RATIOS[:1]).log().requires_grad_()
    old_logp, advantages = torch.zeros_like(logp), place([[2.0] * 4])
    out = cispo(logp, old_logp, advantages, mask, ids, level="token", **CLIPS)
    assert on_actions(out.per_token) == close([[-2.4 * math.log(4), 0.0, 1.6 * math.log(4), 0.0]])
    (got,) = torch.autograd.grad(out.per_token.sum(), logp)
    assert on_actions(got) == close([[-2.4, -2.0, -1.6, -2.0]])
    out = reinforce(logp, old_logp, advantages, mask, ids, level="token")
    assert on_actions(out.per_token) == close([[-8 * math.log(4), 0.0, 0.5 * math.log(4), 0.0]])
    (got,) = torch.autograd.grad(out.per_token.sum(), logp)
    assert on_actions(got) == close([[-8.0, -2.0, -0.5, -2.0]])


def step(name: str, advantages: list[list[float]], **overrides: object) -> tuple[float, float, float]:
    """(reduced loss, factor, rho) of both rows."""
    row = algorithm(name, **overrides)
    mask, ids = layout(2)
    logp = place(RATIOS).log()
    five = (logp, torch.zeros_like(logp), place(advantages), mask, ids)
    out = row.policy_loss(*five, **CLIPS)
    loss = row.reduce(out.per_token, mask, ids, counts_of(mask, ids)).item()
    if row.normalisation is None or row.scales_loss:
        return loss, 1.0, 0.0
    factor, rho = normalisation_factor(row.trigger_sums(*five, **CLIPS), row.normalisation.threshold)
    return loss, factor.item(), rho.item()


# Token-level trigger, both rows, |A| = 1: outside [0.8, 1.2] lie 4, 1/4, 1/2, 2 with squares 16 + 1/16 + 1/4
# + 4 = 20.3125 over 4; inside 1, 1, 1.1, 1.1 with squares 4.42 over 4. rho = sqrt(20.3125 / 4.42) = 2.143736.
RHO = math.sqrt(20.3125 / 4.42)


@pytest.mark.parametrize(
    ("name", "advantages", "overrides", "loss", "factor", "rho"),
    [
        # token losses -1.2 -1 -0.25 -1 | -1.1 -1.1 -0.5 -1.2 sum to -7.35; eight tokens, two rows
        ("ppo", PLUS, {}, -7.35 / 8, 1.0, 0.0),
        ("grpo", PLUS, {}, -7.35 / 8, 1.0, 0.0),
        ("rloo", PLUS, {}, -7.35 / 2, 1.0, 0.0),
        ("dr_grpo", PLUS, {"norm_length": 16}, -7.35 / 32, 1.0, 0.0),
        # 4 + 1 + 0.8 + 1 + 1.1 + 1.1 + 0.8 + 2 = 11.8
        ("ppo", MINUS, {}, 11.8 / 8, 1.0, 0.0),
        ("ppo", MINUS, {"dual_clip": 3.0}, 10.8 / 8, 1.0, 0.0),
        # turn losses -1.2 -1.2 -0.5 -0.5 | -1.1 -1.1 -1 -1 sum to -7.6
        ("turn_ppo", PLUS, {}, -7.6 / 8, 1.0, 0.0),
        ("gspo", PLUS, {}, -(1 + Q) / 2, 1.0, 0.0),
        ("s_ppo", PLUS, {}, -7.35 / 8, 1.0, RHO),  # below the threshold of 3
        ("s_ppo", PLUS, {"threshold": 2.0}, -7.35 / 8, 1 / RHO, RHO),
        ("s_ppo", MINUS, {"threshold": 2.0}, 11.8 / 8, 1 / RHO, RHO),
        ("so_ppo", PLUS, {"threshold": 2.0}, -7.6 / 8, 1 / RHO, RHO),  # trigger at the token level
        # turn-level trigger: outside 2, 2, 1/2, 1/2 (8.5 over 4), inside 1.1, 1.1, 1, 1 (4.42 over 4)
        (
            "so_ppo",
            PLUS,
            {"threshold": 1.25, "trigger_level": "turn"},
            -7.6 / 8,
            math.sqrt(4.42 / 8.5),
            math.sqrt(8.5 / 4.42),
        ),
        # per sequence, token trigger. Row 0: outside 4, 1/4 (16.0625 over 2), inside 1, 1: rho sqrt(8.03125)
        # = 2.83; row 1: outside 1/2, 2 (4.25 over 2), inside 1.1, 1.1: rho sqrt(2.125) / 1.1 = 1.325.
        # Threshold 2 catches row 0.
        ("s_grpo", PLUS, {"threshold": 2.0}, (-3.45 / 4 / math.sqrt(8.03125) - 3.9 / 4) / 2, 1.0, 0.0),
        ("so_grpo", PLUS, {"threshold": 2.0}, (-3.4 / math.sqrt(8.03125) - 4.2) / 8, 1.0, 0.0),
    ],
)
def test_rows_of_the_table(
    name: str,
    advantages: list[list[float]],
    overrides: dict[str, object],
    loss: float,
    factor: float,
    rho: float,
) -> None:
    got = step(name, advantages, **overrides)
    assert got == pytest.approx((loss, factor, rho), abs=1e-7)  # rho's denominator carries 1e-8


def test_advantages_of_a_two_turn_episode() -> None:
    # Rewards: 0.5 ends turn 0, 1 ends turn 1. Values 0.1, 0.2 | 0.3, 0.4; gamma 0.5, lam 0.5, decay 0.25.
    # delta3 = 1 - 0.4 = 0.6; delta2 = 0.5 * 0.4 - 0.3 = -0.1; delta1 = 0.5 + 0.5 * 0.3 - 0.2 = 0.45;
    # delta0 = 0.5 * 0.2 - 0.1 = 0. A3 = 0.6; A2 = -0.1 + 0.15 = 0.05; A1 = 0.45 + 0.0125 = 0.4625; A0 =
    # 0.115625.
    mask, ids = layout(1)
    rewards, values = place([[0.0, 0.5, 0.0, 1.0]]), place([[0.1, 0.2, 0.3, 0.4]])
    advantages, returns = gae(rewards, values, mask, gamma=0.5, lam=0.5)
    assert on_actions(advantages) == close([[0.115625, 0.4625, 0.05, 0.6]])
    assert on_actions(returns) == close([[0.215625, 0.6625, 0.35, 1.0]])
    # By turns: values 0.1 and 0.3, rewards 0.5 and 1: A1 = 0.7; A0 = 0.5 + 0.15 - 0.1 + 0.25 * 0.7 = 0.725.
    advantages, returns = turn_gae(rewards, values, mask, ids, gamma=0.5, lam=0.5)
    assert on_actions(advantages) == close([[0.725, 0.725, 0.7, 0.7]])
    assert on_actions(returns) == close([[0.825, 0.825, 1.0, 1.0]])


def test_group_advantages_of_two_questions() -> None:
    # Question 8: returns 1.5, 0, 0 (mean 0.5, sample std sqrt((1 + 0.25 + 0.25) / 2) = sqrt(0.75)); question
    # 3: 1, 1.
    returns, ids = torch.tensor([1.5, 1.0, 0.0, 1.0, 0.0], dtype=torch.float64), torch.tensor([8, 3, 8, 3, 8])
    std = math.sqrt(0.75) + 1e-6
    assert group_advantages(returns, ids, scale="std").tolist() == pytest.approx(
        [1 / std, 0.0, -0.5 / std, 0.0, -0.5 / std], abs=1e-12
    )
    assert group_advantages(returns, ids, scale="none").tolist() == pytest.approx([1.0, 0.0, -0.5, 0.0, -0.5])
    # leave one out: 1.5 - 0 and 0 - 0.75
    got = leave_one_out(returns, ids)
    assert got.tolist() == pytest.approx([1.5, 0.0, -0.75, 0.0, -0.75])
    mask, _ = layout(5)
    assert on_actions(spread(got, mask))[2] == pytest.approx([-0.75] * 4)
