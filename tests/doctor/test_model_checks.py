"""What the probes find in models and losses, on our objects and on Opacus' own."""

from __future__ import annotations

import pytest
import torch
from opacus import GradSampleModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import torch_dpsco as dp
from tests.doctor.diagnoses import RECORD, find, ghost, names, ours, plain, theirs
from tests.doctor.scripts import (
    BATCH,
    DIM,
    Centered,
    ColumnFree,
    N,
    class_data,
    mlp,
    regression_data,
)
from tests.doctor.scripts import with_opacus as opacus
from tests.problems import Folded
from tests.reference.exact import Exact
from torch_dpsco.diagnosis.probe import rows_of
from torch_dpsco.rows.blocks import FactoredBlock
from torch_dpsco.rules import SGD
from torch_dpsco.trial import Answer, joined, rows_first

# -- coupled records ---------------------------------------------------------------------------------------------------


class BatchNormByHand(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(DIM, 3), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.batch_norm(self.inner(x), None, None, training=True))


class Squared(nn.Module):
    """A bare parameter, used by hand: no layer to hook."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(DIM))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).sum(1, keepdim=True)


def tilted(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean(1).logsumexp(0)


def by_class_frequency(outputs: Tensor, targets: Tensor) -> Tensor:
    weights = 1.0 / torch.bincount(targets, minlength=3).clamp_min(1)
    return F.cross_entropy(outputs, targets, weight=weights, reduction="sum")


@pytest.mark.cases(2, 1)
@pytest.mark.parametrize("diagnose", [ours, theirs, plain])
@pytest.mark.parametrize(
    ("model", "loss"), [(Centered, F.mse_loss), (BatchNormByHand, F.mse_loss), (mlp, tilted)]
)
def test_records_that_share_a_statistic_are_found(diagnose, model, loss):
    found = find(diagnose(model(), loss), "coupled-records")
    assert found.severity == "critical"
    assert "record 0" in found.evidence


class Rare(nn.Module):
    """Couples records only where one of them is far out."""

    def __init__(self, features) -> None:
        super().__init__()
        self.features, self.layer = features, nn.Linear(DIM, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.features(x))


def without_outliers(outputs: Tensor, targets: Tensor) -> Tensor:
    losses = (outputs - targets).square().mean(1)
    return (losses * (losses <= 1e6 * losses.median())).sum()


RARE = {
    "divided by the largest, if that is large": (
        lambda x: x / x.abs().max().clamp(min=50),
        F.mse_loss,
    ),
    "cut at a quantile of the batch": (
        lambda x: x.clamp(max=1000 * float(x.detach().quantile(0.9))),
        F.mse_loss,
    ),
    # a record of NaN shows the one above where torch cuts at NaN (torch 2.6 does not), and never the one below
    "cut at a finite quantile": (
        lambda x: x.clamp(max=1000 * float(x.detach().nanquantile(0.9))),
        F.mse_loss,
    ),
    "centered by the median": (
        lambda x: x - x.median(0).values.where(x.median(0).values > 100, 0.0),
        F.mse_loss,
    ),
    "nothing if one is not finite": (
        lambda x: x if bool(x.isfinite().all()) else torch.zeros_like(x),
        F.mse_loss,
    ),
    "small ones dropped": (
        lambda x: x * (x.abs().amin() > 1e-2 * x.abs().amin(1).mean()),
        F.mse_loss,
    ),
    "outliers dropped by the loss": (lambda x: x, without_outliers),
    "the loss by its largest": (
        lambda x: x,
        lambda out, y: (out / out.abs().max().clamp(min=50) - y).square().sum(),
    ),
}


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("name", list(RARE))
def test_records_that_share_a_statistic_only_where_one_is_an_outlier_are_found(name):
    features, loss = RARE[name]
    reduction = "mean" if loss is F.mse_loss else "sum"
    found = find(ours(Rare(features), loss, loss_reduction=reduction), "coupled-records")
    assert found.severity == "critical"


def test_losses_record_by_record_are_no_finding_at_any_scale():
    loss = dp.per_record(without_outliers, reduction="sum")
    assert ours(Rare(lambda x: x), loss, loss_reduction="sum").healthy
    deep = nn.Sequential(
        nn.Linear(DIM, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 1), nn.Softplus()
    )
    assert ours(deep).healthy


def test_a_start_of_all_zeros_hides_nothing():
    model = nn.Linear(DIM, 1)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    assert "coupled-records" in names(ours(model, tilted, loss_reduction="sum"))


def test_weights_by_class_frequency_couple_records_through_their_targets():
    diagnosis = ours(
        nn.Linear(DIM, 3), by_class_frequency, class_data(DIM), loss_reduction="sum"
    )
    assert find(diagnosis, "coupled-records").severity == "critical"


def test_a_loss_that_takes_only_class_zero_is_probed_with_it():
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        if bool((targets != 0).any()):
            raise ValueError("unknown class")
        return tilted(outputs, 0.0)

    assert "coupled-records" in names(plain(mlp(), loss, (torch.zeros(DIM), 0)))
    assert "not-probed" not in names(plain(mlp(), loss, (torch.zeros(DIM), 0)))


def test_without_a_loss_objects_are_read_and_nothing_is_run():
    assert dp.doctor(Centered(), None, None, None, record=RECORD).healthy
    model = nn.Sequential(nn.Linear(DIM, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    assert names(dp.doctor(model, None, None, None, record=RECORD)) == ["batch-norm"]


def test_batch_norm_is_named_with_its_cure():
    model = nn.Sequential(nn.Linear(DIM, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    found = find(plain(model), "batch-norm")
    assert found.severity == "critical"
    assert "BatchNorm1d '1'" in found.evidence
    assert "private_layers" in found.fix


# -- rows and records --------------------------------------------------------------------------------------------------


def test_time_folded_into_the_batch_is_found():
    data = TensorDataset(torch.randn(N, 3), torch.randn(N, 3))
    found = find(theirs(Folded(), data=data), "rows-are-not-records")
    assert found.severity == "critical"
    assert "5 records gave 15 rows" in found.evidence
    assert (
        "leave time out" in find(ours(Folded(), data=data), "not-probed").evidence
    )  # attached models refuse it


class TimeFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(DIM, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.transpose(0, 1)).mean(0)


def test_inputs_with_time_first_are_found():
    data = TensorDataset(torch.randn(N, 3, DIM), torch.randn(N, 1))
    assert (
        "5 records gave 3 rows"
        in find(theirs(TimeFirst(), data=data), "rows-are-not-records").evidence
    )
    assert (
        "must be the batch" in find(ours(TimeFirst(), data=data), "not-probed").evidence
    )  # attached models refuse it


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.places, self.out = nn.Embedding(3, DIM), nn.Linear(DIM, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out((x + self.places(torch.arange(3))).mean(1))


def test_position_embeddings_without_a_batch_are_found():
    data = TensorDataset(torch.randn(N, 3, DIM), torch.randn(N, 1))
    assert "places" in find(theirs(Positions(), data=data), "rows-are-not-records").evidence


# -- state -------------------------------------------------------------------------------------------------------------


class Remembers(nn.Module):
    """Keeps a moving average of its inputs in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(DIM, 1)
        self.register_buffer("seen", torch.ones(DIM))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen = 0.5 * self.seen + 0.5 * x.detach().mean(0)
        return self.layer(x)


