"""Planned budgets: what a run will charge, declared before its first release and then enforced.

Composition theorems for fixed parameters hold for events that no output has chosen. What was planned, which `Limit`
keeps for the accountant, is therefore closed by the first charge. What is planned is a multiset of events,
and at most one event more that may be repeated as often as the budget admits.

Guarantee: let M be the fixed events with k repetitions of the open one, k the largest number for which M is within
(epsilon, delta). Every run charges a part of M, in an order and up to a stop that may depend on what was released. By
the induction below its divergence is at most that of all of M. Where records are cut into
parts, fix the pair, and with it the part of each partition in which the two data sets differ. A partition is matched to
a planned one by its first event, once and for all, and its parts by their names, so that no output chooses which part
of M the record meets. A partition that is not planned counts as its largest part, event by event, for all records.

The induction: let V(M) be the largest hockey stick of any rule that runs the events M, each once, in an order of its
choice. Whatever x is first, the rest is a rule for M - x given the output of x, so that V(M) is at most that of x
composed with the dominating pairs of M - x: by induction, of all of M, in which the order does not matter. An event
left out is post-processing of one that was run and ignored.

Source: docs/proofs/accounting.md#planned-budgets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeAlias, cast

from torch_dpsco import _validate as check
from torch_dpsco.accounting.budgets import Budget, Filter, make_filter
from torch_dpsco.accounting.calibrate import MOST, largest
from torch_dpsco.accounting.events import (
    Event,
    Parallel,
    Repeat,
    Sequential,
    SimpleEvent,
    event_from_json,
    event_to_json,
)
from torch_dpsco.accounting.journal import Journal
from torch_dpsco.accounting.ledger import Ledger
from torch_dpsco.errors import BudgetExceeded, PrivacyError, SequenceError

_Counts: TypeAlias = dict[SimpleEvent, int]
_Parts: TypeAlias = dict[str, _Counts]  # what the parts of a partition hold


@dataclass(frozen=True)
class PlannedEvents:
    """What may be charged.

    Args:
        fixed: events, each as often as it stands here.
        open: event that may be repeated; None for none.
    """

    fixed: tuple[Event, ...] = ()
    open: Event | None = None

    @classmethod
    def closing(
        cls, declared: Iterable[tuple[Event, int | None]], first: Event, count: int
    ) -> PlannedEvents:
        """Returns the plan of a run that was declared, as (event, steps or None), and begins with an event."""
        finite = [Repeat(event, steps) for event, steps in declared if steps is not None]
        repeated = list(
            dict.fromkeys(unit_of(event) for event, steps in declared if steps is None)
        )
        if not declared:
            return cls(open=unit_of(first))
        plan = cls(tuple(finite), repeated[0] if repeated else None)
        if plan.reserved(Ledger(), first, count) is None:  # not planned, or not so much of it
            others = (event for event in plan.fixed if not cls((event,)).names(first))
            plan = cls((*others, Repeat(first, count)), plan.open)
        units = {unit_of(event) for event in (*plan.fixed, *repeated)}
        if len(units) == 1:
            return cls(open=units.pop())
        # PRIVACY: a record is in one part of each partition, not of all together
        # (test_partitions_of_two_plans_are_not_taken_for_one)
        return cls(
            tuple(_renamed(event, f"plan {k}") for k, event in enumerate(plan.fixed)), plan.open
        )

    @classmethod
    def of(cls, ledger: Ledger) -> PlannedEvents:
        """Returns the plan of a ledger that came without one: more of its only event, or nothing more."""
        if len(ledger.distinct) == 1:
            return cls(open=next(iter(ledger.distinct)))
        return cls(tuple(event_from_json(row) for row in ledger.to_json()))

    @property
    def once(self) -> tuple[Event, ...]:
        """The open event, if there is one."""
        return () if self.open is None else (self.open,)

    @property
    def is_plain(self) -> bool:
        """Whether it is one simple event, repeated: then the ledger says all."""
        return not self.fixed and isinstance(self.open, SimpleEvent)

    def names(self, event: Event) -> bool:
        """Returns whether the event is planned, whatever is left of it."""
        return self._repetitions(Ledger([event])) is not None

    def reserved(self, ledger: Ledger, event: Event, count: int) -> Event | None:
        """Returns all that must fit the budget for the event to be charged; None if it is not planned, or used up."""
        times = self._repetitions(ledger, event, count)
        if times is None:
            return None
        if self.open is None or isinstance(self.open, SimpleEvent):
            return Sequential((*self.fixed, *(Repeat(event, times) for event in self.once)))
        return Sequential(
            (*self.fixed, *(_renamed(self.open, f"repetition {k}") for k in range(times)))
        )

    def _repetitions(
        self, ledger: Ledger, event: Event | None = None, count: int = 1
    ) -> int | None:
        """Returns how often the open event must be repeated to cover a ledger with the event; None if none will do."""
        fixed, slots = _shape(Ledger(self.fixed))
        once, more = _shape(Ledger(self.once))
        asked, partitions = _shape(ledger, event, count)
        uses = [0.0] * len(more)
        for parts in partitions:
            first = next(iter(next(iter(parts.values()))))
            slot = next((slot for slot in slots if _has(slot, first)), None)
            place = next((k for k, other in enumerate(more) if _has(other, first)), None)
            if slot is not None:
                slots.remove(slot)
                if _copies(parts, slot) > 1:
                    return None
            elif place is not None:
                uses[place] += _copies(parts, more[place])
            else:
                for kind in {kind for held in parts.values() for kind in held}:
                    asked[kind] = asked.get(kind, 0) + max(
                        held.get(kind, 0) for held in parts.values()
                    )
        excess = {
            kind: times - fixed.get(kind, 0)
            for kind, times in asked.items()
            if times > fixed.get(kind, 0)
        }
        rates = [
            times / once[kind] if kind in once else math.inf for kind, times in excess.items()
        ]
        needed = max([*uses, *rates], default=0.0)
        return None if needed == math.inf else math.ceil(needed)

    def to_row(self) -> dict[str, Any]:
        """Returns the plan as primitives."""
        return event_to_json(Sequential((Sequential(self.fixed), *self.once)))

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> PlannedEvents:
        """Builds a plan from primitives."""
        fixed, *once = cast(Sequential, event_from_json(row)).events
        return cls(cast(Sequential, fixed).events, *once)


def unit_of(event: Event) -> Event:
    """Returns the simple event that an event repeats, wherever it is charged; the event itself if it has several."""
    kinds = Ledger([event]).distinct
    return next(iter(kinds)) if len(kinds) == 1 else event


def _shape(
    ledger: Ledger, event: Event | None = None, count: int = 1
) -> tuple[_Counts, list[_Parts]]:
    """Returns what all records meet, and what the parts of each partition hold, in the order of their first events."""
    partitions: dict[str, _Parts] = {}
    counts = ledger.counts(event, count)
    for (partition, part), events in counts.items():
        if partition:
            partitions.setdefault(partition, {})[part] = events
    return dict(counts.get(("", ""), {})), list(partitions.values())


def _has(slot: _Parts, event: SimpleEvent) -> bool:
    return any(event in held for held in slot.values())


def _room(slot: _Parts, part: str) -> _Counts:
    """Returns what a part may hold: that of its name ("2/7" is a batch within "2"), or of the only one."""
    only = next(iter(slot.values())) if len(slot) == 1 else {}
    return slot.get(part.partition("/")[0], only)


def _copies(parts: _Parts, slot: _Parts) -> float:
    """Returns how many copies of a planned partition hold what the parts hold; inf if none do."""
    rooms = [(held, _room(slot, name)) for name, held in parts.items()]
    return max(
        math.ceil(times / room[event]) if event in room else math.inf
        for held, room in rooms
        for event, times in held.items()
    )


def _renamed(event: Event, tag: str) -> Event:
    """Returns the event with partitions of its own."""
    if isinstance(event, Repeat):
        return Repeat(_renamed(event.event, tag), event.n)
    if isinstance(event, Sequential):
        return Sequential(tuple(_renamed(inner, tag) for inner in event.events))
    return (
        replace(event, partition=f"{event.partition} of {tag}")
        if isinstance(event, Parallel)
        else event
    )


_ADAPTIVE = "mode='rdp'; full batches: 'gdp'"


class Limit:
    """A budget over a journal: the plan that the first charge closes, and whether an event still fits.

    Args:
        journal: what is charged so far.
        budget: what may be spent; None is no limit.
    """

    def __init__(self, journal: Journal, budget: Budget | None) -> None:
        self._journal = journal
        self.budget = budget
        self._declared: list[tuple[Event, int | None]] = []  # before the first charge
        self.reread()

    @property
    def _ledger(self) -> Ledger:
        return self._journal.book.ledger

    @property
    def _config(self) -> dict[str, Any]:
        return self._journal.book.config

    @property
    def _ended(self) -> bool:
        """Whether parameters were adapted under a planned budget, which then authorizes nothing more."""
        return bool(self._config.get("adaptive")) and self._is_planned_only

    @property
    def _is_planned_only(self) -> bool:
        """Whether the budget takes no event that was chosen on the way; at delta = 0 sums hold for these too."""
        return self.rule is not None and not self.rule.adaptive and self.rule.delta > 0

    def reread(self) -> None:
        """Follows a new budget or book, whose adjacency a budget takes that says none."""
        if self.budget is not None:
            # PRIVACY: else a restored ledger is held to the cheaper adjacency (test_a_budget_follows_a_restored_ledger)
            self.budget = self.budget.under(self._config["adjacency"])
        self._closed: PlannedEvents | None = None  # the plan, as far as it is known
        # (event, budget and events charged so far), and how many more of the event are then known to fit
        self._allowance: tuple[tuple[Event, Budget, int] | None, int] = (None, 0)
        self.rule = self.budget  # the budget in the mode that it is in
        if self._config.get("mode") == "gdp" and self._is_planned_only:
            assert self.rule is not None
            self.rule = replace(self.rule, mode="gdp")
        self._filter: Filter | None = None if self.rule is None else make_filter(self.rule)
        # whether events may be chosen on the way
        self.adaptive = bool(self._config.get("mode")) or (
            self.rule is not None and self.rule.adaptive
        )

    def change(self, budget: Budget | None) -> None:
        """Takes another budget; raises PrivacyError where what was charged rests on this one."""
        if budget is not None:
            budget = budget.under(self._config["adjacency"])
        changes = len(self._ledger) > 0 and budget != self.budget
        adaptive = any(known is not None and known.adaptive for known in (self.rule, budget))
        if changes and (budget is None or adaptive):
            # PRIVACY: a target chosen from outputs is no filter (test_an_adaptive_budget_is_fixed_once_charged);
            # what is charged without one would keep no plan (test_a_budget_is_not_taken_away_once_charged)
            raise PrivacyError(
                "budget must be fixed before the first event, but that a planned one may be raised or lowered (got"
                f" {budget})"
            )
        if budget is not None:
            fixed = self._config["adjacency"]
            unit = self._config["unit"]
            if fixed not in (None, budget.adjacency) or budget.unit != unit:
                raise PrivacyError(
                    f"budget must be for {fixed or budget.adjacency!r} and {unit!r}, the accountant's"
                )
            make_filter(budget)  # may raise
            if budget.says_adjacency:
                self._config["adjacency"] = budget.adjacency
        self.budget = budget
        self.reread()

    # -- what is planned ----------------------------------------------------------------------------------------------

    def require_adaptive(self) -> None:
        """Raises PrivacyError if the budget is a planned one."""
        if self._is_planned_only:
            # PRIVACY: composition of fixed parameters is no bound here (test_adaptive_noise_needs_an_adaptive_budget)
            raise PrivacyError(
                "budget must be adaptive for events that depend on what was released before (got"
                f" mode 'planned'): Budget(..., {_ADAPTIVE}), or no budget, where get_epsilon is an odometer"
            )

    def declare(self, event: Event, steps: int | None) -> None:
        """Notes what will be charged."""
        # an interrupted run that was planned may be resumed; each charge is checked again
        if not self._journal.interrupted:
            self.require_planned(event)
        self._declared.append((event, steps if steps is None else check.count(steps=steps)))

    def require_planned(self, event: Event) -> None:
        """Raises PrivacyError if the budget is planned, something was released, and the event was not planned then."""
        if not self._has_closed or self.plan().names(event) or self._gaussian(event):
            return
        # PRIVACY: what was released may have chosen it (test_an_event_chosen_by_the_last_output_passes_the_target)
        raise PrivacyError(
            f"event must be planned before the first release (got {event}, after"
            f" {len(self._ledger)} events of another plan): under mode 'planned' no output may"
            " choose what comes next. Build all optimizers of the accountant, or call"
            " accountant.declare(event, steps), before anything is released; or take"
            f" Budget(..., {_ADAPTIVE}), or no budget"
        )

    @property
    def _has_closed(self) -> bool:
        return self._is_planned_only and len(self._ledger) > 0

    def plan(self) -> PlannedEvents:
        """Returns the plan that the first charge closed."""
        if self._closed is None:
            row = self._config.get("plan")
            self._closed = (
                PlannedEvents.of(self._ledger) if row is None else PlannedEvents.from_row(row)
            )
        return self._closed

    def _is_planned(self, event: Event, count: int) -> bool:
        """Returns whether the event, and all that is planned besides, fits the budget; before a charge anything may."""
        if not self._has_closed:
            return True
        assert self.rule is not None
        plan = self.plan()
        if plan.is_plain:
            return plan.names(event)
        reserved = plan.reserved(self._ledger, event, count)
        return reserved is not None and _fit_together(self.rule, reserved)

    def _require_room_for(self, plan: PlannedEvents) -> None:
        assert self.rule is not None
        several = {unit_of(event): None for event, steps in self._declared if steps is None}
        if len(several) > 1:
            raise SequenceError(
                "steps must be given for all but one of several plans on one budget (without: "
                f"{', '.join(map(str, several))})"
            )
        if plan.fixed and not _fit_together(self.rule, Sequential(plan.fixed)):
            raise BudgetExceeded(
                f"the {len(plan.fixed)} plans declared on this accountant would together exceed the"
                f" budget of epsilon={self.rule.epsilon:g} at delta={self.rule.delta:g}; declare"
                " fewer steps, or make a new accountant if some of them are not wanted"
            )

    def _close(self, plan: PlannedEvents) -> None:
        self._closed = plan
        if not plan.is_plain:  # else the ledger tells it
            self._config["plan"] = plan.to_row()

    def _adapt(self, event: Event, count: int) -> None:
        """Turns a budget of unsampled Gaussian noise to mode "gdp" for an event that was not planned, or refuses it."""
        if self._is_planned(event, count):
            return
        self.require_planned(event)
        if self._gaussian(event):
            run = self._of_gaussians
            if not run.admits(self._ledger, event, count):
                raise BudgetExceeded(run.refusal(self._ledger, event, count))
            self._config["mode"] = "gdp"
            self.reread()

    @property
    def _of_gaussians(self) -> Filter:
        assert self.rule is not None
        return make_filter(replace(self.rule, mode="gdp"))

    def _gaussian(self, event: Event) -> bool:
        """Returns whether the event, and all that is planned, is unsampled Gaussian noise.

        Then every path is a sum of mu^2 within the same number, for which the filter "gdp" costs nothing.
        """
        assert self.rule is not None
        plan = self.plan()
        cost = Ledger((*plan.fixed, *plan.once, event)).cost(self.rule.adjacency)
        return not (math.isnan(cost.mu_squared) or cost.fails)

    # -- what fits ----------------------------------------------------------------------------------------------------

    def decide(self, event: Event, count: int, planned: Callable[[], int]) -> int:
        """Returns how many of an event are known to fit, `count` at least, or refuses them; the first closes the plan.

        Args:
            event: about to happen.
            count: how often.
            planned: says how many are planned, all decided at once if they fit.
        """
        if self.rule is None:
            return count
        known, left = self._allowance
        if known == (event, self.rule, self._journal.book.ledger.length) and count <= left:
            return left  # equal events are decided once
        if self._ended:
            # PRIVACY: what was spent has no planned epsilon (test_a_planned_budget_ends_where_parameters_were_adapted)
            self.require_adaptive()
        most = max(count, planned())
        if not self._is_planned_only or not count:
            return self._room(event, count, most)
        if len(self._ledger):
            self._adapt(event, count)
            return self._room(event, count, most)
        plan = PlannedEvents.closing(self._declared, event, most)
        self._require_room_for(plan)
        left = self._room(event, count, most)
        self._close(plan)
        return left

    def ahead(self, event: Event, left: int, most: Callable[[], int]) -> int:
        """Returns how many equal charges may be written at once: no more than the budget has room for.

        Args:
            event: of each.
            left: how many are known to fit.
            most: says how many are planned.
        """
        if self.rule is None or event == Sequential(()):
            return most()
        return 1 if self._journal.leads else min(left, most())

    def note(self, event: Event, left: int) -> None:
        """Notes after a charge how many more of the event fit; whatever else is charged is decided anew."""
        if self.rule is not None:
            charged = self._journal.book.ledger.length
            self._allowance = (event, self.rule, charged), left
            if not charged:
                self.open_unused()

    def open_unused(self) -> None:
        """Opens the plan again if nothing was charged."""
        if not len(self._ledger):
            self._config.pop("plan", None)
            self._closed = None

    def record(self, event: Event, count: int) -> None:
        """Adds to the plan what has happened."""
        if not self._is_planned_only or not count:
            return
        if not len(self._ledger):
            self._close(PlannedEvents.closing(self._declared, event, count))
        elif (plan := self.plan()).reserved(self._ledger, event, count) is None:
            self._close(PlannedEvents((*plan.fixed, Repeat(event, count)), plan.open))

    def _room(self, event: Event, count: int, planned: int) -> int:
        """Returns how many of the event are known to fit, at least those that are asked for, or refuses them."""
        known, _ = self._allowance
        # whether the ledger as it is was within the budget
        decided = known is not None and known[1:] == (self.rule, len(self._ledger))
        alike = self._is_planned_only and len(self._ledger.distinct) == 1
        if decided and alike and self._ledger.adds_nothing(event, count):
            return count
        if planned > count and self.admits(event, planned):
            return planned
        if not self.admits(event, count):
            assert self._filter is not None
            if self._is_planned(event, count):
                raise BudgetExceeded(self._filter.refusal(self._ledger, event, count))
            raise BudgetExceeded(
                f"{count} x {event}: the plan that was declared before the first release holds no"
                " more of it"
            )
        return self.most(event) if known is not None and known[0] == event else count

    def admits(self, event: Event, count: int) -> bool:
        """Returns whether the event fits."""
        if self._filter is None:
            return True
        if self._ended:
            return False
        if not self._is_planned(event, count):
            return self._gaussian(event) and self._of_gaussians.admits(
                self._ledger, event, count
            )
        # PRIVACY: a part of what fits as a whole (test_part_of_a_plan_that_fits_is_not_decided_again)
        whole = self._has_closed and not self.plan().is_plain
        return whole or self._filter.admits(self._ledger, event, count)

    def most(self, event: Event) -> int:
        """Returns how many more of the event fit, at most 2^40."""
        if self._filter is None:
            raise ValueError("budget must be set to count the steps left (got None)")
        if self._ended:
            return 0
        plain = not self._has_closed or (self.plan().is_plain and self.plan().names(event))
        if plain:
            return self._filter.max_steps(self._ledger, event)
        return largest(lambda count: -1.0 if self.admits(event, count) else 1.0, MOST)


@lru_cache(maxsize=256)
def _fit_together(budget: Budget, events: Event) -> bool:
    return make_filter(budget).admits(Ledger([events]))
