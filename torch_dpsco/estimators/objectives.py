"""Empirical risk of linear models: losses of one score, and softmax regression.

F(w) = (1/N) sum_i c_i l(<w, x_i>; y_i) + (reg/2) ||w||^2 + <q, w>
F(W) = (1/N) sum_i c_i (logsumexp(W x_i) - (W x_i)_{y_i}) + (reg/2) ||W||^2 + <q, W>

Robust linear models: tilted means of losses, and the worst loss under attack.

Tilted mean: F(w) = (1/tau) log((1/n) sum_i exp(tau l_i(w))) + (reg/2) ||w||^2. tau > 0 stresses the records with large
losses, tau < 0 ignores them, tau = 0 is the mean.

Differs from the paper in: the regularizer stays outside of the tilt, which changes nothing; tau < 0 is allowed, with
mu = reg - |tau| L^2. Null records keep their place in the mean, as x = 0 and y = 0: they have gradient 0 and the loss
l(0), inside the range of the losses, so that the bound C/(C + n - 1) on the weight of a record holds with all n.

Under attack: F(w) = (1/N) sum_i c_i max over ||v||_p <= rho of phi(y_i <w, x_i + v>) + (reg/2)||w||^2.

For a nonincreasing phi of the margin the maximum is phi(y <w, x> - rho ||w||_*) with the dual norm: ||w||_2 for p = 2,
||w||_1 for p = inf. No saddle point is needed.

Differs from the paper in: the norm has kinks, so that a maximum of smooth losses is not smooth; `smoothing` = nu > 0
replaces |t| by sqrt(t^2 + nu^2) (of ||w||, or of each coordinate for p = inf), publicly. At nu = 0 it can be
evaluated, but not solved.
"""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import cast

import torch
from torch import Tensor

from torch_dpsco._validate import choice, finite, nonnegative, positive, typed
from torch_dpsco.accounting.analysis.rounding import gamma
from torch_dpsco.errors import ConditionError, NotCertifiedError
from torch_dpsco.estimators.records import Objective, PairwiseSum, Records
from torch_dpsco.estimators.row_losses import row_losses
from torch_dpsco.losses.base import TableLoss
from torch_dpsco.losses.table import (
    ClippedRows,
    MarginLoss,
    ResidualClipped,
    SoftmaxCrossEntropy,
    scalar_loss,
)

# Roundings of one record besides those of its score and of the sum: the loss and its slope (an exponential within 1
# ulp, a logarithm, a quotient), label, weight, normalizer, and the norm used in the bound itself.
EVALUATION = 32


def _row_sums(loss: TableLoss | ResidualClipped, records: Records) -> tuple[Tensor, ...]:
    """Weighted sums of slope |x|, start |x|, bend |x| |y|, bend |x|^2; 0 of bends where phi' jumps."""
    table = loss.unclipped
    smoothness = table.problem(bound_x=1.0).smoothness
    norms = records.norms * (1 + gamma(records.dim + 8))
    targets = records.targets.abs()
    zero = torch.zeros_like(norms)
    ones = torch.ones_like(norms)
    # the slope in the score is y phi'(y s) for a margin: a label beyond 1 steepens it
    label = targets.clamp(min=1.0) if table.target_kind == "sign" else ones
    largest = float(targets.max()) if len(targets) else 1.0
    slope = label * table.grad_bound(math.inf, 1.0, max(largest, 1.0))
    slope = torch.minimum(slope, loss.limits(records.norms))
    start = torch.minimum(table.derivative(zero, records.targets).abs(), slope)
    bend = zero
    if smoothness is not None:
        bend = label * label * smoothness
        less = table.clipped_bend(slope, ones)
        if less is not None:  # for labels +-1
            bend = torch.where((targets == 1) & (slope <= 0.5), less, bend)
    slopes = torch.where(norms > 0, slope * norms, 0.0)
    masses = slopes, start * norms, bend * norms * targets, bend * norms * norms
    return tuple(records.total(records.weights * mass) for mass in masses)


