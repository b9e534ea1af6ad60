"""Plans of LocalizedSGD: its phases, by which theorem, with which promises."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch_dpsco.accounting.calibrate import noise_multiplier as calibrate_noise
from torch_dpsco.accounting.designs import Fixed, Full, Poisson
from torch_dpsco.accounting.filters import Budget
from torch_dpsco.accounting.parts import Parts
from torch_dpsco.errors import ConditionError, MissingConstantError
from torch_dpsco.optim.heavy_plan import scale_of
from torch_dpsco.optim.pilot import PilotPlan
from torch_dpsco.optim.planned import StepPlan, costs
from torch_dpsco.oracles.base import MeanOracle
from torch_dpsco.oracles.clipped import Clipped
from torch_dpsco.oracles.phased import Phased
from torch_dpsco.oracles.pilot import PilotClipped, QuantilePilot
from torch_dpsco.problem import Problem
from torch_dpsco.prox import Ball, Identity, Prox
from torch_dpsco.rules import Anchored, UpdateRule
from torch_dpsco.schedule import Phase, Schedule
from torch_dpsco.theory.heavy_localized import localized_schedule, localized_schedule_ballfree
from torch_dpsco.theory.heavy_phases import LocalizedPhase, LocalizedSchedule, halved_sizes
from torch_dpsco.theory.heavy_tailed import localized_schedule_minibatch, minibatch_size, reduction_schedule

METHODS = ("localized", "ball", "boosted", "reduction")
_UNPROMISED = 4.0  # moment order where clip and reg replace all promises: any will do


@dataclass(frozen=True, kw_only=True)
class LocalizedPlan(StepPlan):
    """Public numbers of a run of LocalizedSGD.

    Args:
        localized: the phases, with their clips, noises and regularizers.
        pilots: group of each phase that chooses its clip, a step of its own before the phase; None for none. Later
            phases keep the last choice.
    """

    localized: LocalizedSchedule
    pilots: tuple[PilotPlan | None, ...]

    values: ClassVar[tuple[type, ...]] = (LocalizedPhase, LocalizedSchedule, PilotPlan)

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.pilots) != len(self.localized.phases):
            raise ValueError(f"pilots must be one per phase, {len(self.localized.phases)} (got {len(self.pilots)})")

    @property
    def risk_bound(self) -> float | None:
        """On the expected excess risk; None where clip or reg were chosen by hand."""
        return self.localized.risk_bound

    def oracle(self, prox: Prox) -> MeanOracle:
        """Returns a new oracle with the plan's numbers; raises ValueError for a set that balls cannot be in."""
        balls = any(math.isfinite(phase.radius) for phase in self.localized.phases)
        if balls and not isinstance(prox, (Ball, Identity)):
            raise ValueError(f"prox must be Ball or Identity for phases with balls of their own (got {prox})")
        oracles: list[tuple[MeanOracle, int]] = []
        newest: QuantilePilot | None = None
        for phase, pilot in zip(self.localized.phases, self.pilots, strict=True):
            if pilot is not None:
                newest = pilot.oracle()
                oracles.append((newest, 1))
            oracles += [(_clipped(phase, newest), phase.steps) for _ in range(phase.copies)]
        return Phased(oracles)

    def rule(self) -> UpdateRule:
        """Returns the steps around a center."""
        return Anchored()

    def schedule(self) -> Schedule:
        """Returns the phases of the run, with those of the pilots."""
        phases: list[Phase] = []
        for phase, pilot in zip(self.localized.phases, self.pilots, strict=True):
            phases += [] if pilot is None else [Phase(1)]
            phases += [
                Phase(phase.steps, phase.lr, phase.reg, phase.radius, copy=copy, copies=phase.copies)
                for copy in range(phase.copies)
            ]
        return Schedule(tuple(phases))

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yields what is to be said beside the promise."""
        yield "batches", f"{len(self.schedule().phases)} phases, each on {self.unit}s of its own, of {self.n}"
        yield "steps", f"{self.steps} steps, answer: the last iterate, which is the center of the next phase"
        for phase, pilot in zip(self.localized.phases, self.pilots, strict=True):
            if pilot is not None:
                yield "pilot", str(pilot)
            copies = "" if phase.copies == 1 else f"{phase.copies} times, of which the most central answer is kept: "
            clip = f"the clip ({phase.clip:.3g})" if not any(self.pilots) else "the clip"
            yield (
                f"phase {phase.index}",
                f"{copies}{phase.steps} steps on {phase.batch_size} of {phase.n} {self.unit}s, lambda {phase.reg:.3g}, "
                f"noise of std {phase.noise_multiplier / phase.batch_size:.2g} of {clip}",
            )
        yield from costs(self.oracle(self.prox()), self.design, self.adjacency, self.secure)
        yield "assumed", "rows do not depend on other records; nothing about moments, since rows are clipped"
        if self.risk_bound is not None:
            yield "expected", f"excess risk of the answer at most {self.risk_bound:.3g}, if the promises hold"


def parts_of(
    localized: LocalizedSchedule, pilots: tuple[PilotPlan | None, ...], n: int, kind: type[Poisson] | type[Fixed]
) -> Parts:
    """Returns the design of the phases, minibatches in them being of a kind."""
    parts: list[tuple[Full | Poisson | Fixed, int]] = []
    for phase, pilot in zip(localized.phases, pilots, strict=True):
        parts += [] if pilot is None else [(Full(pilot.size), 1)]
        design = Full(phase.n) if phase.batch_size == phase.n else kind(phase.batch_size, phase.n)
        parts += [(design, phase.steps)] * phase.copies
    return Parts(tuple(parts), n)


def _clipped(phase: LocalizedPhase, pilot: QuantilePilot | None) -> Clipped | PilotClipped:
    if pilot is not None:
        return PilotClipped(pilot, phase.noise_multiplier, phase.batch_size)
    return Clipped(phase.clip, phase.noise_multiplier, phase.batch_size)


def promises(problem: Problem, clip: float | None, reg: float | None, distance: float | None) -> dict[str, Any]:
    """Returns what the theorems take as promised; anything where clip and reg replace it."""
    if clip is not None and reg is not None:
        return {
            "moment_order": _UNPROMISED,
            "moment": 1.0,
            "second_moment": 1.0,
            "diameter": 1.0,
        }
    if problem.moment is None or problem.moment_order is None:
        raise MissingConstantError(
            "LocalizedSGD needs Problem(moment=..., moment_order=...) of the largest gradient norm over w; or give "
            "both clip= (a number, or dp.Pilot()) and reg="
        )
    return {
        "moment_order": problem.moment_order,
        "moment": problem.moment,
        "second_moment": problem.second_moment or problem.moment,
        "diameter": scale_of(problem, distance, "LocalizedSGD"),
    }


def halved(
    method: str,
    problem: Problem,
    promised: dict[str, Any],
    common: dict[str, Any],
    min_phase: int,
    sampling: str,
    budget: Budget,
) -> LocalizedSchedule:
    """Returns phases of halved sizes by one of the methods."""
    order = promised["moment_order"]
    if order < 4 and not common["allow_infinite_variance"]:
        raise ConditionError(
            f"moment_order must be >= 4 for method {method!r}, which needs twice the moments that its bound is about "
            f"(got {order:g}): use method='boosted'"
        )
    moments = {"moment_order": order / 2.0, "moment_2k": promised["moment"], "min_phase": min_phase}
    if method == "reduction":
        (curvature,) = problem.require("strong_convexity", by="LocalizedSGD(method='reduction')")
        return reduction_schedule(**common, **moments, strong_convexity=curvature)
    if method == "ball":
        return localized_schedule(**common, **moments)
    full = localized_schedule_ballfree(**common, **moments)
    if sampling == "full":
        return full
    kind = Poisson if sampling == "poisson" else Fixed
    sizes, rho = halved_sizes(common["n"], min_phase), common["rho"]
    steps = [phase.steps for phase in full.phases]
    batches = [minibatch_size(size, rho, T) for size, T in zip(sizes, steps, strict=True)]
    noises = [
        calibrate_noise(budget.epsilon, budget.delta, design=kind(b, size), steps=T, adjacency=budget.adjacency)
        for b, size, T in zip(batches, sizes, steps, strict=True)
    ]
    del common["rho"], common["max_steps"], common["adjacency"]
    return localized_schedule_minibatch(**common, **moments, batch_sizes=batches, steps=steps, noise_multipliers=noises)
