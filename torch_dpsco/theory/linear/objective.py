"""Objective perturbation: the general bounds, constants and the pure mechanism; `objective_monotone` has more.

Losses whose derivative keeps its sign (logistic, smoothed hinge) have better bounds there. These hold for all smooth
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
"""

from __future__ import annotations

import math

import numpy as np

from torch_dpsco import _validate as check
from torch_dpsco.accounting.analysis.gaussian import gaussian_mu
from torch_dpsco.algorithms.clip_numbers import sensitivity_factor
from torch_dpsco.errors import InfeasibleError
from torch_dpsco.theory.linear.integrals import (
    least_noise,
    log_chi_density,
    log_concave_integral,
    log_normal_cdf,
    profile,
    shifted_profile,
)
from torch_dpsco.theory.linear.output import safe
from torch_dpsco.theory.rounding import scaled_up

AMP_MU_OUT = 0.01  # default level of the noise on the output
AMP_PURE_SHARE = 0.01  # share of a pure epsilon for the noise on the output
_ROUNDING = 1e-13  # relative to the terms of a Renyi divergence


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
    ratio = check.nonnegative(smoothness=smoothness) / check.positive(reg=reg)
    return scaled_up(math.log1p(scaled_up(ratio, 1)), 4) if smoothness else 0.0


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
    return check.nonnegative(smoothness=smoothness) * factor * (1 + 2.0**-51 if factor > 1 else 1.0)


def spare_epsilon(epsilon: float, reg: float, smoothness: float) -> float:
    """Returns epsilon - c; raises InfeasibleError unless it is positive: no noise makes up for the determinant.

    Example:
        >>> round(spare_epsilon(1.0, reg=1.0, smoothness=0.25), 9)
        0.776856449
    """
    left = check.positive(epsilon=epsilon) - log_det(reg, smoothness)
    if left <= 0:
        # expm1 overflows from 709 on, where c < epsilon for every reg that is not subnormal
        least = smoothness / math.expm1(min(epsilon, 700.0))
        raise InfeasibleError(f"reg must be > {least:g} for epsilon = {epsilon:g} (got {reg:g})")
    return left


def _folded(epsilon: float, determinant: float, level: float) -> float:
    left = check.nonnegative(epsilon=epsilon) - determinant
    if left >= level * level / 2:
        return min(1.0, 2 * profile(left, level))
    return min(1.0, max(0.0, 1 - 2 * math.exp(left + log_normal_cdf(-level)) + 1e-14))


def objpert_delta_general(
    epsilon: float, noise_std: float, log_det: float, diameter: float, subspace_dim: int
) -> float:
    """Returns E[(1 - e^(epsilon - c - s^2/2 - s chi_k))_+], s = D / sigma: any two neighboring data sets.

    Args:
        epsilon: >= 0.
        noise_std: sigma > 0.
        log_det: c >= 0, bound on the log ratio of the determinants of the two Hessians.
        diameter: D > 0, bound on the change of the sum of gradients, at every theta of R^d.
        subspace_dim: k >= 1, dimension of a subspace, fixed by the records, that holds this change.

    Returns:
        delta in [0, 1], rounded up.

    Raises:
        ValueError: an argument is out of range.

    Guarantee: the adjacency of its constants. Scalar losses, replace_one: c = log(1 + beta/lam), D = 2 L, k = 2.
        Softmax: c = `softmax_log_det`, D = sqrt(2) B and k = K - 1 (add_remove), twice both (replace_one).

    Source: docs/proofs/objective.md#several-dimensions

    Example:
        >>> round(objpert_delta_general(0.5, 3.0, log_det=0.1178, diameter=1.0, subspace_dim=1), 6)
        0.050002
    """
    level = noise_level(diameter, noise_std)
    k = check.positive_count(subspace_dim=subspace_dim)
    determinant = check.nonnegative(log_det=log_det)
    if k == 1:
        return _folded(epsilon, determinant, level)
    left = check.nonnegative(epsilon=epsilon) - determinant - level * level / 2
    return shifted_profile(left, level, k, 0.0)