class SumObjective(Objective):
    """(1/N) sum_i c_i l_i(w) + (reg/2) ||w||^2 + <q, w>: what all sums over records share.

    Args:
        records: c_i, and what the losses l_i are of.
        dim: of w.
        reg: weight of (1/2)||w||^2, >= 0; strong convexity of the objective.
        normalizer: N > 0; public.
        linear_term: q, (dim,) float64, or None.
    """

    def __init__(
        self,
        records: Records,
        dim: int,
        reg: float,
        normalizer: float = 1.0,
        linear_term: Tensor | None = None,
    ) -> None:
        self.records = records
        self.dim = dim
        self.device = records.device
        self.reg = self.strong_convexity = nonnegative(reg=reg)
        self.normalizer = positive(normalizer=normalizer)
        if linear_term is not None and (
            linear_term.shape != (dim,) or linear_term.dtype != torch.float64
        ):
            raise ValueError(
                f"linear_term must be float64 of shape ({dim},) (got {tuple(linear_term.shape)})"
            )
        self.linear_term = linear_term

    def gradient(self, point: Tensor) -> Tensor:
        """The gradient alone."""
        return self.value_and_gradient(point)[1]

    def completed(self, losses: Tensor, slopes: Tensor, point: Tensor) -> tuple[float, Tensor]:
        """F(w) and its gradient, of the sums of losses and gradients over the records."""
        value = losses / self.normalizer + self.reg / 2 * (point @ point)
        if self.linear_term is not None:
            value = value + self.linear_term @ point
        return float(value), self.with_rest(slopes, point)

    def with_rest(self, slopes: Tensor, point: Tensor) -> Tensor:
        """The gradient, of the sum of those of the records."""
        gradient = slopes / self.normalizer + self.reg * point
        return gradient if self.linear_term is None else gradient + self.linear_term

    def linear_size(self) -> float:
        """||q||, rounded up."""
        return 0.0 if self.linear_term is None else norm_up(self.linear_term)

    def _smoothness(self, curvature: float) -> float:
        return (curvature / self.normalizer + self.reg) * (1 + gamma(8))

    def _rounding(self, scores: float, operations: int, mass: float, size: float) -> float:
        """Bound on the error of the gradient: of scores, of sums of this mass, of the regularizer and of q."""
        common = gamma(8) * (mass / self.normalizer + self.reg * size + self.linear_size())
        return (
            (scores + gamma(self.records.depth + operations) * mass) / self.normalizer + common
        ) * (1 + 1e-9)


