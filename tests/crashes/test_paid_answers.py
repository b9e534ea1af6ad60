"""Releases that are made at once, on a ledger file: whatever ends a run, the same run again has its one answer."""

from __future__ import annotations

import json
import os
import stat
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import torch_dpsco as dp
from tests.crashes.paid import (
    BUDGET,
    FAST,
    LABELS,
    ROWS,
    RUNS,
    SETTINGS,
    Run,
    carried_out,
    logistic,
    of_users,
    study,
)
from tests.estimators.test_partitions import Listed
from torch_dpsco.accounting import answers, ledger_file
from torch_dpsco.accounting.events import Pure
from torch_dpsco.errors import BudgetExceeded, PrivacyError, UtilityWarning
from torch_dpsco.estimators import LogisticRegression

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::torch_dpsco.errors.UtilityWarning"),
]


class Deadly:
    """Calls of the operating system that write; the process dies before one of them, or after the last."""

    def __init__(self, patch: Any, at: int) -> None:
        self._left = at
        for owner, name in (
            (ledger_file, "_write"),
            (ledger_file.os, "fsync"),
            (ledger_file.os, "write"),
            (answers.os, "replace"),
            (answers, "sync_folder"),
        ):
            patch.setattr(owner, name, self._counted(getattr(owner, name)))

    def _counted(self, real: Any) -> Any:
        def call(*args: Any) -> Any:
            if self._left == 0:
                os._exit(9)
            self._left -= 1
            return real(*args)

        return call


def died(folder: Path, run: Run, at: int, patch: Any) -> bool:
    """Runs the script in a child that dies at a call; returns whether it did. What it shows is in `shown`."""
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        assert code in (0, 9)
        return code == 9
    try:
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        Deadly(patch, at)
        unit = "user" if run is of_users else "example"
        ledger = dp.Accountant(dp.Budget(1.0, 1e-6, unit=unit), ledger_path=folder / "ledger")
        answer = run(ledger, ROWS)
        with open(folder / "shown", "w") as file:
            json.dump(answer, file)
        os._exit(0)
    except BaseException:
        os._exit(1)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in FAST else pytest.mark.weekly) for name in RUNS],
)
def test_a_release_that_dies_anywhere_has_one_answer(
    name: str, tmp_path: Path, monkeypatch: Any
) -> None:
    run = RUNS[name]
    (tmp_path / "whole").mkdir()
    _, once = carried_out(tmp_path / "whole", run)
    assert once > 0
    for at in range(200):
        folder = tmp_path / str(at)
        folder.mkdir()
        dead = died(folder, run, at, monkeypatch)
        answer, events = carried_out(folder, run)
        assert events == once, (at, events)
        if not dead:  # and what was shown is shown again
            assert answer == json.loads((folder / "shown").read_text())
            break
        assert carried_out(folder, run) == (answer, once)
    assert at > 10


def test_a_second_death_changes_nothing(tmp_path: Path, monkeypatch: Any) -> None:
    for at in (14, 12, 10, 8, 6):
        died(tmp_path, logistic, at, monkeypatch)
    answer, events = carried_out(tmp_path, logistic)
    assert carried_out(tmp_path, logistic) == (answer, events)
    assert events == carried_out(new(tmp_path), logistic)[1]


def new(folder: Path) -> Path:
    made = folder / "another"
    made.mkdir()
    return made


@pytest.mark.slow
def test_a_study_is_cut_and_paid_once(tmp_path: Path, monkeypatch: Any) -> None:
    real = answers._keep
    for at in range(7):
        folder = tmp_path / str(at)
        folder.mkdir()
        calls = iter(range(100))

        def keep(path: str, kept: Any, at: int = at, calls: Any = calls) -> None:
            if next(calls) == at:
                raise KeyboardInterrupt
            real(path, kept)

        with monkeypatch.context() as patch:
            patch.setattr(answers, "_keep", keep)
            with suppress(KeyboardInterrupt):
                study(folder)
        first = study(folder)
        assert study(folder) == first
        assert first[2] <= 2.0


def test_other_records_get_no_answer_of_these(tmp_path: Path) -> None:
    other = ROWS.copy()
    other[7] = 0.0
    first = carried_out(tmp_path, logistic)
    with pytest.raises(PrivacyError, match=r"other records .*anew=True"):
        carried_out(tmp_path, logistic, other)
    assert carried_out(tmp_path, logistic) == first


@pytest.mark.parametrize("name", ["blocks", "sparse"])
def test_other_records_that_are_read_in_parts_get_no_answer_of_these(
    name: str, tmp_path: Path
) -> None:
    other = ROWS.copy()
    other[7] = 0.0
    first = carried_out(tmp_path, RUNS[name])
    with pytest.raises(PrivacyError, match=r"other records .*anew=True"):
        carried_out(tmp_path, RUNS[name], other)
    assert carried_out(tmp_path, RUNS[name]) == first


def test_partitions_in_another_order_are_the_same_records(tmp_path: Path) -> None:
    def of(order: list[int]) -> Run:
        def run(ledger: Any, rows: np.ndarray) -> Any:
            parts = [[(rows[k::2], LABELS[k::2])] for k in order]
            table = Listed(*parts)
            model = LogisticRegression(
                **SETTINGS, classes=(-1, 1), n=len(rows), accountant=ledger
            )
            return model.fit(table).coef_.tolist()

        return run

    first = carried_out(tmp_path, of([0, 1]))
    assert carried_out(tmp_path, of([1, 0])) == first
    with pytest.raises(PrivacyError, match="other records"):
        carried_out(tmp_path, of([0, 0]))


