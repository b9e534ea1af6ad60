"""Algorithms 1 to 4, 6, 8 and 12 of Lowy and Razaviyayn, and boosted localization, in plain numpy, line by line.

A gradient is a function (w, index of a record) -> vector; a batch is a sequence of indices. Noise vectors are
arguments; None stands for no noise, so that a run can be repeated beside another implementation. Nothing is calibrated.

A phase of Algorithms 3 and 4 is any object with the fields clip, steps, reg, radius and lr(t) (see `Phase`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

Vector = np.ndarray
Gradient = Callable[[Vector, int], Vector]
Map = Callable[[Vector], Vector]
Batch = Sequence[int]


def identity(w: Vector) -> Vector:
    return w


def ball(radius: float, center: Vector | float = 0.0) -> Map:
    """The projection on a ball; the identity for an infinite radius."""

    def project(w: Vector) -> Vector:
        norm = float(np.linalg.norm(w - center))
        return w if norm <= radius else center + (w - center) * (radius / norm)

    return project


def clip_row(g: Vector, clip: float) -> Vector:
    """Pi_C; a row with a non-finite entry counts as 0."""
    if not np.isfinite(g).all():
        return np.zeros_like(g)
    norm = float(np.linalg.norm(g))
    return g if norm <= clip else g * (clip / norm)


def algorithm_1(
    gradient: Gradient, w: Vector, batch: Batch, clip: float, noise: Vector | None = None
) -> Vector:
    """MeanOracle1: the noisy mean of clipped gradients at w."""
    mean = sum(clip_row(gradient(w, i), clip) for i in batch) / len(batch)
    return mean if noise is None else mean + noise


def algorithm_2(
    gradient: Gradient,
    w0: Vector,
    batches: Sequence[Batch],
    clip: float,
    eta: float,
    project: Map = identity,
    noise: Sequence[Vector] | None = None,
) -> tuple[list[Vector], list[Vector]]:
    """Noisy clipped accelerated SGD. Returns (ag_1..ag_T, the points md_1..md_T where gradients were taken)."""
    w = ag = np.array(w0, dtype=float)
    answers, queries = [], []
    for t, batch in enumerate(batches, start=1):
        alpha_t = 2.0 / (t + 1.0)
        eta_t = 4.0 * eta / (t * (t + 1.0))
        md = (1.0 - alpha_t) * ag + alpha_t * w
        G = algorithm_1(gradient, md, batch, clip, None if noise is None else noise[t - 1])
        w = project(w - alpha_t / eta_t * G)
        ag = alpha_t * w + (1.0 - alpha_t) * ag
        queries.append(md)
        answers.append(ag)
    return answers, queries


def algorithm_6(
    gradient: Gradient,
    w0: Vector,
    batches: Sequence[Batch],
    clip: float,
    lrs: Sequence[float],
    weights: Sequence[float],
    project: Map = identity,
    noise: Sequence[Vector] | None = None,
) -> tuple[Vector, Vector]:
    """Noisy clipped SGD. Returns (weighted average of the iterates after their steps, last iterate)."""
    w = np.array(w0, dtype=float)
    num, Z = np.zeros_like(w), 0.0
    for t, batch in enumerate(batches):
        G = algorithm_1(gradient, w, batch, clip, None if noise is None else noise[t])
        w = project(w - lrs[t] * G)
        num = num + weights[t] * w
        Z += weights[t]
    return num / Z, w


@dataclass(frozen=True)
class Phase:
    """Numbers of one phase; `kind` says which step sizes: "ball", "ballfree" or a constant number."""

    clip: float
    steps: int
    reg: float
    radius: float = math.inf
    kind: str | float = "ballfree"

    def lr(self, t: int) -> float:
        if self.kind == "ball":
            return 2.0 / (self.reg * (t + 2.0))
        if self.kind == "ballfree":
            return 1.0 / (self.reg * (t + 1.0))
        return float(self.kind)


def algorithm_3(
    gradient: Gradient,
    center: Vector,
    records: Batch,
    phase: Phase,
    project: Map = identity,
    noise: Sequence[Vector] | None = None,
) -> Vector:
    """Noisy clipped regularized subgradient method on ALL records in every step. Returns the last iterate.

    `project` is that on W; only one of W and the ball around the center may act (their intersection is not projected).
    """
    if project is not identity and math.isfinite(phase.radius):
        raise ValueError("project on W or on the ball, not on both")
    c = np.array(center, dtype=float)
    onto = ball(phase.radius, c) if math.isfinite(phase.radius) else project
    w = c
    for t in range(phase.steps):
        data = algorithm_1(gradient, w, records, phase.clip, None if noise is None else noise[t])
        w = onto(w - phase.lr(t) * (data + phase.reg * (w - c)))
    return w


def algorithm_4(
    gradient: Gradient,
    w0: Vector,
    parts: Sequence[Batch],
    phases: Sequence[Phase],
    project: Map = identity,
    noise: Sequence[Sequence[Vector]] | None = None,
) -> list[Vector]:
    """Localization: Algorithm 3 on fresh parts, each from the answer of the one before. Returns w_1..w_ell."""
    w, answers = np.array(w0, dtype=float), []
    for i, (part, phase) in enumerate(zip(parts, phases, strict=True)):
        w = algorithm_3(gradient, w, part, phase, project, None if noise is None else noise[i])
        answers.append(w)
    return answers


def algorithm_8(
    gradient: Gradient,
    w0: Vector,
    batches: Sequence[Batch],
    clip: float,
    eta: float,
    prox: Callable[[Vector, float], Vector],
    noise: Sequence[Vector] | None = None,
) -> Vector:
    """Noisy clipped proximal SGD; prox(v, eta) is the proximal map of eta f_1. Returns the last iterate."""
    w = np.array(w0, dtype=float)
    for t, batch in enumerate(batches):
        G = algorithm_1(gradient, w, batch, clip, None if noise is None else noise[t])
        w = prox(w - eta * G, eta)
    return w


def soft_threshold(strength: float) -> Callable[[Vector, float], Vector]:
    """The proximal map of strength |w|_1."""
    return lambda v, eta: np.sign(v) * np.maximum(np.abs(v) - eta * strength, 0.0)


def algorithm_12(
    rows: Vector,
    groups: int,
    tau: float,
    noise: Vector | None = None,
    before: Sequence[Vector] | None = None,
) -> Vector:
    """Coordinate-wise median of means; rows beyond m floor(s/m) are dropped.

    `noise` is added to the median (the paper), `before` holds one vector per group, added to its mean (the library).
    """
    rows = np.asarray(rows, dtype=float)
    size = len(rows) // groups
    means = []
    for j in range(groups):
        group = np.clip(rows[j * size : (j + 1) * size], -tau, tau)
        means.append(group.sum(axis=0) / size + (0.0 if before is None else before[j]))
    median = np.median(np.array(means), axis=0)
    return median if noise is None else median + noise


def select_central(candidates: Sequence[Vector]) -> int:
    """Index of the candidate whose (floor(J/2)+1)-th nearest candidate, itself included, is nearest."""
    J = len(candidates)
    radii = [
        sorted(float(np.linalg.norm(y - other)) for other in candidates)[J // 2]
        for y in candidates
    ]
    return int(np.argmin(radii))


def boosted(
    gradient: Gradient,
    w0: Vector,
    groups: Sequence[Sequence[Batch]],
    phases: Sequence[Phase],
    project: Map = identity,
    noise: Sequence[Sequence[Sequence[Vector]]] | None = None,
) -> list[Vector]:
    """Boosted localization: groups[i][j] is the batch of copy j in phase i. Returns the chosen w_1..w_I."""
    w, answers = np.array(w0, dtype=float), []
    for i, (batches, phase) in enumerate(zip(groups, phases, strict=True)):
        candidates = [
            algorithm_3(
                gradient, w, batch, phase, project, None if noise is None else noise[i][j]
            )
            for j, batch in enumerate(batches)
        ]
        w = candidates[select_central(candidates)]
        answers.append(w)
    return answers
