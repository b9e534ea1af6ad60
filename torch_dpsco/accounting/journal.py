"""The journal of an accountant, which charges events to a book, and the limit, which says what it may charge.

The book is that of only one process, and written on the disk first if it has a file.

Charged ahead: a run whose plan is fixed knows its next charges, and one line pays for several of them. The file then
holds more than the book in memory, which says what was used. A step needs no line of its own while the file, less
what was used, has its event and the mark of its release. After a crash what was charged ahead is lost, as if it had
been released: the file does not know that it was not. `Journal.close` gives it back, by a state line: its process
knows all that was drawn.

Source: docs/proofs/accounting.md#charged-ahead.
"""

from __future__ import annotations

import math
import os
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from torch_dpsco import _validate as check
from torch_dpsco.accounting.budgets import Budget, Filter, make_filter
from torch_dpsco.accounting.calibrate import MOST, largest
from torch_dpsco.accounting.events import Adjacency, Event, Repeat, Sequential
from torch_dpsco.accounting.ledger import NONE, OPEN, Book, Ledger, charge_row
from torch_dpsco.accounting.ledger_file import LedgerFile
from torch_dpsco.accounting.planning import PlannedEvents, unit_of
from torch_dpsco.errors import BudgetExceeded, PrivacyError, SequenceError, warn

_SHARE = 0.01  # of the time, for lines; twice that once rounded
_LOST = 1.0  # seconds of steps that a crash may lose


def steps_ahead(line: float, step: float) -> int:
    """Returns how many steps a line should pay for, from the seconds that a line and a step take; a power of two."""
    most = min(line / _SHARE, _LOST) / step if step > 0 else 1.0
    # a power of two: the file tells hardly anything about times
    return 1 << max(0, int(most).bit_length() - 1)