def test_anew_charges_again_and_so_does_the_same_process(tmp_path: Path) -> None:
    half = {**SETTINGS, "epsilon": 0.3}

    def run(ledger: Any, rows: np.ndarray) -> Any:
        model = LogisticRegression(**half, classes=(-1, 1), accountant=ledger)
        return [model.fit(rows, LABELS).coef_.tolist() for _ in range(2)]

    (one, two), events = carried_out(tmp_path, run)
    assert one != two
    assert carried_out(tmp_path, run) == ([one, two], events)
    (three, four), more = carried_out(tmp_path, run, anew=True)
    assert len({str(answer) for answer in (one, two, three, four)}) == 4
    assert more == 2 * events


def test_an_answer_that_was_altered_is_refused(tmp_path: Path) -> None:
    carried_out(tmp_path, logistic)
    (path,) = tmp_path.glob("*.answer")
    kept = json.loads(path.read_text())
    for change in (
        {"answer": [kept["answer"][0], [0.0, 0.0, 0.0, 0.0]]},
        {"key": "00" * 32},
        {"key": "no"},
        {"records": 3},
    ):
        path.write_text(json.dumps({**kept, **change}))
        with pytest.raises(PrivacyError, match="answer"):
            carried_out(tmp_path, logistic)
    path.write_text(json.dumps({name: kept[name] for name in ("key", "records")}))
    with pytest.raises(PrivacyError, match="not the one that the ledger knows"):
        carried_out(tmp_path, logistic)
    path.unlink()
    with pytest.raises(PrivacyError, match="gone or damaged"):
        carried_out(tmp_path, logistic)


def test_the_files_of_answers_are_confidential(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        carried_out(tmp_path, logistic)
    finally:
        os.umask(before)
    (path,) = tmp_path.glob("*.answer")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not list(tmp_path.glob("*.new"))
    planted = Path(f"{path}.new")
    planted.touch()
    planted.chmod(0o666)
    with open(planted) as spy:
        answers._keep(str(path), {"answer": 1.0})
        assert spy.read() == ""
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def bare(draw: Callable[[], Any]) -> Run:
    return lambda ledger, rows: ledger.pay(Pure(0.5), lambda: {"a": 1}, lambda key: "", draw)


def test_a_draw_that_failed_is_not_repeated(tmp_path: Path) -> None:
    def fails() -> Any:
        raise ArithmeticError("of the noise")

    with pytest.raises(ArithmeticError):
        carried_out(tmp_path, bare(fails))
    with pytest.raises(PrivacyError, match="not the one that the ledger knows"):
        carried_out(tmp_path, bare(lambda: 1.0))
    assert carried_out(tmp_path, bare(lambda: 1.0), anew=True) == (1.0, 2)


def test_after_a_failed_draw_the_same_process_pays_anew(tmp_path: Path) -> None:
    ledger = dp.Accountant(BUDGET, ledger_path=tmp_path / "ledger")

    def fails() -> Any:
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        bare(fails)(ledger, ROWS)
    assert bare(lambda: 2.0)(ledger, ROWS) == 2.0
    assert len(ledger) == 2


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_interrupted_draw_is_made_under_its_charge(error: Any, tmp_path: Path) -> None:
    ledger = dp.Accountant(BUDGET, ledger_path=tmp_path / "ledger")

    def interrupted() -> Any:
        raise error

    with pytest.raises(error):
        bare(interrupted)(ledger, ROWS)
    assert bare(lambda: 2.0)(ledger, ROWS) == 2.0  # the same process, and the next one
    assert len(ledger) == 1
    ledger.close()
    assert carried_out(tmp_path, bare(lambda: 3.0)) == (2.0, 1)


def test_a_full_disk_shows_nothing_and_loses_nothing(tmp_path: Path, monkeypatch: Any) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    def draw() -> float:
        monkeypatch.setattr(answers.os, "replace", full)
        return 4.0

    with pytest.raises(PrivacyError, match=r"could not be kept .*No space"):
        carried_out(tmp_path, bare(draw))
    monkeypatch.undo()
    assert carried_out(tmp_path, bare(lambda: 5.0)) == (5.0, 1)


def test_what_does_not_fit_leaves_no_charge(tmp_path: Path) -> None:
    run: Run = lambda ledger, rows: ledger.pay(  # noqa: E731
        Pure(9.0), dict, lambda key: "", lambda: 1.0
    )
    for _ in range(2):
        with pytest.raises(BudgetExceeded):
            carried_out(tmp_path, run)


def test_the_answer_is_said_to_be_an_old_one(tmp_path: Path) -> None:
    carried_out(tmp_path, logistic)
    with pytest.warns(UtilityWarning, match="given again, and nothing is charged"):
        carried_out(tmp_path, logistic)


def test_threads_get_answers_of_their_own(tmp_path: Path) -> None:
    ledger = dp.Accountant(dp.Budget(20.0, 1e-6), ledger_path=tmp_path / "ledger")
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda k: bare(lambda: float(k))(ledger, ROWS), range(20)))
    assert sorted(found) == [float(k) for k in range(20)]
    assert len(ledger) == 20
