"""Private classifiers for the worst: records that fit badly (tilts), and rows that somebody may move (attacks)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch_dpsco import _validate as check
from torch_dpsco.estimators.classifiers import BinaryClassifier
from torch_dpsco.losses import Logistic
from torch_dpsco.losses.base import TableLoss


@dataclass(eq=False, repr=False, kw_only=True)
class TiltedClassifier(BinaryClassifier):
    """Private tilted logistic regression, (1/tau) log mean exp(tau l_i) + (reg / 2n) |w|^2, by output perturbation.

    tau > 0 minds the records that fit badly, tau < 0 ignores them. The noise grows with e^(|tau| range of the losses):
    keep |tau| bound_x small, and give a radius, which bounds the range.

    Args:
        epsilon, delta, adjacency, n, bound_x, feature_center, feature_scale, fit_intercept, intercept_scaling,
            mechanism, solver, n_max, secure, accountant: see `LinearModel`.
        classes: two labels, of which the second is the positive one; no weights, since the constants have equal ones.
        tilt: tau, of either sign; 0 is the mean.
        n_min: public lower bound on the number of records; required under add_remove, no more than n.
        reg: in sum form; a tilt below 0 needs reg > n |tilt| L^2, L the bound on prepared rows.
        radius: of the ball that holds the answer; inf for none.

    Example:
        >>> import numpy as np
        >>> X = np.linspace(-1, 1, 4000).reshape(-1, 1)
        >>> model = TiltedClassifier(tilt=0.5, epsilon=8.0, n=4000, n_min=3000, bound_x=1.0, radius=3.0, classes=(0, 1))
        >>> model.fit(X, X[:, 0] > 0).mechanism_
        'output'

    Source:
        docs/proofs/output.md#tilted-means
    """

    tilt: float = 0.1
    n_min: int | None = None

    def _loss(self) -> TableLoss:
        return Logistic()

    def _options(self) -> dict[str, Any]:
        n_min = None if self.n_min is None else check.positive_count(n_min=self.n_min)
        return {"tilt": check.finite(tilt=self.tilt), "n_min": n_min}


@dataclass(eq=False, repr=False, kw_only=True)
class AdversarialClassifier(BinaryClassifier):
    """Private logistic regression for rows that an adversary may move, by output perturbation.

    The loss of a record is its largest one over all prepared rows, the constant included, within `attack_radius`:
    log(1 + exp(-(y <w, x> - attack_radius |w|))), with the dual norm, smoothed at 0 by a public amount.

    Args:
        epsilon, delta, adjacency, n, bound_x, feature_center, feature_scale, fit_intercept, intercept_scaling, reg,
            radius, mechanism, solver, n_max, secure, accountant: see `LinearModel`.
        classes, class_weight: see `Classifier`; two labels, of which the second is the positive one.
        attack_radius: > 0, in the units of prepared rows.
        attack_norm: 2, or inf (each feature moves by that much).

    Example:
        >>> import numpy as np
        >>> X = np.linspace(-1, 1, 4000).reshape(-1, 1)
        >>> model = AdversarialClassifier(epsilon=8.0, n=4000, bound_x=1.0, classes=(0, 1)).fit(X, X[:, 0] > 0)
        >>> model.predict([[-0.9], [0.9]]).tolist()
        [0, 1]

    Source:
        docs/proofs/output.md#robust-losses
    """

    attack_radius: float = 0.1
    attack_norm: float = 2.0

    def _loss(self) -> TableLoss:
        return Logistic()

    def _options(self) -> dict[str, Any]:
        return {"attack_radius": check.positive(attack_radius=self.attack_radius), "attack_norm": self.attack_norm}
