"""What the plans of optimizers with private steps have in common, and how an optimizer is made from a plan."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from torch_dpsco import _validate as check
from torch_dpsco._validate import shown
from torch_dpsco.accounting import calibrate
from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.accounting.analysis.rounding import asks_exact
from torch_dpsco.accounting.budgets import Budget, warn_of_delta
from torch_dpsco.accounting.designs import (
    Assigned,
    Design,
    Disjoint,
    Fixed,
    Full,
    Parts,
    Poisson,
    Shuffled,
    Undeclared,
)
from torch_dpsco.accounting.events import (
    ADD_REMOVE,
    REPLACE_ONE,
    Adjacency,
    Event,
    below_one,
    check_adjacency,
)
from torch_dpsco.errors import AdjacencyError, ConditionError, UnitError
from torch_dpsco.oracles.base import MeanOracle
from torch_dpsco.oracles.clipped import ClippedMean
from torch_dpsco.plan import Plan, exact_cost, passes
from torch_dpsco.prox import Ball, Identity, Prox
from torch_dpsco.rules import AVERAGES, SGD, Momentum, TorchRule, UpdateRule
from torch_dpsco.sampling.loader import capacity
from torch_dpsco.schedule import Phase, Schedule
from torch_dpsco.step import checks
from torch_dpsco.step.assembly import sizes_are_private
from torch_dpsco.step.payments import first_charges, planned_event
from torch_dpsco.step.step import PrivateOptimizer

SAMPLING: dict[str, type[Poisson] | type[Fixed] | type[Shuffled] | type[Assigned]] = {
    "poisson": Poisson,
    "fixed": Fixed,
    "shuffled": Shuffled,
    "assigned": Assigned,
    "allocated": Assigned,
}

_ABOVE = 6  # calls from a check of a plan up to who asks for the plan
_ABOUT = 1e-2  # relative accuracy of a number that is only shown
_STAGES = 10  # points of a curve over steps


@dataclass(frozen=True, kw_only=True)
class BatchPlan(Plan):
    """Public numbers of a run in batches.

    Args:
        design: how batches are drawn.
        average: which iterates are the answer: "last", "uniform" or "weighted".
        secure: "exact" for noise in integers on a public grid; None for floating point.
    """

    design: Design
    average: str = "last"
    secure: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.design, Undeclared):
            warn_of_delta(self.budget, self.n, stacklevel=_ABOVE)
        asks_exact(self.secure)  # raises for other words
        check.choice(AVERAGES, average=self.average)

    @property
    def n(self) -> int:
        """Public number of records (or users); a reference under add_remove."""
        return self.design.n

    @property
    def batch_size(self) -> int:
        """Public divisor of a step."""
        return self.design.batch_size


@dataclass(frozen=True, kw_only=True)
class StepPlan(BatchPlan):
    """Public numbers of a run of private steps, whose average is taken where no rule is given.

    Args:
        steps: number of steps; None for no limit but the budget.
        lr: step size, > 0.
        radius: of the ball that the iterates stay in; inf for none.
        reg: lambda of a term (lambda/2)|w|^2 that the other numbers count on.
        momentum: in [0, 1), see `rules.Momentum`; of the rule that is taken where none is given.
    """

    steps: int | None
    lr: float
    radius: float = math.inf
    reg: float = 0.0
    momentum: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check.positive(lr=self.lr)
        check.positive(radius=self.radius, allow_inf=True)
        check.nonnegative(reg=self.reg)
        below_one(momentum=self.momentum)
        if self.steps is not None:
            check.positive_count(steps=self.steps)

    @abstractmethod
    def oracle(self, prox: Prox) -> MeanOracle:
        """Returns a new oracle with the plan's numbers, for iterates that stay in the feasible set."""

    def rule(self) -> UpdateRule:
        """Returns the update rule that is taken where none is given."""
        return Momentum(self.average, self.momentum) if self.momentum else SGD(self.average)

    def prox(self) -> Prox:
        """Returns the constraint that is taken where none is given."""
        return Ball(self.radius) if math.isfinite(self.radius) else Identity()

    def schedule(self) -> Schedule:
        """Returns the phases of the run."""
        return Schedule((Phase(self.steps),))

    def event(self) -> Event:
        """Returns everything that the run charges, as `Plan.event`."""
        return self._event_until(self.steps)

    def stages(self) -> Iterator[tuple[int, Event]]:
        """Yields what a part of the steps charges; see `Plan.stages`."""
        if self.steps is None:
            self.event()  # raises
            return
        for made in sorted(
            {math.ceil(self.steps * k / _STAGES) for k in range(1, _STAGES + 1)} | {1}
        ):
            yield made, self._event_until(made)

    def noise_shares(self) -> Iterator[tuple[str, float, int | None]]:
        """Yields the noise on means of clipped rows, phase by phase; see `Plan.noise_shares`."""
        members = [
            member for member in self.oracle(self.prox()).members if isinstance(member, ClippedMean)
        ]
        for k, member in enumerate(members, 1):
            yield (
                "each step" if len(members) == 1 else f"phase {k}",
                member.noise_multiplier / member.batch_size,
                None,
            )

    def _event_until(self, steps: int | None) -> Event:
        oracle = self.oracle(self.prox())
        checks.require_same_parts(oracle, self.design, self.schedule())
        if asks_exact(self.secure):
            oracle.use_exact_noise()
        if any(charge.adaptive for charge in first_charges(oracle, self.design)):
            raise ConditionError("a step costs what the iterates before it make it cost")
        if steps is None:
            raise ConditionError("the run has no last step: give steps=")
        return planned_event(oracle, self.design, 0, steps, "planned")

    def otherwise(self) -> str:
        """Returns what other batches would cost, in words that follow those of `drawing`; see `otherwise`."""
        return ""

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yields what all such plans say; see `Plan.lines`."""
        yield "batches", drawing(self.design, self.unit) + self.otherwise()
        often = "steps until the budget is spent"
        if self.steps is not None:
            declared = not isinstance(self.design, Undeclared)
            over = f", {passes(_rows(self.design, self.steps) / self.design.n)}" if declared else ""
            often = f"{self.steps} steps{over}"
        pace = f"step size {self.lr:g}" + (
            f", momentum {self.momentum:.3g}" if self.momentum else ""
        )
        yield "steps", f"{often}, {pace}, answer: {ANSWERS[self.average]}"
        yield LABELS
        yield from costs(self.oracle(self.prox()), self.design, self.adjacency, self.secure)


LABELS = (
    "labels",
    "0/1, -1/1 and booleans are the same to dp.fit, dp.losses, dp.per_record (not to torch's own)",
)
ANSWERS = {
    "last": "the last iterate",
    "uniform": "the average of all iterates",
    "weighted": "an average weighted by step",
}


def costs(
    oracle: MeanOracle, design: Design, adjacency: str, secure: str | None
) -> Iterator[tuple[str, str]]:
    """Yields (label, text) of what filled batches and exact noise cost a run, where there are such.

    Args:
        oracle: a new one, whose noise is made exact.
        design: how batches are drawn.
        adjacency: of the guarantee.
        secure: whether noise is exact, as in `StepPlan`.
    """
    if sizes_are_private(design, adjacency, oracle.unit):
        units = "rows" if oracle.unit == "example" else f"places for {oracle.unit}s"
        yield (
            "filled",
            f"each draw is filled up to {capacity(design)} {units}, since its true size is private",
        )
    with suppress(ConditionError):  # there is none
        oracle.use_exact_noise()
        yield exact_cost(secure)


def noise_on_mean(share: float, bound: float, where: str = "") -> tuple[str, str]:
    """Returns (label, text) of noise whose std is a share of the bound on a mean gradient."""
    gradient = f"a mean gradient of norm at most {bound:.3g}{where}"
    return "noise", f"std {share * bound:.3g} per coordinate of {gradient}: {share:.2g} of it"


def otherwise(budget: Budget | None, design: Design, steps: int | None, noise: float) -> str:
    """Returns in words the noise multiplier that the budget asks for in other batches; "" where nothing is to be said.

    Args:
        budget: of the run; None, or one that is stated as a risk, says nothing.
        design: how batches are drawn that move the iterate.
        steps: number of steps.
        noise: noise multiplier of these batches.
    """
    if budget is None or budget.risk or steps is None or isinstance(design, (Undeclared, Full)):
        return ""
    if isinstance(design, (Shuffled, Disjoint)):
        other = "sampling='poisson'"
        needed = noise_for(budget, Poisson(design.batch_size, design.n), steps, rtol=_ABOUT)
    else:
        other = "shuffled passes" if budget.adjacency != ADD_REMOVE else "passes in known batches"
        needed = release_noise(budget) * math.sqrt(math.ceil(steps / design.batches))
    return f"; {other} would need noise {needed:.3g} in place of {noise:.3g}"


def drawing(design: Design, unit: str) -> str:
    """Returns in words how batches of a unit are drawn."""
    if isinstance(design, Undeclared):
        return (
            f"{design.batch_size} {unit}s each; how they are drawn is not declared, so that nothing"
            " is gained by it"
        )
    if isinstance(design, Parts):
        parts = "; then ".join(drawing(part, unit) for part, _ in design.parts)
        return f"{parts}; no {unit} is in two of these parts"
    if isinstance(design, Full):
        return f"all {design.n} {unit}s"
    if isinstance(design, Assigned) and design.amplification:
        batches = (
            f"one of {design.batches} batches of each pass, of {design.n / design.batches:.3g}"
            f" {unit}s on average"
        )
        return (
            f"random allocation: each {unit} in {batches}; who is where, and true sizes, are secret"
        )
    if isinstance(design, Assigned):
        return (
            f"each {unit} in one of {design.batches} batches, of about {design.batch_size}; nothing"
            " is gained by it"
        )
    return f"{type(design).__name__}: {design.batch_size} of {design.n} {unit}s"


def _rows(design: Design, steps: int) -> float:
    """Returns the expected rows of so many steps, of all steps in parts."""
    if isinstance(design, Parts):
        return sum(_rows(part, draws) for part, draws in design.parts)
    if isinstance(design, Assigned):  # batch_size is a divisor, about what a batch holds
        return steps * design.n / design.batches
    return steps * design.batch_size


class FromPlan:
    """Mixin of optimizers that are made from a plan: arguments from the time before plans are refused by name."""

    plans: ClassVar[type[Plan]]  # what this class runs

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
                f"{', '.join(moved)} must be given to {name}.plan(...), and its plan to the"
                f" optimizer: {name}(params, {name}.plan(...))"
            )
        if type(plan) is not cls.plans:
            raise ValueError(
                f"plan must be made by {name}.plan(...): {name}(params, {name}.plan(...)) (got"
                f" {shown(plan)})"
            )
        if accountant is None:
            return plan.ledger()
        if plan.budget is not None:
            checks.require_budget(accountant, plan.budget)
        return accountant


class PlannedOptimizer(FromPlan, PrivateOptimizer):
    """Base of the named optimizers that make private steps: a plan in, everything else follows.

    Args:
        params: parameters or groups; all of them count as one vector.
        plan: from the class's own `plan`.
        rule: another update rule, e.g. `rules.TorchRule(torch.optim.Adam(...))`; it has averages of its own.
        prox: constraint or penalty, in place of the plan's.
        reg: lambda of (lambda/2)|w|^2, see `PrivateOptimizer`; default the plan's.
        accountant: ledger to charge; default a new one with the plan's budget.
        generator: noise generator of your own (warns).
    """

    plans: ClassVar[type[StepPlan]]
    _fixed = PrivateOptimizer._fixed | {"plan"}

    def __init__(
        self,
        params: Any,
        plan: Any = None,
        *,
        rule: UpdateRule | None = None,
        prox: Prox | None = None,
        reg: float | None = None,
        accountant: Accountant | None = None,
        generator: torch.Generator | None = None,
        **moved: Any,
    ) -> None:
        accountant = self._ledger(plan, moved, accountant)
        prox = plan.prox() if prox is None else prox
        self._plan = self.__dict__["plan"] = (
            plan  # over the class method: optimizer.plan is what it has made
        )
        super().__init__(
            params,
            plan.lr,
            oracle=self._oracle(plan, prox),
            rule=plan.rule() if rule is None else rule,
            design=plan.design,
            schedule=plan.schedule(),
            prox=prox,
            reg=plan.reg if reg is None else reg,
            accountant=accountant,
            adjacency=plan.adjacency,
            generator=generator,
            secure=plan.secure,
        )
        if getattr(plan, "risk_bound", None) is None:
            return  # as for most nets: there is no theorem to void
        self._lrs = checks.rates(self.param_groups)
        if isinstance(rule, TorchRule) and not rule.plain:
            checks.warn_of_void_theorem(
                f"{type(rule.optimizer).__name__} on private means is post-processing", 3
            )

    def _oracle(self, plan: StepPlan, prox: Prox) -> MeanOracle:
        """Returns the plan's oracle; classes whose oracle has tensors, which no plan holds, add them here."""
        return plan.oracle(prox)


