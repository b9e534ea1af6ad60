"""The public callables, found by themselves: what modules list, docs/api documents, and integrations define."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import types
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from torch_dpsco import integrations

API = Path(__file__).parents[2] / "docs" / "api"
DIRECTIVE = re.compile(
    r"^\.\. (currentmodule|automodule|autoclass|autofunction):: (\S+)\n((?: +:.*\n?)*)",
    re.MULTILINE,
)
_OBJECTIVES = {
    "objectives": ("LinearObjective",),
    "robust": ("Adversarial", "Tilted"),
    "solvers": ("Solution", "gradient_certificate", "solve"),
}

__all__ = ["bare", "public_callables"]


def bare(function: Any) -> Any:
    """Returns the function behind a method, a partial call or a decorated function."""
    while True:
        inner = getattr(function, "__func__", None) or getattr(function, "__wrapped__", None)
        if isinstance(function, partial):
            inner = function.func
        if inner is None:
            return function
        function = inner


def _is_ours(value: Any) -> bool:
    is_error = isinstance(value, type) and issubclass(value, (BaseException, Warning))
    return (
        callable(value)
        and not is_error
        and str(getattr(value, "__module__", "")).startswith("torch_dpsco")
    )


def _of_module(module: types.ModuleType) -> Iterator[tuple[str, Any]]:
    """Yields what a module offers: the names that it lists, or those that it defines."""
    listed = getattr(module, "__all__", None)
    for name in listed or [name for name in vars(module) if not name.startswith("_")]:
        value = getattr(module, name)
        if _is_ours(value) and (listed or value.__module__ == module.__name__):
            yield name, value


def _of_all(module: types.ModuleType) -> Iterator[tuple[str, Any]]:
    """Yields what a module offers, and what the modules do that it lists."""
    yield from _of_module(module)
    for name in getattr(module, "__all__", ()):
        if isinstance(inner := getattr(module, name), types.ModuleType):
            yield from ((f"{name}.{rest}", value) for rest, value in _of_all(inner))


def _of_class(cls: type, wanted: list[str]) -> Iterator[tuple[str, Any]]:
    """Yields the public methods of a class, or those of these names."""
    for name in wanted or dir(cls):
        value = getattr(cls, name)
        if not name.startswith("_") and not isinstance(value, type) and _is_ours(value):
            yield name, value


def _documented() -> Iterator[tuple[str, Any, list[str] | None]]:
    """Yields name, value and the members asked for: None for no members, [] for all of them."""
    for page in sorted(API.glob("*.md")):
        module = "torch_dpsco"
        for kind, target, options in DIRECTIVE.findall(page.read_text(encoding="utf-8")):
            members = re.search(r":members:(.*)", options)
            wanted = None if members is None else re.findall(r"\w+", members[1])
            if kind == "currentmodule":
                module = target
            elif kind == "automodule":
                yield from (
                    (f"{target}.{name}", value, [])
                    for name, value in _of_module(importlib.import_module(target))
                )
            else:
                place, _, name = (target if "." in target else f"{module}.{target}").rpartition(
                    "."
                )
                yield f"{place}.{name}", getattr(importlib.import_module(place), name), wanted
    module = importlib.import_module("torch_dpsco")
    yield from ((f"torch_dpsco.{name}", value, None) for name, value in _of_all(module))
    for place, names in _OBJECTIVES.items():
        module = importlib.import_module(f"torch_dpsco.estimators.{place}")
        yield from ((f"{module.__name__}.{name}", getattr(module, name), None) for name in names)
    for found in pkgutil.iter_modules(integrations.__path__, f"{integrations.__name__}."):
        if not found.name.rpartition(".")[2].startswith("_"):
            module = importlib.import_module(found.name)
            yield from (
                (f"{found.name}.{name}", value, []) for name, value in _of_module(module)
            )


def _takes_arguments(function: Callable[..., Any]) -> bool:
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return False
    return any(name not in ("self", "cls") for name in names)


def public_callables() -> dict[str, Any]:
    """Returns every public callable that takes arguments, by name; methods that are inherited once."""
    found: dict[str, Any] = {}
    seen: set[int] = set()
    for name, value, wanted in _documented():
        parts = [(name, value)]
        if isinstance(value, type) and wanted is not None:
            parts += [
                (f"{name}.{method}", function) for method, function in _of_class(value, wanted)
            ]
        for place, function in parts:
            if id(bare(function)) not in seen and _takes_arguments(function):
                seen.add(id(bare(function)))
                found[place.removeprefix("torch_dpsco.")] = function
    return found
