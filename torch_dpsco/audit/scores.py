"""Scores for outputs of any size: fitted to a part of the outputs that neither chooses nor judges the test."""

from __future__ import annotations

import numpy as np
from scipy.linalg import solve_triangular

from torch_dpsco.audit.bound import Array, Sides

_LEAST_SPREAD = 1e-6  # relative: outputs without noise get finite scores too


def fitted_scores(first: Array, second: Array, fit: int) -> list[Sides]:
    """Returns a linear discriminant and a Gaussian log likelihood ratio of all outputs, fitted to the first `fit`."""
    with np.errstate(over="ignore", invalid="ignore"):  # found below
        first, second = _whitened(first, second, fit)
        means = first[:fit].mean(axis=0), second[:fit].mean(axis=0)
        variances = [side[:fit].var(axis=0) + _LEAST_SPREAD**2 for side in (first, second)]

        def linear(outputs: Array) -> Array:
            return np.asarray(outputs @ (means[1] - means[0]))

        def gaussian(outputs: Array) -> Array:
            squares = [(outputs - mean) ** 2 / variance for mean, variance in zip(means, variances, strict=True)]
            return np.asarray((squares[0] - squares[1]).sum(axis=1))

        scores = [(score(first), score(second)) for score in (linear, gaussian)]
    _require_finite(*scores[0], *scores[1])
    return scores


def _require_finite(*arrays: Array) -> None:
    if not all(np.isfinite(array).all() for array in arrays):
        raise ValueError("outputs must not be so large that their squares overflow; give audit a score= instead")


def _whitened(first: Array, second: Array, fit: int) -> Sides:
    """Returns the outputs in coordinates whose common variance within a side is about 1, by the first `fit` a side."""
    means = first[:fit].mean(axis=0), second[:fit].mean(axis=0)
    spread = np.concatenate([first[:fit] - means[0], second[:fit] - means[1]])
    scale = np.maximum(spread.std(axis=0), _LEAST_SPREAD * np.abs(means[1] - means[0]))
    _require_finite(scale)
    scale[scale == 0.0] = 1.0
    first, second, spread = (first - means[0]) / scale, (second - means[0]) / scale, spread / scale
    dim = len(scale)
    if 4 * dim > fit:  # too few outputs for a covariance
        return first, second
    root = np.linalg.cholesky(spread.T @ spread / len(spread) + _LEAST_SPREAD * np.eye(dim))
    return solve_triangular(root, first.T, lower=True).T, solve_triangular(root, second.T, lower=True).T
