"""An optimizer that holds a run: its parts, its batches, what is public of it, and its checkpoints.

`PrivateOptimizer` adds the step.

How a run gets its batches: a loader of its design, over records or users, in one process or several.

Checkpoints: what they keep, what they are tied to, and how a run continues.

Going on after a crash: which releases a run may have made, and what becomes of those that its checkpoint misses.

The ledger file says it: each charge names the run and how many of its releases may have been made from then on, and
is on the disk before their noise is drawn. A run that is resumed never makes one of these again, since a second answer
under the charge of the first would be free. They are lost: time, not budget.

| crash | charged | marked | after resume |
|---|---|---|---|
| before the charge of a step is on the disk | no | no | the step is made |
| after it, before or after the release | yes | yes | the step is lost, and all that were charged ahead with it |
| after a checkpoint | yes | yes | nothing is lost |
"""

from __future__ import annotations

import hashlib
import json
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from torch_dpsco import _validate as check
from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.accounting.budgets import warn_of_delta
from torch_dpsco.accounting.designs import Design, Undeclared
from torch_dpsco.accounting.events import Adjacency, Event, Gaussian, NonPrivate, Sequential
from torch_dpsco.accounting.ledger import read_state
from torch_dpsco.accounting.report import Run as PublicRun
from torch_dpsco.accounting.statement import Statement
from torch_dpsco.errors import PrivacyError, SequenceError, UnitError, outside, warn
from torch_dpsco.noise import SecretState, noise_generator
from torch_dpsco.problem import Schedule
from torch_dpsco.prox import Identity, Prox
from torch_dpsco.rows import (
    attachments,
    clear_rows,
    forget_wrappers,
)
from torch_dpsco.rows.batch import GradBatch, note_owner
from torch_dpsco.rules import UpdateRule, trained
from torch_dpsco.sampling import Partition, PrivateLoader, UserLoader
from torch_dpsco.sampling.loader import LEVELS, Isolation
from torch_dpsco.step import checks
from torch_dpsco.step.batch import (
    OTHER_RECORDS,
    LogicalBatch,
    continued,
    draws_left,
    make_slots,
    who_is_drawn,
)
from torch_dpsco.step.distributed import Ranks
from torch_dpsco.step.oracle import MeanOracle
from torch_dpsco.step.run import CommonOptimizer, Paid, Progress, Run, in_turn, new_run, part

