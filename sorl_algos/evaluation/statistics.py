"""Intervals of means and tests of paired differences. Needs numpy alone; the same seed gives the same numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 2000
_ENTRIES = 4_000_000  # drawn at one time: 32 MB


def interval(values: Sequence[float], *, seed: int = 0, level: float = 0.95) -> dict[str, float]:
    """Mean and percentile bootstrap interval (Efron 1979) of independent scores: ``mean``, ``low``, ``high``."""
    array = np.asarray(values, dtype=np.float64)
    means = _resampled_means(array, RESAMPLES, seed)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return {"mean": float(array.mean()), "low": float(low), "high": float(high)}


def macro_interval(sets: Sequence[Sequence[float]], *, seed: int = 0, level: float = 0.95) -> dict[str, float]:
    """Mean of the means of several sets, each counting the same, and its interval: every set is resampled by itself."""
    if not sets:
        raise ValueError("a macro average needs at least one set of scores")
    arrays = [np.asarray(values, dtype=np.float64) for values in sets]
    means = np.mean([_resampled_means(array, RESAMPLES, seed + place) for place, array in enumerate(arrays)], axis=0)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return {"mean": float(np.mean([array.mean() for array in arrays])), "low": float(low), "high": float(high)}


def paired_difference(
    first: Sequence[float], second: Sequence[float], *, seed: int = 0, level: float = 0.95
) -> dict[str, float]:
    """Mean of ``second - first`` over the same questions: ``mean``, ``low``, ``high``, ``p``.

    The interval is the percentile bootstrap's over questions. ``p`` (two-sided) is twice the smaller share of the
    resampled means on one side of zero, with one added to both counts, so that it is never below 2 / (R + 1)
    (Davison and Hinkley 1997, section 4.2.5); 1 where the means never differ.

    Raises:
        ValueError: sequences of different length, or empty ones.
    """
    if len(first) != len(second) or not len(first):
        raise ValueError(f"a paired difference needs equally many scores, got {len(first)} and {len(second)}")
    differences = np.asarray(second, dtype=np.float64) - np.asarray(first, dtype=np.float64)
    means = _resampled_means(differences, RESAMPLES, seed)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    # a mean of equal halves is zero but for rounding
    below, above = int((means <= 1e-12).sum()), int((means >= -1e-12).sum())
    return {
        "mean": float(differences.mean()),
        "low": float(low),
        "high": float(high),
        "p": min(1.0, 2 * (1 + min(below, above)) / (RESAMPLES + 1)),
    }


def mcnemar(only_first: int, only_second: int) -> float:
    """Exact two-sided p value of McNemar's test (1947): of the questions that just one side got right, is it one side?

    Under the hypothesis of no difference ``only_first`` is Binomial(only_first + only_second, 1/2).
    """
    if only_first < 0 or only_second < 0:
        raise ValueError(f"counts must not be negative, got {only_first} and {only_second}")
    total = only_first + only_second
    tail = sum(math.comb(total, count) for count in range(min(only_first, only_second) + 1))
    return min(1.0, 2 * tail / 2**total)


def _resampled_means(values: NDArray[np.float64], resamples: int, seed: int) -> NDArray[np.float64]:
    """Means ``(resamples,)`` of samples with replacement; drawn piece by piece, which changes no number."""
    generator = np.random.default_rng(seed)
    rows = max(1, _ENTRIES // len(values))
    means = [
        values[generator.integers(0, len(values), size=(min(rows, resamples - start), len(values)))].mean(axis=1)
        for start in range(0, resamples, rows)
    ]
    return np.concatenate(means)
