"""Exhibits of Lowy, Razaviyayn 2021: Tables 1 to 6 by their formulas, and the risk of releases of `OutputPerturbation`.

Bounds: L = R = beta = 1, and mu = 0.1 where losses are strongly convex; d = 10, epsilon = 1, n = 1e4 where they are not
on the axis; delta = 0, or 1e-6. "Theirs" are the constants of the rows of the tables (Corollaries 3.1, 3.2, C.1, C.2,
4.1, 4.2, D.1, D.2), "ours" those of docs/proofs/output.md for an exact minimizer. A bound above L R says nothing, since
a fixed answer is no worse.

Measured: logistic loss on made-up records of norm 1 in 10 dimensions, regularizer 0.1 a record (strongly convex) or
the one of the least bound (convex); the plan of `OutputPerturbation` under replace_one says the noise, of which 200 are
drawn; excess over the minimum of the same objective (strongly convex) or of the loss itself over the ball of radius 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import paper_adult
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
from scipy.optimize import minimize

import torch_dpsco as dp
from tests.reference.papers import output as papers
from torch_dpsco.estimators.objectives import LinearObjective
from torch_dpsco.estimators.output import tilted_sensitivity
from torch_dpsco.estimators.records import Records
from torch_dpsco.estimators.solvers import agd_certified_steps, solve

MU, DIM, EPSILON, N, DELTA = 0.1, 10, 1.0, 10_000, 1e-6
STRENGTH = 0.8  # norm of the weights behind the labels: the best model is inside of the ball
SIZES = tuple(np.geomspace(1e3, 1e7, 17).round().astype(int).tolist())
DIMS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
EPSILONS = tuple(np.geomspace(0.05, 20, 14).tolist())
Bound = Callable[[int, int, float, float], float]  # of n, d, epsilon, delta

SAMPLE: dict[str, tuple[Bound, Bound]] = {  # name: theirs, ours
    "strongly convex": (
        lambda n, d, e, D: (9 if D == 0 else 6) / MU * papers.paper_ratio(n, d, e, D),
        lambda n, d, e, D: papers.risk_strongly_convex(1.0, MU, n, d, e, D),
    ),
    "strongly convex, smooth": (
        lambda n, d, e, D: (
            (26 if D == 0 else 13.5) / MU**2 * papers.paper_ratio(n, d, e, D) ** 2
        ),
        lambda n, d, e, D: papers.risk_strongly_convex(1.0, MU, n, d, e, D, smoothness=1.0),
    ),
    "convex": (
        lambda n, d, e, D: (49 if D == 0 else 25) * math.sqrt(papers.paper_ratio(n, d, e, D)),
        lambda n, d, e, D: papers.risk_convex_erm(1.0, 1.0, n, d, e, D),
    ),
    "convex, smooth": (
        lambda n, d, e, D: (65 if D == 0 else 127) * papers.paper_ratio(n, d, e, D) ** (2 / 3),
        lambda n, d, e, D: papers.risk_smooth_erm(1.0, 1.0, 1.0, n, d, e, D),
    ),
}
NEW: dict[str, tuple[Bound, Bound]] = {
    "strongly convex": (
        lambda n, d, e, D: (5 / n + (9 if D == 0 else 6) * papers.paper_ratio(n, d, e, D)) / MU,
        lambda n, d, e, D: papers.risk_strongly_convex(1.0, MU, n, d, e, D, population=True),
    ),
    "strongly convex, smooth": (
        lambda n, d, e, D: (
            (5 / n + (26 if D == 0 else 13.5) / MU * papers.paper_ratio(n, d, e, D) ** 2) / MU
        ),
        lambda n, d, e, D: papers.risk_strongly_convex(
            1.0, MU, n, d, e, D, smoothness=1.0, population=True
        ),
    ),
    "convex": (
        lambda n, d, e, D: 32 * (math.sqrt(papers.paper_ratio(n, d, e, D)) + n**-0.5),
        lambda n, d, e, D: papers.risk_convex_population(1.0, 1.0, n, d, e, D),
    ),
    "convex, smooth": (
        lambda n, d, e, D: 128 * (papers.paper_ratio(n, d, e, D) ** (2 / 3) + n**-0.5),
        lambda n, d, e, D: papers.risk_smooth_population(1.0, 1.0, 1.0, n, d, e, D),
    ),
}


def lower(n: int, d: int, epsilon: float, delta: float) -> float:
    """Returns the order of the lower bound for strongly convex sums (Proposition 2.5), with constant 1."""
    return min(1.0, (d if delta == 0 else math.sqrt(d)) / (epsilon * n)) ** 2


def bounds(kind: dict[str, tuple[Bound, Bound]], name: str, tables: str, where: str) -> Exhibit:
    """Returns the exhibit of a pair of tables: bounds against n, d and epsilon, without and with delta."""
    axes = {
        "n": (SIZES, lambda x, D: (x, DIM, EPSILON, D)),
        "d": (DIMS, lambda x, D: (N, x, EPSILON, D)),
        "epsilon": (EPSILONS, lambda x, D: (N, DIM, x, D)),
    }
    panels, rows = [], {}
    for delta in (0.0, DELTA):
        for axis, (values, point) in axes.items():
            drawn = []
            for k, (label, (theirs, ours)) in enumerate(kind.items()):
                for bound, style in ((theirs, PUBLISHED), (ours, OURS)):
                    y = [bound(*point(x, delta)) for x in values]
                    drawn.append(Series(label if style == OURS else "", values, y, style, k))
                    if axis == "n":
                        rows.setdefault(f"{label}, delta = {delta:g}", []).extend(
                            [bound(N, DIM, EPSILON, delta), round(slope(values[8:], y[8:]), 2)]
                        )
            if kind is SAMPLE:
                y = [lower(*point(x, delta)) for x in values]
                drawn.append(Series("lower bound, strongly convex", values, y, LOWER, 4))
            drawn = [s._replace(label=s.label or "_") for s in drawn]
            named = len(panels) == 4  # below the middle of the second row
            panels.append(
                loglog(
                    f"delta = {delta:g}", axis, f"bound on the risk {where}", drawn, legend=named
                )
            )
    gains = [row[0] / row[2] for row in rows.values()]
    same = "the same" if all(row[1] == row[3] for row in rows.values()) else "nearly the same"
    says = (
        f"With explicit constants the bounds on the risk {where} are {words(min(gains))} to "
        f"{words(max(gains))} times smaller "
        f"than printed, and fall with {same} slopes in n."
    )
    head = ("losses", "theirs, n = 10,000", "slope in n", "ours", "slope in n")
    note = (
        f"{tables} by formula: theirs dashed, ours solid; d = {DIM}, epsilon = {EPSILON:g}, L = R = beta = "
        f"1, mu = {MU}. Ours are for the exact minimizer (a certified point costs a thousandth more), "
        "theirs for an approximate one; above 1 a fixed answer is no worse."
    )
    return Exhibit(name, says, table(head, rows), panels, 3, note)


def tilted() -> Exhibit:
    """Returns the exhibit of Tables 1 and 2: how far one record moves a tilted minimizer, and the noise."""
    tilts, panels, rows = np.geomspace(0.01, 30, 25).tolist(), [], {}
    sizes, reach = (100, 1_000, 10_000), 1.0  # losses within an interval of length 1
    drawn = []
    for k, n in enumerate(sizes):
        theirs = [papers.tilted_sensitivity_paper(t, reach, n, 1.0, MU) for t in tilts]
        ours = [
            tilted_sensitivity(t, reach, n, lipschitz=1.0, strong_convexity=MU) for t in tilts
        ]
        drawn += [
            Series("_", tilts, theirs, PUBLISHED, k),
            Series(f"n = {n:,}", tilts, ours, OURS, k),
        ]
        for t in (0.01, 1.0, 3.0, 10.0):
            pair = (
                papers.tilted_sensitivity_paper(t, reach, n, 1.0, MU),
                tilted_sensitivity(t, reach, n, lipschitz=1.0, strong_convexity=MU),
            )
            rows[f"n = {n:,}, tilt {t:g}"] = [*pair, pair[0] / pair[1]]
    panels.append(loglog("Lemma 5.2", "tilt tau", "sensitivity (L = 1, mu = 0.1)", drawn))
    drawn = []
    for k, delta in enumerate((0.0, DELTA)):
        q = papers.paper_ratio(N, DIM, EPSILON, delta)
        theirs = [9 * math.exp(t * reach) / MU * q for t in tilts]
        first = papers.noise_norms(DIM, EPSILON, delta)[0]
        ours = [
            first * tilted_sensitivity(t, reach, N, lipschitz=1.0, strong_convexity=MU)
            for t in tilts
        ]
        drawn += [
            Series("_", tilts, theirs, PUBLISHED, k),
            Series(f"delta = {delta:g}", tilts, ours, OURS, k),
        ]
    panels.append(
        loglog(
            "n = 10,000, d = 10, epsilon = 1",
            "tilt tau",
            "bound on the excess tilted risk",
            drawn,
        )
    )
    says = (
        "A tilt costs the factor e^(tau r) in noise, r the range of the losses, until one record weighs "
        "everything: a "
        f"tilt of 3 needs {rows['n = 10,000, tilt 3'][1] / rows['n = 10,000, tilt 0.01'][1]:.2g} times the "
        "noise of the mean."
    )
    note = (
        "Tables 1 and 2 by formula: theirs dashed (Theorem 5.1: 9 L^2 C q/mu), ours solid (L E|z| at our "
        "sensitivity); losses within an interval of length r = 1."
    )
    return Exhibit(
        "output_tilted", says, table(("", "theirs", "ours", "ratio"), rows), panels, 2, note
    )


def made_up(n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns records of norm 1, and signs that depend on them."""
    generator = np.random.default_rng(seed)
    x = generator.standard_normal((n, DIM))
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    y = np.where(generator.random(n) < 1 / (1 + np.exp(-STRENGTH * x[:, 0])), 1.0, -1.0)
    return x, y