@typed
class LinearObjective(SumObjective):
    """(1/N) sum_i c_i l(<w, x_i>; y_i) + (reg/2) ||w||^2 + <q, w>, over in-memory data.

    N = n gives the mean of replace_one; a public n0 the form of add_remove; N = 1 with q = b the sum form of
    objective perturbation.

    Args:
        loss: a loss of one score of `torch_dpsco.losses`, possibly `ResidualClipped`.
        records: with labels +-1 (|y| <= 1) or real targets, as the loss wants them.
        reg: weight of (1/2)||w||^2, >= 0; strong convexity of the objective.
        normalizer: N > 0; public.
        linear_term: q, (d,) float64, or None.

    Raises:
        ValueError: if shapes or dtypes do not fit, or a number is out of range.
        ConditionError: if the loss has more than one score.

    Source:
        docs/proofs/output.md#records-and-the-objective, docs/proofs/output.md#rounding-of-a-gradient

    Example:
        >>> from torch_dpsco.losses import Logistic
        >>> features, labels = torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.tensor([1.0, -1.0])
        >>> F = LinearObjective(Logistic(), Records(features, labels), reg=0.1, normalizer=2)
        >>> value, gradient = F.value_and_gradient(torch.zeros(2, dtype=torch.float64))
        >>> round(value, 4), gradient.tolist(), round(F.smoothness, 4)
        (0.6931, [-0.25, 0.5], 0.725)
    """

    def __init__(
        self,
        loss: TableLoss | ResidualClipped,
        records: Records,
        *,
        reg: float,
        normalizer: float = 1.0,
        linear_term: Tensor | None = None,
    ) -> None:
        self.loss = scalar_loss(loss)
        super().__init__(records, records.dim, reg, normalizer, linear_term)
        self._bound()
        self._last: tuple[Tensor, float, Tensor] | None = None

    def _bound(self) -> None:
        """Reads sums off the records that bound slopes and bends, rounded up: no promise about the data is needed."""
        sums = self.records.sum(partial(_row_sums, self.loss))
        up = 1 + gamma(self.records.depth + 8)
        self._slope, self._start, self._label, self._curvature = (float(s) * up for s in sums)
        smooth = self.loss.unclipped.problem(bound_x=1.0).smoothness is not None
        self.smoothness = self._smoothness(self._curvature) if smooth else None

    def slope_mass(self, size: float) -> float:
        """Bound on sum_i c_i |phi'_i| ||x_i|| over ||w|| <= size, for smooth losses."""
        return min(self._slope, self._start + self._curvature * size)

    def value_and_gradient(self, point: Tensor) -> tuple[float, Tensor]:
        """F(w) and its gradient (the loss's fixed subgradient at kinks), in one pass; of the last w without one."""
        # PRIVACY: a certificate is of this very point (test_a_point_that_was_moved_in_place_is_read_again)
        if self._last is None or not torch.equal(self._last[0], point):
            loss = (
                self.loss
            )  # not self: what is summed may travel to where the records are, and noise must not
            losses, slopes = self.records.sum(partial(value_and_gradient, loss, point))
            self._last = point.clone(), *self.completed(losses, slopes, point)
        _, value, gradient = self._last
        return value, gradient.clone()

    def gradient(self, point: Tensor) -> Tensor:
        """The gradient alone, of a point that will not be asked for again."""
        slopes = self.records.sum(partial(value_and_gradient, self.loss, point))[1]
        return self.with_rest(slopes, point)

    def hessian(self, point: Tensor) -> Tensor:
        """X^T diag(c phi'')X/N + reg I, by blocks; O(n d^2)."""
        loss = self.loss

        def of_part(part: Records) -> tuple[Tensor]:
            if (losses := row_losses(loss, part)) is not None:
                bends = torch.empty_like(part.weights)
                part.scored(point, losses, bends)
                return (part.gram(bends),)
            second = _loss_of(loss, part, slice(None)).second_derivative(
                part.scores(point), part.targets
            )
            return (part.gram(part.weights * second),)

        total = self.records.sum(of_part)[0] / self.normalizer
        total.diagonal().add_(self.reg)
        return total

    def gradient_error(self, point: Tensor) -> float:
        """Bound on ||computed - exact gradient||, of first order in u with a margin for the rest.

        Scores are within gamma(d + 4)(||x|| ||w|| + |y|), which moves a slope by `bend` times that; each slope times
        x is then rounded `EVALUATION` times and passes through `depth` additions; the regularizer and q add a few.
        """
        if self.smoothness is None:
            return math.inf
        size = norm_up(point)
        scores = gamma(self.dim + 4) * (self._curvature * size + self._label)
        return self._rounding(scores, EVALUATION, self.slope_mass(size), size)

    def thinned(self, step: int) -> LinearObjective:
        """The same with every step-th record: near enough for a first guess."""
        fewer = copy.copy(self)
        fewer._last = None
        fewer.records = self.records.thinned(step)
        fewer.normalizer = self.normalizer / step
        fewer._bound()
        return fewer

    def slopes(self, scores: Tensor, rows: slice) -> Tensor:
        """c_i phi'_i of some records, for their scores."""
        return _terms(self.loss, self.records, scores, rows)[1]


def value_and_gradient(
    loss: TableLoss | ResidualClipped, point: Tensor, part: Records
) -> tuple[Tensor, Tensor]:
    """Returns the sums of the losses of records in memory, and of their gradients."""
    losses = row_losses(loss, part)
    if losses is None:
        return part.fold(point, partial(_terms, loss, part))
    return part.scored(point, losses)


def _terms(
    loss: TableLoss | ResidualClipped, part: Records, scores: Tensor, rows: slice
) -> tuple[Tensor, Tensor]:
    of_rows = _loss_of(loss, part, rows)
    targets = part.targets[rows]
    weights = part.weights[rows]
    return weights * of_rows.value(scores, targets), weights * of_rows.derivative(
        scores, targets
    )


def _loss_of(
    loss: TableLoss | ResidualClipped, part: Records, rows: slice
) -> TableLoss | ClippedRows:
    of_part: TableLoss | ClippedRows = part.once(loss, lambda: loss.of_norms(part.norms))
    return of_part.part(rows)


