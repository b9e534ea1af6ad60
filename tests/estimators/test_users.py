"""Linear models that protect users: what a user moves, what is drawn and charged, and that ids are enough."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given as examples
from hypothesis import strategies as st
from torch import Tensor

import torch_dpsco as dp
from torch_dpsco.accounting.analysis.gaussian import gaussian_mu
from torch_dpsco.errors import BudgetExceeded, ConditionError, DpscoError, UnitError
from torch_dpsco.estimators import (
    HuberRegressor,
    LogisticRegression,
    QuantileRegressor,
    Ridge,
    SoftmaxRegression,
    fits,
    gradient_descent,
    preparation,
)
from torch_dpsco.estimators import gradient_descent as users
from torch_dpsco.estimators.base import plan_linear
from torch_dpsco.estimators.fits import fit_linear
from torch_dpsco.estimators.gradient_descent import UserGDPlan, _pairs, plan_users, users_of
from torch_dpsco.estimators.objectives import LinearObjective
from torch_dpsco.estimators.preparation import Preparation
from torch_dpsco.estimators.task import LinearTask, make_records
from torch_dpsco.noise import gaussian_vector
from torch_dpsco.problem import smooth_pace

HUGE = [math.nan, math.inf, -math.inf, 1e300, -1e300, 0.0, 1e-300, 1.0]
N = 40


def task(adjacency: str = "add_remove", **settings: object) -> LinearTask:
    given = {
        "loss": dp.losses.Logistic(),
        "preparation": Preparation(1.0),
        "dim": 2,
        "n": N,
        "n_max": 60,
    }
    return LinearTask(
        **(given | {"budget": dp.Budget(1.0, 1e-6, adjacency=adjacency, unit="user")} | settings)
    )


@pytest.fixture(autouse=True)
def few_users_get_a_scale_and_an_intercept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(users, "_LAST_SIGNAL", 0.0)


def rows(count: int = 200, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, labels, and the user of each: user k has about 1, 2, 3, ... rows."""
    draws = torch.Generator().manual_seed(seed)
    features = torch.randn(count, 2, generator=draws, dtype=torch.float64)
    ids = (torch.rand(count, generator=draws) ** 2 * N).long()
    return features, torch.where(features[:, 0] > 0, 1.0, -1.0).double(), ids


def last_total(
    plan: UserGDPlan, features: Tensor, labels: Tensor, ids: Tensor, w: Tensor, v: Tensor
) -> Tensor:
    """The sum over users for scale and intercept, without noise, after the answer w of the steps."""
    (codes, shares), count = users_of(ids), len(ids.unique())
    given = plan.task
    if given.adjacency != "add_remove":
        given = dataclasses.replace(given, n=count, n_max=count)
    records = make_records(given, features, labels, shares, users=codes)
    pairs = _pairs(*direction(plan, w), records)
    return plan._sum(
        LinearObjective(dp.losses.Logistic(), pairs, reg=0.0), codes, v, math.sqrt(2)
    )


def direction(plan: UserGDPlan, w: Tensor) -> tuple[Tensor, float]:
    """What makes scores over their clip of rows, and the constant of a row."""
    constant = plan.task.preparation.intercept
    slopes = torch.cat([w[:-1], torch.zeros(1).double()]) if constant else w
    return slopes / (0.25 * plan.task.preparation.bound_x * float(slopes.norm())), constant


def total(plan: UserGDPlan, features: Tensor, labels: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    """The sum over users of a step, without noise."""
    (codes, shares), count = users_of(ids), len(ids.unique())
    given = plan.task
    if given.adjacency != "add_remove":
        given = dataclasses.replace(given, n=count, n_max=count)
    records = make_records(given, features, labels, shares, users=codes)
    objective = LinearObjective(given.loss, records, reg=0.0, normalizer=1.0)
    return plan._sum(objective, codes, w, plan.clip)


# -- what a user moves ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@examples(
    st.lists(st.tuples(st.sampled_from(HUGE), st.sampled_from(HUGE)), min_size=1, max_size=30),
    st.sampled_from([0.01, 0.2, 5.0]),
    st.tuples(st.floats(-50, 50), st.floats(-50, 50)),
)
def test_no_user_moves_a_sum_further_than_the_clip(
    odd: list, clip: float, point: tuple[float, float]
) -> None:
    plan = plan_users(task(), clip=clip)
    features, labels, ids = rows()
    new = torch.tensor(odd, dtype=torch.float64)
    w = torch.tensor(point, dtype=torch.float64)
    after = total(
        plan,
        torch.cat([features, new]),
        torch.cat([labels, torch.ones(len(new))]),
        torch.cat([ids, 0 * len(new) + torch.full((len(new),), N)]),
        w,
    )
    before = total(plan, features, labels, ids, w)
    assert float((after - before).norm()) <= clip + 1e-10