@pytest.mark.parametrize("diagnose", [ours, theirs, plain])
def test_buffers_that_change_in_training_are_found(diagnose):
    found = find(diagnose(Remembers()), "changing-buffers")
    assert found.severity == "critical"
    assert "Remembers.seen" in found.evidence


class Delays(nn.Module):
    """Lets the batch before have a say in this one's features."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(DIM, 1), [0.0]

    def forward(self, x: Tensor) -> Tensor:
        shift, self.last[0] = self.last[0], float(x.detach().sum())
        return self.layer(x + shift)


@pytest.mark.cases(2, 1)
@pytest.mark.parametrize("diagnose", [ours, theirs, plain])
def test_a_model_that_remembers_records_is_critical(diagnose):
    found = find(diagnose(Delays()), "stateful-model")
    assert found.severity == "critical"
    assert "after another batch" in found.evidence


# -- loss --------------------------------------------------------------------------------------------------------------


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("diagnose", [ours, theirs])
@pytest.mark.parametrize("declared", ["mean", "sum"])
def test_a_loss_that_reduces_otherwise_than_declared_is_found(diagnose, declared):
    other = {"mean": "sum", "sum": "mean"}[declared]
    assert "loss-reduction" not in names(
        diagnose(mlp(), nn.MSELoss(reduction=declared), loss_reduction=declared)
    )
    found = find(
        diagnose(mlp(), nn.MSELoss(reduction=other), loss_reduction=declared), "loss-reduction"
    )
    assert found.severity == "error"
    assert f"this is a {other}" in found.evidence
    assert f"loss_reduction='{other}'" in found.fix


def test_a_loss_that_is_neither_mean_nor_sum_is_found():
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).square().sum() / len(outputs) ** 0.5

    assert "neither a mean nor a sum" in find(ours(mlp(), loss), "loss-reduction").evidence


def test_a_sum_over_a_constant_is_a_sum():
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).square().sum() / BATCH

    assert ours(mlp(), loss, loss_reduction="sum").healthy


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_a_loss_with_noise_of_its_own_is_no_reason_for_alarm(noise):
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets + noise * torch.randn_like(outputs)).square().mean()

    assert ours(mlp(), loss).healthy


def test_a_loss_without_reduction_is_found():
    found = find(ours(mlp(), nn.MSELoss(reduction="none")), "loss-reduction")
    assert "shape (5, 1)" in found.evidence


def test_objects_that_do_not_agree_on_the_reduction_are_found():
    _, optimizer, loader = opacus(mlp(), regression_data())
    other = GradSampleModule(mlp(), loss_reduction="sum")
    optimizer.original_optimizer.param_groups[0]["params"] = list(other.parameters())
    found = find(
        dp.doctor(other, nn.MSELoss(reduction="sum"), loader, optimizer), "loss-reduction"
    )
    assert "GradSampleModule 'sum', DPOptimizer 'mean'" in found.evidence


def test_a_wrong_reduction_is_critical_where_nothing_clips():
    model = mlp()
    optimizer = dp.PrivateOptimizer(
        model.parameters(), 0.1, oracle=Exact(BATCH), rule=SGD(), design=dp.Poisson(BATCH, N)
    )
    diagnosis = dp.doctor(
        dp.attach(model),
        nn.MSELoss(reduction="sum"),
        optimizer.loader(regression_data()),
        optimizer,
    )
    assert find(diagnosis, "loss-reduction").severity == "critical"


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("rows", ["auto", "dense"])
def test_a_regularizer_in_the_loss_is_found_in_ours(rows):
    model = mlp()

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(outputs, targets) + 0.1 * model[0].weight.square().sum()

    found = find(ours(model, loss, rows=rows), "regularizer-in-loss")
    assert found.severity == "error"
    assert "0.weight" in found.evidence
    assert "2.weight" not in found.evidence
    assert "reg=" in found.fix


def test_a_regularizer_is_found_at_a_start_of_all_zeros():
    model = nn.Linear(DIM, 1)
    nn.init.zeros_(model.weight)

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(outputs, targets) + model.weight.square().sum()

    assert "regularizer-in-loss" in names(ours(model, loss))


class Averaged(nn.MSELoss):
    """Reduces whatever it is told."""

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(outputs, targets)


@pytest.mark.parametrize(("criterion", "shape"), [(nn.MSELoss(), "(5, 1)"), (Averaged(), "()")])
def test_a_ghost_loss_of_the_wrong_shape_is_found(criterion, shape):
    found = find(ghost(mlp(), criterion), "ghost-loss-shape")
    assert found.severity == "critical"
    assert f"shape {shape}" in found.evidence


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_ghost_model_with_a_loss_of_its_own_is_found(reduction):
    diagnosis = ghost(mlp(), ColumnFree(), lambda _: nn.MSELoss(reduction=reduction))
    found = find(diagnosis, "ghost-without-ghost-loss")
    assert found.severity == "critical"
    assert "grad_sample_mode='ghost'" in found.fix


class Workspace(nn.Module):
    """Centers its inputs by the batch, in memory that the next forward writes over."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.held = nn.Linear(DIM, 1), []

    def forward(self, x: Tensor) -> Tensor:
        if not self.held or self.held[0].shape != x.shape:
            self.held[:] = [torch.empty_like(x)]
        self.held[0].copy_(x - x.mean(0))
        return self.layer(self.held[0])


