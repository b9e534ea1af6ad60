"""What is true of a report and its run, and the figures that fill the blanks of the sentences of a statement.

From public values only: a ledger's report and public facts of a run. Every figure is rounded up.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

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
    ApproxZCDP,
    Gaussian,
    NonPrivate,
    Pure,
    RDPCurve,
    Sequential,
)
from torch_dpsco.accounting.report.figures import (
    OneFit,
    OneRelease,
    PrivacyReport,
    Run,
    StudyRun,
    attack_advantage,
    group_guarantee,
    rounded_up,
)
from torch_dpsco.accounting.report.grounds import Words, charged, sentences_of, titles
from torch_dpsco.accounting.report.names import KEPT, PROMISED

GROUPS = (2, 10)  # sizes of the groups that are spelled out
_WEAK = 10.0  # e^10 is 22026: hardly any conclusion is excluded
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
_UNTOLD = (Pure, ApproxDP, ZCDP, ApproxZCDP, RDPCurve)


class Section(NamedTuple):
    """A title and the sentences below it."""

    title: str
    sentences: tuple[str, ...]


def table(report: PrivacyReport) -> tuple[tuple[str, str, str, str], ...]:
    """Returns each epsilon with its adjacency and what that compares, below a row of titles."""
    rows = [("adjacency", "two worlds", "epsilon", "delta")]
    for name, epsilon in report.epsilons.items():
        role = "the guarantee" if name == report.adjacency else "for information"
        words = Words({other: other == name for other in ADJACENCIES}, {"unit": report.unit_name})
        figures = (rounded_up(epsilon), rounded_up(report.delta))
        rows.append((f"{name} ({role})", words["world"], *figures))
    return tuple(rows)


def words_of(report: PrivacyReport, run: Run, version: str) -> Words:
    """Returns what the sentences of a statement rest on."""
    return Words(
        {
            **charged((charge.event for charge in report.charges), report.adjacency),
            **_true_of_report(report, run),
            **_true_of_run(run),
        },
        {
            "report": report,
            "run": run,
            "design": run.design,
            "version": version,
            **_figures_of_report(report),
            **_figures_of_run(report, run),
        },
    )


def sections(words: Words) -> Iterator[Section]:
    """Yields all sentences but headline and warnings, by topic."""
    for title in titles():
        sentences = tuple(words.said("sections", title))
        if sentences:
            yield Section(title, sentences)


def odds_factor(epsilon: float) -> float:
    """Returns e^epsilon, rounded up; inf from epsilon = 700 on."""
    return math.exp(epsilon) * _SLACK if epsilon < 700 else math.inf


def accuracy(advantage: float) -> float:
    """Returns how often a guess between two equally likely worlds is right, rounded up."""
    return min(1.0, (0.5 + 0.5 * advantage) * _SLACK)


# -- what is true -----------------------------------------------------------------------------------------------------


def _true_of_report(report: PrivacyReport, run: Run) -> dict[str, bool]:
    budget = report.budget
    comparable = budget is not None and budget.delta == report.delta
    exceeded = comparable and budget is not None and report.epsilon > budget.epsilon
    below = comparable and budget is not None and report.epsilon < 0.99 * budget.epsilon
    declared = not isinstance(run.design, Undeclared)
    return {adjacency: report.adjacency == adjacency for adjacency in ADJACENCIES} | {
        "endless": math.isinf(report.epsilon),
        "weak": _WEAK < report.epsilon < math.inf,
        "pure": report.delta == 0,
        "charged": bool(report.charges),
        # publishing one uniformly random record is (0, 1/n)-DP
        "delta_large": declared and report.delta > 0 and report.delta >= 1.0 / run.design.n,
        "told_add_remove": ADD_REMOVE in report.epsilons,
        "same_guess": _guess(report.advantage) == _guess(_attack(report)),
        "named": bool(report.named_unit),
        "promised": report.rows_of_unit == PROMISED,
        "kept": report.rows_of_unit == KEPT,
        "example": report.unit == "example",
        "user": report.unit == "user",
        "called_example": report.unit_name == "example",
        # a rule that sees released values only truncates the planned run, which is post-processing
        # (test_an_early_stop_is_quoted_by_plan_or_budget)
        "bounded": _ceiling(report) is not None,
        "ahead": report.planned_epsilon is not None,
        "budget": budget is not None,
        "other_delta": budget is not None and not comparable,
        "exceeded": exceeded,
        "left_over": below and run.finalized,
        "ideal_run": _is_ideal(report, run),
    }


def _is_ideal(report: PrivacyReport, run: Run) -> bool:
    """Returns whether noise is taken for ideal that the assumptions of the report do not name."""
    released = run.event.events if isinstance(run.event, Sequential) else (run.event,)
    (doubt,) = sentences_of("phrases", "out_of_scope")
    said = any(doubt.text in line for line in report.assumptions) or any(map(is_exact, released))
    # PRIVACY: stated events do not tell their noise (test_releases_without_an_exact_form_name_the_assumption)
    untold = any(isinstance(event, _UNTOLD) for event in released)
    return isinstance(run, OneRelease) and (untold or not said)


def _true_of_run(run: Run) -> dict[str, bool]:
    design = run.design
    event = run.event
    moves = isinstance(event, Gaussian) and any(dict(event.sens).values())
    silent = moves and isinstance(event, Gaussian) and event.sigma == 0
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
        "finalized": run.finalized,
        "planned": run.planned is not None,
        "no_steps": run.planned == 0,
        "unfinished": run.unfinished > 0,
        "made_all": run.planned is not None and not run.unfinished,
    }


# -- figures ----------------------------------------------------------------------------------------------------------


def _figures_of_report(report: PrivacyReport) -> dict[str, Any]:
    record, records = report.named_unit or ("record", "records")
    epsilon = report.epsilon
    return {
        "unit": report.unit_name,
        "units": report.unit_names,
        "record": record,
        "records": records,
        "epsilon": rounded_up(epsilon),
        "delta": rounded_up(report.delta),
        "odds": _odds(epsilon),
        "odds_twice": _odds(epsilon, 2.0),
        "delta_twice": rounded_up(2.0 * report.delta),
        "right": _guess(report.advantage),
        "alone": _guess(_attack(report)),
        "groups": "; ".join(_group(report, k) for k in GROUPS),
        "ceiling": rounded_up(_ceiling(report) or 0.0),
        "planned_epsilon": rounded_up(report.planned_epsilon or 0.0),
        "target": _target(report),
        "charges": report.events or ("nothing",),
    }


def _figures_of_run(report: PrivacyReport, run: Run) -> dict[str, Any]:
    design = run.design
    own = (line.replace("{units}", report.unit_names) for line in run.assumptions)
    released = run.released if isinstance(run, StudyRun) else ()
    parts = design.parts if isinstance(design, Parts) else ()
    is_poisson = isinstance(design, Poisson)
    return {
        "assumptions": [_sentence(line) for line in (*report.assumptions, *own)],
        "steps": _count(run.steps, "step"),
        "planned_steps": _count(run.planned or 0, "planned step"),
        "released": "; the ".join(released),
        "releases": len(released),
        "rate": rounded_up(design.batch_size / design.n, 6) if is_poisson else "",
        "parts": len(parts),
        "cut_parts": [
            _CutPart(number, part.batches, part.passes)
            for number, (part, _) in enumerate(parts, 1)
            if isinstance(part, Assigned) and part.secret
        ],
    }


class _CutPart(NamedTuple):
    number: int
    batches: int
    passes: int

    @property
    def anew(self) -> str:
        return "" if self.passes == 1 else f", anew in each of {self.passes} passes"


def _sentence(line: str) -> str:
    return f"{line[0].upper()}{line[1:].removesuffix('.')}."


def _ceiling(report: PrivacyReport) -> float | None:
    """Returns the largest epsilon that plan and budget allow at the report's delta; None if neither is there."""
    bounds = [] if report.planned_epsilon is None else [report.planned_epsilon]
    if report.budget is not None and report.budget.delta <= report.delta:
        bounds.append(report.budget.epsilon)
    return max(report.epsilon, min(bounds)) if bounds else None


def _attack(report: PrivacyReport) -> float:
    return attack_advantage(report.epsilon, report.delta)


def _group(report: PrivacyReport, size: int) -> str:
    epsilon, delta = group_guarantee(report.epsilon, report.delta, size)
    if report.delta == 0:
        return f"k = {size}: {rounded_up(epsilon)}"
    return f"k = {size}: " + (
        "none" if delta >= 1 else f"({rounded_up(epsilon)}, {rounded_up(delta)})"
    )


def _target(report: PrivacyReport) -> str:
    budget = report.budget
    if budget is None:
        return ""
    if budget.risk is not None:
        return budget.target
    return f"epsilon {budget.epsilon:.15g} at delta {budget.delta:.15g}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _odds(epsilon: float, factor: float = 1.0) -> str:
    return rounded_up(factor * odds_factor(epsilon)) if epsilon < 700 else "more than 1e304"


def _guess(advantage: float) -> str:
    # PRIVACY: rounded up (test_no_figure_of_the_text_is_rounded_down)
    return rounded_up(min(100.0, 100.0 * accuracy(advantage) * _SLACK), 3)
