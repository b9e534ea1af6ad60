"""HolderOutputSGD and BoltOnPSGD: plain SGD that releases only its answer.

Output perturbation of SGD for Hoelder-smooth convex losses (Wang, Lei, Ying, Zhang, Algorithm 1).

    w_1 = 0,   w_{t+1} = Proj_W( w_t - (eta/b) sum over the batch of g(w_t, z) )
    answer = Proj_W( mean of w_1..w_T + noise )

The iterates are plain SGD with plain gradients: no per-sample gradients, no clipping. The noise is added once, to the
average, in proportion to how far one record can have moved it.

Differs from the paper in: 1. no factor e, shuffled batches, of which a record is in exactly one an epoch, and the exact
Gaussian curve: 20 to 200 times less noise; 2. minibatches; 3. the noised answer is projected; 4. the effect of rounding
is in the noise.

Source: docs/proofs/holder.md#distance-of-two-runs, docs/errata.md.

Bolt-on private SGD: permutation SGD on a smooth convex loss, one release (Wu et al. 2017).

    w_1 = 0,   w_{t+1} = Proj( (w_t - (eta_t/b) sum over the batch of g(w_t, z)) / (1 + eta_t gamma) )
    answer = Proj( w_{T+1}, or an average of w_1..w_T, + noise )

The iterates are plain SGD with plain gradients: no per-sample gradients, no clipping, no solver to certify. Gaussian
noise, or at delta = 0 that of the K-norm mechanism, is added once, in proportion to how far one record can have moved
the answer. HolderOutputSGD is its relative for losses that are not smooth, without regularizer and pure budgets.

Differs from the paper in: see `algorithms.output_sgd_numbers`.

Source: docs/proofs/output.md#bolt-on-runs
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray

from torch_dpsco import _validate as check
from torch_dpsco.accounting.analysis.rounding import asks_exact, scaled_up, with_grid
from torch_dpsco.accounting.budgets import Budget
from torch_dpsco.accounting.designs import Shuffled
from torch_dpsco.accounting.events import (
    Adjacency,
    Gaussian,
    KNorm,
    SimpleEvent,
)
from torch_dpsco.algorithms.holder_numbers import path_sensitivity
from torch_dpsco.algorithms.output_sgd_numbers import (
    HIT_CONSTANTS,
    AnswerTask,
    BoltOnTask,
    LossPromises,
    OutputTask,
    bolt_on_sensitivity,
    output_path,
)
from torch_dpsco.algorithms.row_free import RowFreeOptimizer
from torch_dpsco.errors import MissingConstantError
from torch_dpsco.problem import Problem
from torch_dpsco.prox import Ball, Identity, Prox
from torch_dpsco.step import checks
from torch_dpsco.step.chooser import agreed, dimension, require_target
from torch_dpsco.step.plan import (
    ANSWERS,
    LABELS,
    BatchPlan,
    Ranges,
    drawing,
    exact_cost,
    passes,
)

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
        distance: guess of |w*|; None for the radius of the problem.
        gradient_error: certified error of the computed mean gradient, for losses of several scores.
        reg: gamma >= 0 of the regularizer (gamma/2)|w|^2, a part of each step.
    """

    problem: Problem
    dim: int
    steps: int
    lr: float | tuple[float, ...]
    noise_scale: float
    risk_bound: float | None
    distance: float | None = None
    gradient_error: float | None = None
    reg: float = 0.0

    ranges: ClassVar[Ranges] = {
        **BatchPlan.ranges,
        "adjacency": partial(check.choice, HIT_CONSTANTS),
        "dim": check.positive_count,
        "steps": check.positive_count,
        "noise_scale": check.nonnegative,
        "reg": check.nonnegative,
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.design, Shuffled):
            raise ValueError(f"design must be Shuffled (got {self.design})")
        if isinstance(self.lr, tuple) and len(self.lr) != self.steps:
            raise ValueError(
                f"lr must be a number or {self.steps} numbers, one per step (got {len(self.lr)})"
            )

    @property
    @abstractmethod
    def sensitivity(self) -> float:
        """How far one record moves the answer, rounding included."""

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
        answer = f"answer: {ANSWERS[self.average]}"
        yield "steps", f"{self.steps} secret steps, {over}, step size{sizes}, {answer}"
        yield LABELS
        yield "noise", self._noise_in_words()
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

    def _noise_in_words(self) -> str:
        norm = self.noise_std * math.sqrt(self.dim)
        far = f"at most {self.reach:.3g}" if math.isfinite(self.reach) else "without a bound"
        noise = f"std {self.noise_std:.3g} per parameter, norm {norm:.3g}, on an answer of norm {far}"
        return f"{noise}; one {self.unit} moves it by at most {self.sensitivity:.3g}"


