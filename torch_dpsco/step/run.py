"""What a private run is made of, fixed before its first step, and how far it has come.

What the steps of a run cost, which releases a charge has paid for, and what would repeat one of them.

Releases that share a charge share a secret too: the noise of a threshold, past noise, or who is in which batch. Two
continuations of such a run would show it, under ledgers that know nothing of each other. So there is one: in this
process, or, after a crash, with the ledger file, which knows how far the run has come.

What every private optimizer has: fixed parts, fixed parameters, and public facts of the run; and what those have in
common whose iterates are secret, and whose only release is their answer.

One thread at a time in an optimizer, and its `step` without torch's wrapper where nobody watches it.
"""

from __future__ import annotations

import math
import secrets
import threading
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial, wraps
from itertools import accumulate, compress
from typing import Any, ClassVar, NamedTuple, NoReturn, Self, TypeVar, cast

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from torch_dpsco import _validate as check
from torch_dpsco._validate import type_members
from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.accounting.designs import Design, Draw, Parts, Poisson, Undeclared
from torch_dpsco.accounting.events import (
    ADD_REMOVE,
    Adjacency,
    Event,
    Parallel,
    RandomAllocation,
    Repeat,
    Sequential,
    event_from_json,
    event_to_json,
)
from torch_dpsco.accounting.ledger import LOCK, OPEN
from torch_dpsco.accounting.report import OneRelease
from torch_dpsco.accounting.report import Run as PublicRun
from torch_dpsco.accounting.statement import Statement, make_statement
from torch_dpsco.compat import OPTIMIZER_HOOKS, is_profiling
from torch_dpsco.errors import AdjacencyError, PrivacyError, SequenceError
from torch_dpsco.noise import noise_generator
from torch_dpsco.problem import Schedule
from torch_dpsco.prox import Prox
from torch_dpsco.rules import UpdateRule
from torch_dpsco.step import checks
from torch_dpsco.step.checks import listed
from torch_dpsco.step.oracle import Charge, MeanOracle, Phased


