"""What a private fit will lose, before anything is spent: simulated on a PUBLIC sample, or what public numbers say.

Half of the sample (of its users) is resampled with replacement to the planned n and fitted with fresh noise, on
throw-away ledgers; the other half is held out and scored. A band of 90 % at each epsilon is made of

    runs      their 5 % and 95 % quantiles, or mean -+ t sd sqrt(1 + 1/runs) (Student's t) where that is wider
    rows      1.645 sqrt(2) se, added in squares: se, by a bootstrap, is the standard error of the score on the held-out
              half, which a score on a test set of as many rows has, too
    learning  half of what the non-private fit gains on its own rows over held-out ones, on the better side only: by so
              much, to first order, does a half of the sample teach less than fresh records would

It tells about the private table as much as the sample looks like it, and no more.

Differs from the paper in: it is not there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar
from scipy.special import logsumexp
from torch import Tensor

from torch_dpsco import _validate as check
from torch_dpsco import shown
from torch_dpsco.accounting.calibrate import rounded_up
from torch_dpsco.estimators.base import LinearModel
from torch_dpsco.estimators.fits import LinearFit, fit_linear
from torch_dpsco.estimators.preparation import Units
from torch_dpsco.estimators.reading import as_features, require_finite
from torch_dpsco.estimators.records import Records
from torch_dpsco.estimators.solvers import lbfgs, newton
from torch_dpsco.estimators.task import LinearPlan, LinearTask, build_objective
from torch_dpsco.losses import Hinge, Pinball, SmoothedHinge, SmoothedPinball
from torch_dpsco.losses.base import ScalarLoss, TableLoss
from torch_dpsco.sampling.loader import user_ids

if TYPE_CHECKING:
    pass

LEAST_ROWS = 50
_AROUND = (0.25, 0.5, 1.0, 2.0, 4.0)  # of a model's epsilon
_BETTER_UP = ("AUC", "accuracy")
_MOST_RUNS = 1000
_BOOTSTRAPS = 50
_TINY_REG = 1e-6
_CLOSE = 1e-3
_NEWTON_DIM = 1000
_KINK = 0.01
_Array = NDArray[Any]


@dataclass(frozen=True)
class Band:
    """A score of private fits: its median, and what 9 in 10 of them are expected to lie between."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Preview:
    """What fits are expected to score, at several epsilons; `print(preview)` is a table.

    Attributes:
        model: name of the class.
        n: planned number of records, or of users.
        unit: "example" or "user".
        delta: of all budgets.
        epsilons: increasing.
        mechanisms: that would be used, one per epsilon.
        noise: norm of the noise over the largest possible signal, one per epsilon; above 1 it is hopeless whatever
            the data are (`LinearPlan.noise_shares`, in at most min(parameters, n) directions).
        sampled: records, or users, of the public sample; 0 for none, and then there are no scores.
        runs: fits at each epsilon.
        scores: name of a score to a band per epsilon; held-out rows count alike, users' too.
        not_private: name of a score to that of the loss planned at the largest epsilon, fitted without noise, clipped
            gradients and smoothed kinks, with a negligible regularizer.
        constant: name of a score to that of the best constant answer.
    """

    model: str
    n: int
    unit: str
    delta: float
    epsilons: tuple[float, ...]
    mechanisms: tuple[str, ...]
    noise: tuple[float, ...]
    sampled: int
    runs: int
    scores: Mapping[str, tuple[Band, ...]]
    not_private: Mapping[str, float]
    constant: Mapping[str, float]

    @property
    def hopeless(self) -> tuple[float, ...]:
        """The epsilons at which noise is longer than every possible signal."""
        return tuple(
            epsilon
            for epsilon, noise in zip(self.epsilons, self.noise, strict=True)
            if noise > 1
        )

    def __repr__(self) -> str:
        return shown.line(self, self._about)

    def _repr_html_(self) -> str:
        return shown.table(
            self._about, [*self._table(), *([self._verdict] if self.hopeless else [])]
        )

    def _table(self) -> list[list[str]]:
        table = [
            [
                "epsilon",
                "mechanism",
                "noise/signal",
                *(f"{name} (90 % band)" for name in self.scores),
            ]
        ]
        for k, epsilon in enumerate(self.epsilons):
            bands = (
                f"{b[k].median:.4g} ({b[k].low:.4g} to {b[k].high:.4g})"
                for b in self.scores.values()
            )
            table.append([f"{epsilon:g}", self.mechanisms[k], f"{self.noise[k]:.2g}", *bands])
        for label, values in (("not private", self.not_private), ("a constant", self.constant)):
            if values:
                table.append([label, "", "", *(f"{values[name]:.4g}" for name in self.scores)])
        return table

    @property
    def _about(self) -> str:
        how = "public numbers only; a public sample would show scores"
        if self.scores:
            how = f"simulated on {self.sampled} public {self.unit}s, {self.runs} fits at each epsilon"
        return f"{self.model}, n={self.n} {self.unit}s, delta {rounded_up(self.delta)}: {how}"

    @property
    def _verdict(self) -> tuple[str, str]:
        epsilons = ", ".join(f"{epsilon:g}" for epsilon in self.hopeless)
        return f"hopeless at epsilon {epsilons}", "noise buries every signal"

    def __str__(self) -> str:
        table = self._table()
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        out = [self._about]
        out += ["  ".join(map(str.ljust, row, widths)).rstrip() for row in table]
        out += [": ".join(self._verdict)] if self.hopeless else []
        return "\n".join(out)


