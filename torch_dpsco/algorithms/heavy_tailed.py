"""ClippedSGD, AcceleratedSGD, ProximalSGD: clipped means for heavy-tailed gradients.

ClippedSGD: SGD on clipped means, in one pass with the weights of strong convexity, or in many.

    w <- Proj( w - lr_t mean_t );   the answer is a weighted average of the iterates AFTER their steps, or the last one

Differs from the paper (Lowy and Razaviyayn 2023, Algorithms 6 and 7) in: 1. the weights are linear: with the published
squares the bound does not telescope; 2. no step is needed that "returns w_t if s_t < 0", which nothing can test
privately; 3. explicit constants; 4. batches may also be drawn many times (Poisson, fixed, full), which the theorem does
not cover and which often does better at moderate n.

One-pass optimizers for heavy-tailed gradients: each record is used once.

They are put together from an oracle (clipped means by default), a rule, and batches: of one random permutation, all of
which together cost what one does; or "assigned", the default where a clip is given, where each record draws its batch
secretly, at less noise.
Differs from the paper (Lowy and Razaviyayn 2023) in: 1. any budget (epsilon, delta) is met by the exact Gaussian curve,
or the law of the pass, where the paper's "epsilon" is sqrt(2 rho); 2. explicit, proved constants
(`algorithms.heavy_tailed_numbers`); 3. the clip may come from a private pilot group; 4. under add_remove each record
is assigned to a batch by itself, since a record more or less would shift the batches of a permutation.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

from torch_dpsco.algorithms.clip_numbers import (
    exchange_rate_accelerated,
    exchange_rate_phase,
    exchange_rate_proximal_pl,
    exchange_rate_strongly_convex,
)
from torch_dpsco.algorithms.heavy_chooser import Theorem, plan_by_theorem
from torch_dpsco.algorithms.heavy_plan import (
    AcceleratedPlan,
    ClippedPlan,
    ProximalPlan,
    scale_of,
)
from torch_dpsco.algorithms.heavy_tailed_numbers import (
    AveragingSchedule,
    OnePass,
    OnePassPlan,
    accelerated_plan,
    averaging_schedule,
    proximal_pl_plan,
    strongly_convex_coefficients,
    strongly_convex_plan,
)
from torch_dpsco.problem import Problem
from torch_dpsco.step.chooser import SAMPLING
from torch_dpsco.step.planned import PlannedOptimizer


class _Averaged(Theorem):
    """Strongly convex losses: step sizes and weights of an average."""

    words: ClassVar[tuple[str, ...]] = (*SAMPLING, "full")
    needs = ("strong_convexity",)
    most = 1.0
    momentum = True

    def chosen(
        self, data: OnePass, given: dict[str, Any], problem: Problem, distance: float | None
    ) -> OnePassPlan:
        """Returns what the theorem chooses."""
        unbounded = distance is None and math.isinf(problem.radius)
        diameter = math.inf if unbounded else scale_of(problem, distance, self.by)
        return strongly_convex_plan(data, diameter=diameter, **given)

    def exchange_rate(
        self, problem: Problem, n: int, dim: int, steps: int, rho: float, adjacency: str
    ) -> float:
        """Returns what a unit of clip costs in noise, in one pass."""
        if problem.strong_convexity is None or problem.smoothness is None:
            return exchange_rate_phase(n, dim, rho, adjacency)
        weights = strongly_convex_coefficients(
            strong_convexity=problem.strong_convexity, smoothness=problem.smoothness, steps=steps
        )
        return exchange_rate_strongly_convex(
            n, dim, steps, rho, weights.bias, weights.noise, adjacency
        )

    def averaging(self, problem: Problem, steps: int) -> AveragingSchedule | None:
        """Returns step sizes and weights of an average."""
        if not problem.strong_convexity:
            return None
        (smoothness,) = problem.require("smoothness", by=self.by)
        return averaging_schedule(
            strong_convexity=problem.strong_convexity, inverse_lr_cap=smoothness, steps=steps
        )


class _Accelerated(Theorem):
    """Smooth convex losses: accelerated steps."""

    most = 4.0

    def chosen(
        self, data: OnePass, given: dict[str, Any], problem: Problem, distance: float | None
    ) -> OnePassPlan:
        """Returns what the theorem chooses."""
        return accelerated_plan(data, diameter=scale_of(problem, distance, self.by), **given)

    def exchange_rate(
        self, problem: Problem, n: int, dim: int, steps: int, rho: float, adjacency: str
    ) -> float:
        """Returns what a unit of clip costs in noise, in one pass."""
        return exchange_rate_accelerated(n, dim, steps, rho, adjacency)


class _Proximal(Theorem):
    """Proximal-PL objectives: constant steps."""

    needs = ("pl_constant",)
    most = 2.0
    momentum = False

    def chosen(
        self, data: OnePass, given: dict[str, Any], problem: Problem, distance: float | None
    ) -> OnePassPlan:
        """Returns what the theorem chooses."""
        # smoothness and convexity of the path: F(w_0) - F* <= r_1 D
        gap = data.moment * scale_of(problem, distance, self.by)
        return proximal_pl_plan(data, initial_gap=gap, **given)

    def exchange_rate(
        self, problem: Problem, n: int, dim: int, steps: int, rho: float, adjacency: str
    ) -> float:
        """Returns what a unit of clip costs in noise, in one pass."""
        return exchange_rate_proximal_pl(n, dim, steps, rho, adjacency)


class ClippedSGD(PlannedOptimizer):
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
        That of the design: one unsampled Gaussian for a pass over disjoint batches, or one `RandomAllocation`;
        PoissonGaussian or WORGaussian per step with amplification. Unit: one row per record. Moments and curvature are
        not assumed: rows are clipped.
        Source: Lowy, Razaviyayn 2023, Theorem 11; docs/proofs/heavy_tailed.md#averaged-steps.

    Example:
        >>> import torch, torch_dpsco as dp
        >>> problem, budget = dp.Problem(smoothness=2.0, strong_convexity=0.5), dp.Budget(1.0, 1e-4)
        >>> plan = dp.ClippedSGD.plan(problem=problem, n=600, budget=budget, clip=2.0, steps=6)
        >>> plan.design, plan.weights[-1]
        (Assigned(batch_size=100, n=600, parts=6, amplification=True, passes=1), 10.0)
        >>> optimizer = dp.ClippedSGD(dp.attach(torch.nn.Linear(3, 1)).parameters(), plan)
        >>> optimizer.schedule.steps
        6
    """

    plans = ClippedPlan
    theorem = _Averaged("ClippedSGD")
    plan = classmethod(plan_by_theorem)


