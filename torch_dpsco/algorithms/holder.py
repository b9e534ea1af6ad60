"""HolderSGD: Poisson or fixed batches x Hoelder-clipped oracle x SGD with averaging x ball projection.

    w_{t+1} = Proj_W( w_t - eta ( (1/b) sum_{i in B_t} clip(g_i(w_t), C_t) + (z C_t / b) N(0, I) ) )

C_t is the gradient bound that the loss promises (at the public iterate, over W, or the paper's M + L R^alpha), so that
with true constants the clip never acts, and with false ones privacy still holds.

Differs from the paper (Wang, Lei, Ying, Zhang, Algorithm 2) in: 1. batches of any size, Poisson or fixed, not one
record; 2. the noise is calibrated by exact Renyi curves instead of Lemma 3; 3. the bound may follow the iterate, which
also settles unbounded domains (their Remark 5); 4. averages weight the iterates before their update, as theirs, but the
last iterate may be the answer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch_dpsco import _validate as check
from torch_dpsco.accounting.budgets import Budget
from torch_dpsco.accounting.designs import Design
from torch_dpsco.accounting.events import Adjacency
from torch_dpsco.algorithms.holder_numbers import (
    average_risk_bound,
    balanced_lr,
)
from torch_dpsco.algorithms.prepared import (
    PreparedOptimizer,
    PreparedPlan,
    measurements,
    rest,
    with_measurements,
)
from torch_dpsco.errors import ConditionError, MissingConstantError, outside, warn
from torch_dpsco.problem import Pace, Problem, TableGradBound, shared_bound
from torch_dpsco.prox import Prox
from torch_dpsco.step.chooser import (
    USUAL_EPOCHS,
    Draws,
    Scale,
    Task,
    agreed,
    choose_clip,
    choose_design,
    choose_noise,
    choose_pace,
    dimension,
    public_size,
    scale_of_problem,
    warn_if_buried,
)
from torch_dpsco.step.oracle import NOISES, HolderClipped
from torch_dpsco.step.plan import Ranges, StepPlan, expected, noise_on_mean

_NEAR = 1.25  # guess of the distance in private units, of losses of labels, for each score


@dataclass(frozen=True, kw_only=True)
class HolderPlan(PreparedPlan):
    """Public numbers of a run of HolderSGD.

    Args:
        problem: promised constants.
        noise: "adaptive" or "constant"; see `HolderSGD.plan`.
        grad_bound: clip at the radius, or at the start on an unbounded domain.
        clip: share of the promised bound past which rows are clipped; 1 where none is.
        risk_bound: on the expected excess risk of the average; None where no theorem applies.
    """

    problem: Problem
    noise: str
    grad_bound: float
    clip: float = 1.0
    risk_bound: float | None = None

    ranges: ClassVar[Ranges] = {
        **StepPlan.ranges,
        "noise_multiplier": check.nonnegative,
        "clip": check.positive,
    }

    @property
    def noise_std(self) -> float:
        """Std of the noise on the mean, at `grad_bound`."""
        return self.noise_multiplier * self.grad_bound / self.batch_size

    def oracle(self, prox: Prox) -> HolderClipped:
        """Returns a new oracle with the plan's numbers."""
        if not prox.contains_zero:
            raise ValueError(f"prox must have a feasible set that contains 0 (got {prox})")
        return HolderClipped(
            self.problem,
            self.noise_multiplier,
            self.batch_size,
            noise=self.noise,
            radius=prox.radius,
            clip_share=self.clip,
        )

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yields what is to be said beside the promise."""
        yield from super().lines()
        if self.grad_bound > 0:  # 0: promised gradients of 0 at the start
            where = (
                " at the start" if math.isinf(self.radius) and self.noise == "adaptive" else ""
            )
            yield noise_on_mean(self.noise_std / self.grad_bound, self.grad_bound, where)
        if self.clip < 1:
            yield (
                "clip",
                (
                    f"rows are clipped at {self.clip:.3g} of the bound that the loss promises, for"
                    " less noise"
                ),
            )
        yield (
            "assumed",
            (
                "rows do not depend on other records; the bounds of the problem are enforced by"
                " clipping"
            ),
        )
        yield from expected(self.risk_bound)


class HolderSGD(PreparedOptimizer):
    """Private SGD whose noise is calibrated from the loss, with no clipping threshold to guess.

    Args:
        params: parameters or groups; all of them count as one vector for norms and projection.
        plan: from `HolderSGD.plan`.
        rule: another update rule, e.g. `TorchRule(torch.optim.Adam(...))`; it has averages of its own.
        prox: default the projection on the ball of problem.radius, if that is finite.
        reg: lambda of (lambda/2)|w|^2, see `PrivateOptimizer`.
        accountant: ledger to charge; default a new one with the plan's budget.
        generator: noise generator of your own (warns).

    Guarantee:
        Adjacency: add_remove, zero_out or replace_one under Poisson sampling, the latter two under fixed batches. Unit:
        one row per record. Event of a step: PoissonGaussian(z, b/n) or WORGaussian(z, b, n), the same whatever the
        iterates do, because C_t is fixed by public history. Assumes: batches of the optimizer's own loader, rows that
        do not couple records. The promised constants are NOT assumed: every row is clipped.
        Source: docs/proofs/holder.md#bound-at-the-iterate; Wang, Lei, Ying, Zhang, Theorem 11.

    Example:
        >>> import torch, torch_dpsco as dp
        >>> model = dp.attach(torch.nn.Linear(3, 1))
        >>> data = torch.utils.data.TensorDataset(torch.randn(100, 3), torch.ones(100, 1))
        >>> problem = dp.losses.Logistic().problem(bound_x=2.0)
        >>> plan = dp.HolderSGD.plan(problem=problem, n=100, budget=dp.Budget(1.0, 1e-3), batch_size=20, epochs=2)
        >>> optimizer = dp.HolderSGD(model.parameters(), plan)
        >>> for x, y in optimizer.loader(data, steps=10):
        ...     optimizer.zero_grad()
        ...     dp.losses.Logistic()(model(x), y).backward()
        ...     optimizer.step()
        >>> optimizer.report().figures.epsilon == plan.epsilon() <= 1.0
        True
    """

    plans = HolderPlan

    @classmethod
    def plan(
        cls,
        *,
        problem: Problem,
        n: int | None = None,
        epsilon: float | None = None,
        delta: float | None = None,
        budget: Budget | None = None,
        noise_multiplier: float | None = None,
        steps: int | None = None,
        epochs: float | None = None,
        batch_size: int | None = None,
        lr: float | None = None,
        sampling: str | Design | None = None,
        noise: str = "adaptive",
        average: str | None = None,
        adjacency: Adjacency | None = None,
        dim: Any = None,
        distance: float | None = None,
        clip: float | None = None,
        prepare: str | None = None,
        secure: str | None = None,
    ) -> HolderPlan:
        """Returns noise, steps, epsilon and risk bound of a run, before anything is spent.

        For losses of the table (`losses.<Loss>().problem(...)`), a budget and no lr, what is not given follows from the
        noise: the step rule of docs/proofs/steps.md. "Without the rule" below is all else, and average="uniform" in a
        ball, which the bound on the risk is for.

        Args:
            problem: promised constants (`losses.<Loss>().problem(...)`); needs what `Problem.grad_bound` needs.
            n: public number of records (a reference under add_remove); that of a design.
            epsilon: of a budget, beside delta, in place of `budget`.
            delta: of a budget, beside epsilon.
            budget: target; the noise is chosen for it unless it is given, and then the budget only limits the run.
            noise_multiplier: z >= 0, noise std on the sum of rows over the bound; 0 is not private.
            steps: number of steps, in place of epochs; a step past it raises. Without steps, epochs and a noise to
                choose there is no limit but the budget.
            epochs: passes over the data on average; default 20, more for less than 50,000 records and "full" batches;
                without the rule 10 where the noise is chosen; 1 for "assigned".
            batch_size: expected batch size, the public divisor; default such that 64 to 1024 steps make those passes;
                without the rule 512 (at most n).
            lr: step size, without momentum; default by the rule, or 1/smoothness, or
                `algorithms.holder_numbers.balanced_lr`.
            sampling: "poisson" (default, but "assigned" for exactly one pass, "full" where a batch holds all records),
                "fixed", "shuffled", "allocated" (each record once per pass, secretly:
                `Assigned`, at the price of Poisson), "assigned" (one such pass) or "full"; or a design such as
                dp.Full(n), which has batch_size and n.
            noise: "adaptive" (bound at the iterate), or "constant" (bound over the feasible set).
            average: default "weighted"; without the rule "last" for smooth losses or where the noise is given, else
                "uniform".
            adjacency: default the budget's, or "zero_out".
            dim: number of parameters, or the model: the step rule takes 64 for each score without it. Needed for the
                risk bound, and without the rule to choose lr for a loss that is not smooth.
            distance: guess of |w_1 - w*|; default by the rule (50 first steps, at most 6 bound_y/bound_x and the
                radius), or the radius.
            clip: share in (0, 1] of the promised bound at which rows are clipped; default 1, and down to 1/2 where the
                rule sees much noise and the loss has one score. Privacy does not depend on it: noise is in proportion.
            prepare: "auto" measures privately, within the budget and where that pays by public numbers, where rows lie,
                and counts on rows in these units (`dp.standardize`, which `dp.fit` calls by itself): for losses of the
                table, a model with a bias, and features that are not centered. Then bounds of the problem are those of
                raw rows, and `distance` counts in the units. None measures nothing.
            secure: "exact" for noise in integers on a public grid, see docs/performance.md for its cost.

        Raises:
            InfeasibleError: the target cannot be reached; names the way out.
            MissingConstantError: lr cannot be chosen without `distance` or `dim`.
            AdjacencyError: sampling and adjacency do not go together.
        """
        budget, adjacency = agreed(budget, adjacency, epsilon, delta)
        task = _Task(
            problem=problem,
            n=public_size(n, sampling),
            budget=budget,
            noise_multiplier=noise_multiplier,
            steps=steps,
            epochs=epochs,
            batch_size=batch_size,
            lr=lr,
            sampling=sampling,
            noise=noise,
            average=average,
            adjacency=adjacency,
            dim=dimension(dim),
            distance=distance,
            clip=clip,
            prepare=prepare,
        )
        return task.plan(secure)


@dataclass(frozen=True, kw_only=True)
class _Task(Task):
    """What a plan is asked for, as in `HolderSGD.plan`."""

    noise: str
    clip: float | None
    prepare: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check.choice(("auto", None), prepare=self.prepare)
        check.choice(NOISES, noise=self.noise)
        if self.clip is not None:
            check.between(0.0, 1.0, clip=check.positive(clip=self.clip))

    @property
    def radius(self) -> float:
        """How far the minimizer is: as promised, or guessed."""
        return min(self.problem.radius, self.distance or math.inf)

    def plan(self, secure: str | None) -> HolderPlan:
        """Returns the plan, stage by stage."""
        if self.prepare:
            return self._prepared(secure)
        clip, scale = self._promises()
        draws = self._design(scale)
        multiplier = choose_noise(self.budget, *draws, self)
        bound = self._bound(clip)
        if scale is not None:
            pace = choose_pace(scale, draws, multiplier)
        else:
            std = multiplier * bound / draws.design.batch_size
            pace = Pace(self._lr(draws.steps, bound, std))
        average = self._average(scale)
        risk: float | None = None
        if average == "uniform" and scale is None and clip == 1:
            risk = self._risk(draws, pace.lr, multiplier)
        warn_if_buried(self.goal, draws, multiplier, self.n, self.dim)
        return HolderPlan(
            budget=self.budget,
            adjacency=self.adjacency,
            design=draws.design,
            steps=draws.steps,
            lr=pace.lr,
            momentum=pace.momentum,
            radius=self.problem.radius,
            average=average,
            secure=secure,
            problem=self.problem,
            noise=self.noise,
            noise_multiplier=multiplier,
            grad_bound=bound,
            clip=clip,
            risk_bound=risk,
        )

    def _prepared(self, secure: str | None) -> HolderPlan:
        """Returns the plan of steps in private units, with what measuring them leaves of the budget."""
        table = self.problem.exact_grad_bound
        if not isinstance(table, TableGradBound) or self.problem.radius < math.inf:
            raise ConditionError(
                "problem must be of a loss of dp.losses, without a radius, which would be one in raw"
                f" units, beside prepare='auto' (got {self.problem})"
            )
        scores = table.loss.num_scores
        real = table.loss.target_kind == "real"
        bound = table.bound_x
        dim = self.dim and self.dim // scores
        prepare = measurements(self.budget, self, bound_x=bound, dim=dim, real=real)
        inner = replace(self, prepare=None, budget=rest(self.budget, prepare))
        if prepare:
            problem = table.loss.problem(
                bound_x=HolderPlan.length, bound_y=table.bound_y, intercept=True
            )
            near = self.distance or (None if real else _NEAR * math.sqrt(scores))
            inner = replace(inner, problem=problem, distance=near)
        return with_measurements(inner.plan(secure), self.budget, prepare)

    def _promises(self) -> tuple[float, Scale | None]:
        """Returns the share of the bound at which rows are clipped, and what the step rule measures by, if it holds."""
        by_theorem = self.average == "uniform" and math.isfinite(self.problem.radius)
        if self.goal is not None and self.lr is None and not by_theorem:
            clip = self.clip or choose_clip(self.problem, self.n, self.goal, self.dim)
            scale = scale_of_problem(self.problem, clip, self.distance, self.dim)
            if scale is not None:
                return clip, scale
        return self.clip or 1.0, None

    def _design(self, scale: Scale | None) -> Draws:
        given = self.sized() if scale is None else self
        passes = None if self.goal is None else USUAL_EPOCHS
        return choose_design(scale, self.budget, given, passes)

    def _lr(self, steps: int | None, bound: float, std: float) -> float:
        """Returns the step size without the step rule."""
        smoothness = self.problem.smoothness
        if self.lr is None:
            return 1.0 / smoothness if smoothness else self._balanced_lr(steps, bound, std)
        if smoothness and check.nonnegative(lr=self.lr) > 2.0 / smoothness:
            message = (
                f"lr={self.lr:g} is above 2/smoothness={2.0 / smoothness:g}: steps may diverge"
            )
            warn(message, stacklevel=outside())
        return self.lr

    def _balanced_lr(self, steps: int | None, bound: float, noise_std: float) -> float:
        if math.isinf(self.radius):
            raise MissingConstantError(
                "lr cannot be chosen for this loss without a scale: give distance= (a guess of"
                " |w*|), a problem with a finite radius, or lr=; for a net: dp.NetSGD.plan(n=,"
                " budget=, dim=model)"
            )
        if self.dim is None or steps is None:
            raise MissingConstantError(
                "dim (the number of parameters, or the model) and steps are needed to choose lr"
                " for this loss; or give lr=; for a net: dp.NetSGD.plan(n=, budget=, dim=model)"
            )
        return balanced_lr(self.radius, steps, bound, self.dim, noise_std)

    def _average(self, scale: Scale | None) -> str:
        if self.average is not None:
            return self.average
        if scale is not None:
            return "weighted"
        smooth = self.problem.smoothness is not None
        return "last" if self.goal is None or smooth else "uniform"

    def _risk(self, draws: Draws, lr: float, multiplier: float) -> float | None:
        """Returns the bound on the excess risk of the average of all iterates; None where there is none."""
        radius = self.problem.radius
        if self.dim is None or math.isinf(radius) or not (multiplier and draws.steps and lr):
            return None
        # |w_1 - w*| <= radius for a start at 0; the noise never exceeds that at the bound over the feasible set
        bound = self.problem.grad_bound()
        size = draws.design.batch_size
        noise = multiplier * bound / size
        return average_risk_bound(radius, draws.steps, lr, bound, self.dim, noise, size)

    def _bound(self, clip: float) -> float:
        """Returns the clip at the radius, or at the start on an unbounded domain."""
        if self.noise == "constant" or math.isfinite(self.radius):
            return clip * self.problem.grad_bound(self.radius)
        try:
            largest = self.problem.grad_bound()
        except MissingConstantError:
            largest = math.inf
        return shared_bound(self.problem.grad_bound(0.0), largest, clip)
