"""Kinds of columns, and how one value of each is coded: by its own content and public numbers alone.

Each kind adds at most 1 to the squared norm of a row (docs/schema.md#the-bound-on-rows).

A schema of a table: its columns, its target and its unit, from which features and bounds follow.

A table that was read by a schema.

A schema as plain data, and as a file of TOML for people to read and edit.
"""

from __future__ import annotations

import json
import math
import os
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date, datetime
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import TensorDataset

from torch_dpsco import _validate as check
from torch_dpsco import shown
from torch_dpsco._validate import check_fields, typed
from torch_dpsco.accounting.analysis.rounding import FloatArray
from torch_dpsco.accounting.report import names_of
from torch_dpsco.acts import act
from torch_dpsco.errors import UnitError
from torch_dpsco.estimators import files
from torch_dpsco.estimators import reading as frames
from torch_dpsco.estimators.files import Dialect
from torch_dpsco.estimators.reading import Column
from torch_dpsco.losses.base import Loss, TableLoss
from torch_dpsco.problem import Problem

ROW = "row"  # a unit without a name
OPEN = "?"  # what a public number or level is where it is still asked for


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


def numbers(values: Column) -> FloatArray:
    """Returns values as `number` reads them."""
    if isinstance(values, np.ndarray):
        found = values.astype(np.float64)
        return np.where(np.isfinite(found), found, math.nan)
    return np.array([number(value) for value in values], dtype=np.float64)


def places_of(levels: Sequence[Any], values: Column) -> FloatArray:
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
        raise ValueError(
            f"{name} must be a list of 2 or more values (got {check.shown(levels)})"
        )
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

    def code(self, values: Column) -> FloatArray:
        """Returns the features (n, 1 or 2), each row of its own value alone."""
        found = numbers(values)
        lost = np.isnan(found)
        within = np.clip(np.where(lost, self.low, found), self.low, self.high)
        share = (within - self.low) / (self.high - self.low)
        blank = 0.0 if self.missing else math.nan
        coded = np.where(lost, blank, np.clip(2 * share - 1, -1.0, 1.0))
        return np.stack([coded, lost.astype(np.float64)][: 1 + self.missing], axis=1)


@dataclass(frozen=True)
class Date:
    """A day, as the number of days since `low`, clipped and scaled like a `Number`.

    Args:
        low: first day that is possible, public: a date, or text such as "1920-01-01".
        high: last one.
        format: of days that are text, as `datetime.strptime` reads it; days that are dates need none.
        missing: as in `Number`.

    Example:
        >>> Date("2020-01-01", "2020-12-31", "%d.%m.%Y").code(["01.01.2020", "31.12.2020", "2020"]).tolist()
        [[-1.0], [1.0], [nan]]
    """

    low: date | str
    high: date | str
    format: str = "%Y-%m-%d"
    missing: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("low", "high"):
            object.__setattr__(self, name, _day(name, getattr(self, name)))
        try:
            told = datetime.strptime(_SOME_DAY.strftime(self.format), self.format).date()
        except ValueError:
            told = None
        if told != _SOME_DAY:
            raise ValueError(
                f"format must say day, month and year, as %d.%m.%Y (got {self.format!r})"
            )
        if not self.low < self.high:  # type: ignore[operator]
            raise ValueError(f"low must be before high (got {self.low}, {self.high})")

    @property
    def number(self) -> Number:
        """The same as a number: days are counted from the year 1."""
        ends = [_day(name, getattr(self, name)).toordinal() for name in ("low", "high")]
        return Number(ends[0], ends[1], self.missing)

    def names(self, column: str) -> list[str]:
        """Returns the names of the features."""
        return self.number.names(column)

    def days(self, values: Column) -> list[float]:
        """Returns the day of each value, counted from the year 1; NaN for what is none."""
        written = {value for value in values if isinstance(value, (str, date))}
        known = {value: self._count(value) for value in written}
        return [known[value] if isinstance(value, (str, date)) else math.nan for value in values]

    def _count(self, value: str | date) -> float:
        try:
            found = (
                datetime.strptime(value.strip(), self.format)
                if isinstance(value, str)
                else value
            )
            return float(found.toordinal())
        except ValueError:  # other text; pandas' NaT
            return math.nan

    def code(self, values: Column) -> FloatArray:
        """Returns the features (n, 1 or 2), each row of its own value alone."""
        return self.number.code(self.days(values))


