"""Releases that are made at once, on a ledger file: scripts that tests kill and run again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import sparse
from torch import nn
from torch.utils.data import TensorDataset

import torch_dpsco as dp
from torch_dpsco.estimators import LogisticRegression, Number, Ridge, Schema
from torch_dpsco.statistics.conformal import conformal
from torch_dpsco.statistics.prepare import PrivateStandardScaler
from torch_dpsco.statistics.study import plan_study

N = 200
BUDGET = dp.Budget(1.0, 1e-6)
RNG = np.random.default_rng(1)
ROWS = RNG.normal(size=(N, 3)) / 3
LABELS = np.where(ROWS[:, 0] + RNG.normal(size=N) / 3 > 0, 1, -1)
SETTINGS: dict[str, Any] = {"epsilon": 1.0, "delta": 1e-6, "bound_x": 2.0}
PROBLEM = dp.losses.Logistic().problem(bound_x=1.0, radius=1.0)
PUBLIC = LogisticRegression(**SETTINGS, classes=(-1, 1), n=N).fit(ROWS, LABELS)
Run = Callable[[Any, np.ndarray], Any]


def weights(model: nn.Module) -> list[float]:
    return [float(v) for p in model.parameters() for v in p.detach().flatten()]


def logistic(ledger: Any, rows: np.ndarray) -> Any:
    model = LogisticRegression(**SETTINGS, classes=(-1, 1), accountant=ledger).fit(rows, LABELS)
    return [*model.coef_.ravel().tolist(), *model.intercept_.tolist()]


def of_users(ledger: Any, rows: np.ndarray) -> Any:
    model = LogisticRegression(**SETTINGS, classes=(-1, 1), accountant=ledger)
    return model.fit(rows, LABELS, groups=np.arange(N) // 2).coef_.tolist()


def unprepared(ledger: Any, rows: np.ndarray) -> Any:
    model = Ridge(**SETTINGS, bound_y=1.0, prepare=None, accountant=ledger)
    return model.fit(rows, LABELS.astype(float)).coef_.tolist()


def data(rows: np.ndarray, labels: np.ndarray = LABELS) -> TensorDataset:
    return TensorDataset(torch.from_numpy(rows), torch.from_numpy(labels[:, None]).double())


def solved(name: str) -> Run:
    def run(ledger: Any, rows: np.ndarray) -> Any:
        model = nn.Linear(3, 1).double()
        kind = getattr(dp, name)
        plan = kind.plan(loss=dp.losses.Logistic(), model=model, n=N, bound_x=1.0, budget=BUDGET)
        optimizer = kind(model.parameters(), plan, accountant=ledger)
        optimizer.solve(data(rows))
        optimizer.finalize()
        return weights(model)

    return run


def row_free(name: str) -> Run:
    def run(ledger: Any, rows: np.ndarray) -> Any:
        model = nn.Linear(3, 1, bias=False).double()
        kind = getattr(dp, name)
        plan = kind.plan(problem=PROBLEM, n=N, budget=BUDGET, dim=model, batch_size=50, epochs=1)
        optimizer = kind(model.parameters(), plan, accountant=ledger)
        for x, y in optimizer.loader(data(rows)):
            optimizer.zero_grad()
            dp.losses.Logistic()(model(x), y).backward()
            optimizer.step()
        return weights(model)

    return run


def score(ledger: Any, rows: np.ndarray) -> Any:
    return dp.score(PUBLIC, rows, LABELS, metric="auc", accountant=ledger, budget=BUDGET).value


def sets(ledger: Any, rows: np.ndarray) -> Any:
    return conformal(PUBLIC, rows, LABELS, level=0.8, accountant=ledger, budget=BUDGET).threshold


def scaler(ledger: Any, rows: np.ndarray) -> Any:
    made = PrivateStandardScaler(
        epsilon=1.0, delta=1e-6, lower=-2.0, upper=2.0, accountant=ledger
    )
    return made.fit(rows).mean_.tolist()


def blocks(ledger: Any, rows: np.ndarray) -> Any:
    def read() -> Iterator[Any]:
        for start in range(0, N, 64):
            yield rows[start : start + 64], LABELS[start : start + 64]

    model = LogisticRegression(**SETTINGS, classes=(-1, 1), n=N, accountant=ledger)
    return model.fit(read).coef_.tolist()


def sparse_rows(ledger: Any, rows: np.ndarray) -> Any:
    model = Ridge(**SETTINGS, bound_y=1.0, accountant=ledger)
    return model.fit(sparse.csr_matrix(rows), LABELS.astype(float)).coef_.tolist()


RUNS: dict[str, Run] = {
    "logistic": logistic,
    "users": of_users,
    "ridge": unprepared,
    "output": solved("OutputPerturbation"),
    "objective": solved("ObjectivePerturbation"),
    "noisy gd": solved("NoisyGD"),
    "holder output": row_free("HolderOutputSGD"),
    "bolt on": row_free("BoltOnPSGD"),
    "score": score,
    "sets": sets,
    "scaler": scaler,
    "blocks": blocks,
    "sparse": sparse_rows,
}
FAST = ("logistic", "bolt on", "blocks")


def carried_out(
    folder: Path, run: Run, rows: np.ndarray = ROWS, **options: Any
) -> tuple[Any, int]:
    """Returns the answer of a script that opens the ledger of a folder, and the events that it holds then."""
    unit = "user" if run is of_users else "example"
    budget = dp.Budget(1.0, 1e-6, unit=unit)
    ledger = dp.Accountant(budget, ledger_path=folder / "ledger", **options)
    try:
        return run(ledger, rows), len(ledger)
    finally:
        ledger.close()


SCHEMA = Schema({"a": Number(-3, 3), "b": Number(-3, 3)}, target="y", labels=[-1, 1])
FRAME = {"a": ROWS[:, 0], "b": ROWS[:, 1], "y": LABELS}
STUDY = plan_study(SCHEMA, epsilon=2.0, delta=1e-6, n=N, holdout=0.3, level=None)


def study(folder: Path) -> tuple[Any, ...]:
    """Carries the study out on the ledger of a folder."""
    found = STUDY.run(FRAME, ledger_path=folder / "ledger", progress=False)
    return found.model.coef_.tolist(), found.score.value, found.privacy.epsilon
