"""Private search: what it costs, what leaves, and what does not."""

from __future__ import annotations

import json
import warnings
from typing import Any

import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.rdp import RdpAccountant
from scipy import stats

import torch_dpsco as dp
from tests.streams import Picked
from torch_dpsco.accounting.analysis.gaussian import gaussian_mu
from torch_dpsco.accounting.events import ADD_REMOVE, ADJACENCIES, REPLACE_ONE
from torch_dpsco.errors import (
    AdjacencyError,
    BudgetExceeded,
    ConditionError,
    InfeasibleError,
    PrivacyError,
    UnitError,
)
from torch_dpsco.estimators import LinearSVC, LogisticRegression, Ridge, SoftmaxRegression
from torch_dpsco.statistics import scores
from torch_dpsco.statistics import search as module
from torch_dpsco.statistics.search import PrivateSearch, draw_count
from torch_dpsco.step.plan import Plan

N = 2000
RNG = np.random.default_rng(1)
X = RNG.uniform(-1, 1, (N, 2))
Y = np.clip(X @ [1.0, -0.5] + RNG.normal(size=N) / 10, -2, 2)
BOUNDS: dict[str, Any] = {"bound_x": 2**0.5, "bound_y": 2.0}
HINGE: dict[str, Any] = {
    "bound_x": 1.5,
    "prepare": None,
    "mechanism": "noisy_gd",
    "loss": "smoothed_hinge",
}
SVC, TEXT = LinearSVC(**HINGE, classes=(0, 1)), LinearSVC(**HINGE, classes=("no", "yes"))
GOOD, BAD = Ridge(**BOUNDS, prepare=None), Ridge(**BOUNDS, prepare=None, reg=1e7)


def search(candidates: Any = None, **settings: Any) -> PrivateSearch:
    given: dict[str, Any] = {
        "epsilon": 4.0,
        "adjacency": ADD_REMOVE,
        "n": N,
        "metric": "absolute_error",
        "bound": 2.0,
        "trials": 5.0,
    }
    return PrivateSearch(candidates=candidates or {"good": GOOD, "bad": BAD}, **given | settings)


# -- cost -------------------------------------------------------------------------------------------------------------


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("adjacency", ADJACENCIES)
def test_the_plan_keeps_the_budget(adjacency):
    found = search(adjacency=adjacency)
    plan = found.plan(2)
    assert 0.98 * 4.0 < plan.epsilon <= 4.0
    assert plan.trial.epsilon < 4.0
    assert "5 on average" in str(plan)
    assert plan.event.adjacencies == (adjacency,)


@pytest.mark.slow
def test_another_library_finds_the_same_cost():
    """All parts of a trial are Gaussian of one level: dp-accounting's selection of that mechanism."""
    plan = search(delta=1e-5).plan(2)
    mu = gaussian_mu(plan.trial.epsilon, plan.trial.delta)
    theirs = RdpAccountant(plan.event.orders)
    gaussian = dp_event.GaussianDpEvent(1 / mu)
    theirs.compose(dp_event.RepeatAndSelectDpEvent(gaussian, 5.0, 1.0))
    assert plan.epsilon == pytest.approx(theirs.get_epsilon(1e-5), rel=0.01)


@pytest.mark.slow
def test_every_candidate_and_the_score_count():
    """The cost of a trial is the largest one of its parts."""
    alone = search({"good": GOOD}).plan(2).trial.epsilon
    dear = Ridge(**BOUNDS, prepare=None)
    original = Ridge.plan

    class Dear(Ridge):
        def plan(self, dim: int, unit: str = "example") -> Any:
            return original(
                type(dear)(**self.get_params() | {"epsilon": 2 * self.epsilon}), dim, unit
            )

    costly = search({"good": GOOD, "dear": Dear(**BOUNDS, prepare=None)}).plan(2).trial.epsilon
    assert costly < 0.6 * alone


@pytest.mark.weekly
def test_objective_perturbation_is_counted_by_its_curve():
    candidate = LogisticRegression(bound_x=1.5, classes=(0, 1), prepare=None)
    plan = search({"one": candidate}, metric="accuracy", bound=None).plan(2)
    assert 0.98 * 4.0 < plan.epsilon <= 4.0