def agreed_adjacency(
    adjacency: Adjacency | None, budget: Budget | None, unit: str = "example"
) -> Adjacency:
    """Returns the adjacency of a plan: the budget's, or "replace_one" where nothing is said.

    Raises:
        UnitError: the budget protects another unit.
        AdjacencyError: it is of another adjacency.
    """
    if budget is None:
        return check_adjacency(adjacency or REPLACE_ONE)
    if budget.unit != unit:
        raise UnitError(
            f"budget must be of unit {unit!r}: Budget(..., unit={unit!r}) (got {budget.unit!r})"
        )
    if adjacency not in (None, budget.adjacency):
        raise AdjacencyError(
            f"adjacency must be {budget.adjacency!r}, the budget's, or None (got {adjacency!r})"
        )
    return budget.adjacency


def sampled(
    sampling: str | Design, batch_size: int | None, n: int | None, adjacency: Adjacency
) -> Design:
    """Returns the design of a word and its numbers; without n none is claimed.

    Args:
        sampling: "poisson", "fixed", "shuffled", "assigned" (one pass), "allocated" (see `in_passes`) or "full"; or a
            design, which has its numbers.
        batch_size: expected size of a batch; None for that of the design, or for n.
        n: public number of records.
        adjacency: of the guarantee.
    """
    if isinstance(sampling, Design):
        if batch_size not in (None, sampling.batch_size):
            raise ValueError(
                f"batch_size must be {sampling.batch_size}, that of {sampling} (got {batch_size})"
            )
        return checks.declared(sampling, n, sampling.batch_size)
    check.choice((*SAMPLING, "full"), sampling=sampling)
    if n is None:
        if adjacency == ADD_REMOVE:
            raise AdjacencyError("n must be given under add_remove: a public number, for reference")
        if batch_size is None:
            raise ValueError("batch_size must be given where n is not")
        return checks.declared(None, None, batch_size)
    if sampling == "full":
        if batch_size not in (None, n):
            raise ValueError(f"batch_size must be n={n} for full batches (got {batch_size})")
        return Full(n)
    return SAMPLING[sampling](n if batch_size is None else batch_size, n)


