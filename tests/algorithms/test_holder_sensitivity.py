"""HolderOutputSGD with its noise off: how far one record moves the answer, and Algorithm 1 literally."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import torch_dpsco as dp
from tests.algorithms.output_runs import (
    BOUND_X,
    BOUND_Y,
    DELTA,
    HINGE,
    LOSSES,
    Order,
    Vector,
    answer,
)
from tests.streams import picks
from torch_dpsco.algorithms import holder_numbers as holder_stability
from torch_dpsco.algorithms.output_sgd_numbers import HIT_CONSTANTS
from torch_dpsco.errors import PrivacyError, UtilityWarning
from torch_dpsco.losses import PowerLoss

LARGE = 100.0  # epsilon of runs on a few records whose noise is off

# -- sensitivity ------------------------------------------------------------------------------------------------------


def neighbors(rng: np.random.Generator, n: int, dim: int, adjacency: str, harsh: bool) -> Any:
    """Returns two data sets that differ in record 0; harsh ones have nothing else that would pull them together."""
    x = rng.normal(size=(n, dim)) * rng.choice([0.3, 1.0, 1e3], (n, 1))
    y = np.where(rng.random(n) < 0.5, rng.choice([-9.0, 9.0], n), rng.uniform(-1, 1, n))
    if harsh:
        x[1:] = 0.0
        x[0], y[0] = 5.0 * x[0] / np.linalg.norm(x[0]), 9.0
    other = x.copy(), y.copy()
    if adjacency == "zero_out":
        other[0][0] = 0.0
    elif harsh or rng.random() < 0.5:
        other[1][0] = -y[0]
    else:
        other[0][0], other[1][0] = rng.normal(size=dim), -y[0]
    return (x, y), other


def attack(
    rng: np.random.Generator,
    loss: dp.losses.TableLoss,
    adjacency: str,
    bounded: bool,
    harsh: bool,
) -> float:
    """Returns the distance of two answers over the sensitivity of the plan, for one pair and shuffled batches."""
    n, dim, epochs = int(rng.integers(3, 9)), int(rng.integers(1, 4)), int(rng.integers(1, 4))
    batch = int(rng.integers(1, min(n - 1, 4) + 1))  # the last batch is often short
    bias = bool(adjacency == "replace_one" and not harsh and rng.random() < 0.3)
    radius = float(rng.choice([0.02, 0.1, 1.0])) if bounded else math.inf
    problem = loss.problem(
        bound_x=math.sqrt(2) if bias else BOUND_X, bound_y=BOUND_Y, radius=radius
    )
    steps = epochs * -(-n // batch)
    lr = (1e-3 if harsh else rng.choice([0.01, 0.2, 0.999])) / problem.holder_constant
    lrs = lr * (1 + np.arange(steps)) ** -float(rng.choice([0.0, 0.5]))
    plan = dp.HolderOutputSGD.plan(
        problem=problem,
        n=n,
        budget=dp.Budget(LARGE, DELTA, adjacency),
        dim=dim + bias,
        batch_size=batch,
        epochs=epochs,
        lr=lrs.tolist(),
    )
    seed = int(rng.integers(2**32))
    sources = [Order() if harsh else picks(seed) for _ in range(2)]
    pair = neighbors(rng, n, dim, adjacency, harsh)
    one, other = (answer(loss, plan, *run, bias=bias) for run in zip(pair, sources, strict=True))
    return float(np.linalg.norm(one - other)) / plan.sensitivity


def check_that_no_pair_exceeds_the_sensitivity(
    names: Any = LOSSES, pairs: int = 3
) -> dict[str, float]:
    """Returns the largest share of the sensitivity that some pair of a loss reaches."""
    worst: dict[str, float] = dict.fromkeys(names, 0.0)
    for name in names:
        rng = np.random.default_rng(sum(map(ord, name)))
        for adjacency in ("replace_one", "zero_out"):
            for bounded in (True, False):
                for k in range(2 * pairs):
                    share = attack(rng, LOSSES[name], adjacency, bounded, harsh=k % 2 == 0)
                    assert share <= 1.0, (name, adjacency, bounded, k)
                    worst[name] = max(worst[name], share)
    return worst


@pytest.mark.weekly
def test_no_pair_of_neighbors_moves_the_answer_by_more_than_the_sensitivity_and_some_by_nearly_as_much() -> (
    None
):
    worst = check_that_no_pair_exceeds_the_sensitivity()
    for name, share in worst.items():
        # At exponent 0 the sensitivity pays for kinks that these few steps do not meet; see the 400 kinks below.
        assert share > (
            0.5 if LOSSES[name].problem(bound_x=1.0).holder_exponent < 0.3 else 0.9
        ), (
            name,
            worst,
        )
    assert max(worst.values()) > 0.99


@pytest.mark.slow
def test_a_hit_constant_of_zero_out_for_replaced_records_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(HIT_CONSTANTS, "replace_one", 1.0)
    for name in LOSSES:
        with pytest.raises(AssertionError, match="replace_one"):
            check_that_no_pair_exceeds_the_sensitivity([name])


@pytest.mark.parametrize("share", [0.5, 0.9])
def test_a_gradient_bound_that_is_too_small_is_caught(
    share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound = dp.Problem.grad_bound
    monkeypatch.setattr(
        dp.Problem, "grad_bound", lambda self, radius=None: share * bound(self, radius)
    )
    with pytest.raises(AssertionError, match="hinge"):
        check_that_no_pair_exceeds_the_sensitivity(["hinge 1.5", "hinge 2.0"])


def check_that_400_kinks_stay_within_the_sensitivity() -> float:
    """|w.e_j| for 400 basis vectors: record 0, replaced by its negative, puts runs on both sides of every kink."""
    dim, lr, loss = 400, 0.01, PowerLoss(power=1.0)
    problem = loss.problem(bound_x=1.0, bound_y=0.5)
    x = np.vstack([np.full((1, dim), 1 / math.sqrt(dim)), np.eye(dim)])
    y = np.zeros(dim + 1)
    y[0] = 0.5
    plan = dp.HolderOutputSGD.plan(
        problem=problem,
        n=dim + 1,
        budget=dp.Budget(LARGE, DELTA),
        dim=dim,
        lr=lr,
        epochs=1,
        batch_size=1,
    )
    one, other = (answer(loss, plan, (x, labels), Order()) for labels in (y, y * -1.0))
    share = float(np.linalg.norm(one - other)) / plan.sensitivity
    assert share <= 1.0
    return share


@pytest.mark.slow
def test_the_drift_at_exponent_zero_is_real_and_forgetting_it_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert check_that_400_kinks_stay_within_the_sensitivity() > 0.7
    monkeypatch.setattr(
        holder_stability, "expansions", lambda alpha, constant, lr, glm=False: np.zeros_like(lr)
    )
    with pytest.raises(AssertionError):
        check_that_400_kinks_stay_within_the_sensitivity()


def check_that_a_hit_at_the_boundary_stays_within_the_sensitivity(name: str) -> float:
    """The first record pushes to the boundary, where the second has its largest gradient; the others have none."""
    n, radius, loss = 100, 0.1, LOSSES[name]
    problem = loss.problem(bound_x=1.0, bound_y=1.0, radius=radius)
    x, y = np.zeros((n, 1)), np.ones(n)
    x[:2], y[1] = 1.0, -1.0
    zeroed = x.copy()
    zeroed[1] = 0.0
    push = problem.grad_at_zero
    plan = dp.HolderOutputSGD.plan(
        problem=problem,
        n=n,
        budget=dp.Budget(LARGE, DELTA, "zero_out"),
        dim=1,
        lr=1.001 * radius / push,
        epochs=1,
    )
    one, other = (answer(loss, plan, (features, y), Order()) for features in (x, zeroed))
    share = float(np.linalg.norm(one - other)) / plan.sensitivity
    assert share <= 1.0
    return share


@pytest.mark.slow
def test_a_gradient_bound_inside_the_ball_instead_of_at_its_boundary_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ["hinge 2.0", "power 2.0"]
    assert all(
        check_that_a_hit_at_the_boundary_stays_within_the_sensitivity(name) > 0.98
        for name in names
    )
    bound = dp.Problem.grad_bound
    monkeypatch.setattr(
        dp.Problem, "grad_bound", lambda self, radius=None: bound(self, radius and radius / 2)
    )
    for name in names:
        with pytest.raises(
            (AssertionError, PrivacyError)
        ):  # by the records, or by the step itself
            check_that_a_hit_at_the_boundary_stays_within_the_sensitivity(name)


class Spy(Dataset):
    """Records that note who asked for them."""

    def __init__(self, features: Vector, labels: Vector) -> None:
        self.features, self.labels, self.asked = features, labels, []

    def __len__(self) -> int:
        return len(self.features)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.asked.append(index)
        return torch.from_numpy(self.features[index]), torch.tensor(
            [self.labels[index]], dtype=torch.float64
        )


# -- Algorithm 1, literally -------------------------------------------------------------------------------------------


def slope_of_hinge(q: float) -> Callable[[float, float], float]:
    return lambda s, y: -y * q * (1 - y * s) ** (q - 1) if y * s < 1 else 0.0


def slope_of_power(q: float) -> Callable[[float, float], float]:
    return lambda s, y: -q * np.sign(y - s) * abs(y - s) ** (q - 1) if y != s else 0.0


SLOPES: dict[str, Callable[[float, float], float]] = {
    "hinge 1.0": slope_of_hinge(1.0),
    "hinge 1.5": slope_of_hinge(1.5),
    "power 1.2": slope_of_power(1.2),
    "logistic": lambda s, y: -y / (1 + math.exp(y * s)),
    "pinball 0.9": lambda s, y: -0.9 if y > s else 0.1 if y < s else 0.0,
    "huber": lambda s, y: -max(-0.3, min(0.3, y - s)),
}


@pytest.mark.cases(5, 2)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("bounded", [True, False])
@pytest.mark.parametrize("name", SLOPES)
def test_every_step_and_the_answer_are_those_of_algorithm_1(
    name: str, bounded: bool, reduction: str
) -> None:
    n, dim, nominal, loss, slope = 11, 3, 4, LOSSES[name], SLOPES[name]
    problem = loss.problem(bound_x=2.0, bound_y=BOUND_Y, radius=0.2 if bounded else math.inf)
    rng = np.random.default_rng(2)
    x = rng.normal(size=(n, dim))
    x *= 1.5 / np.linalg.norm(
        x, axis=1, keepdims=True
    )  # inside of the bounds, with the ones of the bias
    y = rng.choice([-1.0, 1.0], n) * (1.0 if name[0] in "hl" and name != "huber" else BOUND_Y)
    model = nn.Linear(dim, 1).double()
    plan = dp.HolderOutputSGD.plan(
        problem=problem,
        n=n,
        budget=dp.Budget(LARGE, DELTA),
        dim=dim + 1,
        batch_size=nominal,
        epochs=3,
        lr=0.9 / problem.holder_constant,
    )
    opt = dp.HolderOutputSGD(
        model.parameters(),
        replace(plan, noise_scale=0.0),
        loss_reduction=reduction,
        accountant=dp.Accountant(),
    )
    data, w, total, outside = Spy(x, y), np.zeros(dim + 1), np.zeros(dim + 1), 0
    for features, labels in opt.loader(data):
        np.testing.assert_allclose(
            np.append(model.weight.detach(), model.bias.detach()), w, rtol=0, atol=1e-13
        )
        total += w  # w_t, before its update
        batch, data.asked = data.asked, []
        gradient = sum(
            slope(float(w[:dim] @ x[i] + w[dim]), y[i]) * np.append(x[i], 1.0) for i in batch
        )
        w = w - plan.lr / nominal * gradient
        if bounded and np.linalg.norm(w) > 0.2:
            w, outside = w * (0.2 / np.linalg.norm(w)), outside + 1
        loss(model(features), labels, reduction=reduction).backward()
        opt.step()
    assert opt.steps == plan.steps == 9
    assert bool(outside) == bounded
    opt.finalize()
    released = np.append(model.weight.detach(), model.bias.detach())
    np.testing.assert_allclose(released, total / 9, rtol=0, atol=1e-13)
    assert np.linalg.norm(released) > 1e-3


def test_the_answer_is_projected_after_its_noise() -> None:
    radius, inside = 0.05, 0
    problem = HINGE.problem(bound_x=1.0, radius=radius)
    with pytest.warns(UtilityWarning, match="noise buries the signal: the answer"):
        plan = dp.HolderOutputSGD.plan(
            problem=problem,
            n=4,
            dim=3,
            budget=dp.Budget(0.5, DELTA, "replace_one"),
            batch_size=2,
        )
    for seed in range(20):
        model = nn.Linear(3, 1, bias=False).double()
        with pytest.warns(UtilityWarning, match="repeatable"):
            opt = dp.HolderOutputSGD(
                model.parameters(), plan, generator=torch.Generator().manual_seed(seed)
            )
        with opt:
            for x, y in opt.loader(TensorDataset(torch.ones(4, 3), torch.ones(4, 1))):
                HINGE(model(x), y).backward()
                opt.step()
        norm = float(model.weight.detach().norm())
        assert norm <= radius
        inside += norm < radius * (1 - 1e-12)
    assert opt.noise_std > radius / 2
    assert inside < 20
