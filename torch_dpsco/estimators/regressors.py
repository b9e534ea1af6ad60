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
from torch_dpsco.estimators.base import LinearModel
from torch_dpsco.estimators.data import as_column
from torch_dpsco.estimators.protocol import RegressorMixin
from torch_dpsco.losses import Huber, Pinball, Squared
from torch_dpsco.losses.base import TableLoss

Array = NDArray[np.float64]


@dataclass(eq=False, repr=False, kw_only=True)
class Regressor(RegressorMixin, LinearModel):
    """Base: bounded real targets, one score.

    Args:
        bound_y: Y > 0, that targets are clipped to; required.
    """

    bound_y: float | None = None

    def _options(self) -> dict[str, Any]:
        if self.bound_y is None:
            raise ValueError(
                "bound_y must be given: a public bound on targets, which are clipped to [-bound_y, bound_y]; take what "
                "a target can be by its meaning, never the largest in the data (got None)"
            )
        return {"bound_y": check.positive(bound_y=self.bound_y)}

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
        epsilon, delta, adjacency, n, bound_x, feature_center, feature_scale, fit_intercept, intercept_scaling, reg,
            radius, mechanism, solver, n_max, secure, accountant: see `LinearModel`.
        bound_y: Y > 0, that targets are clipped to; required.
        threshold: > 0, in units of the target, public. The noise is proportional to it: take the size of typical
            errors.

    Example:
        >>> import numpy as np
        >>> X = np.linspace(-1, 1, 2000).reshape(-1, 1)
        >>> model = HuberRegressor(epsilon=4.0, n=2000, bound_x=1.0, bound_y=3.0).fit(X, 2 * X[:, 0])
        >>> bool(abs(model.coef_[0] - 2) < 0.6)
        True

    Source:
        docs/proofs/output.md; docs/proofs/objective.md
    """

    threshold: float = 1.0

    def _loss(self) -> TableLoss:
        return Huber(threshold=self.threshold)


@dataclass(eq=False, repr=False, kw_only=True)
class QuantileRegressor(Regressor):
    """Private quantile regression, by output perturbation, since its loss has a kink.

    Args:
        epsilon, delta, adjacency, n, bound_x, feature_center, feature_scale, fit_intercept, intercept_scaling, reg,
            radius, mechanism, solver, n_max, secure, accountant: see `LinearModel`.
        bound_y: Y > 0, that targets are clipped to; required.
        quantile: in (0, 1).

    Example:
        >>> import numpy as np
        >>> X = np.linspace(-1, 1, 2000).reshape(-1, 1)
        >>> model = QuantileRegressor(epsilon=8.0, n=2000, bound_x=1.0, bound_y=3.0).fit(X, 2 * X[:, 0])
        >>> model.mechanism_
        'output'

    Source:
        docs/proofs/output.md#a-duality-gap-certifies
    """

    quantile: float = 0.5

    def _loss(self) -> TableLoss:
        return Pinball(quantile=self.quantile)


@dataclass(eq=False, repr=False, kw_only=True)
class Ridge(Regressor):
    """Private least squares: AdaSSP, whose ridge adapts privately to the data; output perturbation at delta = 0.

    Args:
        epsilon, delta, adjacency, n, bound_x, feature_center, feature_scale, fit_intercept, intercept_scaling, radius,
            mechanism, solver, n_max, secure, accountant: see `LinearModel`.
        reg: >= 0 added to the ridge of AdaSSP; None for nothing.
        bound_y: Y > 0, that targets are clipped to; required.

    Example:
        >>> import numpy as np
        >>> X = np.linspace(-1, 1, 2000).reshape(-1, 1)
        >>> model = Ridge(epsilon=4.0, n=2000, bound_x=1.0, bound_y=3.0).fit(X, 2 * X[:, 0])
        >>> bool(abs(model.coef_[0] - 2) < 0.6), model.mechanism_
        (True, 'adassp')

    Source:
        docs/proofs/output.md#least-squares-from-noisy-statistics
    """

    def _loss(self) -> TableLoss:
        return Squared()
