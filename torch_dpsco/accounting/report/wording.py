"""The sentences of a privacy statement, made from public values only: a ledger's report and public facts of a run.

Written for a data protection officer: short sentences, every symbol explained, every figure rounded up.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

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
    REPLACE_ONE,
    ZCDP,
    ZERO_OUT,
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
from torch_dpsco.accounting.report.grounds import DELTA, IDEAL, Charged
from torch_dpsco.accounting.report.names import KEPT, PROMISED

GROUPS = (2, 10)  # sizes of the groups that are spelled out
WORLDS = {
    ADD_REMOVE: "in one the {unit} is in the data set, in the other it is left out",
    ZERO_OUT: (
        "in one the {unit} is in the data set, in the other an empty record stands in its place"
    ),
    REPLACE_ONE: (
        "in one the {unit} is in the data set, in the other any other {unit} stands in its place"
    ),
}
_WEAK = 10.0  # e^10 is 22026: hardly any conclusion is excluded
_SLACK = 1.0 + 1e-14  # more than the rounding of the few operations below
_UNITS = {
    "example": (
        "One example is one row of the training data. A person with several rows is not one"
        " example."
    ),
    "user": "One user is everything that one person contributed, however many rows that is.",
}
_NAMED = {
    PROMISED: (
        "One {unit} is one row of the training data. With several rows, a {unit} is not protected"
        " as a whole."
    ),
    KEPT: (
        "One {unit} is one row of the training data: of several rows with its id, the others were"
        " left out."
    ),
    "": "One {unit} is all rows with its id, however many these are.",
}
_SAMPLING: dict[type[Design], str] = {
    Poisson: (
        "Poisson sampling: each batch takes each {unit} with probability {rate} ({b}/{n}),"
        " independently of all others. It must stay secret who was in which batch."
    ),
    Fixed: (
        "Fixed-size sampling: each batch is a fresh random choice of exactly {b} out of {n}"
        " {units}. It must stay secret who was in which batch."
    ),
    Shuffled: (
        "Shuffled passes: all {n} {units} in a fresh random order, cut into batches of {b}. Nothing"
        " is gained from the random order: each pass that was begun costs one full release."
    ),
    Disjoint: (
        "One pass: {n} {units} in a random order, cut into batches of {b}. Each {unit} is used at"
        " most once, and nothing is gained from the random order."
    ),
    Cyclic: (
        "{passes} passes over {n} {units} in one random order, cut into batches of {b}, which come"
        " in the same order in each pass. Nothing is gained from the random order: each pass that"
        " was begun costs one full release."
    ),
    Assigned: (
        "{passes}: each {unit} is put into one of {batches} batches of about {b}, at random and"
        " independently of all others{anew}. It must stay secret who was in which batch. "
    ),
    Parts: (
        "Phases on disjoint parts: {n} {units} in a random order, cut into {parts} parts; each"
        " {unit} is used in one phase at most, and what counts is the phase that costs most."
    ),
    AssignedParts: (
        "Phases on disjoint parts: each of {n} {units} is put into one of {parts} parts, at random"
        " and independently of all others; each {unit} is used in one phase at most, and what"
        " counts is the phase that costs most. It must stay secret who was in which part."
    ),
    Full: "No sampling: each step uses all {units}, and divides by the public constant {n}.",
    Undeclared: (
        "Not declared: each step is charged as a full release, and nothing is gained from random"
        " batches. It is taken for granted that a batch of {b} holds each {unit} at most once and"
        " is not chosen by looking at the data."
    ),
}
_ALLOCATED = (
    "Each {unit} picked one of {batches} batches, secretly; amplified by random allocation; batch"
    " sizes not released. A pass that was begun counts as a whole one."
)
_PART_ALLOCATED = (
    "Part {k} is cut further: in it each {unit} picked one of {batches} batches, secretly{anew};"
    " sums of clipped rows with Gaussian noise are amplified by random allocation; batch sizes not"
    " released. A pass that was begun counts as a whole one."
)
_NOT_ALLOCATED = (
    "Each {unit} is used once in a pass, and nothing is gained from the random assignment: {why}."
)
_UNTOLD = (
    Pure,
    ApproxDP,
    ZCDP,
    ApproxZCDP,
    RDPCurve,
)  # guarantees that do not say by what noise they hold
_COUPLING = (
    "What one record contributes does not depend on the others: no batch statistics, no loss across"
    " records."
)


class Section(NamedTuple):
    """A title and the sentences below it."""

    title: str
    sentences: tuple[str, ...]


def headline(report: PrivacyReport) -> str:
    """Returns the guarantee in one sentence, and says first if there is none or a weak one."""
    if math.isinf(report.epsilon):
        return f"NO privacy guarantee: epsilon is infinite ({report.adjacency})."
    strength = "WEAK: " if report.epsilon > _WEAK else ""
    epsilon = rounded_up(report.epsilon)
    kind = f"({epsilon}, {rounded_up(report.delta)})-differential privacy"
    if report.delta == 0:
        kind = f"{epsilon}-differential privacy, pure (delta = 0),"
    so_far = "" if report.charges else ", because nothing was released yet"
    return (
        f"{strength}{kind} for one {report.unit_name} ({report.adjacency}){report.proviso}{so_far}."
    )


def table(report: PrivacyReport) -> tuple[tuple[str, str, str, str], ...]:
    """Returns each epsilon with its adjacency and what that compares, below a row of titles."""
    rows = [("adjacency", "two worlds", "epsilon", "delta")]
    for name, epsilon in report.epsilons.items():
        role = "the guarantee" if name == report.adjacency else "for information"
        worlds = WORLDS[name].format(unit=report.unit_name)
        rows.append((f"{name} ({role})", worlds, rounded_up(epsilon), rounded_up(report.delta)))
    return tuple(rows)


def warning_sentences(report: PrivacyReport, run: Run) -> tuple[str, ...]:
    """Returns what a reader must know before quoting a figure; nothing for a planned, finished, sound run."""
    numbers = (
        *_strength(report, run),
        *_size_of_delta(report, run),
        *_progress(report, run),
        *_budget(report, run),
    )
    return (*_source(run), *numbers)


def _sentence(line: str) -> str:
    return f"{line[0].upper()}{line[1:].removesuffix('.')}."


def sections(report: PrivacyReport, run: Run, version: str) -> tuple[Section, ...]:
    """Returns all other sentences, by topic."""
    assumptions = map(_sentence, report.assumptions)
    own = (_sentence(line.replace("{units}", report.unit_names)) for line in run.assumptions)
    return (
        Section("What it means", tuple(_meaning(report, run))),
        Section("What is protected", tuple(_protected(report, run))),
        *((Section("What delta is", tuple(_delta(report))),) if report.delta > 0 else ()),
        Section("What is covered", tuple(_covered(run))),
        Section("What is not covered", tuple(_not_covered(report, run))),
        Section("How batches are drawn", tuple(_sampling(report, run))),
        Section("What must hold", (*assumptions, *own, _COUPLING, *_promised(report, run))),
        Section("How it was computed", tuple(_computed(report, run, version))),
    )


def odds_factor(epsilon: float) -> float:
    """Returns e^epsilon, rounded up; inf from epsilon = 700 on."""
    return math.exp(epsilon) * _SLACK if epsilon < 700 else math.inf


def accuracy(advantage: float) -> float:
    """Returns how often a guess between two equally likely worlds is right, rounded up."""
    return min(1.0, (0.5 + 0.5 * advantage) * _SLACK)


# -- warnings ---------------------------------------------------------------------------------------------------------


def _source(run: Run) -> Iterator[str]:
    if run.repeatable:
        yield (
            "REPEATABLE NOISE: it came from a generator of the caller's. No figure here holds"
            " against anybody who knows its seed, or finds its state from what was released. For"
            " tests only."
        )


def _strength(report: PrivacyReport, run: Run) -> Iterator[str]:
    if math.isinf(report.epsilon):
        yield (
            "No guarantee: something was released without noise, or may fail with a probability of"
            " delta or more."
        )
    elif report.epsilon > _WEAK:
        yield (
            f"Weak: the likelihood ratio e^epsilon is {_odds(report.epsilon)}, which excludes"
            " hardly anything."
        )
    silent = (
        isinstance(run.event, Gaussian)
        and run.event.sigma == 0
        and any(dict(run.event.sens).values())
    )
    if isinstance(run.event, NonPrivate) or silent:
        yield (
            "The noise of this optimizer is 0: each of its steps is a release without any privacy."
        )


def _size_of_delta(report: PrivacyReport, run: Run) -> Iterator[str]:
    if report.delta == 0:
        return  # nothing can be too large
    if isinstance(run.design, Undeclared):
        yield (
            f"No sampling was declared, and no number n of {report.unit_names}: check that delta is"
            " far below 1/n."
        )
    elif report.delta >= 1.0 / run.design.n:
        # publishing one uniformly random record is (0, 1/n)-DP
        yield (
            f"delta = {rounded_up(report.delta)} is not below 1/n (n = {run.design.n}): even"
            f" publishing the data of one {report.unit_name} picked at random would pass as"
            " private. Choose a smaller delta."
        )


def _progress(report: PrivacyReport, run: Run) -> Iterator[str]:
    ceiling = _ceiling(report)
    if not run.finalized:
        if run.planned is not None and not run.unfinished:
            yield "Not finalized: until finalize() the parameters do not hold the answer."
            return
        final = (
            "nothing bounds it"
            if ceiling is None
            else f"at most {rounded_up(ceiling)} by plan or budget"
        )
        yield (
            f"Not finalized: the figures are for the {_count(run.steps, 'step')} made so far, and"
            f" steps to come cost more. Final epsilon: {final}. Until finalize() the parameters do"
            " not hold the answer."
        )
        return
    if run.planned is None:
        yield f"The number of steps ({run.steps}) was not declared in advance. {_chosen(ceiling)}"
    elif run.unfinished:
        yield (
            f"Stopped after {run.steps} of {_count(run.planned, 'planned step')}."
            f" {_chosen(ceiling)}"
        )


def _chosen(ceiling: float | None) -> str:
    # a rule that sees released values only truncates the planned run, which is post-processing
    # (test_an_early_stop_is_quoted_by_plan_or_budget)
    quote = "no figure here holds" if ceiling is None else f"quote epsilon {rounded_up(ceiling)}"
    return (
        f"Was that decided by looking at private results (iterates, private means)? Then {quote}."
        " By looking at the data in any other way? That is not covered."
    )


def _ceiling(report: PrivacyReport) -> float | None:
    """Returns the largest epsilon that plan and budget allow at the report's delta; None if neither is there."""
    bounds = [] if report.planned_epsilon is None else [report.planned_epsilon]
    if report.budget is not None and report.budget.delta <= report.delta:
        bounds.append(report.budget.epsilon)
    return max(report.epsilon, min(bounds)) if bounds else None


