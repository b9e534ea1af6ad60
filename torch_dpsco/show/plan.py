"""The picture of a plan: noise beside signal, and epsilon over steps."""

from __future__ import annotations

import math
import textwrap
from typing import TYPE_CHECKING

from torch_dpsco.accounting.events import in_words
from torch_dpsco.accounting.ledger import Ledger
from torch_dpsco.accounting.report.figures import rounded_up
from torch_dpsco.errors import ConditionError
from torch_dpsco.show import plots
from torch_dpsco.step.plan import Plan

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SHOWN = 16


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
            return plots.words(
                "What is spent", f"one release:\n{level}: {rounded_up(plan.epsilon())}"
            )
        costs = [Ledger([made]).epsilon(plan.shown_delta, plan.adjacency) for _, made in stages]
        drawn = plots.Line("this plan", [0.0, *(steps for steps, _ in stages)], [0.0, *costs])
    except ConditionError as error:
        return plots.words(
            "What is spent", "not known beforehand:\n" + textwrap.fill(str(error), 40)
        )
    return plots.lines("What is spent", "steps made", level, [drawn], limit=limit)
