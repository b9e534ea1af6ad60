"""Epsilon and delta of compositions from privacy loss distributions, and from one Gaussian that dominates them.

A ledger is a list of loss laws with numbers of releases. Its laws are put on one grid that dominates them (`pld_laws`),
tilted, and composed by Fourier transforms with an error bound (`pld_compose`). Both orders
of every pair count, each composed over the whole list. Unsampled Gaussians merge into one, and are exact when alone.

Every answer is an upper bound whatever the grid, which decides how tight it is: it starts at the step asked for, or a
256th of the span of a loss; is halved while, by the estimate of `PLDResult.error`, it costs more than 0.1 % of epsilon
and 2^21 points suffice (2^22 for all laws together); and is doubled where many points gain nothing. `None` means that
there is no figure: losses too large for the points (steps above 1/4), more than 512 laws, or a delta not reached.

No answer is refused because of rounding: it is bounded and added, and mostly such answers are still far below the Renyi
bound.

An epsilon is asked for while counts grow. Grid, tilt and window are therefore chosen for a block of counts, and the
transforms are kept for it (`pld_compose`), where few frequencies matter. Which block a count is in depends on the count
alone, so that the answer does not depend on what was asked before.

`gdp_upper` summarizes such a ledger as Gaussian differential privacy, where delta is not too small. delta(epsilon) = E
(1 - t e^(-L))_+ is convex in t = e^epsilon, whatever the law of the loss L. So it lies below the chord, in t, between
any two points of an upper bound: a few compositions bound the curve everywhere. The mu returned is that of the chords,
taken on points so fine that their steps cost little.

Let E be the epsilon at delta_min. Beyond it delta is at most delta_min. So if the Gaussian curve is at least delta on
[0, E], then for every delta >= delta_min the epsilon that mu implies is one at which the ledger has at most this delta.

A central-limit mu has no such proof, and reports far too little.

Source: docs/proofs/accounting.md#losses-on-a-grid, docs/proofs/accounting.md#composition-by-transforms,
docs/proofs/accounting.md#one-more-release, docs/proofs/accounting.md#a-mu-that-covers-a-curve.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import numpy as np
from scipy.special import log_ndtr

from torch_dpsco import _validate as check
from torch_dpsco._margin import up
from torch_dpsco.accounting.analysis.gaussian import gaussian_mu, log_delta_curve
from torch_dpsco.accounting.analysis.pld_compose import (
    Counted,
    Cumulant,
    DeltaCurve,
    Powers,
    Window,
    coarsening,
    compose,
    conversion,
    least,
    narrowed,
    summed,
    window,
)
from torch_dpsco.accounting.analysis.pld_laws import GaussianLoss, LossLaw
from torch_dpsco.accounting.analysis.quadrature import FloatArray

Ledger = tuple[tuple[LossLaw, int], ...]

_POINTS = 1 << 21  # grid points of a law: about half a second
_ALL_POINTS = 1 << 22  # of all laws together
_MAX_LAWS = 512  # laws, weighted, beyond which their grids would be too coarse for a figure worth its time
_ENOUGH = 1 << 18  # points beyond which a coarser grid is tried
_FEW = 1 << 14  # points up to which nothing is saved on a window
_LOOSE = 1e-3  # of epsilon, or of log delta, that the grid may cost
_REACHES = (
    9.0,
    12.0,
    16.0,
    24.0,
    37.0,
)  # standard deviations kept: few, so that grid laws repeat
_MAX_GRID = 0.25
_MUCH_ROUNDING = 0.01  # share of delta
_BLOCK_BITS = 2  # of a count: blocks are a quarter to a half of their counts wide


class PLDResult(NamedTuple):
    """An (epsilon, delta) guarantee.

    Args:
        epsilon: upper bound; inf if infinite losses alone exceed delta.
        delta: that of the guarantee.
        error: estimate of what the grid and rounding added, to epsilon (`pld_epsilon`) or delta (`pld_delta`): about
            three times as much in the tests, but not proved to exceed it.
        grid: final grid, 0 if none was needed.
        rounding: share of delta that is a margin for rounding.
    """

    epsilon: float
    delta: float
    error: float
    grid: float
    rounding: float


def pld_epsilon(
    losses: Sequence[tuple[LossLaw, int]], delta: float, *, grid: float = 1e-4
) -> PLDResult | None:
    """Returns the least epsilon at delta that the composed loss laws give, rounded up; None if there is no figure.

    Args:
        losses: laws with the numbers of their releases, >= 0 (parameters fixed in advance). For `PoissonLoss` either
            direction stands for both: the list is composed as given and with every pair exchanged.
        delta: in (0, 1].
        grid: largest step of the losses, unless that takes too many points.

    Raises:
        ValueError: delta or grid is out of range, or a number of releases is negative.

    Guarantee: (epsilon, delta)-DP under the adjacency that all the laws share, also under adaptive choice of the data
    (not of the parameters).

    Source: docs/proofs/accounting.md#composition-by-transforms.

    Example:
        >>> from torch_dpsco.accounting.analysis.pld_laws import PoissonLoss
        >>> round(pld_epsilon([(PoissonLoss(rate=256 / 60000, noise=1.0), 235)], delta=1e-5).epsilon, 3)
        0.393
    """
    delta = check.between(0.0, 1.0, delta=check.positive(delta=delta))
    ledger = _canonical(losses)
    step = check.positive(grid=grid)
    if delta == 1 or not ledger:
        return PLDResult(0.0, delta, 0.0, 0.0, 0.0)
    if (
        len(ledger) == 1
        and ledger[0][1] == 1
        and (alone := ledger[0][0].epsilon_alone(delta)) is not None
    ):
        return PLDResult(alone, delta, 0.0, 0.0, 0.0)
    if any(delta < law.least_delta for law, _ in ledger):
        return None
    infinite = -math.expm1(math.fsum(count * math.log1p(-law.infinite) for law, count in ledger))
    if infinite >= delta:
        return PLDResult(math.inf, delta, 0.0, 0.0, 0.0)
    return _both_ways(ledger, _AtDelta(delta, delta - infinite), step)


def pld_delta(
    losses: Sequence[tuple[LossLaw, int]], epsilon: float, *, grid: float = 1e-4
) -> PLDResult | None:
    """Returns the least delta at epsilon that the composed loss laws give, rounded up; None if there is no figure.

    Args:
        losses: as for `pld_epsilon`.
        epsilon: >= 0.
        grid: largest step of the losses, unless that takes too many points.

    Raises:
        ValueError: epsilon or grid is out of range, or a number of releases is negative.

    Guarantee: as for `pld_epsilon`.

    Source: docs/proofs/accounting.md#composition-by-transforms.

    Example:
        >>> from torch_dpsco.accounting.analysis.pld_laws import GaussianLoss
        >>> round(pld_delta([(GaussianLoss(ratio=0.6), 1), (GaussianLoss(ratio=0.8), 1)], epsilon=1.0).delta, 6)
        0.126937
    """
    epsilon = check.nonnegative(epsilon=epsilon)
    ledger = _canonical(losses)
    step = check.positive(grid=grid)
    if not ledger:
        return PLDResult(epsilon, 0.0, 0.0, 0.0, 0.0)
    if (
        len(ledger) == 1
        and ledger[0][1] == 1
        and (alone := ledger[0][0].delta_alone(epsilon)) is not None
    ):
        return PLDResult(epsilon, alone, 0.0, 0.0, 0.0)
    return _both_ways(ledger, _AtEpsilon(epsilon), step)


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
    finite: float  # delta less what infinite losses take

    def plan(self, cumulant: Cumulant) -> _Plan:
        """Returns the tilt and what is known in advance from the cumulant."""

        def epsilon(t: float) -> float:
            return (cumulant(t) - math.log(self.finite) + conversion(t)) / t

        tilt = least(epsilon, cumulant.limit)
        if epsilon(tilt) <= 0:
            return _AtEpsilon(0.0).plan(cumulant)._replace(tolerance=math.inf)
        return _Plan(tilt, epsilon(tilt), math.log(self.finite), _LOOSE * tilt * epsilon(tilt))

    def answer(self, curve: DeltaCurve, shift: float) -> PLDResult | None:
        """Reads the answer off a curve, the losses of which may be short of the true ones by `shift`."""
        # PRIVACY: what rounding took from the losses is added (test_what_rounding_took_from_the_losses_is_added)
        found = curve.epsilon(math.log(self.delta))
        if found is None:
            return None
        epsilon = max(0.0, (found + shift) * (1 + 1e-15))
        return PLDResult(epsilon, self.delta, 0.0, curve.grid, curve.rounding_at(found))

    def with_error(self, answer: PLDResult, cost: float, tilt: float) -> PLDResult:
        """Returns the answer with what the grid's `cost`, an increase of K(tilt), means for it."""
        return answer._replace(error=(cost + answer.rounding) / tilt)


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
        return PLDResult(
            self.epsilon, math.exp(curve.log_delta_at(at)), 0.0, curve.grid, curve.rounding_at(at)
        )

    def with_error(self, answer: PLDResult, cost: float, tilt: float) -> PLDResult:
        return answer._replace(error=-answer.delta * math.expm1(-cost - answer.rounding))


