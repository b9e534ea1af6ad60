"""Levels and noises of objective perturbation that the package does not use, for vectors and comparisons."""

from __future__ import annotations

import math
import sys

import numpy as np
from scipy.special import log_ndtr

from torch_dpsco import _validate as check
from torch_dpsco.accounting.analysis.gaussian import gaussian_mu, profile, sensitivity_factor
from torch_dpsco.accounting.analysis.objective import (
    _ROUNDING,
    Change,
    least_noise,
    log_chi_density,
    log_concave_integral,
    log_det,
    noise_level,
    objpert_rdp,
    spare_epsilon,
)
from torch_dpsco.accounting.analysis.objective import amp_delta as _amp_delta
from torch_dpsco.accounting.analysis.objective import amp_sigma as _amp_sigma
from torch_dpsco.errors import InfeasibleError


def of_one_sign(
    reg: float, lipschitz: float, smoothness: float, adjacency: str = "add_remove"
) -> Change:
    """Returns what one record can do whose loss keeps its sign."""
    replaced = sensitivity_factor(adjacency) == 2
    return Change(log_det(reg, smoothness), lipschitz, replaced=replaced)


def of_any_sign(reg: float, lipschitz: float, smoothness: float) -> Change:
    """Returns what one record can do that is added or removed, whose loss has any sign."""
    return Change(log_det(reg, smoothness), lipschitz, 1)