def _day(name: str, given: date | str) -> date:
    try:
        found = date.fromisoformat(given) if isinstance(given, str) else given
    except ValueError as error:
        raise ValueError(f"{name} must be a day, as 1920-01-31 (got {given!r})") from error
    return found.date() if isinstance(found, datetime) else found


_SOME_DAY = date(1987, 12, 31)


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

    def code(self, values: Column) -> FloatArray:
        """Returns the features (n, number of levels), each row of its own value alone."""
        wanted = np.arange(self.baseline, len(self.levels))
        hits = places_of(self.levels, values)[:, None] == wanted
        return np.asarray(hits, dtype=np.float64)


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

    def code(self, values: Column) -> FloatArray:
        """Returns the features (n, 1 or 2), each row of its own value alone."""
        places = places_of(self.levels, values)
        return Number(0, len(self.levels) - 1, self.missing).code(places)


@dataclass(frozen=True)
class Schema:
    """What is public about a table. No value of the table decides how another one is read.

    Args:
        columns: kind of each column of features; columns of a table that are not named here are never used.
        target: name of the column of targets.
        labels: all labels that can occur, text or numbers, of which the second of two is the positive one.
        target_range: (low, high) of a real target, which is clipped to it; give this or labels.
        ids: name of the column of ids of units, integers or text. None: each row is a unit.
        rows_per_unit: with ids, how many rows of a unit are kept, the first ones: 1 makes rows units; None keeps all.
            Unless it is 1, `fit` must be given the groups too, and then protects units: `Table.arguments`.
        unit: what one unit is called in reports, as "patient", of letters, digits, spaces, hyphens and apostrophes. A
            name needs ids, or:
        one_row_per_unit: True promises that no unit has a second row, as a patient with a second stay would; the
            headline of reports says so.
        dialect: how files of such tables write their cells; tables that are no files have no dialect.
    """

    columns: Mapping[str, Number | Date | Category | Ordered]
    target: str
    labels: Sequence[Any] | None = None
    target_range: tuple[float, float] | None = None
    ids: str | None = None
    rows_per_unit: int | None = 1
    unit: str = ROW
    one_row_per_unit: bool = False
    dialect: Dialect = files.DEFAULT

    def __post_init__(self) -> None:
        check_fields(self)
        self._check_names()
        if (self.labels is None) == (self.target_range is None):
            raise ValueError(
                "labels or target_range must be given, one of them (got both or none)"
            )
        if self.labels is not None:
            index_of("labels", self.labels)
            object.__setattr__(self, "labels", tuple(self.labels))  # a list, where it was read
            if len({isinstance(label, str) for label in self.labels}) > 1:
                raise ValueError(
                    f"labels must be all text or all numbers (got {check.shown(self.labels)})"
                )
        if self.target_range is not None:
            Number(*self.target_range)
            object.__setattr__(self, "target_range", tuple(self.target_range))
        if self.rows_per_unit is not None:
            check.fields(self, rows_per_unit=check.positive_count)
        self._check_unit()
        if self.ids is None and self.rows_per_unit != 1:
            raise ValueError(
                f"rows_per_unit must be 1 without ids (got {self.rows_per_unit}): name the column"
                " of ids"
            )

    def _check_names(self) -> None:
        """Raises ValueError unless columns are of known kinds, and names are text, each of its own column."""
        if not self.columns:
            raise ValueError("columns must name at least one column (got none)")
        for name, kind in self.columns.items():
            if not isinstance(kind, tuple(_KINDS.values())):
                raise ValueError(
                    f"column {name!r} must be a Number, Date, Category or Ordered (got"
                    f" {check.shown(kind)})"
                )
        for name in self._wanted:
            if not (isinstance(name, str) and name.strip() and name.isprintable()):
                raise ValueError(
                    f"columns, target and ids must have names of printable text (got"
                    f" {check.shown(name)}): rename the column"
                )
        if len(set(self._wanted)) < len(self._wanted):
            raise ValueError(
                f"target and ids must not be among the features, nor be one column (got"
                f" {self._wanted}): remove them from columns"
            )

    def _check_unit(self) -> None:
        """Raises ValueError unless the name of a unit is one that reports take, and it is said why it is protected."""
        object.__setattr__(self, "unit", names_of(self.unit, None)[0])
        by_rows = self.ids is None and self.unit != ROW
        # PRIVACY: else a name is promised to people with several rows (test_a_name_of_units_needs_ids_or_a_promise)
        if by_rows and not self.one_row_per_unit:
            raise ValueError(
                f"unit must have ids, the column that says whose rows are whose (got {self.unit!r}"
                f" without): a {self.unit} with several rows would not be protected as a whole. If"
                f" each {self.unit} has one row, promise one_row_per_unit=True"
            )
        if self.one_row_per_unit and not by_rows:
            raise ValueError(
                "one_row_per_unit must be left out with ids, which say it, and for a unit without"
                f" a name (got unit {self.unit!r}, ids {self.ids!r})"
            )

    def __repr__(self) -> str:
        columns = f"{len(self.columns)} columns ({', '.join(self.columns)})"
        target = self.target_range or self.labels
        ids = "" if self.ids is None else f", ids {self.ids!r}"
        return shown.line(self, f"target {self.target!r} {target}{ids}, {columns}")

    def _repr_html_(self) -> str:
        rows = [(name, repr(kind)) for name, kind in self.columns.items()]
        target = ("target", f"{self.target}: {self.target_range or self.labels}")
        unit = ("unit", self.unit if self.ids is None else f"{self.unit}, by {self.ids}")
        return shown.table("Schema", [target, unit, *rows])

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
            return {"bound_x": self.bound_x, "classes": self.labels}
        return {"bound_x": self.bound_x, "bound_y": self._bound_y}

    @typed
    def problem(self, loss: TableLoss, *, intercept: bool = True, **promises: Any) -> Problem:
        """Returns the promises of a loss for plans: `HolderSGD.plan(problem=schema.problem(loss), ...)`.

        Args:
            loss: of `torch_dpsco.losses`, for targets as `Table.dataset` codes them.
            intercept: whether the linear layer has a bias, which counts as a feature that is 1.
            promises: further arguments of `loss.problem`.

        Raises:
            ValueError: the loss is of other targets.
        """
        self.require_targets(loss)
        bound = math.nextafter(math.sqrt(len(self.columns) + intercept), math.inf)
        bound_y = self._bound_y if loss.target_kind == "real" else 1.0
        return loss.problem(bound_x=bound, bound_y=bound_y, **promises)

    @typed
    def require_targets(self, loss: Loss) -> None:
        """Raises ValueError unless a loss is one of the schema's targets."""
        count = 0 if self.labels is None else len(self.labels)
        fits = {"real": count == 0, "sign": count == 2, "class": 0 < count <= loss.num_scores}
        if not fits[loss.target_kind]:
            what = "a real target" if self.labels is None else f"{len(self.labels)} labels"
            raise ValueError(
                f"loss must be one of {what} (got {loss!r}, of targets that are"
                f" {loss.target_kind!r})"
            )

    @property
    def _bound_y(self) -> float:
        assert self.target_range is not None
        return max(map(abs, self.target_range))

    @property
    def _wanted(self) -> list[Any]:
        """The columns that are read."""
        return [*self.columns, self.target, *([] if self.ids is None else [self.ids])]

    def read(self, frame: Any) -> Table:
        """Codes a table. A value that cannot be read makes at most its own row a null record, and never raises.

        Args:
            frame: pandas data frame, Arrow table, dict of columns, or the path of a .csv (.tsv, .txt), .xlsx or
                .parquet file. All columns of a .csv file are read as text, by the schema's dialect, so that no value
                decides how others are read.

        Raises:
            ImportError: openpyxl or pyarrow is not installed, for the path of a .xlsx or .parquet file.
            ValueError: a column is missing or doubled, of another length, or of dates without being a `Date`; ids are
                truth values; or the file cannot be read.
        """
        columns = self._columns(frame, self._wanted)
        features = self._features(columns)
        targets = self._targets(columns[self.target])
        if self.ids is None:
            return Table(self, features, targets, None)
        ids = columns[self.ids]
        if isinstance(ids, np.ndarray) and ids.dtype.kind == "b":
            raise ValueError(f"ids {self.ids!r} must be integers or text (got {ids.dtype})")
        units = [unit_id(value) for value in ids]
        # PRIVACY: whose row it is nobody knows (test_a_row_without_an_id_is_a_null_record)
        features[[unit is None for unit in units]] = math.nan
        kept, groups = self._units(units)
        return Table(
            self, features[kept], targets[kept], None if self.rows_per_unit == 1 else groups
        )

    def features(self, frame: Any) -> FloatArray:
        """Returns the features (n, d) of all rows, NaN where one has none: for predictions, targets and ids not needed.

        Args:
            frame: as for `read`.
        """
        return self._features(self._columns(frame, list(self.columns)))

    def check(self, frame: Any) -> Any:
        """Returns what looks wrong in a table (`show.look.Check`). NOT private: for your eyes, on your machine.

        Args:
            frame: as for `read`, which raises what is wrong with names, lengths and dtypes.
        """
        frame = files.opened(frame, None, self.dialect)
        columns = self._columns(frame, self._wanted)
        others = {name: frame[name] for name in frames.names(frame) if name not in self._wanted}
        lines = getattr(frame, "lines", None)
        return act("schema.check")(self, self.read(frame), columns, others, lines)

    def _columns(self, frame: Any, wanted: list[str]) -> dict[str, Column]:
        """Returns columns of a table; in those of files, numbers as text are written as Python does it."""
        found = files.opened(frame, wanted, self.dialect)
        dates = [name for name, kind in self.columns.items() if isinstance(kind, Date)]
        columns = frames.columns_of(found, wanted, dates)
        if not isinstance(found, files.Cells) or self.dialect == files.DEFAULT:
            return columns
        levels = {name: getattr(kind, "levels", ()) for name, kind in self.columns.items()}
        levels[self.target] = self.labels or ()
        for name in levels.keys() & columns.keys() - {*dates}:
            if not any(isinstance(level, str) for level in levels[name]):
                columns[name] = [self.dialect.number(value) for value in columns[name]]
        return columns

    def to_dict(self) -> dict[str, Any]:
        """Returns it as text, numbers, lists and dicts; `from_dict` reads it."""
        given = {name: getattr(self, name) for name in _FIELDS}
        kept = {name: _plain(value) for name, value in given.items() if value is not None}
        if self.dialect != files.DEFAULT:
            kept["dialect"] = asdict(self.dialect)
        words = {kind: word for word, kind in _KINDS.items()}
        columns = {}
        for name, kind in self.columns.items():
            own = {field: _plain(value) for field, value in vars(kind).items()}
            columns[name] = {"kind": words[type(kind)], **own}
        return {"rows_per_unit": _ALL, **kept, "columns": columns}

    @classmethod
    @typed
    def from_dict(cls, state: Mapping[str, Any]) -> Schema:
        """Builds a schema from `to_dict`; raises ValueError for a field that is unknown, missing or wrong."""
        columns = state.get("columns")
        if not isinstance(columns, Mapping):
            raise ValueError(
                f"columns must be a table of columns by name (got {check.shown(columns)})"
            )
        for name in state.keys() - {*_FIELDS, "columns", "dialect"}:
            raise ValueError(
                f"{name} must be left out: a schema has"
                f" {', '.join(('columns', *_FIELDS, 'dialect'))}"
            )
        require_answers(state)
        if "target" not in state:
            raise ValueError("target must be given: the name of the column of targets")
        read = {name: _column(name, dict(column)) for name, column in columns.items()}
        fields = {**state, "columns": read, "dialect": Dialect(**state.get("dialect", {}))}
        if fields.get("rows_per_unit") == _ALL:
            fields["rows_per_unit"] = None
        return cls(**fields)

    @typed
    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Writes it as TOML, to be read and edited by people; raises FileExistsError if the file is there."""
        state = self.to_dict()
        columns = state.pop("columns")
        tables = {f"columns.{toml(name)}": column for name, column in columns.items()}
        if "dialect" in state:
            tables = {"dialect": state.pop("dialect"), **tables}
        lines = [f"{name} = {toml(value)}" for name, value in state.items()]
        for name, table in tables.items():
            lines += [
                "",
                f"[{name}]",
                *(f"{key} = {toml(value)}" for key, value in table.items()),
            ]
        text = "\n".join([*lines, ""])
        with open(path, "w" if overwrite else "x", encoding="utf-8") as file:
            file.write(text)

    @classmethod
    @typed
    def load(cls, path: str | os.PathLike[str]) -> Schema:
        """Reads a file of `save`; raises ValueError for what is no schema, FileNotFoundError if there is no file."""
        with open(path, "rb") as file:
            try:
                state = tomllib.load(file)
            except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
                raise ValueError(
                    f"path must be a TOML file: {error} (got {os.fspath(path)!r})"
                ) from error
        return cls.from_dict(state)

    def _features(self, columns: Mapping[str, Column]) -> FloatArray:
        return np.concatenate(
            [kind.code(columns[name]) for name, kind in self.columns.items()], axis=1
        )

    def _units(self, units: list[str | None]) -> tuple[NDArray[np.int64], NDArray[Any]]:
        """Returns the rows that are kept, and their groups; a row without an id is a unit of its own."""
        kept = []
        seen = Counter[str]()
        for row, unit in enumerate(units):
            # PRIVACY: what is kept of a unit is decided by its own rows (test_rows_of_other_units_do_not_matter)
            group = f"?{row}" if unit is None else unit
            seen[group] += 1
            if self.rows_per_unit is None or seen[group] <= self.rows_per_unit:
                kept.append(row)
        groups = np.array([units[row] or f"?{row}" for row in kept], dtype=np.str_)
        return np.array(kept, dtype=np.int64), groups

    def _targets(self, values: Column) -> NDArray[Any]:
        if self.target_range is not None:
            return np.clip(numbers(values), *self.target_range)
        assert self.labels is not None
        places = places_of(self.labels, values)
        unknown = "" if isinstance(self.labels[0], str) else math.nan
        known = np.array([*self.labels, unknown])
        return known[np.nan_to_num(places, nan=len(self.labels)).astype(np.int64)]


@dataclass(frozen=True)
class Table:
    """A table that was read: X (n, d) float64, y (n,), and groups (n,), the ids for `fit`, or None."""

    schema: Schema = field(repr=False)
    X: FloatArray
    y: NDArray[Any]
    groups: NDArray[Any] | None

    def arguments(self) -> dict[str, Any]:
        """Returns all of it, for `model.fit(**table.arguments())`."""
        return {
            "X": self.X,
            "y": self.y,
            **({} if self.groups is None else {"groups": self.groups}),
        }

    @typed
    def dataset(self, loss: Loss, *, unit: str = "example") -> TensorDataset:
        """Returns rows and targets as a loss of `torch_dpsco.losses` takes them, for `optimizer.loader`.

        Labels are -1 and +1 (the second one), or 0..K-1; null records have inputs of NaN and the target 0, or 1.

        Args:
            loss: of targets like those of the schema.
            unit: "user" where the schema keeps several rows of a unit, for `optimizer.loader(dataset,
                users=table.groups)` of an optimizer that protects users.

        Raises:
            UnitError: the table is of users and unit is not, or the reverse.
            ValueError: the loss is of other targets.
        """
        check.choice(("example", "user"), unit=unit)
        if (unit == "user") != (self.groups is not None):
            # PRIVACY: rows without their ids would be protected one by one (test_rows_of_users_are_not_taken_for_units)
            raise UnitError(
                "unit must be 'user' for a schema that keeps several rows of a unit, with"
                f" loader(dataset, users=table.groups), and 'example' for others (got {unit!r})"
            )
        self.schema.require_targets(loss)
        rows = self.X.copy()
        dtype = torch.get_default_dtype()
        if self.schema.labels is None:
            targets = self.y.astype(np.float64)
            null = ~np.isfinite(targets)
            targets = np.where(null, 0.0, targets)
        else:
            places = places_of(self.schema.labels, self.y)
            null = np.isnan(places)
            targets = np.where(null, 0.0, places)
            if loss.target_kind == "sign":
                targets = np.where(places == 0, -1.0, 1.0)
        rows[null] = np.nan
        wanted = torch.int64 if loss.target_kind == "class" else dtype
        return TensorDataset(
            torch.from_numpy(rows).to(dtype), torch.from_numpy(targets).to(wanted)
        )


_KINDS: dict[str, type[Number | Date | Category | Ordered]] = {
    "number": Number,
    "date": Date,
    "category": Category,
    "ordered": Ordered,
}
_FIELDS = (
    "target",
    "labels",
    "target_range",
    "ids",
    "rows_per_unit",
    "unit",
    "one_row_per_unit",
)
_ALL = "all"  # rows of a unit: TOML has no null


def require_answers(state: Mapping[str, Any]) -> None:
    """Raises ValueError, for all of them together, while public numbers and levels of a schema are asked for."""
    columns = {f" of column {name!r}": dict(one) for name, one in state["columns"].items()}
    asked = []
    for place, table in {"": state, **columns}.items():
        names = [
            name
            for name, value in table.items()
            if value == OPEN or (isinstance(value, list) and set(map(str, value)) == {OPEN})
        ]
        asked += [f"{' and '.join(names)}{place}"] if names else []
    if asked:
        raise ValueError(
            f'each "{OPEN}" must be answered from public knowledge, as a code book, and not by'
            f" looking at the table (open: {'; '.join(asked)})"
        )


def _column(name: str, state: dict[str, Any]) -> Number | Date | Category | Ordered:
    kind = _KINDS.get(word) if isinstance(word := state.pop("kind", None), str) else None
    if kind is None:
        raise ValueError(
            f"kind of column {name!r} must be one of {', '.join(_KINDS)} (got {word!r})"
        )
    try:
        return kind(**state)
    except (TypeError, ValueError) as error:
        raise ValueError(f"column {name!r}: {error}") from error


def toml(value: Any) -> str:
    """Returns a value as TOML writes it."""
    if isinstance(value, list):
        return f"[{', '.join(map(toml, value))}]"
    if isinstance(value, str):  # strings of JSON are strings of TOML, but for one character
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return json.dumps(value, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple, np.ndarray)):
        return [_plain(one) for one in value]
    if isinstance(value, date):
        return value.isoformat()
    return value.item() if isinstance(value, np.generic) else value
