"""Localization with boosting: for non-smooth convex losses with k moments only (Algorithm 4 needs 2k).

Phase i splits n_i fresh records into J groups of m_i; each group runs the phase from the same center, and the next
center is an answer near more than half of the others. A group is good, |y_j - u_i| <= Q_i/lambda_i with u_i the
regularized population minimizer, with probability at least 0.74 - 1/m_i, so that

    F(w) - F* <= D sqrt(72 S) + 3 rt_1 Q_I/lambda_I,    S = sum_i Q_i^2/8^(i-1),   lambda_1 = sqrt(72 S)/D,

with probability 1 - zeta for J with `boosted_failure` at most zeta. Groups are disjoint and the choice is
post-processing: rho overall.

Not in the paper; in the spirit of Asi, Liu, Tian (2024), constants and proof ours. They are large:
conservative=False (default) replaces them by 1, without proof of the bound and with the same privacy.

The default number of phases, floor(log2(n/(2J))), leaves groups of 2 or 3 records in the last phase, where the theorem
(m_I >= 16) says nothing: `phases` cuts the list. Without balls, X = 3 a^2 C^2 by the ball-free form.

Proof: docs/proofs/heavy_tailed.md#boosted-phases.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch_dpsco import _validate as check
from torch_dpsco.errors import InfeasibleError
from torch_dpsco.theory.clipping import clip_bias, clip_threshold_square
from torch_dpsco.theory.heavy_tailed.inputs import check_order
from torch_dpsco.theory.heavy_tailed.localized import (
    LocalizedSchedule,
    Tuned,
    ballfree_rate,
    ballfree_steps,
    capped_steps,
    full_passes,
    noise_level,
    phases_of,
    scaled_regs,
    steps_in_ball,
    warn_if_capped,
)

_SMALLEST_GROUP = 16


@dataclass(frozen=True)
class _Constants:
    """Q^2 parts: generalization, optimization X, bias B^2; factor of S; distance to u_i in units of Q."""

    generalization: float
    optimization: float
    bias: float
    telescoping: float
    reach: float


_PROVED = _Constants(48.0, 12.0, 144.0, 72.0, 3.0)
_PLAIN = _Constants(4.0, 1.0, 1.0, 8.0, 1.0)


def boosted_localized_schedule(
    *,
    n: int,
    dim: int,
    rho: float,
    moment_order: float,
    second_moment: float,
    moment: float,
    diameter: float,
    copies: int = 1,
    max_steps: int | None = 2000,
    conservative: bool = False,
    ball: bool = True,
    phases: int | None = None,
    first_moment: float | None = None,
    reg: float | None = None,
    adjacency: str = "replace_one",
    allow_infinite_variance: bool = False,
) -> LocalizedSchedule:
    """Returns the schedule; `error` of its phases is Q.

    Args:
        n: public number of records, >= 2 copies.
        dim: d.
        rho: > 0, zCDP of the run.
        moment_order: k.
        second_moment: rt_2.
        moment: rt_k.
        diameter: D > 0, bound on |w_0 - w*|; with balls, of the feasible set.
        copies: J >= 1 groups per phase; more than 1 buys probability, not accuracy.
        max_steps: cap on the steps of a phase; None for no cap.
        conservative: constants of the proof, or 1.
        ball: steps stay within min(D, 2 rt_2/lambda_i) of the center; False drops the ball.
        phases: public number I of phases; default max(1, floor(log2(n/(2J)))).
        first_moment: rt_1, default rt_2.
        reg: a lambda_1 of your own, chosen without looking at the training records; there is no bound then.
        adjacency: of rho.
        allow_infinite_variance: admits k < 2 (rt_2 is still needed).

    Returns:
        A schedule; `proved` only if conservative, T >= 2, m_I >= 16 and the failure probability is below 1.

    Raises:
        ConditionError: k < 2 without `allow_infinite_variance`.
        ValueError: an argument is out of range; n < 2 copies.

    Guarantee:
        As `localized_schedule_ballfree`; the choice reads the private answers of disjoint groups only.

    Source:
        docs/proofs/heavy_tailed.md#boosted-phases.

    Example:
        >>> schedule = boosted_localized_schedule(n=640, dim=3, rho=0.2, moment_order=2.0, second_moment=1.0,
        ...     moment=1.3, diameter=2.0, copies=3, max_steps=None, conservative=True)
        >>> schedule.phases_count, round(schedule.bound, 3), [phase.n for phase in schedule.phases]
        (6, 58.9, [106, 53, 26, 13, 6, 3])
    """
    moment = check.positive(moment=moment)
    k = check_order(moment_order, allow_infinite_variance)
    second = check.positive(second_moment=second_moment)
    check.positive(diameter=diameter)
    c = _PROVED if conservative else _PLAIN
    lipschitz = (
        2.0 * second
    )  # exceeded by the mean of sup-norms with probability <= 1/m (Chebyshev)

    def tuned(m: int) -> Tuned:
        level = noise_level(m, dim, rho, adjacency)
        if ball:
            clip = clip_threshold_square(moment, k, c.bias, 4.0 * c.optimization * level)
            steps, wanted, square = steps_in_ball(level, clip, lipschitz, max_steps)
        else:
            wanted = ballfree_steps(level)
            steps = capped_steps(wanted, max_steps)
            unit = 3.0 * ballfree_rate(level, steps) ** 2
            clip = clip_threshold_square(moment, k, c.bias, c.optimization * unit)
            square = unit * clip**2
        spread = math.sqrt(c.optimization * square + c.bias * clip_bias(moment, k, clip) ** 2)
        error = math.sqrt(c.generalization / m) * second + spread
        return full_passes(m, clip, steps, error, wanted, rho, adjacency, copies)

    made = [tuned(m) for m in _groups(n, copies, phases)]
    root = math.sqrt(c.telescoping * math.fsum(one.error**2 / 8.0**i for i, one in enumerate(made)))
    regs = scaled_regs(root / diameter if reg is None else check.positive(reg=reg), len(made))
    parts = phases_of(
        made, regs, [min(diameter, lipschitz / lam) if ball else math.inf for lam in regs]
    )
    if ball:
        warn_if_capped(parts)
    first = second if first_moment is None else check.positive(first_moment=first_moment)
    enough = made[-1].n >= _SMALLEST_GROUP and all(one.steps >= 2 for one in made)
    return LocalizedSchedule(
        phases=parts,
        rho=rho,
        adjacency=adjacency,
        bound=diameter * root if reg is None else None,
        tail=c.reach * first * made[-1].error / regs[-1] if reg is None else None,
        diameter=diameter,
        proved=conservative
        and reg is None
        and enough
        and boosted_failure(copies, len(made), made[-1].n) < 1.0,
    )


def boosted_failure(copies: int, phases: int, smallest_group: int) -> float:
    """Returns I exp(-2 J (0.24 - 1/m)^2), at most which the bound fails; J odd, m >= 16.

    Raises:
        InfeasibleError: groups of fewer than 16 records.

    Source:
        docs/proofs/heavy_tailed.md#boosted-phases (Hoeffding over groups, union over phases).

    Example:
        >>> round(boosted_failure(copies=51, phases=4, smallest_group=100), 4)
        0.0181
    """
    gap = _gap(smallest_group)
    return check.positive_count(phases=phases) * math.exp(
        -2.0 * check.positive_count(copies=copies) * gap**2
    )


def _groups(n: int, copies: int, phases: int | None) -> list[int]:
    """Records of one group in each phase."""
    J = check.positive_count(copies=copies)
    if check.positive_count(n=n) < 2 * J:
        raise ValueError(
            f"n must be >= {2 * J}, one record for each of copies={J} groups of the first phase"
            f" (got {n})"
        )
    most = (n // J).bit_length() - 1  # largest i with floor(n/2^i) >= J
    count = (
        max(1, (n // (2 * J)).bit_length() - 1)
        if phases is None
        else check.positive_count(phases=phases)
    )
    if count > most:
        raise ValueError(
            f"phases must be <= {most}, for groups of at least one record (got {count})"
        )
    return [(n >> i) // J for i in range(1, count + 1)]


def _gap(smallest_group: int) -> float:
    m = check.positive_count(smallest_group=smallest_group)
    if m < _SMALLEST_GROUP:
        raise InfeasibleError(
            f"smallest_group must be >= {_SMALLEST_GROUP} for a guarantee (got {m}): use fewer"
            " phases or copies"
        )
    return 0.24 - 1.0 / m
