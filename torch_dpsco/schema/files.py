"""A schema as plain data, and as a file of TOML for people to read and edit."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from torch_dpsco import _validate as check
from torch_dpsco.schema.columns import Category, Number, Ordered

if TYPE_CHECKING:
    from torch_dpsco.schema.schema import Schema

_KINDS: dict[str, type[Number | Category | Ordered]] = {
    "number": Number,
    "category": Category,
    "ordered": Ordered,
}
_FIELDS = ("target", "labels", "target_range", "ids", "rows_per_unit", "unit", "one_row_per_unit")
_ALL = "all"  # rows of a unit: TOML has no null


def to_dict(schema: Schema) -> dict[str, Any]:
    """Returns fields that are not None, and columns by name; see `Schema.to_dict`."""
    fields = {
        name: _plain(getattr(schema, name)) for name in _FIELDS if getattr(schema, name) is not None
    }
    words = {kind: word for word, kind in _KINDS.items()}
    columns = {
        name: {"kind": words[type(kind)], **_plain(vars(kind))}
        for name, kind in schema.columns.items()
    }
    for column in columns.values():
        column.pop("_places", None)
    return {"rows_per_unit": _ALL} | fields | {"columns": columns}


def fields_of(state: Any) -> dict[str, Any]:
    """Returns the fields of a schema; raises ValueError for what is none."""
    if not isinstance(state, Mapping) or not isinstance(state.get("columns"), Mapping):
        got = check.shown(state.get("columns") if isinstance(state, Mapping) else state)
        raise ValueError(f"columns must be a table of columns by name (got {got})")
    if unknown := sorted(map(str, state.keys() - {*_FIELDS, "columns"})):
        raise ValueError(
            f"{unknown[0]} must be left out: a schema has {', '.join(('columns', *_FIELDS))}"
        )
    if "target" not in state:
        raise ValueError("target must be given: the name of the column of targets")
    fields = {name: value for name, value in state.items() if name != "columns"}
    if fields.get("rows_per_unit") == _ALL:
        fields["rows_per_unit"] = None
    return {
        "columns": {name: _column(name, dict(column)) for name, column in state["columns"].items()},
        **fields,
    }


def _column(name: str, state: dict[str, Any]) -> Number | Category | Ordered:
    kind = _KINDS.get(word) if isinstance(word := state.pop("kind", None), str) else None
    if kind is None:
        raise ValueError(
            f"kind of column {name!r} must be one of {', '.join(_KINDS)} (got {word!r})"
        )
    try:
        return kind(**state)
    except (TypeError, ValueError) as error:
        raise ValueError(f"column {name!r}: {error}") from error


def read_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns what a file holds; raises ValueError if it is no TOML, FileNotFoundError if there is none."""
    if not os.path.exists(path):
        raise FileNotFoundError(
            f"path must be that of a TOML file that is there (got {os.fspath(path)!r})"
        )
    with open(path, "rb") as file:
        try:
            return tomllib.load(file)
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ValueError(
                f"path must be that of a TOML file: {error} (got {os.fspath(path)!r})"
            ) from error


def to_toml(state: Mapping[str, Any]) -> str:
    """Returns a dict of `to_dict` as TOML: the fields, then one table per column, in order."""
    lines = [f"{name} = {_value(value)}" for name, value in state.items() if name != "columns"]
    for name, column in state["columns"].items():
        lines += [
            "",
            f"[columns.{_value(name)}]",
            *(f"{field} = {_value(value)}" for field, value in column.items()),
        ]
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, str):  # strings of JSON are strings of TOML, but for one character
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return json.dumps(value, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple, np.ndarray)):
        return [_plain(one) for one in value]
    return value.item() if isinstance(value, np.generic) else value
