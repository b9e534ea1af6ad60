"""The journal of an accountant: charges events to a book, on the disk first if it has a file, in only one process.

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
from typing import Any

from torch_dpsco.accounting.events import Adjacency, Event, Repeat
from torch_dpsco.accounting.ledger import NONE, OPEN, Book, Ledger, charge_row
from torch_dpsco.accounting.ledger_file import LedgerFile
from torch_dpsco.errors import PrivacyError, warn

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
        # (test_kill_between_the_disk_and_the_noise_over_counts_by_one)
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
        # (test_the_file_is_never_behind_whatever_is_charged)
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

    def continue_from(self, book: Book) -> Mapping[str, int]:
        """Returns the releases that are marked, if the file is a later state of a checkpoint's book.

        Raises:
            PrivacyError: no file, one of another ledger, or one that is older than the book.
        """
        mine = self.book
        brought = len(book.ledger) <= mine.config.get("brought", -1)
        # PRIVACY: only the run's own file knows what was released since; a rank that has taken the book of rank 0's
        # file over knows what that knows (test_a_run_is_resumed_with_its_own_ledger_file_only)
        if not self._is_filed or book.id != mine.id or brought or not mine.knows(book):
            raise PrivacyError(
                "accountant must have the ledger file of the run, as new as its checkpoint (got"
                f" ledger {mine.id}, {len(mine.ledger)} events,"
                f" {'no file' if self.file is None else 'a file'}; the checkpoint has ledger"
                f" {book.id}, {len(book.ledger)} events): Accountant(budget, ledger_path=...)."
                " Without it nobody knows what was released after the checkpoint"
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
        if self.file is not None:
            # PRIVACY: the file that was charged after this state was made is another one
            # (test_a_file_that_was_filled_from_a_checkpoint_is_not_that_of_its_run)
            book.config["brought"] = len(book.ledger)
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
