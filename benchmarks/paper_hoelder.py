"""Exhibits of Wang, Lei, Ying, Zhang: Figure 1, bounds against n, and excess risk with our noise and the published.

Figure 1: T = n, delta = 1/n^2, one record a step without replacement. Lemma 13's region of (n, epsilon); where a beta
exists by a search (`search_split_paper`); and the noise on the sum over 2 G that the search and `HolderSGD` need.

Gradients: the last column of Table 1, beside the plans of `HolderSGD` by default.

Bounds and measured risk: q-hinges with q = 1, 1.5, 2 (alpha = q - 1) for rows of norm 1 in R^10 and models in a ball of
radius 1, epsilon = 1, delta = 1e-6, replace_one. A row is s u + g normalized, with a sign s, a fixed unit vector u and
Gaussian g of norm about 1; y is s, or -s in 15 of 100 records. "Published": Algorithms 1 and 2 as printed, with steps
and step sizes of Theorems 10 and 12 (the reciprocal of the latter, E7; gamma = 0.05) and their noise; the answer is
projected. T is n^2 at alpha = 0, where n stops at 500. "Ours": `HolderOutputSGD` and `HolderSGD` with an average,
batches of 20 and 50, at the step sizes that make their bounds least. "Phased": the rivals of Table 1 (Feldman, Koren,
Talwar 2020) with exact noise: phase i has n/2^i records of its own and a step eta_i = 4^-i (2 R/G) min(4/sqrt(n),
mu/sqrt(d)), mu the level of the budget; the output kind makes one pass and adds noise for 2 G eta_i to its average,
which is proved for smooth losses only; the ERM kind minimizes the mean loss + |w - start|^2/(eta_i n_i) in the ball,
kinks smoothed over a thousandth, and adds noise for G eta_i. Beside them: `ObjectivePerturbation` with a smoothed hinge
of width 1/2 in place of the loss. Excess risk over the best model in the ball, on 50,000 unseen records.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from paper_drawing import (
    LOWER,
    OURS,
    PUBLISHED,
    Exhibit,
    Series,
    loglog,
    measured,
    slope,
    slope_error,
    table,
    words,
)
from torch.utils.data import TensorDataset

import torch_dpsco as dp
from tests.reference.papers.holder import (
    feasibility_threshold_paper,
    lr_theorem,
    output_sigma_paper,
    search_split_paper,
    steps_theorem,
)
from torch_dpsco.accounting.analysis.gaussian import gaussian_mu
from torch_dpsco.algorithms.holder import HolderPlan
from torch_dpsco.algorithms.holder_numbers import balanced_lr
from torch_dpsco.algorithms.output_sgd import HolderOutputPlan
from torch_dpsco.errors import ConditionError, InfeasibleError

DIM, RADIUS, FLIPPED, UNSEEN, GAMMA = 10, 1.0, 0.15, 50_000, 0.05
DELTA = 1e-6
BUDGET = dp.Budget(1.0, DELTA, "replace_one")
ALPHAS = (0.0, 0.5, 1.0)
NOISE_N, NOISE_EPSILONS = 10_000, (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)


def hinge(alpha: float) -> dp.losses.Hinge:
    """Returns the q-hinge, q = 1 + alpha."""
    return dp.losses.Hinge(power=1 + alpha)


# -- Figure 1 ---------------------------------------------------------------------------------------------------------


def is_feasible(n: int, epsilon: float) -> bool:
    """Returns whether some beta satisfies both conditions of Theorem 11."""
    try:
        search_split_paper(n, 1, n, epsilon, n**-2.0)
    except InfeasibleError:
        return False
    return True


def least_epsilon(n: int) -> float:
    """Returns the least epsilon with a feasible beta, to a hundredth."""
    low, high = 1e-3, 64.0
    while high / low > 1.01:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if is_feasible(n, middle) else (middle, high)
    return high


def region(sizes: Sequence[int], epsilons: Sequence[float]) -> Exhibit:
    """Returns the exhibit of Figure 1."""
    claimed = [feasibility_threshold_paper(n) for n in sizes]
    true = [least_epsilon(n) for n in sizes]
    problem = hinge(0.5).problem(bound_x=1.0, radius=1.0)
    published, ours = [], []
    for epsilon in epsilons:
        fits = is_feasible(NOISE_N, epsilon)
        found = search_split_paper(NOISE_N, 1, NOISE_N, epsilon, NOISE_N**-2.0) if fits else None
        published.append(found.ratio_squared**0.5 if found else math.nan)
        budget = dp.Budget(epsilon, NOISE_N**-2.0, "replace_one")
        plan = dp.HolderSGD.plan(
            problem=problem, n=NOISE_N, budget=budget, batch_size=1, epochs=1, sampling="fixed"
        )
        ours.append(plan.noise_multiplier / 2)
    panels = [
        loglog(
            "Where Algorithm 2 has noise as published",
            "records n",
            "epsilon",
            [
                Series("Lemma 13: above this line", sizes, claimed, PUBLISHED, 1),
                Series("true: above this line", sizes, true, OURS, 2),
            ],
        ),
        loglog(
            f"n = {NOISE_N:,}: noise, where there is one",
            "epsilon",
            "std on the sum over 2 G",
            [
                Series("published, best beta", epsilons, published, PUBLISHED, 1),
                Series("HolderSGD: for every epsilon", epsilons, ours, OURS, 0),
            ],
        ),
    ]
    false = [n for n in range(18, 101) if not is_feasible(n, feasibility_threshold_paper(n))]
    rows = {f"{n:,}": [a, b] for n, a, b in zip(sizes, claimed, true, strict=True)}
    both = [j for j, value in enumerate(published) if not math.isnan(value)]
    says = (
        f"A beta exists far below the line of Lemma 13 for many records, and not on it for n = {false[0]} "
        f"to {false[-1]}; our noise has no such "
        f"condition and is {words(min(published[j] / ours[j] for j in both))} to "
        f"{words(max(published[j] / ours[j] for j in both))} times smaller."
    )
    note = "Figure 1: T = n, delta = 1/n^2, one record a step."
    head = ("n", "least epsilon by Lemma 13", "least epsilon with a beta")
    return Exhibit("hoelder_figure_1", says, table(head, rows), panels, 2, note)


# -- bounds -----------------------------------------------------------------------------------------------------------


def output_plan(alpha: float, n: int) -> HolderOutputPlan:
    """Returns the plan of output perturbation by default."""
    problem = hinge(alpha).problem(bound_x=1.0, radius=RADIUS)
    return dp.HolderOutputSGD.plan(problem=problem, n=n, budget=BUDGET, dim=DIM, batch_size=20)


def gradient_plan(alpha: float, n: int) -> HolderPlan:
    """Returns the plan of gradient perturbation at the step size of the least bound."""
    problem = hinge(alpha).problem(bound_x=1.0, radius=RADIUS)
    request: dict[str, Any] = {
        "problem": problem,
        "n": n,
        "budget": BUDGET,
        "dim": DIM,
        "batch_size": 50,
        "epochs": 5,
    }
    noise = dp.HolderSGD.plan(**request, average="uniform")
    largest = problem.grad_bound(RADIUS)
    lr = balanced_lr(RADIUS, noise.steps, largest, DIM, noise.noise_multiplier * largest / 50)
    return dp.HolderSGD.plan(**request, average="uniform", lr=lr)


def theorem_rate(theorem: int, n: int) -> float:
    """Returns the rate of Theorem 10 or 12 without its logarithms, with constant 1."""
    private = math.sqrt(DIM * math.log(1 / DELTA)) / (n * BUDGET.epsilon)
    return (math.sqrt(private) if theorem == 10 else private) + n**-0.5


def gradients(sizes: Sequence[int]) -> Exhibit:
    """Returns the exhibit of the last column of Table 1: gradients of one record that a method computes."""
    logs = DIM * math.log(1 / DELTA)
    orders: dict[str, Callable[[int], float]] = {  # epsilon = 1, constant 1
        "[4], smooth": lambda n: n**1.5 + n**2.5 / logs,
        "[4], kinks": lambda n: n**4.5 + n**6.5 / logs**2,
        "[16], phased ERM, kinks": lambda n: n**2 * math.log(1 / DELTA),
        "this paper, alpha = 0": lambda n: n**2.0 + n,
        "this paper, alpha >= 1/2; [16], phased output, smooth": lambda n: 2.0 * n,
    }
    styles = (LOWER, LOWER, LOWER, PUBLISHED, PUBLISHED)
    drawn = [
        Series(name, sizes, [order(n) for n in sizes], styles[j], (3, 4, 2, 0, 1)[j])
        for j, (name, order) in enumerate(orders.items())
    ]
    rows = {
        name: [float(order(sizes[-1])), round(slope(sizes, list(map(order, sizes))), 2)]
        for name, order in orders.items()
    }
    ours: list[list[float]] = []
    for alpha, color in ((0.0, 0), (0.5, 1)):
        problem = hinge(alpha).problem(bound_x=1.0, radius=RADIUS)
        plans = [dp.HolderSGD.plan(problem=problem, n=n, budget=BUDGET, dim=DIM) for n in sizes]
        made = [float(plan.steps * plan.batch_size) for plan in plans]
        ours.append(made)
        drawn.append(
            Series(f"HolderSGD by default, alpha = {alpha:g}", sizes, made, OURS, color)
        )
        rows[f"HolderSGD by default, alpha = {alpha:g}"] = [
            made[-1],
            round(slope(sizes, made), 2),
        ]
    least, most = min(min(each) for each in ours), max(max(each) for each in ours)
    says = (
        f"With or without kinks `HolderSGD` computes {least:,.0f} to {most:,.0f} gradients by default for n = "
        f"{sizes[0]:,} to {sizes[-1]:,}, where the paper's rate for kinks takes n^2 and earlier ones more."
    )
    head = ("", f"gradients, n = {sizes[-1]:,}", "slope")
    note = (
        "Last column of Table 1 by formula: orders with constant 1, numbers of references as there; d = "
        "10, epsilon = 1, delta = 1e-6."
    )
    panel = loglog("Table 1: gradients of one record", "records n", "gradients", drawn)
    return Exhibit("hoelder_table_1", says, table(head, rows), [panel], 1, note)


def bounds(sizes: Sequence[int]) -> Exhibit:
    """Returns the exhibit of bounds against n."""
    panels, rows = [], {}
    for alpha in ALPHAS:
        output = [output_plan(alpha, n).risk_bound for n in sizes]
        gradient = [gradient_plan(alpha, n).risk_bound for n in sizes]
        drawn = [
            Series("HolderOutputSGD, bound", sizes, output, OURS, 0),
            Series(
                "Theorem 10: order, constant 1",
                sizes,
                [theorem_rate(10, n) for n in sizes],
                LOWER,
                0,
            ),
            Series("HolderSGD, bound on the sample", sizes, gradient, OURS, 1),
            Series(
                "Theorem 12: order, constant 1",
                sizes,
                [theorem_rate(12, n) for n in sizes],
                LOWER,
                1,
            ),
        ]
        panels.append(
            loglog(f"alpha = {alpha:g}", "records n", "bound on the excess risk", drawn)
        )
        rows[f"alpha = {alpha:g}"] = [
            output[-1],
            round(slope(sizes, output), 2),
            gradient[-1],
            round(slope(sizes, gradient), 2),
        ]
    slopes = [row[1] for row in rows.values()]
    says = (
        f"Our bounds with constants fall with slopes {slopes[0]:.2f}, {slopes[1]:.2f}, {slopes[2]:.2f} "
        "(output; Theorem 10 says -1/2) and "
        f"{', '.join(f'{row[3]:.2f}' for row in rows.values())} (gradient; Theorem 12: -1/2 to -1) for "
        "alpha = 0, 1/2, 1: kinks cost output perturbation most."
    )
    head = ("", f"output, n = {sizes[-1]:,}", "slope", f"gradient, n = {sizes[-1]:,}", "slope")
    note = (
        "`plan.risk_bound`: of new records for output perturbation, of the sample for gradient "
        "perturbation (batches of 50, 5 epochs). The paper's constants are not stated."
    )
    return Exhibit("hoelder_bounds", says, table(head, rows), panels, 3, note)


# -- measured ---------------------------------------------------------------------------------------------------------


class Task:
    """Draws records, and says what weights lose on unseen ones."""

    def __init__(self, alpha: float) -> None:
        self.alpha, self._generator = alpha, np.random.default_rng(int(10 * alpha))
        self._x, self._y = self.draw(UNSEEN)
        self._least = self._risk(self._best())

    def draw(self, n: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns rows and labels."""
        s = np.where(self._generator.random(n) < 0.5, 1.0, -1.0)
        x = self._generator.standard_normal((n, DIM)) / math.sqrt(DIM)
        x[:, 0] += s
        x /= np.linalg.norm(x, axis=1, keepdims=True)
        return x, np.where(self._generator.random(n) < FLIPPED, -s, s)

    def gaussian(self) -> np.ndarray:
        """Returns noise of std 1, for methods that are written here."""
        return self._generator.standard_normal(DIM)

    def slopes(self, margins: np.ndarray) -> np.ndarray:
        """Returns -phi' of margins."""
        gap = np.maximum(1 - margins, 0.0)
        return np.where(gap > 0, (1 + self.alpha) * gap**self.alpha, 0.0)

    def excess(self, w: np.ndarray) -> float:
        """Returns the risk above the least one in the ball."""
        return self._risk(w) - self._least

    def _risk(self, w: np.ndarray) -> float:
        return float((np.maximum(1 - self._y * (self._x @ w), 0.0) ** (1 + self.alpha)).mean())

    def _best(self) -> np.ndarray:
        w, mean = np.zeros(DIM), np.zeros(DIM)
        for t in range(1, 2_001):
            g = -(self._x.T @ (self._y * self.slopes(self._y * (self._x @ w)))) / UNSEEN
            w = projected(w - 2.0 / math.sqrt(t) * g)
            mean += (w - mean) * 2 / (t + 1)
        return min((w, mean), key=self._risk)


