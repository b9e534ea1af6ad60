"""A study: from a table to a model, its score and a report, with one budget on one ledger.

Each unit (row, or user) is put into one of two parts by a fresh draw that looks at no value:

    fit     the model is fitted to
    held    the model is scored on, and sets of predictions are calibrated on

A unit is in one part only, so that each part may spend the whole budget, and what is done with the second may depend on
what the first released.

Source: docs/proofs/accounting.md#parts-of-a-partition

A study in one call: its plan is shown, and then carried out.
"""

from __future__ import annotations

import inspect
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torch_dpsco import _validate as check
from torch_dpsco import shown
from torch_dpsco._validate import typed
from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.accounting.budgets import Budget, one_budget, parts, warn_of_delta
from torch_dpsco.accounting.events import (
    ADD_REMOVE,
    Event,
    Parallel,
    Sequential,
    event_to_json,
    in_words,
)
from torch_dpsco.accounting.report import HELD
from torch_dpsco.errors import BudgetExceeded, ConditionError, UnitError
from torch_dpsco.estimators.base import LinearModel, stand_in
from torch_dpsco.estimators.models import (
    HuberRegressor,
    LogisticRegression,
    Ridge,
    SoftmaxRegression,
)
from torch_dpsco.estimators.schema import ROW, Category, Schema, Table
from torch_dpsco.noise import KeyedStream
from torch_dpsco.sampling import fingerprint
from torch_dpsco.show.bar import bar_of
from torch_dpsco.show.look import require_readable
from torch_dpsco.show.preview import Preview
from torch_dpsco.statistics import scores
from torch_dpsco.statistics.conformal import MOST, conformal, conformal_event
from torch_dpsco.statistics.held_out import split, units_of
from torch_dpsco.statistics.results import Study
from torch_dpsco.statistics.search import PrivateSearch

_LEAST = 50  # units in each part
_UNSET = {
    "epsilon": 1.0,
    "delta": 1e-6,
    "adjacency": ADD_REMOVE,
    "n": None,
}  # what a search sets


