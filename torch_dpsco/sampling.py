"""Samplers that draw batches as their design says, and loaders that hand each draw to the optimizer.

A sampler carries its `design`, so that accounting can believe it, and a `DrawLog`, by which the optimizer makes sure
that each step uses the rows of exactly one draw. Logging happens when a batch is delivered, in the main process and in
order, so that prefetching workers, broken-off epochs and physical batches cannot shift it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset, default_collate

from torch_dpsco import _validate as check
from torch_dpsco.accounting.designs import Design, Disjoint, Draw, Fixed, Full, Poisson, Shuffled
from torch_dpsco.errors import SequenceError, UnitError, UnknownSamplerError
from torch_dpsco.rng import sampling_generator

__all__ = [
    "Chunk",
    "DesignSampler",
    "DisjointSampler",
    "DrawLog",
    "FixedSampler",
    "FullSampler",
    "PoissonSampler",
    "PrivateLoader",
    "ShuffledSampler",
    "make_sampler",
]

_Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Chunk:
    """What one delivered batch is: (a part of) one draw."""

    draw: Draw
    rows: int
    last: bool


class DrawLog:
    """Which delivered rows a step may use: those of one draw, once."""

    def __init__(self) -> None:
        self.waiting: deque[Chunk] = deque()
        self.taken: Chunk | None = None  # by a step that has not ended it
        self.prefetching = False  # whether delivery may run ahead of use
        self._abandoned: Draw | None = None
        self.on_restart: Callable[[], None] = lambda: None

    def restart(self) -> None:
        """Forgets everything delivered and not used: a new iteration has begun."""
        self.waiting.clear()
        self.taken = self._abandoned = None
        self.on_restart()

    def deliver(self, chunk: Chunk) -> None:
        """Notes a delivered batch.

        Raises:
            SequenceError: the batch before it was not used up by a step (skipping batches voids the sampling design);
                while `prefetching`, delivery runs ahead of use and this cannot be seen.
        """
        # PRIVACY: else a release could join parts of two draws, and a record of both would count twice
        # (test_a_release_never_joins_parts_of_two_draws)
        if (self.waiting or self.taken is not None) and not self.prefetching:
            raise SequenceError(
                "the previous batch was not used: call optimizer.step() for every batch of a private loader, also an "
                "empty one, or optimizer.discard() to give a draw up; use another loader for evaluation"
            )
        self.waiting.append(chunk)

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


class DesignSampler(Sampler[list[int]], ABC):
    """Draws batches of positions 0..size-1 by a design; usable as `batch_sampler` of a DataLoader.

    Args:
        design: how to draw, of the sampler's kind; its `n` must be the data set's size where that is public.
        size: number of records there are; default design.n. A Poisson or Full design under add_remove may have another
            size, because then the true one is private and `n` only a public reference.
        steps: draws per iteration; default one epoch, ceil(n / batch_size). A public constant.
        seed: makes the draws repeatable (and warns); tests only.

    Raises:
        UnknownSamplerError: the design is of another kind than the sampler.
        UnitError: the size is not n where the design needs it to be.
    """

    kind: ClassVar[type[Design]]

    def __init__(
        self, design: Design, *, size: int | None = None, steps: int | None = None, seed: int | None = None
    ) -> None:
        if not isinstance(design, self.kind):
            # PRIVACY: accounting believes the design that a sampler carries (test_a_sampler_refuses_a_foreign_design)
            raise UnknownSamplerError(f"design must be {self.kind.__name__} for {type(self).__name__} (got {design})")
        self.design = design
        self.size = check.count(size=design.n if size is None else size)
        self.steps = check.positive_count(steps=design.steps_per_epoch if steps is None else steps)
        self.log = DrawLog()
        self.rng = sampling_generator(seed)
        if self.size != design.n and not isinstance(design, (Poisson, Full)):
            raise UnitError(f"size must be n={design.n}, the declared number of records (got {self.size})")
        if isinstance(design, Disjoint) and self.steps > design.steps_per_epoch:
            raise ValueError(f"steps must be <= {design.steps_per_epoch}, one pass over the data (got {self.steps})")

    def __len__(self) -> int:
        return self.steps

    def __getstate__(self) -> dict[str, Any]:
        # a copy must not draw the same batches; a worker process gets no stream at all
        return {key: value for key, value in self.__dict__.items() if key not in ("rng", "log")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.rng, self.log = sampling_generator(), DrawLog()

    @abstractmethod
    def draws(self) -> Iterator[tuple[Draw, _Indices]]:
        """Yields the draws of one iteration with their positions."""

    def __iter__(self) -> Iterator[list[int]]:
        self.log.restart()
        for draw, indices in self.draws():
            self.log.deliver(Chunk(draw, draw.size, last=True))
            yield indices.tolist()


class PoissonSampler(DesignSampler):
    """Each position is in each draw independently with the design's rate; O(batch) time by geometric gaps."""

    kind = Poisson

    def draws(self) -> Iterator[tuple[Draw, _Indices]]:
        """Yields the draws of one iteration with their positions."""
        rate = self.design.batch_size / self.design.n
        for _ in range(self.steps):
            indices = poisson_positions(self.size, rate, self.rng)
            yield Draw(len(indices)), indices