def in_passes(
    design: Design,
    sampling: str | Design,
    steps: int | None,
    epochs: float | None,
    default: float | None,
) -> Design:
    """Returns an "allocated" design with as many passes as the steps, or epochs, need; others as they are."""
    if sampling != "allocated" or not isinstance(design, Assigned):
        return design
    if steps is not None:
        return replace(design, passes=math.ceil(check.positive_count(steps=steps) / design.batches))
    passes = default if epochs is None else epochs
    if passes is None:
        raise ValueError(
            "epochs or steps must be given for sampling='allocated': passes are fixed before the"
            " first"
        )
    return replace(design, passes=math.ceil(check.positive(epochs=passes)))


def steps_of(
    design: Design,
    steps: int | None,
    epochs: float | None,
    default: float | None,
    *,
    once: bool = False,
) -> int | None:
    """Returns the number of steps: given, or of so many passes; None where neither is and there is no default.

    Designs of one pass, or of passes that are counted, have these as default, and no more. `once`: no other
    sampling can be advised, since all runs are of one pass.
    """
    if steps is not None and epochs is not None:
        raise ValueError(f"steps and epochs must not be given both (got {steps} and {epochs})")
    if steps is None:
        passes = default if epochs is None else epochs
        if epochs is None and design.one_pass:
            return design.steps_per_epoch
        if passes is None:
            return None
        steps = calibrate.epoch_steps(design, passes)
    if design.one_pass and steps > design.steps_per_epoch:
        passed = "one pass" if getattr(design, "passes", 1) == 1 else "the passes"
        more = "" if once else ": for more passes take sampling='allocated' or 'poisson'"
        raise ValueError(
            f"steps must be <= {design.steps_per_epoch}, {passed} of {design} (got {steps}){more}"
        )
    return check.positive_count(steps=steps)