def value(w: np.ndarray, x: np.ndarray, y: np.ndarray, lam: float) -> float:
    """Returns the mean logistic loss and its regularizer."""
    return float(np.logaddexp(0, -y * (x @ w)).mean() + lam / 2 * w @ w)


def least(x: np.ndarray, y: np.ndarray, lam: float, radius: float | None = None) -> np.ndarray:
    """Returns the minimizer, within a ball if there is one."""

    def both(w: np.ndarray) -> tuple[float, np.ndarray]:
        slopes = -y / (1 + np.exp(y * (x @ w)))
        return value(w, x, y, lam), x.T @ slopes / len(x) + lam * w

    if radius is None:
        return minimize(
            both,
            np.zeros(DIM),
            jac=True,
            method="L-BFGS-B",
            options={"ftol": 1e-15, "gtol": 1e-10},
        ).x
    ball = {"type": "ineq", "fun": lambda w: radius**2 - w @ w, "jac": lambda w: -2 * w}
    return minimize(
        both,
        np.full(DIM, 1e-3),
        jac=True,
        method="SLSQP",
        constraints=[ball],
        options={"ftol": 1e-13, "maxiter": 300},
    ).x


def noise_std(n: int, reg: float) -> float:
    """Returns the std of the noise of a plan of `OutputPerturbation`."""
    plan = dp.OutputPerturbation.plan(
        model=torch.nn.Linear(DIM, 1, bias=False),
        loss=dp.losses.Logistic(),
        n=n,
        budget=dp.Budget(EPSILON, DELTA, "replace_one"),
        bound_x=1.0,
        reg=reg,
    )
    return float(plan.noise_scale)


