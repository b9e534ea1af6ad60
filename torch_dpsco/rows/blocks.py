"""Per-sample gradients of one physical batch: a block per parameter (or layer), one interface over all forms.

Rows never leave this package except as norms (to an oracle) and weighted sums. Numerics, which the privacy proof uses:

* norms are certified upper bounds of the joint L2 norm of a row: float32 pieces of at most `PIECE` coordinates are
  combined in float64, the result is enlarged by the worst-case rounding error and by what can underflow;
* weighted sums run over tiles of rows, in float64 or, for small batches, in float32; `plan_summation` bounds their
  error, which the oracle adds to the sensitivity that it declares.

Float32 rows on the CPU take `native` for both, in float64, where it is there. Three forms:

* dense: one tensor of rows per parameter;
* factored: a Linear layer's row is the outer product of two vectors, so it is never formed. For y = W a + c the
  gradient of sample i is b_i a_i^T for W and b_i for the bias, with a_i the layer's input and b_i the gradient of the
  loss in its output. Norm: |b| sqrt(|a|^2 + 1); weighted sum: (w b)^T a: memory O(B (in + out));
* sequences: R = sum_t g_t a_t^T, with g_t in R^out and a_t in R^in of float32 or less, left as its two factors. With
  u = 2^-53 and S = sum_t |g_t| |a_t|, which is at least |R| and much larger where terms cancel:

  - norm. |R|^2 = sum_st (g_s.g_t)(a_s.a_t). To first order the product of the two inner products errs in float64 by at
    most (out + in + 1) u |g_s||g_t||a_s||a_t|, their sum over t and then over s by 2 T u of the same, so the computed
    square by at most K u S^2 with K = out + in + 2 T + 8. (Nothing underflows: products of four float32 numbers that
    are not 0 are above 2^-600.) The certified norm is sqrt(square + 2 K u S^2); S is from the diagonals, which do not
    cancel.
  - weighted sum. Its terms w_i |g_it| |a_it| add up to w_i S_i, not to w_i |R_i|. So `norms` is at least
    S / CANCELLATION; then w_i norm_i <= C gives w_i S_i <= CANCELLATION * C. In float64 tiles of r whole records,
    r T <= 960, each product is off by (r T + 3) u times its terms, and adding the tiles by m / r roundings of sums
    whose terms are at most w_i |R_i| <= C. In all u m C (963 CANCELLATION + m + 1) for m rows, half of what
    `plan_summation` reserves for float64.

  A row that cancels by more than CANCELLATION = 1024 is noise of the float32 backward at any rate; it is clipped
  harder, never less.

Source: docs/proofs/rounding.md#certified-norms, docs/proofs/rounding.md#weighted-sums,
docs/proofs/rounding.md#norms-of-factors, docs/proofs/rounding.md#gram-norms,
docs/proofs/rounding.md#sums-of-factors.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from torch_dpsco import native
from torch_dpsco.acts import act
from torch_dpsco.native import products_are_exact

PIECE = 1024
# Relative error of a norm: (PIECE + 2)/2 roundings of the working precision and d/(2 PIECE) of float64, doubled.
NORM_ERROR = {torch.float32: 2.0**-14, torch.float64: 2.0**-40}
# A square below the least normal number may be flushed to 0: each coordinate hides at most its square root.
UNDERFLOW = {torch.float32: 2.0**-63, torch.float64: 2.0**-511}
_TILE_ELEMENTS = 2**17  # numbers in a float64 tile
_PARTS_ELEMENTS = 2**19  # numbers in the sums of float32 tiles that are added at once
_GROUP, _MANY_TILES = (
    4,
    16,
)  # sums of tiles that are added in float32 first, where there are many
# up to that many numbers float64 is not slower, in one block or altogether
_FEW = 2**16
_SMALL = 2**17
_LARGE = 64  # rows of a tile
_MAX_ERROR32 = 2.0**-7
CANCELLATION = 2.0**10  # largest ratio of the terms of a row to its certified norm, see `gram`


def work_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the precision in which rows of a dtype are read: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def is_queued(tensor: Tensor) -> bool:
    """Returns whether work on a tensor is queued on a device, so that to read a number of it would wait."""
    return not tensor.is_cpu


def from_kernel(name: str, rows: Tensor, *given: Any) -> Any:
    """Returns what a kernel for the device of rows makes of them, see `fast.rows_on_device`; None without one."""
    return act(name)(rows, *given) if rows.device.type in native.DEVICES else None


def row_norms(rows: Tensor) -> Tensor:
    """Returns certified upper bounds of the L2 norms of rows.

    Args:
        rows: (B, k) floating; half precisions are read as float32.

    Returns:
        (B,) float64, never below the exact norm; inf or NaN for a row with a non-finite entry or a norm that overflows.
    """
    if native.suits(rows):
        return native.norms(rows)
    found: Tensor | None = from_kernel("rows.norms", rows)
    if found is not None:
        return found
    rows = rows.to(work_dtype(rows.dtype))
    width = rows.shape[1]
    if width == 1:  # exact, unless subnormal numbers are read as 0
        return rows[:, 0].abs().double().add_(torch.finfo(rows.dtype).tiny)
    whole = width - width % PIECE
    pieces = [torch.linalg.vector_norm(rows[:, whole:], dim=1, keepdim=True)]
    if whole:
        cut = rows[:, :whole].reshape(len(rows), whole // PIECE, PIECE)
        pieces = [torch.linalg.vector_norm(cut, dim=2), *pieces[: width > whole]]
    norms = torch.cat(pieces, dim=1).double()
    norms = norms[:, 0] if width <= PIECE else torch.linalg.vector_norm(norms, dim=1)
    # PRIVACY: a norm that is too small would let a row past the clip (test_norms_are_never_below_the_exact_norm)
    bounds: Tensor = norms.mul_(1.0 + NORM_ERROR[rows.dtype]).add_(
        UNDERFLOW[rows.dtype] * width**0.5
    )
    return bounds


def joint_norms(parts: Iterable[Tensor]) -> Tensor:
    """Returns certified upper bounds of the joint norms of rows from those of their parts: (B,) float64 each."""
    first, *others = parts
    if not others:
        return first
    squares = first.square()
    for norms in others:
        # PRIVACY: not addcmul_, whose last numbers may be rounded in another way than the others
        # (test_norms_of_several_layers_have_the_same_bits_at_every_place,
        # test_joint_norms_of_blocks_are_never_below_the_exact_norm)
        squares.add_(norms.square())
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
        in_c: whether tiles of outer products are those of C, or of a kernel for the device, added in float64; what
            neither can read is then summed in float64.
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
            matrix = _largest_tile(
                self._matrix_chain, room * self._matrix_chain(self.matrix_tile)
            )
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
        in_c: whether outer products are summed in C, or by a kernel for the device.
    """
    rows = batch_size + 8 * math.isqrt(batch_size) + 16
    max_rows = 2 * batch_size + 65536

    def error(chain: int) -> float:
        return 2.0 * chain * 2.0**-24 * rows

    def largest(chain_of: Callable[[int], int]) -> tuple[int, float]:
        for tile in (64, 32, 16, 8, 4):
            if error(chain_of(tile)) <= _MAX_ERROR32:
                return tile, error(chain_of(tile))
        return 0, 0.0

    always = 2.0 * (1024 * CANCELLATION + max_rows) * 2.0**-53 * max_rows + 8.0 * 2.0**-24 * (
        2 * batch_size + 1024
    )
    if batch_size * dim <= _SMALL:
        return Summation(0, 0, rows, max_rows, always)
    none = (0, 0.0)
    vector_tile, vector_error = largest(_vector_chain) if vectors else none
    matrix_tile, matrix_error = (
        largest(lambda t: _matrix_chain(t, rows, in_c)) if matrices else none
    )
    error32 = max(vector_error, matrix_error)
    return Summation(vector_tile, matrix_tile, rows, max_rows, error32 + always, in_c)


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
    return (
        total if in_groups == tiles else total.add_(sums[in_groups:].sum(0, dtype=torch.float64))
    )


