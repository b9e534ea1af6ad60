"""Planning: the part of the accountant that keeps what was planned, so that no output chooses under a planned budget.

Source: docs/proofs/accounting.md#planned-budgets.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import Any

from torch_dpsco import _validate as check
from torch_dpsco._doors import typed
from torch_dpsco.accounting.events import Event, Repeat, Sequential
from torch_dpsco.accounting.filter_base import Filter
from torch_dpsco.accounting.filter_modes import make_filter
from torch_dpsco.accounting.filters import Budget
from torch_dpsco.accounting.journal import Journal
from torch_dpsco.accounting.ledger import Ledger
from torch_dpsco.accounting.lock import locked
from torch_dpsco.accounting.plans import Plan, unit_of
from torch_dpsco.errors import BudgetExceeded, PrivacyError, SequenceError

_ADAPTIVE = "mode='rdp' or 'rdp-mixture'; full batches: 'gdp'"


class Planning:
    """A journal under a budget, and the plan that its first charge closes.

    Args:
        journal: what is charged so far.
        budget: what may be spent.
    """

    def __init__(self, journal: Journal, budget: Budget | None) -> None:
        self._journal = journal
        self._budget = budget
        self._declared: list[tuple[Event, int | None]] = []  # before the first charge
        self._reread()

    def __len__(self) -> int:
        """Number of events charged."""
        return len(self._journal.book.ledger)

    @property
    def ledger(self) -> Ledger:
        """What was charged."""
        return self._journal.book.ledger

    @property
    def _config(self) -> dict[str, Any]:
        return self._journal.book.config

    @property
    def adaptive(self) -> bool:
        """Whether some parameter was, or may be, chosen from what was released before."""
        chosen = self._config.get("adaptive") or self._config.get("mode")
        return bool(chosen) or (self._budget is not None and self._budget.adaptive)

    def _reread(self) -> None:
        """Follows a new budget or book."""
        self._closed: Plan | None = None  # the plan, as far as it is known
        # (event, budget and events charged so far), and how many more of the event are then known to fit
        self._allowance: tuple[tuple[Event, Budget, int], int] | None = None
        rule = self._budget
        if rule is not None and rule.delta > 0 and not rule.adaptive and self._config.get("mode") == "gdp":
            rule = replace(rule, mode="gdp", schedule=None)
        self._rule = rule  # the budget in the mode that it is in
        self._filter: Filter | None = None if rule is None else make_filter(rule)

    @locked
    def require_adaptive(self) -> None:
        """Signs an optimizer up whose events depend on what was released; raises PrivacyError for a planned budget."""
        if self._rule is not None and not self._rule.adaptive:
            # PRIVACY: composition of fixed parameters is no bound here (test_adaptive_noise_needs_an_adaptive_budget)
            modes = _ADAPTIVE if self._rule.delta > 0 else "mode='pure'"
            raise PrivacyError(
                f"budget must be adaptive for events that depend on what was released before (got mode "
                f"{self._rule.mode!r}): Budget(..., {modes}), or no budget, where get_epsilon is an odometer"
            )

    @typed
    @locked
    def declare(self, event: Event, steps: int | None) -> None:
        """Says before the first release what will be charged under a planned budget, as optimizers do when built.

        With one kind of event nothing need be declared: it may be charged while the budget lasts. Of several plans all
        but one need a number of steps, and all must fit the budget together. A budget with a schedule takes the steps
        into it. Without a planned budget nothing is promised, and nothing kept.

        Args:
            event: of a step, or of a run.
            steps: how often, >= 0; None for as long as the budget lasts.

        Raises:
            SequenceError: something was released already (for a budget with a schedule).
            PrivacyError: something was released already, and the event was not planned then.
            BudgetExceeded: the schedule would pass the budget.
        """
        budget = self._budget
        if budget is not None and budget.mode == "planned" and budget.schedule is not None:
            if len(self):
                raise SequenceError(f"steps must be declared before the first event ({len(self)} were charged)")
            declaring = budget.declaring(event, check.count(steps=steps))
            make_filter(declaring)  # may raise
            self._budget = declaring
            self._reread()
        else:
            self.expect(event, steps)

    @locked
    def expect(self, event: Event, steps: int | None) -> None:
        """Declares what an optimizer plans; a budget with a schedule, which its owner has written, stays as it is."""
        if not self._journal.interrupted:  # it may resume a run that was planned; each charge is checked again
            self.require_planned(event)
        self._declared.append((event, steps if steps is None else check.count(steps=steps)))

    @locked
    def require_planned(self, event: Event) -> None:
        """Raises PrivacyError if the budget is planned, something was released, and the event was not planned then."""
        if not self._keeps_plan or not len(self):
            return
        if not self._plan().names(event) and not self._gaussian(event):
            # PRIVACY: what was released may have chosen it (test_an_event_chosen_by_the_last_output_passes_the_target)
            raise PrivacyError(
                f"event must be planned before the first release (got {event}, after {len(self)} events of another "
                f"plan): under mode 'planned' no output may choose what comes next. Build all optimizers of the "
                f"accountant, or call accountant.declare(event, steps), before anything is released; or take "
                f"Budget(..., {_ADAPTIVE}), or no budget"
            )

    @property
    def _keeps_plan(self) -> bool:
        """Whether events must be planned; at delta = 0 the sum holds for events chosen on the way too."""
        rule = self._rule
        return rule is not None and rule.mode == "planned" and rule.schedule is None and rule.delta > 0

    def _plan(self) -> Plan:
        """Returns the plan that the first charge closed."""
        if self._closed is None:
            row = self._config.get("plan")
            self._closed = Plan.of(self.ledger) if row is None else Plan.from_row(row)
        return self._closed

    def _is_planned(self, event: Event, count: int) -> bool:
        """Returns whether the event, and all that is planned besides, fits the budget; before a charge anything may."""
        if not self._keeps_plan or not len(self):
            return True
        assert self._rule is not None
        plan = self._plan()
        if plan.is_plain:
            return plan.names(event)
        reserved = plan.reserved(self.ledger, event, count)
        return reserved is not None and _fit_together(self._rule, reserved)

    def _deciding(self, event: Event, count: int) -> Filter:
        """Returns the filter that decides about an event: of what was not planned, that of mode "gdp", or none."""
        assert self._rule is not None
        assert self._filter is not None
        if self._is_planned(event, count):
            return self._filter
        mode: dict[str, Any] = {"mode": "gdp"} if self._gaussian(event) else {"schedule": ()}
        return make_filter(replace(self._rule, **mode))

    @contextmanager
    def _planning(self, event: Event, count: int, planned: int, *, refuse: bool) -> Iterator[None]:
        """Closes the plan for the first charge, which is inside; later refuses, or notes, what was not planned."""
        if not self._keeps_plan or not count:
            yield
            return
        assert self._rule is not None
        if len(self):
            if refuse:
                self._adapt(event, count)
            elif (plan := self._plan()).reserved(self.ledger, event, count) is None:
                self._close(Plan((*plan.fixed, Repeat(event, count)), plan.open))
            yield
            return
        try:
            plan = Plan.closing(self._declared, event, max(count, planned))
            if refuse:
                self._require_room_for(plan)
            self._close(plan)
            yield
        finally:
            if not len(self):
                self._config.pop("plan", None)
                self._closed = None

    def _require_room_for(self, plan: Plan) -> None:
        assert self._rule is not None
        several = list(dict.fromkeys(unit_of(event) for event, steps in self._declared if steps is None))
        if len(several) > 1:
            raise SequenceError(
                f"steps must be given for all but one of several plans on one budget (without: "
                f"{', '.join(map(str, several))})"
            )
        if plan.fixed and not _fit_together(self._rule, Sequential(plan.fixed)):
            raise BudgetExceeded(
                f"the {len(plan.fixed)} plans declared on this accountant would together pass the budget of "
                f"epsilon={self._rule.epsilon:g} at delta={self._rule.delta:g}; declare fewer steps, or make a new "
                f"accountant if some of them are not wanted"
            )

    def _close(self, plan: Plan) -> None:
        self._closed = plan
        if not plan.is_plain:  # else the ledger tells it
            self._config["plan"] = plan.to_row()

    def _adapt(self, event: Event, count: int) -> None:
        """Turns a budget of unsampled Gaussian noise to mode "gdp" for an event that was not planned, or refuses it."""
        if self._is_planned(event, count):
            return
        self.require_planned(event)
        if self._gaussian(event):
            run = self._deciding(event, count)
            if not run.admits(self.ledger, event, count):
                raise BudgetExceeded(run.refusal(self.ledger, event, count))
            self._config["mode"] = "gdp"
            self._reread()

    def _gaussian(self, event: Event) -> bool:
        """Returns whether the event, and all that is planned, is unsampled Gaussian noise.

        Then every path is a sum of mu^2 within the same number, for which the filter "gdp" costs nothing.
        """
        assert self._rule is not None
        plan = self._plan()
        cost = Ledger((*plan.fixed, *(e for e in (plan.open, event) if e is not None))).cost(self._rule.adjacency)
        return cost.mu_squared is not None and not (cost.failure or cost.transcript or cost.per_side)


@lru_cache(maxsize=256)
def _fit_together(budget: Budget, events: Event) -> bool:
    return make_filter(budget).holds(Ledger([events]))