class Journal:
    """An append-only book, and the file in which each charge is written first.

    Args:
        book: what is charged so far.
        file: write-ahead file, or None.
    """

    def __init__(self, book: Book, file: LedgerFile | None = None) -> None:
        self.book = book
        self.file = file
        self._written = book if file is None else book.copy()  # what the file says
        self._filed = (
            len(book.ledger) if file is not None and not file.is_empty else -1
        )  # events of the book that the file knows
        self._facts = _facts(book)  # and the facts, if it knows any events
        self._line = 0.0  # seconds that the last line took
        self._since = math.inf  # when it was written
        self._steps = 1  # charges since
        self._process = os.getpid()
        self._charging = False
        self.ended: set[str] = set()  # runs that were finalized in this process
        self._brought = -1  # events of the last checkpoint that was loaded
        self._follows = False  # whether the file is another process's

    def charge(
        self,
        event: Event,
        count: int,
        adaptive: bool = False,
        releases: Mapping[str, int] = NONE,
        ahead: Callable[[], int] | None = None,
    ) -> int:
        """Adds an event; returns how many simple events that are.

        Args:
            event: to be charged.
            count: how often.
            adaptive: whether its parameters were chosen from what was released before.
            releases: of `Book.releases`, noted even if the event is empty.
            ahead: says how many charges, this one included, may be written at once: equal ones, each with marks of
                releases that are one further.

        Raises:
            ValueError: bad event or count; nothing is changed.
            PrivacyError: another process than the one that made the journal, or the file could not be written.
        """
        if os.getpid() != self._process:
            self.require_own_process()
        book = self.book
        if self.file is None:
            if not self._charging:
                self._charge_first(event, count, adaptive, releases)
            return book.add(event, count, adaptive, releases)
        self._steps += 1
        # PRIVACY: on the disk before it is in the book, in the book before noise
        # (test_kill_between_the_disk_and_the_noise_over_counts_by_one,
        # test_charges_without_a_run_or_a_plan_have_a_line_each)
        paid = bool(releases) and not adaptive and self._is_written(event, count, releases)
        if paid:
            # PRIVACY: as for a line (test_a_file_that_changes_while_it_is_ahead_is_noticed_at_the_next_step)
            self.file.require_own()
            self._filed = -1  # until the book has the charge too
        else:
            self._charge_first(event, count, adaptive, releases, ahead)
        added = book.add(event, count, adaptive, releases)
        if added or releases:
            if not paid:
                self.file.note(self._written.place)
            self._filed = book.ledger.length
        return added

    def _is_written(self, event: Event, count: int, releases: Mapping[str, int]) -> bool:
        """Returns whether the file holds a charge, with the marks of its releases, that the book has not."""
        written = self._written
        # PRIVACY: event by event, and release by release: none is made that the file does not know
        # (test_the_file_is_never_behind_whatever_is_charged), or pays for twice
        # (test_without_closing_nothing_is_given_back)
        return (
            self._charging
            and self._is_known
            and all(written.releases.get(run, 0) >= made for run, made in releases.items())
            and written.ledger.covers(self.book.ledger, event, count)
        )

    @property
    def _is_known(self) -> bool:
        """Whether the file knows all of the book: it is not new, and nothing was added by hand."""
        return (self._filed, self._facts) == (len(self.book.ledger), _facts(self.book))

    @property
    def leads(self) -> bool:
        """Whether the file holds more than the book: charges of steps that were not made yet."""
        return self.file is not None and self._written.place != self.book.place

    def _charge_first(
        self,
        event: Event,
        count: int,
        adaptive: bool,
        releases: Mapping[str, int],
        ahead: Callable[[], int] | None = None,
    ) -> None:
        """Names the run, and writes the charge ahead; does nothing for a charge of nothing."""
        # the whole event is checked here, before the file sees it
        if not len(Ledger([Repeat(event, count)])) and not releases:
            return
        run = None
        if not self._charging:
            # who charged, and from which event on: tells an earlier state of this ledger from another of equal counts
            run = secrets.token_hex(16)
        at = len(self.book.ledger)
        if self.file is not None:
            if not self._is_known:  # new file, new facts, a ledger added to by hand
                self._refile(self.book)
            steps = 1 if ahead is None else self._ahead(ahead)
            made = {n: k + (steps - 1) * (not n.endswith(OPEN)) for n, k in releases.items()}
            self._write(event, count * steps, adaptive, made, run)
        if run is not None:
            self.book.runs.append((run, at))
            self._charging = True

    def _ahead(self, most: Callable[[], int]) -> int:
        """Returns how many steps the next line pays for."""
        step = (time.perf_counter() - self._since) / self._steps
        steps = steps_ahead(self._line, step)
        return max(1, min(steps, most())) if steps > 1 else 1

    def _write(
        self,
        event: Event,
        count: int,
        adaptive: bool,
        releases: Mapping[str, int],
        run: str | None,
    ) -> None:
        assert self.file is not None
        written = self._written
        at = len(written.ledger)
        start = time.perf_counter()
        self._filed = -1  # until the book has the charge too
        self.file.append(charge_row(event, count, at, run, adaptive, releases))
        written.add(event, count, adaptive, releases)
        if run is not None:
            written.runs.append((run, at))
        self._since = time.perf_counter()
        self._line = self._since - start
        self._steps = 0

    def _refile(self, book: Book) -> None:
        """Writes a book, of which this one is an earlier state, in the place of all that the file says."""
        if self.file is not None:
            if self.leads:
                run, *mine = self.book.place
                events, releases = map(min, mine, self._written.place[1:])
                # PRIVACY: a mark ahead of its file is refused, and a crash must not leave one
                # (test_a_crash_while_something_is_given_back_refuses_nothing)
                self.file.note((run, events, releases), safe=True)
            self.file.append(book.to_row())
            self._written = book.copy()
        self._filed = len(book.ledger)
        self._facts = _facts(book)

    def close(self) -> None:
        """Closes the file, after giving back what was charged ahead and not used."""
        if self.file is None:
            return
        try:
            # PRIVACY: only who has charged knows that no noise was drawn (test_a_forked_copy_gives_nothing_back)
            if self.leads and self.file.is_open and os.getpid() == self._process:
                self._refile(self.book)
        finally:
            self.file.close()

    def introduce(self) -> None:
        """Gives an empty file the name of its ledger, so that a checkpoint made now is known to go with it."""
        file = self.file
        if file and file.is_empty and file.is_open and os.getpid() == self._process:
            self.replace(self.book)

    @property
    def interrupted(self) -> bool:
        """Whether the file knows runs of earlier processes, and nothing was charged in this one."""
        return self._is_filed and bool(self.book.releases) and not self._charging

    @property
    def _is_filed(self) -> bool:
        return self.file is not None or self._follows

    def follow(self, name: str) -> None:
        """Notes that another process, which charges the same events, has the file of this ledger, with its name."""
        self.book.id = name
        self._follows = True
        self._brought = -1

    def continue_from(self, book: Book) -> Mapping[str, int]:
        """Returns the releases that are marked, if the file is a later state of a checkpoint's book.

        Raises:
            PrivacyError: a file of another ledger, or one that is older than the book; or no file, and not the
                accountant that the run has charged.
        """
        mine = self.book
        brought = len(book.ledger) <= max(self._brought, mine.config.get("brought", -1))
        # PRIVACY: only the run's own file, or its accountant in this process, knows what was released since; a rank
        # that has taken the book of rank 0's file over knows what that knows
        # (test_a_run_is_resumed_with_its_own_ledger_file_only, test_a_checkpoint_of_the_start_names_its_ledger)
        if book.id != mine.id or brought or not mine.knows(book):
            raise PrivacyError(
                "accountant must have the ledger file of the run, as new as its checkpoint (got"
                f" ledger {mine.id}, {len(mine.ledger)} events,"
                f" {'no file' if self.file is None else 'a file'}; the checkpoint has ledger"
                f" {book.id}, {len(book.ledger)} events): Accountant(budget, ledger_path=...), or in"
                " the same process the accountant that the run has charged. Without it nobody knows"
                " what was released after the checkpoint"
            )
        return dict(mine.releases)

    def require_own_process(self) -> None:
        """Raises PrivacyError in a forked copy."""
        if os.getpid() != self._process:
            # PRIVACY: a fork copies the noise stream too (test_a_forked_copy_cannot_spend_unseen_or_repeat_the_noise)
            raise PrivacyError(
                "an accountant must be charged in the process that made it: a forked copy would"
                " spend unseen and repeat the noise; make optimizer and accountant in the worker"
                " and bring their state_dict() back"
            )

    def load(self, book: Book) -> None:
        """Takes over a book of which this one is an earlier state, or keeps what it knows itself.

        Raises:
            PrivacyError: the two books have different histories, so that neither knows all charges.
        """
        mine = self.book
        if mine.knows(book):
            # a rolled-back run: what was charged since stays charged
            released = len(mine.ledger) - len(book.ledger)
            if released and self.file is not None:
                # PRIVACY: the file wins over the checkpoint (test_a_file_ahead_of_the_checkpoint_wins)
                warn(
                    f"ledger file {self.file.path!r} is {released} released events ahead of the"
                    " checkpoint: they were rolled back but stay charged, and the run repeats them"
                    " with fresh noise",
                    stacklevel=4,
                )
            return
        if not book.knows(mine):
            raise PrivacyError(
                "loading would forget events charged here: the two ledgers have different"
                " histories; load a checkpoint before the accountant is charged for anything else"
            )
        self._brought = len(book.ledger)
        if self.file is not None:
            # PRIVACY: the file, or the memory, that was charged after this state was made is another one
            # (test_a_file_that_was_filled_from_a_checkpoint_is_not_that_of_its_run,
            # test_a_ledger_in_memory_that_was_filled_from_a_checkpoint_is_not_that_of_its_run)
            book.config["brought"] = self._brought
        self.replace(book)

    def replace(self, book: Book) -> None:
        """Replaces the book by another, on the disk first."""
        self.require_own_process()
        self._refile(book)
        if self.file is not None:
            self.file.note(book.place)
        else:
            self._written = book
        self.book = book
        self._charging = False


def _facts(book: Book) -> dict[str, Any]:
    """Returns what is known besides the charges and their marks, which each have a line of their own."""
    return {name: value for name, value in book.config.items() if name != "adaptive"}


def open_journal(
    adjacency: Adjacency | None, unit: str, path: str | os.PathLike[str] | None, must_exist: bool
) -> Journal:
    """Returns an empty journal, or that of a ledger file."""
    book = Book(config={"adjacency": adjacency, "unit": unit})
    if path is None:
        if must_exist:
            raise ValueError("ledger_path must be given with must_exist=True (got None)")
        return Journal(book)
    file = LedgerFile(path, must_exist=must_exist)
    if file.is_empty:
        return Journal(book, file)
    known = file.book.config
    if known.get("unit") != unit or (
        adjacency is not None and known.get("adjacency") != adjacency
    ):
        file.close()
        raise ValueError(
            f"ledger file must be for {adjacency or 'any adjacency'} and the unit {unit!r} (got "
            f"{known.get('adjacency')!r} and {known.get('unit')!r} in {file.path!r})"
        )
    return Journal(file.book, file)


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
            "event must be planned before the first release: under mode 'planned' no output may"
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
                "the plan that was declared before the first release holds no more of what is asked for"
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
