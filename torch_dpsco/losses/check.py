"""A search for records that break promised constants."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_dpsco._validate import positive_count, typed
from torch_dpsco.errors import MissingConstantError, NotCertifiedError
from torch_dpsco.losses.base import Loss, record_bounds
from torch_dpsco.problem import Problem

_TOLERANCE = 1e-6
_HALVINGS = 40
_CLIMBS = 60
_CHECKED = (
    "holder_constant",
    "grad_at_zero",
    "loss_at_zero",
    "lipschitz",
    "smoothness",
    "exact_grad_bound",
)


@typed
def check_holder(
    loss: Loss,
    problem: Problem,
    *,
    bound_x: float,
    bound_y: float = 1.0,
    trials: int = 1000,
    generator: torch.Generator | None = None,
) -> None:
    """Tries to REFUTE promised constants; it cannot certify them: passing proves nothing, failing proves them wrong.

    Looked for: a Hoelder pair (`holder_exponent`, `holder_constant`) or a `smoothness` that two points break, a loss
    or gradient at 0 above `loss_at_zero` or `grad_at_zero`, a gradient above `lipschitz` or `grad_bound(||w||)`, a
    negative loss (if `loss_at_zero` is promised), and a `derivative` that is not a subgradient of a convex `value`.

    A score loss feels w only through s = w.x, with gradient norm ||x|| |phi'(s)|. All ratios grow with ||x|| and are
    largest for w - w' along x, so that records of norm B and w = s x/B^2 are the worst case in EVERY dimension; the
    search runs over targets and scores. It starts from random pairs at 8 orders of magnitude, pairs mirrored at 0, at
    +-1 and at the target, far points and the rim of the ball. Then it halves every pair 40 times towards the half over
    which the derivative moves more, which finds kinks and steep places, and moves the ends of every pair as long as
    that raises its Hoelder ratio. Excesses under 1e-6, and what only pairs nearer than that show, go unseen.

    Args:
        loss: any `Loss`, also your own; evaluated in float64.
        problem: the promises; those left out are not looked at.
        bound_x: B > 0, finite.
        bound_y: Y > 0, finite; only for losses with target_kind "real".
        trials: number of starting pairs, >= 1.
        generator: source of the pairs on the CPU; None means a fresh one with torch's default seed.

    Raises:
        NotCertifiedError: with constant, promised value, value found and the witness.
        MissingConstantError: if the problem promises nothing that can be checked.
        ValueError: if a bound or `trials` is out of range.

    Guarantee:
        None. No data are used.

    Source:
        docs/proofs/holder.md#constants-of-the-losses.

    Example:
        >>> from torch_dpsco.losses import Absolute
        >>> lipschitz_taken_for_jump = Problem(holder_exponent=0, holder_constant=1)
        >>> check_holder(Absolute(), lipschitz_taken_for_jump, bound_x=1.0)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        torch_dpsco.errors.NotCertifiedError: holder_constant is refuted: promised 1, found 2 at target ...
    """
    bound_x, bound_y = record_bounds(bound_x, bound_y)
    if not any(getattr(problem, name) is not None for name in _CHECKED):
        raise MissingConstantError(
            f"check_holder needs a problem that promises one of {', '.join(_CHECKED)}"
        )
    search = _Search(
        loss,
        problem,
        bound_x,
        bound_y,
        positive_count(trials=trials),
        generator or torch.Generator(),
    )
    search.check_at_zero()
    start = search.starting_pairs()
    for pairs in search.halvings(start):
        search.check_pairs(pairs)
    search.check_points(start)
    search.check_pairs(search.climb(start))


@dataclass(frozen=True)
class _Pairs:
    """Targets (N,) and two score vectors (N, K) each, float64."""

    target: Tensor
    first: Tensor
    second: Tensor


@dataclass(frozen=True)
class _Search:
    loss: Loss
    problem: Problem
    bound_x: float
    bound_y: float
    trials: int
    generator: torch.Generator

    def check_at_zero(self) -> None:
        """Refutes the loss and the gradient at w = 0."""
        target = self._targets()
        zero = torch.zeros(len(target), self.loss.num_scores, dtype=torch.float64)
        pairs = _Pairs(target, zero, zero)
        self._refute("loss_at_zero", self.problem.loss_at_zero, self._value(zero, target), pairs)
        self._refute("grad_at_zero", self.problem.grad_at_zero, self._norm(zero, target), pairs)

    def check_pairs(self, pairs: _Pairs) -> None:
        """Refutes Hoelder constants on pairs, and a derivative that is not a subgradient."""
        if self.problem.holder_exponent is not None:
            ratio = self._ratio(pairs, self.problem.holder_exponent)
            self._refute("holder_constant", self.problem.holder_constant, ratio, pairs)
        self._refute("smoothness", self.problem.smoothness, self._ratio(pairs, 1.0), pairs)
        here = self._value(pairs.first, pairs.target)
        there = self._value(pairs.second, pairs.target)
        predicted = (self._slope(pairs.first, pairs.target) * (pairs.second - pairs.first)).sum(
            1
        )
        rounding = 1e-9 * (1 + here.abs() + there.abs() + predicted.abs())
        self._refute(
            "derivative (a subgradient of a convex loss)",
            rounding,
            here + predicted - there,
            pairs,
        )

    def check_points(self, pairs: _Pairs) -> None:
        """Refutes gradient bounds and the sign of the loss at single points."""
        for score in (pairs.first, pairs.second):
            point = _Pairs(pairs.target, score, score)
            norm = self._norm(score, pairs.target)
            reach = _length(score) / self.bound_x
            inside = reach <= self.problem.radius
            self._refute(
                "lipschitz", self.problem.lipschitz, torch.where(inside, norm, 0), point
            )
            bound = torch.tensor(
                [self._promised_bound(r) for r in reach.tolist()], dtype=torch.float64
            )
            self._refute("grad_bound", bound, norm, point)
            if self.problem.loss_at_zero is not None:
                self._refute(
                    "loss_at_zero (a nonnegative loss)",
                    1e-12,
                    -self._value(score, pairs.target),
                    point,
                )

    def starting_pairs(self) -> _Pairs:
        """Pairs at many scales around the points where the usual losses have kinks, and on the rim of the ball."""
        target = self._targets()
        center, direction = self._centers(target)
        near, far = (direction * self._magnitudes(len(target)) for _ in range(2))
        pairs = [
            (center - near, center + near),
            (center, center + near),
            (center + near, center + far),
        ]
        if math.isfinite(self.problem.radius):
            unit = direction / _length(direction).unsqueeze(1)
            rim = unit * self.problem.radius * self.bound_x * (1 - 1e-12)
            pairs.append((-rim, rim))
        firsts, seconds = zip(*pairs, strict=True)
        return _Pairs(target.repeat(len(pairs)), torch.cat(firsts), torch.cat(seconds))

    def halvings(self, pairs: _Pairs) -> Iterator[_Pairs]:
        """Yields the pairs, then again and again the half of each over which the derivative moves more."""
        for _ in range(_HALVINGS):
            yield pairs
            middle = (pairs.first + pairs.second) / 2
            slope = self._slope(middle, pairs.target)
            left = _length(slope - self._slope(pairs.first, pairs.target))
            right = _length(slope - self._slope(pairs.second, pairs.target))
            keep_left = (left >= right).unsqueeze(1)
            first = torch.where(keep_left, pairs.first, middle)
            pairs = _Pairs(pairs.target, first, torch.where(keep_left, middle, pairs.second))

    def climb(self, pairs: _Pairs) -> _Pairs:
        """Moves both ends of every pair at random, at steps that shrink, as long as the Hoelder ratio grows."""
        exponent = self.problem.holder_exponent
        if exponent is None:
            return pairs
        best = self._ratio(pairs, exponent)
        for i in range(_CLIMBS):
            width = _length(pairs.second - pairs.first).unsqueeze(1) * 0.9**i
            ends = [end + width * self._normal(end.shape) for end in (pairs.first, pairs.second)]
            moved = _Pairs(pairs.target, *ends)
            ratio = self._ratio(moved, exponent)
            better = (ratio > best).unsqueeze(1)
            first = torch.where(better, moved.first, pairs.first)
            pairs = _Pairs(pairs.target, first, torch.where(better, moved.second, pairs.second))
            best = torch.maximum(ratio, best)
        return pairs

    def _ratio(self, pairs: _Pairs, exponent: float) -> Tensor:
        """||g(w) - g(w')|| / ||w - w'||^exponent at ||x|| = bound_x, and 0 for pairs too near to tell."""
        change = _length(
            self._slope(pairs.second, pairs.target) - self._slope(pairs.first, pairs.target)
        )
        distance = _length(pairs.second - pairs.first)
        # Nearer pairs measure the rounding of s - s' and of y - s instead of the loss.
        size = (
            torch.maximum(_length(pairs.first), _length(pairs.second)) + pairs.target.abs() + 1
        )
        ratio = self.bound_x * change / (distance / self.bound_x) ** exponent
        return torch.where(distance > 1e-6 * size, ratio, 0)

    def _targets(self) -> Tensor:
        kind = self.loss.target_kind
        count = self.trials
        if kind == "class":
            return torch.arange(count) % self.loss.num_scores
        ends = 1.0 - 2.0 * (torch.arange(count, dtype=torch.float64) % 2)
        if kind == "sign":
            return ends
        # A third of the targets at each end: the suprema of M, M0 and G sit there.
        interior = 2 * self._uniform(count) - 1
        return self.bound_y * torch.where(torch.arange(count) % 6 < 4, ends, interior)

    def _centers(self, target: Tensor) -> tuple[Tensor, Tensor]:
        count = len(target)
        scores = self.loss.num_scores
        if scores == 1:
            kinks = torch.stack(
                [torch.zeros(count), target, -target, torch.ones(count), -torch.ones(count)], 1
            )
            pick = torch.randint(kinks.shape[1], (count, 1), generator=self.generator)
            return (
                kinks.double().gather(1, pick),
                2.0 * torch.randint(2, (count, 1), generator=self.generator) - 1.0,
            )
        # Two classes in front and the others behind: there the softmax bends most.
        order = self._uniform(count, scores).argsort(1)
        front = (order[:, :2].unsqueeze(2) == torch.arange(scores)).any(1)
        behind = self._magnitudes(count) * torch.randint(2, (count, 1), generator=self.generator)
        direction = torch.zeros(count, scores, dtype=torch.float64)
        direction.scatter_(1, order[:, :1], math.sqrt(0.5)).scatter_(
            1, order[:, 1:2], -math.sqrt(0.5)
        )
        return torch.where(front, 0.0, -behind), direction

    def _magnitudes(self, count: int) -> Tensor:
        return 10 ** (8 * self._uniform(count, 1) - 4)

    def _uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator, dtype=torch.float64)

    def _normal(self, shape: torch.Size) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def _value(self, score: Tensor, target: Tensor) -> Tensor:
        return self.loss.value(self._scores(score), target)

    def _slope(self, score: Tensor, target: Tensor) -> Tensor:
        return self.loss.derivative(self._scores(score), target).reshape(score.shape)

    def _scores(self, score: Tensor) -> Tensor:
        return score.squeeze(1) if self.loss.num_scores == 1 else score

    def _norm(self, score: Tensor, target: Tensor) -> Tensor:
        return self.bound_x * _length(self._slope(score, target))

    def _promised_bound(self, radius: float) -> float:
        try:
            return self.problem.grad_bound(radius)
        except MissingConstantError:
            return math.inf

    def _refute(
        self, name: str, promised: Tensor | float | None, found: Tensor, pairs: _Pairs
    ) -> None:
        if promised is None:
            return
        limit = torch.as_tensor(promised, dtype=torch.float64).expand_as(found)
        # Written so that a NaN counts as refuted.
        wrong = ~(found <= limit * (1 + _TOLERANCE))
        if wrong.any():
            worst = int(
                torch.where(wrong, (found - limit).nan_to_num(math.inf), -math.inf).argmax()
            )
            raise NotCertifiedError(
                f"{name} is refuted: promised {limit[worst].item():.6g}, found"
                f" {found[worst].item():.6g} at target {pairs.target[worst].item():.6g}, scores"
                f" {pairs.first[worst].tolist()} and {pairs.second[worst].tolist()}, ||x|| ="
                f" {self.bound_x}"
            )


def _length(rows: Tensor) -> Tensor:
    length: Tensor = torch.linalg.vector_norm(rows, dim=1)
    return length
