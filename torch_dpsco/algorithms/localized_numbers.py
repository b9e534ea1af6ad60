"""Phases of localized methods, and the schedules of LocalizedSGD (Algorithm 4): multi-pass, convex losses.

A phase on m records with center c makes T steps

    w <- Proj( w - lr_t ( clipped mean + N(0, sigma^2 I) + lambda (w - c) ) ),   starting at c,

and hands its LAST iterate on as the next center. lambda lr_t is 1/(t+1), constant in the paper. Each record is in one
phase (and one copy of it), so that the run costs rho, the maximum over phases, not their sum. The privacy cost depends
on clip, noise and steps, never on lambda.

Proofs: docs/proofs/heavy_tailed.md#disjoint-parts,
docs/proofs/heavy_tailed.md#phase-without-a-ball.

Schedules, for losses that need not be smooth: phases on n/2, n/4, ... fresh records, lambda_i = 8^(i-1) lambda_1. With
sqrt(E|w_i - what_i|^2) <= A_i/lambda_i,

    E F - F* <= D sqrt(2 X) + rt_1 A_ell/lambda_ell,   X = sum_i (2 rt_2^2/n_i + 4 A_i^2) / 8^(i-1),

at lambda_1 = sqrt(2 X)/D, where A_i is B(C_i) + a_i C_i with `ballfree_rate`: phases have no balls, since with balls
the bound is larger, and grows with n where steps are capped.

Moments are of sup_w |grad f(w,x)|. The bias of a whole phase needs the SECOND moment of an empirical k-th moment, hence
rt_2k: with k' finite moments use k = k'/2.

Differs from the paper in: 1. the clip takes the place of an unknown empirical Lipschitz constant, so that steps lose a
factor of log n; 2. balls are dropped; 3. any n, not only powers of 2; 4. explicit constants.

Proofs: docs/proofs/heavy_tailed.md#localized-schedule,
docs/proofs/heavy_tailed.md#localized-schedule-with-balls. Source: Lowy and Razaviyayn, Algorithm 4 and Theorem 41.

Schedules built from ball-free phases: the strongly convex reduction (section G.3) and minibatches (Remark 13).

The reduction runs LocalizedSGD on M disjoint parts of growing size, each from the answer of the one before. The bound
of the ball-free schedule is D Rate(n_t), and strong convexity turns it into a smaller distance,

    D_1 = min(D, rt_1/mu),   D_{t+1} = min(D, sqrt(2 Rate(n_t) D_t/mu)).

Differs from the paper in: 1. no balls: their failure term contains the diameter of W and does not shrink with D_t, so
that the reduction is not proved for them; 2. parts use all records (`sc_reduction_sizes_full`); 3. minibatches are
calibrated by an accountant, not by a closed form with hidden constants, and the variance of their sampling enters the
bound.

Proofs: docs/proofs/heavy_tailed.md#reduction-for-strong-convexity,
docs/proofs/heavy_tailed.md#minibatch-phases. Source: Lowy and Razaviyayn, section G.3 and Remark 13.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from torch_dpsco import _validate as check
from torch_dpsco.accounting.analysis.gaussian import sensitivity_factor
from torch_dpsco.algorithms.heavy_tailed_numbers import (
    PilotPlan,
    check_order,
    clip_bias,
    clip_threshold_linear,
    mean_noise_std,
)

_GROWTH = 8.0  # of lambda; it must exceed 4, by which A_i^2 may grow


@dataclass(frozen=True, kw_only=True)
class LocalizedPhase:
    """Public numbers of one phase.

    Args:
        index: 1, 2, ... in the run.
        n: records; no other phase uses them.
        batch_size: (expected) rows of a step, the divisor; n for full passes.
        clip: C.
        steps: T >= 1.
        reg: lambda > 0 of (lambda/2)|w - c|^2, added after clipping and noise.
        noise_std: sigma, std per coordinate of the noise on the mean over `batch_size`.
        error: sqrt(E|w_T - what|^2) <= error/lambda (A); None where unknown.
        lr: constant step size (the paper's); None for the steps above.
        pilot: group that chooses the clip, in a step of its own before the phase; None for that of the phase before, or
            for `clip`.
    """

    index: int
    n: int
    batch_size: int
    clip: float
    steps: int
    reg: float
    noise_std: float
    error: float | None
    lr: float | None = None
    pilot: PilotPlan | None = None

    def __post_init__(self) -> None:
        check.check_fields(self)

    @property
    def noise_multiplier(self) -> float:
        """Std of the noise on the sum of rows, over the clip."""
        return self.noise_std * self.batch_size / self.clip


@dataclass(frozen=True, kw_only=True)
class LocalizedSchedule:
    """Phases one after another; each starts at the answer of the one before.

    Args:
        phases: at least one.
        rho: zCDP of the run: that of each phase; None where an accountant calibrates the noise of phases.
        adjacency: of rho.
        bound: main term of the bound on the excess risk, D sqrt(...); None if lambda was chosen by hand.
        tail: what the bound adds for the last phase; None as above.

    Example:
        >>> phase = LocalizedPhase(index=1, n=50, batch_size=50, clip=1.0, steps=4, reg=0.5, noise_std=0.1,
        ...                        error=None)
        >>> schedule = LocalizedSchedule(phases=(phase,), rho=0.5)
        >>> schedule.risk_bound, phase.noise_multiplier
        (None, 5.0)
    """

    phases: tuple[LocalizedPhase, ...]
    rho: float | None
    adjacency: str = "replace_one"
    bound: float | None = None
    tail: float | None = None

    def __post_init__(self) -> None:
        if not self.phases:
            raise ValueError("phases must hold at least one phase (got none)")

    @property
    def risk_bound(self) -> float | None:
        """The whole bound on the excess risk, main term and tail; None if there is none."""
        return None if self.bound is None or self.tail is None else self.bound + self.tail

    def clipped_at(self, clip: float) -> LocalizedSchedule:
        """Returns the phases with another clip and the same noise multipliers: at the same cost, without a bound."""
        check.positive(clip=clip)
        phases = []
        for phase in self.phases:
            std = phase.noise_multiplier * clip / phase.batch_size
            phases.append(replace(phase, clip=clip, noise_std=std, error=None))
        return replace(self, phases=tuple(phases), bound=None, tail=None)


def halved_sizes(n: int, min_phase: int = 1) -> list[int]:
    """Returns floor(n/2^i), i = 1, 2, ..., as long as that is at least `min_phase`.

    Sizes below `min_phase` > 1 join the last phase.

    Source:
        docs/proofs/heavy_tailed.md#localized-schedule.

    Example:
        >>> halved_sizes(20), halved_sizes(20, min_phase=4)
        ([10, 5, 2, 1], [10, 8])
    """
    if n < 2:
        raise ValueError(f"n must be >= 2, for a phase of half of the records (got {n})")
    if check.positive_count(min_phase=min_phase) > n // 2:
        raise ValueError(f"min_phase must be <= n/2={n // 2} (got {min_phase})")
    sizes = [n >> i for i in range(1, n.bit_length())]
    kept = [size for size in sizes if size >= min_phase]
    kept[-1] += sum(sizes[len(kept) :])
    return kept


_RANGES: Mapping[str, Callable[..., Any]] = {
    "n": check.positive_count,
    "dim": check.positive_count,
    "rho": check.positive,
    "second_moment": check.positive,
    "diameter": partial(check.positive, allow_inf=True),
    "max_steps": check.positive_count,
    "first_moment": check.positive,
    "reg": check.positive,
}


@dataclass(frozen=True, kw_only=True)
class PhaseTask:
    """Public inputs of a schedule of phases, of every method.

    Args:
        n: records, public, >= 2.
        dim: d.
        rho: > 0, zCDP of the run; None where an accountant calibrates the noise of phases.
        moment_order: k.
        second_moment: rt_2.
        diameter: D > 0, bound on |w_0 - w*| (in the mean square, if w_0 is random).
        max_steps: cap on the steps of a phase; None for no cap.
        first_moment: rt_1, default rt_2; in the tail only.
        reg: a lambda_1 of your own, chosen without looking at the training records. Privacy does not depend on it;
            there is no bound then.
        adjacency: "replace_one", "zero_out" or "add_remove" (parts by a choice for each record by itself).

    Raises:
        ConditionError: k < 2.
        ValueError: a number is out of range.

    Guarantee:
        Of all schedules with a rho: with noise of `noise_std` on each mean over the whole part, and each record in one
        phase by a choice that does not depend on the data, the run is rho-zCDP under the adjacency, whatever the
        promised constants are worth.
    """

    n: int
    dim: int
    rho: float | None = None
    moment_order: float
    second_moment: float
    diameter: float = math.inf
    max_steps: int | None = 2000
    first_moment: float | None = None
    reg: float | None = None
    adjacency: str = "replace_one"

    def __post_init__(self) -> None:
        check.ranges(self, _RANGES)
        check_order(self.moment_order)

    @property
    def first(self) -> float:
        """rt_1, or what bounds it."""
        return float(self.second_moment if self.first_moment is None else self.first_moment)

    def level(self, records: int) -> float:
        """Returns `noise_level` of a phase on so many records."""
        return noise_level(records, self.dim, check.positive(rho=self.rho), self.adjacency)

    def capped(self, steps: int) -> int:
        """Returns the number of steps, at most the cap."""
        return min(steps, self.max_steps or steps)

    def full_passes(self, n: int, clip: float, steps: int, error: float) -> Tuned:
        """Returns a phase on n records whose steps cost rho together."""
        # PRIVACY: all records of the phase enter each of its steps (test_every_phase_costs_rho_and_no_more).
        noise_std = mean_noise_std(clip, n, check.positive(rho=self.rho), steps, self.adjacency)
        return Tuned(n, n, clip, steps, noise_std, error)


def localized_schedule_ballfree(
    task: PhaseTask, *, moment_2k: float, min_phase: int = 1
) -> LocalizedSchedule:
    """Returns the schedule without balls; its bound is proportional to D and holds also where steps are capped.

    Args:
        task: records, privacy and promises.
        moment_2k: rt_2k.
        min_phase: phases of fewer records join the one before.

    Source:
        docs/proofs/heavy_tailed.md#localized-schedule.

    Example:
        >>> task = PhaseTask(n=10**6, dim=50, rho=0.5, moment_order=2.0, second_moment=1.0, diameter=2.0,
        ...                  max_steps=None)
        >>> schedule = localized_schedule_ballfree(task, moment_2k=1.5)
        >>> len(schedule.phases), round(schedule.bound, 4), schedule.phases[0].steps
        (19, 0.0623, 5000282843)
    """

    def tuned(size: int) -> Tuned:
        level = task.level(size)
        steps = task.capped(ballfree_steps(level))
        clip, error = clip_and_error(moment_2k, task.moment_order, ballfree_rate(level, steps))
        return task.full_passes(size, clip, steps, error)

    return regularized([tuned(size) for size in halved_sizes(task.n, min_phase)], task)


def noise_level(n: int, dim: int, rho: float, adjacency: str = "replace_one") -> float:
    """Returns nu with d sigma^2 = nu C^2 T for a phase of T full passes: 2 d/(m^2 rho) for replace_one."""
    factor = sensitivity_factor(adjacency) / 2.0
    return 2.0 * dim / rho * (factor / n) ** 2


def ballfree_steps(level: float) -> int:
    """Returns ceil((4 + 8 sqrt(nu))/nu), after which noise is the larger part of `ballfree_rate`."""
    return max(1, math.ceil((4.0 + 8.0 * math.sqrt(level)) / level))


def ballfree_rate(level: float, steps: int) -> float:
    """Returns a = sqrt( nu (1 + (1+log T)/T) + (4 + 8 sqrt(nu))/T ).

    A ball-free phase ends within lambda sqrt(E|w_T - what|^2) <= a C + sqrt(E Bhat^2).

    Args:
        level: nu, d sigma^2/(C^2 T), where sigma may stand for any noise that is 0 in the mean given the past.
        steps: T.

    Source:
        docs/proofs/heavy_tailed.md#phase-without-a-ball.

    Example:
        >>> round(ballfree_rate(0.01, 100), 6)
        0.241993
    """
    root = math.sqrt(level)
    T = float(steps)
    return math.sqrt(level * (1.0 + (1.0 + math.log(T)) / T) + (4.0 + 8.0 * root) / T)


def clip_and_error(moment_2k: float, moment_order: float, rate: float) -> tuple[float, float]:
    """Returns the clip of a phase without a ball and its error over lambda, at a rate of `ballfree_rate`."""
    clip = clip_threshold_linear(moment_2k, moment_order, min(rate, 1.0))
    return clip, clip_bias(moment_2k, moment_order, clip) + rate * clip


class Tuned(NamedTuple):
    """What is chosen for a phase before lambda is known, as in `LocalizedPhase`."""

    n: int
    batch_size: int
    clip: float
    steps: int
    noise_std: float
    error: float


def regularized(tuned: Sequence[Tuned], task: PhaseTask) -> LocalizedSchedule:
    """Returns phases with the lambda_1, lambda_2, ... of the least bound, or of a given lambda_1, without a bound."""
    D = check.positive(diameter=task.diameter)
    second = float(task.second_moment)
    total = math.fsum(
        (2.0 * second**2 / one.n + 4.0 * one.error**2) / 8.0**i for i, one in enumerate(tuned)
    )
    root = math.sqrt(2.0 * total)
    first = root / D if task.reg is None else task.reg
    phases = tuple(
        LocalizedPhase(index=i + 1, reg=first * _GROWTH**i, **one._asdict())
        for i, one in enumerate(tuned)
    )
    schedule = LocalizedSchedule(phases=phases, rho=task.rho, adjacency=task.adjacency)
    if task.reg is not None:
        return schedule
    return replace(schedule, bound=D * root, tail=task.first * tuned[-1].error / phases[-1].reg)


_SKIP_BELOW = 16


def sc_reduction_sizes_full(n: int) -> list[int]:
    """Returns part sizes floor(n 2^(t-1)/(2^M - 1)), which use all but at most M records.

    Args:
        n: >= 2.

    Source:
        docs/proofs/heavy_tailed.md#reduction-for-strong-convexity.

    Example:
        >>> sc_reduction_sizes_full(256)
        [36, 73, 146]
    """
    parts = _parts(n)
    return [(n << t) // ((1 << parts) - 1) for t in range(parts)]


def reduction_schedule(
    task: PhaseTask,
    *,
    strong_convexity: float,
    moment_2k: float,
    min_phase: int = 1,
) -> LocalizedSchedule:
    """Returns the phases of all parts as one schedule, for strongly convex losses that need not be smooth.

    Args:
        task: records (below 16 the reduction is skipped), privacy and promises. The diameter bounds |w - w*| for all
            feasible w; rt_1/mu is one, and the smaller of the two is used. A lambda_1 is that of the first part, and
            doubles with each part.
        strong_convexity: mu > 0, of the population risk.
        moment_2k: rt_2k.
        min_phase: phases of fewer records join the one before.

    Returns:
        The schedule, `bound` and `tail` those of the last part, at its D_M.

    Source:
        docs/proofs/heavy_tailed.md#reduction-for-strong-convexity.

    Example:
        >>> task = PhaseTask(n=10**6, dim=10, rho=0.5, moment_order=2.0, second_moment=1.0, diameter=2.0,
        ...                  max_steps=None)
        >>> schedule = reduction_schedule(task, strong_convexity=0.1, moment_2k=1.5)
        >>> len(schedule.phases), round(schedule.risk_bound, 4)
        (80, 0.032)
    """
    mu = check.positive(strong_convexity=strong_convexity)
    first = task.first
    D = distance = min(task.diameter, first / mu)
    phases: list[LocalizedPhase] = []
    parts = [task.n] if task.n < _SKIP_BELOW else sc_reduction_sizes_full(task.n)
    for t, size in enumerate(parts):
        own = replace(
            task,
            n=size,
            diameter=distance,
            first_moment=first,
            reg=None if task.reg is None else task.reg * 2.0**t,
        )
        part = localized_schedule_ballfree(
            own, moment_2k=moment_2k, min_phase=min(min_phase, size // 2)
        )
        phases += [
            replace(phase, index=len(phases) + 1 + i) for i, phase in enumerate(part.phases)
        ]
        if part.risk_bound is not None and t + 1 < len(parts):
            distance = min(D, math.sqrt(2.0 * part.risk_bound / mu))
    return replace(part, phases=tuple(phases))


def minibatch_size(n: int, rho: float, steps: int) -> int:
    """Returns the batch size ceil(m sqrt(2 rho/T)), at most m, from which amplification is nearly linear (z about 1).

    Example:
        >>> minibatch_size(n=1000, rho=0.5, steps=100)
        100
    """
    return max(1, min(n, math.ceil(n * math.sqrt(2.0 * rho / steps))))


def localized_schedule_minibatch(
    task: PhaseTask,
    *,
    batch_sizes: Sequence[int],
    steps: Sequence[int],
    noise_multipliers: Sequence[float],
    moment_2k: float,
    min_phase: int = 1,
) -> LocalizedSchedule:
    """Returns the ball-free schedule whose steps take random minibatches of their phase's records.

    The conditional variance of a step is at most C^2 ( d z^2/b^2 + (m-b)/(b (m-1)) ), for Poisson batches of expected
    size b and divisor b, and for fixed batches without replacement; a_i of the ball-free form takes it for d sigma^2.

    Args:
        task: records and promises, without a rho.
        batch_sizes: b_i <= n_i, one per phase of `halved_sizes(n, min_phase)`.
        steps: T_i.
        noise_multipliers: z_i, std on the sum over the clip, calibrated by an accountant for T_i steps.
        moment_2k: rt_2k.
        min_phase: phases of fewer records join the one before.

    Guarantee:
        None by itself: the cost of a phase is that of T_i steps of (z_i, b_i, n_i) under the sampling scheme; the run
        costs the largest of them.

    Source:
        docs/proofs/heavy_tailed.md#minibatch-phases; Remark 13, the sampling variance is ours.

    Example:
        >>> task = PhaseTask(n=4, dim=1, moment_order=2.0, second_moment=1.0, diameter=1.0)
        >>> schedule = localized_schedule_minibatch(
        ...     task, batch_sizes=[1, 1], steps=[4, 4], noise_multipliers=[1.0, 1.0], moment_2k=1.0)
        >>> [(phase.n, phase.batch_size, round(phase.noise_std / phase.clip, 6)) for phase in schedule.phases]
        [(2, 1, 1.0), (1, 1, 1.0)]
    """
    sizes = halved_sizes(task.n, min_phase)
    given = list(zip(batch_sizes, steps, noise_multipliers, strict=False))
    if not len(batch_sizes) == len(steps) == len(noise_multipliers) == len(sizes):
        raise ValueError(
            "batch_sizes, steps and noise_multipliers must hold one number for each of"
            f" {len(sizes)} phases (got {len(batch_sizes)}, {len(steps)} and"
            f" {len(noise_multipliers)})"
        )
    tuned = []
    for m, (b, T, z) in zip(sizes, given, strict=True):
        clip, error = clip_and_error(
            moment_2k, task.moment_order, _minibatch_rate(m, task.dim, b, T, z)
        )
        tuned.append(Tuned(m, b, clip, T, z * clip / b, error))
    return regularized(tuned, task)


def _minibatch_rate(
    m: int, dim: int, batch_size: int, steps: int, noise_multiplier: float
) -> float:
    b = batch_size
    if b > m:
        raise ValueError(f"batch_sizes must be <= the records of their phase, {m} (got {b})")
    noise = dim * (noise_multiplier / b) ** 2
    sampling = 0.0 if b == m else (m - b) / (b * (m - 1.0))
    return ballfree_rate((noise + sampling) / steps, steps)


def _parts(n: int) -> int:
    """M = max(1, ceil(log2 log2 n)); the slack keeps n = 16, 256, 65536 at 2, 3, 4."""
    if n < 2:
        raise ValueError(f"n must be >= 2 (got {n})")
    return max(1, math.ceil(math.log2(math.log2(n)) - 1e-12))
