"""What every private optimizer has: fixed parts, fixed parameters, and public facts of the run.

One thread at a time in an optimizer, and its `step` without torch's wrapper where nobody watches it.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from types import TracebackType
from typing import Any, ClassVar, Protocol, TypeVar, cast

from torch import Tensor
from torch.optim.optimizer import Optimizer

from torch_dpsco import _validate as check
from torch_dpsco._doors import type_members
from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.accounting.events import Event
from torch_dpsco.accounting.report.figures import Run
from torch_dpsco.accounting.report.statement import Statement, make_statement
from torch_dpsco.distributed import world_size
from torch_dpsco.errors import PrivacyError, SequenceError
from torch_dpsco.step.checks import is_watched, listed

_LARGEST = 1e100  # of what a plan is computed from
_TYPED = ("__init__", "accumulate", "ahead", "load_state_dict", "loader", "plan")

_Self = TypeVar("_Self", bound="CommonOptimizer")


def check_call(closure: Any, users: Any = None) -> None:
    """Checks the types of the arguments of a step, which torch.compile may trace."""
    if closure is not None and not callable(closure):
        raise ValueError(f"closure must be a function or None (got {check.shown(closure)})")
    if users is not None and not isinstance(users, Tensor):
        raise ValueError(f"users must be a Tensor or None (got {check.shown(users)})")


class CommonOptimizer(Optimizer):
    """Base of all private optimizers: subclasses set the accountant last, which closes the construction."""

    _fixed: ClassVar[frozenset[str]] = frozenset()
    undisturbed: ClassVar[str] = ""  # why a run takes no steps on public data; "" if it does
    accountant: Accountant
    _steps: int
    _name = ""
    _finalized: bool
    _seeded: bool

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        type_members(
            cls,
            *_TYPED,
            "report",
            "signal_skip_step",
            "solve",
            "certify",
            "step_on",
            largest=_LARGEST,
        )

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        self.turn = Turn()
        super().__init__(listed(params), defaults)

    def __setattr__(self, name: str, value: Any) -> None:
        # PRIVACY: what the accounting was told must stay true (test_what_the_ledger_relies_on_cannot_be_reassigned)
        if name in self._fixed and name in self.__dict__:
            raise PrivacyError(
                f"{name} is fixed at construction: make a new optimizer, with the same accountant"
            )
        super().__setattr__(name, value)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuses new parameters after construction: plan, averages and checkpoints are about the first ones."""
        if self.__dict__.keys() & {"accountant", "_run"}:
            raise SequenceError(
                "params are fixed at construction: make a new optimizer, with the same accountant"
            )
        super().add_param_group(param_group)

    @abstractmethod
    def finalize(self) -> None:
        """Installs the private answer into the parameters, unless that was done; later steps raise."""

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.finalize()

    @property
    def in_step(self) -> bool:
        """Whether this thread is in a step of the optimizer."""
        return self.turn.taken_here

    @property
    def steps(self) -> int:
        """Steps made."""
        return self._steps

    @property
    def run(self) -> str:
        """Random name of the run, by which the ledger knows its releases; a resumed run keeps it."""
        return self._name

    @property
    def finalized(self) -> bool:
        """Whether the answer was installed."""
        return self._finalized

    @property
    def seeded(self) -> bool:
        """Whether the noise comes from a generator of the caller's, so that it could be repeated and subtracted."""
        return self._seeded

    def _statement(self, run: Run, delta: float | None, ahead: Event | None) -> Statement:
        # PRIVACY: said loudly (test_the_report_says_where_the_noise_comes_from)
        return make_statement(
            self.accountant.report(delta, ahead=ahead), replace(run, repeatable=self._seeded)
        )


class Uncopied:
    """Mixin of optimizers whose one answer is made of secret iterates."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # PRIVACY: two answers of one secret run would be two releases
        # (test_a_run_cannot_be_copied, test_a_solved_run_cannot_be_copied)
        raise SequenceError(
            "a run of secret iterates must not be copied: it has one release; make a new optimizer"
        )

    def __copy__(self) -> Any:
        return self.__deepcopy__({})

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__deepcopy__({})


def require_one_process() -> None:
    """Raises SequenceError in a distributed run; if a release is not a sum over the rows of the processes."""
    if world_size() > 1:
        raise SequenceError(
            f"world_size must be 1 for this optimizer (got {world_size()}): HolderSGD and"
            " ClippedSGD run in several processes, on Poisson or full batches"
        )


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
