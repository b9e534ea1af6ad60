"""The privacy of objective perturbation: integrals, a bound for all losses, and a better one for losses of one sign.

What one record can do is a `Change`; `amp_delta`, `amp_sigma` and `objpert_rdp` take one of either kind.

Integrals of log-concave functions and of Gaussian profiles, for the privacy of objective perturbation.

The integrands are densities times hockey-stick profiles. Both are log-concave, so that the logarithm has one peak and
falls on both sides: one window around the peak holds the integral, and 16-point Gauss-Legendre panels in it, refined
geometrically at a given corner, leave an error far below the 1e-9 by which results are enlarged.

Source: docs/proofs/objective.md#integrals

Objective perturbation: the general bounds, constants and the pure mechanism.

Losses whose derivative keeps its sign (logistic, smoothed hinge) have better bounds below. These hold for all smooth
losses of linear scores (Huber, softmax), whose constants are suprema over ALL of R^d: the minimizer is unbounded.
Squared, non-smooth and tilted losses are not covered.

theta minimizes sum_i l(theta; z_i) + (lam/2) |theta|^2 + b.theta, b ~ N(0, sigma^2 I). The map from b to theta is a
bijection for each data set, b = -(sum of gradients + lam theta), so that the density of theta is that of b times the
determinant of the Hessian. One record z more: the determinants have the ratio 1 + phi'' x' H^-1 x in [1, 1 + beta/lam],
and b moves by h = phi' x, |h| <= L. Under the data set that theta is drawn from, the log ratio of the densities of b is
at most |h|^2 / (2 sigma^2) + |h| |N| / sigma, N the part of b / sigma along x, a standard normal. In both directions

    privacy loss <= c + s^2 / 2 + s |N|,      c = log(1 + beta / lam),   s = L / sigma.

In general c bounds the log ratio of determinants, h lies in a subspace of k dimensions that is fixed by the two records
and has |h| <= D; then |N| is the length of a standard normal vector of R^k. No condition lam > beta is needed.

AMP: a point with a gradient of norm <= tau is within tau / lam of theta on each data set. It is released with noise of
std sigma_out: given theta, a Gaussian release with mu_out = 2 tau / (lam sigma_out).

Differs from the literature in: c is log(1 + beta/lam), not -log(1 - beta/lam); the output noise has twice the
sensitivity; integrals are rounded up.

Source: docs/proofs/objective.md#density-of-the-answer, docs/proofs/objective.md#several-dimensions; Redberg, Koskela
and Wang 2023; Iyengar et al. 2019.

Objective perturbation for losses whose derivative keeps its sign: as private as a Gaussian mechanism, except for c.

For logistic, smoothed hinge and all other nonincreasing losses of a margin, h = phi' x has a
known direction: h = -t u, t in [0, L], u fixed by the record. Under the data set that theta is drawn from, the log
ratio of the densities of b is (t^2 + 2 t sigma N) / (2 sigma^2), N standard normal. It is convex in t, so that,
whatever t is (it depends on theta), it is at most its larger value at the ends, max(0, G), G = s^2/2 + s N: the
positive part of the loss of a Gaussian mechanism with mu = s = L / sigma. The determinant adds c = log(1 + beta/lam),
but only where theta is drawn under the larger data set, whose determinant is the larger. Hence, with delta(., s) the
Gaussian profile,

    larger to smaller      delta(epsilon - c, s)  for epsilon >= c
    smaller to larger      delta(epsilon, s)      for epsilon >= 0.

The first is the larger one. The divergence of the pair is convex in e^epsilon, so
that for epsilon below a point c + e it also lies under the tangent of the first curve from the second at epsilon = 0.
The pair of distributions with exactly this profile dominates the mechanism (Zhu, Dong and Wang 2022), under composition
too. Its loss is G for G < 0; 0 with probability A = Phi(-s/2) - m; and c + G for G > e, where

    m = e^-c Phi(-s/2 - e/s)      and      Phi(s/2 - e/s) - m = delta(0, s).

`objpert_rdp` is its Renyi divergence: near a s^2/2 at small orders, where E exp(k (c + max(0, G))) exceeds
c.

One record replaced: h = t' u' - t u, and the loss is at most c plus the largest of 0 and the Gaussian losses at the
three other corners of [0, L]^2, of levels s, s and at most 2 s.

Differs from the literature in: all of the above (no published statement of it is known to us).

Source: docs/proofs/objective.md#losses-of-one-sign, docs/proofs/objective.md#the-dominating-curve.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import scipy
from scipy.special import log_ndtr, xlogy

from torch_dpsco import _validate as check
from torch_dpsco.accounting.analysis.gaussian import (
    KERNEL,
    gaussian_delta,
    gaussian_mu,
    log_delta_curve,
    profile,
    safe_root,
    sensitivity_factor,
)
from torch_dpsco.accounting.analysis.rdp import nodes
from torch_dpsco.accounting.analysis.rounding import FloatArray, down, safe, scaled_up
from torch_dpsco.errors import InfeasibleError

_PANELS = 48
_DEPTH = 50.0  # nats below the peak where the window ends: what lies outside is below 1e-18 of the integral
_ENLARGED = (
    1e-9  # more than the quadrature error (test_quadratures_are_never_below_the_integral)
)
_DOUBLINGS = 40


def log_profile(epsilon: FloatArray, mu: float) -> FloatArray:
    """Returns log(delta(epsilon, mu)) at an array of real epsilons."""
    log_delta = log_delta_curve(np.abs(epsilon), mu)
    with np.errstate(divide="ignore", over="ignore", under="ignore"):
        below = np.logaddexp(
            np.log(-np.expm1(np.minimum(epsilon, 0.0))), np.minimum(epsilon, 0.0) + log_delta
        )
    return np.where(epsilon < 0, np.minimum(below, 0.0), log_delta)


def log_chi_density(radius: FloatArray, dim: int) -> FloatArray:
    """Returns the log density of the length of a standard normal vector of R^dim."""
    constant = (dim / 2 - 1) * math.log(2) + math.lgamma(dim / 2)
    density: FloatArray = xlogy(dim - 1, radius) - radius**2 / 2 - constant
    return density


def log_concave_integral(
    log_f: Callable[[FloatArray], FloatArray],
    low: float,
    high: float,
    corner: float = math.inf,
    width: float = 1.0,
) -> float:
    """Returns the log of the integral of f over (low, high), enlarged; f log-concave.

    Args:
        log_f: log f at an array of points.
        low: finite.
        high: finite, beyond the peak and all that matters.
        corner: where f bends on the scale `width`; inf for nowhere.
        width: > 0.
    """
    left, right = _window(log_f, low, high)
    edges = np.linspace(left, right, _PANELS + 1)
    steps = width / 4 * 2.0 ** np.arange(60)
    if left - steps[-1] < corner < right + steps[-1]:
        near = corner + np.concatenate([-steps, [0.0], steps])
        edges = np.union1d(edges, near[(near > left) & (near < right)])
    points, weights = nodes(edges)
    terms = log_f(points) + np.log(weights)
    top = float(np.max(terms))
    if top == -math.inf:
        return -math.inf
    log_total = top + math.log(float(np.sum(np.exp(terms - top))))
    # PRIVACY: quadrature errors only on the safe side (test_quadratures_are_never_below_the_integral)
    return log_total + abs(log_total) * KERNEL + _ENLARGED


def _window(
    log_f: Callable[[FloatArray], FloatArray], low: float, high: float
) -> tuple[float, float]:
    """Returns an interval outside of which f is more than `_DEPTH` nats below its peak: too wide is safe."""
    for _ in range(12):
        grid = np.linspace(low, high, 129)
        values = log_f(grid)
        inside = np.flatnonzero(values >= np.max(values) - _DEPTH)
        before = max(inside[0] - 1, 0)
        after = min(inside[-1] + 1, 128)
        nearer = float(grid[before]), float(grid[after])
        if nearer == (low, high):
            break
        low, high = nearer
    return low, high


def shifted_profile(
    epsilon: float, shift: float, dim: int, mu: float, low: float = 0.0
) -> float:
    """Returns the integral over t > low of p(t) delta(epsilon - s t, mu), enlarged.

    p is the density of the length of a standard normal vector of R^dim, or, for dim = 0, of a normal variable.

    Args:
        epsilon: real.
        shift: s > 0.
        dim: >= 0.
        mu: > 0.
        low: lower end.
    """
    # the length is beyond it with probability < e^(-39^2/2) < 1e-320
    reach = math.sqrt(max(dim, 1)) + 39.0

    def log_f(t: FloatArray) -> FloatArray:
        kernel = log_profile(epsilon - shift * t, mu)
        if dim == 0:
            return kernel - t**2 / 2 - math.log(2 * math.pi) / 2
        return kernel + log_chi_density(t, dim)

    log_total = log_concave_integral(log_f, low, reach, epsilon / shift, mu / shift)
    return min(1.0, math.exp(min(0.0, log_total)) + sys.float_info.min)


def least_noise(
    delta_of: Callable[[float], float], delta: float, start: float, why_not: str
) -> float:
    """Returns the least sigma with delta_of(sigma) <= delta, for a decreasing function, to 1e-10 and rounded up.

    Args:
        delta_of: delta as a function of sigma > 0.
        delta: in (0, 1).
        start: > 0, where the search begins.
        why_not: message if no sigma works.

    Raises:
        InfeasibleError: no sigma up to 2^40 times the start works.
    """

    @functools.cache
    def excess(sigma: float) -> float:
        return math.log1p(max((delta_of(sigma) - delta) / delta, 1e-16 - 1))

    high = start
    while excess(high) > 0:
        high *= 2
        if high > start * 2.0**_DOUBLINGS:
            raise InfeasibleError(why_not)
    low = high / 2
    while excess(low) <= 0 and low > start * 2.0**-_DOUBLINGS:
        high = low
        low = low / 2
    # PRIVACY: what was checked (test_the_noise_meets_its_delta_and_hardly_less_does_not)
    return safe_root(excess, low, high) if excess(low) > 0 else high


AMP_MU_OUT = 0.01  # default level of the noise on the output
AMP_PURE_SHARE = 0.01  # share of a pure epsilon for the noise on the output
_ROUNDING = 1e-13  # relative to the terms of a Renyi divergence or of a sum


def log_det(reg: float, smoothness: float) -> float:
    """Returns c = log(1 + beta / lam), rounded up: how much one record of rank one can change the determinant.

    Args:
        reg: lam > 0, in sum form.
        smoothness: beta >= 0, bound on phi'' |x|^2 at every theta.

    Source: docs/proofs/objective.md#one-record-and-the-determinant

    Example:
        >>> round(log_det(reg=5.0, smoothness=0.25), 9)
        0.048790164
    """
    return scaled_up(math.log1p(scaled_up(smoothness / reg, 1)), 4) if smoothness else 0.0


def hessian_sensitivity(smoothness: float, adjacency: str) -> float:
    """Returns how far one record moves the sum of Hessians phi'' x x' in the Frobenius norm at any point, rounded up.

    Args:
        smoothness: beta >= 0, bound on phi'' |x|^2 of a record.
        adjacency: beta under add_remove and zero_out; sqrt(2) beta under replace_one, as both terms are positive.

    Raises:
        ValueError: unknown adjacency.

    Source: docs/proofs/inference.md#a-hessian-at-the-answer

    Example:
        >>> hessian_sensitivity(0.25, "add_remove"), round(hessian_sensitivity(0.25, "replace_one"), 6)
        (0.25, 0.353553)
    """
    factor = math.sqrt(sensitivity_factor(adjacency))
    return smoothness * factor * (1 + 2.0**-51 if factor > 1 else 1.0)


def spare_epsilon(epsilon: float, reg: float, smoothness: float) -> float:
    """Returns epsilon - c; raises InfeasibleError unless it is positive: no noise makes up for the determinant.

    Example:
        >>> round(spare_epsilon(1.0, reg=1.0, smoothness=0.25), 9)
        0.776856449
    """
    left = epsilon - log_det(reg, smoothness)
    if left <= 0:
        # expm1 overflows from 709 on, where c < epsilon for every reg that is not subnormal
        least = smoothness / math.expm1(min(epsilon, 700.0))
        raise InfeasibleError(f"reg must be > {least:g} for epsilon = {epsilon:g} (got {reg:g})")
    return left


@dataclass(frozen=True)
class Change:
    """What one record can do to the density of the answer; adding, removing and zeroing out are alike.

    Args:
        log_det: c >= 0, bound on the log ratio of the determinants of the two Hessians: `log_det`, `softmax_log_det`.
        reach: > 0. Bound on the change of the sum of gradients, at every theta of R^d; if dim = 0, L, that of one
            gradient.
        dim: k >= 1, dimension of a subspace, fixed by the records, that holds this change; 0 for losses phi(theta.x; y)
            whose phi' has one sign for each record.
        replaced: whether a record of such losses is replaced by another.

    Guarantee: the adjacency of its constants. Scalar losses of any sign: reach = L and k = 1, or twice both for
        replace_one. Softmax: reach = sqrt(2) B and k = K - 1, or twice both. Losses phi are convex and twice
        differentiable (almost everywhere, with a Lipschitz derivative); b is drawn once. A record that is set to zero
        has no loss.
    """

    log_det: float
    reach: float
    dim: int = 0
    replaced: bool = False

    def __post_init__(self) -> None:
        check.fields(self, log_det=check.nonnegative, reach=check.positive, dim=check.count)


def amp_delta(epsilon: float, noise_std: float, change: Change, mu_out: float) -> float:
    """Returns delta of objective perturbation, then a noisy approximate minimizer; rounded up.

    With s = reach / sigma, E[delta(epsilon - c - s^2/2 - s chi_k, mu_out)]; of one sign E[delta(epsilon - c -
    max(0, G), mu_out)] =: A(s) and, of a replaced record, A(2 s) + 2 A(s) - 2 delta(epsilon - c, mu_out).

    Args:
        epsilon: >= 0.
        noise_std: sigma > 0, of b.
        change: what a record can do.
        mu_out: 2 tau / (lam sigma_out) > 0.

    Guarantee: as `Change`, for points with a gradient of norm <= tau, released with N(0, sigma_out^2 I).

    Source: docs/proofs/objective.md#approximate-minimizers

    Example:
        >>> round(amp_delta(0.5, 3.0, Change(log_det(2.0, 0.25), 1.0), mu_out=0.05), 6)
        0.025926
        >>> round(amp_delta(0.5, 3.0, Change(0.1178, 1.0, dim=1), mu_out=0.05), 6)
        0.051856
    """
    level = noise_level(change.reach, noise_std)
    left = epsilon - change.log_det
    if change.dim > 0:
        return shifted_profile(left - level * level / 2, level, change.dim, mu_out)
    once = _one_corner(left, mu_out, level)
    if not change.replaced:
        return min(1.0, once)
    # PRIVACY: t and t' are 0 or L each (test_no_records_of_a_plane_pass_the_bounds); margin of what
    # is taken off (docs/proofs/objective.md#integrals)
    shared = down(profile(left, mu_out), 1e-9)
    return min(1.0, _one_corner(left, mu_out, 2 * level) + 2 * (once - shared))


def _one_corner(left: float, mu_out: float, level: float) -> float:
    """Returns E[delta(left - max(0, G), mu_out)]."""
    at_zero = math.exp(log_ndtr(-level / 2)) * profile(left, mu_out)
    above = shifted_profile(left - level * level / 2, level, 0, mu_out, -level / 2)
    return at_zero * (1 + 1e-14) + above


def amp_sigma(epsilon: float, delta: float, change: Change, mu_out: float) -> float:
    """Returns the least sigma with `amp_delta` <= delta, rounded up.

    Args:
        epsilon: > 0.
        delta: in (0, 1).
        change: what a record can do.
        mu_out: 2 tau / (lam sigma_out) > 0.

    Raises:
        InfeasibleError: epsilon <= c, or mu_out alone uses delta up.

    Source: docs/proofs/objective.md#approximate-minimizers

    Example:
        >>> round(amp_sigma(1.0, 1e-6, Change(log_det(1.0, 0.25), 1.0), mu_out=0.01), 4)
        5.3497
        >>> round(amp_sigma(1.0, 1e-6, Change(0.1, 1.0, dim=1), mu_out=0.01), 3)
        4.821
    """
    left = epsilon - change.log_det
    if left <= 0:
        raise InfeasibleError(
            f"epsilon must be > log_det = {change.log_det:g} (got {epsilon:g}): use a larger reg"
        )
    why_not = (
        f"mu_out = {mu_out:g} alone exceeds delta = {delta:g} at epsilon - log_det = {left:g}: use"
        " a smaller one"
    )
    return least_noise(
        lambda sigma: amp_delta(epsilon, sigma, change, mu_out),
        delta,
        change.reach / gaussian_mu(left, delta),
        why_not,
    )


def noise_level(lipschitz: float, noise_std: float) -> float:
    """Returns s = L / sigma, rounded up."""
    return math.nextafter(lipschitz / check.positive(noise_std=noise_std), math.inf)


def objpert_reg(epsilon: float, smoothness: float) -> float:
    """Returns lam_min = beta / (e^(epsilon/4) - 1), the default reg in sum form: c is a quarter of epsilon.

    Args:
        epsilon: > 0.
        smoothness: beta > 0.

    Source: docs/proofs/objective.md#default-regularizer

    Example:
        >>> round(objpert_reg(epsilon=1.0, smoothness=0.25), 6)
        0.880203
    """
    return safe(smoothness / math.expm1(min(epsilon / 4, 700.0)))


def noise_reg(noise_std: float, dim: int, distance: float) -> float:
    """Returns sqrt(d) sigma / D, the reg at which what it costs itself equals what the noise b costs at most.

    |b|^2 / (2 reg) of about d sigma^2 / (2 reg) bounds the latter, reg D^2 / 2 is the former.

    Args:
        noise_std: sigma > 0, of b.
        dim: d >= 1, number of parameters.
        distance: D > 0, a guess of |w|.

    Source: docs/proofs/objective.md#default-regularizer

    Example:
        >>> noise_reg(2.0, dim=25, distance=10.0)
        1.0
    """
    return math.sqrt(dim) * noise_std / distance


def objpert_pure_rate(
    epsilon: float,
    reg: float,
    lipschitz: float,
    smoothness: float,
    adjacency: str = "add_remove",
) -> float:
    """Returns g = (epsilon - c) / L, the rate of the density e^(-g |b|) of b, rounded down.

    One record replaced: (epsilon - c) / (2 L). b is the noise of the K-norm mechanism with the scale 1/g.

    Args:
        epsilon: > 0.
        reg: lam > 0, in sum form.
        lipschitz: L > 0, bound on the gradient of a loss at every theta of R^d.
        smoothness: beta >= 0.
        adjacency: "add_remove", "zero_out" or "replace_one".

    Raises:
        InfeasibleError: epsilon <= c; the message names the smallest reg.

    Guarantee: epsilon-DP under the adjacency, for smooth convex losses of one linear score, an exact minimizer.

    Source: docs/proofs/objective.md#pure-epsilon

    Example:
        >>> round(objpert_pure_rate(1.0, reg=1.0, lipschitz=1.0, smoothness=0.25), 9)
        0.776856449
    """
    jump = sensitivity_factor(adjacency) * lipschitz
    # margin: rounded down (docs/proofs/rounding.md#model-of-arithmetic)
    return spare_epsilon(epsilon, reg, smoothness) / jump * (1 - 1e-15)


def softmax_log_det(bound_x: float, reg: float, num_classes: int) -> float:
    """Returns (K - 1) log(1 + B^2 / (K lam)), the bound on the log ratio of determinants for K classes.

    A record adds the matrix (diag p - pp') x xx' of rank <= K - 1 and trace <= (1 - 1/K) B^2: given its trace, the
    determinant of I + H^-1/2 (.) H^-1/2 is largest if its eigenvalues are equal.

    Args:
        bound_x: B > 0.
        reg: lam > 0, in sum form.
        num_classes: K >= 2.

    Source: docs/proofs/objective.md#softmax

    Example:
        >>> round(softmax_log_det(bound_x=1.0, reg=5.0, num_classes=2), 9)
        0.09531018
    """
    share = scaled_up(bound_x * bound_x / (num_classes * reg), 3)
    return scaled_up((num_classes - 1) * math.log1p(share), 4)


def amp_noise_std(tolerance: float, reg: float, mu_out: float = AMP_MU_OUT) -> float:
    """Returns sigma_out = 2 tau / (lam mu_out), the noise on a point whose gradient has a norm of at most tau.

    Args:
        tolerance: tau > 0, certified (`amp_tolerance`).
        reg: lam > 0, in sum form.
        mu_out: > 0.

    Source: docs/proofs/objective.md#approximate-minimizers

    Example:
        >>> round(amp_noise_std(tolerance=1e-6, reg=1.0), 9)
        0.0002
    """
    # PRIVACY: twice tau / lam: either side may be off (test_the_output_noise_covers_both_approximate_minimizers)
    distance = 2 * tolerance / reg
    return safe(distance / mu_out)


def objpert_rdp(order: float, noise_std: float, change: Change) -> float:
    """Returns a bound on the Renyi divergence of an exact minimizer, the larger one of both directions.

    With k = a - 1 and s = reach / sigma, c + s^2/2 + log(E e^(k s chi_dim)) / k. Of losses of one sign, that of the
    pair that dominates the mechanism, the larger of

        log(e^g Phi(-(k + 1/2) s) + A + e^(k c + g) Phi((k + 1/2) s - e/s)) / k,    g = k (k+1) s^2/2,
        log(e^g Phi((k + 1/2) s) + A + e^(g - (k+1) c) Phi(-(k + 1/2) s - e/s)) / k.

    One such record replaced: the divergence is convex in e^epsilon and at most delta(epsilon - c, 2 s) +
    2 delta(epsilon - c, s) in both directions, a sum of which the Renyi moment is linear: R(2 s) + 2 R(s) - 2 R(0),
    R(s) the moment of the symmetric pair of the profile delta(epsilon - c, s), R(0) that of randomized response at c.

    Args:
        order: a > 1.
        noise_std: sigma > 0, of b.
        change: what a record can do.

    Guarantee: as `Change`; a bound of a Renyi divergence, for an `RDPCurve`.

    Source: docs/proofs/objective.md#several-dimensions, docs/proofs/objective.md#the-dominating-curve,
    docs/proofs/objective.md#replaced-records-of-one-sign.

    Example:
        >>> round(objpert_rdp(8, 10.0, Change(log_det(5.0, 0.25), 1.0)), 6)
        0.058393
        >>> round(objpert_rdp(2, 10.0, Change(log_det(5.0, 0.25), 1.0, dim=1)), 9)
        0.135432335
    """
    k = order - 1
    level = noise_level(change.reach, noise_std)
    if change.dim > 0:
        log_moment = _length_log_moment(k * level, change.dim)
        return float(change.log_det + level * level / 2 + log_moment / k) * (1 + _ROUNDING)
    if change.replaced:
        log_moment = _replaced_log_moment(k, level, change.log_det)
    else:
        log_moment = _dominating_log_moment(k, level, change.log_det)
    # margin: rounded up (docs/proofs/objective.md#integrals)
    return float(log_moment * (1 + _ROUNDING) + 1e-13) / k


def _length_log_moment(tilt: float, dim: int) -> float:
    """Returns log E e^(tilt chi_dim), rounded up."""
    if dim == 1:
        log_moment: float = tilt * tilt / 2 + math.log(2) + log_ndtr(tilt)
        return log_moment + (1e-15 + _ROUNDING * tilt * tilt)
    high = tilt + math.sqrt(dim - 1) + 45.0
    return log_concave_integral(
        lambda r: log_chi_density(r, dim) + tilt * np.asarray(r), 0.0, high
    )


def _dominating_log_moment(k: float, level: float, determinant: float) -> float:
    gauss = k * (k + 1) * level * level / 2
    far = (k + 0.5) * level
    bend = _tangent(level, determinant)
    slope = math.exp(-determinant + log_ndtr(-level / 2 - bend))
    atom = math.exp(log_ndtr(-level / 2)) - slope
    middle = [math.log(atom)] if atom > 0 else []
    with_record = [
        gauss + log_ndtr(-far),
        *middle,
        k * determinant + gauss + log_ndtr(far - bend),
    ]
    without = [
        gauss + log_ndtr(far),
        *middle,
        gauss - (k + 1) * determinant + log_ndtr(-far - bend),
    ]
    return max(0.0, *(float(np.logaddexp.reduce(one)) for one in (with_record, without)))


@functools.lru_cache(maxsize=256)  # all orders of a curve share one
def _tangent(level: float, determinant: float) -> float:
    """Returns e / s, the root of Phi(s/2 - z) - e^-c Phi(-s/2 - z) = delta(0, s)."""
    if determinant == 0:
        return 0.0
    total_variation = gaussian_delta(level, 0.0)

    def gap(z: float) -> float:
        upper: float = log_ndtr(level / 2 - z)
        lower: float = log_ndtr(-level / 2 - z)
        # e^u - e^(l - c), as e^u (1 - e^(l - c - u)): both are tiny far out
        return (
            upper
            + math.log(-math.expm1(lower - determinant - upper))
            - math.log(total_variation)
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
    terms = [gauss + rise + log_ndtr(far), gauss + fall + log_ndtr(-far)]
    if determinant > 0:
        atom = math.log(math.tanh(determinant / 2)) + log_ndtr(-level / 2)
        terms += [atom + rise, atom + fall]
    return float(np.logaddexp.reduce(terms))
