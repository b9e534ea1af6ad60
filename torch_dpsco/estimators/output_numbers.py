"""Output perturbation: constants of losses, and how far one record moves the minimizer.

Lemma. Let F and F' be mu-strongly convex on a closed convex set, w and w' their minimizers there. Then

    ||w - w'|| <= ||s - s'|| / mu,

s and s' subgradients of F and F' at w', s' that of the optimality condition: <s', w - w'> >= 0, and <t, w' - w> >= 0
for the t of F at w, so that mu ||w - w'||^2 <= <s - t, w' - w> <= <s - s', w' - w>. Whatever the two objectives share
cancels in s - s': regularizers, shifts, and the losses of the shared records.

Differs from the paper in: 1. only the data-dependent loss counts, where the paper takes L + lam R for L. 2. Adding or
removing a record is covered, for a public divisor. 3. Inexact minimizers are covered by a certificate of the distance,
or by a failure probability: an accuracy in expectation is no bound. 4. Every figure is rounded up.

Diameters bound ||grad l(w, z) - grad l(w, z')|| over two records, which may be less than 2 L. A robust loss of a
margin, max over the attacks v of phi(y w.(x + v)), is phi(y w.x - rho |w|_*) with the dual norm of the attacks. With
u a subgradient of that norm, rho u has the length rho for attacks in the Euclidean norm, and at most rho sqrt(d) for
those in the maximum norm. Such a maximum of smooth losses is not smooth (the norm has a kink at w = 0): it is smoothed
by a public nu, which leaves the privacy constants as they are.

Source: docs/proofs/output.md, from docs/proofs/output.md#how-far-a-minimizer-moves on,
docs/proofs/output.md#clipped-residuals, docs/proofs/output.md#robust-losses.

Tilted objectives (1/tau) log mean_i e^(tau l_i(w)) + psi(w): weights, curvature and sensitivity.

The gradient is the mean of the losses' gradients with weights v_i proportional to e^(tau l_i); the Hessian is that of
the weighted mean plus tau times the covariance of the gradients under v. tau > 0 stresses the largest losses, tau < 0
the smallest, tau = 0 is the mean. If all losses lie in an interval of length r for every w that may be a minimizer,
then with C = e^(|tau| r)

    v_i <= C / (C + n - 1).

One record replaced: with g the v-mean of the others, the gradients at one point differ by v_n g_n - v'_n g'_n +
(v'_n - v_n) g. If v_n >= v'_n this is v_n times the difference of g_n and a convex combination of g'_n and g: at most
D v_n, D the diameter of the gradients.

One record added to n: the gradients differ by v (g_z - g), v <= C / (C + n). The empty data set has no weighted mean:
there the first record moves the gradient by its length L, so that without a public n_min >= 1 the bound is max(D, L).

Differs from the paper in: 1. tau < 0 is covered. 2. The diameter counts, and the exact supremum of the weight instead
of min(1, C/n). 3. Adding or removing a record is covered.

Source: docs/proofs/output.md#tilted-means
"""

from __future__ import annotations

import math

from torch_dpsco.accounting.analysis.gaussian import (
    sensitivity_factor,
)
from torch_dpsco.accounting.analysis.rounding import safe, scaled_up
from torch_dpsco.errors import ConditionError, MissingConstantError


def erm_sensitivity(
    lipschitz: float,
    strong_convexity: float,
    n: int,
    adjacency: str = "replace_one",
    gradient_diameter: float | None = None,
) -> float:
    """Returns a bound on ||w(X) - w(X')||, w(X) the minimizer of (1/n) sum_i l(w, x_i) + psi(w).

    D / (mu n), where one record is replaced; L / (mu n), where one is added, removed or set to zero and n is a public
    constant. In the minimizer psi cancels, so that L and D are those of l alone.

    Args:
        lipschitz: L > 0, bound on the subgradients of l at every possible minimizer.
        strong_convexity: mu > 0, of the whole objective (lam for psi = lam/2 |w|^2).
        n: the divisor, >= 1: the number of records under replace_one and zero_out, any public constant otherwise.
        adjacency: "replace_one", "zero_out" or "add_remove".
        gradient_diameter: D > 0, bound on the distance of two records' gradients at a possible minimizer; default 2 L.
            Used as it is given, for replace_one only.

    Returns:
        The l2 sensitivity, in the unit of w, rounded up.

    Raises:
        ValueError: an argument is out of range.

    Guarantee: holds for every pair of neighbors, for minimizers over R^d or over one closed convex set. Under
        add_remove the objective must divide by the constant n, never by the number of records.

    Source: docs/proofs/output.md#how-far-a-minimizer-moves

    Example:
        >>> round(erm_sensitivity(lipschitz=1.0, strong_convexity=0.1, n=1000), 9)
        0.02
    """
    jump = sensitivity_factor(adjacency) * lipschitz
    if gradient_diameter is not None and adjacency == "replace_one":
        jump = gradient_diameter
    # PRIVACY: the sensitivity of every output perturbation (test_no_pair_of_quadratics_moves_further)
    return safe(jump / strong_convexity / n)