def objpert_rdp(
    order: float, noise_std: float, reg: float, lipschitz: float, smoothness: float
) -> float:
    """Returns c + s^2/2 + (t^2/2 + log(2 Phi(t))) / (a - 1), t = (a - 1) s: a Renyi divergence, of both directions.

    Args:
        order: a > 1.
        noise_std: sigma > 0, of b.
        reg: lam > 0, in sum form.
        lipschitz: L > 0, bound on the gradient of a loss at every theta of R^d.
        smoothness: beta >= 0, bound on phi'' |x|^2 at every theta of R^d.

    Guarantee: add_remove and zero_out, for losses phi(theta.x; y) with phi convex and twice differentiable (almost
        everywhere, with a Lipschitz derivative), an exact minimizer, and b drawn once.

    Source: docs/proofs/objective.md#losses-of-any-sign

    Example:
        >>> round(objpert_rdp(2, noise_std=10.0, reg=5.0, lipschitz=1.0, smoothness=0.25), 9)
        0.135432335
    """
    return objpert_rdp_general(order, noise_std, log_det(reg, smoothness), lipschitz, 1)


def objpert_rdp_general(
    order: float, noise_std: float, log_det: float, diameter: float, subspace_dim: int
) -> float:
    """Returns c + s^2/2 + log(E e^(t chi_k)) / (a - 1), t = (a - 1) s, s = D / sigma.

    Args:
        order: a > 1.
        noise_std: sigma > 0, of b.
        log_det: c >= 0, bound on the log ratio of the determinants.
        diameter: D > 0, bound on the change of the sum of gradients, at every theta of R^d.
        subspace_dim: k >= 1, dimension of a subspace, fixed by the records, that holds this change.

    Source: docs/proofs/objective.md#several-dimensions

    Example:
        >>> round(objpert_rdp_general(2, 10.0, log_det=0.05, diameter=1.0, subspace_dim=1), 6)
        0.136642
    """
    excess = check.order(order=order) - 1
    level = noise_level(diameter, noise_std)
    k = check.positive_count(subspace_dim=subspace_dim)
    tilt = excess * level
    if k == 1:
        log_moment = tilt * tilt / 2 + math.log(2) + log_normal_cdf(tilt)
        log_moment += 1e-15 + _ROUNDING * tilt * tilt
    else:
        high = tilt + math.sqrt(k - 1) + 45.0
        log_moment = log_concave_integral(
            lambda r: log_chi_density(r, k) + tilt * np.asarray(r), 0.0, high
        )
    value = check.nonnegative(log_det=log_det) + level * level / 2 + log_moment / excess
    return value * (1 + _ROUNDING)


def amp_delta_general(
    epsilon: float,
    noise_std: float,
    log_det: float,
    diameter: float,
    subspace_dim: int,
    mu_out: float,
) -> float:
    """Returns E[delta(epsilon - c - s^2/2 - s chi_k, mu_out)], s = D / sigma.

    Args:
        epsilon: >= 0.
        noise_std: sigma > 0, of b.
        log_det: c >= 0, bound on the log ratio of the determinants.
        diameter: D > 0, bound on the change of the sum of gradients, at every theta of R^d.
        subspace_dim: k >= 1, dimension of a subspace, fixed by the records, that holds this change.
        mu_out: 2 tau / (lam sigma_out) >= 0; 0 stands for an exact minimizer.

    Source: docs/proofs/objective.md#approximate-minimizers

    Example:
        >>> round(amp_delta_general(0.5, 3.0, 0.1178, diameter=1.0, subspace_dim=1, mu_out=0.05), 6)
        0.051856
    """
    if check.nonnegative(mu_out=mu_out) == 0:
        return objpert_delta_general(epsilon, noise_std, log_det, diameter, subspace_dim)
    level = noise_level(diameter, noise_std)
    k = check.positive_count(subspace_dim=subspace_dim)
    left = (
        check.nonnegative(epsilon=epsilon) - check.nonnegative(log_det=log_det) - level * level / 2
    )
    return shifted_profile(left, level, k, mu_out)


