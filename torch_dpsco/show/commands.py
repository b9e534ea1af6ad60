"""What commands share: how they are added to the command line, words and values, and the files that they name."""

from __future__ import annotations

import argparse
import ast
import inspect
import os
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

Result = tuple[str, int]  # what is printed, and the exit code
_PLACES = {
    "frame": "TABLE",
    "ledger_path": "--ledger",
}  # what a word without an option is called in the help


def command(
    commands: Any, run: Callable[[argparse.Namespace], Result], example: str
) -> argparse.ArgumentParser:
    """Returns the parser of a command, which is named and described by its function."""
    text = inspect.getdoc(run)
    example = f"example: dpsco {example}"
    added: argparse.ArgumentParser = commands.add_parser(
        run.__name__[1:], help=text, description=text, epilog=example, allow_abbrev=False
    )
    added.set_defaults(run=run)
    return added


def say(stream: Any, text: str) -> None:
    """Writes a line."""
    stream.write(f"{text}\n")


def option(name: str) -> str:
    """Returns the option of a field."""
    return f"--{name.replace('_', '-')}"


def by_option(message: str, known: Collection[str] | None = None) -> str:
    """Returns a message that names the option, or the place, instead of the field.

    Args:
        message: of an error.
        known: fields that have an option; None for any.
    """

    def named(name: re.Match[str]) -> str:
        is_known = known is None or name[0] in known
        return _PLACES.get(name[0], option(name[0]) if is_known else name[0])

    text = re.sub(r"^[a-z]\w*(?= must | and \w+ must )", named, message)
    return text.replace("the frame", _PLACES["frame"])


def value(text: str) -> Any:
    """Returns the number or list that a word stands for, or the word; what it must be, the function it is for says."""
    for read in (int, float, ast.literal_eval):
        try:
            return read(text)
        except (ValueError, SyntaxError):
            continue
    return text


def there(name: str, path: str) -> str:
    """Returns a path; raises ValueError unless a file is there."""
    if not Path(path).is_file():
        raise ValueError(f"{name} must be a file that is there (got {path!r})")
    return path


def loaded(name: str, load: Callable[[str], Any], path: str) -> Any:
    """Returns what a file holds; what is wrong inside of it is no option."""
    there(name, path)
    try:
        return load(path)
    except (TypeError, ValueError) as error:
        text = str(error)
        if text.startswith("path must be"):
            raise ValueError(text.replace("path", name, 1)) from error
        raise ValueError(f"{path!r}: {error}") from error


def require_new(**paths: str | None) -> None:
    """Raises ValueError, before anything else is done, for a file that is there: it may be a ledger."""
    for name, path in paths.items():
        if path is not None and os.path.lexists(path):
            raise ValueError(f"{name} must be a new file (got {path!r}, which is there)")


def write(path: str, content: bytes) -> None:
    """Writes a new file."""
    # PRIVACY: a ledger that is overwritten forgets what was spent (test_a_file_that_came_meanwhile_is_left_as_it_is)
    with open(path, "xb") as file:
        file.write(content)
