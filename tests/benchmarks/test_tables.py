"""The tables of benchmarks/accuracy.py are made of public constants, and its anchors are DP-GD and DP-SGD."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import torch_dpsco as dp
from torch_dpsco.accounting.calibrate import design_epsilon
from torch_dpsco.estimators import HuberRegressor, LogisticRegression
from torch_dpsco.estimators.preparation import Preparation, Units

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks"
NAMES = ("accuracy", "anchors", "ours", "tables", "table_parts", "table_rows", "table_users")
NUMBERS = st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=1, max_size=8)


@pytest.fixture(scope="module")
def accuracy() -> Iterator[ModuleType]:
    """Imports the benchmark; its scripts find each other beside themselves, as they do when they are run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "examples"))
        patch.syspath_prepend(str(FOLDER))
        before = set(sys.modules)
        import accuracy as module

        yield module
        beside = {
            path.stem for folder in (FOLDER, ROOT / "examples") for path in folder.glob("*.py")
        }
        for name in beside & (set(sys.modules) - before):
            del sys.modules[name]


def toy(parts: ModuleType, users: bool = False, kind: str = "binary") -> object:
    """Returns a table of 60 rows whose users, if any, have 1 to some rows."""
    draw = np.random.default_rng(3)
    rows, ids = draw.random((60, 3)), draw.integers(0, 12, 60)
    targets = (
        (draw.random(60) < rows[:, 0]).astype(float)
        if kind == "binary"
        else 3 * rows[:, 0] + draw.standard_t(2, 60)
    )
    groups = pd.Series(ids) if users else None
    bound = None if kind == "binary" else 100.0
    return parts.made(
        "toy",
        "develop",
        [rows / math.sqrt(3)],
        targets,
        bound_y=bound,
        threshold=0.5,
        users=groups,
    )


# -- public constants -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@given(numbers=NUMBERS)
def test_a_block_has_norm_at_most_1_whatever_the_records_hold(
    accuracy: ModuleType, numbers: list[float]
) -> None:
    parts = sys.modules["table_parts"]
    column = pd.Series(numbers)
    for block in (parts.unit(column, -2.0, 5.0), parts.log_unit(column, 100.0)):
        assert ((block >= 0) & (block <= 1)).all()
    assert (parts.one_hot(column, (0.0, 1.0)).sum(1) <= 1).all()
    assert set(parts.flag(column == 1.0)) <= {0.0, 1.0}


