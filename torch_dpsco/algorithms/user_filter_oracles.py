"""The filtered mean of users: a private test that users agree, then a mean that ignores those who do not.

With x_j the mean of the rows of user j, n users, a pairwise radius tau, and r = tau ("same") or 2 tau ("two"):

    s   = (1/n) #{(j, k) : |x_j - x_k| <= tau}      tested by `AboveThreshold`; below the threshold: halt for good
    f_j = #{k : |x_j - x_k| <= r},    w_j = clip((f_j - a) / (b - a), 0, 1),    a = (n + 1) / 2
    release  sum_j w_j x_j / sum_j w_j + N(0, sigma^2 I)

| user | counted as |
|---|---|
| no rows, or fewer than min_items | isolated: own only neighbor, f_j = 1, weight 0, counted in n |
| NaN, inf, overflow, or farther than reach tau from the public center | isolated |
| at exactly tau from another one | neighbors (<=), decided by the two means alone |
| halted | later steps read no rows and release nothing |

A user moves s by at most 2 (n - 1)/n, since isolated users count themselves, and the mean by at most the coefficient of
`algorithms.user_numbers` wherever one of the two scores is at least H. A pass where both are below H has
probability at most beta over a run; that is the `transcript` failure of the event. Rounding is covered: indicators are
exact functions of two users (`rows.neighbors`), the score is a fraction, and `sensitivity` holds the errors of the
weighted mean.

Differs from the paper in: 1. deterministic weights by default ("paper_corrected" samples users, with valid constants);
2. scales for the true sensitivity of s, and noise for a proved one; 3. one test object for the run, halting for good;
4. isolated users instead of aborts; 5. tau is a pairwise radius.

Source: Asi and Liu 2023, Algorithm 2; docs/proofs/user_level.md#guarantee-of-a-filtered-run.

The filter of users after a private search for its pair radius: the first release chooses tau.

With tau_i the candidates, n users, T_i = #{(j, k) : |x_j - x_k| <= tau_i} among finite users, everybody else counted
once, and T_{-1} = n, the least possible:

    s_i = distance of t from [T_{i-1}, T_i],    t = round(n target);    P(i) ~ exp(-(epsilon / (4 (n - 1))) s_i)

and tau = tau_i * widening. Candidate i answers for the cell (tau_{i-1}, tau_i], so that distances that concentrate,
with T from n to n^2 between two candidates, are found.

Sensitivity: T_i = B_i + 1 + 2 a_i, where B_i is of the n - 1 other users and 0 <= a_i <= n - 1 counts the neighbors of
this one among them. A replaced user moves each T_i by at most 2 (n - 1), not all of them equally; the distance of a
point from an interval moves by at most as much as the end that moves more, so that s_i moves by at most 2 (n - 1).
All scores are integers below n^2 < 2^53.

| user | counted in the search |
|---|---|
| no rows, fewer than min_items, NaN, inf, overflow | itself, at each candidate |
| at exactly a candidate from another one | a neighbor there (<=) |
| far from the center | like any other: `reach` needs tau, and isolates from the first filtered mean on |

With |T_i - t| for a score, where no candidate is near t, all candidates above the distances would be equally good.

Source: docs/proofs/user_level.md#search-for-the-pair-radius; `algorithms.mechanisms`.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torch_dpsco import _validate as check
from torch_dpsco.accounting.analysis.svt import concentration_score_sensitivity
from torch_dpsco.accounting.designs import Design, Draw
from torch_dpsco.accounting.events import (
    REPLACE_ONE,
    Adjacency,
    Failure,
    Gaussian,
    NonPrivate,
    Pure,
    Repeat,
    Sequential,
)
from torch_dpsco.algorithms.mechanisms import AboveThreshold, draw, score_law
from torch_dpsco.algorithms.user_numbers import (
    PairRadiusSearch,
    bernoulli_sensitivity,
    filter_coefficient,
    filter_coefficient_two_radius,
    ramp_start,
)
from torch_dpsco.algorithms.user_oracles import UserMean
from torch_dpsco.errors import AdjacencyError, ConditionError, SequenceError, UtilityWarning
from torch_dpsco.noise import SecretState, Source, add_normal_, uniform
from torch_dpsco.rows import GradBatch, Points, mean_rounding, neighbor_counts
from torch_dpsco.step.oracle import Charge, Release, split_like

_UNIT = 2.0**-53


def ramp_weights(counts: Tensor, none: float, full: float) -> Tensor:
    """Returns clip((counts - none) / (full - none), 0, 1) in float64."""
    return ((counts.double() - none) / (full - none)).clamp_(0.0, 1.0)


def weighted_mean(points: Points, weights: Tensor) -> Tensor:
    """Returns sum_j w_j y_j / sum_j w_j in float64, 0 if all weights are 0: (D,).

    Differences from one of the points are averaged, so that the error is relative to how far apart they are.

    Args:
        points: n rows.
        weights: (n,) float64, >= 0; rows of weight 0 are not read.
    """
    index = weights.nonzero().squeeze(1)
    total = torch.zeros(points.dim, dtype=torch.float64, device=weights.device)
    if not len(index):
        return total
    base = points.read(index[:1])[0]
    for part, tile in points.tiles(index):
        total.addmv_(tile.sub_(base).t(), weights[part])
    return base.add_(total.div_(weights[index].sum()))


@dataclass(frozen=True)
class UserFilter:
    """Which users count, and how far one of n can move their mean.

    Args:
        n_users: n >= 4, public.
        score_floor: H, score from which on the bound holds.
        ramp_end: b, number of neighbors from which on the weight is 1.
        kind: "same" (radius tau), "two" (2 tau), or "paper_corrected": 2 tau, and users enter with probability w_j.
        coupling_failure: zeta in (0, 1) of a step, for "paper_corrected" only.

    Raises:
        ConditionError: H is too small for a bound.
        ValueError: b or another number is out of range.
    """

    n_users: int
    score_floor: float
    ramp_end: int
    kind: str = "same"
    coupling_failure: float = 0.0
    coefficient: float = field(
        init=False, repr=False
    )  # sensitivity of the mean in units of tau, rounded up

    def __post_init__(self) -> None:
        check.choice(("same", "two", "paper_corrected"), filter=self.kind)
        if self.kind == "paper_corrected":
            check.open_interval(0.0, 1.0, coupling_failure=self.coupling_failure)
        elif check.nonnegative(coupling_failure=self.coupling_failure):
            raise ValueError(
                f"coupling_failure must be 0 for {self.kind!r} (got {self.coupling_failure})"
            )
        object.__setattr__(self, "coefficient", self._bound())

    def _bound(self) -> float:
        n = self.n_users
        floor = self.score_floor
        end = self.ramp_end
        if self.kind == "same":
            return 2 * filter_coefficient(n, floor, end)
        if self.kind == "two":
            return 2 * filter_coefficient_two_radius(n, floor, end)
        return bernoulli_sensitivity(n, floor, end, self.coupling_failure, 1.0)

    @property
    def radii(self) -> tuple[float, ...]:
        """Radii of the score and, if it is another one, of the filter, in units of tau."""
        return (1.0,) if self.kind == "same" else (1.0, 2.0)

    @property
    def failure(self) -> float:
        """Probability per step that the sampled users differ by more than the bound allows, for neighbors coupled."""
        # the uniform numbers have 53 bits
        return self.coupling_failure + self.n_users * 2.0**-52 if self.coupling_failure else 0.0

    def weights(self, counts: Tensor, generator: Source) -> Tensor:
        """Returns the weights of users with these numbers of neighbors."""
        weights = ramp_weights(counts, ramp_start(self.n_users), self.ramp_end)
        if self.kind != "paper_corrected":
            return weights
        return (uniform((len(weights),), generator).to(weights.device) < weights).double()


class UserFiltered(UserMean):
    """Tested and filtered mean of all users in each of at most `steps` steps.

    Args:
        filter: which users count, with n and H.
        pair_radius: tau, in [1e-40, 1e40], public.
        noise_std: sigma >= 0, std of the noise on the released mean; 0 gives no privacy. It is enlarged by the
            rounding errors (see `noise_std`), so that the event is that of the numbers given here.
        steps: T >= 1.
        threshold: theta > H of the score.
        threshold_scale: b1 > 0.
        query_scale: b2 > 0.
        center: public vector from which users are measured, a tensor per parameter; None for 0.
        reach: B in [1, 1e6]: users farther than B tau from the center are isolated.
        min_items: rows that a user must have, public.
        ids: user ids are in [0, ids); default n_users. More than n_users for a phase on some of the users.

    Raises:
        ConditionError: the threshold is not above H.
        ValueError: a number is out of range.

    Guarantee:
        Unit: user, all rows of one; replace_one, n public. Event: `phase_event`, once, before the first release; later
        releases of the run are free, and a new oracle is charged again. Users are not sampled. Assumes that a
        user's rows do not depend on other users.

    Example:
        >>> chosen = UserFilter(n_users=8, score_floor=7.0, ramp_end=6)
        >>> oracle = UserFiltered(chosen, 1.0, 0.0, steps=5, threshold=7.2, threshold_scale=0.01, query_scale=0.01)
        >>> oracle.open([torch.zeros(1)])
        >>> from torch_dpsco.rows import DenseBlock
        >>> oracle.observe(GradBatch([DenseBlock(torch.arange(8.0)[:, None] / 8)]), users=torch.arange(8))
        >>> oracle.release(torch.Generator().manual_seed(0)).mean[0].item()
        0.4375
    """

    def __init__(
        self,
        filter: UserFilter,
        pair_radius: float,
        noise_std: float,
        *,
        steps: int,
        threshold: float,
        threshold_scale: float,
        query_scale: float,
        center: Sequence[Tensor] | None = None,
        reach: float = 1000.0,
        min_items: int = 1,
        ids: int | None = None,
    ) -> None:
        n = filter.n_users
        super().__init__(
            n, n if ids is None else check.positive_count(ids=ids), min_items, exact=True
        )
        self._center = _flat(center)
        self.filter = filter
        self._tau: float | None = check.between(1e-40, 1e40, pair_radius=pair_radius)
        self.reach = check.between(1.0, 1e6, reach=reach)
        # PRIVACY: of the very numbers that the ledger is told (test_the_phase_is_charged_for_what_is_drawn)
        self.noise_multiplier = check.nonnegative(noise_std=noise_std) / (
            filter.coefficient * self._tau
        )
        # PRIVACY: 2 (n - 1)/n, not 1 (test_one_user_moves_the_score_by_at_most_its_sensitivity)
        self._test = AboveThreshold(
            threshold,
            threshold_scale=threshold_scale,
            query_scale=query_scale,
            sensitivity=Fraction(2 * (n - 1), n),
            steps=steps,
        )
        if not self._test.threshold > Fraction(filter.score_floor):
            raise ConditionError(
                f"threshold must be > score_floor={filter.score_floor:g} (got {threshold:g})"
            )

    @property
    def pair_radius(self) -> float:
        """Tau: public. Raises SequenceError as long as a search for it has not ended."""
        if self._tau is None:
            raise SequenceError(
                "pair_radius is not known yet: the step of its search comes first"
            )
        return self._tau

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
        tau = self.pair_radius
        nominal = self.filter.coefficient * tau * (1.0 + 8 * (self._users.dim + 16) * _UNIT)
        diameter = 2 * self.filter.radii[-1]
        return nominal + mean_rounding(
            self.filter.n_users, diameter * tau * 1.01, self.reach * tau * 1.01
        )

    @property
    def bad_pass(self) -> float:
        """Bound beta of the probability that a run passes a step whose score is below H."""
        return self._test.bad_pass(self.filter.score_floor)

    def phase_event(self) -> Sequential:
        """Returns what a whole run costs: one noisy test, the Gaussians of all planned steps, and the failures."""
        if not self.noise_multiplier or self.bad_pass >= 1:
            return Sequential((NonPrivate(),))
        mean = Gaussian(self.noise_multiplier, {REPLACE_ONE: 1.0}, self.filter.failure)
        # PRIVACY: all planned steps, since a halt depends on the data (test_a_halt_earns_no_refund)
        return Sequential(
            (
                self._test.event(REPLACE_ONE),
                Repeat(mean, self._test.steps),
                Failure(self.bad_pass, "transcript"),
            )
        )

    def event(self) -> Sequential:
        """Returns the event of all releases of a run."""
        return self.phase_event()

    def charge(self, design: Design, draw: Draw) -> Charge:
        """Returns what all releases of a run are charged, with the first one."""
        return super().charge(design, draw)._replace(covers=self._test.steps)

    # -- one step -----------------------------------------------------------------------------------------------------

    @property
    def halted(self) -> bool:
        """Whether the test has failed, so that nothing more is released: public."""
        return self._test.halted

    def open(self, query: Sequence[Tensor], step: int = 0) -> None:
        """Starts a logical batch; forgets an unfinished one. Raises ValueError for another center's dim."""
        super().open(query, step)
        if self._center is not None and len(self._center) != self._users.dim:
            raise ValueError(
                f"center must have {self._users.dim} numbers, as the query (got"
                f" {len(self._center)})"
            )

    def observe(self, rows: GradBatch, users: Tensor | None = None) -> None:
        """Adds the rows of one physical batch to the sums of their users."""
        if not self.halted:
            super().observe(rows, users)

    def release(self, generator: Source) -> Release:
        """Tests the score; returns the noisy filtered mean, or halts."""
        means, items = self._users.take()
        if self.halted:
            return self._nothing(halted=True)
        points = Points(means, self._center)
        # PRIVACY: one by one, from own rows and public numbers (test_isolated_users_count_themselves_and_nobody_else)
        joined = (items >= self.min_items) & points.within(self.reach * self.pair_radius)
        counts = neighbor_counts(points, self._radii(), joined)
        absent = self.filter.n_users - len(means)  # each its own only neighbor
        if (
            absent < 0
        ):  # PRIVACY: n is bounded (test_more_users_than_the_filter_is_for_are_refused)
            raise SequenceError(
                f"users must be at most {self.filter.n_users} in a step (got {len(means)})"
            )
        if not self._test.passes(
            Fraction(int(counts[0].sum()) + absent, self.filter.n_users), generator
        ):
            return self._nothing(halted=True)
        weights = self.filter.weights(counts[-1], generator)
        # PRIVACY: an isolated user has weight 0, its row is not read (test_non_finite_users_never_reach_the_mean)
        mean = weighted_mean(points, torch.where(joined, weights, 0.0))
        if self.noise_multiplier:
            add_normal_(mean, self.noise_std, generator)
        if self._center is not None:
            mean += self._center
        return Release(split_like(mean.to(self._users.dtype), self._users.shapes))

    def _nothing(self, *, halted: bool = False) -> Release:
        return Release(self._users.zeros(), halted=halted, still=True)

    def _radii(self) -> list[float]:
        tau, *wider = self.filter.radii
        # PRIVACY: two neighbors of one user are neighbors at twice the radius, also as computed
        # (test_neighbors_of_one_user_are_neighbors_at_twice_the_radius)
        more = 1.0 + 4 * (self._users.dim + 16) * _UNIT
        return [tau * self.pair_radius, *(radius * self.pair_radius * more for radius in wider)]

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
            "reach",
            "min_items",
            center=None if self._center is None else self._center.tolist(),
            filter=repr(self.filter),
            pair_radius=self._tau,
            steps=self._test.steps,
            threshold=float(self._test.threshold),
            threshold_scale=self._test.threshold_scale,
            query_scale=self._test.query_scale,
        )

    def state(self) -> SecretState:
        """Returns the state of the test, with the noise of its threshold."""
        return SecretState(self._test.state())

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on from a saved state; drops an open batch. Raises SequenceError for an earlier one of this run."""
        self.discard()
        self._test.restore(state)

    def metrics(self) -> dict[str, float]:
        """Returns tau, noise_std and the number of steps answered: public."""
        if not self._users.shapes:
            return {}
        return {
            "pair_radius": self.pair_radius,
            "noise_std": self.noise_std,
            "answered": float(self._test.asked),
        }


def _flat(center: Sequence[Tensor] | None) -> Tensor | None:
    """Returns a public vector of one tensor per parameter, side by side in float64: (D,); None for 0.

    Raises:
        ValueError: it is not finite.
    """
    if center is None:
        return None
    flat = torch.cat([part.detach().reshape(-1).double() for part in center])
    if not bool(torch.isfinite(flat).all()):
        raise ValueError("center must be finite")
    return flat


_MOST_USERS = 2**26  # n^2 < 2^53
_SPAN = 1024.0  # of radii that are counted at once


def search_law(
    totals: Sequence[int], search: PairRadiusSearch, n_users: int
) -> NDArray[np.int64]:
    """Returns the law of the candidate: of 2^53 equally likely draws, how many choose each one.

    Args:
        totals: T_i of each candidate, integers in [n, n^2].
        search: its public numbers.
        n_users: n in [4, 2^26).

    Guarantee:
        epsilon-DP and of epsilon-bounded range if each total moves by at most 2 (n - 1).

    Example:
        >>> from torch_dpsco.algorithms.user_numbers import pair_radius_search
        >>> law = search_law([8, 8, 64, 64], pair_radius_search(8, 4.0, 1.0, points=4), n_users=8)
        >>> [round(float(share), 3) for share in law / 2**53]
        [0.001, 0.001, 0.701, 0.298]
    """
    target = round(n_users * search.target)
    # PRIVACY: integers, both ends moving by at most 2 (n - 1) (test_no_replaced_user_breaks_epsilon)
    cells = zip([n_users, *totals[:-1]], totals, strict=True)
    scores = [max(lower - target, target - upper, 0) for lower, upper in cells]
    return score_law(scores, 2 * (n_users - 1), search.epsilon)


class UserSearched(UserFiltered):
    """`UserFiltered` whose first release chooses tau and moves nothing; a run has steps + 1 releases.

    With K candidates above the distances, a far too large one has a probability of about K exp(-n epsilon / 40): below
    some 250 / epsilon users the search is not worth its cost.

    Args:
        search: candidates, target, epsilon and widening, from `algorithms.user_numbers.pair_radius_search` for this n.
        filter: which users count, with n and H.
        noise_ratio: sigma / tau >= 0, noise std in units of the radius that will be found; 0 gives no privacy.
        steps: T >= 1 filtered means, after the search.
        threshold: theta > H of the score.
        threshold_scale: b1 > 0.
        query_scale: b2 > 0.
        center: public vector from which users are measured, a tensor per parameter; None for 0.
        reach: B in [1, 1e6]: users farther than B tau from the center are isolated, once tau is known.
        min_items: rows that a user must have, public.
        ids: user ids are in [0, ids); default n_users.

    Raises:
        ConditionError: the threshold is not above H.
        ValueError: a number is out of range, or the search is for another n.

    Guarantee:
        Unit: user, all rows of one; replace_one, n public. Event: `phase_event`, that of the filter and Pure(epsilon)
        for the search, once, before the search; later releases of the run are free. It does not depend on tau. A new
        oracle searches again and is charged again. Users are not sampled. Assumes that a user's rows do not
        depend on other users.

    Example:
        >>> from torch_dpsco.rows import DenseBlock, GradBatch
        >>> from torch_dpsco.algorithms.user_numbers import pair_radius_search
        >>> search = pair_radius_search(8, epsilon=100.0, smallest=0.01)
        >>> numbers = {"threshold": 7.2, "threshold_scale": 0.01, "query_scale": 0.01}
        >>> oracle = UserSearched(search, UserFilter(n_users=8, score_floor=7.0, ramp_end=6), 0.5, steps=5, **numbers)
        >>> oracle.open([torch.zeros(1)])
        >>> oracle.observe(GradBatch([DenseBlock(torch.arange(8.0)[:, None] / 8)]), users=torch.arange(8))
        >>> oracle.release(torch.Generator().manual_seed(0)).still, 1.0 < oracle.pair_radius < 1.4
        (True, True)
    """

    def __init__(
        self,
        search: PairRadiusSearch,
        filter: UserFilter,
        noise_ratio: float,
        *,
        steps: int,
        threshold: float,
        threshold_scale: float,
        query_scale: float,
        center: Sequence[Tensor] | None = None,
        reach: float = 1000.0,
        min_items: int = 1,
        ids: int | None = None,
    ) -> None:
        super().__init__(
            filter,
            1.0,
            check.nonnegative(noise_ratio=noise_ratio),
            steps=steps,
            threshold=threshold,
            threshold_scale=threshold_scale,
            query_scale=query_scale,
            center=center,
            reach=reach,
            min_items=min_items,
            ids=ids,
        )
        self._tau = None
        self.search = search
        self._choices = _choices(search, filter.n_users)
        search_law(
            [filter.n_users] * len(search.candidates), search, filter.n_users
        )  # its checks, before rows come

    @property
    def searched(self) -> bool:
        """Whether tau is chosen."""
        return self._tau is not None

    def phase_event(self) -> Sequential:
        """Returns what a whole run costs: that of the filter, and the search."""
        # PRIVACY: the same before and after, whatever tau (test_the_event_does_not_depend_on_what_is_found)
        return Sequential(
            (*super().phase_event().events, Pure(self.search.epsilon, (REPLACE_ONE,)))
        )

    def charge(self, design: Design, draw: Draw) -> Charge:
        """Returns what the search and all later releases of a run are charged, with the search."""
        # PRIVACY: (test_a_run_is_charged_once)
        charge = super().charge(design, draw)
        return charge._replace(covers=charge.covers + 1)

    def release(self, generator: Source) -> Release:
        """Chooses tau, with a mean of 0 that is `still`; later returns the noisy filtered mean, or halts.

        Warns if the choice is an end of the grid: a function of the private choice only.
        """
        if self.searched or self.halted:
            return super().release(generator)
        means, items = self._users.take()
        choice = draw(
            search_law(self._totals(means, items), self.search, self.filter.n_users), generator
        )
        self._tau = self._choices[choice]
        self._warn_at_end(choice)
        return self._nothing()

    def _totals(self, means: Tensor, items: Tensor) -> list[int]:
        """Returns T_i of each candidate."""
        points = Points(means, self._center)
        absent = self.filter.n_users - len(means)
        if (
            absent < 0
        ):  # PRIVACY: n is bounded (test_more_users_than_the_search_is_for_are_refused)
            raise SequenceError(
                f"users must be at most {self.filter.n_users} in a step (got {len(means)})"
            )
        # PRIVACY: those left out count themselves, not 0 (test_no_replaced_user_breaks_epsilon)
        joined = items >= self.min_items
        counts = torch.cat(
            [
                neighbor_counts(points, part, joined).sum(1)
                for part in _parts(self.search.candidates)
            ]
        )
        return [absent + total for total in counts.tolist()]

    def _warn_at_end(self, choice: int) -> None:
        wrong = {
            0: "smallest is probably too large",
            len(self.search.candidates) - 1: "points are probably too few",
        }
        if choice in wrong:
            warnings.warn(
                f"the private search found pair_radius {self.pair_radius:g} at the end of its grid:"
                f" {wrong[choice]}",
                UtilityWarning,
                stacklevel=3,
            )

    def lose(self, step: int, *, halted: bool) -> bool:
        """Notes a test whose answer is lost; without the radius, which is lost with its search, nothing more can be."""
        return super().lose(step, halted=halted or not self.searched)

    # -- state --------------------------------------------------------------------------------------------------------

    def settings(self) -> dict[str, Any]:
        """Returns the fixed numbers; tau, which is found in the run, is in `state`."""
        return super().settings() | {"pair_radius": None, "search": repr(self.search)}

    def state(self) -> SecretState:
        """Returns tau, which is public, and the state of the test."""
        return SecretState({**super().state(), "pair_radius": self._tau})

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from a saved state; drops an open batch. Raises SequenceError for an earlier one of this run."""
        tau = state["pair_radius"]
        if tau is not None and tau not in self._choices:
            raise ValueError(f"pair_radius must be one that the search can find (got {tau})")
        if self.searched and tau != self._tau:
            # PRIVACY: one charge pays for one search (test_a_search_cannot_be_rolled_back)
            raise SequenceError(
                "state must be a later one of this run of the search: make a new optimizer"
            )
        super().restore(dict(state))
        self._tau = tau

    def metrics(self) -> dict[str, float]:
        """Returns tau, noise_std and the number of means tested, once tau is known: public."""
        return super().metrics() if self.searched else {}

    def __getstate__(self) -> dict[str, Any]:
        # PRIVACY: with tau known, its test would be free (test_a_copy_is_charged_for_a_search_of_its_own)
        return {**self.__dict__, "_tau": None}


def _choices(search: PairRadiusSearch, n_users: int) -> tuple[float, ...]:
    """Returns the possible values of tau, after checks of the search."""
    if n_users >= _MOST_USERS or search.sensitivity != concentration_score_sensitivity(n_users):
        raise ValueError(
            f"search must be for n_users={n_users}, below 2^26: pair_radius_search({n_users}, ...)"
        )
    check.between(0.0, n_users, target=search.target)
    widening = check.positive(widening=search.widening)
    for radius in search.candidates:
        check.between(1e-40, 1e40, candidates=radius)
        check.between(1e-40, 1e40, pair_radius=radius * widening)
    pairs = zip(search.candidates, search.candidates[1:], strict=False)
    if not search.candidates or any(later <= radius for radius, later in pairs):
        raise ValueError("candidates must be increasing, one at least")
    return tuple(radius * widening for radius in search.candidates)


def _parts(radii: Sequence[float]) -> list[list[float]]:
    """Splits increasing radii: with a far larger one, small distances drown in the rounding of the matrix product."""
    parts: list[list[float]] = []
    for radius in radii:
        if not parts or radius > _SPAN * parts[-1][0]:
            parts.append([])
        parts[-1].append(radius)
    return parts
