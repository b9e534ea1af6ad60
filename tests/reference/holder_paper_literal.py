"""Algorithms 1 and 2 of Wang, Lei, Ying and Zhang in plain numpy, line by line, for one record a step.

Indices and noise are arguments, so that a run can be repeated beside another implementation, or without noise.
Nothing here is calibrated: `sigma_1` and `sigma_2` are the papers' formulas as printed, also where they are not valid.

Differs from the paper in: two displays of Chernoff bounds print log(1/gamma); log(n/gamma), which the statement uses,
is taken (docs/errata.md, E2).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

Vector = np.ndarray
Gradient = Callable[[Vector, int], Vector]  # (w, index of a record) -> subgradient


def project(w: Vector, radius: float) -> Vector:
    norm = float(np.linalg.norm(w))
    return w if norm <= radius else w * (radius / norm)


def algorithm_1(
    gradient: Gradient,
    dim: int,
    radius: float,
    eta: float,
    indices: Sequence[int],
    noise: Vector,
) -> tuple[Vector, Vector]:
    """Returns (w_priv, w_1..w_T); noise is the vector b of line 13, T the number of indices."""
    w, iterates = np.zeros(dim), []
    for index in indices:
        iterates.append(w)
        w = project(w - eta * gradient(w, index), radius)
    return np.mean(iterates, axis=0) + noise, np.array(iterates)


def algorithm_2(
    gradient: Gradient,
    dim: int,
    radius: float,
    eta: float,
    indices: Sequence[int],
    noise: Vector,
) -> tuple[Vector, Vector]:
    """Returns (w_priv, w_1..w_T); noise (T, dim) holds the vectors b_t of line 6."""
    w, iterates = np.zeros(dim), []
    for index, b in zip(indices, noise, strict=True):
        iterates.append(w)
        w = project(w - eta * (gradient(w, index) + b), radius)
    return np.mean(iterates, axis=0), np.array(iterates)


def c_alpha_1(alpha: float, big_l: float, m: float) -> float:
    return (
        m + big_l
        if alpha == 0
        else (1 + 1 / alpha) ** (alpha / (1 + alpha)) * big_l ** (1 / (1 + alpha))
    )


def c_alpha_2(alpha: float, big_l: float) -> float:
    return (
        math.sqrt((1 - alpha) / (1 + alpha)) * (2**-alpha * big_l) ** (1 / (1 - alpha))
        if alpha < 1
        else 0.0
    )


def c_alpha(alpha: float, big_l: float, m: float, m0: float) -> float:
    """The constant of the iterate bound |w_t|^2 <= C_alpha t eta, in the paper's three cases."""
    if alpha == 0:
        return (m + big_l) ** 2 + 2 * m0
    if alpha == 1:
        return 2 * m0
    power = c_alpha_1(alpha, big_l, m) ** (2 * (1 + alpha) / (1 - alpha))
    return (1 - alpha) / (1 + alpha) * power * (alpha / (1 + alpha)) ** (
        2 * alpha / (1 - alpha)
    ) + 2 * m0


def sensitivity_1(
    alpha: float,
    big_l: float,
    m: float,
    m0: float,
    radius: float,
    eta: float,
    steps: int,
    n: int,
    gamma: float,
) -> float:
    """Delta_SGD(gamma) on a ball, or its version on R^d where radius is infinite."""
    x = 3 * n * math.log(n / gamma) / steps
    hits = steps / n * (1 + max(math.sqrt(x), x))
    reach = (
        radius**alpha
        if math.isfinite(radius)
        else (c_alpha(alpha, big_l, m, m0) * steps * eta) ** (alpha / 2)
    )
    bound = m + big_l * reach
    drift = c_alpha_2(alpha, big_l) ** 2 * steps * eta ** (2 / (1 - alpha)) if alpha < 1 else 0.0
    return math.sqrt(math.e * (drift + 4 * bound**2 * eta**2 * (1 + hits) * hits))


def sigma_1(sensitivity: float, epsilon: float, delta: float) -> float:
    """Line 12 of Algorithm 1; `sensitivity` is Delta_SGD(delta / 2)."""
    return math.sqrt(2 * math.log(2.5 / delta)) * sensitivity / epsilon


def sigma_2(
    alpha: float,
    big_l: float,
    m: float,
    radius: float,
    steps: int,
    n: int,
    epsilon: float,
    delta: float,
    beta: float,
) -> float:
    """Line 3 of Algorithm 2."""
    inner = math.log(1 / delta) / ((1 - beta) * epsilon) + 1
    return math.sqrt(
        14 * (m + big_l * radius**alpha) ** 2 * steps / (beta * n**2 * epsilon) * inner
    )
