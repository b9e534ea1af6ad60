"""Opacus as its users have it, with an accountant of ours that also writes a file, refuses, or is bound late."""

from __future__ import annotations

import pytest
import torch
from opacus import PrivacyEngine
from opacus.accountants import RDPAccountant
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.utils.data import DataLoader

import torch_dpsco.integrations.opacus  # noqa: F401 (makes "dpsco" known to Opacus)
from tests.accounting.ledgers import DELTA, image
from tests.accounting.opacus_script import DATA, Script
from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.accounting.budgets import Budget
from torch_dpsco.accounting.events import ADD_REMOVE, PoissonGaussian
from torch_dpsco.errors import BudgetExceeded, UtilityWarning


def engine_of(
    accountant: Accountant,
) -> tuple[PrivacyEngine, nn.Module, torch.optim.Optimizer, DataLoader]:
    """Returns what make_private gives for an engine whose accountant was made by the user."""
    engine, model = PrivacyEngine(accountant="dpsco"), nn.Linear(3, 1)
    engine.accountant = accountant
    return engine, *engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(DATA, batch_size=16, shuffle=True),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )


def train(model: nn.Module, optimizer: torch.optim.Optimizer, loader) -> None:
    for x, _ in loader:
        model(x).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.slow
def test_calibration_leaves_the_accountant_of_the_engine_alone():
    accountant = Accountant(Budget(3.0, DELTA, adjacency=ADD_REMOVE))
    engine, model = PrivacyEngine(accountant="dpsco"), nn.Linear(3, 1)
    engine.accountant = accountant
    before = image(accountant)
    engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(DATA, batch_size=16, shuffle=True),
        target_epsilon=2.0,
        target_delta=DELTA,
        epochs=1,
        max_grad_norm=1.0,
    )
    assert image(accountant) == before


def test_a_second_make_private_goes_on_in_the_same_ledger_and_opacus_warns():
    script = Script()
    script.steps(3)
    _, model, optimizer, loader = engine_of_silently(script.accountant)
    train(model, optimizer, loader)
    assert script.accountant.history == [(1.0, 0.25, 7)]


def test_an_accountant_with_a_file_serves_opacus_and_its_checkpoints(tmp_path):
    first = Accountant(ledger_path=tmp_path / "ledger")
    engine, model, optimizer, loader = engine_of(first)
    train(model, optimizer, loader)
    engine.save_checkpoint(path=tmp_path / "checkpoint", module=model, optimizer=optimizer)
    train(model, optimizer, loader)
    first.close()
    second = Accountant(ledger_path=tmp_path / "ledger")
    assert image(second) == image(first)
    engine, model, optimizer, loader = engine_of_silently(second)
    with pytest.warns(UtilityWarning, match="4 released events ahead of the checkpoint"):
        engine.load_checkpoint(path=tmp_path / "checkpoint", module=model, optimizer=optimizer)
    train(model, optimizer, loader)
    assert second.history == [(1.0, 0.25, 12)]


def engine_of_silently(accountant: Accountant):
    with pytest.warns(UserWarning, match=r"."):  # Opacus: the accountant is in use already
        return engine_of(accountant)


@pytest.mark.slow
def test_a_budget_under_the_batch_memory_manager_stops_at_the_last_whole_batch():
    probe = Accountant(Budget(6.0, DELTA, adjacency=ADD_REMOVE))
    most = probe.max_steps(PoissonGaussian(1.0, 0.25))
    assert 2 < most < 100
    script = Script(budget=Budget(6.0, DELTA, adjacency=ADD_REMOVE))

    def epochs() -> None:
        for _ in range(most):
            with BatchMemoryManager(
                data_loader=script.loader, max_physical_batch_size=5, optimizer=script.optimizer
            ) as parts:
                train(script.model, script.optimizer, parts)

    with pytest.raises(BudgetExceeded, match="room for 0 more of this event"):
        epochs()
    assert script.accountant.history == [(1.0, 0.25, most)]
    weights = [parameter.clone() for parameter in script.model.parameters()]
    script.optimizer.zero_grad()
    assert all(
        torch.equal(old, new)
        for old, new in zip(weights, script.model.parameters(), strict=True)
    )
    assert script.accountant.get_epsilon(DELTA) <= 6.0


def test_a_run_begun_under_opacus_own_accountant_goes_on_under_ours(tmp_path):
    theirs = RDPAccountant()
    for _ in range(7):
        theirs.step(noise_multiplier=1.0, sample_rate=0.25)
    torch.save(theirs.state_dict(), tmp_path / "state")
    script = Script()
    script.accountant.history = torch.load(tmp_path / "state")["history"]
    script.steps(3)
    assert script.accountant.history == [(1.0, 0.25, 10)]
    assert "sampling of 10 steps as Opacus says, not verified" in str(
        script.accountant.report(DELTA)
    )
