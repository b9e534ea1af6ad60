"""Scripts of optimizers that need no per-sample gradients: what the doctor finds in them."""

from __future__ import annotations

import copy
import dataclasses
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import torch_dpsco as dp
from tests.doctor.diagnoses import find, names
from tests.doctor.row_free import (
    DIM,
    HINGE,
    Around,
    N,
    data,
    diagnose,
    linear,
    output,
    pairs,
    tilted,
)
from torch_dpsco.errors import UtilityWarning
from torch_dpsco.losses import Hinge, Huber, Logistic, Pinball, PowerLoss

# -- sound scripts ----------------------------------------------------------------------------------------------------

MARGIN = [Logistic(), Hinge(), Hinge(power=1.2), HINGE, Hinge(power=2.0)]
RESIDUAL = [
    Pinball(0.9),
    Pinball(0.5),
    Huber(threshold=0.3),
    PowerLoss(power=1.0),
    PowerLoss(power=2.0),
]
PROBLEMS = [
    *[(loss, {"bound_x": bound, "radius": 2.0}) for loss in MARGIN for bound in (1.01, 30.0)],
    *[
        (loss, {"bound_x": bound, "bound_y": 0.7, "radius": 2.0})
        for loss in RESIDUAL
        for bound in (1.01, 30.0)
    ],
]


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize(("loss", "bounds"), PROBLEMS, ids=str)
def test_nothing_is_found_in_a_sound_script(loss, bounds):
    budget = dp.Budget(5.0, 1e-3)
    diagnosis = diagnose(loss=loss, problem=loss.problem(**bounds), budget=budget, lr=1e-4)
    assert diagnosis.healthy, str(diagnosis)


class Bare(nn.Module):
    """Weights of no layer, which per-sample gradients could not be made of; used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, DIM))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight.T + x.flip(0).flip(0) @ self.weight.T) / 2


class Halves(nn.Module):
    """Time becomes part of the batch of the layer, which only rows forbid."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(DIM, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        twice = torch.stack([x, x.clone().relu_()], 1)
        return self.layer(twice.view(-1, DIM)).view(-1, 2).mean(1)


class Overwritten(nn.Module):
    """What a layer puts out is written over, which only hooks forbid."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv1d(1, 1, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x[:, None]).mul_(1.0).flatten(1)


class Inner(Dataset):
    """Records of single precision with whole numbers as labels, which the loader makes double."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        assert index == 0, f"record {index} was read"
        return torch.full((DIM,), float("nan")), -1


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize(
    "build", [Bare, Halves, Overwritten, lambda: nn.Linear(DIM, 1, bias=False)]
)
def test_models_that_have_no_sound_rows_are_sound_here(build):
    diagnosis = diagnose(build().double())
    assert diagnosis.healthy, str(diagnosis)


def test_records_are_made_up_as_the_loader_delivers_them():
    model = linear()
    optimizer = output(model)
    assert dp.doctor(model, HINGE, optimizer.loader(Inner()), optimizer).healthy
    assert dp.doctor(
        model, HINGE, None, optimizer, record=(torch.zeros(DIM), torch.zeros(1))
    ).healthy


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_leaves_double_precision_alone(dtype):
    with torch.autocast("cpu", dtype):
        assert diagnose().healthy


def test_a_sum_is_sound_if_it_was_declared():
    assert diagnose(loss=lambda o, y: HINGE(o, y, reduction="sum"), loss_reduction="sum").healthy


# -- broken scripts ---------------------------------------------------------------------------------------------------


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("loss", [tilted, pairs, lambda o, y: HINGE(o - o.mean(), y)])
def test_records_that_the_loss_couples_are_critical(loss):
    diagnosis = diagnose(loss=loss)
    assert find(diagnosis, "coupled-records").severity == "critical"
    assert "loss-reduction" not in names(diagnosis)


def test_records_that_the_model_couples_are_critical():
    diagnosis = diagnose(Around(lambda layer, x: layer(x - x.mean(0))).double())
    assert find(diagnosis, "coupled-records").severity == "critical"


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("weight", [1e-5, 0.1])
def test_a_term_on_the_weights_is_critical(weight):
    model = linear()

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return HINGE(outputs, targets) + weight * sum(
            p.square().sum() for p in model.parameters()
        )

    found = find(diagnose(model, loss), "regularizer-in-loss")
    assert found.severity == "critical"
    assert "weight, bias" in found.evidence


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize(
    ("loss", "declared", "said"),
    [
        (
            lambda o, y: HINGE(o, y, reduction="sum"),
            "mean",
            "this is a sum, and .*'mean'",
        ),
        (lambda o, y: HINGE(o, y), "sum", "this is a mean, and .*'sum'"),
        (
            lambda o, y: HINGE(o, y, reduction="sum") / len(o) ** 0.5,
            "mean",
            "neither a mean nor a sum",
        ),
        (lambda o, y: 4 * HINGE(o, y), "mean", ""),
    ],
)
def test_another_reduction_than_the_optimizers_is_critical(loss, declared, said):
    diagnosis = diagnose(loss=loss, loss_reduction=declared)
    if not said:  # a mean, but four times the loss that was promised
        assert names(diagnosis) == ["broken-promise"]
        return
    found = find(diagnosis, "loss-reduction")
    assert found.severity == "critical"
    assert re.search(said, found.evidence)
    assert len(diagnosis.findings) == 1


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize(
    ("model", "said"),
    [
        (Around(lambda layer, x: layer(x).tanh()), "not convex"),
        (Around(lambda layer, x: layer(10 * x)), "grad_bound promises"),
        (Around(lambda layer, x: layer(x) ** 3), "not convex"),
        (Around(lambda layer, x: 2 * layer(x)), "holder_constant promises"),
    ],
)
def test_a_model_that_is_not_what_was_promised_is_critical(model, said):
    found = find(diagnose(copy.deepcopy(model).double()), "broken-promise")
    assert found.severity == "critical"
    assert said in found.evidence


