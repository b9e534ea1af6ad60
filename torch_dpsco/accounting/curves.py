"""Interprets events: the cost of each one under an adjacency, and how costs compose and convert to epsilon.

A `Cost` holds what composes by addition: the Renyi curve on a grid of orders, mu^2 where everything so far is an
unsampled Gaussian (exact, Gaussian differential privacy), and the failure probability. Sequential composition adds
costs, parallel composition takes their pointwise maximum (valid: the differing record lies in one part).

Source: spec accounting.md sections 2, 4, 4.8, 5.6, 5.7.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from torch_dpsco import _validate as check
from torch_dpsco.accounting.analysis.convert import rdp_delta, rdp_epsilon
from torch_dpsco.accounting.analysis.gaussian import gaussian_delta, gaussian_epsilon
from torch_dpsco.accounting.analysis.rdp import (
    default_orders,
    extended_orders,
    rdp_poisson_gaussian,
    rdp_poisson_gaussian_replace_one,
    rdp_wor_gaussian,
)
from torch_dpsco.accounting.analysis.zcdp import zcdp_epsilon
from torch_dpsco.accounting.events import (
    ADD_REMOVE,
    REPLACE_ONE,
    Adjacency,
    Gaussian,
    NonPrivate,
    PoissonGaussian,
    WORGaussian,
)
from torch_dpsco.errors import AdjacencyError

__all__ = ["METHODS", "Cost", "Evaluation", "SimpleEvent", "cost_of", "delta_of", "epsilon_of", "orders_at"]

FloatArray: TypeAlias = npt.NDArray[np.float64]
SimpleEvent: TypeAlias = Gaussian | PoissonGaussian | WORGaussian | NonPrivate
METHODS = ("best", "gdp", "rdp", "zcdp")
_MAX_LEVEL = 6  # orders up to 2^20


@lru_cache(maxsize=_MAX_LEVEL + 1)
def orders_at(level: int) -> FloatArray:
    """Returns the order grid: the default one to 2^14, made denser, with one more doubling per level, to 2^20.

    The default orders alone cost up to 1 % of epsilon. Steps of 0.1 below 11 are those of Opacus, so that our figure is
    never larger than its; ratios of 1.02 above 64 leave 5e-5.
    """
    if level == 0:
        dense = np.concatenate([np.arange(11, 110) / 10.0, np.round(np.geomspace(64.0, 2.0**14, 281))])
        grid = np.union1d(default_orders(), dense)
    else:
        grid = orders_at(level - 1)
        grid = np.concatenate([grid, extended_orders(grid, best=float(grid[-1]))])
    grid.setflags(write=False)
    return grid


@dataclass(frozen=True)
class Cost:
    """A composable privacy cost under one adjacency.

    Args:
        rdp: Renyi divergence bound per order of `orders_at(level)`.
        mu_squared: mu^2 of Gaussian differential privacy, None unless all events are unsampled Gaussians.
        log_survival: sum of log(1 - failure).
    """

    rdp: FloatArray
    mu_squared: float | None
    log_survival: float

    @classmethod
    def zero(cls, level: int) -> Cost:
        """Returns the cost of nothing."""
        return cls(np.zeros_like(orders_at(level)), 0.0, 0.0)

    def __add__(self, other: Cost) -> Cost:
        mu_squared = None if None in (self.mu_squared, other.mu_squared) else self.mu_squared + other.mu_squared  # type: ignore[operator]
        return Cost(self.rdp + other.rdp, mu_squared, self.log_survival + other.log_survival)

    def __mul__(self, times: int) -> Cost:
        if times == 0:  # 0 * inf is nan; nothing was released
            return Cost(np.zeros_like(self.rdp), 0.0, 0.0)
        mu_squared = None if self.mu_squared is None else times * self.mu_squared
        return Cost(times * self.rdp, mu_squared, times * self.log_survival)

    @property
    def failure(self) -> float:
        """Probability that some sensitivity was exceeded, rounded up."""
        return min(1.0, -math.expm1(self.log_survival) * (1.0 + 1e-14))

    def maximum(self, other: Cost) -> Cost:
        """Returns the pointwise maximum: a bound whichever of the two parts holds the differing record."""
        mu_squared = None if None in (self.mu_squared, other.mu_squared) else max(self.mu_squared, other.mu_squared)  # type: ignore[type-var]
        return Cost(np.maximum(self.rdp, other.rdp), mu_squared, min(self.log_survival, other.log_survival))


def _poisson_curve(event: PoissonGaussian, adjacency: Adjacency, orders: FloatArray) -> FloatArray:
    if adjacency == REPLACE_ONE:
        return rdp_poisson_gaussian_replace_one(event.q, event.noise_multiplier, orders)
    # the remove direction is the larger one at every order
    return rdp_poisson_gaussian(event.q, event.noise_multiplier, orders, "remove")


@lru_cache(maxsize=4096)
def cost_of(event: SimpleEvent, adjacency: Adjacency, level: int = 0) -> Cost:
    """Returns the cost of one event.

    Raises:
        AdjacencyError: the event has no guarantee under this adjacency.
    """
    orders = orders_at(level)
    if isinstance(event, NonPrivate):
        return Cost(np.full_like(orders, math.inf), math.inf, 0.0)
    if isinstance(event, Gaussian):
        sensitivity = event.sensitivity(adjacency)
        mu = 0.0 if sensitivity == 0 else math.inf if event.sigma == 0 else sensitivity / event.sigma
        return Cost(mu * mu / 2.0 * orders, mu * mu, math.log1p(-event.failure))
    if isinstance(event, PoissonGaussian):
        if event.q in (0.0, 1.0):  # nothing, or the whole data set: an unsampled Gaussian
            scale = event.q * (2.0 if adjacency == REPLACE_ONE else 1.0)
            return cost_of(Gaussian(event.noise_multiplier, {adjacency: scale}), adjacency, level)
        return Cost(_poisson_curve(event, adjacency, orders), None, 0.0)
    if adjacency == ADD_REMOVE:
        raise AdjacencyError(f"{event} is not defined under add_remove: its batch size depends on the data set size")
    if event.batch_size == event.dataset_size:
        return cost_of(Gaussian(event.noise_multiplier, {adjacency: 2.0}), adjacency, level)
    rate = event.batch_size / event.dataset_size
    return Cost(rdp_wor_gaussian(rate, event.noise_multiplier / 2.0, orders), None, 0.0)


@dataclass(frozen=True)
class Evaluation:
    """An epsilon with how it was obtained: the method, and the Renyi order if it has one."""

    epsilon: float
    method: str
    order: float | None = None


def _rdp_evaluation(cost_at: Callable[[int], Cost], delta: float) -> Evaluation:
    for level in range(_MAX_LEVEL + 1):
        orders = orders_at(level)
        best = rdp_epsilon(orders, cost_at(level).rdp, delta)
        if not math.isfinite(best.epsilon) or best.order < orders[-1] or best.epsilon == 0:
            break
    return Evaluation(best.epsilon, "rdp", best.order)


def epsilon_of(cost_at: Callable[[int], Cost], delta: float, method: str = "best") -> Evaluation:
    """Converts a cost into epsilon at delta.

    Args:
        cost_at: the cost on the order grid of a level (more orders are asked for when the last one is the best).
        delta: in (0, 1).
        method: "best" (exact for unsampled Gaussians, else Renyi), "gdp", "zcdp" (unsampled Gaussians only), "rdp".

    Raises:
        ValueError: unknown method, or one that is not defined for these events.
    """
    check.open_interval(0.0, 1.0, delta=delta)
    check.choice(METHODS, method=method)
    cost = cost_at(0)
    delta0 = cost.failure
    if delta <= delta0:
        return Evaluation(math.inf, "failure")
    delta = (delta - delta0) / (1.0 - delta0)
    if cost.mu_squared is None and method in ("gdp", "zcdp"):
        raise ValueError(f"method must be 'best' or 'rdp' for sampled events (got {method!r})")
    if cost.mu_squared is None or method == "rdp":
        return _rdp_evaluation(cost_at, delta)
    if math.isinf(cost.mu_squared):
        return Evaluation(math.inf, "gdp")
    if method == "zcdp":
        return Evaluation(zcdp_epsilon(cost.mu_squared / 2.0, delta), "zcdp")
    return Evaluation(gaussian_epsilon(math.sqrt(cost.mu_squared), delta), "gdp")


def delta_of(cost: Cost, epsilon: float) -> float:
    """Converts a cost into delta at epsilon >= 0."""
    check.nonnegative(epsilon=epsilon)
    if cost.mu_squared is None:
        delta = rdp_delta(orders_at(0), cost.rdp, epsilon)
    else:
        delta = 1.0 if math.isinf(cost.mu_squared) else gaussian_delta(math.sqrt(cost.mu_squared), epsilon)
    delta0 = cost.failure
    return min(1.0, delta0 + (1.0 - delta0) * delta)
