"""Exhibits of Lowy, Razaviyayn 2023: rates against the number of moments, bounds against n, and Pareto features.

Rates: powers of sqrt(d)/(epsilon n) in our bounds (docs/proofs/heavy_tailed.md#rates) and in the paper's lower bounds
(Theorems 7 and 8), and the slopes of the bounds of plans for n = 1e6 to 1e9 whose second moment is nearly 0, so that
sampling costs nothing.

Bounds: `accelerated_plan` for gradients whose norm has a Pareto law of shape k + 0.2, cut at 100, in units of its
second moment, with d = 10, rho = 0.5, beta = 1, D = 2; and for the same law where only the largest norm is known.

Instances: those behind Theorems 7 and 8, of the private part (after Barber and Duchi 2014) and of that of sampling
(signs with an unknown bias), with the plans of `AcceleratedSGD` and `ClippedSGD`, whose steps are written in numpy.

Appendix C: iterates w <- (1 - 1/kappa) w + b/kappa with independent errors b of Pareto's law, from 0; the proof that it
refutes bounds the mean of |w|, and takes its square for a bound on the mean of |w|^2.

Measured: logistic loss, features in R^10 in uniform directions whose length has such a law (mean square 1), labels of
weights of norm 2; 30 full-batch steps of `ClippedSGD` (epsilon = 1, delta = 1e-6, replace_one), clipped at a quantile
that a pilot finds privately, or at the promised largest length ("uniformly Lipschitz", no bias). Excess risk on 50,000
records that no run has seen; of three step sizes each takes the best of one run on another sample, which looks at the
unseen records and is not charged.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from paper_drawing import (
    COLORS,
    LOWER,
    MARKERS,
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
from scipy.optimize import minimize
from torch.utils.data import TensorDataset

import torch_dpsco as dp
from torch_dpsco.algorithms.heavy_tailed_numbers import (
    OnePass,
    OnePassPlan,
    accelerated_plan,
    averaging_schedule,
    proximal_pl_plan,
    strongly_convex_plan,
)
from torch_dpsco.algorithms.localized_numbers import PhaseTask, localized_schedule_ballfree

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ORDERS = (2.0, 3.0, 4.0, 8.0)
DIM = 10
LARGEST, BEYOND = 100.0, 0.2  # length of features before scaling; shape of their law, less k
RHO = 0.5
BUDGET = dp.Budget(1.0, 1e-6, adjacency="replace_one")
STEPS, LRS, NORM, UNSEEN = 30, (0.2, 2.0, 20.0), 2.0, 50_000
LARGE = (10**6, 10**7, 10**8, 10**9)
# of sqrt(d)/(epsilon n), in the part of a bound that privacy costs
POWERS: dict[str, Callable[[float], float]] = {
    "lower bound, convex (Theorem 7)": lambda k: (k - 1) / k,
    "lower bound, strongly convex (Theorem 8)": lambda k: 2 * (k - 1) / k,
    "AcceleratedSGD": lambda k: min((k - 1) / k, 4 * (k - 1) / (5 * k - 1)),
    "LocalizedSGD": lambda k: (k - 1) / k,
    "ClippedSGD": lambda k: 2 * (k - 1) / k,
    "ProximalSGD": lambda k: 2 * (k - 1) / k,
}


def planned(name: str, k: float, n: int) -> float:
    """Returns the bound of a plan where sampling costs nothing: d = 10, rho = 0.5, D = 2, r_k = 1, kappa = 4."""
    common = {"n": n, "dim": DIM, "rho": RHO}
    if name == "LocalizedSGD":
        task = PhaseTask(
            **common, moment_order=k, second_moment=1e-9, diameter=2.0, max_steps=None
        )
        return localized_schedule_ballfree(task, moment_2k=1.0).bound
    data = OnePass(**common, moment=1.0, moment_order=k, second_moment=1e-9)
    if name == "AcceleratedSGD":
        return accelerated_plan(data, smoothness=1.0, diameter=2.0).bound
    if name == "ClippedSGD":
        return strongly_convex_plan(
            data, smoothness=1.0, strong_convexity=0.25, diameter=2.0
        ).bound
    return proximal_pl_plan(data, smoothness=1.0, pl_constant=0.25, initial_gap=2.0).bound


def rates() -> Exhibit:
    """Returns the exhibit of Figure 1: powers of sqrt(d)/(epsilon n) against the number of moments."""
    orders = np.linspace(2, 8, 60)
    names = list(POWERS)[2:]
    found = {
        name: [-slope(LARGE, [planned(name, k, n) for n in LARGE]) for k in ORDERS]
        for name in names
    }

    def panel(axes: Axes) -> None:
        for j, (name, power) in enumerate(POWERS.items()):
            is_lower = name not in found
            look = (
                {"linestyle": LOWER, "linewidth": 4}
                if is_lower
                else {"linestyle": OURS, "linewidth": 1.2}
            )
            axes.plot(orders, list(map(power, orders)), color=COLORS[j], label=name, **look)
            if not is_lower:
                axes.plot(ORDERS, found[name], MARKERS[j], color=COLORS[j])
        axes.set(
            title="Figure 1: what privacy costs",
            xlabel="moments k of the gradient",
            ylabel="power of sqrt(d)/(epsilon n)",
        )
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, 0.0), borderaxespad=4.4)

    rows = {
        name: [
            *(round(power(k), 3) for k in ORDERS),
            *(round(s, 3) for s in found.get(name, [])),
        ]
        for name, power in POWERS.items()
    }
    for name in list(POWERS)[:2]:
        rows[name] += ["-"] * len(ORDERS)
    off = max(
        abs(s - POWERS[name](k))
        for name in names
        for s, k in zip(found[name], ORDERS, strict=True)
    )
    says = (
        "The part of our bounds that privacy costs falls with the power of sqrt(d)/(epsilon n) of the "
        "lower bounds, but for "
        f"AcceleratedSGD, which falls more slowly; plans for n = {LARGE[0]:,} to {LARGE[-1]:,} (dots) are "
        f"within {off:.2g} of these powers (ProximalSGD makes steps of order log n)."
    )
    head = (
        "",
        *(f"power, k = {k:g}" for k in ORDERS),
        *(f"of plans, k = {k:g}" for k in ORDERS),
    )
    note = (
        "Besides, every bound has a part of sampling, n^(-1/2) or 1/n, as the lower bounds do. "
        "LocalizedSGD needs 2 k moments of the supremum; D, smoothness and curvature fixed."
    )
    return Exhibit("heavy_rates", says, table(head, rows), [panel], 1, note)


def lengths(k: float, count: int, generator: np.random.Generator) -> np.ndarray:
    """Returns lengths of a Pareto law of shape k + 0.2 that is cut at 100, with mean square 1."""
    shape = k + BEYOND
    cut = LARGEST**-shape
    drawn = (cut + (1 - cut) * generator.random(count)) ** (-1 / shape)
    return drawn / moment(k, 2.0) ** 0.5


def moment(k: float, order: float) -> float:
    """Returns the moment of an order of that law before it is scaled."""
    shape = k + BEYOND
    return shape / (shape - order) * (1 - LARGEST ** (order - shape)) / (1 - LARGEST**-shape)


def bounds(sizes: Sequence[int]) -> Exhibit:
    """Returns the exhibit of bounds against n: with k moments, and with the largest norm."""
    drawn, rows = [], {}
    for j, k in enumerate(ORDERS):
        scale = moment(k, 2.0) ** 0.5
        r_k, most = moment(k, k) ** (1 / k) / scale, LARGEST / scale
        ours = [_bound(n, r_k, k) for n in sizes]
        uniform = [_bound(n, most, 1e6) for n in sizes]
        drawn += [
            Series(f"k = {k:g} moments", sizes, ours, OURS, j),
            Series("_", sizes, uniform, PUBLISHED, j),
        ]
        rows[f"k = {k:g}"] = [
            r_k,
            most,
            ours[1],
            uniform[1] / ours[1],
            ours[-1],
            uniform[-1] / ours[-1],
            round(slope(sizes, ours), 2),
        ]
    says = (
        f"Moments in place of the largest gradient make the bound {rows['k = 2'][3]:.2g} (k = 2) to "
        f"{rows['k = 8'][3]:.2g} "
        f"(k = 8) times smaller at n = {sizes[1]:,}; for many more records the largest gradient of a cut "
        "law is the better promise if k is small."
    )
    head = (
        "",
        "r_k",
        "largest",
        f"bound, n = {sizes[1]:,}",
        "with the largest: times",
        f"bound, n = {sizes[-1]:,}",
        "with the largest: times",
        "slope",
    )
    note = (
        "Bounds of `AcceleratedSGD`: solid with k moments, dashed with the largest norm only; Pareto "
        "norms cut at 100, mean square 1."
    )
    panel = loglog("Pareto gradients", "records n", "bound on the excess risk", drawn)
    return Exhibit("heavy_bounds", says, table(head, rows), [panel], 1, note)


def _bound(n: int, r_k: float, k: float) -> float:
    data = OnePass(n=n, dim=DIM, rho=RHO, moment=r_k, moment_order=k, second_moment=1.0)
    return accelerated_plan(data, smoothness=1.0, diameter=2.0).bound


def far_point(k: float, n: int) -> tuple[float, np.ndarray]:
    """Returns p and the point x: a record is x with probability p, else 0; E|x|^k = 1, x in an unknown corner."""
    p = min(0.5, math.sqrt(DIM) / (math.sqrt(2 * RHO) * n))
    return p, np.full(DIM, DIM**-0.5) * p ** (-1 / k)


def clipped(rows: np.ndarray, clip: float) -> np.ndarray:
    """Returns rows that are no longer than a clip."""
    return rows * np.minimum(
        1.0, clip / np.maximum(np.linalg.norm(rows, axis=-1, keepdims=True), 1e-300)
    )


@functools.cache
def linear_plan(k: float, n: int) -> OnePassPlan:
    """Returns the plan of `AcceleratedSGD` for linear losses on the unit ball."""
    linear = OnePass(n=n, dim=DIM, rho=RHO, moment=1.0, moment_order=k)
    return accelerated_plan(linear, smoothness=0.0, diameter=2.0)


@functools.cache
def quadratic_plan(k: float, n: int) -> OnePassPlan:
    """Returns the plan of `ClippedSGD` for squared distances on the unit ball: |w| <= 1 and E|x|^k = 1."""
    squares = OnePass(n=n, dim=DIM, rho=RHO, moment=2.0, moment_order=k)
    return strongly_convex_plan(squares, smoothness=1.0, strong_convexity=1.0, diameter=1.0)


def linear_run(k: float, n: int, generator: np.random.Generator) -> tuple[float, float]:
    """Returns the excess risk of the planned step on f = -<w, x>, |w| <= 1, from 0; and the bound of the plan."""
    p, point = far_point(k, n)
    plan = linear_plan(k, n)
    mean = generator.binomial(n, p) / n * clipped(-point, plan.clip)
    w = -plan.lr * (mean + plan.noise_std * generator.standard_normal(DIM))
    w *= min(1.0, 1.0 / float(np.linalg.norm(w)))
    truth = p * point
    return float(np.linalg.norm(truth) - w @ truth), plan.bound


def quadratic_run(k: float, n: int, generator: np.random.Generator) -> tuple[float, float]:
    """Returns the excess risk of the planned steps on f = |w - x|^2/2, |w| <= 1, from 0; and the bound of the plan."""
    p, point = far_point(k, n)
    plan = quadratic_plan(k, n)
    schedule = averaging_schedule(strong_convexity=1.0, smoothness=1.0, steps=plan.steps)
    size, w, total = n // plan.steps, np.zeros(DIM), np.zeros(DIM)
    for lr, weight in zip(schedule.lr, schedule.weights, strict=True):
        share = generator.binomial(size, p) / size
        mean = share * clipped(w - point, plan.clip) + (1 - share) * clipped(w, plan.clip)
        w = w - lr * (mean + plan.noise_std * generator.standard_normal(DIM))
        w *= min(1.0, 1.0 / max(float(np.linalg.norm(w)), 1e-300))
        total += weight * w
    off = total / sum(schedule.weights) - p * point
    return float(off @ off) / 2, plan.bound


def signs(n: int, total: int, generator: np.random.Generator) -> np.ndarray:
    """Returns the mean of n rows whose coordinates are +-1/sqrt(d), with the bias 1/sqrt(total): |x| = 1."""
    ups = generator.binomial(n, (1 + total**-0.5) / 2, DIM)
    return (2 * ups / n - 1) / math.sqrt(DIM)


def sampled_linear_run(k: float, n: int, generator: np.random.Generator) -> tuple[float, float]:
    """Returns what `linear_run` does, for signs, whose mean takes all records to find."""
    plan, truth = linear_plan(k, n), np.full(DIM, (n * DIM) ** -0.5)
    mean = -signs(n, n, generator) * min(1.0, plan.clip)
    w = -plan.lr * (mean + plan.noise_std * generator.standard_normal(DIM))
    w *= min(1.0, 1.0 / float(np.linalg.norm(w)))
    return float(np.linalg.norm(truth) - w @ truth), plan.bound


def sampled_quadratic_run(
    k: float, n: int, generator: np.random.Generator
) -> tuple[float, float]:
    """Returns what `quadratic_run` does, for signs; no gradient, which is within 2, is clipped."""
    plan, truth = quadratic_plan(k, n), np.full(DIM, (n * DIM) ** -0.5)
    assert plan.clip >= 2
    schedule = averaging_schedule(strong_convexity=1.0, smoothness=1.0, steps=plan.steps)
    size, w, total = n // plan.steps, np.zeros(DIM), np.zeros(DIM)
    for lr, weight in zip(schedule.lr, schedule.weights, strict=True):
        noise = plan.noise_std * generator.standard_normal(DIM)
        w = w - lr * (w - signs(size, n, generator) + noise)
        w *= min(1.0, 1.0 / max(float(np.linalg.norm(w)), 1e-300))
        total += weight * w
    off = total / sum(schedule.weights) - truth
    return float(off @ off) / 2, plan.bound


def instances(sizes: Sequence[int], runs: int) -> Exhibit:
    """Returns the exhibit of the instances behind the lower bounds: the risk of our plans on them."""
    panels, rows = [], {}
    generator = np.random.default_rng(0)
    for title, run, factor in (
        ("Theorem 7, privacy: linear", linear_run, 1),
        ("Theorem 8, privacy: strongly convex", quadratic_run, 2),
        ("Theorem 7, sampling: linear", sampled_linear_run, 1),
        ("Theorem 8, sampling: strongly convex", sampled_quadratic_run, 2),
    ):
        private = "privacy" in title
        drawn = []
        for j, k in enumerate((2.0, 4.0)):
            found = [[run(k, n, generator) for _ in range(runs)] for n in sizes]
            risks = [np.array([risk for risk, _ in each]) for each in found]
            eighths = [
                [float(part.mean()) for part in np.array_split(each, 8)] for each in risks
            ]
            bound = [each[0][1] for each in found]
            order = [
                (math.sqrt(DIM) / (math.sqrt(2 * RHO) * n)) ** (factor * (k - 1) / k)
                if private
                else n ** (-factor / 2)
                for n in sizes
            ]
            drawn += [
                measured(f"k = {k:g}: measured", sizes, eighths, j, OURS),
                Series(f"k = {k:g}: our bound", sizes, bound, PUBLISHED, j),
                Series(f"k = {k:g}: lower bound, constant 1", sizes, order, LOWER, j),
            ]
            medians = [float(np.median(each)) for each in eighths]
            rows[f"{title}, k = {k:g}"] = [
                f"{slope(sizes, medians):.2f} +- {slope_error(sizes, eighths):.2f}",
                round(slope(sizes, order), 2),
                round(slope(sizes, bound), 2),
                medians[-1] / order[-1],
            ]
        panels.append(loglog(title, "records n", "excess risk", drawn))
    gaps = {
        part: [row[3] for title, row in rows.items() if part in title]
        for part in ("privacy", "sampling")
    }
    steep = [str(row[0]).split(" ")[0] for title, row in rows.items() if "sampling" in title]
    says = (
        "On the instances behind the lower bounds our plans lose what privacy must cost, with its slope: "
        f"{words(min(gaps['privacy']))} to {words(max(gaps['privacy']))} times the order of the lower bound; and "
        f"{words(min(gaps['sampling']))} to {words(max(gaps['sampling']))} times what sampling must cost, where noise, "
        f"which falls faster for k = 4, still shows (slopes {', '.join(steep)})."
    )
    head = (
        "",
        "slope: measured",
        "lower bound",
        "our bound",
        "measured over the lower bound, largest n",
    )
    note = (
        "Privacy: a record is a far corner with probability p = sqrt(d)/(epsilon n), else 0, so that E|x|^k = 1. "
        "Sampling: d signs over sqrt(d), each with a bias of 1/sqrt(n). "
        f"d = {DIM}, rho = {RHO:g} (epsilon = 1 in the paper's sense). Means of {runs} runs, whiskers over "
        "eighths of them. Dashed: our bounds."
    )
    return Exhibit("heavy_instances", says, table(head, rows), panels, 2, note)


SHAPES = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)  # h, of Pareto's law of shape 2 + h


def spread(h: float) -> float:
    """Returns E b^2/(E b)^2 - 1 of Pareto's law of shape 2 + h."""
    return 1 / (h * (2 + h))


