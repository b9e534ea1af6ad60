"""Sums that exceed a level because one term is large: where a tilt of all terms alike loses too many digits.

Let b > 0. Either no term reaches b, or the largest does, and each of T independent terms Y_i is it with the same
probability; with S their sum,

    E (S - level)_+ = E (S - level)_+ [all Y_i < b] + T E G(Y_1) [Y_1 >= b],
    G(y) = E (y + Y_2 + .. + Y_T - level)_+ [Y_2, .., Y_T <= y].

The first part has a Chernoff bound. For Y_1 between two cuts, the bound in G is raised to a cut above; then G is convex
in y, at most its chord, and an excess of T - 1 terms above level - y: `allocation_sums` again, with tilts that need to
reach only what is likely. Every b gives a bound; the least of some is taken.

Source: docs/proofs/allocation.md#one-large-term.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.special import ndtr

from torch_dpsco.accounting.analysis.allocation_sums import Cloud, Hinge, Sum, spread
from torch_dpsco.accounting.analysis.gaussian import gaussian_log_delta
from torch_dpsco.accounting.analysis.pld_compose import least, log_beyond
from torch_dpsco.accounting.analysis.pld_pairs import UNIT
from torch_dpsco.accounting.analysis.quadrature import FloatArray

_MANY = 50  # terms from which the others come close to a level by themselves
_RATIO, _RATIO_FEW = 0.04, 0.08  # logarithm of the ratio of neighboring cuts
_HIGH = 1.44  # that of the last cut to the scale of the sum
_SERVED, _SERVED_FEW = (
    12,
    4,
)  # intervals that one curve serves; with few terms, two are large together
_FARTHEST = 400.0  # standard deviations of the last cut
_LARGEST = 700.0  # nats: no excess is as large, since T t and the last cut are below e^170
_STEPS = 1 << 12  # of the grid of what is below b


def by_one_large(question: Sum, tolerance: float) -> float:
    """Returns the logarithm of a bound on E (S - level)_+, for a sign of 1 and at least 2 terms; inf for large noise.

    Args:
        question: the sum.
        tolerance: nats of each G that its grid may cost, > 0.
    """
    term = question.term
    count = question.count
    noise = question.term.noise
    cuts = _cuts(question)
    x, _ = term.positions(cuts)
    reach = float(np.abs(x).max()) / noise
    if reach > _FARTHEST:  # no term is ever large
        return math.inf
    accuracy = 2 * term.accuracy(reach) + 8 * UNIT * (
        max(term.log_weight, 0.0) + float(np.abs(np.log(cuts)).max())
    )
    width = np.diff(cuts)
    sizes = np.hypot(cuts, term.root)
    mass, rise = term.integrate(x, np.log(width), reach)
    # margin: rounded up, as masses and means are (docs/proofs/allocation.md#one-large-term)
    slack = accuracy + 2 * term.rounding + 1.1 * term.rounding * (sizes[1:] + sizes[:-1]) / width
    total = mass * (1 + 2 * accuracy)
    far = np.minimum(rise * (1 + slack), total)
    left, right = _excesses(question, cuts, tolerance)
    shares = (total - far) * left + far * right
    rest = Sum(term, count - 1, 1, question.level - float(cuts[-1]), question.log_floor).answer(
        tolerance
    )
    last = math.exp(gaussian_log_delta(math.log(cuts[-1]), 1 / noise)) * (1 + 1e-9)
    other = min(_LARGEST, rest.log_at(question.level - float(cuts[-1])))
    last += float(ndtr(-x[-1] / noise)) * (1 + accuracy) * math.exp(other)
    sums = (np.cumsum(shares[::-1])[::-1] + last) * (1 + 4 * UNIT * cuts.size)
    with np.errstate(divide="ignore"):
        large = np.log(sums) + math.log(count)
    chosen = range(
        0,
        max(int(np.searchsorted(cuts, cuts[-1] * math.exp(-_HIGH))), 1),
        8 if count > _MANY else 4,
    )
    return min(float(np.logaddexp(large[i], _none_large(question, float(cuts[i])))) for i in chosen)


def _cuts(question: Sum) -> FloatArray:
    """Returns ascending values of a term, from where it is not large to where the excess is linear in it."""
    noise = question.term.noise
    weight = max(question.term.log_weight, 0.0)
    scale = max(question.level, 0.0) or question.count * math.exp(weight)
    least = 0.05 * abs(question.level - question.count * (1 - math.exp(weight) * (weight > 0)))
    if not question.term.positive:  # all others may be small
        least = min(
            least,
            scale
            * math.exp(-3 - 1 / (2 * noise * noise) - 10 / noise / math.sqrt(question.count - 1)),
        )
    ratio = _RATIO if question.count > _MANY else _RATIO_FEW
    number = math.ceil(math.log(scale / min(max(least, 2.0), scale / 2)) / ratio)
    cuts = scale * np.exp(
        ratio * np.arange(-number, round(_HIGH / ratio) + 1 if not question.term.positive else 1)
    )
    return _STEPS * np.asarray(cuts / _STEPS, dtype=np.float64)


def _excesses(question: Sum, cuts: FloatArray, tolerance: float) -> tuple[FloatArray, FloatArray]:
    """Returns bounds on G at the left and the right ends of the intervals between cuts."""
    left = np.empty(cuts.size - 1)
    right = np.empty(cuts.size - 1)
    served = _SERVED if question.count > _MANY else _SERVED_FEW
    hinges: list[Hinge] = []
    for start in reversed(range(0, cuts.size - 1, served)):
        part = cuts[start : start + served + 1]
        most = float(part[-1])
        rest = Sum(
            question.term, question.count - 1, 1, question.level - most, question.log_floor, most
        )
        hinges = [rest.answer(tolerance), *hinges[:2]]  # those of higher ceilings are bounds, too
        levels = (question.level - part).tolist()
        values = np.exp(
            [min(_LARGEST, *(hinge.log_at(level) for hinge in hinges)) for level in levels]
        )
        left[start : start + served], right[start : start + served] = values[:-1], values[1:]
    return left, right


def _none_large(question: Sum, top: float) -> float:
    """Returns the logarithm of a bound on the part where all terms are below `top`."""
    term = question.term
    step = top / _STEPS
    values, mass = question.points
    kept = values < top
    cloud = Cloud(values[kept] / top, mass[kept], question.count)
    level = question.level / top

    def price(t: float) -> float:
        return cloud(t) - t * level - math.log(t)

    tilt = least(price, 2.0**12)
    low = math.floor(max(question.ends[0], -60 * top / tilt) / step)
    law = spread(term, step, (low, 0, _STEPS), 1, 1 / _STEPS, above=False)
    # x <= e^(y x) / (e y); losses are in units of `top`
    return (
        log_beyond([(law, question.count)], level - 8 * UNIT * abs(level), tilt)
        - 1
        - math.log(tilt / top)
        + 1e-12
    )
