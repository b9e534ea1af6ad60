"""Columns of a table as blocks (X, y) or (X, y, sample_weight): chosen and read by the schema, which is public.

Whether a column is one of numbers follows from the schema, never from values. A missing number is NaN: it makes a
record without influence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

Block = tuple[NDArray[Any], ...]


@dataclass(frozen=True)
class Columns:
    """Which columns are read, and as what.

    Args:
        names: of features.
        others: target, and weight if there is one.
        numbers: whether these two are numbers; else labels.
        single: whether features are float32; else float64.
    """

    names: tuple[str, ...]
    others: tuple[str, ...]
    numbers: tuple[bool, ...]
    single: bool

    @classmethod
    def of(
        cls, schema: Any, target: str, features: Sequence[str] | None, sample_weight: str | None
    ) -> Columns:
        """Returns the columns of a table.

        Args:
            schema: of pyarrow.
            target: name of the column of targets.
            features: names of the columns of features; None for all others.
            sample_weight: name of the column of weights; None for none.

        Raises:
            TypeError: a column of features is not of numbers.
            ValueError: a column is not there.
        """
        given = {
            "target": [target],
            "sample_weight": [] if sample_weight is None else [sample_weight],
        }
        others = [*given["target"], *given["sample_weight"]]
        names = (
            [name for name in schema.names if name not in others]
            if features is None
            else list(features)
        )
        if not names:
            raise ValueError("features must name one column or more (got none)")
        for argument, columns in ({"features": names} | given).items():
            for name in columns:
                if schema.names.count(name) != 1:
                    raise ValueError(
                        f"{argument} must be in the table, once each (got {name!r}, of"
                        f" {schema.names})"
                    )
        kinds = [schema.field(name).type for name in names]
        for name, kind in zip(names, kinds, strict=True):
            if not is_number(kind):
                raise TypeError(
                    f"column {name!r} must be of numbers (got {kind}): encode it by public rules"
                )
        numbers = tuple(is_number(schema.field(name).type) for name in others)
        return cls(
            tuple(names), tuple(others), numbers, all(kind == pa.float32() for kind in kinds)
        )

    def empty(self) -> Block:
        """Returns a block without rows: a table may have none."""
        return self.block(0, lambda name, number: np.empty(0))

    def block(self, rows: int, read: Callable[[str, bool], NDArray[Any]]) -> Block:
        """Returns so many rows.

        Args:
            rows: m.
            read: numbers (m,) of a column, or its labels; of its name, and whether they are numbers.
        """
        features = np.empty(
            (rows, len(self.names)), dtype=np.float32 if self.single else np.float64
        )
        for place, name in enumerate(self.names):
            features[:, place] = read(name, True)
        others = (
            read(name, number) for name, number in zip(self.others, self.numbers, strict=True)
        )
        return features, *(
            column.astype(np.float64, copy=False) if column.dtype.kind == "f" else column
            for column in others
        )

    def arrow_block(self, table: Any) -> Block:
        """Returns the rows of an Arrow table or record batch."""

        def read(name: str, number: bool) -> NDArray[Any]:
            column = table.column(name)
            return _numbers(name, column) if number else _objects(column.to_pylist())

        return self.block(len(table), read)

    def pandas_block(self, frame: Any) -> Block:
        """Returns the rows of a pandas data frame."""

        def read(name: str, number: bool) -> NDArray[Any]:
            column = frame[name]
            if not number:
                return _objects(column.tolist())
            if not pandas_is_number(column.dtype):
                raise TypeError(
                    f"column {name!r} must be of numbers in each partition (got {column.dtype})"
                )
            return np.asarray(column.to_numpy(dtype=np.float64, na_value=np.nan))

        return self.block(len(frame), read)


def pandas_is_number(dtype: Any) -> bool:
    """Whether a dtype of pandas is one of numbers, nullable and Arrow's ones included."""
    return getattr(dtype, "kind", "O") in "biuf"


def is_number(kind: Any) -> bool:
    """Whether a type of Arrow is one of numbers."""
    return bool(
        pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    )


def _numbers(name: str, column: Any) -> NDArray[Any]:
    """Returns numbers, NaN for missing ones."""
    if not (is_number(column.type) or pa.types.is_null(column.type)):
        raise TypeError(f"column {name!r} must be of numbers in each block (got {column.type})")
    kind = column.type if pa.types.is_floating(column.type) else pa.float64()
    return np.asarray(column.cast(kind, safe=False).to_numpy(zero_copy_only=False))


def _objects(labels: list[Any]) -> NDArray[Any]:
    column = np.empty(len(labels), dtype=object)
    column[:] = labels
    return column
