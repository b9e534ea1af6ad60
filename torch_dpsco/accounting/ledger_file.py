"""The ledger on disk: a header, JSON lines that are only added to, and the mark beside it; both record its progress.

Lines that were cut at the end of one, or replaced by an older copy, are valid lines. The mark, a small file `.mark`,
tells them from the right ones: it names the last run that charged, the number of events, and the number of marked
releases. The header of the file says the same, for a file whose mark is gone.

Order: the line of a charge is on the disk, then mark and header are written, then the noise is drawn. So they are never
ahead of the lines: a crash between the two leaves a file that is one charge further than its mark, which is no error,
and for that charge nothing was released. Each is one write in place of less than a sector, complete or not made,
whoever is killed, and the one before it stays in the other of two slots; both are forced to the disk when the file is
opened. So a power failure may leave a mark of some seconds ago, which refuses nothing that is right. Not noticed: file
and mark restored together, or an older copy of the file whose mark was deleted.

A killed process loses nothing: `LedgerFile.append` returns after fsync, and only then `Accountant.authorize` does. Each
line carries a digest of itself and of the lines before it. The digests find damage and slips, not forgers: who may
write the file may recompute them. A digest is 128 bits of SHA-256.

Lines are of two kinds. A *state* (the first line, and what a checkpoint that knew more has brought) replaces all before
it; a *charge* adds an event:

    {"config": {..}, "digest": "..", "ledger": [..], "runs": [..]}
    {"at": 7, "count": 1, "digest": "..", "event": {"type": ..}, "run": "..", "adaptive": true}

`at` is the number of events before the line. `run` names a new process, in its first charge. `adaptive` says that the
parameters were chosen from what was released before. `releases` names the run of an optimizer, and how many releases it
may have made once the line is there.
"""

from __future__ import annotations

import json
import os
import stat
import warnings
import weakref
from collections.abc import Callable
from hashlib import sha256
from itertools import chain
from typing import Any, BinaryIO, NoReturn

from torch_dpsco import _validate as check
from torch_dpsco.accounting.ledger import Book, Place, Row
from torch_dpsco.errors import PrivacyError, UtilityWarning

_SUFFIX = ".mark"
Slot = tuple[int, Place]  # the number of a write, and what it says
_NOWHERE: Slot = (0, ("", 0, 0))
_SIZE = 256  # bytes of a slot: written at once, within one sector
_HEADER = 2 * _SIZE
_BLANK = b" " * (_SIZE - 1) + b"\n"  # a slot before its first write
_BUFFER = 1 << 20  # bytes
_DIGEST = b', "digest": "'
_REST = 33  # characters of a digest, and the quotation mark after it
_BINARY = getattr(os, "O_BINARY", 0)  # Windows: else each line end would be written as two bytes


