"""What optimizers that protect users, and their plans, have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from torch_dpsco import _validate as check
from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.accounting.events import ADD_REMOVE
from torch_dpsco.optim.planned import PlannedOptimizer, StepPlan
from torch_dpsco.oracles.base import MeanOracle
from torch_dpsco.prox import Prox
from torch_dpsco.rules.base import UpdateRule


@dataclass(frozen=True, kw_only=True)
class UserPlan(StepPlan):
    """Public numbers of a run that protects users.

    Args:
        min_items: rows that a user must have to count, public.
    """

    unit: ClassVar[str] = "user"
    min_items: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check.positive_count(min_items=self.min_items)

    @abstractmethod
    def oracle(self, prox: Prox, center: Sequence[Tensor] | None = None) -> MeanOracle:
        """Returns a new oracle with the plan's numbers, that measures users from a center."""

    @property
    def assumed(self) -> str:
        """What is taken for granted, in words."""
        known = "" if self.adjacency == ADD_REMOVE else "; their number is public"
        return f"ids are right; rows of a user do not depend on other users{known}"


class UserOptimizer(PlannedOptimizer):
    """Base of the named optimizers that protect users; `loader` draws users, and tells `step` whose rows it delivered.

    Args:
        params: parameters or groups; all of them count as one vector.
        plan: from the class's own `plan`.
        center: public vector that users' mean gradients are measured from, a tensor per parameter; None for 0.
        rule: as in `PlannedOptimizer`, and so are the others.
        prox: as there.
        reg: as there.
        accountant: as there.
        generator: as there.
    """

    def __init__(
        self,
        params: Any,
        plan: Any = None,
        *,
        center: Sequence[Tensor] | None = None,
        rule: UpdateRule | None = None,
        prox: Prox | None = None,
        reg: float | None = None,
        accountant: Accountant | None = None,
        generator: torch.Generator | None = None,
        **moved: Any,
    ) -> None:
        self._center = center
        super().__init__(
            params, plan, rule=rule, prox=prox, reg=reg, accountant=accountant, generator=generator, **moved
        )

    def _oracle(self, plan: StepPlan, prox: Prox) -> MeanOracle:
        assert isinstance(plan, UserPlan)
        return plan.oracle(prox, self._center)
