"""Base classes of the losses: calling convention, exact backward, and the step from a table row to a Problem.

How labels are read: record by record, by a public rule, whatever coding a data set has.

| losses | a label y is read as | not a label |
|---|---|---|
| of a margin: `MarginLoss`, nn.SoftMarginLoss, nn.HingeEmbeddingLoss | 1 if y > 0, else -1 | not finite |
| of chances: nn.BCEWithLogitsLoss, nn.BCELoss, nn.MultiLabelSoftMarginLoss | y, clamped to [0, 1] | not finite |
| of class numbers: `SoftmaxCrossEntropy`, nn.CrossEntropyLoss, nn.NLLLoss, nn.MultiMarginLoss | y | no class |
| of real numbers, and of chances of classes | y | not finite |

So 0/1, -1/1 and booleans say the same. A record with an entry that is not a label, or before nn.BCELoss with a chance
that is NaN, is a null record: its gradient is 0. It raises nothing, since which records have such entries is private.

Guarantee:
    A map of each record by itself, which sends adjacent data sets to adjacent ones: all sensitivities stay.

Source: docs/before_you_start.md#labels
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from fractions import Fraction
from typing import Any, ClassVar, Literal, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torch_dpsco._validate import between, choice, flag, positive
from torch_dpsco.accounting.analysis.rounding import upper as upper  # for losses of your own too
from torch_dpsco.errors import ConditionError
from torch_dpsco.problem import Problem, Promised, TableGradBound, round_up
from torch_dpsco.trial.loss import Traced, apply_as_one

_Number = TypeVar("_Number", float, Tensor)


REDUCTIONS = ("mean", "sum", "none")


class Loss(Promised, ABC):
    """A loss phi(s; y), convex in the score s of one record, with one fixed subgradient.

    The linear layer in front makes it a loss of w: s = w.x, or K scores s = W x. Subclasses are frozen dataclasses
    that give `value` and `derivative`; instances are then criteria like those of torch.nn.

    Attributes:
        target_kind: "sign" (y = +-1), "real" (|y| bounded) or "class" (y in 0..K-1, an integer dtype).
        num_scores: K, the number of scores of a record; 1 for a scalar score.

    Example:
        >>> from torch_dpsco.losses import Squared
        >>> output = torch.tensor([[2.0], [3.0]], requires_grad=True)
        >>> loss = Squared()(output, torch.tensor([1.0, 1.0]), reduction="sum")
        >>> loss.backward()
        >>> loss.item(), output.grad.flatten().tolist()
        (2.5, [1.0, 2.0])
    """

    target_kind: ClassVar[Literal["sign", "real", "class"]] = "real"
    num_scores: int = 1

    @abstractmethod
    def value(self, score: Tensor, target: Tensor) -> Tensor:
        """Losses, shape (B,), of scores (B,), or (B, K) if K = num_scores > 1, and targets (B,)."""

    @abstractmethod
    def derivative(self, score: Tensor, target: Tensor) -> Tensor:
        """The fixed subgradient with respect to the score, of the shape of `score`.

        It must be a function of this record's score and target alone: a choice at a kink that depends on other
        records, on the step or on chance would void every stability bound built on it.
        """

    def second_derivative(self, score: Tensor, target: Tensor) -> Tensor:
        """Second derivative of a scalar score, shape (B,), where phi is C^1; one-sided at kinks of phi'.

        Raises:
            ConditionError: if the derivative of the loss jumps, or the score is not a scalar.
        """
        raise ConditionError(
            f"{self!r} has no second derivative; take a smooth loss of one score"
        )

    def __call__(self, output: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
        """The loss of a batch, for a training loop; its backward is exactly `derivative`.

        Args:
            output: scores, shape (B,) or (B, 1), or (B, K) if K = num_scores > 1; floating point, any device.
            target: labels, shape (B,) or (B, 1), on the same device, in any coding that `losses.base` reads: signs
                are y > 0, so that 0/1, -1/1 and booleans say the same. Label VALUES are never refused, since a label is
                private: one that is not finite, or a class that does not exist, makes a null record, of gradient 0.
            reduction: "mean", "sum", or "none" for the (B,) losses. The mean over an empty batch is 0.

        Returns:
            Scalar or (B,) tensor, differentiable once in `output`.

        Raises:
            ValueError: if shapes or dtypes do not fit; (B,) never meets (B, 1) as (B, B).
        """
        if type(reduction) is not str or reduction not in REDUCTIONS:
            choice(REDUCTIONS, reduction=reduction)
        if isinstance(output, Traced):
            return apply_as_one(self, (output, target, reduction), reduction)
        apply = _linear if torch.compiler.is_compiling() else _PerSample.apply
        score, label, known = self._align(output, target)
        return reduced(torch.where(known, apply(score, label, self), 0.0), reduction)

    def _align(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns scores, labels as they are read, and which are labels."""
        columns = []
        for name, value, scores in (("output", output, self.num_scores), ("target", target, 1)):
            if not isinstance(value, Tensor):
                raise ValueError(f"{name} must be a tensor (got {type(value).__name__})")
            column = value.squeeze(1) if scores == 1 and value.dim() == 2 else value
            if column.dim() == 0 or column.shape[1:] != ((scores,) if scores > 1 else ()):
                shape = "(B,) or (B, 1)" if scores == 1 else f"(B, {scores})"
                raise ValueError(f"{name} must have shape {shape} (got {tuple(value.shape)})")
            columns.append(column)
        if not output.is_floating_point():
            raise ValueError(f"output must be floating point (got {output.dtype})")
        score, label = columns
        if len(score) != len(label):
            raise ValueError(
                f"output and target must have one length (got {len(score)} and {len(label)})"
            )
        if self.target_kind != "class":
            return score, *read(self.target_kind, label, score.dtype)
        if label.is_floating_point() or label.is_complex() or label.dtype == torch.bool:
            raise ValueError(
                f"target must hold class numbers of an integer dtype (got {label.dtype})"
            )
        known = (label >= 0) & (label < self.num_scores)
        return score, torch.where(known, label, 0).long(), known


