"""The privacy statement: what a run guarantees to whom, and under which conditions, as text, markdown or JSON.

A statement is made from public values only: the report of a ledger, the design and the step counts of a run. No field
of it has ever seen a record, so that it may be published with the model. Figures are rounded up, never down.

Its sentences (sentences.toml) have blanks; here is what is true of a report and its run, and what fills the blanks.
"""

from __future__ import annotations

import json
import math
import os
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from torch_dpsco import shown
from torch_dpsco._validate import typed
from torch_dpsco.accounting.analysis.risk import strength
from torch_dpsco.accounting.calibrate import rounded_up
from torch_dpsco.accounting.designs import (
    Assigned,
    AssignedParts,
    Cyclic,
    Design,
    Disjoint,
    Fixed,
    Full,
    Parts,
    Poisson,
    Shuffled,
    Undeclared,
    is_exact,
)
from torch_dpsco.accounting.events import (
    ADD_REMOVE,
    ADJACENCIES,
    ZCDP,
    ApproxDP,
    Gaussian,
    NonPrivate,
    Pure,
    RDPCurve,
    Sequential,
    event_to_json,
)
from torch_dpsco.accounting.report import (
    KEPT,
    PROMISED,
    OneFit,
    OneRelease,
    PrivacyReport,
    Run,
    StudyRun,
    Words,
    charged,
    group_guarantee,
    names_of,
    rows_of,
    sentence_file,
    sentences_of,
    whose,
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
        title: of a card: what it is about.

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
    title: str

    @property
    def epsilon(self) -> float:
        """Epsilon of the guarantee."""
        return self.figures.epsilon

    def __repr__(self) -> str:
        return shown.line(self, self.headline)

    def _repr_html_(self) -> str:
        warned = [("read this first", warning) for warning in self.warnings]
        return shown.table(self.headline, [*table(self.figures), *warned], str(self))

    def __str__(self) -> str:
        lines = _wrapped(self.headline, "")
        for name, epsilon in self.figures.epsilons.items():
            mark = "the guarantee" if name == self.figures.adjacency else "for information"
            lines.append(f"  epsilon {rounded_up(epsilon)} under {name} ({mark})")
        for title, sentences in self._all_sections():
            lines += ["", title]
            lines += [line for sentence in sentences for line in _wrapped(sentence, "  - ")]
        return "\n".join(lines)

    @property
    def in_short(self) -> tuple[str, ...]:
        """The first section: the verdict, and what was made of which data, each as "Verdict: ..."."""
        return self.sections[0].sentences

    @property
    def main(self) -> tuple[Section, ...]:
        """The sections for everybody."""
        return self.sections[1:-1]

    @property
    def appendix(self) -> tuple[Section, ...]:
        """The sections for those who check figures."""
        return self.sections[-1:]

    def markdown(self) -> str:
        """Returns a privacy card: title, headline, the sections, and at the end the table of epsilons."""
        lines = [f"# {self.title}", "", f"**{self.headline}**"]
        for title, sentences in self._all_sections():
            lines += ["", f"## {title}", "", *(f"- {sentence}" for sentence in sentences)]
        head, *rows = (f"| {' | '.join(cells)} |" for cells in table(self.figures))
        return "\n".join([*lines, "", head, "|---|---|---|---|", *rows]) + "\n"

    def json(self) -> str:
        """Returns exact figures and all sentences; `json.loads` reads it, infinity is the string "inf"."""
        return json.dumps(finite(_facts(self)), indent=2, allow_nan=False)

    @typed
    def named(
        self,
        unit: str,
        plural: str | None = None,
        *,
        one_row_per_unit: bool = False,
        by_ids: bool = False,
    ) -> Statement:
        """Returns the same statement, whose sentences say what one unit is: `report.named("patient")`.

        It changes words only. A report whose unit is "example" protects one row, so that a patient with several rows
        is not protected as a whole: for such a report say why one row is one patient.

        Args:
            unit: what one unit is called, of letters, digits, spaces, hyphens and apostrophes.
            plural: of it; None for the regular one.
            one_row_per_unit: True promises that each unit has one row, which headline and card say then.
            by_ids: True says that one row of each unit was kept, by its id, as `Schema.read` does with `ids`.

        Raises:
            ValueError: a name is of something else; a report that protects rows has neither reason, or both; one that
                protects users has one.
        """
        report = self.figures
        names = names_of(unit, plural)
        rows = rows_of(report.unit, one_row_per_unit, by_ids)
        old = whose(report.unit, report.unit_name, report.rows_of_unit)
        new = whose(report.unit, names[0], rows)
        lines = tuple(new if line == old else line for line in report.assumptions)
        named = replace(report, named_unit=names, rows_of_unit=rows, assumptions=lines)
        return make_statement(named, self.run)

    def promising(self, *sentences: str) -> Statement:
        """Returns the same statement with further conditions under "What must hold".

        Args:
            sentences: what whoever publishes the report promises beside the rest, as "ranges of columns are public,
                not read off the table". Those that are there already are not repeated.

        Raises:
            ValueError: a sentence is empty, or of several lines.
        """
        given: tuple[Any, ...] = sentences
        if not all(
            isinstance(line, str) and line.strip(" .") and line.isprintable() for line in given
        ):
            raise ValueError(
                f"sentences must be text of one line each, not empty (got {given!r})"
            )
        lines = (line.strip().rstrip(".") for line in sentences)
        known = tuple(dict.fromkeys((*self.figures.assumptions, *lines)))
        return make_statement(replace(self.figures, assumptions=known), self.run)

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
    version = str(vars(sys.modules[__name__.partition(".")[0]])["__version__"])
    # PRIVACY: nothing but these two values enters (test_no_private_number_appears)
    words = words_of(report, run, version)
    warnings = tuple(words.said("warnings"))
    told = tuple(sections(words))
    return Statement(words["headline"], warnings, told, report, run, version, words["title"])


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
    "advantage",
    "adjacency",
    "unit",
    "unit_name",
    "rows_of_unit",
    "method",
)
_TARGET = ("epsilon", "delta", "adjacency", "risk")