def poisson_positions(size: int, rate: float, rng: np.random.Generator) -> _Indices:
    """Returns the sorted positions of a Poisson sample: each of 0..size-1 independently with probability rate.

    The gap before the next success is geometric: P(gap >= k) = (1 - rate)^k, drawn by inversion in float64 (float32
    uniforms would round the rate up to a multiple of 2^-24).
    """
    if rate >= 1.0:
        return np.arange(size, dtype=np.int64)
    log_miss = math.log1p(-rate)
    mean = size * rate
    chunk = int(mean + 6.0 * math.sqrt(mean) + 16.0)
    last, found = -1, []
    while last < size:
        # 1 - U is in (0, 1]; a gap of size + 1 already leads outside, larger ones only risk an overflow
        gaps = np.minimum(np.floor(np.log1p(-rng.random(chunk)) / log_miss), size + 1)
        positions = last + np.cumsum(gaps.astype(np.int64) + 1)
        found.append(positions)
        last = int(positions[-1])
    joined = np.concatenate(found) if found else np.empty(0, dtype=np.int64)
    return joined[joined < size]


class FixedSampler(DesignSampler):
    """Each draw is an independent uniformly random subset of exactly batch_size positions."""

    kind = Fixed

    def draws(self) -> Iterator[tuple[Draw, _Indices]]:
        """Yields the draws of one iteration with their positions."""
        for _ in range(self.steps):
            indices = np.sort(self.rng.choice(self.size, self.design.batch_size, replace=False, shuffle=False))
            yield Draw(len(indices)), indices


class ShuffledSampler(DesignSampler):
    """Fresh random permutations, one after another, cut into batches; each iteration starts a new one."""

    kind = Shuffled

    def draws(self) -> Iterator[tuple[Draw, _Indices]]:
        """Yields the draws of one iteration with their positions."""
        epoch = self.design.steps_per_epoch
        for start in range(0, self.steps, epoch):
            steps = min(epoch, self.steps - start)
            yield from _parts(self.rng.permutation(self.size), self.design.batch_size, steps)


class DisjointSampler(DesignSampler):
    """One pass over one random permutation cut into batches; a second iteration raises."""

    kind = Disjoint
    _used = False

    def draws(self) -> Iterator[tuple[Draw, _Indices]]:
        """Yields the draws of one iteration with their positions."""
        if self._used:
            raise SequenceError("a one-pass loader is exhausted: each record may be used once; make a new optimizer")
        self._used = True
        yield from _parts(self.rng.permutation(self.size), self.design.batch_size, self.steps)


def _parts(permutation: _Indices, batch_size: int, steps: int) -> Iterator[tuple[Draw, _Indices]]:
    # PRIVACY: the ledger takes the largest of the parts of one name, so that the name must fix how positions were cut
    # (test_partitions_of_different_cuts_have_different_names)
    name = f"positions/{sha256(permutation.tobytes()).hexdigest()[:32]}/{batch_size}"
    for k in range(steps):
        indices = permutation[k * batch_size : (k + 1) * batch_size]
        yield Draw(len(indices), name, str(k)), indices


class FullSampler(DesignSampler):
    """Every draw is all positions."""

    kind = Full

    def draws(self) -> Iterator[tuple[Draw, _Indices]]:
        """Yields the draws of one iteration with their positions."""
        for _ in range(self.steps):
            yield Draw(self.size), np.arange(self.size, dtype=np.int64)


