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

from torch_dpsco.mechanisms.shuffle_sizing import (
    ShuffleParameters,
    coordinate_cost,
    coordinate_parameters,
    vector_cost,
    vector_parameters,
)
from torch_dpsco.noise import uniform
from torch_dpsco.rng import Source

__all__ = [
    "ShuffleParameters",
    "centered_sum",
    "coordinate_cost",
    "coordinate_parameters",
    "grid_values",
    "largest_count",
    "round_randomly",
    "vector_cost",
    "vector_parameters",
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
