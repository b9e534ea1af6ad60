"""LocalizedSGD and its plans: phases on separate records, each around the answer of the phase before.

LocalizedSGD: phases of regularized subgradient steps, each on records of its own, around the answer before.

    phase i, center c, n_i records:   w <- Proj( w - f_k ( mean / lambda_i + (w - c) ) ),   c <- last w

Multi-pass within a phase (all its records, or a minibatch of them, in each step), one pass over phases: a record is in
one phase only, so that the run costs what the costliest phase costs. No smoothness is needed.

Differs from the paper (Lowy and Razaviyayn 2023, Algorithms 3 and 4) in: 1. schedules with proved constants, without
balls around the centers by default; 2. the number of steps is not tied to lambda; 3. several copies of a phase, of
which the most central answer is taken (beyond the paper); 4. minibatches are accounted numerically, not by the hidden
constants of the moments accountant; 5. the strongly convex reduction in its proved form.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch_dpsco import _validate as check
from torch_dpsco.accounting.budgets import Budget
from torch_dpsco.accounting.designs import Assigned, Fixed, Full, Parts, Poisson
from torch_dpsco.accounting.events import ADD_REMOVE, REPLACE_ONE, Adjacency
from torch_dpsco.algorithms.heavy_plan import scale_of, zcdp_of
from torch_dpsco.algorithms.localized_numbers import (
    LocalizedPhase,
    LocalizedSchedule,
    PhaseTask,
    boosted_localized_schedule,
    halved_sizes,
    localized_schedule,
    localized_schedule_ballfree,
    localized_schedule_minibatch,
    minibatch_size,
    reduction_schedule,
)
from torch_dpsco.algorithms.pilot import Minibatches, Pilot, PilotPlan, minibatches
from torch_dpsco.algorithms.pilot_oracle import PilotClipped, QuantilePilot
from torch_dpsco.errors import AdjacencyError, ConditionError, MissingConstantError
from torch_dpsco.problem import Phase, Problem, Schedule
from torch_dpsco.prox import Ball, Identity, Prox
from torch_dpsco.rules import Anchored, UpdateRule
from torch_dpsco.step import checks
from torch_dpsco.step.chooser import agreed, dimension, noise_for, release_noise
from torch_dpsco.step.oracle import Clipped, MeanOracle
from torch_dpsco.step.phased import Phased
from torch_dpsco.step.planned import LABELS, PlannedOptimizer, StepPlan, costs

METHODS = ("localized", "ball", "boosted", "reduction")
_UNPROMISED = 4.0  # moment order where clip and reg replace all promises: any will do


@dataclass(frozen=True, kw_only=True)
class LocalizedPlan(StepPlan):
    """Public numbers of a run of LocalizedSGD.

    Args:
        localized: the phases, with their clips, noises and regularizers.
        pilots: group of each phase that chooses its clip, a step of its own before the phase; None for none. Later
            phases keep the last choice.
    """

    localized: LocalizedSchedule
    pilots: tuple[PilotPlan | None, ...]

    values: ClassVar[tuple[type, ...]] = (LocalizedPhase, LocalizedSchedule, PilotPlan)

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.pilots) != len(self.localized.phases):
            raise ValueError(
                f"pilots must be one per phase, {len(self.localized.phases)} (got"
                f" {len(self.pilots)})"
            )

    @property
    def risk_bound(self) -> float | None:
        """On the expected excess risk; None where clip or reg were chosen by hand."""
        return self.localized.risk_bound

    def oracle(self, prox: Prox) -> MeanOracle:
        """Returns a new oracle with the plan's numbers; raises ValueError for a set that balls cannot be in."""
        balls = any(math.isfinite(phase.radius) for phase in self.localized.phases)
        if balls and not isinstance(prox, (Ball, Identity)):
            raise ValueError(
                f"prox must be Ball or Identity for phases with balls of their own (got {prox})"
            )
        oracles: list[tuple[MeanOracle, int]] = []
        newest: QuantilePilot | None = None
        for phase, pilot in zip(self.localized.phases, self.pilots, strict=True):
            if pilot is not None:
                newest = pilot.oracle()
                oracles.append((newest, 1))
            oracles += [(_clipped(phase, newest), phase.steps) for _ in range(phase.copies)]
        return Phased(oracles)

    def rule(self) -> UpdateRule:
        """Returns the steps around a center."""
        return Anchored()

    def schedule(self) -> Schedule:
        """Returns the phases of the run, with those of the pilots."""
        phases: list[Phase] = []
        for phase, pilot in zip(self.localized.phases, self.pilots, strict=True):
            phases += [] if pilot is None else [Phase(1)]
            phases += [
                Phase(
                    phase.steps, phase.lr, phase.reg, phase.radius, copy=copy, copies=phase.copies
                )
                for copy in range(phase.copies)
            ]
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
        for phase, pilot in zip(self.localized.phases, self.pilots, strict=True):
            if pilot is not None:
                yield "pilot", str(pilot)
            copies = (
                ""
                if phase.copies == 1
                else f"{phase.copies} times, of which the most central answer is kept: "
            )
            clip = f"the clip ({phase.clip:.3g})" if not any(self.pilots) else "the clip"
            yield (
                f"phase {phase.index}",
                (
                    f"{copies}{phase.steps} steps on {phase.batch_size} of {phase.n} {self.unit}s,"
                    f" lambda {phase.reg:.3g}, noise of std"
                    f" {phase.noise_multiplier / phase.batch_size:.2g} of {clip}"
                ),
            )
        yield LABELS
        yield from costs(self.oracle(self.prox()), self.design, self.adjacency, self.secure)
        yield (
            "assumed",
            "rows do not depend on other records; nothing about moments, since rows are clipped",
        )
        if self.risk_bound is not None:
            yield (
                "expected",
                f"excess risk of the answer at most {self.risk_bound:.3g}, if the promises hold",
            )


