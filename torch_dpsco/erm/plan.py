"""What the plans of all mechanisms for linear models have in common: a task, a regularizer, one release."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from torch_dpsco import _validate as check
from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.accounting.adjacency import ADD_REMOVE, Adjacency
from torch_dpsco.accounting.designs import BaseEvent
from torch_dpsco.accounting.filters import Budget
from torch_dpsco.erm.task import LinearTask, Preparation
from torch_dpsco.objectives.records import Records
from torch_dpsco.plan import Plan
from torch_dpsco.rng import Source


@dataclass(frozen=True, kw_only=True)
class LinearPlan(Plan):
    """Public numbers of one release; what it charges is computed from those that it is made with.

    Args:
        task: what was planned for: budget, adjacency and the regularizer that was chosen included.
    """

    task: LinearTask
    budget: Budget | None = field(init=False, repr=False)
    adjacency: Adjacency = field(init=False, repr=False)

    values = (LinearTask, Preparation)
    mechanism: ClassVar[str]

    def __post_init__(self) -> None:
        object.__setattr__(self, "budget", self.task.budget)
        object.__setattr__(self, "adjacency", self.task.adjacency)
        super().__post_init__()

    @property
    def reg(self) -> float:
        """Regularizer of the objective, in sum form."""
        return check.positive(reg=self.task.reg)

    @abstractmethod
    def event(self) -> BaseEvent:
        """Returns what the release charges: of the noise that it draws, and how far a record moves what is released."""

    @property
    @abstractmethod
    def noise_and_signal(self) -> tuple[float, float, str]:
        """Std per coordinate of the noise, bound on the norm of what it is added to, and what that is, in words."""

    def solve(self, records: Records, start: Tensor | None = None) -> Any:
        """Returns what `release` needs: NOT private.

        Args:
            records: of `erm.records.make_records`.
            start: point (parameters,) that a loop left; None for 0.
        """
        return records

    @abstractmethod
    def release(self, solved: Any, accountant: Accountant, generator: Source) -> Tensor:
        """Charges, draws the noise and returns the private vector (parameters,) float64.

        Args:
            solved: from `solve`.
            accountant: charged before anything is drawn.
            generator: of the noise, which must stay secret as long as the data are; no stream of the solver.

        Raises:
            BudgetExceeded: nothing was drawn.
            NotCertifiedError: an internal error, see `solvers.solve`; outside of the guarantee.
        """

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yields what all such plans say; see `Plan.lines`."""
        task, (std, signal, of) = self.task, self.noise_and_signal
        targets = "" if task.bound_y is None else f", targets to {task.bound_y:g}"
        yield (
            "model",
            f"{task.loss}: {task.parameters} parameters, rows of norm at most {task.preparation.bound:.4g}{targets}, "
            f"reg={self.reg:.4g} on the sum of {task.n} losses",
        )
        norm = std * math.sqrt(task.parameters)
        yield (
            "noise",
            f"std {std:.3g} per parameter, norm {norm:.3g}: {norm / signal:.2g} of {of}, at most {signal:.3g}",
        )
        most = (
            f"there are at most n_max={task.n_max} of them"
            if task.adjacency == ADD_REMOVE
            else f"their number is n={task.n}"
        )
        yield "assumed", f"all settings were chosen without a look at the records; {most}"
