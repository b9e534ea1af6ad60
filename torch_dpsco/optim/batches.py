"""Which rows a step may use: exactly those of one draw, once.

Without a declared sampling there is no draw to compare with: then one backward of one batch makes one step, and
everything that could put a record into a step twice is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch.utils.data import DataLoader

from torch_dpsco.accounting.designs import Design, Draw, Undeclared
from torch_dpsco.accounting.identify import identify
from torch_dpsco.errors import AdjacencyError, SequenceError
from torch_dpsco.gradbatch import GradBatch, LinearRows
from torch_dpsco.sampling import (
    Chunk,
    DrawLog,
    OnePassSampler,
    Partition,
    PrivateLoader,
    accept_empty_draws,
    partition_name,
)

__all__ = ["LogicalBatch"]

_SEVERAL = (
    "several backward passes per step need a declared sampling, since a record could be in two of them: give n= or "
    "design= to the optimizer and use optimizer.loader(dataset)"
)


class LogicalBatch:
    """The logical batch that is being collected.

    Args:
        design: how batches are drawn; if that is undeclared, its batch_size is the most that a step may use.
    """

    def __init__(self, design: Design) -> None:
        self.design, self.declared = design, not isinstance(design, Undeclared)
        self.opened = False
        self.given: GradBatch | LinearRows | None = None  # rows for the next step that no backward has recorded
        self._log = DrawLog()
        self._sampler: OnePassSampler | None = None
        self._resumed: Partition | None = None
        self._made = 0  # draws of its partition that steps have used
        self._draw: Draw | None = None  # that of the rows taken since the logical batch was opened
        self._rows = self._draw_rows = 0  # rows seen of the chunk, and of its draw

    def bind(self, loader: Any, on_restart: Callable[[], None]) -> None:
        """Takes draws from a loader of this design; a new iteration of it drops the batch in progress.

        Raises:
            UnknownSamplerError: a foreign sampler.
            AdjacencyError: the loader draws by another design.
            SequenceError: the loader runs ahead of the steps, and the design does not allow for a skipped batch.
        """
        design = identify(loader)
        if design != self.design:
            raise AdjacencyError(f"loader must draw by {self.design}, this optimizer's design (got {design})")
        workers = not isinstance(loader, PrivateLoader) and getattr(loader, "num_workers", 0) != 0
        if workers and (design.positional or design.one_pass):
            # PRIVACY: a skipped batch would shift the parts that later steps are charged for
            # (test_a_skipped_batch_is_charged_or_refused)
            raise SequenceError(
                f"{type(design).__name__} batches must come from a loader that does not run ahead of the steps: use "
                f"optimizer.loader(dataset, num_workers=...), or num_workers=0"
            )
        if isinstance(loader, DataLoader):
            accept_empty_draws(loader)
        sampler = getattr(loader, "batch_sampler", None) or loader
        self._log = log = sampler.log
        if isinstance(sampler, OnePassSampler) and sampler is not self._sampler:
            self._sampler, self._made = sampler, sampler.partition.made if sampler.partition else 0
        log.workers, log.prefetching, log.taken, log.on_restart = workers, workers, None, on_restart
        self._rows, self._draw_rows, self.opened = 0, 0, False

    def split(self, *, more: bool) -> None:
        """Takes the next batch for a part of a draw, see `DrawLog.split`."""
        if not self.declared:
            raise SequenceError(_SEVERAL)
        self._log.split(more=more)

    def take_given(self) -> GradBatch | LinearRows | None:
        """Returns the given rows, once."""
        rows, self.given = self.given, None
        return rows

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
                raise SequenceError(_SEVERAL)
            if rows > self.design.batch_size:
                # PRIVACY: e.g. a model that folds time into the batch has several rows per record
                # (test_a_record_with_several_rows_is_refused_without_a_declared_sampling)
                raise SequenceError(f"a step must use at most batch_size={self.design.batch_size} rows, and got more")
            return True
        if self._log.prefetching and (partial or passes > 1):
            raise SequenceError(
                "several backward passes per step need a loader that does not run ahead of them, so that their rows "
                "are known to be of one draw: use optimizer.loader(dataset, physical_batch_size=...)"
            )
        assert self._log.taken is not None
        self._rows += rows
        self._draw_rows += rows
        if self._rows > self._log.taken.rows or self._draw_rows > self._log.taken.draw.size:
            # PRIVACY: rows from elsewhere could hold a record twice (test_more_rows_than_drawn_are_refused)
            raise SequenceError(
                "a step must use at most the rows of one draw, and got more: use only batches of this optimizer's "
                "loader, one backward for each"
            )
        if self.opened and self._log.taken.draw is not self._draw:
            # PRIVACY: an older iteration of the loader that is continued would add a part of its own draw, in which a
            # record of this one could be again (test_parts_of_two_iterations_are_never_joined)
            raise SequenceError(
                "a step must use rows of one draw: an older iteration of the loader was continued inside of a newer "
                "one; finish one loop over a loader before starting the next"
            )
        self._draw = self._log.taken.draw
        if self._log.is_abandoned(self._log.taken):
            self._log.taken, self._draw_rows = None, 0
            return False
        return True

    def close(self, chunk: Chunk) -> Draw | None:
        """Ends a chunk; returns its draw if that is complete (until `finish` it is still in progress), else None."""
        if chunk.last:
            if self.declared and self._draw_rows != chunk.draw.size:
                # PRIVACY: fewer rows than records are rows of several records each, e.g. of times
                # (test_fewer_rows_than_drawn_are_refused)
                raise SequenceError(
                    "a step must use one row per record of its draw, and got fewer: run the model on all of them with "
                    "the batch where dp.attach(model, batch_first=...) says; to leave a record out, multiply its loss "
                    "by 0"
                )
            return chunk.draw
        self._log.taken, self._rows = None, 0
        return None

    @property
    def partition(self) -> Partition | None:
        """The partition of a one-pass design, and how much of it is used; None before the first draw."""
        known = self._resumed if self._sampler is None else self._sampler.partition
        return None if known is None else replace(known, made=self._made)

    @property
    def partition_name(self) -> str:
        """By which the ledger knows it; "planned" before the first draw."""
        known = self.partition
        return "planned" if known is None else partition_name(self.design, known)

    def resume(self, partition: Partition) -> None:
        """Takes over the partition of a checkpoint, or of a copy."""
        self._sampler, self._resumed, self._made = None, partition, partition.made

    def finish(self, *, used: bool = False) -> None:
        """Ends the logical batch; `used`: its release is made."""
        if used and self._log.taken is not None:
            self._made = self._log.taken.draw.index + 1
        self._log.taken, self._rows, self._draw_rows, self.opened = None, 0, 0, False

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
