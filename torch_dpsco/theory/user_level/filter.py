"""The plan of a filtered phase, its guarantee, and the clip that it must beat.

A plan cannot claim more than it proves: sensitivity, failure and delta are computed from what the mechanism does, and
the constructor refuses a delta below them. Mechanism, for at most T queries on all n users:

    pass iff s + nu_t >= theta + rho,   rho ~ Lap(b1) once, nu_t ~ Lap(b2) per query;
    on a pass release g + N(0, noise_std^2 I); else halt for ever.

Let H = theta - margin. A pass although both scores are below H is a bad one, of probability at most beta over the run;
it is a function of the pair of data sets and the transcript. Otherwise the run is an AboveThreshold run of
epsilon_svt = D/b1 + 2 D/b2, D = 2(n - 1)/n, interleaved with T Gaussians of the sensitivity proved in
`sensitivity`. Hence delta(epsilon) = delta_pair + (1 + e^epsilon) beta (+ T zeta where membership is random). The
factor of beta is a reserve: a ledger that knows failures of kind "transcript" charges beta alone.

All this is about real numbers. Whoever computes distances and means in floating point enlarges radii and noise by its
rounding errors, in proportion, so that the plan's ratio of noise and sensitivity stays (`oracles.users.filtered`).

A filter must beat clipping users' gradients: g = (1/n) sum_j x_j min(1, C/|x_j|) moves by 2C/n when a user is replaced
and by C/(qn) when one is added to Poisson samples with the fixed divisor qn. No test, no failure, no halt.

The filter has less noise than full-batch clipping at C if C > `break_even_clip`: a mean gradient several times the
largest distance of honest users. Near an optimum the mean gradient vanishes, and clipping wins.

Source: docs/proofs/user_level.md#guarantee-of-a-filtered-run, docs/proofs/user_level.md#clipped-means-of-users,
docs/proofs/user_level.md#when-the-filter-wins.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from torch_dpsco import _validate as check
from torch_dpsco.accounting.analysis.gaussian import gaussian_mu
from torch_dpsco.accounting.analysis.svt import (
    above_threshold_epsilon,
    bad_pass_probability,
    concentration_score_sensitivity,
    laplace_difference_tail,
    svt_gaussian_delta,
)
from torch_dpsco.errors import ConditionError
from torch_dpsco.theory.user_level.sensitivity import (
    bernoulli_sensitivity,
    filter_coefficient,
    filter_coefficient_two_radius,
    ramp_start,
)

FILTERS = ("same", "two", "paper_corrected")
_UP = 1 + 1e-14


@dataclass(frozen=True, kw_only=True)
class UserFilterPlan:
    """What one filtered phase does, and the (epsilon, delta) that it therefore has.

    Args:
        n_users: n >= 4, public: replacing a user does not change it.
        steps: T >= 1, queries planned and charged; a halt earns no refund.
        pair_radius: tau > 0, in the units of the rows.
        filter: "same", "two" (radius 2 tau for the filter), or "paper_corrected": that of "two" with random membership.
        threshold: theta, in (0, n] as the score s is.
        threshold_scale: b1 > 0, Laplace scale of the threshold.
        query_scale: b2 > 0, Laplace scale of each test.
        score_floor: H < theta, below which a pass counts as failure.
        ramp_end: b, integer in ((n+1)/2, n-1].
        noise_std: > 0, std per coordinate of the noise on the mean.
        epsilon: > 0, claimed for the whole phase.
        delta: in (0, 1), claimed; refused if below `delta_at(epsilon)`.
        coupling_failure: zeta of a step, for random membership; 0 for the other filters.
        typical_score: public guess of s, for `halt_probability`; default n.

    Raises:
        ConditionError: nothing is proved for these numbers, or less than claimed.
        ValueError: an argument is out of range.

    Guarantee:
        (epsilon, delta)-DP for the replacement of one USER (all rows of one; n public), for any rows and adaptive
        queries. Charge AboveThreshold(threshold_scale, query_scale, score_sensitivity), T Gaussians of noise_std and
        `sensitivity`, Failure(`failure`, "transcript") and, per step, a coupling failure of `step_failure`, when the
        phase opens. Nothing is claimed for add_remove.

    Example:
        >>> plan = UserFilterPlan(n_users=10**4, steps=100, pair_radius=1.0, filter="same", threshold=9500.0,
        ...     threshold_scale=10.0, query_scale=20.0, score_floor=9000.0, ramp_end=7500, noise_std=0.05, epsilon=1.0,
        ...     delta=1e-6)
        >>> round(plan.epsilon_svt, 4), round(plan.sensitivity * 10**4, 2), plan.delta_at(1.0) < 1e-6
        (0.4, 5.2, True)
    """

    n_users: int
    steps: int
    pair_radius: float
    filter: str
    threshold: float
    threshold_scale: float
    query_scale: float
    score_floor: float
    ramp_end: int
    noise_std: float
    epsilon: float
    delta: float
    coupling_failure: float = 0.0
    typical_score: float | None = None

    def __post_init__(self) -> None:
        check.choice(FILTERS, filter=self.filter)
        ramp_start(check.positive_count(n_users=self.n_users))
        check.positive_count(steps=self.steps)
        check.positive(noise_std=self.noise_std)
        check.positive(threshold_scale=self.threshold_scale)
        check.positive(query_scale=self.query_scale)
        check.positive(epsilon=self.epsilon)
        check.open_interval(0.0, 1.0, delta=self.delta)
        if self.typical_score is not None:
            check.between(0.0, self.n_users, typical_score=self.typical_score)
        if not 0 < check.finite(threshold=self.threshold) <= self.n_users:
            raise ValueError(f"threshold must be in (0, {self.n_users}] (got {self.threshold})")
        random = self.filter == "paper_corrected"
        if (check.nonnegative(coupling_failure=self.coupling_failure) > 0) != random:
            wanted = "> 0" if random else "0"
            raise ValueError(
                f"coupling_failure must be {wanted} for {self.filter!r} (got"
                f" {self.coupling_failure})"
            )
        # PRIVACY: a plan cannot claim less than it proves (test_half_the_noise_or_delta_of_a_plan_is_refused)
        if not (proved := self.delta_at(self.epsilon)) <= self.delta:
            raise ConditionError(
                f"delta must be >= {proved:g}, what is proved at epsilon={self.epsilon:g} (got"
                f" {self.delta:g})"
            )

    @property
    def unit(self) -> str:
        """What is protected."""
        return "user"

    @property
    def adjacency(self) -> str:
        """The neighboring relation of epsilon and delta; n_users is public."""
        return "replace_one"

    @property
    def ramp_start(self) -> float:
        """The a = (n + 1)/2 where weights start."""
        return ramp_start(self.n_users)

    @property
    def margin(self) -> float:
        """The difference theta - H, rounded down."""
        return math.nextafter(self.threshold - self.score_floor, -math.inf)

    @property
    def score_sensitivity(self) -> float:
        """2(n - 1)/n, of the score."""
        return concentration_score_sensitivity(self.n_users)

    @property
    def coefficient(self) -> float:
        """The sensitivity in units of 2 tau."""
        n = self.n_users
        H = self.score_floor
        b = self.ramp_end
        if self.filter == "same":
            return filter_coefficient(n, H, b)
        if self.filter == "two":
            return filter_coefficient_two_radius(n, H, b)
        return bernoulli_sensitivity(n, H, b, self.coupling_failure, 0.5)

    @property
    def sensitivity(self) -> float:
        """L2 sensitivity of the mean at every step that is not a failure, 2 tau times the coefficient."""
        return 2 * self.pair_radius * self.coefficient * _UP

    @property
    def epsilon_svt(self) -> float:
        """Pure epsilon of the tests."""
        return above_threshold_epsilon(
            self.threshold_scale, self.query_scale, self.score_sensitivity
        )

    @cached_property
    def failure(self) -> float:
        """beta, of kind "transcript": a pass although both scores are below H, in T steps."""
        return bad_pass_probability(self.margin, self.steps, self.threshold_scale, self.query_scale)

    @property
    def step_failure(self) -> float:
        """Zeta and the grid of n uniform numbers, of kind "coupling", of EACH step; 0 unless membership is random."""
        return self.coupling_failure + self.n_users * 2.0**-52 if self.coupling_failure else 0.0

    @property
    def mu(self) -> float:
        """sqrt(T) sensitivity / noise_std, of all releases together."""
        return math.sqrt(self.steps) * (self.sensitivity / self.noise_std) * _UP

    def delta_at(self, epsilon: float) -> float:
        """Returns delta_pair + (1 + e^epsilon) beta + T zeta, at most 1."""
        pair = svt_gaussian_delta(epsilon, self.epsilon_svt, self.mu)
        factor = 1 + (math.exp(epsilon) if epsilon < 700 else math.inf)
        return min(
            1.0, (pair + factor * max(self.failure, 1e-300) + self.steps * self.step_failure) * _UP
        )

    def halt_probability(self, score: float | None = None) -> float:
        """Returns a bound on the probability that one of T queries with this score (default `typical_score`) halts."""
        typical = self.n_users if self.typical_score is None else self.typical_score
        margin = check.finite(score=typical if score is None else score) - self.threshold
        return min(
            1.0,
            self.steps * laplace_difference_tail(margin, self.threshold_scale, self.query_scale),
        )


def clipped_sensitivity(
    clip: float, n_users: int, adjacency: str, sample_rate: float = 1.0
) -> float:
    """Returns the L2 sensitivity of the mean of rows clipped at C.

    Args:
        clip: C > 0.
        n_users: n, the divisor over q; public.
        adjacency: "replace_one" (2C/n over q), "add_remove" or "zero_out" (C/n over q; the divisor does not move).
        sample_rate: q in (0, 1].

    Source: docs/proofs/user_level.md#clipped-means-of-users.

    Example:
        >>> clipped_sensitivity(1.0, 100, "replace_one"), clipped_sensitivity(1.0, 100, "add_remove", 0.5)
        (0.02, 0.02)
    """
    kind = check.choice(("replace_one", "add_remove", "zero_out"), adjacency=adjacency)
    users = check.positive_count(n_users=n_users) * check.positive(sample_rate=sample_rate)
    if sample_rate > 1:
        raise ValueError(f"sample_rate must be in (0, 1] (got {sample_rate})")
    return (2 if kind == "replace_one" else 1) * check.positive(clip=clip) / users


def clipping_noise_std(
    n_users: int,
    steps: int,
    epsilon: float,
    delta: float,
    clip: float,
    adjacency: str = "replace_one",
) -> float:
    """Returns the noise of T full-batch means of clipped users' gradients, all of (epsilon, delta) spent on them.

    Source: docs/proofs/user_level.md#when-the-filter-wins.

    Example:
        >>> round(clipping_noise_std(2000, 100, 1.0, 1e-6, 1.0) * 2000)
        84
    """
    sensitivity = clipped_sensitivity(clip, n_users, adjacency)
    return (
        sensitivity
        * math.sqrt(check.positive_count(steps=steps))
        / gaussian_mu(epsilon, delta)
        * (1 + 1e-14)
    )


def break_even_clip(plan: UserFilterPlan) -> float:
    """Returns the C at which full-batch clipping of users needs the noise of the plan, under replace_one.

    Source: docs/proofs/user_level.md#when-the-filter-wins.
    """
    return plan.noise_std / clipping_noise_std(
        plan.n_users, plan.steps, plan.epsilon, plan.delta, 1.0
    )
