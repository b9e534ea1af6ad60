"""Plans for heavy-tailed gradients: public numbers, and how they are chosen."""

from __future__ import annotations

import math
import warnings
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch_dpsco import _validate as check
from torch_dpsco.accounting.budgets import Budget
from torch_dpsco.accounting.designs import (
    Assigned,
    AssignedParts,
    Design,
    Disjoint,
    Fixed,
    Full,
    Parts,
    Poisson,
    Undeclared,
)
from torch_dpsco.accounting.events import ADD_REMOVE, CLIP_UNITS, Adjacency
from torch_dpsco.algorithms.clip_numbers import exchange_rate_phase
from torch_dpsco.algorithms.heavy_tailed_numbers import AveragingSchedule, OnePassPlan, check_mode
from torch_dpsco.algorithms.pilot import Pilot, PilotClipped, PilotPlan
from torch_dpsco.errors import AdjacencyError, MissingConstantError, UtilityWarning
from torch_dpsco.problem import Problem
from torch_dpsco.prox import Ball, Box, Identity, Prox, Simplex
from torch_dpsco.rules import AVERAGES, Accelerated, ScheduledSGD, UpdateRule
from torch_dpsco.schedule import Phase, Schedule
from torch_dpsco.step import checks
from torch_dpsco.step.chooser import (
    SAMPLING,
    Scale,
    agreed,
    dimension,
    drawn,
    noise_for,
    noise_of_pass,
    numbers_of_steps,
    one_pass,
    pace_of,
    release_noise,
    run_of,
    sampled,
    scale_of_clip,
    steps_of,
    usual_adjacency,
)
from torch_dpsco.step.clipped import Clipped
from torch_dpsco.step.oracle import MeanOracle
from torch_dpsco.step.pace import Pace
from torch_dpsco.step.phased import Phased
from torch_dpsco.step.planned import PlannedOptimizer, StepPlan, noise_on_mean, otherwise