def risk(sizes: Sequence[int], draws: int) -> Exhibit:
    """Returns the measured excess risk of releases against n, beside the bounds."""
    strong: list[list[float]] = []
    convex: list[list[float]] = []
    generator = np.random.default_rng(1)
    for n in sizes:
        x, y = made_up(n, n)
        w, std = least(x, y, MU), noise_std(n, MU * n)
        base = value(w, x, y, MU)
        noisy = [
            value(w + std * generator.standard_normal(DIM), x, y, MU) - base
            for _ in range(draws)
        ]
        strong.append(np.array_split(noisy, 8))  # eight means
        lam = papers.reg_convex_erm(1.0, 1.0, n, DIM, EPSILON, DELTA)
        start, std = least(x, y, lam), noise_std(n, lam * n)
        base = value(least(x, y, 0.0, 1.0), x, y, 0.0)
        found = []
        for _ in range(draws):
            z = start + std * generator.standard_normal(DIM)
            found.append(value(z / max(1.0, float(np.linalg.norm(z))), x, y, 0.0) - base)
        convex.append(np.array_split(found, 8))
    means = [
        [[float(part.mean()) for part in parts] for parts in kind] for kind in (strong, convex)
    ]
    x = list(sizes)
    theirs = [
        [SAMPLE[name][0](n, DIM, EPSILON, DELTA) for n in x]
        for name in ("strongly convex, smooth", "convex")
    ]
    ours = [
        [
            papers.risk_strongly_convex(1.0, MU, n, DIM, EPSILON, DELTA, smoothness=0.25 + MU)
            for n in x
        ],
        [papers.risk_convex_erm(1.0, 1.0, n, DIM, EPSILON, DELTA) for n in x],
    ]
    theirs[0] = [
        bound * (0.25 + MU) for bound in theirs[0]
    ]  # beta of the logistic loss with its regularizer
    panels, rows = [], {}
    for k, title in enumerate(
        ("strongly convex, smooth: mu = 0.1", "convex: the regularizer of the least bound")
    ):
        drawn = [
            Series("bound as printed", x, theirs[k], PUBLISHED, 1),
            Series("our bound", x, ours[k], OURS, 0),
            measured("measured", x, means[k], 2, OURS),
        ]
        if k == 0:
            drawn.append(
                Series(
                    "lower bound, constant 1",
                    x,
                    [lower(n, DIM, EPSILON, DELTA) for n in x],
                    LOWER,
                    4,
                )
            )
        panels.append(loglog(title, "records n", "excess risk on the sample", drawn))
        medians = [float(np.median(each)) for each in means[k]]
        rows[title.split(":")[0]] = [
            round(slope(x, theirs[k]), 2),
            round(slope(x, ours[k]), 2),
            f"{slope(x, medians):.2f} +- {slope_error(x, means[k]):.2f}",
            ours[k][-1] / medians[-1],
        ]
    met, easy = rows["strongly convex, smooth"], rows["convex"]
    says = (
        f"On a strongly convex task the measured risk falls as n to the power {met[2]}, as the bounds say "
        f"({met[1]:.2f}), and is {met[3]:.2g} times below ours; without strong convexity it falls as n to "
        "the power "
        f"{easy[2]}, where the bounds, which hold for the worst data, say {easy[1]:.2f}."
    )
    head = ("", "slope: theirs", "ours", "measured", "our bound over measured, largest n")
    note = (
        f"Logistic loss, d = {DIM}, epsilon = {EPSILON:g}, delta = {DELTA:g}, replace_one; {draws} draws "
        "of the noise that the plans say, whiskers over eighths of them."
    )
    return Exhibit("output_risk", says, table(head, rows), panels, 2, note)


