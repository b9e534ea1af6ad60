"""The means of users' rows, collected over the physical batches of a logical one.

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

from collections.abc import Sequence
from fractions import Fraction
from typing import Any, ClassVar

import torch
from torch import Tensor

from torch_dpsco import _validate as check
from torch_dpsco.accounting.designs import BaseEvent, Design, Draw
from torch_dpsco.accounting.events import (
    REPLACE_ONE,
    Adjacency,
    Failure,
    Gaussian,
    NonPrivate,
    Repeat,
    Sequential,
)
from torch_dpsco.algorithms.mechanisms import AboveThreshold
from torch_dpsco.algorithms.oracles import VectorMean
from torch_dpsco.algorithms.user_numbers import UserFilter, ramp_start
from torch_dpsco.errors import AdjacencyError, SequenceError
from torch_dpsco.noise import SecretState, Source, add_normal_
from torch_dpsco.rows import DenseBlock, GradBatch
from torch_dpsco.rows.neighbors import mean_rounding, neighbor_counts, read, tiles, within
from torch_dpsco.step.oracle import Charge, ClippedMean, Release

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
        return self._test.lose(halted=halted)

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