@dataclass(frozen=True, kw_only=True)
class ClippedPlan(StepPlan):
    """Public numbers of a run on clipped means.

    Args:
        clip: C; None if a pilot chooses it.
        noise_multiplier: noise std on the sum of rows over C.
        pilot: group of records that chooses the clip in a first step, which `steps` counts; None for none.
        factors: step sizes over `lr`, one per step; empty where all are `lr`.
        weights: one per factor, of the iterates after their steps in the answer.
        risk_bound: on the expected excess risk, if a theorem chose steps and clip; else None. What it
            assumes: docs/proofs/heavy_tailed.md#defaults-without-a-theorem.
    """

    clip: float | None
    noise_multiplier: float
    pilot: PilotPlan | None = None
    factors: tuple[float, ...] = ()
    weights: tuple[float, ...] = ()
    risk_bound: float | None = None

    values: ClassVar[tuple[type, ...]] = (PilotPlan,)

    def __post_init__(self) -> None:
        super().__post_init__()
        check.nonnegative(noise_multiplier=self.noise_multiplier)
        if (self.clip is None) == (self.pilot is None):
            raise ValueError(
                f"clip or pilot must be given, and not both (got {self.clip} and {self.pilot})"
            )
        if self.clip is not None:
            check.positive(clip=self.clip)

    @property
    def training(self) -> Design:
        """How the batches are drawn that move the iterate."""
        return self.design.parts[-1][0] if isinstance(self.design, Parts) else self.design

    @property
    def batch_size(self) -> int:
        """Public divisor of the steps that move the iterate."""
        return self.training.batch_size

    @property
    def noise_std(self) -> float | None:
        """Std of the noise on the mean of a step; None if the clip is not known yet."""
        return None if self.clip is None else self.noise_multiplier * self.clip / self.batch_size

    def oracle(self, prox: Prox) -> MeanOracle:
        """Returns a new oracle with the plan's numbers."""
        if self.clip is not None:
            return Clipped(self.clip, self.noise_multiplier, self.batch_size)
        pilot, steps = self._piloted()
        first = pilot.oracle()
        return Phased(
            [(first, 1), (PilotClipped(first, self.noise_multiplier, self.batch_size), steps)]
        )

    def rule(self) -> UpdateRule:
        """Returns the update rule that is taken where none is given."""
        return ScheduledSGD(self.factors, self.weights) if self.factors else super().rule()

    def schedule(self) -> Schedule:
        """Returns the phases of the run: the pilot's step is one of its own."""
        return (
            super().schedule()
            if self.pilot is None
            else Schedule((Phase(1), Phase(self._piloted()[1])))
        )

    def _piloted(self) -> tuple[PilotPlan, int]:
        if self.pilot is None or self.steps is None:
            raise ValueError(
                f"steps must be given beside a pilot (got {self.steps} and {self.pilot})"
            )
        return self.pilot, self.steps - 1

    def otherwise(self) -> str:
        """Returns what other batches would cost; see `step.planned.otherwise`."""
        steps = self.steps if self.pilot is None else self._piloted()[1]
        return otherwise(self.budget, self.training, steps, self.noise_multiplier)

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yields what is to be said beside the promise."""
        yield from super().lines()
        share = self.noise_multiplier / self.batch_size
        if self.clip is None:
            yield (
                "noise",
                (
                    f"std {share:.2g} of the clip per coordinate of a mean gradient, whose norm is"
                    " at most the clip"
                ),
            )
        else:
            yield noise_on_mean(share, self.clip)
        if self.pilot is not None:
            yield "pilot", str(self.pilot)
        yield (
            "assumed",
            "rows do not depend on other records; nothing about moments, since rows are clipped",
        )
        if self.risk_bound is not None:
            yield (
                "expected",
                f"excess risk of the answer at most {self.risk_bound:.3g}, if the promises hold",
            )


@dataclass(frozen=True, kw_only=True)
class AcceleratedPlan(ClippedPlan):
    """Public numbers of a run of AcceleratedSGD."""

    average: str = "weighted"

    def __post_init__(self) -> None:
        super().__post_init__()
        check.choice(("weighted",), average=self.average)

    def oracle(self, prox: Prox) -> MeanOracle:
        """Returns a new oracle with the plan's numbers; raises ValueError for penalties."""
        if not isinstance(prox, (Ball, Box, Identity, Simplex)):
            raise ValueError(
                f"prox must be a projection (Ball, Box, Simplex) (got {prox}); ProximalSGD has"
                " penalties"
            )
        return super().oracle(prox)

    def rule(self) -> UpdateRule:
        """Returns the rule of two iterates."""
        return Accelerated()


@dataclass(frozen=True, kw_only=True)
class ProximalPlan(ClippedPlan):
    """Public numbers of a run of ProximalSGD."""


def after_pilot(size: int, design: Design, steps: int, n: int, adjacency: Adjacency) -> Parts:
    """Returns the design of a pilot's step and the others, on records of their own."""
    if adjacency == ADD_REMOVE:
        # PRIVACY: cut by position, a record less would move all later ones
        # (test_passes_after_a_pilot_are_those_of_a_part)
        if not isinstance(design, (Assigned, Full, Poisson)):
            raise AdjacencyError(
                f"sampling must be 'assigned', 'poisson' or 'full' after a pilot (got {design})"
            )
        return AssignedParts(((Full(size), 1), (design, steps)), n)
    if not isinstance(design, (Assigned, Disjoint, Fixed, Full, Poisson)):
        raise ValueError(
            "sampling must be 'shuffled' for one pass only after a pilot, or another one (got"
            f" {design})"
        )
    return Parts(((Full(size), 1), (design, steps)), n)


def zcdp_of(noise_multiplier: float, adjacency: Adjacency) -> float:
    """Returns rho of one unsampled clipped mean."""
    ratio = CLIP_UNITS[adjacency] / noise_multiplier
    return ratio * ratio / 2.0