def test_the_number_of_trials_has_its_law():
    """Binomial tails of each number; false alarm below 1e-6 in all."""
    gamma, draws = 0.3, 4000
    source = Picked(np.random.default_rng(0))
    found = np.array([draw_count(gamma, source) for _ in range(draws)])
    counts = np.arange(1, 12)
    weights = (1 - gamma) ** (counts - 1) * gamma
    for count, chance in zip(counts, weights, strict=True):
        low, high = stats.binom.ppf([2e-8, 1 - 2e-8], draws, chance)
        assert low <= (found == count).sum() <= high
    assert found.min() == 1


# -- what leaves ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_search_is_charged_once_and_beforehand(monkeypatch):
    ledger = dp.Accountant(dp.Budget(4.0, 1e-6, ADD_REMOVE))
    fit, seen = Ridge.fit, []

    def watched(self, *args, **kwargs):
        seen.append(len(ledger))
        return fit(self, *args, **kwargs)

    monkeypatch.setattr(Ridge, "fit", watched)
    monkeypatch.setattr(module, "draw_count", lambda *_: 4)
    found = search(accountant=ledger).fit(X, Y)
    assert seen == [1] * 4
    assert len(ledger) == 1
    assert found.privacy_.epsilon <= 4.0
    assert found.best_estimator_.privacy_ == found.privacy_
    with pytest.raises((BudgetExceeded, PrivacyError)):
        found.best_estimator_.fit(X, Y)


def test_a_winner_shows_what_its_search_promised_and_charged():
    """And not the smaller epsilon of its trial, which is no guarantee of the best of several."""
    logistic = LogisticRegression(bound_x=1.5, classes=(0, 1), prepare=None)
    for found in (
        search().fit(X, Y),
        search({"one": logistic}, metric="accuracy", bound=None).fit(X, (Y > 0).astype(int)),
    ):
        trial, model = found.plan(2).trial.epsilon, found.best_estimator_
        assert trial < 3.0 < model.plan_.epsilon() == found.privacy_.epsilon <= 4.0
        assert (model.epsilon, model.plan_.budget, model.plan_.event()) == (
            4.0,
            found._settings()[0],
            found.plan(2).event,
        )
        shown = [str(model.plan_), str(model.report()), repr(model), str(found.privacy_)]
        assert not any(f"{trial:.3g}" in text for text in shown)
        assert "(4, 1e-06)-differential privacy" in shown[0]
        assert "the best of a secret number of trials" in shown[0]
        assert f"n = {N} used here is a public reference" in " ".join(shown[1].split())
        assert (
            max(map(len, shown)) < 8000
        )  # a curve of 500 orders is in the ledger, not in a text
        assert Plan.from_dict(json.loads(json.dumps(model.plan_.to_dict()))) == model.plan_


@pytest.mark.slow
def test_the_parts_of_a_trial_are_disjoint(monkeypatch):
    seen: dict[str, Any] = {}
    fit, scoring = Ridge.fit, module.score

    def fitted(self, X, y, **more):
        seen["fit"] = X
        return fit(self, X, y, **more)

    def scored(model, X, y, *args, **more):
        seen["held"] = X
        return scoring(model, X, y, *args, **more)

    monkeypatch.setattr(Ridge, "fit", fitted)
    monkeypatch.setattr(module, "score", scored)
    search(adjacency=REPLACE_ONE).fit(X, Y)
    assert (len(seen["fit"]), len(seen["held"])) == (1600, 400)
    together = np.concatenate([seen["fit"], seen["held"]])
    assert (together[np.lexsort(together.T)] == X[np.lexsort(X.T)]).all()


