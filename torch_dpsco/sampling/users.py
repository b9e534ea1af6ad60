"""Batches of users: a draw takes users, and delivers all their rows with the ids of their users.

Users are sampled, never rows: a user is wholly in a batch or not at all, which is what the events of user-level
optimizers stand for (spec userlevel.md 5; docs/user_level.md).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from torch_dpsco.errors import UnitError
from torch_dpsco.sampling.draws import Chunk
from torch_dpsco.sampling.loader import PrivateLoader
from torch_dpsco.sampling.samplers import DesignSampler

__all__ = ["UserLoader", "user_ids"]

_Indices = npt.NDArray[np.int64]


def user_ids(users: Any, records: int) -> Tensor:
    """Returns the user of each record as (records,) int64.

    Raises:
        UnitError: not one id >= 0 per record, or none is an integer.
    """
    try:
        ids = users.detach().cpu().clone() if isinstance(users, Tensor) else torch.from_numpy(np.array(users))
    except TypeError as error:
        raise UnitError(
            f"users must hold integer ids (got {type(users).__name__}: {error}); number them 0, 1, ..."
        ) from error
    if ids.is_complex() or ids.dtype == torch.uint64:
        raise UnitError(f"users must hold integer ids (got {ids.dtype})")
    if ids.shape != (records,) or ids.is_floating_point() or ids.dtype == torch.bool:
        raise UnitError(
            f"users must hold one integer id per record, {records} of them (got shape {tuple(ids.shape)}, {ids.dtype})"
        )
    if records and int(ids.min()) < 0:
        raise UnitError(f"users must be >= 0 (got {int(ids.min())})")
    return ids.to(torch.int64)


class UserLoader(PrivateLoader):
    """Iterates over draws of users: each batch is a list of the record batch's parts, and the ids of the users.

    Args:
        dataset: map-style data set of records.
        sampler: draws positions of users.
        users: (n_records,) int64 ids in [0, sampler.size); users need not have records.
        physical_batch_size: most rows of a chunk.
        collate_fn: as in DataLoader.
        num_workers: as in DataLoader.
        pin_memory: as in DataLoader.

    Raises:
        UnitError: an id is not below the number of users.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        sampler: DesignSampler,
        users: Tensor,
        *,
        physical_batch_size: int | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        super().__init__(
            dataset,
            sampler,
            physical_batch_size=physical_batch_size,
            collate_fn=collate_fn,
            num_workers=num_workers,
            pin_memory=pin_memory,
        )
        ids = users.numpy()
        if len(ids) and int(ids.max()) >= sampler.size:
            # PRIVACY: a user out of the universe is in no draw (test_ids_out_of_the_universe_are_refused)
            raise UnitError(f"users must be < n_users={sampler.size} (got {int(ids.max())})")
        self._ids = users
        self._records = np.argsort(ids, kind="stable")
        self._ends = np.cumsum(np.bincount(ids, minlength=sampler.size))

    def _require_size(self, records: int) -> None:
        """Accepts any number of records: the sampler draws users."""

    def _of(self, drawn: _Indices) -> _Indices:
        """Returns the records of drawn users, in order of the draw."""
        ends = self._ends[drawn]
        starts = np.where(drawn > 0, self._ends[drawn - 1], 0)
        pieces = [self._records[a:b] for a, b in zip(starts, ends, strict=True) if a < b]
        return np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int64)

    def _split(self, chunks: deque[Chunk]) -> Iterator[_Indices]:
        for draw, drawn in self.batch_sampler.draws():
            indices = self._of(drawn)
            whole = replace(draw, size=len(indices))
            yield from self._pieces(whole, indices, chunks)

    def __iter__(self) -> Iterator[Any]:
        log = self.batch_sampler.log
        log.restart()
        chunks: deque[Chunk] = deque()
        ids: deque[Tensor] = deque()

        def noted() -> Iterator[_Indices]:
            for part in self._split(chunks):
                ids.append(self._ids[torch.from_numpy(part)])
                yield part

        for batch in self._batches(noted()):
            log.deliver(chunks.popleft())
            parts = list(batch) if isinstance(batch, (tuple, list)) else [batch]
            yield [*parts, ids.popleft()]