def _facts(statement: Statement) -> dict[str, Any]:
    report = statement.figures
    run = statement.run
    holds = math.isfinite(report.epsilon)
    return {
        "schema": _SCHEMA,
        "schema_version": _SCHEMA_VERSION,
        "library": {"name": "torch_dpsco", "version": statement.version},
        "guarantee": {"holds": holds} | {name: getattr(report, name) for name in _GUARANTEE},
        "epsilons": dict(report.epsilons),
        "budget": None
        if report.budget is None
        else {name: getattr(report.budget, name) for name in _TARGET},
        "run": {
            "optimizer": run.name,
            "steps": run.steps,
            "planned_steps": run.planned,
            "planned_epsilon": report.planned_epsilon,
            "finalized": run.finalized,
            "step_event": event_to_json(run.event, exact=False),
        },
        "design": {
            "type": type(run.design).__name__,
            "batch_size": run.design.batch_size,
            "n": None if isinstance(run.design, Undeclared) else run.design.n,
        },
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
        **{name: getattr(statement, name) for name in ("title", "headline", "warnings")},
        "sections": [section._asdict() for section in statement.sections],
    }


GROUPS = (2, 10)  # sizes of the groups that are spelled out
_SLACK = 1.0 + 1e-14  # more than the rounding of the few operations below
# of which the sentences say how they draw
DESIGNS: tuple[type[Design], ...] = (
    Poisson,
    Fixed,
    Shuffled,
    Disjoint,
    Cyclic,
    Assigned,
    Parts,
    AssignedParts,
    Full,
    Undeclared,
)
# guarantees that do not say by what noise they hold
_UNTOLD = (Pure, ApproxDP, ZCDP, RDPCurve)


