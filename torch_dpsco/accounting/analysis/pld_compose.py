"""Where and how grid laws are composed: tilt, window, Fourier transforms, and a bound on every error.

Tilt and window are chosen by a summary of the laws, which joins grid points into blocks that widen with the distance
from 0 (each 1/64 of it), so that the cumulant

    K(t) = sum_i T_i log E e^(t L_i)

costs some thousand exponentials a law. A poor tilt or window makes the composition refuse or its figure loose, never
wrong: what it leaves out is bounded by the laws themselves.

Let p_i be the finite masses of law i, T_i its number of releases, theta >= 0, and c_i any numbers near
K_i(theta) = log sum p_i e^(theta l). The tilted laws p_i e^(theta l - c_i) have masses near 1. With g the convolution
of all, T_i times each, and C = sum T_i c_i, the composed mass at l is g(l) e^(C - theta l): an absolute error of g is a
relative error of the composed mass near the losses that theta aims at, be they ever so improbable. g is computed on a
window of N points, as a circular convolution. These are upper bounds, all of them added to delta:

1. Window. Mass of g outside wraps around into the window: that only adds. The contribution that mass above the upper
   end U of the window would make is, for any s >= 0, at most

       sum_{l > U} g(l) e^(C - theta l) <= e^(sum T_i K_i(s) - s U).

   That of mass below the window concerns only epsilons below the window, of which nothing is said.
2. Transforms. Let law i have mass x_i at its largest atom, taken as its origin, and r_i elsewhere: its transform is
   F_i = 1 + w_i, w_i = (x_i - 1) + FFT(rest), |w_i| <= |x_i - 1| + r_i. A mixed-radix FFT of N points is a product of
   at most log2 N levels of sparse matrices, and the product of their absolute values is the matrix of ones: each value
   is within eta r_i of the exact one, eta = 8 u log2(2N), u = 2^-53 (a radix-2 level costs a sum, u, and a product
   with a rounded factor, (1 + sqrt 5) u; radices 3 and 5, which count 1.6 and 2.3 levels, 9 u and 11 u). log F_i is
   taken with an error of 128 u r_i / |F_i| (`_log_near_one`); 4 u r_i S more are for sums over S laws, and 4 u r_i R
   for sums over the R rows of N points into which a law is folded. So, with

       e_i = (eta + 4 u (32 + S + R)) r_i + 2 u |x_i - 1|,   a_i = |F_i| + e_i,   A = prod a_i^T_i,

   the product of powers is within A sum T_i e_i / a_i (telescoping) of the exact one, exponentials add
   A (400 + 100 S) u, and the inverse transform eta times the mean of A. Hence, if the frequencies with A < e^-80 are
   set to 0,

       |fl(g) - g| <= E = mean over frequencies of A (sum T_i e_i / a_i + eta + ..) + A [A < e^-80],

   and g is replaced by max(fl(g) + E, 0) >= g. With rare losses (r_i small), E depends on sum T_i r_i, not sum T_i.
   A single release needs no transform: E = 0, and masses are enlarged by 2 u R.
3. Exponentials e^x of rounded x have relative errors below 4 u (1 + the sizes of what x is the sum of), and are
   enlarged by that; suffix sums of N positive terms have less than N u each.

With A_k = sum_{j > k} p_j,

    delta(k h) = sum_{j > k} p_j (1 - e^((k-j) h)) = (1 - e^-h) sum_{i >= k} A_i e^((k-i) h):  only positive terms.

Source: docs/proofs/accounting.md#composition-by-transforms; Higham, Accuracy and Stability of Numerical
Algorithms, section 24.1 (transforms).

Compositions of the same laws in other numbers of releases, from transforms that are kept.

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
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import scipy.fft

from torch_dpsco.accounting.analysis.pld_laws import UNIT, GridLaw
from torch_dpsco.accounting.analysis.quadrature import FloatArray

Counted = Sequence[tuple[GridLaw, int]]

_DETAIL = 64  # blocks are single points up to this distance, then 1 / 64 of their distance wide
_LOG_TAIL = math.log(1e15)  # of the tilted mass beyond each end of the window


class AnyCumulant(Protocol):
    """A cumulant K, or an estimate of one, and the largest tilt to ask it for."""

    limit: float

    def __call__(self, t: float) -> float:
        """Returns K(t)."""


class Cumulant:
    """Cumulant of a composition, finite losses only.

    Args:
        laws: grid laws, each with the number of its releases >= 1.
    """

    def __init__(self, laws: Counted) -> None:
        blocks = [_summary(law) for law, _ in laws]
        self.limit = (
            16 / laws[0][0].grid
        )  # largest tilt: there one step of the grid is a factor e^16
        self.top = math.fsum(
            count * float(law.losses()[-1]) for law, count in laws
        )  # largest finite loss
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
    low = -192
    high = math.floor(8 * math.log2(limit))
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


def window(cumulant: AnyCumulant, tilt: float) -> Window:
    """Returns the window of a tilted composition: Chernoff's bound at both ends."""
    base = cumulant(tilt)

    def end(step: float) -> float:
        return (cumulant(tilt + step) - base + _LOG_TAIL) / abs(step)

    up = least(end, cumulant.limit)
    down = least(lambda step: end(-step), cumulant.limit)
    return Window(tilt, -end(-down), end(up), tilt + up)


