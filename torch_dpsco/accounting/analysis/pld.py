"""Epsilon and delta of compositions from privacy loss distributions, and from one Gaussian that dominates them.

A ledger is a list of loss laws with numbers of releases. Its laws are put on one grid that dominates them (`pld_laws`),
tilted, and composed by Fourier transforms with an error bound. Both orders of every pair count, each composed over the
whole list. Unsampled Gaussians merge into one, and are exact when alone.

Every answer is an upper bound whatever the grid, which decides how tight it is: it starts at the step asked for, or a
256th of the span of a loss; is halved while, by the estimate of `coarsening`, it costs more than 0.1 % of epsilon
and 2^21 points suffice (2^22 for all laws together); and is doubled where many points gain nothing. `None` means that
there is no figure: losses too large for the points (steps above 1/4), more than 512 laws, or a delta not reached.

No answer is refused because of rounding: it is bounded and added, and mostly such answers are still far below the Renyi
bound.

An epsilon is asked for while counts grow. Grid, tilt and window are therefore chosen for a block of counts, and the
transforms are kept for it (`Powers`), where few frequencies matter. Which block a count is in depends on the count
alone, so that the answer does not depend on what was asked before.

Source: docs/proofs/accounting.md#losses-on-a-grid, docs/proofs/accounting.md#composition-by-transforms,
docs/proofs/accounting.md#one-more-release.

Where and how grid laws are composed: tilt, window, Fourier transforms, and a bound on every error.

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

A run asks for its epsilon again and again while its counts grow. With g, F_i, a_i, e_i, C, theta, h and N as
above, delta(k h) is at most

    e^(C - theta k h) D(k) + what is lost beyond the window + infinite losses,   D(k) = sum_{m=1}^n w_m g(k + m),

w_m = e^(-theta m h) (1 - e^(-m h)), n = last - k: linear in g. So g itself is not needed. With G = prod F_i^T_i about
the origin J = sum T_i (first + atom)_i, and the frequencies x = 2 pi f / N, geometric sums give

    D(k) = (1/N) sum_f G(f) (e^(i x (k-J)) (A - B) - e^(i x (last-J) - theta n h) (A - B e^(-n h))),
    A = 1 / (e^(theta h - i x) - 1),   B = 1 / (e^((theta+1) h - i x) - 1).

Only frequencies at which A_f, the product of the a_i^T_i, exceeds e^-52 matter, mostly some dozens: they are kept for
a block of counts, those between `least` and `most`, and answer any of these. Errors, all of them added to D:

1. G(f) is within A_f (sum T_i e_i / a_i + ..) of the exact product (item 2), and |sum_m w_m e^(i x m)|
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
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import scipy.fft
from scipy.special import log_ndtr

from torch_dpsco.accounting.analysis.pld_laws import (
    UNIT,
    Counted,
    Cumulant,
    DeltaCurve,
    GaussianLoss,
    GridLaw,
    LossLaw,
    TiltedLaw,
    Window,
    coarsening,
    conversion,
    least,
    narrowed,
    tilted,
    tilted_exponents,
    window,
)
from torch_dpsco.accounting.analysis.rdp import FloatArray

Ledger = tuple[tuple[LossLaw, int], ...]

_POINTS = 1 << 21  # grid points of a law: about half a second
_ALL_POINTS = 1 << 22  # of all laws together
_MAX_LAWS = 512  # laws, weighted, beyond which their grids would be too coarse for a figure worth its time
_ENOUGH = 1 << 18  # points beyond which a coarser grid is tried
_FEW = 1 << 14  # points up to which nothing is saved on a window
_LOOSE = 1e-3  # of epsilon, or of log delta, that the grid may cost
# standard deviations kept: few, so that grid laws repeat
_REACHES = (9.0, 12.0, 16.0, 24.0, 37.0)
_MAX_GRID = 0.25
_MUCH_ROUNDING = 0.01  # share of delta
_BLOCK_BITS = 2  # of a count: blocks are a quarter to a half of their counts wide


class PLDResult(NamedTuple):
    """An (epsilon, delta) guarantee.

    Args:
        epsilon: upper bound.
        delta: that of the guarantee.
        grid: final grid, 0 if none was needed.
        rounding: share of delta that is a margin for rounding.
    """

    epsilon: float
    delta: float
    grid: float
    rounding: float


def pld_epsilon(
    losses: Sequence[tuple[LossLaw, int]], delta: float, *, grid: float = 1e-4
) -> PLDResult | None:
    """Returns the least epsilon at delta that the composed loss laws give, rounded up; None if there is no figure.

    Args:
        losses: laws with the numbers of their releases, >= 0 (parameters fixed in advance). For `PoissonLoss` either
            direction stands for both: the list is composed as given and with every pair exchanged.
        delta: in (0, 1).
        grid: largest step of the losses, unless that takes too many points.

    Guarantee: (epsilon, delta)-DP under the adjacency that all the laws share, also under adaptive choice of the data
    (not of the parameters).

    Source: docs/proofs/accounting.md#composition-by-transforms.

    Example:
        >>> from torch_dpsco.accounting.analysis.pld_laws import PoissonLoss
        >>> round(pld_epsilon([(PoissonLoss(rate=256 / 60000, noise=1.0), 235)], delta=1e-5).epsilon, 3)
        0.393
    """
    ledger = _canonical(losses)
    if not ledger:
        return PLDResult(0.0, delta, 0.0, 0.0)
    one = _single(ledger)
    if one is not None and (alone := one.epsilon_alone(delta)) is not None:
        return PLDResult(alone, delta, 0.0, 0.0)
    if any(delta < law.least_delta for law, _ in ledger):
        return None
    return _both_ways(ledger, _AtDelta(delta), grid)


def pld_delta(
    losses: Sequence[tuple[LossLaw, int]], epsilon: float, *, grid: float = 1e-4
) -> PLDResult | None:
    """Returns the least delta at epsilon that the composed loss laws give, rounded up; None if there is no figure.

    Args:
        losses: as for `pld_epsilon`.
        epsilon: >= 0.
        grid: largest step of the losses, unless that takes too many points.

    Guarantee: as for `pld_epsilon`.

    Source: docs/proofs/accounting.md#composition-by-transforms.

    Example:
        >>> from torch_dpsco.accounting.analysis.pld_laws import GaussianLoss
        >>> round(pld_delta([(GaussianLoss(ratio=0.6), 1), (GaussianLoss(ratio=0.8), 1)], epsilon=1.0).delta, 6)
        0.126937
    """
    ledger = _canonical(losses)
    if not ledger:
        return PLDResult(epsilon, 0.0, 0.0, 0.0)
    one = _single(ledger)
    if one is not None and (alone := one.delta_alone(epsilon)) is not None:
        return PLDResult(epsilon, alone, 0.0, 0.0)
    return _both_ways(ledger, _AtEpsilon(epsilon), grid)


class _Plan(NamedTuple):
    """A tilt, the epsilon aimed at, an upper bound on its log delta, and the increase of K that may be neglected."""

    tilt: float
    epsilon: float
    log_delta: float
    tolerance: float


@dataclass(frozen=True)
class _AtDelta:
    """What is epsilon at a delta?"""

    delta: float

    def plan(self, cumulant: Cumulant) -> _Plan:
        """Returns the tilt and what is known in advance from the cumulant."""

        def epsilon(t: float) -> float:
            return (cumulant(t) - math.log(self.delta) + conversion(t)) / t

        tilt = least(epsilon, cumulant.limit)
        if epsilon(tilt) <= 0:
            return _AtEpsilon(0.0).plan(cumulant)._replace(tolerance=math.inf)
        return _Plan(tilt, epsilon(tilt), math.log(self.delta), _LOOSE * tilt * epsilon(tilt))

    def answer(self, curve: DeltaCurve, shift: float) -> PLDResult | None:
        """Reads the answer off a curve, the losses of which may be short of the true ones by `shift`."""
        # PRIVACY: what rounding took from the losses is added (test_what_rounding_took_from_the_losses_is_added)
        found = curve.epsilon(math.log(self.delta))
        if found is None:
            return None
        epsilon = max(0.0, (found + shift) * (1 + 1e-15))
        return PLDResult(epsilon, self.delta, curve.grid, curve.rounding_at(found))


@dataclass(frozen=True)
class _AtEpsilon:
    """What is delta at an epsilon?"""

    epsilon: float

    def plan(self, cumulant: Cumulant) -> _Plan:
        aim = min(self.epsilon, cumulant.top)

        def log_delta(t: float) -> float:
            return cumulant(t) - t * aim + conversion(t)

        tilt = least(log_delta, cumulant.limit)
        return _Plan(tilt, aim, min(log_delta(tilt), 0.0), 5 * _LOOSE)

    def answer(self, curve: DeltaCurve, shift: float) -> PLDResult | None:
        at = self.epsilon - shift
        delta = math.exp(curve.log_delta_at(at))
        return PLDResult(self.epsilon, delta, curve.grid, curve.rounding_at(at))


_Query: TypeAlias = _AtDelta | _AtEpsilon  # about a composition


def _canonical(losses: Sequence[tuple[LossLaw, int]]) -> Ledger:
    """Merges equal laws and all Gaussians, drops what has no release, and sorts."""
    counts: dict[LossLaw, int] = {}
    squares = []
    for law, count in losses:
        if law.mu is None:
            counts[law] = counts.get(law, 0) + count
        else:
            squares.append(law.mu * law.mu * count)
    total = math.fsum(squares)
    if total > 0:
        # PRIVACY: rounded up, exact composition of Gaussians (test_merged_gaussians_are_not_below_their_exact_sum)
        counts[GaussianLoss(math.sqrt(total) * (1 + 1e-15))] = 1
    return tuple(sorted(((law, count) for law, count in counts.items() if count), key=repr))


def _single(ledger: Ledger) -> LossLaw | None:
    """Returns the law of a ledger of one release, None of others."""
    return ledger[0][0] if len(ledger) == 1 and ledger[0][1] == 1 else None


@lru_cache(maxsize=1024)
def _both_ways(ledger: Ledger, query: _Query, grid: float) -> PLDResult | None:
    """Returns the worse answer of the two orders of the pairs."""
    # PRIVACY: each order over the whole list, then the larger (test_the_worse_direction_is_reported)
    orders = dict.fromkeys([ledger, tuple((law.exchanged(), count) for law, count in ledger)])
    found = [_improved(order, query, grid) for order in orders]
    known = [result for result in found if result is not None]
    return max(known) if len(known) == len(found) else None


def _improved(ledger: Ledger, query: _Query, grid: float) -> PLDResult | None:
    """Returns the best answer for the pairs as they are ordered."""
    found = _one_way(ledger, query, grid)
    # fewer points have less rounding: a coarser grid may be tighter, and both are bounds
    while found is not None and found.rounding > _MUCH_ROUNDING:
        coarser = _one_way(ledger, query, 8 * found.grid)
        if coarser is None or coarser[:2] >= found[:2]:
            break
        found = coarser
    return found


class _Scene(NamedTuple):
    """Laws on their grid, and where to look."""

    laws: Counted
    plan: _Plan
    view: Window

    def answer(
        self, query: _Query, curve: DeltaCurve, counts: Sequence[int]
    ) -> PLDResult | None:
        """Returns the answer that a curve gives for these counts."""
        return query.answer(curve, summed(counts, [law.shift for law, _ in self.laws]))


def _one_way(ledger: Ledger, query: _Query, grid: float) -> PLDResult | None:
    """Returns the answer for the pairs as they are ordered."""
    counts = [count for _, count in ledger]
    if (
        isinstance(query, _AtDelta) and sum(counts) > 1
    ):  # one release alone has no rounding, composed as it is
        kept = _kept(tuple((law, *_block(count)) for law, count in ledger), query, grid)
        if kept is not None:
            powers, scene = kept
            return scene.answer(query, powers.curve(counts, math.log(query.delta)), counts)
    found = _resolved(ledger, query, grid)
    if found is None:
        return None
    return found.answer(query, compose(found.laws, found.view, found.plan.epsilon), counts)


def _block(count: int) -> tuple[int, int]:
    """Returns the least and the largest count that share what is kept: a function of the count alone.

    Example:
        >>> [_block(count) for count in (1, 4, 5, 200, 5000)]
        [(1, 1), (4, 4), (5, 6), (193, 256), (4097, 6144)]
    """
    # PRIVACY: not of what was asked before, so that a plan has the epsilon of its run
    # (test_epsilon_does_not_depend_on_what_was_asked_before)
    bits = max(0, (count - 1).bit_length() - _BLOCK_BITS)
    least = (count - 1 >> bits << bits) + 1
    return least, least + (1 << bits) - 1


@lru_cache(maxsize=64)
def _kept(
    blocks: tuple[tuple[LossLaw, int, int], ...], query: _AtDelta, grid: float
) -> tuple[Powers, _Scene] | None:
    """Returns what answers all counts of a block: the scene of the largest, seen down to the smallest."""
    scene = _resolved(tuple((law, most) for law, _, most in blocks), query, grid)
    if scene is None:
        return None
    least = [few for _, few, _ in blocks]
    smallest = Cumulant([(law, few) for (law, _), few in zip(scene.laws, least, strict=True)])
    view = scene.view
    step = scene.laws[0][0].grid
    view = replace(view, low=min(view.low, window(smallest, view.tilt, smallest.limit).low))
    view = view.including(query.plan(smallest).epsilon - step, _FEW * step)
    if view.width > _POINTS * step:
        return None
    powers = Powers(scene.laws, least, view, math.log(query.delta), scene.plan.epsilon)
    return (powers, scene) if powers.few else None


def _resolved(ledger: Ledger, query: _Query, grid: float) -> _Scene | None:
    """Chooses the grid, and how far into the tails to go."""
    if len(ledger) > _MAX_LAWS:
        return None
    points = min(_POINTS, _ALL_POINTS // len(ledger))
    reach = _REACHES[0]
    coarsened = False
    step = 0.0
    for _ in range(32):
        span = max(high - low for low, high in (law.span(reach) for law, _ in ledger))
        step = max(step or min(grid, span / 256 or grid), span / points)
        if not step <= _MAX_GRID:
            return None
        laws = [(law.on_grid(step, reach), count) for law, count in ledger]
        if not all(math.isfinite(float(law.mass.sum())) for law, _ in laws):
            return None
        cumulant = Cumulant(laws)
        plan = query.plan(cumulant)
        needed = _reach(laws, plan.log_delta)
        if needed > reach:
            reach = needed
            continue
        view = _view(cumulant, plan, sum(count for _, count in laws), step)
        cost = math.fsum(count * coarsening(law, plan.tilt) for law, count in laws)
        factor = _regrid(cost / plan.tolerance, view.width / step, span / step, points)
        if factor == 1 or (factor < 1 and coarsened):
            return _Scene(laws, plan, view)
        coarsened = coarsened or factor > 1
        step *= factor
    return None


def _view(cumulant: Cumulant, plan: _Plan, steps: int, step: float) -> Window:
    """Returns the window of the plan's tilt, or a narrower one at the price of a little rounding."""
    view = window(cumulant, plan.tilt, cumulant.limit)
    if view.width / step > _FEW:
        spare = math.log(1e7 / steps) if steps < 1e7 else 0.0
        view = narrowed(cumulant, plan.tilt, plan.epsilon, spare)
    return view.including(plan.epsilon - step, _FEW * step)


