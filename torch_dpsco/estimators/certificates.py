"""Run-time proofs that a point is within a distance of the exact minimizer: the privacy of every release rests on them.

| | certificate | of |
|---|---|---|
| C1 | `gradient_certificate` | ||w - w*|| <= ||s||/mu for a subgradient s at w |
| C2 | `projected_certificate` | the same on the ball, for the point after a gradient step and a projection |
| C3 | `gap_certificate` | ||w - w*|| <= sqrt(2 gap/mu), Fenchel gap of a primal-dual pair |

Every computed norm and gap is increased by a bound on its rounding error before it is used. float64 only.

Differs from the paper in: the paper assumes that a bound on the EXPECTED accuracy of a solver bounds the distance,
which is false (docs/proofs/output.md#accuracy-in-expectation); here the point at hand is certified, whatever solver
found it. The Fenchel gap is summed record by record, where each term is >= 0 and small, instead of subtracting two
large values.

Solvers: their target accuracy, how long they run, and what rounding may hide from their certificates.

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
from dataclasses import dataclass, field

import torch
from torch import Tensor

from torch_dpsco import _validate as check
from torch_dpsco._doors import typed
from torch_dpsco._validate import positive
from torch_dpsco.accounting.analysis.rounding import DOUBLE, gamma, scaled_up
from torch_dpsco.errors import ConditionError, InfeasibleError
from torch_dpsco.estimators.objectives import LinearObjective, norm_up
from torch_dpsco.estimators.records import Objective, require_double
from torch_dpsco.losses.base import TableLoss
from torch_dpsco.losses.clipped import ResidualClipped

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


def distance_of_gap(gap: float, strong_convexity: float) -> float:
    """sqrt(2 gap/mu), rounded up; gap a proved bound on F(w) - min F, rounding included."""
    return math.sqrt(2 * max(gap, 0.0) / strong_convexity) * _UP


@dataclass(frozen=True)
class BoxDual:
    """A loss that is a maximum of slopes in an interval: l = max over a in [low, high] of a z, z = offset - sign * s.

    Hinge: z = 1 - y s, a in [0, 1]. Pinball: z = y - s, a in [t - 1, t]. Absolute: a in [-1, 1]. The dual variable of
    a record is its a, and l(s) - a z >= 0 is its share in the Fenchel gap.

    Attributes:
        low, high: the interval.
        of_margin: whether sign = y and offset = 1 (a margin loss), else sign = 1 and offset = y.
    """

    low: float
    high: float
    of_margin: bool

    @classmethod
    def of(cls, loss: TableLoss | ResidualClipped) -> BoxDual | None:
        """The description of a loss, or None if it is not such a maximum."""
        ends = loss.dual_box
        return None if ends is None else cls(*ends, loss.target_kind == "sign")

    @property
    def width(self) -> float:
        """Bound on |a| and on the length of the interval."""
        return max(abs(self.low), abs(self.high), self.high - self.low)

    def signs(self, targets: Tensor) -> Tensor:
        """The factor of s in -z."""
        return targets if self.of_margin else torch.ones_like(targets)

    def offsets(self, targets: Tensor) -> Tensor:
        """The residual z at s = 0."""
        return torch.ones_like(targets) if self.of_margin else targets

    def residuals(self, scores: Tensor, targets: Tensor) -> Tensor:
        """The residuals z."""
        return self.offsets(targets) - self.signs(targets) * scores

    def shares(self, residuals: Tensor, dual: Tensor) -> Tensor:
        """max(low z, high z) - a z, each >= 0."""
        # as a product of two small factors: no cancellation where a is at the right end of the interval
        return torch.where(
            residuals > 0, (self.high - dual) * residuals, (self.low - dual) * residuals
        )


def primal_point(objective: LinearObjective, dual: Tensor) -> Tensor:
    """v(a) = ((1/N) sum_i c_i a_i sign_i x_i - q)/reg, the minimizer of the Lagrangian."""
    box = box_of(objective)
    records = objective.records
    total = (
        records.combine(records.weights * dual * box.signs(records.targets))
        / objective.normalizer
    )
    return (total if objective.linear_term is None else total - objective.linear_term) / _strong(
        objective
    )


def gap_certificate(objective: LinearObjective, point: Tensor, dual: Tensor) -> Certificate:
    """C3: ||w - w*|| <= sqrt(2 (P(w) - D(a))/mu) for a loss with a `BoxDual`.

    P(w) - D(a) = (1/N) sum_i c_i (l_i(w) - a_i z_i(w)) + (reg/2) ||w - v(a)||^2, where every term is >= 0: the two
    large values never meet. The duals are clipped to their interval first, so that any a is feasible.

    Args:
        objective: hinge, pinball or absolute loss, reg > 0.
        point: w, float64, of shape (d,).
        dual: a, float64, of shape (n,).

    Raises:
        ValueError: if a shape or dtype does not fit, or autocast is on.
        ConditionError: if the loss has no such dual, or reg = 0.

    Source:
        docs/proofs/output.md#a-duality-gap-certifies
    """
    require_double(point, objective.dim)
    require_double(dual, objective.records.count)
    box = box_of(objective)
    records = objective.records
    mu = _strong(objective)
    dual = dual.clamp(box.low, box.high)
    center = primal_point(objective, dual)
    residuals = box.residuals(records.scores(point), records.targets)
    shares = (
        float(records.total(records.weights * box.shares(residuals, dual))) / objective.normalizer
    )
    size = norm_up(point)
    width = box.width
    error = gap_error(objective, size) + gamma(records.depth + 16) * shares
    drift = (
        gamma(records.depth + 16) * width * objective.constants.norm_mass / objective.normalizer
    )
    drift = (drift + gamma(4) * (mu * norm_up(center) + objective.linear_size())) / mu
    apart = norm_up(point - center) + drift + gamma(4) * size
    gap = shares + error + mu / 2 * apart * apart  # ** 2 would raise where the square overflows
    return Certificate(distance_of_gap(gap * _UP, mu))


def gap_error(objective: LinearObjective, size: float) -> float:
    """Bound on the error of the gap through rounded residuals, at ||w|| <= size: no gap below it can be certified.

    A residual is within gamma(d + 6)(||x|| ||w|| + |offset|), and a share moves by at most the width of the box times
    that.
    """
    width = box_of(objective).width
    reach = objective.constants.reach_mass(size)
    return gamma(objective.dim + 6) * width * reach / objective.normalizer


def _strong(objective: Objective) -> float:
    if not objective.strong_convexity > 0:
        raise ConditionError(
            "strong_convexity must be > 0: without it no distance to a minimizer can be certified"
        )
    return objective.strong_convexity


def box_of(objective: LinearObjective) -> BoxDual:
    """The dual of an objective's loss; raises ConditionError if it has none."""
    box = BoxDual.of(objective.loss)
    if box is None:
        raise ConditionError(
            f"{objective.loss!r} has no box-constrained dual; take Hinge, Pinball or Absolute"
        )
    return box


BLOCK_ROWS = 1024
_SHARE_SMOOTH, _SHARE_KINKED = 1e-3, 0.05  # of the sensitivity: the noise grows by that much
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
            f" grad_tol above {_ROOM * rounding:g}, or a larger reg"
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
            f" use a distance above {math.sqrt(2 * _ROOM * rounding / mu):g}"
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