def quietest(design: Design, steps: int | None) -> Design:
    """Returns the design of about the least noise for steps on these batches, which plans take where none is given.

    Args:
        design: Poisson batches; others are returned as they are.
        steps: number of steps; None for no limit.

    Returns:
        All records, where a batch holds them; random allocation for exactly one pass, where it has up to 17 % less
        noise; else Poisson batches: in several passes random allocation differs from them by a few per cent (by a tenth
        in large batches at large epsilon), and takes far longer to calibrate.
    """
    if not isinstance(design, Poisson):
        return design
    if design.batch_size == design.n:
        return Full(design.n)
    return Assigned(design.batch_size, design.n) if steps == design.batches else design


def drawn(
    sampling: str | Design | None,
    batch_size: int | None,
    n: int | None,
    adjacency: Adjacency,
    steps: int | None,
    epochs: float | None,
    default: float | None,
) -> tuple[Design, int | None]:
    """Returns the design, by `quietest` where no sampling is given, and the number of steps; see `steps_of`."""
    word = sampling or "poisson"
    design = in_passes(sampled(word, batch_size, n, adjacency), word, steps, epochs, default)
    made = steps_of(design, steps, epochs, default)
    return (design if sampling else quietest(design, made)), made


def noise_for(budget: Budget, design: Design, steps: int | None, rtol: float = 1e-4) -> float:
    """Returns the least noise multiplier at which these steps fit the budget, up to rtol."""
    return calibrate.noise_multiplier(
        budget.epsilon,
        budget.delta,
        design=design,
        steps=steps,
        adjacency=budget.adjacency,
        rtol=rtol,
    )


