"""The loss of clipped gradients, and second derivatives."""

from __future__ import annotations

import math

import pytest
import torch

from torch_dpsco.errors import ConditionError
from torch_dpsco.losses import (
    Absolute,
    EpsilonInsensitive,
    Hinge,
    Huber,
    Logistic,
    Pinball,
    PowerLoss,
    ResidualClipped,
    SmoothedHinge,
    SoftmaxCrossEntropy,
    Squared,
)

SMOOTH = [
    Logistic(),
    SmoothedHinge(0.3),
    SmoothedHinge(3.0),
    Hinge(power=2),
    Squared(),
    Huber(0.7),
    PowerLoss(2.0),
]
SCORES = torch.linspace(-6, 6, 4001, dtype=torch.float64)


def labels(loss):
    return (
        torch.tensor([-1.0, 1.0])
        if loss.target_kind == "sign"
        else torch.tensor([-2.0, 0.0, 0.4])
    )


@pytest.mark.parametrize("loss", SMOOTH, ids=repr)
def test_second_derivatives_are_differences_of_first_ones(loss):
    step = 1e-6
    for label in labels(loss).double():
        target = label.expand_as(SCORES)
        slope = (
            loss.derivative(SCORES + step, target) - loss.derivative(SCORES - step, target)
        ) / (2 * step)
        bend = loss.second_derivative(SCORES, target)
        off = (slope - bend).abs() > 1e-6
        assert int(off.sum()) <= 4  # grid points within a step of a kink of phi'
        assert float(bend.max()) <= loss.problem(bound_x=1.0).smoothness


@pytest.mark.parametrize(
    "loss",
    [Hinge(), Hinge(1.5), Pinball(), Absolute(), EpsilonInsensitive(), PowerLoss(1.5)],
    ids=repr,
)
def test_losses_whose_slope_jumps_have_no_second_derivative_and_no_clipped_form(loss):
    with pytest.raises(ConditionError, match="no second derivative"):
        loss.second_derivative(SCORES, torch.ones_like(SCORES))
    with pytest.raises(ConditionError, match="cannot be clipped"):
        ResidualClipped(loss, 1.0)


def test_losses_of_many_scores_cannot_be_clipped():
    with pytest.raises(ConditionError, match="one score"):
        ResidualClipped(SoftmaxCrossEntropy(3), 1.0)


@pytest.mark.cases(29, 13)
@pytest.mark.parametrize("loss", SMOOTH, ids=repr)
@pytest.mark.parametrize("clip", [1e-6, 0.1, 0.5, 0.9, 1.0, 5.0])
def test_the_clipped_loss_is_convex_and_its_derivative_is_the_clipped_one(loss, clip):
    clipped = ResidualClipped(loss, clip).of_norms(torch.ones(1, dtype=torch.float64))
    for label in labels(loss).double():
        target = label.expand_as(SCORES)
        value, slope = clipped.value(SCORES, target), clipped.derivative(SCORES, target)
        # trapezoids between kinks: the values are an integral of the slopes
        steps = (slope[1:] + slope[:-1]) / 2 * (SCORES[1] - SCORES[0])
        assert torch.allclose(value[1:] - value[:-1], steps, atol=1e-5)
        assert bool((slope[1:] >= slope[:-1] - 1e-12).all())
        assert torch.allclose(
            slope, loss.derivative(SCORES, target).clamp(-clip, clip), rtol=1e-9
        )
        untouched = loss.derivative(SCORES, target).abs() < clip * (1 - 1e-9)
        assert torch.allclose(
            value[untouched], loss.value(SCORES, target)[untouched], rtol=1e-12, atol=0
        )
        assert bool((value <= loss.value(SCORES, target) * (1 + 1e-9) + 1e-9).all())
        bend = clipped.second_derivative(SCORES, target)
        assert bool((bend >= 0).all())
        assert bool((bend[slope.abs() >= clip * (1 - 1e-12)] == 0).all())


def test_the_clipped_square_is_the_huber_loss():
    target = torch.full_like(SCORES, 0.4)
    clipped = ResidualClipped(Squared(), 0.5).of_norms(torch.tensor([2.0], dtype=torch.float64))
    assert torch.allclose(
        clipped.value(SCORES, target), Huber(0.25).value(SCORES, target), rtol=1e-10
    )


def test_clipped_gradients_never_exceed_the_clip():
    generator = torch.Generator().manual_seed(0)
    for exponent in (-8, 0, 8):
        X = torch.randn(2000, 7, generator=generator, dtype=torch.float64) * 10.0**exponent
        norms = X.norm(dim=1)
        clipped = ResidualClipped(Logistic(), 0.25).of_norms(norms)
        slopes = clipped.derivative(torch.full_like(norms, -50.0), torch.ones_like(norms))
        gradients = slopes.unsqueeze(1) * X
        exact = [math.sqrt(math.fsum(g * g for g in row)) for row in gradients.tolist()]
        assert max(exact) <= 0.25
        if exponent > 0:
            assert min(exact) >= 0.25 * (1 - 2e-9)


@pytest.mark.parametrize("clip", [0.01, 0.3, 0.99, 1.0, 1.5, 4.0])
def test_the_smoothness_of_the_clipped_logistic_loss_covers_all_norms_up_to_the_bound(clip):
    loss, bound = ResidualClipped(Logistic(), clip), 2.0
    for norm in torch.linspace(0.01, bound, 40, dtype=torch.float64):
        clipped = loss.of_norms(norm.unsqueeze(0))
        bend = clipped.second_derivative(SCORES, torch.ones_like(SCORES)) * norm**2
        assert float(bend.max()) <= loss.smoothness(bound) * (1 + 1e-9)
    assert loss.smoothness(bound) == (clip * (bound - clip) if clip < 1 else 1.0)


def test_records_of_norm_zero_are_not_clipped_and_give_no_nan():
    clipped = ResidualClipped(Logistic(), 0.5).of_norms(torch.zeros(1, dtype=torch.float64))
    for part in (clipped.value, clipped.derivative, clipped.second_derivative):
        result = part(torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64))
        assert bool(result.isfinite().all())
