"""The filtered mean of a Poisson sample of users, with a new test in every step: no halting, add_remove only.

Of the users in the batch B, N in number, with e_j = #{k in B : |x_j - x_k| > tau}:

    v = (1/N) sum_j e_j;    answer only if N >= N_min and v + N(0, s^2) <= theta
    w_j = clip((a - e_j) / (a - b), 0, 1), a = (N_min - 1)/2;    release sum_j w_j x_j / sum_j w_j + N(0, sigma^2 I)

| user | counted as |
|---|---|
| no rows | not in the batch |
| fewer than min_items rows, NaN, inf, or farther than reach tau from the public center | e_j = N - 1, weight 0 |
| batch below N_min, or test failed | nothing is released in this step; the run continues, and the step is charged |

Given the sample of the others, a user moves v by less than 2 and, in a good step (N >= N_min, the smaller v is at most
V), the mean by at most 2 tau Rp. Test and mean together are one Gaussian mechanism with mu^2 = (2/s)^2 +
(2 tau Rp / sigma)^2, Poisson sampled. A bad step that answers has probability at most Phi((theta - V)/s) + P[Bin(n - 1,
q) < N_min]: batches of N_min - 1 and N_min users are bad together. That is the `transcript` failure of the event: the
others' samples have one law on both sides and can be put into the transcript.

tau may follow the noisy v of earlier steps, tau <- tau exp(kappa (v_noisy/(q n) - target)) within public bounds: sigma
scales along, so that the event is the same in all steps.

No guarantee under replace_one, and none for batches of a fixed size.

Source: docs/proofs/user_level.md#poisson-samples-of-users.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from scipy.special import ndtr
from torch import Tensor

from torch_dpsco import _validate as check
from torch_dpsco._doors import check_fields
from torch_dpsco.accounting.adjacency import ADD_REMOVE, Adjacency
from torch_dpsco.accounting.analysis.binomial import lower_tail
from torch_dpsco.accounting.designs import Design, Draw, Poisson
from torch_dpsco.accounting.events import NonPrivate, PoissonGaussian, Sequential
from torch_dpsco.accounting.stated import Failure, Pure
from torch_dpsco.errors import AdjacencyError, ConditionError, SequenceError
from torch_dpsco.noise import normal
from torch_dpsco.oracles.base import Charge, Release
from torch_dpsco.oracles.users.filtered import FilteredMean, ramp_weights
from torch_dpsco.rng import Source
from torch_dpsco.rows import Points, neighbor_counts
from torch_dpsco.theory.user_level.sensitivity import poisson_filter_coefficient

_UP = 1 + 1e-9  # more than the error of a normal tail


@dataclass(frozen=True)
class PoissonTest:
    """The public numbers of the test, with what they prove.

    Args:
        n_users: n of the design, a public reference; each user is in a batch with rate q = batch_size / n_users.
        batch_size: q n, expected users of a batch.
        least: N_min >= 4, users of a batch that is answered.
        largest_deficiency: V >= 0, up to which the mean is proved to be insensitive.
        threshold: theta of v, in [0, V).
        noise_std: s > 0 of v.
        ramp_end: b, integer in [1, (N_min - 1)/2): missing neighbors up to which the weight is 1.
        users_at_least: public lower bound of the true number of users who have rows; 0 for n_users.
    """

    n_users: int
    batch_size: int
    least: int
    largest_deficiency: float
    threshold: float
    noise_std: float
    ramp_end: int
    users_at_least: int = 0
    coefficient: float = field(init=False, repr=False)  # sensitivity of the mean in units of tau, rounded up

    def __post_init__(self) -> None:
        check_fields(self)
        check.positive_count(n_users=self.n_users)
        check.positive_count(batch_size=self.batch_size)
        check.positive(noise_std=self.noise_std)
        object.__setattr__(self, "users_at_least", check.count(users_at_least=self.users_at_least) or self.n_users)
        if self.batch_size > self.n_users:
            raise ValueError(f"batch_size must be <= n_users={self.n_users} (got {self.batch_size})")
        if not 0 <= self.threshold < self.largest_deficiency:
            raise ConditionError(f"threshold must be in [0, {self.largest_deficiency:g}) (got {self.threshold:g})")
        coefficient = poisson_filter_coefficient(self.least, self.largest_deficiency, self.ramp_start, self.ramp_end)
        object.__setattr__(self, "coefficient", 2 * coefficient)

    @property
    def ramp_start(self) -> float:
        """Missing neighbors from which on the weight is 0: a."""
        return (self.least - 1) / 2

    @property
    def sample_rate(self) -> float:
        """The rate q with which each user is in a batch."""
        return self.batch_size / self.n_users

    @property
    def failure(self) -> float:
        """Probability of a bad step, rounded up."""
        # PRIVACY: both ways to be bad (test_bad_steps_are_as_rare_as_declared)
        wrong = float(ndtr((self.threshold - self.largest_deficiency) / self.noise_std))
        return (wrong + lower_tail(self.least - 1, self.users_at_least - 1, self.sample_rate)) * _UP


@dataclass(frozen=True)
class AdaptiveRadius:
    """How tau follows the noisy deficiency.

    Args:
        target: of v over the batch size, in (0, 1).
        low: least tau, > 0.
        high: largest tau.
        lr: kappa > 0.
    """

    target: float
    low: float
    high: float
    lr: float = 0.2

    def __post_init__(self) -> None:
        check_fields(self)
        check.open_interval(0.0, 1.0, target=self.target)
        check.positive(lr=self.lr)
        if not 1e-40 <= self.low <= self.high <= 1e40:
            raise ValueError(f"low and high must be in [1e-40, 1e40], low first (got {self.low} and {self.high})")

    def moved(self, pair_radius: float, share: float) -> float:
        """Returns the next tau after a noisy share of missing neighbors."""
        off = max(-10.0, min(10.0, self.lr * (share - self.target)))
        return min(max(pair_radius * math.exp(off), self.low), self.high)


class UserPoissonFiltered(FilteredMean):
    """Filtered mean of each Poisson sample of users that passes a test.

    Args:
        test: its public numbers.
        pair_radius: tau, in [1e-40, 1e40]; the first one if it is adapted.
        noise_std: sigma >= 0 for this tau; 0 gives no privacy.
        ids: user ids are in [0, ids); default test.n_users.
        center: public vector, a tensor per parameter; None for 0.
        reach: B in [1, 1e6]: users farther than B tau from the center are isolated.
        min_items: rows that a user must have, public.
        adapt: how tau follows the test; None keeps it.

    Guarantee:
        Unit: user; add_remove. `event` is that of one step, its Poisson sampling of users included: charge it as it is,
        for every step, answered or not. Assumes batches in which each user is with rate q, independently.

    Example:
        >>> test = PoissonTest(1000, 100, least=50, largest_deficiency=5.0, threshold=1.0, noise_std=1.0, ramp_end=12)
        >>> oracle = UserPoissonFiltered(test, pair_radius=1.0, noise_std=0.5)
        >>> oracle.event().events[0].q
        0.1
    """

    _adjacency = ADD_REMOVE

    def __init__(
        self,
        test: PoissonTest,
        pair_radius: float,
        noise_std: float,
        *,
        ids: int | None = None,
        center: Sequence[Tensor] | None = None,
        reach: float = 1000.0,
        min_items: int = 1,
        adapt: AdaptiveRadius | None = None,
    ) -> None:
        ids = test.n_users if ids is None else check.positive_count(ids=ids)
        super().__init__(test.batch_size, ids, center, min_items, exact=True)
        self.test, self.adapt = test, adapt
        self._tau = check.between(1e-40, 1e40, pair_radius=pair_radius)
        if adapt is not None and not adapt.low <= self._tau <= adapt.high:
            raise ValueError(f"pair_radius must be in [{adapt.low:g}, {adapt.high:g}] (got {pair_radius:g})")
        self.reach = check.between(1.0, 1e6, reach=reach)
        self.noise_multiplier = check.nonnegative(noise_std=noise_std) / (test.coefficient * self._tau)
        self._most = 2 * test.batch_size + 65536  # passed with probability below exp(-20000)
        self._answered = 0

    def sensitivity(self, adjacency: Adjacency) -> float:
        """Returns how far one user moves the mean of a good step, rounding included."""
        if adjacency != ADD_REMOVE:
            # PRIVACY: (test_the_poisson_filter_is_charged_under_add_remove_only)
            raise AdjacencyError(f"the filtered mean of a sample has no bound under {adjacency}: use add_remove")
        return self._rounded(self.test.coefficient, self._most, 2)

    def event(self) -> Sequential:
        """Returns the event of one step: a sampled Gaussian for test and mean together, and the failure."""
        if not self.noise_multiplier:
            return Sequential((NonPrivate(),))
        mu = math.hypot(2.0 / self.test.noise_std, 1.0 / self.noise_multiplier)
        return Sequential(
            (
                # PRIVACY: both releases in one number (test_test_and_mean_are_charged_together)
                PoissonGaussian((1.0 - 2.0**-50) / mu, self.test.sample_rate),
                Failure(self.test.failure, "transcript"),
                Pure(0.0, (ADD_REMOVE,)),  # free, and without a guarantee under other adjacencies
            )
        )

    def charge(self, design: Design, draw: Draw) -> Charge:
        """Returns what a step is charged: `event`, which includes the sampling of users."""
        if not isinstance(design, Poisson) or design.sample_rate != self.test.sample_rate:
            # PRIVACY: of these samples only (test_the_poisson_filter_is_charged_for_its_own_samples_only)
            raise AdjacencyError(
                f"design must be Poisson({self.test.batch_size}, {self.test.n_users}), the test's (got {design})"
            )
        return Charge(self.event())

    def release(self, generator: Source) -> Release:
        """Tests the batch; returns its noisy filtered mean, or a release that moves nothing."""
        means, items = self._users.take()
        size = len(means)
        if size > self._most:
            raise SequenceError(f"a logical batch must have at most {self._most} users")
        if size < self.test.least:
            return self._nothing()
        points = Points(means, self._center)
        joined = self._joined(points, items)
        missing = size - neighbor_counts(points, [self.pair_radius], joined)[0]
        # |v - v'| < 2 by more than the rounding of v, for fewer than 2^25 users
        noisy = int(missing.sum()) / size + normal(self.test.noise_std, generator)
        answer = self._nothing()
        if noisy <= self.test.threshold:
            weights = ramp_weights(missing, self.test.ramp_start, self.test.ramp_end)
            answer = self._answer(points, joined, weights, generator)
            self._answered += 1
        if self.adapt is not None:
            # PRIVACY: by the noisy number (test_the_radius_follows_the_noisy_deficiency)
            self._tau = self.adapt.moved(self.pair_radius, noisy / self.batch_size)
        return answer

    def settings(self) -> dict[str, Any]:
        """Returns the fixed numbers."""
        return super().settings() | {"test": repr(self.test), "adapt": repr(self.adapt), "ids": self._users.n_users}

    def state(self) -> dict[str, float]:
        """Returns tau of the next step: public."""
        return {"pair_radius": self.pair_radius}

    def restore(self, state: dict[str, float]) -> None:
        """Goes on with a saved tau; drops an open batch."""
        self.discard()
        low, high = (1e-40, 1e40) if self.adapt is None else (self.adapt.low, self.adapt.high)
        self._tau = check.between(low, high, pair_radius=state["pair_radius"])

    def metrics(self) -> dict[str, float]:
        """Returns tau, noise_std and the number of steps answered: public."""
        return self._metrics(self._answered)
