"""Stacks of Linear layers, recorded as one: the bits of the layers one by one, and not taken where that would show."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.checkpoint import checkpoint

import torch_dpsco as dp
from torch_dpsco.errors import SequenceError
from torch_dpsco.fast.stack import _ACTIVATIONS, StackedForward
from torch_dpsco.rows import GradBatch, has_rows, retire_forwards

B = 5

_ACTS: dict[str, Callable[[], nn.Module]] = {
    **{kind.__name__: kind for kind in _ACTIVATIONS},
    "ReLU in place": lambda: nn.ReLU(inplace=True),
    "SiLU in place": lambda: nn.SiLU(inplace=True),
    "GELU by tanh": lambda: nn.GELU(approximate="tanh"),
}


def _frozen(layer: nn.Linear, name: str) -> nn.Linear:
    layer.get_parameter(name).requires_grad_(False)
    return layer


def _twice() -> list[nn.Module]:
    shared = nn.Linear(6, 6)
    return [nn.Linear(4, 6), shared, nn.Tanh(), shared, nn.Linear(6, 3)]


_STACKS: dict[str, Callable[[], list[nn.Module]]] = {
    **{
        name: lambda act=act: [nn.Linear(4, 6), act(), nn.Linear(6, 3)]
        for name, act in _ACTS.items()
    },
    "none between": lambda: [nn.Linear(4, 6), nn.Linear(6, 3)],
    "two between": lambda: [nn.Linear(4, 6), nn.Tanh(), nn.ReLU(), nn.Linear(6, 3)],
    "no bias": lambda: [
        nn.Linear(4, 6, bias=False),
        nn.ReLU(),
        nn.Linear(6, 6),
        nn.GELU(),
        nn.Linear(6, 3, bias=False),
    ],
    "frozen parts": lambda: [
        _frozen(nn.Linear(4, 6), "weight"),
        nn.ReLU(),
        _frozen(nn.Linear(6, 3), "bias"),
    ],
    "a layer used twice": _twice,
    "others around it": lambda: [
        *(nn.LayerNorm(4), nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 8), nn.ReLU()),
        *(nn.Dropout(0.0), nn.Linear(8, 6), nn.SiLU(), nn.Linear(6, 3), nn.Tanh()),
    ],
}


def _model(
    name: str, dtype: torch.dtype = torch.float32, reduction: str = "mean"
) -> nn.Sequential:
    torch.manual_seed(0)
    model = dp.attach(
        nn.Sequential(*_STACKS[name]()).to(dtype),
        loss_reduction=reduction,
        check_first_step=False,
    )
    model(torch.zeros(B, 4, dtype=dtype))  # stacks are made in the first forward
    model._dpsco.reset()
    assert isinstance(model.forward, StackedForward)
    return model


def _one_by_one(model: nn.Sequential) -> nn.Sequential:
    layers = copy.deepcopy(model)
    del layers.forward
    return layers


def _input(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(
        B, *shape, 4, generator=torch.Generator().manual_seed(1), dtype=dtype
    ).requires_grad_()


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def _nodes(out: Tensor) -> set[str]:
    """Returns the names of the nodes of a graph."""
    found, left = set(), [out.grad_fn]
    while left:
        node = left.pop()
        if node is not None:
            found.add(type(node).__name__)
            left += [after for after, _ in node.next_functions]
    return found


def _is_stacked(model: nn.Module, x: Tensor) -> bool:
    names = _nodes(model(x))
    assert len(names & {"_StackBackward", "_RecordedBackward"}) == 1, names
    return "_StackBackward" in names


@pytest.mark.parametrize("name", _STACKS)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("shape", [(), (3,)], ids=["vectors", "sequences"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_stack_has_the_bits_of_its_layers_one_by_one(name, reduction, shape, dtype):
    found = []
    stacked = _model(name, dtype, reduction)
    for model in (stacked, _one_by_one(stacked)):
        x = _input(*shape, dtype=dtype)
        out = model(x)
        assert ("_StackBackward" in _nodes(out)) == (model is stacked)
        losses = (out - 0.3).square().flatten(1).sum(1)
        (losses.mean() if reduction == "mean" else losses.sum()).backward()
        rows = GradBatch.consume(_trained(model))
        found.append([out.detach(), x.grad, rows.norms(), *rows.dense()])
    for ours, theirs in zip(*found, strict=True):
        assert bool(ours.abs().sum() > 0)
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", _STACKS)
def test_gradients_of_gradients_are_those_of_the_layers(name):
    found = []
    stacked = _model(name, torch.float64)
    for model in (stacked, _one_by_one(stacked)):
        x = _input(dtype=torch.float64)
        (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        found.append([slope.detach(), torch.autograd.grad(slope.square().sum(), x)[0]])
        assert not has_rows(_trained(model))  # an attack, or a saliency map
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_a_penalty_on_input_gradients_is_refused():
    model, x = _model("ReLU"), _input()
    (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    with pytest.raises(SequenceError, match="double backward"):
        slope.square().sum().backward()
    assert all(p.grad is None for p in model.parameters())


class _Checkpointed(nn.Module):
    def __init__(self, again: bool | None) -> None:
        super().__init__()
        self.stack, self.again = (
            nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 3)),
            again,
        )

    def forward(self, x: Tensor) -> Tensor:
        return (
            self.stack(x)
            if self.again is None
            else checkpoint(self.stack, x, use_reentrant=self.again)
        )


def test_a_checkpointed_stack_has_the_same_rows():
    found = []
    for again in (None, False, True):
        torch.manual_seed(0)
        model = dp.attach(_Checkpointed(again), check_first_step=False)
        model(_input()).square().mean().backward()
        found.append(GradBatch.consume(_trained(model)).dense())
    for plain, *others in zip(*found, strict=True):
        assert all(torch.equal(plain, other) for other in others)


def test_micro_batches_of_a_stack_are_joined():
    model, x = _model("two between", reduction="sum"), _input()
    for part in (x, *x.split(2)):
        model(part).square().sum().backward()
    rows = GradBatch.consume(_trained(model))
    assert rows.passes == 4
    for part in rows.dense():
        torch.testing.assert_close(part[:B], part[B:], rtol=1e-5, atol=1e-6)


def test_only_layers_that_a_backward_reaches_have_rows():
    model = _model("no bias")
    model(_input()).square().mean().backward(inputs=[model[0].weight])
    assert has_rows([model[0].weight])
    assert not has_rows([*model[2].parameters(), *model[4].parameters()])


# -- where the layers run one by one ----------------------------------------------------------------------------------


@pytest.fixture(name="calls")
def _calls() -> list[object]:
    return []


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize(
    "register",
    ["forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"],
)
def test_hooks_on_parts_of_a_stack_are_called(place, register, calls):
    model = _model("Tanh")
    assert _is_stacked(model, _input())
    handle = getattr(model[place], f"register_{register}")(lambda *args: calls.append(args[0]))
    model(_input()).square().mean().backward()
    assert calls == [model[place]]
    model.get_submodule("0").tape.uses = []
    model.get_submodule("2").tape.uses = []
    handle.remove()
    assert _is_stacked(model, _input())


def test_hooks_on_all_modules_are_called(calls):
    model = _model("ReLU")
    handle = register_module_forward_hook(lambda *args: calls.append(args[0]))
    try:
        model(_input())
    finally:
        handle.remove()
    assert calls == [*model, model]


def test_a_forward_put_on_an_activation_is_called():
    model = _model("ReLU")
    model[1].forward = lambda x: 0.0 * x
    assert torch.equal(model(_input()), model[2].bias.expand(B, 3))


def test_a_layer_in_eval_mode_is_no_part_of_a_stack():
    model = _model("others around it")
    model[3].eval()
    with pytest.raises(SequenceError, match="a forward in eval mode"):
        model(_input()).square().mean().backward()


def test_autocast_rounds_the_layers_of_a_stack():
    model = _model("ReLU", reduction="sum")
    with torch.autocast("cpu"):
        out = model(_input())
    assert out.dtype == torch.bfloat16
    assert "_StackBackward" not in _nodes(out)


def test_without_gradients_nothing_is_recorded():
    model = _model("ReLU")
    with torch.no_grad():
        assert model(_input()).grad_fn is None
    model.eval()
    assert _nodes(model(_input())).isdisjoint({"_StackBackward", "_RecordedBackward"})


# -- what a layer alone would refuse ----------------------------------------------------------------------------------


def test_an_input_that_has_no_batch_is_refused():
    model = _model("ReLU")
    with pytest.raises(SequenceError, match="batch dimension"):
        model(torch.ones(4))


class _Folded(nn.Module):
    """A model that gives its stack two rows for each record."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.Sequential(nn.Linear(2, 6), nn.ReLU(), nn.Linear(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.stack(x.reshape(-1, 2)).reshape(len(x), -1)