def float64_tiles(rows: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yields (index, rows of the tile in float64), as many as stay in cache; each is valid until the next only."""
    n_rows, width = rows.shape
    step = max(1, min(1024, _TILE_ELEMENTS // max(width, 1)))
    double = rows.dtype == torch.float64
    # one buffer for all tiles: fresh memory costs more than the arithmetic
    buffer = rows.new_empty(0 if double else min(step, n_rows), width, dtype=torch.float64)
    for start in range(0, n_rows, step):
        index = slice(start, min(start + step, n_rows))
        yield index, rows[index] if double else buffer[: index.stop - start].copy_(rows[index])


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
    def select(self, index: Tensor | slice) -> Block:
        """Returns the block of some rows."""

    def leaves_out(self, precision: Summation) -> bool:
        """Returns whether rows of weight 0 are not read in a sum of this precision, so that they may hold anything."""
        return False

    @abstractmethod
    def masked(self, kept: Tensor) -> Block:
        """Returns the block with zeros for the rows that are not kept, whatever they hold.

        Args:
            kept: (B,) bool.
        """

    @abstractmethod
    def dense(self) -> list[Tensor]:
        """Returns the rows per parameter: (B, *shape)."""

    def clipped_sum(
        self, limit: float, scale: float, index: Tensor | slice | None = None
    ) -> Tensor | None:
        """Returns the sum of rows of a linear model of one output, each cut to a length, times scale, if C forms it.

        Rows without a finite length, or with a factor of 2^64 or more, count for nothing.

        Args:
            limit: largest length of a row.
            scale: of all rows.
            index: of the rows that count, None for all.

        Returns:
            (d + 1,) float64, for weight and bias; None where rows are others, or the accelerator is missing, or does
            not suit.
        """
        return None


class DenseBlock(Block):
    """Rows of some parameters, with as few calls and passes over memory as one long row would take.

    Args:
        rows: (B, *shape) floating, at least one, for each parameter.
    """

    def __init__(self, *rows: Tensor) -> None:
        for part in rows:
            if part.dim() < 1 or not part.is_floating_point():
                raise ValueError(
                    f"rows must be a floating tensor of shape (B, *shape) (got {part.dtype},"
                    f" {part.shape})"
                )
        self.rows = list(rows)
        self.shapes = [part.shape[1:] for part in rows]

    def __len__(self) -> int:
        return self.rows[0].shape[0]

    def norms(self) -> Tensor:
        """Returns certified upper bounds of the joint norms of the rows: (B,) float64."""
        return joint_norms([row_norms(_flat(part)) for part in self.rows])

    def weighted_sum(self, weights: Tensor, precision: Summation) -> list[Tensor]:
        """Returns [sum_i weights[i] * rows[i]], a tensor per parameter."""
        double = any(part.dtype == torch.float64 for part in self.rows)
        if len(self.rows) == 1 or double or not 0 < len(self) <= precision.vector_tile:
            sums = [weighted_rows(_flat(part), weights, precision) for part in self.rows]
        else:  # one tile, which the bound of `plan_summation` covers
            small = weights.float()[None]
            sums = [torch.mm(small, _flat(part).float())[0] for part in self.rows]
        return [_shaped(total, part) for total, part in zip(sums, self.rows, strict=True)]

    def select(self, index: Tensor | slice) -> DenseBlock:
        """Returns the block of some rows."""
        return DenseBlock(*(part[index] for part in self.rows))

    def masked(self, kept: Tensor) -> DenseBlock:
        """Returns the block with zeros for the rows that are not kept."""
        return DenseBlock(*(_masked(part, kept) for part in self.rows))

    def dense(self) -> list[Tensor]:
        """Returns the rows per parameter."""
        return self.rows


def _masked(rows: Tensor, kept: Tensor) -> Tensor:
    """Returns rows (B, ...) with zeros for those that are not kept; NaN would stay in a product with 0."""
    return rows.masked_fill(~kept.view(-1, *[1] * (rows.dim() - 1)), 0.0)


def _order(rows: Tensor) -> list[int]:
    """Returns the dimensions of a row as they are in memory, outermost first."""
    strides = rows.stride()
    return sorted(range(1, rows.dim()), key=lambda dim: -strides[dim])


def _flat(rows: Tensor) -> Tensor:
    """Returns rows as vectors, (B, k), with the coordinates in the order of memory, so that none are copied."""
    rows = rows if rows.is_contiguous() else rows.permute(0, *_order(rows))
    return rows.reshape(rows.shape[0], rows.shape[1:].numel())


def _shaped(vector: Tensor, rows: Tensor) -> Tensor:
    """Returns a vector whose coordinates are in the order of `_flat` in the shape of the parameter."""
    shape = rows.shape[1:]
    if rows.is_contiguous():
        return vector.view(shape)
    order = _order(rows)
    places = [order.index(dim) for dim in range(1, rows.dim())]
    return vector.view([shape[dim - 1] for dim in order]).permute(places).contiguous()


def joined(blocks: Sequence[Block]) -> list[Block]:
    """Returns blocks with the same rows, in their order, those dense ones as one that follow each other."""
    found: list[Block] = []
    for dense, run in groupby(blocks, lambda block: isinstance(block, DenseBlock)):
        parts: Any = list(run)
        found += (
            [DenseBlock(*(rows for part in parts for rows in part.rows))] if dense else parts
        )
    return found


def input_factors(acts: Tensor, *, bias: bool) -> Tensor:
    """Returns certified upper bounds of sqrt(|a|^2 + bias): the input's factor of the norm of a row; (B,) float64."""
    norms = row_norms(acts)
    if bias:
        norms = norms.square_().add_(1.0).sqrt_()
    # the roundings here, and in the product of the factors, are far inside the slack of the norms of several numbers;
    # PRIVACY: but next to the 1 of a bias that slack may vanish
    # (test_factored_norms_are_never_below_the_exact_norm)
    return (
        norms if acts.shape[1] > 1 and not bias else norms.mul_(1.0 + NORM_ERROR[torch.float64])
    )


class FactoredBlock(Block):
    """Rows of the weight (and bias) of one Linear layer that was used once on 2-D input.

    Args:
        acts: (B, in) inputs of the layer.
        backprops: (B, out) gradients of the per-sample losses in its output.
        weight: whether the weight is trained.
        bias: whether there is a bias that is trained.
        factors: (B,) upper bounds of sqrt(weight |a|^2 + bias) by `input_factors`, where known.
        scale: all rows are multiplied by it.
    """

    def __init__(
        self,
        acts: Tensor,
        backprops: Tensor,
        *,
        weight: bool = True,
        bias: bool = True,
        factors: Tensor | None = None,
        scale: int = 1,
    ) -> None:
        if acts.dim() != 2 or backprops.dim() != 2 or acts.shape[0] != backprops.shape[0]:
            raise ValueError(
                f"acts and backprops must be (B, in) and (B, out) (got {acts.shape},"
                f" {backprops.shape})"
            )
        self.acts = acts
        self.backprops = backprops
        self.weight = weight
        self.bias = bias
        self.factors = factors
        self.scale = scale
        out = backprops.shape[1]
        width = acts.shape[1]
        self.shapes = [torch.Size([out, width])] * weight + [torch.Size([out])] * bias

    def __len__(self) -> int:
        return self.acts.shape[0]

    def clipped_sum(
        self, limit: float, scale: float, index: Tensor | slice | None = None
    ) -> Tensor | None:
        """Returns that of `Block.clipped_sum` where weight and bias are trained."""
        both = self.weight and self.bias
        if not both or not self.backprops.shape[1] == 1 == self.scale:
            return None
        acts = self.acts
        slopes = self.backprops[:, 0]
        factors = self.factors
        if index is not None:
            acts = acts[index]
            slopes = slopes[index]
            factors = None if factors is None else factors[index]
        if slopes.dtype is not torch.float32 or not native.suits(acts):
            return None
        factors = None if factors is None else factors.double().contiguous()
        return native.Linear(acts, slopes.contiguous(), factors).sum(limit, scale)

    def norms(self) -> Tensor:
        """Returns certified upper bounds |b| sqrt(weight |a|^2 + bias): (B,) float64."""
        if self.scale & (self.scale - 1) == 0:
            # PRIVACY: exact, and the same bits for every such number of rows; the norm of what is not multiplied yet
            # has an error of its own (test_means_over_powers_of_two_have_the_rows_of_a_sum)
            scaled = self.backprops if self.scale == 1 else self.backprops * self.scale
            norms = row_norms(scaled)
        else:
            # margin: that of a norm, once more (docs/proofs/rounding.md#certified-norms)
            norms = row_norms(self.backprops)
            norms.mul_(self.scale * (1.0 + NORM_ERROR[torch.float64]))
        if not self.weight:
            return norms
        if self.factors is None:
            self.factors = input_factors(self.acts, bias=self.bias)
        return norms.mul_(self.factors)

    def leaves_out(self, precision: Summation) -> bool:
        """Returns whether outer products are summed in C, or by a kernel, which do not read rows of weight 0."""
        return (
            precision.in_c
            and precision.matrix_tile > 0
            and self.backprops.shape[1] > 1
            and _has_kernel(self.acts)
            and _has_kernel(self.backprops)
        )

    def weighted_sum(self, weights: Tensor, precision: Summation) -> list[Tensor]:
        """Returns [(w b)^T a, (w b)^T 1] (the trained ones)."""
        if self.leaves_out(precision):
            outer = native.outer_sums if native.suits(self.acts) else act("rows.outer_sums")
            given = (weights * self.scale).double(), precision.matrix_tile
            matrix, vector = outer(self.backprops, self.acts, *given)
            return [matrix] * self.weight + [vector] * self.bias
        # float32 has few digits for a factor below 2^-126, but then the other one is below 2^64 (or squares overflow,
        # and the row is dropped), or a single number per record, of which float32 never sums enough
        several = self.backprops.shape[1] > 1
        tile = 0 if precision.in_c else precision.matrix_tile
        matrix32 = several and tile > 0 and self.acts.dtype != torch.float64
        dtype = torch.float32 if matrix32 else torch.float64
        scaled = self.backprops.to(dtype) * (weights * self.scale).to(dtype)[:, None]
        out = [self._weight_sum(scaled, precision)] if self.weight else []
        if self.bias:
            out.append(_column_sums(scaled, tile) if matrix32 else scaled.sum(dim=0))
        return out

    def _weight_sum(self, scaled: Tensor, precision: Summation) -> Tensor:
        if scaled.shape[1] == 1:  # one output: a matrix-vector product is several times faster
            return weighted_rows(self.acts, scaled[:, 0], precision)[None]
        if scaled.dtype == torch.float64:
            total = scaled.new_zeros(self.backprops.shape[1], self.acts.shape[1])
            for index, acts in float64_tiles(self.acts):
                total.addmm_(scaled[index].t(), acts)
            return total
        tile = precision.matrix_tile
        acts = self.acts.float()
        total = scaled[:tile].t() @ acts[:tile]
        for start in range(tile, len(acts), tile):
            # PRIVACY: not addmm_, which may add one product after another to the total: a chain of all rows
            # (test_the_sum_of_a_narrow_layer_moves_by_what_is_declared)
            total.add_(scaled[start : start + tile].t() @ acts[start : start + tile])
        return total

    def select(self, index: Tensor | slice) -> FactoredBlock:
        """Returns the block of some rows."""
        part = copy.copy(self)
        part.acts = self.acts[index]
        part.backprops = self.backprops[index]
        part.factors = None if self.factors is None else self.factors[index]
        return part

    def masked(self, kept: Tensor) -> FactoredBlock:
        """Returns the block with zeros for the rows that are not kept."""
        part = copy.copy(self)
        part.acts = _masked(self.acts, kept)
        part.backprops = _masked(self.backprops, kept)
        part.factors = None
        return part

    def dense(self) -> list[Tensor]:
        """Returns the rows per trained parameter."""
        backprops = self.backprops if self.scale == 1 else self.backprops * self.scale
        out = []
        if self.weight:
            out.append(torch.einsum("bo,bi->boi", backprops, self.acts.to(backprops.dtype)))
        if self.bias:
            out.append(backprops)
        return out


def _has_kernel(rows: Tensor) -> bool:
    """Returns whether rows are read in C, or by a kernel for their device."""
    return native.suits(rows) or bool(from_kernel("rows.suits", rows))


def _column_sums(rows: Tensor, tile: int) -> Tensor:
    """Returns the sum of float32 rows, with the chain of roundings of a product in tiles."""
    whole = len(rows) - len(rows) % tile
    total: Tensor = rows[:whole].view(-1, tile, rows.shape[1]).sum(1).sum(0)
    return total if whole == len(rows) else total.add_(rows[whole:].sum(0))


MAX_TIMES = 960  # times of a record, and pairs of a tile
_GRAM_ELEMENTS = 2**19  # numbers in the float64 tiles of a norm


def outer_sums(
    acts: Tensor, backprops: Tensor, scale: int = 1, out: Tensor | None = None
) -> Tensor:
    """Returns the rows scale * sum_t g_t a_t^T: (B, out, in), for (B, T, in) and (B, T, out)."""
    dtype = work_dtype(torch.promote_types(acts.dtype, backprops.dtype))
    unused = acts.new_empty(1, 1, 1, dtype=dtype)
    left = backprops.to(dtype).transpose(1, 2)
    right = acts.to(dtype)
    return torch.baddbmm(unused, left, right, beta=0, alpha=scale, out=out)


class SequenceBlock(Block):
    """Rows sum_t g_t a_t^T of one weight.

    Args:
        acts: (B, T, in) inputs, T <= 960, of at most float32.
        backprops: (B, T, out) gradients of the per-sample losses in the outputs.
        shape: of the weight, of out * in numbers.
    """

    def __init__(self, acts: Tensor, backprops: Tensor, shape: torch.Size) -> None:
        if acts.dim() != 3 or backprops.dim() != 3 or acts.shape[:2] != backprops.shape[:2]:
            raise ValueError(
                f"acts, backprops must be (B, T, in), (B, T, out) (got {acts.shape},"
                f" {backprops.shape})"
            )
        if acts.shape[1] > MAX_TIMES or torch.float64 in (acts.dtype, backprops.dtype):
            raise ValueError(
                f"sequences must be of at most {MAX_TIMES} pairs of at most float32"
            )
        self.acts = acts
        self.backprops = backprops
        self.shapes = [shape]

    def __len__(self) -> int:
        return self.acts.shape[0]

    def _tiles(self, records: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
        for start in range(0, len(self), records):
            index = slice(start, start + records)
            yield index, self.acts[index].double(), self.backprops[index].double()

    def norms(self) -> Tensor:
        """Returns certified upper bounds of the rows' norms, at least S / CANCELLATION: (B,) float64."""
        times = self.acts.shape[1]
        width = self.acts.shape[2]
        out = self.backprops.shape[2]
        slack = 2.0 * (out + width + 2 * times + 8) * 2.0**-53
        squares, terms = (self.acts.new_zeros(len(self), dtype=torch.float64) for _ in range(2))
        numbers = times * (2 * times + width + out)  # of a record
        for index, acts, backprops in self._tiles(max(1, _GRAM_ELEMENTS // max(numbers, 1))):
            gram = torch.bmm(backprops, backprops.transpose(1, 2))
            inputs = torch.bmm(acts, acts.transpose(1, 2))
            lengths = gram.diagonal(dim1=1, dim2=2) * inputs.diagonal(dim1=1, dim2=2)
            terms[index] = lengths.sqrt_().sum(1)
            squares[index] = gram.mul_(inputs).sum(2).sum(1)
        terms.mul_(1.0 + slack)
        # PRIVACY: what cancels in the Gram matrix may hide a row (test_a_gram_norm_without_its_error_is_below_the_row)
        bounds = squares.clamp_(min=0.0).addcmul_(terms, terms, value=slack).sqrt_()
        # PRIVACY: sums err by their terms, which must not pass the clip by more than that
        # (test_rows_that_cancel_too_far_are_clipped_by_their_terms)
        return torch.maximum(bounds, terms / CANCELLATION).mul_(1.0 + NORM_ERROR[torch.float32])

    def weighted_sum(self, weights: Tensor, precision: Summation) -> list[Tensor]:
        """Returns [sum_i weights[i] * row_i], in float64 whatever the precision asked for."""
        width = self.acts.shape[2]
        out = self.backprops.shape[2]
        total = self.acts.new_zeros(out, width, dtype=torch.float64)
        part = torch.empty_like(total)
        for index, acts, backprops in self._tiles(
            max(1, MAX_TIMES // max(self.acts.shape[1], 1))
        ):
            scaled = backprops.mul_(weights[index, None, None])
            # not addmm_: it adds the product in pieces, and a piece of a record may be larger than the record
            total.add_(torch.mm(scaled.flatten(0, 1).t(), acts.flatten(0, 1), out=part))
        return [total.view(self.shapes[0])]

    def select(self, index: Tensor | slice) -> SequenceBlock:
        """Returns the block of some rows."""
        return SequenceBlock(self.acts[index], self.backprops[index], self.shapes[0])

    def masked(self, kept: Tensor) -> SequenceBlock:
        """Returns the block with zeros for the rows that are not kept."""
        acts, backprops = (_masked(part, kept) for part in (self.acts, self.backprops))
        return SequenceBlock(acts, backprops, self.shapes[0])

    def dense(self) -> list[Tensor]:
        """Returns [rows]."""
        return [outer_sums(self.acts, self.backprops).view(len(self), *self.shapes[0])]
