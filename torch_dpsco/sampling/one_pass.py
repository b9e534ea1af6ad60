"""Samplers of one pass: a partition of the records that is drawn once, and whose parts are used in order.

`AssignedSampler` makes several passes, each over a partition of its own, all of one secret.

The partition belongs to the run and not to a loader: an interrupted run continues with the parts that are left
(`resume`), since a fresh partition would put a record into two parts. Why the largest part is all that counts, and what
breaks it: docs/proofs/heavy_tailed.md#disjoint-parts.
"""

from __future__ import annotations

import math
import secrets
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from hashlib import sha256
from itertools import islice, pairwise
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from torch_dpsco.accounting.designs import (
    Assigned,
    AssignedParts,
    Cyclic,
    Design,
    Disjoint,
    Draw,
    Parts,
)
from torch_dpsco.errors import SequenceError, UnknownSamplerError
from torch_dpsco.noise import KeyedStream
from torch_dpsco.sampling.samplers import (
    DesignSampler,
    RecordIds,
    kind_of,
    rank_of,
)

_Indices = npt.NDArray[Any]
_KEY = 32  # bytes of the cut of an `Assigned` design
# ends of cuts from which records draw by their ids, or places in shards
_BY_ID = b"\x01"
_OF_SHARDS = b"\x02"


@dataclass(frozen=True)
class Partition:
    """Who is in which part, and how many draws were used up.

    Args:
        cut: what fixes the parts: a permutation of the positions, or the secret key of an `Assigned` design (uint8).
        size: number of records it is about; None before the first loader.
        made: draws used so far.
        key: secret key of the tag, hexadecimal.
        tag: keyed fingerprint of the records; "" if it was not computed.
    """

    cut: _Indices = field(repr=False)
    size: int | None = field(repr=False)
    made: int = 0
    key: str = field(default="", repr=False)
    tag: str = field(default="", repr=False)


class OnePassSampler(DesignSampler):
    """Draws from the parts of one partition, in order; a second iteration raises.

    Args:
        design: how to draw.
        size: number of records.
        steps: draws of the iteration; default all that are left.
        resume: partition of a run that continues.

    Raises:
        SequenceError: nothing is left of the partition.
    """

    def __init__(
        self,
        design: Design,
        *,
        size: int | None = None,
        steps: int | None = None,
        resume: Partition | None = None,
    ) -> None:
        self.require_kind(design)
        self.resumed = resume is not None
        made = 0 if resume is None else resume.made
        left = design.steps_per_epoch - made
        if resume is not None and left < 1:
            raise SequenceError(_EXHAUSTED)
        super().__init__(design, size=size, steps=left if steps is None else steps)
        if self.steps > left:
            raise ValueError(
                f"steps must be <= {left}, what is left of one pass over the data (got"
                f" {self.steps})"
            )
        if resume is not None and resume.size not in (None, self.size):
            # PRIVACY: parts go with positions (test_resuming_a_data_set_of_another_size_is_refused)
            raise ValueError(
                "resume must be with the data set of the run (got one of another size)"
            )
        # drawn now: a checkpoint made before the first draw knows it
        self.partition = resume or Partition(self._new_cut(), self.size)
        if self.partition.size is None:
            early = self.partition
            cut = self._of_kind(early.cut)
            self.partition = replace(early, cut=cut, size=self.size)
        self._used = False

    @property
    def so_far(self) -> Partition:
        """The partition, with the draws that steps have used so far."""
        return replace(self.partition, made=max(self.partition.made, self.log.made))

    def draws(self) -> Iterator[tuple[Draw, _Indices]]:
        """Yields the draws of one iteration with their positions."""
        first = self._begin()
        name = partition_name(self.design, self.partition)
        parts = islice(self._parts(self.partition.cut, first), self.steps)
        for index, (part, indices) in enumerate(parts, first):
            yield Draw(len(indices), name, part, index), indices

    def _begin(self) -> int:
        """Returns the first draw of an iteration."""
        if self._used:
            # PRIVACY: each record is charged for one part (test_a_second_pass_is_refused)
            raise SequenceError(_EXHAUSTED)
        self._used = True
        return self.partition.made

    def _new_cut(self) -> _Indices:
        return self.rng.permutation(self.size)

    def _of_kind(self, cut: _Indices) -> _Indices:
        """Returns a cut that was drawn before its records were known, as one of them."""
        return cut

    @abstractmethod
    def _parts(self, cut: _Indices, first: int) -> Iterator[tuple[str, _Indices]]:
        """Yields (part, positions) of the draws from the first one on."""