def test_rows_that_are_not_records_are_refused():
    model = dp.attach(_Folded(), check_first_step=False)
    with pytest.raises(SequenceError, match="must be the batch"):
        model(_input())


def test_a_stack_called_without_its_model_is_refused():
    model = dp.attach(
        nn.Sequential(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)), nn.Tanh())
    )
    out = model[0](_input())
    with pytest.raises(SequenceError, match="the attached model itself must be called"):
        out.mean().backward()
    assert not has_rows(_trained(model))


def test_weights_that_attach_has_not_seen_are_refused():
    model = _model("ReLU")
    model[2].weight = nn.Parameter(torch.ones(3, 6))
    with pytest.raises(SequenceError, match="did not have at"):
        model(_input())


def test_a_term_on_the_weights_is_refused():
    model = _model("ReLU")
    loss = model(_input()).mean() + model[0].weight.square().sum()
    with pytest.raises(SequenceError, match="reg="):
        loss.backward()
    assert all(p.grad is None for p in model.parameters())


def test_an_input_that_is_overwritten_before_the_step_is_refused():
    model, seen = _model("ReLU"), []
    model.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model(_input().detach()).mean().backward()
    seen[0].zero_()
    with pytest.raises(SequenceError, match="overwritten"):
        GradBatch.consume(_trained(model))


