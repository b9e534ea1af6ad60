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

from torch_dpsco.prox import L1, Ball, Box, ElasticNet, Identity, Prox

ALL = [Identity(), Ball(0.7), Box(-0.5, 0.25), L1(0.3), ElasticNet(0.3, 0.5)]
PROJECTIONS = [Ball(0.7), Box(-0.5, 0.25)]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
vectors = st.lists(st.floats(-3, 3), min_size=5, max_size=5)


def image(prox: Prox, values: Sequence[float], step: float = 0.4, dtype: torch.dtype = torch.float64) -> Tensor:
    point = torch.tensor(values, dtype=dtype)
    parts = [point[:2], point[2:]]  # views, so that `point` sees the change
    prox.apply_(parts, [step, step])
    return point


def norm64(tensors: Sequence[Tensor]) -> float:
    return float(np.linalg.norm(np.concatenate([tensor.double().numpy().ravel() for tensor in tensors])))


@pytest.mark.parametrize("prox", ALL)
@settings(derandomize=True, max_examples=50)
@given(first=vectors, second=vectors)
def test_every_map_is_firmly_nonexpansive(prox: Prox, first: list[float], second: list[float]) -> None:
    before = torch.tensor(first, dtype=torch.float64) - torch.tensor(second, dtype=torch.float64)
    after = image(prox, first) - image(prox, second)
    assert after @ after <= after @ before + 1e-12


@pytest.mark.parametrize("prox", PROJECTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@settings(derandomize=True, max_examples=50)
@given(values=vectors)
def test_projections_are_exactly_idempotent(prox: Prox, dtype: torch.dtype, values: list[float]) -> None:
    once = image(prox, values, dtype=dtype)
    assert torch.equal(image(prox, once.tolist(), dtype=dtype), once)


def objective(prox: Prox, values: list[float], step: float) -> Callable[[np.ndarray], float]:
    def at(u: np.ndarray) -> float:
        return 0.5 * float(np.sum((u - values) ** 2)) + step * prox.penalty([torch.tensor(u)])

    return at


@pytest.mark.parametrize(
    ("prox", "constraint"),
    [
        (Identity(), None),
        (L1(0.3), None),
        (ElasticNet(0.3, 0.5), None),
        (ElasticNet(0.0, 2.0), None),
        (Box(-0.5, 0.25), {"bounds": [(-0.5, 0.25)] * 5}),
        (Ball(0.7), {"constraints": {"type": "ineq", "fun": lambda u: 0.49 - u @ u, "jac": lambda u: -2 * u}}),
    ],
)
def test_the_image_minimizes_the_proximal_objective(prox: Prox, constraint: dict[str, object] | None) -> None:
    rng = np.random.default_rng(0)
    for _ in range(5):
        values, step = (2 * rng.standard_normal(5)).tolist(), float(rng.uniform(0.1, 2))
        ours = image(prox, values, step).numpy()
        value = objective(prox, values, step)
        method = {"method": "SLSQP", "tol": 1e-12, **constraint} if constraint else {"method": "Powell", "tol": 1e-9}
        theirs = minimize(value, np.zeros(5), **method)
        assert value(ours) <= theirs.fun + 1e-6  # SLSQP may leave the ball a little
        np.testing.assert_allclose(ours, theirs.x, atol=2e-4)


def test_the_ball_takes_one_norm_over_all_tensors_and_keeps_the_direction() -> None:
    matrix, bias = torch.full((2, 2), 3.0), torch.tensor([8.0])
    Ball(2.0).apply_([matrix, bias], [1.0, 1.0])
    torch.testing.assert_close(matrix, torch.full((2, 2), 0.6))
    torch.testing.assert_close(bias, torch.tensor([1.6]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("radius", [0.1, 1.0, 7.3, 1e-3])
def test_the_ball_is_never_left_by_rounding_and_hardly_shrunk(dtype: torch.dtype, radius: float) -> None:
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
        assert torch.equal(image(Ball(5.0), values, dtype=dtype), torch.tensor(values, dtype=dtype))


def test_points_hardly_outside_of_the_ball_are_projected_too() -> None:
    point = torch.tensor([3.0, 4.0], dtype=torch.float64) * (1 + 1e-12)
    Ball(5.0).apply_([point], [1.0])
    assert norm64([point]) <= 5.0


def test_a_ball_too_small_for_the_dtype_holds_only_zero() -> None:
    point = torch.tensor([1.0, -1.0])
    Ball(1e-46).apply_([point], [1.0])
    assert not point.any()


def test_the_ball_accepts_mixed_dtypes_empty_tensors_and_no_tensors() -> None:
    parts = [torch.ones(3, dtype=torch.float64), torch.ones(3, dtype=torch.bfloat16), torch.ones(0)]
    Ball(1.0).apply_(parts, [1.0] * 3)
    assert norm64(parts) == pytest.approx(1, rel=2**-7)
    Ball(1.0).apply_([], [])


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("prox", PROJECTIONS)
def test_projections_refuse_a_diverged_iterate_and_leave_it_alone(prox: Prox, bad: float) -> None:
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
    torch.testing.assert_close(result.double(), image(prox, values), rtol=0, atol=4 * torch.finfo(dtype).eps)


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


def test_penalties_have_their_values_and_projections_none() -> None:
    parts = [torch.tensor([[1.0, -2.0]]), torch.tensor([3.0], requires_grad=True)]
    assert [prox.penalty(parts) for prox in (Identity(), Ball(9.0), Box(-9, 9))] == [0.0, 0.0, 0.0]
    assert L1(0.5).penalty(parts) == 3.0
    assert ElasticNet(0.5, 2.0).penalty(parts) == 17.0


def test_radius_is_that_of_the_ball_and_infinite_elsewhere() -> None:
    assert [prox.radius for prox in ALL] == [math.inf, 0.7, math.inf, math.inf, math.inf]


def test_zero_is_feasible_everywhere_but_in_a_box_beside_it() -> None:
    assert all(prox.contains_zero for prox in [*ALL, Box(0.0, 1.0), Box(-math.inf, 0.0), Ball(1e-300)])
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
    ("low", "high"), [(1.0, 0.0), (math.nan, 1.0), (0.0, math.nan), (math.inf, math.inf), (-math.inf, -math.inf)]
)
def test_a_box_needs_ordered_bounds(low: float, high: float) -> None:
    with pytest.raises(ValueError, match="low must be <= high"):
        Box(low, high)


def test_penalties_need_finite_strengths_that_are_not_negative() -> None:
    for strength in (-0.1, math.inf, math.nan):
        for build in (lambda s: L1(s), lambda s: ElasticNet(s, 1.0), lambda s: ElasticNet(1.0, s)):
            with pytest.raises(ValueError, match="must be"):
                build(strength)
