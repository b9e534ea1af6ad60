"""Algorithms 1 to 4 of Asi and Liu (user-level private stochastic convex optimization), line by line, in plain numpy.

Noises are arguments; None stands for none, so that a run can be repeated beside another implementation. Nothing is
calibrated, and nothing here is private: it is what the paper prints, mistakes included (docs/errata.md, paper 3).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

Vector = np.ndarray
Query = Callable[[Vector, int], Vector]  # (theta, user) -> mean gradient of the user


class AboveThreshold:
    """Algorithm 1: one noisy threshold; TOP while the noisy query is at least that; at the first BOT it halts."""

    def __init__(
        self,
        threshold: float,
        threshold_noise: float = 0.0,
        query_noise: Sequence[float] | None = None,
    ) -> None:
        self.threshold = threshold - threshold_noise
        self.noise = iter(query_noise) if query_noise is not None else None
        self.halted = False

    def top(self, query: float) -> bool:
        assert not self.halted
        noisy = query + (next(self.noise) if self.noise is not None else 0.0)
        self.halted = noisy < self.threshold
        return not self.halted


def concentration_score(rows: Vector, tau: float) -> float:
    """(1/n) of the number of ordered pairs within tau, each row with itself included."""
    return float(sum((np.linalg.norm(rows - x, axis=1) <= tau).sum() for x in rows)) / len(rows)


def inclusion(rows: Vector, tau: float) -> Vector:
    """p_j: 0 below n/2 neighbors within 2 tau, 1 from 2n/3 on, linear between."""
    n = len(rows)
    p = np.zeros(n)
    for j in range(n):
        f = (np.linalg.norm(rows - rows[j], axis=1) <= 2 * tau).sum()
        if f < n / 2:
            p[j] = 0.0
        elif f >= 2 * n / 3:
            p[j] = 1.0
        else:
            p[j] = (f - n / 2) / (n / 6)
    return p


@dataclass
class OutlierRemoval:
    """Algorithm 2: one object for all T adaptive queries; None stands for BOT.

    `uniforms[t][j] < p_j` puts user j into S; without uniforms, everyone of p_j > 1/2.
    """

    n: int
    tau: float
    threshold_noise: float = 0.0
    query_noise: Sequence[float] | None = None
    uniforms: Sequence[Vector] | None = None
    noise: Sequence[Vector] | None = None
    answered: int = 0
    test: AboveThreshold = field(init=False)

    def __post_init__(self) -> None:
        self.test = AboveThreshold(4 * self.n / 5, self.threshold_noise, self.query_noise)

    def answer(self, rows: Vector) -> Vector | None:
        if self.test.halted or not self.test.top(concentration_score(rows, self.tau)):
            return None
        p = inclusion(rows, self.tau)
        chosen = p > 0.5 if self.uniforms is None else self.uniforms[self.answered] < p
        g = rows[chosen].mean(axis=0) if chosen.any() else np.zeros(rows.shape[1])
        if self.noise is not None:
            g = g + self.noise[self.answered]
        self.answered += 1
        return g


def ball(radius: float, center: Vector | float = 0.0) -> Callable[[Vector], Vector]:
    """The projection on a ball."""

    def project(theta: Vector) -> Vector:
        distance = float(np.linalg.norm(theta - center))
        return theta if distance <= radius else center + (theta - center) * (radius / distance)

    return project


def algorithm_3(
    query: Query,
    users: Sequence[int],
    theta_1: Vector,
    steps: int,
    lr: float,
    oracle: OutlierRemoval,
    project: Callable[[Vector], Vector],
) -> Vector:
    """Projected steps along the answers; their average, or the start if a query was below the threshold.

    Smoothing is part of `query`: it adds its shifts to theta.
    """
    theta, total = theta_1, np.zeros_like(theta_1)
    for _ in range(steps):
        total = total + theta
        g = oracle.answer(np.stack([query(theta, j) for j in users]))
        if g is None:
            return theta_1
        theta = project(theta - lr * g)
    return total / steps


@dataclass(frozen=True)
class LiteralPhase:
    """What Algorithm 4 sets for one phase."""

    users: int
    steps: int
    smoothing_radius: float
    lr: float
    tau: float
    start_radius: float


def algorithm_4_phases(
    n: int, m: int, d: int, epsilon: float, delta: float, G: float, mu: float, C: float
) -> list[LiteralPhase]:
    """The phases of Algorithm 4 with the constants of the proof of Theorem 4.11 (radii as printed, not capped)."""
    k = max(1, math.ceil(math.log2(math.log2(m * n))))

    def size(i: int) -> float:
        return n / 2 ** (k + 1 - i)

    def rate(i: int) -> float:
        log_i = math.log(size(i) * d * m / delta)
        return (
            4
            * C**2
            * G**2
            / mu
            * (1 / (size(i) * m) + d * log_i**2 / (size(i) ** 2 * epsilon**2 * m))
        )

    def gap(i: int) -> float:
        return 16 * rate(i) * (2 * G**2 / mu / (16 * rate(0))) ** (1 / 2**i)

    phases = []
    for j in range(1, k + 1):
        users, radius = math.floor(size(j)), math.sqrt(2 * gap(j - 1) / mu)
        T = m**2 * users**2 + math.ceil(m * users * math.sqrt(d))
        log_term = math.log(m * users * d / delta)
        lr = (radius / G) * min(
            math.sqrt(m) * users * epsilon / (T * math.sqrt(d) * log_term),
            T ** (-3 / 4),
            math.sqrt(users * m) / T,
        )
        tau = G * (math.log(users * d * m * T / delta) + epsilon) / math.sqrt(m)
        phases.append(LiteralPhase(users, T, d**0.25 * radius / math.sqrt(T), lr, tau, radius))
    return phases


def algorithm_4(
    query: Query,
    order: Sequence[int],
    phases: Sequence[LiteralPhase],
    theta_0: Vector,
    radius: float,
    steps: int,
) -> Vector:
    """Algorithm 3 on one part of the users after the other, at most `steps` steps each, without noise."""
    theta, used = theta_0, 0
    for phase in phases:
        part = order[used : used + phase.users]
        used += phase.users
        oracle = OutlierRemoval(len(part), phase.tau)
        theta = algorithm_3(
            query, part, theta, min(steps, phase.steps), phase.lr, oracle, ball(radius)
        )
    return theta


def published_scales(epsilon: float) -> tuple[float, float]:
    """Laplace scales of the threshold and of each query when Algorithm 2 calls Algorithm 1 at epsilon/2."""
    return 2 / (epsilon / 2), 4 / (epsilon / 2)
