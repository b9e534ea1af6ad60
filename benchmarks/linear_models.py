"""Private linear models on four data sets, beside diffprivlib and Opacus, scikit-learn, and a trivial answer.

    python benchmarks/linear_models.py                    # all sets and methods, 10 seeds: about an hour on one core
    python benchmarks/linear_models.py --seeds 3 --sets adult --only ours
    python benchmarks/linear_models.py --quick            # one seed, 1,000 records, one epsilon: a smoke test
    python benchmarks/linear_models.py --large            # n = 1e6, d = 100: seconds and memory of a fit
    python benchmarks/linear_models.py --slopes           # excess risk of output perturbation against n

add_remove; delta = 1e-6 (diamonds: 1e-5), 0 where it says "pure"; the unit is a row. Medians of seeds: adult and
diamonds have a fixed split and fresh noise, breast cancer and digits (is it >= 5?) a new split per seed, too.

Nothing of ours is tuned: all by default, as the estimators have it. Opacus' DP-SGD is tuned by looking: full batches,
average of the last half of its steps, the best of 36 settings (clip, step size, steps) by the test score itself, on the
first seed; what a private search would cost is not charged. Its noise is by our accountant: in full batches that is
exact. diffprivlib is by default, pure (it has no delta), in a virtual environment of its own that `pip` fills; without
network it is left out, and this is said. `--environment` keeps it in a folder.

Data: `examples/data` (adult), scikit-learn (breast cancer, digits), `diamonds.csv` in the folder of the installed
package plotnine (which is not imported), else diamonds are left out. All bounds, centers and scales are constants.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import importlib.util
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import venv
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from opacus import GradSampleModule
from opacus.optimizers import DPOptimizer
from sklearn.datasets import load_breast_cancer, load_digits
from sklearn.linear_model import LinearRegression
from sklearn.linear_model import LogisticRegression as PublicRegression
from sklearn.metrics import log_loss, r2_score, roc_auc_score
from torch import nn
from torch.utils.data import TensorDataset

import torch_dpsco as dp
from torch_dpsco.accounting.calibrate import noise_multiplier
from torch_dpsco.estimators import HuberRegressor, LogisticRegression, Ridge

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from adult import load_adult

Array = NDArray[np.float64]
EPSILONS, SEEDS, QUICK_ROWS = (0.1, 0.5, 1.0, 3.0, 8.0), 10, 1_000
CLIPS, LRS, STEPS = (
    (0.1, 0.3, 1.0),
    (0.5, 2.0, 8.0, 32.0),
    (30, 100, 300),
)  # of the row bound; over smoothness and clip
PUBLIC_C = (
    10.0  # of scikit-learn: a fixed number, near the best of 1, 10, ..., 1e4 on the small sets
)

# -- data -------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Task:
    """Rows with their constant column, within a public bound, and targets: 0 or 1, or real within bound_y."""

    name: str
    rows: Array
    targets: Array
    test_rows: Array
    test_targets: Array
    bound_x: float
    delta: float = 1e-6
    bound_y: float | None = None

    def few(self, count: int) -> Task:
        """Returns the task with the first records only."""
        return dataclasses.replace(self, rows=self.rows[:count], targets=self.targets[:count])


# Typical values and spreads of the 30 measurements, rounded to two digits. They were computed from these very records,
# which a private analysis must not do: here they stand for what a physician knows, alike for all mechanisms.
CANCER_CENTER = [
    *(
        14.0,
        19.0,
        92.0,
        650.0,
        0.096,
        0.1,
        0.089,
        0.049,
        0.18,
        0.063,
        0.41,
        1.2,
        2.9,
        40.0,
        0.007,
        0.025,
        0.032,
        0.012,
    ),
    *(0.021, 0.0038, 16.0, 26.0, 110.0, 880.0, 0.13, 0.25, 0.27, 0.11, 0.29, 0.084),
]
CANCER_SCALE = [
    *(
        3.5,
        4.3,
        24.0,
        350.0,
        0.014,
        0.053,
        0.08,
        0.039,
        0.027,
        0.0071,
        0.28,
        0.55,
        2.0,
        45.0,
        0.003,
        0.018,
        0.03,
    ),
    *(0.0062, 0.0083, 0.0026, 4.8, 6.1, 34.0, 570.0, 0.023, 0.16, 0.21, 0.066, 0.062, 0.018),
]
CUTS = ("Fair", "Good", "Very Good", "Premium", "Ideal")
COLORS, CLARITIES = "DEFGHIJ", ("I1", "SI2", "SI1", "VS2", "VS1", "VVS2", "VVS1", "IF")


def adult() -> Task:
    """Returns the 65 features of examples/adult.py and a 1."""
    data = load_adult()
    rows, test = (np.column_stack([x.double().numpy(), np.ones(len(x))]) for x in data[::2])
    labels, test_labels = (y.double().numpy() for y in data[1::2])
    return Task(
        "adult", rows, labels, test, test_labels, 3.61
    )  # 5 numbers, 7 groups, a 1: sqrt(13)


def unit_rows(name: str, features: Array, labels: Array, seed: int) -> Task:
    """Returns rows with a 1, each divided by its norm, and a split of the seed."""
    rows = np.column_stack([features, np.ones(len(features))])
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    order = np.random.default_rng(seed).permutation(len(rows))
    test, train = np.split(order, [len(rows) // 5])
    return Task(name, rows[train], labels[train], rows[test], labels[test], 1.0)


def breast_cancer(seed: int) -> Task:
    """Returns 30 measurements in public units."""
    features, labels = load_breast_cancer(return_X_y=True)
    return unit_rows(
        "breast cancer", (features - CANCER_CENTER) / CANCER_SCALE, labels.astype(float), seed
    )


def digits(seed: int) -> Task:
    """Returns 64 pixels in [0, 1], and whether the digit is 5 or more."""
    features, labels = load_digits(return_X_y=True)
    return unit_rows("digits", features / 16.0, (labels >= 5).astype(float), seed)


def diamonds() -> Task | None:
    """Returns 22 centered features, all constants public, and price/1000 - 5; None where plotnine is not installed."""
    found = importlib.util.find_spec("plotnine")  # of the package itself: nothing of it is run
    path = (
        Path(found.origin).parent / "data" / "diamonds.csv" if found and found.origin else None
    )
    if path is None or not path.exists():
        return None
    with path.open(encoding="utf-8", newline="") as file:
        records = list(csv.DictReader(file))
    rows, targets = (
        np.array([diamond(r) for r in records]),
        np.array([float(r["price"]) / 1000 - 5 for r in records]),
    )
    test, train = np.split(np.random.default_rng(0).permutation(len(rows)), [len(rows) // 5])
    return Task(
        "diamonds", rows[train], targets[train], rows[test], targets[test], 2.2, 1e-5, 15.0
    )


def diamond(record: dict[str, str]) -> list[float]:
    """Returns the features of one record."""
    carat = (min(max(float(record["carat"]), 0.0), 3.0) - 1) / 2
    depth = (min(max(float(record["depth"]), 55.0), 70.0) - 62) / 8
    table = (min(max(float(record["table"]), 50.0), 70.0) - 58) / 12
    levels = ((record["cut"], CUTS), (record["color"], COLORS), (record["clarity"], CLARITIES))
    return [
        carat,
        carat**2,
        depth,
        table,
        *(float(x == level) for x, some in levels for level in some[1:]),
        1.0,
    ]


def tasks(name: str, seeds: int) -> list[Task]:
    """Returns the tasks of all seeds: one object where the split is fixed."""
    if name in ("adult", "diamonds"):
        task = adult() if name == "adult" else diamonds()
        return [task] * seeds if task else []
    return [
        breast_cancer(seed) if name == "breast cancer" else digits(seed) for seed in range(seeds)
    ]


SETS = ("adult", "diamonds", "breast cancer", "digits")

# -- methods: a task and epsilon to weights ----------------------------------------------------------------------------

Fit = Callable[[Task, float], Array]


def by_estimator(regressor: type[Ridge | HuberRegressor] = Ridge, **options: object) -> Fit:
    """Returns an estimator of ours, all by default but for what is named."""

    def fit(task: Task, epsilon: float) -> Array:
        common = {
            "delta": task.delta,
            "adjacency": "add_remove",
            "n": len(task.rows),
            "bound_x": task.bound_x,
            "fit_intercept": False,
        } | options
        if task.bound_y is None:
            model = LogisticRegression(epsilon=epsilon, classes=(0.0, 1.0), **common)
        else:
            model = regressor(epsilon=epsilon, bound_y=task.bound_y, **common)
        return np.asarray(model.fit(task.rows, task.targets).coef_).reshape(-1)

    return fit


def ours(task: Task) -> dict[str, Fit]:
    """Returns what is compared; all but the first of a budget are there to show what the default is worth."""
    if task.bound_y is not None:
        return {
            "boosted AdaSSP (default of Ridge)": by_estimator(),
            "AdaSSP": by_estimator(mechanism="adassp"),
            "objective, Huber's loss": by_estimator(HuberRegressor),
            "output, pure": by_estimator(delta=0.0),
        }
    return {
        "objective (default)": by_estimator(),
        "objective, not clipped": by_estimator(residual_clip=None),
        "noisy gradient descent": by_estimator(mechanism="noisy_gd"),
        "output": by_estimator(mechanism="output", residual_clip=None),
        "objective, pure (default)": by_estimator(delta=0.0),
        "output, pure": by_estimator(mechanism="output", residual_clip=None, delta=0.0),
    }


def by_opacus(task: Task, epsilon: float, clip: float, lr: float, steps: int) -> Array:
    """Returns the average of the last half of the iterates of Opacus' DP-SGD on full batches."""
    rows, targets = (
        torch.from_numpy(task.rows).float(),
        torch.from_numpy(task.targets).float()[:, None],
    )
    noise = noise_multiplier(
        epsilon, task.delta, design=dp.Full(len(rows)), steps=steps, adjacency="add_remove"
    )
    layer = nn.Linear(rows.shape[1], 1, bias=False)
    nn.init.zeros_(layer.weight)
    model = GradSampleModule(layer)
    loss = nn.MSELoss() if task.bound_y else nn.BCEWithLogitsLoss()
    slope, curvature = (2 * task.bound_y, 2.0) if task.bound_y else (1.0, 0.25)
    inner = torch.optim.SGD(model.parameters(), lr=lr / (curvature * task.bound_x**2 * clip))
    norm = clip * slope * task.bound_x
    optimizer = DPOptimizer(
        inner, noise_multiplier=noise, max_grad_norm=norm, expected_batch_size=len(rows)
    )
    mean = torch.zeros_like(layer.weight)
    for step in range(steps):
        optimizer.zero_grad()
        loss(model(rows), targets).backward()
        optimizer.step()
        if step >= steps // 2:
            mean += layer.weight.detach() / (steps - steps // 2)
    return mean[0].double().numpy()


def tuned_opacus(task: Task, epsilon: float, quick: bool) -> tuple[str, Fit]:
    """Returns Opacus at the setting of the best test score on a task: NOT private, and not charged."""
    clips, lrs, steps = (CLIPS[:1], LRS[:2], STEPS[:1]) if quick else (CLIPS, LRS, STEPS)
    settings = [(clip, lr, count) for clip in clips for lr in lrs for count in steps]
    best = max(settings, key=lambda setting: score(task, by_opacus(task, epsilon, *setting))[-1])
    return "clip {:g}, lr {:g}, {} steps".format(*best), lambda other, budget: by_opacus(
        other, budget, *best
    )


def public(task: Task) -> Array:
    """Returns the NON-PRIVATE weights of scikit-learn: lbfgs, or least squares."""
    if task.bound_y is not None:
        return np.asarray(
            LinearRegression(fit_intercept=False).fit(task.rows, task.targets).coef_
        )
    model = PublicRegression(C=PUBLIC_C, max_iter=5_000, fit_intercept=False)
    return np.asarray(model.fit(task.rows, task.targets).coef_)[0]


# -- diffprivlib, in an environment of its own -------------------------------------------------------------------------

PEER = ("diffprivlib==0.6.6", "scikit-learn<1.7")
PEER_SCRIPT = """
import json, sys, warnings
import numpy as np
from diffprivlib.models import LinearRegression, LogisticRegression
warnings.simplefilter("ignore")
answers = []
for job in json.load(open(sys.argv[1])):
    data = np.load(job["file"])
    if job["bound_y"] is None:
        model = LogisticRegression(epsilon=job["epsilon"], data_norm=job["bound_x"], fit_intercept=False)
        model.fit(data["rows"], data["targets"])
        answers.append(model.coef_[0].tolist())
    else:  # its own intercept in place of the constant column; bounds of each feature
        bounds = (data["low"], data["high"])
        model = LinearRegression(epsilon=job["epsilon"], bounds_X=bounds, bounds_y=(-job["bound_y"], job["bound_y"]))
        model.fit(data["rows"][:, :-1], data["targets"])
        answers.append([*np.ravel(model.coef_).tolist(), float(np.ravel(model.intercept_)[0])])
json.dump(answers, open(sys.argv[2], "w"))
"""


def peer_python(folder: Path) -> tuple[Path | None, str]:
    """Returns the interpreter of an environment with diffprivlib, made if it is not there; or None, and why."""
    python = folder / "bin" / "python"
    try:
        if not python.exists():
            venv.create(folder, with_pip=True)
        check = [str(python), "-c", "import diffprivlib"]
        if subprocess.run(check, capture_output=True, check=False).returncode:
            command = [str(python), "-m", "pip", "install", "--quiet", *PEER]
            subprocess.run(command, check=True, capture_output=True, timeout=600)
    except (OSError, subprocess.SubprocessError) as error:
        return None, f"no environment with {PEER[0]}: {type(error).__name__}"
    return python, ""


def by_diffprivlib(python: Path, jobs: Sequence[tuple[Task, float]]) -> list[Array]:
    """Returns the weights of all jobs, in one process of the environment."""
    with tempfile.TemporaryDirectory() as folder:
        described = []
        for number, (task, epsilon) in enumerate(jobs):
            path = Path(folder) / f"{number}.npz"
            low = np.concatenate(
                [[-0.5, 0.0, -0.875, -2 / 3], np.zeros(17)]
            )  # of diamonds' features
            high = np.concatenate([[1.0, 1.0, 1.0, 1.0], np.ones(17)])
            np.savez(path, rows=task.rows, targets=task.targets, low=low, high=high)
            settings = {"epsilon": epsilon, "bound_x": task.bound_x, "bound_y": task.bound_y}
            described.append({"file": str(path), **settings})
        given, answer = Path(folder) / "jobs.json", Path(folder) / "answers.json"
        given.write_text(json.dumps(described), encoding="utf-8")
        subprocess.run([str(python), "-c", PEER_SCRIPT, str(given), str(answer)], check=True)
        return [np.array(weights) for weights in json.loads(answer.read_text(encoding="utf-8"))]


# -- scores and tables ------------------------------------------------------------------------------------------------


def score(task: Task, weights: Array) -> tuple[float, ...]:
    """Returns (R2,), or (accuracy, AUC, -log-loss), on the test set: more is better."""
    scores = task.test_rows @ weights
    if task.bound_y is not None:
        return (float(r2_score(task.test_targets, scores)),)
    chance = 1 / (1 + np.exp(-np.clip(scores, -500, 500)))
    right = float(((scores > 0) == (task.test_targets > 0.5)).mean())
    return (
        right,
        float(roc_auc_score(task.test_targets, scores)),
        -float(log_loss(task.test_targets, chance)),
    )


def compare(
    given: list[Task], epsilons: Sequence[float], only: str, peer: Path | None, quick: bool
) -> None:
    """Prints the medians over seeds of all methods on a data set."""
    task = given[0]
    found: dict[str, dict[float, list[tuple[float, ...]]]] = {}
    choices: dict[float, str] = {}
    if only in ("", "ours"):
        for name, fit in ours(task).items():
            found[name] = {
                epsilon: [score(t, fit(t, epsilon)) for t in given] for epsilon in epsilons
            }
    if only in ("", "opacus"):
        found["Opacus, tuned by looking"] = {}
        for epsilon in epsilons:
            choices[epsilon], fit = tuned_opacus(task, epsilon, quick)
            found["Opacus, tuned by looking"][epsilon] = [
                score(t, fit(t, epsilon)) for t in given
            ]
    if only in ("", "diffprivlib") and peer is not None:
        answers = iter(
            by_diffprivlib(peer, [(t, epsilon) for epsilon in epsilons for t in given])
        )
        found["diffprivlib, pure"] = {
            epsilon: [score(t, next(answers)) for t in given] for epsilon in epsilons
        }
    best = [
        statistics.median(column)
        for column in zip(*(score(t, public(t)) for t in given), strict=True)
    ]
    print(
        f"\n{task.name}: n = {len(task.rows):,}, d = {task.rows.shape[1]}, delta = {task.delta:g}, {len(given)} seeds"
    )
    titles = ("R2",) if task.bound_y is not None else ("accuracy", "AUC", "log-loss")
    for place, title in enumerate(titles):
        print(
            f"{title + ' at epsilon =':<28}" + "".join(f"{epsilon:>9g}" for epsilon in epsilons)
        )
        for name, by_epsilon in found.items():
            medians = [
                statistics.median(s[place] for s in by_epsilon[epsilon]) for epsilon in epsilons
            ]
            print(f"{name:<28}" + "".join(shown(m, title) for m in medians))
        print(f"{'not private':<28}{shown(best[place], title)}")
    print_gap(found, epsilons)
    for epsilon, choice in choices.items():
        print(f"Opacus at epsilon = {epsilon:g}: {choice}")


def shown(value: float, title: str) -> str:
    """Returns a score as it is printed: log-loss without its sign, absurd values in short."""
    value = -value if title == "log-loss" else value
    return f"{value:>9.4f}" if abs(value) < 100 else f"{value:>9.0e}"


def print_gap(
    found: dict[str, dict[float, list[tuple[float, ...]]]], epsilons: Sequence[float]
) -> None:
    """Prints the medians over seeds of (our default - Opacus) in the last score, on the same split."""
    if "Opacus, tuned by looking" not in found or len(found) == 1:
        return
    first, peer = next(iter(found.values())), found["Opacus, tuned by looking"]
    gaps = [
        statistics.median(a[-1] - b[-1] for a, b in zip(first[e], peer[e], strict=True))
        for e in epsilons
    ]
    print(f"{'ahead of Opacus by (paired)':<28}" + "".join(f"{gap:>+9.4f}" for gap in gaps))


def seconds(run: Callable[[], object], repeats: int = 3) -> float:
    """Returns the median time of a run, after one that does not count."""
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def print_time(task: Task) -> None:
    """Prints the time of our default fit beside scikit-learn's."""
    default = next(iter(ours(task).values()))
    theirs, private = seconds(lambda: public(task)), seconds(lambda: default(task, 1.0))
    solver = "least squares" if task.bound_y is not None else "lbfgs"
    print(
        f"time of a fit at epsilon = 1: {private:.2f} s; scikit-learn ({solver}): {theirs:.2f} s"
    )


# -- large ------------------------------------------------------------------------------------------------------------


def large(rows: int, dim: int) -> tuple[float, float, float]:
    """Returns seconds, peak memory above the input in MiB, and accuracy of a logistic fit at epsilon = 1."""
    generator = torch.Generator().manual_seed(0)
    features, truth = torch.empty(rows, dim), torch.randn(dim, generator=generator)
    labels = torch.empty(rows)
    for start in range(
        0, rows, 10_000
    ):  # so that drawing the data needs no more memory than the data
        block = features[start : start + 10_000]
        block.copy_(nn.functional.normalize(torch.randn(block.shape, generator=generator)))
        labels[start : start + 10_000] = (
            torch.rand(len(block), generator=generator) < (block @ truth).sigmoid()
        ).float()
    common = {
        "epsilon": 1.0,
        "adjacency": "add_remove",
        "bound_x": 1.0,
        "classes": (0.0, 1.0),
        "fit_intercept": False,
    }
    LogisticRegression(n=1_000, **common).fit(
        features[:1_000], labels[:1_000]
    )  # what is imported late, now
    before = resident()
    start_time = time.perf_counter()
    model = LogisticRegression(n=rows, **common).fit(features, labels)
    elapsed = time.perf_counter() - start_time
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - before
    weights = torch.from_numpy(np.asarray(model.coef_)[0]).float()
    right = float((((features @ weights) > 0) == (labels > 0.5)).float().mean())
    return elapsed, peak, right


def resident() -> float:
    """Returns the memory that the process has now, in MiB."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


# -- slopes -----------------------------------------------------------------------------------------------------------

SLOPE_DIM, SLOPE_SIZES, SLOPE_SEEDS = 5, tuple(2**k for k in range(8, 15)), 50


def excess(kind: str, n: int) -> Iterator[float]:
    """Yields excess risks on the data of fresh releases; the records are the unit vectors, target 0, in equal parts.

    Pinball's minimizer is at the kink, 0; Huber's is 0, too, within the quadratic part. So the excess is that of noise.
    """
    rows = torch.eye(SLOPE_DIM)[torch.arange(n) % SLOPE_DIM]
    data = TensorDataset(rows, torch.zeros(n))
    smooth, strong = "smooth" in kind, "strongly" in kind
    loss = dp.losses.Huber(threshold=1.0) if smooth else dp.losses.Pinball(quantile=0.5)
    norms, radius = dp_noise(n), 1.0
    lipschitz = 1.0 if smooth else 0.5
    if strong:
        lam = 1.0
    elif smooth:
        lam = 2 * (lipschitz**2 * norms[1] / (radius**2 * n**2)) ** (1 / 3)
    else:
        lam = 2 * lipschitz / radius * math.sqrt(norms[0] / n)
    for _ in range(SLOPE_SEEDS):
        layer = nn.Linear(SLOPE_DIM, 1, bias=False).double()
        plan = dp.OutputPerturbation.plan(
            model=layer,
            loss=loss,
            n=n,
            budget=SLOPE_BUDGET,
            bound_x=1.0,
            bound_y=1.0,
            reg=lam * n,
        )
        optimizer = dp.OutputPerturbation(layer.parameters(), plan)
        optimizer.solve(data)
        optimizer.finalize()
        w = layer.weight.detach()[0]
        risk = loss.value(rows.double() @ w, torch.zeros(n, dtype=torch.float64)).mean()
        yield float(risk + (lam / 2 * (w @ w) if strong else 0.0))


SLOPE_BUDGET = dp.Budget(8.0, 1e-5, adjacency="replace_one")


def dp_noise(n: int) -> tuple[float, float]:
    """Returns E|z| and E|z|^2 of the noise for sensitivity 1, as the published schedules have them."""
    from torch_dpsco.algorithms.output_sgd_numbers import noise_norms

    return noise_norms(SLOPE_DIM, SLOPE_BUDGET.epsilon, SLOPE_BUDGET.delta)


def print_slopes(sizes: Sequence[int]) -> None:
    """Prints mean excess risks against n, and slopes on log-log beside those of the theory."""
    theory = {
        "strongly convex": -1.0,
        "smooth, strongly convex": -2.0,
        "convex": -0.5,
        "smooth, convex": -2 / 3,
    }
    print(
        f"{'excess risk, 50 releases':<26}"
        + "".join(f"{n:>10,}" for n in sizes)
        + "   slope   theory"
    )
    for kind, expected in theory.items():
        means = [statistics.fmean(excess(kind, n)) for n in sizes]
        slope = float(np.polyfit(np.log(sizes), np.log(means), 1)[0])
        print(
            f"{kind:<26}"
            + "".join(f"{mean:>10.2g}" for mean in means)
            + f"{slope:>8.2f}{expected:>9.2f}"
        )


def main(argv: Sequence[str] | None = None) -> None:
    """Prints what the options ask for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="one seed, 1,000 records, epsilon = 1"
    )
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=SETS)
    parser.add_argument("--only", choices=("ours", "opacus", "diffprivlib"), default="")
    parser.add_argument("--epsilons", nargs="+", type=float, default=EPSILONS)
    parser.add_argument(
        "--environment",
        type=Path,
        help="folder of the environment of diffprivlib; default: temporary",
    )
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--slopes", action="store_true")
    args = parser.parse_args(argv)
    warnings.filterwarnings("ignore", message="Full backward hook", category=UserWarning)
    if args.large:
        elapsed, memory, right = large(*((10_000, 10) if args.quick else (10**6, 100)))
        print(
            f"a logistic fit: {elapsed:.1f} s, {memory:.0f} MiB above the input, accuracy {right:.4f}"
        )
    elif args.slopes:
        print_slopes(SLOPE_SIZES[:2] if args.quick else SLOPE_SIZES)
    else:
        with tempfile.TemporaryDirectory() as folder:
            print_sets(args, Path(folder))


def print_sets(args: argparse.Namespace, folder: Path) -> None:
    """Prints the comparison on each set."""
    peer, reason = None, "not asked for"
    if not args.quick and args.only in ("", "diffprivlib"):
        peer, reason = peer_python(args.environment or folder)
    if peer is None:
        print(f"diffprivlib is left out: {reason}")
    for name in args.sets:
        given = tasks(name, 1 if args.quick else args.seeds)
        if not given:
            print(f"\n{name} is left out: plotnine, which has its file, is not installed")
            continue
        given = [task.few(QUICK_ROWS) for task in given] if args.quick else given
        compare(
            given, EPSILONS[2:3] if args.quick else args.epsilons, args.only, peer, args.quick
        )
        if not args.quick and args.only in ("", "ours"):
            print_time(given[0])


if __name__ == "__main__":
    main()
