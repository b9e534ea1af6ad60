"""The contract of every optimizer that releases its answer alone, once: rows are `ONCE`, columns the tests below."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import torch_dpsco as dp
from tests.contract.runs import same
from torch_dpsco.accounting.ledger import Ledger
from torch_dpsco.errors import (
    BudgetExceeded,
    InfeasibleError,
    PrivacyError,
    SequenceError,
    UnitError,
)
from torch_dpsco.noise import SecretState
from torch_dpsco.step.run import CommonOptimizer

# Twelve records are few, and seeds warn as well.
pytestmark = pytest.mark.filterwarnings("ignore::torch_dpsco.errors.UtilityWarning")
N, DIM, DELTA = 12, 3, 1e-3
BUDGET = dp.Budget(1.0, DELTA)
LOSS, HINGE = dp.losses.Logistic(), dp.losses.Hinge(power=1.5)


def layer() -> nn.Linear:
    """Returns a layer at 0."""
    model = nn.Linear(DIM, 1, bias=False, dtype=torch.float64)
    nn.init.zeros_(model.weight)
    return model


def records(n: int = N) -> TensorDataset:
    draw = torch.Generator().manual_seed(0)
    features = torch.randn(n, DIM, generator=draw, dtype=torch.float64)
    return TensorDataset(features, torch.randn(n, 1, generator=draw, dtype=torch.float64).sign())


@dataclass(frozen=True)
class Once:
    """An optimizer under contract, by its class and a plan's keywords; `loss` where steps are made, by a loop."""

    name: str
    cls: Any
    numbers: Callable[[], dict[str, Any]]
    loss: dp.losses.Loss | None = None

    @cached_property
    def plan(self) -> Any:
        return self.cls.plan(n=N, budget=BUDGET, **self.numbers())

    def make(self, **given: Any) -> Run:
        model = layer()
        return Run(self, model, self.cls(model.parameters(), self.plan, **given))


@dataclass
class Run:
    """A layer with its optimizer."""

    row: Once
    model: nn.Linear
    opt: Any
    release: Callable[[], Any] = print

    def prepare(self, data: TensorDataset | None = None) -> Run:
        """Does everything but the last thing, by which the answer is released."""
        data = records() if data is None else data
        self.release = lambda: (self.opt.solve(data), self.opt.finalize())
        if self.row.loss is not None:
            self.release = self.opt.step
            for left, (x, y) in zip(
                reversed(range(self.row.plan.steps)), self.opt.loader(data), strict=False
            ):
                self.row.loss(self.model(x), y).backward()
                if left:
                    self.opt.step()
        return self

    def parameters(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]

    def snapshot(self) -> tuple[list[torch.Tensor], str, int, bool]:
        accountant = self.opt.accountant
        return self.parameters(), accountant.ledger.digest(), len(accountant), self.opt.finalized


def assert_unchanged(run: Run, before: tuple[list[torch.Tensor], str, int, bool]) -> None:
    """Parameters, ledger and the answer's being there are those of `before`."""
    now = run.snapshot()
    assert same(now[0], before[0])
    assert now[1:] == before[1:]


def _bolt_on() -> dict[str, Any]:
    return {
        "problem": LOSS.problem(bound_x=1.0, radius=1.0),
        "dim": layer(),
        "batch_size": 4,
        "epochs": 2,
    }


def _holder() -> dict[str, Any]:
    problem = HINGE.problem(bound_x=1.0, radius=1.0)
    return {"problem": problem, "dim": layer(), "batch_size": 5, "epochs": 2, "lr": 0.1}


def _linear() -> dict[str, Any]:
    return {"model": layer(), "loss": LOSS, "bound_x": 1.0, "reg": 1.0}


ONCE = [
    Once("bolt-on", dp.BoltOnPSGD, _bolt_on, LOSS),
    Once("holder-output", dp.HolderOutputSGD, _holder, HINGE),
    Once("output", dp.OutputPerturbation, _linear),
    Once("objective", dp.ObjectivePerturbation, _linear),
    Once("noisy-gd", dp.NoisyGD, _linear),
]


@pytest.fixture(params=ONCE, ids=lambda row: row.name)
def row(request: pytest.FixtureRequest) -> Once:
    return request.param


class Broken:
    """A source of noise that an interrupt hits."""

    def __getattribute__(self, name: str) -> Any:
        raise KeyboardInterrupt(name)


def test_every_public_optimizer_that_makes_no_private_steps_has_a_row() -> None:
    public = {
        v
        for v in (getattr(dp, name) for name in dp.__all__)
        if isinstance(v, type) and issubclass(v, CommonOptimizer)
    }
    assert {v for v in public if not issubclass(v, dp.PrivateOptimizer)} == {
        row.cls for row in ONCE
    }


# -- the release ------------------------------------------------------------------------------------------------------


@pytest.mark.cases(1, 1)
def test_nothing_is_charged_before_the_answer_and_then_the_plans_event(row: Once) -> None:
    run = row.make()
    start = run.parameters()
    assert len(run.prepare().opt.accountant) == 0
    run.release()
    assert run.opt.finalized
    assert len(run.opt.accountant) == 1
    assert run.opt.accountant.ledger.digest() == Ledger([row.plan.event()]).digest()
    assert run.opt.report(DELTA).epsilon == row.plan.epsilon() <= BUDGET.epsilon
    assert not same(run.parameters(), start)
    assert all(bool(p.isfinite().all()) for p in run.parameters())


@pytest.mark.cases(2, 1)
def test_each_run_draws_noise_of_its_own_unless_a_generator_repeats_it(row: Once) -> None:
    def answer(**given: Any) -> list[torch.Tensor]:
        run = row.make(**given)
        torch.manual_seed(0)
        run.prepare(TensorDataset(*(t[:1].repeat(N, 1) for t in records().tensors))).release()
        return run.parameters()

    assert not same(answer(), answer())
    assert same(*(answer(generator=torch.Generator().manual_seed(3)) for _ in range(2)))