def reduced(losses: Tensor, reduction: str) -> Tensor:
    """Returns the losses, or their sum or mean; 0 of none, since an empty Poisson batch is an ordinary event."""
    if reduction == "none":
        return losses
    return losses.mean() if reduction == "mean" and len(losses) else losses.sum()


class _PerSample(torch.autograd.Function):
    """Losses of a batch; their backward is the loss's own subgradient, not autograd's choice at the kinks."""

    generate_vmap_rule = True

    @staticmethod
    def forward(score: Tensor, target: Tensor, loss: Loss) -> Tensor:
        return loss.value(score, target)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Loss], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])
        ctx.loss = inputs[2]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        score, target = ctx.saved_tensors
        weight = grad if score.dim() == 1 else grad.unsqueeze(1)
        if torch.is_grad_enabled():  # a gradient of this gradient is wanted
            return weight * _Slope.apply(score, target, ctx.loss), None, None
        return weight * ctx.loss.derivative(score, target), None, None


def _linear(score: Tensor, target: Tensor, loss: Loss) -> Tensor:
    """Returns the losses with the same backward, for tracers, which do not vectorize custom functions."""
    here = score.detach()
    change = (score - here) * loss.derivative(here, target)
    return loss.value(here, target) + (change if score.dim() == 1 else change.sum(dim=1))


class _Slope(torch.autograd.Function):
    """The subgradient itself; autograd would silently take phi'' from one of its branches."""

    generate_vmap_rule = True

    @staticmethod
    def forward(score: Tensor, target: Tensor, loss: Loss) -> Tensor:
        return loss.derivative(score, target)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Loss], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        raise RuntimeError(
            "losses are differentiable once: a second derivative is not supported"
        )


