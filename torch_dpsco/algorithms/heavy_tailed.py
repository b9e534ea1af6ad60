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

How plans of clipped steps choose what is not given, by a theorem of paper 2 or by the step rule.

A `_Task` says of one optimizer which words of sampling it knows, and what one pass costs in noise, and runs the stages
of `step.chooser`.
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch_dpsco import _validate as check
from torch_dpsco.accounting.budgets import Budget
from torch_dpsco.accounting.designs import (
    Assigned,
    Design,
    Disjoint,
    Full,
)
from torch_dpsco.accounting.events import ADD_REMOVE, Adjacency
from torch_dpsco.algorithms.heavy_plan import (
    AcceleratedPlan,
    ClippedPlan,
    Pilot,
    ProximalPlan,
    after_pilot,
    scale_of,
    zcdp_of,
)
from torch_dpsco.algorithms.heavy_tailed_numbers import (
    AveragingSchedule,
    OnePass,
    OnePassPlan,
    PilotPlan,
    accelerated_factor,
    accelerated_plan,
    averaging_schedule,
    exchange_rate_mean,
    exchange_rate_phase,
    proximal_pl_plan,
    strongly_convex_coefficients,
    strongly_convex_plan,
)
from torch_dpsco.errors import AdjacencyError, MissingConstantError, UtilityWarning
from torch_dpsco.problem import Pace, Problem
from torch_dpsco.step.chooser import (
    SAMPLING,
    USUAL_EPOCHS,
    Draws,
    Scale,
    Task,
    agreed,
    choose_design,
    choose_noise,
    choose_pace,
    dimension,
    noise_of_pass,
    numbers_of_steps,
    one_pass,
    public_size,
    release_noise,
    require_planned,
    scale_of_clip,
    warn_if_buried,
)
from torch_dpsco.step.plan import PlannedOptimizer

_PASS = ("shuffled", "assigned")  # words of one pass
_FEW_STEPS = 5  # of one pass, where no theorem chooses: worst-case bounds choose too many
_MORE_STEPS = 64  # of one pass whose draws are secret, in place of these
_FULL_STEPS = 30


def plan_by_theorem(  # noqa: D417 (cls is bound)
    cls: Any,
    *,
    problem: Problem | None = None,
    n: int | None = None,
    epsilon: float | None = None,
    delta: float | None = None,
    budget: Budget | None = None,
    noise_multiplier: float | None = None,
    clip: float | Pilot | None = None,
    steps: int | None = None,
    epochs: float | None = None,
    batch_size: int | None = None,
    lr: float | None = None,
    sampling: str | Design | None = None,
    average: str | None = None,
    adjacency: Adjacency | None = None,
    dim: Any = None,
    distance: float | None = None,
    secure: str | None = None,
) -> ClippedPlan:
    """Returns the public numbers of a run, before anything is spent.

    Args:
        problem: promised constants: moment, moment_order (and second_moment) of the gradient norm choose clip,
            steps and step size by theory; smoothness (and more, see the class) chooses the step size in any case.
        n: public number of records (a reference under add_remove); that of a design.
        epsilon: of a budget, beside delta, in place of `budget`.
        delta: of a budget, beside epsilon.
        budget: what the run may spend; the noise is chosen for it unless it is given.
        noise_multiplier: z >= 0, noise std on the sum of rows over the clip; 0 is not private.
        clip: default by theory (one pass); a number, chosen without looking at the data; or a `Pilot` group that
            chooses.
        steps: number of steps, without that of a pilot; default by theory, or by the step rule
            (docs/proofs/steps.md) where a smoothness is promised, the noise is chosen and lr is not given; else 5
            in one pass (64 if it is secret), 30 of "full" batches.
        epochs: passes over the data on average, in place of steps; default 20 in many passes by the step rule; else
            10 of other batches than "full", without limit for noise of your own.
        batch_size: public divisor; default such that the steps are one pass, or those passes; without the step rule
            512 (at most n) in many passes.
        lr: step size, without momentum; default by theory, or by the step rule, or the largest one of the theorem.
        sampling: one pass, "assigned" (default; each record draws its batch secretly: `Assigned`) or "shuffled",
            with several times the noise (default under replace_one and zero_out where the theorem chooses the clip,
            since its bound is for these batches). `ClippedSGD` makes many passes too:
            "poisson" (their default; all records where a batch holds them), "allocated" (passes like "assigned", at
            the price of Poisson), "fixed", "full", or "shuffled" with epochs > 1. Or a design, as
            dp.Poisson(batch_size, n).
        average: which iterates are the answer, "last" (default), "uniform" or "weighted" (default of a step rule
            with momentum). In one pass of
            `ClippedSGD` the default is the weights of the theorem where the problem promises strong_convexity;
            `AcceleratedSGD` has an answer of its own.
        adjacency: default the budget's, or "zero_out".
        dim: number of parameters, or the model; needed where moments are promised, and by pilots.
        distance: bound on |w_0 - w*|; default the diameter of the problem's ball, which the bound on the risk of
            AcceleratedSGD wants (docs/proofs/heavy_tailed.md#accelerated-steps).
        secure: "exact" for noise in integers on a public grid, see docs/performance.md for its cost.

    Raises:
        MissingConstantError: a promise is missing; says which, and how to do without.
        AdjacencyError: batches cut by position, under add_remove.
        ValueError: an argument is out of range.
    """
    budget, adjacency = agreed(budget, adjacency, epsilon, delta)
    n = public_size(n, sampling)
    task: _Task = cls.task(
        problem=problem or Problem(),
        n=_records_that_train(n, sampling, clip),
        budget=budget,
        noise_multiplier=noise_multiplier,
        clip=clip,
        steps=steps,
        epochs=epochs,
        batch_size=batch_size,
        lr=lr,
        sampling=sampling,
        average=average,
        adjacency=adjacency,
        dim=dimension(dim),
        distance=distance,
        total=n,
    )
    return replace(task, sampling=task.usual_sampling()).plan(cls.plans, secure)


