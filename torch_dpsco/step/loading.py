"""How a run gets its batches: a loader of its design, over records or users, in one process or several."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.data import Dataset

from torch_dpsco import _validate as check
from torch_dpsco.accounting.designs import Assigned
from torch_dpsco.accounting.events import ADD_REMOVE
from torch_dpsco.distributed import World, world_size
from torch_dpsco.errors import SequenceError, UnitError
from torch_dpsco.sampling import (
    DesignSampler,
    Partition,
    PrivateLoader,
    RecordIds,
    Slots,
    Streamed,
    UserLoader,
    user_ids,
)
from torch_dpsco.step import checks
from torch_dpsco.step.batch import LogicalBatch
from torch_dpsco.step.run import Run


class Drawn(NamedTuple):
    """Whom a loader draws.

    Args:
        size: records or users that may be drawn, of all processes together.
        owners: (records,) user of each record; None where records are drawn.
        named: ids of the records, by which they pick their batches or are known to other processes.
        shard: most records or users of this process, where each has its own.
        held: those that it has.
    """

    size: int
    owners: Tensor | None
    named: Any
    shard: int | None
    held: int


def who_is_drawn(
    run: Run,
    world: World,
    dataset: Dataset[Any],
    users: Any,
    ids: Any,
    shard: int | None,
    steps: int | None,
) -> Drawn:
    """Returns whom a loader of the run draws; all processes agree on it. See `PrivateOptimizer.loader`."""
    records = checks.number_of_records(dataset)
    if ids is not None and users is not None:
        raise UnitError(
            f"ids must not be given with users, who are drawn (got a {type(ids).__name__})"
        )
    named: Any = None if ids is None else RecordIds(ids, records)
    if isinstance(dataset, Streamed):
        named = checks.ids_of_stream(dataset, ids)
    owners = None if users is None else user_ids(users, records)
    held = records if owners is None else len(owners.unique())
    if owners is not None and shard is not None and world_size() > 1:
        named = RecordIds(users, records)
    known = {"shard": shard, "ids": named}
    problem = checks.problem_of_shard(shard, held, run.adjacency, run.oracle.unit)
    if owners is not None:
        problem = problem or checks.problem_of_users(owners, run.design, run.adjacency)
    size = world.compare_data(
        dataset,
        steps,
        own=", ".join(name for name, given in known.items() if given is not None),
        counted=run.adjacency != ADD_REMOVE and owners is None,
        problem=problem,
    )
    if owners is None:
        return Drawn(size, None, named, shard, held)
    number = checks.number_of_users(owners, run.design, run.adjacency)
    return Drawn(number, owners, named, None if world_size() == 1 else shard, held)


def make_loader(
    run: Run,
    drawn: Drawn,
    dataset: Dataset[Any],
    sampler: DesignSampler,
    *,
    slots: Slots | None,
    physical_batch_size: int | None,
    collate_fn: Callable[[list[Any]], Any] | None,
    num_workers: int,
    pin_memory: bool,
) -> PrivateLoader:
    """Returns the loader of a sampler; see `PrivateOptimizer.loader`."""
    owners = drawn.owners
    kind = PrivateLoader if owners is None else partial(UserLoader, users=owners)
    return kind(
        dataset,
        sampler,
        physical_batch_size=physical_batch_size,
        collate_fn=collate_fn,
        num_workers=num_workers,
        pin_memory=pin_memory,
        slots=slots,
    )


def make_slots(
    run: Run,
    sampler: DesignSampler,
    *,
    padding: bool | None,
    most: int | None,
    records: int | None,
    dim: int,
) -> Slots | None:
    """Returns where rows stand in blocks of fixed size, None where they need not or must not be filled up.

    Args:
        run: it.
        sampler: of the loader.
        padding: whether batches are filled up; None for where they must be.
        most: rows of a physical batch.
        records: most records of this process, where each has its own.
        dim: number of parameters.
    """
    # PRIVACY: neighbors draw batches of different sizes, or it shows who was drawn
    # (test_a_record_more_moves_the_sum_of_a_kinked_net_by_one_clip)
    if not (
        run.sizes_are_private if padding is None else check.choice((True, False), padding=padding)
    ):
        return None
    # PRIVACY: where each process has records of its own all may be on one, whose draws must fit as well
    # (test_blocks_of_a_process_with_own_records_have_room_for_a_whole_draw)
    spread = 1 if getattr(sampler, "own", False) else getattr(sampler, "processes", 1)
    return Slots(
        run.design,
        of_users=run.oracle.unit == "user",
        physical_batch_size=most,
        processes=spread,
        records=records,
        dim=dim,
    )


def draws_left(
    run: Run, made: int, steps: int | None, partition: Partition | None, *, of_users: bool
) -> int | None:
    """Returns how many draws an iteration over a loader has; None for an epoch.

    Args:
        run: it.
        made: steps of the run.
        steps: as given.
        partition: that is continued.
        of_users: whether users are drawn.
    """
    if steps is not None or run.planned is None:
        return steps
    left = run.planned - made
    if not run.design.one_pass:
        return max(1, left) if of_users else None
    # batches that no step needs are left alone
    more = run.design.steps_per_epoch - (0 if partition is None else partition.made)
    if isinstance(run.design, Assigned):  # a loop over the loader is a pass
        more = min(more, run.design.batches)
    return max(1, min(more, left))


def continued(run: Run, batch: LogicalBatch, made: int, *, resume: bool) -> Partition | None:
    """Returns the partition that a loader goes on with; None for a fresh one.

    Raises:
        SequenceError: it must be continued, or is not known.
    """
    partition = batch.sealed() if resume else None
    if not run.design.one_pass:
        return partition
    if resume and partition is None and made:
        raise SequenceError(
            "resume must be False: no partition of this run is known that could be continued"
        )
    if not resume and run.in_order and made:
        # PRIVACY: draws that are made again, by the noise of a charge that has paid for others
        # (test_a_pass_is_not_begun_again)
        raise SequenceError(
            "phases, and passes that are charged as a whole, must not start again after"
            f" {made} steps: use optimizer.loader(dataset, resume=True)"
        )
    return partition
