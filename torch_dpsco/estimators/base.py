"""What all private linear models do: read data, fit once within a budget, predict, and report the cost.

Every argument is a public number, chosen without looking at the data. Rows are prepared as

    x = (clip((raw - feature_center) / feature_scale, bound_x), intercept_scaling)

in training, and alike in prediction, since the weights were found for rows prepared so. With prepare="auto" center and
spread of rows (and location and spread of targets) are measured privately before, within the same budget, and rows are
centered and clipped in these units. The objective is in sum form,

    sum_i c_i l(<w, x_i>; y_i) + (reg / 2) |w|^2

with the weight of the intercept regularized like the rest. `plan_linear` chooses a mechanism by public facts; plans
of each are in `output`, `objective`, `gradient_descent` and `least_squares`; `fits` carries one out.

Differs from the paper in: see `estimators.output`; the rest is not there. Source: docs/proofs/output.md and
docs/proofs/objective.md
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar, dataclass_transform

import numpy as np
import torch
from torch import Tensor

from torch_dpsco import _validate as check
from torch_dpsco._validate import check_fields, require_ours, typed
from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.accounting.analysis.gaussian import gaussian_mu
from torch_dpsco.accounting.analysis.rounding import FloatArray, asks_exact, require_gaussian
from torch_dpsco.accounting.budgets import Budget, warn_of_delta
from torch_dpsco.accounting.designs import Full
from torch_dpsco.accounting.events import ADD_REMOVE, ZERO_OUT, check_adjacency
from torch_dpsco.accounting.report import OneFit, PrivacyReport
from torch_dpsco.accounting.statement import Statement, make_statement
from torch_dpsco.acts import act
from torch_dpsco.errors import ConditionError, InfeasibleError
from torch_dpsco.estimators.fits import LinearFit, fit_linear
from torch_dpsco.estimators.gradient_descent import plan_noisy_gd, plan_users
from torch_dpsco.estimators.least_squares import (
    plan_adassp,
    plan_boosted,
    plan_preconditioned_gd,
)
from torch_dpsco.estimators.objective import plan_objective
from torch_dpsco.estimators.output import plan_output, with_named_reg
from torch_dpsco.estimators.preparation import (
    Facts,
    Preparation,
    PrivatePreparation,
    Units,
    Wanted,
    counts_level,
    number_of_counts,
    share_within,
    signal_to_noise,
    sum_level,
)
from torch_dpsco.estimators.reading import (
    BaseEstimator,
    NotFittedError,
    as_features,
    check_columns,
    is_sparse,
    read_columns,
    record_weights,
    require_dtype,
)
from torch_dpsco.estimators.released import scores_of
from torch_dpsco.estimators.solvers import needed_eigenvalue
from torch_dpsco.estimators.task import LinearPlan, LinearTask
from torch_dpsco.losses.base import TableLoss
from torch_dpsco.sampling.loader import user_ids

_WITHIN = 0.9  # of rows of labelled records within the radius; a half of others, which are shrunk with their targets
_CONSTANT = 0.3  # of the intercept beside rows of norm 1
_MOST = 2**53  # records of a table
_CLEAR = 1e30  # eigenvalue of a stand-in for a Hessian, above all noise
_HOW_TO_BOUND = (
    "a public bound on the norm of rows, after feature_center and feature_scale: longer rows are"
    " clipped to it. Add up what a row can be at most by its code book (k features in [0, 1]:"
    " sqrt(k); a one-hot group: 1); never its largest norm in the data"
)
_HOW_TO_COUNT = (
    "a public number of records, for a plan without a table or under add_remove. There the true one"
    " is private: give one of the size that was planned for (a power of ten will do). It sets the"
    " regularizer of some mechanisms and the cap n_max = 2 n, never the noise of a record"
)
_Model = TypeVar("_Model", bound="LinearModel")


@dataclass_transform(eq_default=False, kw_only_default=True)
@dataclass(eq=False, repr=False, kw_only=True)
class LinearModel(BaseEstimator):
    """Base: settings, one release, scores.

    Args:
        epsilon: > 0, of the budget of each fit.
        delta: in [0, 1) of the budget; 0 for pure differential privacy. Choose it far below 1/n.
        adjacency: "zero_out" (a record is emptied), "replace_one", or "add_remove" (the number of records is private).
        n: public number of records. None for that of the table that is fitted, which is public but under add_remove,
            where it must be given: one of the size that was planned for.
        bound_x: B > 0, norm that rows are clipped to; required.
        prepare: "auto" measures privately what rows and targets look like where that pays by public numbers (needs
            delta > 0, an intercept, and neither feature_center, feature_scale, reg nor radius, which are in public
            units); None measures nothing.
        feature_center: (d,), subtracted from rows; None for 0.
        feature_scale: (d,), > 0, that they are divided by; None for 1.
        fit_intercept: whether a constant is appended to rows.
        intercept_scaling: the constant, > 0; a larger one is regularized less, and costs noise. None for 1, or 0.3
            where rows are measured, which then have norms of at most 1.
        reg: in sum form, > 0; None for the mechanism's default; "theory", with mechanism "output" and a radius, for
            that of the paper.
        radius: > 0, norm that the answer is projected to; inf for none.
        mechanism: "auto" (chosen by public facts) or one of `MECHANISMS`.
        n_max: public cap on the number of records; None for 2 n.
        secure: "exact" for noise drawn in integers on a public grid: mechanism "output", delta > 0.
        accountant: ledger that every fit is charged to, copies' and clones' too; None for a new one per fit.

    Attributes:
        coef_: weights for raw rows, float64; (1, d), (K, d), or (d,) of a regressor.
        intercept_: (1,), (K,), or a float. Scores of rows within bound_x are rows @ coef_.T + intercept_.
        mechanism_: that was used.
        plan_: that was carried out, from `plan`.
        units_: `estimators.preparation.Units` that rows and targets were fitted in; released where they are measured.
        privacy_: `PrivacyReport` of the ledger after the fit.
        n_features_in_: d.
        feature_names_in_: names of the columns of a data frame (with scikit-learn only).

    Guarantee:
        (epsilon, delta)-differential privacy of each fit, unit: one row with its target and weight, or with groups all
        rows of one user; for all fitted attributes together, and for predictions of rows that are public. Nothing
        fitted depends on a noiseless weight, a loss, a number of iterations or a certificate. What must hold: the
        settings are public; n_max bounds the number of records (users); ids are right. Running time is not covered.
    """

    epsilon: float = 1.0
    delta: float = 1e-6
    adjacency: str = ZERO_OUT
    n: int | None = None
    bound_x: float | None = None
    feature_center: Any = None
    feature_scale: Any = None
    fit_intercept: bool = True
    intercept_scaling: float | None = None
    prepare: str | None = "auto"
    reg: float | str | None = None
    radius: float = math.inf
    mechanism: str = "auto"
    n_max: int | None = None
    secure: str | None = None
    accountant: Accountant | None = None

    _in_parts: ClassVar[bool] = (
        True  # whether the objective is a sum over records, which may come in parts
    )
    _centers: ClassVar[bool] = True  # whether rows are measured

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        dataclass(eq=False, repr=False, kw_only=True)(cls)

    def __new__(cls, *args: Any, **settings: Any) -> Any:
        """Answers keywords of other libraries with ours."""
        require_ours(cls.__name__, settings, cls.__dataclass_fields__)
        return super().__new__(cls)

    # -- what a subclass says ----------------------------------------------------------------------------------------

    @abstractmethod
    def make_loss(self, facts: Facts) -> TableLoss:
        """The loss, of public settings, in the units that are measured."""

    @abstractmethod
    def _read(self, y: Any, count: int, device: torch.device) -> tuple[Tensor, Tensor | None]:
        """Targets in the form of `fit_linear`, and public weights by class or None; raises for shapes and dtypes."""

    @abstractmethod
    def _shaped(self, weight: FloatArray, bias: FloatArray) -> tuple[FloatArray, Any]:
        """Returns coef_ and intercept_ of (K, d) weights for raw rows and (K,) intercepts, K = 1 or of classes."""

    def _classes(self) -> list[Any] | None:
        """Public labels; None where targets are numbers."""
        return None

    def task_options(self, facts: Facts) -> dict[str, Any]:
        """Further arguments of the `LinearTask`, as `make_loss`."""
        return {}

    # -- fitting -----------------------------------------------------------------------------------------------------

    def fit(
        self: _Model, X: Any, y: Any = None, sample_weight: Any = None, groups: Any = None
    ) -> _Model:
        """Fits by one private release, with fresh noise, charged to the ledger before it is drawn.

        Args:
            X: rows (n, d): numpy array, torch tensor on any device, data frame, lists, or sparse rows of scipy. A row
                with a non-finite value counts as a record without influence. Or, for a table that no memory holds, a
                callable that returns a fresh iterator over blocks (X, y) or (X, y, sample_weight) at each call, the
                same records in the same order, of one dtype; a fit calls it tens of times. Or
                `streams.partitions.Partitions`, of a table on an engine, where each partition is read so.
            y: (n,) targets; labels that are none of the classes, and non-finite ones, likewise. None beside blocks.
            sample_weight: (n,) weights of the losses, a private part of the records, clipped to [0, 1], since a larger
                one would count for more than the noise hides; NaN makes a null record. None for ones.
            groups: (n,) ids of the people (users) whose rows these are, integers or strings: then all rows of one are
                protected together, n and n_max are numbers of users, and a ledger must be of unit "user". For smooth
                losses of one score, by noisy gradient descent; a user may have any number of rows.

        Returns:
            The model.

        Raises:
            BudgetExceeded: nothing was drawn; the model is what it was.
            CalibrationError: the settings do not go together; nothing was charged.
            ConditionError: likewise; blocks, partitions or sparse rows, for what is not made of sums over records.
            NotCertifiedError: blocks or partitions were other records at a later reading, outside of any guarantee.
            ValueError: a setting, a shape or a dtype; never a value of a record.
            UnitError: X has not n rows, where n is public.
        """
        blocks = None
        if y is None or is_sparse(X) or not hasattr(X, "__len__"):
            # PRIVACY: no ledger travels to a partition (test_no_ledger_travels_to_a_partition)
            blocks = act("fit.stored")(X, y, sample_weight, self._unspent()._read)
        features = as_features(X) if blocks is None else blocks.empty()[0]
        count, width = features.shape
        users = (
            None if groups is None or blocks is not None else user_ids(groups, count, "groups")
        )
        # PRIVACY: all that can fail by settings does before anything is charged (test_bad_settings_charge_nothing)
        settings = self
        if self.n is None and self.adjacency != ADD_REMOVE:
            stored = count if blocks is None else blocks.count(_MOST)
            settings = self._unspent(n=stored if users is None else len(users.unique()))
        plan = settings.plan(width, "example" if groups is None else "user")
        plan.warn_if_buried()
        ledger = plan.ledger() if self.accountant is None else self.accountant
        columns = read_columns(X if blocks is None or is_sparse(X) else features, width)
        privacy = self._report_of(
            ledger
        )  # raises if the ledger will have no answer at this delta
        stand_in(self, plan, privacy)  # raises if an answer could not be installed
        if blocks is None:
            targets, factors = self._read(y, count, features.device)
            require_dtype(y, self._classes())
            weights = record_weights(sample_weight, factors, count, features.device)
            fitted = fit_linear(plan, features, targets, weights, users=users, accountant=ledger)
        else:
            fitted = fit_linear(plan, blocks, accountant=ledger)
        self.privacy_ = self._report_of(ledger)
        self.plan_ = plan
        self.mechanism_ = plan.mechanism
        self._install(fitted)
        vars(self).pop("feature_names_in_", None)
        vars(self).update(columns)
        return self

    @typed
    def plan(self, dim: int, unit: str = "example") -> LinearPlan:
        """Returns the public numbers of a fit, before anything is spent: `print(model.plan(d))`.

        Args:
            dim: d, number of features.
            unit: "example", or "user" for a fit with groups.

        Raises:
            CalibrationError: the settings do not go together; or no table of this size has intervals.
            ValueError: a setting.
        """
        plan = plan_linear(self._task(dim, unit), self.mechanism, self.secure)
        if plan.task.curvature:
            _require_showable(plan)
        return plan

    def preview(
        self,
        X_like: Any = None,
        y_like: Any = None,
        groups: Any = None,
        *,
        dim: int | None = None,
        unit: str = "example",
        epsilons: Sequence[float] | None = None,
        runs: int = 10,
    ) -> Any:
        """Returns what a fit will lose (`show.preview.Preview`): `print(model.preview(X_public, y_public))`.

        The data given MUST be public, or made up: they are read without noise, and no ledger is charged. They should
        look like the private table; what they differ in, a preview does not see. It makes len(epsilons) * runs fits
        of n rows; the model and its ledger stay what they are.

        Args:
            X_like: public rows (m, d), finite, m >= 50; half are fitted, resampled to n, and half are held out. None
                for what public numbers say alone.
            y_like: their targets (m,), of which all can be used.
            groups: their users (m,), 50 or more, to preview a fit with groups.
            dim: d, needed without rows, and only then.
            unit: "example" or "user", of a preview without rows.
            epsilons: public list; None for a quarter of the model's own to four times it.
            runs: fits at each epsilon, 3 to 1000.

        Raises:
            CalibrationError: the settings do not go together at one of the epsilons.
            ValueError: a setting, a shape, or a value, since the data are public.
        """
        return act("model.preview")(
            self,
            X_like,
            y_like,
            groups,
            dim=dim,
            unit=unit,
            epsilons=epsilons,
            runs=runs,
        )

    def _unspent(self: _Model, **changes: Any) -> _Model:
        """A copy of these settings, without the ledger."""
        return type(self)(**{**self.get_params(deep=False), "accountant": None, **changes})

    def _task(self, dim: int, unit: str = "example") -> LinearTask:
        check.positive_count(dim=dim)
        check_fields(self, largest=1e100)
        self._require_given()
        budget = Budget(
            self.epsilon, self.delta, adjacency=check_adjacency(self.adjacency), unit=unit
        )
        given = Preparation(
            self._row_bound(dim),
            center=as_numbers("feature_center", self.feature_center),
            scale=as_numbers("feature_scale", self.feature_scale),
        )
        n = check.positive_count(n=self.n)
        warn_of_delta(budget, n)
        intervals = self._level_of_intervals(budget)
        wanted = check.choice(("auto", None), prepare=self.prepare)
        mu = budget.epsilon / math.sqrt(dim)
        if budget.delta > 0:
            mu = gaussian_mu(budget.epsilon, budget.delta)
        facts = Facts(None, signal_to_noise(mu, n, dim), unit)
        if budget.delta > 0 and wanted and self.secure is None and not intervals:
            # units clip rows and targets
            facts = facts._replace(prepare=self._measurements(given, n, dim, budget, facts))
        task = LinearTask(
            loss=self.make_loss(facts),
            preparation=self._with_constant(given, facts.prepare),
            prepare=facts.prepare,
            dim=dim,
            n=n,
            budget=budget,
            reg=None if isinstance(self.reg, str) else self.reg,
            radius=self.radius,
            n_max=0 if self.n_max is None else check.positive_count(n_max=self.n_max),
            curvature=intervals,
            **self.task_options(facts),
        )
        if isinstance(self.reg, str):
            return with_named_reg(task, self.reg, self.mechanism)
        return task

    def _with_constant(
        self, given: Preparation, prepare: PrivatePreparation | None
    ) -> Preparation:
        """Returns rows, given or of norm 1 where they are measured, with the constant of an intercept."""
        measured = prepare is not None and bool(prepare.rows)
        rows = Preparation(1.0) if measured else given
        default = _CONSTANT if measured else 1.0
        constant = default if self.intercept_scaling is None else self.intercept_scaling
        constant = check.positive(intercept_scaling=constant) if self.fit_intercept else 0.0
        return replace(rows, intercept=constant, whole=measured)

    def _row_bound(self, dim: int) -> float:
        """Returns the bound on the norm of rows."""
        return check.positive(bound_x=self.bound_x)

    def _required(self) -> dict[str, str]:
        """Settings that must be given, and how to choose them."""
        return {"n": _HOW_TO_COUNT, "bound_x": _HOW_TO_BOUND}

    def _require_given(self) -> None:
        """Raises ValueError for all settings together that must be given, and are not."""
        required = self._required().items()
        missing = {name: how for name, how in required if getattr(self, name) is None}
        if missing:
            how = "; ".join(f"{name}, {how}" for name, how in missing.items())
            names = " and ".join(missing).replace(" and ", ", ", len(missing) - 2)
            raise ValueError(f"{names} must be given: {how} (got None)")

    def _level_of_intervals(self, budget: Budget) -> float:
        """Returns the level mu of what intervals need; 0 where they are not paid for."""
        share = getattr(self, "intervals", None)
        if share is None:
            return 0.0
        pure = budget.delta == 0  # which the task refuses
        level = budget.epsilon if pure else gaussian_mu(budget.epsilon, budget.delta)
        return math.sqrt(check.open_interval(0.0, 1.0, intervals=share)) * level

    def _measurements(
        self, given: Preparation, n: int, dim: int, budget: Budget, facts: Facts
    ) -> PrivatePreparation | None:
        """Returns what is measured before the fit, by public numbers; None for nothing."""
        if (self.reg, self.radius) != (None, math.inf) or not self.fit_intercept:
            return None  # of public units; so is the origin that a line without an intercept goes through
        mu = gaussian_mu(budget.epsilon, budget.delta)
        quantile, spreads, widest = self._wanted(facts)
        bound = getattr(self, "bound_y", None)
        moved = given.center or given.scale or not self._centers
        rows = 0.0 if moved else sum_level(mu, n, dim, budget.adjacency)
        counts = number_of_counts(rows=rows > 0, targets=quantile is not None, spreads=spreads)
        level = counts_level(mu, n, counts)
        if not level or (not rows and quantile is None):
            return None
        return PrivatePreparation(
            given=given,
            rows=rows,
            counts=level,
            within=share_within(_WITHIN if bound is None else 0.5, level, n, counts),
            bound_y=bound,
            quantile=quantile,
            spreads=spreads,
            widest=widest,
        )

    def _wanted(self, facts: Facts) -> Wanted:
        """What to measure of the targets."""
        return Wanted()

    def _report_of(self, ledger: Accountant) -> PrivacyReport:
        return ledger.report(self.delta if ledger.budget is None else None)

    def _install(self, fitted: LinearFit) -> None:
        self.units_ = fitted.units
        for name, released in (("hessian_", fitted.hessian), ("moments_", fitted.moments)):
            vars(self).pop(name, None)
            if released is not None:
                setattr(self, name, released.cpu().numpy())
        weight, bias = (part.numpy() for part in self.units_.line(fitted.weights.cpu()))
        self.coef_, self.intercept_ = self._shaped(weight, bias)

    # -- scores ------------------------------------------------------------------------------------------------------

    def _scores(self, X: Any) -> FloatArray:
        """Scores (n, K) of public rows, prepared as in training."""
        if not hasattr(self, "coef_"):
            raise NotFittedError(
                f"This {type(self).__name__} instance is not fitted yet: call fit before"
            )
        features = torch.empty(X.shape) if is_sparse(X) else as_features(X)
        if len(features) == 0:
            raise ValueError(
                f"Found array with 0 sample(s) (shape={tuple(features.shape)}): nothing to predict"
            )
        check_columns(self, X, features.shape[1])
        # rows to predict are not private: the measured length of rows clips those that train only
        task = self.plan_.task
        given = (
            replace(task.preparation, intercept=0.0)
            if task.prepare is None
            else task.prepare.given
        )
        return scores_of(given, np.atleast_2d(self.coef_), np.atleast_1d(self.intercept_), X)

    # -- what is public ----------------------------------------------------------------------------------------------

    def report(self) -> Statement:
        """Returns what the last fit guarantees, in plain words, with all else on its ledger at that time."""
        if not hasattr(self, "privacy_"):
            raise NotFittedError(
                f"This {type(self).__name__} instance is not fitted yet: nothing was released"
            )
        task = self.plan_.task
        promises = [
            "All settings (bounds, center, scale, classes, n) were chosen without a look at these"
            " data."
        ]
        if task.adjacency == ADD_REMOVE:
            promises.append(f"There are no more than n_max = {task.n_max} {{units}}.")
        n = task.n if self.plan_.search is None else self.plan_.search.n
        run = OneFit(
            type(self).__name__, Full(n), self.plan_.event(), 0, 0, True, tuple(promises)
        )
        return make_statement(self.privacy_, run)

    def summary(self, level: float = 0.95) -> Any:
        """Returns estimates, standard errors, p-values and intervals for raw features: `statistics.summary.Summary`.

        The estimates are `coef_` and `intercept_` without the bias of the regularizer. No budget is spent.

        Args:
            level: in (0, 1), of each interval for itself.

        Raises:
            ConditionError: intervals are not proved for this model, were not paid for by its fit, or what was released
                does not stand out of its noise.
        """
        name = type(self).__name__
        check.open_interval(0.0, 1.0, level=level)
        if not hasattr(self, "hessian_"):
            raise ConditionError(
                f"{name} has no summary: intervals must be paid for by the fit, of LogisticRegression"
                " or Ridge (intervals=0.3 spends 0.3 of the same budget on them)"
            )
        return act("model.summary")(self, level)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()  # type: ignore[misc]  # asked for by scikit-learn only, whose base has it
        tags.target_tags.required = True
        tags.input_tags.sparse = self._in_parts
        tags.non_deterministic = True
        return tags


def _require_showable(plan: LinearPlan) -> None:
    """Raises ConditionError where public numbers say that intervals cannot be shown after they were paid for."""
    task = plan.task
    assert task.smoothness is not None  # of plans with intervals
    needed = needed_eigenvalue(task.width, plan.hessian_scale)
    # a record adds at most the smoothness to the trace, of which the least eigenvalue is at most an equal share
    most = task.most_records * task.smoothness / task.width
    if most <= needed:
        raise ConditionError(
            "intervals must be of more records, fewer features, a larger epsilon or share, or a"
            " smaller bound_x: they need a least eigenvalue of the released Hessian above"
            f" {needed:.3g}, and {task.most_records} records give at most {most:.3g}"
        )


def stand_in(model: _Model, plan: LinearPlan, privacy: PrivacyReport) -> _Model:
    """Returns a copy as a fit leaves it, with coefficients of 0: what cannot be made of it cannot be made of a fit.

    Args:
        model: its settings.
        plan: of the fit.
        privacy: report that takes the place of that after the fit.
    """
    made = model._unspent()
    task = plan.task
    one = torch.eye(task.width, dtype=torch.float64)
    weights = torch.zeros(task.num_scores, task.width).double()
    moments = torch.zeros(task.width + 1).double()
    beside = (_CLEAR * one, moments) if task.curvature else (None, None)
    made.plan_ = plan
    made.mechanism_ = plan.mechanism
    made.privacy_ = privacy
    made._install(LinearFit(weights, Units(task.preparation), *beside))
    return made


def as_numbers(name: str, values: Any) -> tuple[float, ...] | None:
    """Returns public numbers, one per feature, as a tuple."""
    if values is None:
        return None
    return tuple(check.finite(**{name: value}) for value in np.atleast_1d(values).tolist())


_ROUNDED = "use mechanism='output', without groups"
# n mu / sqrt(d)
_NOISY_LABELS = 400
_NOISY_TARGETS = 20_000
_DROWNED = 30  # of that, where X'X with noise tells nothing
_PLANNERS: dict[str, Callable[[LinearTask], LinearPlan]] = {
    "objective": plan_objective,
    "noisy_gd": lambda task: plan_noisy_gd(task, released="last" if task.reg else "all"),
    "adassp": plan_adassp,
    "boosted_adassp": plan_boosted,
    "preconditioned_gd": plan_preconditioned_gd,
}
MECHANISMS = ("auto", "output", *_PLANNERS)


def choose_mechanism(task: LinearTask, secure: str | None = None) -> str:
    """Returns the mechanism for a task, by public facts: loss, epsilon, delta, reg; `secure` leaves those it can.

    | loss | delta > 0 | delta = 0 |
    |---|---|---|
    | squared, not clipped | boosted_adassp | output |
    | smooth, bounded gradients, real targets, much noise | preconditioned_gd; noisy_gd where X'X drowns | as below |
    | smooth, bounded gradients, labels, much noise | noisy_gd | as below |
    | the same, less noise, or reg is given | objective | objective where reg allows it, else output |
    | softmax | preconditioned_gd; objective for a reg of yours | output |
    | with kinks, tilted, adversarial | output | output |

    Source: docs/proofs/objective.md#default-regularizer, docs/proofs/output.md#how-far-to-go,
    docs/proofs/heads.md#which-mechanism, and docs/choosing.md.

    Example:
        >>> import torch_dpsco as dp
        >>> from torch_dpsco.estimators.preparation import Preparation
        >>> task = LinearTask(loss=dp.losses.Hinge(), preparation=Preparation(1.0), dim=3, n=100,
        ...                   budget=dp.Budget(1.0, 1e-6))
        >>> choose_mechanism(task)
        'output'
    """
    if task.curvature:
        return "adassp" if task.loss.squared else "objective"
    if task.tilt or task.attack_radius or asks_exact(secure):
        return "output"
    if task.loss.squared and task.residual_clip is None:
        return "output" if task.pure else "boosted_adassp"
    classes = task.num_scores > 1
    if classes and not task.pure:
        return "preconditioned_gd" if task.reg is None else "objective"
    if task.lipschitz is None or task.smoothness is None:
        return "output"
    if not task.pure:
        if not _is_noisy(task):
            return "objective"
        real = task.loss.target_kind == "real" and task.clipped is None
        signal = signal_to_noise(task.level, task.n, task.parameters)
        return "preconditioned_gd" if real and signal >= _DROWNED else "noisy_gd"
    if classes:
        return "output"
    try:
        plan_objective(task)
    except InfeasibleError:
        return "output"
    return "objective"


def _is_noisy(task: LinearTask) -> bool:
    """Returns whether noisy gradient descent is better than the determinant that objective perturbation pays for.

    Where epsilon is small, the regularizer that keeps log(1 + beta/reg) a part of it hides more than the noise does.
    """
    if task.reg is not None or task.noise_multiplier is not None:
        return False
    most = _NOISY_TARGETS if task.loss.target_kind == "real" else _NOISY_LABELS
    return signal_to_noise(task.level, task.n, task.parameters) < most


_REASONS = {
    "robust": (
        "n mu / sqrt(d) is so small that the regularizer of objective perturbation would hide more"
        " than noise does, and X'X with noise makes steps few: see"
        " docs/proofs/boosting.md#losses-with-bounded-slopes"
    ),
    "preconditioned_gd": (
        "for classes steps on clipped gradients bear the noise best, whatever n, d, classes and"
        " epsilon: see docs/choosing.md#heads-with-many-classes"
    ),
    "noisy_gd": (
        "n mu / sqrt(d) is so small that the regularizer of objective perturbation would hide more"
        " than noise does: see docs/proofs/output.md#how-far-to-go"
    ),
}


def plan_linear(
    task: LinearTask,
    mechanism: str = "auto",
    secure: str | None = None,
) -> LinearPlan:
    """Returns the plan of one release of a private linear model.

    Args:
        task: public numbers.
        mechanism: "auto" (`choose_mechanism`) or one of `MECHANISMS`.
        secure: "exact" for noise drawn in integers (output; delta > 0), which "auto" then chooses.

    Raises:
        ConditionError: the mechanism does not cover the task.
    """
    check.choice(MECHANISMS, mechanism=mechanism)
    if task.budget is not None and task.budget.unit == "user":
        check.choice(("auto", "noisy_gd"), mechanism=mechanism)
        require_gaussian(secure, _ROUNDED)
        if task.lipschitz is None or task.num_scores > 1:
            raise ConditionError(
                "groups need a loss of one score with bounded gradients, which LogisticRegression,"
                f" LinearSVC, HuberRegressor and QuantileRegressor have (got {task.loss!r})"
            )
        return plan_users(task)
    if mechanism == "auto":
        chosen = choose_mechanism(task, secure)
        plan = plan_linear(task, chosen, secure)
        robust = chosen == "preconditioned_gd" and task.num_scores == 1
        return replace(plan, reason=_REASONS.get("robust" if robust else chosen, ""))
    if mechanism == "output":
        return plan_output(task, secure)
    require_gaussian(secure, _ROUNDED)
    return _PLANNERS[mechanism](task)
