"""AboveThreshold (the sparse vector technique), halting at the first query below its threshold.

    rho ~ Lap(b1) once for the run;    query t passes iff s_t + nu_t >= theta + rho,    nu_t ~ Lap(b2) anew

and the first query that does not pass is the last one that is answered. Only the answers are released.

Privacy of what is computed, not of an idealized version: noises are exact draws of the discrete Laplace law on the grid
of step D / 2^32, D the sensitivity (`laplace`); scores, threshold and noises are fractions, compared exactly. Shift rho
by D: it stays on the grid, costs D / b1, and every query that passed on D passes on its neighbor; shift the nu of the
halting query by 2 D, which costs 2 D / b2. So a run is (D / b1 + 2 D / b2)-DP for any number of adaptive queries.

Accuracy: with g the step, t = scale / g and L ~ Lap(scale) continuous, a draw is below L + g in stochastic order: for
k >= 1, P(draw >= k g) = e^(-k/t) / (1 + e^(-1/t)) <= e^(-(k-1)/t) / 2 = P(L + g >= k g), and for k <= 0 the complement
e^(-(1-k)/t) / (1 + e^(-1/t)) >= e^(-(1-k)/t) / 2. Hence a query that lies m below the threshold passes with at most the
probability of the continuous mechanism at m - 2 g.

Differs from the paper in: 1. the scales are given, for the true sensitivity (docs/errata.md, paper 3, E2); 2. discrete
noise.

Source: docs/proofs/accounting.md#above-threshold; Lyu, Su and Li 2017, algorithm 7.

The exponential mechanism: an integer law for any scores, and one for a quantile on a public geometric grid.

    P(j) ~ exp(-(epsilon / (2 D)) s_j),    D = sensitivity of each score s_j: the lower, the better

For a quantile of private numbers the grid is tau_j = c_min 2^(j/4), c_j = #{i : v_i <= tau_j}, c_{-1} = 0, and

    s_j = distance of rank from [c_{j-1}, c_j],    D = 1

so that point j answers for the values in (tau_{j-1}, tau_j], and s_j is 0 where the quantile is among them. With `rank`
public, each count moves by at most 1, so that the distance does, whether a number is replaced, zeroed, added or
removed. Under add_remove the number of values is private, so that `rank` must be a public quantile times a public
reference size, never times their true number.

| value | counted |
|---|---|
| NaN, +inf | above every grid point |
| zero, subnormal | below every grid point |
| equal to a grid point | below it (<=) |

Differs from the usual form in the score, there |c_j - rank|. Where many values are equal, as gradient norms of a Huber
loss on rows of norm 1 are, no count is near the rank; the points below the pile then lose to all points above it, which
are equally far, and the draw may be anywhere up to c_max.

Differs from the textbook in: 1. the law that is drawn from is a list of integers out of 2^53, so that it can be
compared exactly; 2. it holds a uniform share of 2^-16 and a little less epsilon, by which rounding costs no privacy.

Proof that rounding costs nothing. Let K be the number of points, p the exact law at epsilon' = epsilon - 6 x for the
scores as they are in float64 (exact there: D is for these numbers), and pi = (1 - g) p + g/K with g = 2^-16. Scores
move by at most D, so that ratios of p for neighbors are in e^[-epsilon', epsilon'], within a window of log width
epsilon'. Ratios of the mixtures lie between those of p and 1: they are in the same window, extended to 1 at most.

Computed are l_j = (epsilon' / (2 D)) (s_j - min s), w_j = e^-l_j and w_j / W, W = sum w_j >= 1. With u = 2^-53, l_j is
off by 3 u l_j (quotient, difference, product), whatever D is, since the minimum is taken off before anything is
rounded. That moves p_j by at most 3 u (p_j l_j + p_j sum_k p_k l_k) <= 3 u (1/e + log K), for p_j <= e^-l_j and
sum_k p_k l_k = entropy(p) - log W <= log K. Errors of exp, 8 u each, move p_j by 8 u 2 p_j (1 - p_j) <= 4 u, the sum by
K u, the quotient by u, the mixture by 2 u. What is drawn are differences of partial sums of these K numbers, which add
u each, rounded to integers, u. So points but the last are off by at most (K + 11 + 3 log K) u. The last one has what
the others leave; the same bounds hold for 1 - p_K, which is their sum, with K u for all partial sums: (2 K + 11 +
3 log K) u. As 3 log K <= K + 1, all are within (3 K + 16) u of pi. Relative to pi >= g/K that is
x = (3 K + 16) u K / g, which moves a log ratio by at most 2.1 x and the width of their window by at most 4.2 x.

Proof, also of bounded range: docs/proofs/heavy_tailed.md#private-quantile. Source: McSherry and Talwar 2007; Dong,
Durfee and Rogers 2020.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from torch_dpsco import _validate as check
from torch_dpsco.accounting.analysis.pure import bad_pass_probability
from torch_dpsco.accounting.analysis.rounding import upper
from torch_dpsco.accounting.events import AboveThreshold as AboveThresholdEvent
from torch_dpsco.accounting.events import Adjacency
from torch_dpsco.errors import SequenceError
from torch_dpsco.noise import Source, stream_of
from torch_dpsco.step.exact_noise import draw_laplace

_STEPS = 2**32  # of the grid within the sensitivity
_SPARE = 8  # grid steps by which a bound of bad passes is worse: twice what is needed


class AboveThreshold:
    """One run: a noisy threshold, and at most `steps` answers up to the first "below".

    A copy (deepcopy, pickle) forgets the noisy threshold: it is another run, that must be charged again. `state` keeps
    it, and is as confidential as the data.

    Args:
        threshold: theta, finite.
        threshold_scale: b1 > 0.
        query_scale: b2 > 0.
        sensitivity: D > 0 of every query under the adjacencies that are charged.
        steps: most queries that are answered, >= 1.

    Guarantee:
        `event(adjacencies)`, once for the whole run, and for a copy or a restart again.

    Example:
        >>> import torch
        >>> run = AboveThreshold(8.0, threshold_scale=1e-3, query_scale=1e-3, sensitivity=2, steps=10)
        >>> generator = torch.Generator().manual_seed(0)
        >>> run.passes(9, generator), run.passes(7, generator), run.halted
        (True, False, True)
    """

    def __init__(
        self,
        threshold: float | Fraction,
        *,
        threshold_scale: float,
        query_scale: float,
        sensitivity: float | Fraction,
        steps: int,
    ) -> None:
        check.finite(threshold=threshold)
        check.positive(sensitivity=sensitivity)
        self.threshold = Fraction(threshold)
        self.sensitivity = Fraction(sensitivity)
        self.threshold_scale = check.positive(threshold_scale=threshold_scale)
        self.query_scale = check.positive(query_scale=query_scale)
        self.steps = check.positive_count(steps=steps)
        self._step = self.sensitivity / _STEPS
        self._rho: Fraction | None = None
        self.asked = 0  # queries that were answered: public
        self.halted = False  # whether one was below the threshold: public

    def event(self, *adjacencies: Adjacency) -> AboveThresholdEvent:
        """Returns what a whole run costs under adjacencies for which the sensitivity holds."""
        # PRIVACY: rounded up (test_the_event_is_never_below_the_exact_sensitivity)
        sens = dict.fromkeys(adjacencies, upper(self.sensitivity))
        return AboveThresholdEvent(self.threshold_scale, self.query_scale, sens)

    def bad_pass(self, score: float) -> float:
        """Returns a bound of the probability that some query of a score below `score` passes in a whole run."""
        # PRIVACY: 2 grid steps for the discrete law, and 2^-30 D > 2 g for the rounding of the difference
        # (test_bad_passes_of_the_discrete_law_are_below_the_bound)
        margin = float(self.threshold - Fraction(score) - _SPARE * self._step)
        return bad_pass_probability(margin, self.steps, self.threshold_scale, self.query_scale)

    def passes(self, score: float | Fraction, generator: Source) -> bool:
        """Answers a query; the first False is the last answer.

        Args:
            score: of the private data, exact; moves by at most `sensitivity`.
            generator: of the noise.

        Raises:
            SequenceError: the run has halted, or all its queries are answered.
        """
        if self.halted:
            # PRIVACY: the budget of the run is spent (test_halting_is_permanent)
            raise SequenceError("the run has halted: nothing more may be answered")
        if self.asked >= self.steps:
            raise SequenceError(
                f"all {self.steps} planned queries are answered: plan more steps"
            )
        self.start(generator)
        assert self._rho is not None
        self.asked += 1
        # PRIVACY: fresh for each query, and compared without rounding
        # (test_answers_have_the_probabilities_of_the_exact_integrals)
        nu = draw_laplace(self.query_scale, self._step, generator)
        self.halted = Fraction(score) + nu < self.threshold + self._rho
        return not self.halted

    def start(self, generator: Source) -> None:
        """Draws the noisy threshold, if that was not done; nothing is released by it."""
        if self._rho is None:
            self._rho = draw_laplace(self.threshold_scale, self._step, generator)

    def lose(self, asked: int, *, halted: bool) -> bool:
        """Counts a query that an interrupted run may have answered, and notes whether it was below the threshold.

        The answers of the others are "above": an answer that was not noted before it was shown was not shown. So the
        answers that anybody has seen, before and after, are those of one run with one noisy threshold, and no more
        than `steps`: what `event` pays for.

        Args:
            asked: queries so far, with this one.
            halted: whether it was the last answer.

        Returns:
            Whether the run has halted, as it must where its threshold is not known any more.
        """
        self.asked = self.asked if self.halted else max(self.asked, asked)
        self.halted = self.halted or halted or self._rho is None
        return self.halted

    def state(self) -> dict[str, Any]:
        """Returns integers that a checkpoint must keep. CONFIDENTIAL: it holds the noise of the threshold."""
        noise = None if self._rho is None else int(self._rho / self._step)
        return {
            "threshold_noise": noise,
            "asked": self.asked,
            "halted": self.halted,
            "confidential": True,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from a saved state.

        Raises:
            SequenceError: this run has already answered more than the saved one, or is another one: queries would be
                answered twice by one noisy threshold, which is charged for one halt.
        """
        noise = state["threshold_noise"]
        asked = check.count(asked=state["asked"])
        halted = bool(state["halted"])
        rho = None if noise is None else noise * self._step
        rolled_back = asked < self.asked or (self.halted and not halted)
        if (self.asked or self.halted) and (rolled_back or rho != self._rho):
            # PRIVACY: each return to an earlier state could halt again (test_a_run_cannot_be_rolled_back)
            raise SequenceError(
                "state must be a later one of this run of the noisy test: make a new optimizer"
            )
        self._rho = rho
        self.asked = asked
        self.halted = halted

    def __getstate__(self) -> dict[str, Any]:
        # PRIVACY: two runs with one noisy threshold may halt twice (test_a_copy_is_a_new_run)
        return {**self.__dict__, "_rho": None, "asked": 0}


FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

_RANKS = 2**20  # in a rank: scores are exact
_DRAWS = 2**53  # equally likely draws, split among the grid points
_UNIFORM = 2.0**-16  # share of the uniform law; the margin for rounding divides by it
_MAX_GRID = 4096
_MAX_VALUES = 2**32
_MAX_SCORE = 2.0**53  # integers below it are exact
_SENSITIVITIES = (2.0**-64, 2.0**64)  # no product overflows
_MAX_EPSILON = (
    2.0**16
)  # past that a draw is the best point anyway; the proof's x must exceed the roundings of epsilon


def geometric_grid(c_min: float, c_max: float) -> FloatArray:
    """Returns the public grid c_min 2^(j/4), j = 0, 1, ..., up to c_max.

    Args:
        c_min: least point, > 0.
        c_max: > c_min; no point is above it (up to rounding).

    Raises:
        ValueError: a bound is out of range.

    Example:
        >>> [round(float(tau), 3) for tau in geometric_grid(1.0, 2.0)]
        [1.0, 1.189, 1.414, 1.682, 2.0]
    """
    c_min = check.positive(c_min=c_min)
    c_max = check.positive(c_max=c_max)
    if not c_max > c_min:
        raise ValueError(f"c_max must be > c_min={c_min:g} (got {c_max:g})")
    last = math.floor(4 * (math.log2(c_max) - math.log2(c_min)) + 1e-9)
    return c_min * np.exp2(np.arange(last + 1) / 4)


