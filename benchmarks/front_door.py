"""Accuracy against epsilon on 32,561 people (UCI Adult): ours, Opacus, diffprivlib, not private.

    python benchmarks/front_door.py                                    # prints the table
    python benchmarks/front_door.py --write docs/images/accuracy.svg   # ... and draws it (needs matplotlib)
    python benchmarks/front_door.py --seeds 2 --epsilons 1 3
    python benchmarks/front_door.py --smoke                            # tiny numbers: shows that it runs

Logistic regression on the rows of examples/adult.py, whose norm bound 3.61 is public; accuracy on the fixed test set;
medians of seeds, which are fresh noise and batches.

* ours: `LogisticRegression`, and `HolderSGD` with `fit`, both by default. Not tuned.
* Opacus: DP-SGD by `make_private_with_epsilon`, 10 passes in batches of 512, with clip 1 and step size 0.05 as in its
  README, not tuned; and with the best of three larger step sizes by the test score of one run each, which is not
  private: what a private search would cost is not charged.
* diffprivlib: its LogisticRegression by default, with the norm bound. Its guarantee, as its documentation has it, is
  another one: delta = 0, and one record is replaced by any other (noise as in Chaudhuri et al., 2011). The line "delta
  0" of ours is under these two. diffprivlib runs in an environment of its own, see benchmarks/linear_models.py.

All others are (epsilon, 1e-5)-differentially private where one record is added or removed.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import statistics
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from linear_models import (
    Array,
    Fit,
    Task,
    adult,
    by_diffprivlib,
    by_estimator,
    peer_python,
    public,
    score,
)
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torch_dpsco as dp
from torch_dpsco.show import plots

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

EPSILONS, SEEDS, DELTA = (0.1, 0.3, 1.0, 3.0, 10.0), 5, 1e-5
EPOCHS, BATCH_SIZE = 10, 512  # of Opacus
OPACUS_LR, OPACUS_CLIP = 0.05, 1.0  # of the README of Opacus 1.6
OPACUS_LRS = (0.5, 2.0, 8.0)  # to choose from by looking
OURS, STRICT = "one added or removed, delta 1e-5", "one replaced, delta 0"

Scores = Mapping[float, list[float]]


class Rows(TensorDataset):
    """Records that a loader takes by the batch, which halves the time of Opacus."""

    def __getitems__(self, picks: list[int]) -> tuple[torch.Tensor, ...]:
        return self[torch.tensor(picks, dtype=torch.long)]


def data_of(task: Task) -> tuple[nn.Linear, TensorDataset]:
    """Returns a model that starts at 0, and the records."""
    model = nn.Linear(task.rows.shape[1], 1, bias=False)
    nn.init.zeros_(model.weight)
    rows, targets = (torch.from_numpy(values).float() for values in (task.rows, task.targets))
    return model, TensorDataset(rows, targets[:, None])


def weights_of(model: nn.Module) -> Array:
    """Returns what was trained."""
    (weight,) = model.parameters()
    return np.asarray(weight.detach().double())[0]


def by_holder_sgd(task: Task, epsilon: float) -> Array:
    """Returns the weights of `HolderSGD` and `fit`, by default."""
    model, dataset = data_of(task)
    problem = dp.losses.Logistic().problem(bound_x=task.bound_x)
    budget = dp.Budget(epsilon, task.delta, adjacency="add_remove")
    optimizer = dp.HolderSGD(
        model.parameters(), dp.HolderSGD.plan(problem=problem, n=len(dataset), budget=budget)
    )
    dp.fit(model, optimizer, dataset, nn.BCEWithLogitsLoss(), progress=False)
    return weights_of(model)


def by_opacus(task: Task, epsilon: float, lr: float = OPACUS_LR) -> Array:
    """Returns the weights of Opacus' DP-SGD, by default with the clip and step size of its README."""
    model, dataset = data_of(task)
    private, optimizer, loader = PrivacyEngine().make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=lr),
        data_loader=DataLoader(Rows(*dataset.tensors), batch_size=BATCH_SIZE, collate_fn=tuple),
        target_epsilon=epsilon,
        target_delta=task.delta,
        epochs=EPOCHS,
        max_grad_norm=OPACUS_CLIP,
    )
    loss = nn.BCEWithLogitsLoss()
    for _ in range(EPOCHS):
        for rows, targets in loader:
            optimizer.zero_grad()
            loss(private(rows), targets).backward()
            optimizer.step()
    return weights_of(model)


def best_lr(task: Task, epsilon: float) -> float:
    """Returns the step size of Opacus with the best test score of one run each: NOT private."""
    return max(OPACUS_LRS, key=lambda lr: score(task, by_opacus(task, epsilon, lr)))


METHODS: dict[str, Fit] = {
    "torch_dpsco, LogisticRegression": by_estimator(),
    "torch_dpsco, HolderSGD": by_holder_sgd,
    "Opacus, step size of its README": by_opacus,
    "torch_dpsco, LogisticRegression, delta 0": by_estimator(delta=0.0, adjacency="replace_one"),
}
TUNED, PEER = "Opacus, step size tuned on the test set", "diffprivlib, delta 0"
DRAWN = {  # color, style and marker: lines differ without color, too
    "torch_dpsco, LogisticRegression": plots.LOOKS[0],
    "torch_dpsco, HolderSGD": plots.LOOKS[1],
    TUNED: plots.LOOKS[2],
    "Opacus, step size of its README": plots.LOOKS[3],
    "torch_dpsco, LogisticRegression, delta 0": ("#0b5394", (0, (3, 1, 1, 1)), "x"),
    PEER: ("#555555", (0, (5, 2)), "v"),
}


