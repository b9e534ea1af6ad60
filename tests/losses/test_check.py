from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from torch_dpsco.errors import MissingConstantError, NotCertifiedError
from torch_dpsco.losses import (
    Absolute,
    EpsilonInsensitive,
    Hinge,
    Huber,
    Logistic,
    Loss,
    Pinball,
    PowerLoss,
    SmoothedHinge,
    SmoothedPinball,
    SoftmaxCrossEntropy,
    Squared,
    TableLoss,
    check_holder,
)
from torch_dpsco.problem import Problem

CHECKED = [
    "holder_constant",
    "grad_at_zero",
    "loss_at_zero",
    "lipschitz",
    "smoothness",
    "exact_grad_bound",
]
INTERPOLATED = [Logistic(), Huber(0.7), SmoothedHinge(0.5), SmoothedHinge(2)]
LOSSES = [
    *(build(q) for build in (Hinge, PowerLoss) for q in (1, 1.1, 1.5, 2)),
    Absolute(),
    Squared(),
    *INTERPOLATED,
]
LOSSES += [
    Huber(3),
    Pinball(),
    Pinball(0.1),
    Pinball(0.9),
    SmoothedPinball(0.9, 0.1),
    *(EpsilonInsensitive(w) for w in (0, 0.1, 5)),
]
LOSSES += [SoftmaxCrossEntropy(2), SoftmaxCrossEntropy(5)]
ROWS = [(loss, None) for loss in LOSSES] + [
    (loss, alpha) for loss in INTERPOLATED for alpha in (0.0, 0.5)
]


def scaled(problem: Problem, name: str, factor: float) -> Problem:
    value = getattr(problem, name)
    return dataclasses.replace(
        problem, **{name: Scaled(value, factor) if callable(value) else value * factor}
    )


@dataclasses.dataclass(frozen=True)
class Scaled:
    bound: Callable[[float], float]
    factor: float

    def __call__(self, radius: float) -> float:
        return self.factor * self.bound(radius)


@dataclasses.dataclass(frozen=True)
class LogCosh(Loss):
    """h log cosh((s - y - offset)/h): a user's own loss; L = B^2/h, Lipschitz constant B."""

    offset: float = 0.0
    sign: float = 1.0
    width: float = 1.0

    def value(self, score: Tensor, target: Tensor) -> Tensor:
        size = (score - target - self.offset).abs() / self.width
        return self.width * (size + torch.log1p(torch.exp(-2 * size)) - math.log(2))

    def derivative(self, score: Tensor, target: Tensor) -> Tensor:
        return self.sign * torch.tanh((score - target - self.offset) / self.width)


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize(("loss", "exponent"), ROWS, ids=repr)
@pytest.mark.parametrize(("bound_x", "bound_y"), [(2.0, 0.5), (0.03, 7.0)])
def test_every_row_passes_and_is_refuted_once_a_constant_is_two_percent_too_small(
    loss: TableLoss, exponent: float | None, bound_x: float, bound_y: float
) -> None:
    bounds = {"bound_x": bound_x, "bound_y": bound_y}
    problem = loss.problem(**bounds, holder_exponent=exponent)
    check_holder(loss, problem, **bounds, trials=300)
    for name in CHECKED:
        # The interpolated logistic constant is the one row of the table that is valid but not least.
        if getattr(problem, name) and not (
            loss == Logistic() and exponent == 0.5 and name == "holder_constant"
        ):
            with pytest.raises(NotCertifiedError, match=r"is refuted: promised .* found"):
                check_holder(loss, scaled(problem, name, 0.98), **bounds, trials=300)


@pytest.mark.parametrize("power", [1.1, 1.5, 1.9])
def test_the_power_loss_without_its_factor_is_refuted(power: float) -> None:
    wrong = Problem(holder_exponent=power - 1, holder_constant=power)
    with pytest.raises(NotCertifiedError, match="holder_constant"):
        check_holder(PowerLoss(power), wrong, bound_x=1.0)


