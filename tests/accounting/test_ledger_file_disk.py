"""A ledger file on a disk that is full, in a folder that others change, between many writers."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.accounting.ledgers import FIXED, STEP, WHOLE, image, part
from torch_dpsco.accounting import ledger_file
from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.accounting.events import ADD_REMOVE, PoissonGaussian
from torch_dpsco.accounting.ledger import Book
from torch_dpsco.errors import PrivacyError, UtilityWarning

forks = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
CHARGES = 40
SECONDS = 120  # a hang must fail


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "spent.jsonl"


def written(path: Path, charges: int = CHARGES) -> Accountant:
    """Returns a closed accountant that made so many charges of four kinds, a line each."""
    accountant = Accountant(ledger_path=path)
    for number in range(charges):
        accountant.authorize((STEP, WHOLE, FIXED, part(str(number % 3)))[number % 4])
    accountant.close()
    return accountant


def count_lines(path: Path) -> int:
    return path.read_bytes()[512:].count(b"\n")  # behind the header


def in_child(task: Callable[[], None]) -> int:
    """Returns the exit code of a forked child that runs the task."""
    child = os.fork()
    if child == 0:
        try:
            task()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_the_name_of_the_file_is_on_the_disk_before_anything_is_charged(path, monkeypatch):
    """After a crash between the renaming and its fsync, only the next opening can see to the name."""
    written(path)
    real, synced = os.fsync, []

    def sync(fd: int) -> None:
        synced.append(stat.S_ISDIR(os.fstat(fd).st_mode))
        real(fd)

    for content in (path.read_bytes(), b""):
        path.write_bytes(content)
        if not content:
            path.with_name(f"{path.name}.mark").unlink()
        synced.clear()
        with monkeypatch.context() as patched:
            patched.setattr(ledger_file.os, "fsync", sync)
            Accountant(ledger_path=path).close()
        assert synced[-1]
    with monkeypatch.context() as patched:
        patched.setattr(ledger_file, "sync_folder", _no_room)
        with pytest.raises(PrivacyError, match="could not be written"):
            Accountant(ledger_path=path)
    Accountant(ledger_path=path).close()


def _no_room(*_args) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.slow
@forks
def test_no_charge_is_lost_between_writers(path):
    """Four processes open, charge and close the same file as fast as they can."""
    each = 25

    def work() -> None:
        left = each
        while left:
            try:
                accountant = Accountant(ledger_path=path)
            except PrivacyError as error:
                if "in use" not in str(error):
                    raise
                continue
            for _ in range(3):
                accountant.authorize(STEP)
            accountant.close()
            left -= 1

    children = []
    for _ in range(4):
        child = os.fork()
        if child == 0:
            signal.alarm(SECONDS)
            try:
                work()
                os._exit(0)
            finally:
                os._exit(1)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert codes == [0] * 4
    accountant = Accountant(ledger_path=path)
    assert len(accountant) == 4 * each * 3


def test_a_file_that_lost_its_name_before_it_was_locked_is_not_the_ledger(path, monkeypatch):
    """Another process puts a copy in its place between the opening and the locking."""
    locks, moves = [], [True]
    lock = ledger_file._lock

    def late(fd: int, name: str) -> None:
        locks.append(fd)
        assert len(locks) < 20, "the file is opened for ever"
        if moves:
            moves.pop()
            copy = path.with_name("copy")
            copy.write_bytes(path.read_bytes())
            os.replace(copy, path)
        lock(fd, name)

    before = written(path)
    monkeypatch.setattr(ledger_file, "_lock", late)
    accountant = Accountant(ledger_path=path)
    assert image(accountant) == image(before)
    accountant.authorize(STEP)
    assert count_lines(path) == CHARGES + 2


# -- a disk that is full, a file that is none -------------------------------------------------------------------------


@forks
def test_a_full_disk_refuses_the_charge_and_keeps_the_ones_before(path):
    """The limit of the file size stands for a full disk: a line is cut where it ends."""

    def fill() -> None:
        accountant = Accountant(ledger_path=path)
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
        for number in range(1000):
            try:
                accountant.authorize(STEP)
            except PrivacyError as error:
                (path.parent / "told").write_text(f"{number} {len(accountant)} {error}")
                os._exit(5)

    assert in_child(fill) == 5
    number, charged, message = (path.parent / "told").read_text().split(" ", 2)
    assert charged == number
    assert "could not be written" in message
    told = int(number)
    assert told > 10
    assert path.stat().st_size == 5000
    with pytest.warns(UtilityWarning, match="was torn"):
        resumed = Accountant(ledger_path=path)
    assert len(resumed) == told  # nothing was released for the cut line


@pytest.mark.parametrize("kind", ["folder", "no folder", "fifo", "device"])
def test_what_is_no_file_is_refused_by_name(path, kind):
    if kind == "folder":
        path.mkdir()
    elif kind == "no folder":
        path = path.parent / "missing" / "spent.jsonl"
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path = Path("/dev/null")
    with pytest.raises(PrivacyError, match="cannot be opened for reading and writing") as caught:
        Accountant(ledger_path=path)
    assert repr(str(path)) in str(caught.value)


def test_a_file_that_must_not_be_written_is_refused(path, monkeypatch):
    written(path)
    content = path.read_bytes()

    def refuse(*_args, **_kwargs):
        raise PermissionError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr(ledger_file.os, "open", refuse)
        with pytest.raises(PrivacyError, match=r"cannot be opened .*Permission denied"):
            Accountant(ledger_path=path)
    assert path.read_bytes() == content


def test_an_adjacency_that_was_open_in_the_file_is_filed_when_it_is_decided(path):
    empty = Accountant(ledger_path=path)
    empty.load_state_dict(Accountant().state_dict())  # a checkpoint of nothing
    empty.close()
    later = Accountant(ledger_path=path)
    later._journal.replace(Book(config={"adjacency": None, "unit": "example"}))
    later.settle(ADD_REMOVE)
    later.record(PoissonGaussian(1.0, 0.1))
    later.close()
    assert json.loads(path.read_bytes().splitlines()[-2])["config"]["adjacency"] == ADD_REMOVE
    assert Accountant(ledger_path=path).adjacency == ADD_REMOVE


@pytest.mark.skipif(os.getuid() != 0, reason="becomes other users")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_users_of_a_group_share_a_ledger_and_others_are_told_why_not(tmp_path: Path) -> None:
    """Two users of one group charge in turn; a third one is refused by name, with a way out."""
    tmp_path.chmod(0o777)
    for parent in tmp_path.parents[:3]:
        parent.chmod(parent.stat().st_mode | 0o011)
    path = tmp_path / "shared.ledger"
    path.touch()
    os.chown(path, 4001, 5001)
    path.chmod(0o660)

    def charge_as(user: int, group: int) -> str:
        read, write = os.pipe()
        if (child := os.fork()) == 0:
            try:
                os.setgroups([])
                os.setgid(group)
                os.setuid(user)
                accountant = Accountant(ledger_path=path)
                accountant.authorize(STEP)
                accountant.close()
                os.write(write, b"charged")
            except BaseException as error:
                os.write(write, f"{type(error).__name__}: {error}".encode())
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        os.close(write)
        with os.fdopen(read) as pipe:
            return pipe.read()

    assert [charge_as(user, 5001) for user in (4001, 4002, 4001)] == 3 * ["charged"]
    assert stat.S_IMODE(path.with_name("shared.ledger.mark").stat().st_mode) == 0o660
    refused = charge_as(4003, 5003)
    assert refused.startswith("PrivacyError: ledger file")
    assert "that this user may read and write" in refused
    path.chmod(0o666)  # and the mark is forgotten
    assert charge_as(4003, 5003).startswith("PrivacyError: mark")
    assert len(Accountant(ledger_path=path)) == 3


@pytest.mark.parametrize("call", ["write", "fsync"])
def test_ctrl_c_while_a_line_is_written_takes_it_back(tmp_path, monkeypatch, call):
    """Most of a charge is waiting for the disk: the file goes on as if the line had never been begun."""
    path = tmp_path / "ledger"
    accountant = Accountant(ledger_path=path)
    accountant.authorize(STEP)
    before = path.read_bytes()

    def interrupted(fd, *data):
        if data:
            os_write(fd, data[0][:10])
        raise KeyboardInterrupt

    os_write = os.write
    with monkeypatch.context() as patched:
        patched.setattr(ledger_file.os, call, interrupted)
        with pytest.raises(KeyboardInterrupt):
            accountant.authorize(STEP, releases={"run": 1})
    assert path.read_bytes() == before
    assert (len(accountant), accountant.marked("run")) == (1, 0)
    accountant.authorize(STEP, releases={"run": 1})
    accountant.close()
    again = Accountant(ledger_path=path, must_exist=True)
    assert (len(again), again.marked("run")) == (2, 1)


def test_ctrl_c_while_the_mark_is_written_leaves_the_charge(tmp_path, monkeypatch):
    path = tmp_path / "ledger"
    accountant = Accountant(ledger_path=path)
    accountant.authorize(STEP)

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(ledger_file.HighWater, "write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            accountant.authorize(STEP, releases={"run": 1})
    assert (len(accountant), accountant.marked("run")) == (2, 1)
    accountant.authorize(STEP)
    accountant.close()
    assert len(Accountant(ledger_path=path, must_exist=True)) == 3


def test_a_mark_that_is_written_in_pieces_is_whole(tmp_path, monkeypatch):
    path = tmp_path / "ledger"
    os_write = os.write
    monkeypatch.setattr(ledger_file.os, "write", lambda fd, data: os_write(fd, data[:7]))
    accountant = Accountant(ledger_path=path)
    for _ in range(3):
        accountant.authorize(STEP)
    accountant.close()
    monkeypatch.undo()
    assert len(Accountant(ledger_path=path, must_exist=True)) == 3
