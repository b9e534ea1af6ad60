"""Layers of somebody else's that record their rows: as autograd's for each record alone, or refused before any use."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torch_dpsco as dp
from torch_dpsco.errors import PrivacyError
from torch_dpsco.rows import DenseBlock, GradBatch
from torch_dpsco.rows.layers import Formed, Kept, Kind, Use, register
from torch_dpsco.rows.layers.recorded import RECORDED


class Scale(nn.Module):
    """tanh(x) w + c, batch first."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.linspace(-1, 1, 6))
        self.weight = nn.Parameter(torch.linspace(1, 2, 6))

    def forward(self, x: Tensor) -> Tensor:
        return x.tanh() * self.weight + self.bias


class ScaleRows(Kind):
    def rows(self, use: Use) -> Kept:
        grad = use.scale * use.grad
        places = list(range(1, grad.dim() - 1))
        weight = use.x.tanh() * grad
        return Formed(*(part.sum(places) if places else part for part in (weight, grad)))


class Shared(ScaleRows):  # every row is the batch's: three records are clipped as one
    def rows(self, use: Use) -> Kept:
        weight, bias = super().rows(use).parts
        return Formed(weight.mean(0).expand_as(weight), bias)


class Unscaled(ScaleRows):
    def rows(self, use: Use) -> Kept:
        less = Use(use.layer, use.x, use.weight, use.saved, use.grad / use.x.shape[0])
        return super().rows(less)


class Mixed(ScaleRows):
    def forward(
        self, layer: Any, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, ...]:
        return (super().forward(layer, x - x.mean(0), weight, bias)[0],)


class MixedBelow(ScaleRows):
    def input_gradient(self, use: Use) -> Tensor:
        found = super().input_gradient(use)
        return found + found.mean(0)


class OneRow(ScaleRows):
    def rows(self, use: Use) -> Kept:
        return Formed(*(part.sum(0, keepdim=True) for part in super().rows(use).parts))


class Short(Formed):
    def blocks(self, **chosen: bool) -> list[DenseBlock]:
        return [ShortBlock(part) for part in self.parts]


class ShortBlock(DenseBlock):
    def norms(self) -> Tensor:
        return super().norms() / 2


class Understated(ScaleRows):  # a block whose norms let long rows past the clip
    def rows(self, use: Use) -> Kept:
        return Short(*super().rows(use).parts)


@pytest.fixture
def registered() -> Iterator[Callable[[Kind], None]]:
    yield lambda kind: register(Scale, kind)
    RECORDED.pop(Scale, None)


def model(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), Scale(), nn.Linear(6, 1)).to(dtype)


def losses(output: Tensor) -> Tensor:
    return (output.flatten(1).sum(1) - 0.3).square()


@pytest.mark.cases(2, 1)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("places", [(), (3,), (2, 2)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_rows_of_a_registered_layer_are_those_of_single_records(
    registered, reduction, places, dtype, tolerance
):
    registered(ScaleRows())
    plain, x = model(dtype), torch.randn(4, *places, 5, dtype=dtype)
    expected = [
        torch.autograd.grad(losses(plain(x[i : i + 1])).sum(), list(plain.parameters()))
        for i in range(4)
    ]
    ours = dp.attach(copy.deepcopy(plain), loss_reduction=reduction)
    for twin in (ours, copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        getattr(losses(twin(x)), reduction)().backward()
        rows = GradBatch.consume(list(twin.parameters()))
        for found, parts in zip(rows.dense(), zip(*expected, strict=True), strict=True):
            torch.testing.assert_close(found, torch.stack(parts), rtol=tolerance, atol=tolerance)
        assert type(dp.detach(twin)[1]) is Scale
        assert vars(twin[1]).keys() == vars(plain[1]).keys()


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_a_frozen_part_of_a_registered_layer_has_no_rows(registered, frozen):
    registered(ScaleRows())
    ours = model(torch.float32)
    ours[1].get_parameter(frozen).requires_grad_(False)
    dp.attach(ours)
    losses(ours(torch.randn(4, 5))).mean().backward()
    params = [p for p in ours.parameters() if p.requires_grad]
    assert [part.shape for part in GradBatch.consume(params).dense()] == [
        (4, *p.shape) for p in params
    ]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Shared, "rows of Shared must be those of autograd for each record alone"),
        (Unscaled, "rows of Unscaled must be"),
        (Mixed, "outputs of Mixed must be"),
        (MixedBelow, "input gradients of MixedBelow must be"),
        (OneRow, "OneRow must give one row per record"),
        (Understated, r"rows of Understated must be Formed\("),
    ],
)
def test_a_wrong_kind_is_refused_before_it_sees_a_record(registered, kind, message):
    seen = []
    watched = type(
        kind.__name__,
        (kind,),
        {"rows": lambda self, use: seen.append(use.x) or kind.rows(self, use)},
    )
    registered(watched())
    ours, x = (
        dp.attach(model(torch.float64), check_first_step=False),
        torch.randn(4, 5, dtype=torch.float64),
    )
    records = ours[0](x).detach()
    for _ in range(2):  # it does not get through by asking again
        with pytest.raises(PrivacyError, match=message):
            ours(x)
    assert not any(torch.isin(each, records).any() for each in seen)


def test_the_trial_takes_no_value_of_the_input_and_comes_once(registered):
    kind, calls = ScaleRows(), []
    kind.rows = lambda use: calls.append(use.x) or ScaleRows.rows(kind, use)
    registered(kind)
    for x in (torch.full((4, 5), torch.nan), torch.zeros(4, 5)):
        ours = dp.attach(model(torch.float32), check_first_step=False)
        for _ in range(2):
            losses(ours(x)).mean().backward()
            GradBatch.consume(list(ours.parameters()))
    assert len(calls) == 6  # a trial and two uses, each time
    assert torch.equal(calls[0], calls[3])


def test_registered_layers_take_floating_point_inputs(registered):
    registered(ScaleRows())
    with pytest.raises(
        ValueError, match="input of a registered layer must be floating point, to try ScaleRows"
    ):
        dp.attach(Scale())(torch.ones(3, 6, dtype=torch.long))


def test_a_class_is_registered_once_and_by_a_kind(registered):
    registered(ScaleRows())
    with pytest.raises(
        ValueError, match=r"layer must be a class that is not recorded yet \(got Scale\)"
    ):
        registered(ScaleRows())
    with pytest.raises(
        ValueError, match=r"layer must be a class that is not recorded yet \(got Linear\)"
    ):
        register(nn.Linear, ScaleRows())
    for layer, kind in ((Scale(), ScaleRows()), (Scale, ScaleRows)):
        with pytest.raises(ValueError, match="must be"):
            register(layer, kind)
