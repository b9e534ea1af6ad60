"""The ledger in memory: counts of events per partition and part, their composed cost, and the lock of all ledgers.

Totals are recomputed from the counts whenever they are asked for, so that saving and loading cannot make them drift.

What answers a question at delta = 0 are sums of pure epsilons. Let event t have P_t(S) <= e^(eps_t) Q_t(S) for every
set S, whatever was released before it. Then the density ratio of the whole run is at most the product of the e^(eps_t)
along its path: if their sum stays within a number fixed in advance, on every path, that number is the run's pure
epsilon, whatever rule chose the events and the stop. A differing record lies in one part of a partition, so that of its
parts the largest sum counts. No other conversion has a finite answer at delta = 0, and a failure probability is a
delta. Sums are exact, in rational numbers, and rounded once, to the nearest float.

One lock for all ledgers makes deciding and charging one operation, also where threads share an accountant: a ledger
cannot be read while it is half changed, whoever holds it, and a fork waits until no charge is on its way, so that the
child finds the lock free and every ledger whole.

Source: docs/proofs/accounting.md#composition, docs/proofs/accounting.md#parts-of-a-partition,
docs/proofs/accounting.md#pure-sums.

Sums of costs: equal events share one counter, so that a million equal steps cost one entry; one row of costs per
distinct event makes a sum over events one product. Of sampled releases with more than 64 different noises each counts
as one with the next lower noise of a grid: the rest of its noise is post-processing of that.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import lru_cache, partial, reduce, wraps
from hashlib import sha256
from itertools import chain, islice, product, starmap
from types import MappingProxyType
from typing import Any, ParamSpec, TypeVar

import numpy as np

from torch_dpsco import _validate as check
from torch_dpsco.accounting.analysis.risk import Risk
from torch_dpsco.accounting.curves import (
    Cost,
    Evaluation,
    Laws,
    composed_laws,
    cost_of,
    delta_of,
    epsilon_of,
)
from torch_dpsco.accounting.events import (
    ADD_REMOVE,
    REPLACE_ONE,
    Adjacency,
    Event,
    Parallel,
    PoissonGaussian,
    Repeat,
    Sequential,
    SimpleEvent,
    WORGaussian,
    event_from_json,
    event_to_json,
)
from torch_dpsco.errors import AdjacencyError, InfeasibleError


def pure_epsilon(event: SimpleEvent, adjacency: Adjacency) -> float:
    """Returns the pure epsilon of an event; inf where there is none.

    Raises:
        AdjacencyError: the event has no guarantee under this adjacency.

    Example:
        >>> from torch_dpsco.accounting.events import Laplace
        >>> from torch_dpsco.accounting.events import ApproxDP
        >>> noisy = Laplace(4.0, {"replace_one": 2.0})
        >>> pure_epsilon(noisy, "replace_one"), pure_epsilon(ApproxDP(1.0, 1e-9), "replace_one")
        (0.5, inf)
    """
    cost = cost_of(event, adjacency)
    # PRIVACY: what may fail is not pure (test_what_has_no_pure_epsilon_is_named)
    return math.inf if cost.fails else cost.pure


def impurity(event: SimpleEvent) -> str:
    """Returns in words why an event has no place at delta = 0, and the ways out."""
    return (
        f"{event} has no finite pure epsilon (delta = 0 has no Gaussian noise and no failure"
        " probability); give delta > 0, or release with pure noise (KNorm, Laplace)"
    )


_P = ParamSpec("_P")
_T = TypeVar("_T")

LOCK = threading.RLock()

if hasattr(os, "register_at_fork"):  # elsewhere processes are not forked
    # PRIVACY: (test_a_fork_during_a_charge_leaves_a_whole_ledger_and_a_free_lock)
    os.register_at_fork(
        before=LOCK.acquire, after_in_parent=LOCK.release, after_in_child=LOCK.release
    )


def locked(method: Callable[_P, _T]) -> Callable[_P, _T]:
    """Returns the function, run by one thread at a time among all that are locked; calls within it may nest."""

    @wraps(method)
    def alone(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        with LOCK:
            return method(*args, **kwargs)

    return alone


_BASE = ("", "")  # partition and part of events that touch all records
_MOST_CHOICES = 64  # of parts, that are composed one by one
_MANY_LAWS = 64  # beyond which they take more than about half a second
_Place = tuple[str, str]
_Counts = dict[SimpleEvent, int]
_Part = Sequence[tuple[SimpleEvent, int]]
_Kinds = dict[
    str, tuple[str, bool]
]  # per partition: how it was cut, and whether its key is public


def _flatten(
    event: Event, count: int, kinds: _Kinds
) -> Iterator[tuple[_Place, SimpleEvent, int]]:
    """Yields (place, event, count) of all simple events; adds to `kinds` how partitions are cut."""
    if isinstance(event, Repeat):
        yield from _flatten(event.event, count * event.n, kinds)
    elif isinstance(event, Sequential):
        for inner in event.events:
            yield from _flatten(inner, count, kinds)
    elif isinstance(event, Parallel):
        kind = (event.partition_kind, event.key_public)
        if kinds.setdefault(event.partition, kind) != kind:
            raise ValueError(
                f"partition {event.partition!r} must be cut in one way (got"
                f" {kinds[event.partition]} and {kind})"
            )
        for part, inside in event.items():
            found = (_flatten(one, count, kinds) for one in inside)
            for place, simple, times in chain.from_iterable(found):
                if place != _BASE:
                    raise ValueError(
                        f"partition {event.partition!r} must not contain another (got"
                        f" {place[0]!r})"
                    )
                yield (event.partition, part), simple, times
    elif not isinstance(event, SimpleEvent):
        raise ValueError(
            f"event must be a value of torch_dpsco.accounting.events (got {event!r})"
        )
    elif count:
        yield _BASE, event, count


def _require_defined(kinds: _Kinds, adjacency: Adjacency) -> None:
    """Raises AdjacencyError where the largest part is not a bound."""
    for name, (kind, key_public) in kinds.items():
        if kind == "positional" and adjacency == ADD_REMOVE:
            raise AdjacencyError(
                f"parts cut by position have no add_remove guarantee (partition {name!r}): removing"
                " a record shifts all later positions"
            )
        if kind == "keyed" and adjacency == REPLACE_ONE and not key_public:
            # PRIVACY: (test_keyed_parts_have_no_replace_one_guarantee)
            raise AdjacencyError(
                f"parts by key have no replace_one guarantee (partition {name!r}): the new record"
                " may carry another key, so that two parts change; a public key that is kept needs"
                " key_public=True"
            )


Change = tuple[dict[Any, Any], dict[Any, Any]]  # a dictionary, and what is new in it


class Ledger:
    """Events recorded so far.

    Example:
        >>> from torch_dpsco.accounting.events import Gaussian
        >>> ledger = Ledger()
        >>> ledger.add(Gaussian(2.0, {"replace_one": 1.0}), 4)
        4
        >>> len(ledger), round(ledger.epsilon(1e-5, "replace_one"), 3)
        (4, 4.377)
    """

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self.length = 0  # as `len` says
        self._distinct: dict[SimpleEvent, None] = {}
        self._counts: dict[_Place, _Counts] = {}
        self._kinds: _Kinds = {}
        for event in events:
            self.add(event)

    def __len__(self) -> int:
        """Number of events, counting repetitions."""
        return self.length

    @property
    def distinct(self) -> Set[SimpleEvent]:
        """The different events, wherever they were charged."""
        return self._distinct.keys()

    @property
    def size(self) -> int:
        """Number of entries."""
        return sum(map(len, self._counts.values()))

    def entries(self) -> Iterator[tuple[str, str, SimpleEvent, int]]:
        """Yields (partition, part, event, count); both names are empty for events that touch all records."""
        with LOCK:  # a list: others may charge while the caller reads on
            found = [
                (*place, event, times)
                for place, counts in self._counts.items()
                for event, times in counts.items()
            ]
        yield from found

    @locked
    def events(self) -> Iterator[tuple[Event, int]]:
        """Yields (event, count) such that a ledger of them equals this one."""
        for partition, part, event, times in self.entries():
            if partition:
                yield Parallel({part: (event,)}, partition, *self._kinds[partition]), times
            else:
                yield event, times

    @locked
    def includes(self, other: Ledger) -> bool:
        """Returns whether every event of another ledger is here, at least as often."""
        return self._has(other.counts())

    def _has(self, counts: dict[_Place, _Counts]) -> bool:
        return all(
            self._counts.get(place, {}).get(event, 0) >= times
            for place, events in counts.items()
            for event, times in events.items()
        )

    def add(self, event: Event, count: int = 1, also: Iterable[Change] = ()) -> int:
        """Records an event `count` times; returns how many simple events that are.

        The whole event is checked before anything is recorded; what is to change `also` changes at once with it.
        """
        with LOCK:
            kinds = self._kinds
            known = self._counts
            if isinstance(event, SimpleEvent) and type(count) is int and count > 0:
                added = count
                before = known.get(_BASE, {})
                new = {_BASE: {event: before.get(event, 0) + count}}
            else:
                kinds = dict(kinds)
                found = _flatten(event, check.count(count=count), kinds)
                added = sum([times for _, _, times in found])
                new = self.changed(event, count)
            if self.length + added > sys.maxsize:
                raise ValueError(
                    f"count must leave at most {sys.maxsize} events in the ledger (got"
                    f" {self.length + added})"
                )
            changes = [*also]
            if added:  # a part without events rules no adjacency out (test_a_charge_of_nothing_changes_no_answer)
                changes.append((vars(self), {"length": self.length + added, "_kinds": kinds}))
            for place, counts in new.items():
                changes.append((self._distinct, dict.fromkeys(counts)))
                changes.append(
                    (known[place], counts) if place in known else (known, {place: counts})
                )
            # PRIVACY: one call of C code, in which no signal is handled: else Ctrl-C leaves a charge without the mark
            # of its release, or half a charge (test_an_interrupted_charge_is_whole_or_none)
            deque(starmap(dict.update, changes), maxlen=0)
            return added

    def _kinds_with(self, event: Event | None) -> _Kinds:
        kinds = dict(self._kinds)
        if event is not None:
            list(_flatten(event, 1, kinds))
        return kinds

    def changed(self, extra: Event | None, count: int) -> dict[_Place, _Counts]:
        """Returns the counts that recording an event `count` times would change, as they would be."""
        changed: dict[_Place, _Counts] = {}
        for place, simple, times in _flatten(extra, count, {}) if extra is not None else ():
            counts = changed.setdefault(place, {})
            counts[simple] = (
                counts.get(simple, self._counts.get(place, {}).get(simple, 0)) + times
            )
        return changed

    def covers(self, other: Ledger, event: Event, count: int = 1) -> bool:
        """Returns whether a ledger that has all events of another has them after one more charge of it too."""
        return self._has(other.changed(event, count))

    @locked
    def adds_nothing(self, event: Event, count: int = 1) -> bool:
        """Returns whether no cost grows by the event: each part that it touches stays within another one.

        The next batch of one pass, for instance. Compares with two parts of the partition only (a pilot may be one).
        """
        changed = self.changed(event, count)
        self._kinds_with(event)  # raises if the partition is cut in another way
        for place, counts in changed.items():
            others = [
                self._counts[other]
                for other in islice((o for o in self._counts if o[0] == place[0]), 2)
                if other != place
            ]
            # PRIVACY: (test_only_a_part_within_another_one_adds_nothing)
            if place == _BASE or not any(
                all(o.get(e, 0) >= k for e, k in counts.items()) for o in others
            ):
                return False
        return bool(changed)

    @locked
    def cost(
        self, adjacency: Adjacency, level: int = 0, extra: Event | None = None, count: int = 1
    ) -> Cost:
        """Returns the composed cost, with `extra` as if it had been recorded `count` more times.

        Raises:
            AdjacencyError: some event has no guarantee under this adjacency.
        """
        _require_defined(self._kinds_with(extra), adjacency)
        # in one order: the same events always give the same bits
        costs = [
            reduce(Cost.maximum, (_sum(part, adjacency, level) for part in parts))
            for _, parts in sorted(self._parts(extra, count).items())
        ]
        return reduce(Cost.__add__, costs or [Cost.zero(level)])

    def _parts(self, extra: Event | None, count: int) -> dict[str, list[_Part]]:
        """Returns the different parts of each partition; of "" the only one."""
        parts: dict[str, dict[_Part, None]] = {}
        for (partition, _), counts in self.counts(extra, count).items():
            parts.setdefault(partition, {})[tuple(counts.items())] = None
        return {partition: list(known) for partition, known in parts.items()}

    @locked
    def evaluate(
        self,
        delta: float,
        adjacency: Adjacency,
        method: str = "best",
        *,
        extra: Event | None = None,
        count: int = 1,
        enough: float = 0.0,
    ) -> Evaluation:
        """Returns epsilon at delta with its method.

        Args:
            delta: in [0, 1); at 0 epsilon is the sum of pure epsilons.
            adjacency: neighboring relation.
            method: see `curves.epsilon_of`; at delta = 0 "best" or "pure".
            extra: an event, as if it had been recorded `count` more times.
            count: >= 0.
            enough: an epsilon below which a cheaper bound will do.

        Raises:
            InfeasibleError: delta is 0 and some event has no pure epsilon; it is named.
        """
        if check.below_one(delta=delta) > 0:
            found = [
                epsilon_of(cost_at, delta, laws, method, enough)
                for cost_at, laws in self._cases(adjacency, extra, count)
            ]
            return max(found, key=lambda evaluation: evaluation.epsilon)
        if method not in ("best", "pure"):
            raise ValueError(f"method must be 'best' or 'pure' at delta=0 (got {method!r})")
        epsilon = self.pure(adjacency, extra, count)
        culprit = self.find_impure(adjacency, extra, count)
        if culprit is not None:
            raise InfeasibleError(f"delta must be > 0 (got 0.0): {impurity(culprit)}")
        return Evaluation(epsilon, "pure")

    def _cases(
        self, adjacency: Adjacency, extra: Event | None = None, count: int = 1
    ) -> list[tuple[Callable[[int], Cost], Laws]]:
        """Returns what a record may meet, one case per choice of a part of each partition, as costs and laws.

        Beyond 64 choices the largest of each cost stands for all, without laws. It would lose where something fails,
        whose failure is not to be added to the losses of another part.
        """
        # PRIVACY: one choice alone does not know how records were cut (test_choices_of_parts_need_a_cut_that_holds)
        _require_defined(self._kinds_with(extra), adjacency)
        parts = self._parts(extra, count)
        choices = math.prod(map(len, parts.values()))
        most = _MANY_LAWS // choices

        def laws(part: _Part | None) -> Laws:
            counts = None if part is None else dict(part)
            return lambda method: composed_laws(
                counts, adjacency, math.inf if method == "pld" else most
            )

        # PRIVACY: every combination of parts, since laws are not ordered (test_the_worst_combination_of_parts_counts)
        merged = (
            [_merged(chosen) for chosen in product(*parts.values())]
            if choices <= _MOST_CHOICES
            else [None]
        )
        if len(merged) == 1:
            return [(lambda level: self.cost(adjacency, level, extra, count), laws(merged[0]))]
        return [(partial(_sum, part, adjacency), laws(part)) for part in merged if part]

    @locked
    def pure(self, adjacency: Adjacency, extra: Event | None = None, count: int = 1) -> float:
        """Returns the sum of pure epsilons, over each partition the largest part; raises as `cost` does.

        Returns:
            The exact sum of the events' floats, rounded once to the nearest; inf if some event has no pure epsilon.

        Example:
            >>> from torch_dpsco.accounting.events import Pure
            >>> parts = [Parallel({"a": (Pure(0.5),), "b": (Repeat(Pure(0.25), 4),)}, "p")]
            >>> Ledger([Repeat(Pure(0.1), 10), *parts]).pure("replace_one")
            2.0
        """
        # PRIVACY: parts without a guarantee have no maximum either (test_at_delta_0_the_largest_part_counts)
        _require_defined(self._kinds_with(extra), adjacency)
        try:
            largest = [
                max(
                    sum(
                        times * Fraction(pure_epsilon(event, adjacency)) for event, times in part
                    )
                    for part in parts
                )
                for parts in self._parts(extra, count).values()
            ]
            return float(sum(largest))
        except OverflowError:  # infinite, or as good as that
            return math.inf

    @locked
    def find_impure(
        self, adjacency: Adjacency, extra: Event | None = None, count: int = 1
    ) -> SimpleEvent | None:
        """Returns the first event that has no finite pure epsilon; None if there is none."""
        events = (event for counts in self.counts(extra, count).values() for event in counts)
        return next(
            (event for event in events if math.isinf(pure_epsilon(event, adjacency))), None
        )

    def epsilon(self, delta: float, adjacency: Adjacency, method: str = "best") -> float:
        """Returns epsilon at delta under an adjacency; 0.0 for an empty ledger."""
        return self.evaluate(delta, adjacency, method).epsilon

    @locked
    def delta(self, epsilon: float, adjacency: Adjacency) -> float:
        """Returns delta at epsilon under an adjacency."""
        found = [delta_of(cost_at, epsilon, laws) for cost_at, laws in self._cases(adjacency)]
        return max(found)

    def risk(self, adjacency: Adjacency) -> Risk:
        """Returns what a test can find out about one record from the events recorded so far."""
        events = Ledger(
            Repeat(event, count) for event, count in self.events()
        )  # as they are now
        pure = math.nextafter(
            events.pure(adjacency), math.inf
        )  # that sum was rounded to the nearest float
        return Risk(lambda epsilon: events.delta(epsilon, adjacency), pure)

    @locked
    def counts(self, extra: Event | None = None, count: int = 1) -> dict[_Place, _Counts]:
        """Returns the counts per (partition, part), with `extra` as if it had been recorded `count` more times."""
        changed = self.changed(extra, count)
        places = dict.fromkeys((*self._counts, *changed))
        return {place: self._counts.get(place, {}) | changed.get(place, {}) for place in places}

    @locked
    def to_json(self) -> list[dict[str, Any]]:
        """Returns the entries as JSON objects with bit-exact floats."""
        return [event_to_json(event) | {"count": times} for event, times in self.events()]

    @classmethod
    def from_json(cls, rows: Iterable[dict[str, Any]]) -> Ledger:
        """Builds a ledger from JSON objects (see `events.event_from_json`; "count" repeats an event)."""
        return cls(event_from_json(row) for row in rows)

    @locked
    def digest(self) -> str:
        """Returns the SHA-256 of the entries in a canonical order."""
        rows = sorted(json.dumps(row, sort_keys=True) for row in self.to_json())
        return sha256("\n".join(rows).encode()).hexdigest()


MANY = 64  # different noises of sampled releases, beyond which they count by the grid
_LEVELS = 512  # of the grid per factor of 2: epsilon is up to 0.3 % larger


def _is_sampled(event: SimpleEvent) -> bool:
    return isinstance(event, (PoissonGaussian, WORGaussian)) and event.noise_multiplier > 0


@lru_cache(maxsize=1024)
def _on_grid(event: SimpleEvent) -> SimpleEvent:
    """Returns a sampled release with the next lower noise of the grid; others as they are."""
    if not isinstance(event, (PoissonGaussian, WORGaussian)) or not event.noise_multiplier:
        return event
    noise = event.noise_multiplier
    lower = 2.0 ** (math.floor(_LEVELS * math.log2(noise)) / _LEVELS)
    # PRIVACY: never more than was drawn (test_many_noises_cost_no_less_than_each_by_itself)
    return replace(event, noise_multiplier=min(lower, noise))


def _merged(chosen: Iterable[_Part]) -> _Part:
    counts: _Counts = {}
    for event, times in chain.from_iterable(chosen):
        counts[event] = counts.get(event, 0) + times
    return tuple(counts.items())


@lru_cache(maxsize=512)
def _sum(part: _Part, adjacency: Adjacency, level: int) -> Cost:
    """Returns the sequential composition of counted events on one order grid; raises as `cost_of`."""
    if sum(_is_sampled(event) for event, _ in part) > MANY:
        part = _merged([[(_on_grid(event), times) for event, times in part]])
    if not part:
        return Cost.zero(level)
    rows = np.array([cost_of(event, adjacency, level).row for event, _ in part])
    times = np.array([times for _, times in part], float)
    with np.errstate(invalid="ignore"):  # nan marks what is not defined
        return Cost.of_row(times @ rows)


_VERSION = 3
NONE: Mapping[str, int] = MappingProxyType({})
Row = dict[str, Any]

# How far a book has come: the last run that charged, the events so far, and the releases that were marked.
Place = tuple[str, int, int]

# ends of names in `Book.releases`: a run has begun a pass that is charged as a whole; it makes no step any more
OPEN = "/pass"
OVER = "/over"


@dataclass
class Book:
    """The charges, and where they come from.

    Args:
        ledger: the events.
        runs: (token, events before it) of each process or accountant that charged.
        config: adjacency, unit, and facts of the accountant; primitives only.
        id: of the ledger, 128 random bits; kept by all its states.
        releases: per run of an optimizer, how many releases it may have made: marked before their noise is drawn.
    """

    ledger: Ledger = field(default_factory=Ledger)
    runs: list[tuple[str, int]] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    id: str = field(default_factory=lambda: secrets.token_hex(16))
    releases: dict[str, int] = field(default_factory=dict)

    def to_row(self) -> Row:
        """Returns the book as primitives."""
        known: Row = {"ledger": self.ledger.to_json(), "runs": [list(run) for run in self.runs]}
        return known | {
            "config": dict(self.config),
            "id": self.id,
            "releases": dict(self.releases),
        }

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Book:
        """Builds a book from primitives; raises ValueError for malformed ones."""
        releases = row.get("releases", {})
        try:
            return cls(
                Ledger.from_json(row.get("ledger", ())),
                [(str(token), check.count(start=start)) for token, start in row.get("runs", ())],
                dict(row.get("config", {})),
                str(row["id"]),
                {str(run): check.count(releases=made) for run, made in releases.items()},
            )
        # the last one: nested without end
        except (TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(
                f"state must hold ledger, runs and config as they were written ({error})"
            ) from error

    def __str__(self) -> str:
        """What it holds, in words."""
        named = (run.removeprefix("answer/") for run in self.releases if "-" in run)
        runs = {name.partition("-")[0] for name in named}
        kinds = runs or {type(event).__name__ for event in self.ledger.distinct}
        count = len(self.ledger)
        events = f"{count} event{'s' * (count != 1)}"
        return f"this ledger holds {events} of a run of {', '.join(sorted(kinds))}"

    def digest(self) -> str:
        """Returns the SHA-256 of everything."""
        content = [self.ledger.digest(), self.runs, self.config, self.id, self.releases]
        return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def knows(self, other: Book) -> bool:
        """Returns whether another book is an earlier state of this one: it ends before the two part.

        Equal counts are no proof of that: two runs from one checkpoint release twice.
        """
        # PRIVACY: (test_two_continuations_of_one_checkpoint_are_two_histories)
        shared = len(other.runs)
        end = self.runs[shared][1] if len(self.runs) > shared else len(self.ledger)
        same = self.runs[:shared] == other.runs and len(other.ledger) <= end
        marked = all(self.releases.get(run, 0) >= made for run, made in other.releases.items())
        return same and marked and self.ledger.includes(other.ledger)

    @property
    def place(self) -> Place:
        """How far it has come."""
        return (
            self.runs[-1][0] if self.runs else "",
            len(self.ledger),
            sum(self.releases.values()),
        )

    def reaches(self, place: Place) -> bool:
        """Returns whether it has been at a place: that run charged here, and as far."""
        run, events, releases = place
        ends = [*(start for _, start in self.runs[1:]), len(self.ledger)]
        # PRIVACY: a copy that went on by itself has as many events, not those
        # (test_an_older_copy_is_refused_also_where_it_went_on_by_itself)
        # strict=False: events without a run were added by hand
        known = not run or any(
            name == run and end >= events
            for (name, _), end in zip(self.runs, ends, strict=False)
        )
        return known and len(self.ledger) >= events and sum(self.releases.values()) >= releases

    def in_pass(self, others: Iterable[str] = ()) -> bool:
        """Returns whether a run, but for the others, may be inside of a pass that was charged as a whole."""
        runs = {name.removesuffix(OPEN) for name in self.releases if name.endswith(OPEN)}
        return any(run not in others and not self.releases.get(run + OVER) for run in runs)

    def copy(self) -> Book:
        """Returns an equal book, which shares nothing that changes."""
        ledger = Ledger(Repeat(event, times) for event, times in self.ledger.events())
        runs = list(self.runs)
        return Book(ledger, runs, dict(self.config), self.id, dict(self.releases))

    def add(
        self,
        event: Event,
        count: int,
        adaptive: bool = False,
        releases: Mapping[str, int] = NONE,
    ) -> int:
        """Adds a charge; returns how many simple events that are."""
        made = {run: max(k, self.releases.get(run, 0)) for run, k in releases.items()}
        also = [(self.releases, made)]
        if adaptive and (added := len(Ledger([Repeat(event, count)]))):
            also.append((self.config, {"adaptive": self.config.get("adaptive", 0) + added}))
        return self.ledger.add(event, count, also)

    def apply(self, row: Row) -> None:
        """Adds a charge; raises ValueError if it does not follow the events so far."""
        at = row.get("at")
        if type(at) is not int or at != self.ledger.length:
            raise ValueError(
                f"at must be {len(self.ledger)}, the number of events before (got {at!r})"
            )
        releases = row.get("releases", NONE)
        for made in releases.values():
            check.count(releases=made)
        count = check.count(count=row.get("count"))
        event = _parsed(json.dumps(row["event"]))
        self.add(event, count, bool(row.get("adaptive")), releases)
        if "run" in row:
            self.runs.append((str(row["run"]), at))


@lru_cache(maxsize=1024)
def _parsed(event: str) -> Event:
    """Returns the event of a text, which is as a rule that of lines before."""
    return event_from_json(json.loads(event))


def charge_row(
    event: Event,
    count: int,
    at: int,
    run: str | None,
    adaptive: bool,
    releases: Mapping[str, int],
) -> Row:
    """Returns a charge as primitives, to be read by `Book.apply`."""
    row: Row = {"at": at, "count": count, "event": event_to_json(event)}
    if adaptive:
        row["adaptive"] = True
    if releases:
        row["releases"] = dict(releases)
    return row if run is None else row | {"run": run}


def write_state(book: Book) -> Row:
    """Returns the state dict of a book: primitives only, no part shared with it."""
    return {"version": _VERSION} | book.to_row() | {"digest": book.digest()}


def read_state(state: Mapping[str, Any] | None) -> Book:
    """Returns the book of a state dict, sharing nothing with it.

    Raises:
        ValueError: empty, of another accountant or version, malformed, altered or damaged.
    """
    if not isinstance(state, Mapping) or not state:
        raise ValueError(
            f"state_dict must be a mapping, not an empty one (got {check.shown(state)})"
        )
    version = state.get("version")
    if version != _VERSION:
        raise ValueError(
            f"version must be {_VERSION}, of an accountant of torch_dpsco (got {check.shown(version)})"
        )
    book = Book.from_row(state)
    # PRIVACY: (test_one_altered_count_or_bit_of_a_float_is_noticed)
    if state.get("digest") != book.digest():
        raise ValueError("digest must match the ledger: the state was altered or is damaged")
    return book
