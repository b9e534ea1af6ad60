"""Sums in the shuffle model: each user sends bits, a shuffler mixes them, an analyzer counts them.

Algorithm 14 for one number x in [0, L], with integers g (grid) and b (noise bits) and a coin of probability p:

    user:      k = floor(x g / L) + Ber(x g / L - floor(x g / L)) ones,  Bin(b, p) more ones,  zeros up to g + b bits
    analyzer:  (L / g) (number of ones - p b n)

It is unbiased. Bits have no sender after the shuffle, so that their number is all an analyzer learns: a count path that
draws sum(k) + Bin(n b, p) at once has the law of the bits. Algorithm 11 sums vectors by one such protocol per
coordinate, with messages labelled by the coordinate and values moved from [-D, D] to [0, 2 D].

THE SHUFFLE MODEL HERE IS SIMULATED IN ONE PROCESS, which sees all data. The guarantee is that of the counts, and holds
against an analyzer behind a real shuffler only if the users whose noise it counts are honest (`honest_fraction`).

Differs from the paper in: 1. the sizing of g and b (`shuffle_sizing`); 2. values are moved to [0, 2 D] before they are
rounded and clamped to the grid, so that no rounding of the machine makes a message longer.

Proof: docs/proofs/heavy_tailed.md#shuffled-sums. Source: Lowy and Razaviyayn, Algorithms 11 and 14; Cheu, Joseph, Mao
and Peng 2021.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torch_dpsco import _validate as check
from torch_dpsco.mechanisms.shuffle_noise import BinomialNoise
from torch_dpsco.mechanisms.shuffle_sizing import (
    ShuffleParameters,
    coordinate_cost,
    coordinate_parameters,
    vector_cost,
    vector_parameters,
    vector_parameters_paper,
)
from torch_dpsco.noise import uniform
from torch_dpsco.rng import Source

__all__ = [
    "ShuffleParameters",
    "analyze_scalar_sum",
    "centered_sum",
    "coordinate_cost",
    "coordinate_parameters",
    "grid_values",
    "largest_count",
    "randomize_scalar",
    "round_randomly",
    "scalar_sum",
    "scalar_sum_variance",
    "vector_cost",
    "vector_parameters",
    "vector_parameters_paper",
    "vector_sum",
]


def grid_values(values: Tensor, upper: float, grid: int) -> Tensor:
    """Returns x g / L in [0, g], float64, for values that are clamped to [0, L]; NaN counts as 0."""
    # PRIVACY: a place past g would be a message too long (test_no_value_leaves_the_grid)
    return (values.double() / upper).nan_to_num_(nan=0.0).clamp_(0.0, 1.0) * float(grid)


def round_randomly(places: Tensor, generator: Source) -> Tensor:
    """Returns floor(v) + Ber(v - floor(v)) for places v on the grid: int64, unbiased.

    With one uniform u for two values it is ceil(v - u): they come out less than |v - v'| + 1 apart.
    """
    whole = places.floor()
    # v - floor(v) is exact; the uniform number has 53 bits
    drawn = uniform(places.shape, generator).to(places.device)
    return whole.to(torch.int64) + (drawn < places - whole).to(torch.int64)


def randomize_scalar(values: Tensor, upper: float, parameters: ShuffleParameters, generator: Source) -> Tensor:
    """Returns the bits of each user (Algorithm 14, randomizer), in the order in which they were made: not shuffled.

    Args:
        values: (n, ...) numbers in [0, upper]; others are clamped.
        upper: L > 0.
        parameters: g, b, p.
        generator: of noise; also the rounding comes from it.

    Returns:
        (n, ..., g + b) bool. For tests and real shufflers: memory for every bit.
    """
    upper, grid = check.positive(upper=upper), parameters.grid
    ones = round_randomly(grid_values(values, upper, grid), generator)
    value_bits = torch.arange(grid, device=values.device) < ones[..., None]
    drawn = uniform((*values.shape, parameters.noise_bits), generator).to(values.device)
    noise_bits = drawn < parameters.noise_probability
    return torch.cat([value_bits, noise_bits], dim=-1)


def analyze_scalar_sum(count: int, n: int, grid: int, noise_bits: int, noise_probability: float, upper: float) -> float:
    """Returns (L / g) (count - p b n), the estimate of the sum of n numbers in [0, L] (Algorithm 14, analyzer).

    Args:
        count: ones among the n (g + b) bits, >= 0.
        n: users, >= 1.
        grid: g >= 1.
        noise_bits: b >= 0.
        noise_probability: p in (0, 1).
        upper: L > 0.

    Source: docs/proofs/heavy_tailed.md#shuffled-sums.

    Example:
        >>> round(analyze_scalar_sum(count=36, n=10, grid=4, noise_bits=3, noise_probability=0.136, upper=3.349), 5)
        26.72502
    """
    n, sizes = check.positive_count(n=n), ShuffleParameters(grid, noise_bits, noise_probability)
    excess = check.count(count=count) - sizes.noise_probability * (sizes.noise_bits * n)
    return check.positive(upper=upper) / sizes.grid * excess


def scalar_sum_variance(n: int, grid: int, noise_bits: int, noise_probability: float, upper: float) -> float:
    """Returns (L / g)^2 (n b p (1 - p) + n / 4), a bound of the variance of Algorithm 14's estimate.

    Args:
        n: users, >= 1.
        grid: g >= 1.
        noise_bits: b >= 0.
        noise_probability: p in (0, 1).
        upper: L > 0.

    Source: docs/proofs/heavy_tailed.md#shuffled-sums.

    Example:
        >>> scalar_sum_variance(n=4, grid=2, noise_bits=3, noise_probability=0.5, upper=2.0)
        4.0
    """
    n, sizes = check.positive_count(n=n), ShuffleParameters(grid, noise_bits, noise_probability)
    p = sizes.noise_probability
    return (check.positive(upper=upper) / sizes.grid) ** 2 * (n * sizes.noise_bits * p * (1.0 - p) + n / 4.0)


def scalar_sum(
    values: Tensor,
    upper: float,
    parameters: ShuffleParameters,
    generator: Source,
    *,
    messages: bool = False,
) -> Tensor:
    """Returns the count of ones of Algorithm 14, per trailing index: all that an analyzer behind a shuffler learns.

    Args:
        values: (n, ...) numbers in [0, upper]; others are clamped.
        upper: L > 0.
        parameters: g, b, p.
        generator: of noise; also the rounding comes from it.
        messages: whether to make every bit, and count; else the count is drawn at once, with the same law.

    Returns:
        (...) int64.

    Guarantee: of the parameters, see `shuffle_sizing`: replace-one or zero-out, n public, honest users.

    Example:
        >>> generator = torch.Generator().manual_seed(0)
        >>> count = scalar_sum(torch.tensor([0.5, 1.0]), 1.0, ShuffleParameters(grid=2, noise_bits=0), generator)
        >>> int(count)
        3
    """
    if messages:
        return randomize_scalar(values, upper, parameters, generator).sum(dim=(0, -1))
    ones = round_randomly(grid_values(values, check.positive(upper=upper), parameters.grid), generator)
    noise = BinomialNoise(len(values) * parameters.noise_bits, parameters.noise_probability)
    return ones.sum(0) + noise.draw(tuple(values.shape[1:]), generator)


def vector_sum(
    vectors: Tensor,
    bound: float,
    parameters: ShuffleParameters,
    generator: Source,
    *,
    messages: bool = False,
) -> Tensor:
    """Returns the estimate of the sum of vectors of L2 norm at most D (Algorithm 11).

    Args:
        vectors: (n, d) floating, each of norm at most `bound`; THE CALLER CLIPS (see `oracles.ShuffledClipped`).
        bound: D > 0.
        parameters: g, b, p of each coordinate.
        generator: of noise; also the rounding comes from it.
        messages: whether to make every bit.

    Returns:
        (d,) float64, unbiased.

    Source: docs/proofs/heavy_tailed.md#shuffled-sums.

    Example:
        >>> vectors = torch.tensor([[1.0, -1.0], [0.0, 0.5]])
        >>> vector_sum(vectors, 2.0, ShuffleParameters(grid=8, noise_bits=0), torch.Generator()).tolist()
        [1.0, -0.5]
    """
    bound = check.positive(bound=bound)
    count = scalar_sum(vectors.double() + bound, 2.0 * bound, parameters, generator, messages=messages)
    return centered_sum(count, len(vectors), bound, parameters)


def centered_sum(count: Tensor, n: int, bound: float, parameters: ShuffleParameters) -> Tensor:
    """Returns (2 D / g) (count - p b n) - n D, the estimate of a sum of n numbers in [-D, D] from counts of ones."""
    expected = parameters.noise_probability * (parameters.noise_bits * n)
    # in this order a count at its mean gives an exact zero
    return (count.double() - (expected + n * parameters.grid / 2.0)) * (2.0 * bound / parameters.grid)


def largest_count(n: int, parameters: ShuffleParameters) -> int:
    """Returns n (g + b), the number of bits of a coordinate; raises ValueError if it is not exact in float64."""
    most = n * (parameters.grid + parameters.noise_bits)
    if most >= 2**53:
        raise ValueError(f"n * (grid + noise_bits) must be below 2^53 (got {most:.3g}, {math.log2(most):.1f} bits)")
    return most
