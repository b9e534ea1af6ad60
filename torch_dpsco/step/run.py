"""What a private run is made of, fixed before its first step, and how far it has come."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar, overload

from torch_dpsco import _validate as check
from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.accounting.budgets import warn_of_delta
from torch_dpsco.accounting.designs import Design, Parts, Poisson, Undeclared
from torch_dpsco.accounting.events import ADD_REMOVE, Adjacency, Event
from torch_dpsco.errors import PrivacyError, outside
from torch_dpsco.prox import Identity, Prox
from torch_dpsco.rules import UpdateRule
from torch_dpsco.schedule import Phase, Schedule
from torch_dpsco.step import checks
from torch_dpsco.step.oracle import MeanOracle
from torch_dpsco.step.payments import Payments, planned_event

_T = TypeVar("_T")


@dataclass(frozen=True, eq=False)
class Run:
    """The parts of a private optimizer.

    Args:
        oracle: how a logical batch becomes a private mean.
        rule: how a private mean moves the iterate.
        design: how batches are drawn.
        schedule: phases, with the planned number of steps.
        prox: constraint or penalty.
        reg: lambda of (lambda/2) |w|^2.
        adjacency: of the guarantee.
        accountant: pays.
        payments: what steps are charged.
        secure: "exact" for noise in integers on a public grid.
    """

    oracle: MeanOracle
    rule: UpdateRule
    design: Design
    schedule: Schedule
    prox: Prox
    reg: float
    adjacency: Adjacency
    accountant: Accountant
    payments: Payments
    secure: str | None

    @cached_property
    def planned(self) -> int | None:
        """Steps of the schedule; None without end."""
        return self.schedule.steps

    @cached_property
    def in_order(self) -> bool:
        """Whether the run has one partition, and step k uses its draw k."""
        return isinstance(self.design, Parts) or self.payments.in_passes

    @property
    def sizes_are_private(self) -> bool:
        """Whether nobody's row may depend on the number of rows of a draw."""
        return sizes_are_private(self.design, self.adjacency, self.oracle.unit)

    def constrains(self, phase: Phase) -> bool:
        """Returns whether steps of a phase end with a projection or penalty."""
        return phase.radius < math.inf or not isinstance(self.prox, Identity)

    def ahead(self, made: int, steps: int | None, partition: str) -> Event:
        """Returns the event of the next steps, or of all that are planned.

        Args:
            made: steps made.
            steps: how many follow; None for all that are left of the schedule.
            partition: by which the ledger knows how records are cut into batches.
        """
        if steps is None:
            steps = (self.planned or made) - made
        stop = made + check.count(steps=steps)
        paid = self.payments.paid
        start = made if paid is None else min(stop, max(made, paid.stop))
        return planned_event(self.oracle, self.design, start, stop, partition)

    def settings(self) -> dict[str, Any]:
        """Returns the public constants that fix the mechanism."""
        return {
            **self.oracle.settings(),
            "rule": self.rule.settings(),
            "design": repr(self.design),
            "schedule": repr(self.schedule),
            "prox": repr(self.prox),
            "reg": self.reg,
            "adjacency": self.adjacency,
            **({} if self.secure is None else {"secure": self.secure}),
        }


@dataclass
class Progress:
    """How far a run has come: public, and kept in checkpoints.

    Args:
        steps: made, or lost.
        halted: whether the oracle has answered for the last time in this phase.
        stills: releases of this phase that were no means.
        since: step from which the run has its name.
        public: blocks of public steps that moved the parameters.
        finalized: whether the answer is installed.
    """

    steps: int = 0
    halted: bool = False
    stills: int = 0
    since: int = 0
    public: int = 0
    finalized: bool = False


class Part(Generic[_T]):
    """An attribute of an optimizer that is a part of its run, and no assignment changes."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, optimizer: None, kind: type) -> Part[_T]: ...
    @overload
    def __get__(self, optimizer: object, kind: type) -> _T: ...
    def __get__(self, optimizer: Any, kind: type) -> Any:
        return self if optimizer is None else getattr(optimizer._run, self._name)

    def __set__(self, optimizer: Any, value: Any) -> None:
        # PRIVACY: what the accounting was told must stay true (test_what_the_ledger_relies_on_cannot_be_reassigned)
        raise PrivacyError(
            f"{self._name} is fixed at construction: make a new optimizer, with the same accountant"
        )


def make_run(  # noqa: D417 (the others are those of `PrivateOptimizer`)
    *,
    oracle: MeanOracle,
    rule: UpdateRule,
    design: Design,
    schedule: Schedule | None,
    prox: Prox | None,
    reg: float,
    accountant: Accountant | None,
    adjacency: Adjacency | None,
    secure: str | None,
    is_planned: bool,
) -> Run:
    """Returns the parts, checked against each other; see `PrivateOptimizer` for all but the last.

    Args:
        is_planned: whether a plan has warned of a large delta already.
    """
    schedule = schedule or Schedule()
    rule.check_schedule(schedule)
    adjacency = checks.agreed_adjacency(adjacency, accountant, design)
    if accountant is None:  # an empty one has length 0 and would count as false
        accountant = Accountant(adjacency=adjacency, unit=oracle.unit)
    accountant.require_unit(oracle.unit)
    if not is_planned and not isinstance(design, Undeclared):
        warn_of_delta(accountant.budget, design.n, stacklevel=outside())
    checks.require_same_parts(oracle, design, schedule)
    payments = Payments(oracle, design, accountant, schedule.steps)
    if payments.adaptive:
        accountant.require_adaptive()
    return Run(
        oracle=oracle,
        rule=rule,
        design=design,
        schedule=schedule,
        prox=prox or Identity(),
        reg=check.nonnegative(reg=reg),
        adjacency=adjacency,
        accountant=accountant,
        payments=payments,
        secure=secure,
    )


def require_room(run: Run, all_steps: Event) -> None:
    """Raises InfeasibleError if the budget is too small for one step, or for phases of which a later one costs more."""
    first = planned_event(run.oracle, run.design, 0, 1)
    checks.require_one_step(run.accountant, run.adjacency, first)
    if isinstance(run.design, Parts) and not run.payments.adaptive:
        checks.require_one_step(run.accountant, run.adjacency, all_steps, "the planned phases")


def sizes_are_private(design: Design, adjacency: str, unit: str) -> bool:
    """Returns whether nobody's row may depend on the number of rows of a draw: it is private, or tells who is in it."""
    if isinstance(design, Undeclared):
        return False
    parts = [part for part, _ in design.parts] if isinstance(design, Parts) else [design]
    # PRIVACY: neighbors may have the same sizes, but others would show by their last bits which batches a record is in
    # (test_who_is_in_a_batch_moves_nobody_else)
    by_chance = design.secret or any(isinstance(part, Poisson) for part in parts)
    return adjacency == ADD_REMOVE or unit == "user" or by_chance
