"""A schema of a table: its columns, its target and its unit, from which features and bounds follow."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torch_dpsco import _validate as check
from torch_dpsco._doors import check_fields
from torch_dpsco.schema.columns import Category, Number, Ordered, index_of, key, number
from torch_dpsco.schema.table import Table


@dataclass(frozen=True)
class Schema:
    """What is public about a table. No value of the table decides how another one is read.

    Args:
        columns: kind of each column of features; columns of a table that are not named here are never used.
        target: name of the column of targets.
        labels: all labels that can occur, text or numbers, of which the second of two is the positive one.
        target_range: (low, high) of a real target, which is clipped to it; give this or labels.
        ids: name of the column of ids of units, integers or text. None: each row is a unit, which is your promise.
        rows_per_unit: with ids, how many rows of a unit are kept, the first ones: 1 makes rows units; None keeps all.
            Unless it is 1, `fit` must be given the groups too, and then protects units: `Table.arguments`.
    """

    columns: Mapping[str, Number | Category | Ordered]
    target: str
    labels: Sequence[Any] | None = None
    target_range: tuple[float, float] | None = None
    ids: str | None = None
    rows_per_unit: int | None = 1

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.columns:
            raise ValueError("columns must name at least one column (got none)")
        for name, kind in self.columns.items():
            if not isinstance(kind, (Number, Category, Ordered)):
                raise ValueError(f"column {name!r} must be a Number, Category or Ordered (got {check.shown(kind)})")
        for field, other in (("target", self.target), ("ids", self.ids)):
            if other in self.columns:
                raise ValueError(f"{field} must not be among the features (got {other!r}): remove it from columns")
        if self.target == self.ids:
            raise ValueError(f"ids must be another column than the target (got {self.ids!r})")
        if (self.labels is None) == (self.target_range is None):
            raise ValueError("labels or target_range must be given, one of them (got both or none)")
        if self.labels is not None:
            index_of("labels", self.labels)
            if len({isinstance(label, str) for label in self.labels}) > 1:
                raise ValueError(f"labels must be all text or all numbers (got {check.shown(self.labels)})")
        if self.target_range is not None:
            Number(*self.target_range)
        if self.rows_per_unit is not None:
            check.fields(self, rows_per_unit=check.positive_count)
        if self.ids is None and self.rows_per_unit != 1:
            raise ValueError(f"rows_per_unit must be 1 without ids (got {self.rows_per_unit}): name the column of ids")

    @property
    def names(self) -> list[str]:
        """Names of the features, d of them."""
        return [feature for name, kind in self.columns.items() for feature in kind.names(name)]

    @property
    def bound_x(self) -> float:
        """Bound on norms of coded rows: the root of the number of columns, rounded up."""
        return math.nextafter(math.sqrt(len(self.columns)), math.inf)

    def settings(self) -> dict[str, Any]:
        """Returns bound_x and classes or bound_y, for `LogisticRegression(epsilon=1.0, n=n, **schema.settings())`."""
        if self.labels is not None:
            return {"bound_x": self.bound_x, "classes": tuple(self.labels)}
        assert self.target_range is not None
        return {"bound_x": self.bound_x, "bound_y": max(map(abs, self.target_range))}

    def read(self, frame: Any) -> Table:
        """Codes a table. A value that cannot be read makes at most its own row a null record, and never raises.

        Args:
            frame: pandas data frame, Arrow table, or dict of columns.

        Raises:
            ValueError: a column is missing or doubled, of another length, or of dates; ids are truth values.
        """
        wanted = [*self.columns, self.target, *([] if self.ids is None else [self.ids])]
        values = {name: _column(frame, name) for name in wanted}
        lengths = {name: len(column) for name, column in values.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"columns must have one length (got {lengths})")
        kept, groups = list(range(lengths[self.target])), None
        if self.ids is not None:
            kind = str(getattr(frame[self.ids], "dtype", getattr(frame[self.ids], "type", "")))
            if kind.startswith("bool"):
                raise ValueError(f"ids {self.ids!r} must be integers or text (got {kind})")
            units = [_unit(value) for value in values[self.ids]]
            kept, groups = self._units(units)
            # PRIVACY: whose row it is nobody knows (test_a_row_without_an_id_is_a_null_record)
            lost = [units[row] is None for row in kept]
        else:
            lost = [False] * len(kept)
        rows = [[x for name, kind in self.columns.items() for x in kind.code(values[name][i])] for i in kept]
        targets = self._targets([values[self.target][i] for i in kept])
        features = np.array(rows, dtype=np.float64).reshape(len(kept), len(self.names))
        features[np.array(lost, dtype=bool)] = math.nan
        return Table(features, targets, None if self.rows_per_unit == 1 else groups)

    def _units(self, units: list[str | None]) -> tuple[list[int], NDArray[Any]]:
        """Returns the rows that are kept, and their groups; a row without an id is a unit of its own."""
        kept, seen = [], Counter[str]()
        for row, unit in enumerate(units):
            # PRIVACY: what is kept of a unit is decided by its own rows (test_rows_of_other_units_do_not_matter)
            group = f"?{row}" if unit is None else unit
            seen[group] += 1
            if self.rows_per_unit is None or seen[group] <= self.rows_per_unit:
                kept.append(row)
        return kept, np.array([units[row] or f"?{row}" for row in kept], dtype=np.str_)

    def _targets(self, values: list[Any]) -> NDArray[Any]:
        if self.target_range is not None:
            return np.clip(np.array([number(value) for value in values], dtype=np.float64), *self.target_range)
        assert self.labels is not None
        places = index_of("labels", self.labels)
        unknown = "" if isinstance(self.labels[0], str) else math.nan
        known = np.array([*self.labels, unknown])
        return known[[places.get(key(value), len(places)) for value in values]] if values else known[:0]


def _unit(value: Any) -> str | None:
    """Returns an id as text, 7 for 7.0, as an integer column with missing values is read; None for what is none."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        value = int(value) if value.is_integer() and abs(value) < 2**53 else None
    if isinstance(value, bool) or not isinstance(value, (int, str)) or value == "":
        return None
    return f"={value}" if isinstance(value, str) or abs(value) < 2**64 else None


def _column(frame: Any, name: str) -> list[Any]:
    names = list(getattr(frame, "column_names", frame.keys() if isinstance(frame, Mapping) else frame.columns))
    if names.count(name) != 1:
        raise ValueError(f"column {name!r} must be in the table, once (got it {names.count(name)} times)")
    column = frame[name]
    kind = getattr(column, "dtype", getattr(column, "type", ""))
    if str(kind).startswith(("datetime", "timedelta", "timestamp", "date", "complex")):
        raise ValueError(f"column {name!r} must be of numbers or text (got {kind})")
    for reader in ("to_pylist", "tolist"):
        if hasattr(column, reader):
            return list(getattr(column, reader)())
    return list(column)