@pytest.mark.weekly
def test_the_best_of_many_wins(monkeypatch):
    """One of 40 trials is the good one but for 2^-40, and its error is smaller by far more than the noise."""
    monkeypatch.setattr(module, "draw_count", lambda *_: 40)
    found = search(epsilon=50.0).fit(X, Y)
    assert found.best_estimator_.reg is None
    assert found.best_score_ < 0.2
    assert found.predict(X[:3]).shape == (3,)
    accuracy = search(
        {
            "low": LogisticRegression(
                bound_x=1.5, classes=(0, 1), prepare=None, mechanism="noisy_gd"
            )
        },
        metric="accuracy",
        bound=None,
        epsilon=50.0,
    ).fit(X, (Y > 0).astype(int).tolist())
    assert accuracy.best_score_ > 0.7
    assert accuracy.predict_proba(X[:3]).shape == (3, 2)


@pytest.mark.slow
def test_nothing_but_the_winner_leaves(monkeypatch):
    fit = Ridge.fit

    def loud(self, *args, **kwargs):
        warnings.warn("a trial", stacklevel=1)
        return fit(self, *args, **kwargs)

    monkeypatch.setattr(Ridge, "fit", loud)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = search().fit(X, Y)
    assert "a trial" not in {str(one.message) for one in caught}
    settings = set(found.get_params())
    assert set(vars(found)) - settings == {
        "best_estimator_",
        "best_score_",
        "best_error_",
        "privacy_",
    }


def test_the_noise_of_a_trial_is_that_of_its_charge(monkeypatch):
    """A score of its own ledger may have the smaller noise of another law, which the curve of a search has not."""
    seen, made = [], scores._Noise.release

    def release(self, *args):
        seen.append(self.event)
        return made(self, *args)

    monkeypatch.setattr(scores._Noise, "release", release)
    found = search()
    plan = found.plan(2)
    found.fit(X, Y)
    assert set(seen) == {scores.score_event(plan.trial)}
    assert 0 < found.best_error_ < 1


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("failure", [RuntimeError("secret"), KeyboardInterrupt()])
def test_a_search_that_fails_releases_nothing(monkeypatch, failure):
    ledger = dp.Accountant(dp.Budget(8.0, 1e-6, ADD_REMOVE))
    found = search(accountant=ledger).fit(X, Y)
    fit, left = Ridge.fit, [2]

    def failing(self, *args, **kwargs):
        left[0] -= 1
        if left[0] == 0:
            raise failure
        return fit(self, *args, **kwargs)

    monkeypatch.setattr(Ridge, "fit", failing)
    monkeypatch.setattr(module, "draw_count", lambda *_: 5)
    found.set_params(accountant=dp.Accountant(dp.Budget(8.0, 1e-6, ADD_REMOVE)))
    with pytest.raises((PrivacyError, KeyboardInterrupt)) as caught:
        found.fit(X, Y)
    assert "secret" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert not {"best_estimator_", "best_score_", "best_error_", "privacy_"} & set(vars(found))
    assert len(found.accountant) == 1


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.cases(3, 1)
@pytest.mark.parametrize(
    ("error", "words", "settings"),
    [
        (ValueError, "trials must be in", {"trials": 1.0}),
        (ValueError, "metric must be one of", {"metric": "r2"}),
        (ValueError, "bound must be given for absolute_error", {"bound": None}),
        (ValueError, "bound must not be given for accuracy", {"metric": "accuracy"}),
        (ValueError, "delta", {"delta": 0.0}),
        (ValueError, "n must be given", {"n": None}),
        (ValueError, "holdout", {"holdout": 1.0}),
        (ValueError, "candidates must be models", {"candidates": {"one": 3}}),
        (
            ValueError,
            "candidates must have no ledger",
            {"candidates": {"one": Ridge(accountant=dp.Accountant())}},
        ),
        (UnitError, "n must be the number of records", {"n": N + 1, "adjacency": REPLACE_ONE}),
        (InfeasibleError, "trials fewer", {"trials": 1e6, "epsilon": 1e-4, "delta": 1e-12}),
        (
            ConditionError,
            "candidates must have a Renyi curve .got 'soft'",
            {
                "candidates": {
                    "soft": SoftmaxRegression(
                        bound_x=1.5, classes=(0, 1, 2), mechanism="objective"
                    )
                },
                "metric": "accuracy",
                "bound": None,
            },
        ),
    ],
)
def test_a_wrong_setting_is_refused_before_anything_is_spent(
    error, words, settings, monkeypatch
):
    monkeypatch.setattr(
        dp.Accountant, "authorize", lambda *args, **kwargs: pytest.fail("charged")
    )
    with pytest.raises(error, match=words):
        search(**settings).fit(X, Y)


