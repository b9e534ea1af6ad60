"""What optimizers for heavy-tailed gradients achieve and cost: excess risk, planned bounds, time and memory.

    python benchmarks/heavy_tailed.py            # excess risk against n on synthetic tasks, about three minutes
    python benchmarks/heavy_tailed.py --only "SGD, theory" --batches 10 --runs 9 --sizes 8000 32000 128000 512000
    python benchmarks/heavy_tailed.py --bounds   # slopes of the planned bounds against n, seconds
    python benchmarks/heavy_tailed.py --speed    # a step beside HolderSGD's, a minute
    python benchmarks/heavy_tailed.py --memory   # 100,000 steps of one pass, a minute and a half
    python benchmarks/heavy_tailed.py --smoke    # risk, speed and memory with tiny numbers: shows that they run

Everything is computed through the public interface. The figures are those of docs/choosing.md.

The tasks: y = x.w + noise with nine standard normal features and a 1 (the intercept, onto which skewed noise pushes),
|w| = 1, models in a ball of radius 2; noise is Student-t of 2.5 degrees of freedom ("symmetric") or Pareto of index 2.2
less its mean ("skewed"). Squared loss, whose gradient has as many moments as the noise. The excess risk is
|answer - w|^2 / 2 exactly; zero has 0.5. epsilon = 1, delta = 1e-5, replace_one; medians of a few runs, a new data set
in each.

The second command is for the slopes of one pass at larger n, half a minute; five batches have a floor there.

Nothing of ours is tuned, but what was looked at long before, on such tasks: 5 batches in one pass, 30 full-batch
steps, reg 0.05 of LocalizedSGD. Step sizes are those of the smoothness, 1, which is true here. Opacus, at a
constant clip on full batches (its noise by our accountant, as its own ones have no replace_one), is tuned by looking:
the best of 4 clips (0.1, 1, 10, 100 medians of the gradient norms at zero) x 3 step sizes on the score itself, on one
data set of the size; what a private search would cost is not charged.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import math
import platform
import resource
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from opacus import GradSampleModule
from opacus.optimizers import DPOptimizer
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import torch_dpsco as dp
from torch_dpsco.accounting.calibrate import noise_multiplier
from torch_dpsco.accounting.designs import Undeclared
from torch_dpsco.algorithms import heavy_tailed_numbers as clipping
from torch_dpsco.algorithms.heavy_tailed_numbers import (
    OnePass,
    accelerated_plan,
    proximal_pl_plan,
    strongly_convex_plan,
)
from torch_dpsco.algorithms.localized_numbers import (
    PhaseTask,
    localized_schedule_ballfree,
    reduction_schedule,
)
from torch_dpsco.errors import UtilityWarning

# -- accuracy ---------------------------------------------------------------------------------------------------------

DIM, RADIUS = 10, 2.0
BUDGET = dp.Budget(1.0, 1e-5, adjacency="replace_one")
SIZES, RUNS = (1_000, 4_000, 16_000, 64_000), 5
BATCHES, FULL_STEPS, REG, PHASE_STEPS, LEAST_PHASE = 5, 30, 0.05, 300, 500
LARGEST_CLIP = 1e3  # of pilots; norms of 10 features times errors of a few units
CLIP_FACTORS, LRS = (0.1, 1.0, 10.0, 100.0), (0.1, 0.5, 2.5)
LOSS = dp.losses.Squared()
SMOOTH = dp.Problem(smoothness=1.0, radius=RADIUS)
CURVED = dp.Problem(smoothness=1.0, strong_convexity=1.0, radius=RADIUS)
PROXIMAL = dp.Problem(smoothness=1.0, pl_constant=1.0, radius=RADIUS)

Fit = Callable[[TensorDataset], Tensor]


def draw(n: int, skewed: bool, generator: np.random.Generator) -> tuple[TensorDataset, Tensor]:
    """Returns n records and the weights behind them."""
    x, w = generator.standard_normal((n, DIM)), generator.standard_normal(DIM)
    x[:, -1] = 1.0
    w /= np.linalg.norm(w)
    noise = generator.pareto(2.2, n) - 1.0 / 1.2 if skewed else generator.standard_t(2.5, n)
    rows, targets = torch.from_numpy(x).float(), torch.from_numpy(x @ w + noise).float()
    return TensorDataset(rows, targets[:, None]), torch.from_numpy(w)


def excess(weight: Tensor, truth: Tensor) -> float:
    """Returns the risk above the least one: the features have unit second moments."""
    return float((weight.detach().double().reshape(-1) - truth).square().sum()) / 2.0


def trained(
    build: Callable[[nn.Module, int], dp.PrivateOptimizer], data: TensorDataset
) -> Tensor:
    """Returns the weights of one of our optimizers."""
    model = dp.attach(nn.Linear(DIM, 1, bias=False))
    nn.init.zeros_(model.weight)
    optimizer = build(model, len(data))
    with optimizer:
        for x, y in optimizer.loader(data):
            optimizer.zero_grad()
            LOSS(model(x), y).backward()
            optimizer.step()
    return model.weight


def one_pass(kind: Any, problem: dp.Problem, rule: str, batches: int) -> Fit:
    """Returns a one-pass method with a pilot."""

    def build(model: nn.Module, n: int) -> dp.PrivateOptimizer:
        clip = dp.Pilot(rule=rule, c_max=LARGEST_CLIP)
        plan = kind.plan(
            problem=problem,
            n=n,
            budget=BUDGET,
            dim=DIM,
            steps=batches,
            clip=clip,
            sampling="shuffled",
        )
        return kind(model.parameters(), plan)

    return lambda data: trained(build, data)


def by_default(rule: str) -> Fit:
    """Returns Poisson batches with a pilot, where the step rule chooses all else."""

    def build(model: nn.Module, n: int) -> dp.PrivateOptimizer:
        clip = dp.Pilot(rule=rule, c_max=LARGEST_CLIP)
        plan = dp.ClippedSGD.plan(
            problem=SMOOTH, n=n, budget=BUDGET, dim=DIM, sampling="poisson", clip=clip
        )
        return dp.ClippedSGD(model.parameters(), plan)

    return lambda data: trained(build, data)


def full_batch(rule: str) -> Fit:
    """Returns gradient descent on full batches with a pilot."""

    def build(model: nn.Module, n: int) -> dp.PrivateOptimizer:
        plan = dp.ClippedSGD.plan(
            problem=SMOOTH,
            n=n,
            budget=BUDGET,
            dim=DIM,
            sampling="full",
            steps=FULL_STEPS,
            clip=dp.Pilot(rule=rule, c_max=LARGEST_CLIP),
            lr=0.5,
            average="weighted",
        )
        return dp.ClippedSGD(model.parameters(), plan)

    return lambda data: trained(build, data)


def localized(data: TensorDataset) -> Tensor:
    """Returns the answer of ball-free localized phases, with pilots."""

    def build(model: nn.Module, n: int) -> dp.PrivateOptimizer:
        plan = dp.LocalizedSGD.plan(
            problem=dp.Problem(radius=RADIUS),
            n=n,
            budget=BUDGET,
            dim=DIM,
            clip=dp.Pilot(c_max=LARGEST_CLIP),
            reg=REG,
            max_steps=PHASE_STEPS,
            min_phase=LEAST_PHASE,
        )
        return dp.LocalizedSGD(model.parameters(), plan)

    return trained(build, data)


def by_opacus(data: TensorDataset, clip: float, lr: float) -> Tensor:
    """Returns the weighted average of Opacus' DP-SGD on full batches at a constant clip."""
    x, y = data.tensors
    # in units of the clip; replacing a record moves the sum by two of them
    noise = noise_multiplier(
        BUDGET.epsilon,
        BUDGET.delta,
        design=dp.Full(len(data)),
        steps=FULL_STEPS,
        adjacency="replace_one",
    )
    layer = nn.Linear(DIM, 1, bias=False)
    nn.init.zeros_(layer.weight)
    model = GradSampleModule(layer)
    inner = torch.optim.SGD(model.parameters(), lr=lr)
    optimizer = DPOptimizer(
        inner, noise_multiplier=noise, max_grad_norm=clip, expected_batch_size=len(data)
    )
    mean = torch.zeros(1, DIM)
    for step in range(1, FULL_STEPS + 1):
        optimizer.zero_grad()
        LOSS(model(x), y).backward()
        optimizer.step()
        with torch.no_grad():
            layer.weight *= min(1.0, RADIUS / max(float(layer.weight.norm()), RADIUS))
            mean += (layer.weight - mean) * 2.0 / (step + 1.0)
    return mean


