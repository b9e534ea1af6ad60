"""Fits to a table in partitions: those of the same records in memory, whatever the partitions are."""

from __future__ import annotations

import itertools
import pickle
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset
import pytest

import torch_dpsco as dp
from tests.estimators.models import N, make, rows, targets
from tests.estimators.test_blocks import CHANGES, PARTED, in_one_buffer, table
from torch_dpsco.errors import ConditionError, NotCertifiedError, UnitError
from torch_dpsco.step import exact_noise
from torch_dpsco.streams.partitions import Partitions

cloudpickle = pytest.importorskip("cloudpickle")  # as engines pickle functions


class Listed:
    """An engine in this process; unless told not to, it pickles what goes to a partition and what comes back."""

    pickled = True

    def __init__(self, *parts: list[tuple[Any, ...]]) -> None:
        self.parts, self.runs = parts, 0
        self.sent, self.returned = [], []

    def run(self, function: Callable[[Iterator[Any]], Any]) -> list[Any]:
        self.runs += 1
        if not self.pickled:
            return [function(iter(part)) for part in self.at()]
        self.sent.append(cloudpickle.dumps(function))
        self.returned.append(
            [pickle.dumps(cloudpickle.loads(self.sent[-1])(iter(part))) for part in self.at()]
        )
        return [pickle.loads(result) for result in self.returned[-1]]

    def at(self) -> Any:
        return self.parts


def in_partitions(sizes: list[int], *columns: np.ndarray) -> Listed:
    """Partitions of these sizes, the last one of what is left, in blocks of 7 rows; the first block has none."""
    ends = [0, *np.cumsum(sizes).tolist(), len(columns[0])]
    parts = [
        [tuple(column[:0] for column in columns)]
        + [
            tuple(column[at : min(at + 7, stop)] for column in columns)
            for at in range(start, stop, 7)
        ]
        for start, stop in itertools.pairwise(ends)
    ]
    return Listed(*parts)


SIZES = {
    "one": [],
    "equal": [30, 30, 30],
    "odd": [1, 0, 64, 7],
    "first empty": [0, 0, 50],
    "single": [1] * 15,
}


def labelled() -> tuple[np.ndarray, np.ndarray]:
    X = rows()
    return X, targets("LogisticRegression", X)


@pytest.mark.cases(0, 1)
@pytest.mark.filterwarnings("ignore::torch_dpsco.errors.UtilityWarning")
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("name", PARTED)
def test_partitions_of_any_sizes_release_what_the_same_records_in_memory_do(
    name, sizes, same_noise
):
    X, y, weights = table(name)
    whole = make(name, **PARTED[name]).fit(X, y, weights)
    source = in_partitions(sizes, X, y, weights)
    source.pickled = False
    assert isinstance(source, Partitions)
    fitted = make(name, **PARTED[name]).fit(source)
    np.testing.assert_allclose(fitted.coef_, whole.coef_, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(fitted.intercept_, whole.intercept_, rtol=1e-9, atol=1e-9)
    assert fitted.privacy_ == whole.privacy_
    assert fitted.plan_ == whole.plan_  # no noise is less, and none is more
    assert fitted.n_features_in_ == 3


@pytest.mark.filterwarnings("ignore::torch_dpsco.errors.UtilityWarning")
def test_a_partition_whose_blocks_are_in_one_buffer_has_each_record_once(same_noise):
    class Reusing(Listed):
        pickled = False

        def at(self) -> Any:
            return map(in_one_buffer, self.parts)

    plain = in_partitions(SIZES["odd"], *table("LogisticRegression"))
    plain.pickled = False
    fitted = [
        make("LogisticRegression", reg=5.0).fit(source)
        for source in (plain, Reusing(*plain.parts))
    ]
    np.testing.assert_array_equal(fitted[0].coef_, fitted[1].coef_)


@pytest.mark.cases(0, 1)
@pytest.mark.filterwarnings("ignore::torch_dpsco.errors.UtilityWarning")
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("LogisticRegression", {"delta": 0.0}),
        ("LogisticRegression", {"mechanism": "noisy_gd"}),
        ("LogisticRegression", {"mechanism": "output"}),
        ("LinearSVC", {"loss": "hinge"}),
        ("LogisticRegression", {"mechanism": "output", "secure": "exact"}),
        ("SoftmaxRegression", {}),
        ("SoftmaxRegression", {"secure": "exact"}),
        ("Ridge", {"mechanism": "adassp"}),
        ("HuberRegressor", {"mechanism": "objective"}),
    ],
)
def test_every_mechanism_of_sums_works_where_all_is_pickled(name, settings, same_noise):
    X = rows()
    y = targets(name, X)
    whole, fitted = (
        make(name, **settings).fit(X, y),
        make(name, **settings).fit(in_partitions([50, 0, 30], X, y)),
    )
    assert fitted.mechanism_ == whole.mechanism_
    np.testing.assert_allclose(fitted.coef_, whole.coef_, rtol=1e-9, atol=1e-9)


