"""Everything that is known only on a GPU, in at most five minutes: tests, steps, memory and noise beside their goals.

    python benchmarks/gpu.py                     # needs CUDA; prints each table when it is done
    python benchmarks/gpu.py --minutes 3 --cases MLP
    python benchmarks/gpu.py --cpu               # tiny, on the CPU: shows that it runs, measures nothing

* tests: those of CUDA, and of the kernels (`tests/test_cuda.py`, `tests/fast/test_*on_device.py`)
* noise: N(0, 1) added to float32 numbers on the device, by torch's generator (no privacy), from the host, by the kernel
* steps: the ways of `defaults.py`, as multiples of plain torch in the same round; records are on the device. Opacus is
  given Poisson batches that are gathered there, since its own loader fetches record by record
* waits: how often a step of ours waits for the device, by `torch.cuda.set_sync_debug_mode`
* graphs: a plain step on one batch, as it is and captured in a CUDA graph, which saves its launches. It decides whether
  to capture steps of ours: they have more launches, but draws, ledger, and noise, whose key must be fresh, stay outside
* memory: the most that was allocated in three steps, above data and model
* isolation: of how many records an output, a factor of the row, or its norm has other bits in the same batch again, at
  other places among the same records, among others, and in batches of other sizes; with torch's algorithms as they are,
  and deterministic ones. Batches in slots rest on the first three, batches of several sizes on the last as well; what
  the test of "rounded" says, which refuses devices, stands beside them

Each table ends where its share of the time does. What fails is named, and the rest goes on.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from cases import Case, everyday
from default_time import step_slot
from defaults import WAYS, Way, opacus, reduced, trained
from memory import MIB, peak
from timing import Clock, Figure, Slot, cell, digits, figures, in_process, interleaved, table
from torch import nn
from torch.utils.data import TensorDataset
from variants import Setting, plain_step

import torch_dpsco as dp
from torch_dpsco import native
from torch_dpsco.fast import on_device, rows_on_device
from torch_dpsco.noise import Keystream, Repeatable, add_normal_
from torch_dpsco.rows.first_step import random_parameters, rows_of_a_pass
from torch_dpsco.trial import Leaf
from torch_dpsco.trial.sizes import Trial

T = TypeVar("T")
ROOT = Path(__file__).parents[1]
TESTS = (
    "tests/test_cuda.py",
    "tests/fast/test_on_device.py",
    "tests/fast/test_rows_on_device.py",
    "tests/fast/test_factors_on_device.py",
)
NAMES = ("plain", "ours, mean", "ours, sum", "make_private", "fit", "Opacus", "Opacus ghost")
GOALS = {"MLP": 1.6, "CNN": 1.7, "transformer": 1.6, "GPT-2": 1.25, "logistic": 2.5}
FIT_GOAL, MEMORY_GOAL = 1.0, 1.2  # of plain; of Opacus ghost
SHARES = {
    "tests": 0.3,
    "isolation": 0.08,
    "noise": 0.07,
    "steps": 0.35,
    "graphs": 0.05,
    "memory": 0.15,
}  # of the time
SIZES = (10_000, 535_818, 10_000_000, 100_000_000)
STEPS = 3  # of which waits are counted, and memory


class Time:
    """The time that is left for a part of the run."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds, at least 0."""
        return max(0.0, self.end - time.monotonic())


def tried(what: str, make: Callable[[], T]) -> T | None:
    """Returns what is made; where that fails, prints why and returns None, so that a short lease gives the rest."""
    try:
        return make()
    except Exception as error:
        print(f"{what} failed: {type(error).__name__}: {str(error).splitlines()[0][:200]}")
        return None


def ended(what: str) -> None:
    print(f"{what} was left out: its share of the time is over")


# -- tests ------------------------------------------------------------------------------------------------------------


def run_tests(limit: Time) -> str:
    """Returns the last lines of the tests of CUDA."""
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "--tb=short", *TESTS]
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=limit.left, check=False
        )
    except subprocess.TimeoutExpired as error:
        said = error.stdout or b""
        return f"not over after {error.timeout:.0f} s:\n" + said.decode()[-2000:]
    return "\n".join((done.stdout + done.stderr).splitlines()[-40:])


