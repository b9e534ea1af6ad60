"""Layers that record their own rows: equal to single records and to Opacus, records apart, nothing large allocated."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import torch_dpsco as dp
from tests.problems import released
from torch_dpsco.errors import SequenceError
from torch_dpsco.rows import (
    DenseBlock,
    FactoredBlock,
    GradBatch,
    ItemBlock,
    SequenceBlock,
    has_rows,
)
from torch_dpsco.rows.layers.recorded import RECORDED

pytestmark = pytest.mark.filterwarnings(
    "ignore:Using padding='same' with even kernel:UserWarning"
)

B = 5  # records, and times where there are times: no shape gives a layout away


def floats(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(
        B, *shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )


def ids(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randint(7, (B, *shape), generator=torch.Generator().manual_seed(1))


def frozen(layer: nn.Module, name: str) -> nn.Module:
    layer.get_parameter(name).requires_grad_(False)
    return layer


LAYERS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "linear on vectors": (lambda: nn.Linear(3, 4), floats(3)),
    "linear on sequences": (lambda: nn.Linear(3, 4), floats(B, 3)),
    "linear on single times": (lambda: nn.Linear(30, 40), floats(1, 30)),
    "linear without bias on sequences": (lambda: nn.Linear(3, 4, bias=False), floats(B, 3)),
    "wide linear on sequences": (lambda: nn.Linear(60, 50), floats(B, 60)),
    "wide linear on sequences of sequences": (lambda: nn.Linear(60, 50), floats(2, 2, 60)),
    "wide linear, frozen bias": (lambda: frozen(nn.Linear(60, 50), "bias"), floats(B, 60)),
    "wide linear, frozen weight": (lambda: frozen(nn.Linear(60, 50), "weight"), floats(B, 60)),
    "layer norm on vectors": (lambda: nn.LayerNorm(6), floats(6)),
    "layer norm on sequences": (lambda: nn.LayerNorm(6), floats(B, 6)),
    "layer norm over two dimensions": (lambda: nn.LayerNorm([B, 6]), floats(3, B, 6)),
    "layer norm without bias": (lambda: nn.LayerNorm(6, bias=False), floats(B, 6)),
    "layer norm, frozen weight": (lambda: frozen(nn.LayerNorm(6), "weight"), floats(B, 6)),
    "group norm on vectors": (lambda: nn.GroupNorm(2, 12), floats(12)),
    "group norm on images": (lambda: nn.GroupNorm(2, 4), floats(4, 3, B)),
    "group norm, frozen bias": (lambda: frozen(nn.GroupNorm(2, 4), "bias"), floats(4, B)),
    "conv1d": (lambda: nn.Conv1d(2, 3, 3, stride=2, padding=1), floats(2, 8)),
    "conv1d of a wide kernel": (lambda: nn.Conv1d(20, 40, 3), floats(20, 4)),
    "conv1d at one place": (lambda: nn.Conv1d(20, 40, 3), floats(20, 3)),
    "conv2d": (
        lambda: nn.Conv2d(2, 3, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2)),
        floats(2, 7, 6),
    ),
    "conv2d of many channels": (lambda: nn.Conv2d(6, 8, 3), floats(6, 4, 4)),
    "conv2d of many channels, frozen bias": (
        lambda: frozen(nn.Conv2d(6, 8, 3), "bias"),
        floats(6, 4, 4),
    ),
    "conv2d without bias": (lambda: nn.Conv2d(2, 3, 2, bias=False), floats(2, 4, 4)),
    "conv2d in groups": (lambda: nn.Conv2d(4, 6, 2, groups=2, stride=2), floats(4, 5, 5)),
    "conv2d by channel": (lambda: nn.Conv2d(4, 8, 3, groups=4, padding=1), floats(4, B, B)),
    "conv2d, frozen weight": (lambda: frozen(nn.Conv2d(2, 3, 2), "weight"), floats(2, 4, 4)),
    "conv2d, frozen bias": (lambda: frozen(nn.Conv2d(2, 3, 2), "bias"), floats(2, 4, 4)),
    "conv2d, same": (lambda: nn.Conv2d(2, 3, 3, padding="same", dilation=2), floats(2, 6, 6)),
    "conv2d, same, even kernel": (
        lambda: nn.Conv2d(2, 3, (2, 4), padding="same"),
        floats(2, 6, 6),
    ),
    "conv2d, valid": (lambda: nn.Conv2d(2, 3, 3, padding="valid"), floats(2, 6, 6)),
    "conv2d, reflected": (
        lambda: nn.Conv2d(2, 3, 3, padding=(1, 2), padding_mode="reflect"),
        floats(2, 6, 6),
    ),
    "conv2d, reflected, same": (
        lambda: nn.Conv2d(2, 3, (4, 3), padding="same", padding_mode="reflect"),
        floats(2, 6, 6),
    ),
    "conv1d, replicated": (
        lambda: nn.Conv1d(2, 3, 3, padding=2, padding_mode="replicate"),
        floats(2, 6),
    ),
    "conv1d, circular": (
        lambda: nn.Conv1d(2, 3, 3, padding=2, padding_mode="circular"),
        floats(2, 6),
    ),
    "conv3d": (
        lambda: nn.Conv3d(2, 3, 2, stride=(1, 2, 1), padding=(0, 1, 0)),
        floats(2, 3, 4, 3),
    ),
    "embedding": (lambda: nn.Embedding(7, 3), ids(B)),
    "embedding of one item": (lambda: nn.Embedding(7, 3), ids()),
    "embedding of pages": (lambda: nn.Embedding(7, 3), ids(2, 4)),
    "embedding with padding": (lambda: nn.Embedding(7, 3, padding_idx=2), ids(9)),
}
# Opacus' samplers need a bias, and know padding by zeros only; `attach` refuses their rows by comparing them
NOT_IN_OPACUS = ("layer norm without bias", "reflected", "replicated", "circular")
FLOATING = [name for name in LAYERS if "embedding" not in name]


def layer(name: str, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Tensor]:
    build, inputs = LAYERS[name]
    torch.manual_seed(0)
    x = inputs()
    return build().to(dtype), x.to(dtype) if x.is_floating_point() else x


def losses(output: Tensor) -> Tensor:
    flat = output.flatten(1)
    return (
        (flat - 0.3).square() * torch.linspace(0.5, 1.5, flat.shape[1], dtype=flat.dtype)
    ).sum(1)


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def alone(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Returns each record's gradient by plain autograd."""
    found = [
        torch.autograd.grad(losses(model(x[i : i + 1])).sum(), trained(model))
        for i in range(len(x))
    ]
    return [torch.stack(parts) for parts in zip(*found, strict=True)]


