"""Private preparations: what a record moves, what is drawn and charged, and the units that come out."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given as examples
from hypothesis import strategies as st
from torch import Tensor

import torch_dpsco as dp
from tests.reference.papers.objective import amp_delta_monotone
from torch_dpsco.accounting.analysis.gaussian import gaussian_mu, sensitivity_factor
from torch_dpsco.accounting.analysis.objective import AMP_MU_OUT
from torch_dpsco.accounting.events import GDP, ApproxDP, Sequential
from torch_dpsco.errors import BudgetExceeded, ConditionError
from torch_dpsco.estimators import (
    HuberRegressor,
    LogisticRegression,
    QuantileRegressor,
    Ridge,
    SoftmaxRegression,
    TiltedClassifier,
    preparation,
)
from torch_dpsco.estimators.base import LinearModel, plan_linear
from torch_dpsco.estimators.fits import fit_linear
from torch_dpsco.estimators.preparation import (
    Preparation,
    PrivatePreparation,
    _Counter,
    _distances,
    counts_level,
    level_left,
    number_of_counts,
    robust_width,
    share_within,
    sum_level,
)
from torch_dpsco.estimators.task import LinearTask, make_records

BOUND, TARGET, DELTA = 2.0, 5.0, 1e-6
HUGE = [math.nan, math.inf, -math.inf, 1e300, -1e300, 0.0, 1e-300, 1.0]


def silence(dim: int, std: float, source: object) -> Tensor:
    return torch.zeros(dim, dtype=torch.float64)


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparation, "gaussian_vector", silence)


def measured(adjacency: str = "add_remove", **changes: object) -> LinearTask:
    """A task whose rows and targets are measured."""
    settings: dict[str, object] = {
        "rows": 0.02,
        "counts": 0.03,
        "bound_y": TARGET,
        "quantile": 0.5,
        "within": 0.5,
    }
    prepare = PrivatePreparation(given=Preparation(BOUND), **{**settings, **changes})
    return LinearTask(
        loss=dp.losses.Huber(threshold=1.0),
        preparation=Preparation(1.0, intercept=0.3, whole=True),
        dim=2,
        n=1000,
        budget=dp.Budget(1.0, DELTA, adjacency=adjacency),
        bound_y=prepare.most,
        prepare=prepare,
    )


def line(count: int = 1000, seed: int = 3) -> tuple[Tensor, Tensor]:
    """Rows around (1, 0), and targets on a line."""
    draws = torch.Generator().manual_seed(seed)
    rows = torch.randn(count, 2, generator=draws, dtype=torch.float64) * 0.3 + torch.tensor(
        [1.0, 0.0]
    )
    return rows, rows @ torch.tensor([0.8, -0.5], dtype=torch.float64) + 0.7


# -- what a record moves ----------------------------------------------------------------------------------------------


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one", "zero_out"])
@examples(
    st.lists(st.sampled_from(HUGE), min_size=4, max_size=4), st.floats(0, 5), st.floats(0, 5)
)
def test_no_record_moves_the_sum_of_rows_further_than_its_noise_is_for(
    adjacency: str, odd: list[float], weight: float, other: float
) -> None:
    given = measured(adjacency)
    rows, targets = line(20)

    def total(features: Tensor, values: Tensor, weights: Tensor) -> Tensor:
        task = (
            replace(given, n=len(features), n_max=len(features))
            if adjacency != "add_remove"
            else given
        )
        records = make_records(task, features, values, weights)
        return records.combine(records.weights / BOUND)

    record = torch.tensor([odd[:2]], dtype=torch.float64)
    first = (
        torch.cat([rows, record]),
        torch.cat([targets, torch.tensor([odd[2]])]),
        torch.ones(21).double(),
    )
    first[2][-1] = weight
    if adjacency == "add_remove":
        second = rows, targets, torch.ones(20).double()
    else:
        swapped = torch.zeros(1, 2).double() if adjacency == "zero_out" else -record
        ends = torch.zeros(1) if adjacency == "zero_out" else torch.tensor([odd[3]])
        second = torch.cat([rows, swapped]), torch.cat([targets, ends]), torch.ones(21).double()
        second[2][-1] = 0.0 if adjacency == "zero_out" else other
    moved = float((total(*first) - total(*second)).norm())
    assert moved <= sensitivity_factor(adjacency) * (1 + 1e-12)


def test_opposite_rows_attain_the_sensitivity_of_the_sum() -> None:
    given = replace(measured("replace_one"), n=1, n_max=1)
    far = torch.tensor([[1e9, 0.0]], dtype=torch.float64)
    sums = [make_records(given, sign * far, torch.ones(1)) for sign in (1, -1)]
    gap = float(
        (
            sums[0].combine(sums[0].weights / BOUND) - sums[1].combine(sums[1].weights / BOUND)
        ).norm()
    )
    assert gap == pytest.approx(2.0, rel=1e-9)


@pytest.mark.slow
@examples(st.sampled_from(HUGE), st.sampled_from(HUGE), st.floats(-3, 3), st.floats(0, 9))
def test_no_record_moves_a_count_by_more_than_1(
    value: float, target: float, threshold: float, weight: float
) -> None:
    given = measured()
    rows, targets = line(20)
    counts = []
    for extra in (0, 1):
        features = torch.cat([rows, torch.full((extra, 2), value, dtype=torch.float64)])
        values = torch.cat([targets, torch.full((extra,), target, dtype=torch.float64)])
        weights = torch.cat([torch.ones(20), torch.full((extra,), weight)]).double()
        records = make_records(given, features, values, weights)
        counter = _Counter(records, 0.0, torch.Generator().manual_seed(0))
        distances = _distances(torch.tensor([1.0, 0.0], dtype=torch.float64), records)
        of = (
            records.below(records.targets, threshold),
            records.below(distances, abs(threshold)),
            records.total(records.weights),
        )
        counts.append([counter.count(lambda _, total=total: total) for total in of])
    assert all(0 <= after - before <= 1 + 1e-12 for before, after in zip(*counts, strict=True))


def test_units_do_not_let_a_record_out_of_its_bounds(quiet: None) -> None:
    rows, targets = line()
    rows[:8] = torch.tensor(HUGE, dtype=torch.float64).unsqueeze(1)
    targets[8:16] = torch.tensor(HUGE, dtype=torch.float64)
    given = measured()
    records = make_records(given, rows, targets)
    assert given.prepare is not None
    units = given.prepare.measure(
        records, given.preparation, given.n_max, "add_remove", torch.Generator()
    )
    prepared = make_records(given, rows, targets, units=units)
    blocks = torch.cat([block for _, block in prepared.blocks()])
    assert float(torch.linalg.vector_norm(blocks, dim=1).max()) <= given.preparation.bound
    assert float(prepared.targets.abs().max()) <= given.prepare.most
    for dropped in (
        0,
        1,
        2,
        8,
    ):  # no number, or a row that is not finite, makes a null record, in private units too
        assert not prepared.weights[dropped]
        assert not blocks[dropped].any()


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 17, 40])
def test_a_distance_is_the_same_in_every_block(size: int) -> None:
    draws = torch.Generator().manual_seed(size)
    rows, center = (
        torch.randn(60, 7, generator=draws).double(),
        torch.randn(7, generator=draws).double(),
    )
    task = replace(measured(), dim=7)
    whole = _distances(center, make_records(task, rows, torch.zeros(60)))
    part = _distances(center, make_records(task, rows[:size], torch.zeros(size)))
    assert torch.equal(whole[:size], part)


# -- what is drawn, and charged ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
def test_each_measurement_gets_its_noise_once(
    adjacency: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[tuple[int, float]] = []

    def counted(dim: int, std: float, source: object) -> Tensor:
        drawn.append((dim, std))
        return torch.zeros(dim, dtype=torch.float64)

    monkeypatch.setattr(preparation, "gaussian_vector", counted)
    given = measured(adjacency)
    assert given.prepare is not None
    rows, targets = line()
    given.prepare.measure(
        make_records(given, rows, targets), given.preparation, 1000, adjacency, torch.Generator()
    )
    vectors = [std for dim, std in drawn if dim == 2]
    counts = [std for dim, std in drawn if dim == 1]
    assert vectors == pytest.approx(
        [sensitivity_factor(adjacency) / given.prepare.rows], rel=1e-8
    )
    assert len(counts) == given.prepare.counted == 35
    # squares of levels add up to that of the event, which rounding only lowers
    level = math.sqrt(
        (sensitivity_factor(adjacency) / vectors[0]) ** 2 + sum(1 / std**2 for std in counts)
    )
    assert level <= given.prepare.event(adjacency).mu <= level * (1 + 1e-8)


def test_rounding_is_in_the_noise_of_a_preparation(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[float] = []
    monkeypatch.setattr(
        preparation,
        "gaussian_vector",
        lambda dim, std, source: drawn.append(std) or torch.zeros(dim).double(),
    )
    count = 3000
    given = replace(measured(quantile=None), n=count, n_max=count, bound_y=TARGET)
    assert given.prepare is not None
    rows, targets = line(count)
    records = make_records(given, rows, targets)
    given.prepare.measure(records, given.preparation, count, "add_remove", torch.Generator())
    exact = [1 / given.prepare.rows, math.sqrt(given.prepare.counted) / given.prepare.counts]
    spare = min(drawn[1] / exact[0], drawn[0] / exact[1]) - 1
    assert spare > count * 2.0**-53 * 1024
    scaled = records.weights / BOUND
    prepared = torch.cat([block for _, block in records.blocks()])
    sums = [
        abs(float(records.combine(scaled)[k]) - math.fsum((prepared[:, k] / BOUND).tolist()))
        for k in range(2)
    ]
    assert 2 * math.hypot(*sums) <= spare


@examples(st.floats(1e-3, 1e3), st.floats(1e-6, 1.0, exclude_max=True))
def test_what_is_left_and_what_is_spent_are_within_the_level(mu: float, share: float) -> None:
    spent = share * mu
    assert Fraction(level_left(mu, spent)) ** 2 + Fraction(spent) ** 2 <= Fraction(mu) ** 2


def test_preparation_and_release_together_have_the_level_of_the_budget() -> None:
    for spent in (0.0, 1e-9, 0.1, 0.2):
        left = level_left(0.22, spent)
        assert 0.22 * (1 - 1e-12) <= math.hypot(left, spent) <= 0.22
    with pytest.raises(ValueError, match="spent must be below mu"):
        level_left(0.1, 0.1)


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize(
    "mechanism",
    ["objective", "output", "noisy_gd", "adassp", "boosted_adassp", "preconditioned_gd"],
)
@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
def test_what_is_measured_is_charged_with_the_release(
    mechanism: str, adjacency: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = measured(adjacency)
    if mechanism == "adassp":
        given = replace(
            measured(adjacency, quantile=None), loss=dp.losses.Squared(), bound_y=TARGET
        )
    elif mechanism == "boosted_adassp":
        given = replace(given, loss=dp.losses.Squared())
    plan = plan_linear(given, mechanism)
    ledger = dp.Accountant(given.budget)
    seen: list[float] = []

    def watched(dim: int, std: float, source: object) -> Tensor:
        seen.append(ledger.get_epsilon(DELTA))
        return torch.zeros(dim, dtype=torch.float64)

    monkeypatch.setattr(preparation, "gaussian_vector", watched)
    rows, targets = line()
    fit_linear(plan, rows, targets, accountant=ledger)
    assert 0.999 < seen[0] == ledger.get_epsilon(DELTA) <= 1.0
    assert plan.epsilon() == ledger.get_epsilon(DELTA)
    with pytest.raises(BudgetExceeded):
        fit_linear(plan, rows, targets, accountant=ledger)
    assert len(seen) == (
        35 + 1 if mechanism != "adassp" else 8 + 1
    )  # the refused fit has drawn nothing


@pytest.mark.slow
def test_the_level_of_measurements_is_in_the_delta_of_objective_perturbation() -> None:
    given = measured(quantile=None)
    assert given.prepare is not None
    prepare = replace(given.prepare, bound_y=None)
    given = replace(given, loss=dp.losses.Logistic(), bound_y=None, prepare=prepare)
    plan = plan_linear(given, "objective")
    event = plan.event()
    assert isinstance(event, ApproxDP)
    mu_out = math.hypot(AMP_MU_OUT, prepare.level)
    constants = given.lipschitz, given.smoothness
    spent = amp_delta_monotone(1.0, plan.noise_scale, plan.reg, *constants, mu_out, "add_remove")
    # the same numbers, added up in another order
    assert DELTA * 0.999 <= spent <= event.delta * (1 + 1e-14)
    assert event.delta <= DELTA
    without = plan_linear(replace(given, prepare=None, reg=plan.reg), "objective")
    assert plan.noise_scale > without.noise_scale * 1.01


SPLIT = ("noisy_gd", "adassp", "preconditioned_gd")


@pytest.mark.parametrize("mechanism", SPLIT)
def test_gaussian_mechanisms_get_what_is_left(mechanism: str) -> None:
    given = measured()
    assert given.prepare is not None
    if mechanism == "adassp":
        prepare = replace(given.prepare, bound_y=None, quantile=None)
        given = replace(
            given, loss=dp.losses.SoftmaxCrossEntropy(3), bound_y=None, prepare=prepare
        )
    event = plan_linear(given, mechanism).event()
    assert isinstance(event, Sequential)
    first, second = event.events
    assert (first, type(second)) == (GDP(given.prepare.level, ("add_remove",)), GDP)
    mu = gaussian_mu(1.0, DELTA)
    assert mu * (1 - 1e-9) <= math.hypot(first.mu, second.mu) <= mu


def median(values: Tensor) -> float:
    """Returns the lower median."""
    return float(values.median())


# -- units ------------------------------------------------------------------------------------------------------------


def test_without_noise_units_are_those_of_the_data(quiet: None) -> None:
    rows, targets = line()
    given = measured(within=0.5)
    assert given.prepare is not None
    records = make_records(given, rows, targets)
    units = given.prepare.measure(
        records, given.preparation, 2000, "add_remove", torch.Generator()
    )
    center, radius = units.rows.shift_and_scale
    torch.testing.assert_close(center, rows.mean(0), rtol=1e-9, atol=1e-9)
    step = (2 * 50.0) ** (1 / 2**7)  # of the bisection
    near = median((rows - rows.mean(0)).norm(dim=1))
    assert near <= float(radius[0]) <= near * step
    middle = median(targets)
    assert middle <= units.location <= middle + 2 * TARGET / 2**18 * 1.01
    spread = median((targets - units.location).abs())
    assert spread <= units.spread <= spread * (2 * 10**6) ** (1 / 2**9)


@pytest.mark.parametrize("widest", [0.1, 100.0])
def test_the_unit_of_targets_is_the_spread_or_the_widest_one(quiet: None, widest: float) -> None:
    """So that a threshold of 0.3 units is 0.3 spreads, and never more than what was asked for."""
    rows, targets = line()
    found = []
    for cap in (math.inf, widest):
        given = measured(within=0.5, widest=cap)
        assert given.prepare is not None
        records = make_records(given, rows, targets)
        units = given.prepare.measure(
            records, given.preparation, 2000, "add_remove", torch.Generator()
        )
        found.append(units.spread)
    assert 0.1 < found[0] < 100.0
    assert found[1] == min(found[0], widest)


@pytest.mark.parametrize("widest", [1e-9, 3.0])
def test_no_target_in_the_widest_unit_leaves_its_bound(quiet: None, widest: float) -> None:
    """A unit below what the bisection can tell makes targets long: they are cut, as the plan's constants assume."""
    rows, targets = line()
    given = measured(within=0.5, widest=widest)
    assert given.prepare is not None
    units = given.prepare.measure(
        make_records(given, rows, targets),
        given.preparation,
        2000,
        "add_remove",
        torch.Generator(),
    )
    prepared = make_records(given, rows, targets, units=units)
    assert given.bound_y == given.prepare.most
    assert float(prepared.targets.abs().max()) <= given.bound_y