class Section(NamedTuple):
    """A title and the sentences below it."""

    title: str
    sentences: tuple[str, ...]


def table(report: PrivacyReport) -> tuple[tuple[str, str, str, str], ...]:
    """Returns each epsilon with its adjacency and what that compares, below a row of titles."""
    rows = [("adjacency", "two worlds", "epsilon", "delta")]
    for name, epsilon in report.epsilons.items():
        role = "the guarantee" if name == report.adjacency else "for information"
        words = Words(
            {other: other == name for other in ADJACENCIES} | {"unit": report.unit_name}
        )
        figures = (rounded_up(epsilon), rounded_up(report.delta))
        rows.append((f"{name} ({role})", words["world"], *figures))
    return tuple(rows)


def words_of(report: PrivacyReport, run: Run, version: str) -> Words:
    """Returns what the sentences of a statement rest on."""
    return Words(
        {
            **vars(run),
            **vars(report),
            **charged((charge.event for charge in report.charges), report.adjacency),
            **_of_report(report, run),
            **_of_run(report, run),
            "report": report,
            "run": run,
            "version": version,
        }
    )


def sections(words: Words) -> Iterator[Section]:
    """Yields all sentences but headline and warnings, by topic."""
    for title in sentence_file()["sections"]:
        sentences = tuple(words.said("sections", title))
        if sentences:
            yield Section(title, sentences)


# -- what is true, and figures ----------------------------------------------------------------------------------------


def _of_report(report: PrivacyReport, run: Run) -> dict[str, Any]:
    budget = report.budget
    epsilon = report.epsilon
    record, records = report.named_unit or ("record", "records")
    other_delta = budget is not None and budget.delta != report.delta
    limit = math.nan if budget is None or other_delta else budget.epsilon
    declared = not isinstance(run.design, Undeclared)
    ceiling = _ceiling(report)
    planned = report.planned_epsilon
    return {adjacency: report.adjacency == adjacency for adjacency in ADJACENCIES} | {
        "endless": math.isinf(epsilon),
        "weak": strength(epsilon) == "weak" and epsilon < math.inf,
        "pure": report.delta == 0,
        # publishing one uniformly random record is (0, 1/n)-DP
        "delta_large": declared and report.delta > 0 and report.delta >= 1.0 / run.design.n,
        "told_add_remove": ADD_REMOVE in report.epsilons,
        "promised": report.rows_of_unit == PROMISED,
        "kept": report.rows_of_unit == KEPT,
        "example": report.unit == "example",
        "user": report.unit == "user",
        "called_example": report.unit_name == "example",
        "other_delta": other_delta,
        "exceeded": epsilon > limit,
        "left_over": epsilon < 0.99 * limit and run.finalized,
        "ideal_run": _is_ideal(report, run),
        "unit": report.unit_name,
        "units": report.unit_names,
        "record": record,
        "records": records,
        "epsilon": rounded_up(epsilon),
        "level": strength(epsilon),
        "delta": rounded_up(report.delta),
        "odds": _odds(epsilon),
        "odds_twice": _odds(epsilon, 2.0),
        "delta_twice": rounded_up(2.0 * report.delta),
        "right": _guess(report.advantage),
        "groups": "; ".join(_group(report, k) for k in GROUPS),
        # a rule that sees released values only truncates the planned run, which is post-processing
        # (test_an_early_stop_is_quoted_by_plan_or_budget)
        "ceiling": "" if ceiling is None else rounded_up(ceiling),
        "planned_epsilon": "" if planned is None else rounded_up(planned),
        "target": "" if budget is None else budget.target,
        "charges": report.events,
    }