def scale_of(problem: Problem, distance: float | None, by: str) -> float:
    """Returns D, a bound on the distance of start and answer: `distance`, or the diameter of the feasible set."""
    if distance is not None:
        return check.positive(distance=distance)
    if math.isinf(problem.radius):
        raise MissingConstantError(
            f"{by} needs a scale to plan from moments: give distance= (a bound on |w_0 - w*|), or"
            " promise a radius"
        )
    return 2.0 * problem.radius


_PASS = ("shuffled", "assigned")  # words of one pass
_FEW_STEPS = 5  # of one pass, where no theorem chooses: worst-case bounds choose too many
_MORE_STEPS = 64  # of one pass whose draws are secret, in place of these
_DEFAULT_BATCH = 512
_DEFAULT_EPOCHS = 10
_FULL_STEPS = 30


class HeavyTailed(PlannedOptimizer):
    """Base of the optimizers for heavy-tailed gradients, which have one theorem each and share a list of keywords."""

    plans: ClassVar[type[ClippedPlan]] = ClippedPlan
    words: ClassVar[tuple[str, ...]] = _PASS
    needs: ClassVar[tuple[str, ...]] = ()  # of the theorem, beside moments and smoothness
    most: ClassVar[
        float
    ]  # the theorem admits step sizes up to 1 / (most * smoothness), the default
    momentum: ClassVar[bool | None] = (
        None  # whether the step rule may take momentum; None where there is no such rule
    )

    @classmethod
    @abstractmethod
    def _theory(
        cls, promised: dict[str, Any], problem: Problem, distance: float | None
    ) -> OnePassPlan:
        """Returns what the theorem chooses.

        Args:
            promised: the constants that it needs, and what was given.
            problem: that promises them.
            distance: bound on |w_0 - w*|.
        """

    @classmethod
    @abstractmethod
    def _exchange_rate(
        cls, problem: Problem, n: int, dim: int, steps: int, rho: float, adjacency: str
    ) -> float:
        """Returns what a unit of clip costs in noise, in one pass."""

    @classmethod
    def _averaging(cls, problem: Problem, steps: int) -> AveragingSchedule | None:
        """Returns step sizes and weights of the theorem for one pass; None for constant steps."""
        return None

    @classmethod
    def plan(
        cls,
        *,
        problem: Problem | None = None,
        n: int | None = None,
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
        mode: str = "tight",
        allow_infinite_variance: bool = False,
        secure: str | None = None,
    ) -> ClippedPlan:
        """Returns the public numbers of a run, before anything is spent.

        Args:
            problem: promised constants: moment, moment_order (and second_moment) of the gradient norm choose clip,
                steps and step size by theory; smoothness (and more, see the class) chooses the step size in any case.
            n: public number of records (a reference under add_remove). Without it no sampling is claimed, under
                replace_one only.
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
                since its bound is for these batches, and in mode "paper"). `ClippedSGD` makes many passes too:
                "poisson" (their default; all records where a batch holds them), "allocated" (passes like "assigned", at
                the price of Poisson), "fixed", "full", or "shuffled" with epochs > 1. Or a design, as
                dp.Poisson(batch_size, n).
            average: which iterates are the answer, "last" (default), "uniform" or "weighted" (default of a step rule
                with momentum). In one pass of
                `ClippedSGD` the default is the weights of the theorem where the problem promises strong_convexity;
                `AcceleratedSGD` has an answer of its own.
            adjacency: default the budget's, or "zero_out" ("replace_one" without n, and in mode "paper").
            dim: number of parameters, or the model; needed where moments are promised, and by pilots.
            distance: bound on |w_0 - w*|; default the diameter of the problem's ball, which the bound on the risk of
                AcceleratedSGD wants (docs/proofs/heavy_tailed.md#accelerated-steps).
            mode: "tight", or "paper": the published number of steps and clip (replace_one).
            allow_infinite_variance: admits moment_order < 2.
            secure: "exact" for noise in integers on a public grid, see docs/performance.md for its cost.

        Raises:
            MissingConstantError: a promise is missing; says which, and how to do without.
            AdjacencyError: mode "paper" or batches cut by position, under add_remove.
            ValueError: an argument is out of range.
        """
        problem = problem or Problem()
        dim = dimension(dim)
        if isinstance(sampling, Design) and not isinstance(sampling, Undeclared):
            n = sampling.n if n is None else n
        budget, adjacency = agreed(budget, adjacency, default=usual_adjacency(n, mode))
        check_mode(mode, adjacency)
        check.choice((*AVERAGES, None), average=average)
        if distance is not None:
            check.positive(distance=distance)
        goal, noise = _goal(budget, noise_multiplier)
        left = n if n is None else check.positive_count(n=n)
        if isinstance(clip, Pilot) and left is not None:
            if isinstance(sampling, Design):
                raise ValueError(
                    f"sampling must be a word, for the records that a pilot leaves (got {sampling})"
                )
            left = check.positive_count(n=left - clip.records(left))
        sampling = sampling or cls._usual(clip, n, adjacency, mode, batch_size, steps, epochs)
        once = cls._is_one_pass(sampling, n, steps, epochs, adjacency)
        theory: OnePassPlan | None = None
        made: AveragingSchedule | None = None
        scale: Scale | None = None
        pace: Pace | None = None
        secret = False  # whether passes are amplified, so that each release may tell more
        by_rule = lr is None and cls.momentum is not None and mode != "paper"
        if once and left is not None and sampling is not None:
            noise = noise if goal is None else release_noise(goal)
            if steps is None and (isinstance(sampling, Design) or batch_size is not None):
                steps = _one_pass(sampling, batch_size, left, adjacency).steps_per_epoch
            secret = mode != "paper" and _is_secret(sampling)
            inputs = {"n": left, "dim": dim, "clip": clip, "adjacency": adjacency, "mode": mode}
            inputs |= {"allow_infinite_variance": allow_infinite_variance}
            if noise and not isinstance(clip, Pilot):
                tries: list[tuple[int | None, float]] = [(steps, noise)]
                if secret and goal is not None and steps is None:
                    tries = [
                        (number, noise_of_pass(goal, number)) for number in numbers_of_steps(left)
                    ]
                theory = cls._best(problem, distance, inputs, tries)
            if theory is not None:
                steps = theory.steps
            elif by_rule and goal is not None and not problem.strong_convexity:
                scale = scale_of_clip(
                    problem, None if isinstance(clip, Pilot) else clip, distance, dim, cls.__name__
                )
                steps = (
                    one_pass(scale, left, goal, bool(cls.momentum), secret)
                    if steps is None
                    else steps
                )
            steps = min(left, _MORE_STEPS if secret else _FEW_STEPS) if steps is None else steps
            if check.positive_count(steps=steps) > left:
                raise ValueError(f"steps must be <= {left}, the records that train (got {steps})")
            design = _one_pass(sampling, batch_size, left, adjacency, steps, secret)
            steps = steps_of(design, steps, None, None, once=cls.words == _PASS) or steps
            if secret and goal is not None:
                noise = noise_for(goal, design, steps)
                theory = theory and cls._best(problem, distance, inputs, [(steps, noise)])
            clip = clip if theory is None else theory.clip
            made = cls._averaging(problem, steps) if average is None else None
            if scale is not None and made is None:
                pace = pace_of(scale, design, steps, noise)
                pace = (
                    pace
                    if cls.momentum
                    else Pace(min(cls._lr(problem), pace.lr / (1.0 - pace.momentum)))
                )
        else:
            if clip is None:
                raise MissingConstantError(
                    f"{cls.__name__} needs a clip for many passes, which no theorem chooses:"
                    " clip=dp.Pilot(), or a number"
                )
            if by_rule and goal is not None and left is not None:
                scale = scale_of_clip(
                    problem, None if isinstance(clip, Pilot) else clip, distance, dim, cls.__name__
                )
                run = run_of(scale, left, goal, sampling, adjacency, batch_size, steps, epochs)
                design = run.design
                steps = run.steps
                noise = run.noise
                pace = run.pace
            else:
                if batch_size is None and left is not None and sampling in (None, *SAMPLING):
                    batch_size = min(_DEFAULT_BATCH, left)
                default = (
                    _FULL_STEPS
                    if sampling == "full" or isinstance(sampling, Full)
                    else _DEFAULT_EPOCHS
                )
                free = goal is None and not isinstance(clip, Pilot)
                design, steps = drawn(
                    sampling, batch_size, left, adjacency, steps, epochs, None if free else default
                )
                noise = noise if goal is None else noise_for(goal, design, steps)
        covered = lr is None and average is None
        if pace is not None:
            lr = pace.lr
            average = average or ("weighted" if pace.momentum else "last")
        elif lr is None:
            lr = (
                theory.lr
                if theory is not None
                else cls._lr(problem)
                if made is None
                else made.lr[0]
            )
        if goal is not None and n and dim and steps and mode != "paper":
            checks.warn_if_buried(
                noise / design.batch_size / math.sqrt(steps), n=n, dim=dim, epsilon=goal.epsilon
            )
        if theory is not None and left is not None:
            covered = covered and design == Disjoint(left // theory.steps, left)
        pilot: PilotPlan | None = None
        if isinstance(clip, Pilot):
            if n is None or left is None or budget is None or steps is None or dim is None:
                raise ValueError(
                    f"n, budget and dim must be given for a pilot, or a number as clip (got {n},"
                    f" {budget} and {dim})"
                )
            rho = zcdp_of(noise if secret and noise else release_noise(budget), adjacency)
            rate = exchange_rate_phase(left, dim, rho, adjacency)
            if once:
                rate = cls._exchange_rate(problem, left, dim, steps, rho, adjacency)
            pilot = clip.plan(n, budget, rate)
            clip = None
            design = after_pilot(pilot.size, design, steps, n, adjacency)
            steps = steps + 1
        return cls.plans(
            budget=budget,
            adjacency=adjacency,
            design=design,
            steps=steps,
            lr=check.positive(lr=lr),
            momentum=0.0 if pace is None else pace.momentum,
            radius=problem.radius,
            average=average or ("weighted" if made is not None else cls.plans.average),
            secure=secure,
            clip=clip,
            noise_multiplier=noise,
            pilot=pilot,
            factors=() if made is None else tuple(step / made.lr[0] for step in made.lr),
            weights=() if made is None else made.weights,
            risk_bound=theory.bound if theory is not None and covered else None,
        )

    @classmethod
    def _usual(
        cls,
        clip: float | Pilot | None,
        n: int | None,
        adjacency: Adjacency,
        mode: str,
        batch_size: int | None,
        steps: int | None,
        epochs: float | None,
    ) -> str | None:
        """Returns the word of one pass that is taken where none is given; None for batches of any number."""
        if adjacency != ADD_REMOVE and (clip is None or mode == "paper"):
            return "shuffled"  # what the bound of the theorem that chooses is for
        once = n is not None and epochs in (None, 1) and (steps is None or batch_size is None)
        return "assigned" if once or cls.words == _PASS else None

    @classmethod
    def _is_one_pass(
        cls,
        sampling: str | Design | None,
        n: int | None,
        steps: int | None,
        epochs: float | None,
        adjacency: Adjacency,
    ) -> bool:
        """Returns whether each record is used once; raises ValueError where that must be so and is not."""
        if steps is not None and epochs is not None:
            raise ValueError(f"steps and epochs must not be given both (got {steps} and {epochs})")
        if epochs is not None:
            check.positive(epochs=epochs)
        if isinstance(sampling, Design):
            once = sampling.one_pass
            if isinstance(sampling, Assigned) and sampling.passes > 1 and cls.words == _PASS:
                raise ValueError(f"passes must be 1 for {cls.__name__} (got {sampling})")
        else:
            check.choice((*cls.words, None), sampling=sampling)
            if sampling == "shuffled" and adjacency == ADD_REMOVE:
                raise AdjacencyError(
                    "sampling must be 'assigned', 'poisson' or 'full' under add_remove (got"
                    " 'shuffled'): removing a record would shift the batches of all later ones"
                )
            once = n is not None and (
                sampling == "assigned" or (sampling == "shuffled" and epochs in (None, 1))
            )
        if epochs not in (None, 1) and (sampling == "assigned" or cls.words == _PASS):
            more = ", or sampling 'allocated' for several" if "allocated" in cls.words else ""
            raise ValueError(f"epochs must be 1 for one pass{more} (got {epochs})")
        if not once and cls.words == _PASS:
            raise ValueError(
                f"sampling must be one pass over n records for {cls.__name__}: 'shuffled',"
                f" 'assigned', or a design of one pass (got {sampling!r} and n={n})"
            )
        return once

    @classmethod
    def _lr(cls, problem: Problem) -> float:
        """Returns the largest step size of the theorem, where the noise is not known in advance."""
        (smoothness,) = problem.require("smoothness", by=cls.__name__)
        return 1.0 / (cls.most * smoothness)

    @classmethod
    def _best(
        cls,
        problem: Problem,
        distance: float | None,
        inputs: dict[str, Any],
        tries: Sequence[tuple[int | None, float]],
    ) -> OnePassPlan | None:
        """Returns what the theorem chooses, as `_chosen`, at the number of steps, beside its noise, of least bound."""
        with warnings.catch_warnings():
            if len(tries) > 1:  # what is said of those that are not taken
                warnings.simplefilter("ignore", UtilityWarning)
            plans = [
                cls._chosen(
                    problem,
                    distance,
                    inputs | {"steps": steps, "rho": zcdp_of(noise, inputs["adjacency"])},
                )
                for steps, noise in tries
            ]
        return min(
            (plan for plan in plans if plan is not None), key=lambda plan: plan.bound, default=None
        )

    @classmethod
    def _chosen(
        cls, problem: Problem, distance: float | None, inputs: dict[str, Any]
    ) -> OnePassPlan | None:
        """Returns what the theorem chooses; None where promises are missing, and the clip is given."""
        if problem.moment is not None and inputs["dim"] is None:
            raise MissingConstantError(
                "dim must be given where moments are promised: the model, or its parameters"
            )
        names = ("moment", "moment_order", "smoothness", *cls.needs)
        try:
            promised = dict(zip(names, problem.require(*names, by=cls.__name__), strict=True))
            return cls._theory(
                promised | inputs | {"second_moment": problem.second_moment}, problem, distance
            )
        except MissingConstantError:
            if inputs["clip"] is None:
                raise
            return None


def _goal(budget: Budget | None, noise_multiplier: float | None) -> tuple[Budget | None, float]:
    """Returns the budget that noise is chosen for, or else noise that is given."""
    if noise_multiplier is not None:
        return None, check.nonnegative(noise_multiplier=noise_multiplier)
    if budget is None:
        raise ValueError(
            "budget or noise_multiplier must be given: the target, or noise of your own"
        )
    if budget.mode != "planned":
        raise ValueError(
            f"budget must be of mode 'planned', to be spent by a plan (got {budget.mode!r})"
        )
    return budget, math.nan


def _is_secret(sampling: str | Design | None) -> bool:
    """Returns whether each record draws its batch by itself, and that is charged as a whole pass."""
    return sampling == "assigned" or (isinstance(sampling, Assigned) and sampling.amplification)


def _one_pass(
    sampling: str | Design,
    batch_size: int | None,
    n: int,
    adjacency: Adjacency,
    steps: int = 1,
    secret: bool = False,
) -> Design:
    """Returns the design of one pass in batches of this size, or in so many."""
    if isinstance(sampling, Design):
        return sampled(sampling, batch_size, n, adjacency)
    size = n // steps if batch_size is None else batch_size
    if sampling == "assigned":  # all records to these batches
        return Assigned(size, n, steps if batch_size is None else None, amplification=secret)
    return Disjoint(size, n)