_UNCHECKED = dict.fromkeys(("model", "loss"), "not checked, no model is attached")
_KEY = "dpsco"
_VERSION = 3


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
        super().__init__(params, {**rule.defaults, "lr": check.nonnegative(lr=lr)})
        self._params: list[nn.Parameter] = [p for g in self.param_groups for p in g["params"]]
        for group in self.param_groups:
            check.nonnegative(lr=group["lr"])
        device = checks.one_device(self._params)
        rule.check_groups(self.param_groups)
        if check.choice((None, "exact"), secure=secure):
            oracle.use_exact_noise()
        adjacency = checks.agreed_adjacency(adjacency, accountant, design)
        if accountant is None:  # an empty one has length 0 and would count as false
            accountant = Accountant(adjacency=adjacency, unit=oracle.unit)
        if getattr(self, "_plan", None) is None and not isinstance(design, Undeclared):
            warn_of_delta(accountant.budget, design.n)
        self._run = Run(
            oracle=oracle,
            rule=rule,
            design=design,
            schedule=schedule or Schedule(),
            prox=prox or Identity(),
            reg=check.nonnegative(reg=reg),
            adjacency=adjacency,
            accountant=accountant,
            secure=secure,
        )
        self._progress = Progress(new_run(self))
        self._noise = noise_generator(device, generator)
        self._seeded = generator is not None
        self._batch = LogicalBatch(design, self._params, in_order=self._run.in_order)
        self._isolation = Isolation()
        self._shown = False  # whether `released` runs
        self._barred = ""  # why no private step may be made now
        self._given: GradBatch | None = None  # rows of the next step, without a backward
        self._grad_scale: float | None = None
        self._told_of_scale = False
        self._checks: Mapping[str, str] = _UNCHECKED
        self._lrs: list[float] | None = None  # those of a utility theorem, until they change
        self._start(device)

    def _start(self, device: torch.device) -> None:
        """Begins in the feasible set, takes the oracle, and joins the other processes."""
        params = self._trained()
        sizes = [float(group["lr"]) for group in self.param_groups for _ in trained(group)]
        self.prox.apply_([p.detach().clone() for p in params], sizes)
        self.oracle.take()
        forget_wrappers(self._params)
        self._world = checks.world_of(self._params, device, Ranks)
        self._world.begin(self)
        self.prox.apply_(params, [0.0] * len(params))
        if not self.adaptive:
            if self._run.planned is None:
                self.accountant.declare(self.ahead(1), None)
            else:
                self.accountant.declare(self.ahead(), 1)
        note_owner(self._params, self)

    # -- batches ------------------------------------------------------------------------------------------------------

    def loader(
        self,
        dataset: Dataset[Any],
        users: Any = None,
        *,
        record_ids: Any = None,
        shard: int | None = None,
        steps: int | None = None,
        resume: bool = False,
        physical_batch_size: int | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        pin_memory: bool | None = None,
        isolation: str | None = None,
    ) -> PrivateLoader:
        """Returns a loader that draws batches of `dataset` by this optimizer's design.

        Args:
            dataset: map-style data set; tensors in memory (TensorDataset) are gathered fastest. Or a stream, as
                `sampling.Spilled`.
            users: the id of the user of each record, for an optimizer that protects users: users are drawn, and
                all their rows are delivered with their ids. Integers in [0, n), or strings (and other things that
                hash), which are numbered in order of appearance. Under replace_one and zero_out n is the public
                universe, and users without a record are legal; under add_remove users are numbered without gaps.
            record_ids: for passes of random allocation, a unique id per record (integers, strings or bytes): a record
                picks its batches by a keyed hash of it, so that the order of records may change, and each of several
                processes may have records of its own. With `shard`, in every design: an id on two ranks is refused.
            shard: where each of several processes has records of its own, that no other one has: how many this one has
                at most, a public number (n, if none is known), by which its batches are filled up. Which process has a
                record must not depend on its values. Where users are protected, how many users: each process has all
                records of its own users, and a user (an integer, a string or bytes) on two of them is refused.
            steps: draws per iteration; default one epoch, or all that is left of a partition, or of a plan for users.
            resume: for designs of one pass: go on where this run, or its checkpoint, left its partition, instead of
                drawing another one, which composes with the first.
            physical_batch_size: deliver a draw in chunks of at most that many rows, whose number is private; step()
                adds them up. In slots a few rows cost least, see docs/performance.md. Default: one chunk a draw; for a
                model of more than 2^25 parameters more, a public number, until sizes are tested; then two, or three
                in 1 draw of 30,000.
            collate_fn: as in DataLoader.
            num_workers: as in DataLoader.
            pin_memory: as in DataLoader; None for parameters on CUDA.
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
        drawn = who_is_drawn(run, self._world, dataset, users, record_ids, shard, steps)
        checks.require_universe(run.design, run.adjacency, drawn.size)
        partition = continued(run, self._batch, self.steps, resume=resume)
        steps = draws_left(run, self.steps, steps, partition, of_users=users is not None)
        own = drawn.shard is not None
        sampler = self._world.sampler(
            self, drawn.held if own else drawn.size, steps, partition, drawn.named, shard=own
        )
        check.choice((None, *LEVELS), isolation=isolation)
        params = self._trained()
        slots = make_slots(
            run,
            sampler,
            isolation=isolation,
            most=physical_batch_size,
            records=drawn.shard,
            dim=sum(p.numel() for p in params),
        )
        owners: Any = drawn.owners
        kind = PrivateLoader if owners is None else partial(UserLoader, users=owners)
        loader = kind(
            dataset,
            sampler,
            physical_batch_size=physical_batch_size,
            collate_fn=collate_fn,
            num_workers=num_workers,
            pin_memory=any(p.is_cuda for p in params) if pin_memory is None else pin_memory,
            slots=slots,
            rounded=slots is not None and isolation != "slots",
        )
        self.bind(loader)
        return loader

    def _tie_records(self) -> None:
        """Marks in the ledger the records of a cut that a checkpoint holds, which was made before they were known."""
        partition = self._batch.sealed()
        assert partition is not None
        tied = f"{self.run}/records"
        mine = f"{tied}/{partition.tag}"
        marked = self.accountant.marked
        if not marked(mine):
            if self.steps or marked(tied):
                # PRIVACY: a record at another place is used twice
                # (test_a_cut_that_a_checkpoint_of_the_start_holds_is_of_the_records_of_its_first_loader,
                # test_a_cut_without_steps_is_of_the_records_of_its_first_loader_too)
                raise PrivacyError(OTHER_RECORDS)
            self.accountant.authorize(Sequential(()), 0, releases={tied: 1, mine: 1})
        paid = self._progress.paid
        if paid is not None:  # by lost steps, when it was not known whether records draw by ids
            self._progress.paid = paid._replace(partition=self._batch.partition_name)

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
        if self._batch.bind(loader, self._give_up, self._progress, self._run.planned):
            self._tie_records()
        own = isinstance(loader, PrivateLoader)
        self._isolation = loader.isolation if own else Isolation()
        self._isolation.private = self.sizes_are_private
        for attachment in attachments(self._params):
            attachment.isolation = self._isolation
            attachment.get_ready(None)
            if own:
                loader._part(attachment.layers[0])
        if self._isolation.open:
            self._settle_isolation(known=True)
        return loader

    def _settle_isolation(self, *, known: bool = False) -> None:
        """Tests after a first step whether draws may come in batches of several sizes; `known`: takes what is known."""
        models = attachments(self._params)
        if len(models) == 1:
            models[0].isolation = self._isolation
            found = models[0].sizes(known=known)
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
        self._isolation = replace(self._isolation, slots=None, tested=None, open=False)
        for attachment in attachments(self._params):
            attachment.isolation = self._isolation

    @property
    def run(self) -> str:
        """Random name of the run, by which the ledger knows its releases; a resumed run keeps it."""
        return self._progress.run

    @property
    def outstanding_rows(self) -> int | None:
        """Rows of the batch that the next step must use (private); None if there is none."""
        due = self._batch.due
        return None if due is None else due.size

    @property
    def ends_draw(self) -> bool:
        """Whether the next step is given the last part of its draw, and so releases (private: it tells of its size)."""
        due = self._batch.due
        return due is not None and due.last

    @property
    def in_draw(self) -> bool:
        """Whether a part of a draw was added, and the step of the draw is not made (private: it tells of its size)."""
        return self._batch.opened

    def discard(self) -> None:
        """Gives the current logical batch up: rows and oracle sum are dropped, and nothing is charged.

        The next loop over a loader begins with the same draw: a draw cannot be exchanged for another one.
        """
        self._give_up()

    def _give_up(self, *, halted: bool = False) -> None:
        """Forgets the step in progress; one that was charged is lost as by `resume`: its release may have been seen.

        Args:
            halted: whether its release was the last answer.
        """
        run = self._run
        progress = self._progress
        begun = progress.begun
        # PRIVACY: another release under the charge of the first would be free, and a retry is no other optimizer
        # (test_a_step_that_fails_after_its_charge_is_lost_and_the_run_goes_on)
        if begun is None or run.accountant.marked(progress.run) <= begun or not run.can_lose:
            # PRIVACY: a refused batch must not linger in the oracle, nor its rows (test_kept_refused_batch_is_caught,
            # test_a_batch_that_was_given_up_leaves_nothing_for_the_next_one)
            self._clear()
            self._batch.drop()
            progress.begun = None
            return

        self._clear()
        self._batch.finish(used=True)
        self._count_lost(halted=halted)
        warn(
            f"step {progress.steps} was charged and did not end: it is lost, as after a crash. The run"
            " goes on with the next one, from the parameters as they are",
            stacklevel=outside(),
        )

    def _clear(self) -> None:
        """Forgets all rows, and the oracle's sum of them."""
        self._given = None
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
            or self._run.sharing
            or not isinstance(run.event, (Gaussian, NonPrivate))
        )
        ahead = self.ahead() if known and run.planned else run.ahead()
        return self._statement(run, delta, ahead)

    def note_checks(self, verdicts: Mapping[str, str]) -> None:
        """Lets reports say what is known about records that reach each other, where no attached model does.

        Args:
            verdicts: of "model" and "loss"; later changes of them are seen.
        """
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
        if self._barred:
            raise SequenceError(self._barred)

    def ahead(self, steps: int | None = None) -> Event:
        """Returns the event of the next steps, or of all that are planned.

        Args:
            steps: number of steps; default all that are left of the schedule.
        """
        return self._run.ahead(self._progress, steps, self._batch.partition_name)

    @property
    def adaptive(self) -> bool:
        """Whether what a step costs depends on what was released before."""
        return self._run.adaptive

    def settings(self) -> dict[str, Any]:
        """Returns the public constants that fix the mechanism; checkpoints of other ones are refused."""
        return {**self._run.settings(), **self._world.own}

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns tensors and primitives (loads with weights_only): no noise stream, no batch in progress.

        CONFIDENTIAL, as it says itself and by its type (`SecretState`), as long as one pass goes on: it keeps who is
        in which part and a keyed fingerprint of the records, for which all of them are read once. So is a run of
        noisy tests: it keeps their thresholds.
        """
        self._require_private()  # the iterates that are kept follow at the end of the block
        if self._progress.begun is not None:
            self._give_up()
        run = self._run
        progress = self._progress
        # PRIVACY: a run that is resumed has the same threshold
        # (test_a_checkpoint_of_the_start_gives_its_threshold_to_a_resumed_run_only)
        self.oracle.prepare(self._noise)
        oracle = self.oracle.state()
        if not self.steps and not self.finalized and self._world.alone:
            self._batch.cut()
        partition = None if self.finalized else self._batch.sealed()
        # PRIVACY: with the keys known, a record less moves all later ones, and who has the key of a fingerprint can
        # try records (test_the_keys_of_records_are_secret_where_removing_one_moves_the_others)
        shared = bool(run.sharing) and not (
            run.in_passes and self.finalized
        )  # of passes no draw is left
        confidential = shared or partition is not None or isinstance(oracle, SecretState)
        settings = self.settings()
        private = {
            **vars(progress),
            "paid": None if progress.paid is None else progress.paid.row,
            "version": _VERSION,
            "settings": settings,
            "digest": _digest(settings),
            "rule": self.rule.state_dict(),
            "oracle": oracle,
            "ledger": self.accountant.state_dict(),
            "confidential": confidential,
        }
        if partition is not None:
            private["partition"] = {**vars(partition), "cut": torch.from_numpy(partition.cut)}
        # PRIVACY: (test_a_state_with_secrets_says_so_by_its_type_and_shows_none)
        kind = SecretState if confidential else dict
        return kind({**super().state_dict(), _KEY: kind(private)})

    @in_turn
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores a state, ledger included; drops a batch in progress.

        Raises:
            ValueError: the state is of another plan, noise, clip or version; says which settings differ.
            PrivacyError: the state's ledger would forget events charged here.
            SequenceError: the run is charged as a whole and goes on by `resume` only.
        """
        run = self._run
        public, private = split(state_dict, self.settings(), shared=bool(run.sharing))
        private = self._world.common(private)
        if private["steps"] and not private["finalized"]:
            refuse_load(run.sharing)
        self.discard()
        self.accountant.load_state_dict(private["ledger"])
        if not private["steps"] and not self.steps:
            # PRIVACY: a threshold that nothing was charged for yet serves one run, the resumed one
            # (test_a_checkpoint_of_the_start_gives_its_threshold_to_a_resumed_run_only)
            private = private | {"oracle": None, "run": self.run}
            if run.in_passes:
                # PRIVACY: and so do secret draws
                # (test_a_checkpoint_of_the_start_gives_its_draws_to_a_resumed_run_only)
                private.pop("partition", None)
        self._restore(public, private)

    def _restore(self, public: dict[str, Any], private: dict[str, Any]) -> None:
        super().load_state_dict(public)
        places = (i for group in public["param_groups"] for i in group["params"])
        for p, place in zip(self._params, places, strict=True):
            average = public["state"].get(place, {}).get("average")
            if average is not None:  # torch casts what it loads to the dtype of the parameters
                self.state[p]["average"] = average.to(p.device, copy=True)
        self.rule.load_state_dict(private["rule"], self.param_groups)
        if private["oracle"] is not None:
            self.oracle.restore(private["oracle"])
        if "partition" in private:
            saved = private["partition"]
            self._batch.resume(Partition(**{**saved, "cut": saved["cut"].numpy()}))
        vars(self._progress).update((name, private[name]) for name in vars(self._progress))
        if private["paid"] is not None:
            self._progress.paid = Paid.of_row(private["paid"])

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
        if self.steps or self.finalized:
            raise SequenceError(
                "resume must be called on a new optimizer (got one that has made steps)"
            )
        run = self._run
        batch = self._batch
        public, private = split(state_dict, self.settings(), shared=bool(run.sharing))
        private = self._world.common(private)
        # PRIVACY: only its own ledger knows what was released since
        # (test_a_run_is_resumed_with_its_own_ledger_file_only)
        marked = self.accountant.continue_from(private["ledger"])
        self.discard()
        self._restore(public, private)
        if batch.partition is not None:  # behind all draws that releases may have used
            used = max(batch.partition.made, marked.get(batch.partition_name, 0))
            batch.resume(replace(batch.partition, made=used))
        made = self.steps
        lost = 0 if private["finalized"] else max(0, marked.get(self.run, made) - made)
        if lost:
            run.require_losable(lost)
        with torch.no_grad():
            for _ in range(lost):
                # PRIVACY: a test that has failed answers no more (test_a_halt_that_the_checkpoint_missed_is_kept)
                self._count_lost(halted=self._progress.halt_mark in marked)
        if run.in_order and batch.partition is not None:
            batch.resume(replace(batch.partition, made=self.steps))
        if lost:
            warn(
                f"{lost} steps after step {made} were lost to a crash: they were charged after the"
                " checkpoint, or ahead, so that the run goes on without them and makes none of"
                " them again",
                stacklevel=3,
            )
        if self.steps == run.planned:
            self.finalize()
        return lost

    def __copy__(self) -> RunOptimizer:
        raise SequenceError(
            "copies must have parts of their own: use copy.deepcopy((model, optimizer))"
        )

    def __getstate__(self) -> dict[str, Any]:
        self._world.require_whole("a copy")
        self._require_private()
        if not self.finalized:
            refuse_copy(self._run.sharing)
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
        self._world = checks.world_of(self._params, device, Ranks)
        if partition is not None:
            self._batch.resume(partition)
        self.oracle.discard()
        # PRIVACY: a copy has releases of its own (test_a_copy_is_another_run_in_the_ledger)
        self._progress.run = new_run(self)
        self._progress.since = self.steps
        self._progress.begun = None
        note_owner(self._params, self)

    # -- what the step adds -------------------------------------------------------------------------------------------

    def _trained(self) -> list[nn.Parameter]:
        """Returns the parameters that are not frozen."""
        return [p for p in self._params if p.requires_grad]

    @abstractmethod
    def _count_lost(self, *, halted: bool) -> None:
        """Counts the next step, which was charged, as one whose release is lost."""


