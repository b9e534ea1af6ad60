"""Releases of one vector: Gaussian or K-norm noise, or exact noise on a public grid.

Exact releases are rounded to a public grid, and discrete noise is added in integers. What numbers can occur does not
depend on the data, and no law rests on the rounding of a sampler. See `analysis.rounding` for what is charged,
`mechanisms.discrete` for the draws.

Others are Gaussian, or of the K-norm mechanism, which is purely epsilon-private:

    density proportional to exp(-|z| / scale):  z = r g/|g|,  r ~ Gamma(d, scale),  g standard normal

Float64; floating-point attacks on the samplers are out of scope, as for all noise here.

Source: docs/proofs/output.md#k-norm-noise; Hardt and Talwar 2010.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_dpsco import _validate as check
from torch_dpsco.accounting.analysis.rounding import Grid, exact_grid
from torch_dpsco.accounting.events import Gaussian
from torch_dpsco.mechanisms.discrete import discrete_gaussian
from torch_dpsco.noise import exponential_sum, normal_
from torch_dpsco.rng import Source, stream_of

_LARGEST = (
    2.0**50
)  # of a coordinate, in units of the grid: quotients, or products with 1/g, are off by 1/4 up to here


def on_grid(value: Tensor, grid: Grid) -> Tensor:
    """Returns a vector in units of the grid, as int64 on the CPU: rounded, cut at 2^50, 0 for NaN. NOT private."""
    # PRIVACY: cut, and never refused: an error would tell of the data (test_no_value_raises_in_an_exact_release)
    scaled = torch.nan_to_num(value.detach().cpu().double() / grid.spacing, nan=0.0).clamp_(
        -_LARGEST, _LARGEST
    )
    return scaled.round_().long()


def release_on_grid(value: Tensor, grid: Grid, source: Source) -> Tensor:
    """Returns the vector, rounded to the grid, with exact noise: float64 of its shape on its device.

    Args:
        value: what is released, computed from data; only here it is rounded to the grid.
        grid: of what the caller has charged, see `exact_grid`.
        source: of the bits.
    """
    noise = torch.from_numpy(
        discrete_gaussian(value.numel(), grid.bits, stream_of(source).read)
    ).view(value.shape)
    total = on_grid(value, grid) + noise  # below 2^52: exact as a float64
    return total.double().mul_(grid.spacing).to(value.device)


def exact_release(value: Tensor, event: Gaussian, source: Source) -> Tensor:
    """Returns the vector with the exact noise of the event that the caller has charged for it; see `release_on_grid`.

    Args:
        value: what is released.
        event: with `exact=True` and the grid in its sensitivities (`accounting.analysis.rounding.with_grid`).
        source: of the bits.

    Guarantee: post-processing of the Gaussian release that the event says, up to a factor that no figure shows.
    """
    return release_on_grid(
        value, exact_grid(event.sigma, min(dict(event.sens).values()), value.numel()), source
    )


def gaussian_vector(dim: int, std: float, generator: Source) -> Tensor:
    """Returns (dim,) float64 numbers N(0, std^2), on the generator's device.

    Args:
        dim: d >= 1.
        std: >= 0.
        generator: from `rng.noise_generator`.
    """
    empty = torch.empty(check.positive_count(dim=dim), dtype=torch.float64, device=generator.device)
    return normal_(empty, 1.0, generator).mul_(check.nonnegative(std=std))


def symmetric_noise(dim: int, diagonal: float, off_diagonal: float, generator: Source) -> Tensor:
    """Returns a symmetric (dim, dim) matrix of Gaussian noise, with stds of their own on and off the diagonal.

    With off_diagonal = diagonal / sqrt(2) it is N(0, diagonal^2 I) in an orthonormal basis of the symmetric matrices.
    """
    noise = gaussian_vector(dim * dim, off_diagonal, generator).view(dim, dim).triu(1)
    return noise + noise.T + torch.diag(gaussian_vector(dim, diagonal, generator))


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
    count = check.positive_count(dim=dim)
    scale = check.positive(scale=scale)
    radius = exponential_sum(count, generator)
    direction = gaussian_vector(count, 1.0, generator)
    length = torch.linalg.vector_norm(direction)
    while not float(length):  # of probability 0, but floats are discrete
        direction = gaussian_vector(count, 1.0, generator)
        length = torch.linalg.vector_norm(direction)
    noise: Tensor = direction * (scale * radius / length)
    return noise
