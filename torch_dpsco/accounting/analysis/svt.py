"""AboveThreshold (the sparse vector technique): its constants, its error probabilities, and its sum with Gaussians.

The mechanism draws rho ~ Lap(b1) once and answers queries of one sensitivity D, each with nu_t ~ Lap(b2): query t
passes if s_t + nu_t >= theta + rho. It stops at the c-th answer of the kind that halts. Then it is epsilon-DP with

    epsilon = D / b1 + 2 c D / b2,

however long the stream is, also for queries chosen from earlier answers: shift rho by D to cover every answer that does
not halt, and each of the c others by 2 D (Lyu, Su and Li 2017, algorithm 7; the threshold is not drawn again).

Under the neighboring relation of one user replaced, the concentration score of the user-level filter, the number of
ordered pairs of users within a distance divided by n, moves by at most 2 (n - 1) / n: 2 (n - 1) pairs hold the user.

Source: docs/proofs/accounting.md#above-threshold, docs/proofs/user_level.md#concentration-score.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from torch_dpsco import _validate as check
from torch_dpsco._margin import up
from torch_dpsco.accounting.analysis.gaussian import gaussian_log_delta
from torch_dpsco.accounting.analysis.pure import pure_delta
from torch_dpsco.accounting.analysis.quadrature import FloatArray, nodes
from torch_dpsco.accounting.analysis.rounding import upper
from torch_dpsco.errors import InfeasibleError

_REACH = 60.0  # Laplace scales kept beyond the outermost breakpoint: the rest is below e^-60 of the result


class AboveThresholdScales(NamedTuple):
    """Laplace scales of the threshold and of each query."""

    threshold_scale: float
    query_scale: float


def above_threshold_epsilon(
    threshold_scale: float, query_scale: float, sensitivity: float, num_positives: int = 1
) -> float:
    """Returns the pure epsilon of one run of AboveThreshold, rounded up.

    Args:
        threshold_scale: b1 >= 0, Laplace scale of the threshold, drawn once.
        query_scale: b2 >= 0, Laplace scale of each query, drawn anew.
        sensitivity: D >= 0 of every query, under the adjacency asked for.
        num_positives: c >= 1, answers of the halting kind before the run ends.

    Returns:
        D / b1 + 2 c D / b2; inf if a scale is 0 and D > 0.

    Raises:
        ValueError: an argument is out of range.

    Guarantee: epsilon-DP of the whole run, for any number of adaptive queries; a restart is a new run.

    Source: docs/proofs/accounting.md#above-threshold.

    Example:
        >>> round(above_threshold_epsilon(threshold_scale=2.0, query_scale=4.0, sensitivity=1.0), 12)
        1.0
    """
    scales = (
        check.nonnegative(threshold_scale=threshold_scale),
        check.nonnegative(query_scale=query_scale),
    )
    sensitivity = check.nonnegative(sensitivity=sensitivity)
    positives = check.positive_count(num_positives=num_positives)
    if sensitivity == 0:
        return 0.0
    if min(scales) == 0:
        return math.inf
    # PRIVACY: four roundings of at most 2^-53 each (test_epsilon_is_not_below_its_exact_value)
    return (sensitivity / scales[0] + 2 * positives * (sensitivity / scales[1])) * (1 + 1e-15)


def above_threshold_scales(
    epsilon: float, sensitivity: float, num_positives: int = 1, threshold_share: float = 0.5
) -> AboveThresholdScales:
    """Returns scales that make a run epsilon-DP: b1 = D / (share epsilon), b2 = 2 c D / ((1 - share) epsilon).

    Args:
        epsilon: > 0.
        sensitivity: D > 0.
        num_positives: c >= 1.
        threshold_share: part of epsilon that pays for the threshold, in (0, 1).

    Returns:
        The scales, rounded up so that `above_threshold_epsilon` of them is at most epsilon.

    Raises:
        ValueError: an argument is out of range.

    Source: docs/proofs/accounting.md#above-threshold.

    Example:
        >>> [round(scale, 9) for scale in above_threshold_scales(epsilon=0.5, sensitivity=1.0)]
        [4.0, 8.0]
    """
    epsilon = check.positive(epsilon=epsilon)
    sensitivity = check.positive(sensitivity=sensitivity)
    positives = check.positive_count(num_positives=num_positives)
    share = check.open_interval(0.0, 1.0, threshold_share=threshold_share)
    unit = (
        sensitivity / epsilon * (1 + 4e-15)
    )  # more than all roundings here and in above_threshold_epsilon
    return AboveThresholdScales(unit / share, 2 * positives * (unit / (1 - share)))


def concentration_score_sensitivity(n_users: int) -> float:
    """Returns the exact sensitivity 2 (n - 1) / n of the concentration score to the replacement of one user.

    Not 1, as published: AboveThreshold run for sensitivity 1 at epsilon / 2 spends about epsilon.

    Args:
        n_users: >= 1; public.

    Returns:
        The sensitivity under REPLACE_ONE and ZERO_OUT, rounded up.

    Source: docs/proofs/user_level.md#concentration-score.

    Example:
        >>> concentration_score_sensitivity(4)
        1.5
    """
    n = check.positive_count(n_users=n_users)
    return upper(Fraction(2 * (n - 1), n))


def laplace_difference_tail(margin: float, threshold_scale: float, query_scale: float) -> float:
    """Returns P[nu - rho > margin] for independent nu ~ Lap(query_scale) and rho ~ Lap(threshold_scale).

    With b the larger and s the smaller scale, u = m (b - s) / (b s), and for margin m >= 0,

        P = e^(-m/b) / 2 (1 + s m / (b (b + s)) (1 - e^-u) / u),

    which for equal scales is e^(-m/b) (1/2 + m / (4b)); P(-m) = 1 - P(m).

    Args:
        margin: any finite number.
        threshold_scale: > 0.
        query_scale: > 0.

    Returns:
        The probability.

    Raises:
        ValueError: an argument is out of range.

    Source: docs/proofs/accounting.md#above-threshold.

    Example:
        >>> laplace_difference_tail(margin=0.0, threshold_scale=2.0, query_scale=3.0)
        0.5
    """
    margin = check.finite(margin=margin)
    one = check.positive(threshold_scale=threshold_scale)
    other = check.positive(query_scale=query_scale)
    small = min(one, other)
    large = max(one, other)
    reach = abs(margin) / large
    u = reach * (large - small) / small
    shape = -math.expm1(-u) / u if u > 0 else 1.0
    tail = math.exp(-reach) / 2 * (1 + reach * (small / (large + small)) * shape)
    return tail if margin >= 0 else 1 - tail


def bad_pass_probability(
    margin: float, steps: int, threshold_scale: float, query_scale: float
) -> float:
    """Returns the probability beta that one of `steps` queries passes although it lies `margin` below the threshold.

    beta = P[max_t nu_t - rho > margin] = integral of f_b1(r) (1 - F_b2(margin + r)^steps) dr, for adaptive queries too:
    a pass below needs the maximum of the noises to exceed margin + rho. Never above the union bound
    steps * laplace_difference_tail.

    Args:
        margin: theta minus the largest score that counts as bad; any finite number.
        steps: T >= 1.
        threshold_scale: b1 > 0.
        query_scale: b2 > 0.

    Returns:
        beta in [0, 1], rounded up by 1e-9 of it.

    Raises:
        ValueError: an argument is out of range.

    Guarantee: beta bounds the failure of kind `transcript` of the filtered mean.

    Source: docs/proofs/accounting.md#above-threshold.

    Example:
        >>> round(bad_pass_probability(margin=20.83, steps=1, threshold_scale=4.0, query_scale=8.0), 6)
        0.048418
    """
    margin = check.finite(margin=margin)
    steps = check.positive_count(steps=steps)
    threshold = check.positive(threshold_scale=threshold_scale)
    query = check.positive(query_scale=query_scale)

    def some_pass(r: FloatArray) -> FloatArray:
        return -np.expm1(steps * _log_cdf((margin + r) / query))

    top = query * math.log(steps)  # about the maximum of the noises
    integral = _mean_over_laplace(threshold, query, [0.0, -margin, top - margin], some_pass)
    union = steps * laplace_difference_tail(margin, threshold, query)
    # PRIVACY: 1e-9 exceeds the quadrature error (test_bad_pass_probability_is_not_below_its_integral); margin of the
    # tail (docs/proofs/accounting.md#renyi-integrals)
    return min(1.0, integral * (1 + 1e-9), up(union, 1e-9))


def bad_pass_margin(
    failure: float, steps: int, threshold_scale: float, query_scale: float
) -> float:
    """Returns the least margin >= 0 with steps * laplace_difference_tail(margin) <= failure, rounded up.

    Args:
        failure: bound on `bad_pass_probability`, in (0, 1).
        steps: T >= 1.
        threshold_scale: b1 > 0.
        query_scale: b2 > 0.

    Source: docs/proofs/accounting.md#above-threshold: the union form costs next to nothing unless b1 is well above
    b2.

    Example:
        >>> round(bad_pass_margin(failure=0.01, steps=100, threshold_scale=4.0, query_scale=8.0), 3)
        70.439
    """
    failure = check.open_interval(0.0, 1.0, failure=failure)
    steps = check.positive_count(steps=steps)
    low = 0.0
    high = threshold_scale + query_scale
    while steps * laplace_difference_tail(high, threshold_scale, query_scale) > failure:
        low = high
        high = 2 * high
    while low < (middle := (low + high) / 2) < high and high - low > 1e-12 * high:
        fits = steps * laplace_difference_tail(middle, threshold_scale, query_scale) <= failure
        if fits:
            high = middle
        else:
            low = middle
    return high


def svt_gaussian_delta(epsilon: float, epsilon_svt: float, mu: float) -> float:
    """Returns delta at epsilon of an AboveThreshold run interleaved with Gaussian releases, rounded up.

    The run is randomized response followed by a Markov kernel, also one answer at a time, so that the pair is
    randomized response beside one Gaussian: delta = p dG(epsilon - eA) + (1 - p) dG(epsilon + eA), with
    p = e^eA / (1 + e^eA) and dG the hockey stick of N(mu, 1) and N(0, 1) at any real epsilon.

    Args:
        epsilon: >= 0.
        epsilon_svt: eA >= 0, pure epsilon of the run.
        mu: >= 0, of all Gaussian releases together: sqrt(releases) sensitivity / noise std.

    Returns:
        delta in [0, 1].

    Raises:
        ValueError: an argument is out of range.

    Guarantee: (epsilon, delta)-DP of the interleaved mechanism, for the adjacency of both sensitivities.

    Source: docs/proofs/accounting.md#noisy-tests-beside-gaussians.

    Example:
        >>> round(svt_gaussian_delta(epsilon=1.0, epsilon_svt=0.5, mu=0.3), 6)
        0.004714
    """
    epsilon = check.nonnegative(epsilon=epsilon)
    svt = check.nonnegative(epsilon_svt=epsilon_svt)
    mu = check.nonnegative(mu=mu)
    likely = 1 / (1 + math.exp(-svt))
    rare = math.exp(-svt) * likely
    delta = likely * _gaussian_hockey_stick(epsilon - svt, mu) + rare * _gaussian_hockey_stick(
        epsilon + svt, mu
    )
    return min(1.0, delta * (1 + 1e-14))


def svt_gaussian_mu(epsilon: float, delta: float, epsilon_svt: float) -> float:
    """Returns the largest mu of Gaussian releases that fits beside an AboveThreshold run, rounded down.

    Args:
        epsilon: >= 0, of both together.
        delta: in (0, 1), of both together.
        epsilon_svt: >= 0, pure epsilon of the run.

    Returns:
        mu > 0 with svt_gaussian_delta(epsilon, epsilon_svt, mu) <= delta.

    Raises:
        ValueError: an argument is out of range.
        InfeasibleError: the run alone exceeds the budget.

    Source: docs/proofs/accounting.md#noisy-tests-beside-gaussians.

    Example:
        >>> round(svt_gaussian_mu(epsilon=1.0, delta=1e-6, epsilon_svt=0.2), 6)
        0.19837
    """
    epsilon = check.nonnegative(epsilon=epsilon)
    delta = check.open_interval(0.0, 1.0, delta=delta)
    svt = check.nonnegative(epsilon_svt=epsilon_svt)
    low = 0.0
    high = 1.0
    if svt_gaussian_delta(epsilon, svt, low) >= delta:
        raise InfeasibleError(
            f"delta must be > {pure_delta(epsilon, svt):g} beside epsilon_svt = {svt:g} at epsilon"
            f" = {epsilon:g} (got {delta:g})"
        )
    while svt_gaussian_delta(epsilon, svt, high) <= delta:
        low = high
        high = 2 * high
    if low == 0:
        low = high
        while svt_gaussian_delta(epsilon, svt, low) > delta:
            high = low
            low = low / 2
    # invariant: low fits, high does not
    while high > low * (1 + 1e-13) and low < (middle := (low + high) / 2) < high:
        if svt_gaussian_delta(epsilon, svt, middle) <= delta:
            low = middle
        else:
            high = middle
    return low


def _gaussian_hockey_stick(epsilon: float, mu: float) -> float:
    """Returns H_t(N(mu, 1) || N(0, 1)) at t = e^epsilon for any real epsilon; H_t = 1 - t + t H_(1/t) by symmetry."""
    log_delta = gaussian_log_delta(abs(epsilon), mu)
    # margin: the kernel is accurate to 1e-12 of the log (docs/proofs/accounting.md#renyi-integrals)
    delta = math.exp(log_delta * (1 - 1e-12)) if math.isfinite(log_delta) else 0.0
    return delta if epsilon >= 0 else -math.expm1(epsilon) + math.exp(epsilon) * delta


def _log_cdf(y: FloatArray) -> FloatArray:
    """Returns log F(y) of the standard Laplace distribution, to relative accuracy on both sides."""
    tail = np.exp(-np.abs(y)) / 2
    return np.where(y >= 0, np.log1p(-tail), -np.abs(y) - math.log(2))


def _mean_over_laplace(
    scale: float,
    query_scale: float,
    breaks: list[float],
    function: Callable[[FloatArray], FloatArray],
) -> float:
    """Returns E[function(rho)], rho ~ Lap(scale), by panels that start small at every break and double.

    Between breaks the integrand is a product of exponentials e^(c r): a panel of a quarter of its distance to the break
    is short enough wherever e^(c distance) still matters.
    """
    finest = min(scale, query_scale) / 2
    low = min(breaks) - _REACH * scale
    high = max(breaks) + _REACH * scale
    doublings = max(1, math.ceil(4 * math.log2((high - low) / finest)))
    offsets = finest * 2.0 ** (np.arange(doublings + 1) / 4)
    around = np.concatenate([-offsets, [0.0], offsets])
    edges = np.concatenate([[low, high], *(at + around for at in breaks)])
    edges = np.unique(edges[(edges >= low) & (edges <= high)])
    r, weight = nodes(edges)
    with np.errstate(under="ignore"):
        density = np.exp(-np.abs(r) / scale) / (2 * scale)
        return float(np.sum(weight * density * function(r)))
