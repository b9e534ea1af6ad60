"""Randomized smoothing inside of the optimizers: gradients at random points, everything else at the iterate."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import torch_dpsco as dp
from torch_dpsco.accounting.designs import Full
from torch_dpsco.errors import SequenceError, UtilityWarning
from torch_dpsco.optim import PrivateOptimizer
from torch_dpsco.oracles import Clipped
from torch_dpsco.prox import Ball
from torch_dpsco.rules import SGD
from torch_dpsco.schedule import Phase, Schedule
from torch_dpsco.smoothing import Shifts

N, DIM, RADIUS, LR = 6, 3, 0.5, 0.25
X = torch.arange(1.0, N * DIM + 1, dtype=torch.float64).reshape(N, DIM) / 10


class Point(nn.Module):
    """Records are points: half the squared distance to them has the gradient w - x."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(DIM, 1, bias=False, dtype=torch.float64)
        nn.init.zeros_(self.layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def run(
    *, steps: int = 3, radius: float = RADIUS, average: str = "last", noise: float = 0.0, **more: Any
) -> tuple[nn.Module, PrivateOptimizer]:
    torch.manual_seed(0)
    model = dp.attach(Point(), loss_reduction="sum")
    optimizer = PrivateOptimizer(
        model.parameters(),
        LR,
        oracle=Clipped(1e6, noise, N),
        rule=SGD(average),
        design=Full(N),
        schedule=Schedule((Phase(steps, smoothing=radius),)),
        **more,
    )
    return model, optimizer


def weights(model: nn.Module) -> Tensor:
    return model.layer.weight.detach().clone()[0]


def iterate(model: nn.Module, optimizer: PrivateOptimizer) -> Tensor:
    kept: Tensor = optimizer.state[model.layer.weight]["iterate"]
    return kept.clone()[0]


def step(model: nn.Module, optimizer: PrivateOptimizer) -> Tensor:
    """Makes a step of the loss (w.x)^2/2, and returns its exact mean gradient at the query."""
    for x, _ in optimizer.loader(TensorDataset(X, X), steps=1):
        optimizer.zero_grad()
        (0.5 * model(x).square()).sum().backward()
        query = weights(model)
        optimizer.step()
    return (X * (X @ query)[:, None]).mean(0)


def test_gradients_are_taken_at_random_points_and_move_the_iterate() -> None:
    model, optimizer = run()
    expected = torch.zeros(DIM, dtype=torch.float64)
    for _ in range(3):
        query = weights(model)
        assert torch.allclose(iterate(model, optimizer), expected, rtol=0, atol=1e-14)
        assert 0 < float((query - expected).norm()) <= RADIUS * (1 + 1e-12)
        expected -= LR * step(model, optimizer)
    assert torch.allclose(weights(model), expected, rtol=0, atol=1e-14)  # no query follows the last step


def test_every_step_has_a_shift_of_its_own() -> None:
    model, optimizer = run(steps=4)
    found = []
    for _ in range(4):
        found.append(weights(model) - iterate(model, optimizer))
        step(model, optimizer)
    assert all(not torch.allclose(a, b) for i, a in enumerate(found) for b in found[:i])


@pytest.mark.parametrize("average", ["last", "uniform"])
def test_the_answer_is_made_of_iterates(average: str) -> None:
    model, optimizer = run(steps=5, average=average)
    visited = []
    for _ in range(3):
        visited.append(iterate(model, optimizer))
        step(model, optimizer)
    expected = iterate(model, optimizer) if average == "last" else torch.stack(visited).mean(0)
    query = weights(model)
    with optimizer.released():
        assert torch.allclose(weights(model), expected, rtol=0, atol=1e-14)
    assert torch.equal(weights(model), query)
    optimizer.finalize()
    assert torch.allclose(weights(model), expected, rtol=0, atol=1e-14)


def test_looking_at_the_answer_changes_nothing() -> None:
    model, optimizer = run()
    before = weights(model), iterate(model, optimizer)
    with optimizer.released():
        pass
    with optimizer.released():
        assert torch.equal(weights(model), before[1])
    assert torch.equal(weights(model), before[0])
    move = step(model, optimizer)
    assert torch.allclose(iterate(model, optimizer), before[1] - LR * move, rtol=0, atol=1e-14)


def test_a_checkpoint_goes_on_from_the_same_query() -> None:
    model, optimizer = run(steps=4, average="uniform")
    step(model, optimizer)
    buffer = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    other, resumed = run(steps=4, average="uniform")
    other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    assert torch.equal(weights(other), weights(model))
    start = iterate(model, optimizer)
    move = step(other, resumed)
    assert torch.allclose(iterate(other, resumed), start - LR * move, rtol=0, atol=1e-14)
    step(model, optimizer)
    assert torch.equal(iterate(other, resumed), iterate(model, optimizer))  # the noise is off, the query was the same


def test_copies_draw_shifts_of_their_own() -> None:
    model, optimizer = run(steps=4)
    other, copied = copy.deepcopy((model, optimizer))
    assert torch.equal(weights(model), weights(other))
    step(model, optimizer)
    step(other, copied)
    assert torch.equal(iterate(model, optimizer), iterate(other, copied))
    assert not torch.equal(weights(model), weights(other))


def test_weights_that_were_loaded_are_the_new_iterate() -> None:
    model, optimizer = run()
    with torch.no_grad():
        model.layer.weight.fill_(2.0)
    move = step(model, optimizer)
    assert torch.allclose(iterate(model, optimizer), 2.0 - LR * move, rtol=0, atol=1e-14)


def test_a_frozen_parameter_is_put_back() -> None:
    model, optimizer = run()
    model.layer.weight.requires_grad_(False)
    optimizer.finalize()
    assert torch.equal(weights(model), torch.zeros(DIM, dtype=torch.float64))


def test_iterates_stay_in_the_feasible_set_and_queries_near_it() -> None:
    model, optimizer = run(prox=Ball(0.1), steps=3)
    for _ in range(2):
        step(model, optimizer)
        assert float(iterate(model, optimizer).norm()) <= 0.1 * (1 + 1e-12)
        assert 0 < float((weights(model) - iterate(model, optimizer)).norm()) <= RADIUS * (1 + 1e-12)


def test_shifts_do_not_touch_the_noise() -> None:
    """With a linear loss shifts change no gradient: the same noise gives the same run, shifted or not."""
    ends = []
    for radius in (0.0, RADIUS):
        with pytest.warns(UtilityWarning, match="generator"):
            model, optimizer = run(radius=radius, noise=1.0, generator=torch.Generator().manual_seed(5))
        for _ in range(3):
            for x, _ in optimizer.loader(TensorDataset(X, X), steps=1):
                optimizer.zero_grad()
                model(x).sum().backward()
                optimizer.step()
        ends.append(weights(model))
    assert torch.allclose(ends[0], ends[1], rtol=1e-14)


def test_smoothing_costs_no_privacy() -> None:
    events = [run(radius=radius, noise=1.0)[1].ahead() for radius in (0.0, RADIUS)]
    assert events[0] == events[1]


def test_a_refused_batch_leaves_the_query() -> None:
    model, optimizer = run()
    before = weights(model)
    with pytest.raises(SequenceError):
        optimizer.step()
    assert torch.equal(weights(model), before)


def test_the_last_step_leaves_the_iterate_and_phases_may_differ() -> None:
    model = dp.attach(Point(), loss_reduction="sum")
    phases = (Phase(1, smoothing=RADIUS), Phase(1), Phase(1, smoothing=0.01))
    optimizer = PrivateOptimizer(
        model.parameters(), LR, oracle=Clipped(1e6, 0.0, N), rule=SGD("last"), design=Full(N),
        schedule=Schedule(phases),
    )  # fmt: skip
    expected = torch.zeros(DIM, dtype=torch.float64)
    for phase in phases:
        gap = float((weights(model) - expected).norm())
        assert 0 < gap <= phase.smoothing * (1 + 1e-9) if phase.smoothing else gap < 1e-14
        expected -= LR * step(model, optimizer)
    assert torch.allclose(weights(model), expected, rtol=0, atol=1e-14)


def test_a_negative_radius_is_refused() -> None:
    with pytest.raises(ValueError, match="smoothing must be >= 0"):
        Phase(3, smoothing=-1.0)


def test_nothing_to_shift_is_no_error() -> None:
    Shifts(torch.device("cpu")).place([], {}, 1.0)  # type: ignore[arg-type]