@dataclass(frozen=True, eq=False)
class Run:
    """The parts of a private optimizer, checked against each other, and what its steps are charged.

    Each release is charged before its noise is drawn, with the mark of its number.

    Args:
        oracle: how a logical batch becomes a private mean.
        rule: how a private mean moves the iterate.
        design: how batches are drawn.
        schedule: phases, with the planned number of steps.
        prox: constraint or penalty.
        reg: lambda of (lambda/2) |w|^2.
        adjacency: of the guarantee.
        accountant: pays.
        secure: "exact" for noise in integers on a public grid.

    Raises:
        AdjacencyError: passes of secret draws whose steps are not all charged alike.
    """

    oracle: MeanOracle
    rule: UpdateRule
    design: Design
    schedule: Schedule
    prox: Prox
    reg: float
    adjacency: Adjacency
    accountant: Accountant
    secure: str | None

    def __post_init__(self) -> None:
        self.rule.check_schedule(self.schedule)
        self.accountant.require_unit(self.oracle.unit)
        checks.require_same_parts(self.oracle, self.design, self.schedule)
        if self.adaptive:
            self.accountant.require_adaptive()
        first = planned_event(self.oracle, self.design, 0, 1)
        checks.require_one_step(self.accountant, self.adjacency, first)
        if self.planned and isinstance(self.design, Parts) and not self.adaptive:
            whole = planned_event(self.oracle, self.design, 0, self.planned)
            checks.require_one_step(self.accountant, self.adjacency, whole, "the planned phases")

    @cached_property
    def planned(self) -> int | None:
        """Steps of the schedule; None without end."""
        return self.schedule.steps

    @cached_property
    def charges(self) -> list[Charge]:
        """What the first release of each phase is charged, as known when the run was made."""
        return first_charges(self.oracle, self.design)

    @cached_property
    def adaptive(self) -> bool:
        """Whether what a step costs depends on what was released before."""
        return any(charge.adaptive for charge in self.charges)

    @cached_property
    def in_passes(self) -> bool:
        """Whether passes of secret draws are charged as a whole, before their first step."""
        if not any(self.passes):
            return False
        design = self.design
        draws = _first_draws(self.oracle, design)
        whole = all(
            not charge.adaptive and charge.covers == design.covers(member.event(), draw)
            for member, draw, charge in zip(
                self.oracle.members, draws, self.charges, strict=True
            )
        )
        # parts have their own passes
        alike = isinstance(design, Parts) or len({charge.event for charge in self.charges}) == 1
        if not (alike and whole):
            # PRIVACY: the charge is of steps that are alike, and fixed before the first of them
            # (test_a_pass_whose_steps_are_not_alike_is_refused)
            raise AdjacencyError(
                f"design must be given amplification=False for {type(self.oracle).__name__}, whose"
                " steps of a pass are not all charged alike, as fixed before the first of them (got"
                f" {design})"
            )
        return True

    @cached_property
    def passes(self) -> list[RandomAllocation | None]:
        """The pass of secret draws that each phase is charged by; None for others."""
        return [pass_of(charge.event) for charge in self.charges]

    @cached_property
    def sharing(self) -> tuple[MeanOracle, ...]:
        """Members of the oracle whose releases have a secret in common."""
        # PRIVACY: so has a copy, if one batch of a pass is used (test_a_copy_of_one_batch_of_a_pass_is_refused)
        secret = [
            charge.covers > 1 or (known is not None and known.steps > 1)
            for charge, known in zip(self.charges, self.passes, strict=True)
        ]
        return tuple(compress(self.oracle.members, secret))

    @cached_property
    def in_order(self) -> bool:
        """Whether the run has one partition, and step k uses its draw k."""
        return self.in_passes or isinstance(self.design, Parts)

    @cached_property
    def sizes_are_private(self) -> bool:
        """Whether nobody's row may depend on the number of rows of a draw."""
        return sizes_are_private(self.design, self.adjacency, self.oracle.unit)

    @cached_property
    def takes_means_of_one_output(self) -> bool:
        """Whether rows of a mean over a private number of them are within the declared rounding, for one output."""
        # PRIVACY: all norms may pass a threshold together (test_a_pilot_refuses_means_of_a_private_number)
        exact = any(oracle.jumps for oracle in self.oracle.members)
        return self.oracle.unit == "example" and not exact

    def ahead(self, progress: Progress, steps: int | None, partition: str) -> Event:
        """Returns the event of the next steps, or of all that are planned.

        Args:
            progress: of the run.
            steps: how many follow; None for all that are left of the schedule.
            partition: by which the ledger knows how records are cut into batches.
        """
        made = progress.steps
        if steps is None:
            steps = (self.planned or made) - made
        stop = made + check.count(steps=steps)
        start = made if progress.paid is None else min(stop, max(made, progress.paid.stop))
        return planned_event(self.oracle, self.design, start, stop, partition)

    def settings(self) -> dict[str, Any]:
        """Returns the public constants that fix the mechanism."""
        return {
            **self.oracle.settings(),
            "rule": self.rule.settings(),
            "design": repr(self.design),
            "schedule": repr(self.schedule),
            "prox": repr(self.prox),
            "reg": self.reg,
            "adjacency": self.adjacency,
            **({} if self.secure is None else {"secure": self.secure}),
        }

    def pay(self, progress: Progress, draw: Draw) -> None:
        """Charges the release of a draw, unless a charge before has paid for it.

        Args:
            progress: of the run.
            draw: whose rows are released.

        Raises:
            BudgetExceeded: there is not enough left; nothing was charged.
            SequenceError: the release may have been made already, or is of another pass than was charged.
        """
        steps = progress.steps
        if progress.paid is not None and steps < progress.paid.stop:
            event = self.oracle.charge(self.design, draw).event if self.in_passes else None
            progress.paid.require(draw.partition, event)
            charge = Charge(Sequential(()))
        else:
            charge = self.oracle.charge(self.design, draw)
            part = self._part(steps) if len(self.passes) > 1 else 0
            if pass_of(charge.event) != self.passes[part]:
                _refuse_pass(charge.event, self.passes[part])
        # PRIVACY: with the mark of this release, which no resumed run makes again (test_a_killed_run_goes_on_or_loses)
        marks = {progress.run: steps + 1}
        if self.design.one_pass:
            marks[draw.partition] = draw.index + 1
        if self.in_passes:
            marks[progress.run + OPEN] = 1
        with LOCK:  # of two threads one must see the mark of the other
            if self.sharing and self.accountant.marked(progress.run) > steps:
                # PRIVACY: one threshold would answer in two places (test_a_run_of_noisy_tests_goes_on_in_one_place)
                raise SequenceError(
                    "this step may have been made already, by another optimizer that goes on with"
                    " the same run or by a step that failed after its charge: resume the run from"
                    " its last checkpoint, or finalize()"
                )
            if self.in_passes:
                self._require_fresh(draw)
            progress.begun = self.accountant.marked(progress.run)
            self.accountant.authorize(
                charge.event,
                planned=partial(self._charges_left, draw, steps),
                adaptive=self.adaptive,
                releases=marks,
                ahead=partial(self._ahead, progress, charge, draw),
            )
            if charge.covers > 1:
                self._note(progress, charge, draw.partition)

    def _charges_left(self, draw: Draw, steps: int) -> int:
        """Returns how many equal charges a budget may expect."""
        if not self.in_passes and (
            self.adaptive or self.sharing
        ):  # the next event is another one
            return 1
        left = 1 if self.planned is None else self.planned - steps
        return self.design.charges_left(draw, left, of_passes=self.in_passes)

    def _ahead(self, progress: Progress, charge: Charge, draw: Draw) -> int:
        """Returns how many releases from here on are charged alike: a crash may lose them, where they were not made."""
        # PRIVACY: of a run that cannot lose one (test_a_run_that_can_lose_nothing_is_charged_step_by_step)
        if self.planned is None or charge.covers > 1 or not self.can_lose:
            return 1
        left = self.planned - progress.steps
        if progress.paid is not None and progress.steps < progress.paid.stop:
            return min(left, progress.paid.stop - progress.steps)
        return 1 if self.in_passes else min(left, self._charges_left(draw, progress.steps))

    def _require_fresh(self, draw: Draw) -> None:
        """Raises SequenceError for a batch of secret draws that this ledger knows, by this run or by another one."""
        if self.accountant.marked(draw.partition) > draw.index:
            # PRIVACY: the charge is of draws that nobody has used before (test_the_draws_of_a_pass_serve_once)
            raise SequenceError(
                "this batch may have been released already, and its pass was charged for one"
                " release of each: make a new optimizer, whose draws are fresh"
            )

    def _note(self, progress: Progress, charge: Charge, where: str) -> None:
        """Notes what a charge of several releases, the next one and those after it, has paid for."""
        event = charge.event if self.in_passes else None
        progress.paid = Paid(progress.steps + charge.covers, where, event)

    @property
    def can_lose(self) -> bool:
        """Whether the run can go on without a release that was charged: by `lose`, or since it shares no secret."""
        if self.in_passes:  # batches of a pass share nothing but their charge
            return True
        return all(type(member).lose is not MeanOracle.lose for member in self.sharing)

    def require_losable(self, lost: int) -> None:
        """Raises SequenceError where releases are lost, and a member does not say by `lose` what that means."""
        if not self.can_lose:
            # PRIVACY: what later releases share with a lost one is lost with it
            # (test_a_lost_release_of_an_oracle_that_does_not_expect_it_is_caught)
            raise SequenceError(
                f"{lost} steps may have been made after the checkpoint, without which this oracle"
                " cannot go on: make a new optimizer, which is charged by itself (an oracle of yours"
                " says by `lose` what they mean)"
            )

    def note_lost(self, progress: Progress, partition: str, *, cut: bool) -> None:
        """Notes what was charged with a lost step.

        Args:
            progress: before it.
            partition: by which the ledger knows how records are cut into batches; "planned" before they are.
            cut: whether they are.
        """
        if progress.paid is not None and progress.steps < progress.paid.stop:
            return
        charge = self.oracle.charge(self.design, self._lost_draw(progress.steps, partition))
        if charge.covers > 1:
            self._note(progress, charge, partition if cut else "")

    def _lost_draw(self, steps: int, partition: str) -> Draw:
        # PRIVACY: of the draw of this step, so that no more is paid for than what is left of its pass
        # (test_a_lost_step_in_a_pass_is_paid_to_its_end_and_no_further)
        return Draw(0, partition, str(self._part(steps)), steps)

    def _part(self, steps: int) -> int:
        """Returns the part of the next draw, 0 where a design has none."""
        return self.design.part_of(steps) if isinstance(self.design, Parts) else 0

    def note_halt(self, progress: Progress) -> None:
        """Notes in the ledger that the next release is a halt, before anybody sees it."""
        self.accountant.authorize(Sequential(()), releases={progress.halt_mark: 1})


