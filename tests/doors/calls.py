"""One good call of each public callable: `CALLS[name]()` returns the callable and its arguments, all of them fresh.

The table of bad input replaces one argument at a time, or adds one that the good call leaves to its default. Families
of calls have files of their own, `calls_*.py`; here are those of training, checks, estimators and what they solve.
"""

from __future__ import annotations

import functools
from typing import Any

import pyarrow as pa
import torch
from torch import nn
from torch.utils.data import DataLoader

import torch_dpsco as dp
from torch_dpsco import estimators
from torch_dpsco.audits import (
    OneRunAudit,
    canaries,
    epsilon_of_guesses,
    loss_scores,
    mu_of_guesses,
)
from torch_dpsco.diagnosis import Diagnosis, Finding
from torch_dpsco.estimators import Category, Number, objectives, robust, solvers
from torch_dpsco.estimators.records import Records
from torch_dpsco.integrations import opacus
from torch_dpsco.integrations.parquet import ParquetRows
from torch_dpsco.integrations.tar import TarRows
from torch_dpsco.sampling import make_sampler

__all__ = ["CALLS", "DIM", "N", "records"]

from tests.doors import calls_core, calls_public, calls_study  # noqa: F401  # which add to the table
from tests.doors.calls_optimizers import CLIPPED_USERS, bolt_plan
from tests.doors.shared import (
    CALLS,
    DIM,
    LOSS,
    Good,
    N,
    budget,
    call,
    made,
    model,
    params,
    problem,
    records,
    simple,
)

# -- loaders, training, checks ----------


def loader() -> dp.sampling.PrivateLoader:
    return dp.sampling.PrivateLoader(
        records(24), make_sampler(dp.Poisson(6, 24), size=24, steps=1)
    )


simple(
    "dp.sampling.PrivateLoader.in_parts",
    lambda physical_batch_size: loader().in_parts(physical_batch_size),
    physical_batch_size=4,
)
CALLS["dp.sampling.PrivateLoader"] = lambda: (
    dp.sampling.PrivateLoader,
    {"dataset": records(24), "sampler": make_sampler(dp.Poisson(6, 24), size=24, steps=1)},
)
simple("dp.sampling.RecordIds", dp.sampling.RecordIds, ids=["a", "b"], records=2)

simple("dp.loggers.Logger", dp.loggers.Logger, write=print, every=5, delta=1e-3)


@call("dp.fit")
def _fit() -> Good:
    net = model()
    optimizer = dp.HolderSGD(
        net.parameters(),
        dp.HolderSGD.plan(
            lr=0.1, problem=problem(), noise_multiplier=2.0, batch_size=6, n=24, steps=2
        ),
    )
    return dp.fit, {
        "model": net,
        "optimizer": optimizer,
        "dataset": records(24),
        "loss_fn": LOSS,
        "progress": False,
    }


@call("dp.fit[user]")
def _fit_users() -> Good:
    net = model()
    optimizer = dp.UserClippedSGD(
        net.parameters(), dp.UserClippedSGD.plan(**CLIPPED_USERS, noise_multiplier=2.0, steps=2)
    )
    good = {
        "model": net,
        "optimizer": optimizer,
        "dataset": records(48),
        "loss_fn": LOSS,
        "progress": False,
    }
    return dp.fit, good | {"users": torch.arange(48) % 24}


@call("dp.fit[row-free]")
def _fit_row_free() -> Good:
    net = model(torch.float64, bias=False)
    optimizer = dp.BoltOnPSGD(net.parameters(), bolt_plan())
    return dp.fit, {
        "model": net,
        "optimizer": optimizer,
        "dataset": records(24, torch.float64),
        "loss_fn": LOSS,
        "progress": False,
    }


@call("dp.make_private")
def _make_private() -> Good:
    net = model()
    return dp.make_private, {
        "model": net,
        "optimizer": torch.optim.SGD(net.parameters(), lr=0.1),
        "data_loader": DataLoader(records(24), batch_size=6, shuffle=True),
        "problem": problem(),
        "budget": budget(),
        "n": 24,
        "epochs": 1,
        "loss": LOSS,
    }


@call("parquet.ParquetRows")
def _parquet() -> Good:
    table = pa.table({"a": [1.0], "y": [1]})
    return ParquetRows, {"source": table, "inputs": ["a"], "target": "y"}


@call("tar.TarRows")
def _tar() -> Good:
    return TarRows, {"paths": [], "decode": lambda files: (0.0, 0), "shape": [2]}


@call("opacus.PrivacyEngine")
def _engine() -> Good:
    return opacus.PrivacyEngine, {"accountant": "prv", "secure_mode": False}


def parts_of_opacus() -> dict[str, Any]:
    net = model()
    sgd, loader = (
        torch.optim.SGD(net.parameters(), lr=0.1),
        DataLoader(records(24), batch_size=6, shuffle=True),
    )
    return {
        "module": net,
        "optimizer": sgd,
        "data_loader": loader,
        "max_grad_norm": 1.0,
        "n": 24,
    }