class TableLoss(Loss):
    """A loss with a row in the table of constants (docs/proofs/holder.md#constants-of-the-losses).

    Rows hold for records with ||x|| <= bound_x and |y| <= bound_y (`enforce_bounds`), and on the whole of R^d. A loss
    of your own gives `value` and `derivative`, or `curve` and `slope` if it is a `ResidualLoss` or `MarginLoss`, and
    the four numbers of its row (docs/your_own.md).

    Attributes:
        interpolates: whether the row holds for every exponent in [0, 1], not only for its own.
        ranges: names of fields of a dataclass with their checks, each called with the field by keyword.

    What else a mechanism may ask has an answer that claims nothing; a loss that knows better overrides it:

    Attributes:
        monotone: whether the derivative keeps its sign for each record, at every score.
        squared: whether it is r^2/2, which sums of products of the records solve.
        log_odds: whether its scores are log odds, whose scale logistic regression of them mends.
        intervals: what is released beside an answer for confidence intervals that are proved (docs/inference.md): a
            "hessian", or "moments" of the squared loss. None if nothing is, as of losses of your own: what a release
            costs was counted for each.
    """

    ranges: ClassVar[tuple[tuple[str, Callable[..., float]], ...]] = ()
    interpolates: ClassVar[bool] = False
    monotone: ClassVar[bool] = False
    squared: ClassVar[bool] = False
    log_odds: ClassVar[bool] = False
    intervals: ClassVar[Literal["hessian", "moments"] | None] = None

    def __post_init__(self) -> None:
        for name, checked in self.ranges:
            object.__setattr__(self, name, checked(**{name: getattr(self, name)}))

    def problem(
        self,
        *,
        bound_x: float,
        bound_y: float = 1.0,
        radius: float = math.inf,
        holder_exponent: float | None = None,
        intercept: bool = False,
    ) -> Problem:
        """The promises of this loss for bounded records.

        `smoothness` is set if the exponent is 1, `lipschitz` if the gradient is bounded on the whole of R^d, and
        `is_glm` if the score is a scalar. Every constant is the formula of the table, rounded up.

        Args:
            bound_x: B, bound on the norm of the features, > 0 and finite; see `intercept`.
            bound_y: Y, bound on |y|, > 0 and finite. Margin losses and the softmax ignore it: |y| <= 1 there.
            radius: radius of the feasible ball, > 0, or inf.
            holder_exponent: in [0, 1]; None means that of the table. Others only if the row `interpolates`.
            intercept: whether the linear layer has a bias, a feature that is 1: then the bound is sqrt(B^2 + 1).

        Returns:
            A Problem with every constant of the row and its exact gradient bound G(r).

        Raises:
            ValueError: if a bound is not finite and positive, or the exponent is not available for this loss.

        Guarantee:
            The constants hold for records inside the bounds. Bounds are public numbers, ENFORCED record by record
            with `enforce_bounds`; a bound read off the data leaks it.

        Source:
            docs/proofs/holder.md#constants-of-the-losses.

        Example:
            >>> from torch_dpsco.losses import Logistic
            >>> problem = Logistic().problem(bound_x=1.0)
            >>> problem.holder_constant, problem.lipschitz, problem.grad_at_zero
            (0.25, 1.0, 0.5)
        """
        bound_x, bound_y = record_bounds(bound_x, bound_y)
        if flag(intercept=intercept):
            bound_x = math.nextafter(math.hypot(bound_x, 1.0), math.inf)
        exponent = self._choose(holder_exponent)
        constant = self.holder_constant(exponent, bound_x)
        lipschitz = self.grad_bound(math.inf, bound_x, bound_y)
        return Problem(
            holder_exponent=exponent,
            holder_constant=constant,
            grad_at_zero=self.grad_bound(0.0, bound_x, bound_y),
            loss_at_zero=self.loss_at_zero(bound_y),
            lipschitz=lipschitz if math.isfinite(lipschitz) else None,
            smoothness=constant if exponent == 1 else None,
            radius=radius,
            is_glm=self.num_scores == 1,
            bound_x=bound_x,
            bound_y={"real": bound_y, "sign": 1.0, "class": None}[self.target_kind],
            score_offset=round_up((bound_y if self.target_kind == "real" else 1.0) / bound_x),
            exact_grad_bound=TableGradBound(self, bound_x, bound_y),
        )

    def _choose(self, holder_exponent: float | None) -> float:
        own = self.holder_exponent()
        if holder_exponent is None:
            return own
        exponent = between(0.0, 1.0, holder_exponent=holder_exponent)
        if math.isclose(exponent, own, abs_tol=1e-12):
            return own
        if not self.interpolates:
            raise ValueError(f"holder_exponent of {self!r} must be {own:g} (got {exponent})")
        return exponent

    @abstractmethod
    def holder_exponent(self) -> float:
        """The row's own exponent alpha, in [0, 1]."""

    @abstractmethod
    def holder_constant(self, exponent: float, bound_x: float) -> float:
        """L of the row, for its own exponent unless it `interpolates`; an upper bound also in floating point."""

    @abstractmethod
    def loss_at_zero(self, bound_y: float) -> float:
        """M0 of the row, an upper bound also in floating point."""

    @abstractmethod
    def grad_bound(self, radius: float, bound_x: float, bound_y: float) -> float:
        """G(radius) of the row; an upper bound also in floating point at radius 0 (M) and inf (Lipschitz constant)."""

    # -- what else mechanisms ask, with answers that claim nothing ---------------------------------------------------

    @property
    def knee(self) -> float:
        """Residual or margin from which on the loss is about straight: for guesses of steps, which promise nothing."""
        return 1.0

    def smoothed(self, width: float) -> TableLoss | None:
        """A smooth loss, at most `width` below this one, with no larger slopes; None where none is known."""
        return None

    def loss_range(self, reach: float) -> float:
        """Bound on the range of the loss of all records over scores of size <= reach, beside what M0 and G say."""
        return math.inf

    def gradient_diameter(self, radius: float, bound_x: float) -> float:
        """Bound on the distance of the gradients of two records at one w, |w| <= radius, beside 2 G."""
        return math.inf

    def clipped_bend(self, slope: _Number, bound: _Number) -> _Number | None:
        """Bound on phi'' B^2 where |phi'| B <= slope <= B/2, B = bound; None for that of the row."""
        return None

    @property
    def unclipped(self) -> TableLoss:
        """The loss itself; of one with clipped gradients, the loss whose they are."""
        return self

    def limits(self, norms: Tensor) -> Tensor:
        """The largest |phi'| of records with these norms that is let through: none is clipped."""
        return torch.full_like(norms, math.inf)

    def of_norms(self, norms: Tensor) -> TableLoss:
        """The loss of records with these norms."""
        return self

    def part(self, rows: slice) -> TableLoss:
        """The loss of some of the records that it is of."""
        return self


