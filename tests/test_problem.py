from __future__ import annotations

import copy
import dataclasses
import math
import pickle
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import torch_dpsco as dp
from tests.reference.papers.holder import paper_grad_bound
from torch_dpsco.errors import MissingConstantError
from torch_dpsco.problem import Problem, round_up

NUMERIC = [
    field.name
    for field in dataclasses.fields(Problem)
    if field.name not in ("is_glm", "exact_grad_bound")
]
PARTNER = {
    "holder_exponent": {"holder_constant": 1.0},
    "holder_constant": {"holder_exponent": 0.5},
    "moment_order": {"moment": 1.0},
    "moment": {"moment_order": 2.0},
}
sizes = st.floats(1e-6, 1e6)
radii = st.floats(0.0, 1e9)


@dataclasses.dataclass(frozen=True)
class Line:
    slope: float

    def __call__(self, radius: float) -> float:
        return 1 + self.slope * radius


def promise(**constants: float) -> Problem:
    name = next(iter(constants))
    return Problem(**PARTNER.get(name, {}), **constants)


@pytest.mark.parametrize("name", NUMERIC)
@pytest.mark.parametrize("value", [math.nan, -math.inf, -1.0, "one", True])
def test_every_constant_refuses_a_value_that_cannot_be_one(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name):
        promise(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [name for name in NUMERIC if name != "radius"])
def test_every_constant_but_the_radius_refuses_infinity(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        promise(**{name: math.inf})
    assert Problem(radius=math.inf).radius == math.inf


@pytest.mark.parametrize(
    ("name", "edge"),
    [
        ("holder_exponent", 1.0 + 1e-12),
        ("holder_constant", 0.0),
        ("lipschitz", 0.0),
        ("gradient_diameter", 0.0),
        ("strong_convexity", 0.0),
        ("pl_constant", 0.0),
        ("moment_order", 1.0),
        ("moment", 0.0),
        ("second_moment", 0.0),
        ("radius", 0.0),
    ],
)
def test_open_ends_of_the_ranges_are_refused(name: str, edge: float) -> None:
    with pytest.raises(ValueError, match=name):
        promise(**{name: edge})


def test_closed_ends_of_the_ranges_are_accepted() -> None:
    for exponent in (0, 1):
        assert Problem(holder_exponent=exponent, holder_constant=1).holder_exponent == exponent
    assert Problem(grad_at_zero=0, loss_at_zero=0, smoothness=0).smoothness == 0


@pytest.mark.parametrize("name", list(PARTNER))
def test_half_of_a_pair_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="given together"):
        Problem(**{name: 1.0 if name != "moment_order" else 2.0})


def test_radius_none_a_glm_flag_that_is_no_bool_and_a_bound_that_is_no_function_are_refused() -> (
    None
):
    with pytest.raises(ValueError, match="radius must be a number"):
        Problem(radius=None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="is_glm must be True or False"):
        Problem(is_glm=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="exact_grad_bound must be a function"):
        Problem(exact_grad_bound=2.0)  # type: ignore[arg-type]


def test_promises_are_stored_as_plain_floats_and_given_by_keyword() -> None:
    problem = Problem(lipschitz=np.float32(2), radius=np.int64(3))  # type: ignore[arg-type]
    assert type(problem.lipschitz) is float
    assert type(problem.radius) is float
    with pytest.raises(TypeError):
        Problem(0.5, 1.0)  # type: ignore[misc]


def test_a_problem_is_a_value_that_freezes_compares_hashes_copies_and_pickles() -> None:
    problem = Problem(lipschitz=1, radius=2, exact_grad_bound=Line(0.5))
    assert problem == Problem(lipschitz=1, radius=2, exact_grad_bound=Line(0.5))
    assert problem != Problem(lipschitz=1, radius=2, exact_grad_bound=Line(0.25))
    assert len({problem, copy.deepcopy(problem), pickle.loads(pickle.dumps(problem))}) == 1
    assert dataclasses.replace(problem, radius=1).radius == 1
    assert "exact_grad_bound" not in repr(problem)
    with pytest.raises(dataclasses.FrozenInstanceError):
        problem.lipschitz = 0.1  # type: ignore[misc]


