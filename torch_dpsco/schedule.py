"""Phases of a run, fixed before it starts."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch_dpsco import _validate as check
from torch_dpsco._doors import check_fields


@dataclass(frozen=True)
class Phase:
    """A stretch of steps.

    Args:
        steps: number of steps, >= 1; None for a single phase without end.
        lr: step size in this phase; None keeps that of the param groups.
        reg: lambda of (lambda/2) |w - c|^2 around the starting point c of the phase, for rules that have it; > 0.
        radius: of the ball around c that the phase stays in; inf for none.
    """

    steps: int | None = None
    lr: float | None = None
    reg: float = 1.0
    radius: float = math.inf

    def __post_init__(self) -> None:
        check_fields(self)
        if self.steps is not None:
            object.__setattr__(self, "steps", check.positive_count(steps=self.steps))
        if self.lr is not None:
            object.__setattr__(self, "lr", check.positive(lr=self.lr))
        check.positive(reg=self.reg)
        check.positive(radius=self.radius, allow_inf=True)


@dataclass(frozen=True)
class Schedule:
    """Phases one after another; each starts from the answer of the one before it.

    Example:
        >>> schedule = Schedule((Phase(2, lr=0.1), Phase(3, lr=0.05)))
        >>> schedule.steps, schedule.locate(2)
        (5, (1, 0))
    """

    phases: tuple[Phase, ...] = (Phase(),)

    def __post_init__(self) -> None:
        check_fields(self)
        object.__setattr__(self, "phases", tuple(self.phases))
        if not self.phases:
            raise ValueError("phases must hold at least one phase (got none)")
        if any(phase.steps is None for phase in self.phases[:-1]):
            raise ValueError("phases must have steps, except the last one")

    @property
    def steps(self) -> int | None:
        """Steps of all phases; None without end."""
        known = [phase.steps for phase in self.phases if phase.steps is not None]
        return sum(known) if len(known) == len(self.phases) else None

    def locate(self, step: int) -> tuple[int, int]:
        """Returns (phase, step within it) of step 0, 1, ...; raises ValueError past the end."""
        k = step if type(step) is int and step >= 0 else check.count(step=step)
        for index, phase in enumerate(self.phases):
            if phase.steps is None or k < phase.steps:
                return index, k
            k -= phase.steps
        raise ValueError(f"step must be < {self.steps}, the number of planned steps (got {step})")

    def position(self, steps: int) -> tuple[int, int]:
        """Returns (phase, steps made in it) after that many steps; at the end of all, that of the last phase."""
        if check.count(steps=steps) and steps == self.steps:
            phase, k = self.locate(steps - 1)
            return phase, k + 1
        return self.locate(steps)
