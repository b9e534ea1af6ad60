"""Audit of one training run: secret coins put canaries into the data, and the released model is asked which ones.

Under (epsilon, delta)-DP hardly more guesses are right than coins of bias e^epsilon / (1 + e^epsilon) would be; under
mu-GDP, which says more about the training, fewer are.

Source: Steinke, Nasr, Jagielski 2023 (privacy auditing with one training run); Mahloujifar, Melis, Chaudhuri 2024
(auditing f-differential privacy in one run). The correction for delta is our own, docs/proofs/audit.md.

Canaries and the score that every loss gives are for any training loop; `check_training` checks a whole script.
"""

from __future__ import annotations

import math
import os
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, cast

import numpy as np
import scipy
import torch
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Dataset

from torch_dpsco import _validate as check
from torch_dpsco._validate import typed
from torch_dpsco.accounting.analysis.gaussian import gaussian_epsilon
from torch_dpsco.accounting.calibrate import rounded_up
from torch_dpsco.audits.repeated import LowerBound, rounded_down
from torch_dpsco.diagnosis import doctor
from torch_dpsco.errors import SequenceError
from torch_dpsco.sampling.loader import to_device

_LARGEST = 64.0  # no audit shows more
_HALVINGS = 60
_ROUNDING = 1e-9  # of a probability; sums of the recursion are good to 1e-12

Family = Literal["any", "gaussian"]


@dataclass(frozen=True, kw_only=True)
class OneRunResult(LowerBound):
    """A lower bound on epsilon from the guesses of one run, under add_remove.

    Args:
        canaries: coins tossed.
        guesses: canaries that were guessed about.
        correct: guesses that were right.
        mu_lower: in the family "gaussian": the training is not mu-GDP for any smaller mu; epsilon_lower is that of
            Gaussian noise of this mu.
    """

    canaries: int
    guesses: int
    correct: int
    mu_lower: float | None = None

    def __str__(self) -> str:
        mu = ""
        if self.mu_lower is not None:
            mu = f"mu is at least {rounded_down(self.mu_lower)} and, for such noise, "
        counts = (
            f"{self.correct} of {self.guesses} guesses about {self.canaries} canaries are right"
        )
        return self._said(mu, "under add_remove", counts)


def _chance(correct: int, guesses: int, canaries: int, epsilon: float, delta: float) -> float:
    """Returns a bound on the probability of so many right guesses under (epsilon, delta)-DP."""
    coin = 1.0 / (1.0 + math.exp(-epsilon))
    missing = np.arange(1, correct + 1)
    masses = scipy.stats.binom.pmf(correct - missing, guesses, coin)
    # PRIVACY: delta pays for guesses that are right beyond the coins (test_delta_is_paid_for)
    left = (
        canaries * delta - np.concatenate([[0.0], np.cumsum(missing * masses)[:-1]])
        if correct
        else np.zeros(0)
    )
    return float(
        scipy.stats.binom.sf(correct - 1, guesses, coin)
        + np.clip(left / missing, 0.0, masses).sum()
    )


@typed
def epsilon_of_guesses(
    correct: int, guesses: int, canaries: int, *, delta: float, confidence: float = 0.95
) -> float:
    """Returns the lower bound on epsilon that `correct` right guesses about `canaries` fair coins show.

    Args:
        correct: in [0, guesses].
        guesses: in [1, canaries]; fixed before the run.
        canaries: >= 1, each in the data or not by a fair coin of its own.
        delta: in [0, 1).
        confidence: in (0, 1).

    Raises:
        ValueError: an argument is out of range.

    Guarantee:
        With probability >= confidence the bound is at most the true epsilon at `delta` under add_remove
        (docs/proofs/audit.md).
    """
    _require(correct, guesses, canaries, confidence)
    if check.nonnegative(delta=delta) >= 1:
        raise ValueError(f"delta must be in [0, 1) (got {delta})")
    return _largest(
        lambda epsilon: _chance(correct, guesses, canaries, epsilon, delta) <= 1.0 - confidence
    )


@typed
def mu_of_guesses(
    correct: int, guesses: int, canaries: int, *, confidence: float = 0.95
) -> float:
    """Returns the lower bound on mu that `correct` right guesses about `canaries` fair coins show.

    Args:
        correct: in [0, guesses].
        guesses: in [1, canaries]; fixed before the run.
        canaries: >= 1, each in the data or not by a fair coin of its own.
        confidence: in (0, 1).

    Raises:
        ValueError: an argument is out of range.

    Guarantee:
        If the training is mu-GDP under add_remove, the bound is at most mu with probability >= confidence
        (docs/proofs/audit.md#gaussian-differential-privacy).
    """
    _require(correct, guesses, canaries, confidence)
    return _largest(
        lambda mu: (
            _least_total(correct, guesses, canaries, mu, 1.0 - confidence) > 1.0 + _ROUNDING
        )
    )