def narrowed(cumulant: Cumulant, tilt: float, epsilon: float, spare: float) -> Window:
    """Returns the narrowest window among tilts below the best one, at the price of at most `spare` nats of rounding.

    Where rare releases with a large loss make up delta, tilting makes them frequent, and several of them at once have
    to be kept apart: a smaller tilt may need a tenth of the points.
    """

    def price(t: float) -> float:
        return cumulant(t) - t * epsilon + conversion(t)

    best = window(cumulant, tilt)
    dearest = price(tilt) + spare
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
    inside = edges[
        np.searchsorted(edges, law.first + 1, side="right") : np.searchsorted(
            edges, law.first + size - 1
        )
    ]
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


_ETA = 8 * UNIT  # per level of a transform
_CLIP = 300.0  # exponents farther than this from those of the losses aimed at are not followed


@dataclass(frozen=True, eq=False)
class TiltedLaw:
    """A law with masses p e^(theta l - log_norm), which sum to 1 up to rounding.

    Args:
        law: the law p.
        mass: (n,) tilted masses, rounded up.
        log_norm: the number c.
    """

    law: GridLaw
    mass: FloatArray
    log_norm: float


@dataclass(frozen=True, eq=False)
class DeltaCurve:
    """An upper bound on log delta at the grid losses (first + i) grid; between them, delta is below the chord in e^eps.

    Args:
        first: index of the first grid point.
        grid: h.
        log_delta: (N,) bounds, <= 0.
        log_rounding: (N,) logarithm of the part of delta that stands for items 1 and 2 of the module.
    """

    first: int
    grid: float
    log_delta: FloatArray
    log_rounding: FloatArray

    def epsilon(self, log_delta: float) -> float | None:
        """Returns the least epsilon with at most this delta; None if the window does not show one."""
        below = self.log_delta <= log_delta
        k = int(np.argmax(below))
        if not below[k]:
            return None
        if k == 0:
            return self.first * self.grid
        high = math.exp(self.log_delta[k - 1] - log_delta)
        low = math.exp(self.log_delta[k] - log_delta)
        share = (high - 1 + 8 * UNIT * high) / (high - low)
        return (self.first + k - 1) * self.grid + math.log1p(
            min(share, 1.0) * math.expm1(self.grid)
        )

    def log_delta_at(self, epsilon: float) -> float:
        """Returns log delta at an epsilon; that of the nearest end outside of the window, or 0 below it."""
        k = math.floor(epsilon / self.grid) - self.first
        if k < 0:
            return 0.0
        if k + 1 >= self.log_delta.size:
            return float(self.log_delta[-1])
        high = float(self.log_delta[k])
        low = float(self.log_delta[k + 1])
        # rounded down: the share of the way to the next, lower point
        share = math.expm1(
            epsilon - (self.first + k) * self.grid - 4 * UNIT * abs(epsilon)
        ) / math.expm1(self.grid)
        value = high + math.log1p(
            min(max(share, 0.0), 1.0) * math.expm1(low - high) * (1 - 8 * UNIT)
        )
        return min(0.0, value + 8 * UNIT * (2 + abs(value)))

    def rounding_at(self, epsilon: float) -> float:
        """Returns the share of delta that is a margin for rounding and the window."""
        k = min(max(math.floor(epsilon / self.grid) - self.first, 0), self.log_delta.size - 1)
        return math.exp(min(self.log_rounding[k] - self.log_delta[k], 0.0))


