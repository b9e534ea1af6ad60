"""Losses for classes: of the margin y s for labels +-1, and softmax cross-entropy.

Losses of the margin m = y s for labels y = +-1: hinge powers, logistic, smoothed hinge.

Labels need not be checked: a criterion reads y > 0 as 1 and others as -1 (`base.read`), so that every constant of
the table holds. `value` and `derivative` take y as it is: for |y| <= 1 the constants hold too (the loss phi(y w.x) is
that of the record (y x, 1), and ||y x|| <= B), and y = 0 is a null record of gradient 0.

Losses of the residual r = y - s for bounded real targets |y| <= Y: powers, Huber, quantile, tube.

Records within the bounds that constants assume, and the loss whose gradient is the clipped one.

The convex loss whose gradient is the clipped gradient of a linear model: phi_c' = clip(phi', -+ C/||x||).

Clipping the gradient phi'(w.x) x of one record to norm C clips the slope phi', since ||x|| does not depend on w. A
monotone slope stays monotone, so that the clipped gradients are those of a convex loss: phi up to the corner where
|phi'| = C/||x||, and a straight line beyond it. For models that are not linear no such loss exists.

Differs from the paper in: it is not there. Source: docs/proofs/output.md#clipped-residuals
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property, partial
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from torch_dpsco._validate import (
    between,
    nonnegative,
    open_interval,
    positive,
    positive_count,
    typed,
)
from torch_dpsco.accounting.analysis.rounding import safe, scaled_up, upper
from torch_dpsco.errors import ConditionError
from torch_dpsco.losses.base import Line, ScalarLoss, TableLoss, power_up, record_bounds
from torch_dpsco.problem import round_up

_Number = TypeVar("_Number", float, Tensor)
_one_to_two = partial(between, 1.0, 2.0)
_quantile = partial(open_interval, 0.0, 1.0)


class MarginLoss(ScalarLoss):
    """phi(m) of the margin m = y s, phi convex and nonincreasing, with a slope in (-inf, 0]."""

    target_kind = "sign"
    monotone = True
    zero = 1.0

    def place(self, score: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Margin y s, and y."""
        return target * score, target

    def up_to(self, place: Tensor, corner: Tensor) -> Tensor:
        """Margin cut off below."""
        return torch.maximum(place, corner)


@dataclass(frozen=True)
class Hinge(MarginLoss):
    """Powers of the hinge, (1 - m)_+^q: the support vector loss at q = 1, its smooth square at q = 2.

    alpha = q - 1, L = q B^q, M = q B, M0 = 1, G(R) = q B (1 + B R)^(q-1). At q = 1 the subgradient at m = 1 is 0.
    Key: |s_+^p - t_+^p| <= |s - t|^p for 0 < p <= 1, with equality at t = 0.

    Args:
        power: q in [1, 2].

    Source:
        docs/proofs/holder.md#constants-of-the-losses.

    Example:
        >>> Hinge(power=1.5).problem(bound_x=1.0).holder_constant
        1.5
    """

    ranges = (("power", _one_to_two),)

    power: float = 1.0

    def smoothed(self, width: float) -> TableLoss | None:
        return SmoothedHinge(width) if self.power == 1 else None

    def curve(self, margin: Tensor) -> Tensor:
        return (1 - margin).clamp(min=0) ** self.power

    def slope(self, margin: Tensor) -> Tensor:
        gap = (1 - margin).clamp(min=0)
        # sign(gap) makes 0^0 come out as 0: the selection at m = 1 for q = 1.
        return -self.power * gap.sign() * gap ** (self.power - 1)

    def bend(self, margin: Tensor) -> Tensor:
        return 2.0 * (margin < 1).to(margin.dtype) if self.power == 2 else super().bend(margin)

    def corner(self, limit: Tensor) -> Tensor:
        return 1 - limit / 2 if self.power == 2 else super().corner(limit)

    def holder_exponent(self) -> float:
        return self.power - 1

    def holder_constant(self, exponent: float, bound_x: float) -> float:
        return upper(self.power, bound_x, power_up(bound_x, exponent))

    def loss_at_zero(self, bound_y: float) -> float:
        return 1.0

    def grad_bound(self, radius: float, bound_x: float, bound_y: float) -> float:
        return upper(self.power, bound_x, power_up(1 + bound_x * radius, self.power - 1))


