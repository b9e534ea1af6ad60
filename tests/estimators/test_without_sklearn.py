"""The same models without scikit-learn, which nothing but them may import."""

from __future__ import annotations

import importlib
import pickle
import subprocess
import sys
from types import ModuleType

import numpy as np
import pandas as pd
import pytest

import torch_dpsco

X = np.random.default_rng(0).normal(size=(400, 2))
Y = (X[:, 0] > 0).astype(int)
SETTINGS = {"epsilon": 8.0, "delta": 1e-4, "n": 400, "bound_x": 4.0}


@pytest.mark.weekly
def test_the_package_does_not_import_scikit_learn() -> None:
    script = "import sys, torch_dpsco; print([name for name in sys.modules if name.startswith('sklearn')])"
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert run.stdout == "[]\n"


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The estimators, imported anew where scikit-learn cannot be."""
    for name in list(sys.modules):
        if name.startswith("sklearn"):
            monkeypatch.setitem(sys.modules, name, None)
        if name.startswith("torch_dpsco.estimators"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setattr(
        torch_dpsco, "estimators", torch_dpsco.estimators
    )  # as it was, after the test
    return importlib.import_module("torch_dpsco.estimators")


@pytest.mark.weekly
def test_all_models_work_without_scikit_learn(alone, same_noise) -> None:
    for name in alone.__all__:
        kind = getattr(alone, name)
        assert not any(base.__module__.startswith("sklearn") for base in kind.__mro__)
        further = {"bound_y": 5.0} if "bound_y" in kind().get_params() else {"classes": (0, 1)}
        if name == "TiltedClassifier":
            further["n_min"] = 300
        model = kind(**SETTINGS, **further)
        with pytest.raises(ValueError, match="not fitted"):
            model.predict(X)
        assert model.set_params(epsilon=9.0) is model
        model.fit(pd.DataFrame(X), Y)
        assert (model.n_features_in_, model.privacy_.delta) == (2, 1e-4)
        assert -10.0 < model.score(X, Y) <= 1.0
        again = pickle.loads(pickle.dumps(model))
        np.testing.assert_array_equal(again.predict(X.tolist()), model.predict(X))
        with pytest.raises(ValueError, match="1 features"):
            model.predict(X[:, :1])


def toys(alone: ModuleType) -> tuple[type, type]:
    """A classifier and a regressor of the base classes that scikit-learn does without."""
    own = importlib.import_module("torch_dpsco.estimators.reading")

    class Toy(own.ClassifierMixin, own.BaseEstimator):
        def __init__(self, *, cut=0.0, name=None):
            self.cut, self.name = cut, name

        def predict(self, X):
            return np.asarray(X) > self.cut

    class Line(own.RegressorMixin, own.BaseEstimator):
        def predict(self, X):
            return 2.0 * np.asarray(X)

    return Toy, Line


def test_parameters_are_those_of_the_constructor(alone) -> None:
    toy = toys(alone)[0](name="x")
    assert toy.get_params() == {"cut": 0.0, "name": "x"}
    with pytest.raises(ValueError, match="'cat' is no parameter of Toy: cut, name"):
        toy.set_params(cut=1.0, cat=2)
    assert toy.cut == 0.0


def test_scores_are_accuracy_and_r2(alone) -> None:
    Toy, Line = toys(alone)
    X, weights = [0.1, -0.2, 0.3, 0.4], [1.0, 2.0, 3.0, 0.5]
    y = [True, True, False, True]
    for given in (None, weights):
        wanted = np.average(Toy().predict(X) == np.array(y), weights=given)
        assert Toy().score(X, y, given) == pytest.approx(wanted)
        truth = [0.3, -0.1, 0.5, 0.9]
        errors = (np.array(truth) - Line().predict(X)) ** 2
        spread = (np.array(truth) - np.average(truth, weights=given)) ** 2
        wanted = 1 - np.average(errors, weights=given) / np.average(spread, weights=given)
        assert Line().score(X, truth, given) == pytest.approx(wanted)
