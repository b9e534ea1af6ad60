"""Argument checks with one message format: name, allowed range, value.

Each function takes exactly one keyword argument, whose name is that of the field, and returns the checked value as a
plain Python number, so that numpy scalars and zero-dimensional tensors never reach a ledger or a state dict.

    >>> positive(clip=2)
    2.0
    >>> positive(clip=-1.0)
    Traceback (most recent call last):
    ...
    ValueError: clip must be > 0 (got -1.0)
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import Any, TypeVar

__all__ = [
    "between",
    "choice",
    "count",
    "finite",
    "nonnegative",
    "open_interval",
    "order",
    "positive",
    "positive_count",
]

_T = TypeVar("_T")


def _unpack(field: dict[str, Any]) -> tuple[str, Any]:
    if len(field) != 1:
        raise TypeError(f"exactly one keyword argument expected (got {sorted(field)})")
    return field.popitem()


def _number(name: str, value: Any) -> float:
    if isinstance(value, (bool, str, bytes)) or value is None:
        raise ValueError(f"{name} must be a number (got {value!r})")
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ValueError(f"{name} must be a number (got {value!r})") from error


def finite(**field: Any) -> float:
    """Returns the field as a float; raises ValueError unless it is a finite number."""
    name, value = _unpack(field)
    number = _number(name, value)
    if not math.isfinite(number):
        raise ValueError(f"{name} must be finite (got {number})")
    return number


def positive(*, allow_inf: bool = False, **field: Any) -> float:
    """Returns the field as a float; raises ValueError unless it is > 0 (and finite unless `allow_inf`)."""
    name, value = _unpack(field)
    number = _number(name, value)
    if not number > 0:
        raise ValueError(f"{name} must be > 0 (got {number})")
    if math.isinf(number) and not allow_inf:
        raise ValueError(f"{name} must be finite (got {number})")
    return number


def nonnegative(*, allow_inf: bool = False, **field: Any) -> float:
    """Returns the field as a float; raises ValueError unless it is >= 0 (and finite unless `allow_inf`)."""
    name, value = _unpack(field)
    number = _number(name, value)
    if not number >= 0:
        raise ValueError(f"{name} must be >= 0 (got {number})")
    if math.isinf(number) and not allow_inf:
        raise ValueError(f"{name} must be finite (got {number})")
    return number


def between(low: float, high: float, **field: Any) -> float:
    """Returns the field as a float; raises ValueError unless low <= field <= high."""
    name, value = _unpack(field)
    number = _number(name, value)
    if not low <= number <= high:
        raise ValueError(f"{name} must be in [{low:g}, {high:g}] (got {number})")
    return number


def open_interval(low: float, high: float, **field: Any) -> float:
    """Returns the field as a float; raises ValueError unless low < field < high."""
    name, value = _unpack(field)
    number = _number(name, value)
    if not low < number < high:
        raise ValueError(f"{name} must be in ({low:g}, {high:g}) (got {number})")
    return number


def order(**field: Any) -> float:
    """Returns a Renyi order as a float; raises ValueError unless it is finite and > 1."""
    name, value = _unpack(field)
    number = _number(name, value)
    if not 1 < number < math.inf:
        raise ValueError(f"{name} must be finite and > 1 (got {number})")
    return number


def count(**field: Any) -> int:
    """Returns the field as an int; raises ValueError unless it is an integer >= 0."""
    name, value = _unpack(field)
    try:
        number = operator.index(value)
    except TypeError as error:
        raise ValueError(f"{name} must be an integer (got {value!r})") from error
    if isinstance(value, bool) or number < 0:
        raise ValueError(f"{name} must be an integer >= 0 (got {value!r})")
    return number


def positive_count(**field: Any) -> int:
    """Returns the field as an int; raises ValueError unless it is an integer >= 1."""
    number = count(**field)
    if number < 1:
        name, value = _unpack(field)
        raise ValueError(f"{name} must be an integer >= 1 (got {value!r})")
    return number


def choice(allowed: Iterable[_T], **field: Any) -> _T:
    """Returns the member of `allowed` that equals the field; raises ValueError if there is none."""
    name, value = _unpack(field)
    options = list(allowed)
    for option in options:
        if option == value:
            return option
    raise ValueError(f"{name} must be one of {', '.join(map(str, options))} (got {value!r})")