def iterates(kappa: float, h: float, count: int, generator: np.random.Generator) -> np.ndarray:
    """Returns last iterates of runs of 12 kappa steps, in units of the mean of the errors."""
    w = np.zeros(count)
    for _ in range(1 if kappa == 1 else round(12 * kappa)):
        b = generator.random(count) ** (-1 / (2 + h)) * (1 + h) / (2 + h)
        w = (1 - 1 / kappa) * w + b / kappa
    return w


def squares(draws: int) -> Exhibit:
    """Returns the exhibit of Appendix C: the mean square of a distance over the square of its mean."""
    generator = np.random.default_rng(0)
    drawn, rows = [], {}
    for j, kappa in enumerate((1.0, 4.0, 16.0)):
        true = [1 + spread(h) / (2 * kappa - 1) for h in SHAPES]
        label = f"kappa = {kappa:g}"
        drawn.append(Series(label, SHAPES, true, OURS, j))
        light = [
            h for h in SHAPES if h >= 1
        ]  # below, hardly any draw has what the mean is made of
        found = []
        for h in light:
            parts = np.array_split(iterates(kappa, h, draws, generator), 8)
            found.append([float((part**2).mean() / part.mean() ** 2) for part in parts])
        drawn.append(measured("_", light, found, j, ""))
        medians = dict(zip(light, (float(np.median(each)) for each in found), strict=True))
        rows[label] = [*(true[SHAPES.index(h)] for h in (0.02, 0.1, 1.0)), medians[1.0]]
    mended = [1 + spread(h) for h in SHAPES]
    rows["mended (Cauchy, Schwarz)"] = [*(1 + spread(h) for h in (0.02, 0.1, 1.0)), "-"]
    rows["claimed"] = [1.0, 1.0, 1.0, "-"]
    drawn += [
        Series("the proof claims at most", SHAPES, [1.0] * len(SHAPES), PUBLISHED, 4),
        Series("mended, whatever kappa is", SHAPES, mended, LOWER, 5),
    ]
    says = (
        f"The mean square of the distance to the minimizer is {rows['kappa = 1'][0]:.3g} times the square of its mean "
        f"for errors of Pareto's law of shape 2.02, where the proof has 1; averaging over kappa steps leaves "
        f"{rows['kappa = 16'][0]:.2g} times at kappa = 16, and the mended bound is that of kappa = 1 for all."
    )
    head = (
        "mean square over square of the mean",
        "h = 0.02",
        "h = 0.1",
        "h = 1",
        "measured, h = 1",
    )
    note = (
        "Steps w <- (1 - 1/kappa) w + b/kappa with errors b of shape 2 + h: lines are exact, "
        f"1 + (E b^2/(E b)^2 - 1)/(2 kappa - 1); dots are {draws:,} runs of 12 kappa steps, whiskers over eighths of "
        "them."
    )
    panel = loglog(
        "Appendix C", "h: moments beyond two", "mean square over square of the mean", drawn
    )
    return Exhibit("heavy_squares", says, table(head, rows), [panel], 1, note)


