"""Phases of localized methods: multi-pass regularized steps on disjoint parts of the data.

A phase on m records with center c makes T steps

    w <- Proj( w - lr_t ( clipped mean + N(0, sigma^2 I) + lambda (w - c) ) ),   starting at c,

and hands its LAST iterate on as the next center. lambda lr_t is O(1): 2/(t+2) within a ball around c, 1/(t+1) without
one, constant in the paper. Each record is in one phase (and one copy of it), so that the run costs rho, the maximum
over phases, not their sum. The privacy cost depends on clip, noise and steps, never on lambda or the radius.

Proofs: docs/proofs/heavy_tailed.md#disjoint-parts,
docs/proofs/heavy_tailed.md#phase-in-a-ball, docs/proofs/heavy_tailed.md#phase-without-a-ball.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch_dpsco import _validate as check

_GROWTH = 8.0


@dataclass(frozen=True, kw_only=True)
class LocalizedPhase:
    """Public numbers of one phase.

    Args:
        index: 1, 2, ... in the run.
        n: records of EACH copy; no other phase or copy uses them.
        batch_size: (expected) rows of a step, the divisor; n for full passes.
        clip: C.
        steps: T >= 1.
        reg: lambda > 0 of (lambda/2)|w - c|^2, added after clipping and noise.
        radius: of the ball around c, in which the steps stay; inf for none.
        noise_std: sigma, std per coordinate of the noise on the mean over `batch_size`.
        error: sqrt(E|w_T - what|^2) <= error/lambda (A; Q for copies, with constant probability); None where unknown.
        uncapped_steps: T without `max_steps`.
        copies: independent groups of n records each, of which one answer is chosen.
        lr: constant step size (the paper's); None for the steps above.
    """

    index: int
    n: int
    batch_size: int
    clip: float
    steps: int
    reg: float
    radius: float
    noise_std: float
    error: float | None
    uncapped_steps: int
    copies: int = 1
    lr: float | None = None

    @property
    def noise_multiplier(self) -> float:
        """Std of the noise on the sum of rows, over the clip."""
        return self.noise_std * self.batch_size / self.clip

    @property
    def records(self) -> int:
        """Records of all copies."""
        return self.n * self.copies

    @property
    def capped(self) -> bool:
        """Whether `max_steps` cut the steps short."""
        return self.steps < self.uncapped_steps


@dataclass(frozen=True, kw_only=True)
class LocalizedSchedule:
    """Phases one after another; each starts at the answer of the one before.

    Args:
        phases: at least one.
        rho: zCDP of the run: that of each phase; None where an accountant calibrates the noise of phases.
        adjacency: of rho.
        bound: main term of the bound on the excess risk, D sqrt(...); None if lambda was chosen by hand.
        tail: what the bound adds for the last phase and, with balls, for leaving them; None as above.
        diameter: D of the bound.
        proved: whether the theorem covers `bound` + `tail` (with boosting: with the probability of `boosted_failure`).

    Example:
        >>> phase = LocalizedPhase(index=1, n=50, batch_size=50, clip=1.0, steps=4, reg=0.5, radius=float("inf"),
        ...                        noise_std=0.1, error=None, uncapped_steps=9)
        >>> schedule = LocalizedSchedule(phases=(phase,), rho=0.5)
        >>> schedule.records, schedule.capped, phase.noise_multiplier
        (50, True, 5.0)
    """

    phases: tuple[LocalizedPhase, ...]
    rho: float | None
    adjacency: str = "replace_one"
    bound: float | None = None
    tail: float | None = None
    diameter: float | None = None
    proved: bool = False

    def __post_init__(self) -> None:
        if not self.phases:
            raise ValueError("phases must hold at least one phase (got none)")

    @property
    def reg(self) -> float:
        """Lambda of the first phase."""
        return self.phases[0].reg

    @property
    def copies(self) -> int:
        """Independent groups per phase."""
        return self.phases[0].copies

    @property
    def phases_count(self) -> int:
        """Number of phases."""
        return len(self.phases)

    @property
    def records(self) -> int:
        """Records that the run uses."""
        return sum(phase.records for phase in self.phases)

    @property
    def steps(self) -> int:
        """Steps of all phases and copies."""
        return sum(phase.steps * phase.copies for phase in self.phases)

    @property
    def capped(self) -> bool:
        """Whether `max_steps` cut a phase short."""
        return any(phase.capped for phase in self.phases)

    @property
    def risk_bound(self) -> float | None:
        """The whole bound on the excess risk, main term and tail; None if there is none."""
        return None if self.bound is None or self.tail is None else self.bound + self.tail

    def clipped_at(self, clip: float) -> LocalizedSchedule:
        """Returns the phases with another clip and the same noise multipliers: at the same cost, without a bound."""
        check.positive(clip=clip)
        phases = tuple(
            replace(phase, clip=clip, noise_std=phase.noise_multiplier * clip / phase.batch_size, error=None)
            for phase in self.phases
        )
        return replace(self, phases=phases, bound=None, tail=None, proved=False)


def halved_sizes(n: int, min_phase: int = 1, phases: int | None = None) -> list[int]:
    """Returns floor(n/2^i), i = 1, 2, ..., as long as that is at least `min_phase`.

    Sizes below `min_phase` > 1 join the last phase. `phases` cuts the list instead, and drops the rest.

    Source:
        docs/proofs/heavy_tailed.md#localized-schedule.

    Example:
        >>> halved_sizes(20), halved_sizes(20, min_phase=4), halved_sizes(20, phases=2)
        ([10, 5, 2, 1], [10, 8], [10, 5])
    """
    if check.positive_count(n=n) < 2:
        raise ValueError(f"n must be >= 2, for a phase of half of the records (got {n})")
    if check.positive_count(min_phase=min_phase) > n // 2:
        raise ValueError(f"min_phase must be <= n/2={n // 2} (got {min_phase})")
    sizes = [n >> i for i in range(1, n.bit_length())]
    if phases is not None:
        if check.positive_count(phases=phases) > len(sizes):
            raise ValueError(f"phases must be <= {len(sizes)}, the number of times that n can be halved (got {phases})")
        return sizes[:phases]
    kept = [size for size in sizes if size >= min_phase]
    kept[-1] += sum(sizes[len(kept) :])
    return kept


def scaled_regs(first: float, count: int) -> list[float]:
    """Returns lambda_1, 8 lambda_1, 64 lambda_1, ...; the factor must exceed 4, by which A_i^2 may grow."""
    return [first * _GROWTH**i for i in range(count)]
