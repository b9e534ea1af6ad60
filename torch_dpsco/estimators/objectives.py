"""Empirical risk of linear models: losses of one score, and softmax regression.

F(w) = (1/N) sum_i c_i l(<w, x_i>; y_i) + (reg/2) ||w||^2 + <q, w>
F(W) = (1/N) sum_i c_i (logsumexp(W x_i) - (W x_i)_{y_i}) + (reg/2) ||W||^2 + <q, W>

Losses as C reads them, sums of their gradients that are cut to a length, and:

Sums of gradients near a point where all records were read: for losses whose slope is a line between two bounds.

Where no record passes a bound on the way from one point to another, the sum of gradients changes by a matrix times the
way. Records that may pass one are read by themselves, and all of them where these are many.

What is computed is the sum over all records, but for rounding, however far a point was read before: no privacy rests on
the choice.

Source: docs/proofs/rounding.md#sums-near-a-point
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torch_dpsco._validate import nonnegative, positive, typed
from torch_dpsco.accounting.analysis.rounding import gamma
from torch_dpsco.estimators.records import BLOCK_ROWS, Objective, Records, RowLosses, pairwise
from torch_dpsco.losses.base import ScalarLoss, TableLoss
from torch_dpsco.losses.table import (
    ClippedRows,
    Logistic,
    ResidualClipped,
)

# Roundings of one record besides those of its score and of the sum: the loss and its slope (an exponential within 1
# ulp, a logarithm, a quotient), label, weight, normalizer, and the norm used in the bound itself.
EVALUATION = 32
_THIN = 16  # every 16th record is enough for a first guess
_THIN_ROWS = 1024  # of which there are so many or more
_LIKE = 4  # every 4th record is enough for a Hessian, which is near that of all

Loss = TableLoss | ResidualClipped


@typed
class LinearObjective(Objective):
    """(1/N) sum_i c_i l(<w, x_i>; y_i) + (reg/2) ||w||^2 + <q, w>, over in-memory data.

    N = n gives the mean of replace_one; a public n0 the form of add_remove; N = 1 with q = b the sum form of
    objective perturbation. With the softmax cross-entropy of K classes w is W, shape (K, d), flattened row by row.

    Args:
        loss: a loss of one score of `torch_dpsco.losses`, possibly `ResidualClipped`, or the softmax cross-entropy.
        records: with labels +-1 (|y| <= 1), real targets, or class numbers, as the loss wants them.
        reg: weight of (1/2)||w||^2, >= 0; strong convexity of the objective.
        normalizer: N > 0; public.
        linear_term: q, float64, of the shape of w, or None.

    Raises:
        ValueError: if shapes or dtypes do not fit, or a number is out of range.

    Source:
        docs/proofs/output.md#records-and-the-objective, docs/proofs/output.md#rounding-of-a-gradient,
        docs/proofs/objective.md#softmax

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
        loss: Loss,
        records: Records,
        *,
        reg: float,
        normalizer: float = 1.0,
        linear_term: Tensor | None = None,
    ) -> None:
        self.loss = loss
        self.records = records
        self.dim = loss.num_scores * records.dim
        self.device = records.device
        self.reg = self.strong_convexity = nonnegative(reg=reg)
        self.normalizer = positive(normalizer=normalizer)
        if linear_term is not None and (
            linear_term.shape != (self.dim,) or linear_term.dtype != torch.float64
        ):
            raise ValueError(
                f"linear_term must be float64 of shape ({self.dim},) (got"
                f" {tuple(linear_term.shape)})"
            )
        self.linear_term = linear_term
        self._bound()
        self._last: tuple[Tensor, float, Tensor] | None = None

    def _bound(self) -> None:
        """Reads sums off the records that bound slopes and bends, rounded up: no promise about the data is needed."""
        sums = self.records.sum(partial(_row_sums, self.loss))
        up = 1 + gamma(self.records.depth + 8)
        self._slope, self._start, self._label, self._curvature = (float(s) * up for s in sums)
        smooth = self.loss.unclipped.problem(bound_x=1.0).smoothness is not None
        curvature = (self._curvature / self.normalizer + self.reg) * (1 + gamma(8))
        self.smoothness = curvature if smooth else None

    def slope_mass(self, size: float) -> float:
        """Bound on sum_i c_i |phi'_i| ||x_i|| over ||w|| <= size, for smooth losses."""
        return min(self._slope, self._start + self._curvature * size)

    def value_and_gradient(self, point: Tensor) -> tuple[float, Tensor]:
        """F(w) and its gradient (the loss's fixed subgradient at kinks), in one pass; of the last w without one."""
        # PRIVACY: a certificate is of this very point (test_a_point_that_was_moved_in_place_is_read_again)
        if self._last is None or not torch.equal(self._last[0], point):
            losses, gradient = self._sums(point)
            value = losses / self.normalizer + self.reg / 2 * (point @ point)
            if self.linear_term is not None:
                value = value + self.linear_term @ point
            self._last = point.clone(), float(value), gradient
        return self._last[1], self._last[2].clone()

    def gradient(self, point: Tensor) -> Tensor:
        """The gradient alone, of a point that will not be asked for again."""
        return self._sums(point)[1]

    def _sums(self, point: Tensor) -> tuple[Tensor, Tensor]:
        """The sum of the losses, and the gradient of the objective."""
        loss = (
            self.loss
        )  # not self: what is summed may travel to where the records are, and noise must not
        losses, slopes = self.records.sum(partial(loss_sums, loss, point))
        gradient = slopes / self.normalizer + self.reg * point
        return losses, gradient if self.linear_term is None else gradient + self.linear_term

    def hessian(self, point: Tensor) -> Tensor:
        """X^T diag(c phi'')X/N + reg I, by blocks; of K classes O(n K^2 d^2) and K^2 d^2 memory."""
        classes = self.loss.num_scores
        dim = self.records.dim
        of_part = _bent if classes == 1 else _bent_classes
        grams = iter(self.records.sum(partial(of_part, self.loss, point)))
        total = self.records.zeros(classes, dim, classes, dim)
        for k in range(classes):
            for other in range(k + 1):
                total[k, :, other] = total[other, :, k] = next(grams) / self.normalizer
        square = total.view(self.dim, self.dim)
        square.diagonal().add_(self.reg)
        return square

    def gradient_error(self, point: Tensor) -> float:
        """Bound on ||computed - exact gradient||, of first order in u with a margin for the rest.

        Scores are within gamma(d + 4)(||x|| ||w|| + |y|), which moves a slope by `bend` times that; each slope times
        x is then rounded `EVALUATION` times (2 K times more for K classes) and passes through `depth` additions; the
        regularizer and q add a few.
        """
        if self.smoothness is None:
            return math.inf
        size = norm_up(point)
        scores = gamma(self.records.dim + 4) * (self._curvature * size + self._label)
        classes = self.loss.num_scores
        operations = self.records.depth + EVALUATION + 2 * classes * (classes > 1)
        mass = self.slope_mass(size)
        linear = 0.0 if self.linear_term is None else norm_up(self.linear_term)
        common = gamma(8) * (mass / self.normalizer + self.reg * size + linear)
        return ((scores + gamma(operations) * mass) / self.normalizer + common) * (1 + 1e-9)

    def thinned(self) -> tuple[Objective, Objective] | None:
        """Of every 16th record, and of every 4th; of one sample for both where no memory holds the table."""
        if self.records.count < _THIN * _THIN_ROWS:
            return None
        thin = self._every(self.records.thinning(_THIN))
        return thin, self._every(_LIKE) if self.records.thinning(_LIKE) == _LIKE else thin

    def _every(self, step: int) -> LinearObjective:
        fewer = copy.copy(self)
        fewer._last = None
        fewer.records = self.records.thinned(step)
        fewer.normalizer = self.normalizer / step
        fewer._bound()
        return fewer

    def slopes(self, scores: Tensor, rows: slice) -> Tensor:
        """c_i phi'_i of some records, for their scores."""
        return _terms(self.loss, math.inf, self.records, scores, rows)[1]


