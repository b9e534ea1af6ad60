"""Batches of users: a draw takes users, and delivers all their rows with the ids of their users.

Users are sampled, never rows: a user is wholly in a batch or not at all, which is what the events of user-level
optimizers stand for (docs/proofs/user_level.md#clipped-means-of-users; docs/user_level.md).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping
from numbers import Number
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

_Indices = npt.NDArray[np.int64]


def user_ids(users: Any, records: int, name: str = "users") -> Tensor:
    """Returns the user of each record as (records,) int64.

    Args:
        users: integers >= 0, which stay as they are; or strings and other things that hash (no numbers, no None),
            which are numbered in order of appearance. Users are drawn regardless of their numbers.
        records: how many there are.
        name: of the argument, for messages.

    Raises:
        UnitError: not one id per record, or of another kind. No id is quoted: it may be a name.
    """
    if not isinstance(users, Tensor):
        users = _numbered(users, name)
    ids: Tensor = users.detach().cpu().clone()
    if ids.is_floating_point() or ids.is_complex() or ids.dtype in (torch.bool, torch.uint64):
        raise UnitError(f"{name} must hold integer ids, or strings (got {ids.dtype})")
    if ids.shape != (records,):
        raise UnitError(
            f"{name} must hold one id per record, {records} of them (got shape {tuple(ids.shape)})"
        )
    if records and int(ids.min()) < 0:
        raise UnitError(f"{name} must be >= 0 (got a negative id)")
    return ids.to(torch.int64)


def _numbered(users: Any, name: str) -> Tensor:
    """Returns integers for the ids of a list, an array or a column."""
    if isinstance(users, np.ndarray) and users.dtype != object and users.dtype.kind not in "USTmM":
        return torch.from_numpy(users.copy())
    if isinstance(users, (str, bytes, Mapping)) or not isinstance(users, Iterable):
        raise UnitError(f"{name} must hold one id per record (got {type(users).__name__})")
    things = [thing.item() if isinstance(thing, (np.generic, Tensor)) else thing for thing in users]
    numbers = sum(isinstance(thing, Number) for thing in things)
    if numbers == len(things):
        try:
            return torch.from_numpy(np.array(things, dtype=None if things else np.int64))
        except TypeError:  # too large for any integer dtype
            raise UnitError(
                f"{name} must hold integers below 2**63, or strings (got a larger one)"
            ) from None
    # PRIVACY: records without an id would be one user's, and 1, 1.0 and True are one id
    # (test_ids_that_cannot_be_are_refused_by_name)
    if numbers or any(
        thing is None or not isinstance(thing, Hashable) or (thing == thing) is not True
        for thing in things
    ):
        kinds = sorted({type(thing).__name__ for thing in things})
        raise UnitError(
            f"{name} must hold integers only, or only strings or other ids that hash (got {kinds})"
        )
    places: dict[Any, int] = {}
    return torch.tensor(
        [places.setdefault(thing, len(places)) for thing in things], dtype=torch.int64
    )


class UserLoader(PrivateLoader):
    """Iterates over draws of users: each batch is a list of the record batch's parts, and the ids of the users.

    Args:
        dataset: map-style data set of records.
        sampler: draws positions of users; or, of a shard, of the users that have records there, in order of their ids.
        users: (n_records,) int64 ids in [0, sampler.size), or any of a shard; users need not have records.
        options: the keywords of `PrivateLoader`.

    Raises:
        UnitError: an id is not below the number of users.
    """

    def __init__(
        self, dataset: Dataset[Any], sampler: DesignSampler, users: Tensor, **options: Any
    ) -> None:
        super().__init__(dataset, sampler, **options)
        if getattr(sampler, "ids", None) is not None:
            raise UnitError(
                "users must be drawn by their numbers (got a sampler of ids of records)"
            )
        ids = users.numpy()
        if getattr(sampler, "own", False):
            ids = np.unique(ids, return_inverse=True)[1]
        if len(ids) and int(ids.max()) >= sampler.size:
            # PRIVACY: a user out of the universe is in no draw (test_ids_out_of_the_universe_are_refused)
            raise UnitError(
                f"users must be < n_users={sampler.size} (got a larger id, or more users)"
            )
        self._ids = users
        self._records = np.argsort(ids, kind="stable")
        self._ends = np.cumsum(np.bincount(ids, minlength=sampler.size))

    def _require_size(self, records: int) -> None:
        """Accepts any number of records: the sampler draws users."""

    def contents(self) -> Iterator[Any]:
        """Yields the ids, and the records."""
        yield self._ids
        yield from super().contents()

    def _of(self, drawn: _Indices) -> tuple[_Indices, _Indices]:
        """Returns the records of drawn users, in order of the draw, and how many each of them has."""
        ends = self._ends[drawn]
        starts = np.where(drawn > 0, self._ends[drawn - 1], 0)
        pieces = [self._records[a:b] for a, b in zip(starts, ends, strict=True) if a < b]
        return np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int64), ends - starts

    def _split(self, chunks: deque[Chunk]) -> Iterator[_Indices]:
        for drawn in self.batch_sampler.dealt():
            records, sizes = self._of(drawn[1])
            yield from self._pieces(drawn, records, chunks, sizes)

    def _users_of(self, part: _Indices) -> Tensor:
        return self._ids[torch.from_numpy(part)]
