"""What all estimators promise: public settings, one charge a fit, null records, and nothing private left behind."""

from __future__ import annotations

import copy
import math
import pickle
import struct
from typing import Any

import numpy as np
import pytest
import torch

import torch_dpsco as dp
from tests.estimators.models import SETTINGS, N, make, rows, targets
from torch_dpsco.errors import (
    AdjacencyError,
    BudgetExceeded,
    CalibrationError,
    PrivacyError,
    UnitError,
)
from torch_dpsco.estimators import (
    AdversarialClassifier,
    LogisticRegression,
    Ridge,
    TiltedClassifier,
)
from torch_dpsco.estimators.reading import NotFittedError

NAMES = list(SETTINGS)
SUMS = [
    name for name in NAMES if name != "TiltedClassifier"
]  # there, a null record keeps its place in the mean
OUTPUT = [
    name
    for name in NAMES
    if name not in ("SoftmaxRegression", "LinearSVC", "HuberRegressor", "Ridge", "Lasso")
]


def fitted(name: str, **changes: Any) -> Any:
    X = rows()
    return make(name, **changes).fit(X, targets(name, X))


# -- settings ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        (name, missing)
        for name in NAMES
        for missing in ("n", "bound_x", *SETTINGS[name])
        if missing != "n_min"
    ],
)
def test_a_missing_bound_raises_and_says_how_to_choose_one(name, missing):
    with pytest.raises(ValueError, match=rf"{missing} must be given: .*public"):
        fitted(name, **{missing: None})


@pytest.mark.parametrize("name", NAMES)
def test_the_constructor_keeps_its_arguments_and_does_nothing_else(name):
    center = np.ones(3)
    model = make(name, epsilon="nonsense", feature_center=center)
    assert model.epsilon == "nonsense"
    assert model.feature_center is center
    assert set(vars(model)) == set(model.get_params())


@pytest.mark.cases(8, 4)
@pytest.mark.parametrize(
    "changes",
    [
        {"epsilon": 0.0},
        {"delta": 1.0},
        {"adjacency": "neighbor"},
        {"n": 0},
        {"n": 2.5},
        {"bound_x": -1.0},
        {"bound_x": math.inf},
        {"feature_center": [0.0]},
        {"feature_center": 1.0},
        {"feature_scale": [1.0, 0.0, 1.0]},
        {"feature_center": [0.0, math.nan, 0.0]},
        {"intercept_scaling": 0.0},
        {"reg": 0.0},
        {"radius": 0.0},
        {"residual_clip": 1.5},
        {"mechanism": "magic"},
        {"mechanism": "adassp"},
        {"n_max": 3},
        {"classes": (0,)},
        {"classes": (0, 0)},
        {"classes": (0, 1, 2)},
        {"class_weight": "balanced"},
        {"class_weight": {0: 2.0}},
        {"class_weight": {0: 0.0}},
        {"class_weight": {5: 1.0}},
    ],
)
def test_bad_settings_charge_nothing(changes):
    ledger = dp.Accountant(adjacency="add_remove")
    with pytest.raises((ValueError, CalibrationError)):
        fitted("LogisticRegression", accountant=ledger, **changes)
    assert len(ledger) == 0


def test_three_classes_are_sent_to_softmax_regression():
    with pytest.raises(ValueError, match="SoftmaxRegression"):
        fitted("LogisticRegression", classes=(0, 1, 2))


@pytest.mark.slow
def test_the_public_number_of_records_must_be_true_where_it_is_public():
    for adjacency in ("replace_one", "zero_out"):
        assert fitted("LogisticRegression", adjacency=adjacency).privacy_.adjacency == adjacency
        with pytest.raises(UnitError, match=f"n={N - 1}"):
            fitted("LogisticRegression", adjacency=adjacency, n=N - 1)
    assert fitted("LogisticRegression", n=N - 1).privacy_.adjacency == "add_remove"