@examples(st.lists(st.floats(-9.0, 9.0), min_size=2, max_size=2), st.floats(0.01, 1.0))
def test_the_clipped_mean_of_a_user_is_not_longer_than_the_clip(row: list, clip: float) -> None:
    features, w = (
        torch.tensor([row], dtype=torch.float64),
        torch.tensor([3.0, -2.0], dtype=torch.float64),
    )
    for label in (-1.0, 1.0):
        moved = total(
            plan_users(task(), clip=clip), features, torch.tensor([label]), torch.tensor([0]), w
        )
        assert sum(Fraction(x) ** 2 for x in moved.tolist()) <= Fraction(clip) ** 2


def test_users_who_disagree_attain_the_clip() -> None:
    plan = plan_users(task("replace_one"), clip=0.01)
    features, labels = torch.ones(6, 2).double(), torch.tensor([1.0, 1, 1, 1, 1, 1]).double()
    ids = torch.tensor([0, 0, 0, 1, 1, 2])
    w = torch.zeros(2).double()
    gap = total(plan, features, labels, ids, w) - total(
        plan, features, torch.where(ids == 2, -1.0, labels), ids, w
    )
    assert float(gap.norm()) == pytest.approx(2 * 0.01, rel=1e-9)


@pytest.mark.slow
@examples(
    st.lists(st.tuples(st.sampled_from(HUGE), st.sampled_from(HUGE)), min_size=1, max_size=30),
    st.tuples(st.floats(-50, 50), st.floats(-50, 50), st.floats(-50, 50)),
    st.tuples(st.floats(-1e3, 1e3), st.floats(-1e3, 1e3)),
)
def test_no_user_moves_a_sum_for_scale_and_intercept_further_than_its_clip(
    odd: list, answer: tuple[float, float, float], point: tuple[float, float]
) -> None:
    plan = plan_users(task(preparation=Preparation(1.0, intercept=0.5)))
    features, labels, ids = rows()
    new, w, v = (
        torch.tensor(odd).double(),
        torch.tensor(answer).double(),
        torch.tensor(point).double(),
    )
    table, signs = torch.cat([features, new]), torch.cat([labels, torch.ones(len(new))])
    names = torch.cat([ids, torch.full((len(new),), N)])
    gap = last_total(plan, table, signs, names, w, v) - last_total(
        plan, features, labels, ids, w, v
    )
    assert float(gap.norm()) <= math.sqrt(2) + 1e-10
    # replaced: the same rows, all of the other label
    gap = last_total(plan, table, torch.where(names == N, -1.0, signs), names, w, v)
    gap = gap - last_total(plan, table, signs, names, w, v)
    assert float(gap.norm()) <= 2 * math.sqrt(2) + 1e-10


def test_users_attain_the_clip_of_the_sums_for_scale_and_intercept() -> None:
    """At a point where its label is wrong by far, a user whose score is at the clip has a slope of 1 in both."""
    plan = plan_users(task("replace_one", preparation=Preparation(1.0, intercept=0.5)))
    features, ids = torch.ones(6, 2).double(), torch.tensor([0, 0, 0, 1, 1, 2])
    w, v = torch.ones(3).double(), torch.tensor([40.0, 40.0]).double()
    sums = [
        last_total(plan, features, torch.where(ids == 2, sign, 1.0), ids, w, v)
        for sign in (-1.0, 1.0)
    ]
    assert float((sums[0] - sums[1]).norm()) == pytest.approx(math.sqrt(2), rel=1e-9)


