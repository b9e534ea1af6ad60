"""What was spent, in numbers that can be quoted: epsilon per adjacency, unit, events and assumptions.

`torch_dpsco.accounting.statement` puts them into plain words: sentences with blanks (sentences.toml), of which each
says what must be true of the ledger for it to be said.
"""

from __future__ import annotations

import math
import tomllib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np

from torch_dpsco import _validate as check
from torch_dpsco import shown
from torch_dpsco.accounting.analysis.risk import Risk
from torch_dpsco.accounting.analysis.rounding import upper
from torch_dpsco.accounting.budgets import Budget, adaptive_epsilon, quoted
from torch_dpsco.accounting.calibrate import rounded_up
from torch_dpsco.accounting.curves import cost_of
from torch_dpsco.accounting.designs import BaseEvent, Design
from torch_dpsco.accounting.events import (
    ADD_REMOVE,
    ADJACENCIES,
    REPLACE_ONE,
    ZCDP,
    ZERO_OUT,
    Adjacency,
    ApproxDP,
    Event,
    Failure,
    Gaussian,
    NonPrivate,
    Parallel,
    PoissonGaussian,
    RandomAllocation,
    Repeat,
    SimpleEvent,
    WORGaussian,
    in_words,
)
from torch_dpsco.accounting.ledger import Ledger
from torch_dpsco.errors import AdjacencyError, InfeasibleError

_MEANING = {
    ADD_REMOVE: "the data set has one {unit} more or less",
    ZERO_OUT: "one {unit} is replaced by a null record",
    REPLACE_ONE: "one {unit} is replaced by any other",
}
_SLACK = 1.0 + 1e-14  # more than the rounding of the few operations below


def group_guarantee(epsilon: float, delta: float, size: int) -> tuple[float, float]:
    """Returns (k epsilon, k e^((k-1) epsilon) delta), which holds for k records where (epsilon, delta) holds for one.

    Proof. Change the records one by one: P_0(S) <= e^epsilon P_1(S) + delta <= .. <= e^(k epsilon) P_k(S) + delta
    (1 + e^epsilon + .. + e^((k-1) epsilon)), and each of the k terms is at most the last.

    Args:
        epsilon: >= 0, inf allowed.
        delta: in [0, 1].
        size: k >= 1.

    Returns:
        Both figures, rounded up; a delta of 1.0 is no guarantee.

    Example:
        >>> group_guarantee(1.0, 1e-5, 1)[0] >= 1.0, round(group_guarantee(1.0, 1e-5, 3)[1], 6)
        (True, 0.000222)
    """
    epsilon = check.nonnegative(epsilon=epsilon, allow_inf=True)
    delta = check.between(0.0, 1.0, delta=delta)
    k = check.positive_count(size=size)
    if delta == 0:
        return upper(k, epsilon), 0.0  # 2 x 1 is printed as 2
    exponent = math.log(k) + (k - 1) * epsilon if k > 1 else 0.0
    log_delta = exponent + math.log(delta)
    # the rounding of log_delta is relative to its terms, and that of exp(log_delta) is absolute in log_delta
    rounding = 1e-15 * (exponent + abs(math.log(delta)))
    return k * epsilon * _SLACK, (
        1.0 if log_delta >= 0 else min(1.0, math.exp(log_delta + rounding) * _SLACK)
    )


@dataclass(frozen=True)
class Charge:
    """Equal events of a ledger in one line.

    Args:
        event: the event.
        count: how often; for parts the largest number on one of them.
        passes: number of partitions of the data into disjoint parts; 0 for events that touch all records.
        parts: parts of each pass that were charged with it; 0 for events that touch all records.
    """

    event: SimpleEvent
    count: int
    passes: int = 0
    parts: int = 0

    def __str__(self) -> str:
        if not self.passes:
            return f"{self.count} x {self.event}"
        if self.passes == self.parts == 1:
            return f"on one part of the data, {self.count} x {self.event}"
        times = "1 pass" if self.passes == 1 else f"{self.passes} passes"
        parts = "1 disjoint part" if self.parts == 1 else f"{self.parts} disjoint parts, on each"
        return f"{times} over {parts} at most {self.count} x {self.event}"