def _budget(report: PrivacyReport, run: Run) -> Iterator[str]:
    if report.budget is None:
        return
    target = _target(report)
    if report.budget.delta != report.delta:
        yield f"The budget is {target}: figures at another delta cannot be compared with it."
    elif report.epsilon > report.budget.epsilon:
        yield (
            f"The budget ({target}) was exceeded: something was recorded that it would have"
            " refused."
        )
    elif run.finalized and report.epsilon < 0.99 * report.budget.epsilon:
        yield (
            f"The budget ({target}) is not used up. Whoever may still spend the rest on these data"
            " must promise the budget, not the figure above."
        )


# -- sections ---------------------------------------------------------------------------------------------------------


def _meaning(report: PrivacyReport, run: Run) -> Iterator[str]:
    unit = report.unit_name
    units = report.unit_names
    epsilon = report.epsilon
    pure = report.delta == 0
    if math.isinf(epsilon):
        yield (
            f"Nothing bounds what the release tells about one {unit}. Treat it like the data"
            " themselves."
        )
        return
    yield (
        f"Think of two worlds that differ in one {unit} only:"
        f" {WORLDS[report.adjacency].format(unit=unit)}."
    )
    yield (
        "Whatever somebody may conclude from the release, the probability of that in one world is"
        f" at most e^epsilon ({_odds(epsilon)}) times its probability in the"
        f" other{'' if pure else ', plus delta'}."
    )
    # PRIVACY: random bits are those of a cipher (test_no_card_promises_unlimited_computing_power)
    source = "generator" if run.repeatable else "cipher"
    yield (
        f"This holds against anybody who sees everything released, knows every other {unit}, the"
        f" code and all settings, and has any computing power that does not break the {source} from"
        " which noise and any batches are drawn. Only the noise and any random choice of batches"
        " are secret."
    )
    yield _rise_of_odds(report)
    yield _guess(report)
    yield (
        "It does not promise that nothing can be learned about a person: what all the other"
        f" {units} show (a rule that holds for most people) can be learned with or without this"
        " one."
    )


