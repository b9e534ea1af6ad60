"""Scores from noisy counts, without the bias of noise, and how far off they may be.

Of independent numbers with noise of one known variance, sums and products of two are unbiased as they are; counts are
not clipped at 0, which would turn empty cells into records. What is left is a ratio, whose bias is corrected to first
order. Errors are standard deviations, from released numbers only:

    noise       of the law of the noise, exact up to the ratio
    sampling    of other records from the same population, if there were no noise

and an interval for both together, on the safe side of 95 %: what would be off by no more than 2.12 of its own errors.

Source: docs/proofs/scores.md#scores-from-noisy-counts
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
import scipy
from numpy.typing import NDArray

Counts = NDArray[np.float64]

_BURIED = 2.0  # a total below so many standard deviations of its noise says nothing
_REACH = 2.12  # standard deviations that hold 95 % of a Laplace number, and more of a normal one
_LEAST_BINS = 8
_FINEST = 128
_GROUPS = 5  # of probabilities, in a table of calibration
_CLEAR = 4.0  # a group is at least so many standard deviations of its noise


@dataclass(frozen=True)
class Estimate:
    """A share, or an area, in [0, 1].

    Args:
        value: of it.
        noise: standard deviation that noise gives the value.
        sampling: standard deviation that the choice of records gives it.
        interval: (low, high), for both at 95 %.
    """

    value: float
    noise: float
    sampling: float
    interval: tuple[float, float]


@dataclass(frozen=True)
class Group:
    """Records to which a model gave similar probabilities.

    Args:
        low: of these probabilities, public.
        high: of them.
        records: how many, with noise.
        share: of them that are of the second class.
    """

    low: float
    high: float
    records: float
    share: Estimate

    def __str__(self) -> str:
        low, high = (f"{100 * end:.0f}" for end in self.share.interval)
        return (
            f"{100 * self.low:3.0f} to {100 * self.high:3.0f} %: {100 * self.share.value:3.0f} % of about"
            f" {max(self.records, 0.0):.0f} (95 %: {low} to {high} %)"
        )


_UNKNOWN = Estimate(0.5, 0.5, 0.0, (0.0, 1.0))


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
    sampling = math.sqrt(usual * (1.0 - usual) / total)
    return Estimate(value, noise, sampling, _interval_of_share(noisy, variance, value))


def _interval_of_share(noisy: Counts, variance: float, value: float) -> tuple[float, float]:
    """Returns the shares r for which first - r total, whose mean is 0, is within its reach."""
    total = float(noisy.sum())
    noise = _REACH**2 * variance
    spread = _REACH**2 * total
    square = total**2 + spread - 2.0 * noise  # > 0, as the total is not buried
    ends = []
    for side in (-1.0, 1.0):
        # half a record, by which a number of records is further off than a normal one
        first = min(max(float(noisy[0]) + 0.5 * side, 0.0), total)
        middle = first * total + spread / 2.0 - noise
        root = math.sqrt(max(middle**2 - square * (first**2 - noise), 0.0))
        ends.append(min(max((middle + side * root) / square, 0.0), 1.0))
    return min(ends[0], value), max(ends[1], value)


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
    shared = variance * float(
        totals[0] * (rest @ first).sum() + totals[1] * (second @ rest).sum()
    ) - variance**2 * float(rest.sum())
    noise = math.sqrt(_noise_of_pairs(noisy, variance, area)) / pairs
    value = _corrected(area, shared / pairs**2, noise)
    sampling = math.sqrt(_sampling_of_pairs(noisy, variance, value)) / pairs
    return Estimate(value, noise, sampling, _interval_of_area(noisy, variance, area, value))


def _interval_of_area(
    noisy: Counts, variance: float, area: float, value: float
) -> tuple[float, float]:
    """Returns the areas for which wins - area pairs, whose mean is 0, is within its reach."""
    pairs = float(noisy[0].sum() * noisy[1].sum())
    edge = 0.1 / max(pairs, 1.0)  # off which errors are not 0
    inner = min(max(area, edge), 1.0 - edge)

    def excess(other: float) -> float:
        spread = _noise_of_pairs(noisy, variance, other)
        spread += _sampling_of_pairs(noisy, variance, other)
        return (pairs * (inner - other)) ** 2 - _REACH**2 * spread

    low = scipy.optimize.brentq(excess, 0.0, inner) if excess(0.0) > 0 else 0.0
    high = scipy.optimize.brentq(excess, inner, 1.0) if excess(1.0) > 0 else 1.0
    return min(low, value), max(high, value)


def _noise_of_pairs(noisy: Counts, variance: float, area: float) -> float:
    """Returns the variance that noise gives wins - area pairs."""
    first, second = noisy
    rest = _wins(len(first)) - area
    # noise times noise, which is in the squares below once for each histogram
    twice = variance**2 * float((rest**2).sum())
    squares = float(((rest @ first) ** 2).sum() + ((second @ rest) ** 2).sum())
    return max(variance * squares - twice, twice)


def _sampling_of_pairs(noisy: Counts, variance: float, area: float) -> float:
    """Returns the variance that the choice of records gives wins - area pairs.

    What the released histograms say (DeLong 1988, without what noise adds), at least that of exponential scores (Hanley
    and McNeil 1982), at most what any scores have.
    """
    first, second = noisy
    least = 0.5 / max(min(first.sum(), second.sum()), 1.0)
    inner = min(max(area, least), 1.0 - least)
    usual = _hanley(inner, float(first.sum()), float(second.sum()))
    rest = _wins(len(first)) - area
    ahead = (rest @ first) ** 2 - variance * (rest**2).sum(1)
    behind = (second @ rest) ** 2 - variance * (rest**2).sum(0)
    seen = float(second @ ahead + first @ behind)
    triples = first.sum() * second.sum() * max(first.sum(), second.sum())
    most = area * (1.0 - area) * float(triples)
    return max(usual, min(seen, most))


def calibration(noisy: Counts, variance: float) -> tuple[Group, ...]:
    """Returns groups of records by their probability, each large enough beside its noise; none where noise hides all.

    Args:
        noisy: (2, bins), of the first and the second class.
        variance: of the noise of each.
    """
    bins = noisy.shape[1]
    wanted = noisy.sum() / _GROUPS
    edges = [0]
    for bin_ in range(1, bins + 1):
        large = _large(noisy[:, edges[-1] : bin_], variance, wanted)
        if large and (bin_ == bins or _large(noisy[:, bin_:], variance, wanted)):
            edges.append(bin_)
    return tuple(
        _group(noisy[:, low:high], variance, low / bins, high / bins)
        for low, high in itertools.pairwise(edges)
    )


def _large(noisy: Counts, variance: float, wanted: float) -> bool:
    return float(noisy.sum()) > max(wanted, _CLEAR * math.sqrt(noisy.size * variance))


def _group(noisy: Counts, variance: float, low: float, high: float) -> Group:
    first, second = noisy.sum(1)
    share = of_share(np.array([second, first]), noisy.shape[1] * variance)
    ends = [math.sin(0.5 * math.pi * place) ** 2 for place in (low, high)]
    return Group(ends[0], ends[1], float(first + second), share)


def bins_of(records: int, deviation: float) -> int:
    """Returns how many bins an area should have: 2 (n / deviation)^(1/3), in 8..128.

    Args:
        records: public number of them, or of users.
        deviation: standard deviation of the noise of a count.
    """
    return min(max(round(2.0 * math.cbrt(records / deviation)), _LEAST_BINS), _FINEST)


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


def _hanley(area: float, first: float, second: float) -> float:
    """Returns the variance of wins - area pairs of so many records of each class, for exponential scores."""
    above = area / (2.0 - area) - area**2
    below = 2.0 * area**2 / (1.0 + area) - area**2
    each = area * (1.0 - area) + max(second - 1.0, 0.0) * above + max(first - 1.0, 0.0) * below
    return first * second * each


def rounded(error: float, *values: float) -> list[str]:
    """Returns values as text, to the first digit of an error that is not 0, or the second after a 1.

    Example:
        >>> rounded(0.018, 0.9213, 0.018), rounded(12.0, 1520.4)
        (['0.921', '0.018'], ['1520'])
    """
    digits = 4
    if error > 0:
        digits = -math.floor(math.log10(error / 2.0))
    return [f"{value:.{max(digits, 0)}f}" for value in values]
