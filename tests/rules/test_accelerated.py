"""The accelerated rule on given means, against its formulas; frozen and unfrozen parameters, groups, phases."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
import torch

import torch_dpsco as dp
from torch_dpsco.prox import Ball
from torch_dpsco.rules import Accelerated

PHASE = dp.Phase(None)


def parameters(*sizes: int) -> list[torch.nn.Parameter]:
    draw = torch.Generator().manual_seed(1)
    return [
        torch.nn.Parameter(torch.randn(size, generator=draw, dtype=torch.float64))
        for size in sizes
    ]


def moved(
    rule: Accelerated,
    groups: list,
    state: defaultdict,
    k: int,
    prox: Ball | None,
    phase: dp.Phase,
) -> None:
    with torch.no_grad():
        rule.update(groups, state, k, phase)
        if prox is not None:
            params = [p for group in groups for p in group["params"]]
            rule.constrain(prox, params, [0.0] * len(params), state)
        rule.settle(groups, state, k)


@pytest.mark.parametrize("radius", [None, 0.8])
@pytest.mark.parametrize("lr", [None, 0.3])
def test_queries_and_answers_are_those_of_the_formulas(
    radius: float | None, lr: float | None
) -> None:
    params = parameters(3, 2)
    groups = [{"params": [p], "lr": 0.1} for p in params]
    rule, state, prox = (
        Accelerated(),
        defaultdict(dict),
        None if radius is None else Ball(radius),
    )
    w = ag = np.concatenate([p.detach().numpy() for p in params])
    rng = np.random.default_rng(0)
    for t in range(1, 12):
        a, mean = 2 / (t + 1), rng.standard_normal(5)
        if t > 1:
            query = np.concatenate([p.detach().numpy() for p in params])
            np.testing.assert_allclose(query, (1 - a) * ag + a * w, atol=1e-12)
        for p, part in zip(params, np.split(mean, [3]), strict=True):
            p.grad = torch.from_numpy(part.copy())
        moved(rule, groups, state, t - 1, prox, dp.Phase(None, lr=lr))
        w = w - t * (lr or 0.1) * mean
        if radius is not None:
            w = w * min(1, radius / np.linalg.norm(w))
        ag = (1 - a) * ag + a * w
        np.testing.assert_allclose(
            np.concatenate([rule.answer(p, state).numpy() for p in params]), ag, atol=1e-12
        )
        assert radius is None or np.linalg.norm(ag) <= radius * (1 + 1e-12)


def test_before_the_first_step_the_answer_is_the_start_and_the_state_is_empty() -> None:
    (p,) = parameters(3)
    assert torch.equal(Accelerated().answer(p, defaultdict(dict)), p.detach())
    assert Accelerated().state_dict() == {}
    assert Accelerated().settings() == {"rule": "Accelerated", "average": "last"}


def test_a_new_phase_starts_anew_at_its_first_step() -> None:
    (p,) = parameters(2)
    groups, rule, state = [{"params": [p], "lr": 1.0}], Accelerated(), defaultdict(dict)
    p.grad = torch.ones_like(p)
    for k in range(3):
        moved(rule, groups, state, k, None, PHASE)
    with torch.no_grad():
        p.fill_(7.0)
    p.grad = torch.zeros_like(p)
    moved(rule, groups, state, 0, None, PHASE)
    assert rule.answer(p, state).tolist() == [7.0, 7.0]


def test_a_parameter_unfrozen_later_joins_where_it_stands() -> None:
    first, second = parameters(2, 2)
    second.requires_grad_(False)
    groups, rule, state = (
        [{"params": [first, second], "lr": 0.5}],
        Accelerated(),
        defaultdict(dict),
    )
    start = second.clone()
    first.grad = torch.ones_like(first)
    moved(rule, groups, state, 0, None, PHASE)
    assert torch.equal(second, start)
    assert second not in state
    second.requires_grad_(True)
    second.grad = torch.ones_like(second)
    moved(rule, groups, state, 1, None, PHASE)
    torch.testing.assert_close(state[second]["inner"], start - 2 * 0.5)
    torch.testing.assert_close(rule.answer(second, state), start - 2 / 3)


def test_a_group_of_frozen_parameters_is_left_alone() -> None:
    (p,) = parameters(2)
    p.requires_grad_(False)
    before = p.clone()
    moved(Accelerated(), [{"params": [p], "lr": 1.0}], defaultdict(dict), 0, None, PHASE)
    assert torch.equal(p, before)