def _rise_of_odds(report: PrivacyReport) -> str:
    epsilon = report.epsilon
    if report.delta == 0:  # the likelihood ratio is at most e^epsilon, whatever was released
        return (
            "Whatever they see, the odds that they give to a world rise by a factor of at most"
            f" {_odds(epsilon)}."
        )
    # P(L > eps + t) <= delta/(1 - e^-t) for the log-odds L of the true world, here with t = log 2: the event S has
    # P(S) <= e^eps Q(S) + delta and Q(S) <= e^-(eps + t) P(S)
    return (
        "The odds that they give to the true world rise by a factor above 2 e^epsilon"
        f" ({_odds(epsilon, 2.0)}) with a probability of at most 2 delta"
        f" ({rounded_up(2.0 * report.delta)})."
    )


def _guess(report: PrivacyReport) -> str:
    right = _percent(report.advantage)
    alone = _percent(attack_advantage(report.epsilon, report.delta))
    given = "Epsilon and delta" if report.delta > 0 else "Epsilon"
    source = "" if right == alone else f" {given} alone would allow {alone} %."
    return (
        "Made to guess which world is the true one, both being equally likely, they guess right at"
        f" most {right} % of the time (a coin flip: 50 %).{source}"
    )


def _protected(report: PrivacyReport, run: Run) -> Iterator[str]:
    unit = report.unit_name
    units = report.unit_names
    words = _NAMED.get(report.rows_of_unit) if report.named_unit else _UNITS.get(report.unit)
    yield (words or "The protected unit is one {unit}.").format(unit=unit)
    if report.adjacency == ADD_REMOVE:
        yield f"Its presence is protected, and so is the number of {units}."
        if not isinstance(run.design, Undeclared):
            yield (
                f"The number n = {run.design.n} used here is a public reference, not the true"
                " number. It must have been chosen without counting the data."
            )
    else:
        yield f"Its content is protected. The number of {units} is taken to be public."
    yield (
        "A figure under one adjacency is not a figure under another: compare only figures of the"
        " same adjacency."
    )
    if report.adjacency != ADD_REMOVE and ADD_REMOVE in report.epsilons:
        yield (
            f"The figure under {ADD_REMOVE} holds only if n, batch size and steps were not taken"
            " from the data."
        )
    if math.isfinite(report.epsilon):
        groups = "; ".join(_group(report, k) for k in GROUPS)
        members = (
            "a person with k rows has"
            if unit == "example"
            else f"k {units} who belong together have"
        )
        figures = "(k epsilon, k e^((k-1) epsilon) delta)" if report.delta > 0 else "k epsilon"
        yield f"For a group the protection fades: {members} {figures}. {groups}."