def new_run(optimizer: object) -> str:
    """Returns the random name of a run, by which ledgers know its releases, and in messages whose they are."""
    return f"{type(optimizer).__name__}-{secrets.token_hex(16)}"


@dataclass
class Progress:
    """How far a run has come: kept in checkpoints.

    Args:
        run: random name, by which the ledger knows the releases.
        steps: made, or lost.
        halted: whether the oracle has answered for the last time in this phase.
        stills: releases of this phase that were no means.
        since: step from which the run has its name.
        public: blocks of public steps that moved the parameters.
        finalized: whether the answer is installed.
        paid: what was charged for several releases.
        begun: releases that the ledger knew before the step that was begun; None between steps.
    """

    run: str = ""
    steps: int = 0
    halted: bool = False
    stills: int = 0
    since: int = 0
    public: int = 0
    finalized: bool = False
    paid: Paid | None = None
    begun: int | None = None

    @property
    def halt_mark(self) -> str:
        """The mark by which the ledger knows that the next release is a halt."""
        return f"{self.run}/halted/{self.steps}"


def part(name: str) -> Any:
    """Returns an attribute of an optimizer that is a part of its run, and no assignment changes."""

    def refuse(optimizer: Any, value: Any) -> None:
        # PRIVACY: what the accounting was told must stay true (test_what_the_ledger_relies_on_cannot_be_reassigned)
        raise PrivacyError(
            f"{name} is fixed at construction: make a new optimizer, with the same accountant"
        )

    return property(lambda optimizer: getattr(optimizer._run, name), refuse)


