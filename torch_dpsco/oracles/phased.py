"""Several oracles one after another: phases, or a pilot that chooses the clip.

A clip threshold from a pilot group: one step that reads norms, draws a quantile, and moves nothing.

The group is disjoint from the records that train, so that under the max rule it costs no budget as long as its epsilon
is at most that of each other group.

| row | counted |
|---|---|
| NaN, inf, or a norm that overflows | above every threshold |
| zero, subnormal | below every threshold |
| more or fewer rows than announced | the target rank is that of the announced number |

Proofs: docs/proofs/heavy_tailed.md#pilot-group, docs/proofs/heavy_tailed.md#private-quantile.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_dpsco import _validate as check
from torch_dpsco.accounting.designs import BaseEvent, Design, Draw
from torch_dpsco.accounting.events import ADJACENCIES, Adjacency, Pure
from torch_dpsco.clip_selection import C_MAX, C_MIN, warn_at_grid_end
from torch_dpsco.errors import SequenceError, UtilityWarning
from torch_dpsco.mechanisms.exponential import draw_quantile, geometric_grid, quantile_law
from torch_dpsco.oracles.base import Charge, MeanOracle, Release
from torch_dpsco.oracles.clipped import ClippedMean
from torch_dpsco.rng import Source
from torch_dpsco.rows import GradBatch
from torch_dpsco.secret import SecretState


class Phased(MeanOracle):
    """Answers each step by the oracle of its phase.

    Args:
        phases: (oracle, steps) pairs, in order; an oracle may serve several phases.

    Guarantee:
        That of the oracle of the open batch, whose event it reports. Which oracle that is depends on the step alone.

    Example:
        >>> import torch
        >>> from torch_dpsco.oracles import Clipped
        >>> oracle = Phased([(Clipped(1.0, 2.0, 10), 3), (Clipped(0.5, 4.0, 5), 2)])
        >>> oracle.open([torch.zeros(2)], step=3)
        >>> oracle.batch_size, oracle.event().sigma
        (5, 4.0)
    """

    def __init__(self, phases: Sequence[tuple[MeanOracle, int]]) -> None:
        self.phases = tuple((oracle, check.positive_count(steps=steps)) for oracle, steps in phases)
        if not self.phases:
            raise ValueError("phases must hold an oracle (got none)")
        if len({oracle.unit for oracle in self.members}) > 1:
            # PRIVACY: figures of different units do not add (test_phases_of_different_units_are_refused)
            raise ValueError("oracle must protect the same unit in each phase: example or user")
        self._active = self.members[0]

    @property
    def batch_size(self) -> int:  # type: ignore[override]
        """Divisor of the phase of the open, or else the last, logical batch."""
        return self._active.batch_size

    @property
    def unit(self) -> str:  # type: ignore[override]
        """Whose rows count as one, the same in all phases."""
        return self.members[0].unit

    @property
    def assumptions(self) -> tuple[str, ...]:  # type: ignore[override]
        """What the oracles assume."""
        return tuple(dict.fromkeys(line for oracle in self.members for line in oracle.assumptions))

    @property
    def members(self) -> tuple[MeanOracle, ...]:
        """The oracle of each phase."""
        return tuple(oracle for oracle, _ in self.phases)

    def take(self) -> None:
        """Makes the oracles those of one optimizer."""
        super().take()
        for oracle in dict.fromkeys(self.members):
            oracle.take()

    def use_exact_noise(self) -> None:
        """Draws the noise of all phases in integers."""
        for oracle in self.members:
            oracle.use_exact_noise()

    def open(self, query: Sequence[Tensor], step: int = 0) -> None:
        """Starts a logical batch of the phase of this step."""
        self._active.discard()
        self._active, first = self._locate(step)
        self._active.open(query, step - first)

    def _locate(self, step: int) -> tuple[MeanOracle, int]:
        """Returns the oracle of a step, and the first step of its phase."""
        first = 0
        for oracle, steps in self.phases:
            if step < first + steps:
                return oracle, first
            first += steps
        raise SequenceError(f"all {first} steps of the phases are made (got step {step})")

    def prepare(self, generator: Source) -> None:
        """Draws what the releases of each phase share."""
        for oracle in self.members:
            oracle.prepare(generator)

    def lose(self, step: int, *, halted: bool) -> bool:
        """Notes a release of the phase of this step that is not known."""
        self._active, first = self._locate(step)
        return self._active.lose(step - first, halted=halted)

    def observe(self, rows: GradBatch, users: Tensor | None = None) -> None:
        """Takes rows."""
        self._active.observe(rows, users)

    def discard(self) -> None:
        """Forgets the logical batch."""
        self._active.discard()

    def sensitivity(self, adjacency: Adjacency) -> float:
        """Returns the sensitivity of the open batch."""
        return self._active.sensitivity(adjacency)

    def event(self) -> BaseEvent:
        """Returns the event of the open, or else the last, logical batch."""
        return self._active.event()

    def charge(self, design: Design, draw: Draw) -> Charge:
        """Returns what the oracle of the open batch charges."""
        return self._active.charge(design, draw)

    def release(self, generator: Source) -> Release:
        """Returns the answer of the oracle of this phase."""
        return self._active.release(generator)

    def settings(self) -> dict[str, Any]:
        """Returns the fixed numbers of all phases."""
        return self._named(phases=[[steps, oracle.settings()] for oracle, steps in self.phases])

    def metrics(self) -> dict[str, float]:
        """Returns public numbers about the last release."""
        return self._active.metrics()

    def state(self) -> dict[str, Any]:
        """Returns the states of the oracles, secret if one of them is."""
        states = {str(k): oracle.state() for k, oracle in enumerate(self.members)}
        return (
            SecretState(states)
            if any(isinstance(state, SecretState) for state in states.values())
            else states
        )

    def restore(self, state: dict[str, Any]) -> None:
        """Restores them."""
        for k, oracle in enumerate(self.members):
            oracle.restore(state[str(k)])


class QuantilePilot(MeanOracle):
    """Draws a threshold near a quantile of the norms of one batch, by the exponential mechanism.

    Args:
        batch_size: n_0, public number of records of the pilot group.
        epsilon: of the draw, > 0.
        quantile: public target in [0, 1]; see `clip_selection.target_quantile`.
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
