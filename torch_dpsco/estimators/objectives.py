"""Empirical risk of linear models: losses of one score, and softmax regression.

F(w) = (1/N) sum_i c_i l(<w, x_i>; y_i) + (reg/2) ||w||^2 + <q, w>
F(W) = (1/N) sum_i c_i (logsumexp(W x_i) - (W x_i)_{y_i}) + (reg/2) ||W||^2 + <q, W>
"""

from __future__ import annotations

import copy
import math
from functools import partial

import torch
from torch import Tensor

from torch_dpsco._doors import typed
from torch_dpsco._validate import nonnegative, positive
from torch_dpsco.accounting.analysis.rounding import gamma
from torch_dpsco.estimators.records import Objective, Records, as_records
from torch_dpsco.losses.base import TableLoss
from torch_dpsco.losses.clipped import ClippedRows, ResidualClipped, scalar_loss
from torch_dpsco.losses.table import Logistic, SoftmaxCrossEntropy

# Roundings of one record besides those of its score and of the sum: the loss and its slope (an exponential within 1
# ulp, a logarithm, a quotient), label, weight, normalizer, and the norm used in the bound itself.
EVALUATION = 32


class RowConstants:
    """Sums over the records that bound the loss and its slope, and with them the rounding errors.

    For record i: |phi'| <= slope_i, |phi''| <= bend_i, |phi'(0)| <= start_i and l(0) = value_i. All are read off the
    data and rounded up, so that no promise about the data is needed.

    Attributes:
        smooth: whether phi' does not jump.
    """

    def __init__(self, loss: TableLoss | ResidualClipped, records: Records) -> None:
        self.smooth = loss.unclipped.problem(bound_x=1.0).smoothness is not None
        sums = records.sum(lambda part: RowBounds(loss, part).sums())
        up = 1 + gamma(records.depth + 8)
        self._slope, self._start, self._label, curvature, self.norm_mass, self._offset = (
            float(s) * up for s in sums
        )
        self.curvature = curvature if self.smooth else math.inf

    def slope_mass(self, size: float) -> float:
        """Bound on sum_i c_i |phi'_i| ||x_i|| over ||w|| <= size."""
        grown = self._start if size == 0 else self._start + self.curvature * size
        return min(self._slope, grown)

    def reach_mass(self, size: float) -> float:
        """Bound on sum_i c_i (||x_i|| size + 1 + |y_i|), the size of scores and residuals."""
        return self.norm_mass * size + self._offset

    def score_mass(self, size: float) -> float:
        """Bound on sum_i c_i bend_i ||x_i|| (|score error|) / gamma(d + 4): scores, label products and residuals."""
        return self.curvature * size + self._label


