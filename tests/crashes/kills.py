"""Kills at every call that writes: python -m tests.crashes.kills [--how HOW] [--tries N] [KIND ...] prints a table.

A process that has imported everything forks. The child runs a script and dies before one of its calls that write, sync,
make, rename or cut a file, or after half of what it writes; other children run the same script and die somewhere else,
up to three times; the last one is left alone. The first death walks through all moments of a run, one after another.
Each child publishes what it is charged, releases and shows, and what it is warned of. HOW is one of

    kill        SIGKILL
    full        from this moment on the disk is full
    interrupt   Ctrl-C, at any time of a run in place of a call

    under-charged   something was released or shown that the ledger does not hold at the end, or twice under one charge
    not resumable   the last run does not end with its answer, as planned, within its budget
    unclear         a run ends with an error that is none of ours, or loses steps without a word
"""

from __future__ import annotations

import argparse
import errno
import itertools
import json
import os
import random
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch

import torch_dpsco as dp
from tests.crashes import paid, runs
from torch_dpsco.accounting import journal
from torch_dpsco.accounting.ledger_file import LedgerCopy
from torch_dpsco.errors import DpscoError

CALLS = ("write", "fsync", "replace", "unlink", "ftruncate", "open", "fchmod")
DEATHS = 4  # of a script, at most
_open = os.open
_write = os.write


@dataclass
class Count:
    """What was seen of a kind of run."""

    moments: int = 0
    tries: int = 0
    under_charged: int = 0
    not_resumable: int = 0
    unclear: int = 0