def _group(report: PrivacyReport, size: int) -> str:
    epsilon, delta = group_guarantee(report.epsilon, report.delta, size)
    if report.delta == 0:
        return f"k = {size}: {rounded_up(epsilon)}"
    return f"k = {size}: " + (
        "none" if delta >= 1 else f"({rounded_up(epsilon)}, {rounded_up(delta)})"
    )


def _delta(report: PrivacyReport) -> Iterator[str]:
    record, records = report.named_unit or ("record", "records")
    charged = Charged((charge.event for charge in report.charges), report.adjacency)
    for line in DELTA:
        if line.when(charged):
            yield line.text.format(record=record, records=records)


def _promised(report: PrivacyReport, run: Run) -> Iterator[str]:
    released = run.event.events if isinstance(run.event, Sequential) else (run.event,)
    said = any(IDEAL in line for line in report.assumptions) or any(map(is_exact, released))
    # PRIVACY: stated events do not tell their noise (test_releases_without_an_exact_form_name_the_assumption)
    if isinstance(run, OneRelease) and (
        not said or any(isinstance(event, _UNTOLD) for event in released)
    ):
        yield f"Ideal noise in this run ({IDEAL})."
    if isinstance(run, OneRelease) and isinstance(run.design, Full):
        yield (
            "Bounds, n and n_max, classes, centers and scales are public numbers, chosen without"
            " looking at the data."
        )
    elif isinstance(run, OneRelease):
        yield (
            "The loss is convex and has the promised constants for every record within the bounds:"
            " none is clipped."
        )
        yield (
            "Each gradient is that of this loss on the delivered batch, with no other term;"
            " iterates stayed secret."
        )