_Made = TypeVar("_Made", bound=RowFreePlan)


def planned(
    kind: type[_Made], task: AnswerTask, problem: Problem, budget: Budget | None, **own: Any
) -> _Made:
    """Returns the plan of what theory chose; it computes its sensitivity itself.

    Warns where the noise of a budget is longer than the answer.
    """
    names = ("dim", "adjacency", "distance", "secure")
    given = {name: getattr(task, name) for name in names} | own
    error = task.promises.gradient_error
    plan = kind(problem=problem, budget=budget, gradient_error=error, **task.plan(), **given)
    if budget is not None:
        checks.warn_if_buried(
            plan.noise_std,
            plan.reach,
            n=plan.n,
            dim=plan.dim,
            epsilon=budget.epsilon,
            of="the answer",
        )
    return plan


@dataclass(frozen=True, kw_only=True)
class HolderOutputPlan(RowFreePlan):
    """Public numbers of a run of HolderOutputSGD."""

    ranges: ClassVar[Ranges] = {
        **RowFreePlan.ranges,
        "average": partial(check.choice, ("uniform",)),
        "reg": partial(check.choice, (0.0,)),
    }

    @cached_property
    def sensitivity(self) -> float:
        """How far one record moves the answer, rounding included."""
        hit = HIT_CONSTANTS[self.adjacency]
        path = output_path(
            self.promises, self.sizes, batch_size=self.batch_size, hit_constant=hit, dim=self.dim
        )
        # PRIVACY: rounding to the grid moves the answer too (test_the_grid_is_in_the_sensitivity_of_exact_plans)
        return with_grid(
            path_sensitivity(path, self.design.steps_per_epoch), asks_exact(self.secure)
        )