# -- data ----------------------------------------------------------------------------------


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("name", SUMS)
def test_records_that_cannot_be_used_change_nothing_but_the_count(name, same_noise):
    X = rows()
    y = targets(name, X).astype(float)
    bad_X = np.vstack([X, [[np.nan, 0, 0], [0, np.inf, 0], [1, 1, 1]]])
    bad_y = np.append(y, [1, 1, np.nan])
    model, other = make(name).fit(X, y), make(name).fit(bad_X, bad_y)
    # the solver may end elsewhere within its tolerance
    np.testing.assert_allclose(model.coef_, other.coef_, rtol=1e-3, atol=1e-3)


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("name", NAMES)
def test_values_of_records_never_raise(name):
    X, empty = rows(), np.empty((0, 3))
    for strange in (np.full_like(X, np.nan), np.full_like(X, 1e300), 0 * X):
        for y in (np.full(N, np.nan), np.full(N, 1e300), [object()] * N):
            assert np.isfinite(make(name).fit(strange, y).coef_).all()
    if name != "TiltedClassifier":  # which needs n_min >= 1 records, a public number
        assert np.isfinite(make(name).fit(empty, []).coef_).all()


def test_rows_are_clipped_alike_in_training_and_prediction(same_noise):
    X = rows()
    y = targets("Ridge", X)
    far = X * np.where(np.arange(N) % 2, 1.0, 1e6)[:, None]
    clipped = far / np.maximum(1.0, np.linalg.norm(far, axis=1) / 1.5)[:, None]
    model, other = (
        make("Ridge", bound_x=1.5).fit(far, y),
        make("Ridge", bound_x=1.5).fit(clipped, y),
    )
    np.testing.assert_allclose(model.coef_, other.coef_, rtol=1e-9)
    np.testing.assert_allclose(model.predict(far), model.predict(clipped), rtol=1e-9)


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("name", NAMES)
def test_coefficients_are_those_of_raw_rows(name, same_noise):
    X = 3.0 + 2.0 * rows()
    y = targets(name, rows())
    constant = {"Ridge": 2.0, "Lasso": None}.get(name, 1.0)
    settings = {"intercept_scaling": constant, "prepare": None}
    model = make(name, feature_center=[3.0] * 3, feature_scale=[2.0] * 3, **settings).fit(X, y)
    plain = make(name, **settings).fit(rows(), y)
    within = np.linalg.norm(rows(), axis=1) < 5.0
    scores = X[within] @ np.atleast_2d(model.coef_).T + model.intercept_
    np.testing.assert_allclose(scores, model._scores(X[within]), rtol=1e-9)
    np.testing.assert_allclose(scores, plain._scores(rows()[within]), rtol=1e-3, atol=1e-3)


def test_without_intercept_the_center_has_score_zero():
    model = fitted("Ridge", fit_intercept=False, feature_center=[1.0, 2.0, 3.0])
    assert model.predict([[1.0, 2.0, 3.0]])[0] == pytest.approx(0.0, abs=1e-12)


@pytest.mark.slow
def test_tensors_frames_and_lists_give_the_same_model(same_noise):
    X = rows().astype(np.float32)
    y = targets("LogisticRegression", X)
    models = [
        make("LogisticRegression").fit(*given)
        for given in (
            (X, y),
            (torch.from_numpy(X), torch.from_numpy(y)),
            (X.tolist(), y.tolist()),
        )
    ]
    for model in models[1:]:
        np.testing.assert_allclose(model.coef_, models[0].coef_, rtol=1e-9)
        np.testing.assert_array_equal(model.predict(torch.from_numpy(X)), models[0].predict(X))


def test_the_data_are_not_changed():
    X, weights = rows() * 10, np.full(N, 3.0)
    y = targets("HuberRegressor", X)
    kept = copy.deepcopy((X, y, weights))
    make("HuberRegressor").fit(X, y, weights)
    for now, then in zip((X, y, weights), kept, strict=True):
        np.testing.assert_array_equal(now, then)


