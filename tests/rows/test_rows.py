"""Rows are what a loop over single records gives, however they are recorded: dense, factored or mixed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable

import pytest
import torch
from opacus import GradSampleModule
from opacus.optimizers import DPOptimizer
from torch import Tensor, nn

import torch_dpsco as dp
from tests.problems import TwoHeads
from torch_dpsco.errors import SequenceError
from torch_dpsco.rows import DenseBlock, FactoredBlock, GradBatch, clear_rows, has_rows

B = 5


class Twice(nn.Module):
    """Uses one layer twice in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layer(torch.tanh(self.layer(x))))


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = (
            nn.Linear(3, 3),
            nn.Linear(3, 3, bias=False),
            nn.Linear(3, 1),
        )
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(torch.tanh(self.first(x))))


class Sentence(nn.Module):
    """Embeds words and sums the sentence."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.last = nn.Embedding(7, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.words(x)).sum(1))


def frozen(model: nn.Module, *names: str) -> nn.Module:
    for name in names:
        model.get_parameter(name).requires_grad_(False)
    return model


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


Build = Callable[[], nn.Module]
MODELS: dict[str, tuple[Build, tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(3, 2), (3,)),
    "no bias": (lambda: nn.Linear(3, 2, bias=False), (3,)),
    "one output": (lambda: nn.Linear(3, 1), (3,)),
    "frozen weight": (lambda: frozen(nn.Linear(3, 2), "weight"), (3,)),
    "frozen bias": (lambda: frozen(nn.Linear(3, 2), "bias"), (3,)),
    "mlp": (mlp, (3,)),
    "mlp with a frozen first layer": (lambda: frozen(mlp(), "0.weight", "0.bias"), (3,)),
    "mlp with a frozen last layer": (lambda: frozen(mlp(), "2.weight", "2.bias"), (3,)),
    "mlp with frozen parts": (lambda: frozen(mlp(), "0.bias", "2.weight"), (3,)),
    "layer used twice": (Twice, (3,)),
    "layer used twice, frozen bias": (lambda: frozen(Twice(), "layer.bias"), (3,)),
    "tied weights": (Tied, (3,)),
    "sequences": (mlp, (4, 3)),
    "sequences of sequences": (lambda: frozen(mlp(), "2.bias"), (2, 4, 3)),
    "layer norm": (
        lambda: nn.Sequential(
            nn.LayerNorm(3), nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 1)
        ),
        (3,),
    ),
    "convolution": (
        lambda: nn.Sequential(nn.Conv1d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(9, 2)),
        (2, 4),
    ),
    "embedding": (Sentence, ()),
}


def inputs(shape: tuple[int, ...], n: int = B, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if not shape:
        return torch.randint(0, 7, (n, 3), generator=generator)
    return torch.randn(n, *shape, generator=generator, dtype=torch.float64)


def losses(model: nn.Module, x: Tensor) -> Tensor:
    """Returns one loss per record."""
    return (model(x) - 1.0).square().flatten(1).sum(1)


def loop(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Returns the gradients of single records, one backward each."""
    params = [p for p in model.parameters() if p.requires_grad]
    rows = [
        torch.autograd.grad(losses(model, x[i : i + 1]).sum(), params) for i in range(len(x))
    ]
    return [torch.stack(parts) for parts in zip(*rows, strict=True)]


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def batch(model: nn.Module, chunks: Iterable[Tensor], reduction: str = "mean") -> GradBatch:
    for x in chunks:
        each = losses(model, x)
        (each.mean() if reduction == "mean" else each.sum()).backward()
    return GradBatch.consume(trained(model))


def built(name: str, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Tensor]:
    build, shape = MODELS[name]
    torch.manual_seed(3)
    x = inputs(shape)
    return build().to(dtype), x if not shape else x.to(dtype)


