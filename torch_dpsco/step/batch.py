"""Which rows a step may use: exactly those of one draw, once; rows of scaled losses.

Which rows a step may use: exactly those of one draw, once.

Without a declared sampling there is no draw to compare with: then one backward of one batch makes one step, and
everything that could put a record into a step twice is refused.

Gradient scaling (`torch.amp.GradScaler`): rows are unscaled before they are clipped, and overflow is not reported.

    scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update()

GradScaler lets an optimizer that says `_step_supports_amp_scaling` unscale by itself, and hands it the scale as an
attribute. Its check for infinities decides whether a step is skipped and how the scale moves: both would tell about
private rows outside of the ledger, so it is shown a gradient of zeros. Rows that overflow contribute 0, as always.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from torch_dpsco import _validate as check
from torch_dpsco.accounting.designs import Assigned, Design, Draw, Undeclared, identify
from torch_dpsco.accounting.events import ADD_REMOVE
from torch_dpsco.errors import (
    AdjacencyError,
    PrivacyError,
    SequenceError,
    UnitError,
    UnknownSamplerError,
    outside,
    warn,
)
from torch_dpsco.rows import retire_forwards
from torch_dpsco.rows.batch import GradBatch
from torch_dpsco.rows.forwards import ONE_MODULE
from torch_dpsco.sampling import (
    AssignedSampler,
    Chunk,
    DesignSampler,
    DrawLog,
    OnePassSampler,
    Partition,
    PrivateLoader,
    RankAssignedSampler,
    RecordIds,
    Slots,
    adapt,
    early_partition,
    fingerprint,
    partition_name,
    records_of,
    user_ids,
)
from torch_dpsco.sampling.loader import source_of
from torch_dpsco.sampling.one_pass import AssignedPartsSampler, PartsSampler
from torch_dpsco.step import checks
from torch_dpsco.step.checks import World, world_size
from torch_dpsco.step.run import Run

OTHER_RECORDS = (
    "dataset must hold the records of the run, unchanged and in their order (got others): they were"
    " cut into parts once, and a record that is moved could be used in two of them; a data set whose"
    " records are read differently each time (random augmentation) cannot be resumed"
)
_SEVERAL = (
    "several backward passes per step need a declared sampling, since a record could be in two of"
    " them: give n= or sampling= to the plan (design= to a PrivateOptimizer) and use"
    f" optimizer.loader(dataset); {ONE_MODULE}"
)


class LogicalBatch:
    """The logical batch that is being collected.

    Args:
        design: how batches are drawn; if that is undeclared, its batch_size is the most that a step may use.
        params: of the optimizer.
        in_order: whether a run has one partition, and step k uses its draw k.
    """

    def __init__(
        self, design: Design, params: Sequence[nn.Parameter] = (), *, in_order: bool = False
    ) -> None:
        self._params = params
        self._in_order = in_order
        self.design = design
        self.declared = not isinstance(design, Undeclared)
        self.opened = False
        self._log = DrawLog()
        self._sampler: OnePassSampler | None = None
        self._resumed: Partition | None = None
        self._loader: Any = None  # that of the sampler
        self._made = 0  # draws of its partition that steps have used
        self.seen = 0  # rows of the chunk, with its filling
        self._draw_rows = 0  # rows seen of the draw

    def bind(
        self, loader: Any, on_restart: Callable[[], None], progress: Any, planned: int | None
    ) -> bool:
        """Takes draws from a loader of this design, and from no other loader any more.

        Returns whether it is the first one of a partition that is older.

        Args:
            loader: it.
            on_restart: called when an iteration over it begins.
            progress: of the run, whose `steps` an iteration ends with where they reach the planned number.
            planned: that number; None for no end.

        Raises:
            UnknownSamplerError: a foreign sampler.
            AdjacencyError: the loader draws by another design.
            SequenceError: the loader runs ahead of the steps; or a draw is outstanding, or was given up and cannot come
                again.
        """
        design = identify(loader)
        if design != self.design:
            raise AdjacencyError(
                f"loader must draw by {self.design}, this optimizer's design (got {design})"
            )
        if not isinstance(loader, PrivateLoader) and getattr(loader, "num_workers", 0) != 0:
            # PRIVACY: nobody could see whether a step uses the batch that was delivered, or one that was chosen
            # (test_a_foreign_loader_with_workers_is_refused)
            raise SequenceError(
                "loader must not run ahead of the steps: use optimizer.loader(dataset,"
                " num_workers=..., physical_batch_size=...), or num_workers=0"
            )
        if isinstance(loader, DataLoader):
            adapt(loader)
        sampler = getattr(loader, "batch_sampler", None) or loader
        one_pass = isinstance(sampler, OnePassSampler)
        early = self._resumed if self._resumed and self._resumed.size is None else None
        if early and one_pass and sampler.partition.key == early.key:
            self._resumed = sampler.partition
        if design.secret:
            self._require_secret(sampler)
        if one_pass:
            self._require_own_pass(sampler, loader)
        sampler.log.dataset = source_of(getattr(loader, "dataset", None))
        self._take(sampler.log)
        if one_pass:
            self._sampler = sampler
            self._made = sampler.so_far.made
            self._loader = loader
        self._log.on_restart = on_restart
        self._log.progress = progress
        self._log.planned = math.inf if planned is None else planned
        self._log.on_delivery = lambda chunk: retire_forwards(
            self._params, None if chunk.slots is None else chunk.size
        )
        self._draw_rows = 0
        self.opened = False
        return early is not None

    def _require_secret(self, sampler: Any) -> None:
        """Raises UnknownSamplerError unless the draws of an assigned design are fresh, or those of this run."""
        own = type(sampler) in (AssignedSampler, AssignedPartsSampler, PartsSampler) and (
            not sampler.resumed
            or partition_name(self.design, sampler.partition) == self.partition_name
        )
        # the key of ranks is drawn by `distributed`, which admits no other samplers in a run of several processes
        if not own and type(sampler) is not RankAssignedSampler:
            # PRIVACY: who knows the draws knows where a record is (test_draws_that_may_be_known_are_not_amplified)
            raise UnknownSamplerError(
                "loader must draw by itself who is in which batch, by fresh bits (got"
                f" {type(sampler).__name__}): use optimizer.loader(dataset), or Assigned(...,"
                " amplification=False)"
            )

    def _require_own_pass(self, sampler: OnePassSampler, loader: Any) -> None:
        if sampler is self._sampler:
            if source_of(getattr(loader, "dataset", None)) is not source_of(
                getattr(self._loader, "dataset", None)
            ):
                # PRIVACY: a record at another place is used twice (test_one_sampler_of_passes_delivers_one_data_set)
                raise SequenceError(
                    "dataset must be the one that it draws from already, the same object, for a"
                    " sampler of passes: use optimizer.loader(dataset), once"
                )
            return
        partition = sampler.so_far
        if self._log.again is not None and not self._comes_again(partition):
            # PRIVACY: another partition instead is one that was chosen
            # (test_a_draw_that_was_given_up_is_of_no_other_partition)
            raise SequenceError(
                "a draw was given up and is the next one again: use loader(dataset, resume=True)"
            )
        saved = self.partition
        kept = saved is not None and bool(saved.key) and self._in_order
        if kept and partition_name(self.design, partition) != self.partition_name:
            # PRIVACY: a run that is resumed from the checkpoint would cut its records anew
            # (test_a_run_keeps_the_cut_that_a_checkpoint_holds)
            raise SequenceError(
                "loader must draw by the cut that a checkpoint of this run holds: use"
                " optimizer.loader(dataset, resume=True)"
            )
        if self._in_order and partition.made != self._made:
            raise SequenceError(
                f"loader must go on with draw {self._made} of the run (got one at draw"
                f" {partition.made}): use optimizer.loader(dataset, resume=True)"
            )
        self._require_same_records(partition, loader)

    def _comes_again(self, partition: Partition) -> bool:
        """Whether a draw was given up with which the partition continues."""
        again = self._log.again
        place = partition_name(self.design, partition), partition.made
        return again is not None and (again[0].partition, again[0].index) == place

    def _take(self, log: DrawLog) -> None:
        log.succeed(self._log)
        if isinstance(log.owner, LogicalBatch) and log.owner is not self:
            # PRIVACY: an optimizer could use up the draws that another one does not like
            # (test_a_loader_has_one_optimizer)
            log.owner._log = DrawLog()
        log.owner = self
        self._log = log

    def split(self, *, more: bool) -> None:
        """Takes the next batch for a part of a draw, see `DrawLog.split`."""
        if not self.declared:
            raise SequenceError(_SEVERAL)
        self._log.split(more=more)

    @property
    def due(self) -> Chunk | None:
        """The chunk that comes next; None if there is none."""
        waiting = self._log.waiting
        return self._log.taken or (waiting[0] if waiting else None)

    def current(self) -> Chunk:
        """Returns the chunk in progress, or takes the next one; raises SequenceError if none is outstanding."""
        if self._log.taken is None:
            if not self.declared:
                return Chunk(Draw(0), 0, 0, last=True)
            self.seen = 0
            return self._log.take()
        return self._log.taken

    def admit(
        self, rows: GradBatch | None, users: Tensor | None, *, partial: bool
    ) -> tuple[Tensor | slice | None, Tensor | None]:
        """Checks rows against the current chunk.

        Args:
            rows: of the step, with the filling; None if there are none.
            users: of the rows, as given to the step.
            partial: whether more rows of the chunk follow.

        Returns:
            Which of them are records and no filling, None for all of them; and the users of the records as the loader
            knows them, or as given without a declared sampling.

        Raises:
            SequenceError: more rows than were drawn, or more than one backward without a declared sampling.
            UnitError: other ids than delivered are given; or the loader drew no users, and ids are given.
        """
        count = 0 if rows is None else len(rows)
        if not self.declared:
            self._require_one(count, 0 if rows is None else rows.passes, partial)
            return None, users
        taken = self._log.taken
        assert taken is not None
        first = self.seen
        whole = count == taken.size and not first
        kept = taken.slots if whole else taken.records(first, count)
        self.seen += count
        if kept is None:
            self._draw_rows += count
        else:
            self._draw_rows += kept.stop if isinstance(kept, slice) else len(kept)
        if self.seen > taken.size or self._draw_rows > taken.draw.size:
            # PRIVACY: rows from elsewhere could hold a record twice (test_more_rows_than_drawn_are_refused,
            # test_more_rows_than_a_part_of_a_draw_has_are_refused)
            raise SequenceError(
                "a step must use at most the rows of one draw, and got more: use only batches of"
                f" this optimizer's loader, one backward for each; {ONE_MODULE}"
            )
        if taken.users is None and users is None:
            return kept, None
        known = self._known_users(taken, first, users)
        return kept, known if kept is None or known is None else known[kept]

    def _require_one(self, rows: int, passes: int, partial: bool) -> None:
        """Raises SequenceError for more than one backward, or batch, where no sampling was declared."""
        if partial or passes > 1:
            raise SequenceError(_SEVERAL)
        if rows > self.design.batch_size:
            # PRIVACY: e.g. a model that folds time into the batch has several rows per record
            # (test_more_rows_than_a_batch_has_are_refused_without_a_declared_sampling)
            raise SequenceError(
                f"a step must use at most batch_size={self.design.batch_size} rows, and got"
                f" more; {ONE_MODULE}"
            )

    def _known_users(self, taken: Chunk, first: int, given: Tensor | None) -> Tensor | None:
        """Returns the users of the rows from the first on, which must be those that are given, if some are."""
        known = None if taken.users is None else taken.users[first : self.seen]
        # the filling of an empty draw needs no rows
        nothing = first == self.seen and not taken.rows
        other = given is not None and (known is None or not torch.equal(given.cpu(), known))
        if other and not nothing:
            # PRIVACY: rows under invented ids count once each (test_ids_that_were_not_delivered_are_refused)
            raise UnitError(
                "users must be the ids that the loader delivered with the batch, in its order:"
                " step(users=ids), or leave users away"
            )
        return known

    def close(self, chunk: Chunk) -> Draw | None:
        """Ends a chunk; returns its draw if that is complete (until `finish` it is still in progress), else None."""
        if self.declared and chunk.slots is not None and self.seen not in (0, chunk.size):
            # PRIVACY: a row more or less before them would put the filling in the place of records
            # (test_fewer_rows_than_were_delivered_are_refused)
            raise SequenceError(
                "a step must use all rows of a batch in their order, filling included: run the"
                " model on the batch as it was delivered"
            )
        if chunk.last:
            if self.declared and self._draw_rows != chunk.draw.size:
                # PRIVACY: fewer rows than records are rows of several records each, e.g. of times
                # (test_fewer_rows_than_drawn_are_refused)
                raise SequenceError(
                    "a step must use one row per record of its draw, and got fewer: run the model"
                    " on all of them with the batch where dp.attach(model, batch_first=...) says;"
                    " to leave a record out, multiply its loss by 0"
                )
            return chunk.draw
        self._log.taken = None
        self.seen = 0
        return None

    @property
    def partition(self) -> Partition | None:
        """The partition of a one-pass design, and how much of it is used; None before the first draw."""
        known = self._resumed if self._sampler is None else self._sampler.partition
        return None if known is None else replace(known, made=self._made)

    def cut(self) -> None:
        """Draws the partition of a run that has none, so that a checkpoint made before the first loader holds it."""
        drawn = early_partition(self.design) if self.partition is None else None
        if drawn is not None:
            self.resume(drawn)

    def sealed(self) -> Partition | None:
        """Returns the partition with a fingerprint of its records, all of which are read the first time."""
        known = self.partition
        if known is not None and not known.tag and self._sampler is not None:
            key = known.key or secrets.token_hex(16)
            self._sampler.partition = replace(
                self._sampler.partition, key=key, tag=_tag(key, self._loader)
            )
        return self.partition

    @staticmethod
    def _require_same_records(partition: Partition, loader: Any) -> None:
        if partition.tag and _tag(partition.key, loader) != partition.tag:
            # PRIVACY: a record at another place is used twice (test_a_partition_goes_on_with_its_own_records_only)
            raise PrivacyError(OTHER_RECORDS)

    @property
    def partition_name(self) -> str:
        """By which the ledger knows it; "planned" before the first draw."""
        known = self.partition
        return "planned" if known is None else partition_name(self.design, known)

    def resume(self, partition: Partition) -> None:
        """Takes over the partition of a checkpoint, or of a copy; a loader or a draw of another place is left."""
        self._log.give_up()
        if not self._comes_again(partition):
            log = DrawLog(self._log.size)
            log.own = self._log.own
            self._take(log)
            log.use_up()
        self._sampler = None
        self._resumed = partition
        self._made = partition.made

    def finish(self, *, used: bool = False) -> None:
        """Ends the logical batch; `used`: its release is made."""
        if used:
            self._log.use_up()
            self._made = self._log.made
        self._log.taken = None
        self.seen = 0
        self._draw_rows = 0
        self.opened = False

    def drop(self) -> None:
        """Gives the draw in progress up: the next iteration of a loader delivers it again."""
        self._log.give_up()
        self.finish()


def _tag(key: str, loader: Any) -> str:
    ids = getattr(getattr(loader, "batch_sampler", None), "ids", None)
    if ids is not None:
        contents = ids.contents(loader.dataset)
    elif isinstance(loader, PrivateLoader):
        contents = loader.contents()
    else:
        contents = records_of(loader.dataset)
    return fingerprint(key, contents)


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
            f"record_ids must not be given with users, who are drawn (got a {type(ids).__name__})"
        )
    named: Any = None if ids is None else RecordIds(ids, records)
    owners = None if users is None else user_ids(users, records)
    held = records if owners is None else len(owners.unique())
    if owners is not None and shard is not None and world_size() > 1:
        named = RecordIds(users, records)
    own = {"shard": shard, "ids": named}
    problem = checks.problem_of_shard(shard, held, run.adjacency, run.oracle.unit)
    numbered = 0 if owners is None or not len(owners) else int(owners.max()) + 1
    if numbered:
        problem = problem or checks.problem_of_users(numbered, run.design, run.adjacency)
    size = world.compare_data(
        dataset,
        steps,
        own=", ".join(name for name, given in own.items() if given is not None),
        counted=run.adjacency != ADD_REMOVE and owners is None,
        problem=problem,
    )
    if owners is None:
        return Drawn(size, None, named, shard, held)
    counted = run.adjacency == ADD_REMOVE and numbered
    return Drawn(
        counted or run.design.n, owners, named, None if world_size() == 1 else shard, held
    )


def make_slots(
    run: Run,
    sampler: DesignSampler,
    *,
    isolation: str | None,
    most: int | None,
    records: int | None,
    dim: int,
) -> Slots | None:
    """Returns where rows stand in blocks of fixed size, None where they need not or must not be filled up.

    Args:
        run: it.
        sampler: of the loader.
        isolation: one of `LEVELS`; None for where batches must be filled up.
        most: rows of a physical batch.
        records: most records of this process, where each has its own.
        dim: number of parameters.
    """
    # PRIVACY: neighbors draw batches of different sizes, or it shows who was drawn
    # (test_a_record_more_moves_the_sum_of_a_kinked_net_by_one_clip)
    if not run.sizes_are_private if isolation is None else isolation == "none":
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

    Phases, and passes that are charged as a whole, have one for the whole run. So has a run before its first step, of
    which a checkpoint was made.
    """
    known = batch.partition
    saved = known is not None and bool(known.key) and not known.made
    # PRIVACY: draws that are made again, by the noise of a charge that has paid for others
    # (test_a_pass_is_not_begun_again)
    kept = run.in_order if made else saved
    return batch.sealed() if resume or kept else None


