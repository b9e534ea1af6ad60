"""Update rules: how a private mean moves the iterate. They never see data; whatever they do is post-processing.

`Anchored` pulls the phases of a localized method towards the answer of the phase before. In a phase with anchor c (its
starting point) and regularization lambda, step k = 0, 1, ...:

    w <- Proj( w - f ( mean / lambda + (w - c) ) ),    f = lr / (k + 1)

(or lambda lr times the step size of the phase, if that has one). It is a subgradient step of size f/lambda on the loss
plus (lambda/2)|w - c|^2; at k = 0 it goes to c - mean/lambda. Only `mean` comes from private data: the regularizer is
added after clip and noise.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from torch_dpsco import _validate as check
from torch_dpsco import compat
from torch_dpsco._validate import type_members
from torch_dpsco.acts import public_names
from torch_dpsco.problem import Phase, Schedule
from torch_dpsco.prox import Prox

__dir__ = public_names(__name__)

Groups: TypeAlias = list[dict[str, Any]]
State: TypeAlias = defaultdict[Tensor, Any]
# weight of iterate t = 1, 2, ... grows like t^power
AVERAGES: dict[str, float | None] = {"last": None, "uniform": 0.0, "weighted": 1.0, "ema": 8.0}


class UpdateRule(ABC):
    """Turns private means, which it finds in `p.grad`, into updates of the parameters.

    Args:
        average: which iterate is the answer: "last"; "uniform", the mean of w_1..w_T (each BEFORE its update, as in the
            papers); "weighted", the same with weights proportional to t; "ema", an exponential moving average whose
            memory grows with the run, to its last ninth: a += 9/(t + 8) (w_t - a).
    """

    # name in the state of a parameter of the point that `update` moves; None for the parameter itself
    moved: ClassVar[str | None] = None
    # names in the state of a parameter of points that go with it where plain steps on public data move it
    kept: ClassVar[tuple[str, ...]] = ("average", "inner", "outer", "anchor")
    # what schedulers look for in an optimizer beside lr: whether momentum, or betas, can be cycled
    defaults: Mapping[str, Any] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        type_members(cls, "__init__")

    def __init__(self, average: str = "last") -> None:
        self.average = check.choice(AVERAGES, average=average)

    def check_groups(self, groups: Groups) -> None:
        """Raises ValueError if the rule does not move exactly the parameters of these groups, or not as they say."""
        if any(group.get("maximize") for group in groups):
            raise ValueError(
                "rule must be rules.TorchRule(optimizer) for groups of a torch optimizer with"
                " maximize=True (got a rule that minimizes)"
            )

    def check_schedule(self, schedule: Schedule) -> None:  # noqa: B027  (most rules take any)
        """Raises ValueError if the rule cannot make the planned steps."""

    @abstractmethod
    def update(self, groups: Groups, state: State, k: int, phase: Phase) -> None:
        """Makes step k = 0, 1, ... of a phase; phase.lr, if given, replaces that of the groups."""

    def step_size(self, lr: float, k: int, phase: Phase) -> float:
        """Returns the size of step k for the lr of a group: what a proximal map needs."""
        return lr if phase.lr is None else phase.lr

    def _descend(self, groups: Groups, state: State, k: int, phase: Phase) -> None:
        """Moves the points by a step against the private means."""
        for group in groups:
            params = trained(group)
            if params:
                name = self.moved
                compat.foreach_add_(
                    params if name is None else [state[p][name] for p in params],
                    [p.grad for p in params],
                    alpha=-self.step_size(float(group["lr"]), k, phase),
                )

    def constrain(
        self,
        prox: Prox,
        params: Sequence[Tensor],
        steps: Sequence[float],
        state: State,
    ) -> None:
        """Applies the proximal map after an update, with one step size per parameter."""
        name = self.moved
        prox.apply_(params if name is None else [state[p][name] for p in params], steps)

    def settle(self, groups: Groups, state: State, k: int) -> None:  # noqa: B027  (most rules have nothing to do)
        """Leaves the next query in the parameters, which hold the new iterate (after the proximal map)."""

    def answer(self, p: Tensor, state: State) -> Tensor:
        """Returns the private answer for one parameter."""
        return averaged(p, state)

    def end_phase(self, groups: Groups, state: State, phase: Phase) -> None:  # noqa: B027
        """Ends a phase, whose answer the parameters hold; what they hold afterwards is where the next one starts."""

    def settings(self) -> dict[str, Any]:
        """Returns public constants that a checkpoint must agree with."""
        return {"rule": type(self).__name__, "average": self.average}

    def state_dict(self) -> dict[str, Any]:
        """Returns what the rule keeps outside of the optimizer's state, nothing for most rules."""
        return {}

    def load_state_dict(self, state: dict[str, Any], groups: Groups) -> None:  # noqa: B027
        """Restores what `state_dict` returned; `groups` are the loaded ones of the private optimizer."""


