"""Private preparation of tables, with scikit-learn's conventions: scales, quantiles, missing values.

    ledger = dp.Accountant(dp.Budget(2.0, 1e-6))
    scaler = PrivateStandardScaler(lower=0, upper=100, epsilon=0.5, delta=1e-7, accountant=ledger)
    model = LogisticRegression(bound_x=scaler.bound_x(d), epsilon=1.4, delta=5e-7, accountant=ledger, ...)
    make_pipeline(scaler, model).fit(X, y)

Each `fit` releases one vector of sums over the records, in integers of a public unit, with exact Gaussian noise.
Whatever is computed from it is post-processing. A value that is not finite is missing, and adds nothing.

Source: docs/proofs/preparation.md#transformers
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from torch_dpsco import _validate as check
from torch_dpsco._validate import check_fields, require_ours
from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.accounting.analysis.gaussian import gaussian_sigma
from torch_dpsco.accounting.analysis.rounding import exact_grid, with_grid
from torch_dpsco.accounting.budgets import Budget, warn_of_delta
from torch_dpsco.accounting.events import (
    ADD_REMOVE,
    REPLACE_ONE,
    ZERO_OUT,
    Adjacency,
    Gaussian,
    check_adjacency,
)
from torch_dpsco.estimators.reading import (
    BaseEstimator,
    NotFittedError,
    TransformerMixin,
    as_features,
    check_columns,
    read_columns,
)
from torch_dpsco.noise import noise_generator
from torch_dpsco.sampling import fingerprint
from torch_dpsco.statistics.held_out import ledger_of
from torch_dpsco.step.exact_noise import exact_release


class _Names:
    """Has names of columns, with scikit-learn only."""


if not TYPE_CHECKING:
    with suppress(ImportError):
        from sklearn.base import OneToOneFeatureMixin as _Names

Array = NDArray[np.float64]
_Self = TypeVar("_Self", bound="PrivateTransformer")

_UNIT = 2**20  # of sums, which are exact below 2^33 records
_ROUNDED = 1.0 + 2.0**-16  # what rounding of a value to the unit may add to a sensitivity
_MOST_RECORDS = 2.0**31
_ROWS = 65_536


@dataclass(eq=False, repr=False, kw_only=True)
class PrivateTransformer(_Names, TransformerMixin, BaseEstimator):
    """Base: public ranges of columns, one release.

    Args:
        lower: least value of columns by their meaning, a number or one for each; never the least in the data.
        upper: largest value, likewise; > lower.
        epsilon: > 0, of this fit.
        delta: in (0, 1), of this fit.
        adjacency: of the guarantee: "add_remove", "replace_one" or "zero_out".
        accountant: ledger that the fit is charged to, of that adjacency and unit "example"; None for a new one.

    Attributes:
        n_features_in_: d.
        feature_names_in_: names of the columns of a data frame (with scikit-learn only).
        privacy_: `PrivacyReport` of the ledger after the fit.

    Guarantee:
        (epsilon, delta)-differential privacy of each fit, unit: one row; all that is fitted follows from one Gaussian
        release. Assumed: lower and upper are public. Rows that are transformed are not protected by it.
    """

    lower: Any = None
    upper: Any = None
    epsilon: float = 1.0
    delta: float = 1e-6
    adjacency: Adjacency = ZERO_OUT
    accountant: Accountant | None = None
    n_features_in_: ClassVar[int]  # set by a fit

    def __new__(cls, *args: Any, **settings: Any) -> Any:
        """Answers keywords of other libraries with ours."""
        require_ours(cls.__name__, settings, cls.__dataclass_fields__)
        return super().__new__(cls)

    @abstractmethod
    def _numbers(self, values: Array, present: NDArray[np.bool_]) -> NDArray[np.int64]:
        """What a block adds to the release, in units of 2^-20: values (m, d) in [-1, 1], 0 where they are missing."""

    @abstractmethod
    def _squares(self) -> tuple[float, float]:
        """Largest squared norm of what one value adds, and of the difference of what two add."""

    @abstractmethod
    def _install(self, released: Array, std: float) -> None:
        """Sets the fitted attributes, of a release and the std of its noise."""

    def event(self, dim: int) -> Gaussian:
        """Returns what a fit to d columns charges.

        Args:
            dim: d >= 1.
        """
        dim = check.positive_count(dim=dim)
        one, two = self._squares()
        moved = with_grid(math.sqrt(dim * one) * _ROUNDED)
        sens: dict[Adjacency, float] = dict.fromkeys((ADD_REMOVE, ZERO_OUT), moved)
        sens[REPLACE_ONE] = with_grid(math.sqrt(dim * max(one, two)) * _ROUNDED)
        target = Budget(self.epsilon, self.delta, adjacency=check_adjacency(self.adjacency))
        event = Gaussian(
            gaussian_sigma(target.epsilon, target.delta, sens[target.adjacency]),
            sens,
            exact=True,
        )
        exact_grid(
            event.sigma, moved, self._size(dim), largest=_MOST_RECORDS
        )  # raises before anything is charged
        return event

    def fit(self: _Self, X: Any, y: Any = None) -> _Self:
        """Releases what the transformer needs, with fresh noise, charged before it is drawn.

        Args:
            X: rows (n, d), as the estimators take them; n >= 0.
            y: ignored.

        Raises:
            BudgetExceeded: nothing was drawn; the transformer is what it was.
            ValueError: a setting, a shape or a dtype; never a value of a record.
        """
        check_fields(self)
        rows = as_features(X).detach().cpu()
        low, high = self._range(rows.shape[1])
        event = self.event(rows.shape[1])
        columns = read_columns(X, rows.shape[1])
        target = Budget(self.epsilon, self.delta, adjacency=self.adjacency)
        ledger, delta = ledger_of(target, self.accountant)
        # PRIVACY: else their number is private (test_the_number_of_scored_records_is_not_told_under_add_remove)
        if self.adjacency != ADD_REMOVE:
            warn_of_delta(target, len(rows))
        total = np.zeros(self._size(rows.shape[1]), dtype=np.int64)
        for part in torch.split(rows, _ROWS):
            block = part.double().numpy()
            # PRIVACY: a missing value adds nothing, others are in range (test_no_row_moves_a_release_by_more)
            present = np.isfinite(block)
            scaled = np.where(present, np.clip(block, low, high) * 2 - (low + high), 0.0) / (
                high - low
            )
            total += self._numbers(np.clip(scaled, -1.0, 1.0), present)
        source = noise_generator("cpu", None)
        # PRIVACY: charged before anything is drawn (test_nothing_is_drawn_that_was_not_charged_by_a_transformer)
        released = np.asarray(
            ledger.pay(
                event,
                self._title,
                partial(fingerprint, contents=[rows]),
                lambda: exact_release(torch.from_numpy(total / _UNIT), event, source).tolist(),
            )
        )
        self._low = low
        self._high = high
        self._install(released.reshape(-1, rows.shape[1]), event.sigma)
        self.privacy_ = ledger.report(delta)
        vars(self).pop("feature_names_in_", None)
        vars(self).update(columns)
        return self

    def _title(self) -> dict[str, Any]:
        """Returns what is public about the release."""
        settings = {name: str(value) for name, value in self.get_params().items()}
        return {"prepare": type(self).__name__, **settings, "accountant": ""}

    def transform(self, X: Any) -> Array:
        """Returns rows (m, d), each a function of its own row and of what was released."""
        if not hasattr(self, "privacy_"):
            raise NotFittedError(
                f"This {type(self).__name__} instance is not fitted yet: call fit before"
            )
        rows = as_features(X).detach().cpu().double().numpy()
        check_columns(self, X, rows.shape[1])
        return self._transformed(rows)

    @abstractmethod
    def _transformed(self, rows: Array) -> Array: ...

    def _size(self, dim: int) -> int:
        """Length of the release."""
        return 3 * dim

    def _range(self, dim: int) -> tuple[Array, Array]:
        if self.lower is None or self.upper is None:
            what = "public ends of the ranges of columns, by what they mean, never by the data"
            check.required(f": {what}", lower=self.lower, upper=self.upper)
        ends = _public(lower=self.lower), _public(upper=self.upper)
        if any(end.shape not in ((), (dim,)) for end in ends):
            raise ValueError(
                f"lower and upper must be numbers, or {dim} of them (got {self.lower} and"
                f" {self.upper})"
            )
        low, high = (np.broadcast_to(end, dim).astype(np.float64) for end in ends)
        if not ((low < high).all() and np.abs([low, high]).max() < 1e100):
            raise ValueError(
                f"lower must be below upper, both below 1e100 (got {self.lower} and {self.upper})"
            )
        return low, high

    def _moments(self, released: Array, std: float) -> tuple[Array, Array]:
        """Returns mean and spread of columns in [-1, 1], of sums of z, z^2 - 1/2 and 1/2; spreads above their noise."""
        sums, squares, halves = released
        count = np.maximum(2.0 * halves, 1.0)
        mean = np.clip(sums / count, -1.0, 1.0)
        variance = (squares + halves) / count - mean**2
        return mean, np.sqrt(
            np.clip(variance, np.minimum(1.0, np.maximum(2.0**-20, 2.0 * std / count)), 1.0)
        )


def _public(**field: Any) -> Array:
    """Returns one public number, or several."""
    ((name, given),) = field.items()
    plain = given.tolist() if hasattr(given, "tolist") else given
    several = isinstance(plain, (list, tuple))
    ends = [check.finite(**{name: end}) for end in (plain if several else [plain])]
    return np.asarray(ends if several else ends[0], dtype=np.float64)


def _in_units(values: Array) -> NDArray[np.int64]:
    return np.rint(values * _UNIT).astype(np.int64)


class _OfMoments(PrivateTransformer):
    """Base: sums of z, z^2 - 1/2 and 1/2 of each column."""

    def _numbers(self, values: Array, present: NDArray[np.bool_]) -> NDArray[np.int64]:
        squares = np.where(present, _in_units(values**2) - _UNIT // 2, 0)
        return np.concatenate(
            [_in_units(values).sum(0), squares.sum(0), present.sum(0) * (_UNIT // 2)]
        )

    def _squares(self) -> tuple[float, float]:
        return 1.5, 4.0  # z^2 + (z^2 - 1/2)^2 + 1/4; (z - z')^2 (1 + (z + z')^2)


@dataclass(eq=False, repr=False, kw_only=True)
class PrivateStandardScaler(_OfMoments):
    """Columns minus their private mean, over their private standard deviation, clipped to [-clip, clip].

    Missing values stay NaN, which estimators take for a null record.

    Args:
        clip: > 0, public, so that rows have norms of at most `bound_x(d)`.

    Attributes:
        mean_: (d,), in the units of the columns.
        scale_: (d,), > 0; at least the size at which noise would decide it.

    Source:
        docs/proofs/preparation.md#transformers

    Example:
        >>> X = np.linspace(20, 40, 2000).reshape(-1, 1)
        >>> scaler = PrivateStandardScaler(lower=0, upper=100, epsilon=2.0).fit(X)
        >>> bool(abs(scaler.mean_[0] - 30) < 2), scaler.bound_x(1)
        (True, 3.0)
    """

    clip: float = 3.0

    def bound_x(self, dim: int) -> float:
        """Returns the public bound on the norm of transformed rows, for an estimator: clip sqrt(d), rounded up.

        Args:
            dim: d >= 1.
        """
        bound = check.positive(clip=self.clip) * math.sqrt(check.positive_count(dim=dim))
        return bound if dim == 1 else math.nextafter(bound * (1 + 2.0**-50), math.inf)

    def _size(self, dim: int) -> int:
        check.positive(clip=self.clip)
        return super()._size(dim)

    def _install(self, released: Array, std: float) -> None:
        mean, spread = self._moments(released, std)
        half = (self._high - self._low) / 2
        self.mean_ = self._low + half * (1 + mean)
        self.scale_ = half * spread

    def _transformed(self, rows: Array) -> Array:
        with np.errstate(over="ignore", invalid="ignore"):
            scaled = (np.clip(rows, self._low, self._high) - self.mean_) / self.scale_
        return np.where(np.isfinite(rows), np.clip(scaled, -self.clip, self.clip), math.nan)


@dataclass(eq=False, repr=False, kw_only=True)
class PrivateQuantiles(PrivateTransformer):
    """Private quantiles of columns; transforms values to their places among records, in [-1, 1].

    Args:
        levels: quantiles to report, each in [0, 1].
        bins: of equal width, into which the range of a column is cut; 2 to 1024.

    Attributes:
        quantiles_: (len(levels), d), in the units of the columns.

    Source:
        docs/proofs/preparation.md#transformers

    Example:
        >>> X = np.linspace(20, 40, 2000).reshape(-1, 1)
        >>> found = PrivateQuantiles(lower=0, upper=100, levels=[0.25, 0.75], epsilon=2.0).fit(X).quantiles_
        >>> bool(abs(found[:, 0] - [25, 35]).max() < 3)
        True
    """

    levels: Sequence[float] = (0.25, 0.5, 0.75)
    bins: int = 64

    def bound_x(self, dim: int) -> float:
        """Returns the public bound on the norm of transformed rows: sqrt(d), rounded up.

        Args:
            dim: d >= 1.
        """
        return math.sqrt(check.positive_count(dim=dim)) * (1 + 2.0**-50)

    def _size(self, dim: int) -> int:
        for level in self.levels:
            check.between(0.0, 1.0, levels=level)
        if not 2 <= check.positive_count(bins=self.bins) <= 1024:
            raise ValueError(f"bins must be 2 to 1024 (got {self.bins})")
        return self.bins * dim

    def _numbers(self, values: Array, present: NDArray[np.bool_]) -> NDArray[np.int64]:
        places = np.minimum(((values + 1) / 2 * self.bins).astype(np.int64), self.bins - 1)
        counts = [
            np.bincount(places[known, j], minlength=self.bins)
            for j, known in enumerate(present.T)
        ]
        return np.stack(counts, axis=1).reshape(-1).astype(np.int64) * _UNIT

    def _squares(self) -> tuple[float, float]:
        return 1.0, 2.0

    def _install(self, released: Array, std: float) -> None:
        # shares below each edge of the bins, (bins + 1, d): from 0 to 1, increasing a little everywhere
        sums = np.vstack([np.zeros(released.shape[1]), np.cumsum(released, axis=0)])
        shares = np.clip(sums / np.maximum(sums[-1], 1.0), 0.0, 1.0)
        rising = np.maximum.accumulate(shares, axis=0)
        rising[-1] = 1.0
        even = np.linspace(0.0, 1.0, len(sums))[:, None]
        self._places = (1 - 2.0**-20) * rising + 2.0**-20 * even
        edges = np.linspace(0.0, 1.0, self.bins + 1)
        found = [np.interp(self.levels, places, edges) for places in self._places.T]
        self.quantiles_ = self._low + (self._high - self._low) * np.stack(found, axis=1)

    def _transformed(self, rows: Array) -> Array:
        edges = np.linspace(0.0, 1.0, self.bins + 1)
        inside = (np.clip(rows, self._low, self._high) - self._low) / (self._high - self._low)
        found = [
            np.interp(inside[:, j], edges, places) for j, places in enumerate(self._places.T)
        ]
        return np.where(np.isfinite(rows), 2 * np.stack(found, axis=1) - 1, math.nan)


@dataclass(eq=False, repr=False, kw_only=True)
class PrivateImputer(_OfMoments):
    """Fills missing values in with private means of columns.

    Attributes:
        statistics_: (d,), in the units of the columns.

    Source:
        docs/proofs/preparation.md#transformers

    Example:
        >>> X = np.linspace(20, 40, 2000).reshape(-1, 1)
        >>> X[::2] = np.nan
        >>> bool(abs(PrivateImputer(lower=0, upper=100).fit_transform(X)[0, 0] - 30) < 3)
        True
    """

    def _install(self, released: Array, std: float) -> None:
        share = (1 + self._moments(released, std)[0]) / 2
        self.statistics_ = self._low + (self._high - self._low) * share

    def _transformed(self, rows: Array) -> Array:
        return np.where(np.isfinite(rows), rows, self.statistics_)
