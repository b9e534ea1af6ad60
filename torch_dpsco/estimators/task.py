"""A private linear model to fit, in public numbers only: constants, prepared rows, what all mechanisms' plans share.

The objective is in sum form, so that neither it nor its noise needs the number of records:

    J(w) = sum_i l(<w, x_i>; y_i) + (reg / 2) |w|^2,    x_i = (clip((raw_i - center) / scale, B), c0)

with every row clipped to norm B and the constant c0 appended where there is an intercept, which is regularized like the
rest. A record with a non-finite value or an unknown label contributes 0.

Differs from the paper in: the sum form (the paper's is the mean, F = J / n, reg = n lam).

Source: docs/proofs/output.md#records-and-the-objective, docs/proofs/output.md#where-minimizers-can-be.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from torch_dpsco import _validate as check
from torch_dpsco._validate import check_fields
from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.accounting.analysis.gaussian import gaussian_mu
from torch_dpsco.accounting.analysis.rounding import down, safe
from torch_dpsco.accounting.budgets import Budget
from torch_dpsco.accounting.designs import BaseEvent
from torch_dpsco.accounting.events import ADD_REMOVE, ZERO_OUT, Adjacency, RDPCurve, Sequential
from torch_dpsco.errors import ConditionError, MissingConstantError, UnitError
from torch_dpsco.estimators.objectives import LinearObjective
from torch_dpsco.estimators.preparation import Preparation, PrivatePreparation, Units, level_left
from torch_dpsco.estimators.records import (
    Objective,
    RawPart,
    Records,
    Stored,
    gradient_rounding,
)
from torch_dpsco.estimators.robust import Adversarial, Tilted, margin_loss
from torch_dpsco.losses.base import TableLoss
from torch_dpsco.losses.table import ResidualClipped, SoftmaxCrossEntropy
from torch_dpsco.noise import Source
from torch_dpsco.problem import Problem, round_up
from torch_dpsco.sampling import fingerprint
from torch_dpsco.step import checks
from torch_dpsco.step.plan import Plan

_CHECKS: dict[str, Callable[..., Any]] = {  # of what is not None
    **dict.fromkeys(("dim", "n", "n_min"), check.positive_count),
    **dict.fromkeys(("noise_multiplier", "reg", "bound_y"), check.positive),
    **dict.fromkeys(("attack_radius", "curvature"), check.nonnegative),
    "n_max": check.count,
    "radius": partial(check.positive, allow_inf=True),
    "tilt": check.finite,
    "attack_norm": partial(check.choice, (2.0, math.inf)),
}


@dataclass(frozen=True, kw_only=True)
class LinearTask:
    """Public numbers of a private linear model.

    Args:
        loss: of one score, or the softmax cross-entropy.
        preparation: of rows; in private units, where those are measured.
        prepare: what is measured before the fit, within the same budget; None for nothing.
        curvature: level mu >= 0 of what intervals need beside the answer, released within the same budget: a Hessian
            at it, or of the squared loss the sum of squared targets; 0 for none.
        dim: d >= 1, number of raw features.
        n: public number of records; a reference under add_remove.
        budget: of unit "example"; delta = 0 asks for a pure epsilon. None where the noise is given.
        noise_multiplier: > 0, std of Gaussian noise over what one record adds: the bound on its gradient, or on how far
            it moves the answer. None for noise that is chosen for the budget.
        adjacency: of the guarantee where there is no budget; else the budget's.
        bound_y: Y > 0, that real targets are clipped to, in private units where those are measured; None for labels.
        reg: in sum form, > 0; None for the mechanism's default.
        radius: R > 0 of the ball that the answer is projected on; inf for none.
        residual_clip: kappa in (0, 1]: gradients are clipped at kappa times the bound of rows; None for no clip.
        n_max: public cap on the number of records; default 2 n.
        n_min: public lower bound on it, for tilts under add_remove.
        tilt: tau of tilted risk; 0 for the sum.
        attack_radius: rho >= 0 of adversarial rows; 0 for none.
        attack_norm: 2 or inf.
        attack_scale: (d,), >= 0: how far each feature is moved, in attack_radius, and the constant is not; None for 1,
            the constant included.

    Raises:
        ConditionError: settings that do not go together.
        ValueError: a number is out of range.
    """

    loss: TableLoss
    preparation: Preparation
    dim: int
    n: int
    budget: Budget | None = None
    noise_multiplier: float | None = None
    adjacency: Adjacency = ZERO_OUT
    bound_y: float | None = None
    reg: float | None = None
    radius: float = math.inf
    residual_clip: float | None = None
    n_max: int = 0
    n_min: int | None = None
    tilt: float = 0.0
    attack_radius: float = 0.0
    attack_norm: float = 2.0
    attack_scale: tuple[float, ...] | None = None
    prepare: PrivatePreparation | None = None
    curvature: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self)
        given = {name: how for name, how in _CHECKS.items() if getattr(self, name) is not None}
        check.fields(self, **given)
        if self.budget is not None:
            object.__setattr__(self, "adjacency", self.budget.adjacency)
        elif self.noise_multiplier is None:
            raise ValueError(
                "budget or noise_multiplier must be given: the target, or noise of your own"
            )
        object.__setattr__(self, "n_max", self.n_max or 2 * self.n)
        if self.n_max < self.n:
            raise ValueError(f"n_max must be >= n={self.n} (got {self.n_max})")
        if (self.bound_y is not None) != (self.loss.target_kind == "real"):
            raise ValueError(
                f"bound_y must be given for real targets, and for them only (got {self.bound_y})"
            )
        self._require_shape()
        self._require_one_variant()
        if self.prepare is not None:
            self._require_preparable(self.prepare)
        if self.curvature:
            self._require_intervals()

    def _require_shape(self) -> None:
        """Raises ValueError for numbers per feature of another length, ConditionError for several scores."""
        numbers = [("attack_scale", self.attack_scale)]
        for one in (self.preparation, self.prepare.given if self.prepare else self.preparation):
            numbers += [("feature_center", one.center), ("feature_scale", one.scale)]
        for name, given in numbers:
            if given is not None and len(given) != self.dim:
                raise ValueError(f"{name} must have {self.dim} numbers (got {len(given)})")
        for value in self.attack_scale or ():
            check.between(0, 1e100, attack_scale=value)
        if self.num_scores > 1 and not isinstance(self.loss, SoftmaxCrossEntropy):
            raise ConditionError(
                f"loss must be of one score, or the softmax cross-entropy (got {self.loss!r})"
            )

    def _require_one_variant(self) -> None:
        """Raises ConditionError for two of tilt, attack and clip, or for one that is not proved for the loss."""
        if self.residual_clip is not None:
            # PRIVACY: above 1 nothing is clipped, and the constants would be too (test_a_clip_is_a_share_of_the_bound)
            if not 0 < check.finite(residual_clip=self.residual_clip) <= 1:
                raise ValueError(f"residual_clip must be in (0, 1] (got {self.residual_clip})")
            self.clipped  # noqa: B018  raises if this loss cannot be clipped
        if self.attack_radius:
            margin_loss(self.loss)
        if self.tilt and (
            self.lipschitz is None or self.smoothness is None or self.num_scores > 1
        ):
            raise ConditionError(
                f"loss must be smooth, Lipschitz and of one score to be tilted (got {self.loss!r})"
            )
        if sum((self.tilt != 0, self.attack_radius > 0, self.residual_clip is not None)) > 1:
            raise ConditionError("tilt, attack_radius and residual_clip must not be combined")

    def _require_intervals(self) -> None:
        """Raises ConditionError where what is released tells no confidence intervals."""
        needed = (
            ("loss", "Logistic or Squared", self.loss, self.loss.intervals is not None),
            ("delta", "> 0", 0.0, not self.pure),
            ("residual_clip", "None", self.residual_clip, self.residual_clip is None),
            ("prepare", "None", self.prepare, self.prepare is None),
            ("radius", "inf", self.radius, self.radius == math.inf),
            ("tilt", "0", self.tilt, not self.tilt),
            ("attack_radius", "0", self.attack_radius, not self.attack_radius),
        )
        for name, what, given, holds in needed:
            if not holds:
                raise ConditionError(f"{name} must be {what} for intervals (got {given!r})")

    def _require_preparable(self, prepare: PrivatePreparation) -> None:
        if self.tilt or self.attack_radius or self.pure:
            raise ConditionError(
                "prepare must be None for pure budgets, tilts and attacks (it is Gaussian, and sets"
                " units)"
            )
        unit = replace(self.preparation, intercept=0.0, whole=False)
        if unit != (Preparation(1.0) if prepare.rows else prepare.given):
            raise ValueError(
                "preparation must be that of"
                f" {'rows of norm 1' if prepare.rows else 'prepare.given'} (got {unit})"
            )
        if self.bound_y != prepare.most:
            raise ValueError(
                f"bound_y must be {prepare.most}, in the units of prepare (got {self.bound_y})"
            )

    def measured_units(self, records: Records, source: Source) -> Units:
        """Returns units of rows and targets, measured where they are to be: noise that the caller has charged."""
        if self.prepare is None:
            return Units(self.preparation)
        return self.prepare.measure(
            records, self.preparation, self.most_records, self.adjacency, source
        )

    @property
    def target(self) -> Budget:
        """The budget that a number is chosen for; raises ValueError if there is none."""
        if self.budget is None:
            raise ValueError(
                "budget must be given, for noise or reg to be chosen: or give noise_multiplier"
                " and reg"
            )
        return self.budget

    @property
    def measured(self) -> float:
        """Level mu of what is measured beside the fit: before it, or the Hessian at its answer."""
        return self.curvature if self.prepare is None else self.prepare.level

    @property
    def level(self) -> float:
        """Level mu of Gaussian releases that the budget leaves for the fit; raises ValueError if there is none."""
        return level_left(gaussian_mu(self.target.epsilon, self.target.delta), self.measured)

    @property
    def pure(self) -> bool:
        """Whether a pure epsilon is asked for."""
        return self.noise_multiplier is None and self.target.delta == 0

    def require_gaussian(self, mechanism: str) -> None:
        """Raises ConditionError for a mechanism whose noise is Gaussian, where a pure epsilon is asked for."""
        if self.pure:
            raise ConditionError(
                f"{mechanism} is Gaussian: give delta > 0, or use output perturbation"
            )

    def smooth_constants(self, mechanism: str) -> tuple[float, float]:
        """Returns bounds on gradient and curvature of a record's loss; raises ConditionError where one is missing."""
        if self.tilt or self.attack_radius:
            raise ConditionError(
                f"tilt and attack_radius must be 0 for {mechanism}, which needs a plain sum of smooth"
                f" losses (got {self.tilt}, {self.attack_radius}): use output perturbation"
            )
        if self.lipschitz is not None and self.smoothness is not None:
            return self.lipschitz, self.smoothness
        raise ConditionError(
            f"{mechanism} needs a plain sum of smooth losses with bounded gradients (got"
            f" {self.loss!r}): give a residual_clip, take SmoothedHinge or Huber, or use output"
            " perturbation"
        )

    @property
    def num_scores(self) -> int:
        """K: 1, or the number of classes of a softmax."""
        return self.loss.num_scores

    @property
    def width(self) -> int:
        """Coordinates of a row, the intercept's included."""
        return self.dim + (self.preparation.intercept > 0)

    @property
    def parameters(self) -> int:
        """Coordinates of the released vector."""
        return self.num_scores * self.width

    @cached_property
    def problem(self) -> Problem:
        """Constants of the loss for prepared rows, not clipped."""
        return self.loss.problem(bound_x=self.preparation.bound, bound_y=self.bound_y or 1.0)

    @cached_property
    def clipped(self) -> ResidualClipped | None:
        """The loss with clipped gradients, if there is a clip."""
        if self.residual_clip is None:
            return None
        return ResidualClipped(self.loss, self.residual_clip * self.preparation.bound)  # type: ignore[arg-type]

    @property
    def monotone(self) -> bool:
        """Whether the derivative keeps its sign for each record: a margin loss."""
        return self.loss.monotone and not self.attack_radius

    @cached_property
    def smoothness(self) -> float | None:
        """Beta >= phi'' |x|^2 of a record, at every w; None if the derivative jumps."""
        if self.clipped is not None:
            return self.clipped.smoothness(self.preparation.bound)
        return self.problem.smoothness

    @property
    def lipschitz(self) -> float | None:
        """L >= |phi'| |x| of a record, at every w; None if there is none (squared loss)."""
        return self.clipped.clip if self.clipped is not None else self.problem.lipschitz

    @property
    def attack_reach(self) -> float:
        """How far an attack moves a row in the L2 norm."""
        scale = self.attack_scale
        if self.attack_norm != 2:
            length = math.hypot(*scale) if scale else math.sqrt(self.width)
            return round_up(self.attack_radius * length)
        if scale:
            return round_up(self.attack_radius * max(scale))
        return self.attack_radius

    @property
    def most_records(self) -> int:
        """Public cap on the number of records that contribute."""
        return self.n_max if self.adjacency == ADD_REMOVE else self.n

    def minimizer_radius(self, reg: float) -> float:
        """Bound on |w| of every possible minimizer of the objective with this regularizer.

        Raises:
            MissingConstantError: nothing bounds it.
        """
        # PRIVACY: of up to so many records: for fewer it is smaller (test_the_radius_holds_for_n_max_records);
        # margin of the quotient (docs/proofs/rounding.md#model-of-arithmetic)
        return self._minimizer_radius(down(reg / self.most_records, 1e-15))

    def lipschitz_at_minimizers(self, reg: float) -> float:
        """L at every possible minimizer of the objective with this regularizer."""
        return self.lipschitz or self.problem.grad_bound(self.minimizer_radius(reg))

    def loss_range(self, mean_reg: float) -> float:
        """Length of an interval that holds the loss of every record at every possible minimizer of a tilted mean."""
        radius = self._minimizer_radius(mean_reg)
        own = self.loss.loss_range(round_up(radius * self.preparation.bound))
        # losses are >= 0, at most l0 at w = 0, and L-Lipschitz
        assert self.lipschitz is not None
        assert self.problem.loss_at_zero is not None
        return min(own, round_up(self.problem.loss_at_zero + self.lipschitz * radius))

    def _minimizer_radius(self, mean_reg: float) -> float:
        at_zero = self.problem.loss_at_zero
        return minimizer_radius(
            mean_reg, lipschitz=self.lipschitz, loss_at_zero=at_zero, radius=self.radius
        )

    def gradient_rounding(
        self,
        reg: float,
        norm: float,
        lipschitz: float,
        *,
        dim: int,
        most: int,
        linear: float = 0.0,
    ) -> float:
        """What rounding may do to a gradient of the sum of so many records, see `estimators.records`."""
        return gradient_rounding(
            most,
            dim,
            lipschitz=lipschitz,
            smoothness=self.smoothness or 0.0,
            reg=reg,
            norm=norm,
            weight=most,
            linear=linear,
            score_offset=self.problem.score_offset or 0.0,
        )


