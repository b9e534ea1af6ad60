"""Where to compose: the tilt and the window, from a summary of the laws. Nothing here can void a bound.

The summary joins grid points into blocks that widen with the distance from 0 (each 1/64 of it), so that the cumulant

    K(t) = sum_i T_i log E e^(t L_i)

costs some thousand exponentials a law. A poor tilt or window makes the composition refuse or its figure loose, never
wrong: `pld_compose` bounds what it leaves out by the laws themselves.

Source: docs/proofs/accounting.md#composition-by-transforms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from torch_dpsco.accounting.analysis.pld_grid import GridLaw
from torch_dpsco.accounting.analysis.quadrature import FloatArray

Counted = Sequence[tuple[GridLaw, int]]

_DETAIL = 64  # blocks are single points up to this distance, then 1 / 64 of their distance wide
_LOG_TAIL = math.log(1e15)  # of the tilted mass beyond each end of the window


class Cumulant:
    """Cumulant of a composition, finite losses only.

    Args:
        laws: grid laws, each with the number of its releases >= 1.
    """

    def __init__(self, laws: Counted) -> None:
        blocks = [_summary(law) for law, _ in laws]
        self.limit = 16 / laws[0][0].grid  # largest tilt: there one step of the grid is a factor e^16
        self.top = math.fsum(count * float(law.losses()[-1]) for law, count in laws)  # largest finite loss
        self._counts = np.array([float(count) for _, count in laws])
        self._losses = np.concatenate([losses for losses, _ in blocks])
        self._log_mass = np.log(np.concatenate([mass for _, mass in blocks]))
        sizes = np.array([losses.size for losses, _ in blocks])
        self._starts = np.cumsum(sizes) - sizes
        self._law = np.repeat(np.arange(len(laws)), sizes)

    def __call__(self, t: float) -> float:
        """Returns K(t)."""
        exponents = t * self._losses + self._log_mass
        top = np.maximum.reduceat(exponents, self._starts)
        logs = top + np.log(np.add.reduceat(np.exp(exponents - top[self._law]), self._starts))
        return float(self._counts @ logs)


def conversion(t: float) -> float:
    """Returns max over x >= 0 of log((1 - e^-x) e^(-t x)) = t log t - (t+1) log(t+1).

    So log delta(eps) <= K(t) - t eps + conversion(t): the Renyi conversion of order t + 1.
    """
    return t * math.log(t) - (t + 1) * math.log1p(t) if t > 0 else 0.0


def least(objective: Callable[[float], float], limit: float) -> float:
    """Returns the best power of 2^(1/8), from 2^-24 to `limit`, for a quasi-convex objective of t > 0.

    Convex functions are quasi-convex, and so are convex functions over t, if positive at 0: all the objectives of this
    package. No bound needs the very minimum.
    """
    low, high = -192, math.floor(8 * math.log2(limit))
    while low < high:
        middle = (low + high) // 2
        if objective(2.0 ** (middle / 8)) <= objective(2.0 ** ((middle + 1) / 8)):
            high = middle
        else:
            low = middle + 1
    return float(2.0 ** (low / 8))


@dataclass(frozen=True)
class Window:
    """A tilt, and losses between which all but about 1e-15 of the tilted mass lies.

    Args:
        tilt: theta > 0.
        low: lower end.
        high: upper end.
        rise: the s > theta for which sum T_i K_i(s) - s U is least, nearly, at the upper end.
    """

    tilt: float
    low: float
    high: float
    rise: float

    @property
    def width(self) -> float:
        """Length of the window."""
        return self.high - self.low

    def including(self, loss: float, widest: float) -> Window:
        """Returns the window extended down to a loss, unless it becomes wider than `widest` and 4 times its width."""
        farther = self.low > loss and self.high - loss <= max(widest, 4 * self.width)
        return replace(self, low=loss) if farther else self


def window(cumulant: Cumulant, tilt: float) -> Window:
    """Returns the window of a tilted composition: Chernoff's bound at both ends."""
    base = cumulant(tilt)

    def end(step: float) -> float:
        return (cumulant(tilt + step) - base + _LOG_TAIL) / abs(step)

    up, down = least(end, cumulant.limit), least(lambda step: end(-step), cumulant.limit)
    return Window(tilt, -end(-down), end(up), tilt + up)


def narrowed(cumulant: Cumulant, tilt: float, epsilon: float, spare: float) -> Window:
    """Returns the narrowest window among tilts below the best one, at the price of at most `spare` nats of rounding.

    Where rare releases with a large loss make up delta, tilting makes them frequent, and several of them at once have
    to be kept apart: a smaller tilt may need a tenth of the points.
    """

    def price(t: float) -> float:
        return cumulant(t) - t * epsilon + conversion(t)

    best, dearest = window(cumulant, tilt), price(tilt) + spare
    for eighths in (1, 2, 3, 4, 6, 8, 12, 16, 20, 24):
        smaller = tilt / 2 ** (eighths / 8)
        if price(smaller) > dearest:
            break
        best = min(best, window(cumulant, smaller), key=lambda candidate: candidate.width)
    return best


def _summary(law: GridLaw) -> tuple[FloatArray, FloatArray]:
    """Returns centers of mass and masses of the blocks of a law."""
    size = law.mass.size
    edges = _edges(max(abs(law.first), abs(law.first + size), _DETAIL).bit_length())
    inside = edges[np.searchsorted(edges, law.first + 1, side="right") : np.searchsorted(edges, law.first + size - 1)]
    # the ends stay single points: they decide about large |t|
    edges = np.unique(np.concatenate([[0, 1], inside - law.first, [size - 1]]))
    mass = np.add.reduceat(law.mass, edges)
    moment = np.add.reduceat(law.mass * np.arange(size), edges)
    kept = mass > 0
    return (law.first + moment[kept] / mass[kept]) * law.grid, mass[kept]


@lru_cache(maxsize=64)
def _edges(bits: int) -> npt.NDArray[np.int64]:
    """Returns the indices between +-2^bits at which blocks start."""
    ratio = 1 + 1 / _DETAIL
    count = math.ceil(math.log(2.0**bits / _DETAIL) / math.log(ratio))
    far = np.ceil(_DETAIL * ratio ** np.arange(count + 1)).astype(np.int64)
    return np.unique(np.concatenate([-far, np.arange(-_DETAIL, _DETAIL + 1), far]))
