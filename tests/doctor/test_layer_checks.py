"""What the probes find in layers and parameters, and what they cannot look at."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import torch_dpsco as dp
from tests.doctor.diagnoses import find, names, ours, plain
from tests.doctor.scripts import (
    DIM,
    Centered,
    ColumnFree,
    mlp,
    private,
    regression_data,
)
from tests.doctor.scripts import with_opacus as opacus

# -- parameters, layers, precision -------------------------------------------------------------------------------------


def test_what_the_library_itself_refuses_is_an_error():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        diagnosis, summed = (
            ours(mlp()),
            ours(mlp(), nn.MSELoss(reduction="sum"), loss_reduction="sum"),
        )
    finally:
        torch.set_float32_matmul_precision(before)
    found = find(diagnosis, "not-probed")
    assert found.severity == "error"
    assert "set_float32_matmul_precision" in found.evidence
    assert summed.healthy, str(summed)


def test_half_precision_rows_of_a_sum_are_fine():
    with torch.autocast("cpu", torch.bfloat16):
        diagnosis = ours(
            mlp(), lambda o, t: (o.float() - t).square().sum(), loss_reduction="sum"
        )
    assert diagnosis.healthy, str(diagnosis)


# -- what cannot be probed ---------------------------------------------------------------------------------------------


def test_gradients_that_are_all_zero_are_said_to_show_nothing():
    found = find(ours(mlp(), lambda outputs, targets: 0.0 * outputs.sum() + 1.0), "not-probed")
    assert "are zero" in found.evidence


@pytest.mark.parametrize("record", ["text", {"id": "a"}, 3.0])
def test_records_that_no_batch_can_be_made_of_are_said_so(record):
    found = find(plain(mlp(), F.mse_loss, record), "not-probed")
    assert found.severity == "warning"


def test_a_data_set_without_records_shows_nothing_and_is_no_finding():
    model = dp.attach(mlp())
    optimizer, _ = private(model, regression_data())
    empty = DataLoader(
        TensorDataset(torch.zeros(0, DIM)),
        batch_sampler=dp.sampling.PoissonSampler(optimizer.design, size=0),
    )
    assert dp.doctor(model, F.mse_loss, empty, optimizer).healthy


def test_a_collate_function_that_raises_is_said_so():
    def collate(items: list[Any]) -> Any:
        raise ArithmeticError("no way")

    model = mlp()
    optimizer, loader = private(model, regression_data(), collate_fn=collate)
    assert (
        "ArithmeticError: no way"
        in find(
            dp.doctor(dp.attach(model), F.mse_loss, loader, optimizer), "not-probed"
        ).evidence
    )


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("wrap", [torch.compile, lambda model: model])
def test_compiled_models_are_probed_without_compiling_them(wrap):
    model = Centered()
    optimizer, loader = private(model, regression_data())
    diagnosis = dp.doctor(wrap(dp.attach(model)), F.mse_loss, loader, optimizer)
    assert names(diagnosis) == ["coupled-records"]


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_opacus_hooks_without_a_wrapper_are_known(mode):
    network = mlp()
    made = opacus(
        network,
        regression_data(),
        criterion=ColumnFree(),
        grad_sample_mode=mode,
        wrap_model=False,
    )
    loss = F.mse_loss if mode == "hooks" else made[2]
    assert dp.doctor(network, loss, made[-1], made[1]).healthy


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("mode", ["functorch", "ew"])
def test_other_ways_of_opacus_to_make_rows_are_known(mode):
    model, optimizer, loader = opacus(mlp(), regression_data(), grad_sample_mode=mode)
    assert dp.doctor(model, F.mse_loss, loader, optimizer).healthy
    model, optimizer, loader = opacus(Centered(), regression_data(), grad_sample_mode=mode)
    assert "coupled-records" in names(dp.doctor(model, F.mse_loss, loader, optimizer))