def recorded(model: nn.Module, x: Tensor) -> GradBatch:
    each = losses(model(x))
    (each.mean() if trained(model)[0].dpsco.mean else each.sum()).backward()
    return GradBatch.consume(trained(model))


def assert_close(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        size = float(theirs.abs().max())
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=0, atol=tolerance * size)


# -- the same rows ----------------------------------------------------------------------------------------------------


@pytest.mark.cases(4, 2)
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_recorded_rows_are_those_of_single_records_and_of_opacus(
    name, reduction, dtype, tolerance
):
    model, x = layer(name, dtype)
    exact = alone(copy.deepcopy(model).double(), x.double() if x.is_floating_point() else x)
    rows = recorded(dp.attach(copy.deepcopy(model), loss_reduction=reduction), x)
    weights = torch.full((B,), 1 / B, dtype=torch.float64)
    means = [part.mean(0) for part in exact]
    scale = (
        4 if dtype == torch.float32 else 1
    )  # a row of float32 is as exact as its own backward
    assert_close(rows.dense(), exact, scale * tolerance)
    assert_close(rows.weighted_sum(weights), means, scale * tolerance)
    if not any(part in name for part in NOT_IN_OPACUS):
        dense = recorded(dp.attach(model, rows="dense", loss_reduction=reduction), x)
        assert_close(rows.dense(), dense.dense(), scale * tolerance)
        assert_close(rows.weighted_sum(weights), dense.weighted_sum(weights), scale * tolerance)
    norms = torch.linalg.vector_norm(torch.cat([part.flatten(1) for part in exact], 1), dim=1)
    assert bool((rows.norms() >= norms * (1 - 2e-6)).all())  # of the rows as computed in float32
    torch.testing.assert_close(rows.norms(), norms, rtol=2e-4, atol=1e-12)


