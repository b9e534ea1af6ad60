from __future__ import annotations

import copy

import pytest
import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch.utils.data import DataLoader

from tests.accounting.ledgers import DELTA, image
from tests.accounting.opacus_script import DATA, N, Script, entries
from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.accounting.budgets import Budget
from torch_dpsco.accounting.designs import Fixed, Full, Poisson, Shuffled
from torch_dpsco.accounting.events import (
    ADD_REMOVE,
    REPLACE_ONE,
    ZERO_OUT,
    PoissonGaussian,
    WORGaussian,
    clipped_gaussian,
)
from torch_dpsco.doctor import doctor
from torch_dpsco.errors import AdjacencyError, BudgetExceeded, SequenceError
from torch_dpsco.sampling import make_sampler

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
def test_steps_that_were_never_bound_are_asserted_and_not_verified():
    script = Script()
    script.steps(3)
    line = "sampling of 3 steps asserted, not verified"
    assert any(line in said for said in script.accountant.report(DELTA).assumptions)
    script.accountant.bind(script.loader)
    script.steps(2)
    assert any(line in said for said in script.accountant.report(DELTA).assumptions)
    resumed = Accountant()
    resumed.load_state_dict(script.accountant.state_dict())
    assert any(line in said for said in resumed.report(DELTA).assumptions)
    bound = Script()
    bound.accountant.bind(bound.loader)
    bound.steps(3)
    assert not any("asserted" in said for said in bound.accountant.report(DELTA).assumptions)


def test_a_bound_loader_corrects_a_smaller_rate():
    script = Script()
    script.accountant.step(noise_multiplier=2.0, sample_rate=0.001)
    design = script.accountant.bind(script.loader)
    script.accountant.step(noise_multiplier=2.0, sample_rate=0.001)
    assert (design.sample_rate, design.n) == (0.25, N)
    script.optimizer.attach_step_hook(script.accountant.get_optimizer_hook_fn(0.001))
    script.steps(2)
    script.accountant.step(noise_multiplier=1.0, sample_rate=0.001)
    script.accountant.step(noise_multiplier=1.0, sample_rate=0.5)
    assert script.accountant.history == [
        (2.0, 0.001, 1),
        (2.0, 0.25, 1),
        (1.0, 0.25, 3),
        (1.0, 0.5, 1),
    ]


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("shuffle", [True, False])
def test_a_bound_shuffled_loader_is_never_accounted_as_poisson(shuffle):
    script = Script(poisson_sampling=False)
    loader = DataLoader(DATA, batch_size=16, shuffle=shuffle)
    assert script.accountant.bind(loader) == Shuffled(16, N)
    script.steps(5, loader)
    script.accountant.step(noise_multiplier=1.0, sample_rate=0.25)
    assert entries(script.accountant) == [(clipped_gaussian(1.0).only(ZERO_OUT, REPLACE_ONE), 6)]
    assert script.accountant.adjacency == ZERO_OUT
    poisson = Accountant(adjacency=ZERO_OUT)
    poisson.record(PoissonGaussian(1.0, 0.25), 6)
    assert script.engine.get_epsilon(DELTA) > 2 * poisson.get_epsilon(DELTA)
    with pytest.raises(AdjacencyError):
        script.accountant.get_epsilon(DELTA, adjacency=ADD_REMOVE)


@pytest.mark.parametrize(
    ("design", "event"),
    [
        (Poisson(16, N), PoissonGaussian(1.0, 0.25)),
        (Fixed(16, N), WORGaussian(1.0, 16, N)),
        (Full(N), clipped_gaussian(1.0)),
    ],
)
def test_our_samplers_in_opacus_loops_are_charged_by_their_design(design, event):
    accountant = Accountant()
    assert accountant.bind(DataLoader(DATA, batch_sampler=make_sampler(design))) == design
    accountant.step(noise_multiplier=1.0, sample_rate=0.1)
    assert entries(accountant) == [(event, 1)]


def test_accumulated_batches_of_a_loader_that_is_not_poisson_are_refused():
    script = Script(poisson_sampling=False)
    script.accountant.bind(DataLoader(DATA, batch_size=16))
    for _ in range(2):
        script.backward(DATA.tensors[0][:16])
    with pytest.raises(SequenceError, match="accumulated batches must be 1"):
        script.optimizer.step()
    assert len(script.accountant) == 0


def test_the_doctor_sees_through_our_hook():
    script = Script(poisson_sampling=False)
    plain = DataLoader(DATA, batch_size=16, shuffle=True)
    found = doctor(script.model, None, plain, script.optimizer).critical
    assert "sampler-not-accounted" in {finding.name for finding in found}
    assert "no-accountant" not in {finding.name for finding in found}