def score_law(scores: ArrayLike, sensitivity: float, epsilon: float) -> IntArray:
    """Returns the law that is drawn from: of 2^53 equally likely draws, how many choose each point.

    Args:
        scores: (K,) private numbers, the lower the better, |s_j| < 2^53, K <= 4096; exact, so of integers or float64.
        sensitivity: D in [2^-64, 2^64], public: how far one record moves each score, as given here.
        epsilon: > 0.

    Returns:
        (K,) positive integers that add up to 2^53.

    Raises:
        ValueError: a number is out of range, or epsilon is below the margin for rounding (1e-5 and less for up to 200
            points). Keep scores in range by public numbers: the exception tells of them.

    Guarantee:
        epsilon-DP and of epsilon-bounded range, hence (epsilon^2 / 8)-zCDP, for this very law, wherever one record
        moves each score by at most the sensitivity.

    Example:
        >>> (score_law([0, 2, 20], sensitivity=2, epsilon=2.0) / 2**53).round(4).tolist()
        [0.731, 0.2689, 0.0]
    """
    bad = np.asarray(scores, dtype=np.float64)
    if bad.ndim != 1 or not 1 <= len(bad) <= _MAX_GRID:
        raise ValueError(f"scores must hold 1 to {_MAX_GRID} numbers (got shape {bad.shape})")
    if not (np.abs(bad) < _MAX_SCORE).all():
        raise ValueError("scores must be finite and below 2^53")
    size = len(bad)
    unit = check.between(*_SENSITIVITIES, sensitivity=sensitivity)
    # PRIVACY: less than epsilon, for the rounding (test_the_drawn_law_keeps_epsilon_exactly)
    law = _law(bad, _exact_epsilon(epsilon, size) / unit)
    # PRIVACY: no point is so rare that its rounding is large (test_without_the_uniform_share_epsilon_is_broken)
    mixed = (1.0 - _UNIFORM) * law + _UNIFORM / size
    ends = np.minimum(np.floor(np.cumsum(mixed) * _DRAWS), _DRAWS).astype(np.int64)
    ends[-1] = _DRAWS
    return np.diff(ends, prepend=0)


