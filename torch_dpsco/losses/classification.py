"""Losses for classes: of the margin y s for labels +-1, and softmax cross-entropy.

Losses of the margin m = y s for labels y = +-1: hinge powers, logistic, smoothed hinge.

Labels need not be checked: a criterion reads y > 0 as 1 and others as -1 (`base.read`), so that every constant of
the table holds. `value` and `derivative` take y as it is: for |y| <= 1 the constants hold too (the loss phi(y w.x) is
that of the record (y x, 1), and ||y x|| <= B), and y = 0 is a null record of gradient 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TypeVar

import torch
from torch import Tensor

from torch_dpsco._validate import between, nonnegative, positive, positive_count
from torch_dpsco.accounting.analysis.rounding import safe, scaled_up, upper
from torch_dpsco.losses.base import ScalarLoss, TableLoss, power_up

_Number = TypeVar("_Number", float, Tensor)


class MarginLoss(ScalarLoss):
    """phi(m) of the margin m = y s, phi convex and nonincreasing, with a slope in (-inf, 0]."""

    target_kind = "sign"
    monotone = True

    def place(self, score: Tensor, target: Tensor) -> Tensor:
        """Margin y s; score and target of one shape."""
        return target * score

    def up_to(self, place: Tensor, corner: Tensor) -> Tensor:
        """Margin cut off below."""
        return torch.maximum(place, corner)

    def derivative(self, score: Tensor, target: Tensor) -> Tensor:
        """Derivative y phi'(y s); score and target of one shape."""
        return target * self.slope(target * score)

    def second_derivative(self, score: Tensor, target: Tensor) -> Tensor:
        """Second derivative y^2 phi''(y s); score and target of one shape."""
        return target * target * self.bend(target * score)


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

    power: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "power", between(1.0, 2.0, power=self.power))

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

    def holder_exponent(self) -> float:
        return 1.0

    def holder_constant(self, exponent: float, bound_x: float) -> float:
        return upper(bound_x, power_up(bound_x / 4, exponent))

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

    width: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "width", positive(width=self.width))

    def curve(self, margin: Tensor) -> Tensor:
        gap = (1 - margin).clamp(min=0)
        curved = gap.clamp(max=self.width)
        return curved * (gap - curved / 2) / self.width

    def slope(self, margin: Tensor) -> Tensor:
        return -((1 - margin) / self.width).clamp(0, 1)

    def bend(self, margin: Tensor) -> Tensor:
        return ((margin < 1) & (margin >= 1 - self.width)).to(margin.dtype) / self.width

    def corner(self, limit: Tensor) -> Tensor:
        return torch.where(limit < 1, 1 - limit * self.width, -math.inf)

    def holder_exponent(self) -> float:
        return 1.0

    def holder_constant(self, exponent: float, bound_x: float) -> float:
        return upper(bound_x, power_up(upper(bound_x, 1 / Fraction(self.width)), exponent))

    def loss_at_zero(self, bound_y: float) -> float:
        width = Fraction(self.width)
        return upper(1 - width / 2 if width <= 1 else 1 / (2 * width))

    def grad_bound(self, radius: float, bound_x: float, bound_y: float) -> float:
        reach = 1 + bound_x * radius
        if reach >= self.width:
            return bound_x
        return upper(bound_x, Fraction(reach) / Fraction(self.width))


@dataclass(frozen=True)
class SoftmaxCrossEntropy(TableLoss):
    """log sum_c exp(s_c) - s_y for scores s = W x of C classes; norms of W are Frobenius norms.

    alpha = 1, L = B^2/2 (the Hessian of log-sum-exp is at most 1/2), M = B sqrt(1 - 1/C), M0 = log C,
    G(R) <= min(sqrt(2) B, M + L R), Lipschitz constant sqrt(2) B. Not a scalar-score loss: is_glm is False.

    A label outside 0..C-1 makes a null record, loss and gradient 0: which records have one is private, so that it
    must not raise.

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
        known, label = self._known(target)
        picked = score.gather(1, label.unsqueeze(1)).squeeze(1)
        return torch.where(known, score.logsumexp(1) - picked, 0)

    def derivative(self, score: Tensor, target: Tensor) -> Tensor:
        """softmax(s) - onehot(y), shape (B, C)."""
        known, label = self._known(target)
        classes = torch.arange(self.num_classes, device=label.device)
        onehot = (label.unsqueeze(1) == classes).to(score.dtype)
        return torch.where(known.unsqueeze(1), score.softmax(1) - onehot, 0)

    def _known(self, target: Tensor) -> tuple[Tensor, Tensor]:
        known = (target >= 0) & (target < self.num_classes)
        return known, torch.where(known, target, 0)

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
