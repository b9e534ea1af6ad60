"""Sums of pure epsilons: what answers a question at delta = 0.

Let event t have P_t(S) <= e^(eps_t) Q_t(S) for every set S, whatever was released before it. Then the density ratio of
the whole run is at most the product of the e^(eps_t) along its path: if their sum stays within a number fixed in
advance, on every path, that number is the run's pure epsilon, whatever rule chose the events and the stop. A differing
record lies in one part of a partition, so that of its parts the largest sum counts. No other conversion has a finite
answer at delta = 0, and a failure probability is a delta.

Sums are exact, in rational numbers, and rounded once, to the nearest float.

Source: docs/proofs/accounting.md#pure-sums.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction

from torch_dpsco.accounting.adjacency import Adjacency
from torch_dpsco.accounting.curves import cost_of
from torch_dpsco.accounting.events import SimpleEvent

_Places = Mapping[tuple[str, str], Mapping[SimpleEvent, int]]


def pure_epsilon(event: SimpleEvent, adjacency: Adjacency) -> float:
    """Returns the pure epsilon of an event; inf where there is none.

    Raises:
        AdjacencyError: the event has no guarantee under this adjacency.

    Example:
        >>> from torch_dpsco.accounting.events import ApproxDP, Laplace
        >>> noisy = Laplace(4.0, {"replace_one": 2.0})
        >>> pure_epsilon(noisy, "replace_one"), pure_epsilon(ApproxDP(1.0, 1e-9), "replace_one")
        (0.5, inf)
    """
    cost = cost_of(event, adjacency)
    # PRIVACY: what may fail is not pure (test_what_has_no_pure_epsilon_is_named)
    failing = cost.log_survival or cost.transcript or cost.per_side
    return math.inf if failing else cost.pure


def find_impure(places: _Places, adjacency: Adjacency) -> SimpleEvent | None:
    """Returns the first event without a finite pure epsilon; None if there is none."""
    events = (event for counts in places.values() for event in counts)
    return next((event for event in events if math.isinf(pure_epsilon(event, adjacency))), None)


def impurity(event: SimpleEvent) -> str:
    """Returns in words why an event has no place at delta = 0, and the ways out."""
    return (
        f"{event} has no finite pure epsilon (delta = 0 has no Gaussian noise and no failure probability); give "
        f"delta > 0, or release with pure noise (KNorm, Laplace)"
    )


def pure_sum(places: _Places, adjacency: Adjacency) -> float:
    """Returns the pure epsilon of counted events: summed, over each partition the largest part.

    Args:
        places: counts of events per (partition, part); both names are empty for events that touch all records.
        adjacency: neighboring relation, under which the partitions have a guarantee.

    Returns:
        The exact sum of the events' floats, rounded once to the nearest; inf if some event has no pure epsilon.

    Raises:
        AdjacencyError: an event has no guarantee under this adjacency.

    Example:
        >>> from torch_dpsco.accounting.events import Pure
        >>> parts = {("", ""): {Pure(0.1): 10}, ("p", "a"): {Pure(0.5): 1}, ("p", "b"): {Pure(0.25): 4}}
        >>> pure_sum(parts, "replace_one")
        2.0
    """
    largest: dict[str, Fraction] = {}
    for (partition, _), counts in places.items():
        terms = [(times, pure_epsilon(event, adjacency)) for event, times in counts.items()]
        if any(math.isinf(epsilon) for _, epsilon in terms):
            return math.inf
        part = sum((times * Fraction(epsilon) for times, epsilon in terms), Fraction())
        largest[partition] = max(part, largest.get(partition, part))
    try:
        return float(sum(largest.values(), Fraction()))
    except OverflowError:
        return math.inf
