"""Banded noise on sampled batches beside what plans use: the tables of docs/research.md.

    python benchmarks/banded.py --noise             # noise of sums of answers at the same budget, half a minute
    python benchmarks/banded.py --risk              # three tasks, about half an hour
    python benchmarks/banded.py --risk net --runs 3
    python benchmarks/banded.py --smoke             # tiny numbers: shows that it runs

Each record is in one of b parts, which it draws by itself; step t has each record of part t mod b with probability b
B/n, so that a batch has B records as everywhere; the noise is C^{-1} z for C with b bands (docs/research.md has the
proof). Compared at equal (epsilon, delta), zero_out, batch and number of steps:

* independent: what plans take: Poisson batches, or random allocation for exactly one pass (`step.chooser.quietest`);
* correlated: `CorrelatedSGD`: batches in turn, no amplification, the number of bands with the least noise;
* banded: as above, the number of bands with the least noise, by the mean squared error of all prefix sums.

--noise prints z of independent noise, and the noise of sums of answers relative to it, first of correlated, then of
banded noise: the root of the mean square over all steps, and after the last one; "one release" is the noise of the last
sum if every step gave the same answer, and one release on all records told it.

Tasks of --risk: Adult by logistic regression (test cross-entropy above that of the best weights), 20,000 flights before
departure by Huber's loss (the same of this loss), Adult by a net of one hidden layer of 64 (test error in per cent).
Batches, steps, step size, momentum and averages are those of the plans of `HolderSGD` and `NetSGD`: once by default,
once with batches of 512 in three passes. Means of runs with standard errors; EVERY method has the best of five step
sizes (from a quarter of that of the plan to four times it) by the score itself, whose cost is not charged.
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import scipy
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import torch_dpsco as dp
from torch_dpsco.accounting.calibrate import noise_multiplier
from torch_dpsco.accounting.designs import Design
from torch_dpsco.algorithms.correlated_numbers import Banded, least_error
from torch_dpsco.step.chooser import quietest

EPSILONS, DELTA, RUNS, FACTORS = (1.0, 4.0, 8.0), 1e-6, 5, (0.25, 0.5, 1.0, 2.0, 4.0)
# records, batch, passes
SIZES = (
    (10_000, 500, 10),
    (32_561, 512, 3),
    (32_561, 3_461, 31),
    (60_000, 256, 5),
    (261_877, 5_115, 20),
    (10**6, 512, 1),
)
METHODS = ("independent", "correlated", "banded")


@dataclass(frozen=True)
class Noise:
    """Noise of a run: a strategy, and the std of the fresh numbers in units of the clip."""

    method: str
    strategy: Banded
    std: float
    rate: float

    def prefix_std(self, steps: int) -> np.ndarray:
        """Returns the std of a coordinate of the sum of the first answers, (T,)."""
        return self.std * self.strategy.prefix_std(steps)

    def rms(self, steps: int) -> float:
        """Returns its root mean square."""
        return float(np.sqrt(np.mean(self.prefix_std(steps) ** 2)))


@functools.cache
def least(design: Design, steps: int, epsilon: float) -> float:
    """Returns the least noise multiplier under zero_out."""
    return noise_multiplier(
        epsilon, DELTA, design=design, steps=steps, adjacency="zero_out", rtol=1e-3
    )


@functools.cache
def strategy(steps: int, bands: int) -> Banded:
    """Returns the strategy of the least error."""
    return least_error(steps, bands)


def numbers_of_bands(most: int) -> list[int]:
    """Returns powers of 2, and the most."""
    return sorted(
        {2**k for k in range(most.bit_length()) if 2**k <= min(most, 512)} | {min(most, 512)}
    )


def sampled(n: int, batch: int, steps: int, epsilon: float, bands: int) -> Noise:
    """Returns b bands on parts of which a step samples: T/b subsampled Gaussian releases of rate b B/n."""
    noise, rate = strategy(steps, bands), min(1.0, bands * batch / n)
    design = dp.Poisson(round(rate * n), n) if rate < 1.0 else dp.Full(n)
    std = least(design, math.ceil(steps / bands), epsilon) * noise.norm
    return Noise("banded", noise, std, rate)


def in_turn(n: int, batch: int, steps: int, epsilon: float, bands: int) -> Noise:
    """Returns b bands on batches in turn: an unsampled Gaussian release for each pass."""
    noise, passes = strategy(steps, bands), math.ceil(steps / math.ceil(n / batch))
    return Noise("correlated", noise, least(dp.Full(n), passes, epsilon) * noise.norm, 1.0)


def independent(n: int, batch: int, steps: int, epsilon: float) -> Noise:
    """Returns independent noise on the batches that plans take."""
    design = quietest(dp.Poisson(batch, n), steps)
    return Noise("independent", Banded((1.0,)), least(design, steps, epsilon), batch / n)


def methods(n: int, batch: int, steps: int, epsilon: float) -> Iterator[Noise]:
    """Yields the three methods, each with the number of bands of the least noise."""
    yield independent(n, batch, steps, epsilon)
    bands = numbers_of_bands(min(steps, math.ceil(n / batch)))
    for law in (in_turn, sampled):
        found = (law(n, batch, steps, epsilon, b) for b in bands)
        yield min(found, key=lambda noise: noise.rms(steps))


def print_noise(sizes: Sequence[tuple[int, int, int]]) -> None:
    """Prints noise of sums relative to independent noise."""
    columns = ("n, batch, passes", "epsilon", "z", *("bands", "mean", "last") * 2, "one release")
    print("| " + " | ".join(columns) + " |\n|" + " --- |" * len(columns))
    for n, batch, passes in sizes:
        steps = passes * math.ceil(n / batch)
        for epsilon in EPSILONS:
            first, *others = methods(n, batch, steps, epsilon)
            cells = []
            for noise in others:
                last = noise.prefix_std(steps)[-1] / first.prefix_std(steps)[-1]
                mean = noise.rms(steps) / first.rms(steps)
                cells.extend([str(noise.strategy.bands), f"{mean:.2f}", f"{last:.2f}"])
            whole = (
                steps * batch / n * least(dp.Full(n), 1, epsilon) / first.prefix_std(steps)[-1]
            )
            cells = [f"{n}, {batch}, {passes}", f"{epsilon:g}", f"{first.std:.3f}", *cells]
            print("| " + " | ".join([*cells, f"{whole:.2f}"]) + " |", flush=True)


# -- batches ----------------------------------------------------------------------------------------------------------


def batches(
    noise: Noise, n: int, batch: int, steps: int, rng: np.random.Generator
) -> Iterator[np.ndarray]:
    """Yields the records of each step."""
    if noise.method == "correlated":
        cut = np.array_split(rng.permutation(n), math.ceil(n / batch))
        yield from (cut[t % len(cut)] for t in range(steps))
        return
    if noise.method == "independent" and steps == math.ceil(n / batch):
        parts, rate = steps, 1.0
    else:
        parts, rate = noise.strategy.bands, noise.rate
    of = rng.integers(parts, size=n)
    members = [np.flatnonzero(of == part) for part in range(parts)]
    for t in range(steps):
        part = members[t % parts]
        yield part[rng.random(len(part)) < rate]


def noises(noise: Noise, steps: int, dim: int, rng: np.random.Generator) -> Tensor:
    """Returns the noise of each step, (T, d), in units of the clip."""
    fresh = noise.std * rng.standard_normal((steps, dim))
    return torch.tensor(
        scipy.signal.lfilter([1.0], noise.strategy.coefficients, fresh, axis=0)
    ).float()


# -- tasks ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Task:
    """Records, per-step sums of rows of norm at most the clip, and a score of weights."""

    n: int
    dim: int
    plan: Callable[..., Any]  # of epsilon and further keywords
    total: Callable[[Tensor, np.ndarray, float], Tensor]  # weights, batch, clip
    score: Callable[[Tensor], float]
    start: Callable[[], Tensor]


def run(task: Task, plan: Any, noise: Noise, lr: float, seed: int) -> float:
    """Returns the score of one run."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    steps, batch, momentum = plan.steps, plan.batch_size, getattr(plan, "momentum", None) or 0.0
    power = {"weighted": 1.0, "ema": 8.0}[plan.average]
    added = noises(noise, steps, task.dim, rng)
    w = task.start()
    inner, answer, clip = w.clone(), w.clone(), plan.clip
    for t, rows in enumerate(batches(noise, task.n, batch, steps, rng)):
        answer.lerp_(w, (power + 1.0) / (t + 1.0 + power))
        inner -= lr / (1.0 - momentum) / batch * (task.total(w, rows, clip) + clip * added[t])
        w = torch.lerp(w, inner, 1.0 - momentum)
    return task.score(answer)


