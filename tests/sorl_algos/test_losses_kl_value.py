"""KL estimators, adaptive coefficient, critic loss, explained variance."""

import itertools

import pytest
import torch

from sorl_algos.losses.kl import KL_ESTIMATORS, adapted_coefficient, kl_per_token
from sorl_algos.losses.value import explained_variance, value_loss
from tests.sorl_algos import reference_loops as loops
from tests.sorl_algos.proofs import random_batch, same

ONE = torch.ones(1, 1)


def test_kl_estimators_by_hand() -> None:
    # d = -1.0 + 1.5 = 0.5: k1 0.5, k2 0.125, k3 exp(-0.5) - 1 + 0.5 = 0.106531 (flipped sign: 0.148721).
    values = {name: kl_per_token(-1.0 * ONE, -1.5 * ONE, ONE, estimator=name).item() for name in KL_ESTIMATORS}
    assert values == pytest.approx({"k1": 0.5, "k2": 0.125, "k3": 0.106531}, abs=1e-6)
    # d = -1: k1 -1, k2 0.5, k3 e - 1 - 1 = 0.718282
    values = {name: kl_per_token(-2.0 * ONE, -1.0 * ONE, ONE, estimator=name).item() for name in KL_ESTIMATORS}
    assert values == pytest.approx({"k1": -1.0, "k2": 0.5, "k3": 0.718282}, abs=1e-6)


@pytest.mark.parametrize("estimator", list(KL_ESTIMATORS))
def test_kl_equals_the_loop_and_its_derivative(estimator: str) -> None:
    batch = random_batch(seed=0)
    logp = batch.logp.clone().requires_grad_()
    got = kl_per_token(logp, batch.old_logp, batch.mask, estimator=estimator)
    expected = torch.zeros_like(batch.logp)
    slope = torch.zeros_like(batch.logp)
    for b, row in enumerate(batch.mask.tolist()):
        for t in loops.action_columns(row):
            x, y = batch.logp[b, t].item(), batch.old_logp[b, t].item()
            expected[b, t] = loops.kl(x, y, estimator)
            slope[b, t] = (loops.kl(x + 1e-6, y, estimator) - loops.kl(x - 1e-6, y, estimator)) / 2e-6
    same(f"{estimator} = loop", got, expected, tolerance=1e-14)
    (gradient,) = torch.autograd.grad(got.sum(), logp)
    same(f"{estimator}: gradient = finite differences", gradient, slope, tolerance=1e-8)


def test_kl_estimators_have_the_right_mean() -> None:
    # Exact expectation over a three-letter alphabet: k1 and k3 are unbiased for KL(policy || reference).
    policy = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64)
    reference = torch.tensor([[0.25, 0.25, 0.5]], dtype=torch.float64)
    exact = (policy * (policy / reference).log()).sum().item()
    ones = torch.ones(1, 3)
    for estimator in ("k1", "k3"):
        per_letter = kl_per_token(policy.log(), reference.log(), ones, estimator=estimator)
        assert (policy * per_letter).sum().item() == pytest.approx(exact, abs=1e-12)


@pytest.mark.parametrize("estimator", list(KL_ESTIMATORS))
def test_kl_is_blind_under_the_mask_and_cannot_overflow(estimator: str) -> None:
    logp = torch.tensor([[float("nan"), -200.0, -1.0]], requires_grad=True)
    ref_logp = torch.tensor([[0.0, -1.0, float("inf")]])
    got = kl_per_token(logp, ref_logp, torch.tensor([[0, 1, 0]]), estimator=estimator)
    assert got.isfinite().all() and got[0, [0, 2]].tolist() == [0.0, 0.0]
    (gradient,) = torch.autograd.grad(got.sum(), logp)
    assert gradient.isfinite().all() and gradient[0, [0, 2]].tolist() == [0.0, 0.0]