def test_the_ones_of_a_bias_that_no_bound_has_room_for_are_found():
    class Conv(nn.Conv1d):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x[:, None]).flatten(1)

    assert names(diagnose(Conv(1, 1, DIM).double())) == ["broken-promise"]
    assert diagnose(Conv(1, 1, DIM, bias=False).double()).healthy


def test_convexity_is_looked_at_where_scores_of_small_records_reach():
    class Squashed(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).tanh()

    problem = HINGE.problem(bound_x=0.01, radius=100.0)
    found = find(
        diagnose(Squashed(DIM, 1, bias=False).double(), problem=problem), "broken-promise"
    )
    assert "not convex" in found.evidence


def test_another_loss_than_the_problems_is_critical():
    diagnosis = diagnose(loss=Hinge(power=2.0))
    assert names(diagnosis) == ["broken-promise"]
    assert diagnosis.critical


@pytest.mark.slow
def test_sizes_are_not_judged_where_no_bounds_are_enforced():
    problem = dataclasses.replace(
        HINGE.problem(bound_x=0.1, radius=2.0), bound_x=None, bound_y=None
    )
    model = nn.Linear(DIM, 1, bias=False).double()
    assert diagnose(model, problem=problem).healthy
    assert not diagnose(
        model, problem=HINGE.problem(bound_x=0.1, radius=2.0), loss=Hinge(power=2.0)
    ).healthy
    assert names(
        diagnose(Around(lambda layer, x: layer(x).tanh()).double(), problem=problem)
    ) == ["broken-promise"]


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize(
    "features", [nn.Dropout(0.5), Around(lambda _, x: x + 0.1 * torch.randn_like(x))]
)
def test_random_gradients_are_critical(features):
    model = nn.Sequential(features, nn.Linear(DIM, 1)).double()
    for p in features.parameters():
        p.requires_grad_(False)
    optimizer = output(model[1])
    diagnosis = dp.doctor(model, HINGE, optimizer.loader(data()), optimizer)
    assert names(diagnosis) == ["random-gradients"]
    assert diagnosis.critical


def test_batch_normalization_is_critical():
    diagnosis = diagnose(
        nn.Sequential(nn.BatchNorm1d(DIM, affine=False), nn.Linear(DIM, 1)).double()
    )
    assert find(diagnosis, "batch-norm").severity == "critical"
    assert find(diagnosis, "changing-buffers").severity == "critical"


def test_what_a_forward_remembers_is_critical():
    class Remembers(nn.Linear):
        last: Any = 0.0

        def forward(self, x: Tensor) -> Tensor:
            seen, self.last = self.last, x.detach().mean()
            return super().forward(x + 0.1 * seen)

    assert find(diagnose(Remembers(DIM, 1).double()), "stateful-model").severity == "critical"


def test_a_gradient_scaler_is_critical():
    model = linear()
    optimizer = output(model)
    loader = optimizer.loader(data())
    diagnosis = dp.doctor(model, HINGE, loader, optimizer, scaler=torch.amp.GradScaler("cpu"))
    assert [(f.name, f.severity) for f in diagnosis.findings] == [("grad-scaler", "critical")]
    assert dp.doctor(
        model, HINGE, loader, optimizer, scaler=torch.amp.GradScaler("cpu", enabled=False)
    ).healthy


def test_a_loss_in_single_precision_is_critical():
    diagnosis = diagnose(loss=lambda o, y: HINGE(o.float(), y.float()))
    assert names(diagnosis) == ["single-precision"]
    assert diagnosis.critical


def test_a_model_that_was_made_single_after_all_is_critical():
    model = linear()
    optimizer = output(model)
    diagnosis = dp.doctor(model.float(), HINGE, optimizer.loader(data()), optimizer)
    assert find(diagnosis, "single-precision").severity == "critical"


@pytest.mark.slow
def test_no_noise_and_own_generators_are_critical():
    model = linear()
    problem = HINGE.problem(bound_x=1.5, radius=2.0)
    plan = dp.HolderOutputSGD.plan(problem=problem, dim=model, n=N, noise_multiplier=0.0)
    optimizer = dp.HolderOutputSGD(model.parameters(), plan)
    assert names(dp.doctor(model, HINGE, optimizer.loader(data()), optimizer)) == ["no-noise"]
    with pytest.warns(UtilityWarning):
        optimizer = output(model, generator=torch.Generator().manual_seed(1))
    assert names(dp.doctor(model, HINGE, optimizer.loader(data()), optimizer)) == ["fixed-seed"]


def test_another_model_is_an_error():
    model = linear()
    optimizer = output(model)
    other = find(
        dp.doctor(linear(), HINGE, optimizer.loader(data()), optimizer), "stale-parameters"
    )
    assert other.severity == "error"
