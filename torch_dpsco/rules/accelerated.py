"""Accelerated stochastic approximation (AC-SA) on private means."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_dpsco import compat
from torch_dpsco.prox import Prox
from torch_dpsco.rules.base import Groups, State, UpdateRule, means, trained
from torch_dpsco.schedule import Phase


class Accelerated(UpdateRule):
    """AC-SA of Ghadimi and Lan with the step sizes of Lowy and Razaviyayn: for t = 1, 2, ... and a = 2/(t+1).

        query = (1 - a) outer + a inner
        inner <- Proj( inner - t lr mean )
        outer <- (1 - a) outer + a inner

    The answer is `outer`; between steps the parameters hold the query.

    Source: Lowy, Razaviyayn 2023, Algorithm 2; docs/proofs/heavy_tailed.md#accelerated-steps, where lr = 1/(2 eta).
    """

    def __init__(self) -> None:
        super().__init__("last")

    def check_groups(self, groups: Groups) -> None:
        """Accepts all groups."""

    def step_size(self, lr: float, k: int, phase: Phase) -> float:
        """Returns t lr."""
        return (k + 1) * super().step_size(lr, k, phase)

    def update(self, groups: Groups, state: State, k: int, phase: Phase) -> None:
        """Moves the inner iterates; the parameters stay until `settle`."""
        for group in groups:
            params = trained(group)
            if k == 0:
                for p in params:
                    state[p].pop("inner", None)
            if params:
                step = self.step_size(float(group["lr"]), k, phase)
                compat.foreach_add_([_kept(state, p)["inner"] for p in params], means(params), alpha=-step)

    def constrain(
        self, prox: Prox, params: Sequence[Tensor], steps: Sequence[float], state: State, phase: Phase
    ) -> None:
        """Projects the inner iterates."""
        prox.apply_([state[p]["inner"] for p in params], steps)

    def settle(self, groups: Groups, state: State, k: int) -> None:
        """Moves the outer iterates, and leaves the next query in the parameters."""
        for group in groups:
            for p in trained(group):
                kept = state[p]
                inner, outer = kept["inner"], kept["outer"]
                outer.lerp_(inner, 2.0 / (k + 2))
                torch.lerp(outer, inner, 2.0 / (k + 3), out=p)

    def answer(self, p: Tensor, state: State) -> Tensor:
        """Returns the outer iterate."""
        outer: Tensor = state.get(p, {}).get("outer", p.detach())
        return outer

    def settings(self) -> dict[str, Any]:
        """Returns the name."""
        return {"rule": "Accelerated"}


def _kept(state: State, p: Tensor) -> dict[str, Tensor]:
    """Returns the iterates of a parameter; they start where it is now (it may have been unfrozen since)."""
    kept: dict[str, Tensor] = state[p]
    if "inner" not in kept:
        kept |= {"inner": p.detach().clone(), "outer": p.detach().clone()}
    return kept