class Line(NamedTuple):
    """A slope phi'(u) that is u/width between two bounds; or one that jumps from one to the other, with 0 at u = 0.

    For a loss whose phi'(0) = 0 has these bounds, and a slope of at most 1/width, it promises the same.

    Args:
        low: least slope, <= 0; a Fraction where no float is exact.
        high: largest slope, >= 0.
        width: >= 0; 0 for a jump.
    """

    low: float | Fraction
    high: float | Fraction
    width: float = 0.0

    def steepest(self, reach: float | Fraction) -> float | Fraction:
        """Returns the largest |phi'| at |u| <= reach."""
        most = max(-self.low, self.high)
        if not self.width or reach == math.inf:
            return most
        return min(most, Fraction(reach) / Fraction(self.width))


class ScalarLoss(TableLoss):
    """phi of a margin or a residual, which is linear in the one score.

    `curve` and `slope` are asked for, and the row; a `line` gives all that is not.

    Attributes:
        zero: the margin or residual u = 0 of the `line`.
    """

    zero: ClassVar[float] = 0.0

    @property
    def line(self) -> Line:
        """What phi' is, where it is a line between two bounds, of u = place - zero."""
        self._refuse()

    @abstractmethod
    def place(self, score: Tensor, target: Tensor) -> tuple[Tensor, Tensor | float]:
        """The margin or the residual of a score, and its derivative in the score."""

    @abstractmethod
    def up_to(self, place: Tensor, corner: Tensor) -> Tensor:
        """The nearest place at which |phi'| does not exceed what it is at the `corner`."""

    def value(self, score: Tensor, target: Tensor) -> Tensor:
        """Loss at the margin or residual; score and target of one shape."""
        return self.curve(self.place(score, target)[0])

    def derivative(self, score: Tensor, target: Tensor) -> Tensor:
        """Derivative in the score; score and target of one shape."""
        place, turn = self.place(score, target)
        return turn * self.slope(place)

    def second_derivative(self, score: Tensor, target: Tensor) -> Tensor:
        """Second derivative in the score; score and target of one shape."""
        place, turn = self.place(score, target)
        return turn * (turn * self.bend(place))

    def curve(self, place: Tensor) -> Tensor:
        """The loss phi."""
        slope = self.slope(place)
        return slope * (place - self.zero - 0.5 * self.line.width * slope)

    def slope(self, place: Tensor) -> Tensor:
        """The selected subgradient of phi."""
        low, high, width = self.line
        place = place - self.zero if self.zero else place
        if width:
            return (place / width).clamp(float(low), float(high))
        side = place.sign()
        return float(high) * side.clamp(min=0) - float(low) * side.clamp(max=0)

    def bend(self, place: Tensor) -> Tensor:
        """phi'', one-sided where phi' has a kink."""
        low, high, width = self._own_line()
        slope = (place - self.zero) / width
        return ((slope >= float(low)) & (slope <= float(high))).to(place.dtype) / width

    def corner(self, limit: Tensor) -> Tensor:
        """Where |phi'| reaches the limit > 0: a margin, or -inf; or a residual > 0 of an even phi, or inf."""
        low, high, width = self._own_line()
        if high != (0.0 if self.zero else -low):
            self._refuse()
        reached = torch.where(limit < -float(low), limit * width, math.inf)
        return self.zero - reached if self.zero else reached

    def _own_line(self) -> Line:
        """Returns the line, of a loss whose slope it is and does not jump."""
        if type(self).slope is not ScalarLoss.slope or not self.line.width:
            self._refuse()
        return self.line

    def _refuse(self) -> NoReturn:
        raise ConditionError(
            f"{self!r} has no second derivative, or its slope cannot be clipped, or its row is not"
            " known: take Logistic, SmoothedHinge, Squared or Huber, or give a `line`"
            " (docs/your_own.md)"
        )

    def holder_exponent(self) -> float:
        """1 if the slope has no jump, else 0."""
        return 1.0 if self.line.width else 0.0

    def holder_constant(self, exponent: float, bound_x: float) -> float:
        """L = B (high - low)^(1 - alpha) (B/width)^alpha."""
        low, high, width = self.line
        jump = bend = 1.0
        if exponent < 1:
            jump = power_up(upper(Fraction(high) - Fraction(low)), 1 - exponent)
        if exponent > 0:
            bend = power_up(upper(bound_x, 1 / Fraction(width)), exponent)
        return upper(bound_x, jump, bend)

    def loss_at_zero(self, bound_y: float) -> float:
        """M0 = c (Y - c width/2), where c is the largest slope up to Y, which is 1 for margins."""
        reach = Fraction(self.zero or bound_y)
        slope = self.line.steepest(reach)
        return upper(slope, reach - Fraction(self.line.width) * slope / 2)

    def grad_bound(self, radius: float, bound_x: float, bound_y: float) -> float:
        """G(R) = B c, where c is the largest slope up to Y + B R."""
        return upper(bound_x, self.line.steepest((self.zero or bound_y) + bound_x * radius))