def linear(
    x: Tensor, y: Tensor, test: tuple[Tensor, Tensor], loss: str, plan: Callable[..., Any]
) -> Task:
    """Returns a task of a linear model, the last feature constant."""

    def slope(score: Tensor, target: Tensor) -> Tensor:
        if loss == "huber":
            return (score - target).clamp(-0.25, 0.25)
        return torch.sigmoid(score) - target

    def risk(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        if loss == "huber":
            return nn.functional.huber_loss(x @ w, y, delta=0.25)
        return nn.functional.binary_cross_entropy_with_logits(x @ w, y)

    def total(w: Tensor, rows: np.ndarray, clip: float) -> Tensor:
        a, target = x[rows], y[rows]
        s = slope(a @ w, target)
        cut = (clip / (s.abs() * a.norm(dim=1)).clamp_min(1e-12)).clamp_max(1.0)
        return (s * cut) @ a

    best = torch.zeros(x.shape[1], requires_grad=True)
    solver = torch.optim.LBFGS([best], max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        solver.zero_grad()
        value = risk(best, x, y)
        value.backward()
        return value.detach()

    solver.step(closure)
    least_risk = float(risk(best.detach(), *test))
    score = lambda w: float(risk(w, *test)) - least_risk  # noqa: E731
    return Task(len(x), x.shape[1], plan, total, score, lambda: torch.zeros(x.shape[1]))


def holder(loss: Any, n: int, dim: int, **bounds: float) -> Callable[..., Any]:
    """Returns plans of HolderSGD; their clip is the bound on gradients that is left."""

    def plan(epsilon: float, **given: Any) -> Any:
        budget = dp.Budget(epsilon, DELTA, "zero_out")
        return dp.HolderSGD.plan(
            problem=loss.problem(**bounds), n=n, budget=budget, dim=dim, **given
        )

    return plan


def adult(smoke: bool) -> Task:
    """Adult by logistic regression."""
    x, y, test, labels = _adult(smoke)
    plan = holder(dp.losses.Logistic(), len(x), x.shape[1], bound_x=float(_BOUND))
    return linear(x, y, (test, labels), "logistic", plan)


_FLIGHTS = 20_000


def flights(smoke: bool) -> Task:
    """Flights before departure by Huber's loss, the first 20,000 of the public split."""
    from flights import NUM_FEATURES, load_flights

    rows, width = load_flights(), NUM_FEATURES["predep"]
    x = nn.functional.pad(rows.train_features[:_FLIGHTS, :width], (0, 1), value=1.0)
    test = nn.functional.pad(rows.test_features[:, :width], (0, 1), value=1.0)
    plan = holder(dp.losses.Huber(threshold=0.25), len(x), width + 1, bound_x=2.83, bound_y=5.0)
    return linear(x, rows.train_hours[: len(x)], (test, rows.test_hours), "huber", plan)


def net(smoke: bool) -> Task:
    """Adult by a net of one hidden layer, whose gradients have length 1."""
    x, y, test, labels = _adult(smoke)
    hidden, width = 64, x.shape[1]
    sizes = (hidden * width, hidden)

    def parts(w: Tensor) -> tuple[Tensor, Tensor]:
        return w[: sizes[0]].view(hidden, width), w[sizes[0] :]

    def total(w: Tensor, rows: np.ndarray, clip: float) -> Tensor:
        first, second = parts(w)
        a = x[rows]
        h = torch.relu(a @ first.T)
        out = torch.sigmoid(h @ second) - y[rows]
        back = out[:, None] * second * (h > 0)
        square = back.square().sum(1) * a.square().sum(1) + out.square() * h.square().sum(1)
        cut = clip / (square.sqrt() + 0.01)
        return torch.cat([((back * cut[:, None]).T @ a).flatten(), (out * cut) @ h])

    def score(w: Tensor) -> float:
        first, second = parts(w)
        wrong = ((torch.relu(test @ first.T) @ second > 0) != (labels > 0.5)).float()
        return 100.0 * float(wrong.mean())

    def start() -> Tensor:
        return torch.cat(
            [
                (torch.rand(size) * 2 - 1) / math.sqrt(ins)
                for size, ins in zip(sizes, (width, hidden), strict=True)
            ]
        )

    def plan(epsilon: float, **given: Any) -> Any:
        budget = dp.Budget(epsilon, DELTA, "zero_out")
        return dp.NetSGD.plan(n=len(x), budget=budget, dim=sum(sizes), **given)

    return Task(len(x), sum(sizes), plan, total, score, start)


_BOUND = math.sqrt(5 + 8 + 1)  # five numbers in [0, 1], eight columns of levels, a constant


def _adult(smoke: bool) -> tuple[Tensor, ...]:
    from adult import load_adult

    x, y, test, labels = load_adult()
    rows = 3000 if smoke else None
    one = lambda a: nn.functional.pad(a.float(), (0, 1), value=1.0)  # noqa: E731
    return (
        one(x[:rows]),
        (y[:rows].flatten() > 0).float(),
        one(test),
        (labels.flatten() > 0).float(),
    )


TASKS = {"adult": adult, "flights": flights, "net": net}
SETTINGS: tuple[tuple[str, dict[str, int]], ...] = (
    ("default", {}),
    ("512, 3 passes", {"batch_size": 512, "epochs": 3}),
)


def cell(task: Task, plan: Any, noise: Noise, runs: int) -> str:
    """Returns mean and standard error of the best step size."""
    found = [
        [run(task, plan, noise, factor * plan.lr, seed) for seed in range(runs)]
        for factor in FACTORS
    ]
    best = min(range(len(found)), key=lambda i: statistics.fmean(found[i]))
    error = statistics.stdev(found[best]) / math.sqrt(runs) if runs > 1 else math.nan
    return f"{noise.strategy.bands}: {statistics.fmean(found[best]):.4g} +- {error:.1g} (x{FACTORS[best]:g})"


def print_risk(names: Sequence[str], runs: int, smoke: bool) -> None:
    """Prints scores of the three methods."""
    print("| task, batches | n, batch, steps | epsilon | " + " | ".join(METHODS) + " |")
    print("| --- |" + " --- |" * (2 + len(METHODS)))
    for name in names:
        task = TASKS[name](smoke)
        for setting, given in SETTINGS:
            for epsilon in EPSILONS[: 1 if smoke else None]:
                plan = task.plan(epsilon, **given)
                n, batch, steps = task.n, plan.batch_size, plan.steps
                cells = [
                    cell(task, plan, noise, runs) for noise in methods(n, batch, steps, epsilon)
                ]
                print(
                    f"| {name}, {setting} | {n}, {batch}, {steps} | {epsilon:g} | "
                    + " | ".join(cells)
                    + " |",
                    flush=True,
                )


def main(argv: Sequence[str] | None = None) -> None:
    """Prints what is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--noise", action="store_true", help="noise of sums")
    parser.add_argument(
        "--risk", nargs="*", choices=list(TASKS), help="scores of all tasks, or of these"
    )
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--smoke", action="store_true", help="tiny numbers: shows that it runs")
    options = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    if options.noise or options.smoke:
        print_noise(((400, 40, 2),) if options.smoke else SIZES)
    if options.risk is not None or options.smoke:
        names = options.risk or (["adult"] if options.smoke else list(TASKS))
        print_risk(names, 2 if options.smoke else options.runs, options.smoke)


if __name__ == "__main__":
    main()
