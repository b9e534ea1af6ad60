"""Loaders that hand each draw to the optimizer, whole or in physical batches, and log what they deliver.

Isolation: no record's arithmetic may depend on others. Matrix libraries choose kernels by the number of rows, and may
treat rows by their position: a record more changes the last bits of all others, which a kink of the loss makes as large
as it likes. There are two levels. "rounded": each draw is delivered in batches whose sizes come from a public set, of
which a test has shown that they give every record the same bits, at every place; they are filled up with rows of zeros
that no oracle ever sees. "slots", wherever that test fails or was not made yet: each draw is delivered in blocks of
exactly M rows, M public, filled up likewise; a record's row in its block (its slot) does not depend on the other
records (`sampling.slots`).

Proof and limits: docs/proofs/record_isolation.md.

Users are sampled, never rows: a user is wholly in a batch or not at all, which is what the events of user-level
optimizers stand for (docs/proofs/user_level.md#clipped-means-of-users; docs/user_level.md).
"""

from __future__ import annotations

import copy
import sys
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from numbers import Number
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from torch_dpsco import _validate as check
from torch_dpsco._validate import typed
from torch_dpsco.accounting.designs import Design, Draw, Full
from torch_dpsco.compat import tree_leaves, tree_map
from torch_dpsco.errors import UnitError, outside, warn
from torch_dpsco.sampling.datasets import Gathered, owned
from torch_dpsco.sampling.samplers import Chunk, DesignSampler, records_of
from torch_dpsco.sampling.slots import Slots

_Indices = npt.NDArray[np.int64]
# rows of a draw that are delivered together; where they are in their batch, None if it has no others; and its size
_Block = tuple[Any, Tensor | slice | None, int]
_MOST_WORKERS = 1024  # processes
_LARGE = 2**25  # parameters of a model, frozen ones too


class OneByOne(Dataset[Any]):
    """Gives each record of a data set as a copy that is made as it is fetched, in the workers of a DataLoader too.

    A data set may fill one tensor for all of its records, or change what it gave before. What it has besides records is
    found here as well.

    Args:
        source: map-style data set. Its `__getitems__`, which a DataLoader prefers, is asked for one record at a time.
    """

    __getitems__ = None  # else a DataLoader would ask the source for a whole batch

    def __init__(self, source: Dataset[Any]) -> None:
        self.source = source

    def __len__(self) -> int:
        return len(self.source)  # type: ignore[arg-type]

    def __getitem__(self, index: Any) -> Any:
        several = getattr(self.source, "__getitems__", None)
        if not several:
            # PRIVACY: the record that is fetched last would be the whole batch
            # (test_a_data_set_that_fills_one_tensor_gives_each_record_once)
            return owned(self.source[index])
        found = several([index])
        if len(found) != 1:
            # PRIVACY: one record would be several (test_a_fetch_of_one_record_gives_one)
            raise UnitError(
                f"dataset.__getitems__ must give one record for one index (got {len(found)})"
            )
        return owned(found[0])

    def __getattr__(self, name: str) -> Any:
        if name == "source" or name.startswith("__"):  # not there yet, as in an unpickled copy
            raise AttributeError(name)
        return getattr(self.source, name)


def one_by_one(dataset: Any) -> Any:
    """Returns a data set whose records nothing writes to, as those of tensors in memory, or `OneByOne` of it."""
    # a subclass may write to them
    fresh = type(dataset) is TensorDataset or isinstance(dataset, (Gathered, OneByOne))
    return dataset if fresh else OneByOne(dataset)


def source_of(dataset: Any) -> Any:
    """Returns the data set that was given."""
    return dataset.source if isinstance(dataset, OneByOne) else dataset


@dataclass(frozen=True)
class _EmptyLikeOne:
    """Collates items; a batch of none has the shapes and dtypes of the data set's first record, and no rows."""

    collate: Callable[[list[Any]], Any]
    dataset: Any

    def __call__(self, items: list[Any]) -> Any:
        if items:
            batch = self.collate(items)
            _require_real(batch)
            return batch
        if not len(self.dataset):  # legal under add_remove; nothing shows what a record is like
            return []
        return tree_map(_without_rows, self.collate([self.dataset[0]]))


