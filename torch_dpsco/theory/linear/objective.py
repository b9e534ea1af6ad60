"""Objective perturbation: the names that optimizers and tests import, constants and the pure mechanism.

* losses whose derivative keeps its sign (logistic, smoothed hinge): `objective_monotone`, the default for them;
* all others (Huber, softmax): `objective_general`.

Both hold for smooth losses of linear scores, whose constants are suprema over ALL of R^d: the minimizer is unbounded.
Squared, non-smooth and tilted losses are not covered.

Source: docs/proofs/objective.md
"""

from __future__ import annotations

import math

from torch_dpsco import _validate as check
from torch_dpsco.theory.clipping import sensitivity_factor
from torch_dpsco.theory.linear.objective_general import (
    amp_delta_general,
    amp_sigma_general,
    log_det,
    objpert_rdp,
    objpert_rdp_general,
    spare_epsilon,
)
from torch_dpsco.theory.linear.objective_monotone import amp_delta_monotone, amp_sigma_monotone, objpert_rdp_dominating
from torch_dpsco.theory.linear.output import safe
from torch_dpsco.theory.rounding import scaled_up

__all__ = [
    "AMP_MU_OUT",
    "AMP_PURE_SHARE",
    "amp_delta_general",
    "amp_delta_monotone",
    "amp_noise_std",
    "amp_sigma_general",
    "amp_sigma_monotone",
    "log_det",
    "objpert_pure_rate",
    "objpert_rdp",
    "objpert_rdp_dominating",
    "objpert_rdp_general",
    "objpert_reg",
    "softmax_log_det",
]

AMP_MU_OUT = 0.01  # default level of the noise on the output
AMP_PURE_SHARE = 0.01  # share of a pure epsilon for the noise on the output


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
    # PRIVACY: rounded down (test_the_pure_mechanism_spends_epsilon_and_no_more)
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
    bound, reg = check.positive(bound_x=bound_x), check.positive(reg=reg)
    if check.positive_count(num_classes=num_classes) < 2:
        raise ValueError(f"num_classes must be an integer >= 2 (got {num_classes})")
    return scaled_up((num_classes - 1) * math.log1p(scaled_up(bound * bound / (num_classes * reg), 3)), 4)


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
