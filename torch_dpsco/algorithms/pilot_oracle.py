"""A pilot that chooses the clip: a noisy quantile of the norms of a group, and the clipped means that follow it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_dpsco import _validate as check
from torch_dpsco.accounting.events import ADJACENCIES, Adjacency, Pure
from torch_dpsco.algorithms.choose_clip import (
    C_MAX,
    C_MIN,
    warn_at_grid_end,
)
from torch_dpsco.algorithms.mechanisms import draw_quantile, geometric_grid, quantile_law
from torch_dpsco.errors import SequenceError, UtilityWarning
from torch_dpsco.noise import Source
from torch_dpsco.rows import GradBatch
from torch_dpsco.step.oracle import ClippedMean, MeanOracle, Release


class QuantilePilot(MeanOracle):
    """Draws a threshold near a quantile of the norms of one batch, by the exponential mechanism.

    Args:
        batch_size: n_0, public number of records of the pilot group.
        epsilon: of the draw, > 0.
        quantile: public target in [0, 1]; see `algorithms.choose_clip.target_quantile`.
        c_min: least threshold, public, > 0.
        c_max: largest threshold, public.

    Raises:
        ValueError: an argument is out of range.

    Guarantee:
        Unit: one row per record. Event: Pure(epsilon) under all adjacencies, since the rank is that of the announced
        size. Assumes that a record's row does not depend on other records, to the last bit: where sizes are private, a
        mean loss, which rounds 1/B, needs batches that are filled up (others are refused, `MeanOracle.jumps`).

    Example:
        >>> from torch_dpsco.rows import DenseBlock
        >>> pilot = QuantilePilot(batch_size=200, epsilon=1.0, quantile=0.5)
        >>> pilot.open([torch.zeros(1)])
        >>> pilot.observe(GradBatch([DenseBlock(torch.linspace(0, 8, 200)[:, None])]))
        >>> release = pilot.release(torch.Generator().manual_seed(0))
        >>> release.still, 3.0 < pilot.chosen < 5.5
        (True, True)
    """

    jumps = True

    def __init__(
        self,
        batch_size: int,
        epsilon: float,
        *,
        quantile: float = 0.9,
        c_min: float = C_MIN,
        c_max: float = C_MAX,
    ) -> None:
        super().__init__(check.positive_count(batch_size=batch_size))
        self.epsilon = check.positive(epsilon=epsilon)
        self.quantile = check.between(0.0, 1.0, quantile=quantile)
        self.c_min = check.positive(c_min=c_min)
        self.c_max = check.positive(c_max=c_max)
        self._grid = geometric_grid(self.c_min, self.c_max)
        quantile_law(
            [], self._grid, self.quantile, self.epsilon, self.batch_size
        )  # its checks, before rows are read
        self._event = Pure(self.epsilon, ADJACENCIES)
        self._query: list[Tensor] | None = None
        self._norms: list[Tensor] = []
        self._chosen: float | None = None

    @property
    def released(self) -> bool:
        """Whether the threshold is drawn."""
        return self._chosen is not None

    @property
    def chosen(self) -> float:
        """The threshold: public. Raises SequenceError before the release."""
        if self._chosen is None:
            raise SequenceError("the pilot has not released its threshold: its step comes first")
        return self._chosen

    def open(self, query: Sequence[Tensor], step: int = 0) -> None:
        """Starts the pilot's batch; raises SequenceError after its release."""
        if self.released:
            raise SequenceError(
                "the pilot has released its threshold: make a new one for another group"
            )
        self.discard()
        dtype = torch.float64 if any(p.dtype == torch.float64 for p in query) else torch.float32
        self._query = [torch.zeros(p.shape, dtype=dtype, device=p.device) for p in query]

    def observe(self, rows: GradBatch, users: Tensor | None = None) -> None:
        """Keeps the norms of rows."""
        if self._query is None:
            raise SequenceError("no logical batch was opened: call open(query) first")
        # PRIVACY: nothing else of a row is kept (test_only_norms_enter_the_release)
        self._norms.append(rows.norms().cpu())

    def discard(self) -> None:
        """Forgets the batch."""
        self._query = None
        self._norms = []

    def sensitivity(self, adjacency: Adjacency) -> float:
        """Returns 0: the released mean is constant."""
        self._event.require(adjacency)
        return 0.0

    def event(self) -> Pure:
        """Returns the event of the draw."""
        return self._event

    def use_exact_noise(self) -> None:
        """Changes nothing: the law of a threshold is a list of integers anyhow, and its draw a uniform one."""

    def release(self, generator: Source) -> Release:
        """Draws the threshold and ends the batch; the mean is 0 and `still`: nothing is to move.

        Warns if the threshold is an end of the grid: a function of the private answer only.
        """
        if self._query is None:
            raise SequenceError("no logical batch was opened: call open(query) first")
        still = self._query
        norms = torch.cat([torch.zeros(0, dtype=torch.float64), *self._norms]).numpy()
        self.discard()
        # PRIVACY: the rank is that of the announced size (test_the_rank_is_that_of_the_announced_size)
        chosen = draw_quantile(
            norms, self._grid, self.quantile, self.epsilon, self.batch_size, generator
        )
        warn_at_grid_end(chosen, self._grid)
        self._chosen = chosen
        return Release(still, still=True)

    def lose(self, step: int, *, halted: bool) -> bool:
        """Takes the middle of the grid, a public number, for a threshold that is lost; warns of it."""
        self._chosen = float(self._grid[len(self._grid) // 2])
        warnings.warn(
            f"the pilot's threshold was lost to a crash: the middle of its grid, {self._chosen:g},"
            " is taken instead",
            UtilityWarning,
            stacklevel=5,
        )
        return False

    def state(self) -> dict[str, float | None]:
        """Returns the threshold, None before its release: public."""
        return {"chosen": self._chosen}

    def restore(self, state: Mapping[str, float | None]) -> None:
        """Goes on from a saved state; drops an open batch."""
        self.discard()
        chosen = state["chosen"]
        if chosen is not None and chosen not in self._grid:
            raise ValueError(
                f"chosen must be on the grid between {self.c_min:g} and {self.c_max:g} (got"
                f" {chosen})"
            )
        self._chosen = None if chosen is None else float(chosen)

    def settings(self) -> dict[str, Any]:
        """Returns the fixed numbers."""
        return self._named("epsilon", "quantile", "c_min", "c_max")

    def metrics(self) -> dict[str, float]:
        """Returns the threshold once it is released."""
        return {} if self._chosen is None else {"clip": self._chosen}


class PilotClipped(ClippedMean):
    """Clips at the threshold that a pilot has released.

    Args:
        pilot: whose threshold is used; its step comes first.
        noise_multiplier: z >= 0, noise std on the sum over the clip.
        batch_size: public divisor.

    Guarantee: that of `ClippedMean`; the threshold is a release of other records (or charged as a release of the same).
    """

    def __init__(self, pilot: QuantilePilot, noise_multiplier: float, batch_size: int) -> None:
        super().__init__(noise_multiplier, batch_size)
        self.pilot = pilot

    def bound(self, query: Sequence[Tensor]) -> float:
        """Returns the pilot's threshold; raises SequenceError before its release."""
        return self.pilot.chosen

    def settings(self) -> dict[str, Any]:
        """Returns the fixed numbers."""
        return self._named("noise_multiplier", pilot=self.pilot.settings())
