"""Attaching leaves a model as it was, apart from its rows, and refuses what per-sample gradients cannot cover."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from opacus.validators import ModuleValidator
from torch import Tensor, nn

import torch_dpsco as dp
from tests.problems import TwoHeads, gradients, make_optimizer
from torch_dpsco.accounting.designs import Undeclared
from torch_dpsco.errors import SequenceError
from torch_dpsco.rows import GradBatch, has_rows
from torch_dpsco.rows.attach import is_attached

ROWS = ["auto", "dense"]


class Regularized(nn.Module):
    """Hands out its own penalty, as user code does."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.RMSNorm(3), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.norm(x))


class TwoRates(nn.Module):
    """Uses a weight also outside of its layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + 0.1 * (x @ self.layer.weight.t())


class Breaks(nn.Module):
    """Fails after its first layer for inputs of more than two rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if len(x) > 2:
            raise ArithmeticError("too many")
        return self.last(hidden)


def mixed() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.RMSNorm(4), nn.Linear(4, 1))


def inputs(n: int = 4) -> Tensor:
    return torch.randn(n, 3, generator=torch.Generator().manual_seed(1))


def hooks(model: nn.Module) -> int:
    """Counts the hooks on modules and parameters."""
    kinds = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
    of_modules = sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)
    return of_modules + sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())


def assert_same_rows(first: GradBatch, second: GradBatch) -> None:
    for ours, theirs in zip(first.dense(), second.dense(), strict=True):
        torch.testing.assert_close(ours, theirs)


# -- attach and detach ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", ROWS)
def test_attaching_keeps_class_names_values_and_outputs(rows):
    model, plain = mixed(), mixed()
    attached = dp.attach(model, rows=rows)
    assert attached is model
    assert type(model) is nn.Sequential
    assert all(
        isinstance(a, type(b)) for a, b in zip(model.modules(), plain.modules(), strict=True)
    )
    assert [name for name, _ in model.named_parameters()] == [
        name for name, _ in plain.named_parameters()
    ]
    assert [name for name, _ in model.named_modules()] == [
        name for name, _ in plain.named_modules()
    ]
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=0)
    model.load_state_dict(plain.state_dict())
    plain.load_state_dict(model.state_dict())
    for training in (True, False):
        assert torch.equal(model.train(training)(inputs()), plain.train(training)(inputs()))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("used", [False, True])
def test_detaching_restores_the_model(rows, used):
    model, plain = mixed(), mixed()
    dp.attach(model, rows=rows)
    if used:
        model(inputs()).mean().backward()
    assert dp.detach(model) is model
    for ours, theirs in zip(model.modules(), plain.modules(), strict=True):
        assert type(ours) is type(theirs)
        assert set(vars(ours)) == set(vars(theirs))
    assert hooks(model) == hooks(plain) == 0
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert ours.grad is None
        assert {key for key, value in vars(ours).items() if value is not None} <= {
            "_forward_counter"
        }
        assert torch.equal(ours, theirs)
    for each in (model, plain):
        (each(inputs()) - 1).square().mean().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    assert not has_rows(list(model.parameters()))
    assert list(model.state_dict()) == list(plain.state_dict())


def held(value: object) -> list[Tensor]:
    """Returns the tensors in an attribute of a module or parameter."""
    if isinstance(value, Tensor):
        return [value]
    parts = (
        value.values()
        if isinstance(value, dict)
        else value
        if isinstance(value, (list, tuple))
        else []
    )
    return [tensor for part in parts for tensor in held(part)]


@pytest.mark.parametrize("rows", ROWS)
def test_a_detached_model_holds_no_data(rows):
    model = dp.attach(mixed(), rows=rows)
    model(inputs()).mean().backward()
    model(inputs())  # its backward never comes
    dp.detach(model)
    values = {id(p) for p in model.parameters()}
    owners = [*model.modules(), *model.parameters()]
    found = [
        (name, t.shape)
        for m in owners
        for name, v in vars(m).items()
        for t in held(v)
        if id(t) not in values
    ]
    assert not found


@pytest.mark.cases(2, 1)
@pytest.mark.parametrize("first", ROWS)
@pytest.mark.parametrize("second", ROWS)
def test_a_detached_model_can_be_attached_in_another_way(first, second):
    model = dp.detach(dp.attach(mixed(), rows=first, loss_reduction="sum"))
    found = gradients(dp.attach(model, rows=second), inputs(), "mean")
    assert_same_rows(found, gradients(dp.attach(mixed()), inputs(), "mean"))


