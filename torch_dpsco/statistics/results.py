"""What a study released, and what follows from it without a further look: tables, predictions, pictures, files."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from torch_dpsco import shown
from torch_dpsco._validate import typed
from torch_dpsco.accounting.calibrate import rounded_up
from torch_dpsco.accounting.report import PrivacyReport, StudyRun
from torch_dpsco.accounting.statement import Statement, make_statement
from torch_dpsco.errors import ConditionError
from torch_dpsco.estimators.base import LinearModel
from torch_dpsco.estimators.released import Released
from torch_dpsco.estimators.schema import ROW
from torch_dpsco.show import card, plots
from torch_dpsco.statistics.coefficients import Coefficients, coefficients_of
from torch_dpsco.statistics.conformal import ConformalSets
from torch_dpsco.statistics.estimates import Group, rounded
from torch_dpsco.statistics.scores import PrivateScore

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from torch_dpsco.statistics.study import StudyPlan

_STRONGEST = 5  # coefficients in a summary
_NAMED = 8  # columns on a card


@dataclass(frozen=True)
class Study:
    """What a study released: all of it may be published.

    Args:
        plan: that was carried out.
        model: the fitted model.
        score: on the units that were held out.
        sets: of predictions, see `ConformalSets`; None for none.
        privacy: report of the whole ledger.
    """

    plan: StudyPlan
    model: LinearModel
    score: PrivateScore
    sets: ConformalSets | None
    privacy: PrivacyReport

    def __repr__(self) -> str:
        return shown.line(
            self, f"{self._what}: {self.score}; {self.plan.budget.target}; print it"
        )

    def _repr_html_(self) -> str:
        rows = [("model", type(self.model).__name__), ("score", str(self.score))]
        rows.append(("privacy", self.report().headline))
        return shown.table(f"study of {self.plan.schema.target!r}", rows, str(self))

    def report(self) -> Statement:
        """Returns what all of it guarantees, in plain words."""
        promise = (
            "ranges, levels and labels of the schema are public, and were not read off the table"
        )
        schema = self.plan.schema
        kind = type(self.model).__name__
        columns = [*map(str, schema.columns)]
        more = f" and {len(columns) - _NAMED} more" if len(columns) > _NAMED else ""
        how = f"{kind} of {schema.target!r} by {self.model.plan_.mechanism}"
        model = "model with what intervals need" if self.plan.pays_for_intervals else "model"
        released = (model, "score of it", "threshold of its predictions")[
            : 3 - (self.sets is None)
        ]
        run = StudyRun(
            **vars(self.model.report().run) | {"name": f"{kind} of {schema.target!r}"},
            held=self.plan.held,
            released=released,
            model=f"{how}, from {', '.join(columns[:_NAMED])}{more}",
            score=str(self.score),
        )
        statement = make_statement(self.privacy, run).promising(promise)
        if schema.unit == ROW:
            return statement
        by_ids = schema.ids is not None and self.privacy.unit == "example"
        return statement.named(
            schema.unit, one_row_per_unit=schema.one_row_per_unit, by_ids=by_ids
        )

    def released(self) -> Released:
        """Returns what may be published of the model, with the schema and the report of the whole study."""
        return Released.of(self.model, schema=self.plan.schema, card=self.report())

    # -- predictions -------------------------------------------------------------------------------------------------

    def predict(self, frame: Any, *, threshold: float | None = None) -> NDArray[Any]:
        """Returns labels, or numbers, for the rows of a public table (n,), whose target and ids are not needed.

        Args:
            frame: the table.
            threshold: least probability of the second of two labels to predict it; see `Released.predict`.

        Raises:
            ValueError: a row has a value that cannot be read, in a column without missing=True.
        """
        return self.released().predict(frame, threshold=threshold)

    def predict_proba(self, frame: Any) -> NDArray[np.float64]:
        """Returns probabilities (n, K) of the labels in the order of the schema; of a model that has them."""
        return self.released().predict_proba(frame)

    # -- results -----------------------------------------------------------------------------------------------------

    @typed
    def coefficients(self, level: float = 0.95) -> Coefficients:
        """Returns what the model says in the units of the table, with intervals if `intervals=` paid for them.

        Args:
            level: in (0, 1), of each interval for itself.
        """
        return coefficients_of(self.model, self.plan.schema, level)

    def calibration(self) -> tuple[Group, ...]:
        """Returns how often the second label came true, by the probability that the model gave it.

        From what the score released: for two labels, probabilities and the metric "auc".

        Raises:
            ConditionError: the study released nothing that tells it.
        """
        if not hasattr(self.model, "predict_proba"):
            raise ConditionError(
                f"model must have probabilities for a calibration (got {type(self.model).__name__})"
            )
        return self.score.calibration()

    def summary(self) -> str:
        """Returns the results as text: score, strongest coefficients, sets or intervals, and what was spent."""
        found = self.coefficients()
        strongest = found.strongest[:_STRONGEST]
        figures = self.report().figures
        lines = [
            f"{self._what}: {self.score}",
            *self._base_rate(),
            *self._calibrated(),
            *self._covered(),
            f"the strongest of {len(found.strongest)} coefficients, which add to the {found.moves}"
            f"{', noise included' if found.inference is None else ''}:",
            *(f"  {line}" for line in found.lines(strongest)),
            *[f"  no intervals: {found.why_not}"][
                : self.plan.pays_for_intervals and found.inference is None
            ],
            f"spent on all of it: epsilon {rounded_up(figures.epsilon)} at delta"
            f" {rounded_up(figures.delta)} for one {figures.unit_name}; the rest: report()",
        ]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.summary()

    @property
    def _what(self) -> str:
        return f"{type(self.model).__name__} of {self.plan.schema.target!r}"

    def _base_rate(self) -> list[str]:
        found = self.score.base_rate
        if found is None:
            return []
        value, low, high = (f"{100 * share:.3g}" for share in (found.value, *found.interval))
        label = (self.plan.schema.labels or ("",))[-1]
        return [
            f"{label!r} is the truth of {value} % of those held out (95 %: {low} to {high} %)"
        ]

    def _calibrated(self) -> list[str]:
        try:
            groups = self.calibration()
        except ConditionError:
            return []
        rows = [f"  {group}" for group in groups]
        return ["where the model gives it a probability of ..., it came true in ...:", *rows]

    def _covered(self) -> list[str]:
        if self.sets is None:
            return []
        share = f"{100 * self.sets.level:g} %"
        return [
            f"sets that hold the truth {share} of the time: threshold {self.sets.threshold:.4g}"
        ]

    # -- pictures and files ------------------------------------------------------------------------------------------

    def plot(self) -> Figure:
        """Returns a picture: what the model says, how good it is, and what can be found out about one unit.

        Raises:
            ImportError: matplotlib is not installed.
        """
        return plots.figure(
            self._what, *self._panels(), card.bet(self.report().figures), columns=3
        )

    def _panels(self) -> list[plots.Panel]:
        score = self.score
        value, error = rounded(score.error, score.value, score.error)
        loss = not score.greater_is_better
        how_good = plots.ranges(
            "How good it is, on those held out",
            f"{'less' if loss else 'more'} is better",
            [score.metric.replace("_", "\n")],
            np.array([score.value]),
            np.array([score.interval]),
            "95 %, for noise and for who was held out",
            line=None if score.chance is None else (f"by chance: {score.chance}", score.chance),
            notes=[f"{value} +- {error}"],
            within=(0.0, None if loss else 1.03),
        )
        return [self.coefficients().panel(), how_good]

    @typed
    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes what may be published into a folder: model.json, report.html, summary.txt and study.svg.

        Args:
            folder: new, or empty.

        Raises:
            FileExistsError: something is there.
            ImportError: matplotlib, which draws the pictures, is not installed; model.json, which holds the report too,
                and summary.txt are written.
        """
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        if any(path.iterdir()):
            raise FileExistsError(f"folder must be new, or empty (got {os.fspath(folder)!r})")
        self.released().save(path / "model.json")  # what was paid for comes first
        summary = f"{self.plan}\n\n{self.summary()}\n"
        (path / "summary.txt").write_text(summary, encoding="utf-8")
        self.save_card(path / "report.html")
        (path / "study.svg").write_bytes(plots.encoded(self.plot(), "svg"))

    @typed
    def save_card(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Writes the report as a card with the pictures of the study; see `Statement.save`."""
        card.save(self.report(), path, None, overwrite, self._panels())

    def try_out(self) -> None:
        """Makes in memory all that is read and written of a study, and raises what `save` and others would raise.

        Pictures are left out where matplotlib is not installed, and drawn where they have names of the schema.
        """
        self.released().json()
        self.predict(np.zeros((1, len(self.plan.schema.names))))
        f"{self.plan}{self.summary()}{self.report()}{self.coefficients()}".encode()
        with suppress(ImportError):
            self.plot().draw_without_rendering()
            list(card.panels(self.report().figures))