def _least_total(correct: int, guesses: int, canaries: int, mu: float, tail: float) -> float:
    """Returns a lower bound on P(W >= 0) if P(W >= correct) >= tail under mu-GDP; above 1 it cannot be."""
    right = tail * correct / canaries
    wrong = tail * (guesses - correct) / canaries
    for count in range(correct - 1, -1, -1):
        # PRIVACY: no more wrong guesses than mu-GDP demands (test_true_mu_is_refuted_no_more_often_than_stated)
        more = float(ndtr(ndtri(right) - mu)) - wrong
        if more <= 0.0 or right > 1.0:
            break
        right = right + more * count / (guesses - count)
        wrong = wrong + more
    return (right + wrong) * canaries / guesses


def _require(correct: int, guesses: int, canaries: int, confidence: float) -> None:
    check.positive_count(canaries=canaries)
    if not 1 <= guesses <= canaries:
        raise ValueError(f"guesses must be in [1, canaries], here {canaries} (got {guesses})")
    if not 0 <= correct <= guesses:
        raise ValueError(f"correct must be in [0, guesses], here {guesses} (got {correct})")
    check.open_interval(0.0, 1.0, confidence=confidence)


def _largest(refuted: Callable[[float], bool]) -> float:
    """Returns the end of what is refuted, from 0 up, rounded down."""
    low = 0.0
    high = _LARGEST
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low