def preview(
    model: Any,
    X_like: Any,
    y_like: Any,
    groups: Any,
    *,
    dim: int | None,
    unit: str,
    epsilons: Sequence[float] | None,
    runs: int,
) -> Preview:
    """Returns what fits of a model will lose; see `LinearModel.preview`."""
    if not 3 <= check.count(runs=runs) <= _MOST_RUNS:
        raise ValueError(f"runs must be in [3, {_MOST_RUNS}] (got {check.shown(runs)})")
    chosen = _epsilons(model.epsilon, epsilons)
    if (X_like is None) == (dim is None):
        raise ValueError(
            "X_like, a public sample, or dim, the number of features, must be given, one of them"
            f" (got {'neither' if dim is None else 'both'})"
        )
    if (X_like is None) != (y_like is None) or (groups is not None and X_like is None):
        raise ValueError(
            "X_like and y_like must be given together, and with groups (got None for one)"
        )
    unit = check.choice(("example", "user"), unit=unit) if groups is None else "user"
    features = None if X_like is None else as_features(X_like)
    width = check.positive_count(dim=dim) if features is None else features.shape[1]
    plans = [model._unspent(epsilon=epsilon).plan(width, unit) for epsilon in chosen]
    if features is None:
        return of_plans(type(model).__name__, plans)
    require_finite(features)
    targets, factors = model._read(y_like, len(features), features.device)
    ids = None if groups is None else user_ids(groups, len(features))
    return simulated(model._unspent(), plans, Sample(features, targets, factors, ids), runs)


def _epsilons(own: float, given: Sequence[float] | None) -> list[float]:
    """Returns the epsilons to look at, increasing; raises ValueError for those that are none."""
    if given is None:
        return [check.positive(epsilon=own) * factor for factor in _AROUND]
    if isinstance(given, (str, bytes, Mapping)) or not hasattr(given, "__iter__"):
        raise ValueError(f"epsilons must be a list of numbers > 0 (got {check.shown(given)})")
    chosen = sorted({check.positive(epsilons=value) for value in given})
    if not chosen:
        raise ValueError("epsilons must hold at least one (got none)")
    return chosen


def of_plans(name: str, plans: Sequence[LinearPlan]) -> Preview:
    """Returns what public numbers say of plans that differ in epsilon: no scores."""
    task = plans[0].task
    return Preview(
        model=name,
        n=task.n,
        unit=plans[0].unit,
        delta=task.target.delta,
        epsilons=tuple(plan.task.target.epsilon for plan in plans),
        mechanisms=tuple(plan.mechanism for plan in plans),
        noise=tuple(
            max(share for _, share, _ in plan.noise_shares())
            * math.sqrt(min(plan.task.parameters, task.n))
            for plan in plans
        ),
        sampled=0,
        runs=0,
        scores={},
        not_private={},
        constant={},
    )