def trained(*groups: dict[str, Any]) -> list[Tensor]:
    """Returns the parameters of groups that are not frozen."""
    return [p for group in groups for p in group["params"] if p.requires_grad]


def _begin(params: Sequence[Tensor], state: State, k: int, *names: str) -> None:
    """Lets points start where the parameters are: in the first step, or the first after they were unfrozen."""
    for p in params:
        for name in names:
            if k == 0 or name not in state[p]:
                state[p][name] = p.detach().clone()


def absorb(params: Sequence[Tensor], state: State, k: int, average: str | float) -> None:
    """Adds the iterates w_{k+1}, before their update, to the running averages (float64), which they are at k = 0.

    The running average is a += (power + 1)/(t + power) (w - a): weights t^power, exactly for power 0 and 1.

    Args:
        params: where they are.
        state: of the parameters.
        k: number of the step.
        average: one of `AVERAGES`; or the share of their way to the iterates that averages move.
    """
    share = average
    if isinstance(share, str):
        power = AVERAGES[share]
        if power is None:
            return
        share = (power + 1.0) / (k + 1.0 + power)
    for p in params:
        kept = state[p]
        if (
            k == 0 or "average" not in kept
        ):  # unfrozen since: all its iterates so far are the same
            kept["average"] = p.detach().to(torch.float64, copy=True)
        elif share:
            kept["average"].lerp_(p.detach().double(), share)


def averaged(p: Tensor, state: State) -> Tensor:
    """Returns the answer for one parameter: its average so far, or the parameter itself where none is kept."""
    value: Tensor = state.get(p, {}).get("average", p.detach()).to(p.dtype)
    return value


class SGD(UpdateRule):
    """w <- w - lr * mean, with an average of the iterates as the answer.

    Args:
        average: see `UpdateRule`.
    """

    def update(self, groups: Groups, state: State, k: int, phase: Phase) -> None:
        """Makes one step with the lr of each group, or with that of the phase."""
        absorb(trained(*groups), state, k, self.average)
        self._descend(groups, state, k, phase)


class Momentum(UpdateRule):
    """SGD with momentum, as averaging: steps of size h = lr/(1 - momentum) are taken by inner iterates.

        inner <- Proj( inner - h mean )
        w <- momentum w + (1 - momentum) inner

    Without a projection that is w <- w - lr (mean + momentum mean' + momentum^2 mean'' + ...), the heavy ball.

    Args:
        average: see `UpdateRule`; of w.
        momentum: in [0, 1).

    Source: docs/proofs/steps.md#momentum.
    """

    moved = "inner"  # projected, so that their averages are feasible

    def __init__(self, average: str = "last", momentum: float = 0.9) -> None:
        super().__init__(average)
        self.momentum = check.below_one(momentum=momentum)

    def step_size(self, lr: float, k: int, phase: Phase) -> float:
        """Returns lr / (1 - momentum), the step size of the inner iterates."""
        return (lr if phase.lr is None else phase.lr) / (1.0 - self.momentum)

    def update(self, groups: Groups, state: State, k: int, phase: Phase) -> None:
        """Moves the inner iterates; the parameters stay until `settle`."""
        params = trained(*groups)
        absorb(params, state, k, self.average)
        _begin(params, state, k, "inner")
        self._descend(groups, state, k, phase)

    def settle(self, groups: Groups, state: State, k: int) -> None:
        """Moves the parameters towards the inner iterates."""
        for p in trained(*groups):
            p.lerp_(state[p]["inner"], 1.0 - self.momentum)

    def settings(self) -> dict[str, Any]:
        """Returns name, average and momentum."""
        return super().settings() | {"momentum": self.momentum}