def norm_up(point: Tensor) -> float:
    """||w||, rounded up; the summand covers squares that underflow."""
    return (
        float(torch.linalg.vector_norm(point)) * (1 + gamma(len(point) + 8))
        + len(point) * 1e-160
    )


@typed
class SoftmaxObjective(SumObjective):
    """Cross-entropy of a linear model with K classes; w is W, shape (K, d), flattened row by row.

    Args:
        records: with class numbers, of K >= 2 classes.
        reg: weight of (1/2)||W||_F^2, >= 0.
        normalizer: N > 0, public.
        linear_term: q, (K d,) float64, or None.

    Raises:
        ValueError: if shapes or dtypes do not fit, or a number is out of range.

    Source:
        docs/proofs/objective.md#softmax, docs/proofs/output.md#rounding-of-a-gradient

    Example:
        >>> records = Records(torch.eye(2), torch.tensor([0, 1]), num_classes=3)
        >>> F = SoftmaxObjective(records, reg=0.1, normalizer=2)
        >>> F.dim, round(F.value(torch.zeros(6, dtype=torch.float64)), 4)
        (6, 1.0986)
    """

    def __init__(
        self,
        records: Records,
        *,
        reg: float,
        normalizer: float = 1.0,
        linear_term: Tensor | None = None,
    ) -> None:
        self.loss = SoftmaxCrossEntropy(records.num_classes or 0)
        self.shape = (self.loss.num_classes, records.dim)
        super().__init__(records, math.prod(self.shape), reg, normalizer, linear_term)
        up = 1 + gamma(records.depth + 8)
        lengths, squares = records.sum(_norm_sums)
        self._slope_mass = float(lengths) * math.sqrt(2.0) * up
        self._curvature = float(squares) / 2 * up
        self.smoothness = self._smoothness(self._curvature)

    def value_and_gradient(self, point: Tensor) -> tuple[float, Tensor]:
        """F(W) and its gradient, flattened, in one pass over the data."""
        loss = self.loss
        weight = point.view(self.shape)
        losses, slopes = self.records.sum(partial(class_sums, loss, weight))
        return self.completed(losses, slopes.flatten(), point)

    def hessian(self, point: Tensor) -> Tensor:
        """X^T diag(c p_k (1[k = l] - p_l)) X/N in block (k, l), plus reg I; O(n K^2 d^2) and K^2 d^2 memory."""
        classes, dim = self.shape
        weight = point.view(self.shape)
        pairs = [(k, other) for k in range(classes) for other in range(k + 1)]

        def of_part(part: Records) -> tuple[Tensor, ...]:
            p = _chances(part, weight)
            return tuple(
                part.gram(part.weights * (p[:, k] * (float(k == other) - p[:, other])))
                for k, other in pairs
            )

        total = torch.zeros(classes, dim, classes, dim, dtype=torch.float64, device=self.device)
        for (k, other), gram in zip(pairs, self.records.sum(of_part), strict=True):
            total[k, :, other] = total[other, :, k] = gram / self.normalizer
        square = total.view(self.dim, self.dim)
        square.diagonal().add_(self.reg)
        return square

    def gradient_error(self, point: Tensor) -> float:
        """Bound on ||computed - exact gradient||: softmax is 1/2-Lipschitz in the scores, ||p - e_y|| <= sqrt 2."""
        size = norm_up(point)
        scores = gamma(self.shape[1] + 4) * self._curvature * size
        return self._rounding(scores, EVALUATION + 2 * self.shape[0], self._slope_mass, size)


def class_sums(
    loss: SoftmaxCrossEntropy, weight: Tensor, part: Records, clip: float = math.inf
) -> tuple[Tensor, Tensor]:
    """Returns sums of losses, and of their gradients (K, d), each cut to this length.

    Args:
        loss: of which.
        weight: (K, d).
        part: records in memory.
        clip: C > 0, or inf.
    """

    def limits() -> Tensor:
        return clip / part.norms

    of_rows = part.once(("limits", clip), limits)
    if part.in_c:
        columns = part.once(
            ("columns", clip),
            lambda: torch.stack([part.weights, part.targets.double(), of_rows]),
        )
        return part.classes(weight, columns)
    return part.fold(weight, partial(_class_terms, loss, part, of_rows))