def _require_real(records: Any) -> None:
    for leaf in tree_leaves(records):
        if isinstance(leaf, Tensor) and leaf.is_complex():
            raise ValueError(
                f"dataset must give real numbers (got {leaf.dtype}): give torch.view_as_real(x), of"
                " which a model may make torch.view_as_complex(x)"
            )


def adapt(loader: DataLoader[Any]) -> None:
    """Makes a DataLoader fetch each record by itself, and deliver an empty draw as a batch without rows."""
    # PRIVACY: a batch may else be one record many times (test_a_bound_loader_gives_each_record_once); a DataLoader
    # refuses another data set since its sampler may be of the old one, which stays the source of this one
    object.__setattr__(loader, "dataset", one_by_one(loader.dataset))
    if not isinstance(loader.collate_fn, _EmptyLikeOne):
        loader.collate_fn = _EmptyLikeOne(loader.collate_fn, loader.dataset)


def _without_rows(leaf: Any) -> Any:
    return leaf[:0] if isinstance(leaf, Tensor) and leaf.ndim else leaf


@typed
class PrivateLoader:
    """Iterates over the draws of a sampler and notes each delivered batch in its log.

    Tensors in memory are gathered by one `index_select` a batch, and a `Gathered` data set gathers by itself; any other
    goes through a DataLoader, record by record, each of them copied as it is fetched (`OneByOne`).

    Args:
        dataset: map-style data set, or a TensorDataset.
        sampler: how to draw.
        physical_batch_size: deliver each draw in chunks of at most that many rows; `optimizer.step()` then adds up the
            chunks and makes one release per draw.
        collate_fn: as in DataLoader; the default makes batches without rows for empty draws.
        num_workers: as in DataLoader.
        pin_memory: as in DataLoader.
        slots: where records stand in blocks of a fixed size, which are filled up; None for batches of records only.
        rounded: whether batches of several sizes may take the place of these blocks, once a test has passed.
    """

    # What else a torch DataLoader has, for those who copy its settings (Opacus' BatchMemoryManager does).
    timeout = 0.0
    worker_init_fn = multiprocessing_context = generator = prefetch_factor = None
    persistent_workers = False

    _ids: Tensor | None = None  # user of each record, where users are drawn

    def __init__(
        self,
        dataset: Dataset[Any],
        sampler: DesignSampler,
        *,
        physical_batch_size: int | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
        slots: Slots | None = None,
        rounded: bool = False,
    ) -> None:
        if isinstance(dataset, TensorDataset):
            _require_real(dataset.tensors)
        self.dataset: Any = one_by_one(dataset)
        self.batch_sampler = sampler
        self.slots = slots
        if check.count(num_workers=num_workers) > _MOST_WORKERS:
            raise ValueError(f"num_workers must be at most {_MOST_WORKERS} (got {num_workers})")
        self.isolation = Isolation(slots=slots, open=rounded)
        self.physical_batch_size = physical_batch_size
        if physical_batch_size is not None:
            check.positive_count(physical_batch_size=physical_batch_size)
        self.num_workers = num_workers
        self.pin_memory = pin_memory
        plain = collate_fn or default_collate
        if isinstance(plain, _EmptyLikeOne):
            plain = plain.collate
        self.collate_fn = _EmptyLikeOne(plain, self.dataset)
        # a subclass may override __getitem__
        at_once = type(dataset) is TensorDataset or isinstance(dataset, Gathered)
        self.gathers = at_once and plain is default_collate and not num_workers
        self._require_size(len(dataset))  # type: ignore[arg-type]

    def _require_size(self, records: int) -> None:
        if records != self.batch_sampler.size:
            raise UnitError(
                f"dataset must have {self.batch_sampler.size} records, as its sampler was made for"
                f" (got {records})"
            )

    @property
    def design(self) -> Design:
        """How batches are drawn."""
        return self.batch_sampler.design

    def __len__(self) -> int:
        """Draws per iteration."""
        return len(self.batch_sampler)

    def in_parts(self, physical_batch_size: int) -> PrivateLoader:
        """Returns a loader of the same draws, each delivered in chunks of at most that many rows."""
        parts = copy.copy(self)
        parts.physical_batch_size = check.positive_count(physical_batch_size=physical_batch_size)
        if self.slots is not None:
            parts.slots = self.slots.of_size(physical_batch_size)
        return parts

    def _part(self, model: nn.Module) -> None:
        """Lets the draws of a large model come in a public number of batches, if their sizes are still to be tested."""
        size = sum(p.numel() for p in model.parameters())
        if self.slots and self.isolation.open and not self.physical_batch_size and size > _LARGE:
            self.slots.part()

    def contents(self) -> Iterator[Any]:
        """Yields everything that is drawn from, in order."""
        return records_of(self.dataset)

    def _split(self, chunks: deque[Chunk]) -> Iterator[_Indices]:
        """Yields the records of each batch, and notes what it is."""
        log = self.batch_sampler.log
        for source in self.batch_sampler.dealt():
            indices = source[1]
            sizes = None  # records of each user, where users are drawn
            if self._ids is not None:
                indices, sizes = self._of_users(indices)
            # another one each time it is delivered; `replace` costs three times as much
            draw = Draw(**vars(source[0]) | {"size": len(indices)})
            places = None
            if log.held is not None and log.held.source is source:
                # PRIVACY: none can be chosen, by no other loader either
                # (test_a_draw_that_is_delivered_again_has_the_places_that_it_had)
                places = log.held.places
            blocks = None
            if places is None and self.slots is not None:
                blocks = self.isolation.rounded(len(indices), self.physical_batch_size)
                if blocks is None:
                    places = self.slots.places(len(indices) if sizes is None else len(sizes))
            if blocks is None:
                blocks = self._blocks(len(indices), sizes, places)
            start = 0
            for k, (part, slots, size) in enumerate(blocks, start=1):
                rows = indices[part]
                users = None if self._ids is None else self._ids[torch.from_numpy(rows)]
                if slots is not None and users is not None:  # rows of the filling are nobody's
                    users = filled(users, slots, size, -1)
                last = k == len(blocks)
                chunks.append(
                    Chunk(draw, len(rows), size, last, start, source, users, slots, places)
                )
                start += len(rows)
                yield rows

    def _of_users(self, drawn: _Indices) -> tuple[_Indices, _Indices]:
        """Returns the records of drawn users, in order of the draw, and how many each of them has."""
        raise NotImplementedError

    def _blocks(
        self, size: int, sizes: _Indices | None, places: _Indices | None
    ) -> list[_Block]:
        """Returns which rows of a draw are delivered together, in blocks of one size or with nothing filled up.

        Args:
            size: rows of the draw.
            sizes: those of each user, where users are drawn.
            places: of its records or users; None where they have none.
        """
        slots = self.slots
        if slots is None or places is None:
            step = self.physical_batch_size or max(1, size)
            starts = range(0, max(1, size), step)
            return [(slice(a, a + step), None, min(step, size - a)) for a in starts]
        made = slots.of_records(places) if sizes is None else slots.of_users(sizes, places)
        return [(part, torch.from_numpy(found), slots.block) for part, found in made]

    def _batches(self, parts: Iterator[_Indices], chunks: deque[Chunk]) -> Iterator[Any]:
        if self.gathers and isinstance(self.dataset, Gathered):
            return map(self.dataset.gather, parts)
        if self.gathers:
            assert isinstance(self.dataset, TensorDataset)
            return _gathered(self.dataset.tensors, parts, chunks, pinned=self.pin_memory)
        loader = DataLoader(
            self.dataset,
            batch_sampler=(part.tolist() for part in parts),
            collate_fn=self.collate_fn,
            num_workers=self.num_workers,
            pin_memory=self.pin_memory,
        )
        return iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self._delivered(self._batches)

    def read_only(self, tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
        """Iterates over the rows of other tensors of as many rows; a draw of all records is not copied.

        Args:
            tensors: (n, ...) each; who writes to a batch may write to them.
        """
        return self._delivered(partial(_gathered, tensors, share=self._shares))

    @property
    def _shares(self) -> bool:
        """Whether as many records as there are have their own order."""
        # PRIVACY: in blocks that are filled up records stand where their places say, not in order
        # (test_a_filled_block_of_all_records_has_them_at_their_places); other draws have records in another order
        # (test_whole_draws_are_shared_only_with_who_reads)
        return self.slots is None and isinstance(self.design, Full)

    def positions(self) -> Iterator[Tensor | None]:
        """Iterates over the positions of the records of each draw: (B,) int64, None for all in their order.

        For rows that are computed one by one, which have the same bits wherever they stand: nothing is filled up.
        """
        self.isolation.alone = True
        bare = copy.copy(self)
        bare.slots = None
        size = len(self.dataset) if bare._shares else -1

        def index(part: _Indices) -> Tensor | None:
            return None if len(part) == size else torch.from_numpy(part)

        return bare._delivered(lambda parts, chunks: map(index, parts))

    def _delivered(
        self, batches: Callable[[Iterator[_Indices], deque[Chunk]], Iterator[Any]]
    ) -> Iterator[Any]:
        log = self.batch_sampler.log
        isolation = self.isolation
        log.restart()
        if self.slots is not None and self.slots.public and isolation.open:
            warn(
                f"a draw for a large model comes in several batches: in {self.slots.parts} until sizes are tested,"
                " and then in two as a rule. optimizer.step() adds them up, and releases after the last one: move"
                " schedules by optimizer.steps, not by batches, or give physical_batch_size= to optimizer.loader(...)",
                outside(),
            )
        # of this iteration only: nothing is left over when it is broken off
        chunks: deque[Chunk] = deque()
        over = log.progress.steps >= log.planned
        for batch in () if over else batches(self._split(chunks), chunks):
            chunk = chunks.popleft()
            log.deliver(chunk)
            flat = isinstance(batch, _FilledUp)
            if flat:
                batch = list(batch)
            elif chunk.slots is not None:
                batch = filled(batch, chunk.slots, chunk.size)
            leaves = batch if flat else tree_leaves(batch)
            isolation.newest = mark_rows(leaves)
            if isolation.open or isolation.tested is not None:
                isolation.delivered = memory_of(leaves)
            if chunk.users is None:
                yield batch
            else:
                parts = list(batch) if isinstance(batch, (tuple, list)) else [batch]
                yield [*parts, chunk.users.clone()]
            if log.progress.steps >= log.planned:
                return


def filled(batch: Any, slots: Tensor | slice, size: int, value: float = 0) -> Any:
    """Returns a batch of `size` rows, of which those at the slots are the batch's own, and all others are zeros.

    Raises:
        ValueError: something in the batch is no tensor with one row per record.
    """
    rows = slots.stop if isinstance(slots, slice) else len(slots)

    def fill(leaf: Any) -> Tensor:
        if not isinstance(leaf, Tensor) or not leaf.ndim or len(leaf) != rows:
            raise ValueError(f"{_NOT_ROWS} (got {type(leaf).__name__})")
        shape = size, *leaf.shape[1:]
        block = leaf.new_full(shape, value, pin_memory=leaf.is_pinned())
        if isinstance(slots, slice):
            block[slots] = leaf
            return block
        return block.index_copy_(0, slots.to(leaf.device, non_blocking=True), leaf)

    return tree_map(fill, batch)


_NOT_ROWS = (
    "a batch must be of tensors whose first dimension is the records, so that it can be filled up"
    " to a public size: collate to such tensors, or give isolation='none', whose risk"
    " docs/guarantees.md describes"
)


class _FilledUp(list[Tensor]):
    """A batch that is filled up."""


def _gathered(
    tensors: Sequence[Tensor],
    parts: Iterator[_Indices],
    chunks: deque[Chunk],
    *,
    share: bool = False,
    pinned: bool = False,
) -> Iterator[list[Tensor]]:
    """Yields the rows of tensors at some positions, which the newest of the chunks has.

    Batches of several sizes are filled up at once. `share`: as many positions as rows are all of them, in order.
    `pinned`: in memory from which a device copies by itself.
    """
    size = tensors[0].shape[0]
    for part in parts:
        chunk = chunks[-1]
        index = torch.from_numpy(part)
        if share and len(part) == size:
            yield list(tensors)
        elif isinstance(chunk.slots, slice):
            blocks = _FilledUp(
                t.new_empty(chunk.size, *t.shape[1:], pin_memory=pinned and t.is_cpu)
                for t in tensors
            )
            for t, block in zip(tensors, blocks, strict=True):
                own = block[chunk.slots]
                torch.index_select(t.detach(), 0, index.to(t.device, non_blocking=True), out=own)
                block[len(own) :].zero_()
            yield blocks
        else:
            rows = [t.index_select(0, index.to(t.device, non_blocking=True)) for t in tensors]
            yield [t.pin_memory() if pinned and t.is_cpu else t for t in rows]


def to_device(batch: Any, device: torch.device) -> Any:
    """Returns a nested batch with its tensors moved to a device."""

    def moved(leaf: Any) -> Any:
        return leaf.to(device, non_blocking=True) if isinstance(leaf, Tensor) else leaf

    return tree_map(moved, batch)


LEVELS = ("rounded", "slots", "none")
_TINY = sys.float_info.min


def memory_of(leaves: Iterable[Any]) -> frozenset[tuple[int, int]]:
    """Returns where the memory of the tensors among some things begins, and how often it was written to."""
    return frozenset(
        (t.untyped_storage().data_ptr(), _version(t))
        for t in leaves
        if isinstance(t, Tensor) and t.layout is torch.strided
    )


ROWS = "dpsco_rows"  # attribute of the memory of a delivered tensor: batch, records, start, stride, version


def _version(t: Tensor) -> int:
    return 0 if t.is_inference() else t._version


def mark_rows(leaves: Iterable[Any]) -> object:
    """Notes on the memory of delivered tensors where the records are; returns the mark of their batch."""
    batch = object()
    for t in leaves:
        if isinstance(t, Tensor) and t.layout is torch.strided and t.dim():
            rows = batch, len(t), t.storage_offset(), t.stride(0), _version(t)
            setattr(t.untyped_storage(), ROWS, rows)
    return batch


def is_delivered(t: Tensor, batch: object = None) -> bool:
    """Returns whether row i of a tensor is in the memory of record i of a batch, and all of them are there.

    Args:
        t: it.
        batch: mark of that batch; None for any.
    """
    rows = getattr(t.untyped_storage(), ROWS, None) if t.layout is torch.strided else None
    if rows is None or not t.dim():
        return False
    mark, records, start, stride, version = rows
    first = t.storage_offset() - start
    others = zip(t.shape[1:], t.stride()[1:], strict=True)
    last = first + sum((n - 1) * s for n, s in others)
    same = batch in (None, mark) and (len(t), t.stride(0), _version(t)) == (
        records,
        stride,
        version,
    )
    return same and 0 <= first <= last < stride


@dataclass(frozen=True)
class Sizes:
    """Batches in which each record has the same bits, as far as a test has shown.

    Args:
        sizes: rows of a batch, increasing.
        settings: of torch, under which this was tested.
        records: made up, that were compared.
        exact_means: whether means over the batch must be exact for it, see `rows.means`.
        secret_masks: whether masks that the model draws must be secret for it, see `trial.sizes`.
        whole_step: whether the whole step of a loop was tested, with what it does to a batch before the model.
    """

    sizes: Sequence[int]
    settings: tuple[Any, ...]
    records: int
    exact_means: bool = False
    secret_masks: bool = False
    whole_step: bool = False


def torch_settings() -> tuple[Any, ...]:
    """Returns what decides which kernels run."""
    return (
        torch.get_num_threads(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.backends.mkldnn.enabled,
        _TINY / 2.0 == 0.0,  # whether this thread takes numbers that are not normal for 0
    )


def is_compiled(module: nn.Module) -> bool:
    """Returns whether torch.compile runs a module."""
    own = getattr(module, "_compiled_call_impl", None) is not None
    return own or type(module).__name__ == "OptimizedModule"


@dataclass
class Isolation:
    """How records of a draw are kept apart in floating point, what is assumed for it, and what a test has found.

    Args:
        private: whether the number of rows of a draw is.
        slots: where records stand, where all batches are filled up to one size.
        open: whether batches of several sizes, which may take the place of these, are still to be tested.
        tested: sizes that have passed.
        checked: what a probe of made-up records has found of one size.
        why: why there are no batches of several sizes.
        alone: whether each row is computed by itself, so that nothing need be filled up.
        delivered: where the memory of the newest batch is, until that is known.
        newest: mark of that batch, see `mark_rows`.
    """

    private: bool = False
    slots: Slots | None = None
    open: bool = False
    tested: Sizes | None = None
    checked: str = "it was not checked"
    why: str = ""
    alone: bool = False
    delivered: frozenset[tuple[int, int]] = frozenset()
    newest: object = None

    @property
    def level(self) -> str:
        """The one of `LEVELS` that holds for the next draw, or "alone"."""
        if self.alone:
            return "alone"
        if self.slots is None:
            return "none"
        return "rounded" if self.tested is not None else "slots"

    def settle(self, found: Sizes | str) -> None:
        """Takes what the test of batches of several sizes has found."""
        self.open = False
        self.tested = None if isinstance(found, str) else found
        self.why = found if isinstance(found, str) else ""

    def rounded(self, rows: int, most: int | None = None) -> list[_Block] | None:
        """Returns the batches of the next draw, of its number of rows alone; None unless they are of several sizes.

        Args:
            rows: of the draw.
            most: of a batch, if that is limited.
        """
        if self.tested is None or (most is not None and most < self.tested.sizes[0]):
            return None
        if self.tested.settings != torch_settings():
            # PRIVACY: other kernels were never tested (test_other_settings_of_torch_end_batches_of_several_sizes)
            self.tested = None
            self.why = "torch is set in another way than for the test"
            return None
        sizes = self.tested.sizes
        largest = sizes[-1 if most is None else bisect_right(sizes, most) - 1]
        few = 2 if self.slots is not None and self.slots.public else 1
        parts = max(few, -(-rows // largest))
        ends = [rows * k // parts for k in range(parts + 1)]
        found: list[_Block] = []
        for start, end in pairwise(ends):
            part = end - start
            size = sizes[bisect_left(sizes, part)]
            found.append((slice(start, end), slice(0, part), size))
        return found

    def __str__(self) -> str:
        if self.alone:
            return (
                "isolation of records: each row is computed by itself, in C, by the same instructions wherever it"
                " stands, so that nothing is filled up"
            )
        if self.tested is not None:
            sizes = self.tested.sizes
            return (
                f"isolation of records: rounded. Kernels give a record the same bits in batches of {sizes[0]} to"
                f" {sizes[-1]} rows ({len(sizes)} sizes), to which draws are filled up, at every place; it held"
                f" for {self.tested.records} made-up records, which proves nothing about others"
                ' (isolation="slots" assumes less)'
            )
        if self.private and self.slots is None:
            return (
                "isolation of records: none. Batches are not filled up to a public size: a record's row must not"
                f" depend on how many others are in its batch, to the last bit ({self.checked})"
            )
        if self.slots is None:
            return (
                "kernels for batches of one size compute each row from its own record alone, to the last"
                f" bit ({self.checked})"
            )
        why = f"; {self.why}" if self.why else ""
        return (
            f"isolation of records: slots. Kernels for batches of {self.slots.block} rows, to which all are filled up,"
            f" compute each row from its own record alone, to the last bit ({self.checked}{why})"
        )


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
        raise UnitError(
            f"{name} must hold integer ids, or strings (got {ids.dtype}): where one is missing"
            " pandas makes integers real numbers"
        )
    if ids.shape != (records,):
        raise UnitError(
            f"{name} must hold one id per record, {records} of them (got shape {tuple(ids.shape)})"
        )
    if records and int(ids.min()) < 0:
        raise UnitError(f"{name} must be >= 0 (got a negative id)")
    return ids.to(torch.int64)


def _numbered(users: Any, name: str) -> Tensor:
    """Returns integers for the ids of a list, an array or a column."""
    if (
        isinstance(users, np.ndarray)
        and users.dtype != object
        and users.dtype.kind not in "USTmM"
    ):
        return torch.from_numpy(users.copy())
    if isinstance(users, (str, bytes, Mapping)) or not isinstance(users, Iterable):
        raise UnitError(f"{name} must hold one id per record (got {type(users).__name__})")
    things = [
        thing.item() if isinstance(thing, (np.generic, Tensor)) else thing for thing in users
    ]
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
            raise UnitError(f"users must be < n={sampler.size} (got a larger id, or more users)")
        self._ids = users
        self._records = np.argsort(ids, kind="stable")
        self._ends = np.cumsum(np.bincount(ids, minlength=sampler.size))

    def _require_size(self, records: int) -> None:
        """Accepts any number of records: the sampler draws users."""

    def contents(self) -> Iterator[Any]:
        """Yields the ids, and the records."""
        yield self._ids
        yield from super().contents()

    def _of_users(self, drawn: _Indices) -> tuple[_Indices, _Indices]:
        """Returns the records of drawn users, in order of the draw, and how many each of them has."""
        ends = self._ends[drawn]
        starts = np.where(drawn > 0, self._ends[drawn - 1], 0)
        pieces = [self._records[a:b] for a, b in zip(starts, ends, strict=True) if a < b]
        found = np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int64)
        return found, ends - starts