def _row_sums(loss: Loss, records: Records) -> tuple[Tensor, ...]:
    """Weighted sums of slope |x|, start |x|, bend |x| |y|, bend |x|^2; 0 of bends where phi' jumps."""
    norms = records.norms * (1 + gamma(records.dim + 8))
    zero = torch.zeros_like(norms)
    if loss.num_scores > 1:  # softmax is 1/2-Lipschitz in the scores, and |p - e_y| <= sqrt(2)
        slopes = math.sqrt(2.0) * norms
        masses = slopes, slopes, zero, norms * norms / 2
        return tuple(records.total(records.weights * mass) for mass in masses)
    table = loss.unclipped
    smoothness = table.problem(bound_x=1.0).smoothness
    targets = records.targets.abs()
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


def _bent(loss: Loss, point: Tensor, part: Records) -> tuple[Tensor]:
    if (losses := row_losses(loss, part)) is not None:
        bends = torch.empty_like(part.weights)
        part.scored(point, losses, bends)
        return (part.gram(bends),)
    second = loss.of_norms(part.norms).second_derivative(part.scores(point), part.targets)
    return (part.gram(part.weights * second),)


def _bent_classes(loss: Loss, point: Tensor, part: Records) -> tuple[Tensor, ...]:
    """C p_k (1[k = l] - p_l) of records for each pair of classes."""
    weight = point.view(loss.num_scores, part.dim)
    blocks = [(block @ weight.T).softmax(1) for _, block in part.blocks()]
    p = torch.cat(blocks) if blocks else weight.new_zeros(0, len(weight))
    return tuple(
        part.gram(part.weights * (p[:, k] * (float(k == other) - p[:, other])))
        for k in range(len(weight))
        for other in range(k + 1)
    )