def projected(w: np.ndarray) -> np.ndarray:
    """Returns the nearest points of the ball, of a vector or of each row."""
    norms = np.linalg.norm(w, axis=-1, keepdims=True)
    return w * np.minimum(1.0, RADIUS / np.maximum(norms, 1e-300))


def published(task: Task, algorithm: int, n: int, runs: int) -> list[float]:
    """Returns the excess risks of runs of Algorithm 1 or 2 as printed, side by side."""
    alpha, theorem = task.alpha, 10 if algorithm == 1 else 12
    steps = steps_theorem(n, alpha, theorem)
    lr = lr_theorem(theorem, n, DIM, BUDGET.epsilon, DELTA, GAMMA, steps, alpha)
    grad_bound = (1 + alpha) * (1 + RADIUS**alpha)  # M + L R^alpha, both q at norm 1
    sigma = 0.0
    if algorithm == 2:
        sigma = (
            2
            * grad_bound
            * search_split_paper(n, 1, steps, BUDGET.epsilon, DELTA).ratio_squared ** 0.5
        )
    generator = np.random.default_rng(n)
    x, y = (np.stack(part) for part in zip(*(task.draw(n) for _ in range(runs)), strict=True))
    w, mean, row = np.zeros((runs, DIM)), np.zeros((runs, DIM)), np.arange(runs)
    for begin in range(0, steps, 10_000):
        size = min(10_000, steps - begin)
        picks = generator.integers(n, size=(size, runs))
        noise = (
            sigma * generator.standard_normal((size, runs, DIM))
            if sigma
            else np.zeros((size, 1, 1))
        )
        for t in range(size):
            mean += w
            rows, signs = x[row, picks[t]], y[row, picks[t]]
            margins = signs * (rows * w).sum(1)
            g = -(signs * task.slopes(margins))[:, None] * rows + noise[t]
            w = projected(w - lr * g)
    answer = mean / steps
    if algorithm == 1:
        constant, q = 1 + alpha, 1 + alpha
        std = output_sigma_paper(
            alpha, constant, q, 1.0, RADIUS, lr, steps, n, BUDGET.epsilon, DELTA, "bounded"
        )
        answer = projected(answer + std * generator.standard_normal((runs, DIM)))
    return [task.excess(each) for each in answer]


