"""Argument checks with one message format: name, what it must be, value.

Each function for ranges takes exactly one keyword argument, whose name is that of the field, and returns the checked
value as a plain Python number, so that numpy scalars and zero-dimensional tensors never reach a ledger or a state dict.
Whatever is wrong with an argument, its type included, is a ValueError.

    >>> positive(clip=2)
    2.0
    >>> positive(clip=-1.0)
    Traceback (most recent call last):
    ...
    ValueError: clip must be > 0 (got -1.0)

Types are checked on entry: arguments of public callables are compared with their annotations before anything runs.
`typed` is for functions and for classes that are no dataclasses, `type_members` for the subclasses of a base,
`check_fields` for dataclasses. Ranges are checked where the values are used; so are arguments annotated `Any`. Whatever
Python says about missing and unknown arguments, it says itself; but keywords of other libraries are answered with ours.

An unknown keyword that is one of another library's (words.toml) is answered with our word and how its value is to be
converted; all others are left to Python.
"""

from __future__ import annotations

import functools
import inspect
import math
import operator
import os
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from collections.abc import Set as AbstractSet
from numbers import Number
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, NamedTuple, NoReturn, TypeVar, cast

import numpy as np

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
    """Sets those fields that a frozen value has, while it is built, to what their checks return.

    A check is called with its field as the only, named, argument, as those of this module are.
    """
    known = vars(value)
    for name in filter(known.__contains__, checks):
        object.__setattr__(value, name, checks[name](**{name: known[name]}))


def ranges(value: object, checks: Mapping[str, Callable[..., Any]]) -> None:
    """Sets fields of a frozen value as `fields` does, but for those that are None."""
    given = {name: check for name, check in checks.items() if getattr(value, name) is not None}
    fields(value, **given)


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


_Target = TypeVar("_Target", bound=Callable[..., Any])


class _Kind(NamedTuple):
    """What an annotation accepts: a predicate, and its name in messages."""

    admits: Callable[[Any], bool]
    words: str


def typed(target: _Target, largest: float = math.inf) -> _Target:
    """Returns a function that first checks the types of its arguments; a class is given such an `__init__`.

    Args:
        target: with annotations.
        largest: size of the largest finite number that is admitted.

    Raises (when called):
        ValueError: an argument is not of the type of its annotation; names it, its value and what it must be.

    Example:
        >>> @typed
        ... def power(base: float, *, exponent: int | None = None) -> float: ...
        >>> power(2.0, exponent="3")
        Traceback (most recent call last):
        ...
        ValueError: exponent must be an integer (got '3')
    """
    if isinstance(target, type):
        type_members(target, "__init__")
        return target
    parameters = inspect.signature(target).parameters
    names = list(parameters)
    closed = not any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()
    )

    @functools.wraps(target)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if closed and not parameters.keys() >= kwargs.keys():
            require_ours(target.__qualname__.removesuffix(".__init__"), kwargs, names)
        kinds = _kinds(target)
        for name, value in (*zip(names, args, strict=False), *kwargs.items()):
            _check(kinds.get(name), name, value, largest)
        return target(*args, **kwargs)

    return cast(_Target, checked)


def type_members(owner: type, *names: str, largest: float = math.inf) -> None:
    """Makes `typed` those of the named methods that a class defines itself; for `__init_subclass__` of a base."""
    for name in names:
        member = vars(owner).get(name)
        if isinstance(member, classmethod):
            setattr(owner, name, classmethod(typed(member.__func__, largest)))
        elif member is not None:
            setattr(owner, name, typed(member, largest))


def check_fields(value: Any, largest: float = math.inf) -> None:
    """Checks the types of all fields of a dataclass; raises as `typed` does."""
    for name, kind in _kinds(cast(Any, type(value))).items():
        if name in value.__dataclass_fields__ and hasattr(value, name):
            _check(kind, name, getattr(value, name), largest)


