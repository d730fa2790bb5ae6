"""Clipping-triggered normalisation: sums and factor against loops and by hand, additivity, the edges."""

import math

import pytest
import torch

from sorl_algos.losses.clip_norm import (
    clip_sums,
    clip_sums_per_sequence,
    ess_factor,
    ess_sums_per_sequence,
    factor_of,
    normalisation_factor,
)
from sorl_algos.losses.segments import level_ratio
from tests.sorl_algos import reference_loops as loops
from tests.sorl_algos.proofs import random_batch, same

CLIPS = {"clip_low": 0.2, "clip_high": 0.28}


def test_sums_and_factor_by_hand() -> None:
    # Ratios 2, 0.5, 1, 1.1 with A = 3, -4, 1, 0 (and one masked token): 2 and 0.5 lie outside [0.8, 1.2], the
    # sign of A does not matter. Clipped: (2*3)^2 + (0.5*-4)^2 = 36 + 4 = 40 over 2 tokens, RMS sqrt(20) =
    # 4.472136. Others: 1 + 0 = 1 over 2 tokens, RMS sqrt(0.5) = 0.707107. rho = sqrt(40) = 6.324555, factor
    # 0.158114.
    ratio = torch.tensor([[2.0, 0.5, 7.0], [1.0, 1.1, 1.0]], dtype=torch.float64)
    advantages = torch.tensor([[3.0, -4.0, 9.0], [1.0, 0.0, 0.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0], [1, 1, 0]])
    sums = clip_sums(ratio, advantages, mask, clip_low=0.2, clip_high=0.2)
    assert sums.tolist() == [40.0, 2.0, 1.0, 2.0]
    factor, rho = normalisation_factor(sums, threshold=3.0)
    assert rho.item() == pytest.approx(math.sqrt(40.0), rel=1e-7)
    assert factor.item() == pytest.approx(1.0 / math.sqrt(40.0), rel=1e-7)
    factor, rho = normalisation_factor(sums, threshold=7.0)
    assert factor.item() == 1.0 and rho.item() == pytest.approx(math.sqrt(40.0), rel=1e-7)


def test_one_row_at_a_time_by_hand() -> None:
    # Row 0: ratio 4 (clipped) and 1, A = 1: rho = 4, factor 1/4. Row 1: nothing clipped. Row 2: no action
    # token. Row 3: every token clipped, |w A| = 5: against a unit RMS rho = 5, factor 1/5.
    ratio = torch.tensor([[4.0, 1.0], [1.0, 1.0], [4.0, 4.0], [5.0, 5.0]])
    mask = torch.tensor([[1, 1], [1, 1], [0, 0], [1, 1]])
    sums = clip_sums_per_sequence(ratio, torch.ones(4, 2), mask, clip_low=0.2, clip_high=0.2)
    factor, rho = normalisation_factor(sums, threshold=3.0)
    torch.testing.assert_close(rho, torch.tensor([4.0, 0.0, 0.0, 5.0]), atol=1e-6, rtol=0)
    torch.testing.assert_close(factor, torch.tensor([0.25, 1.0, 1.0, 0.2]), atol=1e-7, rtol=0)


@pytest.mark.parametrize("level", ["token", "turn", "sequence"])
@pytest.mark.parametrize("seed", range(4))
def test_sums_and_factor_equal_the_loops_and_add_up(level: str, seed: int) -> None:
    batch = random_batch(seed)
    ratio = level_ratio(batch.logp, batch.old_logp, batch.mask, batch.turn_ids, level)
    sums = clip_sums(ratio, batch.advantages, batch.mask, **CLIPS)
    looped = loops.ratios(batch.logp.tolist(), batch.old_logp.tolist(), batch.mask.tolist(), level)
    expected = loops.clip_sums(looped, batch.advantages.tolist(), 0.2, 0.28)
    same("clip_sums = loop", sums, expected, tolerance=1e-12)
    for threshold in (0.5, 1.0, 3.0):
        factor, rho = normalisation_factor(sums, threshold)
        expected_factor, expected_rho = loops.normalisation(expected, threshold)
        same("factor = loop", factor, torch.tensor(expected_factor, dtype=torch.float64), tolerance=1e-12)
        same("rho = loop", rho, torch.tensor(expected_rho, dtype=torch.float64), tolerance=1e-12)
        assert 0.0 < factor.item() <= 1.0
    rows = [clip_sums(ratio[i : i + 1], batch.advantages[i : i + 1], batch.mask[i : i + 1], **CLIPS) for i in range(5)]
    same("clip_sums add up over micro-batches", torch.stack(rows).sum(0), sums, tolerance=1e-13)
    per_row = clip_sums_per_sequence(ratio, batch.advantages, batch.mask, **CLIPS)
    same("clip_sums add up over micro-batches", per_row, torch.stack(rows), tolerance=0.0)


