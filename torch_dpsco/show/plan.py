"""The picture of a plan: noise beside signal, and epsilon over steps, also with less and more noise."""

from __future__ import annotations

import math
import textwrap
from contextlib import suppress
from typing import TYPE_CHECKING

from torch_dpsco.accounting.calibrate import rounded_up
from torch_dpsco.accounting.events import Event, in_words, scaled_noise
from torch_dpsco.accounting.ledger import Ledger
from torch_dpsco.errors import ConditionError
from torch_dpsco.show import plots
from torch_dpsco.step.plan import Plan

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NEIGHBORS = (0.8, 1.25)  # noise of the plans that are drawn beside one
_SHOWN = 16
_POINTS = 12


def draw(plan: Plan) -> Figure:
    """Returns the picture; see `Plan.plot`."""
    title = f"{type(plan).__name__}: privacy for one {plan.unit} ({in_words(plan.adjacency)})"
    return plots.figure(title, _noise_panel(plan), _epsilon_panel(plan))


def _noise_panel(plan: Plan) -> plots.Panel:
    title = "Noise beside signal"
    shares = list(plan.noise_shares())[:_SHOWN]
    if not shares or not all(math.isfinite(share) and share > 0 for _, share, _ in shares):
        return plots.words(title, "the plan does not bound\nwhat the noise is added to")
    drawn = {"noise, one coordinate (std)": [share for _, share, _ in shares]}
    dims = [dim for _, _, dim in shares if dim is not None]
    if len(dims) == len(shares):
        norms = [share * math.sqrt(dim) for (_, share, _), dim in zip(shares, dims, strict=True)]
        drawn[f"noise, all {dims[0]} coordinates (norm)"] = norms
    names = [name for name, _, _ in shares]
    whole = ("largest signal (norm)", 1.0)
    return plots.dots(title, "share of the largest signal", names, drawn, whole)


def _epsilon_panel(plan: Plan) -> plots.Panel:
    level = f"epsilon at delta {rounded_up(plan.shown_delta)}"
    target = None if plan.budget is None or plan.budget.risk else plan.budget.epsilon
    limit = None if target is None else (f"budget: {target:g}", target)
    try:
        stages = list(plan.stages())
        if not stages:
            return _release_panel(plan, level, limit)
        drawn = [plots.Line("this plan", *_costs(plan, stages, 1.0))]
    except ConditionError as error:
        return plots.words(
            "What is spent", "not known beforehand:\n" + textwrap.fill(str(error), 40)
        )
    for factor in _NEIGHBORS:
        with suppress(ConditionError):
            drawn.append(plots.Line(f"with noise x {factor:g}", *_costs(plan, stages, factor)))
    return plots.lines("What is spent", "steps made", level, drawn, limit=limit)


def _release_panel(plan: Plan, level: str, limit: tuple[str, float] | None) -> plots.Panel:
    factors = [0.5 * 4 ** (k / (_POINTS - 1)) for k in range(_POINTS)]
    own = _cost(plan, plan.event(), 1.0)
    try:
        line = plots.Line(
            "one release", factors, [_cost(plan, plan.event(), factor) for factor in factors]
        )
    except ConditionError:
        return plots.words(
            "What is spent",
            f"one release:\nepsilon {rounded_up(own)} at delta {rounded_up(plan.shown_delta)}",
        )
    x_label = "noise, as a multiple of this plan's"
    return plots.lines(
        "What is spent", x_label, level, [line], limit=limit, mark=("this plan", 1.0, own)
    )


def _costs(
    plan: Plan, stages: list[tuple[int, Event]], factor: float
) -> tuple[list[float], list[float]]:
    return [0.0, *(float(steps) for steps, _ in stages)], [
        0.0,
        *(_cost(plan, made, factor) for _, made in stages),
    ]


def _cost(plan: Plan, event: Event, factor: float) -> float:
    scaled = event if factor == 1 else scaled_noise(event, factor)
    return Ledger([scaled]).epsilon(plan.shown_delta, plan.adjacency)
