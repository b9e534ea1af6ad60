"""What was spent, in words that can be quoted: epsilon per adjacency, unit, events and assumptions."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import ROUND_CEILING, Context

from torch_dpsco.accounting.events import (
    ADD_REMOVE,
    ADJACENCIES,
    REPLACE_ONE,
    ZERO_OUT,
    Adjacency,
    PoissonGaussian,
    WORGaussian,
)
from torch_dpsco.accounting.filters import Budget
from torch_dpsco.accounting.ledger import Ledger
from torch_dpsco.errors import AdjacencyError

__all__ = ["PrivacyReport", "make_report", "rounded_up"]

_MEANING = {
    ADD_REMOVE: "the data set has one {unit} more or less",
    ZERO_OUT: "one {unit} is replaced by a null record",
    REPLACE_ONE: "one {unit} is replaced by any other",
}


def rounded_up(value: float, digits: int = 4) -> str:
    """Returns the value >= 0 with that many significant digits (1 to 15), never less than it is.

    Example:
        >>> rounded_up(0.99991), rounded_up(1e-5), rounded_up(float("inf"))
        ('1', '1e-05', 'inf')
    """
    # PRIVACY: printed figures are quoted, and typed in again as a budget (test_no_printed_epsilon_is_rounded_down)
    exact = Context(prec=digits, rounding=ROUND_CEILING).create_decimal(repr(float(value)))
    return f"{float(exact):.{digits}g}"


@dataclass(frozen=True)
class PrivacyReport:
    """Epsilon spent at delta under each adjacency that all events support.

    Args:
        epsilons: epsilon per adjacency.
        delta: the delta of all figures.
        adjacency: the adjacency of the guarantee (the others are information).
        unit: what one record is.
        method: how the guarantee's epsilon was computed, with its Renyi order if any.
        events: one line per kind of event.
        assumptions: what must hold for the figures to be true.
        budget: the budget, if there is one.
    """

    epsilons: dict[Adjacency, float]
    delta: float
    adjacency: Adjacency
    unit: str
    method: str
    events: tuple[str, ...]
    assumptions: tuple[str, ...]
    budget: Budget | None

    @property
    def epsilon(self) -> float:
        """Epsilon of the guarantee."""
        return self.epsilons[self.adjacency]

    def __str__(self) -> str:
        lines = [
            f"({rounded_up(self.epsilon)}, {rounded_up(self.delta)})-differential privacy, {self.adjacency}: "
            f"{_MEANING[self.adjacency].format(unit=self.unit)} ({self.method})"
        ]
        if self.budget is not None:
            lines.append(f"  budget: epsilon {self.budget.epsilon:g} at delta {self.budget.delta:g}")
        lines += [f"  {name}: epsilon {rounded_up(e)}" for name, e in self.epsilons.items() if name != self.adjacency]
        lines += [f"  event: {line}" for line in self.events]
        lines += [f"  assumes: {line}" for line in self.assumptions]
        return "\n".join(lines)


def _assumptions(ledger: Ledger, unit: str) -> tuple[str, ...]:
    events = {type(event) for _, _, event, _ in ledger.entries()}
    lines = [f"one record per {unit}", "noise, rates and number of steps fixed before the run"]
    if PoissonGaussian in events:
        lines.append("batches drawn by the optimizer's own Poisson loader, kept secret")
    if WORGaussian in events:
        lines.append("batches drawn by the optimizer's own fixed-size loader, kept secret; public data set size")
    if any(partition for partition, _, _, _ in ledger.entries()):
        lines.append("parts cut by the optimizer's own loader, independently of the data; public data set size")
    lines.append("ideal Gaussian noise (floating-point attacks on the noise are out of scope)")
    return tuple(lines)


def make_report(ledger: Ledger, delta: float, adjacency: Adjacency, unit: str, budget: Budget | None) -> PrivacyReport:
    """Builds the report of a ledger; raises AdjacencyError if its own adjacency is not supported by all events."""
    evaluation = ledger.evaluate(delta, adjacency)
    epsilons = {adjacency: evaluation.epsilon}
    for other in ADJACENCIES:
        try:
            epsilons.setdefault(other, ledger.epsilon(delta, other))
        except AdjacencyError:  # an event has no guarantee there: the report leaves the line out
            continue
    method = evaluation.method if evaluation.order is None else f"{evaluation.method}, order {evaluation.order:.4g}"
    return PrivacyReport(
        epsilons=epsilons,
        delta=delta,
        adjacency=adjacency,
        unit=unit,
        method=method,
        events=tuple(ledger.describe()),
        assumptions=_assumptions(ledger, unit),
        budget=budget,
    )
