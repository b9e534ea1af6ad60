"""Scores from noisy counts, without the bias of noise, and how far off they may be.

Of independent numbers with noise of one known variance, sums and products of two are unbiased as they are; counts are
not clipped at 0, which would turn empty cells into records. What is left is a ratio, whose bias is corrected to first
order. Errors are standard deviations, from released numbers only:

    noise       of the law of the noise, exact up to the ratio
    sampling    of other records from the same population, if there were no noise

Source: docs/proofs/scores.md#scores-from-noisy-counts
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.float64]

_BURIED = 2.0  # a total below so many standard deviations of its noise says nothing
_LEAST_BINS = 8
_MOST_BINS = 128


@dataclass(frozen=True)
class Estimate:
    """A share, or an area, in [0, 1].

    Args:
        value: of it.
        noise: standard deviation that noise gives the value.
        sampling: standard deviation that the choice of records gives it.
    """

    value: float
    noise: float
    sampling: float


_UNKNOWN = Estimate(0.5, 0.5, 0.0)


def of_share(noisy: Counts, variance: float) -> Estimate:
    """Returns the mean of numbers in [0, 1], of the noisy sums of them and of what they lack of 1.

    Args:
        noisy: (2,).
        variance: of the noise of each.

    Example:
        >>> of_share(np.array([30.0, 70.0]), 0.0).value
        0.3
    """
    total = float(noisy.sum())
    if _buried(total, 2 * variance):
        return _UNKNOWN
    share = float(noisy[0]) / total
    noise = math.sqrt(variance * ((1.0 - share) ** 2 + share**2)) / total
    value = _corrected(share, variance * (1.0 - 2.0 * share) / total**2, noise)
    usual = (value * total + 1.0) / (total + 2.0)  # not quite 0 or 1
    return Estimate(value, noise, math.sqrt(usual * (1.0 - usual) / total))


def of_area(noisy: Counts, variance: float) -> Estimate:
    """Returns the area under the ROC curve, of noisy histograms of the first and the second class over the same bins.

    Args:
        noisy: (2, bins).
        variance: of the noise of each.

    Example:
        >>> of_area(np.array([[3.0, 0.0, 1.0], [0.0, 0.0, 4.0]]), 0.0).value
        0.875
    """
    first, second = noisy
    totals = float(first.sum()), float(second.sum())
    if _buried(min(totals), len(first) * variance):
        return _UNKNOWN
    pairs = totals[0] * totals[1]
    wins = _wins(len(first))
    area = float(second @ wins @ first) / pairs
    rest = wins - area
    ahead = rest @ first
    behind = second @ rest
    # noise times noise, which is in the squares below once for each histogram
    twice = variance**2 * float((rest**2).sum())
    spread = max(variance * float(ahead @ ahead + behind @ behind) - twice, twice)
    shared = variance * float(
        totals[0] * ahead.sum() + totals[1] * behind.sum()
    ) - variance**2 * float(rest.sum())
    noise = math.sqrt(spread) / pairs
    value = _corrected(area, shared / pairs**2, noise)
    return Estimate(value, noise, _sampling(value, *totals))


def bins_of(records: int, deviation: float) -> int:
    """Returns how many bins an area should have: 2 (n / deviation)^(1/3), in 8..128.

    Args:
        records: public number of them, or of users.
        deviation: standard deviation of the noise of a count.
    """
    return min(max(round(2.0 * math.cbrt(records / deviation)), _LEAST_BINS), _MOST_BINS)


def _buried(total: float, variance: float) -> bool:
    return total <= _BURIED * math.sqrt(variance)


def _corrected(value: float, bias: float, noise: float) -> float:
    """Returns a ratio without the bias of its denominator, as far as that is no more than its error, in [0, 1]."""
    return min(max(value + min(max(bias, -noise), noise), 0.0), 1.0)


def _wins(bins: int) -> NDArray[np.float64]:
    """Returns what a pair counts by its bins, second class in rows.

    1/2 in one bin, which loses what it is ordered by there; 1/12 more than a win, or less than a loss, in neighboring
    bins makes up for that where densities are smooth.
    """
    apart = np.subtract.outer(np.arange(bins), np.arange(bins))
    return 0.5 + 0.5 * np.sign(apart) + np.where(np.abs(apart) == 1, apart / 12.0, 0.0)


def _sampling(area: float, first: float, second: float) -> float:
    """Returns the standard error of Hanley and McNeil (1982), of so many records of each class."""
    least = 0.5 / max(min(first, second), 1.0)
    area = min(max(area, least), 1.0 - least)
    above = area / (2.0 - area) - area**2
    below = 2.0 * area**2 / (1.0 + area) - area**2
    total = area * (1.0 - area) + max(second - 1.0, 0.0) * above + max(first - 1.0, 0.0) * below
    return math.sqrt(total / (first * second))
