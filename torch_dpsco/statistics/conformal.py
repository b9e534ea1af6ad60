"""Sets and intervals that hold the truth with a stated probability, calibrated on private records.

Split conformal prediction: each held-out record has a score that says how badly the model fits it,

    classifiers    1 - p of its label
    regressors     |y - prediction|

and the threshold is a quantile of these scores, drawn by the exponential mechanism on public edges. With m units, the
share F_u(e) of unit u's rows whose scores are <= e (of a record: 0 or 1), rounded down to a multiple of 2^-20, and a
level l that is raised by the probability that the draw fails,

    G_j = sum_u F_u(e_j) - l (m + 1),    s_j = distance of T from [G_(j-1), G_j],    l = level / (1 - failure),

edges with G_j >= 0 cover. T is the error of the draw in ranks, so that s_j <= T gives G_j >= 0. The last edge is
infinite and always covers. A unit moves each G_j, and so s_j, by at most max(l, 1 - l) if it is added, removed or made
null, and by 1 if it is replaced.

Source: docs/proofs/conformal.md; Vovk, Gammerman and Shafer 2005; Angelopoulos, Bates, Zrnic and Jordan 2022.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from torch_dpsco import _validate as check
from torch_dpsco import shown
from torch_dpsco._validate import typed
from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.accounting.budgets import Budget
from torch_dpsco.accounting.events import (
    ADD_REMOVE,
    ADJACENCIES,
    REPLACE_ONE,
    ZERO_OUT,
    Adjacency,
    Event,
    Pure,
)
from torch_dpsco.accounting.report import PrivacyReport
from torch_dpsco.algorithms.mechanisms import draw, score_law, score_slack
from torch_dpsco.estimators.reading import as_features, require_finite
from torch_dpsco.noise import noise_generator
from torch_dpsco.sampling import fingerprint
from torch_dpsco.statistics.held_out import (
    BLOCK,
    HeldOut,
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

_UNIT = 2**20  # of a share, in integers
_LARGEST = 2**51  # of the error in ranks, in units: sums with it are exact
MOST = 0.999  # of the level


@dataclass(frozen=True)
class ConformalSets:
    """Sets or intervals of one level.

    Args:
        model: that was calibrated.
        level: least probability that the truth is covered.
        threshold: largest score that is covered, one of the public edges; inf for whatever there is.
        classes: labels; none of a regressor.
        privacy: `PrivacyReport` of the ledger after the release.
    """

    model: Any
    level: float
    threshold: float
    classes: tuple[Any, ...]
    privacy: PrivacyReport

    def __repr__(self) -> str:
        return shown.line(self, f"of level {self.level:g}, scores up to {self.threshold:.4g}")

    def sets(self, X: Any) -> list[tuple[Any, ...]]:
        """Returns the labels of each row that pass, possibly none.

        Args:
            X: rows (m, d), finite, of the dtype of the calibration.

        Raises:
            ValueError: the model was calibrated as a regressor, or X is no table of finite numbers.
        """
        if not self.classes:
            raise ValueError(
                "sets(X) are of a classifier: call intervals(X) (calibrated with bound=, a"
                " regressor)"
            )
        scores = 1.0 - asked(*_question(self.model, len(self.classes)), _rows(X))
        passed = (scores <= self.threshold) | math.isinf(self.threshold)
        return [
            tuple(label for label, is_in in zip(self.classes, row, strict=True) if is_in)
            for row in passed
        ]

    def intervals(self, X: Any) -> NDArray[np.float64]:
        """Returns the ends of intervals (m, 2) of targets.

        Args:
            X: rows (m, d), finite, of the dtype of the calibration.

        Raises:
            ValueError: the model was calibrated as a classifier, or X is no table of finite numbers.
        """
        if self.classes:
            raise ValueError(
                "intervals(X) are of a regressor: call sets(X) (calibrated with classes, a"
                " classifier)"
            )
        predicted = asked(*_question(self.model, 0), _rows(X))
        if math.isinf(self.threshold):
            return np.tile([-math.inf, math.inf], (len(predicted), 1))
        wide = math.nextafter(
            self.threshold, math.inf
        )  # |y - p| was rounded before it was compared
        return np.stack([predicted - wide, predicted + wide], axis=1)


@typed
def conformal(
    model: Any,
    X: Any,
    y: Any,
    *,
    level: float = 0.9,
    epsilon: float | None = None,
    delta: float | None = None,
    budget: Budget | None = None,
    bound: float | None = None,
    classes: Any = None,
    bins: int = 512,
    groups: Any = None,
    accountant: Accountant | None = None,
    generator: torch.Generator | None = None,
) -> ConformalSets:
    """Calibrates sets of labels, or intervals of targets, on private records that the model was not fitted to.

    Args:
        model: public, or released already, without these records; with `predict_proba`, or `predict` of numbers if
            there is a bound. What it says of a row must depend on that row alone, which is tried on made-up rows.
        X: private rows (n, d), as for `fit`; one with a non-finite value is a null record, which counts for nothing.
        y: their labels or targets (n,); a label that is none of the classes, or no number, makes a null record.
        level: in (0, 0.999): probability of covering the truth.
        epsilon: of a budget, beside delta, in place of `budget`.
        delta: of a budget, beside epsilon.
        budget: of this release, of which epsilon is spent; delta is not.
        bound: public bound > 0 of the half width of intervals (above it they are infinite); None for sets of labels.
        classes: public labels; None for the model's `classes_`. Not with a bound.
        bins: 1 to 1024 equal steps of the threshold.
        groups: (n,) ids of users, which the budget then protects; coverage is then that of a random row of a new user.
        accountant: ledger that is charged; None for a new one with this budget.
        generator: for tests only (warns).

    Returns:
        The calibrated sets. With few records, all labels or the whole line.

    Raises:
        AdjacencyError: the accountant is of another adjacency.
        BudgetExceeded: the release would pass the accountant's budget; nothing was drawn.
        NotCertifiedError: what the model says of a row depends on other rows; nothing was charged.
        UnitError: groups with a budget of unit "example", or the reverse, or an accountant of another unit.
        ValueError: a setting, a shape or a dtype; or epsilon is too small for any use.

    Guarantee:
        Privacy: epsilon-DP under the budget's adjacency, for one record, or all rows of a user; event `Pure(epsilon)`.
        The number of records is private. The sets of rows that are not private are post-processing; those of private
        rows tell of these rows. Running time, and errors that the model raises, are not covered.

        Coverage: of a new record that is no null record, at least the level, on average over calibration, record and
        noise, for any number of records, if the new record (user) is exchangeable with those of the calibration given
        the model.

    Source: docs/proofs/conformal.md

    Example:
        >>> class Line:
        ...     def predict(self, X):
        ...         return X[:, 0]
        >>> X = np.linspace(-1, 1, 5000).reshape(-1, 1)
        >>> found = conformal(Line(), X, X[:, 0] + np.sin(9e4 * X[:, 0]), budget=Budget(1.0, 1e-6), bound=2.0)
        >>> bool(0.95 < found.threshold < 1.02), found.intervals([[0.5]]).shape
        (True, (1, 2))
    """
    level = check.open_interval(0.0, MOST, level=level)
    if check.positive_count(bins=bins) > 1024:
        raise ValueError(f"bins must be in 1..1024 (got {bins})")
    failure = (1.0 - level) / 20.0
    rank = math.ceil(Fraction(level) / (1 - Fraction(failure)) * _UNIT)
    if bound is not None and classes is not None:
        raise ValueError(
            f"classes must not be given with a bound, of a regressor (got {check.shown(classes)})"
        )
    labels = public_labels(model, classes) if bound is None else []
    widest = 1.0 if bound is None else check.positive(bound=bound)
    edges = np.arange(1, bins + 1) / bins * widest
    budget = agreed_budget(budget, epsilon, delta, accountant, groups)
    # PRIVACY: how far one unit moves a score (test_no_neighbor_moves_a_score_by_more)
    sensitivity = _sensitivities(rank)[budget.adjacency]
    error = math.ceil(score_slack(bins + 1, sensitivity, budget.epsilon, failure))
    if error >= _LARGEST:
        raise ValueError(
            "budget must have a larger epsilon: no number of records is enough (got"
            f" {budget.epsilon:g})"
        )
    ledger, delta = ledger_of(budget, accountant, groups)
    records = held_out(X, y, labels, groups)
    law = score_law(
        _scores(records, _cells(model, records, len(labels), edges), rank, error, bins + 1),
        sensitivity,
        budget.epsilon,
    )
    source = noise_generator("cpu", generator)
    # PRIVACY: charged before the draw, where it was proved (test_no_set_is_drawn_that_was_not_charged)
    chosen = ledger.pay(
        conformal_event(budget),
        lambda: {"conformal": level, "edges": edges.tolist()},
        partial(fingerprint, contents=[law]),
        lambda: int(draw(law, source)),
    )
    threshold = float([*edges, math.inf][chosen])
    return ConformalSets(model, level, threshold, tuple(labels), ledger.report(delta))


def conformal_event(budget: Budget) -> Event:
    """Returns what a calibration charges, under the adjacencies where a unit moves no score by more."""
    return Pure(
        budget.epsilon,
        ADJACENCIES if budget.adjacency == REPLACE_ONE else (ADD_REMOVE, ZERO_OUT),
    )


def _sensitivities(rank: int) -> dict[Adjacency, float]:
    """Returns how far one unit moves each score, in units."""
    one = float(max(rank, _UNIT - rank))
    return {ADD_REMOVE: one, ZERO_OUT: one, REPLACE_ONE: float(_UNIT)}


def _scores(
    records: HeldOut, cells: NDArray[np.int64], rank: int, error: int, size: int
) -> NDArray[np.float64]:
    """Returns the score of each edge in units, exact in float64: the lower, the better."""
    # PRIVACY: null records count for nothing (test_null_records_count_for_nothing_in_sets)
    cells = cells[records.valid]
    users = (
        np.arange(len(cells)) if records.users is None else records.users.numpy()[records.valid]
    )
    order = np.lexsort((cells, users))
    _, first, rows = np.unique(users[order], return_index=True, return_counts=True)
    place = np.arange(len(cells)) - np.repeat(first, rows)
    share = np.repeat(rows, rows)
    # PRIVACY: shares of a user add up to 1 (test_a_user_moves_a_score_by_no_more_than_a_record)
    sums = np.zeros(size, dtype=np.int64)
    np.add.at(sums, cells[order], (place + 1) * _UNIT // share - place * _UNIT // share)
    above = np.cumsum(sums) - rank * (len(rows) + 1) - error
    distance = np.maximum(-above, 0)
    distance[-1] = 0  # of the infinite edge, which covers everything
    distance[1:] = np.maximum(distance[1:], above[:-1])
    return distance.astype(np.float64)


def _cells(
    model: Any, records: HeldOut, classes: int, edges: NDArray[np.float64]
) -> NDArray[np.int64]:
    """Returns the first edge that covers each record; that of NaN is the infinite one."""
    require_apart(*_question(model, classes), records.rows.shape[1], records.rows.dtype)
    said = asked(*_question(model, classes), records.rows)
    with np.errstate(over="ignore", invalid="ignore"):
        if classes:
            scores = 1.0 - said[np.arange(len(said)), records.truth.astype(np.int64)]
        else:
            scores = np.abs(records.truth - said)
    return np.searchsorted(edges, scores, side="left")


def _rows(X: Any) -> NDArray[Any]:
    rows = as_features(X).cpu()
    require_finite(rows)
    return rows.numpy()


def _question(model: Any, classes: int) -> tuple[Method, Read]:
    """Returns what the model is asked, and what is read off its answer on a block: probabilities, or numbers."""
    if classes:
        return method_of(model, "predict_proba"), lambda out: numbers(out, (BLOCK, classes))
    return method_of(model, "predict"), lambda out: numbers(out, (BLOCK,))