@pytest.mark.parametrize("loss", [Absolute(), PowerLoss(1), EpsilonInsensitive(0.1)], ids=repr)
def test_the_lipschitz_constant_taken_for_the_jump_is_refuted(loss: TableLoss) -> None:
    with pytest.raises(
        NotCertifiedError, match="holder_constant is refuted: promised 1, found 2 "
    ):
        check_holder(loss, Problem(holder_exponent=0, holder_constant=1), bound_x=1.0)


@pytest.mark.parametrize(("power", "exponent"), [(1.2, 0.5), (2.0, 0.5), (1.5, 1.0), (1.0, 0.3)])
def test_a_wrong_exponent_is_refuted_whatever_the_constant(
    power: float, exponent: float
) -> None:
    for loss in (Hinge(power), PowerLoss(power)):
        with pytest.raises(NotCertifiedError, match="holder_constant"):
            check_holder(
                loss, Problem(holder_exponent=exponent, holder_constant=20), bound_x=1.0
            )


def test_a_lipschitz_constant_is_judged_inside_the_radius_only() -> None:
    check_holder(Squared(), Problem(lipschitz=3.0, radius=2.0), bound_x=1.0)
    with pytest.raises(NotCertifiedError, match="lipschitz"):
        check_holder(Squared(), Problem(lipschitz=2.95, radius=2.0), bound_x=1.0)


def test_a_loss_of_the_user_is_checked_wherever_its_kinks_are() -> None:
    bounds = {"bound_x": 3.0, "bound_y": 2.0}
    loss = LogCosh(offset=0.377)
    true = Problem(
        holder_exponent=1,
        holder_constant=9,
        smoothness=9,
        lipschitz=3,
        grad_at_zero=3 * math.tanh(2.377),
    )
    check_holder(loss, true, **bounds)
    for name in ("holder_constant", "smoothness", "lipschitz", "grad_at_zero"):
        with pytest.raises(NotCertifiedError, match=name):
            check_holder(loss, scaled(true, name, 0.98), **bounds)


def test_a_steep_place_that_is_narrow_and_off_center_is_found_by_halving() -> None:
    loss = LogCosh(offset=0.377, width=1e-4)
    check_holder(loss, Problem(smoothness=1e4), bound_x=1.0)
    with pytest.raises(NotCertifiedError, match="smoothness"):
        check_holder(loss, Problem(smoothness=0.98e4), bound_x=1.0)


def test_a_derivative_that_is_no_subgradient_is_refuted() -> None:
    with pytest.raises(NotCertifiedError, match="subgradient of a convex loss"):
        check_holder(LogCosh(sign=-1.0), Problem(lipschitz=1), bound_x=1.0)


def test_a_negative_loss_and_a_loss_that_is_nan_are_refuted() -> None:
    class Shifted(LogCosh):
        def value(self, score: Tensor, target: Tensor) -> Tensor:
            return super().value(score, target) - self.offset

    with pytest.raises(NotCertifiedError, match="nonnegative"):
        check_holder(Shifted(offset=0.1), Problem(loss_at_zero=1), bound_x=1.0)
    with pytest.raises(NotCertifiedError, match="found nan"):
        check_holder(LogCosh(offset=math.nan), Problem(grad_at_zero=1), bound_x=1.0)


def test_the_check_draws_from_its_own_generator_and_repeats_itself() -> None:
    state = torch.random.get_rng_state()
    messages = []
    for generator in (None, None, torch.Generator().manual_seed(3)):
        with pytest.raises(NotCertifiedError) as refused:
            check_holder(Logistic(), Problem(smoothness=0.2), bound_x=1.0, generator=generator)
        messages.append(str(refused.value))
    assert messages[0] == messages[1] != messages[2]
    assert torch.equal(torch.random.get_rng_state(), state)


def test_the_check_needs_something_to_check() -> None:
    with pytest.raises(MissingConstantError, match="promises one of"):
        check_holder(Logistic(), Problem(radius=1.0, strong_convexity=1.0), bound_x=1.0)
    with pytest.raises(ValueError, match="trials"):
        check_holder(Logistic(), Problem(lipschitz=1), bound_x=1.0, trials=0)
