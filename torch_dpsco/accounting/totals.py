"""Composed costs of a ledger: one row per distinct event, so that a sum over events is one product.

Source: docs/proofs/accounting.md#composition, docs/proofs/accounting.md#parts-of-a-partition.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from torch_dpsco.accounting.adjacency import Adjacency
from torch_dpsco.accounting.curves import Cost, cost_of
from torch_dpsco.accounting.events import SimpleEvent

Counts = Mapping[SimpleEvent, int]


class Sum:
    """Sequential composition of counted events under one adjacency, on one order grid.

    Changing a count, or adding an event, takes no new sum over the others. The result depends on the counts and on the
    order in which events came, and on nothing else.

    Args:
        adjacency: neighboring relation.
        level: of the order grid (`curves.orders_at`).
    """

    def __init__(self, adjacency: Adjacency, level: int) -> None:
        self._adjacency, self._level = adjacency, level
        self._places: dict[SimpleEvent, int] = {}
        self._rows = np.empty((1, len(Cost.zero(level).row)))
        self._times = np.empty(1)

    def put(self, event: SimpleEvent, times: int) -> None:
        """Sets how often an event happened, >= 1; raises AdjacencyError if it has no guarantee."""
        place = self._places.get(event)
        if place is None:
            place = self._write(len(self._places), event)
            self._places[event] = place
        self._times[place] = times

    def _write(self, place: int, event: SimpleEvent) -> int:
        row = cost_of(event, self._adjacency, self._level).row
        if place == len(self._rows):
            self._rows = np.concatenate([self._rows, np.empty_like(self._rows)])
            self._times = np.concatenate([self._times, np.empty_like(self._times)])
        self._rows[place] = row
        return place

    def cost(self, changed: Counts | None = None) -> Cost:
        """Returns the composed cost, as if some events had happened another number of times, >= 1."""
        last, places = len(self._places), []
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


def total_of(counts: Counts, adjacency: Adjacency, level: int) -> Cost:
    """Returns the sequential composition of counted events."""
    total = Sum(adjacency, level)
    for event, times in counts.items():
        total.put(event, times)
    return total.cost()


class Totals:
    """What a ledger costs under one adjacency, on one order grid.

    Args:
        adjacency: neighboring relation.
        level: of the order grid.
    """

    def __init__(self, adjacency: Adjacency, level: int) -> None:
        self.base = Sum(adjacency, level)
        self._largest: dict[str, Cost] = {}  # per partition

    def grow(self, partition: str, part: Cost) -> None:
        """Notes the cost of a part. It only ever grows, so that the running maximum over parts stays exact."""
        known = self._largest.get(partition)
        self._largest[partition] = part if known is None else known.maximum(part)

    def cost(self, base: Counts | None = None, parts: Totals | None = None) -> Cost:
        """Returns the composed cost, as if base events had other counts, and some parts the costs of `parts`."""
        largest = dict(self._largest)
        for partition, part in (parts._largest if parts is not None else {}).items():
            known = largest.get(partition)
            largest[partition] = part if known is None else known.maximum(part)
        total = self.base.cost(base)
        for partition in sorted(largest):  # in one order, so that the same events always give the same bits
            total = total + largest[partition]
        return total
