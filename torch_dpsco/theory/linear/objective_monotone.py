"""Objective perturbation for losses whose derivative keeps its sign: as private as a Gaussian mechanism, except for c.

For logistic, smoothed hinge and all other nonincreasing losses of a margin, h = phi' x of `objective` has a
known direction: h = -t u, t in [0, L], u fixed by the record. Under the data set that theta is drawn from, the log
ratio of the densities of b is (t^2 + 2 t sigma N) / (2 sigma^2), N standard normal. It is convex in t, so that,
whatever t is (it depends on theta), it is at most its larger value at the ends, max(0, G), G = s^2/2 + s N: the
positive part of the loss of a Gaussian mechanism with mu = s = L / sigma. The determinant adds c = log(1 + beta/lam),
but only where theta is drawn under the larger data set, whose determinant is the larger. Hence, with delta(., s) the
Gaussian profile,

    larger to smaller      delta(epsilon - c, s)  for epsilon >= c
    smaller to larger      delta(epsilon, s)      for epsilon >= 0.

`objpert_delta_monotone` is the first, which is the larger one. The divergence of the pair is convex in e^epsilon, so
that for epsilon below a point c + e it also lies under the tangent of the first curve from the second at epsilon = 0.
The pair of distributions with exactly this profile dominates the mechanism (Zhu, Dong and Wang 2022), under composition
too. Its loss is G for G < 0; 0 with probability A = Phi(-s/2) - m; and c + G for G > e, where

    m = e^-c Phi(-s/2 - e/s)      and      Phi(s/2 - e/s) - m = delta(0, s).

`objpert_rdp_dominating` is its Renyi divergence: near a s^2/2 at small orders, where E exp(k (c + max(0, G))) exceeds
c.

One record replaced: h = t' u' - t u, and the loss is at most c plus the largest of 0 and the Gaussian losses at the
three other corners of [0, L]^2, of levels s, s and at most 2 s.

Differs from the literature in: all of the above (no published statement of it is known to us).

Source: docs/proofs/objective.md#losses-of-one-sign, docs/proofs/objective.md#the-dominating-curve.
"""

from __future__ import annotations

import functools
import math

import scipy

from torch_dpsco import _validate as check
from torch_dpsco._margin import down
from torch_dpsco.accounting.analysis.gaussian import gaussian_delta, gaussian_mu
from torch_dpsco.algorithms.clip_numbers import sensitivity_factor
from torch_dpsco.theory.linear.integrals import (
    least_noise,
    log_normal_cdf,
    profile,
    shifted_profile,
)
from torch_dpsco.theory.linear.objective import log_det, noise_level, spare_epsilon

_ROUNDING = 1e-13  # relative to the terms of a sum


def objpert_delta_monotone(
    epsilon: float,
    noise_std: float,
    reg: float,
    lipschitz: float,
    smoothness: float,
    adjacency: str = "add_remove",
) -> float:
    """Returns delta(epsilon - c, s), the Gaussian profile, and 1 for epsilon < c.

    One record replaced: delta(epsilon - c, 2 s) + 2 delta(epsilon - c, s), at most 1.

    Args:
        epsilon: >= 0.
        noise_std: sigma > 0, of b.
        reg: lam > 0, in sum form.
        lipschitz: L > 0, bound on the gradient of a loss at every theta of R^d.
        smoothness: beta >= 0, bound on phi'' |x|^2 at every theta of R^d.
        adjacency: "add_remove", "zero_out" or "replace_one".

    Returns:
        delta in [0, 1], rounded up.

    Raises:
        ValueError: an argument is out of range.

    Guarantee: under the adjacency, for losses phi(theta.x; y) with phi convex, phi' of one sign for each record, and
        twice differentiable (almost everywhere, with a Lipschitz derivative); an exact minimizer; b drawn once. A
        record that is set to zero has no loss.

    Source: docs/proofs/objective.md#losses-of-one-sign

    Example:
        >>> round(objpert_delta_monotone(0.5, noise_std=3.0, reg=2.0, lipschitz=1.0, smoothness=0.25), 9)
        0.024998702
    """
    left = check.nonnegative(epsilon=epsilon) - log_det(reg, smoothness)
    return (
        min(1.0, _sum(left, 0.0, noise_level(lipschitz, noise_std), adjacency))
        if left >= 0
        else 1.0
    )