@typed
class OneRunAudit:
    """Canaries, each of which is in the training data or not by a secret fair coin.

    Train once, by any loop, on `dataset(base)`; score each canary by what was released alone, higher if it looks like
    one that was in; `result(scores)` opens the coins.

    Args:
        canaries: records like those of the data set.
        guess_in: how many of the highest scores are guessed to have been in; default a quarter of the canaries.
        guess_out: how many of the lowest are guessed to have been out; default as many. Both are fixed here, before
            the run, so that nothing is chosen by its outcome.

    Raises:
        ValueError: no canaries, or more guesses than canaries.

    Guarantee:
        `epsilon_of_guesses`, if the scores are a function of what training released, with no look at the coins.
        The result is not private with respect to the canaries, which must not be anybody's records.
    """

    def __init__(
        self,
        canaries: Sequence[Any],
        *,
        guess_in: int | None = None,
        guess_out: int | None = None,
    ) -> None:
        quarter = -(-len(canaries) // 4)
        self.guess_in = quarter if guess_in is None else check.count(guess_in=guess_in)
        self.guess_out = self.guess_in if guess_out is None else check.count(guess_out=guess_out)
        if not 1 <= self.guess_in + self.guess_out <= len(canaries):
            raise ValueError(
                f"guess_in + guess_out must be in [1, number of canaries], here {len(canaries)}"
                f" (got {self.guess_in} + {self.guess_out})"
            )
        self.canaries = list(canaries)
        self._coins = np.array([secrets.randbits(1) for _ in self.canaries], dtype=bool)
        self._look = threading.Lock()  # taken once, by one thread
        self._process = os.getpid()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        # PRIVACY: a copy would open the same coins again (test_an_audit_is_opened_by_no_copy)
        raise SequenceError(
            "an audit must not be copied or pickled: its coins are opened once; hand on"
            " dataset(base), or make a new OneRunAudit and train again"
        )

    @typed
    def dataset(self, base: Dataset[Any]) -> Dataset[Any]:
        """Returns the base followed by the canaries whose coins say so; the same ones at every call."""
        included = [
            canary for canary, coin in zip(self.canaries, self._coins, strict=True) if coin
        ]
        return ConcatDataset([base, cast("Dataset[Any]", included)]) if included else base

    def result(
        self,
        scores: Any,
        *,
        delta: float,
        confidence: float = 0.95,
        family: Family = "any",
        claimed: float | None = None,
    ) -> OneRunResult:
        """Returns the bound that the guesses show; once, because a second choice of scores would have to be paid.

        Args:
            scores: (number of canaries,) finite or infinite, not NaN.
            delta: in [0, 1); > 0 in the family "gaussian".
            confidence: in (0, 1).
            family: "gaussian" bounds mu, for trainings that claim to be mu-GDP, as full batches with Gaussian noise
                are; the bound on epsilon is then one for such trainings only, and a higher one.
            claimed: epsilon that the training reports for itself, >= 0.

        Raises:
            ValueError: an argument is out of range, or there is not one score a canary.
            SequenceError: the coins have been opened already, or this is a forked process.
        """
        total = len(self.canaries)
        guesses = self.guess_in + self.guess_out
        values = _numbers(scores, total)
        check.choice(("any", "gaussian"), family=family)
        if claimed is not None:
            check.nonnegative(claimed=claimed, allow_inf=True)

        def bounds(correct: int) -> tuple[float, float | None]:
            counts = (correct, guesses, total)
            if family == "any":
                return epsilon_of_guesses(*counts, delta=delta, confidence=confidence), None
            check.open_interval(0.0, 1.0, delta=delta)
            mu = mu_of_guesses(*counts, confidence=confidence)
            return gaussian_epsilon(mu, delta) * (1.0 - _ROUNDING), mu

        reach, _ = bounds(guesses)
        # PRIVACY: a fork is a copy (test_an_audit_is_opened_by_no_copy)
        if os.getpid() != self._process:
            raise SequenceError(
                "result() must be called in the process that made the audit: coins are opened once"
            )
        # PRIVACY: one look at the coins (test_coins_are_opened_once)
        if not self._look.acquire(blocking=False):
            raise SequenceError(
                "result() opens the coins once; make a new OneRunAudit and train again"
            )
        order = np.argsort(values, kind="stable")
        right_out = np.count_nonzero(~self._coins[order[: self.guess_out]])
        right_in = np.count_nonzero(self._coins[order[total - self.guess_in :]])
        correct = int(right_out + right_in)
        bound, mu = bounds(correct)
        return OneRunResult(
            epsilon_lower=bound,
            delta=float(delta),
            confidence=float(confidence),
            reach=reach,
            claimed=claimed,
            canaries=total,
            guesses=guesses,
            correct=correct,
            mu_lower=mu,
        )


def _numbers(scores: Any, total: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Returns scores as an array; raises ValueError unless there is a number for each canary."""
    try:
        values = np.asarray(scores, dtype=np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(
            f"scores must be {total} numbers, one a canary (got {check.shown(scores)})"
        ) from error
    if values.shape != (total,) or np.isnan(values).any():
        raise ValueError(
            f"scores must be {total} numbers, one a canary, none NaN (got shape {values.shape})"
        )
    return values


_BELOW = 1.0 - 1e-6  # of the bound: rounding must not carry an input over it

Canary = tuple[Tensor, Tensor]


@typed
def canaries(
    count: int, *, like: Sequence[Any], bound_x: float, labels: Sequence[Any], seed: int = 0
) -> list[Canary]:
    """Returns records for an audit: inputs on the bound, orthogonal as far as there are dimensions, random labels.

    Args:
        count: >= 1.
        like: a record (input, target), of which shapes and dtypes alone are taken; the input is a floating tensor.
        bound_x: public bound on the norm of an input as one vector, > 0; it is reached.
        labels: public values to draw targets from, e.g. (-1, 1), (0, 1), range(10).
        seed: of the directions and labels, which are no secrets: the coins are.

    Returns:
        `count` pairs (input, target) of the shapes and dtypes of `like`.

    Raises:
        ValueError: an argument is out of range, or `like` is not such a record.

    Example:
        >>> made = canaries(3, like=(torch.zeros(4), torch.tensor(1.0)), bound_x=2.0, labels=(-1, 1))
        >>> [round(float(x.norm()), 4) for x, _ in made]
        [2.0, 2.0, 2.0]
    """
    check.positive_count(count=count)
    check.positive(bound_x=bound_x)
    if (
        len(like) != 2
        or not isinstance(like[0], Tensor)
        or not like[0].is_floating_point()
        or not like[0].numel()
    ):
        raise ValueError(
            "like must be a record (input, target) whose input is a floating tensor (got"
            f" {type(like).__name__} of {', '.join(type(part).__name__ for part in like)})"
        )
    if not len(labels):
        raise ValueError("labels must have a value (got none)")
    template = like[0]
    target = torch.as_tensor(like[1])
    generator = torch.Generator().manual_seed(check.count(seed=seed))
    dim = template.numel()
    made: list[Tensor] = []
    while len(made) < count:
        raw = torch.randn(
            dim, min(dim, count - len(made)), generator=generator, dtype=torch.float64
        )
        made += list(torch.linalg.qr(raw).Q.T)
    chosen = torch.randint(len(labels), (count,), generator=generator).tolist()
    found = []
    for row, i in zip(made, chosen, strict=True):
        x = (bound_x * _BELOW * row).to(template.dtype).view(template.shape)
        found.append((x, torch.full(target.shape, labels[i]).to(target)))
    return found


@typed
def loss_scores(
    model: nn.Module,
    loss: Callable[..., Any],
    canaries: Sequence[Any],
    *,
    before: nn.Module | None = None,
) -> NDArray[np.float64]:
    """Returns minus the loss of each canary, or by how much training has lowered it: what `result` takes as scores.

    Args:
        model: as trained; in eval mode while it is read, and unchanged.
        loss: loss(outputs, targets) of a batch of one record, a number.
        canaries: all of them, pairs (input, target).
        before: the model as it started, if that is public.

    Returns:
        (number of canaries,) scores, higher where the canary looks like one that was in.

    Raises:
        ValueError: a loss is not one number, or is NaN.
    """
    scores = -_losses(model, loss, canaries)
    return scores if before is None else scores + _losses(before, loss, canaries)


def _losses(
    model: nn.Module, loss: Callable[..., Any], canaries: Sequence[Any]
) -> NDArray[np.float64]:
    for canary in canaries:
        if (
            not isinstance(canary, (tuple, list))
            or len(canary) != 2
            or not isinstance(canary[0], Tensor)
        ):
            raise ValueError(
                f"canaries must be pairs (input tensor, target) (got {type(canary).__name__})"
            )
    modes = {module: module.training for module in model.modules()}
    first = next(model.parameters(), None)
    device = torch.device("cpu") if first is None else first.device
    model.eval()
    try:
        with torch.no_grad():
            pairs = (to_device((x[None], torch.as_tensor(y)[None]), device) for x, y in canaries)
            values = [torch.as_tensor(loss(model(x), y)) for x, y in pairs]
    finally:
        for module, mode in modes.items():
            module.training = mode
    if any(value.numel() != 1 or math.isnan(value.item()) for value in values):
        raise ValueError(
            "loss(outputs, targets) must be one number for a batch of one canary, not NaN"
        )
    return np.array([value.item() for value in values])


@typed
def check_training(
    setup: Callable[..., Any],
    train: Callable[..., Any],
    dataset: Dataset[Any],
    *,
    loss: Callable[..., Any],
    canaries: Sequence[Any],
    delta: float,
    confidence: float = 1.0 - 1e-6,
    family: Family = "any",
    guess_in: int | None = None,
    guess_out: int | None = None,
) -> OneRunResult:
    """Examines a training script by the doctor, runs it once with canaries, and returns what the run gave away.

    Args:
        setup: setup(dataset) returns (model, optimizer, loader, ...), fresh, before the first step.
        train: train(model, optimizer, loader, ...) trains what setup returned, and returns the epsilon that it claims
            at `delta` under add_remove.
        dataset: public or synthetic records; the canaries that are in follow them.
        loss: loss(outputs, targets), the doctor's and that of the scores.
        canaries: records, e.g. from `canaries`.
        delta: in [0, 1), well below (1 - confidence) / len(canaries).
        confidence: in (0, 1); a sound script is refuted with probability 1 - confidence at most.
        family: as `OneRunAudit.result` takes it.
        guess_in: as OneRunAudit takes it.
        guess_out: as OneRunAudit takes it.

    Raises:
        PrivacyError: the doctor found something critical (`Diagnosis.raise_if`).
        ValueError: the doctor found a mistake, an argument is not what it must be, or so few canaries could not refute
            the claim.
    """
    audit = OneRunAudit(canaries, guess_in=guess_in, guess_out=guess_out)
    parts = tuple(setup(audit.dataset(dataset)))
    if len(parts) < 3:
        raise ValueError(
            f"setup must return (model, optimizer, loader, ...) (got {len(parts)} values)"
        )
    model, optimizer, loader = parts[:3]
    doctor(model, loss, loader, optimizer).raise_if()
    claimed = train(*parts)
    if claimed is None:
        raise ValueError("train must return the epsilon that it claims at delta (got None)")
    scores = loss_scores(model, loss, canaries)
    found = audit.result(
        scores,
        delta=delta,
        confidence=confidence,
        family=family,
        claimed=claimed,
    )
    # PRIVACY: a check that cannot fail is none (test_a_claim_that_no_guesses_refute_is_refused)
    if not found.reach > claimed:
        raise ValueError(
            "canaries must be more, or delta or confidence lower, to refute anything: right"
            f" guesses alone show epsilon {rounded_down(found.reach)}, and {rounded_up(claimed)} is"
            f" claimed (got {len(canaries)} canaries)"
        )
    return found
