"""Coefficients in the units of a table: of a year where a schema scaled years to [-1, 1], of a level against others.

Post-processing of what a fit released, by public numbers of the schema: nothing is looked at or spent again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torch_dpsco.errors import ConditionError
from torch_dpsco.estimators.schema import Category, Date, Number, Ordered, Schema
from torch_dpsco.show import plots
from torch_dpsco.statistics.summary import Summary, summarize

Array = NDArray[np.float64]
_SHOWN = 8  # in a picture


@dataclass(frozen=True, eq=False, repr=False)
class Coefficients:
    """What a model says, in the units of its table: `print(study.coefficients())`.

    Args:
        moves: what a coefficient adds to, in words.
        names: of features, intercepts last; of softmax regression with the label before.
        units: what a value is of, in words: "per 1 of 17 to 90", "against 'f'".
        values: in these units; where intervals were paid for, without the pull of the regularizer to 0.
        scaled: the same for the features as they are coded, a number from -1 to 1.
        spans: of each column in its units, 1 for a level: values times spans can be compared. 0 for an intercept.
        inference: standard errors, p-values and intervals in these units; None where they were not paid for.
        why_not: there are none.
    """

    moves: str
    names: tuple[str, ...]
    units: tuple[str, ...]
    values: Array
    scaled: Array
    spans: Array
    inference: Summary | None = None
    why_not: str = ""

    @property
    def intervals(self) -> Array | None:
        """Ends (k, 2) of the intervals; None where they were not paid for."""
        return None if self.inference is None else self.inference.intervals

    @property
    def strongest(self) -> NDArray[np.intp]:
        """Places of the features, those first that move most over the whole of their column."""
        order = np.argsort(-np.abs(self.values * self.spans), kind="stable")
        return order[self.spans[order] > 0]

    def __str__(self) -> str:
        lines = [
            f"Coefficients: each adds to the {self.moves}",
            *self.lines(range(len(self.names))),
        ]
        lines.append("scaled: of features as they are coded, where a number runs from -1 to 1")
        if self.inference is None:
            return "\n".join([*lines, f"no intervals: {self.why_not}"])
        return "\n".join([*lines, *self.inference.notes()])

    def lines(self, places: Iterable[int]) -> list[str]:
        """Returns a table of some of them."""
        found = self.inference
        rows = [["", "", "value", "scaled"]]
        if found is not None:
            rows[0] += [f"{100 * found.level:g} % interval", "p", "of noise"]
        for k in places:
            row = [
                self.names[k],
                self.units[k],
                short(self.values[k]),
                short(self.scaled[k]),
            ]
            if found is not None:
                low, high = found.intervals[k]
                row.append(f"{short(low)} to {short(high)}")
                row += [f"{found.p_values[k]:.2g}", f"{100 * found.privacy[k]:.0f} %"]
            rows.append(row)
        wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
        sides = "<<" + ">" * (len(wide) - 2)
        return [
            "  ".join(
                f"{cell:{side}{w}}" for cell, side, w in zip(row, sides, wide, strict=True)
            )
            for row in rows
        ]

    def panel(self) -> plots.Panel:
        """Returns a picture of the strongest: what each adds over the whole of its column, with intervals if any."""
        chosen = self.strongest[:_SHOWN]
        rows = [f"{self.names[k]}\n{self.units[k]}" for k in chosen]
        notes = [short(self.values[k], "+") for k in chosen]
        spans = self.spans[chosen]
        ends = None if self.intervals is None else self.intervals[chosen] * spans[:, None]
        what = "released, noise included"
        if self.inference is not None:
            what = f"estimate and {100 * self.inference.level:g} % interval"
        return plots.ranges(
            "What the model says",
            f"over the whole column, adds to the {self.moves}",
            rows,
            self.values[chosen] * spans,
            ends,
            what,
            notes=notes,
        )


def short(value: float, sign: str = "") -> str:
    """Returns a number with three digits.

    Example:
        >>> short(-2013.4), short(0.0512, "+"), short(0.0)
        ('-2010', '+0.0512', '0')
    """
    return f"{float(f'{value:.3g}'):{sign}g}"


def coefficients_of(model: Any, schema: Schema, level: float) -> Coefficients:
    """Returns the coefficients of a fitted model of a schema, with intervals of a level in (0, 1) if there are any."""
    found = _released(model, schema)
    try:
        scaled = model.summary(level)
    except ConditionError as error:
        return replace(found, why_not=str(error))
    own = summarize(model, level, _map(schema))
    return replace(
        found,
        values=own.coefficients,
        scaled=np.append(scaled.coefficients, 0.0)[: len(own.coefficients)],
        inference=replace(own, names=found.names),
    )


def _released(model: Any, schema: Schema) -> Coefficients:
    weights = np.atleast_2d(model.coef_)
    raw = np.column_stack([weights, np.atleast_1d(model.intercept_)])
    names, labels = [*schema.names, "intercept"], schema.labels
    several = len(raw) > 1
    if several:
        raw = raw - raw.mean(0)  # a constant on all labels changes no probability
        names = [f"{label}: {name}" for label in labels or () for name in names]
    moves = schema.target
    if labels is not None:
        of = "the label it names" if several else repr(labels[-1])
        odds = hasattr(model, "predict_proba") and getattr(model, "_link", None) is None
        moves = f"{'log-odds' if odds else 'score'} of {of}"
    units, spans = zip(*_units(schema), strict=True)
    return Coefficients(
        moves=moves,
        names=tuple(names),
        units=units * len(raw),
        values=np.ravel(raw @ _map(schema).T),
        scaled=np.ravel(raw),
        spans=np.tile(spans, len(raw)).astype(np.float64),
    )


def _ends(kind: Number | Date | Ordered) -> tuple[float, float]:
    """Returns the ends of a column in its own units: of a date days since the first one, of levels their places."""
    if isinstance(kind, Number):
        return kind.low, kind.high
    if isinstance(kind, Date):
        return 0.0, kind.number.high - kind.number.low
    return 0.0, len(kind.levels) - 1.0


def _units(schema: Schema) -> Iterator[tuple[str, float]]:
    """Yields the unit and the span of each feature and of the intercept."""
    for kind in schema.columns.values():
        if isinstance(kind, Category):
            of = f"against {kind.levels[0]!r}" if kind.baseline else "against the average level"
            yield from [(of, 1.0)] * (len(kind.levels) - kind.baseline)
            continue
        low, high = _ends(kind)
        if isinstance(kind, Number):
            yield f"per 1 of {low:g} to {high:g}", high - low
        elif isinstance(kind, Date):
            yield f"per day from {kind.low} to {kind.high}", high
        else:
            yield f"per level of {kind.levels[0]} to {kind.levels[-1]}", high
        if kind.missing:
            yield "against the middle", 1.0
    dated = any(isinstance(kind, Date) for kind in schema.columns.values())
    yield f"where numbers are 0{', days the first ones' if dated else ''}", 0.0


def _map(schema: Schema) -> Array:
    """Returns the linear map (d + 1, d + 1) from coefficients of coded features, and the intercept, to own units."""
    size = len(schema.names) + 1
    found = np.eye(size)
    place = 0
    for kind in schema.columns.values():
        if isinstance(kind, Category):
            end = place + len(kind.levels) - kind.baseline
            if not kind.baseline:
                found[place:end, place:end] -= 1.0 / len(kind.levels)
                found[-1, place:end] = 1.0 / len(kind.levels)
            place = end
            continue
        low, high = _ends(kind)
        found[place, place] = 2.0 / (high - low)
        found[-1, place] = -2.0 * low / (high - low) - 1.0
        place += 1 + kind.missing
    return found
