from __future__ import annotations

import copy
import warnings

import pytest
import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch.utils.data import DataLoader

from tests.accounting.ledgers import DELTA, image
from tests.accounting.opacus_script import DATA, Script
from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.accounting.budgets import Budget
from torch_dpsco.accounting.events import (
    ADD_REMOVE,
)
from torch_dpsco.diagnosis import doctor
from torch_dpsco.errors import BudgetExceeded, SequenceError, UtilityWarning

# -- the hook ---------------------------------------------------------------------------------------------------------


def test_a_refused_step_leaves_no_gradient():
    one_step = Accountant()
    one_step.history = [(1.0, 0.25, 1)]
    budget = Budget(one_step.get_epsilon(DELTA) * 1.01, DELTA, adjacency=ADD_REMOVE)
    script = Script(budget=budget)
    accountant = script.accountant
    script.steps(1)
    weights, before = copy.deepcopy(script.model.state_dict()), image(accountant)
    x = DATA.tensors[0][:16]
    for _ in range(2):
        script.backward(x)
        with pytest.raises(BudgetExceeded):
            script.optimizer.step()
        assert all(
            p.grad is None and p.grad_sample is None and p.summed_grad is None
            for p in script.optimizer.params
        )
        assert image(accountant) == before
    after = script.model.state_dict()
    assert all(torch.equal(after[name], weights[name]) for name in weights)


def test_a_refused_logical_batch_leaves_none_of_its_parts():
    script = Script(budget=Budget(1e-3, DELTA, adjacency=ADD_REMOVE))
    x = DATA.tensors[0]
    for more in (True, False):
        script.optimizer.signal_skip_step(more)
        script.backward(x[:4])
        if more:
            script.optimizer.step()
            script.optimizer.zero_grad()
    with pytest.raises(BudgetExceeded):
        script.optimizer.step()
    assert all(
        p.grad is None and p.grad_sample is None and p.summed_grad is None
        for p in script.optimizer.params
    )
    assert len(script.accountant) == 0


def test_accumulated_batches_are_refused():
    script = Script()
    script.model.allow_grad_accumulation()
    for start in (0, 16, 32):
        script.backward(DATA.tensors[0][start : start + 16])
    with pytest.raises(SequenceError, match=r"accumulated batches must be 1 \(got 3\)"):
        script.optimizer.step()
    assert len(script.accountant) == 0
    assert all(p.summed_grad is None for p in script.optimizer.params)


def test_physical_batches_are_one_step():
    script = Script()
    with BatchMemoryManager(
        data_loader=script.loader, max_physical_batch_size=4, optimizer=script.optimizer
    ) as physical:
        for x, _ in physical:
            script.backward(x)
            script.optimizer.step()
            script.optimizer.zero_grad()
    assert script.accountant.history == [(1.0, 0.25, 4)]


def test_the_hook_refuses_a_rate_that_is_none():
    for rate in (1.5, -0.1, None, "x"):
        with pytest.raises(ValueError, match="sample_rate must be"):
            Accountant().get_optimizer_hook_fn(rate)


# -- sampling ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_sampling_is_taken_from_opacus_and_said_to_be():
    script = Script()
    script.steps(3)
    line = "sampling of 3 steps as Opacus says, not verified"
    assert any(line in said for said in script.accountant.report(DELTA).assumptions)
    resumed = Accountant()
    resumed.load_state_dict(script.accountant.state_dict())
    assert any(line in said for said in resumed.report(DELTA).assumptions)


def test_a_loader_that_opacus_does_not_draw_from_is_warned_of():
    """Its engine charges a shuffled loader as Poisson batches; with `poisson_sampling=True` it draws by itself."""
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        Script()
        assert not any(said.category is UtilityWarning for said in given)
        Script(poisson_sampling=False)
    (said,) = (said for said in given if said.category is UtilityWarning)
    assert "poisson_sampling must be True" in str(said.message)
    assert said.filename.endswith("opacus_script.py")  # who called Opacus


@pytest.mark.filterwarnings("ignore:poisson_sampling must be True")
def test_the_doctor_sees_through_our_hook():
    script = Script(poisson_sampling=False)
    plain = DataLoader(DATA, batch_size=16, shuffle=True)
    found = doctor(script.model, None, plain, script.optimizer).critical
    assert "sampler-not-accounted" in {finding.name for finding in found}
    assert "no-accountant" not in {finding.name for finding in found}