@pytest.mark.slow
@pytest.mark.parametrize("bound_y", [10.0, 2_000.0])
def test_a_generous_bound_on_targets_does_not_end_the_search_for_their_spread(
    bound_y: float,
) -> None:
    draw = np.random.default_rng(0)
    rows = draw.uniform(size=(25_000, 3))
    targets = 0.01 * np.exp(rows @ [2.0, -1.0, 1.0] + draw.normal(size=25_000))
    fitted = QuantileRegressor(
        epsilon=1.0, delta=1e-6, n=20_000, bound_x=3**0.5, bound_y=bound_y
    ).fit(rows[:20_000], targets[:20_000])
    assert 0.005 < fitted.units_.spread < 0.05  # of 0.017
    misses = np.abs(fitted.predict(rows[20_000:]) - targets[20_000:]).mean()
    constant = np.abs(np.median(targets[:20_000]) - targets[20_000:]).mean()
    assert misses < 0.95 * constant  # 0.91; 1.2 where the spread is not found


def test_noise_that_hides_everything_leaves_units_in_their_public_range(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows, targets = line()
    given = measured()
    assert given.prepare is not None
    for size in (1e9, -1e9):
        monkeypatch.setattr(
            preparation,
            "gaussian_vector",
            lambda dim, std, source, size=size: torch.full((dim,), size).double(),
        )
        records = make_records(given, rows, targets)
        units = given.prepare.measure(
            records, given.preparation, 2000, "add_remove", torch.Generator()
        )
        center, radius = units.rows.shift_and_scale
        assert float(center.norm()) <= BOUND * (1 + 1e-12)
        assert BOUND / 50 <= float(radius[0]) <= 2 * BOUND
        assert abs(units.location) <= TARGET * (1 + 1e-9)
        assert TARGET / 10**6 <= units.spread * (1 + 1e-12) <= 2 * TARGET * (1 + 2e-12)


def test_a_record_that_is_shrunk_lies_on_the_same_line(quiet: None) -> None:
    rows, targets = line()
    rows[0], targets[0] = torch.tensor([2.0, 0.0]).double(), 0.8 * 2.0 + 0.7
    given = measured(within=0.5)
    assert given.prepare is not None
    records = make_records(given, rows, targets)
    units = given.prepare.measure(
        records, given.preparation, 2000, "add_remove", torch.Generator()
    )
    assert units.rows.before < math.inf
    prepared = make_records(given, rows, targets, units=units)
    blocks = torch.cat([block for _, block in prepared.blocks()])
    assert float(units.rows.shares(rows).min()) < 0.5
    slope, residual = np.linalg.lstsq(blocks.numpy(), prepared.targets.numpy(), rcond=None)[:2]
    assert float(residual[0]) < 1e-16
    center, scale = (values.numpy() for values in units.rows.shift_and_scale)
    raw = slope[:2] / scale * units.spread
    np.testing.assert_allclose(raw, [0.8, -0.5], rtol=1e-9)
    np.testing.assert_allclose(
        slope[2] * 0.3 * units.spread - raw @ center + units.location, 0.7, rtol=1e-9
    )


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(
    "name",
    ["LogisticRegression", "SoftmaxRegression", "HuberRegressor", "QuantileRegressor", "Ridge"],
)
def test_predictions_are_linear_in_rows_within_the_public_bound(name: str) -> None:
    rows, targets = line(4000)
    rows[0] = torch.tensor([2.0, 0.0])
    settings = {"epsilon": 4.0, "n": 4000, "bound_x": BOUND}
    regressors = {
        "HuberRegressor": HuberRegressor,
        "QuantileRegressor": QuantileRegressor,
        "Ridge": Ridge,
    }
    if name in regressors:
        model = regressors[name](bound_y=TARGET, **settings).fit(rows, targets)
    else:
        classifier, classes = (
            (SoftmaxRegression, 3) if name == "SoftmaxRegression" else (LogisticRegression, 2)
        )
        labels = (targets > 1.5).long() + (targets > 2).long() * (classes - 2)
        model = classifier(classes=range(classes), **settings).fit(rows, labels)
        assert model.score(rows.numpy(), labels.numpy()) > 0.8
    assert model.units_.rows.before == BOUND
    within = rows[torch.linalg.vector_norm(rows, dim=1) <= BOUND].numpy()
    scores = LinearModel._scores(model, within)  # log-odds of clipped gradients are no line
    wanted = within @ np.atleast_2d(model.coef_).T + model.intercept_
    np.testing.assert_allclose(scores, wanted, rtol=1e-9, atol=1e-12)
    if name in regressors:
        assert model.score(rows.numpy(), targets.numpy()) > 0.9


# -- when it is done --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "public",
    [
        {"prepare": None},
        {"reg": 3.0},
        {"radius": 2.0},
        {"delta": 0.0},
        {"n": 50},
        {"secure": "exact", "mechanism": "output"},
    ],
)
def test_nothing_is_measured_where_units_are_public_or_it_does_not_pay(
    public: dict[str, object],
) -> None:
    settings = {"epsilon": 1.0, "n": 20_000, "bound_x": BOUND, "bound_y": TARGET}
    assert HuberRegressor(**settings).plan(2).task.prepare is not None
    assert HuberRegressor(**{**settings, **public})._task(2).prepare is None


