"""What is added from outside to the things inside, by name: a table of fits, a preview, a look at a table, a picture.

    acts.register("model.preview", "my_package.previews:preview")   # in place of the library's, or of nothing

Who adds something registers it; the door inside, as `LinearModel.preview`, asks for it by its name and passes its own
arguments on, itself first. A place in words is imported when it is first asked for.

And what `dir` says of a module.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

_KNOWN: dict[str, str | Callable[..., Any]] = {}


def register(name: str, act: str | Callable[..., Any]) -> None:
    """Adds something by name; what was registered before under that name is replaced.

    Args:
        name: that a door inside asks for.
        act: a function, or its place, "package.module:name".

    Example:
        >>> register("greet", lambda model: f"hello {model}")
        >>> act("greet")("you")
        'hello you'
    """
    _KNOWN[name] = act


def act(name: str) -> Callable[..., Any]:
    """Returns what was registered by this name; raises LookupError if nothing was."""
    if name not in _KNOWN:
        raise LookupError(f"nothing is registered as {name!r}: see torch_dpsco.acts.register")
    found = _KNOWN[name]
    if isinstance(found, str):
        place, _, inner = found.partition(":")
        found = _KNOWN[name] = getattr(import_module(place), inner)
    return found


def public_names(module: str) -> Callable[[], list[str]]:
    """Returns the `__dir__` of a module: what it lists, or else what it defines, and nothing that it only uses."""

    def names() -> list[str]:
        space = vars(sys.modules[module])
        own = (
            name
            for name, value in space.items()
            if getattr(value, "__module__", None) == module and not name.startswith("_")
        )
        dunder = (name for name in space if name.startswith("__"))
        return sorted({*space.get("__all__", own), *dunder})

    return names
