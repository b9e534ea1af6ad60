"""Calls of users' code on made-up records: whatever it raises is an answer, not a failure of ours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

_T = TypeVar("_T")


@dataclass(frozen=True)
class Refused:
    """What could not be done, and what was raised."""

    what: str
    error: Exception

    def __str__(self) -> str:
        lines = str(self.error).strip().splitlines() or [""]
        return f"{self.what} raised {type(self.error).__name__}: {lines[0][:300]}"


def attempt(what: str, call: Callable[[], _T]) -> _T | Refused:
    """Returns what the call returns, or how it failed.

    The one place of the package that catches every Exception: models, losses, data sets and collate functions of users
    raise what they like on a made-up batch, and a diagnosis must say so instead of failing with them.
    """
    try:
        return call()
    except Exception as error:
        return Refused(what, error)
