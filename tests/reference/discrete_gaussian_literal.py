"""The discrete Gaussian as Canonne, Kamath and Steinke (2020) draw it, in fractions: Algorithms 1 to 3, one at a time.

Independent of `step.exact_noise`: another proposal (a discrete Laplace number), other coins, Python's integers.
"""

from __future__ import annotations

import math
from fractions import Fraction
from random import SystemRandom

RANDOM = SystemRandom()


def _coin(probability: Fraction) -> bool:
    return RANDOM.randrange(probability.denominator) < probability.numerator


def _exp_coin(gamma: Fraction) -> bool:
    """Returns True with probability exp(-gamma), gamma >= 0 (Algorithm 1)."""
    while gamma > 1:
        if not _exp_coin(Fraction(1)):
            return False
        gamma -= 1
    k = 1
    while _coin(gamma / k):
        k += 1
    return k % 2 == 1


def discrete_laplace(t: int) -> int:
    """Returns an integer of law proportional to exp(-|x| / t) (Algorithm 2, s = 1)."""
    while True:
        u = RANDOM.randrange(t)
        if not _exp_coin(Fraction(u, t)):
            continue
        v = 0
        while _exp_coin(Fraction(1)):
            v += 1
        x, negative = u + t * v, RANDOM.randrange(2)
        if not (negative and x == 0):
            return -x if negative else x


def discrete_gaussian(variance: Fraction) -> int:
    """Returns an integer of law proportional to exp(-x^2 / (2 variance)) (Algorithm 3)."""
    t = math.isqrt(math.floor(variance)) + 1
    while True:
        y = discrete_laplace(t)
        if _exp_coin((abs(y) - variance / t) ** 2 / (2 * variance)):
            return y