def test_a_user_counts_as_much_as_one_record() -> None:
    features, labels, ids = rows()
    (codes, shares), count = users_of(ids), len(ids.unique())
    assert count == len(ids.unique())
    weights = torch.zeros(count, dtype=torch.float64).index_add_(0, codes, shares)
    torch.testing.assert_close(weights, torch.ones(count, dtype=torch.float64))
    # without a clip that acts, the sum is that of the means of users
    plan = plan_users(task(), clip=5.0)
    w = torch.tensor([0.3, -0.2], dtype=torch.float64)
    once = total(plan, features, labels, ids, w)
    twice = total(plan, features.repeat(3, 1), labels.repeat(3), ids.repeat(3), w)
    torch.testing.assert_close(once, twice)


def test_a_fit_weighs_the_rows_of_a_user_as_one_record(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Tensor] = []

    def watched(
        task: LinearTask, rows: Tensor, targets: Tensor, weights: Tensor, *rest: Any, **more: Any
    ) -> Any:
        given.append(weights)
        return make_records(task, rows, targets, weights, *rest, **more)

    monkeypatch.setattr(fits, "make_records", watched)
    features, labels, ids = rows()
    for weights in (None, torch.full((len(ids),), 7.0)):
        fit_linear(plan_users(task()), features, labels, weights, users=ids)
    for found in given:
        for user in ids.unique():
            assert float(found[ids == user].sum()) == pytest.approx(1.0, rel=1e-12)
    assert len(given) >= 2


@pytest.mark.slow
@examples(
    st.lists(
        st.tuples(st.sampled_from(HUGE), st.sampled_from(HUGE), st.floats(0, 3)),
        min_size=1,
        max_size=30,
    ),
    st.floats(-2, 2),
)
def test_no_user_moves_what_is_measured_further_than_one_record_may(
    odd: list, threshold: float
) -> None:
    features, _, ids = rows()
    new, own = (
        torch.tensor([row[:2] for row in odd]).double(),
        torch.tensor([row[2] for row in odd]).double(),
    )
    found = []
    for extra in (0, len(new)):
        table = torch.cat([features, new[:extra]])
        codes, shares = users_of(torch.cat([ids, ids.new_full((extra,), N)]))
        weights = torch.cat([torch.ones(len(ids)).double(), own[:extra]]).clamp(0, 1) * shares
        records = make_records(task(), table, torch.ones(len(table)), weights, users=codes)
        near = torch.cat([block[:, 0] <= threshold for _, block in records.blocks()])
        found.append(
            (records.combine(records.weights), float(records.total(records.weights * near)))
        )
    (before, below), (after, then_below) = found
    assert float((after - before).norm()) <= 1 + 1e-9  # of rows of norm 1
    assert -1e-9 <= then_below - below <= 1 + 1e-9


def test_ids_and_order_of_rows_do_not_matter() -> None:
    plan, (features, labels, ids) = plan_users(task()), rows()
    w = torch.tensor([0.3, -0.2], dtype=torch.float64)
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(2))
    named = (ids * 7919) % 1009
    torch.testing.assert_close(
        total(plan, features, labels, ids, w),
        total(plan, features[order], labels[order], named[order], w),
    )