def sizes_are_private(design: Design, adjacency: str, unit: str) -> bool:
    """Returns whether nobody's row may depend on the number of rows of a draw: it is private, or tells who is in it."""
    if isinstance(design, Undeclared):
        return False
    parts = [part for part, _ in design.parts] if isinstance(design, Parts) else [design]
    # PRIVACY: neighbors may have the same sizes, but others would show by their last bits which batches a record is in
    # (test_who_is_in_a_batch_moves_nobody_else)
    by_chance = design.secret or any(isinstance(part, Poisson) for part in parts)
    return adjacency == ADD_REMOVE or unit == "user" or by_chance


class Paid(NamedTuple):
    """What a charge of several releases has paid for.

    Args:
        stop: step after the last of them.
        partition: how records were cut into batches; "" where they are not.
        event: what was charged, where it is that of a pass of secret draws; None elsewhere.
    """

    stop: int
    partition: str
    event: Event | None = None

    @classmethod
    def of_row(cls, row: Sequence[Any]) -> Self:
        """Returns what `row` has made."""
        stop, partition, event = row
        return cls(stop, partition, event and event_from_json(event))

    @property
    def row(self) -> list[Any]:
        """All of it as primitives."""
        return [self.stop, self.partition, self.event and event_to_json(self.event)]

    def require(self, partition: str, event: Event | None = None) -> None:
        """Raises SequenceError for a batch of records that were cut in another way, or for a release of less noise."""
        if event != self.event:
            # PRIVACY: (test_a_step_with_less_noise_than_its_pass_was_charged_for_is_refused)
            raise SequenceError(
                f"steps must be those that their pass was charged for, {self.event} (got one of"
                f" {event}): noise is fixed before a pass, or give amplification=False to the"
                " design"
            )
        if partition != self.partition:
            # PRIVACY: a record would come at other steps than those that were charged
            # (test_another_cut_under_a_charge_of_the_whole_run_is_caught)
            raise SequenceError(
                "batches must be those of the cut that was charged for the whole run: go on with "
                "optimizer.loader(dataset, resume=True), or make a new optimizer"
            )


