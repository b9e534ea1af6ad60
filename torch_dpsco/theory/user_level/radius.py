"""How far apart honest users are: rules for the pair radius tau, none of which affects the privacy proof.

tau decides how often the filter halts and how much noise it needs. It must be public: from a Lipschitz bound and the
number of items a user (`pair_radius_iid`), or from a private search on a grid (`pair_radius_search`). tau tuned
on the data without noise is a violation of privacy.

With unequal numbers of items take the smallest admitted one, a public choice and no quantile of the data; users with
fewer are isolated, and `typical_score` is lowered by a PUBLIC bound on their number.

Differs from the paper in: tau is a radius of PAIRS; a ball of radius rho around a center has pairs 2 rho apart
(docs/errata.md, paper 3, E5); the constant is explicit and free of the dimension.

Source: docs/proofs/user_level.md#pair-radius-of-honest-users, docs/proofs/user_level.md#search-for-the-pair-radius.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch_dpsco import _validate as check
from torch_dpsco.accounting.analysis.svt import concentration_score_sensitivity


def pair_radius_iid(lipschitz: float, items_per_user: int, n_users: int, failure: float) -> float:
    """Returns tau within which all pairs of mean gradients lie with probability 1 - failure, at one fixed point.

    tau = min{2G, (G/sqrt m)(sqrt 2 + 2 sqrt(log(n(n-1)/(2 gamma))))}: E|x_j - x_k| <= sqrt(2) G/sqrt(m), bounded
    differences 2G/m in 2m items, union over pairs. For points chosen from the data it is a heuristic.

    Args:
        lipschitz: G > 0, bound on the gradient of an item.
        items_per_user: m >= 1, the smallest admitted number.
        n_users: n >= 2.
        failure: gamma in (0, 1); p_halt/T for a run of T steps.

    Source: docs/proofs/user_level.md#pair-radius-of-honest-users; McDiarmid's inequality.

    Example:
        >>> round(pair_radius_iid(2.5, 400, 100, 0.01), 4)
        1.082
    """
    G = check.positive(lipschitz=lipschitz)
    m = check.positive_count(items_per_user=items_per_user)
    n = check.positive_count(n_users=n_users)
    gamma = check.open_interval(0.0, 1.0, failure=failure)
    if n < 2:
        raise ValueError(f"n_users must be >= 2 (got {n})")
    spread = math.sqrt(2) + 2 * math.sqrt(math.log(n) + math.log(n - 1) - math.log(2 * gamma))
    return min(2 * G, G / math.sqrt(m) * spread)


def pair_radius_of_ball(ball_radius: float) -> float:
    """Returns 2 rho, the largest distance of two points in a ball of radius rho.

    Source: docs/errata.md, paper 3, E5.
    """
    return 2 * check.positive(ball_radius=ball_radius)


def typical_score(n_users: int, isolated: int = 0, share: float = 0.99) -> float:
    """Returns a score below that of honest users when up to `isolated` users have no neighbors.

    Each isolated user takes itself out of n - 1 counts of others and the others out of its own.

    Args:
        n_users: n, public.
        isolated: PUBLIC bound on the number of users without neighbors, never the observed number.
        share: of n that is left among the others.

    Source: docs/proofs/user_level.md#pair-radius-of-honest-users.

    Example:
        >>> typical_score(1000, isolated=20)
        950.0
    """
    n = check.positive_count(n_users=n_users)
    isolated = check.count(isolated=isolated)
    return max(0.0, check.between(0.0, 1.0, share=share) * n - 2 * isolated)


@dataclass(frozen=True, kw_only=True)
class PairRadiusSearch:
    """A private choice of tau: the exponential mechanism on a public grid.

    The utility of a candidate is minus the distance of the target from the scores between the candidate before and
    itself, of sensitivity 2(n-1)/n; a candidate is drawn with weight exp(exponent * utility), and the choice is widened
    by a ratio of the grid (`oracles.UserSearched`). With -|score - target| all candidates above the distances would be
    equally good.

    Args:
        candidates: public radii, increasing.
        target: score that the chosen radius should have.
        sensitivity: of the utility.
        epsilon: of the choice.
        widening: factor for the radius chosen.

    Guarantee:
        epsilon-DP and (epsilon^2/8)-zCDP (bounded range) for the replacement of one user.
    """

    candidates: tuple[float, ...]
    target: float
    sensitivity: float
    epsilon: float
    widening: float

    @property
    def exponent(self) -> float:
        """The factor epsilon / (2 sensitivity), rounded down."""
        return self.epsilon / (2 * self.sensitivity) * (1 - 1e-15)

    @property
    def n_users(self) -> int:
        """The number of users that the sensitivity is of."""
        return round(2 / (2 - self.sensitivity))

    @property
    def overshoot(self) -> float:
        """Bound of the probability that the choice is above all distances, where nothing holds it."""
        return min(
            1.0, len(self.candidates) * math.exp(-self.exponent * (self.n_users - self.target))
        )

    @property
    def rho(self) -> float:
        """The zCDP cost of the choice."""
        return self.epsilon**2 / 8 * (1 + 1e-15)


def pair_radius_search(
    n_users: int, epsilon: float, smallest: float, points: int = 64, ratio: float = 1.25
) -> PairRadiusSearch:
    """Returns the search on smallest * ratio^i, i < points.

    Candidates above all distances are equally good, so that the target t must be far enough below n: the probability
    that one of them is drawn is at most points exp(-epsilon n (n - t) / (4 (n - 1))). With

        t = max(0.9 n, min(0.99 n - 4 log(points)/epsilon, n - 4 log(100 points)/epsilon))

    it is at most 1 % if epsilon n >= 40 log(100 points); see `PairRadiusSearch.overshoot`.

    Args:
        n_users: n, public.
        epsilon: > 0, charged at each search; search once a phase at most.
        smallest: > 0, first candidate; public.
        points: of the grid, >= 2.
        ratio: of the grid, > 1.

    Source: docs/proofs/user_level.md#search-for-the-pair-radius.

    Example:
        >>> search = pair_radius_search(1000, 0.5, 0.01)
        >>> len(search.candidates), round(search.target, 2), round(search.rho, 5)
        (64, 929.89, 0.03125)
    """
    n = check.positive_count(n_users=n_users)
    eps = check.positive(epsilon=epsilon)
    start = check.positive(smallest=smallest)
    count = check.positive_count(points=points)
    ratio = check.positive(ratio=ratio)
    if count < 2 or ratio <= 1:
        raise ValueError(f"points must be >= 2 and ratio > 1 (got {count} and {ratio})")
    target = max(
        0.9 * n, min(0.99 * n - 4 * math.log(count) / eps, n - 4 * math.log(100 * count) / eps)
    )
    return PairRadiusSearch(
        candidates=tuple(start * ratio**i for i in range(count)),
        target=target,
        sensitivity=concentration_score_sensitivity(n),
        epsilon=eps,
        widening=ratio,
    )
