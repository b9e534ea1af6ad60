"""Accuracy of small nets where nobody tunes anything: dp.fit, make_private, Opacus as in its example and tuned.

    python benchmarks/nets.py                                   # digits, cancer, adult; five runs of each
    python benchmarks/nets.py --sets digits --epsilons 3 --seeds 2
    python benchmarks/nets.py --sets fashion --fashion FOLDER   # of its IDX files; hours with --nets CNN
    python benchmarks/nets.py --smoke                           # tiny numbers: shows that it runs

Medians of runs, which are fresh weights, noise and batches, on a fixed test set; delta is 1e-5, zero_out (ours) and
add_remove (Opacus, whose epsilon is the same number).

* not private: Adam, 40 passes in batches of 64.
* dp.fit: `dp.fit(model, dataset=..., loss_fn=..., epsilon=..., delta=...)`, and nothing else.
* make_private: around SGD of lr 0.1 and a loader of batches of 64, which are kept; and with recipe=True.
* Opacus: as in its MNIST example (SGD of lr 0.1, clip 1, batches of 64, 10 passes), by make_private_with_epsilon; and
  tuned: the best of 9 settings by the test score of one run each, which is not private.

What the sets were used for: the numbers of `NetSGD` were chosen on digits and adult; cancer and fashion were looked at
once.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import gzip
import itertools
import math
import platform
import statistics
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from linear_models import load_adult
from opacus import PrivacyEngine
from sklearn.datasets import load_breast_cancer, load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import torch_dpsco as dp

EPSILONS, SEEDS, DELTA = (1.0, 3.0, 8.0), 5, 1e-5
LRS, CLIPS, PASSES = (0.5, 2.0, 8.0), (0.05, 0.2, 1.0), 20
GHOST = 20_000
LOSS = nn.CrossEntropyLoss()


@dataclass(frozen=True, eq=False)
class Case:
    """A net, and records to train and to test it."""

    name: str
    build: Callable[[], nn.Module]
    train: TensorDataset
    test: tuple[Tensor, Tensor]

    def score(self, model: nn.Module) -> float:
        """Returns the accuracy on the test set."""
        features, labels = self.test
        with torch.no_grad():
            return float((model.eval()(features).argmax(1) == labels).float().mean())


def perceptron(inputs: int, classes: int) -> nn.Module:
    """Returns a net with one hidden layer."""
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, classes))


def convolutions(size: int) -> nn.Module:
    """Returns two convolutions with GroupNorm and a head of 10 classes, for square images."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.GroupNorm(4, 16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, 2, 1),
        nn.GroupNorm(8, 32),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(min(7, size // 2)),
        nn.Flatten(),
        nn.Linear(32 * min(7, size // 2) ** 2, 10),
    )


def split(name: str, build: Callable[[], nn.Module], x: Tensor, y: Tensor) -> Case:
    """Returns a case whose test set is a fixed fifth of the records."""
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(y)))
    test, train = order[: len(y) // 5], order[len(y) // 5 :]
    return Case(name, build, TensorDataset(x[train], y[train]), (x[test], y[test]))


def digits() -> list[Case]:
    """Handwritten digits, 8 x 8."""
    rows, targets = load_digits(return_X_y=True)
    images, labels = torch.tensor(rows / 16).float().view(-1, 1, 8, 8), torch.tensor(targets)
    return [
        split("digits, MLP", lambda: perceptron(64, 10), images, labels),
        split("digits, CNN", lambda: convolutions(8), images, labels),
    ]


def cancer() -> list[Case]:
    """Breast cancer: 30 measurements, over public numbers, the orders of magnitude of such measurements."""
    rows, targets = load_breast_cancer(return_X_y=True)
    scales = np.array([15, 20, 100, 700, 0.1, 0.1, 0.1, 0.05, 0.2, 0.06] * 3)
    scales[10:20] = [0.5, 1, 3, 40, 0.01, 0.03, 0.03, 0.01, 0.02, 0.004]
    features = torch.tensor(rows / scales - 1.0).float().clamp(-3.0, 3.0)
    return [split("cancer, MLP", lambda: perceptron(30, 2), features, torch.tensor(targets))]


def adult() -> list[Case]:
    """Incomes of 32,561 people, the 65 features of examples/adult.py."""
    x, y, test, test_labels = load_adult()
    label = [(side.flatten() > 0).long() for side in (y, test_labels)]
    build: Callable[[], nn.Module] = lambda: perceptron(x.shape[1], 2)  # noqa: E731
    return [
        Case("adult, MLP", build, TensorDataset(x.float(), label[0]), (test.float(), label[1]))
    ]


def fashion(folder: Path) -> list[Case]:
    """Fashion-MNIST, 60,000 images of 28 x 28."""

    def read(name: str, start: int) -> np.ndarray:
        with gzip.open(folder / name) as file:
            return np.frombuffer(file.read(), np.uint8, offset=start)

    def images(name: str) -> Tensor:
        return torch.tensor(read(name, 16).reshape(-1, 1, 28, 28) / 127.5 - 1.0).float()

    train = TensorDataset(
        images("train-images-idx3-ubyte.gz"),
        torch.tensor(read("train-labels-idx1-ubyte.gz", 8)).long(),
    )
    labels = torch.tensor(read("t10k-labels-idx1-ubyte.gz", 8)).long()
    test = images("t10k-images-idx3-ubyte.gz"), labels
    return [
        Case("fashion, MLP", lambda: perceptron(784, 10), train, test),
        Case("fashion, CNN", lambda: convolutions(28), train, test),
    ]


# -- ways to train ----------------------------------------------------------------------------------------------------


def not_private(case: Case, epsilon: float) -> float:
    """Adam, 40 passes."""
    model = case.build()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(40):
        for x, y in DataLoader(case.train, 64, shuffle=True):
            optimizer.zero_grad()
            LOSS(model(x), y).backward()
            optimizer.step()
    return case.score(model)


def by_fit(case: Case, epsilon: float) -> float:
    """One call."""
    return case.score(
        dp.fit(
            case.build(),
            dataset=case.train,
            loss_fn=LOSS,
            epsilon=epsilon,
            delta=DELTA,
            progress=False,
        )
    )


def by_make_private(case: Case, epsilon: float, recipe: bool = False) -> float:
    """A loop that exists."""
    model = case.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(case.train, 64, shuffle=True)
    private, steps, batches = dp.make_private(
        model,
        optimizer,
        loader,
        epsilon=epsilon,
        delta=DELTA,
        recipe=recipe,
        verbose=False,
    )
    while not steps.finalized:
        for x, y in batches:
            steps.zero_grad()
            LOSS(private(x), y).backward()
            steps.step()
            if steps.finalized:
                break
    return case.score(private)


def by_recipe(case: Case, epsilon: float) -> float:
    """A loop that exists, with the numbers of NetSGD."""
    return by_make_private(case, epsilon, recipe=True)


def by_opacus(
    case: Case,
    epsilon: float,
    lr: float = 0.1,
    clip: float = 1.0,
    batch_size: int = 64,
    passes: int = 10,
    momentum: float = 0.0,
) -> float:
    """Opacus, as in its MNIST example; a grid on many records by ghost clipping: the same steps, sooner."""
    plain = case.build()
    ghost = momentum > 0.0 and len(case.train) > GHOST
    model, optimizer, *criterion, loader = PrivacyEngine().make_private_with_epsilon(
        module=plain,
        optimizer=torch.optim.SGD(plain.parameters(), lr, momentum=momentum),
        criterion=LOSS,
        grad_sample_mode="ghost" if ghost else "hooks",
        data_loader=DataLoader(case.train, batch_size, shuffle=True),
        target_epsilon=epsilon,
        target_delta=DELTA,
        epochs=passes,
        max_grad_norm=clip,
    )
    loss = criterion[0] if criterion else LOSS
    for _ in range(passes):
        for x, y in loader:
            if len(y):
                optimizer.zero_grad()
                loss(model(x), y).backward()
                optimizer.step()
    return case.score(model)


def by_tuned_opacus(case: Case, epsilon: float) -> float:
    """The best of 9 settings, looked up on the test set."""
    size = max(64, len(case.train) // 6)
    return max(
        by_opacus(case, epsilon, lr / clip / 10, clip, size, PASSES, 0.9)
        for lr, clip in itertools.product(LRS, CLIPS)
    )


WAYS = {
    "not private": not_private,
    "dp.fit": by_fit,
    "make_private": by_make_private,
    "make_private, recipe": by_recipe,
    "Opacus, its example": by_opacus,
    "Opacus, tuned on the test set": by_tuned_opacus,
}


@functools.cache
def median(case: Case, way: str, epsilon: float, seeds: int) -> float:
    """Returns the median score of runs; of a grid, the best of one run each."""
    scores = []
    for seed in range(1 if WAYS[way] is by_tuned_opacus else seeds):
        torch.manual_seed(seed)
        scores.append(WAYS[way](case, epsilon))
    return statistics.median(scores)


def main(arguments: list[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sets", nargs="+", default=["digits", "cancer", "adult"])
    parser.add_argument("--nets", nargs="+", choices=("MLP", "CNN"), default=("MLP", "CNN"))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--epsilons", nargs="+", type=float, default=EPSILONS)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--fashion", type=Path, help="folder of the files of Fashion-MNIST")
    parser.add_argument("--smoke", action="store_true")
    given = parser.parse_args(arguments)
    sets = {"digits": digits, "cancer": cancer, "adult": adult}
    if given.fashion:
        sets["fashion"] = lambda: fashion(given.fashion)
    found = [
        case
        for name in given.sets
        for case in sets[name]()
        if case.name.endswith(tuple(given.nets))
    ]
    if given.smoke:
        found = [replace(found[0], train=TensorDataset(*found[0].train[:128]))]
        given.epsilons, given.seeds = [3.0], 1
        given.ways = ["dp.fit", "make_private", "make_private, recipe", "Opacus, its example"]
    warnings.simplefilter("ignore")
    print(f"{platform.machine()}, torch {torch.__version__}, {datetime.date.today()}\n")
    print("| set, n | epsilon |", " | ".join(given.ways), "|")
    print("|---|---|" + "---|" * len(given.ways))
    for case, epsilon in itertools.product(found, given.epsilons):
        print(f"| {case.name}, {len(case.train)} | {epsilon:g} |", end="", flush=True)
        for way in given.ways:
            meant = math.inf if way == "not private" else epsilon
            print(f" {median(case, way, meant, given.seeds):.3f} |", end="", flush=True)
        print()


if __name__ == "__main__":
    main()
