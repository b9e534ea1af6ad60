"""A deep model: the exact law of check and draw by brute force, what a record moves, and what a user sees."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given as examples
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

import torch_dpsco as dp
from torch_dpsco.accounting.stated import ApproxDP
from torch_dpsco.errors import BudgetExceeded, ConditionError, InfeasibleError, UtilityWarning
from torch_dpsco.estimators import LogisticRegression, Ridge
from torch_dpsco.linear import NO_BOUND, LinearTask, Preparation, tukey
from torch_dpsco.linear.task import make_records
from torch_dpsco.linear.tukey import models_of, plan_tukey
from torch_dpsco.mechanisms.discrete import draw_laplace
from torch_dpsco.mechanisms.tukey import Boxes, draw_deep, from_lattice, on_lattice
from torch_dpsco.theory.linear.tukey import TukeyNumbers, bad_pass, tukey_numbers

Points = Sequence[Sequence[int]]
# of few points: large enough rarity and base that the check passes for some sets, fails for others
SMALL = TukeyNumbers(parts=8, depth=2, base=4.0, rarity=0.3, scale=0.7, threshold=1)


def depth(points: Points, place: Sequence[int]) -> int:
    """By its definition, up to the depth that points in general position have."""
    sides = [(sum(p[j] <= at for p in points), sum(p[j] >= at for p in points)) for j, at in enumerate(place)]
    return min((len(points) + 1) // 2, *(min(side) for side in sides))  # more where points are equal


def draws_of(points: Points, numbers: TukeyNumbers) -> dict[tuple[int, ...], Fraction]:
    """The law of the draw, by brute force over the lattice."""
    grid = itertools.product(*(range(min(axis), max(axis) + 1) for axis in zip(*points, strict=True)))
    odds = {y: Fraction(numbers.base) ** deep for y in grid if (deep := depth(points, y)) >= numbers.depth}
    total = sum(odds.values())
    return {y: one / total for y, one in odds.items()}


def distance_of(points: Points, numbers: TukeyNumbers) -> int:
    """By its definition, with volumes counted point by point."""
    grid = list(itertools.product(*(range(min(axis), max(axis) + 1) for axis in zip(*points, strict=True))))
    depths = [depth(points, y) for y in grid]
    volume = [sum(d >= i for d in depths) for i in range(len(points) + 2)]
    found, t = -1, numbers.depth
    for k in range(t - 1):
        inner = range(t + k, (len(points) + 1) // 2 + 1)
        bound = Fraction(numbers.rarity)
        if any(volume[t - 1 - k] <= bound * Fraction(numbers.base) ** (i - t - k) * volume[i] for i in inner):
            found = k
    return found


def passes(distance: int, numbers: TukeyNumbers) -> float:
    """P(distance + noise >= threshold) of discrete Laplace noise."""
    p = math.exp(-1 / numbers.scale)
    need = numbers.threshold - distance
    upper = p ** abs(need if need > 0 else 1 - need) / (1 + p)
    return upper if need > 0 else 1 - upper


def law_of(points: Points, numbers: TukeyNumbers, chance: float | None = None) -> dict[object, float]:
    """Of the whole release, by the code's own boxes and distance; `chance` that the check passes."""
    boxes = Boxes(points)
    if chance is None:
        chance = passes(boxes.distance(numbers), numbers)
    odds = boxes.law(numbers)
    law: dict[object, float] = {None: 1 - chance}
    for share, level in zip(odds, itertools.count(numbers.depth), strict=False):
        for y in itertools.product(*(range(low, high + 1) for low, high in boxes.box(level))):
            law[y] = law.get(y, 0.0) + chance * share / sum(odds) / boxes.volumes[level]
    return law


def excess(one: dict[object, float], other: dict[object, float], epsilon: float) -> float:
    return math.fsum(max(0.0, p - math.exp(epsilon) * other.get(y, 0.0)) for y, p in one.items())


few = st.lists(st.lists(st.integers(-4, 9), min_size=2, max_size=2), min_size=8, max_size=8)


@examples(few)
def test_boxes_and_odds_are_those_of_the_definition(points: Points) -> None:
    boxes = Boxes(points)
    assert boxes.distance(SMALL) == distance_of(points, SMALL)
    found = law_of(points, SMALL)
    wanted = draws_of(points, SMALL)
    assert set(found) - {None} == set(wanted)
    chance = 1 - found[None]
    for y, share in wanted.items():
        assert found[y] == pytest.approx(chance * float(share), rel=1e-9)