@dataclass(frozen=True)
class Logistic(MarginLoss):
    """Logistic loss log(1 + e^-m).

    alpha = 1, L = B^2/4; any other alpha with L = B (B/4)^alpha, which is valid but not least for 0 < alpha < 1.
    M = B/2, M0 = log 2, G(R) = B/(1 + e^(-B R)), Lipschitz constant B.

    Source:
        docs/proofs/holder.md#constants-of-the-losses.

    Example:
        >>> Logistic().problem(bound_x=2.0).smoothness
        1.0
    """

    interpolates = True
    log_odds = True
    intervals = "hessian"
    line = Line(-1.0, 0.0, 4.0)  # for alpha and L alone

    def loss_range(self, reach: float) -> float:
        return reach  # log((1 + e^t)/(1 + e^-t)) = t

    def gradient_diameter(self, radius: float, bound_x: float) -> float:
        return logistic_gradient_diameter(bound_x, radius)

    def clipped_bend(self, slope: _Number, bound: _Number) -> _Number:
        return slope * (bound - slope)  # sigma(1 - sigma) B^2 at sigma B = slope, where it grows

    def curve(self, margin: Tensor) -> Tensor:
        return (-margin).clamp(min=0) + torch.log1p(torch.exp(-margin.abs()))

    def slope(self, margin: Tensor) -> Tensor:
        return -torch.sigmoid(-margin)

    def bend(self, margin: Tensor) -> Tensor:
        return torch.sigmoid(margin) * torch.sigmoid(-margin)

    def corner(self, limit: Tensor) -> Tensor:
        # sigmoid(-m) = c at m = log((1 - c)/c); the slope stays below 1
        return torch.where(limit < 1, torch.log1p(-limit) - torch.log(limit), -math.inf)

    def loss_at_zero(self, bound_y: float) -> float:
        return math.nextafter(math.log(2.0), 1.0)

    def grad_bound(self, radius: float, bound_x: float, bound_y: float) -> float:
        return bound_x / (1.0 + math.exp(-bound_x * radius))  # exact at 0 and at infinity


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
    bound = positive(bound_x=bound_x)
    product = nonnegative(radius=radius) * bound
    if not product:
        return bound
    return min(2 * bound, safe(2 * bound / (1 + math.exp(-scaled_up(product, 1))), 12))


@dataclass(frozen=True)
class SmoothedHinge(MarginLoss):
    """Hinge with a parabola of width h at its corner: 0 if m >= 1, (1-m)^2/(2h) if 1-h <= m < 1, else 1 - m - h/2.

    alpha = 1, L = B^2/h; any other alpha with L = B^(1+alpha) h^-alpha. M = B min(1, 1/h),
    M0 = 1 - h/2 if h <= 1 else 1/(2h), G(R) = B min(1, (1 + B R)/h), Lipschitz constant B.

    Args:
        width: h > 0.

    Source:
        docs/proofs/holder.md#constants-of-the-losses.

    Example:
        >>> SmoothedHinge(width=0.5).problem(bound_x=1.0).smoothness
        2.0
    """

    interpolates = True
    ranges = (("width", positive),)

    width: float = 1.0

    @property
    def line(self) -> Line:
        return Line(-1.0, 0.0, self.width)


