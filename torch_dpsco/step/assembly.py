"""The parts of a private optimizer, checked and fixed at construction, and how it gets its batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from torch_dpsco import _validate as check
from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.accounting.analysis.rounding import asks_exact
from torch_dpsco.accounting.budgets import warn_of_delta
from torch_dpsco.accounting.designs import Assigned, Design, Parts, Poisson, Undeclared
from torch_dpsco.accounting.events import ADD_REMOVE, Adjacency, Event, Gaussian, NonPrivate
from torch_dpsco.accounting.report.figures import Run
from torch_dpsco.accounting.report.statement import Statement
from torch_dpsco.distributed import join, world_size
from torch_dpsco.errors import SequenceError, UnitError
from torch_dpsco.prox import Identity, Prox
from torch_dpsco.rng import noise_generator
from torch_dpsco.rows import clear_rows, forget_wrappers, retire_forwards
from torch_dpsco.rows.plain_steps import note_owner
from torch_dpsco.rules import UpdateRule
from torch_dpsco.sampling import (
    Chunk,
    DesignSampler,
    Isolation,
    Partition,
    PrivateLoader,
    RecordIds,
    Slots,
    Streamed,
    UserLoader,
    user_ids,
)
from torch_dpsco.schedule import Schedule
from torch_dpsco.step import checks
from torch_dpsco.step.batch import LogicalBatch
from torch_dpsco.step.common import CommonOptimizer
from torch_dpsco.step.oracle import MeanOracle
from torch_dpsco.step.payments import Payments, planned_event


class Assembly(CommonOptimizer):
    """The parts of a private optimizer and its batches; `PrivateOptimizer`, which adds the step, has the arguments."""

    _fixed = frozenset(
        {"oracle", "rule", "design", "schedule", "prox", "reg", "adjacency", "accountant"}
    )

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
        for group in self.param_groups:
            check.positive(lr=group["lr"])
        device = checks.one_device(self._all_params())
        rule.check_groups(self.param_groups)
        if asks_exact(secure):
            oracle.use_exact_noise()
        self._secure = secure
        self.oracle = oracle
        self.rule = rule
        self.design = design
        self.schedule = schedule or Schedule()
        self._planned = self.schedule.steps
        rule.check_schedule(self.schedule)
        self.prox = prox or Identity()
        self.reg = check.nonnegative(reg=reg)
        self.adjacency = checks.agreed_adjacency(adjacency, accountant, design)
        if (
            accountant is None
        ):  # not "if accountant": an empty one has length 0 and would count as false
            accountant = Accountant(adjacency=self.adjacency, unit=oracle.unit)
        self.accountant = accountant
        self.accountant.require_unit(oracle.unit)
        if getattr(self, "_plan", None) is None and not isinstance(
            design, Undeclared
        ):  # a plan has said it
            warn_of_delta(accountant.budget, design.n, stacklevel=4)
        checks.require_same_parts(oracle, design, self.schedule)
        self._payments = Payments(oracle, design, accountant, self._planned)
        if self._payments.adaptive:
            self.accountant.require_adaptive()
        self._noise = noise_generator(device, generator)
        self._seeded = generator is not None
        self._steps = 0
        self._halted = False
        self._finalized = False
        self._shown = False
        self._in_public, self._public = (
            False,
            0,
        )  # whether `dp.public` runs, and how often it moved the parameters
        self._since = 0  # step from which the run has its name
        self._stills = 0  # releases of this phase that were no means
        self._in_order = isinstance(design, Parts) or self._payments.in_passes
        self._constrains = not isinstance(self.prox, Identity)
        self._batch = LogicalBatch(self.design, in_order=self._in_order)
        self._isolation = Isolation()
        self._grad_scale: float | None = None
        self._told_of_scale = False
        self._checks: Mapping[str, str] = dict.fromkeys(
            ("model", "loss"), "not checked, no model is attached"
        )
        self._lrs: list[float] | None = None  # those of a utility theorem, until they change
        checks.require_one_step(
            self.accountant, self.adjacency, planned_event(oracle, design, 0, 1)
        )
        if (
            isinstance(design, Parts) and not self._payments.adaptive
        ):  # a later phase may cost more than the first
            checks.require_one_step(
                self.accountant, self.adjacency, self.ahead(), "the planned phases"
            )
        self.prox.apply_(
            [p.detach().clone() for p in self._trained()], checks.step_sizes(self.param_groups)
        )
        self.prox.apply_(self._trained(), [0.0] * len(self._trained()))  # start in the feasible set
        oracle.take()
        forget_wrappers(self._all_params())
        self._world = join(device)
        self._world.begin(self)
        if not self._payments.adaptive:
            self.accountant.expect(
                *((self.ahead(1), None) if self._planned is None else (self.ahead(), 1))
            )
        note_owner(self._all_params(), self)

    def __copy__(self) -> Assembly:
        raise SequenceError(
            "copies must have parts of their own: use copy.deepcopy((model, optimizer))"
        )

    def _all_params(self) -> list[nn.Parameter]:
        return [p for group in self.param_groups for p in group["params"]]

    def _trained(self) -> list[nn.Parameter]:
        return [p for group in self.param_groups for p in group["params"] if p.requires_grad]

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
        padding: bool | None = None,
    ) -> PrivateLoader:
        """Returns a loader that draws batches of `dataset` by this optimizer's design.

        Args:
            dataset: map-style data set; tensors in memory (TensorDataset) are gathered fastest. Or a stream, as
                `sampling.Spilled` or `sampling.Streamed`.
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
                adds them up.
            collate_fn: as in DataLoader.
            num_workers: as in DataLoader.
            pin_memory: as in DataLoader.
            padding: whether all batches have the same public number of rows, those that are no records being zeros
                that no step counts: then a record's row depends on no other record, not in its last bits either (see
                docs/guarantees.md). Default: where the number of rows drawn is private, as it always is for users, or
                tells who was drawn, as it does of Poisson batches and passes of random allocation.

        Raises:
            UnitError: the data set, or all shards together, do not have the declared number of records although that is
                public; or ids are of another kind, are missing, are out of range, or belong to several records.
            UnknownSamplerError: no sampling was declared; or ids where a pass is not amplified.
            ValueError: records of complex numbers: give `torch.view_as_real(x)`.
        """
        records = checks.number_of_records(dataset)
        if (users is not None) != (self.oracle.unit == "user"):
            raise UnitError(
                f"users must {'' if users is None else 'not '}be given for {type(self).__name__},"
                f" which protects {self.oracle.unit}s (got"
                f" {check.shown(users if users is None else type(users))})"
            )
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
        size = self._world.compare_data(
            dataset,
            steps,
            own=", ".join(
                name for name, given in (("shard", shard), ("ids", named)) if given is not None
            ),
            counted=self.adjacency != ADD_REMOVE and owners is None,
            problem=checks.problem_of_shard(shard, held, self.adjacency, self.oracle.unit)
            or (
                ""
                if owners is None
                else checks.problem_of_users(owners, self.design, self.adjacency)
            ),
        )
        if owners is not None and world_size() == 1:
            shard = None  # all users are here
        if (
            owners is not None
            and steps is None
            and self.schedule.steps is not None
            and not self.design.one_pass
        ):
            steps = max(1, self.schedule.steps - self._steps)
        size = (
            size if owners is None else checks.number_of_users(owners, self.design, self.adjacency)
        )
        sampler = self._new_sampler(size, steps, resume, named, None if shard is None else held)
        loader = (PrivateLoader if owners is None else partial(UserLoader, users=owners))(
            dataset,
            sampler,
            physical_batch_size=physical_batch_size,
            collate_fn=collate_fn,
            num_workers=num_workers,
            pin_memory=pin_memory,
            slots=self._slots(padding, physical_batch_size, sampler, shard),
        )
        self.bind(loader)
        return loader

    def _slots(
        self,
        padding: bool | None,
        most: int | None,
        sampler: DesignSampler,
        shard: int | None = None,
    ) -> Slots | None:
        """Returns where rows stand in blocks of fixed size, None where they need not or must not be filled up."""
        # PRIVACY: neighbors draw batches of different sizes, or it shows who was drawn
        # (test_a_record_more_moves_the_sum_of_a_kinked_net_by_one_clip)
        if not (
            self.sizes_are_private
            if padding is None
            else check.choice((True, False), padding=padding)
        ):
            return None
        # PRIVACY: where each process has records of its own all may be on one, whose draws must fit as well
        # (test_blocks_of_a_process_with_own_records_have_room_for_a_whole_draw)
        spread = 1 if getattr(sampler, "own", False) else getattr(sampler, "processes", 1)
        return Slots(
            self.design,
            of_users=self.oracle.unit == "user",
            physical_batch_size=most,
            processes=spread,
            records=shard,
            dim=sum(p.numel() for p in self._trained()),
        )

    @property
    def sizes_are_private(self) -> bool:
        """Whether nobody's row may depend on the number of rows of a draw."""
        return sizes_are_private(self.design, self.adjacency, self.oracle.unit)

    def _new_sampler(
        self, size: int, steps: int | None, resume: bool, ids: Any = None, own: int | None = None
    ) -> DesignSampler:
        checks.require_universe(self.design, self.adjacency, size)
        partition = self._batch.sealed() if resume else None
        if self.design.one_pass:
            self._require_continuation(resume, partition)
            if (
                steps is None and self.schedule.steps is not None
            ):  # batches that no step needs are left alone
                left = self.design.steps_per_epoch - (0 if partition is None else partition.made)
                if isinstance(self.design, Assigned):  # a loop over the loader is a pass
                    left = min(left, self.design.batches)
                steps = max(1, min(left, self.schedule.steps - self._steps))
        records = size if own is None else own
        return self._world.sampler(self, records, steps, partition, ids, shard=own is not None)

    def _require_continuation(self, resume: bool, partition: Partition | None) -> None:
        if resume and partition is None and self._steps:
            raise SequenceError(
                "resume must be False: no partition of this run is known that could be continued"
            )
        if not resume and self._in_order and self._steps:
            # PRIVACY: draws that are made again, by the noise of a charge that has paid for others
            # (test_a_pass_is_not_begun_again)
            raise SequenceError(
                "phases, and passes that are charged as a whole, must not start again after"
                f" {self._steps} steps: use optimizer.loader(dataset, resume=True)"
            )

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
        self._batch.bind(loader, self.discard, self._expect)
        own = isinstance(loader, PrivateLoader)
        self._isolation = loader.isolation if own else Isolation()
        self._isolation.private = self.sizes_are_private
        return loader

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
        self._isolation = replace(self._isolation, block=None)

    @property
    def run(self) -> str:
        """Random name of the run, by which the ledger knows its releases; a resumed run keeps it."""
        return self._payments.run

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
        clear_rows(self._all_params())
        for p in self._all_params():
            reset = getattr(p, "dpsco_reset", None)
            if reset is not None:
                reset()
        self.oracle.discard()

    def _expect(self, chunk: Chunk) -> None:
        retire_forwards(self._all_params(), filled=None if chunk.slots is None else chunk.size)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears gradients and per-sample gradients that no step has taken yet."""
        clear_rows(self._all_params())
        if not set_to_none:
            super().zero_grad(set_to_none)

    # -- what is public -----------------------------------------------------------------------------------------------

    @property
    def halted(self) -> bool:
        """Whether the oracle has answered for the last time in this phase."""
        return self._halted

    @property
    def metrics(self) -> dict[str, float]:
        """Public numbers: steps made, and clip and noise_std of the last one."""
        return {"step": self._steps, **self.oracle.metrics()}

    def report(self, delta: float | None = None) -> Statement:
        """Returns what is guaranteed, in plain words.

        It prints as text; `.markdown()` is a privacy card, `.json()` is for machines. delta defaults to the budget's.
        """
        run = Run(
            type(self).__name__,
            self.design,
            self.oracle.event(),
            self._steps,
            self.schedule.steps,
            self.finalized,
            (*self.oracle.assumptions, str(self._isolation), *self._checked(), *self._moved()),
        )
        known = (
            self.design.one_pass
            or self._payments.sharing
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
        found = {
            id(v): v
            for p in self._all_params()
            if (v := getattr(p, "dpsco_checked", None)) is not None
        }
        for verdicts in found.values() or [self._checks]:
            for part, verdict in verdicts.items():
                yield f"Whether records reach each other in the {part}: {verdict}."

    def _moved(self) -> Iterator[str]:
        if self._public:
            yield (
                f"Public steps were made between private ones, in {self._public} blocks of"
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
        if steps is None:
            steps = (self.schedule.steps or self._steps) - self._steps
        stop = self._steps + check.count(steps=steps)
        start = (
            self._steps
            if self._payments.paid is None
            else min(stop, max(self._steps, self._payments.paid.stop))
        )
        return planned_event(self.oracle, self.design, start, stop, self._batch.partition_name)

    @property
    def adaptive(self) -> bool:
        """Whether what a step costs depends on what was released before."""
        return self._payments.adaptive

    def settings(self) -> dict[str, Any]:
        """Returns the public constants that fix the mechanism; checkpoints of other ones are refused."""
        return {
            **self.oracle.settings(),
            "rule": self.rule.settings(),
            "design": repr(self.design),
            "schedule": repr(self.schedule),
            "prox": repr(self.prox),
            "reg": self.reg,
            "adjacency": self.adjacency,
            **({} if self._secure is None else {"secure": self._secure}),
        }


def sizes_are_private(design: Design, adjacency: str, unit: str) -> bool:
    """Returns whether nobody's row may depend on the number of rows of a draw: it is private, or tells who is in it."""
    if isinstance(design, Undeclared):
        return False
    parts = [part for part, _ in design.parts] if isinstance(design, Parts) else [design]
    # PRIVACY: neighbors may have the same sizes, but others would show by their last bits which batches a record is in
    # (test_who_is_in_a_batch_moves_nobody_else)
    by_chance = design.secret or any(isinstance(part, Poisson) for part in parts)
    return adjacency == ADD_REMOVE or unit == "user" or by_chance
