"""Preparation of rows and targets, and the public numbers of a task."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import torch_dpsco as dp
from torch_dpsco.errors import AdjacencyError, ConditionError, UnitError
from torch_dpsco.estimators.base import choose_mechanism, plan_linear
from torch_dpsco.estimators.fits import fit_linear
from torch_dpsco.estimators.preparation import Preparation
from torch_dpsco.estimators.solvers import solve
from torch_dpsco.estimators.task import LinearTask, build_objective, make_records

BUDGET = dp.Budget(1.0, 1e-6)


def task(**settings: object) -> LinearTask:
    given = {
        "loss": dp.losses.Logistic(),
        "preparation": Preparation(1.0),
        "dim": 2,
        "n": 4,
        "budget": BUDGET,
    }
    return LinearTask(**(given | settings))


# -- rows -------------------------------------------------------------------------------------------------------------

FLOATS = st.floats(allow_nan=True, allow_infinity=True, width=64)
POSITIVE = st.floats(1e-300, 1e300)


@pytest.mark.slow
@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    rows=st.lists(st.tuples(FLOATS, FLOATS, FLOATS), min_size=1, max_size=5),
    bound=st.floats(1e-100, 1e150),
    intercept=st.sampled_from([0.0, 1.0, 1e-9, 1e140]),
    scale=st.one_of(st.none(), st.tuples(POSITIVE, POSITIVE, POSITIVE)),
    center=st.one_of(st.none(), st.tuples(*3 * [st.floats(-1e300, 1e300)])),
    single=st.booleans(),
)
def test_no_prepared_row_exceeds_its_bound(
    rows: list[tuple[float, ...]],
    bound: float,
    intercept: float,
    scale: tuple[float, ...] | None,
    center: tuple[float, ...] | None,
    single: bool,
) -> None:
    preparation = Preparation(bound, center=center, scale=scale, intercept=intercept)
    raw = torch.tensor(rows, dtype=torch.float32 if single else torch.float64)
    image = preparation(raw)
    assert torch.isfinite(image).all()
    for row in image.tolist():
        assert sum(Fraction(value) ** 2 for value in row) <= Fraction(preparation.bound) ** 2
    for k in range(len(raw)):
        assert torch.equal(preparation(raw[k : k + 1]), image[k : k + 1])


@pytest.mark.cases(4, 1)
@pytest.mark.parametrize("bound", [1.0, 0.1, 3e105, 2e-99, 1e-100])
def test_rows_at_the_bound_do_not_exceed_it(bound: float) -> None:
    draws = torch.Generator().manual_seed(7)
    for dim in (2, 3, 7, 50):
        raw = torch.randn(60, dim, generator=draws, dtype=torch.float64)
        raw *= bound / raw.norm(dim=1, keepdim=True)
        raw[::3] *= 1 + 1e-15
        for row in Preparation(bound)(raw).tolist():
            assert sum(Fraction(value) ** 2 for value in row) <= Fraction(bound) ** 2


def layouts(raw: Tensor) -> list[Tensor]:
    by_column = raw.T.contiguous().T
    return [raw, by_column, torch.cat([raw, raw], dim=1)[:, : raw.shape[1]], by_column.float()]


@pytest.mark.cases(6, 2)
@pytest.mark.parametrize("dim", [3, 8, 64, 1000])
@pytest.mark.parametrize("intercept", [0.0, 1.0])
def test_the_image_of_a_row_is_the_same_in_every_block(dim: int, intercept: float) -> None:
    draws = torch.Generator().manual_seed(dim)
    sizes = torch.logspace(-2, 2, 37, dtype=torch.float64)[:, None] / math.sqrt(dim)
    preparation = Preparation(1.0, intercept=intercept)
    for raw in layouts(torch.randn(37, dim, generator=draws, dtype=torch.float64) * sizes):
        image = preparation(raw)
        for length in (1, 2, 5, 16):
            for start in range(0, 38 - length, 3):
                assert torch.equal(
                    preparation(raw[start : start + length]), image[start : start + length]
                )


def test_a_row_is_centered_scaled_clipped_and_gets_its_constant() -> None:
    preparation = Preparation(1.0, center=(1.0, 2.0), scale=(2.0, 4.0), intercept=3.0)
    image = preparation(torch.tensor([[1.5, 3.0], [7.0, 18.0]]))
    torch.testing.assert_close(
        image, torch.tensor([[0.25, 0.25, 3.0], [0.6, 0.8, 3.0]], dtype=torch.float64)
    )
    assert 10 <= preparation.bound**2 <= 10 * (1 + 1e-14)


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        ({"bound_x": 0.0}, "bound_x"),
        ({"bound_x": math.inf}, "bound_x"),
        ({"intercept": -1.0}, "intercept"),
        ({"center": (math.nan,)}, "center"),
        ({"scale": (0.0,)}, "scale"),
        ({"scale": (math.inf,)}, "scale"),
    ],
)
def test_numbers_that_prepare_no_row_are_named(wrong: dict[str, object], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        Preparation(**({"bound_x": 1.0} | wrong))


# -- records ----------------------------------------------------------------------------------------------------------


def gradient_of(
    given: LinearTask,
    features: list[list[float]],
    targets: Tensor,
    weights: Tensor | None = None,
):
    rows = torch.tensor(features, dtype=torch.float64)
    objective = build_objective(given, 1.0, make_records(given, rows, targets, weights))
    return objective.value_and_gradient(torch.zeros(objective.dim, dtype=torch.float64))[1]


def test_a_label_that_is_no_sign_makes_a_null_record() -> None:
    one = task(n=1)
    known = gradient_of(one, [[1.0, 0.0]], torch.tensor([1.0]))
    assert known.tolist() == pytest.approx([-0.5, 0.0], rel=1e-12)
    for label in (0.0, 1.0 + 1e-6, -3.0, 1e300, math.nan, math.inf, -math.inf):
        assert gradient_of(
            one, [[1.0, 0.0]], torch.tensor([label], dtype=torch.float64)
        ).tolist() == pytest.approx([0.0, 0.0], rel=1e-12)
    for label in (0, 2, -(2**63)):
        assert gradient_of(one, [[1.0, 0.0]], torch.tensor([label])).tolist() == pytest.approx(
            [0.0, 0.0], rel=1e-12
        )


def test_a_target_is_clipped_to_its_bound() -> None:
    one = task(n=1, loss=dp.losses.Squared(), bound_y=2.0)
    for target, slope in ((1.0, -1.0), (1e300, -2.0), (-math.inf, 2.0), (math.nan, 0.0)):
        targets = torch.tensor([target], dtype=torch.float64)
        assert gradient_of(one, [[1.0, 0.0]], targets).tolist() == pytest.approx(
            [slope, 0.0], rel=1e-12
        )


def test_a_class_that_does_not_exist_makes_a_null_record() -> None:
    one = task(n=1, loss=dp.losses.SoftmaxCrossEntropy(3))
    assert float(gradient_of(one, [[1.0, 0.0]], torch.tensor([2])).norm()) > 0.8
    for label in (3, -1, 2**62):
        assert float(gradient_of(one, [[1.0, 0.0]], torch.tensor([label])).norm()) == 0


def test_weights_above_one_are_clipped() -> None:
    one = task(n=1)
    for weight, share in (
        (0.5, 0.5),
        (1.0, 1.0),
        (7.0, 1.0),
        (math.inf, 1.0),
        (-3.0, 0.0),
        (math.nan, 0.0),
    ):
        weights = torch.tensor([weight], dtype=torch.float64)
        assert gradient_of(
            one, [[1.0, 0.0]], torch.tensor([1.0]), weights
        ).tolist() == pytest.approx([-0.5 * share, 0.0], rel=1e-12)


def test_weights_of_a_tilted_mean_are_refused() -> None:
    with pytest.raises(ConditionError, match="weights"):
        make_records(task(tilt=1.0), torch.ones(4, 2), torch.ones(4), torch.ones(4))


@pytest.mark.parametrize("adjacency", ["replace_one", "zero_out"])
def test_another_number_of_records_is_refused(adjacency: str) -> None:
    public = task(budget=dp.Budget(1.0, 1e-6, adjacency=adjacency))
    for count in (0, 3, 5):
        with pytest.raises(UnitError, match="n=4"):
            make_records(public, torch.ones(count, 2), torch.ones(count))


def test_any_number_of_records_is_taken_where_it_is_private() -> None:
    private = task(budget=dp.Budget(1.0, 1e-6, adjacency="add_remove"))
    for count in (0, 1, 3, 8):
        assert make_records(private, torch.ones(count, 2), torch.ones(count)).count == count


def test_rows_of_another_width_are_refused() -> None:
    for shape in ((4, 3), (4,), (4, 2, 1)):
        with pytest.raises(ValueError, match="features"):
            make_records(task(), torch.ones(shape), torch.ones(4))


# -- numbers of a task ------------------------------------------------------------------------------------------------


def test_a_clip_is_a_share_of_the_bound() -> None:
    for share in (0.0, -0.5, 1.0 + 1e-12, 2.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="residual_clip"):
            task(residual_clip=share)
    assert task(
        residual_clip=0.25, preparation=Preparation(3.0, intercept=4.0)
    ).lipschitz == pytest.approx(1.25)


def test_the_radius_holds_for_n_max_records() -> None:
    squared = task(
        loss=dp.losses.Squared(),
        bound_y=1.0,
        dim=1,
        n=2,
        n_max=50,
        budget=dp.Budget(1.0, 1e-6, adjacency="add_remove"),
    )
    for reg in (0.1, 1.0, 50.0):
        for count in (1, 2, 50):
            records = make_records(
                squared, torch.ones(count, 1, dtype=torch.float64), torch.ones(count)
            )
            w = solve(build_objective(squared, reg, records), 1e-9).w
            assert float(w.norm()) <= squared.minimizer_radius(reg)
    assert squared.minimizer_radius(50.0) < 1.5 * float(w.norm()) * math.sqrt(
        2
    )  # attained up to a factor
    assert task(loss=dp.losses.Squared(), bound_y=1.0, n=2, n_max=50).minimizer_radius(
        1.0
    ) < math.sqrt(2.01)


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        ({"dim": 0}, "dim"),
        ({"n": 0}, "n"),
        ({"n_max": 3}, "n_max"),
        ({"reg": 0.0}, "reg"),
        ({"reg": math.inf}, "reg"),
        ({"radius": -1.0}, "radius"),
        ({"bound_y": 1.0}, "bound_y"),
        ({"loss": dp.losses.Huber()}, "bound_y"),
        ({"tilt": math.inf}, "tilt"),
        ({"attack_radius": -1.0}, "attack_radius"),
        ({"attack_norm": 1.0}, "attack_norm"),
        ({"attack_scale": (1.0, -1.0)}, "attack_scale"),
        ({"attack_scale": (1.0, math.inf)}, "attack_scale"),
        ({"attack_scale": (1.0, 1e160)}, "attack_scale must be in"),
        ({"attack_scale": (1.0, 1.0, 1.0)}, "attack_scale must have 2 numbers"),
        ({"preparation": Preparation(1.0, center=(0.0,))}, "center"),
        ({"preparation": Preparation(1.0, scale=(1.0, 1.0, 1.0))}, "scale"),
    ],
)
def test_a_number_out_of_range_is_named(wrong: dict[str, object], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        task(**wrong)


def test_settings_that_do_not_go_together_are_refused() -> None:
    for pair in ({"tilt": 1.0, "residual_clip": 0.5}, {"tilt": 1.0, "attack_radius": 1.0}):
        with pytest.raises(ConditionError, match="combined"):
            task(**pair)
    with pytest.raises(ConditionError):
        task(loss=dp.losses.Hinge(), residual_clip=0.5)
    with pytest.raises(ConditionError):
        task(loss=dp.losses.SoftmaxCrossEntropy(3), residual_clip=0.5)


@pytest.mark.parametrize(("norm", "reach"), [(2.0, 0.8), (math.inf, 0.4 * math.sqrt(5.0))])
def test_attacks_of_features_move_rows_as_far_as_planned_and_leave_the_constant(
    norm: float, reach: float
) -> None:
    attacked = task(
        preparation=Preparation(1.0, intercept=1.0),
        attack_radius=0.4,
        attack_norm=norm,
        attack_scale=(2.0, 1.0),
    )
    assert reach <= attacked.attack_reach <= reach * (1 + 1e-12)
    records = make_records(attacked, torch.ones(4, 2, dtype=torch.float64), torch.ones(4))
    objective = build_objective(attacked, 1.0, records)
    values = [
        objective.value(torch.tensor([0.0, 0.0, bias], dtype=torch.float64))
        for bias in (1.0, -1.0)
    ]
    # at w = 0 but for the constant, a margin of b or -b is left but for what smoothing takes
    offset = 0.4 * 1e-3 * (1 if norm == 2 else 3)
    for bias, value in zip((1.0, -1.0), values, strict=True):
        exact = 4 * math.log1p(math.exp(-bias + offset)) + 0.5
        assert value == pytest.approx(exact, rel=1e-12)


# -- choice of a mechanism --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "gaussian", "pure"),
    [
        ({"loss": dp.losses.Squared(), "bound_y": 1.0}, "boosted_adassp", "output"),
        (
            {"loss": dp.losses.Squared(), "bound_y": 1.0, "residual_clip": 0.5},
            "noisy_gd",
            "objective",
        ),
        ({}, "noisy_gd", "objective"),
        ({"n": 10_000}, "objective", "objective"),
        ({"reg": 1e-3}, "objective", "output"),
        ({"loss": dp.losses.SoftmaxCrossEntropy(3)}, "preconditioned_gd", "output"),
        ({"loss": dp.losses.SoftmaxCrossEntropy(3), "reg": 9.0}, "objective", "output"),
        ({"loss": dp.losses.Hinge()}, "output", "output"),
        ({"tilt": 1.0}, "output", "output"),
        ({"attack_radius": 1.0}, "output", "output"),
    ],
)
def test_the_mechanism_is_chosen_by_public_facts(
    settings: dict[str, object], gaussian: str, pure: str
) -> None:
    assert choose_mechanism(task(**settings)) == gaussian
    assert choose_mechanism(task(**(settings | {"budget": dp.Budget(1.0, 0.0)}))) == pure


def test_exact_noise_leaves_the_mechanisms_that_have_it() -> None:
    classes = task(loss=dp.losses.SoftmaxCrossEntropy(3))
    assert choose_mechanism(classes, "exact") == "output"
    assert choose_mechanism(task(), "exact") == "output"


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(
    ("settings", "word"),
    [({"loss": dp.losses.SoftmaxCrossEntropy(3)}, "for classes"), ({}, "is so small")],
)
def test_a_plan_says_why_its_mechanism_was_chosen_and_nothing_where_it_was_asked_for(
    settings: dict[str, object], word: str
) -> None:
    given = task(**settings)
    chosen, asked = plan_linear(given), plan_linear(given, choose_mechanism(given))
    assert chosen == asked
    assert word in dict(chosen.lines())["chosen"]
    assert "chosen" not in dict(asked.lines())
    assert "chosen" not in dict(plan_linear(task(n=10_000)).lines())  # nothing was ranked


@pytest.mark.slow
def test_a_ledger_of_another_adjacency_is_refused() -> None:
    add_remove = task(budget=dp.Budget(1.0, 1e-6, adjacency="add_remove"))
    for mechanism in ("output", "objective", "noisy_gd", "preconditioned_gd"):
        ledger = dp.Accountant(adjacency="replace_one")
        with pytest.raises(AdjacencyError):
            fit_linear(
                plan_linear(add_remove, mechanism),
                torch.ones(4, 2),
                torch.ones(4),
                accountant=ledger,
            )
        assert len(ledger) == 0


def test_a_ledger_of_users_is_refused() -> None:
    ledger = dp.Accountant(unit="user")
    with pytest.raises(UnitError):
        fit_linear(plan_linear(task()), torch.ones(4, 2), torch.ones(4), accountant=ledger)


def test_more_records_than_promised_are_refused() -> None:
    private = task(n=5, n_max=6, budget=dp.Budget(1.0, 1e-6, adjacency="add_remove"))
    assert make_records(private, torch.ones(6, 2), torch.ones(6)).count == 6
    with pytest.raises(UnitError, match="n_max=6 must be a public cap"):
        make_records(private, torch.ones(7, 2), torch.ones(7))
