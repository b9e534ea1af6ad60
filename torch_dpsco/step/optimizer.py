"""An optimizer that holds a run: its parts, its batches, what is public of it, and its checkpoints.

`PrivateOptimizer` adds the step.

How a run gets its batches: a loader of its design, over records or users, in one process or several.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from torch_dpsco import _validate as check
from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.accounting.analysis.rounding import asks_exact
from torch_dpsco.accounting.designs import Assigned, Design
from torch_dpsco.accounting.events import ADD_REMOVE, Adjacency, Event, Gaussian, NonPrivate
from torch_dpsco.accounting.report import Run as PublicRun
from torch_dpsco.accounting.statement import Statement
from torch_dpsco.errors import SequenceError, UnitError
from torch_dpsco.noise import noise_generator
from torch_dpsco.problem import Schedule
from torch_dpsco.prox import Prox
from torch_dpsco.rows import (
    attachments,
    clear_rows,
    forget_wrappers,
)
from torch_dpsco.rows.batch import GradBatch, note_owner
from torch_dpsco.rules import UpdateRule
from torch_dpsco.sampling import (
    DesignSampler,
    Partition,
    PrivateLoader,
    RecordIds,
    Slots,
    UserLoader,
    user_ids,
)
from torch_dpsco.sampling.loader import LEVELS, Isolation
from torch_dpsco.step import checks
from torch_dpsco.step.batch import LogicalBatch
from torch_dpsco.step.checkpoint import (
    add_private_state,
    go_on_behind,
    of_a_start,
    private_state,
    require_charged,
    restore,
    restore_averages,
    split_private_state,
    tell_of_lost,
    unpacked,
)
from torch_dpsco.step.distributed import World, join, world_size
from torch_dpsco.step.oracle import MeanOracle
from torch_dpsco.step.run import (
    CommonOptimizer,
    Progress,
    Run,
    in_turn,
    make_run,
    new_run,
    part,
    refuse_copy,
    refuse_load,
    require_room,
)


class RunOptimizer(CommonOptimizer):
    """Holds a run; `PrivateOptimizer`, which adds the step, has the arguments."""

    oracle: MeanOracle = part("oracle")
    rule: UpdateRule = part("rule")
    design: Design = part("design")
    schedule: Schedule = part("schedule")
    prox: Prox = part("prox")
    reg: float = part("reg")
    adjacency: Adjacency = part("adjacency")
    accountant: Accountant = part("accountant")

    def __init__(
        self,
        params: Any,
        lr: float,
        *,
        oracle: MeanOracle,
        rule: UpdateRule,
        design: Design,
        schedule: Schedule | None = None,
        prox: Prox | None = None,
        reg: float = 0.0,
        accountant: Accountant | None = None,
        adjacency: Adjacency | None = None,
        generator: torch.Generator | None = None,
        secure: str | None = None,
    ) -> None:
        super().__init__(params, {"lr": check.positive(lr=lr)})
        self._params: list[nn.Parameter] = [p for g in self.param_groups for p in g["params"]]
        for group in self.param_groups:
            check.positive(lr=group["lr"])
        device = checks.one_device(self._params)
        rule.check_groups(self.param_groups)
        if asks_exact(secure):
            oracle.use_exact_noise()
        self._run = make_run(
            oracle=oracle,
            rule=rule,
            design=design,
            schedule=schedule,
            prox=prox,
            reg=reg,
            accountant=accountant,
            adjacency=adjacency,
            secure=secure,
            is_planned=getattr(self, "_plan", None) is not None,
        )
        self._progress = Progress()
        self._noise = noise_generator(device, generator)
        self._seeded = generator is not None
        self._batch = LogicalBatch(design, self._params, in_order=self._run.in_order)
        self._isolation = Isolation()
        self._shown = False  # whether `released` runs
        self._in_public = False  # whether `dp.public` runs
        self._given: GradBatch | None = (
            None  # rows of the next step that no backward has recorded
        )
        self._grad_scale: float | None = None
        self._told_of_scale = False
        self._checks: Mapping[str, str] = dict.fromkeys(
            ("model", "loss"), "not checked, no model is attached"
        )
        self._lrs: list[float] | None = None  # those of a utility theorem, until they change
        require_room(self._run, self.ahead() if self._run.planned else self.ahead(1))
        self._start(device)

    def _start(self, device: torch.device) -> None:
        """Begins in the feasible set, takes the oracle, and joins the other processes."""
        params = self._trained()
        self.prox.apply_(
            [p.detach().clone() for p in params], checks.step_sizes(self.param_groups)
        )
        self.prox.apply_(params, [0.0] * len(params))
        self.oracle.take()
        forget_wrappers(self._params)
        self._world = join(device)
        self._world.begin(self)
        if not self.adaptive:
            endless = self._run.planned is None
            self.accountant.declare(*((self.ahead(1), None) if endless else (self.ahead(), 1)))
        note_owner(self._params, self)

    # -- batches ------------------------------------------------------------------------------------------------------

    def loader(
        self,
        dataset: Dataset[Any],
        users: Any = None,
        *,
        ids: Any = None,
        shard: int | None = None,
        steps: int | None = None,
        resume: bool = False,
        physical_batch_size: int | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
        isolation: str | None = None,
    ) -> PrivateLoader:
        """Returns a loader that draws batches of `dataset` by this optimizer's design.

        Args:
            dataset: map-style data set; tensors in memory (TensorDataset) are gathered fastest. Or a stream, as
                `sampling.Spilled`.
            users: where users are protected, and only there, the id of the user of each record: users are drawn, and
                all their rows are delivered with their ids. Integers in [0, n_users), or strings (and other things that
                hash), which are numbered in order of appearance. Under replace_one and zero_out n_users is the public
                universe, and users without a record are legal; under add_remove users are numbered without gaps.
            ids: for passes of random allocation, a unique id per record (integers, strings or bytes): a record picks
                its batches by a keyed hash of it, so that the order of records may change, and each of several
                processes may have records of its own. With `shard`, in every design: an id on two ranks is refused.
            shard: where each of several processes has records of its own, that no other one has: how many this one has
                at most, a public number (n, if none is known), by which its batches are filled up. Which process has a
                record must not depend on its values. Where users are protected, how many users: each process has all
                records of its own users, and a user (an integer, a string or bytes) on two of them is refused.
            steps: draws per iteration; default one epoch, or all that is left of a partition, or of a plan for users.
            resume: for designs of one pass: go on where this run, or its checkpoint, left its partition, instead of
                drawing another one, which composes with the first.
            physical_batch_size: deliver a draw in chunks of at most that many rows, whose number is private; step()
                adds them up. In slots a few rows cost least, see docs/performance.md.
            collate_fn: as in DataLoader.
            num_workers: as in DataLoader.
            pin_memory: as in DataLoader.
            isolation: how a record's row is kept from depending on other records in its last bits, where the number of
                rows drawn is private, as it always is for users, or tells who was drawn, as it does of Poisson batches
                and passes of random allocation: batches are filled up with zeros that no step counts (see
                docs/guarantees.md). "rounded", to the next of several public sizes, as soon as a test of the first step
                has passed, and as "slots" wherever it does not; the default there. "slots", to one public size, which
                assumes less and costs more. "none", not at all.

        Raises:
            UnitError: the data set, or all shards together, do not have the declared number of records although that is
                public; or ids are of another kind, are missing, are out of range, or belong to several records.
            UnknownSamplerError: no sampling was declared; or ids where a pass is not amplified.
            ValueError: records of complex numbers: give `torch.view_as_real(x)`.
        """
        if (users is not None) != (self.oracle.unit == "user"):
            raise UnitError(
                f"users must {'' if users is None else 'not '}be given for {type(self).__name__},"
                f" which protects {self.oracle.unit}s (got"
                f" {check.shown(users if users is None else type(users))})"
            )
        run = self._run
        drawn = who_is_drawn(run, self._world, dataset, users, ids, shard, steps)
        checks.require_universe(run.design, run.adjacency, drawn.size)
        partition = continued(run, self._batch, self.steps, resume=resume)
        steps = draws_left(run, self.steps, steps, partition, of_users=users is not None)
        own = drawn.shard is not None
        sampler = self._world.sampler(
            self, drawn.held if own else drawn.size, steps, partition, drawn.named, shard=own
        )
        check.choice((None, *LEVELS), isolation=isolation)
        slots = make_slots(
            run,
            sampler,
            isolation=isolation,
            most=physical_batch_size,
            records=drawn.shard,
            dim=sum(p.numel() for p in self._trained()),
        )
        owners: Any = drawn.owners
        kind = PrivateLoader if owners is None else partial(UserLoader, users=owners)
        loader = kind(
            dataset,
            sampler,
            physical_batch_size=physical_batch_size,
            collate_fn=collate_fn,
            num_workers=num_workers,
            pin_memory=pin_memory,
            slots=slots,
            rounded=slots is not None and isolation != "slots",
        )
        self.bind(loader)
        return loader

    @property
    def sizes_are_private(self) -> bool:
        """Whether nobody's row may depend on the number of rows of a draw."""
        return self._run.sizes_are_private

    def bind(self, loader: Any) -> Any:
        """Takes batches from a loader that draws by a sampler of torch_dpsco, and returns the loader.

        A DataLoader's collate function is wrapped, so that empty draws give batches without rows.

        Raises:
            UnknownSamplerError: a foreign sampler.
            AdjacencyError: the sampler's design is not this optimizer's.
        """
        if isinstance(loader, UserLoader) != (self.oracle.unit == "user"):
            # PRIVACY: rows sampled one by one are not users who are
            # (test_only_loaders_of_users_are_bound_to_an_optimizer_that_protects_users)
            raise UnitError(
                f"loader must draw {self.oracle.unit}s, whom this optimizer protects (got"
                f" {type(loader).__name__}): use optimizer.loader"
            )
        self._world.require_own_draws(loader)
        self._batch.bind(loader, self.discard)
        own = isinstance(loader, PrivateLoader)
        self._isolation = loader.isolation if own else Isolation()
        self._isolation.private = self.sizes_are_private
        for attachment in attachments(self._params):
            attachment.isolation = self._isolation
            attachment.get_ready(None)
        if self._isolation.open:
            self._settle_isolation(known=True)
        return loader

    def _settle_isolation(self, *, known: bool = False) -> None:
        """Tests after a first step whether draws may come in batches of several sizes; `known`: takes what is known."""
        models = attachments(self._params)
        slots = self._isolation.slots
        assert slots is not None
        if len(models) == 1:
            models[0].isolation = self._isolation
            delivered = self._isolation.delivered
            found = models[0].sizes(slots.usual, slots.most, delivered, known=known)
            if found is not None:
                self._isolation.settle(found)
        elif not known:
            self._isolation.settle("it is not one attached model that is trained")

    def signal_skip_step(self, do_skip: bool = True) -> None:
        """Takes the next batch for a part of a draw; Opacus' BatchMemoryManager calls this before each part.

        Args:
            do_skip: whether more parts of the same draw follow, so that the next `step()` only adds rows.

        Raises:
            SequenceError: no draw is outstanding, the part before was not used, or the loader has workers (then use
                `loader(dataset, physical_batch_size=..., num_workers=...)`).
        """
        self._batch.split(more=do_skip)
        # PRIVACY: parts are cut by Opacus from what the sampler drew, not from blocks of the loader
        # (test_a_report_on_parts_cut_by_opacus_says_that_they_are_not_filled_up)
        self._isolation = replace(self._isolation, slots=None, tested=None, allowed=False)
        for attachment in attachments(self._params):
            attachment.isolation = self._isolation

    @property
    def run(self) -> str:
        """Random name of the run, by which the ledger knows its releases; a resumed run keeps it."""
        return self._run.payments.run

    @property
    def outstanding_rows(self) -> int | None:
        """Rows of the batch that the next step must use (private); None if there is none."""
        return self._batch.outstanding_rows

    @property
    def ends_draw(self) -> bool:
        """Whether the next step is given the last part of its draw, and so releases (private: it tells of its size)."""
        return self._batch.ends_draw

    @property
    def in_draw(self) -> bool:
        """Whether a part of a draw was added, and the step of the draw is not made (private: it tells of its size)."""
        return self._batch.opened

    def discard(self) -> None:
        """Gives the current logical batch up: rows and oracle sum are dropped, and nothing is charged.

        The next loop over a loader begins with the same draw: a draw cannot be exchanged for another one.
        """
        self._abort()

    def _abort(self) -> None:
        self._clear()
        self._batch.drop()

    def _clear(self) -> None:
        """Forgets all rows, and the oracle's sum of them."""
        clear_rows(self._params)
        for attachment in attachments(self._params):
            attachment.reset()
        self.oracle.discard()

    # -- what is public -----------------------------------------------------------------------------------------------

    @property
    def steps(self) -> int:
        """Steps made, or lost."""
        return self._progress.steps

    @property
    def finalized(self) -> bool:
        """Whether the answer was installed."""
        return self._progress.finalized

    @property
    def halted(self) -> bool:
        """Whether the oracle has answered for the last time in this phase."""
        return self._progress.halted

    @property
    def metrics(self) -> dict[str, float]:
        """Public numbers: steps made, and clip and noise_std of the last one."""
        return {"step": self._progress.steps, **self.oracle.metrics()}

    def report(self, delta: float | None = None) -> Statement:
        """Returns what is guaranteed, in plain words.

        It prints as text; `.markdown()` is a privacy card, `.json()` is for machines. delta defaults to the budget's.
        """
        run = PublicRun(
            type(self).__name__,
            self.design,
            self.oracle.event(),
            self.steps,
            self.schedule.steps,
            self.finalized,
            (*self.oracle.assumptions, str(self._isolation), *self._checked(), *self._moved()),
        )
        known = (
            self.design.one_pass
            or self._run.payments.sharing
            or not isinstance(run.event, (Gaussian, NonPrivate))
        )
        ahead = self.ahead() if known and run.planned else run.ahead()
        return self._statement(run, delta, ahead)

    def note_checks(self, verdicts: Mapping[str, str]) -> None:
        """Lets reports say what is known about records that reach each other, where no attached model does.

        Args:
            verdicts: of "model" and "loss"; later changes of them are seen.
        """
        if self._checks is not verdicts:
            self._checks = verdicts

    def _checked(self) -> Iterator[str]:
        """Yields what is known about records that reach each other, by attached model."""
        found = [attachment.first.verdicts for attachment in attachments(self._params)]
        for verdicts in found or [self._checks]:
            for name, verdict in verdicts.items():
                yield f"Whether records reach each other in the {name}: {verdict}."

    def _moved(self) -> Iterator[str]:
        if self._progress.public:
            yield (
                f"Public steps were made between private ones, in {self._progress.public} blocks of"
                " dp.public: the data that they used are not protected."
            )

    def _require_private(self) -> None:
        if self._in_public:
            raise SequenceError(
                "dp.public is running, where nothing is recorded: make private steps after the"
                " block"
            )

    def ahead(self, steps: int | None = None) -> Event:
        """Returns the event of the next steps, or of all that are planned.

        Args:
            steps: number of steps; default all that are left of the schedule.
        """
        return self._run.ahead(self.steps, steps, self._batch.partition_name)

    @property
    def adaptive(self) -> bool:
        """Whether what a step costs depends on what was released before."""
        return self._run.payments.adaptive

    def settings(self) -> dict[str, Any]:
        """Returns the public constants that fix the mechanism; checkpoints of other ones are refused."""
        return self._run.settings()

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns tensors and primitives (loads with weights_only): no noise stream, no batch in progress.

        CONFIDENTIAL, as it says itself and by its type (`SecretState`), as long as one pass goes on: it keeps who is
        in which part and a keyed fingerprint of the records, for which all of them are read once. So is a run of
        noisy tests: it keeps their thresholds.
        """
        self._require_private()  # the iterates that are kept follow at the end of the block
        private = private_state(self._run, self._progress, self._batch, self._noise)
        return add_private_state(super().state_dict(), self.settings(), private)

    @in_turn
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores a state, ledger included; drops a batch in progress.

        Raises:
            ValueError: the state is of another plan, noise, clip or version; says which settings differ.
            PrivacyError: the state's ledger would forget events charged here.
            SequenceError: the run is charged as a whole and goes on by `resume` only.
        """
        public, private = split_private_state(state_dict, self.settings())
        sharing = self._run.payments.sharing
        require_charged(private, shared=bool(sharing))
        if private["t"] and not private["finalized"]:
            refuse_load(sharing)
        self.discard()
        self.accountant.load_state_dict(private["ledger"])
        if not private["t"] and not self.steps:
            private = of_a_start(self._run, private)
        self._restore(public, private)

    def _restore(self, public: dict[str, Any], private: dict[str, Any]) -> None:
        super().load_state_dict(public)
        restore_averages(self.state, public, self._params)
        restore(self._run, self._progress, self._batch, private, self.param_groups)

    @in_turn
    def resume(self, state_dict: dict[str, Any]) -> int:
        """Goes on with an interrupted run, on a new optimizer whose accountant has the run's ledger file.

        Load the model's state before: it holds the point of the next step. Steps that were charged after the
        checkpoint are not made again, since they may have been released: they are lost, and a warning counts them.

        Args:
            state_dict: of the run's last checkpoint.

        Returns:
            The number of steps that were lost.

        Raises:
            ValueError: the state is of another plan, noise, clip or version; says which settings differ.
            SequenceError: the optimizer has made steps.
            PrivacyError: the ledger file is missing, of another ledger, or older than the checkpoint.
        """
        public, private, marked = unpacked(self, self.settings(), state_dict)
        payments = self._run.payments
        require_charged(private, shared=bool(payments.sharing))
        if payments.sharing and "paid" not in private:
            raise ValueError(
                "state_dict must be as it was written (got one without what was paid for)"
            )
        self.discard()
        self._restore(public, private)
        go_on_behind(self._batch, marked)
        made = self.steps
        lost = 0 if self.finalized else max(0, marked.get(self.run, made) - made)
        if lost:
            payments.require_losable(lost)
        with torch.no_grad():
            for _ in range(lost):
                # PRIVACY: a test that has failed answers no more (test_a_halt_that_the_checkpoint_missed_is_kept)
                self._count_lost(halted=payments.halt_mark(self.steps) in marked)
        tell_of_lost(lost, made)
        if self.steps == self._run.planned:
            self.finalize()
        return lost

    def __copy__(self) -> RunOptimizer:
        raise SequenceError(
            "copies must have parts of their own: use copy.deepcopy((model, optimizer))"
        )

    def __getstate__(self) -> dict[str, Any]:
        self._require_private()
        if not self.finalized:
            refuse_copy(self._run.payments.sharing)
        # PRIVACY: a copy draws noise of its own; a shared stream could be subtracted (test_copies_draw_fresh_noise)
        # a scheduler's wrapper of `step` is bound to the original, which the copy must not step
        left_out = ("_noise", "_batch", "_world", "step")
        kept = {key: value for key, value in self.__dict__.items() if key not in left_out}
        # PRIVACY: with the fingerprint of its records (test_a_copy_goes_on_with_the_records_of_its_run_only)
        return {**kept, "_partition": self._batch.sealed()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        partition = state.pop("_partition", None)
        super().__setstate__(state)
        if "_run" not in state:  # torch's load_state_dict passes state and groups through here
            return
        device = checks.one_device(self._params)
        self._noise = noise_generator(device)
        self._seeded = False
        self._batch = LogicalBatch(self.design, self._params, in_order=self._run.in_order)
        self._world = join(device)
        if partition is not None:
            self._batch.resume(partition)
        self.oracle.discard()
        # PRIVACY: a copy has releases of its own (test_a_copy_is_another_run_in_the_ledger)
        self._run.payments.run = new_run()
        self._progress.since = self.steps
        note_owner(self._params, self)

    # -- what the step adds -------------------------------------------------------------------------------------------

    @abstractmethod
    def _trained(self) -> list[nn.Parameter]:
        """Returns the parameters that are not frozen."""

    @abstractmethod
    def _count_lost(self, *, halted: bool) -> None:
        """Counts the next step, which was charged, as one whose release is lost."""


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
