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

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from torch_dpsco import _validate as check
from torch_dpsco.accounting.designs import BaseEvent, Design, Draw
from torch_dpsco.accounting.events import Adjacency
from torch_dpsco.errors import SequenceError
from torch_dpsco.noise import SecretState, Source
from torch_dpsco.rows import GradBatch
from torch_dpsco.step.oracle import Charge, MeanOracle, Release


class Phased(MeanOracle):
    """Answers each step by the oracle of its phase.

    Args:
        phases: (oracle, steps) pairs, in order; an oracle may serve several phases.

    Guarantee:
        That of the oracle of the open batch, whose event it reports. Which oracle that is depends on the step alone.

    Example:
        >>> import torch
        >>> from torch_dpsco.step.oracle import Clipped
        >>> oracle = Phased([(Clipped(1.0, 2.0, 10), 3), (Clipped(0.5, 4.0, 5), 2)])
        >>> oracle.open([torch.zeros(2)], step=3)
        >>> oracle.batch_size, oracle.event().sigma
        (5, 4.0)
    """

    def __init__(self, phases: Sequence[tuple[MeanOracle, int]]) -> None:
        self.phases = tuple(
            (oracle, check.positive_count(steps=steps)) for oracle, steps in phases
        )
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
        return tuple(
            dict.fromkeys(line for oracle in self.members for line in oracle.assumptions)
        )

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