def tuned_opacus(data: TensorDataset, truth: Tensor) -> tuple[str, Fit]:
    """Returns Opacus at the clip and step size of least excess risk on a data set: not private."""
    x, y = data.tensors
    median = float((x.norm(dim=1) * y.squeeze(1).abs()).median())
    options = [(factor, lr) for factor in CLIP_FACTORS for lr in LRS]
    factor, lr = min(options, key=lambda o: excess(by_opacus(data, o[0] * median, o[1]), truth))
    return f"{factor:g} medians, lr {lr:g}", lambda other: by_opacus(other, factor * median, lr)


def least_squares(data: TensorDataset) -> Tensor:
    """Returns the NON-PRIVATE least-squares weights."""
    x, y = (t.double() for t in data.tensors)
    return torch.linalg.lstsq(x, y).solution


def methods(batches: int) -> dict[str, Fit]:
    """Returns what is compared, less Opacus, which is tuned first."""
    return {
        "AcceleratedSGD, theory": one_pass(dp.AcceleratedSGD, SMOOTH, "theory", batches),
        "AcceleratedSGD, balanced": one_pass(dp.AcceleratedSGD, SMOOTH, "balanced", batches),
        "ClippedSGD, theory": one_pass(dp.ClippedSGD, CURVED, "theory", batches),
        "ClippedSGD, balanced": one_pass(dp.ClippedSGD, CURVED, "balanced", batches),
        "ProximalSGD, theory": one_pass(dp.ProximalSGD, PROXIMAL, "theory", batches),
        "LocalizedSGD, balanced": localized,
        "many passes, theory": by_default("theory"),
        "many passes, balanced": by_default("balanced"),
        "many passes, median": by_default("median"),
        "full batch, theory": full_batch("theory"),
        "full batch, balanced": full_batch("balanced"),
        "full batch, median": full_batch("median"),
        "not private": least_squares,
    }


