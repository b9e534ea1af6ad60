"""Previews: scores of real private fits lie in the band, nothing is charged or changed, bad input is named."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.metrics import log_loss, roc_auc_score

import torch_dpsco as dp
from torch_dpsco import estimators as models
from torch_dpsco.estimators.fits import fit_linear
from torch_dpsco.show import preview as module

ROOT = Path(__file__).parents[2]
Table = tuple[np.ndarray, np.ndarray]
REAL = {"HuberRegressor", "QuantileRegressor", "Ridge"}


def table(kind: str, m: int, seed: int = 0, d: int = 4) -> Table:
    rng = np.random.default_rng(seed)
    X = rng.uniform(-1, 1, (m, d))
    score = 3 * X @ np.arange(1, d + 1) / d
    if kind in ("HuberRegressor", "QuantileRegressor"):
        return X, score + rng.standard_t(2.5, size=m)
    if kind == "Ridge":
        return X, score + rng.normal(size=m)
    score = score + rng.logistic(size=m)
    return X, np.digitize(score, [-1, 1]) if kind == "SoftmaxRegression" else (score > 0).astype(
        int
    )


def make(kind: str, n: int, **changes: Any) -> Any:
    known: dict[str, Any] = {"classes": (0, 1, 2) if kind == "SoftmaxRegression" else (0, 1)}
    if kind in REAL:
        known = {"bound_y": 20.0}
    return getattr(models, kind)(**{"n": n, "bound_x": 2.0, **known, **changes})


def scores_of(model: Any, X: np.ndarray, y: np.ndarray) -> dict[str, float]:
    """The scores of a preview, by other code."""
    if hasattr(model, "bound_y"):
        errors = y - model.predict(X)
        return {
            "mean squared error": np.mean(errors**2),
            "mean absolute error": np.mean(np.abs(errors)),
        }
    found = {"accuracy": np.mean(model.predict(X) == y)}
    if hasattr(model, "predict_proba"):
        found["log-loss"] = log_loss(y, model.predict_proba(X), labels=list(model.classes_))
    if len(model.classes_) == 2:
        found["AUC"] = roc_auc_score(y, model.decision_function(X))
    return found


def inside(model: Any, X: np.ndarray, y: np.ndarray, m: int, runs: int = 10) -> dict[str, bool]:
    """Whether scores of a real fit of n rows on m/2 others lie in the bands that the first m rows show."""
    preview = model.preview(X[:m], y[:m], epsilons=(model.epsilon,), runs=runs)
    own, rest = slice(m, m + model.n), slice(m + model.n, m + model.n + m // 2)
    got = scores_of(model.fit(X[own], y[own]), X[rest], y[rest])
    return {name: band.low <= got[name] <= band.high for name, (band,) in preview.scores.items()}


def check_covered(trials: list[dict[str, bool]]) -> None:
    """At least 90 % minus a binomial tail of 1e-6."""
    least = stats.binom.ppf(1e-6, len(trials), 0.9)
    for name in trials[0]:
        assert sum(trial[name] for trial in trials) >= least, name


@pytest.mark.weekly
@pytest.mark.parametrize(
    "kind", ["LogisticRegression", "LinearSVC", "SoftmaxRegression", *sorted(REAL)]
)
def test_scores_of_real_fits_lie_in_the_band(kind):
    trials = []
    for seed in range(60):
        X, y = table(kind, 1200 + 600 + 600, seed)
        trials.append(inside(make(kind, 600, epsilon=(0.3, 1.0, 3.0)[seed % 3]), X, y, 1200))
    check_covered(trials)


@pytest.mark.weekly
@pytest.mark.parametrize("kind", ["LogisticRegression", "HuberRegressor", "Ridge"])
def test_a_small_sample_has_an_honest_band(kind):
    """Where the rows that are held out tell little, beside which the noise is small."""
    trials = []
    for seed in range(60):
        X, y = table(kind, 100 + 2000 + 50, seed)
        trials.append(inside(make(kind, 2000, epsilon=20.0), X, y, 100, runs=8))
    check_covered(trials)


@pytest.mark.weekly
def test_scores_of_real_fits_of_users_lie_in_the_band():
    trials = []
    for seed in range(40):
        rng = np.random.default_rng(seed)
        X, y = table("LogisticRegression", 3000, seed)
        users = np.concatenate([np.arange(1000), rng.integers(0, 1000, 2000)])
        model = make("LogisticRegression", 250, epsilon=2.0)
        public, own, rest = users < 500, (users >= 500) & (users < 750), users >= 750
        shown = model.preview(X[public], y[public], groups=users[public], epsilons=(2.0,)).scores
        got = scores_of(model.fit(X[own], y[own], groups=users[own]), X[rest], y[rest])
        trials.append(
            {name: band.low <= got[name] <= band.high for name, (band,) in shown.items()}
        )
    check_covered(trials)


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        f"{name}_of_previews", ROOT / "examples" / f"{name}.py"
    )
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def adult() -> tuple[Table, Callable[[], Any]]:
    data = example("adult").load_adult()
    found = data.train_features.double().numpy(), data.train_labels.numpy().astype(int)
    return found, lambda: make("LogisticRegression", 8000, bound_x=3.47, intercept_scaling=1.0)


def flights() -> tuple[Table, Callable[[], Any]]:
    data = example("flights").load_flights()
    found = data.train_features[:, :41].double().numpy(), data.train_hours.double().numpy()
    return found, lambda: make("HuberRegressor", 8000, bound_x=2.83, bound_y=24.0)


@pytest.mark.weekly
@pytest.mark.parametrize("load", [adult, flights])
def test_scores_of_real_tables_lie_in_the_band(load):
    """Halves of a real table: trials share records, so that the rate of false alarms is that of about as many."""
    (X, y), model = load()
    trials = []
    for seed in range(16):
        order = np.random.default_rng(seed).permutation(len(y))[: 16_000 + 8000 + 8000]
        trials.append(inside(model(), X[order], y[order], 16_000, runs=6))
    check_covered(trials)


@pytest.mark.slow
def test_a_band_of_another_table_is_missed():
    """The bands are narrow enough to be wrong about data that do not look like the sample."""
    X, y = table("LogisticRegression", 4000)
    noisy = np.where(np.random.default_rng(1).uniform(size=4000) < 0.2, 1 - y, y)
    model = make("LogisticRegression", 2000, epsilon=4.0)
    (band,) = model.preview(X[:2000], y[:2000], epsilons=(4.0,), runs=5).scores["log-loss"]
    assert (
        scores_of(model.fit(X[2000:], noisy[2000:]), X[2000:], noisy[2000:])["log-loss"]
        > band.high
    )
    assert band.high < np.log(2)


# -- numbers ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_fit_without_privacy_is_the_minimizer():
    from sklearn.linear_model import LinearRegression
    from sklearn.linear_model import LogisticRegression as Peer

    for kind, peer in (("LogisticRegression", Peer(C=1e6)), ("Ridge", LinearRegression())):
        X, y = table(kind, 600)
        shown = make(kind, 600).preview(X, y, epsilons=(1.0,), runs=3)
        users = np.random.default_rng(0).permutation(600)
        fitted = peer.fit(X[users[:300]], y[users[:300]])
        name = next(iter(shown.scores))
        rest = X[users[300:]], y[users[300:]]
        wanted = (
            np.mean((rest[1] - fitted.predict(rest[0])) ** 2)
            if kind == "Ridge"
            else log_loss(rest[1], fitted.predict_proba(rest[0]))
        )
        assert shown.not_private[name] == pytest.approx(wanted, abs=2e-4)


@pytest.mark.slow
def test_a_large_epsilon_loses_nothing_and_a_small_one_nearly_all():
    X, y = table("Ridge", 1200)
    shown = make("Ridge", 1000).preview(X, y, epsilons=(50.0, 0.003), runs=8)
    assert shown.epsilons == (0.003, 50.0)
    small, large = (band.median for band in shown.scores["mean squared error"])
    assert large == pytest.approx(shown.not_private["mean squared error"], rel=0.05)
    assert small > 3 * large
    assert shown.constant["mean squared error"] == pytest.approx(y.var(), rel=0.1)


@pytest.mark.slow
def test_a_constant_answer_is_the_best_of_all():
    X, y = table("LogisticRegression", 1200)
    constant = make("LogisticRegression", 1000).preview(X, y, epsilons=(8.0,), runs=3).constant
    assert constant["AUC"] == 0.5
    assert constant["log-loss"] == pytest.approx(np.log(2), abs=0.03)


def test_a_band_holds_the_normal_interval_the_quantiles_and_the_error_of_the_rows():
    values = np.array([0.1, 0.2, 0.3, 0.4, 1.0])
    plain = module._band(values, 0.0, 0.0, up=False)
    reach = stats.t.ppf(0.95, 4) * values.std(ddof=1) * np.sqrt(1.2)
    assert (plain.median, plain.low) == (0.3, 0.0)  # no score is below 0
    assert plain.high == pytest.approx(0.4 + reach)
    wide = module._band(values, 2.0, 0.0, up=False)
    assert wide.high == pytest.approx(0.3 + np.hypot(0.1 + reach, 1.6448536 * np.sqrt(2) * 2.0))
    flat = module._band(np.full(5, 0.5), 0.0, 0.1, up=False)
    assert (flat.low, flat.high) == (pytest.approx(0.4), 0.5)
    rising = module._band(np.full(5, 0.5), 0.0, -0.1, up=True)
    assert (rising.low, rising.high) == (0.5, pytest.approx(0.6))
    assert module._band(np.full(5, 0.5), 0.0, -0.7, up=True).high == 1.0  # no share is above 1
    assert module._band(np.full(5, 0.5), 0.0, -0.1, up=False) == module.Band(
        0.5, 0.5, 0.5
    )  # no luck is believed


def test_draws_of_users_bring_all_their_rows_and_halves_share_none():
    ids = np.array([7, 3, 7, 3, 3, 9])
    codes = np.unique(ids, return_inverse=True)[1]
    sizes = np.bincount(codes)
    halves = module._Halves(
        np.zeros(6),
        np.argsort(codes, kind="stable"),
        np.cumsum(sizes) - sizes,
        sizes,
        np.array([0]),
        np.array([1, 2]),
    )
    rows, users = halves.rows_of(np.array([2, 0, 0]))
    assert ids[rows].tolist() == [9, 3, 3, 3, 3, 3, 3]
    assert users.tolist() == [0, 1, 1, 1, 2, 2, 2]
    assert not set(halves.rows) & set(halves.out)


def test_a_standard_error_of_users_is_that_of_their_means():
    """All rows of a user are alike: the error is that of as many users, not of as many rows."""
    rng = np.random.default_rng(0)
    ids = np.repeat(np.arange(400), 9)
    X, y = np.repeat(rng.normal(size=(400, 1)), 9, axis=0), np.repeat(rng.normal(size=400), 9)
    task = make("HuberRegressor", 400).plan(1).task
    sample = module.Sample(torch.from_numpy(X), torch.from_numpy(y), None, torch.from_numpy(ids))
    halves = module._Halves.of(task, sample, rng)
    error = halves.standard_errors(task, np.zeros(len(halves.out)), rng)["mean absolute error"]
    assert error == pytest.approx(
        np.abs(y[::9]).std() / np.sqrt(200), rel=0.4
    )  # of 50 draws: 4 of their errors


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize(
    "kind", ["LogisticRegression", "SoftmaxRegression", "HuberRegressor", "Ridge"]
)
@pytest.mark.parametrize("prepare", ["auto", None])
def test_answers_of_a_preview_are_those_of_the_model(kind, prepare, monkeypatch):
    monkeypatch.setattr(
        "torch_dpsco.estimators.fits.noise_generator",
        lambda device, given: torch.Generator().manual_seed(0),
    )
    X, y = table(kind, 300)
    model = make(
        kind, 300, epsilon=8.0, prepare=prepare, feature_center=None if prepare else [0.5] * 4
    ).fit(X, y)
    targets, _ = model._read(y, 300, torch.device("cpu"))
    fitted = fit_linear(model.plan_, torch.from_numpy(X), targets)
    wild = torch.from_numpy(4 * X)  # beyond the bound
    answer = model.predict if kind in REAL else model.decision_function
    np.testing.assert_allclose(
        module._answer(model._unspent(), model.plan_, fitted, wild),
        answer(wild.numpy()),
        rtol=1e-9,
    )


# -- nothing is spent ------------------------------------------------------------------------------


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("groups", [None, np.arange(400) % 100])
def test_a_preview_charges_nothing_and_leaves_the_model_alone(groups):
    X, y = table("LogisticRegression", 400)
    unit = "example" if groups is None else "user"
    ledger = dp.Accountant(dp.Budget(2.0, 1e-5, adjacency="add_remove", unit=unit))
    model = make("LogisticRegression", 100, accountant=ledger)
    before = copy.copy(vars(model))
    model.preview(X, y, groups, epsilons=(1.0, 8.0), runs=3)
    assert vars(model) == before
    assert len(ledger) == 0
    make("LogisticRegression", 100).preview(dim=4)


def test_without_a_sample_public_numbers_speak_alone():
    shown = make("LogisticRegression", 1500).preview(dim=5000, epsilons=(0.01, 1.0))
    assert shown.scores == {}
    assert shown.hopeless == (0.01,)
    plan = make("LogisticRegression", 1500, epsilon=0.01).plan(5000)
    ((_, share, _),) = plan.noise_shares()
    assert shown.noise[0] == pytest.approx(
        share * np.sqrt(1500)
    )  # in as many directions as there are rows
    assert "hopeless at epsilon 0.01" in str(shown)
    assert "log-loss" not in str(shown)
    assert make("LogisticRegression", 1500).preview(dim=4, unit="user").unit == "user"


# -- what is shown ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shown() -> module.Preview:
    X, y = table("LogisticRegression", 200)
    return make("LogisticRegression", 200).preview(X, y, epsilons=(1.0, 4.0), runs=3)


@pytest.mark.slow
def test_a_preview_prints_a_table(shown):
    lines = str(shown).splitlines()
    assert lines[0].startswith(
        "LogisticRegression, n=200 examples, delta 1e-06: simulated on 200 public examples"
    )
    assert [line.split("  ")[0] for line in lines[1:]] == [
        "epsilon",
        "1",
        "4",
        "not private",
        "a constant",
    ]


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize(
    ("kind", "changes", "names"),
    [
        ("SoftmaxRegression", {}, ["log-loss", "accuracy"]),
        ("SoftmaxRegression", {"classes": (0, 1)}, ["log-loss", "AUC"]),
        ("LinearSVC", {"loss": "hinge"}, ["accuracy", "AUC"]),
        ("Ridge", {}, ["mean squared error"]),
        ("QuantileRegressor", {}, ["mean absolute error"]),
        ("QuantileRegressor", {"quantile": 0.9, "width": 0.0}, ["pinball loss"]),
        ("TiltedClassifier", {"n_min": 50, "radius": 2.0}, ["log-loss", "AUC"]),
        ("AdversarialClassifier", {}, ["log-loss", "AUC"]),
    ],
)
def test_every_model_has_scores_of_its_own_kind(kind, changes, names):
    X, y = table("LogisticRegression" if changes.get("classes") else kind, 200)
    shown = make(kind, 100, epsilon=8.0, **changes).preview(X, y, epsilons=(8.0,), runs=3)
    assert list(shown.scores) == names
    for name in names:
        (band,) = shown.scores[name]
        assert 0 <= band.low <= band.median <= band.high
        better = shown.not_private[name] - shown.constant[name]
        assert (better > 0) == (name in ("AUC", "accuracy"))


# -- bad input -------------------------------------------------------------------------------------

X, Y = table("LogisticRegression", 60)
BAD = {
    "a small sample": ({"X_like": X[:49], "y_like": Y[:49]}, "X_like must have at least 50"),
    "few users": ({"groups": [k % 20 for k in range(60)]}, "groups must have at least 50"),
    "no targets": ({"y_like": None}, "X_like and y_like must be given together"),
    "an unknown label": (
        {"y_like": [3, *Y[1:]]},
        "y_like must hold finite targets, or labels of classes",
    ),
    "one class": ({"y_like": np.ones(60)}, "y_like must hold two classes"),
    "a missing value": ({"X_like": np.where(X > 0.9, np.nan, X)}, "X contains NaN"),
    "rows and dim": ({"dim": 4}, r"one of them \(got both\)"),
    "neither": ({"X_like": None, "y_like": None}, r"must be given, one of them \(got neither\)"),
    "targets alone": ({"X_like": None, "dim": 4}, "X_like and y_like must be given together"),
    "no epsilon": ({"epsilons": ()}, "epsilons must hold at least one"),
    "a negative epsilon": ({"epsilons": (1.0, -1.0)}, "epsilons must be > 0"),
    "a word": ({"epsilons": "1"}, "epsilons must be a list"),
    "two runs": ({"runs": 2}, r"runs must be in \[3, 1000\]"),
    "a unit": ({"unit": "row"}, "unit must be"),
}


@pytest.mark.cases(4, 2)
@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_previewed_is_refused_by_name(name):
    changes, words = BAD[name]
    with pytest.raises(ValueError, match=words):
        make("LogisticRegression", 60).preview(**{"X_like": X, "y_like": Y, **changes})