def phases(task: Task, n: int, dim: int = DIM) -> Iterator[tuple[int, float, float]]:
    """Yields (records, step, bound on gradients) of the phases of Feldman, Koren and Talwar."""
    largest = (1 + task.alpha) * (1 + RADIUS) ** task.alpha
    level = gaussian_mu(BUDGET.epsilon, DELTA)
    lr = 2 * RADIUS / largest * min(4 / math.sqrt(n), level / math.sqrt(dim))
    for i in range(1, math.ceil(math.log2(n)) + 1):
        if n >> i:
            yield n >> i, lr / 4**i, largest


def phased_output(task: Task, n: int) -> float:
    """Returns the excess risk of a run of phased SGD, each phase with noise on its average."""
    level = gaussian_mu(BUDGET.epsilon, DELTA)
    w = np.zeros(DIM)
    for size, lr, largest in phases(task, n):
        x, y = task.draw(size)
        mean = np.zeros(DIM)
        for row, sign in zip(x, y, strict=True):
            mean += w / size
            w = projected(w + lr * sign * task.slopes(sign * (row @ w)) * row)
        w = projected(mean + 2 * largest * lr / level * task.gaussian())
    return task.excess(w)


def phased_erm(task: Task, n: int) -> float:
    """Returns the excess risk of a run of phased ERM, each phase with noise on its minimizer."""
    level = gaussian_mu(BUDGET.epsilon, DELTA)
    w = np.zeros(DIM)
    for size, lr, largest in phases(task, n):
        found = nearby_minimizer(task, *task.draw(size), w, 2 / (lr * size))
        w = projected(found + largest * lr / level * task.gaussian())
    return task.excess(w)