def print_risk(runs: int, sizes: Sequence[int], only: str, batches: int) -> None:
    """Prints median excess risks per n, and their slopes on log-log; of the methods whose names contain `only`."""
    generator = np.random.default_rng(0)
    for skewed in (False, True):
        print(
            f"{'skewed' if skewed else 'symmetric'} noise: excess risk, medians of {runs} runs; zero has 0.5"
        )
        table: dict[str, list[float]] = {}
        choices = []
        for n in sizes:
            fits = methods(batches)
            if only in "Opacus, tuned":
                choice, fits["Opacus, tuned"] = tuned_opacus(*draw(n, skewed, generator))
                choices.append(choice)
            for name, fit in fits.items():
                if only not in name:
                    continue
                found = []
                for _ in range(runs):
                    data, truth = draw(n, skewed, generator)
                    found.append(excess(fit(data), truth))
                table.setdefault(name, []).append(statistics.median(found))
        print(f"{'n':<26}" + "".join(f"{n:>10}" for n in sizes) + f"{'slope':>9}")
        for name, risks in table.items():
            slope = (
                np.polyfit(np.log(sizes), np.log(np.maximum(risks, 1e-9)), 1)[0]
                if len(sizes) > 1
                else np.nan
            )
            print(f"{name:<26}" + "".join(f"{risk:>10.5f}" for risk in risks) + f"{slope:>9.2f}")
        print(f"Opacus was tuned to: {'; '.join(choices)}\n" if choices else "", flush=True)


