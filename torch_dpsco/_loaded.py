"""What others have loaded: classes of torch and Opacus by their names, without importing either."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

_RUN_WITH = "torch 2.6 and 2.14 with opacus 1.6"  # what .ci/weekly has run; see setup.cfg


def need(owner: Any, name: str, called: str = "") -> Any:
    """Returns an attribute of a module, or of what is called so; raises ImportError in a sentence if it is missing."""
    missing = object()
    found = getattr(owner, name, missing)
    if found is missing:
        raise ImportError(
            f"torch_dpsco needs {called or owner.__name__}.{name}, which torch {version('torch')}"
            f" with opacus {version('opacus')} does not have: it was run with {_RUN_WITH}; install"
            " one of these"
        )
    return found


def of_opacus(*names: str) -> tuple[Any, ...]:
    """Returns classes of Opacus by their dotted names, where their module was imported: else no object is of them.

    Example:
        >>> of_opacus("nowhere.Nothing")
        ()
    """
    places = [f"opacus.{name}".rpartition(".") for name in names]
    return tuple(
        need(sys.modules[module], name) for module, _, name in places if module in sys.modules
    )


def of_torch(name: str) -> Any:
    """Returns a class of torch by its dotted name; None where its module was not imported, so that no object is of it.

    Example:
        >>> of_torch("nowhere.Nothing") is None
        True
    """
    module, _, name = f"torch.{name}".rpartition(".")
    return getattr(sys.modules[module], name) if module in sys.modules else None


def when_imported(name: str, then: Callable[[], object]) -> None:
    """Calls a function as soon as a module is imported; at once if it is."""
    if name in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, _Watch(name, then))


class _Watch(importlib.abc.MetaPathFinder):
    """Runs a function once a module was imported, by whomever."""

    def __init__(self, name: str, then: Callable[[], object]) -> None:
        self._name = name
        self._then = then
        self._asks = False

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != self._name or self._asks:
            return None
        self._asks = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._asks = False
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                run(module)  # where it fails, the next import is watched too
                sys.meta_path.remove(self)
                self._then()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
