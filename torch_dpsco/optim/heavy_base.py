"""What the optimizers for heavy-tailed gradients have in common: construction and planning."""

from __future__ import annotations

import math
from abc import abstractmethod
from contextlib import nullcontext, suppress
from typing import Any, TypeVar

import torch

from torch_dpsco import _validate as check
from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.accounting.designs import Design
from torch_dpsco.accounting.events import Adjacency
from torch_dpsco.accounting.filters import Budget
from torch_dpsco.errors import MissingConstantError
from torch_dpsco.optim import checks
from torch_dpsco.optim.base import PrivateOptimizer
from torch_dpsco.optim.heavy_plan import (
    FEW_STEPS,
    HeavyTailedPlan,
    Theory,
    dimension,
    one_pass,
    release_noise,
    zcdp_of,
)
from torch_dpsco.optim.pilot import Pilot
from torch_dpsco.oracles.base import MeanOracle
from torch_dpsco.oracles.clipped import Clipped
from torch_dpsco.problem import Problem
from torch_dpsco.prox import Ball, Prox
from torch_dpsco.rules import UpdateRule
from torch_dpsco.schedule import Phase, Schedule
from torch_dpsco.theory.heavy_inputs import check_mode

__all__ = ["HeavyTailed"]

_Self = TypeVar("_Self", bound="HeavyTailed")


