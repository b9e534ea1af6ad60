from __future__ import annotations

import errno
import fcntl
import json
import os
import tracemalloc
from pathlib import Path

import pytest

from tests.accounting.ledgers import DELTA, FIXED, STEP, WHOLE, image, part
from torch_dpsco.accounting import ledger_file
from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.accounting.budgets import Budget
from torch_dpsco.accounting.events import (
    ADD_REMOVE,
    Gaussian,
    PoissonGaussian,
    Repeat,
    Sequential,
)
from torch_dpsco.accounting.ledger import charge_row
from torch_dpsco.accounting.ledger_file import LedgerFile
from torch_dpsco.errors import BudgetExceeded, PrivacyError, UtilityWarning

HEADER = 512  # bytes, before the lines


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "spent.jsonl"


def charged(path: Path, *events) -> Accountant:
    """Returns a closed accountant that charged the events to the file."""
    accountant = Accountant(ledger_path=path)
    for event in events:
        accountant.authorize(event)
    accountant.close()
    return accountant


def mark_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.mark")


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_bytes()[HEADER:].splitlines()]


def refused(path: Path) -> str:
    before = path.read_bytes()
    with pytest.raises(PrivacyError) as caught:
        Accountant(ledger_path=path)
    assert path.read_bytes() == before
    return str(caught.value)


@pytest.mark.slow
def test_a_new_accountant_on_the_same_file_knows_every_bit(path):
    first = Accountant(ledger_path=path)
    for event in (STEP, STEP, FIXED, WHOLE, part("0"), PoissonGaussian(0.1, 1 / 3)):
        first.authorize(event, 3)
    first.record(STEP, 7, adaptive=True)
    first.record(PoissonGaussian(1.1, 0.3))
    first.close()
    second = Accountant(ledger_path=path)
    assert image(second) == image(first)
    assert (second.adjacency, second.adaptive) == (first.adjacency, True)
    assert second.report(DELTA).assumptions == first.report(DELTA).assumptions


def test_the_line_is_on_the_disk_before_authorize_returns(path, monkeypatch):
    events: list[str] = []
    real = os.fsync
    monkeypatch.setattr(ledger_file.os, "fsync", lambda fd: (events.append("sync"), real(fd))[1])
    accountant = Accountant(ledger_path=path)
    for count in range(1, 4):
        synced = len(events)
        accountant.authorize(STEP)
        assert len(events) > synced
        assert [row["at"] for row in lines(path)[1:]] == list(range(count))


@pytest.mark.slow
def test_every_authorize_is_one_line_and_a_request_for_nothing_none(path):
    accountant = Accountant(Budget(8.0, DELTA), ledger_path=path)
    accountant.authorize(STEP, 0)
    assert lines(path) == []
    accountant.authorize(STEP, 5)
    accountant.authorize(STEP)
    assert [(row["at"], row["count"]) for row in lines(path)[1:]] == [(0, 5), (5, 1)]
    before = path.read_bytes()
    for refuse, error in (
        (lambda: accountant.authorize(STEP, 10**7), BudgetExceeded),
        (lambda: accountant.authorize(Gaussian(0.01, {"replace_one": 1.0})), PrivacyError),
        (lambda: accountant.authorize("step"), ValueError),
        (lambda: accountant.authorize(STEP, -1), ValueError),
        (lambda: accountant.record("step"), ValueError),
    ):
        with pytest.raises(error):
            refuse()
    assert path.read_bytes() == before
    assert len(accountant) == 6


def test_the_adjacency_and_unit_of_a_file_are_kept(path):
    first = Accountant(ledger_path=path, adjacency=ADD_REMOVE)
    first.record(PoissonGaussian(1.0, 0.1))
    first.close()
    again = Accountant(ledger_path=path)
    assert again.adjacency == ADD_REMOVE
    again.close()
    for other in ({"adjacency": "replace_one"}, {"unit": "user"}):
        with pytest.raises(ValueError, match="ledger file must be for"):
            Accountant(ledger_path=path, **other)
    Accountant(
        ledger_path=path, adjacency=ADD_REMOVE
    ).close()  # a refused one has let go of the lock


def test_a_file_counts_against_the_budget(path):
    charged(path, *[STEP] * 3)
    budget = Budget(0.5, DELTA)
    fresh, resumed = Accountant(budget), Accountant(budget, ledger_path=path)
    assert resumed.max_steps(STEP) > 0
    assert resumed.max_steps(STEP) == fresh.max_steps(STEP) - 3


