"""Shuffled binomial noise: the Renyi divergence of a binomial law and its shift, on a window.

In the shuffled sum each of N public coins adds a bit that is 1 with probability p, so that a coordinate of the count is
k + Bin(N, p), and a neighboring data set shows k +- s + Bin(N, p). The supports differ: no order has a finite
divergence. So let W be a set of outcomes, P = Bin(N, p), Q its shift, and P_W the law P given W. Then, for any event E,

    P(E) <= P_W(E) + P(not W),
    D_a(P_W || Q) = [ log sum_W P^a Q^(1-a) - a log P(W) ] / (a - 1),

and (epsilon, delta) from the divergence holds for P and Q at delta + P(not W). In compositions of d coordinates P is
(1 - P(not W))^d times the product of the P_W plus a rest, so that divergences add up and at most d P(not W) is added.

Exchanging the data sets turns the shift by s into one by -s, and the divergence returned is the larger of both.

Source: heavytail spec, sections 2.7 and 6; Cheu, Joseph, Mao and Peng 2021 (the protocol).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom

from torch_dpsco import _validate
from torch_dpsco.errors import ConditionError, InfeasibleError

__all__ = ["BinomialShift", "rdp_binomial_shift"]

FloatArray = NDArray[np.float64]

_POINTS = 1 << 22  # of a window, about 200 MB
_UNIT = 2.0**-53
_TAIL = 1e-8  # relative: more than the error of the binomial tails for all N with at most _POINTS points


class BinomialShift(NamedTuple):
    """A Renyi divergence that holds except for a probability.

    Args:
        rdp: of one coordinate, >= 0; coordinates add up.
        lost_mass: to be added to delta once per coordinate.
    """

    rdp: float
    lost_mass: float


def rdp_binomial_shift(
    trials: int, noise_probability: float, shift: int, order: float, delta_window: float
) -> BinomialShift:
    """Returns the divergence of order a between Bin(N, p) on a window and Bin(N, p) +- s, and the mass off the window.

    The window is central, with at most delta_window / 2 cut off at each end, less what only one of the laws can reach.
    For a s much below sqrt(N p (1 - p)) the divergence is about a s^2 / (2 N p (1 - p)).

    Args:
        trials: N >= 1, noise bits of a coordinate, from all honest users together.
        noise_probability: p in (0, 1).
        shift: s >= 1, the most that one record moves the count.
        order: a > 1.
        delta_window: in (0, 1).

    Returns:
        rdp and lost_mass, both rounded up.

    Raises:
        ValueError: an argument is out of range.
        ConditionError: the window is empty, since the shift is too large for N.
        InfeasibleError: the window has more than 2^22 points.

    Guarantee: replace-one, for a record that moves the count by s in either direction: (epsilon, delta)-DP from the
        Renyi divergences of all coordinates, with their lost masses added to delta. Smaller shifts have their own
        divergence, which is not proved to be smaller.

    Source: heavytail spec, sections 2.7 and 6.

    Example:
        >>> bound = rdp_binomial_shift(trials=3000, noise_probability=0.5, shift=6, order=10, delta_window=1e-8)
        >>> round(bound.rdp, 6), round(bound.lost_mass, 12)
        (0.240165, 8.601e-09)
    """
    trials, shift = _validate.positive_count(trials=trials), _validate.positive_count(shift=shift)
    p = _validate.open_interval(0.0, 1.0, noise_probability=noise_probability)
    order = _validate.order(order=order)
    half = _validate.open_interval(0.0, 1.0, delta_window=delta_window) / 2
    low = max(int(binom.ppf(half, trials, p)), shift)
    high = min(int(binom.isf(half, trials, p)), trials - shift)
    if low > high:
        raise ConditionError(f"shift must leave a window within {trials} trials (got {shift})")
    if high - low + 2 * shift >= _POINTS:
        raise InfeasibleError(f"trials and shift must give a window of at most {_POINTS} points (got {high - low})")
    # PRIVACY: what is off the window is rounded up (test_the_lost_mass_of_many_trials_is_the_exact_one_rounded_up)
    lost = float(binom.cdf(low - 1, trials, p) + binom.sf(high, trials, p)) * (1 + _TAIL)
    if lost >= 1:
        raise ConditionError(f"shift must leave a window within {trials} trials (got {shift})")
    steps = _log_ratios(trials, p, low - shift + 1, high + shift)
    return BinomialShift(_divergence(steps, shift, order) - math.log1p(-lost), lost)


def _log_ratios(trials: int, p: float, first: int, last: int) -> FloatArray:
    """Returns log P(y) / P(y - 1) = log((N - y + 1) p / (y (1 - p))) for y = first..last."""
    y = np.arange(first, last + 1, dtype=np.float64)
    ratios: FloatArray = np.log(((trials - y + 1) * p) / (y * (1 - p)))
    return ratios


def _divergence(steps: FloatArray, shift: int, order: float) -> float:
    """Returns log(sum w (P/Q)^(a-1)) / (a - 1), w = P / P(W), for the worse direction of the shift, rounded up.

    log P is the running sum of the steps, up to a constant: exact enough for ratios near 1, where the difference of two
    logarithms of factorials is not.
    """
    running = np.concatenate([[0.0], np.cumsum(steps)])  # log P on the window and the shift beyond each end of it
    running -= running.max()
    inside = running[shift:-shift]
    log_weight = inside - math.log(float(np.exp(inside).sum()))
    each = _UNIT * (8 + float(np.abs(running).max()))  # error of a step and of its summation
    bounds = []
    for moved in (running[: -2 * shift], running[2 * shift :]):  # P moved up, and down
        gain = (order - 1) * (inside - moved)
        if np.abs(gain).max() < 1:
            weight, change = np.exp(log_weight), np.expm1(gain)
            log_mean = math.log1p(float(weight @ change))
            spread = float(weight @ np.abs(change)) / math.exp(log_mean)
        else:
            peak = float((log_weight + gain).max())
            log_mean = peak + math.log(float(np.exp(log_weight + gain - peak).sum()))
            spread = 1.0
        # PRIVACY: errors of the losses, the weights and the sums (test_the_divergence_is_the_exact_one_rounded_up)
        error = (2 * running.size * each * spread + 16 * _UNIT * (1 + float(np.abs(gain).max())) * spread) / (order - 1)
        bounds.append(log_mean / (order - 1) + 2 * shift * each + error)
    return max(0.0, *bounds)