@dataclass(frozen=True)
class SoftmaxCrossEntropy(TableLoss):
    """log sum_c exp(s_c) - s_y for scores s = W x of C classes; norms of W are Frobenius norms.

    alpha = 1, L = B^2/2 (the Hessian of log-sum-exp is at most 1/2), M = B sqrt(1 - 1/C), M0 = log C,
    G(R) <= min(sqrt(2) B, M + L R), Lipschitz constant sqrt(2) B. Not a scalar-score loss: is_glm is False.

    As a criterion it makes a null record, loss and gradient 0, of a label outside 0..C-1: which records have one is
    private, so that it must not raise.

    Args:
        num_classes: C >= 2, public.

    Source:
        docs/proofs/holder.md#constants-of-the-losses.

    Example:
        >>> loss = SoftmaxCrossEntropy(num_classes=3)
        >>> round(loss(torch.zeros(1, 3), torch.tensor([2])).item(), 4)
        1.0986
    """

    target_kind = "class"

    num_classes: int
    num_scores: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if positive_count(num_classes=self.num_classes) < 2:
            raise ValueError(f"num_classes must be an integer >= 2 (got {self.num_classes})")
        object.__setattr__(self, "num_classes", int(self.num_classes))
        object.__setattr__(self, "num_scores", self.num_classes)

    def value(self, score: Tensor, target: Tensor) -> Tensor:
        """Losses (B,) of scores (B, C) and integer targets (B,)."""
        return score.logsumexp(1) - score.gather(1, target.unsqueeze(1)).squeeze(1)

    def derivative(self, score: Tensor, target: Tensor) -> Tensor:
        """softmax(s) - onehot(y), shape (B, C)."""
        classes = torch.arange(self.num_classes, device=target.device)
        return score.softmax(1) - (target.unsqueeze(1) == classes).to(score.dtype)

    def holder_exponent(self) -> float:
        return 1.0

    def holder_constant(self, exponent: float, bound_x: float) -> float:
        return upper(bound_x, bound_x, 0.5)

    def loss_at_zero(self, bound_y: float) -> float:
        return math.nextafter(math.log(self.num_classes), math.inf)

    def grad_bound(self, radius: float, bound_x: float, bound_y: float) -> float:
        # The float sqrt(2.0) lies above the root; nextafter covers the two roundings of the other one.
        root = math.nextafter(math.sqrt((self.num_classes - 1) / self.num_classes), 1.0)
        at_zero = upper(bound_x, root)
        return min(
            upper(bound_x, math.sqrt(2.0)), at_zero + self.holder_constant(1.0, bound_x) * radius
        )


class ResidualLoss(ScalarLoss):
    """phi(r) of the residual r = y - s, phi convex."""

    def place(self, score: Tensor, target: Tensor) -> tuple[Tensor, float]:
        """Residual y - s, and -1."""
        return target - score, -1.0

    def up_to(self, place: Tensor, corner: Tensor) -> Tensor:
        """Residual cut off on both sides."""
        return torch.clamp(place, -corner, corner)


@dataclass(frozen=True)
class PowerLoss(ResidualLoss):
    """|r|^q.

    alpha = q - 1, L = q 2^(2-q) B^q, M = q Y^(q-1) B, M0 = Y^q, G(R) = q B (Y + B R)^(q-1).
    Key: sup |sgn(s)|s|^p - sgn(t)|t|^p| / |s-t|^p = 2^(1-p), at s = -t. Dropping 2^(2-q) would under-noise.

    Args:
        power: q in [1, 2].

    Source:
        docs/proofs/holder.md#constants-of-the-losses.

    Example:
        >>> PowerLoss(power=1.0).problem(bound_x=1.0).holder_constant
        2.0
    """

    ranges = (("power", _one_to_two),)

    power: float = 2.0

    def curve(self, residual: Tensor) -> Tensor:
        return residual.abs() ** self.power

    def slope(self, residual: Tensor) -> Tensor:
        return self.power * residual.sign() * residual.abs() ** (self.power - 1)

    def bend(self, residual: Tensor) -> Tensor:
        return torch.full_like(residual, 2.0) if self.power == 2 else super().bend(residual)

    def corner(self, limit: Tensor) -> Tensor:
        return limit / 2 if self.power == 2 else super().corner(limit)

    def holder_exponent(self) -> float:
        return self.power - 1

    def holder_constant(self, exponent: float, bound_x: float) -> float:
        return upper(
            self.power, power_up(2.0, 2 - self.power), bound_x, power_up(bound_x, exponent)
        )

    def loss_at_zero(self, bound_y: float) -> float:
        return upper(bound_y, power_up(bound_y, self.power - 1))

    def grad_bound(self, radius: float, bound_x: float, bound_y: float) -> float:
        return upper(self.power, bound_x, power_up(bound_y + bound_x * radius, self.power - 1))