def test_grad_bound_is_the_least_promised_bound() -> None:
    holder = {"holder_exponent": 0.5, "holder_constant": 2.0, "grad_at_zero": 1.0}
    exact = {"exact_grad_bound": Line(0.25)}
    assert Problem(**holder).grad_bound(9) == pytest.approx(7)
    assert Problem(**holder, **exact).grad_bound(9) == pytest.approx(3.25)
    assert Problem(**holder, **exact).grad_bound(900) == pytest.approx(61)
    assert Problem(**holder, **exact, lipschitz=3).grad_bound(9) == 3
    assert Problem(**holder, **exact, lipschitz=3, radius=4).grad_bound() == pytest.approx(2)


def test_a_lipschitz_constant_is_not_used_beyond_the_radius_it_was_promised_for() -> None:
    problem = Problem(lipschitz=1.0, radius=5.0)
    assert problem.grad_bound() == problem.grad_bound(5) == 1
    with pytest.raises(MissingConstantError, match="valid up to its radius"):
        problem.grad_bound(math.nextafter(5, 6))


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0])
def test_beyond_its_radius_a_lipschitz_constant_holds_up_to_what_the_gradient_can_change(
    exponent: float,
) -> None:
    # Rounding asks a little beyond the radius: without this the bound there would be M + L R^a, many times larger.
    problem = Problem(
        holder_exponent=exponent,
        holder_constant=100.0,
        grad_at_zero=1.0,
        lipschitz=1.0,
        radius=2.0,
    )
    for beyond in (1e-12, 0.25):
        expected = min(
            1 + 100.0 * ((2.0 + beyond) - 2.0) ** exponent,
            1 + 100.0 * (2.0 + beyond) ** exponent,
        )
        assert problem.grad_bound(2.0 + beyond) == pytest.approx(expected, rel=1e-12)
    if exponent == 1:
        assert problem.grad_bound(2.0 * (1 + 1e-14)) < 1 + 1e-9


def test_at_exponent_zero_the_jump_bounds_the_gradient_of_a_nonnegative_loss_only() -> None:
    jump = {"holder_exponent": 0, "holder_constant": 2.0, "grad_at_zero": 1.5}
    assert Problem(**jump).grad_bound() == pytest.approx(3.5)
    assert Problem(**jump, loss_at_zero=1).grad_bound() == 2.0
    assert Problem(**{**jump, "holder_exponent": 1e-9}, loss_at_zero=1).grad_bound(
        1
    ) == pytest.approx(3.5)
    # l(w) = 10 + 8 w is not nonnegative: its gradient 8 exceeds its jump, which may be any L > 0.
    assert Problem(holder_exponent=0, holder_constant=0.1, grad_at_zero=8).grad_bound() >= 8


def test_at_radius_zero_the_gradient_at_zero_is_the_bound() -> None:
    assert Problem(holder_exponent=0, holder_constant=2, grad_at_zero=1).grad_bound(0) == 1
    assert Problem(grad_at_zero=1).grad_bound(0) == 1
    with pytest.raises(MissingConstantError):
        Problem(grad_at_zero=1).grad_bound(1e-300)


def test_an_infinite_radius_is_allowed_exactly_when_the_bound_stays_finite() -> None:
    assert Problem(lipschitz=2).grad_bound() == 2
    assert Problem(exact_grad_bound=Line(0.0)).grad_bound(0.0) == pytest.approx(1)
    assert Problem(
        holder_exponent=0, holder_constant=2, grad_at_zero=1
    ).grad_bound() == pytest.approx(3)
    for unbounded in (
        Problem(),
        Problem(holder_exponent=0.5, holder_constant=1, grad_at_zero=1),
    ):
        with pytest.raises(
            MissingConstantError, match=r"lipschitz.*exact_grad_bound.*holder_exponent"
        ):
            unbounded.grad_bound()


@pytest.mark.parametrize("radius", [-1.0, math.nan])
def test_a_radius_that_is_negative_or_nan_is_refused(radius: float) -> None:
    problem = Problem(holder_exponent=0, holder_constant=1, grad_at_zero=1)
    with pytest.raises(ValueError, match="radius must be >= 0"):
        problem.grad_bound(radius)
    with pytest.raises(ValueError, match="radius must be >= 0"):
        paper_grad_bound(problem, radius)


@pytest.mark.parametrize("slope", [math.nan, -5.0])
def test_an_exact_bound_that_returns_no_norm_is_refused(slope: float) -> None:
    with pytest.raises(ValueError, match="exact_grad_bound must be >= 0"):
        Problem(exact_grad_bound=Line(slope), lipschitz=1).grad_bound(1)


