"""What the plans of optimizers with private steps have in common, and how an optimizer is made from a plan."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from torch_dpsco import _validate as check
from torch_dpsco._validate import shown
from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.accounting.analysis.rounding import asks_exact
from torch_dpsco.accounting.budgets import Budget, warn_of_delta
from torch_dpsco.accounting.designs import (
    Assigned,
    Design,
    Disjoint,
    Full,
    Parts,
    Poisson,
    Shuffled,
    Undeclared,
)
from torch_dpsco.accounting.events import ADD_REMOVE, Event
from torch_dpsco.errors import ConditionError, outside
from torch_dpsco.problem import Phase, Schedule
from torch_dpsco.prox import Ball, Identity, Prox
from torch_dpsco.rules import AVERAGES, SGD, Momentum, TorchRule, UpdateRule
from torch_dpsco.sampling.loader import capacity
from torch_dpsco.step import checks
from torch_dpsco.step.chooser import noise_for, release_noise
from torch_dpsco.step.oracle import ClippedMean, MeanOracle
from torch_dpsco.step.plan import Plan, exact_cost, passes
from torch_dpsco.step.run import first_charges, planned_event, sizes_are_private
from torch_dpsco.step.step import PrivateOptimizer

_ABOUT = 1e-2  # relative accuracy of a number that is only shown
_STAGES = 10  # points of a curve over steps


@dataclass(frozen=True, kw_only=True)
class BatchPlan(Plan):
    """Public numbers of a run in batches.

    Args:
        design: how batches are drawn.
        average: which iterates are the answer: "last", "uniform" or "weighted".
        secure: "exact" for noise in integers on a public grid; None for floating point.
    """

    design: Design
    average: str = "last"
    secure: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.design, Undeclared):
            warn_of_delta(self.budget, self.n, stacklevel=outside())
        asks_exact(self.secure)  # raises for other words
        check.choice(AVERAGES, average=self.average)

    @property
    def n(self) -> int:
        """Public number of records (or users); a reference under add_remove."""
        return self.design.n

    @property
    def batch_size(self) -> int:
        """Public divisor of a step."""
        return self.design.batch_size


@dataclass(frozen=True, kw_only=True)
class StepPlan(BatchPlan):
    """Public numbers of a run of private steps, whose average is taken where no rule is given.

    Args:
        steps: number of steps; None for no limit but the budget.
        lr: step size, > 0.
        radius: of the ball that the iterates stay in; inf for none.
        reg: lambda of a term (lambda/2)|w|^2 that the other numbers count on.
        momentum: in [0, 1), see `rules.Momentum`; of the rule that is taken where none is given.
    """

    steps: int | None
    lr: float
    radius: float = math.inf
    reg: float = 0.0
    momentum: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check.positive(lr=self.lr)
        check.positive(radius=self.radius, allow_inf=True)
        check.nonnegative(reg=self.reg)
        check.below_one(momentum=self.momentum)
        if self.steps is not None:
            check.positive_count(steps=self.steps)

    @abstractmethod
    def oracle(self, prox: Prox) -> MeanOracle:
        """Returns a new oracle with the plan's numbers, for iterates that stay in the feasible set."""

    def rule(self) -> UpdateRule:
        """Returns the update rule that is taken where none is given."""
        return Momentum(self.average, self.momentum) if self.momentum else SGD(self.average)

    def prox(self) -> Prox:
        """Returns the constraint that is taken where none is given."""
        return Ball(self.radius) if math.isfinite(self.radius) else Identity()

    def schedule(self) -> Schedule:
        """Returns the phases of the run."""
        return Schedule((Phase(self.steps),))

    def event(self) -> Event:
        """Returns everything that the run charges, as `Plan.event`."""
        return self._event_until(self.steps)

    def stages(self) -> Iterator[tuple[int, Event]]:
        """Yields what a part of the steps charges; see `Plan.stages`."""
        if self.steps is None:
            self.event()  # raises
            return
        for made in sorted(
            {math.ceil(self.steps * k / _STAGES) for k in range(1, _STAGES + 1)} | {1}
        ):
            yield made, self._event_until(made)

    def noise_shares(self) -> Iterator[tuple[str, float, int | None]]:
        """Yields the noise on means of clipped rows, phase by phase; see `Plan.noise_shares`."""
        members = [
            member
            for member in self.oracle(self.prox()).members
            if isinstance(member, ClippedMean)
        ]
        for k, member in enumerate(members, 1):
            yield (
                "each step" if len(members) == 1 else f"phase {k}",
                member.noise_multiplier / member.batch_size,
                None,
            )

    def _event_until(self, steps: int | None) -> Event:
        oracle = self.oracle(self.prox())
        checks.require_same_parts(oracle, self.design, self.schedule())
        if asks_exact(self.secure):
            oracle.use_exact_noise()
        if any(charge.adaptive for charge in first_charges(oracle, self.design)):
            raise ConditionError("a step costs what the iterates before it make it cost")
        if steps is None:
            raise ConditionError("the run has no last step: give steps=")
        return planned_event(oracle, self.design, 0, steps, "planned")

    def otherwise(self) -> str:
        """Returns what other batches would cost, in words that follow those of `drawing`; see `otherwise`."""
        return ""

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yields what all such plans say; see `Plan.lines`."""
        yield "batches", drawing(self.design, self.unit) + self.otherwise()
        often = "steps until the budget is spent"
        if self.steps is not None:
            declared = not isinstance(self.design, Undeclared)
            over = (
                f", {passes(_rows(self.design, self.steps) / self.design.n)}" if declared else ""
            )
            often = f"{self.steps} steps{over}"
        pace = f"step size {self.lr:g}" + (
            f", momentum {self.momentum:.3g}" if self.momentum else ""
        )
        yield "steps", f"{often}, {pace}, answer: {ANSWERS[self.average]}"
        yield LABELS
        yield from costs(self.oracle(self.prox()), self.design, self.adjacency, self.secure)


LABELS = (
    "labels",
    "0/1, -1/1 and booleans are the same to dp.fit, dp.losses, dp.per_record (not to torch's own)",
)
ANSWERS = {
    "last": "the last iterate",
    "uniform": "the average of all iterates",
    "weighted": "an average weighted by step",
}


def costs(
    oracle: MeanOracle, design: Design, adjacency: str, secure: str | None
) -> Iterator[tuple[str, str]]:
    """Yields (label, text) of what filled batches and exact noise cost a run, where there are such.

    Args:
        oracle: a new one, whose noise is made exact.
        design: how batches are drawn.
        adjacency: of the guarantee.
        secure: whether noise is exact, as in `StepPlan`.
    """
    if sizes_are_private(design, adjacency, oracle.unit):
        units = "rows" if oracle.unit == "example" else f"places for {oracle.unit}s"
        yield (
            "filled",
            f"each draw is filled up to {capacity(design)} {units}, since its true size is private",
        )
    with suppress(ConditionError):  # there is none
        oracle.use_exact_noise()
        yield exact_cost(secure)


def noise_on_mean(share: float, bound: float, where: str = "") -> tuple[str, str]:
    """Returns (label, text) of noise whose std is a share of the bound on a mean gradient."""
    gradient = f"a mean gradient of norm at most {bound:.3g}{where}"
    return "noise", f"std {share * bound:.3g} per coordinate of {gradient}: {share:.2g} of it"


def otherwise(budget: Budget | None, design: Design, steps: int | None, noise: float) -> str:
    """Returns in words the noise multiplier that the budget asks for in other batches; "" where nothing is to be said.

    Args:
        budget: of the run; None, or one that is stated as a risk, says nothing.
        design: how batches are drawn that move the iterate.
        steps: number of steps.
        noise: noise multiplier of these batches.
    """
    if budget is None or budget.risk or steps is None or isinstance(design, (Undeclared, Full)):
        return ""
    if isinstance(design, (Shuffled, Disjoint)):
        other = "sampling='poisson'"
        needed = noise_for(budget, Poisson(design.batch_size, design.n), steps, rtol=_ABOUT)
    else:
        other = "shuffled passes" if budget.adjacency != ADD_REMOVE else "passes in known batches"
        needed = release_noise(budget) * math.sqrt(math.ceil(steps / design.batches))
    return f"; {other} would need noise {needed:.3g} in place of {noise:.3g}"


def drawing(design: Design, unit: str) -> str:
    """Returns in words how batches of a unit are drawn."""
    if isinstance(design, Undeclared):
        return (
            f"{design.batch_size} {unit}s each; how they are drawn is not declared, so that nothing"
            " is gained by it"
        )
    if isinstance(design, Parts):
        parts = "; then ".join(drawing(part, unit) for part, _ in design.parts)
        return f"{parts}; no {unit} is in two of these parts"
    if isinstance(design, Full):
        return f"all {design.n} {unit}s"
    if isinstance(design, Assigned) and design.amplification:
        batches = (
            f"one of {design.batches} batches of each pass, of {design.n / design.batches:.3g}"
            f" {unit}s on average"
        )
        return f"random allocation: each {unit} in {batches}; who is where, and true sizes, are secret"
    if isinstance(design, Assigned):
        return (
            f"each {unit} in one of {design.batches} batches, of about {design.batch_size}; nothing"
            " is gained by it"
        )
    return f"{type(design).__name__}: {design.batch_size} of {design.n} {unit}s"


def _rows(design: Design, steps: int) -> float:
    """Returns the expected rows of so many steps, of all steps in parts."""
    if isinstance(design, Parts):
        return sum(_rows(part, draws) for part, draws in design.parts)
    if isinstance(design, Assigned):  # batch_size is a divisor, about what a batch holds
        return steps * design.n / design.batches
    return steps * design.batch_size


class FromPlan:
    """Mixin of optimizers that are made from a plan: arguments from the time before plans are refused by name."""

    plans: ClassVar[type[Plan]]  # what this class runs

    @classmethod
    def _ledger(
        cls, plan: Any, moved: Mapping[str, Any], accountant: Accountant | None
    ) -> Accountant:
        """Returns the ledger of a run of this plan.

        Args:
            plan: the second argument of the class.
            moved: unknown keywords of the class.
            accountant: that was given.

        Raises:
            ValueError: there is no plan of this class, or keywords of it are given to the optimizer.
            AdjacencyError: the accountant has another budget or adjacency.
        """
        name = cls.__name__
        if moved:
            raise ValueError(
                f"{', '.join(moved)} must be given to {name}.plan(...), and its plan to the"
                f" optimizer: {name}(params, {name}.plan(...))"
            )
        if type(plan) is not cls.plans:
            raise ValueError(
                f"plan must be made by {name}.plan(...): {name}(params, {name}.plan(...)) (got"
                f" {shown(plan)})"
            )
        if accountant is None:
            return plan.ledger()
        if plan.budget is not None:
            checks.require_budget(accountant, plan.budget)
        return accountant


class PlannedOptimizer(FromPlan, PrivateOptimizer):
    """Base of the named optimizers that make private steps: a plan in, everything else follows.

    Args:
        params: parameters or groups; all of them count as one vector.
        plan: from the class's own `plan`.
        rule: another update rule, e.g. `rules.TorchRule(torch.optim.Adam(...))`; it has averages of its own.
        prox: constraint or penalty, in place of the plan's.
        reg: lambda of (lambda/2)|w|^2, see `PrivateOptimizer`; default the plan's.
        accountant: ledger to charge; default a new one with the plan's budget.
        generator: noise generator of your own (warns).
    """

    plans: ClassVar[type[StepPlan]]
    _fixed = PrivateOptimizer._fixed | {"plan"}

    def __init__(
        self,
        params: Any,
        plan: Any = None,
        *,
        rule: UpdateRule | None = None,
        prox: Prox | None = None,
        reg: float | None = None,
        accountant: Accountant | None = None,
        generator: torch.Generator | None = None,
        **moved: Any,
    ) -> None:
        accountant = self._ledger(plan, moved, accountant)
        prox = plan.prox() if prox is None else prox
        self._plan = self.__dict__["plan"] = (
            plan  # over the class method: optimizer.plan is what it has made
        )
        super().__init__(
            params,
            plan.lr,
            oracle=self._oracle(plan, prox),
            rule=plan.rule() if rule is None else rule,
            design=plan.design,
            schedule=plan.schedule(),
            prox=prox,
            reg=plan.reg if reg is None else reg,
            accountant=accountant,
            adjacency=plan.adjacency,
            generator=generator,
            secure=plan.secure,
        )
        if getattr(plan, "risk_bound", None) is None:
            return  # as for most nets: there is no theorem to void
        self._lrs = [float(group["lr"]) for group in self.param_groups]
        if isinstance(rule, TorchRule) and not rule.plain:
            checks.warn_of_void_theorem(
                f"{type(rule.optimizer).__name__} on private means is post-processing", 3
            )

    def _oracle(self, plan: StepPlan, prox: Prox) -> MeanOracle:
        """Returns the plan's oracle; classes whose oracle has tensors, which no plan holds, add them here."""
        return plan.oracle(prox)
