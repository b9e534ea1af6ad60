"""Mixed precision: GradScaler's scale is taken out of each row before the clip, and overflow is told to nobody."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import torch_dpsco as dp
from tests.problems import make_optimizer
from torch_dpsco.accounting.designs import Undeclared
from torch_dpsco.errors import SequenceError, UtilityWarning

SCALE = 2.0**10
X = torch.tensor([[0.5, 0.25], [-30.0, 40.0], [0.0, 0.125]])
MEAN = (X[0] + X[1] / 50 + X[2]) / 3  # clipped at 1
CLOSE = {
    "rtol": 2e-3,
    "atol": 0.0,
}  # norms are certified upper bounds, so that clipped rows are a little shorter


def scaler(scale: float = SCALE, growth_interval: int = 10**9) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=growth_interval)


def scores(rows: str) -> nn.Linear:
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    return dp.attach(model, rows=rows, loss_reduction="sum")


def scaled_step(
    model: nn.Linear, optimizer: dp.PrivateOptimizer, scaling: torch.amp.GradScaler, x=X
) -> torch.Tensor:
    optimizer.zero_grad()
    scaling.scale(model(x).sum()).backward()
    scaling.step(optimizer)
    scaling.update()
    return model.weight.grad.clone()


@pytest.mark.parametrize("rows", ["auto", "dense"])
@pytest.mark.parametrize("scale", [SCALE, 2.0**-10, 1000.0])
def test_rows_are_unscaled_before_the_clip(rows, scale):
    model, plain = scores(rows), scores(rows)
    optimizer, reference = (make_optimizer(m, Undeclared(3), clip=1.0) for m in (model, plain))
    released = scaled_step(model, optimizer, scaler(scale))
    plain(X).sum().backward()
    reference.step()
    torch.testing.assert_close(released, plain.weight.grad, rtol=1e-6, atol=0)
    torch.testing.assert_close(released[0], MEAN, **CLOSE)
    assert len(optimizer.accountant) == 1


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("rows", ["auto", "dense"])
def test_scaled_rows_never_pass_the_clip(rows):
    for scale in (3.0, 2.0**16, 2.0**-16, 1.7e5):
        for x in (X, 1e30 * X, 1e-30 * X):
            model = scores(rows)
            optimizer = make_optimizer(model, Undeclared(3), clip=0.1)
            with_all = scaled_step(model, optimizer, scaler(scale), x)
            less = x.clone()
            less[1] = 0.0
            model = scores(rows)
            without = scaled_step(
                model, make_optimizer(model, Undeclared(3), clip=0.1), scaler(scale), less
            )
            assert torch.linalg.vector_norm(with_all.double() - without.double()) <= 0.1 / 3 * (
                1 + 1e-6
            )


@pytest.mark.parametrize("rows", ["auto", "dense"])
def test_a_record_that_overflows_does_not_move_the_scale(rows):
    model, scaling = scores(rows), scaler()
    optimizer = make_optimizer(model, Undeclared(3), clip=1.0)
    x = X.clone()
    x[1] = math.inf
    released = scaled_step(model, optimizer, scaling, x)
    torch.testing.assert_close(released[0], (X[0] + X[2]) / 3)
    assert scaling.get_scale() == SCALE
    assert optimizer.steps == len(optimizer.accountant) == 1  # the step is not skipped


def test_the_inf_check_never_sees_a_gradient_of_records():
    model = scores("dense")
    optimizer = make_optimizer(model, Undeclared(3))
    model(torch.full((3, 2), math.nan)).sum().backward()
    assert optimizer._step_supports_amp_scaling
    assert all(
        float(p.grad.abs().sum()) == 0.0 for p in model.parameters() if p.grad is not None
    )
    assert any(p.grad is not None for p in model.parameters())


def test_a_scale_that_grows_warns():
    model, scaling = scores("auto"), scaler(growth_interval=1)
    optimizer = make_optimizer(model, Undeclared(3))
    first = scaled_step(model, optimizer, scaling)
    with pytest.warns(
        UtilityWarning, match=r"scale has changed from 1024 to 2048.*GradScaler\(init_scale"
    ):
        second = scaled_step(model, optimizer, scaling)
    torch.testing.assert_close(first, second)


def test_unscaling_by_hand_is_refused_and_the_next_step_is_right():
    model, scaling = scores("auto"), scaler()
    optimizer = make_optimizer(model, Undeclared(3))
    scaling.scale(model(X).sum()).backward()
    scaling.unscale_(optimizer)
    with pytest.raises(SequenceError, match=r"unscale_\(optimizer\) must not be called"):
        scaling.step(optimizer)
    assert len(optimizer.accountant) == optimizer.steps == 0
    optimizer.zero_grad()
    torch.testing.assert_close(scaled_step(model, optimizer, scaler())[0], MEAN, **CLOSE)


def test_a_step_that_raises_leaves_no_scale_behind():
    model, scaling = scores("auto"), scaler()
    optimizer = make_optimizer(model, Undeclared(3))
    scaling.scale(model(X).sum()).backward()
    optimizer.zero_grad()
    with pytest.raises(SequenceError, match="per-sample gradients are missing"):
        scaling.step(optimizer)
    torch.testing.assert_close(scaled_step(model, optimizer, scaling)[0], MEAN, **CLOSE)


@pytest.mark.parametrize("scale", [2.0**41, 2.0**-41])
def test_a_scale_far_from_one_is_refused(scale):
    model = scores("auto")
    optimizer = make_optimizer(model, Undeclared(3))
    with pytest.raises(ValueError, match="grad_scale must be between"):
        scaled_step(model, optimizer, scaler(scale))
    assert len(optimizer.accountant) == 0


def test_physical_batches_are_unscaled_one_by_one():
    model, scaling = scores("auto"), scaler()
    optimizer = make_optimizer(model, dp.Full(3))
    for (x,) in optimizer.loader(TensorDataset(X), steps=2, physical_batch_size=2):
        optimizer.zero_grad()
        scaling.scale(model(x).sum()).backward()
        scaling.step(optimizer)
        scaling.update()
    torch.testing.assert_close(model.weight.grad[0], MEAN, **CLOSE)
    assert optimizer.steps == len(optimizer.accountant) == 2


def test_a_disabled_scaler_changes_nothing():
    model = scores("auto")
    optimizer = make_optimizer(model, Undeclared(3))
    released = scaled_step(model, optimizer, torch.amp.GradScaler("cpu", enabled=False))
    torch.testing.assert_close(released[0], MEAN, **CLOSE)


@pytest.mark.parametrize("rows", ["auto", "dense"])
def test_a_mean_loss_under_autocast_is_refused(rows):
    """The 1/B of a mean loss would be rounded to 8 bits: one record more would move the rows of all."""
    model = dp.attach(nn.Linear(2, 1), rows=rows)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(X)
    with pytest.raises(
        SequenceError,
        match=r"half precision needs a loss that sums.*loss_reduction='sum' to dp.attach or dp.make_private",
    ):
        out.float().mean().backward()


@pytest.mark.parametrize("rows", ["auto", "dense"])
def test_a_sum_loss_under_autocast_trains(rows):
    model = scores(rows)
    optimizer = make_optimizer(model, Undeclared(3))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(X)
    out.float().sum().backward()
    optimizer.step()
    torch.testing.assert_close(model.weight.grad[0], MEAN, rtol=2e-2, atol=1e-3)