_KINDS: tuple[type[DesignSampler], ...] = (
    PoissonSampler,
    FixedSampler,
    ShuffledSampler,
    DisjointSampler,
    FullSampler,
)


def make_sampler(
    design: Design, *, size: int | None = None, steps: int | None = None, seed: int | None = None
) -> DesignSampler:
    """Returns the sampler of a design; raises UnknownSamplerError for a design that has none."""
    for sampler in _KINDS:
        if isinstance(design, sampler.kind):
            return sampler(design, size=size, steps=steps, seed=seed)
    raise UnknownSamplerError(
        "no sampling was declared: give n= (Poisson sampling) or design= to the optimizer to get a loader from it"
    )


@dataclass(frozen=True)
class _EmptyLikeOne:
    """Collates items; a batch of none has the shapes and dtypes of the data set's first record, and no rows."""

    collate: Callable[[list[Any]], Any]
    dataset: Any

    def __call__(self, items: list[Any]) -> Any:
        if items:
            return self.collate(items)
        if not len(self.dataset):  # legal under add_remove; nothing shows what a record is like
            return []
        return tree_map(_without_rows, self.collate([self.dataset[0]]))


def _without_rows(leaf: Any) -> Any:
    return leaf[:0] if isinstance(leaf, Tensor) and leaf.ndim else leaf


class PrivateLoader:
    """Iterates over the draws of a sampler and notes each delivered batch in its log.

    Tensors in memory are gathered by one `index_select` a batch; any other data set goes through a DataLoader.

    Args:
        dataset: map-style data set, or a TensorDataset.
        sampler: how to draw.
        physical_batch_size: deliver each draw in chunks of at most that many rows; `optimizer.step()` then adds up the
            chunks and makes one release per draw.
        collate_fn: as in DataLoader; the default makes batches without rows for empty draws.
        num_workers: as in DataLoader.
        pin_memory: as in DataLoader.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        sampler: DesignSampler,
        *,
        physical_batch_size: int | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        self.dataset, self.batch_sampler = dataset, sampler
        self.physical_batch_size = physical_batch_size
        if physical_batch_size is not None:
            check.positive_count(physical_batch_size=physical_batch_size)
        self.num_workers, self.pin_memory = check.count(num_workers=num_workers), pin_memory
        self.collate_fn = collate_fn
        size = len(dataset)  # type: ignore[arg-type]
        if size != sampler.size:
            raise UnitError(f"dataset must have {sampler.size} records, as its sampler was made for (got {size})")

    @property
    def design(self) -> Design:
        """How batches are drawn."""
        return self.batch_sampler.design

    def __len__(self) -> int:
        """Draws per iteration."""
        return len(self.batch_sampler)

    def _split(self, chunks: deque[Chunk]) -> Iterator[_Indices]:
        for draw, indices in self.batch_sampler.draws():
            size = self.physical_batch_size or max(len(indices), 1)
            starts = range(0, max(len(indices), 1), size)
            for start in starts:
                part = indices[start : start + size]
                chunks.append(Chunk(draw, len(part), last=start == starts[-1]))
                yield part

    def _batches(self, parts: Iterator[_Indices]) -> Iterator[Any]:
        # a subclass may override __getitem__
        if type(self.dataset) is TensorDataset and self.collate_fn is None and not self.num_workers:
            tensors = self.dataset.tensors
            for part in parts:
                index = torch.from_numpy(part)
                yield [t.index_select(0, index.to(t.device)) for t in tensors]
            return
        lists = (part.tolist() for part in parts)
        yield from DataLoader(
            self.dataset,
            batch_sampler=lists,
            collate_fn=_EmptyLikeOne(self.collate_fn or default_collate, self.dataset),
            num_workers=self.num_workers,
            pin_memory=self.pin_memory,
        )

    def __iter__(self) -> Iterator[Any]:
        log = self.batch_sampler.log
        log.restart()
        chunks: deque[Chunk] = deque()  # of this iteration only: nothing is left over when it is broken off
        for batch in self._batches(self._split(chunks)):
            log.deliver(chunks.popleft())
            yield batch
