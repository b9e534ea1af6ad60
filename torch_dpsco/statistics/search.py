"""A private search: the best of a random, secret number of candidates leaves, at one charge that is paid beforehand.

Records are put into two parts by a draw that looks at no value. One trial is a candidate drawn at random, its fit to
the first part and its noisy score on the second. A record is in one part, so that the Renyi divergence of a trial is at
most the larger one of the candidates' and the score's. The number K of trials is drawn by a public law and stays
secret, and the model with the best score leaves.

Source: docs/proofs/search.md; Papernot and Steinke 2022, theorem 2.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from decimal import Context, Decimal
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from torch_dpsco import _validate as check
from torch_dpsco import shown
from torch_dpsco._validate import check_fields
from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.accounting.analysis.rdp import selection_curve
from torch_dpsco.accounting.budgets import Budget, warn_of_delta
from torch_dpsco.accounting.curves import orders_at
from torch_dpsco.accounting.events import (
    ADD_REMOVE,
    ZERO_OUT,
    Event,
    RDPCurve,
    check_adjacency,
    in_words,
)
from torch_dpsco.accounting.ledger import Ledger
from torch_dpsco.accounting.report import PrivacyReport
from torch_dpsco.errors import (
    CalibrationError,
    ConditionError,
    InfeasibleError,
    PrivacyError,
    UnitError,
)
from torch_dpsco.estimators.base import LinearModel, stand_in
from torch_dpsco.estimators.objective import ObjectivePlan
from torch_dpsco.estimators.reading import (
    BaseEstimator,
    NotFittedError,
    as_features,
    require_dtype,
)
from torch_dpsco.estimators.task import LinearPlan, Search, make_records
from torch_dpsco.noise import Keystream, Stream
from torch_dpsco.statistics.held_out import CPU, ledger_of, split
from torch_dpsco.statistics.scores import (
    LOSSES,
    PrivateScore,
    default_bins,
    score,
    score_event,
)
from torch_dpsco.trial import Refused, attempt

_LEVEL = 1  # orders up to 2^14
_BITS = 256  # of the draw of K
_EXACT = Context(prec=100)
_MOST_TRIALS = 1e6
_CLOSE = 5e-4  # relative, below the target


@dataclass(frozen=True)
class SearchPlan:
    """The public numbers of a search, before anything is spent: `print(search.plan(d))`.

    Args:
        trial: budget of each fit and of each score.
        gamma: of the law of K, in (0, 1).
        event: what the search charges.
        epsilon: of the event at the search's delta.
        words: all of it, as text.
    """

    trial: Budget
    gamma: float
    event: RDPCurve
    epsilon: float
    words: str

    def __repr__(self) -> str:
        return shown.line(self, self.words)

    def __str__(self) -> str:
        return self.words


@dataclass(eq=False, repr=False, kw_only=True)
class PrivateSearch(BaseEstimator):
    """Searches for the best of several models and settings within one budget.

    Args:
        candidates: name to an unfitted model of `torch_dpsco.estimators`, with all settings but epsilon, delta,
            adjacency, n and accountant, which the search sets. Its mechanism must have a Renyi curve (see `plan`).
        epsilon: > 0, of the whole search.
        delta: in (0, 1).
        adjacency: as of `LinearModel`.
        n: public number of records, as of `LinearModel`.
        metric: of `dp.score`.
        bound: public bound of a loss, for metrics that are losses.
        trials: expected number of trials, > 1. Each candidate is drawn with the same probability, so that there should
            be several trials for each.
        holdout: share of records that trials are scored on, in (0, 1).
        accountant: ledger that is charged; None for a new one with this budget.

    Attributes:
        best_estimator_: the model with the best noisy score; its `privacy_`, `plan_` and epsilon are the search's.
        best_score_: its noisy score; the best of several is optimistic.
        best_error_: standard deviation of that score, of its noise and of the records it was measured on.
        privacy_: `PrivacyReport` of the ledger after the search.

    Guarantee:
        (epsilon, delta)-DP under the adjacency, one record; for winner and score together. Nothing else leaves: no
        number of trials, no other score, no message of a trial; a search that is interrupted has no result, and its
        charge stays. K is within 2^-200 of its law. Running time tells K, and is not covered.

    Source: docs/proofs/search.md
    """

    candidates: Mapping[str, LinearModel]
    epsilon: float = 1.0
    delta: float = 1e-6
    adjacency: str = ZERO_OUT
    n: int | None = None
    metric: str = "accuracy"
    bound: float | None = None
    trials: float = 10.0
    holdout: float = 0.2
    accountant: Accountant | None = None

    def plan(self, dim: int) -> SearchPlan:
        """Returns what a search costs and what is left for each trial, before anything is spent.

        Args:
            dim: d, number of features.

        Raises:
            ConditionError: a candidate has no Renyi curve, by name.
            InfeasibleError: no budget of a trial is small enough.
            ValueError: a setting.
        """
        budget, gamma = self._settings()
        check.positive_count(dim=dim)
        warn_of_delta(budget, check.positive_count(n=self.n))

        def event(epsilon: float) -> RDPCurve:
            return self._event(self._trial(budget, epsilon), dim, gamma)

        def excess(log_epsilon: float) -> float:
            return math.log(_epsilon(event(math.exp(log_epsilon)), budget) / budget.epsilon)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of budgets that are tried
            found = self._largest(excess, math.log(budget.epsilon))
        trial = self._trial(budget, math.exp(found))
        charged = event(trial.epsilon)
        words = [
            f"PrivateSearch: {budget.target} ({in_words(budget.adjacency)}), charged once, beforehand",
            (
                f"  geometric number of trials, {self.trials:g} on average, among"
                f" {len(self.candidates)} candidates"
            ),
            (
                f"  each is fitted to {1 - self.holdout:g} of the records and scored on the others"
                f" ({self.metric}), with epsilon {trial.epsilon:.4g} at delta {trial.delta:g}"
            ),
        ]
        return SearchPlan(trial, gamma, charged, _epsilon(charged, budget), "\n".join(words))

    def fit(self, X: Any, y: Any) -> PrivateSearch:
        """Searches; charged to the ledger before anything is drawn.

        Args:
            X: private rows (n, d), as for `LinearModel.fit`, in memory.
            y: their labels or targets (n,).

        Raises:
            AdjacencyError: the accountant is of another adjacency.
            BudgetExceeded: nothing was drawn.
            PrivacyError: a trial failed, which is not said further; nothing is released, and the charge stays.
            UnitError: X has not n rows, where n is public, or more than n_max of a candidate.
            ValueError: a setting, a shape or a dtype.
        """
        budget, _ = self._settings()
        features = as_features(X)
        if budget.adjacency != ADD_REMOVE and len(features) != self.n:
            raise UnitError(
                f"n must be the number of records under {budget.adjacency} (got {self.n})"
            )
        plan = self.plan(features.shape[1])
        ledger, delta = ledger_of(budget, self.accountant)
        privacy = ledger.report(delta)
        rows = features.cpu().numpy()
        targets = _targets(y, len(rows))
        held = split(len(rows), self.holdout, budget.adjacency)
        # PRIVACY: a trial that a setting fails tells of no record (test_no_setting_fails_after_the_charge)
        for name in self.candidates:
            self._try(name, plan.trial, privacy, rows[~held], targets[~held])
            require_dtype(y, self._model(name, plan.trial)._classes())
        for name in ("best_estimator_", "best_score_", "best_error_", "privacy_"):
            vars(self).pop(name, None)  # a search that is interrupted has no result
        # PRIVACY: the whole search before its first trial (test_a_search_is_charged_once_and_beforehand)
        ledger.authorize(plan.event)
        with warnings.catch_warnings():
            # PRIVACY: warnings would tell K (test_nothing_but_the_winner_leaves)
            warnings.simplefilter("ignore")
            found = attempt("a trial", lambda: self._best(plan, rows, targets, held))
        if isinstance(found, Refused):
            # PRIVACY: which trial failed, and how, tells of records (test_a_search_that_fails_releases_nothing)
            raise PrivacyError(
                "the search failed: nothing is released, and what was charged stays"
            ) from None
        best, model = found  # which says what its search promised and charged
        model.plan_ = replace(model.plan_, search=Search(budget, plan.event, cast(int, self.n)))
        self.best_score_ = best.value
        self.best_error_ = best.error
        self.privacy_ = model.privacy_ = ledger.report(delta)
        model.accountant = ledger
        model.epsilon = self.epsilon
        self.best_estimator_ = model
        return self

    def predict(self, X: Any) -> NDArray[Any]:
        """Returns what the winner says of public rows."""
        winner: Any = self._winner()
        return np.asarray(winner.predict(X))

    def predict_proba(self, X: Any) -> NDArray[np.float64]:
        """Returns probabilities by the winner, if it has them."""
        winner: Any = self._winner()
        return np.asarray(winner.predict_proba(X))

    def _winner(self) -> LinearModel:
        if not hasattr(self, "best_estimator_"):
            raise NotFittedError(
                "This PrivateSearch instance is not fitted yet: call fit before"
            )
        return self.best_estimator_

    def _settings(self) -> tuple[Budget, float]:
        check_fields(self)
        for name, model in self.candidates.items():
            if not isinstance(model, LinearModel):
                raise ValueError(
                    "candidates must be models of torch_dpsco.estimators (got"
                    f" {check.shown(model)})"
                )
            if model.accountant is not None:
                raise ValueError(
                    "candidates must have no ledger, since the search has one (got one of"
                    f" {name!r})"
                )
        if not self.candidates:
            raise ValueError("candidates must be one or more models by name (got none)")
        if check.open_interval(0.0, 1.0, delta=self.delta) and self.n is None:
            raise ValueError("n must be given, as for the models (got None)")
        check.positive_count(n=self.n)
        check.open_interval(0.0, 1.0, holdout=self.holdout)
        if not 1 < check.finite(trials=self.trials) <= _MOST_TRIALS:
            raise ValueError(
                f"trials must be in (1, {_MOST_TRIALS:g}], their expected number (got"
                f" {self.trials})"
            )
        budget = Budget(self.epsilon, self.delta, adjacency=check_adjacency(self.adjacency))
        return budget, 1.0 / self.trials

    def _largest(self, excess: Callable[[float], float], high: float) -> float:
        """Returns the logarithm of the largest epsilon of a trial that keeps the budget.

        Raises InfeasibleError for none.

        What is too small for a setting of a candidate, as for a reg of its own, is passed by.
        """
        if excess(high) <= 0:
            return high
        low = high - math.log(64)
        found = None
        why = ""
        while high - low > _CLOSE:
            tried = (low + high) / 2
            try:
                # PRIVACY: what is returned keeps the budget (test_the_budget_of_a_trial_is_found_from_below)
                if excess(tried) > 0:
                    high = tried
                else:
                    low = tried
                    found = tried
            except CalibrationError as error:
                low = tried
                why = f". A smaller budget of each trial leaves nothing: {error}"
        if found is None:
            raise InfeasibleError(
                f"epsilon must be larger, or trials fewer than {self.trials:g} (got epsilon"
                f" {self.epsilon:g}){why}"
            )
        return found

    def _try(
        self,
        name: str,
        trial: Budget,
        privacy: PrivacyReport,
        rows: NDArray[Any],
        targets: NDArray[Any],
    ) -> None:
        """Scores a stand-in for a candidate's fit on made-up rows; raises whatever a trial would by settings.

        Args:
            name: of the candidate.
            trial: its budget.
            privacy: report of the stand-in.
            rows: that it would be fitted to: their number, shape and dtype matter.
            targets: of these, likewise.
        """
        model = self._model(name, trial)
        plan = self._plan_of(name, trial, rows.shape[1])
        make_records(plan.task, torch.from_numpy(rows), *model._read(targets, len(rows), CPU))
        made = stand_in(model, plan, privacy)
        labels = getattr(made, "classes_", np.zeros(1))
        try:
            charged: dict[str, Any] = {"budget": trial, "accountant": Accountant(trial)}
            score(
                made,
                np.zeros((2, rows.shape[1])),
                [labels[0]] * 2,
                self.metric,
                bound=self.bound,
                **charged,
            )
        except ValueError as error:
            raise ValueError(
                f"metric must be one that candidate {name!r} ({type(model).__name__}) can be scored"
                f" by (got {self.metric!r}): {error}"
            ) from error

    def _trial(self, budget: Budget, epsilon: float) -> Budget:
        return Budget(epsilon, budget.delta, adjacency=budget.adjacency)

    def _model(self, name: str, trial: Budget) -> LinearModel:
        assert self.n is not None
        fitted = self.n - round(self.holdout * self.n)
        settings = {
            "epsilon": trial.epsilon,
            "delta": trial.delta,
            "adjacency": trial.adjacency,
            "n": fitted,
        }
        model = self.candidates[name]
        return type(model)(**{**model.get_params(deep=False), **settings})

    def _plan_of(self, name: str, trial: Budget, dim: int) -> LinearPlan:
        try:
            return self._model(name, trial).plan(dim)
        except CalibrationError as error:
            raise type(error)(f"candidate {name!r}: {error}") from error

    def _bins(self, trial: Budget) -> int | None:
        """Returns the bins of an area, by the public number of records that are held out."""
        assert self.n is not None
        return (
            default_bins(trial, round(self.holdout * self.n)) if self.metric == "auc" else None
        )

    def _event(self, trial: Budget, dim: int, gamma: float) -> RDPCurve:
        """Returns the charge of a search with this budget of each fit and each score."""
        orders = orders_at(_LEVEL)
        values = _curve("score", score_event(trial), trial)
        for name in self.candidates:
            plan = self._plan_of(name, trial, dim)
            try:
                if isinstance(plan, ObjectivePlan):
                    plan = replace(plan, charge="curve")
            except ConditionError as error:
                raise ConditionError(
                    f"candidates must have a Renyi curve (got {name!r}): {error}"
                ) from error
            values = np.maximum(values, _curve(name, plan.event(), trial))
        found = selection_curve(orders, values, gamma)
        return RDPCurve(tuple(orders.tolist()), tuple(found.tolist()), (trial.adjacency,))

    def _best(
        self,
        plan: SearchPlan,
        rows: NDArray[Any],
        targets: NDArray[Any],
        held: NDArray[np.bool_],
    ) -> tuple[PrivateScore, LinearModel]:
        """Returns the best score and its model, of K trials; ties go to the first, which is a random one of them."""
        source = Keystream()
        names = list(self.candidates)
        best = None
        sign = -1.0 if self.metric in LOSSES else 1.0
        for _ in range(draw_count(plan.gamma, source)):
            model = self._model(names[int(source.integers(len(names), 1)[0])], plan.trial)
            model.fit(rows[~held], targets[~held])
            # PRIVACY: with an accountant, a score has the noise that was charged
            # (test_the_noise_of_a_trial_is_that_of_its_charge)
            charged: dict[str, Any] = {
                "budget": plan.trial,
                "accountant": Accountant(plan.trial),
            }
            found = score(
                model,
                rows[held],
                targets[held],
                self.metric,
                bound=self.bound,
                bins=self._bins(plan.trial),
                **charged,
            )
            if best is None or sign * found.value > sign * best[0].value:
                best = found, model
        assert best is not None
        return best


def _curve(name: str, event: Event, trial: Budget) -> NDArray[np.float64]:
    """Returns the Renyi curve of an event; raises ConditionError, by name, if it has none."""
    cost = Ledger([event]).cost(trial.adjacency, _LEVEL)
    if cost.fails or not np.isfinite(cost.rdp).any():
        raise ConditionError(
            "candidates must have a Renyi curve, as LogisticRegression, LinearSVC and Ridge do"
            f" (got {name!r}, {event})"
        )
    return np.asarray(cost.rdp)


def _epsilon(event: RDPCurve, budget: Budget) -> float:
    return Ledger([event]).epsilon(budget.delta, budget.adjacency)


def draw_count(gamma: float, source: Stream) -> int:
    """Returns K >= 1 of the geometric law, by inversion with 256 bits and 100 digits: within 2^-200 of the law.

    Args:
        gamma: in (0, 1).
        source: of the draw.
    """
    wanted = _EXACT.divide(Decimal(source.integer(_BITS)), Decimal(2**_BITS))
    above = _EXACT.ln(_EXACT.subtract(Decimal(1), wanted))
    fail = _EXACT.ln(_EXACT.subtract(Decimal(1), Decimal(gamma)))
    return 1 + int(_EXACT.divide(above, fail))


def _targets(y: Any, rows: int) -> NDArray[Any]:
    """Returns targets as an array; raises ValueError unless there is one per row."""
    targets = np.asarray(y, dtype=object) if isinstance(y, list) else np.asarray(y)
    if targets.shape != (rows,):
        raise ValueError(
            f"y must have one target per row (got shape {targets.shape} for {rows} rows)"
        )
    return targets
