"""The check of the first step finds records that reach each other, in the model or in the loss, on made-up records."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import torch_dpsco as dp

B = 9
Loss = Callable[[Tensor, Tensor], Tensor]


def dropped(out: Tensor, y: Tensor) -> Tensor:
    losses = (out - y).square().sum(1)
    return (losses * (losses < 5 * losses.median())).sum()


LOSSES: dict[str, Loss] = {
    "softmax over the batch": lambda out, y: -(out.softmax(0) * y).sum(),
    "by the largest, if it is large": lambda out, y: (out / out.abs().max().clamp(min=50) - y).square().sum(),
    "outliers dropped by a median": dropped,
    "centered": lambda out, y: ((out - out.mean(0)) * y).sum(),
    "a column against a row": lambda out, y: (out - y[:, 0]).square().sum(),
    "weights of classes": lambda out, y: functional.cross_entropy(
        torch.cat([out, -out], 1), (y[:, 0] > 0).long(), weight=torch.tensor([1.0, 2.0])
    ),
}
SOUND: dict[str, Loss] = {
    "mse": nn.MSELoss(),
    "bce": lambda out, y: nn.BCEWithLogitsLoss()(out, (y > 0).float()),
    "classes": lambda out, y: functional.cross_entropy(torch.cat([out, -out], 1), (y[:, 0] > 0).long()),
    "logistic": lambda out, y: dp.losses.Logistic()(out, y.sign()),
    "a sum": lambda out, y: (out - y).abs().sum(),
    "in place": lambda out, y: (out - y).square_().clamp_(max=3).mean(),
    "masked within records": lambda out, y: ((out - y) * (y > 0)).square().sum(),
}


class Model(nn.Module):
    def __init__(self, features: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.features, self.layer, self.calls = features, nn.Linear(3, 1), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(self.features(x))


def step(loss: Any, model: nn.Module | None = None, scale: float = 1.0) -> nn.Module:
    model = dp.attach(Model() if model is None else model, loss_reduction="sum", check_first_step=True)
    loss(model(scale * torch.randn(B, 3)), scale * torch.randn(B, 1)).backward()
    return model


@pytest.mark.parametrize("name", list(LOSSES))
def test_records_that_reach_each_other_are_found_at_the_first_step(name: str) -> None:
    with pytest.raises(dp.PrivacyError, match=r"records must not reach each other .*\(loss: with"):
        step(LOSSES[name])


@pytest.mark.parametrize(
    "features",
    [lambda x: x / x.abs().max().clamp(min=50), lambda x: x - x.mean(0), lambda x: x * (x < 9 * x.median())],
    ids=["by the largest", "centered", "by the median"],
)
def test_a_model_that_couples_records_is_found_at_the_first_step(features: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(dp.PrivacyError, match=r"records must not reach each other .*\(model: with"):
        step(nn.MSELoss(), Model(features))


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6, float("nan")])
@pytest.mark.parametrize("name", list(SOUND))
def test_sound_losses_pass_whatever_the_records_are(name: str, scale: float) -> None:
    model = step(SOUND[name], scale=scale)
    assert all(text.startswith("checked at the first step") for text in model._dpsco.checked.values())


def test_a_loss_record_by_record_is_known() -> None:
    model = step(dp.per_record(LOSSES["outliers dropped by a median"], reduction="sum"))
    assert "evaluated record by record" in model._dpsco.checked["loss"]


def test_statistics_of_targets_alone_are_not_seen_and_that_is_said() -> None:
    model = step(lambda out, y: (out * y).sum() / y.abs().sum())
    assert model._dpsco.checked["loss"].endswith("tensors without a row for each record taken for constants")


def test_numbers_that_leave_torch_are_said() -> None:
    model = step(lambda out, y: (out - y).square().sum() / float((out - y).detach().abs().max()))
    assert "out of sight (['__float__'])" in model._dpsco.checked["loss"]


def test_the_check_leaves_model_rows_and_random_numbers_as_they_are() -> None:
    found = []
    for check in (False, True):
        torch.manual_seed(3)
        model = dp.attach(Model(nn.Dropout(0.5)), loss_reduction="sum", check_first_step=check)
        x, y = torch.randn(B, 3), torch.randn(B, 1)
        nn.MSELoss(reduction="sum")(model(x), y).backward()
        rows = model.layer.weight.grad_factors.blocks(weight=True, bias=False)[0].dense()[0]
        found.append((rows, torch.rand(3), model.calls, [p.clone() for p in model.parameters()]))
    for first, second in zip(found[0], found[1], strict=True):
        assert first == second if isinstance(first, int) else all(map(torch.equal, first, second))


def test_later_steps_are_not_traced_and_the_report_says_what_was_checked() -> None:
    data = TensorDataset(torch.randn(40, 3), torch.randn(40, 1))
    model = dp.attach(nn.Linear(3, 1), check_first_step=True)
    opt = dp.ClippedSGD(model.parameters(), 0.1, clip=1.0, noise_multiplier=2.0, batch_size=40, design=dp.Full(40))
    assert "reach each other" not in str(opt.report(1e-5))
    for x, y in opt.loader(data, steps=2):
        loss = nn.MSELoss()(model(x), y)
        assert (type(loss) is Tensor) == (opt.steps > 0)
        loss.backward()
        opt.step()
    said = " ".join(str(opt.report(1e-5)).split())
    assert "Whether records reach each other in the loss: checked at the first step on made-up records" in said
    assert "Whether records reach each other in the model: checked at the first step" in said


class _ByTheLargest(torch.autograd.Function):
    """Couples records in its backward, which no repeated operation shows."""

    @staticmethod
    def forward(ctx, scores):
        ctx.save_for_backward(scores)
        return scores.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * (ctx.saved_tensors[0].abs().max() > 3)


def _hooked(scores):
    scores.register_hook(lambda g: g / g.abs().max())
    return scores


@pytest.mark.parametrize("couple", [_ByTheLargest.apply, _hooked], ids=["function", "hook"])
def test_what_happens_out_of_sight_is_not_called_checked(couple):
    model = dp.attach(nn.Linear(3, 1), check_first_step=True)
    couple(model(torch.randn(8, 3))).square().mean().backward()
    words = model._dpsco.checked["loss"]
    assert "out of sight" in words or words.startswith("not checked")