def certified_sensitivity(sensitivity: float, strong_convexity: float, grad_tol: float) -> float:
    """Returns Delta + 2 g / mu: released points with a subgradient of norm <= g lie within g / mu of the minimizer.

    Args:
        sensitivity: Delta > 0, of exact minimizers.
        strong_convexity: mu > 0, of the whole objective.
        grad_tol: g > 0, public, reached on EVERY data set and for every seed of the solver.

    Guarantee: the sensitivity of the certified points, if the noise is drawn after the solver has ended, from a stream
        of its own.

    Source: docs/proofs/output.md#certified-points

    Example:
        >>> round(certified_sensitivity(sensitivity=0.02, strong_convexity=0.1, grad_tol=1e-7), 9)
        0.020002
    """
    # PRIVACY: both points may be off, in opposite directions (test_an_approximate_minimizer_moves_by_twice_its_error)
    return safe(sensitivity + 2 * grad_tol / strong_convexity)


def minimizer_radius(
    reg: float,
    *,
    lipschitz: float | None = None,
    loss_at_zero: float | None = None,
    radius: float = math.inf,
) -> float:
    """Returns rho >= |w| for every minimizer w of (1/n) sum_i l(w, x_i) + (lam/2) |w|^2, over R^d or a ball.

    rho = min(R, L / lam, sqrt(2 l0 / lam)): the first by the optimality condition, <s + lam w, -w> >= 0; the second,
    for nonnegative losses, by F(w) <= F(0). A sum of up to N terms is a mean with lam = reg / N.

    Args:
        reg: lam > 0.
        lipschitz: L > 0, on the whole of R^d or of the ball.
        loss_at_zero: l0 >= 0 with 0 <= l(w, x) everywhere and l(0, x) <= l0.
        radius: R of the ball of a constrained problem, > 0; inf for none.

    Raises:
        ValueError: an argument is out of range.
        MissingConstantError: nothing that is given bounds the minimizer.

    Guarantee: holds for exact minimizers only, so that constants of the ball of this radius must not be used for
        objective perturbation or noisy gradient descent, whose iterates are unbounded.

    Source: docs/proofs/output.md#where-minimizers-can-be

    Example:
        >>> round(minimizer_radius(0.5, lipschitz=1.0, loss_at_zero=0.25), 9)
        1.0
    """
    bounds = [radius]
    if lipschitz is not None:
        bounds.append(safe(lipschitz / reg))
    if loss_at_zero is not None:
        bounds.append(safe(math.sqrt(2 * loss_at_zero / reg)))
    if min(bounds) == math.inf:
        raise MissingConstantError(
            "no bound on the minimizer: give lipschitz, loss_at_zero or radius"
        )
    return min(bounds)


def adversarial_lipschitz(
    bound_x: float, attack_radius: float, link_lipschitz: float = 1.0
) -> float:
    """Returns L_phi (B + a), the Lipschitz constant of max over the attacks v of phi(y w.(x + v)).

    Args:
        bound_x: B > 0, bound on the Euclidean norm of x.
        attack_radius: a >= 0, bound on the Euclidean norm of an attack: rho sqrt(d) in the maximum norm.
        link_lipschitz: L_phi > 0; phi nonincreasing.

    Source: docs/proofs/output.md#robust-losses

    Example:
        >>> round(adversarial_lipschitz(1.0, 0.5), 9)
        1.5
    """
    return safe(link_lipschitz * (bound_x + attack_radius))


def adversarial_gradient_diameter(
    bound_x: float, attack_radius: float, link_lipschitz: float = 1.0
) -> float:
    """Returns L_phi max(2 B, B + a): bounds the distance of the robust gradients of two records with |x| <= B.

    A gradient is s (xi - a u), s in [0, L_phi], |xi| <= B, |u| <= 1 and u the same for both records (a subgradient of
    the norm at w, chosen without looking at the data). The distance is convex in both s, hence largest at their ends:
    2 B L_phi, where both are L_phi, or (B + a) L_phi, where one is 0. So a <= B costs no noise.

    Args: as in `adversarial_lipschitz`.

    Source: docs/proofs/output.md#robust-losses

    Example:
        >>> round(adversarial_gradient_diameter(1.0, 3.0), 9)
        4.0
    """
    # PRIVACY: holds for two gradients at one w (test_no_pair_of_robust_gradients_is_further_apart)
    return safe(link_lipschitz * max(2 * bound_x, bound_x + attack_radius))