@call("opacus.PrivacyEngine.make_private")
def _engine_make_private() -> Good:
    return opacus.PrivacyEngine().make_private, {**parts_of_opacus(), "noise_multiplier": 1.0}


@call("opacus.PrivacyEngine.make_private_with_epsilon")
def _engine_make_private_with_epsilon() -> Good:
    spend = {"target_epsilon": 2.0, "target_delta": 1e-4, "epochs": 2}
    return opacus.PrivacyEngine().make_private_with_epsilon, {**parts_of_opacus(), **spend}


@call("opacus.BatchMemoryManager")
def _batch_memory_manager() -> Good:
    _, optimizer, loader = opacus.PrivacyEngine().make_private(
        **parts_of_opacus(), noise_multiplier=1.0
    )
    return opacus.BatchMemoryManager, {
        "data_loader": loader,
        "max_physical_batch_size": 2,
        "optimizer": optimizer,
    }


@call("opacus.DPOptimizer")
def _dp_optimizer() -> Good:
    plan = opacus.DPOptimizer.plan(
        sampling=dp.Poisson(6, 24),
        clip=1.0,
        noise_multiplier=1.0,
        lr=0.1,
        adjacency="add_remove",
    )
    return opacus.DPOptimizer, {"optimizer": torch.optim.SGD(params(), lr=0.1), "plan": plan}


simple("dp.attach", dp.attach, model=lambda: model())
simple("dp.private_layers", dp.private_layers, model=lambda: nn.LSTM(2, 3))
simple("dp.detach", dp.detach, model=lambda: dp.attach(model()))
simple("dp.public", dp.public, model=lambda: dp.attach(model()))
simple("dp.same_records", dp.same_records, model=lambda: dp.attach(model()))


@call("dp.doctor")
def _doctor() -> Good:
    net = dp.attach(model())
    optimizer = dp.HolderSGD(
        net.parameters(),
        dp.HolderSGD.plan(lr=0.1, problem=problem(), noise_multiplier=2.0, batch_size=6, n=24),
    )
    return dp.doctor, {
        "model": net,
        "loss": LOSS,
        "loader": optimizer.loader(records(24)),
        "optimizer": optimizer,
    }


simple(
    "dp.CompiledRows",
    dp.CompiledRows,
    model=lambda: model(),
    loss_fn=lambda: nn.functional.mse_loss,
    backend="eager",
)


simple(
    "dp.Schema",
    dp.Schema,
    columns=lambda: {"age": Number(17, 90), "sex": Category(["f", "m"])},
    target="died",
    labels=lambda: ["no", "yes"],
    ids="patient",
    rows_per_unit=1,
)
simple(
    "dp.audit",
    dp.audit,
    mechanism=lambda: lambda x: x + torch.randn(()),
    pair=(0.0, 1.0),
    delta=1e-2,
    trials=200,
)
simple(
    "dp.audit_outputs",
    dp.audit_outputs,
    first=lambda: torch.arange(100.0).numpy(),
    second=lambda: torch.arange(100.0).numpy() + 3,
    delta=1e-2,
)


def _run() -> tuple[nn.Module, dp.PrivateOptimizer]:
    net = dp.attach(model())
    return net, dp.HolderSGD(
        net.parameters(),
        dp.HolderSGD.plan(
            lr=0.1, problem=problem(), noise_multiplier=2.0, batch_size=3, sampling=dp.Full(3)
        ),
    )


simple(
    "dp.audit_training",
    dp.audit_training,
    make=lambda: _run,
    dataset=lambda: records(3),
    canary=lambda: (torch.ones(3), torch.ones(1)),
    other=lambda: (-torch.ones(3), torch.ones(1)),
    loss=lambda: LOSS,
    delta=1e-2,
    trials=40,
    steps=1,
)
simple("Diagnosis.of", Diagnosis.of, findings=lambda: [Finding("warning", "a", "b", "c")])
CALLS["Diagnosis.raise_if"] = lambda: (Diagnosis.of([]).raise_if, {})
CALLS["Audit.contradicts"] = lambda: (
    dp.audit_outputs([0.0] * 50, [1.0] * 50, delta=0.0).contradicts,
    {"epsilon": 1.0},
)
simple("audit.OneRunAudit", OneRunAudit, canaries=lambda: [1.0] * 8, guess_in=2, guess_out=2)
CALLS["OneRunAudit.result"] = lambda: (
    OneRunAudit([1.0] * 8).result,
    {"scores": torch.arange(8.0).numpy(), "delta": 1e-3, "confidence": 0.9, "claimed": 1.0},
)
simple(
    "audit.epsilon_of_guesses",
    epsilon_of_guesses,
    correct=7,
    guesses=8,
    canaries=9,
    delta=1e-3,
    confidence=0.9,
)
simple("audit.mu_of_guesses", mu_of_guesses, correct=7, guesses=8, canaries=9, confidence=0.9)
simple(
    "audit.canaries",
    canaries,
    count=4,
    like=lambda: (torch.zeros(DIM), torch.ones(1)),
    bound_x=1.0,
    labels=(-1, 1),
    seed=1,
)
simple(
    "audit.loss_scores",
    loss_scores,
    model=lambda: model(),
    loss=lambda: LOSS,
    canaries=lambda: [(torch.zeros(DIM), torch.ones(1))],
)
CALLS["Statement.json"] = lambda: (made("dp.HolderSGD").report(1e-4).json, {})
# -- estimators, objectives, solvers ----------

