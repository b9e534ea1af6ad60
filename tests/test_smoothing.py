"""Ball shifts: their law against theory.smoothing."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.stats import kstest, norm
from torch import Tensor, nn

import torch_dpsco as dp
from tests.reference.papers.output import ball_marginal_cdf, ball_marginal_variance
from torch_dpsco.smoothing import ball_shift, shifted
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