@dataclass(frozen=True)
class Run:
    """What is public about a run.

    Args:
        name: of the optimizer's class.
        design: how batches are drawn.
        event: of one step on a given batch, without sampling (`MeanOracle.event`), or of the only release.
        steps: made so far, >= 0.
        planned: steps declared in advance; None if they were not.
        finalized: whether the answer was installed, so that no step can follow.
        assumptions: what its oracle assumes beyond what all do; "{units}" stands for what is protected.
        repeatable: whether the noise comes from a generator of the caller's.
    """

    name: str
    design: Design
    event: BaseEvent
    steps: int
    planned: int | None
    finalized: bool
    assumptions: tuple[str, ...] = ()
    repeatable: bool = False

    @property
    def unfinished(self) -> int:
        """Planned steps that were not made."""
        return max(0, (self.planned or 0) - self.steps)

    def ahead(self) -> Event | None:
        """Returns the event of the planned steps that were not made; None without a plan."""
        if self.planned is None or not isinstance(self.event, (Gaussian, NonPrivate)):
            return None
        last = self.design.steps_per_epoch if self.design.one_pass else self.planned
        whole = self.design.event(self.event, max(min(self.planned, last), self.steps))
        done = self.design.event(self.event, self.steps)
        if isinstance(whole, Repeat) and isinstance(done, Repeat) and whole.event == done.event:
            return Repeat(whole.event, whole.n - done.n)
        return self.design.event(self.event, self.unfinished)


@dataclass(frozen=True)
class OneRelease(Run):
    """What is public about a run that releases its final answer only."""

    def ahead(self) -> Event | None:
        """Returns the event of the release, as long as it was not made."""
        return None if self.finalized else self.event


@dataclass(frozen=True)
class OneFit(OneRelease):
    """What is public about a fit in one call, as of an estimator: it has no steps and no `finalize()` to call."""


@dataclass(frozen=True)
class StudyRun(OneFit):
    """What is public about a study, in which a model is fitted to some units and measured on the others.

    Args:
        held: expected number of those others.
        released: all of it, in words.
        model: in words.
        score: in words, with its error.
    """

    held: int = 0
    released: tuple[str, ...] = ()
    model: str = ""
    score: str = ""


