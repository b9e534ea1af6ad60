"""Good calls of what users do with what they have: reports, risk, studies, released models, schemas, loggers, files."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import torch
from accelerate import Accelerator

import torch_dpsco as dp
from tests.doors.calls_study import STUDY, a_fit, people, rows, studied
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
    records,
    simple,
)
from torch_dpsco import estimators
from torch_dpsco.accounting.analysis.gaussian import gaussian_delta
from torch_dpsco.accounting.analysis.risk import Risk
from torch_dpsco.audits import OneRunAudit
from torch_dpsco.estimators import Category, Date, Dialect, Number, Ordered
from torch_dpsco.estimators.released import Released
from torch_dpsco.integrations import engines, lightning, opacus
from torch_dpsco.integrations.accelerate import prepare
from torch_dpsco.integrations.parquet import parquet_blocks
from torch_dpsco.show import loggers
from torch_dpsco.statistics.search import PrivateSearch
from torch_dpsco.statistics.study import plan_study

FOLDER = tempfile.TemporaryDirectory()  # until the process ends
_PLACES = iter(range(10**9))


def somewhere(ending: str = "") -> Path:
    """Returns a path that is not there yet."""
    return Path(FOLDER.name) / f"{next(_PLACES)}{ending}"


def saved(value: Any, ending: str) -> Path:
    path = somewhere(ending)
    value.save(path)
    return path


# -- reports and risk ----------


def risk() -> Risk:
    return Risk(functools.partial(gaussian_delta, 1.0))


simple("analysis.risk.Risk.of_point", Risk.of_point, epsilon=1.0, delta=1e-5)
CALLS["Risk.delta_at"] = lambda: (risk().delta_at, {"epsilon": 1.0})
CALLS["Risk.false_negative"] = lambda: (risk().false_negative, {"false_positive": 0.1})
CALLS["Risk.true_positive"] = lambda: (risk().true_positive, {"false_positive": 0.1})
CALLS["Risk.posterior"] = lambda: (risk().posterior, {"prior": 0.1, "false_positive": 0.1})
CALLS["Risk.words"] = lambda: (risk().words, {"unit": "patient", "prior": 0.1})


def statement() -> Any:
    return made("dp.HolderSGD").report(1e-4)


CALLS["Statement.named"] = lambda: (
    statement().named,
    {"unit": "patient", "plural": "patients", "by_ids": True},
)
CALLS["Statement.save"] = lambda: (statement().save, {"path": somewhere(".md")})
CALLS["Plan.epsilon"] = lambda: (made("dp.HolderSGD.plan").epsilon, {"delta": 1e-5})
CALLS["Plan.from_dict"] = lambda: (
    dp.HolderSGD.plans.from_dict,
    {"row": made("dp.HolderSGD.plan").to_dict()},
)

# -- estimators, studies, released models ----------


@functools.cache
def fitted(name: str, **more: Any) -> Any:
    labels = np.arange(N) % 2 if "classes" in more else np.linspace(-1, 1, N)
    return getattr(estimators, name)(epsilon=50.0, n=N, bound_x=2.0, **more).fit(rows(), labels)


for _name, _more in (
    ("AdversarialClassifier", {"classes": (0, 1)}),
    ("SoftmaxRegression", {"classes": (0, 1)}),
):
    CALLS[f"estimators.{_name}.decision_function"] = lambda name=_name, more=_more: (
        fitted(name, **more).decision_function,
        {"X": rows()},
    )
CALLS["estimators.HuberRegressor.predict"] = lambda: (
    fitted("HuberRegressor", bound_y=1.0).predict,
    {"X": rows()},
)
CALLS["estimators.AdversarialClassifier.plan"] = lambda: (
    estimators.AdversarialClassifier(n=N, bound_x=2.0, classes=(0, 1)).plan,
    {"dim": DIM},
)
for _name in ("LogisticRegression", "SoftmaxRegression"):
    CALLS[f"estimators.{_name}.predict_proba"] = lambda name=_name: (
        fitted(name, classes=(0, 1)).predict_proba,
        {"X": rows()},
    )


def new_search() -> PrivateSearch:
    one = estimators.LogisticRegression(
        bound_x=2.0, classes=(0, 1), mechanism="noisy_gd", prepare=None
    )
    return PrivateSearch(
        candidates={"one": one},
        epsilon=50.0,
        n=N,
        trials=2.0,
        holdout=0.5,
        accountant=dp.Accountant(dp.Budget(60.0, 1e-5, adjacency="zero_out")),
    )


@functools.cache
def a_search() -> PrivateSearch:
    return new_search().fit(rows(), np.arange(N) % 2)


CALLS["statistics.search.PrivateSearch.plan"] = lambda: (a_search().plan, {"dim": DIM})
CALLS["statistics.search.PrivateSearch.predict"] = lambda: (a_search().predict, {"X": rows()})
CALLS["statistics.search.PrivateSearch.predict_proba"] = lambda: (
    a_search().predict_proba,
    {"X": rows()},
)


@functools.cache
def a_study() -> Any:
    return dp.study(people(), STUDY["schema"](), dp.Budget(4.0, 1e-4), show=None)


@call("statistics.search.PrivateSearch.fit")
def _fit_search() -> Good:
    return new_search().fit, {"X": rows(), "y": np.arange(N) % 2}


CALLS["StudyPlan.preview"] = lambda: (
    plan_study(**studied()).preview,
    {"frame": people(), "runs": 3, "epsilons": (9.0,)},
)
CALLS["statistics.results.Study.predict"] = lambda: (
    a_study().predict,
    {"frame": {"age": [30, 40]}},
)
CALLS["statistics.results.Study.predict[threshold]"] = lambda: (
    a_study().predict,
    {"frame": {"age": [30, 40]}, "threshold": 0.3},
)
CALLS["statistics.results.Study.predict_proba"] = lambda: (
    a_study().predict_proba,
    {"frame": {"age": [30, 40]}},
)
CALLS["statistics.results.Study.coefficients"] = lambda: (a_study().coefficients, {"level": 0.9})
CALLS["statistics.results.Study.save_card"] = lambda: (
    a_study().save_card,
    {"path": somewhere(".md")},
)
CALLS["statistics.results.Study.save"] = lambda: (a_study().save, {"folder": somewhere()})
CALLS["estimators.Released.load"] = lambda: (
    Released.load,
    {"path": saved(Released.of(a_fit()), ".json")},
)
CALLS["estimators.Released.save"] = lambda: (
    Released.of(a_fit()).save,
    {"path": somewhere(".json")},
)
CALLS["estimators.Released.decision_function"] = lambda: (
    Released.of(a_fit()).decision_function,
    {"X": rows()},
)
CALLS["estimators.Released.predict_proba"] = lambda: (
    Released.of(a_fit()).predict_proba,
    {"X": rows()},
)

# -- schemas ----------

simple("estimators.Number", Number, low=0.0, high=1.0)
simple("estimators.Date", Date, low="2020-01-01", high="2021-01-01", format="%d.%m.%Y")
simple(
    "estimators.Dialect", Dialect, separator=";", decimal=",", thousands=".", encoding="cp1252"
)
simple("estimators.Category", Category, levels=lambda: ["a", "b"])
simple("estimators.Ordered", Ordered, levels=lambda: ["a", "b"])


def schema() -> dp.Schema:
    return STUDY["schema"]()


CALLS["dp.Schema.features"] = lambda: (schema().features, {"frame": people()})
CALLS["dp.Schema.load"] = lambda: (dp.Schema.load, {"path": saved(schema(), ".toml")})
CALLS["dp.Schema.save"] = lambda: (schema().save, {"path": somewhere(".toml")})
CALLS["dp.Schema.from_dict"] = lambda: (dp.Schema.from_dict, {"state": schema().to_dict()})
CALLS["dp.Schema.problem"] = lambda: (schema().problem, {"loss": LOSS})
CALLS["dp.Schema.require_targets"] = lambda: (schema().require_targets, {"loss": LOSS})
CALLS["estimators.Table.dataset"] = lambda: (schema().read(people()).dataset, {"loss": LOSS})

# -- loops, loggers, audits ----------


class Writer:
    """A tracker that keeps nothing."""

    def add_scalar(self, *args: Any, **kwargs: Any) -> None: ...

    def log(self, *args: Any, **kwargs: Any) -> None: ...

    def log_metrics(self, *args: Any, **kwargs: Any) -> None: ...


for _name, _argument in (("tensorboard", "writer"), ("wandb", "run"), ("mlflow", "module")):
    simple(
        f"show.loggers.{_name}",
        getattr(loggers, _name),
        **{_argument: Writer()},
        every=5,
        delta=1e-5,
    )
CALLS["show.loggers.public_numbers"] = lambda: (
    loggers.public_numbers,
    {"optimizer": made("dp.HolderSGD"), "delta": 1e-5},
)
CALLS["dp.Pilot.plan"] = lambda: (
    dp.Pilot().plan,
    {"n": 1000, "budget": budget(), "exchange_rate": 0.1},
)
CALLS["dp.Pilot.records"] = lambda: (dp.Pilot().records, {"n": 1000})


@call("dp.PrivateOptimizer.resume")
def _resume() -> Good:
    path, plan = somewhere(), made("dp.HolderSGD.plan")
    interrupted = dp.HolderSGD(
        params(), plan, accountant=dp.Accountant(plan.budget, ledger_path=path)
    )
    state = interrupted.state_dict()
    interrupted.accountant.close()
    again = dp.HolderSGD(params(), plan, accountant=dp.Accountant(plan.budget, ledger_path=path))
    return again.resume, {"state_dict": state}


CALLS["audit.OneRunAudit.dataset"] = lambda: (
    OneRunAudit([(torch.ones(DIM), torch.ones(1))] * 8).dataset,
    {"base": records(24)},
)
CALLS["OneRunResult.contradicts"] = lambda: (
    OneRunAudit([1.0] * 8).result(np.arange(8.0), delta=1e-3).contradicts,
    {"epsilon": 1.0},
)

# -- trainers, engines and files of others ----------


simple("lightning.PrivateTraining", lightning.PrivateTraining, loss_reduction="mean")
simple(
    "parquet.parquet_blocks",
    parquet_blocks,
    source=lambda: ds.dataset(pa.table({"a": [1.0], "y": [1]})),
    target="y",
    rows=8,
)


@functools.cache
def engine() -> tuple[opacus.PrivacyEngine, Any]:
    """Returns an engine that has made a module private, and the module."""
    function, arguments = CALLS["opacus.PrivacyEngine.make_private"]()
    function(**arguments)
    return function.__self__, arguments["module"]


CALLS["opacus.PrivacyEngine.get_epsilon"] = lambda: (engine()[0].get_epsilon, {"delta": 1e-5})
for _name in ("validate", "is_compatible"):
    CALLS[f"opacus.PrivacyEngine.{_name}"] = lambda name=_name: (
        getattr(opacus.PrivacyEngine(), name),
        {"module": model()},
    )
simple(
    "opacus.PrivacyEngine.get_compatible_module",
    opacus.PrivacyEngine.get_compatible_module,
    module=lambda: model(),
)


@call("opacus.PrivacyEngine.save_checkpoint")
def _save_checkpoint() -> Good:
    made_private, module = engine()
    return made_private.save_checkpoint, {"path": somewhere(), "module": module}


@call("opacus.PrivacyEngine.load_checkpoint")
def _load_checkpoint() -> Good:
    made_private, module = engine()
    path = somewhere()
    made_private.save_checkpoint(path=path, module=module)
    return made_private.load_checkpoint, {"path": path, "module": module}


@call("accelerate.prepare")
def _prepare() -> Good:
    net = dp.attach(model())
    optimizer = dp.HolderSGD(net.parameters(), made("dp.HolderSGD.plan"))
    loader = optimizer.loader(records(24))
    return prepare, {
        "accelerator": Accelerator(cpu=True),
        "model": net,
        "optimizer": optimizer,
        "loader": loader,
    }


# stands for a table of dask or Spark
TABLE = SimpleNamespace(
    dtypes={"a": np.dtype(float), "y": np.dtype(float)},
    to_delayed=list,
    mapInArrow=None,
    limit=lambda rows: SimpleNamespace(toArrow=lambda: pa.table({"a": [1.0], "y": [1.0]})),
    select=lambda *columns: None,
)
simple("engines.dask_partitions", engines.dask_partitions, frame=TABLE, target="y")
simple("engines.spark_partitions", engines.spark_partitions, frame=TABLE, target="y")
