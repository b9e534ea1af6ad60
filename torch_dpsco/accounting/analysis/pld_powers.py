"""Compositions of the same laws in other numbers of releases, from transforms that are kept.

A run asks for its epsilon again and again while its counts grow. With g, F_i, a_i, e_i, C, theta, h and N of
`pld_compose`, delta(k h) is at most

    e^(C - theta k h) D(k) + what is lost beyond the window + infinite losses,   D(k) = sum_{m=1}^n w_m g(k + m),

w_m = e^(-theta m h) (1 - e^(-m h)), n = last - k: linear in g. So g itself is not needed. With G = prod F_i^T_i about
the origin J = sum T_i (first + atom)_i, and the frequencies x = 2 pi f / N, geometric sums give

    D(k) = (1/N) sum_f G(f) (e^(i x (k-J)) (A - B) - e^(i x (last-J) - theta n h) (A - B e^(-n h))),
    A = 1 / (e^(theta h - i x) - 1),   B = 1 / (e^((theta+1) h - i x) - 1).

Only frequencies at which A_f, the product of the a_i^T_i, exceeds e^-52 matter, mostly some dozens: they are kept for
a block of counts, those between `least` and `most`, and answer any of these. Errors, all of them added to D:

1. G(f) is within A_f (sum T_i e_i / a_i + ..) of the exact product (item 2 of `pld_compose`), and |sum_m w_m e^(i x m)|
   <= sum_m w_m.
2. A frequency that is left out counts A_f at most, and T_i log a_i is largest at an end of the block.
3. Rounding of A, B, the phases (of integers modulo N), products and sums: below 256 u of the mean of A_f (|A| + |B|).

The g(k + m) of a circular convolution have all the mass that they should, and w_m >= 0.

Source: docs/proofs/accounting.md#one-more-release.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import numpy.typing as npt

from torch_dpsco.accounting.analysis.pld_compose import (
    Counted,
    DeltaCurve,
    Window,
    log_geometric,
    log_moment,
    multiplicity,
    power_rounding,
    tilted,
    transform,
    transform_size,
)
from torch_dpsco.accounting.analysis.pld_pairs import UNIT

_MOST_KEPT = 1 << 14  # frequencies of all laws together: beyond, to compose anew is not much slower
_LEAST_LOG = (
    -52.0
)  # of the bound on a frequency that is kept: what is left out is less than rounding
_SECANTS = 8


class Powers:
    """Transforms of laws, for a block of counts.

    Args:
        laws: laws on one grid, with the largest counts of the block.
        least: the smallest counts of the block.
        view: tilt and window.
        log_delta: of which epsilon is asked.
        aim: a loss near that epsilon, where to look first.
    """

    def __init__(
        self, laws: Counted, least: Sequence[int], view: Window, log_delta: float, aim: float
    ) -> None:
        self.grid = laws[0][0].grid
        self.tilt = view.tilt
        self._rise = view.rise
        self._first, self._aim = math.floor(view.low / self.grid), round(aim / self.grid)
        self._size = size = transform_size(view.width / self.grid + 4)
        self._last = self._first + size - 1
        parts = [tilted(law, view.tilt) for law, _ in laws]
        rows = max(part.mass.size for part in parts) / size + 2
        ones = [transform(part, size, len(parts), rows) for part in parts]
        bounds = [np.exp(one.log_size) + one.error for one in ones]
        logs = [np.log(bound) for bound in bounds]
        # PRIVACY: at the counts of the block at which it is largest (test_frequencies_left_out_are_counted)
        ceiling = sum(
            np.maximum(few * log, count * log)
            for (_, count), few, log in zip(laws, least, logs, strict=True)
        )
        times = multiplicity(size)
        kept = np.asarray(ceiling > _LEAST_LOG)
        self.few = int(kept.sum()) * len(parts) <= _MOST_KEPT
        self._left_out = float((np.exp(ceiling) * times)[~kept].sum())
        self._frequencies = np.flatnonzero(kept)
        self._times = times[kept]
        self._log_size = np.array([one.log_size[kept] for one in ones])
        self._angle = np.array([one.angle[kept] for one in ones])
        self._log_bound = np.array([log[kept] for log in logs])
        self._slope = np.array(
            [one.error / bound[kept] for one, bound in zip(ones, bounds, strict=True)]
        )
        self._rounding = power_rounding(size, len(parts), rows)
        step = self.grid * view.tilt - 2j * np.pi / size * self._frequencies
        self._above, self._far = 1 / np.expm1(step), 1 / np.expm1(step + self.grid)
        self._weight = math.exp(log_geometric(view.tilt, self.grid, size))
        self._origins = [part.law.first + one.atom for part, one in zip(parts, ones, strict=True)]
        # per release, of each law
        self._norms = [part.log_norm for part in parts]
        self._sizes = [2 + 2 * abs(part.log_norm) + math.log(part.mass.size) for part in parts]
        self._moments = [log_moment(law, view.rise) for law, _ in laws]
        self._infinite = [math.log1p(-law.infinite) for law, _ in laws]
        if self.few:
            self._aim = self.curve([count for _, count in laws], log_delta).first

    def curve(self, counts: Sequence[int], log_delta: float) -> DeltaCurve:
        """Returns the curve of delta of a composition next to where it falls to a log delta: two points, or the end."""
        size = self._size
        grid = self.grid
        tilt = self.tilt
        last = self._last
        times = np.asarray(counts, dtype=np.float64)
        origin = sum(count * origin for count, origin in zip(counts, self._origins, strict=True))

        def turned(index: int) -> npt.NDArray[np.complex128]:
            turns: npt.NDArray[np.complex128] = np.exp(
                2j * np.pi / size * (self._frequencies * (index % size) % size)
            )
            return turns

        bound = np.exp(times @ self._log_bound) * self._times
        power = (
            np.exp(times @ self._log_size + 1j * (times @ self._angle))
            * self._times
            * turned(-origin)
        )
        near = power * (self._above - self._far)
        last_turn = turned(last)
        beyond = float((power * self._above * last_turn).sum().real)
        farther = float((power * self._far * last_turn).sum().real)
        # margin: the error of the transform (docs/proofs/accounting.md#composition-by-transforms)
        error = (float(bound @ (times @ self._slope + self._rounding)) + self._left_out) * 1.001
        sums = 256 * UNIT * float(bound @ (np.abs(self._above) + np.abs(self._far)))
        margin = error * self._weight + sums
        log_scale = summed(counts, self._norms)
        largest = max(abs(self._first), abs(last)) * grid
        slack = 8 * UNIT * (8 + summed(counts, self._sizes) + tilt * largest)
        log_lost = 1e-6 - self._rise * last * grid + summed(counts, self._moments)
        infinite = -math.expm1(summed(counts, self._infinite))
        log_infinite = math.log(infinite) if infinite > 0 else -math.inf

        @cache
        def log_value(index: int) -> tuple[float, float]:
            """Returns the bound on log delta at a point of the grid, and the log of its part for rounding."""
            rest = (last - index) * grid
            inside = float((near * turned(index)).sum().real)
            inside -= math.exp(-tilt * rest) * (beyond - math.exp(-rest) * farther)
            base = log_scale - tilt * index * grid - math.log(size)
            finite = base + math.log(max(inside, 0.0) + margin) + slack
            found = np.logaddexp(np.logaddexp(finite, log_lost), log_infinite) + 8 * UNIT * (
                8 + abs(finite)
            )
            return min(float(found), 0.0), float(np.logaddexp(base + math.log(margin), log_lost))

        def excess(index: int) -> float:
            return log_value(index)[0] - log_delta

        low, high = crossing(excess, self._first - 1, last, self._aim, -tilt * grid)
        points = [index for index in (low, high) if index >= self._first]
        values = np.array([log_value(index) for index in points])
        return DeltaCurve(points[0], grid, values[:, 0], values[:, 1])


def crossing(
    excess: Callable[[int], float], low: int, high: int, guess: int, slope: float
) -> tuple[int, int]:
    """Returns neighbors such that `excess` is > 0 at the first and <= 0 at the other, or an end was never passed.

    By secants from a guess and a slope, and by halves if eight of them have not met: any answer is as valid.
    """
    before = None
    for trial in itertools.count():
        if high - low <= 1:
            break
        index = min(max(guess, low + 1), high - 1) if trial < _SECANTS else (low + high) // 2
        value = excess(index)
        low, high = (low, index) if value <= 0 else (index, high)
        if before is not None and (value - before[1]) / (index - before[0]) < 0:
            slope = (value - before[1]) / (index - before[0])
        before = (index, value)
        guess = index - round(max(-1e9, min(1e9, value / slope)))
    return low, high


def summed(counts: Sequence[int], values: Sequence[float]) -> float:
    """Returns the sum of what each release of a law adds."""
    return math.fsum(count * value for count, value in zip(counts, values, strict=True))
