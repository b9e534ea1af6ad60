"""ClippedSGD: SGD on clipped means, in one pass with the weights of strong convexity, or in many.

    w <- Proj( w - lr_t mean_t );   the answer is a weighted average of the iterates AFTER their steps, or the last one

Differs from the paper (Lowy and Razaviyayn 2023, Algorithms 6 and 7) in: 1. the weights are linear: with the published
squares the bound does not telescope; 2. no step is needed that "returns w_t if s_t < 0", which nothing can test
privately; 3. explicit constants; 4. batches may also be drawn many times (Poisson, fixed, full), which the theorem does
not cover and which often does better at moderate n.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

from torch_dpsco.optim.heavy_base import HeavyTailed
from torch_dpsco.optim.heavy_plan import Theory, scale_of
from torch_dpsco.optim.planned import SAMPLING
from torch_dpsco.problem import Problem
from torch_dpsco.theory.clipping import exchange_rate_phase, exchange_rate_strongly_convex
from torch_dpsco.theory.heavy_averaged import AveragingSchedule
from torch_dpsco.theory.heavy_tailed import averaging_schedule, strongly_convex_coefficients, strongly_convex_plan


class ClippedSGD(HeavyTailed):
    """SGD on clipped means: one pass with Stich's weights, or many passes.

    Args:
        params: parameters or groups; all of them count as one vector.
        plan: from `ClippedSGD.plan`.
        rule: another update rule, e.g. `rules.ScheduledSGD`, `rules.TorchRule(torch.optim.Adam(...))`.
        prox: constraint or penalty; default the projection on the problem's ball.
        reg: lambda of (lambda/2)|w|^2, added after clip and noise.
        accountant: ledger to charge; default a new one with the plan's budget.
        generator: noise generator of your own (warns).

    Guarantee:
        That of the design: one unsampled Gaussian for a pass over disjoint batches; PoissonGaussian or WORGaussian per
        step with amplification. Unit: one row per record. Moments and curvature are not assumed: rows are clipped.
        Source: Lowy, Razaviyayn 2023, Theorem 11; docs/proofs/heavy_tailed.md#averaged-steps.

    Example:
        >>> import torch, torch_dpsco as dp
        >>> problem, budget = dp.Problem(smoothness=2.0, strong_convexity=0.5), dp.Budget(1.0, 1e-4)
        >>> plan = dp.ClippedSGD.plan(problem=problem, n=600, budget=budget, clip=2.0, steps=6)
        >>> plan.design, plan.weights[-1]
        (Disjoint(batch_size=100, n=600), 10.0)
        >>> optimizer = dp.ClippedSGD(dp.attach(torch.nn.Linear(3, 1)).parameters(), plan)
        >>> optimizer.schedule.steps
        6
    """

    words: ClassVar[tuple[str, ...]] = (*SAMPLING, "full")

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
    def _averaging(cls, problem: Problem, steps: int) -> AveragingSchedule | None:
        if not problem.strong_convexity:
            return None
        (smoothness,) = problem.require("smoothness", by=cls.__name__)
        return averaging_schedule(strong_convexity=problem.strong_convexity, inverse_lr_cap=smoothness, steps=steps)
