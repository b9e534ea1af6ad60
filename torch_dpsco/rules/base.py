"""Update rules: how a private mean moves the iterate. They never see data; whatever they do is post-processing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from torch_dpsco import _validate as check
from torch_dpsco._doors import type_members
from torch_dpsco.prox import Prox
from torch_dpsco.schedule import Phase, Schedule

Groups: TypeAlias = list[dict[str, Any]]
State: TypeAlias = defaultdict[Tensor, Any]
# weight of iterate t = 1, 2, ... is proportional to t^power
AVERAGES: dict[str, float | None] = {"last": None, "uniform": 0.0, "weighted": 1.0}


class UpdateRule(ABC):
    """Turns private means, which it finds in `p.grad`, into updates of the parameters.

    Args:
        average: which iterate is the answer: "last"; "uniform", the mean of w_1..w_T (each BEFORE its update, as in the
            papers); "weighted", the same with weights proportional to t.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        type_members(cls, "__init__")

    def __init__(self, average: str = "last") -> None:
        self.average = check.choice(AVERAGES, average=average)

    @abstractmethod
    def check_groups(self, groups: Groups) -> None:
        """Raises ValueError if the rule does not move exactly the parameters of these groups."""

    def check_schedule(self, schedule: Schedule) -> None:  # noqa: B027  (most rules take any)
        """Raises ValueError if the rule cannot make the planned steps."""

    @abstractmethod
    def update(self, groups: Groups, state: State, k: int, phase: Phase) -> None:
        """Makes step k = 0, 1, ... of a phase; phase.lr, if given, replaces that of the groups."""

    def step_size(self, lr: float, k: int, phase: Phase) -> float:
        """Returns the size of step k for the lr of a group: what a proximal map needs."""
        return lr if phase.lr is None else phase.lr

    def constrain(
        self, prox: Prox, params: Sequence[Tensor], steps: Sequence[float], state: State, phase: Phase
    ) -> None:
        """Applies the proximal map after an update, with one step size per parameter."""
        prox.apply_(params, steps)

    def settle(self, groups: Groups, state: State, k: int) -> None:  # noqa: B027  (most rules have nothing to do)
        """Leaves the next query in the parameters, which hold the new iterate (after the proximal map)."""

    def answer(self, p: Tensor, state: State) -> Tensor:
        """Returns the private answer for one parameter."""
        return averaged(p, state, self.average)

    def end_phase(self, groups: Groups, state: State, phase: Phase) -> None:  # noqa: B027
        """Ends a phase, whose answer the parameters hold; what they hold afterwards is where the next one starts."""

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Returns public constants that a checkpoint must agree with."""

    def state_dict(self) -> dict[str, Any]:
        """Returns what the rule keeps outside of the optimizer's state, nothing for most rules."""
        return {}

    def load_state_dict(self, state: dict[str, Any], groups: Groups) -> None:  # noqa: B027
        """Restores what `state_dict` returned; `groups` are the loaded ones of the private optimizer."""


def trained(group: dict[str, Any]) -> list[Tensor]:
    """Returns the parameters of a group that are not frozen."""
    return [p for p in group["params"] if p.requires_grad]


def means(params: Sequence[Tensor]) -> list[Tensor]:
    """Returns the private means, which `p.grad` holds."""
    return [p.grad for p in params if p.grad is not None]


def absorb(params: Sequence[Tensor], state: State, k: int, average: str) -> None:
    """Adds the iterates w_{k+1}, before their update, to the running averages (float64).

    With weights t^power the running average is a += (power + 1)/(t + power) (w - a), exactly for power 0 and 1.
    """
    power = AVERAGES[average]
    if power is None:
        return
    factor = (power + 1.0) / (k + 1.0 + power)
    for p in params:
        kept = state[p]
        running: Tensor | None = kept.get("average")
        if k == 0 or running is None:  # unfrozen since: all its iterates so far are the same
            kept["average"] = p.detach().to(torch.float64, copy=True)
        else:
            running.lerp_(p.detach().double(), factor)


def averaged(p: Tensor, state: State, average: str) -> Tensor:
    """Returns the answer for one parameter: its average so far, or the parameter itself."""
    if average == "last" or "average" not in state.get(p, {}):
        return p.detach()
    value: Tensor = state[p]["average"].to(p.dtype)
    return value
