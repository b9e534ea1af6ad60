"""Our defaults, untuned, beside DP-GD and DP-SGD tuned on the test set, on 57 real tables; add_remove, delta = 1e-6.

    python benchmarks/accuracy.py                            # all tables, 3 epsilons, 5 seeds: hours on one core
    python benchmarks/accuracy.py --split score --methods DP-GD estimators            # the estimators alone: minutes
    python benchmarks/accuracy.py --split score --methods DP-GD fit --block loops     # loops, prepared and not: an hour
    python benchmarks/accuracy.py --tables adult wages --epsilons 1 --seeds 3 --methods LogisticRegression
    python benchmarks/accuracy.py --json out.json --anchors anchors.json --update docs/choosing.md --block accuracy
    python benchmarks/accuracy.py --smoke                    # few rows, settings and steps: shows that it runs

Ours get what is public, the bounds and units of tables.py, and nothing else: no setting is chosen by a look at a table.
The anchors are tuned on the test scores, which is not private and not charged (see anchors.py), and are computed once
(`--anchors FILE` keeps them). A method of ours is judged by the scores that it is meant for, cell by cell, a cell being
a table at an epsilon: the median of its seeds is better than that of the best anchor, equal (within 0.1 % of a loss, or
0.001 of an AUC), or worse. A cell is "lost to a constant" where its loss is more than 1 % above that of the best
constant of the training rows (base rate, median), which is not private either. A method that refuses to plan such a
run, or does not exist, is "not available".

`--split score` are tables that no number of the library was chosen on, looked at once per change; results on `develop`
tables, which may choose numbers, are shown, and not counted unless asked for.
diffprivlib (its LogisticRegression, delta = 0) runs with `--environment FOLDER`, see benchmarks/linear_models.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from anchors import LARGER, grid_size, methods, tuned
from blocks import replaced
from ours import METHODS, Method, methods_of
from table_parts import Table
from tables import TABLES, not_private, scores, trivial, with_bias

from torch_dpsco import errors

EPSILONS, SEEDS, SMOKE_ROWS = (0.3, 1.0, 3.0), 5, 1_500
EQUAL_LOSS, EQUAL_AUC, LOST = 1e-3, 1e-3, 1e-2
ANCHORS = ("DP-GD", "DP-SGD")
FAMILIES = {"estimators": ("estimator", "user estimator"), "fit": ("fit",)}  # words of --methods
PREPARED = ", prepared"  # ends the name of a method that measures rows; without it, that of the same that does not
REFUSED = (
    TypeError,
    ValueError,
    errors.DpscoError,
)  # of what does not exist, or cannot be planned

GOALS = {
    "estimator": 0.75,
    "fit": 0.65,
    "user": 0.6,
    "user estimator": 0.6,
}  # share of cells that are at least equal
FOR_MAE, MAE_GOAL = (
    ("QuantileRegressor", 'HuberRegressor, threshold="auto"'),
    0.8,
)  # share of cells that are ahead

# -- cells ------------------------------------------------------------------------------------------------------------


class Results:
    """Scores by table, epsilon, method, score: a list of runs; kept in a file that grows with every cell."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.found: dict[str, dict] = (
            json.loads(path.read_text()) if path is not None and path.exists() else {}
        )

    def add(self, table: str, epsilon: str, name: str, value: object) -> None:
        """Keeps what a method did in a cell, and writes the file."""
        self.found.setdefault(table, {}).setdefault(epsilon, {})[name] = value
        if self.path is not None:
            part = self.path.with_suffix(".part")
            part.write_text(json.dumps(self.found, indent=1))
            part.replace(self.path)

    def get(self, table: str, epsilon: str, name: str) -> object:
        """Returns what is known of a cell, or None."""
        return self.found.get(table, {}).get(epsilon, {}).get(name)


def measured(
    method: Method, table: Table, epsilon: float, seeds: int
) -> dict[str, list[float]] | str:
    """Returns the runs of a method by score, or why it is not available."""
    runs = []
    for _ in range(seeds):
        try:
            answers = method.fit(table, epsilon)
        except REFUSED as error:
            return f"not available: {type(error).__name__}: {str(error)[:150]}"
        runs.append(scores(table, np.nan_to_num(answers, nan=0.0, posinf=1e9, neginf=-1e9)))
    return {name: [run[name] for run in runs] for name in runs[0]}


def best_anchor(anchors: Results, table: str, epsilon: str, score: str) -> float | None:
    """Returns the best median of the anchors of a cell."""
    found = anchors.found.get(table, {}).get(epsilon, {})
    medians = [
        statistics.median(by_score[score]["runs"])
        for by_score in found.values()
        if score in by_score
    ]
    return (max if score in LARGER else min)(medians, default=None)


