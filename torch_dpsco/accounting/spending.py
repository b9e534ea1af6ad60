"""Spending: the part of the accountant that charges events, within a budget if there is one.

Source: docs/proofs/accounting.md#planned-budgets, docs/proofs/accounting.md#filters.

Phases: what is charged inside of a block goes to one part of a partition, and nothing that runs beside the block.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Collection, Mapping
from contextvars import ContextVar, Token
from typing import Any, NamedTuple

from torch_dpsco import _validate as check
from torch_dpsco._doors import typed
from torch_dpsco.accounting.budgets import Budget
from torch_dpsco.accounting.calibrate import largest
from torch_dpsco.accounting.events import (
    REPLACE_ONE,
    Adjacency,
    Event,
    Parallel,
    RandomAllocation,
    Sequential,
    clipped_gaussian,
)
from torch_dpsco.accounting.filters import make_filter
from torch_dpsco.accounting.journal import Journal
from torch_dpsco.accounting.ledger import LOCK, locked
from torch_dpsco.accounting.planning import Planning
from torch_dpsco.errors import BudgetExceeded, PrivacyError, SequenceError, UnitError

_MOST = 2**40


class Note(NamedTuple):
    """What the ledger notes with a charge.

    Args:
        marks: facts, of `MARKS`.
        releases: of `Book.releases`.
        adjacency: default of queries from now on, if none is fixed yet.
    """

    marks: Collection[str] = ()
    releases: Mapping[str, int] | None = None
    adjacency: Adjacency = REPLACE_ONE


_NO_NOTE = Note()


class Spending(Planning):
    """Charges events before their noise is drawn, and refuses those that would exceed the budget.

    Threads may share it: each decision is one operation with its charge.

    Args:
        journal: what is charged so far.
        budget: refuse what would pass it; None records without limit.
    """

    def __init__(self, journal: Journal, budget: Budget | None) -> None:
        super().__init__(journal, budget)
        self._phases = Phases()

    # -- settings -----------------------------------------------------------------------------------------------------

    @property
    def ledger_id(self) -> str:
        """Random name of the ledger, the same in its file, in checkpoints and reports; that of a checkpoint is kept."""
        return self._journal.book.id

    @property
    def ledger_path(self) -> str | None:
        """Path of the ledger file, if there is one."""
        return None if self._journal.file is None else self._journal.file.path

    def marked(self, run: str) -> int:
        """Returns how many releases a run may have made (see `Book.releases`)."""
        return self._journal.book.releases.get(run, 0)

    @property
    def interrupted(self) -> bool:
        """Whether its file knows runs of earlier processes, of which an optimizer built now may resume one.

        Then no optimizer is refused at construction for want of budget: every charge is decided when it comes.
        """
        return self._journal.interrupted

    @property
    def unit(self) -> str:
        """What one record is."""
        return str(self._config["unit"])

    @property
    def adjacency(self) -> Adjacency:
        """Default of queries."""
        return self._config["adjacency"] or REPLACE_ONE

    @property
    def suspicious_sampling(self) -> bool:
        """Whether batches that were charged as Poisson looked fixed-size."""
        return bool(self._config.get("suspicious"))

    @property
    def budget(self) -> Budget | None:
        """What may be spent; None means no limit."""
        return self._budget

    @budget.setter
    @locked
    def budget(self, budget: Budget | None) -> None:
        for known in (self._rule, budget):
            if (
                len(self)
                and budget != self._budget
                and known is not None
                and (known.adaptive or known.schedule)
            ):
                # PRIVACY: a target chosen from outputs is no filter (test_an_adaptive_budget_is_fixed_once_charged)
                raise PrivacyError(
                    f"budget must be fixed before the first event in this mode (got {budget})"
                )
        if len(self) and budget is None and self._budget is not None:
            # PRIVACY: what is charged without it would keep no plan (test_a_budget_is_not_taken_away_once_charged)
            raise PrivacyError(
                "budget must not be taken away once something was charged: raise it, or make a"
                " new one"
            )
        fixed = self._config["adjacency"]
        if budget is not None and (
            fixed not in (None, budget.adjacency) or budget.unit != self.unit
        ):
            raise PrivacyError(
                f"budget must be for {self.adjacency!r} and {self.unit!r}, the accountant's"
            )
        if budget is not None:
            make_filter(budget)  # may raise
            self._config["adjacency"] = budget.adjacency
        self._budget = budget
        self._reread()

    @typed
    @locked
    def require_unit(self, unit: str) -> None:
        """Signs an optimizer up: raises UnitError for another privacy unit, and fixes the default adjacency."""
        if unit != self.unit:
            raise UnitError(f"unit must be {self.unit!r}, the accountant's (got {unit!r})")
        # PRIVACY: a later Opacus step must not change what the optimizer promises (test_who_comes_first_decides)
        self._config["adjacency"] = self.adjacency

    @typed
    def phase(
        self, part: str | int, *, partition: str, kind: str = "positional", key_public: bool = False
    ) -> Phase:
        """Charges the events inside of a block to one part of a partition of the records.

        It belongs to the thread and the task (of asyncio and the like) that enter it. What others charge meanwhile
        touches all records, and so does what threads, tasks and callbacks charge that are started inside of it: let
        them enter phases of their own.

        Args:
            part: name of the part.
            partition: name that identifies the partition (see `events.Parallel`).
            kind: "positional" or "keyed".
            key_public: whether a key is public and kept by a replacement.

        Raises (when entered):
            SequenceError: a phase is open already, or a generator would keep it open while its caller runs.

        Example:
            >>> from torch_dpsco.accounting.accountant import Accountant
            >>> from torch_dpsco.accounting.events import Pure
            >>> accountant = Accountant()
            >>> for part in "ab":
            ...     with accountant.phase(part, partition="halves"):
            ...         accountant.authorize(Pure(0.5))
            >>> accountant.get_epsilon(0.0)  # no record is in both
            0.5
        """
        Parallel({str(part): ()}, partition, kind, key_public)  # its checks, before anything runs
        return self._phases.at(Place(str(part), partition, kind, key_public))

    @property
    def place(self) -> str:
        """What is charged to here, in words: a part of a partition; "" for all records."""
        place = self._phases.place
        return "" if place is None else f" in part {place.part} of {place.partition}"

    def _placed(self, event: Event) -> Event:
        place = self._phases.place
        if place is None:
            return event
        return Parallel({place.part: (event,)}, place.partition, place.kind, place.key_public)

    # -- charging -----------------------------------------------------------------------------------------------------

    @typed
    @locked
    def record(self, event: Event, count: int = 1, *, adaptive: bool = False) -> None:
        """Charges an event that has happened already, even past the budget (truth wins over wishes).

        Inside of another run's pass of random allocation, an event that may depend on what was released takes the
        amplification of passes away: they are charged once more, as unsampled releases.

        Args:
            event: what happened.
            count: how often, >= 0.
            adaptive: whether its parameters were chosen from what was released before.
        """
        event = self._placed(event)
        count = check.count(count=count)
        with self._planning(event, count, count, refuse=False):
            self._charge(event, count, Note(("adaptive",) if adaptive else ()))

    def authorize(
        self,
        event: Event,
        count: int = 1,
        *,
        planned: int = 1,
        adaptive: bool = False,
        releases: Mapping[str, int] | None = None,
    ) -> None:
        """Charges an event that is about to happen, or refuses it.

        Args:
            event: what is about to happen.
            count: how often, >= 0.
            planned: how many such events are planned from here on, this one included; only `count` are charged now, but
                if all fit, they are decided at once.
            adaptive: whether its parameters were chosen from what was released before.
            releases: per run, how many of its releases may have been made from here on (see `Book.releases`); noted
                even if the event is empty.

        Raises:
            BudgetExceeded: the event would pass the budget; the ledger is unchanged.
            AdjacencyError: the event has no guarantee under the budget's adjacency; the ledger is unchanged.
            PrivacyError: the ledger file could not be written; nothing may be released. Or parameters may be chosen on
                the way, and another run is inside of a pass of random allocation.
        """
        if type(planned) is not int or not 0 < planned <= check.LARGEST_COUNT:
            planned = check.positive_count(planned=planned)
        adaptive = check.flag(adaptive=adaptive)
        if not isinstance(releases, (Mapping, type(None))):
            raise ValueError(
                f"releases must be a mapping of runs to numbers (got {check.shown(releases)})"
            )
        # PRIVACY: between deciding and charging nobody else may charge (test_no_number_of_threads_passes_the_budget)
        with LOCK:
            if adaptive:
                self.require_adaptive()
            self._authorize(
                self._placed(event),
                count,
                Note(("adaptive",) if adaptive else (), releases),
                planned,
            )

    def _authorize(self, event: Event, count: int, note: Note = _NO_NOTE, planned: int = 1) -> None:
        if type(count) is not int or not 0 <= count <= check.LARGEST_COUNT:
            count = check.count(count=count)
        self._require_outside(event, count, note)
        if self._rule is None:
            self._charge(event, count, note)
            return
        if self._ended:
            # PRIVACY: what was spent has no planned epsilon (test_a_planned_budget_ends_where_parameters_were_adapted)
            self.require_adaptive()
        known, left = self._allowance or (None, 0)
        if (
            known == (event, self._rule, len(self)) and count <= left
        ):  # equal events are decided once
            self._charge(event, count, note)
        else:
            with self._planning(event, count, planned, refuse=True):
                left = self._room(self._rule, event, count, planned)
                self._charge(event, count, note)
        self._allowance = (event, self._rule, len(self)), left - count

    def _charge(self, event: Event, count: int, note: Note = _NO_NOTE) -> None:
        undecided = self._config["adjacency"] is None
        if undecided:
            self._config["adjacency"] = (
                note.adjacency
            )  # before the charge: the first line of a ledger file names it
        added = 0
        try:
            added = self._journal.charge(event, count, note.marks, note.releases)
        finally:
            if undecided and not added and not note.releases:
                self._config["adjacency"] = None
        if self._is_inside(event, count, note):
            # PRIVACY: it has happened; what it was chosen from counts as if all knew where records were
            # (test_what_has_happened_inside_a_pass_takes_its_amplification_away)
            passes = [
                (e, k) for _, _, e, k in self.ledger.entries() if isinstance(e, RandomAllocation)
            ]
            for one, times in passes:
                self._journal.charge(clipped_gaussian(one.noise), times)

    def _is_inside(self, event: Event, count: int, note: Note) -> bool:
        """Returns whether an event may depend on releases of another run's pass that was charged as a whole."""
        chosen = self.adaptive or "adaptive" in note.marks
        return (
            chosen
            and count > 0
            and event != Sequential(())
            and self._journal.book.in_pass(note.releases or ())
        )

    def _require_outside(self, event: Event, count: int, note: Note) -> None:
        """Raises PrivacyError if it may."""
        if self._is_inside(event, count, note):
            # PRIVACY: proved for events that are fixed before the pass
            # (test_no_adaptive_event_is_charged_inside_a_pass)
            raise PrivacyError(
                "an event that may depend on what was released must not be charged while a pass of"
                " random allocation is open: call finalize() on its optimizer first, or give it"
                " Assigned(..., amplification=False)"
            )

    def _room(self, budget: Budget, event: Event, count: int, planned: int) -> int:
        known, _ = self._allowance or (None, 0)
        decided = known is not None and known[1:] == (
            budget,
            len(self),
        )  # the ledger as it is was within the budget
        alike = (
            budget.mode == "planned" and budget.schedule is None and len(self.ledger.distinct) == 1
        )
        if decided and alike and self.ledger.adds_nothing(event, count):
            return count
        if planned > count and self._admits(event, planned, decided):
            return planned
        if not self._admits(event, count, decided):
            assert self._filter is not None
            if self._is_planned(event, count):
                raise BudgetExceeded(self._filter.refusal(self.ledger, event, count))
            raise BudgetExceeded(
                f"{count} x {event}: the plan that was declared before the first release holds no"
                " more of it"
            )
        return self._most(event) if known is not None and known[0] == event else count

    @typed
    @locked
    def admits(self, event: Event, count: int = 1) -> bool:
        """Returns whether the budget (always, without one) would admit the event; charges nothing."""
        return self._admits(self._placed(event), check.count(count=count))

    def _admits(self, event: Event, count: int, decided: bool = False) -> bool:
        """Returns whether the event fits; `decided` where the ledger as it is is known to be within the budget."""
        if self._filter is None:
            return True
        if self._ended:
            return False
        if self._keeps_plan and self._within_fixed(event, count):
            # PRIVACY: a part of what fits as a whole (test_part_of_a_plan_that_fits_is_not_decided_again)
            return self._fixed_fits
        deciding = self._deciding(event, count)
        return (deciding.admits_next if decided else deciding.admits)(self.ledger, event, count)

    @typed
    @locked
    def max_steps(self, event: Event) -> int:
        """Returns how many more of this event fit the budget (at most 2^40), without charging anything."""
        return self._most(self._placed(event))

    def _most(self, event: Event) -> int:
        if self._filter is None:
            raise ValueError("budget must be set to count the steps left (got None)")
        if self._keeps_plan and len(self) and not self._plan().is_plain:
            return largest(lambda count: -1.0 if self._admits(event, count) else 1.0, _MOST)
        return 0 if self._ended else self._deciding(event, 1).max_steps(self.ledger, event)

    @property
    def _ended(self) -> bool:
        """Whether parameters were adapted under a planned budget, which then authorizes nothing more."""
        return (
            bool(self._config.get("adaptive"))
            and self._budget is not None
            and not self._budget.adaptive
        )


