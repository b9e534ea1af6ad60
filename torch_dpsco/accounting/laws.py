"""Which privacy loss law an event has under an adjacency, for the path of `analysis.pld`.

Not every event has one: for `ZCDP`, `ApproxZCDP` and `RDPCurve` only Renyi divergences are known. Failures are not part
of a law; `curves` takes them out of delta first.

Source: spec accounting.md sections 4 and 5.1.
"""

from __future__ import annotations

import math

from torch_dpsco.accounting import events as kinds
from torch_dpsco.accounting.analysis.pld_loss import (
    ApproxLoss,
    FixedSizeLoss,
    GaussianLoss,
    LossLaw,
    PoissonLoss,
    ReplaceOneLoss,
)
from torch_dpsco.accounting.curves import cost_of
from torch_dpsco.accounting.events import REPLACE_ONE, Adjacency, SimpleEvent

__all__ = ["Laws", "laws_of"]

Laws = tuple[LossLaw, ...]


def laws_of(event: SimpleEvent, adjacency: Adjacency) -> Laws | None:
    """Returns the law of an event (none for one that costs nothing); None if it has none that is known, or is infinite.

    Raises:
        AdjacencyError: the event has no guarantee under this adjacency.

    Example:
        >>> laws_of(kinds.Gaussian(2.0, {"replace_one": 1.0}), "replace_one")
        (GaussianLoss(ratio=0.5),)
    """
    cost = cost_of(event, adjacency)  # raises where the event is not defined
    if isinstance(event, kinds.Failure) or cost.pure == 0:
        return ()
    if cost.mu_squared is not None:
        return None if math.isinf(cost.mu_squared) else (GaussianLoss(math.sqrt(cost.mu_squared)),)
    if isinstance(event, (kinds.PoissonGaussian, kinds.WORGaussian)) and event.noise_multiplier == 0:
        return None
    if isinstance(event, kinds.PoissonGaussian):
        if adjacency == REPLACE_ONE:
            return (ReplaceOneLoss(event.q, event.noise_multiplier),)
        return (PoissonLoss(event.q, event.noise_multiplier, event.k),)
    if isinstance(event, kinds.WORGaussian):
        return (FixedSizeLoss(event.batch_size / event.dataset_size, event.noise_multiplier / 2.0),)
    # PRIVACY: the worst law of a pure mechanism; that of one Laplace coordinate is not proved to be the worst for
    # several (test_pure_events_have_the_worst_law)
    return (ApproxLoss(cost.pure),) if math.isfinite(cost.pure) else None