def gain_over(score: str, ours: float, anchor: float) -> float:
    """Returns how much better our median is than that of the best anchor: of an AUC the difference, else its share."""
    return ours - anchor if score in LARGER else (anchor - ours) / anchor


def verdict(score: str, ours: float, anchor: float) -> str:
    """Returns "better", "equal" or "worse": of our median, beside that of the best anchor."""
    gain, margin = gain_over(score, ours, anchor), EQUAL_AUC if score in LARGER else EQUAL_LOSS
    return "equal" if abs(gain) <= margin else "better" if gain > 0 else "worse"


def verdicts(
    ours: Results, anchors: Results, names: Sequence[str]
) -> Iterator[tuple[Method, str, str, str, str]]:
    """Yields method, score, table, epsilon and verdict of all cells that have both."""
    for name in names:
        for epsilon, cell in ours.found.get(name, {}).items():
            for method in METHODS:
                runs = cell.get(method.name)
                for score in method.aims if isinstance(runs, dict) else ():
                    anchor = best_anchor(anchors, name, epsilon, score)
                    if anchor is not None and score in runs:
                        yield (
                            method,
                            score,
                            name,
                            epsilon,
                            verdict(score, statistics.median(runs[score]), anchor),
                        )


def median_of(runs: object, score: str) -> float | None:
    """Returns the median of what is known of a method, if it is available."""
    return statistics.median(runs[score]) if isinstance(runs, dict) else None


# -- what is shown ----------------------------------------------------------------------------------------------------


def count(found: Sequence[str]) -> str:
    """Returns better / equal / worse."""
    return " / ".join(str(found.count(word)) for word in ("better", "equal", "worse"))


def counts_table(
    ours: Results, anchors: Results, names: Sequence[str], epsilons: Sequence[str]
) -> str:
    """Returns a table in Markdown of verdicts: method and score by epsilon."""
    judged = list(verdicts(ours, anchors, names))
    lines = [
        "| better / equal / worse than the best anchor, at epsilon = | "
        + " | ".join([*epsilons, "all", ""])
        + " |"
    ]
    lines.append("|---" * (len(epsilons) + 3) + "|")
    for method in METHODS:
        for score in method.aims:
            mine = [(e, v) for m, s, _, e, v in judged if m is method and s == score]
            if mine:
                cells = [count([v for at, v in mine if at == e]) for e in epsilons] + [
                    count([v for _, v in mine])
                ]
                share = sum(v != "worse" for _, v in mine) / len(mine)
                lines.append(
                    f"| {method.name}: {score.replace('_', '-')} | {' | '.join(cells)} | {share:.0%} |"
                )
    return "\n".join(lines)


def rows_table(
    ours: Results, anchors: Results, names: Sequence[str], epsilons: Sequence[str]
) -> str:
    """Returns a table in Markdown of medians: table, method and score by epsilon, beside what is not private."""
    lines = ["| median (without preparation) / best anchor | constant | not private | "]
    lines[0] += " | ".join(epsilons) + " |"
    lines.append("|---" * (len(epsilons) + 3) + "|")
    for name in names:
        for method in METHODS:
            for score in method.aims if method.family else ():
                cells = [
                    pair(ours, anchors, name, epsilon, method, score) for epsilon in epsilons
                ]
                if any(cells):
                    known = ours.found[name][""]
                    public = [
                        f"{known[what][score]:.4f}" for what in ("constant", "not private")
                    ]
                    shown = " | ".join([*public, *cells])
                    lines.append(
                        f"| {name}, {method.name}: {score.replace('_', '-')} | {shown} |"
                    )
    return "\n".join(lines)


def pair(
    ours: Results, anchors: Results, name: str, epsilon: str, method: Method, score: str
) -> str:
    """Returns our median, that of the same method without preparation, and the best anchor's; "" if not available."""
    mine = median_of(ours.get(name, epsilon, method.name), score)
    if mine is None:
        return ""
    bare = method.name.removesuffix(PREPARED)
    without = None if bare == method.name else median_of(ours.get(name, epsilon, bare), score)
    anchor = best_anchor(anchors, name, epsilon, score)
    beside = "" if without is None else f" ({without:.4f})"
    return f"{mine:.4f}{beside}" + ("" if anchor is None else f" / {anchor:.4f}")


