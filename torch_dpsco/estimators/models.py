"""Private linear models: logistic and softmax regression, support vectors, robust ones; Huber, quantile, ridge.

The classes are public and given: what labels occur is a fact about the data. Their order is that of columns and signs:
the first of two classes is -1, the second is +1.

Targets of regressions are clipped to [-bound_y, bound_y]. The intercept is regularized, and the noise of most
mechanisms grows with bound_y: subtract a public center from the targets if they lie far from 0, and divide them by a
public scale.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Hashable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torch_dpsco import _validate as check
from torch_dpsco._validate import typed
from torch_dpsco.accounting.analysis.rounding import FloatArray
from torch_dpsco.accounting.events import ADD_REMOVE
from torch_dpsco.errors import ConditionError
from torch_dpsco.estimators.base import LinearModel, as_numbers
from torch_dpsco.estimators.link import Link
from torch_dpsco.estimators.preparation import (
    NARROW,
    NARROW_OF_USERS,
    Facts,
    Wanted,
    residual_clip,
    robust_width,
)
from torch_dpsco.estimators.reading import (
    ClassifierMixin,
    RegressorMixin,
    as_codes,
    as_column,
    chances,
    decisions,
    labelled,
    labels_of,
)
from torch_dpsco.estimators.sparse import SparsePlan, shares
from torch_dpsco.estimators.task import LinearPlan
from torch_dpsco.losses import (
    Hinge,
    Huber,
    Logistic,
    Pinball,
    SmoothedHinge,
    SmoothedPinball,
    SoftmaxCrossEntropy,
    Squared,
)
from torch_dpsco.losses.base import TableLoss
from torch_dpsco.problem import round_up


class Classifier(ClassifierMixin, LinearModel):
    """Base: public classes; records with other labels become null records.

    Args:
        classes: the public labels, all different: numbers or strings.
        class_weight: public weights in (0, 1] of labels, as a dict; those not named have 1. None for ones. To count
            one class k times as much as another, give the other 1/k.
    """

    classes: Any = None
    class_weight: dict[Any, float] | None = None

    def _required(self) -> dict[str, str]:
        return super()._required() | {
            "classes": "the public labels, as (0, 1); which occur is private"
        }

    def _classes(self) -> list[Any]:
        if isinstance(self.classes, str) or not hasattr(self.classes, "__iter__"):
            raise ValueError(
                f"classes must be the public labels, as (0, 1) (got {check.shown(self.classes)})"
            )
        given = list(self.classes.tolist() if hasattr(self.classes, "tolist") else self.classes)
        known = {label for label in given if isinstance(label, Hashable)}
        if len(known) < max(2, len(given)):
            raise ValueError(f"classes must be two or more different labels (got {given})")
        return given

    def _factors(self) -> list[float]:
        """Returns the weight of each class, and 1 for what is none."""
        given = self.class_weight
        classes = self._classes()
        if not isinstance(given, dict) or not set(given) <= set(classes):
            raise ValueError(
                f"class_weight must be a dict of public weights in (0, 1] by label (got {given!r});"
                " 'balanced' would count labels, which are private"
            )
        weights = [check.positive(class_weight=given.get(label, 1.0)) for label in classes]
        return [*(check.between(0.0, 1.0, class_weight=weight) for weight in weights), 1.0]

    def _read(self, y: Any, count: int, device: torch.device) -> tuple[Tensor, Tensor | None]:
        codes = as_codes(y, self._classes(), count, device)
        if self.class_weight is None:
            return self._coded(codes), None
        return (
            self._coded(codes),
            torch.tensor(self._factors(), dtype=torch.float64, device=device)[codes],
        )

    @abstractmethod
    def _coded(self, codes: Tensor) -> Tensor:
        """Targets of the loss, of places among the classes; -1 is none."""

    def _shaped(self, weight: FloatArray, bias: FloatArray) -> tuple[FloatArray, Any]:
        self.classes_ = labels_of(self._classes())
        return weight, bias

    def decision_function(self, X: Any) -> FloatArray:
        """Returns scores of public rows: (n,), positive ones of the second of two classes, or (n, K)."""
        return decisions(self._scores(X))

    def predict(self, X: Any) -> NDArray[Any]:
        """Returns labels (n,) of public rows; they are prepared, and clipped, as in training."""
        decided = self.decision_function(X)
        return labelled(self.classes_, decided)


class BinaryClassifier(Classifier):
    """Base: two classes, one score."""

    def _classes(self) -> list[Any]:
        classes = super()._classes()
        if len(classes) != 2:
            raise ValueError(
                f"classes must be two for {type(self).__name__} (got {len(classes)}): use"
                " SoftmaxRegression"
            )
        return classes

    def _coded(self, codes: Tensor) -> Tensor:
        return torch.where(codes >= 0, 2 * codes - 1, 0)  # 0: a null record

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_class = False
        return tags


class LogisticRegression(BinaryClassifier):
    """Private logistic regression for two classes.

    The gradient of a record is clipped at `residual_clip` of its largest possible norm, which for a linear model is the
    gradient of another convex loss, and the noise shrinks by as much. Its scores lie further from 0 than log-odds do;
    `decision_function` and `predict_proba` undo that, or a private scale and intercept do (docs/estimators.md).

    Args:
        epsilon, delta, adjacency, n, bound_x, prepare, feature_center, feature_scale, fit_intercept,
            intercept_scaling, reg, radius, mechanism, n_max, secure, accountant: see `LinearModel`.
        classes, class_weight: see `Classifier`; two labels, of which the second is the positive one.
        residual_clip: in (0, 1], or None for no clip. "auto" for 0.5, or 0.7 where n mu / sqrt(d) >= 700, mu the level
            of the budget (`plan(d)` says which); 0.2 for few rows where accuracy alone counts.
        intervals: share in (0, 1) of the budget, in mu^2 of Gaussian noise, for a Hessian at the answer, which
            `summary` needs (0.3 is a good one); the guarantee stays that of the budget. Then "auto" clips no residual
            and measures nothing, and the mechanism is objective perturbation. None for no intervals.

    Attributes:
        hessian_: released one of the sum of losses, in prepared units, with noise; only with `intervals`.

    Example:
        >>> import numpy as np
        >>> X = np.linspace(-1, 1, 2000).reshape(-1, 1)
        >>> model = LogisticRegression(epsilon=2.0, n=2000, bound_x=1.0, classes=("low", "high"))
        >>> _ = model.fit(X, np.where(X[:, 0] > 0, "high", "low"))
        >>> model.predict([[-0.9], [0.9]]).tolist(), model.mechanism_
        (['low', 'high'], 'objective')
        >>> model.privacy_.epsilon <= 2.0
        True

    Source:
        docs/proofs/objective.md; docs/proofs/output.md#clipped-residuals
    """

    residual_clip: float | str | None = "auto"
    intervals: float | None = None

    def make_loss(self, facts: Facts) -> TableLoss:
        return Logistic()

    def task_options(self, facts: Facts) -> dict[str, Any]:
        clip = self.residual_clip
        if self.intervals is not None and self.class_weight is not None:
            raise ConditionError(
                "class_weight must be None with intervals: it changes the model they are of"
            )
        if isinstance(clip, str):
            check.choice(("auto",), residual_clip=clip)
            # of users, mean gradients are clipped
            plain = self.intervals is not None or facts.unit == "user"
            clip = None if plain else residual_clip(facts.signal)
        return {"residual_clip": clip}

    def _scores(self, X: Any) -> FloatArray:
        """Log-odds (n, 1): of clipped gradients, not the scores of coef_ and intercept_."""
        scores = super()._scores(X)
        link = self._link
        return scores if link is None else link(scores, X)

    @property
    def _link(self) -> Link | None:
        clipped = self.plan_.task.clipped
        if clipped is None or getattr(self.plan_, "last_std", None):
            return None  # a scale of its own mends what clipping does
        return Link(clipped.clip, self.units_.rows)

    def predict_proba(self, X: Any) -> FloatArray:
        """Returns probabilities (n, 2) of public rows, whose log-odds are those of `decision_function`."""
        return chances(self._scores(X))


class SoftmaxRegression(Classifier):
    """Private softmax (multinomial logistic) regression for any number of classes, as on the features of a network.

    By default steps on clipped gradients, preconditioned by a noisy covariance; with a reg of yours the minimizer of
    the objective, by objective perturbation.

    Args:
        epsilon, delta, adjacency, n, bound_x, prepare, feature_center, feature_scale, fit_intercept,
            intercept_scaling, reg, radius, mechanism, n_max, secure, accountant: see `LinearModel`.
        classes, class_weight: see `Classifier`; the labels in the order of columns.

    Example:
        >>> import numpy as np
        >>> X = np.repeat(np.eye(3), 500, axis=0)
        >>> model = SoftmaxRegression(epsilon=4.0, n=1500, bound_x=1.0, classes=("a", "b", "c"))
        >>> model.fit(X, np.repeat(["a", "b", "c"], 500)).predict(np.eye(3)).tolist()
        ['a', 'b', 'c']

    Source:
        docs/proofs/heads.md; docs/proofs/objective.md
    """

    def make_loss(self, facts: Facts) -> TableLoss:
        return SoftmaxCrossEntropy(num_classes=len(self._classes()))

    def _coded(self, codes: Tensor) -> Tensor:
        return codes

    def predict_proba(self, X: Any) -> FloatArray:
        """Returns probabilities (n, K) of public rows."""
        return chances(self._scores(X))


class LinearSVC(BinaryClassifier):
    """Private linear support vector machine for two classes.

    Args:
        epsilon, delta, adjacency, n, bound_x, prepare, feature_center, feature_scale, fit_intercept,
            intercept_scaling, reg, radius, mechanism, n_max, secure, accountant: see `LinearModel`.
        classes, class_weight: see `Classifier`; two labels, of which the second is the positive one.
        loss: "smoothed_hinge" (a parabola at the corner, so that objective perturbation applies, which is more accurate
            by far) or "hinge" (output perturbation, with a corner of a thousandth).
        width: > 0, of the parabola.

    Example:
        >>> import numpy as np
        >>> X = np.linspace(-1, 1, 2000).reshape(-1, 1)
        >>> model = LinearSVC(epsilon=2.0, n=2000, bound_x=1.0, classes=(0, 1)).fit(X, X[:, 0] > 0)
        >>> model.predict([[-0.9], [0.9]]).tolist()
        [0, 1]

    Source:
        docs/proofs/output.md; docs/proofs/objective.md
    """

    loss: str = "smoothed_hinge"
    width: float = 1.0

    def make_loss(self, facts: Facts) -> TableLoss:
        chosen = check.choice(("smoothed_hinge", "hinge"), loss=self.loss)
        return Hinge() if chosen == "hinge" else SmoothedHinge(width=self.width)


class _Robust(BinaryClassifier):
    """Base: the logistic loss, tilted or under attack, in public units."""

    _in_parts = False

    def _measurements(self, *public: Any) -> None:
        """Measures nothing: the constants of a tilt or an attack are in public units."""

    def make_loss(self, facts: Facts) -> TableLoss:
        return Logistic()


class TiltedClassifier(_Robust):
    """Private tilted logistic regression, (1/tau) log mean exp(tau l_i) + (reg / 2n) |w|^2, by output perturbation.

    tau > 0 minds the records that fit badly, tau < 0 ignores them. The noise grows with e^(|tau| range of the losses):
    keep |tau| bound_x small, and give a radius, which bounds the range.

    Args:
        epsilon, delta, adjacency, n, bound_x, prepare, feature_center, feature_scale, fit_intercept,
            intercept_scaling, mechanism, n_max, secure, accountant: see `LinearModel`.
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

    def task_options(self, facts: Facts) -> dict[str, Any]:
        return {"tilt": check.finite(tilt=self.tilt), "n_min": self.n_min}