_Query: TypeAlias = _AtDelta | _AtEpsilon  # about a composition


def _canonical(losses: Sequence[tuple[LossLaw, int]]) -> Ledger:
    """Merges equal laws and all Gaussians, drops what has no release, and sorts."""
    counts: dict[LossLaw, int] = {}
    squares = []
    for law, count in losses:
        number = check.count(count=count)
        if law.mu is None:
            counts[law] = counts.get(law, 0) + number
        else:
            squares.append(law.mu * law.mu * number)
    total = math.fsum(squares)
    if total > 0:
        # PRIVACY: rounded up, exact composition of Gaussians (test_merged_gaussians_are_not_below_their_exact_sum)
        counts[GaussianLoss(math.sqrt(total) * (1 + 1e-15))] = 1
    return tuple(sorted(((law, count) for law, count in counts.items() if count), key=repr))


class _Reading(NamedTuple):
    """An answer for one order of the pairs, None if there is none, and whether more work could improve it."""

    result: PLDResult | None
    final: bool

    @property
    def rank(self) -> tuple[float, float]:
        """Larger is worse."""
        return (math.inf, math.inf) if self.result is None else self.result[:2]


@lru_cache(maxsize=1024)
def _both_ways(ledger: Ledger, query: _Query, grid: float) -> PLDResult | None:
    """Returns the worse answer of the two orders of the pairs, improving only the one that decides."""
    # PRIVACY: each order over the whole list, then the larger (test_the_worse_direction_is_reported)
    orders = dict.fromkeys([ledger, tuple((law.exchanged(), count) for law, count in ledger)])
    readings = {order: _one_way(order, query, grid, refine=False) for order in orders}
    while True:
        order = max(readings, key=lambda order: readings[order].rank)
        if readings[order].final:
            return readings[order].result
        readings[order] = _improved(order, query, grid)