# -- bounds -----------------------------------------------------------------------------------------------------------

BOUND_DIM, RHO = 50, 0.5
LARGE = (10**6, 10**7, 10**8, 10**9)


def planned(name: str, k: float, n: int) -> float:
    """Returns a planned bound: D = 2, r_k = 1, smoothness 1, curvature 1/4."""
    common = {"n": n, "dim": BOUND_DIM, "rho": RHO}
    data = OnePass(**common, moment=1.0, moment_order=k)
    if name == "clipped mean":  # RMSE, of n records at once
        weight = clipping.exchange_rate_mean(n, BOUND_DIM, RHO)
        clip = clipping.clip_threshold_linear(1.0, k, weight)
        noise = math.sqrt(BOUND_DIM) * clipping.mean_noise_std(clip, n, RHO)
        return math.hypot(clipping.clip_bias(1.0, k, clip) + noise, n**-0.5)
    if name == "AcceleratedSGD":
        return accelerated_plan(data, smoothness=1.0, diameter=2.0).bound
    curves = {"smoothness": 1.0, "strong_convexity": 0.25}
    if name == "ClippedSGD":
        return strongly_convex_plan(data, **curves, diameter=2.0).bound
    if name == "ProximalSGD":
        curves = {"smoothness": 1.0, "pl_constant": 0.25}
        return proximal_pl_plan(data, **curves, initial_gap=2.0).bound
    common |= {"second_moment": 1.0, "diameter": 2.0, "max_steps": None}
    if name == "LocalizedSGD":
        task = PhaseTask(**common, moment_order=2.0 * k)
        return localized_schedule_ballfree(task, moment_2k=1.0).risk_bound
    assert name == "LocalizedSGD, reduction"
    task = PhaseTask(**common, moment_order=2.0 * k)
    return reduction_schedule(task, strong_convexity=0.25, moment_2k=1.0).risk_bound


EXPONENTS: dict[str, Callable[[float], float]] = {
    "clipped mean": lambda k: max(-1 / 2, -(k - 1) / k),
    "AcceleratedSGD": lambda k: max(-1 / 2, -4 * (k - 1) / (5 * k - 1), -(k - 1) / k),
    "ClippedSGD": lambda k: max(-1.0, -2 * (k - 1) / k),
    "ProximalSGD": lambda k: max(-1.0, -2 * (k - 1) / k),
    "LocalizedSGD": lambda k: max(-1 / 2, -(k - 1) / k),
    "LocalizedSGD, reduction": lambda k: max(-1.0, -2 * (k - 1) / k),
}


def print_bounds() -> None:
    """Prints planned bounds for large n, their slopes, and the exponents of the theorems."""
    print(
        f"planned bounds, d = {BOUND_DIM}, rho = {RHO}, D = 2, r_k = 1 (localized: order 2k), smoothness 1"
    )
    print(
        f"{'':<26}{'k':>5}"
        + "".join(f"{f'n={n:.0e}':>11}" for n in LARGE)
        + f"{'slope':>8}{'theory':>8}{'off':>7}"
    )
    for name, exponent in EXPONENTS.items():
        for k in (2.0, 3.0):
            bounds = [planned(name, k, n) for n in LARGE]
            slope, theory = np.polyfit(np.log(LARGE), np.log(bounds), 1)[0], exponent(k)
            figures = "".join(f"{bound:>11.3g}" for bound in bounds)
            print(
                f"{name:<26}{k:>5g}{figures}{slope:>8.3f}{theory:>8.3f}{slope - theory:>+7.3f}"
            )


# -- time and memory --------------------------------------------------------------------------------------------------


Step = Callable[[], tuple[float, float]]
OPTIMIZERS = ("HolderSGD", "AcceleratedSGD", "ClippedSGD")