def parts_of(
    localized: LocalizedSchedule,
    pilots: tuple[PilotPlan | None, ...],
    n: int,
    kind: type[Minibatches],
) -> Parts:
    """Returns the design of the phases, minibatches in them being of a kind."""
    parts: list[tuple[Full | Minibatches, int]] = []
    for phase, pilot in zip(localized.phases, pilots, strict=True):
        parts += [] if pilot is None else [(Full(pilot.size), 1)]
        design: Full | Minibatches = Full(phase.n)
        if phase.batch_size != phase.n:
            design, steps = minibatches(kind, phase.batch_size, phase.n, phase.steps)
            if steps != phase.steps or design.batch_size != phase.batch_size:
                raise ValueError(
                    f"steps of phase {phase.index} must be whole passes, of"
                    f" {math.ceil(phase.n / phase.batch_size)} steps each, for sampling='allocated'"
                    f" (got {phase.steps})"
                )
        parts += [(design, phase.steps)] * phase.copies
    return Parts(tuple(parts), n)


def _clipped(phase: LocalizedPhase, pilot: QuantilePilot | None) -> Clipped | PilotClipped:
    if pilot is not None:
        return PilotClipped(pilot, phase.noise_multiplier, phase.batch_size)
    return Clipped(phase.clip, phase.noise_multiplier, phase.batch_size)


