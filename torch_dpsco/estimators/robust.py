"""Robust linear models: tilted means of losses, and the worst loss under attack.

Tilted mean: F(w) = (1/tau) log((1/n) sum_i exp(tau l_i(w))) + (reg/2) ||w||^2. tau > 0 stresses the records with large
losses, tau < 0 ignores them, tau = 0 is the mean.

Differs from the paper in: the regularizer stays outside of the tilt, which changes nothing; tau < 0 is allowed, with
mu = reg - |tau| L^2. Null records keep their place in the mean, as x = 0 and y = 0: they have gradient 0 and the loss
l(0), inside the range of the losses, so that the bound C/(C + n - 1) on the weight of a record holds with all n.

Under attack: F(w) = (1/N) sum_i c_i max over ||v||_p <= rho of phi(y_i <w, x_i + v>) + (reg/2)||w||^2.

For a nonincreasing phi of the margin the maximum is phi(y <w, x> - rho ||w||_*) with the dual norm: ||w||_2 for p = 2,
||w||_1 for p = inf. No saddle point is needed. With features that are moved s_j times as far it is ||(s_j w_j)_j||_*:
attacks from an ellipsoid, or a box.

Differs from the paper in: the norm has kinks, so that a maximum of smooth losses is not smooth; `smoothing` = nu > 0
replaces |t| by sqrt(t^2 + nu^2) (of ||w||, or of each coordinate for p = inf), publicly. At nu = 0 it can be
evaluated, but not solved.
"""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor

from torch_dpsco._validate import choice, finite, nonnegative, positive, typed
from torch_dpsco.accounting.analysis.rounding import gamma
from torch_dpsco.errors import ConditionError, NotCertifiedError
from torch_dpsco.estimators.objectives import EVALUATION, norm_up
from torch_dpsco.estimators.records import Objective, Records
from torch_dpsco.losses.base import TableLoss
from torch_dpsco.losses.table import MarginLoss


