"""Exact privacy of the Gaussian mechanism, its inverses, and its sum over a contracting chain of steps.

A release with sensitivity Delta and noise std s is dominated by the pair N(0, 1), N(mu, 1) with mu = Delta / s: it is
mu-GDP. Its smallest delta at epsilon is

    delta(epsilon, mu) = Phi(mu/2 - epsilon/mu) - e^epsilon Phi(-mu/2 - epsilon/mu),

and releases with mu_1, mu_2, .. compose to sqrt(mu_1^2 + mu_2^2 + ..), also under adaptivity. The inverses return the
conservative side: `gaussian_mu` is rounded down, `gaussian_epsilon` and `gaussian_sigma` are rounded up.

The classical sqrt(2 log(1.25/delta)) / epsilon is not offered: it falls short for large epsilon.

Noisy gradient descent on a strongly convex objective has a cost that converges. Full-batch steps w <- w - eta (g(w) + s
N(0, I)) on a sum objective that is mu-strongly convex and beta-smooth, with 0 < eta < 2 / beta: the noiseless map is
c-Lipschitz, c = max(|1 - eta mu|, |1 - eta beta|) < 1, so that later steps forget. If only the last iterate is
released, its cost stays below that of about 2 / (1 - c) steps.

Shifted interpolation. On two neighboring data sets the maps are c-Lipschitz and differ by at most eta S everywhere. Let
z_0 = 0, z_(k+1) = c z_k + eta S - a_(k+1) >= 0 and z_T = 0: z_k bounds the distance that is left between the chains
when a_k of it has been handed to the noise of step k, at the price of GDP with level a_k / (eta s). The last iterates
are GDP with level sqrt(sum a_k^2) / (eta s). The constraint is sum c^(T-k) a_k = eta S (1 - c^T) / (1 - c), so that by
Cauchy-Schwarz a_k proportional to c^(T-k) is the best (all z_k >= 0, since a_k increases with k), and

    mu = (S/s) sqrt( (1 - c^T) / (1 + c^T) * (1 + c) / (1 - c) ).

Quadratic objectives with gradients that differ by a constant attain it.

Source: docs/proofs/accounting.md#gaussian-mechanism, docs/proofs/output.md#noisy-gradient-descent; Balle and Wang 2018;
Bok, Su and Altschuler 2024 (the method is theirs).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping

import numpy as np
import scipy
from scipy.special import erfcx, ndtr

from torch_dpsco import _validate as check
from torch_dpsco.accounting.analysis.rounding import FloatArray

SENSITIVITIES: Mapping[str, float] = {"replace_one": 2.0, "zero_out": 1.0, "add_remove": 1.0}

# The inverses aim at log(delta) (1 + _SLACK): more than the error of the kernel, so that rounding cannot undo them.
_SLACK = 1e-12
KERNEL = 1e-12  # relative error of log(delta)
_INVERSE = 1e-13  # of mu: room for what 1/sigma and sqrt(mu^2) round
_ROUNDING = 2e-15  # of epsilon / mu - mu / 2, relative to its terms: it matters for mu > 1e3


def sensitivity_factor(adjacency: str) -> float:
    """Returns the l2 sensitivity of a sum of rows clipped at 1: 2 for replace_one, 1 for zero_out and add_remove.

    Raises:
        ValueError: unknown adjacency.

    Example:
        >>> sensitivity_factor("replace_one"), sensitivity_factor("zero_out")
        (2.0, 1.0)
    """
    return SENSITIVITIES[check.choice(SENSITIVITIES, adjacency=adjacency)]


def gaussian_delta(mu: float, epsilon: float) -> float:
    """Returns the smallest delta for which a mu-GDP Gaussian release is (epsilon, delta)-DP.

    Args:
        mu: sensitivity / noise std, >= 0 (inf: no noise).
        epsilon: >= 0; at 0 the result is the total variation distance.

    Returns:
        delta in [0, 1].

    Raises:
        ValueError: mu or epsilon is negative or not a number, or epsilon is infinite.

    Source: docs/proofs/accounting.md#gaussian-mechanism.

    Example:
        >>> round(gaussian_delta(mu=1.0, epsilon=1.0), 6)
        0.126937
    """
    return math.exp(gaussian_log_delta(epsilon, mu))


def gaussian_log_delta(epsilon: float, mu: float) -> float:
    """Returns log(delta(epsilon, mu)), accurate where delta itself underflows.

    Args:
        epsilon: >= 0.
        mu: sensitivity / noise std, >= 0 (inf: no noise).

    Returns:
        log(delta) <= 0; -inf for mu = 0.

    Raises:
        ValueError: mu or epsilon is negative or not a number, or epsilon is infinite.

    Source: docs/proofs/accounting.md#gaussian-mechanism.

    Example:
        >>> round(gaussian_log_delta(epsilon=0.5, mu=0.02), 4)
        -323.5235
    """
    epsilon = check.nonnegative(epsilon=epsilon)
    mu = check.nonnegative(mu=mu, allow_inf=True)
    return float(log_delta_curve(np.array([epsilon]), mu)[0])


def profile(epsilon: float, mu: float) -> float:
    """Returns delta(epsilon, mu) for any real epsilon, rounded up.

    For epsilon < 0 it is 1 - e^epsilon + e^epsilon delta(-epsilon, mu), by the symmetry of the Gaussian pair.

    Example:
        >>> round(profile(1.0, 1.0), 6), round(profile(-1.0, 1.0), 6)
        (0.126937, 0.678818)
    """
    # PRIVACY: a tail of 1e-300 keeps its sign and size (test_profiles_are_never_below_their_high_precision_values)
    delta = math.exp(gaussian_log_delta(abs(epsilon), mu) * (1 - KERNEL))
    if epsilon < 0:
        delta = -math.expm1(epsilon) + math.exp(epsilon) * delta
    return min(1.0, delta * (1 + 1e-15))


# the batches of one pass all ask for the same figure
@functools.lru_cache(maxsize=256, typed=True)
def gaussian_epsilon(mu: float, delta: float) -> float:
    """Returns the smallest epsilon for which a mu-GDP Gaussian release is (epsilon, delta)-DP, rounded up.

    Args:
        mu: sensitivity / noise std, >= 0 (inf: no noise).
        delta: in (0, 1).

    Returns:
        epsilon >= 0; inf where mu^2 overflows.

    Raises:
        ValueError: mu is negative or not a number, or delta is not in (0, 1).

    Guarantee: gaussian_delta(mu, epsilon) <= delta for the epsilon returned.

    Source: docs/proofs/accounting.md#gaussian-mechanism.

    Example:
        >>> round(gaussian_epsilon(mu=1.0, delta=1e-5), 4)
        4.3772
    """
    mu = check.nonnegative(mu=mu, allow_inf=True)
    target = _target(delta)

    def excess(epsilon: float) -> float:
        return gaussian_log_delta(epsilon, mu) - target

    if excess(0.0) <= 0:
        return 0.0
    # delta <= Phi(-u) <= exp(-u^2/2) / 2 with u = epsilon/mu - mu/2 >= 0: at this epsilon delta is half the target.
    upper = mu * (mu / 2 + math.sqrt(-2 * math.log(delta))) * (1 + _SLACK)
    return safe_root(excess, 0.0, upper) * (1 + _ROUNDING) if upper < math.inf else math.inf


@functools.lru_cache(maxsize=256, typed=True)
def gaussian_mu(epsilon: float, delta: float) -> float:
    """Returns the largest mu for which mu-GDP implies (epsilon, delta)-DP, rounded down.

    Args:
        epsilon: >= 0.
        delta: in (0, 1).

    Returns:
        mu > 0.

    Raises:
        ValueError: epsilon is negative or not finite, or delta is not in (0, 1).

    Guarantee: gaussian_delta(mu, epsilon) <= delta and gaussian_epsilon(mu, delta) <= epsilon for the mu returned.

    Source: docs/proofs/accounting.md#gaussian-mechanism.

    Example:
        >>> round(gaussian_mu(epsilon=1.0, delta=1e-5), 6)
        0.268051
    """
    epsilon = check.nonnegative(epsilon=epsilon)
    # Two slacks below what gaussian_epsilon aims at, so that the kernel's error cannot put epsilon(mu) above epsilon:
    # a budget would refuse the very noise that was calibrated for it.
    target = _target(delta) * (1 + 2 * _SLACK)

    def excess(minus_log_mu: float) -> float:
        return gaussian_log_delta(epsilon, math.exp(-minus_log_mu)) - target

    # Half of a mu that is feasible for certain, by delta <= exp(-u^2/2) / 2 (see above) or by delta <= mu / sqrt(2 pi).
    reach = math.sqrt(-2 * math.log(delta))
    feasible = (
        max(
            2 * epsilon / (reach + math.sqrt(reach**2 + 2 * epsilon)),
            delta * math.sqrt(2 * math.pi),
        )
        / 2
    )
    infeasible = 2 * feasible
    while gaussian_log_delta(epsilon, infeasible) <= target:
        infeasible *= 2
    mu = math.exp(-safe_root(excess, -math.log(infeasible), -math.log(feasible)))
    return mu * (1 - _INVERSE)


def gaussian_sigma(epsilon: float, delta: float, sensitivity: float) -> float:
    """Returns the least noise std that makes a Gaussian release (epsilon, delta)-DP, rounded up.

    Args:
        epsilon: >= 0.
        delta: in (0, 1).
        sensitivity: L2 sensitivity of the released vector under the adjacency asked for, > 0.

    Returns:
        Noise std per coordinate, in the unit of `sensitivity`.

    Raises:
        ValueError: an argument is out of range.

    Guarantee: (epsilon, delta)-DP of one release, for the adjacency under which `sensitivity` holds.

    Source: docs/proofs/accounting.md#gaussian-mechanism; Balle and Wang 2018.

    Example:
        >>> round(gaussian_sigma(epsilon=1.0, delta=1e-5, sensitivity=2.0), 4)
        7.4613
    """
    sensitivity = check.positive(sensitivity=sensitivity)
    mu = gaussian_mu(epsilon, delta)
    sigma = max(sensitivity / mu, math.ulp(0.0))
    while (
        sensitivity / sigma > mu
    ):  # PRIVACY: the division rounds (test_sigma_never_falls_short_of_the_exact_noise)
        sigma = math.nextafter(sigma, math.inf)
    return sigma


def log_delta_curve(epsilon: FloatArray, mu: float) -> FloatArray:
    """Returns log(delta(epsilon, mu)) for an array of epsilons; no argument checks.

    With u = epsilon/mu - mu/2, v = u + mu and the Mills ratio R(x) = (1 - Phi(x)) / phi(x),
    delta = phi(u) (R(u) - R(v)). For u <= -1, delta > 0.6 and it is evaluated as 1 - (Phi(u) + phi(u) R(v)).
    """
    if mu == 0:
        return np.full_like(epsilon, -np.inf)
    if math.isinf(mu):
        return np.zeros_like(epsilon)
    with np.errstate(
        all="ignore"
    ):  # epsilon/mu may overflow and R underflow; both mean delta = 0
        middle = epsilon / mu
        u = middle - mu / 2
        log_density = -(u**2) / 2 - math.log(2 * math.pi) / 2
        rest = ndtr(u) + np.exp(log_density) * _mills(middle + mu / 2)
        near_one = np.log1p(-np.minimum(rest, 0.5))
        result: FloatArray = np.where(
            u <= -1, near_one, log_density + np.log(_mills_drop(middle, mu))
        )
    return result


def _mills(x: FloatArray) -> FloatArray:
    ratio: FloatArray = math.sqrt(math.pi / 2) * erfcx(x / math.sqrt(2))
    return ratio


def _mills_drop(middle: FloatArray, mu: float) -> FloatArray:
    """Returns R(m - mu/2) - R(m + mu/2) for m >= 0, by the difference or, where that cancels, from the slope of R.

    The drop is about R mu / (1 + m), so the difference loses (1 + m) / mu ulps. Below mu = 1e-3 (1 + m) the integral of
    -R' is taken by Gauss' rule of two points: what it leaves out is less than 1e-13 of it.
    """
    difference: FloatArray = _mills(np.maximum(middle - mu / 2, -1.0)) - _mills(middle + mu / 2)
    cancels = mu < 1e-3 * (1 + middle)
    if not cancels.any():
        return difference
    apart = mu / math.sqrt(12)
    slopes = _mills_fall(middle - apart) + _mills_fall(middle + apart)
    return np.where(cancels, mu * (slopes / 2), difference)


def _mills_fall(x: FloatArray) -> FloatArray:
    """Returns -R'(x) = 1 - x R for x > -1 or, for x > 12, from the asymptotic series of R."""
    inverse_square = 1 / np.maximum(x, 12.0) ** 2
    term = inverse_square
    far = np.zeros_like(x)
    for k in range(20):  # the first term left out is below 1e-16 of the sum
        far = far + term
        term = -(2 * k + 3) * term * inverse_square
    return np.where(x > 12, far, 1 - x * _mills(x))


