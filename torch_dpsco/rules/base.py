"""Update rules: how a private mean moves the iterate. They never see data; whatever they do is post-processing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from torch_dpsco import _validate as check

__all__ = ["AVERAGES", "Groups", "State", "UpdateRule", "absorb", "averaged"]

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

    def __init__(self, average: str = "last") -> None:
        self.average = check.choice(AVERAGES, average=average)

    @abstractmethod
    def check_groups(self, groups: Groups) -> None:
        """Raises ValueError if the rule does not move exactly the parameters of these groups."""

    @abstractmethod
    def update(self, groups: Groups, state: State, k: int, lr: float | None) -> None:
        """Makes step k = 0, 1, ... of a phase; lr, if given, replaces that of the groups."""

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Returns public constants that a checkpoint must agree with."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Returns what the rule keeps outside of the optimizer's state."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any], groups: Groups) -> None:
        """Restores what `state_dict` returned; `groups` are the loaded ones of the private optimizer."""


def absorb(params: Sequence[nn.Parameter], state: State, k: int, average: str) -> None:
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


def averaged(p: nn.Parameter, state: State, average: str) -> Tensor:
    """Returns the answer for one parameter: its average so far, or the parameter itself."""
    if average == "last" or "average" not in state.get(p, {}):
        return p.detach()
    value: Tensor = state[p]["average"].to(p.dtype)
    return value