def timed(
    model: nn.Module,
    optimizer: dp.PrivateOptimizer,
    loss: nn.Module,
    batches: Iterator[Sequence[Tensor]],
) -> Step:
    """Returns an iteration as the user writes it, less the loading; its times are whole and of step(), microseconds."""

    def step() -> tuple[float, float]:
        x, y = next(batches)
        start = time.perf_counter()
        optimizer.zero_grad()
        loss(model(x), y).backward()
        backward = time.perf_counter()
        optimizer.step()
        end = time.perf_counter()
        return 1e6 * (end - start), 1e6 * (end - backward)

    return step


def without_budget(
    build: Callable[[], nn.Module], batch: tuple[Tensor, Tensor], loss: nn.Module
) -> dict[str, Step]:
    """Returns an iteration of each optimizer on one batch in memory; no sampling is claimed, and all is recorded."""
    made = {}
    for name in OPTIMIZERS:
        model = dp.attach(build())
        size = len(batch[0])
        common = {
            "lr": 1e-4,
            "noise_multiplier": 1.0,
            "batch_size": size,
            "adjacency": "replace_one",
        }
        if name == "HolderSGD":
            plan: Any = dp.HolderSGD.plan(problem=dp.Problem(lipschitz=1.0), **common)
            optimizer: dp.PrivateOptimizer = dp.HolderSGD(model.parameters(), plan)
        elif name == "ClippedSGD":
            optimizer = dp.ClippedSGD(model.parameters(), dp.ClippedSGD.plan(clip=1.0, **common))
        else:  # its plans are for one pass over so many records
            optimizer = dp.PrivateOptimizer(
                model.parameters(),
                1e-4,
                oracle=dp.oracles.Clipped(1.0, 1.0, size),
                rule=dp.rules.Accelerated(),
                design=Undeclared(size),
            )
        made[name] = timed(model, optimizer, loss, itertools.repeat(batch))
    return made


def with_budget(dim: int, batch_size: int, steps: int) -> dict[str, Step]:
    """Returns an iteration of calibrated optimizers on their loaders' batches: Poisson, and one pass twice."""
    n, problem = batch_size * steps, dp.Problem(lipschitz=1.0, smoothness=1.0)
    data = TensorDataset(torch.randn(n, dim), (torch.rand(n, 1) > 0.5).float())
    made = {}
    for name in OPTIMIZERS:
        model = dp.attach(nn.Linear(dim, 1))
        common = {"problem": problem, "n": n, "budget": BUDGET}
        if name == "HolderSGD":
            plan: Any = dp.HolderSGD.plan(**common, batch_size=batch_size, epochs=1.0)
        else:
            plan = getattr(dp, name).plan(**common, steps=steps, clip=1.0)
        optimizer = getattr(dp, name)(model.parameters(), plan)
        made[name] = timed(
            model, optimizer, nn.BCEWithLogitsLoss(), iter(optimizer.loader(data))
        )
    return made


def print_speed(rounds: int) -> None:
    """Prints median microseconds per iteration, the optimizers taking turns."""
    logistic = (torch.randn(256, 1000), (torch.rand(256, 1) > 0.5).float())
    images = (torch.randn(256, 784), torch.randint(10, (256,)))

    def network() -> nn.Module:
        layers = (
            nn.Linear(784, 512),
            nn.ReLU(),
            nn.Linear(512, 256),
            nn.ReLU(),
            nn.Linear(256, 10),
        )
        return nn.Sequential(*layers)

    cases = {
        "logistic d=1000 b=256": (
            without_budget(lambda: nn.Linear(1000, 1), logistic, nn.BCEWithLogitsLoss()),
            20,
        ),
        "784-512-256-10 b=256": (without_budget(network, images, nn.CrossEntropyLoss()), 3),
        "logistic d=100 b=64, budget": (with_budget(100, 64, 2_000), 20),
    }
    print(
        f"{'microseconds':<30}{'':<16}{'whole':>10}{'more':>8}{'ratio':>7}{'step()':>10}{'more':>8}{'ratio':>7}"
    )
    for case, (steps, turn) in cases.items():
        seen: dict[str, list[tuple[float, ...]]] = {name: [] for name in steps}
        for k in range(rounds + 1):
            for name, step in steps.items():
                laps = [step() for _ in range(turn + 1)][1:]
                if k:  # the first round warms up
                    seen[name].append(
                        tuple(statistics.median(column) for column in zip(*laps, strict=True))
                    )
        medians = {
            name: [statistics.median(c) for c in zip(*each, strict=True)]
            for name, each in seen.items()
        }
        base = medians["HolderSGD"]
        for name, found in medians.items():
            columns = "".join(
                f"{x:>10.1f}{x - y:>+8.1f}{x / y:>7.3f}"
                for x, y in zip(found, base, strict=True)
            )
            print(f"{case:<30}{name:<16}{columns}")


