"""The high-water mark of a ledger file: how far it has come, in a small file beside it.

A ledger file that was cut at the end of a line, or replaced by an older copy, is a valid ledger file. The mark tells it
from the right one: it names the last run that charged, the number of events, and the number of marked releases.

Order: the line of a charge is on the disk, then the mark is written, then the noise is drawn. So the mark is never
ahead of the file: a crash between the two leaves a file that is one charge further than its mark, which is no error,
and for that charge nothing was released. The mark is one write in place of less than a sector, complete or not made,
whoever is killed; it is forced to the disk when the file is opened. So a power failure may leave a mark of some seconds
ago, which refuses nothing that is right.

Not seen: file and mark put back together, or both deleted.
"""

from __future__ import annotations

import json
import os
from hashlib import sha256

from torch_dpsco import _validate as check
from torch_dpsco.accounting.book import Place
from torch_dpsco.errors import PrivacyError

_SIZE = 256  # bytes: written at once, within one sector


class HighWater:
    """The mark beside a ledger file, written by who holds the lock of that file.

    Args:
        path: of the ledger file.
    """

    def __init__(self, path: str) -> None:
        self.path = f"{os.path.realpath(path)}.mark"
        self._fd = -1

    def read(self) -> Place | None:
        """Returns how far the ledger file had come; None without a mark.

        Raises:
            PrivacyError: it is not what was written.
        """
        try:
            with open(self.path, "rb") as file:
                content = file.read()
        except FileNotFoundError:
            return None
        if not content:
            return None  # a crash between its making and its first write
        try:
            row = json.loads(content)
            place = str(row["run"]), check.count(events=row["events"]), check.count(releases=row["releases"])
            if content != _content(place):
                raise ValueError("it was altered")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise PrivacyError(
                f"mark {self.path!r} of the ledger file is damaged ({type(error).__name__}): how much was spent is not "
                f"known for certain; delete the mark only if the ledger file is known to be the newest one"
            ) from error
        return place

    def write(self, place: Place, *, safe: bool = False) -> None:
        """Moves the mark.

        Args:
            place: how far the ledger file has come, on the disk.
            safe: wait until the mark is on the disk too.
        """
        if self._fd < 0:
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o600)
        os.lseek(self._fd, 0, os.SEEK_SET)
        os.write(self._fd, _content(place))
        if safe:
            os.fsync(self._fd)

    @property
    def is_named(self) -> bool:
        """Whether the file that is written, if any, is the one that others find under its name."""
        try:
            return self._fd < 0 or os.path.samestat(os.fstat(self._fd), os.stat(self.path))
        except OSError:
            return False

    def close(self) -> None:
        """Lets go of the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _content(place: Place) -> bytes:
    row = dict(zip(("run", "events", "releases"), place, strict=True))
    text = json.dumps(row | {"digest": sha256(repr(place).encode()).hexdigest()[:32]})
    return text.ljust(_SIZE - 1).encode() + b"\n"
