"""An oracle of a stranger: the exact mean, without clip, noise or privacy; a baseline through the same optimizer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_dpsco import _validate as check
from torch_dpsco import compat
from torch_dpsco.accounting.events import Adjacency, NonPrivate
from torch_dpsco.noise import Source
from torch_dpsco.rows import GradBatch
from torch_dpsco.step.oracle import MeanOracle, Release


class Exact(MeanOracle):
    """Releases exact means; its event is `NonPrivate`, which every budget refuses.

    A row with a non-finite norm contributes 0.

    Args:
        batch_size: divisor of the mean.
    """

    def __init__(self, batch_size: int) -> None:
        super().__init__(check.positive_count(batch_size=batch_size))
        self._means: list[Tensor] = []

    def open(self, query: Sequence[Tensor], step: int = 0) -> None:
        """Starts a logical batch."""
        self._means = [torch.zeros(p.shape, dtype=torch.float64, device=p.device) for p in query]

    def observe(self, rows: GradBatch, users: Tensor | None = None) -> None:
        """Adds rows to the mean."""
        weights = rows.norms().isfinite().double() / self.batch_size
        compat.foreach_add_(self._means, rows.weighted_sum(weights))

    def discard(self) -> None:
        """Forgets the logical batch."""
        self._means = []

    def sensitivity(self, adjacency: Adjacency) -> float:
        """Returns inf: nothing bounds a row."""
        return math.inf

    def event(self) -> NonPrivate:
        """Returns the event without privacy."""
        return NonPrivate()

    def release(self, generator: Source) -> Release:
        """Returns the exact mean."""
        means = self._means
        self._means = []
        return Release(means)

    def settings(self) -> dict[str, Any]:
        """Returns the name."""
        return self._named()

    def metrics(self) -> dict[str, float]:
        """Returns nothing: there are no public numbers."""
        return {}
