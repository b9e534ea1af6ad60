"""Argument checks with one message format: name, allowed range, value.

Each function takes exactly one keyword argument, whose name is that of the field, and returns the checked value as a
plain Python number, so that numpy scalars and zero-dimensional tensors never reach a ledger or a state dict. Whatever
is wrong with an argument, its type included, is a ValueError.

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
import os
from collections.abc import Callable, Iterable
from numbers import Number
from typing import Any, NoReturn, TypeVar

LARGEST_COUNT = 2**62  # what a ledger can count to
_SHOWN = 60  # characters of a value in a message

_T = TypeVar("_T")


def _unpack(field: dict[str, Any]) -> tuple[str, Any]:
    if len(field) != 1:
        raise TypeError(f"exactly one keyword argument expected (got {sorted(field)})")
    (item,) = field.items()
    return item


def shown(value: object) -> str:
    """Returns how a message shows a value: numbers, words and lists of them unchanged, of all else the type.

    Example:
        >>> shown((1.0, "a")), shown([[1.0]]), shown(int)
        ("(1.0, 'a')", 'list', 'class int')
    """
    if isinstance(value, type):
        return f"class {value.__name__}"
    parts = value if isinstance(value, (tuple, list)) else (value,)
    if not all(
        part is None or isinstance(part, (bool, int, float, complex, str)) for part in parts
    ):
        return type(value).__name__
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def article(noun: str) -> str:
    """Returns a class name with its article."""
    return f"{'an' if noun[0] in 'AEIO' or noun.startswith('Up') else 'a'} {noun}"


def fields(value: object, **checks: Callable[..., Any]) -> None:
    """Sets fields of a frozen value, while it is built, to what their checks return.

    A check is called with its field as the only, named, argument, as those of this module are.
    """
    for name, checked in checks.items():
        object.__setattr__(value, name, checked(**{name: getattr(value, name)}))


def is_path(value: object) -> bool:
    """Returns whether a value names a file: text, or what stands for text, without null characters."""
    if not isinstance(value, (str, os.PathLike)):
        return False
    text = os.fspath(value)
    return isinstance(text, str) and "\0" not in text


def flag(**field: Any) -> bool:
    """Returns the field; raises ValueError unless it is True or False."""
    name, value = _unpack(field)
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False (got {shown(value)})")
    return value


def made(**field: Any) -> None:
    """Raises ValueError if the field is a class, where an instance of it is meant."""
    name, value = _unpack(field)
    if isinstance(value, type):
        raise ValueError(
            f"{name} must be made first, as {value.__name__}() (got {shown(value)})"
        )


def required(by: str = "", **fields: Any) -> NoReturn:
    """Raises ValueError that names all fields which are None; `by` continues the sentence."""
    missing = [name for name, value in fields.items() if value is None]
    raise ValueError(f"{', '.join(missing)} must be given{by} (got None)")


def _number(name: str, value: Any) -> float:
    if isinstance(value, (bool, str, bytes)) or value is None:
        raise ValueError(f"{name} must be a number (got {shown(value)})")
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ValueError(f"{name} must be a number (got {shown(value)})") from error


def _real(field: dict[str, Any], admits: Callable[[float], bool], words: str) -> float:
    """Returns the field as a float; raises ValueError unless it is a number that is admitted, which is `words`."""
    name, value = _unpack(field)
    number = _number(name, value)
    if not admits(number):
        raise ValueError(f"{name} must be {words} (got {number})")
    return number


def finite(**field: Any) -> float:
    """Returns the field as a float; raises ValueError unless it is a finite number."""
    return _real(field, math.isfinite, "finite")


def positive(*, allow_inf: bool = False, **field: Any) -> float:
    """Returns the field as a float; raises ValueError unless it is > 0 (and finite unless `allow_inf`)."""
    number = _real(field, lambda x: x > 0, "> 0")
    return number if allow_inf or number < math.inf else finite(**field)


def nonnegative(*, allow_inf: bool = False, **field: Any) -> float:
    """Returns the field as a float; raises ValueError unless it is >= 0 (and finite unless `allow_inf`)."""
    number = _real(field, lambda x: x >= 0, ">= 0")
    return number if allow_inf or number < math.inf else finite(**field)


def between(low: float, high: float, **field: Any) -> float:
    """Returns the field as a float; raises ValueError unless low <= field <= high."""
    return _real(field, lambda x: low <= x <= high, f"in [{low:g}, {high:g}]")


def open_interval(low: float, high: float, **field: Any) -> float:
    """Returns the field as a float; raises ValueError unless low < field < high."""
    return _real(field, lambda x: low < x < high, f"in ({low:g}, {high:g})")


def order(**field: Any) -> float:
    """Returns a Renyi order as a float; raises ValueError unless it is finite and > 1."""
    return _real(field, lambda x: 1 < x < math.inf, "finite and > 1")


def count(**field: Any) -> int:
    """Returns the field as an int; raises ValueError unless it is an integer >= 0."""
    name, value = _unpack(field)
    try:
        number = operator.index(value)
    except TypeError as error:
        raise ValueError(f"{name} must be an integer (got {shown(value)})") from error
    if isinstance(value, bool) or number < 0:
        raise ValueError(f"{name} must be an integer >= 0 (got {shown(value)})")
    if number > LARGEST_COUNT:
        raise ValueError(f"{name} must be an integer <= 2^62 (got {shown(value)})")
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
        if isinstance(value, (str, Number, type(None))) and option == value:
            return option
    raise ValueError(
        f"{name} must be one of {', '.join(map(str, options))} (got {shown(value)})"
    )


def below_one(**field: Any) -> float:
    """Returns the field, a delta or a failure probability, as a float; raises ValueError unless it is in [0, 1)."""
    value = nonnegative(**field)
    if value >= 1:
        raise ValueError(f"{next(iter(field))} must be in [0, 1) (got {value})")
    return value + 0.0  # no negative zero, which prints as -0