def score_slack(size: int, sensitivity: float, epsilon: float, failure: float) -> float:
    """Returns t: a draw by `score_law` is worse than the best score by more than t with probability <= failure only.

    Args:
        size: K >= 1, number of scores.
        sensitivity: D > 0, as given to `score_law`.
        epsilon: > 0, likewise.
        failure: in (2^-15, 1): the uniform share and rounding have up to 2^-15 of it.

    Raises:
        ValueError: a number is out of range.

    Source: docs/proofs/conformal.md#a-rank-that-is-not-missed
    """
    if check.open_interval(0.0, 1.0, failure=failure) <= 2 * _UNIFORM:
        raise ValueError(
            f"failure must be > {2 * _UNIFORM:.2g}, what the law has at least (got {failure:g})"
        )
    rate = _exact_epsilon(epsilon, check.positive_count(size=size)) / (
        2.0 * check.positive(sensitivity=sensitivity)
    )
    return math.log(size / (failure - 2 * _UNIFORM)) / rate * (1.0 + 2.0**-40)


def _exact_epsilon(epsilon: float, size: int) -> float:
    """Returns the epsilon of the law before rounding."""
    margin = (
        6 * (3 * size + 16) * 2.0**-53 * size * 2.0**16
    )  # 6 x of the proof: what rounding can cost
    if check.positive(epsilon=epsilon) <= 2 * margin:
        raise ValueError(
            f"epsilon must be > {2 * margin:.2g} on a grid of {size} points (got {epsilon:g})"
        )
    return min(float(epsilon), _MAX_EPSILON) - margin


