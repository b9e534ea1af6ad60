"""A pilot that chooses the clip: a noisy quantile of the norms of a group, and the clipped means that follow it.

How to choose a clip threshold without guessing it, and what that costs.

The bias of clipping at C is at most E(|g| - C)_+, whose derivative is -P(|g| > C). So for "bias bound + a C", a being
what a unit of C costs in noise, the best threshold is exactly the (1 - a)-quantile of the gradient norm: no moment
order, no moment. The exchange rate a is the planner's.

| tool | charged as |
|---|---|
| `oracles.QuantilePilot` | `Pure(epsilon)`, on a pilot group of records of its own: free under the max rule |
| `oracles.AdaptiveClipped` | each step's noise multiplier holds the count's share |

Proofs: docs/proofs/heavy_tailed.md#exchange-rates, docs/proofs/heavy_tailed.md#private-quantile.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torch_dpsco import _validate as check
from torch_dpsco.accounting.analysis.rounding import exact_grid, with_grid
from torch_dpsco.accounting.events import (
    ADJACENCIES,
    Adjacency,
    Pure,
    clipped_gaussian,
)
from torch_dpsco.algorithms.mechanisms import draw_quantile, geometric_grid, quantile_law
from torch_dpsco.errors import (
    InfeasibleError,
    SequenceError,
    UtilityWarning,
    warn,
)
from torch_dpsco.noise import Source, normal
from torch_dpsco.rows import GradBatch
from torch_dpsco.step.exact_noise import release_on_grid
from torch_dpsco.step.oracle import ClippedMean, MeanOracle, Release, clip_weights

# default range of thresholds
C_MIN = 1e-4
C_MAX = 1e4
LEAST_PILOT = 200  # records
RULES = ("theory", "balanced", "median")
_FAILURE = 0.05


class QuantilePilot(MeanOracle):
    """Draws a threshold near a quantile of the norms of one batch, by the exponential mechanism.

    Args:
        batch_size: n_0, public number of records of the pilot group.
        epsilon: of the draw, > 0.
        quantile: public target in [0, 1]; see `target_quantile`.
        c_min: least threshold, public, > 0.
        c_max: largest threshold, public.

    Raises:
        ValueError: an argument is out of range.

    Guarantee:
        Unit: one row per record. Event: Pure(epsilon) under all adjacencies, since the rank is that of the announced
        size. Assumes that a record's row does not depend on other records, to the last bit: where sizes are private, a
        mean loss, which rounds 1/B, needs batches that are filled up (others are refused, `MeanOracle.jumps`).

    Example:
        >>> from torch_dpsco.rows import DenseBlock
        >>> pilot = QuantilePilot(batch_size=200, epsilon=1.0, quantile=0.5)
        >>> pilot.open([torch.zeros(1)])
        >>> pilot.observe(GradBatch([DenseBlock(torch.linspace(0, 8, 200)[:, None])]))
        >>> release = pilot.release(torch.Generator().manual_seed(0))
        >>> release.still, 3.0 < pilot.chosen < 5.5
        (True, True)
    """

    jumps = True

    def __init__(
        self,
        batch_size: int,
        epsilon: float,
        *,
        quantile: float = 0.9,
        c_min: float = C_MIN,
        c_max: float = C_MAX,
    ) -> None:
        super().__init__(check.positive_count(batch_size=batch_size))
        self.epsilon = check.positive(epsilon=epsilon)
        self.quantile = check.between(0.0, 1.0, quantile=quantile)
        self.c_min = check.positive(c_min=c_min)
        self.c_max = check.positive(c_max=c_max)
        self._grid = geometric_grid(self.c_min, self.c_max)
        quantile_law(
            [], self._grid, self.quantile, self.epsilon, self.batch_size
        )  # its checks, before rows are read
        self._event = Pure(self.epsilon, ADJACENCIES)
        self._query: list[Tensor] | None = None
        self._norms: list[Tensor] = []
        self._chosen: float | None = None

    @property
    def released(self) -> bool:
        """Whether the threshold is drawn."""
        return self._chosen is not None

    @property
    def chosen(self) -> float:
        """The threshold: public. Raises SequenceError before the release."""
        if self._chosen is None:
            raise SequenceError("the pilot has not released its threshold: its step comes first")
        return self._chosen

    def open(self, query: Sequence[Tensor], step: int = 0) -> None:
        """Starts the pilot's batch; raises SequenceError after its release."""
        if self.released:
            raise SequenceError(
                "the pilot has released its threshold: make a new one for another group"
            )
        self.discard()
        dtype = torch.float64 if any(p.dtype == torch.float64 for p in query) else torch.float32
        self._query = [torch.zeros(p.shape, dtype=dtype, device=p.device) for p in query]

    def observe(self, rows: GradBatch, users: Tensor | None = None) -> None:
        """Keeps the norms of rows."""
        if self._query is None:
            raise SequenceError("no logical batch was opened: call open(query) first")
        # PRIVACY: nothing else of a row is kept (test_only_norms_enter_the_release)
        self._norms.append(rows.norms().cpu())

    def discard(self) -> None:
        """Forgets the batch."""
        self._query = None
        self._norms = []

    def sensitivity(self, adjacency: Adjacency) -> float:
        """Returns 0: the released mean is constant."""
        self._event.require(adjacency)
        return 0.0

    def event(self) -> Pure:
        """Returns the event of the draw."""
        return self._event

    def use_exact_noise(self) -> None:
        """Changes nothing: the law of a threshold is a list of integers anyhow, and its draw a uniform one."""

    def release(self, generator: Source) -> Release:
        """Draws the threshold and ends the batch; the mean is 0 and `still`: nothing is to move.

        Warns if the threshold is an end of the grid: a function of the private answer only.
        """
        if self._query is None:
            raise SequenceError("no logical batch was opened: call open(query) first")
        still = self._query
        norms = torch.cat([torch.zeros(0, dtype=torch.float64), *self._norms]).numpy()
        self.discard()
        # PRIVACY: the rank is that of the announced size (test_the_rank_is_that_of_the_announced_size)
        chosen = draw_quantile(
            norms, self._grid, self.quantile, self.epsilon, self.batch_size, generator
        )
        warn_at_grid_end(chosen, self._grid)
        self._chosen = chosen
        return Release(still, still=True)

    def lose(self, step: int, *, halted: bool) -> bool:
        """Takes the middle of the grid, a public number, for a threshold that is lost; warns of it."""
        self._chosen = float(self._grid[len(self._grid) // 2])
        warnings.warn(
            f"the pilot's threshold was lost to a crash: the middle of its grid, {self._chosen:g},"
            " is taken instead",
            UtilityWarning,
            stacklevel=5,
        )
        return False

    def state(self) -> dict[str, float | None]:
        """Returns the threshold, None before its release: public."""
        return {"chosen": self._chosen}

    def restore(self, state: Mapping[str, float | None]) -> None:
        """Goes on from a saved state; drops an open batch."""
        self.discard()
        chosen = state["chosen"]
        if chosen is not None and chosen not in self._grid:
            raise ValueError(
                f"chosen must be on the grid between {self.c_min:g} and {self.c_max:g} (got"
                f" {chosen})"
            )
        self._chosen = None if chosen is None else float(chosen)

    def settings(self) -> dict[str, Any]:
        """Returns the fixed numbers."""
        return self._named("epsilon", "quantile", "c_min", "c_max")

    def metrics(self) -> dict[str, float]:
        """Returns the threshold once it is released."""
        return {} if self._chosen is None else {"clip": self._chosen}


class PilotClipped(ClippedMean):
    """Clips at the threshold that a pilot has released.

    Args:
        pilot: whose threshold is used; its step comes first.
        noise_multiplier: z >= 0, noise std on the sum over the clip.
        batch_size: public divisor.

    Guarantee: that of `ClippedMean`; the threshold is a release of other records (or charged as a release of the same).
    """

    def __init__(self, pilot: QuantilePilot, noise_multiplier: float, batch_size: int) -> None:
        super().__init__(noise_multiplier, batch_size)
        self.pilot = pilot

    def bound(self, query: Sequence[Tensor]) -> float:
        """Returns the pilot's threshold; raises SequenceError before its release."""
        return self.pilot.chosen

    def settings(self) -> dict[str, Any]:
        """Returns the fixed numbers."""
        return self._named("noise_multiplier", pilot=self.pilot.settings())


def adaptive_clip_update(clip: float, fraction: float, target: float, lr: float = 0.2) -> float:
    """Returns the next threshold, clip exp(-lr (fraction - target)): post-processing of a private fraction.

    It may be inf or 0, where the factor is beyond floating point.

    Args:
        clip: threshold so far, > 0.
        fraction: private estimate of the fraction of rows below it; noise may put it outside of [0, 1].
        target: quantile to be reached, in [0, 1].
        lr: > 0.

    Source: Andrew, Thakkar, McMahan and Ramaswamy 2021; docs/proofs/heavy_tailed.md#adaptive-clip.

    Example:
        >>> round(adaptive_clip_update(1.0, fraction=0.9, target=0.5), 4)
        0.9231
    """
    return clip * math.exp(min(lr * (target - fraction), 709.0))  # exp(710) would raise


def pilot_size(n: int) -> int:
    """Returns how many of n records a pilot should have: 5 %, at least 200.

    Raises:
        InfeasibleError: no record would be left to train on.
    """
    size = max(LEAST_PILOT, math.ceil(check.positive_count(n=n) / 20))
    if size >= n:
        raise InfeasibleError(
            f"n must be > {LEAST_PILOT} for a pilot group (got {n}): give a fixed clip"
        )
    return size


def target_quantile(
    rule: str, exchange_rate: float, *, pilot_size: int, epsilon: float, grid_size: int
) -> float:
    """Returns the quantile of gradient norms at which to clip: that of a rule, as far as the pilot can resolve it.

    * "theory": 1 - a, best for the bias bound; "balanced": min(1 - a, 0.9); "median": 1/2.
    * If a > 0.9 the noise dominates whatever the clip: 0.1, with a warning.
    * Above 1 - 2 e / pilot_size (for 0.9 and below: 1 - e / pilot_size), e the error of ranks, a release would often be
      more than the largest norm: that, with a warning.

    Args:
        rule: "theory", "balanced" or "median".
        exchange_rate: a >= 0, the growth of the noise per unit of clip; not read for "median".
        pilot_size: public number of norms.
        epsilon: of the exponential mechanism, > 0.
        grid_size: K, number of thresholds to choose from.

    Raises:
        InfeasibleError: the pilot resolves no quantile at all; names the smallest size that does.
        ValueError: an argument is out of range.

    Example:
        >>> target_quantile("balanced", 0.02, pilot_size=500, epsilon=1.0, grid_size=107)
        0.9
    """
    wanted = _wanted(check.choice(RULES, rule=rule), exchange_rate)
    size = check.positive_count(pilot_size=pilot_size)
    # a private quantile's rank is that near, but for a probability of 5 %
    error = 2.0 / check.positive(epsilon=epsilon) * math.log(grid_size / _FAILURE)
    if error >= size:
        raise InfeasibleError(
            f"pilot_size must be >= {math.floor(error) + 1} at epsilon {epsilon:g} (got {size})"
        )
    # ranks near the end are released together with all thresholds above every norm: keep twice the error away from it
    highest = max(1.0 - 2.0 * error / size, min(0.9, 1.0 - error / size))
    if wanted > highest:
        warn(
            f"a pilot of {size} records resolves ranks up to {error:.0f} only: quantile"
            f" {highest:.3f} instead of {wanted:.3f}; a larger pilot_size or epsilon would"
            " resolve it"
        )
    return min(wanted, highest)


def _wanted(rule: str, exchange_rate: float) -> float:
    if rule == "median":
        return 0.5
    rate = check.nonnegative(exchange_rate=exchange_rate)
    if rate > 0.9:
        warn(
            f"noise dominates: a unit of clip costs {rate:.2f} in noise, so no clip gives a useful"
            " step; the quantile is 0.1. Use more records per step, fewer steps or a larger"
            " budget",
            stacklevel=3,
        )
        return 0.1
    return 1.0 - rate if rule == "theory" else min(1.0 - rate, 0.9)


def warn_at_grid_end(threshold: float, grid: Sequence[float] | NDArray[np.float64]) -> None:
    """Warns if a released threshold is an end of its grid. It looks at the private output only, so that it is free."""
    name = {float(grid[0]): "c_min", float(grid[-1]): "c_max"}.get(threshold)
    if name is not None:
        warn(
            f"the private threshold {threshold:g} is at the end of its grid: {name} is probably"
            " wrong",
            stacklevel=3,
        )


_RAMP = 0.25  # width of the ramp around the clip, in units of the clip


_NULL = (
    2.0**-44
)  # largest norm of a null row, over sqrt(dim); a zero row's certified bound is 2^-63


_MOST_NOISE = 2.0**256  # of the count: far from where its sum is no number


# of clips; float32 sums are proved between 2^-40 and 2^40
_LEAST = 2.0**-30
_LARGEST = 2.0**39


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

    @property
    def count_sensitivity(self) -> float:
        """How far the sum of votes can move with a record more or less: u per row, and rounding."""
        return with_grid(self._unit + self._count_error, self._exact)

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
        std = self.count_noise / self._unit * self.count_sensitivity
        if self._exact:
            votes_grid = exact_grid(std, self.count_sensitivity, 1)
            total = float(
                release_on_grid(
                    torch.tensor([total], dtype=torch.float64), votes_grid, generator
                )
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
        return self._named(
            "clip0", "noise_multiplier", "target", "count_noise", "first", clip_lr=self.lr
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
        clip: R > 0, what a row's contribution stays below.
        noise_multiplier: z >= 0, noise std on the sum over R.
        batch_size: public divisor.
        offset: gamma, at least R / 2^40: rows much shorter than it stay short.

    Raises:
        ValueError: an argument is out of range.

    Guarantee: that of `ClippedMean` with clip R.

    Example:
        >>> from torch_dpsco.rows import DenseBlock, GradBatch
        >>> oracle = AutoClip(clip=1.0, noise_multiplier=0.0, batch_size=1, offset=5.0)
        >>> oracle.open([torch.zeros(2)])
        >>> oracle.observe(GradBatch([DenseBlock(torch.tensor([[3.0, 4.0]]))]))
        >>> [round(v, 3) for v in oracle.release(torch.Generator()).mean[0].tolist()]
        [0.3, 0.4]
    """

    def __init__(
        self, clip: float, noise_multiplier: float, batch_size: int, offset: float = 0.01
    ) -> None:
        super().__init__(noise_multiplier, batch_size)
        self.fixed_clip = check.positive(clip=clip)
        self.offset = check.positive(offset=offset)
        if self.fixed_clip > self.offset * 2.0**40:
            # PRIVACY: weights above 2^40 would lift float32's underflow (test_a_tiny_offset_is_refused)
            raise ValueError(
                f"offset must be >= clip / 2^40 (got {self.offset:g} for clip"
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
