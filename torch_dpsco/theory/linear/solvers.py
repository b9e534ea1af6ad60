"""Solvers: their target accuracy, how long they run, and what rounding may hide from their certificates.

A certificate compares a COMPUTED gradient norm, or duality gap, with a public tolerance. The comparison proves
something about the exact one only after a bound on the rounding is taken off. With u = 2^-53, m terms per sum and the
objective (weight / n) sum_i l_i + (lam/2) |w|^2 + b.w,

    e_grad = (m + d + 16) u (weight L + lam |w| + |b|) + (d + 8) u weight beta (|w| + offset)
    e_gap  = (m + d + 16) u (|P| + |D| + 2 weight L (|w| + offset))

bound the errors of the gradient norm and of the gap P - D. m is n for plain sums, in any order; for pairwise sums
ceil(log2 n); for sums of blocks of 1024 rows that are then added pairwise, the block and the logarithm of their number.

Three things count besides sums: 1. the scores' own error where a target is subtracted from them (`offset`, see
`Problem.score_offset`); 2. in e_gap the term with L: a score of size B |w| may be far larger than the loss, and so may
what the dual vector loses; 3. the beta term, in sum form.

No privacy rests on steps and step sizes, how long each solver runs in the worst case: what is released is certified.

Source: docs/proofs/output.md#rounding-of-a-gradient, docs/proofs/output.md#solvers-that-cannot-fail; Higham, Accuracy
and Stability, ch. 3 and 4.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from torch_dpsco import _validate as check
from torch_dpsco.accounting.analysis.rounding import DOUBLE, scaled_up
from torch_dpsco.errors import ConditionError, InfeasibleError

BLOCK_ROWS = 1024
SUMS = ("plain", "blocks", "pairwise")
_SHARE_SMOOTH, _SHARE_KINKED = 1e-3, 0.05  # of the sensitivity: the noise grows by that much
_AMP_LEAST, _AMP_MOST = 1e-6, 1e-2  # of the Lipschitz constant
_ROOM = 4  # tolerances must exceed the rounding by this factor


def sum_terms(n: int, sums: str = "blocks") -> int:
    """Returns m: the error of a sum of n terms is at most m u times the sum of their sizes, up to O(u^2).

    Args:
        n: number of terms, >= 1.
        sums: "plain", "blocks" or "pairwise".

    Example:
        >>> sum_terms(10**6, "plain"), sum_terms(10**6, "blocks"), sum_terms(10**6, "pairwise")
        (1000000, 1034, 20)
    """
    n = check.positive_count(n=n)
    if check.choice(SUMS, sums=sums) == "plain":
        return n
    if sums == "pairwise":
        return (n - 1).bit_length()
    return min(n, BLOCK_ROWS) + (-(-n // BLOCK_ROWS) - 1).bit_length()


def gradient_rounding(
    n: int,
    dim: int,
    *,
    lipschitz: float,
    smoothness: float,
    reg: float,
    norm: float,
    weight: float = 1.0,
    linear: float = 0.0,
    score_offset: float = 0.0,
    sums: str = "blocks",
) -> float:
    """Returns e_grad, which bounds how far a computed gradient (and its norm) is from the exact one.

    Args:
        n: records, >= 1; the public n or n_max for a check before the run.
        dim: d >= 1.
        lipschitz: L > 0, bound on the gradient of a loss.
        smoothness: beta >= 0 of a loss.
        reg: lam >= 0, in the same form as the objective.
        norm: |w| >= 0, or a bound on it.
        weight: sum of the weights of the losses: 1 for a mean, n_max / n for a sum over a constant n, n_max for a sum.
        linear: |b| >= 0 of a linear term.
        score_offset: >= 0, what the loss adds to a score, over the bound on |x| (`Problem.score_offset`).
        sums: how sums over records are formed, see `sum_terms`.

    Source: docs/proofs/output.md#rounding-of-a-gradient

    Example:
        >>> gradient_rounding(10**5, 20, lipschitz=1.0, smoothness=0.25, reg=1e-4, norm=5.0) < 2e-13
        True
    """
    d = check.positive_count(dim=dim)
    weight = check.positive(weight=weight)
    size = check.nonnegative(norm=norm)
    reach = norm + check.nonnegative(score_offset=score_offset)
    terms = weight * check.positive(lipschitz=lipschitz) + check.nonnegative(reg=reg) * size
    terms += check.nonnegative(linear=linear)
    scores = (d + 8) * weight * check.nonnegative(smoothness=smoothness) * reach
    return scaled_up(DOUBLE * ((sum_terms(n, sums) + d + 16) * terms + scores), 16)


def solver_tolerance(sensitivity: float, strong_convexity: float, kinked: bool = False) -> float:
    """Returns the default bound on the gradient norm, a share of mu Delta / 2: the share by which the noise grows.

    Args:
        sensitivity: Delta > 0, of exact minimizers.
        strong_convexity: mu > 0.
        kinked: losses without a gradient (hinge, pinball) get 5 %, the others 0.1 %.

    Source: docs/proofs/output.md#tolerances

    Example:
        >>> round(solver_tolerance(sensitivity=0.02, strong_convexity=0.1), 12)
        1e-06
    """
    share = _SHARE_KINKED if kinked else _SHARE_SMOOTH
    return (
        share
        * check.positive(strong_convexity=strong_convexity)
        * check.positive(sensitivity=sensitivity)
        / 2
    )


def check_tolerance(grad_tol: float, rounding: float) -> float:
    """Returns the tolerance; raises ConditionError unless it exceeds four times the rounding of the gradient.

    Both are public, so that this happens before the data are read. At run time the computed norm must be at most the
    tolerance minus the rounding at the actual point.

    Example:
        >>> check_tolerance(1e-6, rounding=1e-12)
        1e-06
    """
    tolerance = check.positive(grad_tol=grad_tol)
    rounding = check.nonnegative(rounding=rounding)
    # PRIVACY: below the rounding nothing is certified (test_a_tolerance_below_the_rounding_is_refused)
    if tolerance <= _ROOM * rounding:
        raise ConditionError(
            f"grad_tol = {tolerance:g} is not above four times the rounding of the gradient: use a"
            f" grad_tol above {_ROOM * rounding:g}, pairwise sums, or a larger reg"
        )
    return tolerance


def check_gap_tolerance(distance: float, strong_convexity: float, rounding: float) -> float:
    """Returns mu r^2 / 2, the gap that certifies a distance r; raises ConditionError unless it exceeds 4 e_gap.

    Example:
        >>> round(check_gap_tolerance(1e-3, strong_convexity=0.5, rounding=1e-12), 15)
        2.5e-07
    """
    distance = check.positive(distance=distance)
    mu = check.positive(strong_convexity=strong_convexity)
    rounding = check.nonnegative(rounding=rounding)
    gap = mu * distance * distance / 2 * (1 - 8 * DOUBLE)  # rounded down
    if gap <= _ROOM * rounding:
        raise ConditionError(
            f"distance = {distance:g} needs a gap of {gap:g}, not above four times its rounding:"
            f" use a distance above {math.sqrt(2 * _ROOM * rounding / mu):g}, or pairwise sums"
        )
    return gap


def amp_tolerance(lipschitz: float, rounding: float) -> float:
    """Returns tau = max(1e-6 L, 4 e), the gradient norm asked for where the noise is in the objective.

    Args:
        lipschitz: L > 0, of one record.
        rounding: e >= 0, `gradient_rounding` of the sum form at a public bound on |w| and |b|.

    Raises:
        ConditionError: 4 e exceeds 1e-2 L.

    Source: docs/proofs/objective.md#rounding-and-tolerance

    Example:
        >>> amp_tolerance(1.0, rounding=1e-6)
        4e-06
    """
    lipschitz = check.positive(lipschitz=lipschitz)
    rounding = check.nonnegative(rounding=rounding)
    tolerance = max(_AMP_LEAST * lipschitz, _ROOM * rounding)
    if tolerance > _AMP_MOST * lipschitz:
        raise ConditionError(
            f"the rounding of the gradient, {rounding:g}, exceeds {_AMP_MOST / _ROOM:g} lipschitz:"
            " use pairwise sums, a smaller n_max, or a larger reg"
        )
    return tolerance


_ROUNDING = 1e-14  # relative, of a count before it is rounded up


class KatyushaParameters(NamedTuple):
    """Inner steps m of an epoch, weights tau1 and tau2 of the points that are mixed, and the step size gamma."""

    m: int
    tau1: float
    tau2: float
    gamma: float


def agd_certified_steps(
    strong_convexity: float, smoothness: float, distance: float, grad_tol: float
) -> int:
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
    mu = check.positive(strong_convexity=strong_convexity)
    beta = check.positive(smoothness=smoothness)
    distance = check.positive(distance=distance)
    grad_tol = check.positive(grad_tol=grad_tol)
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
    beta = check.positive(smoothness=smoothness)
    mu = check.positive(strong_convexity=strong_convexity)
    tau1 = min(math.sqrt(m * mu / (3 * beta)), 0.5)
    return KatyushaParameters(m, tau1, 0.5, 1 / (3 * tau1 * beta))


def _count(steps: float, name: str) -> int:
    if not steps * (1 + _ROUNDING) < 2.0**63:
        raise InfeasibleError(f"{name} would take {steps:g} steps: use a larger {name}")
    return max(1, math.ceil(steps * (1 + _ROUNDING)))
