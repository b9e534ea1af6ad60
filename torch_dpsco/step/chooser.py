"""The step rule: batches, number of steps, step size and momentum of a run, from public numbers.

`HolderSGD`, `ClippedSGD`, `ProximalSGD` and `UserClippedSGD` take it for what is not given. Privacy does not rest on
it: noise is calibrated afterwards, for the design and the number of steps that come out.

Source: `step.pace`, docs/proofs/steps.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from torch_dpsco import _validate as check
from torch_dpsco._validate import shown
from torch_dpsco.accounting import calibrate
from torch_dpsco.accounting.budgets import Budget
from torch_dpsco.accounting.designs import (
    Assigned,
    Design,
    Fixed,
    Full,
    Poisson,
    Shuffled,
)
from torch_dpsco.accounting.events import (
    ADD_REMOVE,
    REPLACE_ONE,
    ZERO_OUT,
    Adjacency,
    check_adjacency,
)
from torch_dpsco.errors import AdjacencyError, UnitError
from torch_dpsco.losses.base import TableGradBound
from torch_dpsco.problem import Problem
from torch_dpsco.step import checks
from torch_dpsco.step import pace as theory
from torch_dpsco.step.pace import Pace

_FEW_ROWS, _MOST_ROWS = 1e6, 2e7  # gradients of rows in a run
_SHORT = 0.25  # rows are longer than the mean, and so are their gradients


@dataclass(frozen=True)
class Scale:
    """What a run is measured by.

    Args:
        bound: on gradients of rows, clipped.
        distance: guess of |w_1 - w*|.
        smoothness: of the loss; None for kinks.
        dim: number of parameters; None for a usual one.
    """

    bound: float
    distance: float
    smoothness: float | None
    dim: int | None

    def horizon(self, n: int, budget: Budget) -> float:
        """Returns the sum of the step sizes of a run on all records."""
        return self.distance / theory.noise_of_mean(
            release_noise(budget), self.bound, n, 1, self.dim, sampled=False
        )


@dataclass(frozen=True)
class Run:
    """What comes out."""

    design: Design
    steps: int
    noise: float
    pace: Pace


def scale_of_problem(
    problem: Problem, clip: float, distance: float | None, dim: int | None
) -> Scale | None:
    """Returns the scale of a loss of the table; None where the promises do not say it.

    Args:
        problem: promises of one record.
        clip: share of the bound on gradients that is left.
        distance: guess of |w_1 - w*|; default the usual one, at most the radius.
        dim: number of parameters; default 64 for each score.
    """
    at_zero = problem.grad_at_zero
    rows = problem.bound_x
    if not at_zero or rows is None:
        return None
    table = problem.exact_grad_bound
    real = False
    if isinstance(table, TableGradBound):
        real = table.loss.target_kind == "real"
        dim = dim or theory.USUAL_DIM * table.loss.num_scores
    smooth = problem.smoothness is not None
    if distance is None:
        distance = theory.usual_distance(at_zero, rows, problem.bound_y if real else None, smooth)
        distance = min(distance, problem.radius)
    bound = problem.lipschitz or problem.grad_bound(
        distance
    )  # noise may follow the iterate, as far as it goes
    return Scale(clip * bound, distance, problem.smoothness or None, dim)


def scale_of_clip(
    problem: Problem, clip: float | None, distance: float | None, dim: int | None, by: str
) -> Scale:
    """Returns the scale of rows that are clipped, in units of the clip, which nobody needs to know.

    Args:
        problem: that promises a smoothness, and maybe a ball.
        clip: C; None where it is not known yet: gradients are then taken to be four times as long as a distance that is
            given says, smoothness times it.
        distance: guess of |w_1 - w*|; default the radius, or else the usual one.
        dim: number of parameters.
        by: name of the class.
    """
    (smoothness,) = problem.require("smoothness", by=by)
    known = min(distance or math.inf, problem.radius)
    if math.isfinite(known):
        return Scale(1.0, _SHORT / smoothness if clip is None else known / clip, smoothness, dim)
    rows = problem.bound_x or math.sqrt(smoothness)
    return Scale(1.0, theory.usual_distance(1.0, rows, None, smooth=True), smoothness, dim)


def loudness(n: int, budget: Budget, dim: int | None) -> float:
    """Returns the norm of the noise of the mean of all steps over the clip."""
    return theory.noise_of_mean(release_noise(budget), 1.0, n, 1, dim, sampled=False)


def run_of(
    scale: Scale,
    n: int,
    budget: Budget,
    sampling: str | Design | None,
    adjacency: Adjacency,
    batch_size: int | None = None,
    steps: int | None = None,
    epochs: float | None = None,
) -> Run:
    """Returns what is not given of a run in many steps, its noise, and its step size.

    Args:
        scale: what it is measured by.
        n: public number of records or users.
        budget: to be met.
        sampling: as in `drawn`.
        adjacency: of the guarantee.
        batch_size: expected size of a batch; default such that the steps make 20 passes, or 1e6 gradients if these
            are more, and at most 2e7.
        steps: number of steps, in place of epochs; default by the horizon, and 20 passes at least.
        epochs: passes over the data.
    """
    wanted = steps
    if wanted is None:
        wanted = theory.steps_to(scale.horizon(n, budget), scale.smoothness)
    passes = min(theory.PASSES, max(1.0, _MOST_ROWS / n))
    if batch_size is None and sampling != "full" and not isinstance(sampling, Design):
        if sampling == "assigned":
            share = 1.0 / one_pass(scale, n, budget, momentum=True, secret=True)
        else:
            share = (max(passes, _FEW_ROWS / n) if epochs is None else epochs) / wanted
        batch_size = min(n, max(1, math.ceil(share * n)))
    design = sampled(sampling or "poisson", batch_size, n, adjacency)
    if steps is None and epochs is None and (sampling == "allocated" or not design.one_pass):
        steps = max(wanted, calibrate.epoch_steps(design, passes) if design.batch_size < n else 0)
        if sampling == "allocated":  # a pass that is begun costs as much as a whole one
            steps += -steps % design.batches
    design, made = drawn(sampling, batch_size, n, adjacency, steps, epochs, 1)
    assert made is not None  # one pass at least
    noise = noise_for(budget, design, made)
    return Run(design, made, noise, pace_of(scale, design, made, noise))


def one_pass(scale: Scale, n: int, budget: Budget, momentum: bool, secret: bool = False) -> int:
    """Returns the number of batches of one pass.

    Args:
        scale: what it is measured by.
        n: public number of records.
        budget: to be met.
        momentum: whether steps have it.
        secret: whether each record draws its batch secretly, so that more batches have less noise each.
    """
    smoothness = scale.smoothness or 1.0
    if not secret:
        return min(n, theory.one_pass_steps(scale.horizon(n, budget), smoothness, momentum))
    if scale.smoothness is None:
        return max(numbers_of_steps(n))

    def risk(steps: int) -> float:
        noise = noise_of_pass(budget, steps)
        level = theory.noise_of_mean(
            noise, scale.bound, max(1, n // steps), steps, scale.dim, sampled=steps > 1
        )
        return theory.risk(scale.distance, level, steps, smoothness, momentum)

    return min(numbers_of_steps(n), key=risk)


def numbers_of_steps(n: int) -> list[int]:
    """Returns the numbers of batches that a secret pass over n records may have: powers of 2 up to 1024."""
    return [2**k for k in range(theory.MOST.bit_length()) if 2**k <= n]


def noise_of_pass(budget: Budget, steps: int) -> float:
    """Returns about the noise multiplier of so many steps of a secret pass: that of Poisson batches by Renyi orders.

    To compare numbers of steps by; the noise of the run is calibrated for what is chosen.
    """
    return calibrate.noise_multiplier(
        *(budget.epsilon, budget.delta),
        design=Poisson(1, steps),
        steps=steps,
        adjacency=budget.adjacency,
        method="rdp",
    )


def pace_of(scale: Scale, design: Design, steps: int, noise: float) -> Pace:
    """Returns the step size and the momentum of these steps."""
    level = theory.noise_of_mean(
        noise,
        scale.bound,
        design.batch_size,
        steps,
        scale.dim,
        sampled=design.batch_size < design.n,
    )
    if scale.smoothness is None:
        return theory.rough_pace(scale.distance, level, steps, scale.bound)
    return theory.smooth_pace(scale.distance / level, steps, scale.smoothness)


SAMPLING: dict[str, type[Poisson] | type[Fixed] | type[Shuffled] | type[Assigned]] = {
    "poisson": Poisson,
    "fixed": Fixed,
    "shuffled": Shuffled,
    "assigned": Assigned,
    "allocated": Assigned,
}


def usual_adjacency(n: int | None, mode: str = "tight") -> Adjacency:
    """Returns the adjacency where none is said; without n, and in mode "paper", only replaced records are covered."""
    return REPLACE_ONE if n is None or mode == "paper" else ZERO_OUT


def agreed(
    budget: Budget | None,
    adjacency: Adjacency | None,
    unit: str = "example",
    default: Adjacency = ZERO_OUT,
) -> tuple[Budget | None, Adjacency]:
    """Returns budget and adjacency of a plan: what one of them says, or the default where neither does.

    Raises:
        UnitError: the budget protects another unit.
        AdjacencyError: it is of another adjacency.
    """
    if budget is None:
        return None, check_adjacency(adjacency or default)
    if budget.unit != unit:
        raise UnitError(
            f"budget must be of unit {unit!r}: Budget(..., unit={unit!r}) (got {budget.unit!r})"
        )
    budget = budget.under(adjacency or default)
    if adjacency not in (None, budget.adjacency):
        raise AdjacencyError(
            f"adjacency must be {budget.adjacency!r}, the budget's, or None (got {adjacency!r})"
        )
    return budget, budget.adjacency


def sampled(
    sampling: str | Design, batch_size: int | None, n: int | None, adjacency: Adjacency
) -> Design:
    """Returns the design of a word and its numbers; without n none is claimed.

    Args:
        sampling: "poisson", "fixed", "shuffled", "assigned" (one pass), "allocated" (see `in_passes`) or "full"; or a
            design, which has its numbers.
        batch_size: expected size of a batch; None for that of the design, or for n.
        n: public number of records.
        adjacency: of the guarantee.
    """
    if isinstance(sampling, Design):
        if batch_size not in (None, sampling.batch_size):
            raise ValueError(
                f"batch_size must be {sampling.batch_size}, that of {sampling} (got {batch_size})"
            )
        return checks.declared(sampling, n, sampling.batch_size)
    check.choice((*SAMPLING, "full"), sampling=sampling)
    if n is None:
        if adjacency == ADD_REMOVE:
            raise AdjacencyError("n must be given under add_remove: a public number, for reference")
        if batch_size is None:
            raise ValueError("batch_size must be given where n is not")
        return checks.declared(None, None, batch_size)
    if sampling == "full":
        if batch_size not in (None, n):
            raise ValueError(f"batch_size must be n={n} for full batches (got {batch_size})")
        return Full(n)
    return SAMPLING[sampling](n if batch_size is None else batch_size, n)


def in_passes(
    design: Design,
    sampling: str | Design,
    steps: int | None,
    epochs: float | None,
    default: float | None,
) -> Design:
    """Returns an "allocated" design with as many passes as the steps, or epochs, need; others as they are."""
    if sampling != "allocated" or not isinstance(design, Assigned):
        return design
    if steps is not None:
        return replace(design, passes=math.ceil(check.positive_count(steps=steps) / design.batches))
    passes = default if epochs is None else epochs
    if passes is None:
        raise ValueError(
            "epochs or steps must be given for sampling='allocated': passes are fixed before the"
            " first"
        )
    return replace(design, passes=math.ceil(check.positive(epochs=passes)))


def steps_of(
    design: Design,
    steps: int | None,
    epochs: float | None,
    default: float | None,
    *,
    once: bool = False,
) -> int | None:
    """Returns the number of steps: given, or of so many passes; None where neither is and there is no default.

    Designs of one pass, or of passes that are counted, have these as default, and no more. `once`: no other
    sampling can be advised, since all runs are of one pass.
    """
    if steps is not None and epochs is not None:
        raise ValueError(f"steps and epochs must not be given both (got {steps} and {epochs})")
    if steps is None:
        passes = default if epochs is None else epochs
        if epochs is None and design.one_pass:
            return design.steps_per_epoch
        if passes is None:
            return None
        steps = calibrate.epoch_steps(design, passes)
    if design.one_pass and steps > design.steps_per_epoch:
        passed = "one pass" if getattr(design, "passes", 1) == 1 else "the passes"
        more = "" if once else ": for more passes take sampling='allocated' or 'poisson'"
        raise ValueError(
            f"steps must be <= {design.steps_per_epoch}, {passed} of {design} (got {steps}){more}"
        )
    return check.positive_count(steps=steps)


def quietest(design: Design, steps: int | None) -> Design:
    """Returns the design of about the least noise for steps on these batches, which plans take where none is given.

    Args:
        design: Poisson batches; others are returned as they are.
        steps: number of steps; None for no limit.

    Returns:
        All records, where a batch holds them; random allocation for exactly one pass, where it has up to 17 % less
        noise; else Poisson batches: in several passes random allocation differs from them by a few per cent (by a tenth
        in large batches at large epsilon), and takes far longer to calibrate.
    """
    if not isinstance(design, Poisson):
        return design
    if design.batch_size == design.n:
        return Full(design.n)
    return Assigned(design.batch_size, design.n) if steps == design.batches else design


def drawn(
    sampling: str | Design | None,
    batch_size: int | None,
    n: int | None,
    adjacency: Adjacency,
    steps: int | None,
    epochs: float | None,
    default: float | None,
) -> tuple[Design, int | None]:
    """Returns the design, by `quietest` where no sampling is given, and the number of steps; see `steps_of`."""
    word = sampling or "poisson"
    design = in_passes(sampled(word, batch_size, n, adjacency), word, steps, epochs, default)
    made = steps_of(design, steps, epochs, default)
    return (design if sampling else quietest(design, made)), made


def noise_for(budget: Budget, design: Design, steps: int | None, rtol: float = 1e-4) -> float:
    """Returns the least noise multiplier at which these steps fit the budget, up to rtol."""
    return calibrate.noise_multiplier(
        budget.epsilon,
        budget.delta,
        design=design,
        steps=steps,
        adjacency=budget.adjacency,
        rtol=rtol,
    )


def release_noise(budget: Budget) -> float:
    """Returns the noise multiplier at which one unsampled clipped mean spends the whole budget."""
    return noise_for(budget, Full(1), 1)


def given_noise(
    noise_multiplier: float | None, budget: Budget | None, design: Design, steps: int | None
) -> float:
    """Returns the noise multiplier that is given, or else `noise_for` the budget."""
    if noise_multiplier is not None:
        return check.nonnegative(noise_multiplier=noise_multiplier)
    if budget is None:
        raise ValueError(
            "budget or noise_multiplier must be given: the target, or noise of your own"
        )
    return noise_for(budget, design, steps)


def dimension(dim: Any) -> int | None:
    """Returns the number of parameters: a number, or a model or parameters that are counted; None for None."""
    if dim is None:
        return None
    if isinstance(dim, (int, float)):
        return int(check.positive_count(dim=dim))
    try:
        items = checks.listed(dim.parameters() if isinstance(dim, torch.nn.Module) else dim)
    except ValueError as error:
        raise ValueError(
            f"dim must be the number of parameters, or a model or parameters (got {shown(dim)})"
        ) from error
    tensors = [p for g in items for p in (g["params"] if isinstance(g, dict) else [g])]
    return max(1, sum(int((p[1] if isinstance(p, tuple) else p).numel()) for p in tensors))