@dataclass(frozen=True)
class StudyPlan:
    """What a study will do, before anything is spent: `print(plan)`, from `plan_study`.

    Args:
        schema: what is public about the table.
        budget: of all of it together.
        n: public number of units, see `LinearModel`.
        model: unfitted, with all its settings; or a search among several.
        metric: that the model is scored by, of `score`.
        held: expected number of units in the second part.
        level: of sets or intervals of predictions, see `conformal`; None for none.
    """

    schema: Schema
    budget: Budget
    n: int
    model: LinearModel | PrivateSearch
    metric: str
    held: int
    level: float | None

    def __repr__(self) -> str:
        return shown.line(self, f"{self._about}; {self.budget.target}; print it")

    def _repr_html_(self) -> str:
        rows = [("target", self.budget.target), ("adjacency", in_words(self.budget.adjacency))]
        rows += [("fit to", f"{self.n - self.held}"), ("held out", f"{self.held}")]
        return shown.table(self._about, rows, str(self))

    @property
    def _about(self) -> str:
        kind = type(self.model).__name__
        return f"study of {self.schema.target!r} by {kind}, {self.n} {self.unit}s"

    def __str__(self) -> str:
        about = "about " if self.budget.adjacency == ADD_REMOVE else ""
        unit = self.unit
        if isinstance(self.model, PrivateSearch):
            how = (
                f"the best of {self.model.trials:g} trials on average, among"
                f" {', '.join(self.model.candidates)}"
            )
        else:
            with parts():
                plan = self.model.plan(len(self.schema.names), self.budget.unit)
            how = f"{type(self.model).__name__} by {plan.mechanism}"
        lines = [
            (
                f"Study of {self.schema.target!r}: {self.budget.target} ({in_words(self.budget.adjacency)}),"
                f" for each {unit}"
            ),
            f"  fit: {about}{self.n - self.held} of {self.n}, the whole budget",
            (
                f"    {how}, {len(self.schema.names)} features"
                f"{', with intervals unless noise hides them' if self.pays_for_intervals else ''}"
            ),
            f"  held out: {about}{self.held}, the whole budget",
            f"    {self.metric}: epsilon {self._shared.epsilon:g}",
        ]
        if self.level is not None:
            lines.append(
                f"    predictions that cover {100 * self.level:g} %: epsilon"
                f" {self._shared.epsilon:g}"
            )
        lines.append(
            f"  Each {unit} is in one of the two parts, by a draw that looks at no value."
        )
        if self.schema.one_row_per_unit:
            lines.append(
                f"  No {unit} has a second row: one_row_per_unit=True of the schema promises it."
            )
        return "\n".join(lines)

    @property
    def pays_for_intervals(self) -> bool:
        """Whether a part of the budget is for intervals of coefficients."""
        models = (
            self.model.candidates.values()
            if isinstance(self.model, PrivateSearch)
            else [self.model]
        )
        return any(getattr(model, "intervals", None) is not None for model in models)

    @property
    def unit(self) -> str:
        """What one unit is called."""
        plain = "user" if self.budget.unit == "user" else "row"
        return plain if self.schema.unit == ROW else self.schema.unit

    @property
    def _shared(self) -> Budget:
        """The budget of each release of the second part."""
        half = self.budget.epsilon if self.level is None else self.budget.epsilon / 2
        return Budget(half, self.budget.delta, self.budget.adjacency, unit=self.budget.unit)

    @property
    def _scored(self) -> Budget:
        """The budget of the score: with the least noise."""
        return scores.quietest(self._shared)

    def preview(
        self, frame: Any = None, *, epsilons: Sequence[float] | None = None, runs: int = 10
    ) -> Preview:
        """Returns what the fit will lose, see `LinearModel.preview`.

        Args:
            frame: PUBLIC table that looks like the private one, read by the schema; None for public numbers alone.
            epsilons: > 0; None for some around that of the plan.
            runs: fits at each epsilon.

        Raises:
            ConditionError: the plan is to search among several models.
        """
        if isinstance(self.model, PrivateSearch):
            raise ConditionError(
                "a preview is of one model: plan a study without candidates for each of them"
            )
        found: Preview
        options: dict[str, Any] = {"epsilons": epsilons, "runs": runs}
        if frame is None:
            found = self.model.preview(
                dim=len(self.schema.names), unit=self.budget.unit, **options
            )
            return found
        table = self.schema.read(frame)
        whole = np.isfinite(table.X).all(1)
        groups = None if table.groups is None else table.groups[whole]
        found = self.model.preview(table.X[whole], table.y[whole], groups, **options)
        return found

    @typed
    def run(
        self,
        frame: Any,
        *,
        ledger_path: str | os.PathLike[str] | None = None,
        check: bool = True,
        progress: bool | None = None,
    ) -> Study:
        """Carries it out.

        Args:
            frame: the private table, as `Schema.read` takes it.
            ledger_path: of the ledger file; None keeps the ledger in memory.
            check: whether the table is looked at first, see `require_readable`.
            progress: whether a bar on standard error names the step that runs; None where that is a terminal.

        Raises:
            UnitError: the table has not n units, where their number is public; nothing was spent.
            ValueError: the table is not that of the schema, or cannot be read by it; nothing was spent.
        """
        if check:
            require_readable(self.schema, frame)
        with bar_of(progress, len(self._charges()["held"]) + 3) as begin:
            return self._run(frame, ledger_path, begin)

    def _run(self, frame: Any, ledger_path: Any, begin: Callable[[str], None]) -> Study:
        begin("read")
        table = self.schema.read(frame)
        units, places = units_of(table)
        if self.budget.adjacency != ADD_REMOVE and units != self.n:
            raise UnitError(
                f"n must be the number of {self.budget.unit}s under {self.budget.adjacency} (got"
                f" {self.n})"
            )
        charges = self._charges()
        begin("rehearse on made-up rows")
        self._rehearse(charges)
        ledger = Accountant(self.budget, ledger_path=ledger_path)
        seed = name = ""
        with suppress(BudgetExceeded):  # by what others have charged, which is told below
            # kept with the answers, so that the same study is cut in the same way after a crash
            seed, name = ledger.pay(
                Sequential(()),
                self._title,
                partial(fingerprint, contents=[table.X, table.y, places]),
                lambda: [secrets.token_hex(32), secrets.token_hex(16)],
            )
        others = {partition for partition, *_ in ledger.ledger.entries()} - {f"{HELD}{name}"}
        if others:
            raise ValueError(
                "the ledger file of a study must be new, since it spends its whole budget (got"
                f" {str(ledger_path)!r}: {ledger.holdings})"
            )
        # PRIVACY: a part of its own for each unit, drawn anew (test_where_a_unit_is_does_not_depend_on_others)
        source = KeyedStream(bytes.fromhex(seed), "held")
        held = split(units, self.held / self.n, self.budget.adjacency, source)[places]

        def fitted(part: Accountant) -> LinearModel:
            given = self.model.get_params(deep=False)
            model: Any = type(self.model)(**{**given, "accountant": part})
            begin(f"fit {type(model).__name__}")
            found = model.fit(**_rows(table, ~held))
            return found.best_estimator_ if isinstance(found, PrivateSearch) else found

        return self._carried_out(ledger, charges, name, fitted, _rows(table, held), begin)

    def _title(self) -> dict[str, Any]:
        """Returns what is public about it."""
        return {
            "study": self.n,
            "schema": self.schema.to_dict(),
            "held": self.held,
            "metric": self.metric,
            "level": self.level,
            "fit": event_to_json(self.fit_event()),
        }

    def _charges(self) -> dict[str, tuple[Event, ...]]:
        """Returns what is charged on each part."""
        sets = () if self.level is None else (conformal_event(self._shared),)
        return {"fit": (self.fit_event(),), "held": (scores.score_event(self._scored), *sets)}

    def _carried_out(
        self,
        ledger: Accountant,
        charges: dict[str, tuple[Event, ...]],
        name: str,
        fitted: Callable[[Accountant], LinearModel],
        held: dict[str, Any],
        begin: Callable[[str], None] = lambda step: None,
    ) -> Study:
        """Returns the study: a fit that charges the first part, measured on the rows of the second."""
        positional = self.budget.adjacency != ADD_REMOVE
        partition = f"{HELD}{name}"
        cut = ("positional", False) if positional else ("keyed", True)
        ledger.declare(Parallel(charges, partition, *cut), 1)
        part = partial(ledger.part, partition=partition, kind=cut[0], key_public=cut[1])
        charged: dict[str, Any] = {"budget": self._shared, "accountant": part("held")}
        with parts():
            model = fitted(part("fit"))
            bins = scores.default_bins(self._scored, self.held)
            scored = charged | {"budget": self._scored}
            begin(f"score {self.metric}")
            found = scores.score(
                model,
                metric=self.metric,
                bound=_most(self.schema, self.metric),
                bins=bins,
                **held,
                **scored,
            )
            sets = None
            if self.level is not None:
                begin("calibrate predictions")
                sets = conformal(
                    model,
                    level=self.level,
                    bound=_most(self.schema, "absolute_error"),
                    **held,
                    **charged,
                )
        report = ledger.report()
        ledger.close()  # so that others may open its file
        return Study(self, model, found, sets, report)

    def _rehearse(self, charges: dict[str, tuple[Event, ...]]) -> None:
        """Carries it out on made-up rows with a stand-in for the fit, and raises what could not be made of a study."""
        schema = self.schema
        unit = self.budget.unit
        ledger = Accountant(self.budget)
        (event,) = charges["fit"]
        model = _one_of(self.model)

        def fitted(part: Accountant) -> LinearModel:
            part.authorize(event)
            return stand_in(model, model.plan(len(schema.names), unit), part.report())

        target, *_ = schema.labels or schema.target_range or (0.0,)
        held = {
            "X": np.zeros((1, len(schema.names))),
            "y": [target],
            **({} if unit == "example" else {"groups": [0]}),
        }
        self._carried_out(ledger, charges, "rehearsal", fitted, held).try_out()

    def fit_event(self) -> Event:
        """Returns what the fit, or the search, charges."""
        dim = len(self.schema.names)
        with parts():
            if isinstance(self.model, PrivateSearch):
                return self.model.plan(dim).event
            return self.model.plan(dim, self.budget.unit).event()