def first_charges(oracle: MeanOracle, design: Design) -> list[Charge]:
    """Returns what the first release of each phase is charged."""
    draws = _first_draws(oracle, design)
    return [
        member.charge(design, draw) for member, draw in zip(oracle.members, draws, strict=True)
    ]


def _first_draws(oracle: MeanOracle, design: Design) -> list[Draw]:
    draws = [0 for _ in oracle.members]
    if isinstance(design, Parts):
        draws = [steps for _, steps in design.parts]
    starts = accumulate(draws[:-1], initial=0)
    return [Draw(0, "planned", str(k), start) for k, start in enumerate(starts)]


def pass_of(event: Event) -> RandomAllocation | None:
    """Returns the pass of secret draws that a charge is of, of all records or of a part; None for others."""
    if isinstance(event, Parallel):
        passes = (pass_of(one) for _, inside in event.items() for one in inside)
        return next(filter(None, passes), None)
    return event if isinstance(event, RandomAllocation) else None


def _refuse_pass(event: Event, planned: RandomAllocation | None) -> NoReturn:
    """Raises for a charge that is not of the pass, or of none, that was known when the run was made."""
    # PRIVACY: a batch, and a pass over all batches of its part, would count as disjoint; and a run that was made
    # without passes may be copied (test_a_charge_of_another_pass_than_planned_is_refused)
    raise SequenceError(
        "steps must be charged as was known when the optimizer was made, by"
        f" {planned or 'no pass'} (got {event}): give amplification=False to the design"
    )


def planned_event(
    oracle: MeanOracle, design: Design, start: int, stop: int, partition: str = "planned"
) -> Event:
    """Returns the event of the draws in [start, stop) of a run."""
    if design.one_pass:
        return design.between(
            start, stop, [member.event() for member in oracle.members], partition
        )
    if isinstance(oracle, Phased):
        # PRIVACY: a later phase may cost more (test_what_is_ahead_of_a_run_is_what_it_spends)
        parts: list[Event] = []
        first = 0
        for member, steps in oracle.phases:
            begin = max(start, first)
            first += steps
            if begin < min(stop, first):
                parts.append(planned_event(member, design, begin, min(stop, first), partition))
        return Sequential(tuple(parts))
    charge = oracle.charge(design, Draw(0, partition, "0"))
    if design.positional and charge.covers == 1:  # a pass is charged, not a draw
        return design.between(start, stop, [oracle.event()])
    return Repeat(charge.event, math.ceil((stop - start) / charge.covers))


_LARGEST = 1e100  # of what a plan is computed from
_TYPED = (
    "__init__",
    "accumulate",
    "ahead",
    "certify",
    "load_state_dict",
    "loader",
    "plan",
    "report",
    "signal_skip_step",
    "solve",
    "step_on",
)


