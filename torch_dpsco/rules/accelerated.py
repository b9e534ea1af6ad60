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
                    state[p] |= {"inner": p.detach().clone(), "outer": p.detach().clone()}
            if params:
                step = self.step_size(float(group["lr"]), k, phase)
                torch._foreach_copy_(params, [_kept(state, p, "inner") for p in params])
                torch._foreach_add_(params, means(params), alpha=-step)

    def settle(self, groups: Groups, state: State, k: int) -> None:
        """Takes the projected inner iterate, and leaves the next query."""
        for group in groups:
            params = trained(group)
            if not params:
                continue
            inner = [_kept(state, p, "inner") for p in params]
            outer = [_kept(state, p, "outer") for p in params]
            torch._foreach_copy_(inner, params)
            torch._foreach_lerp_(outer, inner, 2.0 / (k + 2))
            torch._foreach_copy_(params, outer)
            torch._foreach_lerp_(params, inner, 2.0 / (k + 3))

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


def _kept(state: State, p: Tensor, name: str) -> Tensor:
    kept = state[p]
    if name not in kept:  # unfrozen since: all its iterates so far are the same
        kept[name] = p.detach().clone()
    value: Tensor = kept[name]
    return value