def draw(law: IntArray, generator: Source) -> int:
    """Returns an index drawn by a law of `score_law`. Charges nothing.

    Args:
        law: (K,) integers >= 0 that add up to 2^53.
        generator: of the draw; from `torch_dpsco.noise.noise_generator`.
    """
    return int(np.searchsorted(np.cumsum(law), stream_of(generator).integer(53), side="right"))


def quantile_law(
    values: ArrayLike, grid: ArrayLike, quantile: float, epsilon: float, n: int
) -> IntArray:
    """Returns the law of a quantile: of 2^53 equally likely draws, how many choose each grid point.

    Args:
        values: (m,) private numbers.
        grid: (K,) increasing public numbers, K <= 4096.
        quantile: public target in [0, 1].
        epsilon: > 0.
        n: public (reference) number of values: the target rank is quantile * n - 1/2. It must be m where m is
            public.

    Returns:
        (K,) positive integers that add up to 2^53.

    Raises:
        ValueError: a public argument is out of range, or epsilon is below the margin for rounding.

    Guarantee:
        That of `score_law` under replace_one and zero_out, and under add_remove for a fixed n. Assumes that a record's
        number does not depend on other records.
    """
    points = _points(grid)
    if check.positive_count(n=n) >= _MAX_VALUES:
        raise ValueError(f"n must be < 2^32 (got {n})")
    # PRIVACY: public n: the number of values is private under add_remove (test_the_rank_is_that_of_the_public_size)
    # less 1/2: the r-th smallest value is between ranks r - 1 and r, so that no cell beside its own is as good
    rank = round((check.between(0.0, 1.0, quantile=quantile) * n - 0.5) * _RANKS) / _RANKS
    upper = _counts(np.asarray(values, dtype=np.float64), points)
    lower = np.concatenate([[0], upper[:-1]])
    # PRIVACY: moves by at most 1 with one value (test_no_replacement_breaks_epsilon); exact, since the rank is a
    # multiple of 2^-20 and counts are below 2^32
    return score_law(np.maximum(np.maximum(lower - rank, rank - upper), 0.0), 1.0, epsilon)


def draw_quantile(
    values: ArrayLike,
    grid: ArrayLike,
    quantile: float,
    epsilon: float,
    n: int,
    generator: Source,
) -> float:
    """Returns a grid point near the quantile of the values, drawn by the exponential mechanism. Charges nothing.

    With probability 1 - zeta the target rank is within (2 / epsilon) log(K / zeta) of the counts up to the point before
    and up to the point drawn.

    Args:
        values: (m,) private numbers; NaN and inf count as above every grid point.
        grid: (K,) increasing public numbers.
        quantile: public target in [0, 1].
        epsilon: > 0.
        n: public (reference) number of values.
        generator: of the draw; from `torch_dpsco.noise.noise_generator`.

    Raises:
        ValueError: as `quantile_law`.

    Guarantee: that of `quantile_law`, if the generator's draws are uniform.

    Example:
        >>> import torch
        >>> draw_quantile([1.0] * 90 + [9.0] * 10, [0.5, 2.0, 16.0], 0.8, 5.0, 100, torch.Generator().manual_seed(0))
        2.0
    """
    return float(
        _points(grid)[draw(quantile_law(values, grid, quantile, epsilon, n), generator)]
    )


def _points(grid: ArrayLike | Sequence[float]) -> FloatArray:
    points = np.asarray(grid, dtype=np.float64)
    if points.ndim != 1 or not 1 <= len(points) <= _MAX_GRID:
        raise ValueError(f"grid must hold 1 to {_MAX_GRID} numbers (got shape {points.shape})")
    if not np.isfinite(points).all() or not (np.diff(points) > 0).all():
        raise ValueError("grid must hold finite increasing numbers")
    return points


def _counts(values: FloatArray, points: FloatArray) -> IntArray:
    """Returns #{values <= point}; NaN sorts last, after inf."""
    # PRIVACY: NaN moves each count by at most 1, like any number (test_what_is_not_a_number_counts_as_above)
    return np.searchsorted(np.sort(values.ravel()), points, side="right")


def _law(scores: FloatArray, epsilon: float) -> FloatArray:
    weights = np.exp(-(epsilon / 2) * (scores - scores.min()))
    law: FloatArray = weights / weights.sum()
    return law
