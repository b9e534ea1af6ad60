"""Pure differential privacy converted to other notions of privacy, and the K-norm mechanism.

Of all epsilon-DP pairs, randomized response

    P = (p, 1 - p),   Q = (1 - p, p),   p = e^epsilon / (1 + e^epsilon),

is the worst: every epsilon-DP pair is an image of it under a common Markov kernel (Kairouz, Oh and Viswanath 2015),
also one answer at a time. Its Renyi divergence is

    (a - 1) D_a = log(1 + E),   E = 2 sinh(a epsilon / 2) sinh((a - 1) epsilon / 2) / cosh(epsilon / 2)
                = (a - 1) epsilon + log1p(e^(-(2a - 1) epsilon)) - log1p(e^-epsilon).

Laplace noise of scale b = 1/t on a number of sensitivity 1 is better at every order: its density is known, and

    (a - 1) D_a = log( a/(2a-1) e^((a-1) t) + (a-1)/(2a-1) e^(-a t) ).

Both are evaluated by the logarithm of their excess E, a sum or product of positive terms, so that neither 1 + E rounds
to 1 nor anything overflows.

The L2 K-norm mechanism has noise of density proportional to exp(-epsilon |z|_2 / sensitivity), in R^dim. Measure z in
units of the sensitivity. Between a data set and a neighbor the center moves by v, |v| <= 1; the moment E exp(c (|Z - v|
- |Z|)) is convex and even in v, so |v| = 1 is the worst. The privacy loss is epsilon eta with

    eta = |z - v| - |z|  in [-1, 1],

one of the two elliptic coordinates with foci 0 and v. The other, xi = |z - v| + |z|, has the density
(xi^2 - 1)^((dim-3)/2) (xi^2 - eta^2) e^(-epsilon xi / 2), and integrates to Bessel functions K: under either center,
eta has the density (for the neighbor with the opposite sign in the exponent)

    e^(epsilon eta / 2) (1 - eta^2)^((dim-3)/2) (kappa + 1 - eta^2) / constant,
    kappa = 2 (dim - 1) / epsilon * K_(nu+1)(epsilon / 2) / K_nu(epsilon / 2),     nu = dim / 2 - 1.

So the loss is symmetric, every quantity is one integral over eta = sin(theta) in (0, 1), and (a - 1) D_a has even a
closed form in Bessel functions, which the tests use (its functions overflow for large dim).

Source: docs/proofs/accounting.md#pure-mechanisms, docs/proofs/accounting.md#laplace-noise,
docs/proofs/accounting.md#k-norm-noise, docs/proofs/output.md#k-norm-noise; Mironov 2017.

AboveThreshold (the sparse vector technique): its constants, its error probabilities, and its sum with Gaussians.

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

import numpy as np

from torch_dpsco.accounting.analysis.gaussian import profile
from torch_dpsco.accounting.analysis.rdp import (
    FloatArray,
    by_order,
    divergence,
    nodes,
    rounded_up,
    two_sided,
)
from torch_dpsco.accounting.analysis.rounding import up, upper
from torch_dpsco.errors import InfeasibleError

_LEAST = 1e-300  # a smaller cost is rounded up to it: below, products underflow and numbers lose digits


def rdp_laplace(scale: float, order: FloatArray) -> FloatArray:
    """Returns the Renyi divergence of Laplace noise on a number of sensitivity 1.

    Args:
        scale: b >= 0, the scale of the noise over the sensitivity under the adjacency asked for.
        order: Renyi orders a > 1.

    Returns:
        D_a, rounded up; inf for scale = 0.

    Guarantee: one release of a number with that sensitivity, whatever the adjacency of the sensitivity; or of a vector
    with that L1 sensitivity and independent noise of that scale: (a - 1) D_a is convex in t and 0 at 0, so that the
    costs of the coordinates add up to at most that of the sum of their shifts.

    Source: docs/proofs/accounting.md#laplace-noise; Mironov 2017, proposition 6.

    Example:
        >>> rdp_laplace(scale=1.0, order=np.array([2.0])).round(6)
        array([0.619124])
    """
    return _cost(1 / scale if scale > 0 else math.inf, order, _laplace_log_excess)


def rdp_pure(epsilon: float, order: FloatArray) -> FloatArray:
    """Returns the largest Renyi divergence that an epsilon-DP mechanism can have: that of randomized response.

    Args:
        epsilon: >= 0 (inf allowed).
        order: Renyi orders a > 1.

    Returns:
        D_a, rounded up, and never above epsilon.

    Guarantee: every epsilon-DP mechanism, interactive ones included, under the adjacency of its epsilon.

    Source: docs/proofs/accounting.md#pure-mechanisms.

    Example:
        >>> rdp_pure(epsilon=1.0, order=np.array([2.0])).round(6)
        array([0.735326])
    """
    # PRIVACY: the pair is the worst of all (test_no_random_epsilon_dp_pair_costs_more_than_randomized_response)
    return _cost(epsilon, order, _response_log_excess)


def rho_pure(epsilon: float) -> float:
    """Returns the least rho for which epsilon-DP implies rho-zCDP: epsilon tanh(epsilon / 2).

    The privacy loss L of randomized response is +-epsilon with mean m = epsilon tanh(epsilon / 2), and by Kearns and
    Saul (1998) log E[e^(t (L - m))] <= m t^2: that is the optimal proxy variance 2m of a two-point law. So
    (a - 1) D_a = log E[e^((a-1) L)] <= m (a - 1) a, with equality as a -> 1. It is below epsilon^2 / 2 and epsilon.

    Args:
        epsilon: >= 0 (inf allowed).

    Returns:
        rho, rounded up.

    Guarantee: every epsilon-DP mechanism is rho-zCDP, under the adjacency of its epsilon.

    Source: docs/proofs/accounting.md#pure-mechanisms.

    Example:
        >>> round(rho_pure(1.0), 6)
        0.462117
    """
    if epsilon == 0:
        return 0.0
    # PRIVACY: 2e-15 exceeds the rounding of tanh and product (test_rho_is_not_below_its_high_precision_value)
    return min(epsilon, max(_LEAST, epsilon * math.tanh(epsilon / 2) * (1 + 2e-15)))


def _response_log_excess(epsilon: float, order: FloatArray) -> FloatArray:
    """Returns log E of randomized response, from the product of two positive terms."""
    rise = (order - 1) * epsilon
    product = np.expm1(-order * epsilon) * np.expm1(-rise)
    log_excess: FloatArray = rise + np.log(product) - math.log1p(math.exp(-epsilon))
    return log_excess


def _laplace_log_excess(inverse: float, order: FloatArray) -> FloatArray:
    """Returns log E of Laplace noise; `inverse` is t = 1/scale.

    With h(y) = e^y - 1 - y, (2a - 1) E = a h((a-1) t) + (a - 1) h(-a t): the terms linear in t cancel and are left out.
    """
    excess = order - 1
    up = np.log(order) + _log_bend(excess * inverse)
    down = np.log(excess) + _log_bend(-order * inverse)
    return np.logaddexp(up, down) - np.log(2 * order - 1)


def _log_bend(y: FloatArray) -> FloatArray:
    """Returns log(e^y - 1 - y), by its series for |y| < 1."""
    near = np.clip(y, -1.0, 1.0)
    total = np.zeros_like(y)
    for k in range(22, 1, -1):  # sum of y^(k-2) / k!; what is left out is below 1e-22
        total = total * near + 1 / math.factorial(k)
    above = y + np.log1p(-(1 + y) * np.exp(-np.maximum(y, 1.0)))
    far = np.where(y > 0, above, np.log(np.expm1(np.minimum(y, 0.0)) - y))
    return np.where(np.abs(y) < 1.0, 2 * np.log(np.abs(near)) + np.log(total), far)


def _cost(
    epsilon: float, order: FloatArray, log_excess: Callable[[float, FloatArray], FloatArray]
) -> FloatArray:
    """Returns D_a of a mechanism that is epsilon-DP, rounded up; what underflows is the least cost that is reported."""
    if epsilon == 0 or math.isinf(epsilon):
        return np.full_like(order, epsilon)
    with np.errstate(all="ignore"):
        log_moment = log_excess(epsilon, order)
        # log(1 + E) <= E, and nearly E where that is tiny
        tiny = np.exp(log_moment - np.log(order - 1))
        value = np.where(log_moment < -40, tiny, np.logaddexp(0.0, log_moment) / (order - 1))
    # PRIVACY: covers rounding and underflow (test_no_curve_is_below_its_high_precision_value)
    return np.minimum(np.maximum(rounded_up(value), _LEAST), epsilon)


_DEPTH = 50.0  # what lies e^-50 below the peak of an integrand is left out
_PANELS = 32
_NODES, _WEIGHTS = nodes(np.linspace(0.0, 1.0, _PANELS + 1))
_LOG_WEIGHTS = np.log(_WEIGHTS)
_LEAST_EPSILON = 1e-100  # below, the bound of randomized response serves: products underflow


def rdp_l2_knorm(epsilon: float, dim: int, order: FloatArray) -> FloatArray:
    """Returns the Renyi divergence of one K-norm release.

    For moderate a epsilon it is about a epsilon^2 / (2 dim), the price of a Gaussian of nearly equal energy, and far
    below that of other epsilon-DP mechanisms; it tends to epsilon as a grows.

    Args:
        epsilon: >= 0, the pure epsilon of the release: the noise has the scale sensitivity / epsilon.
        dim: >= 1, coordinates of the release.
        order: Renyi orders a > 1.

    Returns:
        D_a, rounded up, and never above `rdp_pure`.

    Guarantee: one release of a vector with that L2 sensitivity, whatever the adjacency of the sensitivity.

    Source: docs/proofs/accounting.md#k-norm-noise.

    Example:
        >>> rdp_l2_knorm(epsilon=1.0, dim=100, order=np.array([2.0])).round(7)
        array([0.0099988])
    """
    worst = rdp_pure(epsilon, order)
    if epsilon < _LEAST_EPSILON:
        return worst
    if dim == 1:
        return np.minimum(rdp_laplace(1 / epsilon, order), worst)
    # PRIVACY: quadrature errors are below what is added (test_the_curve_is_not_below_its_closed_form)
    found = by_order(lambda block: divergence(block, _log_excess(epsilon, dim, block)), order)
    return np.minimum(found, worst)


def _log_excess(epsilon: float, dim: int, order: FloatArray) -> FloatArray:
    """Returns log E, E = E_Q[r^a] - 1, by the two-sided kernel: Q has the exponent -loss / 2 on loss > 0."""
    column = order[:, None]
    log_excess = _log_integral(
        epsilon,
        dim,
        (order - 0.5) * epsilon,
        lambda loss: two_sided(column, loss) - column * loss,
    )
    return log_excess - _log_total(epsilon, dim)


def _log_total(epsilon: float, dim: int) -> float:
    """Returns the log of the constant of the density of eta."""
    slopes = np.array([epsilon / 2])
    return float(_log_integral(epsilon, dim, slopes, lambda loss: np.log1p(np.exp(-loss)))[0])


def _log_integral(
    epsilon: float,
    dim: int,
    slopes: FloatArray,
    kernel: Callable[[FloatArray], FloatArray],
    start: float = 0.0,
) -> FloatArray:
    """Returns log of the integral over theta in (start, pi/2) of w(theta) exp(slope sin(theta) + kernel(loss)).

    loss = epsilon sin(theta) and w = cos^(dim-2)(theta) (1 + cos^2(theta) / kappa): the Jacobian cancels the pole that
    dim = 2 has in eta, and w is entire. Each slope has nodes of its own, 32 panels of 16 points on the interval where
    slope sin + (dim-2) log cos, which is concave in theta, is within e^-50 of its peak.

    Args:
        epsilon: > 0.
        dim: >= 2.
        slopes: (K,) each > 0.
        kernel: maps (K, nodes) losses to logarithms <= log 2, which grow at most as a power of theta.
        start: lower end, in [0, pi/2).
    """
    low, high = _window(slopes, dim, start)
    theta = low[:, None] + (high - low)[:, None] * _NODES
    sine = np.sin(theta)
    with np.errstate(divide="ignore", under="ignore"):
        log_cosine = np.log1p(-sine * sine) / 2
        weight = (
            (dim - 2) * np.where(sine < 1, log_cosine, -800.0)
            if dim > 2
            else np.zeros_like(theta)
        )
        weight = weight + np.log1p(np.cos(theta) ** 2 / _kappa(epsilon, dim))
        terms = weight + slopes[:, None] * sine + kernel(epsilon * sine) + _LOG_WEIGHTS
        top = terms.max(axis=1)
        sums = np.sum(np.exp(terms - top[:, None]), axis=1)
        total: FloatArray = np.log(sums) + top + np.log(high - low)
    return total


def _window(slopes: FloatArray, dim: int, start: float) -> tuple[FloatArray, FloatArray]:
    """Returns the theta on both sides of the peak of slope sin + (dim-2) log cos where it has fallen by `_DEPTH`."""
    power = dim - 2
    sine = 2 * slopes / (power + np.hypot(power, 2 * slopes))
    peak = np.maximum(np.arcsin(np.minimum(sine, 1.0)), start)

    def fall(theta: FloatArray) -> FloatArray:
        # differences by product formulas: the values themselves may be 1e9 with a fall of 1
        half = (theta - peak) / 2
        drop: FloatArray = -2 * slopes * np.sin(half) * np.cos(peak + half)
        if power:
            ratio = np.maximum(np.cos(theta), 1e-320) / np.maximum(np.cos(peak), 1e-300)
            drop = drop - power * np.log(ratio)
        return drop

    def end(outside: FloatArray) -> FloatArray:
        inside = peak
        for _ in range(60):  # the outer end is kept: too wide is safe
            middle = (inside + outside) / 2
            deep = fall(middle) > _DEPTH
            outside = np.where(deep, middle, outside)
            inside = np.where(deep, inside, middle)
        return outside

    return end(np.full_like(peak, start)), end(np.full_like(peak, math.pi / 2))


def _kappa(epsilon: float, dim: int) -> float:
    """Returns 2 (dim-1) / epsilon * K_(nu+1)(x) / K_nu(x), nu = dim/2 - 1, x = epsilon/2.

    K_nu(x) = 1/2 integral over the real line of e^(nu t - x cosh t). The peak is at e^t = (nu + h) / x with
    h = hypot(nu, x). At a distance u from it the exponent has fallen by h (cosh u - 1) + nu (sinh u - u), which on the
    left is at least nu (|u| - 1), and 0.3 h u^2 for |u| < 1. The ratio is the mean of e^t; the trapezoid rule converges
    geometrically.
    """
    nu = dim / 2 - 1
    x = epsilon / 2
    h = math.hypot(nu, x)
    step = min(0.1, 0.4 / math.sqrt(h))
    right = math.acosh(1 + 2 * _DEPTH / h)
    left = math.sqrt(_DEPTH / 0.3 / h)
    if left > 1:
        left = math.log((nu + h) / x) + math.log(4 * _DEPTH / x) + 1
        left = min(left, _DEPTH / nu + 1) if nu > 0 else left
    u = np.arange(-math.ceil(left / step), math.ceil(right / step) + 1, dtype=np.float64) * step
    weight = np.exp(nu * u - (h + nu) / 2 * np.expm1(u) - x * x / (h + nu) / 2 * np.expm1(-u))
    mean = np.sum(weight * np.exp(u)) / np.sum(weight)
    return 2 * (dim - 1) / epsilon * (nu + h) / x * float(mean)


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

    Guarantee: epsilon-DP of the whole run, for any number of adaptive queries; a restart is a new run.

    Source: docs/proofs/accounting.md#above-threshold.

    Example:
        >>> round(above_threshold_epsilon(threshold_scale=2.0, query_scale=4.0, sensitivity=1.0), 12)
        1.0
    """
    if sensitivity == 0:
        return 0.0
    if min(threshold_scale, query_scale) == 0:
        return math.inf
    epsilon = sensitivity / threshold_scale + 2 * num_positives * (sensitivity / query_scale)
    # PRIVACY: four roundings of at most 2^-53 each (test_epsilon_is_not_below_its_exact_value)
    return epsilon * (1 + 1e-15)


