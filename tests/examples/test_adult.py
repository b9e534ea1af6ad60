"""The Adult loader: sizes, public bounds, rows checked by hand, scores against scikit-learn, the non-private anchor."""

from __future__ import annotations

import importlib.util
import itertools
import math
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, roc_auc_score

PATH = Path(__file__).parents[2] / "examples" / "adult.py"


def _load(path: Path) -> ModuleType:
    """The examples are scripts, not a package: load the file itself."""
    spec = importlib.util.spec_from_file_location("adult_example", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


adult = _load(PATH)

# Where the one-hot block of each column starts, counted by hand: 5 numbers, then 9, 16, 7, 15, 6, 5, 2 levels.
WORKCLASS, EDUCATION, MARITAL, OCCUPATION, RELATIONSHIP, RACE, SEX = 5, 14, 30, 37, 52, 58, 63


@pytest.fixture(scope="module")
def data():
    return adult.load_adult()


def _expected_row(numbers, ones):
    row = np.zeros(65)
    row[:5] = numbers
    row[ones] = 1.0
    return row


@pytest.mark.slow
def test_the_files_have_the_published_numbers_of_records(data):
    assert data.train_features.shape == (32_561, 65)
    assert data.train_labels.shape == (32_561,)
    assert data.test_features.shape == (16_281, 65)
    assert data.test_labels.shape == (16_281,)
    assert {tensor.dtype for tensor in data} == {torch.float32}


def test_the_one_hot_blocks_have_the_sizes_of_the_code_book():
    assert [len(levels) for levels in adult.LEVELS.values()] == [9, 16, 7, 15, 6, 5, 2]
    assert all(len(set(levels)) == len(levels) for levels in adult.LEVELS.values())
    assert adult.NUM_FEATURES == 65


def test_every_level_of_the_files_is_listed(data):
    # One 1 in each of the seven blocks of every record: a misspelled level would leave zeros.
    for features in (data.train_features, data.test_features):
        edges = [WORKCLASS, EDUCATION, MARITAL, OCCUPATION, RELATIONSHIP, RACE, SEX, 65]
        for start, end in itertools.pairwise(edges):
            block = features[:, start:end]
            assert torch.equal(block.sum(dim=1), torch.ones(len(features)))
            assert torch.equal(block.amax(dim=1), torch.ones(len(features)))


def test_every_listed_level_occurs(data):
    # ... and a level listed twice under two spellings would be an empty column.
    counts = (torch.cat([data.train_features, data.test_features]) > 0).sum(dim=0)
    assert int(counts.min()) > 0


def test_labels_are_zero_or_one_with_the_published_rate(data):
    labels = torch.cat([data.train_labels, data.test_labels])
    assert set(labels.tolist()) == {0.0, 1.0}
    assert float(labels.double().mean()) == pytest.approx(0.239, abs=5e-4)
    # The trailing full stop of the test labels is stripped: otherwise every test label would be 0.
    assert int(data.train_labels.sum()) == 7_841
    assert int(data.test_labels.sum()) == 3_846


def test_the_first_training_row_is_the_one_computed_by_hand(data):
    # 39, State-gov, 77516, Bachelors, 13, Never-married, Adm-clerical, Not-in-family, White, Male, 2174, 0, 40, ...
    numbers = [39 / 90, 13 / 16, math.log(2175) / math.log(1e5), 0.0, 40 / 99]
    ones = [
        WORKCLASS + 5,
        EDUCATION + 0,
        MARITAL + 2,
        OCCUPATION + 8,
        RELATIONSHIP + 3,
        RACE + 0,
        SEX + 1,
    ]
    np.testing.assert_allclose(
        data.train_features[0].numpy(), _expected_row(numbers, ones), rtol=1e-6
    )
    assert data.train_labels[0] == 0


def test_the_last_training_row_is_the_one_computed_by_hand(data):
    # 52, Self-emp-inc, 287927, HS-grad, 9, Married-civ-spouse, Exec-managerial, Wife, White, Female, 15024, 0, 40, ...
    numbers = [52 / 90, 9 / 16, math.log(15_025) / math.log(1e5), 0.0, 40 / 99]
    ones = [
        WORKCLASS + 2,
        EDUCATION + 3,
        MARITAL + 0,
        OCCUPATION + 4,
        RELATIONSHIP + 0,
        RACE + 0,
        SEX + 0,
    ]
    np.testing.assert_allclose(
        data.train_features[-1].numpy(), _expected_row(numbers, ones), rtol=1e-6
    )
    assert data.train_labels[-1] == 1


def test_the_first_test_row_is_the_first_record_and_not_the_remark_line(data):
    # 25, Private, 226802, 11th, 7, Never-married, Machine-op-inspct, Own-child, Black, Male, 0, 0, 40, ...
    numbers = [25 / 90, 7 / 16, 0.0, 0.0, 40 / 99]
    ones = [
        WORKCLASS + 0,
        EDUCATION + 2,
        MARITAL + 2,
        OCCUPATION + 7,
        RELATIONSHIP + 1,
        RACE + 4,
        SEX + 1,
    ]
    np.testing.assert_allclose(
        data.test_features[0].numpy(), _expected_row(numbers, ones), rtol=1e-6
    )
    assert data.test_labels[0] == 0


def test_row_norms_with_a_bias_stay_below_the_public_bound(data):
    largest = max(
        float((features.double().square().sum(dim=1) + 1).sqrt().max())
        for features in (data.train_features, data.test_features)
    )
    assert largest <= adult.ROW_NORM_BOUND
    assert largest == pytest.approx(3.34, abs=5e-3)


numbers = st.floats(-1e12, 1e12).map(repr)
levels = st.sampled_from(
    ["Private", "Bachelors", "Wife", "White", "Male", "?", "", "never seen"]
)


@given(
    st.tuples(*(numbers if column in (0, 2, 4, 10, 11, 12) else levels for column in range(14)))
)
def test_no_record_however_wild_exceeds_the_norm_bound(record):
    row = np.array(adult.encode(record))
    assert row.shape == (65,)
    assert row.min() >= 0
    assert row.max() <= 1
    assert math.sqrt(float(row @ row) + 1) <= adult.ROW_NORM_BOUND


def test_an_unknown_level_is_all_zeros_and_changes_nothing_else():
    fields = "39 State-gov 1 Bachelors 13 Never-married Adm-clerical Not-in-family White Male 0 0 40 -"
    record = fields.split()
    known = np.array(adult.encode(record))
    unknown = np.array(adult.encode([*record[:6], "Astronaut", *record[7:]]))
    assert known[OCCUPATION + 8] == 1
    known[OCCUPATION + 8] = 0
    np.testing.assert_array_equal(unknown, known)


def test_the_encoding_of_a_record_does_not_depend_on_the_others(data):
    # Adjacency: encoding is per record, so that the table of a sub-list is the sub-table.
    records = adult._records(PATH.parent / "data" / "adult.data.xz")[:50]
    some, _ = adult._table(records[10:20])
    assert torch.equal(some, data.train_features[10:20])


@pytest.mark.parametrize("ties", [False, True], ids=["distinct scores", "tied scores"])
def test_auc_equals_that_of_scikit_learn(ties):
    generator = np.random.default_rng(20)
    labels = generator.integers(0, 2, size=500)
    scores = generator.normal(size=500) + labels
    if ties:
        scores = np.round(scores)
    got = adult.auc(torch.from_numpy(scores), torch.from_numpy(labels))
    assert got == pytest.approx(roc_auc_score(labels, scores), abs=1e-12)


def test_auc_of_small_cases_by_hand():
    labels = torch.tensor([0.0, 0.0, 1.0, 1.0])
    assert adult.auc(torch.tensor([1.0, 2.0, 3.0, 4.0]), labels) == 1.0
    assert adult.auc(torch.tensor([4.0, 3.0, 2.0, 1.0]), labels) == 0.0
    assert adult.auc(torch.zeros(4), labels) == 0.5
    assert adult.auc(torch.tensor([1.0, 3.0, 3.0, 4.0]), labels) == 0.875
    with pytest.raises(ValueError, match="both labels"):
        adult.auc(torch.zeros(4), torch.ones(4))
    with pytest.raises(ValueError, match="equally many"):
        adult.auc(torch.zeros(3), labels)


def test_accuracy_equals_that_of_scikit_learn_and_refuses_a_broadcast():
    generator = np.random.default_rng(21)
    labels, scores = generator.integers(0, 2, size=300), generator.normal(size=300)
    got = adult.accuracy(torch.from_numpy(scores).reshape(300, 1), torch.from_numpy(labels))
    assert got == pytest.approx(accuracy_score(labels, scores > 0), abs=1e-12)
    with pytest.raises(ValueError, match="equally many"):
        adult.accuracy(torch.zeros(1), torch.zeros(300))


@pytest.mark.slow
def test_the_baseline_reaches_the_published_non_private_anchor(data):
    model = adult.fit_baseline(data.train_features, data.train_labels)
    scores = model(data.test_features)
    assert adult.accuracy(scores, data.test_labels) == pytest.approx(0.8467, abs=3e-4)
    assert adult.auc(scores, data.test_labels) == pytest.approx(0.8990, abs=1e-4)
    loss = torch.nn.functional.binary_cross_entropy_with_logits(
        scores.squeeze(1), data.test_labels
    )
    assert float(loss) == pytest.approx(0.3292, abs=1e-4)


def test_the_baseline_is_a_minimizer_and_draws_no_random_numbers(data):
    features, labels = data.train_features[:2_000], data.train_labels[:2_000]
    state = torch.get_rng_state()
    model = adult.fit_baseline(features, labels, reg=1e-3)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(adult.fit_baseline(features, labels, reg=1e-3).weight, model.weight)
    rows = torch.cat([features.double(), torch.ones(2_000, 1, dtype=torch.float64)], dim=1)
    weights = torch.cat([model.weight[0], model.bias]).double()
    gradient = rows.T @ (torch.sigmoid(rows @ weights) - labels) / 2_000 + 1e-3 * weights
    assert float(gradient.norm()) < 1e-5