@pytest.mark.slow
def test_public_centers_and_scales_win() -> None:
    settings = {"epsilon": 1.0, "n": 20_000, "bound_x": BOUND}
    for public in ({"feature_center": [1.0, 0.0]}, {"feature_scale": [1.0, 2.0]}):
        plan = HuberRegressor(bound_y=TARGET, **settings, **public).plan(2)
        assert plan.task.prepare is not None
        assert plan.task.prepare.rows == 0  # targets are measured all the same
        assert (
            LogisticRegression(classes=(0, 1), **settings, **public).plan(2).task.prepare is None
        )


@pytest.mark.slow
def test_a_threshold_in_units_of_the_target_needs_no_spread() -> None:
    settings = {"epsilon": 1.0, "n": 20_000, "bound_x": BOUND, "bound_y": TARGET}
    chosen, given = (
        HuberRegressor(threshold=value, **settings).plan(2).task for value in ("auto", 0.25)
    )
    assert (chosen.bound_y, given.bound_y) == (2e6, 2 * TARGET)
    assert given.loss == dp.losses.Huber(threshold=0.25)
    assert chosen.loss.threshold == 0.3
    by_objective = HuberRegressor(mechanism="objective", **settings).plan(2).task.loss.threshold
    assert 0.5 < by_objective <= 1.5
    assert HuberRegressor(**settings).plan(2, "user").task.loss.threshold == 0.5
    with pytest.raises(ValueError, match="threshold must be one of auto"):
        HuberRegressor(threshold="mad", **settings).plan(2)


