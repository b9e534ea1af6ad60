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
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from torch_dpsco._doors import typed
from torch_dpsco._validate import positive
from torch_dpsco.accounting.analysis.rounding import gamma
from torch_dpsco.errors import ConditionError
from torch_dpsco.linear.objectives.base import Objective, require_double
from torch_dpsco.linear.objectives.linear import LinearObjective, norm_up
from torch_dpsco.losses.classification import Hinge
from torch_dpsco.losses.regression import Absolute, Pinball

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
        >>> F = LinearObjective(Squared(), torch.ones(1, 1), torch.ones(1), reg=1.0, normalizer=1)
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
    def of(cls, loss: object) -> BoxDual | None:
        """The description of a loss, or None if it is not such a maximum."""
        if isinstance(loss, Hinge) and loss.power == 1:
            return cls(0.0, 1.0, True)
        if isinstance(loss, Pinball):
            return cls(loss.quantile - 1, loss.quantile, False)
        return cls(-1.0, 1.0, False) if isinstance(loss, Absolute) else None

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
        records.combine(records.weights * dual * box.signs(records.targets)) / objective.normalizer
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
    drift = gamma(records.depth + 16) * width * objective.constants.norm_mass / objective.normalizer
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
