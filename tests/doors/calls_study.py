"""Good calls of preparation, scores, conformal sets and reports."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch

import torch_dpsco as dp
from tests.doors.shared import CALLS, Good, N, accountant, budget, call, records
from torch_dpsco import estimators
from torch_dpsco.estimators import Number
from torch_dpsco.estimators.released import Released
from torch_dpsco.statistics import prepare
from torch_dpsco.statistics.conformal import conformal
from torch_dpsco.statistics.search import PrivateSearch
from torch_dpsco.statistics.study import plan_study


class Signs:
    """A model of two classes, and of targets."""

    classes_ = (0, 1)

    def predict(self, X: Any) -> Any:
        return (X[:, 0] > 0).astype(int)

    def predict_proba(self, X: Any) -> Any:
        return torch.stack([1 - (p := torch.sigmoid(torch.from_numpy(X[:, 0]))), p], dim=1)


def rows() -> Any:
    return records().tensors[0].numpy()


def labels() -> Any:
    return torch.ones(N, dtype=torch.int64)


HELD_OUT = {"model": Signs, "X": rows, "y": labels, "budget": budget, "accountant": accountant}


def held_out(**more: Any) -> dict[str, Any]:
    return {name: make() for name, make in HELD_OUT.items()} | more


CALLS["dp.score"] = lambda: (dp.score, held_out(metric="log_loss", bound=2.0))
CALLS["dp.score[auc]"] = lambda: (dp.score, held_out(metric="auc", bins=4))
CALLS["conformal.conformal"] = lambda: (conformal, held_out(bins=4))
CALLS["conformal.conformal[targets]"] = lambda: (conformal, held_out(bound=1.0))
CALLS["ConformalSets.sets"] = lambda: (conformal(**held_out()).sets, {"X": rows()})
CALLS["ConformalSets.intervals"] = lambda: (
    conformal(**held_out(bound=1.0)).intervals,
    {"X": rows()},
)
STUDY = {
    "schema": lambda: dp.Schema({"age": Number(17, 90)}, target="died", labels=["no", "yes"]),
    "budget": lambda: dp.Budget(4.0, 1e-4),
}


def studied(**more: Any) -> dict[str, Any]:
    return (
        {name: make() for name, make in STUDY.items()}
        | {"n": 400, "holdout": 0.5, "level": 0.5}
        | more
    )


NOISY = {"mechanism": "noisy_gd", "prepare": None}


def people() -> dict[str, Any]:
    return {"age": list(range(20, 60)) * 10, "died": ["no", "yes"] * 200}


CALLS["statistics.study.plan_study"] = lambda: (plan_study, studied(metric="accuracy"))
CALLS["statistics.study.plan_study[search]"] = lambda: (
    plan_study,
    studied(candidates={"one": NOISY}, trials=2.0),
)
CALLS["dp.study"] = lambda: (
    dp.study,
    studied(frame=people(), show=None, ledger_path=None, check=False),
)
CALLS["StudyPlan.run"] = lambda: (
    plan_study(**studied()).run,
    {"frame": people(), "ledger_path": None, "check": False},
)


def a_search(**settings: Any) -> Any:
    """Fits a search by settings, which are checked by `fit`."""
    return PrivateSearch(**settings).fit(rows(), labels())


a_search.__signature__ = inspect.signature(PrivateSearch)  # type: ignore[attr-defined]
CALLS["statistics.search.PrivateSearch"] = lambda: (
    a_search,
    {
        "candidates": {
            "one": estimators.LogisticRegression(bound_x=2.0, classes=(0, 1), **NOISY)
        },
        "epsilon": 50.0,
        "n": N,
        "trials": 2.0,
        "holdout": 0.5,
        "accountant": dp.Accountant(dp.Budget(60.0, 1e-5, adjacency="zero_out")),
    },
)
CALLS["dp.Schema.check"] = lambda: (STUDY["schema"]().check, {"frame": people()})
CALLS["dp.Schema.read"] = lambda: (STUDY["schema"]().read, {"frame": people()})
CALLS["estimators.Released.of"] = lambda: (Released.of, {"model": a_fit()})


def a_fit() -> Any:
    return estimators.LogisticRegression(epsilon=50.0, n=N, bound_x=2.0, classes=(0, 1)).fit(
        rows(), labels()
    )


@call("estimators.Released.predict")
def _predict() -> Good:
    return Released.of(a_fit()).predict, {"X": rows()}


TRANSFORMERS: dict[str, dict[str, Any]] = {
    "PrivateStandardScaler": {},
    "PrivateQuantiles": {"bins": 4, "levels": (0.25, 0.5)},
    "PrivateImputer": {},
}


def fitted(name: str, **settings: Any) -> Any:
    """Fits by settings, which are checked by `fit` (scikit-learn's rule)."""
    return getattr(prepare, name)(**settings).fit(rows())


for _name, _more in TRANSFORMERS.items():
    _function = functools.partial(fitted, _name)
    _function.__signature__ = inspect.signature(getattr(prepare, _name))  # type: ignore[attr-defined]
    CALLS[f"statistics.prepare.{_name}"] = lambda f=_function, more=_more: (
        f,
        {
            "lower": -1.0,
            "upper": 1.0,
            "epsilon": 1.0,
            "accountant": dp.Accountant(adjacency="zero_out"),
        }
        | more,
    )


def scaler() -> prepare.PrivateStandardScaler:
    return prepare.PrivateStandardScaler(
        lower=-1.0,
        upper=1.0,
        accountant=dp.Accountant(dp.Budget(9.0, 1e-5, adjacency="zero_out")),
    )


@call("statistics.prepare.PrivateStandardScaler.fit")
def _fit() -> Good:
    return scaler().fit, {"X": rows()}


@call("statistics.prepare.PrivateStandardScaler.transform")
def _transform() -> Good:
    return scaler().fit(rows()).transform, {"X": rows()}


CALLS["statistics.prepare.PrivateStandardScaler.event"] = lambda: (scaler().event, {"dim": 3})
CALLS["statistics.prepare.PrivateStandardScaler.bound_x"] = lambda: (
    scaler().bound_x,
    {"dim": 3},
)
CALLS["statistics.prepare.PrivateQuantiles.bound_x"] = lambda: (
    prepare.PrivateQuantiles().bound_x,
    {"dim": 3},
)
