"""Sentences that depend on what was charged, each with its ground: when a ledger implies it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from functools import cached_property
from typing import NamedTuple

import numpy as np

from torch_dpsco.accounting.curves import Cost, cost_of
from torch_dpsco.accounting.events import (
    GDP,
    AboveThreshold,
    Adjacency,
    ApproxDP,
    ApproxZCDP,
    Failure,
    Gaussian,
    KNorm,
    Laplace,
    NonPrivate,
    PoissonGaussian,
    RandomAllocation,
    SimpleEvent,
    WORGaussian,
)

ASSIGNED, HELD = (
    "assigned/",
    "held/",
)  # how partitions of random allocation and of studies are named
IDEAL = "floating-point attacks on the noise are out of scope"
_GAUSSIANS = (Gaussian, PoissonGaussian, WORGaussian, RandomAllocation)
_NO_CHANCE = "It is not the chance that a given person is exposed."


class Charged:
    """What was charged, as far as sentences depend on it.

    Args:
        events: each once or more often.
        adjacency: of the guarantee.
        partitions: (name, kind) of each, as of `events.Parallel`.
    """

    def __init__(
        self,
        events: Iterable[SimpleEvent],
        adjacency: Adjacency,
        partitions: Collection[tuple[str, str]] = (),
    ) -> None:
        self.events = frozenset(events)
        self.partitions = [name for name, _ in partitions]
        self.cut = {kind for name, kind in partitions if not name.startswith((ASSIGNED, HELD))}
        self._adjacency = adjacency

    def has(self, *kinds: type) -> bool:
        """Whether some event is of one of these classes."""
        return any(isinstance(event, kinds) for event in self.events)

    def parts(self, prefix: str) -> bool:
        """Whether some partition has a name that begins so."""
        return any(name.startswith(prefix) for name in self.partitions)

    @property
    def is_noisy(self) -> bool:
        """Whether random bits protect something."""
        return any(not isinstance(event, (NonPrivate, Failure)) for event in self.events)

    @property
    def is_exact(self) -> bool:
        """Whether some Gaussian noise was drawn in integers."""
        return any(isinstance(event, _GAUSSIANS) and event.exact for event in self.events)

    @property
    def is_ideal(self) -> bool:
        """Whether some Gaussian noise was not; `GDP` does not tell."""
        # PRIVACY: one release of floating-point noise is enough (test_mixed_ledgers_keep_the_sentence)
        return self.has(GDP) or any(
            isinstance(event, _GAUSSIANS) and not event.exact for event in self.events
        )

    @property
    def fails(self) -> bool:
        """Whether a premise of some release may fail."""
        gaussians = [event.failure for event in self.events if isinstance(event, Gaussian)]
        return any(gaussians) or any(
            event.probability for event in self.events if isinstance(event, Failure)
        )

    @property
    def is_stated(self) -> bool:
        """Whether nothing is known of some delta but its size: the release may disclose all with that probability."""
        return any(
            event.delta for event in self.events if isinstance(event, (ApproxDP, ApproxZCDP))
        )

    @property
    def is_pure(self) -> bool:
        """Whether each release bounds the ratio of probabilities always."""
        return bool(self.events) and not (self._impure or self.fails or self.is_stated)

    @property
    def is_curved(self) -> bool:
        """Whether instead each larger ratio is passed more rarely, which one finite Renyi divergence implies."""
        graded = all(np.isfinite(cost.rdp).any() for cost in self._costs.values())
        return bool(self._impure) and graded and not (self.fails or self.is_stated)

    @property
    def is_gaussian(self) -> bool:
        """Whether that is so by Gaussian noise."""
        return self.is_curved and all(isinstance(event, _GAUSSIANS) for event in self._impure)

    @cached_property
    def _costs(self) -> dict[SimpleEvent, Cost]:
        return {event: cost_of(event, self._adjacency) for event in self.events}

    @property
    def _impure(self) -> list[SimpleEvent]:
        return [event for event, cost in self._costs.items() if math.isinf(cost.pure)]


class Sentence(NamedTuple):
    """A text, and whether what was charged implies it."""

    when: Callable[[Charged], bool]
    text: str


# what must hold
ASSUMED = (
    Sentence(lambda c: True, "noise, rates and number of steps fixed before the run"),
    Sentence(
        lambda c: c.has(PoissonGaussian),
        "batches drawn by the optimizer's own Poisson loader, kept secret",
    ),
    Sentence(
        lambda c: c.has(WORGaussian),
        "batches drawn by the optimizer's own fixed-size loader, kept secret; public data set size",
    ),
    Sentence(
        lambda c: c.has(RandomAllocation),
        "each record put into one of the batches of a pass by itself, by the optimizer's own"
        " loader; who is where, and sizes of batches, kept secret",
    ),
    Sentence(
        lambda c: c.parts(ASSIGNED),
        "records assigned to batches by the optimizer's own loader, independently of the data, kept"
        " secret",
    ),
    Sentence(
        lambda c: c.parts(HELD),
        "who is fitted and who is held out decided by a fresh draw that looked at no value",
    ),
    Sentence(
        lambda c: "positional" in c.cut,
        "parts cut by position, independently of the data; public data set size",
    ),
    Sentence(
        lambda c: "keyed" in c.cut,
        "parts cut record by record, so that no record moves another one",
    ),
    Sentence(
        lambda c: c.is_exact and not c.is_ideal,
        "exact discrete Gaussian noise on a public grid",
    ),
    Sentence(lambda c: c.is_ideal and not c.is_exact, f"ideal Gaussian noise ({IDEAL})"),
    Sentence(
        lambda c: c.is_exact and c.is_ideal,
        "exact discrete Gaussian noise in events marked exact=True, ideal Gaussian noise in the"
        f" others ({IDEAL})",
    ),
    Sentence(lambda c: c.has(Laplace, AboveThreshold), f"ideal Laplace noise ({IDEAL})"),
    Sentence(lambda c: c.has(KNorm), f"ideal K-norm noise ({IDEAL})"),
    # PRIVACY: bits come from a cipher, those of exact noise too
    # (test_each_sentence_is_printed_if_the_ledger_implies_it_and_only_then)
    Sentence(
        lambda c: c.is_noisy,
        "random bits of noise and batches that nobody can tell from uniform ones",
    ),
)

# what delta is; {record} and {records} stand for what is protected
DELTA = (
    Sentence(
        lambda c: True,
        "delta is a slack on probabilities: for every event, the probability in one world may"
        " exceed e^epsilon times that in the other by at most delta.",
    ),
    Sentence(
        lambda c: c.fails,
        "Some or all of it is the probability that what the proof rests on fails, such as the bound"
        " on what one {record} contributes.",
    ),
    Sentence(
        lambda c: c.is_stated,
        "Some or all of it was stated together with an epsilon: nothing says that it is not the"
        " chance that a given person is exposed.",
    ),
    Sentence(
        lambda c: c.is_gaussian,
        f"{_NO_CHANCE} With the Gaussian noise used here the ratio of the two probabilities passes"
        " e^epsilon gradually: rarely, and then by little.",
    ),
    Sentence(
        lambda c: c.is_curved and not c.is_gaussian,
        f"{_NO_CHANCE} What was charged bounds the ratio of the two probabilities by a whole curve:"
        " the larger a factor, the more rarely it is passed.",
    ),
    Sentence(
        lambda c: c.is_pure,
        f"{_NO_CHANCE} Each release charged here has an epsilon at delta = 0 too, so that the ratio"
        " of the two probabilities is bounded whatever comes out.",
    ),
    Sentence(
        lambda c: True,
        "The definition alone would allow to publish a person's data with probability delta, so"
        " that delta has to be far below 1/(number of {records}).",
    ),
)
