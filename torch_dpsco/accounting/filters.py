"""Budgets, and filters that decide before an event whether it still fits.

A *planned* budget covers runs whose noise, rates and schedules are fixed in advance: an event is admitted while the
composed epsilon stays within the target. Stopping early because of what was released is post-processing of the planned
run, so that the target (not the smaller epsilon of the steps made) is then the guarantee. A stop decided by private
data in any other way (a validation loss) is a release of its own.

Source: spec accounting.md section 7, holder.md section 3.5 (accounting B).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch_dpsco import _validate as check
from torch_dpsco.accounting.analysis.convert import rdp_epsilon_at_order
from torch_dpsco.accounting.events import REPLACE_ONE, Adjacency, check_adjacency

__all__ = ["Budget", "RDPFilter"]

_SLACK = 1.0 + 1e-12  # rounding of a sum of spends


@dataclass(frozen=True)
class Budget:
    """A privacy target (epsilon, delta) with the neighboring relation and the unit that it protects.

    Args:
        epsilon: > 0.
        delta: in (0, 1).
        adjacency: "replace_one" (default), "add_remove" or "zero_out". Budgets of different adjacencies are different
            promises and are never compared.
        unit: what one record is; "example" or "user".
        mode: "planned": parameters fixed in advance (see the module's docstring).

    Example:
        >>> Budget(1.0, 1e-5, adjacency="add_remove")
        Budget(epsilon=1.0, delta=1e-05, adjacency='add_remove', unit='example', mode='planned')
    """

    epsilon: float
    delta: float
    adjacency: Adjacency = REPLACE_ONE
    unit: str = "example"
    mode: str = "planned"

    def __post_init__(self) -> None:
        object.__setattr__(self, "epsilon", check.positive(epsilon=self.epsilon))
        object.__setattr__(self, "delta", check.open_interval(0.0, 1.0, delta=self.delta))
        check_adjacency(self.adjacency)
        check.choice(("example", "user"), unit=self.unit)
        check.choice(("planned",), mode=self.mode)


class RDPFilter:
    """Renyi filter at one order fixed in advance: valid for parameters chosen from earlier outputs.

    An event of Renyi cost D is admitted while the sum of costs at that order stays within the budget; then the whole
    run is (order, budget)-RDP whatever the rule that chose the events (Feldman and Zrnic 2021). A refused event costs
    nothing, and a cheaper one may still be admitted.

    Args:
        order: the Renyi order, > 1, chosen before the run.
        budget: RDP budget at that order, >= 0.

    Example:
        >>> run = RDPFilter(order=8.0, budget=0.5)
        >>> run.charge(0.3), run.admits(0.3), run.admits(0.2)
        (None, False, True)
    """

    def __init__(self, order: float, budget: float) -> None:
        self.order = check.order(order=order)
        self.budget = check.nonnegative(budget=budget)
        self.spent = 0.0

    @classmethod
    def for_budget(cls, order: float, epsilon: float, delta: float) -> RDPFilter:
        """Returns the filter whose exhausted budget converts to (epsilon, delta) at that order.

        Raises:
            ValueError: the order is too small for the target (no budget is left).
        """
        check.positive(epsilon=epsilon)
        overhead = rdp_epsilon_at_order(0.0, check.order(order=order), delta)
        if overhead >= epsilon:
            raise ValueError(f"order must leave a budget: at order {order} the conversion alone costs {overhead:.4g}")
        return cls(order, epsilon - max(overhead, 0.0))

    def admits(self, value: float) -> bool:
        """Returns whether an event of this Renyi cost fits; False for an infinite or undefined cost."""
        return math.isfinite(value) and value >= 0 and self.spent + value <= self.budget * _SLACK

    def charge(self, value: float) -> None:
        """Adds a Renyi cost; raises ValueError if it does not fit."""
        if not self.admits(value):
            raise ValueError(f"value must fit the budget: spent {self.spent}, asked {value}, budget {self.budget}")
        self.spent += value
