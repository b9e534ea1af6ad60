"""LocalizedSGD and its plans: phases on separate records, each around the answer of the phase before.

LocalizedSGD: phases of regularized subgradient steps, each on records of its own, around the answer before.

    phase i, center c, n_i records:   w <- Proj( w - f_k ( mean / lambda_i + (w - c) ) ),   c <- last w

Multi-pass within a phase (all its records, or a minibatch of them, in each step), one pass over phases: a record is in
one phase only, so that the run costs what the costliest phase costs. No smoothness is needed.

Differs from the paper (Lowy and Razaviyayn 2023, Algorithms 3 and 4) in: 1. schedules with proved constants, without
balls around the centers; 2. the number of steps is not tied to lambda; 3. minibatches are accounted numerically, not by
the hidden constants of the moments accountant; 4. the strongly convex reduction in its proved form.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch_dpsco import _validate as check
from torch_dpsco.accounting.budgets import Budget
from torch_dpsco.accounting.designs import Full, Parts, Poisson
from torch_dpsco.accounting.events import ADD_REMOVE, REPLACE_ONE, Adjacency
from torch_dpsco.algorithms.clips import LEAST_PILOT, PilotClipped, QuantilePilot
from torch_dpsco.algorithms.heavy_plan import Pilot, oracle_of, scale_of, zcdp_of
from torch_dpsco.algorithms.heavy_tailed_numbers import PilotPlan, exchange_rate_phase
from torch_dpsco.algorithms.localized_numbers import (
    LocalizedPhase,
    LocalizedSchedule,
    PhaseTask,
    halved_sizes,
    localized_schedule_ballfree,
    localized_schedule_minibatch,
    minibatch_size,
    reduction_schedule,
)
from torch_dpsco.errors import (
    AdjacencyError,
    ConditionError,
    InfeasibleError,
    MissingConstantError,
)
from torch_dpsco.problem import Phase, Problem, Schedule
from torch_dpsco.prox import Prox
from torch_dpsco.rules import Anchored, UpdateRule
from torch_dpsco.step import checks
from torch_dpsco.step.chooser import agreed, dimension, noise_for, release_noise, require_planned
from torch_dpsco.step.oracle import Clipped, MeanOracle, Phased
from torch_dpsco.step.plan import CLIPPED, LABELS, PlannedOptimizer, StepPlan, costs, expected

METHODS = ("localized", "reduction")
_UNPROMISED = 4.0  # moment order where clip and reg replace all promises: any will do


@dataclass(frozen=True, kw_only=True)
class LocalizedPlan(StepPlan):
    """Public numbers of a run of LocalizedSGD.

    Args:
        localized: the phases, with their clips, noises, regularizers and pilots.
    """

    localized: LocalizedSchedule

    values: ClassVar[tuple[type, ...]] = (LocalizedPhase, LocalizedSchedule, PilotPlan)

    @property
    def risk_bound(self) -> float | None:
        """On the expected excess risk; None where clip or reg were chosen by hand."""
        return self.localized.risk_bound

    def oracle(self, prox: Prox) -> MeanOracle:
        """Returns a new oracle with the plan's numbers."""
        oracles: list[tuple[MeanOracle, int]] = []
        newest: QuantilePilot | None = None
        for phase in self.localized.phases:
            if phase.pilot is not None:
                newest = oracle_of(phase.pilot)
                oracles.append((newest, 1))
            numbers = phase.noise_multiplier, phase.batch_size
            own = (
                Clipped(phase.clip, *numbers)
                if newest is None
                else PilotClipped(newest, *numbers)
            )
            oracles.append((own, phase.steps))
        return Phased(oracles)

    def rule(self) -> UpdateRule:
        """Returns the steps around a center."""
        return Anchored()

    def schedule(self) -> Schedule:
        """Returns the phases of the run, with those of the pilots."""
        phases: list[Phase] = []
        for phase in self.localized.phases:
            phases += [] if phase.pilot is None else [Phase(1)]
            phases.append(Phase(phase.steps, phase.lr, phase.reg))
        return Schedule(tuple(phases))

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yields what is to be said beside the promise."""
        yield (
            "batches",
            f"{len(self.schedule().phases)} phases, each on {self.unit}s of its own, of {self.n}",
        )
        yield (
            "steps",
            f"{self.steps} steps, answer: the last iterate, which is the center of the next phase",
        )
        piloted = any(phase.pilot for phase in self.localized.phases)
        for phase in self.localized.phases:
            if phase.pilot is not None:
                yield "pilot", str(phase.pilot)
            clip = "the clip" if piloted else f"the clip ({phase.clip:.3g})"
            yield (
                f"phase {phase.index}",
                (
                    f"{phase.steps} steps on {phase.batch_size} of {phase.n} {self.unit}s,"
                    f" lambda {phase.reg:.3g}, noise of std"
                    f" {phase.noise_multiplier / phase.batch_size:.2g} of {clip}"
                ),
            )
        yield LABELS
        yield from costs(self.oracle(self.prox()), self.design, self.adjacency, self.secure)
        yield CLIPPED
        yield from expected(self.risk_bound)


def parts_of(localized: LocalizedSchedule, n: int) -> Parts:
    """Returns the design of the phases."""
    parts: list[tuple[Full | Poisson, int]] = []
    for phase in localized.phases:
        parts += [] if phase.pilot is None else [(Full(phase.pilot.size), 1)]
        parts.append((_drawn(phase.batch_size, phase.n), phase.steps))
    return Parts(tuple(parts), n)


def _drawn(batch_size: int, n: int) -> Full | Poisson:
    return Full(n) if batch_size == n else Poisson(batch_size, n)


@dataclass(frozen=True, kw_only=True)
class _Task:
    """What phases are asked for; the fields are arguments of `LocalizedSGD.plan`."""

    problem: Problem
    n: int
    budget: Budget | None
    clip: float | Pilot | None
    reg: float | None
    method: str
    max_steps: int | None
    min_phase: int
    sampling: str
    dim: int | None
    distance: float | None

    def require_none_chosen(self, phases: LocalizedSchedule) -> None:
        """Raises ValueError for what only a choice of phases takes."""
        unset = dict.fromkeys(("clip", "reg", "dim", "distance"))
        unset |= {"method": "localized", "max_steps": _MAX_STEPS, "min_phase": 1}
        names = [name for name, value in unset.items() if getattr(self, name) != value]
        if names:
            raise ValueError(
                f"{', '.join(names)} must not be given beside phases, which are chosen (got"
                f" {phases})"
            )

    def phases(self) -> LocalizedSchedule:
        """Returns the phases that are chosen for the budget, with their pilots."""
        budget = self.budget
        dim = self.dim
        if budget is None or dim is None:
            check.required(
                " for phases to be chosen, or phases= of your own", budget=budget, dim=dim
            )
        require_planned(budget)
        if self.distance is not None:
            check.positive(distance=self.distance)
        phases = self._chosen(budget)
        shares = [p.noise_multiplier / p.batch_size / math.sqrt(p.steps) for p in phases.phases]
        best = "its best phase, in units of the clip,"
        checks.warn_if_buried(min(shares), n=self.n, dim=dim, epsilon=budget.epsilon, of=best)
        if isinstance(self.clip, Pilot):
            return split(self.clip, phases, budget, dim)
        return phases

    def _chosen(self, budget: Budget) -> LocalizedSchedule:
        order, moment, second, diameter = self._promises()
        self._require(order)
        task = PhaseTask(
            n=self.n,
            dim=self.dim or 1,
            rho=zcdp_of(release_noise(budget), budget.adjacency),
            moment_order=order / 2.0,
            second_moment=second,
            diameter=diameter,
            max_steps=self.max_steps,
            reg=self.reg,
            adjacency=budget.adjacency,
        )
        phases = self._localized(task, moment)
        if self.sampling != "full":
            phases = self._in_minibatches(phases, task, moment, budget)
        if self.clip is None:
            return phases
        # noise in units of the clip: privacy stays as it is
        return phases.clipped_at(1.0 if isinstance(self.clip, Pilot) else self.clip)

    def _localized(self, task: PhaseTask, moment: float) -> LocalizedSchedule:
        """Returns the phases of the method, on all their records in each step."""
        if self.method == "localized":
            return localized_schedule_ballfree(task, moment_2k=moment, min_phase=self.min_phase)
        (curvature,) = self.problem.require(
            "strong_convexity", by="LocalizedSGD(method='reduction')"
        )
        return reduction_schedule(
            task, strong_convexity=curvature, moment_2k=moment, min_phase=self.min_phase
        )

    def _in_minibatches(
        self, full: LocalizedSchedule, task: PhaseTask, moment: float, budget: Budget
    ) -> LocalizedSchedule:
        """Returns phases of as many steps, each on a minibatch of its records."""
        sizes = halved_sizes(self.n, self.min_phase)
        steps = [phase.steps for phase in full.phases]
        rho = check.positive(rho=task.rho)
        batches = [minibatch_size(m, rho, T) for m, T in zip(sizes, steps, strict=True)]
        drawn = zip(map(_drawn, batches, sizes), steps, strict=True)
        return localized_schedule_minibatch(
            replace(task, rho=None, adjacency=REPLACE_ONE),
            batch_sizes=batches,
            steps=steps,
            noise_multipliers=[noise_for(budget, design, T) for design, T in drawn],
            moment_2k=moment,
            min_phase=self.min_phase,
        )

    def _require(self, order: float) -> None:
        """Raises for what does not go together."""
        check.choice(METHODS, method=self.method)
        if self.sampling != "full" and self.method != "localized":
            raise ValueError(
                f"sampling must be 'full' for method {self.method!r} (got {self.sampling!r})"
            )
        if order < 4:
            raise ConditionError(
                "moment_order must be >= 4 for phases, which need twice the moments that their"
                f" bound is about (got {order:g}): give clip= and reg=, chosen without looking at"
                " the data"
            )

    def _promises(self) -> tuple[float, float, float, float]:
        """Returns order, moment, second moment and diameter as promised; anything where clip and reg replace them."""
        if self.clip is not None and self.reg is not None:
            return _UNPROMISED, 1.0, 1.0, 1.0
        problem = self.problem
        if problem.moment is None or problem.moment_order is None:
            raise MissingConstantError(
                "LocalizedSGD needs Problem(moment=..., moment_order=...) of the largest gradient"
                " norm over w; or give both clip= (a number, or dp.Pilot()) and reg="
            )
        second = problem.second_moment or problem.moment
        diameter = scale_of(problem, self.distance, "LocalizedSGD")
        return problem.moment_order, problem.moment, second, diameter


_MAX_STEPS = 2000


class LocalizedSGD(PlannedOptimizer):
    """Localized regularized subgradient steps for non-smooth convex (or strongly convex) losses.

    The loop is the usual one, over `loader(dataset)`, which delivers all batches of all phases in order.

    Args:
        params: parameters or groups; all of them count as one vector.
        plan: from `LocalizedSGD.plan`.
        rule: another update rule, which the theorems do not cover.
        prox: projection on the feasible set; with balls around the centers Identity or Ball.
        reg: lambda of a term (lambda/2)|w|^2, beside the regularizers of the phases.
        accountant: ledger to charge; default a new one with the plan's budget.
        generator: noise generator of your own (warns).

    Guarantee:
        Adjacency: replace_one or zero_out. Unit: one row per record. Event: in each phase, its steps of unsampled (or
        sampled) Gaussians, or its passes of random allocation; phases are parts of one partition. Assumes: batches of
        the optimizer's own loader, rows that do not couple records. The regularizer is added after clip and noise.
        Neither moments nor lambda are assumed. Source: Lowy, Razaviyayn 2023, Theorem 12;
        docs/proofs/heavy_tailed.md#disjoint-parts, docs/proofs/allocation.md.

    Example:
        >>> import torch, torch_dpsco as dp
        >>> model = dp.attach(torch.nn.Linear(3, 1))
        >>> data = torch.utils.data.TensorDataset(torch.randn(400, 3), torch.randn(400, 1))
        >>> plan = dp.LocalizedSGD.plan(
        ...     n=400, dim=model, budget=dp.Budget(1.0, 1e-4), clip=2.0, reg=0.1, max_steps=10,
        ...     min_phase=50)
        >>> optimizer = dp.LocalizedSGD(model.parameters(), plan)
        >>> for x, y in optimizer.loader(data):
        ...     optimizer.zero_grad()
        ...     dp.losses.Absolute()(model(x), y).backward()
        ...     optimizer.step()
        >>> [phase.n for phase in plan.localized.phases], optimizer.steps
        ([200, 100, 97], 30)
    """

    plans = LocalizedPlan
    undisturbed = "each of its phases is a ball around the private answer before it"

    @classmethod
    def plan(
        cls,
        *,
        problem: Problem | None = None,
        n: int,
        epsilon: float | None = None,
        delta: float | None = None,
        budget: Budget | None = None,
        phases: LocalizedSchedule | None = None,
        clip: float | Pilot | None = None,
        reg: float | None = None,
        method: str = "localized",
        max_steps: int | None = _MAX_STEPS,
        min_phase: int = 1,
        sampling: str = "full",
        adjacency: Adjacency | None = None,
        dim: Any = None,
        distance: float | None = None,
        secure: str | None = None,
    ) -> LocalizedPlan:
        """Returns the phases of a run, before anything is spent.

        Args:
            problem: promises about the supremum over w of the gradient norm: moment of moment_order >= 4,
                second_moment. Not needed where both clip and reg are given, or phases.
            n: public number of records; at least those of all phases, which take them from one random permutation.
            epsilon: of a budget, beside delta, in place of `budget`.
            delta: of a budget, beside epsilon.
            budget: what the run may spend; replace_one or zero_out. The phases are chosen for it unless they are given.
            phases: of your own, from `algorithms.localized_numbers`, with their noise: in place of what follows.
            clip: clip of all phases, chosen without looking at the data; default by theory. With a `Pilot` each phase
                that is large enough gives a group of its records to choose the clip at its center; smaller ones keep
                the last choice.
            reg: lambda of the first phase, chosen without looking at the data; default by theory, which is sized for
                the worst case and moves little at moderate n. Without the default there is no risk bound.
            method: "localized", or "reduction" (strongly convex losses: localized runs around each other).
            max_steps: cap on the steps of a phase; the theorem wants up to n^2 rho / (2 dim). None for no cap.
            min_phase: phases of fewer records join the one before.
            sampling: "full" (all records of the phase in each step), or "poisson" (minibatches; method "localized").
            adjacency: default the budget's, or "zero_out".
            dim: number of parameters, or the model; needed where the phases are chosen.
            distance: bound on |w_0 - w*|; default the diameter of the problem's ball.
            secure: "exact" for noise in integers on a public grid, see docs/performance.md for its cost.

        Raises:
            MissingConstantError: promises are missing; says which, and how to do without.
            AdjacencyError: add_remove, where parts that are cut by position have no bound.
            ValueError: an argument is out of range.
        """
        problem = problem or Problem()
        check.choice(("full", "poisson"), sampling=sampling)
        budget, adjacency = agreed(budget, adjacency, epsilon, delta)
        if adjacency == ADD_REMOVE:
            raise AdjacencyError(
                "adjacency must be replace_one or zero_out for phases on parts that are cut by"
                " position (got add_remove)"
            )
        task = _Task(
            problem=problem,
            n=n,
            budget=budget,
            clip=clip,
            reg=reg,
            method=method,
            max_steps=max_steps,
            min_phase=min_phase,
            sampling=sampling,
            dim=dimension(dim),
            distance=distance,
        )
        if phases is None:
            phases = task.phases()
        else:
            task.require_none_chosen(phases)
        design = parts_of(phases, n)
        return LocalizedPlan(
            budget=budget,
            adjacency=adjacency,
            design=design,
            steps=design.steps_per_epoch,
            lr=1.0,  # of the fractions that phases take
            radius=problem.radius,
            secure=secure,
            localized=phases,
        )


def split(
    pilot: Pilot, schedule: LocalizedSchedule, budget: Budget, dim: int
) -> LocalizedSchedule:
    """Returns the schedule with a group taken out of each phase that is large enough, which is its pilot.

    Args:
        pilot: of each phase.
        schedule: of the run without pilots.
        budget: of the run.
        dim: number of parameters.

    Raises:
        InfeasibleError: not even the first phase is large enough.
    """
    phases: list[LocalizedPhase] = []
    for phase in schedule.phases:
        # the choice of the phase before will do
        if phases and phase.n < 2 * (pilot.size or LEAST_PILOT):
            phases.append(phase)
            continue
        size = pilot.records(phase.n)
        left = phase.n - size
        if left < 1:
            raise InfeasibleError(
                f"Pilot(size={size}) must leave records in phase {phase.index}, which has"
                f" {phase.n}: give a smaller size, or a larger min_phase"
            )
        rate = (
            exchange_rate_phase(left, dim, schedule.rho, budget.adjacency)
            if schedule.rho
            else 0.0
        )
        batch = max(1, phase.batch_size * left // phase.n)
        noise = phase.noise_multiplier
        if phase.batch_size < phase.n:
            # PRIVACY: the sampling rate is another one (test_pilots_of_phases_keep_the_budget)
            noise = noise_for(budget, Poisson(batch, left), phase.steps)
        std = noise * phase.clip / batch
        own = pilot.plan(phase.n, budget, rate)
        phases.append(replace(phase, n=left, batch_size=batch, noise_std=std, pilot=own))
    return replace(schedule, phases=tuple(phases))
