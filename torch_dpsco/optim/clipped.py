"""ClippedSGD: SGD on clipped means, in one pass with the weights of strong convexity, or in many.

    w <- Proj( w - lr_t mean_t );   the answer is a weighted average of the iterates AFTER their steps, or the last one

Differs from the paper (Lowy and Razaviyayn 2023, Algorithms 6 and 7) in: 1. the weights are linear: with the published
squares the bound does not telescope; 2. no step is needed that "returns w_t if s_t < 0", which nothing can test
privately; 3. explicit constants; 4. batches may also be drawn many times (Poisson, fixed, full), which the theorem does
not cover and which often does better at moderate n.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from torch_dpsco import _validate as check
from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.accounting.calibrate import epoch_steps
from torch_dpsco.accounting.calibrate import noise_multiplier as calibrate_noise
from torch_dpsco.accounting.designs import Design, Fixed, Full, Poisson
from torch_dpsco.accounting.events import Adjacency
from torch_dpsco.accounting.filters import Budget
from torch_dpsco.errors import MissingConstantError
from torch_dpsco.optim import checks
from torch_dpsco.optim.heavy_base import HeavyTailed
from torch_dpsco.optim.heavy_plan import HeavyTailedPlan, Theory, dimension, release_noise, scale_of, zcdp_of
from torch_dpsco.optim.pilot import Pilot
from torch_dpsco.oracles.base import MeanOracle
from torch_dpsco.problem import Problem
from torch_dpsco.prox import Ball, Prox
from torch_dpsco.rules import SGD, ScheduledSGD, UpdateRule
from torch_dpsco.schedule import Schedule
from torch_dpsco.theory.clipping import exchange_rate_phase, exchange_rate_strongly_convex
from torch_dpsco.theory.heavy_tailed import averaging_schedule, strongly_convex_coefficients, strongly_convex_plan

__all__ = ["ClippedSGD"]

_DESIGNS: dict[str, type[Poisson] | type[Fixed]] = {"poisson": Poisson, "fixed": Fixed}
_SAMPLINGS = ("one-pass", "full", *_DESIGNS)
_DEFAULT_BATCH, _DEFAULT_EPOCHS, _FULL_STEPS = 512, 10, 30


class ClippedSGD(HeavyTailed):
    """SGD on clipped means: one pass with Stich's weights, or many passes.

    Args:
        params: parameters or groups; all of them count as one vector.
        lr: step size; with a `ScheduledSGD` rule that of the first step.
        clip: C > 0, chosen without looking at the data.
        noise_multiplier: z >= 0, noise std on the sum of rows over C.
        batch_size: public divisor; with one-pass designs the exact size of each batch.
        oracle: another oracle in place of these three.
        design: how batches are drawn.
        n: public number of records: shorthand for design=Disjoint(batch_size, n), or Assigned under add_remove.
        steps: planned number of steps; default one pass for one-pass designs.
        schedule: phases, in place of steps.
        adjacency: default that of the accountant, or "replace_one".
        average: "last", "uniform" or "weighted"; not with `rule`.
        rule: another update rule, e.g. `rules.ScheduledSGD`, `rules.TorchRule(torch.optim.Adam(...))`.
        prox: constraint or penalty.
        reg: lambda of (lambda/2)|w|^2, added after clip and noise.
        accountant: ledger and budget.
        generator: noise generator of your own (warns).
        secure: "exact" for noise in integers on a public grid, see docs/performance.md for its cost.

    Guarantee:
        That of the design: one unsampled Gaussian for a pass over disjoint batches; PoissonGaussian or WORGaussian per
        step with amplification. Unit: one row per record. Moments and curvature are not assumed: rows are clipped.
        Source: Lowy, Razaviyayn 2023, Theorem 11; docs/proofs/heavy_tailed.md#averaged-steps.

    Example:
        >>> import torch_dpsco as dp
        >>> model = dp.attach(torch.nn.Linear(3, 1))
        >>> optimizer = dp.ClippedSGD.calibrated(
        ...     model.parameters(), problem=dp.Problem(smoothness=2.0, strong_convexity=0.5), n=600,
        ...     budget=dp.Budget(1.0, 1e-4), clip=2.0, steps=6)
        >>> optimizer.rule.settings()["weights"][-1], optimizer.schedule.steps
        (10.0, 6)
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        *,
        clip: float | None = None,
        noise_multiplier: float | None = None,
        batch_size: int | None = None,
        oracle: MeanOracle | None = None,
        design: Design | None = None,
        n: int | None = None,
        steps: int | None = None,
        schedule: Schedule | None = None,
        adjacency: Adjacency | None = None,
        average: str = "last",
        rule: UpdateRule | None = None,
        prox: Prox | None = None,
        reg: float = 0.0,
        accountant: Accountant | None = None,
        generator: torch.Generator | None = None,
        secure: str | None = None,
    ) -> None:
        if rule is not None and average != "last":
            raise ValueError(f"average must be given to the rule when there is one (got {average!r})")
        super().__init__(
            params,
            lr,
            rule=rule or SGD(average),
            clip=clip,
            noise_multiplier=noise_multiplier,
            batch_size=batch_size,
            oracle=oracle,
            design=design,
            n=n,
            steps=steps,
            schedule=schedule,
            adjacency=adjacency,
            prox=prox,
            reg=reg,
            accountant=accountant,
            generator=generator,
            secure=secure,
        )

    @classmethod
    def _theory(cls, problem: Problem, distance: float | None, **inputs: Any) -> Theory:
        moment, order, smoothness, curvature = problem.require(
            "moment", "moment_order", "smoothness", "strong_convexity", by=cls.__name__
        )
        unbounded = distance is None and math.isinf(problem.radius)
        plan = strongly_convex_plan(
            smoothness=smoothness,
            strong_convexity=curvature,
            diameter=math.inf if unbounded else scale_of(problem, distance, cls.__name__),
            moment=moment,
            moment_order=order,
            second_moment=problem.second_moment,
            **inputs,
        )
        return Theory(plan.steps, plan.clip, plan.schedule.lr[0], plan.bound)

    @classmethod
    def _lr(cls, problem: Problem) -> float:
        (smoothness,) = problem.require("smoothness", by=cls.__name__)
        return 1.0 / smoothness

    @classmethod
    def _exchange_rate(cls, problem: Problem, n: int, dim: int, steps: int, rho: float, adjacency: str) -> float:
        if problem.strong_convexity is None or problem.smoothness is None:
            return exchange_rate_phase(n, dim, rho, adjacency)
        weights = strongly_convex_coefficients(
            strong_convexity=problem.strong_convexity, smoothness=problem.smoothness, steps=steps
        )
        return exchange_rate_strongly_convex(n, dim, steps, rho, weights.bias, weights.noise, adjacency)

    @classmethod
    def plan(
        cls,
        *,
        problem: Problem,
        n: int,
        budget: Budget,
        dim: int,
        sampling: str = "one-pass",
        batch_size: int | None = None,
        epochs: float | None = None,
        steps: int | None = None,
        clip: float | Pilot | None = None,
        lr: float | None = None,
        distance: float | None = None,
        mode: str = "tight",
        allow_infinite_variance: bool = False,
    ) -> HeavyTailedPlan:
        """Returns the public numbers of a run, before anything is spent.

        Args:
            problem: smoothness; strong_convexity, moment and moment_order for the theorem, which covers one pass.
            n: public number of records.
            budget: what the run may spend.
            dim: number of parameters.
            sampling: "one-pass"; or many passes by "poisson", "fixed" or "full" batches.
            batch_size: of "poisson" and "fixed"; default 512, at most n.
            epochs: passes of "poisson" and "fixed"; default 10.
            steps: number of steps; default by theory, else 5 in one pass, 30 of "full" batches.
            clip: default by theory (one pass); a number, chosen without looking at the data; or a `Pilot` group.
            lr: default by theory, or 1/smoothness.
            distance: bound on |w_0 - w*|.
            mode: "tight" or "paper", see `theory.heavy_tailed.strongly_convex_plan`.
            allow_infinite_variance: admits moment_order < 2.
        """
        if check.choice(_SAMPLINGS, sampling=sampling) == "one-pass":
            if epochs is not None or batch_size is not None:
                raise ValueError(
                    "epochs and batch_size must not be given for one pass: give steps=, the batches of it "
                    f"(got {epochs} and {batch_size})"
                )
            return super().plan(
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
        if clip is None:
            raise MissingConstantError(
                "ClippedSGD needs a clip for many passes, which no theorem chooses: clip=dp.Pilot(), or a number"
            )
        if steps is not None and epochs is not None:
            raise ValueError(f"steps and epochs must not be given both (got {steps} and {epochs})")
        pilot, left = None, check.positive_count(n=n)
        if isinstance(clip, Pilot):
            left -= clip.records(n)
            rho = zcdp_of(release_noise(budget), budget.adjacency)
            pilot = clip.plan(n, budget, exchange_rate_phase(left, dim, rho, budget.adjacency))
        if sampling == "full" and batch_size is not None:
            raise ValueError(f"batch_size must not be given for full batches (got {batch_size})")
        if sampling == "full":
            design: Full | Poisson | Fixed = Full(left)
        else:
            design = _DESIGNS[sampling](min(_DEFAULT_BATCH, left) if batch_size is None else batch_size, left)
        if steps is None:
            default = _FULL_STEPS if sampling == "full" else _DEFAULT_EPOCHS
            steps = epoch_steps(design, default if epochs is None else epochs)
        noise = calibrate_noise(budget.epsilon, budget.delta, design=design, steps=steps, adjacency=budget.adjacency)
        checks.warn_if_buried(noise / design.batch_size / math.sqrt(steps), n=n, dim=dim, epsilon=budget.epsilon)
        return HeavyTailedPlan(
            n=n,
            dim=dim,
            design=design,
            steps=steps,
            lr=check.positive(lr=cls._lr(problem) if lr is None else lr),
            clip=None if isinstance(clip, Pilot) else check.positive(clip=clip),
            noise_multiplier=noise,
            adjacency=budget.adjacency,
            epsilon=budget.epsilon,
            delta=budget.delta,
            pilot=pilot,
        )

    @classmethod
    def calibrated(
        cls,
        params: Any,
        *,
        problem: Problem,
        n: int,
        budget: Budget,
        sampling: str = "one-pass",
        batch_size: int | None = None,
        epochs: float | None = None,
        steps: int | None = None,
        clip: float | Pilot | None = None,
        lr: float | None = None,
        distance: float | None = None,
        mode: str = "tight",
        allow_infinite_variance: bool = False,
        average: str | None = None,
        rule: UpdateRule | None = None,
        prox: Prox | None = None,
        reg: float = 0.0,
        accountant: Accountant | None = None,
        generator: torch.Generator | None = None,
        secure: str | None = None,
    ) -> ClippedSGD:
        """Returns an optimizer that spends the budget in the planned steps; see `plan` and the class.

        `average` defaults to the weights of Algorithm 6 where the problem promises smoothness and strong convexity and
        batches are used once; else to "last".
        """
        params, dim = dimension(params)
        plan = cls.plan(
            problem=problem,
            n=n,
            budget=budget,
            dim=dim,
            sampling=sampling,
            batch_size=batch_size,
            epochs=epochs,
            steps=steps,
            clip=clip,
            lr=lr,
            distance=distance,
            mode=mode,
            allow_infinite_variance=allow_infinite_variance,
        )
        if rule is None and average is None and sampling == "one-pass" and problem.strong_convexity:
            (smoothness,) = problem.require("smoothness", by=cls.__name__)
            made = averaging_schedule(
                strong_convexity=problem.strong_convexity, inverse_lr_cap=smoothness, steps=plan.steps
            )
            rule = ScheduledSGD([step / made.lr[0] for step in made.lr], made.weights)
            if lr is None:
                plan = replace(plan, lr=made.lr[0])
        if accountant is not None:
            checks.require_budget(accountant, budget)
        if prox is None and math.isfinite(problem.radius):
            prox = Ball(problem.radius)
        return cls(
            params,
            plan.lr,
            **plan.mechanism(),
            average="last" if average is None else average,
            rule=rule,
            prox=prox,
            reg=reg,
            accountant=Accountant(budget) if accountant is None else accountant,
            generator=generator,
            secure=secure,
        )
