"""Accelerated stochastic approximation (AC-SA) on private means."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_dpsco.rules.base import Groups, State, UpdateRule, means, trained
from torch_dpsco.schedule import Phase

__all__ = ["Accelerated"]


class Accelerated(UpdateRule):
    """AC-SA of Ghadimi and Lan with the step sizes of Lowy and Razaviyayn: for t = 1, 2, ... and a = 2/(t+1).

        query = (1 - a) outer + a inner
        inner <- Proj( inner - t lr mean )
        outer <- (1 - a) outer + a inner

    The answer is `outer`; between steps the parameters hold the query.

    Source: Lowy, Razaviyayn 2023, Algorithm 2; spec heavytail.md 2.1, where lr = 1/(2 eta).
    """

    def __init__(self) -> None:
        super().__init__("last")

    def check_groups(self, groups: Groups) -> None:
        """Accepts all groups."""

    def step_size(self, lr: float, k: int, phase: Phase) -> float:
        """Returns t lr."""
        return (k + 1) * super().step_size(lr, k, phase)

    def update(self, groups: Groups, state: State, k: int, phase: Phase) -> None:
        """Moves the inner iterate, into the parameters."""
        for group in groups:
            params = trained(group)
            if k == 0:
                for p in params:
                    state[p].pop("inner", None)
            if params:
                step = self.step_size(float(group["lr"]), k, phase)
                inner = [_kept(state, p)["inner"] for p in params]
                torch._foreach_add_(inner, means(params), alpha=-step)
                torch._foreach_copy_(params, inner)

    def settle(self, groups: Groups, state: State, k: int) -> None:
        """Takes the projected inner iterate, and leaves the next query."""
        for group in groups:
            params = trained(group)
            if params:
                outer = [state[p]["outer"] for p in params]
                torch._foreach_copy_([state[p]["inner"] for p in params], params)
                torch._foreach_lerp_(outer, params, 2.0 / (k + 2))
                torch._foreach_lerp_(params, outer, 1.0 - 2.0 / (k + 3))

    def answer(self, p: Tensor, state: State) -> Tensor:
        """Returns the outer iterate."""
        outer: Tensor = state.get(p, {}).get("outer", p.detach())
        return outer

    def settings(self) -> dict[str, Any]:
        """Returns the name."""
        return {"rule": "Accelerated"}

    def state_dict(self) -> dict[str, Any]:
        """Returns nothing: the iterates live in the optimizer's state."""
        return {}

    def load_state_dict(self, state: dict[str, Any], groups: Groups) -> None:
        """Accepts the empty state."""


def _kept(state: State, p: Tensor) -> dict[str, Tensor]:
    """Returns the iterates of a parameter; they start where it is now (it may have been unfrozen since)."""
    kept: dict[str, Tensor] = state[p]
    if "inner" not in kept:
        kept |= {"inner": p.detach().clone(), "outer": p.detach().clone()}
    return kept
