"""What can be read off loader, optimizer and accountant."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from opacus.accountants import RDPAccountant
from opacus.data_loader import DPDataLoader
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import torch_dpsco as dp
from tests.doctor.diagnoses import diagnose, find, names
from tests.doctor.scripts import (
    BATCH,
    DIM,
    N,
    Parts,
    mlp,
    opacus_hooks,
    ours_logistic,
    private,
    regression_data,
    secret_generator,
)
from tests.doctor.scripts import with_opacus as opacus
from torch_dpsco.rules import SGD
from torch_dpsco.step.oracle import Clipped

RATE = BATCH / N


def with_accountant(optimizer: Any, rate: float = RATE) -> Any:
    optimizer.attach_step_hook(RDPAccountant().get_optimizer_hook_fn(sample_rate=rate))
    return optimizer


# -- who makes it private ----------------------------------------------------------------------------------------------


def test_a_torch_optimizer_is_not_private():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    diagnosis = dp.doctor(
        model, F.mse_loss, DataLoader(regression_data(), batch_size=BATCH), optimizer
    )
    assert names(diagnosis) == ["not-private"]
    assert diagnosis.findings[0].severity == "critical"
    assert diagnosis.findings[0].evidence.startswith("SGD")
    assert "epsilon=..., delta=..., epochs=..." in diagnosis.findings[0].fix


def test_a_noise_multiplier_of_zero_is_no_noise():
    theirs = opacus_hooks()
    theirs.optimizer.noise_multiplier = 0.0
    ours = nn.Linear(DIM, 1)
    optimizer = dp.PrivateOptimizer(
        ours.parameters(),
        0.1,
        oracle=Clipped(1.0, 0.0, BATCH),
        rule=SGD(),
        design=dp.Poisson(BATCH, N),
    )
    loader = optimizer.loader(regression_data())
    for diagnosis in (
        diagnose(theirs),
        dp.doctor(dp.attach(ours), F.mse_loss, loader, optimizer),
    ):
        assert find(diagnosis, "no-noise").severity == "critical"


def test_an_optimizer_on_other_parameters_is_found():
    model = dp.attach(mlp())
    optimizer, loader = private(mlp(), regression_data())
    found = find(dp.doctor(model, F.mse_loss, loader, optimizer), "stale-parameters")
    assert found.severity == "error"
    assert "does not train 4 trainable parameters" in found.evidence
    assert "holds 4 parameters that are not the model's" in found.evidence


def test_frozen_parameters_in_the_optimizer_are_fine():
    model = mlp()
    model[0].weight.requires_grad_(False)
    wrapped, optimizer, loader = opacus(
        model,
        regression_data(),
        torch.optim.SGD([model[0].bias, *model[2].parameters()], lr=0.1),
    )
    optimizer.original_optimizer.add_param_group({"params": [model[0].weight]})
    assert dp.doctor(wrapped, F.mse_loss, loader, optimizer).healthy


def test_a_model_without_trainable_parameters_is_found():
    model = mlp().requires_grad_(False)
    found = find(
        dp.doctor(model, None, None, torch.optim.SGD(model.parameters(), lr=0.1)),
        "stale-parameters",
    )
    assert "no trainable parameter" in found.evidence


# -- sampling ----------------------------------------------------------------------------------------------------------


def foreign(kind: str) -> Any:
    data = regression_data()
    return {
        "shuffled": DataLoader(data, batch_size=BATCH, shuffle=True),
        "opacus": DPDataLoader(data, sample_rate=RATE),
        "joined": DataLoader(data, sampler=dp.sampling.FullSampler(dp.Full(N))),
    }[kind]


def bound(parts: Parts) -> Any:
    loader = DataLoader(
        parts.loader.dataset, batch_sampler=dp.sampling.PoissonSampler(dp.Poisson(BATCH, N))
    )
    return parts.optimizer.bind(loader)


WAYS = {
    "physical": lambda parts: parts.loader.in_parts(4),
    "bound": bound,
    "memory manager": lambda parts: BatchMemoryManager(
        data_loader=parts.loader, max_physical_batch_size=4, optimizer=parts.optimizer
    ),
}


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("way", WAYS)
def test_the_loaders_that_ours_works_with_are_sound(way):
    parts = ours_logistic()
    diagnosis = diagnose(parts, loader=WAYS[way](parts))
    found = [
        f
        for f in diagnosis.findings
        if f.name != "batches-not-filled-up" or way != "bound physical"
    ]
    assert not found, str(diagnosis)


def test_the_evidence_quotes_rate_size_and_sampler():
    found = find(diagnose(opacus_hooks(), loader=foreign("shuffled")), "sampler-not-accounted")
    assert "rate 0.25" in found.evidence
    assert "RandomSampler in batches of 16" in found.evidence


def test_a_stream_has_no_sampling_to_account():
    class Stream(IterableDataset):
        def __iter__(self) -> Any:
            return iter([])

    loader = DataLoader(Stream(), batch_size=BATCH)
    assert "sampler-not-accounted" in names(diagnose(opacus_hooks(), loader=loader))


@pytest.mark.cases(2, 1)
@pytest.mark.parametrize(
    ("accounted", "alarm"), [(RATE / 2, True), (RATE, False), (0.3, False), (1.0, False)]
)
def test_a_rate_below_the_samplers_is_found(accounted, alarm):
    parts = opacus_hooks()
    with_accountant(parts.optimizer, accounted)
    assert ("sampler-not-accounted" in names(diagnose(parts))) == alarm


def test_our_poisson_sampler_under_opacus_is_compared_by_its_rate():
    parts = opacus_hooks()
    loader = DataLoader(
        parts.loader.dataset, batch_sampler=dp.sampling.PoissonSampler(dp.Poisson(BATCH, N))
    )
    assert diagnose(parts, loader=loader).healthy
    loader = DataLoader(
        parts.loader.dataset, batch_sampler=dp.sampling.PoissonSampler(dp.Poisson(2 * BATCH, N))
    )
    assert "rate 0.5" in find(diagnose(parts, loader=loader), "sampler-not-accounted").evidence


def test_a_rate_of_one_claims_no_amplification_for_any_loader():
    parts = opacus_hooks()
    with_accountant(parts.optimizer, 1.0)
    assert "sampler-not-accounted" not in names(diagnose(parts, loader=foreign("shuffled")))


def test_49_batches_are_no_reason_for_alarm():
    # Opacus computes the rate as 1 / int(1 / (1 / 49)) = 1 / 48
    data = TensorDataset(torch.randn(490, DIM), torch.randn(490, 1))
    model, optimizer, loader = opacus(
        mlp(), data, loader=DataLoader(data, batch_size=10), noise_generator=secret_generator()
    )
    assert dp.doctor(model, F.mse_loss, loader, optimizer).healthy


# -- accountant --------------------------------------------------------------------------------------------------------


class Counts:
    """A hook of the user's that keeps another one."""

    def __init__(self, inner: Any = None) -> None:
        self.inner, self.steps = inner, 0

    def __call__(self, optimizer: Any) -> None:
        self.steps += 1
        if self.inner is not None:
            self.inner(optimizer)

    def count(self, optimizer: Any) -> None:
        self(optimizer)


@pytest.mark.cases(2, 1)
@pytest.mark.parametrize("hook", [None, lambda optimizer: None, Counts(), Counts().count])
def test_a_step_hook_without_accountant_is_found(hook):
    parts = opacus_hooks()
    parts.optimizer.attach_step_hook(hook)
    found = find(diagnose(parts), "no-accountant")
    assert found.severity == "critical"
    assert "epsilon stays 0" in found.evidence


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize(
    "wrap",
    [
        lambda hook: lambda optimizer: hook(optimizer),
        lambda hook: functools.partial(lambda inner, optimizer: inner(optimizer), hook),
        Counts,
        lambda hook: Counts(hook).count,
    ],
)
def test_a_hook_around_the_accountants_is_fine_and_its_rate_is_known(wrap):
    parts = opacus_hooks()
    parts.optimizer.attach_step_hook(wrap(parts.optimizer.step_hook))
    assert diagnose(parts).healthy
    assert "sampler-not-accounted" in names(diagnose(parts, loader=foreign("shuffled")))