@dataclass(frozen=True)
class Absolute(ResidualLoss):
    """|r|, subgradient 0 at r = 0.

    alpha = 0, L = 2B (the jump, twice the Lipschitz constant), M = B, M0 = Y, G(R) = B.

    Source:
        docs/proofs/holder.md#constants-of-the-losses.

    Example:
        >>> Absolute().problem(bound_x=1.0).grad_bound()
        1.0
    """

    line = Line(-1.0, 1.0)


@dataclass(frozen=True)
class Squared(ResidualLoss):
    """r^2/2.

    alpha = 1, L = B^2, M = B Y, M0 = Y^2/2, G(R) = B (Y + B R).

    Source:
        docs/proofs/holder.md#constants-of-the-losses.

    Example:
        >>> Squared().problem(bound_x=2.0).smoothness
        4.0
    """

    squared = True
    intervals = "moments"
    line = Line(-math.inf, math.inf, 1.0)

    def curve(self, residual: Tensor) -> Tensor:
        return residual * residual / 2


@dataclass(frozen=True)
class Huber(ResidualLoss):
    """r^2/2 if |r| <= k, else k (|r| - k/2).

    alpha = 1, L = B^2; any other alpha with L = (2k)^(1-alpha) B^(1+alpha). M = B min(Y, k),
    M0 = Y^2/2 if Y <= k else k (Y - k/2), G(R) = B min(k, Y + B R), Lipschitz constant B k.

    Args:
        threshold: k > 0.

    Source:
        docs/proofs/holder.md#constants-of-the-losses.

    Example:
        >>> Huber(threshold=2.0).problem(bound_x=1.0, bound_y=5.0).lipschitz
        2.0
    """

    interpolates = True
    ranges = (("threshold", positive),)

    threshold: float = 1.0

    @property
    def knee(self) -> float:
        return self.threshold

    @property
    def line(self) -> Line:
        return Line(-self.threshold, self.threshold, 1.0)


@dataclass(frozen=True)
class Pinball(ResidualLoss):
    """Quantile loss max(t r, (t - 1) r), subgradient 0 at r = 0; its minimizer is the t-quantile.

    alpha = 0, L = B, M = G(R) = B max(t, 1-t), M0 = Y max(t, 1-t).

    Args:
        quantile: t in (0, 1).

    Source:
        docs/proofs/holder.md#constants-of-the-losses.

    Example:
        >>> Pinball(quantile=0.75).problem(bound_x=1.0).lipschitz
        0.75
    """

    ranges = (("quantile", _quantile),)

    quantile: float = 0.5

    def smoothed(self, width: float) -> SmoothedPinball:
        return SmoothedPinball(self.quantile, width)

    @property
    def line(self) -> Line:
        return _tilted(self.quantile, 0.0)