def test_ranges_levels_and_bounds_are_literals_and_no_statistic_of_the_data_is_taken() -> None:
    """Fails for unit(x, x.min(), 1) and the like; sizes of the whole table and ids of users are no statistics."""
    calls = 0
    for script in ("table_rows", "table_users", "table_unseen"):
        for node in ast.walk(ast.parse((FOLDER / f"{script}.py").read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                named = getattr(node.func, "attr", getattr(node.func, "id", ""))
                assert named not in {
                    "min",
                    "mean",
                    "median",
                    "std",
                    "var",
                    "quantile",
                    "unique",
                    "value_counts",
                }, named
                if named in {"unit", "log_unit"}:
                    calls += 1
                    assert all(
                        isinstance(ast.literal_eval(a), (int, float)) for a in node.args[1:]
                    )
    assert calls > 80


@pytest.mark.weekly
def test_every_row_is_within_the_declared_bounds_and_no_user_is_in_both_sets(
    accuracy: ModuleType,
) -> None:
    left_out, seen = [], set()
    for name, make in accuracy.TABLES.items():
        try:
            table = make()
        except FileNotFoundError:
            left_out.append(name)
            continue
        seen.add(table.split)
        assert table.name == name
        assert np.linalg.norm(table.rows, axis=1).max() <= table.bound_x * (1 + 1e-12)
        assert np.isfinite(table.targets).all()
        if table.kind == "binary":
            assert set(table.targets) == {0.0, 1.0}
        else:
            assert np.abs(table.targets).max() <= table.bound_y
        assert 0.15 < table.test.mean() < 0.35
        if table.users is not None:
            assert not set(table.users[table.test]) & set(table.users[~table.test])
    assert {"adult", "flights_late", "flights_delay", "aircraft"}.isdisjoint(left_out)
    assert seen == {"develop", "score"}


@pytest.mark.slow
def test_the_list_says_rows_bounds_and_what_is_not_private(
    accuracy: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    sys.modules["tables"].main(["--list", "--tables", "adult", "--save", str(tmp_path)])
    assert (
        "48,842 rows (33% test), d = 65; bound_x 3.464; not private: auc 0.89"
        in capsys.readouterr().out
    )
    saved = np.load(tmp_path / "adult.npz")
    assert saved["X"].shape == (48_842, 65)
    assert str(saved["kind"]), str(saved["split"]) == ("binary", "develop")


# -- what is shown, and what is switched off -------------------------------------------------------------------------


def test_medians_stand_beside_the_constant_what_is_not_private_and_the_anchor(
    accuracy: ModuleType,
) -> None:
    ours, anchors = accuracy.Results(None), accuracy.Results(None)
    for name, value in (("constant", 0.5), ("not private", 0.9)):
        ours.add("toy", "", name, {"auc": value, "log_loss": value})
    prepared, bare = "HolderSGD, logistic, prepared", "HolderSGD, logistic"
    ours.add("toy", "1", prepared, {"auc": [0.7, 0.9, 0.8], "log_loss": [0.4]})
    ours.add("toy", "1", bare, {"auc": [0.6], "log_loss": [0.5]})
    ours.add("toy", "3", prepared, "not available: ValueError")
    anchors.add("toy", "1", "DP-GD", {"auc": {"runs": [0.75]}})
    lines = accuracy.rows_table(ours, anchors, ["toy"], ["1", "3"]).splitlines()
    assert lines[2:] == [
        f"| toy, {prepared}: auc | 0.5000 | 0.9000 | 0.8000 (0.6000) / 0.7500 |  |",
        f"| toy, {prepared}: log-loss | 0.5000 | 0.9000 | 0.4000 (0.5000) |  |",
    ]


def test_each_rule_of_causes_changes_a_plan_and_is_back_afterwards(accuracy: ModuleType) -> None:
    causes = importlib.import_module("causes")
    labels = {"classes": (0, 1), "epsilon": 0.3, "n": 4_000, "bound_x": 2.0}
    numbers = {"bound_y": 3.0, "epsilon": 0.3, "n": 4_000, "bound_x": 2.0}

    def seen() -> tuple[object, ...]:
        model = LogisticRegression(**labels)
        plan = model.plan(30)
        robust = HuberRegressor(**numbers, threshold=1.0).plan(30).task
        model.plan_, model.units_ = (
            dataclasses.replace(plan, last_std=None),
            Units(Preparation(1.0)),
        )
        return plan, robust.prepare.widest, robust.bound_y, robust.prepare.most, model._link

    before = seen()
    for rule in causes.OFF:
        with causes.without([rule]):
            assert seen() != before
        assert seen() == before


# -- anchors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("users", [False, True], ids=["rows", "users"])
@pytest.mark.parametrize("loss", ["logistic", "absolute", "huber"])
def test_an_anchor_without_noise_is_the_loop_that_clips_each_gradient(
    accuracy: ModuleType, monkeypatch: pytest.MonkeyPatch, users: bool, loss: str
) -> None:
    anchors, parts = sys.modules["anchors"], sys.modules["table_parts"]
    monkeypatch.setattr(anchors, "noise", lambda *numbers: 0.0)
    table = toy(parts, users, "binary" if loss == "logistic" else "regression")
    data = anchors.Data(table)
    jobs = [anchors.Job(anchors.Setting(loss, clip, 1.0, 4), 1.0) for clip in (0.05, 1.0)]
    last, half = anchors.descend(data, jobs, torch.Generator())
    largest = 0.5 if loss == "huber" else 1.0
    for column, clip in enumerate((0.05, 1.0)):
        iterates = literal(
            table,
            loss,
            clip * largest * data.bound,
            {"logistic": 4.0}.get(loss, 0.5) / data.bound,
        )
        np.testing.assert_allclose(last[:, column], iterates[-1], rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(
            half[:, column], np.mean(iterates[2:], axis=0), rtol=1e-4, atol=1e-6
        )


def literal(table: object, loss: str, clip: float, rate: float) -> list[np.ndarray]:
    """Returns the iterates of four steps, one gradient after another."""
    train = ~table.test
    rows, targets = (
        np.column_stack([table.rows[train], np.ones(train.sum())]),
        table.targets[train],
    )
    ids = np.arange(len(rows)) if table.users is None else table.users[train]
    weights, found = np.zeros(rows.shape[1]), []
    for _ in range(4):
        total = np.zeros_like(weights)
        for user in sorted(set(ids)):
            gradients = [
                slope(loss, float(x @ weights), y) * x
                for x, y, i in zip(rows, targets, ids, strict=True)
                if i == user
            ]
            mean = np.mean(gradients, axis=0)
            total += mean * min(1.0, clip / np.linalg.norm(mean))
        weights = weights - rate * total / clip / len(set(ids))
        found.append(weights)
    return found


def slope(loss: str, score: float, target: float) -> float:
    if loss == "logistic":
        return 1 / (1 + math.exp(-score)) - target
    return (
        math.copysign(1.0, score - target)
        if loss == "absolute"
        else max(-0.5, min(0.5, score - target))
    )


def test_a_poisson_batch_holds_each_row_at_its_rate(
    accuracy: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step of a run moves by the rows of one batch; 1,000 runs are within 5.5 standard deviations: 4e-8."""
    anchors, parts = sys.modules["anchors"], sys.modules["table_parts"]
    monkeypatch.setattr(anchors, "noise", lambda *numbers: 0.0)
    data = anchors.Data(toy(parts))
    slopes = (
        data.targets[:, 0] - 0.5
    )  # of the logistic loss at 0, up to the sign; no gradient is clipped
    data.rows[:] = torch.eye(len(data.rows), data.rows.shape[1])  # the first rows are told apart
    data.norms[:] = 1.0
    jobs = [anchors.Job(anchors.Setting("logistic", 1.0, 1.0, 1, 12), 1.0)]
    moved = [
        anchors.descend(data, jobs, torch.Generator().manual_seed(s))[0][:, 0]
        for s in range(1_000)
    ]
    seen = (np.abs(np.array(moved)) > 0).mean(0)
    rate = 12 / data.count
    assert np.abs(slopes.numpy()).min() == 0.5
    assert np.abs(seen - rate).max() < 5.5 * math.sqrt(rate * (1 - rate) / 1_000)
    size = np.abs(moved).max()
    assert size == pytest.approx(4.0 / data.bound * 0.5 / data.bound / 12)


@pytest.mark.slow
def test_the_noise_of_an_anchor_spends_its_epsilon(accuracy: ModuleType) -> None:
    anchors = sys.modules["anchors"]
    for batch, design in ((None, dp.Full(1_000)), (100, dp.Poisson(100, 1_000))):
        level = anchors.noise(1.0, 1_000, batch, 30)
        spent = design_epsilon(
            level, anchors.DELTA, design=design, steps=30, adjacency="add_remove"
        )
        assert 0.99 < spent <= 1.0


def test_the_noise_of_a_step_has_the_size_of_its_level(
    accuracy: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    anchors, parts = sys.modules["anchors"], sys.modules["table_parts"]
    monkeypatch.setattr(anchors, "noise", lambda *numbers: 1e4)  # nothing else is seen
    data = anchors.Data(toy(parts))
    jobs = [anchors.Job(anchors.Setting("logistic", 0.3, 1.0, 1), 1.0)] * 500
    moved = anchors.descend(data, jobs, torch.Generator().manual_seed(5))[0]
    assert moved.std() == pytest.approx(4.0 / data.bound * 1e4 / data.count, rel=0.1)


# -- verdicts ---------------------------------------------------------------------------------------------------------


def test_a_verdict_allows_a_thousandth_and_knows_what_is_better(accuracy: ModuleType) -> None:
    assert [accuracy.verdict("auc", v, 0.9) for v in (0.9009, 0.9011, 0.8991, 0.8989)] == [
        *("equal", "better", "equal", "worse")
    ]
    assert [accuracy.verdict("mae", v, 2.0) for v in (2.0019, 2.0021, 1.9981, 1.9979)] == [
        *("equal", "worse", "equal", "better")
    ]


def test_the_best_anchor_is_the_best_median_of_all_methods(accuracy: ModuleType) -> None:
    anchors = accuracy.Results(None)
    anchors.add(
        "t", "1", "DP-GD", {"auc": {"runs": [0.7, 0.8, 0.9]}, "mae": {"runs": [3.0, 1.0, 2.0]}}
    )
    anchors.add(
        "t", "1", "DP-SGD", {"auc": {"runs": [0.1, 0.7, 0.99]}, "mae": {"runs": [1.5, 1.5, 9.0]}}
    )
    assert accuracy.best_anchor(anchors, "t", "1", "auc") == 0.8
    assert accuracy.best_anchor(anchors, "t", "1", "mae") == 1.5
    assert accuracy.best_anchor(anchors, "t", "3", "mae") is None


def test_what_cannot_be_planned_is_reported_and_what_is_known_is_kept(
    accuracy: ModuleType, tmp_path: Path
) -> None:
    parts, ours = sys.modules["table_parts"], sys.modules["ours"]

    def refused(table: object, epsilon: float) -> None:
        raise TypeError("plan() got an unexpected keyword argument 'groups'")

    method = ours.Method("new", "estimator", ("auc",), refused)
    found = accuracy.measured(method, toy(parts), 1.0, 3)
    assert (
        found == "not available: TypeError: plan() got an unexpected keyword argument 'groups'"
    )
    accuracy.Results(tmp_path / "a.json").add("toy", "1", "new", found)
    assert accuracy.Results(tmp_path / "a.json").get("toy", "1", "new") == found
