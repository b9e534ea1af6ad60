"""The anchored rule on given means: steps, phases, copies."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import torch

import torch_dpsco as dp
from torch_dpsco.prox import Identity
from torch_dpsco.rules import Anchored


class Walk:
    """Two parameters, the second in a group of its own, moved by given means through given phases."""

    def __init__(self, phases: list[dp.Phase], prox: Any = None) -> None:
        self.params = [
            torch.nn.Parameter(torch.tensor(v, dtype=torch.float64))
            for v in ([0.3, -0.2], [0.1])
        ]
        self.groups = [{"params": [p], "lr": 1.0} for p in self.params]
        self.rule, self.state, self.phases, self.prox = (
            Anchored(),
            defaultdict(dict),
            phases,
            prox or Identity(),
        )

    @property
    def point(self) -> np.ndarray:
        return np.concatenate([p.detach().numpy() for p in self.params])

    def go(self, means: np.ndarray) -> list[np.ndarray]:
        """Returns the points after each step."""
        points, means = [], iter(means)
        for phase in self.phases:
            for k in range(phase.steps):
                for p, part in zip(self.params, np.split(next(means), [2]), strict=True):
                    p.grad = torch.from_numpy(part.copy())
                with torch.no_grad():
                    self.rule.update(self.groups, self.state, k, phase)
                    self.rule.constrain(self.prox, self.params, [0.0, 0.0], self.state)
                    points.append(self.point)
                    if k + 1 == phase.steps:
                        self.rule.end_phase(self.groups, self.state, phase)
        return points


def test_a_step_is_a_subgradient_step_on_the_regularized_loss() -> None:
    walk = Walk([dp.Phase(5, reg=2.0), dp.Phase(3, reg=16.0)])
    means = np.random.default_rng(0).standard_normal((8, 3))
    start = w = c = walk.point
    points, k = walk.go(means), 0
    for reg, steps in ((2.0, 5), (16.0, 3)):
        for t in range(steps):
            w = w - (means[k] + reg * (w - c)) / (reg * (t + 1))
            np.testing.assert_allclose(points[k], w, atol=1e-12)
            k += 1
        c = w
    np.testing.assert_allclose(points[0], start - means[0] / 2.0, atol=1e-12)


def test_a_constant_rate_of_the_phase_is_taken() -> None:
    walk = Walk([dp.Phase(4, lr=0.05, reg=2.0)])
    means = np.random.default_rng(2).standard_normal((4, 3))
    w = c = walk.point
    for k, point in enumerate(walk.go(means)):
        w = w - 0.05 * (means[k] + 2.0 * (w - c))
        np.testing.assert_allclose(point, w, atol=1e-12)


def test_a_huge_lambda_neither_overflows_nor_moves() -> None:
    walk = Walk([dp.Phase(3, reg=1e300), dp.Phase(3, reg=1e300)])
    start = walk.point
    walk.go(np.random.default_rng(4).standard_normal((6, 3)))
    np.testing.assert_allclose(walk.point, start, atol=1e-12)


def test_a_parameter_unfrozen_later_is_anchored_where_it_stands() -> None:
    walk = Walk([dp.Phase(1, reg=1.0)])
    walk.params[1].requires_grad_(False)
    frozen = walk.params[1].clone()
    walk.go(np.ones((1, 3)))
    assert torch.equal(walk.params[1], frozen)
    walk.params[1].requires_grad_(True)
    with torch.no_grad():
        for p in walk.params:
            p.grad = torch.zeros_like(p)
        walk.rule.update(walk.groups, walk.state, 1, dp.Phase(2, reg=1.0))
    assert torch.equal(walk.state[walk.params[1]]["anchor"], frozen)


def test_before_the_first_step_the_answer_is_the_start() -> None:
    walk = Walk([dp.Phase(1)])
    assert torch.equal(walk.rule.answer(walk.params[0], walk.state), walk.params[0].detach())
    assert (walk.rule.settings(), walk.rule.state_dict()) == (
        {"rule": "Anchored", "average": "last"},
        {},
    )
