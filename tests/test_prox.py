from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from torch import Tensor

from torch_dpsco.prox import (
    L1,
    L2,
    Ball,
    Box,
    ElasticNet,
    Identity,
    Prox,
    Simplex,
)

ALL = [Identity(), Ball(0.7), Box(-0.5, 0.25), L1(0.3), ElasticNet(0.3, 0.5)]
PROJECTIONS = [Ball(0.7), Box(-0.5, 0.25)]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
vectors = st.lists(st.floats(-3, 3), min_size=5, max_size=5)


def image(
    prox: Prox, values: Sequence[float], step: float = 0.4, dtype: torch.dtype = torch.float64
) -> Tensor:
    point = torch.tensor(values, dtype=dtype)
    parts = [point[:2], point[2:]]  # views, so that `point` sees the change
    prox.apply_(parts, [step, step])
    return point


def penalty(prox: Prox, u: Tensor) -> float:
    """Returns the penalty of a feasible point, as the textbook has it."""
    if isinstance(prox, L1):
        return prox.strength * float(u.abs().sum())
    if isinstance(prox, ElasticNet):
        return prox.l1 * float(u.abs().sum()) + prox.l2 / 2 * float(u.square().sum())
    if isinstance(prox, L2):
        return prox.strength * float(
            u.norm(dim=1).sum() if prox.groups == "per_row" else u.norm()
        )
    return 0.0


def norm64(tensors: Sequence[Tensor]) -> float:
    return float(
        np.linalg.norm(np.concatenate([tensor.double().numpy().ravel() for tensor in tensors]))
    )


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("prox", ALL)
@settings(derandomize=True, max_examples=50)
@given(first=vectors, second=vectors)
def test_every_map_is_firmly_nonexpansive(
    prox: Prox, first: list[float], second: list[float]
) -> None:
    before = torch.tensor(first, dtype=torch.float64) - torch.tensor(second, dtype=torch.float64)
    after = image(prox, first) - image(prox, second)
    assert after @ after <= after @ before + 1e-12


