"""Correlated noise, which later steps partly subtract again: a banded lower-triangular Toeplitz strategy C.

A step t releases the sum of clipped rows G_t plus w_t, where w = C^{-1} Z, Z_t ~ N(0, z^2 I) independent, that is

    w_t = z_t - c_1 w_{t-1} - .. - c_{b-1} w_{t-b+1},        c = (1, c_1, .., c_{b-1}) the first column of C.

G + C^{-1} Z tells as much as C G + Z: one Gaussian release, though G_t is chosen from earlier answers. A row of step t
moves C G in the b rows t, .., t + b - 1. Where two steps of one record are at least b apart, its rows move different
ones, so that squares add up; the largest sum is that of a record in the first step of each pass:

    S^2 = sum over i with i s < T of abs(column i s of C)^2 <= ceil(T / s) abs(c)^2        (s >= b the separation).

SGD adds up its answers: sum_{r <= t} w_r = sum_r B_{t-r} z_r, B = A C^{-1} with A lower-triangular of ones. With 1 >=
c_1 >= .. >= c_{b-1} >= 0 the p_j = c_{j-1} - c_j are probabilities and B_n = sum_j p_j B_{n-j} those of a renewal at n:
0 <= B_n <= 1, no such noise grows, and rounding does not either.

Source: docs/proofs/correlated.md. Kairouz et al. 2021; Denisov et al. 2022; Choquette-Choo et al. 2023; McKenna 2024;
Kalinin and Lampert 2024.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import scipy
from numpy.typing import NDArray

from torch_dpsco import _validate as check
from torch_dpsco.accounting.analysis.gaussian import sensitivity_factor
from torch_dpsco.accounting.analysis.rounding import gamma, scaled_up
from torch_dpsco.errors import AdjacencyError, ConditionError

FloatArray = NDArray[np.float64]

_REACH = 18.8  # stds that no noise leaves but with probability 2^-254 a number


@dataclass(frozen=True)
class Banded:
    """A strategy C, public.

    Args:
        coefficients: first column of C, from the diagonal on: 1 = c_0 >= c_1 >= .. >= c_{b-1} >= 0.

    Example:
        >>> noise = square_root(bands=3)
        >>> noise.coefficients, round(noise.sensitivity(steps=100, separation=50, adjacency="zero_out"), 4)
        ((1.0, 0.5, 0.375), 1.6677)
    """

    coefficients: tuple[float, ...]

    def __post_init__(self) -> None:
        column = tuple(check.between(0.0, 1.0, coefficients=c) for c in self.coefficients)
        if column[:1] != (1.0,) or any(later > earlier for earlier, later in pairwise(column)):
            # PRIVACY: noise that grows is rounded to nothing (test_noise_that_grows_is_refused)
            raise ValueError(
                f"coefficients must begin with 1 and never increase (got {check.shown(column)})"
            )
        object.__setattr__(self, "coefficients", column)

    @property
    def bands(self) -> int:
        """Number of coefficients b; b - 1 past noise vectors are kept."""
        return len(self.coefficients)

    @property
    def norm(self) -> float:
        """Upper bound on abs(c), by which one step of a record moves C G under zero_out."""
        return math.sqrt(self._square(self.bands))

    def sensitivity(self, steps: int, separation: int, adjacency: str) -> float:
        """Returns S, an upper bound on how far C G moves in L2, and no lower one can be given (but for rounding).

        Args:
            steps: T >= 1.
            separation: s >= bands; between two steps of one record there are at least s - 1 others. One pass: at least
                the number of its steps.
            adjacency: "zero_out" or "replace_one".

        Raises:
            AdjacencyError: adjacency is "add_remove".
            ConditionError: separation is below the number of bands.

        Guarantee: rows have norm at most 1 each, one for a record and step. Which steps a record is in does not depend
            on the data. The answers of all steps together are one Gaussian release of sensitivity S and noise std z.
        """
        participations, last = self._participations(steps, separation)
        if adjacency == "add_remove":
            # PRIVACY: every later position shifts (test_add_remove_is_refused)
            raise AdjacencyError(
                "correlated noise is proved for zero_out and replace_one, where positions stay"
            )
        square = (participations - 1) * self._square(self.bands) + self._square(
            min(self.bands, last)
        )
        # margin: of the root (docs/proofs/rounding.md#model-of-arithmetic)
        return scaled_up(sensitivity_factor(adjacency) * math.sqrt(square), 4)

    def rounding(self, steps: int, separation: int, dim: int) -> float:
        """Returns r: `correlated` in double precision makes S at most S + r z, where z is the noise std.

        Args:
            steps: T >= 1.
            separation: s >= bands.
            dim: number of coordinates, >= 1.

        Raises:
            ConditionError: separation is below the number of bands, or sums are too long for double precision.
        """
        participations, _ = self._participations(steps, separation)
        rows = participations * (self.bands - 1) * check.positive_count(dim=dim)
        relative = gamma(self.bands) * math.fsum(self.coefficients[1:])
        if steps * relative > 0.5:
            raise ConditionError(
                f"steps must be at most {0.5 / relative:g} with {self.bands} bands (got {steps})"
            )
        return scaled_up(2.0 * math.sqrt(rows) * relative * 2.0 * _REACH * math.sqrt(steps), 16)

    def correlated(self, fresh: Any, past: Iterable[Any]) -> Any:
        """Returns w_t = z_t - sum_j c_j w_{t-j}.

        What is returned is SECRET, before and after its step: answer minus noise is the exact sum.

        Args:
            fresh: z_t, an array or tensor in double precision (of any shape).
            past: w_{t-1}, w_{t-2}, .. as they were added to sums, in double precision, newest first. It may hold fewer
                than b - 1, and none at any public time: noise of before is then not taken back.
        """
        echo: Any = 0.0
        # PRIVACY: fresh noise comes last, in one subtraction (test_fresh_noise_meets_the_echo_in_one_rounding)
        for coefficient, noise in zip(self.coefficients[1:], past, strict=False):
            echo = echo + coefficient * noise
        return fresh - echo

    def prefix_weights(self, steps: int) -> FloatArray:
        """Returns B_0, .., B_{T-1}, the first column of A C^{-1}, each in [0, 1]."""
        ones = np.ones(check.positive_count(steps=steps))
        return np.asarray(scipy.signal.lfilter([1.0], self.coefficients, ones), np.float64)

    def prefix_std(self, steps: int) -> FloatArray:
        """Returns the noise std of a coordinate of w_0 + .. + w_t at z = 1, (T,); sqrt(t + 1) for independent noise."""
        return np.sqrt(np.cumsum(self.prefix_weights(steps) ** 2))

    def _square(self, rows: int) -> float:
        return scaled_up(math.fsum(c * c for c in self.coefficients[:rows]), 4)

    def _participations(self, steps: int, separation: int) -> tuple[int, int]:
        """Returns how many steps a record is in at most, and how many are left from the last such step on."""
        steps = check.positive_count(steps=steps)
        separation = check.positive_count(separation=separation)
        if separation < self.bands:
            # PRIVACY: rows of one record would add up (test_fewer_steps_apart_than_bands_are_refused)
            raise ConditionError(
                f"separation must be at least {self.bands}, the number of bands (got {separation})"
            )
        participations = -(-steps // separation)
        return participations, steps - (participations - 1) * separation


def square_root(bands: int) -> Banded:
    """Returns the first b coefficients binom(2j, j) / 4^j of the square root of A."""
    j = np.arange(1, check.positive_count(bands=bands))
    return Banded((1.0, *np.cumprod((2 * j - 1) / (2 * j)).tolist()))


def least_error(steps: int, bands: int) -> Banded:
    """Returns the strategy with the least mean squared error of prefix sums, found by search from the square root.

    It minimizes abs(c)^2 sum_n (T - n) B_n^2 over the lifetimes p of the renewals. The number of passes changes neither
    factor of it but by a constant.

    Args:
        steps: T >= 1.
        bands: b, 1 <= b <= T.

    Example:
        >>> [round(c, 2) for c in least_error(steps=1000, bands=4).coefficients]
        [1.0, 0.86, 0.8, 0.73]
    """
    steps = check.positive_count(steps=steps)
    start = np.array(square_root(bands).coefficients)
    if bands > steps:
        raise ValueError(f"bands must be at most {steps}, the number of steps (got {bands})")
    share = np.arange(steps, 0, -1) / steps

    def log_error(lifetimes: FloatArray) -> tuple[float, FloatArray]:
        column = _survival(lifetimes)
        weights = scipy.signal.lfilter(
            [1.0], column, np.ones(steps)
        )  # B; dB / dc_j is B C^{-1}, down by j
        change = scipy.signal.lfilter([1.0], column, weights)
        size = column @ column
        error = share @ weights**2
        slopes = [-2.0 * (share * weights)[j:] @ change[: steps - j] for j in range(bands)]
        return math.log(size * error), np.cumsum(2.0 * column / size + np.array(slopes) / error)

    lifetimes = start - np.append(start[1:], 0.0)
    found = scipy.optimize.minimize(
        log_error, lifetimes, jac=True, method="L-BFGS-B", bounds=[(0.0, None)] * bands
    )
    column = _survival(found.x)
    return Banded(tuple((column / column[0]).tolist()))


def _survival(lifetimes: FloatArray) -> FloatArray:
    """Returns c_j, the sum of p_{j+1}, .., p_b."""
    return np.cumsum(lifetimes[::-1])[::-1]
