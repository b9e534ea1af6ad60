"""Public numbers of planned runs on heavy-tailed gradients, and what their planners share."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch_dpsco import _validate as check
from torch_dpsco.accounting.calibrate import noise_multiplier as calibrate_noise
from torch_dpsco.accounting.designs import Disjoint, Fixed, Full, Poisson
from torch_dpsco.accounting.events import ADD_REMOVE, CLIP_UNITS, Adjacency
from torch_dpsco.accounting.filters import Budget
from torch_dpsco.accounting.parts import Assigned
from torch_dpsco.errors import MissingConstantError
from torch_dpsco.optim.checks import listed
from torch_dpsco.optim.pilot import PilotPlan
from torch_dpsco.optim.planned import costs
from torch_dpsco.oracles.clipped import Clipped
from torch_dpsco.problem import Problem

__all__ = ["FEW_STEPS", "HeavyTailedPlan", "Theory", "dimension", "one_pass", "release_noise", "scale_of", "zcdp_of"]

FEW_STEPS = 5  # of one pass, where no theorem chooses: worst-case bounds choose too many


@dataclass(frozen=True)
class Theory:
    """What a theorem chooses.

    Args:
        steps: T.
        clip: C.
        lr: step size, as the optimizer takes it.
        bound: on the expected excess risk.
    """

    steps: int
    clip: float
    lr: float
    bound: float


@dataclass(frozen=True, kw_only=True)
class HeavyTailedPlan:
    """Public numbers of a planned run, before anything is spent.

    Args:
        n: public number of records.
        dim: number of parameters.
        design: how batches of the training records are drawn.
        steps: number of steps, without that of a pilot.
        lr: step size.
        clip: C; None if a pilot chooses it.
        noise_multiplier: noise std on the sum of rows over C.
        adjacency: of the guarantee.
        epsilon: target.
        delta: target.
        pilot: group that chooses the clip, or None.
        risk_bound: on the expected excess risk, if a theorem chose steps and clip; else None. What it
            takes for granted: docs/proofs/heavy_tailed.md#defaults-without-a-theorem.
    """

    n: int
    dim: int
    design: Disjoint | Assigned | Full | Poisson | Fixed
    steps: int
    lr: float
    clip: float | None
    noise_multiplier: float
    adjacency: Adjacency
    epsilon: float
    delta: float
    pilot: PilotPlan | None = None
    risk_bound: float | None = None

    @property
    def batch_size(self) -> int:
        """Public divisor of a step."""
        return self.design.batch_size

    def __str__(self) -> str:
        oracle = self.mechanism().get("oracle") or Clipped(self.clip or 1.0, self.noise_multiplier, self.batch_size)
        lines = costs(oracle, self.design, self.adjacency, None)
        return "\n".join([repr(self), *(f"  {label:<12}{text}" for label, text in lines)])

    def mechanism(self) -> dict[str, Any]:
        """Returns the arguments that give these numbers to an optimizer."""
        if self.pilot is not None:
            assert not isinstance(self.design, Assigned)  # a pilot is refused under add_remove
            oracle, design, schedule = self.pilot.before(self.design, self.steps, self.noise_multiplier)
            return {"oracle": oracle, "design": design, "schedule": schedule}
        return {
            "clip": self.clip,
            "noise_multiplier": self.noise_multiplier,
            "batch_size": self.batch_size,
            "design": self.design,
            "steps": self.steps,
        }

    @property
    def noise_std(self) -> float | None:
        """Std of the noise on the mean of a step; None if the clip is not known yet."""
        return None if self.clip is None else self.noise_multiplier * self.clip / self.batch_size


def one_pass(batch_size: int, n: int, adjacency: Adjacency, steps: int | None = None) -> Disjoint | Assigned:
    """Returns the design of one pass for an adjacency; of `steps` batches, if these use (nearly) all records."""
    return Assigned(batch_size, n, steps) if adjacency == ADD_REMOVE else Disjoint(batch_size, n)


def release_noise(budget: Budget) -> float:
    """Returns the noise multiplier at which one unsampled clipped mean spends the whole budget."""
    return calibrate_noise(budget.epsilon, budget.delta, design=Full(1), steps=1, adjacency=budget.adjacency)


def zcdp_of(noise_multiplier: float, adjacency: Adjacency) -> float:
    """Returns rho of one unsampled clipped mean."""
    ratio = CLIP_UNITS[adjacency] / noise_multiplier
    return ratio * ratio / 2.0


def dimension(params: Any) -> tuple[list[Any], int]:
    """Returns the parameters or groups as a list, and the number of scalars in them."""
    items = listed(params)
    tensors = [p for g in items for p in (g["params"] if isinstance(g, dict) else [g])]
    return items, max(1, sum((p[1] if isinstance(p, tuple) else p).numel() for p in tensors))


def scale_of(problem: Problem, distance: float | None, by: str) -> float:
    """Returns D, a bound on the distance of start and answer: `distance`, or the diameter of the feasible set."""
    if distance is not None:
        return check.positive(distance=distance)
    if math.isinf(problem.radius):
        raise MissingConstantError(
            f"{by} needs a scale to plan from moments: give distance= (a bound on |w_0 - w*|), or promise a radius"
        )
    return 2.0 * problem.radius