# -- weights ----------------------------------------------------------------------------------


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("name", SUMS)
def test_a_weight_of_zero_removes_a_record(name, same_noise):
    X = rows()
    y = targets(name, X)
    weights = (np.arange(N) % 3 > 0).astype(float)
    weighted, fewer = (
        make(name).fit(X, y, weights),
        make(name).fit(X[weights > 0], y[weights > 0]),
    )
    np.testing.assert_allclose(weighted.coef_, fewer.coef_, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_a_large_sample_weight_counts_as_one(same_noise):
    X = rows()
    y = targets("LogisticRegression", X)
    given = np.where(np.arange(N) == 7, 1e6, 1.0)
    for changes in ({}, {"class_weight": {0: 0.5, 1: 0.25}}):
        large, one = (
            make("LogisticRegression", **changes).fit(X, y, w) for w in (given, np.ones(N))
        )
        np.testing.assert_array_equal(large.coef_, one.coef_)
    for none in (-1.0, np.nan):
        odd, zero = (
            make("LogisticRegression").fit(X, y, np.where(np.arange(N) == 7, w, 1.0))
            for w in (none, 0.0)
        )
        np.testing.assert_array_equal(odd.coef_, zero.coef_)


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("name", ["LogisticRegression", "SoftmaxRegression"])
def test_class_weights_are_sample_weights_by_label(name, same_noise):
    X = rows()
    y = targets(name, X)
    by_class = make(name, class_weight={0: 0.25}).fit(X, y)
    by_record = make(name).fit(X, y, np.where(y == 0, 0.25, 1.0))
    np.testing.assert_allclose(by_class.coef_, by_record.coef_, rtol=1e-6)


def test_weights_are_refused_for_a_tilted_mean_before_anything_is_charged():
    ledger = dp.Accountant(adjacency="add_remove")
    model = make("TiltedClassifier", accountant=ledger)
    with pytest.raises(CalibrationError, match="weights"):
        model.fit(rows(), targets("TiltedClassifier", rows()), np.ones(N))
    assert len(ledger) == 0


# -- privacy ----------------------------------------------------------------------------------


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize(
    ("name", "adjacency"),
    [(name, "add_remove") for name in NAMES]
    + [
        (name, adjacency)
        for name in ("LogisticRegression", "Ridge", "AdversarialClassifier")
        for adjacency in ("replace_one", "zero_out")
    ],
)
def test_a_fit_spends_its_budget_and_says_so(name, adjacency):
    model = fitted(name, adjacency=adjacency)
    assert 19.9 < model.privacy_.epsilon <= 20.0
    assert (model.privacy_.delta, model.privacy_.adjacency, model.privacy_.unit) == (
        1e-3,
        adjacency,
        "example",
    )
    words = str(model.report())
    assert "-differential privacy for one example" in words
    assert f"({adjacency}: " in words
    assert type(model).__name__ in words
    assert "chosen without a look at these data" in words


def test_the_statement_of_a_fit_names_no_calls_that_an_estimator_lacks():
    words = " ".join(str(fitted("LogisticRegression").report()).split())
    assert "finalize" not in words
    assert "step(closure)" not in words
    assert (
        "All that was computed on the way: sums, gradients, models in between. They are secret."
        in words
    )
    assert "Training losses and any other score computed on the training data." in words


@pytest.mark.cases(3, 1)
@pytest.mark.parametrize("name", OUTPUT)
def test_a_pure_epsilon_is_reported_without_delta(name):
    model = fitted(name, epsilon=2.0, delta=0.0)
    assert (model.privacy_.delta, model.privacy_.epsilon) == (0.0, pytest.approx(2.0))
    assert "pure (delta = 0)" in model.report().headline


def test_a_refit_draws_fresh_noise():
    X = rows()
    y = targets("LogisticRegression", X)
    model = make("LogisticRegression").fit(X, y)
    first = model.coef_
    assert not np.allclose(model.fit(X, y).coef_, first, rtol=1e-12)


@pytest.mark.parametrize(
    ("name", "y", "error", "words"),
    [
        (
            "LogisticRegression",
            np.repeat("no", N),
            ValueError,
            "y must have labels among classes=.*<U2",
        ),
        ("Ridge", np.repeat("no", N), TypeError, "y must have a dtype of numbers"),
    ],
)
def test_targets_of_another_kind_are_refused_before_anything_is_charged(name, y, error, words):
    ledger = dp.Accountant(adjacency="add_remove")
    with pytest.raises(error, match=words):
        make(name, accountant=ledger).fit(rows(), y)
    assert len(ledger) == 0


@pytest.mark.slow
def test_a_shared_ledger_is_charged_by_every_fit_and_refuses_the_one_too_many():
    ledger = dp.Accountant(dp.Budget(2.0, 1e-3, adjacency="add_remove"))
    X = rows()
    y = targets("LogisticRegression", X)
    model = make(
        "LogisticRegression", epsilon=0.9, delta=1e-4, mechanism="objective", accountant=ledger
    )
    twin = copy.deepcopy(model)
    assert twin.accountant is ledger
    model.fit(X, y), twin.fit(X, y)
    assert len(ledger) == 2
    assert 1.7 < twin.privacy_.epsilon <= 2.0
    kept = model.coef_
    with pytest.raises(BudgetExceeded):
        model.fit(X, y)
    assert len(ledger) == 2
    assert model.coef_ is kept


def test_a_ledger_of_another_adjacency_is_refused():
    with pytest.raises(AdjacencyError, match="accountant must have the adjacency"):
        fitted("Ridge", accountant=dp.Accountant(adjacency="replace_one"))
    with pytest.raises(UnitError):
        fitted("Ridge", accountant=dp.Accountant(adjacency="add_remove", unit="user"))


def test_a_pure_fit_on_a_ledger_that_is_not_pure_is_refused_before_it_is_charged():
    ledger = dp.Accountant(adjacency="add_remove")
    fitted("Ridge", accountant=ledger)
    charged = len(ledger)
    with pytest.raises(CalibrationError):
        fitted("LogisticRegression", delta=0.0, accountant=ledger)
    assert len(ledger) == charged > 0


def leaves(value: Any) -> list[float]:
    """Returns all numbers inside a value."""
    if isinstance(value, dict):
        return [number for item in value.items() for part in item for number in leaves(part)]
    if isinstance(value, (list, tuple, set, frozenset)):
        return [number for item in value for number in leaves(item)]
    if isinstance(value, (np.ndarray, torch.Tensor)):
        return [
            float(number)
            for number in np.asarray(value).ravel()
            if isinstance(number, (int, float, np.number))
        ]
    if isinstance(value, (int, float, np.number)):
        return [float(value)]
    return leaves(vars(value)) if hasattr(value, "__dict__") else []


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("name", [name for name in NAMES if name != "Ridge"])
def test_nothing_noiseless_is_left_in_a_fitted_model(name, monkeypatch):
    from torch_dpsco.estimators import objective, output
    from torch_dpsco.estimators.least_squares import PreconditionedGDPlan

    secrets: list[float] = []
    solved, summed = output.solve, PreconditionedGDPlan.gradient

    def spy_of_sums(*args: Any) -> Any:
        secrets.extend(leaves(summed(*args)))
        return summed(*args)

    def spy(*args: Any, **options: Any) -> Any:
        found = solved(*args, **options)
        secrets.extend([*leaves(found.w), found.distance, args[0].value(found.w)])
        return found

    monkeypatch.setattr(output, "solve", spy)
    monkeypatch.setattr(objective, "solve", spy)
    monkeypatch.setattr(PreconditionedGDPlan, "gradient", spy_of_sums)
    kinds = {
        "TiltedClassifier": "output",
        "AdversarialClassifier": "output",
        "SoftmaxRegression": "preconditioned_gd",
    }
    model = fitted(name, mechanism=kinds.get(name, "objective"))
    # a certificate names its kind by small whole numbers; the rest has 15 digits
    secrets = [secret for secret in secrets if secret != round(secret, 3)]
    assert len(secrets) >= 4
    shown = leaves(vars(model))
    assert len(shown) > 20
    public = {*leaves(model.get_params()), *leaves(model.plan_)}
    for number in set(shown) - public:
        assert all(abs(number - secret) > 1e-9 * abs(secret) for secret in secrets)
    raw = pickle.dumps(model)
    text = repr(model) + str(vars(model)) + str(model.report())
    for secret in set(secrets) - public:
        assert struct.pack("<d", secret) not in raw
        assert struct.pack(">d", secret) not in raw
        assert repr(secret)[:12] not in text


def test_the_scan_for_noiseless_numbers_finds_one():
    model = fitted("Ridge")
    model.hidden = {"a": [torch.tensor([0.123456789])]}
    assert any(abs(number - 0.123456789) < 1e-8 for number in leaves(vars(model)))


def test_the_exact_answer_of_ridge_is_not_kept():
    X = rows()
    y = targets("Ridge", X)
    exact = np.linalg.lstsq(np.column_stack([X, np.ones(N)]), np.clip(y, -5, 5), rcond=None)[0]
    model = make("Ridge").fit(X, y)
    assert not any(np.isclose(number, exact, rtol=1e-9).any() for number in leaves(vars(model)))


@pytest.mark.slow
def test_no_attribute_tells_an_iteration_count_or_a_loss():
    for name in NAMES:
        public = {
            "coef_",
            "intercept_",
            "classes_",
            "n_features_in_",
            "privacy_",
            "mechanism_",
            "plan_",
            "units_",
        }
        model = fitted(name)
        assert set(vars(model)) <= public | set(model.get_params())


# -- prediction ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_an_unfitted_model_says_so(name):
    for call in (lambda model: model.predict(rows()), lambda model: model.report()):
        with pytest.raises(NotFittedError, match="not fitted"):
            call(make(name))


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("name", NAMES)
def test_a_fitted_model_can_be_pickled_and_predicts_the_same(name):
    model = fitted(name)
    again = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(model.predict(rows()), again.predict(rows()))
    assert again.privacy_ == model.privacy_


def test_a_model_with_a_shared_ledger_cannot_be_pickled():
    with pytest.raises(PrivacyError, match="pickled"):
        pickle.dumps(fitted("Ridge", accountant=dp.Accountant(adjacency="add_remove")))


def test_rows_that_cannot_be_predicted_are_refused():
    model = fitted("Ridge")
    for bad, said in (
        (np.full((1, 3), np.nan), "NaN"),
        (rows(4, 2), "features"),
        (np.empty((0, 3)), "0 sample"),
    ):
        with pytest.raises(ValueError, match=said):
            model.predict(bad)


def test_settings_changed_after_a_fit_wait_for_the_next_one():
    model = fitted("LogisticRegression")
    before = model.predict_proba(rows())
    model.set_params(bound_x=0.1, classes=("a", "b"), feature_scale=[9.0] * 3)
    np.testing.assert_array_equal(model.predict_proba(rows()), before)
    assert set(model.predict(rows())) <= {0, 1}


def test_labels_come_back_in_the_given_order_and_kind(same_noise):
    X = rows()
    y = np.where(X[:, 0] > 0, "yes", "no")
    model = make("LogisticRegression", classes=("yes", "no")).fit(X, y)
    assert model.classes_.tolist() == ["yes", "no"]
    assert model.score(X, y) > 0.7
    assert ((model.decision_function(X) > 0) == (model.predict(X) == "no")).all()
    mixed = make("LogisticRegression", classes=("yes", 1)).fit(X, y.tolist())
    assert mixed.classes_.tolist() == ["yes", 1]


@pytest.mark.parametrize("name", ["LogisticRegression", "SoftmaxRegression"])
def test_probabilities_are_those_of_the_scores(name):
    model = fitted(name)
    proba, scores = model.predict_proba(rows()), torch.from_numpy(model._scores(rows()))
    pair = scores if name == "SoftmaxRegression" else torch.cat([0 * scores, scores], dim=1)
    np.testing.assert_allclose(proba, pair.softmax(1).numpy(), rtol=1e-9)
    assert (proba.argmax(1) == model.predict(rows())).all()


@pytest.mark.slow
def test_mechanisms_can_be_chosen():
    for mechanism in ("output", "objective", "noisy_gd", "preconditioned_gd"):
        assert fitted("LogisticRegression", mechanism=mechanism).mechanism_ == mechanism
    assert [fitted(name).mechanism_ for name in NAMES] == [
        *(
            "noisy_gd",
            "preconditioned_gd",
            "noisy_gd",
            "preconditioned_gd",
            "preconditioned_gd",
            "boosted_adassp",
            "selection",
            "output",
            "output",
        )
    ]
    assert fitted("LinearSVC", loss="hinge").mechanism_ == "output"
    for mechanism in ("objective", "adassp"):
        assert fitted("SoftmaxRegression", mechanism=mechanism).mechanism_ == mechanism
    assert fitted("Ridge", mechanism="preconditioned_gd").mechanism_ == "preconditioned_gd"


@pytest.mark.slow
def test_tilts_of_both_signs_and_both_attacks_are_fitted():
    X = rows()
    y = targets("TiltedClassifier", X)
    for tilt in (-0.02, 0.0, 0.02):
        model = make("TiltedClassifier", tilt=tilt, n_min=100, bound_x=1.0, epsilon=20.0).fit(
            X, y
        )
        assert np.isfinite(model.coef_).all()
    for norm in (2, math.inf):
        assert np.isfinite(fitted("AdversarialClassifier", attack_norm=norm).coef_).all()
    with pytest.raises(CalibrationError, match="n_min"):
        TiltedClassifier(n=N, bound_x=1.0, classes=(0, 1), adjacency="add_remove").fit(X, y)


@pytest.mark.parametrize("norm", [2, math.inf])
def test_a_feature_that_is_attacked_is_trusted_less(norm):
    X = np.random.default_rng(0).uniform(-0.7, 0.7, (2000, 2))
    y = X.sum(1) > 0
    numbers = {"epsilon": 1e4, "n": 2000, "bound_x": 1.0, "classes": (0, 1), "reg": 2.0}
    for scale in ((1.0, 0.0), (0.0, 1.0)):
        model = AdversarialClassifier(
            attack_radius=0.3, attack_norm=norm, attack_scale=scale, **numbers
        ).fit(X, y)
        attacked, other = model.coef_[0] if scale[0] else model.coef_[0][::-1]
        assert 0 <= attacked < 0.7 * other
    with pytest.raises(ValueError, match="attack_scale must have 2 numbers"):
        AdversarialClassifier(attack_scale=(1.0,), **numbers).fit(X, y)


def test_a_public_center_is_worth_more_than_a_mechanism(same_noise):
    X = 10 + rows(4000)
    y = rows(4000) @ [1.0, 1.0, 1.0]
    settings = {"epsilon": 1.0, "n": 4000, "bound_y": 5.0}
    plain = Ridge(bound_x=22.0, prepare=None, **settings).fit(X, y).score(X, y)
    measured = Ridge(bound_x=22.0, **settings).fit(X, y).score(X, y)
    centered = Ridge(bound_x=4.0, feature_center=[10.0] * 3, **settings).fit(X, y).score(X, y)
    assert plain < 0.6 < 0.9 < min(centered, measured)


def test_a_name_that_is_no_setting_is_refused():
    with pytest.raises(ValueError, match="random_state"):
        LogisticRegression().set_params(random_state=0)
    with pytest.raises(TypeError, match="random_state"):
        LogisticRegression(random_state=0)
