"""Compiled rows are those of `attach`, for batches of any size with one compilation, and all protections hold.

Most tests vectorize without compiling, or compile by the backend "eager", which takes milliseconds.
"""

from __future__ import annotations

import copy
import inspect
import math
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import torch_dpsco as dp
from tests.problems import make_optimizer
from tests.rows.test_rows import MODELS, built, mlp, trained
from torch_dpsco.accounting.designs import Undeclared
from torch_dpsco.errors import PrivacyError, SequenceError, UtilityWarning
from torch_dpsco.fast import compiled
from torch_dpsco.rows import GradBatch, has_rows
from torch_dpsco.rows.attach import is_attached

CLIP = 0.25


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def squared(output: Tensor, target: Tensor) -> Tensor:
    """Returns the mean over records of the sum of squares of each."""
    return (
        (output - target.view(-1, *[1] * (output.dim() - 1))).square().flatten(1).sum(1).mean()
    )


def vectorized(
    model: nn.Module, loss: Callable[..., Any] = squared, size: int = 2, **options: Any
) -> dp.CompiledRows:
    return dp.CompiledRows(model, loss, micro_batch_size=size, **{"backend": None, **options})


def means(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    rows: dp.CompiledRows | None = None,
    clip: float = CLIP,
) -> Tensor:
    """Returns the mean without noise that one step releases, by compiled rows or by hooks; the model stays as it is."""
    before = copy.deepcopy(model.state_dict())
    ours = make_optimizer(model, dp.Full(len(x)), clip=clip)
    for inputs, targets in ours.loader(TensorDataset(x, y), steps=1):
        if rows is None:
            squared(model(inputs), targets).backward()
            ours.step()
        else:
            rows.step(ours, inputs, targets)
    assert not has_rows(trained(model))
    model.load_state_dict(before)
    return torch.cat([p.grad.flatten() for p in trained(model)])


def both(
    name: str, dtype: torch.dtype = torch.float64
) -> tuple[nn.Module, nn.Module, Tensor, Tensor]:
    """Returns a model that is attached, one that is not, inputs and targets."""
    model, x = built(name, dtype)
    twin = copy.deepcopy(model)
    return dp.attach(model), twin, x, torch.linspace(-1.0, 1.0, len(x), dtype=dtype)


@pytest.mark.cases(4, 2)
@pytest.mark.parametrize("name", MODELS)
def test_means_are_those_of_attached_models(name: str) -> None:
    attached, plain, x, y = both(name)
    torch.testing.assert_close(
        means(plain, x, y, vectorized(plain)), means(attached, x, y), rtol=1e-9, atol=1e-12
    )