@dataclass(frozen=True)
class Sample:
    """A public sample.

    Args:
        features: (m, d).
        targets: (m,) of the loss.
        weights: (m,) public weights by class; None for ones.
        ids: (m,) users; None for one row each.
    """

    features: Tensor
    targets: Tensor
    weights: Tensor | None
    ids: Tensor | None


def simulated(model: Any, plans: Sequence[LinearPlan], sample: Sample, runs: int) -> Preview:
    """Fits by each plan to resampled halves of a public sample, on throw-away ledgers, and scores on the rest.

    Args:
        model: unfitted, which takes the fits.
        plans: that differ in epsilon, increasing; the last one's objective is minimized without noise, too.
        sample: public.
        runs: fits of each model.

    Raises:
        ValueError: a sample that is too small, or that has values that cannot be used.
    """
    task = plans[-1].task
    rng = np.random.default_rng(0)
    halves = _Halves.of(task, sample, rng)
    rows = halves.rows
    out = halves.out
    plain = _not_private(plans[-1], sample, halves)
    answer = _answer(model, plans[-1], plain, sample.features[out], clipped=False)
    reached = _scores(task, answer, halves.truth[out])
    own = _answer(model, plans[-1], plain, sample.features[rows], clipped=False)
    seen = _scores(task, own, halves.truth[rows])
    best = np.broadcast_to(_best(task, halves.truth[rows]), answer.shape)
    bands: dict[str, list[Band]] = {score: [] for score in reached}
    for plan in plans:
        found = []
        for _ in range(runs):
            fitted = halves.fitted(plan, sample, rng)
            answer = _answer(model, plan, fitted, sample.features[out])
            found.append(_scores(task, answer, halves.truth[out]))
        errors = halves.standard_errors(task, answer, rng)
        for score, row in bands.items():
            learned = (reached[score] - seen[score]) / 2
            values = np.array([one[score] for one in found])
            row.append(_band(values, errors[score], learned, score in _BETTER_UP))
    return replace(
        of_plans(type(model).__name__, plans),
        sampled=halves.count,
        runs=runs,
        scores={score: tuple(row) for score, row in bands.items()},
        not_private=reached,
        constant=_scores(task, best, halves.truth[out]),
    )


@dataclass(frozen=True, eq=False)
class _Halves:
    """A sample of records, or of users with all their rows: one half to fit, one held out."""

    truth: _Array
    order: _Array  # rows, user by user
    starts: _Array
    sizes: _Array
    own: _Array  # users
    held: _Array

    @classmethod
    def of(cls, task: LinearTask, sample: Sample, rng: np.random.Generator) -> _Halves:
        """Splits a sample at random; raises ValueError if it cannot be used."""
        truth = sample.targets.double().cpu().numpy()
        ids = np.arange(len(truth)) if sample.ids is None else sample.ids.numpy()
        _, codes, sizes = np.unique(ids, return_inverse=True, return_counts=True)
        if len(sizes) < LEAST_ROWS:
            what = "X_like" if sample.ids is None else "groups"
            raise ValueError(
                f"{what} must have at least {LEAST_ROWS} records, or users (got {len(sizes)})"
            )
        least = {"sign": 1, "class": 0}.get(task.loss.target_kind)
        usable = (
            np.isfinite(truth) if least is None else (np.abs(truth) if least else truth) >= least
        )
        if not usable.all():
            raise ValueError(
                "y_like must hold finite targets, or labels of classes, only: it is public"
            )
        users = rng.permutation(len(sizes))
        middle = len(users) // 2
        order = np.argsort(codes, kind="stable")
        starts = np.cumsum(sizes) - sizes
        made = cls(truth, order, starts, sizes, users[:middle], users[middle:])
        if least is not None and any(
            len(np.unique(truth[part])) < 2 for part in (made.rows, made.out)
        ):
            raise ValueError("y_like must hold two classes in each half of it")
        return made

    @property
    def count(self) -> int:
        """Number of records, or of users."""
        return len(self.sizes)

    @property
    def rows(self) -> _Array:
        """Rows to fit."""
        return self.rows_of(self.own)[0]

    @property
    def out(self) -> _Array:
        """Rows that are held out."""
        return self.rows_of(self.held)[0]

    def rows_of(self, drawn: _Array) -> tuple[_Array, _Array]:
        """Returns all rows of drawn users, and the place of each row's user in the draw."""
        sizes = self.sizes[drawn]
        within = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        return self.order[np.repeat(self.starts[drawn], sizes) + within], np.repeat(
            np.arange(len(drawn)), sizes
        )

    def fitted(self, plan: LinearPlan, sample: Sample, rng: np.random.Generator) -> LinearFit:
        """Returns a fit to resampled records of the first half."""
        drawn, users = self.rows_of(rng.choice(self.own, plan.task.n))
        weights = None if sample.weights is None else sample.weights[drawn]
        ids = None if sample.ids is None else torch.from_numpy(users)
        return fit_linear(
            plan, sample.features[drawn], sample.targets[drawn], weights, users=ids
        )

    def standard_errors(
        self, task: LinearTask, answer: _Array, rng: np.random.Generator
    ) -> dict[str, float]:
        """Returns that of each score of an answer for the held-out rows, by a bootstrap of records or users."""
        place = np.empty(len(self.truth), dtype=np.int64)
        place[self.out] = np.arange(len(answer))
        found = []
        for _ in range(_BOOTSTRAPS):
            drawn, _ = self.rows_of(rng.choice(self.held, len(self.held)))
            found.append(_scores(task, answer[place[drawn]], self.truth[drawn]))
        return {
            name: float(np.nanstd([one[name] for one in found], ddof=1)) for name in found[0]
        }


