"""What optimizers that release only their answer derive from a problem and a layer, and what their plans share."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from torch_dpsco import _validate as check
from torch_dpsco.accounting.analysis.rounding import asks_exact
from torch_dpsco.accounting.budgets import Budget
from torch_dpsco.accounting.events import REPLACE_ONE, ZERO_OUT, Gaussian, SimpleEvent
from torch_dpsco.algorithms.output_sgd_numbers import LossPromises, OutputRun
from torch_dpsco.errors import MissingConstantError, NotCertifiedError
from torch_dpsco.optim.planned import ANSWERS, LABELS, BatchPlan, drawing
from torch_dpsco.plan import exact_cost, passes
from torch_dpsco.problem import Problem
from torch_dpsco.prox import Ball, Identity, Prox
from torch_dpsco.step.checks import listed


@dataclass(frozen=True)
class GradBound:
    """r -> G(r) of a problem, as a value that compares: bound methods compare by identity."""

    problem: Problem
    paper: bool = False

    def __call__(self, radius: float) -> float:
        """Returns G(radius)."""
        return (
            self.problem.paper_grad_bound(radius) if self.paper else self.problem.grad_bound(radius)
        )


def loss_promises(
    problem: Problem, *, by: str, gradient_error: float | None = None, paper: bool = False
) -> LossPromises:
    """Returns the promises of a problem as theory takes them.

    Args:
        problem: needs holder_exponent, holder_constant, and score_offset if its score is a scalar.
        by: name of the optimizer that asks, for messages.
        gradient_error: certified bound on the error of the computed mean gradient, for losses of several scores.
        paper: whether gradients are bounded as in the paper.

    Raises:
        MissingConstantError: a promise is missing.
    """
    exponent, constant = problem.require("holder_exponent", "holder_constant", by=by)
    if problem.is_glm and problem.score_offset is None:
        raise MissingConstantError(
            f"{by} needs score_offset, the largest number that the loss adds to the score over"
            " bound_x: promise Problem(score_offset=...) (0 if it adds none), or use"
            " losses.<Loss>().problem(bound_x=...)"
        )
    return LossPromises(
        holder_exponent=exponent,
        holder_constant=constant,
        grad_bound=GradBound(problem, paper),
        grad_at_zero=problem.grad_at_zero,
        loss_at_zero=problem.loss_at_zero,
        radius=problem.radius,
        glm=problem.is_glm,
        score_offset=problem.score_offset or 0.0,
        gradient_error=gradient_error,
    )


def parameters_of(params: Any, lr: float | Sequence[float] | None) -> list[nn.Parameter]:
    """Returns parameters, given as such, as (name, parameter), or as one group without a step size of its own."""
    items = listed(params)
    if items and isinstance(items[0], dict):
        if len(items) > 1:
            raise ValueError(
                f"params must be one group: the plan has one step size (got {len(items)} groups)"
            )
        if items[0].get("lr", lr) != lr:
            raise ValueError(
                "lr must be given to the plan, and be the step size of the plan (got"
                f" {items[0]['lr']})"
            )
        items = list(items[0]["params"])
    return [item[1] if isinstance(item, tuple) else item for item in items]


def reach(promises: LossPromises, lr: float | Sequence[float], steps: int) -> float:
    """Returns how far from their start plain steps can end; inf where gradients have no bound."""
    total = lr * steps if isinstance(lr, float) else math.fsum(lr)
    try:
        return min(promises.radius, total * promises.grad_bound(promises.radius))
    except MissingConstantError:
        return math.inf


def record_bounds(problem: Problem, bias: bool) -> tuple[float | None, float | None]:
    """Returns the bounds that the loader enforces: the ones of a bias take their share of bound_x."""
    if problem.bound_x is None:
        return None, None
    if not bias:
        return problem.bound_x, problem.bound_y
    if problem.bound_x <= 1:
        raise ValueError(
            "bound_x must be > 1 with a bias, whose column of ones has norm 1 by itself (got"
            f" {problem.bound_x:g}): use Linear(bias=False), or bound_x = sqrt(B^2 + 1) for"
            " features of norm B"
        )
    # PRIVACY: rounded down (test_features_and_the_one_of_a_bias_are_within_the_bound)
    return math.sqrt(problem.bound_x**2 - 1) * (1 - 1e-15), problem.bound_y


def require_linear(params: Sequence[nn.Parameter], is_glm: bool, certified: bool) -> bool:
    """Returns whether there is a bias; raises NotCertifiedError for parameters that are not of one Linear layer."""
    shapes = [tuple(p.shape) for p in params]
    linear = 1 <= len(shapes) <= 2 and len(shapes[0]) == 2 and shapes[1:] in ([], [(shapes[0][0],)])
    if not linear and certified is not True:
        # PRIVACY: the sensitivity is that of convex losses (test_other_models_need_a_certificate)
        raise NotCertifiedError(
            f"params must be weight and bias of one Linear layer (got shapes {shapes}): output"
            " perturbation needs a loss that is convex in all of them. If it is, with the"
            " constants of the problem, give certify_convex=True"
        )
    if linear and is_glm and shapes[0][0] != 1:
        raise NotCertifiedError(
            "params must be those of a layer with one output, the scalar score of this loss (got"
            f" {shapes[0][0]})"
        )
    return linear and len(shapes) == 2


_HAIR = 1.0 - 1e-9  # of delta: what a statement at exactly the budget's delta needs to be met


@dataclass(frozen=True, kw_only=True)
class RowFreePlan(BatchPlan):
    """Public numbers of a run of secret steps that releases its answer only: w_{T+1}, or an average of w_1..w_T.

    Args:
        problem: what is promised about the loss; the loader enforces its bounds on records.
        dim: number of parameters.
        steps: number of steps T.
        lr: step size, or one per step.
        noise_scale: std of Gaussian noise on each coordinate of the answer, or scale of K-norm noise.
        risk_bound: on the expected excess risk over models within `distance`; None where it is not proved.
        rounding_share: share of what a record moves that is due to floating-point rounding.
        distance: guess of |w*|; None for the radius of the problem.
        gradient_error: certified error of the computed mean gradient, for losses of several scores.
    """

    problem: Problem
    dim: int
    steps: int
    lr: float | tuple[float, ...]
    noise_scale: float
    risk_bound: float | None
    rounding_share: float
    distance: float | None = None
    gradient_error: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check.choice((REPLACE_ONE, ZERO_OUT), adjacency=self.adjacency)
        check.positive_count(dim=self.dim)
        check.positive_count(steps=self.steps)
        check.nonnegative(noise_scale=self.noise_scale)
        if isinstance(self.lr, tuple) and len(self.lr) != self.steps:
            raise ValueError(
                f"lr must be a number or {self.steps} numbers, one per step (got {len(self.lr)})"
            )

    @property
    @abstractmethod
    def sensitivity(self) -> float | None:
        """How far one record moves the answer, rounding included; None where that is random."""

    @property
    def sizes(self) -> NDArray[np.float64]:
        """Step sizes (T,)."""
        return np.array(np.broadcast_to(self.lr, (self.steps,)))

    @property
    def promises(self) -> LossPromises:
        """What the sensitivity rests on."""
        return loss_promises(
            self.problem, by=type(self).__name__, gradient_error=self.gradient_error
        )

    @property
    def reach(self) -> float:
        """Bound on the norm of the answer; inf where there is none."""
        return reach(self.promises, self.lr, self.steps)

    @property
    def noise_std(self) -> float:
        """Standard deviation of the noise on each coordinate of the answer."""
        return self.noise_scale

    def prox(self) -> Prox:
        """Returns the map after each step, and onto the feasible set."""
        return Ball(self.problem.radius) if math.isfinite(self.problem.radius) else Identity()

    def event(self) -> SimpleEvent:
        """Returns the only release."""
        # PRIVACY: of the noise that is drawn (test_an_edited_plan_is_refused_or_charges_what_it_draws)
        moved = check.nonnegative(sensitivity=self.sensitivity)
        return Gaussian(self.noise_scale, {self.adjacency: moved}, exact=asks_exact(self.secure))

    def noise_shares(self) -> Iterator[tuple[str, float, int | None]]:
        """Yields that of the answer, where its norm is bounded; see `Plan.noise_shares`."""
        if math.isfinite(self.reach):
            yield "the answer", self.noise_std / self.reach, self.dim

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yields what all such plans say; see `Plan.lines`."""
        yield "batches", drawing(self.design, self.unit)
        over = passes(self.steps / -(-self.n // self.batch_size))
        lr = self.lr
        sizes = f" {lr:g}" if isinstance(lr, float) else f"s of {min(lr):g} to {max(lr):g}"
        yield (
            "steps",
            f"{self.steps} secret steps, {over}, step size{sizes}, answer: {ANSWERS[self.average]}",
        )
        yield LABELS
        far = f"at most {self.reach:.3g}" if math.isfinite(self.reach) else "without a bound"
        moved = (
            ""
            if self.sensitivity is None
            else f"; one {self.unit} moves it by at most {self.sensitivity:.3g}"
        )
        norm = self.noise_std * math.sqrt(self.dim)
        yield (
            "noise",
            (
                f"std {self.noise_std:.3g} per parameter, norm {norm:.3g}, on an answer of norm"
                f" {far}{moved}"
            ),
        )
        yield (
            "assumed",
            (
                "the promises of the problem: nothing is clipped, so that with a loss that breaks"
                " them nothing is private; the loss is convex in a linear layer, and nothing is"
                " published before finalize()"
            ),
        )
        if self.risk_bound is not None:
            distance = min(self.distance or math.inf, self.problem.radius)
            yield (
                "expected",
                (
                    f"excess risk of the answer at most {self.risk_bound:.3g} over models of norm"
                    f" up to {distance:.3g}"
                ),
            )
        if isinstance(self.event(), Gaussian) and self.noise_scale > 0:
            yield exact_cost(self.secure)


def numbers_of(run: OutputRun) -> dict[str, Any]:
    """Returns what a plan takes over of what theory chose: all but the sensitivity, which it computes itself."""
    return {name: value for name, value in vars(run).items() if name != "sensitivity"}


def target_of(budget: Budget | None, noise_multiplier: float | None) -> dict[str, float]:
    """Returns epsilon and delta to calibrate for; none without a budget, which then takes noise of the caller's."""
    if budget is not None:
        return {"epsilon": budget.epsilon, "delta": budget.delta * _HAIR}
    if noise_multiplier is None:
        raise ValueError(
            "budget or noise_multiplier must be given: the target, or noise of your own"
        )
    return {}


def whole_epochs(n: int, batch_size: int, steps: int | None, epochs: int | None) -> int | None:
    """Returns the number of passes: as given, or those of so many steps; None where neither is given."""
    if steps is None:
        return epochs
    if epochs is not None:
        raise ValueError(f"steps and epochs must not be given both (got {steps} and {epochs})")
    one = -(-check.positive_count(n=n) // check.positive_count(batch_size=batch_size))
    if check.positive_count(steps=steps) % one:
        raise ValueError(f"steps must be a multiple of {one}, the steps of a pass (got {steps})")
    return steps // one