@dataclass(frozen=True, kw_only=True)
class _Task:
    """What phases are asked for; the fields are arguments of `LocalizedSGD.plan`."""

    problem: Problem
    n: int
    budget: Budget | None
    clip: float | Pilot | None
    reg: float | None
    method: str | None
    copies: int
    max_steps: int | None
    min_phase: int
    sampling: str
    dim: int | None
    distance: float | None
    allow_infinite_variance: bool

    @property
    def kind(self) -> type[Minibatches]:
        """How minibatches are drawn."""
        return _SAMPLING[check.choice(_SAMPLING, sampling=self.sampling)]

    def none_chosen(self, phases: LocalizedSchedule) -> tuple[None, ...]:
        """Returns no pilots for phases that are given; raises ValueError for what only a choice of them takes."""
        unset = ("clip", "reg", "method", "dim", "distance")
        names = [name for name in unset if getattr(self, name) is not None]
        defaults = ("copies", 1), ("max_steps", _MAX_STEPS), ("min_phase", 1)
        changed = any(getattr(self, name) != value for name, value in defaults)
        if changed or self.allow_infinite_variance:
            names.append("copies, max_steps, min_phase and allow_infinite_variance")
        if names:
            raise ValueError(
                f"{', '.join(names)} must not be given beside phases, which are chosen (got"
                f" {phases})"
            )
        return (None,) * len(phases.phases)

    def phases(self) -> tuple[LocalizedSchedule, tuple[PilotPlan | None, ...]]:
        """Returns the phases that are chosen for the budget, and the pilots of each."""
        budget = self.budget
        dim = self.dim
        if budget is None or dim is None:
            check.required(
                " for phases to be chosen, or phases= of your own", budget=budget, dim=dim
            )
        if budget.mode != "planned":
            raise ValueError(
                f"budget must be of mode 'planned', to be spent by a plan (got {budget.mode!r})"
            )
        if self.distance is not None:
            check.positive(distance=self.distance)
        phases = self._chosen(budget)
        shares = [p.noise_multiplier / p.batch_size / math.sqrt(p.steps) for p in phases.phases]
        best = "its best phase, in units of the clip,"
        checks.warn_if_buried(min(shares), n=self.n, dim=dim, epsilon=budget.epsilon, of=best)
        if isinstance(self.clip, Pilot):
            return self.clip.split(phases, budget, dim, self.kind)
        return phases, (None,) * len(phases.phases)

    def _chosen(self, budget: Budget) -> LocalizedSchedule:
        check.positive_count(n=self.n)
        promised = self._promises()
        order = promised["moment_order"]
        method = self._method(order)
        moment = promised["moment"]
        task = PhaseTask(
            n=self.n,
            dim=self.dim or 1,
            rho=zcdp_of(release_noise(budget), budget.adjacency),
            moment_order=order if method == "boosted" else order / 2.0,
            second_moment=promised["second_moment"],
            diameter=promised["diameter"],
            max_steps=self.max_steps,
            reg=self.reg,
            adjacency=budget.adjacency,
            allow_infinite_variance=self.allow_infinite_variance,
        )
        if method == "boosted":
            phases = boosted_localized_schedule(
                task, moment=moment, copies=self.copies, ball=False
            )
        else:
            phases = self._localized(method, task, moment)
            if self.sampling != "full":
                phases = self._in_minibatches(phases, task, moment, budget)
        if self.clip is None:
            return phases
        # noise in units of the clip: privacy stays as it is
        return phases.clipped_at(1.0 if isinstance(self.clip, Pilot) else self.clip)

    def _localized(self, method: str, task: PhaseTask, moment: float) -> LocalizedSchedule:
        """Returns the phases of a method without groups."""
        if method == "ball":
            return localized_schedule(task, moment_2k=moment, min_phase=self.min_phase)
        if method == "localized":
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
        """Returns phases of as many steps, or as many whole passes, each on a minibatch of its records."""
        drawn: list[tuple[Full | Minibatches, int]] = []
        for size, phase in zip(halved_sizes(self.n, self.min_phase), full.phases, strict=True):
            batch = minibatch_size(size, check.positive(rho=task.rho), phase.steps)
            if self.kind is Assigned and batch == 1:
                batch = size  # more than the rate asks for: passes would cost what all records do
            if batch == size:
                drawn.append((Full(size), phase.steps))
            else:
                drawn.append(minibatches(self.kind, batch, size, phase.steps))
        phases = localized_schedule_minibatch(
            replace(task, rho=None, adjacency=REPLACE_ONE),
            batch_sizes=[design.batch_size for design, _ in drawn],
            steps=[steps for _, steps in drawn],
            noise_multipliers=[noise_for(budget, design, steps) for design, steps in drawn],
            moment_2k=moment,
            min_phase=self.min_phase,
        )
        # the theorem is of batches that do not depend on those before
        return phases.without_bound() if self.kind is Assigned else phases

    def _method(self, order: float) -> str:
        """Returns the method, that of the moments where none is given."""
        copies = check.positive_count(copies=self.copies)
        method = self.method
        if method is None:
            method = "boosted" if copies > 1 or order < 4 else "localized"
        check.choice(METHODS, method=method)
        check.positive_count(min_phase=self.min_phase)
        if copies > 1 and method != "boosted":
            raise ValueError(
                f"copies must be 1 for method {method!r} (got {copies}): only 'boosted' has several"
            )
        if self.sampling != "full" and method != "localized":
            raise ValueError(
                f"sampling must be 'full' for method {method!r} (got {self.sampling!r})"
            )
        if method != "boosted" and order < 4 and not self.allow_infinite_variance:
            raise ConditionError(
                f"moment_order must be >= 4 for method {method!r}, which needs twice the moments"
                f" that its bound is about (got {order:g}): use method='boosted'"
            )
        return method

    def _promises(self) -> dict[str, float]:
        """Returns what the theorems take as promised; anything where clip and reg replace it."""
        if self.clip is not None and self.reg is not None:
            names = ("moment", "second_moment", "diameter")
            return {"moment_order": _UNPROMISED} | dict.fromkeys(names, 1.0)
        problem = self.problem
        if problem.moment is None or problem.moment_order is None:
            raise MissingConstantError(
                "LocalizedSGD needs Problem(moment=..., moment_order=...) of the largest gradient"
                " norm over w; or give both clip= (a number, or dp.Pilot()) and reg="
            )
        return {
            "moment_order": problem.moment_order,
            "moment": problem.moment,
            "second_moment": problem.second_moment or problem.moment,
            "diameter": scale_of(problem, self.distance, "LocalizedSGD"),
        }


