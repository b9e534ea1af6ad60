"""Timing of variants that take turns, ratios of CPU time with their spread, and tables in Markdown.

All variants of a case are timed in every round, in random order, a few steps each. A figure is the median over rounds
of the CPU time of a step divided by that of the base variant in the SAME round, so that a busy machine, which slows
both, moves it little; the quartiles of these ratios are given with it.
"""

from __future__ import annotations

import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path

import torch

from torch_dpsco import native

__all__ = [
    "Clock",
    "Figure",
    "Slot",
    "cell",
    "figures",
    "in_process",
    "interleaved",
    "machine",
    "summary",
    "table",
]

SLOT_SECONDS, MOST_REPEATS = 0.02, 50


@dataclass(frozen=True)
class Slot:
    """One turn of a variant.

    Args:
        run: makes that many steps and returns the CPU seconds of one.
        seconds: about how long a turn should take.
        most: most steps of a turn.
    """

    run: Callable[[int], float]
    seconds: float = SLOT_SECONDS
    most: int = MOST_REPEATS


@dataclass(frozen=True)
class Figure:
    """Median over rounds with quartiles."""

    median: float
    low: float
    high: float


class Clock:
    """Seconds of the CPU; with a device, or several threads, those on the wall, when all that was begun is done."""

    def __init__(self, device: str = "cpu", *, wall: bool = False) -> None:
        self.device, self.wall = device, wall

    def __call__(self) -> float:
        """Returns the time now."""
        if self.device != "cpu":
            torch.cuda.synchronize()
        return (
            time.process_time()
            if self.device == "cpu" and not self.wall
            else time.perf_counter()
        )


def in_process(step: Callable[[], object], clock: Clock | None = None) -> Slot:
    """Returns turns of a step of this process."""
    clock = clock or Clock()

    def run(repeats: int) -> float:
        step()  # warms caches after another variant's turn
        start = clock()
        for _ in range(repeats):
            step()
        return (clock() - start) / repeats

    return Slot(run)


def interleaved(slots: Mapping[str, Slot], rounds: int) -> dict[str, list[float]]:
    """Returns the CPU seconds of a step per variant and round."""
    repeats = {name: _repeats(slot) for name, slot in slots.items()}
    seconds: dict[str, list[float]] = {name: [] for name in slots}
    for _ in range(rounds):
        for name in random.sample(list(slots), len(slots)):
            seconds[name].append(slots[name].run(repeats[name]))
    return seconds


def _repeats(slot: Slot) -> int:
    if slot.most == 1:
        return 1
    trial = slot.run(2)
    return max(1, min(slot.most, int(slot.seconds / trial))) if trial > 0 else slot.most


def summary(values: Sequence[float]) -> Figure:
    """Returns median and quartiles."""
    low, median, high = (
        statistics.quantiles(values, n=4, method="inclusive")
        if len(values) > 1
        else [values[0]] * 3
    )
    return Figure(median, low, high)


def figures(
    seconds: Mapping[str, Sequence[float]], base: str
) -> dict[str, tuple[Figure, float]]:
    """Returns per variant (ratio to the base in the same round, median milliseconds)."""
    return {
        name: (
            summary([own / other for own, other in zip(times, seconds[base], strict=True)]),
            1e3 * statistics.median(times),
        )
        for name, times in seconds.items()
    }


def digits(value: float) -> str:
    """Returns about three digits of a number, without an exponent."""
    return (
        f"{value:.0f}"
        if abs(value) >= 99.5
        else f"{value:.3g}"
        if abs(value) >= 1
        else f"{value:.2g}"
    )


def cell(figure: Figure) -> str:
    """Returns "median [quartile, quartile]"."""
    return f"{digits(figure.median)} [{digits(figure.low)}, {digits(figure.high)}]"


def table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Returns a table in Markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def machine(rounds: int) -> str:
    """Returns what a reader must know of the run: machine, versions, threads, rounds and date."""
    name, cores = platform.processor() or platform.machine(), 0
    if Path("/proc/cpuinfo").exists():
        facts = [
            line.split(":", 1)
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if ":" in line
        ]
        names = [value.strip() for key, value in facts if key.strip() == "model name"]
        name, cores = (names or [name])[0], len(names)
    packages = ", ".join(
        f"{package} {version(package)}" for package in ("torch", "opacus", "numpy")
    )
    return (
        f"{name}{f' ({cores} cores)' if cores else ''}, Python {platform.python_version()}, {packages}; "
        f"threads: {torch.get_num_threads()}; accelerator {native.status()}; "
        f"{rounds} rounds; load {os.getloadavg()[0]:.1f} before; {date.today()}"
    )