@typed
def plan_study(
    schema: Schema,
    budget: Budget | None = None,
    *,
    epsilon: float | None = None,
    delta: float | None = None,
    n: int,
    model: type[LinearModel] | None = None,
    metric: str | None = None,
    holdout: float = 0.2,
    level: float | None = 0.9,
    candidates: Mapping[str, Mapping[str, Any]] | None = None,
    trials: float | None = None,
    **settings: Any,
) -> StudyPlan:
    """Plans a study.

    Args:
        schema: what is public about the table.
        budget: of all of it together, of mode "planned"; what it does not say follows: the unit is "user" where the
            schema keeps several rows of a unit.
        epsilon: of a budget, beside delta, in place of `budget`.
        delta: of a budget, beside epsilon.
        n: public number of units: the true one under replace_one and zero_out, a guess under add_remove.
        model: class of the model; None for logistic or softmax regression by the number of labels, and Ridge (of
            users: HuberRegressor) for a real target.
        metric: "accuracy", "auc" (two labels, then the default), "absolute_error" (the default of a real target) or
            "squared_error".
        holdout: share of units that are held out, in (0, 1).
        level: in (0, 0.999), that sets of labels, or intervals, are to cover new units with; None for none, as
            for models without probabilities, and for budgets of a risk, whose epsilon is too small.
        candidates: name to settings of the model, to search among them at one price (see `PrivateSearch`); None for
            no search, which leaves all of the budget to one fit.
        trials: expected number of trials of a search, > 1; None for 10. Only with candidates.
        settings: further public settings of the model, as intervals=0.3 of `LogisticRegression`.

    Raises:
        CalibrationError: the model has no plan for this.
        UnitError: schema and budget protect different units.
        ValueError: a setting.
    """
    budget = _budget_of(schema, budget, epsilon, delta)
    if (budget.unit == "user") != (schema.rows_per_unit != 1):
        raise UnitError(
            "budget must be of unit 'user' where the schema keeps several rows of a unit, and only"
            f" there (got {budget.unit!r} with rows_per_unit={schema.rows_per_unit})"
        )
    if budget.mode != "planned":
        raise ValueError(
            f"budget must be of mode 'planned', as all of a study is (got {budget.mode!r})"
        )
    classes = len(schema.labels or ())
    metric = _metric(classes, metric)
    count = check.positive_count(n=n)
    warn_of_delta(budget, count)
    held = round(check.open_interval(0.0, 1.0, holdout=holdout) * count)
    if min(held, count - held) < _LEAST:
        raise ValueError(
            f"n must leave {_LEAST} units or more in each part (got {count} with holdout={holdout})"
        )
    kind = _kind(schema, budget, model)
    target = {"epsilon": budget.epsilon, "delta": budget.delta}
    given: dict[str, Any] = {**target, "adjacency": budget.adjacency, "n": count - held}
    if candidates is None and trials is not None:
        raise ValueError(f"trials must be given with candidates only (got {trials})")
    fitted: LinearModel | PrivateSearch
    if candidates is None:
        fitted = _settled(kind, schema, given, settings)
    else:
        models = _candidates(kind, schema, given, settings, candidates)
        fitted = _searched(schema, budget, models, given, metric, trials)
    if budget.risk is not None or (classes and not hasattr(kind, "predict_proba")):
        level = None
    elif level is not None:
        check.open_interval(0.0, MOST, level=level)
    plan = StudyPlan(schema, budget, count, fitted, metric, held, level)
    plan.fit_event()  # raises before anything is spent
    return plan