def test_a_mean_in_reduced_precision_is_refused():
    model = dp.attach(
        nn.Sequential(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)), nn.Tanh())
    )
    parts: list[Tensor] = []
    model[0].register_forward_hook(lambda *args: parts.append(args[2]))
    model(_input().detach())
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with pytest.raises(SequenceError, match="full precision"):
            parts[0].mean().backward()
    finally:
        torch.set_float32_matmul_precision(before)


# -- copies and the way back ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))]
)
def test_copies_are_stacked_and_detached_models_are_plain_again(copied):
    model = copied(_model("ReLU"))
    assert _is_stacked(model, _input())
    dp.detach(model)
    assert [type(part) for part in (model, *model)] == [
        nn.Sequential,
        nn.Linear,
        nn.ReLU,
        nn.Linear,
    ]


@pytest.mark.parametrize(
    "layers",
    [
        [nn.Linear(4, 3)],
        [nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 3)],
        [nn.Linear(4, 6), nn.LeakyReLU(), nn.Linear(6, 3)],
    ],
    ids=["one layer", "dropout", "another activation"],
)
def test_what_has_no_stack_keeps_its_class(layers):
    assert type(dp.attach(nn.Sequential(*layers))) is nn.Sequential


def test_weight_and_bias_are_known_by_their_names():
    model = _model("ReLU")
    expected = model(_input())
    for name in ("weight", "bias"):  # which puts the bias first
        parameter = getattr(model[0], name)
        if name == "weight":
            del model[0].weight
        model[0].register_parameter(name, parameter)
    assert [name for name, _ in model[0].named_parameters()] == ["bias", "weight"]
    assert _is_stacked(model, _input())
    assert torch.equal(model(_input()), expected)


def test_a_part_of_a_sequential_runs_as_it_did():
    model = _model("no bias")
    with torch.no_grad():
        assert torch.equal(model[:3](_input()), model[2](model[1](model[0](_input()))))
    assert _is_stacked(model, _input())


@pytest.mark.parametrize(
    "layers",
    [
        lambda: [nn.Linear(4, 3)],
        lambda: [nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)],
        lambda: [nn.Linear(4, 6), nn.Linear(6, 3), nn.ReLU()],
    ],
    ids=["layer", "stack", "hook"],
)
def test_the_last_layer_or_stack_looks_at_each_backward(
    layers: Callable[[], list[nn.Module]],
) -> None:
    model = dp.attach(nn.Sequential(*layers()), check_first_step=False)
    x = torch.randn(B, 4)
    loss = model(x).sum()
    loss.backward(retain_graph=True)
    assert len(GradBatch.consume(list(model.parameters()))) == B
    retire_forwards(list(model.parameters()))
    model(x)
    with pytest.raises(SequenceError, match="a backward must follow"):
        loss.backward()  # its records were in an earlier batch
    assert not has_rows(list(model.parameters()))
    torch.set_float32_matmul_precision("medium")
    try:
        with pytest.raises(SequenceError, match="a mean loss needs products in full precision"):
            model(x).sum().backward()
    finally:
        torch.set_float32_matmul_precision("highest")
    model(x).sum().backward()
    assert len(GradBatch.consume(list(model.parameters()))) == B