def test_a_second_answer_is_the_first_one(row: Once) -> None:
    run = row.make().prepare()
    run.release()
    before = run.snapshot()
    run.opt.finalize()
    assert_unchanged(run, before)
    with pytest.raises(SequenceError, match="is released"):
        run.prepare().release()
    with pytest.raises(SequenceError, match="is released"):
        run.opt.step()
    assert_unchanged(run, before)


def test_an_answer_of_nothing_is_refused(row: Once) -> None:
    run = row.make()
    before = run.snapshot()
    with pytest.raises(SequenceError, match=r"nothing (was solved|is released yet)"):
        run.opt.finalize()
    assert_unchanged(run, before)


def test_the_context_finalizes_unless_it_fails(row: Once) -> None:
    run, failed = row.make(), row.make()
    with run.opt:
        run.prepare().release()
    assert run.opt.finalized
    failed.prepare()
    with pytest.raises(KeyboardInterrupt), failed.opt:
        raise KeyboardInterrupt
    assert not failed.opt.finalized
    assert len(failed.opt.accountant) == 0
    failed.release()
    assert failed.opt.finalized


# -- budgets and interrupts -------------------------------------------------------------------------------------------


def test_a_budget_that_is_spent_refuses_the_answer_and_the_next_optimizer(row: Once) -> None:
    accountant = row.plan.ledger()
    run = row.make(accountant=accountant).prepare()
    accountant.record(row.plan.event())
    before = run.snapshot()
    for call in (run.release, run.opt.finalize):
        with pytest.raises(BudgetExceeded, match="past the budget"):
            call()
        if row.loss is None:  # of a loop parameters hold the last iterate, which stays secret
            assert_unchanged(run, before)
        assert run.snapshot()[1:] == before[1:]
    with pytest.raises(InfeasibleError):
        row.make(accountant=accountant)


def test_an_interrupt_before_the_charge_spends_and_shows_nothing(
    row: Once, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = row.make().prepare()
    before = run.snapshot()

    def interrupt(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(dp.Accountant, "authorize", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run.release()
    assert run.snapshot()[1:] == before[1:]
    run.opt.finalize()
    assert len(run.opt.accountant) == 1


def test_an_interrupt_after_the_charge_has_spent_it_and_shows_nothing(row: Once) -> None:
    run = row.make().prepare()
    noise, run.opt._noise = run.opt._noise, Broken()
    with pytest.raises(KeyboardInterrupt):
        run.release()
    assert (len(run.opt.accountant), run.opt.finalized) == (1, False)
    run.opt._noise = noise
    with pytest.raises(BudgetExceeded):  # another answer is another release
        run.opt.finalize()
    assert len(run.opt.accountant) == 1


# -- refused data -----------------------------------------------------------------------------------------------------


@pytest.mark.cases(5, 1)
def test_refused_data_leave_everything_as_it_was(row: Once) -> None:
    run = row.make()
    before = run.snapshot()
    for wrong in (records(N + 1), records(0)):
        with pytest.raises(UnitError):
            run.prepare(wrong).release()
        assert_unchanged(run, before)
    run.prepare().release()
    run = row.make()
    features, labels = records().tensors
    with pytest.raises((ValueError, RuntimeError)):  # torch's own in a loop
        run.prepare(TensorDataset(features[:, :2], labels)).release()
    assert_unchanged(run, before)
    with pytest.raises(SequenceError):
        run.opt.finalize()
    if row.loss is not None:
        run.opt.discard()
    run.prepare().release()  # a new loader begins with the permutation again
    assert len(run.opt.accountant) == 1


def test_records_without_a_number_count_as_some_record(row: Once) -> None:
    features, labels = records().tensors
    features[3], features[4, 0] = torch.nan, torch.inf
    run = row.make().prepare(TensorDataset(features, labels))
    run.release()
    assert len(run.opt.accountant) == 1
    assert all(bool(p.isfinite().all()) for p in run.parameters())


# -- copies and checkpoints -------------------------------------------------------------------------------------------


def test_a_run_is_neither_copied_nor_pickled(row: Once) -> None:
    run = row.make().prepare()
    for act in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(SequenceError, match="must not be copied"):
            act(run.opt)


def test_nothing_is_saved_before_the_answer(row: Once) -> None:
    run = row.make().prepare()
    with pytest.raises(SequenceError, match="nothing may be saved before finalize"):
        run.opt.state_dict()


def test_the_state_of_an_answer_is_no_secret_and_forgets_no_charge(row: Once) -> None:
    run = row.make().prepare()
    run.release()
    file = io.BytesIO()
    torch.save((run.model.state_dict(), run.opt.state_dict()), file)
    file.seek(0)
    model, state = torch.load(file, weights_only=True)
    assert not isinstance(state, SecretState)
    assert not state["state"]
    before = run.snapshot()
    run.opt.load_state_dict(state)
    assert_unchanged(run, before)
    other = row.make()
    other.model.load_state_dict(model)
    other.opt.load_state_dict(state)
    assert same(other.parameters(), run.parameters())
    assert (
        not other.opt.finalized
    )  # torch's state alone: an answer of this one is another release


def test_what_the_noise_was_calibrated_for_cannot_be_reassigned(row: Once) -> None:
    run = row.make().prepare()
    before = run.snapshot()
    with pytest.raises(PrivacyError, match="accountant is fixed at construction"):
        run.opt.accountant = dp.Accountant()
    with pytest.raises(SequenceError, match="params are fixed at construction"):
        run.opt.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    assert_unchanged(run, before)