def objpert_rdp_dominating(
    order: float,
    noise_std: float,
    reg: float,
    lipschitz: float,
    smoothness: float,
    adjacency: str = "add_remove",
) -> float:
    """Returns the Renyi divergence of the pair that dominates the mechanism, the larger one of both directions.

    log(e^g Phi(-(k + 1/2) s) + A + e^(k c + g) Phi((k + 1/2) s - e/s)) / k, g = k (k+1) s^2/2, k = a - 1, and, from the
    smaller to the larger data set, log(e^g Phi((k + 1/2) s) + A + e^(g - (k+1) c) Phi(-(k + 1/2) s - e/s)) / k.

    One record replaced: the divergence is convex in e^epsilon and at most delta(epsilon - c, 2 s) +
    2 delta(epsilon - c, s) in both directions, a sum of which the Renyi moment is linear: R(2 s) + 2 R(s) - 2 R(0),
    R(s) the moment of the symmetric pair of the profile delta(epsilon - c, s), R(0) that of randomized response at c.

    Args:
        order: a > 1.
        noise_std: sigma > 0, of b.
        reg: lam > 0, in sum form.
        lipschitz: L > 0, bound on the gradient of a loss at every theta of R^d.
        smoothness: beta >= 0, bound on phi'' |x|^2 at every theta of R^d.
        adjacency: "add_remove", "zero_out" or "replace_one".

    Guarantee: as `objpert_delta_monotone`; a bound of a Renyi divergence, for an `RDPCurve`.

    Source: docs/proofs/objective.md#the-dominating-curve, docs/proofs/objective.md#replaced-records-of-one-sign.

    Example:
        >>> round(objpert_rdp_dominating(8, noise_std=10.0, reg=5.0, lipschitz=1.0, smoothness=0.25), 6)
        0.058393
    """
    k = check.order(order=order) - 1
    level = noise_level(lipschitz, noise_std)
    determinant = log_det(reg, smoothness)
    if sensitivity_factor(adjacency) == 2:
        log_moment = _replaced_log_moment(k, level, determinant)
    else:
        log_moment = _dominating_log_moment(k, level, determinant)
    # margin: rounded up (docs/proofs/objective.md#integrals)
    return (log_moment * (1 + _ROUNDING) + 1e-13) / k


def _dominating_log_moment(k: float, level: float, determinant: float) -> float:
    gauss = k * (k + 1) * level * level / 2
    far = (k + 0.5) * level
    bend = _tangent(level, determinant)
    slope = math.exp(-determinant + log_normal_cdf(-level / 2 - bend))
    atom = math.exp(log_normal_cdf(-level / 2)) - slope
    middle = [math.log(atom)] if atom > 0 else []
    with_record = [
        gauss + log_normal_cdf(-far),
        *middle,
        k * determinant + gauss + log_normal_cdf(far - bend),
    ]
    without = [
        gauss + log_normal_cdf(far),
        *middle,
        gauss - (k + 1) * determinant + log_normal_cdf(-far - bend),
    ]
    return max(0.0, _log_sum(with_record), _log_sum(without))


@functools.lru_cache(maxsize=256)  # all orders of a curve share one
def _tangent(level: float, determinant: float) -> float:
    """Returns e / s, the root of Phi(s/2 - z) - e^-c Phi(-s/2 - z) = delta(0, s)."""
    if determinant == 0:
        return 0.0
    total_variation = gaussian_delta(level, 0.0)

    def gap(z: float) -> float:
        upper = log_normal_cdf(level / 2 - z)
        lower = log_normal_cdf(-level / 2 - z)
        # e^u - e^(l - c), as e^u (1 - e^(l - c - u)): both are tiny far out
        return (
            upper + math.log(-math.expm1(lower - determinant - upper)) - math.log(total_variation)
        )

    if gap(0.0) <= 0:  # c is below the rounding of the profile
        return 0.0
    high = level + 1.0
    while gap(high) > 0:
        high *= 2
    return float(scipy.optimize.brentq(gap, 0.0, high, xtol=1e-14))


def _replaced_log_moment(k: float, level: float, determinant: float) -> float:
    """Returns log(R(2 s) + 2 R(s) - 2 R(0))."""
    flat, once, twice = (
        _symmetric_log_moment(k, times * level, determinant) for times in (0, 1, 2)
    )
    shares = [math.exp(twice - twice), 2 * math.exp(once - twice), -2 * math.exp(flat - twice)]
    return twice + math.log(math.fsum(shares))


def _symmetric_log_moment(k: float, level: float, determinant: float) -> float:
    """Returns log R(s), the moment of the symmetric pair with the profile delta(epsilon - c, s).

    R(s) = e^g (e^(k c) Phi((k+1/2) s) + e^(-(k+1) c) Phi(-(k+1/2) s)) + tanh(c/2) Phi(-s/2) (e^(k c) + e^(-(k+1) c)).
    """
    rise = k * determinant
    fall = -(k + 1) * determinant
    gauss = k * (k + 1) * level * level / 2
    far = (k + 0.5) * level
    terms = [gauss + rise + log_normal_cdf(far), gauss + fall + log_normal_cdf(-far)]
    if determinant > 0:
        atom = math.log(math.tanh(determinant / 2)) + log_normal_cdf(-level / 2)
        terms += [atom + rise, atom + fall]
    return _log_sum(terms)


