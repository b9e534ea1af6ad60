"""Sparse least squares for more features than records: features are chosen privately, one by one, then fitted.

    choose j, s with P ~ exp(-(epsilon / (2 D)) s g_j),   w_j = s / 2,   T times;   then least squares on the chosen

with g = sum_i c_i clip(<w, x_i> - y_i, 1) x_i, entries of rows and targets in units of their bound and of the threshold
of Huber's loss, and j among those not yet chosen. These are steps to vertices of the l1 ball, each chosen by the
exponential mechanism, whose noise grows with log d where that of gradient descent grows with sqrt(d).

Differs from the paper (Talwar, Thakurta and Zhang 2015) in: there the point that the steps lead to is the answer; here
it serves to choose, and the weights are those of boosted AdaSSP on T features.

Source: docs/proofs/sparse.md
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from scipy.optimize import brentq
from torch import Tensor

from torch_dpsco import _validate as check
from torch_dpsco.accounting.analysis.gaussian import gaussian_epsilon, sensitivity_factor
from torch_dpsco.accounting.analysis.rdp import zcdp_epsilon
from torch_dpsco.accounting.analysis.rounding import gamma, safe
from torch_dpsco.accounting.events import ZCDP, Sequential
from torch_dpsco.estimators.least_squares import BoostedPlan
from torch_dpsco.estimators.records import PairwiseSum, Records, sum_terms
from torch_dpsco.estimators.task import LinearPlan, LinearTask, make_records
from torch_dpsco.noise import MOST_CHOICES, Source, choice_law, choose

_MOST = 24  # features
_MISSED = 0.08  # of the largest score possible, that a choice may be from the best one with probability 0.95
_STEP = 0.5


@dataclass(frozen=True, kw_only=True)
class SparsePlan(LinearPlan):
    """Public numbers of choices, and of the fit to what they choose.

    Args:
        rho: > 0, of all choices together, in zero-concentrated privacy.
        box: B > 0, that entries of prepared rows are clipped to.
        fit: of as many features as are chosen, in units of B.
    """

    mechanism = "selection"
    in_parts = False
    values = (*LinearPlan.values, BoostedPlan)
    ranges = {"rho": check.positive, "box": check.positive}  # noqa: RUF012

    rho: float
    box: float
    fit: LinearPlan

    @property
    def sensitivity(self) -> float:
        """D: how far a record moves a score, rounding of both sums included."""
        task = self.task
        most = task.most_records
        features = self.fit.task.dim
        miss = (task.bound_y or 0.0) / task.loss.knee + _STEP * features
        # PRIVACY: sums are rounded, and residuals; margin of docs/proofs/sparse.md#what-a-record-moves
        # (test_rounding_is_in_the_sensitivity_of_a_score)
        error = gamma(sum_terms(most) + 16) + miss * gamma(features + 16)
        return safe(sensitivity_factor(task.adjacency) + 2 * most * error)

    def own_event(self) -> Sequential:
        """Returns what all choices cost, and the fit."""
        # PRIVACY: of both (test_every_choice_and_the_fit_are_charged)
        return Sequential((ZCDP(self.rho, adjacencies=(self.adjacency,)), self.fit.event()))

    @property
    def noise_and_signal(self) -> tuple[float, float, str]:
        """As in `LinearPlan`, of the fit."""
        return self.fit.noise_and_signal

    def noise_shares(self) -> Iterator[tuple[str, float, int | None]]:
        """Yields those of the fit."""
        return self.fit.noise_shares()

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yields what is to be said beside the promise."""
        if self.task.prepare is not None:
            yield "first", str(self.task.prepare)
        how = (
            f"{self.fit.task.dim} of {self.task.dim} features, one by one, rho={self.rho:.3g}"
            f" together, by gradients of {self.task.loss}; entries of rows are clipped to"
            f" {self.box:g}; then a fit to what is chosen"
        )
        yield "choices", how
        yield from self.fit.lines()

    def draw(self, solved: Records, generator: Source) -> Tensor:
        """Chooses, and fits what is chosen; see `LinearPlan`."""
        chosen = self._choose(solved, generator)
        columns = torch.cat([self._boxed(block)[:, chosen] for _, block in solved.blocks()])
        task = self.fit.task
        made = partial(make_records, task, columns, solved.targets, solved.weights)
        units = task.measured_units(made(), generator)
        answer = self.fit.draw(self.fit.solve(made(units)), generator)
        weight, bias = units.line(answer.view(1, -1))
        answer = solved.zeros(self.task.parameters)
        answer[chosen] = weight[0] / self.box
        answer[self.task.dim :] = bias
        return answer

    def _choose(self, records: Records, generator: Source) -> list[int]:
        chosen: list[int] = []
        left = list(range(self.task.dim))
        w = records.zeros(self.task.dim)
        features = self.fit.task.dim
        epsilon = math.sqrt(8 * self.rho / features) * (1 - 1e-12)
        for _ in range(features):
            gradient = self._gradient(records, chosen, w)[left]
            scores = torch.cat([gradient, -gradient]).cpu()
            # PRIVACY: by the law that is charged (test_a_choice_has_the_law_of_its_charge)
            law = choice_law(scores, self.sensitivity, epsilon)
            sign, place = divmod(choose(law, generator), len(left))
            chosen.append(left.pop(place))
            w[chosen[-1]] = _STEP - 2 * _STEP * sign
        return chosen

    def _gradient(self, records: Records, chosen: list[int], w: Tensor) -> Tensor:
        """Returns that of the sum of losses, in units: NOT private."""
        total = PairwiseSum(torch.zeros_like(w))
        for rows, block in records.blocks():
            boxed = self._boxed(block)
            miss = boxed[:, chosen] @ w[chosen] - records.targets[rows] / self.task.loss.knee
            total.add((records.weights[rows] * miss.clamp(-1, 1)) @ boxed)
        return total.result()

    def _boxed(self, block: Tensor) -> Tensor:
        # PRIVACY: a norm bounds no entry (test_no_record_moves_a_score_by_more_than_the_sensitivity)
        return (block[:, : self.task.dim] / self.box).clamp(-1, 1)


def shares(task: LinearTask, features: int | None) -> tuple[float, int, float]:
    """Returns rho of all choices, the number of features, and the epsilon of their fit: half of rho is for each.

    Args:
        task: its public numbers; delta > 0. The loss counts by its threshold.
        features: T; None for as many as can be told apart, 1 to 24.

    Raises:
        ValueError: delta = 0, or a number of features that is out of range.
    """
    check.between(1, MOST_CHOICES // 2, dim=task.dim)
    epsilon = task.target.epsilon
    delta = check.positive(delta=task.target.delta)
    # PRIVACY: what is measured leaves less (test_a_plan_spends_no_more_than_its_budget)
    whole = brentq(lambda rho: zcdp_epsilon(rho, delta) - epsilon, 0.0, epsilon, xtol=1e-20)
    rho = (whole * (1 - 1e-9) - task.measured**2 / 2) / 2
    if features is None:
        doubt = 2 * sensitivity_factor(task.adjacency) * math.log(40 * task.dim)
        features = int(8 * rho * (_MISSED * task.n / doubt) ** 2)
        features = max(1, min(features, _MOST, task.dim))
    check.between(1, task.dim, features=features)
    return rho, features, gaussian_epsilon(math.sqrt(2 * rho), delta) * (1 - 1e-9)