class CommonOptimizer(Optimizer):
    """Base of all private optimizers: subclasses set the accountant last, which closes the construction."""

    _fixed: ClassVar[frozenset[str]] = frozenset()
    plans: ClassVar[Any]  # the class of plans that this class runs
    undisturbed: ClassVar[str] = ""  # why a run takes no steps on public data; "" if it does
    accountant: Accountant
    _steps: int
    _name = ""
    _finalized: bool
    _seeded: bool

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        type_members(cls, *_TYPED, largest=_LARGEST)

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        self.turn = Turn()
        super().__init__(listed(params), defaults)

    def __setattr__(self, name: str, value: Any) -> None:
        # PRIVACY: what the accounting was told must stay true (test_what_the_ledger_relies_on_cannot_be_reassigned)
        if name in self._fixed and name in self.__dict__:
            raise PrivacyError(
                f"{name} is fixed at construction: make a new optimizer, with the same accountant"
            )
        super().__setattr__(name, value)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuses new parameters after construction: plan, averages and checkpoints are about the first ones."""
        if self.__dict__.keys() & {"accountant", "_run"}:
            raise SequenceError(
                "params are fixed at construction: make a new optimizer, with the same accountant"
            )
        super().add_param_group(param_group)

    @abstractmethod
    def finalize(self) -> None:
        """Installs the private answer into the parameters, unless that was done; later steps raise."""

    @classmethod
    def _ledger(
        cls, plan: Any, moved: Mapping[str, Any], accountant: Accountant | None
    ) -> Accountant:
        """Returns the ledger of a run of this plan.

        Args:
            plan: the second argument of the class.
            moved: unknown keywords of the class.
            accountant: that was given.

        Raises:
            ValueError: there is no plan of this class, or keywords of it are given to the optimizer.
            AdjacencyError: the accountant has another budget or adjacency.
        """
        name = cls.__name__
        if moved:
            raise ValueError(
                f"{', '.join(moved)} must be given to {name}.plan(...), and that to {name}(params, plan);"
                " momentum, betas, maximize to a torch optimizer, and that to rule=dp.rules.TorchRule(it)"
            )
        if type(plan) is not cls.plans:
            raise ValueError(
                f"plan must be made by {name}.plan(...): {name}(params, {name}.plan(...)) (got"
                f" {check.shown(plan)})"
            )
        if accountant is None:
            return plan.ledger()  # type: ignore[no-any-return]
        if plan.budget is not None:
            checks.require_budget(accountant, plan.budget)
        return accountant

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, *error: object) -> None:
        if kind is None:
            self.finalize()

    @property
    def in_step(self) -> bool:
        """Whether this thread is in a step of the optimizer."""
        return self.turn.taken_here

    @property
    def steps(self) -> int:
        """Steps made."""
        return self._steps

    @property
    def run(self) -> str:
        """Random name of the run, by which the ledger knows its releases; a resumed run keeps it."""
        return self._name

    @property
    def finalized(self) -> bool:
        """Whether the answer was installed."""
        return self._finalized

    @property
    def seeded(self) -> bool:
        """Whether the noise comes from a generator of the caller's, so that it could be repeated and subtracted."""
        return self._seeded

    def _statement(self, run: PublicRun, delta: float | None, ahead: Event | None) -> Statement:
        # PRIVACY: said loudly (test_the_report_says_where_the_noise_comes_from)
        return make_statement(
            self.accountant.report(delta, ahead=ahead), replace(run, repeatable=self._seeded)
        )


