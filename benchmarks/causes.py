"""What each rule of our defaults wins by itself, on tables for development: all off, one at a time, all on.

    python benchmarks/causes.py                            # 3 epsilons, 3 seeds: half an hour on one core
    python benchmarks/causes.py --anchors anchors.json --update docs/choosing.md
    python benchmarks/causes.py --smoke

A rule is switched off by what this script puts in its place in the library, and for what it measures only. 4,000
training rows of each table, so that noise has a say; the anchor is DP-GD tuned on the test set (`anchors.py`).
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from accuracy import LOST, Results, best_anchor, verdict
from anchors import LARGER, tuned
from ours import Fit, by_estimator, by_fit, holder, huber_at_threshold
from performance import replaced
from table_parts import Table
from tables import TABLES, scores, trivial

from torch_dpsco.estimators import (
    LogisticRegression,
    QuantileRegressor,
    gradient_descent,
    least_squares,
    models,
    preparation,
)

EPSILONS, SEEDS, TRAIN, TEST, SAMPLE_SEED = (0.3, 1.0, 3.0), 3, 4_000, 8_000, 7
GENEROUS = 100.0  # times the public bound on targets, of the tables for the rule on spreads
OFF: dict[str, tuple[tuple[object, str, object], ...]] = {  # of what, name, what takes its place
    "spreads down to 1e-6 of the bound": ((preparation, "_LEAST_SPREAD", 500),),
    "log odds that undo the clip": ((models.LogisticRegression, "_link", None),),
    "a threshold that noise lowers": ((models, "_CALM", 0.0),),
    "shorter ways where noise is loud": (
        (gradient_descent, "_FAINT_LABELS", 1e-9),
        (gradient_descent, "_FAINT_TARGETS", 1e-9),
        (least_squares, "_FAINT", 1e-9),
    ),
    "scale and intercept": ((gradient_descent, "_FEW", math.inf),),
}
SPREADS, LINK, THRESHOLD, WAYS, SCALE = OFF


@dataclasses.dataclass(frozen=True)
class Case:
    """A fit, its scores, and the rules that it may use."""

    name: str
    kind: str
    aims: tuple[str, ...]
    fit: Fit
    rules: tuple[str, ...]
    generous: bool = False


CASES = (
    Case(
        "LogisticRegression",
        "binary",
        ("auc", "log_loss"),
        by_estimator(LogisticRegression),
        (LINK, WAYS, SCALE),
    ),
    Case(
        "QuantileRegressor",
        "regression",
        ("mae",),
        by_estimator(QuantileRegressor),
        (WAYS,),
    ),
    Case(
        "QuantileRegressor, bound_y 100 times as large",
        "regression",
        ("mae",),
        by_estimator(QuantileRegressor),
        (SPREADS,),
        generous=True,
    ),
    Case(
        "HuberRegressor, threshold of the table",
        "regression",
        ("huber",),
        huber_at_threshold,
        (THRESHOLD, WAYS),
    ),
)
LOOPS = (("logistic", "binary", ("auc", "log_loss")), ("huber", "regression", ("huber",)))


@contextmanager
def without(rules: Sequence[str]) -> Iterator[None]:
    """Runs with these rules off."""
    with ExitStack() as stack:
        for rule in rules:
            for where, name, value in OFF[rule]:
                stack.enter_context(mock.patch.object(where, name, value))
        yield


def few(table: Table) -> Table:
    """Returns a public sample of a table."""
    draws = np.random.default_rng(SAMPLE_SEED)
    train = draws.permutation(np.flatnonzero(~table.test))[:TRAIN]
    test = draws.permutation(np.flatnonzero(table.test))[:TEST]
    kept = np.concatenate([train, test])
    return dataclasses.replace(
        table,
        name=f"{table.name}_{TRAIN}",
        rows=table.rows[kept],
        targets=table.targets[kept],
        test=np.arange(len(kept)) >= len(train),
    )


def variants(case: Case) -> Iterator[tuple[str, Fit]]:
    """Yields all off, one at a time, and all on, of a case."""
    alone = {rule: [other for other in case.rules if other != rule] for rule in case.rules}
    named = {"none of them": list(case.rules), **alone, "all of them": []}
    for name, off in named.items():
        if name != "all of them" or len(alone) > 1:
            yield name, partial(fitted, case, tuple(off))


def fitted(case: Case, off: tuple[str, ...], table: Table, epsilon: float) -> Any:
    """Fits with rules off."""
    if case.generous:
        table = dataclasses.replace(table, bound_y=GENEROUS * (table.bound_y or 1.0))
    with without(off):
        return case.fit(table, epsilon)


def loops() -> Iterator[tuple[str, str, tuple[str, ...], str, Fit]]:
    """Yields HolderSGD without and with its preparation."""
    for loss, kind, aims in LOOPS:
        for name, given in (("none of them", {}), ("rows are prepared", {"prepare": "auto"})):
            yield f"HolderSGD, {loss}", kind, aims, name, by_fit(partial(holder, **given), loss)


def measured(
    name: str, kind: str, aims: Sequence[str], rule: str, fit: Fit, args: argparse.Namespace
) -> Iterator[str]:
    """Yields a line of Markdown for each score: cells at least equal to the anchor, and what a constant loses."""
    found: dict[tuple[str, str], list[bool]] = {}
    beside: dict[str, list[float]] = {score: [] for score in aims}
    for table in (t for t in args.samples if t.kind == kind):
        constant = trivial(table)
        for epsilon in args.epsilons:
            tests = [scores(table, np.asarray(fit(table, epsilon))) for _ in range(args.seeds)]
            for score in aims:
                mine = statistics.median(test[score] for test in tests)
                anchor = best_anchor(args.known, table.name, f"{epsilon:g}", score)
                good = anchor is not None and verdict(score, mine, anchor) != "worse"
                found.setdefault((score, f"{epsilon:g}"), []).append(good)
                beside[score].append(mine / constant[score] - 1)
    for score in aims:
        cells = [found.get((score, f"{epsilon:g}"), []) for epsilon in args.epsilons]
        counts = " | ".join(f"{sum(cell)} of {len(cell)}" for cell in cells)
        mean = statistics.mean(beside[score]) if beside[score] else math.nan
        lost = sum(value > LOST for value in beside[score]) if score not in LARGER else "-"
        end = f"{mean:+.1%} | {lost}"
        yield f"| {name}: {score.replace('_', '-')} | {rule} | {counts} | {end} |"


def main(argv: Sequence[str] | None = None) -> None:
    """Measures what the options ask for, and prints it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epsilons", nargs="+", type=float, default=EPSILONS)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--only", choices=("estimators", "loops"), help="these alone")
    parser.add_argument("--anchors", type=Path, help="file of the anchors: kept between runs")
    parser.add_argument("--update", type=Path, help="document whose table is to be exchanged")
    parser.add_argument("--smoke", action="store_true", help="two tables, one seed, epsilon = 1")
    args = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    names = [name for name in TABLES if args.smoke is False or name in ("wives", "incomes")]
    if args.smoke:
        args.epsilons, args.seeds = (1.0,), 1
    args.known, args.samples = Results(args.anchors), list(samples(names))
    for table in args.samples:
        missing = [e for e in args.epsilons if not args.known.get(table.name, f"{e:g}", "DP-GD")]
        if missing:
            made = tuned(table, "DP-GD", missing, 3, 4 if args.smoke else None)
            for epsilon, by_score in made.items():
                args.known.add(table.name, epsilon, "DP-GD", by_score)
    lines = ["| at least equal to the anchor, at epsilon = | rule | "]
    lines[0] += " | ".join(f"{epsilon:g}" for epsilon in args.epsilons)
    lines[0] += " | beside a constant | lost to it |"
    lines.append("|---" * (len(args.epsilons) + 4) + "|")
    print("\n".join(lines), flush=True)
    runs = [(c.name, c.kind, c.aims, *variant) for c in CASES for variant in variants(c)]
    chosen = {"estimators": runs, "loops": loops(), None: [*runs, *loops()]}
    for run in chosen[args.only]:
        for line in measured(*run, args):
            print(line, flush=True)
            lines.append(line)
    if args.update is not None:
        text = args.update.read_text(encoding="utf-8")
        args.update.write_text(replaced(text, "causes", "\n".join(lines)), encoding="utf-8")


def samples(names: Sequence[str]) -> Iterator[Table]:
    """Yields samples of the tables of records that are for development, and installed."""
    for name in names:
        try:
            table = TABLES[name]()
        except FileNotFoundError as error:
            print(f"{name} is left out: {error}")
            continue
        if table.split == "develop" and table.users is None:
            yield few(table)


if __name__ == "__main__":
    main()
