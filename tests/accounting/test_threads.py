"""Threads that share an accountant: no budget is passed, no charge is lost, every ledger file opens."""

from __future__ import annotations

import copy
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from joblib import Parallel as Jobs
from joblib import delayed

import torch_dpsco as dp
from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.accounting.budgets import Budget
from torch_dpsco.accounting.events import Pure
from torch_dpsco.accounting.journal import Journal
from torch_dpsco.accounting.ledger import LOCK
from torch_dpsco.errors import BudgetExceeded, InfeasibleError, PrivacyError, SequenceError
from torch_dpsco.estimators import LogisticRegression

from .ledgers import FIXED, STEP

THREADS, ROUNDS = 16, 1000


@pytest.fixture(autouse=True)
def _eager_threads() -> Iterator[None]:
    """Threads take turns after a microsecond, so that a race that can be lost is lost."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual)


def together(work: Callable[[int], None], threads: int = THREADS) -> None:
    """Runs work(number) in that many threads at once; raises what one of them raised."""
    start, errors = threading.Barrier(threads), []

    def run(number: int) -> None:
        start.wait()
        try:
            work(number)
        except BaseException as error:
            errors.append(error)

    running = [threading.Thread(target=run, args=(number,)) for number in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    if errors:
        raise errors[0]


@pytest.fixture
def _late_charges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between a decision and its charge another thread runs."""
    charge = Journal.charge

    def later(*args: Any) -> int:
        time.sleep(5e-4)
        return charge(*args)

    monkeypatch.setattr(Journal, "charge", later)


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("attempt", range(4))
def test_no_charge_of_16_threads_is_lost(attempt):
    accountant = Accountant()
    events = [Pure(1e-6), STEP, FIXED]

    def work(number: int) -> None:
        for k in range(ROUNDS):
            accountant.authorize(events[(number + k) % 3])

    together(work)
    assert (
        len(accountant)
        == sum(times for *_, times in accountant.ledger.entries())
        == THREADS * ROUNDS
    )


@pytest.mark.cases(0, 1)
@pytest.mark.usefixtures("_late_charges")
@pytest.mark.parametrize("kinds", [1, 10])
def test_no_number_of_threads_passes_the_budget(kinds):
    """Room for 500 events of one kind, or of 10 kinds, and 16 threads that each try for 100."""
    accountant, granted = Accountant(Budget(5.0, 0.0, "replace_one")), []

    def work(number: int) -> None:
        for k in range(ROUNDS // 10):
            try:
                accountant.authorize(Pure(0.01 + 1e-8 * ((number + k) % kinds)))
            except BudgetExceeded:
                continue
            granted.append(1)

    together(work)
    assert accountant.ledger.pure("replace_one") <= 5.0 * (1 + 1e-12)
    assert len(granted) == len(accountant) >= 499


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("attempt", range(4))
def test_questions_asked_during_charges_leave_no_stale_answer(attempt):
    """A total summed while a charge is on its way must not be kept: later decisions would rest on it."""
    accountant = Accountant()
    accountant.authorize(STEP)

    def work(number: int) -> None:
        for k in range(100):
            if number % 2:
                accountant.authorize(STEP)
            else:
                accountant.get_epsilon(
                    1e-5 * (1 + k / 1000), adjacency="add_remove", method="rdp"
                )
                list(accountant.ledger.entries()), accountant.state_dict()

    together(work)
    fresh = Accountant()
    fresh.authorize(STEP, len(accountant))
    assert len(accountant) == 1 + 8 * 100
    assert accountant.ledger.epsilon(1e-6, "add_remove", "rdp") == fresh.ledger.epsilon(
        1e-6, "add_remove", "rdp"
    )


@pytest.mark.weekly
@pytest.mark.parametrize(
    ("rounds", "syncs"),
    [(20, True), pytest.param(ROUNDS, False, marks=pytest.mark.slow)],
    ids=["disk", "1000 rounds"],
)
def test_a_ledger_file_that_16_threads_write_opens_again(tmp_path, monkeypatch, rounds, syncs):
    if not syncs:
        monkeypatch.setattr(os, "fsync", lambda fd: None)
    accountant = Accountant(ledger_path=tmp_path / "ledger")

    def work(number: int) -> None:
        for _ in range(rounds):
            accountant.authorize(Pure(1e-3 * (number % 3 + 1)))

    together(work)
    accountant.close()
    read = Accountant(ledger_path=tmp_path / "ledger")
    assert len(read) == len(accountant) == THREADS * rounds
    assert read.ledger.digest() == accountant.ledger.digest()
    read.close()


def test_a_second_accountant_in_another_thread_cannot_open_the_file(tmp_path):
    opened, refused = [], []

    def work(number: int) -> None:
        try:
            opened.append(Accountant(ledger_path=tmp_path / "ledger"))
        except PrivacyError:
            refused.append(number)

    together(work)
    assert (len(opened), len(refused)) == (1, THREADS - 1)
    opened[0].close()


@pytest.mark.slow
@pytest.mark.usefixtures("_late_charges")
def test_fits_in_threads_never_pass_a_shared_budget():
    """joblib's threads: of 24 fits at 0.16 each, 6 fit into 1.0, and never a seventh."""
    generator = np.random.default_rng(0)
    x = generator.uniform(-1, 1, (60, 3))
    y = (x[:, 0] > 0).astype(int)

    def fit(accountant: Accountant) -> int:
        model = LogisticRegression(
            epsilon=0.16, delta=0.0, bound_x=2.0, classes=(0, 1), accountant=accountant
        )
        try:
            model.fit(x, y)
        except (BudgetExceeded, InfeasibleError):
            return 0
        return 1

    accountant = Accountant(Budget(1.0, 0.0))
    made = sum(Jobs(n_jobs=8, backend="threading")(delayed(fit)(accountant) for _ in range(24)))
    assert accountant.get_epsilon(0.0) <= 1.0
    assert made == len(accountant) == 6


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_during_a_charge_leaves_a_whole_ledger_and_a_free_lock():
    accountant, stop = Accountant(), threading.Event()
    accountant.authorize(STEP)

    def work(number: int) -> None:
        if number:
            while not stop.is_set():
                accountant.authorize(STEP)
            return
        for _ in range(8):
            if not (child := os.fork()):
                os._exit(0 if _is_whole(accountant) else 1)
            codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            if codes[-1]:  # one alarm is enough
                break
        stop.set()

    codes: list[int] = []
    together(work, 4)
    assert codes == [0] * 8
    assert LOCK.acquire(blocking=False)
    LOCK.release()


def _is_whole(accountant: Accountant) -> bool:
    """Whether the ledger can be asked, by another thread too; a lock that stays taken ends in an alarm."""
    signal.alarm(20)
    counted = []
    asking = threading.Thread(
        target=lambda: counted.append(sum(times for *_, times in accountant.ledger.entries()))
    )
    asking.start()
    asking.join()
    return counted == [len(accountant)]


# -- optimizers -------------------------------------------------------------------------------------------------------


def clipped(
    accountant: Accountant,
) -> tuple[torch.nn.Linear, dp.ClippedSGD, Iterator[list[torch.Tensor]]]:
    model = dp.attach(torch.nn.Linear(4, 1))
    plan = dp.ClippedSGD.plan(lr=0.1, clip=1.0, noise_multiplier=2.0, sampling=dp.Poisson(8, 40))
    ours = dp.ClippedSGD(model.parameters(), plan, accountant=accountant)
    data = torch.utils.data.TensorDataset(torch.randn(40, 4), torch.randn(40, 1))
    return model, ours, iter(ours.loader(data, steps=20))


def test_a_step_during_a_step_is_refused():
    """Nothing is charged or moved for the second one, and the first goes on as if it had been alone."""
    accountant = Accountant()
    model, ours, batches = clipped(accountant)
    errors: list[BaseException] = []

    def closure() -> float:
        x, y = next(batches)
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        before = [p.detach().clone() for p in model.parameters()], len(accountant)

        def second(action: Callable[[], object]) -> None:
            try:
                action()
            except SequenceError as error:
                errors.append(error)

        for action in (
            ours.step,
            ours.accumulate,
            ours.finalize,
            lambda: ours.load_state_dict({}),
        ):
            thread = threading.Thread(target=second, args=(action,))
            thread.start()
            thread.join()
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before[0], strict=True))
        assert len(accountant) == before[1]
        return float(loss.detach())

    ours.step(closure)
    assert len(errors) == 4
    assert all("running in another thread" in str(error) for error in errors)
    assert len(accountant) == ours.steps == 1


