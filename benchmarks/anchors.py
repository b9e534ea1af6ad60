"""DP-GD and DP-SGD as plain loops, tuned on the test scores: what benchmarks/accuracy.py compares our defaults with.

The noise of each step is calibrated by the accountant of this library; the guarantee is that of one run. The search is
NOT private: all settings of a grid are run, the best by the test score are run three times again, and the best of
these is scored on fresh seeds, so that its luck in the search does not count. Nothing of this is charged: each cell
costs as many runs as `grid_size` says, where a user has one.

* DP-GD: all rows in each step; grid of clip, step size, number of steps.
* DP-SGD: Poisson batches; the same with the size of a batch.
* with users: DP-GD on the mean of the users' mean gradients, each clipped.

Both answers of a run are tried, its last iterate and the mean of its last half, and for the absolute error both losses,
the absolute one and Huber's at the table's threshold. Linear models: the gradient of a row is its slope times the row,
so that clipping a gradient is clipping its slope at clip/|x|, and many settings run side by side as columns.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from functools import cache

import numpy as np
import torch
from table_parts import Array, Table
from tables import scores, with_bias
from torch import Tensor

import torch_dpsco as dp
from torch_dpsco.accounting.calibrate import noise_multiplier

DELTA = 1e-6
CLIPS = (0.03, 0.1, 0.3, 1.0)  # of the largest possible norm of a gradient
RATES, STEPS = (
    (0.3, 1.0, 3.0, 10.0, 30.0),
    (30, 100, 400),
)  # rate 1 with clip 1: a step of 1/smoothness
BATCHES, BATCH_CLIPS = (512, 2048), (0.1, 0.3, 1.0)
BATCH_RATES, BATCH_STEPS = (0.3, 1.0, 3.0, 10.0), (400, 1600, 6400)
USER_CLIPS, USER_STEPS = (0.01, 0.03, 0.1, 0.3), (10, 30, 100, 300, 1000)
AVERAGES = ("last", "half")
BLOCK = 4096  # rows at a time: what fits into a cache, times the columns
FINALISTS, FINAL_RUNS = 4, 3

# A better score is larger for these, smaller for others.
LARGER = ("auc",)


@dataclasses.dataclass(frozen=True)
class Setting:
    """One point of the grid: `batch` None for all rows (or users)."""

    loss: str
    clip: float
    rate: float
    steps: int
    batch: int | None = None


@dataclasses.dataclass(frozen=True)
class Job:
    """One run: a setting at an epsilon."""

    setting: Setting
    epsilon: float


Scores = dict[str, float]


def grid(table: Table, method: str) -> list[Setting]:
    """Returns the settings of "DP-GD" or "DP-SGD"."""
    losses = ("logistic",) if table.kind == "binary" else ("absolute", "huber")
    if method == "DP-SGD":
        return [
            Setting(*numbers)
            for numbers in itertools.product(
                losses, BATCH_CLIPS, BATCH_RATES, BATCH_STEPS, BATCHES
            )
        ]
    numbers = (
        (CLIPS, RATES, STEPS) if table.users is None else (USER_CLIPS, BATCH_RATES, USER_STEPS)
    )
    return [Setting(*setting) for setting in itertools.product(losses, *numbers)]


def methods(table: Table) -> tuple[str, ...]:
    """Returns the names of the anchors of a table."""
    return ("DP-GD", "DP-SGD") if table.users is None else ("DP-GD",)


# -- runs side by side ------------------------------------------------------------------------------------------------


class Data:
    """Training rows with their constant column as float32, test rows, and what a gradient is bounded by."""

    def __init__(self, table: Table) -> None:
        train = ~table.test
        self.table = table
        self.rows = torch.from_numpy(with_bias(table.rows[train]).astype(np.float32))
        self.targets = torch.from_numpy(table.targets[train].astype(np.float32))[:, None]
        self.norms = self.rows.norm(dim=1, keepdim=True)
        self.test_rows = with_bias(table.rows[table.test])
        self.bound = math.hypot(table.bound_x, 1.0)
        ids = None if table.users is None else table.users[train]
        self.users = None if ids is None else grouped(self.rows, self.targets, ids)
        self.count = len(self.rows) if ids is None else len(np.unique(ids))

    def slope(self, loss: str) -> tuple[float, float]:
        """Returns the largest slope of a loss, and slope over curvature: what a step of 1/smoothness may move."""
        threshold = self.table.threshold
        return {
            "logistic": (1.0, 4.0),
            "absolute": (1.0, threshold),
            "huber": (threshold, threshold),
        }[loss]


@dataclasses.dataclass(frozen=True)
class Users:
    """Users with similar numbers of rows, filled up with zeros: (users, most, d), (users, most, 1), (users,)."""

    rows: Tensor
    targets: Tensor
    counts: Tensor


def grouped(rows: Tensor, targets: Tensor, ids: Array) -> list[Users]:
    """Returns the rows by user; the most rows of a group are a power of 2."""
    _, users, counts = np.unique(ids, return_inverse=True, return_counts=True)
    places = np.argsort(users, kind="stable")
    starts = np.cumsum(counts) - counts
    sizes = 2 ** np.ceil(np.log2(counts)).astype(int)
    groups = []
    for size in np.unique(sizes):
        members = np.flatnonzero(sizes == size)
        padded = (
            torch.zeros(len(members), size, rows.shape[1]),
            torch.zeros(len(members), size, 1),
        )
        for place, user in enumerate(members):
            picks = torch.from_numpy(places[starts[user] : starts[user] + counts[user]])
            for values, filled in zip((rows, targets), padded, strict=True):
                filled[place, : len(picks)] = values[picks]
        groups.append(Users(*padded, torch.from_numpy(counts[members]).float()))
    return groups


@cache
def noise(epsilon: float, count: int, batch: int | None, steps: int) -> float:
    """Returns the noise multiplier of a run under add_remove."""
    design = dp.Full(count) if batch is None else dp.Poisson(min(batch, count), count)
    return noise_multiplier(epsilon, DELTA, design=design, steps=steps, adjacency="add_remove")


def descend(data: Data, jobs: Sequence[Job], generator: torch.Generator) -> tuple[Array, Array]:
    """Returns last and averaged weights (d, jobs) of runs with equal loss, steps and batch, one column each."""
    first = jobs[0].setting
    largest, move = data.slope(first.loss)
    clips = torch.tensor([job.setting.clip * largest * data.bound for job in jobs])
    batch = data.count if first.batch is None else min(first.batch, data.count)
    rates = torch.tensor([job.setting.rate * move / data.bound for job in jobs])
    levels = torch.tensor(
        [noise(job.epsilon, data.count, first.batch, first.steps) for job in jobs]
    )
    batches = np.random.default_rng(generator.initial_seed())
    weights = torch.zeros(data.rows.shape[1], len(jobs))
    total, half = torch.zeros_like(weights), first.steps // 2
    for step in range(first.steps):
        gradient = sum_of_clipped(data, first, weights, clips, batches) / clips
        gradient += levels * torch.randn(weights.shape, generator=generator)
        weights -= rates * gradient / batch
        if step >= half:
            total += weights
    return weights.numpy(), (total / (first.steps - half)).numpy()


def sum_of_clipped(
    data: Data, setting: Setting, weights: Tensor, clips: Tensor, batches: np.random.Generator
) -> Tensor:
    """Returns the sum of clipped gradients (d, columns), of all rows, of a Poisson batch, or of users' means."""
    if data.users is not None:
        return sum_of_users(data.table, data.users, setting.loss, weights, clips)
    if setting.batch is not None:
        size = batches.binomial(data.count, min(setting.batch, data.count) / data.count)
        picks = torch.from_numpy(batches.choice(data.count, size, replace=False, shuffle=False))
        parts: Iterable[tuple[Tensor, ...]] = (
            (data.rows[picks], data.targets[picks], data.norms[picks]),
        )
    else:
        parts = zip(
            *(values.split(BLOCK) for values in (data.rows, data.targets, data.norms)),
            strict=True,
        )
    total = torch.zeros_like(weights)
    for rows, targets, norms in parts:
        slopes = slopes_of(data.table, setting.loss, rows @ weights, targets)
        limits = clips / norms
        total += rows.T @ torch.minimum(torch.maximum(slopes, -limits), limits)
    return total