@pytest.mark.cases(3, 1)
@pytest.mark.parametrize("first", ROWS)
@pytest.mark.parametrize("second", ROWS)
def test_attaching_twice_is_refused_and_changes_nothing(first, second):
    model = dp.attach(mixed(), rows=first)
    expected, before = gradients(model, inputs(), "mean"), hooks(model)
    for target in (model, nn.Sequential(model, nn.Linear(1, 1))):
        with pytest.raises(SequenceError, match="attached already"):
            dp.attach(target, rows=second)
    assert hooks(model) == before
    assert_same_rows(gradients(model, inputs(), "mean"), expected)


@pytest.mark.cases(3, 1)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda part: part])
def test_a_part_of_an_attached_model_is_refused(rows, copied):
    # else its rows would be scaled by the loss_reduction of the whole model: by the private number of rows
    if copied is copy.deepcopy and rows == "dense":
        return  # nothing of the attachment is in the copy of a part
    model = dp.attach(mixed(), rows=rows)
    part = copied(model[0])
    with pytest.raises(SequenceError, match="attached already"):
        dp.attach(part, loss_reduction="sum")
    assert_same_rows(
        gradients(model, inputs(), "mean"), gradients(dp.attach(mixed()), inputs(), "mean")
    )


@pytest.mark.parametrize("rows", ROWS)
def test_a_copy_of_an_attached_model_is_no_part_of_another(rows):
    inner = copy.deepcopy(dp.attach(mixed(), rows=rows))
    with pytest.raises(SequenceError, match="attached already"):
        dp.attach(nn.Sequential(inner), loss_reduction="sum")


def test_detaching_what_is_not_attached_is_refused():
    model = nn.Linear(2, 1)
    for _ in range(2):
        with pytest.raises(SequenceError, match="not attached"):
            dp.detach(model)
        dp.detach(dp.attach(model))
    assert not is_attached(model)


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))]
)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("used", [False, True])
def test_copies_of_a_mixed_model_give_right_rows_and_leave_the_original_alone(
    copied, rows, used
):
    model = dp.attach(mixed(), rows=rows)
    if used:
        gradients(model, inputs(2), "mean")
    twin = copied(model)
    assert is_attached(twin)
    for other in (twin, model, twin):
        assert_same_rows(
            gradients(other, inputs(), "mean"), gradients(dp.attach(mixed()), inputs(), "mean")
        )
    twin(inputs()).mean().backward()
    assert has_rows(list(twin.parameters()))
    assert not has_rows(list(model.parameters()))
    assert all(p.grad is None for p in twin.parameters())
    dp.detach(twin)
    assert hooks(twin) == 0
    assert_same_rows(
        gradients(model, inputs(), "mean"), gradients(dp.attach(mixed()), inputs(), "mean")
    )


@pytest.mark.parametrize("rows", ROWS)
def test_evaluation_records_nothing(rows):
    model = dp.attach(mixed(), rows=rows)
    expected = mixed()(inputs())
    assert torch.equal(model.eval()(inputs()), expected)
    with torch.no_grad():
        assert torch.equal(model.train()(inputs()), expected)
        assert torch.equal(model.eval()(inputs()), expected)
    assert not has_rows(list(model.parameters()))
    assert_same_rows(
        gradients(model.train(), inputs(), "mean"),
        gradients(dp.attach(mixed()), inputs(), "mean"),
    )


@pytest.mark.parametrize("rows", ROWS)
def test_gradients_in_the_input_are_those_of_the_plain_model(rows):
    grads = []
    for model in (mixed(), dp.attach(mixed(), rows=rows)):
        x = inputs().requires_grad_()
        model(x).square().mean().backward()
        grads.append(x.grad)
    torch.testing.assert_close(grads[0], grads[1])


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layer",
    [
        nn.BatchNorm1d(3),
        nn.BatchNorm1d(3, affine=False),
        nn.InstanceNorm1d(3, affine=True, track_running_stats=True),
    ],
)
def test_layers_that_mix_records_are_refused(layer):
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(layer), nn.Linear(3, 1))
    with pytest.raises(
        ValueError, match=rf"mix the rows of a batch \(got {type(layer).__name__} '1.0'\)"
    ):
        dp.attach(model)
    assert not is_attached(model)
    assert type(model[0]) is nn.Linear