# -- who may write ----------------------------------------------------------------------------------------------------


def test_a_second_writer_is_refused(path):
    first = Accountant(ledger_path=path)
    first.authorize(STEP)
    assert "in use by another accountant or process" in refused(path)
    first.authorize(STEP)
    first.close()
    assert len(Accountant(ledger_path=path)) == 2


class Windows:
    """Stands for the module `msvcrt`, whose locks keep others from reading the bytes that are locked."""

    LK_NBLCK = 2

    @staticmethod
    def locking(fd: int, mode: int, count: int) -> None:
        assert (mode, count) == (Windows.LK_NBLCK, 1)
        assert os.lseek(fd, 0, os.SEEK_CUR) > 10**9  # beyond all lines, which others may read
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise PermissionError(errno.EACCES, "Permission denied") from error


def test_a_second_writer_is_refused_on_windows_too(path, monkeypatch):
    monkeypatch.setattr(ledger_file, "fcntl", None)
    monkeypatch.setattr(ledger_file, "msvcrt", Windows, raising=False)
    first = Accountant(ledger_path=path)
    first.authorize(STEP)
    assert "in use by another accountant or process" in refused(path)
    first.authorize(STEP)
    first.close()
    assert len(Accountant(ledger_path=path)) == 2
    assert [row["at"] for row in lines(path)[1:]] == [0, 1]  # written at the end of the file


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_another_process_is_refused_and_a_forked_copy_too(path):
    first = Accountant(ledger_path=path)
    first.authorize(STEP)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            for attempt in (lambda: Accountant(ledger_path=path), lambda: first.authorize(STEP)):
                try:
                    attempt()
                    os.write(write, b"allowed\n")
                except PrivacyError as error:
                    os.write(write, f"{error}\n".encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    with os.fdopen(read) as messages:
        second, forked = messages.read().splitlines()
    assert "in use by another accountant" in second
    assert "in the process that made it" in forked
    first.authorize(STEP)
    assert [row["at"] for row in lines(path)[1:]] == [0, 1]


def test_a_closed_accountant_charges_nothing(path):
    accountant = charged(path, STEP)
    with pytest.raises(PrivacyError, match="is closed or failed"):
        accountant.authorize(STEP)
    assert len(accountant) == 1


@pytest.mark.parametrize("harm", ["unlink", "truncate", "append", "replace", "move"])
def test_a_file_deleted_moved_or_changed_in_a_run_is_noticed(path, harm):
    accountant = Accountant(ledger_path=path)
    accountant.authorize(STEP)
    if harm == "unlink":
        path.unlink()
    elif harm == "move":
        path.rename(path.with_suffix(".moved"))
    elif harm == "truncate":
        os.truncate(path, 10)
    elif harm == "append":
        path.write_bytes(path.read_bytes() + b"x")
    else:
        other = path.with_suffix(".other")
        other.write_bytes(path.read_bytes())
        other.replace(path)
    with pytest.raises(PrivacyError, match="was changed, moved or deleted by somebody else"):
        accountant.authorize(STEP)
    assert len(accountant) == 1


@pytest.mark.parametrize("failing", ["write", "fsync"])
def test_a_disk_that_fails_lets_nothing_be_released(path, failing, monkeypatch):
    accountant = Accountant(ledger_path=path)
    accountant.authorize(STEP)

    def fail(*_args):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(ledger_file.os, failing, fail)
        with pytest.raises(PrivacyError, match=r"could not be written .*No space left"):
            accountant.authorize(STEP)
    with pytest.raises(
        PrivacyError, match="is closed or failed"
    ):  # who knows what the disk holds
        accountant.authorize(STEP)
    accountant.close()
    assert len(Accountant(ledger_path=path)) in (1, 2)


def test_an_event_added_past_the_accountant_is_written_with_the_next_charge(path):
    accountant = Accountant(ledger_path=path)
    accountant.authorize(STEP)
    accountant.ledger.add(WHOLE, 5)
    accountant.authorize(STEP)
    accountant.close()
    assert image(Accountant(ledger_path=path)) == image(accountant)


# -- damage -----------------------------------------------------------------------------------------------------------


def written(path: Path) -> bytes:
    """Returns the content of a file with four charges of two events each."""
    accountant = Accountant(ledger_path=path)
    for event in (STEP, WHOLE, STEP, part("0")):
        accountant.authorize(event, 2)
    accountant.close()
    return path.read_bytes()


@pytest.mark.slow
def test_every_cut_of_a_file_opens_with_all_charges_or_is_refused(path, monkeypatch):
    monkeypatch.setattr(ledger_file.os, "fsync", lambda fd: None)  # for speed
    content, mark = written(path), mark_of(path).read_bytes()
    for cut in range(len(content)):
        path.write_bytes(content[:cut])
        mark_of(path).write_bytes(mark)
        assert "cut, emptied, or replaced by an older copy" in refused(path)


def test_a_lost_file_is_not_made_anew(path):
    charged(path, STEP)
    path.unlink()
    for _ in range(2):
        with pytest.raises(PrivacyError, match=r"must exist \(its mark .* knows of charges\)"):
            Accountant(ledger_path=path)
        assert not path.exists()


@pytest.mark.parametrize("behind", [1, 2])
def test_an_older_copy_is_refused_also_where_it_went_on_by_itself(path, behind):
    accountant = Accountant(ledger_path=path)
    accountant.authorize(STEP)
    copy, mark = path.read_bytes(), mark_of(path).read_bytes()
    accountant.authorize(STEP, behind)
    accountant.close()
    newest = mark_of(path).read_bytes()
    path.write_bytes(copy)
    assert "replaced by an older copy" in refused(path)
    mark_of(path).write_bytes(
        mark
    )  # put back together they are not told from the newest, elsewhere for instance
    charged(path, *[STEP] * 9)
    mark_of(path).write_bytes(newest)
    assert "replaced by an older copy or another ledger" in refused(path)


def test_another_ledger_in_the_place_of_a_file_is_refused(path, tmp_path):
    charged(path, STEP)
    charged(tmp_path / "other", *[STEP] * 5)
    path.write_bytes((tmp_path / "other").read_bytes())
    assert "or another ledger" in refused(path)


def test_a_crash_between_the_line_and_its_mark_blocks_nothing(path):
    accountant = Accountant(ledger_path=path)
    accountant.authorize(STEP)
    mark = mark_of(path).read_bytes()
    accountant.authorize(WHOLE)
    accountant.close()
    mark_of(path).write_bytes(mark)
    again = Accountant(ledger_path=path)
    assert image(again) == image(accountant)
    again.close()
    content = path.read_bytes()
    path.write_bytes(content[: content[:-1].rindex(b"\n") + 1])
    assert "was cut" in refused(path)  # the mark was moved when the file was opened


@pytest.mark.parametrize(
    "content", [b"x" * 256, b"[" * 256, b"{}", b'{"run": "", "events": 1, "releases": 0}']
)
def test_a_damaged_mark_is_refused_and_an_empty_one_is_none(path, content):
    charged(path, STEP)
    mark_of(path).write_bytes(content)
    assert "is damaged" in refused(path)
    mark_of(path).write_bytes(b"")
    with pytest.warns(UtilityWarning, match="has no mark"):
        Accountant(ledger_path=path).close()
    assert len(Accountant(ledger_path=path)) == 1


@pytest.mark.parametrize("kept", [0, 1, 100, 255])
@pytest.mark.parametrize("last", [0, 1])
def test_a_torn_write_of_the_mark_leaves_the_one_before(path, kept, last):
    accountant = Accountant(ledger_path=path)
    for _ in range(3 + last):
        before = mark_of(path).read_bytes()
        accountant.authorize(STEP)
    accountant.close()
    after, content = mark_of(path).read_bytes(), path.read_bytes()
    (slot,) = (k for k in (0, 256) if before[k : k + 256] != after[k : k + 256])
    torn = after[: slot + kept] + bytes([7]) * (256 - kept) + after[slot + 256 :]
    mark_of(path).write_bytes(torn)
    assert len(Accountant(ledger_path=path)) == 3 + last
    path.write_bytes(b"".join(content.splitlines(keepends=True)[:-2]))
    mark_of(path).write_bytes(torn)
    assert "was cut" in refused(path)


def test_the_mark_is_moved_after_the_disk_and_before_authorize_returns(path, monkeypatch):
    accountant = Accountant(ledger_path=path)
    events: list[str] = []
    sync, write = os.fsync, ledger_file.HighWater.write
    monkeypatch.setattr(ledger_file.os, "fsync", lambda fd: (events.append("disk"), sync(fd))[1])
    monkeypatch.setattr(
        ledger_file.HighWater,
        "write",
        lambda mark, place, safe: (events.append(f"mark {place[1]}"), write(mark, place, safe))[
            1
        ],
    )
    accountant.authorize(STEP, 3)
    accountant.authorize(STEP)
    assert events == ["disk", "disk", "mark 3", "disk", "mark 4"]


def test_a_mark_that_cannot_be_written_lets_nothing_be_released(path, monkeypatch):
    accountant = Accountant(ledger_path=path)

    def fail(*_args):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(ledger_file.HighWater, "write", fail)
        with pytest.raises(PrivacyError, match="could not be written"):
            accountant.authorize(STEP)
    accountant.close()
    assert len(Accountant(ledger_path=path)) == 1


def test_a_ledger_that_must_exist_is_not_made(path):
    with pytest.raises(PrivacyError, match=r"must exist \(must_exist=True\)"):
        Accountant(ledger_path=path, must_exist=True)
    assert not path.exists()
    with pytest.raises(ValueError, match="ledger_path must be given with must_exist"):
        Accountant(must_exist=True)
    charged(path, STEP)
    assert len(Accountant(ledger_path=path, must_exist=True)) == 1


def test_lines_nested_without_end_are_refused(path):
    content = written(path)
    for line in (b"[" * 100_000, b'{"a":' * 100_000):
        path.write_bytes(content + line + b"\n")
        assert "is damaged or altered" in refused(path)


@pytest.mark.slow
def test_every_cut_of_a_file_without_a_mark_is_refused(path, monkeypatch):
    """By its header; of an empty file nothing can tell."""
    monkeypatch.setattr(ledger_file.os, "fsync", lambda fd: None)  # for speed
    content = written(path)
    for cut in range(1, len(content)):
        path.write_bytes(content[:cut])
        mark_of(path).unlink(missing_ok=True)
        said = refused(path)
        assert "another end, and no mark" in said or "was cut" in said
        assert not mark_of(path).exists()


def test_a_header_and_a_mark_make_up_for_each_other(path):
    """The damaged one is written anew; without both the file is refused."""
    charged(path, STEP, STEP)
    content, mark = path.read_bytes(), mark_of(path).read_bytes()
    spoiled = bytes([7]) * HEADER + content[HEADER:]
    path.write_bytes(spoiled)
    assert len(Accountant(ledger_path=path)) == 2
    assert path.read_bytes()[HEADER:] == content[HEADER:]
    assert b"\7" * 256 in path.read_bytes()  # one slot was written
    mark_of(path).unlink()
    with pytest.warns(UtilityWarning, match="has no mark"):
        assert len(Accountant(ledger_path=path)) == 2
    mark_of(path).unlink()
    path.write_bytes(spoiled)
    assert "the header of ledger file" in refused(path)
    mark_of(path).write_bytes(mark)
    assert len(Accountant(ledger_path=path)) == 2


@pytest.mark.parametrize("kept", [0, 1, 100, 255])
@pytest.mark.parametrize("last", [0, 1])
def test_a_torn_write_of_the_header_leaves_the_one_before(path, kept, last):
    """Without a mark, too."""
    accountant = Accountant(ledger_path=path)
    for _ in range(3 + last):
        before = path.read_bytes()[:HEADER]
        accountant.authorize(STEP)
    accountant.close()
    after = path.read_bytes()
    (slot,) = (k for k in (0, 256) if before[k : k + 256] != after[k : k + 256])
    torn = after[: slot + kept] + bytes([7]) * (256 - kept) + after[slot + 256 :]
    path.write_bytes(torn)
    mark_of(path).unlink()
    with pytest.warns(UtilityWarning, match="has no mark"):
        assert len(Accountant(ledger_path=path)) == 3 + last
    path.write_bytes(b"".join(torn.splitlines(keepends=True)[:-2]))
    mark_of(path).unlink()
    assert "was cut" in refused(path)


@pytest.mark.parametrize("size", [0, 1, 255, 256, 400, 511, 512])
@pytest.mark.parametrize("which", [lambda path: path, mark_of], ids=["file", "mark"])
def test_a_file_whose_making_was_interrupted_is_a_new_one(path, which, size):
    which(path).write_bytes((2 * (b" " * 255 + b"\n"))[:size])
    charged(path, STEP)
    assert len(Accountant(ledger_path=path)) == 1


@pytest.mark.parametrize("charges", [1, 2])
def test_a_torn_first_write_of_a_new_mark_beside_an_older_file_is_none(path, charges):
    """In either slot: the number of its writes goes on from the header's."""
    charged(path, *[STEP] * charges)
    mark_of(path).unlink()
    with pytest.warns(UtilityWarning, match="has no mark"):
        Accountant(ledger_path=path).close()
    content = mark_of(path).read_bytes()
    blank = b" " * 255 + b"\n"
    (slot,) = (k for k in (0, 256) if content[k : k + 256] != blank)
    mark_of(path).write_bytes(content[: slot + 99] + (2 * blank)[slot + 99 :])
    assert len(Accountant(ledger_path=path)) == charges


@pytest.mark.parametrize("begun", [0, 256, 300])
@pytest.mark.parametrize("kept", [0, 1, 255])
def test_a_torn_first_write_of_the_mark_is_none(path, begun, kept):
    mark_of(path).write_bytes((2 * (b" " * 255 + b"\n"))[:begun])  # by a run that was killed
    Accountant(ledger_path=path).close()
    content = mark_of(path).read_bytes()
    mark_of(path).write_bytes(content[: 256 + kept])
    charged(path, STEP)
    assert len(Accountant(ledger_path=path)) == 1


def test_a_torn_last_line_is_dropped_and_told(path):
    charged(path, STEP, WHOLE)
    content = path.read_bytes()
    path.write_bytes(content + b'{"at": 2, "count": 1, "dig')
    with pytest.warns(UtilityWarning, match="is dropped"):
        resumed = Accountant(ledger_path=path)
    assert {str(e): n for _, _, e, n in resumed.ledger.entries()} == {
        str(STEP): 1,
        str(WHOLE): 1,
    }
    resumed.close()
    again = Accountant(ledger_path=path)  # mended, without a further warning
    assert image(again) == image(resumed)
    again.authorize(STEP)


def test_a_torn_line_without_a_mark_is_refused(path):
    charged(path, STEP, WHOLE)
    content = path.read_bytes() + b'{"at": 2, "count": 1, "dig'
    path.write_bytes(content)
    mark_of(path).unlink()
    assert "must end with a line that a ledger wrote" in refused(path)
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    "content", [b"notes of mine", b'{"columns": {}}', b"\0\0", b'{"config" : ']
)
def test_a_line_that_no_ledger_wrote_is_left_as_it_is(path, content):
    """A file of somebody's own, named by mistake, whose only line has no end, is no torn ledger."""
    path.write_bytes(content)
    assert "must end with a line that a ledger wrote" in refused(path)
    assert path.read_bytes() == content
    assert not mark_of(path).exists()