def print_memory(steps: int, batch_size: int = 4) -> None:
    """Prints what the process holds in the course of one pass of many steps, and what the optimizer keeps."""
    data = TensorDataset(
        torch.randn(steps * batch_size, DIM), torch.randn(steps * batch_size, 1)
    )
    model = dp.attach(nn.Linear(DIM, 1, bias=False))
    plan = dp.AcceleratedSGD.plan(
        n=len(data),
        lr=1e-6,
        clip=1.0,
        noise_multiplier=8.0,
        batch_size=batch_size,
        sampling="shuffled",
        adjacency="replace_one",
    )
    optimizer = dp.AcceleratedSGD(model.parameters(), plan)
    print(
        f"{'AcceleratedSGD, steps':<22}{'resident, MB':>15}{'Python objects':>16}{'floats in the state':>21}"
    )
    for k, (x, y) in enumerate(optimizer.loader(data), start=1):
        optimizer.zero_grad()
        LOSS(model(x), y).backward()
        optimizer.step()
        if k in (steps // 10, steps // 2, steps):
            gc.collect()
            pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
            resident, objects = pages * resource.getpagesize() / 2**20, len(gc.get_objects())
            floats = sum(
                t.numel() for t in _tensors(optimizer.state_dict()) if t.is_floating_point()
            )
            print(f"{k:<22}{resident:>15.1f}{objects:>16}{floats:>21}", flush=True)


def _tensors(item: object) -> list[Tensor]:
    if isinstance(item, Tensor):
        return [item]
    parts = (
        item.values()
        if isinstance(item, dict)
        else item
        if isinstance(item, (list, tuple))
        else ()
    )
    return [tensor for part in parts for tensor in _tensors(part)]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=RUNS, help="of each method and size")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--batches", type=int, default=BATCHES, help="of one pass")
    parser.add_argument("--only", default="", help="methods whose names contain this")
    parser.add_argument("--bounds", action="store_true", help="slopes of planned bounds")
    parser.add_argument("--speed", action="store_true", help="times")
    parser.add_argument("--rounds", type=int, default=15, help="of --speed")
    parser.add_argument("--memory", action="store_true", help="what a long run holds")
    parser.add_argument("--steps", type=int, default=100_000, help="of --memory")
    parser.add_argument("--smoke", action="store_true", help="risk, speed and memory, tiny")
    args = parser.parse_args(argv)
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    warnings.filterwarnings(
        "ignore", category=UtilityWarning
    )  # small pilots: the table shows what comes of it
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {platform.machine()}, one thread\n")
    if args.smoke:
        args.runs, args.sizes, args.rounds, args.steps = 1, (1_000,), 1, 20
    if args.bounds:
        print_bounds()
    if args.speed or args.smoke:
        print_speed(args.rounds)
    if args.memory or args.smoke:
        print_memory(args.steps)
    if args.smoke or not (args.bounds or args.speed or args.memory):
        print_risk(args.runs, args.sizes, args.only, args.batches)


if __name__ == "__main__":
    main()