_GENERATORS = inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR


class Place(NamedTuple):
    """A part of a partition of the records (see `events.Parallel`)."""

    part: str
    partition: str
    kind: str
    key_public: bool


class Phases:
    """The open phases of one accountant: at most one in each context, of a thread, a task or a callback."""

    def __init__(self) -> None:
        self._opened: ContextVar[Phase | None] = ContextVar("opened", default=None)

    @property
    def place(self) -> Place | None:
        """What the code that runs now charges to; None is all records."""
        phase = self._opened.get()
        return None if phase is None or not phase.is_here() else phase.place

    def at(self, place: Place) -> Phase:
        """Returns a block whose charges go to a place."""
        return Phase(self, self._opened, place)


class Phase:
    """A block whose charges go to a place: those of the context that entered it, until it is left."""

    def __init__(self, phases: Phases, opened: ContextVar[Phase | None], place: Place) -> None:
        self.place = place
        self._phases = phases
        self._opened = opened
        self._token: Token[Phase | None] | None = None

    def __enter__(self) -> None:
        _require_no_generator()
        open_now = self._phases.place
        if open_now is not None:
            raise SequenceError(
                f"a phase on part {open_now.part!r} is open: phases must not be nested"
            )
        self._token = self._opened.set(self)

    def __exit__(self, *_: Any) -> None:
        token = self._token
        self._token = None
        if token is not None:
            with contextlib.suppress(
                ValueError, RuntimeError
            ):  # left in another context: closed there all the same
                self._opened.reset(token)

    def is_here(self) -> bool:
        """Returns whether the block is open in this context itself, and not in the one that this is a copy of."""
        if self._token is None:
            return False
        try:
            # PRIVACY: what is started inside of a phase inherits its context, and may release about all records
            # (test_what_is_started_inside_of_a_phase_charges_to_all_records)
            self._opened.reset(self._token)
        except (ValueError, RuntimeError):  # a token is of the context in which it was made
            return False
        self._token = self._opened.set(self)
        return True


def _require_no_generator() -> None:
    """Raises SequenceError where a phase would stay open while the callers of a generator run."""
    frame = sys._getframe(2)
    while (
        frame.f_back is not None and frame.f_globals.get("__name__") == contextlib.__name__
    ):  # as of an ExitStack
        frame = frame.f_back
    if frame.f_code.co_flags & _GENERATORS:
        # PRIVACY: they would be charged to the part too (test_a_phase_is_not_opened_in_a_generator)
        raise SequenceError(
            f"a phase must not be opened in a generator ({frame.f_code.co_qualname}): what runs"
            " between two of its values would be charged to the part; open it around what is"
            " charged, or return accountant.phase(...)"
        )
