"""Privacy loss laws of single releases: values that name a mechanism, and know how to put its loss on a grid.

    PoissonLoss      Gaussian noise on a Poisson sample, a unit of k records added, removed or zeroed out
    ReplaceOneLoss   the same, one record replaced
    FixedSizeLoss    Gaussian noise on a batch of fixed size, one record replaced or zeroed out
    GaussianLoss     unsampled Gaussian noise
    ApproxLoss       whatever is (epsilon, delta)-DP

Source: docs/proofs/accounting.md#losses-on-a-grid.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import numpy as np

from torch_dpsco import _validate
from torch_dpsco.accounting.analysis.pld_grid import GridLaw, atom, connected, dots
from torch_dpsco.accounting.analysis.pld_pairs import UNIT, LossPair, MixturePair, OppositePair


@dataclass(frozen=True)
class LossLaw(ABC):
    """The loss of one release; hashable, so that its grid laws are computed once."""

    @property
    def mu(self) -> float | None:
        """The mu of a Gaussian release, None of any other."""
        return None

    @property
    def infinite(self) -> float:
        """Mass of an infinite loss."""
        return 0.0

    @property
    def weight(self) -> int:
        """Cost of a grid point, relative to that of a single record's."""
        return 1

    def exchanged(self) -> LossLaw:
        """Returns the law of the loss with P and Q exchanged."""
        return self

    @abstractmethod
    def span(self, reach: float) -> tuple[float, float]:
        """Returns an interval of losses, beyond which less than 2 Phi(-reach) of the mass lies, infinity aside."""

    @abstractmethod
    def on_grid(self, grid: float, reach: float) -> GridLaw:
        """Returns a grid law that dominates this one (see the module)."""


@dataclass(frozen=True)
class PoissonLoss(LossLaw):
    """The Gaussian mechanism on a Poisson sample, for a unit added, removed or zeroed out.

    Args:
        rate: q in (0, 1].
        noise: z > 0, noise std over the clip of one record.
        size: k >= 1, records of the unit, each sampled on its own (or accumulated batches).
        reverse: False is log(with / without) under "with" (the remove direction), True the add direction. Both must
            hold, over a whole ledger each: `pld.pld_epsilon` sees to it.

    Guarantee: ADD_REMOVE and ZERO_OUT.
    Source: docs/proofs/accounting.md#several-records-of-a-unit.
    """

    rate: float
    noise: float
    size: int = 1
    reverse: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "rate", _rate(self.rate))
        object.__setattr__(self, "noise", _noise(self.noise))
        object.__setattr__(self, "size", _validate.positive_count(size=self.size))

    @property
    def mu(self) -> float | None:
        """At rate 1 the release is Gaussian."""
        return self.size / self.noise if self.rate == 1 else None

    @property
    def weight(self) -> int:
        """Every component is integrated."""
        return self.size

    def exchanged(self) -> PoissonLoss:
        """Returns the other direction."""
        return replace(self, reverse=not self.reverse)

    def span(self, reach: float) -> tuple[float, float]:
        """See the base class."""
        low, high = _span(self._pair, *self._pair.ends(reach))
        return (-high, -low) if self.reverse else (low, high)

    def on_grid(self, grid: float, reach: float) -> GridLaw:
        """See the base class."""
        both = dots(self._pair, *self._pair.ends(reach), grid, reach)
        return both.exchanged() if self.reverse else both.law()

    @property
    def _pair(self) -> MixturePair:
        return MixturePair(self.rate, self.noise, self.size)


@dataclass(frozen=True)
class GaussianLoss(LossLaw):
    """An unsampled Gaussian release; several merge into one, with mu^2 summed.

    Args:
        ratio: mu = sensitivity / noise std, > 0.
    """

    ratio: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "ratio", _validate.positive(ratio=self.ratio))

    @property
    def mu(self) -> float | None:
        """See the base class."""
        return self.ratio

    def span(self, reach: float) -> tuple[float, float]:
        """See the base class."""
        return PoissonLoss(1.0, 1 / self.ratio).span(reach)

    def on_grid(self, grid: float, reach: float) -> GridLaw:
        """See the base class."""
        return PoissonLoss(1.0, 1 / self.ratio).on_grid(grid, reach)