# -- what is drawn, and charged ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one", "zero_out"])
def test_each_sum_over_users_gets_its_noise(
    adjacency: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[float] = []

    def counted(dim: int, std: float, source: object) -> Tensor:
        drawn.append(std)
        return torch.zeros(dim, dtype=torch.float64)

    monkeypatch.setattr(gradient_descent, "gaussian_vector", counted)
    features, labels, ids = rows()
    count = len(ids.unique())
    plan = plan_users(task(adjacency, n=count, n_max=count), steps=30)
    fit_linear(plan, features, labels, users=ids)
    assert drawn == [plan.noise_std] * 30 + [plan.last_std] * 32
    sides = 2 if adjacency == "replace_one" else 1
    level = sides * math.hypot(
        math.sqrt(30) * plan.clip / plan.noise_std, math.sqrt(2 * 32) / plan.last_std
    )
    assert level <= plan.event().mu <= level * (1 + 1e-4)
    assert gaussian_mu(1.0, 1e-6) * (1 - 1e-9) <= plan.event().mu <= gaussian_mu(1.0, 1e-6)


@pytest.mark.slow
def test_rounding_is_in_the_sensitivity_of_a_sum_over_users() -> None:
    plan, (features, labels, ids) = plan_users(task(), clip=0.02), rows(5000)
    w = torch.tensor([300.0, -500.0], dtype=torch.float64)
    computed = total(plan, features, labels, ids, w)
    exact = []
    prepared = torch.stack([plan.task.preparation(row[None])[0] for row in features])
    scores = [math.fsum((row * w).tolist()) for row in prepared]
    margins = [label * score for label, score in zip(labels.tolist(), scores, strict=True)]
    slopes = [
        -y / (1 + math.exp(m)) if m < 700 else 0.0
        for y, m in zip(labels.tolist(), margins, strict=True)
    ]
    for user in ids.unique():
        mine = [k for k in range(len(ids)) if ids[k] == user]
        mean = [
            math.fsum(slopes[k] * float(prepared[k, j]) for k in mine) / len(mine)
            for j in range(2)
        ]
        size = math.hypot(*mean)
        exact.append([v * min(1.0, plan.clip / size) if size else 0.0 for v in mean])
    error = max(abs(float(computed[j]) - math.fsum(v[j] for v in exact)) for j in range(2))
    assert error <= plan._rounding


def test_the_sums_for_scale_and_intercept_are_charged() -> None:
    plan = plan_users(task())
    alone = dataclasses.replace(plan, last_std=None).event().mu
    assert plan.event().mu >= math.hypot(alone, math.sqrt(2 * 32) / plan.last_std)
    assert alone < 0.9 * gaussian_mu(1.0, 1e-6)
    for loss in (dp.losses.Huber(), dp.losses.SmoothedPinball(width=0.1)):
        other = plan_users(task(loss=loss, bound_y=1.0))
        assert other.last_std is None
        with pytest.raises(ConditionError, match="last_std"):
            dataclasses.replace(other, last_std=1.0)


@pytest.mark.slow
def test_rounding_is_in_the_sensitivity_of_the_sums_for_scale_and_intercept() -> None:
    given = task(preparation=Preparation(1.0, intercept=0.5))
    plan, (features, labels, ids) = plan_users(given), rows(3000)
    w, v = torch.tensor([300.0, -500.0, 3.0]).double(), torch.tensor([700.0, -300.0]).double()
    computed = last_total(plan, features, labels, ids, w, v)
    prepared = torch.stack([given.preparation(row[None])[0] for row in features])
    scores = [math.fsum((row * direction(plan, w)[0]).tolist()) for row in prepared]
    pairs = [(min(max(score, -1.0), 1.0), 1.0) for score in scores]
    margins = [
        y * (v[0].item() * p[0] + v[1].item())
        for y, p in zip(labels.tolist(), pairs, strict=True)
    ]
    rates = [
        -y / (1 + math.exp(m)) if m < 700 else 0.0
        for y, m in zip(labels.tolist(), margins, strict=True)
    ]
    exact = []
    for user in ids.unique():
        mine = [k for k in range(len(ids)) if ids[k] == user]
        exact.append(
            [math.fsum(rates[k] * pairs[k][j] for k in mine) / len(mine) for j in range(2)]
        )
    error = max(abs(float(computed[j]) - math.fsum(mean[j] for mean in exact)) for j in range(2))
    assert error <= plan._last_rounding
    assert (
        plan._last_rounding > 60 * (1 + 250 * math.sqrt(2)) * 18 * 2.0**-53 * 4
    )  # of scores, n_max users


def test_scale_and_intercept_are_the_loop_of_the_docstring() -> None:
    plan = plan_users(task(preparation=Preparation(1.0, intercept=0.5)), steps=4)
    features, labels, ids = rows()
    found = fit_linear_with_seed(plan, features, labels, ids)[0]
    first = fit_linear_with_seed(
        dataclasses.replace(plan, last_std=None), features, labels, ids
    )[0]
    noise = torch.Generator().manual_seed(5)
    for _ in range(4):
        gaussian_vector(3, plan.noise_std, noise)
    clipped = features / torch.linalg.vector_norm(features, dim=1, keepdim=True).clamp(min=1.0)
    scores = clipped @ first[:2]
    unit = 0.25 * float(first[:2].norm())
    pairs = torch.stack([(scores / unit).clamp(-1, 1), torch.ones(len(ids)).double()], dim=1)
    v, moved, later = torch.tensor([unit, 0.0]).double(), torch.zeros(2).double(), []
    pace = smooth_pace(2.0 * math.sqrt(32) / (plan.last_std * math.sqrt(2)), 32, N * 2 * 0.25)
    for step in range(32):
        slopes = -labels * torch.sigmoid(-labels * (pairs @ v))
        gradient = torch.zeros(2).double()
        for user in ids.unique():
            gradient += (slopes[ids == user].unsqueeze(1) * pairs[ids == user]).mean(0)
        moved = pace.momentum * moved - pace.lr * (
            gradient + gaussian_vector(2, plan.last_std, noise)
        )
        v = v + moved
        if step >= 16:
            later.append(v)
    scale, shift = torch.stack(later).mean(0).tolist()
    wanted = torch.cat(
        [first[:2] * min(max(scale / unit, 0.1), 1.0), torch.tensor([shift / 0.5]).double()]
    )
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-9)