def test_a_dropped_line_is_off_the_disk_before_anything_is_charged(path, monkeypatch):
    charged(path, STEP)
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"at": 1, "co')
    synced = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.fstat(fd).st_size))
    with pytest.warns(UtilityWarning, match="is dropped"):
        Accountant(ledger_path=path).close()
    assert path.read_bytes()[HEADER:] == whole[HEADER:]
    assert len(whole) in synced


@pytest.mark.parametrize("number", [0, 1, 2, 3])
def test_a_damaged_line_is_refused(path, number):
    charged(path, STEP, STEP, WHOLE)
    content = path.read_bytes()
    header, rows = content[:HEADER], content[HEADER:].splitlines(keepends=True)
    for damaged in (
        rows[number]
        .replace(b'"count": 1', b'"count": 0')
        .replace(b'"unit": "example"', b'"unit": "user"'),
        rows[number].replace(b"p", b"q", 1),
        b"\n",
        b"[]\n",
        b"\xff\xfe\n",
        b'{"at": 0, "count": 1}\n',
    ):
        assert damaged != rows[number]
        path.write_bytes(b"".join([header, *rows[:number], damaged, *rows[number + 1 :]]))
        assert f"line {number + 3} of ledger file" in refused(path)


def test_lines_left_out_doubled_or_exchanged_are_refused(path):
    charged(path, STEP, STEP, WHOLE)
    content = path.read_bytes()
    rows = content[HEADER:].splitlines(keepends=True)
    for order in ([0, 2, 3], [0, 1, 1, 2, 3], [0, 1, 3, 2], [0, 1, 3]):
        path.write_bytes(b"".join([content[:HEADER], *(rows[k] for k in order)]))
        assert "is damaged or altered" in refused(path)


