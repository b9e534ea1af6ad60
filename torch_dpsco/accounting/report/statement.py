"""The privacy statement: what a run guarantees to whom, and under which conditions, as text, markdown or JSON.

A statement is made from public values only: the report of a ledger, the design and the step counts of a run. No field
of it has ever seen a record, so that it may be published with the model. Figures are rounded up, never down.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import textwrap
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from torch_dpsco import _validate as check
from torch_dpsco._doors import typed
from torch_dpsco.accounting.designs import Undeclared
from torch_dpsco.accounting.events import event_to_json
from torch_dpsco.accounting.report.figures import (
    PrivacyReport,
    Run,
    attack_advantage,
    group_guarantee,
    rounded_up,
)
from torch_dpsco.accounting.report.wording import (
    GROUPS,
    Section,
    accuracy,
    odds_factor,
    sections,
    table,
    words_of,
)
from torch_dpsco.acts import act

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Run", "Section", "Statement", "make_statement"]

_SCHEMA = "torch_dpsco.privacy_statement"
_SCHEMA_VERSION = 1
_WIDTH = 100


@dataclass(frozen=True)
class Statement:
    """A privacy statement: `str()` or `print` for text, `markdown()` for a privacy card, `json()` for machines.

    Args:
        headline: the guarantee in one sentence.
        warnings: what a reader must know before quoting it.
        sections: everything else.
        figures: the exact figures.
        run: the run that they are about.
        version: of the library that computed them.

    Example:
        >>> from torch_dpsco.accounting.accountant import Accountant
        >>> from torch_dpsco.accounting.designs import Full
        >>> from torch_dpsco.accounting.events import clipped_gaussian
        >>> accountant, step = Accountant(), clipped_gaussian(9.0)
        >>> accountant.authorize(step, 4)
        >>> run = Run("NoisyGD", Full(50), step, steps=4, planned=4, finalized=True)
        >>> statement = make_statement(accountant.report(1e-5), run)
        >>> print(statement.headline)
        (0.8142, 1e-05)-differential privacy for one example (zero_out: emptied).
        >>> statement.warnings
        ()
    """

    headline: str
    warnings: tuple[str, ...]
    sections: tuple[Section, ...]
    figures: PrivacyReport
    run: Run
    version: str

    @property
    def epsilon(self) -> float:
        """Epsilon of the guarantee."""
        return self.figures.epsilon

    def __str__(self) -> str:
        lines = _wrapped(self.headline, "")
        for name, epsilon in self.figures.epsilons.items():
            mark = "the guarantee" if name == self.figures.adjacency else "for information"
            lines.append(f"  epsilon {rounded_up(epsilon)} under {name} ({mark})")
        for title, sentences in self._all_sections():
            lines += ["", title]
            lines += [line for sentence in sentences for line in _wrapped(sentence, "  - ")]
        return "\n".join(lines)

    def markdown(self) -> str:
        """Returns a privacy card: headline, table of epsilons, and the sections."""
        head, *rows = (f"| {' | '.join(cells)} |" for cells in table(self.figures))
        lines = [
            "# Privacy statement",
            "",
            f"**{self.headline}**",
            "",
            head,
            "|---|---|---|---|",
            *rows,
        ]
        for title, sentences in self._all_sections():
            lines += ["", f"## {title}", "", *(f"- {sentence}" for sentence in sentences)]
        return "\n".join(lines) + "\n"

    @typed
    def json(self, indent: int | None = 2) -> str:
        """Returns exact figures and all sentences; `json.loads` reads it, infinity is the string "inf"."""
        if indent is not None:
            check.between(0, 100, indent=indent)
        return json.dumps(finite(_facts(self)), indent=indent, allow_nan=False)

    @typed
    def named(
        self,
        unit: str,
        plural: str | None = None,
        *,
        one_row_per_unit: bool = False,
        by_ids: bool = False,
    ) -> Statement:
        """Returns the same statement, whose sentences say what one unit is; see `PrivacyReport.named`."""
        named = self.figures.named(unit, plural, one_row_per_unit=one_row_per_unit, by_ids=by_ids)
        return make_statement(named, self.run)

    def promising(self, *sentences: str) -> Statement:
        """Returns the same statement with further conditions under "What must hold"; see `PrivacyReport.promising`."""
        return make_statement(self.figures.promising(*sentences), self.run)

    def plot(self) -> Figure:
        """Returns a picture: what a test can find out, what was spent, and what each kind of charge costs by itself.

        Raises:
            ImportError: matplotlib is not installed.
        """
        figure: Figure = act("report.plot")(self.figures)
        return figure

    @typed
    def save(
        self,
        path: str | os.PathLike[str],
        *,
        date: datetime | None = None,
        overwrite: bool = False,
    ) -> None:
        """Writes a privacy card, one file that needs no other: .html and .pdf with the pictures, .md or .json without.

        Args:
            path: its suffix says what is written.
            date: of the card; default now.
            overwrite: replace a file that is there.

        Raises:
            ValueError: another suffix.
            FileExistsError: the file is there.
            ImportError: matplotlib, which draws the pictures, is not installed.
        """
        act("report.save")(self, path, date, overwrite)

    def _repr_markdown_(self) -> str:
        return self.markdown()

    def _all_sections(self) -> tuple[Section, ...]:
        first = (Section("Read this first", self.warnings),) if self.warnings else ()
        return (*first, *self.sections)


def make_statement(report: PrivacyReport, run: Run) -> Statement:
    """Puts a report into words.

    Args:
        report: of the accountant that the run charges, best with `ahead=run.ahead()`.
        run: what is public about the run.

    Returns:
        The statement. It holds no number that was computed from records, and no figure rounded down.
    """
    # the package is loaded, or this module would not be; an import statement here would be a cycle
    version = str(importlib.import_module(__name__.partition(".")[0]).__version__)
    # PRIVACY: nothing but these two values enters (test_no_private_number_appears)
    words = words_of(report, run, version)
    warnings = tuple(words.said("warnings"))
    return Statement(words["headline"], warnings, tuple(sections(words)), report, run, version)


def _wrapped(text: str, bullet: str) -> list[str]:
    indent = " " * len(bullet)
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=bullet,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def finite(value: Any) -> Any:
    """Returns a JSON-codable value with infinities as strings."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


