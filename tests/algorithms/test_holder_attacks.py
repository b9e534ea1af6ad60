"""Attacks on the sensitivity of output perturbation: runs on neighboring data sets, noise off, against the bound.

Averages with three kinds of weights are compared, the last iterate among them, so that the distance at every time is
bounded too. Runs are plain numpy, one record or a batch at a time, in double and in single precision.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest

from torch_dpsco.accounting.analysis.rounding import DOUBLE, Arithmetic, gamma
from torch_dpsco.algorithms.holder_numbers import RunPath, path_sensitivity, run_path
from torch_dpsco.algorithms.output_sgd_numbers import LossPromises, output_path
from torch_dpsco.errors import ConditionError, MissingConstantError

SINGLE = 2.0**-24
BOUND_X, BOUND_Y = 1.0, 0.7


@dataclass(frozen=True)
class Family:
    """A loss phi(w.x; y) on |x| <= 1: its derivative in the score, and its constants by hand."""

    slope: Callable[[np.ndarray, np.ndarray], np.ndarray]
    promises: LossPromises
    labels: Callable[[np.random.Generator, int], np.ndarray]


def hinge(q):
    def slope(score, label):
        margin = 1 - label * score
        return np.where(margin > 0, -label * q * np.maximum(margin, 0) ** (q - 1), 0).astype(
            score.dtype
        )

    promises = LossPromises(
        q - 1,
        q,
        lambda r: q * (1 + r) ** (q - 1),
        loss_at_zero=1.0,
        glm=True,
        score_offset=1.0,
    )
    return Family(slope, promises, lambda rng, n: rng.choice([-1.0, 1.0], n))


def power(q):
    def slope(score, label):
        residual = label - score
        return (-q * np.sign(residual) * np.abs(residual) ** (q - 1)).astype(score.dtype)

    promises = LossPromises(
        q - 1,
        q * 2 ** (2 - q),
        lambda r: q * (BOUND_Y + r) ** (q - 1),
        loss_at_zero=BOUND_Y**q,
        glm=True,
        score_offset=BOUND_Y,
    )
    return Family(slope, promises, lambda rng, n: rng.uniform(-BOUND_Y, BOUND_Y, n))


def run(family, features, labels, batches, lr, batch_size, radius, dtype=np.float64):
    """Returns w_1..w_T of projected SGD, (T, d), computed in the given precision."""
    features, labels, lr = features.astype(dtype), labels.astype(dtype), lr.astype(dtype)
    w, iterates = np.zeros(features.shape[1], dtype), []
    for step, batch in zip(lr, batches, strict=True):
        iterates.append(w)
        with np.errstate(
            invalid="ignore"
        ):  # numpy's product may flag lanes of registers that hold no number of ours
            scores = features[batch] @ w
        assert np.isfinite(scores).all()
        slopes = family.slope(scores, labels[batch]) / dtype(batch_size)
        w = w - step * (slopes @ features[batch])
        norm = np.linalg.norm(w)
        if norm > radius:
            w = w * dtype(radius / norm)
    return np.array(iterates, dtype=np.float64)


def records(rng, family, n, dim):
    x = rng.normal(size=(n, dim))
    if rng.random() < 0.5:  # near each other, or along few directions
        x = rng.normal(size=(1, dim)) + 0.1 * x
    x *= (
        BOUND_X * rng.choice([1.0, 0.5], (n, 1)) / np.linalg.norm(x, axis=1, keepdims=True)
    ) * (1 - 1e-7)
    return x, family.labels(rng, n)


def attack(rng, family, sampler, bounded, dtype, unit_roundoff, hit_constant=2):
    """Returns the largest ratio of a distance of averages to its bound, for one random pair of neighbors."""
    n, dim, batch_size, epochs = (
        int(rng.integers(4, 40)),
        int(rng.integers(1, 6)),
        int(rng.integers(1, 4)),
        2,
    )
    promises = replace(
        family.promises, radius=float(rng.choice([0.3, 1.0])) if bounded else math.inf
    )
    per_epoch = -(-n // batch_size)
    steps = per_epoch * epochs
    largest = 0.999 / promises.holder_constant if promises.holder_exponent == 1 else 1.0
    lr = (
        largest
        * rng.uniform(0.01, 1.0)
        * (1 + np.arange(steps)) ** -float(rng.choice([0.0, 0.5]))
    )
    first = records(rng, family, n, dim)
    second = first[0].copy(), first[1].copy()
    changed = int(rng.integers(n))
    extreme = rng.random() < 0.5
    second[0][changed] = -first[0][changed] if extreme else records(rng, family, 1, dim)[0][0]
    second[1][changed] = -first[1][changed] if rng.random() < 0.5 else first[1][changed]
    if hit_constant == 1:
        second[0][changed] = 0.0  # a null record: its gradient is 0
    if sampler == "shuffle":
        orders = [rng.permutation(n) for _ in range(epochs)]
        batches = [
            order[k : k + batch_size] for order in orders for k in range(0, n, batch_size)
        ]
    else:
        batches = [rng.choice(n, batch_size, replace=False) for _ in range(steps)]
    one, other = (
        run(family, *data, batches, lr, batch_size, promises.radius, dtype)
        for data in (first, second)
    )
    worst = 0.0
    last = np.zeros(steps)
    last[-1] = 1.0
    for weights in (None, last, rng.dirichlet(np.ones(steps))):
        shares = np.full(steps, 1 / steps) if weights is None else weights
        path = output_path(
            promises,
            lr,
            batch_size=batch_size,
            hit_constant=hit_constant,
            dim=dim,
            unit_roundoff=unit_roundoff,
            weights=weights,
        )
        hit = [s for s in range(steps - 1) if changed in batches[s]]
        limit = (
            path_sensitivity(path, per_epoch) if sampler == "shuffle" else realized(path, hit)
        )
        moved = float(np.linalg.norm(shares @ (one - other)))
        assert moved <= limit
        worst = max(worst, moved / limit if limit else 0.0)
    return worst


def realized(path: RunPath, hit):
    return min(path.drift + float(path.hits[hit].sum()), path.cap) if hit else 0.0


FAMILIES = {
    **{f"hinge {q}": hinge(q) for q in (1.0, 1.2, 1.5, 1.8, 2.0)},
    **{f"power {q}": power(q) for q in (1.0, 1.5, 2.0)},
}


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("sampler", ["shuffle", "uniform"])
@pytest.mark.parametrize("bounded", [True, False])
@pytest.mark.parametrize("name", FAMILIES)
def test_no_pair_of_neighbors_moves_an_average_by_more_than_the_bound(name, bounded, sampler):
    rng = np.random.default_rng(sum(map(ord, name + sampler)))
    worst = max(
        attack(rng, FAMILIES[name], sampler, bounded, np.float64, DOUBLE) for _ in range(40)
    )
    assert worst > 0.2  # the attack is not toothless


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("bounded", [True, False])
@pytest.mark.parametrize("name", FAMILIES)
def test_no_record_that_is_zeroed_moves_an_average_by_more_than_the_bound_of_zero_out(
    name, bounded
):
    rng = np.random.default_rng(sum(map(ord, name)))
    worst = max(
        attack(rng, FAMILIES[name], "shuffle", bounded, np.float64, DOUBLE, hit_constant=1)
        for _ in range(40)
    )
    assert worst > 0.2


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("bounded", [True, False])
@pytest.mark.parametrize("name", FAMILIES)
def test_no_pair_in_single_precision_exceeds_the_bound_of_single_precision(name, bounded):
    rng = np.random.default_rng(sum(map(ord, name)))
    worst = max(
        attack(rng, FAMILIES[name], order, bounded, np.float32, SINGLE)
        for order in ("shuffle", "uniform")
        for _ in range(25)
    )
    assert worst > 0.1  # the search comes near


def test_the_growth_with_the_root_of_the_steps_is_real_at_exponent_zero():
    """Basis vectors under |w.e_j|: the first record, replaced by its negative, puts runs on both sides of 400 kinks."""
    dim, step = 400, 0.01
    family = power(1.0)
    features = np.vstack([np.full((1, dim), 1 / math.sqrt(dim)), np.eye(dim)])
    labels = np.zeros(dim + 1)
    labels[0] = 0.5
    replaced = labels.copy()
    replaced[0] = -0.5
    lr, batches = np.full(dim + 2, step), [np.array([k]) for k in [*range(dim + 1), 0]]
    one, other = (run(family, features, y, batches, lr, 1, math.inf) for y in (labels, replaced))
    distance = float(np.linalg.norm(one[-1] - other[-1]))
    last = np.zeros(dim + 2)
    last[-1] = 1.0
    numbers = {
        "holder_exponent": 0.0,
        "holder_constant": 2.0,
        "batch_size": 1,
        "hit_constant": 2,
        "glm": True,
    }
    path = run_path(lr, 1.0, weights=last, **numbers)
    assert distance == pytest.approx(0.38, abs=0.002)
    assert realized(path, [0]) == pytest.approx(0.42, abs=0.002)
    # Without the growth of the expanding steps the bound would be the hit alone.
    assert distance > 15 * float(path.hits[0])


def stuck_pair():
    """Two runs one hit apart: in single precision one sticks above 1/2, the other walks down below it.

    Half an ulp is 3e-8 above 1/2 and 1.5e-8 below: a step of 2e-8 is lost, or becomes one of 3e-8.
    """
    family = Family(
        lambda score, label: label.astype(
            score.dtype
        ),  # Huber far from its kink: slope -1, 0, 1
        LossPromises(1.0, 1.0, lambda r: 1.0, loss_at_zero=2.0, glm=True, score_offset=1.0),
        lambda rng, n: np.ones(n),
    )
    walk = 3000
    lr = np.array([0.5, 1.2e-7] + [2e-8] * walk)
    labels = np.array([-1.0, -1.0] + [1.0] * walk)
    replaced = labels.copy()
    replaced[1] = 0.0
    batches = [np.array([k]) for k in range(walk + 2)]
    return family, lr, labels, replaced, batches


def test_rounding_in_single_precision_exceeds_the_bound_of_real_numbers_but_not_its_own():
    family, lr, labels, replaced, batches = stuck_pair()
    features, last = np.ones((lr.size, 1)), np.zeros(lr.size)
    last[-1] = 1.0
    distances = {}
    for dtype in (np.float32, np.float64):
        one, other = (
            run(family, features, y, batches, lr, 1, math.inf, dtype) for y in (labels, replaced)
        )
        distances[dtype] = abs(float(one[-1, 0] - other[-1, 0]))
    limit = {
        roundoff: realized(
            output_path(
                family.promises,
                lr,
                batch_size=1,
                hit_constant=2,
                dim=1,
                unit_roundoff=roundoff,
                weights=last,
            ),
            [1],
        )
        for roundoff in (None, DOUBLE, SINGLE)
    }
    assert distances[np.float64] <= limit[DOUBLE] < limit[None] * (1 + 1e-4)
    assert distances[np.float32] > 100 * limit[None]
    assert distances[np.float32] <= limit[SINGLE]


def test_a_kink_turns_one_ulp_of_the_score_into_the_whole_jump_and_the_bound_pays_for_it():
    """|w.x| with w.x = 0 exactly, summed in two orders: the computed signs differ, so the step expands by 2 eta."""
    x = np.array([0.1, 0.2, -0.3]) / 4
    w = np.array([1.0, 1.0, 1.0])
    forward, backward = (
        (x[0] * w[0] + x[1] * w[1]) + x[2] * w[2],
        x[0] * w[0] + (x[1] * w[1] + x[2] * w[2]),
    )
    assert forward != backward
    arithmetic = Arithmetic(dim=3, batch_size=1)
    assert abs(forward - backward) <= 2 * arithmetic.score_error(math.sqrt(3)) * np.linalg.norm(
        x
    )


@pytest.mark.parametrize(("q", "sharpness"), [(1.0, 0.99), (1.25, 0.3), (1.5, 0.01), (1.9, 0.0)])
def test_wrong_scores_expand_a_step_by_no_more_than_the_forms_allow_and_the_eight_is_sharp(
    q, sharpness, monkeypatch
):
    """Errors of the score of 1e-3, far more than any arithmetic makes, are handed to the class; |w.x|^q at x = 1."""
    alpha, constant, step, error, bound = q - 1, q * 2 ** (2 - q), 0.05, 1e-3, q * 3.0 ** (q - 1)
    monkeypatch.setattr(Arithmetic, "score_error", lambda self, radius: 0.0 * radius + error)
    forms = Arithmetic(1, 1).errors(
        np.full(1, step), np.ones(1), np.full(1, bound), alpha, constant, True
    )
    path = run_path(
        np.full(3, step),
        bound,
        holder_exponent=alpha,
        holder_constant=constant,
        batch_size=1,
        hit_constant=2,
        weights=[0, 0, 1],
        glm=True,
    )
    allowed = [
        form.scale * path.drift**2 + float(form.squared[0]) for form in forms
    ]  # drift = a here

    def slope(score):
        return q * np.sign(score) * np.abs(score) ** (q - 1)

    distances = np.concatenate([np.linspace(0, 0.01, 501), np.geomspace(0.01, 2, 50)])
    distance, center = np.meshgrid(distances, [0, 1e-4, 0.1])
    worst = 0.0
    for one, other in itertools.product([-error, 0.0, error], repeat=2):
        jump = slope(center + distance / 2 + one) - slope(center - distance / 2 + other)
        worst = max(worst, float(((distance - step * jump) ** 2 - distance**2).max()))
    assert all(worst <= limit for limit in allowed)
    assert worst > sharpness * allowed[0]
    assert len(allowed) == (1 if q == 1 else 2)


@pytest.mark.slow
def test_in_double_precision_rounding_costs_less_than_one_percent():
    for family in (hinge(1.0), hinge(1.5), hinge(2.0)):
        promises = replace(family.promises, radius=1.0)
        for n, dim in ((10_000, 10_000), (1_000_000, 100)):
            lr = np.full(n, 0.5 * n ** (-0.75 if promises.holder_exponent == 0 else -0.5))
            exact, computed = (
                path_sensitivity(
                    output_path(
                        promises,
                        lr,
                        batch_size=1,
                        hit_constant=2,
                        dim=dim,
                        unit_roundoff=roundoff,
                    ),
                    n,
                )
                for roundoff in (None, DOUBLE)
            )
            assert exact < computed < exact * 1.01


def test_a_loss_without_scalar_score_needs_a_certified_gradient_error():
    promises = LossPromises(1.0, 1.0, lambda r: 1.0, radius=1.0)
    numbers = {"batch_size": 1, "hit_constant": 2, "dim": 3}
    with pytest.raises(MissingConstantError, match="gradient_error"):
        output_path(promises, [0.1] * 4, **numbers)
    certified = output_path(replace(promises, gradient_error=1e-3), [0.1] * 4, **numbers)
    exact = output_path(promises, [0.1] * 4, unit_roundoff=None, **numbers)
    # sum_s 2 eta eps_g V_s = 2 * 0.1 * 1e-3 * (3/4 + 2/4 + 1/4)
    assert certified.drift == pytest.approx(exact.drift + 3e-4, rel=1e-9)


def test_sums_too_long_for_the_precision_are_refused():
    assert gamma(10, SINGLE) == pytest.approx(10 * SINGLE, rel=1e-5)
    with pytest.raises(ConditionError, match="double precision"):
        gamma(10**7, SINGLE)
