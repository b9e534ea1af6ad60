"""What can be read off generators, scaler and the optimizer inside of Opacus'."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from opacus import GradSampleModule
from opacus.accountants import RDPAccountant
from opacus.data_loader import DPDataLoader
from opacus.optimizers import DPOptimizer
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import torch_dpsco as dp
from tests.doctor.diagnoses import diagnose, find, names
from tests.doctor.scripts import (
    BATCH,
    DIM,
    N,
    ReadsRows,
    mlp,
    opacus_hooks,
    ours_logistic,
    private,
    regression_data,
    secret_generator,
)
from tests.doctor.scripts import with_opacus as opacus
from torch_dpsco.doctor import Diagnosis
from torch_dpsco.errors import UtilityWarning
from torch_dpsco.rules import SGD
from torch_dpsco.step.oracle import Clipped

RATE = BATCH / N


def with_accountant(optimizer: Any, rate: float = RATE) -> Any:
    optimizer.attach_step_hook(RDPAccountant().get_optimizer_hook_fn(sample_rate=rate))
    return optimizer


# -- seeds -------------------------------------------------------------------------------------------------------------


def test_a_generator_that_nobody_seeded_is_a_constant():
    model, optimizer, loader = opacus(mlp(), regression_data(), noise_generator=torch.Generator())
    found = find(dp.doctor(model, F.mse_loss, loader, optimizer), "fixed-seed")
    assert found.severity == "critical"
    assert "67280421310721" in found.evidence


@pytest.mark.cases(2, 1)
@pytest.mark.parametrize("seed", [0, 42, 2**32 - 1])
def test_a_generator_seeded_by_hand_is_found(seed):
    model, optimizer, loader = opacus(
        mlp(), regression_data(), noise_generator=torch.Generator().manual_seed(seed)
    )
    evidence = find(dp.doctor(model, F.mse_loss, loader, optimizer), "fixed-seed").evidence
    assert f"the noise comes from a torch.Generator with seed {seed}" in evidence
    assert "the sampler" not in evidence


def test_a_sampler_seeded_by_hand_is_found():
    loader = DPDataLoader(
        regression_data(), sample_rate=RATE, generator=torch.Generator().manual_seed(1)
    )
    evidence = find(diagnose(opacus_hooks(), loader=loader), "fixed-seed").evidence
    assert "the sampler comes from a torch.Generator with seed 1" in evidence
    assert "the noise comes" not in evidence


def test_torch_seeded_by_hand_does_not_matter_to_ours():
    torch.manual_seed(0)
    assert diagnose(ours_logistic()).healthy


def test_seeds_given_to_ours_are_found():
    model = nn.Linear(DIM, 1)

    def build(generator: torch.Generator | None = None) -> dp.PrivateOptimizer:
        oracle, design = Clipped(1.0, 1.0, BATCH), dp.Poisson(BATCH, N)
        return dp.PrivateOptimizer(
            model.parameters(), 0.1, oracle=oracle, rule=SGD(), design=design, generator=generator
        )

    with pytest.warns(UtilityWarning, match="generator="):
        optimizer = build(torch.Generator())
    with pytest.warns(UtilityWarning, match="seed="):
        sampler = dp.sampling.PoissonSampler(dp.Poisson(BATCH, N), seed=1)
    dp.attach(model)
    data = regression_data()
    loader = DataLoader(data, batch_sampler=sampler)
    assert (
        "noise"
        in find(
            dp.doctor(model, F.mse_loss, optimizer.loader(data), optimizer), "fixed-seed"
        ).evidence
    )
    assert "sampler" in find(dp.doctor(model, F.mse_loss, loader, build()), "fixed-seed").evidence


# -- scaler ------------------------------------------------------------------------------------------------------------


def test_a_scale_that_grows_in_the_planned_steps_is_risky_for_ours():
    parts = ours_logistic()
    steps = parts.optimizer.schedule.steps
    growing = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=steps - 1)
    found = find(diagnose(parts, scaler=growing), "grad-scaler")
    assert found.severity == "warning"
    assert f"every {steps - 1} steps of {steps}" in found.evidence
    assert diagnose(parts, scaler=torch.amp.GradScaler("cpu", growth_interval=steps)).healthy


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("parts", [ours_logistic, opacus_hooks])
def test_a_scaler_that_is_switched_off_does_nothing(parts):
    assert diagnose(parts(), scaler=torch.amp.GradScaler("cpu", enabled=False)).healthy


def test_the_scale_is_quoted():
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    assert "1024" in find(diagnose(opacus_hooks(), scaler=scaler), "grad-scaler").evidence


# -- an optimizer inside of Opacus' ------------------------------------------------------------------------------------


def wrapped_by_opacus(inner: Any, model: nn.Module) -> Diagnosis:
    optimizer = DPOptimizer(
        inner,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        expected_batch_size=BATCH,
        generator=secret_generator(),
    )
    with_accountant(optimizer)
    loader = DPDataLoader(regression_data(), sample_rate=RATE, generator=secret_generator())
    return dp.doctor(model, F.mse_loss, loader, optimizer)


def test_ours_inside_of_opacus_is_found():
    model = GradSampleModule(mlp())
    inner, _ = private(model, regression_data())
    found = find(wrapped_by_opacus(inner, model), "private-optimizer-inside-opacus")
    assert found.severity == "critical"
    assert "torch_dpsco" in found.evidence


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad])
@pytest.mark.parametrize("started", [True, False])
def test_torch_optimizers_inside_of_opacus_are_fine(kind, started):
    model = GradSampleModule(mlp())
    inner = kind(model.parameters(), lr=0.1)
    if started:
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        inner.step()
    values = [p.detach().clone() for p in model.parameters()]
    assert wrapped_by_opacus(inner, model).healthy
    assert all(map(torch.equal, values, model.parameters()))


def test_an_optimizer_with_a_scheduler_around_its_step_is_tried_too():
    model = GradSampleModule(mlp())
    inner = ReadsRows(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(inner, 1)
    assert "private-optimizer-inside-opacus" in names(wrapped_by_opacus(inner, model))


def test_an_optimizer_that_cannot_be_tried_is_no_finding():
    class Refuses(torch.optim.SGD):
        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("one of a kind")

    model = GradSampleModule(mlp())
    assert wrapped_by_opacus(Refuses(model.parameters(), lr=0.1), model).healthy
