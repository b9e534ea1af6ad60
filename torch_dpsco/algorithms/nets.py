"""NetSGD: a net of one's own, with nothing to tune.

Every record's gradient is scaled to one length (`oracles.AutoClip`), so that a step has a meaning of its own, whatever
the net and its loss. How far the parameters go in the run follows from the noise, as for users (docs/proofs/steps.md):
the mean of all steps has noise of norm s, and the way is D/s. Batch size and number of steps are public numbers of n.

    w <- w - lr mean;   the answer is a moving average of the iterates, which does what momentum would

Source: Bu, Wang, Zha, Karypis 2022 (automatic clipping); De, Berrada, Hayes, Smith, Balle 2022 (large batches, moving
averages); docs/proofs/steps.md#nets. Differs from them in: the step size is computed from the noise, and not tuned.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch_dpsco import _validate as check
from torch_dpsco.accounting.budgets import Budget
from torch_dpsco.accounting.designs import Design
from torch_dpsco.accounting.events import Adjacency
from torch_dpsco.algorithms.clips import AutoClip
from torch_dpsco.algorithms.heavy_plan import ClippedPlan
from torch_dpsco.errors import MissingConstantError
from torch_dpsco.problem import Pace
from torch_dpsco.prox import Prox
from torch_dpsco.step.chooser import (
    Given,
    UserScale,
    agreed,
    choose_design,
    choose_noise,
    choose_pace,
    dimension,
    loudness,
    noise_of_mean,
    public_size,
    usual_passes,
    warn_if_buried,
)
from torch_dpsco.step.oracle import MeanOracle
from torch_dpsco.step.plan import PlannedOptimizer, Ranges

_OFFSET = 0.01  # gamma of AutoClip, over its bound
_DISTANCE = 24.0
_LARGEST = 4.0  # of steps
_LEAST_STEPS = 120
_MOST_STEPS = 480


class NetScale(UserScale):
    """What a run of a net is measured by, whose gradients all have the length of the clip."""

    def steps(self, n: int, budget: Budget) -> int:
        """Returns the number of steps in which the way can be gone by steps that are not too large."""
        way = (self.distance or _DISTANCE) / loudness(n, budget, self.dim)
        return min(_MOST_STEPS, max(_LEAST_STEPS, math.ceil(way / _LARGEST)))

    def batch_size(self, given: Given, budget: Budget, wanted: int) -> int | None:
        """Returns the size such that the steps make 20 passes, fewer of more than a million records."""
        if given.sampling == "full":
            return None
        passes = usual_passes(given.n) if given.epochs is None else given.epochs
        return min(given.n, max(1, math.ceil(passes / wanted * given.n)))

    def pace(self, design: Design, steps: int, noise: float) -> Pace:
        """Returns the step size for the noise of the mean of all steps."""
        level = noise_of_mean(noise, 1.0, design.batch_size, steps, self.dim, sampled=False)
        step = min(_LARGEST, (self.distance or _DISTANCE) / (steps * level))
        return Pace(step / self.clip)


@dataclass(frozen=True, kw_only=True)
class NetPlan(ClippedPlan):
    """Public numbers of a run of NetSGD.

    Args:
        offset: gamma of `oracles.AutoClip`, by which rows have the length of the clip; None where longer ones are cut.
    """

    offset: float | None = None

    ranges: ClassVar[Ranges] = {**ClippedPlan.ranges, "offset": check.positive}

    def oracle(self, prox: Prox) -> MeanOracle:
        """Returns a new oracle with the plan's numbers."""
        if self.offset is None or self.clip is None:
            return super().oracle(prox)
        return AutoClip(self.clip, self.noise_multiplier, self.batch_size, self.offset)

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yields what is to be said beside the promise."""
        yield from super().lines()
        if self.offset is not None:
            yield (
                "rows",
                f"each gradient has the length {self.clip:g}, or less where it is near 0",
            )


class NetSGD(PlannedOptimizer):
    """SGD for nets whose losses nobody has constants of: gradients of one length, averaged weights.

    Args:
        params: parameters or groups; all of them count as one vector.
        plan: from `NetSGD.plan`.
        rule: another update rule, e.g. `rules.TorchRule(torch.optim.AdamW(...))`; it has averages of its own.
        prox: constraint or penalty.
        reg: lambda of (lambda/2)|w|^2, added after the noise.
        accountant: ledger to charge; default a new one with the plan's budget.
        generator: noise generator of your own (warns).

    Guarantee:
        Unit: one row per record. Adjacency and event: those of the design, with one Gaussian on a mean of clipped rows
        per step, as `ClippedSGD` with the same clip. Nothing is assumed of the loss.
        Source: docs/proofs/heavy_tailed.md#normalized-rows, docs/proofs/steps.md#nets.

    Example:
        >>> import torch, torch_dpsco as dp
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> plan = dp.NetSGD.plan(n=3000, budget=dp.Budget(3.0, 1e-5), dim=model)
        >>> plan.batch_size, plan.steps, plan.clip
        (125, 480, 1.0)
    """

    plans = NetPlan

    @classmethod
    def plan(
        cls,
        *,
        n: int | None = None,
        epsilon: float | None = None,
        delta: float | None = None,
        budget: Budget | None = None,
        noise_multiplier: float | None = None,
        dim: Any = None,
        clip: float | None = None,
        batch_size: int | None = None,
        steps: int | None = None,
        epochs: float | None = None,
        lr: float | None = None,
        distance: float | None = None,
        sampling: str | Design | None = None,
        average: str = "ema",
        adjacency: Adjacency | None = None,
        secure: str | None = None,
    ) -> NetPlan:
        """Returns the public numbers of a run, before anything is spent; what is not given follows from the others.

        Args:
            n: public number of records (a reference under add_remove); that of a design.
            epsilon: of a budget, beside delta, in place of `budget`.
            delta: of a budget, beside epsilon.
            budget: what the run may spend; the noise is chosen for it unless it is given.
            noise_multiplier: z >= 0, noise std on the sum of rows over the clip; 0 is not private.
            dim: the model, or its number of parameters: the step size follows from it.
            clip: bound at which longer gradients are cut, chosen without looking at the data; by default each gradient
                is scaled to length 1.
            batch_size: expected records of a batch, the public divisor; default such that the steps are 20 passes.
            steps: number of steps, in place of epochs; default 120, up to 480 where there is little noise.
            epochs: passes over the data on average.
            lr: step size; default by the step rule.
            distance: guess of how far the parameters have to go, for the step rule; default 24.
            sampling: "poisson" (default), "fixed", "shuffled", "allocated", "assigned" or "full", as in
                `ClippedSGD.plan`; or a design.
            average: which iterates are the answer: "ema" (default), "last", "uniform" or "weighted".
            adjacency: default the budget's, or "zero_out".
            secure: "exact" for noise in integers on a public grid, see docs/performance.md for its cost.

        Raises:
            InfeasibleError: the target cannot be reached; names the way out.
            AdjacencyError: sampling and adjacency do not go together.
            MissingConstantError: no step size is given, and it does not follow from dim and budget.
            ValueError: an argument is out of range.
        """
        budget, adjacency = agreed(budget, adjacency, epsilon, delta)
        given = Given(
            n=public_size(n, sampling),
            adjacency=adjacency,
            sampling=sampling,
            batch_size=batch_size,
            steps=steps,
            epochs=epochs,
            noise_multiplier=noise_multiplier,
        )
        if lr is None and (noise_multiplier is not None or dim is None):
            raise MissingConstantError(
                "lr must be given, or dim (the model) and a budget, from which it follows (got"
                f" dim={dim}, noise_multiplier={noise_multiplier})"
            )
        if distance is not None:
            check.positive(distance=distance)
        length = 1.0 if clip is None else check.positive(clip=clip)
        scale = NetScale(length, distance, dimension(dim))
        draws = choose_design(scale, budget, given)
        noise = choose_noise(budget, *draws, given)
        pace = choose_pace(scale, draws, noise) if lr is None else Pace(lr)
        # without noise nothing is buried
        warn_if_buried(None if noise_multiplier else budget, draws, noise, given.n, scale.dim)
        return NetPlan(
            budget=budget,
            adjacency=adjacency,
            design=draws.design,
            steps=draws.steps,
            lr=pace.lr,
            average=average,
            secure=secure,
            clip=length,
            noise_multiplier=noise,
            offset=_OFFSET * length if clip is None else None,
        )
