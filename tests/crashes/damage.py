"""Damage of ledger files, and who else opens them: python -m tests.crashes.damage [--every N] prints a table.

Each try damages a ledger file of four charges, or the mark beside it, and opens it. It may know all charges, or be
refused by a `PrivacyError` that names a file; nothing is written by what was refused.

    under-charged   it opened with fewer charges than were made
    not resumable   it was refused, and changed, so that it does not open when the damage is mended
    unclear         another error, or none that names a file
"""

from __future__ import annotations

import argparse
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import torch_dpsco as dp
from tests.accounting.ledgers import STEP, WHOLE, part
from torch_dpsco.errors import PrivacyError, UtilityWarning

HEADER = 512
EVENTS = 5  # of the file; an empty charge among them
Files = tuple[bytes, bytes | None]  # of the ledger and the mark; None is deleted


@dataclass
class Count:
    """What was seen of a kind of damage."""

    tries: int = 0
    opened: int = 0
    under_charged: int = 0
    not_resumable: int = 0
    unclear: int = 0


class Ledger:
    """A ledger file in a folder, whole at first."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "ledger"
        self.mark = folder / "ledger.mark"
        self.older: list[Files] = []
        accountant = dp.Accountant(ledger_path=self.path)
        for event in (STEP, WHOLE, STEP, STEP, part("0")):
            self.older.append(self.files)
            accountant.authorize(event)
        accountant.close()
        self.whole = self.files

    @property
    def files(self) -> Files:
        """What the two files hold."""
        return self.path.read_bytes(), self.mark.read_bytes() if self.mark.exists() else None

    def put(self, files: Files) -> None:
        """Writes both, or deletes the mark."""
        content, mark = files
        self.path.write_bytes(content)
        if mark is None:
            self.mark.unlink(missing_ok=True)
        else:
            self.mark.write_bytes(mark)

    def open(self) -> int:
        """Returns the number of charges that a new accountant knows."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UtilityWarning)
            accountant = dp.Accountant(ledger_path=self.path)
        accountant.close()
        return len(accountant)

    def attempt(self, files: Files, count: Count) -> None:
        """Opens damaged files, and counts what is wrong."""
        self.put(files)
        count.tries += 1
        try:
            known = self.open()
            count.opened += 1
            count.under_charged += known < EVENTS
        except PrivacyError as error:
            count.unclear += str(self.path) not in str(error)
            count.not_resumable += self.files != files
        except Exception:
            count.unclear += 1
        self.put(self.whole)
        count.not_resumable += self.open() < EVENTS
        self.put(self.whole)


def flipped(content: bytes, bit: int) -> bytes:
    """Returns the content with one bit turned over."""
    place, power = divmod(bit, 8)
    return content[:place] + bytes([content[place] ^ 1 << power]) + content[place + 1 :]


def flips(ledger: Ledger, every: int, which: int, mark: bool = True) -> Iterator[Files]:
    """Yields the files with one bit turned over in the ledger (0) or the mark (1)."""
    files = ledger.whole if mark else (ledger.whole[0], None)
    content = files[which]
    assert content is not None
    for bit in range(0, 8 * len(content), every):
        damaged = flipped(content, bit)
        yield (damaged, files[1]) if which == 0 else (files[0], damaged)


def cuts(ledger: Ledger, which: int, mark: bool = True) -> Iterator[Files]:
    """Yields the files with one of them cut anywhere."""
    content, beside = ledger.whole
    assert beside is not None
    least = 0 if mark else 1  # an empty file without a mark is a new one
    for size in range(least, len(content) if which == 0 else len(beside)):
        yield (
            (content[:size], beside if mark else None)
            if which == 0
            else (content, beside[:size])
        )


def both_gone(ledger: Ledger) -> Iterator[Files]:
    """Yields what nothing tells from a ledger that knows less: the mark gone, and the file emptied or an older copy."""
    yield b"", None
    for content, _ in ledger.older:
        yield content, None


def together(ledger: Ledger) -> Iterator[Files]:
    """Yields older copies of both files."""
    yield from ledger.older[1:]


def kinds(every: int) -> dict[str, Callable[[Ledger], Iterator[Files]]]:
    """Returns the kinds of damage by name."""
    return {
        "a bit of the file": lambda ledger: flips(ledger, every, 0),
        "a bit of the file, no mark": lambda ledger: flips(ledger, every, 0, mark=False),
        "a bit of the mark": lambda ledger: flips(ledger, every, 1),
        "the file cut": lambda ledger: cuts(ledger, 0),
        "the file cut, no mark": lambda ledger: cuts(ledger, 0, mark=False),
        "the mark cut": lambda ledger: cuts(ledger, 1),
        "no mark": lambda ledger: iter([(ledger.whole[0], None)]),
        "an older copy": lambda ledger: ((old, ledger.whole[1]) for old, _ in ledger.older),
        "an older mark": lambda ledger: ((ledger.whole[0], mark) for _, mark in ledger.older),
        "DOCUMENTED: no mark, and emptied or an older copy": both_gone,
        "DOCUMENTED: an older copy of both": together,
    }


def others(ledger: Ledger, count: Count, user: int | None) -> None:
    """Opens the file, which is open here, in another process, as another user perhaps, ten times."""
    accountant = dp.Accountant(ledger_path=ledger.path) if user is None else None
    for _ in range(10):
        count.tries += 1
        if (child := os.fork()) == 0:
            try:
                if user is not None:
                    os.setgroups([])
                    os.setgid(user)
                    os.setuid(user)
                ledger.open()
                os._exit(0)
            except PrivacyError as error:
                os._exit(1 if str(ledger.path) in str(error) else 2)
            except BaseException:
                os._exit(2)
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        count.opened += ended == 0
        count.unclear += ended not in (0, 1)
    if accountant is not None:
        accountant.close()
    count.under_charged += ledger.open() < EVENTS


def main(every: int) -> dict[str, Count]:
    """Returns what was counted of each kind of damage, after printing it."""
    os.fsync = lambda fd: None  # for speed
    counts: dict[str, Count] = {}
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        ledger = Ledger(Path(folder))
        for name, made in kinds(every).items():
            count = counts[name] = Count()
            for files in made(ledger):
                ledger.attempt(files, count)
            tell(name, count)
        for name, user in (("another process", None), ("another OS user", 4003)):
            if user is None or os.getuid() == 0:
                count = counts[name] = Count()
                others(ledger, count, user)
                tell(name, count)
    return counts


def tell(name: str, count: Count) -> None:
    """Prints a row."""
    print(
        name,
        *(f"{f.name} {getattr(count, f.name)}" for f in fields(Count)),
        sep="  ",
        flush=True,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--every", type=int, default=1, help="of how many bits one is turned over"
    )
    main(parser.parse_args().every)
