"""Audits: lower bounds, with stated confidence, on the epsilon of anything that runs on two neighboring inputs.

    run the mechanism on both inputs, many times, in random order
    half of the outputs choose a test: a score, a threshold, and which side is to score high
    the other half counts how often the test says "high" on each side; Clopper-Pearson intervals bound both rates
    (epsilon, delta)-DP bounds the ratio of such rates, so that their bounds bound epsilon

A lower bound above the epsilon that somebody claims refutes the claim. One below it proves nothing: the accounting does
that, an audit finds its bugs. What is audited is the code as it runs: sampling, clipping, noise, update, answer.

`audit` takes a function; `audit_outputs` outputs that are there already, e.g. of a vectorized simulation;
`audit_training` makes the function and the score from a private optimizer and one record, the canary.

Source: Jagielski, Ullman, Oprea 2020 and Nasr et al. 2021 (likelihood-ratio and canary attacks with Clopper-Pearson
intervals).

A canary is one record with a gradient like no other's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from decimal import ROUND_FLOOR, Context
from typing import Any, TypeVar, cast

import numpy as np
import scipy
import torch
from numpy.typing import NDArray
from scipy.linalg import solve_triangular
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector
from torch.utils.data import ConcatDataset, Dataset, Subset, default_collate

from torch_dpsco import _validate as check
from torch_dpsco._validate import typed
from torch_dpsco.accounting.calibrate import rounded_up
from torch_dpsco.accounting.events import ADD_REMOVE, ZERO_OUT, Adjacency
from torch_dpsco.errors import AdjacencyError, SequenceError
from torch_dpsco.rows import GradBatch
from torch_dpsco.rows.attach import attach, first_step_of, is_attached
from torch_dpsco.sampling.loader import to_device
from torch_dpsco.step.checks import require_same_parameters
from torch_dpsco.step.step import PrivateOptimizer

Array = NDArray[np.float64]
Sides = tuple[Array, Array]
_LEAST_TRIALS = 8  # two outputs a side to fit, two to choose, four to test
_CHOICES = 200  # thresholds at either end that are tried, at ranks in geometric progression


@dataclass(frozen=True, kw_only=True)
class LowerBound:
    """What an audit has shown, and what it could have shown.

    Args:
        epsilon_lower: what was audited is not (epsilon, delta)-DP for any smaller epsilon, with the stated confidence.
        delta: at which epsilon is bounded.
        confidence: probability, before the runs, that the bound would be true.
        reach: the bound that as many outcomes would show if all spoke for it; below a claim no audit of this size can
            refute it.
        claimed: epsilon that what was audited reports for itself, if it does.
    """

    epsilon_lower: float
    delta: float
    confidence: float
    reach: float
    claimed: float | None = None

    def contradicts(self, epsilon: float | None = None) -> bool:
        """Returns whether the bound refutes (epsilon, delta)-DP.

        Args:
            epsilon: >= 0, at the audit's delta and adjacency; default the one claimed.
        """
        claim = self.claimed if epsilon is None else epsilon
        if claim is None:
            check.required(by=": nothing audited here made a claim", epsilon=None)
        return self.epsilon_lower > check.nonnegative(epsilon=claim, allow_inf=True)

    def _said(self, mu: str, where: str, counts: str) -> str:
        said = (
            f"With {100 * self.confidence:.6g} % confidence {mu}epsilon is at least"
            f" {rounded_down(self.epsilon_lower)} at delta={self.delta:g} {where}: {counts} (at"
            f" most {rounded_down(self.reach)} could be shown)."
        )
        if self.claimed is None:
            return said
        verdict = "REFUTED" if self.contradicts() else "not refuted"
        return f"{said} The claim of epsilon {rounded_up(self.claimed)} is {verdict}."


@dataclass(frozen=True, kw_only=True)
class Audit(LowerBound):
    """A lower bound on epsilon, and the test that showed it.

    Args:
        trials: runs a side; those that did not choose the test are `tested`.
        tested: outputs a side that were counted.
        threshold: the test says "high" if score > threshold.
        high: the side (0 or 1 of the pair) whose scores are the higher ones.
        hits: high scores among the tested outputs of that side.
        false_hits: high scores among the tested outputs of the other side.
        adjacency: of the pair, if the optimizer named it.
    """

    trials: int
    tested: int
    threshold: float
    high: int
    hits: int
    false_hits: int
    adjacency: Adjacency | None = None

    def __str__(self) -> str:
        pair = f"{self.adjacency} pair" if self.adjacency else "pair"
        counts = (
            f"{self.hits} hits against {self.false_hits} false ones in {self.tested} tests each"
        )
        return self._said("", f"for this {pair}", counts)


def rounded_down(value: float) -> str:
    """Returns a bound in four digits, never more than was shown."""
    # bounds are quoted (test_no_printed_bound_is_rounded_up)
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
    trials = len(candidates[0][0])
    tail = (1.0 - confidence) / 2.0
    half = trials // 2
    tested = trials - half
    choice = max(
        (choose(sides, start, half, delta, tail) for sides in candidates),
        key=lambda choice: choice.bound,
    )
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


def _epsilon_lower(
    hits: NDArray[np.int64], false_hits: NDArray[np.int64], n: int, delta: float, tail: float
) -> Array:
    """Returns for each pair of counts out of n the bound of `audit`, each rate being wrong with probability <= tail."""
    least = scipy.stats.beta.ppf(tail, np.maximum(hits, 1), n - hits + 1)
    low = np.where(hits > 0, least, 0.0)
    high = np.where(
        false_hits < n,
        scipy.stats.beta.isf(tail, false_hits + 1, np.maximum(n - false_hits, 1)),
        1.0,
    )
    ratios = (
        np.maximum(low - delta, 0.0) / high,
        np.maximum(1.0 - high - delta, 0.0) / (1.0 - low),
    )
    return np.asarray(np.log(np.maximum(np.maximum(*ratios), 1.0)))


_LEAST_SPREAD = 1e-6  # relative: outputs without noise get finite scores too


def fitted_scores(first: Array, second: Array, fit: int) -> list[Sides]:
    """Returns a linear discriminant and a Gaussian log likelihood ratio of all outputs, fitted to the first `fit`."""
    with np.errstate(over="ignore", invalid="ignore"):  # found below
        first, second = _whitened(first, second, fit)
        means = first[:fit].mean(axis=0), second[:fit].mean(axis=0)
        variances = [side[:fit].var(axis=0) + _LEAST_SPREAD**2 for side in (first, second)]
        scores = []
        for outputs in (first, second):
            near, far = ((outputs - means[k]) ** 2 / variances[k] for k in (0, 1))
            scores.append((outputs @ (means[1] - means[0]), (near - far).sum(axis=1)))
    _require_finite(*scores[0], *scores[1])
    return list(zip(*scores, strict=True))


def _require_finite(*arrays: Array) -> None:
    if not all(np.isfinite(array).all() for array in arrays):
        raise ValueError(
            "outputs must not be so large that their squares overflow; give audit a score= instead"
        )


def _whitened(first: Array, second: Array, fit: int) -> Sides:
    """Returns the outputs in coordinates whose common variance within a side is about 1, by the first `fit` a side."""
    means = first[:fit].mean(axis=0), second[:fit].mean(axis=0)
    spread = np.concatenate([first[:fit] - means[0], second[:fit] - means[1]])
    scale = np.maximum(spread.std(axis=0), _LEAST_SPREAD * np.abs(means[1] - means[0]))
    _require_finite(scale)
    scale[scale == 0.0] = 1.0
    dim = len(scale)
    root = np.eye(dim)
    if 4 * dim <= fit:  # else too few outputs for a covariance
        spread = spread / scale
        root = np.linalg.cholesky(spread.T @ spread / len(spread) + _LEAST_SPREAD * root)
    sides = [
        solve_triangular(root, ((side - means[0]) / scale).T, lower=True).T
        for side in (first, second)
    ]
    return sides[0], sides[1]


_Input = TypeVar("_Input")


@typed
def audit(
    mechanism: Callable[[_Input], Any],
    pair: Sequence[_Input],
    *,
    delta: float,
    trials: int,
    confidence: float = 0.95,
    score: Callable[[Any], float] | None = None,
    seed: int | None = None,
) -> Audit:
    """Bounds the epsilon of a mechanism from below by running it on two neighboring inputs.

    The runs on both inputs are made, and scored, in one random order, so that neither a state that drifts from run to
    run nor a score that counts its calls looks like a difference between the inputs.

    Args:
        mechanism: mechanism(input) -> output: a number, an array, a tensor, or a module (its parameters). Draws fresh
            noise in every call, independent of the calls before, and leaves its input as it is.
        pair: two neighboring inputs. Which adjacency they are neighbors of is the caller's to know: the bound is about
            that one, and is compared with an epsilon under that one only.
        delta: in [0, 1).
        trials: runs on each of the two, >= 8.
        confidence: in (0, 1). In continuous integration choose it so that a false alarm in any of all the runs to come
            is unlikely, e.g. 1 - 1e-6.
        score: score(output) -> float, larger for one of the sides, e.g. a log likelihood ratio (may be infinite); any
            score is valid, a better one shows more. Default: the better of two fitted to a quarter of the outputs, a
            linear discriminant and the log likelihood ratio of Gaussians with different variances.
        seed: of the order of the runs; not of the mechanism's noise.

    Raises:
        ValueError: an argument is out of range, outputs differ in size or are not finite, a score is NaN.

    Guarantee:
        With probability >= confidence (over the mechanism's noise), `epsilon_lower` is at most the true epsilon at
        `delta` of the mechanism for that pair, in the worse of both directions, whatever the score. Assumes independent
        runs. The result itself is NOT private: use synthetic data, or keep it to yourself.
        Proof. Given the outputs that chose the test, S = {score > threshold} is a fixed event, so that the counts of
        the others are binomial with P(S) and Q(S). Two one-sided Clopper-Pearson bounds, each wrong with probability
        <= (1 - confidence)/2, give P(S) >= t and Q(S) <= f with the stated confidence. (epsilon, delta)-DP of S and of
        its complement demands P(S) <= e^epsilon Q(S) + delta and 1 - Q(S) <= e^epsilon (1 - P(S)) + delta, hence
        epsilon >= log((t - delta)/f) and epsilon >= log((1 - f - delta)/(1 - t)); no further correction is due, because
        both follow from the same two bounds.

    Example:
        >>> import numpy as np
        >>> noise = np.random.default_rng(1)
        >>> found = audit(lambda total: total + noise.normal(), (0.0, 1.0), delta=1e-5, trials=2000, seed=1)
        >>> found.contradicts(4.38), found.contradicts(0.5)  # the truth is 4.377; a sum with less noise would show more
        (False, True)
    """
    require_arguments(delta, trials, confidence)
    if seed is not None and seed < 0:
        raise ValueError(f"seed must be >= 0 (got {seed})")
    if len(pair) != 2:
        raise ValueError(f"pair must hold two inputs (got {len(pair)})")
    found: tuple[list[Any], list[Any]] = [], []
    for side in np.random.default_rng(seed).permutation(np.repeat([0, 1], trials)):
        output = mechanism(pair[side])
        found[side].append(_vector(output) if score is None else _number(score(output)))
    if score is None:
        return audit_outputs(*found, delta=delta, confidence=confidence)
    return judge([(np.array(found[0]), np.array(found[1]))], 0, delta, confidence)


@typed
def audit_outputs(first: Any, second: Any, *, delta: float, confidence: float = 0.95) -> Audit:
    """Bounds epsilon from below by outputs on two neighboring inputs that have been drawn already; see `audit`.

    Args:
        first: (trials,) or (trials, ...) independent outputs on one input, or a likelihood ratio (or another score) of
            each.
        second: the same for the other; as many.
        delta: in [0, 1).
        confidence: in (0, 1).

    Guarantee:
        That of `audit`, if each score is a function of its own output alone.

    Example:
        >>> noise = np.random.default_rng(1).normal(size=(2, 20000))
        >>> print(audit_outputs(noise[0], noise[1] + 1.0, delta=1e-5))  # doctest: +ELLIPSIS
        With 95 % confidence epsilon is at least 2... at delta=1e-05 for this pair: ...
    """
    sides = _matrix("first", first), _matrix("second", second)
    if sides[0].shape != sides[1].shape:
        raise ValueError(
            f"first and second must agree in number and size (got {sides[0].shape} and"
            f" {sides[1].shape})"
        )
    trials = len(sides[0])
    require_arguments(delta, trials, confidence)
    quarter = trials // 4
    return judge(fitted_scores(sides[0], sides[1], quarter), quarter, delta, confidence)


def _matrix(name: str, outputs: Any) -> Array:
    """Returns outputs as (trials, size); raises ValueError unless they are finite numbers of one size."""
    if isinstance(outputs, Tensor):
        outputs = outputs.detach().cpu().double()
    try:
        matrix = np.asarray(outputs, dtype=np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(
            f"{name} must hold numbers of one size (got {check.shown(outputs)})"
        ) from error
    if matrix.ndim == 0:
        raise ValueError(f"{name} must hold one output for each trial (got a single number)")
    if not np.isfinite(matrix).all():
        raise ValueError(
            f"outputs must be finite (got others in {name}); give audit a score= that says what"
            " these are worth"
        )
    return matrix.reshape(len(matrix), math.prod(matrix.shape[1:]))


def _vector(output: Any) -> Array:
    if isinstance(output, nn.Module):
        output = flat(output.parameters())
    if isinstance(output, Tensor):
        output = flat([output])
    try:
        return np.asarray(output, dtype=np.float64).reshape(-1)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"outputs must be numbers, arrays, tensors or modules (got {type(output).__name__}); or"
            " give audit a score="
        ) from error


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """Returns a float64 copy of all entries as one vector on the CPU."""
    return parameters_to_vector(tensor.detach().cpu().double() for tensor in tensors)


def _number(score: Any) -> float:
    try:
        number = float(score)
    except (TypeError, ValueError) as error:
        raise ValueError(f"score must be a number (got {score!r})") from error
    if math.isnan(number):
        raise ValueError("score must not be NaN")
    return number


@typed
def audit_training(
    make: Callable[[], tuple[nn.Module, PrivateOptimizer]],
    dataset: Dataset[Any],
    canary: tuple[Any, Any],
    *,
    loss: Callable[[Any, Any], Any],
    delta: float,
    trials: int,
    other: tuple[Any, Any] | None = None,
    steps: int | None = None,
    confidence: float = 0.95,
    seed: int | None = None,
) -> Audit:
    """Bounds from below the epsilon of whole training runs, and compares it with what the optimizer reports.

    Trains many times on two data sets that differ in one record and scores each run by how far the parameters moved
    along the canary's gradient. Under add_remove the canary is added to the data set; otherwise it takes the place of
    record 0, and `other` does so in the other data set.

    Args:
        make: make() -> (model, private optimizer with an accountant of its own); called for every run. A model that is
            not attached is attached here.
        dataset: of (input, target) pairs; a few synthetic records that move the parameters little are enough.
        canary: (input, target), not batched, with a gradient that is large and like no other record's: one that the
            clip scales down shows most.
        loss: loss(model(input), target) -> scalar tensor, as in `fit`.
        delta: in (0, 1).
        trials: runs a side; bounds above log(trials) are out of reach.
        other: default record 0 itself; under replace_one a canary of the opposite gradient shows most, under zero_out
            it must be a record without gradient. Not for add_remove.
        steps: of each run; default all that the optimizer plans.
        confidence: see `audit`.
        seed: see `audit`.

    Returns:
        The audit, with the optimizer's `adjacency` and the epsilon it reports after a run as `claimed`.

    Raises:
        AdjacencyError: `other` does not go with the optimizer's adjacency.
        SequenceError: make() gives an accountant that has been charged already, or a model and an optimizer that do not
            belong together.
        ValueError: see `audit`; or the canary has no gradient at the starting point.

    Guarantee:
        That of `audit`, for the pair of data sets and the released parameters. The runs are charged to accountants that
        are thrown away: no budget pays for what they show, so that a real data set would be exposed.

    Example:
        >>> import torch, torch_dpsco as dp
        >>> data = torch.utils.data.TensorDataset(torch.zeros(4, 2), torch.ones(4, 1))
        >>> def make():
        ...     model = dp.attach(nn.Linear(2, 1, bias=False))
        ...     plan = dp.HolderSGD.plan(problem=dp.losses.Logistic().problem(bound_x=1.0), noise_multiplier=1.0,
        ...                              lr=0.1, sampling=dp.Full(4), steps=1)
        ...     return model, dp.HolderSGD(model.parameters(), plan)
        >>> canary, other = (torch.tensor([9.0, 0.0]), torch.ones(1)), (torch.tensor([-9.0, 0.0]), torch.ones(1))
        >>> found = audit_training(make, data, canary, other=other, loss=dp.losses.Logistic(), delta=1e-2, trials=40,
        ...                        confidence=1 - 1e-6)
        >>> found.contradicts()
        False
    """
    check.open_interval(0.0, 1.0, delta=delta)
    require_arguments(delta, trials, confidence)
    model, optimizer = _fresh(make)
    pair = _neighbors(dataset, canary, other, optimizer.adjacency)
    direction = _gradient(model, loss, canary)
    if optimizer.adjacency != ADD_REMOVE:
        direction -= _gradient(model, loss, pair[0][0])  # the record that the canary replaces
    if not direction.any():
        raise ValueError(
            "canary must have a gradient of its own at the starting point (got none)"
        )
    direction /= torch.linalg.vector_norm(direction)
    _train(model, optimizer, pair[1], loss, steps)
    claimed = optimizer.accountant.get_epsilon(delta, adjacency=optimizer.adjacency)

    def run(data: Dataset[Any]) -> float:
        model, optimizer = _fresh(make)
        start = flat(_trained(model))
        _train(model, optimizer, data, loss, steps)
        return float((flat(_trained(model)) - start) @ direction)

    found = audit(
        run,
        pair,
        delta=delta,
        trials=trials,
        confidence=confidence,
        score=float,
        seed=seed,
    )
    return replace(found, adjacency=optimizer.adjacency, claimed=claimed)


def _fresh(
    make: Callable[[], tuple[nn.Module, PrivateOptimizer]],
) -> tuple[nn.Module, PrivateOptimizer]:
    model, optimizer = make()
    if not is_attached(model):
        attach(model)
    first_step_of(model).asked = False  # what is audited may do what it likes
    require_same_parameters(model.train(), optimizer)
    if optimizer.steps or len(optimizer.accountant):
        raise SequenceError(
            "make() must return an optimizer that has made no step, with an accountant of its own"
            f" (got {optimizer.steps} steps, {len(optimizer.accountant)} events)"
        )
    return model, optimizer


def _neighbors(
    dataset: Dataset[Any],
    canary: tuple[Any, Any],
    other: tuple[Any, Any] | None,
    adjacency: Adjacency,
) -> tuple[Dataset[Any], Dataset[Any]]:
    size = len(dataset)  # type: ignore[arg-type]
    if adjacency == ADD_REMOVE:
        if other is not None:
            raise AdjacencyError(
                "other must be None under add_remove, where one data set has no canary at all"
            )
        return dataset, _joined(canary, dataset)
    if adjacency == ZERO_OUT and other is None:
        raise AdjacencyError("other must be given under zero_out: a record without gradient")
    if not size:
        raise ValueError(
            f"dataset must hold a record for the canary to take the place of under {adjacency}"
        )
    rest = Subset(dataset, range(1, size))
    return _joined(dataset[0] if other is None else other, rest), _joined(canary, rest)


def _joined(record: tuple[Any, Any], dataset: Dataset[Any]) -> Dataset[Any]:
    return ConcatDataset([cast("Dataset[Any]", [record]), dataset])


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def _gradient(
    model: nn.Module, loss: Callable[[Any, Any], Any], record: tuple[Any, Any]
) -> Tensor:
    device = _trained(model)[0].device
    inputs, targets = to_device(default_collate([record]), device)
    loss(model(inputs), targets).backward()
    return flat(GradBatch.consume(_trained(model)).weighted_sum(torch.ones(1, device=device)))


def _train(
    model: nn.Module,
    optimizer: PrivateOptimizer,
    dataset: Dataset[Any],
    loss: Callable[[Any, Any], Any],
    steps: int | None,
) -> None:
    """Makes the steps and installs the answer: `fit` without its checks, which cost ten times a short run."""
    device = next(model.parameters()).device
    with optimizer:
        for batch in optimizer.loader(
            dataset, steps=optimizer.schedule.steps if steps is None else steps
        ):
            optimizer.zero_grad()
            if optimizer.outstanding_rows:
                inputs, targets = to_device(batch, device)
                loss(model(inputs), targets).backward()
            optimizer.step()