@dataclass(frozen=True)
class SmoothedPinball(ResidualLoss):
    """Quantile loss with a parabola at the kink: r c - w c^2/2 with the slope c = clip(r/w, t - 1, t).

    At most (w/2) max(t, 1-t)^2 below the quantile loss. alpha = 1, L = B^2/w; any other alpha with L = w^-alpha
    B^(1+alpha). With c(v) = min(max(t, 1-t), v/w): G(R) = B c(Y + B R), M = G(0), M0 = c(Y) (Y - w c(Y)/2).

    Args:
        quantile: t in (0, 1).
        width: w > 0, of the parabola.

    Source:
        docs/proofs/holder.md#constants-of-the-losses.

    Example:
        >>> SmoothedPinball(quantile=0.75, width=0.5).problem(bound_x=1.0).smoothness
        2.0
    """

    interpolates = True
    ranges = (("quantile", _quantile), ("width", positive))

    quantile: float = 0.5
    width: float = 1.0

    @property
    def knee(self) -> float:
        return self.width

    @property
    def line(self) -> Line:
        return _tilted(self.quantile, self.width)


def _tilted(quantile: float, width: float) -> Line:
    return Line(Fraction(quantile) - 1, Fraction(quantile), width)


@dataclass(frozen=True)
class EpsilonInsensitive(ResidualLoss):
    """(|r| - w)_+, the loss of support vector regression; subgradient 0 at |r| = w.

    alpha = 0, L = 2B, M = B if Y > w else 0, M0 = (Y - w)_+, G(R) = B if Y + B R > w else 0, Lipschitz constant B.

    Args:
        width: half-width w >= 0 of the tube.

    Source:
        docs/proofs/holder.md#constants-of-the-losses.

    Example:
        >>> EpsilonInsensitive(width=5.0).problem(bound_x=1.0, radius=1.0).grad_bound()
        0.0
    """

    line = Line(-1.0, 1.0)  # for alpha and L alone
    ranges = (("width", nonnegative),)

    width: float = 0.1

    def curve(self, residual: Tensor) -> Tensor:
        return (residual.abs() - self.width).clamp(min=0)

    def slope(self, residual: Tensor) -> Tensor:
        return residual.sign() * (residual.abs() > self.width)

    def loss_at_zero(self, bound_y: float) -> float:
        return upper(max(Fraction(bound_y) - Fraction(self.width), Fraction(0)))

    def grad_bound(self, radius: float, bound_x: float, bound_y: float) -> float:
        # A rounded sum must not miss a residual that leaves the tube.
        reach = bound_y if radius == 0 else round_up(bound_y + bound_x * radius)
        return bound_x if reach > self.width else 0.0


_BLOCK_ROWS = 4096


@typed
def enforce_bounds(
    features: Tensor,
    targets: Tensor | None = None,
    *,
    bound_x: float,
    bound_y: float | None = None,
) -> Any:
    """Maps every record into the bounds: x <- x min(1, B/||x||) and y <- clip(y, -Y, Y).

    Rows within the bound come back bit for bit; longer rows are scaled to a norm just below B, so that rounding to
    the dtype of `features` cannot lift them above it. A row with a non-finite feature becomes 0, a NaN target 0.
    Norms are evaluated in float64, with an error of (d + 3) 2^-53, relative.

    Args:
        features: shape (n, ...), floating point; a record is a row, flattened. Append the bias column before.
        targets: real targets, any shape, floating point, or None. Class numbers need no bound: do not pass them.
        bound_x: B > 0, finite.
        bound_y: Y > 0, finite; given if and only if `targets` are.

    Returns:
        New features, of the same shape and dtype; with targets, the pair (features, targets).

    Raises:
        ValueError: if a bound is not finite and positive, the features are not a floating point batch, or targets and
            bound_y do not come together. Never because of the value of a record.

    Guarantee:
        A map of each record by itself: it sends adjacent data sets to adjacent data sets (any adjacency, example or
        user), so that a mechanism private after it is private before it. Needs B and Y that are public.

    Source:
        docs/proofs/holder.md#promises.

    Example:
        >>> enforce_bounds(torch.tensor([[3.0, 4.0], [0.5, 0.0]]), bound_x=10.0).tolist()
        [[3.0, 4.0], [0.5, 0.0]]
    """
    limit_x, limit_y = record_bounds(bound_x, 1.0 if bound_y is None else bound_y)
    if features.dim() < 2 or not features.is_floating_point():
        raise ValueError(
            f"features must be floating point of shape (n, ...) (got {features.dtype},"
            f" {tuple(features.shape)})"
        )
    if (targets is None) != (bound_y is None):
        raise ValueError(f"targets and bound_y must be given together (got bound_y={bound_y})")
    # In blocks, so that the float64 copy stays small.
    bounded = torch.cat(
        [_into_ball(block, limit_x) for block in torch.split(features, _BLOCK_ROWS)]
    )
    return bounded if targets is None else (bounded, _into_interval(targets, limit_y))