def tilted(law: GridLaw, tilt: float) -> TiltedLaw:
    """Returns p e^(tilt l), normalized."""
    log_mass, exponents = _exponents(law, tilt)
    top = float(exponents.max())
    mass = np.exp(exponents - top)
    total = float(mass.sum())
    # margin: rounded up (docs/proofs/accounting.md#composition-by-transforms)
    mass *= (1 + 4 * UNIT * (4 + 2 * np.abs(log_mass) + np.abs(exponents) + abs(top))) / total
    return TiltedLaw(law, mass, top + math.log(total))


def coarsening(law: GridLaw, tilt: float) -> float:
    """Returns what doubling the grid would add to log sum p e^(tilt l).

    That is between 1 and 3 times what this grid, instead of an ever finer one, has added: 1 if the grid is wider than
    the variations of the loss, 3 if much narrower. An odd dot moved to its even neighbors, masses and e^-l kept, gains
    a factor 1 + (e^(th) - 1) (1 - e^(-(1+t)h)) / (1 + e^-h) of its e^(t l).
    """
    _, exponents = _exponents(law, tilt)
    share = np.exp(exponents - exponents.max())
    odd = float(share[(law.first + 1) % 2 :: 2].sum()) / float(share.sum())
    gain = (
        math.expm1(tilt * law.grid)
        * -math.expm1(-(1 + tilt) * law.grid)
        / (1 + math.exp(-law.grid))
    )
    return math.log1p(odd * gain)


def _exponents(law: GridLaw, tilt: float) -> tuple[FloatArray, FloatArray]:
    """Returns log p, floored at log 1e-300, and log p + tilt l."""
    log_mass = np.log(np.maximum(law.mass, 1e-300))
    return log_mass, log_mass + tilt * law.losses()


