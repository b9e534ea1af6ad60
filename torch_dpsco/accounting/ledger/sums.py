"""Sums of costs: what counted events cost together, kept up to date as counts grow.

Equal events share one counter, so that a million equal steps cost one entry; one row of costs per distinct event makes
a sum over events one product.

Source: docs/proofs/accounting.md#composition, docs/proofs/accounting.md#parts-of-a-partition,
docs/proofs/accounting.md#between-two-noises.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from torch_dpsco.accounting.adjacency import Adjacency
from torch_dpsco.accounting.curves import Cost, cost_of
from torch_dpsco.accounting.events import SimpleEvent
from torch_dpsco.accounting.noise_levels import MANY, Levels, spread_of

Counts = Mapping[SimpleEvent, int]


class Rows:
    """Sequential composition of counted events under one adjacency, on one order grid, each with its own cost.

    Args:
        adjacency: neighboring relation.
        level: of the order grid (`curves.orders_at`).
    """

    def __init__(self, adjacency: Adjacency, level: int) -> None:
        self._adjacency = adjacency
        self._level = level
        self._places: dict[SimpleEvent, int] = {}
        self._rows = np.empty((1, len(Cost.zero(level).row)))
        self._times = np.empty(1)

    def put(self, event: SimpleEvent, times: int) -> bool:
        """Sets how often an event happened, >= 1; returns whether it is new; raises AdjacencyError if not defined."""
        known = self._places.get(event)
        place = self._write(len(self._places), event) if known is None else known
        self._places[event], self._times[place] = place, times
        return known is None

    def counts(self) -> dict[SimpleEvent, int]:
        """Returns how often each event happened."""
        return {event: int(self._times[place]) for event, place in self._places.items()}

    def _write(self, place: int, event: SimpleEvent) -> int:
        row = cost_of(event, self._adjacency, self._level).row
        if place == len(self._rows):
            self._rows = np.concatenate([self._rows, np.empty_like(self._rows)])
            self._times = np.concatenate([self._times, np.empty_like(self._times)])
        self._rows[place] = row
        return place

    def cost(self, changed: Counts | None = None) -> Cost:
        """Returns the composed cost, as if some events had happened another number of times, >= 1."""
        last = len(self._places)
        places = []
        for event in changed or ():
            place = self._places.get(event)
            if place is None:  # written behind the known ones, where `put` will write it too
                place = self._write(last, event)
                last += 1
            places.append(place)
        if not last:
            return Cost.zero(self._level)
        times = self._times[:last].copy()
        times[places] = list((changed or {}).values())
        with np.errstate(invalid="ignore"):  # nan marks what is not defined
            return Cost.of_row(times @ self._rows[:last])


class Sum:
    """Sequential composition of counted events under one adjacency, on one order grid.

    Changing a count, or adding an event, takes no new sum over the others. The result depends on the counts and on the
    order in which events came, and on nothing else. More than 64 noises of sampled releases count by `noise_levels`.

    Args:
        adjacency: neighboring relation.
        level: of the order grid (`curves.orders_at`).
        counts: to begin with.

    Raises:
        AdjacencyError: an event has no guarantee.
    """

    def __init__(self, adjacency: Adjacency, level: int, counts: Counts) -> None:
        self._adjacency = adjacency
        self._level = level
        self._begin(counts)

    def _begin(self, counts: Counts) -> None:
        self._rows = Rows(self._adjacency, self._level)
        self._sampled: set[SimpleEvent] = set()  # while they count one by one
        many = sum(map(self._is_sampled, counts)) > MANY
        self._levels = Levels(self._adjacency, self._level) if many else None
        for event, times in counts.items():
            self.put(event, times)

    def put(self, event: SimpleEvent, times: int) -> None:
        """Sets how often an event happened, >= 1; raises AdjacencyError if it has no guarantee."""
        if self._levels is not None and self._is_sampled(event):
            self._levels.put(event, times)
        elif self._rows.put(event, times) and self._is_sampled(event):
            self._sampled.add(event)
            if len(self._sampled) > MANY:
                self._begin(self._rows.counts())

    def _is_sampled(self, event: SimpleEvent) -> bool:
        return spread_of(event, self._adjacency) is not None

    def cost(self, changed: Counts | None = None) -> Cost:
        """Returns the composed cost, as if some events had happened another number of times, >= 1."""
        changed = changed or {}
        sampled = {event: times for event, times in changed.items() if self._is_sampled(event)}
        if self._levels is not None:
            others = {event: times for event, times in changed.items() if event not in sampled}
            return self._rows.cost(others) + Cost(self._levels.rdp(sampled))
        if len(self._sampled | sampled.keys()) > MANY:
            return Sum(self._adjacency, self._level, self._rows.counts() | dict(changed)).cost()
        return self._rows.cost(changed)


def total_of(counts: Counts, adjacency: Adjacency, level: int) -> Cost:
    """Returns the sequential composition of counted events."""
    return Sum(adjacency, level, counts).cost()


class Totals:
    """What a ledger costs under one adjacency, on one order grid.

    Args:
        adjacency: neighboring relation.
        level: of the order grid.
        base: counts of the events that touch all records.
    """

    def __init__(self, adjacency: Adjacency, level: int, base: Counts) -> None:
        self.base = Sum(adjacency, level, base)
        self._largest: dict[str, Cost] = {}  # per partition

    def grow(self, partition: str, part: Cost) -> None:
        """Notes the cost of a part. It only ever grows, so that the running maximum over parts stays exact."""
        _grow(self._largest, partition, part)

    def cost(self, base: Counts | None, parts: Iterable[tuple[str, Cost]]) -> Cost:
        """Returns the composed cost, as if base events had other counts, and there were these parts of partitions."""
        largest = dict(self._largest)
        for partition, part in parts:
            _grow(largest, partition, part)
        total = self.base.cost(base)
        for partition in sorted(
            largest
        ):  # in one order, so that the same events always give the same bits
            total = total + largest[partition]
        return total


def _grow(largest: dict[str, Cost], partition: str, part: Cost) -> None:
    known = largest.get(partition)
    largest[partition] = part if known is None else known.maximum(part)
