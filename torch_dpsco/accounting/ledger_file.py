"""The ledger on disk: an append-only file of JSON lines, each on the disk before the noise that it pays for is drawn.

A killed process loses nothing: `LedgerFile.append` returns after fsync, and only then `Accountant.authorize` does. Each
line carries a digest of itself and of the lines before it. The digests find damage and slips, not forgers: who may
write the file may recompute them. A digest is 128 bits of SHA-256.

Lines are of two kinds. A *state* (the first line, and what a checkpoint that knew more has brought) replaces all before
it; a *charge* adds an event:

    {"config": {..}, "digest": "..", "ledger": [..], "runs": [..]}
    {"at": 7, "count": 1, "digest": "..", "event": {"type": ..}, "run": "..", "stepped": true}

`at` is the number of events before the line. `run` names a new process, in its first charge. Facts about a charge are
`book.MARKS`.

Source: spec accounting.md section 3 (resume rules a and b), architecture.md section 7.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
import weakref
from typing import Any

from torch_dpsco.accounting.book import Book, Row
from torch_dpsco.errors import PrivacyError, UtilityWarning

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows: no lock; a second writer is then found by the size of the file
    fcntl = None

__all__ = ["LedgerFile"]


class LedgerFile:
    """An append-only ledger file, locked against other writers while it is open.

    An existing file is read back and verified. A last line without its end was torn by a crash: then `authorize` had
    not returned and no noise was drawn for it. It is charged all the same, as a repetition of the charge before it.

    Args:
        path: of the file; made if it does not exist (its folder must).

    Raises:
        PrivacyError: another process or accountant has the file open, or a line is damaged.

    Guarantee:
        Every event for which `append` has returned is in the file, also after kill -9 or a power failure, as far as
        fsync keeps its promise. The file is never behind what was released.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        is_new = not os.path.exists(self.path)
        # not inherited by programs that are started; O_APPEND: no write can hit an earlier line
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_CLOEXEC", 0), 0o600)
        self._closer = weakref.finalize(self, os.close, self._fd)
        try:
            self._lock()
            self._size, self._digest, self._broken = 0, "", False
            self.book = self._read()
            if is_new:
                _sync_folder(self.path)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Closes and unlocks the file; a later `append` raises."""
        self._broken = True
        self._closer()

    def _lock(self) -> None:
        if fcntl is None:
            return
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            # PRIVACY: two writers would each see half of what is spent (test_a_second_writer_is_refused)
            raise PrivacyError(
                f"ledger file {self.path!r} is in use by another accountant or process (also a worker that has not "
                f"ended yet): two writers would each spend unseen by the other; close() the other one first"
            ) from error

    @property
    def is_empty(self) -> bool:
        """Whether nothing was ever written."""
        return self._size == 0

    # -- writing ------------------------------------------------------------------------------------------------------

    def append(self, row: Row) -> None:
        """Writes a line and waits until it is on the disk.

        Raises:
            PrivacyError: it could not be written for certain, or somebody else changed the file, or it is closed;
                nothing may be released for this line, nor charged to this file any more.
        """
        self._require_own()
        digest = _chained(self._digest, row)
        line = json.dumps(row | {"digest": digest}, sort_keys=True).encode() + b"\n"
        self._broken = True  # until the line is safe: after a failed fsync nobody knows what the disk holds
        try:
            _write(self._fd, line)
            os.fsync(self._fd)
        except OSError as error:
            raise PrivacyError(
                f"ledger file {self.path!r} could not be written ({error}): nothing more can be charged to it; make "
                f"room, then a new accountant on the same file"
            ) from error
        self._size, self._digest, self._broken = self._size + len(line), digest, False

    def _require_own(self) -> None:
        if self._broken:
            raise PrivacyError(f"ledger file {self.path!r} is closed or failed: make a new accountant on the same file")
        stat = os.fstat(self._fd)
        if stat.st_size != self._size or stat.st_nlink == 0:
            # PRIVACY: charges must not go to a file that is gone (test_a_file_deleted_or_changed_in_a_run_is_noticed)
            raise PrivacyError(
                f"ledger file {self.path!r} was changed or deleted by somebody else while in use: put it back as it was"
            )

    # -- reading ------------------------------------------------------------------------------------------------------

    def _read(self) -> Book:
        lines = _contents(self._fd).split(b"\n")
        torn, book, last = lines.pop(), Book(), None
        for number, line in enumerate(lines, start=1):
            row = self._verified(line)
            if row is None:
                raise PrivacyError(
                    f"line {number} of ledger file {self.path!r} is damaged or altered: what was spent is not known; "
                    f"restore the file from a copy"
                )
            book, last = self._follow(book, row, number)
            self._size += len(line) + 1
        if torn:
            self._mend(torn, book, last)
        return book

    def _verified(self, line: bytes) -> Row | None:
        """Returns the row of a line and moves the chain of digests on; None if the line is not what was written."""
        try:
            row = json.loads(line)
        except ValueError:
            return None
        if not isinstance(row, dict):
            return None
        digest = row.pop("digest", None)
        if digest != _chained(self._digest, row):
            return None
        self._digest = digest
        return row

    def _follow(self, book: Book, row: Row, number: int) -> tuple[Book, Row]:
        try:
            if "ledger" in row:
                return Book.from_row(row), row
            book.apply(row)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise PrivacyError(f"line {number} of ledger file {self.path!r} cannot be understood ({error})") from error
        return book, row

    def _mend(self, torn: bytes, book: Book, last: Row | None) -> None:
        """Replaces the torn end of the file by a line that charges at least as much."""
        os.ftruncate(self._fd, self._size)
        before = self._digest
        row = self._verified(torn)
        self._digest = before
        if row is None:
            # PRIVACY: over-counts, since authorize had not returned (test_a_torn_last_line_is_charged_and_told)
            if last is None or "event" not in last:
                os.fsync(self._fd)
                return  # no charge was ever completed
            row = {key: value for key, value in last.items() if key != "run"} | {"at": len(book.ledger)}
        self.append(row)
        if "ledger" in row:
            fresh = Book.from_row(row)
            book.ledger, book.runs, book.config = fresh.ledger, fresh.runs, fresh.config
        else:
            book.apply(row)
        warnings.warn(
            f"the last line of ledger file {self.path!r} was torn by a crash; it is charged although nothing was "
            f"released for it",
            UtilityWarning,
            stacklevel=2,
        )


def _chained(before: str, row: Row) -> str:
    return hashlib.sha256((before + json.dumps(row, sort_keys=True)).encode()).hexdigest()[:32]


def _write(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def _contents(fd: int) -> bytes:
    os.lseek(fd, 0, os.SEEK_SET)
    blocks = []
    while block := os.read(fd, 2**20):
        blocks.append(block)
    return b"".join(blocks)


def _sync_folder(path: str) -> None:
    """Makes the name of a new file survive a power failure, where folders can be opened."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    folder = os.open(os.path.dirname(os.path.abspath(path)), os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