def _check(kind: _Kind | None, name: str, value: Any, largest: float = math.inf) -> None:
    if kind is not None and not kind.admits(value):
        way_out = (
            _OF_LOADER if kind.words is _DATASET and hasattr(value, "batch_sampler") else ""
        )
        whole = (
            ", without null characters"
            if isinstance(value, (str, os.PathLike)) and not is_path(value)
            else ""
        )
        raise ValueError(f"{name} must be {kind.words}{whole} (got {shown(value)}){way_out}")
    if isinstance(value, (int, float)) and largest < abs(value) < math.inf:
        raise ValueError(
            f"{name} must be of size {largest:g} at most, for products to fit (got {shown(value)})"
        )


@functools.cache
def _kinds(target: Any) -> dict[str, _Kind]:
    found = {
        name: _kind(hint)
        for name, hint in typing.get_type_hints(target).items()
        if name != "return"
    }
    return {name: kind for name, kind in found.items() if kind is not None}


def _kind(hint: Any) -> _Kind | None:
    """Returns what an annotation admits; None if that is anything."""
    origin = typing.get_origin(hint) or hint
    arguments = typing.get_args(hint)
    if hint is Any:
        return None
    if isinstance(hint, TypeVar):
        return None if hint.__bound__ is None else _kind(hint.__bound__)
    if origin in (typing.Union, UnionType):
        return _union([_kind(part) for part in arguments])
    if origin is typing.Literal:
        return _Kind(
            lambda value: isinstance(value, str) and value in arguments,
            f"one of {', '.join(arguments)}",
        )
    if origin in _PLAIN:
        return _PLAIN[origin]
    if origin in (tuple, list, Sequence, Iterable):
        return _items(origin, arguments)
    if origin in (Mapping, MutableMapping, dict):
        return _Kind(lambda value: isinstance(value, origin), "a mapping")
    if origin is type:
        return _Kind(
            lambda value: isinstance(value, type), "a class of torch_dpsco.estimators, as Ridge"
        )
    if (
        not isinstance(origin, type)
        or origin is object
        or getattr(origin, "_is_protocol", False)
    ):
        return None
    if origin.__name__ == "Dataset":  # any map will do
        return _Kind(
            lambda value: hasattr(value, "__getitem__") and not isinstance(value, _NO_DATASETS),
            _DATASET,
        )
    return _Kind(
        lambda value: isinstance(value, origin),
        f"{article(origin.__name__)}{_HOW.get(origin.__name__, '')}",
    )


def _union(kinds: list[_Kind | None]) -> _Kind | None:
    known = [kind for kind in kinds if kind is not None]
    if len(known) < len(kinds):
        return None
    words = list(dict.fromkeys(kind.words for kind in known if kind is not _NONE))
    text = (
        " or ".join(words) if len(words) <= _MANY else f"{', '.join(words[:-1])} or {words[-1]}"
    )
    if "a Repeat" in words:
        text = "a value of torch_dpsco.accounting.events"
    return _Kind(lambda value: any(kind.admits(value) for kind in known), text)


def _items(origin: Any, arguments: tuple[Any, ...]) -> _Kind:
    """Returns the kind of lists; items are looked at where that uses up nothing."""
    fixed = origin is tuple and arguments[-1:] != (...,)
    inner = [_kind(part) for part in arguments if part is not ...]

    def admits(value: Any) -> bool:
        if isinstance(value, (str, bytes, Mapping, type)) or not _iterable(value):
            return False
        if origin is not Iterable and (
            isinstance(value, AbstractSet) or not hasattr(value, "__getitem__")
        ):
            return False
        if not hasattr(value, "__len__") or not inner:
            return True
        if fixed and len(value) != len(inner):
            return False
        items = value.tolist() if hasattr(value, "tolist") and inner[0] in _NUMBERS else value
        each = inner if fixed else inner[:1] * len(value)
        return all(
            kind is None or kind.admits(item) for kind, item in zip(each, items, strict=True)
        )

    words = ["anything" if kind is None else kind.words for kind in inner]
    if fixed:
        return _Kind(admits, f"a tuple of ({', '.join(words)})")
    plain = not words or inner[0] is None
    return _Kind(admits, "a list" if plain else f"a list, each item {words[0]}")


def _iterable(value: Any) -> bool:
    try:
        iter(value)
    except TypeError:
        return False
    return hasattr(value, "__iter__")


