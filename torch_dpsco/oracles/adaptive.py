"""Means of rows without a threshold to choose: `AdaptiveClipped` adapts it by private counts, `AutoClip` has none.

AdaptiveClipped clips at a threshold that follows a quantile of the gradient norms, by a private count in every step.

    mean_t = ( sum_i g_i min(1, C_t / |g_i|) + N(0, (z C_t)^2 I) ) / batch_size
    votes_t = sum_i v_i + N(0, s_b^2),    v_i = [|g_i| <= C_t] - q,    C_{t+1} = C_t exp(-lr votes_t / batch_size)

C_t is a function of releases before step t. The votes add up to 0 in the mean where C_t is the q-quantile.

| row | clipped | vote |
|---|---|---|
| norm <= 7/8 C | unchanged | 1 - q |
| between 7/8 and 9/8 C | min(1, C / norm) | linear in the norm |
| norm >= 9/8 C | to C | -q |
| NaN, inf, or a norm that overflows | exactly 0 | -q |
| null: norm <= 2^-44 sqrt(dim) | unchanged | 0 (linear up to twice that) |

Why one event covers all adjacencies. Take the mean in units of z C_t and the votes in units of s_b: then noise is
N(0, I), and a row's part of the joint vector has norm at most m = sqrt(1/z^2 + (u/s_b)^2), u = max(q, 1 - q). A record
added or removed moves the sum by at most m; so does one zeroed, since a null row's part is 0 (its gradient up to
rounding, its vote exactly); a replaced one by at most 2 m. That is a sum of rows clipped at 1 with noise multiplier
z_eff = 1/m, sampled or not, and z_eff is the same in all steps.

Differs from the paper in: 1. votes are centered at q, not at 1/2, which is the same for q = 1/2, where z_eff =
(z^-2 + (2 s_b)^-2)^(-1/2); null rows and empty batches then leave C_t where it is, so that a loss with many zero
gradients (hinge) does not drive it to infinity, and q is the quantile among the other rows; 2. votes are continuous in
the norm: a mean loss rounds 1/B, so that one record more moves all norms a little, and a step function would let rows
at the threshold change sides together; what is left of that is part of the votes' sensitivity, as far as the proof
goes; 3. C_t stays within 2^-30 and 2^39.

Proof: docs/proofs/heavy_tailed.md#adaptive-clip. Source: Andrew, Thakkar, McMahan and Ramaswamy 2021.

AutoClip normalizes rows.

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

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_dpsco import _validate as check
from torch_dpsco.accounting.analysis.rounding import exact_grid, with_grid
from torch_dpsco.accounting.events import CLIP_UNITS, Adjacency, clipped_gaussian
from torch_dpsco.clip_selection import adaptive_clip_update
from torch_dpsco.errors import InfeasibleError, UtilityWarning
from torch_dpsco.mechanisms.vector_noise import release_on_grid
from torch_dpsco.noise import normal
from torch_dpsco.oracles.base import Release, clip_weights
from torch_dpsco.oracles.clipped import ClippedMean
from torch_dpsco.rng import Source
from torch_dpsco.rows import GradBatch

_RAMP = 0.25  # width of the ramp around the clip, in units of the clip
_NULL = (
    2.0**-44
)  # largest norm of a null row, over sqrt(dim); a zero row's certified bound is 2^-63
_MOST_NOISE = 2.0**256  # of the count: far from where its sum is no number
_LEAST, _LARGEST = 2.0**-30, 2.0**39  # of clips; float32 sums are proved between 2^-40 and 2^40


def votes(norms: Tensor, clip: float, target: float, null: float) -> Tensor:
    """Returns how much each row speaks for a smaller clip: (B,) float64 in [-target, 1 - target].

    Args:
        norms: (B,) float64 upper bounds of the rows' norms; NaN and inf count as above the clip.
        clip: threshold > 0.
        target: q in (0, 1).
        null: norm up to which a row counts as null, > 0; its vote is 0.
    """
    # PRIVACY: NaN would pass both clamps (test_a_row_without_a_norm_votes_as_a_long_one)
    lengths = norms.nan_to_num(nan=math.inf, posinf=math.inf)
    below = ((1.0 + _RAMP / 2 - lengths / clip) / _RAMP).clamp_(0.0, 1.0)
    # PRIVACY: 0 for null rows, else zero_out would cost more (test_a_null_row_has_no_vote)
    return (below - target).mul_((lengths / null - 1.0).clamp_(0.0, 1.0))


class AdaptiveClipped(ClippedMean):
    """Clips at a threshold that moves towards the `target`-quantile of the norms of rows that are not null.

    Args:
        clip0: first threshold, public, in [2^-30, 2^39].
        noise_multiplier: z >= 0 of the mean, noise std on the sum over the clip; None if the total is given.
        batch_size: public divisor, expected batch size.
        target: q in (0, 1); 1/2 for deep nets.
        lr: > 0, of the logarithm of the threshold.
        first: >= 0; in step t = 0, 1, ... lr is at least first/(t + 1), for a start that may be far off.
        count_noise: s_b in [0, 2^256], noise std of the votes; 0 gives no privacy. Default batch_size / 20.
        total_noise_multiplier: z_eff >= 0 of a whole step, mean and votes together; `noise_multiplier` follows.

    Raises:
        InfeasibleError: the votes alone cost (almost) more than the total; names the least count_noise.
        ValueError: an argument is out of range, or both or none of the noise multipliers are given.

    Guarantee:
        Unit: one row per record. Event per step: Gaussian in clip units with multiplier z_eff (see the module). Assumes
        that a record's row does not depend on other records, except for the rounding of a mean loss.

    Example:
        >>> from torch_dpsco.rows import DenseBlock
        >>> oracle = AdaptiveClipped(1.0, 1.0, batch_size=100, target=0.5)
        >>> round(oracle.event().sigma, 4)
        0.995
        >>> oracle.open([torch.zeros(1)])
        >>> oracle.observe(GradBatch([DenseBlock(torch.full((100, 1), 5.0))]))
        >>> _ = oracle.release(torch.Generator().manual_seed(0))
        >>> oracle.clip, oracle.state()["clip"] > 1.0
        (1.0, True)
    """

    def __init__(
        self,
        clip0: float,
        noise_multiplier: float | None,
        batch_size: int,
        target: float = 0.5,
        *,
        lr: float = 0.2,
        first: float = 0.0,
        count_noise: float | None = None,
        total_noise_multiplier: float | None = None,
    ) -> None:
        if (noise_multiplier is None) == (total_noise_multiplier is None):
            raise ValueError(
                "noise_multiplier or total_noise_multiplier must be given, and not both (got"
                f" {noise_multiplier} and {total_noise_multiplier})"
            )
        self.target = check.open_interval(0.0, 1.0, target=target)
        self.clip0 = check.between(_LEAST, _LARGEST, clip0=clip0)
        self.lr = check.positive(lr=lr)
        self.first = check.nonnegative(first=first)
        self._step = 0
        size = check.positive_count(batch_size=batch_size)
        self.count_noise = check.between(
            0.0, _MOST_NOISE, count_noise=size / 20 if count_noise is None else count_noise
        )
        self._unit = max(self.target, 1.0 - self.target)
        z, total = self._multipliers(noise_multiplier, total_noise_multiplier)
        super().__init__(z, size)
        self._event = clipped_gaussian(total)
        if z > self.count_noise / self._unit > 0:
            warnings.warn(
                f"the votes take more of the budget than the mean (count_noise {self.count_noise:g}"
                f" for a noise multiplier of {z:.3g}): give a larger count_noise or batch_size",
                UtilityWarning,
                stacklevel=2,
            )
        # 4.5 = slope of the votes in log(norm), 4 u = rounding of 1/B, in at most 2 batch_size + 1024 rows (see
        # `plan_summation`, also for the largest batch); then the roundings of the sum itself
        self._count_error = (
            4.5 * 4 * 2.0**-24 * (2 * size + 1024) + 4 * (2 * size + 65536) ** 2 * 2.0**-53
        )
        self._current = self.clip0
        self._sum = 0.0
        self._pending = 0.0
        self._null = 0.0
        self._unscaled = 1.0

    def _multipliers(self, z: float | None, total: float | None) -> tuple[float, float]:
        """Returns the noise multipliers of the mean and of the joint release, rounded towards privacy."""
        if total is None:
            z = check.nonnegative(noise_multiplier=z)
            if 0.0 in (z, self.count_noise):
                return z, 0.0
            # PRIVACY: both releases in one number, rounded down (test_the_event_is_that_of_mean_and_votes_together)
            return z, (1.0 - 2.0**-50) / math.hypot(1.0 / z, self._unit / self.count_noise)
        total = check.nonnegative(total_noise_multiplier=total)
        if total == 0:
            return 0.0, 0.0
        if total * self._unit > 0.99 * self.count_noise:
            raise InfeasibleError(
                f"count_noise must be >= {total * self._unit / 0.99:.4g} for a"
                f" total_noise_multiplier of {total:g} (got {self.count_noise:g})"
            )
        share = total * self._unit / self.count_noise
        # 2^-40 exceeds the rounding, of relative size below 2^-45 as the share is at most 0.99
        return total / math.sqrt((1.0 - share) * (1.0 + share)) * (1.0 + 2.0**-40), total

    def bound(self, query: Sequence[Tensor]) -> float:
        """Returns the threshold that releases so far have led to."""
        return self._current

    def count_sensitivity(self, adjacency: Adjacency) -> float:
        """Returns how far the sum of votes can move: u per row, and rounding."""
        return CLIP_UNITS[adjacency] * with_grid(self._unit + self._count_error, self._exact)

    def use_exact_noise(self) -> None:
        """Draws the noise of means and votes in integers; see `MeanOracle.use_exact_noise`."""
        super().use_exact_noise()
        exact_grid(self.count_noise / self._unit, 1.0, 1)  # raises before anything is charged

    def open(self, query: Sequence[Tensor], step: int = 0) -> None:
        """Fixes the threshold of the batch and forgets an unfinished one."""
        super().open(query, step)
        self._step = step
        self._null = _NULL * math.sqrt(max(1, sum(shape.numel() for shape in self._shapes)))

    def weights(self, norms: Tensor, clip: float) -> Tensor:
        """Returns the clip's factors, and keeps the votes of the same rows for `observe`."""
        self._pending = float(votes(norms, clip, self.target, self._null * self._unscaled).sum())
        return clip_weights(norms, clip)

    def observe(self, rows: GradBatch, users: Tensor | None = None) -> None:
        """Clips rows and adds them to the mean, and their votes to the count."""
        self._unscaled = max(
            1.0, rows._scale
        )  # of gradient scaling, which multiplies the bound of a zero row
        super().observe(rows, users)
        # PRIVACY: after it, so that rows that were refused have no vote (test_refused_rows_have_no_vote)
        self._sum += self._pending

    def discard(self) -> None:
        """Forgets the rows and votes since open."""
        super().discard()
        self._sum = 0.0

    def release(self, generator: Source) -> Release:
        """Releases the mean, and moves the threshold of the next batch by a noisy count."""
        total = self._sum
        answer = super().release(generator)  # ends the batch
        # PRIVACY: scaled to the sensitivity, rounding included (test_the_votes_have_their_noise)
        std = self.count_noise / self._unit * self.count_sensitivity("zero_out")
        if self._exact:
            votes_grid = exact_grid(std, self.count_sensitivity("zero_out"), 1)
            total = float(
                release_on_grid(torch.tensor([total], dtype=torch.float64), votes_grid, generator)
            )
        else:
            total += normal(std, generator)
        fraction = self.target + total / self.batch_size
        rate = max(self.lr, self.first / (self._step + 1))
        moved = adaptive_clip_update(self.clip, fraction, self.target, rate)
        self._current = min(max(moved, _LEAST), _LARGEST)
        return answer

    def state(self) -> dict[str, float]:
        """Returns the threshold of the next batch: public."""
        return {"clip": self._current}

    def restore(self, state: Mapping[str, float]) -> None:
        """Goes on from a saved threshold; drops an open batch."""
        self.discard()
        self._current = check.between(_LEAST, _LARGEST, clip=state["clip"])

    def settings(self) -> dict[str, Any]:
        """Returns the fixed numbers."""
        first = {"first": self.first} if self.first else {}
        return self._named(
            "clip0", "noise_multiplier", "target", "count_noise", clip_lr=self.lr, **first
        )


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

    def __init__(
        self, bound: float, noise_multiplier: float, batch_size: int, offset: float = 0.01
    ) -> None:
        super().__init__(noise_multiplier, batch_size)
        self.fixed_clip = check.positive(bound=bound)
        self.offset = check.positive(offset=offset)
        if self.fixed_clip > self.offset * 2.0**40:
            # PRIVACY: weights above 2^40 would lift float32's underflow (test_a_tiny_offset_is_refused)
            raise ValueError(
                f"offset must be >= bound / 2^40 (got {self.offset:g} for bound"
                f" {self.fixed_clip:g})"
            )

    def bound(self, query: Sequence[Tensor]) -> float:
        """Returns R."""
        return self.fixed_clip

    def weights(self, norms: Tensor, clip: float) -> Tensor:
        """Returns the factor of each row: (B,)."""
        # PRIVACY: every row is scaled below R (test_no_row_moves_the_mean_further_than_declared)
        return auto_weights(norms, clip, self.offset)

    def settings(self) -> dict[str, Any]:
        """Returns the fixed numbers."""
        return self._named("offset", "noise_multiplier", clip=self.fixed_clip)