def tilted_max_weight(tilt: float, loss_range: float, n: int) -> float:
    """Returns C / (C + n - 1), C = e^(|tau| r): the largest weight of one of n records, which is attained.

    Args:
        tilt: tau, finite.
        loss_range: r >= 0, length of an interval that holds all losses at every possible minimizer.
        n: >= 1.

    Source: docs/proofs/output.md#tilted-means

    Example:
        >>> round(tilted_max_weight(tilt=1.0, loss_range=2.0, n=100), 9)
        0.06945316
    """
    exponent = abs(tilt) * loss_range
    others = (n - 1) * math.exp(-scaled_up(exponent, 1))
    # margin: rounded up, subnormal exponentials included (docs/proofs/rounding.md#model-of-arithmetic)
    return min(1.0, scaled_up(1 / (1 + others * (1 - 1e-15)), 4))


def tilted_strong_convexity(tilt: float, lipschitz: float, strong_convexity: float) -> float:
    """Returns mu for tau >= 0, mu - |tau| L^2 for tau < 0: the covariance of vectors of length <= L is at most L^2.

    Args:
        tilt: tau, finite.
        lipschitz: L > 0, at every w on the segments between possible minimizers.
        strong_convexity: mu > 0, of the regularizer or of every loss.

    Raises:
        ValueError: an argument is out of range.
        ConditionError: the result is not positive: the objective need not be convex.

    Source: docs/proofs/output.md#tilted-means

    Example:
        >>> round(tilted_strong_convexity(-0.05, lipschitz=1.0, strong_convexity=0.1), 9)
        0.05
    """
    mu = strong_convexity
    square = lipschitz**2
    loss = scaled_up(max(-tilt, 0.0) * square, 4)
    if loss >= mu:
        raise ConditionError(
            f"tilt = {tilt:g} needs strong_convexity > {loss:g} (got {mu:g}): use a larger reg, or"
            f" a tilt above {-mu / square:g}"
        )
    return (mu - loss) * (1 - 1e-15) if loss else mu


def tilted_sensitivity(
    tilt: float,
    loss_range: float,
    n: int | None,
    lipschitz: float,
    strong_convexity: float,
    adjacency: str = "replace_one",
    n_min: int | None = None,
) -> float:
    """Returns a bound on how far one record moves the minimizer of a tilted objective.

    (D / mu_tau) C / (C + n - 1) if one of n records is replaced, (D / mu_tau) C / (C + n_min) if one is added to at
    least n_min, D / mu_tau if nothing is known about their number; D = 2 L.

    Args:
        tilt: tau, finite.
        loss_range: r >= 0, length of an interval that holds all losses at every possible minimizer.
        n: >= 1, public, for replace_one; ignored for add_remove.
        lipschitz: L > 0.
        strong_convexity: mu > 0, of the regularizer.
        adjacency: "replace_one" or "add_remove"; "zero_out" is that of replace_one, since a null record has a weight.
        n_min: public bound from below on the size of every data set of the universe, >= 1; add_remove only.

    Returns:
        The l2 sensitivity, rounded up.

    Raises:
        ValueError: an argument is out of range.
        ConditionError: mu_tau <= 0 (tau < 0).

    Guarantee: for every pair of neighbors. For tau < 0 L must bound the gradients on the segment between two
        minimizers: on R^d, or on the ball that objective and solver are constrained to.

    Source: docs/proofs/output.md#tilted-means

    Example:
        >>> round(tilted_sensitivity(1.0, 2.0, 100, lipschitz=1.0, strong_convexity=0.1), 9)
        1.389063193
    """
    diameter = 2 * lipschitz
    mu = tilted_strong_convexity(tilt, lipschitz, strong_convexity)
    sensitivity_factor(adjacency)
    if adjacency != "add_remove":
        if n is None:
            raise ValueError(f"n must be given under {adjacency}")
        weight = tilted_max_weight(tilt, loss_range, n)
    elif n_min is None:
        weight = tilted_max_weight(
            tilt, loss_range, 1
        )  # 1: the first record moves the gradient from 0
    else:
        weight = tilted_max_weight(tilt, loss_range, n_min + 1)
    return safe(diameter / mu * weight)
