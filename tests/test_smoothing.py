"""Ball shifts: their law against theory.smoothing; one for all items, per item of linear models, per item of any."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.stats import kstest, norm
from torch import Tensor, nn

import torch_dpsco as dp
from tests.reference.papers.output import ball_marginal_cdf, ball_marginal_variance
from torch_dpsco.smoothing import ball_shift, perturbed_gradients, perturbed_logits, shifted
from torch_dpsco.theory.smoothing import ball_mean_norm

LEVEL = 1e-6  # of a false alarm, for each statistical test


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def joint(parts: list[Tensor]) -> Tensor:
    return torch.cat([part.reshape(-1) for part in parts]).double()


def marginal(dim: int, radius: float) -> np.vectorize:
    return np.vectorize(lambda t: ball_marginal_cdf(dim, radius, float(t)))


@pytest.fixture(scope="module")
def draws() -> Tensor:
    params, generator = [torch.zeros(2, 2), torch.zeros(1)], seeded()
    return torch.stack([joint(ball_shift(params, 2.0, generator)) for _ in range(4000)])


def test_coordinates_of_a_shift_have_the_marginal_law_of_the_ball(draws: Tensor) -> None:
    for column in draws.T:
        assert kstest(column.numpy(), marginal(5, 2.0)).pvalue > LEVEL


def test_the_norm_of_a_shift_has_the_law_of_the_joint_vector(draws: Tensor) -> None:
    norms = draws.norm(dim=1)
    assert float(norms.max()) <= 2.0 * (1 + 1e-6)
    assert kstest(norms.numpy(), lambda s: (s / 2.0).clip(0, 1) ** 5).pvalue > LEVEL
    # a ball for each parameter instead of one for all has another law: in R^4 alone this one is refused
    assert kstest(norms.numpy(), lambda s: (s / 2.0).clip(0, 1) ** 4).pvalue < LEVEL
    assert float(norms.mean()) == pytest.approx(ball_mean_norm(5, 2.0), abs=0.03)


def test_a_shift_has_mean_zero_and_no_direction(draws: Tensor) -> None:
    z = norm.isf(LEVEL / 60)
    variance = ball_marginal_variance(5, 2.0)
    assert float(draws.mean(0).abs().max()) < z * math.sqrt(variance / len(draws))
    covariance = draws.T @ draws / len(draws)
    assert float((covariance - variance * torch.eye(5)).abs().max()) < z * 2.0**2 / math.sqrt(len(draws))


def test_a_shift_of_radius_zero_is_none() -> None:
    assert joint(ball_shift([torch.zeros(3)], 0.0, seeded())).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("radius", [-1.0, math.inf, math.nan])
def test_radii_that_are_no_numbers_are_refused(radius: float) -> None:
    with pytest.raises(ValueError, match="radius must be"):
        ball_shift([torch.zeros(3)], radius, seeded())
    with pytest.raises(ValueError, match="radius must be"):
        perturbed_logits(torch.zeros(1, 1), torch.zeros(1, 1), radius, seeded())


def test_no_parameters_are_refused() -> None:
    with pytest.raises(ValueError, match="params must hold at least one number"):
        ball_shift([], 1.0, seeded())


def test_the_block_sees_the_shift_and_puts_parameters_back_bit_for_bit() -> None:
    model = nn.Linear(3, 2)
    params = list(model.parameters())
    before, shift = [p.detach().clone() for p in params], ball_shift(params, 0.7, seeded(3))
    with shifted(params, 0.7, seeded(3)):
        for p, start, part in zip(params, before, shift, strict=True):
            torch.testing.assert_close(p.detach(), start + part)
    assert all(torch.equal(p, start) for p, start in zip(params, before, strict=True))


def test_an_error_in_the_block_puts_parameters_back() -> None:
    model = nn.Linear(3, 2)
    before = model.weight.detach().clone()
    with pytest.raises(ZeroDivisionError), shifted(list(model.parameters()), 0.7, seeded()):
        1 / 0  # noqa: B018
    assert torch.equal(model.weight, before)


def test_a_step_of_a_user_optimizer_takes_gradients_at_the_shifted_point() -> None:
    model = dp.attach(nn.Linear(2, 1, bias=False).double())
    nn.init.zeros_(model.weight)
    params, x = list(model.parameters()), torch.randn(6, 2, dtype=torch.float64, generator=seeded(1))
    data = torch.utils.data.TensorDataset(x, torch.zeros(6, 1, dtype=torch.float64))
    plan = dp.UserClippedSGD.plan(lr=1.0, clip=100.0, noise_multiplier=0.0, n_users=3, steps=1)
    optimizer = dp.UserClippedSGD(params, plan)
    shift = ball_shift(params, 0.5, seeded(2))[0]
    for rows, y, users in optimizer.loader(data, users=torch.arange(6) % 3):
        with shifted(params, 0.5, seeded(2)):
            (0.5 * (model(rows) - y).square()).mean().backward()
        optimizer.step(users=users)
    optimizer.finalize()
    torch.testing.assert_close(model.weight.detach(), -(shift @ x.T @ x) / 6)


# -- per item, linear models ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("k", "p", "bias"), [(1, 3, False), (1, 3, True), (3, 2, True), (2, 1, False)])
def test_perturbed_logits_have_the_law_of_weights_shifted_for_each_item(k: int, p: int, bias: bool) -> None:
    count, r = 4000, 0.8
    x = torch.tensor([1.5, -2.0, 0.5])[:p].expand(count, p)
    length = math.sqrt(float(x[0].square().sum()) + bias)
    moved = perturbed_logits(torch.zeros(count, k, dtype=torch.float64), x, r, seeded(), bias=bias) / length
    dim = k * (p + bias)
    for column in moved.T:
        assert kstest(column.numpy(), marginal(dim, r)).pvalue > LEVEL
    params = [torch.zeros(k, p), *([torch.zeros(k)] if bias else [])]
    generator = seeded(1)
    literal = []
    for _ in range(count):
        weight, *rest = ball_shift(params, r, generator)
        literal.append(weight @ x[0] + (rest[0] if bias else 0.0))
    norms = torch.stack(literal).double().norm(dim=1) / length
    assert kstest(moved.norm(dim=1).numpy(), norms.numpy()).pvalue > LEVEL  # jointly over the K logits


def test_items_are_shifted_independently_of_each_other() -> None:
    moved = perturbed_logits(torch.zeros(5000, 1, dtype=torch.float64), torch.ones(5000, 4), 1.0, seeded()).squeeze(1)
    correlation = float((moved[:-1] * moved[1:]).mean() / moved.square().mean())
    assert abs(correlation) < norm.isf(LEVEL / 2) / math.sqrt(4999)


def test_backward_through_perturbed_logits_has_the_slope_of_the_perturbed_point() -> None:
    layer, x, y = nn.Linear(3, 1).double(), torch.randn(4, 3, dtype=torch.float64), torch.ones(4, 1).double()
    logits = perturbed_logits(layer(x), x, 2.0, seeded(5))
    nn.functional.binary_cross_entropy_with_logits(logits, y, reduction="sum").backward()
    slopes = torch.sigmoid(logits.detach()) - y
    torch.testing.assert_close(layer.weight.grad, slopes.T @ x)
    torch.testing.assert_close(layer.bias.grad, slopes.sum(0))


@pytest.mark.parametrize(("logits", "features"), [((4,), (4, 2)), ((4, 1), (4,)), ((4, 1), (3, 2))])
def test_shapes_that_do_not_agree_are_refused(logits: tuple[int, ...], features: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"logits must be \(B, K\)"):
        perturbed_logits(torch.zeros(logits), torch.zeros(features), 1.0, seeded())


# -- per item, any model ----------------------------------------------------------------------------------------------


def half_square(answer: Tensor, wanted: Tensor) -> Tensor:
    return 0.5 * (answer - wanted).square().sum()


def test_gradients_without_a_shift_are_those_of_autograd_in_chunks_of_any_size() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x, y = torch.randn(7, 3, dtype=torch.float64), torch.randn(7, 2, dtype=torch.float64)
    params = list(model.parameters())
    by_hand = [torch.autograd.grad(half_square(model(a[None]), b[None]), params) for a, b in zip(x, y, strict=True)]
    for size in (1, 3, 7, 64):
        rows = perturbed_gradients(model, half_square, x, y, radius=0.0, generator=seeded(), chunk_size=size)
        for found, wanted in zip(rows, zip(*by_hand, strict=True), strict=True):
            torch.testing.assert_close(found, torch.stack(wanted))


def test_gradients_of_a_quadratic_show_the_shift_of_each_item() -> None:
    # the gradient of |w - t|^2 / 2 is w - t, so that gradients at w + y less those at w are the shifts themselves
    model = nn.Linear(1, 3, bias=False)
    ones, targets = torch.ones(3000, 1), torch.randn(3000, 3)
    plain = perturbed_gradients(model, half_square, ones, targets, radius=0.0, generator=seeded())[0]
    moved = perturbed_gradients(model, half_square, ones, targets, radius=1.5, generator=seeded(), chunk_size=1000)[0]
    shifts = (moved - plain).squeeze(2).double()
    assert kstest(shifts.norm(dim=1).numpy(), lambda s: (s / 1.5).clip(0, 1) ** 3).pvalue > LEVEL
    assert float(shifts.norm(dim=1).max()) <= 1.5 * (1 + 1e-5)
    assert len(torch.unique(shifts, dim=0)) == 3000


def test_no_items_have_no_gradients_and_frozen_parameters_none() -> None:
    model = nn.Linear(2, 3)
    model.bias.requires_grad_(False)
    rows = perturbed_gradients(model, half_square, torch.zeros(0, 2), torch.zeros(0, 3), radius=1.0, generator=seeded())
    assert [tuple(part.shape) for part in rows] == [(0, 3, 2)]
    assert not any(p.grad is not None for p in model.parameters())


def test_numbers_of_inputs_and_targets_must_agree() -> None:
    with pytest.raises(ValueError, match="as many"):
        perturbed_gradients(
            nn.Linear(2, 1), half_square, torch.zeros(3, 2), torch.zeros(2, 1), radius=1.0, generator=seeded()
        )
