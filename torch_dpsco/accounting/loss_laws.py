"""Which privacy loss law an event has under an adjacency, for the path of `analysis.pld`.

Not every event has one: for `ZCDP`, `ApproxZCDP` and `RDPCurve` only Renyi divergences are known. Failures are not part
of a law; `curves` takes them out of delta first.

Source: docs/proofs/accounting.md#dominating-laws, docs/proofs/accounting.md#losses-on-a-grid.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import islice, product

from torch_dpsco.accounting.adjacency import REPLACE_ONE, Adjacency
from torch_dpsco.accounting.analysis.allocation import allocation_law
from torch_dpsco.accounting.analysis.pld import gdp_upper, pld_delta, pld_epsilon
from torch_dpsco.accounting.analysis.pld_laws import (
    ApproxLoss,
    FixedSizeLoss,
    GaussianLoss,
    LossLaw,
    PoissonLoss,
    ReplaceOneLoss,
)
from torch_dpsco.accounting.curves import cost_of
from torch_dpsco.accounting.events import (
    PoissonGaussian,
    RandomAllocation,
    SimpleEvent,
    WORGaussian,
)
from torch_dpsco.accounting.noise_levels import spread_of
from torch_dpsco.accounting.stated import Failure

_MOST_COMBINATIONS = 256
_Counted = tuple[tuple[LossLaw, int], ...]
_Places = Mapping[tuple[str, str], Mapping[SimpleEvent, int]]


@lru_cache(maxsize=4096)
def laws_of(event: SimpleEvent, adjacency: Adjacency) -> tuple[LossLaw, ...] | None:
    """Returns the law of an event (none for one that costs nothing); None if it has none that is known, or is infinite.

    Raises:
        AdjacencyError: the event has no guarantee under this adjacency.

    Example:
        >>> from torch_dpsco.accounting.events import Gaussian
        >>> laws_of(Gaussian(2.0, {"replace_one": 1.0}), "replace_one")
        (GaussianLoss(ratio=0.5),)
    """
    cost = cost_of(event, adjacency, 0)  # raises where the event is not defined
    if isinstance(event, Failure) or cost.pure == 0:
        return ()
    if cost.mu_squared is not None:
        return None if math.isinf(cost.mu_squared) else (GaussianLoss(math.sqrt(cost.mu_squared)),)
    if isinstance(event, (PoissonGaussian, WORGaussian)) and event.noise_multiplier == 0:
        return None
    if isinstance(event, PoissonGaussian):
        if adjacency == REPLACE_ONE:
            return (ReplaceOneLoss(event.q, event.noise_multiplier),)
        return (PoissonLoss(event.q, event.noise_multiplier, event.k),)
    if isinstance(event, RandomAllocation):
        return (allocation_law(event.noise, event.steps, adjacency),)
    if isinstance(event, WORGaussian):
        return (FixedSizeLoss(event.batch_size / event.dataset_size, event.noise_multiplier / 2.0),)
    # PRIVACY: the worst law of a pure mechanism; that of one Laplace coordinate is not proved to be the worst for
    # several (test_pure_events_have_the_worst_law)
    return (ApproxLoss(cost.pure),) if math.isfinite(cost.pure) else None


class ComposedLaws:
    """The loss laws of a ledger's entries, composed.

    Args:
        counts: gives the events with their counts, per (partition, part); both names are empty for events that touch
            all records. Asked for at the first question.
        adjacency: neighboring relation.
    """

    def __init__(self, counts: Callable[[], _Places], adjacency: Adjacency) -> None:
        self._counts = counts
        self._adjacency = adjacency

    def epsilon(self, delta: float, most: float = math.inf) -> float | None:
        """Returns epsilon at delta; None without a figure, or if it takes more than `most` laws."""
        return self._worst(
            lambda laws: None if (r := pld_epsilon(laws, delta)) is None else r.epsilon, most
        )

    def delta(self, epsilon: float, most: float = math.inf) -> float | None:
        """Returns delta at epsilon; None without a figure, or if it takes more than `most` laws."""
        return self._worst(
            lambda laws: None if (r := pld_delta(laws, epsilon)) is None else r.delta, most
        )

    def mu(self, delta_min: float) -> float | None:
        """Returns a mu that covers the curve where delta >= delta_min (see `pld_gdp`); None without a figure."""
        return self._worst(lambda laws: gdp_upper(laws, delta_min), math.inf)

    def _worst(self, read: Callable[[_Counted], float | None], most: float) -> float | None:
        parts = self._parts(most)
        if parts is None or math.prod(map(len, parts)) > _MOST_COMBINATIONS:
            return None
        # PRIVACY: every combination of parts, since laws are not ordered (test_the_worst_combination_of_parts_counts)
        combinations = [
            tuple(pair for part in chosen for pair in part) for chosen in product(*parts)
        ]
        if (
            sum(law.mu is None for laws in combinations for law, _ in laws) > most
        ):  # Gaussians merge into one
            return None
        found = [read(laws) for laws in combinations]
        known = [figure for figure in found if figure is not None]
        return max(known, default=0.0) if len(known) == len(found) else None

    def _sampled(self, counts: Iterable[SimpleEvent]) -> Iterator[SimpleEvent]:
        return (event for event in counts if spread_of(event, self._adjacency) is not None)

    def _parts(self, most: float) -> list[set[_Counted]] | None:
        """Returns the different parts of each partition as laws with counts.

        None where some event has no law, or a single part takes more than `most` laws: then at once.
        """
        partitions: dict[str, set[_Counted]] = {}
        for (partition, _), counts in self._counts().items():
            laws: dict[LossLaw, int] = {}
            sampled = 0
            if (
                math.isfinite(most)
                and sum(1 for _ in islice(self._sampled(counts), int(most) + 1)) > most
            ):
                return None  # before any of them is asked what it costs
            for event, times in counts.items():
                known = laws_of(event, self._adjacency)
                sampled += sum(law.mu is None and law not in laws for law in known or ())
                if known is None or sampled > most:
                    return None
                for law in known:
                    laws[law] = laws.get(law, 0) + times
            partitions.setdefault(partition, set()).add(tuple(sorted(laws.items(), key=repr)))
        return list(partitions.values())