@typed
class Tilted(Objective):
    """(1/tau) log((1/n) sum_i exp(tau l(<w, x_i>; y_i))) + (reg/2) ||w||^2.

    Args:
        loss: Logistic, SmoothedHinge or Huber: one score, Lipschitz and smooth.
        records: one or more; read twice per gradient.
        tilt: tau, finite, either sign.
        reg: >= 0.
        bound_x: public bound on ||x||; needed for tau < 0, where strong convexity is reg - |tau| L^2 with L = |phi'| B.

    Raises:
        ValueError: if shapes or dtypes do not fit, or a number is out of range.
        ConditionError: if the loss is not Lipschitz and smooth, or reg <= |tau| L^2 for tau < 0.
        NotCertifiedError: if a record exceeds `bound_x` and tau < 0: a violated promise, outside of any guarantee.

    Source:
        docs/proofs/output.md#tilted-means

    Example:
        >>> from torch_dpsco.losses import Logistic
        >>> F = Tilted(Logistic(), Records(torch.eye(2), torch.ones(2)), tilt=2.0, reg=0.1)
        >>> round(F.value(torch.zeros(2, dtype=torch.float64)), 4), F.weights(torch.zeros(2).double()).tolist()
        (0.6931, [0.5, 0.5])
    """

    def __init__(
        self,
        loss: TableLoss,
        records: Records,
        *,
        tilt: float,
        reg: float,
        bound_x: float | None = None,
    ) -> None:
        self.loss = loss
        problem = loss.problem(bound_x=1.0)
        if problem.lipschitz is None or problem.smoothness is None:
            raise ConditionError(
                f"loss must be Lipschitz and smooth (got {loss!r}); take Huber or SmoothedHinge"
            )
        self.records = records
        if self.records.count < 1:
            raise ValueError(
                "features must hold at least one record: a tilted mean of none is not defined"
            )
        self.tilt = finite(tilt=tilt)
        self.reg = nonnegative(reg=reg)
        self.dim = self.records.dim
        self.device = self.records.device
        largest = float(self.records.targets.abs().max())
        self._slope = loss.grad_bound(math.inf, 1.0, max(largest, 1.0))
        self._bend = problem.smoothness
        # the slope in the score is y phi'(y s) for a margin: a label beyond 1 counts as a longer row
        labels = self.records.targets.abs().clamp(min=1.0) if loss.target_kind == "sign" else 1.0
        self._largest = float((self.records.norms * labels).max()) * (1 + gamma(self.dim + 8))
        lipschitz = self._slope * self._largest
        curvature = self._bend * self._largest**2
        if bound_x is not None:
            positive(bound_x=bound_x)
        self.strong_convexity = self.reg if self.tilt >= 0 else self._tilted_down(bound_x)
        self.smoothness = (curvature + max(self.tilt, 0.0) * lipschitz**2 + self.reg) * (
            1 + gamma(16)
        )
        self._at_zero = float(
            self.loss.value(torch.zeros_like(self.records.norms), self.records.targets).max()
        )

    def weights(self, point: Tensor) -> Tensor:
        """The weights v = softmax(tau l), shape (n,)."""
        return self._read(point)[2]

    def _read(self, point: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Scores, losses and weights of the records."""
        scores = self.records.scores(point)
        losses = self.loss.value(scores, self.records.targets)
        exponents = self.tilt * losses
        terms = torch.exp(exponents - exponents.max())
        return scores, losses, terms / self.records.total(terms)

    def value_and_gradient(self, point: Tensor) -> tuple[float, Tensor]:
        """F(w) and its gradient sum_i v_i grad l_i + reg w, in two passes over the data."""
        scores, losses, weights = self._read(point)
        value = self._tilted_mean(losses) + self.reg / 2 * float(point @ point)
        slopes = weights * self.loss.derivative(scores, self.records.targets)
        return value, self.records.combine(slopes) + self.reg * point

    def hessian(self, point: Tensor) -> Tensor:
        """sum_i v_i (phi''_i + tau phi'_i^2) x_i x_i^T - tau g g^T + reg I with g the weighted gradient."""
        scores, _, weights = self._read(point)
        slopes = self.loss.derivative(scores, self.records.targets)
        bends = self.loss.second_derivative(scores, self.records.targets)
        mean = self.records.combine(weights * slopes)
        total = self.records.gram(weights * (bends + self.tilt * slopes * slopes))
        total -= self.tilt * torch.outer(mean, mean)
        total.diagonal().add_(self.reg)
        return total

    def gradient_error(self, point: Tensor) -> float:
        """Bound on ||computed - exact gradient||.

        The weights have the relative error expm1(2 a) + gamma(depth + ...), a that of the exponents tau l.
        """
        size = norm_up(point)
        lipschitz = self._slope * self._largest
        widest = float(self.records.targets.abs().max())
        scores = gamma(self.dim + 4) * (self._largest * size + widest)
        bound = self._at_zero + lipschitz * size
        error = self._slope * scores + gamma(EVALUATION) * bound  # of one loss
        exponents = abs(self.tilt) * (error + gamma(8) * bound)
        relative = math.expm1(min(2 * exponents, 700.0)) + gamma(
            2 * self.records.depth + 2 * EVALUATION
        )
        slopes = self._bend * self._largest * scores
        return (
            relative * lipschitz
            + slopes * (1 + relative)
            + gamma(8) * (lipschitz + self.reg * size)
        ) * (1 + 1e-9)

    def _tilted_down(self, bound_x: float | None) -> float:
        if bound_x is None:
            raise ConditionError(
                "bound_x must be given for tilt < 0: strong convexity is reg - |tilt| L^2"
            )
        lipschitz = self._slope * bound_x
        # the norms of clipped rows may exceed the bound by the rounding of a norm
        left = self.reg - abs(self.tilt) * lipschitz**2 * (1 + 4e-9)
        if left <= 0:
            raise ConditionError(
                f"reg must exceed |tilt| L^2 = {abs(self.tilt) * lipschitz**2:g} (got {self.reg:g})"
            )
        if self._largest > bound_x * (1 + 1e-9):
            raise NotCertifiedError(
                "a record exceeds bound_x: clip the rows before (losses.enforce_bounds)"
            )
        return left

    def _tilted_mean(self, losses: Tensor) -> float:
        count = self.records.count
        mean = self.records.total(losses) / count
        spread = self.tilt * (losses - mean)
        if self.tilt == 0:
            return float(mean)
        if float(spread.abs().max()) < 1:
            # of first and higher order in tau without the cancellation of log-sum-exp minus log n
            return float(
                mean + torch.log1p(self.records.total(torch.expm1(spread)) / count) / self.tilt
            )
        peak = (self.tilt * losses).max()
        terms = self.records.total(torch.exp(self.tilt * losses - peak))
        return float((peak + torch.log(terms / count)) / self.tilt)


def margin_loss(loss: TableLoss) -> MarginLoss:
    """The loss itself; raises ConditionError unless it is a smooth margin loss with bounded gradients."""
    link = loss.problem(bound_x=1.0)
    if not isinstance(loss, MarginLoss) or None in (link.lipschitz, link.smoothness):
        # PRIVACY: concavity in attacks would have to be trusted, and no loss of a score has it
        # (test_a_saddle_gap_that_trusts_concavity_certifies_a_wrong_point)
        raise ConditionError(
            "loss must be a smooth margin loss with bounded gradients under attack, as Logistic"
            f" and SmoothedHinge are (got {loss!r}): of others nothing proves how far an answer is"
            " from the minimum. In a loop of ClippedSGD you may attack rows of any model and loss"
        )
    return loss


@typed
class Adversarial(Objective):
    """(1/N) sum_i c_i phi(y_i <w, x_i> - rho ||w||_*) + (reg/2) ||w||^2.

    Args:
        loss: a smooth margin loss with bounded gradients, as Logistic and SmoothedHinge.
        records: with labels +-1 (|y| <= 1).
        attack_radius: rho >= 0, public.
        reg: >= 0.
        normalizer: N > 0, public.
        attack_norm: p, 2 or inf.
        attack_scale: s, (d,), >= 0: attacks are v = s u, coordinate by coordinate, with ||u||_p <= rho; None for 1.
        smoothing: nu >= 0, public; > 0 for an objective that can be solved.

    Raises:
        ValueError: if shapes or dtypes do not fit, or a number is out of range.
        ConditionError: if the loss is not a smooth, Lipschitz margin loss.

    Source:
        docs/proofs/output.md#robust-losses

    Example:
        >>> from torch_dpsco.losses import Logistic
        >>> records = Records(torch.eye(2), torch.ones(2))
        >>> F = Adversarial(Logistic(), records, attack_radius=0.5, reg=0.1, normalizer=2)
        >>> F.smoothness is None, round(F.value(torch.zeros(2, dtype=torch.float64)), 4)
        (True, 0.6931)
    """

    def __init__(
        self,
        loss: TableLoss,
        records: Records,
        *,
        attack_radius: float,
        reg: float,
        normalizer: float = 1.0,
        attack_norm: float = 2,
        attack_scale: tuple[float, ...] | None = None,
        smoothing: float = 0.0,
    ) -> None:
        self.loss = margin_loss(loss)
        link = loss.problem(bound_x=1.0)
        self.records = records
        self.dim = records.dim
        self.device = records.device
        self.reg = self.strong_convexity = nonnegative(reg=reg)
        self.normalizer = positive(normalizer=normalizer)
        self.attack_radius = nonnegative(attack_radius=attack_radius)
        self.attack_norm = choice((2, math.inf), attack_norm=attack_norm)
        self.smoothing = nonnegative(smoothing=smoothing)
        self._scale = _scales(attack_scale, self.dim).to(self.device)
        self._copies = 1 if self.attack_norm == 2 else self.dim
        most = float(self._scale.max())
        length = most if self.attack_norm == 2 else float(self._scale.norm())
        # of record i: ||x_i|| + rho ||s|| (or max s) bounds the gradient of its margin
        steep = records.norms * records.targets.abs().clamp(min=1.0)
        reach = (steep + self.attack_radius * length) * (1 + gamma(self.dim + 8))
        up = 1 + gamma(records.depth + 16)
        self._widest = float(reach.max()) if records.count else 0.0
        bends = records.weights * cast(float, link.smoothness)
        self._reach_bend = float(records.total(bends * reach)) * up
        self._reach_mass = (
            float(records.total(records.weights * reach)) * up * cast(float, link.lipschitz)
        )
        self.smoothness = None
        if self.smoothing > 0 or self.attack_radius == 0:
            curvature = float(records.total(bends * reach * reach)) * up
            weight = float(records.total(records.weights)) * up
            kink = weight * self.attack_radius / self.smoothing if self.attack_radius else 0.0
            kink *= most**2 * cast(float, link.lipschitz)
            self.smoothness = ((curvature + kink) / self.normalizer + self.reg) * up

    def value_and_gradient(self, point: Tensor) -> tuple[float, Tensor]:
        """F(w) and the gradient; where the norm has a kink its subgradient is taken as 0."""
        targets = self.records.targets
        margins = self._margins(point)
        slopes = self.records.weights * self.loss.slope(margins)
        losses = self.records.total(self.records.weights * self.loss.curve(margins))
        value = losses / self.normalizer + self.reg / 2 * (point @ point)
        pull = (
            -self.attack_radius * self.records.total(slopes) / self.normalizer
        )  # of the norm, to 0
        gradient = self.records.combine(targets * slopes) / self.normalizer
        return float(value), gradient + pull * self._slope_of_norm(point) + self.reg * point

    def hessian(self, point: Tensor) -> Tensor:
        """sum_i c_i phi''_i u_i u_i^T/N + pull * (second derivative of the norm) + reg I, u_i = y_i x_i - rho s(w)."""
        slope = self._slope_of_norm(point)
        targets = self.records.targets
        margins = self._margins(point)
        bends = self.records.weights * self.loss.bend(margins) / self.normalizer
        pull = -self.attack_radius * self.records.total(
            self.records.weights * self.loss.slope(margins)
        )
        cross = torch.outer(self.records.combine(bends * targets), self.attack_radius * slope)
        total = self.records.gram(bends * targets * targets) - cross - cross.T
        total += self.attack_radius**2 * self.records.total(bends) * torch.outer(slope, slope)
        total += pull / self.normalizer * self._bend_of_norm(point, slope)
        total.diagonal().add_(self.reg)
        return total

    def gradient_error(self, point: Tensor) -> float:
        """Bound on ||computed - exact gradient||."""
        size = norm_up(point)
        offset = self.attack_radius * self.smoothing * self._copies
        margin = gamma(self.dim + 8) * (self._widest * size + offset)
        mass = self._reach_mass
        slopes = self._reach_bend * margin
        summed = gamma(self.records.depth + EVALUATION + self.dim) * mass
        return (
            (slopes + summed) / self.normalizer
            + gamma(16) * (mass / self.normalizer + self.reg * size)
        ) * (1 + 1e-9)

    def _margins(self, point: Tensor) -> Tensor:
        scores = self.records.scores(point)
        return self.records.targets * scores - self.attack_radius * self._norm(point)

    def _norm(self, point: Tensor) -> Tensor:
        sizes = self._sizes(point)
        return sizes if self.attack_norm == 2 else sizes.sum()

    def _sizes(self, point: Tensor) -> Tensor:
        """Smoothed: ||s w||, or each |s_j w_j|."""
        moved = self._scale * point
        size = torch.linalg.vector_norm(moved) if self.attack_norm == 2 else moved
        return torch.hypot(size, point.new_tensor(self.smoothing))

    def _slope_of_norm(self, point: Tensor) -> Tensor:
        sizes = self._sizes(point)
        moved = self._scale * point
        return torch.where(sizes > 0, self._scale * (moved / sizes), 0.0)

    def _bend_of_norm(self, point: Tensor, slope: Tensor) -> Tensor:
        sizes = self._sizes(point)
        squares = self._scale**2
        if self.attack_norm == 2:
            bend = (torch.diag(squares) - torch.outer(slope, slope)) / sizes
        else:
            bend = torch.diag((squares - slope * slope) / sizes)
        return torch.where(sizes > 0, bend, 0.0)


def _scales(given: tuple[float, ...] | None, dim: int) -> Tensor:
    """How far each feature may be moved, (d,)."""
    if given is None:
        return torch.ones(dim, dtype=torch.float64)
    if len(given) != dim:
        raise ValueError(f"attack_scale must have {dim} numbers (got {len(given)})")
    for one in given:
        nonnegative(attack_scale=one)
    return torch.tensor(given, dtype=torch.float64)
