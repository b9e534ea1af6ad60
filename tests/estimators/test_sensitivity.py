"""How far one record moves the exact minimizer, against what the noise is for: adversarial neighbors, noise off."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from torch import Tensor

import torch_dpsco as dp
from torch_dpsco.estimators.output import plan_output
from torch_dpsco.estimators.preparation import Preparation
from torch_dpsco.estimators.solvers import solve
from torch_dpsco.estimators.task import LinearTask, build_objective, make_records

BOUND, TARGET = 1.5, 2.0
ODD = 7.25  # neither a sign nor a bounded target
NAN, INF = math.nan, math.inf
ROWS = (
    (BOUND, 0.0),
    (-BOUND, 0.0),
    (0.0, BOUND),
    (0.3, -0.4),
    (1e308, -1e308),
    (BOUND * (1 + 1e-12), -BOUND),
    (NAN, 1.0),
    (-INF, INF),
)
LABELS = {
    "sign": (1.0, -1.0, ODD, NAN),
    "real": (TARGET, -INF, 0.1, NAN),
    "class": (0, 1, 2, -9),
}
PLAIN = Preparation(BOUND)
PREPARED = Preparation(BOUND, center=(0.2, -0.1), scale=(0.5, 3.0), intercept=0.7)
# name: (settings, share of the bound that is attained at least under replace_one and add_remove)
LOSSES: dict[str, tuple[dict[str, object], float]] = {
    "logistic": ({"loss": dp.losses.Logistic()}, 0.49),
    "clipped logistic": ({"loss": dp.losses.Logistic(), "residual_clip": 0.3}, 0.99),
    "smoothed hinge": ({"loss": dp.losses.SmoothedHinge(0.5)}, 0.99),
    "clipped squared hinge": ({"loss": dp.losses.Hinge(power=2.0), "residual_clip": 0.9}, 0.99),
    "hinge": ({"loss": dp.losses.Hinge()}, 0.99),
    "huber": ({"loss": dp.losses.Huber(0.8), "bound_y": TARGET}, 0.99),
    "clipped squared": (
        {"loss": dp.losses.Squared(), "bound_y": TARGET, "residual_clip": 0.5},
        0.99,
    ),
    "pinball": ({"loss": dp.losses.Pinball(0.8), "bound_y": TARGET}, 0.6),
    "squared": ({"loss": dp.losses.Squared(), "bound_y": TARGET}, 0.6),
    "squared on a ball": ({"loss": dp.losses.Squared(), "bound_y": TARGET, "radius": 0.4}, 0.6),
    "softmax": ({"loss": dp.losses.SoftmaxCrossEntropy(3)}, 0.5),
    "tilted up": ({"loss": dp.losses.Logistic(), "tilt": 0.5, "n_min": 3}, 0.4),
    "tilted down": (
        {"loss": dp.losses.Huber(0.5), "bound_y": TARGET, "tilt": -0.1, "n_min": 3},
        0.9,
    ),
    "attacked": ({"loss": dp.losses.Logistic(), "attack_radius": 0.4}, 0.45),
    "attacked hinge": ({"loss": dp.losses.SmoothedHinge(1.0), "attack_radius": 0.08}, 0.85),
    "attacked far": ({"loss": dp.losses.SmoothedHinge(1.0), "attack_radius": 1.6}, 0.02),
    "attacked everywhere": (
        {"loss": dp.losses.Logistic(), "attack_radius": 0.4, "attack_norm": math.inf},
        0.4,
    ),
    "attacked in one feature": (
        {"loss": dp.losses.Logistic(), "attack_radius": 0.4, "attack_scale": (1.0, 0.0)},
        0.45,
    ),
    "attacked in a box": (
        {
            "loss": dp.losses.Logistic(),
            "attack_radius": 0.4,
            "attack_norm": math.inf,
            "attack_scale": (0.2, 3.0),
        },
        0.4,
    ),
}


def task_of(name: str, adjacency: str, reg: float, preparation: Preparation) -> LinearTask:
    budget = dp.Budget(1.0, 1e-6, adjacency=adjacency)
    return LinearTask(
        preparation=preparation, dim=2, n=4, n_max=4, budget=budget, reg=reg, **LOSSES[name][0]
    )


def base_set(kind: str, one_way: bool) -> tuple[Tensor, Tensor]:
    """Three records that pull one way, or both ways."""
    labels = torch.tensor(LABELS[kind][:3])
    if one_way:
        return torch.tensor([[BOUND, 0.0]], dtype=torch.float64).expand(3, 2), labels[:1].expand(
            3
        )
    return torch.tensor([[9.0, 1.0], [-0.7, 0.2], [0.1, -30.0]], dtype=torch.float64), labels


def minimizer(
    task: LinearTask, reg: float, features: Tensor, targets: Tensor, distance: float
) -> Tensor:
    objective = build_objective(task, reg, make_records(task, features, targets))
    return solve(objective, distance, radius=task.radius).w


def largest_share(
    name: str, adjacency: str, reg: float, preparation: Preparation, one_way: bool
) -> float:
    """Largest distance of the minimizers of neighbors over the planned one: 496 pairs, or 32 of add_remove."""
    plan = plan_output(task_of(name, adjacency, reg, preparation))
    task = plan.task  # whose loss is smooth
    accuracy, kind = plan.distance / 10, task.loss.target_kind
    features, targets = base_set(kind, one_way)
    found = []
    for row, label in product(ROWS, LABELS[kind]):
        joined = torch.cat([features, torch.tensor([row], dtype=torch.float64)])
        labels = torch.cat([targets, torch.tensor([label], dtype=targets.dtype)])
        found.append(minimizer(task, reg, joined, labels, accuracy))
    points = torch.stack(found)
    neighbors = points  # one replaced by another
    if adjacency == "zero_out":
        neighbors = points[-1:]  # by a null record
    elif adjacency == "add_remove":
        neighbors = minimizer(task, reg, features, targets, accuracy)[None]
    return (float(torch.cdist(points, neighbors).max()) - 2 * accuracy) / plan.sensitivity


SETTINGS = [("replace_one", PLAIN), ("add_remove", PREPARED), ("zero_out", PLAIN)]


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize(
    ("adjacency", "preparation"), SETTINGS, ids=[name for name, _ in SETTINGS]
)
@pytest.mark.parametrize("name", LOSSES)
def test_no_record_moves_the_minimizer_further_than_planned(
    name: str, adjacency: str, preparation: Preparation
) -> None:
    strong = largest_share(name, adjacency, 50.0, preparation, True)
    assert strong <= 1
    if adjacency != "zero_out":
        assert strong >= LOSSES[name][1]  # a bound much smaller would be caught
        assert (
            largest_share(name, adjacency, 3.0 if "tilted" in name else 0.4, preparation, False)
            <= 1
        )