def _covered(run: Run) -> Iterator[str]:
    if isinstance(run, StudyRun):
        yield f"The {'; the '.join(run.released)}. Nothing else of the study."
    elif isinstance(run, OneRelease):
        # PRIVACY: (test_the_statement_of_output_perturbation_covers_the_final_model_only)
        yield "The final model, and nothing else of the run."
    else:
        yield (
            "The final model, and every iterate, average and private mean gradient (p.grad after a"
            " step) on the way."
        )
    yield (
        "All that is computed from these without another look at the data: predictions, plots,"
        " learning rates."
    )
    yield (
        "All that was charged to the same accountant, by other optimizers too; it is listed at the"
        " end."
    )


def _not_covered(report: PrivacyReport, run: Run) -> Iterator[str]:
    if isinstance(run, StudyRun):
        yield (
            f"Which {report.unit_names} were held out, and all that was computed on the way. They"
            " are secret."
        )
        yield (
            "The look at the table beside its schema, before anything was spent, and that it let"
            " the study go on."
        )
    elif isinstance(run, OneFit):
        yield (
            "All that was computed on the way: sums, gradients, models in between. They are secret."
        )
    elif isinstance(run, OneRelease):
        yield (
            "Everything before finalize(): parameters, averages, gradients, losses, checkpoints,"
            " and what is computed from them. They are secret."
        )
    closure = "" if isinstance(run, OneFit) else ", also the one that step(closure) returns,"
    yield f"Training losses{closure} and any other score computed on the training data."
    yield (
        "Gradients of single records, their norms, how many were clipped, and who was in which"
        " batch."
    )
    if report.adjacency != ADD_REMOVE:
        yield f"The number of {report.unit_names}."
    yield (
        "Preparing the data by looking at them: scaling, filling gaps, dropping outliers, choosing"
        " features or words."
    )
    yield "Constants read off the data: bounds on norms, clip, radius, starting weights."
    yield "Stopping early, or picking a model, by scores on private data that were not charged."
    yield (
        "Choosing among several runs (learning rate, clip, seed). Every run costs its own budget,"
        " those thrown away too: give all runs one Accountant, which adds them up."
    )
    yield (
        "Other releases about the same people, by anybody, that were not charged to this"
        " accountant."
    )
    yield (
        "What the computer shows besides the result: running time, memory, error messages, logs,"
        " files."
    )