class HighWater:
    """The mark beside a ledger file, and the header in it, written by the holder of that file's lock.

    Both have two slots, written in turn, so that a write that is torn leaves the one before.

    Args:
        path: of the ledger file.
    """

    def __init__(self, path: str) -> None:
        self._ledger = os.path.realpath(path)
        self.path = f"{self._ledger}{_SUFFIX}"
        self._fds: list[int] = []  # of both
        self.number = 0  # of the last write, which says the slot

    def read(self) -> Slot | None:
        """Returns how far the ledger file had come, as the mark says; None without a mark.

        Raises:
            PrivacyError: it is not what was written.
        """
        try:
            with open(self.path, "rb") as file:
                content = file.read()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise PrivacyError(
                f"mark {self.path!r} of the ledger file cannot be read ({error}): how much was"
                " spent is not known for certain; give this user the rights that the ledger file"
                " has"
            ) from error
        if not content.strip():
            return None  # a crash between its making and its first write
        found = later(content)
        if not found[0] and _BLANK not in content:  # no torn first write
            raise PrivacyError(
                f"mark {self.path!r} of the ledger file is damaged: how much was spent is not known"
                " for certain; delete the mark only if the ledger file is known to be the newest one"
            )
        return found

    def write(self, place: Place, safe: bool) -> None:
        """Moves the mark, and the header.

        Args:
            place: how far the ledger file has come, on the disk.
            safe: wait until both are on the disk too.
        """
        if not self._fds:
            self._open()
        number = self.number + 1
        content = _content(number, place)
        for fd in self._fds:
            os.lseek(fd, number % 2 * _SIZE, os.SEEK_SET)
            _write(fd, content)
            if safe:
                os.fsync(fd)
        self.number = number

    def _open(self) -> None:
        """Opens both; a new mark gets the mode and group of the ledger file: who may charge must be able to move it."""
        for path in (self.path, self._ledger):
            self._fds.append(os.open(path, os.O_RDWR | os.O_CREAT | _BINARY, 0o600))
        mark, ledger = self._fds
        if os.fstat(mark).st_size >= _HEADER:
            return
        if hasattr(os, "fchown"):  # not on Windows
            status = os.fstat(ledger)
            os.fchown(mark, -1, status.st_gid)
            os.fchmod(mark, stat.S_IMODE(status.st_mode))
        _write(mark, 2 * _BLANK)

    @property
    def is_named(self) -> bool:
        """Whether the files that are written, if any, are those that others find under their names."""
        paths = (self.path, self._ledger)
        try:
            return all(
                os.path.samestat(os.fstat(fd), os.stat(path))
                for fd, path in zip(self._fds, paths, strict=False)
            )
        except OSError:
            return False

    def close(self) -> None:
        """Lets go of the files."""
        while self._fds:
            os.close(self._fds.pop())


def later(content: bytes) -> Slot:
    """Returns the later of two slots."""
    # PRIVACY: which may be the lower one (test_a_torn_write_of_the_mark_leaves_the_one_before)
    return max(_slot(content[:_SIZE]), _slot(content[_SIZE:_HEADER]))


def _content(number: int, place: Place) -> bytes:
    row = dict(zip(("run", "events", "releases"), place, strict=True)) | {"number": number}
    digest = sha256(repr((number, place)).encode()).hexdigest()[:32]
    return json.dumps(row | {"digest": digest}).ljust(_SIZE - 1).encode() + b"\n"


def _slot(content: bytes) -> Slot:
    """Returns the number and place of a slot; 0 and nowhere if it is not what was written."""
    try:
        row = json.loads(content)
        place = (
            str(row["run"]),
            check.count(events=row["events"]),
            check.count(releases=row["releases"]),
        )
        number = check.count(number=row["number"])
        return (number, place) if content == _content(number, place) else _NOWHERE
    except (ValueError, KeyError, TypeError, RecursionError):
        return _NOWHERE


fcntl: Any
msvcrt: Any
try:
    import fcntl
except ImportError:  # Windows
    import msvcrt

    fcntl = None

_FAR = (
    1 << 40
)  # the byte that is locked on Windows, where no other process may read a locked one
# O_APPEND: no write can hit an earlier line
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_APPEND | _BINARY


