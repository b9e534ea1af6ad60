"""The manners of scikit-learn: its own checks, clones, grid searches and pipelines."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone, is_classifier, is_regressor
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils.estimator_checks import check_estimator

import torch_dpsco as dp
from tests.estimators.models import SETTINGS, make, rows, targets
from torch_dpsco.errors import BudgetExceeded

_VALUES = "no value of a record may raise: the exception would tell it; such a record counts as a null record"
_COUNT = (
    "under add_remove the number of records is private, and an exception would tell that it is 0"
)
_ALWAYS = {
    "check_estimators_nan_inf": _VALUES,
    "check_supervised_y_no_nan": _VALUES,
    "check_estimators_empty_data_messages": _COUNT,
    "check_dtype_object": "arrays of objects are refused: whether they hold numbers is known from each record only",
    "check_estimators_dtypes_object": "as check_dtype_object",
    "check_all_zero_sample_weights_error": "weights are private: that all are 0 must not be told",
    "check_sample_weight_equivalence_on_dense_data": "weights are clipped to [0, 1]: a record must not count twice",
    "check_sample_weight_equivalence_on_sparse_data": "as check_sample_weight_equivalence_on_dense_data",
}
_CLASSES = {
    "check_classifiers_regression_target": _VALUES,
    "check_classifiers_classes": "classes are public and given: labels of other names make null records",
    "check_classifiers_one_label": "with all of ten labels equal, the noise still decides now and then",
    "check_class_weight_classifiers": "class weights are at most 1, those of the check are 1000",
}
_BINARY = {"check_classifier_not_supporting_multiclass": _VALUES}
_SOFTMAX = {
    "check_decision_proba_consistency": "there is a column of scores for each given class, which labels ever occur",
    "check_classifiers_train": "trained on two labels with three classes given, it has three columns",
    "check_estimator_sparse_array": "with four labels in the data and three classes given, it has three columns",
    "check_estimator_sparse_matrix": "as check_estimator_sparse_array",
}
_TILTED = {
    "check_classifiers_train": "300 records are few for a tilt",
    **dict.fromkeys(
        (
            "check_sample_weights_pandas_series",
            "check_sample_weights_not_an_array",
            "check_sample_weights_list",
            "check_sample_weights_shape",
            "check_sample_weights_not_overwritten",
            "check_classifiers_one_label_sample_weights",
        ),
        "a tilted mean takes no weights: its constants have equal ones",
    ),
}
EXPECTED: dict[str, dict[str, str]] = {
    name: {
        **_ALWAYS,
        **(_CLASSES if "classes" in settings else {}),
        **(_BINARY if settings.get("classes") == (0, 1) else {}),
        **{"SoftmaxRegression": _SOFTMAX, "TiltedClassifier": _TILTED}.get(name, {}),
    }
    for name, settings in SETTINGS.items()
}


_FIRST = ("LogisticRegression", "SoftmaxRegression", "Ridge", "TiltedClassifier")


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(
    "name",
    [
        name if name in _FIRST else pytest.param(name, marks=pytest.mark.slow)
        for name in EXPECTED
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_an_estimator_passes_the_checks_of_scikit_learn_but_for_those_that_privacy_forbids(
    name, same_noise
):
    """All fits draw the same noise here, or two fits on the same data would differ, as they must."""
    results = check_estimator(
        make(name), expected_failed_checks=EXPECTED[name], on_skip=None, on_fail=None
    )
    failed = [
        (result["check_name"], repr(result["exception"]))
        for result in results
        if result["status"] == "failed"
    ]
    assert failed == []
    assert sum(result["status"] == "passed" for result in results) >= 40


def folds(name: str) -> tuple[np.ndarray, np.ndarray]:
    X = rows(240)
    return X, targets(name, X)


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("name", list(SETTINGS))
def test_a_clone_has_the_settings_and_the_ledger_and_no_fit(name):
    ledger = dp.Accountant(adjacency="add_remove")
    model = make(name, accountant=ledger, feature_center=np.ones(3)).fit(*folds(name))
    twin = clone(model)
    assert twin.accountant is ledger
    assert twin.get_params().keys() == model.get_params().keys()
    assert not hasattr(twin, "coef_")
    with pytest.raises(NotFittedError):
        twin.predict(rows())
    assert (is_classifier(model), is_regressor(model)) == (
        "classes" in SETTINGS[name],
        "bound_y" in SETTINGS[name],
    )


def test_a_grid_search_is_charged_for_every_fit():
    X, y = folds("Ridge")
    ledger = dp.Accountant(dp.Budget(9.0, 1e-3, adjacency="add_remove"))
    model = make("Ridge", epsilon=1.0, delta=1e-5, accountant=ledger)
    search = GridSearchCV(model, {"reg": [0.1, 1.0]}, cv=3).fit(X, y)
    assert len(ledger) == 2 * 3 + 1
    # Gaussian releases compose to less than the sum of their epsilons
    assert 2.0 < search.best_estimator_.privacy_.epsilon <= 7.0
    assert search.best_estimator_.accountant is ledger


@pytest.mark.slow
def test_a_grid_search_past_the_budget_is_refused():
    X, y = folds("LogisticRegression")
    ledger = dp.Accountant(dp.Budget(3.0, 1e-3, adjacency="add_remove"))
    model = make(
        "LogisticRegression", epsilon=1.0, delta=1e-5, mechanism="objective", accountant=ledger
    )
    with pytest.raises(BudgetExceeded):
        GridSearchCV(model, {"residual_clip": [0.5, 1.0]}, cv=2, error_score="raise").fit(X, y)
    assert len(ledger) <= 3
    assert ledger.get_epsilon(1e-3) <= 3.0


def test_pipelines_and_scores_work_on_data_frames(same_noise):
    X, y = folds("LogisticRegression")
    frame = pd.DataFrame(X, columns=["a", "b", "c"])
    model = make("LogisticRegression", n=240)
    pipeline = make_pipeline(FunctionTransformer(lambda given: given / 2), model).fit(
        frame, pd.Series(y)
    )
    assert pipeline.score(frame, y) > 0.8
    assert pipeline[-1].feature_names_in_.tolist() == ["a", "b", "c"]
    with pytest.raises(ValueError, match="feature names"):
        pipeline[-1].predict(frame[["b", "a", "c"]])
    assert cross_val_score(model, X, y, cv=2, scoring="roc_auc").min() > 0.8


def test_names_of_columns_are_checked_before_anything_is_charged_and_forgotten_by_a_refit():
    X, y = folds("Ridge")
    ledger = dp.Accountant(adjacency="add_remove")
    model = make("Ridge", accountant=ledger)
    with pytest.raises(TypeError, match="string"):
        model.fit(pd.DataFrame(X, columns=["a", "b", 3]), y)
    assert len(ledger) == 0
    assert not hasattr(model, "n_features_in_")
    model.fit(pd.DataFrame(X, columns=["a", "b", "c"]), y)
    assert hasattr(model, "feature_names_in_")
    assert not hasattr(model.fit(X, y), "feature_names_in_")


def test_sample_weights_reach_the_fit_in_a_pipeline(same_noise):
    X, y = folds("HuberRegressor")
    model = make_pipeline(make("HuberRegressor"))
    assert model.fit(X, y, huberregressor__sample_weight=np.ones(len(X))).score(X, y) > 0.5


def test_the_repr_shows_what_was_set_and_nothing_else():
    model: Any = make("Ridge").fit(*folds("Ridge"))
    assert " ".join(repr(model).split()) == (
        "Ridge(adjacency='add_remove', bound_x=5.0, bound_y=5.0, delta=0.001, epsilon=20.0, n=120)"
    )