# -- isolation --------------------------------------------------------------------------------------------------------


def seen_of(
    case: Case, model: nn.Module, batch: Sequence[torch.Tensor]
) -> Sequence[torch.Tensor]:
    """Returns all that a pass makes for each record of a batch: outputs, factors of rows, norms."""
    inputs, targets = batch
    out = model(inputs)
    found = rows_of_a_pass(trained(model), [out], reduced(case, "sum")(out, targets))
    return [t.detach().clone() for t in found if len(t) == len(out)]


def tested(case: Case, model: nn.Module, data: Sequence[torch.Tensor]) -> str:
    """Returns what the test of "rounded", which loops on the CPU make after their first step, finds on the device."""
    leaves = [Leaf((1, *t.shape[1:]), t.dtype, t.device, 0) for t in data]
    trial = Trial(partial(seen_of, case, model), leaves, case.size, 2 * case.size)
    with random_parameters(model):
        found = trial._found()  # past the refusal of devices
    return found if isinstance(found, str) else f"equal in {len(found.sizes)} sizes"


def isolation_row(case: Case, deterministic: bool) -> list[str]:
    """Returns how many records have other bits than in their first batch, and what the library's own test says."""
    size = case.size
    data = on(case).tensors
    model = dp.attach(case.model(), loss_reduction="sum")
    grid = max(4, min(32, size // 2))
    place = torch.arange(size, device=data[0].device)
    orders = {
        "again": [place],
        "places": [place.flip(0), place.roll(1), place.roll(size // 3 | 1)],
        "others": [torch.cat([place[: size // 2], place[size // 2 :] + size])],
        "sizes": [torch.arange(size + k * grid, device=place.device) for k in range(1, 4)],
    }
    found = [case.name, "deterministic" if deterministic else "as they are", str(size)]
    torch.use_deterministic_algorithms(deterministic)
    try:
        first = seen_of(case, model, [part[:size] for part in data])
        for several in orders.values():
            differ = 0
            for order in several:
                seen = seen_of(case, model, [part[order] for part in data])
                known = order < size
                other = [
                    (now[known] != then[order[known]]).reshape(int(known.sum()), -1).any(1)
                    for now, then in zip(seen, first, strict=True)
                ]
                differ = max(differ, int(torch.stack(other).any(0).sum()))
            found.append(str(differ))
        found.append(tested(case, model, data))
    finally:
        torch.use_deterministic_algorithms(False)
    return found


def isolation_table(chosen: Sequence[Case], limit: Time) -> str:
    """Returns what depends on the place of a record, on others, and on the size of the batch."""
    rows = []
    for case in chosen:
        if not limit.left:
            ended(f"isolation of {case.name}")
            continue
        for deterministic in (False, True):
            row = tried(f"isolation of {case.name}", partial(isolation_row, case, deterministic))
            rows += [] if row is None else [row]
    heads = [
        "case",
        "algorithms",
        "records",
        "again",
        "other places",
        "other records",
        "other sizes",
    ]
    return table(heads, rows)


# -- noise ------------------------------------------------------------------------------------------------------------


def noise_row(device: torch.device, size: int) -> list[str]:
    """Returns the row of so many numbers."""
    out = torch.zeros(size, device=device)
    host = Repeatable(torch.Generator().manual_seed(0))  # which no device draws
    draws: dict[str, Callable[[], object]] = {
        "torch": lambda: out.add_(torch.randn_like(out)),
        "host": lambda: add_normal_(out, 1.0, host),
    }
    if on_device.status(device) == on_device.IN_USE:
        draws["kernel"] = lambda: on_device.add_normal_([out], 1.0, Keystream())
    clock = Clock(device.type)
    slots = {name: in_process(draw, clock) for name, draw in draws.items()}
    found = figures(interleaved(slots, 3), "torch")
    times = [
        digits(found[name][1]) if name in found else "-" for name in ("torch", "host", "kernel")
    ]
    return [f"{size:,}", *times]


def noise_table(device: torch.device, sizes: Sequence[int], limit: Time) -> str:
    """Returns milliseconds of adding noise to so many numbers."""
    rows = []
    for size in sizes:
        if not limit.left:
            ended(f"noise for {size:,} numbers")
            continue
        row = tried(f"noise for {size:,} numbers", partial(noise_row, device, size))
        rows += [] if row is None else [row]
    return table(["numbers", "torch, ms", "from the host, ms", "kernel, ms"], rows)


# -- steps ------------------------------------------------------------------------------------------------------------


def gathered(data: TensorDataset, size: int, steps: int) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yields Poisson batches, gathered where the records are."""
    rate = size / len(data)
    device = data.tensors[0].device
    for _ in range(steps):
        index = (torch.rand(len(data), device=device) < rate).nonzero()[:, 0]
        yield tuple(part.index_select(0, index) for part in data.tensors)


def ways() -> dict[str, Way]:
    """Returns the ways to train that are compared."""
    own = {name: WAYS[name] for name in NAMES if name in WAYS}
    for name, mode in ("Opacus", "hooks"), ("Opacus ghost", "ghost"):
        own[name] = opacus(mode, gathered)
    return own


def waits(case: Case, data: TensorDataset, way: Way) -> str:
    """Returns how often a step waits for the device."""
    if case.device == "cpu":
        return "-"
    made = way.start(case, case.model(), data, Setting(), STEPS + 2)
    next(made)  # what is done once
    next(made)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for _ in range(STEPS):
                next(made)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return digits(sum("synchroniz" in str(one.message) for one in said) / STEPS)


def goal(case: Case) -> str:
    """Returns what a step of ours is to take, of plain."""
    return next((f"<= {most}" for name, most in GOALS.items() if case.name.startswith(name)), "")


Found = Mapping[str, tuple[Figure, float]]


def step_row(case: Case, rounds: int) -> list[str]:
    """Returns the row of a case."""
    data = on(case)
    slots: dict[str, Slot] = {}
    for name, way in ways().items():
        if way.suits(case):
            made = tried(f"{name} on {case.name}", partial(step_slot, case, data, name, way))
            slots |= {} if made is None else {name: made}
    found: Found = figures(interleaved(slots, rounds), "plain")
    waited = tried(f"waits on {case.name}", partial(waits, case, data, WAYS["ours, mean"]))
    ratios = [cell(found[name][0]) if name in found else "-" for name in NAMES[1:]]
    fit_goal = f"<= {FIT_GOAL}" if "fit" in found else ""
    plain = digits(found["plain"][1])
    return [case.name, plain, *ratios, goal(case), fit_goal, waited or "-"]


def step_table(chosen: Sequence[Case], rounds: int, limit: Time) -> str:
    """Returns steps at default settings."""
    rows = []
    for case in chosen:
        if not limit.left:
            ended(f"steps of {case.name}")
            continue
        row = tried(f"steps of {case.name}", partial(step_row, case, rounds))
        rows += [] if row is None else [row]
    heads = ["case", "plain, ms", *NAMES[1:], "goal of ours", "goal of fit", "waits a step"]
    return table(heads, rows)


def captured(step: Callable[[], object]) -> Callable[[], object]:
    """Returns a step that replays what a CUDA graph has captured of one."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # memory, and what is chosen in the first calls
        for _ in range(STEPS):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def graph_row(case: Case, rounds: int) -> list[str]:
    """Returns milliseconds of a plain step, and its share when it is captured."""
    step = plain_step(placed(case), case.model(), Setting())
    clock = Clock(case.device)
    slots = {"plain": in_process(step, clock)}
    if case.device != "cpu":
        slots["captured"] = in_process(captured(step), clock)
    found = figures(interleaved(slots, rounds), "plain")
    share = cell(found["captured"][0]) if "captured" in found else "-"
    return [case.name, digits(found["plain"][1]), share]


def graph_table(chosen: Sequence[Case], rounds: int, limit: Time) -> str:
    """Returns what a CUDA graph saves of plain steps."""
    rows = []
    for case in chosen:
        if not limit.left:
            ended(f"graphs of {case.name}")
            continue
        row = tried(f"graphs of {case.name}", partial(graph_row, case, rounds))
        rows += [] if row is None else [row]
    return table(["case", "plain, ms", "captured in a graph"], rows)


def placed(case: Case) -> Case:
    """Returns a case whose batch is on its device."""
    x, y = (part.to(case.device) for part in case.batch)
    return replace(case, batch=(x, y))


def on(case: Case) -> TensorDataset:
    """Returns the records of a case, on its device."""
    return TensorDataset(*(part.to(case.device) for part in case.data))


# -- memory -----------------------------------------------------------------------------------------------------------


def bytes_of(case: Case, data: TensorDataset, way: Way) -> int:
    """Returns the most bytes that three steps take, above data and model."""
    model = case.model()

    def run() -> None:
        for _ in way.start(case, model, data, Setting(), STEPS):
            pass

    if case.device == "cpu":
        return peak(run)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    return int(torch.cuda.max_memory_allocated()) - before


def memory_table(chosen: Sequence[Case], limit: Time) -> str:
    """Returns memory at default settings."""
    rows = []
    for case in chosen:
        if not limit.left:
            ended(f"memory of {case.name}")
            continue
        data = on(case)
        found = {}
        for name, way in ways().items():
            if way.suits(case):
                found[name] = tried(
                    f"memory of {name} on {case.name}", partial(bytes_of, case, data, way)
                )
        cells = [digits(found[name] / MIB) if found.get(name) else "-" for name in NAMES]
        own, ghost = found.get("ours, mean"), found.get("Opacus ghost")
        ratio = digits(own / ghost) if own and ghost else "-"
        rows.append([case.name, *cells, ratio, f"<= {MEMORY_GOAL}"])
    return table(["case, MiB", *NAMES, "ours / ghost", "goal"], rows)


def facts(device: torch.device) -> str:
    """Returns what a reader must know of the machine."""
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU, interpreted kernels"
    sums = "in use" if rows_on_device.usable(device) else "not used"
    return (
        f"{name}; torch {torch.__version__}; noise on the device: {on_device.status(device)}; norms and sums: {sums};"
        f" accelerator of the CPU {native.status()}"
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=5.0, help="of the whole run")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cases", default="", help="those whose name contains this")
    parser.add_argument("--cpu", "--smoke", action="store_true", help="tiny, on the CPU")
    parser.add_argument("--no-tests", action="store_true", help="tables only")
    args = parser.parse_args(argv)
    if not (args.cpu or torch.cuda.is_available()):
        sys.exit("no CUDA device: nothing was run (--cpu shows that the script runs)")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic products
    if args.cpu:  # before triton is imported
        os.environ["TRITON_INTERPRET"] = "1"
    warnings.simplefilter("ignore")
    torch.backends.cudnn.allow_tf32 = False  # or mean losses are refused
    device = torch.device("cpu" if args.cpu else "cuda", None if args.cpu else 0)
    chosen = [
        replace(c, device=device.type) for c in everyday(smoke=args.cpu) if args.cases in c.name
    ]
    share = {name: Time(0.0) for name in SHARES}
    print(facts(device), flush=True)
    parts: dict[str, Callable[[Time], str]] = {
        "tests": run_tests,
        "isolation": lambda limit: isolation_table(chosen, limit),
        "noise": lambda limit: noise_table(device, (10, 100) if args.cpu else SIZES, limit),
        "steps": lambda limit: step_table(chosen, 1 if args.cpu else args.rounds, limit),
        "graphs": lambda limit: graph_table(chosen, 1 if args.cpu else args.rounds, limit),
        "memory": lambda limit: memory_table(chosen, limit),
    }
    for name, part in parts.items():
        if name == "tests" and (args.no_tests or args.cpu):
            continue
        share[name] = Time(60.0 * args.minutes * SHARES[name])
        print(f"\n{name}\n\n{part(share[name])}", flush=True)


if __name__ == "__main__":
    main()