MANY = TukeyNumbers(parts=12, depth=3, base=1.75, rarity=0.3, scale=0.8, threshold=1)
CASES = [
    MANY,
    MANY._replace(parts=10, base=2.25),
    MANY._replace(depth=2, base=2.0, rarity=0.2),
    MANY._replace(scale=3.0),
]


def worst_of(numbers: TukeyNumbers, chance: Callable[[int], float], top: int = 3) -> tuple[float, int, int]:
    """Largest excess over all multisets of 0..top and all neighbors; how many there are, and how many are safe."""
    sets = list(itertools.combinations_with_replacement(range(top + 1), numbers.parts))
    laws, safe = {}, 0
    for one in sets:
        distance = Boxes([[p] for p in one]).distance(numbers)
        laws[one], safe = law_of([[p] for p in one], numbers, chance(distance)), safe + (distance >= 0)
    worst = 0.0
    for one in sets:
        for left, moved in itertools.product(set(one), range(top + 1)):
            other = list(one)
            other[one.index(left)] = moved
            worst = max(worst, excess(laws[one], laws[tuple(sorted(other))], numbers.epsilon))
    return worst, len(sets), safe


@pytest.mark.parametrize("numbers", CASES)
def test_the_exact_law_keeps_its_epsilon_and_delta_on_small_cases(numbers: TukeyNumbers) -> None:
    """All multisets of numbers of a small lattice and their neighbors, without any sampling."""
    worst, count, safe = worst_of(numbers, lambda distance: passes(distance, numbers))
    assert 0 < safe < count
    assert worst <= numbers.delta


def test_an_answer_without_a_check_is_caught_on_small_cases() -> None:
    assert max(worst_of(numbers._replace(rarity=1e-3), lambda distance: 1.0)[0] for numbers in CASES) > 0.01


