"""Random allocation, written plainly: brackets by outer sums on uneven grids, quadrature for two steps, Monte Carlo.

Nothing is shared with the package. The law of one term is cut into bins; a bin merged to its mean is below it in convex
order, one that is spread to its ends is above it. Sums of laws are all pairs of points, merged or spread again.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.special import ndtr


def ratio(x, z):
    return np.exp((2 * x - 1) / (2 * z * z))


def _cells(values, mass, edges, spread):
    """Puts points into cells: merged to the means, or spread to the ends."""
    place = np.clip(np.searchsorted(edges, values, side="right") - 1, 0, edges.size - 2)
    total = np.bincount(place, mass, edges.size - 1)
    moment = np.bincount(place, mass * values, edges.size - 1)
    if not spread:
        kept = total > 0
        return moment[kept] / total[kept], total[kept]
    width = np.diff(edges)
    up = np.clip((moment - total * edges[:-1]) / width, 0, total)
    points = np.zeros(edges.size)
    points[:-1] += total - up
    points[1:] += up
    return edges[points > 0], points[points > 0]


def _edges(values, mass, m):
    """Returns cuts: steps of sd / m around the mean, then 1 / m of the distance; the same around 0 for signed terms."""
    mean = (values * mass).sum() / mass.sum()
    sd = math.sqrt(((values - mean) ** 2 * mass).sum() / mass.sum())
    low, high = values.min(), values.max()
    grids = [mean + sd * np.sinh(np.arange(-60 * m, 60 * m + 1) / m)]
    if low < 0:  # what is near 0 is decided by values of all sizes
        tiny = min(sd, -low * 1e-22)
        grids.append(tiny * np.sinh(np.arange(-90 * m, 90 * m + 1) / m))
    grid = np.unique(np.concatenate(grids))
    inside = grid[(grid > low) & (grid < high)]
    return np.concatenate([[low], inside, [high * (1 + 1e-12) + 1e-300]])


def sum_law(z, steps, m, spread, t=0.0):
    """Returns values and masses of the sum of `steps` terms l(x) - t l(-x), x ~ N(0, z^2)."""
    x = np.linspace(-12 * z, 12 * z + 1, 400 * m + 1)
    # exact masses and means of fine bins; the ends take what is beyond them
    cut = np.concatenate([[-np.inf], x[1:-1], [np.inf]])

    def between(shift):
        left, right = (cut[:-1] - shift) / z, (cut[1:] - shift) / z
        return np.where(left > 0, ndtr(-left) - ndtr(-right), ndtr(right) - ndtr(left))

    mass = between(0)
    mean = (between(1) - t * between(-1)) / np.where(mass > 0, mass, 1)
    keep = mass > 1e-300
    base = mean[keep], mass[keep]
    law, out = _cells(*base, _edges(*base, m), spread), None
    while True:
        if steps % 2:
            out = law if out is None else _paired(out, law, m, spread)
        steps //= 2
        if not steps:
            return out
        law = _paired(law, law, m, spread)


def _paired(one, two, m, spread):
    values = (one[0][:, None] + two[0]).ravel()
    mass = (one[1][:, None] * two[1]).ravel()
    return _cells(values, mass, _edges(values, mass, m), spread)


def bracket(z, steps, epsilon, way, m=40):
    """Returns numbers below and (up to fine bins of the first law) above delta(epsilon)."""
    return tuple(bound(z, steps, epsilon, way, m, spread) for spread in (False, True))


def bound(z, steps, epsilon, way, m, spread):
    """Returns a number below delta(epsilon), or one above it if laws are spread."""
    t = math.exp(epsilon)
    values, mass = sum_law(z, steps, m, spread, t if way == "replace" else 0.0)
    average = values / steps
    gain = {"remove": average - t, "add": 1 - t * average, "replace": average}[way]
    return float((mass * np.maximum(gain, 0)).sum())


def two_steps(z, epsilon, way, points=400_001):
    """Returns delta(epsilon) for T = 2: one integral in closed form, the other a sum over a fine grid."""
    t, variance = math.exp(epsilon), z * z
    x = np.linspace(-14 * z, 14 * z + 2, points)
    weights = np.exp(-x * x / 2 / variance) / z / math.sqrt(2 * math.pi) * (x[1] - x[0])
    if way == "replace":
        y = t * ratio(-x, z) - ratio(x, z)
        half = math.exp(-1 / 2 / variance)
        root = np.hypot(y, 2 * math.sqrt(t) * half)
        r = variance * np.log(
            np.where(y >= 0, (y + root) / (2 * half), 2 * t * half / (np.abs(y) + root))
        )
        inner = ndtr(-(r - 1) / z) - t * ndtr(-(r + 1) / z) - y * ndtr(-r / z)
        return float(weights @ inner) / 2
    y = 2 * (t if way == "remove" else 1 / t) - ratio(x, z)
    with np.errstate(divide="ignore", invalid="ignore"):
        r = np.where(y > 0, variance * np.log(y) + 0.5, -np.inf)
    if way == "remove":
        return float(weights @ (ndtr(-(r - 1) / z) - y * ndtr(-r / z))) / 2
    inner = np.where(y > 0, y * ndtr(r / z) - ndtr((r - 1) / z), 0.0)
    return t * float(weights @ inner) / 2


def sampled(z, steps, epsilons, way, draws, generator, shift=1.0):
    """Returns an estimate of delta at the sum of `epsilons`, one pass each, and its standard error.

    Remove and replace are means under "with", in which one coordinate has mean 1; it is drawn around `shift`,
    and weighted.
    """
    log_loss = np.zeros(draws)
    log_weight = np.zeros(draws)
    for _ in epsilons:
        x = generator.normal(0.0, z, (draws, steps))
        if way != "add":
            x[:, 0] += shift
            log_weight += ((x[:, 0] - shift) ** 2 - (x[:, 0] - 1) ** 2) / (2 * z * z)
        m = np.log(ratio(x, z).mean(axis=1))
        log_loss += {"remove": m, "add": -m, "replace": m - np.log(ratio(-x, z).mean(axis=1))}[
            way
        ]
    gain = np.exp(log_weight) * -np.expm1(np.minimum(math.fsum(epsilons) - log_loss, 0.0))
    return float(gain.mean()), float(gain.std() / math.sqrt(draws))


class Drawn:
    """Draws of several passes from other laws than their own, weighted.

    A tenth is drawn from the law itself. Others have one coordinate, any, around a, and the rest around b: in all
    passes (a and b free, or moved alike), or in one pass, b as it is. a and b follow what small samples weighted by
    their gain say (cross entropy). Weights are at most 10, and estimates have no bias whatever a and b are.
    """

    shares = (0.1, 0.3, 0.3, 0.3)

    def __init__(self, z, steps, epochs, way, generator):
        self.z, self.steps, self.epochs, self.way, self.generator = (
            z,
            steps,
            epochs,
            way,
            generator,
        )
        self.own = (0.0, 0.0) if way == "add" else (1.0, 0.0)

    def estimates(self, epsilons, draws):
        """Returns for each epsilon an estimate of delta, its standard error, and the effective number of draws."""
        parts = [
            (*self.own, False),
            *(self._trained(kind, epsilons[0]) for kind in ("free", "alike", "one pass")),
        ]
        numbers = [round(draws * share) for share in self.shares]
        x = np.concatenate(
            [self._draw(number, *part) for number, part in zip(numbers, parts, strict=True)]
        )
        plain = self._log_density(x, *self.own)
        logs = [
            self._log_ratio(x, plain, *part) + math.log(n / sum(numbers))
            for n, part in zip(numbers, parts, strict=True)
        ]
        weight, loss = np.exp(-np.logaddexp.reduce(np.array(logs), axis=0)), self._losses(x)
        return [
            self._summary(weight * -np.expm1(np.minimum(epsilon - loss, 0.0)))
            for epsilon in epsilons
        ]

    def _summary(self, gain):
        effective = gain.sum() ** 2 / (gain @ gain) if gain.any() else 0.0
        return float(gain.mean()), float(gain.std() / math.sqrt(gain.size)), float(effective)

    def _draw(self, number, a, b, single):
        every = np.ones((number, self.epochs), bool)
        chosen = (
            np.arange(self.epochs) == self.generator.integers(0, self.epochs, (number, 1))
            if single
            else every
        )
        high, low = (
            np.where(chosen, a, self.own[0])[:, :, None],
            np.where(chosen, b, self.own[1])[:, :, None],
        )
        x = self.generator.normal(0.0, self.z, (number, self.epochs, self.steps)) + low
        place = self.generator.integers(0, self.steps, (number, self.epochs, 1))
        np.put_along_axis(x, place, np.take_along_axis(x, place, 2) + high - low, 2)
        return x

    def _log_density(self, x, a, b):
        """Of each pass, over that of N(0, z^2)."""
        one = (2 * x * (a - b) - a * a + b * b) / (2 * self.z**2)
        top = one.max(axis=2)
        one = np.log(np.exp(one - top[:, :, None]).mean(axis=2)) + top
        return (2 * x * b - b * b).sum(axis=2) / (2 * self.z**2) + one

    def _log_ratio(self, x, plain, a, b, single):
        """Of a component to the law itself."""
        gain = self._log_density(x, a, b) - plain
        return (
            np.logaddexp.reduce(gain, axis=1) - math.log(self.epochs)
            if single
            else gain.sum(axis=1)
        )

    def _losses(self, x):
        m = np.log(ratio(x, self.z).mean(axis=2))
        back = np.log(ratio(-x, self.z).mean(axis=2)) if self.way == "replace" else 0.0
        return ((-m if self.way == "add" else m) - back).sum(axis=1)

    def _trained(self, kind, epsilon):
        a, b, single = *self.own, kind == "one pass"
        for _ in range(8):
            x = self._draw(800, a, b, single)
            log_ratio = self._log_ratio(x, self._log_density(x, *self.own), a, b, single)
            loss = self._losses(x)
            gain = np.exp(np.clip(-log_ratio, -600.0, 600.0))
            gain *= -np.expm1(np.minimum(min(epsilon, np.quantile(loss, 0.9)) - loss, 0.0))
            largest = x.max(axis=2)
            a = float(
                gain @ (largest.max(axis=1) if single else largest.mean(axis=1)) / gain.sum()
            )
            mean = float(gain @ x.mean(axis=(1, 2)) / gain.sum())
            if kind == "free":
                b = (mean * self.steps - a) / (self.steps - 1)
            if kind == "alike":
                b = mean - self.own[0] / self.steps
                a = self.own[0] + b
        return a, b, single
