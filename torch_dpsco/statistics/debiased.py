"""Estimates without the bias of a regularizer, and their covariances, of what private fits release.

At the answer w of objective perturbation the gradient of the sum of losses is -(reg w + b). One step of Newton's method
with the released Hessian H takes the known part of it away:

    w + H^-1 reg w,    covariance  H^-1 + sigma^2 H^-2 + (tau^2 / 2)(|v|^2 H^-2 + H^-1 v v' H^-1) + output noise,

v = H^-1 reg w: of sampling (in a model that holds, the variance of gradients is H), of b, of the noise of H.

Where the Hessian is near its noise, fits of which intervals are shown are a choice: see `Debiased.distance`.

Source: docs/proofs/inference.md
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from torch_dpsco import _validate as check
from torch_dpsco.errors import ConditionError
from torch_dpsco.estimators.solvers import needed_eigenvalue

_MARGIN = 0.25  # standard errors of the least eigenvalue, below which intervals are more than seven times as wide


class Debiased(NamedTuple):
    """An estimate and what it is uncertain by.

    Args:
        estimate: (p,).
        sampling: covariance (p, p) that the same fit would have without privacy.
        noise: covariance (p, p) of all that was added for privacy.
        least: eigenvalue of the released Hessian.
        needed: what it has to exceed.
        spread: its standard error, from noise and from that of the estimate at which it was taken.
    """

    estimate: Tensor
    sampling: Tensor
    noise: Tensor
    least: float
    needed: float
    spread: float

    @property
    def distance(self) -> float:
        """From the limit, in standard errors: only fits that are above it show intervals, which they must allow for.

        Source: docs/proofs/inference.md#the-limit
        """
        return (self.least - self.needed) / self.spread if self.spread else math.inf


def debias(
    weights: Tensor,
    hessian: Tensor,
    *,
    reg: float,
    noise_std: float,
    output_std: float,
    hessian_std: float,
    rate: float = 0.0,
) -> Debiased:
    """Returns the estimate without the bias of the regularizer, and its covariances.

    Args:
        weights: released answer (p,), float64.
        hessian: released (p, p), symmetric: of the sum of losses, with noise.
        reg: >= 0, of the sum.
        noise_std: >= 0, of b.
        output_std: >= 0, of the noise on the answer.
        hessian_std: >= 0, of the noise on the diagonal of the Hessian; 1/sqrt(2) of it elsewhere.
        rate: >= 0, by which share of itself a second derivative changes at most where the answer moves by 1.

    Raises:
        ConditionError: the Hessian does not stand out of its noise, or is singular.

    Source:
        docs/proofs/inference.md#the-estimate

    Example:
        >>> one = torch.ones(1, dtype=torch.float64)
        >>> debias(one, 10 * one[:, None], reg=1.0, noise_std=0.0, output_std=0.0, hessian_std=0.0).estimate.item()
        1.1
    """
    check.nonnegative(reg=reg)
    check.nonnegative(noise_std=noise_std)
    check.nonnegative(output_std=output_std)
    check.nonnegative(rate=rate)
    size = len(weights)
    inverse = _inverse(hessian, hessian_std)
    shift = inverse @ (reg * weights)
    square = inverse @ inverse
    across = inverse @ shift
    of_hessian = hessian_std**2 / 2 * ((shift @ shift) * square + torch.outer(across, across))
    stretch = torch.eye(size, dtype=torch.float64, device=weights.device) + reg * inverse
    noise = noise_std**2 * square + of_hessian + output_std**2 * stretch @ stretch
    return _clear(weights + shift, inverse, noise, hessian, hessian_std, rate)


def least_squares(
    gram: Tensor,
    moments: Tensor,
    count: float,
    *,
    gram_std: float,
    moment_std: float,
    total_std: float,
) -> Debiased:
    """Returns the solution of noisy normal equations, without a ridge, and its covariances.

    The error is A^-1 (X'e + f - E theta) for noise E of A = X'X and f of X'y. The variance of targets about their means
    is (y'y - b'A^-1 b + tr(A^-1 N)) / (n - p), N the covariance of f - E theta; at least what the noise of the
    numerator hides.

    Args:
        gram: released X'X (p, p), symmetric, float64.
        moments: released X'y and y'y, (p + 1,).
        count: number of records, of a noisy count or public.
        gram_std: >= 0, of the noise on the diagonal of X'X; 1/sqrt(2) of it elsewhere.
        moment_std: >= 0, of that on X'y.
        total_std: >= 0, of that on y'y.

    Raises:
        ConditionError: X'X does not stand out of its noise, or there are not more records than coefficients.

    Source:
        docs/proofs/inference.md#least-squares
    """
    inverse = _inverse(gram, gram_std)
    size = len(gram)
    if not count > size:
        raise ConditionError(
            f"more records than coefficients are needed for intervals (got about {count:.3g})"
        )
    theta = inverse @ moments[:size]
    length = float(theta @ theta)
    here = gram_std**2 / 2
    one = torch.eye(size, dtype=gram.dtype, device=gram.device)
    error = (moment_std**2 + here * length) * one + here * torch.outer(theta, theta)
    squares = float(moments[size] - moments[:size] @ theta + (inverse * error).sum())
    hidden = math.sqrt(total_std**2 + 4 * moment_std**2 * length + 2 * here * length**2)
    sampling = max(squares, hidden) / (count - size) * inverse
    return _clear(theta, sampling, inverse @ error @ inverse, gram, gram_std, 0.0)


def _inverse(hessian: Tensor, std: float) -> Tensor:
    """Returns the inverse of a noisy matrix; raises ConditionError if it does not stand out of its noise."""
    values, vectors = torch.linalg.eigh(hessian)
    least = float(values[0])
    needed = needed_eigenvalue(len(hessian), std)
    if not least > needed:
        raise _buried(least, needed, std)
    inverse: Tensor = (vectors / values) @ vectors.T
    return inverse


def _clear(
    estimate: Tensor, sampling: Tensor, noise: Tensor, hessian: Tensor, std: float, rate: float
) -> Debiased:
    """Returns what was found; raises ConditionError if the least eigenvalue is at its limit."""
    values, vectors = torch.linalg.eigh(hessian)
    root = vectors * values.sqrt()
    least = float(values[0])
    error = float(torch.linalg.eigvalsh(root.T @ (sampling + noise) @ root)[-1])
    spread = math.hypot(std, rate * least * math.sqrt(error / float(values.sum())))
    needed = needed_eigenvalue(len(estimate), std)
    if not least > needed + _MARGIN * spread:
        raise _buried(least, needed, spread)
    return Debiased(estimate, sampling, noise, least, needed, spread)


def _buried(least: float, needed: float, spread: float) -> ConditionError:
    return ConditionError(
        "the noisy Hessian must stand out of its noise for intervals: its least eigenvalue is"
        f" {least:.3g} with a standard error of {spread:.3g}, and {needed + _MARGIN * spread:.3g}"
        " is needed. Take fewer or less dependent features (leave one level out of"
        " each group beside an intercept), a larger epsilon or share of it, more records, or a"
        " smaller bound_x"
    )