@pytest.mark.slow
@settings(derandomize=True, max_examples=300)
@given(
    exponent=st.floats(0, 1),
    constant=sizes,
    at_zero=sizes,
    slope=sizes,
    lipschitz=sizes,
    pair=st.tuples(radii, radii),
)
def test_grad_bound_never_decreases_with_the_radius(
    exponent: float,
    constant: float,
    at_zero: float,
    slope: float,
    lipschitz: float,
    pair: tuple[float, float],
) -> None:
    problem = Problem(
        holder_exponent=exponent,
        holder_constant=constant,
        grad_at_zero=at_zero,
        loss_at_zero=1,
        exact_grad_bound=Line(slope),
        lipschitz=lipschitz,
        radius=1e3,
    )
    low, high = sorted(pair)
    assert problem.grad_bound(0) <= problem.grad_bound(low) <= problem.grad_bound(high)
    assert problem.grad_bound(low) <= problem.grad_bound(math.nextafter(low, math.inf))


@pytest.mark.slow
@settings(derandomize=True, max_examples=300)
@given(constant=sizes, at_zero=sizes, root=st.floats(1e-3, 1e4))
def test_computed_bounds_are_rounded_up(constant: float, at_zero: float, root: float) -> None:
    smooth = Problem(holder_exponent=1, holder_constant=constant, grad_at_zero=at_zero)
    exact = Fraction(at_zero) + Fraction(constant) * Fraction(root)
    assert exact <= Fraction(smooth.grad_bound(root)) <= exact * (1 + Fraction(1, 10**14))
    assert Fraction(paper_grad_bound(smooth, root)) >= exact
    half = Problem(holder_exponent=0.5, holder_constant=constant, grad_at_zero=at_zero)
    # G^2 >= (M + L sqrt(r))^2, compared without a root: (G - M)^2 >= L^2 r.
    excess = Fraction(half.grad_bound(root)) - Fraction(at_zero)
    assert excess > 0
    assert excess**2 >= Fraction(constant) ** 2 * Fraction(root)


def test_a_promised_number_is_returned_as_it_is() -> None:
    assert Problem(lipschitz=0.1).grad_bound() == 0.1
    assert round_up(0.0) == 0.0


def test_the_paper_bound_is_its_formula_and_never_below_the_tight_one() -> None:
    problem = Problem(
        holder_exponent=0,
        holder_constant=2,
        grad_at_zero=1,
        loss_at_zero=1,
        radius=3,
        lipschitz=1,
    )
    assert paper_grad_bound(problem) == pytest.approx(3)
    assert paper_grad_bound(problem, 0) == pytest.approx(3)
    assert paper_grad_bound(problem) >= problem.grad_bound()
    root = Problem(holder_exponent=0.5, holder_constant=2, grad_at_zero=1)
    assert paper_grad_bound(root, 16) == pytest.approx(9)


def test_the_paper_bound_needs_its_three_constants_and_a_finite_radius() -> None:
    with pytest.raises(MissingConstantError, match="needs grad_at_zero"):
        paper_grad_bound(Problem(holder_exponent=0.5, holder_constant=1, lipschitz=1), 1)
    with pytest.raises(MissingConstantError, match="finite radius"):
        paper_grad_bound(Problem(holder_exponent=0.5, holder_constant=1, grad_at_zero=1))


def test_require_returns_the_constants_in_the_order_asked_for() -> None:
    problem = Problem(smoothness=0, lipschitz=1, radius=2)
    assert problem.require("radius", "smoothness", by="X") == (2.0, 0.0)
    assert problem.require(by="X") == ()


def test_require_names_what_is_missing_who_asked_and_where_to_get_it() -> None:
    with pytest.raises(
        MissingConstantError,
        match=r"^HolderSGD needs smoothness, radius: .*smoothness=\.\.\..*losses",
    ):
        Problem(lipschitz=1).require("lipschitz", "smoothness", "radius", by="HolderSGD")


@pytest.mark.parametrize("name", ["is_glm", "exact_grad_bound", "grad_bound", "smothness"])
def test_require_refuses_a_name_that_is_no_number_of_the_problem(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        Problem().require(name, by="X")


def test_a_plan_without_promises_is_told_that_a_clip_and_a_step_size_are_enough() -> None:
    known = {"n": 200, "budget": dp.Budget(1.0, 1e-5)}
    with pytest.raises(
        MissingConstantError, match=r"takes clip= and lr= needs no promise"
    ) as told:
        dp.ClippedSGD.plan(**known, batch_size=20)
    assert "dp.NetSGD.plan(n=, budget=, dim=model)" in str(told.value)
    assert dp.ClippedSGD.plan(**known, batch_size=20, clip=1.0, lr=0.1).clip == 1.0