def _class_terms(
    loss: SoftmaxCrossEntropy, part: Records, limits: Tensor, scores: Tensor, rows: slice
) -> tuple[Tensor, Tensor]:
    targets = part.targets[rows]
    weights = part.weights[rows]
    slopes = loss.derivative(scores, targets)
    shares = (limits[rows] / torch.linalg.vector_norm(slopes, dim=1)).clamp(max=1.0)
    return weights * loss.value(scores, targets), slopes * (weights * shares).unsqueeze(1)


def _chances(part: Records, weight: Tensor) -> Tensor:
    chances = [(block @ weight.T).softmax(1) for _, block in part.blocks()]
    return torch.cat(chances) if chances else weight.new_zeros(0, len(weight))


def _norm_sums(part: Records) -> tuple[Tensor, Tensor]:
    norms = part.norms * (1 + gamma(part.dim + 8))
    return part.total(part.weights * norms), part.total(part.weights * norms * norms)


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
        self.strong_convexity = self.reg if self.tilt >= 0 else self._tilted_down(bound_x)
        self.smoothness = (curvature + max(self.tilt, 0.0) * lipschitz**2 + self.reg) * (
            1 + gamma(16)
        )
        self._at_zero = float(
            self.loss.value(torch.zeros_like(self.records.norms), self.records.targets).max()
        )

    def weights(self, point: Tensor) -> Tensor:
        """The weights v = softmax(tau l), shape (n,)."""
        return self._weights(self._losses(self.records.scores(point)))

    def value_and_gradient(self, point: Tensor) -> tuple[float, Tensor]:
        """F(w) and its gradient sum_i v_i grad l_i + reg w, in two passes over the data."""
        scores = self.records.scores(point)
        losses = self._losses(scores)
        value = self._tilted_mean(losses) + self.reg / 2 * float(point @ point)
        slopes = self._weights(losses) * self.loss.derivative(scores, self.records.targets)
        return value, self.records.combine(slopes) + self.reg * point

    def hessian(self, point: Tensor) -> Tensor:
        """sum_i v_i (phi''_i + tau phi'_i^2) x_i x_i^T - tau g g^T + reg I with g the weighted gradient."""
        scores = self.records.scores(point)
        weights = self._weights(self._losses(scores))
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
        exponents = abs(self.tilt) * (self._loss_error(size) + gamma(8) * self._loss_bound(size))
        relative = math.expm1(min(2 * exponents, 700.0)) + gamma(
            2 * self.records.depth + 2 * EVALUATION
        )
        slopes = (
            self._bend
            * self._largest
            * gamma(self.dim + 4)
            * (self._largest * size + self._widest())
        )
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

    def _losses(self, scores: Tensor) -> Tensor:
        return self.loss.value(scores, self.records.targets)

    def _weights(self, losses: Tensor) -> Tensor:
        exponents = self.tilt * losses
        terms = torch.exp(exponents - exponents.max())
        return terms / self.records.total(terms)

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

    def _loss_bound(self, size: float) -> float:
        return self._at_zero + self._slope * self._largest * size

    def _widest(self) -> float:
        return float(self.records.targets.abs().max())

    def _loss_error(self, size: float) -> float:
        """Bound on the error of one loss: of its score, its residual, and of the evaluation."""
        scores = gamma(self.dim + 4) * (self._largest * size + self._widest())
        return self._slope * scores + gamma(EVALUATION) * self._loss_bound(size)


def margin_loss(loss: TableLoss) -> MarginLoss:
    """The loss itself; raises ConditionError unless it is a smooth margin loss with bounded gradients."""
    link = loss.problem(bound_x=1.0)
    if not isinstance(loss, MarginLoss) or None in (link.lipschitz, link.smoothness):
        raise ConditionError(
            "loss must be a smooth margin loss with bounded gradients under attack, as Logistic"
            f" and SmoothedHinge are (got {loss!r})"
        )
    return loss