def minimizer_radius(
    reg: float,
    *,
    lipschitz: float | None = None,
    loss_at_zero: float | None = None,
    radius: float = math.inf,
) -> float:
    """Returns rho >= |w| for every minimizer w of (1/n) sum_i l(w, x_i) + (lam/2) |w|^2, over R^d or a ball.

    rho = min(R, L / lam, sqrt(2 l0 / lam)): the first by the optimality condition, <s + lam w, -w> >= 0; the second,
    for nonnegative losses, by F(w) <= F(0). A sum of up to N terms is a mean with lam = reg / N.

    Args:
        reg: lam > 0.
        lipschitz: L > 0, on the whole of R^d or of the ball.
        loss_at_zero: l0 >= 0 with 0 <= l(w, x) everywhere and l(0, x) <= l0.
        radius: R of the ball of a constrained problem, > 0; inf for none.

    Raises:
        ValueError: an argument is out of range.
        MissingConstantError: nothing that is given bounds the minimizer.

    Guarantee: holds for exact minimizers only, so that constants of the ball of this radius must not be used for
        objective perturbation or noisy gradient descent, whose iterates are unbounded.

    Source: docs/proofs/output.md#where-minimizers-can-be

    Example:
        >>> round(minimizer_radius(0.5, lipschitz=1.0, loss_at_zero=0.25), 9)
        1.0
    """
    bounds = [radius]
    if lipschitz is not None:
        bounds.append(safe(lipschitz / reg))
    if loss_at_zero is not None:
        bounds.append(safe(math.sqrt(2 * loss_at_zero / reg)))
    if min(bounds) == math.inf:
        raise MissingConstantError(
            "no bound on the minimizer: give lipschitz, loss_at_zero or radius"
        )
    return min(bounds)


