"""CorrelatedSGD: passes in one order x clipped oracle x noise that later steps partly subtract x SGD.

After "DP-FTRL" and banded matrix factorization (Kairouz et al. 2021; Choquette-Choo et al. 2023). No sampling is
amplified, so that the order of records need not stay secret; the sum of all updates, which is what SGD moves by, has
far less noise than that of independent noise at the same cost.

Differs from the published methods in: 1. past noise is forgotten where a run is copied, saved or broken off; 2. the
sensitivity is enlarged by proved rounding errors; 3. Toeplitz strategies only, of coefficients that never increase.

Proof: docs/proofs/correlated.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from torch_dpsco import _validate as check
from torch_dpsco.accounting.budgets import Budget
from torch_dpsco.accounting.designs import Cyclic
from torch_dpsco.accounting.events import ADD_REMOVE, Adjacency
from torch_dpsco.algorithms.correlated_numbers import Banded, least_error
from torch_dpsco.algorithms.oracles import CorrelatedClipped
from torch_dpsco.errors import AdjacencyError
from torch_dpsco.prox import Prox
from torch_dpsco.step.chooser import Given, agreed, choose_noise
from torch_dpsco.step.plan import PlannedOptimizer, Ranges, StepPlan

_BATCH = 512
_BANDS = 32  # of which one vector of noise each is kept


@dataclass(frozen=True, kw_only=True)
class CorrelatedPlan(StepPlan):
    """Public numbers of a run of CorrelatedSGD.

    Args:
        clip: C, > 0.
        noise_multiplier: z, std over C of the ordinary noise that costs as much.
        coefficients: of the strategy.
    """

    clip: float
    noise_multiplier: float
    coefficients: tuple[float, ...]

    ranges: ClassVar[Ranges] = {**StepPlan.ranges, "clip": check.positive}

    def oracle(self, prox: Prox) -> CorrelatedClipped:
        """Returns a new oracle with the plan's numbers."""
        assert self.steps is not None
        return CorrelatedClipped(
            self.clip,
            self.noise_multiplier,
            self.batch_size,
            Banded(self.coefficients),
            self.steps,
        )

    def noise_shares(self) -> Iterator[tuple[str, float, int | None]]:
        """Yields the noise that is added to each mean; later steps subtract parts of it."""
        yield (
            "each step",
            self.noise_multiplier * Banded(self.coefficients).norm / self.batch_size,
            None,
        )

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yields what is to be said beside the promise."""
        yield from super().lines()
        assert self.steps is not None
        strategy = Banded(self.coefficients)
        left = float(strategy.prefix_std(self.steps)[-1]) * strategy.norm / self.steps**0.5
        std = self.noise_multiplier * strategy.norm * self.clip / self.batch_size
        past = {0: "", 1: ", less a part of the noise of the step before"}.get(
            strategy.bands - 1,
            f", less parts of the noise of the {strategy.bands - 1} steps before",
        )
        yield (
            "noise",
            f"std {std:.3g} per coordinate of a mean gradient of norm at most {self.clip:g}{past}",
        )
        yield "assumed", "rows do not depend on other records; equal rows have equal sums"
        yield (
            "expected",
            (
                f"the noise of all steps together is {left:.2f} of what independent noise would sum"
                " up to at the same cost"
            ),
        )


class CorrelatedSGD(PlannedOptimizer):
    """Private SGD on all records in turn, whose noise is partly subtracted again by later steps.

    Guarantee:
        zero_out and replace_one, n public. Unit: one row per record. Event of a pass: one unsampled Gaussian. Assumes
        batches of the optimizer's own loader, rows that do not depend on other records, equal sums of equal rows.
        Source: docs/proofs/correlated.md.

    Example:
        >>> import torch, torch_dpsco as dp
        >>> plan = dp.CorrelatedSGD.plan(n=4096, budget=dp.Budget(8.0, 1e-6), clip=1.0, lr=0.1, batch_size=64, epochs=2)
        >>> optimizer = dp.CorrelatedSGD(dp.attach(torch.nn.Linear(3, 1)).parameters(), plan)
        >>> plan.steps, len(plan.coefficients)
        (128, 32)
    """

    plans = CorrelatedPlan

    @classmethod
    def plan(
        cls,
        *,
        n: int,
        clip: float,
        lr: float,
        epsilon: float | None = None,
        delta: float | None = None,
        budget: Budget | None = None,
        noise_multiplier: float | None = None,
        steps: int | None = None,
        epochs: int | None = None,
        batch_size: int | None = None,
        bands: int | None = None,
        average: str = "last",
        radius: float = float("inf"),
        adjacency: Adjacency | None = None,
    ) -> CorrelatedPlan:
        """Returns the public numbers of a run, before anything is spent.

        Args:
            n: public number of records.
            clip: C > 0, chosen without looking at the data.
            lr: step size, >= 0.
            epsilon: of a budget, beside delta, in place of `budget`.
            delta: of a budget, beside epsilon.
            budget: target; the noise is chosen for it unless it is given.
            noise_multiplier: z >= 0, std over C of the ordinary noise that costs as much.
            steps: number of steps, in place of epochs.
            epochs: number of passes, all in the same order; default 1.
            batch_size: of all batches but the last of a pass, at most n; default 512, or n.
            bands: b, at most the batches of a pass; b - 1 vectors of past noise are kept. Default 32, or what there is.
            average: "last", "uniform" or "weighted".
            radius: of the ball that the iterates stay in.
            adjacency: "zero_out" (default) or "replace_one".

        Raises:
            AdjacencyError: nothing is proved under add_remove.
            InfeasibleError: the target cannot be reached.
        """
        budget, adjacency = agreed(budget, adjacency, epsilon, delta)
        if adjacency == ADD_REMOVE:
            raise AdjacencyError(
                "adjacency must be zero_out or replace_one: records keep their places (got"
                f" {adjacency})"
            )
        given = Given(
            n=n,
            adjacency=adjacency,
            batch_size=min(_BATCH, n) if batch_size is None else batch_size,
            steps=steps,
            epochs=epochs,
            noise_multiplier=noise_multiplier,
        )
        design, steps = _in_turn(given)
        bands = _bands(bands, min(design.batches, steps))
        return CorrelatedPlan(
            budget=budget,
            adjacency=adjacency,
            design=design,
            steps=steps,
            lr=lr,
            radius=radius,
            average=average,
            clip=clip,
            noise_multiplier=choose_noise(budget, design, steps, given),
            coefficients=least_error(steps, bands).coefficients,
        )


def _in_turn(given: Given) -> tuple[Cyclic, int]:
    """Returns passes in one order, as many as the steps need, and the number of steps."""
    batch_size = check.positive_count(batch_size=given.batch_size)
    batches = math.ceil(given.n / batch_size)
    given.require_one_length()
    steps = given.steps or int(given.epochs or 1) * batches
    return Cyclic(batch_size, given.n, math.ceil(steps / batches)), steps


def _bands(bands: int | None, most: int) -> int:
    """Returns the number of bands, of at most so many."""
    if bands is None:
        return min(_BANDS, most)
    if check.positive_count(bands=bands) > most:
        raise ValueError(
            f"bands must be <= {most}, the batches of a pass and the steps (got {bands})"
        )
    return bands