class AdversarialClassifier(_Robust):
    """Private logistic regression for rows that an adversary may perturb, by output perturbation.

    The loss of a record is its largest one over all prepared rows, the constant included, within `attack_radius`:
    log(1 + exp(-(y <w, x> - attack_radius |w|))), with the dual norm, smoothed at 0 by a public amount.

    Args:
        epsilon, delta, adjacency, n, bound_x, prepare, feature_center, feature_scale, fit_intercept,
            intercept_scaling, reg, radius, mechanism, n_max, secure, accountant: see `LinearModel`.
        classes, class_weight: see `Classifier`; two labels, of which the second is the positive one.
        attack_radius: > 0, in the units of prepared rows.
        attack_norm: 2, or inf (each feature moves by that much).
        attack_scale: (d,), >= 0, that the moves of each feature are multiplied by, 0 for one that nobody can move; the
            constant is then not moved either. None for 1.

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
    attack_scale: Any = None

    def task_options(self, facts: Facts) -> dict[str, Any]:
        return {
            "attack_radius": check.positive(attack_radius=self.attack_radius),
            "attack_norm": self.attack_norm,
            "attack_scale": as_numbers("attack_scale", self.attack_scale),
        }


_HOW_TO_BOUND_TARGETS = (
    "a public bound on targets, which are clipped to [-bound_y, bound_y]; take what a target can be"
    " by its meaning, never the largest in the data"
)


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

    def _kink(self, facts: Facts) -> float:
        """Threshold of Huber's loss in spreads of the targets, where none is given."""
        if facts.unit == "user":
            return NARROW_OF_USERS
        steps = ("auto", "noisy_gd", "preconditioned_gd")
        return NARROW if self.mechanism in steps else robust_width(facts.signal)

    def _read(self, y: Any, count: int, device: torch.device) -> tuple[Tensor, Tensor | None]:
        return as_column(y, "y", count, device), None

    def _shaped(self, weight: FloatArray, bias: FloatArray) -> tuple[FloatArray, Any]:
        return weight[0], float(bias[0])

    def predict(self, X: Any) -> FloatArray:
        """Returns predictions (n,) for public rows; they are prepared, and clipped, as in training."""
        return np.asarray(self._scores(X)[:, 0])