def _is_ideal(report: PrivacyReport, run: Run) -> bool:
    """Returns whether noise is taken for ideal that the assumptions of the report do not name."""
    released = run.event.events if isinstance(run.event, Sequential) else (run.event,)
    (doubt,) = sentences_of("phrases", "out_of_scope")
    said = any(doubt.text in line for line in report.assumptions) or any(map(is_exact, released))
    # PRIVACY: stated events do not tell their noise (test_releases_without_an_exact_form_name_the_assumption)
    untold = any(isinstance(event, _UNTOLD) for event in released)
    return isinstance(run, OneRelease) and (untold or not said)


def _of_run(report: PrivacyReport, run: Run) -> dict[str, Any]:
    design = run.design
    event = run.event
    moves = isinstance(event, Gaussian) and any(dict(event.sens).values())
    silent = moves and isinstance(event, Gaussian) and event.sigma == 0
    own = (line.replace("{units}", report.unit_names) for line in run.assumptions)
    released = run.released if isinstance(run, StudyRun) else ()
    parts = design.parts if isinstance(design, Parts) else ()
    return {kind.__name__: isinstance(design, kind) for kind in DESIGNS} | {
        "own_design": type(design) not in DESIGNS,
        "amplified": isinstance(design, Assigned) and design.amplifies(event),
        "amplification": isinstance(design, Assigned) and design.amplification,
        "one_pass": isinstance(design, Assigned) and design.passes == 1,
        # PRIVACY: (test_the_statement_of_output_perturbation_covers_the_final_model_only)
        "one_release": isinstance(run, OneRelease),
        "one_fit": isinstance(run, OneFit),
        "study": isinstance(run, StudyRun),
        # PRIVACY: random bits are those of a cipher (test_no_card_promises_unlimited_computing_power)
        "repeatable": run.repeatable,
        "silent": silent or isinstance(event, NonPrivate),
        "planned": run.planned is not None,
        "no_steps": run.planned == 0,
        "unfinished": run.unfinished,
        "made_all": run.planned is not None and not run.unfinished,
        "assumptions": [_sentence(line) for line in (*report.assumptions, *own)],
        "steps": _count(run.steps, "step"),
        "planned_steps": _count(run.planned or 0, "planned step"),
        "released": "; the ".join(released),
        "releases": len(released),
        "all_units": run.design.n + run.held if isinstance(run, StudyRun) else "",
        "rate": rounded_up(design.sample_rate, 6) if isinstance(design, Poisson) else "",
        "parts": len(parts),
        "cut_parts": [
            SimpleNamespace(
                number=number,
                batches=part.batches,
                anew=f", anew in each of {part.passes} passes" if part.passes > 1 else "",
            )
            for number, (part, _) in enumerate(parts, 1)
            if isinstance(part, Assigned) and part.secret
        ],
    }


def _sentence(line: str) -> str:
    return f"{line[0].upper()}{line[1:].removesuffix('.')}."


def _ceiling(report: PrivacyReport) -> float | None:
    """Returns the largest epsilon that plan and budget allow at the report's delta; None if neither is there."""
    bounds = [] if report.planned_epsilon is None else [report.planned_epsilon]
    if report.budget is not None and report.budget.delta <= report.delta:
        bounds.append(report.budget.epsilon)
    return max(report.epsilon, min(bounds)) if bounds else None


def _group(report: PrivacyReport, size: int) -> str:
    epsilon, delta = group_guarantee(report.epsilon, report.delta, size)
    if report.delta == 0:
        return f"k = {size}: {rounded_up(epsilon)}"
    return f"k = {size}: " + (
        "none" if delta >= 1 else f"({rounded_up(epsilon)}, {rounded_up(delta)})"
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _odds(epsilon: float, factor: float = 1.0) -> str:
    if epsilon >= 700:
        return "more than 1e304"
    return rounded_up(factor * math.exp(epsilon) * _SLACK)


def _guess(advantage: float) -> str:
    """Returns how often a guess between two equally likely worlds is right, in percent."""
    # PRIVACY: rounded up (test_no_figure_of_the_text_is_rounded_down)
    return rounded_up(min(100.0, (50.0 + 50.0 * advantage) * _SLACK * _SLACK), 3)
