"""A delta of 1/n and more is said wherever a budget meets a public number of records or users."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import torch_dpsco as dp
from torch_dpsco import estimators, losses
from torch_dpsco.errors import UtilityWarning
from torch_dpsco.estimators import Number
from torch_dpsco.integrations.opacus import PrivacyEngine
from torch_dpsco.show.cli import main
from torch_dpsco.statistics.prepare import PrivateStandardScaler
from torch_dpsco.statistics.search import PrivateSearch
from torch_dpsco.statistics.study import plan_study

N, DIM = 1000, 3
LOGISTIC = losses.Logistic()
PROBLEM = LOGISTIC.problem(bound_x=2.0)
BALL = LOGISTIC.problem(bound_x=2.0, radius=2.0)
LIPSCHITZ = dp.Problem(lipschitz=1.0, radius=1.0)
ROWS = {"clip": 1.0, "lr": 0.1, "batch_size": 100, "epochs": 2}


def linear() -> torch.nn.Linear:
    return torch.nn.Linear(DIM, 1)


def records() -> TensorDataset:
    return TensorDataset(torch.rand(N, DIM), torch.ones(N, 1))


def people(delta: float) -> dp.Budget:
    return dp.Budget(4.0, delta, unit="user")


def solved(cls: Any) -> Callable[[float], Any]:
    return lambda delta: cls.plan(
        model=linear(), loss=LOGISTIC, n=N, budget=dp.Budget(1.0, delta), bound_x=2.0
    )


PLANS: dict[str, Callable[[float], Any]] = {
    "HolderSGD": lambda delta: dp.HolderSGD.plan(
        problem=PROBLEM, n=N, budget=dp.Budget(1.0, delta)
    ),
    "ClippedSGD": lambda delta: dp.ClippedSGD.plan(n=N, budget=dp.Budget(1.0, delta), **ROWS),
    "AcceleratedSGD": lambda delta: dp.AcceleratedSGD.plan(
        n=N, budget=dp.Budget(1.0, delta), clip=1.0, lr=0.1, steps=4, sampling="shuffled"
    ),
    "ProximalSGD": lambda delta: dp.ProximalSGD.plan(
        n=N, budget=dp.Budget(1.0, delta), clip=1.0, lr=0.1, steps=4
    ),
    "LocalizedSGD": lambda delta: dp.LocalizedSGD.plan(
        n=N, budget=dp.Budget(1.0, delta), clip=1.0, reg=0.1, max_steps=3, dim=DIM, min_phase=100
    ),
    "CorrelatedSGD": lambda delta: dp.CorrelatedSGD.plan(
        n=N, budget=dp.Budget(1.0, delta), **ROWS
    ),
    "NetSGD": lambda delta: dp.NetSGD.plan(n=N, budget=dp.Budget(1.0, delta), dim=DIM),
    "HolderOutputSGD": lambda delta: dp.HolderOutputSGD.plan(
        problem=BALL, n=N, dim=DIM, budget=dp.Budget(1.0, delta), batch_size=100, epochs=1
    ),
    "BoltOnPSGD": lambda delta: dp.BoltOnPSGD.plan(
        problem=PROBLEM, n=N, dim=DIM, budget=dp.Budget(1.0, delta), batch_size=100, reg=0.1
    ),
    "UserClippedSGD": lambda delta: dp.UserClippedSGD.plan(n=N, budget=people(delta), **ROWS),
    "UserFilteredSGD": lambda delta: dp.UserFilteredSGD.plan(
        n=N, budget=people(delta), pair_radius=1.0, steps=3, lr=0.1
    ),
    "LocalizedUserSGD": lambda delta: dp.LocalizedUserSGD.plan(
        n=N,
        budget=people(delta),
        problem=LIPSCHITZ,
        reg=0.5,
        pair_radius=1.0,
        max_steps=2,
        dim=DIM,
    ),
    "NoisyGD": solved(dp.NoisyGD),
    "ObjectivePerturbation": solved(dp.ObjectivePerturbation),
    "OutputPerturbation": solved(dp.OutputPerturbation),
}

TWO = {"classes": (0, 1)}
CLASSES: dict[str, dict[str, Any]] = {
    "AdversarialClassifier": TWO | {"attack_radius": 0.1},
    "HuberRegressor": {"bound_y": 1.0},
    "Lasso": {"bound_y": 1.0},
    "LinearSVC": TWO,
    "LogisticRegression": TWO,
    "QuantileRegressor": {"bound_y": 1.0},
    "Ridge": {"bound_y": 1.0},
    "SoftmaxRegression": {"classes": (0, 1, 2)},
    "TiltedClassifier": TWO | {"n_min": 900},
}


def model(name: str, delta: float) -> Any:
    return getattr(estimators, name)(epsilon=1.0, delta=delta, n=N, bound_x=2.0, **CLASSES[name])


def pilot(delta: float) -> Any:
    return dp.ClippedSGD.plan(
        n=N, budget=dp.Budget(1.0, delta), **ROWS | {"clip": dp.Pilot(size=200)}, dim=DIM
    )


def own_optimizer(delta: float) -> Any:
    return dp.PrivateOptimizer(
        dp.attach(linear()).parameters(),
        0.1,
        oracle=dp.oracles.Clipped(1.0, 1000.0, 100),
        rule=dp.rules.SGD(),
        design=dp.Poisson(100, N),
        accountant=dp.Accountant(dp.Budget(1.0, delta)),
    )


def made_private(delta: float) -> Any:
    net, budget = linear(), dp.Budget(1.0, delta)
    torch_optimizer, loader = (
        torch.optim.SGD(net.parameters(), lr=0.1),
        DataLoader(records(), batch_size=100),
    )
    return dp.make_private(net, torch_optimizer, loader, problem=PROBLEM, budget=budget, n=N)


def opacus(delta: float) -> Any:
    net = linear()
    return PrivacyEngine().make_private_with_epsilon(
        module=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        data_loader=DataLoader(records(), batch_size=100),
        epochs=2,
        target_epsilon=1.0,
        target_delta=delta,
        max_grad_norm=1.0,
        n=N,
    )


SCHEMA = dp.Schema({"a": Number(0, 1), "b": Number(0, 1)}, target="t", labels=[0, 1])


class Always:
    """Says the first label."""

    classes_ = (0, 1)

    def predict(self, X: Any) -> Any:
        return np.zeros(len(X), dtype=int)


def scored(delta: float) -> Any:
    return dp.score(
        Always(),
        np.zeros((N, 1)),
        np.zeros(N, dtype=int),
        budget=dp.Budget(1.0, delta),
        metric="accuracy",
    )


def scaled(delta: float, adjacency: str = "replace_one") -> Any:
    return PrivateStandardScaler(lower=0.0, upper=1.0, delta=delta, adjacency=adjacency).fit(
        np.zeros((N, DIM))
    )


def searched(delta: float) -> Any:
    given = {"epsilon": 4.0, "delta": delta, "n": N, "metric": "absolute_error", "bound": 2.0}
    return PrivateSearch(candidates={"one": model("Ridge", 1e-6)}, **given).plan(DIM)


def command(delta: float) -> Any:
    ours = ["--n", str(N), "--clip", "1", "--lr", "0.1", "--epochs", "2", "--batch-size", "100"]
    return main(["plan", "ClippedSGD", *ours, "--epsilon", "1", "--delta", str(delta)])


DOORS: dict[str, Callable[[float], Any]] = {
    **{f"{name}.plan": make for name, make in PLANS.items()},
    **{name: (lambda delta, name=name: model(name, delta).plan(DIM)) for name in CLASSES},
    "fit": lambda delta: model("LogisticRegression", delta).fit(
        np.zeros((N, DIM)), np.arange(N) % 2
    ),
    "fit of users": lambda delta: model("HuberRegressor", delta).plan(DIM, unit="user"),
    "pilot": pilot,
    "PrivateOptimizer": own_optimizer,
    "make_private": made_private,
    "the face of Opacus": opacus,
    "study": lambda delta: plan_study(SCHEMA, dp.Budget(1.0, delta), n=N),
    "search": searched,
    "score": scored,
    "transformer": scaled,
    "the command line": command,
}


def test_no_class_with_a_plan_and_no_model_is_missing() -> None:
    classes = {
        name
        for name in dp.__all__
        if inspect.isclass(getattr(dp, name)) and hasattr(getattr(dp, name), "plan")
    }
    assert PLANS.keys() == classes - {"Pilot"}
    assert CLASSES.keys() == set(estimators.__all__)


@pytest.mark.parametrize("name", DOORS)
def test_a_delta_that_allows_to_publish_records_is_said_at_every_door(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        DOORS[name](10 / N)
    words = [
        str(warning.message) for warning in told if issubclass(warning.category, UtilityWarning)
    ]
    words += [
        line.removeprefix("warning: ") for line in capsys.readouterr().err.splitlines()
    ]  # of the command line
    unit = "user" if "User" in name or "users" in name else "example"
    said = f"delta must be far below 1/n=0.001 (got 0.01): publishing 10 of the 1000 {unit}s in the open"
    assert any(word.startswith(said) for word in words)


@pytest.mark.parametrize(
    "name", ["ClippedSGD.plan", "UserClippedSGD.plan", "LogisticRegression", "study"]
)
def test_a_delta_below_it_and_a_budget_of_a_risk_say_nothing(
    name: str, recwarn: pytest.WarningsRecorder
) -> None:
    DOORS[name](0.9 / N)
    dp.ClippedSGD.plan(n=5, budget=dp.Budget(advantage=0.3), **ROWS | {"batch_size": 2})
    assert not [warning for warning in recwarn if "1/n" in str(warning.message)]


def test_the_number_of_scored_records_is_not_told_under_add_remove(
    recwarn: pytest.WarningsRecorder,
) -> None:
    budget = dp.Budget(1.0, 0.1, "add_remove")
    dp.score(
        Always(), np.zeros((N, 1)), np.zeros(N, dtype=int), budget=budget, metric="accuracy"
    )
    scaled(0.1, "add_remove")
    assert not [
        warning for warning in recwarn if str(N) in str(warning.message)
    ]  # it is private there


@pytest.mark.parametrize(("n", "records"), [(49, 1), (10_000, 3), (3, 2)])
def test_how_many_records_may_be_published_is_counted_exactly(n: int, records: int) -> None:
    with pytest.warns(UtilityWarning, match=f"publishing {records} of the {n} examples"):
        dp.ClippedSGD.plan(
            n=n, budget=dp.Budget(1.0, records / n), clip=1.0, lr=0.1, batch_size=2, epochs=2
        )