@pytest.mark.parametrize(
    ("error", "words", "settings"),
    [
        (
            ValueError,
            "metric .* 'good' .Ridge. can be scored by .got 'accuracy'.",
            {"metric": "accuracy", "bound": None},
        ),
        (
            ValueError,
            "metric .* 'svc' .LinearSVC. .* predict_proba",
            {"candidates": {"svc": SVC}, "metric": "log_loss"},
        ),
        (
            ValueError,
            "metric .* 'text' .LinearSVC. .*absolute_error",
            {"candidates": {"text": TEXT}},
        ),
        (
            AdjacencyError,
            "accountant must have the adjacency 'add_remove'",
            {"accountant": dp.Accountant(adjacency=REPLACE_ONE)},
        ),
        (UnitError, "n_max=1600 must be a public cap", {"n": 1000, "rows": 3 * N}),
        (ValueError, "Complex", {"y": Y + 1j}),
    ],
)
def test_no_setting_fails_after_the_charge(error, words, settings):
    """What a trial would raise by settings, shapes and numbers of records is raised before the search is charged."""
    given = {"accountant": dp.Accountant(dp.Budget(4.0, 1e-6, ADD_REMOVE))} | settings
    rows, targets = given.pop("rows", N), given.pop("y", Y)
    with pytest.raises(error, match=words) as caught:
        search(**given).fit(np.resize(X, (rows, 2)), np.resize(targets, rows))
    assert len(given["accountant"]) == 0
    assert len(str(caught.value)) < 300  # an event has hundreds of numbers


def test_the_budget_of_a_trial_is_found_from_below():
    for root in np.linspace(-4.0, -0.01, 50):
        found = search()._largest(lambda log_epsilon, root=root: log_epsilon - root, 0.0)
        assert root - 1e-3 < found <= root


@pytest.mark.parametrize("least", [-10.0, -3.0, -2.0, -1.1])
def test_what_is_too_small_for_a_setting_is_passed_by(least):
    """Of trials with plans from exp(least) on, and too dear from exp(-1) on."""

    def excess(log_epsilon):
        if log_epsilon < least:
            raise InfeasibleError("reg is too small")
        return log_epsilon + 1.0

    assert least <= search()._largest(excess, 0.0) <= -1.0
    with pytest.raises(
        InfeasibleError,
        match=r"epsilon must be larger.* reg is too small" if least > -4 else "larger",
    ):
        search()._largest(lambda log_epsilon: max(1e-9, excess(log_epsilon)), 0.0)


@pytest.mark.slow
def test_a_setting_that_needs_a_larger_trial_is_no_bar():
    """A reg of one's own has no plan at a small epsilon of each trial, and one at the epsilon that is chosen."""
    own = LogisticRegression(bound_x=1.5, classes=(0, 1), reg=1.0)
    plan = search({"own": own}, epsilon=3.0, metric="accuracy", bound=None).plan(2)
    assert 0.98 * 3.0 < plan.epsilon <= 3.0
    with pytest.raises(InfeasibleError, match="candidate 'own': reg must be >"):
        search({"own": own}, epsilon=0.1, metric="accuracy", bound=None).plan(2)


def test_the_curve_of_a_search_is_not_written_out():
    charged = search().plan(2).event
    assert len(str(charged)) < 100
    assert "orders from" in str(charged)


def test_a_search_past_the_budget_draws_nothing(monkeypatch):
    monkeypatch.setattr(Ridge, "fit", lambda *args, **kwargs: pytest.fail("drawn"))
    with pytest.raises(BudgetExceeded):
        search(accountant=dp.Accountant(dp.Budget(1.0, 1e-6, ADD_REMOVE))).fit(X, Y)