def _band(values: _Array, error: float, learned: float, up: bool) -> Band:
    """Returns the band of the module's docstring; `learned`: how far held-out rows score above a fit's own, halved."""
    runs = len(values)
    median = float(np.median(values))
    reach = float(scipy.stats.t.ppf(0.95, runs - 1) * values.std(ddof=1)) * math.sqrt(
        1 + 1 / runs
    )
    low, high = (float(end) for end in np.quantile(values, (0.05, 0.95)))
    low = min(low, float(values.mean()) - reach)
    high = max(high, float(values.mean()) + reach)
    wide = float(scipy.stats.norm.ppf(0.95)) * math.sqrt(2) * error
    low = median - math.hypot(median - low, wide)
    high = median + math.hypot(high - median, wide)
    if up:
        return Band(median, max(low, 0.0), min(high - min(learned, 0.0), 1.0))
    return Band(median, max(low - max(learned, 0.0), 0.0), high)


def _scores(task: LinearTask, answer: _Array, truth: _Array) -> dict[str, float]:
    """Returns the scores of answers (n,), or (n, K), for the targets of a loss."""
    loss = task.loss
    if loss.num_scores == 1 and not isinstance(loss, ScalarLoss):
        return {"mean loss": _mean_loss(loss, answer, truth)}
    if loss.target_kind == "real":
        errors = truth - answer
        if loss.squared:
            return {"mean squared error": float(np.mean(errors**2))}
        if isinstance(loss, (Pinball, SmoothedPinball)) and loss.quantile != 0.5:
            return {
                "pinball loss": float(
                    np.mean(np.maximum(loss.quantile * errors, (loss.quantile - 1) * errors))
                )
            }
        return {"mean absolute error": float(np.mean(np.abs(errors)))}
    if answer.ndim == 2:
        own = answer[np.arange(len(truth)), truth.astype(np.int64)]
        total = logsumexp(answer, axis=1)
        return {
            "log-loss": float(np.mean(total - own)),
            "accuracy": float(np.mean(answer.argmax(1) == truth)),
        }
    signs = np.where(truth > 0, 1.0, -1.0)
    positive = int((signs > 0).sum())
    area = math.nan
    if 0 < positive < len(signs):
        wins = scipy.stats.mannwhitneyu(
            answer[signs > 0], answer[signs < 0], method="asymptotic"
        )
        area = float(wins.statistic) / (positive * (len(signs) - positive))
    if isinstance(loss, (Hinge, SmoothedHinge)):
        return {"accuracy": float(np.mean((answer > 0) == (signs > 0))), "AUC": area}
    return {"log-loss": float(np.mean(np.logaddexp(0.0, -signs * answer))), "AUC": area}