class Deadly:
    """Calls of `os` that write; the process dies at one moment of them, the `at`-th."""

    def __init__(self, at: int) -> None:
        self._left = at
        for name in CALLS:
            setattr(os, name, self._counted(name, getattr(os, name)))

    def _counted(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            reads = name == "open" and not args[1] & os.O_CREAT
            if not reads:
                self._pass()
            if name == "write" and self._left == 0:
                real(args[0], args[1][: len(args[1]) // 2])
            if name == "write":
                self._pass()
            return real(*args, **options)

        return call

    def _pass(self) -> None:
        if self._left <= 0:
            self._end()
        self._left -= 1

    def _end(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Full(Deadly):
    """As if the disk were full from a moment on."""

    def _end(self) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Interrupted:
    """Raises KeyboardInterrupt, as Ctrl-C does, at a time that a moment stands for."""

    seconds = 0.01  # that a moment takes

    def __init__(self, at: int) -> None:
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, self.seconds * (at + random.random()) or 1e-6)


FAULTS: dict[str, Callable[[int], Any]] = {
    "kill": Deadly,
    "full": Full,
    "interrupt": Interrupted,
}


class Output:
    """What the children of one chain publish."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "published"

    def add(self, **row: Any) -> None:
        """Adds a line, which no moment of a kill is in."""
        fd = _open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        _write(fd, json.dumps(row).encode() + b"\n")
        os.close(fd)

    def all(self, name: str) -> list[Any]:
        """Returns the values of a name."""
        text = self.path.read_text() if self.path.exists() else ""
        rows = map(json.loads, text.splitlines())
        return [row[name] for row in rows if name in row]


def child(script: Callable[[Path], None], folder: Path, fault: Callable[[], Any]) -> int:
    """Returns how a child ended that runs a script with a fault: 0, 1 after an error, or minus the signal."""
    number = os.fork()
    if number:
        return os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])
    output = Output(folder)
    try:
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *_, **__: output.add(warned=str(message))
        fault()
        script(folder)
        os._exit(0)
    except BaseException as error:
        ours = isinstance(error, (DpscoError, KeyboardInterrupt)) or "No space" in str(error)
        output.add(error=traceback.format_exc(), ours=ours)
        os._exit(1)


def chain(kind: Kind, how: str, first: int, dice: random.Random, count: Count) -> bool:
    """Ends a script some times, the first time at one moment; returns whether it came so far. Counts what is wrong."""
    wrong = (count.under_charged, count.not_resumable, count.unclear)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        at = first
        deaths = 0
        while deaths < DEATHS and child(kind.run, folder, partial(FAULTS[how], at)) != 0:
            deaths += 1
            at = dice.randrange(count.moments or 60)
        count.tries += deaths
        output = Output(folder)
        # also where it has ended: what was shown is shown again
        count.not_resumable += child(kind.run, folder, lambda: None) != 0
        count.unclear += not all(output.all("ours"))
        kind.check(folder, output, count)
        if wrong != (count.under_charged, count.not_resumable, count.unclear):
            print(
                kind.name,
                first,
                *output.all("error"),
                *output.all("warned"),
                sep="\n",
                flush=True,
            )
        return deaths > 0


class Kind:
    """A script, and what must be true of all that its runs have published."""

    def __init__(self, name: str) -> None:
        self.name = name

    def run(self, folder: Path) -> None:
        """The script."""
        raise NotImplementedError

    def check(self, folder: Path, output: Output, count: Count) -> None:
        """Counts what is wrong."""
        raise NotImplementedError


class Trained(Kind):
    """An optimizer with a checkpoint."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.case = runs.CASES[name]
        self.case.build(
            self.case.model().parameters(), dp.Accountant(self.case.budget)
        )  # plans are remembered

    def run(self, folder: Path) -> None:
        """As `runs.train`."""
        runs.Watcher(folder, None)
        optimizer, accountant = runs.train(self.case, folder)
        finished = (
            optimizer.finalized
            and accountant.get_epsilon(self.case.budget.delta) <= self.case.budget.epsilon
        )
        Output(folder).add(finished=finished, steps=optimizer.steps, run=optimizer.run)

    def check(self, folder: Path, output: Output, count: Count) -> None:
        """No step is released twice, or without its mark; lost ones are told."""
        released = output.all("released")
        ends = output.all("finished")
        count.not_resumable += not ends or not all(ends)
        marked = LedgerCopy(folder / "ledger").book.releases
        known = max((made for run, made in marked.items() if "/" not in run), default=0)
        count.under_charged += len({*released}) < len(released) or known <= max(
            released, default=-1
        )
        lost = (output.all("steps") or [0])[-1] - len(released)
        count.unclear += lost > 0 and not any("lost" in text for text in output.all("warned"))


class Paid(Kind):
    """A release that is made at once."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._answer(Path(folder))
            self.once = len(LedgerCopy(Path(folder) / "ledger").book.ledger)

    def _answer(self, folder: Path) -> Any:
        if self.name == "study":
            return paid.study(folder)
        return paid.carried_out(folder, paid.RUNS[self.name])[0]

    def run(self, folder: Path) -> None:
        """As `paid.carried_out`."""
        Output(folder).add(shown=self._answer(folder))

    def check(self, folder: Path, output: Output, count: Count) -> None:
        """There is one answer, and one charge."""
        count.not_resumable += not output.all("shown")
        answers = {json.dumps(answer) for answer in output.all("shown")}
        held = len(LedgerCopy(folder / "ledger").book.ledger)
        count.under_charged += len(answers) > 1 or held < self.once
        count.not_resumable += held > self.once


def seconds(kind: Kind) -> float:
    """Returns how long a run takes."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        child(kind.run, Path(folder), lambda: None)
    return time.perf_counter() - start


def kinds() -> list[str]:
    """Returns the names of all kinds of runs."""
    return [*runs.CASES, *paid.RUNS, "study"]


def main(names: list[str], how: str, tries: int) -> dict[str, Count]:
    """Ends the kinds equally often, and returns what was counted of each."""
    torch.set_num_threads(1)
    journal.steps_ahead = lambda line, step: 1
    dice = random.Random(1)
    counts: dict[str, Count] = {}
    for name in names:
        kind = Trained(name) if name in runs.CASES else Paid(name)
        count = counts[name] = Count()
        if how == "interrupt":
            count.moments = 60
            Interrupted.seconds = seconds(kind) / count.moments
        for first in itertools.count():
            if count.tries >= tries / len(names):
                break
            if not chain(kind, how, first % (count.moments or 10**6), dice, count):
                count.moments = count.moments or first
        print(
            name,
            *(f"{f.name} {getattr(count, f.name)}" for f in fields(Count)),
            sep="  ",
            flush=True,
        )
    return counts


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--how", choices=FAULTS, default="kill")
    parser.add_argument("--tries", type=int, default=10_000)
    parser.add_argument("kinds", nargs="*")
    options = parser.parse_args()
    found = main(options.kinds or kinds(), options.how, options.tries)
    sums = {
        f.name: sum(getattr(count, f.name) for count in found.values()) for f in fields(Count)
    }
    print("all", *(f"{name} {total}" for name, total in sums.items()), sep="  ")