def test_a_line_that_does_not_follow_is_refused_even_with_a_true_digest(path):
    for row, gist in (
        ({"at": 7, "count": 1, "event": {"type": "NonPrivate"}}, "at must be 1"),
        (
            {"at": 1, "count": -1, "event": {"type": "NonPrivate"}},
            "count must be an integer >= 0",
        ),
        ({"at": 1, "count": 1, "event": {"type": "Unknown"}}, "event type must be one of"),
        ({"at": 1, "count": 1}, "event"),
        ({"at": 1, "count": 1, "event": 5}, "cannot be understood"),
        ({"ledger": 5}, "state must hold"),
    ):
        path.unlink(missing_ok=True)
        mark_of(path).unlink(missing_ok=True)
        charged(path, STEP)
        file = LedgerFile(path)
        file.append(row)
        file.close()
        assert gist in refused(path)


def test_a_long_file_is_never_in_memory_as_a_whole(path, monkeypatch):
    monkeypatch.setattr(ledger_file.os, "fsync", lambda fd: None)  # for speed
    charged(path, STEP)
    file = LedgerFile(path)
    for at in range(1, 20_000):
        file.append(charge_row(STEP, 1, at, None, False, {"run": at}))
    file.close()
    tracemalloc.start()
    assert len(Accountant(ledger_path=path)) == 20_000
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < path.stat().st_size / 2