class HeavyTailed(PrivateOptimizer):
    """Base of the optimizers for heavy-tailed gradients.

    Args:
        params: parameters or groups; all of them count as one vector.
        lr: step size, > 0.
        rule: how private means move the iterate.
        clip: C > 0, chosen without looking at the data.
        noise_multiplier: z >= 0, noise std on the sum of rows over C.
        batch_size: public divisor; with one-pass designs the exact size of each batch.
        oracle: another oracle in place of clip, noise_multiplier and batch_size.
        design: how batches are drawn; get them from `loader(dataset)`.
        n: public number of records: shorthand for design=Disjoint(batch_size, n), or Assigned under add_remove.
            Without design and n no sampling is claimed, under replace_one only.
        steps: planned number of steps; default one pass for one-pass designs.
        schedule: phases, in place of steps.
        adjacency: default that of the accountant, or "replace_one".
        prox: constraint or penalty.
        reg: lambda of (lambda/2)|w|^2, added after clip and noise; see `PrivateOptimizer`.
        accountant: ledger and budget.
        generator: noise generator of your own (warns).
        secure: "exact" for noise in integers on a public grid, see docs/performance.md for its cost.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        *,
        rule: UpdateRule,
        clip: float | None = None,
        noise_multiplier: float | None = None,
        batch_size: int | None = None,
        oracle: MeanOracle | None = None,
        design: Design | None = None,
        n: int | None = None,
        steps: int | None = None,
        schedule: Schedule | None = None,
        adjacency: Adjacency | None = None,
        prox: Prox | None = None,
        reg: float = 0.0,
        accountant: Accountant | None = None,
        generator: torch.Generator | None = None,
        secure: str | None = None,
    ) -> None:
        oracle = _oracle(oracle, clip, noise_multiplier, batch_size)
        adjacency = checks.agreed_adjacency(adjacency, accountant)
        if design is None and n is not None:
            design = one_pass(oracle.batch_size, n, adjacency)
        design = checks.declared(design, n, oracle.batch_size)
        if schedule is not None and steps is not None:
            raise ValueError(f"steps must not be given beside a schedule, which has its own (got {steps})")
        if schedule is None:
            if steps is None and design.one_pass:
                steps = design.steps_per_epoch
            schedule = Schedule((Phase(steps),))
        if design.one_pass and schedule.steps is not None and schedule.steps > design.steps_per_epoch:
            raise ValueError(f"steps must be <= {design.steps_per_epoch}, one pass of {design} (got {schedule.steps})")
        super().__init__(
            params,
            lr,
            oracle=oracle,
            rule=rule,
            design=design,
            schedule=schedule,
            prox=prox,
            reg=reg,
            accountant=accountant,
            adjacency=adjacency,
            generator=generator,
            secure=secure,
        )

    @classmethod
    @abstractmethod
    def _theory(cls, problem: Problem, distance: float | None, **inputs: Any) -> Theory:
        """Returns what the theorem chooses; raises MissingConstantError for promises that it needs."""

    @classmethod
    @abstractmethod
    def _lr(cls, problem: Problem) -> float:
        """Returns the largest step size of the theorem, where the noise is not known in advance."""

    @classmethod
    @abstractmethod
    def _exchange_rate(cls, problem: Problem, n: int, dim: int, steps: int, rho: float, adjacency: str) -> float:
        """Returns what a unit of clip costs in noise."""

    @classmethod
    def plan(
        cls,
        *,
        problem: Problem,
        n: int,
        budget: Budget,
        dim: int,
        steps: int | None = None,
        clip: float | Pilot | None = None,
        lr: float | None = None,
        distance: float | None = None,
        mode: str = "tight",
        allow_infinite_variance: bool = False,
    ) -> HeavyTailedPlan:
        """Returns the public numbers of a one-pass run, before anything is spent.

        Args:
            problem: promised constants: moment, moment_order (and second_moment) of the gradient norm choose clip,
                steps and step size by theory; smoothness (and more, see the class) chooses the step size in any case.
            n: public number of records.
            budget: what the run may spend; any adjacency.
            dim: number of parameters.
            steps: number of batches; default by theory, else 5.
            clip: default by theory; a number, chosen without looking at the data; or a `Pilot` group that chooses.
            lr: default by theory, or its largest step size where the clip is not known in advance.
            distance: bound on |w_0 - w*|; default the diameter of the problem's ball, which the bound on the risk of
                AcceleratedSGD wants (docs/proofs/heavy_tailed.md#accelerated-steps).
            mode: "tight", or "paper": the published number of steps and clip (replace_one).
            allow_infinite_variance: admits moment_order < 2.

        Raises:
            MissingConstantError: a promise is missing; says which, and how to do without.
            AdjacencyError: a pilot, or mode "paper", under add_remove.
            ValueError: an argument is out of range.
        """
        if budget.mode != "planned":
            raise ValueError(f"budget must be of mode 'planned', to be spent by a plan (got {budget.mode!r})")
        check_mode(mode, budget.adjacency)
        if distance is not None:
            check.positive(distance=distance)
        noise, adjacency = release_noise(budget), budget.adjacency
        rho = zcdp_of(noise, adjacency)
        pilot, left = None, check.positive_count(n=n)
        theory: Theory | None = None
        if isinstance(clip, Pilot):
            left -= clip.records(n)
            steps = FEW_STEPS if steps is None else check.positive_count(steps=steps)
            pilot = clip.plan(n, budget, cls._exchange_rate(problem, left, dim, steps, rho, adjacency))
        else:
            inputs = {"n": left, "dim": dim, "rho": rho, "steps": steps, "clip": clip, "adjacency": adjacency}
            with nullcontext() if clip is None else suppress(MissingConstantError):
                theory = cls._theory(
                    problem, distance, **inputs, mode=mode, allow_infinite_variance=allow_infinite_variance
                )
        if theory is not None:
            steps, clip = theory.steps, theory.clip
        if lr is None:
            lr = cls._lr(problem) if theory is None else theory.lr
        steps = FEW_STEPS if steps is None else check.positive_count(steps=steps)
        if steps > left:
            raise ValueError(f"steps must be <= {left}, the records that train (got {steps})")
        if mode != "paper":
            checks.warn_if_buried(noise / (left // steps) / math.sqrt(steps), n=n, dim=dim, epsilon=budget.epsilon)
        return HeavyTailedPlan(
            n=n,
            dim=dim,
            design=one_pass(left // steps, left, adjacency, steps),
            steps=steps,
            lr=check.positive(lr=lr),
            clip=None if isinstance(clip, Pilot) else check.positive(clip=clip),
            noise_multiplier=noise,
            adjacency=adjacency,
            epsilon=budget.epsilon,
            delta=budget.delta,
            pilot=pilot,
            risk_bound=None if theory is None else theory.bound,
        )

    @classmethod
    def calibrated(
        cls: type[_Self],
        params: Any,
        *,
        problem: Problem,
        n: int,
        budget: Budget,
        steps: int | None = None,
        clip: float | Pilot | None = None,
        lr: float | None = None,
        distance: float | None = None,
        mode: str = "tight",
        allow_infinite_variance: bool = False,
        prox: Prox | None = None,
        reg: float = 0.0,
        accountant: Accountant | None = None,
        generator: torch.Generator | None = None,
        secure: str | None = None,
    ) -> _Self:
        """Returns an optimizer that spends the budget in one pass; see `plan` and the class for the arguments."""
        params, dim = dimension(params)
        plan = cls.plan(
            problem=problem,
            n=n,
            budget=budget,
            dim=dim,
            steps=steps,
            clip=clip,
            lr=lr,
            distance=distance,
            mode=mode,
            allow_infinite_variance=allow_infinite_variance,
        )
        if accountant is not None:
            checks.require_budget(accountant, budget)
        if prox is None and math.isfinite(problem.radius):
            prox = Ball(problem.radius)
        return cls(
            params,
            plan.lr,
            **plan.mechanism(),
            prox=prox,
            reg=reg,
            accountant=Accountant(budget) if accountant is None else accountant,
            generator=generator,
            secure=secure,
        )


def _oracle(
    oracle: MeanOracle | None, clip: float | None, noise_multiplier: float | None, batch_size: int | None
) -> MeanOracle:
    numbers = {"clip": clip, "noise_multiplier": noise_multiplier, "batch_size": batch_size}
    if oracle is not None:
        given = [name for name, value in numbers.items() if value is not None]
        if given:
            raise ValueError(f"{', '.join(given)} must not be given beside an oracle, which has its own (got both)")
        return oracle
    if clip is None or noise_multiplier is None or batch_size is None:
        check.required(", or an oracle=; `.calibrated` computes all of them", **numbers)
    return Clipped(clip, noise_multiplier, batch_size)
