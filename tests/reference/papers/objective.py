"""Levels and noises of objective perturbation that the package does not use, for vectors and comparisons."""

from __future__ import annotations

from torch_dpsco import _validate as check
from torch_dpsco.accounting.analysis.gaussian import gaussian_mu
from torch_dpsco.accounting.analysis.objective import (
    _ROUNDING,
    _folded,
    _log_sum,
    amp_delta_general,
    amp_sigma_general,
    amp_sigma_monotone,
    least_noise,
    log_det,
    log_normal_cdf,
    noise_level,
    spare_epsilon,
)


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
    left, lipschitz = spare_epsilon(epsilon, reg, smoothness), check.positive(lipschitz=lipschitz)
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
    return amp_sigma_general(epsilon, delta, log_det, diameter, subspace_dim, 0.0)


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
        log_normal_cdf(-level / 2),
        k * (k + 1) * level * level / 2 + log_normal_cdf((k + 0.5) * level),
    ]
    return (log_det(reg, smoothness) + _log_sum(terms) / k) * (1 + _ROUNDING)


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
    return amp_sigma_monotone(epsilon, delta, reg, lipschitz, smoothness, 0.0, adjacency)
