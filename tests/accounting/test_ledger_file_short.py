"""Long ledger files are made short when they are opened: no charge is lost, whatever happens on the way."""

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

from tests.accounting.ledgers import DELTA, FIXED, STEP, WHOLE, image, part
from torch_dpsco.accounting import ledger_file
from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.accounting.book import Book
from torch_dpsco.accounting.events import ADD_REMOVE, PoissonGaussian
from torch_dpsco.errors import PrivacyError, UtilityWarning

forks = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
CHARGES = 40
SECONDS = 120  # a hang must fail


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "spent.jsonl"


@pytest.fixture
def always(monkeypatch) -> None:
    """Every file counts as long."""
    monkeypatch.setattr(ledger_file, "_LONG", 0)


def written(path: Path, charges: int = CHARGES) -> Accountant:
    """Returns a closed accountant that made so many charges of four kinds, a line each."""
    accountant = Accountant(ledger_path=path)
    for number in range(charges):
        accountant.authorize((STEP, WHOLE, FIXED, part(str(number % 3)))[number % 4])
    accountant.close()
    return accountant


def unmarked(path: Path) -> None:
    """Opens and closes a file that looks as if there had never been a mark."""
    path.with_name(f"{path.name}.mark").unlink()
    with pytest.warns(UtilityWarning, match="has no mark"):
        Accountant(ledger_path=path).close()


def count_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n")


# -- what is kept -----------------------------------------------------------------------------------------------------


def test_a_long_file_becomes_one_line_that_knows_every_bit(path, always):
    before = written(path)
    assert count_lines(path) == 1 + CHARGES
    again = Accountant(ledger_path=path)
    assert count_lines(path) == 1
    assert image(again) == image(before)
    again.authorize(PoissonGaussian(0.1, 1 / 3), 2)
    again.close()
    third = Accountant(ledger_path=path)
    assert image(third) == image(again)
    assert sorted(os.listdir(path.parent)) == [path.name, f"{path.name}.mark"]


def test_files_grow_until_they_are_long(path, monkeypatch):
    monkeypatch.setattr(ledger_file.os, "fsync", lambda fd: None)  # for speed
    accountant = Accountant(ledger_path=path)
    while path.stat().st_size < 2**18:
        accountant.authorize(STEP)
    accountant.close()
    content = path.read_bytes()
    path.write_bytes(
        content[: content[:-1].rindex(b"\n") + 1]
    )  # one charge less: below the limit
    unmarked(path)
    assert count_lines(path) == content.count(b"\n") - 1
    path.write_bytes(content)
    Accountant(ledger_path=path).close()
    assert count_lines(path) == 1
    assert path.stat().st_size < 1000


def test_a_file_that_would_hardly_become_shorter_is_left_alone(path, always):
    accountant = Accountant(ledger_path=path)
    for number in range(1, 20):
        accountant.authorize(PoissonGaussian(float(number), 0.1))  # each with an entry of its own
    accountant.close()
    content = path.read_bytes()
    again = Accountant(ledger_path=path)
    assert path.read_bytes() == content
    assert image(again) == image(accountant)


@pytest.mark.slow
def test_marks_runs_and_settings_survive(path, always):
    accountant = Accountant(ledger_path=path, adjacency=ADD_REMOVE)
    for _ in range(CHARGES):
        accountant.step(noise_multiplier=1.0, sample_rate=0.1)
    accountant.record(STEP, adaptive=True)
    checkpoint = accountant.state_dict()
    accountant.authorize(STEP)
    accountant.close()
    again = Accountant(ledger_path=path)
    assert again.state_dict() == accountant.state_dict()
    assert (again.adjacency, again.adaptive) == (ADD_REMOVE, True)
    assert again.report(DELTA).assumptions == accountant.report(DELTA).assumptions
    with pytest.warns(UtilityWarning, match="1 released events ahead of the checkpoint"):
        again.load_state_dict(
            checkpoint
        )  # an old checkpoint is still known as one of this history
    assert len(again) == CHARGES + 2


@pytest.mark.parametrize("charged", [0, 1])
def test_a_torn_line_is_seen_to_before_the_file_is_made_short(path, always, charged):
    written(path)
    path.write_bytes(path.read_bytes() + b'{"at": 40, "cou')
    if charged:  # without a mark
        path.with_name(f"{path.name}.mark").unlink()
    with pytest.warns(UtilityWarning) as told:
        again = Accountant(ledger_path=path)
    assert "was torn by a crash" in str(told[-1].message)
    assert (len(again), count_lines(path)) == (CHARGES + charged, 1)
    again.close()
    assert len(Accountant(ledger_path=path)) == CHARGES + charged


