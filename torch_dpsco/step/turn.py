"""One thread at a time in an optimizer, and its `step` without torch's wrapper where nobody watches it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from types import TracebackType
from typing import Any, Protocol, TypeVar, cast

from torch.optim.optimizer import Optimizer

from torch_dpsco.errors import SequenceError
from torch_dpsco.step.checks import is_watched

_Method = TypeVar("_Method", bound=Callable[..., Any])


class Turn:
    """Lets one thread in at a time; a second one raises, and a copy has its own turn."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._depth = 0

    @property
    def taken_here(self) -> bool:
        """Whether this thread is in."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            return self._depth > 0
        finally:
            self._lock.release()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            # PRIVACY: two steps would share rows, sums and noise (test_a_step_during_a_step_is_refused)
            raise SequenceError(
                "a step of this optimizer is running in another thread: nothing was done in this"
                " one; an optimizer is for one thread at a time, and several optimizers may share"
                " an accountant"
            )
        self._depth += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._depth -= 1
        self._lock.release()

    def __reduce__(self) -> tuple[type[Turn], tuple[()]]:
        return Turn, ()


class HasTurn(Protocol):
    """An optimizer with its turn."""

    turn: Turn


def in_turn(method: _Method) -> _Method:
    """Returns the method, which raises SequenceError while another thread is in one of the optimizer's."""

    @wraps(method)
    def alone(self: HasTurn, *args: Any, **kwargs: Any) -> Any:
        with self.turn:
            return method(self, *args, **kwargs)

    return cast("_Method", alone)


def seldom_watched(step: _Method) -> _Method:
    """Returns a `step` that goes through what torch puts around it, a sixth of a small step, only where it is seen."""
    watched: Any = Optimizer.profile_hook_step(step)

    @wraps(step)
    def either(self: Any, *args: Any, **kwargs: Any) -> Any:
        return (watched if is_watched(self) else step)(self, *args, **kwargs)

    either.hooked = True  # type: ignore[attr-defined]  # so that torch leaves it as it is
    return cast("_Method", either)