def nearby_minimizer(
    task: Task,
    x: np.ndarray,
    y: np.ndarray,
    start: np.ndarray,
    strong: float,
    width: float = 1e-3,
) -> np.ndarray:
    """Returns the minimizer of the mean loss + (strong/2)|w - start|^2 in the ball, by accelerated descent."""
    q = 1 + task.alpha
    smooth = q * width ** (task.alpha - 1) + strong  # a kink bends by that much
    root = math.sqrt(smooth / strong)
    momentum, w, query = (root - 1) / (root + 1), start, start
    for _ in range(50 + int(10 * root)):
        gap = np.maximum(1 - y * (x @ query), 0.0)
        slopes = np.minimum(task.slopes(1 - gap), q * width ** (task.alpha - 1) * gap)
        g = -x.T @ (y * slopes) / len(x) + strong * (query - start)
        moved = projected(query - g / smooth)
        w, query = moved, moved + momentum * (moved - w)
    return w


def solved(task: Task, n: int) -> float:
    """Returns the excess risk of noise in the objective of a smoothed hinge."""
    x, y = task.draw(n)
    model = torch.nn.Linear(DIM, 1, bias=False).double()
    plan = dp.ObjectivePerturbation.plan(
        model=model, loss=dp.losses.SmoothedHinge(0.5), n=n, budget=BUDGET, bound_x=1.0
    )
    optimizer = dp.ObjectivePerturbation(model.parameters(), plan)
    optimizer.solve(TensorDataset(torch.from_numpy(x), torch.from_numpy(y)))
    optimizer.finalize()
    return task.excess(projected(model.weight.detach().numpy().reshape(-1)))


