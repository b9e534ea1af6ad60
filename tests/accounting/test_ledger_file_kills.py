"""Processes killed at any point: the ledger on disk is never under the truth, and resumed runs repeat no noise."""

from __future__ import annotations

import os
import random
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import torch_dpsco as dp
from torch_dpsco.accounting import ledger_file
from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.errors import UtilityWarning
from torch_dpsco.rules import SGD
from torch_dpsco.step.oracle import Clipped

pytestmark = pytest.mark.filterwarnings(
    "ignore:This process .* is multi-threaded:DeprecationWarning"
)
DIM = 8
BYTES = 4 * DIM


def run(folder: Path, steps: int) -> None:
    """A run that resumes from file and checkpoint, and publishes each release as it is made."""
    accountant = Accountant(ledger_path=folder / "ledger")
    weight = torch.nn.Parameter(torch.zeros(1, DIM))
    oracle = Clipped(1.0, 1.0, 1)
    ours = dp.PrivateOptimizer(
        [weight], 1.0, oracle=oracle, rule=SGD(), design=dp.Full(1), accountant=accountant
    )
    if (folder / "checkpoint").exists():
        ours.load_state_dict(torch.load(folder / "checkpoint", weights_only=True))
    out = os.open(folder / "releases", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    loader = ours.loader(torch.utils.data.TensorDataset(torch.zeros(1, DIM)), steps=steps)
    for number, (x,) in enumerate(loader):
        weight.grad_sample = x[
            :, None
        ]  # no backward: torch refuses it in the child of a process that compiled
        ours.step()
        os.write(out, weight.grad.numpy().tobytes())  # one system call: all of it or nothing
        if number == steps // 2:
            torch.save(ours.state_dict(), folder / "unfinished")
            (folder / "unfinished").replace(folder / "checkpoint")


@pytest.fixture(autouse=True)
def _warm(tmp_path: Path) -> None:
    """Imports and cost curves once, before forking."""
    folder = tmp_path / "warm"
    folder.mkdir()
    run(folder, 1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "run"
    made.mkdir()
    return made


def killed(child_run: Callable[[], None], seconds: float | None) -> bool:
    """Runs in a forked child; kills it after some time, or lets it kill itself. Returns whether it was killed."""
    child = os.fork()
    if child == 0:
        try:
            warnings.simplefilter("ignore")
            torch.set_num_threads(1)
            child_run()
            os._exit(0)
        finally:
            os._exit(1)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the child failed"
    return os.WIFSIGNALED(status)


def check(folder: Path) -> tuple[int, int]:
    """Returns (events on the disk, releases made), after comparing them."""
    releases = (folder / "releases").read_bytes() if (folder / "releases").exists() else b""
    drawn = [releases[start : start + BYTES] for start in range(0, len(releases), BYTES)]
    assert all(len(noise) == BYTES for noise in drawn)
    assert len(set(drawn)) == len(drawn), "noise was used twice"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UtilityWarning)
        accountant = Accountant(ledger_path=folder / "ledger")
    accountant.close()
    assert len(accountant) >= len(drawn), "the ledger is under the truth"
    return len(accountant), len(drawn)


@pytest.mark.weekly
def test_kill_at_random_times_never_leaves_the_ledger_under_the_truth(folder):
    dice = random.Random(1)
    kills = sum(killed(lambda: run(folder, 10**6), dice.uniform(0.0, 0.1)) for _ in range(60))
    assert kills == 60
    events, releases = check(folder)
    assert events <= releases + 60  # at most one charge without its release per crash
    assert releases > 60


def dies_after(bytes_left: int) -> Callable[[int, bytes], None]:
    """Returns a write that a kill interrupts after so many bytes of all that is written to the ledger."""
    left = [bytes_left]

    def write(fd: int, data: bytes) -> None:
        size = os.write(fd, data[: left[0]])
        left[0] -= size
        if size < len(data):
            os.kill(os.getpid(), signal.SIGKILL)

    return write


@pytest.mark.weekly
def test_kill_within_a_line_at_140_points_between_authorize_and_release(folder, monkeypatch):
    """Each child resumes what the one before has left, and dies at a random byte of its own writing."""
    dice = random.Random(2)
    before = 0
    for _ in range(140):
        monkeypatch.setattr(ledger_file, "_write", dies_after(dice.randrange(1200)))
        assert killed(lambda: run(folder, 10**6), None)
        monkeypatch.undo()
        events, _ = check(folder)
        assert events >= before
        before = events


def test_kill_between_the_disk_and_the_noise_over_counts_by_one(folder, monkeypatch):
    real, syncs = os.fsync, []

    def sync_and_die(fd: int) -> None:
        real(fd)
        syncs.append(fd)
        if len(syncs) == 6:
            os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(ledger_file.os, "fsync", sync_and_die)
    assert killed(lambda: run(folder, 10**6), None)
    monkeypatch.undo()
    events, releases = check(folder)
    assert events == releases + 1


def test_a_charge_written_after_the_release_is_caught(folder, monkeypatch):
    """The check itself: an accountant that only counts in memory leaves the disk behind."""
    monkeypatch.setattr(ledger_file.LedgerFile, "append", lambda self, row: None)
    monkeypatch.setattr(ledger_file.LedgerFile, "note", lambda self, place, safe=False: None)
    killed(lambda: run(folder, 3), None)
    with pytest.raises(AssertionError, match="under the truth"):
        check(folder)
