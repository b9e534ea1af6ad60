"""Loaders that hand each draw to the optimizer, whole or in physical batches, and log what they deliver."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from torch_dpsco import _validate as check
from torch_dpsco._doors import typed
from torch_dpsco.accounting.designs import Design, Full
from torch_dpsco.compat import tree_leaves, tree_map
from torch_dpsco.errors import UnitError, UnknownSamplerError
from torch_dpsco.losses.clipped import enforce_bounds
from torch_dpsco.sampling.draws import Chunk, Drawn, records_of
from torch_dpsco.sampling.one_by_one import one_by_one
from torch_dpsco.sampling.row_file import Gathered
from torch_dpsco.sampling.samplers import DesignSampler
from torch_dpsco.sampling.slots import Isolation, Slots
from torch_dpsco.sampling.streamed import Itself, Streamed

_Indices = npt.NDArray[np.int64]
_MOST_WORKERS = 1024  # processes


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
    """

    # What else a torch DataLoader has, for those who copy its settings (Opacus' BatchMemoryManager does).
    timeout = 0.0
    worker_init_fn = multiprocessing_context = generator = prefetch_factor = None
    persistent_workers = False

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
    ) -> None:
        if isinstance(dataset, TensorDataset):
            _require_real(dataset.tensors)
        self.dataset: Any = one_by_one(dataset)
        self.batch_sampler = sampler
        self.slots = slots
        if check.count(num_workers=num_workers) > _MOST_WORKERS:
            raise ValueError(f"num_workers must be at most {_MOST_WORKERS} (got {num_workers})")
        self.isolation = Isolation(block=None if slots is None else slots.block)
        self.physical_batch_size = physical_batch_size
        if physical_batch_size is not None:
            check.positive_count(physical_batch_size=physical_batch_size)
        self.num_workers = num_workers
        self.pin_memory = pin_memory
        plain = (
            collate_fn.collate
            if isinstance(collate_fn, _EmptyLikeOne)
            else collate_fn or default_collate
        )
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

    def contents(self) -> Iterator[Any]:
        """Yields everything that is drawn from, in order."""
        return records_of(self.dataset)

    def _split(self, chunks: deque[Chunk]) -> Iterator[_Indices]:
        for drawn in self.batch_sampler.dealt():
            yield from self._pieces(drawn, drawn[1], chunks)

    def _pieces(
        self, source: Drawn, indices: _Indices, chunks: deque[Chunk], sizes: _Indices | None = None
    ) -> Iterator[_Indices]:
        draw = replace(source[0], size=len(indices))  # another one each time that it is delivered
        places = self._places(source, len(indices) if sizes is None else len(sizes))
        blocks = self._blocks(len(indices), sizes, places)
        start = 0
        for k, (part, slots) in enumerate(blocks, start=1):
            rows = indices[part]
            size = len(rows) if self.slots is None else self.slots.block
            users = self._users_of(rows)
            if slots is not None and users is not None:  # rows of the filling are nobody's
                users = filled(users, slots, size, -1)
            chunks.append(
                Chunk(draw, len(rows), k == len(blocks), start, source, users, slots, size, places)
            )
            start += len(rows)
            yield rows

    def _places(self, source: Drawn, units: int) -> _Indices | None:
        """Returns the places of the units of a draw; those that it had, if it is delivered again."""
        held = self.batch_sampler.log.held
        if held is not None and held.source is source and held.places is not None:
            # PRIVACY: none can be chosen, by no other loader either
            # (test_a_draw_that_is_delivered_again_has_the_places_that_it_had)
            return held.places
        return None if self.slots is None else self.slots.places(units)

    def _blocks(
        self, size: int, sizes: _Indices | None, places: _Indices | None
    ) -> list[tuple[Any, Tensor | None]]:
        """Returns which rows of a draw are delivered together, and their slots where they have some."""
        if self.slots is None or places is None:
            step = self.physical_batch_size or max(1, size)
            return [(slice(start, start + step), None) for start in range(0, max(1, size), step)]
        made = (
            self.slots.of_records(places) if sizes is None else self.slots.of_users(sizes, places)
        )
        return [(part, torch.from_numpy(slots)) for part, slots in made]

    def _users_of(self, part: _Indices) -> Tensor | None:
        """Returns the user of each record, where users are drawn."""
        return None

    def _batches(self, parts: Iterator[_Indices]) -> Iterator[Any]:
        if self.gathers and isinstance(self.dataset, Gathered):
            yield from map(self.dataset.gather, parts)
            return
        if self.gathers:
            assert isinstance(self.dataset, TensorDataset)
            yield from _gathered(self.dataset.tensors, parts)
            return
        lists = (part.tolist() for part in parts)
        drawn = isinstance(
            getattr(self.batch_sampler, "ids", None), Streamed
        )  # are records, and no positions
        yield from DataLoader(
            Itself() if drawn else self.dataset,
            batch_sampler=lists,
            collate_fn=self.collate_fn,
            num_workers=self.num_workers,
            pin_memory=self.pin_memory,
        )

    def __iter__(self) -> Iterator[Any]:
        return self._delivered(self._batches)

    def read_only(self, tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
        """Iterates over the rows of other tensors of as many rows; a draw of all records is not copied.

        Args:
            tensors: (n, ...) each; who writes to a batch may write to them.
        """
        return self._delivered(lambda parts: _gathered(tensors, parts, share=self._shares))

    @property
    def _shares(self) -> bool:
        """Whether as many records as there are have their own order."""
        # PRIVACY: in blocks that are filled up records stand where their places say, not in order
        # (test_a_filled_block_of_all_records_has_them_at_their_places)
        if self.slots is not None:
            return False
        return isinstance(self.design, Full)  # other draws have records in another order

    def positions(self) -> Iterator[Tensor | None]:
        """Iterates over the positions of the records of each batch: (B,) int64, -1 for rows of the filling.

        None for all records in their order.
        """
        share = self._shares
        size = len(self.dataset)
        return self._delivered(
            lambda parts: (
                None if share and len(part) == size else torch.from_numpy(part) for part in parts
            ),
            -1,
        )

    def _delivered(
        self, batches: Callable[[Iterator[_Indices]], Iterator[Any]], filling: int = 0
    ) -> Iterator[Any]:
        log = self.batch_sampler.log
        log.restart()
        chunks: deque[Chunk] = (
            deque()
        )  # of this iteration only: nothing is left over when it is broken off
        for batch in batches(self._split(chunks)):
            chunk = chunks.popleft()
            log.deliver(chunk)
            if chunk.slots is not None:
                batch = filled(batch, chunk.slots, chunk.size, filling)
            if chunk.users is None:
                yield batch
            else:
                parts = list(batch) if isinstance(batch, (tuple, list)) else [batch]
                yield [*parts, chunk.users.clone()]


def filled(batch: Any, slots: Tensor, size: int, value: float = 0) -> Any:
    """Returns a batch of `size` rows, of which those at the slots are the batch's own, and all others are zeros.

    Raises:
        ValueError: something in the batch is no tensor with one row per record.
    """

    def fill(leaf: Any) -> Tensor:
        if not isinstance(leaf, Tensor) or not leaf.ndim or len(leaf) != len(slots):
            raise ValueError(f"{_NOT_ROWS} (got {type(leaf).__name__})")
        block = leaf.new_full((size, *leaf.shape[1:]), value)
        return block.index_copy_(0, slots.to(leaf.device), leaf)

    return tree_map(fill, batch)


_NOT_ROWS = (
    "a batch must be of tensors whose first dimension is the records, so that it can be filled up"
    " to a public size: collate to such tensors, or give padding=False, whose risk"
    " docs/guarantees.md describes"
)


def _gathered(
    tensors: Sequence[Tensor], parts: Iterator[_Indices], *, share: bool = False
) -> Iterator[list[Tensor]]:
    """Yields the rows of tensors at some positions; `share`: as many positions as rows are all of them, in order."""
    size = tensors[0].shape[0]
    for part in parts:
        if share and len(part) == size:
            yield list(tensors)
            continue
        index = torch.from_numpy(part)
        yield [
            t.index_select(0, index if t.device.type == "cpu" else index.to(t.device))
            for t in tensors
        ]


@typed
class PhysicalBatches:
    """Delivers the draws of a loader in chunks that fit into memory: one release per draw, made by its last chunk.

    The counterpart of Opacus' BatchMemoryManager. Each chunk carries its own "last of the draw" flag, so that workers
    and broken-off epochs cannot shift it; the loop calls `optimizer.step()` for every chunk.

    Args:
        loader: `optimizer.loader(dataset)`, or a DataLoader bound to the optimizer.
        physical_batch_size: most rows of a chunk, >= 1.

    Raises:
        UnknownSamplerError: the loader does not draw by a sampler of torch_dpsco.

    Example:
        >>> from torch_dpsco.accounting.designs import Full
        >>> from torch_dpsco.sampling import FullSampler
        >>> loader = PrivateLoader(TensorDataset(torch.arange(5)), FullSampler(Full(5), steps=1))
        >>> chunks = []
        >>> with PhysicalBatches(loader, 2) as batches:
        ...     for (x,) in batches:  # step() takes each
        ...         chunks.append((x.tolist(), loader.batch_sampler.log.take().last))
        ...         loader.batch_sampler.log.taken = None
        >>> chunks
        [([0, 1], False), ([2, 3], False), ([4], True)]
    """

    def __init__(
        self, loader: PrivateLoader | BoundedLoader | DataLoader[Any], physical_batch_size: int
    ) -> None:
        sampler = getattr(loader, "batch_sampler", None)
        if type(loader) is not PrivateLoader and isinstance(loader, PrivateLoader):
            raise UnknownSamplerError(
                f"loader must draw records (got {type(loader).__name__}): use optimizer.loader(...,"
                " physical_batch_size=...)"
            )
        if isinstance(loader, BoundedLoader):
            raise UnknownSamplerError(
                "loader must be one whose optimizer adds up parts of a draw; this one needs whole"
                " batches (got BoundedLoader)"
            )
        if not isinstance(sampler, DesignSampler):
            raise UnknownSamplerError(
                f"loader must draw by a sampler of torch_dpsco (got {type(sampler).__name__}): use"
                " optimizer.loader(dataset), or DataLoader(dataset, batch_sampler=...) bound to"
                " the optimizer"
            )
        known = loader.slots if isinstance(loader, PrivateLoader) else None
        self._loader = PrivateLoader(
            loader.dataset,
            sampler,
            physical_batch_size=physical_batch_size,
            collate_fn=loader.collate_fn,
            num_workers=loader.num_workers,
            pin_memory=loader.pin_memory,
            slots=None if known is None else known.of_size(physical_batch_size),
        )

    def __len__(self) -> int:
        """Draws per iteration."""
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)

    def __enter__(self) -> PhysicalBatches:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Ends nothing: after `optimizer.discard()` the next iteration delivers an unfinished draw again."""


class BoundedLoader:
    """Delivers the batches of a loader in double precision, every record mapped into its bounds.

    Args:
        loader: of (features, target) pairs.
        bound_x: largest norm of a record's features; None enforces none.
        bound_y: largest absolute value of a target; None enforces none. Only with bound_x.

    Guarantee: a map of each record by itself, see `losses.enforce_bounds`.
    """

    def __init__(self, loader: PrivateLoader, bound_x: float | None, bound_y: float | None) -> None:
        self._loader = loader
        self._bound_x = bound_x
        self._bound_y = bound_y

    @property
    def dataset(self) -> Any:
        """The data set."""
        return self._loader.dataset

    @property
    def design(self) -> Design:
        """How batches are drawn."""
        return self._loader.design

    def __len__(self) -> int:
        """Draws per iteration."""
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            yield bounded(batch, self._bound_x, self._bound_y)


def bounded(batch: Any, bound_x: float | None, bound_y: float | None) -> list[Any]:
    """Returns (features, targets) in double precision, every record mapped into its bounds (see `BoundedLoader`)."""
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise ValueError(f"dataset must give (features, target) pairs (got {type(batch).__name__})")
    features, targets = batch
    if isinstance(features, Tensor) and features.is_floating_point():
        features = features.double()
    if bound_x is None:
        return [features, targets]
    # PRIVACY: nothing is clipped later (test_records_are_mapped_into_their_bounds)
    if bound_y is None:
        return [enforce_bounds(features, bound_x=bound_x), targets]
    return list(enforce_bounds(features, targets.double(), bound_x=bound_x, bound_y=bound_y))


def to_device(batch: Any, device: torch.device) -> Any:
    """Returns a nested batch with its tensors moved to a device."""
    return tree_map(
        lambda leaf: leaf.to(device, non_blocking=True) if isinstance(leaf, Tensor) else leaf, batch
    )