def transform_size(points: float) -> int:
    """Returns the least of 2^j, 5/4 2^j, 3/2 2^j that is at least `points`: few sizes, so that transforms repeat."""
    power = 1 << max(math.ceil(points) - 1, 7).bit_length() - 1
    return next(
        size for size in (power, power * 5 // 4, power * 3 // 2, 2 * power) if size >= points
    )


def compose(laws: Counted, view: Window, aim: float) -> DeltaCurve:
    """Returns the curve of delta of a composition.

    Args:
        laws: laws on one grid, and their numbers of releases.
        view: tilt and window; its low end becomes the first grid point.
        aim: a loss near the epsilon of interest: exponentials are scaled there.
    """
    grid = laws[0][0].grid
    tilt = view.tilt
    first = math.floor(view.low / grid)
    size = transform_size(view.width / grid + 4)
    parts = [(tilted(law, tilt), count) for law, count in laws]
    losses = np.asarray((first + np.arange(size)) * grid, dtype=np.float64)
    mass, error = convolved(parts, first, size)
    log_scale = math.fsum(count * part.log_norm for part, count in parts)
    # margin: the error of the transform (docs/proofs/accounting.md#composition-by-transforms)
    finite = _log_suffix(np.maximum(mass + error, 0.0), losses - aim, tilt, grid) + (
        log_scale - tilt * aim
    )
    finite = np.maximum(finite, -1e5)  # -inf where no mass is above
    # |log_norm| + log n bounds the numbers that log_norm is the sum of
    summed = math.fsum(
        count * (2 + 2 * abs(part.log_norm) + math.log(part.mass.size)) for part, count in parts
    )
    slack = 8 * UNIT * (8 + size + summed + tilt * float(np.abs(losses).max()))
    log_lost = log_beyond(laws, losses[-1], view.rise)
    log_infinite = _log(
        -math.expm1(math.fsum(count * math.log1p(-law.infinite) for law, count in laws))
    )
    log_delta = np.logaddexp(np.logaddexp(finite + slack, log_lost), log_infinite) + 8 * UNIT * (
        8 + np.abs(finite)
    )
    log_delta[losses - aim < -_CLIP / max(tilt, 1.0)] = 0.0
    log_error = _log(error) + log_scale - tilt * losses + log_geometric(tilt, grid, size)
    return DeltaCurve(first, grid, np.minimum(log_delta, 0.0), np.logaddexp(log_error, log_lost))


def convolved(
    parts: list[tuple[TiltedLaw, int]], first: int, size: int
) -> tuple[FloatArray, float]:
    """Returns the circular convolution of the tilted laws from index `first` on, and the bound E on its error."""
    rows = max(part.mass.size for part, _ in parts) / size + 2  # of `_folded`, each an addition
    if len(parts) == 1 and parts[0][1] == 1:  # nothing to convolve
        folded = _folded(parts[0][0].mass, parts[0][0].law.first, size) * (1 + 2 * rows * UNIT)
        return np.roll(folded, -first % size), 0.0
    half = size // 2 + 1
    log_size = np.zeros(half)
    angle = np.zeros(half)
    log_bound = np.zeros(half)
    slope = np.zeros(half)
    for part, count in parts:
        one = transform(part, size, len(parts), rows)
        first -= count * (part.law.first + one.atom)
        bound = np.exp(one.log_size) + one.error
        log_size += count * one.log_size
        angle += count * one.angle
        log_bound += count * np.log(bound)
        slope += (count * one.error) / bound
    bound = np.exp(log_bound) * multiplicity(size)
    total = float(bound @ (slope + power_rounding(size, len(parts), rows))) / size
    kept = log_bound > -80  # the rest is set to 0: an error of at most its bound
    product = np.zeros(half, dtype=np.complex128)
    product[kept] = np.exp(log_size[kept] + 1j * angle[kept])
    total += float(bound[~kept].sum()) / size
    return np.roll(scipy.fft.irfft(product, size), -first % size), total * 1.001


class Transform(NamedTuple):
    """Transform F of a tilted law, its largest atom as the origin (item 2 of the module).

    Args:
        atom: index of the origin in the masses.
        log_size: (N/2 + 1,) log |F|.
        angle: (N/2 + 1,) arg F.
        error: the bound e.
    """

    atom: int
    log_size: FloatArray
    angle: FloatArray
    error: float


def transform(part: TiltedLaw, size: int, laws: int, rows: float) -> Transform:
    """Returns the transform of N = `size` points of one of S = `laws` laws that are folded into R = `rows` rows."""
    atom = int(np.argmax(part.mass))
    rest = part.mass.copy()
    rest[atom] = 0.0
    moved = scipy.fft.rfft(_folded(rest, -atom, size)) + (part.mass[atom] - 1)
    error = _ETA * _levels(size, laws, rows) * float(rest.sum()) + 2 * UNIT * abs(
        float(part.mass[atom]) - 1
    )
    return Transform(atom, *_log_near_one(moved), error)


def multiplicity(size: int) -> FloatArray:
    """Returns how many of N frequencies each of the N/2 + 1 stands for: its conjugate too, but for the ends."""
    times = np.ones(size // 2 + 1)
    times[1 : size - size // 2] = 2.0
    return times


def power_rounding(size: int, laws: int, rows: float) -> float:
    """Returns what exponentials and the way back add to the relative error of a product of powers."""
    return _ETA * _levels(size, laws, rows) + (400 + 100 * laws) * UNIT


def _levels(size: int, laws: int, rows: float) -> float:
    return math.log2(2 * size) + 16 + (laws + rows) / 2


def _log_near_one(moved: npt.NDArray[np.complex128]) -> tuple[FloatArray, FloatArray]:
    """Returns log |1 + w| and arg(1 + w), for small w with errors that are small relative to w."""
    real = moved.real
    imaginary = moved.imag
    small = np.maximum(np.abs(real), np.abs(imaginary)) < 0.25
    square = np.where(small, real * (2 + real) + imaginary * imaginary, 0.0)
    with np.errstate(divide="ignore"):
        direct = np.log(np.maximum(np.hypot(1 + real, imaginary), 1e-300))
    return np.where(small, np.log1p(square) / 2, direct), np.arctan2(imaginary, 1 + real)


def _folded(mass: FloatArray, first: int, size: int) -> FloatArray:
    """Returns the masses summed by index modulo `size`."""
    start = first % size
    rows = -(-(start + mass.size) // size)
    total = np.zeros(rows * size)
    total[start : start + mass.size] = mass
    folded: FloatArray = total.reshape(rows, size).sum(axis=0)
    return folded


def _log_suffix(mass: FloatArray, losses: FloatArray, tilt: float, grid: float) -> FloatArray:
    """Returns log of sum_{j > k} m_j e^(-tilt l_j) (1 - e^(l_k - l_j)) for every k, exponents clipped upwards."""
    weighted = mass * np.exp(np.clip(-tilt * losses, -700.0, _CLIP))
    above = np.zeros_like(weighted)
    above[:-1] = np.cumsum(weighted[:0:-1])[::-1]
    sums = np.cumsum((above * np.exp(np.clip(-losses, -700.0, _CLIP)))[::-1])[::-1]
    with np.errstate(divide="ignore"):
        result: FloatArray = np.log(sums) + losses + _log(-math.expm1(-grid))
    return result


def log_beyond(laws: Counted, end: float, rise: float) -> float:
    """Returns log of the bound on what losses above `end` contribute."""
    return 1e-6 - rise * end + sum(count * log_moment(law, rise) for law, count in laws)


def log_moment(law: GridLaw, rise: float) -> float:
    """Returns log sum p e^(rise l), rounded up."""
    _, logs = _exponents(law, rise)
    top = float(logs.max())
    return top + math.log(float(np.exp(logs - top).sum())) + 64 * UNIT * (8 + abs(top))


def log_geometric(tilt: float, grid: float, size: int) -> float:
    """Returns log of sum_{m >= 1} e^(-tilt m h) (1 - e^(-m h)), at most N."""
    if tilt == 0:
        return math.log(size)
    return min(
        math.log(size),
        -_log(math.expm1(tilt * grid))
        + _log(-math.expm1(-grid))
        - _log(-math.expm1(-(1 + tilt) * grid)),
    )


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf


_MOST_KEPT = (
    1 << 14
)  # frequencies of all laws together: beyond, to compose anew is not much slower
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
        self._first = math.floor(view.low / self.grid)
        self._aim = round(aim / self.grid)
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
        self._times = times[kept]
        self._log_size = np.array([one.log_size[kept] for one in ones])
        self._angle = np.array([one.angle[kept] for one in ones])
        self._log_bound = np.array([log[kept] for log in logs])
        self._slope = np.array(
            [one.error / bound[kept] for one, bound in zip(ones, bounds, strict=True)]
        )
        self._rounding = power_rounding(size, len(parts), rows)
        self._weight = math.exp(log_geometric(view.tilt, self.grid, size))
        self._frequencies = np.flatnonzero(kept)
        step = self.grid * view.tilt - 2j * np.pi / size * self._frequencies
        self._above = 1 / np.expm1(step)
        self._far = 1 / np.expm1(step + self.grid)
        self._origins = [part.law.first + one.atom for part, one in zip(parts, ones, strict=True)]
        self._note_releases(laws, parts, view.rise)
        if self.few:
            self._aim = self.curve([count for _, count in laws], log_delta).first

    def _note_releases(self, laws: Counted, parts: list[TiltedLaw], rise: float) -> None:
        """Notes what each release of a law adds to norms, sizes, moments and infinite losses."""
        self._norms = [part.log_norm for part in parts]
        self._sizes = [2 + 2 * abs(part.log_norm) + math.log(part.mass.size) for part in parts]
        self._moments = [log_moment(law, rise) for law, _ in laws]
        self._infinite = [math.log1p(-law.infinite) for law, _ in laws]

    def curve(self, counts: Sequence[int], log_delta: float) -> DeltaCurve:
        """Returns the curve of delta of a composition next to where it falls to a log delta: two points, or the end."""
        size = self._size
        grid = self.grid
        tilt = self.tilt
        last = self._last
        times = np.asarray(counts, dtype=np.float64)
        origin = sum(count * origin for count, origin in zip(counts, self._origins, strict=True))

        power = np.exp(times @ self._log_size + 1j * (times @ self._angle))
        power = power * self._times * self._turned(-origin)
        near = power * (self._above - self._far)
        last_turn = self._turned(last)
        beyond = float((power * self._above * last_turn).sum().real)
        farther = float((power * self._far * last_turn).sum().real)
        margin = self._margin(times)
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
            inside = float((near * self._turned(index)).sum().real)
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

    def _turned(self, index: int) -> npt.NDArray[np.complex128]:
        size = self._size
        turns: npt.NDArray[np.complex128] = np.exp(
            2j * np.pi / size * (self._frequencies * (index % size) % size)
        )
        return turns

    def _margin(self, times: FloatArray) -> float:
        """Returns the bound on all errors of D."""
        bound = np.exp(times @ self._log_bound) * self._times
        # margin: the error of the transform (docs/proofs/accounting.md#composition-by-transforms)
        error = (float(bound @ (times @ self._slope + self._rounding)) + self._left_out) * 1.001
        sums = 256 * UNIT * float(bound @ (np.abs(self._above) + np.abs(self._far)))
        return error * self._weight + sums


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
        if value <= 0:
            high = index
        else:
            low = index
        if before is not None and (value - before[1]) / (index - before[0]) < 0:
            slope = (value - before[1]) / (index - before[0])
        before = (index, value)
        guess = index - round(max(-1e9, min(1e9, value / slope)))
    return low, high


def summed(counts: Sequence[int], values: Sequence[float]) -> float:
    """Returns the sum of what each release of a law adds."""
    return math.fsum(count * value for count, value in zip(counts, values, strict=True))