class Task:
    """Draws records, and says what weights lose on unseen ones."""

    def __init__(self, k: float) -> None:
        self._k, self._generator = k, np.random.default_rng(int(k))
        self._unseen = self.draw(UNSEEN)
        x, y = (t.double().numpy() for t in self._unseen.tensors)
        self._signed = x * (2 * y - 1)

        def both(w: np.ndarray) -> tuple[float, np.ndarray]:
            scores = self._signed @ w
            return float(np.logaddexp(0, -scores).mean()), -self._signed.T @ (
                1 / (1 + np.exp(scores))
            ) / UNSEEN

        best = minimize(both, np.zeros(DIM), jac=True, method="L-BFGS-B")
        self._value, self._least = both, float(best.fun)
        self._lrs: dict[tuple[int, Callable[[], float | dp.Pilot]], float] = {}

    def draw(self, n: int) -> TensorDataset:
        """Returns n records."""
        x = self._generator.standard_normal((n, DIM))
        x *= (lengths(self._k, n, self._generator) / np.linalg.norm(x, axis=1))[:, None]
        chance = 1 / (1 + np.exp(-NORM * DIM**0.5 * x[:, 0]))
        y = self._generator.random(n) < chance
        return TensorDataset(torch.from_numpy(x).float(), torch.from_numpy(y).float()[:, None])

    def risk(self, n: int, clip: Callable[[], float | dp.Pilot]) -> float:
        """Returns the excess risk of a run on n records, at the step size that was looked up."""

        def once(lr: float) -> float:
            return self.excess(trained(self.draw(n), clip(), lr))

        if (n, clip) not in self._lrs:
            self._lrs[n, clip] = min(LRS, key=once)
        return once(self._lrs[n, clip])

    def excess(self, weight: torch.Tensor) -> float:
        """Returns the risk above the least one."""
        return self._value(weight.detach().double().numpy().reshape(-1))[0] - self._least


