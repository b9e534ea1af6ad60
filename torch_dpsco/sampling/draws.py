"""Which delivered rows a step may use, and whether a run that continues has the same records.

A keyed fingerprint of the records of a loader: whether a run that continues has the data set that it began with.

One tag of 128 bits over all records in their order, under a random key of 128 bits (BLAKE2b). Without the key it tells
nothing; with the key one can try data sets, so that key and tag stay in the private checkpoint. That two data sets
differ is all that is ever said about them.

Which delivered rows a step may use: the log by which an optimizer makes sure that they are those of one draw, once.

Logging happens when a batch is delivered, in the main process and in order, so that prefetching workers, broken-off
epochs and physical batches cannot shift it.

A draw that was delivered is what the next step uses, whatever happens in between. Who could have another one instead
would choose batches by their size or by who is in them, and no design allows for that (docs/guarantees.md). So a loop
cannot leave a draw out; `discard()` and failed steps give it up, and then the next iteration delivers the same draw.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from hashlib import blake2b
from types import NoneType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from torch_dpsco.accounting.designs import Draw
from torch_dpsco.compat import tree_flatten
from torch_dpsco.errors import PrivacyError, SequenceError
from torch_dpsco.sampling.row_file import Gathered

_BLOCK = 1 << 16  # records that are read at a time


def records_of(dataset: Any, order: list[int] | None = None) -> Iterator[Any]:
    """Yields the records of a map-style data set, or its tensors, which hold the same, in order or in another one."""
    if type(dataset) is TensorDataset:  # a subclass may override __getitem__
        yield from (tensor if order is None else tensor[order] for tensor in dataset.tensors)
    elif isinstance(dataset, Gathered):
        places = np.arange(len(dataset)) if order is None else np.array(order, dtype=np.int64)
        yield from (
            dataset.gather(places[start : start + _BLOCK])
            for start in range(0, len(places), _BLOCK)
        )
    else:
        yield from (dataset[i] for i in (range(len(dataset)) if order is None else order))


def fingerprint(key: str, contents: Iterable[Any]) -> str:
    """Returns the tag of some contents (nested tensors, arrays, numbers, strings and bytes) under a hexadecimal key."""
    found = blake2b(key=bytes.fromhex(key), digest_size=16)
    for item in contents:
        leaves, shape = tree_flatten(item)
        found.update(f"{shape}".encode())
        for leaf in leaves:
            for part in _parts(leaf):
                found.update(part)
    return found.hexdigest()


def _parts(leaf: Any) -> Iterator[Any]:
    """Yields what tells a value from others, and then its bytes."""
    if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
        yield f"{leaf.dtype}{tuple(leaf.shape)}".encode()
        yield leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    elif isinstance(leaf, (bytes, str, int, float, complex, NoneType)):
        yield type(leaf).__name__.encode()
        yield leaf if isinstance(leaf, bytes) else repr(leaf).encode()
    elif (
        hasattr(leaf, "__array_interface__") and not np.asarray(leaf).dtype.hasobject
    ):  # their scalars, images
        values = np.asarray(leaf)
        yield f"{values.dtype}{values.shape}".encode()
        yield values.tobytes()
    else:
        # PRIVACY: others may look alike (test_records_that_cannot_be_told_apart_are_refused)
        raise PrivacyError(
            "dataset must hold dense tensors, arrays of numbers, numbers or strings, so that a run"
            f" of one pass knows its records again (got a {type(leaf).__name__})"
        )


Drawn = tuple[Draw, npt.NDArray[np.int64]]


class Chunk(NamedTuple):
    """What one delivered batch is: (a part of) one draw.

    Args:
        draw: of the sampler.
        rows: the most records that the batch can have.
        last: whether the draw is complete with it.
        start: rows of the draw before it.
        source: what the sampler drew, to deliver it again.
        users: the user of each row of the batch, where users are drawn; -1 for filling.
        slots: (rows,) int64, ascending: where the records are in the batch, all other rows of which are filling; None
            for a batch of records only.
        block: rows of the batch, filling included; None for `rows`.
        places: of the draw's units, see `Slots`: a draw that is delivered again keeps them.
    """

    draw: Draw
    rows: int
    last: bool
    start: int = 0
    source: Drawn | None = None
    users: Tensor | None = None
    slots: Tensor | None = None
    block: int | None = None
    places: npt.NDArray[np.int64] | None = None

    @property
    def size(self) -> int:
        """Rows of the batch, filling included."""
        return self.rows if self.block is None else self.block

    def records(self, first: int, rows: int) -> Tensor | None:
        """Returns which of some rows of the batch are records: indices from the first on; None for all of them."""
        if self.slots is None:
            return None
        index = self.slots - first
        return index[(index >= 0) & (index < rows)]


_UNUSED = (
    "the previous batch was not used: call optimizer.step() for every batch of a private loader,"
    " also an empty one (a draw that is left out by its size or its records voids the sampling), or"
    " optimizer.discard() to have the same draw delivered again; use another loader for evaluation;"
    " let only optimizer.loader(dataset, physical_batch_size=..., num_workers=...) run ahead, not a"
    " BatchMemoryManager with workers"
)
_GIVEN_UP = (
    "the draw was given up, by discard() or by a step that failed, and is the next one again: start"
    " a new loop over the loader (of one pass: over optimizer.loader(dataset, resume=True)), which"
    " delivers it from its beginning"
)


class DrawLog:
    """Which delivered rows a step may use: those of one draw, once.

    Args:
        size: number of records, or users, that draws are from; None if nothing was ever drawn.
    """

    def __init__(self, size: int | None = None) -> None:
        self.size = size
        self.own = False  # whether draws are from records that only this process has
        self.waiting: deque[Chunk] = deque()
        self.taken: Chunk | None = None  # by a step that has not ended it
        self.held: Chunk | None = None  # of the draw that the next step must use
        self.order: npt.NDArray[np.int64] | None = (
            None  # newest permutation, where batches are parts of one
        )
        self.made = 0  # draws of one pass that steps have used
        self.dataset: Any = None  # that is drawn from
        self.owner: Any = None  # whose steps use the draws
        self.on_restart: Callable[[], None] = lambda: None
        self.on_delivery: Callable[[Chunk], None] = lambda chunk: None
        self._given_up = False
        self._replaced = False  # by the log of another loader
        self._split: Chunk | None = None  # delivered in parts, the last one is still to come

    @property
    def again(self) -> Drawn | None:
        """The draw that an iteration must begin with, because it was given up."""
        return None if self.held is None else self.held.source

    def restart(self) -> None:
        """Begins a new iteration.

        Raises:
            SequenceError: the draw that was delivered last was neither used nor given up; another loader has taken the
                place of this one.
        """
        self._require_newest()
        if self.held is not None and not self._given_up:
            # PRIVACY: another draw instead is one that was chosen (test_a_loop_cannot_leave_a_draw_out)
            raise SequenceError(_UNUSED)
        self.on_restart()
        self.give_up()

    def _require_newest(self) -> None:
        if self._replaced:
            # PRIVACY: of several loaders that were looked at one could be chosen
            # (test_of_several_loaders_only_the_newest_delivers)
            raise SequenceError(
                "this loader was replaced by a later one of the same optimizer (iterate over that"
                " one), or by a checkpoint, which goes on with its own pass (iterate over"
                " optimizer.loader(dataset, resume=True))"
            )

    def deliver(self, chunk: Chunk) -> None:
        """Notes a delivered batch.

        Raises:
            SequenceError: the batch before it was not used up by a step, or its draw was given up; it is a part of
                another draw than the one in progress; another loader has taken the place of this one.
        """
        self._require_newest()
        if self._given_up and (chunk.start or chunk.source is not self.again):
            # PRIVACY: as for an iteration that begins anew (test_a_draw_that_was_given_up_is_the_next_one_again)
            raise SequenceError(_GIVEN_UP)
        # PRIVACY: a loop that has seen several batches could use those that it likes; with parts of two draws in one
        # release a record of both would count twice
        # (test_no_part_of_a_draw_comes_before_the_one_before_it_is_used, test_a_release_never_joins_parts_of_two_draws)
        self._require_used()
        if self._split is not None:
            raise SequenceError(
                "the previous draw is not complete: signal_skip_step(True) was called for its last"
                " part; leave the calls to BatchMemoryManager, or use optimizer.loader(dataset,"
                " physical_batch_size=...)"
            )
        begins = chunk.start == 0 and (self.held is None or self._given_up)
        continues = self.held is not None and not self._given_up and chunk.draw is self.held.draw
        if not begins and not continues:
            # PRIVACY: the rest of a draw that a newer iteration has delivered, and a step used up, would be given up
            # and delivered once more; or another draw would take the place of one of which parts were seen
            # (test_parts_of_two_iterations_are_never_joined, test_the_rest_of_a_draw_that_was_used_up_is_refused)
            raise SequenceError(
                "an older iteration of the loader was continued inside of a newer one: finish one"
                " loop over a loader before starting the next, or call optimizer.discard() and"
                " start a new one"
            )
        self.waiting.append(chunk)
        self.held = chunk
        self._given_up = False
        self.on_delivery(chunk)

    def split(self, *, more: bool) -> None:
        """Notes that the batch that comes next is a part of the newest draw (Opacus' BatchMemoryManager says so).

        Args:
            more: whether another part follows.

        Raises:
            SequenceError: there is no draw, it was given up, or the part before was not used.
        """
        if self._split is not None:
            self._require_used()
            self.waiting.append(self._split._replace(last=not more))
        elif self.waiting:
            self.waiting[-1] = self.waiting[-1]._replace(last=not more)
        elif self._given_up:
            raise SequenceError(_GIVEN_UP)
        else:
            raise SequenceError(
                "signal_skip_step() must follow a new draw of the optimizer's own loader: give the"
                " loader of optimizer.loader(dataset) to BatchMemoryManager"
            )
        self._split = self.waiting[-1] if more else None

    def _require_used(self) -> None:
        if self.waiting or self.taken is not None:
            raise SequenceError(_UNUSED)

    def take(self) -> Chunk:
        """Returns the batch that the next step must use; raises SequenceError if there is none."""
        if not self.waiting:
            raise SequenceError(
                "no batch is outstanding: each step needs one batch of this optimizer's own loader"
                " (made by optimizer.loader(dataset) or optimizer.bind(loader)) and can use it once"
            )
        self.taken = self.waiting.popleft()
        return self.taken

    def use_up(self) -> None:
        """Notes that a release was made from the draw, or a step that is not shown."""
        if self.taken is not None:
            self.made = self.taken.draw.index + 1
        self.waiting.clear()
        self.taken = self.held = self._split = None

    def give_up(self) -> None:
        """Forgets what was delivered of the draw in progress: the next iteration begins with it again."""
        self.waiting.clear()
        self.taken = self._split = None
        self._given_up = self.held is not None

    def succeed(self, old: DrawLog) -> None:
        """Takes the place of the log of another loader, with the draw that was given up there.

        Raises:
            SequenceError: a draw of either is outstanding; or it was made for another number of records.
        """
        if old is self:
            return
        if old.held is not None and not old._given_up:
            raise SequenceError(_UNUSED)
        if self.held is not None:
            # PRIVACY: of several samplers that were looked at one could be chosen
            # (test_a_loader_whose_draw_was_seen_is_not_bound)
            raise SequenceError(
                "loader must be bound before its first batch is drawn: bind a new one"
            )
        # PRIVACY: places that ranks have drawn in their shards may be places of one record in a common data set
        # (test_a_draw_given_up_is_refused_on_a_data_set_of_another_size,
        # test_a_draw_of_a_shard_is_no_draw_of_all_records)
        if old.held is not None and (old.size, old.own) != (self.size, self.own):
            raise SequenceError(
                "a draw was given up and is the next one again: use a loader of the same data set,"
                " by optimizer.loader(dataset)"
            )
        begun = old.held is not None and old.order is not None and old.held.draw.part != "0"
        if begun and (self.dataset is None or self.dataset is not old.dataset):
            # PRIVACY: another data set, or the same in another order, may hold a record at the given-up places that an
            # earlier batch of this permutation has used (test_a_permutation_that_was_begun_keeps_its_data_set)
            raise SequenceError(
                "a draw was given up in the middle of a shuffled pass, which goes on with the same"
                " dataset object: iterate over the loader again, or make a new one of that object"
            )
        if old.held is not None and old.held.draw.part == "0":
            # PRIVACY: only from its start, since another data set may hold a record that was used at a place to come
            # (test_a_permutation_that_was_begun_goes_on_in_its_own_loader_only)
            self.order = old.order
        self.held = old.held
        old.held = None
        old._replaced = True
        self._replaced = False
        old.give_up()
        self.give_up()
