"""The journal: charges events to a book, on the disk first, in only one process."""

from __future__ import annotations

import os
import secrets
import warnings
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from torch_dpsco.accounting.book import MARKS, Book, charge_row
from torch_dpsco.accounting.events import ZERO_OUT, Adjacency, Event, Repeat
from torch_dpsco.accounting.ledger import Ledger
from torch_dpsco.accounting.ledger_file import LedgerFile
from torch_dpsco.errors import PrivacyError, UtilityWarning


class Note(NamedTuple):
    """What the ledger notes with a charge.

    Args:
        marks: facts, of `MARKS`.
        releases: of `Book.releases`.
        adjacency: default of queries from now on, if none is fixed yet.
    """

    marks: Collection[str] = ()
    releases: Mapping[str, int] = MappingProxyType({})
    adjacency: Adjacency = ZERO_OUT


NO_NOTE = Note()


class Journal:
    """An append-only book, and the file in which each charge is written first.

    Args:
        book: what is charged so far.
        file: write-ahead file, or None.
    """

    def __init__(self, book: Book, file: LedgerFile | None = None) -> None:
        self.book = book
        self.file = file
        self._filed = (
            len(book.ledger) if file is not None and not file.is_empty else -1
        )  # events that the file knows
        self._facts = _facts(book)  # and the facts, if it knows any events
        self._process = os.getpid()
        self._charging = False
        self._follows = False  # whether the file is another process's

    def charge(
        self,
        event: Event,
        count: int,
        note: Note = NO_NOTE,
    ) -> int:
        """Adds an event; returns how many simple events that are.

        Args:
            event: to be charged.
            count: how often.
            note: noted with it, its releases even if the event is empty.

        Raises:
            ValueError: bad event or count; nothing is changed.
            PrivacyError: another process than the one that made the journal, or the file could not be written.
        """
        self.require_own_process()
        ledger = self.book.ledger
        start = len(ledger)
        if self.file is not None or not self._charging:
            self._charge_first(event, count, note)
        # PRIVACY: on the disk before it is in the book, in the book before noise
        # (test_kill_between_the_disk_and_the_noise_over_counts_by_one)
        ledger.add(event, count)
        added = len(ledger) - start
        if note.marks and added:
            self.book.mark(note.marks, added)
        for run, number in note.releases.items():
            self.book.release(run, number)
        if (added or note.releases) and self.file is not None:
            self._filed = len(ledger)
            self.file.note(self.book.place)
        return added

    def _charge_first(self, event: Event, count: int, note: Note) -> None:
        """Names the run, and writes the charge ahead; does nothing for a charge of nothing."""
        # the whole event is checked here, before the file sees it
        if not len(Ledger([Repeat(event, count)])) and not note.releases:
            return
        at = len(self.book.ledger)
        run = None
        if not self._charging:
            # who charged, and from which event on: tells an earlier state of this ledger from another of equal counts
            run = secrets.token_hex(16)
        if self.file is not None:
            # PRIVACY: a suspicion too outlives a crash (test_a_suspicion_is_filed_with_the_next_charge)
            if (self._filed, self._facts) != (
                at,
                _facts(self.book),
            ):  # new file, new facts, a ledger added to by hand
                self.file.append(self.book.to_row())
            self._filed, self._facts = -1, _facts(self.book)  # until the book has the charge too
            self.file.append(charge_row(event, count, at, run, note.marks, note.releases))
        if run is not None:
            self.book.runs.append((run, at))
            self._charging = True

    def introduce(self) -> None:
        """Gives an empty file the name of its ledger, so that a checkpoint made now is known to go with it."""
        if self.file is not None and self.file.awaits_name and os.getpid() == self._process:
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
            self._tell_of_rollback(len(mine.ledger) - len(book.ledger))
            if book.config.get("suspicious"):
                mine.config["suspicious"] = True
            return  # a rolled-back run: what was charged since stays charged
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
        if self.file is not None:
            self.file.append(book.to_row())
            self.file.note(book.place)
        self.book = book
        self._charging = False
        self._filed = len(book.ledger)
        self._facts = _facts(book)

    def _tell_of_rollback(self, released: int) -> None:
        # PRIVACY: the file wins over the checkpoint (test_a_file_ahead_of_the_checkpoint_wins)
        if released and self.file is not None:
            warnings.warn(
                f"ledger file {self.file.path!r} is {released} released events ahead of the"
                " checkpoint: they were rolled back but stay charged, and the run repeats them"
                " with fresh noise",
                UtilityWarning,
                stacklevel=5,
            )


def _facts(book: Book) -> dict[str, Any]:
    """Returns what is known besides the charges and their marks, which each have a line of their own."""
    return {name: value for name, value in book.config.items() if name not in MARKS}


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
