"""What others have loaded: classes of torch and Opacus by their names, without importing either."""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Any

_RUN_WITH = "torch 2.6 and 2.14 with opacus 1.6"  # what .ci/weekly has run; see setup.cfg


def need(owner: Any, name: str, called: str = "", *, for_: str = "", instead: str = "") -> Any:
    """Returns an attribute of a module, or of what is called so; raises `missing` without it."""
    if not hasattr(owner, name):
        raise missing(f"{called or owner.__name__}.{name}", for_, instead)
    return getattr(owner, name)


def missing(name: str, for_: str = "", instead: str = "") -> ImportError:
    """Returns the error for a dotted name that torch or Opacus does not have.

    Args:
        name: of it.
        for_: what does not work without it.
        instead: a sentence on what does.
    """
    return ImportError(
        f"torch_dpsco needs {name}{for_ and f' for {for_}'}, which torch {version('torch')} with"
        f" opacus {version('opacus')} does not have: {instead and f'{instead}; '}it was run with"
        f" {_RUN_WITH}; install one of these"
    )


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