def goals(ours: Results, anchors: Results, names: Sequence[str]) -> Iterator[str]:
    """Yields a line for each goal: the share of cells that are at least equal, and of MAE ahead."""
    judged = list(verdicts(ours, anchors, names))
    for family, goal in GOALS.items():
        mine = [v for m, *_, v in judged if m.family == family]
        if mine:
            yield f"{family}: at least equal in {sum(v != 'worse' for v in mine) / len(mine):.0%}; goal {goal:.0%}"
    for family, where in lost(ours, names).items():
        yield f"{family}: lost to a constant: {', '.join(where) or 'no cell'}"
    for name in FOR_MAE:
        mine = [v for m, score, *_, v in judged if score == "mae" and m.name == name]
        if mine:
            shares = [
                sum(v in words for v in mine) / len(mine)
                for words in (("better",), ("better", "equal"))
            ]
            yield f"MAE of {name}: ahead in {shares[0]:.0%}, at least equal in {shares[1]:.0%}; goal {MAE_GOAL:.0%}"


def lost(ours: Results, names: Sequence[str]) -> dict[str, list[str]]:
    """Returns the cells of each family whose loss is more than 1 % above that of a constant."""
    found: dict[str, list[str]] = {}
    for name in names:
        constant = ours.found.get(name, {}).get("", {}).get("constant", {})
        for epsilon, cell in ours.found.get(name, {}).items():
            for method in METHODS:
                runs = cell.get(method.name)
                for score in method.aims if isinstance(runs, dict) and method.family else ():
                    found.setdefault(method.family, [])
                    none = constant.get(score)
                    worse = none and statistics.median(runs[score]) > (1 + LOST) * none
                    if worse and score not in LARGER:
                        found[method.family].append(f"{name} at {epsilon}, {score}")
    return found


def shown_cell(
    table: Table,
    epsilon: str,
    ours: Results,
    anchors: Results,
    public: dict[str, float],
    constant: dict[str, float],
) -> Iterator[str]:
    """Yields lines of a cell: medians, with the lowest and highest run, of anchors, ours, and what is not private."""
    yield f"\n{table.name} [{table.split}], epsilon = {epsilon}"
    for score in constant:
        anchor = best_anchor(anchors, table.name, epsilon, score)
        for name, by_score in anchors.found.get(table.name, {}).get(epsilon, {}).items():
            yield line(score, f"{name}, tuned on the test set", by_score[score]["runs"], "")
        for name, runs in ours.found.get(table.name, {}).get(epsilon, {}).items():
            if isinstance(runs, dict):
                pair = (score, statistics.median(runs[score]), anchor)
                word = "" if anchor is None else f"{verdict(*pair)} ({gain_over(*pair):+.2%})"
                yield line(score, name, runs[score], word)
        yield f"  {score:<9}{'not private':<40}{public[score]:>9.4f}     constant {constant[score]:.4f}"
    for name, runs in ours.found.get(table.name, {}).get(epsilon, {}).items():
        if isinstance(runs, str):
            yield f"  {name}: {runs}"


def line(score: str, name: str, runs: Sequence[float], word: str) -> str:
    """Returns the median of runs and their range."""
    return f"  {score:<9}{name:<40}{statistics.median(runs):>9.4f}  ({min(runs):.4f} to {max(runs):.4f})  {word}"


# -- the command ------------------------------------------------------------------------------------------------------


