"""Localized phases that the package does not choose: within balls (Algorithm 4), and in copies with boosting.

With balls there is a further tail for leaving one, and where steps are capped the bound grows with n: the package takes
ball-free phases.

Boosting: phase i splits n_i fresh records into J groups of m_i; each group runs the phase from the same center, and the
next center is an answer near more than half of the others. A group is good, |y_j - u_i| <= Q_i/lambda_i with u_i the
regularized population minimizer, with probability at least 0.74 - 1/m_i, so that

    F(w) - F* <= D sqrt(72 S) + 3 rt_1 Q_I/lambda_I,    S = sum_i Q_i^2/8^(i-1),   lambda_1 = sqrt(72 S)/D,

with probability 1 - zeta for J with `boosted_failure` at most zeta. Not in the paper; in the spirit of Asi, Liu, Tian
(2024), constants and proof ours. They are large: conservative=False (default) replaces them by 1, without proof.

Proofs: docs/proofs/heavy_tailed.md#localized-schedule-with-balls, docs/proofs/heavy_tailed.md#boosted-phases.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from torch_dpsco import _validate as check
from torch_dpsco.algorithms.heavy_tailed_numbers import (
    clip_bias,
    clip_threshold_square,
    mean_noise_std,
)
from torch_dpsco.algorithms.localized_numbers import (
    LocalizedPhase,
    LocalizedSchedule,
    PhaseTask,
    ballfree_rate,
    ballfree_steps,
    halved_sizes,
)
from torch_dpsco.errors import InfeasibleError, warn


@dataclass(frozen=True, kw_only=True)
class PaperPhase(LocalizedPhase):
    """A phase within a ball around its start, which knows its steps without a cap, and its copies."""

    radius: float = math.inf
    uncapped_steps: int
    copies: int = 1

    @property
    def capped(self) -> bool:
        """Whether `max_steps` cut the steps short."""
        return self.steps < self.uncapped_steps


@dataclass(frozen=True, kw_only=True)
class PaperSchedule(LocalizedSchedule):
    """A schedule that knows whether its bound is proved."""

    diameter: float | None = None
    proved: bool = False

    @property
    def copies(self) -> int:
        """Independent groups per phase."""
        return self.phases[0].copies

    @property
    def records(self) -> int:
        """Records of all phases and copies."""
        return sum(phase.n * phase.copies for phase in self.phases)

    @property
    def capped(self) -> bool:
        """Whether `max_steps` cut a phase short."""
        return any(phase.capped for phase in self.phases)


class Tuned(NamedTuple):
    """What is chosen for a phase before lambda is known, as in `PaperPhase`."""

    n: int
    batch_size: int
    clip: float
    steps: int
    noise_std: float
    error: float
    uncapped_steps: int
    copies: int = 1


def _full_passes(
    task: PhaseTask,
    n: int,
    clip: float,
    steps: int,
    error: float,
    uncapped: int,
    copies: int = 1,
) -> Tuned:
    noise_std = mean_noise_std(clip, n, check.positive(rho=task.rho), steps, task.adjacency)
    return Tuned(n, n, clip, steps, noise_std, error, uncapped, copies)


def scaled_regs(first: float, count: int) -> list[float]:
    """Returns lambda_1, 8 lambda_1, 64 lambda_1, ..."""
    return [first * 8.0**i for i in range(count)]


def phases_of(
    tuned: Sequence[Tuned], regs: Sequence[float], radii: Sequence[float]
) -> tuple[PaperPhase, ...]:
    """Returns the phases, in their order."""
    return tuple(
        PaperPhase(index=index, reg=reg, radius=radius, **one._asdict())
        for index, (one, reg, radius) in enumerate(zip(tuned, regs, radii, strict=True), start=1)
    )


def _regularized(
    tuned: Sequence[Tuned], task: PhaseTask, lipschitz: float, leaving: float
) -> PaperSchedule:
    """Returns phases with the lambda_1, lambda_2, ... of the least bound, within balls of min(D, Lb/lambda_i)."""
    D = check.positive(diameter=task.diameter)
    second = float(task.second_moment)
    total = math.fsum(
        (2.0 * second**2 / one.n + 4.0 * one.error**2) / 8.0**i for i, one in enumerate(tuned)
    )
    root = math.sqrt(2.0 * total)
    regs = scaled_regs(root / D if task.reg is None else task.reg, len(tuned))
    radii = [min(D, lipschitz / lam) for lam in regs]
    tail = task.first * (tuned[-1].error / regs[-1] + leaving)
    return PaperSchedule(
        phases=phases_of(tuned, regs, radii),
        rho=task.rho,
        adjacency=task.adjacency,
        bound=D * root if task.reg is None else None,
        tail=tail if task.reg is None else None,
        diameter=D,
        proved=task.reg is None,
    )


def localized_schedule(
    task: PhaseTask, *, moment_2k: float, min_phase: int = 1
) -> PaperSchedule:
    """Returns the schedule with balls around the centers, of radius min(D, Lb/lambda_i).

    Where steps are capped its bound GROWS with n, since C is tuned for all steps: prefer the ball-free one. It warns.

    Args:
        task: records, privacy and promises; the diameter is that of the feasible set.
        moment_2k: rt_2k.
        min_phase: phases of fewer records join the one before.

    Source:
        docs/proofs/heavy_tailed.md#localized-schedule-with-balls.

    Example:
        >>> task = PhaseTask(n=10**6, dim=50, rho=0.5, moment_order=2.0, second_moment=1.0, diameter=2.0,
        ...                  max_steps=None)
        >>> round(localized_schedule(task, moment_2k=1.5).bound, 4)
        0.0642
    """
    k = task.moment_order
    sizes = halved_sizes(task.n, min_phase)
    diameter = check.positive(diameter=task.diameter)
    # P(mean of sup-norms > Lb) <= 1/(ell sqrt n) for each phase, by Markov for the power 2k
    root = (len(sizes) * math.sqrt(task.n)) ** (1.0 / (2.0 * k))
    lipschitz = check.positive(moment_2k=moment_2k) * root

    def tuned(size: int) -> Tuned:
        level = task.level(size)
        clip = clip_threshold_square(moment_2k, k, 1.0, 4.0 * level)
        steps, wanted, square = steps_in_ball(level, clip, lipschitz, task)
        error = math.sqrt(clip_bias(moment_2k, k, clip) ** 2 + square)
        return _full_passes(task, size, clip, steps, error, wanted)

    leaving = (len(sizes) + 1) * diameter / math.sqrt(task.n)
    schedule = _regularized([tuned(size) for size in sizes], task, lipschitz, leaving)
    warn_if_capped(schedule.phases)
    return schedule


def steps_in_ball(
    level: float, clip: float, lipschitz: float, task: PhaseTask
) -> tuple[int, int, float]:
    """Returns (steps, those without a cap, the square of what noise and start leave) of a phase in a ball of Lb/lambda.

    Source:
        docs/proofs/heavy_tailed.md#phase-in-a-ball.
    """
    wanted = max(1, math.ceil((1.0 + lipschitz / clip) ** 2 / level))
    T = task.capped(wanted)
    return T, wanted, (4.0 * level * clip**2 * T + 4.0 * (clip + lipschitz) ** 2) / (T + 1.0)


def warn_if_capped(phases: Sequence[PaperPhase]) -> None:
    """Warns that a cap weakens a bound whose threshold is tuned for all steps."""
    cut = [phase for phase in phases if phase.capped]
    if cut:
        warn(
            f"max_steps={cut[0].steps} cuts phase {cut[0].index} short of its"
            f" {cut[0].uncapped_steps} steps ({len(cut)} phases in all): the bound is weak; use the"
            " ball-free schedule, more steps, or reg=",
            stacklevel=3,
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
    task: PhaseTask,
    *,
    moment: float,
    copies: int = 1,
    conservative: bool = False,
    ball: bool = True,
    phases: int | None = None,
) -> PaperSchedule:
    """Returns the schedule; `error` of its phases is Q.

    Args:
        task: records (>= 2 copies), privacy and promises (rt_2 also for k < 2).
        moment: rt_k.
        copies: J >= 1 groups per phase; more than 1 buys probability, not accuracy.
        conservative: constants of the proof, or 1.
        ball: steps stay within min(D, 2 rt_2/lambda_i) of the center; False drops the ball.
        phases: public number I of phases; default max(1, floor(log2(n/(2J)))).

    Returns:
        A schedule; `proved` only if conservative, T >= 2, m_I >= 16 and the failure probability is below 1.

    Guarantee:
        As `PhaseTask`; the choice reads the private answers of disjoint groups only.

    Source:
        docs/proofs/heavy_tailed.md#boosted-phases.

    Example:
        >>> task = PhaseTask(n=640, dim=3, rho=0.2, moment_order=2.0, second_moment=1.0, diameter=2.0,
        ...                  max_steps=None)
        >>> schedule = boosted_localized_schedule(task, moment=1.3, copies=3, conservative=True)
        >>> len(schedule.phases), round(schedule.bound, 3), [phase.n for phase in schedule.phases]
        (6, 58.9, [106, 53, 26, 13, 6, 3])
    """
    moment = check.positive(moment=moment)
    k = task.moment_order
    second = float(task.second_moment)
    diameter = check.positive(diameter=task.diameter)
    c = _PROVED if conservative else _PLAIN
    # exceeded by the mean of sup-norms with probability <= 1/m (Chebyshev)
    lipschitz = 2.0 * second

    def tuned(m: int) -> Tuned:
        level = task.level(m)
        if ball:
            clip = clip_threshold_square(moment, k, c.bias, 4.0 * c.optimization * level)
            steps, wanted, square = steps_in_ball(level, clip, lipschitz, task)
        else:
            wanted = ballfree_steps(level)
            steps = task.capped(wanted)
            unit = 3.0 * ballfree_rate(level, steps) ** 2
            clip = clip_threshold_square(moment, k, c.bias, c.optimization * unit)
            square = unit * clip**2
        spread = math.sqrt(c.optimization * square + c.bias * clip_bias(moment, k, clip) ** 2)
        error = math.sqrt(c.generalization / m) * second + spread
        return _full_passes(task, m, clip, steps, error, wanted, copies)

    made = [tuned(m) for m in _groups(task.n, copies, phases)]
    root = math.sqrt(
        c.telescoping * math.fsum(one.error**2 / 8.0**i for i, one in enumerate(made))
    )
    regs = scaled_regs(root / diameter if task.reg is None else task.reg, len(made))
    radii = [min(diameter, lipschitz / lam) if ball else math.inf for lam in regs]
    parts = phases_of(made, regs, radii)
    if ball:
        warn_if_capped(parts)
    return PaperSchedule(
        phases=parts,
        rho=task.rho,
        adjacency=task.adjacency,
        bound=diameter * root if task.reg is None else None,
        tail=c.reach * task.first * made[-1].error / regs[-1] if task.reg is None else None,
        diameter=diameter,
        proved=conservative and task.reg is None and _is_proved(made),
    )


def _is_proved(made: Sequence[Tuned]) -> bool:
    """Returns whether groups are large, steps enough, and the bound fails with a probability below 1."""
    if made[-1].n < _SMALLEST_GROUP or any(one.steps < 2 for one in made):
        return False
    return boosted_failure(made[0].copies, len(made), made[-1].n) < 1.0


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


@dataclass(frozen=True)
class Selected:
    """Index of the chosen candidate, and the radii of all."""

    index: int
    radii: list[float]


def select_central(candidates: Tensor) -> Selected:
    """Returns the candidate that has more than half of all candidates nearest to it.

    The radius of candidate j is the (floor(J/2) + 1)-th smallest distance to a candidate, itself included; the least
    radius wins, the first one of equals. If more than half of the candidates are within q of a point, the chosen one
    is within 3 q of it.

    Args:
        candidates: (J, dim) float64, J >= 1.

    Source: docs/proofs/heavy_tailed.md#central-candidate.

    Example:
        >>> select_central(torch.tensor([[0.0], [5.0], [0.1]])).index
        0
    """
    # exact differences: the matrix product form of cdist loses half of the digits
    distances = torch.cdist(candidates, candidates, compute_mode="donot_use_mm_for_euclid_dist")
    radii = distances.nan_to_num_(nan=torch.inf).sort(dim=1).values[:, len(candidates) // 2]
    return Selected(int(radii.argmin()), radii.tolist())
