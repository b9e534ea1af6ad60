"""Steps and step sizes of the solvers: how long each runs in the worst case.

No privacy rests on these figures: what is released is certified.

Source: docs/proofs/output.md#solvers-that-cannot-fail
"""

from __future__ import annotations

import math
from typing import NamedTuple

from torch_dpsco import _validate as check
from torch_dpsco.errors import ConditionError, InfeasibleError

_ROUNDING = 1e-14  # relative, of a count before it is rounded up


class KatyushaParameters(NamedTuple):
    """Inner steps m of an epoch, weights tau1 and tau2 of the points that are mixed, and the step size gamma."""

    m: int
    tau1: float
    tau2: float
    gamma: float


def agd_certified_steps(strong_convexity: float, smoothness: float, distance: float, grad_tol: float) -> int:
    """Returns T after which accelerated gradient descent has a gradient norm <= g, whatever the data.

    F(y_T) - min F <= (mu + beta) R0^2 / 2 exp(-(T - 1) sqrt(mu / beta)) and |grad F|^2 <= 2 beta (F - min F), so that
    T = 1 + ceil(sqrt(beta / mu) log(beta (mu + beta) R0^2 / g^2)) steps suffice.

    Args:
        strong_convexity: mu > 0.
        smoothness: beta >= mu.
        distance: R0 > 0, bound on the distance of the start to the minimizer.
        grad_tol: g > 0.

    Raises:
        ValueError: an argument is out of range.
        ConditionError: beta < mu.

    Guarantee: in exact arithmetic and without a constraint.

    Source: docs/proofs/output.md#solvers-that-cannot-fail

    Example:
        >>> agd_certified_steps(strong_convexity=0.01, smoothness=1.0, distance=3.0, grad_tol=1e-8)
        392
    """
    mu, beta = check.positive(strong_convexity=strong_convexity), check.positive(smoothness=smoothness)
    distance, grad_tol = check.positive(distance=distance), check.positive(grad_tol=grad_tol)
    if beta < mu:
        raise ConditionError(f"smoothness must be >= strong_convexity = {mu:g} (got {beta:g})")
    log_ratio = math.log(beta) + math.log(mu + beta) + 2 * (math.log(distance) - math.log(grad_tol))
    return 1 + _count(math.sqrt(beta / mu) * log_ratio, "grad_tol") if log_ratio > 0 else 1


def katyusha_parameters(n: int, smoothness: float, strong_convexity: float) -> KatyushaParameters:
    """Returns m = 2 n, tau1 = min(sqrt(m mu / (3 beta)), 1/2), tau2 = 1/2 and gamma = 1 / (3 tau1 beta).

    Args:
        n: records, >= 1.
        smoothness: beta > 0, of each loss.
        strong_convexity: mu > 0, of the regularizer.

    Source: docs/proofs/output.md#steps-of-katyusha (the paper's tau1 misses the beta).

    Example:
        >>> katyusha_parameters(n=10, smoothness=5.0, strong_convexity=5.0).tau1
        0.5
    """
    m = 2 * check.positive_count(n=n)
    beta, mu = check.positive(smoothness=smoothness), check.positive(strong_convexity=strong_convexity)
    tau1 = min(math.sqrt(m * mu / (3 * beta)), 0.5)
    return KatyushaParameters(m, tau1, 0.5, 1 / (3 * tau1 * beta))


def _count(steps: float, name: str) -> int:
    if not steps * (1 + _ROUNDING) < 2.0**63:
        raise InfeasibleError(f"{name} would take {steps:g} steps: use a larger {name}")
    return max(1, math.ceil(steps * (1 + _ROUNDING)))
