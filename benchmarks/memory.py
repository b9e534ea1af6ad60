"""Peak memory of a step, above data and model, beside plain torch SGD and Opacus.

    python benchmarks/memory.py            # about half a minute
    python benchmarks/memory.py --smoke

torch's profiler reports every allocation and release of torch's CPU allocator, also those inside of kernels; the peak
of their running sum is taken over the making of the optimizer and three steps, in a process of its own for each
variant. So it counts activations, rows, gradients, noise and what a library keeps between steps; not the model, the
batch, the interpreter, or what numpy and the matrix library allocate for themselves. It is exact and repeatable, which
resident memory is not (its peak counts pages that the allocator keeps, and whatever else has run in the process).

`fit` is all of `dp.fit`, its probes of the model included, on draws of all records: if it gathers, its copy of the
batch counts, while the batch of the others is given.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
from collections.abc import Callable, Sequence

import torch
from cases import Case, cases
from timing import digits, table
from torch.profiler import ProfilerActivity, profile
from variants import VARIANTS, Setting, fit

GOAL = 1.35  # times plain, plus one buffer of the size of the parameters
MIB = 2**20
STEPS = 3
os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler reports on its own start otherwise
SIZES, SMALL_SIZES = (
    ("1000/4096", "10000/4096", "MLP", "CNN", "transformer"),
    ("logistic", "transformer"),
)


def peak(run: Callable[[], object]) -> int:
    """Returns the most bytes of torch's CPU allocator that were in use at once, above those in use before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        run()
    events = [e for e in found.profiler.kineto_results.events() if e.name() == "[memory]"]
    in_use = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        in_use += event.nbytes()
        most = max(most, in_use)
    return most


def step_peak(case: Case, variant: str) -> int:
    """Returns the peak of a few steps of a variant, with its optimizer."""
    torch.set_num_threads(1)
    model = case.model()
    if variant == "fit":
        return peak(lambda: fit(case, model, Setting(), STEPS))

    def run() -> None:
        step = VARIANTS[variant](case, model, Setting())
        for _ in range(STEPS):
            step()

    return peak(run)


def in_own_process(case: Case, variant: str) -> int:
    with multiprocessing.get_context("fork").Pool(1, _take, (case, variant)) as pool:
        return pool.apply(_measure)


_job: list[tuple[Case, str]] = []  # of a process that lives for one job


def _take(case: Case, variant: str) -> None:
    _job[:] = [(case, variant)]


def _measure() -> int:
    return step_peak(*_job[0])


def tables(*, smoke: bool) -> dict[str, str]:
    """Returns the table "memory"."""
    sizes = SMALL_SIZES if smoke else SIZES
    chosen = [case for case in cases(smoke=smoke) if any(size in case.name for size in sizes)]
    names = [*VARIANTS, "fit"]
    rows = []
    for case in chosen:
        bytes_of = {name: in_own_process(case, name) for name in names}
        buffer = sum(p.numel() * p.element_size() for p in case.model().parameters())
        own = (bytes_of["loop"] - buffer) / bytes_of["plain"]
        line = [digits(bytes_of[name] / MIB) for name in names]
        batch = sum(t.numel() * t.element_size() for t in case.batch)
        rows.append(
            [
                case.name,
                digits(batch / MIB),
                digits(buffer / MIB),
                *line,
                digits(own),
                f"<= {GOAL}",
            ]
        )
    heads = ["case, MiB", "batch", "parameters", *names, "(loop - parameters) / plain", "goal"]
    return {"memory": table(heads, rows)}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="small models")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    print(tables(smoke=args.smoke)["memory"])


if __name__ == "__main__":
    main()