def record_bounds(bound_x: float, bound_y: float) -> tuple[float, float]:
    """The two bounds as floats; raises ValueError unless both are finite and > 0."""
    return positive(bound_x=bound_x), positive(bound_y=bound_y)


def power_up(base: float, exponent: float) -> float:
    """base^exponent for base in [0, inf] and exponent in [0, 1], rounded up unless it is exact.

    Example:
        >>> power_up(3.0, 0.0), power_up(3.0, 1.0), power_up(3.0, 0.5) > math.sqrt(3.0)
        (1.0, 3.0, True)
    """
    power = math.pow(base, exponent)
    return power if exponent in (0.0, 1.0) or base == 1.0 else round_up(power)


SIGN = "sign"
CHANCE = "chance"
CLASS = "class"
REAL = "real"

_OF_TORCH: dict[Any, tuple[type[nn.Module], str]] = {
    F.soft_margin_loss: (nn.SoftMarginLoss, SIGN),
    F.hinge_embedding_loss: (nn.HingeEmbeddingLoss, SIGN),
    F.binary_cross_entropy_with_logits: (nn.BCEWithLogitsLoss, CHANCE),
    F.binary_cross_entropy: (nn.BCELoss, CHANCE),
    F.multilabel_soft_margin_loss: (nn.MultiLabelSoftMarginLoss, CHANCE),
    F.cross_entropy: (nn.CrossEntropyLoss, CLASS),
    F.nll_loss: (nn.NLLLoss, CLASS),
    F.multi_margin_loss: (nn.MultiMarginLoss, CLASS),
    F.multilabel_margin_loss: (nn.MultiLabelMarginLoss, CLASS),
    F.mse_loss: (nn.MSELoss, REAL),
    F.l1_loss: (nn.L1Loss, REAL),
    F.smooth_l1_loss: (nn.SmoothL1Loss, REAL),
    F.huber_loss: (nn.HuberLoss, REAL),
    F.poisson_nll_loss: (nn.PoissonNLLLoss, REAL),
    F.kl_div: (nn.KLDivLoss, REAL),
}
_KINDS = dict(_OF_TORCH.values())


