from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from torch_dpsco.algorithms.row_free import record_bounds
from torch_dpsco.losses import Logistic, enforce_bounds

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bound", [0.1, 1.0, 7.3])
def test_enforced_norms_never_exceed_the_bound(dtype: torch.dtype, bound: float) -> None:
    for dim in (1, 3, 50, 1000):
        rows = torch.randn(200, dim, generator=torch.Generator()).mul(5).to(dtype)
        result = enforce_bounds(rows, bound_x=bound)
        norms, before = (x.double().norm(dim=1) for x in (result, rows))
        assert result.dtype == dtype
        assert (norms <= bound).all()
        assert (norms >= before.clamp(max=bound) * (1 - 3 * torch.finfo(dtype).eps) - 1e-5).all()
        assert torch.equal(result[before <= bound], rows[before <= bound])
        assert torch.equal(enforce_bounds(result, bound_x=bound), result)


def test_enforcement_is_a_map_of_each_record_by_itself() -> None:
    rows = torch.randn(9000, 4, generator=torch.Generator()).mul(2)
    together = enforce_bounds(rows, bound_x=1.0)
    assert torch.equal(
        together, torch.cat([enforce_bounds(part, bound_x=1.0) for part in rows.split(1234)])
    )
    changed = rows.clone()
    changed[17] = 1e9
    assert torch.equal(
        torch.nonzero((enforce_bounds(changed, bound_x=1.0) != together).any(1)),
        torch.tensor([[17]]),
    )


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_with_a_non_finite_feature_becomes_zero(bad: float) -> None:
    result = enforce_bounds(torch.tensor([[bad, 1.0], [3.0, 4.0]]), bound_x=5.0)
    assert result.tolist() == [[0.0, 0.0], [3.0, 4.0]]


def test_rows_of_extreme_size_keep_their_direction() -> None:
    result = enforce_bounds(
        f64(3e300, 4e300, 3e-200, 4e-200, 1.7e308, 0, 5e-324, 0).reshape(4, 2), bound_x=1e-250
    )
    torch.testing.assert_close(
        result[:2] * 1e250, f64(0.6, 0.8).repeat(2, 1), rtol=1e-12, atol=0
    )
    assert result[2:].tolist() == [[pytest.approx(1e-250), 0.0], [5e-324, 0.0]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bound", [0.1, 0.7, 1.0, 1e6])
def test_enforced_targets_stay_inside_their_interval(dtype: torch.dtype, bound: float) -> None:
    targets = torch.tensor(
        [-math.inf, -2.0, -0.05, 0.0, math.nan, 1.0, math.inf], dtype=torch.float64
    ).to(dtype)
    features, result = enforce_bounds(torch.zeros(7, 1), targets, bound_x=1.0, bound_y=bound)
    assert features.shape == (7, 1)
    assert (result.double().abs() <= bound).all()
    assert result.isfinite().all()
    assert result[4] == 0
    inside = targets.double().abs() <= bound
    assert torch.equal(result[inside], targets[inside])


def test_enforcement_accepts_images_and_empty_batches_and_returns_new_tensors() -> None:
    images = torch.full((2, 3, 4, 5), 1.0)
    torch.testing.assert_close(
        enforce_bounds(images, bound_x=1.0).flatten(1).norm(dim=1), torch.ones(2)
    )
    assert images.eq(1).all()
    for shape in ((0, 3), (4, 0), (0, 0)):
        assert enforce_bounds(torch.zeros(shape), bound_x=1.0).shape == shape


def test_enforcement_refuses_what_it_cannot_bound() -> None:
    rows = torch.zeros(2, 3)
    with pytest.raises(ValueError, match="bound_x must be"):
        enforce_bounds(rows, bound_x=math.inf)
    with pytest.raises(ValueError, match="bound_y must be"):
        enforce_bounds(rows, torch.zeros(2), bound_x=1.0, bound_y=0.0)
    for features in (torch.zeros(3), torch.zeros(2, 3, dtype=torch.long)):
        with pytest.raises(ValueError, match="features must be floating point of shape"):
            enforce_bounds(features, bound_x=1.0)
    with pytest.raises(ValueError, match="given together"):
        enforce_bounds(rows, torch.zeros(2), bound_x=1.0)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="targets must be floating point"):
        enforce_bounds(rows, torch.zeros(2, dtype=torch.long), bound_x=1.0, bound_y=1.0)


@pytest.mark.parametrize(
    ("dtype", "bound"),
    [(torch.float16, 1e-3), (torch.float32, 1e-40), (torch.float64, 1e-310)],
)
@pytest.mark.parametrize("dim", [3, 4000, 20_000])
def test_bounds_near_the_least_number_of_a_dtype_are_enforced(
    dtype: torch.dtype, bound: float, dim: int
) -> None:
    """Equal numbers of a row are all rounded in one direction, by half of the least number."""
    for times in range(24):
        limit = bound * (1 + times / 24)
        found = enforce_bounds(torch.full((1, dim), 3.0, dtype=dtype), bound_x=limit)
        assert Fraction(found[0, 0].item()) ** 2 * dim <= Fraction(limit) ** 2


@pytest.mark.parametrize("bound", [1e-300, 0.3, 1.0, 2.0, math.sqrt(3.0), 7.1, 1e8, 1e100])
def test_the_one_of_an_intercept_is_in_the_bound(bound: float) -> None:
    """Rounded up, and by no more than two units in the last place."""
    found = Logistic().problem(bound_x=bound, intercept=True)
    assert found.bound_x is not None
    exact = Fraction(bound) ** 2 + 1
    assert Fraction(found.bound_x) ** 2 >= exact
    assert Fraction(found.bound_x) ** 2 <= exact * (1 + Fraction(5, 2**52))
    assert found == Logistic().problem(bound_x=found.bound_x)
    assert Logistic().problem(bound_x=bound).bound_x == bound


def test_the_loader_of_a_layer_with_a_bias_cuts_features_to_their_own_bound() -> None:
    """Output perturbation rests on the bound: the features keep theirs, whatever is said of the intercept."""
    for intercept, most in ((True, 2.0), (False, math.sqrt(3.0))):
        problem = Logistic().problem(bound_x=2.0, intercept=intercept)
        kept, _ = record_bounds(problem, bias=True)
        assert kept is not None
        assert Fraction(kept) ** 2 + 1 <= Fraction(problem.bound_x) ** 2  # type: ignore[arg-type]
        assert kept == pytest.approx(most)
