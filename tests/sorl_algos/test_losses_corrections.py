"""Corrections between sampler and trainer: by hand, at three levels, and what leaves the denominator."""

import math

import pytest
import torch

from sorl_algos.losses.corrections import (
    decoupled_weights,
    effective_sample_size,
    icepop,
    mismatch_by_turn,
    mismatch_ratio,
    rejection,
    truncated_is,
)
from sorl_algos.losses.policy import clipped_surrogate
from sorl_algos.losses.reduce import counts_of, token_mean
from sorl_algos.losses.segments import turn_ids_from_mask
from tests.sorl_algos import reference_loops as loops
from tests.sorl_algos.proofs import random_batch, same

LEVELS = ("token", "turn", "sequence")

# Turn 0 has mismatch ratios 4 and 1 (geometric mean 2), turn 1 ratios 1/4 and 1 (mean 1/2); all four together
# 1.
MASK = torch.tensor([[1, 1, 0, 1, 1]])
IDS = turn_ids_from_mask(MASK)
OLD = torch.tensor([[4.0, 1.0, 77.0, 0.25, 1.0]], dtype=torch.float64).log()
SAMPLED = torch.zeros_like(OLD)


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("token", [2.0, 1.0, 0.0, 0.25, 1.0]),
        ("turn", [1.5, 1.5, 0.0, 0.5, 0.5]),
        ("sequence", [1, 1, 0, 1, 1]),
    ],
)
def test_truncated_is_by_hand(level: str, expected: list[float]) -> None:
    cap = 2.0 if level == "token" else 1.5
    got = truncated_is(OLD, SAMPLED, MASK, IDS, level=level, cap=cap)
    torch.testing.assert_close(got.weights, torch.tensor([expected], dtype=torch.float64), atol=1e-12, rtol=0)
    assert got.mask.tolist() == MASK.bool().tolist()
    assert got.metrics["truncated_tokens"].item() == {"token": 1, "turn": 2, "sequence": 0}[level]
    assert got.metrics["rejected_tokens"].item() == 0


@pytest.mark.parametrize("leave", [True, False])
def test_icepop_and_rejection_by_hand(leave: bool) -> None:
    # Kept interval [0.4, 3]. Token level: 4 and 0.25 fall out. Turn level: ratios 2 and 0.5 stay.
    options = {"low": 0.4, "high": 3.0, "rejected_leave_denominator": leave}
    popped = icepop(OLD, SAMPLED, MASK, IDS, level="token", **options)
    dropped = rejection(OLD, SAMPLED, MASK, IDS, level="token", **options)
    kept = [[False, True, False, False, True]]
    assert popped.weights.tolist() == dropped.weights.tolist() == [[0.0, 1.0, 0.0, 0.0, 1.0]]
    assert popped.mask.tolist() == dropped.mask.tolist() == (kept if leave else MASK.bool().tolist())
    assert popped.metrics["rejected_tokens"].item() == 2
    popped = icepop(OLD, SAMPLED, MASK, IDS, level="turn", **options)
    dropped = rejection(OLD, SAMPLED, MASK, IDS, level="turn", **options)
    expected = torch.tensor([[2.0, 2.0, 0.0, 0.5, 0.5]], dtype=torch.float64)
    torch.testing.assert_close(popped.weights, expected, atol=1e-12, rtol=0)
    assert dropped.weights.tolist() == [[1.0, 1.0, 0.0, 1.0, 1.0]]
    narrow = {"low": 0.4, "high": 1.5, "rejected_leave_denominator": leave}
    assert rejection(OLD, SAMPLED, MASK, IDS, level="turn", **narrow).weights.tolist() == [[0.0, 0.0, 0.0, 1.0, 1.0]]


def test_rejected_tokens_and_the_denominator() -> None:
    # Losses 1 everywhere, 2 of 4 tokens rejected: 2 / 2 where they leave the denominator, 2 / 4 where they
    # stay.
    losses = torch.ones(1, 5, dtype=torch.float64)
    means = []
    for leave in (True, False):
        got = rejection(OLD, SAMPLED, MASK, IDS, level="token", low=0.4, high=3.0, rejected_leave_denominator=leave)
        counts = counts_of(got.mask, IDS)
        means.append(token_mean(got.weights * losses, MASK, IDS, counts).item())
    assert means == [1.0, 0.5]