def test_adaptive_coefficient_by_hand() -> None:
    # Proportional error clipped at +-0.2; 50 of 1000 episodes: factor 1 + 0.2 * 0.05 = 1.01, and 0.99 below
    # target.
    settings = {"target": 6.0, "horizon": 1000.0, "seen": 50.0}
    assert adapted_coefficient(0.1, 12.0, **settings) == pytest.approx(0.101)
    assert adapted_coefficient(0.1, 0.0, **settings) == pytest.approx(0.099)
    assert adapted_coefficient(0.1, 6.6, **settings) == pytest.approx(0.1 * (1 + 0.1 * 0.05))
    assert adapted_coefficient(0.1, 6.0, **settings) == pytest.approx(0.1)
    with pytest.raises(ValueError, match="positive target and horizon, got 0 and 10"):
        adapted_coefficient(0.1, 1.0, target=0, horizon=10, seen=1)


def test_unknown_estimator_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown KL estimator 'k4'; known: k1, k2, k3"):
        kl_per_token(ONE, ONE, ONE, estimator="k4")


def test_value_loss_takes_the_larger_error() -> None:
    # Return 3, stored value 1, new value 2.5, range 0.5: clipped value 1.5, errors 0.25 and 2.25: 0.5 * 2.25.
    assert value_loss(2.5 * ONE, ONE, 3 * ONE, ONE, clip_range=0.5).item() == pytest.approx(1.125)
    assert value_loss(2.5 * ONE, ONE, 3 * ONE, ONE, clip_range=None).item() == pytest.approx(0.125)
    # Overshooting: new value 5, clipped 1.5, errors 4 and 2.25: the unclipped one counts, 0.5 * 4.
    assert value_loss(5.0 * ONE, ONE, 3 * ONE, ONE, clip_range=0.5).item() == pytest.approx(2.0)


@pytest.mark.parametrize("clip_range", [None, 0.2])
def test_value_loss_equals_the_loop_and_its_derivative(clip_range: float | None) -> None:
    batch = random_batch(seed=3)
    values = batch.values.clone().requires_grad_()
    old_values, returns = batch.values + 0.3 * batch.rewards, batch.advantages
    got = value_loss(values, old_values, returns, batch.mask, clip_range=clip_range)
    expected, slope = torch.zeros_like(returns), torch.zeros_like(returns)
    for b, t in itertools.product(*map(range, returns.shape)):
        if batch.mask[b, t]:
            v, o, r = (x[b, t].item() for x in (batch.values, old_values, returns))
            expected[b, t] = loops.value_loss(v, o, r, clip_range)
            ahead, behind = (
                loops.value_loss(v + 1e-6, o, r, clip_range),
                loops.value_loss(v - 1e-6, o, r, clip_range),
            )
            slope[b, t] = (ahead - behind) / 2e-6
    same("value_loss = loop", got, expected, tolerance=1e-14)
    (gradient,) = torch.autograd.grad(got.sum(), values)
    same("value_loss: gradient = finite differences", gradient, slope, tolerance=1e-8)


def test_value_loss_is_blind_under_the_mask() -> None:
    nan = float("nan")
    values = torch.tensor([[nan, 2.0]], requires_grad=True)
    got = value_loss(
        values,
        torch.tensor([[0.0, 1.0]]),
        torch.tensor([[nan, 3.0]]),
        torch.tensor([[0, 1]]),
        clip_range=None,
    )
    assert got.tolist() == [[0.0, 0.5]]
    (gradient,) = torch.autograd.grad(got.sum(), values)
    assert gradient.tolist() == [[0.0, -1.0]]
    with pytest.raises(ValueError, match="must be positive"):
        value_loss(ONE, ONE, ONE, ONE, clip_range=0.0)


def test_explained_variance_by_hand() -> None:
    # Returns 0, 2, 4 (variance 8/3), values 0, 2, 1: residuals 0, 0, 3 (mean 1, variance 2): 1 - 2 / (8/3) =
    # 0.25.
    mask = torch.tensor([[1, 0, 1, 1]])
    returns = torch.tensor([[0.0, float("nan"), 2.0, 4.0]])
    values = torch.tensor([[0.0, 99.0, 2.0, 1.0]])
    assert explained_variance(values, returns, mask).item() == pytest.approx(0.25)
    assert explained_variance(returns, returns, mask).item() == 1.0
    assert explained_variance(torch.zeros(1, 4), returns, mask).item() == 0.0
    constant = torch.full((1, 4), 0.1)  # 0.1 differs from its float32 mean by rounding only
    assert explained_variance(values, constant, mask).item() == 0.0
    assert explained_variance(values, returns, torch.zeros(1, 4)).item() == 0.0