def test_instance_norm_without_statistics_keeps_records_apart():
    model = dp.attach(
        nn.Sequential(nn.InstanceNorm1d(2, affine=True), nn.Flatten(), nn.Linear(6, 1))
    )
    x = torch.randn(4, 2, 3, generator=torch.Generator().manual_seed(2))
    rows = gradients(model, x, "mean").dense()
    for part, alone in zip(rows, gradients(model, x[:1], "mean").dense(), strict=True):
        torch.testing.assert_close(part[:1], alone)


def test_a_shallow_copy_of_an_attached_layer_is_refused():
    """It has the forward of the layer that it was copied from, whatever its own attributes say."""
    model = dp.attach(nn.Sequential(nn.Conv1d(1, 1, 1), nn.Flatten(), nn.Linear(4, 1)))
    whole = copy.copy(dp.attach(nn.Linear(2, 1)))
    model[0] = copy.copy(model[0])
    for made, x in (model, torch.ones(3, 1, 4)), (whole, torch.ones(3, 2)):
        with pytest.raises(SequenceError, match=r"shallow copy .* copy\.deepcopy"):
            made(x)


@pytest.mark.parametrize("options", [{"rows": "sparse"}, {"loss_reduction": "none"}])
def test_unknown_options_are_named(options):
    model = nn.Linear(2, 1)
    with pytest.raises(ValueError, match=f"{next(iter(options))} must be one of"):
        dp.attach(model, **options)
    assert not is_attached(model)


def test_a_model_without_trained_parameters_is_refused():
    for model in (nn.Tanh(), nn.Linear(2, 1).requires_grad_(False)):
        with pytest.raises(ValueError, match="trainable parameter"):
            dp.attach(model)


def loss_of(model: nn.Module, penalty: Callable[[nn.Module], Tensor], factor: float) -> Tensor:
    return (model(inputs()) - 1).square().mean() + factor * penalty(model)


PENALTIES = {
    "weight of a linear layer": lambda model: model.layer.weight.square().sum(),
    "bias of a linear layer": lambda model: (model.layer.bias - 3).square().sum(),
    "weight of another layer": lambda model: model.norm.weight.square().sum(),
    "all": lambda model: sum(p.square().sum() for p in model.parameters()),
}


@pytest.mark.cases(4, 2)
@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("rows", ROWS)
def test_regularizer_in_the_loss_is_refused(penalty, rows):
    model = dp.attach(Regularized(), rows=rows)
    opt = make_optimizer(model, Undeclared(4))
    before = copy.deepcopy(model.state_dict())

    def private_step(factor: float) -> None:
        loss_of(model, PENALTIES[penalty], factor).backward()
        opt.step()

    with pytest.raises(SequenceError, match="reg="):
        private_step(0.5)
    assert all(p.grad is None for p in model.parameters())
    assert len(opt.accountant) == 0
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    opt.discard()
    (model(inputs()) - 1).square().mean().backward()
    opt.step()  # without the penalty all is well
    assert opt.steps == 1


@pytest.mark.parametrize("rows", ROWS)
def test_a_weight_used_outside_of_its_layer_is_refused(rows):
    model = dp.attach(TwoRates(), rows=rows)

    def consume() -> None:
        model(inputs()).mean().backward()
        GradBatch.consume(list(model.parameters()))

    with pytest.raises(SequenceError, match="reg="):
        consume()


# -- what a backward leaves -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", ROWS)
def test_no_gradient_survives_a_backward(rows):
    model = dp.attach(mixed(), rows=rows)
    for _ in range(3):
        model(inputs()).mean().backward()
        assert all(p.grad is None for p in model.parameters())
        assert has_rows(list(model.parameters()))


def test_a_second_forward_before_the_backward_is_refused_or_right():
    x = inputs(5)
    factored = dp.attach(nn.Linear(3, 1))
    dense = dp.attach(copy.deepcopy(dp.detach(copy.deepcopy(factored))), rows="dense")
    expected = gradients(factored, x, "mean")

    def both(model: nn.Module) -> GradBatch:
        first, second = ((model(part) - 1).square().mean() for part in (x[:2], x[2:]))
        (first + second).backward()
        return GradBatch.consume(list(model.parameters()))

    with pytest.raises(SequenceError, match="waiting for its backward"):
        both(dense)
    found = both(factored)
    assert found.passes == 2
    assert_same_rows(found, expected)


