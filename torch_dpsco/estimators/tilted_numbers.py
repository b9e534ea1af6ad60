"""Tilted objectives (1/tau) log mean_i e^(tau l_i(w)) + psi(w): weights, curvature and sensitivity.

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

from torch_dpsco import _validate as check
from torch_dpsco.accounting.analysis.gaussian import sensitivity_factor
from torch_dpsco.accounting.analysis.rounding import safe, scaled_up
from torch_dpsco.errors import ConditionError


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
    exponent = abs(check.finite(tilt=tilt)) * check.nonnegative(loss_range=loss_range)
    others = (check.positive_count(n=n) - 1) * math.exp(-scaled_up(exponent, 1))
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
    tilt = check.finite(tilt=tilt)
    mu = check.positive(strong_convexity=strong_convexity)
    square = check.positive(lipschitz=lipschitz) ** 2
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
    diameter = 2 * check.positive(lipschitz=lipschitz)
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
        weight = tilted_max_weight(tilt, loss_range, check.positive_count(n_min=n_min) + 1)
    return safe(diameter / mu * weight)