def _digest(settings: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def split(
    state: dict[str, Any], settings: dict[str, Any], *, shared: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns (torch's part, private part) of a state dict.

    Args:
        state: of `RunOptimizer.state_dict`.
        settings: public constants that fix the mechanism, JSON-codable.
        shared: whether steps share a charge.

    Raises:
        ValueError: no private part, another version, or a mechanism with other settings.
        PrivacyError: its ledger does not hold the charges of its steps.
    """
    if not isinstance(state, Mapping):
        raise ValueError(f"state_dict must be a mapping (got {check.shown(state)})")
    private = state.get(_KEY)
    if private is None or private.get("version") != _VERSION:
        raise ValueError(
            f"state_dict must be a private optimizer's, version {_VERSION} (got {sorted(state)})"
        )
    if missing := {"digest", "settings", "ledger", *vars(Progress())} - set(private):
        raise ValueError(
            f"state_dict must be as it was written (got one without {', '.join(sorted(missing))})"
        )
    if private["digest"] != _digest(settings):
        saved = private["settings"]
        details = [
            f"{name}: {settings.get(name)!r:.80} here, {saved.get(name)!r:.80} there"
            for name in sorted({*saved, *settings})
            if saved.get(name) != settings.get(name)
        ]
        raise ValueError(
            "state_dict must be of the same plan (got another one:"
            f" {'; '.join(details) or 'its digest is wrong'}); make the optimizer with the"
            " arguments of the saved run"
        )
    _require_charged(private, shared=shared)
    return {key: value for key, value in state.items() if key != _KEY}, private


def _require_charged(private: dict[str, Any], *, shared: bool) -> None:
    steps = private["steps"]
    ledger = read_state(private["ledger"])
    marked = ledger.releases.get(private["run"], private["since"])
    if len(ledger.ledger) < (min(steps, 1) if shared else steps) or marked < steps:
        # PRIVACY: a checkpoint whose ledger was emptied or exchanged (test_steps_without_their_charges_are_refused)
        raise PrivacyError(
            f"state_dict must hold the charges of its {steps} steps (got a ledger of"
            f" {len(ledger.ledger)} events): its ledger was emptied or is another one"
        )


def refuse_copy(sharing: Sequence[MeanOracle]) -> None:
    """Raises SequenceError for a copy of a run with members whose releases share a charge."""
    if sharing:
        # PRIVACY: the copy's releases would have the secrets of the original's
        # (test_a_copy_of_a_run_that_is_charged_as_a_whole_is_caught)
        raise SequenceError(
            "an optimizer whose run is charged as a whole must not be copied before finalize(): its"
            " releases share a secret; make a new one, which is charged by itself"
        )


def refuse_load(sharing: Sequence[MeanOracle]) -> None:
    """Raises SequenceError for a checkpoint of such a run that is loaded without its ledger file."""
    if sharing:
        # PRIVACY: one secret would answer for two runs, whose ledgers know nothing of each other
        # (test_a_second_load_of_a_run_that_is_charged_as_a_whole_is_caught)
        raise SequenceError(
            "a run that is charged as a whole must be continued once: by resume(state_dict), with"
            " an accountant that has the run's ledger file; or start another one, which is charged"
            " again"
        )