def sum_of_users(
    table: Table, groups: Sequence[Users], loss: str, weights: Tensor, clips: Tensor
) -> Tensor:
    """Returns the sum over users of their clipped mean gradients."""
    total = torch.zeros_like(weights)
    for group in groups:
        parts = (
            values.split(max(1, BLOCK // group.rows.shape[1]))
            for values in (group.rows, group.targets, group.counts)
        )
        for rows, targets, counts in zip(*parts, strict=True):
            slopes = slopes_of(table, loss, rows @ weights, targets)
            means = rows.transpose(1, 2) @ slopes / counts[:, None, None]
            factors = (clips / means.norm(dim=1).clamp_min(1e-20)).clamp_max(1.0)
            total += (means * factors[:, None]).sum(0)
    return total


def slopes_of(table: Table, loss: str, answers: Tensor, targets: Tensor) -> Tensor:
    """Returns the derivatives of the losses by the answers."""
    if loss == "logistic":
        return answers.sigmoid_().sub_(targets)
    miss = answers.sub_(targets)
    return miss.sign_() if loss == "absolute" else miss.clamp_(-table.threshold, table.threshold)


def run(
    data: Data, jobs: Sequence[Job], seed: int, copies: int
) -> dict[tuple[Job, str], list[Scores]]:
    """Returns the test scores of so many runs of each job, by job and average; the runs of a pass share its batches."""
    found: dict[tuple[Job, str], list[Scores]] = {}
    groups: dict[tuple[str, int, int | None], list[Job]] = {}
    for job in jobs:
        groups.setdefault((job.setting.loss, job.setting.steps, job.setting.batch), []).extend(
            [job] * copies
        )
    generator = torch.Generator().manual_seed(seed)
    for group in groups.values():
        for average, weights in zip(AVERAGES, descend(data, group, generator), strict=True):
            answers = data.test_rows @ weights
            for column, job in enumerate(group):
                found.setdefault((job, average), []).append(
                    scores(data.table, answers[:, column])
                )
    return found


# -- the search -------------------------------------------------------------------------------------------------------


def best(
    found: dict[tuple[Job, str], list[Scores]], score: str, epsilon: float, count: int
) -> list[tuple[Job, str]]:
    """Returns the settings of the best medians at an epsilon."""
    sign = -1.0 if score in LARGER else 1.0
    here = [key for key in found if key[0].epsilon == epsilon]
    return sorted(here, key=lambda key: sign * statistics.median(s[score] for s in found[key]))[
        :count
    ]


def fresh(data: Data, jobs: Sequence[Job], seeds: int) -> dict[tuple[Job, str], list[Scores]]:
    """Returns the scores of so many independent runs: each has its own noise, and its own batches."""
    if data.users is not None or all(job.setting.batch is None for job in jobs):
        return run(data, jobs, 100, seeds)  # nothing but noise is drawn
    passes = [run(data, jobs, 100 + seed, 1) for seed in range(seeds)]
    return {key: [scored[key][0] for scored in passes] for key in passes[0]}


def tuned(
    table: Table, method: str, epsilons: Sequence[float], seeds: int, few: int | None = None
) -> dict[str, dict]:
    """Returns, by epsilon (as text) and score, the best setting (of the first `few`) and its scores on fresh seeds."""
    data = Data(table)
    settings = grid(table, method)[:few]
    names = list(scores(table, np.zeros(int(table.test.sum()))))
    found = run(data, [Job(setting, e) for setting in settings for e in epsilons], 1, 1)
    finalists = dict.fromkeys(
        key[0] for e in epsilons for name in names for key in best(found, name, e, FINALISTS)
    )
    found = run(data, list(finalists), 2, FINAL_RUNS)
    chosen = {(e, name): best(found, name, e, 1)[0] for e in epsilons for name in names}
    final = fresh(data, list(dict.fromkeys(job for job, _ in chosen.values())), seeds)
    answer: dict[str, dict] = {f"{e:g}": {} for e in epsilons}
    for (epsilon, name), key in chosen.items():
        setting = dataclasses.asdict(key[0].setting) | {"average": key[1]}
        answer[f"{epsilon:g}"][name] = {
            "setting": setting,
            "runs": [scored[name] for scored in final[key]],
        }
    return answer


def grid_size(table: Table) -> int:
    """Returns how many runs the search of one cell has cost, of all methods, without those of the final seeds."""
    names = len(scores(table, np.zeros(int(table.test.sum()))))
    return sum(
        len(grid(table, method)) + FINALISTS * names * FINAL_RUNS for method in methods(table)
    )