def loss_sums(
    loss: Loss, point: Tensor, part: Records, clip: float = math.inf
) -> tuple[Tensor, Tensor]:
    """Returns sums of losses, and of their gradients, flat, each cut to this length.

    Args:
        loss: of which.
        point: (K d,).
        part: records in memory.
        clip: C > 0, or inf.
    """
    if loss.num_scores == 1:
        losses = row_losses(loss, part, clip)
        if losses is not None:
            return part.scored(point, losses)
        return part.fold(point, partial(_terms, loss, clip, part))
    weight = point.view(loss.num_scores, part.dim)
    if part.in_c:
        columns = part.once(
            ("columns", clip),
            lambda: torch.stack([part.weights, part.targets.double(), clip / part.norms]),
        )
        value, gradient = part.classes(weight, columns)
    else:
        value, gradient = part.fold(weight, partial(_terms, loss, clip, part))
    return value, gradient.flatten()


def _terms(
    loss: Loss, clip: float, part: Records, scores: Tensor, rows: slice
) -> tuple[Tensor, Tensor]:
    """Losses and slopes of some records, for their scores."""
    whole: TableLoss | ClippedRows = part.once(loss, lambda: loss.of_norms(part.norms))
    of_rows = whole.part(rows)
    limits = part.once(("limits", clip), lambda: clip / part.norms)[rows]
    targets = part.targets[rows]
    weights = part.weights[rows]
    losses = weights * of_rows.value(scores, targets)
    slopes = of_rows.derivative(scores, targets)
    if slopes.dim() == 1:
        return losses, weights * slopes.clamp(-limits, limits)
    shares = (limits / torch.linalg.vector_norm(slopes, dim=1)).clamp(max=1.0)
    return losses, slopes * (weights * shares).unsqueeze(1)


def norm_up(point: Tensor) -> float:
    """||w||, rounded up; the summand covers squares that underflow."""
    return (
        float(torch.linalg.vector_norm(point)) * (1 + gamma(len(point) + 8))
        + len(point) * 1e-160
    )


def row_losses(loss: Loss, part: Records, clip: float = math.inf) -> RowLosses | None:
    """Returns the losses of records for C; None where it does not know them, or cannot read the records.

    Args:
        loss: of one score.
        part: records in memory.
        clip: largest length of a gradient.
    """
    table: Any = loss.unclipped
    line = _line(table)
    if not part.in_c or (line is None and type(table) is not Logistic):
        return None

    def made() -> RowLosses:
        weights = part.weights
        limits = torch.minimum(loss.limits(part.norms), clip / part.norms)
        if line is None:
            corners = table.corner(limits)
            columns = [weights, part.targets, limits, corners, table.curve(corners)]
            return RowLosses(torch.stack(columns), "curved", 1.0)
        gain, low, high = line
        ones = torch.ones_like(weights)
        sign, zero = (
            (part.targets, ones) if table.target_kind == "sign" else (ones, part.targets)
        )
        limits = limits / sign.abs()
        columns = [weights, sign, zero, (-limits).clamp(min=low), limits.clamp(max=high)]
        return RowLosses(torch.stack(columns), "bent", gain)

    return part.once(("losses", loss, clip), made)


def _line(loss: TableLoss) -> tuple[float, float, float] | None:
    """Returns gain and bounds of a slope that is a line between two bounds, in score - y or in y score - 1."""
    # a class that is derived may be another loss
    own = type(loss).__module__ == Logistic.__module__
    if not (own and isinstance(loss, ScalarLoss) and type(loss).slope is ScalarLoss.slope):
        return None
    low, high, width = loss.line
    if not width:
        return None
    if loss.zero:
        return 1.0 / width, float(low), float(high)
    return 1.0 / width, -float(high), -float(low)


ROUNDINGS = 6.0  # times those of a sum over all records, where the way is within the reach
_FEW = 16  # one record in so many may be close to a bound
_CALM = 0.5  # of the reach: a step that short may be near the next ones
_AHEAD = 8.0  # times the last step: how far the next points may be
NEAR_ROWS = 4096  # below, a reading of all is as fast


