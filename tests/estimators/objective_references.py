"""Objectives in extended precision (80 bits), written from their formulas, and their minimizers."""

from __future__ import annotations

import numpy as np
import torch

LONG = np.longdouble
assert np.finfo(LONG).eps < 1e-18, "the references need extended precision"


def long_rows(features, targets):
    return features.double().numpy().astype(LONG), targets.double().numpy().astype(LONG)


def softplus(t):
    return np.maximum(t, 0) + np.log1p(np.exp(-np.abs(t)))


def sigmoid(t):
    e = np.exp(-np.abs(t))
    return np.where(t >= 0, 1 / (1 + e), e / (1 + e))


def logistic(margin):
    return softplus(-margin), -sigmoid(-margin)


def smoothed_hinge(width):
    def curve(margin):
        gap = np.maximum(1 - margin, 0)
        low = np.minimum(gap, LONG(width))
        return low * (gap - low / 2) / LONG(width), -np.clip((1 - margin) / LONG(width), 0, 1)

    return curve


def margin_objective(X, y, curve, reg, normalizer, weights=1, linear=0):
    """w -> (value, gradient) of (1/N) sum c phi(y x.w) + reg/2 |w|^2 + q.w."""

    def at(w):
        value, slope = curve(y * (X @ w))
        total = (
            (weights * value).sum() / LONG(normalizer)
            + LONG(reg) / 2 * (w @ w)
            + np.sum(linear * w)
        )
        return total, X.T @ (weights * slope * y) / LONG(normalizer) + LONG(reg) * w + linear

    return at


def residual_objective(X, y, curve, reg, normalizer):
    """w -> (value, gradient) of (1/N) sum phi(y - x.w) + reg/2 |w|^2."""

    def at(w):
        value, slope = curve(y - X @ w)
        return value.sum() / LONG(normalizer) + LONG(reg) / 2 * (w @ w), -X.T @ slope / LONG(
            normalizer
        ) + LONG(reg) * w

    return at


def tilted_objective(X, y, curve, reg, tilt):
    def at(w):
        value, slope = curve(y * (X @ w))
        terms = np.exp(LONG(tilt) * value - (LONG(tilt) * value).max())
        weights = terms / terms.sum()
        total = ((LONG(tilt) * value).max() + np.log(terms.mean())) / LONG(tilt)
        return total + LONG(reg) / 2 * (w @ w), X.T @ (weights * slope * y) + LONG(reg) * w

    return at


def adversarial_objective(X, y, curve, reg, radius, normalizer, nu=0.0, scale=1.0):
    squares = np.asarray(scale, dtype=LONG) ** 2

    def at(w):
        size = np.sqrt((squares * w) @ w + LONG(nu) ** 2)
        value, slope = curve(y * (X @ w) - LONG(radius) * size)
        direction = squares * w / size if size > 0 else np.zeros_like(w)
        pull = LONG(radius) * slope.sum() / LONG(normalizer)
        gradient = X.T @ (slope * y) / LONG(normalizer) - pull * direction + LONG(reg) * w
        return value.sum() / LONG(normalizer) + LONG(reg) / 2 * (w @ w), gradient

    return at


def minimizer(at, objective, near):
    """The minimizer to about 1e-17: Newton steps with gradients of 80 bits and Hessians of the package.

    Hessians only set the speed. The result stands on the gradient of the reference alone.
    """
    w = near.numpy().astype(LONG)
    best, least = w, np.inf
    for _ in range(60):
        gradient = at(w)[1]
        size = float(np.sqrt((gradient**2).sum()))
        if (
            size < least
        ):  # where steps are of the size of roundings, the last one is not the best
            best, least = w, size
        if np.abs(gradient).max() < 1e-18:
            break
        factor = objective.hessian(torch.from_numpy(w.astype(float))).numpy()
        w = w - np.linalg.solve(factor, gradient.astype(float))
    # mu-strong convexity: what is left of the gradient bounds the error of the reference
    return best, least / objective.strong_convexity


def distance(point, exact):
    return float(np.sqrt(((point.numpy().astype(LONG) - exact) ** 2).sum()))