class TorchRule(UpdateRule):
    """Any torch optimizer on the private mean: momentum, Adam and so on are post-processing.

    The guarantee is unchanged. A utility theorem covers plain SGD alone: where the plan states a bound on the risk, the
    private optimizer gives a UtilityWarning. Schedulers are made of either optimizer, and cycle what the inner one has.
    With maximize=True steps go uphill, against reg.

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
            raise ValueError(
                "optimizer must use one gradient per step (got LBFGS, which evaluates the loss"
                " itself)"
            )
        self.plain = type(optimizer) is torch.optim.SGD and not any(
            group["momentum"] or group["weight_decay"] or group["maximize"]
            for group in optimizer.param_groups
        )
        self.optimizer = optimizer
        self.defaults = optimizer.defaults

    def check_groups(self, groups: Groups) -> None:
        """Raises ValueError unless the torch optimizer has these very groups."""
        # PRIVACY: it would step on whatever p.grad holds for parameters that the private optimizer does not know
        # (test_a_torch_rule_on_other_parameters_is_refused)
        if [id(group) for group in groups] != [
            id(group) for group in self.optimizer.param_groups
        ]:
            raise ValueError(
                "params must be the groups of the rule's optimizer: give `optimizer.param_groups`"
                " of the torch optimizer as params (got other groups)"
            )

    def update(self, groups: Groups, state: State, k: int, phase: Phase) -> None:
        """Lets the torch optimizer make one step; raises ValueError if it was given other groups since."""
        self.check_groups(groups)
        absorb(trained(*groups), state, k, self.average)
        for group in groups:
            group["lr"] = super().step_size(group["lr"], k, phase)
        self.optimizer.step()

    def settings(self) -> dict[str, Any]:
        """Returns name, optimizer and average."""
        return super().settings() | {"optimizer": type(self.optimizer).__name__}

    def state_dict(self) -> dict[str, Any]:
        """Returns the torch optimizer's state."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any], groups: Groups) -> None:
        """Restores the torch optimizer's state, and shares the groups again: loading makes copies of them."""
        self.optimizer.load_state_dict(state)
        self.optimizer.param_groups = groups


class AdamBC(UpdateRule):
    """Adam whose second moments are freed of the noise, which adds its variance, a public number, to each of them.

        w <- w - lr m / sqrt(max(v - noise_std^2, (floor noise_std)^2)) - lr weight_decay w

    with m and v the unbiased moving averages of the private means and of their squares. Adam itself divides by
    sqrt(v), in which the noise of all coordinates buries what differs between them.

    Args:
        noise_std: std per coordinate of the noise of a private mean: `plan.noise_std`; > 0.
        betas: of the two averages, in [0, 1).
        floor: in units of noise_std, > 0; the default is what noise leaves of v where there is no gradient.
        weight_decay: >= 0, of the weights themselves, as in AdamW.
        average: see `UpdateRule`.

    Source: Tang, Shpilevskiy and Lecuyer 2024. Differs from it in: the floor is in units of the noise.
    """

    def __init__(
        self,
        noise_std: float,
        betas: tuple[float, float] = (0.9, 0.999),
        floor: float = 0.2,
        weight_decay: float = 0.0,
        average: str = "last",
    ) -> None:
        super().__init__(average)
        self.noise_std = check.positive(noise_std=noise_std)
        first, second = betas
        self.betas = check.below_one(betas=first), check.below_one(betas=second)
        self.floor = check.positive(floor=floor)
        self.weight_decay = check.nonnegative(weight_decay=weight_decay)

    def update(self, groups: Groups, state: State, k: int, phase: Phase) -> None:
        """Makes step k = 0, 1, ..."""
        absorb(trained(*groups), state, k, self.average)
        for group in groups:
            lr = self.step_size(float(group["lr"]), k, phase)
            for p in trained(group):
                p.mul_(1.0 - lr * self.weight_decay)
                p.sub_(lr * self._direction(p, state[p]))

    def _direction(self, p: Tensor, kept: dict[str, Any]) -> Tensor:
        """Returns m / sqrt(v) of a parameter, whose averages begin when it is trained first."""
        mean = p.grad
        assert mean is not None  # in a step every trained parameter has one
        first = kept.setdefault("first", torch.zeros_like(p))
        second = kept.setdefault("second", torch.zeros_like(p))
        kept["step"] = kept.get("step", 0) + 1  # of this parameter: it may be unfrozen later
        first.lerp_(mean, 1.0 - self.betas[0])
        second.lerp_(mean.square(), 1.0 - self.betas[1])
        free = second / (1.0 - self.betas[1] ** kept["step"]) - self.noise_std**2
        size = free.clamp_(min=(self.floor * self.noise_std) ** 2).sqrt_()
        direction: Tensor = first / (1.0 - self.betas[0] ** kept["step"]) / size
        return direction

    def settings(self) -> dict[str, Any]:
        """Returns name, average and constants."""
        own = {name: getattr(self, name) for name in ("noise_std", "floor", "weight_decay")}
        return super().settings() | own | {"betas": list(self.betas)}