class AcceleratedSGD(PlannedOptimizer):
    """Accelerated one-pass SGD for smooth convex losses (AC-SA): Algorithms 2 and 5.

        inner <- Proj( inner - t lr mean_t ),   mean_t of gradients at the query, on batch t;   outer averages the inner

    Between steps the parameters hold the query, where gradients are taken; the last planned step installs `outer`.

    Args:
        params: parameters or groups; all of them count as one vector.
        plan: from `AcceleratedSGD.plan`; its lr is the factor of t in the step size, 1/(2 eta).
        rule: another update rule, which the theorem does not cover.
        prox: a projection: Ball, Box, Simplex; default that on the problem's ball.
        reg: lambda of (lambda/2)|w|^2.
        accountant: ledger to charge; default a new one with the plan's budget.
        generator: noise generator of your own (warns).

    Raises:
        ValueError: a penalty as prox, for which the theorem does not hold (see `ProximalSGD`).

    Guarantee:
        Adjacency: replace_one and zero_out with Disjoint, all three with Assigned. Unit: one row per record. Event:
        with Disjoint a batch is one unsampled Gaussian, and batches are parts of one partition, so that all of them
        cost what one does; with Assigned the pass is one `RandomAllocation`, after a pilot an event of its part.
        Assumes: batches of the optimizer's own loader, rows that do not couple records. Nothing about moments is
        assumed: rows are clipped. Source: Lowy, Razaviyayn 2023, Theorem 9;
        docs/proofs/heavy_tailed.md#disjoint-parts.

    Example:
        >>> import torch, torch_dpsco as dp
        >>> model = dp.attach(torch.nn.Linear(3, 1))
        >>> data = torch.utils.data.TensorDataset(torch.randn(600, 3), torch.randn(600, 1))
        >>> problem = dp.losses.Squared().problem(bound_x=2.0, bound_y=5.0)
        >>> plan = dp.AcceleratedSGD.plan(problem=problem, n=600, budget=dp.Budget(1.0, 1e-4), clip=2.0, steps=4)
        >>> optimizer = dp.AcceleratedSGD(model.parameters(), plan)
        >>> for x, y in optimizer.loader(data):
        ...     optimizer.zero_grad()
        ...     dp.losses.Squared()(model(x), y).backward()
        ...     optimizer.step()
        >>> optimizer.steps, optimizer.report().epsilon <= 1.0
        (4, True)
    """

    plans = AcceleratedPlan
    theorem = _Accelerated("AcceleratedSGD")
    plan = classmethod(plan_by_theorem)


class ProximalSGD(PlannedOptimizer):
    """Proximal one-pass SGD for F0 + f1 with a data-independent penalty or constraint f1: Algorithms 8 and 9.

        w <- prox_{lr f1}( w - lr mean_t )

    For proximal-PL objectives, which need not be convex. The answer is the last iterate.

    Args:
        params: parameters or groups; all of them count as one vector.
        plan: from `ProximalSGD.plan`; the theorem has lr 1/(2 smoothness).
        rule: another update rule, which the theorem does not cover.
        prox: f1: L1, ElasticNet, L2, Box, Ball, Simplex; it must not be chosen by looking at the data.
        reg: lambda of (lambda/2)|w|^2.
        accountant: ledger to charge; default a new one with the plan's budget.
        generator: noise generator of your own (warns).

    Guarantee:
        As `AcceleratedSGD`. Source: Lowy, Razaviyayn 2023, Theorem 20; docs/proofs/heavy_tailed.md#proximal-steps.

    Example:
        >>> import torch, torch_dpsco as dp
        >>> model = dp.attach(torch.nn.Linear(3, 1))
        >>> plan = dp.ProximalSGD.plan(n=600, lr=0.2, clip=1.0, noise_multiplier=8.0, batch_size=100)
        >>> optimizer = dp.ProximalSGD(model.parameters(), plan, prox=dp.prox.L1(0.1))
        >>> optimizer.schedule.steps
        6
    """

    plans = ProximalPlan
    theorem = _Proximal("ProximalSGD")
    plan = classmethod(plan_by_theorem)
