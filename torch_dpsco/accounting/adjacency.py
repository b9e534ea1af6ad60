"""Neighboring relations, and sensitivities per relation.

* `add_remove`: the neighbor has one record more or less; the data set size is not public;
* `zero_out`: one record is replaced by a null record that contributes 0; sizes and positions stay;
* `replace_one`: one record is replaced by an arbitrary other one; the data set size is public.

Source: docs/proofs/accounting.md#adjacencies-and-units.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from torch_dpsco import _validate as check

Adjacency: TypeAlias = Literal["add_remove", "zero_out", "replace_one"]
ADD_REMOVE: Adjacency = "add_remove"
ZERO_OUT: Adjacency = "zero_out"
REPLACE_ONE: Adjacency = "replace_one"
ADJACENCIES: tuple[Adjacency, ...] = (ADD_REMOVE, ZERO_OUT, REPLACE_ONE)

# L2 sensitivity of a sum of rows clipped at 1: a replaced row takes one vector of norm <= 1 away and adds another.
CLIP_UNITS: Mapping[Adjacency, float] = {ADD_REMOVE: 1.0, ZERO_OUT: 1.0, REPLACE_ONE: 2.0}


def check_adjacency(adjacency: str) -> Adjacency:
    """Returns the adjacency; raises ValueError for an unknown name."""
    return check.choice(ADJACENCIES, adjacency=adjacency)


Sens: TypeAlias = "Mapping[Adjacency, float] | tuple[tuple[Adjacency, float], ...]"


def sorted_sens(sens: Sens) -> tuple[tuple[Adjacency, float], ...]:
    """Returns sensitivities in one order, so that events are hashable and equal ones compare equal."""
    pairs: Any = tuple(sens.items()) if isinstance(sens, Mapping) else sens
    if not isinstance(pairs, tuple) or not all(
        isinstance(pair, tuple) and len(pair) == 2 for pair in pairs
    ):
        raise ValueError(
            f"sens must map adjacencies to sensitivities, as {{'replace_one': 2.0}} (got {sens!r})"
        )
    if not pairs:
        raise ValueError("sens must name at least one adjacency (got none)")
    found = {check_adjacency(a): check.nonnegative(sens=s) for a, s in pairs}
    if len(found) < len(pairs):
        raise ValueError(f"sens must name each adjacency once (got {sens!r})")
    return tuple(sorted(found.items()))


def below_one(**field: Any) -> float:
    """Returns the field, a delta or a failure probability, as a float; raises ValueError unless it is in [0, 1)."""
    value = check.nonnegative(**field)
    if value >= 1:
        raise ValueError(f"{next(iter(field))} must be in [0, 1) (got {value})")
    return value + 0.0  # no negative zero, which prints as -0