def compare(
    task: Task, epsilons: Sequence[float], seeds: int, peer: Path | None
) -> dict[str, Scores]:
    """Returns the accuracies of all methods on the test set, one per seed."""

    def accuracies(fit: Fit, epsilon: float) -> list[float]:
        return [score(task, fit(task, epsilon))[0] for _ in range(seeds)]

    found = {
        name: {epsilon: accuracies(fit, epsilon) for epsilon in epsilons}
        for name, fit in METHODS.items()
    }
    tuned = {epsilon: partial(by_opacus, lr=best_lr(task, epsilon)) for epsilon in epsilons}
    found[TUNED] = {epsilon: accuracies(fit, epsilon) for epsilon, fit in tuned.items()}
    if peer is not None:
        answers = iter(
            by_diffprivlib(peer, [(task, epsilon) for epsilon in epsilons for _ in range(seeds)])
        )
        found[PEER] = {
            epsilon: [score(task, next(answers))[0] for _ in range(seeds)]
            for epsilon in epsilons
        }
    return found


def table(found: Mapping[str, Scores], baseline: float, trivial: float) -> str:
    """Returns a table in Markdown: median (lowest to highest)."""
    epsilons = list(next(iter(found.values())))
    lines = [
        "| accuracy at epsilon = | protected: one record is | "
        + " | ".join(f"{epsilon:g}" for epsilon in epsilons)
        + " |",
        "|---|---|" + "---|" * len(epsilons),
    ]
    for name, scores in found.items():
        cells = [
            f"{statistics.median(s):.3f} ({min(s):.3f} to {max(s):.3f})" for s in scores.values()
        ]
        guarantee = STRICT if name.endswith("delta 0") else OURS
        lines.append(f"| {name} | {guarantee} | " + " | ".join(cells) + " |")
    for name, value in (("not private", baseline), ("always no", trivial)):
        lines.append(f"| {name} | | " + " | ".join([f"{value:.3f}"] * len(epsilons)) + " |")
    return "\n".join(lines)


def picture(found: Mapping[str, Scores], baseline: float, trivial: float) -> Figure:
    """Returns the picture of medians and ranges; lines differ without color, too."""

    def panel(axes: Axes) -> None:
        for name, (color, style, marker) in DRAWN.items():
            if name not in found:
                continue
            epsilons, scores = list(found[name]), list(found[name].values())
            medians = [statistics.median(s) for s in scores]
            axes.plot(epsilons, medians, linestyle=style, color=color, marker=marker, label=name)
            axes.fill_between(
                epsilons,
                list(map(min, scores)),
                list(map(max, scores)),
                color=color,
                alpha=0.2,
                lw=0,
            )
        axes.axhline(
            baseline, color="black", linewidth=1.2, linestyle=(0, (1, 1)), label="not private"
        )
        axes.axhline(trivial, color="#777777", linewidth=0.8, label='always answers "no"')
        axes.set_xscale("log")
        axes.set_xticks(epsilons, [f"{epsilon:g}" for epsilon in epsilons])
        axes.set(
            xlabel="epsilon (smaller: more private)", ylabel="accuracy on the public test set"
        )
        axes.legend(loc="lower right")

    figure = plots.figure(
        "Is the yearly income above 50,000 dollars? (UCI Adult, logistic regression)", panel
    )
    figure.set_size_inches(7.2, 4.4)
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table, and draws it where that is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--epsilons", nargs="+", type=float, default=EPSILONS)
    parser.add_argument(
        "--write", type=Path, metavar="FILE", help="draw the picture into this .svg file"
    )
    parser.add_argument(
        "--environment",
        type=Path,
        help="folder of the environment of diffprivlib; default: temporary",
    )
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="1,000 records, one seed, one epsilon, no diffprivlib",
    )
    args = parser.parse_args(argv)
    warnings.filterwarnings(
        "ignore", category=UserWarning
    )  # of Opacus, about its generator and hooks
    torch.set_num_threads(1)

    task = replace(adult(), delta=DELTA)
    epsilons, seeds = args.epsilons, args.seeds
    with tempfile.TemporaryDirectory() as folder:
        if args.smoke:
            task, epsilons, seeds, peer, reason = (
                task.few(1_000),
                (1.0,),
                1,
                None,
                "not asked for",
            )
        else:
            peer, reason = peer_python(args.environment or Path(folder))
        found = compare(task, epsilons, seeds, peer)
    baseline, trivial = score(task, public(task))[0], float((task.test_targets == 0).mean())
    print(table(found, baseline, trivial))
    versions = ", ".join(
        f"{name} {version(name)}" for name in ("torch_dpsco", "torch", "opacus")
    )
    machine = f"{os.cpu_count()} cores, {platform.machine()}, one thread"
    print(
        f"\nMedians of {seeds} seeds (lowest to highest); {versions}; {machine}; {datetime.date.today()}."
    )
    if peer is None:
        print(f"diffprivlib is left out: {reason}")
    if args.write is not None:
        args.write.parent.mkdir(parents=True, exist_ok=True)
        args.write.write_bytes(plots.encoded(picture(found, baseline, trivial), "svg"))


if __name__ == "__main__":
    main()