def above_threshold_scales(
    epsilon: float, sensitivity: float, num_positives: int = 1, threshold_share: float = 0.5
) -> tuple[float, float]:
    """Returns scales (of threshold, queries) of an epsilon-DP run: D / (share epsilon), 2 c D / ((1 - share) epsilon).

    Args:
        epsilon: > 0.
        sensitivity: D > 0.
        num_positives: c >= 1.
        threshold_share: part of epsilon that pays for the threshold, in (0, 1).

    Returns:
        The scales, rounded up so that `above_threshold_epsilon` of them is at most epsilon.

    Source: docs/proofs/accounting.md#above-threshold.

    Example:
        >>> [round(scale, 9) for scale in above_threshold_scales(epsilon=0.5, sensitivity=1.0)]
        [4.0, 8.0]
    """
    # more than all roundings here and in above_threshold_epsilon
    unit = sensitivity / epsilon * (1 + 4e-15)
    return unit / threshold_share, 2 * num_positives * (unit / (1 - threshold_share))


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
    return upper(Fraction(2 * (n_users - 1), n_users))


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

    Source: docs/proofs/accounting.md#above-threshold.

    Example:
        >>> laplace_difference_tail(margin=0.0, threshold_scale=2.0, query_scale=3.0)
        0.5
    """
    small, large = sorted((threshold_scale, query_scale))
    reach = abs(margin) / large
    u = reach * (large - small) / small
    shape = -math.expm1(-u) / u if u > 0 else 1.0
    tail = math.exp(-reach) / 2 * (1 + reach * (small / (large + small)) * shape)
    return tail if margin >= 0 else 1 - tail


def bad_pass_probability(
    margin: float, steps: int, threshold_scale: float, query_scale: float
) -> float:
    """Returns a bound beta of the probability that one of `steps` queries passes, `margin` below the threshold or more.

    A pass below needs the maximum of the noises to exceed margin + rho, for adaptive queries too: beta is the union
    bound steps * laplace_difference_tail, little above P[max_t nu_t - rho > margin] where b1 is not well above b2.

    Args:
        margin: theta minus the largest score that counts as bad; any finite number.
        steps: T >= 1.
        threshold_scale: b1 > 0.
        query_scale: b2 > 0.

    Returns:
        beta in [0, 1], rounded up.

    Guarantee: beta bounds the failure of kind `transcript` of the filtered mean.

    Source: docs/proofs/accounting.md#above-threshold.

    Example:
        >>> round(bad_pass_probability(margin=20.83, steps=1, threshold_scale=4.0, query_scale=8.0), 6)
        0.048418
    """
    union = steps * laplace_difference_tail(margin, threshold_scale, query_scale)
    # PRIVACY: 1e-9 exceeds the rounding of the tail (test_bad_pass_probability_is_not_below_its_integral)
    return min(1.0, up(union, 1e-9))


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

    def fits(margin: float) -> bool:
        return steps * laplace_difference_tail(margin, threshold_scale, query_scale) <= failure

    low = 0.0
    high = threshold_scale + query_scale
    while not fits(high):
        low = high
        high = 2 * high
    return _bisected(fits, high, low, 1e-12)


def _bisected(fits: Callable[[float], bool], good: float, bad: float, share: float) -> float:
    """Returns a number that fits, next to one that does not, up to a share of it."""
    while abs(good - bad) > share * max(good, bad):
        middle = (good + bad) / 2
        if middle in (good, bad):
            break
        if fits(middle):
            good = middle
        else:
            bad = middle
    return good


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

    Guarantee: (epsilon, delta)-DP of the interleaved mechanism, for the adjacency of both sensitivities.

    Source: docs/proofs/accounting.md#noisy-tests-beside-gaussians.

    Example:
        >>> round(svt_gaussian_delta(epsilon=1.0, epsilon_svt=0.5, mu=0.3), 6)
        0.004714
    """
    likely = 1 / (1 + math.exp(-epsilon_svt))
    rare = math.exp(-epsilon_svt) * likely
    delta = likely * profile(epsilon - epsilon_svt, mu) + rare * profile(
        epsilon + epsilon_svt, mu
    )
    return min(1.0, delta * (1 + 9e-15))


