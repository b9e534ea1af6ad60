"""Factored rows: a Linear layer's per-sample gradient is the outer product of two vectors, so it is never formed.

For y = W a + c the gradient of sample i is b_i a_i^T for W and b_i for the bias, with a_i the layer's input and b_i the
gradient of the loss in its output. Norm: |b| sqrt(|a|^2 + 1); weighted sum: (w b)^T a: memory O(B (in + out)).

Source: docs/proofs/rounding.md#norms-of-factors, docs/proofs/rounding.md#factors-of-one-score.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torch_dpsco.gradbatch.base import NORM_ERROR, PIECE, Block, Summation, float64_tiles, row_norms, weighted_rows


class LinearRows(NamedTuple):
    """Rows slope_i (x_i, 1) of a linear model with one output.

    Args:
        features: (B, d) x_i.
        slopes: (B,) derivatives of the losses in the score.
        factors: (B,) upper bounds of |(x_i, 1)|, see `linear_factors`.
        extended: whether the features are (x_i, 1), (B, d + 1).
    """

    features: Tensor
    slopes: Tensor
    factors: Tensor
    extended: bool = False

    @property
    def n_rows(self) -> int:
        """Number of rows; len() is that of the tuple."""
        return self.slopes.shape[0]

    @property
    def passes(self) -> int:
        """Number of backward passes that they come from."""
        return 1

    def block(self) -> FactoredBlock:
        """Returns the same rows as a block."""
        features = self.features[:, :-1] if self.extended else self.features
        return FactoredBlock(features, self.slopes.unsqueeze(1), factors=self.factors.double())

    def select(self, index: Tensor) -> LinearRows:
        """Returns some of the rows."""
        return LinearRows(self.features[index], self.slopes[index], self.factors[index], self.extended)


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
    """Returns upper bounds of |(a, 1)|: of float64 inputs those of `input_factors`, else float32 ones.

    The latter are larger by 7 * 2^-23 at least: room for 14 roundings of a row's norm and clip weight. Their squares do
    not overflow, so that quotients by them do not underflow; single inputs may be larger, and have float64 ones.
    """
    if acts.dtype == torch.float64 or acts.shape[1] == 1:
        # PRIVACY: (test_rows_of_one_huge_feature_are_clipped)
        return input_factors(acts, bias=True)
    if acts.dtype != torch.float32 or acts.shape[1] > PIECE:
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
            raise ValueError(f"acts and backprops must be (B, in) and (B, out) (got {acts.shape}, {backprops.shape})")
        self.acts, self.backprops, self.weight, self.bias, self.factors = acts, backprops, weight, bias, factors
        self.scale = scale

    @property
    def shapes(self) -> list[torch.Size]:
        """Shapes of the trained ones of weight and bias."""
        out, width = self.backprops.shape[1], self.acts.shape[1]
        return [torch.Size([out, width])] * self.weight + [torch.Size([out])] * self.bias

    def __len__(self) -> int:
        return self.acts.shape[0]

    def linear(self) -> LinearRows | None:
        """Returns the rows as those of one output, None if there are several, or not both of weight and bias."""
        if not (self.weight and self.bias) or self.backprops.shape[1] != 1 or self.scale != 1:
            return None
        factors = linear_factors(self.acts) if self.factors is None else self.factors
        return LinearRows(self.acts, self.backprops[:, 0], factors)

    def norms(self) -> Tensor:
        """Returns certified upper bounds |b| sqrt(weight |a|^2 + bias): (B,) float64."""
        norms = row_norms(self.backprops)
        if self.scale != 1:
            # PRIVACY: rounded up (test_norms_of_scaled_factors_are_never_below_the_exact_norm)
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
        matrix32 = self.backprops.shape[1] > 1 and precision.matrix_tile and self.acts.dtype != torch.float64
        dtype = torch.float32 if matrix32 else torch.float64
        scaled = self.backprops.to(dtype) * (weights * self.scale).to(dtype)[:, None]
        out = []
        if self.weight:
            out.append(self._weight_sum(scaled, precision))
        if self.bias:
            out.append(_column_sums(scaled, precision.matrix_tile) if matrix32 else scaled.sum(dim=0))
        return out

    def _weight_sum(self, scaled: Tensor, precision: Summation) -> Tensor:
        if scaled.shape[1] == 1:  # one output: a matrix-vector product is several times faster
            return weighted_rows(self.acts, scaled[:, 0], precision)[None]
        if scaled.dtype == torch.float64:
            total = scaled.new_zeros(self.backprops.shape[1], self.acts.shape[1])
            for index, acts in float64_tiles(self.acts):
                total.addmm_(scaled[index].t(), acts)
            return total
        tile, acts = precision.matrix_tile, self.acts.float()
        total = scaled[:tile].t() @ acts[:tile]
        for start in range(tile, len(acts), tile):
            # PRIVACY: not addmm_, which may add one product after another to the total: a chain of all rows
            # (test_the_sum_of_a_narrow_layer_moves_by_what_is_declared)
            total.add_(scaled[start : start + tile].t() @ acts[start : start + tile])
        return total

    def select(self, index: Tensor) -> FactoredBlock:
        """Returns the block of some rows."""
        factors = None if self.factors is None else self.factors[index]
        return FactoredBlock(
            self.acts[index],
            self.backprops[index],
            weight=self.weight,
            bias=self.bias,
            factors=factors,
            scale=self.scale,
        )

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
