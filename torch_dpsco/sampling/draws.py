"""Which delivered rows a step may use: the log by which an optimizer makes sure that they are those of one draw, once.

Logging happens when a batch is delivered, in the main process and in order, so that prefetching workers, broken-off
epochs and physical batches cannot shift it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from torch_dpsco.accounting.designs import Draw
from torch_dpsco.errors import SequenceError

__all__ = ["Chunk", "DrawLog"]


class Chunk(NamedTuple):
    """What one delivered batch is: (a part of) one draw.

    Args:
        draw: of the sampler.
        rows: the most that the batch can have.
        last: whether the draw is complete with it.
    """

    draw: Draw
    rows: int
    last: bool


_UNUSED = (
    "the previous batch was not used: call optimizer.step() for every batch of a private loader, also an empty one, or "
    "optimizer.discard() to give a draw up; use another loader for evaluation; let only optimizer.loader(dataset, "
    "physical_batch_size=..., num_workers=...) run ahead, not a BatchMemoryManager with workers"
)


class DrawLog:
    """Which delivered rows a step may use: those of one draw, once."""

    def __init__(self) -> None:
        self.waiting: deque[Chunk] = deque()
        self.taken: Chunk | None = None  # by a step that has not ended it
        self.workers = False  # whether a foreign loader with workers, which runs ahead of use, draws from the sampler
        self.prefetching = False  # whether the running iteration may be ahead of use
        self._abandoned: Draw | None = None
        self._split: Draw | None = None  # delivered in parts, the last one is still to come
        self.on_restart: Callable[[], None] = lambda: None

    def restart(self, *, prefetching: bool = False) -> None:
        """Forgets everything delivered and not used: a new iteration has begun."""
        self.waiting.clear()
        self.taken = self._abandoned = self._split = None
        self.prefetching = prefetching
        self.on_restart()

    def deliver(self, chunk: Chunk) -> None:
        """Notes a delivered batch.

        Raises:
            SequenceError: the batch before it was not used up by a step (skipping batches voids the sampling design);
                while `prefetching`, delivery runs ahead of use and this cannot be seen.
        """
        # PRIVACY: else a release could join parts of two draws, and a record of both would count twice
        # (test_a_release_never_joins_parts_of_two_draws)
        self._require_used()
        if self._split is not None:
            raise SequenceError(
                "the previous draw is not complete: signal_skip_step(True) was called for its last part; leave the "
                "calls to BatchMemoryManager, or use optimizer.loader(dataset, physical_batch_size=...)"
            )
        self.waiting.append(chunk)

    def split(self, *, more: bool) -> None:
        """Notes that the batch that comes next is a part of the newest draw (Opacus' BatchMemoryManager says so).

        Args:
            more: whether another part follows.

        Raises:
            SequenceError: there is no draw, or the part before was not used, or delivery runs ahead of use.
        """
        if self.prefetching:
            # PRIVACY: flags of parts would not belong to the batches that steps use
            # (test_flags_of_a_loader_that_runs_ahead_are_refused)
            raise SequenceError(
                "BatchMemoryManager needs num_workers=0, because a loader with workers runs ahead of its flags: use "
                "optimizer.loader(dataset, physical_batch_size=..., num_workers=...) instead"
            )
        if self._split is not None:
            self._require_used()
            self.waiting.append(Chunk(self._split, self._split.size, last=not more))
        elif self.waiting:
            self.waiting[-1] = self.waiting[-1]._replace(last=not more)
        else:
            raise SequenceError(
                "signal_skip_step() must follow a new draw of the optimizer's own loader: give the loader of "
                "optimizer.loader(dataset) to BatchMemoryManager"
            )
        self._split = self.waiting[-1].draw if more else None

    def _require_used(self) -> None:
        if (self.waiting or self.taken is not None) and not self.prefetching:
            raise SequenceError(_UNUSED)

    def take(self) -> Chunk:
        """Returns the batch that the next step must use; raises SequenceError if there is none."""
        if not self.waiting:
            raise SequenceError(
                "no batch is outstanding: each step needs one batch of this optimizer's own loader (made by "
                "optimizer.loader(dataset) or optimizer.bind(loader)) and can use it once"
            )
        self.taken = self.waiting.popleft()
        return self.taken

    def abandon(self, draw: Draw) -> None:
        """Gives a draw up: its later chunks must not be used."""
        self._abandoned = draw

    def is_abandoned(self, chunk: Chunk) -> bool:
        """Returns whether the chunk belongs to a draw that was given up."""
        return chunk.draw is self._abandoned
