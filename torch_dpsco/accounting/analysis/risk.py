"""What a test can find out about one record: all of a privacy curve, in rates of errors and in odds.

A test decides which of two neighboring data sets was used: "was this patient in the data?". With false positive rate f
(alarms where the record was not used) and false negative rate m (misses), (epsilon, delta)-DP in both directions means

    m >= 1 - delta - e^epsilon f    and    m >= e^-epsilon (1 - delta - f).

Every point of the curve delta(epsilon) gives two such lines, and each is a bound by itself: a search over epsilon can
only find a better one. With t = e^epsilon, delta is convex in t, so that the first line at f is concave in t, and the
second a concave function over t: both rise to one maximum and then fall, and the search finds it. The lines of all
epsilon together say as much as the curve: they are the trade-off function (Dong, Roth and Su 2022, proposition 6).
It is symmetric, and crosses f = m at (1 - delta(0))/2: the first lines decide below, the second above.

Source: docs/proofs/accounting.md#risk-of-one-record.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import scipy
from scipy.special import ndtri

from torch_dpsco import _validate as check

_RELATIVE, _ABSOLUTE = (
    1e-12,
    1e-15,
)  # what a delta that is not an upper bound by itself may be short of
_FINE = 1e-4  # of epsilon, in a search: the maximum is flat, so that its value is found to about 1e-8
_NEAR = 0.05  # epsilon, as a share of an advantage, that stands for 0: costs noise of less than 1e-3 of its scale
_MOST = 700.0  # e^epsilon fits
# one person's data changes the odds of any conclusion at most e-fold, about 3; above 22026-fold
STRONG, WEAK = 1.0, 10.0


def strength(epsilon: float) -> str:
    """Returns what an epsilon is called on every page: "strong" up to 1, "moderate" up to 10, above "weak".

    Example:
        >>> strength(1.0), strength(3.0), strength(12.0)
        ('strong', 'moderate', 'weak')
    """
    epsilon = check.nonnegative(epsilon=epsilon, allow_inf=True)
    if epsilon <= STRONG:
        return "strong"
    return "moderate" if epsilon <= WEAK else "weak"


@dataclass(frozen=True, eq=False)
class Risk:
    """What a test can find out about one record, at worst: bounds on every test, whatever it knows beside the record.

    Args:
        delta: least delta at epsilon >= 0 that is known, in both directions.
        pure: an epsilon at which delta is 0; inf if there is none.
        knots: epsilons at which the curve bends.

    Example:
        >>> from torch_dpsco.accounting.analysis.gaussian import gaussian_delta
        >>> risk = Risk(lambda epsilon: gaussian_delta(1.0, epsilon))
        >>> round(risk.advantage, 4), round(risk.true_positive(0.01), 4), round(risk.posterior(0.1, 0.01), 4)
        (0.3829, 0.0924, 0.5065)
    """

    delta: Callable[[float], float] = field(repr=False)
    pure: float = math.inf
    knots: tuple[float, ...] = ()
    _known: dict[float, float] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        check.nonnegative(pure=self.pure, allow_inf=True)

    @classmethod
    def of_point(cls, epsilon: float, delta: float) -> Risk:
        """Returns the risk where one (epsilon, delta) is all that is known.

        At epsilon' < epsilon the curve is 1 - (1 - delta)(1 + e^epsilon') / (1 + e^epsilon) (see the source).

        Args:
            epsilon: >= 0, inf allowed.
            delta: in [0, 1].

        Example:
            >>> round(Risk.of_point(1.0, 1e-5).advantage, 4)
            0.4621
        """
        check.nonnegative(epsilon=epsilon, allow_inf=True)
        check.between(0.0, 1.0, delta=delta)

        def curve(other: float) -> float:
            if other >= epsilon:
                return delta
            share = (math.exp(other - epsilon) + math.exp(-epsilon)) / (1.0 + math.exp(-epsilon))
            return min(1.0, 1.0 - (1.0 - delta) * share + _ABSOLUTE)

        return cls(
            curve, epsilon if delta == 0 else math.inf, (epsilon,) if epsilon < _MOST else ()
        )

    def delta_at(self, epsilon: float) -> float:
        """Returns delta at epsilon >= 0, rounded up."""
        epsilon = check.nonnegative(epsilon=epsilon, allow_inf=True)
        if epsilon >= self.pure:
            return 0.0
        if epsilon not in self._known:
            delta = self.delta(epsilon)
            # margin: above the rounding of closed forms (docs/proofs/accounting.md#risk-of-one-record)
            self._known[epsilon] = (
                min(1.0, delta * (1.0 + _RELATIVE) + _ABSOLUTE) if delta else 0.0
            )
        return self._known[epsilon]

    @property
    def points(self) -> tuple[tuple[float, float], ...]:
        """The (epsilon, delta) that were computed so far, to draw the curve."""
        return tuple(sorted(self._known.items()))

    @property
    def advantage(self) -> float:
        """Largest (true - false positive rate) of any test; delta at epsilon = 0, the total variation distance."""
        return self.delta_at(0.0)

    def false_negative(self, false_positive: float) -> float:
        """Returns a lower bound on the false negative rate of every test with this false positive rate in [0, 1]."""
        f = check.between(0.0, 1.0, false_positive=false_positive)
        top = min(self.pure, _MOST)
        if f == 1:
            return 0.0

        def alarm(epsilon: float) -> float:
            return 1.0 - self.delta_at(epsilon) - math.exp(epsilon) * f

        def silence(epsilon: float) -> float:
            return math.exp(-epsilon) * (1.0 - self.delta_at(epsilon) - f - _ABSOLUTE)

        found = max([0.0, *(line(knot) for knot in self.knots for line in (alarm, silence))])
        if (
            f <= 0.5 - 0.5 * self.advantage
        ):  # where the curve, which is symmetric, has slopes of -1 and less
            found = max(found, alarm(top) if f == 0 else _maximum(alarm, min(top, -math.log(f))))
        else:
            found = max(found, silence(0.0))
            found = max(
                found,
                _maximum(silence, min(top, math.log((1.0 - f) / found)) if found > 0 else top),
            )
        # margin: rounded down (docs/proofs/accounting.md#risk-of-one-record)
        return max(0.0, found * (1.0 - _ABSOLUTE) - _ABSOLUTE)

    def true_positive(self, false_positive: float) -> float:
        """Returns the largest true positive rate of a test with this false positive rate in [0, 1], rounded up."""
        return min(1.0, 1.0 - self.false_negative(false_positive) + _ABSOLUTE)

    def posterior(self, prior: float, false_positive: float = 0.0) -> float:
        """Returns the largest probability, after an alarm, that the record was used.

        Args:
            prior: the probability before, in [0, 1].
            false_positive: least false positive rate of the test, in [0, 1]. At 0, any test: then 1.0, unless there is
                a pure epsilon, since rare answers may give a record away.

        Example:
            >>> round(Risk.of_point(1.0, 0.0).posterior(0.5), 4)
            0.7311
        """
        p = check.between(0.0, 1.0, prior=prior)
        f = check.between(0.0, 1.0, false_positive=false_positive)
        if p in (0.0, 1.0):
            return p
        # PRIVACY: a test with more false alarms proves less (test_an_alarm_of_a_rarer_test_proves_more)
        rate = f / self.true_positive(f) if f else 0.0
        odds = max(rate, math.exp(-self.pure)) * (1.0 - p) / p  # against
        return min(1.0, (1.0 + 8.0 * _ABSOLUTE) / (1.0 + odds))

    def words(self, unit: str = "example", prior: float = 0.1) -> str:
        """Returns the figures as sentences about one unit; figures are rounded against the promise.

        Args:
            unit: what one unit is called. It changes words only: what was charged for a row is true of a patient whose
                row it is if no patient has several (`PrivacyReport.named` asks why).
            prior: in (0, 1), how likely somebody thinks that the unit was used.
        """
        if not isinstance(unit, str):
            raise ValueError(f"unit must be text (got {check.shown(unit)})")
        prior = check.between(0.0, 1.0, prior=prior)
        lines = [
            (
                f"Somebody who knows all but one {unit}, and tests whether this {unit}'s data was"
                " used:"
            ),
            (
                f"- guesses right at most {percent(0.5 + 0.5 * self.advantage)} of the time where a"
                " coin flip is right 50 %;"
            ),
        ]
        for f in (0.01, 0.001):
            lines.append(
                f"- with false alarms for {100 * f:g} % of those not used, finds at most"
                f" {percent(self.true_positive(f))} of those used; who thought {100 * prior:g} %"
                f" likely may, after such an alarm, think {percent(self.posterior(prior, f))}."
            )
        return "\n".join(lines)


def percent(share: float) -> str:
    """Returns the share in percent, rounded up to two digits after the point."""
    return f"{min(100.0, math.ceil(share * 1e4) / 100):g} %"


def _maximum(line: Callable[[float], float], top: float) -> float:
    """Returns the largest value found of a bound that rises and then falls on [0, top]: a bound wherever it looks."""
    best = max(line(0.0), line(top))

    def seen(epsilon: float) -> float:
        nonlocal best
        value = line(float(epsilon))
        best = max(best, value)
        return -value

    if top > 0:
        scipy.optimize.minimize_scalar(
            seen, bounds=(0.0, top), method="bounded", options={"xatol": _FINE}
        )
    return best


def line_of_advantage(advantage: float) -> tuple[float, float]:
    """Returns (epsilon, delta) that bounds the advantage of every test by this, by `Risk.of_point`.

    (0, advantage) is the same promise; an epsilon above 0, where the curve of Gaussian noise has the same slope as the
    line of this advantage, is what budgets and calibrations can work with.

    Args:
        advantage: in (0, 1).

    Example:
        >>> epsilon, delta = line_of_advantage(0.1)
        >>> round(epsilon, 6), round(delta, 6), round(Risk.of_point(epsilon, delta).advantage, 9)
        (0.005, 0.097744, 0.1)
    """
    a = check.open_interval(0.0, 1.0, advantage=advantage)
    rise = math.expm1(_NEAR * a)
    return _NEAR * a, _rounded_down(a * (1.0 + rise / 2.0) - rise / 2.0)


def line_of_rates(tpr: float, fpr: float) -> tuple[float, float]:
    """Returns (epsilon, delta) that bounds the true positive rate of every test with this false positive rate.

    The line that touches, at these rates, the curve of the Gaussian noise that just allows them: for Gaussian noise
    nothing is lost, and any other mechanism within (epsilon, delta) keeps the bound too.

    Args:
        tpr: the bound, in (fpr, 1).
        fpr: in (0, 1).

    Example:
        >>> epsilon, delta = line_of_rates(tpr=0.2, fpr=0.01)
        >>> Risk.of_point(epsilon, delta).true_positive(0.01) <= 0.2 + 1e-12
        True
    """
    f = check.open_interval(0.0, 1.0, fpr=fpr)
    t = check.open_interval(0.0, 1.0, tpr=tpr)
    if t <= f:
        raise ValueError(f"tpr must be > fpr={f:g}, which a blind guess attains (got {t:g})")
    if t + f > 1.0:  # of the test whose alarms are the silence of the other
        f, t = 1.0 - t, 1.0 - f
    mu = float(ndtri(t) - ndtri(f))
    epsilon = mu * (-float(ndtri(f)) - mu / 2.0)
    if epsilon < _NEAR * (t - f):
        return line_of_advantage(t - f)
    return epsilon, _rounded_down(t - math.exp(epsilon) * f)


def _rounded_down(delta: float) -> float:
    return delta * (1.0 - _RELATIVE) - _ABSOLUTE