def assert_rows(rows: GradBatch, expected: list[Tensor]) -> None:
    tolerance = 1e-10 if expected[0].dtype == torch.float64 else 2e-5
    close = {"rtol": tolerance, "atol": tolerance}
    assert len(rows) == len(expected[0])
    for ours, theirs in zip(rows.dense(), expected, strict=True):
        torch.testing.assert_close(ours, theirs, **close)
    norms = torch.linalg.vector_norm(torch.cat([part.flatten(1) for part in expected], 1), dim=1)
    torch.testing.assert_close(rows.norms(), norms.double(), rtol=2e-4, atol=1e-12)
    weights = torch.linspace(0.0, 1.0, len(rows), dtype=torch.float64)
    for ours, theirs in zip(rows.weighted_sum(weights), expected, strict=True):
        torch.testing.assert_close(ours, torch.tensordot(weights, theirs.double(), 1), **close)
        assert ours.shape == theirs.shape[1:]


@pytest.mark.cases(3, 1)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("rows", ["auto", "dense"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_rows_are_those_of_a_loop_over_single_records(name, rows, reduction):
    model, x = built(name)
    expected = loop(model, x)
    assert_rows(
        batch(dp.attach(model, rows=rows, loss_reduction=reduction), [x], reduction), expected
    )
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.cases(3, 1)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("rows", ["auto", "dense"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_micro_batches_give_the_rows_of_the_whole_batch(name, rows, reduction):
    model, x = built(name)
    expected = loop(model, x)
    found = batch(
        dp.attach(model, rows=rows, loss_reduction=reduction), [x[:3], x[3:4], x[4:]], reduction
    )
    assert found.passes == 3
    assert_rows(found, expected)


@pytest.mark.cases(4, 2)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("rows", ["auto", "dense"])
def test_float32_models_give_float32_rows(name, rows):
    model, x = built(name, torch.float32)
    expected = loop(model, x)
    found = batch(dp.attach(model, rows=rows), [x])
    assert {part.dtype for part in found.dense()} == {torch.float32}
    assert_rows(found, expected)


@pytest.mark.cases(4, 2)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("rows", ["auto", "dense"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_an_empty_batch_has_no_rows_and_sums_to_zero(name, rows, reduction):
    model, x = built(name)
    expected = loop(model, x)
    found = batch(dp.attach(model, rows=rows, loss_reduction=reduction), [x[:0]], reduction)
    assert len(found) == 0
    assert found.norms().shape == (0,)
    for total, p in zip(
        found.weighted_sum(torch.zeros(0, dtype=torch.float64)), trained(model), strict=True
    ):
        assert torch.equal(total, torch.zeros(p.shape, dtype=total.dtype))
    assert_rows(batch(model, [x], reduction), expected)


@pytest.mark.parametrize("rows", ["auto", "dense"])
def test_an_empty_micro_batch_changes_nothing(rows):
    model, x = built("mlp")
    expected = loop(model, x)
    assert_rows(
        batch(dp.attach(model, rows=rows, loss_reduction="sum"), [x[:2], x[:0], x[2:]], "sum"),
        expected,
    )


@pytest.mark.parametrize("rows", ["auto", "dense"])
def test_any_part_of_the_parameters_in_any_order_can_be_taken(rows):
    model, x = built("mlp")
    expected = loop(model, x)
    dp.attach(model, rows=rows)
    for order in ([3, 0, 2, 1], [2, 1], [0], [3, 1]):
        losses(model, x).mean().backward()
        params = trained(model)
        assert_rows(GradBatch.consume([params[i] for i in order]), [expected[i] for i in order])
        clear_rows(params)


def test_linear_layers_are_factored_where_that_is_possible():
    def kinds(name: str) -> list[type]:
        model, x = built(name)
        return [type(block) for block in batch(dp.attach(model), [x]).blocks]

    assert kinds("mlp") == [FactoredBlock, FactoredBlock]
    assert kinds("layer norm") == [DenseBlock, FactoredBlock, DenseBlock, FactoredBlock]
    assert kinds("layer used twice") == [DenseBlock, FactoredBlock]
    assert kinds("tied weights") == [DenseBlock, FactoredBlock]
    assert kinds("sequences") == [DenseBlock]


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("rows", ["auto", "dense"])
def test_some_rows_can_be_selected(rows):
    model, x = built("layer norm")
    expected, index = loop(model, x), torch.tensor([4, 0, 2])
    found = batch(dp.attach(model, rows=rows), [x])
    selected = GradBatch([block.select(index) for block in found.blocks], found.order)
    assert_rows(selected, [part[index] for part in expected])


# -- taking rows ------------------------------------------------------------------------------------------------------


def assert_nothing_left(model: nn.Module) -> None:
    params = list(model.parameters())
    assert not has_rows(params)
    assert all(p.grad is None for p in params)
    with pytest.raises(SequenceError, match=r"missing for parameter 0 of shape \(1, 1\)"):
        GradBatch.consume(params)


@pytest.mark.parametrize("rows", ["auto", "dense"])
def test_consume_clears_also_when_it_raises(rows):
    model = dp.attach(TwoHeads(), rows=rows, loss_reduction="sum")
    model(torch.ones(2, 1)).sum().backward()
    assert has_rows(list(model.parameters()))
    GradBatch.consume(list(model.parameters()))
    assert_nothing_left(model)
    # rows of one head only, of different numbers, and of different passes
    for heads in (["a"], ["a", "ab"], ["a", "b"]):
        for k, head in enumerate(heads):
            model(torch.ones(2 + k, 1), head).sum().backward()
        assert has_rows(list(model.parameters()))
        with pytest.raises(SequenceError):
            GradBatch.consume(list(model.parameters()))
        assert_nothing_left(model)


def test_missing_rows_are_explained():
    model = mlp()
    losses(model, torch.ones(2, 3)).mean().backward()
    for attached in (False, True):
        if attached:
            dp.attach(model)
        with pytest.raises(
            SequenceError,
            match=r"parameter 0 of shape \(4, 3\): call dp\.attach\(model\) before",
        ):
            GradBatch.consume(list(model.parameters()))


def test_rows_that_opacus_has_clipped_are_refused():
    model = GradSampleModule(mlp())
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    opacus = DPOptimizer(inner, noise_multiplier=0.0, max_grad_norm=1.0, expected_batch_size=2)
    losses(model, torch.ones(2, 3)).mean().backward()
    opacus.step()
    assert has_rows(list(model.parameters()))
    with pytest.raises(SequenceError, match="belong to an Opacus DPOptimizer"):
        GradBatch.consume(list(model.parameters()))
    assert not has_rows(list(model.parameters()))


def test_blocks_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match=r"same number of rows \(got \[2, 3\]\)"):
        GradBatch([DenseBlock(torch.zeros(2, 1)), DenseBlock(torch.zeros(3, 1))])
    with pytest.raises(ValueError, match="at least one block"):
        GradBatch([])


def test_malformed_blocks_are_refused():
    for rows in (torch.tensor(1.0), torch.zeros(2, 2, dtype=torch.int64)):
        with pytest.raises(ValueError, match="rows must be a floating tensor"):
            DenseBlock(rows)
    for acts, backprops in (
        (torch.zeros(2, 3), torch.zeros(3, 3)),
        (torch.zeros(2, 3, 1), torch.zeros(2, 3)),
    ):
        with pytest.raises(ValueError, match="acts and backprops must be"):
            FactoredBlock(acts, backprops)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_two_copies_of_a_model_do_not_share_rows(reduction):
    model, x = built("mlp")
    dp.attach(model, loss_reduction=reduction)
    twin = copy.deepcopy(model)
    expected = loop(copy.deepcopy(dp.detach(copy.deepcopy(model))), x)
    losses(model, x[:2]).sum().backward()
    assert not has_rows(list(twin.parameters()))
    assert_rows(batch(twin, [x], reduction), expected)
    assert has_rows(list(model.parameters()))
