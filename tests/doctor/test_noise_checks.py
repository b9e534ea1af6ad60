"""What can be read off generators, scaler and the optimizer inside of Opacus'."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from opacus.accountants import RDPAccountant
from opacus.data_loader import DPDataLoader
from torch import nn
from torch.nn import functional as F

import torch_dpsco as dp
from tests.doctor.diagnoses import diagnose, find
from tests.doctor.scripts import (
    BATCH,
    DIM,
    N,
    mlp,
    opacus_hooks,
    ours_logistic,
    regression_data,
)
from tests.doctor.scripts import with_opacus as opacus
from torch_dpsco.errors import UtilityWarning
from torch_dpsco.rules import SGD
from torch_dpsco.step.oracle import Clipped

RATE = BATCH / N


def with_accountant(optimizer: Any, rate: float = RATE) -> Any:
    optimizer.attach_step_hook(RDPAccountant().get_optimizer_hook_fn(sample_rate=rate))
    return optimizer


# -- seeds -------------------------------------------------------------------------------------------------------------


def test_a_generator_that_nobody_seeded_is_a_constant():
    model, optimizer, loader = opacus(
        mlp(), regression_data(), noise_generator=torch.Generator()
    )
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
            model.parameters(),
            0.1,
            oracle=oracle,
            rule=SGD(),
            design=design,
            generator=generator,
        )

    with pytest.warns(UtilityWarning, match="generator="):
        optimizer = build(torch.Generator())
    dp.attach(model)
    data = regression_data()
    assert (
        "noise"
        in find(
            dp.doctor(model, F.mse_loss, optimizer.loader(data), optimizer), "fixed-seed"
        ).evidence
    )


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