def amp_delta_monotone(
    epsilon: float,
    noise_std: float,
    reg: float,
    lipschitz: float,
    smoothness: float,
    mu_out: float,
    adjacency: str = "add_remove",
) -> float:
    """Returns E[delta(epsilon - c - max(0, G), mu_out)]: objective perturbation, then a noisy approximate minimizer.

    One record replaced: by the same corners, A(2 s) + 2 A(s) - 2 delta(epsilon - c, mu_out), A(s) the value above.

    Args:
        epsilon: >= 0.
        noise_std: sigma > 0, of b.
        reg: lam > 0, in sum form.
        lipschitz: L > 0, bound on the gradient of a loss at every theta of R^d.
        smoothness: beta >= 0, bound on phi'' |x|^2 at every theta of R^d.
        mu_out: 2 tau / (lam sigma_out) >= 0; 0 stands for an exact minimizer.
        adjacency: "add_remove", "zero_out" or "replace_one".

    Guarantee: as `objpert_delta_monotone`, for points with a gradient of norm <= tau, released with
        N(0, sigma_out^2 I).

    Source: docs/proofs/objective.md#approximate-minimizers

    Example:
        >>> round(amp_delta_monotone(0.5, 3.0, reg=2.0, lipschitz=1.0, smoothness=0.25, mu_out=0.05), 6)
        0.025926
    """
    if check.nonnegative(mu_out=mu_out) == 0:
        return objpert_delta_monotone(epsilon, noise_std, reg, lipschitz, smoothness, adjacency)
    left = check.nonnegative(epsilon=epsilon) - log_det(reg, smoothness)
    return min(1.0, _sum(left, mu_out, noise_level(lipschitz, noise_std), adjacency))


def amp_sigma_monotone(
    epsilon: float,
    delta: float,
    reg: float,
    lipschitz: float,
    smoothness: float,
    mu_out: float,
    adjacency: str = "add_remove",
) -> float:
    """Returns the least sigma with `amp_delta_monotone` <= delta, rounded up.

    Args:
        epsilon: > 0.
        delta: in (0, 1).
        reg: lam > 0, in sum form.
        lipschitz: L > 0, bound on the gradient of a loss at every theta of R^d.
        smoothness: beta >= 0, bound on phi'' |x|^2 at every theta of R^d.
        mu_out: 2 tau / (lam sigma_out) >= 0; 0 stands for an exact minimizer.
        adjacency: "add_remove", "zero_out" or "replace_one".

    Raises:
        ValueError: an argument is out of range.
        InfeasibleError: epsilon <= c, or mu_out alone uses delta up.

    Guarantee: as `amp_delta_monotone`.

    Source: docs/proofs/objective.md#approximate-minimizers

    Example:
        >>> round(amp_sigma_monotone(1.0, 1e-6, 1.0, lipschitz=1.0, smoothness=0.25, mu_out=0.01), 4)
        5.3497
    """
    left = spare_epsilon(epsilon, reg, smoothness)
    start = check.positive(lipschitz=lipschitz) / gaussian_mu(left, delta)
    why_not = (
        f"mu_out = {mu_out:g} alone exceeds delta = {delta:g} at epsilon = {epsilon:g}: use a"
        " smaller one"
    )

    def spent(sigma: float) -> float:
        return amp_delta_monotone(epsilon, sigma, reg, lipschitz, smoothness, mu_out, adjacency)

    return least_noise(spent, delta, start, why_not)


def _sum(left: float, mu_out: float, level: float, adjacency: str) -> float:
    """Returns E[delta(left - max(0, G), mu_out)], or its sum over the corners."""
    if sensitivity_factor(adjacency) == 1:
        return _one_corner(left, mu_out, level)
    # PRIVACY: t and t' are 0 or L each (test_no_records_of_a_plane_pass_the_bounds); margin of what
    # is taken off (docs/proofs/objective.md#integrals)
    shared = down(profile(left, mu_out), 1e-9) if mu_out else 0.0
    return _one_corner(left, mu_out, 2 * level) + 2 * (_one_corner(left, mu_out, level) - shared)


def _one_corner(left: float, mu_out: float, level: float) -> float:
    if mu_out == 0:
        return profile(left, level)
    at_zero = math.exp(log_normal_cdf(-level / 2)) * profile(left, mu_out)
    return at_zero * (1 + 1e-14) + shifted_profile(
        left - level * level / 2, level, 0, mu_out, -level / 2
    )


def _log_sum(terms: list[float]) -> float:
    top = max(terms)
    return top + math.log(math.fsum(math.exp(term - top) for term in terms))