def _is_number(value: Any) -> bool:
    if isinstance(value, (bool, np.bool_, str, bytes)):
        return False
    try:
        float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return False
    return True


def _is_integer(value: Any) -> bool:
    try:
        operator.index(value)
    except TypeError:
        return False
    return not isinstance(value, bool)


_MANY = 3
_DATASET = "a map-style data set, as torch.utils.data.TensorDataset(X, y)"
_OF_LOADER = (
    ": give the loader's data set; batches are drawn anew, so that a sampler would be lost:"
    " Subset(dataset, indices) is a part of the data, and weights of classes belong into the loss"
)
_NO_DATASETS = (str, bytes, type, Mapping, np.generic)
_NONE = _Kind(lambda value: value is None, "None")
_NUMBERS = (_Kind(_is_number, "a number"), _Kind(_is_integer, "an integer"))
_PLAIN: dict[Any, _Kind] = {
    NoneType: _NONE,
    float: _NUMBERS[0],
    int: _NUMBERS[1],
    bool: _Kind(lambda value: isinstance(value, (bool, np.bool_)), "True or False"),
    str: _Kind(lambda value: isinstance(value, str) and is_path(value), "text"),
    os.PathLike: _Kind(
        lambda value: isinstance(value, os.PathLike) and is_path(value), "a path"
    ),
    Callable: _Kind(callable, "a function"),
}
_HOW = {  # how to make what an argument must be
    "Accountant": ", as Accountant(Budget(1.0, 1e-5))",
    "Budget": ", as Budget(1.0, 1e-5)",
    "Design": " of torch_dpsco, as Poisson(batch_size, n)",
    "Generator": " of torch, as torch.Generator()",
    "Logger": ", as loggers.tensorboard(writer)",
    "MeanOracle": " of torch_dpsco.oracles",
    "Module": " of torch.nn, the model itself",
    "PrivateOptimizer": ", as HolderSGD(model.parameters(), plan)",
    "Problem": ", as losses.Logistic().problem(bound_x=...)",
    "Prox": " of torch_dpsco.prox, as prox.Ball(1.0)",
    "Schedule": ", as Schedule((Phase(steps=10),))",
    "TableLoss": " of torch_dpsco.losses, as losses.Logistic()",
    "UpdateRule": " of torch_dpsco.rules, as rules.SGD()",
}

_Class = TypeVar("_Class", bound=type)
_PLAN = "(plan)"  # in words.toml


def require_ours(name: str, given: Iterable[str], taken: Collection[str]) -> None:
    """Raises TypeError for keywords of others, all of them together, with our words.

    Args:
        name: of what is called.
        given: keywords.
        taken: those that it takes.

    Example:
        >>> require_ours("LogisticRegression", ["C"], ["n", "reg"])
        Traceback (most recent call last):
        ...
        TypeError: LogisticRegression has no C: take reg (reg = 1 / C, of the sum of the losses)
    """
    answers = [
        answer for word in given if word not in taken and (answer := _answer(word, taken))
    ]
    if answers:
        raise TypeError(f"{name} has no {'; no '.join(answers)}")


def _answer(word: str, taken: Collection[str]) -> str:
    for ours, how in _words().get(word, ()):
        if ours in taken:
            return f"{word}: take {ours}{f' ({how})' if how else ''}"
        if not ours:
            return f"{word}: leave it out ({how})"
        if ours == _PLAN and "optimizer" in taken:
            return f"{word}: the plan has it: dp.NetSGD.plan(...), or another optimizer's"
    return ""


@functools.cache
def _words() -> dict[str, list[list[str]]]:
    """Returns keywords of others, with lists of (ours, what is to be known): see words.toml."""
    import tomllib  # for errors only

    text = Path(__file__).with_name("words.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def in_our_words(cls: _Class) -> _Class:
    """Makes the `__init__` of a dataclass answer keywords of others."""
    own = cast(Any, cls).__init__

    @functools.wraps(own)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        require_ours(cls.__name__, kwargs, cls.__dataclass_fields__)  # type: ignore[attr-defined]
        own(self, *args, **kwargs)

    cast(Any, cls).__init__ = init
    return cls