@dataclass(frozen=True)
class ReplaceOneLoss(LossLaw):
    """The Gaussian mechanism on a Poisson sample, for one record replaced: rate q in (0, 1), noise z > 0 over the clip.

    Guarantee: REPLACE_ONE, if a record's contribution does not depend on who else is in the batch.
    Source: docs/proofs/accounting.md#poisson-batch-one-record-replaced.
    """

    rate: float
    noise: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "rate", _validate.open_interval(0.0, 1.0, rate=self.rate))
        object.__setattr__(self, "noise", _noise(self.noise))

    def span(self, reach: float) -> tuple[float, float]:
        """See the base class."""
        return _span(self._pair, *self._pair.ends(reach))

    def on_grid(self, grid: float, reach: float) -> GridLaw:
        """See the base class."""
        return dots(self._pair, *self._pair.ends(reach), grid, reach).law()

    @property
    def _pair(self) -> OppositePair:
        return OppositePair(self.rate, self.noise)


@dataclass(frozen=True)
class FixedSizeLoss(LossLaw):
    """The Gaussian mechanism on a batch of fixed size, drawn uniformly: rate gamma in (0, 1], noise z > 0 over 2 clip.

    The profile H_t(mix, Q) for t >= 1, H_t(Q, mix) for t < 1 is attained pointwise, by no single pair; the law with
    that profile puts the mass of mix on {x > 1/2} at +l(x), that of Q on {x > 1/2} at -l(x), and the rest at 0.

    Guarantee: REPLACE_ONE and ZERO_OUT.
    Source: docs/proofs/accounting.md#batches-of-fixed-size.
    """

    rate: float
    noise: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "rate", _rate(self.rate))
        object.__setattr__(self, "noise", _noise(self.noise))

    def span(self, reach: float) -> tuple[float, float]:
        """See the base class."""
        high = self._pair.loss(self._pair.ends(reach)[1])
        return -high, high

    def on_grid(self, grid: float, reach: float) -> GridLaw:
        """See the base class."""
        pair = self._pair
        half = replace(dots(pair, 0.5, pair.ends(reach)[1], grid, reach), below=(0.0, 0.0))
        forward, backward = half.law(), half.exchanged()
        rest = (1 - self.rate) * math.erf(1 / (math.sqrt(8) * self.noise)) * (1 + half.accuracy)
        # PRIVACY: both signs, not one ordering (test_fixed_batches_accounted_by_one_ordering_are_under_reported)
        mass = np.concatenate([backward.mass[:-1], [rest + backward.mass[-1] + forward.mass[0]], forward.mass[1:]])
        return GridLaw(backward.first, mass, forward.infinite, grid, forward.shift)

    @property
    def mu(self) -> float | None:
        """At rate 1 the release is Gaussian."""
        return 1 / self.noise if self.rate == 1 else None

    @property
    def _pair(self) -> MixturePair:
        return MixturePair(self.rate, self.noise)


@dataclass(frozen=True)
class ApproxLoss(LossLaw):
    """Any (epsilon, delta)-DP release; delta = 0 is pure privacy.

    The worst law: infinity with mass delta, and of the rest +epsilon with e^eps / (1 + e^eps), -epsilon otherwise.

    Args:
        epsilon: >= 0.
        delta: in [0, 1).
    """

    epsilon: float
    delta: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "epsilon", _validate.nonnegative(epsilon=self.epsilon))
        object.__setattr__(self, "delta", _validate.between(0.0, 1.0, delta=self.delta))
        if self.delta == 1:
            raise ValueError("delta must be < 1 (got 1.0)")

    @property
    def infinite(self) -> float:
        """See the base class."""
        return self.delta

    def span(self, reach: float) -> tuple[float, float]:
        """The support."""
        return -self.epsilon, self.epsilon

    def on_grid(self, grid: float, reach: float) -> GridLaw:
        """See the base class."""
        first = math.floor(-self.epsilon / grid)
        count = math.ceil(self.epsilon / grid) - first
        mass, excess = np.zeros(max(count, 1)), np.zeros(max(count, 1))
        scale = (1 - self.delta) / (1 + math.exp(-self.epsilon))
        for index, loss, weight in ((0, -self.epsilon, scale * math.exp(-self.epsilon)), (-1, self.epsilon, scale)):
            atom_mass, atom_excess = atom(loss, weight, first + index % mass.size, grid)
            mass[index] += atom_mass
            excess[index] += atom_excess
        accuracy = 16 * UNIT * (4 + self.epsilon)
        return GridLaw(first, connected(mass, excess, grid, accuracy), self.delta, grid, accuracy)


def _span(pair: LossPair, low: float, high: float) -> tuple[float, float]:
    return pair.loss(low), pair.loss(high)


def _rate(value: float) -> float:
    return _validate.between(0.0, 1.0, rate=_validate.positive(rate=value))


def _noise(value: float) -> float:
    """Keeps squares finite: more noise than 1e100 counts as 1e100, and noise up to 1e-100 gets no figure anyway."""
    return min(max(_validate.positive(noise=value), 1e-100), 1e100)