_GUARANTEE = (
    "epsilon",
    "delta",
    "adjacency",
    "unit",
    "unit_name",
    "rows_of_unit",
    "method",
)


def _facts(statement: Statement) -> dict[str, Any]:
    report = statement.figures
    holds = math.isfinite(report.epsilon)
    return {
        "schema": _SCHEMA,
        "schema_version": _SCHEMA_VERSION,
        "library": {"name": "torch_dpsco", "version": statement.version},
        "guarantee": {"holds": holds} | {name: getattr(report, name) for name in _GUARANTEE},
        "epsilons": dict(report.epsilons),
        "odds_factor": odds_factor(report.epsilon),
        "attack": {
            "advantage": report.advantage,
            "accuracy": accuracy(report.advantage),
            "accuracy_from_epsilon_and_delta": accuracy(
                attack_advantage(report.epsilon, report.delta)
            ),
        },
        "groups": {str(k): _group(report, k) for k in GROUPS},
        "budget": _budget(report),
        **_facts_of_run(statement.run, report.planned_epsilon),
        "charges": [
            {
                "count": c.count,
                "event": event_to_json(c.event, exact=False),
                "passes": c.passes,
                "parts": c.parts,
            }
            for c in report.charges
        ],
        "assumptions": report.assumptions,
        "ledger_id": report.ledger_id,
        "headline": statement.headline,
        "warnings": statement.warnings,
        "sections": [section._asdict() for section in statement.sections],
    }


def _group(report: PrivacyReport, size: int) -> dict[str, float]:
    epsilon, delta = group_guarantee(report.epsilon, report.delta, size)
    return {"epsilon": epsilon, "delta": delta}


def _budget(report: PrivacyReport) -> dict[str, Any] | None:
    budget = report.budget
    if budget is None:
        return None
    facts = {name: getattr(budget, name) for name in ("epsilon", "delta", "adjacency")}
    return facts if budget.risk is None else {**facts, "risk": budget.risk}


def _facts_of_run(run: Run, planned_epsilon: float | None) -> dict[str, Any]:
    declared = not isinstance(run.design, Undeclared)
    return {
        "run": {
            "optimizer": run.name,
            "steps": run.steps,
            "planned_steps": run.planned,
            "planned_epsilon": planned_epsilon,
            "finalized": run.finalized,
            "step_event": event_to_json(run.event, exact=False),
        },
        "design": {
            "type": type(run.design).__name__,
            "batch_size": run.design.batch_size,
            "n": run.design.n if declared else None,
        },
    }
