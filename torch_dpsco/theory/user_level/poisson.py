"""The filter on Poisson samples of users, tested at every step: add_remove, for many users.

A batch B keeps each user with probability q. e_j counts the users of B farther than tau from x_j (an isolated one has
e_j = N - 1 and weight 0), v is their mean; adding a user moves v by less than 2, upwards, or less than 1, downwards.

    skip if N = |B| < n_min;  test v + N(0, ss^2) <= theta_v;
    on a pass release g + N(0, noise_std^2 I); on a fail release nothing for this step and CONTINUE.

Given the others' sample, a step is a joint Gaussian of norm mu_step = sqrt((2/ss)^2 + (sensitivity/noise_std)^2): a
Poisson-subsampled Gaussian of noise multiplier 1/mu_step, charged at every step, tested or skipped. Failures: a pass
although min(v(B), v(B+u)) > V, or N < n_min (where one side may run and the other not),

    beta = T [ Phibar((V - theta_v)/ss) + P[Bin(n - 1, q) < n_min] ],

a function of the pair and the transcript once the others' samples are put into it. Calibration reserves (1 + e^eps)
beta. Not for batches of a fixed size: their proof uses several partner batches at once; nor is the test of the whole
run (`user_filter`) amplified by sampling.

Source: docs/proofs/user_level.md#poisson-samples-of-users.
"""

from __future__ import annotations

import dataclasses
import math
from functools import cached_property

import scipy
from scipy.special import log_ndtr, ndtri_exp

from torch_dpsco import _validate as check
from torch_dpsco.accounting.analysis.binomial import lower_tail
from torch_dpsco.accounting.analysis.pld import pld_delta
from torch_dpsco.accounting.analysis.pld_laws import PoissonLoss
from torch_dpsco.errors import AdjacencyError, ConditionError, InfeasibleError
from torch_dpsco.theory.user_level.sensitivity import best_poisson_ramp_end, poisson_filter_coefficient

SCORE_SENSITIVITY = 2.0
_UP = 1 + 1e-14
_TAIL_UP = 1 + 1e-9  # more than the error of a normal tail


def poisson_step_mu(score_sensitivity: float, score_noise_std: float, noise_ratio: float) -> float:
    """Returns sqrt((D/ss)^2 + 1/z^2), the mu of score and mean released together, rounded up.

    Args:
        score_sensitivity: D >= 0; 2 for the mean deficiency.
        score_noise_std: ss > 0.
        noise_ratio: z > 0, noise std of the mean over its sensitivity.

    Example:
        >>> round(poisson_step_mu(2.0, 12.5, 7.5), 6)
        0.208273
    """
    score = check.nonnegative(score_sensitivity=score_sensitivity) / check.positive(score_noise_std=score_noise_std)
    return math.hypot(score, 1 / check.positive(noise_ratio=noise_ratio)) * _UP