def test_records_that_meet_in_memory_that_is_used_again_are_found(monkeypatch):
    memory: dict[int, Tensor] = {}
    monkeypatch.setattr(
        torch, "empty_like", lambda x: memory.setdefault(len(x), torch.zeros(x.shape))
    )
    # of slopes that are the same wherever the outputs are: the inputs of the layer alone tell
    found = find(
        ours(Workspace(), lambda out, target: (out + 0.0 * target).mean()), "coupled-records"
    )
    assert "as record 0" in found.evidence


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("step", [0.0, 1e-12, 1e-6, 1.0])
def test_rows_as_factors_are_about_as_far_apart_as_the_rows_themselves(dtype, step):
    first = [torch.randn(5, n, dtype=dtype) for n in (3, 4)]
    second = [part + step * torch.randn_like(part) for part in first]
    formed = [
        left.double()[:, :, None] * right.double()[:, None] for left, right in (first, second)
    ]
    expected = (formed[1] - formed[0]).flatten(1).norm(dim=1)
    one, other = (factored(*factors) for factors in (first, second))
    assert torch.allclose(one.norms(), formed[0].flatten(1).norm(dim=1))
    gaps = (one.numbers - other.numbers).norm(dim=1)
    assert bool((gaps <= 3.0 * expected).all())
    assert bool((gaps >= 0.3 * expected).all())


def factored(left: Tensor, right: Tensor) -> Answer:
    return rows_of(FactoredBlock(right, left, weight=True, bias=False))


def test_rows_that_are_not_finite_any_more_have_moved():
    left, right = torch.ones(5, 2), torch.ones(5, 3)
    bias = rows_first(left, 0)
    base = joined([factored(left, right), bias], 5)
    for bad in (float("nan"), float("inf")):
        wrong = factored(left, right.index_fill(0, torch.tensor(2), bad))
        assert base.moved(joined([wrong, bias], 5)) == 1
    assert base.moved(base) == 0
    assert base.moved(joined([bias], 5)) is None
