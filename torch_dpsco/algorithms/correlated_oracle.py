"""Means of clipped rows with correlated noise: later releases subtract part of the earlier noise.

    mean_t = ( sum_i g_i min(1, C / |g_i|) + w_t ) / batch_size,    w_t = z_t - c_1 w_{t-1} - .. - c_{b-1} w_{t-b+1}

Where the batches of one partition come in order, two steps of a record are at least a pass apart, and each is charged
as one Gaussian release. Wherever that is not known (another partition, a batch that does not follow, a copy, a
checkpoint, a lost step) the past noise is forgotten, which is private too, and costs accuracy only.

Proof: docs/proofs/correlated.md.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NoReturn

import torch
from torch import Tensor

from torch_dpsco import _validate as check
from torch_dpsco.accounting.designs import Cyclic, Design, Disjoint, Draw, Shuffled
from torch_dpsco.algorithms.correlated_numbers import Banded
from torch_dpsco.errors import AdjacencyError, ConditionError
from torch_dpsco.noise import Source, normal_
from torch_dpsco.step.oracle import Charge, Clipped, Release


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
        normal_(fresh, self.noise_std, generator)
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
