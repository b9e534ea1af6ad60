"""Fits to records in blocks, and to sparse rows: those of the same records in memory, for sources that keep still."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch

import torch_dpsco as dp
from tests.estimators.models import N, make, rows, targets
from torch_dpsco.errors import ConditionError, NotCertifiedError, UnitError
from torch_dpsco.estimators import LogisticRegression, reading
from torch_dpsco.estimators import records as base
from torch_dpsco.streams import blocks as parts

SIZES = {"one block": [N], "single rows": [1], "odd": [7, 31], "empty ones": [0, 50, 0, 0, 9]}
PARTED = {
    "LogisticRegression": {"reg": 5.0},
    "LinearSVC": {"mechanism": "output"},
    "SoftmaxRegression": {"reg": 20.0},
    "HuberRegressor": {"mechanism": "objective"},
    "QuantileRegressor": {"mechanism": "objective", "width": 2.0},
    "Ridge": {},
}
Source = Callable[[], Iterator[tuple[Any, ...]]]


def in_blocks(sizes: list[int], *columns: np.ndarray) -> Source:
    """Returns a source of these records, in blocks of these sizes, over and over."""

    def read() -> Iterator[tuple[Any, ...]]:
        start, place = 0, 0
        while start < len(columns[0]):
            stop = start + sizes[place % len(sizes)]
            yield tuple(column[start:stop] for column in columns)
            start, place = stop, place + 1

    return read


def table(name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows, targets and weights, some of null records: a NaN, an infinity, a label that is none, a weight of NaN."""
    X = rows()
    y = targets(name, X).astype(float)
    weights = np.linspace(0.2, 1.4, N)
    X[3, 1], X[40, 0], y[41], weights[99] = (
        np.nan,
        np.inf,
        17.0 if "Reg" in name and "or" in name else 9.0,
        np.nan,
    )
    return X, y, weights