def _budget_of(
    schema: Schema, budget: Budget | None, epsilon: float | None, delta: float | None
) -> Budget:
    """Returns the budget, of users where the schema keeps several rows of a unit and the budget does not say."""
    unit = "example" if schema.rows_per_unit == 1 else "user"
    return one_budget(budget, epsilon, delta).under(unit=unit)


def _metric(classes: int, metric: str | None) -> str:
    """Returns the metric that was chosen, or the usual one for so many labels; 0 for a real target."""
    usual: tuple[str, ...] = ("absolute_error", "squared_error")
    if classes:
        usual = ("accuracy", "auc") if classes == 2 else ("accuracy",)
    return usual[classes == 2] if metric is None else check.choice(usual, metric=metric)


def _kind(schema: Schema, budget: Budget, model: type[LinearModel] | None) -> type[LinearModel]:
    """Returns the class of the model; raises ValueError for one that does not take what the schema has."""
    if model is not None and not issubclass(model, LinearModel):
        raise ValueError(
            f"model must be a class of torch_dpsco.estimators, as Ridge (got {model.__name__})"
        )
    classes = len(schema.labels or ())
    if model is None:
        regressor = HuberRegressor if budget.unit == "user" else Ridge
        model = {0: regressor, 2: LogisticRegression}.get(classes, SoftmaxRegression)
    if missing := schema.settings().keys() - inspect.signature(model).parameters.keys():
        what = f"{classes} labels" if classes else "a real target"
        raise ValueError(
            f"model must be one for {what}, as the schema has (got {model.__name__}, which takes no"
            f" {min(missing)})"
        )
    return model