@dataclass(frozen=True)
class _Place:
    """A point that was read.

    Attributes:
        point: w0.
        reach: how far from it the sums below hold.
        gradient: sum of all gradients there.
        matrix: derivative of the sum of the gradients of records between their bounds.
        within: (k,) how far a point may be before each of the records below may pass a bound; in order.
        rows: (k, d) their rows.
        columns: (4, k) their lines at w0, weights times targets, bounds.
        steep: (k,) targets times gain.
    """

    point: Tensor
    reach: float
    gradient: Tensor
    matrix: Tensor
    within: Tensor
    rows: Tensor
    columns: Tensor
    steep: Tensor

    def sum_at(self, move: Tensor, length: float) -> Tensor:
        """Returns the sum of all gradients at w0 + move."""
        total = self.gradient + self.matrix @ move
        count = int(torch.searchsorted(self.within, length, right=True))
        if count:
            rows = self.rows[:count]
            line, weight, low, high = self.columns[:, :count]
            change = self.steep[:count] * (rows @ move)
            inside = (line > low) & (line < high)
            less = torch.where(inside, change, 0.0)
            cut = (line + change).clamp(low, high) - line.clamp(low, high)
            total = total + _added(rows, weight * (cut - less))
        return total


def _added(rows: Tensor, by: Tensor) -> Tensor:
    """Returns `by` (.., n) times rows (n, d), each term of which passes as many additions as in a sum over records."""
    parts = zip(by.split(BLOCK_ROWS, dim=-1), rows.split(BLOCK_ROWS), strict=True)
    return pairwise(torch.stack([some @ part for some, part in parts]))


class NearSums:
    """Sums of gradients at points of a run, each read anew or found from one that was read: NOT private.

    Args:
        records: in memory, read in C.
        losses: "bent".
        reach: > 0, public: how far from a point that was read its matrix is used.
        whole: sum of weights times x x', over all records.
    """

    def __init__(self, records: Records, losses: RowLosses, reach: float, whole: Tensor) -> None:
        self._records = records
        self._losses = losses
        self._reach = reach
        self._whole = whole
        self._place: _Place | None = None
        self._last: Tensor | None = None
        self._uses = math.inf  # of the last place, and readings since
        self._price = 3.0  # of a place, in readings

    def __call__(self, point: Tensor) -> Tensor:
        """Returns the sum at a point, (d,)."""
        place = self._place
        self._uses += 1
        if place is not None:
            move = point - place.point
            length = float(torch.linalg.vector_norm(move)) * (1 + 1e-9)
            if length < place.reach:
                return place.sum_at(move, length)
            self._place = None
        last = self._last
        self._last = point.clone()
        step = math.inf if last is None else float((point - last).norm())
        if step <= _CALM * self._reach and self._uses >= self._price:
            self._uses = 0
            return self._read(point, step)
        return self._records.scored(point, self._losses)[1]

    def _read(self, point: Tensor, step: float) -> Tensor:
        """Reads all records; returns the sum, and keeps the place where few are close to a bound."""
        records = self._records
        weights, sign, zero, low, high = self._losses.columns
        gain = self._losses.gain
        scores = torch.empty_like(weights)
        gradient = records.scored(point, self._losses, scores=scores)[1]
        line = (sign * scores - zero) * gain
        inside = (line > low) & (line < high)
        margin = torch.minimum((line - low).abs(), (line - high).abs())
        steep = sign * gain
        within = torch.where(weights > 0, margin / (steep.abs() * records.norms), math.inf)
        most = records.count // _FEW
        reach = min(_AHEAD * step, self._reach)
        close = within <= reach
        while reach > step and int(close.sum()) > most:
            reach /= 2
            close = within <= reach
        if reach <= step:
            self._price *= 2  # points of a loud run are never near
            return gradient
        near = torch.nonzero(close).squeeze(1)
        near = near[within[near].argsort()]
        few = torch.nonzero((weights > 0) & ~inside).squeeze(1)
        if len(few) <= most:
            rows = records.select(few)
            share = (sign[few] * sign[few] * weights[few]).unsqueeze(1)
            outside = _added(rows, (share * rows).T) if len(few) else 0.0
            matrix = gain * (self._whole - outside)
        else:
            matrix = records.gram(torch.where(inside, weights * sign * steep, 0.0))
            self._price = 4 + records.dim / 8
        columns = torch.stack([column[near] for column in (line, weights * sign, low, high)])
        rows = records.select(near)
        self._place = _Place(
            point.clone(), reach, gradient, matrix, within[near], rows, columns, steep[near]
        )
        return gradient
