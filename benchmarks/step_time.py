"""Time of one private step on a batch in memory, as a multiple of plain torch SGD, beside Opacus and other peers.

Nothing is drawn, gathered or filled up here: what a run costs at default settings is measured by `default_time.py`.

    python benchmarks/step_time.py                                    # about five minutes
    python benchmarks/step_time.py --rounds 5 --cases "logistic 1000/256"
    python benchmarks/step_time.py --more                             # LoRA, embeddings, softmax heads, larger batches
    python benchmarks/step_time.py --threads 2                        # times on the wall
    python benchmarks/step_time.py --fresh 5 --cases CNN              # loop and compiled, in 5 processes
    python benchmarks/step_time.py --smoke                            # seconds

What a step is, and what the variants are: `variants.py`; models: `cases.py`; how turns are taken: `timing.py`; what
runs in environments of their own: `peers.py`. That all do the same work is checked by `equality.py`.

`fit` is the time of a step of `dp.fit` on draws of all records (batch = data set, so that neither side gathers): from
the end of the first step to the end of the last one, of as many as fill 0.1 s, so that setup is left out. "compiled" is
a step as `fit(..., compile=True)` makes it; it is compiled before it is timed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from cases import Case, cases, more
from peers import PEERS, Peer, add_options, started
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
from variants import CAN_COMPILE, VARIANTS, Setting, compiled_step, fit_slot

Found = Mapping[str, tuple[Figure, float]]  # per variant: ratio, milliseconds

NOT_INSTALLED = "not installed"
FIT_GOALS = {  # with the accelerator
    "logistic 100/256": 0.45,
    "logistic 100/4096": 0.65,
    "logistic 1000/256": 0.45,
    "logistic 1000/4096": 0.65,
    "logistic 10000/256": 0.8,
    "logistic 10000/4096": 0.85,
    "CNN": 1.0,  # compiled, and the next
    "transformer": 1.2,
}
OPACUS = ("hooks", "functorch", "ew", "ghost")


class Measured(NamedTuple):
    """Figures of one case."""

    case: Case
    found: Found


def goal(goals: Mapping[str, float], case: Case) -> str:
    """Returns the goal of a case, or nothing."""
    found = goals.get(case.name, goals.get(case.name.split()[0]))
    return "" if found is None else f"<= {found}"


def slots(
    case: Case, peers: Sequence[Peer], *, smoke: bool, device: str = "cpu"
) -> dict[str, Slot]:
    """Returns the turns of all variants of a case."""
    setting, clock = Setting(), Clock(device, wall=torch.get_num_threads() > 1)
    case = replace(
        case, batch=(case.batch[0].to(device), case.batch[1].to(device)), device=device
    )
    builds = {name: build for name, build in VARIANTS.items() if name in (case.only or VARIANTS)}
    found = {
        name: in_process(build(case, case.model(), setting), clock)
        for name, build in builds.items()
    }
    seconds = 0.002 if smoke else 0.1
    if case.is_linear:
        found["fit"] = fit_slot(case, setting, clock, seconds=seconds)
    elif device == "cpu" and CAN_COMPILE and goal(FIT_GOALS, case):
        backend = None if smoke else "inductor"
        found["compiled"] = in_process(
            compiled_step(case, case.model(), setting, backend=backend)
        )
    for peer in peers if not case.only else ():
        found |= {name: peer.slot(case, name, setting) for name in peer.variants}
    return found


def measure(
    chosen: Sequence[Case],
    rounds: int,
    peers: Sequence[Peer],
    *,
    smoke: bool,
    device: str = "cpu",
) -> list[Measured]:
    """Returns the figures of all variants of the cases."""
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    measured = []
    for case in chosen:
        print(f"measuring {case.name}", file=sys.stderr)
        found = interleaved(slots(case, peers, smoke=smoke, device=device), rounds)
        measured.append(Measured(case, figures(found, "plain")))
    return measured


def own_table(measured: Sequence[Measured]) -> str:
    """Returns our variants beside their goals."""
    heads = [
        "case d/b",
        "plain",
        *("loop", "ratio"),
        *("`fit`, compiled", "ratio", "goal"),
        "dense rows, ratio",
    ]
    rows = []
    for case, found in measured:
        line: list[str] = [case.name, f"{digits(found['plain'][1])} ms"]
        for name in ("loop", "fit" if case.is_linear else "compiled"):
            ratio, milliseconds = found.get(name, (None, 0.0))
            line += ["-", "-"] if ratio is None else [f"{digits(milliseconds)} ms", cell(ratio)]
        line.append(goal(FIT_GOALS, case))
        rows.append([*line, cell(found["dense"][0]) if "dense" in found else "-"])
    return table(heads, rows)


def peer_table(measured: Sequence[Measured]) -> str:
    """Returns the variants of other libraries; jax* is not private."""
    others = [*OPACUS, *(name for names in PEERS.values() for name in names)]
    heads = [
        "case d/b",
        "loop",
        "`fit`, compiled",
        *(f"Opacus {name}" if name in OPACUS else name for name in others),
    ]
    rows = []
    for case, found in measured:
        own = found.get("fit", found.get("compiled"))
        line = [
            case.name,
            digits(found["loop"][0].median),
            "-" if own is None else digits(own[0].median),
        ]
        rows.append(
            [
                *line,
                *(cell(found[name][0]) if name in found else NOT_INSTALLED for name in others),
            ]
        )
    return table(heads, rows)


def tables(
    *,
    smoke: bool,
    rounds: int,
    peers: Sequence[Peer] = (),
    only: str = "",
    device: str = "cpu",
    further: bool = False,
) -> dict[str, str]:
    """Returns the tables "step-modes" and "step-peers"."""
    chosen = [case for case in (more if further else cases)(smoke=smoke) if only in case.name]
    measured = measure(chosen, rounds, peers, smoke=smoke, device=device)
    return {"step-modes": own_table(measured), "step-peers": peer_table(measured)}


def fresh(times: int, only: str, rounds: int) -> str:
    """Returns loop and compiled step of cases in processes of their own, in which everything is compiled anew."""
    command = [sys.executable, __file__, "--cases", only, "--rounds", str(rounds)]
    lines: list[str] = []
    for _ in range(times):
        printed = subprocess.run(
            command, capture_output=True, text=True, check=True
        ).stdout.split("\n\n")
        lines += printed[2].splitlines()[0 if not lines else 2 :]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument(
        "--cases", default="", help="run only the cases whose name contains this"
    )
    parser.add_argument("--smoke", action="store_true", help="small models")
    parser.add_argument("--more", action="store_true", help="the further cases")
    parser.add_argument(
        "--threads", type=int, default=1, help="of torch; the accelerator has one"
    )
    parser.add_argument(
        "--fresh", type=int, default=0, help="in so many processes, one after the other"
    )
    parser.add_argument(
        "--device", default="cpu", help="cuda: times on the wall; nothing is compiled"
    )
    add_options(parser)
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    if args.fresh:
        print(machine(args.rounds), fresh(args.fresh, args.cases, args.rounds), sep="\n\n")
        return
    torch.backends.cudnn.allow_tf32 = False  # or mean losses are refused
    with started(args) as peers:
        print(machine(args.rounds) if args.device == "cpu" else torch.cuda.get_device_name())
        found = tables(
            smoke=args.smoke,
            rounds=args.rounds,
            peers=peers,
            only=args.cases,
            device=args.device,
            further=args.more,
        )
        for name, text in found.items():
            print(f"\n{name}\n\n{text}")


if __name__ == "__main__":
    main()
