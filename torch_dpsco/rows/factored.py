"""Rows of Linear layers that are never formed: outer products of vectors, or of sequences.

Factored rows: a Linear layer's per-sample gradient is the outer product of two vectors, so it is never formed.

For y = W a + c the gradient of sample i is b_i a_i^T for W and b_i for the bias, with a_i the layer's input and b_i the
gradient of the loss in its output. Norm: |b| sqrt(|a|^2 + 1); weighted sum: (w b)^T a: memory O(B (in + out)).

Source: docs/proofs/rounding.md#norms-of-factors, docs/proofs/rounding.md#factors-of-one-score.

Rows of a layer on sequences that are left as their two factors: norms by Gram matrices, in float64.

The row of a record is R = sum_t g_t a_t^T, with g_t in R^out and a_t in R^in of float32 or less. With u = 2^-53 and
S = sum_t |g_t| |a_t|, which is at least |R| and much larger where terms cancel:

* norm. |R|^2 = sum_st (g_s.g_t)(a_s.a_t). To first order the product of the two inner products errs in float64 by at
  most (out + in + 1) u |g_s||g_t||a_s||a_t|, their sum over t and then over s by 2 T u of the same, so the computed
  square by at most K u S^2 with K = out + in + 2 T + 8. (Nothing underflows: products of four float32 numbers that are
  not 0 are above 2^-600.) The certified norm is sqrt(square + 2 K u S^2); S is from the diagonals, which do not cancel.
* weighted sum. Its terms w_i |g_it| |a_it| add up to w_i S_i, not to w_i |R_i|. So `norms` is at least
  S / CANCELLATION; then w_i norm_i <= C gives w_i S_i <= CANCELLATION * C. In float64 tiles of r whole records,
  r T <= 960, each product is off by (r T + 3) u times its terms, and adding the tiles by m / r roundings of sums whose
  terms are at most w_i |R_i| <= C. In all u m C (963 CANCELLATION + m + 1) for m rows, half of what `plan_summation`
  reserves for float64.

A row that cancels by more than CANCELLATION = 1024 is noise of the float32 backward at any rate; it is clipped harder,
never less.

Source: docs/proofs/rounding.md#gram-norms, docs/proofs/rounding.md#sums-of-factors.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import Tensor

from torch_dpsco import native
from torch_dpsco.rows.base import (
    CANCELLATION,
    NORM_ERROR,
    PIECE,
    Block,
    Summation,
    float64_tiles,
    row_norms,
    weighted_rows,
    work_dtype,
)


def input_factors(acts: Tensor, *, bias: bool) -> Tensor:
    """Returns certified upper bounds of sqrt(|a|^2 + bias): the input's factor of the norm of a row; (B,) float64."""
    norms = row_norms(acts)
    if bias:
        norms = norms.square_().add_(1.0).sqrt_()
    # the roundings here, and in the product of the factors, are far inside the slack of the norms of several numbers;
    # PRIVACY: but next to the 1 of a bias that slack may vanish
    # (test_factored_norms_are_never_below_the_exact_norm)
    return norms if acts.shape[1] > 1 and not bias else norms.mul_(1.0 + NORM_ERROR[torch.float64])


def linear_factors(acts: Tensor) -> Tensor:
    """Returns upper bounds of |(a, 1)|: of float64 inputs, and in C, those of `input_factors`, else float32 ones.

    The latter are larger by 7 * 2^-23 at least: room for 14 roundings of a row's norm and clip weight. Their squares do
    not overflow, so that quotients by them do not underflow; single inputs may be larger, and have float64 ones.
    """
    if acts.dtype == torch.float64 or acts.shape[1] == 1 or native.suits(acts):
        # PRIVACY: (test_linear_factors_are_never_below_the_exact_norm, test_rows_of_one_huge_feature_are_clipped)
        return input_factors(acts, bias=True)
    if acts.dtype != torch.float32 or acts.shape[1] > PIECE:
        # PRIVACY: for the roundings of a norm and a clip weight (test_single_factors_have_room_for_fourteen_roundings)
        return (input_factors(acts, bias=True) * (1.0 + 2.0**-19)).float().square_().sqrt_()
    # a norm n of float32 errs by e = 513 u < 3.1e-5 of it, and hides h < 2^-58: (n (1 + e) + h)^2 + 1 is at most
    # (n^2 + 1)(1 + e)^2 (1 + 2^-50). NORM_ERROR is 2e, so that e is left: more than enough
    squares = torch.linalg.vector_norm(acts, dim=1).square_()
    # PRIVACY: (test_linear_factors_are_never_below_the_exact_norm)
    bounds: Tensor = squares.add_(1.0).sqrt_().mul_(1.0 + NORM_ERROR[torch.float32])
    return bounds