def _improved(ledger: Ledger, query: _Query, grid: float) -> _Reading:
    """Returns the best answer for the pairs as they are ordered."""
    reading = _one_way(ledger, query, grid, refine=True)
    # fewer points have less rounding: a coarser grid may be tighter, and both are bounds
    while reading.result is not None and reading.result.rounding > _MUCH_ROUNDING:
        coarser = _one_way(ledger, query, 8 * reading.result.grid, refine=True)
        if coarser.rank >= reading.rank:
            break
        reading = coarser
    return _Reading(reading.result, final=True)


class _Terms(NamedTuple):
    """What a reading takes from its scene: per release of each law the shift, and what doubling the grid would add."""

    shifts: list[float]
    costs: list[float]  # to the cumulant at the tilt
    tilt: float
    coarse: bool  # whether that is too much

    def reading(
        self, query: _Query, curve: DeltaCurve, counts: Sequence[int], refine: bool
    ) -> _Reading:
        """Returns the answer that a curve gives."""
        answer = query.answer(curve, summed(counts, self.shifts))
        if answer is None:
            return _Reading(None, final=refine)
        good = not self.coarse and answer.rounding <= _MUCH_ROUNDING
        return _Reading(
            query.with_error(answer, summed(counts, self.costs), self.tilt), final=good
        )


class _Scene(NamedTuple):
    """Laws on their grid, and where to look."""

    laws: Counted
    plan: _Plan
    view: Window
    terms: _Terms


def _one_way(ledger: Ledger, query: _Query, grid: float, *, refine: bool) -> _Reading:
    """Returns the answer for the pairs as they are ordered, on a finer grid only if `refine`."""
    counts = [count for _, count in ledger]
    if (
        isinstance(query, _AtDelta) and sum(counts) > 1
    ):  # one release alone has no rounding, composed as it is
        kept = _kept(tuple((law, *_block(count)) for law, count in ledger), query, grid, refine)
        if kept is not None:
            powers, terms = kept
            return terms.reading(
                query, powers.curve(counts, math.log(query.delta)), counts, refine
            )
    scene = _resolved(ledger, query, grid, refine)
    if scene is None:
        return _Reading(None, final=True)
    return scene.terms.reading(
        query, compose(scene.laws, scene.view, scene.plan.epsilon), counts, refine
    )


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
    blocks: tuple[tuple[LossLaw, int, int], ...], query: _AtDelta, grid: float, refine: bool
) -> tuple[Powers, _Terms] | None:
    """Returns what answers all counts of a block: the scene of the largest, seen down to the smallest."""
    scene = _resolved(tuple((law, most) for law, _, most in blocks), query, grid, refine)
    if scene is None:
        return None
    least = [few for _, few, _ in blocks]
    smallest = Cumulant([(law, few) for (law, _), few in zip(scene.laws, least, strict=True)])
    view = scene.view
    step = scene.laws[0][0].grid
    view = replace(view, low=min(view.low, window(smallest, view.tilt).low))
    view = view.including(query.plan(smallest).epsilon - step, _FEW * step)
    if view.width > _POINTS * step:
        return None
    powers = Powers(scene.laws, least, view, math.log(query.delta), scene.plan.epsilon)
    return (powers, scene.terms) if powers.few else None