class HolderOutputSGD(RowFreeOptimizer):
    """Rests on promises: SGD with plain gradients, whose noised average is private if the promises about the loss hold.

    Nothing is clipped, so that the loss must be the one of the problem, convex, on a linear model, computed from the
    delivered batch alone, without terms on the weights, dropout or batch statistics. Records are mapped into the
    problem's bounds by `loader`. Nothing may be published before `finalize()`: no loss, no iterate, no checkpoint; no
    early stopping, no momentum, no schedule that looks at data. Parameters are set to 0, the start of the plan.

    Args:
        params: weight (and bias) of one Linear layer in double precision; others need `certify_convex`.
        plan: from `HolderOutputSGD.plan`.
        loss_reduction, certify_convex, accountant, generator: see `RowFreeOptimizer`.

    Guarantee:
        That of plan.event() for the final parameters, under plan.adjacency ("replace_one", or "zero_out"), unit
        example: one Gaussian release, which composes exactly. Source: docs/proofs/holder.md#shuffled-epochs.

    Example:
        >>> import torch, torch_dpsco as dp
        >>> model = torch.nn.Linear(3, 1, bias=False).double()
        >>> data = torch.utils.data.TensorDataset(torch.randn(100, 3), torch.sign(torch.randn(100, 1)))
        >>> loss = dp.losses.Hinge(power=1.5)
        >>> plan = dp.HolderOutputSGD.plan(
        ...     problem=loss.problem(bound_x=1.0, radius=1.0), n=100, dim=model, budget=dp.Budget(1.0, 1e-3),
        ...     batch_size=10)
        >>> with dp.HolderOutputSGD(model.parameters(), plan) as optimizer:
        ...     for x, y in optimizer.loader(data):
        ...         loss(model(x), y).backward()
        ...         optimizer.step()
        >>> optimizer.steps, optimizer.report().figures.epsilon == plan.epsilon() <= 1.0
        (10, True)
    """

    plans = HolderOutputPlan

    @classmethod
    def plan(
        cls,
        *,
        problem: Problem,
        n: int,
        dim: Any,
        epsilon: float | None = None,
        delta: float | None = None,
        budget: Budget | None = None,
        noise_multiplier: float | None = None,
        epochs: int | None = None,
        batch_size: int = 1,
        lr: float | Sequence[float] | None = None,
        adjacency: Adjacency | None = None,
        distance: float | None = None,
        gradient_error: float | None = None,
        secure: str | None = None,
    ) -> HolderOutputPlan:
        """Returns noise, steps, epsilon and risk bound of a run, before anything is spent.

        Args:
            problem: needs holder_exponent, holder_constant and a gradient bound; loss_at_zero without a radius.
            n: public number of records.
            dim: number of parameters, or the model.
            epsilon: of a budget, beside delta, in place of `budget`.
            delta: of a budget, beside epsilon.
            budget: target; the noise is chosen for it unless it is given, and then the budget only limits the run.
            noise_multiplier: noise std over the sensitivity of the answer, >= 0.
            epochs: passes over the data; default 1 for exponents >= 1/2, else more (see
                `algorithms.output_sgd_numbers.OutputTask`).
            batch_size: of all (shuffled) batches but a shorter last one, and divisor.
            lr: step size, or one per step, fixed in advance; default the balanced one.
            adjacency: "replace_one" or "zero_out"; default the budget's, or "zero_out".
            distance: guess of |w*|; default the radius of the problem.
            gradient_error: for losses that are no function of one scalar score: certified bound on the error of the
                computed mean gradient.
            secure: "exact" for noise drawn in integers on a public grid: 0.03 % more of it.

        Raises:
            AdjacencyError: add_remove: batches of a public n are assumed.
            MissingConstantError: a promise is missing.
            ConditionError: a side condition of the theory fails.

        Example:
            >>> import torch_dpsco as dp
            >>> problem = dp.losses.Hinge(power=1.5).problem(bound_x=1.0, radius=1.0)
            >>> plan = HolderOutputSGD.plan(problem=problem, n=10_000, budget=dp.Budget(1.0, 1e-6), dim=20, lr=0.005)
            >>> round(plan.noise_scale, 3)
            0.048
        """
        budget, adjacency = agreed(budget, adjacency, epsilon, delta)
        dim = check.positive_count(dim=dimension(dim))
        design = Shuffled(batch_size, n)
        task = OutputTask(
            promises=loss_promises(problem, by="HolderOutputSGD", gradient_error=gradient_error),
            n=n,
            batch_size=batch_size,
            dim=dim,
            noise_multiplier=noise_multiplier,
            adjacency=adjacency,
            epochs=epochs,
            lr=lr,
            distance=distance,
            secure=secure,
            **target_of(budget, noise_multiplier),
        )
        return planned(HolderOutputPlan, task, problem, budget, design=design)


