"""Private linear regression: Huber, quantile, ridge. Targets are clipped to [-bound_y, bound_y].

The intercept is regularized, and the noise of most mechanisms grows with bound_y: subtract a public center from the
targets if they lie far from 0, and divide them by a public scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torch_dpsco import _validate as check
from torch_dpsco.accounting.events import ADD_REMOVE
from torch_dpsco.errors import ConditionError
from torch_dpsco.estimators.base import Facts, LinearModel
from torch_dpsco.estimators.preparation import NARROW, NARROW_OF_USERS, robust_width
from torch_dpsco.estimators.reading import RegressorMixin, as_column
from torch_dpsco.losses import Huber, Pinball, SmoothedPinball, Squared
from torch_dpsco.losses.base import TableLoss

Array = NDArray[np.float64]

_HOW_TO_BOUND_TARGETS = (
    "a public bound on targets, which are clipped to [-bound_y, bound_y]; take what a target can be"
    " by its meaning, never the largest in the data"
)


@dataclass(eq=False, repr=False, kw_only=True)
class Regressor(RegressorMixin, LinearModel):
    """Base: bounded real targets, one score.

    Args:
        bound_y: Y > 0, that targets are clipped to; required.
    """

    bound_y: float | None = None

    def task_options(self, facts: Facts) -> dict[str, Any]:
        return {"bound_y": self._bound() if facts.prepare is None else facts.prepare.most}

    def _required(self) -> dict[str, str]:
        return super()._required() | {"bound_y": _HOW_TO_BOUND_TARGETS}

    def _bound(self) -> float:
        return check.positive(bound_y=self.bound_y)

    def _wanted(self) -> tuple[float | None, bool, float] | None:
        return None, False, self._bound()

    def _kink(self, facts: Facts) -> float:
        """Threshold of Huber's loss in spreads of the targets, where none is given."""
        if facts.unit == "user":
            return NARROW_OF_USERS
        return NARROW if self.mechanism in ("auto", "noisy_gd") else robust_width(facts.signal)

    def _read(self, y: Any, count: int, device: torch.device) -> tuple[Tensor, Tensor | None]:
        return as_column(y, "y", count, device), None

    def _shaped(self, weight: Array, bias: Array) -> tuple[Array, Any]:
        return weight[0], float(bias[0])

    def predict(self, X: Any) -> Array:
        """Returns predictions (n,) for public rows; they are prepared, and clipped, as in training."""
        return np.asarray(self._scores(X)[:, 0])


@dataclass(eq=False, repr=False, kw_only=True)
class HuberRegressor(Regressor):
    """Private robust regression: squared errors up to a threshold, absolute errors beyond it.

    Args:
        epsilon, delta, adjacency, n, bound_x, prepare, feature_center, feature_scale, fit_intercept,
            intercept_scaling, reg, radius, mechanism, n_max, secure, accountant: see `LinearModel`.
        bound_y: Y > 0, that targets are clipped to; required.
        threshold: > 0, in units of the target, public, to which the noise is proportional; "auto" for 0.3 of
            the median distance of targets from their median, which is measured (a half for users, a half to one
            and a half for other mechanisms; a twentieth of bound_y where measuring does not pay).
        intervals: share in (0, 1) of the budget, in mu^2 of Gaussian noise, for a Hessian at the answer and a sum of
            squares, which `summary` needs (0.3 is a good one). Then nothing is measured (give a threshold, about the
            spread of errors), and the mechanism is objective perturbation. None for no intervals.

    Attributes:
        hessian_: released one of the sum of losses, in prepared units, with noise; only with `intervals`.
        moments_: the sum of squared slopes, (1,), likewise.

    Example:
        >>> import numpy as np
        >>> X = np.linspace(-1, 1, 2000).reshape(-1, 1)
        >>> model = HuberRegressor(epsilon=4.0, n=2000, bound_x=1.0, bound_y=3.0).fit(X, 2 * X[:, 0])
        >>> bool(abs(model.coef_[0] - 2) < 0.6)
        True

    Source:
        docs/proofs/output.md; docs/proofs/objective.md
    """

    threshold: float | str = "auto"
    intervals: float | None = None

    def _wanted(self) -> tuple[float | None, bool, float]:
        return 0.5, self.threshold == "auto", self._bound()

    def make_loss(self, facts: Facts) -> TableLoss:
        spreads = self._kink(facts)
        return Huber(_width("threshold", self.threshold, spreads, self._bound() / 20, facts))

    def task_options(self, facts: Facts) -> dict[str, Any]:
        if self.intervals is not None and not self.fit_intercept:
            raise ConditionError(
                "fit_intercept must be True for intervals: it counts the errors below the threshold"
            )
        return super().task_options(facts)