def few(table: Table) -> Table:
    """Returns the first rows of a table only."""
    kept = np.arange(len(table.rows)) % max(1, len(table.rows) // SMOKE_ROWS) == 0
    users = None if table.users is None else np.unique(table.users[kept], return_inverse=True)[1]
    parts = {
        "rows": table.rows[kept],
        "targets": table.targets[kept],
        "test": table.test[kept],
        "users": users,
    }
    return dataclasses.replace(table, **parts)


def compare(table: Table, args: argparse.Namespace, ours: Results, anchors: Results) -> None:
    """Fills in what is not known of a table, and prints it."""
    epsilons = [f"{epsilon:g}" for epsilon in args.epsilons]
    public, constant = not_private(table), trivial(table)
    ours.add(table.name, "", "constant", constant)
    ours.add(table.name, "", "not private", public)
    for name in methods(table):
        missing = [e for e in args.epsilons if anchors.get(table.name, f"{e:g}", name) is None]
        if missing and name in args.methods:
            for epsilon, by_score in tuned(
                table, name, missing, args.seeds, 4 if args.smoke else None
            ).items():
                anchors.add(table.name, epsilon, name, by_score)
    for epsilon in epsilons:
        for method in methods_of(table):
            known = isinstance(
                ours.get(table.name, epsilon, method.name), dict
            )  # what was not available is tried again
            if method.name in args.methods and not known:
                ours.add(
                    table.name,
                    epsilon,
                    method.name,
                    measured(method, table, float(epsilon), args.seeds),
                )
        fits = args.peer is not None and table.users is None and table.kind == "binary"
        if fits and ours.get(table.name, epsilon, PEER) is None:
            ours.add(
                table.name, epsilon, PEER, by_peer(args.peer, table, float(epsilon), args.seeds)
            )
        print("\n".join(shown_cell(table, epsilon, ours, anchors, public, constant)), flush=True)


PEER = "diffprivlib, delta 0"


def by_peer(python: Path, table: Table, epsilon: float, seeds: int) -> dict[str, list[float]]:
    """Returns the runs of diffprivlib's logistic regression, as benchmarks/linear_models.py runs it."""
    from linear_models import Task, by_diffprivlib

    train, test = with_bias(table.rows[~table.test]), with_bias(table.rows[table.test])
    bound = math.hypot(table.bound_x, 1.0)
    task = Task(
        table.name, train, table.targets[~table.test], test, table.targets[table.test], bound
    )
    runs = [
        scores(table, test @ weights)
        for weights in by_diffprivlib(python, [(task, epsilon)] * seeds)
    ]
    return {name: [run[name] for run in runs] for name in runs[0]}


def main(argv: Sequence[str] | None = None) -> None:
    """Measures what the options ask for, and prints it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tables", nargs="+", choices=TABLES, metavar="NAME", default=list(TABLES)
    )
    parser.add_argument(
        "--split", choices=("develop", "score"), help="tables of this group only"
    )
    parser.add_argument("--epsilons", nargs="+", type=float, default=EPSILONS)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    known = [*ANCHORS, *FAMILIES, *(method.name for method in METHODS)]
    parser.add_argument("--methods", nargs="+", choices=known, default=known, metavar="NAME")
    parser.add_argument(
        "--json", type=Path, help="file of raw results of ours: what is in it is not run again"
    )
    parser.add_argument("--anchors", type=Path, help="the same of the anchors")
    parser.add_argument(
        "--environment",
        type=Path,
        help="folder of an environment with diffprivlib; default: without",
    )
    parser.add_argument(
        "--update", type=Path, help="document whose tables are to be exchanged for these"
    )
    parser.add_argument(
        "--block",
        default="accuracy",
        help="name of the counts there; NAME_rows is that of medians",
    )
    parser.add_argument(
        "--smoke", action="store_true", help="few rows and settings, one seed, epsilon = 1"
    )
    args = parser.parse_args(argv)
    for word, families in FAMILIES.items():
        if word in args.methods:
            mine = [method.name for method in METHODS if method.family in families]
            args.methods += [*mine, *(name.removesuffix(PREPARED) for name in mine)]
    if args.smoke:
        args.tables, args.epsilons, args.seeds = (
            ["adult", "flights_delay", "aircraft"],
            (1.0,),
            1,
        )
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    args.peer = None
    if args.environment is not None:
        from linear_models import peer_python

        args.peer, reason = peer_python(args.environment)
        print(reason or "with diffprivlib")
    report(args)


def report(args: argparse.Namespace) -> None:
    """Runs all tables, prints counts and goals, and updates the document."""
    ours, anchors, names, searched = Results(args.json), Results(args.anchors), [], []
    for name in args.tables:
        try:
            table = TABLES[name]()
        except FileNotFoundError as error:
            print(f"{name} is left out: {error}")
            continue
        asked = any(method.name in args.methods for method in methods_of(table))
        if asked and args.split in (None, table.split):
            compare(few(table) if args.smoke else table, args, ours, anchors)
            searched.append(grid_size(table))
            names += [name] if args.smoke or table.split == (args.split or "score") else []
    epsilons = [f"{epsilon:g}" for epsilon in args.epsilons]
    counts = counts_table(ours, anchors, names, epsilons)
    medians = rows_table(ours, anchors, names, epsilons)
    cost = f"{min(searched, default=0)} to {max(searched, default=0)} runs to tune the anchors of a cell"
    print(f"\ncounted: {', '.join(names)}; {cost}\n\n{counts}\n\n{medians}\n")
    print("\n".join(goals(ours, anchors, names)))
    if args.update is not None:
        text = args.update.read_text(encoding="utf-8")
        text = replaced(text, args.block, counts)
        if f"<!-- table: {args.block}_rows -->" in text:
            text = replaced(text, f"{args.block}_rows", medians)
        args.update.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
