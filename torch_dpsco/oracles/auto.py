"""Means of rows that are normalized instead of clipped: no threshold to choose.

    mean = ( sum_i g_i R / (|g_i| + gamma) + N(0, (z R)^2 I) ) / batch_size

| row | contribution |
|---|---|
| long | of norm just below R |
| of norm gamma | of norm R / 2 |
| zero, subnormal | itself times R / gamma |
| NaN, inf, or a norm that overflows | exactly 0 |

Every row is scaled, so that the bias does not vanish however large R is, and no moment bound gives a guarantee: a
baseline for deep nets. R and the learning rate are one number.

Proof: docs/proofs/heavy_tailed.md#normalized-rows. Source: Bu, Wang, Zha and Karypis 2023 (AUTO-S).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_dpsco import _validate as check
from torch_dpsco.oracles.clipped import ClippedMean


def auto_weights(norms: Tensor, bound: float, offset: float) -> Tensor:
    """Returns bound / (norm + offset), a little below it, and 0 for rows that must not count.

    Args:
        norms: (B,) float64 upper bounds of the rows' norms; NaN and inf mark rows to drop.
        bound: R > 0, which no row's contribution reaches.
        offset: gamma > 0.

    Returns:
        (B,) float64 >= 0; weight * norm < bound also after rounding.
    """
    # 8 eps covers the roundings here and in the product with the row, as in `clip_weights`
    scaled = (bound * (1.0 - 8 * torch.finfo(torch.float64).eps)) / (norms + offset)
    # PRIVACY: R / inf = 0 and NaN becomes 0 (test_auto_weights_drop_what_has_no_norm)
    return scaled.nan_to_num_(nan=0.0)


class AutoClip(ClippedMean):
    """Scales every row by R / (norm + gamma).

    Args:
        bound: R > 0, what a row's contribution stays below.
        noise_multiplier: z >= 0, noise std on the sum over R.
        batch_size: public divisor.
        offset: gamma, at least R / 2^40: rows much shorter than it stay short.

    Raises:
        ValueError: an argument is out of range.

    Guarantee: that of `ClippedMean` with clip R.

    Example:
        >>> from torch_dpsco.rows import DenseBlock, GradBatch
        >>> oracle = AutoClip(bound=1.0, noise_multiplier=0.0, batch_size=1, offset=5.0)
        >>> oracle.open([torch.zeros(2)])
        >>> oracle.observe(GradBatch([DenseBlock(torch.tensor([[3.0, 4.0]]))]))
        >>> [round(v, 3) for v in oracle.release(torch.Generator()).mean[0].tolist()]
        [0.3, 0.4]
    """

    def __init__(self, bound: float, noise_multiplier: float, batch_size: int, offset: float = 0.01) -> None:
        super().__init__(noise_multiplier, batch_size)
        self.fixed_clip, self.offset = check.positive(bound=bound), check.positive(offset=offset)
        if self.fixed_clip > self.offset * 2.0**40:
            # PRIVACY: weights above 2^40 would lift float32's underflow (test_a_tiny_offset_is_refused)
            raise ValueError(f"offset must be >= bound / 2^40 (got {self.offset:g} for bound {self.fixed_clip:g})")

    def bound(self, query: Sequence[Tensor]) -> float:
        """Returns R."""
        return self.fixed_clip

    def weights(self, norms: Tensor, clip: float) -> Tensor:
        """Returns the factor of each row: (B,)."""
        # PRIVACY: every row is scaled below R (test_no_row_moves_the_mean_further_than_declared)
        return auto_weights(norms, clip, self.offset)

    def settings(self) -> dict[str, Any]:
        """Returns the fixed numbers."""
        return {
            "oracle": "AutoClip",
            "clip": self.fixed_clip,
            "offset": self.offset,
            "noise_multiplier": self.noise_multiplier,
        }
