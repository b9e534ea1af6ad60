"""Kinds of columns, and how one value of each is coded: by its own content and public numbers alone.

Each kind adds at most 1 to the squared norm of a row (docs/schema.md#the-bound-on-rows).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torch_dpsco import _validate as check
from torch_dpsco._doors import check_fields
from torch_dpsco.estimators.frames import Column

ROW = "row"  # a unit without a name


def number(value: Any) -> float:
    """Returns a value as a finite float, text parsed; NaN for whatever is none."""
    try:
        found = float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan
    return found if math.isfinite(found) else math.nan


def key(value: Any) -> float | str | None:
    """Returns what levels and labels are compared by: 1, 1.0, True and "1" are one, other text is exact.

    None for a missing value.
    """
    found = number(value)
    return found if not math.isnan(found) else value if isinstance(value, str) else None


def numbers(values: Column) -> NDArray[np.float64]:
    """Returns values as `number` reads them."""
    if isinstance(values, np.ndarray):
        found = values.astype(np.float64)
        return np.where(np.isfinite(found), found, math.nan)
    return np.array([number(value) for value in values], dtype=np.float64)


def places_of(levels: Sequence[Any], values: Column) -> NDArray[np.float64]:
    """Returns the place of each value among levels; NaN for one that is none."""
    places = index_of("levels", levels)
    known: dict[Any, float] = {}
    found = []
    for value in values.tolist() if isinstance(values, np.ndarray) else values:
        try:
            if value not in known:
                known[value] = places.get(key(value), math.nan)
            found.append(known[value])
        except TypeError:  # a list: no value, and no key
            found.append(math.nan)
    return np.array(found, dtype=np.float64)


def index_of(name: str, levels: Sequence[Any]) -> dict[float | str | None, int]:
    """Returns the place of each level; raises ValueError unless they are two or more, and distinct."""
    if isinstance(levels, str) or len(levels) < 2:
        raise ValueError(f"{name} must be a list of 2 or more values (got {check.shown(levels)})")
    places = {key(level): place for place, level in enumerate(levels)}
    if None in places or "" in places or len(places) < len(levels):
        raise ValueError(
            f"{name} must be numbers or text, distinct; 1 and '1' are one (got"
            f" {check.shown(levels)})"
        )
    return places


def unit_id(value: Any) -> str | None:
    """Returns an id as text, 7 for 7.0, as an integer column with missing values is read; None for what is none."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        value = int(value) if value.is_integer() and abs(value) < 2**53 else None
    if isinstance(value, bool) or not isinstance(value, (int, str)) or value == "":
        return None
    return f"={value}" if isinstance(value, str) or abs(value) < 2**64 else None


@dataclass(frozen=True)
class Number:
    """A number, clipped to [low, high] and scaled to [-1, 1].

    Args:
        low: public, < high.
        high: public; both by the meaning of the column, never from the data.
        missing: whether a second feature says that the value is missing; else such a row is a null record.
    """

    low: float
    high: float
    missing: bool = False

    def __post_init__(self) -> None:
        check.fields(self, low=check.finite, high=check.finite, missing=check.flag)
        if not (self.low < self.high and math.isfinite(self.high - self.low)):
            raise ValueError(
                f"low must be below high, a finite distance away (got {self.low}, {self.high})"
            )

    def names(self, column: str) -> list[str]:
        """Returns the names of the features."""
        return [column, f"{column} missing"] if self.missing else [column]

    def code(self, values: Column) -> NDArray[np.float64]:
        """Returns the features (n, 1 or 2), each row of its own value alone."""
        found = numbers(values)
        lost = np.isnan(found)
        within = np.clip(np.where(lost, self.low, found), self.low, self.high)
        share = (within - self.low) / (self.high - self.low)
        blank = 0.0 if self.missing else math.nan
        coded = np.where(lost, blank, np.clip(2 * share - 1, -1.0, 1.0))
        return np.stack([coded, lost.astype(np.float64)][: 1 + self.missing], axis=1)


@dataclass(frozen=True)
class Category:
    """Levels without an order, one feature each; an unknown or missing value is 0 in all of them.

    Args:
        levels: public, 2 or more, distinct.
        baseline: whether the first level has no feature, so that coefficients of the others are differences from it:
            what intervals need beside an intercept.
    """

    levels: Sequence[Any]
    baseline: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        index_of("levels", self.levels)
        object.__setattr__(self, "levels", tuple(self.levels))  # a list, where it was read

    def names(self, column: str) -> list[str]:
        """Returns the names of the features."""
        return [f"{column}={level}" for level in self.levels[self.baseline :]]

    def code(self, values: Column) -> NDArray[np.float64]:
        """Returns the features (n, number of levels), each row of its own value alone."""
        wanted = np.arange(self.baseline, len(self.levels))
        return (places_of(self.levels, values)[:, None] == wanted).astype(np.float64)


@dataclass(frozen=True)
class Ordered:
    """Levels in an order, evenly spaced in [-1, 1].

    Args:
        levels: public, 2 or more, distinct, the lowest first.
        missing: as in `Number`; an unknown level is a missing value.
    """

    levels: Sequence[Any]
    missing: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        index_of("levels", self.levels)
        object.__setattr__(self, "levels", tuple(self.levels))  # a list, where it was read

    def names(self, column: str) -> list[str]:
        """Returns the names of the features."""
        return [column, f"{column} missing"] if self.missing else [column]

    def code(self, values: Column) -> NDArray[np.float64]:
        """Returns the features (n, 1 or 2), each row of its own value alone."""
        places = places_of(self.levels, values)
        return Number(0, len(self.levels) - 1, self.missing).code(places)
