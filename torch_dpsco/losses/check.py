"""A search for records that break promised constants."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

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
    count = positive_count(trials=trials)
    search = _Search(loss, problem, bound_x, bound_y, count, generator or torch.Generator())
    target = search.targets()
    zero = torch.zeros(count, loss.num_scores, dtype=torch.float64)
    search.check_at_zero(_Pairs(target, zero, zero))
    start = search.starting_pairs(target)
    search.check_points(start)
    search.check_halves(start)
    search.check_climbs(start)


class _Pairs(NamedTuple):
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

    def check_at_zero(self, pairs: _Pairs) -> None:
        """Refutes the loss and the gradient at w = 0."""
        value = self._value(pairs.first, pairs.target)
        self._refute("loss_at_zero", self.problem.loss_at_zero, value, pairs)
        norm = self.bound_x * _length(self._slope(pairs.first, pairs.target))
        self._refute("grad_at_zero", self.problem.grad_at_zero, norm, pairs)

    def check_points(self, pairs: _Pairs) -> None:
        """Refutes gradient bounds and the sign of the loss at single points."""
        for score in pairs[1:]:
            point = _Pairs(pairs.target, score, score)
            norm = self.bound_x * _length(self._slope(score, pairs.target))
            reach = _length(score) / self.bound_x
            inside = torch.where(reach <= self.problem.radius, norm, 0)
            self._refute("lipschitz", self.problem.lipschitz, inside, point)
            try:
                bounds = [self.problem.grad_bound(r) for r in reach.tolist()]
            except MissingConstantError:
                bounds = [math.inf]
            bound = torch.tensor(bounds, dtype=torch.float64)
            self._refute("grad_bound", bound, norm, point)
            if self.problem.loss_at_zero is not None:
                less = -self._value(score, pairs.target)
                self._refute("loss_at_zero (a nonnegative loss)", 1e-12, less, point)

    def check_halves(self, pairs: _Pairs) -> None:
        """Checks pairs, then again and again the half of each over which the derivative moves more."""
        for _ in range(_HALVINGS):
            target, first, second = pairs
            slope, end = self._check_pairs(pairs)
            middle = (first + second) / 2
            between = self._slope(middle, target)
            keep = (_length(between - slope) >= _length(between - end)).unsqueeze(1)
            first = torch.where(keep, first, middle)
            pairs = _Pairs(target, first, torch.where(keep, middle, second))

    def check_climbs(self, pairs: _Pairs) -> None:
        """Checks pairs whose ends have moved at random, by steps that shrink, while the Hoelder ratio grew."""
        target, *ends = pairs
        width = _length(ends[1] - ends[0]).unsqueeze(1)
        best = torch.zeros(len(target), dtype=torch.float64)
        for k in range(_CLIMBS):
            draws = torch.randn((2, *width.shape), generator=self.generator, dtype=torch.float64)
            moved = [end + width * 0.9**k * draw for end, draw in zip(ends, draws, strict=True)]
            slope, end = (self._slope(score, target) for score in moved)
            exponent = self.problem.holder_exponent or 1.0
            ratio = self._ratio(_Pairs(target, *moved), slope, end, exponent)
            better = (ratio > best).unsqueeze(1)
            ends = [torch.where(better, *pair) for pair in zip(moved, ends, strict=True)]
            best = torch.maximum(ratio, best)
        self._check_pairs(_Pairs(target, *ends))

    def _ratio(self, pairs: _Pairs, slope: Tensor, end: Tensor, exponent: float) -> Tensor:
        """||g(w) - g(w')|| / ||w - w'||^exponent at ||x|| = bound_x, and 0 for pairs too near to tell."""
        target, first, second = pairs
        distance = _length(second - first)
        # Nearer pairs measure the rounding of s - s' and of y - s instead of the loss.
        size = torch.maximum(_length(first), _length(second)) + target.abs() + 1
        ratio = self.bound_x * _length(end - slope) / (distance / self.bound_x) ** exponent
        return torch.where(distance > 1e-6 * size, ratio, 0)

    def _check_pairs(self, pairs: _Pairs) -> tuple[Tensor, Tensor]:
        """Refutes Hoelder constants, and a derivative that is not a subgradient; returns those at both ends."""
        target, first, second = pairs
        slope = self._slope(first, target)
        end = self._slope(second, target)
        for name, constant, exponent in (
            ("holder_constant", self.problem.holder_constant, self.problem.holder_exponent),
            ("smoothness", self.problem.smoothness, 1.0),
        ):
            if exponent is not None:
                self._refute(name, constant, self._ratio(pairs, slope, end, exponent), pairs)
        here = self._value(first, target)
        there = self._value(second, target)
        predicted = (slope * (second - first)).sum(1)
        rounding = 1e-9 * (1 + here.abs() + there.abs() + predicted.abs())
        excess = here + predicted - there
        self._refute("derivative (a subgradient of a convex loss)", rounding, excess, pairs)
        return slope, end

    def starting_pairs(self, target: Tensor) -> _Pairs:
        """Pairs at many scales around the points where the usual losses have kinks, and on the rim of the ball."""
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

    def targets(self) -> Tensor:
        """Targets of all trials, many of them at the ends."""
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
            one = torch.ones_like(target)
            kinks = torch.stack([0 * one, target, -target, one, -one], 1)
            pick = torch.randint(kinks.shape[1], (count, 1), generator=self.generator)
            sign = 2.0 * torch.randint(2, (count, 1), generator=self.generator) - 1.0
            return kinks.gather(1, pick), sign
        # Two classes in front and the others behind: there the softmax bends most.
        order = self._uniform(count, scores).argsort(1)
        behind = self._magnitudes(count) * torch.randint(2, (count, 1), generator=self.generator)
        direction = torch.zeros(count, scores, dtype=torch.float64)
        ends = torch.tensor([0.5, -0.5], dtype=torch.float64).expand(count, 2)
        direction.scatter_(1, order[:, :2], ends * math.sqrt(2.0))
        return torch.where(direction != 0, 0.0, -behind), direction

    def _magnitudes(self, count: int) -> Tensor:
        return 10 ** (8 * self._uniform(count, 1) - 4)

    def _uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator, dtype=torch.float64)

    def _value(self, score: Tensor, target: Tensor) -> Tensor:
        return self.loss.value(self._scores(score), target)

    def _slope(self, score: Tensor, target: Tensor) -> Tensor:
        return self.loss.derivative(self._scores(score), target).reshape(score.shape)

    def _scores(self, score: Tensor) -> Tensor:
        return score.squeeze(1) if self.loss.num_scores == 1 else score

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
