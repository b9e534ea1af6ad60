"""Exhibits of Asi, Liu: the users that Table 1 asks for, noise and error against rows per user at a fixed total.

Users (replace_one, delta = 1e-6, T = 100 steps): the least number for which our plan proves anything
(`calibrate_filter`), the paper's condition (Proposition 3.6: 40 log(4T/delta)/epsilon), the same argument with its
factors mended (240), and the orders of Table 1 with constant 1. Clipping each user's mean has no such condition.

Noise: std of a step on the mean gradient, T = 30 steps at epsilon = 2, gradients of rows within 1; the filter at the
radius of honest users (`pair_radius_iid`), users clipped at 1, and rows clipped at 1 whose (epsilon, delta) is that of
a group of m rows. Error: the mean of vectors in R^10, in one step; rows are within 0.5 of the mean, in directions of
their own, which is promised; users and rows are clipped at the length of the mean plus 0.5.

Smoothing (Remark 4.3): what two smoothings of a loss with gradients within 1 are off by, where both have gradients that
are 1-Lipschitz: the mean over a ball, of radius r, and Moreau's envelope, the least of f(v) + |v - w|^2/(2 l). Bounds
are r and sqrt(d)/r (Lemma 2.5), l/2 and 1/l. For |<w, x>|, |x| = 1, both are exact. A gradient of the envelope is
(w - v)/l, v where the least is; v is found to e l by 16/e^2 subgradients (Lacoste-Julien, Schmidt and Bach 2012).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from paper_drawing import (
    COLORS,
    LOWER,
    OURS,
    PUBLISHED,
    Exhibit,
    Series,
    loglog,
    measured,
    slope,
    table,
    words,
)
from scipy.special import gammaln

from tests.reference.papers.user_level import (
    clipping_noise_std,
    min_users_paper,
    published_noise_std,
)
from torch_dpsco.accounting.analysis.gaussian import gaussian_mu
from torch_dpsco.algorithms.user_numbers import (
    UserFilter,
    calibrate_filter,
    pair_radius_iid,
    smallest_users,
)
from torch_dpsco.errors import InfeasibleError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DELTA, STEPS, DIM = 1e-6, 100, 10
TOTAL, NOISE_STEPS, NOISE_EPSILON = 20_000_000, 30, 2.0
DIMS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)  # of smoothed losses
LENGTHS, SPREAD = (0.5, 10.0), 0.5  # of the mean; of a row around it


def plan(n: int, steps: int, epsilon: float, radius: float) -> UserFilter | None:
    """Returns the filter that is proved, or None."""
    try:
        return calibrate_filter(
            n_users=n, steps=steps, epsilon=epsilon, delta=DELTA, pair_radius=radius
        )
    except InfeasibleError:
        return None


def least_users(epsilon: float, steps: int) -> int:
    """Returns the least number of users for which a filter is proved."""
    found = smallest_users(lambda n: plan(n, steps, epsilon, 1.0) is not None, 4)
    assert found is not None
    return found


def users(epsilons: Sequence[float]) -> Exhibit:
    """Returns the exhibit of Table 1: users that are needed."""
    proved = [least_users(epsilon, STEPS) for epsilon in epsilons]
    printed = [min_users_paper(STEPS, DELTA, e, corrected=False) for e in epsilons]
    mended = [min_users_paper(STEPS, DELTA, e, corrected=True) for e in epsilons]
    order = [math.sqrt(1_000) / e for e in epsilons]
    ghazi = [1 / e for e in epsilons]
    drawn = [
        Series("proved here", epsilons, proved, OURS, 0),
        Series("Proposition 3.6 as printed: not enough", epsilons, printed, PUBLISHED, 1),
        Series("its argument, mended", epsilons, mended, PUBLISHED, 2),
        Series("Bassily, Sun: order sqrt(d)/epsilon, d = 1,000", epsilons, order, LOWER, 3),
        Series("Table 1, this work: order 1/epsilon", epsilons, ghazi, LOWER, 4),
    ]
    steps = (1, 10, 100, 1_000, 10_000)
    by_steps = [least_users(1.0, T) for T in steps]
    also = [
        Series("proved here", steps, by_steps, OURS, 0),
        Series(
            "as printed: not enough",
            steps,
            [min_users_paper(T, DELTA, 1.0, corrected=False) for T in steps],
            PUBLISHED,
            1,
        ),
        Series(
            "its argument, mended",
            steps,
            [min_users_paper(T, DELTA, 1.0, corrected=True) for T in steps],
            PUBLISHED,
            2,
        ),
    ]
    panels = [
        loglog("T = 100", "epsilon", "users that are needed", drawn),
        loglog("epsilon = 1", "steps T", "users that are needed", also),
    ]
    rows = {f"{e:g}": row for e, *row in zip(epsilons, proved, printed, mended, strict=True)}
    at_one = list(epsilons).index(1.0)
    fewer = 1 - proved[at_one] / printed[at_one]
    says = (
        f"At epsilon = 1 the filter accepts {proved[at_one]} users with a proof, {fewer:.0%} fewer than "
        "the published "
        f"condition asks for ({printed[at_one]}), which does not make the published noise private; "
        "clipping each user's "
        f"mean needs no such condition."
    )
    head = ("epsilon", "proved here", "as printed", "its argument, mended")
    note = "Table 1: delta = 1e-6, one user replaced; orders have constant 1 and no logarithms."
    return Exhibit("users_needed", says, table(head, rows), panels, 2, note)


def group_noise(m: int, total: int, steps: int, epsilon: float) -> float:
    """Returns the noise of full-batch means of clipped rows whose group privacy protects m of them."""
    delta = DELTA / (m * math.exp(epsilon * (1 - 1 / m)))
    return 2 / total * math.sqrt(steps) / gaussian_mu(epsilon / m, delta)


def noise(rows_per_user: Sequence[int]) -> Exhibit:
    """Returns the exhibit of the noise of a step against rows per user, at a fixed number of rows."""
    kinds: dict[str, list[float]] = {
        "filter, proved": [],
        "filter as published: not private": [],
        "users clipped at 1": [],
        "rows clipped at 1, group privacy": [],
    }
    for m in rows_per_user:
        n = TOTAL // m
        radius = pair_radius_iid(1.0, m, n, 0.01 / NOISE_STEPS)
        made = plan(n, NOISE_STEPS, NOISE_EPSILON, radius)
        kinds["filter, proved"].append(made.noise_std if made else math.nan)
        kinds["filter as published: not private"].append(
            published_noise_std(n, NOISE_STEPS, NOISE_EPSILON, DELTA, radius)
        )
        kinds["users clipped at 1"].append(
            clipping_noise_std(n, NOISE_STEPS, NOISE_EPSILON, DELTA, 1.0)
        )
        kinds["rows clipped at 1, group privacy"].append(
            group_noise(m, TOTAL, NOISE_STEPS, NOISE_EPSILON)
        )
    styles = (OURS, PUBLISHED, OURS, OURS)
    drawn = [
        Series(name, rows_per_user, values, styles[k], k)
        for k, (name, values) in enumerate(kinds.items())
    ]
    ends = [k for k, m in enumerate(rows_per_user) if not math.isnan(kinds["filter, proved"][k])]
    last = ends[-1]
    rows = {
        name: [
            *(values[rows_per_user.index(m)] for m in rows_per_user),
            round(slope(np.array(rows_per_user)[ends], np.array(values)[ends]), 2),
        ]
        for name, values in kinds.items()
    }
    ours, clipped = kinds["filter, proved"], kinds["users clipped at 1"]
    better = [m for k, m in enumerate(rows_per_user) if ours[k] < clipped[k]]
    wins = f"from {better[0]:,} to {better[-1]:,} rows per user" if better else "nowhere"
    grouped = kinds["rows clipped at 1, group privacy"]
    more = max(b / a - 1 for a, b in zip(clipped, grouped, strict=True))
    says = (
        f"At {TOTAL:,} rows in all the filter has less noise than users clipped at the bound {wins}, and accepts up to "
        f"{rows_per_user[last]:,} rows per user ({TOTAL // rows_per_user[last]:,} users); group privacy of rows costs "
        f"{more:.0%} more than clipping users at most."
    )
    head = ("std of a step, rows per user =", *map(str, rows_per_user), "slope")
    note = (
        f"By formula: T = {NOISE_STEPS}, epsilon = {NOISE_EPSILON:g}, delta = {DELTA:g}, gradients of rows "
        "within 1; nan: fewer users than are proved."
    )
    panel = loglog(
        f"{TOTAL:,} rows in all", "rows per user m", "noise of a step on the mean", drawn
    )
    return Exhibit("users_noise", says, table(head, rows), [panel], 1, note)


def filtered(x: torch.Tensor, made: UserFilter) -> torch.Tensor:
    """Returns the weighted mean of the filter, without noise; users by the thousand against all."""
    near = torch.cat(
        [(torch.cdist(part, x) <= made.pair_radius).sum(1) for part in x.split(1_000)]
    )
    start = (len(x) + 1) / 2
    weights = ((near - start) / (made.ramp_end - start)).clamp(0, 1)
    weights = weights.to(x.dtype)
    return weights @ x / weights.sum()


def errors(
    rows_per_user: Sequence[int], total: int, repeats: int, length: float
) -> dict[str, list[list[float]]]:
    """Returns the errors of private means of users, one list for each number of rows per user."""
    generator = torch.Generator().manual_seed(0)
    truth = torch.zeros(DIM, dtype=torch.float64)
    truth[0] = length
    bound = length + SPREAD
    found: dict[str, list[list[float]]] = {}
    for m in rows_per_user:
        n = total // m
        made = plan(n, 1, NOISE_EPSILON, pair_radius_iid(SPREAD, m, n, 0.01))
        stds = {
            "filter, proved": made.noise_std if made else math.nan,
            "users clipped": clipping_noise_std(n, 1, NOISE_EPSILON, DELTA, bound),
            "rows clipped, group privacy": bound * group_noise(m, total, 1, NOISE_EPSILON),
            "not private": 0.0,
        }
        missed: dict[str, list[float]] = {name: [] for name in stds}
        for _ in range(repeats):
            rows = torch.randn(n * m, DIM, generator=generator, dtype=torch.float64)
            rows = truth + SPREAD * torch.nn.functional.normalize(rows)
            x = rows.view(n, m, DIM).mean(1)
            for name, std in stds.items():
                mean = filtered(x, made) if made and name.startswith("filter") else x.mean(0)
                answer = mean + std * torch.randn(DIM, generator=generator, dtype=torch.float64)
                missed[name].append(float((answer - truth).norm()))
        for name, values in missed.items():
            found.setdefault(name, []).append(values)
    return found


def error(rows_per_user: Sequence[int], total: int, repeats: int) -> Exhibit:
    """Returns the exhibit of the measured error of a private mean against rows per user."""
    panels, rows, told = [], {}, []
    for length in LENGTHS:
        found = errors(rows_per_user, total, repeats, length)
        drawn = []
        for k, (name, runs) in enumerate(found.items()):
            kept = [j for j, values in enumerate(runs) if not math.isnan(values[0])]
            x = [rows_per_user[j] for j in kept]
            drawn.append(measured(name, x, [runs[j] for j in kept], k, OURS))
            medians = [float(np.median(values)) for values in runs]
            trend = round(slope(x, [medians[j] for j in kept]), 2)
            rows[f"length {length:g}: {name}"] = [*medians, trend]
        panels.append(
            loglog(f"mean of length {length:g}", "rows per user m", "error of the mean", drawn)
        )
        pairs = [
            rows[f"length {length:g}: {name}"][0] for name in ("filter, proved", "users clipped")
        ]
        told.append(f"{pairs[0] / pairs[1]:.2g} (length {length:g})")
    says = (
        f"With {rows_per_user[0]} rows a user the filter's error is {' and '.join(told)} times that of clipping "
        "users: it wins where the mean is long."
    )
    head = ("median error, rows per user =", *map(str, rows_per_user), "slope")
    note = (
        f"{total:,} rows in all, one step, epsilon = {NOISE_EPSILON:g}, delta = {DELTA:g}, d = {DIM}; "
        f"medians of {repeats} draws, whiskers from lowest to highest; nan: fewer users than are proved."
    )
    return Exhibit("users_error", says, table(head, rows), panels, 2, note)


def height(d: int) -> float:
    """Returns the density at 0 of one coordinate of a point of the unit ball in d dimensions."""
    return math.exp(gammaln(d / 2 + 1) - gammaln(d / 2 + 0.5)) / math.sqrt(math.pi)


def ball_mean(u: np.ndarray, d: int, r: float) -> np.ndarray:
    """Returns E |u + r y| for one coordinate y of a point of the unit ball in d dimensions."""
    y = np.linspace(-1, 1, 20_001)
    weights = (1 - y**2).clip(0) ** ((d - 1) / 2)
    return np.abs(u[:, None] + r * y) @ weights / weights.sum()


def smoothing(dims: Sequence[int]) -> Exhibit:
    """Returns the exhibit of Remark 4.3: errors of two smoothings with gradients that are 1-Lipschitz."""
    # of |u|: the curvature at 0 is 2 height/r, and the error there r E|y| = 2 r height/(d + 1)
    exact = [4 * height(d) ** 2 / (d + 1) for d in dims]
    bound = [math.sqrt(d) for d in dims]
    u = np.linspace(-2, 2, 401)

    def section(axes: Axes) -> None:
        axes.plot(u, np.abs(u), color="#555555", label="|u|")
        smooth = ball_mean(u, DIM, 2 * height(DIM))
        axes.plot(u, smooth, color=COLORS[0], label="mean over a ball, d = 10")
        envelope = np.where(np.abs(u) < 1, u**2 / 2, np.abs(u) - 0.5)
        axes.plot(u, envelope, color=COLORS[1], label="Moreau's envelope: Huber's loss")
        axes.set(title="Absolute loss, curvature at most 1", xlabel="u = <w, x>", ylabel="loss")
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, 0.0), borderaxespad=4.4)

    drawn = [
        Series("mean over a ball: bound of Lemma 2.5", dims, bound, PUBLISHED, 0),
        Series("mean over a ball, |<w, x>|: exact", dims, exact, OURS, 0),
        Series("Moreau's envelope: bound, and |<w, x>|", dims, [0.5] * len(dims), OURS, 1),
    ]
    rows = {f"{d:,}": [a, b, 0.5] for d, a, b in zip(dims, bound, exact, strict=True)}
    says = (
        f"At the same smoothness Moreau's envelope is within 0.5 of the loss in every dimension, where the bound of "
        f"the mean over a ball is {words(bound[-1])} at d = {dims[-1]:,}; of a linear model the latter is really off "
        f"by {words(min(exact))} to {words(max(exact))}, so that little is gained for 160,000 gradients in place of "
        "one where the envelope has no closed form."
    )
    head = (
        "error at smoothness 1, d =",
        "mean over a ball, bound",
        "mean over a ball, |<w, x>|",
        "Moreau",
    )
    note = (
        "Gradients within 1. 160,000: subgradients of one record that find a gradient of the envelope to a hundredth. "
        "No method here smooths: rates are those of losses with kinks."
    )
    curve = loglog("What smoothing costs", "dimension d", "largest error", drawn)
    return Exhibit("users_smoothing", says, table(head, rows), [section, curve], 2, note)


def exhibits(smoke: bool) -> Iterator[Exhibit]:
    """Yields the exhibits of the paper."""
    yield users((1.0, 4.0) if smoke else (0.25, 0.5, 1.0, 2.0, 4.0, 8.0))
    yield noise((1, 64, 1024) if smoke else tuple(4**k for k in range(9)))
    yield smoothing(DIMS[::3] if smoke else DIMS)
    yield error(
        (8, 16) if smoke else (4, 8, 16, 32, 64), 8_000 if smoke else 20_000, 2 if smoke else 15
    )