@pytest.mark.weekly
@pytest.mark.parametrize(
    "backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_means_are_those_of_attached_models(backend: str) -> None:
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("inductor needs a C++ compiler")
    attached, plain, x, y = both("convolution", torch.float32)
    expected = means(attached, x, y)
    rows = vectorized(plain, backend=backend)
    torch.testing.assert_close(means(plain, x, y, rows), expected, rtol=2.0**-12, atol=1e-6)
    assert rows._fast is not rows._eager
    x[1] = math.nan
    with_nan = means(plain, x, y, rows)
    x[1] = 0.0
    others = [means(plain, x[[i]], y[[i]], rows) for i in (0, 2, 3, 4)]
    torch.testing.assert_close(with_nan, sum(others) / 5, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_mean_loss_and_a_sum_loss_have_the_same_rows(reduction: str) -> None:
    model, x = built("mlp")
    y = torch.tensor([0, 1, 0, 1, 1])
    rows = vectorized(model, nn.CrossEntropyLoss(reduction=reduction))
    expected = means(model, x, y, vectorized(model, nn.CrossEntropyLoss()))
    assert torch.equal(means(model, x, y, rows), expected)


@pytest.mark.slow
def test_batches_of_any_size_compile_once() -> None:
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(inputs)
        return graph.forward

    models = [mlp(), mlp()]
    for model in models:
        ours = make_optimizer(model, dp.Poisson(3, 60), noise=1.0)
        rows, sizes = vectorized(model, size=4, backend=backend), set()
        for x, y in ours.loader(
            TensorDataset(torch.ones(60, 3), torch.ones(60)), steps=60, isolation="none"
        ):
            sizes.add(len(x))
            rows.step(ours, x, y)
        assert len(sizes) > 3  # of a Poisson number of mean 3, 60 times
        assert ours.steps == len(ours.accountant) == 60
        there, without = (
            r._rows(torch.ones(4, 3), torch.ones(4), slice(0, 4))
            for r in (rows, vectorized(model, size=4))
        )
        assert all(map(torch.equal, there, without))
    # torch without `isolate_recompiles` takes the program of the first model for the second one, with its own weights
    assert len(graphs) == (
        len(models) if "isolate_recompiles" in inspect.signature(torch.compile).parameters else 1
    )


def test_rows_of_the_filling_never_count(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = built("mlp")
    y = torch.ones(5, dtype=torch.float64)
    mean = means(model, x, y, vectorized(model, size=4))
    fill = compiled._filled

    def loud(records: Tensor, size: int) -> Tensor:
        return torch.where(
            torch.arange(size).view(-1, *[1] * (records.dim() - 1)) < len(records),
            fill(records, size),
            9.0,
        )

    monkeypatch.setattr(compiled, "_filled", loud)
    assert torch.equal(means(model, x, y, vectorized(model, size=4)), mean)
    # were they not cut off, the optimizer would see more rows than were drawn
    rows = vectorized(model, size=4)
    rows._rows = lambda inputs, targets, part: rows._call(
        rows._eager, *(fill(t[part], 4) for t in (inputs, targets))
    )
    with pytest.raises(SequenceError, match="at most the rows of one draw, and got more"):
        means(model, x, y, rows)


@pytest.mark.cases(5, 2)
@pytest.mark.parametrize("name", ["mlp", "convolution", "sequences", "layer norm"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e30])
def test_a_bad_record_touches_its_own_row_only(name: str, bad: float) -> None:
    model, x = built(name, torch.float32)
    y, rows = torch.ones(5), vectorized(model, size=3)
    zeroed = x.clone()
    x[1], zeroed[1] = bad, 0.0
    params = trained(model)
    index = [0, 2]
    there = rows._rows(x, y, slice(0, 3))
    without = rows._rows(zeroed, y, slice(0, 3))
    assert len(there) == len(params)
    for mine, others in zip(there, without, strict=True):
        assert torch.equal(mine[index], others[index])
    moved = means(model, x, y, rows) - means(model, zeroed, y, rows)
    assert torch.linalg.vector_norm(moved) <= 2 * CLIP / 5 * 1.01


@pytest.mark.parametrize("name", ["mlp", "convolution", "embedding"])
def test_a_replaced_record_moves_the_mean_by_at_most_two_clips(name: str) -> None:
    model, x = built(name, torch.float32)
    y, other = torch.ones(5), x.clone()
    other[0] = 100 * x[0] if x.is_floating_point() else 6 - x[0]
    rows = vectorized(model, size=3)
    moved = means(model, x, y, rows).double() - means(model, other, y, rows).double()
    ours = make_optimizer(model, dp.Full(5), clip=CLIP)
    ours.oracle.open(list(ours._trained()))
    assert torch.linalg.vector_norm(moved) <= ours.oracle.sensitivity("replace_one")


def test_rows_come_in_parts_of_one_size_but_for_an_optimizer_without_a_sampling() -> None:
    model, x = built("mlp")
    y = torch.ones(5, dtype=torch.float64)
    expected = means(model, x, y, vectorized(model))
    for design, parts in ((dp.Full(5), [2, 2, 1]), (Undeclared(5), [5])):
        ours = make_optimizer(model, design, clip=CLIP)
        seen, observe = [], ours.oracle.observe
        ours.oracle.observe = lambda rows, users=None, seen=seen, observe=observe: (
            seen.append(len(rows)),
            observe(rows, users),
        )
        if isinstance(design, dp.Full):
            next(iter(ours.loader(TensorDataset(x, y), steps=1)))
        before = copy.deepcopy(model.state_dict())
        vectorized(model).step(ours, x, y)
        assert seen == parts
        torch.testing.assert_close(
            torch.cat([p.grad.flatten() for p in model.parameters()]), expected
        )
        model.load_state_dict(before)


def test_physical_batches_make_one_step() -> None:
    model, x = built("mlp")
    y = torch.ones(5, dtype=torch.float64)
    expected = means(model, x, y, vectorized(model))
    ours, rows = make_optimizer(model, dp.Full(5), clip=CLIP), vectorized(model)
    for inputs, targets in ours.loader(TensorDataset(x, y), steps=1, physical_batch_size=3):
        rows.step(ours, inputs, targets)
    assert ours.steps == len(ours.accountant) == 1
    torch.testing.assert_close(
        torch.cat([p.grad.flatten() for p in model.parameters()]), expected
    )


def test_rows_of_users_go_with_their_ids() -> None:
    x, y = torch.randn(12, 3, generator=torch.Generator().manual_seed(1)), torch.ones(12, 1)
    ids = torch.arange(12) // 3
    released = []
    for compile in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        plan = dp.UserClippedSGD.plan(lr=0.1, clip=0.2, noise_multiplier=0.0, n=4)
        ours = dp.UserClippedSGD(model.parameters(), plan)
        rows = vectorized(model, nn.BCEWithLogitsLoss()) if compile else None
        if not compile:
            dp.attach(model)
        for inputs, targets, users in ours.loader(TensorDataset(x, y), ids, steps=1):
            if rows is None:
                nn.BCEWithLogitsLoss()(model(inputs), targets).backward()
                ours.step(users=users)
            else:
                rows.step(ours, inputs, targets, users=users)
        released.append(model.weight.grad.clone())
    torch.testing.assert_close(*released, rtol=1e-3, atol=1e-5)


def test_masks_of_records_are_their_own() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(64, 1, bias=False))
    rows = vectorized(model, lambda output, target: output.sum(), size=4)
    ours = make_optimizer(model, dp.Full(4), clip=100.0)
    next(iter(ours.loader(TensorDataset(torch.ones(4, 64), torch.ones(4)), steps=1)))
    rows.prepare(torch.ones(4, 64), torch.ones(4))
    (found,) = rows._rows(torch.ones(4, 64), torch.ones(4), slice(0, 4))
    assert {float(value) for value in found.flatten()} == {0.0, 2.0}
    assert (
        len({tuple(row.flatten().tolist()) for row in found}) == 4
    )  # two are equal with probability 2^-61


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rows_are_rows_of_one_record(dtype: torch.dtype) -> None:
    model, x = built("mlp", dtype)
    y, twin = torch.ones(5, dtype=dtype), copy.deepcopy(model)
    dp.attach(twin, loss_reduction="sum")
    ours = make_optimizer(twin, dp.Full(5), clip=CLIP)
    for inputs, targets in ours.loader(TensorDataset(x, y), steps=1):
        (squared(twin(inputs), targets) * len(inputs)).backward()
        ours.step()
    expected = torch.cat([p.grad.flatten() for p in twin.parameters()])
    torch.testing.assert_close(
        means(model, x, y, vectorized(model)), expected, rtol=5e-2, atol=5e-3
    )


@pytest.mark.slow
def test_records_of_another_shape_are_not_compiled_but_right() -> None:
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(inputs)
        return graph.forward

    attached, plain, x, y = both("sequences")
    rows = vectorized(plain, backend=backend)
    for part in (x, x[:, :2], x[:, :3], x):
        torch.testing.assert_close(means(plain, part, y, rows), means(attached, part, y))
    assert len(graphs) == 1


def test_a_term_on_the_weights_of_the_model_is_in_every_row() -> None:
    model = nn.Linear(2, 1, bias=False)
    rows = vectorized(model, lambda output, target: output.sum() + model.weight.sum())
    (found,) = rows._rows(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.ones(2), slice(0, 2))
    assert found.tolist() == [[[2.0, 3.0]], [[4.0, 5.0]]]


def test_a_captured_weight_in_the_loss_is_refused() -> None:
    model = nn.Linear(2, 1)
    weight, data = model.weight, (torch.ones(3, 2), torch.ones(3))
    for loss in (lambda output, target: output.sum() + weight.sum(), _Scaled()):
        with pytest.raises(
            ValueError, match="must not use parameters that are kept outside of the model"
        ):
            means(model, *data, vectorized(model, loss))


class _Scaled(nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return self.scale * output.sum()


class _Counting(nn.Module):
    """Writes what it saw, or how often, into a buffer."""

    def __init__(self, write: str) -> None:
        super().__init__()
        self.layer, self.write = nn.Linear(2, 1), write
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.write == "in place":
            self.seen += 1.0
        if self.write == "by data":
            self.seen.data.add_(1.0)
        if self.write == "records":
            self.seen.copy_(x.sum())
        if self.write == "another":
            self.seen = torch.ones(())
        return self.layer(x)


@pytest.mark.parametrize("write", ["in place", "by data", "records"])
def test_a_forward_that_writes_is_refused(write: str) -> None:
    model = _Counting(write)
    with pytest.raises(
        (PrivacyError, ValueError),
        match=r"must not change buffers|vectorizes.*(inplace|in-place)",
    ):
        means(model, torch.ones(3, 2), torch.ones(3), vectorized(model))


def test_a_forward_that_begins_to_write_is_refused() -> None:
    model = _Counting("never")
    rows = vectorized(model)
    assert rows.prepare(torch.ones(3, 2), torch.ones(3)) == "backend is None"
    model.write = "another"
    with pytest.raises(PrivacyError, match="must not change buffers"):
        means(model, torch.ones(3, 2), torch.ones(3), rows)


def test_models_that_cannot_be_attached_are_refused() -> None:
    with pytest.raises(ValueError, match="mix the rows of a batch"):
        vectorized(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    model = nn.Linear(2, 1)
    rows = vectorized(model)
    ours = make_optimizer(model, dp.Full(3))
    dp.attach(model)
    with pytest.raises(SequenceError, match=r"call dp\.detach\(model\) first"):
        vectorized(model)
    with pytest.raises(SequenceError, match=r"call dp\.detach\(model\) first"):
        rows.step(ours, torch.ones(3, 2), torch.ones(3))
    with pytest.raises(SequenceError, match="exactly the model's trainable parameters"):
        vectorized(nn.Linear(2, 1)).step(ours, torch.ones(3, 2), torch.ones(3))
    with pytest.raises(ValueError, match="must be a PrivateOptimizer"):
        vectorized(nn.Linear(2, 1)).step(
            torch.optim.SGD(model.parameters()), torch.ones(3, 2), torch.ones(3)
        )


def test_batches_that_do_not_match_are_refused() -> None:
    model = nn.Linear(2, 1)
    for x, y in (
        (torch.ones(3, 2), torch.ones(2)),
        (torch.ones(3, 2), 1.0),
        (torch.ones(3, 2), torch.ones(())),
    ):
        ours = make_optimizer(model, dp.Full(3))
        next(iter(ours.loader(TensorDataset(torch.ones(3, 2), torch.ones(3)), steps=1)))
        with pytest.raises(ValueError, match="inputs and targets must"):
            vectorized(model).step(ours, x, y)
        assert ours.steps == len(ours.accountant) == 0


def test_a_batch_that_fails_in_the_middle_is_dropped() -> None:
    model, calls = nn.Linear(2, 1), []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) == 4:  # two on made-up records, then the second part
            raise KeyboardInterrupt
        return output.sum()

    ours, rows = make_optimizer(model, dp.Full(6)), vectorized(model, loss)
    data = TensorDataset(torch.ones(6, 2), torch.ones(6))
    (x, y) = next(iter(ours.loader(data, steps=1)))
    with pytest.raises(KeyboardInterrupt):
        rows.step(ours, x, y)
    assert ours.steps == len(ours.accountant) == 0
    assert not has_rows(trained(model))
    for x, y in ours.loader(data, steps=1):
        rows.step(ours, x, y)
    assert model.weight.grad.flatten().tolist() == pytest.approx([3**-0.5] * 2, rel=1e-3)


class _Branching(nn.Module):
    """Asks for a value of a record, which cannot be vectorized."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return (
            self.layer(x) if float((0 * x.detach()).nan_to_num().sum()) == 0 else self.layer(-x)
        )


def test_what_cannot_be_vectorized_is_refused_before_anything_is_charged() -> None:
    model = _Branching()
    ours = make_optimizer(model, dp.Full(3))
    next(iter(ours.loader(TensorDataset(torch.ones(3, 3), torch.ones(3)), steps=1)))
    with pytest.raises(
        ValueError, match=r"must be one that torch\.func\.vmap vectorizes: .*\.item\(\)"
    ):
        vectorized(model).step(ours, torch.ones(3, 3), torch.ones(3))
    assert ours.steps == len(ours.accountant) == 0


@pytest.mark.slow
def test_what_cannot_be_compiled_is_vectorized_with_a_warning() -> None:
    def backend(graph: Any, inputs: Any) -> Any:
        raise OSError("no compiler here")

    model, x = built("mlp")
    y = torch.ones(5, dtype=torch.float64)
    rows = vectorized(model, backend=backend)
    with pytest.warns(
        UtilityWarning, match=r"vectorized, but not compiled: torch\.compile raised .*"
    ):
        mean = means(model, x, y, rows)
    assert torch.equal(mean, means(model, x, y, vectorized(model)))


@pytest.fixture
def _eager_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        inspect.unwrap(dp.CompiledRows.__init__).__kwdefaults__, "backend", "eager"
    )


def fitted(model: nn.Module, loss: Any = None, **options: Any) -> dp.PrivateOptimizer:
    data = TensorDataset(torch.linspace(-1, 1, 60).view(20, 3), torch.ones(20, 1))
    ours = make_optimizer(model, dp.Full(20))
    dp.fit(model, ours, data, loss or nn.MSELoss(), steps=3, progress=False, **options)
    return ours


@pytest.mark.slow
@pytest.mark.usefixtures("_eager_backend")
def test_fit_makes_the_same_steps_with_compiled_rows() -> None:
    plain = mlp().append(nn.Linear(2, 1))
    model = copy.deepcopy(plain)
    assert fitted(model, compile=True).steps == 3
    assert not is_attached(model)
    fitted(plain)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(
            ours, theirs, rtol=1e-3, atol=1e-4
        )  # bounds of float32 norms differ by 2^-14


class _Halved(torch.autograd.Function):
    """A loss that no transform knows how to vectorize."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> Tensor:
        return scores / 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad / 2


def _own_function(scores: Tensor, targets: Tensor) -> Tensor:
    return _Halved.apply(scores).mean()


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(
    "loss", [dp.losses.Hinge(1.5), dp.losses.SoftmaxCrossEntropy(3)], ids=repr
)
def test_losses_of_the_library_have_the_same_compiled_rows(loss: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, loss.num_scores))
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    y = (
        torch.tensor([1, 0, 1, 0, 1, 1])
        if loss.num_scores > 1
        else torch.tensor([[1.0], [-1.0]] * 3)
    )
    twin = dp.attach(copy.deepcopy(model))
    loss(twin(x), y).backward()
    expected = GradBatch.consume(trained(twin)).dense()
    rows = vectorized(model, loss, size=6, backend="eager")
    assert rows.prepare(x, y) is None
    for ours, theirs in zip(rows._rows(x, y, slice(0, 6)), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
@pytest.mark.usefixtures("_eager_backend")
def test_fit_goes_on_without_what_cannot_be_compiled_and_says_why() -> None:
    single, attached = nn.Sequential(nn.Linear(3, 1)), dp.attach(nn.Sequential(nn.Linear(3, 1)))
    cases = [
        (_Branching(), None, "vmap"),
        (single, _own_function, "autograd.Function"),
        (attached, None, "detach"),
    ]
    for model, loss, reason in cases:
        plain = copy.deepcopy(model)
        with pytest.warns(
            UtilityWarning, match=f"compile=True is not possible, so that fit goes on .*{reason}"
        ):
            ours = fitted(model, loss, compile=True)
        assert ours.steps == len(ours.accountant) == 3
        assert is_attached(model)
        fitted(plain, loss)
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(mine, theirs)