class LedgerFile:
    """An append-only ledger file, locked against other writers while it is open.

    An existing file is read back and verified. A last line without its end was torn by a crash: then `authorize` had
    not returned and no noise was drawn for it, so that it is dropped; not without a mark, where nobody knows that.

    Args:
        path: of the file; made if it does not exist (its folder must).
        must_exist: refuse to make it.

    Raises:
        PrivacyError: another process or accountant has the file open, a line is damaged, lines are missing that its
            mark knows of, or it cannot be opened for reading and writing.

    Guarantee:
        Every event for which `append` has returned is in the file, also after kill -9 or a power failure, as far as
        fsync keeps its promise. The file is never behind what was released.
    """

    def __init__(self, path: str | os.PathLike[str], *, must_exist: bool = False) -> None:
        self.path = os.fspath(path)
        self._mark = HighWater(self.path)
        # PRIVACY: a new file in the place of a lost one knows of no charge (test_a_lost_file_is_not_made_anew)
        if not os.path.exists(self.path) and (
            must_exist or (self._mark.read() or _NOWHERE)[1] != _NOWHERE[1]
        ):
            reason = (
                "must_exist=True"
                if must_exist
                else f"its mark {self._mark.path!r} knows of charges"
            )
            raise PrivacyError(
                f"ledger file {self.path!r} must exist ({reason}): restore it, or name the right"
                " file"
            )
        try:
            self._fd = _opened(self.path)
        except OSError as error:
            raise PrivacyError(
                f"ledger file {self.path!r} cannot be opened for reading and writing ({error}):"
                " without it nothing can be charged; name a file that this user may read and write,"
                " in a folder that exists, on a disk that can be written"
            ) from error
        self._closer = weakref.finalize(self, os.close, self._fd)
        self._mark_closer = weakref.finalize(self, self._mark.close)
        self._size = 0
        self._digest = ""
        self.is_open = True  # not closed, and no writing has failed
        try:
            self.book = self._read(self._mark.read())
            if not self._size:
                os.ftruncate(self._fd, 0)
                self._sync(lambda: _write(self._fd, 2 * _BLANK))
                self._size = _HEADER
            # PRIVACY: with the header a line that was dropped is off the disk
            # (test_a_dropped_line_is_off_the_disk_before_anything_is_charged)
            self.note(self.book.place, safe=True)
            # PRIVACY: the name too must survive, whoever made or moved the file before it could see to that
            # (test_the_name_of_the_file_is_on_the_disk_before_anything_is_charged)
            self._sync(lambda: sync_folder(os.path.realpath(self.path)))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Closes and unlocks the file; a later `append` raises."""
        self.is_open = False
        self._mark_closer()
        self._closer()

    @property
    def is_empty(self) -> bool:
        """Whether nothing was ever written."""
        return self._size <= _HEADER

    # -- writing ------------------------------------------------------------------------------------------------------

    def append(self, row: Row) -> None:
        """Writes a line and waits until it is on the disk.

        Raises:
            PrivacyError: it could not be written for certain, or somebody else changed the file, or it is closed;
                nothing may be released for this line, nor charged to this file any more.
        """
        self.require_own()
        line, digest = _line(self._digest, row)
        size = self._size + len(line)

        def put() -> None:
            _write(self._fd, line)
            os.fsync(self._fd)
            self._size, self._digest = size, digest

        self._sync(put)

    def note(self, place: Place, *, safe: bool = False) -> None:
        """Notes in the mark how far the book has come whose lines were appended; before anything is released.

        Args:
            place: of the book.
            safe: wait until the mark is on the disk too.

        Raises:
            PrivacyError: it could not be written.
        """
        self._sync(lambda: self._mark.write(place, safe))

    def _sync(self, put: Callable[[], None]) -> None:
        try:
            self.is_open = (
                False  # until it is safe: after a failed fsync nobody knows what the disk holds
            )
            put()
            self.is_open = True
        except OSError as error:
            raise PrivacyError(
                f"ledger file {self.path!r} could not be written ({error}): nothing more can be"
                " charged to it; make room, then a new accountant on the same file"
            ) from error
        except BaseException:
            # PRIVACY: no charge was granted, and the next line continues the one before
            # (test_ctrl_c_while_a_line_is_written_takes_it_back)
            os.ftruncate(self._fd, self._size)
            self.is_open = True
            raise

    def require_own(self) -> None:
        """Raises PrivacyError if the file is closed or failed, or is not as it was left, under its name."""
        if not self.is_open:
            raise PrivacyError(
                f"ledger file {self.path!r} is closed or failed: make a new accountant on the same"
                " file"
            )
        now = os.fstat(self._fd)
        try:
            named = os.path.samestat(now, os.stat(self.path)) and self._mark.is_named
        except OSError:
            named = False
        if now.st_size != self._size or not named:
            # PRIVACY: charges must not go to a file that is gone, or that others do not find under its name
            # (test_a_file_deleted_moved_or_changed_in_a_run_is_noticed)
            raise PrivacyError(
                f"ledger file {self.path!r} was changed, moved or deleted by somebody else while in"
                " use, or its mark was: restore it unchanged"
            )

    # -- reading ------------------------------------------------------------------------------------------------------

    def _read(self, marked: Slot | None) -> Book:
        os.lseek(self._fd, 0, os.SEEK_SET)
        with open(self._fd, "rb", _BUFFER, closefd=False) as file:
            header = file.read(_HEADER)
            known = later(header)
            self._size = len(header) // _HEADER * _HEADER
            # PRIVACY: it knows nothing (test_every_cut_of_a_file_without_a_mark_is_refused)
            if self._size and header.strip() and marked is None and known == _NOWHERE:
                self._refuse("the header")
            book, torn = self._follow_all(file)
        torn = torn or header[self._size :].strip()
        if torn and marked is None:
            # PRIVACY: only the mark tells that nothing was released for it (test_a_torn_line_without_a_mark_is_refused)
            raise PrivacyError(
                f"ledger file {self.path!r} must end with a line that a ledger wrote, or have its mark beside it (got"
                " another end, and no mark): nothing of it was changed; restore both, or name another file"
            )
        self._mark.number = max(known, marked or _NOWHERE)[0]
        self._require_all(book, known, marked)
        return self._mend(torn, book) if torn else book

    def _follow_all(self, file: BinaryIO) -> tuple[Book, bytes]:
        """Returns the book of all complete lines, and what is behind them."""
        book = Book()
        series: _Series | None = None
        for number, line in enumerate(chain(file, [b""]), start=3):  # behind the header's two
            if series is not None and (digest := series.take(self._digest, line)):
                self._digest = digest
                self._size += len(line)
                continue
            if series is not None and series.row["count"]:
                book = self._follow(book, series.row, number)
            if not line.endswith(b"\n"):
                break
            row = self._verified(line[:-1])
            if row is None:
                self._refuse(f"line {number}")
            book = self._follow(book, row, number)
            self._size += len(line)
            series = _Series(row, line) if "event" in row and "run" not in row else None
        return book, line

    def _refuse(self, what: str) -> NoReturn:
        raise PrivacyError(
            f"{what} of ledger file {self.path!r} is damaged or altered: what was"
            " spent is not known; restore the file from a copy, or name the right file"
        )

    def _require_all(self, book: Book, known: Slot, marked: Slot | None) -> None:
        """Raises PrivacyError if header or mark know of more than the complete lines; warns without a mark."""
        for _, place in (known, marked or known):
            # PRIVACY: each of them (test_every_cut_of_a_file_opens_with_all_charges_or_is_refused,
            # test_every_cut_of_a_file_without_a_mark_is_refused)
            if not book.reaches(place):
                raise PrivacyError(
                    f"ledger file {self.path!r} must hold {place[1]} events of its last run, as its header or its"
                    f" mark {self._mark.path!r} says (got {len(book.ledger)}): it was cut, emptied, or"
                    " replaced by an older copy or another ledger; put the newest one back"
                )
        if marked is None and len(book.ledger):
            warnings.warn(
                f"ledger file {self.path!r} has no mark {self._mark.path!r} (it was copied "
                "without): whether it is the newest copy is not known",
                UtilityWarning,
                stacklevel=2,
            )

    def _verified(self, line: bytes) -> Row | None:
        """Returns the row of a line and moves the chain of digests on; None if the line is not what was written."""
        try:
            row: Row = json.loads(line)
            digest = row.pop("digest")
        # no JSON, none of ours, or nested without end
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None
        # PRIVACY: (test_a_damaged_line_is_refused)
        if digest != _chained(self._digest, row):
            return None
        self._digest = digest
        return row

    def _follow(self, book: Book, row: Row, number: int) -> Book:
        try:
            if "ledger" in row:
                return Book.from_row(row)
            book.apply(row)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise PrivacyError(
                f"line {number} of ledger file {self.path!r} cannot be understood ({error})"
            ) from error
        return book

    def _mend(self, torn: bytes, book: Book) -> Book:
        """Ends a torn line that is complete, drops another one."""
        self._sync(lambda: os.ftruncate(self._fd, self._size))
        before = self._digest
        row = self._verified(torn)
        self._digest = before
        if row is None:
            self._tell_of_torn(
                "is dropped: it was not complete, so that nothing was released for it"
            )
            return book
        whole = json.loads(torn)
        del whole["digest"]
        self.append(whole)
        self._tell_of_torn("is charged although nothing was released for it")
        return self._follow(book, row, number=0)

    def _tell_of_torn(self, what: str) -> None:
        warnings.warn(
            f"the last line of ledger file {self.path!r} was torn by a crash; it {what}",
            UtilityWarning,
            stacklevel=2,
        )


class _Series:
    """Lines that charge the same as the line before, each in its place: what they charge together is one row.

    Args:
        row: of the first charge.
        line: its line.
    """

    def __init__(self, row: Row, line: bytes) -> None:
        self._count = row["count"]
        made = row.get("releases", {})
        self._run = max(made, default="")  # whose mark the line ends with
        end = line[:-1].partition(_DIGEST)[2][_REST:]
        self._end = end.removesuffix(b"%d}}" % made[self._run]) if made else end
        self.row = row | {"at": row["at"] + self._count, "count": 0, "releases": dict(made)}

    def take(self, before: str, line: bytes) -> str:
        """Adds a line that is the next one, and returns its digest; "" for others."""
        start = b'{"at": %d, "count": %d' % (self.row["at"] + self.row["count"], self._count)
        end = self._end
        if self._run:
            made = self.row["releases"][self._run] + self._count
            end += b"%d}}" % made
        digest = sha256(before.encode() + start + end).hexdigest()[:32]
        if line != start + _DIGEST + digest.encode() + b'"' + end + b"\n":
            return ""
        self.row["count"] += self._count
        if self._run:
            self.row["releases"][self._run] = made
        return digest


class LedgerCopy(LedgerFile):
    """A ledger file as it is now, also that of a run which goes on: nothing is locked, mended or written.

    Args:
        path: of the file.

    Raises:
        PrivacyError: as `LedgerFile`; also where the last line has no end.
        OSError: it cannot be read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._mark = HighWater(self.path)
        self._size = 0
        self._digest = ""
        self.is_open = False
        marked = self._mark.read()  # before the lines: a mark is never ahead of them
        self._fd = os.open(self.path, os.O_RDONLY | _BINARY)
        try:
            self.book = self._read(marked)
        finally:
            os.close(self._fd)

    def _mend(self, torn: bytes, book: Book) -> Book:
        raise PrivacyError(
            f"the last line of ledger file {self.path!r} has no end: it is being written, or was"
            " torn by a crash; an accountant on the file mends it"
        )