class AnswerOptimizer(CommonOptimizer):
    """Base of optimizers of one release.

    Args:
        params: one group.
        defaults: of torch.
        plan: from the class's own `plan`.
        design: how batches are drawn.
        steps: how many are planned; 0 where there are none.
        accountant: ledger to charge.
        generator: of the noise; None for a secret one.
    """

    # PRIVACY: the noise is calibrated for these (test_what_the_noise_was_calibrated_for_cannot_be_reassigned)
    _fixed: ClassVar[frozenset[str]] = frozenset(
        {"_plan", "plan", "accountant", "adjacency", "design", "event", "planned_steps"}
    )

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        plan: Any,
        design: Design,
        steps: int,
        accountant: Accountant,
        generator: torch.Generator | None,
    ) -> None:
        super().__init__(params, defaults)
        if checks.world_size() > 1:
            raise SequenceError(
                f"world_size must be 1 for this optimizer (got {checks.world_size()}): HolderSGD and"
                " ClippedSGD run in several processes, on Poisson or full batches"
            )
        # over the class method: optimizer.plan is what it has made
        self._plan = self.__dict__["plan"] = plan
        self._params: tuple[nn.Parameter, ...] = tuple(self.param_groups[0]["params"])
        self._noise = noise_generator(checks.one_device(self._params), generator)
        self._seeded = generator is not None
        self.design = design
        self.planned_steps = steps
        self.event = plan.event()
        self._steps = 0
        self._finalized = False
        accountant.require_unit("example", plan.adjacency)
        self.adjacency = checks.agreed_adjacency(plan.adjacency, accountant, design)
        checks.require_one_step(accountant, self.adjacency, self.event)
        self.accountant = accountant

    def report(self, delta: float | None = None) -> Statement:
        """Returns what is guaranteed, in plain words; delta defaults to the budget's."""
        run = OneRelease(
            type(self).__name__,
            self.design,
            self.event,
            self._steps,
            self.planned_steps,
            self._finalized,
        )
        return self._statement(run, delta, run.ahead())

    def state_dict(self) -> dict[str, Any]:
        """Returns torch's state, which is empty, once the answer is released; raises SequenceError before."""
        if not self._finalized:
            # PRIVACY: averages are of secret iterates (test_nothing_is_saved_before_the_answer)
            raise SequenceError(
                "nothing may be saved before finalize(): all is secret. An interrupted run starts"
                " again, since nothing was released or charged"
            )
        return super().state_dict()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # PRIVACY: two answers of one secret run would be two releases
        # (test_a_run_cannot_be_copied, test_a_solved_run_cannot_be_copied)
        raise SequenceError(
            "a run of secret iterates must not be copied: it has one release; make a new optimizer"
        )

    def __copy__(self) -> Any:
        return self.__deepcopy__({})

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__deepcopy__({})


_Method = TypeVar("_Method", bound=Callable[..., Any])


class Turn:
    """Lets one thread in at a time; a second one raises, and a copy has its own turn."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._holder = 0  # the thread that was let in last
        self._depth = 0

    @property
    def taken_here(self) -> bool:
        """Whether this thread is in."""
        return self._depth > 0 and self._holder == threading.get_ident()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            # PRIVACY: two steps would share rows, sums and noise (test_a_step_during_a_step_is_refused)
            raise SequenceError(
                "a step of this optimizer is running in another thread: nothing was done in this"
                " one; an optimizer is for one thread at a time, and several optimizers may share"
                " an accountant"
            )
        self._holder = threading.get_ident()
        self._depth += 1

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        self._lock.release()

    def __reduce__(self) -> tuple[type[Turn], tuple[()]]:
        return Turn, ()


def is_watched(optimizer: Optimizer) -> bool:
    """Returns whether hooks, a profiler, or a scheduler that counts, want to see each call of `step()`."""
    own = (
        getattr(optimizer, "_optimizer_step_pre_hooks", True)
        or getattr(optimizer, "_optimizer_step_post_hooks", True)
        or "step" in vars(optimizer)
    )
    for_all = any(
        not hasattr(hook, "only_looks") for hooks in OPTIMIZER_HOOKS for hook in hooks.values()
    )
    return bool(own or for_all or is_profiling())


def in_turn(method: _Method) -> _Method:
    """Returns the method, which raises SequenceError while another thread is in one of the optimizer's."""

    @wraps(method)
    def alone(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.turn:
            return method(self, *args, **kwargs)

    return cast("_Method", alone)


def seldom_watched(step: _Method) -> _Method:
    """Returns a `step` that goes through what torch puts around it, a sixth of a small step, only where it is seen.

    None of it is compiled: checks and ledger are Python, with caches that a tracer would look through.
    """
    watched: Any = Optimizer.profile_hook_step(step)

    @wraps(step)
    def either(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(either)(self, *args, **kwargs)
        return (watched if is_watched(self) else step)(self, *args, **kwargs)

    either.hooked = True  # type: ignore[attr-defined]  # so that torch leaves it as it is
    return cast("_Method", either)