def _into_ball(block: Tensor, bound: float) -> Tensor:
    if not block.numel():
        return block
    rows = block.flatten(1).double()
    guard = torch.finfo(block.dtype).eps + (rows.shape[1] + 4) * torch.finfo(torch.float64).eps
    # Nothing to do where all norms are plainly within the bound; a NaN fails the comparison. Norms whose squares
    # underflow are too small, by less than sqrt(d) 2^-510.
    if bound > 2.0**-400 and bool(
        (torch.linalg.vector_norm(rows, dim=1) <= bound * (1 - guard)).all()
    ):
        return block.clone()
    # PRIVACY: masked, since 0 * inf is NaN (test_a_row_with_a_non_finite_feature_becomes_zero)
    rows = torch.where(rows.isfinite().all(1, keepdim=True), rows, 0)
    # Dividing by a power of two is exact, and keeps the squares of huge and tiny rows inside the range of float64.
    exponent = torch.frexp(rows.abs().amax(1, keepdim=True)).exponent.clamp(-1000, 1000)
    scale = torch.exp2(exponent.double())
    unit = rows / scale
    length = torch.linalg.vector_norm(unit, dim=1, keepdim=True)
    # PRIVACY: the guard covers the norm and the final cast (test_enforced_norms_never_exceed_the_bound), and
    # what a cast to a subnormal number adds (test_bounds_near_the_least_number_of_a_dtype_are_enforced)
    added = 2 * _least(block.dtype) * math.sqrt(rows.shape[1])
    clipped = unit * (bound / length * (1 - guard) - added / length).clamp(min=0.0)
    return (
        torch.where(length * scale > bound, clipped, rows).to(block.dtype).reshape(block.shape)
    )


def _least(dtype: torch.dtype) -> float:
    """Returns the least number of a dtype above 0."""
    return torch.finfo(dtype).tiny * torch.finfo(dtype).eps


def _into_interval(targets: Tensor, bound: float) -> Tensor:
    if not targets.is_floating_point():
        raise ValueError(
            f"targets must be floating point (got {targets.dtype}); class numbers need no bound"
        )
    info = torch.finfo(targets.dtype)
    limit = float(torch.tensor(bound, dtype=torch.float64).to(targets.dtype))
    if limit > bound:  # the nearest number of the dtype lies outside the interval
        limit = float(
            torch.tensor(bound * (1 - info.eps), dtype=torch.float64).to(targets.dtype)
        )
    limit = min(limit, info.max)
    return torch.where(targets.isnan(), 0, targets).clamp(-limit, limit)


_GUARD = 1e-9  # relative; more than the rounding of a norm of up to 10^6 coordinates, of C/||x|| and of the product