@pytest.mark.weekly
@pytest.mark.parametrize("name", ["LogisticRegression", "HuberRegressor", "Ridge"])
def test_units_are_measured_in_partitions_as_in_memory(name, same_noise):
    n = 4000
    X = np.random.default_rng(1).normal(size=(n, 3))
    y = targets(name, X)
    settings = {"n": n, "epsilon": 8.0, "delta": 1e-5, "bound_x": 20.0}
    if name == "HuberRegressor":
        settings |= {"mechanism": "objective", "threshold": 1.0}
    source = in_partitions([1, 999, 2000], X, y)
    source.pickled = False
    whole, fitted = make(name, **settings).fit(X, y), make(name, **settings).fit(source)
    assert whole.plan_.task.prepare is not None
    np.testing.assert_allclose(fitted.coef_, whole.coef_, rtol=1e-9)
    assert (fitted.units_.location, fitted.units_.spread) == (
        whole.units_.location,
        whole.units_.spread,
    )


@pytest.mark.weekly
def test_labels_may_be_text_and_partitions_without_blocks_are_empty(same_noise):
    X, y = labelled()
    names = np.array(["no", "yes"], dtype=object)[y]
    source = Listed([], [(X[:70], names[:70].tolist())], [], [(X[70:], names[70:].tolist())])
    fitted, whole = (
        make("LogisticRegression", classes=("no", "yes")).fit(source),
        make("LogisticRegression").fit(X, y),
    )
    np.testing.assert_allclose(fitted.coef_, whole.coef_, rtol=1e-9)


@pytest.mark.slow
def test_no_records_at_all_are_a_fit():
    empty = np.zeros((0, 3)), np.zeros(0)
    assert np.isfinite(make("LogisticRegression").fit(in_partitions([0, 0], *empty)).coef_).all()


# -- a partition must keep still --------------------------------------------------------------------------------------


class Changing(Listed):
    """Partitions of which one is another from some reading on."""

    def __init__(
        self, reading: int, place: int, change: Callable[..., Any], *parts: list[tuple[Any, ...]]
    ) -> None:
        super().__init__(*parts)
        self.reading, self.place, self.change = reading, place, change

    def at(self) -> Any:
        parts = list(self.parts)
        if self.runs >= self.reading:
            parts[self.place] = [self.change(*block) for block in parts[self.place]]
        return parts


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize(("reading", "place"), [(2, 0), (5, 1)])
@pytest.mark.parametrize("mechanism", ["objective", "output", "noisy_gd"])
def test_a_partition_that_changes_between_readings_is_refused(mechanism, reading, place, change):
    X, y = labelled()
    X, y = np.concatenate([X, X]), np.concatenate([y, y])
    source = Changing(reading, place, change, [(X[:N], y[:N])], [(X[N:], y[N:])])
    model = make("LogisticRegression", n=2 * N, mechanism=mechanism)
    with pytest.raises(NotCertifiedError, match="same records in the same order"):
        model.fit(source)
    assert source.runs == reading
    assert not hasattr(model, "coef_")


class Swapped(Listed):
    def at(self) -> Any:
        return self.parts if self.runs < 3 else self.parts[::-1]


class Lost(Listed):
    def at(self) -> Any:
        return self.parts if self.runs < 3 else self.parts[1:]


@pytest.mark.parametrize("kind", [Swapped, Lost])
def test_partitions_in_another_order_or_number_are_refused(kind):
    X, y = labelled()
    with pytest.raises(NotCertifiedError, match="same records in the same order"):
        make("LogisticRegression").fit(kind([(X[:9], y[:9])], [(X[9:], y[9:])]))


def test_a_partition_that_fails_ends_the_fit_and_costs_what_was_charged():
    class Failing(Listed):
        def at(self) -> Any:
            if self.runs == 4:
                raise OSError("worker lost")
            return self.parts

    X, y = labelled()
    ledger = dp.Accountant(adjacency="add_remove")
    model = make("LogisticRegression", mechanism="noisy_gd", accountant=ledger)
    with pytest.raises(OSError, match="worker lost"):
        model.fit(Failing([(X, y)]))
    assert not hasattr(model, "coef_")
    assert len(ledger) == 2  # what is measured, and the release


