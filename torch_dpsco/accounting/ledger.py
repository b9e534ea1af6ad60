"""The ledger: counts of events, per partition and part, with their composed cost.

Equal events share one counter, so that a million equal steps cost one entry. Totals are recomputed from the counts
whenever they are asked for, so that saving and loading cannot make them drift.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator
from itertools import product
from typing import Any

from torch_dpsco import _validate as check
from torch_dpsco.accounting.analysis.pld import pld_epsilon
from torch_dpsco.accounting.analysis.pld_loss import LossLaw
from torch_dpsco.accounting.curves import Cost, Evaluation, cost_of, delta_of, epsilon_of
from torch_dpsco.accounting.event_json import event_from_json, event_to_json
from torch_dpsco.accounting.events import (
    ADD_REMOVE,
    REPLACE_ONE,
    Adjacency,
    Event,
    Parallel,
    Repeat,
    Sequential,
    SimpleEvent,
)
from torch_dpsco.accounting.laws import laws_of
from torch_dpsco.errors import AdjacencyError

__all__ = ["Ledger"]

_BASE = ("", "")  # partition and part of events that touch all records
_POSITIONAL = ("positional", False)
_MOST_COMBINATIONS = 256
_Place = tuple[str, str]
_Counts = dict[SimpleEvent, int]
_Kinds = dict[str, tuple[str, bool]]  # per partition: how it was cut, and whether its key is public
_Laws = tuple[tuple[LossLaw, int], ...]


def _flatten(event: Event, count: int) -> Iterator[tuple[_Place, SimpleEvent, int]]:
    if isinstance(event, Repeat):
        yield from _flatten(event.event, count * event.n)
    elif isinstance(event, Sequential):
        for inner in event.events:
            yield from _flatten(inner, count)
    elif isinstance(event, Parallel):
        for part, events in event.items():
            for inner in events:
                for place, simple, times in _flatten(inner, count):
                    if place != _BASE:
                        raise ValueError(f"partition {event.partition!r} must not contain another (got {place[0]!r})")
                    yield (event.partition, part), simple, times
    elif not isinstance(event, SimpleEvent):
        raise ValueError(f"event must be a value of torch_dpsco.accounting.events (got {event!r})")
    elif count:
        yield _BASE, event, count


def _kinds(event: Event) -> Iterator[tuple[str, tuple[str, bool]]]:
    if isinstance(event, Parallel):
        yield event.partition, (event.partition_kind, event.key_public)
    for inner in (event.event,) if isinstance(event, Repeat) else event.events if isinstance(event, Sequential) else ():
        yield from _kinds(inner)


def _require_defined(kinds: _Kinds, adjacency: Adjacency) -> None:
    """Raises AdjacencyError where the largest part is no bound."""
    for name, (kind, key_public) in kinds.items():
        if kind == "positional" and adjacency == ADD_REMOVE:
            raise AdjacencyError(
                f"parts cut by position have no add_remove guarantee (partition {name!r}): removing a record shifts "
                f"all later positions"
            )
        if kind == "keyed" and adjacency == REPLACE_ONE and not key_public:
            # PRIVACY: (test_keyed_parts_have_no_replace_one_guarantee)
            raise AdjacencyError(
                f"parts by key have no replace_one guarantee (partition {name!r}): the new record may carry another "
                f"key, so that two parts change; a public key that is kept needs key_public=True"
            )


def _sum_costs(counts: _Counts, adjacency: Adjacency, level: int) -> Cost:
    total = Cost.zero(level)
    for event, times in counts.items():
        total = total + cost_of(event, adjacency, level) * times
    return total


class Ledger:
    """Events recorded so far.

    Example:
        >>> from torch_dpsco.accounting.events import Gaussian
        >>> ledger = Ledger()
        >>> ledger.add(Gaussian(2.0, {"replace_one": 1.0}), 4)
        >>> len(ledger), round(ledger.epsilon(1e-5, "replace_one"), 3)
        (4, 4.377)
    """

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self._length = 0
        self._counts: dict[_Place, _Counts] = {}
        self._kinds: _Kinds = {}
        self._parts: dict[str, list[_Place]] = {}
        self._costs: dict[tuple[Adjacency, int], dict[str, Cost]] = {}  # per partition: the largest part
        for event in events:
            self.add(event)

    def __len__(self) -> int:
        """Number of events, counting repetitions."""
        return self._length

    def entries(self) -> Iterator[tuple[str, str, SimpleEvent, int]]:
        """Yields (partition, part, event, count); both names are empty for events that touch all records."""
        for (partition, part), counts in self._counts.items():
            for event, times in counts.items():
                yield partition, part, event, times

    def includes(self, other: Ledger) -> bool:
        """Returns whether every event of another ledger is here, at least as often."""
        mine = {(partition, part, event): times for partition, part, event, times in self.entries()}
        return all(mine.get((place, part, event), 0) >= times for place, part, event, times in other.entries())

    def add(self, event: Event, count: int = 1) -> None:
        """Records an event `count` times. The whole event is checked before anything is recorded."""
        entries = list(_flatten(event, check.count(count=count)))
        self._kinds = self._kinds_with(event)
        for place, simple, times in entries:
            if place not in self._counts:
                self._counts[place] = {}
                self._parts.setdefault(place[0], []).append(place)
            counts = self._counts[place]
            counts[simple] = counts.get(simple, 0) + times
            self._length += times
            self._invalidate(place)

    def _kinds_with(self, event: Event | None) -> _Kinds:
        kinds = dict(self._kinds)
        for name, kind in _kinds(event) if event is not None else ():
            if kinds.setdefault(name, kind) != kind:
                raise ValueError(f"partition {name!r} must be cut in one way (got {kinds[name]} and {kind})")
        return kinds

    def _invalidate(self, place: _Place) -> None:
        for key in list(self._costs):
            if place == _BASE:
                self._costs[key].pop("", None)  # summed again by the next query
                continue
            try:
                self._refresh(self._costs[key], place, *key)
            except AdjacencyError:  # recorded all the same; a query under that adjacency raises
                del self._costs[key]

    def _refresh(self, costs: dict[str, Cost], place: _Place, adjacency: Adjacency, level: int) -> None:
        cost = _sum_costs(self._counts[place], adjacency, level)
        known = costs.get(place[0])
        # a part's cost only grows, so that the running maximum over parts stays exact
        costs[place[0]] = cost if known is None or place == _BASE else known.maximum(cost)

    def _partition_costs(self, adjacency: Adjacency, level: int) -> dict[str, Cost]:
        if (adjacency, level) not in self._costs:
            costs: dict[str, Cost] = {}
            for place in self._counts:
                self._refresh(costs, place, adjacency, level)
            self._costs[adjacency, level] = costs
        costs = self._costs[adjacency, level]
        if "" not in costs and _BASE in self._counts:
            self._refresh(costs, _BASE, adjacency, level)
        return costs

    def cost(self, adjacency: Adjacency, level: int = 0, extra: Event | None = None, count: int = 1) -> Cost:
        """Returns the composed cost, with `extra` as if it had been recorded `count` more times.

        Raises:
            AdjacencyError: some event has no guarantee under this adjacency.
        """
        _require_defined(self._kinds_with(extra), adjacency)
        costs = dict(self._partition_costs(adjacency, level))
        trial: dict[_Place, _Counts] = {}
        for place, simple, times in _flatten(extra, count) if extra is not None else ():
            counts = trial.setdefault(place, dict(self._counts.get(place, {})))
            counts[simple] = counts.get(simple, 0) + times
        for place, counts in trial.items():
            cost = _sum_costs(counts, adjacency, level)
            known = costs.get(place[0])
            costs[place[0]] = cost if known is None or place == _BASE else known.maximum(cost)
        total = Cost.zero(level)
        for partition in sorted(costs):  # in one order, so that the same events always give the same bits
            total = total + costs[partition]
        return total

    def evaluate(
        self, delta: float, adjacency: Adjacency, method: str = "best", *, extra: Event | None = None, count: int = 1
    ) -> Evaluation:
        """Returns epsilon at delta with its method, optionally with `extra` recorded `count` more times."""

        def by_laws(delta: float) -> float | None:
            return self._pld_epsilon(delta, adjacency, extra, count)

        return epsilon_of(lambda level: self.cost(adjacency, level, extra, count), delta, method, by_laws)

    def _pld_epsilon(self, delta: float, adjacency: Adjacency, extra: Event | None, count: int) -> float | None:
        """Returns epsilon by privacy loss laws; None where some event has no law, or there is no figure."""
        places: dict[str, set[_Laws]] = {}
        trial = {place: dict(counts) for place, counts in self._counts.items()}
        for place, simple, times in _flatten(extra, count) if extra is not None else ():
            counts = trial.setdefault(place, {})
            counts[simple] = counts.get(simple, 0) + times
        for (partition, _), counts in trial.items():
            laws: dict[LossLaw, int] = {}
            for event, times in counts.items():
                known = laws_of(event, adjacency)
                if known is None:
                    return None
                for law in known:
                    laws[law] = laws.get(law, 0) + times
            places.setdefault(partition, set()).add(tuple(sorted(laws.items(), key=repr)))
        if math.prod(map(len, places.values())) > _MOST_COMBINATIONS:
            return None
        # PRIVACY: every combination of parts, since laws are not ordered (test_the_worst_combination_of_parts_counts)
        results = [pld_epsilon([pair for part in parts for pair in part], delta) for parts in product(*places.values())]
        found = [result.epsilon for result in results if result is not None]
        return max(found, default=0.0) if len(found) == len(results) else None

    def epsilon(self, delta: float, adjacency: Adjacency, method: str = "best") -> float:
        """Returns epsilon at delta under an adjacency; 0.0 for an empty ledger."""
        return self.evaluate(delta, adjacency, method).epsilon

    def delta(self, epsilon: float, adjacency: Adjacency) -> float:
        """Returns delta at epsilon under an adjacency."""
        return delta_of(self.cost(adjacency), epsilon)

    def to_json(self) -> list[dict[str, Any]]:
        """Returns the entries as JSON objects with bit-exact floats."""
        rows = []
        for partition, part, event, times in self.entries():
            row = event_to_json(event) | {"count": times}
            if partition:
                row = {"type": "Parallel", "partition": partition, "parts": {part: [row]}}
                kind, key_public = self._kinds[partition]
                if (kind, key_public) != _POSITIONAL:
                    row |= {"partition_kind": kind, "key_public": key_public}
            rows.append(row)
        return rows

    @classmethod
    def from_json(cls, rows: Iterable[dict[str, Any]]) -> Ledger:
        """Builds a ledger from JSON objects (see `events.event_from_json`; "count" repeats an event)."""
        return cls(event_from_json(row) for row in rows)

    def digest(self) -> str:
        """Returns the SHA-256 of the entries in a canonical order."""
        rows = sorted(json.dumps(row, sort_keys=True) for row in self.to_json())
        return hashlib.sha256("\n".join(rows).encode()).hexdigest()

    def describe(self) -> list[str]:
        """Returns one line per entry of simple events, and one per partition."""
        lines = [f"{times} x {event}" for partition, _, event, times in self.entries() if not partition]
        for partition, places in self._parts.items():
            if partition:
                lines.append(f"partition {partition}: {len(places)} disjoint parts used")
        return lines