def test_the_way_of_users_is_short_where_noise_is_large_and_no_spread_is_measured() -> None:
    def reach(plan: UserGDPlan) -> float:
        return plan.lr * plan.task.n * plan.steps * plan.clip / (1 - plan.momentum)

    def planned(threshold: float, n: int, bound: float = 20.0) -> UserGDPlan:
        return plan_users(
            task(loss=dp.losses.Huber(threshold=threshold), bound_y=bound, n=n, n_max=2 * n)
        )

    few = planned(1.0, 40)
    signal = few.task.level * 40 / math.sqrt(2)
    assert reach(few) == pytest.approx(0.1 * signal**2 * 20.0, rel=1e-6)  # of a guess of 60
    assert reach(planned(0.5, 40)) == pytest.approx(reach(few), rel=1e-6)  # whatever the unit
    spread = planned(0.01, 40)
    assert reach(spread) == pytest.approx(
        60 * 0.01 * signal, rel=1e-6
    )  # a unit that is near the spread is believed
    measured = planned(1.0, 40, bound=1000.0)  # as where targets are in spreads
    assert reach(measured) == pytest.approx(60 * signal, rel=1e-6)
    assert few.clip < measured.clip <= 0.1


def test_scale_and_intercept_stay_within_the_radius() -> None:
    plan = plan_users(task(preparation=Preparation(1.0, intercept=0.01), radius=0.3))
    features, labels, ids = rows()
    assert float(fit_linear(plan, features, labels, users=ids).weights.norm()) <= 0.3 * (
        1 + 1e-9
    )


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("intercept", [0.0, 0.5])
def test_without_noise_users_of_one_label_each_get_the_rate_of_labels(
    intercept: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All users are clipped, and vote for 0 four to one: rates are those of a mean loss all the same."""
    monkeypatch.setattr(
        gradient_descent,
        "gaussian_vector",
        lambda dim, *_: torch.zeros(dim, dtype=torch.float64),
    )
    draws = torch.Generator().manual_seed(3)
    ids = torch.arange(2000) % 500
    labels = torch.where(ids < 100, 1.0, -1.0).double()
    features = 0.3 * torch.randn(2000, 2, generator=draws, dtype=torch.float64)
    given = task(n=500, n_max=600, preparation=Preparation(1.0, intercept=intercept))
    for last in (True, False):
        plan = plan_users(given)
        weights = fit_linear(
            plan if last else dataclasses.replace(plan, last_std=None),
            features,
            labels,
            users=ids,
        )
        found = weights.weights[0]
        if intercept:
            rate = float(torch.sigmoid(features @ found[:2] + intercept * found[2]).mean())
            assert (abs(rate - 0.2) < 0.02) is last
        else:
            assert len(found) == 2


@pytest.mark.slow
def test_the_whole_fit_is_charged_before_the_first_draw_for_users(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = plan_users(task())
    ledger = plan.ledger()
    assert ledger.unit == "user"
    seen: list[float] = []

    def watched(dim: int, std: float, source: object) -> Tensor:
        seen.append(ledger.get_epsilon(1e-6))
        return gaussian_vector(dim, std, source)

    monkeypatch.setattr(gradient_descent, "gaussian_vector", watched)
    monkeypatch.setattr(preparation, "gaussian_vector", watched)
    features, labels, ids = rows()
    fit_linear(plan, features, labels, users=ids, accountant=ledger)
    assert set(seen) == {plan.epsilon()}
    with pytest.raises(BudgetExceeded):
        fit_linear(plan, features, labels, users=ids, accountant=ledger)
    assert len(seen) == plan.steps + 32


def test_a_run_on_users_is_the_loop_of_its_docstring() -> None:
    plan = dataclasses.replace(
        plan_users(task(), steps=8, clip=0.2), momentum=0.6, last_std=None
    )
    features, labels, ids = rows()
    found = fit_linear_with_seed(plan, features, labels, ids)
    noise, w, v, later = (
        torch.Generator().manual_seed(5),
        torch.zeros(2).double(),
        torch.zeros(2).double(),
        [],
    )
    clipped = features / torch.linalg.vector_norm(features, dim=1, keepdim=True).clamp(min=1.0)
    for step in range(8):
        slopes = -labels * torch.sigmoid(-labels * (clipped @ w))
        gradient = torch.zeros(2).double()
        for user in ids.unique():
            mean = (slopes[ids == user].unsqueeze(1) * clipped[ids == user]).mean(0)
            gradient += mean * min(1.0, 0.2 / float(mean.norm()))
        v = 0.6 * v - plan.lr * (gradient + gaussian_vector(2, plan.noise_std, noise))
        w = w + v
        if step >= 4:
            later.append(w)
    torch.testing.assert_close(found[0], torch.stack(later).mean(0), rtol=1e-6, atol=1e-9)


def fit_linear_with_seed(
    plan: UserGDPlan, features: Tensor, labels: Tensor, ids: Tensor
) -> Tensor:
    draws = torch.Generator().manual_seed(5)
    with pytest.warns(UserWarning, match="generator"):
        return fit_linear(plan, features, labels, users=ids, generator=draws).weights


# -- the door ---------------------------------------------------------------------------------------------------------


@pytest.mark.weekly
@pytest.mark.parametrize("model", [LogisticRegression, HuberRegressor, QuantileRegressor])
def test_groups_of_any_kind_protect_users(model: type) -> None:
    rng = np.random.default_rng(0)
    ids = rng.permutation(np.arange(9000) % 1500)
    X = rng.uniform(0, 1, size=(9000, 3))
    line = X @ [2.0, -1.0, 0.5]
    further = {"classes": ("no", "yes")} if model is LogisticRegression else {"bound_y": 5.0}
    y = np.where(line > 0.75, "yes", "no") if model is LogisticRegression else line
    settings = {"epsilon": 8.0, "delta": 1e-6, "n": 1500, "bound_x": math.sqrt(3), **further}
    for groups in (ids, torch.from_numpy(ids), [f"person {k}" for k in ids]):
        fitted = model(**settings).fit(X, y, groups=groups)
        assert fitted.score(X, y) > 0.8
        assert fitted.privacy_.unit == fitted.plan_.unit == "user"
        assert 0.98 * 8.0 < fitted.privacy_.epsilon <= 8.0
        assert "user" in str(fitted.report())


@pytest.mark.filterwarnings("ignore:noise buries the signal")  # of three users
def test_wrong_groups_are_refused_before_anything_is_charged() -> None:
    X, y = np.zeros((6, 2)), np.array([0, 1, 0, 1, 0, 1])
    settings = {"epsilon": 1.0, "adjacency": "add_remove", "n": 3, "bound_x": 1.0}
    model = LogisticRegression(**settings, classes=(0, 1))
    ledger = dp.Accountant(adjacency="add_remove")
    for groups in ([0, 1], 3, [0.5] * 6, [None] * 6, [0, 1, 2, -1, 0, 1]):
        with pytest.raises(DpscoError):
            model.set_params(accountant=ledger).fit(X, y, groups=groups)
    with pytest.raises(UnitError, match="unit"):
        model.fit(X, y, groups=[0, 0, 1, 1, 2, 2])  # the ledger is one of examples
    assert len(ledger) == 0
    model.set_params(accountant=None)
    with pytest.raises(UnitError, match="number of users"):
        model.set_params(n_max=3).fit(X, y, groups=[0, 1, 2, 3, 4, 5])
    with pytest.raises(UnitError, match="n=3 users"):
        model.set_params(n_max=None, adjacency="replace_one").fit(
            X, y, groups=[0, 0, 0, 0, 1, 1]
        )
    with pytest.raises(ValueError, match="mechanism"):
        LogisticRegression(**settings, classes=(0, 1), mechanism="objective").fit(
            X, y, groups=[0, 0, 1, 1, 2, 2]
        )
    for other in (Ridge(bound_y=1.0, **settings), SoftmaxRegression(classes=(0, 1), **settings)):
        with pytest.raises(ConditionError):
            other.fit(X, y, groups=[0, 0, 1, 1, 2, 2])
    with pytest.raises(ConditionError, match="secure"):
        LogisticRegression(**settings, classes=(0, 1), secure="exact").fit(
            X, y, groups=[0, 0, 1, 1, 2, 2]
        )


def test_a_plan_for_users_needs_them_and_no_other_does() -> None:
    features, labels, ids = rows()
    with pytest.raises(UnitError, match="users must be given"):
        fit_linear(plan_users(task()), features, labels)
    plan = plan_linear(
        task(n=200, n_max=200, budget=dp.Budget(1.0, 1e-6, adjacency="add_remove"))
    )
    with pytest.raises(UnitError, match="users must be given"):
        fit_linear(plan, features, labels, users=ids)
    with pytest.raises(ValueError, match="momentum must be in"):
        dataclasses.replace(plan_users(task()), momentum=1.0)


@pytest.mark.parametrize(
    ("kind", "more"), [(Ridge, {"bound_y": 1.0}), (SoftmaxRegression, {"classes": (0, 1, 2)})]
)
def test_models_without_a_fit_for_users_name_those_that_have_one(
    kind: type, more: dict[str, Any]
) -> None:
    with pytest.raises(ConditionError, match="HuberRegressor"):
        kind(epsilon=1.0, n=500, bound_x=1.0, **more).plan(3, "user")


def test_scale_and_intercept_are_set_where_noise_lets_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()
    settings = {"epsilon": 0.5, "adjacency": "add_remove", "bound_x": 1.0, "classes": (0, 1)}
    few, many = (LogisticRegression(n=n, **settings).plan(3, "user") for n in (400, 600))
    assert few.last_std is None
    assert many.last_std is not None
    assert (
        LogisticRegression(n=1_500, **settings | {"epsilon": 0.1}).plan(3, "user").last_std
        is None
    )


def test_a_clip_above_a_tenth_needs_noise_below_a_thousandth(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()
    settings = {"delta": 1e-6, "adjacency": "add_remove", "bound_x": 1.0, "bound_y": 1.0}
    few, some, many = (
        QuantileRegressor(epsilon=1.0, n=n, **settings).plan(3, "user")
        for n in (300, 1_500, 30_000)
    )
    for plan, most in ((few, 0.1), (some, 0.3), (many, 0.3)):
        noise, signal, _ = plan.noise_and_signal
        share = plan.clip / plan.task.lipschitz
        assert 0.01 <= share <= most * (1 + 1e-12)
        assert share <= 0.1 * (1 + 1e-12) or noise / signal * share <= 1e-3 * (1 + 1e-9)
    assert many.clip == pytest.approx(0.3 * many.task.lipschitz)
