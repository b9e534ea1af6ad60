"""Noise on a released vector: Gaussian, or of the K-norm mechanism, which is purely epsilon-private.

    K-norm: density proportional to exp(-|z| / scale):  z = r g/|g|,  r ~ Gamma(d, scale),  g standard normal

Float64; floating-point attacks on the samplers are out of scope, as for all noise here.

Source: docs/proofs/output.md#k-norm-noise; Hardt and Talwar 2010.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_dpsco import _validate as check
from torch_dpsco.noise import exponential_sum, normal_
from torch_dpsco.rng import Source


def gaussian_vector(dim: int, std: float, generator: Source) -> Tensor:
    """Returns (dim,) float64 numbers N(0, std^2), on the generator's device.

    Args:
        dim: d >= 1.
        std: >= 0.
        generator: from `rng.noise_generator`.
    """
    empty = torch.empty(check.positive_count(dim=dim), dtype=torch.float64, device=generator.device)
    return normal_(empty, 1.0, generator).mul_(check.nonnegative(std=std))


def knorm_vector(dim: int, scale: float, generator: Source) -> Tensor:
    """Returns (dim,) float64 numbers of density proportional to exp(-|z|_2 / scale), on the generator's device.

    Args:
        dim: d >= 1.
        scale: sensitivity / epsilon > 0.
        generator: from `rng.noise_generator`.

    Guarantee:
        Added to a vector of L2 sensitivity s: (s / scale)-DP, in any dimension, for real numbers.

    Source: docs/proofs/output.md#k-norm-noise

    Example:
        >>> knorm_vector(3, 1.0, torch.Generator().manual_seed(0)).shape
        torch.Size([3])
    """
    count, scale = check.positive_count(dim=dim), check.positive(scale=scale)
    radius = exponential_sum(count, generator)
    direction = gaussian_vector(count, 1.0, generator)
    length = torch.linalg.vector_norm(direction)
    while not float(length):  # of probability 0, but floats are discrete
        direction = gaussian_vector(count, 1.0, generator)
        length = torch.linalg.vector_norm(direction)
    noise: Tensor = direction * (scale * radius / length)
    return noise
