"""The regularizer of output perturbation where none is given: that of the least bound on the risk of a linear model.

The noise z on the weights moves the score of a row by <x, z>, of the std s|x| only, however many weights there are: for
a K-norm noise of scale b, s = b sqrt(d + 1). By Taylor's formula for each record, and since z has mean 0,

    E F(w + z) - F(w) <= min(beta s^2 / 2, L s)      beta >= phi'' |x|^2,  L >= |phi'| |x|

to which the regularizer adds (lam / 2) R^2 for a model of norm R. Tilted and adversarial objectives are treated as if
they had the sum form, with their constants: no privacy rests on this.

Differs from the paper in: its schedules have |z| for <x, z>, which is sqrt(d) times larger, so that their models shrink
more than they have to.

Source: docs/proofs/output.md#default-regularizer
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch_dpsco.erm.task import LinearTask
from torch_dpsco.errors import CalibrationError, ConditionError
from torch_dpsco.theory.output_sensitivity import safe

_SCORE = 5.0  # norm times bound on rows of a model to be had: probabilities up to 0.993
_GRID = tuple(10.0 ** (power / 4) for power in range(-32, 13))


def least_risk_reg(task: LinearTask, plan: Callable[[LinearTask], Any]) -> float:
    """Returns the regularizer, in sum form, of the least bound; a search over public numbers.

    Args:
        task: its reg is not read.
        plan: `erm.output.plan_output`.

    Raises:
        CalibrationError: nothing is proved for any regularizer.

    Example:
        >>> import torch_dpsco as dp
        >>> from torch_dpsco.erm import LinearTask, Preparation
        >>> from torch_dpsco.erm.output import plan_output
        >>> task = LinearTask(loss=dp.losses.Logistic(), preparation=Preparation(1.0), dim=10, n=10_000,
        ...                   budget=dp.Budget(1.0, 1e-6))
        >>> 10 < least_risk_reg(task, plan_output) < 1000
        True
    """
    bound = task.preparation.bound + task.attack_reach
    base = 0.0
    if task.tilt < 0 and task.lipschitz is not None:
        base = safe(-task.tilt * task.lipschitz**2) * (1 + 1e-6)  # what a negative tilt takes of the curvature
    best, least = math.nan, math.inf
    refusal: CalibrationError = ConditionError(f"reg must be given: no default has a finite bound for {task.loss!r}")
    for factor in _GRID:
        reg = task.n * (base + factor * bound**2)
        try:
            risk = _risk(task, plan(replace(task, reg=reg)), bound)
        except OverflowError:  # e^(tilt range)
            continue
        except CalibrationError as error:
            refusal = error
            continue
        if risk < least:
            best, least = reg, risk
    if math.isinf(least):
        raise refusal
    return best


def added_risk(plan: Any) -> float | None:
    """Returns a bound on E F(w + z) - F(w) of a plan's noise z, F without its regularizer; None where none is proved.

    The regularizer's own part, reg |z|^2 / 2 in the sum, is no loss of a record.
    """
    task = plan.task
    plain = task.num_scores == 1 and not task.tilt and not task.attack_radius and math.isinf(task.radius)
    return _added(task, plan, 1.0) if plain and task.lipschitz is not None else None


def _added(task: LinearTask, plan: Any, grown: float) -> float:
    spread = plan.noise_and_signal[0]
    lipschitz = task.lipschitz_at_minimizers(plan.reg) * math.sqrt(grown)
    moved = lipschitz * spread
    if task.smoothness is not None:
        moved = min(moved, (task.smoothness * grown + abs(task.tilt) * lipschitz**2) / 2 * spread**2)
    return float(moved)


def _risk(task: LinearTask, plan: Any, bound: float) -> float:
    radius = min(task.radius, _SCORE / bound)
    return _added(task, plan, (bound / task.preparation.bound) ** 2) + float(plan.reg / task.n / 2 * radius**2)
