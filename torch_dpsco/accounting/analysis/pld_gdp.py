"""A ledger with privacy loss laws summarized as Gaussian differential privacy, where delta is not too small.

delta(epsilon) = E (1 - t e^(-L))_+ is convex in t = e^epsilon, whatever the law of the loss L. So it lies below the
chord, in t, between any two points of an upper bound: a few compositions bound the curve everywhere. The least mu of
the chords is found by `convert_failures.mu_upper`, on points so fine that its own steps cost little, and intervals
whose chord asks for more than the points themselves are halved.

Let E be the epsilon at delta_min. Beyond it delta is at most delta_min. So if the Gaussian curve is at least delta on
[0, E], then for every delta >= delta_min the epsilon that mu implies is one at which the ledger has at most this delta.

A central-limit mu has no such proof, and reports far too little.

Source: docs/proofs/accounting.md#a-mu-that-covers-a-curve.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from torch_dpsco import _validate
from torch_dpsco.accounting.analysis.convert_failures import mu_upper
from torch_dpsco.accounting.analysis.gaussian import gaussian_mu, log_delta_curve
from torch_dpsco.accounting.analysis.pld import pld_delta, pld_epsilon
from torch_dpsco.accounting.analysis.pld_loss import LossLaw

FloatArray = NDArray[np.float64]

_LOOSE = 1.007  # what the result may exceed the largest mu of the computed points by
_INTERVALS = 8  # to begin with
_ROUNDS = 6  # of halving intervals
_FINE = 128  # points of an interval on its chord


def gdp_upper(losses: Sequence[tuple[LossLaw, int]], delta_min: float = 1e-10) -> float | None:
    """Returns a mu such that the privacy curve of composed loss laws is below that of mu-GDP where delta >= delta_min.

    It exceeds the least such mu by about 1 %, and costs 10 to 40 compositions.

    Args:
        losses: laws with the numbers of their releases, as for `pld.pld_epsilon`.
        delta_min: in (0, 1).

    Returns:
        mu >= 0, rounded up; inf if infinite losses alone exceed delta_min, or if the total variation distance is 1 in
        floating point (mu above 16); None if there is no figure.

    Raises:
        ValueError: delta_min is out of range, or a number of releases is negative.

    Guarantee: for every delta >= delta_min, (gaussian_epsilon(mu, delta), delta)-DP under the adjacency that all the
        laws share. Not GDP: "valid for delta >= delta_min" belongs to it, and it must not be composed further.

    Source: docs/proofs/accounting.md#a-mu-that-covers-a-curve.

    Example:
        >>> from torch_dpsco.accounting.analysis.pld_loss import PoissonLoss
        >>> round(gdp_upper([(PoissonLoss(rate=256 / 60000, noise=1.0), 235)]), 2)
        0.24
    """
    delta_min = _validate.open_interval(0.0, 1.0, delta_min=delta_min)
    end = pld_epsilon(losses, delta_min)
    if end is None or end.epsilon in (0.0, math.inf):
        return None if end is None else end.epsilon
    points, wanted = {end.epsilon: delta_min}, np.linspace(0.0, end.epsilon, _INTERVALS, endpoint=False)
    for _ in range(_ROUNDS):
        for epsilon in wanted.tolist():
            found = pld_delta(losses, epsilon)
            if found is None:
                return None
            points[epsilon] = max(found.delta, delta_min)
        if points[0.0] >= 1:
            return math.inf
        enough = _LOOSE * max(gaussian_mu(*point) for point in points.items())
        wanted = _too_wide(points, enough)
        if wanted.size == 0:
            break
    epsilons, deltas = _chords(points)
    deltas[-1] = 0.0  # the end of the claim: the last chord still leads to delta_min
    return mu_upper(epsilons, deltas, delta_min)


def _too_wide(points: dict[float, float], mu: float) -> FloatArray:
    """Returns the middles of the intervals on which mu-GDP is below the chord."""
    epsilons, deltas = _chords(points)
    below = log_delta_curve(epsilons[1:], mu) < np.log(deltas[:-1])
    knots = epsilons[::_FINE]
    middles: FloatArray = ((knots[1:] + knots[:-1]) / 2)[below.reshape(-1, _FINE).any(axis=1)]
    return middles


def _chords(points: dict[float, float]) -> tuple[FloatArray, FloatArray]:
    """Returns epsilons, 128 to an interval, and the chords in e^epsilon there, rounded up.

    Between a and b the chord is delta_b + (delta_a - delta_b) (e^b - e^epsilon) / (e^b - e^a).
    """
    knots = np.array(sorted(points))
    values = np.minimum.accumulate([points[knot] for knot in knots.tolist()])  # delta does not increase
    low, high = knots[:-1, None], knots[1:, None]
    epsilons = low + (high - low) * (np.arange(_FINE) / _FINE)
    # PRIVACY: 1e-10 exceeds the rounding of the differences (test_no_point_of_a_fine_curve_is_above_the_summary)
    share = np.expm1(epsilons - high) / np.expm1(low - high) * (1 + 1e-10)
    chords = values[1:, None] + (values[:-1, None] - values[1:, None]) * share
    deltas = np.append(np.minimum(chords, 1.0), values[-1])
    return np.append(epsilons, knots[-1]), np.minimum.accumulate(deltas)