def _resolved(ledger: Ledger, query: _Query, grid: float, refine: bool) -> _Scene | None:
    """Chooses the grid, and how far into the tails to go."""
    weight = sum(law.weight for law, _ in ledger)
    points = min(_POINTS, _ALL_POINTS // weight)
    if weight > _MAX_LAWS:
        return None
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
        costs = [coarsening(law, plan.tilt) for law, _ in laws]
        cost = summed([count for _, count in laws], costs)
        factor = _regrid(cost / plan.tolerance, view.width / step, span / step, points)
        if factor == 1 or (factor < 1 and (coarsened or not refine)):
            shifts = [law.shift for law, _ in laws]
            return _Scene(
                laws, plan, view, _Terms(shifts, costs, plan.tilt, factor < 1 and not coarsened)
            )
        coarsened = coarsened or factor > 1
        step *= factor
    return None


def _view(cumulant: Cumulant, plan: _Plan, steps: int, step: float) -> Window:
    """Returns the window of the plan's tilt, or a narrower one at the price of a little rounding."""
    view = window(cumulant, plan.tilt)
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
        return 2.0 ** -max(0, min(math.ceil(math.log2(cost) / 2), math.floor(math.log2(room)), 6))
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


_KNOTS = 32  # epsilons at which delta is computed
_FINE = 128  # points of an interval on its chord
_STEP_OF_MU = 1e-4  # in which mu grows until it covers them


def gdp_upper(losses: Sequence[tuple[LossLaw, int]], delta_min: float = 1e-10) -> float | None:
    """Returns a mu such that the privacy curve of composed loss laws is below that of mu-GDP where delta >= delta_min.

    It exceeds the least such mu by about 1 %, and costs 33 compositions.

    Args:
        losses: laws with the numbers of their releases, as for `pld.pld_epsilon`.
        delta_min: in (0, 1).

    Returns:
        mu >= 0, rounded up; inf if infinite losses alone exceed delta_min, or if the total variation distance is 1 in
        floating point (mu above 16); None if there is no figure.

    Raises:
        ValueError: delta_min is out of range, or a number of releases is negative.

    Guarantee: for every delta >= delta_min, (gaussian_epsilon(mu, delta), delta)-DP under the adjacency that all the
        laws share. Not GDP: "valid for delta >= delta_min" belongs to it, and it must not be composed further.

    Source: docs/proofs/accounting.md#a-mu-that-covers-a-curve.

    Example:
        >>> from torch_dpsco.accounting.analysis.pld_laws import PoissonLoss
        >>> round(gdp_upper([(PoissonLoss(rate=256 / 60000, noise=1.0), 235)]), 2)
        0.24
    """
    delta_min = check.open_interval(0.0, 1.0, delta_min=delta_min)
    end = pld_epsilon(losses, delta_min)
    if end is None or end.epsilon in (0.0, math.inf):
        return None if end is None else end.epsilon
    knots = np.linspace(0.0, end.epsilon, _KNOTS + 1)
    found = [pld_delta(losses, epsilon) for epsilon in knots[:-1].tolist()]
    known = [max(one.delta, delta_min) for one in found if one is not None]
    if len(known) < _KNOTS:
        return None
    values = np.minimum.accumulate([*known, delta_min])  # delta does not increase
    if values[0] >= 1:
        return math.inf
    epsilons, deltas = _chords(knots, values)
    needed = np.log(deltas[:-1])
    mu = max(gaussian_mu(*point) for point in zip(knots.tolist(), values.tolist(), strict=True))
    # between two points delta is at most that of the first; margin: the kernel is accurate to 1e-12 of the log
    # (docs/proofs/accounting.md#renyi-integrals)
    while np.any(log_delta_curve(epsilons[1:], mu) * (1 + 1e-12) < needed):
        mu *= 1 + _STEP_OF_MU
    return mu


def _chords(knots: FloatArray, values: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Returns epsilons, 128 to an interval, and the chords in e^epsilon there, rounded up.

    Between a and b the chord is delta_b + (delta_a - delta_b) (e^b - e^epsilon) / (e^b - e^a).
    """
    low = knots[:-1, None]
    high = knots[1:, None]
    epsilons = low + (high - low) * (np.arange(_FINE) / _FINE)
    # margin: the differences round by less than 1e-10 (docs/proofs/accounting.md#a-mu-that-covers-a-curve)
    share = up(np.expm1(epsilons - high) / np.expm1(low - high), 1e-10)
    # PRIVACY: the sum is rounded up (test_chords_are_never_below_their_exact_value)
    chords = (values[1:, None] + (values[:-1, None] - values[1:, None]) * share) * (1 + 1e-15)
    deltas = np.append(np.minimum(chords, 1.0), values[-1])
    return np.append(epsilons, knots[-1]), np.minimum.accumulate(deltas)