def _target(delta: float) -> float:
    # PRIVACY: aims below delta, so that kernel errors cannot overspend (test_the_inverses_are_on_the_safe_side)
    return math.log(check.open_interval(0.0, 1.0, delta=delta)) * (1 + _SLACK)


def safe_root(excess: Callable[[float], float], low: float, high: float) -> float:
    """Returns the root of a decreasing function with excess(low) > 0 >= excess(high), moved up until excess <= 0."""
    tolerance = 1e-15 * max(abs(low), abs(high))
    root = float(
        scipy.optimize.brentq(excess, low, high, xtol=tolerance, rtol=1e-15, maxiter=500)
    )
    step = tolerance
    while excess(root) > 0:
        root = root + step
        step = 2 * step
    return root


_FEW_ROUNDINGS = 1e-14  # relative: more than that of a few operations


def noisy_gd_mu(steps: float, contraction: float, sensitivity: float, noise_std: float) -> float:
    """Returns mu of the last iterate of noisy gradient descent, rounded up.

    With x = log(1/c) it is (S/s) sqrt(tanh(T x / 2) / tanh(x / 2)), at most (S/s) sqrt(T), the cost of releasing all.

    Args:
        steps: T, an integer >= 0, or inf for the limit.
        contraction: c in [0, 1], a Lipschitz constant of the noiseless step on every data set; 1: it does not expand.
        sensitivity: S >= 0, bound on how far the sum gradients of neighboring data sets differ, at every point.
        noise_std: s > 0, std per coordinate of the noise on the sum gradient.

    Returns:
        mu >= 0; inf if c = 1 and T = inf.

    Raises:
        ValueError: an argument is out of range.

    Guarantee: mu-GDP of the last iterate alone, under the adjacency under which S holds, if c and S are promised for
        all points (or each step projects on a public convex set, and for all points of it), the start is public, every
        step uses all records, and no other iterate, and no function of one, is released. Never together with
        amplification by sampling.

    Source: docs/proofs/output.md#noisy-gradient-descent

    Example:
        >>> round(noisy_gd_mu(steps=50, contraction=0.9, sensitivity=1.0, noise_std=2.0), 6)
        2.168246
    """
    total = math.inf if steps == math.inf else float(check.count(steps=steps))
    contraction = check.between(0.0, 1.0, contraction=contraction)
    sensitivity = check.nonnegative(sensitivity=sensitivity)
    noise_std = check.positive(noise_std=noise_std)
    if sensitivity == 0 or total == 0:
        return 0.0
    if contraction == 0 or total == 1:
        growth = 1.0
    elif contraction == 1:
        growth = math.sqrt(total)
    else:
        rate = -math.log(contraction)
        growth = math.sqrt(math.tanh(total * rate / 2) / math.tanh(rate / 2))
    # PRIVACY: rounded up, and the quotient first: it may be subnormal (test_mu_is_the_exact_formula_rounded_up)
    return math.nextafter(sensitivity / noise_std, math.inf) * growth * (1 + _FEW_ROUNDINGS)