def release_noise(budget: Budget) -> float:
    """Returns the noise multiplier at which one unsampled clipped mean spends the whole budget."""
    return noise_for(budget, Full(1), 1)


def given_noise(
    noise_multiplier: float | None, budget: Budget | None, design: Design, steps: int | None
) -> float:
    """Returns the noise multiplier that is given, or else `noise_for` the budget."""
    if noise_multiplier is not None:
        return check.nonnegative(noise_multiplier=noise_multiplier)
    if budget is None:
        raise ValueError(
            "budget or noise_multiplier must be given: the target, or noise of your own"
        )
    return noise_for(budget, design, steps)


def dimension(dim: Any) -> int | None:
    """Returns the number of parameters: a number, or a model or parameters that are counted; None for None."""
    if dim is None:
        return None
    if isinstance(dim, (int, float)):
        return int(check.positive_count(dim=dim))
    try:
        items = checks.listed(dim.parameters() if isinstance(dim, torch.nn.Module) else dim)
    except ValueError as error:
        raise ValueError(
            f"dim must be the number of parameters, or a model or parameters (got {shown(dim)})"
        ) from error
    tensors = [p for g in items for p in (g["params"] if isinstance(g, dict) else [g])]
    return max(1, sum(int((p[1] if isinstance(p, tuple) else p).numel()) for p in tensors))