def svt_gaussian_mu(epsilon: float, delta: float, epsilon_svt: float) -> float:
    """Returns the largest mu of Gaussian releases that fits beside an AboveThreshold run, rounded down.

    Args:
        epsilon: >= 0, of both together.
        delta: in (0, 1), of both together.
        epsilon_svt: >= 0, pure epsilon of the run.

    Returns:
        mu > 0 with svt_gaussian_delta(epsilon, epsilon_svt, mu) <= delta.

    Raises:
        InfeasibleError: the run alone exceeds the budget.

    Source: docs/proofs/accounting.md#noisy-tests-beside-gaussians.

    Example:
        >>> round(svt_gaussian_mu(epsilon=1.0, delta=1e-6, epsilon_svt=0.2), 6)
        0.19837
    """

    def fits(mu: float) -> bool:
        return svt_gaussian_delta(epsilon, epsilon_svt, mu) <= delta

    least = svt_gaussian_delta(epsilon, epsilon_svt, 0.0)
    if least >= delta:
        raise InfeasibleError(
            f"delta must be > {least:g} beside epsilon_svt = {epsilon_svt:g} at epsilon = {epsilon:g} (got"
            f" {delta:g})"
        )
    high = 1.0
    while fits(high):
        high = 2 * high
    return _bisected(fits, high / 2 if high > 1 else 0.0, high, 1e-13)