class Counted(LinearObjective):
    """An objective that counts how often its records are read."""

    readings = 0

    def value_and_gradient(self, point: torch.Tensor) -> tuple[float, torch.Tensor]:
        """Reads all records once."""
        self.readings += 1
        return super().value_and_gradient(point)

    def gradient(self, point: torch.Tensor) -> torch.Tensor:
        """Reads all records once."""
        self.readings += 1
        return super().gradient(point)

    def hessian(self, point: torch.Tensor) -> torch.Tensor:
        """Reads all records once."""
        self.readings += 1
        return super().hessian(point)

    def thinned(self) -> None:
        """Returns None: all records are read each time."""


def readings(n: int) -> tuple[int, int]:
    """Returns how often the solver reads n records until its point is certified; and how often its fallback may."""
    x, y = made_up(n, n)
    records = Records(torch.from_numpy(x), torch.from_numpy(y))
    objective = Counted(dp.losses.Logistic(), records, reg=MU * n, normalizer=n)
    within = 1e-3 * 2 / (MU * n) / 2  # a thousandth more noise
    solve(objective, within)
    fallback = agd_certified_steps(MU, 0.25 + MU, math.sqrt(2 * math.log(2) / MU), MU * within)
    return objective.readings, fallback


def time(sizes: Sequence[int]) -> Exhibit:
    """Returns the exhibit of the column of run times: records that are read until the point is good enough."""
    counted = [readings(n) for n in sizes]
    kappa = (0.25 + MU) / MU
    kinds = {
        "Corollary 3.1: subgradient method": [
            2 * n * max(n, 1 / (papers.paper_ratio(n, DIM, EPSILON, DELTA) * n)) for n in sizes
        ],
        "Corollary 3.2: Katyusha, order, constant 1": [n + math.sqrt(n * kappa) for n in sizes],
        "our fallback, worst case": [
            float(n * most) for n, (_, most) in zip(sizes, counted, strict=True)
        ],
        "our solver, counted": [
            float(n * made) for n, (made, _) in zip(sizes, counted, strict=True)
        ],
    }
    styles = (PUBLISHED, LOWER, PUBLISHED, OURS)
    drawn = [
        Series(name, sizes, values, styles[k], (1, 4, 2, 0)[k])
        for k, (name, values) in enumerate(kinds.items())
    ]
    rows = {name: [*values, round(slope(sizes, values), 2)] for name, values in kinds.items()}
    most = max(made for made, _ in counted)
    says = (
        f"The solver reads all records at most {most} times until its point is certified, and its fallback at most "
        f"{max(worst for _, worst in counted)} times, where the subgradient method of Corollary 3.1 takes 2 n^2 "
        "gradients for an accuracy that is in expectation only."
    )
    head = ("records read, n =", *(f"{n:,}" for n in sizes), "slope")
    note = (
        f"Run times of Tables 5 and 6, strongly convex: mu = {MU}, logistic loss, d = {DIM}; a gradient, a value with "
        "its gradient and a Hessian count as one reading each."
    )
    panel = loglog(
        "Gradients until the point may be released", "records n", "records read", drawn
    )
    return Exhibit("output_time", says, table(head, rows), [panel], 1, note)


def exhibits(smoke: bool) -> Iterator[Exhibit]:
    """Yields the exhibits of the paper."""
    yield bounds(SAMPLE, "output_sample", "Tables 5 and 6", "on the sample")
    yield bounds(NEW, "output_new", "Tables 3 and 4", "on new records")
    yield tilted()
    yield time((500, 1_000) if smoke else (500, 2_000, 8_000, 32_000, 128_000))
    yield risk(
        (500, 1_000) if smoke else (500, 1_000, 2_000, 4_000, 8_000, 16_000, 32_000),
        16 if smoke else 200,
    )
    yield from paper_adult.exhibits(smoke)