@pytest.fixture(autouse=True)
def short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes parts of 32 rows, or 8 of 4: as a large table has them."""
    monkeypatch.setattr(base, "BLOCK_ROWS", 4)
    monkeypatch.setattr(parts, "_PART_ENTRIES", 4 * 4 * 8)


@pytest.mark.cases(0, 1)
@pytest.mark.filterwarnings("ignore::torch_dpsco.errors.UtilityWarning")
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("name", PARTED)
def test_blocks_of_any_sizes_release_what_the_same_records_in_memory_do(name, sizes, same_noise):
    X, y, weights = table(name)
    whole = make(name, **PARTED[name]).fit(X, y, weights)
    fitted = make(name, **PARTED[name]).fit(in_blocks(sizes, X, y, weights))
    np.testing.assert_allclose(fitted.coef_, whole.coef_, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(fitted.intercept_, whole.intercept_, rtol=1e-9, atol=1e-9)
    assert fitted.privacy_.epsilon == whole.privacy_.epsilon
    assert fitted.n_features_in_ == 3


@pytest.mark.cases(0, 1)
@pytest.mark.filterwarnings("ignore::torch_dpsco.errors.UtilityWarning")
@pytest.mark.parametrize("name", ["LogisticRegression", "HuberRegressor", "Ridge"])
def test_units_are_measured_in_blocks_as_in_memory(name, same_noise, monkeypatch):
    monkeypatch.setattr(parts, "_PART_ENTRIES", 4 * 4 * 256)
    monkeypatch.setattr(base, "BLOCK_ROWS", 128)
    n = 4000
    X = np.random.default_rng(1).normal(size=(n, 3))
    y = targets(name, X)
    settings = {"n": n, "epsilon": 8.0, "bound_x": 20.0}
    if name == "HuberRegressor":
        settings |= {"mechanism": "objective", "threshold": 1.0}
    whole = make(name, **settings).fit(X, y)
    fitted = make(name, **settings).fit(in_blocks([999], X, y))
    assert whole.plan_.task.prepare is not None
    np.testing.assert_allclose(fitted.coef_, whole.coef_, rtol=1e-9)
    assert torch.equal(
        fitted.units_.rows.shift_and_scale[0], whole.units_.rows.shift_and_scale[0]
    )
    assert (fitted.units_.location, fitted.units_.spread) == (
        whole.units_.location,
        whole.units_.spread,
    )


@pytest.mark.slow
def test_null_records_in_blocks_contribute_nothing(same_noise):
    X, y, weights = table("LogisticRegression")
    used = np.isfinite(X).all(1) & (y < 2) & np.isfinite(weights)
    assert used.sum() == N - 4
    model, fewer = make("LogisticRegression", reg=5.0), make("LogisticRegression", reg=5.0)
    model.fit(in_blocks([8], X, y, weights))
    fewer.fit(in_blocks([8], X[used], y[used], weights[used]))
    # the first guess of the solver is of other rows: both are within the certified distance
    np.testing.assert_allclose(model.coef_, fewer.coef_, atol=2 * model.plan_.distance)


@pytest.mark.weekly
def test_a_block_of_wrong_labels_only_counts_for_nothing(same_noise):
    X, y, _ = table("LogisticRegression")
    y = y.astype(object)
    y[16:32] = "none of them"
    model = make("LogisticRegression").fit(in_blocks([16], X, y))
    whole = make("LogisticRegression").fit(X, y)
    np.testing.assert_allclose(model.coef_, whole.coef_, rtol=1e-9)


# -- a source must keep still ---------------------------------------------------------------------------------------


def moved_record(X: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    X = X.copy()
    X[77, 2] = np.nextafter(X[77, 2], 9)
    return X, y


def other_label(X: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    y = y.copy()
    y[5] = 1 - y[5]
    return X, y


CHANGES = {
    "one bit of a feature": moved_record,
    "a label": other_label,
    "one record less": lambda X, y: (X[1:], y[1:]),
    "one record more": lambda X, y: (np.concatenate([X, X[:1]]), np.concatenate([y, y[:1]])),
    "another order": lambda X, y: (X[::-1].copy(), y[::-1].copy()),
}


@pytest.mark.cases(2, 1)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("reading", [2, 5])
@pytest.mark.parametrize("mechanism", ["objective", "output", "noisy_gd"])
def test_a_source_that_gives_other_records_at_a_later_reading_is_refused(
    mechanism, reading, change
):
    X = rows()
    y = targets("LogisticRegression", X)
    readings = 0

    def source() -> Iterator[tuple[Any, ...]]:
        nonlocal readings
        readings += 1
        return in_blocks([16], *((X, y) if readings - 1 < reading else change(X, y)))()

    model = make("LogisticRegression", mechanism=mechanism)
    with pytest.raises(NotCertifiedError, match="same records in the same order"):
        model.fit(source)
    assert not hasattr(model, "coef_")


def in_one_buffer(blocks: Iterator[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
    """Gives the same blocks in memory that is filled again for each."""
    rooms: list[np.ndarray] = []
    for block in blocks:
        rooms = rooms or [np.empty((N, *column.shape[1:]), column.dtype) for column in block]
        for room, column in zip(rooms, block, strict=True):
            room[: len(column)] = column
        yield tuple(room[: len(column)] for room, column in zip(rooms, block, strict=True))


@pytest.mark.filterwarnings("ignore::torch_dpsco.errors.UtilityWarning")
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_a_source_that_fills_one_block_again_gives_each_record_once(sizes, same_noise):
    source = in_blocks(sizes, *table("LogisticRegression"))
    whole = make("LogisticRegression", reg=5.0).fit(source)
    fitted = make("LogisticRegression", reg=5.0).fit(lambda: in_one_buffer(source()))
    np.testing.assert_array_equal(fitted.coef_, whole.coef_)


def test_one_record_of_a_block_that_is_filled_again_moves_the_answer_by_its_sensitivity_at_most(
    monkeypatch,
):
    monkeypatch.setattr(parts, "_PART_ENTRIES", 2**22)
    y = np.arange(N) % 2
    X = np.random.default_rng(0).uniform(-1, 1, size=(N, 2)) / 1.5

    def fitted(X: np.ndarray, y: np.ndarray) -> Any:
        settings = {
            "mechanism": "output",
            "reg": 4.0,
            "adjacency": "replace_one",
            "epsilon": 1e5,
            "delta": 1e-5,
        }
        model = LogisticRegression(n=N, bound_x=1.0, classes=(0, 1), **settings)
        return model.fit(lambda: in_one_buffer(in_blocks([10], X, y)()))

    other, label = X.copy(), y.copy()
    other[-1], label[-1] = [0.7, 0.7], 1 - y[-1]
    one, two = fitted(X, y), fitted(other, label)
    moved = np.linalg.norm(
        np.append(one.coef_, one.intercept_) - np.append(two.coef_, two.intercept_)
    )
    assert moved < dict(one.plan_.event().sens)["replace_one"]


@pytest.mark.weekly
def test_other_blocks_of_the_same_records_are_no_change(same_noise):
    X = rows()
    y = targets("LogisticRegression", X)
    readings = 0

    def source() -> Iterator[tuple[Any, ...]]:
        nonlocal readings
        readings += 1
        return in_blocks([1 + readings], X, y)()

    fitted, whole = make("LogisticRegression").fit(source), make("LogisticRegression").fit(X, y)
    np.testing.assert_allclose(fitted.coef_, whole.coef_, rtol=1e-9)
    assert readings > 4


# -- what is refused, before anything is charged ----------------------------------------------------------------------


@pytest.mark.cases(1, 1)
@pytest.mark.filterwarnings("ignore::torch_dpsco.errors.UtilityWarning")
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("TiltedClassifier", {}, "tilted and adversarial"),
        ("AdversarialClassifier", {}, "tilted and adversarial"),
    ],
)
def test_what_is_no_sum_over_records_is_refused_by_name_and_charges_nothing(
    name, settings, words, sparse
):
    X = rows()
    y = targets(name, X)
    ledger = dp.Accountant(adjacency="add_remove")
    given = (scipy.sparse.csr_matrix(X), y) if sparse else (in_blocks([9], X, y),)
    with pytest.raises(ConditionError, match=words):
        make(name, accountant=ledger, **settings).fit(*given)
    assert len(ledger) == 0


def test_groups_of_blocks_are_refused():
    X = rows()
    with pytest.raises(ConditionError, match="groups must be None"):
        make("LogisticRegression").fit(
            in_blocks([9], X, targets("LogisticRegression", X)), groups=np.arange(N)
        )


def read_of(*blocks: Any) -> Callable[[], Iterator[Any]]:
    return lambda: iter(blocks)


X4, Y4 = np.ones((4, 3)), np.ones(4)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (read_of(), "at least one"),
        (read_of(X4), "pairs"),
        (read_of((X4,)), "pairs"),
        (lambda: 3, "iterator over blocks"),
        (read_of((X4, Y4), (X4[:, :2], Y4)), "same dtype and width"),
        (read_of((X4, Y4), (X4.astype(np.float32), Y4)), "same dtype and width"),
        (read_of((X4, Y4[:3])), "inconsistent numbers"),
        (read_of((X4, Y4, Y4[:3])), "sample_weight"),
    ],
)
def test_blocks_of_other_shapes_are_refused_by_shape(source, words):
    with pytest.raises(ValueError, match=words):
        make("LogisticRegression").fit(source)


def test_targets_beside_blocks_are_refused():
    with pytest.raises(ValueError, match="y=None beside them"):
        make("LogisticRegression").fit(read_of((X4, Y4)), Y4)


def test_more_records_than_promised_are_refused_without_reading_them_all():
    read = 0

    def source() -> Iterator[tuple[Any, ...]]:
        nonlocal read
        while True:
            read += 1
            yield np.ones((2**16, 3)), np.ones(2**16)

    with pytest.raises(UnitError, match="n_max=240"):
        make("LogisticRegression").fit(source)
    assert read < 5


@pytest.mark.parametrize("count", [N - 1, N + 1])
def test_blocks_must_have_the_public_number_of_records_where_it_is_public(count):
    X = rows(count)
    model = make("LogisticRegression", adjacency="replace_one")
    with pytest.raises(UnitError, match="n=120"):
        model.fit(in_blocks([50], X, targets("LogisticRegression", X)))


@pytest.mark.slow
def test_a_cap_on_records_that_float64_does_not_certify_is_named():
    with pytest.raises(
        dp.errors.InfeasibleError, match="n_max=2000000000000 records are more than"
    ):
        make("LogisticRegression", n=10**12, delta=1e-14).plan(20)


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("delta", [1e-9, 0.0])
@pytest.mark.parametrize("n", [10**7, 10**8])
def test_what_float64_hides_of_many_records_costs_little(n, delta):
    """On a quadratic model of slope L <= 1, curvature 1/4 and |w| of about 15, in the units of measured rows."""
    plan = make("LogisticRegression", n=n, delta=delta, mechanism="objective", bound_x=0.5).plan(
        20
    )
    std = plan.output_scale * (1 if delta else math.sqrt(22))
    assert 0.25 * 21 * std**2 / 2 < 2e-4
    assert plan.reg * 30.0**2 / (2 * n) < 1e-3


def test_no_records_at_all_are_a_fit():
    model = make("LogisticRegression").fit(read_of((np.zeros((0, 3)), np.zeros(0))))
    assert np.isfinite(model.coef_).all()


# -- sparse rows ------------------------------------------------------------------------------------------------------


@pytest.mark.weekly
@pytest.mark.filterwarnings("ignore::torch_dpsco.errors.UtilityWarning")
@pytest.mark.parametrize(
    "kind", ["csr_array", "csr_matrix", "csc_matrix", "coo_array", "lil_matrix"]
)
@pytest.mark.parametrize("name", ["LogisticRegression", "Ridge"])
def test_sparse_rows_release_what_dense_ones_do(name, kind, same_noise):
    X, y, weights = table(name)
    X[np.abs(X) < 0.7] = 0
    given = getattr(scipy.sparse, kind)(X)
    whole, fitted = make(name).fit(X, y, weights), make(name).fit(given, y, weights)
    np.testing.assert_allclose(fitted.coef_, whole.coef_, rtol=1e-9)
    to_predict = np.nan_to_num(X, posinf=0.0)
    np.testing.assert_array_equal(
        fitted.predict(getattr(scipy.sparse, kind)(to_predict)), fitted.predict(to_predict)
    )


@pytest.mark.weekly
def test_sparse_rows_become_dense_a_few_at_a_time(monkeypatch):
    monkeypatch.setattr(reading, "_DENSE_ENTRIES", 3 * 5)
    seen = []
    read = reading.as_features

    def noted(X: Any) -> torch.Tensor:
        seen.append(X.shape)
        return read(X)

    monkeypatch.setattr(reading, "as_features", noted)
    X = rows()
    model = make("LogisticRegression").fit(
        scipy.sparse.csr_matrix(X), targets("LogisticRegression", X)
    )
    model.predict(scipy.sparse.csr_matrix(X))
    assert max(seen) == (5, 3)


@pytest.mark.weekly
def test_a_sparse_block_is_read_as_a_dense_one(same_noise):
    X = rows()
    y = targets("LogisticRegression", X)
    source = read_of((scipy.sparse.csr_matrix(X[:50]), y[:50]), (X[50:], y[50:]))
    fitted, whole = make("LogisticRegression").fit(source), make("LogisticRegression").fit(X, y)
    np.testing.assert_allclose(fitted.coef_, whole.coef_, rtol=1e-9)