@dataclass(frozen=True)
class PrivacyReport:
    """Epsilon spent at delta under each adjacency that all events support.

    Args:
        epsilons: epsilon per adjacency.
        delta: the delta of all figures; 0 is pure differential privacy.
        adjacency: the adjacency of the guarantee (the others are information).
        unit: what one record is.
        method: how the guarantee's epsilon was computed, with its Renyi order if any.
        charges: what was charged, one per kind of event.
        assumptions: what must hold for the figures to be true.
        budget: the budget, if there is one.
        planned_epsilon: epsilon of the guarantee once the events still planned are made, if there is a plan.
        ledger_id: random name of the ledger, as its file and checkpoints have it.
        spent: (event, count) of the ledger; empty where sums of events bound nothing, because parameters were chosen on
            the way.
        named_unit: what sentences call one unit, and several; empty for `unit` itself (see `Statement.named`).
        rows_of_unit: why one row is one unit of that name, "promised" or "kept"; empty for users, and without a name.
    """

    epsilons: dict[Adjacency, float]
    delta: float
    adjacency: Adjacency
    unit: str
    method: str
    charges: tuple[Charge, ...]
    assumptions: tuple[str, ...]
    budget: Budget | None
    planned_epsilon: float | None = None
    ledger_id: str = field(default="", compare=False)
    spent: tuple[tuple[Event, int], ...] = field(default=(), compare=False, repr=False)
    named_unit: tuple[str, ...] = ()
    rows_of_unit: str = ""

    @property
    def in_words(self) -> str:
        """The adjacency, with what happens to the one record in which neighbors differ."""
        return in_words(self.adjacency)

    @property
    def unit_name(self) -> str:
        """What sentences call one unit."""
        return self.named_unit[0] if self.named_unit else self.unit

    @property
    def unit_names(self) -> str:
        """What sentences call several units."""
        return self.named_unit[1] if self.named_unit else f"{self.unit}s"

    @property
    def proviso(self) -> str:
        """What a headline adds where somebody promises that one row is one unit; "" elsewhere."""
        return f", if each {self.unit_name} has one row" if self.rows_of_unit == PROMISED else ""

    @property
    def epsilon(self) -> float:
        """Epsilon of the guarantee."""
        return self.epsilons[self.adjacency]

    @property
    def advantage(self) -> float:
        """Bound of (true - false positive rate) of any test which of two neighboring data sets was used.

        From the whole privacy curve: at most that of epsilon and delta alone, and often far less.
        """
        alone = Risk.of_point(self.epsilon, self.delta)
        return min(alone.advantage, self.risk().advantage)

    def risk(self) -> Risk:
        """Returns what a test can find out about one unit; in adaptive modes from epsilon and delta alone."""
        if not self.charges:
            return Risk.of_point(0.0, 0.0)
        if not self.spent:
            return Risk.of_point(self.epsilon, self.delta)
        return Ledger(Repeat(event, count) for event, count in self.spent).risk(self.adjacency)

    @property
    def events(self) -> tuple[str, ...]:
        """One line per kind of event."""
        return tuple(map(str, self.charges))

    def __repr__(self) -> str:
        return shown.line(
            self,
            f"({rounded_up(self.epsilon)}, {rounded_up(self.delta)})-differential privacy for one"
            f" {self.unit_name} ({self.adjacency}){self.proviso}",
        )

    def _repr_html_(self) -> str:
        rows = [(name, f"epsilon {rounded_up(e)}") for name, e in self.epsilons.items()]
        return shown.table(repr(self)[1:-1], [*rows, ("method", self.method)], str(self))

    def __str__(self) -> str:
        lines = [
            f"({rounded_up(self.epsilon)}, {rounded_up(self.delta)})-differential privacy,"
            f" {self.adjacency}:"
            f" {_MEANING[self.adjacency].format(unit=self.unit_name)}{self.proviso} ({self.method})"
        ]
        if self.budget is not None:
            lines.append(f"  budget: {self.budget.target}")
        lines += [
            f"  {name}: epsilon {rounded_up(e)}"
            for name, e in self.epsilons.items()
            if name != self.adjacency
        ]
        lines += [f"  event: {line}" for line in self.events]
        lines += [f"  assumes: {line}" for line in self.assumptions]
        lines += [f"  ledger: {self.ledger_id}"] if self.ledger_id else []
        return "\n".join(lines)


def _assumptions(
    ledger: Ledger, unit: str, adjacency: Adjacency, adaptive: bool
) -> tuple[str, ...]:
    events = (event for _, _, event, _ in ledger.entries())
    parallel = (event for event, _ in ledger.events() if isinstance(event, Parallel))
    partitions = {(event.partition, event.partition_kind) for event in parallel}
    words = Words(charged(events, adjacency, partitions) | {"adaptive": adaptive})
    return (whose(unit, unit), *words.said("assumed"))


def _charges(ledger: Ledger) -> tuple[Charge, ...]:
    whole: list[Charge] = []
    parts: dict[tuple[str, SimpleEvent], list[int]] = {}  # how often, on each part
    for partition, _, event, count in ledger.entries():
        if partition:
            parts.setdefault((partition, event), []).append(count)
        else:
            whole.append(Charge(event, count))
    passes = Counter((event, max(counts), len(counts)) for (_, event), counts in parts.items())
    return (
        *whole,
        *(Charge(event, count, times, size) for (event, count, size), times in passes.items()),
    )