@dataclass(frozen=True)
class _Chosen:
    """What comes out of the stages.

    Args:
        draws: how the batches of the steps are drawn, without that of a pilot.
        noise: multiplier.
        theory: what the theorem chose; None where it did not.
        averaging: its step sizes and weights.
        pace: by the step rule.
    """

    draws: Draws
    noise: float
    theory: OnePassPlan | None = None
    averaging: AveragingSchedule | None = None
    pace: Pace | None = None


@dataclass(frozen=True, kw_only=True)
class _Task(Task, ABC):
    """What a plan is asked for, as in `plan_by_theorem`, and what a theorem about clipped means chooses of it.

    Args:
        n: records that train.
        clip: a number, or a pilot that chooses it.
        total: records, those of a pilot included.
    """

    clip: float | Pilot | None
    total: int

    by: ClassVar[str]  # name of the optimizer, for messages
    words: ClassVar[tuple[str, ...]] = _PASS
    needs: ClassVar[tuple[str, ...]] = ()  # beside moments and smoothness
    most: ClassVar[float]  # step sizes are admitted up to 1 / (most * smoothness), the default
    momentum: ClassVar[bool | None] = None  # whether the step rule may take it; None for no rule

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.goal is not None:
            require_planned(self.goal)

    # -- what the theorem says ----------------------------------------------------------------------------------------

    @abstractmethod
    def chosen(self, data: OnePass, given: dict[str, Any]) -> OnePassPlan:
        """Returns what the theorem chooses.

        Args:
            data: records, privacy and moments.
            given: the other constants that the theorem needs, and steps and clip where they are given.
        """

    @abstractmethod
    def noise_factor(self, steps: int) -> float | None:
        """Returns what a unit of clip costs in one pass, over `exchange_rate_mean`; None for that of many passes."""

    def averaging(self, steps: int) -> AveragingSchedule | None:
        """Returns step sizes and weights for one pass; None for constant steps."""
        return None

    @property
    def largest_lr(self) -> float:
        """The largest step size, where the noise is not known in advance."""
        (smoothness,) = self.problem.require("smoothness", by=self.by)
        return 1.0 / (self.most * smoothness)

    @property
    def scale(self) -> Scale:
        """What the step rule measures by."""
        clip = None if isinstance(self.clip, Pilot) else self.clip
        return scale_of_clip(self.problem, clip, self.distance, self.dim, self.by)

    @property
    def follows_rule(self) -> bool:
        """Whether the step rule takes what no theorem chooses."""
        return self.momentum is not None and self.lr is None and self.goal is not None

    # -- how often, and how batches are drawn -------------------------------------------------------------------------

    def usual_sampling(self) -> str | Design | None:
        """Returns how batches are drawn: the word of one pass where none is given; None for batches of any number."""
        if self.sampling:
            return self.sampling
        if self.adjacency != ADD_REMOVE and self.clip is None:
            return "shuffled"  # what the bound of the theorem is for
        free = self.steps is None or self.batch_size is None
        once = self.epochs in (None, 1) and free
        return "assigned" if once or self.words == _PASS else None

    @property
    def is_secret(self) -> bool:
        """Whether each record draws its batch by itself, and that is charged as a whole pass."""
        design = self.sampling
        return design == "assigned" or (isinstance(design, Assigned) and design.amplification)

    def is_one_pass(self) -> bool:
        """Returns whether each record is used once; raises ValueError where that must be so and is not."""
        self.require_one_length()
        only = self.words == _PASS
        sampling = self.sampling
        if isinstance(sampling, Design):
            once = sampling.one_pass
            if isinstance(sampling, Assigned) and sampling.passes > 1 and only:
                raise ValueError(f"passes must be 1 for {self.by} (got {sampling})")
        else:
            check.choice((*self.words, None), sampling=sampling)
            if sampling == "shuffled" and self.adjacency == ADD_REMOVE:
                raise AdjacencyError(
                    "sampling must be 'assigned', 'poisson' or 'full' under add_remove (got"
                    " 'shuffled'): removing a record would shift the batches of all later ones"
                )
            once = sampling == "assigned" or (
                sampling == "shuffled" and self.epochs in (None, 1)
            )
        if self.epochs not in (None, 1) and (sampling == "assigned" or only):
            more = ", or sampling 'allocated' for several" if "allocated" in self.words else ""
            raise ValueError(f"epochs must be 1 for one pass{more} (got {self.epochs:g})")
        if not once and only:
            raise ValueError(
                f"sampling must be one pass over n records for {self.by}: 'shuffled', 'assigned',"
                f" or a design of one pass (got {sampling!r})"
            )
        return once

    def plan(self, kind: type[ClippedPlan], secure: str | None) -> ClippedPlan:
        """Returns the plan, stage by stage."""
        once = self.is_one_pass()
        chosen = self._in_one_pass() if once else self._in_passes()
        averaging = chosen.averaging
        pace = chosen.pace or Pace(self._lr(chosen))
        warn_if_buried(self.goal, chosen.draws, chosen.noise, self.total, self.dim)
        clip = self.clip if chosen.theory is None else chosen.theory.clip
        draws = chosen.draws
        pilot: PilotPlan | None = None
        if isinstance(clip, Pilot):
            pilot, draws = self._piloted(clip, chosen, once)
            clip = None
        return kind(
            budget=self.budget,
            adjacency=self.adjacency,
            design=draws.design,
            steps=draws.steps,
            lr=pace.lr,
            momentum=pace.momentum,
            radius=self.problem.radius,
            average=self._average(chosen) or kind.average,
            secure=secure,
            clip=clip,
            noise_multiplier=chosen.noise,
            pilot=pilot,
            factors=()
            if averaging is None
            else tuple(lr / averaging.lr[0] for lr in averaging.lr),
            weights=() if averaging is None else averaging.weights,
            risk_bound=self._risk_bound(chosen),
        )

    # -- one pass: the theorem, or the step rule, or a few steps ------------------------------------------------------

    def _in_one_pass(self) -> _Chosen:
        n = self.n
        noise = choose_noise(self.budget, Full(1), 1, self)  # of a mean by itself
        asked = self.steps
        sized = isinstance(self.sampling, Design) or self.batch_size is not None
        if asked is None and sized:
            asked = self._one_pass(1, secret=False).steps_per_epoch
        theory = self._tried(asked, noise)
        scale: Scale | None = None
        if theory is None and self.follows_rule and not self.problem.strong_convexity:
            scale = self.scale
        steps = theory.steps if theory is not None else asked
        if steps is None:
            steps = self._steps_of_pass(scale)
        if check.positive_count(steps=steps) > n:
            raise ValueError(f"steps must be <= {n}, the records that train (got {steps})")
        design = self._one_pass(steps, self.is_secret)
        counted = replace(self, steps=steps, epochs=None)
        steps = counted.steps_in(design, once=self.words == _PASS) or steps
        if self.is_secret:
            noise = choose_noise(self.budget, design, steps, self)
            theory = theory and self._best([(steps, noise)])
        draws = Draws(design, steps)
        averaging = self.averaging(steps) if self.average is None else None
        pace: Pace | None = None
        if scale is not None and averaging is None:
            pace = choose_pace(scale, draws, noise)
            if not self.momentum:
                pace = Pace(min(self.largest_lr, pace.lr / (1.0 - pace.momentum)))
        return _Chosen(draws, noise, theory, averaging, pace)

    def _one_pass(self, steps: int, secret: bool) -> Design:
        """Returns the design of one pass, in batches of the given size or else in so many."""
        if isinstance(self.sampling, Design):
            return self.sampled()
        size = self.n // steps if self.batch_size is None else self.batch_size
        if self.sampling == "assigned":  # all records to these batches
            parts = steps if self.batch_size is None else None
            return Assigned(size, self.n, parts, amplification=secret)
        return Disjoint(size, self.n)

    def _steps_of_pass(self, scale: Scale | None) -> int:
        if scale is not None and self.goal is not None:
            return one_pass(scale, self.n, self.goal, bool(self.momentum), self.is_secret)
        return min(self.n, _MORE_STEPS if self.is_secret else _FEW_STEPS)

    def _tried(self, steps: int | None, noise: float) -> OnePassPlan | None:
        """Returns what the theorem chooses; None where promises are missing, or a clip is chosen otherwise."""
        if not noise or isinstance(self.clip, Pilot):
            return None
        if not self.is_secret or self.goal is None or steps is not None:
            return self._best([(steps, noise)])
        numbers = numbers_of_steps(self.n)
        return self._best([(number, noise_of_pass(self.goal, number)) for number in numbers])

    def _best(self, tries: Sequence[tuple[int | None, float]]) -> OnePassPlan | None:
        """Returns what the theorem chooses at the number of steps, beside its noise, of least bound."""
        with warnings.catch_warnings():
            if len(tries) > 1:  # what is said of those that are not taken
                warnings.simplefilter("ignore", UtilityWarning)
            made = [self._by_theorem(steps, noise) for steps, noise in tries]
        plans = [plan for plan in made if plan is not None]
        return min(plans, key=lambda plan: plan.bound, default=None)

    def _by_theorem(self, steps: int | None, noise: float) -> OnePassPlan | None:
        problem = self.problem
        if problem.moment is not None and self.dim is None:
            raise MissingConstantError(
                "dim must be given where moments are promised: the model, or its parameters"
            )
        needs = ("smoothness", *self.needs)
        try:
            moment, order, *constants = problem.require(
                "moment", "moment_order", *needs, by=self.by
            )
            assert self.dim is not None  # with a moment
            data = OnePass(
                self.n,
                self.dim,
                zcdp_of(noise, self.adjacency),
                moment,
                order,
                problem.second_moment,
                self.adjacency,
            )
            given = dict(zip(needs, constants, strict=True))
            return self.chosen(data, given | {"steps": steps, "clip": self.clip})
        except MissingConstantError:
            if self.clip is None:
                raise
            return None

    # -- many passes: the step rule, or usual numbers -----------------------------------------------------------------

    def _in_passes(self) -> _Chosen:
        if self.clip is None:
            raise MissingConstantError(
                f"{self.by} needs a clip for many passes, which no theorem chooses:"
                " clip=dp.Pilot(), or a number; for a net: dp.NetSGD.plan(n=, budget=, dim=model)"
            )
        goal = self.goal
        if self.follows_rule:
            draws = choose_design(self.scale, goal, self)
            noise = choose_noise(goal, *draws, self)
            return _Chosen(draws, noise, pace=choose_pace(self.scale, draws, noise))
        given = self.sized()
        passes: int | None = None
        if goal is not None or isinstance(self.clip, Pilot):
            full = self.sampling == "full" or isinstance(self.sampling, Full)
            passes = _FULL_STEPS if full else USUAL_EPOCHS
        draws = choose_design(None, goal, given, passes)
        return _Chosen(draws, choose_noise(goal, *draws, given))

    # -- what both share ----------------------------------------------------------------------------------------------

    def _lr(self, chosen: _Chosen) -> float:
        """Returns the step size without the step rule."""
        if self.lr is not None:
            return self.lr
        if chosen.theory is not None:
            return chosen.theory.lr
        return self.largest_lr if chosen.averaging is None else chosen.averaging.lr[0]

    def _average(self, chosen: _Chosen) -> str | None:
        if self.average is not None:
            return self.average
        if chosen.pace is not None:
            return "weighted" if chosen.pace.momentum else "last"
        return None if chosen.averaging is None else "weighted"

    def _risk_bound(self, chosen: _Chosen) -> float | None:
        """Returns the theorem's bound, where the run is the theorem's."""
        theory = chosen.theory
        if theory is None or self.lr is not None or self.average is not None:
            return None
        own = Disjoint(self.n // theory.steps, self.n)
        return theory.bound if chosen.draws.design == own else None

    def _piloted(self, clip: Pilot, chosen: _Chosen, once: bool) -> tuple[PilotPlan, Draws]:
        """Returns the pilot that chooses the clip, and the draws of it and the others."""
        design, steps = chosen.draws
        budget = self.budget
        if budget is None or steps is None or self.dim is None:
            raise ValueError(
                f"budget and dim must be given for a pilot, or a number as clip (got {budget} and"
                f" {self.dim})"
            )
        noise = chosen.noise if self.is_secret and chosen.noise else release_noise(budget)
        rho = zcdp_of(noise, self.adjacency)
        factor = self.noise_factor(steps) if once else None
        if factor is None:
            rate = exchange_rate_phase(self.n, self.dim, rho, self.adjacency)
        else:
            rate = factor * exchange_rate_mean(self.n // steps, self.dim, rho, self.adjacency)
        pilot = clip.plan(self.total, budget, rate)
        parts = after_pilot(pilot.size, design, steps, self.total, self.adjacency)
        return pilot, Draws(parts, steps + 1)


def _records_that_train(
    n: int, sampling: str | Design | None, clip: float | Pilot | None
) -> int:
    """Returns the number of records that a pilot leaves, all without one."""
    if not isinstance(clip, Pilot):
        return n
    if isinstance(sampling, Design):
        raise ValueError(
            f"sampling must be a word, for the records that a pilot leaves (got {sampling})"
        )
    return check.positive_count(n=n - clip.records(n))


class _Averaged(_Task):
    """Strongly convex losses: step sizes and weights of an average."""

    by = "ClippedSGD"
    words = (*SAMPLING, "full")
    needs = ("strong_convexity",)
    most = 1.0
    momentum = True

    def chosen(self, data: OnePass, given: dict[str, Any]) -> OnePassPlan:
        """Returns what the theorem chooses."""
        unbounded = self.distance is None and math.isinf(self.problem.radius)
        diameter = math.inf if unbounded else scale_of(self.problem, self.distance, self.by)
        return strongly_convex_plan(data, diameter=diameter, **given)

    def noise_factor(self, steps: int) -> float | None:
        """Returns what a unit of clip costs in one pass, over `exchange_rate_mean`."""
        problem = self.problem
        if problem.strong_convexity is None or problem.smoothness is None:
            return None
        weights = strongly_convex_coefficients(
            strong_convexity=problem.strong_convexity, smoothness=problem.smoothness, steps=steps
        )
        return math.sqrt(weights.noise / weights.bias)

    def averaging(self, steps: int) -> AveragingSchedule | None:
        """Returns step sizes and weights of an average."""
        if not self.problem.strong_convexity:
            return None
        names = ("strong_convexity", "smoothness")
        curves = dict(zip(names, self.problem.require(*names, by=self.by), strict=True))
        return averaging_schedule(**curves, steps=steps)


class _Accelerated(_Task):
    """Smooth convex losses: accelerated steps."""

    by = "AcceleratedSGD"
    most = 4.0

    def chosen(self, data: OnePass, given: dict[str, Any]) -> OnePassPlan:
        """Returns what the theorem chooses."""
        diameter = scale_of(self.problem, self.distance, self.by)
        return accelerated_plan(data, diameter=diameter, **given)

    def noise_factor(self, steps: int) -> float | None:
        """Returns what a unit of clip costs in one pass, over `exchange_rate_mean`."""
        return accelerated_factor(steps)


class _Proximal(_Task):
    """Proximal-PL objectives: constant steps."""

    by = "ProximalSGD"
    needs = ("pl_constant",)
    most = 2.0
    momentum = False

    def chosen(self, data: OnePass, given: dict[str, Any]) -> OnePassPlan:
        """Returns what the theorem chooses."""
        # smoothness and convexity of the path: F(w_0) - F* <= r_1 D
        gap = data.moment * scale_of(self.problem, self.distance, self.by)
        return proximal_pl_plan(data, initial_gap=gap, **given)

    def noise_factor(self, steps: int) -> float | None:
        """Returns what a unit of clip costs in one pass, over `exchange_rate_mean`."""
        return math.sqrt(2.0 / 3.0)


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
    task = _Averaged
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
    task = _Accelerated
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
    task = _Proximal
    plan = classmethod(plan_by_theorem)