def _candidates(
    kind: type[LinearModel],
    schema: Schema,
    given: Mapping[str, Any],
    settings: Mapping[str, Any],
    candidates: Mapping[str, Mapping[str, Any]],
) -> dict[str, LinearModel]:
    """Returns a model for each candidate's settings."""
    if not all(isinstance(more, Mapping) for more in candidates.values()):
        raise ValueError(
            "candidates must map names to settings, as {'little': {'reg': 30.0}} (got"
            f" {candidates})"
        )
    return {
        name: _settled(kind, schema, given, {**settings, **more})
        for name, more in candidates.items()
    }


def _searched(
    schema: Schema,
    budget: Budget,
    models: Mapping[str, LinearModel],
    given: Mapping[str, Any],
    metric: str,
    trials: float | None,
) -> PrivateSearch:
    """Returns the search among models, at one price."""
    if budget.unit == "user":
        raise UnitError(
            "candidates must be of rows: a search among fits of users is not proved (got unit"
            " 'user')"
        )
    own = {name: one.set_params(**_UNSET) for name, one in models.items()}
    bound = None if schema.labels else _most(schema, metric)
    average = 10.0 if trials is None else trials
    return PrivateSearch(candidates=own, **given, metric=metric, bound=bound, trials=average)


def _settled(
    kind: type[LinearModel],
    schema: Schema,
    given: Mapping[str, Any],
    settings: Mapping[str, Any],
) -> LinearModel:
    """Returns a model of these settings; raises where they do not go together."""
    public = schema.settings()
    if unknown := sorted(settings.keys() - inspect.signature(kind).parameters.keys()):
        given_as = f"{unknown[0]}={settings[unknown[0]]!r}"
        raise ValueError(
            f"{unknown[0]} must be an argument of study, or a setting of {kind.__name__} (got"
            f" {given_as})"
        )
    if twice := sorted(settings.keys() & {*given, *public}):
        raise ValueError(
            f"{twice[0]} must be left to the schema and the budget (got {settings[twice[0]]!r})"
        )
    fitted = kind(**given, **public, **settings)
    whole = [
        name
        for name, column in schema.columns.items()
        if isinstance(column, Category) and not column.baseline
    ]
    if getattr(fitted, "intervals", None) is not None and fitted.fit_intercept and whole:
        raise ValueError(
            "intervals must be of features that are no function of each other: give column"
            f" {whole[0]!r} Category(..., baseline=True)"
        )
    return fitted