def make_report(
    ledger: Ledger,
    delta: float,
    adjacency: Adjacency,
    unit: str,
    budget: Budget | None,
    ahead: Event | None = None,
    *,
    adaptive: bool = False,
    ledger_id: str = "",
) -> PrivacyReport:
    """Builds the report of a ledger.

    Args:
        ledger: what was charged.
        delta: in [0, 1).
        adjacency: that of the guarantee.
        unit: what one record is.
        budget: the budget, if there is one.
        ahead: event of what is still planned, if there is a plan.
        adaptive: whether parameters may depend on what was released.
        ledger_id: random name of the ledger.

    Raises:
        AdjacencyError: some event has no guarantee under `adjacency`.
        InfeasibleError: delta is 0 and some event has no pure epsilon under `adjacency`.
    """
    evaluation = ledger.evaluate(delta, adjacency)
    at = (
        partial(adaptive_epsilon, ledger, delta)
        if adaptive
        else partial(_composed, ledger, delta)
    )
    epsilons = {adjacency: at(adjacency, budget)}
    for other in ADJACENCIES:
        # an event may have no guarantee there: the report leaves the line out
        with suppress(AdjacencyError, InfeasibleError):
            epsilons.setdefault(other, at(other, budget))
    found = PrivacyReport(
        epsilons=epsilons,
        delta=delta,
        adjacency=adjacency,
        unit=unit,
        method="filter or odometer, parameters may depend on what was released",
        charges=_charges(ledger),
        assumptions=_assumptions(ledger, unit, adjacency, adaptive),
        budget=budget,
        ledger_id=ledger_id,
    )
    if adaptive:  # PRIVACY: sums of events bound nothing (test_an_adaptive_card_draws_no_sums)
        return found
    order = "" if evaluation.order is None else f", order {evaluation.order:.4g}"
    planned = None if ahead is None else ledger.evaluate(delta, adjacency, extra=ahead).epsilon
    return replace(
        found,
        method=f"{evaluation.method}{order}",
        planned_epsilon=planned,
        spent=tuple(ledger.events()),
    )


def _composed(
    ledger: Ledger, delta: float, adjacency: Adjacency, budget: Budget | None
) -> float:
    return quoted(ledger.epsilon(delta, adjacency), delta, budget)


class Spent(NamedTuple):
    """What was spent so far.

    Args:
        epsilon: at delta, under the accountant's adjacency.
        delta: that of the budget.
    """

    epsilon: float
    delta: float


PROMISED, KEPT = (
    "promised",
    "kept",
)  # why one row is one unit: somebody says so, or one row of each id was kept


def whose(unit: str, name: str, rows: str = "") -> str:
    """Returns what must hold for one unit to be all that is said to be protected."""
    by_row = unit == "example" and rows != KEPT
    return (
        f"one record per {name}"
        if by_row
        else f"all rows of a {name} carry its id, and no other does"
    )


def rows_of(unit: str, one_row_per_unit: bool, by_ids: bool) -> str:
    """Returns why one row is one named unit; "" where units are users.

    Raises:
        ValueError: not one reason for rows, or one for users.
    """
    if unit != "example":
        if one_row_per_unit or by_ids:
            raise ValueError(
                "one_row_per_unit and by_ids must be left out where users are protected, by"
                " their ids"
            )
        return ""
    # PRIVACY: rows are protected, and a name says more (test_a_row_gets_a_name_by_ids_or_by_a_promise)
    if one_row_per_unit == by_ids:
        raise ValueError(
            "one_row_per_unit must be True if each unit has one row, or by_ids if one row of each"
            f" was kept by its id (got {'both' if by_ids else 'neither'}): a report that protects"
            " rows protects no unit with several"
        )
    return KEPT if by_ids else PROMISED


def names_of(unit: str, plural: str | None) -> tuple[str, str]:
    """Returns the names, fit for a card; the regular plural for None.

    Raises:
        ValueError: a name has other characters than letters, digits, spaces, hyphens and apostrophes, or none.

    Example:
        >>> names_of("company", None)
        ('company', 'companies')
    """
    name = _checked("unit", unit)
    return name, _plural(name) if plural is None else _checked("plural", plural)


def _checked(argument: str, given: str) -> str:
    text = given.strip()
    if not text or not all(letter.isalnum() or letter in " -'" for letter in text):
        raise ValueError(
            f"{argument} must be of letters, digits, spaces, hyphens and apostrophes (got"
            f" {given!r})"
        )
    return text


_IRREGULAR = {"child": "children", "man": "men", "woman": "women"}


def _plural(name: str) -> str:
    rest, space, last = name.rpartition(" ")
    if last in _IRREGULAR:
        return f"{rest}{space}{_IRREGULAR[last]}"
    if name.endswith("y") and name[-2:-1] not in "aeiou":
        return f"{name[:-1]}ies"
    return f"{name}es" if name.endswith(("s", "x", "ch", "sh")) else f"{name}s"


# how partitions of random allocation and of studies are named
ASSIGNED = "assigned/"
HELD = "held/"
_GAUSSIANS = (Gaussian, PoissonGaussian, WORGaussian, RandomAllocation)


