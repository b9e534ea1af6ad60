"""What every private optimizer has: parts that stay, parameters that stay, and public facts of the run."""

from __future__ import annotations

from abc import abstractmethod
from types import TracebackType
from typing import Any, ClassVar, TypeVar

from torch.optim.optimizer import Optimizer

from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.accounting.report import PrivacyReport
from torch_dpsco.agreement import world_size
from torch_dpsco.errors import PrivacyError, SequenceError

__all__ = ["CommonOptimizer", "require_one_process"]

_Self = TypeVar("_Self", bound="CommonOptimizer")


class CommonOptimizer(Optimizer):
    """Base of all private optimizers: subclasses set the accountant last, which closes the construction."""

    _fixed: ClassVar[frozenset[str]] = frozenset()
    accountant: Accountant
    _steps: int
    _finalized: bool
    _seeded: bool

    def __setattr__(self, name: str, value: Any) -> None:
        # PRIVACY: what the accounting was told must stay true (test_what_the_ledger_relies_on_cannot_be_reassigned)
        if name in self._fixed and name in self.__dict__:
            raise PrivacyError(f"{name} is fixed at construction: make a new optimizer, with the same accountant")
        super().__setattr__(name, value)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuses new parameters after construction: plan, averages and checkpoints are about the first ones."""
        if "accountant" in self.__dict__:
            raise SequenceError("params are fixed at construction: make a new optimizer, with the same accountant")
        super().add_param_group(param_group)

    @abstractmethod
    def finalize(self) -> None:
        """Installs the private answer into the parameters; later steps raise."""

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and not self._finalized:
            self.finalize()

    @property
    def steps(self) -> int:
        """Steps made."""
        return self._steps

    @property
    def finalized(self) -> bool:
        """Whether the answer was installed."""
        return self._finalized

    @property
    def seeded(self) -> bool:
        """Whether the noise comes from a generator of the caller's, so that it could be repeated and subtracted."""
        return self._seeded

    def privacy_spent(self, delta: float | None = None) -> PrivacyReport:
        """Returns the numbers of the accountant's ledger; delta defaults to the budget's."""
        return self.accountant.report(delta)


def require_one_process() -> None:
    """Raises SequenceError in a distributed run; for optimizers whose release is no sum over the rows of processes."""
    if world_size() > 1:
        raise SequenceError(
            f"world_size must be 1 for this optimizer (got {world_size()}): HolderSGD and ClippedSGD run in several "
            f"processes, on Poisson or full batches"
        )