def _most(schema: Schema, metric: str) -> float | None:
    """Returns the bound on losses, of a real target."""
    if schema.target_range is None:
        return None
    width = schema.target_range[1] - schema.target_range[0]
    return width if metric == "absolute_error" else width**2


def _one_of(model: LinearModel | PrivateSearch) -> LinearModel:
    """Returns an unfitted model as a study has it; of a search its first candidate, with the whole budget."""
    if not isinstance(model, PrivateSearch):
        return model
    one = next(iter(model.candidates.values()))
    found: LinearModel = type(one)(
        **one.get_params(deep=False) | {name: getattr(model, name) for name in _UNSET}
    )
    return found


def _rows(table: Table, chosen: NDArray[np.bool_]) -> dict[str, Any]:
    return {name: values[chosen] for name, values in table.arguments().items()}


@typed
def study(
    frame: Any,
    schema: Schema,
    budget: Budget | None = None,
    *,
    epsilon: float | None = None,
    delta: float | None = None,
    n: int | None = None,
    model: type[LinearModel] | None = None,
    metric: str | None = None,
    holdout: float = 0.2,
    level: float | None = 0.9,
    candidates: Mapping[str, Mapping[str, Any]] | None = None,
    trials: float | None = None,
    show: Callable[[str], Any] | None = print,
    ledger_path: str | os.PathLike[str] | None = None,
    check: bool = True,
    progress: bool | None = None,
    **settings: Any,
) -> Study:
    """Looks at the table, plans a study, shows the plan, and carries it out.

    Args:
        frame: the private table, as `Schema.read` takes it.
        schema: what is public about it.
        budget: of all of it together, see `plan_study`.
        epsilon: of a budget, beside delta, in place of `budget`.
        delta: of a budget, beside epsilon.
        n: public number of units; None for that of the table, where it is public (replace_one, zero_out).
        model: see `plan_study`, as metric, holdout, level, candidates and trials.
        metric: that the model is scored by.
        holdout: share of units that are held out.
        level: that predictions are to cover; None for no sets of predictions.
        candidates: settings to search among.
        trials: of the search, on average.
        show: what is called with the plan in words before anything is spent; None for nothing.
        ledger_path: of the ledger file; None keeps the ledger in memory.
        check: whether the table is looked at first, without noise and on your machine: what does not fit its schema is
            written to standard error, and nothing is spent on a table that cannot be read (`require_readable`).
        progress: see `StudyPlan.run`.
        settings: further public settings of the model, as intervals=0.3 of `LogisticRegression`.

    Guarantee:
        The budget, for all that the study holds together, predictions for public rows included. Running time is not
        covered, nor is the look: that a study was made tells that it did not stop. Source:
        docs/proofs/accounting.md#parts-of-a-partition.
    """
    if check:
        require_readable(schema, frame)
    budget = _budget_of(schema, budget, epsilon, delta)
    if n is None:
        if budget.adjacency == ADD_REMOVE:
            raise ValueError(
                "n must be given under add_remove, where the number of units is private (got None)"
            )
        n = units_of(schema.read(frame))[0]
    plan = plan_study(
        schema,
        budget,
        n=n,
        model=model,
        metric=metric,
        holdout=holdout,
        level=level,
        candidates=candidates,
        trials=trials,
        **settings,
    )
    if show is not None:
        show(str(plan))
    return plan.run(frame, ledger_path=ledger_path, check=False, progress=progress)