class Sentence(NamedTuple):
    """A text with blanks, and when it is said.

    Args:
        when: words that must be true; "!" before a word is "not".
        text: the sentence.
        each: name of a list, for each item of which it is said once; "" for once.
    """

    when: str
    text: str
    each: str = ""


@cache
def sentences_of(*place: str) -> tuple[Sentence, ...]:
    """Returns the sentences of a part of sentences.toml, whose line breaks are spaces."""
    part = sentence_file()
    for name in place:
        part = part[name]
    return tuple(Sentence(when, text.replace("\n", " "), *each) for when, text, *each in part)


@cache
def sentence_file() -> Any:
    """Returns sentences.toml."""
    text = Path(__file__).with_name("sentences.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


@dataclass(frozen=True)
class Words:
    """What is true, and what fills the blanks of sentences.

    Args:
        facts: what each word that a `when` may have says, if true, and what blanks that are no phrases stand for.
    """

    facts: Mapping[str, Any]

    def holds(self, sentence: Sentence) -> bool:
        """Returns whether a sentence may be said."""
        words = sentence.when.split()
        return all(bool(self.facts[word.lstrip("!")]) != word.startswith("!") for word in words)

    def said(self, *place: str) -> Iterator[str]:
        """Yields the sentences of a part of the file that may be said, without blanks."""
        for sentence in filter(self.holds, sentences_of(*place)):
            for item in self.facts[sentence.each] if sentence.each else ("",):
                yield sentence.text.format_map(Words({**self.facts, "each": item}))

    def __getitem__(self, blank: str) -> Any:
        if blank in self.facts:
            return self.facts[blank]
        return next(self.said("phrases", blank))


def charged(
    events: Iterable[SimpleEvent],
    adjacency: Adjacency,
    partitions: Collection[tuple[str, str]] = (),
) -> dict[str, bool]:
    """Returns what is true of a ledger.

    Args:
        events: that were charged, each once or more often.
        adjacency: of the guarantee.
        partitions: (name, kind) of each, as of `events.Parallel`.
    """
    costs = {event: cost_of(event, adjacency) for event in events}
    kinds = {kind.__name__: False for kind in get_args(SimpleEvent)}
    kinds.update((type(event).__name__, True) for event in costs)
    gaussians = [event for event in costs if isinstance(event, _GAUSSIANS)]
    # PRIVACY: one release of floating-point noise is enough (test_mixed_ledgers_keep_the_sentence); `GDP` does not tell
    ideal = kinds["GDP"] or not all(event.exact for event in gaussians)
    # a premise of some release may fail
    fails = any(
        event.failure if isinstance(event, Gaussian) else event.probability
        for event in costs
        if isinstance(event, (Gaussian, Failure))
    )
    # nothing is known of some delta but its size: the release may disclose all with that probability
    stated = any(event.delta for event in costs if isinstance(event, (ApproxDP, ZCDP)))
    # where a ratio of probabilities has no bound, each larger one is passed more rarely, which one finite Renyi
    # divergence implies
    impure = [event for event, cost in costs.items() if math.isinf(cost.pure)]
    graded = all(np.isfinite(cost.rdp).any() for cost in costs.values())
    curved = bool(impure) and graded and not (fails or stated)
    cut = {kind for name, kind in partitions if not name.startswith((ASSIGNED, HELD))}
    return kinds | {
        # PRIVACY: bits come from a cipher, those of exact noise too
        # (test_each_sentence_is_printed_if_the_ledger_implies_it_and_only_then)
        "noisy": any(not isinstance(event, (NonPrivate, Failure)) for event in costs),
        "exact": any(event.exact for event in gaussians),
        "ideal": ideal,
        "laplace_noise": kinds["Laplace"] or kinds["AboveThreshold"],
        "fails": fails,
        "stated": stated,
        "curved": curved,
        "all_gaussian": curved and all(isinstance(event, _GAUSSIANS) for event in impure),
        "all_pure": bool(costs) and not (impure or fails or stated),
        "assigned_parts": any(name.startswith(ASSIGNED) for name, _ in partitions),
        "held_parts": any(name.startswith(HELD) for name, _ in partitions),
        "positional_parts": "positional" in cut,
        "keyed_parts": "keyed" in cut,
    }