def test_a_given_threshold_is_lowered_by_public_numbers_only_and_not_where_noise_is_low() -> (
    None
):
    settings = {"epsilon": 1.0, "bound_x": BOUND, "bound_y": TARGET, "threshold": 2.0}
    for n, rise in ((700, 1.0), (2000, 2000 * gaussian_mu(1.0, DELTA) / math.sqrt(2) / 200)):
        task = HuberRegressor(n=n, **settings).plan(2).task
        prepare = task.prepare
        assert prepare is not None
        assert prepare.spreads
        assert task.loss.threshold == pytest.approx(0.3 * rise)
        assert prepare.widest * task.loss.threshold == pytest.approx(2.0)
        assert f"{prepare.widest:.4g} at most as a unit" in str(prepare)
        # the counts for the spread are among those that are charged
        assert prepare.counted == number_of_counts(
            rows=prepare.rows > 0, targets=True, spreads=True
        )
    calm = HuberRegressor(n=40_000, **settings).plan(2).task
    assert calm.prepare is not None
    assert (calm.prepare.spreads, calm.prepare.widest) == (False, math.inf)
    assert calm.loss == dp.losses.Huber(threshold=2.0)
    for wrong in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="threshold"):
            HuberRegressor(n=2000, **{**settings, "threshold": wrong}).plan(2)


