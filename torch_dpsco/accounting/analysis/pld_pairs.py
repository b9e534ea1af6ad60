"""Pairs of Gaussian mixtures on the line whose privacy loss increases, cut where the loss is a multiple of the grid.

    MixturePair    P = sum_j Bin(j; k, q) N(j, z^2),       Q = N(0, z^2)
    OppositePair   P = (1-q) N(0, z^2) + q N(1, z^2),      Q = (1-q) N(0, z^2) + q N(-1, z^2)

The loss l = log(P/Q) increases with x: in the first pair P/Q is a sum of terms w_j e^(j (2x - j) / 2z^2), none of which
decreases and of which those with j >= 1 increase; in the second one its numerator increases and its denominator
decreases. So {l <= t} is a half line, and a bucket of losses is an interval (c, c'] of x. Over it `integrate` returns

    p = P(bucket)   and   e = p - e^l(c) Q(bucket) = integral of P(x) - P(c) Q(x) / Q(c),

the latter from terms that are all positive (1 - e^(-j (x-c) / z^2) for the rise since c), so that no digit is lost to
the small difference: Gauss-Legendre with 4 nodes, on panels so short that its relative error is below `accuracy`.

Source: docs/proofs/accounting.md#losses-on-a-grid.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.special import ndtr

from torch_dpsco.accounting.analysis.quadrature import FloatArray
from torch_dpsco.accounting.analysis.rdp import PoissonMixture

UNIT = 2.0**-53  # relative error of one operation in double precision
_BLOCK = 1 << 14  # panels integrated at once: the nodes stay in the cache
_POINTS, _WEIGHTS = np.polynomial.legendre.leggauss(4)
_FRACTIONS = (1 + _POINTS) / 2
_SHARES = _WEIGHTS / 2


@dataclass(frozen=True)
class LossPair(ABC):
    """A pair (P, Q) with increasing loss.

    Args:
        rate: q in (0, 1]; 1 in `MixturePair` only.
        noise: z > 0, in units of the shift of one record.
        size: k >= 1, records of the unit; 1 in `OppositePair`.
    """

    rate: float
    noise: float
    size: int = 1
    reverse_shift = 0.0  # distance from 0 of the outermost component of Q, to the left

    @abstractmethod
    def loss(self, x: float) -> float:
        """Returns log(P(x) / Q(x))."""

    @abstractmethod
    def positions(self, losses: FloatArray) -> tuple[FloatArray, float]:
        """Returns the x of ascending losses inside the range of the loss, and the largest residual of the solver."""

    @abstractmethod
    def _densities(
        self, x: FloatArray, rise: FloatArray, loss: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        """Returns P(x) and P(x) - e^loss Q(x), where `loss` is that at x - rise."""

    def ends(self, reach: float) -> tuple[float, float]:
        """Returns the interval `reach` standard deviations beyond the outermost means."""
        return -self.reverse_shift - reach * self.noise, self.size + reach * self.noise

    def shift(self, reach: float) -> float:
        """Returns a bound on the rounding error of the loss at a cut, besides the residual of the solver.

        A cut is x = z^2 y + j / 2, y a sum of logarithms of e^l, weights and e^(j^2 / 2z^2) (see `positions`). It is
        off by a few ulps of z^2 |y| + |x|, and l grows with slope at most 2 k / z^2.
        Losses are at most k x / z^2.
        """
        x = self.ends(reach)[1] / self.noise / self.noise
        return 32 * UNIT * self.size * (4 + self.size * x + self._log_weight)

    def accuracy(self, reach: float) -> float:
        """Returns a bound on the relative error of an integrated mass: that of the exponents, with a margin of 4."""
        spread = (self.size + self.reverse_shift) / self.noise
        return 8 * UNIT * (8 + (reach + spread) ** 2 + self._log_weight)

    def below(self, x: float) -> tuple[float, float]:
        """Returns P(X <= x) and Q(X <= x)."""
        return self._tails(x, 1.0)

    def above(self, x: float) -> tuple[float, float]:
        """Returns P(X > x) and Q(X > x)."""
        return self._tails(x, -1.0)

    def integrate(
        self, cuts: FloatArray, losses: FloatArray, reach: float
    ) -> tuple[FloatArray, FloatArray]:
        """Returns p and e of the buckets between ascending cuts, `losses` being those at their left ends."""
        width = np.diff(cuts)
        limit = min(self.noise / reach, self.noise * self.noise / self.size) / 7
        pieces = np.maximum(np.ceil(width / limit), 1).astype(np.int64)
        mass = np.empty(width.size)
        excess = np.empty(width.size)
        for part in _blocks(pieces):
            count = pieces[part]
            start = np.cumsum(count) - count
            step = np.repeat(width[part] / count, count)
            done = (np.arange(step.size) - np.repeat(start, count)) * step
            rise = done[:, None] + step[:, None] * _FRACTIONS
            densities = self._densities(
                np.repeat(cuts[:-1][part], count)[:, None] + rise,
                rise,
                np.repeat(losses[part], count)[:, None],
            )
            mass[part], excess[part] = (
                np.add.reduceat((each @ _SHARES) * step, start) for each in densities
            )
        return mass, excess

    def _normal(self, x: FloatArray, mean: float, log_factor: FloatArray | float) -> FloatArray:
        """Returns exp(log_factor) N(x; mean, z^2)."""
        scaled = (x - mean) / self.noise
        density: FloatArray = np.exp(log_factor - scaled * scaled / 2) / (
            self.noise * math.sqrt(2 * math.pi)
        )
        return density

    def _tails(self, x: float, side: float) -> tuple[float, float]:
        mean = np.arange(self.size + 1)
        weight = np.exp(self._log_weights)
        first = float(weight @ ndtr(side * (x - mean) / self.noise))
        mean = -mean if self.reverse_shift else 0 * mean
        return first, float(weight @ ndtr(side * (x - mean) / self.noise))

    @cached_property
    def _log_weights(self) -> FloatArray:
        """Logarithms of Bin(j; k, q); the binomial coefficients are exact integers first."""
        j = np.arange(self.size + 1)
        stay = math.log1p(-self.rate) if self.rate < 1 else -math.inf
        choices = np.array([math.log(math.comb(self.size, i)) for i in range(self.size + 1)])
        with np.errstate(invalid="ignore"):
            rest: FloatArray = np.where(j == self.size, 0.0, (self.size - j) * stay)
        return np.asarray(choices + j * math.log(self.rate) + rest, dtype=np.float64)

    @property
    def _log_weight(self) -> float:
        """Size of the largest finite logarithm among the weights, an amplifier of rounding."""
        logs = self._log_weights
        return float(np.abs(logs[np.isfinite(logs)]).max())


@dataclass(frozen=True)
class MixturePair(LossPair):
    """A Poisson-sampled unit of k records present, or absent; at rate 1 a plain Gaussian release."""

    def loss(self, x: float) -> float:
        """Returns log r(x), exactly linear at rate 1."""
        if self.rate == 1:
            return self.size * (2 * x - self.size) / (2 * self.noise * self.noise)
        return float(PoissonMixture(self.rate, self.noise, self.size).log_ratio(np.array([x]))[0])

    def positions(self, losses: FloatArray) -> tuple[FloatArray, float]:
        """Solves sum_{j >= 1} w_j e^(j (2x - j) / 2z^2) = e^l - w_0, closed for k = 1.

        The logarithm g of the left side is convex with slopes in [1, k] / z^2, and at the least x at which one term
        alone makes up the right side, it is above: from there Newton's iterates descend to the solution.
        """
        variance = self.noise * self.noise
        logs = self._log_weights
        target = losses + np.log(-np.expm1(logs[0] - losses))
        j = np.arange(1, self.size + 1)[:, None]
        lines = logs[1:, None] - j * j / (2 * variance)
        x = ((target - lines) * (variance / j)).min(axis=0)
        residual = np.zeros(1)
        for _ in range(100 if self.size > 1 else 0):
            terms = lines + j * (x / variance)
            top = terms.max(axis=0)
            shares = np.exp(terms - top)
            total = shares.sum(axis=0)
            residual = top + np.log(total) - target
            if np.abs(residual).max() < 64 * UNIT * self.size * (1 + np.abs(top).max()):
                break
            x = x - residual * variance * total / (j * shares).sum(axis=0)
        return x, float(np.abs(residual).max())

    def _densities(
        self, x: FloatArray, rise: FloatArray, loss: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        mass = np.zeros_like(x)
        excess = np.zeros_like(x)
        for j, log_weight in enumerate(self._log_weights):
            density = self._normal(x, j, log_weight)
            mass += density
            excess -= density * np.expm1(rise * (-j / (self.noise * self.noise)))
        return mass, excess


@dataclass(frozen=True)
class OppositePair(LossPair):
    """A Poisson-sampled record replaced by its opposite: the pair of REPLACE_ONE, with a loss odd in x."""

    reverse_shift = 1.0  # Q has a component at -1

    def loss(self, x: float) -> float:
        """Returns log r(x) - log r(-x)."""
        ratio = PoissonMixture(self.rate, self.noise).log_ratio(np.array([x, -x]))
        return float(ratio[0] - ratio[1])

    def positions(self, losses: FloatArray) -> tuple[FloatArray, float]:
        """Returns x = z^2 (l/2 + asinh(((1-q)/q) e^(1/2z^2) sinh(l/2))), the argument of asinh kept as a logarithm."""
        variance = self.noise * self.noise
        half = np.abs(losses) / 2
        with np.errstate(divide="ignore"):
            log_argument = half + np.log(-np.expm1(-2 * half)) - math.log(2)
        log_argument = (
            log_argument + math.log1p(-self.rate) - math.log(self.rate) + 1 / (2 * variance)
        )
        # beyond e^20, asinh(y) = log(2y) up to 1/4y^2 < 1e-18
        inverse = np.where(
            log_argument > 20,
            log_argument + math.log(2),
            np.arcsinh(np.exp(np.minimum(log_argument, 20))),
        )
        return np.copysign(variance * (half + inverse), losses), 0.0

    def _densities(
        self, x: FloatArray, rise: FloatArray, loss: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        exponent, (stay, drawn) = rise / (self.noise * self.noise), self._log_weights
        forward = self._normal(x, 1, drawn)
        excess = self._normal(x, -1, drawn + loss) * np.expm1(exponent) - forward * np.expm1(
            -exponent
        )
        return self._normal(x, 0, stay) + forward, excess


def _blocks(pieces: np.ndarray) -> Iterator[slice]:
    """Yields runs of buckets with about `_BLOCK` panels each."""
    ends = np.cumsum(pieces)
    start = 0
    while start < pieces.size:
        done = ends[start - 1] if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, done + _BLOCK, side="right")))
        yield slice(start, stop)
        start = stop
