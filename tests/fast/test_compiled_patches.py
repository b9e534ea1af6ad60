"""Convolutions in the form of patches have the values and the rows of torch's, and nothing else is touched."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torch_dpsco as dp
from torch_dpsco.fast import compiled as patches
from torch_dpsco.fast.compiled import PatchedConvolutions, has_convolutions

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "strides": {"stride": (2, 3)},
    "one stride in a list": {"stride": [2]},
    "padding": {"padding": (1, 2), "stride": 2},
    "no bias": {"bias": False, "padding": 1},
    "half a stride past the end": {"stride": 4},
    "padding by reflection": {"padding": 1, "padding_mode": "reflect"},
    "same": {"padding": "same"},
    "dilation": {"dilation": 2},
    "groups": {"groups": 2},
}


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def built(**options: Any) -> tuple[nn.Module, Tensor]:
    """Returns a layer and five records."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        layer = nn.Conv2d(2, 4, (3, 2), **options).double()
        return layer, torch.randn(5, 2, 9, 8, dtype=torch.float64)


def loss(output: Tensor, target: Tensor) -> Tensor:
    return (output.tanh().sum() - target).square().sum()


def rows(layer: nn.Module, x: Tensor, *, patched: bool) -> tuple[Tensor, ...]:
    compiled = dp.CompiledRows(layer, loss, backend=None)
    one = compiled._patched if patched else compiled._one
    params = tuple(p.detach() for p in layer.parameters())
    found: tuple[Tensor, ...] = torch.func.vmap(torch.func.grad(one), in_dims=(None, 0, 0))(
        params, x, x[:, 0, 0, 0]
    )
    return found


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("setting", SETTINGS)
def test_values_and_rows_of_patches_are_those_of_convolutions(setting: str) -> None:
    layer, x = built(**SETTINGS[setting])
    with PatchedConvolutions():
        value = layer(x)
    torch.testing.assert_close(value, layer(x), rtol=0.0, atol=0.0)
    for ours, theirs in zip(
        rows(layer, x, patched=True), rows(layer, x, patched=False), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("setting", ["plain", "padding"])
def test_the_input_has_its_gradient_too(setting: str) -> None:
    layer, x = built(**SETTINGS[setting])
    first = nn.Conv2d(2, 2, 1).double()
    model = nn.Sequential(first, nn.Tanh(), layer)
    for ours, theirs in zip(
        rows(model, x, patched=True), rows(model, x, patched=False), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-13)


def test_only_small_convolutions_take_the_form_of_patches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[bool] = []
    convolve = F.conv2d

    def spy(input: Tensor, weight: Tensor, *rest: Any) -> Tensor:
        seen.append(weight.requires_grad)
        return convolve(input, weight, *rest)

    monkeypatch.setattr(patches.F, "conv2d", spy)
    layer, x = built()
    small = 5 * 2 * 7 * 7 * 6
    for most, held in ((small, True), (small // 5, True), (small // 5 - 1, False)):
        monkeypatch.setattr(patches, "_MOST_PATCHES", most)
        seen.clear()
        with PatchedConvolutions():
            torch.conv2d(x, layer.weight)
        assert seen == [not held]
    assert has_convolutions(nn.Sequential(layer))
    assert not has_convolutions(nn.Linear(2, 2))


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e200])
def test_a_bad_record_stays_in_its_own_row(bad: float) -> None:
    layer, x = built(padding=1)
    zeroed = x.clone()
    x[1, 0, 3, 3], zeroed[1] = bad, 0.0
    others = [0, 2, 3, 4]
    for ours, without in zip(
        rows(layer, x, patched=True), rows(layer, zeroed, patched=True), strict=True
    ):
        assert torch.equal(ours[others], without[others])
        assert bad == 1e200 or not torch.isfinite(ours[1]).all()


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("works", [True, False])
def test_what_the_compiler_refuses_of_patches_is_compiled_without(
    works: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs: list[str] = []

    def backend(graph: Any, inputs: Any) -> Any:
        code = graph.code
        if "unfold" in code and not works:
            raise OSError("no patches here")
        graphs.append(code)
        return graph.forward

    layer, x = built(padding=1)
    plain = copy.deepcopy(layer)
    compiled = dp.CompiledRows(layer, loss, micro_batch_size=5, backend=backend)
    assert compiled.prepare(x, x[:, 0, 0, 0]) is None
    assert ["unfold" in code for code in graphs] == [works]
    found = compiled._rows(x, x[:, 0, 0, 0], slice(0, 5))
    assert len(graphs) == 1
    for ours, theirs in zip(found, rows(plain, x, patched=False), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-13)


class Force(nn.Module):
    """A forward that differentiates an energy in its input."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Conv2d(1, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        force: Tensor = torch.func.grad(lambda at: self.energy(at).tanh().square().sum())(x)
        return force.flatten(1).sum(1, keepdim=True)


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(
    "kind",
    [Force, lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.Dropout(), nn.Flatten())],
    ids=["force", "dropout"],
)
def test_patches_are_left_out_where_they_change_rows(kind: Any) -> None:
    torch.manual_seed(0)
    model, x = kind(), torch.randn(6, 1, 5, 5)
    graphs: list[str] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph.code)
        return graph.forward

    rows = dp.CompiledRows(model, nn.MSELoss(), micro_batch_size=6, backend=backend)
    targets = torch.zeros_like(model(x))
    before = torch.random.get_rng_state()
    with (
        pytest.MonkeyPatch.context() as patch
    ):  # which would seed the generators of GPUs too, and not restore them
        patch.setattr(
            torch, "manual_seed", lambda seed: pytest.fail("torch.manual_seed was called")
        )
        assert rows._patches_agree(x, targets) == (kind is not Force)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert rows.prepare(x, targets) is None
    assert ["unfold" in code for code in graphs] == [kind is not Force]