LABELS = lambda: (torch.arange(N) % 2).numpy()  # noqa: E731
FEATURES = lambda: records().tensors[0].numpy()  # noqa: E731
TARGETS = lambda: torch.linspace(-1, 1, N).numpy()  # noqa: E731
ESTIMATORS: dict[str, dict[str, Any]] = {
    "LogisticRegression": {"classes": (0, 1)},
    "LinearSVC": {"classes": (0, 1)},
    "SoftmaxRegression": {"classes": (0, 1)},
    "HuberRegressor": {"bound_y": 1.0},
    "QuantileRegressor": {"bound_y": 1.0, "radius": 5.0},
    "Ridge": {"bound_y": 1.0},
    "Lasso": {"bound_y": 1.0},
    "TiltedClassifier": {"classes": (0, 1), "tilt": 0.1, "n_min": 300},
    "AdversarialClassifier": {"classes": (0, 1)},
}


def fitted(name: str, **settings: Any) -> Any:
    """Fits by settings, which are checked by `fit` (scikit-learn's rule)."""
    estimator = getattr(estimators, name)(**settings)
    return estimator.fit(FEATURES(), LABELS() if "classes" in ESTIMATORS[name] else TARGETS())


for _name, _more in ESTIMATORS.items():
    _function = functools.partial(fitted, _name)
    _function.__signature__ = __import__("inspect").signature(getattr(estimators, _name))  # type: ignore[attr-defined]
    CALLS[f"estimators.{_name}"] = lambda f=_function, more=_more: (
        f,
        {"epsilon": 1.0, "n": N, "bound_x": 2.0} | more,
    )


def fresh() -> estimators.LogisticRegression:
    return estimators.LogisticRegression(
        n=N, bound_x=2.0, classes=(0, 1), accountant=dp.Accountant(adjacency="zero_out")
    )


CALLS["estimators.Lasso.plan"] = lambda: (
    estimators.Lasso(n=N, bound_x=2.0, bound_y=1.0).plan,
    {"dim": DIM, "unit": "example"},
)
CALLS["estimators.LogisticRegression.fit"] = lambda: (
    fresh().fit,
    {"X": FEATURES(), "y": LABELS()},
)
CALLS["estimators.LogisticRegression.predict"] = lambda: (
    fresh().fit(FEATURES(), LABELS()).predict,
    {"X": FEATURES()},
)
CALLS["estimators.LogisticRegression.preview"] = lambda: (
    fresh().preview,
    {"X_like": FEATURES(), "y_like": LABELS(), "epsilons": (1.0,), "runs": 3},
)
CALLS["estimators.LogisticRegression.summary"] = lambda: (
    estimators.LogisticRegression(epsilon=50.0, n=N, bound_x=2.0, classes=(0, 1), intervals=0.3)
    .fit(torch.rand(N, DIM, generator=torch.Generator().manual_seed(0)), LABELS())
    .summary,
    {"level": 0.9},
)
CALLS["estimators.Ridge.fit"] = lambda: (
    estimators.Ridge(n=N, bound_x=2.0, bound_y=1.0).fit,
    {"X": FEATURES(), "y": TARGETS()},
)


def rows() -> dict[str, Any]:
    features = records(20, torch.float64).tensors[0]
    return {"records": Records(features, torch.ones(20, dtype=torch.float64)), "reg": 1.0}


def objective() -> objectives.LinearObjective:
    return objectives.LinearObjective(LOSS, **rows(), normalizer=1.0)


CALLS["objectives.LinearObjective"] = lambda: (
    objectives.LinearObjective,
    {"loss": LOSS, "normalizer": 1.0} | rows(),
)
CALLS["robust.Tilted"] = lambda: (robust.Tilted, {"loss": LOSS, "tilt": 0.1} | rows())
CALLS["robust.Adversarial"] = lambda: (
    robust.Adversarial,
    {"loss": LOSS, "attack_radius": 0.1, "normalizer": 1.0} | rows(),
)
CALLS["solvers.solve"] = lambda: (solvers.solve, {"objective": objective(), "tolerance": 1e-3})
CALLS["solvers.gradient_certificate"] = lambda: (
    solvers.gradient_certificate,
    {"objective": objective(), "point": torch.zeros(DIM, dtype=torch.float64)},
)
simple("dp.per_record", dp.per_record, loss=lambda: nn.BCEWithLogitsLoss())