def ours(task: Task, kind: str, n: int) -> float:
    """Returns the excess risk of a run of ours."""
    x, y = task.draw(n)
    data = TensorDataset(torch.from_numpy(x), torch.from_numpy(y)[:, None])
    model = torch.nn.Linear(DIM, 1, bias=False).double()
    torch.nn.init.zeros_(model.weight)
    if kind == "output":
        optimizer = dp.HolderOutputSGD(model.parameters(), output_plan(task.alpha, n))
    else:
        optimizer = dp.HolderSGD(dp.attach(model).parameters(), gradient_plan(task.alpha, n))
    dp.fit(model, optimizer, data, hinge(task.alpha), progress=False)
    return task.excess(model.weight.detach().numpy().reshape(-1))


Found = dict[
    str, tuple[list[int], list[list[float]]]
]  # sizes, and the risks of the runs of each


RIVALS: dict[str, Callable[[Task, int], float]] = {
    "phased output, Table 1": phased_output,
    "phased ERM, Table 1": phased_erm,
    "objective, smoothed hinge, ours": solved,
}


def risks_of(task: Task, sizes: Sequence[int], runs: int, longest: int) -> Found:
    """Returns the excess risks of all methods; of published ones where their noise is defined, within so many steps."""
    found: Found = {
        f"{kind}, {who}": ([], [])
        for kind in ("output", "gradient")
        for who in ("published", "ours")
    }
    found |= {name: ([], []) for name in RIVALS}
    for n in sizes:
        for kind, algorithm in (("output", 1), ("gradient", 2)):
            each = {"ours": [ours(task, kind, n) for _ in range(runs)]}
            if steps_theorem(n, task.alpha, 10) <= longest:  # of Theorem 12, too
                with contextlib.suppress(ConditionError, InfeasibleError):
                    each["published"] = published(task, algorithm, n, runs)
            for who, values in each.items():
                found[f"{kind}, {who}"][0].append(n)
                found[f"{kind}, {who}"][1].append(values)
        for name, rival in RIVALS.items():
            if rival is not phased_output or task.alpha == 1:
                found[name][0].append(n)
                found[name][1].append([rival(task, n) for _ in range(runs)])
    return {name: made for name, made in found.items() if made[0]}


