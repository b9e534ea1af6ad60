"""Exceptions and warnings of torch_dpsco.

Two families, so that a caller can tell "this would break the guarantee" from "this cannot be calibrated":

* `PrivacyError`: the call would void the privacy guarantee. Nothing has been released; never a warning.
* `CalibrationError`: no mechanism with the numbers asked for exists, or a promise needed to build it is missing.

Arguments that are out of range or of a wrong type are plain `ValueError`s (see `_validate`); Python's own
`TypeError` says that an argument is missing or unknown, and scikit-learn's that data are sparse or no numbers. Nothing
is charged and no parameter is moved by a call that raises one of these. Messages name the field, the value and the way
out. No message depends on private data unless its docstring says that it is outside the guarantee.
"""

from __future__ import annotations

import os
import sys
from warnings import warn as _warn

from torch_dpsco.acts import public_names

__dir__ = public_names(__name__)

_HERE = os.path.dirname(__file__) + os.sep


class DpscoError(Exception):
    """Base class of every exception that torch_dpsco raises on purpose."""


class PrivacyError(DpscoError, RuntimeError):
    """The call would void the privacy guarantee; it was refused and nothing was released."""


class BudgetExceeded(PrivacyError):
    """The event would exceed the budget; the ledger is unchanged."""


class AdjacencyError(PrivacyError):
    """A mechanism has no guarantee under the requested adjacency."""


class UnitError(PrivacyError):
    """Privacy units (example, user) or declared universe sizes do not agree."""


class UnknownSamplerError(PrivacyError):
    """The sampling of a loader is not known, so that no amplification can be claimed for it."""


class SequenceError(PrivacyError):
    """Calls in an order that the guarantee does not cover: stale, missing, doubled or finalized."""


class NotCertifiedError(PrivacyError):
    """A promise that had to be certified was not, or was refuted."""


class CalibrationError(DpscoError, ValueError):
    """No mechanism with the requested numbers can be built."""


class ConditionError(CalibrationError):
    """A side condition of a theorem fails, so that its bound must not be used."""


class InfeasibleError(CalibrationError):
    """The target cannot be reached; the message names the smallest feasible value."""


class MissingConstantError(CalibrationError):
    """A problem constant that an algorithm needs was not promised."""


class UtilityWarning(UserWarning):
    """Privacy holds, but a utility theorem does not apply, or a setting is likely to waste accuracy.

    An optimizer says such a thing once. A few of this class concern privacy itself: noise or batches that can be
    repeated, a delta of 1/n and more, a ledger file of unknown age, noise that is not proved, batches that
    Opacus charges as Poisson ones. They are given each time.
    """


def warn(message: str, stacklevel: int = 2) -> None:
    """Gives a UtilityWarning; `stacklevel` counts from the function that calls this one, as in `warnings.warn`."""
    _warn(message, UtilityWarning, stacklevel + 1)


def outside() -> int:
    """Returns the `stacklevel` of who called into the package, for a warning of the function that calls this one."""
    level = 1
    frame = sys._getframe(1)
    # "<string>": the __init__ of a dataclass
    while frame.f_back and frame.f_code.co_filename.startswith((_HERE, "<string>")):
        frame = frame.f_back
        level += 1
    return level
