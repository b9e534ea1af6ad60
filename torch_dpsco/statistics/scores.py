"""A score of a released model on private records, by one release of noisy counts.

Each record has a vector v of integers over 2^20, v >= 0 and |v|_1 <= 1, that depends on it alone:

    accuracy, losses    v = (f, 1 - f), f in [0, 1]    the loss over its public bound, or whether the label is right
    auc                 v = e_(class, bin)             of the probability p of the second class: public bins of
                                                       asin(sqrt(p)), which are the finer the rarer a class is

Released is sum v with noise, in integers; score and errors are post-processing of it (`estimates`). A record moves the
sum by at most 1 (one more or less, or made null), or sqrt(2) (replaced: vectors >= 0 have no obtuse angles). Of a user,
v is the mean over the rows, rounded down.

Source: docs/proofs/scores.md
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torch_dpsco import _validate as check
from torch_dpsco import shown
from torch_dpsco._validate import typed
from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.accounting.analysis.gaussian import gaussian_sigma
from torch_dpsco.accounting.analysis.rounding import exact_grid, with_grid
from torch_dpsco.accounting.budgets import Budget, warn_of_delta
from torch_dpsco.accounting.events import (
    ADD_REMOVE,
    ADJACENCIES,
    REPLACE_ONE,
    ZERO_OUT,
    Event,
    Gaussian,
    Pure,
)
from torch_dpsco.accounting.report import PrivacyReport
from torch_dpsco.errors import ConditionError
from torch_dpsco.estimators.reading import as_codes
from torch_dpsco.noise import Source, noise_generator
from torch_dpsco.sampling import fingerprint
from torch_dpsco.statistics.estimates import (
    Counts,
    Estimate,
    Group,
    bins_of,
    calibration,
    of_area,
    of_share,
    rounded,
)
from torch_dpsco.statistics.held_out import (
    BLOCK,
    CPU,
    Method,
    Read,
    agreed_budget,
    asked,
    held_out,
    ledger_of,
    method_of,
    numbers,
    public_labels,
    require_apart,
)
from torch_dpsco.step.exact_noise import draw_laplace, exact_release

LOSSES = ("log_loss", "absolute_error", "squared_error")
METRICS = ("accuracy", "auc", *LOSSES)
_UNIT = 2**20  # of a contribution, in integers
# L2, L1 sensitivity of the counts
_L2 = {ADD_REMOVE: 1.0, ZERO_OUT: 1.0, REPLACE_ONE: math.nextafter(math.sqrt(2.0), 2.0)}
_L1 = {ADD_REMOVE: 1.0, ZERO_OUT: 1.0, REPLACE_ONE: 2.0}
_MOST_BINS = 1024
_USUAL_BINS = 16  # where the number of records is private


@dataclass(frozen=True)
class PrivateScore:
    """A released score: `print(score)` shows it with its error.

    Args:
        metric: its name.
        value: in [0, 1], or in [0, bound] of a loss.
        noise_error: standard deviation of what noise adds to the score of these records.
        sampling_error: standard deviation of the score of as many other records, without noise; for losses at most.
        interval: (low, high), that holds the score of all people like these with 95 %: both errors are in it.
        greater_is_better: whether it is no loss.
        privacy: `PrivacyReport` of the ledger after the release.
        counts: what was released; of auc, records by class and bin.
        noise_std: standard deviation of the noise of each of them.
    """

    metric: str
    value: float
    noise_error: float
    sampling_error: float
    interval: tuple[float, float]
    greater_is_better: bool
    privacy: PrivacyReport
    counts: Counts = field(repr=False, compare=False)
    noise_std: float

    @property
    def error(self) -> float:
        """Standard deviation of both together."""
        return math.hypot(self.noise_error, self.sampling_error)

    @property
    def chance(self) -> float | None:
        """The score of a guess that looks at nothing: 1/2 for auc; of others the release does not tell it."""
        return 0.5 if self.metric == "auc" else None

    @property
    def base_rate(self) -> Estimate | None:
        """Share of the second class among the records, which the release tells for auc only."""
        if self.metric != "auc":
            return None
        first, second = self.counts.sum(1)
        variance = self.counts.shape[1] * self.noise_std**2
        return of_share(np.array([second, first]), variance)

    def calibration(self) -> tuple[Group, ...]:
        """Returns how often the second class came true, by the probability that the model gave it.

        From the release of auc, without a further look; a `decision_function` t counts as 1/(1 + e^-t).

        Raises:
            ConditionError: another metric, whose release does not tell it.
        """
        if self.metric != "auc":
            raise ConditionError(
                f"metric must be 'auc' for a calibration, which its release tells (got {self.metric!r})"
            )
        return calibration(self.counts, self.noise_std**2)

    def __float__(self) -> float:
        return self.value

    def __repr__(self) -> str:
        return shown.line(self, str(self))

    def _repr_html_(self) -> str:
        rows = [
            (self.metric, f"{self.value:.4g} +- {self.error:.2g}"),
            ("noise", f"{self.noise_error:.2g}"),
            ("sampling", f"{self.sampling_error:.2g}"),
        ]
        return shown.table("Private score", rows, str(self.privacy))

    def __str__(self) -> str:
        value, error, low, high = rounded(self.error, self.value, self.error, *self.interval)
        chance = "" if self.chance is None else f"; by chance {self.chance:g}"
        return f"{self.metric} {value} +- {error} (95 %: {low} to {high}{chance})"


@typed
def score(
    model: Any,
    X: Any,
    y: Any,
    metric: str = "accuracy",
    *,
    epsilon: float | None = None,
    delta: float | None = None,
    budget: Budget | None = None,
    bound: float | None = None,
    classes: Any = None,
    bins: int | None = None,
    groups: Any = None,
    accountant: Accountant | None = None,
    generator: torch.Generator | None = None,
) -> PrivateScore:
    """Releases how good a model is on private records that it was not fitted to.

    Args:
        model: public, or released already; with `predict`, or `predict_proba` for log_loss and auc (or
            `decision_function` for auc). What it says of a row must depend on that row alone, which is tried on
            made-up rows.
        X: private rows (n, d), as for `fit`; one with a non-finite value is a null record, which counts for nothing.
        y: their labels or targets (n,); a label that is none of the classes, or no number, makes a null record.
        metric: one of "accuracy", "auc" (two classes), "log_loss", "absolute_error", "squared_error".
        epsilon: of a budget, beside delta, in place of `budget`.
        delta: of a budget, beside epsilon.
        budget: of this release: its noise follows from epsilon, delta, adjacency and unit. It is Gaussian, or at
            delta = 0 of Laplace; without an accountant the smaller one of the two.
        bound: public bound > 0 that the loss of a record is clipped to; for losses, and only then.
        classes: public labels; None for the model's `classes_`.
        bins: 2 to 1024, of auc; None for 2 (n / std of the noise of a count)^(1/3), in 8..128, where n is public, and
            16 under add_remove.
        groups: (n,) ids of users, which the budget then protects: the score is the mean over users of the means of
            their rows.
        accountant: ledger that is charged; None for a new one with this budget.
        generator: for tests only (warns).

    Returns:
        The score and its errors. Where noise hides the records, or one of two classes, 1/2 of its range, with a
        `noise_error` of as much.

    Raises:
        AdjacencyError: the accountant is of another adjacency.
        BudgetExceeded: the release would pass the accountant's budget; nothing was drawn.
        ConditionError: the budget's noise cannot be drawn in integers; nothing was charged.
        NotCertifiedError: what the model says of a row depends on other rows; nothing was charged.
        UnitError: groups with a budget of unit "example", or the reverse, or an accountant of another unit.
        ValueError: a setting, a shape or a dtype.

    Guarantee:
        (epsilon, delta)-DP under the budget's adjacency, for one record, or all rows of a user; the number of records
        is private under add_remove. The model has its own guarantee, which composes with this one if it was fitted to
        any of these records. Running time, and errors that the model raises, are not covered.

    Source: docs/proofs/scores.md

    Example:
        >>> class Model:
        ...     classes_ = ("no", "yes")
        ...     def predict(self, X):
        ...         return ["yes" if x > 0 else "no" for x in X[:, 0]]
        >>> X = np.linspace(-1, 1, 20_000).reshape(-1, 1)
        >>> found = score(Model(), X, np.where(X[:, 0] > 0.2, "yes", "no"), budget=Budget(1.0, 1e-6))
        >>> found.metric, 0.89 < found.value < 0.91, found.error < 0.003
        ('accuracy', True, True)
    """
    kind = check.choice(METRICS, metric=metric)
    if kind not in LOSSES and bound is not None:
        raise ValueError(f"bound must not be given for {kind}, which has one (got {bound})")
    if kind in LOSSES and bound is None:
        raise ValueError(
            f"bound must be given for {kind}: a public bound on the loss of a record (got None)"
        )
    limit = 1.0 if bound is None else check.positive(bound=bound)
    if bins is not None and not 2 <= check.positive_count(bins=bins) <= _MOST_BINS:
        raise ValueError(f"bins must be in 2..{_MOST_BINS} (got {bins})")
    budget = agreed_budget(budget, epsilon, delta, accountant, groups)
    noise = _Noise(quietest(budget) if accountant is None else budget)
    ledger, delta = ledger_of(budget, accountant, groups)
    labels = _classes(model, kind, classes)
    records = held_out(X, y, labels, groups)
    # PRIVACY: else their number is private, or unknown
    # (test_the_number_of_scored_records_is_not_told_under_add_remove)
    if budget.adjacency != ADD_REMOVE and groups is None:
        warn_of_delta(budget, len(records.rows))
    if bins is None:
        # PRIVACY: how many there are must not tell a private number of records
        # (test_the_number_of_bins_is_one_of_public_numbers)
        bins = (
            _USUAL_BINS
            if budget.adjacency == ADD_REMOVE
            else bins_of(records.units, noise.deviation)
        )
    vectors = _contributions(model, kind, limit, labels, bins, records.rows, records.truth)
    total = counts(vectors * records.valid[:, None], records.users)
    source = noise_generator("cpu", generator)
    # PRIVACY: charged before noise is drawn (test_nothing_is_released_that_was_not_charged)
    noisy = np.asarray(
        ledger.pay(
            noise.event,
            lambda: {"score": kind, "limit": limit, "bins": bins},
            partial(fingerprint, contents=[vectors]),
            lambda: noise.release(total, source).tolist(),
        )
    )
    if kind == "auc":
        noisy = noisy.reshape(2, bins)
    return _made(kind, limit, noisy, noise, ledger.report(delta))


def _made(
    kind: str, limit: float, noisy: Counts, noise: _Noise, privacy: PrivacyReport
) -> PrivateScore:
    """Returns the score of what was released."""
    found = (of_area if kind == "auc" else of_share)(noisy, noise.variance)
    low, high = found.interval
    return PrivateScore(
        metric=kind,
        value=limit * found.value,
        noise_error=limit * found.noise,
        sampling_error=limit * found.sampling,
        interval=(limit * low, limit * high),
        greater_is_better=kind not in LOSSES,
        privacy=privacy,
        counts=noisy,
        noise_std=noise.deviation,
    )


def quietest(budget: Budget) -> Budget:
    """Returns a budget of delta 0 if that has less noise and implies this one, else this one."""
    pure = Budget(budget.epsilon, 0.0, adjacency=budget.adjacency, unit=budget.unit)
    return (
        pure
        if budget.mode == "planned" and _Noise(pure).variance < _Noise(budget).variance
        else budget
    )


def default_bins(budget: Budget, n: int) -> int:
    """Returns the default number of bins of an area, of a public number of records (or users)."""
    return bins_of(n, _Noise(budget).deviation)


def counts(vectors: NDArray[np.int64], users: Tensor | None = None) -> NDArray[np.int64]:
    """Returns the sum of contributions (n, cells), in integers over 2^20; of users, of the means of their rows."""
    if users is None:
        return np.asarray(vectors.sum(0))
    _, places, rows = np.unique(users.numpy(), return_inverse=True, return_counts=True)
    sums = np.zeros((len(rows), vectors.shape[1]), dtype=np.int64)
    np.add.at(sums, places, vectors)
    # PRIVACY: a user counts for one record however many rows there are (test_a_user_moves_the_counts_by_at_most_one)
    return np.asarray((sums // rows[:, None]).sum(0))


def score_event(budget: Budget) -> Event:
    """Returns what a score charges to a given accountant, before anything is scored; see `score`."""
    return _Noise(budget).event


class _Noise:
    """Noise of a budget on counts, and the event that charges it; raises ConditionError for none."""

    def __init__(self, budget: Budget) -> None:
        self.event: Gaussian | Pure
        if budget.delta == 0:
            moved = _L1[budget.adjacency]
            self._scale = Fraction(moved) / Fraction(budget.epsilon)
            # PRIVACY: under others a record may move more (test_pure_noise_is_charged_where_it_was_proved)
            self.event = Pure(budget.epsilon, tuple(a for a in ADJACENCIES if _L1[a] <= moved))
            self.deviation = math.sqrt(2.0) * float(self._scale)
            return
        sens = {adjacency: with_grid(moved) for adjacency, moved in _L2.items()}
        sigma = gaussian_sigma(budget.epsilon, budget.delta, sens[budget.adjacency])
        self.event = Gaussian(sigma, sens, exact=True)
        self.deviation = sigma
        exact_grid(sigma, min(sens.values()), 2 * _MOST_BINS)

    @property
    def variance(self) -> float:
        """That of the noise of each count."""
        return self.deviation**2

    def release(self, total: NDArray[np.int64], source: Source) -> NDArray[np.float64]:
        """Returns noisy counts, in records."""
        if isinstance(self.event, Gaussian):
            return np.asarray(
                exact_release(torch.from_numpy(total / _UNIT), self.event, source).numpy()
            )
        step = Fraction(1, _UNIT)
        return np.array(
            [
                float(Fraction(int(one), _UNIT) + draw_laplace(self._scale, step, source))
                for one in total
            ]
        )


def _classes(model: Any, metric: str, classes: Any) -> list[Any]:
    """Returns public labels; none for regression."""
    if metric in ("absolute_error", "squared_error"):
        if classes is not None:
            raise ValueError(
                f"classes must not be given for {metric} (got {check.shown(classes)})"
            )
        return []
    labels = public_labels(model, classes)
    if metric == "auc" and len(labels) != 2:
        raise ValueError(f"classes must be two for auc (got {len(labels)})")
    return labels


def _contributions(
    model: Any,
    metric: str,
    limit: float,
    labels: list[Any],
    bins: int,
    rows: NDArray[Any],
    truth: NDArray[np.float64],
) -> NDArray[np.int64]:
    """Returns the vectors of records (n, cells) of finite rows and places of labels, or targets, in integers."""
    method, read = _question(model, metric, labels)
    require_apart(method, read, rows.shape[1], rows.dtype)
    said = asked(method, read, rows)
    every = np.arange(len(rows))
    if metric == "auc":
        vectors = np.zeros((len(rows), 2 * bins), dtype=np.int64)
        place = np.minimum(said * bins, bins - 1).astype(np.int64)
        vectors[every, truth.astype(np.int64) * bins + place] = _UNIT
        return vectors
    with np.errstate(over="ignore", invalid="ignore"):
        if metric == "accuracy":
            share = (said == truth).astype(np.float64)
        elif metric == "log_loss":
            share = said[every, truth.astype(np.int64)] / limit
        else:
            error = np.abs(said - truth)
            share = (error if metric == "absolute_error" else error**2) / limit
    # PRIVACY: no record counts for more than 1, NaN as the worst (test_a_record_moves_the_counts_by_at_most_one)
    first = np.rint(np.clip(np.nan_to_num(share, nan=1.0), 0.0, 1.0) * _UNIT).astype(np.int64)
    return np.stack([first, _UNIT - first], axis=1)


def _question(model: Any, metric: str, labels: list[Any]) -> tuple[Method, Read]:
    """Returns what the model is asked for a metric, and what is read off its answer on a block.

    Functions that libraries compute are called on blocks only, since they may round by place.
    """

    def losses(out: Any) -> NDArray[np.float64]:
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.asarray(-np.log(numbers(out, (BLOCK, len(labels)))))

    if metric == "accuracy":
        return (
            method_of(model, "predict"),
            lambda out: as_codes(out, labels, BLOCK, CPU).double().numpy(),
        )
    if metric == "log_loss":
        return method_of(model, "predict_proba"), losses
    if metric != "auc":
        return method_of(model, "predict"), lambda out: numbers(out, (BLOCK,))
    if hasattr(model, "predict_proba"):
        return method_of(model, "predict_proba"), lambda out: _place(
            numbers(out, (BLOCK, 2))[:, 1]
        )
    ask = method_of(model, "decision_function")
    return ask, lambda out: _place(0.5 + 0.5 * np.tanh(numbers(out, (BLOCK,)) / 2.0))


def _place(chances: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns places in [0, 1], by which probabilities are put into bins; 0 for NaN."""
    return np.arcsin(np.sqrt(np.clip(np.nan_to_num(chances, nan=0.0), 0.0, 1.0))) * (
        2.0 / math.pi
    )