def _opened(path: str) -> int:
    """Opens and locks the file of that name; while the lock was not yet held, another may have taken its place."""
    while True:
        fd = os.open(path, _FLAGS, 0o600)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise OSError("not a regular file")
            _lock(fd, path)
            # PRIVACY: a file without its name is not the one that others read
            # (test_a_file_that_lost_its_name_before_it_was_locked_is_not_the_ledger)
            if os.path.exists(path) and os.path.samestat(os.fstat(fd), os.stat(path)):
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def _lock(fd: int, path: str) -> None:
    """Locks a file until it is closed; raises PrivacyError if another descriptor has locked it."""
    try:
        if fcntl is not None:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        else:
            os.lseek(fd, _FAR, os.SEEK_SET)
            msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)
    except (BlockingIOError, PermissionError) as error:
        # PRIVACY: two writers would each see half of what is spent (test_a_second_writer_is_refused)
        raise PrivacyError(
            f"ledger file {path!r} is in use by another accountant or process (also a worker that"
            " has not ended yet): two writers would each spend unseen by the other; close() the"
            " other one first"
        ) from error


def _line(before: str, row: Row) -> tuple[bytes, str]:
    """Returns the line of a row, and its digest, which the next line continues."""
    digest = _chained(before, row)
    return json.dumps(row | {"digest": digest}, sort_keys=True).encode() + b"\n", digest


def _chained(before: str, row: Row) -> str:
    return sha256((before + json.dumps(row, sort_keys=True)).encode()).hexdigest()[:32]


def _write(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def sync_folder(path: str) -> None:
    """Makes the name of a new file survive a power failure, where folders can be opened."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    folder = os.open(os.path.dirname(os.path.abspath(path)), os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
