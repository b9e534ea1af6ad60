"""Gradient descent on private means: constant or scheduled steps, or any torch optimizer."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_dpsco import _validate as check
from torch_dpsco import compat
from torch_dpsco.errors import UtilityWarning
from torch_dpsco.rules.base import Groups, State, UpdateRule, absorb, means, trained
from torch_dpsco.schedule import Phase, Schedule


class SGD(UpdateRule):
    """w <- w - lr * mean, with an average of the iterates as the answer.

    Args:
        average: see `UpdateRule`.
    """

    def check_groups(self, groups: Groups) -> None:
        """Accepts all groups."""

    def update(self, groups: Groups, state: State, k: int, phase: Phase) -> None:
        """Makes one step with the lr of each group, or with that of the phase."""
        for group in groups:
            params = trained(group)
            absorb(params, state, k, self.average)
            if params:
                compat.foreach_add_(params, means(params), alpha=-self.step_size(float(group["lr"]), k, phase))

    def settings(self) -> dict[str, Any]:
        """Returns name and average."""
        return {"rule": "SGD", "average": self.average}


class TorchRule(UpdateRule):
    """Any torch optimizer on the private mean: momentum, Adam and so on are post-processing.

    The guarantee is unchanged, but the utility theorem of the algorithm does not cover it, hence a UtilityWarning.

    Args:
        optimizer: built on the same parameters; pass `optimizer.param_groups` as `params` to the private optimizer, so
            that both see the same groups and learning rates.
        average: see `UpdateRule`.

    Raises:
        ValueError: an optimizer that evaluates the loss itself (LBFGS).
    """

    def __init__(self, optimizer: torch.optim.Optimizer, average: str = "last") -> None:
        super().__init__(average)
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError("optimizer must use one gradient per step (got LBFGS, which evaluates the loss itself)")
        plain = type(optimizer) is torch.optim.SGD and all(
            group["momentum"] == 0 and group["weight_decay"] == 0 for group in optimizer.param_groups
        )
        if not plain:
            warnings.warn(
                f"{type(optimizer).__name__} on private means is post-processing: the privacy guarantee is unchanged, "
                f"but the utility theorem of the algorithm does not cover it",
                UtilityWarning,
                stacklevel=2,
            )
        self.optimizer = optimizer

    def check_groups(self, groups: Groups) -> None:
        """Raises ValueError unless the torch optimizer has these very groups."""
        # PRIVACY: it would step on whatever p.grad holds for parameters that the private optimizer does not know
        # (test_a_torch_rule_on_other_parameters_is_refused)
        if [id(group) for group in groups] != [id(group) for group in self.optimizer.param_groups]:
            raise ValueError(
                "params must be the groups of the rule's optimizer: give `optimizer.param_groups` of the torch "
                "optimizer as params (got other groups)"
            )

    def update(self, groups: Groups, state: State, k: int, phase: Phase) -> None:
        """Lets the torch optimizer make one step; raises ValueError if it was given other groups since."""
        self.check_groups(groups)
        for group in groups:
            absorb(trained(group), state, k, self.average)
            if phase.lr is not None:
                group["lr"] = phase.lr
        self.optimizer.step()

    def settings(self) -> dict[str, Any]:
        """Returns name, optimizer and average."""
        return {"rule": "TorchRule", "optimizer": type(self.optimizer).__name__, "average": self.average}

    def state_dict(self) -> dict[str, Any]:
        """Returns the torch optimizer's state."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any], groups: Groups) -> None:
        """Restores the torch optimizer's state, and shares the groups again: loading makes copies of them."""
        self.optimizer.load_state_dict(state)
        self.optimizer.param_groups = groups


class ScheduledSGD(UpdateRule):
    """w <- w - factors[k] lr mean; the answer is the average of the iterates AFTER their steps, with these weights.

    Args:
        factors: relative step sizes, > 0, one per step.
        weights: >= 0, one per step, their sum > 0.

    Source: Lowy, Razaviyayn 2023, Algorithm 6; docs/proofs/heavy_tailed.md#averaged-steps.
    """

    def __init__(self, factors: Sequence[float], weights: Sequence[float]) -> None:
        super().__init__("last")
        self.factors = tuple(check.positive(factors=factor) for factor in factors)
        self.weights = tuple(check.nonnegative(weights=weight) for weight in weights)
        if len(self.factors) != len(self.weights) or not math.fsum(self.weights) > 0:
            raise ValueError(
                f"weights must be one per factor, with a sum > 0 (got {len(self.weights)} for {len(self.factors)})"
            )
        totals = [math.fsum(self.weights[: k + 1]) for k in range(len(self.weights))]
        # share of the newest iterate in the running average; before the first weight it is the whole
        self._shares = [w / total if total else 1.0 for w, total in zip(self.weights, totals, strict=True)]

    def check_groups(self, groups: Groups) -> None:
        """Accepts all groups."""

    def check_schedule(self, schedule: Schedule) -> None:
        """Raises ValueError if a phase has more steps than there are factors."""
        longest = max(phase.steps or math.inf for phase in schedule.phases)
        if longest > len(self.factors):
            raise ValueError(f"steps must be planned, and at most {len(self.factors)}, one per factor (got {longest})")

    def step_size(self, lr: float, k: int, phase: Phase) -> float:
        """Returns factors[k] lr."""
        return self.factors[k] * super().step_size(lr, k, phase)

    def update(self, groups: Groups, state: State, k: int, phase: Phase) -> None:
        """Makes step k."""
        for group in groups:
            params = trained(group)
            if params:
                step = self.step_size(float(group["lr"]), k, phase)
                compat.foreach_add_(params, means(params), alpha=-step)

    def settle(self, groups: Groups, state: State, k: int) -> None:
        """Adds the new iterates to the running averages (float64)."""
        for group in groups:
            for p in trained(group):
                kept = state[p]
                if k == 0 or "average" not in kept:
                    kept["average"] = p.detach().to(torch.float64, copy=True)
                elif self._shares[k]:
                    kept["average"].lerp_(p.detach().double(), self._shares[k])

    def answer(self, p: Tensor, state: State) -> Tensor:
        """Returns the average."""
        value: Tensor = state.get(p, {}).get("average", p.detach()).to(p.dtype)
        return value

    def settings(self) -> dict[str, Any]:
        """Returns name, factors and weights."""
        return {"rule": "ScheduledSGD", "factors": list(self.factors), "weights": list(self.weights)}
