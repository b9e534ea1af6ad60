"""Weights by which rows stay within a clip, and what else oracles need of norms and shapes.

Source: docs/proofs/rounding.md#clip-weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from torch_dpsco.gradbatch import LinearRows, row_norm

Cut = tuple[torch.Size, tuple[int, ...], int]  # shape, strides and place in a vector
_ROUNDED = 1.0 - 8 * 2.0**-52  # covers the roundings of a weight, and of its product with a row


def clip_weights(norms: Tensor, clip: float) -> Tensor:
    """Returns min(1, clip / norm), a little below it, and 0 for rows that must not count.

    Args:
        norms: (B,) float64 upper bounds of the rows' norms; NaN and inf mark rows to drop.
        clip: largest norm a row may contribute, > 0.

    Returns:
        (B,) float64 in [0, 1]; weight * norm <= clip also after rounding.
    """
    scaled = norms.reciprocal().mul_(clip * _ROUNDED)
    # PRIVACY: clip / inf = 0 and NaN becomes 0 (test_non_finite_rows_contribute_nothing)
    return scaled.clamp_(max=1.0).nan_to_num_(nan=0.0)


def clipped_slopes(rows: LinearRows, clip: float) -> tuple[LinearRows, Tensor]:
    """Returns the rows that count, and s_i f_i clipped to [-C, C]: divided by f_i, the weights of (x_i, 1).

    A weight w computed from it has |w| |(x, 1)| <= C: a product, the limit, a quotient, 1/B and a product are rounded,
    and a float32 f has room for 14 roundings (see `linear_factors`); in float64 the limit has it, also for those of f.
    What underflows in a product belongs to a row far shorter than C.

    Args:
        rows: s_i (x_i, 1) with the bounds f_i.
        clip: C, far from overflow and underflow.
    """
    norms = rows.slopes * rows.factors
    if not math.isfinite(torch.dot(norms, norms)):
        # PRIVACY: dropped, not multiplied by 0 (test_linear_rows_are_clipped_dropped_and_summed_as_all_others)
        index = torch.isfinite(norms).nonzero().squeeze(1)
        rows, norms = rows.select(index), norms[index]
    limit = clip * _ROUNDED
    return rows, norms.clamp_(-limit, limit)


def in_float32(clip: float) -> bool:
    """Returns whether such rows are far from overflow and underflow of float32, which its error bounds leave out."""
    return 2.0**-40 < clip < 2.0**40


def joint_norm(tensors: Sequence[Tensor]) -> float:
    """Returns an upper bound of the L2 norm of the concatenated tensors; inf if it is not finite."""
    # one row of all tensors, unless a weight and a bias are read faster by themselves
    flat = tensors if len(tensors) <= 2 else [torch.cat([t.detach().reshape(-1) for t in tensors])]
    norm = math.hypot(*[row_norm(t.detach()) for t in flat]) * (1.0 + 2.0**-50)
    return norm if math.isfinite(norm) else math.inf


def cuts(shapes: Sequence[torch.Size]) -> tuple[list[Cut], int]:
    """Returns where tensors of some shapes lie in one vector, and its length."""
    found, place = [], 0
    for shape in shapes:
        found.append((shape, torch.empty(shape, device="meta").stride(), place))
        place += shape.numel()
    return found, place


def views(flat: Tensor, places: Sequence[Cut]) -> list[Tensor]:
    """Returns parts of a contiguous vector as tensors of their shapes, without copying."""
    start = int(flat.storage_offset())
    return [flat.as_strided(shape, strides, start + place) for shape, strides, place in places]
