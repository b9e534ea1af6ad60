"""The one lock of all ledgers: deciding and charging is one operation, also where several threads share an accountant.

One for all and not one each: a ledger cannot be read while it is half changed, whoever holds it, and a fork waits until
no charge is on its way, so that the child finds the lock free and every ledger whole.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")

LOCK = threading.RLock()

if hasattr(os, "register_at_fork"):  # elsewhere processes are not forked
    # PRIVACY: (test_a_fork_during_a_charge_leaves_a_whole_ledger_and_a_free_lock)
    os.register_at_fork(before=LOCK.acquire, after_in_parent=LOCK.release, after_in_child=LOCK.release)


def locked(method: Callable[_P, _T]) -> Callable[_P, _T]:
    """Returns the function, run by one thread at a time among all that are locked; calls within it may nest."""

    @wraps(method)
    def alone(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        with LOCK:
            return method(*args, **kwargs)

    return alone
