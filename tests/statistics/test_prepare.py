"""Private scales, quantiles and fillings: no row moves them by more than is charged, and they find what is there."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from sklearn.base import clone
from sklearn.pipeline import make_pipeline
from sklearn.utils.estimator_checks import check_estimator

import torch_dpsco as dp
from torch_dpsco.accounting.analysis.gaussian import gaussian_mu
from torch_dpsco.errors import AdjacencyError, BudgetExceeded, PrivacyError, UnitError
from torch_dpsco.estimators import LogisticRegression
from torch_dpsco.estimators.reading import NotFittedError
from torch_dpsco.statistics import prepare
from torch_dpsco.statistics.prepare import (
    PrivateImputer,
    PrivateQuantiles,
    PrivateStandardScaler,
    PrivateTransformer,
)

LOWER, UPPER = [0.0, -3.0], [10.0, 5.0]
KINDS: dict[str, Any] = {
    "scaler": PrivateStandardScaler,
    "quantiles": PrivateQuantiles,
    "mean": PrivateImputer,
}


def make(name: str, **changes: Any) -> PrivateTransformer:
    made = KINDS[name](**{"lower": LOWER, "upper": UPPER, "adjacency": "add_remove", **changes})
    assert isinstance(made, PrivateTransformer)
    return made


def table(count: int = 4000) -> np.ndarray:
    draws = np.random.default_rng(3)
    rows = np.stack([draws.normal(4.0, 1.0, count), draws.uniform(-2.0, 2.0, count)], axis=1)
    rows[::7, 0] = math.nan
    return rows


VALUES = st.one_of(
    st.floats(allow_nan=True, allow_infinity=True),
    st.sampled_from([0.0, 10.0, -3.0, 5.0, 1.0, 5.0 + 2.0**-20]),
)


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=60, deadline=None)
@given(
    rows=hnp.arrays(np.float64, (3, 2), elements=VALUES),
    other=hnp.arrays(np.float64, (1, 2), elements=VALUES),
)
def test_no_row_moves_a_release_by_more(name: str, rows: np.ndarray, other: np.ndarray) -> None:
    """The noiseless vectors of neighbors, on the grid of the release, are within the charged sensitivities."""
    found: list[torch.Tensor] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            prepare, "exact_release", lambda value, event, source: found.append(value) or value
        )
        null = np.full((1, 2), math.nan)
        for neighbor in (
            rows,
            np.vstack([rows, other]),
            np.vstack([rows, null]),
            np.vstack([rows[:-1], other]),
        ):
            make(name).fit(neighbor)
    sens = dict(make(name).event(2).sens)
    slack = 1 - 2.0**-13  # of which the rounding to the grid of the noise is a part
    base, added, zeroed, replaced = found
    assert float((added - base).norm()) <= sens["add_remove"] * slack
    assert float((added - zeroed).norm()) <= sens["zero_out"] * slack
    assert float((replaced - base).norm()) <= sens["replace_one"] * slack


@pytest.mark.parametrize("name", ["scaler", "mean", "quantiles"])
def test_sensitivities_are_attained(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[torch.Tensor] = []
    monkeypatch.setattr(
        prepare, "exact_release", lambda value, event, source: found.append(value) or value
    )
    low, high = np.array([LOWER]), np.array([UPPER])
    for rows in (low[:0], low, high):
        make(name).fit(rows)
    sens = dict(make(name).event(2).sens)
    assert float((found[1] - found[0]).norm()) == pytest.approx(sens["add_remove"], rel=1e-3)
    assert float((found[2] - found[1]).norm()) == pytest.approx(sens["replace_one"], rel=1e-3)


@pytest.mark.parametrize("adjacency", ["add_remove", "zero_out", "replace_one"])
@pytest.mark.parametrize("name", KINDS)
def test_what_is_charged_is_what_was_asked_for(name: str, adjacency: Any) -> None:
    ledger = dp.Accountant(adjacency=adjacency)
    fitted = make(name, epsilon=0.7, delta=1e-5, adjacency=adjacency, accountant=ledger).fit(
        table(50)
    )
    assert 0.7 * (1 - 1e-6) < ledger.get_epsilon(1e-5) <= 0.7
    assert fitted.privacy_.adjacency == adjacency
    event = make(name, epsilon=0.7, delta=1e-5, adjacency=adjacency).event(2)
    assert event.exact
    assert dict(event.sens)[adjacency] / event.sigma <= gaussian_mu(0.7, 1e-5) * (1 + 1e-12)


def test_nothing_is_drawn_that_was_not_charged_by_a_transformer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ledger = dp.Accountant(dp.Budget(0.5, 1e-6, adjacency="add_remove"))
    monkeypatch.setattr(prepare, "exact_release", lambda *_: pytest.fail("drawn"))
    scaler = make("scaler", epsilon=0.6, accountant=ledger)
    with pytest.raises(BudgetExceeded):
        scaler.fit(table())
    assert not hasattr(scaler, "mean_")
    with pytest.raises(NotFittedError, match="call fit before"):
        scaler.transform(table())


def test_a_ledger_of_another_adjacency_is_refused_by_a_transformer() -> None:
    ledger = dp.Accountant(adjacency="replace_one")
    with pytest.raises(AdjacencyError, match="accountant must have the adjacency 'add_remove'"):
        make("scaler", accountant=ledger).fit(table())
    with pytest.raises(UnitError):
        make("scaler", accountant=dp.Accountant(adjacency="add_remove", unit="user")).fit(
            table()
        )
    assert len(ledger) == 0


def test_each_fit_draws_its_own_noise() -> None:
    first, second = (make("scaler").fit(table()).mean_ for _ in range(2))
    assert (first != second).all()


def test_scales_and_fillings_are_those_of_the_table() -> None:
    """Within 7 standard deviations of the noise: a fit in 10^11 is not."""
    rows = table()
    std = 7 * make("scaler", epsilon=4.0).event(2).sigma / 3000 * np.array([5.0, 4.0])
    scaler = make("scaler", epsilon=4.0).fit(rows)
    assert isinstance(scaler, PrivateStandardScaler)
    assert (abs(scaler.mean_ - np.nanmean(rows, axis=0)) < 2 * std).all()
    assert np.allclose(scaler.scale_, np.nanstd(rows, axis=0), rtol=0.2)
    filled = make("mean", epsilon=4.0).fit_transform(rows)
    assert np.isfinite(filled).all()
    assert np.allclose(filled[0, 0], np.nanmean(rows[:, 0]), atol=0.5)
    assert (filled[1::7] == rows[1::7]).all()
    found = make("quantiles", epsilon=4.0).fit(rows)
    assert isinstance(found, PrivateQuantiles)
    assert np.allclose(
        found.quantiles_, np.nanquantile(rows, [0.25, 0.5, 0.75], axis=0), atol=0.4
    )


@pytest.mark.parametrize("name", ["scaler", "quantiles"])
def test_transformed_rows_are_within_their_public_bound(name: str) -> None:
    fitted: Any = make(name, epsilon=0.01).fit(table(30))
    rows = np.array([[1e300, -1e300], [0.0, 0.0], [math.inf, 1.0], [math.nan, math.nan]])
    image = fitted.transform(rows)
    assert np.isnan(image[2:]).tolist() == [[True, False], [True, True]]
    norms = np.linalg.norm(np.nan_to_num(image), axis=1)
    assert (norms <= fitted.bound_x(2)).all()


def test_places_among_records_rise_with_the_value() -> None:
    fitted = make("quantiles").fit(table())
    grid = np.linspace(LOWER, UPPER, 500)
    image = fitted.transform(grid)
    assert (np.diff(image, axis=0) > 0).all()
    assert np.allclose(image[[0, -1]], [[-1, -1], [1, 1]])


def test_a_table_without_records_is_a_fit() -> None:
    for name in KINDS:
        assert make(name).fit(np.zeros((0, 2))).n_features_in_ == 2


@pytest.mark.slow
def test_a_pipeline_has_one_ledger() -> None:
    rows = table()
    y = (np.nan_to_num(rows[:, 1]) > 0).astype(int)
    ledger = dp.Accountant(dp.Budget(3.0, 1e-5, adjacency="add_remove"))
    parts = [make(name, epsilon=0.5, accountant=ledger) for name in ("mean", "scaler")]
    scaler: Any = parts[1]
    model = LogisticRegression(
        epsilon=1.5,
        delta=1e-6,
        adjacency="add_remove",
        n=4000,
        bound_x=scaler.bound_x(2),
        classes=(0, 1),
        accountant=ledger,
    )
    pipeline = make_pipeline(*parts, model)
    with pytest.raises(PrivacyError, match="must be planned before the first release"):
        make_pipeline(*(clone(part) for part in parts), clone(model)).fit(rows, y)
    ledger = dp.Accountant(dp.Budget(3.0, 1e-5, adjacency="add_remove"))
    for part in parts:
        ledger.declare(part.event(2), 1)
        part.accountant = ledger
    ledger.declare(model.plan(2).event(), 1)
    model.accountant = ledger
    pipeline.fit(rows, y)
    whole = ledger.get_epsilon(1e-5)
    assert 1.5 < whole <= 3.0
    assert model.privacy_.epsilon == whole
    assert pipeline.score(np.nan_to_num(rows), y) > 0.9


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lower": None, "upper": None}, "lower, upper must be given: public ends"),
        ({"lower": [1.0, 2.0, 3.0]}, "numbers, or 2 of them"),
        ({"lower": 20.0}, "lower must be below upper"),
        ({"upper": math.inf}, "upper must be .*finite"),
        ({"lower": ["a", 1.0]}, "lower must be a number"),
        ({"lower": {0.0}}, "lower must be a number"),
        ({"epsilon": 0.0}, "epsilon must be > 0"),
        ({"delta": 0.0}, "delta"),
        ({"adjacency": "sideways"}, "adjacency"),
    ],
)
def test_settings_out_of_range_are_named(changes: dict[str, Any], words: str) -> None:
    ledger = dp.Accountant(adjacency="add_remove")
    for name in KINDS:
        with pytest.raises(ValueError, match=words):
            make(name, **{"accountant": ledger, **changes}).fit(table(10))
    assert len(ledger) == 0


def test_settings_of_one_kind_are_named() -> None:
    ledger = dp.Accountant(adjacency="add_remove")
    for made, words in (
        (make("scaler", clip=0.0), "clip must be > 0"),
        (make("quantiles", bins=1), "bins must be 2 to 1024"),
        (make("quantiles", levels=[2.0]), "levels"),
    ):
        made.accountant = ledger
        with pytest.raises(ValueError, match=words):
            made.fit(table(10))
        assert len(ledger) == 0
    with pytest.raises(TypeError, match="unexpected keyword argument 'with_mean'"):
        PrivateStandardScaler(with_mean=False)


def test_names_of_columns_are_kept() -> None:
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("sklearn")
    fitted = make("scaler").fit(pandas.DataFrame(table(20), columns=["age", "hours"]))
    assert fitted.get_feature_names_out().tolist() == ["age", "hours"]
    assert make("scaler").fit(table(20)).get_feature_names_out().tolist() == ["x0", "x1"]


EXPECTED = {
    "check_estimators_nan_inf": "no value of a record may raise",
    "check_estimators_empty_data_messages": "the number of records is private",
    "check_dtype_object": "arrays of objects are refused",
}


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.filterwarnings("ignore")
def test_a_transformer_passes_the_checks_of_scikit_learn(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All fits draw the same noise here, or two of them would differ, as they must."""
    monkeypatch.setattr(
        prepare, "noise_generator", lambda device, given: torch.Generator(device).manual_seed(0)
    )
    check_estimator(make(name, lower=-10.0, upper=10.0), expected_failed_checks=EXPECTED)