# -- what travels -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_no_ledger_travels_to_a_partition():
    """A ledger has a lock, which nothing pickles; nor is its name in what was sent."""
    X, y = labelled()
    ledger = dp.Accountant(adjacency="add_remove")
    vars(ledger)["lock of the test"] = threading.Lock()
    source = in_partitions([50], X, y)
    make("LogisticRegression", accountant=ledger).fit(source)
    assert len(ledger) == 2  # what is measured, and the release
    assert not any(b"Accountant" in sent or b"lock of the test" in sent for sent in source.sent)


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("mechanism", ["objective", "noisy_gd", "output"])
def test_neither_noise_nor_generators_travel(mechanism, same_noise, monkeypatch):
    drawn = []
    for name in ("objective", "gradient_descent", "output"):
        module = f"torch_dpsco.estimators.{name}.gaussian_vector"

        def noted(
            size: int,
            std: float,
            source: Any,
            draw: Any = exact_noise.gaussian_vector,
        ) -> Any:
            drawn.append(draw(size, std, source))
            return drawn[-1].clone()

        monkeypatch.setattr(module, noted)
    X, y = labelled()
    source = in_partitions([50], X, y)
    settings = {"prepare": None} if mechanism == "objective" else {}
    make("LogisticRegression", mechanism=mechanism, **settings).fit(source)
    assert drawn
    assert not any(noise.numpy().tobytes() in sent for noise in drawn for sent in source.sent)
    assert not any(b"Generator" in sent for sent in source.sent)


@pytest.mark.slow
def test_no_record_comes_back():
    X, y = labelled()
    source = in_partitions([50], X, y)
    make("LogisticRegression", mechanism="objective").fit(source)
    assert source.runs > 5
    returned = b"".join(result for run in source.returned for result in run)
    assert not any(row.tobytes() in returned for row in X)


# -- what is refused, before anything is charged ----------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::torch_dpsco.errors.UtilityWarning")
@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("TiltedClassifier", {}, "tilted and adversarial"),
        ("AdversarialClassifier", {}, "tilted and adversarial"),
    ],
)
def test_what_is_no_sum_over_records_is_refused_by_name_and_charges_nothing(
    name, settings, words
):
    X = rows()
    ledger = dp.Accountant(adjacency="add_remove")
    with pytest.raises(ConditionError, match=words):
        make(name, accountant=ledger, **settings).fit(in_partitions([9], X, targets(name, X)))
    assert len(ledger) == 0


X4, Y4 = np.ones((4, 3)), np.ones(4)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([], "there must be one"),
        ([[]], "must have a block"),
        ([[X4]], "pairs"),
        ([[(X4, Y4)], [(X4[:, :2], Y4)]], "one dtype and width"),
        ([[(X4, Y4)], [(X4.astype(np.float32), Y4)]], "one dtype and width"),
        ([[(X4, Y4), (X4[:, :2], Y4)]], "same dtype and width"),
        ([[(X4, Y4)], [(X4, Y4[:3])]], "inconsistent numbers"),
    ],
)
def test_partitions_of_other_shapes_are_refused_by_shape(parts, words):
    with pytest.raises(ValueError, match=words):
        make("LogisticRegression").fit(Listed(*parts))


def test_targets_or_groups_beside_partitions_are_refused():
    source = in_partitions([9], *labelled())
    with pytest.raises(ValueError, match="y=None beside them"):
        make("LogisticRegression").fit(source, Y4)
    with pytest.raises(ConditionError, match="groups must be None"):
        make("LogisticRegression").fit(source, groups=np.arange(N))


@pytest.mark.parametrize("count", [N - 1, N + 1])
def test_partitions_must_have_the_public_number_of_records_where_it_is_public(count):
    X = rows(count)
    with pytest.raises(UnitError, match="n=120"):
        make("LogisticRegression", adjacency="replace_one").fit(
            in_partitions([50], X, targets("LogisticRegression", X))
        )


def test_more_records_than_promised_are_refused():
    with pytest.raises(UnitError, match="n_max=240"):
        make("LogisticRegression").fit(in_partitions([50], np.ones((241, 3)), np.ones(241)))


def test_a_table_that_an_adapter_is_for_is_told_so():
    with pytest.raises(ValueError, match=r"integrations\.parquet\.parquet_blocks\(X, target\)"):
        make("LogisticRegression").fit(pa.dataset.dataset(pa.table({"a": [1.0]})))


@pytest.mark.slow
def test_the_code_of_the_document_runs_as_it_stands():
    page = (Path(__file__).parents[2] / "docs" / "integrations" / "engines.md").read_text(
        encoding="utf-8"
    )
    adapters, engine = re.findall(
        r"^```py(?:thon)?\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL
    )
    names: dict[str, Any] = {}
    exec(
        compile(
            "\n".join(line for line in adapters.splitlines() if "import" in line),
            "engines.md",
            "exec",
        ),
        names,
    )
    exec(compile(engine, "engines.md", "exec"), names)
    X = np.random.default_rng(1).uniform(0, 1, size=(1000, 4))
    assert names["model"].score(X, np.where(X @ [3, -2, 1, 0] > 1, "yes", "no")) > 0.7
