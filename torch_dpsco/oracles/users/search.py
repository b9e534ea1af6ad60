"""The filter of users after a private search for its pair radius: the first release chooses tau.

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

Source: docs/proofs/user_level.md#search-for-the-pair-radius; `mechanisms.exponential`.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torch_dpsco import _validate as check
from torch_dpsco.accounting.analysis.svt import concentration_score_sensitivity
from torch_dpsco.accounting.designs import Design, Draw
from torch_dpsco.accounting.events import REPLACE_ONE, Pure, Sequential
from torch_dpsco.algorithms.user_numbers import PairRadiusSearch
from torch_dpsco.errors import SequenceError, UtilityWarning
from torch_dpsco.mechanisms.exponential import draw, score_law
from torch_dpsco.oracles.base import Charge, Release
from torch_dpsco.oracles.users.filtered import Filter, UserFiltered
from torch_dpsco.rng import Source
from torch_dpsco.rows import Points, neighbor_counts
from torch_dpsco.secret import SecretState

_MOST_USERS = 2**26  # n^2 < 2^53
_SPAN = 1024.0  # of radii that are counted at once


def search_law(totals: Sequence[int], search: PairRadiusSearch, n_users: int) -> NDArray[np.int64]:
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
        >>> oracle = UserSearched(search, Filter(n_users=8, score_floor=7.0, ramp_end=6), 0.5, steps=5, **numbers)
        >>> oracle.open([torch.zeros(1)])
        >>> oracle.observe(GradBatch([DenseBlock(torch.arange(8.0)[:, None] / 8)]), users=torch.arange(8))
        >>> oracle.release(torch.Generator().manual_seed(0)).still, 1.0 < oracle.pair_radius < 1.4
        (True, True)
    """

    def __init__(
        self,
        search: PairRadiusSearch,
        filter: Filter,
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
        if absent < 0:  # PRIVACY: n is bounded (test_more_users_than_the_search_is_for_are_refused)
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