@typed
class Adversarial(SumObjective):
    """(1/N) sum_i c_i phi(y_i <w, x_i> - rho ||w||_*) + (reg/2) ||w||^2.

    Args:
        loss: a smooth margin loss with bounded gradients, as Logistic and SmoothedHinge.
        records: with labels +-1 (|y| <= 1).
        attack_radius: rho >= 0, public.
        reg: >= 0.
        normalizer: N > 0, public.
        attack_norm: p, 2 or inf.
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
        smoothing: float = 0.0,
    ) -> None:
        self.loss = margin_loss(loss)
        link = loss.problem(bound_x=1.0)
        super().__init__(records, records.dim, reg, normalizer)
        self.attack_radius = nonnegative(attack_radius=attack_radius)
        self.attack_norm = choice((2, math.inf), attack_norm=attack_norm)
        self.smoothing = nonnegative(smoothing=smoothing)
        self._copies = 1 if self.attack_norm == 2 else self.dim
        # of record i: ||x_i|| + rho sqrt(copies) bounds the gradient of its margin
        steep = records.norms * records.targets.abs().clamp(min=1.0)
        reach = (steep + self.attack_radius * math.sqrt(self._copies)) * (
            1 + gamma(self.dim + 8)
        )
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
            kink *= cast(float, link.lipschitz)
            self.smoothness = ((curvature + kink) / self.normalizer + self.reg) * up

    def value_and_gradient(self, point: Tensor) -> tuple[float, Tensor]:
        """F(w) and the gradient; where the norm has a kink its subgradient is taken as 0."""
        shift = self.attack_radius * self._norm(point)
        pulls = PairwiseSum(torch.zeros((), dtype=torch.float64, device=self.device))

        def terms(scores: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
            targets = self.records.targets[rows]
            weights = self.records.weights[rows]
            margins = targets * scores - shift
            slopes = weights * self.loss.slope(margins)
            pulls.add(slopes.sum())
            return weights * self.loss.curve(margins), targets * slopes

        losses, gradient = self.records.fold(point, terms)
        value = losses / self.normalizer + self.reg / 2 * (point @ point)
        pull = -self.attack_radius * pulls.result() / self.normalizer  # of the norm, to 0
        return (
            float(value),
            gradient / self.normalizer + pull * self._slope_of_norm(point) + self.reg * point,
        )

    def hessian(self, point: Tensor) -> Tensor:
        """sum_i c_i phi''_i u_i u_i^T/N + pull * (second derivative of the norm) + reg I, u_i = y_i x_i - rho s(w)."""
        slope = self._slope_of_norm(point)
        scores = self.records.scores(point)
        targets = self.records.targets
        margins = targets * scores - self.attack_radius * self._norm(point)
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
        margin = gamma(self.dim + 8) * (
            self._widest * size + self.attack_radius * self._offset()
        )
        mass = self._reach_mass
        slopes = self._reach_bend * margin
        summed = gamma(self.records.depth + EVALUATION + self.dim) * mass
        return (
            (slopes + summed) / self.normalizer
            + gamma(16) * (mass / self.normalizer + self.reg * size)
        ) * (1 + 1e-9)

    def _norm(self, point: Tensor) -> Tensor:
        if self.attack_norm == 2:
            return torch.hypot(torch.linalg.vector_norm(point), self._nu(point))
        return torch.hypot(point, self._nu(point)).sum()

    def _slope_of_norm(self, point: Tensor) -> Tensor:
        sizes = (
            self._norm(point) if self.attack_norm == 2 else torch.hypot(point, self._nu(point))
        )
        return torch.where(sizes > 0, point / sizes, 0.0)

    def _bend_of_norm(self, point: Tensor, slope: Tensor) -> Tensor:
        if self.attack_norm == 2:
            size = self._norm(point)
            if not float(size) > 0:
                return torch.zeros(self.dim, self.dim, dtype=torch.float64, device=self.device)
            return (
                torch.eye(self.dim, dtype=torch.float64, device=self.device)
                - torch.outer(slope, slope)
            ) / size
        sizes = torch.hypot(point, self._nu(point))
        return torch.diag(torch.where(sizes > 0, (1 - slope * slope) / sizes, 0.0))

    def _nu(self, point: Tensor) -> Tensor:
        return torch.tensor(self.smoothing, dtype=torch.float64, device=point.device)

    def _offset(self) -> float:
        return self.smoothing * self._copies
