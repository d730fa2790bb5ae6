"""Intervals and tests of paired differences, against numbers worked by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sorl_algos.evaluation.statistics import RESAMPLES, interval, macro_interval, mcnemar, paired_difference


def test_drawing_piece_by_piece_changes_no_number() -> None:
    # 4,000 scores are drawn in two pieces of 1,000 resamples; here all at once.
    values = np.random.default_rng(1).random(4000)
    picks = np.random.default_rng(5).integers(0, 4000, size=(RESAMPLES, 4000))
    low, high = np.quantile(values[picks].mean(axis=1), [0.025, 0.975])
    assert interval(values, seed=5) == {"mean": pytest.approx(values.mean()), "low": low, "high": high}


def test_mcnemar_by_hand() -> None:
    assert mcnemar(1, 9) == 2 * (1 + 10) / 2**10  # C(10,0) + C(10,1) of 1,024, on both sides
    assert mcnemar(9, 1) == mcnemar(1, 9)
    assert mcnemar(5, 5) == 1.0 and mcnemar(0, 0) == 1.0
    assert mcnemar(0, 5) == 2 / 32
    # far beyond what a float can hold on the way; normal approximation with continuity correction:
    # z = (|1900 - 2100| - 1) / sqrt(4000) = 3.1465, two-sided p = 0.001653
    assert mcnemar(1900, 2100) == pytest.approx(math.erfc(199 / math.sqrt(4000) / math.sqrt(2)), rel=1e-2)
    with pytest.raises(ValueError, match="must not be negative"):
        mcnemar(-1, 2)


def test_a_paired_difference_by_hand() -> None:
    # always better by one: no resample has a mean on the other side, so p is its smallest value
    assert paired_difference([0.0] * 6, [1.0] * 6) == {"mean": 1.0, "low": 1.0, "high": 1.0, "p": 2 / (RESAMPLES + 1)}
    assert paired_difference([0.3, 0.7], [0.3, 0.7])["p"] == 1.0
    # 100 differences of +1 and 60 of -1 in 400: mean 0.1, standard error sqrt(0.4 - 0.01) / 20 = 0.0312, z = 3.2
    first = [0.0] * 100 + [1.0] * 60 + [0.0] * 240
    second = [1.0] * 100 + [0.0] * 60 + [0.0] * 240
    found = paired_difference(first, second)
    assert found["mean"] == pytest.approx(0.1)
    assert found["low"] == pytest.approx(0.1 - 1.96 * 0.0312, abs=0.01)
    assert found["high"] == pytest.approx(0.1 + 1.96 * 0.0312, abs=0.01)
    assert found["p"] < 0.01
    turned = paired_difference(second, first)
    assert turned["mean"] == pytest.approx(-0.1) and turned["p"] < 0.01
    assert paired_difference(first, second, seed=4) == paired_difference(first, second, seed=4)


def test_pairing_sees_what_two_intervals_do_not() -> None:
    # hard and easy questions: the scores spread widely, yet the second is better on 10 of 200 and worse on none
    first = [0.0] * 100 + [1.0] * 100
    second = [1.0] * 10 + first[10:]
    one, two = interval(first), interval(second)
    assert one["high"] > two["low"] and paired_difference(first, second)["low"] > 0


def test_p_is_even_under_no_difference() -> None:
    """Of 200 comparisons of coin flips about one in ten has a p below 0.1."""
    generator = np.random.default_rng(0)
    low = sum(
        paired_difference(*generator.integers(0, 2, size=(2, 60)).astype(float))["p"] < 0.1 for _ in range(200)
    )
    # 20 expected, standard deviation sqrt(200 * 0.1 * 0.9) = 4.2; four of them
    assert 3 <= low <= 37


def test_unequal_or_empty_scores_are_refused() -> None:
    with pytest.raises(ValueError, match="equally many scores, got 1 and 2"):
        paired_difference([1.0], [1.0, 0.0])
    with pytest.raises(ValueError, match="got 0 and 0"):
        paired_difference([], [])
    with pytest.raises(ValueError, match="at least one set"):
        macro_interval([])


def test_the_macro_average_counts_sets_not_questions() -> None:
    found = macro_interval([[1.0] * 1000, [0.0] * 10])
    assert found == {"mean": 0.5, "low": 0.5, "high": 0.5}
    # two sets of 100 coin flips: the error of the mean of means is sqrt(0.25 / 100 / 2) = 0.0354
    spread = macro_interval([[0.0, 1.0] * 50, [0.0, 1.0] * 50])
    assert spread["high"] - spread["low"] == pytest.approx(2 * 1.96 * 0.0354, abs=0.015)