def poisson_underflow(n_users: int, sample_rate: float, n_min: int) -> float:
    """Returns P[Bin(n - 1, q) < n_min], rounded up: the others of a user are too few.

    Args:
        n_users: n >= 1, or a public lower bound.
        sample_rate: q in [0, 1].
        n_min: >= 0.

    Example:
        >>> 3.4e-7 < poisson_underflow(1750, 0.25, 350) < 3.5e-7
        True
    """
    n, q = check.positive_count(n_users=n_users), check.between(0.0, 1.0, sample_rate=sample_rate)
    return lower_tail(check.count(n_min=n_min) - 1, n - 1, q)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoissonFilterPlan:
    """Public numbers of a run on Poisson samples of users; what is charged follows from them.

    Args:
        n_users: n, or a public lower bound: it enters the probability of small batches only.
        batch_size: q n >= 1, expected users of a batch.
        steps: T >= 1.
        pair_radius: tau > 0.
        n_min: smallest batch that is answered.
        threshold: theta_v of the test on the mean deficiency.
        deficiency: V > theta_v: a pass above it on both sides is a failure.
        score_noise_std: ss > 0.
        ramp_end: b, up to which weights are 1; they reach 0 at (n_min - 1)/2.
        noise_std: > 0, of the mean.

    Raises:
        ConditionError: nothing is proved for these numbers.

    Guarantee:
        Each step is a Poisson-subsampled Gaussian of multiplier `noise_multiplier` and rate q, for a user added or
        removed, except for `failure`, of kind "transcript", of all steps. In real numbers, as `UserFilterPlan`.
    """

    n_users: int
    batch_size: int
    steps: int
    pair_radius: float
    n_min: int
    threshold: float
    deficiency: float
    score_noise_std: float
    ramp_end: int
    noise_std: float

    def __post_init__(self) -> None:
        _rate(self.n_users, self.batch_size)
        check.positive_count(steps=self.steps)
        check.finite(threshold=self.threshold)
        check.positive(score_noise_std=self.score_noise_std)
        if check.positive(deficiency=self.deficiency) <= self.threshold:
            raise ValueError(f"deficiency must be > threshold={self.threshold:g} (got {self.deficiency:g})")
        check.positive(noise_std=self.noise_std)
        if self.failure >= 1 or not math.isfinite(self.step_mu):  # reads and checks the rest
            raise ConditionError(f"failure must be < 1 (got {self.failure:g}): n_min or the threshold is too high")

    @property
    def unit(self) -> str:
        """What is protected."""
        return "user"

    @property
    def adjacency(self) -> str:
        """The neighboring relation."""
        return "add_remove"

    @property
    def sample_rate(self) -> float:
        """The q = batch_size / n_users with which each user is in a batch."""
        return _rate(self.n_users, self.batch_size)

    @property
    def ramp_start(self) -> float:
        """The a = (n_min - 1)/2, the deficiency from which weights are 0."""
        return (self.n_min - 1) / 2

    @property
    def coefficient(self) -> float:
        """Rp, in units of 2 tau."""
        return poisson_filter_coefficient(self.n_min, self.deficiency, self.ramp_start, self.ramp_end)

    @property
    def sensitivity(self) -> float:
        """L2 sensitivity of the mean at every step that is not a failure, 2 tau times the coefficient."""
        return 2 * self.pair_radius * self.coefficient * _UP

    @property
    def step_mu(self) -> float:
        """The mu of one step, given that the user is sampled."""
        return poisson_step_mu(SCORE_SENSITIVITY, self.score_noise_std, self.noise_std / self.sensitivity / _UP)

    @property
    def noise_multiplier(self) -> float:
        """1/mu_step, rounded down: what an accountant is given, with `sample_rate`, for each of `steps`."""
        return 1 / (self.step_mu * _UP)

    @cached_property
    def failure(self) -> float:
        """beta, of kind "transcript"."""
        passing = math.exp(float(log_ndtr((self.threshold - self.deficiency) / self.score_noise_std)))
        return self.steps * (passing + poisson_underflow(self.n_users, self.sample_rate, self.n_min)) * _TAIL_UP

    def delta_at(self, epsilon: float) -> float:
        """Returns delta of T subsampled Gaussians plus (1 + e^epsilon) beta, at most 1."""
        check.nonnegative(epsilon=epsilon)
        factor = 1 + (math.exp(epsilon) if epsilon < 700 else math.inf)
        return min(
            1.0, _sampled_delta(self.sample_rate, self.noise_multiplier, self.steps, epsilon) + factor * self.failure
        )