def test_a_file_that_is_read_in_pieces_is_the_one_that_was_charged(path):
    """Every kind of event, repeated, nested, with marks of releases whose names look like a line."""
    accountant = Accountant(ledger_path=path)
    odd = 's}, "releases": {"run'
    for event in (STEP, Sequential((STEP, Repeat(FIXED, 2))), part("0"), part(odd), STEP, WHOLE):
        for k in range(3):
            accountant.authorize(event, k, releases={"run": 2 * k, odd: k})
    accountant.record(STEP, 2, adaptive=True)
    accountant.close()
    again = Accountant(ledger_path=path)
    assert image(again) == image(accountant)
    assert (again.marked(odd), again.marked("run")) == (2, 4)


# -- checkpoints ------------------------------------------------------------------------------------------------------


def test_a_file_ahead_of_the_checkpoint_wins(path):
    accountant = Accountant(ledger_path=path)
    accountant.authorize(STEP, 5)
    checkpoint = accountant.state_dict()
    accountant.authorize(STEP, 3)
    accountant.close()
    resumed = Accountant(ledger_path=path)
    with pytest.warns(UtilityWarning, match="3 released events ahead of the checkpoint"):
        resumed.load_state_dict(checkpoint)
    assert image(resumed) == image(accountant)
    resumed.load_state_dict(accountant.state_dict())  # level: nothing to tell
    resumed.authorize(STEP)
    resumed.close()
    with pytest.warns(UtilityWarning, match="4 released events ahead"):
        Accountant(ledger_path=path).load_state_dict(checkpoint)


def test_a_checkpoint_ahead_of_the_file_is_written_to_it(path):
    source = Accountant()
    source.authorize(STEP, 5)
    source.authorize(part("0"))
    target = Accountant(ledger_path=path)
    target.load_state_dict(source.state_dict())
    assert len(lines(path)) == 1
    target.close()
    again = Accountant(ledger_path=path)
    stored = again.state_dict()
    assert (
        stored["config"].pop("brought") == 6
    )  # the file is not that of the run, see Journal.continue_from
    known = source.state_dict()
    assert {key: stored[key] for key in known if key != "digest"} == {
        k: v for k, v in known.items() if k != "digest"
    }
    again.authorize(STEP)
    again.close()
    assert len(Accountant(ledger_path=path)) == 7


def test_a_checkpoint_of_another_run_is_refused_and_the_file_unchanged(path):
    charged(path, STEP)
    other = Accountant()
    other.authorize(STEP)
    resumed = Accountant(ledger_path=path)
    before = path.read_bytes()
    with pytest.raises(PrivacyError, match="would forget events charged here"):
        resumed.load_state_dict(other.state_dict())
    assert (path.read_bytes(), len(resumed)) == (before, 1)
