"""Per-sample gradients of one physical batch: a block per parameter (or layer), one interface over all forms.

Rows never leave this package except as norms (to an oracle) and weighted sums. Numerics, which the privacy proof uses:

* norms are certified upper bounds of the joint L2 norm of a row: float32 pieces of at most `PIECE` coordinates are
  combined in float64, the result is enlarged by the worst-case rounding error and by what can underflow;
* weighted sums run over tiles of rows, in float64 or, for small batches, in float32; `plan_summation` bounds their
  error, which the oracle adds to the sensitivity that it declares.

Float32 rows on the CPU take `native` for both, in float64, where it is there.

Source: docs/proofs/rounding.md#certified-norms, docs/proofs/rounding.md#weighted-sums.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from torch_dpsco import native
from torch_dpsco.rows.precision import products_are_exact

PIECE = 1024
# Relative error of a norm: (PIECE + 2)/2 roundings of the working precision and d/(2 PIECE) of float64, doubled.
NORM_ERROR = {torch.float32: 2.0**-14, torch.float64: 2.0**-40}
# A square below the least normal number may be flushed to 0: each coordinate hides at most its square root.
UNDERFLOW = {torch.float32: 2.0**-63, torch.float64: 2.0**-511}
_TILE_ELEMENTS = 2**17  # numbers in a float64 tile
_PARTS_ELEMENTS = 2**19  # numbers in the sums of float32 tiles that are added at once
_GROUP, _MANY_TILES = 4, 16  # sums of tiles that are added in float32 first, where there are many
_FEW, _SMALL = (
    2**16,
    2**17,
)  # up to that many numbers float64 is not slower, in one block or altogether
_LARGE = 64  # rows of a tile
_MAX_ERROR32 = 2.0**-7
CANCELLATION = 2.0**10  # largest ratio of the terms of a row to its certified norm, see `gram`


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
    if native.suits(rows):
        return native.norms(rows)
    rows = rows.to(work_dtype(rows.dtype))
    width = rows.shape[1]
    if width == 1:  # exact, unless subnormal numbers are read as 0
        return rows[:, 0].abs().double().add_(torch.finfo(rows.dtype).tiny)
    pieces = piece_norms(rows).double()
    norms = pieces[:, 0] if width <= PIECE else torch.linalg.vector_norm(pieces, dim=1)
    # PRIVACY: a norm that is too small would let a row past the clip (test_norms_are_never_below_the_exact_norm)
    bounds: Tensor = norms.mul_(1.0 + NORM_ERROR[rows.dtype]).add_(
        UNDERFLOW[rows.dtype] * width**0.5
    )
    return bounds


def piece_norms(rows: Tensor) -> Tensor:
    """Returns norms of consecutive pieces of at most PIECE coordinates of rows, together all of them: (B, n).

    Args:
        rows: (B, k) floating; half precisions are read as float32.
    """
    rows = rows.to(work_dtype(rows.dtype))
    width = rows.shape[1]
    whole = width - width % PIECE
    if not whole:
        pieces: Tensor = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
        return pieces
    pieces = torch.linalg.vector_norm(
        rows[:, :whole].reshape(len(rows), whole // PIECE, PIECE), dim=2
    )
    if whole == width:
        return pieces
    return torch.cat(
        [pieces, torch.linalg.vector_norm(rows[:, whole:], dim=1, keepdim=True)], dim=1
    )


def joint_norms(parts: Iterable[Tensor]) -> Tensor:
    """Returns certified upper bounds of the joint norms of rows from those of their parts: (B,) float64 each."""
    first, *others = parts
    squares = first.square()
    for norms in others:
        squares.addcmul_(norms, norms)
    # what underflows in a square is less than the number added
    return squares.sqrt_().mul_(1.0 + NORM_ERROR[torch.float64]).add_(2.0**-500)


def row_norm(row: Tensor) -> float:
    """Returns a certified upper bound of the L2 norm of one tensor, as `row_norms` does; inf or NaN as there."""
    if row.numel() > PIECE or row.dtype not in NORM_ERROR:
        return float(row_norms(row.reshape(1, -1)))
    norm = float(torch.linalg.vector_norm(row))
    return norm * (1.0 + NORM_ERROR[row.dtype]) + UNDERFLOW[row.dtype] * math.sqrt(PIECE)


@dataclass(frozen=True)
class Summation:
    """Precision of weighted sums, with a bound on their error.

    Args:
        vector_tile: rows per float32 tile in sums of vectors; a few tiles are added in float32, and those sums in
            float64; 0 sums in float64.
        matrix_tile: rows per float32 tile in sums of outer products, added in float32, or in C in float64; 0 sums in
            float64.
        rows: largest logical batch for which float32 may be used.
        max_rows: largest logical batch for which the bound is proved at all.
        error: bound on |computed - exact| for the difference of two neighboring sums, in units of the clip.
        in_c: whether tiles of outer products are those of C; what C cannot read is then summed in float64.
    """

    vector_tile: int
    matrix_tile: int
    rows: int
    max_rows: int
    error: float
    in_c: bool = False

    @property
    def uses_float32(self) -> bool:
        """Whether some sums may run in float32."""
        return self.vector_tile > 0 or self.matrix_tile > 0

    @property
    def has_small_tiles(self) -> bool:
        """Whether larger tiles, where rows leave room for them, would be much faster."""
        return 0 < self.vector_tile < _LARGE or 0 < self.matrix_tile < _LARGE

    def for_rows(self, n_rows: int, mean_norm: float = 1.0) -> Summation:
        """Returns the precision for a physical batch.

        A float32 sum errs by at most u times the longest chain of roundings times the sum of the rows' weighted norms.
        The tiles of the plan have room for norms of the clip; shorter rows leave room for longer chains, that is for
        larger tiles, within the same error.

        Args:
            n_rows: rows of the logical batch so far, those of this physical batch included.
            mean_norm: upper bound of the mean of the weighted norms in this physical batch, in units of the clip; what
                is above 1, or NaN, counts as 1.
        """
        if n_rows > self.rows or not products_are_exact():
            return _with_tiles(self, 0, 0)
        # PRIVACY: any choice keeps each sum within the declared error, so that it may depend on private norms
        # (test_short_rows_are_summed_in_larger_tiles_within_the_claim)
        room = 1.0 / mean_norm if 0.0 < mean_norm < 1.0 else 1.0
        if room < 1.1:
            return self
        vector = matrix = 0
        if self.vector_tile:
            vector = _largest_tile(_vector_chain, room * _vector_chain(self.vector_tile))
        if self.matrix_tile:
            matrix = _largest_tile(self._matrix_chain, room * self._matrix_chain(self.matrix_tile))
        return _with_tiles(self, max(vector, self.vector_tile), max(matrix, self.matrix_tile))

    def _matrix_chain(self, tile: int) -> int:
        return _matrix_chain(tile, self.rows, self.in_c)


FLOAT64 = Summation(0, 0, 0, 0, 0.0)


def plan_summation(
    batch_size: int, dim: int, *, vectors: bool = True, matrices: bool = True, in_c: bool = False
) -> Summation:
    """Chooses float32 where that is faster and its worst-case error costs at most 2^-7 of the clip, else float64.

    A sum of m weighted rows of norm <= C that has at most k roundings in a chain has an error of at most k u m C, and
    two neighboring sums differ by twice that from their exact difference. In tiles of t rows k = t + 3 (weight,
    product, t - 1 additions, rounding of the tile), plus 3 where four tiles are added before float64, or m/t + 9 where
    all are added in float32, or 1 in C, where all are added in float64 and the sum is rounded. The bound holds whatever
    size a batch turns out to have: past `rows` everything is summed
    in float64. The cap max_rows = 2 batch_size + 65536 is passed by a Poisson batch with probability below exp(-20000).

    A mean loss is a second source: 1/B is rounded, so that one record more changes ALL rows, by 4 u each if the layer
    is applied last. That is 8 u m more for m <= 2 batch_size + 1024 rows (passed with probability below exp(-500)) of a
    Linear layer with one output. Several outputs, and deeper layers, amplify it: there a mean over a private number of
    rows is refused (`PrivateOptimizer`). In half precision it is large and always refused (`attach`).

    Rows that are left as sequences of factors are summed in float64, at an error relative to their terms, which `gram`
    keeps below CANCELLATION times the clip: hence that factor in what float64 costs.

    Args:
        batch_size: expected rows of a logical batch (public).
        dim: number of parameters.
        vectors: whether rows that are vectors may be summed in float32; in C they are summed in float64.
        matrices: whether there are rows that are outer products, or vectors of a table, which may.
        in_c: whether outer products are summed in C.
    """
    rows = batch_size + 8 * math.isqrt(batch_size) + 16
    max_rows = 2 * batch_size + 65536

    def error(chain: int) -> float:
        return 2.0 * chain * 2.0**-24 * rows

    def largest(chain_of: Callable[[int], int]) -> tuple[int, float]:
        fitting = [
            (t, error(chain_of(t)))
            for t in (64, 32, 16, 8, 4)
            if error(chain_of(t)) <= _MAX_ERROR32
        ]
        return fitting[0] if fitting else (0, 0.0)

    always = 2.0 * (1024 * CANCELLATION + max_rows) * 2.0**-53 * max_rows + 8.0 * 2.0**-24 * (
        2 * batch_size + 1024
    )
    if batch_size * dim <= _SMALL:
        return Summation(0, 0, rows, max_rows, always)
    vector_tile, vector_error = largest(_vector_chain) if vectors else (0, 0.0)
    matrix_tile, matrix_error = (
        largest(lambda t: _matrix_chain(t, rows, in_c)) if matrices else (0, 0.0)
    )
    return Summation(
        vector_tile, matrix_tile, rows, max_rows, max(vector_error, matrix_error) + always, in_c
    )


@lru_cache(maxsize=256)
def _with_tiles(plan: Summation, vector: int, matrix: int) -> Summation:
    return replace(plan, vector_tile=vector, matrix_tile=matrix)


def _largest_tile(chain_of: Callable[[int], int], longest: float) -> int:
    """Returns the largest tile whose chain of roundings is at most that long; 0 if none is."""
    return next((t for t in (512, 256, 128, 64, 32, 16) if chain_of(t) <= longest), 0)


def _matrix_chain(tile: int, rows: int, in_c: bool) -> int:
    return tile + 4 if in_c else tile + rows // tile + 12


def _vector_chain(tile: int) -> int:
    return tile + 3 + _GROUP - 1


def weighted_rows(rows: Tensor, weights: Tensor, precision: Summation) -> Tensor:
    """Returns sum_i weights[i] * rows[i] in float64.

    Args:
        rows: (B, k).
        weights: (B,) float64, or float32.
        precision: of the sum; few numbers are summed in float64 anyway.
    """
    if native.suits(rows):
        return native.add_weighted(
            rows, weights.double(), rows.new_zeros(rows.shape[1], dtype=torch.float64)
        )
    if rows.numel() <= _FEW:
        return weights.double() @ rows.double()
    if not precision.vector_tile or rows.dtype == torch.float64:
        total = rows.new_zeros(rows.shape[1], dtype=torch.float64)
        for index, part in float64_tiles(rows):
            total.addmv_(part.t(), weights[index].double())
        return total
    return _tiled_sum(rows.float(), weights.float(), precision.vector_tile)


def _tiled_sum(rows: Tensor, weights: Tensor, tile: int) -> Tensor:
    """Returns the weighted sum of float32 rows, at most as many tiles at once as stay in cache."""
    n_rows, width = rows.shape
    most = max(_GROUP, _PARTS_ELEMENTS // width) * tile
    if n_rows <= most and n_rows % tile == 0:
        return _sum_of_tiles(rows, weights, tile)
    whole = n_rows - n_rows % tile
    total = (weights[whole:] @ rows[whole:]).double()
    for start in range(0, whole, most):
        part = slice(start, min(start + most, whole))
        total.add_(_sum_of_tiles(rows[part], weights[part], tile))
    return total


def _sum_of_tiles(rows: Tensor, weights: Tensor, tile: int) -> Tensor:
    """Returns the weighted sum of whole tiles: each in float32, then groups of their sums, and those in float64."""
    tiles = len(rows) // tile
    width = rows.shape[1]
    sums = torch.bmm(weights.view(tiles, 1, tile), rows.view(tiles, tile, width)).squeeze(1)
    if tiles < _MANY_TILES:
        return sums.sum(0, dtype=torch.float64)
    in_groups = tiles - tiles % _GROUP
    total = sums[:in_groups].view(_GROUP, -1, width).sum(0).sum(0, dtype=torch.float64)
    return total if in_groups == tiles else total.add_(sums[in_groups:].sum(0, dtype=torch.float64))


def float64_tiles(rows: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yields (index, rows of the tile in float64), as many as stay in cache; each is valid until the next only."""
    n_rows, width = rows.shape
    step = max(1, min(1024, _TILE_ELEMENTS // max(width, 1)))
    buffer = (
        None
        if rows.dtype == torch.float64
        else rows.new_empty(min(step, n_rows), width, dtype=torch.float64)
    )
    for start in range(0, n_rows, step):
        index = slice(start, min(start + step, n_rows))
        if buffer is None:
            yield index, rows[index]
        else:  # one buffer for all tiles: fresh memory costs more than the arithmetic
            yield index, buffer[: index.stop - start].copy_(rows[index])


class Block(ABC):
    """Per-sample gradients of one or more parameters for the same rows."""

    shapes: list[torch.Size]  # of the parameters, in order

    @abstractmethod
    def __len__(self) -> int:
        """Number of rows."""

    @abstractmethod
    def norms(self) -> Tensor:
        """Certified upper bounds of the rows' L2 norms over this block: (B,) float64."""

    @abstractmethod
    def weighted_sum(self, weights: Tensor, precision: Summation) -> list[Tensor]:
        """Returns sum_i weights[i] * row_i per parameter; weights (B,) float64 > 0, all rows finite."""

    @abstractmethod
    def select(self, index: Tensor) -> Block:
        """Returns the block of some rows."""

    @abstractmethod
    def dense(self) -> list[Tensor]:
        """Returns the rows per parameter: (B, *shape)."""
