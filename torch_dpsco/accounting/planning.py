"""What a run will charge under a planned budget, declared before its first release and then enforced.

Composition theorems for fixed parameters hold for events that no output has chosen. What was planned, which
`journal.Limit` keeps for the accountant, is therefore closed by the first charge. What is planned is a multiset of
events, and at most one event more that may be repeated as often as the budget admits.

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
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, cast

from torch_dpsco.accounting.events import (
    Event,
    Parallel,
    Repeat,
    Sequential,
    SimpleEvent,
    event_from_json,
    event_to_json,
)
from torch_dpsco.accounting.ledger import Ledger

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
