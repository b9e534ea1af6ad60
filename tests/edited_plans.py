"""Saved plans in which one number is another one, at any depth."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from torch_dpsco.step.plan import Plan


def edited(plan: Plan) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (what was edited, saved plan): each number halved, doubled and moved a little; words are others'."""
    row = plan.to_dict()
    for path, value in _leaves(
        {name: value for name, value in row.items() if name != "version"}
    ):
        for other in _others(path[-1], value):
            saved: Any = copy.deepcopy(row)
            place = saved
            for key in path[:-1]:
                place = place[key]
            place[path[-1]] = other
            yield f"{'.'.join(map(str, path))} = {other} (was {value})", saved


def _others(name: Any, value: Any) -> list[Any]:
    if name == "type":
        return []
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [max(value // 2, 1), value + 1, 2 * value]
    if isinstance(value, float):
        return [value / 2, 0.999 * value, 2 * value] if value else [0.5]
    words = (
        ("replace_one", "zero_out"),
        ("exact", None),
        ("uniform", "last"),
        ("gaussian", "knorm"),
    )
    return [other for pair in words if value in pair for other in pair if other != value]


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(value, dict) and value.get("type") != "float":
        for name, inner in value.items():
            yield from _leaves(inner, (*path, name))
    elif isinstance(value, list):
        for place in sorted({0, len(value) // 2, len(value) - 1} if value else ()):
            yield from _leaves(value[place], (*path, place))
    else:
        yield path, value