def test_decoupled_objective_by_hand() -> None:
    # weight exp(-1.0 + 1.2) = 1.221403, ratio exp(-0.9 + 1.0) = 1.105171, loss -1.221403 * 1.105171 =
    # -1.349859 (inside the clip); the weight is a constant.
    proximal, behaviour = torch.tensor([[-1.0]]), torch.tensor([[-1.2]])
    logp = torch.tensor([[-0.9]], requires_grad=True)
    mask, ids = torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.long)
    got = decoupled_weights(proximal, behaviour, mask, ids, level="token", cap=5.0)
    out = clipped_surrogate(logp, proximal, torch.ones(1, 1), mask, ids, level="token", clip_low=0.2, clip_high=0.2)
    assert got.weights.item() == pytest.approx(1.221403, abs=1e-6)
    assert out.ratio.item() == pytest.approx(1.105171, abs=1e-6)
    loss = (got.weights * out.per_token).sum()
    assert loss.item() == pytest.approx(-1.349859, abs=1e-6)
    (gradient,) = torch.autograd.grad(loss, logp)
    assert gradient.item() == pytest.approx(-1.349859, abs=1e-6)
    capped = decoupled_weights(proximal, behaviour, mask, ids, level="token", cap=1.1)
    assert capped.weights.item() == pytest.approx(1.1)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("pooling", ["mean", "sum"])
@pytest.mark.parametrize("seed", range(3))
def test_corrections_equal_the_loops(level: str, pooling: str, seed: int) -> None:
    batch = random_batch(seed)
    four = (batch.logp, batch.old_logp, batch.mask, batch.turn_ids)
    w = loops.ratios(batch.logp.tolist(), batch.old_logp.tolist(), batch.mask.tolist(), level, pooling)
    options = {"level": level, "pooling": pooling}
    interval = {"low": 0.7, "high": 1.3, "rejected_leave_denominator": True}

    def expected(rule: object) -> list[list[float]]:
        return [[0.0 if x is None else rule(x) for x in row] for row in w]  # type: ignore[operator]

    what = "corrections = loop"
    same(
        what,
        truncated_is(*four, cap=1.2, **options).weights,
        expected(lambda x: min(x, 1.2)),
        tolerance=1e-12,
    )
    same(what, decoupled_weights(*four, **options).weights, expected(lambda x: x), tolerance=1e-11)
    inside = expected(lambda x: float(0.7 <= x <= 1.3))
    same(what, rejection(*four, **interval, **options).weights, inside, tolerance=0.0)
    same(
        what,
        icepop(*four, **interval, **options).weights,
        expected(lambda x: x * (0.7 <= x <= 1.3)),
        tolerance=1e-12,
    )
    assert icepop(*four, **interval, **options).mask.tolist() == [[bool(x) for x in row] for row in inside]


def test_nothing_leaks_from_under_the_mask() -> None:
    old = torch.tensor([[0.0, float("nan"), 0.0]], requires_grad=True)
    sampled = torch.tensor([[0.0, 0.0, -1000.0]])
    mask, ids = torch.tensor([[1, 0, 1]]), torch.tensor([[0, -1, 1]])
    ratio = mismatch_ratio(old, sampled, mask, ids, level="turn")
    assert not ratio.requires_grad
    torch.testing.assert_close(ratio, torch.tensor([[1.0, 1.0, math.exp(20.0)]]))


def test_mismatch_of_each_turn_index_by_hand() -> None:
    # Turn 0: ratios 4, 1; turn 1: 1/4, 1. k3 of a ratio r is r - 1 - ln r.
    got = mismatch_by_turn(OLD, SAMPLED, MASK, IDS, turns=3)
    assert got["tokens"].tolist() == [2.0, 2.0, 0.0]
    assert got["sum_weight"].tolist() == pytest.approx([5.0, 1.25, 0.0])
    assert got["sum_weight_squared"].tolist() == pytest.approx([17.0, 1.0625, 0.0])
    assert got["max_ratio"].tolist() == pytest.approx([4.0, 1.0, 0.0])
    kl = [3.0 - math.log(4.0), -0.75 + math.log(4.0), 0.0]
    assert got["sum_mismatch_kl"].tolist() == pytest.approx(kl)
    ess = effective_sample_size(got["sum_weight"], got["sum_weight_squared"], got["tokens"])
    assert ess.tolist() == pytest.approx([25 / 34, 1.25**2 / 2.125, 0.0])
    merged = mismatch_by_turn(OLD, SAMPLED, MASK, IDS, turns=1)  # later turns count with the last index
    assert merged["tokens"].tolist() == [4.0]


def test_settings_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="cap must be positive, got 0"):
        truncated_is(OLD, SAMPLED, MASK, IDS, level="token", cap=0)
    with pytest.raises(ValueError, match=r"needs 0 <= low < high, got \[2, 1\]"):
        icepop(OLD, SAMPLED, MASK, IDS, level="token", low=2, high=1, rejected_leave_denominator=True)
