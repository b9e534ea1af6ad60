"""Noise of output perturbation with independent batches (sampler "uniform"): how often a record is hit is random.

Each of the T - 1 steps holds the differing record with probability p = b/n, independently. Given the set H of hit
steps the answer is Gaussian with sensitivity Delta(H) (`RunPath`), and H has the same law for both data sets. The
hockey-stick divergence is jointly convex, so that

    delta(epsilon) <= sum_H Pr[H] delta_G(epsilon, Delta(H) / sigma),        delta_G the exact Gaussian curve,

even if the positions drawn are published. Two laws of Delta(H) that are never below the true one:

    count      every hit as large as the largest:  Delta = drift + k max_s hit_s,  k ~ Bin(T - 1, p)
    weighted   256 blocks of steps; the largest hit of a block rounded UP to u_j = 1..256 units; N_j ~ Bin(length, p);
               the law of sum_j u_j N_j by direct convolution (positive terms only: no cancellation, unlike the FFT)

What truncation loses, below 1e-40, goes into delta if it lies above, and to the next larger sensitivity if it lies
below. Where a record is hit thousands of times the unit is coarser (at least 16 units for the largest hit), so that
planning stays fast. A delta that would allow to release without any noise is refused.

Source: docs/proofs/holder.md#independent-batches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import gammaln, log_ndtr

from torch_dpsco.accounting.analysis.objective import least_noise
from torch_dpsco.accounting.analysis.rounding import scaled_up, up
from torch_dpsco.algorithms.holder_numbers import FloatArray, RunPath
from torch_dpsco.errors import ConditionError

_TAIL = 1e-40  # mass that truncation may lose, in all
_BLOCKS = 256
_UNITS = 256
_LEAST_UNITS = 16
_ATOMS = 2**16


@dataclass(frozen=True, eq=False)
class SensitivityLaw:
    """A law of sensitivities that dominates the true one.

    Args:
        sensitivities: (k,), >= 0.
        masses: (k,), rounded up; with `lost` they add up to 1 or a little more.
        lost: mass whose sensitivity is unbounded.
    """

    sensitivities: FloatArray
    masses: FloatArray
    lost: float

    def delta(self, sigma: float, epsilon: float) -> float:
        """Returns sum of mass times delta_G(epsilon, sensitivity / sigma), plus what is lost, rounded up."""
        positive = self.sensitivities > 0
        curve = np.exp(_log_delta(epsilon, self.sensitivities[positive] / sigma))
        # PRIVACY: rounded up (test_the_mixture_agrees_with_the_enumeration_of_all_hit_patterns); margin of
        # the sum (docs/proofs/rounding.md#model-of-arithmetic)
        return min(
            1.0,
            scaled_up(
                float(self.masses[positive] @ curve) + self.lost, int(positive.sum()) + 16
            ),
        )


def uniform_sigma(path: RunPath, sample_rate: float, epsilon: float, delta: float) -> float:
    """Returns the least noise std of output perturbation with independent batches, rounded up (weighted law).

    Args:
        path: see `run_path`.
        sample_rate: p = batch_size / n in (0, 1]; batches without replacement inside, independent of each other.
        epsilon: >= 0.
        delta: in (0, 1).

    Returns:
        sigma; 0 if the answer does not depend on the data (T = 1).

    Raises:
        ConditionError: delta is so large that no noise would be needed, or so small that truncation matters.
        ValueError: an argument is out of range.

    Guarantee: (epsilon, delta)-DP of the noised average, adjacency as in `run_path`.

    Source: docs/proofs/holder.md#independent-batches.

    Example:
        >>> from torch_dpsco.algorithms.holder_numbers import run_path
        >>> path = run_path([0.1] * 50, 1.0, holder_exponent=1.0, holder_constant=1.0, batch_size=1, hit_constant=2)
        >>> round(uniform_sigma(path, sample_rate=0.01, epsilon=1.0, delta=1e-3), 3)
        0.498
    """
    return _sigma(weighted_law(path, sample_rate), epsilon, delta)


def weighted_law(path: RunPath, sample_rate: float) -> SensitivityLaw:
    """Returns the law of drift + the hits, in blocks of steps and units of hits, each rounded up."""
    rate = sample_rate
    steps = path.hits.size
    edges = np.unique(np.linspace(0, steps, _BLOCKS + 1).astype(np.int64))
    largest = path.hits.max(initial=0.0)
    lengths = np.diff(edges)
    many = steps * rate + 14 * math.sqrt(steps * rate) + 40  # more hits than there will be
    levels = int(min(_UNITS, max(_LEAST_UNITS, _ATOMS / many)))
    unit = max(up(float(largest) / levels, 4 * 2.0**-53), math.ulp(0.0))
    # PRIVACY: at least one unit, so that nothing but the empty set has none
    # (test_a_hit_of_size_zero_still_pays_for_the_drift)
    units = np.maximum(1, np.ceil(np.maximum.reduceat(path.hits, edges[:-1]) / unit)).astype(
        np.int64
    )
    start = 0
    masses = np.ones(1)
    lost = 0.0
    for length, size in zip(lengths.tolist(), units.tolist(), strict=True):
        first, block, missing = _binomial(length, rate, _TAIL / (4 * _BLOCKS))
        start += first * size
        masses = _spread(masses, block, size)
        skipped, masses, above = _trimmed(masses, _TAIL / (4 * _BLOCKS))
        start = start + skipped
        lost = lost + missing + above
    masses = scaled_up(masses, 4 * len(units) * 64 + 64)
    return _law(path, start, masses, lost, unit)


def _law(
    path: RunPath, start: int, masses: FloatArray, lost: float, unit: float
) -> SensitivityLaw:
    """Returns the law of min(drift + k unit, cap), k = start, start + 1, ..; 0 at k = 0."""
    steps = start + np.arange(masses.size)
    moved = np.minimum(scaled_up(path.drift + unit * steps, 8), path.cap)
    return SensitivityLaw(np.where(steps == 0, 0.0, moved), masses, lost)


def _spread(masses: FloatArray, block: FloatArray, size: int) -> FloatArray:
    """Returns the law of X + size Y from the laws of X and Y, by direct convolution."""
    result = np.zeros(masses.size + (block.size - 1) * size)
    for k, mass in enumerate(block):
        result[k * size : k * size + masses.size] += mass * masses
    return result


def _trimmed(masses: FloatArray, tail: float) -> tuple[int, FloatArray, float]:
    """Returns (atoms cut below, law, mass cut above); what is cut below moves up to the first atom that stays."""
    low = int(np.searchsorted(np.cumsum(masses), tail))
    high = masses.size - int(np.searchsorted(np.cumsum(masses[::-1]), tail))
    kept = masses[low:high].copy()
    kept[0] += masses[:low].sum()
    return low, kept, float(masses[high:].sum())


def _binomial(trials: int, rate: float, tail: float) -> tuple[int, FloatArray, float]:
    """Returns (first k, masses from it on, mass above them) of Bin(trials, rate); mass below is moved up to first k."""
    if rate == 1 or trials == 0:
        return trials, np.ones(1), 0.0
    mean = trials * rate
    # Bernstein: a deviation x has probability at most exp(-x^2 / (2 (mean + x / 3))) on either side.
    log_tail = -math.log(tail)
    reach = log_tail / 3 + math.sqrt(log_tail**2 / 9 + 2 * mean * log_tail)
    low = max(0, math.floor(mean - reach))
    high = min(trials, math.ceil(mean + reach))
    masses = np.exp(_log_binomial(np.arange(low, high + 1.0), trials, rate))
    if low > 0:
        masses[0] += tail
    skipped, masses, above = _trimmed(masses, tail)
    return low + skipped, masses, above + tail  # the tail is also more than what underflows


def _log_binomial(k: FloatArray, trials: int, rate: float) -> FloatArray:
    """Returns upper bounds on log Pr[Bin(trials, rate) = k]."""
    if rate == 1:
        return np.where(k == trials, 0.0, -np.inf)
    choose = gammaln(trials + 1.0) - gammaln(k + 1) - gammaln(trials - k + 1)
    powers = k * math.log(rate) + (trials - k) * math.log1p(-rate)
    # PRIVACY: terms that cancel are rounded (test_binomial_masses_are_upper_bounds); margin of the terms
    # (docs/proofs/holder.md#independent-batches)
    slack = 16 * 2.0**-53 * (4 + float(gammaln(trials + 1.0)) + np.abs(powers))
    return np.asarray(choose + powers + slack)


def _log_delta(epsilon: float, mu: FloatArray) -> FloatArray:
    """Returns upper bounds on log delta_G(epsilon, mu) = log(Phi(x) - e^epsilon Phi(x - mu)), x = mu/2 - epsilon/mu."""
    with np.errstate(over="ignore"):
        first = log_ndtr(mu / 2 - epsilon / mu)
        second = epsilon + log_ndtr(-mu / 2 - epsilon / mu)
    known = np.isfinite(first)
    gap = np.zeros_like(mu)
    gap[known] = second[known] - first[known]
    # PRIVACY: log_ndtr errs by a few ulps of itself (test_the_curve_of_the_mixture_is_never_below_the_exact_one);
    # margin of the curve (docs/proofs/holder.md#independent-batches)
    error = 16 * 2.0**-53 * (4 + epsilon + np.abs(np.where(known, first, 0.0)) + mu**2)
    share = np.minimum(1.0, -np.expm1(np.minimum(gap, 0.0)) + error)
    return np.where(known, first + np.log(share) + error, -np.inf)


def _sigma(law: SensitivityLaw, epsilon: float, delta: float) -> float:
    """Returns the least sigma with law.delta(sigma, epsilon) <= delta, to a relative 1e-10, on the safe side."""
    positive = law.sensitivities > 0
    if not positive.any():
        return 0.0
    if not law.lost <= delta / 1e6:
        raise ConditionError(
            f"delta must be at least {law.lost * 1e6:g} for the sampler 'uniform' (got {delta:g})"
        )
    ever = float(law.masses[positive].sum())
    if ever <= delta:
        raise ConditionError(
            f"delta must be below {ever:g}, the probability that a record is used at all (got"
            f" {delta:g})"
        )
    return least_noise(
        lambda sigma: law.delta(sigma, epsilon),
        delta,
        float(law.sensitivities.max()),
        "no noise is enough",
    )