def _sampling(report: PrivacyReport, run: Run) -> Iterator[str]:
    design = run.design
    if isinstance(run, StudyRun):
        about = "about " if report.adjacency == ADD_REMOVE else ""
        yield (
            f"The model is fitted to {about}{design.n} {report.unit_names}, and measured on"
            f" {about}{run.held} others, by a draw that is fresh and secret."
        )
        return
    if isinstance(run, OneRelease) and isinstance(design, Full):
        what = (
            "a public reference for their number"
            if report.adjacency == ADD_REMOVE
            else "their number, is public"
        )
        yield (
            f"No sampling: the answer is computed from all {report.unit_names}; {design.n}, {what}."
        )
        return
    if isinstance(run, OneRelease):
        how = (
            "in a fresh random order each pass"
            if isinstance(design, Shuffled)
            else "each batch a fresh random subset"
        )
        yield (
            f"All {design.n} {report.unit_names}, batches of {design.batch_size}, {how}. The noise"
            " on the answer is calibrated for the hits that one record can have this way."
        )
        return
    if type(design) not in _SAMPLING:
        yield f"As the class says: {design}."
        return
    declared = not isinstance(design, Undeclared)
    if isinstance(design, Assigned):
        yield _allocation(design, run, report)
        return
    yield _SAMPLING[type(design)].format(
        unit=report.unit_name,
        units=report.unit_names,
        b=design.batch_size,
        n=design.n if declared else "",
        passes=getattr(design, "passes", ""),
        rate=rounded_up(design.batch_size / design.n, 6) if declared else "",
        parts=(
            len(design.parts)
            if isinstance(design, Parts)
            else design.steps_per_epoch
            if declared
            else ""
        ),
    )
    for k, (part, _) in enumerate(design.parts if isinstance(design, Parts) else ()):
        if isinstance(part, Assigned) and part.secret:
            anew = "" if part.passes == 1 else f", anew in each of {part.passes} passes"
            yield _PART_ALLOCATED.format(
                k=k + 1, unit=report.unit_name, batches=part.batches, anew=anew
            )


def _allocation(design: Assigned, run: Run, report: PrivacyReport) -> str:
    """Returns how passes of an assigned design are drawn, and whether that is counted on."""
    why = (
        "the release is no sum of clipped rows with Gaussian noise"
        if design.amplification
        else "amplification=False"
    )
    text = _SAMPLING[Assigned] + (_ALLOCATED if design.amplifies(run.event) else _NOT_ALLOCATED)
    return text.format(
        unit=report.unit_name,
        b=design.batch_size,
        batches=design.batches,
        passes="One pass" if design.passes == 1 else f"{design.passes} passes",
        anew="" if design.passes == 1 else ", anew in each pass",
        why=why,
    )


def _computed(report: PrivacyReport, run: Run, version: str) -> Iterator[str]:
    planned = "" if run.planned is None else f" of {run.planned} planned"
    made = "one release" if run.planned == 0 else f"{_count(run.steps, 'step')} made{planned}"
    if isinstance(run, StudyRun):
        made = f"{len(run.released)} releases"
    if not isinstance(run, OneFit):
        made += "; finalized" if run.finalized else "; not finalized"
    yield f"{run.name}: {made}."
    if run.unfinished and report.planned_epsilon is not None:
        yield f"Epsilon with all planned steps: {rounded_up(report.planned_epsilon)}."
    if report.budget is not None:
        yield f"Budget: {_target(report)}."
    if not run.repeatable:
        yield (
            "The noise of this run, and its batches where no seed was given, were drawn from a"
            " cryptographic keystream that the operating system seeds; no state of it is kept."
        )
    yield f"Method: {report.method}; figures rounded up. Computed by torch_dpsco {version}."
    for line in report.events or ("nothing",):
        yield f"Charged: {line}."


def _target(report: PrivacyReport) -> str:
    assert report.budget is not None
    if report.budget.risk is not None:
        return report.budget.target
    return f"epsilon {report.budget.epsilon:.15g} at delta {report.budget.delta:.15g}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _odds(epsilon: float, factor: float = 1.0) -> str:
    return rounded_up(factor * odds_factor(epsilon)) if epsilon < 700 else "more than 1e304"


def _percent(advantage: float) -> str:
    # PRIVACY: rounded up (test_no_figure_of_the_text_is_rounded_down)
    return rounded_up(min(100.0, 100.0 * accuracy(advantage) * _SLACK), 3)