@dataclass(frozen=True)
class ClippedRows:
    """The clipped loss of a block of records, one limit on |phi'| each.

    Attributes:
        loss: phi.
        limits: (B,) largest |phi'|, > 0, possibly inf.
    """

    loss: ScalarLoss
    limits: Tensor

    @cached_property
    def corners(self) -> Tensor:
        """(B,) margins or residuals at which the slope reaches the limit."""
        return self.loss.corner(self.limits)

    def part(self, rows: slice) -> ClippedRows:
        """Returns the loss of some of the records."""
        part = ClippedRows(self.loss, self.limits[rows])
        part.__dict__["corners"] = self.corners[rows]
        return part

    def value(self, score: Tensor, target: Tensor) -> Tensor:
        """Loss phi before the corner, its tangent beyond; shapes (B,)."""
        place, _ = self.loss.place(score, target)
        kept = self.loss.up_to(place, self.corners)
        # 0 where nothing is clipped: inf * 0 would be NaN
        beyond = torch.where(kept == place, 0.0, self.limits * (kept - place).abs())
        return self.loss.curve(kept) + beyond

    def derivative(self, score: Tensor, target: Tensor) -> Tensor:
        """Slope phi' clipped, shape (B,); at most the limit for targets |y| <= 1 of a margin loss."""
        return torch.clamp(self.loss.derivative(score, target), -self.limits, self.limits)

    def second_derivative(self, score: Tensor, target: Tensor) -> Tensor:
        """Curvature phi'' before the corner, 0 beyond; shape (B,)."""
        inside = self.loss.derivative(score, target).abs() < self.limits
        return torch.where(inside, self.loss.second_derivative(score, target), 0.0)


@dataclass(frozen=True)
class ResidualClipped:
    """A loss of one score with the gradients of its records clipped to norm C: still convex, and C-Lipschitz.

    For the logistic loss phi_c'(m) = max(-sigmoid(-m), -C/||x||): the pull of badly misclassified records is capped.

    Args:
        loss: Logistic, SmoothedHinge, Hinge(power=2), Squared or Huber.
        clip: C > 0, bound on the gradient norm of a record; public.

    Raises:
        ConditionError: if the slope of the loss cannot be clipped to a C^1 loss (it has jumps, or K scores).

    Source:
        docs/proofs/output.md#clipped-residuals

    Example:
        >>> loss = ResidualClipped(Logistic(), clip=0.25)
        >>> loss.smoothness(bound_x=1.0), Logistic().problem(bound_x=1.0).smoothness
        (0.1875, 0.25)
        >>> loss.of_norms(torch.ones(1)).derivative(torch.tensor([-9.0]), torch.ones(1)).tolist()
        [-0.25]
    """

    loss: ScalarLoss
    clip: float

    num_scores: ClassVar[int] = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "clip", positive(clip=self.clip))
        if not isinstance(self.loss, ScalarLoss):
            raise ConditionError(f"loss must have one score (got {self.loss!r})")
        self.loss.corner(torch.ones(1))  # refuses losses without a corner

    @property
    def target_kind(self) -> str:
        """As of the loss: "sign" or "real"."""
        return self.loss.target_kind

    @property
    def unclipped(self) -> ScalarLoss:
        """The loss whose gradients are clipped."""
        return self.loss

    def limits(self, norms: Tensor) -> Tensor:
        """The largest |phi'| of records with these feature norms, shape (B,); inf at norm 0, which is not clipped."""
        # PRIVACY: rounded down, so that limit * ||x|| never exceeds C (test_clipped_gradients_never_exceed_the_clip)
        return self.clip * (1 - _GUARD) / norms

    def of_norms(self, norms: Tensor) -> ClippedRows:
        """The loss of records with these feature norms, shape (B,)."""
        return ClippedRows(self.loss, self.limits(norms))

    def smoothness(self, bound_x: float) -> float:
        """Bound on phi_c'' ||x||^2 for ||x|| <= bound_x: C(B - C) of a clipped logistic, else that of phi.

        C(B - C) grows with B up to C < B/2, and sigma(1 - sigma) B^2 <= B^2/4 always.
        """
        bound_x = positive(bound_x=bound_x)
        if self.clip < bound_x / 2:
            clipped = self.loss.clipped_bend(self.clip, bound_x)
            if clipped is not None:
                return clipped
        smoothness = self.loss.problem(bound_x=bound_x).smoothness
        assert smoothness is not None  # losses with a corner are C^1
        return smoothness