def poisson_filter_plan(
    *,
    n_users: int,
    batch_size: int,
    steps: int,
    epsilon: float,
    delta: float,
    pair_radius: float,
    typical_deficiency: float = 0.0,
    skip_probability: float = 1.35e-3,
    failure_share: float = 0.1,
    adjacency: str = "add_remove",
) -> PoissonFilterPlan:
    """Returns the plan of least noise among score noises, (epsilon, delta)-DP for a user added or removed.

    Args:
        n_users: n, public, or a public lower bound of it.
        batch_size: q n, expected users of a batch.
        steps: T.
        epsilon: > 0.
        delta: in (0, 1).
        pair_radius: tau.
        typical_deficiency: public guess of v, users of a batch that are far from a typical one.
        skip_probability: in (0, 1/2), that a step with this v fails its test.
        failure_share: part of delta for (1 + e^epsilon) beta, half of it for small batches, in (0, 1).
        adjacency: "add_remove"; for "replace_one" use the filter on all users.

    Raises:
        AdjacencyError: another adjacency.
        InfeasibleError: no score noise works; names n, q, T and epsilon.

    Guarantee: that of the plan, at most (epsilon, delta) with failures reserved at (1 + e^epsilon) beta.

    Source: docs/proofs/user_level.md#poisson-samples-of-users.
    """
    if check.choice(("replace_one", "zero_out", "add_remove"), adjacency=adjacency) != "add_remove":
        raise AdjacencyError("Poisson samples of users are proved for add_remove; for replace_one use calibrate_filter")
    rate = _rate(n_users, batch_size)
    T, eps = check.positive_count(steps=steps), check.positive(epsilon=epsilon)
    delta = check.open_interval(0.0, 1.0, delta=delta)
    share = check.open_interval(0.0, 1.0, failure_share=failure_share)
    skip = check.open_interval(0.0, 0.5, skip_probability=skip_probability)
    typical = check.nonnegative(typical_deficiency=typical_deficiency)
    each = share * delta / (1 + math.exp(eps)) / (2 * T) / (1 + 1e-6)
    n_min = _largest_minimum(n_users, rate, each)
    joint = _noise_multiplier(rate, T, eps, (1 - share) * delta)
    plans = []
    for ratio in (1.05 * 1.15**i for i in range(40)):
        score_std = SCORE_SENSITIVITY * joint * ratio
        threshold = typical - score_std * float(ndtri_exp(math.log(skip)))
        limit = threshold - score_std * float(ndtri_exp(math.log(each)))
        noise_ratio = joint / math.sqrt(1 - ratio**-2) * (1 + 1e-9)
        try:
            best = best_poisson_ramp_end(n_min, limit)
        except ConditionError:
            break  # the deficiency only grows
        sensitivity = 2 * check.positive(pair_radius=pair_radius) * best.coefficient * _UP
        plans.append(
            PoissonFilterPlan(
                n_users=n_users,
                batch_size=batch_size,
                steps=T,
                pair_radius=pair_radius,
                n_min=n_min,
                threshold=threshold,
                deficiency=limit,
                score_noise_std=score_std,
                ramp_end=best.ramp_end,
                noise_std=sensitivity * noise_ratio,
            )
        )
    if not plans:
        raise InfeasibleError(
            f"no filter on Poisson samples is proved private for n_users={n_users}, batch_size={batch_size}, "
            f"steps={T}, epsilon={eps:g}: batches of >= {n_min} users are too small; use more users or a larger rate"
        )
    return min(plans, key=lambda plan: plan.noise_std)


def _largest_minimum(n_users: int, sample_rate: float, failure: float) -> int:
    """Returns the largest n_min with `poisson_underflow` <= failure."""
    n, q = check.positive_count(n_users=n_users), check.between(0.0, 1.0, sample_rate=sample_rate)
    n_min = max(0, int(scipy.stats.binom.ppf(failure, n - 1, q)))
    while n_min > 0 and poisson_underflow(n, q, n_min) > failure:
        n_min -= 1
    while n_min < n and poisson_underflow(n, q, n_min + 1) <= failure:
        n_min += 1
    return n_min


def _rate(n_users: int, batch_size: int) -> float:
    n, size = check.positive_count(n_users=n_users), check.positive_count(batch_size=batch_size)
    if size > n:
        raise ValueError(f"batch_size must be <= n_users={n} (got {size})")
    return size / n


def _sampled_delta(sample_rate: float, noise_multiplier: float, steps: int, epsilon: float) -> float:
    found = pld_delta([(PoissonLoss(sample_rate, noise_multiplier), steps)], epsilon)
    return 1.0 if found is None else found.delta


def _noise_multiplier(sample_rate: float, steps: int, epsilon: float, delta: float) -> float:
    """Returns a noise multiplier whose T subsampled Gaussians are (epsilon, delta)-DP, to 0.1 % of the least."""
    low, high = 0.0, 1.0
    while _sampled_delta(sample_rate, high, steps, epsilon) > delta:
        low, high = high, 2 * high
        if high > 1e9:
            raise InfeasibleError(f"no noise makes {steps} steps at sample_rate={sample_rate:g} private enough")
    while low == 0 or high > low * 1.001:
        middle = (low + high) / 2 if low == 0 else math.sqrt(low * high)
        if middle < 1e-3:
            return high
        low, high = (low, middle) if _sampled_delta(sample_rate, middle, steps, epsilon) <= delta else (middle, high)
    return high
