"""What the probes find in layers and parameters, and what they cannot look at."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import torch_dpsco as dp
from tests.doctor.diagnoses import find, ghost, names, ours, plain, theirs
from tests.doctor.scripts import (
    DIM,
    Centered,
    ColumnFree,
    N,
    class_data,
    mlp,
    private,
    regression_data,
)
from tests.doctor.scripts import with_opacus as opacus

# -- parameters, layers, precision -------------------------------------------------------------------------------------


class WithSpare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = nn.Linear(DIM, 1), nn.Linear(DIM, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize(
    "diagnose", [ours, theirs, plain, lambda model: ghost(model, ColumnFree())]
)
def test_parameters_that_get_no_rows_are_found(diagnose):
    found = find(diagnose(WithSpare()), "unused-parameters")
    assert found.severity == "error"
    assert "spare.weight" in found.evidence
    assert "requires_grad_(False)" in found.fix


def test_layers_that_came_after_the_hooks_are_found():
    network = mlp()
    wrapped, optimizer, loader = opacus(network, regression_data())
    network[2] = nn.Linear(6, 1)
    diagnosis = dp.doctor(wrapped, F.mse_loss, loader, optimizer)
    assert "nothing records their rows" in find(diagnosis, "unused-parameters").evidence
    assert "stale-parameters" in names(diagnosis)


class Embeds(nn.Module):
    def __init__(self, padding: int | None) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(9, 6, padding_idx=padding), nn.Linear(6, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.embed(tokens).mean(1))


def test_a_padding_vector_that_is_trained_is_found():
    data = TensorDataset(torch.zeros(N, 5, dtype=torch.long), torch.zeros(N, dtype=torch.long))
    assert names(theirs(Embeds(None), F.cross_entropy, data)) == []
    assert (
        names(ours(Embeds(0), F.cross_entropy, data)) == []
    )  # attached models leave the padding out
    found = theirs(Embeds(0), F.cross_entropy, data)
    assert names(found) == ["padding-trained"]
    assert "embed.weight" in found.findings[0].evidence


def images(*middle: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, 2, 3), *middle, nn.Flatten(), nn.Linear(72, 3))


class AddsInPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x += 1.0
        return x


@pytest.mark.parametrize("diagnose", [ours, theirs])
@pytest.mark.parametrize(
    ("layer", "word"), [(nn.ReLU(inplace=True), "inplace=True: "), (AddsInPlace(), "x += y")]
)
def test_in_place_layers_are_found_and_named(diagnose, layer, word):
    dense = nn.InstanceNorm2d(
        2, affine=True
    )  # has hooks on its output, also where other layers record their own rows
    found = find(
        diagnose(images(dense, layer), F.cross_entropy, class_data(1, 8, 8)), "in-place-layers"
    )
    assert found.severity == "error"
    assert word in found.evidence


@pytest.mark.parametrize("diagnose", [ours, theirs])
def test_half_precision_rows_of_a_mean_are_found_under_the_callers_autocast(diagnose):
    with torch.autocast("cpu", torch.bfloat16):
        diagnosis = diagnose(mlp(), lambda outputs, targets: F.mse_loss(outputs.float(), targets))
    assert find(diagnosis, "half-precision-rows").severity == "critical"
    assert "not-probed" not in names(diagnosis)


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("diagnose", [ours, theirs])
def test_a_mean_in_reduced_matmul_precision_is_found(diagnose):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        diagnosis, summed = (
            diagnose(mlp()),
            ours(mlp(), nn.MSELoss(reduction="sum"), loss_reduction="sum"),
        )
    finally:
        torch.set_float32_matmul_precision(before)
    found = find(diagnosis, "half-precision-rows")
    assert found.severity == "critical"
    assert "set_float32_matmul_precision" in found.evidence
    assert "not-probed" not in names(diagnosis)
    assert summed.healthy, str(summed)


def test_half_precision_rows_of_a_sum_are_fine():
    with torch.autocast("cpu", torch.bfloat16):
        diagnosis = ours(mlp(), lambda o, t: (o.float() - t).square().sum(), loss_reduction="sum")
    assert diagnosis.healthy, str(diagnosis)


def test_opacus_noise_in_half_precision_is_risky():
    model, record = mlp().bfloat16(), (torch.zeros(DIM).bfloat16(), torch.zeros(1).bfloat16())
    data = TensorDataset(*(leaf.expand(N, -1) for leaf in record))
    diagnosis = theirs(model, nn.MSELoss(reduction="sum"), data, loss_reduction="sum")
    assert [(f.severity, f.name) for f in diagnosis.findings] == [
        ("warning", "half-precision-noise")
    ]


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
        in find(dp.doctor(dp.attach(model), F.mse_loss, loader, optimizer), "not-probed").evidence
    )


def test_what_the_library_itself_refuses_is_an_error():
    model = mlp()
    optimizer, loader = private(model, regression_data())
    dp.attach(model)
    model[0].eval()
    diagnosis = dp.doctor(model, F.mse_loss, loader, optimizer)
    assert {finding.severity for finding in diagnosis.findings} == {"error"}


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
