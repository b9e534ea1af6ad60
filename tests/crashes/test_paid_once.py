"""No charge pays twice: copies, files, and marks of interrupted runs."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import torch_dpsco as dp
from torch_dpsco.accounting.events import PoissonGaussian
from torch_dpsco.errors import PrivacyError, UtilityWarning
from torch_dpsco.rules import SGD
from torch_dpsco.sampling.samplers import fingerprint
from torch_dpsco.step.oracle import Clipped

EVENT = PoissonGaussian(4.0, 0.01)
BUDGET = dp.Budget(4.0, 1e-5, adjacency="add_remove")


def data(shift: int = 0) -> TensorDataset:
    x = torch.arange(48.0).reshape(16, 3).roll(shift, 0) / 48
    return TensorDataset(x, x.sum(1, keepdim=True))


def one_pass() -> tuple[nn.Module, dp.PrivateOptimizer]:
    model = dp.attach(nn.Linear(3, 1))
    parts: dict[str, Any] = {
        "oracle": Clipped(1.0, 1.0, 4),
        "rule": SGD(),
        "design": dp.Disjoint(4, 16),
    }
    return model, dp.PrivateOptimizer(model.parameters(), 0.1, **parts)


def step(model: nn.Module, optimizer: dp.PrivateOptimizer, batch: Any) -> None:
    nn.functional.mse_loss(model(batch[0]), batch[1]).backward()
    optimizer.step()


def test_a_copy_goes_on_with_the_records_of_its_run_only() -> None:
    model, optimizer = one_pass()
    step(model, optimizer, next(iter(optimizer.loader(data()))))
    twin_model, twin = copy.deepcopy((model, optimizer))
    with pytest.raises(PrivacyError, match="dataset must hold the records of the run"):
        twin.loader(data(shift=1), resume=True)
    step(twin_model, twin, next(iter(twin.loader(data(), resume=True))))
    assert twin.steps == 2


@pytest.mark.slow
def test_a_file_that_was_filled_from_a_checkpoint_is_not_that_of_its_run(tmp_path: Path) -> None:
    def run(path: str) -> tuple[nn.Module, dp.HolderSGD]:
        model = dp.attach(nn.Linear(3, 1))
        accountant = dp.Accountant(BUDGET, ledger_path=tmp_path / path)
        problem = dp.Problem(lipschitz=1.0)
        plan = dp.HolderSGD.plan(
            lr=0.1, problem=problem, noise_multiplier=4.0, batch_size=4, n=16, budget=BUDGET
        )
        return model, dp.HolderSGD(model.parameters(), plan, accountant=accountant)

    model, optimizer = run("first")
    batches = iter(optimizer.loader(data(), steps=2))
    step(model, optimizer, next(batches))
    saved = optimizer.state_dict()
    step(
        model, optimizer, next(batches)
    )  # may have been released, and the checkpoint does not know of it
    optimizer.accountant.close()
    _, other = run("second")
    other.accountant.load_state_dict(saved["dpsco"]["ledger"])
    with pytest.raises(PrivacyError, match="ledger file of the run"):
        other.resume(saved)
    other.accountant.close()
    with pytest.raises(PrivacyError, match="ledger file of the run"):
        run("second")[1].resume(saved)
    with pytest.warns(UtilityWarning, match="1 step"):
        assert run("first")[1].resume(saved) == 1


def test_a_budget_is_not_taken_away_once_charged() -> None:
    accountant = dp.Accountant(BUDGET)
    accountant.budget = None  # nothing was released yet
    accountant.budget = BUDGET
    accountant.authorize(EVENT)
    with pytest.raises(PrivacyError, match="must be fixed before the first event"):
        accountant.budget = None
    with pytest.raises(PrivacyError, match="must be planned"):
        accountant.authorize(PoissonGaussian(2.0, 0.02))


def test_a_mark_that_was_replaced_while_open_is_noticed(tmp_path: Path) -> None:
    accountant = dp.Accountant(BUDGET, ledger_path=tmp_path / "ledger")
    accountant.authorize(EVENT)
    mark = tmp_path / "ledger.mark"
    content = mark.read_bytes()
    os.rename(mark, tmp_path / "elsewhere")
    mark.write_bytes(content)
    with pytest.raises(PrivacyError, match="or its mark was"):
        accountant.authorize(EVENT)
    assert len(accountant) == 1


class Odd:
    """Looks alike, whatever it holds."""

    def __repr__(self) -> str:
        return "Odd"


@pytest.mark.parametrize(
    "leaf", [Odd(), torch.eye(2).to_sparse(), {1: Odd()}], ids=["object", "sparse", "nested"]
)
def test_records_that_cannot_be_told_apart_are_refused(leaf: Any) -> None:
    with pytest.raises(PrivacyError, match="dataset must hold dense tensors"):
        fingerprint("00" * 16, [leaf])


def test_copies_of_a_secret_state_are_secret() -> None:
    model, optimizer = one_pass()
    step(model, optimizer, next(iter(optimizer.loader(data()))))
    state = optimizer.state_dict()
    for twin in (copy.copy(state), copy.deepcopy(state), state.copy()):
        assert type(twin) is type(state)
        assert repr(twin) == repr(state)
        assert "CONFIDENTIAL" in repr(twin)
    assert type(copy.deepcopy(state)["dpsco"]) is type(state["dpsco"])


def begun(accountant: dp.Accountant) -> tuple[nn.Module, dp.HolderSGD]:
    """Returns an optimizer for which the budget of the accountant has room to the last bit."""
    model = dp.attach(nn.Linear(3, 1))
    plan = dp.HolderSGD.plan(
        problem=dp.Problem(lipschitz=1.0),
        batch_size=4,
        n=16,
        budget=BUDGET,
        steps=4,
        lr=0.1,
        sampling="poisson",
    )
    return model, dp.HolderSGD(model.parameters(), plan, accountant=accountant)


def test_a_ledger_in_memory_resumes_its_own_runs() -> None:
    """In the process that has charged it, which knows what was released."""
    accountant = dp.Accountant(BUDGET)
    model, optimizer = begun(accountant)
    batches = iter(optimizer.loader(data()))
    step(model, optimizer, next(batches))
    saved = optimizer.state_dict()
    for _ in range(2):
        step(model, optimizer, next(batches))
    again, resumed = begun(accountant)
    again.load_state_dict(model.state_dict())
    with pytest.warns(UtilityWarning, match="^2 steps after step 1 were lost"):
        assert resumed.resume(saved) == 2
    step(again, resumed, next(iter(resumed.loader(data()))))
    resumed.finalize()
    assert (resumed.steps, len(accountant)) == (4, 4)
    assert accountant.get_epsilon(BUDGET.delta) <= BUDGET.epsilon
    with pytest.raises(PrivacyError, match="ledger file of the run"):
        begun(dp.Accountant(BUDGET))[1].resume(saved)


def test_a_ledger_in_memory_that_was_filled_from_a_checkpoint_is_not_that_of_its_run() -> None:
    model, optimizer = begun(dp.Accountant(BUDGET))
    batches = iter(optimizer.loader(data()))
    step(model, optimizer, next(batches))
    saved = optimizer.state_dict()
    step(model, optimizer, next(batches))  # of which the checkpoint knows nothing
    other = dp.Accountant(BUDGET)
    other.load_state_dict(saved["dpsco"]["ledger"])
    assert other.ledger_id == optimizer.accountant.ledger_id
    with pytest.raises(PrivacyError, match="ledger file of the run"):
        begun(other)[1].resume(saved)