def as_module(loss: Any) -> Any:
    """Returns a loss function of torch, or a partial of one, as the module that computes the same; others as they are.

    Example:
        >>> as_module(F.cross_entropy), as_module(functools.partial(F.huber_loss, delta=2.0)).delta, as_module(max)
        (CrossEntropyLoss(), 2.0, <built-in function max>)
    """
    whole = isinstance(loss, functools.partial) and not loss.args
    function, options = (loss.func, loss.keywords) if whole else (loss, {})
    for known, (module, _) in _OF_TORCH.items():
        if function is known:
            return module(**options)
    return loss


def read(kind: str, target: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns labels of a dtype, 0 for what is not a label, and which are labels.

    Args:
        kind: "sign", "chance" or "real".
        target: of any dtype but complex ones.
        dtype: floating.

    Raises:
        ValueError: a complex target.
    """
    if target.is_complex():
        _refuse_complex(target)
    label = target.to(dtype)
    known = label.isfinite()
    if kind == SIGN:
        label = torch.where(label > 0, 1.0, -1.0).to(dtype)
    elif kind == CHANCE:
        label = label.clamp(0.0, 1.0)
    return torch.where(known, label, 0.0), known


def read_for(loss: Any, output: Any, target: Any) -> tuple[Any, Any]:
    """Returns the output and the target that a loss of torch is to see; those of other losses as they are.

    Args:
        loss: a module of torch.nn itself; a subclass may have labels of its own.
        output: of the model, (B, ...).
        target: (B, ...).

    Example:
        >>> output, labels = read_for(nn.BCEWithLogitsLoss(), torch.ones(3, 1), torch.tensor([-1.0, 7.0, torch.nan]))
        >>> output.tolist(), labels.tolist()
        ([[1.0], [1.0], [0.0]], [0.0, 1.0, 0.0])
    """
    kind = _KINDS.get(type(loss))
    if kind is not None and isinstance(target, Tensor) and target.is_complex():
        _refuse_complex(target)
    if (
        kind is None
        or not (_is_batch(output) and _is_batch(target))
        or len(output) != len(target)
    ):
        return output, target
    if kind == CLASS and not target.is_floating_point():
        label, known = _classes(loss, target, output.shape[min(1, output.dim() - 1)])
    else:
        label, known = read(REAL if kind == CLASS else kind, target, output.dtype)
    whole = _all(known)
    if isinstance(loss, nn.BCELoss):
        # PRIVACY: torch raises for NaN, which tells of a record that has one
        # (test_a_chance_that_is_no_number_makes_a_null_record_and_raises_nothing)
        whole = whole & _all(~output.isnan())
    # PRIVACY: chosen, not multiplied by 0, which leaves NaN
    # (test_a_null_record_has_no_gradient_even_where_the_output_is_not_finite)
    return torch.where(whole.reshape(-1, *[1] * (output.dim() - 1)), output, 0.0), label


def _all(entries: Tensor) -> Tensor:
    """Returns for each record whether all of its entries are true."""
    return entries.flatten(1).all(1) if entries.dim() > 1 else entries


def _refuse_complex(target: Tensor) -> NoReturn:
    raise ValueError(f"target must be real (got {target.dtype})")


def _is_batch(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and tensor.dim() > 0 and not tensor.is_complex()


def _classes(loss: Any, target: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Returns class numbers, and which are some; a number that the loss ignores is none of another class."""
    if count < 2:
        raise ValueError(
            f"output must have a column for each class, two or more, for {type(loss).__name__}"
            f" (got {count}): nn.BCEWithLogitsLoss takes one column"
        )
    label = target.long()
    # which ends the list of a record's classes
    least = -1 if isinstance(loss, nn.MultiLabelMarginLoss) else 0
    known = (label >= least) & (label < count)
    ignored = getattr(loss, "ignore_index", None)
    if ignored is not None:  # a class, so that a mean is over null records too
        known = known | (label == ignored)
    return torch.where(known, label, int(ignored == 0)), known
