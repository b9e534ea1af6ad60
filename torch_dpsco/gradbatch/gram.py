"""Rows of a layer on sequences that are left as their two factors: norms by Gram matrices, in float64.

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

from collections.abc import Iterator

import torch
from torch import Tensor

from torch_dpsco.gradbatch.base import CANCELLATION, NORM_ERROR, Block, Summation, work_dtype

MAX_TIMES = 960  # times of a record, and pairs of a tile
_TILE_ELEMENTS = 2**19  # numbers in the float64 tiles of a norm


def outer_sums(acts: Tensor, backprops: Tensor, scale: int = 1, out: Tensor | None = None) -> Tensor:
    """Returns the rows scale * sum_t g_t a_t^T: (B, out, in), for (B, T, in) and (B, T, out)."""
    dtype = work_dtype(torch.promote_types(acts.dtype, backprops.dtype))
    unused = acts.new_empty(1, 1, 1, dtype=dtype)
    left, right = backprops.to(dtype).transpose(1, 2), acts.to(dtype)
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
            raise ValueError(f"acts, backprops must be (B, T, in), (B, T, out) (got {acts.shape}, {backprops.shape})")
        if acts.shape[1] > MAX_TIMES or torch.float64 in (acts.dtype, backprops.dtype):
            raise ValueError(f"sequences must be of at most {MAX_TIMES} pairs of at most float32")
        self.acts, self.backprops, self._shape = acts, backprops, shape

    @property
    def shapes(self) -> list[torch.Size]:
        """Shape of the weight."""
        return [self._shape]

    def __len__(self) -> int:
        return self.acts.shape[0]

    def _tiles(self, records: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
        for start in range(0, len(self), records):
            index = slice(start, start + records)
            yield index, self.acts[index].double(), self.backprops[index].double()

    def norms(self) -> Tensor:
        """Returns certified upper bounds of the rows' norms, at least S / CANCELLATION: (B,) float64."""
        times, width, out = self.acts.shape[1], self.acts.shape[2], self.backprops.shape[2]
        slack = 2.0 * (out + width + 2 * times + 8) * 2.0**-53
        squares, terms = (self.acts.new_zeros(len(self), dtype=torch.float64) for _ in range(2))
        for index, acts, backprops in self._tiles(max(1, _TILE_ELEMENTS // max(times * (2 * times + width + out), 1))):
            gram = torch.bmm(backprops, backprops.transpose(1, 2))
            inputs = torch.bmm(acts, acts.transpose(1, 2))
            terms[index] = (gram.diagonal(dim1=1, dim2=2) * inputs.diagonal(dim1=1, dim2=2)).sqrt_().sum(1)
            squares[index] = gram.mul_(inputs).sum(2).sum(1)
        terms.mul_(1.0 + slack)
        # PRIVACY: what cancels in the Gram matrix may hide a row (test_a_gram_norm_without_its_error_is_below_the_row)
        bounds = squares.clamp_(min=0.0).addcmul_(terms, terms, value=slack).sqrt_()
        # PRIVACY: sums err by their terms, which must not pass the clip by more than that
        # (test_rows_that_cancel_too_far_are_clipped_by_their_terms)
        return torch.maximum(bounds, terms / CANCELLATION).mul_(1.0 + NORM_ERROR[torch.float32])

    def weighted_sum(self, weights: Tensor, precision: Summation) -> list[Tensor]:
        """Returns [sum_i weights[i] * row_i], in float64 whatever the precision asked for."""
        width, out = self.acts.shape[2], self.backprops.shape[2]
        total = self.acts.new_zeros(out, width, dtype=torch.float64)
        part = torch.empty_like(total)
        for index, acts, backprops in self._tiles(max(1, MAX_TIMES // max(self.acts.shape[1], 1))):
            scaled = backprops.mul_(weights[index, None, None])
            # not addmm_: it adds the product in pieces, and a piece of a record may be larger than the record
            total.add_(torch.mm(scaled.flatten(0, 1).t(), acts.flatten(0, 1), out=part))
        return [total.view(self._shape)]

    def select(self, index: Tensor) -> SequenceBlock:
        """Returns the block of some rows."""
        return SequenceBlock(self.acts[index], self.backprops[index], self._shape)

    def dense(self) -> list[Tensor]:
        """Returns [rows]."""
        return [outer_sums(self.acts, self.backprops).view(len(self), *self._shape)]