def _mean_loss(loss: TableLoss, answer: _Array, truth: _Array) -> float:
    """Returns the mean of a loss that is of neither margins nor residuals."""
    return float(loss.value(torch.tensor(answer), torch.tensor(truth)).mean())


def _best(task: LinearTask, truth: _Array) -> Any:
    """Returns the best constant answer for targets."""
    loss = task.loss
    if loss.num_scores > 1 or (isinstance(loss, ScalarLoss) and loss.target_kind != "real"):
        places = truth if loss.num_scores > 1 else truth > 0
        shares = np.bincount(places.astype(np.int64), minlength=max(loss.num_scores, 2)) + 0.5
        scores = np.log(shares / shares.sum())
        return scores if len(scores) > 2 else scores[1] - scores[0]

    def score(answer: float) -> float:
        (found,) = _scores(task, np.full_like(truth, answer), truth).values()
        return found

    return float(minimize_scalar(score).x)


def _not_private(plan: LinearPlan, sample: Sample, halves: _Halves) -> LinearFit:
    """Fits by the loss of a plan: no noise, gradients not clipped, kinks not smoothed, a negligible regularizer."""
    task, prepare, (rows, users) = plan.task, plan.task.prepare, halves.rows_of(halves.own)
    loss = task.loss
    targets, center, spread = _in_units(task, sample.targets[rows])
    if isinstance(loss, Hinge):
        loss = SmoothedHinge(width=_KINK)
    if isinstance(loss, (Pinball, SmoothedPinball)):
        loss = SmoothedPinball(
            quantile=loss.quantile, width=_KINK * float(targets.double().std()) + 1e-9
        )
    given = task.preparation if prepare is None else prepare.given
    given = replace(given, intercept=given.bound_x if task.preparation.intercept else 0.0)
    weights = torch.from_numpy(1.0 / np.bincount(users)[users]).to(targets.device)
    if sample.weights is not None:
        weights = weights * sample.weights[rows]
    classes = loss.num_scores if loss.num_scores > 1 else None
    records = Records(
        sample.features[rows], targets, weights, num_classes=classes, prepare=given
    )
    bare = replace(
        task,
        loss=loss,
        preparation=given,
        prepare=None,
        residual_clip=None,
        n=len(halves.own),
        n_max=0,
        n_min=None,
    )
    reg = plan.reg if task.tilt < 0 else _TINY_REG * bare.n * given.bound**2
    objective = build_objective(bare, reg, records)
    solver = newton if objective.dim <= _NEWTON_DIM else lbfgs
    start = torch.zeros(objective.dim, dtype=torch.float64, device=objective.device)
    found = solver(objective, start, _CLOSE / given.bound)
    return LinearFit(found.reshape(task.num_scores, -1), Units(given, center, spread))


def _in_units(task: LinearTask, targets: Tensor) -> tuple[Tensor, float, float]:
    """Returns targets in the units that a plan measures privately, and these: their center and spread."""
    prepare = task.prepare
    if prepare is None or prepare.quantile is None or prepare.bound_y is None:
        return targets, 0.0, 1.0
    targets = targets.double().clamp(-prepare.bound_y, prepare.bound_y)
    center = float(np.quantile(targets.cpu().numpy(), prepare.quantile))
    spread = 1.0
    if prepare.spreads:
        spread = max(float((targets - center).abs().median()), 1e-3 * prepare.bound_y)
        spread = min(spread, prepare.widest)
    return (targets - center) / spread, center, spread


def _answer(
    model: Any, plan: LinearPlan, fitted: LinearFit, features: Tensor, *, clipped: bool = True
) -> _Array:
    """Returns the answers of a fit for raw rows: (n,), or (n, K) for K > 2 classes, as models give them."""
    model.plan_ = plan
    model._install(fitted)
    # without a clip there is none to undo
    scores: _Array = model._scores(features) if clipped else LinearModel._scores(model, features)
    if scores.shape[1] == 1:
        return scores[:, 0]
    return scores if scores.shape[1] > 2 else scores[:, 1] - scores[:, 0]