@pytest.mark.parametrize("rows", ["auto", "dense"])
def test_discard_starts_over_after_a_forward_that_failed(rows):
    torch.manual_seed(1)
    model = dp.attach(Breaks(), rows=rows)
    opt = make_optimizer(model, Undeclared(2), clip=1e6)
    expected = gradients(model, inputs(2), "mean")
    with pytest.raises(ArithmeticError):
        model(inputs(3))
    opt.discard()
    assert_same_rows(gradients(model, inputs(2), "mean"), expected)
    model(inputs(2)).mean().backward()
    opt.step()
    assert opt.steps == 1


def test_a_head_without_a_backward_is_refused():
    model = dp.attach(TwoHeads(), loss_reduction="sum")
    opt = make_optimizer(model, Undeclared(2))
    model(torch.ones(2, 1), "a").sum().backward()
    with pytest.raises(SequenceError, match="missing for parameter 1"):
        opt.step()
    model(torch.ones(2, 1), "ab").sum().backward()
    opt.step()
    assert opt.steps == 1


def test_attention_over_the_batch_dimension_is_refused():
    """With times first, "row i" would be time i of all records; the number of rows can agree by chance."""
    layer = nn.MultiheadAttention(4, 2)  # batch_first=False is torch's default
    model = ModuleValidator.fix(nn.Sequential(nn.Linear(4, 4), layer))
    with pytest.raises(
        ValueError, match="batch_first must be False, that of the attention layer '1'"
    ):
        dp.attach(model)
    assert dp.attach(model, batch_first=False) is model


@pytest.mark.cases(2, 1)
@pytest.mark.parametrize("seed", range(5))
def test_rows_that_cancel_are_not_taken_for_a_regularizer(seed):
    # the bias of the keys shifts all scores of a query alike: its gradient is zero up to rounding
    torch.manual_seed(seed)
    model = ModuleValidator.fix(
        nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, dropout=0.0)
    )
    dp.attach(model, rows="dense").train()
    (model(torch.randn(5, 6, 4)) * torch.randn(5, 6, 4)).flatten(1).sum(1).mean().backward()
    assert len(GradBatch.consume(list(model.parameters()))) == 5


def test_weights_that_attach_has_not_seen_are_refused():
    model = dp.attach(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)))
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    with pytest.raises(SequenceError, match=r"did not have at dp\.attach"):
        torch.func.functional_call(model, weights, (torch.ones(4, 3),))
    model(torch.ones(4, 3)).sum().backward()
    model.eval()
    torch.func.functional_call(
        model, weights, (torch.ones(4, 3),)
    ).sum().backward()  # of no interest to anyone


@pytest.mark.parametrize(
    "layer", [nn.Linear(3, 2), nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)), nn.LayerNorm(3)]
)
@pytest.mark.parametrize("times", [(), (2,)], ids=["vectors", "sequences"])
def test_an_input_that_is_overwritten_before_the_step_is_refused(layer, times):
    model, seen = dp.attach(copy.deepcopy(layer)), []
    model.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    buffer, next_batch = torch.randn(4, *times, 3), torch.full((4, *times, 3), 1e6)
    model(buffer).sum().backward()
    expected = [rows.clone() for rows in GradBatch.consume(list(model.parameters())).dense()]
    model(buffer).sum().backward()
    seen[-1].copy_(next_batch)
    if any(isinstance(m, nn.Linear) for m in model.modules()) and not times:  # left as factors
        with pytest.raises(SequenceError, match="overwritten between backward and step"):
            GradBatch.consume(list(model.parameters()))
        return
    rows = GradBatch.consume(
        list(model.parameters())
    ).dense()  # formed in the backward, and not moved
    for found, right in zip(rows, expected, strict=True):
        torch.testing.assert_close(found, right)


@pytest.mark.parametrize("layer", [nn.Conv2d(6, 8, 3), nn.Conv2d(6, 2, 2)], ids=["big", "small"])
def test_rows_of_a_convolution_are_formed_before_its_input_is_overwritten(layer):
    model, buffer, seen = dp.attach(copy.deepcopy(layer)), torch.randn(4, 6, 4, 4), []
    model.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model(buffer).sum().backward()
    expected = GradBatch.consume(list(model.parameters())).dense()
    model(buffer).sum().backward()
    seen[-1].fill_(1e6)
    for found, right in zip(
        GradBatch.consume(list(model.parameters())).dense(), expected, strict=True
    ):
        torch.testing.assert_close(found, right)