def _regrid(cost: float, width: float, span: float, points: int) -> float:
    """Returns the factor, a power of 2, by which to change the grid: its cost is relative to what is tolerated."""
    if width > points:
        return 2.0 ** math.ceil(math.log2(width / points))
    if cost > 1:
        room = points / max(width, span)
        return 2.0 ** -max(
            0, min(math.ceil(math.log2(cost) / 2), math.floor(math.log2(room)), 6)
        )
    if width > _ENOUGH:
        return 2.0 ** max(
            0, math.floor(min(-math.log2(max(cost, 1e-30)) / 2 - 1, math.log2(width / _ENOUGH)))
        )
    return 1.0


def _reach(laws: Counted, log_delta: float) -> float:
    """Returns the least of the reaches at which truncation is below a millionth of delta, or the largest."""
    steps = sum(count for _, count in laws)
    for reach in _REACHES:
        if math.log(2 * steps) + float(log_ndtr(-reach)) < log_delta - math.log(1e6):
            return reach
    return _REACHES[-1]


_ETA = 8 * UNIT  # per level of a transform
_CLIP = 300.0  # exponents farther than this from those of the losses aimed at are not followed


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
    each = [released(part, view.rise) for part, _ in parts]
    log_scale, size_of_sums, moment, finite_mass = totals([count for _, count in laws], each)
    # margin: the error of the transform (docs/proofs/accounting.md#composition-by-transforms)
    finite = _log_suffix(np.maximum(mass + error, 0.0), losses - aim, tilt, grid) + (
        log_scale - tilt * aim
    )
    finite = np.maximum(finite, -1e5)  # -inf where no mass is above
    slack = 8 * UNIT * (8 + size + size_of_sums + tilt * float(np.abs(losses).max()))
    log_lost = 1e-6 - view.rise * losses[-1] + moment
    log_infinite = log_of(-math.expm1(finite_mass))
    log_delta = np.logaddexp(np.logaddexp(finite + slack, log_lost), log_infinite) + 8 * UNIT * (
        8 + np.abs(finite)
    )
    log_delta[losses - aim < -_CLIP / max(tilt, 1.0)] = 0.0
    log_error = log_of(error) + log_scale - tilt * losses + log_geometric(tilt, grid, size)
    return DeltaCurve(first, grid, np.minimum(log_delta, 0.0), np.logaddexp(log_error, log_lost))


