"""Our methods for benchmarks/accuracy.py: by default, with what is public about a table and nothing else."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from anchors import DELTA
from table_parts import Array, Table
from tables import with_bias
from torch import nn
from torch.utils.data import TensorDataset

import torch_dpsco as dp
from torch_dpsco.estimators import HuberRegressor, LogisticRegression, QuantileRegressor, Ridge

Fit = Callable[[Table, float], Array]  # answers on the test rows


@dataclasses.dataclass(frozen=True)
class Method:
    """A way to fit, with the scores that it is meant for.

    Attributes:
        family: which goal counts it: "estimator", "fit", "clipped", "user"; "" for none.
    """

    name: str
    family: str
    aims: tuple[str, ...]
    fit: Fit
    users: bool = False


# -- estimators -------------------------------------------------------------------------------------------------------


def public_arguments(table: Table, epsilon: float) -> dict[str, object]:
    """Returns what a user of an estimator states."""
    common = {
        "epsilon": epsilon,
        "delta": DELTA,
        "adjacency": "add_remove",
        "n": int((~table.test).sum()),
        "bound_x": table.bound_x,
    }
    return common | (
        {"classes": (0.0, 1.0)} if table.kind == "binary" else {"bound_y": table.bound_y}
    )


def by_estimator(kind: type, **options: object) -> Fit:
    """Returns an estimator by default, but for what is named."""

    def fit(table: Table, epsilon: float) -> Array:
        train = ~table.test
        settings = public_arguments(table, epsilon) | options
        groups = {}
        if table.users is not None:
            settings["n"], groups = n_users(table), {"groups": table.users[train]}
        model = kind(**settings).fit(table.rows[train], table.targets[train], **groups)
        answer = model.decision_function if table.kind == "binary" else model.predict
        return np.asarray(answer(table.rows[table.test]))

    return fit


def huber_at_threshold(table: Table, epsilon: float) -> Array:
    """Huber's loss at the table's threshold: the user says which loss counts."""
    return by_estimator(HuberRegressor, threshold=table.threshold)(table, epsilon)


def n_users(table: Table) -> int:
    """Returns how many users have training rows."""
    return len(np.unique(table.users[~table.test]))


# -- optimizers -------------------------------------------------------------------------------------------------------


def loss_of(table: Table, name: str) -> dp.losses.Loss:
    """Returns a loss of the library; targets of the logistic loss are -1 and 1."""
    if name == "logistic":
        return dp.losses.Logistic()
    return (
        dp.losses.Pinball(quantile=0.5)
        if name == "pinball"
        else dp.losses.Huber(threshold=table.threshold)
    )


Build = Callable[[Table, dp.losses.Loss, nn.Linear, dp.Budget], dp.PrivateOptimizer]


def by_fit(build: Build, loss_name: str, adjacency: str = "add_remove") -> Fit:
    """Returns `fit` of a linear model that starts at 0, with a bias."""

    def fit(table: Table, epsilon: float) -> Array:
        train, loss = ~table.test, loss_of(table, loss_name)
        model = nn.Linear(table.rows.shape[1], 1)
        for p in model.parameters():
            nn.init.zeros_(p)
        targets = 2 * table.targets - 1 if loss_name == "logistic" else table.targets
        dataset = TensorDataset(
            *(torch.from_numpy(v).float() for v in (table.rows[train], targets[train, None]))
        )
        given: dict[str, object] = {}
        if table.users is not None:
            given = {
                "users": torch.from_numpy(np.unique(table.users[train], return_inverse=True)[1])
            }
        unit = "example" if table.users is None else "user"
        budget = dp.Budget(epsilon, DELTA, adjacency=adjacency, unit=unit)
        optimizer = build(table, loss, model, budget)
        dp.fit(model, optimizer, dataset, loss, progress=False, **given)
        weights = torch.cat(
            [p.detach().double().reshape(-1) for p in (model.weight, model.bias)]
        ).numpy()
        return with_bias(table.rows[table.test]) @ weights

    return fit


def holder(
    table: Table, loss: dp.losses.Loss, model: nn.Linear, budget: dp.Budget, **given: str
) -> dp.PrivateOptimizer:
    """HolderSGD by default, but for what is named; a loss with a kink needs a guess of how far the answer is."""
    problem = loss.problem(bound_x=math.hypot(table.bound_x, 1.0), bound_y=table.bound_y or 1.0)
    scale = {} if problem.smoothness else {"distance": table.bound_y}
    n = int((~table.test).sum())
    plan = dp.HolderSGD.plan(problem=problem, n=n, budget=budget, dim=model, **scale, **given)
    return dp.HolderSGD(model.parameters(), plan)


def clipped(
    table: Table, loss: dp.losses.Loss, model: nn.Linear, budget: dp.Budget
) -> dp.PrivateOptimizer:
    """ClippedSGD as docs/choosing.md recommends it for heavy tails: full batches, the clip from a pilot."""
    problem = dp.Problem(smoothness=table.bound_x**2 + 1)  # of Huber's loss
    n = int((~table.test).sum())
    plan = dp.ClippedSGD.plan(
        problem=problem, n=n, budget=budget, sampling="full", clip=dp.Pilot(), dim=model
    )
    return dp.ClippedSGD(model.parameters(), plan)


def user_clipped(**numbers: object) -> Build:
    """UserClippedSGD, which knows the number of users, and what is given."""

    def build(
        table: Table, loss: dp.losses.Loss, model: nn.Linear, budget: dp.Budget
    ) -> dp.PrivateOptimizer:
        plan = dp.UserClippedSGD.plan(n=n_users(table), budget=budget, **numbers)
        return dp.UserClippedSGD(model.parameters(), plan)

    return build


def user_bounded(
    table: Table, loss: dp.losses.Loss, model: nn.Linear, budget: dp.Budget
) -> dp.PrivateOptimizer:
    """UserClippedSGD, which knows the bound on rows too, and so measures where they lie."""
    return user_clipped(bound_x=table.bound_x, dim=model)(table, loss, model, budget)


SNIPPET = {"clip": 0.2, "lr": 1.0, "steps": 30}  # of docs/user_level.md
CHANCES, ERRORS = ("auc", "log_loss"), ("mae", "huber")
METHODS = (
    Method("LogisticRegression", "estimator", CHANCES, by_estimator(LogisticRegression)),
    Method("QuantileRegressor", "estimator", ("mae",), by_estimator(QuantileRegressor)),
    Method(
        "HuberRegressor, threshold of the table", "estimator", ("huber",), huber_at_threshold
    ),
    Method(
        'HuberRegressor, threshold="auto"',
        "",
        ("mae",),
        by_estimator(HuberRegressor, threshold="auto"),
    ),
    Method("Ridge", "", ERRORS, by_estimator(Ridge)),
    Method(
        "HolderSGD, logistic, prepared",
        "fit",
        CHANCES,
        by_fit(partial(holder, prepare="auto"), "logistic"),
    ),
    Method("HolderSGD, logistic", "", CHANCES, by_fit(holder, "logistic")),
    Method("HolderSGD, pinball", "fit", ("mae",), by_fit(holder, "pinball")),
    Method(
        "HolderSGD, Huber, prepared",
        "fit",
        ("huber",),
        by_fit(partial(holder, prepare="auto"), "huber"),
    ),
    Method("HolderSGD, Huber", "", ("huber",), by_fit(holder, "huber")),
    Method(
        "HolderSGD, logistic, one secret pass",
        "",
        CHANCES,
        by_fit(partial(holder, sampling="assigned"), "logistic"),
    ),
    Method(
        "HolderSGD, Huber, one secret pass",
        "",
        ("huber",),
        by_fit(partial(holder, sampling="assigned"), "huber"),
    ),
    Method(
        "HolderSGD, logistic, secret passes",
        "",
        CHANCES,
        by_fit(partial(holder, sampling="allocated"), "logistic"),
    ),
    Method(
        "HolderSGD, Huber, secret passes",
        "",
        ("huber",),
        by_fit(partial(holder, sampling="allocated"), "huber"),
    ),
    Method("ClippedSGD with a pilot", "clipped", ERRORS, by_fit(clipped, "huber")),
    Method(
        "ClippedSGD with a pilot, replace_one",
        "clipped",
        ERRORS,
        by_fit(clipped, "huber", "replace_one"),
    ),
    Method(
        "UserClippedSGD, logistic",
        "user",
        CHANCES,
        by_fit(user_bounded, "logistic"),
        users=True,
    ),
    Method(
        "UserClippedSGD, logistic, raw rows",
        "",
        CHANCES,
        by_fit(user_clipped(), "logistic"),
        users=True,
    ),
    Method(
        "UserClippedSGD, pinball",
        "user",
        ("mae",),
        by_fit(user_clipped(), "pinball"),
        users=True,
    ),
    Method(
        "UserClippedSGD, Huber",
        "user",
        ("huber",),
        by_fit(user_clipped(), "huber"),
        users=True,
    ),
    Method(
        "UserClippedSGD, logistic, clip 0.2",
        "",
        CHANCES,
        by_fit(user_clipped(**SNIPPET), "logistic"),
        users=True,
    ),
    Method(
        "UserClippedSGD, Huber, clip 0.2",
        "",
        ERRORS,
        by_fit(user_clipped(**SNIPPET), "huber"),
        users=True,
    ),
    Method(
        "LogisticRegression, groups",
        "user estimator",
        CHANCES,
        by_estimator(LogisticRegression),
        users=True,
    ),
    Method(
        "QuantileRegressor, groups",
        "user estimator",
        ("mae",),
        by_estimator(QuantileRegressor),
        users=True,
    ),
    Method(
        "HuberRegressor, groups", "user estimator", ("huber",), huber_at_threshold, users=True
    ),
)


def methods_of(table: Table) -> list[Method]:
    """Returns the methods for a table of its kind, with or without users."""
    aims = CHANCES if table.kind == "binary" else ERRORS
    return [m for m in METHODS if m.users == (table.users is not None) and m.aims[0] in aims]
