"""Selection among private candidates: post-processing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Selected:
    """Index of the chosen candidate, and the radii of all."""

    index: int
    radii: list[float]


def select_central(candidates: Tensor | Sequence[Any]) -> Selected:
    """Returns the candidate that has more than half of all candidates nearest to it.

    The radius of candidate j is the (floor(J/2) + 1)-th smallest distance to a candidate, itself included; the least
    radius wins, the first one of equals. If more than half of the candidates are within q of a point, the chosen one
    is within 3 q of it.

    Args:
        candidates: (J, dim), J >= 1.

    Source: docs/proofs/heavy_tailed.md#central-candidate.

    Example:
        >>> select_central([[0.0], [5.0], [0.1]]).index
        0
    """
    if not isinstance(candidates, Tensor):
        try:
            candidates = torch.tensor(candidates, dtype=torch.float64)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise ValueError(f"candidates must be rows of numbers (got {type(candidates).__name__})") from error
    points = torch.as_tensor(candidates, dtype=torch.float64)
    if points.dim() != 2 or not len(points):
        raise ValueError(f"candidates must be of shape (J, dim), J >= 1 (got {tuple(points.shape)})")
    # exact differences: the matrix product form of cdist loses half of the digits
    distances = torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist").nan_to_num_(nan=torch.inf)
    radii = distances.sort(dim=1).values[:, len(points) // 2]
    return Selected(int(radii.argmin()), radii.tolist())
