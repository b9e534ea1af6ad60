"""What a user pays: steps and whole runs at default settings, as multiples of plain torch SGD in the same process.

    python benchmarks/default_time.py                                 # about six minutes
    python benchmarks/default_time.py --cases "CNN" --rounds 5
    python benchmarks/default_time.py --smoke                         # seconds

The ways to train are in `defaults.py`, models and data sets in `cases.py`. A step draws a batch, gathers it, and
trains on it; a run makes model, optimizer and loader, and an epoch of steps, 20 at least. "start" is the CPU time of a
run up to the end of its first step; imports are not in it. All ways take turns in random order in every round
(`timing.py`). What Opacus refuses is "-".
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from cases import Case, everyday
from defaults import UNFILLED, WAYS, Way, ours, steps_of_fit
from timing import (
    Clock,
    Figure,
    Slot,
    cell,
    digits,
    figures,
    in_process,
    interleaved,
    machine,
    table,
)
from torch.utils.data import TensorDataset
from variants import Setting

Found = Mapping[str, tuple[Figure, float]]  # per way: ratio to plain, milliseconds

LEAST_STEPS, RUN_ROUNDS = 20, 3
LONGEST = 2000  # steps that are planned where turns take some of them
GOALS = {  # of "ours", of a step
    "GPT-2": 1.3,
    "transformer": 1.35,
    "CNN": 1.5,
    "MLP 784-512-256-10": 1.3,
    "MLP 40-64-64-10": 2.5,
    "SiLU": 1.5,
    "logistic 100/256": 2.0,
}
FIT_GOALS = {
    "logistic 100/256": 0.7,
    "logistic 1000/256": 0.7,
    "logistic 100/4096": 0.8,
    "logistic 1000/4096": 0.65,
    "logistic 10000": 0.7,
}


def goal(goals: Mapping[str, float], case: Case) -> str:
    """Returns the goal of a case, or nothing."""
    found = [value for name, value in goals.items() if case.name.startswith(name)]
    return f"<= {found[0]}" if found else ""


def step_slot(case: Case, data: TensorDataset, name: str, way: Way) -> Slot:
    """Returns turns of the steps of a way, which has made its first one."""
    setting, clock = Setting(), Clock(case.device)
    if name == "fit":

        def run(repeats: int) -> float:
            ends = steps_of_fit(case, case.model(), data, setting, 1 + repeats, clock)
            return (ends[-1] - ends[0]) / repeats

        return Slot(run, seconds=0.1, most=LONGEST)
    steps = way.start(case, case.model(), data, setting, LONGEST)
    next(steps)
    return in_process(lambda: next(steps), clock)


def run_slot(
    case: Case, data: TensorDataset, starts: dict[str, list[float]], name: str, way: Way
) -> Slot:
    """Returns turns of whole runs, which note how long they take to the end of the first step."""
    clock, count = Clock(), max(LEAST_STEPS, len(data) // case.size)
    next(way.start(case, case.model(), data, Setting(), 2))  # imports what a first step imports

    def run(_: int) -> float:
        begin = clock()
        steps = way.start(case, case.model(), data, Setting(), count)
        next(steps)
        starts[name].append(clock() - begin)
        for _ in steps:
            pass
        return clock() - begin

    return Slot(run, most=1)


def measured(
    ways: Mapping[str, Way], case: Case, slot: Callable[[str, Way], Slot], rounds: int
) -> Found:
    """Returns the figures of the ways that suit a case; where Opacus refuses it, it is left out."""
    slots = {}
    for name, way in ways.items():
        try:
            if way.suits(case):
                slots[name] = slot(name, way)
        except Exception as error:
            if not name.startswith("Opacus"):
                raise
            print(f"{name} refuses {case.name}: {error}", file=sys.stderr)
    return figures(interleaved(slots, rounds), "plain")


def row(case: Case, found: Found, names: Sequence[str], unit: float = 1.0) -> list[str]:
    """Returns the name of a case, the milliseconds of plain over a unit, and ratios."""
    ratios = [cell(found[name][0]) if name in found else "-" for name in names]
    return [case.name, digits(found["plain"][1] / unit), *ratios]


def tables(
    *, smoke: bool, rounds: int, only: str = "", kinds: Sequence[str] = ("steps", "runs")
) -> dict[str, str]:
    """Returns the tables "step", "step-unfilled" and "runs"."""
    steps, unfilled, runs = list[list[str]](), list[list[str]](), list[list[str]]()
    names = [name for name in WAYS if name not in ("plain", "DataLoader")]
    own = {**{name: WAYS[name] for name in ("plain", *names)}, "unfilled": ours(UNFILLED)}
    for case in (case for case in everyday(smoke=smoke) if only in case.name):
        print(f"measuring {case.name}", file=sys.stderr)
        data = TensorDataset(*case.data)
        if "steps" in kinds:
            found = measured(own, case, partial(step_slot, case, data), rounds)
            steps.append([*row(case, found, names), goal(GOALS, case), goal(FIT_GOALS, case)])
            unfilled.append(row(case, found, ["ours, sum", "unfilled"]))
        if "runs" in kinds:
            starts: dict[str, list[float]] = {name: [] for name in WAYS}
            few = min(rounds, RUN_ROUNDS)
            found = measured(WAYS, case, partial(run_slot, case, data, starts), few)
            begun = [f"{1e3 * min(starts[name]):.0f}" for name in ("plain", "ours, mean")]
            runs.append([*row(case, found, ["DataLoader", *names], 1e3), *begun])
    heads = ["case", "plain, ms", *names, "goal of ours", "goal of fit"]
    run_heads = ["case", "plain, s", "DataLoader", *names]
    return {
        "step": table(heads, steps),
        "step-unfilled": table(
            ["case", "plain, ms", "ours, sum", "isolation='none', sum"], unfilled
        ),
        "runs": table([*run_heads, "start of plain, ms", "start of ours, ms"], runs),
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7, help="of steps; runs have at most 3")
    parser.add_argument("--cases", default="", help="those whose name contains this")
    parser.add_argument("--kind", choices=["steps", "runs"], action="append")
    parser.add_argument("--smoke", action="store_true", help="small models")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print(machine(args.rounds))
    found = tables(
        smoke=args.smoke,
        rounds=args.rounds,
        only=args.cases,
        kinds=args.kind or ("steps", "runs"),
    )
    for name, text in found.items():
        print(f"\n{name}\n\n{text}")


if __name__ == "__main__":
    main()