_EXHAUSTED = (
    "a one-pass loader is exhausted: each record may be used once; go on with"
    " optimizer.loader(dataset, resume=True) if steps are left, or make a new optimizer"
)


class DisjointSampler(OnePassSampler):
    """One pass over one random permutation cut into batches."""

    kind: ClassVar[type[Design]] = Disjoint

    def _parts(self, cut: _Indices, first: int) -> Iterator[tuple[str, _Indices]]:
        size = self.design.batch_size
        for draw in range(first, self.design.steps_per_epoch):
            k = draw % math.ceil(len(cut) / size)
            yield str(k), cut[k * size : (k + 1) * size]


class CyclicSampler(DisjointSampler):
    """Passes over one random permutation cut into batches, which come in the same order."""

    kind = Cyclic


class _KeyedSampler(OnePassSampler):
    """Parts to which each record was assigned by itself.

    Under add_remove the keys must stay secret: they go with positions, so that with known keys a record less would move
    all records after it to other parts. The cut is a secret key of 256 bits, from which they are drawn.
    """

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        # PRIVACY: of no use to a copy (test_a_sampler_or_loader_that_is_stored_does_not_tell_its_draws)
        del state["partition"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # PRIVACY: two runs of the same draws would be charged as if they were fresh
        # (test_copies_of_an_assigned_sampler_draw_anew)
        self.partition = Partition(self._new_cut(), self.size)
        self.resumed = False

    def _new_cut(self) -> _Indices:
        return np.frombuffer(self.rng.read(_KEY), dtype=np.uint8).copy()

    def _require_key(self, cut: _Indices) -> None:
        if cut.dtype != np.uint8 or len(cut) != _KEY:
            # PRIVACY: other keys would be drawn from it (test_a_cut_that_is_no_key_is_refused)
            raise SequenceError(
                "resume must be a partition as it was written: its cut is the key of the parts"
            )


class AssignedSampler(_KeyedSampler):
    """Passes over batches to which each record is assigned independently and uniformly, anew in each pass.

    The draws of all passes come from one secret key of 256 bits: those of two passes, and of two records, are
    independent. An iteration is one pass by default, and goes on where steps have stopped.

    Args:
        design: how to draw.
        size: number of records.
        steps: draws of an iteration; default those of a pass, or what is left.
        resume: partition of a run that continues.
        record_ids: unique, one per record, as for `RecordIds`: records draw by a keyed hash of them, wherever they
            stand. None for draws by position.

    Raises:
        UnitError: two records have one id, or these are ids of other things.
        UnknownSamplerError: draws by ids that need not be secret.
    """

    kind: ClassVar[type[Design]] = Assigned
    design: Assigned
    _owned = slice(None)  # positions that are drawn for
    own = False  # whether they are in a shard
    ids: RecordIds | None = None

    def __init__(
        self,
        design: Design,
        *,
        size: int | None = None,
        steps: int | None = None,
        resume: Partition | None = None,
        record_ids: Any = None,
    ) -> None:
        self.require_kind(design)
        assert isinstance(design, Assigned)
        if record_ids is not None:
            self.ids = RecordIds.of(record_ids, size)
            size = len(self.ids)
            # PRIVACY: records of one id are all in one batch, where each may move the sum by a clip
            # (test_records_with_one_id_are_refused)
            self.ids.require_unique()
        if self.ids is not None and not design.amplification:
            # PRIVACY: a record in another's place has another id, hence a batch of its own, which is no change of one
            # batch to who knows the key (test_ids_need_secret_draws)
            raise UnknownSamplerError(
                "ids need secret draws: leave amplification=False away, or record_ids="
            )
        if steps is None and design.passes > 1:
            made = 0 if resume is None else resume.made
            steps = max(1, min(design.batches, design.steps_per_epoch - made))
        super().__init__(design, size=size, steps=steps, resume=resume)

    def _new_cut(self) -> _Indices:
        return self._of_kind(super()._new_cut())

    def _of_kind(self, key: _Indices) -> _Indices:
        return np.append(key, np.frombuffer(self._end, dtype=np.uint8))

    @property
    def _end(self) -> bytes:
        if self.ids is not None:
            return _BY_ID
        return _OF_SHARDS if self.own else b""

    def _require_key(self, cut: _Indices) -> None:
        # PRIVACY: one key gives other draws by ids than by positions, and in shards
        # (test_a_run_by_ids_goes_on_by_its_ids_only, test_a_pass_over_shards_goes_on_over_the_same_shards_only)
        if cut.dtype == np.uint8 and bytes(cut[_KEY:]) != self._end:
            raise SequenceError(
                "resume must be with record_ids= if the run has drawn by ids, and without if by positions;"
                " with shard= if from shards"
            )
        super()._require_key(cut[:_KEY])

    def _begin(self) -> int:
        if self.design.passes == 1:
            return super()._begin()
        made = self.so_far.made
        if made >= self.design.steps_per_epoch:
            raise SequenceError(_EXHAUSTED)
        return made

    def _parts(self, cut: _Indices, first: int) -> Iterator[tuple[str, _Indices]]:
        self._require_key(cut)
        begun, left_out = divmod(first, self.design.batches)
        for k in range(begun, self.design.passes):
            at = left_out if k == begun else 0
            for part, members in enumerate(self._batches(cut, k, at), at):
                yield str(part), members

    def _batches(self, cut: _Indices, k: int, first: int) -> Iterator[_Indices]:
        """Yields the members of the batches of pass k, from the first one on."""
        own = range(self.size)[self._owned]
        for places in islice(
            _grouped(self._drawn(cut, k, len(own)), self.design.batches), first, None
        ):
            yield own.start + own.step * places

    def _drawn(self, cut: _Indices, k: int, count: int) -> _Indices:
        """Returns the batches of the own records in pass k."""
        key = cut[:_KEY].tobytes()
        if self.ids is not None:
            return self.ids.picks(key, k, self.design.batches)
        # PRIVACY: draws of their own in each pass (test_each_pass_has_draws_of_its_own)
        return KeyedStream(key, self._label(k)).integers(self.design.batches, count)

    def _label(self, k: int) -> str:
        return f"assigned {k}" if k else "assigned"


class RankAssignedSampler(AssignedSampler):
    """Draws the batches of the positions that one of several processes owns; see `samplers` on whose they are.

    Args:
        design: of all processes together.
        rank: of this process, 0..processes-1.
        processes: how many there are.
        key: 32 secret bytes, the same on all processes, for this run only.
        size: number of records there are, those of the others included.
        steps: draws of an iteration, equal on all processes.
        resume: partition of a run that continues, of the same key.
        record_ids: of the records of this process, see `AssignedSampler`; they are then all its own. That no other
            process has one of them is for the caller to see to.
        own: whether the records are a shard, `size` of them, which no other process has.

    Guarantee: that of `AssignedSampler` for the union over the ranks: every record draws its batch once in a pass, on
        the rank that owns it, from a stream of its own.
    """

    def __init__(
        self,
        design: Assigned,
        *,
        rank: int,
        processes: int,
        key: bytes,
        size: int | None = None,
        steps: int | None = None,
        resume: Partition | None = None,
        record_ids: Any = None,
        own: bool = False,
    ) -> None:
        self.rank, self.processes = rank_of(rank, processes)
        self.own = own or record_ids is not None
        if not self.own:
            self._owned = slice(self.rank, None, self.processes)
        if record_ids is not None:
            self.ids = RecordIds.of(record_ids, None)
            size = len(self.ids)
        cut = self._of_kind(np.frombuffer(key, dtype=np.uint8))
        known = resume or Partition(cut, design.n if size is None else size)
        self._require_key(known.cut)
        # PRIVACY: with another key records would be drawn a second time in a pass
        # (test_ranks_go_on_with_a_partition_of_their_common_key_only)
        if known.cut.tobytes() != cut.tobytes():
            raise SequenceError(
                "resume must be of the run of all ranks (got a partition of another key)"
            )
        super().__init__(design, size=size, steps=steps, resume=known, record_ids=self.ids)

    def _label(self, k: int) -> str:
        # PRIVACY: (test_ranks_draw_the_batches_of_their_records_independently)
        return f"assigned {k} rank {self.rank}"


def _grouped(keys: _Indices, parts: int) -> Iterator[_Indices]:
    """Yields the positions of each key, in order."""
    by_part = np.argsort(keys, kind="stable")
    ends = np.cumsum(np.bincount(keys, minlength=parts))
    for k, end in enumerate(ends):
        yield by_part[ends[k - 1] if k else 0 : end]


class PartsSampler(_KeyedSampler):
    """Phases on disjoint parts of one random permutation: all draws of a part, then those of the next.

    The permutation and the batches of `Assigned` parts, where there are such, come from one secret key; else the
    permutation is kept.

    Args:
        design: how to draw.
        size: number of records.
        steps: draws of the iteration; default all that are left.
        resume: partition of a run that continues.
    """

    kind: ClassVar[type[Design]] = Parts
    design: Parts

    @classmethod
    def require_kind(cls, design: Design) -> None:
        """Raises UnknownSamplerError unless the design is of this sampler's kind, and of no kind of it."""
        # PRIVACY: it is charged under add_remove (test_samplers_are_of_their_designs_and_sizes)
        if type(design) is not cls.kind:
            raise UnknownSamplerError(
                f"design must be {cls.kind.__name__} for {cls.__name__} (got {design})"
            )

    @property
    def _keyed(self) -> bool:
        """Whether all is drawn from a key."""
        return any(isinstance(design, Assigned) for design, _ in self.design.parts)

    def _new_cut(self) -> _Indices:
        # PRIVACY: its digest is public, and few permutations can all be tried
        # (test_the_name_of_parts_with_secret_draws_does_not_tell_them)
        return super()._new_cut() if self._keyed else self.rng.permutation(self.size)

    def _parts(self, cut: _Indices, first: int) -> Iterator[tuple[str, _Indices]]:
        if self._keyed:
            self._require_key(cut)
        return islice(self._all_parts(cut), first, None)

    def _all_parts(self, cut: _Indices) -> Iterator[tuple[str, _Indices]]:
        parts = zip(self.design.parts, self._members(cut), strict=True)
        for part, ((design, draws), members) in enumerate(parts):
            if isinstance(design, Assigned):
                yield from islice(self._passes(cut, part, design, members), draws)
                continue
            if isinstance(design, Disjoint):  # cut further, by the same permutation
                size = design.batch_size
                for k in range(draws):
                    yield f"{part}/{k}", members[k * size : (k + 1) * size]
                continue
            members = np.sort(members)  # in memory order: gathered faster
            inner: Any = kind_of(design)(design, size=len(members), steps=draws)
            inner.rng = self.rng
            for _, positions in inner.draws():
                yield str(part), members[positions]

    def _members(self, cut: _Indices) -> Iterator[_Indices]:
        """Yields the positions of each part."""
        order = (
            KeyedStream(cut.tobytes(), "order").permutation(self.size) if self._keyed else cut
        )
        ends = np.cumsum([0, *(design.n for design, _ in self.design.parts)]).tolist()
        yield from (order[start:stop] for start, stop in pairwise(ends))

    def _passes(
        self, cut: _Indices, part: int, design: Assigned, members: _Indices
    ) -> Iterator[tuple[str, _Indices]]:
        """Yields the batches of all passes inside of a part."""
        members = np.sort(members)
        for k in range(design.passes):
            # PRIVACY: draws of their own in each pass (test_each_pass_inside_of_a_part_has_draws_of_its_own)
            label = f"assigned {part} pass {k}" if k else f"assigned {part}"
            batches = KeyedStream(cut.tobytes(), label).integers(design.batches, self.size)
            for batch, places in enumerate(_grouped(batches[members], design.batches)):
                yield f"{part}/{batch}", members[places]


class AssignedPartsSampler(PartsSampler):
    """Phases on parts to which each record was assigned independently."""

    kind = AssignedParts
    design: AssignedParts
    _keyed = True

    def _members(self, cut: _Indices) -> Iterator[_Indices]:
        tickets = KeyedStream(cut.tobytes(), "parts").integers(self.design.n, self.size)
        ends = np.cumsum([design.n for design, _ in self.design.parts])
        # PRIVACY: where a record goes depends on its ticket alone (test_a_record_less_moves_no_other_to_another_part)
        yield from _grouped(np.searchsorted(ends, tickets, side="right"), len(ends))


_KINDS: tuple[type[OnePassSampler], ...] = (
    *(DisjointSampler, CyclicSampler, AssignedSampler),
    *(AssignedPartsSampler, PartsSampler),  # the first is of a subclass of the second's design
)


def partition_name(design: Design, partition: Partition) -> str:
    """Returns the name by which a ledger knows a partition of a one-pass design."""
    # PRIVACY: the ledger takes the largest of the parts of one name, so that the name must fix how records were cut
    # (test_partitions_of_different_cuts_have_different_names)
    digest = sha256(partition.cut.tobytes()).hexdigest()[:32]
    if isinstance(design, Assigned):
        return f"assigned/{digest}/{design.batches}"
    if isinstance(design, Parts):
        return f"parts/{digest}/{sha256(repr(design.parts).encode()).hexdigest()[:32]}"
    return f"positions/{digest}/{design.batch_size}"  # as `ShuffledSampler` names the same cut


def early_partition(design: Design) -> Partition | None:
    """Returns a fresh partition of records that no loader has seen yet; None for a design of another kind."""
    if not isinstance(design, tuple(sampler.kind for sampler in _KINDS)):
        return None
    drawn: Any = make_sampler(design)
    cut: Partition = drawn.partition
    return replace(cut, size=None, key=secrets.token_hex(16))


def make_sampler(
    design: Design,
    *,
    size: int | None = None,
    steps: int | None = None,
    resume: Partition | None = None,
    record_ids: Any = None,
) -> DesignSampler:
    """Returns the sampler of a design; `resume` is for designs of one pass, `record_ids` for `Assigned`.

    Raises:
        UnknownSamplerError: the design has none.
    """
    if record_ids is not None:
        if not isinstance(design, Assigned):
            raise UnknownSamplerError(
                "record_ids must be left out, but for sampling='allocated', which draws by the id of each"
                f" record (got {design}): people with several records are users, of"
                " dp.UserClippedSGD"
            )
        return AssignedSampler(
            design, size=size, steps=steps, resume=resume, record_ids=record_ids
        )
    for sampler in _KINDS:
        if isinstance(design, sampler.kind):
            return sampler(design, size=size, steps=steps, resume=resume)
    return kind_of(design)(design, size=size, steps=steps)