@pytest.mark.cases(2, 1)
@pytest.mark.parametrize("prox", PROJECTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@settings(derandomize=True, max_examples=50)
@given(values=vectors)
def test_projections_are_exactly_idempotent(
    prox: Prox, dtype: torch.dtype, values: list[float]
) -> None:
    once = image(prox, values, dtype=dtype)
    assert torch.equal(image(prox, once.tolist(), dtype=dtype), once)


def objective(prox: Prox, values: list[float], step: float) -> Callable[[np.ndarray], float]:
    def at(u: np.ndarray) -> float:
        return 0.5 * float(np.sum((u - values) ** 2)) + step * penalty(prox, torch.tensor(u))

    return at


@pytest.mark.cases(2, 1)
@pytest.mark.parametrize(
    ("prox", "constraint"),
    [
        (Identity(), None),
        (L1(0.3), None),
        (ElasticNet(0.3, 0.5), None),
        (ElasticNet(0.0, 2.0), None),
        (Box(-0.5, 0.25), {"bounds": [(-0.5, 0.25)] * 5}),
        (
            Ball(0.7),
            {
                "constraints": {
                    "type": "ineq",
                    "fun": lambda u: 0.49 - u @ u,
                    "jac": lambda u: -2 * u,
                }
            },
        ),
    ],
)
def test_the_image_minimizes_the_proximal_objective(
    prox: Prox, constraint: dict[str, object] | None
) -> None:
    rng = np.random.default_rng(0)
    for _ in range(5):
        values, step = (2 * rng.standard_normal(5)).tolist(), float(rng.uniform(0.1, 2))
        ours = image(prox, values, step).numpy()
        value = objective(prox, values, step)
        method = (
            {"method": "SLSQP", "tol": 1e-12, **constraint}
            if constraint
            else {"method": "Powell", "tol": 1e-9}
        )
        theirs = minimize(value, np.zeros(5), **method)
        assert value(ours) <= theirs.fun + 1e-6  # SLSQP may leave the ball a little
        np.testing.assert_allclose(ours, theirs.x, atol=2e-4)


def test_the_ball_takes_one_norm_over_all_tensors_and_keeps_the_direction() -> None:
    matrix, bias = torch.full((2, 2), 3.0), torch.tensor([8.0])
    Ball(2.0).apply_([matrix, bias], [1.0, 1.0])
    torch.testing.assert_close(matrix, torch.full((2, 2), 0.6))
    torch.testing.assert_close(bias, torch.tensor([1.6]))


@pytest.mark.cases(6, 3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("radius", [0.1, 1.0, 7.3, 1e-3])
def test_the_ball_is_never_left_by_rounding_and_hardly_shrunk(
    dtype: torch.dtype, radius: float
) -> None:
    generator, info = torch.Generator(), torch.finfo(dtype)
    for dim in (1, 2, 10, 1000):
        for _ in range(20):
            parts = list(torch.randn(dim + 1, generator=generator).mul(3).to(dtype).split(dim))
            expected = min(norm64(parts), radius)
            Ball(radius).apply_(parts, [0.1] * len(parts))
            assert norm64(parts) <= radius * (1 + 1e-15)
            underflow = math.sqrt(dim + 1) * info.tiny * info.eps
            assert norm64(parts) >= expected * (1 - 2 * info.eps) - 2 * underflow


@pytest.mark.parametrize("dtype", DTYPES)
def test_points_of_the_ball_come_back_bit_for_bit(dtype: torch.dtype) -> None:
    for values in ([3.0, 4.0, 0, 0, 0], [0.0] * 5, [1e-3, -2e-3, 0, 0, 1]):
        assert torch.equal(
            image(Ball(5.0), values, dtype=dtype), torch.tensor(values, dtype=dtype)
        )


def test_points_hardly_outside_of_the_ball_are_projected_too() -> None:
    point = torch.tensor([3.0, 4.0], dtype=torch.float64) * (1 + 1e-12)
    Ball(5.0).apply_([point], [1.0])
    assert norm64([point]) <= 5.0


def test_a_ball_too_small_for_the_dtype_holds_only_zero() -> None:
    point = torch.tensor([1.0, -1.0])
    Ball(1e-46).apply_([point], [1.0])
    assert not point.any()


def test_the_ball_accepts_mixed_dtypes_empty_tensors_and_no_tensors() -> None:
    parts = [
        torch.ones(3, dtype=torch.float64),
        torch.ones(3, dtype=torch.bfloat16),
        torch.ones(0),
    ]
    Ball(1.0).apply_(parts, [1.0] * 3)
    assert norm64(parts) == pytest.approx(1, rel=2**-7)
    Ball(1.0).apply_([], [])


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("prox", PROJECTIONS)
def test_projections_refuse_a_diverged_iterate_and_leave_it_alone(
    prox: Prox, bad: float
) -> None:
    parts = [torch.tensor([9.0]), torch.tensor([bad, 1.0])]
    with pytest.raises(ValueError, match="learning rate"):
        prox.apply_(parts, [1.0, 1.0])
    assert parts[0].item() == 9.0


def test_penalties_pass_a_diverged_iterate_on() -> None:
    point = torch.tensor([math.nan, math.inf, 1.0])
    L1(0.5).apply_([point], [1.0])
    assert point[0].isnan()
    assert point[1:].tolist() == [math.inf, 0.5]


@pytest.mark.parametrize("prox", ALL)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_is_kept_and_close_to_float64(prox: Prox, dtype: torch.dtype) -> None:
    values = [1.5, -0.75, 0.125, 0.0, -2.0]
    result = image(prox, values, dtype=dtype)
    assert result.dtype == dtype
    torch.testing.assert_close(
        result.double(), image(prox, values), rtol=0, atol=4 * torch.finfo(dtype).eps
    )


@pytest.mark.parametrize("prox", ALL)
def test_parameters_change_in_place_and_outside_of_autograd(prox: Prox) -> None:
    layer = torch.nn.Linear(4, 2)
    weights = list(layer.parameters())
    before = [weight.data_ptr() for weight in weights]
    prox.apply_(weights, [0.1, 0.2])
    assert [weight.data_ptr() for weight in weights] == before
    assert all(weight.requires_grad and weight.grad_fn is None for weight in weights)


def test_each_tensor_is_thresholded_with_its_own_step() -> None:
    first, second = torch.tensor([2.0]), torch.tensor([2.0])
    ElasticNet(1.0, 1.0).apply_([first, second], [0.0, 1.0])
    assert first.item() == 2.0
    assert second.item() == 0.5


@pytest.mark.parametrize("prox", ALL)
def test_steps_are_one_per_tensor_finite_and_not_negative(prox: Prox) -> None:
    with pytest.raises(ValueError, match="one step per tensor"):
        prox.apply_([torch.ones(2)], [])
    for step in (-1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="step must be"):
            prox.apply_([torch.ones(2)], [step])


def test_radius_is_that_of_the_ball_and_infinite_elsewhere() -> None:
    assert [prox.radius for prox in ALL] == [math.inf, 0.7, math.inf, math.inf, math.inf]


def test_zero_is_feasible_everywhere_but_in_a_box_beside_it() -> None:
    assert all(
        prox.contains_zero for prox in [*ALL, Box(0.0, 1.0), Box(-math.inf, 0.0), Ball(1e-300)]
    )
    assert not Box(0.5, 1.0).contains_zero
    assert not Box(-1.0, -1e-300).contains_zero


@pytest.mark.parametrize("prox", ALL)
def test_maps_are_values_that_pickle_copy_and_compare(prox: Prox) -> None:
    assert len({prox, copy.deepcopy(prox), pickle.loads(pickle.dumps(prox))}) == 1


@pytest.mark.parametrize("radius", [0.0, -1.0, math.inf, math.nan])
def test_a_ball_needs_a_positive_finite_radius(radius: float) -> None:
    with pytest.raises(ValueError, match="radius must be"):
        Ball(radius)


@pytest.mark.parametrize(
    ("low", "high"),
    [(1.0, 0.0), (math.nan, 1.0), (0.0, math.nan), (math.inf, math.inf), (-math.inf, -math.inf)],
)
def test_a_box_needs_ordered_bounds(low: float, high: float) -> None:
    with pytest.raises(ValueError, match="low must be <= high"):
        Box(low, high)


def test_penalties_need_finite_strengths_that_are_not_negative() -> None:
    for strength in (-0.1, math.inf, math.nan):
        for build in (
            lambda s: L1(s),
            lambda s: ElasticNet(s, 1.0),
            lambda s: ElasticNet(1.0, s),
        ):
            with pytest.raises(ValueError, match="must be"):
                build(strength)


# -- the simplex ------------------------------------------------------------------------------------------------------


@settings(derandomize=True, max_examples=100)
@given(values=vectors, total=st.floats(0.01, 100))
def test_the_simplex_meets_the_optimality_conditions(values: list[float], total: float) -> None:
    """u = max(v - s, 0) with sum u = total is the only solution of the KKT conditions."""
    u, v = image(Simplex(total), values).numpy(), np.array(values)
    assert (u >= 0).all()
    assert u.sum() == pytest.approx(total, rel=1e-12)
    shifts = (v - u)[u > 0]
    assert np.ptp(shifts) < 1e-9 * max(1.0, total)
    assert (v[u == 0] <= shifts.max() + 1e-9 * max(1.0, total)).all()


@settings(derandomize=True, max_examples=50)
@given(values=vectors)
def test_no_corner_or_random_point_of_the_simplex_is_nearer(values: list[float]) -> None:
    ours, v = image(Simplex(2.0), values).numpy(), np.array(values)
    others = np.concatenate(
        [2 * np.eye(5), 2 * np.random.default_rng(0).dirichlet(np.full(5, 0.5), 300)]
    )
    assert ((v - ours) ** 2).sum() <= ((others - v) ** 2).sum(1).min() + 1e-12
    assert (((others - ours) @ (v - ours)) <= 1e-9).all()  # the obtuse angle of projections


@pytest.mark.cases(2, 1)
@pytest.mark.parametrize("dtype", DTYPES)
@settings(derandomize=True, max_examples=30)
@given(values=vectors)
def test_the_simplex_is_idempotent_up_to_rounding(
    dtype: torch.dtype, values: list[float]
) -> None:
    once = image(Simplex(1.0), values, dtype=dtype)
    twice = image(Simplex(1.0), once.tolist(), dtype=dtype)
    torch.testing.assert_close(twice, once, rtol=0, atol=2 * torch.finfo(dtype).eps)
    assert norm64([once]) <= Simplex(1.0).radius


@pytest.mark.parametrize("scale", [1.0, 1e9, 1e16, 1e20, 1e37])
@pytest.mark.parametrize("values", [[1.0, 0.0], [-1.0, -2.0], [1.0, 1.0], [3.0, 3.0, 1.0]])
def test_the_simplex_survives_huge_iterates(scale: float, values: list[float]) -> None:
    point = torch.tensor(values) * scale
    Simplex(1.0).apply_([point], [0.1])
    assert float(point.double().sum()) == pytest.approx(1.0, rel=1e-6)
    highest = [v == max(values) for v in values]
    assert (point > 0).tolist() == highest


def test_the_simplex_is_one_over_all_tensors_and_accepts_none() -> None:
    parts = [torch.tensor([[3.0, 0.0]]), torch.tensor([3.0]), torch.ones(0)]
    Simplex(2.0).apply_(parts, [1.0] * 3)
    assert parts[0].tolist() == [[1.0, 0.0]]
    assert parts[1].tolist() == [1.0]
    Simplex(2.0).apply_([], [])
    assert not Simplex(1.0).contains_zero


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_the_simplex_refuses_a_diverged_iterate(bad: float) -> None:
    parts = [torch.tensor([9.0]), torch.tensor([bad])]
    with pytest.raises(ValueError, match="learning rate"):
        Simplex(1.0).apply_(parts, [1.0, 1.0])
    assert parts[0].item() == 9.0


# -- group and matrix penalties ---------------------------------------------------------------------------------------


def blocks(groups: str) -> list[list[int]]:
    """Returns the groups of a (2, 2) matrix and a vector of 3, by places in the joint vector."""
    return {
        "global": [[0, 1, 2, 3, 4, 5, 6]],
        "per_tensor": [[0, 1, 2, 3], [4, 5, 6]],
        "per_row": [[0, 1], [2, 3], [4], [5], [6]],
    }[groups]


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("groups", ["global", "per_tensor", "per_row"])
@settings(derandomize=True, max_examples=50)
@given(
    values=st.lists(st.floats(-3, 3), min_size=7, max_size=7),
    step=st.floats(0, 4),
    strength=st.floats(0, 2),
)
def test_group_thresholds_meet_the_optimality_conditions(
    groups: str, values: list[float], step: float, strength: float
) -> None:
    v = torch.tensor(values, dtype=torch.float64)
    u = v.clone()
    L2(strength, groups).apply_([u[:4].view(2, 2), u[4:]], [step, step])
    t = step * strength
    for block in blocks(groups):
        move, norm = v[block] - u[block], float(u[block].norm())
        if norm > 0:  # v - u is t times the unit vector of u
            torch.testing.assert_close(move, t * u[block] / norm, rtol=0, atol=1e-9)
        else:  # and in the ball of t otherwise
            assert float(v[block].norm()) <= t + 1e-12


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("prox", [L2(0.3), L2(0.3, "per_row"), L2(0.3, "per_tensor")])
def test_group_penalties_minimize_their_objective(prox: Prox) -> None:
    rng = np.random.default_rng(0)
    for _ in range(4):
        v, step = 2 * rng.standard_normal((2, 3)), float(rng.uniform(0.1, 2))
        point = torch.tensor(v)
        prox.apply_([point], [step])

        def value(u: np.ndarray, v: np.ndarray = v, step: float = step) -> float:
            return 0.5 * float(np.sum((u - v.ravel()) ** 2)) + step * penalty(
                prox, torch.tensor(u).view(2, 3)
            )

        theirs = minimize(
            value, v.ravel(), method="Powell", options={"xtol": 1e-9, "ftol": 1e-12}
        )
        assert value(point.numpy().ravel()) <= theirs.fun + 1e-9
        for _ in range(200):
            assert value(point.numpy().ravel()) <= value(
                point.numpy().ravel() + 0.05 * rng.standard_normal(6)
            )


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize(
    "prox", [L2(0.3), L2(0.3, "per_row"), L2(0.3, "per_tensor"), Simplex(2.0)]
)
@settings(derandomize=True, max_examples=30)
@given(data=st.data())
def test_every_new_map_is_firmly_nonexpansive_and_keeps_dtypes(
    prox: Prox, data: st.DataObject
) -> None:
    grid = st.lists(st.floats(-3, 3), min_size=6, max_size=6)
    first, second = (
        torch.tensor(data.draw(grid), dtype=torch.float64).view(2, 3) for _ in range(2)
    )
    images = [first.clone(), second.clone()]
    for point in images:
        prox.apply_([point], [0.4])
    before, after = first - second, images[0] - images[1]
    assert float((after * after).sum()) <= float((after * before).sum()) + 1e-12
    for dtype in DTYPES:
        point = first.to(dtype, copy=True)
        prox.apply_([point], [0.4])
        assert point.dtype == dtype
        torch.testing.assert_close(
            point.double(), images[0], rtol=0, atol=16 * torch.finfo(dtype).eps
        )


def test_a_step_of_zero_leaves_a_penalized_point_as_it_is() -> None:
    for prox in (L2(2.0), L2(2.0, "per_row"), L1(2.0)):
        for values in ([[1.0, -2.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, 0.0]]):
            point = torch.tensor(values)
            prox.apply_([point], [0.0])
            torch.testing.assert_close(point, torch.tensor(values))


@pytest.mark.parametrize("prox", [L2(0.5), L2(0.5, "per_tensor"), L2(0.5, "per_row")])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_diverged_iterate_is_passed_on_or_refused_by_name_and_never_made_finite(
    prox: Prox, bad: float
) -> None:
    point = torch.tensor([[bad, 1.0], [2.0, 3.0]])
    try:
        prox.apply_([point], [1.0])
    except ValueError as error:
        assert "learning rate" in str(error)  # noqa: PT017
        return
    assert not point.isfinite().all()


def test_one_group_with_several_step_sizes_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="lr must be the same"):
        L2(1.0).apply_([torch.ones(2), torch.ones(2)], [0.1, 0.2])
    for groups in ("per_tensor", "per_row"):
        L2(1.0, groups).apply_([torch.ones(2), torch.ones(2)], [0.1, 0.2])


@pytest.mark.parametrize("bad", [-0.1, math.inf, math.nan])
def test_new_maps_need_finite_numbers(bad: float) -> None:
    for build in (Simplex, L2):
        with pytest.raises(ValueError, match="must be"):
            build(bad)
    with pytest.raises(ValueError, match="total must be > 0"):
        Simplex(0.0)
    with pytest.raises(ValueError, match="groups must be"):
        L2(1.0, "rows")
