"""Run-time proofs that a point is within a distance of the exact minimizer: the privacy of every release rests on them.

| | certificate | of |
|---|---|---|
| C1 | `gradient_certificate` | ||w - w*|| <= ||s||/mu for a subgradient s at w |
| C2 | `projected_certificate` | the same on the ball, for the point after a gradient step and a projection |

Every computed norm is increased by a bound on its rounding error before it is used. float64 only.

Differs from the paper in: the paper assumes that a bound on the EXPECTED accuracy of a solver bounds the distance,
which is false (docs/proofs/output.md#accuracy-in-expectation); here the point at hand is certified, whatever solver
found it.

Solvers: their target accuracy, how long they run, and what rounding may hide from their certificates.

A certificate compares a COMPUTED gradient norm with a public tolerance. The comparison proves
something about the exact one only after a bound on the rounding is taken off. With u = 2^-53, m terms per sum and the
objective (weight / n) sum_i l_i + (lam/2) |w|^2 + b.w,

    e_grad = (m + d + 16) u (weight L + lam |w| + |b|) + (d + 8) u weight beta (|w| + offset)

bounds the error of the gradient norm. m is n for plain sums, in any order; for pairwise sums
ceil(log2 n); for sums of blocks of 1024 rows that are then added pairwise, the block and the logarithm of their number.

Two things count besides sums: the scores' own error where a target is subtracted from them (`offset`, see
`Problem.score_offset`), and the beta term, in sum form.

No privacy rests on steps and step sizes, how long each solver runs in the worst case: what is released is certified.

Source: docs/proofs/output.md#rounding-of-a-gradient, docs/proofs/output.md#solvers-that-cannot-fail; Higham, Accuracy
and Stability, ch. 3 and 4.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from torch_dpsco import _validate as check
from torch_dpsco._doors import typed
from torch_dpsco._validate import positive
from torch_dpsco.accounting.analysis.rounding import DOUBLE, gamma, scaled_up
from torch_dpsco.errors import ConditionError, InfeasibleError
from torch_dpsco.estimators.objectives import norm_up
from torch_dpsco.estimators.records import Objective, require_double

_CLEAR = 3.0  # of the norm of the noise, about 2 tau sqrt(p / 2)
_UP = 1 + 1e-12  # more than the rounding of the few scalar operations after a bound


@dataclass(frozen=True)
class Certificate:
    """A proof that ||w - w*|| <= distance. The number depends on the data: it must be neither shown nor released.

    Attributes:
        distance: bound on the distance to the exact minimizer, rounding included; inf or NaN proves nothing.
    """

    distance: float = field(repr=False)

    def proves(self, distance: float) -> bool:
        """Whether the point is certified to be within `distance`; False for NaN."""
        return self.distance <= distance


@typed
def gradient_certificate(objective: Objective, point: Tensor) -> Certificate:
    """C1: ||w - w*|| <= ||s||/mu for any subgradient s of a mu-strongly convex F at w.

    Args:
        objective: with strong_convexity > 0.
        point: w, float64.

    Returns:
        (computed norm + bound on its rounding)/mu.

    Raises:
        ValueError: if the point is not float64 or autocast is on.
        ConditionError: if the objective is not strongly convex.

    Source:
        docs/proofs/output.md#a-gradient-certifies, docs/proofs/output.md#rounding-of-a-gradient

    Example:
        >>> from torch_dpsco.losses import Squared
        >>> from torch_dpsco.estimators.records import Records
        >>> F = LinearObjective(Squared(), Records(torch.ones(1, 1), torch.ones(1)), reg=1.0, normalizer=1)
        >>> gradient_certificate(F, torch.tensor([0.5], dtype=torch.float64)).proves(1e-12)
        True
    """
    require_double(point, objective.dim)
    size = norm_up(objective.value_and_gradient(point)[1])
    return Certificate((size + objective.gradient_error(point)) / _strong(objective) * _UP)


def projected_certificate(
    objective: Objective, point: Tensor, radius: float
) -> tuple[Tensor, Certificate]:
    """C2: a gradient step from w, projected onto B(0, R), and the certificate of the point reached.

    s = beta (w - w+) + grad F(w+) - grad F(w) is a subgradient of F + indicator at w+ = Pi(w - grad F/beta).
    The step that was really made is used, so that only the projection and the gradients are rounded.

    Args:
        objective: smooth on R^dim, strong_convexity > 0.
        point: w, float64; anywhere.
        radius: R > 0, or inf.

    Returns:
        (w+, its certificate on the ball); w itself with C1 if that proves the free minimizer to lie in the ball.

    Raises:
        ValueError, ConditionError: as for C1; ConditionError also if the objective is not smooth.

    Source:
        docs/proofs/output.md#a-projected-step-certifies
    """
    require_double(point, objective.dim)
    if math.isinf(positive(allow_inf=True, radius=radius)):
        return point, gradient_certificate(objective, point)
    if objective.smoothness is None:
        raise ConditionError(
            "a ball needs a smooth objective: its certificate is a projected gradient step"
        )
    free = gradient_certificate(objective, point)
    if norm_up(point) + free.distance <= radius:
        return point, free  # the free minimizer is proved to lie in the ball
    beta = objective.smoothness
    gradient = objective.value_and_gradient(point)[1]
    moved = project(point - gradient / beta, radius)
    residual = beta * (point - moved) + objective.value_and_gradient(moved)[1] - gradient
    size = norm_up(point) + norm_up(moved) + norm_up(gradient) / beta
    # beta (exact step - made step), and the rounding of the residual itself
    error = gamma(4 * objective.dim + 64) * (beta * size + norm_up(gradient))
    error += objective.gradient_error(point) + objective.gradient_error(moved)
    return moved, Certificate((norm_up(residual) + error) / _strong(objective) * _UP)


def project(point: Tensor, radius: float) -> Tensor:
    """Pi onto B(0, R), within gamma(d + 8) R."""
    length = torch.linalg.vector_norm(point)
    return point if math.isinf(radius) else point * (radius / length).clamp(max=1.0)


def _strong(objective: Objective) -> float:
    if not objective.strong_convexity > 0:
        raise ConditionError(
            "strong_convexity must be > 0: without it no distance to a minimizer can be certified"
        )
    return objective.strong_convexity


BLOCK_ROWS = 1024
_SHARE = 1e-3  # of the sensitivity: the noise grows by that much
_AMP_LEAST, _AMP_MOST = 1e-6, 1e-2  # of the Lipschitz constant
_ROOM = 4  # tolerances must exceed the rounding by this factor


def sum_terms(n: int) -> int:
    """Returns m: the error of a sum of n terms is at most m u times the sum of their sizes, up to O(u^2).

    Example:
        >>> sum_terms(10**6)
        1034
    """
    n = check.positive_count(n=n)
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
    return scaled_up(DOUBLE * ((sum_terms(n) + d + 16) * terms + scores), 16)


def solver_tolerance(sensitivity: float, strong_convexity: float) -> float:
    """Returns the default bound on the gradient norm, 0.1 % of mu Delta / 2: the share by which the noise grows.

    Args:
        sensitivity: Delta > 0, of exact minimizers.
        strong_convexity: mu > 0.

    Source: docs/proofs/output.md#tolerances

    Example:
        >>> round(solver_tolerance(sensitivity=0.02, strong_convexity=0.1), 12)
        1e-06
    """
    mu = check.positive(strong_convexity=strong_convexity)
    return _SHARE * mu * check.positive(sensitivity=sensitivity) / 2


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
            f" grad_tol above {_ROOM * rounding:g}, or a larger reg"
        )
    return tolerance


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
            " use a smaller n_max, or a larger reg"
        )
    return tolerance


_ROUNDING = 1e-14  # relative, of a count before it is rounded up


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
    log_ratio = (
        math.log(beta) + math.log(mu + beta) + 2 * (math.log(distance) - math.log(grad_tol))
    )
    return 1 + _count(math.sqrt(beta / mu) * log_ratio, "grad_tol") if log_ratio > 0 else 1


def _count(steps: float, name: str) -> int:
    if not steps * (1 + _ROUNDING) < 2.0**63:
        raise InfeasibleError(f"{name} would take {steps:g} steps: use a larger {name}")
    return max(1, math.ceil(steps * (1 + _ROUNDING)))


def needed_eigenvalue(size: int, std: float) -> float:
    """Returns what the least eigenvalue of a noisy Hessian must exceed for intervals: a number that a plan knows.

    Args:
        size: number of coefficients, the intercept among them.
        std: >= 0, of the noise on the diagonal: `ObjectivePlan.hessian_scale`, `AdaSSPPlan.constants.std_xtx_diag`.

    Source:
        docs/proofs/inference.md#the-limit

    Example:
        >>> needed_eigenvalue(4, 7.0)
        42.0
    """
    return _CLEAR * check.nonnegative(std=std) * math.sqrt(check.positive_count(size=size))