@dataclass(frozen=True, kw_only=True)
class BoltOnPlan(RowFreePlan):
    """Public numbers of a run of BoltOnPSGD.

    Args:
        noise: "gaussian" or "knorm".
    """

    noise: str = "gaussian"

    ranges: ClassVar[Ranges] = {
        **RowFreePlan.ranges,
        "noise": partial(check.choice, ("gaussian", "knorm")),
    }

    @cached_property
    def sensitivity(self) -> float:
        """How far one record moves the answer, rounding included."""
        moved = bolt_on_sensitivity(
            self.promises,
            self.sizes,
            reg=self.reg,
            average=self.average,
            batch_size=self.batch_size,
            steps_per_epoch=self.design.steps_per_epoch,
            hit_constant=HIT_CONSTANTS[self.adjacency],
            dim=self.dim,
        )
        # PRIVACY: rounding to the grid moves the answer too (test_the_grid_is_in_the_sensitivity_of_exact_plans)
        return with_grid(moved, asks_exact(self.secure))

    @property
    def noise_std(self) -> float:
        """Standard deviation of the noise on each coordinate of the answer."""
        spread = (
            1.0 if self.noise == "gaussian" else math.sqrt(self.dim + 1)
        )  # the K-norm's norm is of Gamma(dim)
        return self.noise_scale * spread

    def event(self) -> SimpleEvent:
        """Returns the only release."""
        if self.noise == "gaussian":
            return super().event()
        # PRIVACY: the epsilon of the noise that is drawn (test_a_plan_with_half_the_noise_is_refused); margin of the
        # quotient (docs/proofs/rounding.md#model-of-arithmetic)
        scale = check.positive(noise_scale=self.noise_scale)
        return KNorm(
            scaled_up(self.sensitivity / scale, 2), self.dim, adjacencies=(self.adjacency,)
        )

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yields what is to be said beside the promise."""
        yield from super().lines()
        if self.reg:
            yield "shrinkage", f"({self.reg:g}/2)|w|^2 is part of each step, and not of the loss"


class BoltOnPSGD(RowFreeOptimizer):
    """Rests on promises: SGD with plain gradients, whose noised answer is private if the promises about the loss hold.

    Nothing is clipped, so that the loss must be the one of the problem, smooth and convex, on a linear model, computed
    from the delivered batch alone, without terms on the weights (give `reg` to the plan), dropout or batch statistics.
    Records are mapped into the problem's bounds by `loader`. Nothing may be published before `finalize()`: no loss, no
    iterate, no checkpoint; no early stopping, no momentum, no schedule that looks at data. Parameters are set to 0.

    Args:
        params: weight (and bias) of one Linear layer in double precision; others need `certify_convex`.
        plan: from `BoltOnPSGD.plan`.
        loss_reduction, certify_convex, accountant, generator: see `RowFreeOptimizer`.

    Guarantee:
        That of plan.event() for the final parameters, under plan.adjacency ("replace_one", or "zero_out"), unit
        example, n public: one Gaussian, or KNorm, which is pure. Rounding of the run in double precision is covered;
        that of the noise samplers is not. Under zero_out the null record has no gradient (with a bias and a residual
        loss a record of zeros is not that one). Source: docs/proofs/output.md#bolt-on-runs

    Example:
        >>> import torch, torch_dpsco as dp
        >>> model = torch.nn.Linear(3, 1, bias=False).double()
        >>> data = torch.utils.data.TensorDataset(torch.randn(100, 3), torch.sign(torch.randn(100, 1)))
        >>> loss = dp.losses.Logistic()
        >>> plan = dp.BoltOnPSGD.plan(
        ...     problem=loss.problem(bound_x=1.0), n=100, dim=model, budget=dp.Budget(1.0, 0.0), batch_size=10,
        ...     epochs=2, reg=0.1)
        >>> with dp.BoltOnPSGD(model.parameters(), plan) as optimizer:
        ...     for x, y in optimizer.loader(data):
        ...         loss(model(x), y).backward()
        ...         optimizer.step()
        >>> optimizer.steps, optimizer.report().figures.epsilon == plan.epsilon(), round(plan.epsilon(), 9)
        (20, True, 1.0)
    """

    plans = BoltOnPlan

    @classmethod
    def plan(
        cls,
        *,
        problem: Problem,
        n: int,
        dim: Any,
        epsilon: float | None = None,
        delta: float | None = None,
        budget: Budget | None = None,
        noise_multiplier: float | None = None,
        epochs: int = 1,
        batch_size: int = 1,
        lr: float | Sequence[float] | None = None,
        reg: float = 0.0,
        average: str | None = None,
        adjacency: Adjacency | None = None,
        distance: float | None = None,
        gradient_error: float | None = None,
        secure: str | None = None,
    ) -> BoltOnPlan:
        """Returns noise, steps, epsilon and risk bound of a run, before anything is spent.

        Args:
            problem: of a smooth loss (holder_exponent 1), with a gradient bound within its radius.
            n: public number of records.
            dim: number of parameters, or the model.
            epsilon: of a budget, beside delta, in place of `budget`.
            delta: of a budget, beside epsilon.
            budget: target; the noise is chosen for it unless it is given, and then the budget only limits the run. With
                delta = 0 the noise is that of the K-norm mechanism.
            noise_multiplier: noise scale over the sensitivity of the answer, >= 0.
            epochs: passes over the data, default 1; with reg > 0 and the default step sizes they cost nothing.
            batch_size: of all (shuffled) batches but a shorter last one, and divisor.
            lr: (proximal) step size, at most 2/smoothness, or one per step, fixed in advance; default the schedule
                min(1/smoothness, 1/(reg (t - 1))) if reg > 0, else the constant one of the least risk bound.
            reg: gamma >= 0 of the regularizer (gamma/2)|w|^2, all parameters included.
            average: "last" (default if reg > 0), "uniform" (default else) or "weighted" (by t).
            adjacency: "replace_one" or "zero_out"; default the budget's, or "zero_out".
            distance: guess of |w*|, for the default step size at reg = 0; default the radius of the problem.
            gradient_error: for losses that are no function of one scalar score: certified bound on the error of the
                computed mean gradient.
            secure: "exact" for noise drawn in integers on a public grid (Gaussian): 0.03 % more of it.

        Raises:
            AdjacencyError: add_remove: batches of a public n are assumed.
            MissingConstantError: a promise is missing.
            ConditionError: the loss is not smooth, or a step is too large.

        Example:
            >>> import torch_dpsco as dp
            >>> problem = dp.losses.Logistic().problem(bound_x=1.0)
            >>> plan = dp.BoltOnPSGD.plan(problem=problem, n=10_000, budget=dp.Budget(1.0, 0.0), dim=20, batch_size=50,
            ...                           epochs=5, reg=0.01)
            >>> round(plan.sensitivity, 6), round(plan.noise_scale, 6)
            (0.01, 0.01)
        """
        budget, adjacency = agreed(budget, adjacency, epsilon, delta)
        dim = check.positive_count(dim=dimension(dim))
        noise = "knorm" if budget is not None and budget.delta == 0 else "gaussian"
        design = Shuffled(batch_size, n)
        task = BoltOnTask(
            promises=loss_promises(problem, by="BoltOnPSGD", gradient_error=gradient_error),
            n=n,
            batch_size=batch_size,
            dim=dim,
            noise_multiplier=noise_multiplier,
            adjacency=adjacency,
            epochs=epochs,
            lr=lr,
            distance=distance,
            secure=secure,
            reg=float(reg),
            average=average,
            **target_of(budget, noise_multiplier),
        )
        return planned(
            BoltOnPlan, task, problem, budget, design=design, noise=noise, reg=task.reg
        )


def loss_promises(
    problem: Problem, *, by: str, gradient_error: float | None = None
) -> LossPromises:
    """Returns the promises of a problem as theory takes them.

    Args:
        problem: needs holder_exponent, holder_constant, and score_offset if its score is a scalar.
        by: name of the optimizer that asks, for messages.
        gradient_error: certified bound on the error of the computed mean gradient, for losses of several scores.

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
        grad_bound=problem.grad_bound,
        loss_at_zero=problem.loss_at_zero,
        radius=problem.radius,
        glm=problem.is_glm,
        score_offset=problem.score_offset or 0.0,
        gradient_error=gradient_error,
    )


def reach(promises: LossPromises, lr: float | Sequence[float], steps: int) -> float:
    """Returns how far from their start plain steps can end; inf where gradients have no bound."""
    total = lr * steps if isinstance(lr, float) else math.fsum(lr)
    try:
        return min(promises.radius, total * promises.grad_bound(promises.radius))
    except MissingConstantError:
        return math.inf


def target_of(budget: Budget | None, noise_multiplier: float | None) -> dict[str, float]:
    """Returns epsilon and delta to calibrate for; none without a budget, which then takes noise of the caller's."""
    require_target(budget, noise_multiplier)
    return {} if budget is None else {"epsilon": budget.epsilon, "delta": budget.delta * _HAIR}
