"""What every private optimizer has: fixed parts, fixed parameters, and public facts of the run."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from types import TracebackType
from typing import Any, ClassVar, TypeVar

from torch import Tensor
from torch.optim.optimizer import Optimizer

from torch_dpsco import _validate as check
from torch_dpsco._doors import type_members
from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.accounting.events import Event
from torch_dpsco.accounting.report import Run
from torch_dpsco.accounting.statement import Statement, make_statement
from torch_dpsco.distributed import world_size
from torch_dpsco.errors import PrivacyError, SequenceError
from torch_dpsco.step.checks import listed
from torch_dpsco.step.turn import Turn

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
