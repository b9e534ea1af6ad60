"""Schedules of LocalizedSGD for a budget: which theorem, with which promises."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch_dpsco import _validate as check
from torch_dpsco.accounting.calibrate import noise_multiplier as calibrate_noise
from torch_dpsco.accounting.designs import Fixed, Poisson
from torch_dpsco.accounting.events import ADD_REMOVE
from torch_dpsco.accounting.filters import Budget
from torch_dpsco.errors import AdjacencyError, ConditionError, MissingConstantError
from torch_dpsco.optim.heavy_plan import release_noise, scale_of, zcdp_of
from torch_dpsco.problem import Problem
from torch_dpsco.theory.heavy_localized import localized_schedule, localized_schedule_ballfree
from torch_dpsco.theory.heavy_phases import LocalizedSchedule, halved_sizes
from torch_dpsco.theory.heavy_tailed import (
    boosted_localized_schedule,
    localized_schedule_minibatch,
    minibatch_size,
    reduction_schedule,
)

__all__ = ["METHODS", "plan_localized"]

METHODS = ("localized", "ball", "boosted", "reduction")
_UNPROMISED = 4.0  # moment order where clip and reg replace all promises: any will do


def plan_localized(
    problem: Problem,
    *,
    n: int,
    budget: Budget,
    dim: int,
    method: str | None,
    clip: float | None,
    reg: float | None,
    copies: int,
    max_steps: int | None,
    min_phase: int,
    sampling: str,
    distance: float | None,
    allow_infinite_variance: bool,
) -> LocalizedSchedule:
    """Returns the schedule; see `LocalizedSGD.plan`."""
    if budget.adjacency == ADD_REMOVE:
        raise AdjacencyError(
            "adjacency must be replace_one or zero_out for phases on parts that are cut by position (got add_remove)"
        )
    if budget.mode != "planned":
        raise ValueError(f"budget must be of mode 'planned', to be spent by a plan (got {budget.mode!r})")
    check.choice(("full", "poisson", "fixed"), sampling=sampling)
    check.positive_count(copies=copies)
    if distance is not None:
        check.positive(distance=distance)
    promised = _promises(problem, clip, reg, distance)
    order = promised["moment_order"]
    if method is None:
        method = "boosted" if copies > 1 or order < 4 else "localized"
    check.choice(METHODS, method=method)
    check.positive_count(min_phase=min_phase)
    common: dict[str, Any] = {
        "n": check.positive_count(n=n),
        "dim": dim,
        "rho": zcdp_of(release_noise(budget), budget.adjacency),
        "second_moment": promised["second_moment"],
        "diameter": promised["diameter"],
        "max_steps": max_steps,
        "reg": reg,
        "adjacency": budget.adjacency,
        "allow_infinite_variance": allow_infinite_variance,
    }
    if copies > 1 and method != "boosted":
        raise ValueError(f"copies must be 1 for method {method!r} (got {copies}): only 'boosted' has several")
    if sampling != "full" and method != "localized":
        raise ValueError(f"sampling must be 'full' for method {method!r} (got {sampling!r})")
    if method == "boosted":
        schedule = boosted_localized_schedule(
            **common, moment_order=order, moment=promised["moment"], copies=copies, ball=False
        )
    else:
        schedule = _halved(method, problem, promised, common, min_phase, sampling, budget)
    if clip is None:
        return schedule
    # noise in units of the clip: privacy stays as it is
    phases = tuple(
        replace(
            phase,
            clip=check.positive(clip=clip),
            noise_std=phase.noise_multiplier * clip / phase.batch_size,
            error=None,
        )
        for phase in schedule.phases
    )
    return replace(schedule, phases=phases, bound=None, tail=None, proved=False)


def _promises(problem: Problem, clip: float | None, reg: float | None, distance: float | None) -> dict[str, Any]:
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


def _halved(
    method: str,
    problem: Problem,
    promised: dict[str, Any],
    common: dict[str, Any],
    min_phase: int,
    sampling: str,
    budget: Budget,
) -> LocalizedSchedule:
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
