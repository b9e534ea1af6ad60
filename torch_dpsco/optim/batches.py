"""Which rows a step may use: exactly those of one draw, once.

Without a declared sampling there is no draw to compare with: then one backward of one batch makes one step, and
everything that could put a record into a step twice is refused.
"""

from __future__ import annotations

from collections.abc import Callable

from torch_dpsco.accounting.designs import Design, Draw, Undeclared
from torch_dpsco.errors import SequenceError
from torch_dpsco.sampling import Chunk, DrawLog

__all__ = ["LogicalBatch"]


class LogicalBatch:
    """The logical batch that is being collected.

    Args:
        design: how batches are drawn; if that is undeclared, its batch_size is the most that a step may use.
    """

    def __init__(self, design: Design) -> None:
        self.declared, self.batch_size = not isinstance(design, Undeclared), design.batch_size
        self.opened = False
        self._log = DrawLog()
        self._rows = 0  # rows seen of that chunk

    def bind(self, log: DrawLog, on_restart: Callable[[], None]) -> None:
        """Takes draws from a log; a new iteration of its loader drops the batch in progress."""
        self._log = log
        log.taken, self._rows, self.opened = None, 0, False
        log.on_restart = on_restart

    @property
    def outstanding_rows(self) -> int | None:
        """Rows of the chunk that comes next."""
        if self._log.taken is not None:
            return self._log.taken.rows
        return self._log.waiting[0].rows if self._log.waiting else None

    @property
    def needs_rows(self) -> bool:
        """Whether missing per-sample gradients are an error: not for an empty draw, or after accumulate()."""
        return self._log.taken is None or (self._log.taken.rows > 0 and self._rows == 0)

    def current(self) -> Chunk:
        """Returns the chunk in progress, or takes the next one; raises SequenceError if none is outstanding."""
        if self._log.taken is None:
            if not self.declared:
                return Chunk(Draw(0), 0, last=True)
            self._rows = 0
            return self._log.take()
        return self._log.taken

    def admit(self, rows: int, passes: int, partial: bool) -> bool:
        """Checks rows against the current chunk; returns False if they belong to a draw that was given up.

        Raises:
            SequenceError: more rows than were drawn, or more than one backward without a declared sampling.
        """
        if not self.declared:
            if partial or passes > 1:
                raise SequenceError(
                    "several backward passes per step need a declared sampling, since a record could be in two of "
                    "them: give n= or design= to the optimizer and use optimizer.loader(dataset)"
                )
            if rows > self.batch_size:
                # PRIVACY: e.g. a model that folds time into the batch has several rows per record
                # (test_a_record_with_several_rows_is_refused_without_a_declared_sampling)
                raise SequenceError(f"a step must use at most batch_size={self.batch_size} rows, and got more")
            return True
        if self._log.prefetching and (partial or passes > 1):
            raise SequenceError(
                "several backward passes per step need a loader that does not run ahead of them, so that their rows "
                "are known to be of one draw: use optimizer.loader(dataset, physical_batch_size=...)"
            )
        assert self._log.taken is not None
        self._rows += rows
        if self._rows > self._log.taken.rows:
            # PRIVACY: rows from elsewhere could hold a record twice (test_more_rows_than_drawn_are_refused)
            raise SequenceError(
                "a step must use at most the rows of one draw, and got more: use only batches of this optimizer's "
                "loader, one backward for each"
            )
        if self._log.is_abandoned(self._log.taken):
            self._log.taken = None
            return False
        return True

    def close(self, chunk: Chunk) -> Draw | None:
        """Ends a chunk; returns its draw if that is complete (until `finish` it is still in progress), else None."""
        if chunk.last:
            return chunk.draw
        self._log.taken, self._rows = None, 0
        return None

    def finish(self) -> None:
        """Ends the logical batch: its release is made."""
        self._log.taken, self._rows, self.opened = None, 0, False

    def drop(self, *, outstanding: bool = True) -> None:
        """Gives the draw in progress up, with the chunks of it that are still to come.

        Args:
            outstanding: without a draw in progress, give up the one that the next step would use.
        """
        chunk = self._log.taken
        if chunk is None and outstanding and self._log.waiting:
            chunk = self._log.waiting.popleft()
        if chunk is not None:
            self._log.abandon(chunk.draw)
        self.finish()