# of Lasso: the only values of some settings, and settings that its fit has too
_ALONE = {
    "mechanism": "auto",
    "reg": None,
    "radius": math.inf,
    "secure": None,
    "intercept_scaling": None,
}
_OF_THE_FIT = ("delta", "adjacency", "n", "n_max", "prepare", "fit_intercept")
_WIDEST = 100.0  # spreads, that targets of the chosen features are clipped to
# n mu / sqrt(d): below, a threshold in spreads of the targets is as low as by default; from there on, it is not lowered
_LOUD, _CALM = 200.0, 2000.0


class HuberRegressor(Regressor):
    """Private robust regression: squared errors up to a threshold, absolute errors beyond it.

    Args:
        epsilon, delta, adjacency, n, bound_x, prepare, feature_center, feature_scale, fit_intercept,
            intercept_scaling, reg, radius, mechanism, n_max, secure, accountant: see `LinearModel`.
        bound_y: Y > 0, that targets are clipped to; required.
        threshold: > 0, in units of the target, public, to which the noise is proportional; "auto" for 0.3 of
            the median distance of targets from their median, which is measured (a half for users, a half to one
            and a half for other mechanisms; a twentieth of bound_y where measuring does not pay). Where noise is loud,
            a given one is lowered to that, or to n mu / sqrt(d) / 200 times that if it is more, and not from 2000 on.

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

    def _wanted(self, facts: Facts) -> Wanted:
        given = self.threshold
        if isinstance(given, str):
            return Wanted(0.5, True)
        if facts.signal >= _CALM:
            return Wanted(0.5)
        return Wanted(0.5, True, check.positive(threshold=given) / self._lowered(facts))

    def _lowered(self, facts: Facts) -> float:
        """Largest threshold, in spreads, where one is given: what noise is proportional to."""
        return self._kink(facts) * max(1.0, facts.signal / _LOUD)

    def make_loss(self, facts: Facts) -> TableLoss:
        prepare = facts.prepare
        if prepare is not None and prepare.widest < math.inf:
            return Huber(self._lowered(facts))
        spreads = self._kink(facts)
        return Huber(_width("threshold", self.threshold, spreads, self._bound() / 20, facts))


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
        'preconditioned_gd'

    Source:
        docs/proofs/objective.md; docs/proofs/output.md#a-duality-gap-certifies
    """

    quantile: float = 0.5
    width: float | str = "auto"

    def _wanted(self, facts: Facts) -> Wanted:
        return Wanted(self.quantile, self.width == "auto")

    def make_loss(self, facts: Facts) -> TableLoss:
        least = 2 * min(
            self.quantile, 1 - self.quantile
        )  # smoothing moves other quantiles towards the median
        spreads = 2 * least * self._kink(facts)
        public = least * self._bound() / 10
        width = _width("width", self.width, spreads, public, facts)
        return SmoothedPinball(self.quantile, width) if width else Pinball(self.quantile)


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

    def _wanted(self, facts: Facts) -> Wanted:
        # the noise of the others is for the bound on targets, in any units
        ours = self.mechanism in ("auto", "boosted_adassp")
        return Wanted(0.5 if ours else None, ours)

    def make_loss(self, facts: Facts) -> TableLoss:
        return Squared()

    def task_options(self, facts: Facts) -> dict[str, Any]:
        if (
            self.intervals is not None
            and not self.fit_intercept
            and self.adjacency == ADD_REMOVE
        ):
            raise ConditionError(
                "fit_intercept must be True for intervals under add_remove: it counts the records"
            )
        return super().task_options(facts)