class FactoredBlock(Block):
    """Rows of the weight (and bias) of one Linear layer that was used once on 2-D input.

    Args:
        acts: (B, in) inputs of the layer.
        backprops: (B, out) gradients of the per-sample losses in its output.
        weight: whether the weight is trained.
        bias: whether there is a bias that is trained.
        factors: (B,) float64 upper bounds of sqrt(weight |a|^2 + bias) by `input_factors`, where they are known.
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

    def linear(self) -> LinearBlock | None:
        """Returns the rows as those of one output, None if there are several, or not both of weight and bias."""
        if not (self.weight and self.bias) or self.backprops.shape[1] != 1 or self.scale != 1:
            return None
        return LinearBlock(self.acts, self.backprops[:, 0], self.factors)

    def norms(self) -> Tensor:
        """Returns certified upper bounds |b| sqrt(weight |a|^2 + bias): (B,) float64."""
        norms = row_norms(self.backprops)
        if self.scale != 1:
            # margin: that of a norm, once more (docs/proofs/rounding.md#certified-norms)
            norms.mul_(self.scale * (1.0 + NORM_ERROR[torch.float64]))
        return norms.mul_(self._factors()) if self.weight else norms

    def _factors(self) -> Tensor:
        if self.factors is None:
            self.factors = input_factors(self.acts, bias=self.bias)
        return self.factors

    def weighted_sum(self, weights: Tensor, precision: Summation) -> list[Tensor]:
        """Returns [(w b)^T a, (w b)^T 1] (the trained ones)."""
        # float32 has few digits for a factor below 2^-126, but then the other one is below 2^64 (or squares overflow,
        # and the row is dropped), or a single number per record, of which float32 never sums enough
        matrix32 = (
            self.backprops.shape[1] > 1
            and precision.matrix_tile
            and self.acts.dtype != torch.float64
        )
        if matrix32 and precision.in_c:
            if native.suits(self.acts) and native.suits(self.backprops):
                weights = (weights * self.scale).double()
                both = native.outer_sums(self.backprops, self.acts, weights, precision.matrix_tile)
                return [
                    total
                    for total, trained in zip(both, (self.weight, self.bias), strict=True)
                    if trained
                ]
            matrix32 = False
        dtype = torch.float32 if matrix32 else torch.float64
        scaled = self.backprops.to(dtype) * (weights * self.scale).to(dtype)[:, None]
        out = []
        if self.weight:
            out.append(self._weight_sum(scaled, precision))
        if self.bias:
            out.append(
                _column_sums(scaled, precision.matrix_tile) if matrix32 else scaled.sum(dim=0)
            )
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

    def select(self, index: Tensor) -> FactoredBlock:
        """Returns the block of some rows."""
        part = copy.copy(self)
        part.acts = self.acts[index]
        part.backprops = self.backprops[index]
        part.factors = None if self.factors is None else self.factors[index]
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


def _column_sums(rows: Tensor, tile: int) -> Tensor:
    """Returns the sum of float32 rows, with the chain of roundings of a product in tiles."""
    whole = len(rows) - len(rows) % tile
    total: Tensor = rows[:whole].view(-1, tile, rows.shape[1]).sum(1).sum(0)
    return total if whole == len(rows) else total.add_(rows[whole:].sum(0))


MAX_TIMES = 960  # times of a record, and pairs of a tile
_TILE_ELEMENTS = 2**19  # numbers in the float64 tiles of a norm


def outer_sums(
    acts: Tensor, backprops: Tensor, scale: int = 1, out: Tensor | None = None
) -> Tensor:
    """Returns the rows scale * sum_t g_t a_t^T: (B, out, in), for (B, T, in) and (B, T, out)."""
    dtype = work_dtype(torch.promote_types(acts.dtype, backprops.dtype))
    unused = acts.new_empty(1, 1, 1, dtype=dtype)
    left = backprops.to(dtype).transpose(1, 2)
    right = acts.to(dtype)
    return torch.baddbmm(unused, left, right, beta=0, alpha=scale, out=out)


class LinearBlock(Block):
    """Rows slope_i (x_i, 1) of a linear model with one output.

    Args:
        features: (B, d) x_i.
        slopes: (B,) derivatives of the losses in the score.
        factors: (B,) upper bounds of |(x_i, 1)|, see `linear_factors`; None computes them.
        extended: whether the features are (x_i, 1), (B, d + 1).
    """

    def __init__(
        self, features: Tensor, slopes: Tensor, factors: Tensor | None, extended: bool = False
    ) -> None:
        self.features = features
        self.slopes = slopes
        self._factors = factors
        self.extended = extended
        self.shapes = [torch.Size([1, features.shape[1] - extended]), torch.Size([1])]

    def __len__(self) -> int:
        return self.slopes.shape[0]

    @property
    def factors(self) -> Tensor:
        """(B,) upper bounds of |(x_i, 1)|."""
        if self._factors is None:
            self._factors = linear_factors(self.features)
        return self._factors

    def linear(self) -> LinearBlock:
        """Returns itself."""
        return self

    def clipped_sum(self, limit: float, scale: float) -> Tensor | None:
        """Returns the sum of the rows, each cut to a length of at most `limit`, times scale, if it is formed in C.

        Rows without a finite length, or with a factor of 2^64 or more, count for nothing.

        Returns:
            (d + 1,) float64, or None where the accelerator is missing, or does not suit.
        """
        if (
            self.extended
            or self.slopes.dtype is not torch.float32
            or not native.suits(self.features)
        ):
            return None
        factors = None if self._factors is None else self._factors.double().contiguous()
        total = torch.zeros(self.features.shape[1] + 1, dtype=torch.float64)
        return native.add_linear(
            self.features, self.slopes.contiguous(), factors, total, limit=limit, scale=scale
        )

    def norms(self) -> Tensor:
        """Returns certified upper bounds |s| |(x, 1)|: (B,) float64."""
        return self._factored().norms()

    def weighted_sum(self, weights: Tensor, precision: Summation) -> list[Tensor]:
        """Returns the weighted sums for weight and bias."""
        return self._factored().weighted_sum(weights, precision)

    def select(self, index: Tensor) -> LinearBlock:
        """Returns some of the rows."""
        factors = None if self._factors is None else self._factors[index]
        return LinearBlock(self.features[index], self.slopes[index], factors, self.extended)

    def dense(self) -> list[Tensor]:
        """Returns the rows of weight and bias."""
        return self._factored().dense()

    def _factored(self) -> FactoredBlock:
        features = self.features[:, :-1] if self.extended else self.features
        return FactoredBlock(features, self.slopes.unsqueeze(1), factors=self.factors.double())


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
            raise ValueError(f"sequences must be of at most {MAX_TIMES} pairs of at most float32")
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
        for index, acts, backprops in self._tiles(
            max(1, _TILE_ELEMENTS // max(times * (2 * times + width + out), 1))
        ):
            gram = torch.bmm(backprops, backprops.transpose(1, 2))
            inputs = torch.bmm(acts, acts.transpose(1, 2))
            terms[index] = (
                (gram.diagonal(dim1=1, dim2=2) * inputs.diagonal(dim1=1, dim2=2)).sqrt_().sum(1)
            )
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
        for index, acts, backprops in self._tiles(max(1, MAX_TIMES // max(self.acts.shape[1], 1))):
            scaled = backprops.mul_(weights[index, None, None])
            # not addmm_: it adds the product in pieces, and a piece of a record may be larger than the record
            total.add_(torch.mm(scaled.flatten(0, 1).t(), acts.flatten(0, 1), out=part))
        return [total.view(self.shapes[0])]

    def select(self, index: Tensor) -> SequenceBlock:
        """Returns the block of some rows."""
        return SequenceBlock(self.acts[index], self.backprops[index], self.shapes[0])

    def dense(self) -> list[Tensor]:
        """Returns [rows]."""
        return [outer_sums(self.acts, self.backprops).view(len(self), *self.shapes[0])]
