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

The means of users' rows, collected over the physical batches of a logical one.

    x_j = (1 / m_j) sum of the m_j rows of user j

A row is added to the sum of its own user and to nothing else, so that x_j is a function of the rows of user j alone, to
the last bit. A user with fewer than `min_items` rows is not counted among those who have a mean.

User-level clipping: each user's mean is clipped.

    mean = (1/n) ( sum_j clip(x_j, C) + N(0, (z C)^2 I) ),    clip(v, C) = v min(1, C / |v|)

with x_j the mean of the rows of user j. Whatever the rows of a user hold, they move the sum by a vector of norm at most
C, so that all that is known about means of clipped rows holds with users for records: it is the same code, fed with one
row per user.

| user | contribution to the sum |
|---|---|
| |x_j| <= C | x_j |
| longer | scaled to length C |
| a row with NaN or inf, or sums that overflow | exactly 0 |
| fewer than min_items rows, or none | exactly 0 |

The filtered mean: a private test that users agree, then a mean that ignores those who do not. With n users, a pair
radius tau and the numbers of `algorithms.user_numbers`:

    s   = (1/n) #{(j, k) : |x_j - x_k| <= tau}      tested by `AboveThreshold`; below the threshold: halt for good
    f_j = #{k : |x_j - x_k| <= tau},    w_j = clip((f_j - a) / (b - a), 0, 1),    a = (n + 1) / 2
    release  sum_j w_j x_j / sum_j w_j + N(0, sigma^2 I)

| user | counted as |
|---|---|
| no rows, or fewer than min_items | isolated: own only neighbor, f_j = 1, weight 0, counted in n |
| NaN, inf, overflow, or farther than 10^6 tau from 0 | isolated |
| at exactly tau from another one | neighbors (<=), decided by the two means alone |
| halted | later steps read no rows and release nothing |

A user moves s by at most 2 (n - 1)/n, since isolated users count themselves, and the mean by at most the sensitivity of
the filter wherever one of the two scores is at least H. A pass where both are below H has probability at most beta over
a run; that is the `transcript` failure of the event. Rounding is covered: indicators are exact functions of two users
(`rows.neighbors`), the score is a fraction, and `sensitivity` holds the errors of the weighted mean.

Differs from the usual federated averaging in: the mean of a user's rows, not the sum. Differs from the paper in: 1.
deterministic weights; 2. scales for the true sensitivity of s, and noise for a proved one; 3. one test object for the
run, halting for good; 4. isolated users instead of aborts; 5. tau is a pairwise radius.

Source: docs/proofs/user_level.md#clipped-means-of-users, docs/proofs/user_level.md#guarantee-of-a-filtered-run; Asi and
Liu 2023, Algorithm 2.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor

from torch_dpsco import _validate as check
from torch_dpsco.accounting.designs import BaseEvent, Cyclic, Design, Disjoint, Draw, Shuffled
from torch_dpsco.accounting.events import (
    REPLACE_ONE,
    ZERO_OUT,
    Adjacency,
    Failure,
    Gaussian,
    NonPrivate,
    Repeat,
    Sequential,
)
from torch_dpsco.algorithms.correlated_numbers import Banded
from torch_dpsco.algorithms.mechanisms import AboveThreshold
from torch_dpsco.algorithms.user_numbers import UserFilter, ramp_start
from torch_dpsco.errors import AdjacencyError, ConditionError, SequenceError
from torch_dpsco.noise import SecretState, Source, add_normal_, normal_
from torch_dpsco.rows import DenseBlock, GradBatch
from torch_dpsco.rows.neighbors import mean_rounding, neighbor_counts, read, tiles, within
from torch_dpsco.step.oracle import (
    Charge,
    Clipped,
    ClippedMean,
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
        self._device = query[0].device
        self._dtype = (
            torch.float64 if any(p.dtype == torch.float64 for p in query) else torch.float32
        )
        self._shapes = [p.shape for p in query]  # last: what is interrupted before is not open
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


_UNIT = 2.0**-53
_REACH = 1e6  # pair radii from 0, past which users are isolated


class UserMean(VectorMean):
    """Collects sums and counts per user; users get places in order of appearance.

    Args:
        batch_size: public divisor of the mean, in users; memory for as many is taken at once.
        n_users: ids are in [0, n_users).
        min_items: rows that a user must have, public.
    """

    unit = "user"
    # whether a user's mean must not depend on the number of other rows, not even in its last bits
    exact: ClassVar[bool] = False
    _places: Tensor  # of each user in the sums, -1 for none
    _counts: Tensor
    _sums: Tensor

    def __init__(self, batch_size: int, n_users: int, min_items: int) -> None:
        super().__init__(batch_size)
        self.n_users = check.positive_count(n_users=n_users)
        self.min_items = check.positive_count(min_items=min_items)

    def observe(self, rows: GradBatch, users: Tensor | None = None) -> None:
        """Adds the rows of one physical batch to the sums of their users.

        Args:
            rows: of one physical batch.
            users: (B,) int64 in [0, n_users), on the device of the rows.

        Raises:
            SequenceError: no ids, or no logical batch.
            ValueError: ids or rows of another shape, type or range.
        """
        self._require_open()
        if users is None:
            # PRIVACY: rows without a user would be protected one by one (test_rows_without_ids_are_refused)
            raise SequenceError(
                "users must be given, the id of the user of each row: opt.step(users=ids)"
            )
        if self.exact and rows.averaged:
            # PRIVACY: 1/B is rounded; another B would move pairs of users across tau (test_a_mean_loss_is_refused)
            raise SequenceError(
                "rows must be of a sum loss, since users are compared with each other: "
                "dp.attach(model, loss_reduction='sum'), and loss(output, target, reduction='sum')"
            )
        if rows.shapes != self._shapes:
            raise ValueError(
                f"rows must be of shapes {self._shapes}, those of the query (got {rows.shapes})"
            )
        if users.shape != (len(rows),) or users.dtype != torch.int64:
            raise ValueError(
                f"users must be ({len(rows)},) int64 (got {tuple(users.shape)}, {users.dtype})"
            )
        if len(users) and not 0 <= int(users.min()) <= int(users.max()) < self.n_users:
            # PRIVACY: a negative id would be another user's place (test_ids_out_of_range_are_refused)
            raise ValueError(f"users must be in [0, {self.n_users})")
        self._make_room(users.unique())
        places = self._places[users]
        rows.add_by(places, self._sums)
        self._counts.index_add_(0, places, torch.ones_like(places))

    def _make_room(self, ids: Tensor) -> None:
        """Gives new users a place, and memory."""
        new = ids[self._places[ids] < 0]
        self._places[new] = torch.arange(self._used, self._used + len(new), device=self._device)
        self._used += len(new)
        if self._used > len(self._counts):
            more = min(self.n_users, max(self.batch_size, 2 * self._used)) - len(self._counts)
            self._counts = torch.cat([self._counts, self._counts.new_zeros(more)])
            self._sums = torch.cat([self._sums, self._sums.new_zeros(more, self._dim)])

    def discard(self) -> None:
        """Forgets all rows."""
        self._used = 0
        if self._shapes:
            self._places = torch.full(
                (self.n_users,), -1, dtype=torch.int64, device=self._device
            )
            self._counts = self._places.new_zeros(0)
            self._sums = torch.zeros(0, self._dim, dtype=self._dtype, device=self._device)

    def _take(self) -> tuple[Tensor, Tensor]:
        """Returns the means (k, D) of the k users with rows, and their numbers of rows (k,) int64; forgets all rows."""
        self._require_open()
        counts = self._counts[: self._used]
        means = self._sums[: self._used].div_(counts[:, None])
        UserMean.discard(self)  # a subclass forgets more
        return means, counts


class UserClipped(UserMean):
    """Noisy mean of users' clipped means.

    Args:
        clipping: how users' means are clipped, with its noise and divisor, in users: `Clipped`, `HolderClipped`, or
            `AdaptiveClipped` (one vote per user, charged). It is this oracle's own from here on.
        n_users: ids are in [0, n_users).
        min_items: rows that a user must have, public.

    Guarantee:
        Unit: user, all rows of one. Event: that of `clipping`, with users for rows: add_remove, zero_out and
        replace_one (n_users public). The sampling of a design must be one of users. Assumes that a user's rows do not
        depend on other users, except for the rounding of a mean loss.

    Example:
        >>> import torch
        >>> from torch_dpsco.step.oracle import Clipped
        >>> oracle = UserClipped(Clipped(1.0, 0.0, batch_size=2), n_users=2)
        >>> oracle.open([torch.zeros(1)])
        >>> rows = GradBatch([DenseBlock(torch.tensor([[0.5], [0.25], [9.0]]))])
        >>> oracle.observe(rows, users=torch.tensor([0, 0, 1]))
        >>> round(oracle.release(torch.Generator()).mean[0].item(), 2)
        0.69
    """

    def __init__(self, clipping: ClippedMean, n_users: int, *, min_items: int = 1) -> None:
        super().__init__(clipping.batch_size, n_users, min_items)
        clipping.take()
        self.clipping = clipping

    def charge(self, design: Design, draw: Draw) -> Charge:
        """Returns what the clipped mean is charged."""
        return self.clipping.charge(design, draw)

    @property
    def assumptions(self) -> tuple[str, ...]:  # type: ignore[override]
        """What several processes assume."""
        if self.clipping.processes == 1:
            return ()
        have = "have a shard each: all records of a user on one, whatever their values"
        return (f"{self.clipping.processes} processes that trust each other {have}",)

    def use_exact_noise(self) -> None:
        """Draws the noise of the clipped mean in integers."""
        self.clipping.use_exact_noise()

    def open(self, query: Sequence[Tensor], step: int = 0) -> None:
        """Starts a logical batch; forgets an unfinished one."""
        super().open(query, step)
        self.clipping.open(query, step)

    def discard(self) -> None:
        """Forgets the logical batch."""
        super().discard()
        self.clipping.discard()

    def sensitivity(self, adjacency: Adjacency) -> float:
        """Returns how far one user moves the mean, rounding included."""
        return self.clipping.sensitivity(adjacency)

    def event(self) -> BaseEvent:
        """Returns the event of the clipped mean."""
        return self.clipping.event()

    def release(self, generator: Source) -> Release:
        """Clips the users' means and adds noise."""
        return self.summed().release(generator)

    def adding(self) -> ClippedMean | None:
        """Returns the oracle that clips and adds users' means."""
        return self.clipping.adding()

    def summed(self) -> ClippedMean:
        """Returns the oracle of the clipped mean, which has added the users of this process."""
        means, items = self._take()
        # PRIVACY: before the clip, which then bounds every user (test_no_user_moves_the_mean_past_the_sensitivity)
        parts = means[items >= self.min_items].split(
            [shape.numel() for shape in self._shapes], dim=1
        )
        blocks = [
            DenseBlock(part.reshape(-1, *shape))
            for part, shape in zip(parts, self._shapes, strict=True)
        ]
        self.clipping.observe(GradBatch(blocks))
        return self.clipping

    def settings(self) -> dict[str, Any]:
        """Returns the fixed numbers."""
        return {
            **self.clipping.settings(),
            "averaged": "users",
            "n_users": self.n_users,
            "min_items": self.min_items,
        }

    def state(self) -> dict[str, Any]:
        """Returns the state of the clipping: public."""
        return self.clipping.state()

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on from a saved state; drops an open batch."""
        self.discard()
        self.clipping.restore(state)

    def metrics(self) -> dict[str, float]:
        """Returns clip and noise_std of the last batch."""
        return self.clipping.metrics()


def ramp_weights(counts: Tensor, none: float, full: float) -> Tensor:
    """Returns clip((counts - none) / (full - none), 0, 1) in float64."""
    return ((counts.double() - none) / (full - none)).clamp_(0.0, 1.0)


def weighted_mean(rows: Tensor, weights: Tensor) -> Tensor:
    """Returns sum_j w_j y_j / sum_j w_j in float64, 0 if all weights are 0: (D,).

    Differences from one of the rows are averaged, so that the error is relative to how far apart they are.

    Args:
        rows: (n, D).
        weights: (n,) float64, >= 0; rows of weight 0 are not read.
    """
    index = weights.nonzero().squeeze(1)
    total = torch.zeros(rows.shape[1], dtype=torch.float64, device=weights.device)
    if not len(index):
        return total
    base = read(rows, index[:1])[0]
    for part, tile in tiles(rows, index):
        total.addmv_(tile.sub_(base).t(), weights[part])
    return base.add_(total.div_(weights[index].sum()))


class UserFiltered(UserMean):
    """Tested and filtered mean of all users in each of at most `steps` steps.

    Args:
        filter: its public numbers. The noise on the released mean is enlarged by the rounding errors (see `noise_std`),
            so that the event is that of these numbers.
        min_items: rows that a user must have, public.
        ids: user ids are in [0, ids); default n_users. More than n_users for a phase on some of the users.

    Guarantee:
        Unit: user, all rows of one; replace_one, n public. Event: `phase_event`, once, before the first release; later
        releases of the run are free, and a new oracle is charged again. Users are not sampled. Assumes that a
        user's rows do not depend on other users.

    Example:
        >>> own = UserFilter(n_users=8, steps=5, pair_radius=1.0, threshold=7.2, threshold_scale=0.01,
        ...                  query_scale=0.01, score_floor=7.0, ramp_end=6, noise_std=0.0)
        >>> oracle = UserFiltered(own)
        >>> oracle.open([torch.zeros(1)])
        >>> oracle.observe(GradBatch([DenseBlock(torch.arange(8.0)[:, None] / 8)]), users=torch.arange(8))
        >>> oracle.release(torch.Generator().manual_seed(0)).mean[0].item()
        0.4375
    """

    exact = True

    def __init__(
        self,
        filter: UserFilter,
        *,
        min_items: int = 1,
        ids: int | None = None,
    ) -> None:
        n = filter.n_users
        super().__init__(n, n if ids is None else check.positive_count(ids=ids), min_items)
        self.filter = filter
        # PRIVACY: of the very numbers that the ledger is told (test_the_phase_is_charged_for_what_is_drawn)
        self.noise_multiplier = filter.noise_std / filter.sensitivity
        # PRIVACY: 2 (n - 1)/n, not 1 (test_one_user_moves_the_score_by_at_most_its_sensitivity)
        self._test = AboveThreshold(
            filter.threshold,
            threshold_scale=filter.threshold_scale,
            query_scale=filter.query_scale,
            sensitivity=Fraction(2 * (n - 1), n),
            steps=filter.steps,
        )

    # -- what it costs ------------------------------------------------------------------------------------------------

    @property
    def noise_std(self) -> float:
        """Standard deviation of the noise on the released mean: that asked for, and as much more as rounding needs."""
        # PRIVACY: scaled to the sensitivity, rounding included (test_halved_noise_of_the_filtered_mean_is_caught)
        return self.noise_multiplier * self.sensitivity(REPLACE_ONE)

    def sensitivity(self, adjacency: Adjacency) -> float:
        """Returns how far one user moves the mean of a step whose score is at least H, rounding included."""
        if adjacency != REPLACE_ONE:
            # PRIVACY: n is public, and only replacements keep it (test_the_filter_is_charged_under_replace_one_only)
            raise AdjacencyError(
                f"the filtered mean has no bound under {adjacency}: use replace_one (n_users"
                " public)"
            )
        own = self.filter
        tau = own.pair_radius
        nominal = own.sensitivity * (1.0 + 8 * (self._dim + 16) * _UNIT)
        return nominal + mean_rounding(own.n_users, 2 * tau * 1.01, _REACH * tau * 1.01)

    @property
    def bad_pass(self) -> float:
        """Bound beta of the probability that a run passes a step whose score is below H."""
        return self._test.bad_pass(self.filter.score_floor)

    def event(self) -> Sequential:
        """Returns what a whole run costs: one noisy test, the Gaussians of all planned steps, and the failure."""
        if not self.noise_multiplier or self.bad_pass >= 1:
            return Sequential((NonPrivate(),))
        # PRIVACY: all planned steps, since a halt depends on the data (test_a_halt_earns_no_refund)
        return Sequential(
            (
                self._test.event(REPLACE_ONE),
                Repeat(Gaussian(self.noise_multiplier, {REPLACE_ONE: 1.0}), self._test.steps),
                Failure(self.bad_pass, "transcript"),
            )
        )

    def charge(self, design: Design, draw: Draw) -> Charge:
        """Returns what all releases of a run are charged, with the first one."""
        return super().charge(design, draw)._replace(covers=self._test.steps)

    # -- one step -----------------------------------------------------------------------------------------------------

    @property
    def halted(self) -> bool:
        """Whether the test has failed, so that nothing more is released: public."""
        return self._test.halted

    def observe(self, rows: GradBatch, users: Tensor | None = None) -> None:
        """Adds the rows of one physical batch to the sums of their users."""
        if not self.halted:
            super().observe(rows, users)

    def release(self, generator: Source) -> Release:
        """Tests the score; returns the noisy filtered mean, or halts."""
        means, items = self._take()
        if self.halted:
            return self._halt()
        own = self.filter
        # PRIVACY: one by one, from own rows and public numbers (test_isolated_users_count_themselves_and_nobody_else)
        joined = (items >= self.min_items) & within(means, _REACH * own.pair_radius)
        counts = neighbor_counts(means, own.pair_radius, joined)
        absent = own.n_users - len(means)  # each its own only neighbor
        if absent < 0:
            # PRIVACY: n is bounded (test_more_users_than_the_filter_is_for_are_refused)
            raise SequenceError(
                f"users must be at most {own.n_users} in a step (got {len(means)})"
            )
        if not self._test.passes(Fraction(int(counts.sum()) + absent, own.n_users), generator):
            return self._halt()
        weights = ramp_weights(counts, ramp_start(own.n_users), own.ramp_end)
        # PRIVACY: an isolated user has weight 0, its row is not read (test_non_finite_users_never_reach_the_mean)
        mean = weighted_mean(means, torch.where(joined, weights, 0.0))
        if self.noise_multiplier:
            add_normal_(mean, self.noise_std, generator)
        return self._released(mean)

    def _halt(self) -> Release:
        still = torch.zeros(self._dim, device=self._device)
        return self._released(still)._replace(halted=True, still=True)

    def prepare(self, generator: Source) -> None:
        """Draws the noisy threshold."""
        self._test.start(generator)

    def lose(self, step: int, *, halted: bool) -> bool:
        """Notes a test whose answer is lost, and whether it was a halt."""
        return self._test.lose(step + 1, halted=halted)

    # -- state --------------------------------------------------------------------------------------------------------

    def settings(self) -> dict[str, Any]:
        """Returns the fixed numbers."""
        return self._named(
            "noise_multiplier",
            "min_items",
            filter=repr(self.filter),
        )

    def state(self) -> SecretState:
        """Returns the state of the test, with the noise of its threshold."""
        return SecretState(self._test.state())

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on from a saved state; drops an open batch. Raises SequenceError for an earlier one of this run."""
        self.discard()
        self._test.restore(state)

    def metrics(self) -> dict[str, float]:
        """Returns noise_std: public."""
        return {"noise_std": self.noise_std} if self._shapes else {}