def convolved(
    parts: list[tuple[TiltedLaw, int]], first: int, size: int
) -> tuple[FloatArray, float]:
    """Returns the circular convolution of the tilted laws from index `first` on, and the bound E on its error."""
    laws = [part for part, _ in parts]
    if len(parts) == 1 and parts[0][1] == 1:  # nothing to convolve
        mass = _folded(laws[0].mass, laws[0].law.first, size)
        return np.roll(mass * (1 + 2 * _rows(laws, size) * UNIT), -first % size), 0.0
    ones = transforms(laws, size)
    counts = np.array([[float(count)] for _, count in parts])
    first -= sum(count * origin for (_, count), origin in zip(parts, ones.origins, strict=True))
    log_bound = (counts * np.log(ones.bound)).sum(axis=0)
    slope = (counts * ones.error / ones.bound).sum(axis=0)
    bound = np.exp(log_bound) * ones.times
    total = float(bound @ (slope + ones.rounding)) / size
    kept = log_bound > -80  # the rest is set to 0: an error of at most its bound
    product = np.zeros(size // 2 + 1, dtype=np.complex128)
    log_product = (counts * ones.log_size).sum(axis=0) + 1j * (counts * ones.angle).sum(axis=0)
    product[kept] = np.exp(log_product[kept])
    total += float(bound[~kept].sum()) / size
    return np.roll(scipy.fft.irfft(product, size), -first % size), total * 1.001


class Transforms(NamedTuple):
    """Transforms F of S tilted laws, the largest atom of each as its origin (item 2 of the module).

    Args:
        origins: (S,) indices of the origins.
        log_size: (S, N/2 + 1) log |F|.
        angle: (S, N/2 + 1) arg F.
        error: (S, 1) the bounds e.
        bound: (S, N/2 + 1) |F| + e.
        times: (N/2 + 1,) how many of N frequencies each one stands for: its conjugate too, but for the ends.
        rounding: what exponentials and the way back add to the relative error of a product of powers.
    """

    origins: list[int]
    log_size: FloatArray
    angle: FloatArray
    error: FloatArray
    bound: FloatArray
    times: FloatArray
    rounding: float


def transforms(parts: list[TiltedLaw], size: int) -> Transforms:
    """Returns the transforms of N = `size` points."""
    rounding = _ETA * (math.log2(2 * size) + 16 + (len(parts) + _rows(parts, size)) / 2)
    origins = []
    errors = []
    logs = []
    for part in parts:
        atom = int(np.argmax(part.mass))
        rest = part.mass.copy()
        rest[atom] = 0.0
        moved = scipy.fft.rfft(_folded(rest, -atom, size)) + (part.mass[atom] - 1)
        origins.append(part.law.first + atom)
        errors.append(
            [rounding * float(rest.sum()) + 2 * UNIT * abs(float(part.mass[atom]) - 1)]
        )
        logs.append(_log_near_one(moved))
    log_size, angle = (np.array(each) for each in zip(*logs, strict=True))
    error = np.array(errors)
    times = np.ones(size // 2 + 1)
    times[1 : size - size // 2] = 2.0
    rounding += (400 + 100 * len(parts)) * UNIT
    return Transforms(origins, log_size, angle, error, np.exp(log_size) + error, times, rounding)


def _rows(parts: list[TiltedLaw], size: int) -> float:
    """Returns a bound on the rows of `_folded`, each an addition."""
    return max(part.mass.size for part in parts) / size + 2


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
        result: FloatArray = np.log(sums) + losses + log_of(-math.expm1(-grid))
    return result


def released(part: TiltedLaw, rise: float) -> FloatArray:
    """Returns what a release adds to: log_scale, its rounding, the moment beyond a window, log of the finite mass."""
    norm = part.log_norm
    # |norm| + log n bounds the numbers that it is the sum of
    size = 2 + 2 * abs(norm) + math.log(part.mass.size)
    return np.array([norm, size, log_moment(part.law, rise), math.log1p(-part.law.infinite)])


def totals(counts: Sequence[int], each: list[FloatArray]) -> list[float]:
    """Returns the sums of that over the releases of all laws."""
    return [summed(counts, values) for values in zip(*each, strict=True)]


def log_moment(law: GridLaw, rise: float) -> float:
    """Returns log sum p e^(rise l), rounded up."""
    _, logs = tilted_exponents(law, rise)
    top = float(logs.max())
    return top + math.log(float(np.exp(logs - top).sum())) + 64 * UNIT * (8 + abs(top))


def log_geometric(tilt: float, grid: float, size: int) -> float:
    """Returns log of sum_{m >= 1} e^(-tilt m h) (1 - e^(-m h)), at most N."""
    if tilt == 0:
        return math.log(size)
    return min(
        math.log(size),
        -log_of(math.expm1(tilt * grid))
        + log_of(-math.expm1(-grid))
        - log_of(-math.expm1(-(1 + tilt) * grid)),
    )


def log_of(value: float) -> float:
    """Returns the logarithm of a number >= 0, -inf of 0."""
    return math.log(value) if value > 0 else -math.inf


# frequencies of all laws together: beyond, to compose anew is not much slower
_MOST_KEPT = 1 << 14
# of the bound on a frequency that is kept: what is left out is less than rounding
_LEAST_LOG = -52.0
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
        ones = transforms(parts, size)
        log_bound = np.log(ones.bound)
        few = np.array(least, dtype=np.float64)[:, None]
        most = np.array([[float(count)] for _, count in laws])
        # PRIVACY: at the counts of the block at which it is largest (test_frequencies_left_out_are_counted)
        ceiling = np.maximum(few * log_bound, most * log_bound).sum(axis=0)
        kept = np.asarray(ceiling > _LEAST_LOG)
        self.few = int(kept.sum()) * len(parts) <= _MOST_KEPT
        self._left_out = float((np.exp(ceiling) * ones.times)[~kept].sum())
        self._times = ones.times[kept]
        self._log_size = ones.log_size[:, kept]
        self._angle = ones.angle[:, kept]
        self._log_bound = log_bound[:, kept]
        self._slope = (ones.error / ones.bound)[:, kept]
        self._rounding = ones.rounding
        self._weight = math.exp(log_geometric(view.tilt, self.grid, size))
        self._frequencies = np.flatnonzero(kept)
        step = self.grid * view.tilt - 2j * np.pi / size * self._frequencies
        self._above = 1 / np.expm1(step)
        self._far = 1 / np.expm1(step + self.grid)
        self._origins = ones.origins
        self._each = [released(part, view.rise) for part in parts]
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

        power = np.exp(times @ self._log_size + 1j * (times @ self._angle))
        power = power * self._times * self._turned(-origin)
        near = power * (self._above - self._far)
        last_turn = self._turned(last)
        beyond = float((power * self._above * last_turn).sum().real)
        farther = float((power * self._far * last_turn).sum().real)
        margin = self._margin(times)
        log_scale, size_of_sums, moment, finite_mass = totals(counts, self._each)
        largest = max(abs(self._first), abs(last)) * grid
        slack = 8 * UNIT * (8 + size_of_sums + tilt * largest)
        log_lost = 1e-6 - self._rise * last * grid + moment
        log_infinite = log_of(-math.expm1(finite_mass))

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