class ScheduledSGD(SGD):
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
                f"weights must be one per factor, with a sum > 0 (got {len(self.weights)} for"
                f" {len(self.factors)})"
            )
        totals = [math.fsum(self.weights[: k + 1]) for k, _ in enumerate(self.weights)]
        # share of the newest iterate in the running average; before the first weight it is the whole
        self._shares = [
            w / total if total else 1.0 for w, total in zip(self.weights, totals, strict=True)
        ]

    def check_schedule(self, schedule: Schedule) -> None:
        """Raises ValueError if a phase has more steps than there are factors."""
        longest = max(phase.steps or math.inf for phase in schedule.phases)
        if longest > len(self.factors):
            raise ValueError(
                f"steps must be planned, and at most {len(self.factors)}, one per factor (got"
                f" {longest})"
            )

    def step_size(self, lr: float, k: int, phase: Phase) -> float:
        """Returns factors[k] lr."""
        return self.factors[k] * super().step_size(lr, k, phase)

    def settle(self, groups: Groups, state: State, k: int) -> None:
        """Adds the new iterates to the running averages (float64)."""
        absorb(trained(*groups), state, k, self._shares[k])

    def settings(self) -> dict[str, Any]:
        """Returns name, factors and weights."""
        return super().settings() | {
            "factors": list(self.factors),
            "weights": list(self.weights),
        }


class Accelerated(UpdateRule):
    """AC-SA of Ghadimi and Lan with the step sizes of Lowy and Razaviyayn: for t = 1, 2, ... and a = 2/(t+1).

        query = (1 - a) outer + a inner
        inner <- Proj( inner - t lr mean )
        outer <- (1 - a) outer + a inner

    The answer is `outer`; between steps the parameters hold the query.

    Source: Lowy, Razaviyayn 2023, Algorithm 2; docs/proofs/heavy_tailed.md#accelerated-steps, where lr = 1/(2 eta).
    """

    moved = "inner"

    def __init__(self) -> None:
        super().__init__("last")

    def step_size(self, lr: float, k: int, phase: Phase) -> float:
        """Returns t lr."""
        return (k + 1) * super().step_size(lr, k, phase)

    def update(self, groups: Groups, state: State, k: int, phase: Phase) -> None:
        """Moves the inner iterates; the parameters stay until `settle`."""
        _begin(trained(*groups), state, k, "inner", "outer")
        self._descend(groups, state, k, phase)

    def settle(self, groups: Groups, state: State, k: int) -> None:
        """Moves the outer iterates, and leaves the next query in the parameters."""
        for p in trained(*groups):
            inner = state[p]["inner"]
            outer = state[p]["outer"].lerp_(inner, 2.0 / (k + 2))
            torch.lerp(outer, inner, 2.0 / (k + 3), out=p)

    def answer(self, p: Tensor, state: State) -> Tensor:
        """Returns the outer iterate."""
        outer: Tensor = state.get(p, {}).get("outer", p.detach())
        return outer


class Anchored(UpdateRule):
    """Regularized subgradient steps around the start of their phase.

    lr is a factor on all steps; the theory has 1.

    Source: Lowy, Razaviyayn 2023, Algorithms 3 and 4; docs/proofs/heavy_tailed.md#phase-without-a-ball.
    """

    def __init__(self) -> None:
        super().__init__("last")

    def _factor(self, lr: float, k: int, phase: Phase) -> float:
        if phase.lr is not None:
            return lr * phase.lr * phase.reg
        return lr / (k + 1)

    def step_size(self, lr: float, k: int, phase: Phase) -> float:
        """Returns the step size on the loss."""
        return self._factor(lr, k, phase) / phase.reg

    def update(self, groups: Groups, state: State, k: int, phase: Phase) -> None:
        """Makes step k of a phase."""
        _begin(trained(*groups), state, k, "anchor")
        for group in groups:
            for p in trained(group):
                p.lerp_(state[p]["anchor"], self._factor(float(group["lr"]), k, phase))
        self._descend(groups, state, k, phase)
