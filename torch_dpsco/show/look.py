"""A local look at a table beside its schema. NOT private: what it says is read off the records, for their keeper.

What stops a study is what would spend its budget on nothing, or make its report wrong: more than 1 in 20 records lost,
by labels or values that cannot be read, or with levels that differ in blanks or case; columns of which more than a half
is clipped or unknown, or nothing is a number; fewer than two labels that occur; and, in a column outside of a schema
that gives units a name, ids that repeat where the schema takes each row for a unit.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import date
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from torch_dpsco.estimators.reading import Column, column
from torch_dpsco.estimators.schema import ROW, Date, Number, Ordered, key, numbers, unit_id

if TYPE_CHECKING:
    from torch_dpsco.estimators.schema import Schema, Table

_SHARE = 0.05  # of values that may be odd, and of records that may be lost
_MOST = 0.5  # of values of a column that may be clipped, or unknown
ID_WORDS = {"id", "ids", "uuid", "guid", "mrn", "ssn", "pseudonym"}
_NARROW = 0.02  # of a range, that holds nearly all values of a column in another unit
_FINE = 0.25  # different values, as a share of rows, of a column by which records differ
_SHOWN = 3
_NO_VALUE = {"", "-", ".", "?", "na", "n/a", "#n/a", "nan", "null", "none", "missing", "k.a."}


@dataclass(frozen=True)
class Finding:
    """Something that looks wrong: the column ("" for the table), what is seen, what to do, whether it stops a study.

    `where` has the first rows in which it is seen.
    """

    column: str
    seen: str
    advice: str
    stops: bool = False
    where: tuple[int, ...] = ()

    def __str__(self) -> str:
        return (
            f"{'STOPS A STUDY: ' if self.stops else ''}{self.column or 'table'}: {self.seen}."
            f" {self.advice}"
        )


@dataclass(frozen=True)
class Check:
    """What `Schema.check` found; NOT private."""

    findings: tuple[Finding, ...]

    @property
    def columns(self) -> set[str]:
        """The columns that something was found about."""
        return {finding.column for finding in self.findings}

    @property
    def stops(self) -> bool:
        """Whether a study would be stopped, since it would spend its budget on nothing."""
        return any(finding.stops for finding in self.findings)

    def __str__(self) -> str:
        head = (
            "LOCAL CHECK, NOT PRIVATE: read off the records. Do not publish it, nor keep it beside"
            " what you publish."
        )
        return "\n".join(
            [head, *(f"- {finding}" for finding in self.findings or ["nothing was found"])]
        )


def look(
    schema: Schema,
    table: Table,
    columns: Mapping[str, Column],
    others: Mapping[str, Any],
    lines: Sequence[int] | None = None,
) -> Check:
    """Returns what looks wrong; see `Schema.check`.

    Args:
        schema: of the table.
        table: as it was read.
        columns: each column of the schema.
        others: each column outside of the schema, as it is; what is no column is left out.
        lines: of a file, that rows end in; None for a table that is no file.
    """
    found = [*_labels(schema, columns[schema.target])]
    for name, kind in schema.columns.items():
        if isinstance(kind, Number):
            found += _numbers(name, kind, columns[name])
        elif isinstance(kind, Date):
            days = list(_days(kind, columns[name]))
            found += _numbers(name, kind.number, days, _as_day)
        else:
            found += _levels(name, kind, columns[name])
    beside = {name: values for name in others for values in _readable(name, others[name])}
    units = [] if schema.ids is None else list(columns[schema.ids])
    if schema.ids is not None:
        found += _ids(schema, units)
    if len(set(map(unit_id, units))) == len(units):  # none, or one for each row
        for name, values in beside.items():
            found += _other_ids(schema, name, list(values))
    found += _rows(table)
    for name, values in {**columns, **beside}.items():
        found += _line_breaks(name, values)
    return Check(tuple(_placed(finding, lines) for finding in found))


def _placed(finding: Finding, lines: Sequence[int] | None) -> Finding:
    """Returns a finding that says where it is seen: in which lines of a file, or rows of a table, the first being 0."""
    if not finding.where:
        return finding
    places = finding.where if lines is None else [lines[row] for row in finding.where]
    what = f"{'row' if lines is None else 'line'} {', '.join(map(str, places))}"
    return replace(finding, seen=f"{finding.seen}, first in {what}")


def _first(rows: Iterable[object]) -> tuple[int, ...]:
    """Returns the first places of what is true."""
    return tuple(islice((place for place, is_so in enumerate(rows) if is_so), _SHOWN))


def _days(kind: Date, column: Column) -> Iterator[Any]:
    """Yields days as numbers, text for what is no day, and None for what is missing."""
    for value, day in zip(column, kind.days(column), strict=True):
        is_text = isinstance(value, str) and value.strip()
        yield day if day == day else "no day" if is_text else None


def _as_day(number: float) -> str:
    return date.fromordinal(round(number)).isoformat()


def _as_number(number: float) -> str:
    return f"{number:g}"


def _readable(name: str, given: Any) -> Iterator[Column]:
    """Yields a column, or nothing for what is none."""
    with suppress(ValueError):
        yield column(name, given)


def _line_breaks(name: str, values: Column) -> Iterator[Finding]:
    broken = [isinstance(one, str) and ("\n" in one or "\r" in one) for one in values]
    if any(broken):
        seen = f"{sum(broken) / len(values):.1%} of cells have line breaks"
        advice = "See whether they are notes of several lines, or a quote swallows rows there"
        yield Finding(name, seen, advice, where=_first(broken))


def _labels(schema: Schema, column: Any) -> Iterator[Finding]:
    name = schema.target
    if schema.labels is None:
        assert schema.target_range is not None
        yield from _numbers(name, Number(*schema.target_range), column)
        return
    seen = _counted(column)
    known = {key(label) for label in schema.labels}
    yield from _unknown(name, known, column, "labels", _SHARE)
    absent = [label for label in schema.labels if seen and seen[key(label)] == 0]
    for label in absent:
        stops = len(schema.labels) - len(absent) < 2
        yield Finding(
            name,
            f"no row has the label {label!r}",
            "See whether labels are coded otherwise",
            stops,
        )


def _levels(name: str, kind: Any, column: Any) -> Iterator[Finding]:
    whole = isinstance(kind, Ordered) and not kind.missing  # the row is lost with the value
    known = {key(level) for level in kind.levels}
    yield from _unknown(name, known, column, "levels", _SHARE if whole else _MOST)
    if len(_counted(column)) == 1:
        yield Finding(name, "all values are one", "Leave the column out")


def _counted(column: Any) -> Counter[Any]:
    """Returns how often each key occurs."""
    values = column.tolist() if isinstance(column, np.ndarray) else column
    seen = Counter[Any]()
    try:
        different = Counter(values)
    except TypeError:  # lists, which are missing values, too
        return Counter(map(key, values))
    for value, count in different.items():
        seen[key(value)] += count
    return seen


def _unknown(
    name: str, known: set[Any], column: Any, what: str, most: float
) -> Iterator[Finding]:
    seen = _counted(column)
    others = Counter({value: count for value, count in seen.items() if value not in known})
    rows = seen.total()
    missing = others.pop(None, 0) + others.pop("", 0)
    if others:
        shown = ", ".join(repr(value) for value, _ in others.most_common(_SHOWN))
        near = {str(level).strip().casefold() for level in known}
        hint = (
            "; some differ in blanks or case only"
            if any(str(o).strip().casefold() in near for o in others)
            else ""
        )
        share = others.total() / rows
        text = f"{share:.1%} of values are none of the {what} ({shown}{hint})"
        stops = share > (_SHARE if hint else most)
        where = _first(key(value) in others for value in column)
        yield Finding(name, text, f"Mend {what}, or values", stops, where)
    if missing > _SHARE * rows:
        text = f"{missing / rows:.1%} of values are missing"
        yield Finding(name, text, f"Give them one of the {what}", missing > most * rows)


def _numbers(
    name: str, kind: Number, column: Any, say: Callable[[float], str] = _as_number
) -> Iterator[Finding]:
    array = numbers(column)
    known = array[np.isfinite(array)]
    lost = len(array) - len(known)
    rows = max(len(array), 1)
    values = [] if isinstance(column, np.ndarray) else column  # numbers, or text of them
    odd = [_is_odd(one) and np.isnan(value) for one, value in zip(values, array, strict=False)]
    text = sum(odd)
    if kind.missing and not text and len(known):
        lost = 0  # what is missing is a feature
    if lost:
        what = "missing, or text that cannot be read" if text else "missing"
        advice = (
            "Mend the text (no units beside numbers), or how the schema says that it is written (the"
            " decimal sign, the format of dates), or take a Category"
            if text
            else "Give missing=True"
        )
        stops = not len(known) or (text if kind.missing else lost) > _SHARE * rows
        seen = f"{lost / rows:.1%} of values are {what}"
        yield Finding(name, seen, advice, stops, _first(odd if text else np.isnan(array)))
    if not len(known):
        return
    yield from _range(name, kind, array, say)
    yield from _unit(name, kind, known, say)


def _is_odd(value: Any) -> bool:
    """Whether a value is text that does not say that it is missing."""
    return isinstance(value, str) and value.strip().casefold() not in _NO_VALUE


def _range(
    name: str, kind: Number, array: NDArray[np.float64], say: Callable[[float], str]
) -> Iterator[Finding]:
    """Yields what looks wrong with the range of a column."""
    known = array[np.isfinite(array)]
    beyond = (array < kind.low) | (array > kind.high)
    outside = float(beyond.sum() / len(known))
    ends = f"[{say(kind.low)}, {say(kind.high)}]"
    if outside > _SHARE:
        seen = (
            f"{outside:.1%} of values are outside of {ends} (they reach {say(known.min())} to"
            f" {say(known.max())})"
        )
        advice = "Mend the unit, or the range; codes such as -999 must be made missing"
        yield Finding(name, seen, advice, outside > _MOST, _first(beyond))
    elif outside and len(rare := Counter(array[beyond])) <= 2:
        yield Finding(
            name,
            f"{outside:.2%} of values are {', '.join(map(say, rare))}, out of range",
            "If it is a code, make it missing",
            where=_first(beyond),
        )


def _unit(
    name: str, kind: Number, known: NDArray[np.float64], say: Callable[[float], str]
) -> Iterator[Finding]:
    """Yields what looks wrong with the unit of a column."""
    different, counts = np.unique(known, return_counts=True)
    if len(different) == 1:
        yield Finding(name, "all values are one", "Leave the column out")
        return
    usual = different[
        counts.argmax()
    ]  # as 0 of a rare event, beside which the others tell the unit
    low, high = np.quantile(known[known != usual], [0.01, 0.99])
    low = min(low, usual)
    high = max(high, usual)
    if high - low < _NARROW * (kind.high - kind.low):
        seen = (
            f"nearly all values are in [{say(low)}, {say(high)}], a small part of"
            f" [{say(kind.low)}, {say(kind.high)}]"
        )
        yield Finding(name, seen, "Mend the unit (percent or share, thousands), or the range")


def _ids(schema: Schema, values: list[Any]) -> Iterator[Finding]:
    name = str(schema.ids)
    units = [unit_id(value) for value in values]
    if lost := sum(unit is None for unit in units):
        yield Finding(
            name,
            f"{lost / len(units):.1%} of rows have no id",
            "They are null records; give them ids",
            where=_first(unit is None for unit in units),
        )
    known = [unit for unit in units if unit is not None]
    if known and schema.rows_per_unit != 1 and len(set(known)) == len(known):
        yield Finding(
            name,
            f"each {schema.unit} has one row",
            "See whether it is the id of rows; else rows_per_unit=1",
        )
    if known and schema.rows_per_unit == 1 and len(set(known)) < len(known):
        share = 1 - len(set(known)) / len(known)
        yield Finding(
            name,
            f"{share:.1%} of rows are left out: only the first row of each {schema.unit} counts",
            'rows_per_unit=None (in a file: "all") takes all of them',
        )


def _other_ids(schema: Schema, name: str, values: list[Any]) -> Iterator[Finding]:
    """Yields that a column outside of the schema may say whose rows are whose, and that some have several."""
    known = [unit for unit in map(unit_id, values) if unit is not None]
    repeats = Counter(known)
    if len(repeats) == len(known):
        return
    words = {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", str(name))}
    named = bool(words & {*ID_WORDS, *schema.unit.lower().split()} - {ROW})
    text = all(
        isinstance(one, str) and key(one) == one for one in values if unit_id(one) is not None
    )
    if not named and not (text and len(repeats) > _MOST * len(known)):
        return
    share = sum(count for count in repeats.values() if count > 1) / len(known)
    seen = (
        f"it looks like ids, is not in the schema, and {share:.1%} of rows have one that others"
        " have too"
    )
    advice = (
        f"If it says whose rows are whose, give ids={name!r}: as it is, rows are protected one"
        " by one"
    )
    yield Finding(str(name), seen, advice, named and schema.unit != ROW)


def _rows(table: Table) -> Iterator[Finding]:
    if not len(table.X):
        yield Finding("", "there are no rows", "See whether the right table was read", True)
        return
    null = float(np.isnan(table.X).any(1).mean())
    if null > _SHARE:
        yield Finding(
            "",
            f"{null:.1%} of rows are null records, which teach nothing",
            "See the columns above",
            True,
        )
    whole = table.X[~np.isnan(table.X).any(1)]
    # records with a fine column do not repeat by themselves
    if len(whole) and max(len(np.unique(column)) for column in whole.T) > _FINE * len(whole):
        share = 1 - len(np.unique(whole, axis=0)) / len(whole)
        if share > _SHARE:
            yield Finding(
                "", f"{share:.1%} of rows repeat others", "See whether records are there twice"
            )


def require_readable(schema: Schema, frame: Any) -> None:
    """Looks at a table beside its schema, and stops before a budget is spent on what cannot be read. NOT private.

    What `Schema.check` finds is written to standard error, for the eyes of who holds the data, and nowhere else.

    Raises:
        ValueError: something that stops a study was found, which the message does not say.
    """
    found = schema.check(frame)
    if found.findings:
        sys.stderr.write(f"{found}\n")
    if found.stops:
        # PRIVACY: errors travel further than a terminal (test_what_the_look_finds_is_on_standard_error_alone)
        raise ValueError(
            "the table must be one that its schema can read: what does not fit is on standard"
            " error, for whoever holds the data. Mend the table or the schema, or pass check=False"
            " (dpsco fit --unchecked). Nothing was spent"
        )
