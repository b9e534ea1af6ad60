"""Constants for output and objective perturbation that the table of `losses` does not have.

Diameters bound ||grad l(w, z) - grad l(w, z')|| over two records, which may be less than 2 L. A robust loss of a
margin, max over the attacks v of phi(y w.(x + v)), is phi(y w.x - rho |w|_*) with the dual norm of the attacks. With
u a subgradient of that norm, rho u has the length rho for attacks in the Euclidean norm, and at most rho sqrt(d) for
those in the maximum norm.

Differs from the paper in: a maximum of smooth losses is not smooth (the norm has a kink at w = 0): it is smoothed by a
public nu, which leaves the privacy constants as they are.

Source: docs/proofs/output.md#clipped-residuals, docs/proofs/output.md#robust-losses.
"""

from __future__ import annotations

import math

from torch_dpsco import _validate as check
from torch_dpsco.accounting.analysis.gaussian import gaussian_sigma
from torch_dpsco.theory.holder_rounding import scaled_up
from torch_dpsco.theory.output_sensitivity import safe


def logistic_gradient_diameter(bound_x: float, radius: float) -> float:
    """Returns 2 B / (1 + e^(-rho B)): bounds the distance of the logistic gradients of two records with |x| <= B.

    At |w| <= rho each gradient has a norm of at most B / (1 + e^(-rho B)).

    Args:
        bound_x: B > 0.
        radius: rho >= 0.

    Source: docs/proofs/output.md#diameter-of-logistic-gradients

    Example:
        >>> round(logistic_gradient_diameter(bound_x=1.0, radius=2.0), 9)
        1.761594156
    """
    bound, radius = check.positive(bound_x=bound_x), check.nonnegative(radius=radius)
    product = radius * bound
    return min(2 * bound, safe(2 * bound / (1 + math.exp(-scaled_up(product, 1))), 12)) if product else bound


def adversarial_lipschitz(
    bound_x: float, attack_radius: float, link_lipschitz: float = 1.0, *, norm: str = "l2", dim: int = 1
) -> float:
    """Returns L_phi (B + a), the Lipschitz constant of max over the attacks v of phi(y w.(x + v)).

    Args:
        bound_x: B > 0, bound on the Euclidean norm of x.
        attack_radius: rho >= 0; a = rho, or rho sqrt(d) for attacks in the maximum norm.
        link_lipschitz: L_phi > 0; phi nonincreasing.
        norm: "l2" or "linf".
        dim: d >= 1, for linf.

    Source: docs/proofs/output.md#robust-losses

    Example:
        >>> round(adversarial_lipschitz(1.0, 0.5), 9), round(adversarial_lipschitz(1.0, 0.5, norm="linf", dim=4), 9)
        (1.5, 2.0)
    """
    reach = check.positive(bound_x=bound_x) + _attack_length(attack_radius, norm, dim)
    return safe(check.positive(link_lipschitz=link_lipschitz) * reach)


def adversarial_gradient_diameter(
    bound_x: float, attack_radius: float, link_lipschitz: float = 1.0, *, norm: str = "l2", dim: int = 1
) -> float:
    """Returns L_phi max(2 B, B + a): bounds the distance of the robust gradients of two records with |x| <= B.

    A gradient is s (xi - a u), s in [0, L_phi], |xi| <= B, |u| <= 1 and u the same for both records (a subgradient of
    the norm at w, chosen without looking at the data). The distance is convex in both s, hence largest at their ends:
    2 B L_phi, where both are L_phi, or (B + a) L_phi, where one is 0. So a <= B costs no noise.

    Args:
        bound_x: B > 0, bound on the Euclidean norm of x.
        attack_radius: rho >= 0; a = rho, or rho sqrt(d) for attacks in the maximum norm.
        link_lipschitz: L_phi > 0; phi nonincreasing.
        norm: "l2" or "linf".
        dim: d >= 1, for linf.

    Source: docs/proofs/output.md#robust-losses

    Example:
        >>> round(adversarial_gradient_diameter(1.0, 3.0), 9)
        4.0
    """
    bound, length = check.positive(bound_x=bound_x), _attack_length(attack_radius, norm, dim)
    # PRIVACY: holds for two gradients at one w (test_no_pair_of_robust_gradients_is_further_apart)
    return safe(check.positive(link_lipschitz=link_lipschitz) * max(2 * bound, bound + length))


def _attack_length(attack_radius: float, norm: str, dim: int) -> float:
    root = math.sqrt(check.positive_count(dim=dim))
    radius = check.nonnegative(attack_radius=attack_radius)
    return radius if check.choice(("l2", "linf"), norm=norm) == "l2" else radius * root


def noise_norms(dim: int, epsilon: float, delta: float) -> tuple[float, float]:
    """Returns (s, v), bounds on E|z| and on E|z|^2 for a release with sensitivity 1.

    Args:
        dim: d >= 1.
        epsilon: > 0.
        delta: in [0, 1); 0 means K-norm noise.

    Source: docs/proofs/output.md#risk-of-a-noisy-minimizer

    Example:
        >>> noise_norms(dim=10, epsilon=2.0, delta=0)
        (5.0, 27.5)
    """
    d, epsilon = check.positive_count(dim=dim), check.positive(epsilon=epsilon)
    if check.nonnegative(delta=delta) == 0:
        return d / epsilon, d * (d + 1) / epsilon**2
    sigma = gaussian_sigma(epsilon, delta, 1.0)
    return math.sqrt(d) * sigma, d * sigma**2