def wide(count: int = 8) -> list[list[int]]:
    """Half of the points at 0, the others far away: one more, or less, empties or fills the deep box."""
    return [[0]] * (count // 2 + 1) + [[10**6]] * (count // 2 - 1)


def test_without_the_check_delta_is_broken() -> None:
    numbers = SMALL._replace(depth=4, scale=0.2, threshold=1, rarity=1e-3)
    near, far = wide(), [*wide()[1:], [10**6]]

    def unchecked(points: Points) -> dict[int, float]:
        """Probability of 0, and of all else."""
        boxes = Boxes(points)
        odds = boxes.law(numbers)
        zero = sum(share / boxes.volumes[i] for share, i in zip(odds, itertools.count(4), strict=False)) / sum(odds)
        return {0: zero, 1: 1 - zero}

    assert excess(unchecked(near), unchecked(far), numbers.epsilon) > 100 * numbers.delta
    for points in (near, far):
        assert passes(Boxes(points).distance(numbers), numbers) <= numbers.delta + bad_pass(0.2, 1)


@examples(
    st.lists(
        st.lists(st.integers(-(2**70), 2**70) | st.integers(-3, 3), min_size=2, max_size=2), min_size=21, max_size=21
    ),
    st.integers(0, 20),
    st.lists(st.integers(-(2**80), 2**80), min_size=2, max_size=2),
)
def test_no_point_moves_the_distance_by_more_than_one(points: Points, place: int, moved: list[int]) -> None:
    other = [*points[:place], moved, *points[place + 1 :]]
    for numbers in (TukeyNumbers(21, 6, 1.5, 0.01, 1.0, 3), TukeyNumbers(21, 5, 64.0, 0.3, 1.0, 3)):
        one, two = Boxes(points), Boxes(other)
        assert abs(one.distance(numbers) - two.distance(numbers)) <= 1
        assert -1 <= one.distance(numbers) <= numbers.depth - 2
        for i in range(2, 11):  # boxes interlace, which all rests on
            assert one.volumes[i + 1] <= two.volumes[i] <= one.volumes[i - 1]


def test_a_distance_is_found_by_halving_as_by_trying_all() -> None:
    draws = np.random.default_rng(3)
    numbers, seen = TukeyNumbers(61, 20, 1.6, 0.05, 1.0, 3), set()
    for spread in (1, 3, 10, 100, 10**6, 10**12):
        points = [[int(spread * value)] for value in draws.standard_normal(61)]
        boxes, t = Boxes(points), numbers.depth
        far = [
            any(
                boxes.volumes[t - 1 - k] <= Fraction(0.05) * Fraction(1.6) ** (i - t - k) * boxes.volumes[i]
                for i in range(t + k, 32)
            )
            for k in range(t - 1)
        ]
        assert far == sorted(far, reverse=True)
        seen.add(boxes.distance(numbers))
        assert boxes.distance(numbers) == sum(far) - 1
    assert len(seen) > 1


def test_draws_follow_the_law() -> None:
    """Chi-square of 4,000 draws over "none" and all points; false alarms: 1e-6."""
    points = [[0, 0], [1, 1], [1, 1], [1, 1], [2, 2], [2, 1], [2, 1], [3, 2]]
    numbers = SMALL._replace(base=8.0)
    law = law_of(points, numbers)
    assert 0.05 < law[None] < 0.95
    source = torch.Generator().manual_seed(5)
    counts = dict.fromkeys(law, 0)
    for _ in range(4000):
        found = draw_deep(points, numbers, source)
        counts[None if found is None else tuple(found)] += 1
    seen, wanted = np.array(list(counts.values())), 4000 * np.array(list(law.values()))
    assert float(((seen - wanted) ** 2 / wanted).sum()) < stats.chi2.isf(1e-6, len(law) - 1)
    shifted = np.roll(wanted, 1)  # the same odds of other points are caught
    assert float(((seen - shifted) ** 2 / shifted).sum()) > stats.chi2.isf(1e-6, len(law) - 1)


def test_a_bad_pass_has_the_probability_of_the_exact_tail() -> None:
    for scale, threshold in ((0.7, 1), (3.0, 5), (6.0, 80)):
        p = math.exp(-1 / scale)
        exact = math.fsum((1 - p) / (1 + p) * p**x for x in range(threshold, threshold + 2000))
        assert exact * (1 - 1e-9) <= bad_pass(scale, threshold) <= exact * (1 + 1e-9)
    source = torch.Generator().manual_seed(1)
    seen = sum(draw_laplace(3.0, 1, source) >= 5 for _ in range(4000))
    assert stats.binom.ppf(5e-7, 4000, bad_pass(3.0, 5)) <= seen <= stats.binom.isf(5e-7, 4000, bad_pass(3.0, 5))


@pytest.mark.parametrize("epsilon", [0.3, 1.0, 3.0, 20.0, 200.0])
@pytest.mark.parametrize("delta", [1e-4, 1e-10])
def test_numbers_stay_within_the_budget(epsilon: float, delta: float) -> None:
    numbers = tukey_numbers(epsilon, delta, 10**8, 3)
    assert numbers.epsilon <= epsilon
    assert 0.99 * delta < numbers.delta <= delta
    assert bad_pass(numbers.scale, numbers.threshold) <= delta
    if numbers.threshold > 1:
        assert bad_pass(numbers.scale, numbers.threshold - 1) > numbers.rarity
    if epsilon <= 20:
        assert numbers.epsilon > 0.97 * epsilon
    with pytest.raises(InfeasibleError, match="n must be >="):
        tukey_numbers(epsilon, delta, 50, 3)
    with pytest.raises(InfeasibleError, match="epsilon"):
        tukey_numbers(1e-3, delta, 10**8, 3)


# -- models -----------------------------------------------------------------------------------------------------------

NAN, INF = math.nan, math.inf
ABSENT = torch.linspace(-1, 1, 36, dtype=torch.float64).view(12, 3)
ODD = [NAN, INF, -INF, 1e300, -1e300, 0.0, 1e-300, 1e45, 1.0]


def task(adjacency: str = "add_remove", **settings: object) -> LinearTask:
    given = {"preparation": Preparation(NO_BOUND, intercept=1.0), "bound_y": NO_BOUND, "dim": 2, "n": 30_000}
    given |= {"loss": dp.losses.Squared(), "budget": dp.Budget(2.0, 1e-6, adjacency=adjacency)}
    return LinearTask(**(given | settings))


def table(count: int, seed: int = 3) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(seed)
    rows = torch.randn(count, 2, generator=draws, dtype=torch.float64)
    return rows, rows @ torch.tensor([0.8, -0.5], dtype=torch.float64) + 0.7


@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one", "zero_out"])
@examples(st.sampled_from(ODD), st.sampled_from(ODD), st.sampled_from(ODD), st.integers(0, 99))
def test_a_record_moves_one_model(adjacency: str, first: float, second: float, target: float, place: int) -> None:
    """And no other one, to the last bit, whatever the record is, in parts of fewer and more rows than parameters."""
    rows, targets = table(100)
    parts = torch.from_numpy(np.random.default_rng(7).integers(0, 12, 100))
    others = torch.arange(100) != place
    changed, ends = rows.clone(), targets.clone()
    changed[place], ends[place] = torch.tensor([first, second], dtype=torch.float64), target
    if adjacency == "add_remove":
        pair = [(rows, targets, parts), (rows[others], targets[others], parts[others])]
    else:
        if adjacency == "zero_out":
            changed[place] = NAN
        pair = [(rows, targets, parts), (changed, ends, parts)]
    models = []
    for features, values, own in pair:
        given = task(adjacency, n=len(features), n_max=100)
        models.append(models_of(make_records(given, features, values), own, ABSENT))
    differs = [k for k in range(12) if not torch.equal(models[0][k], models[1][k])]
    assert differs in ([], [int(parts[place])])


@examples(st.lists(st.sampled_from(ODD), min_size=30, max_size=30))
def test_no_value_raises_in_a_deep_model(values: list[float]) -> None:
    table = torch.tensor(values, dtype=torch.float64).view(10, 3)
    given = task("replace_one", n=10)
    models = models_of(make_records(given, table[:, :2], table[:, 2]), torch.arange(10) % 4, ABSENT[:6])
    for model in models:
        for number in map(on_lattice, model.tolist()):
            assert abs(number) <= 2**400


def test_the_lattice_is_fine_and_rounds_each_number_by_itself() -> None:
    for value in (0.0, 1.0, -math.pi, 1e-40, 1e50, -(2.0**200)):
        assert from_lattice(on_lattice(value)) == value
    assert [on_lattice(value) for value in (NAN, 1e-70, INF, -1e300)] == [0, 0, 2**400, -(2**400)]


def test_parts_are_least_squares_of_their_rows() -> None:
    rows, _ = table(40)
    targets = torch.randn(40, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    weights = torch.rand(40, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    parts = torch.arange(40) % 3
    models = models_of(make_records(task("replace_one", n=40), rows, targets, weights), parts, ABSENT[:3])
    for part, model in enumerate(models):
        own = parts == part
        root = weights[own].sqrt().unsqueeze(1)
        design = torch.cat([rows[own], torch.ones(int(own.sum()), 1)], dim=1)
        wanted = torch.linalg.lstsq(root * design, root * targets[own].unsqueeze(1)).solution.flatten()
        torch.testing.assert_close(model, wanted, rtol=1e-6, atol=1e-8)


def test_weights_of_features_that_most_parts_lack_are_no_single_point() -> None:
    """Else the boxes around them would shrink to one lattice point at once, and the check would fail."""
    draws = np.random.default_rng(4)
    X = np.c_[draws.standard_normal((20_000, 2)), draws.uniform(size=(20_000, 2)) < 0.02]
    y = X @ [1.0, -2.0, 3.0, -1.0] + draws.standard_normal(20_000)
    model = Ridge(epsilon=4.0, n=20_000, mechanism="tukey").fit(X, y)
    np.testing.assert_allclose(model.coef_[:2], [1.0, -2.0], atol=0.2)
    empty = torch.zeros(4, 2, dtype=torch.float64)
    lacking = models_of(
        make_records(task("replace_one", n=4), empty, torch.arange(4.0)), torch.zeros(4).long(), ABSENT[:2]
    )
    assert lacking[0][:2].abs().max() > 0
    assert float(lacking[0][2]) == pytest.approx(1.5)


# -- what a user sees -------------------------------------------------------------------------------------------------


def test_a_table_without_bounds_is_fitted_and_charged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    draws = np.random.default_rng(2)
    X = draws.standard_normal((40_000, 2)) * [1e6, 1e-3]
    y = X @ [2e-3, 5e6] + 1e3 * draws.standard_normal(40_000) + 1e5
    X[:50], y[50:90] = np.nan, 1e30
    ledger, order = dp.Accountant(dp.Budget(2.0, 1e-6, "add_remove")), []
    draw = tukey.draw_deep

    def watched(*given: object) -> list[int] | None:
        order.append(len(ledger))
        return draw(*given)

    monkeypatch.setattr(tukey, "draw_deep", watched)
    model = Ridge(epsilon=2.0, n=40_000, mechanism="tukey", accountant=ledger).fit(X, y)
    np.testing.assert_allclose(model.coef_, [2e-3, 5e6], rtol=0.1)
    assert model.score(X[90:], y[90:]) > 0.9
    assert order == [1]
    event = model.plan_.event()
    assert isinstance(event, ApproxDP)
    assert event.adjacencies == ("add_remove",)
    assert model.privacy_.epsilon == model.plan_.epsilon() <= 2.0
    assert "no bounds on rows and targets" in str(model.plan_)
    assert "It is not the chance that" not in str(model.report())  # delta may be that of a failed check
    with pytest.raises(BudgetExceeded):
        model.fit(X, y)
    assert order == [1]  # the refused fit has drawn nothing


def test_a_preview_without_bounds_is_in_units_of_the_sample() -> None:
    rows, targets = table(400)
    noisy = targets + torch.randn(400, generator=torch.Generator().manual_seed(1)).double()
    seen = Ridge(n=8000, mechanism="tukey").preview(rows * 1e3, noisy, epsilons=(4.0,), runs=3)
    (reached,), (constant,) = seen.not_private.values(), seen.constant.values()
    assert 0.7 < reached < 1.3 < constant
    assert seen.mechanisms == ("tukey",)


@pytest.mark.parametrize("adjacency", ["replace_one", "zero_out"])
def test_models_that_disagree_give_the_answer_none(adjacency: str) -> None:
    given = task(adjacency, n=6000, budget=dp.Budget(4.0, 1e-6, adjacency=adjacency))
    plan = plan_tukey(given)
    plan = replace(plan, numbers=plan.numbers._replace(threshold=10**6))
    rows, targets = table(6000)
    with pytest.warns(UtilityWarning, match="'none'"):
        answer = plan.draw(make_records(given, rows, targets), torch.Generator().manual_seed(0))
    assert answer.tolist() == [0.0] * 3


def test_what_needs_a_bound_says_what_does_not() -> None:
    for bound in ("bound_x", "bound_y"):
        settings = {"n": 40_000, "bound_x": 1.0, "bound_y": 1.0, bound: None}
        with pytest.raises(ValueError, match=rf"{bound} must be given: .*mechanism='tukey' fits a large table"):
            Ridge(**settings).plan(2)
    with pytest.raises(ValueError, match="bound_x must be given") as caught:
        LogisticRegression(n=100, classes=(0, 1)).plan(2)
    assert "tukey" not in str(caught.value)
    bounded = Ridge(n=40_000, bound_x=2.0, bound_y=3.0, mechanism="tukey").plan(2).task
    assert (bounded.prepare, bounded.preparation.bound_x, bounded.bound_y) == (None, 2.0, 3.0)


@pytest.mark.parametrize(
    "settings",
    [
        {"loss": dp.losses.Huber(1.0)},
        {"residual_clip": 0.5},
        {"budget": dp.Budget(1.0, 0.0)},
        {"reg": 1.0},
        {"n": 100},
    ],
)
def test_what_a_deep_model_does_not_cover_is_refused(settings: dict[str, object]) -> None:
    with pytest.raises((ConditionError, InfeasibleError)):
        plan_tukey(task(**settings))


def test_numbers_that_have_no_law_are_refused() -> None:
    plan = plan_tukey(task())
    for wrong in (
        {"depth": 1},
        {"depth": plan.numbers.parts},
        {"base": 1.0},
        {"rarity": 1.0},
        {"scale": 0.0},
        {"threshold": 0},
    ):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            replace(plan, numbers=plan.numbers._replace(**wrong))
    with pytest.raises(ValueError, match="points must be"):
        draw_deep([[0]] * 7, SMALL, torch.Generator())
