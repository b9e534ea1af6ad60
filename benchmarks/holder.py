"""What private SGD for Hoelder-smooth losses costs: noise, accuracy and time, by output and by gradient perturbation.

    python benchmarks/holder.py            # noise: published and ours, a few seconds
    python benchmarks/holder.py --risk     # excess risk against n on a synthetic task, two to three minutes
    python benchmarks/holder.py --speed    # a step of HolderOutputSGD beside torch.optim.SGD, and planning, a minute
    python benchmarks/holder.py --smoke    # --risk and --speed with tiny numbers: shows that they run

Everything is computed through the public interface. The figures are those of docs/choosing.md.

The task of --risk: x = s u + g normalized to norm 1, in R^20, with a sign s, a fixed unit vector u and Gaussian g of
norm about 1; y is s, or -s in 15 of 100 records; q-hinge with q = 1.5, models in a ball of radius 2, epsilon = 1, delta
= 1e-6, replace_one. Excess risk is over the best model in the ball, both measured on 100,000 records that no run has
seen; medians of a few runs. "theorem" and "balanced" step sizes look at no record. Opacus clips at a constant: its clip
and step size, and what else is called "tuned", are the best of a grid on the unseen records, looked up on one data set
of the size; that is not private, and what a private search would cost is not charged.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from opacus import GradSampleModule
from opacus.optimizers import DPOptimizer
from torch import Tensor, nn
from torch.utils.data import TensorDataset

sys.path.insert(
    0, str(Path(__file__).parents[1])
)  # for published formulas, which the tests have
import torch_dpsco as dp
from tests.reference.papers.holder import lr_theorem, output_sigma_paper, search_split_paper
from torch_dpsco.algorithms.output_sgd import HolderOutputPlan

DELTA = 1e-6


def hinge_problem(power: float, radius: float = 1.0) -> dp.Problem:
    """Returns the promises of the q-hinge for unit rows and a ball."""
    return dp.losses.Hinge(power=power).problem(bound_x=1.0, radius=radius)


# -- noise ------------------------------------------------------------------------------------------------------------

OUTPUT_CASES = (
    (1.5, 1_000, 0.5 * 1_000**-0.5),
    (1.5, 10_000, 0.5 * 10_000**-0.5),
    (1.0, 1_000, 0.5 * 1_000**-0.75),
    (2.0, 1_000, 0.5 * 1_000**-0.5),
)
DIMS = (10, 100, 1_000, 10_000)
GRADIENT_CASES = ((1_000, 2.0), (10_000, 1.0), (10_000, 4.0), (100_000, 1.0))


def print_noise() -> None:
    """Prints std of the noise on the answer (output) and on the sum over 2G (gradient): published, and ours."""
    print(
        "output perturbation: std of the noise on the answer, q-hinge, B = R = 1, T = n, batches of 1, epsilon 1"
    )
    print(f"{'q':>4}{'n':>9}{'lr':>11}{'paper':>10}{'ours':>10}")
    for power, n, lr in OUTPUT_CASES:
        request = {
            "problem": hinge_problem(power),
            "n": n,
            "budget": dp.Budget(1.0, DELTA, "replace_one"),
            "dim": 20,
            "lr": lr,
        }
        plan = dp.HolderOutputSGD.plan(**request, epochs=1)
        constants = (power - 1, power, power, 1.0, 1.0)
        paper = output_sigma_paper(*constants, lr, n, n, 1.0, DELTA, "bounded")
        sigmas = "".join(f"{sigma:>10.4g}" for sigma in (paper, plan.noise_scale))
        print(f"{power:>4g}{n:>9}{lr:>11.3g}{sigmas}")
    print(
        "\ngradient perturbation: std of the noise on the sum over 2G, T = n, batches of 1 without replacement,"
    )
    print(f"delta = 1/n^2, replace_one\n{'n':>13}{'epsilon':>9}{'paper':>10}{'tight':>10}")
    for n, epsilon in GRADIENT_CASES:
        request = {
            "problem": hinge_problem(1.5),
            "n": n,
            "budget": dp.Budget(epsilon, n**-2.0, "replace_one"),
            "dim": 20,
        }
        paper = search_split_paper(n, 1, n, epsilon, n**-2.0).ratio_squared ** 0.5
        tight = dp.HolderSGD.plan(**request, batch_size=1, epochs=1, sampling="fixed")
        print(f"{n:>13}{epsilon:>9g}{paper:>10.4g}{tight.noise_multiplier / 2:>10.4g}")
    print(
        "\ndimension: n = 10,000, q = 1.5, batches of 10, balanced step sizes, epsilon 1, replace_one: expected norm of"
    )
    print(
        "the noise on the answer, and bounds on the expected excess risk (1 is what the zero model loses)"
    )
    print(f"{'d':>13}{'norm of noise':>15}{'output':>10}{'gradient':>10}")
    for dim in DIMS:
        request = {
            "problem": hinge_problem(1.5),
            "n": 10_000,
            "budget": dp.Budget(1.0, DELTA, "replace_one"),
            "dim": dim,
        }
        output = dp.HolderOutputSGD.plan(**request, batch_size=10, epochs=1)
        gradient = dp.HolderSGD.plan(**request, batch_size=10, epochs=10, average="uniform")
        norm = output.noise_scale * dim**0.5
        print(f"{dim:>13}{norm:>15.4g}{output.risk_bound:>10.4g}{gradient.risk_bound:>10.4g}")


# -- accuracy ---------------------------------------------------------------------------------------------------------

DIM, POWER, RADIUS, FLIPPED = 20, 1.5, 2.0, 0.15
SIZES, RUNS, BATCH_SIZE, EPOCHS = (500, 1_000, 2_000, 4_000, 8_000), 3, 50, 5
OUTPUT_BATCH_SIZE = 10
CLIPS, LRS, FACTORS = (0.3, 1.0, 3.0), (0.03, 0.1, 0.3, 1.0), (1.0, 3.0, 10.0)
FAILURE = 0.05
LOSS = dp.losses.Hinge(power=POWER)
BUDGET = dp.Budget(1.0, DELTA, "replace_one")


class Task:
    """Draws records of the task and scores weights on unseen ones."""

    def __init__(self, seed: int, unseen: int = 100_000) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._truth = nn.functional.normalize(
            torch.randn(DIM, generator=self._generator), dim=0
        ).double()
        self._unseen = self.draw(unseen)
        self.least = self._risk(fit_public(*self._unseen.tensors))

    def draw(self, n: int) -> TensorDataset:
        """Returns n records in double precision."""
        noise = torch.randn(n, DIM, generator=self._generator, dtype=torch.float64) / DIM**0.5
        kind, flip = torch.rand(2, n, generator=self._generator, dtype=torch.float64)
        sign = 2.0 * (kind < 0.5).double() - 1.0
        x = nn.functional.normalize(sign[:, None] * self._truth + noise)
        y = torch.where(flip < FLIPPED, -sign, sign)
        return TensorDataset(x, y[:, None])

    def excess(self, weight: Tensor) -> float:
        """Returns the risk of weights above the least one."""
        return self._risk(weight) - self.least

    def _risk(self, weight: Tensor) -> float:
        x, y = self._unseen.tensors
        return float(LOSS(x @ weight.detach().double().reshape(-1), y))


def fit_public(x: Tensor, y: Tensor) -> Tensor:
    """Returns the NON-PRIVATE minimizer in the ball, by projected gradient descent (Nesterov's)."""
    w = momentum = torch.zeros(DIM, dtype=torch.float64)
    for k in range(600):
        slope = LOSS.derivative(x @ momentum, y.squeeze(1))
        step = momentum - 1.0 * (x.T @ slope) / len(x)
        new = step * min(1.0, RADIUS / max(float(step.norm()), 1e-300))
        momentum, w = new + k / (k + 3) * (new - w), new
    return w


def output_plan(n: int, batch_size: int, lr: float | None = None) -> HolderOutputPlan:
    """Returns the plan of one epoch of a permutation."""
    problem = hinge_problem(POWER, RADIUS)
    return dp.HolderOutputSGD.plan(
        problem=problem, n=n, budget=BUDGET, dim=DIM, batch_size=batch_size, epochs=1, lr=lr
    )


def by_output(data: TensorDataset, batch_size: int, lr: float | None) -> Tensor:
    """Returns weights by output perturbation in one epoch of a permutation."""
    model = nn.Linear(DIM, 1, bias=False).double()
    with dp.HolderOutputSGD(
        model.parameters(), output_plan(len(data), batch_size, lr)
    ) as optimizer:
        for x, y in optimizer.loader(data):
            LOSS(model(x), y).backward()
            optimizer.step()
    return model.weight


def by_gradient(
    data: TensorDataset, batch_size: int, epochs: int, lr: float | None, sampling: str
) -> Tensor:
    """Returns weights by gradient perturbation, averaged over the iterates."""
    model = dp.attach(nn.Linear(DIM, 1, bias=False).double())
    nn.init.zeros_(model.weight)
    optimizer = dp.HolderSGD(
        model.parameters(),
        dp.HolderSGD.plan(
            problem=hinge_problem(POWER, RADIUS),
            n=len(data),
            budget=BUDGET,
            batch_size=batch_size,
            epochs=epochs,
            lr=lr,
            sampling=sampling,
            average="uniform",
            dim=DIM,
        ),
    )
    with optimizer:
        for x, y in optimizer.loader(data):
            optimizer.zero_grad()
            if len(x):
                LOSS(model(x), y).backward()
            optimizer.step()
    return model.weight


def by_opacus(data: TensorDataset, batch_size: int, clip: float, lr: float) -> Tensor:
    """Returns the average iterate of Opacus' DP-SGD with a constant clip, same sampling, noise and number of steps."""
    request = {
        "problem": hinge_problem(POWER, RADIUS),
        "n": len(data),
        "budget": BUDGET,
        "dim": DIM,
    }
    plan = dp.HolderSGD.plan(**request, batch_size=batch_size, epochs=EPOCHS)
    layer = nn.Linear(DIM, 1, bias=False).double()
    nn.init.zeros_(layer.weight)
    model = GradSampleModule(layer)
    optimizer = DPOptimizer(
        torch.optim.SGD(model.parameters(), lr=lr),
        noise_multiplier=plan.noise_multiplier,
        max_grad_norm=clip,
        expected_batch_size=batch_size,
    )
    mean = torch.zeros_like(layer.weight)
    for step in range(1, plan.steps + 1):
        mean += (layer.weight.detach() - mean) / step
        x, y = data[torch.rand(len(data)) < batch_size / len(data)]
        optimizer.zero_grad()
        LOSS(model(x), y).backward()
        optimizer.step()
        with torch.no_grad():
            layer.weight *= min(1.0, RADIUS / max(float(layer.weight.norm()), RADIUS))
    return mean


def theorem_lr(theorem: int, n: int) -> float:
    """Returns the step size of a utility theorem for T = n."""
    return lr_theorem(theorem, n, DIM, BUDGET.epsilon, DELTA, FAILURE, n, POWER - 1)


Fit = Callable[[TensorDataset], Tensor]


def best(task: Task, n: int, fits: dict[str, Fit]) -> tuple[str, Fit]:
    """Returns the fit of least excess risk on one data set, looked up on the unseen records: not private."""
    once = task.draw(n)
    return min(fits.items(), key=lambda item: task.excess(item[1](once)))


def methods(task: Task, n: int) -> dict[str, tuple[str, Fit]]:
    """Returns what is compared, with what was chosen by looking."""
    balanced = output_plan(n, OUTPUT_BATCH_SIZE).lr
    output = {
        f"lr x {factor:g}": lambda data, lr=factor * balanced: by_output(
            data, OUTPUT_BATCH_SIZE, lr
        )
        for factor in FACTORS
    }
    gradient = {
        f"lr {lr:g}": lambda data, lr=lr: by_gradient(data, BATCH_SIZE, EPOCHS, lr, "poisson")
        for lr in LRS
    }
    opacus = {
        f"clip {clip:g}, lr {lr:g}": lambda data, clip=clip, lr=lr: by_opacus(
            data, BATCH_SIZE, clip, lr
        )
        for clip in CLIPS
        for lr in LRS
    }
    return {
        "output, theorem 10": ("", lambda data: by_output(data, 1, theorem_lr(10, n))),
        "output, balanced": ("", lambda data: by_output(data, OUTPUT_BATCH_SIZE, None)),
        "output, tuned": best(task, n, output),
        "gradient, theorem 12": (
            "",
            lambda data: by_gradient(data, 1, 1, theorem_lr(12, n), "fixed"),
        ),
        "gradient, balanced": (
            "",
            lambda data: by_gradient(data, BATCH_SIZE, EPOCHS, None, "poisson"),
        ),
        "gradient, tuned": best(task, n, gradient),
        "Opacus, tuned": best(task, n, opacus),
        "not private": ("", lambda data: fit_public(*data.tensors)),
    }


def print_risk(runs: int, sizes: Sequence[int] = SIZES, unseen: int = 100_000) -> None:
    """Prints median excess risks per n, and their slopes on log-log."""
    task = Task(seed=0, unseen=unseen)
    print(
        f"excess risk, medians of {runs} runs; the best model in the ball has {task.least:.4f}, the zero model 1"
    )
    print(f"{'':<28}" + "".join(f"{n:>9}" for n in sizes) + f"{'slope':>9}")
    table: dict[str, list[float]] = {}
    for n in sizes:
        chosen = []
        for name, (choice, fit) in methods(task, n).items():
            found = [task.excess(fit(task.draw(n))) for _ in range(runs)]
            table.setdefault(name, []).append(statistics.median(found))
            chosen += [f"{name.split(',')[0]} {choice}"] if choice else []
        print(f"  tuned at n = {n}: {'; '.join(chosen)}", flush=True)
    for name, risks in table.items():
        slope = (
            np.polyfit(np.log(sizes), np.log(np.maximum(risks, 1e-9)), 1)[0]
            if len(sizes) > 1
            else np.nan
        )
        print(f"{name:<28}" + "".join(f"{risk:>9.4f}" for risk in risks) + f"{slope:>9.2f}")


# -- time -------------------------------------------------------------------------------------------------------------

Lap = tuple[
    float, float, float
]  # seconds per iteration: whole, without the loader, step() alone


def laps(
    batches: Iterator[Sequence[Tensor]],
    model: nn.Module,
    loss: Callable[..., Tensor],
    optimizer: torch.optim.Optimizer,
) -> Iterator[Lap]:
    """Yields the times of the iterations of a training loop."""
    while True:
        start = time.perf_counter()
        x, y = next(batches)
        loaded = time.perf_counter()
        optimizer.zero_grad()
        loss(model(x), y).backward()
        backward = time.perf_counter()
        optimizer.step()
        end = time.perf_counter()
        yield end - start, end - loaded, end - backward


def plain_batches(data: TensorDataset, batch_size: int) -> Iterator[list[Tensor]]:
    """Yields shuffled batches of a data set that is in double precision already, for ever."""
    while True:
        for index in torch.randperm(len(data)).split(batch_size):
            if len(index) == batch_size:
                yield [t.index_select(0, index) for t in data.tensors]


def endless(optimizer: dp.HolderOutputSGD, data: TensorDataset) -> Iterator[Sequence[Tensor]]:
    """Yields the batches of an optimizer's loader; its plan has more steps than anybody measures."""
    yield from optimizer.loader(data)


def compare_speed(
    name: str, build: Callable[[], nn.Module], data: TensorDataset, setup: dict, rounds: int
) -> None:
    """Prints median times of iterations of torch.optim.SGD and HolderOutputSGD, which take turns."""
    loss, size = setup["loss"], 256
    ours, plain = build().double(), build().double()
    plan = dp.HolderOutputSGD.plan(
        n=len(data), dim=ours, budget=BUDGET, batch_size=size, epochs=1_000, **setup["private"]
    )
    private = dp.HolderOutputSGD(
        ours.parameters(), plan, certify_convex=True
    )  # for its time only
    public = torch.optim.SGD(plain.parameters(), lr=private.lrs[0])
    double = TensorDataset(*(t.double() if t.is_floating_point() else t for t in data.tensors))
    loops = {
        "torch.optim.SGD": laps(plain_batches(double, size), plain, loss, public),
        "HolderOutputSGD": laps(endless(private, data), ours, loss, private),
    }
    found: dict[str, list[Lap]] = {kind: [] for kind in loops}
    for k in range(rounds + 1):
        for kind, loop in loops.items():
            turn = [next(loop) for _ in range(setup["turn"])]
            if k:  # the first round warms up
                found[kind].append(
                    tuple(statistics.median(column) for column in zip(*turn, strict=True))
                )
    medians = {
        kind: [statistics.median(column) for column in zip(*each, strict=True)]
        for kind, each in found.items()
    }
    a, b = medians["torch.optim.SGD"], medians["HolderOutputSGD"]
    for label, x, y in zip(("with the loader", "without it", "step() alone"), a, b, strict=True):
        print(
            f"{name:<24}{label:<17}{1e6 * x:>10.1f}{1e6 * y:>10.1f}{1e6 * (y - x):>+10.1f}{y / x:>9.2f}"
        )


def print_speed(rounds: int, plan_n: int = 10**6) -> None:
    """Prints times per iteration in microseconds, and of planning in seconds."""
    print(f"{'microseconds':<41}{'SGD':>10}{'ours':>10}{'more':>10}{'ratio':>9}")
    logistic = dp.losses.Logistic()
    rows = nn.functional.normalize(torch.randn(256 * 40, 1000))
    labels = torch.sign(torch.randn(len(rows), 1))
    compare_speed(
        "logistic d=1000 b=256",
        lambda: nn.Linear(1000, 1, bias=False),
        TensorDataset(rows, labels),
        {
            "loss": logistic,
            "private": {"problem": logistic.problem(bound_x=1.0, radius=1.0)},
            "turn": 40,
        },
        rounds,
    )
    promises = dp.Problem(
        holder_exponent=1, holder_constant=1.0, grad_at_zero=1.0, lipschitz=1.0, radius=1.0
    )
    compare_speed(
        "784-512-256-10 b=256",
        lambda: nn.Sequential(
            nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 10)
        ),
        TensorDataset(torch.randn(256 * 10, 784), torch.randint(10, (2560,))),
        {
            "loss": nn.functional.cross_entropy,
            "private": {"problem": promises, "gradient_error": 1e-9},
            "turn": 5,
        },
        rounds,
    )
    for sampling in ("shuffled", "fixed"):
        times = []
        for _ in range(3):
            start = time.perf_counter()
            dp.HolderOutputSGD.plan(
                problem=hinge_problem(POWER),
                n=plan_n,
                budget=dp.Budget(1.0, 1e-8, "replace_one"),
                dim=20,
                sampling=sampling,
                epochs=1,
            )
            times.append(time.perf_counter() - start)
        print(f"planning, n = T = {plan_n:.0e}, {sampling}: {statistics.median(times):.2f} s")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--risk", action="store_true", help="excess risk against n")
    parser.add_argument("--runs", type=int, default=RUNS, help="of --risk")
    parser.add_argument("--speed", action="store_true", help="times")
    parser.add_argument("--rounds", type=int, default=9, help="of --speed")
    parser.add_argument("--smoke", action="store_true", help="--risk and --speed, tiny")
    args = parser.parse_args(argv)
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    warnings.filterwarnings(
        "ignore", message="noise buries the signal"
    )  # grids and published steps go so far
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {platform.machine()}, one thread\n")
    if args.smoke:
        print_risk(1, (200,), unseen=2_000)
        print_speed(1, plan_n=1000)
        return
    if args.risk:
        print_risk(args.runs)
    if args.speed:
        print_speed(args.rounds)
    if not (args.risk or args.speed):
        print_noise()


if __name__ == "__main__":
    main()
