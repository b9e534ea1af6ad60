"""Losses record by record: equal to the batch's where that is a loss of records, and never coupled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import torch_dpsco as dp
from torch_dpsco.errors import PrivacyError

B, K = 7, 3
DRAW = torch.Generator().manual_seed(0)
OUT = torch.randn(B, K, generator=DRAW, dtype=torch.float64)
BITS = (torch.rand(B, K, generator=DRAW) < 0.5).double()
CLASSES = torch.randint(K, (B,), generator=DRAW)
LOSSES: dict[str, tuple[Any, Tensor, Tensor]] = {
    "a class": (nn.BCEWithLogitsLoss, OUT[:, :1], BITS[:, :1]),
    "an instance": (
        nn.BCEWithLogitsLoss(pos_weight=torch.tensor(2.0).double()),
        OUT[:, 0],
        BITS[:, 0],
    ),
    "many outputs": (nn.MSELoss, OUT, BITS),
    "a sum over outputs": (nn.MSELoss(reduction="sum"), OUT, BITS),
    "classes": (nn.CrossEntropyLoss, OUT, CLASSES),
    "class probabilities": (nn.CrossEntropyLoss(), OUT, BITS.softmax(1)),
    "log probabilities": (nn.NLLLoss, OUT.log_softmax(1), CLASSES),
    "classes at places": (
        nn.CrossEntropyLoss(),
        torch.stack([OUT, OUT.flip(0)], 2),
        torch.stack([CLASSES] * 2, 1),
    ),
    "a function": (functional.smooth_l1_loss, OUT, BITS),
    "a lambda": (lambda output, target: (output - target).abs().mean(), OUT, BITS),
    "logistic": (dp.losses.Logistic(), OUT[:, :1], 2 * BITS[:, 0] - 1),
    "hinge": (dp.losses.Hinge(power=1.5), OUT[:, 0], 2 * BITS[:, :1] - 1),
    "softmax": (dp.losses.SoftmaxCrossEntropy(num_classes=K), OUT, CLASSES),
}


def gradient(loss: Any, output: Tensor, target: Tensor, **options: Any) -> Tensor:
    output = output.clone().requires_grad_(True)
    loss(output, target, **options).sum().backward()
    assert output.grad is not None
    return output.grad


@pytest.mark.parametrize("name", list(LOSSES))
def test_the_loss_of_a_batch_is_the_mean_of_those_of_its_records(name: str) -> None:
    loss, output, target = LOSSES[name]
    ours = dp.per_record(loss)
    plain = loss() if isinstance(loss, type) else loss
    records = torch.stack([plain(output[k : k + 1], target[k : k + 1]) for k in range(B)])
    torch.testing.assert_close(
        ours(output, target, reduction="none"), records, rtol=0, atol=1e-12
    )
    torch.testing.assert_close(ours(output, target), records.mean(), rtol=0, atol=1e-12)
    torch.testing.assert_close(
        dp.per_record(loss, reduction="sum")(output, target), records.sum(), rtol=0, atol=1e-12
    )
    if "sum over" not in name:
        torch.testing.assert_close(
            gradient(ours, output, target), gradient(plain, output, target), rtol=0, atol=1e-12
        )


@pytest.mark.parametrize("name", list(LOSSES))
def test_no_record_is_in_the_loss_of_another_one(name: str) -> None:
    loss, output, target = LOSSES[name]
    before = gradient(dp.per_record(loss, reduction="sum"), output, target)
    for value in (1e4, -1e-3, float("nan"), float("inf")):
        other = output.clone()
        other[0] = value
        after = gradient(dp.per_record(loss, reduction="sum"), other, target)
        assert torch.equal(after[1:], before[1:])


COUPLED = {
    "softmax over the batch": lambda out, y: -(out.softmax(0) * y).sum(),
    "normalized by the batch": lambda out, y: (
        (out / out.abs().max().clamp(min=50) - y) ** 2
    ).sum(),
    "centered": lambda out, y: ((out - out.mean(0)) * y).sum(),
    "outliers dropped": lambda out, y: (
        (out - y).square().sum(1)
        * ((out - y).square().sum(1) < 5 * (out - y).square().sum(1).median())
    ).sum(),
}


@pytest.mark.parametrize("name", list(COUPLED))
def test_a_loss_that_couples_records_cannot(name: str) -> None:
    loss = dp.per_record(COUPLED[name], reduction="sum")
    other = OUT.clone()
    other[0] = 1e4
    assert torch.equal(gradient(loss, other, BITS)[1:], gradient(loss, OUT, BITS)[1:])


def test_a_column_never_meets_a_row() -> None:
    """(B, 1) against (B,) is a (B, B) loss of all pairs; of one record it is what was meant."""
    column, row = OUT[:, :1], BITS[:, 0]
    with pytest.warns(UserWarning, match="target size"):
        pairs = nn.MSELoss()(column, row)
    ours = dp.per_record(nn.MSELoss)(column, row)
    assert ours.item() == pytest.approx(nn.MSELoss()(column[:, 0], row).item(), rel=1e-12)
    assert ours.item() != pytest.approx(pairs.item(), rel=1e-3)


def test_ignored_targets_and_class_weights_stay_within_their_record() -> None:
    weight = torch.tensor([1.0, 2.0, 3.0]).double()
    loss = dp.per_record(nn.CrossEntropyLoss(weight=weight), reduction="sum")
    target = CLASSES.clone()
    target[0] = -100
    losses = loss(OUT, target, reduction="none")
    expected = nn.CrossEntropyLoss(weight=weight, reduction="none")(OUT, target)
    torch.testing.assert_close(losses, expected, rtol=0, atol=1e-12)
    assert losses[0] == 0
    before = gradient(loss, OUT, CLASSES)
    assert torch.equal(gradient(loss, OUT, target)[1:], before[1:])


def test_outputs_and_targets_may_be_nested() -> None:
    loss = dp.per_record(
        lambda out, y: (out["a"] - y[0]).square().sum() + (out["b"] * y[1]).sum()
    )
    value = loss({"a": OUT, "b": BITS}, (BITS, OUT))
    assert value.item() == pytest.approx(
        ((OUT - BITS).square().sum() + (BITS * OUT).sum()).item() / B, rel=1e-12
    )


def test_no_records_have_no_loss() -> None:
    assert dp.per_record(nn.MSELoss)(OUT[:0], BITS[:0]).item() == 0.0


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return (self.scale * output - target).square().mean()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: dp.per_record(3), r"loss must be a function of \(output, target\)"),
        (lambda: dp.per_record("mse"), r"loss must be a function of \(output, target\)"),
        (lambda: dp.per_record(nn.MSELoss, reduction="none"), "reduction must be one of"),
        (
            lambda: dp.per_record(nn.AdaptiveLogSoftmaxWithLoss),
            "must be an instance where its class needs arguments",
        ),
        (lambda: dp.per_record(Scaled), "no parameters to train"),
        (
            lambda: dp.per_record(nn.MSELoss)(OUT, BITS[1:]),
            r"must have one length \(got 6 and 7\)",
        ),
        (lambda: dp.per_record(nn.MSELoss)(OUT.sum(), BITS), "one entry per record"),
        (lambda: dp.per_record(nn.MSELoss)(OUT, 1.0), "one entry per record"),
        (
            lambda: dp.per_record(nn.MSELoss(reduction="none"))(OUT, BITS),
            r"one number for a record \(got shape",
        ),
        (
            lambda: dp.per_record(lambda out, y: 1.0)(OUT, BITS),
            r"one number for a record \(got float\)",
        ),
        (
            lambda: dp.per_record(lambda out, y: out.sum() * out.max().item())(OUT, BITS),
            "torch.func.vmap can take",
        ),
        (
            lambda: dp.per_record(lambda out, y: out.sum() if out.sum() > 0 else y.sum())(
                OUT, BITS
            ),
            "no branches",
        ),
    ],
)
def test_what_cannot_be_a_loss_of_one_record_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_fit_takes_the_reduction_from_the_loss(reduction: str) -> None:
    data = TensorDataset(torch.randn(60, 3), torch.ones(60, 1))
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    plan = dp.ClippedSGD.plan(
        lr=0.1, clip=1.0, noise_multiplier=5.0, sampling=dp.Poisson(20, 60), steps=3
    )
    optimizer = dp.ClippedSGD(model.parameters(), plan)
    loss = dp.per_record(nn.BCEWithLogitsLoss, reduction=reduction)
    with pytest.raises(
        ValueError, match=f"loss_reduction must be {reduction!r}, that of the loss"
    ):
        dp.fit(
            model,
            optimizer,
            data,
            loss,
            loss_reduction={"mean": "sum", "sum": "mean"}[reduction],
            progress=False,
        )
    dp.fit(model, optimizer, data, loss, progress=False)
    assert optimizer.steps == 3


def test_the_rows_of_a_loop_are_those_of_the_plain_loss() -> None:
    rows = []
    for loss in (nn.MSELoss(), dp.per_record(nn.MSELoss)):
        torch.manual_seed(0)
        model = dp.attach(nn.Linear(K, 2).double())
        loss(model(OUT), BITS[:, :2]).backward()
        rows.append(
            model.weight.grad_factors.joined().blocks(weight=True, bias=False)[0].dense()[0]
        )
    torch.testing.assert_close(*rows, rtol=0, atol=1e-12)


class Centered(torch.autograd.Function):
    """The identity, but for a vmap rule of its own (as fused operations have) that sees the whole batch."""

    generate_vmap_rule = False

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor) -> tuple[Tensor, int]:
        x = x.movedim(in_dims[0], 0)
        return x - x.mean(0, keepdim=True), 0


def centered(output: Tensor, target: Tensor) -> Tensor:
    return 50.0 * (Centered.apply(output) - target).square().sum()


def sum_of_a_step(first: float, **attached: Any) -> Tensor:
    """Returns the clipped sum of a step, clip 1, with record 0 made of one number."""
    torch.manual_seed(0)
    model = dp.attach(nn.Linear(2, 1, bias=False), **attached)
    nn.init.constant_(model.weight, 1.0)
    plan = dp.ClippedSGD.plan(
        clip=1.0, noise_multiplier=1e-9, n=8, sampling="full", steps=1, lr=1.0
    )
    opt, x = dp.ClippedSGD(model.parameters(), plan), torch.ones(8, 2)
    x[0] = first
    for a, b in opt.loader(TensorDataset(x, torch.zeros(8, 1))):
        dp.per_record(centered)(model(a), b).backward()
        opt.step()
    return 8 * (1.0 - model.weight.detach())


def test_a_loss_whose_vmap_rule_couples_records_is_found_at_the_first_step() -> None:
    with pytest.raises(PrivacyError, match="must not reach each other in the loss"):
        sum_of_a_step(0.0)
    # PRIVACY: where nothing looks, one record is in the rows of all: the bound is 2
    moved = sum_of_a_step(0.0, check_first_step=False) - sum_of_a_step(
        1e4, check_first_step=False
    )
    assert float(moved.norm()) > 10.0


@pytest.mark.parametrize("where", ["loss", "model"])
def test_compiled_rows_that_are_coupled_are_refused(where: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 1)

        def forward(self, x: Tensor) -> Tensor:
            return Centered.apply(self.layer(x)) if where == "model" else self.layer(x)

    loss = centered if where == "loss" else nn.MSELoss()
    rows = dp.CompiledRows(Model(), loss, backend=None)
    with pytest.raises(PrivacyError, match="vmap rule"):
        rows.prepare(torch.ones(8, 2), torch.zeros(8, 1))