@pytest.mark.cases(4, 2)
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("kernel", [1, 3])
def test_rows_of_images_with_channels_last_are_those_with_channels_first(groups, kernel):
    x, found = torch.randn(B, 4, 6, 6, generator=torch.Generator().manual_seed(1)), []
    for layout in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        layers = nn.Conv2d(4, 8, kernel, groups=groups), nn.Conv2d(8, 8, kernel, groups=groups)
        model = dp.attach(nn.Sequential(*layers).to(memory_format=layout))
        model(x.contiguous(memory_format=layout)).square().mean().backward()
        found.append(GradBatch.consume(list(model.parameters())))
    for first, last in zip(*(batch.dense() for batch in found), strict=True):
        torch.testing.assert_close(first, last, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(*(batch.norms() for batch in found), rtol=1e-4, atol=0)


@pytest.mark.cases(7, 3)
@pytest.mark.parametrize("name", LAYERS)
def test_outputs_and_input_gradients_are_those_of_the_plain_layer(name):
    model, x = layer(name, torch.float32)
    attached, x = dp.attach(copy.deepcopy(model)), x.requires_grad_(x.is_floating_point())
    expected, found = model(x), attached(x)
    exact = "same, even" not in name  # torch pads one side by another way
    torch.testing.assert_close(
        found, expected, rtol=0 if exact else 1e-6, atol=0 if exact else 1e-6
    )
    if x.requires_grad:
        for each in (expected, found):
            each.square().sum().backward(retain_graph=True)
        slopes = [torch.autograd.grad(losses(each).sum(), x)[0] for each in (expected, found)]
        torch.testing.assert_close(slopes[1], slopes[0], rtol=1e-5, atol=1e-5)


@pytest.mark.cases(13, 6)
@pytest.mark.parametrize("name", FLOATING)
def test_an_attack_leaves_no_rows_and_its_curvature_is_right(name):
    model, x = layer(name)
    x.requires_grad_()
    slopes = []
    for each in (model, dp.attach(copy.deepcopy(model))):
        (slope,) = torch.autograd.grad(losses(each(x)).sum(), x, create_graph=True)
        slopes.append(torch.autograd.grad(slope.square().sum(), x)[0])
        assert not has_rows(list(each.parameters()))
    torch.testing.assert_close(slopes[1], slopes[0], rtol=1e-9, atol=1e-9)


@pytest.mark.cases(12, 6)
@pytest.mark.parametrize("name", [name for name in FLOATING if "frozen weight" not in name])
def test_a_penalty_on_input_gradients_is_refused(name):
    model, x = layer(name)
    dp.attach(model)
    x.requires_grad_()
    (slope,) = torch.autograd.grad(losses(model(x)).sum(), x, create_graph=True)
    with pytest.raises(SequenceError, match="double backward"):
        slope.square().sum().backward()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.cases(8, 4)
@pytest.mark.parametrize("name", LAYERS)
def test_a_penalty_on_the_weights_of_a_recorded_layer_is_refused(name):
    model, x = layer(name)
    dp.attach(model)
    penalty = sum(p.square().sum() for p in trained(model))
    loss = losses(model(x)).mean() + penalty
    with pytest.raises(SequenceError, match="reg="):
        loss.backward()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.cases(7, 3)
@pytest.mark.parametrize("name", LAYERS)
def test_micro_batches_and_an_empty_batch_have_their_rows(name):
    model, x = layer(name)
    expected = alone(model, x)
    dp.attach(model, loss_reduction="sum")
    for chunk in (x[:2], x[:0], x[2:3], x[3:]):
        losses(model(chunk)).sum().backward()
    rows = GradBatch.consume(trained(model))
    assert rows.passes == 4
    assert_close(rows.dense(), expected, 1e-12)
    empty = recorded(model, x[:0])
    assert empty.norms().shape == (0,)
    for total, p in zip(
        empty.weighted_sum(torch.zeros(0, dtype=torch.float64)), trained(model), strict=True
    ):
        assert torch.equal(total, torch.zeros(p.shape, dtype=total.dtype))


class Pair(nn.Module):
    """A layer on two inputs."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x), self.layer(y)


@pytest.mark.cases(5, 2)
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 4e-6), (torch.float64, 1e-12)])
def test_a_layer_that_is_used_twice_has_sums_of_rows(name, dtype, tolerance):
    model, x = layer(name, dtype)
    y = x.flip(0)
    expected = [a + b for a, b in zip(alone(model, x), alone(model, y), strict=True)]
    pair = dp.attach(Pair(model))
    for part in (slice(0, 2), slice(2, B)):
        first, second = pair(x[part], y[part])
        (losses(first) + losses(second)).mean().backward()
    assert_close(GradBatch.consume(trained(model)).dense(), expected, tolerance)


@pytest.mark.cases(8, 4)
@pytest.mark.parametrize("name", LAYERS)
def test_a_record_that_is_not_finite_moves_no_other(name):
    model, x = layer(name, torch.float32)
    dp.attach(model, loss_reduction="sum")
    clean = recorded(model, x)
    factor = torch.ones(B).double()
    factor[3] = torch.nan
    (losses(model(x)) * factor.float()).sum().backward()
    rows = GradBatch.consume(trained(model))
    assert rows.norms().isfinite().tolist() == [True, True, True, False, True]
    others = torch.tensor([0, 1, 2, 4])
    for found, before in zip(rows.dense(), clean.dense(), strict=True):
        assert torch.equal(found[others], before[others])
    assert torch.equal(rows.norms()[others], clean.norms()[others])
    weights = torch.ones(B, dtype=torch.float64)
    weights[3] = 0.0
    for found, before in zip(
        rows.weighted_sum(weights), clean.weighted_sum(weights), strict=True
    ):
        assert torch.equal(found, before)


# -- which form -------------------------------------------------------------------------------------------------------


def blocks(model: nn.Module, x: Tensor) -> list[type]:
    return [type(block) for block in recorded(dp.attach(model), x).blocks]


def test_the_form_of_rows_is_the_one_that_takes_less():
    formed, factors = [DenseBlock], [SequenceBlock, DenseBlock]
    assert blocks(nn.Linear(30, 40), torch.randn(B, 30)) == [FactoredBlock]
    # 30 * 40 <= 4 T (30 + 40) from T = 5 on
    assert blocks(nn.Linear(30, 40), torch.randn(B, 4, 30)) == factors
    assert blocks(nn.Linear(30, 40), torch.randn(B, 5, 30)) == formed
    assert blocks(nn.Linear(30, 40).double(), torch.randn(B, 4, 30).double()) == formed
    assert blocks(nn.Conv1d(20, 40, 3), torch.randn(B, 20, 4)) == factors
    assert blocks(nn.Conv1d(20, 40, 3), torch.randn(B, 20, 40)) == formed
    assert blocks(nn.Conv1d(40, 40, 3, groups=2), torch.randn(B, 40, 4)) == formed
    assert blocks(nn.LayerNorm(6), torch.randn(B, 6)) == formed
    assert blocks(nn.Embedding(7, 3), torch.randint(7, (B, 2))) == [ItemBlock]


def test_sequences_of_different_lengths_are_joined():
    torch.manual_seed(0)
    model = nn.Linear(30, 40)
    for lengths in ((3, 2), (1, 3), (4, 7), (9, 1, 2)):
        parts = [torch.randn(B, length, 30) for length in lengths]
        expected = [
            torch.cat(rows) for rows in zip(*(alone(model, part) for part in parts), strict=True)
        ]
        dp.attach(model, loss_reduction="sum")
        for part in parts:
            losses(model(part)).sum().backward()
        rows = GradBatch.consume(trained(model))
        dp.detach(model)
        assert_close(rows.dense(), expected, 4e-6)
        weights = torch.linspace(0, 1, len(rows), dtype=torch.float64)
        sums = [torch.tensordot(weights, part.double(), 1) for part in expected]
        assert_close(rows.weighted_sum(weights), sums, 4e-6)
        norms = torch.linalg.vector_norm(
            torch.cat([part.flatten(1) for part in expected], 1), dim=1
        )
        torch.testing.assert_close(rows.norms(), norms.double(), rtol=2e-4, atol=0)


def test_uses_of_a_layer_that_see_different_numbers_of_records_are_refused():
    # 1 is a size that the inputs of the model have: a constant of it would be added to all rows
    pair = dp.attach(Pair(nn.Linear(3, 2)), loss_reduction="sum")
    first, second = pair(torch.ones(B, 3), torch.ones(1, 3))
    (first.sum() + second.sum()).backward()
    with pytest.raises(SequenceError, match="all records each time"):
        GradBatch.consume(trained(pair))


@pytest.mark.parametrize(
    "name", ["linear on vectors", "layer norm on vectors", "group norm on vectors", "conv2d"]
)
def test_an_input_without_a_batch_is_refused(name):
    model, x = layer(name)
    dp.attach(model)
    with pytest.raises(SequenceError, match="must have a batch dimension"):
        model(x[0])


class Own(nn.Linear):
    """A subclass, which may do anything in its forward."""


@pytest.mark.parametrize("kind", ["tied", "subclass", "weight_norm"])
def test_what_is_not_a_layer_of_its_own_falls_back_to_opacus(kind):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv1d(4, 4, 1),
        nn.Conv1d(4, 4, 1),
        nn.Flatten(),
        (Own if kind == "subclass" else nn.Linear)(12, 2),
    )
    if kind == "tied":
        model[1].weight = model[0].weight
    if kind == "weight_norm":
        nn.utils.parametrizations.weight_norm(model[0])
    model, x = model.double(), floats(4, 3)()
    expected = alone(copy.deepcopy(model), x)
    assert_close(recorded(dp.attach(model), x).dense(), expected, 1e-12)
    kept = {"tied": [3], "subclass": [0, 1], "weight_norm": [1, 3]}[kind]
    assert [i for i, part in enumerate(model) if hasattr(part, "tape")] == kept


# -- copies, precision -----------------------------------------------------------------------------------------------


KINDS = {type(layer(name)[0]): name for name in LAYERS}


def test_every_recorded_kind_is_tested_here():
    assert set(KINDS) == set(RECORDED)


@pytest.mark.cases(6, 3)
@pytest.mark.parametrize("name", KINDS.values())
@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))],
    ids=["copy", "file"],
)
def test_copies_record_rows_and_detached_layers_are_plain_again(name, copied):
    model, x = layer(name)
    expected, names = alone(model, x), set(vars(model))
    twin = copied(dp.attach(model))
    assert_close(recorded(twin, x).dense(), expected, 1e-12)
    assert not has_rows(list(model.parameters()))
    for each in (model, twin):
        each.load_state_dict(layer(name)[0].state_dict())
        assert type(dp.detach(each)) is type(layer(name)[0])
        assert set(vars(each)) == names


@pytest.mark.cases(4, 2)
@pytest.mark.parametrize(
    "name", [name for name in LAYERS if "wide" in name or "conv" in name or "norm" in name]
)
def test_rows_of_half_precision_are_near_those_of_float32(name):
    model, x = layer(name, torch.float32)
    expected = alone(model, x)
    for half in (True, False):
        twin = copy.deepcopy(model).bfloat16() if half else copy.deepcopy(model)
        dp.attach(twin, loss_reduction="sum")
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not half):
            output = twin(x.bfloat16() if half else x)
        losses(output.float()).sum().backward()
        assert_close(GradBatch.consume(trained(twin)).dense(), expected, 0.1)


@pytest.mark.parametrize("name", [name for name in KINDS.values() if "embedding" not in name])
def test_mean_losses_in_half_precision_are_refused_by_every_kind(name):
    model, x = layer(name, torch.float32)
    twin = dp.attach(model).bfloat16()
    loss = losses(twin(x.bfloat16()).float()).mean()
    with pytest.raises(SequenceError, match="reduction='sum'"):
        loss.backward()


# -- memory -----------------------------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """Notes the largest storage that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.numbers = max(self.numbers, leaf.untyped_storage().nbytes() // 4)
        return out


def largest(model: nn.Module, x: Tensor) -> int:
    """Returns the size, in float32 numbers, of the largest tensor of a backward, its norms and its weighted sum."""
    dp.attach(model, loss_reduction="sum")
    loss = losses(model(x)).sum()
    with Largest() as seen:
        loss.backward()
        rows = GradBatch.consume(trained(model))
        rows.weighted_sum(rows.norms())
    return seen.numbers


def test_no_tensor_of_rows_is_made_for_embeddings_and_long_factors():
    items, width, n, times = 5000, 16, 32, 10
    ids = torch.randint(items, (n, times))
    assert (
        largest(nn.Embedding(items, width), ids) <= 2 * (items + 1) * width
    )  # one parameter in float64, and what is of no item
    out, wide = 300, 400
    assert largest(nn.Linear(wide, out), torch.randn(n, times, wide)) <= 2 * max(
        out * wide, n * times * wide
    )


def test_patches_of_a_convolution_are_copied_for_some_records_at_a_time():
    model, x = nn.Conv2d(8, 8, 3, padding=1), torch.randn(64, 8, 32, 32)
    assert largest(model, x) <= max(2**18, 2 * x.numel()) < 64 * 72 * 1024 // 4


# -- privacy ----------------------------------------------------------------------------------------------------------


@pytest.mark.cases(5, 2)
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("factor", [1e3, 1e-3, float("inf")])
def test_one_record_moves_the_clipped_mean_of_a_recorded_layer_by_at_most_its_sensitivity(
    name, factor
):
    model, x = layer(name, torch.float32)
    dp.attach(model, loss_reduction="sum")
    query, others = [p.detach() for p in trained(model)], torch.tensor([0, 1, 2, 4])
    oracle = dp.oracles.Clipped(float(recorded(model, x).norms().median()), 0.0, B)
    scales = torch.ones(B)
    scales[3] = factor

    def mean(chosen: Tensor) -> Tensor:
        (losses(model(x[chosen])) * scales[chosen]).sum().backward()
        return released(oracle, query, [GradBatch.consume(trained(model))])

    moved = float(
        torch.linalg.vector_norm(mean(torch.arange(B)).double() - mean(others).double())
    )
    # a row itself rounds in another way in a batch of another size
    assert moved <= oracle.sensitivity("add_remove") * (1 + 1e-5)
    assert moved > 0 or not math.isfinite(factor)
