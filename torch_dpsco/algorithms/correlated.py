"""CorrelatedSGD: passes in one order x clipped oracle x noise that later steps partly subtract x SGD.

After "DP-FTRL" and banded matrix factorization (Kairouz et al. 2021; Choquette-Choo et al. 2023). No sampling is
amplified, so that the order of records need not stay secret; the sum of all updates, which is what SGD moves by, has
far less noise than that of independent noise at the same cost.

Differs from the published methods in: 1. past noise is forgotten where a run is copied, saved or broken off; 2. the
sensitivity is enlarged by proved rounding errors; 3. Toeplitz strategies only, of coefficients that never increase.

Means of clipped rows with correlated noise: later releases subtract part of the earlier noise.

    mean_t = ( sum_i g_i min(1, C / |g_i|) + w_t ) / batch_size,    w_t = z_t - c_1 w_{t-1} - .. - c_{b-1} w_{t-b+1}

Where the batches of one partition come in order, two steps of a record are at least a pass apart, and each is charged
as one Gaussian release. Wherever that is not known (another partition, a batch that does not follow, a copy, a
checkpoint, a lost step) the past noise is forgotten, which is private too, and costs accuracy only.

Proof: docs/proofs/correlated.md.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from torch_dpsco import _validate as check
from torch_dpsco.accounting.budgets import Budget
from torch_dpsco.accounting.designs import Cyclic, Design, Disjoint, Draw, Shuffled
from torch_dpsco.accounting.events import ADD_REMOVE, Adjacency
from torch_dpsco.algorithms.correlated_numbers import Banded, least_error
from torch_dpsco.errors import AdjacencyError, ConditionError
from torch_dpsco.oracles.base import Charge, Release
from torch_dpsco.oracles.clipped import Clipped
from torch_dpsco.prox import Prox
from torch_dpsco.rng import Source
from torch_dpsco.step.chooser import agreed_adjacency, given_noise
from torch_dpsco.step.planned import PlannedOptimizer, StepPlan

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

    def oracle(self, prox: Prox) -> CorrelatedClipped:
        """Returns a new oracle with the plan's numbers."""
        assert self.steps is not None
        return CorrelatedClipped(
            self.clip, self.noise_multiplier, self.batch_size, Banded(self.coefficients), self.steps
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
            lr: step size, > 0.
            budget: target; the noise is chosen for it unless it is given.
            noise_multiplier: z >= 0, std over C of the ordinary noise that costs as much.
            steps: number of steps, in place of epochs.
            epochs: number of passes, all in the same order; default 1.
            batch_size: of all batches but the last of a pass, at most n; default 512, or n.
            bands: b, at most the batches of a pass; b - 1 vectors of past noise are kept. Default 32, or what there is.
            average: "last", "uniform" or "weighted".
            radius: of the ball that the iterates stay in.
            adjacency: "replace_one" (default) or "zero_out".

        Raises:
            AdjacencyError: nothing is proved under add_remove.
            InfeasibleError: the target cannot be reached.
        """
        adjacency = agreed_adjacency(adjacency, budget)
        if adjacency == ADD_REMOVE:
            raise AdjacencyError(
                "adjacency must be zero_out or replace_one: records keep their places (got"
                f" {adjacency})"
            )
        n = check.positive_count(n=n)
        batch_size = (
            min(512, n) if batch_size is None else check.positive_count(batch_size=batch_size)
        )
        batches = math.ceil(n / batch_size)
        if steps is not None and epochs is not None:
            raise ValueError(f"steps and epochs must not be given both (got {steps} and {epochs})")
        if steps is None:
            steps = check.positive_count(epochs=1 if epochs is None else epochs) * batches
        check.positive_count(steps=steps)
        design = Cyclic(batch_size, n, math.ceil(steps / batches))
        most = min(batches, steps)
        bands = min(_BANDS, most) if bands is None else check.positive_count(bands=bands)
        if bands > most:
            raise ValueError(
                f"bands must be <= {most}, the batches of a pass and the steps (got {bands})"
            )
        return CorrelatedPlan(
            budget=budget,
            adjacency=adjacency,
            design=design,
            steps=steps,
            lr=lr,
            radius=radius,
            average=average,
            clip=check.positive(clip=clip),
            noise_multiplier=given_noise(noise_multiplier, budget, design, steps),
            coefficients=least_error(steps, bands).coefficients,
        )


class _Past(deque[Tensor]):
    """Noise of earlier releases, newest first. SECRET: answer minus noise is the exact mean."""

    def __repr__(self) -> str:
        return "_Past(SECRET)"

    def __reduce__(self) -> tuple[Any, ...]:
        # PRIVACY: a copy would take the same noise back (test_copies_and_checkpoints_hold_no_past_noise)
        return _Past, ((), self.maxlen)

    def __copy__(self) -> _Past:
        return _Past((), self.maxlen)


class CorrelatedClipped(Clipped):
    """Clips at a fixed public bound, and adds noise that later releases partly subtract again.

    Args:
        clip: C, > 0.
        noise_multiplier: z >= 0, noise std over C of the ordinary noise that costs as much. What is added to the sum of
            a step is larger by |c|, and what sums of steps keep of it is smaller.
        batch_size: public divisor.
        strategy: coefficients c, public.
        steps: T, after which past noise is forgotten.

    Guarantee:
        zero_out and replace_one; batches of Disjoint, Cyclic (with at least as many batches as bands) or Shuffled
        designs, each charged as `Clipped` with this z. Unit: one row per record. Assumes that rows do not depend on
        other records, and that equal rows give equal sums.

    Example:
        >>> from torch_dpsco.algorithms.correlated_numbers import square_root
        >>> oracle = CorrelatedClipped(1.0, 2.0, 10, square_root(4), steps=100)
        >>> oracle.open([torch.zeros(3)])
        >>> round(oracle.noise_std, 4)
        0.2441
    """

    def __init__(
        self, clip: float, noise_multiplier: float, batch_size: int, strategy: Banded, steps: int
    ) -> None:
        super().__init__(clip, noise_multiplier, batch_size)
        self.strategy = strategy
        self.steps = check.positive_count(steps=steps)
        self._past = _Past((), strategy.bands - 1)
        self._charged: tuple[str, int, int] | None = None  # partition, batch, number of batches
        self._released: tuple[str, int, int] | None = None
        self._since = 0  # releases since noise was forgotten

    def use_exact_noise(self) -> NoReturn:
        """Raises ConditionError: a sum of integers times coefficients lies on no grid."""
        raise ConditionError(
            "secure must be None for correlated noise, which is proved in floating point only"
        )

    def charge(self, design: Design, draw: Draw) -> Charge:
        """Returns what a step is charged: an ordinary Gaussian on its batch."""
        if not isinstance(design, (Disjoint, Cyclic, Shuffled)):
            # PRIVACY: a record may come again too soon (test_designs_that_keep_no_distance_are_refused)
            raise AdjacencyError(
                "design must be Disjoint, Cyclic or Shuffled for correlated noise, where a"
                f" record's steps are known to be apart (got {design})"
            )
        batches = design.batches if isinstance(design, Cyclic) else design.steps_per_epoch
        if isinstance(design, Cyclic) and batches < self.strategy.bands:
            # PRIVACY: rows of one record would add up (test_fewer_batches_than_bands_are_refused)
            raise ConditionError(
                f"bands must be <= {batches}, the batches of a pass (got {self.strategy.bands}):"
                " fewer bands, or smaller batches"
            )
        self.__dict__["_charged"] = (draw.partition, int(draw.part), batches)
        return super().charge(design, draw)

    @property
    def noise_std(self) -> float:
        """Standard deviation of the fresh noise of a release of the mean."""
        ordinary = super().noise_std
        c = self.strategy
        most = max(self.steps, self.strategy.bands)
        room = self.noise_multiplier * c.rounding(self.steps, most, self._dim)
        if room >= 0.5:
            raise ConditionError(
                f"noise_multiplier must be smaller for {self.steps} steps (got"
                f" {self.noise_multiplier:g}): rounding"
            )
        # PRIVACY: with room for the rounding of what is taken back (test_fresh_noise_is_larger_by_the_norm)
        return ordinary * c.norm * (1.0 + 2.0**-48) / (1.0 - room)

    def release(self, generator: Source) -> Release:
        """Adds fresh noise, subtracts part of the past noise, and ends the batch."""
        fresh = torch.zeros(self._dim, dtype=torch.float64, device=self._form[0][2])
        self._draw(fresh, self.noise_std, generator)
        if not self._follows():
            self.forget()
        noise = self.strategy.correlated(fresh, self._past)
        answer = noise.clone()
        self._add_to(answer, self.views(answer))
        self.discard()
        self._past.appendleft(noise)
        self.__dict__.update(_released=self._charged, _charged=None, _since=self._since + 1)
        return Release(self.views(self._memory(self._dim).copy_(answer)))

    def _follows(self) -> bool:
        """Whether this batch comes right after the one before, in the same partition."""
        if self._charged is None or self._released is None or self._since >= self.steps:
            return False
        partition, batch, batches = self._released
        return self._charged == (partition, (batch + 1) % batches, batches)

    def forget(self) -> None:
        """Forgets the past noise: nothing of it is taken back any more."""
        self._past.clear()
        self.__dict__.update(_released=None, _since=0)

    def lose(self, step: int, *, halted: bool) -> bool:
        """Forgets the past noise, of which a part is not known."""
        self.forget()
        return halted

    def restore(self, state: dict[str, Any]) -> None:
        """Forgets the past noise, which no checkpoint holds."""
        self.discard()
        self.forget()

    def settings(self) -> dict[str, Any]:
        """Returns the fixed numbers."""
        return super().settings() | {
            "coefficients": list(self.strategy.coefficients),
            "steps": self.steps,
        }
