"""A loss and an estimator of one's own: Poisson regression of counts that are capped."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

import torch_dpsco as dp
from torch_dpsco.losses.base import upper  # products, rounded up
from torch_dpsco.step.plan import Plan


@dataclass(frozen=True)
class CappedPoisson(dp.losses.TableLoss):
    """e^s - y s, of scores whose mean e^s is at most the cap, a straight line beyond; y in [0, cap], least value 0."""

    cap: float = 1.0

    def value(self, score: Tensor, target: Tensor) -> Tensor:
        """Up to the corner at log(cap) the logarithm of the largest chance over the chance; beyond it a line."""
        count = target.clamp(0.0, self.cap)
        kept = score.clamp(max=math.log(self.cap))
        return kept.exp() - count * (kept + 1) + torch.xlogy(count, count) + (self.cap - count) * (score - kept)

    def derivative(self, score: Tensor, target: Tensor) -> Tensor:
        """min(e^s, cap) - y, which lies in [-cap, cap]."""
        return score.exp().clamp(max=self.cap) - target.clamp(0.0, self.cap)

    def second_derivative(self, score: Tensor, target: Tensor) -> Tensor:
        """e^s up to the corner, which is at most the cap, and 0 beyond."""
        return score.exp() * (score < math.log(self.cap))

    def holder_exponent(self) -> float:
        """alpha: the gradient is Lipschitz."""
        return 1.0

    def holder_constant(self, exponent: float, bound_x: float) -> float:
        """L = cap B^2."""
        return upper(self.cap, bound_x, bound_x)

    def loss_at_zero(self, bound_y: float) -> float:
        """1 - y + y log y is convex in y: at most what it is at 0 and at the cap, 1 and less than cap log(cap)."""
        return max(1.0, upper(self.cap, math.log(self.cap)))

    def grad_bound(self, radius: float, bound_x: float, bound_y: float) -> float:
        """G(R) = cap B."""
        return upper(self.cap, bound_x)


@dataclass(eq=False, repr=False, kw_only=True)
class PoissonRegressor(dp.estimators.Regressor):
    """Means of counts from 0 to bound_y >= 1; weights in the ball of radius log(bound_y) / bound_x meet no corner."""

    prepare: str | None = None  # the unit of counts is 1

    def make_loss(self, facts: dp.estimators.Facts) -> CappedPoisson:
        """The loss, of public settings."""
        return CappedPoisson(cap=self.bound_y)

    def predict(self, X: Any) -> np.ndarray:
        """Means (n,) of counts."""
        return np.exp(super().predict(X)).clip(max=self.bound_y)


if __name__ == "__main__":
    loss = CappedPoisson(cap=20.0)
    dp.losses.check_holder(loss, loss.problem(bound_x=1.0, bound_y=20.0), bound_x=1.0, bound_y=20.0)
    rng = np.random.default_rng(0)  # made-up records
    rows = rng.uniform(-1, 1, (20_000, 2)) / math.sqrt(2)
    means = np.exp(1 + rows @ [1.5, -1.0])
    counts = rng.poisson(means)
    for mechanism in ("auto", "objective", "output", "noisy_gd", "preconditioned_gd"):
        model = PoissonRegressor(epsilon=1.0, n=20_000, bound_x=1.0, bound_y=20.0, mechanism=mechanism)
        model.fit(rows, counts)
        right = np.abs(model.predict(rows) - means).mean() < 0.5 * np.abs(means.mean() - means).mean()
        print(mechanism, model.mechanism_, "better by half than one mean for all:", right)
    assert Plan.from_dict(model.plan_.to_dict()) == model.plan_
    print("spent", round(model.privacy_.epsilon, 3))