def risk(sizes: Sequence[int], runs: int, longest: int) -> Exhibit:
    """Returns the exhibit of measured excess risk against n."""
    panels, rows = [], {}
    for alpha in ALPHAS:
        found = risks_of(Task(alpha), sizes, runs, longest)
        drawn = []
        for name, (x, each) in found.items():
            style = OURS if "ours" in name else PUBLISHED
            color = 2 + list(RIVALS).index(name) if name in RIVALS else int("gradient" in name)
            drawn.append(measured(name, x, each, color, style))
            medians = [float(np.median(values)) for values in each]
            rows[f"alpha = {alpha:g}: {name}"] = [
                *(medians[x.index(n)] if n in x else "-" for n in sizes),
                f"{slope(x, medians):.2f} +- {slope_error(x, each):.2f}",
            ]
        bound = [output_plan(alpha, n).risk_bound for n in sizes]
        drawn.append(Series("bound of HolderOutputSGD", sizes, bound, LOWER, 0))
        panels.append(loglog(f"alpha = {alpha:g}", "records n", "excess risk", drawn))
    names = {
        who: [f"alpha = {alpha:g}: output, {who}" for alpha in ALPHAS]
        for who in ("ours", "published")
    }
    best, theirs = (
        [str(rows[name][-1]).split(" ")[0] if name in rows else "-" for name in names[who]]
        for who in ("ours", "published")
    )
    last = {
        name: [rows[f"alpha = {alpha:g}: {name}"][-2] for alpha in ALPHAS]
        for name in ("gradient, ours", "phased ERM, Table 1", "objective, smoothed hinge, ours")
    }
    shown = [", ".join(map(words, losses)) for losses in last.values()]
    says = (
        "For alpha = 0, 1/2, 1 the measured risk of output perturbation falls as n to the power "
        f"{', '.join(best)} with our noise and "
        f"{', '.join(theirs)} with the published, where Theorem 10 says -0.5; at n = {sizes[-1]:,} `HolderSGD` "
        f"loses {shown[0]}, phased ERM of Table 1 {shown[1]}, and `ObjectivePerturbation` {shown[2]}."
    )
    head = ("median excess risk at n =", *(f"{n:,}" for n in sizes), "slope")
    note = (
        f"q-hinges, d = {DIM}, epsilon = 1, delta = {DELTA:g}; medians of {runs} runs, whiskers from "
        f"lowest to highest; a missing point: no noise is defined as published, or more than {longest:,} "
        "steps."
    )
    return Exhibit("hoelder_risk", says, table(head, rows), panels, 3, note)


def exhibits(smoke: bool) -> Iterator[Exhibit]:
    """Yields the exhibits of the paper."""
    if smoke:
        yield region((18, 100), (1.0, 4.0))
        yield gradients((1_000, 4_000))
        yield bounds((1_000, 4_000))
        yield risk((300, 600), 1, 1_000)
        return
    yield region(
        (18, 30, 44, 100, 300, 1_000, 3_000, 10_000, 100_000, 1_000_000), NOISE_EPSILONS
    )
    yield gradients((1_000, 4_000, 16_000, 64_000))
    yield bounds((1_000, 4_000, 16_000, 64_000, 256_000))
    yield risk((250, 500, 1_000, 2_000, 4_000), 3, 300_000)