def test_a_secret_run_too_is_for_one_thread_at_a_time():
    data = torch.utils.data.TensorDataset(torch.rand(20, 2).double(), torch.ones(20).double())
    layer = torch.nn.Linear(2, 1, bias=False, dtype=torch.float64)
    problem = dp.losses.Logistic().problem(bound_x=1.0, radius=1.0)
    plan = dp.HolderOutputSGD.plan(
        problem=problem,
        n=20,
        dim=layer,
        budget=dp.Budget(1.0, 1e-4, "replace_one"),
        batch_size=10,
        lr=0.01,
    )
    ours = dp.HolderOutputSGD(layer.parameters(), plan)
    x, y = next(iter(ours.loader(data)))
    errors = []

    def second() -> None:
        try:
            ours.step()
        except SequenceError as error:
            errors.append(str(error))

    def closure() -> float:
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()
        loss = dp.losses.Logistic()(layer(x), y[:, None])
        loss.backward()
        return float(loss.detach())

    ours.step(closure)
    assert ours.steps == 1
    assert len(errors) == 1
    assert "another thread" in errors[0]


def test_steps_of_several_threads_one_after_the_other_are_steps():
    model, ours, batches = clipped(accountant := Accountant())

    def work(_: int) -> None:
        x, y = next(batches)
        torch.nn.functional.mse_loss(model(x), y).backward()
        ours.step()

    for number in range(3):
        together(lambda _, number=number: work(number), 1)
    assert len(accountant) == ours.steps == 3


def test_a_copy_steps_while_the_original_does():
    """A copy has a turn of its own, also one that is made during a step."""
    model, ours, batches = clipped(accountant := Accountant())

    def closure() -> float:
        twin, copied = copy.deepcopy((model, ours))
        made = iter(
            copied.loader(
                torch.utils.data.TensorDataset(torch.randn(40, 4), torch.randn(40, 1)), steps=1
            )
        )
        other, target = next(made)
        torch.nn.functional.mse_loss(twin(other), target).backward()
        together(lambda _: copied.step(), 1)
        x, y = next(batches)
        torch.nn.functional.mse_loss(model(x), y).backward()
        return 0.0

    ours.step(closure)
    assert len(accountant) == 2
