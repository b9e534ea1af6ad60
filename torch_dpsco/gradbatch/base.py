"""Per-sample gradients of one physical batch: a block per parameter (or layer), one interface over all forms.

Rows never leave this package except as norms (to an oracle) and weighted sums. Numerics, which the privacy proof uses:

* norms are certified upper bounds of the joint L2 norm of a row: float32 pieces of at most `PIECE` coordinates are
  combined in float64, the result is enlarged by the worst-case rounding error and by what can underflow;
* weighted sums run over tiles of rows, in float64 or, for small batches, in float32; `plan_summation` bounds their
  error, which the oracle adds to the sensitivity that it declares.

Source: architecture section 4; error bounds from the standard model fl(a op b) = (a op b)(1 + e), |e| <= u, by which a
sum of k products has relative error at most k u / (1 - k u) in the sum of absolute values, in any order.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = [
    "NORM_ERROR",
    "PIECE",
    "Block",
    "Summation",
    "float32_is_exact",
    "plan_summation",
    "row_norms",
    "tiles",
    "work_dtype",
]

PIECE = 1024
# Relative error of a norm: (PIECE + 2)/2 roundings of the working precision, doubled for safety.
NORM_ERROR = {torch.float32: 2.0**-14, torch.float64: 2.0**-42}
# A square below the least normal number may be flushed to 0: each coordinate hides at most its square root.
_UNDERFLOW = {torch.float32: 2.0**-63, torch.float64: 2.0**-511}
_TILE_ELEMENTS = 2**17
_TILE32 = 64


def work_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the precision in which rows of a dtype are read: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def row_norms(rows: Tensor) -> Tensor:
    """Returns certified upper bounds of the L2 norms of rows.

    Args:
        rows: (B, k) floating; half precisions are read as float32.

    Returns:
        (B,) float64, never below the exact norm; inf or NaN for a row with a non-finite entry or a norm that overflows.
    """
    rows = rows.to(work_dtype(rows.dtype))
    width = rows.shape[1]
    if width <= PIECE:
        norms: Tensor = torch.linalg.vector_norm(rows, dim=1).double()
    else:
        whole = width - width % PIECE
        pieces = [torch.linalg.vector_norm(rows[:, :whole].unflatten(1, (-1, PIECE)), dim=2)]
        if whole < width:
            pieces.append(torch.linalg.vector_norm(rows[:, whole:], dim=1, keepdim=True))
        norms = torch.linalg.vector_norm(torch.cat(pieces, dim=1).double(), dim=1)
    # PRIVACY: a norm that is too small would let a row past the clip (test_norms_are_never_below_the_exact_norm)
    norms = norms.mul_(1.0 + NORM_ERROR[rows.dtype]).add_(_UNDERFLOW[rows.dtype] * width**0.5)
    return norms


@dataclass(frozen=True)
class Summation:
    """Precision of the weighted sums of one oracle, with a bound on their error.

    Args:
        float32_rows: while a logical batch has at most this many rows it is summed in float32; 0 for never.
        max_rows: largest logical batch for which the bound is proved.
        error: bound on |computed - exact| for the difference of two neighboring sums, in units of the clip.
    """

    float32_rows: int
    max_rows: int
    error: float


def plan_summation(batch_size: int) -> Summation:
    """Chooses float32 where its worst-case error costs at most 2^-8 of the clip, else float64.

    A sum of m weighted rows of norm <= C in tiles of t rows has a chain of at most k = t + m/t + 8 roundings (tile,
    product, weight and accumulation included), so that its error is at most k u m C, and twice that for two neighbors.
    Rows past `float32_rows` are summed in float64, so that the bound holds whatever size a batch turns out to have.
    The cap max_rows = 2 batch_size + 65536 is passed by a Poisson batch with probability below exp(-20000).

    Args:
        batch_size: expected rows of a logical batch (public).
    """
    rows = batch_size + 8 * math.isqrt(batch_size) + 16
    error = 2.0 * (_TILE32 + rows // _TILE32 + 9) * 2.0**-24 * rows
    if error > 2.0**-8:
        rows, error = 0, 0.0
    max_rows = 2 * batch_size + 65536
    return Summation(rows, max_rows, error + 2.0 * (1024 + max_rows) * 2.0**-53 * max_rows)


def float32_is_exact() -> bool:
    """Returns whether float32 products run in float32 (TensorFloat-32 and bfloat16 shortcuts are off)."""
    try:
        return torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:  # set through torch's newer per-backend switches: unknown, so assume the worst
        return False


def tiles(rows: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Yields (rows of the tile, the tile in the dtype): 64 rows in float32, in float64 as many as stay in cache.

    The tiles of a conversion share one buffer, so that each is valid until the next only.
    """
    n_rows, width = rows.shape
    step = _TILE32 if dtype == torch.float32 else max(1, min(1024, _TILE_ELEMENTS // max(width, 1)))
    buffer = None if rows.dtype == dtype else rows.new_empty(min(step, n_rows), width, dtype=dtype)
    for start in range(0, n_rows, step):
        index = slice(start, min(start + step, n_rows))
        if buffer is None:
            yield index, rows[index]
        else:
            yield index, buffer[: index.stop - start].copy_(rows[index])


class Block(ABC):
    """Per-sample gradients of one or more parameters for the same rows."""

    @property
    @abstractmethod
    def shapes(self) -> list[torch.Size]:
        """Shapes of the parameters, in order."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of rows."""

    @abstractmethod
    def norms(self) -> Tensor:
        """Certified upper bounds of the rows' L2 norms over this block: (B,) float64."""

    @abstractmethod
    def weighted_sum(self, weights: Tensor) -> list[Tensor]:
        """Returns sum_i weights[i] * row_i per parameter, in the dtype of the weights; all rows must be finite."""

    @abstractmethod
    def select(self, index: Tensor) -> Block:
        """Returns the block of some rows."""

    @abstractmethod
    def dense(self) -> list[Tensor]:
        """Returns the rows per parameter: (B, *shape)."""