def test_nothing_clipped_leaves_the_update_alone() -> None:
    ratio, ones = torch.full((2, 3), 1.1), torch.ones(2, 3)
    factor, rho = normalisation_factor(clip_sums(ratio, ones, ones, clip_low=0.2, clip_high=0.2), threshold=1e-9)
    assert (factor.item(), rho.item()) == (1.0, 0.0)


def test_no_action_token_gives_factor_one() -> None:
    zeros = torch.zeros(2, 3)
    sums = clip_sums(zeros, zeros, zeros, clip_low=0.2, clip_high=0.2)
    assert sums.tolist() == [0.0] * 4
    factor, rho = normalisation_factor(sums, threshold=3.0)
    assert (factor.item(), rho.item()) == (1.0, 0.0)


def test_everything_clipped_is_measured_against_one() -> None:
    # |w A| = 2 everywhere, no token to compare with: rho = 2 / 1. Without the floor it would be 2 / 1e-8.
    ratio, ones = torch.full((2, 3), 2.0), torch.ones(2, 3)
    sums = clip_sums(ratio, ones, ones, clip_low=0.2, clip_high=0.2)
    factor, rho = normalisation_factor(sums, threshold=3.0)
    assert (factor.item(), rho.item()) == (1.0, 2.0)
    factor, _ = normalisation_factor(sums, threshold=1.5)
    assert factor.item() == 0.5


def test_factor_never_exceeds_one() -> None:
    # threshold 0.25 < rho 0.5 would give 1 / 0.5 = 2: the normalisation may hold back, never push
    rho = torch.tensor([0.0, 0.5, 1.0, 4.0, float("inf")])
    assert factor_of(rho, 0.25).tolist() == [1.0, 1.0, 1.0, 0.25, 0.0]
    assert factor_of(torch.tensor(float("nan")), 3.0).isnan()  # a broken gradient stays visible


def test_ratio_on_the_bound_is_not_clipped() -> None:
    ratio = torch.tensor([[0.75, 1.5]])
    sums = clip_sums(ratio, torch.ones(1, 2), torch.ones(1, 2), clip_low=0.25, clip_high=0.5)
    assert sums[1].item() == 0 and sums[3].item() == 2


def test_masked_values_and_gradients_stay_out() -> None:
    ratio = torch.tensor([[2.0, float("nan"), 1.0]], requires_grad=True)
    advantages = torch.tensor([[1.0, float("inf"), 1.0]])
    sums = clip_sums(ratio, advantages, torch.tensor([[1, 0, 1]]), clip_low=0.2, clip_high=0.2)
    assert sums.tolist() == [4.0, 1.0, 1.0, 1.0]
    assert not sums.requires_grad


def test_effective_sample_size_by_hand() -> None:
    """Ratios 1, 1, 2: (1 + 1 + 2)^2 = 16 and 3 (1 + 1 + 4) = 18, so rho is 18 / 16. The padding holds no ratio."""
    ratio = torch.tensor([[1.0, 1.0, math.nan], [2.0, math.inf, 7.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True, False], [True, False, False]])
    sums = ess_sums_per_sequence(ratio, mask)
    assert sums.tolist() == [[2.0, 2.0, 2.0], [2.0, 4.0, 1.0]]
    factor, rho = ess_factor(sums.sum(dim=0), threshold=1.1)
    assert (float(rho), float(factor)) == pytest.approx((18 / 16, 16 / 18))
    assert float(ess_factor(sums.sum(dim=0), threshold=1.2)[0]) == 1.0


def test_effective_sample_size_is_one_for_equal_ratios_and_n_for_one_that_outweighs_all() -> None:
    equal = ess_sums_per_sequence(torch.full((1, 8), 3.0), torch.ones(1, 8, dtype=torch.bool))
    assert float(ess_factor(equal[0], 1.1)[1]) == pytest.approx(1.0)
    alone = torch.zeros(1, 8)
    alone[0, 3] = 1e6
    assert float(ess_factor(ess_sums_per_sequence(alone, torch.ones(1, 8, dtype=torch.bool))[0], 1.1)[1]) == 8.0
    nothing = ess_sums_per_sequence(alone, torch.zeros(1, 8, dtype=torch.bool))
    assert [float(value) for value in ess_factor(nothing[0], 1.1)] == [1.0, 0.0]