_SAMPLING: dict[str, type[Minibatches]] = {
    "full": Poisson,
    "poisson": Poisson,
    "fixed": Fixed,
    "allocated": Assigned,
}
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
        budget: Budget | None = None,
        phases: LocalizedSchedule | None = None,
        clip: float | Pilot | None = None,
        reg: float | None = None,
        method: str | None = None,
        copies: int = 1,
        max_steps: int | None = _MAX_STEPS,
        min_phase: int = 1,
        sampling: str = "full",
        adjacency: Adjacency | None = None,
        dim: Any = None,
        distance: float | None = None,
        allow_infinite_variance: bool = False,
        secure: str | None = None,
    ) -> LocalizedPlan:
        """Returns the phases of a run, before anything is spent.

        Args:
            problem: promises about the supremum over w of the gradient norm: moment of moment_order, second_moment.
                Not needed where both clip and reg are given, or phases.
            n: public number of records; at least those of all phases, which take them from one random permutation.
            budget: what the run may spend; replace_one or zero_out. The phases are chosen for it unless they are given.
            phases: of your own, from `algorithms.localized_numbers`, with their noise: in place of what follows but
                sampling.
            clip: clip of all phases, chosen without looking at the data; default by theory. With a `Pilot` each phase
                that is large enough gives a group of its records to choose the clip at its center; smaller ones keep
                the last choice.
            reg: lambda of the first phase, chosen without looking at the data; default by theory, which is sized for
                the worst case and moves little at moderate n. Without the default there is no risk bound.
            method: "localized" (default if moment_order >= 4, or none is promised), "ball" (with balls around the
                centers), "boosted" (default below 4; `copies` groups per phase), "reduction" (strongly convex losses:
                localized runs around each other).
            copies: groups per phase, method "boosted".
            max_steps: cap on the steps of a phase; the theorem wants up to n^2 rho / (2 dim). None for no cap.
            min_phase: phases of fewer records join the one before.
            sampling: "full" (all records of the phase in each step); "poisson", "fixed" or "allocated" (minibatches,
                method "localized" only). With "allocated" each record is in one secretly drawn batch of each pass over
                its phase; there is no risk bound, and small phases take all records in each step.
            adjacency: default the budget's, or "zero_out".
            dim: number of parameters, or the model; needed where the phases are chosen.
            distance: bound on |w_0 - w*|; default the diameter of the problem's ball.
            allow_infinite_variance: admits moment orders below 2.
            secure: "exact" for noise in integers on a public grid, see docs/performance.md for its cost.

        Raises:
            MissingConstantError: promises are missing; says which, and how to do without.
            AdjacencyError: add_remove, where parts that are cut by position have no bound.
            ValueError: an argument is out of range.
        """
        problem = problem or Problem()
        budget, adjacency = agreed(budget, adjacency)
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
            copies=copies,
            max_steps=max_steps,
            min_phase=min_phase,
            sampling=sampling,
            dim=dimension(dim),
            distance=distance,
            allow_infinite_variance=allow_infinite_variance,
        )
        kind = task.kind
        if phases is None:
            phases, pilots = task.phases()
        else:
            pilots = task.none_chosen(phases)
        design = parts_of(phases, pilots, n, kind)
        return LocalizedPlan(
            budget=budget,
            adjacency=adjacency,
            design=design,
            steps=design.steps_per_epoch,
            lr=1.0,  # of the fractions that phases take
            radius=problem.radius,
            secure=secure,
            localized=phases,
            pilots=pilots,
        )
