"""Schedules built from ball-free phases: the strongly convex reduction (section G.3) and minibatches (Remark 13).

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
from collections.abc import Sequence
from dataclasses import replace

from torch_dpsco import _validate as check
from torch_dpsco.theory.heavy_tailed.inputs import check_order
from torch_dpsco.theory.heavy_tailed.localized import (
    LocalizedPhase,
    LocalizedSchedule,
    Tuned,
    ballfree_rate,
    clip_and_error,
    halved_sizes,
    localized_schedule_ballfree,
    regularized,
)

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
    *,
    n: int,
    dim: int,
    rho: float,
    strong_convexity: float,
    moment_order: float,
    second_moment: float,
    moment_2k: float,
    diameter: float = math.inf,
    max_steps: int | None = 2000,
    first_moment: float | None = None,
    reg: float | None = None,
    adjacency: str = "replace_one",
    sizes: Sequence[int] | None = None,
    min_phase: int = 1,
    allow_infinite_variance: bool = False,
) -> LocalizedSchedule:
    """Returns the phases of all parts as one schedule, for strongly convex losses that need not be smooth.

    Args:
        n: public number of records; below 16 the reduction is skipped.
        dim: d.
        rho: > 0, zCDP of the run.
        strong_convexity: mu > 0, of the population risk.
        moment_order: k.
        second_moment: rt_2.
        moment_2k: rt_2k.
        diameter: bound on |w - w*| for all feasible w; rt_1/mu is one, and the smaller of the two is used.
        max_steps: cap on the steps of a phase; None for no cap.
        first_moment: rt_1, default rt_2.
        reg: a lambda_1 of your own for the first part; it doubles with each part. There is no bound then.
        adjacency: of rho.
        sizes: of the parts, their sum at most n; default `sc_reduction_sizes_full(n)`.
        min_phase: phases of fewer records join the one before.
        allow_infinite_variance: admits k < 2.

    Returns:
        The schedule, `bound` and `tail` those of the last part, at its D_M (`diameter`).

    Raises:
        ConditionError: k < 2 without `allow_infinite_variance`.
        ValueError: an argument is out of range.

    Guarantee:
        As `localized_schedule_ballfree`: parts are disjoint, rho overall.

    Source:
        docs/proofs/heavy_tailed.md#reduction-for-strong-convexity.

    Example:
        >>> schedule = reduction_schedule(n=10**6, dim=10, rho=0.5, strong_convexity=0.1, moment_order=2.0,
        ...     second_moment=1.0, moment_2k=1.5, diameter=2.0, max_steps=None)
        >>> schedule.phases_count, schedule.records <= 10**6, round(schedule.risk_bound, 4)
        (80, True, 0.032)
    """
    mu = check.positive(strong_convexity=strong_convexity)
    second = check.positive(second_moment=second_moment)
    first = second if first_moment is None else check.positive(first_moment=first_moment)
    D = distance = min(check.positive(diameter=diameter, allow_inf=True), first / mu)
    phases: list[LocalizedPhase] = []
    parts = _checked_parts(n, sizes)
    for t, size in enumerate(parts):
        part = localized_schedule_ballfree(
            n=size,
            dim=dim,
            rho=rho,
            moment_order=moment_order,
            second_moment=second,
            moment_2k=moment_2k,
            diameter=distance,
            max_steps=max_steps,
            first_moment=first,
            reg=None if reg is None else check.positive(reg=reg) * 2.0**t,
            adjacency=adjacency,
            min_phase=min(min_phase, size // 2),
            allow_infinite_variance=allow_infinite_variance,
        )
        phases += [replace(phase, index=len(phases) + 1 + i) for i, phase in enumerate(part.phases)]
        if part.risk_bound is not None and t + 1 < len(parts):
            distance = min(D, math.sqrt(2.0 * part.risk_bound / mu))
    return replace(part, phases=tuple(phases))


def minibatch_size(n: int, rho: float, steps: int) -> int:
    """Returns the batch size ceil(m sqrt(2 rho/T)), at most m, from which amplification is nearly linear (z about 1).

    Example:
        >>> minibatch_size(n=1000, rho=0.5, steps=100)
        100
    """
    m = check.positive_count(n=n)
    rate = 2.0 * check.positive(rho=rho) / check.positive_count(steps=steps)
    return max(1, min(m, math.ceil(m * math.sqrt(rate))))


def localized_schedule_minibatch(
    *,
    n: int,
    dim: int,
    batch_sizes: Sequence[int],
    steps: Sequence[int],
    noise_multipliers: Sequence[float],
    moment_order: float,
    second_moment: float,
    moment_2k: float,
    diameter: float,
    first_moment: float | None = None,
    reg: float | None = None,
    min_phase: int = 1,
    allow_infinite_variance: bool = False,
) -> LocalizedSchedule:
    """Returns the ball-free schedule whose steps take random minibatches of their phase's records.

    The conditional variance of a step is at most C^2 ( d z^2/b^2 + (m-b)/(b (m-1)) ), for Poisson batches of expected
    size b and divisor b, and for fixed batches without replacement; a_i of the ball-free form takes it for d sigma^2.

    Args:
        n: public number of records.
        dim: d.
        batch_sizes: b_i <= n_i, one per phase of `halved_sizes(n, min_phase)`.
        steps: T_i.
        noise_multipliers: z_i, std on the sum over the clip, calibrated by an accountant for T_i steps.
        moment_order: k.
        second_moment: rt_2.
        moment_2k: rt_2k.
        diameter: D.
        first_moment: rt_1, default rt_2.
        reg: a lambda_1 of your own; there is no bound then.
        min_phase: phases of fewer records join the one before.
        allow_infinite_variance: admits k < 2.

    Returns:
        The schedule with rho None.

    Guarantee:
        None by itself: the cost of a phase is that of T_i steps of (z_i, b_i, n_i) under the sampling scheme; the run
        costs the largest of them.

    Source:
        docs/proofs/heavy_tailed.md#minibatch-phases; Remark 13, the sampling variance is ours.

    Example:
        >>> schedule = localized_schedule_minibatch(n=4, dim=1, batch_sizes=[1, 1], steps=[4, 4],
        ...     noise_multipliers=[1.0, 1.0], moment_order=2.0, second_moment=1.0, moment_2k=1.0, diameter=1.0)
        >>> [(phase.n, phase.batch_size, round(phase.noise_std / phase.clip, 6)) for phase in schedule.phases]
        [(2, 1, 1.0), (1, 1, 1.0)]
    """
    k = check_order(moment_order, allow_infinite_variance)
    sizes = halved_sizes(n, min_phase)
    given = list(zip(batch_sizes, steps, noise_multipliers, strict=False))
    if not len(batch_sizes) == len(steps) == len(noise_multipliers) == len(sizes):
        raise ValueError(
            "batch_sizes, steps and noise_multipliers must hold one number for each of"
            f" {len(sizes)} phases (got {len(batch_sizes)}, {len(steps)} and"
            f" {len(noise_multipliers)})"
        )
    tuned = []
    for m, (b, T, z) in zip(sizes, given, strict=True):
        clip, error = clip_and_error(moment_2k, k, _minibatch_rate(m, dim, b, T, z))
        tuned.append(Tuned(m, b, clip, T, z * clip / b, error, T))
    return regularized(
        tuned,
        rho=None,
        second_moment=second_moment,
        first_moment=first_moment,
        diameter=diameter,
        reg=reg,
    )


def _minibatch_rate(
    m: int, dim: int, batch_size: int, steps: int, noise_multiplier: float
) -> float:
    b = check.positive_count(batch_sizes=batch_size)
    T = check.positive_count(steps=steps)
    if b > m:
        raise ValueError(f"batch_sizes must be <= the records of their phase, {m} (got {b})")
    noise = (
        check.positive_count(dim=dim)
        * (check.positive(noise_multipliers=noise_multiplier) / b) ** 2
    )
    sampling = 0.0 if b == m else (m - b) / (b * (m - 1.0))
    return ballfree_rate((noise + sampling) / T, T)


def _parts(n: int) -> int:
    """M = max(1, ceil(log2 log2 n)); the slack keeps n = 16, 256, 65536 at 2, 3, 4."""
    if check.positive_count(n=n) < 2:
        raise ValueError(f"n must be >= 2 (got {n})")
    return max(1, math.ceil(math.log2(math.log2(n)) - 1e-12))


def _checked_parts(n: int, sizes: Sequence[int] | None) -> list[int]:
    if sizes is None:
        return [check.positive_count(n=n)] if n < _SKIP_BELOW else sc_reduction_sizes_full(n)
    parts = [check.positive_count(sizes=size) for size in sizes]
    if not parts or sum(parts) > check.positive_count(n=n):
        raise ValueError(f"sizes must hold parts of at most n={n} records together (got {parts})")
    return parts