class Lasso(Regressor):
    """Private sparse least squares, for more features than records: few are chosen privately, and then fitted.

    Features are chosen one by one by the exponential mechanism, whose noise grows with the logarithm of their number;
    then `Ridge` fits those. All other coefficients are 0. Which are chosen is part of what is released.

    Args:
        epsilon, delta, adjacency, n, prepare, feature_center, feature_scale, fit_intercept, n_max, accountant: see
            `LinearModel`; delta > 0. The others must be left as they are.
        bound_x: B > 0 on each entry of a row, not on its norm: entries are clipped to [-B, B] in training. Features
            should be on like scales, as in [-1, 1]: a small one is chosen late.
        bound_y: Y > 0, that targets are clipped to; required.
        features: how many are chosen, public; None for 1 to 24, as many as noise lets be told apart.

    Example:
        >>> import numpy as np
        >>> X = np.random.default_rng(0).uniform(-1, 1, (2000, 3000))
        >>> model = Lasso(epsilon=4.0, n=2000, bound_x=1.0, bound_y=4.0, features=2).fit(X, 2 * X[:, 7] - X[:, 70])
        >>> np.flatnonzero(model.coef_).tolist()
        [7, 70]

    Source:
        docs/proofs/sparse.md
    """

    features: int | None = None

    _in_parts = False
    _centers = False

    def _wanted(self, facts: Facts) -> Wanted:
        return Wanted(0.5, True)

    def make_loss(self, facts: Facts) -> TableLoss:
        return Huber(1.0 if facts.prepare else self._bound() / 10)

    def _row_bound(self, dim: int) -> float:
        return round_up(super()._row_bound(dim) * math.sqrt(dim))

    def _required(self) -> dict[str, str]:
        how = (
            "a public bound on each entry of rows, in public units, that entries are clipped to"
        )
        return super()._required() | {"bound_x": how}

    @typed
    def plan(self, dim: int, unit: str = "example") -> LinearPlan:
        """As in `LinearModel`."""
        for name, only in _ALONE.items():
            check.choice((only,), **{name: getattr(self, name)})
        check.choice(("example",), unit=unit)  # no groups
        task = self._task(dim, unit)
        rho, features, epsilon = shares(task, self.features)
        fit = Ridge(
            epsilon=epsilon,
            bound_x=math.sqrt(features),
            bound_y=self._bound() if task.prepare is None else _WIDEST,
            **{name: getattr(self, name) for name in _OF_THE_FIT},
        ).plan(features)
        return SparsePlan(task=task, rho=rho, box=super()._row_bound(dim), fit=fit)


def _width(name: str, given: float | str, spreads: float, unit: float, facts: Facts) -> float:
    """Returns a number in units of targets; where it is "auto", so many spreads, or a unit if none are measured."""
    if isinstance(given, str):
        check.choice(("auto",), **{name: given})
        prepare = facts.prepare
        return spreads if prepare is not None and prepare.quantile is not None else unit
    return check.between(0.0, 1e100, **{name: given})