@dataclass(eq=False, repr=False, kw_only=True)
class QuantileRegressor(Regressor):
    """Private quantile regression, whose loss is smoothed at its kink, as smooth mechanisms need it.

    Args:
        epsilon, delta, adjacency, n, bound_x, prepare, feature_center, feature_scale, fit_intercept,
            intercept_scaling, reg, radius, mechanism, n_max, secure, accountant: see `LinearModel`.
        bound_y: Y > 0, that targets are clipped to; required.
        quantile: in (0, 1).
        width: >= 0, in units of the target, public, over which the kink is smoothed; 0 for a thousandth of bound_y,
            by output perturbation. "auto" for twice the threshold of `HuberRegressor` (a tenth of bound_y where
            measuring does not pay), and for less at other quantiles.

    Example:
        >>> import numpy as np
        >>> X = np.linspace(-1, 1, 2000).reshape(-1, 1)
        >>> model = QuantileRegressor(epsilon=8.0, n=2000, bound_x=1.0, bound_y=3.0).fit(X, 2 * X[:, 0])
        >>> model.mechanism_
        'noisy_gd'

    Source:
        docs/proofs/objective.md; docs/proofs/output.md#a-duality-gap-certifies
    """

    quantile: float = 0.5
    width: float | str = "auto"

    def _wanted(self) -> tuple[float | None, bool, float]:
        return self.quantile, self.width == "auto", self._bound()

    def make_loss(self, facts: Facts) -> TableLoss:
        least = 2 * min(
            self.quantile, 1 - self.quantile
        )  # smoothing moves other quantiles towards the median
        spreads = 2 * least * self._kink(facts)
        public = least * self._bound() / 10
        width = _width("width", self.width, spreads, public, facts)
        return SmoothedPinball(self.quantile, width) if width else Pinball(self.quantile)


@dataclass(eq=False, repr=False, kw_only=True)
class Ridge(Regressor):
    """Private least squares: boosted AdaSSP, rounds on clipped residuals; output perturbation at delta = 0.

    Args:
        epsilon, delta, adjacency, n, bound_x, prepare, feature_center, feature_scale, fit_intercept,
            intercept_scaling, radius, mechanism, n_max, secure, accountant: see `LinearModel`.
        reg: > 0, a ridge of the answer; None for nothing.
        bound_y: Y > 0, that targets are clipped to; required.
        intervals: share in (0, 1) of the budget, in mu^2 of Gaussian noise, for the sum of squared targets, which
            `summary` needs beside X'X and X'y (0.05 is a good one). Then nothing is measured, and the mechanism is
            AdaSSP. None for no intervals.

    Attributes:
        hessian_: X'X of prepared rows, with noise; only with `intervals`.
        moments_: X'y and the sum of squared targets, with noise; likewise.

    Example:
        >>> import numpy as np
        >>> X = np.linspace(-1, 1, 2000).reshape(-1, 1)
        >>> model = Ridge(epsilon=4.0, n=2000, bound_x=1.0, bound_y=3.0).fit(X, 2 * X[:, 0])
        >>> bool(abs(model.coef_[0] - 2) < 0.6), model.mechanism_
        (True, 'boosted_adassp')

    Source:
        docs/proofs/boosting.md; docs/proofs/output.md#least-squares-from-noisy-statistics
    """

    intervals: float | None = None

    def _wanted(self) -> tuple[float | None, bool, float]:
        if self.mechanism not in ("auto", "boosted_adassp"):
            return (
                None,
                False,
                self._bound(),
            )  # the noise of the others is for the bound on targets, in any units
        return 0.5, True, self._bound()

    def make_loss(self, facts: Facts) -> TableLoss:
        return Squared()

    def task_options(self, facts: Facts) -> dict[str, Any]:
        if self.intervals is not None and not self.fit_intercept and self.adjacency == ADD_REMOVE:
            raise ConditionError(
                "fit_intercept must be True for intervals under add_remove: it counts the records"
            )
        return super().task_options(facts)


def _width(name: str, given: float | str, spreads: float, unit: float, facts: Facts) -> float:
    """Returns a number in units of targets; where it is "auto", so many spreads, or a unit if none are measured."""
    if isinstance(given, str):
        check.choice(("auto",), **{name: given})
        prepare = facts.prepare
        return spreads if prepare is not None and prepare.quantile is not None else unit
    return check.between(0.0, 1e100, **{name: given})