class RowBounds:
    """Bounds on the slope of each record in memory, those that `RowConstants` are sums of.

    Attributes:
        bend: per-record Lipschitz constant of phi', shape (n,); None if phi' jumps.
    """

    def __init__(self, loss: TableLoss | ResidualClipped, records: Records) -> None:
        table = loss.unclipped
        problem = table.problem(bound_x=1.0)
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
        self.bend: Tensor | None = None
        if problem.smoothness is not None:
            self.bend = label * label * problem.smoothness
            bend = table.clipped_bend(slope, ones)
            if bend is not None:  # for labels +-1
                self.bend = torch.where((targets == 1) & (slope <= 0.5), bend, self.bend)
        self._records = records
        self._norms = norms
        self._targets = targets
        self._slope = slope
        self._start = start
        self._label = label

    def sums(self) -> tuple[Tensor, ...]:
        """Weighted sums of slope |x|, start |x|, bend |x| |y|, bend |x|^2, |x|, 1 + |y|; 0 of bends that are None."""
        norms = self._norms
        targets = self._targets
        records = self._records
        bend = torch.zeros_like(norms) if self.bend is None else self.bend
        slopes = torch.where(norms > 0, self._slope * norms, 0.0)
        curves = bend * norms * targets, bend * norms * norms
        masses = slopes, self._start * norms, *curves, norms * self._label, 1 + targets
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
        normalizer: float,
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

    def completed(self, losses: Tensor, slopes: Tensor, point: Tensor) -> tuple[float, Tensor]:
        """F(w) and its gradient, of the sums of losses and gradients over the records."""
        value = losses / self.normalizer + self.reg / 2 * (point @ point)
        gradient = slopes / self.normalizer + self.reg * point
        if self.linear_term is not None:
            value = value + self.linear_term @ point
            gradient = gradient + self.linear_term
        return float(value), gradient

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
        features: (n, d) floating point, any device; or Records; read in blocks, never copied as a whole.
        targets: (n,) labels +-1 (|y| <= 1) or real targets, as the loss wants them.
        reg: weight of (1/2)||w||^2, >= 0; strong convexity of the objective.
        normalizer: N > 0; public.
        weights: (n,) c_i >= 0, or None for ones; a weight of 0 removes the record.
        linear_term: q, (d,) float64, or None.

    Raises:
        ValueError: if shapes or dtypes do not fit, or a number is out of range.
        ConditionError: if the loss has more than one score.

    Source:
        docs/proofs/output.md#records-and-the-objective, docs/proofs/output.md#rounding-of-a-gradient

    Example:
        >>> features, labels = torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.tensor([1.0, -1.0])
        >>> F = LinearObjective(Logistic(), features, labels, reg=0.1, normalizer=2)
        >>> value, gradient = F.value_and_gradient(torch.zeros(2, dtype=torch.float64))
        >>> round(value, 4), gradient.tolist(), round(F.smoothness, 4)
        (0.6931, [-0.25, 0.5], 0.725)
    """

    def __init__(
        self,
        loss: TableLoss | ResidualClipped,
        features: Tensor | Records,
        targets: Tensor | None = None,
        *,
        reg: float,
        normalizer: float,
        weights: Tensor | None = None,
        linear_term: Tensor | None = None,
    ) -> None:
        self.loss = scalar_loss(loss)
        records = as_records(features, targets, weights)
        super().__init__(records, records.dim, reg, normalizer, linear_term)
        self.constants = RowConstants(self.loss, records)
        self.smoothness = (
            self._smoothness(self.constants.curvature) if self.constants.smooth else None
        )
        self._last: tuple[Tensor, float, Tensor] | None = None

    def value_and_gradient(self, point: Tensor) -> tuple[float, Tensor]:
        """F(w) and its gradient (the loss's fixed subgradient at kinks), in one pass; of the last w without one."""
        # PRIVACY: a certificate is of this very point (test_a_point_that_was_moved_in_place_is_read_again)
        if self._last is None or not torch.equal(self._last[0], point):
            loss = (
                self.loss
            )  # not self: what is summed may travel to where the records are, and noise must not
            losses, slopes = self.records.sum(partial(_value_and_gradient, loss, point))
            self._last = point.clone(), *self.completed(losses, slopes, point)
        _, value, gradient = self._last
        return value, gradient.clone()

    def hessian(self, point: Tensor) -> Tensor:
        """X^T diag(c phi'')X/N + reg I, by blocks; O(n d^2)."""
        loss = self.loss

        def of_part(part: Records) -> tuple[Tensor]:
            if (columns := _columns(loss, part)) is not None:
                bends = torch.empty_like(part.weights)
                part.logistic(point, columns, bends)
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
        if not self.constants.smooth:
            return math.inf
        size = norm_up(point)
        scores = gamma(self.dim + 4) * self.constants.score_mass(size)
        return self._rounding(scores, EVALUATION, self.constants.slope_mass(size), size)

    def thinned(self, step: int) -> LinearObjective:
        """The same with every step-th record: near enough for a first guess."""
        fewer = copy.copy(self)
        fewer._last = None
        fewer.records = self.records.thinned(step)
        fewer.normalizer = self.normalizer / step
        fewer.constants = RowConstants(self.loss, fewer.records)
        return fewer

    def row_gradient(self, row: int, point: Tensor) -> Tensor:
        """c_i phi'_i(<w, x_i>) x_i of one record, without the normalizer; 0 for a null record."""
        features = self.records.select(torch.tensor([row], device=self.device))
        slopes = self.slopes(features @ point, slice(row, row + 1))
        return slopes @ features

    def slopes(self, scores: Tensor, rows: slice) -> Tensor:
        """c_i phi'_i of some records, for their scores."""
        return _terms(self.loss, self.records, scores, rows)[1]


def _value_and_gradient(
    loss: TableLoss | ResidualClipped, point: Tensor, part: Records
) -> tuple[Tensor, Tensor]:
    columns = _columns(loss, part)
    return (
        part.fold(point, partial(_terms, loss, part))
        if columns is None
        else part.logistic(point, columns)
    )


def _columns(loss: TableLoss | ResidualClipped, part: Records) -> Tensor | None:
    """Those of `native.logistic`, for that loss and records that C can read; else None."""
    table = loss.unclipped
    if type(table) is not Logistic or not part.in_c:
        return None

    def made() -> Tensor:
        limits = loss.limits(part.norms)
        corners = table.corner(limits)
        return torch.stack([part.weights, part.targets, limits, corners, table.curve(corners)])

    return part.once(("columns", loss), made)


def _terms(
    loss: TableLoss | ResidualClipped, part: Records, scores: Tensor, rows: slice
) -> tuple[Tensor, Tensor]:
    of_rows = _loss_of(loss, part, rows)
    targets = part.targets[rows]
    weights = part.weights[rows]
    return weights * of_rows.value(scores, targets), weights * of_rows.derivative(scores, targets)


def _loss_of(
    loss: TableLoss | ResidualClipped, part: Records, rows: slice
) -> TableLoss | ClippedRows:
    of_part: TableLoss | ClippedRows = part.once(loss, lambda: loss.of_norms(part.norms))
    return of_part.part(rows)


def norm_up(point: Tensor) -> float:
    """||w||, rounded up; the summand covers squares that underflow."""
    return (
        float(torch.linalg.vector_norm(point)) * (1 + gamma(len(point) + 8)) + len(point) * 1e-160
    )


@typed
class SoftmaxObjective(SumObjective):
    """Cross-entropy of a linear model with K classes; w is W, shape (K, d), flattened row by row.

    Args:
        features: (n, d) floating point, any device; or Records; read in blocks.
        targets: (n,) class numbers of an integer dtype; others than 0..K-1 make null records.
        num_classes: K >= 2, public.
        reg: weight of (1/2)||W||_F^2, >= 0.
        normalizer: N > 0, public.
        weights: (n,) c_i >= 0, or None.
        linear_term: q, (K d,) float64, or None.

    Raises:
        ValueError: if shapes or dtypes do not fit, or a number is out of range.

    Source:
        docs/proofs/objective.md#softmax, docs/proofs/output.md#rounding-of-a-gradient

    Example:
        >>> F = SoftmaxObjective(torch.eye(2), torch.tensor([0, 1]), num_classes=3, reg=0.1, normalizer=2)
        >>> F.dim, round(F.value(torch.zeros(6, dtype=torch.float64)), 4)
        (6, 1.0986)
    """

    def __init__(
        self,
        features: Tensor | Records,
        targets: Tensor | None = None,
        *,
        num_classes: int,
        reg: float,
        normalizer: float,
        weights: Tensor | None = None,
        linear_term: Tensor | None = None,
    ) -> None:
        self.loss = SoftmaxCrossEntropy(num_classes)
        records = as_records(features, targets, weights, num_classes=self.loss.num_classes)
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
        losses, slopes = self.records.sum(
            lambda part: part.fold(weight, partial(_class_terms, loss, part))
        )
        return self.completed(losses, slopes.flatten(), point)

    def hessian(self, point: Tensor) -> Tensor:
        """X^T diag(c p_k (1[k = l] - p_l)) X/N in block (k, l), plus reg I; O(n K^2 d^2) and K^2 d^2 memory."""
        (classes, dim), weight = self.shape, point.view(self.shape)
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


def _class_terms(
    loss: SoftmaxCrossEntropy, part: Records, scores: Tensor, rows: slice
) -> tuple[Tensor, Tensor]:
    targets = part.targets[rows]
    weights = part.weights[rows]
    return weights * loss.value(scores, targets), weights.unsqueeze(1) * loss.derivative(
        scores, targets
    )


def _chances(part: Records, weight: Tensor) -> Tensor:
    chances = [(block @ weight.T).softmax(1) for _, block in part.blocks()]
    return torch.cat(chances) if chances else weight.new_zeros(0, len(weight))


def _norm_sums(part: Records) -> tuple[Tensor, Tensor]:
    norms = part.norms * (1 + gamma(part.dim + 8))
    return part.total(part.weights * norms), part.total(part.weights * norms * norms)