def test_levels_follow_public_numbers_only_and_stay_below_their_share() -> None:
    for n in (10, 1000, 10**5, 10**7):
        for mu in (0.01, 0.2, 3.0):
            assert 0 <= sum_level(mu, n, 20, "replace_one") <= math.sqrt(0.05) * mu
            assert 0 <= counts_level(mu, n, 32) <= math.sqrt(0.05) * mu
    few = counts_level(
        0.2, 500, 32
    )  # more where less would leave units unknown, and just what they need
    assert math.sqrt(0.05) * 0.2 < few == math.sqrt(32) / 500 / 0.15 <= math.sqrt(0.4) * 0.2
    assert counts_level(0.2, 250, 32) == 0
    assert [
        number_of_counts(rows=r, targets=t, spreads=True)
        for r in (True, False)
        for t in (True, False)
    ] == [*(35, 8, 28, 1)]
    assert 0.5 == share_within(0.9, 1e-6, 100, 8) < share_within(0.9, 0.1, 10_000, 8) <= 0.9
    widths = [robust_width(signal) for signal in (1.0, 500.0, 1000.0, 2000.0, 1e6)]
    assert widths == sorted(widths, reverse=True)


def test_preparations_that_do_not_go_together_are_refused() -> None:
    given = measured()
    for wrong, message in (
        ({"prepare": None, "bound_y": None}, "bound_y"),
        ({"bound_y": TARGET}, "bound_y must be"),
        ({"preparation": Preparation(BOUND)}, "preparation must be that of rows of norm 1"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(given, **wrong)
    with pytest.raises(ConditionError, match="pure budgets"):
        replace(given, budget=dp.Budget(1.0, 0.0))
    assert given.prepare is not None
    for wrong, message in (
        ({"given": Preparation(1.0, intercept=1.0)}, "no intercept"),
        ({"bound_y": None}, "bound_y must be given"),
        ({"rows": 0.0, "quantile": None}, "nothing is measured"),
        ({"counts": 0.0}, "counts must be"),
        ({"within": 1.0}, "within must be"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(given.prepare, **wrong)
    tilted = TiltedClassifier(
        n=20_000, n_min=20_000, bound_x=1.0, radius=1.0, epsilon=8.0, classes=(0, 1)
    )
    assert tilted.plan(2).task.prepare is None


# -- power ------------------------------------------------------------------------------------------------------------


def expect_failure(
    change: Callable[[pytest.MonkeyPatch], None], check: Callable[[], None]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        change(patch)
        with pytest.raises(AssertionError):
            check()


def test_a_charge_without_what_is_measured_would_be_seen() -> None:
    def forgotten(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(LinearTask, "measured", 0.0)

    expect_failure(
        forgotten, test_the_level_of_measurements_is_in_the_delta_of_objective_perturbation
    )
    for mechanism in SPLIT:
        expect_failure(
            forgotten,
            lambda mechanism=mechanism: test_gaussian_mechanisms_get_what_is_left(mechanism),
        )