@dataclass(frozen=True)
class Search:
    """The search whose best trial a fit was: what was promised and charged is the search's.

    Args:
        budget: of the search.
        event: that it charged.
        n: public number of records, of all its parts.
    """

    budget: Budget
    event: RDPCurve
    n: int


@dataclass(frozen=True, kw_only=True)
class LinearPlan(Plan):
    """Public numbers of one release; its charge is computed from the numbers that it is made with.

    Args:
        task: what was planned for: budget, adjacency and the regularizer that was chosen included.
        search: that the fit was the best trial of, None for a fit by itself.
        reason: why this mechanism was chosen, in words; "" where it was asked for.
    """

    task: LinearTask
    search: Search | None = None
    reason: str = field(default="", compare=False, repr=False)
    budget: Budget | None = field(init=False, repr=False)
    adjacency: Adjacency = field(init=False, repr=False)

    values: ClassVar[tuple[type, ...]] = (LinearTask, Preparation, PrivatePreparation, Search)
    mechanism: ClassVar[str]
    in_parts: ClassVar[bool] = True  # whether blocks of records will do

    def __post_init__(self) -> None:
        check_fields(self)
        # PRIVACY: a trial by itself has a smaller epsilon (test_a_winner_shows_what_its_search_promised_and_charged)
        object.__setattr__(
            self, "budget", self.task.budget if self.search is None else self.search.budget
        )
        object.__setattr__(self, "adjacency", self.task.adjacency)
        wanted = "adassp" if self.task.loss.squared else "objective"
        if (
            self.task.curvature and self.mechanism != wanted
        ):  # what is paid for would not be released
            raise ConditionError(
                f"mechanism must be {wanted!r} where intervals are paid for (got"
                f" {self.mechanism!r})"
            )
        super().__post_init__()

    @property
    def reg(self) -> float:
        """Regularizer of the objective, in sum form."""
        return check.positive(reg=self.task.reg)

    @property
    def hessian_scale(self) -> float:
        """Std of the noise on the diagonal of the Hessian that intervals need; 0 for no release."""
        return 0.0

    def event(self) -> BaseEvent:
        """Returns what the release charges, with what is measured before it; of a winner what its search charged."""
        return self._event() if self.search is None else self.search.event

    def _event(self) -> BaseEvent:
        prepare = self.task.prepare
        own = self.own_event()
        # PRIVACY: units are released too (test_what_is_measured_is_charged_with_the_release)
        return own if prepare is None else Sequential((prepare.event(self.task.adjacency), own))

    @abstractmethod
    def own_event(self) -> BaseEvent:
        """Returns what the release alone costs: of the noise that it draws, and how far a record moves it."""

    @property
    @abstractmethod
    def noise_and_signal(self) -> tuple[float, float, str]:
        """Std per coordinate of the noise, bound on the norm of what it is added to, and what that is, in words."""

    def noise_shares(self) -> Iterator[tuple[str, float, int | None]]:
        """Yields that of the one release; see `Plan.noise_shares`."""
        std, signal, of = self.noise_and_signal
        yield of, std / signal, self.task.parameters

    def warn_if_buried(self) -> None:
        """Warns of noise that is longer than anything that it is added to."""
        if self.budget is not None:
            epsilon = self.budget.epsilon
            for of, noise, size in self.noise_shares():
                if size and noise**2 * size > 1:  # in as many directions, or fewer
                    checks.warn_if_buried(noise, n=self.task.n, dim=size, epsilon=epsilon, of=of)

    def solve(self, records: Records, start: Tensor | None = None) -> Any:
        """Returns what `release` needs: NOT private.

        Args:
            records: of `estimators.task.make_records`.
            start: point (parameters,) that a loop left; None for 0.
        """
        return records

    def release(
        self,
        solved: Any,
        accountant: Accountant,
        generator: Source,
        seen: Sequence[Tensor] = (),
    ) -> Tensor:
        """Charges, draws the noise and returns the private vector (parameters,) float64.

        Args:
            solved: from `solve`.
            accountant: charged before anything is drawn.
            generator: of the noise, which must stay secret as long as the data are; no stream of the solver.
            seen: raw records, by which an answer that was paid for is known (`accounting.answers`).

        Raises:
            BudgetExceeded: nothing was drawn.
            PrivacyError: an answer was paid for with other records.
            NotCertifiedError: an internal error, see `estimators.solvers.solve`; outside of the guarantee.
        """
        # PRIVACY: charged before anything is drawn (test_a_refused_release_draws_nothing)
        answer = accountant.pay(
            self.event(),
            self.to_dict,
            partial(fingerprint, contents=seen),
            lambda: self.draw(solved, generator).tolist(),
        )
        return torch.tensor(answer, dtype=torch.float64, device=generator.device)

    @abstractmethod
    def draw(self, solved: Any, generator: Source) -> Tensor:
        """Draws the noise, which the caller has charged, and returns the private vector; see `release`."""

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yields what all such plans say; see `Plan.lines`."""
        task = self.task
        std, signal, of = self.noise_and_signal
        targets = "" if task.bound_y is None else f", targets to {task.bound_y:g}"
        yield (
            "model",
            (
                f"{task.loss}: {task.parameters} parameters, rows of norm at most"
                f" {task.preparation.bound:.4g}{targets}, reg={self.reg:.4g} on the sum of {task.n}"
                " losses"
            ),
        )
        if task.prepare is not None:
            yield "prepared", str(task.prepare)
        norm = std * math.sqrt(task.parameters)
        yield (
            "noise",
            (
                f"std {std:.3g} per parameter, norm {norm:.3g}: {norm / signal:.2g} of {of}, at"
                f" most {signal:.3g}"
            ),
        )
        if task.curvature:
            noise = self.hessian_scale
            refused = "they may be refused after the fit, if it does not stand out of its noise"
            yield (
                "intervals",
                f"by a Hessian with noise of std {noise:.3g}, charged along; {refused}",
            )
        if self.search is not None:
            best = "the best of a secret number of trials, charged as a whole"
            yield "search", f"{best}; model and noise are the winner's"
        most = f"their number is n={task.n}"
        if task.adjacency == ADD_REMOVE:
            most = f"there are at most n_max={task.n_max} of them"
        if self.reason:
            yield "chosen", self.reason
        yield "assumed", f"all settings were chosen without a look at the records; {most}"


_DISTANCE = 15.0  # |w| times the norm of rows: scores of about 15 / sqrt(d)
KINK = (
    1e-3  # public smoothing, of a loss with a kink and of the norm of an adversarial objective
)


def make_records(
    task: LinearTask,
    features: Tensor,
    targets: Tensor,
    weights: Tensor | None = None,
    units: Units | None = None,
    users: Tensor | None = None,
) -> Records:
    """Returns the records of a task, prepared when they are read; targets and weights are clipped to their bounds.

    Args:
        task: its public numbers.
        features: raw, (n, d).
        targets: (n,).
        weights: (n,), or None for ones.
        units: released ones, in which they are to be; None for public ones.
        users: user of each row, from 0, where the number of users is public and not that of rows; None for rows.

    Raises:
        ConditionError: weights for a tilted mean, whose constants have equal ones.
        UnitError: their number is not the public one under replace_one and zero_out, or is above n_max under
            add_remove, which tells that the promise was broken.
        ValueError: shapes or dtypes.
    """
    if users is None:
        _require_number(task, len(features), "record")
    else:
        _require_number(task, int(users.max()) + 1 if len(users) else 0, "user")
    return _prepared(task, features, targets, weights, units)


def make_stored_records(task: LinearTask, stored: Stored, units: Units | None = None) -> Records:
    """Returns the records of a task that are not in memory as rows, as `make_records`."""

    def prepared(raw: RawPart, block_rows: int | None = None) -> Records:
        return _prepared(task, *raw, units, block_rows)

    records = stored.records(prepared, task.most_records)
    _require_number(task, records.count, "record")
    return records


def _require_number(task: LinearTask, count: int, unit: str) -> None:
    if task.adjacency != ADD_REMOVE and count != task.n:
        # PRIVACY: n is public there, and the data must have it (test_another_number_of_records_is_refused)
        raise UnitError(
            f"features must have n={task.n} {unit}s under {task.adjacency} (got {count})"
        )
    if task.adjacency == ADD_REMOVE and count > task.n_max:
        # PRIVACY: contraction and norms of minimizers rest on it (test_more_records_than_promised_are_refused)
        raise UnitError(
            f"n_max={task.n_max} must be a public cap on the number of {unit}s: there are more."
            " Give a larger n, or n_max, by what is known without a look at the data"
        )


def _prepared(
    task: LinearTask,
    features: Tensor,
    targets: Tensor,
    weights: Tensor | None,
    units: Units | None,
    block_rows: int | None = None,
) -> Records:
    if features.dim() != 2 or features.shape[1] != task.dim:
        raise ValueError(
            f"features must be of shape (n, {task.dim}) (got {tuple(features.shape)})"
        )
    if targets.shape != (len(features),) or targets.is_complex():
        raise ValueError(
            f"targets must be real, ({len(features)},) (got {targets.dtype},"
            f" {tuple(targets.shape)})"
        )
    if weights is not None:
        if task.tilt:
            raise ConditionError(
                "weights must not be given for a tilted mean, whose constants have equal ones"
            )
        # PRIVACY: all constants are those of weight 1 (test_weights_above_one_are_clipped); NaN makes a null record
        weights = weights.double().clamp(0.0, 1.0)
    classes = task.num_scores if task.num_scores > 1 else None
    prepare = task.preparation if task.prepare is None else task.prepare.given
    if units is not None:
        prepare = units.rows
    if task.bound_y is not None:
        bound = (task.prepare and task.prepare.bound_y) or task.bound_y
        targets = targets.double().clamp(-bound, bound)  # NaN stays: a null record
        if units is not None:
            targets = ((targets - units.location) / units.spread).clamp(
                -task.bound_y, task.bound_y
            )
    elif classes is None:
        # PRIVACY: other labels would be longer gradients (test_a_label_that_is_no_sign_makes_a_null_record)
        signs = targets.double()
        targets = torch.where(signs.abs() == 1, signs, torch.nan)
    return Records(
        features,
        targets,
        weights,
        num_classes=classes,
        prepare=prepare,
        block_rows=block_rows,
        shrunk=units is not None and task.bound_y is not None and task.preparation.whole,
    )


def build_objective(
    task: LinearTask, reg: float, records: Records, linear_term: Tensor | None = None
) -> Objective:
    """Returns the objective of a task: in sum form except for tilted ones, with a linear term or None."""
    if task.tilt:
        return Tilted(
            task.loss, records, tilt=task.tilt, reg=reg / task.n, bound_x=task.preparation.bound
        )
    if task.attack_radius:
        scale = task.attack_scale
        return Adversarial(
            task.loss,  # checked there
            records,
            attack_radius=task.attack_radius,
            reg=reg,
            attack_norm=task.attack_norm,
            attack_scale=scale and (*scale, 0.0)[: task.width],
            smoothing=KINK,
        )
    loss = task.loss if task.clipped is None else task.clipped
    return LinearObjective(loss, records, reg=reg, linear_term=linear_term)


def weight_guess(task: LinearTask) -> float:
    """Returns a guess of |w|, in public units: targets in spreads, or about as large as where the loss is straight.

    Rows in private units have a norm of about 1, others of about half their bound.
    """
    prepare = task.prepare
    unit = 1.0 if prepare and prepare.quantile and prepare.spreads else task.loss.knee
    return _DISTANCE * unit / task.preparation.bound * (1 if prepare and prepare.rows else 2)