def trained(data: TensorDataset, clip: float | dp.Pilot, lr: float) -> torch.Tensor:
    """Returns the weights of 30 full-batch steps at a clip."""
    model = dp.attach(torch.nn.Linear(DIM, 1, bias=False))
    torch.nn.init.zeros_(model.weight)
    plan = dp.ClippedSGD.plan(
        n=len(data),
        budget=BUDGET,
        dim=DIM,
        sampling="full",
        steps=STEPS,
        clip=clip,
        lr=lr,
        average="weighted",
    )
    loss = torch.nn.BCEWithLogitsLoss()
    dp.fit(model, dp.ClippedSGD(model.parameters(), plan), data, loss, progress=False)
    return model.weight


def pareto(orders: Sequence[float], sizes: Sequence[int], runs: int) -> Exhibit:
    """Returns the exhibit of the measured risk: clipped at a private quantile, or at the largest length."""
    panels: list[Callable[[Axes], None]] = []
    drawn, rows = [], {}
    for j, k in enumerate(orders):
        task = Task(k)
        most = LARGEST / moment(k, 2.0) ** 0.5
        clips = {
            "pilot": lambda most=most: dp.Pilot(c_max=most),
            "largest": lambda most=most: most,
        }
        for kind, clip in clips.items():
            found = [[task.risk(n, clip) for _ in range(runs)] for n in sizes]
            label = f"k = {k:g}" if kind == "pilot" else "_"
            drawn.append(
                measured(label, sizes, found, j, OURS if kind == "pilot" else PUBLISHED)
            )
            medians = [float(np.median(each)) for each in found]
            rows[
                f"k = {k:g}, clipped at {'a private quantile' if kind == 'pilot' else 'the largest length'}"
            ] = [
                *medians,
                f"{slope(sizes, medians):.2f} +- {slope_error(sizes, found):.2f}",
            ]
    names = list(rows)
    ratios = [rows[names[2 * j + 1]][-2] / rows[names[2 * j]][-2] for j in range(len(orders))]
    panels.append(loglog("Pareto features", "records n", "excess risk", drawn))
    says = (
        f"At n = {sizes[-1]:,} clipping at a private quantile has {words(min(ratios))} to "
        f"{words(max(ratios))} times less excess "
        f"risk than noise for the largest record, whatever the number of moments."
    )
    head = ("median excess risk at n =", *(f"{n:,}" for n in sizes), "slope")
    note = (
        f"Solid: clipped at a private quantile; dashed: at the promised largest length. Medians of {runs} "
        "runs, whiskers from lowest to highest; epsilon = 1."
    )
    return Exhibit("heavy_pareto", says, table(head, rows), panels, 1, note)


def exhibits(smoke: bool) -> Iterator[Exhibit]:
    """Yields the exhibits of the paper."""
    yield rates()
    yield bounds((10**4, 10**5) if smoke else tuple(10**j for j in range(3, 9)))
    yield instances(
        (10**4, 10**5) if smoke else tuple(10**j for j in range(3, 8)), 16 if smoke else 400
    )
    yield squares(10_000 if smoke else 200_000)
    yield pareto(
        ORDERS[:1] if smoke else ORDERS,
        (1_000, 2_000) if smoke else (1_000, 4_000, 16_000, 64_000),
        1 if smoke else 3,
    )