def amp_sigma_general(
    epsilon: float, delta: float, log_det: float, diameter: float, subspace_dim: int, mu_out: float
) -> float:
    """Returns the least sigma with `amp_delta_general` <= delta, rounded up.

    Args:
        epsilon: > 0.
        delta: in (0, 1).
        log_det: c >= 0, bound on the log ratio of the determinants.
        diameter: D > 0, bound on the change of the sum of gradients, at every theta of R^d.
        subspace_dim: k >= 1, dimension of a subspace, fixed by the records, that holds this change.
        mu_out: 2 tau / (lam sigma_out) >= 0; 0 stands for an exact minimizer.

    Raises:
        ValueError: an argument is out of range.
        InfeasibleError: epsilon <= c, or mu_out alone uses delta up.

    Source: docs/proofs/objective.md#approximate-minimizers

    Example:
        >>> round(amp_sigma_general(1.0, 1e-6, 0.1, diameter=1.0, subspace_dim=1, mu_out=0.01), 3)
        4.821
    """
    left = check.positive(epsilon=epsilon) - check.nonnegative(log_det=log_det)
    if left <= 0:
        raise InfeasibleError(
            f"epsilon must be > log_det = {log_det:g} (got {epsilon:g}): use a larger reg"
        )
    start = check.positive(diameter=diameter) / gaussian_mu(left, delta)
    why_not = (
        f"mu_out = {mu_out:g} alone exceeds delta = {delta:g} at epsilon - log_det = {left:g}: use"
        " a smaller one"
    )
    return least_noise(
        lambda sigma: amp_delta_general(epsilon, sigma, log_det, diameter, subspace_dim, mu_out),
        delta,
        start,
        why_not,
    )


def noise_level(lipschitz: float, noise_std: float) -> float:
    """Returns s = L / sigma, rounded up."""
    level = check.positive(lipschitz=lipschitz) / check.positive(noise_std=noise_std)
    return math.nextafter(level, math.inf)


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
    quarter = min(check.positive(epsilon=epsilon) / 4, 700.0)
    return safe(check.positive(smoothness=smoothness) / math.expm1(quarter))


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
    root = math.sqrt(check.positive_count(dim=dim))
    return root * check.positive(noise_std=noise_std) / check.positive(distance=distance)


def objpert_pure_rate(
    epsilon: float, reg: float, lipschitz: float, smoothness: float, adjacency: str = "add_remove"
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
        ValueError: an argument is out of range.
        InfeasibleError: epsilon <= c; the message names the smallest reg.

    Guarantee: epsilon-DP under the adjacency, for smooth convex losses of one linear score, an exact minimizer.

    Source: docs/proofs/objective.md#pure-epsilon

    Example:
        >>> round(objpert_pure_rate(1.0, reg=1.0, lipschitz=1.0, smoothness=0.25), 9)
        0.776856449
    """
    jump = sensitivity_factor(adjacency) * check.positive(lipschitz=lipschitz)
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
    bound = check.positive(bound_x=bound_x)
    reg = check.positive(reg=reg)
    if check.positive_count(num_classes=num_classes) < 2:
        raise ValueError(f"num_classes must be an integer >= 2 (got {num_classes})")
    return scaled_up(
        (num_classes - 1) * math.log1p(scaled_up(bound * bound / (num_classes * reg), 3)), 4
    )


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
    distance = 2 * check.positive(tolerance=tolerance) / check.positive(reg=reg)
    return safe(distance / check.positive(mu_out=mu_out))