def _folded(epsilon: float, determinant: float, level: float) -> float:
    left = check.nonnegative(epsilon=epsilon) - determinant
    if left >= level * level / 2:
        return min(1.0, 2 * profile(left, level))
    return min(1.0, max(0.0, 1 - 2 * math.exp(left + log_ndtr(-level)) + 1e-14))


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
        delta in [0, 1], rounded up: without noise on the answer.

    Source: docs/proofs/objective.md#several-dimensions
    """
    level = noise_level(diameter, noise_std)
    k = check.positive_count(subspace_dim=subspace_dim)
    determinant = check.nonnegative(log_det=log_det)
    if k == 1:
        return _folded(epsilon, determinant, level)
    left = check.nonnegative(epsilon=epsilon) - determinant - level * level / 2
    low, reach = max(0.0, left / level), math.sqrt(k) + 39.0
    if low >= reach:
        return sys.float_info.min

    def log_f(t: np.ndarray) -> np.ndarray:
        with np.errstate(divide="ignore"):
            tail = np.log(-np.expm1(np.minimum(left - level * t, 0.0)))
        return tail + log_chi_density(t, k)

    log_total = log_concave_integral(log_f, low, reach)
    return min(1.0, math.exp(min(0.0, log_total)) + sys.float_info.min)


def objpert_delta_monotone(
    epsilon: float,
    noise_std: float,
    reg: float,
    lipschitz: float,
    smoothness: float,
    adjacency: str = "add_remove",
) -> float:
    """Returns delta(epsilon - c, s), the Gaussian profile, and 1 for epsilon < c: without noise on the answer.

    One record replaced: delta(epsilon - c, 2 s) + 2 delta(epsilon - c, s), at most 1.

    Args:
        epsilon: >= 0.
        noise_std: sigma > 0, of b.
        reg: lam > 0, in sum form.
        lipschitz: L > 0, bound on the gradient of a loss at every theta of R^d.
        smoothness: beta >= 0, bound on phi'' |x|^2 at every theta of R^d.
        adjacency: "add_remove", "zero_out" or "replace_one".

    Source: docs/proofs/objective.md#losses-of-one-sign
    """
    left = check.nonnegative(epsilon=epsilon) - log_det(reg, smoothness)
    level = noise_level(lipschitz, noise_std)
    replaced = sensitivity_factor(adjacency) == 2
    if left < 0:
        return 1.0
    if not replaced:
        return profile(left, level)
    return min(1.0, profile(left, 2 * level) + 2 * profile(left, level))


def amp_delta_monotone(
    epsilon: float,
    noise_std: float,
    reg: float,
    lipschitz: float,
    smoothness: float,
    mu_out: float,
    adjacency: str = "add_remove",
) -> float:
    """Returns `amp_delta` of the package for a loss of one sign; mu_out = 0 stands for an exact minimizer."""
    if check.nonnegative(mu_out=mu_out) == 0:
        return objpert_delta_monotone(epsilon, noise_std, reg, lipschitz, smoothness, adjacency)
    return _amp_delta(
        epsilon, noise_std, of_one_sign(reg, lipschitz, smoothness, adjacency), mu_out
    )


def amp_delta_general(
    epsilon: float,
    noise_std: float,
    log_det: float,
    diameter: float,
    subspace_dim: int,
    mu_out: float,
) -> float:
    """Returns `amp_delta` of the package for any loss; mu_out = 0 stands for an exact minimizer."""
    if check.nonnegative(mu_out=mu_out) == 0:
        return objpert_delta_general(epsilon, noise_std, log_det, diameter, subspace_dim)
    return _amp_delta(epsilon, noise_std, Change(log_det, diameter, subspace_dim), mu_out)


def amp_sigma_monotone(
    epsilon: float,
    delta: float,
    reg: float,
    lipschitz: float,
    smoothness: float,
    mu_out: float,
    adjacency: str = "add_remove",
) -> float:
    """Returns `amp_sigma` of the package for a loss of one sign."""
    return _amp_sigma(epsilon, delta, of_one_sign(reg, lipschitz, smoothness, adjacency), mu_out)


def objpert_rdp_dominating(
    order: float,
    noise_std: float,
    reg: float,
    lipschitz: float,
    smoothness: float,
    adjacency: str = "add_remove",
) -> float:
    """Returns `objpert_rdp` of the package for a loss of one sign."""
    return objpert_rdp(order, noise_std, of_one_sign(reg, lipschitz, smoothness, adjacency))


def rdp_of_any_sign(
    order: float, noise_std: float, reg: float, lipschitz: float, smoothness: float
) -> float:
    """Returns c + s^2/2 + (t^2/2 + log(2 Phi(t))) / (a - 1), t = (a - 1) s."""
    return objpert_rdp(order, noise_std, of_any_sign(reg, lipschitz, smoothness))


def objpert_delta(
    epsilon: float, noise_std: float, reg: float, lipschitz: float, smoothness: float
) -> float:
    """Returns a delta for which objective perturbation is (epsilon, delta)-DP, one record added or removed.

    With e = epsilon - c: 2 delta(e, s), the Gaussian profile, for e >= s^2 / 2, and 1 - 2 e^e Phi(-s) below.

    Args:
        epsilon: >= 0.
        noise_std: sigma > 0, of b.
        reg: lam > 0, in sum form.
        lipschitz: L > 0, bound on the gradient of a loss at every theta of R^d.
        smoothness: beta >= 0, bound on phi'' |x|^2 at every theta of R^d.

    Returns:
        delta in [0, 1], rounded up.

    Raises:
        ValueError: an argument is out of range.

    Guarantee: add_remove and zero_out, for losses phi(theta.x; y) with phi convex and twice differentiable (almost
        everywhere, with a Lipschitz derivative), an exact minimizer, and b drawn once.

    Source: docs/proofs/objective.md#losses-of-any-sign

    Example:
        >>> round(objpert_delta(0.5, noise_std=3.0, reg=2.0, lipschitz=1.0, smoothness=0.25), 9)
        0.049997404
    """
    return _folded(epsilon, log_det(reg, smoothness), noise_level(lipschitz, noise_std))


def objpert_sigma(
    epsilon: float, delta: float, reg: float, lipschitz: float, smoothness: float
) -> float:
    """Returns the least sigma with `objpert_delta` <= delta, rounded up.

    Args:
        epsilon: > 0.
        delta: in (0, 1).
        reg: lam > 0, in sum form.
        lipschitz: L > 0, bound on the gradient of a loss at every theta of R^d.
        smoothness: beta >= 0, bound on phi'' |x|^2 at every theta of R^d.

    Raises:
        ValueError: an argument is out of range.
        InfeasibleError: epsilon <= c; the message names the smallest reg.

    Guarantee: as `objpert_delta`.

    Source: docs/proofs/objective.md#losses-of-any-sign

    Example:
        >>> round(objpert_sigma(1.0, 1e-6, reg=1.0, lipschitz=1.0, smoothness=0.25), 6)
        5.525226
    """
    left, lipschitz = (
        spare_epsilon(epsilon, reg, smoothness),
        check.positive(lipschitz=lipschitz),
    )
    start = lipschitz / gaussian_mu(left, check.open_interval(0.0, 1.0, delta=delta))
    return least_noise(
        lambda sigma: objpert_delta(epsilon, sigma, reg, lipschitz, smoothness),
        delta,
        start,
        "no noise is enough",
    )


def objpert_sigma_general(
    epsilon: float, delta: float, log_det: float, diameter: float, subspace_dim: int
) -> float:
    """Returns the least sigma with `objpert_delta_general` <= delta, rounded up.

    Args:
        epsilon: > 0.
        delta: in (0, 1).
        log_det: c >= 0, bound on the log ratio of the determinants.
        diameter: D > 0, bound on the change of the sum of gradients, at every theta of R^d.
        subspace_dim: k >= 1, dimension of a subspace, fixed by the records, that holds this change.

    Raises:
        ValueError: an argument is out of range.
        InfeasibleError: epsilon <= c.

    Source: docs/proofs/objective.md#several-dimensions

    Example:
        >>> round(objpert_sigma_general(1.0, 1e-6, log_det=0.1, diameter=1.0, subspace_dim=2), 3)
        5.213
    """
    left = check.positive(epsilon=epsilon) - check.nonnegative(log_det=log_det)
    if left <= 0:
        raise InfeasibleError(f"epsilon must be > log_det = {log_det:g} (got {epsilon:g})")
    return least_noise(
        lambda sigma: objpert_delta_general(epsilon, sigma, log_det, diameter, subspace_dim),
        delta,
        diameter / gaussian_mu(left, delta),
        "no noise is enough",
    )


def amp_delta(
    epsilon: float,
    noise_std: float,
    reg: float,
    lipschitz: float,
    smoothness: float,
    mu_out: float,
) -> float:
    """Returns E[delta(epsilon - c - s^2/2 - s |N|, mu_out)]: AMP, the noisy release of an approximate minimizer.

    Args:
        epsilon: >= 0.
        noise_std: sigma > 0, of b.
        reg: lam > 0, in sum form.
        lipschitz: L > 0, bound on the gradient of a loss at every theta of R^d.
        smoothness: beta >= 0, bound on phi'' |x|^2 at every theta of R^d.
        mu_out: 2 tau / (lam sigma_out) >= 0; 0 stands for an exact minimizer.

    Guarantee: as `objpert_delta`, for points with a gradient of norm <= tau, released with N(0, sigma_out^2 I).

    Source: docs/proofs/objective.md#approximate-minimizers

    Example:
        >>> round(amp_delta(0.5, 3.0, reg=2.0, lipschitz=1.0, smoothness=0.25, mu_out=0.05), 6)
        0.051851
    """
    return amp_delta_general(epsilon, noise_std, log_det(reg, smoothness), lipschitz, 1, mu_out)


def objpert_rdp_monotone(
    order: float, noise_std: float, reg: float, lipschitz: float, smoothness: float
) -> float:
    """Returns c + log(Phi(-s/2) + e^(k (k+1) s^2/2) Phi(s/2 + k s)) / k, k = a - 1: the moment of c + max(0, G).

    Args:
        order: a > 1.
        noise_std: sigma > 0, of b.
        reg: lam > 0, in sum form.
        lipschitz: L > 0, bound on the gradient of a loss at every theta of R^d.
        smoothness: beta >= 0, bound on phi'' |x|^2 at every theta of R^d.

    Guarantee: add_remove and zero_out; both directions. `objpert_rdp_dominating` is smaller.

    Source: docs/proofs/objective.md#losses-of-one-sign

    Example:
        >>> round(objpert_rdp_monotone(8, noise_std=10.0, reg=5.0, lipschitz=1.0, smoothness=0.25), 9)
        0.107030885
    """
    k, level = check.order(order=order) - 1, noise_level(lipschitz, noise_std)
    terms = [
        log_ndtr(-level / 2),
        k * (k + 1) * level * level / 2 + log_ndtr((k + 0.5) * level),
    ]
    moment = float(np.logaddexp.reduce(terms))
    return (log_det(reg, smoothness) + moment / k) * (1 + _ROUNDING)


def objpert_sigma_monotone(
    epsilon: float,
    delta: float,
    reg: float,
    lipschitz: float,
    smoothness: float,
    adjacency: str = "add_remove",
) -> float:
    """Returns the least sigma with `objpert_delta_monotone` <= delta, rounded up: L / mu(epsilon - c, delta).

    Args:
        epsilon: > 0.
        delta: in (0, 1).
        reg: lam > 0, in sum form.
        lipschitz: L > 0, bound on the gradient of a loss at every theta of R^d.
        smoothness: beta >= 0, bound on phi'' |x|^2 at every theta of R^d.
        adjacency: "add_remove", "zero_out" or "replace_one".

    Raises:
        ValueError: an argument is out of range.
        InfeasibleError: epsilon <= c; the message names the smallest reg.

    Guarantee: as `objpert_delta_monotone`.

    Source: docs/proofs/objective.md#losses-of-one-sign

    Example:
        >>> round(objpert_sigma_monotone(1.0, 1e-6, reg=1.0, lipschitz=1.0, smoothness=0.25), 6)
        5.342058
    """
    left = spare_epsilon(epsilon, reg, smoothness)
    return least_noise(
        lambda sigma: objpert_delta_monotone(
            epsilon, sigma, reg, lipschitz, smoothness, adjacency
        ),
        delta,
        lipschitz / gaussian_mu(left, delta),
        "no noise is enough",
    )
