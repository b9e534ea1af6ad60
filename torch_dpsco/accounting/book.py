"""What a ledger file says: the ledger with the accountant's settings and the marks of runs, as rows of JSON."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from torch_dpsco import _validate as check
from torch_dpsco.accounting.events import (
    ADD_REMOVE,
    Adjacency,
    Event,
    PoissonGaussian,
    Repeat,
    event_from_json,
    event_to_json,
)
from torch_dpsco.accounting.ledger import Ledger

_VERSION = 3
NONE: Mapping[str, int] = MappingProxyType({})
Row = dict[str, Any]
History = list[tuple[float, float, int]]
MECHANISM = "dpsco"

# How far a book has come: the last run that charged, the events so far, and the releases that were marked.
Place = tuple[str, int, int]

# Facts about charges, kept as numbers of events: made by an Opacus optimizer, whose sampling is taken on trust;
# their parameters chosen from what was released before.
MARKS = ("stepped", "adaptive")

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
        config = row.get("config", {})
        runs = row.get("runs", ())
        releases = row.get("releases", {})
        try:
            if not all(isinstance(given, Mapping) for given in (config, releases)):
                raise TypeError("config and releases must be mappings")
            runs = [(str(token), check.count(start=start)) for token, start in runs]
            known = {str(run): check.count(releases=made) for run, made in releases.items()}
            ledger = Ledger.from_json(row.get("ledger", ()))
            name = row["id"]
            if not isinstance(name, str) or not name:
                raise TypeError(f"id must be a name, got {name!r}")
            return cls(ledger, runs, dict(config), name, known)
        # the last one: nested without end
        except (TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(
                f"state must hold ledger, runs and config as they were written ({error})"
            ) from error

    def digest(self) -> str:
        """Returns the SHA-256 of everything."""
        content = [self.ledger.digest(), self.runs, self.config, self.id, self.releases]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

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
        marks: Iterable[str] = (),
        releases: Mapping[str, int] = NONE,
    ) -> int:
        """Adds a charge; returns how many simple events that are."""
        added = self.ledger.add(event, count)
        if marks and added:
            self.mark(marks, added)
        for run, number in releases.items():
            self.releases[run] = max(number, self.releases.get(run, 0))
        return added

    def mark(self, marks: Iterable[str], events: int) -> None:
        """Adds to the numbers of events of which a fact is known."""
        for name in marks:
            self.config[name] = self.config.get(name, 0) + events

    def apply(self, row: Row) -> None:
        """Adds a charge; raises ValueError if it does not follow the events so far."""
        at = check.count(at=row.get("at"))
        count = check.count(count=row.get("count"))
        if at != len(self.ledger):
            raise ValueError(
                f"at must be {len(self.ledger)}, the number of events before (got {at})"
            )
        made = row.get("releases", {}).items()
        releases = {str(run): check.count(releases=number) for run, number in made}
        marks = [name for name in MARKS if row.get(name)]
        self.add(event_from_json(row["event"]), count, marks, releases)
        if "run" in row:
            self.runs.append((str(row["run"]), at))


def charge_row(
    event: Event,
    count: int,
    at: int,
    run: str | None,
    marks: Iterable[str],
    releases: Mapping[str, int],
) -> Row:
    """Returns a charge as primitives, to be read by `Book.apply`."""
    row: Row = {"at": at, "count": count, "event": event_to_json(event)} | dict.fromkeys(
        marks, True
    )
    if releases:
        row["releases"] = dict(releases)
    return row if run is None else row | {"run": run}


def history_of(ledger: Ledger) -> History:
    """Returns the Poisson steps of a ledger in Opacus' form: (noise multiplier, sampling rate, steps)."""
    return [
        (event.noise_multiplier, event.q, times)
        for partition, _, event, times in ledger.entries()
        if not partition and isinstance(event, PoissonGaussian)
    ]


def foreign_book(
    history: Iterable[Sequence[float]], run: str, adjacency: Adjacency | None, unit: str
) -> Book:
    """Returns the book of a history in Opacus' form, whose sampling is taken on trust.

    Raises:
        ValueError: an entry is not (noise multiplier >= 0, rate in [0, 1], steps >= 0).
    """
    book = Book(config={"adjacency": adjacency, "unit": unit})
    given: Any = history
    for entry in given if isinstance(given, Iterable) else (given,):
        if not isinstance(entry, Sequence) or len(entry) != 3:
            raise ValueError(
                f"history must hold (noise_multiplier, sample_rate, steps) (got {entry!r})"
            )
        book.ledger.add(PoissonGaussian(entry[0], entry[1]), check.count(steps=entry[2]))
    if len(book.ledger):
        book.runs.append((run, 0))
        book.config["adjacency"] = adjacency or ADD_REMOVE
        book.mark(("stepped",), len(book.ledger))
    return book


def write_state(book: Book) -> Row:
    """Returns the state dict of a book: primitives only, no part shared with it."""
    facts: Row = {"mechanism": MECHANISM, "version": _VERSION}
    return facts | book.to_row() | {"digest": book.digest()}


def read_state(state: Mapping[str, Any] | None) -> Book:
    """Returns the book of a state dict, sharing nothing with it.

    Raises:
        ValueError: empty, of another accountant or version, malformed, altered or damaged.
    """
    if not isinstance(state, Mapping) or not state:
        raise ValueError(
            f"state_dict must be a mapping, not an empty one (got {check.shown(state)})"
        )
    mechanism = state.get("mechanism")
    if mechanism != MECHANISM:
        raise ValueError(
            f"mechanism must be {MECHANISM!r} (got {check.shown(mechanism)}): the history of an accountant of Opacus"
            " is taken on trust by accountant.history = its history"
        )
    version = state.get("version")
    if version != _VERSION:
        raise ValueError(f"version must be {_VERSION} (got {version!r})")
    book = Book.from_row(state)
    # PRIVACY: (test_one_altered_count_or_bit_of_a_float_is_noticed)
    if state.get("digest") != book.digest():
        raise ValueError("digest must match the ledger: the state was altered or is damaged")
    return book
