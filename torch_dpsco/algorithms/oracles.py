"""Coordinate-wise median of means: rows clipped in each coordinate, averaged in groups, medians over the groups.

The median ignores a minority of groups spoiled by heavy tails. It costs noise: one record moves the mean of its group m
times as far as it would move the mean of the batch. With second moments `Clipped` is the better default.

Groups are consecutive rows of a logical batch in the order of arrival, floor(s / m) each; a tail of s - m floor(s / m)
rows is left out, and divisors are public constants. Row i is in group floor(i / size) whatever the other rows hold, so
that under replace-one and zero-out one record touches one group. A removed record would shift all later ones: no
add-or-remove guarantee, and none for batches that sampling fills anew (`ordered`).

    noise="before_median"   N(0, sigma^2 I) on each group mean, then medians; the vector of the m noisy means costs what
                            its costliest part costs (one part differs), and the median is post-processing
    noise="after_median"    medians, then N(0, sigma^2 I): the paper's Algorithm 12, with the same sigma, since medians
                            move no further than the largest move of any group mean

The first has about pi sigma^2 / (2 m) of noise variance where the second has sigma^2.

Differs from the paper in: 1. noise before the median, by default; 2. a batch size that m does not divide is allowed.

Proof: docs/proofs/heavy_tailed.md#median-of-means. Source: Lowy and Razaviyayn, Algorithm 12.

Means of rows without a threshold to choose: `AdaptiveClipped` adapts it by private counts, `AutoClip` has none.

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

Means of clipped rows with correlated noise: later releases subtract part of the earlier noise.

    mean_t = ( sum_i g_i min(1, C / |g_i|) + w_t ) / batch_size,    w_t = z_t - c_1 w_{t-1} - .. - c_{b-1} w_{t-b+1}

Where the batches of one partition come in order, two steps of a record are at least a pass apart, and each is charged
as one Gaussian release. Wherever that is not known (another partition, a batch that does not follow, a copy, a
checkpoint, a lost step) the past noise is forgotten, which is private too, and costs accuracy only.

Proof: docs/proofs/correlated.md.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from torch_dpsco import _validate as check
from torch_dpsco.accounting.designs import Cyclic, Design, Disjoint, Draw, Shuffled
from torch_dpsco.accounting.events import (
    REPLACE_ONE,
    ZERO_OUT,
    Adjacency,
    Gaussian,
)
from torch_dpsco.algorithms.correlated_numbers import Banded
from torch_dpsco.errors import (
    AdjacencyError,
    ConditionError,
    SequenceError,
)
from torch_dpsco.noise import Source, normal_
from torch_dpsco.rows import GradBatch
from torch_dpsco.step.oracle import (
    Charge,
    Clipped,
    MeanOracle,
    Release,
    require_places,
    split_like,
)

_UNITS = {ZERO_OUT: 1.0, REPLACE_ONE: 2.0}  # clips that a record moves by


def medians(values: Tensor) -> Tensor:
    """Returns the median over the first axis, the mean of the middle two if it is even: (m, ...) -> (...)."""
    ordered = values.sort(dim=0).values
    m = len(values)
    # halves first: the sum of two large numbers may overflow
    return ordered[(m - 1) // 2] / 2 + ordered[m // 2] / 2


def flat_rows(rows: Sequence[Tensor]) -> Tensor:
    """Returns rows of all parameters side by side: (B, *shape) each -> (B, d) float64."""
    return torch.cat(
        [part.reshape(len(part), part.shape[1:].numel()).double() for part in rows], dim=1
    )


def clipped_rows(rows: Sequence[Tensor], clip: float) -> Tensor:
    """Returns rows clipped to [-clip, clip] in each coordinate: (B, d) float64; a row that is not finite becomes 0."""
    flat = flat_rows(rows)
    # PRIVACY: by row, so that one record stays one record (test_a_row_that_is_not_finite_is_dropped_whole)
    finite = torch.isfinite(flat).all(dim=1, keepdim=True)
    return torch.where(finite, flat, 0.0).clamp_(-clip, clip)


def group_size(batch_size: int, groups: int) -> int:
    """Returns the rows of each of so many groups of a batch."""
    if check.positive_count(groups=groups) > check.positive_count(batch_size=batch_size):
        raise ValueError(f"groups must be <= batch_size={batch_size} (got {groups})")
    return batch_size // groups


class VectorMean(MeanOracle):
    """A mean that is made as one vector of the shapes, precision and device of the query."""

    _shapes: Sequence[torch.Size] = ()

    def open(self, query: Sequence[Tensor], step: int = 0) -> None:
        """Starts a logical batch like the query; forgets an unfinished one."""
        self._shapes = [p.shape for p in query]
        self._device = query[0].device
        self._dtype = (
            torch.float64 if any(p.dtype == torch.float64 for p in query) else torch.float32
        )
        self.discard()

    def _require_open(self) -> None:
        if not self._shapes:
            raise SequenceError(
                "no logical batch was opened: call open(query) first, which fixes the dimension"
            )

    @property
    def _dim(self) -> int:
        self._require_open()
        return sum(shape.numel() for shape in self._shapes)

    def _released(self, mean: Tensor) -> Release:
        return Release(split_like(mean.to(self._dtype), self._shapes))


class GroupedMean(VectorMean):
    """Medians over groups of consecutive rows of batches of a fixed size.

    Args:
        clip: of each row.
        batch_size: s, the fixed number of rows of a logical batch.
        groups: m in 1..s, of floor(s / m) rows each; a tail of rows is left out.
    """

    def __init__(self, clip: float, batch_size: int, groups: int) -> None:
        super().__init__(check.positive_count(batch_size=batch_size))
        # PRIVACY: rounding errors are relative within this range (test_clips_that_would_overflow_are_refused)
        self.clip = check.between(1e-200, 1e200, clip=check.positive(clip=clip))
        self.groups = groups
        self.group_size = group_size(batch_size, groups)

    def _dense(self, rows: GradBatch) -> list[Tensor]:
        """Returns rows per parameter, after a check of their shapes."""
        self._require_open()
        dense = rows.dense()
        if [part.shape[1:] for part in dense] != self._shapes:
            raise ValueError(
                f"rows must be of shapes {self._shapes} (got {[part.shape[1:] for part in dense]})"
            )
        return dense

    def _clips(self, adjacency: Adjacency) -> float:
        """Returns how many clips a record moves by; raises AdjacencyError where places of records change."""
        if adjacency not in _UNITS:
            # PRIVACY: (test_add_remove_is_refused_since_groups_are_positional)
            raise AdjacencyError(
                f"groups are positional: no bound under {adjacency}, use replace_one or zero_out"
            )
        return _UNITS[adjacency]

    def charge(self, design: Design, draw: Draw) -> Charge:
        """Returns what a release is charged, under designs that keep the places of rows."""
        require_places(self, design)
        return super().charge(design, draw)


class Coordinatewise(GroupedMean):
    """Noisy coordinate-wise median of means of rows clipped to [-tau, tau] in each coordinate.

    Args:
        clip: tau > 0.
        noise_multiplier: z >= 0, std of the noise over the L2 distance tau sqrt(d) / floor(s / m) by which zeroing one
            record moves its group's mean; 0 gives no privacy.
        batch_size: s, the fixed number of rows of a logical batch.
        groups: m in 1..s; 1 is the mean of coordinate-wise clipped rows.
        noise: "before_median" (default) or "after_median" (the paper's).

    Guarantee:
        Replace-one and zero-out, unit: one row per record, n and the places of records public. Event:
        Gaussian(z, {zero_out: 1, replace_one: 2}). Missing rows count as 0. Assumes that a record's row does not depend
        on other records. Edge cases: a row with NaN or inf is 0 as a whole; huge finite rows are clipped; an empty
        batch releases noise only.

    Source: docs/proofs/heavy_tailed.md#median-of-means (Algorithm 12, and noise before the median).

    Example:
        >>> from torch_dpsco.rows import DenseBlock
        >>> oracle = Coordinatewise(clip=1.0, noise_multiplier=0.0, batch_size=3, groups=3)
        >>> oracle.open([torch.zeros(2)])
        >>> oracle.observe(GradBatch([DenseBlock(torch.tensor([[0.5, 9.0], [0.25, 0.0], [float("nan"), -9.0]]))]))
        >>> oracle.release(torch.Generator()).mean[0].tolist()
        [0.25, 0.0]
    """

    def __init__(
        self,
        clip: float,
        noise_multiplier: float,
        batch_size: int,
        groups: int,
        *,
        noise: str = "before_median",
    ) -> None:
        super().__init__(clip, batch_size, groups)
        self.noise_multiplier = check.nonnegative(noise_multiplier=noise_multiplier)
        self.noise = check.choice(("before_median", "after_median"), noise=noise)
        self._event = Gaussian(self.noise_multiplier, _UNITS)
        self._n_rows = 0

    def observe(self, rows: GradBatch, users: Tensor | None = None) -> None:
        """Clips rows and adds them to the sums of their groups."""
        dense = self._dense(rows)
        start = self._n_rows
        stop = self._n_rows + len(rows)
        if stop > self.batch_size:
            # PRIVACY: a group with more rows than its divisor (test_more_rows_than_the_batch_size_are_refused)
            raise SequenceError(
                f"a logical batch must have at most {self.batch_size} rows, its fixed size"
            )
        used = self.groups * self.group_size
        places = torch.arange(start, min(stop, max(start, used)), device=self._device)
        # PRIVACY: every coordinate passes the clip (test_no_neighbor_moves_the_release_past_the_sensitivity,
        # test_the_sensitivity_is_attained)
        self._sums.index_add_(
            0, places // self.group_size, clipped_rows(dense, self.clip)[: len(places)]
        )
        self._n_rows = stop

    def discard(self) -> None:
        """Forgets the rows observed since open."""
        self._n_rows = 0
        if self._shapes:  # sums of the rows of each group so far
            self._sums = torch.zeros(
                self.groups, self._dim, dtype=torch.float64, device=self._device
            )

    def sensitivity(self, adjacency: Adjacency) -> float:
        """Returns the L2 sensitivity of the median and of the vector of group means, rounding included."""
        # a sum of k numbers up to tau errs by at most k (k - 1) u tau, a median by 2 u tau; two of them, in units of
        # tau / k
        error = 4.0 * self.group_size * (self.group_size + 4) * 2.0**-53
        return (
            (self._clips(adjacency) + error) * self.clip * math.sqrt(self._dim) / self.group_size
        )

    @property
    def noise_std(self) -> float:
        """Standard deviation of the Gaussian noise: on each group mean, or on the median."""
        # PRIVACY: scaled to the sensitivity, rounding included (test_halved_noise_of_group_means_is_caught)
        return self.noise_multiplier * self.sensitivity(ZERO_OUT)

    def event(self) -> Gaussian:
        """Returns the Gaussian event in units of the move of a zeroed record."""
        return self._event

    def release(self, generator: Source) -> Release:
        """Adds the noise, takes medians, and ends the batch."""
        self._require_open()
        means = self._sums / self.group_size
        if self.noise == "before_median":
            flat = medians(self._noisy(means, generator))
        else:
            flat = self._noisy(medians(means), generator)
        self.discard()
        return self._released(flat)

    def _noisy(self, values: Tensor, generator: Source) -> Tensor:
        if not self.noise_multiplier:
            return values
        return values + normal_(torch.empty_like(values), self.noise_std, generator)

    def settings(self) -> dict[str, Any]:
        """Returns the fixed numbers."""
        return self._named("clip", "noise_multiplier", "groups", "noise")

    def metrics(self) -> dict[str, float]:
        """Returns clip and noise_std."""
        return {"clip": self.clip, "noise_std": self.noise_std} if self._shapes else {}


class _Past(deque[Tensor]):
    """Noise of earlier releases, newest first. SECRET: answer minus noise is the exact mean."""

    def __repr__(self) -> str:
        return "_Past(SECRET)"

    def __reduce__(self) -> tuple[Any, ...]:
        # PRIVACY: a copy would take the same noise back (test_copies_and_checkpoints_hold_no_past_noise)
        return _Past, ((), self.maxlen)

    def __copy__(self) -> _Past:
        return _Past((), self.maxlen)


class CorrelatedClipped(Clipped):
    """Clips at a fixed public bound, and adds noise that later releases partly subtract again.

    Args:
        clip: C, > 0.
        noise_multiplier: z >= 0, noise std over C of the ordinary noise that costs as much. What is added to the sum of
            a step is larger by |c|, and what sums of steps keep of it is smaller.
        batch_size: public divisor.
        strategy: coefficients c, public.
        steps: T, after which past noise is forgotten.

    Guarantee:
        zero_out and replace_one; batches of Disjoint, Cyclic (with at least as many batches as bands) or Shuffled
        designs, each charged as `Clipped` with this z. Unit: one row per record. Assumes that rows do not depend on
        other records, and that equal rows give equal sums.

    Example:
        >>> from torch_dpsco.algorithms.correlated_numbers import square_root
        >>> oracle = CorrelatedClipped(1.0, 2.0, 10, square_root(4), steps=100)
        >>> oracle.open([torch.zeros(3)])
        >>> round(oracle.noise_std, 4)
        0.2441
    """

    def __init__(
        self, clip: float, noise_multiplier: float, batch_size: int, strategy: Banded, steps: int
    ) -> None:
        super().__init__(clip, noise_multiplier, batch_size)
        self.strategy = strategy
        self.steps = check.positive_count(steps=steps)
        self._past = _Past((), strategy.bands - 1)
        self._charged: tuple[str, int, int] | None = None  # partition, batch, number of batches
        self._released: tuple[str, int, int] | None = None
        self._since = 0  # releases since noise was forgotten

    def use_exact_noise(self) -> NoReturn:
        """Raises ConditionError: a sum of integers times coefficients lies on no grid."""
        raise ConditionError(
            "secure must be None for correlated noise, which is proved in floating point only"
        )

    def charge(self, design: Design, draw: Draw) -> Charge:
        """Returns what a step is charged: an ordinary Gaussian on its batch."""
        if not isinstance(design, (Disjoint, Cyclic, Shuffled)):
            # PRIVACY: a record may come again too soon (test_designs_that_keep_no_distance_are_refused)
            raise AdjacencyError(
                "design must be Disjoint, Cyclic or Shuffled for correlated noise, where a"
                f" record's steps are known to be apart (got {design})"
            )
        batches = design.batches if isinstance(design, Cyclic) else design.steps_per_epoch
        if isinstance(design, Cyclic) and batches < self.strategy.bands:
            # PRIVACY: rows of one record would add up (test_fewer_batches_than_bands_are_refused)
            raise ConditionError(
                f"bands must be <= {batches}, the batches of a pass (got {self.strategy.bands}):"
                " fewer bands, or smaller batches"
            )
        self.__dict__["_charged"] = (draw.partition, int(draw.part), batches)
        return super().charge(design, draw)

    @property
    def noise_std(self) -> float:
        """Standard deviation of the fresh noise of a release of the mean."""
        ordinary = super().noise_std
        c = self.strategy
        most = max(self.steps, self.strategy.bands)
        room = self.noise_multiplier * c.rounding(self.steps, most, self._dim)
        if room >= 0.5:
            raise ConditionError(
                f"noise_multiplier must be smaller for {self.steps} steps (got"
                f" {self.noise_multiplier:g}): rounding"
            )
        # PRIVACY: with room for the rounding of what is taken back (test_fresh_noise_is_larger_by_the_norm)
        return ordinary * c.norm * (1.0 + 2.0**-48) / (1.0 - room)

    def release(self, generator: Source) -> Release:
        """Adds fresh noise, subtracts part of the past noise, and ends the batch."""
        fresh = torch.zeros(self._dim, dtype=torch.float64, device=self._form[0][2])
        normal_(fresh, self.noise_std, generator)
        if not self._follows():
            self.forget()
        noise = self.strategy.correlated(fresh, self._past)
        answer = noise.clone()
        self.write_sum(answer)
        self.discard()
        self._past.appendleft(noise)
        self.__dict__.update(_released=self._charged, _charged=None, _since=self._since + 1)
        return Release(self.views(self._memory(self._dim).copy_(answer)))

    def _follows(self) -> bool:
        """Whether this batch comes right after the one before, in the same partition."""
        if self._charged is None or self._released is None or self._since >= self.steps:
            return False
        partition, batch, batches = self._released
        return self._charged == (partition, (batch + 1) % batches, batches)

    def forget(self) -> None:
        """Forgets the past noise: nothing of it is taken back any more."""
        self._past.clear()
        self.__dict__.update(_released=None, _since=0)

    def lose(self, step: int, *, halted: bool) -> bool:
        """Forgets the past noise, of which a part is not known."""
        self.forget()
        return halted

    def restore(self, state: dict[str, Any]) -> None:
        """Forgets the past noise, which no checkpoint holds."""
        self.discard()
        self.forget()

    def settings(self) -> dict[str, Any]:
        """Returns the fixed numbers."""
        return super().settings() | {
            "coefficients": list(self.strategy.coefficients),
            "steps": self.steps,
        }