def test_a_damaged_long_file_is_refused_and_not_replaced(path, always):
    written(path)
    content = path.read_bytes().replace(b'"count": 1', b'"count": 0', 1)
    path.write_bytes(content)
    with pytest.raises(PrivacyError, match="is damaged or altered"):
        Accountant(ledger_path=path)
    assert path.read_bytes() == content


def test_a_state_that_loses_a_charge_replaces_nothing(path, always, monkeypatch):
    """The check itself: a format that forgets an entry is found before the old file is gone."""
    written(path)
    content = path.read_bytes()
    whole = Book.to_row
    monkeypatch.setattr(
        Book, "to_row", lambda book: whole(book) | {"ledger": whole(book)["ledger"][1:]}
    )
    assert len(Accountant(ledger_path=path)) == CHARGES
    assert path.read_bytes() == content


# -- the file itself --------------------------------------------------------------------------------------------------


def test_mode_and_symbolic_link_are_kept(path, always, tmp_path):
    before = written(path)
    path.chmod(0o640)
    (tmp_path / "link").symlink_to(path)
    again = Accountant(ledger_path=tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    again.authorize(STEP)
    again.close()
    assert count_lines(path) == 2
    assert len(Accountant(ledger_path=path)) == len(before) + 1


def test_a_file_with_a_second_name_is_left_alone(path, always, tmp_path):
    """The second name would keep the old file, and a run on it would not see what was spent under the first."""
    written(path)
    os.link(path, tmp_path / "second")
    first = Accountant(ledger_path=path)
    first.authorize(STEP)
    first.close()
    with pytest.warns(UtilityWarning, match="has no mark"):
        assert len(Accountant(ledger_path=tmp_path / "second")) == CHARGES + 1


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file to somebody else")
def test_a_file_of_somebody_else_stays_theirs(path, always):
    written(path)
    os.chown(path, 12345, 12345)
    again = Accountant(ledger_path=path)
    assert (path.stat().st_uid, count_lines(path), len(again)) == (12345, 1 + CHARGES, CHARGES)
    assert sorted(os.listdir(path.parent)) == [path.name, f"{path.name}.mark"]


def test_a_second_writer_is_refused_while_the_short_file_is_open(path, always):
    written(path)
    first = Accountant(ledger_path=path)
    with pytest.raises(PrivacyError, match="in use by another accountant or process"):
        Accountant(ledger_path=path)
    first.authorize(STEP)
    first.close()
    assert len(Accountant(ledger_path=path)) == CHARGES + 1


# -- crashes and failures ---------------------------------------------------------------------------------------------

CALLS = ("open", "chmod", "fsync", "replace", "unlink", "write", "close")


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


def dying(monkeypatch, last: int, after: bool) -> None:
    """Lets the process end, as a kill does, at its call number `last` of the operating system: before it or after."""
    made = [0]

    def wrap(real):
        def call(*args, **kwargs):
            made[0] += 1
            if made[0] == last and not after:
                os._exit(7)
            try:
                return real(*args, **kwargs)
            finally:
                if made[0] == last:
                    os._exit(7)

        return call

    for name in CALLS:
        monkeypatch.setattr(ledger_file.os, name, wrap(getattr(os, name)))


@pytest.mark.cases(0, 1)
@forks
@pytest.mark.parametrize("after", [False, True])
def test_a_crash_at_any_point_leaves_the_old_or_the_new(path, always, monkeypatch, after):
    before = written(path)
    content = path.read_bytes()
    outcomes = set()
    for last in range(1, 40):
        path.write_bytes(content)

        def resume(last: int = last) -> None:
            with monkeypatch.context() as patched:
                dying(patched, last, after)
                Accountant(ledger_path=path)

        code = in_child(resume)
        outcomes.add(count_lines(path))
        again = Accountant(ledger_path=path)
        assert image(again) == image(before)
        again.close()
        assert sorted(os.listdir(path.parent)) == [
            path.name,
            f"{path.name}.mark",
        ]  # what the crash has left is gone
        if code == 0:
            break
    assert code == 0, "the child never finished"
    assert last > 8
    assert outcomes == {1, 1 + CHARGES}


@pytest.mark.cases(3, 1)
@pytest.mark.parametrize("failing", ["open", "chmod", "write", "fsync", "replace"])
def test_where_no_new_file_can_be_made_the_old_one_goes_on(path, always, monkeypatch, failing):
    before = written(path)
    content = path.read_bytes()
    real = getattr(os, failing)
    calls = []

    def fail(*args, **kwargs):
        calls.append(args)
        if failing == "open" and not str(args[0]).endswith(".draft"):
            return real(*args, **kwargs)
        raise OSError(errno.ENOSPC, "No space left on device")

    folders = ledger_file.sync_folder
    monkeypatch.setattr(
        ledger_file, "sync_folder", lambda path: None if failing == "fsync" else folders(path)
    )
    with monkeypatch.context() as broken:
        broken.setattr(ledger_file.os, failing, fail)
        broken.setattr(
            ledger_file.HighWater, "write", lambda self, place, safe=False: None
        )  # needs no room
        again = Accountant(ledger_path=path)
    assert calls
    assert path.read_bytes() == content
    assert sorted(os.listdir(path.parent)) == [path.name, f"{path.name}.mark"]
    again.authorize(STEP)
    again.close()
    assert len(Accountant(ledger_path=path)) == len(before) + 1


def test_an_interrupt_lets_go_of_the_lock(path, always, monkeypatch):
    written(path)

    def interrupt(*_args):
        raise KeyboardInterrupt

    for call in ("replace", "fsync"):
        with monkeypatch.context() as patched:
            patched.setattr(ledger_file.os, call, interrupt)
            with pytest.raises(KeyboardInterrupt):
                Accountant(ledger_path=path)
        assert sorted(os.listdir(path.parent)) == [path.name, f"{path.name}.mark"]
    assert len(Accountant(ledger_path=path)) == CHARGES


def test_the_name_of_the_file_is_on_the_disk_before_anything_is_charged(
    path, always, monkeypatch
):
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
def test_no_charge_is_lost_between_writers(path, always):
    """Four processes open, shorten, charge and close the same file as fast as they can."""
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


def test_a_file_that_lost_its_name_before_it_was_locked_is_not_the_ledger(
    path, always, monkeypatch
):
    """Another process makes the file short between the opening and the locking."""
    locks, shorten = [], []
    lock = ledger_file._lock

    def late(fd: int, name: str) -> None:
        locks.append(fd)
        assert len(locks) < 20, "the file is opened for ever"
        if shorten:
            shorten.pop()
            Accountant(ledger_path=path).close()
            assert count_lines(path) == 1
        lock(fd, name)

    monkeypatch.setattr(ledger_file, "_lock", late)
    before = written(path)
    shorten.append(True)
    accountant = Accountant(ledger_path=path)
    assert image(accountant) == image(before)
    accountant.authorize(STEP)
    assert count_lines(path) == 2


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


# -- facts ------------------------------------------------------------------------------------------------------------


def test_a_suspicion_is_filed_with_the_next_charge(path):
    accountant = Accountant(ledger_path=path)
    accountant.step(noise_multiplier=1.0, sample_rate=0.1)
    accountant.suspect()
    lines = count_lines(path)
    accountant.step(noise_multiplier=1.0, sample_rate=0.1)
    assert count_lines(path) == lines + 2  # a state with the fact, and the charge
    accountant.step(noise_multiplier=1.0, sample_rate=0.1)
    assert count_lines(path) == lines + 3
    accountant.close()
    again = Accountant(ledger_path=path)
    assert again.suspicious_sampling
    assert again.state_dict() == accountant.state_dict()
    again.step(noise_multiplier=1.0, sample_rate=0.1)
    assert count_lines(path) == lines + 4


def test_an_adjacency_that_was_open_in_the_file_is_filed_when_it_is_decided(path):
    empty = Accountant(ledger_path=path)
    empty.load_state_dict(Accountant().state_dict())  # a checkpoint of nothing
    empty.close()
    opacus = Accountant(ledger_path=path)
    opacus._journal.replace(Book(config={"adjacency": None, "unit": "example"}))
    opacus.step(noise_multiplier=1.0, sample_rate=0.1)
    opacus.close()
    assert json.loads(path.read_bytes().splitlines()[-2])["config"]["adjacency"] == ADD_REMOVE
    assert Accountant(ledger_path=path).adjacency == ADD_REMOVE