GRAD_SCALE = "grad_scale"  # the attribute by which GradScaler hands over its scale


def show_zero_gradient(params: Sequence[nn.Parameter]) -> None:
    """Puts zeros into the `grad` of the smallest parameter, for a check for infinities to look at."""
    # PRIVACY: never a gradient of records (test_a_record_that_overflows_does_not_move_the_scale)
    smallest = min(params, key=torch.numel)
    smallest.grad = torch.zeros_like(smallest)


def take_scale(optimizer: Any) -> float:
    """Returns the scale that a GradScaler has set for this step.

    Raises:
        SequenceError: `unscale_` was called before: it cannot reach rows, and the scaler now believes them unscaled.
        ValueError: a scale so far from 1 that rows would lose their accuracy.
    """
    given = optimizer.__dict__[GRAD_SCALE]
    if given is None:
        del optimizer.__dict__[GRAD_SCALE]  # GradScaler would multiply by it
        raise SequenceError(
            "scaler.unscale_(optimizer) must not be called: step() unscales each row before it"
            " clips; call scaler.step(optimizer) right after backward"
        )
    scale = float(given)
    # GradScaler multiplies by what is left here when a step raises
    setattr(optimizer, GRAD_SCALE, torch.ones_like(given))
    if not 2.0**-40 <= check.positive(grad_scale=scale) <= 2.0**40:
        raise ValueError(
            f"grad_scale must be between 2^-40 and 2^40 (got {scale:g}): give GradScaler"
            " init_scale=1024"
        )
    return scale


def tell_of_scale(optimizer: Any, known: float, scale: float) -> None:
    """Warns once of a gradient scale that is another one than in the step before."""
    if not optimizer._told_of_scale:
        optimizer._told_of_scale = True
        warn(
            f"the gradient scale has changed from {known:g} to {scale:g}; overflow is private and"
            " never reported to the scaler, so that it only grows: keep it constant by"
            " GradScaler(init_scale=..., growth_interval=10**9)",
            stacklevel=outside(),
        )
