"""The test of an audit, and scores for outputs of any size."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import ROUND_FLOOR, Context

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import solve_triangular
from scipy.stats import beta

from torch_dpsco import _validate as check
from torch_dpsco.accounting.adjacency import Adjacency
from torch_dpsco.accounting.report.figures import rounded_up

Array = NDArray[np.float64]
Sides = tuple[Array, Array]
_LEAST_TRIALS = 8  # two outputs a side to fit, two to choose, four to test
_CHOICES = 200  # thresholds at either end that are tried, at ranks in geometric progression


@dataclass(frozen=True)
class Audit:
    """A lower bound on epsilon, and the test that showed it.

    Args:
        epsilon_lower: the mechanism is not (epsilon, delta)-DP for any smaller epsilon, with the stated confidence.
        delta: at which epsilon is bounded.
        confidence: probability, before the runs, that the bound would be true.
        trials: runs a side; those that did not choose the test are `tested`.
        tested: outputs a side that were counted.
        threshold: the test says "high" if score > threshold.
        high: the side (0 or 1 of the pair) whose scores are the higher ones.
        hits: high scores among the tested outputs of that side.
        false_hits: high scores among the tested outputs of the other side.
        reach: the largest bound that so many trials can show, with a perfect test; below a claim no audit of this
            size can refute it.
        adjacency: of the pair, if the caller or the optimizer named it.
        claimed: epsilon that the audited optimizer reports for itself, if it does.
    """

    epsilon_lower: float
    delta: float
    confidence: float
    trials: int
    tested: int
    threshold: float
    high: int
    hits: int
    false_hits: int
    reach: float
    adjacency: Adjacency | None = None
    claimed: float | None = None

    def contradicts(self, epsilon: float | None = None) -> bool:
        """Returns whether the bound refutes that the mechanism is (epsilon, delta)-DP.

        Args:
            epsilon: >= 0, at the audit's delta and for the adjacency of its pair; default the one claimed.
        """
        claim = self.claimed if epsilon is None else epsilon
        if claim is None:
            raise ValueError("epsilon must be given: nothing audited here made a claim (got None)")
        return self.epsilon_lower > check.nonnegative(epsilon=claim, allow_inf=True)

    def __str__(self) -> str:
        pair = f"this {self.adjacency} pair" if self.adjacency else "this pair"
        said = (
            f"With {100 * self.confidence:.6g} % confidence epsilon is at least {_rounded_down(self.epsilon_lower)} at "
            f"delta={self.delta:g} for {pair}: {self.hits} hits against {self.false_hits} false ones in {self.tested} "
            f"tests each (at most {_rounded_down(self.reach)} could be shown)."
        )
        if self.claimed is None:
            return said
        verdict = "REFUTED" if self.contradicts() else "not refuted"
        return f"{said} The claim of epsilon {rounded_up(self.claimed)} is {verdict}."


def _rounded_down(value: float) -> str:
    # never more than was shown: bounds are quoted (test_no_printed_bound_is_rounded_up)
    return f"{float(Context(prec=4, rounding=ROUND_FLOOR).create_decimal(repr(value))):.4g}"


def require_arguments(delta: float, trials: int, confidence: float) -> None:
    """Raises ValueError unless the arguments that all audits share are in range."""
    if check.nonnegative(delta=delta) >= 1:
        raise ValueError(f"delta must be in [0, 1) (got {delta})")
    if check.positive_count(trials=trials) < _LEAST_TRIALS:
        raise ValueError(f"trials must be >= {_LEAST_TRIALS} a side (got {trials})")
    check.open_interval(0.0, 1.0, confidence=confidence)


def judge(candidates: list[Sides], start: int, delta: float, confidence: float) -> Audit:
    """Chooses score, threshold and side on the outputs from `start` to the half, and tests that choice on the rest."""
    trials, tail = len(candidates[0][0]), (1.0 - confidence) / 2.0
    half = trials // 2
    tested = trials - half
    choice = max((choose(sides, start, half, delta, tail) for sides in candidates), key=lambda choice: choice.bound)
    threshold = np.array([choice.threshold])
    # PRIVACY: judged on outputs that had no say in the choice (test_a_bound_from_the_outputs_that_chose_it_is_false)
    hits, false_hits = (_above(side[half:], threshold) for side in choice.sides)
    return Audit(
        epsilon_lower=float(_epsilon_lower(hits, false_hits, tested, delta, tail)[0]),
        delta=float(delta),
        confidence=float(confidence),
        trials=trials,
        tested=tested,
        threshold=choice.threshold,
        high=choice.high,
        hits=int(hits[0]),
        false_hits=int(false_hits[0]),
        reach=float(_epsilon_lower(np.array([tested]), np.array([0]), tested, delta, tail)[0]),
    )


@dataclass(frozen=True)
class Choice:
    """A test, with the scores of the side that is to be high first; its bound is flattered by the choice."""

    bound: float
    threshold: float
    high: int
    sides: Sides


def choose(scores: Sides, start: int, half: int, delta: float, tail: float) -> Choice:
    """Returns the threshold and the high side with the largest bound on the outputs from `start` to `half`."""
    thresholds = _thresholds(np.concatenate([side[start:half] for side in scores]))
    choices = []
    for high, sides in enumerate([scores, scores[::-1]]):
        hits, false_hits = (_above(side[start:half], thresholds) for side in sides)
        bounds = _epsilon_lower(hits, false_hits, half - start, delta, tail)
        best = int(np.argmax(bounds))
        choices.append(Choice(float(bounds[best]), float(thresholds[best]), high, sides))
    return max(choices, key=lambda choice: choice.bound)


def _thresholds(scores: Array) -> Array:
    """Returns middles of neighboring scores, more of them near both ends, where ratios of rates are largest."""
    values = np.unique(scores)
    if len(values) == 1:
        return values
    with np.errstate(invalid="ignore"):  # between -inf and inf
        middles = values[:-1] / 2 + values[1:] / 2
    middles = np.where(np.isfinite(middles), middles, values[:-1])
    ranks = np.unique(np.geomspace(1, len(middles), _CHOICES).astype(int))
    return np.asarray(middles[np.unique(np.concatenate([ranks - 1, len(middles) - ranks]))])


def _above(scores: Array, thresholds: Array) -> NDArray[np.int64]:
    return np.asarray(len(scores) - np.searchsorted(np.sort(scores), thresholds, side="right"))


def _epsilon_lower(hits: NDArray[np.int64], false_hits: NDArray[np.int64], n: int, delta: float, tail: float) -> Array:
    """Returns for each pair of counts out of n the bound of `audit`, each rate being wrong with probability <= tail."""
    low = np.where(hits > 0, beta.ppf(tail, np.maximum(hits, 1), n - hits + 1), 0.0)
    high = np.where(false_hits < n, beta.isf(tail, false_hits + 1, np.maximum(n - false_hits, 1)), 1.0)
    ratios = np.maximum(low - delta, 0.0) / high, np.maximum(1.0 - high - delta, 0.0) / (1.0 - low)
    return np.asarray(np.log(np.maximum(np.maximum(*ratios), 1.0)))


_LEAST_SPREAD = 1e-6  # relative: outputs without noise get finite scores too


def fitted_scores(first: Array, second: Array, fit: int) -> list[Sides]:
    """Returns a linear discriminant and a Gaussian log likelihood ratio of all outputs, fitted to the first `fit`."""
    with np.errstate(over="ignore", invalid="ignore"):  # found below
        first, second = _whitened(first, second, fit)
        means = first[:fit].mean(axis=0), second[:fit].mean(axis=0)
        variances = [side[:fit].var(axis=0) + _LEAST_SPREAD**2 for side in (first, second)]

        def linear(outputs: Array) -> Array:
            return np.asarray(outputs @ (means[1] - means[0]))

        def gaussian(outputs: Array) -> Array:
            squares = [(outputs - mean) ** 2 / variance for mean, variance in zip(means, variances, strict=True)]
            return np.asarray((squares[0] - squares[1]).sum(axis=1))

        scores = [(score(first), score(second)) for score in (linear, gaussian)]
    _require_finite(*scores[0], *scores[1])
    return scores


def _require_finite(*arrays: Array) -> None:
    if not all(np.isfinite(array).all() for array in arrays):
        raise ValueError("outputs must not be so large that their squares overflow; give audit a score= instead")


def _whitened(first: Array, second: Array, fit: int) -> Sides:
    """Returns the outputs in coordinates whose common variance within a side is about 1, by the first `fit` a side."""
    means = first[:fit].mean(axis=0), second[:fit].mean(axis=0)
    spread = np.concatenate([first[:fit] - means[0], second[:fit] - means[1]])
    scale = np.maximum(spread.std(axis=0), _LEAST_SPREAD * np.abs(means[1] - means[0]))
    _require_finite(scale)
    scale[scale == 0.0] = 1.0
    first, second, spread = (first - means[0]) / scale, (second - means[0]) / scale, spread / scale
    dim = len(scale)
    if 4 * dim > fit:  # too few outputs for a covariance
        return first, second
    root = np.linalg.cholesky(spread.T @ spread / len(spread) + _LEAST_SPREAD * np.eye(dim))
    return solve_triangular(root, first.T, lower=True).T, solve_triangular(root, second.T, lower=True).T
