"""Turn ids, segments and ratios: against loops over the definitions, and hand-worked rows."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sorl_algos.losses.segments import (
    count_segments,
    level_ratio,
    segment_ids_of,
    segment_mean,
    segment_sizes,
    segment_sum,
    token_log_ratio,
    turn_ids_from_mask,
)
from tests.sorl_algos import reference_loops as loops
from tests.sorl_algos.proofs import random_batch, same

LEVELS = ("token", "turn", "sequence")


@given(st.lists(st.lists(st.booleans(), min_size=7, max_size=7), min_size=1, max_size=4))
@settings(max_examples=60, deadline=None)
def test_turn_ids_number_the_runs_of_the_mask(mask: list[list[bool]]) -> None:
    assert turn_ids_from_mask(torch.tensor(mask)).tolist() == loops.turn_ids(mask)


def test_turn_ids_by_hand() -> None:
    mask = torch.tensor([[0, 1, 1, 0, 1, 0], [1, 0, 0, 1, 1, 1], [0, 0, 0, 0, 0, 0]])
    expected = [[-1, 0, 0, -1, 1, -1], [0, -1, -1, 1, 1, 1], [-1] * 6]
    assert turn_ids_from_mask(mask).tolist() == expected
    assert turn_ids_from_mask(torch.zeros(2, 0, dtype=torch.bool)).shape == (2, 0)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("seed", range(5))
def test_segment_mean_equals_the_loop(level: str, seed: int) -> None:
    batch = random_batch(seed)
    ids = segment_ids_of(batch.mask, batch.turn_ids, level)
    x = batch.rewards
    expected = torch.zeros_like(x)
    sizes = torch.ones_like(x)
    for b, row in enumerate(batch.mask.tolist()):
        for segment in loops.segments_of(row, level):
            for t in segment:
                expected[b, t] = sum(x[b, j].item() for j in segment) / len(segment)
                sizes[b, t] = len(segment)
    same("segment_mean = loop over segments", segment_mean(x, ids), expected, tolerance=1e-14)
    assert torch.equal(segment_sizes(ids, torch.float64), sizes)
    counted = [len(loops.segments_of(row, level)) for row in batch.mask.tolist()]
    assert count_segments(ids).tolist() == counted


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("pooling", ["mean", "sum"])
@pytest.mark.parametrize("seed", range(4))
def test_ratio_equals_the_loop(level: str, pooling: str, seed: int) -> None:
    batch = random_batch(seed)
    ratio = level_ratio(batch.logp, batch.old_logp, batch.mask, batch.turn_ids, level, pooling)
    expected = loops.ratios(batch.logp.tolist(), batch.old_logp.tolist(), batch.mask.tolist(), level, pooling)
    filled = [[1.0 if w is None else w for w in row] for row in expected]
    same(f"ratio, pooling {pooling} = loop", ratio, filled, tolerance=1e-12)


def test_sequence_ratio_averages_over_action_tokens_only() -> None:
    # Three action tokens 0.2, 0.4, 0.0: mean 0.2, ratio exp(0.2) = 1.221403. With the observation tokens it
    # would be exp(2.6 / 5) = 1.682, over the full length exp(0.6 / 5) = 1.127.
    l_t = torch.tensor([[0.2, 0.4, 5.0, -3.0, 0.0]])
    mask = torch.tensor([[1, 1, 0, 0, 1]])
    ratio = level_ratio(l_t, torch.zeros_like(l_t), mask, turn_ids_from_mask(mask), "sequence")
    torch.testing.assert_close(ratio[0, [0, 1, 4]], torch.full((3,), 1.221403), atol=1e-6, rtol=0)
    assert ratio[0, [2, 3]].tolist() == [1.0, 1.0]


def test_turn_ratio_averages_within_each_turn() -> None:
    # Turn 0: 0.1, 0.3, mean 0.2, exp = 1.221403. Turn 1: -0.2, 0, -0.1, mean -0.1, exp = 0.904837.
    # The product ratios would be exp(0.4) = 1.491825 and exp(-0.3) = 0.740818.
    l_t = torch.tensor([[0.1, 0.3, 7.0, -0.2, 0.0, -0.1]])
    mask = torch.tensor([[1, 1, 0, 1, 1, 1]])
    ids = torch.tensor([[0, 0, -1, 1, 1, 1]])
    mean = level_ratio(l_t, torch.zeros_like(l_t), mask, ids, "turn")
    total = level_ratio(l_t, torch.zeros_like(l_t), mask, ids, "turn", "sum")
    expected = torch.tensor([[1.221403, 1.221403, 1.0, 0.904837, 0.904837, 0.904837]])
    torch.testing.assert_close(mean, expected, atol=1e-6, rtol=0)
    expected = torch.tensor([[1.491825, 1.491825, 1.0, 0.740818, 0.740818, 0.740818]])
    torch.testing.assert_close(total, expected, atol=1e-6, rtol=0)


def test_log_ratio_is_bounded_and_blind_under_the_mask() -> None:
    nan, inf = float("nan"), float("inf")
    logp = torch.tensor([[nan, -1.0, inf, -1.0, -2.0]], requires_grad=True)
    old_logp = torch.tensor([[0.0, -90.0, nan, 90.0, -inf]])
    mask = torch.tensor([[0, 1, 0, 1, 0]])
    l_t = token_log_ratio(logp, old_logp, mask)
    assert l_t.tolist() == [[0.0, 20.0, 0.0, -20.0, 0.0]]
    l_t.sum().backward()
    assert logp.grad is not None and logp.grad.tolist() == [[0.0] * 5]  # nothing through the mask or the bound


def test_product_ratio_of_many_tokens_cannot_overflow() -> None:
    # 100 tokens with log-ratio 5: the product would be exp(500); the bound holds it at exp(20).
    l_t = torch.full((1, 100), 5.0)
    mask = torch.ones(1, 100, dtype=torch.bool)
    ratio = level_ratio(l_t, torch.zeros_like(l_t), mask, turn_ids_from_mask(mask), "sequence", "sum")
    torch.testing.assert_close(ratio, torch.full((1, 100), math.exp(20.0)), rtol=1e-6, atol=0)


def test_half_precision_is_lifted() -> None:
    # bfloat16 has 8 bits: the mean of 300 ones summed in it would stick at 256 / 300.
    ones = torch.ones(1, 300, dtype=torch.bfloat16)
    mask = torch.ones(1, 300, dtype=torch.bool)
    ratio = level_ratio(ones, torch.zeros_like(ones), mask, turn_ids_from_mask(mask), "sequence")
    assert ratio.dtype == torch.float32
    torch.testing.assert_close(ratio, torch.full((1, 300), math.e), rtol=1e-5, atol=0)


def test_gradient_of_segment_sum_reaches_every_member() -> None:
    x = torch.randn(2, 6, dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([[0, 0, -1, 1, 1, 1], [-1, 0, 0, 0, -1, 1]])
    assert torch.autograd.gradcheck(lambda v: segment_sum(v, ids), (x,))
    assert torch.autograd.gradcheck(lambda v: segment_mean(v, ids), (x,))


def test_unknown_names_are_refused() -> None:
    batch = random_batch(0)
    with pytest.raises(ValueError, match="unknown ratio level 'word'; known: token, turn, sequence"):
        segment_ids_of(batch.mask, batch.turn_ids, "word")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unknown pooling 'max'; known: mean, sum"):
        # type: ignore[arg-type]
        level_ratio(batch.logp, batch.old_logp, batch.mask, batch.turn_ids, "turn", "max")
