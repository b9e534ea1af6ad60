"""Oracles of somebody else's: what their weights may be."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import torch_dpsco as dp
from torch_dpsco.errors import PrivacyError
from torch_dpsco.step.oracle import clip_weights


def oracle(weights) -> dp.oracles.ClippedMean:
    members = {"bound": lambda self, query: 2.0, "settings": lambda self: {}}
    members["weights"] = lambda self, norms, clip: weights(norms, clip)
    return type("Mine", (dp.oracles.ClippedMean,), members)(1.0, 10)


def unguarded(norms: Tensor, clip: float) -> Tensor:
    return (clip / norms).clamp(max=1.0)  # NaN stays NaN


@pytest.mark.parametrize(
    "weights",
    [
        unguarded,
        lambda norms, clip: clip_weights(norms, 1.01 * clip),
        lambda norms, clip: clip_weights(norms, 1.0 + clip),
        lambda norms, clip: clip_weights(norms, clip).where(norms < 1e200, 1.0),
        lambda norms, clip: clip_weights(norms, clip).where(norms < math.inf, 1e-300),
        lambda norms, clip: -clip_weights(norms, clip),
        lambda norms, clip: clip * torch.ones_like(norms),
    ],
)
def test_weights_of_ones_own_that_pass_the_clip_are_refused(weights) -> None:
    mine = oracle(weights)
    with pytest.raises(PrivacyError, match="weights of Mine must be >= 0, keep"):
        mine.open([torch.zeros(3)])


@pytest.mark.parametrize(
    "weights",
    [
        clip_weights,
        lambda norms, clip: clip_weights(norms, clip) / 2,
        lambda norms, clip: clip_weights(norms, clip) * (norms <= 10 * clip),
        lambda norms, clip: (0.999 * clip / (norms + 0.01)).nan_to_num(nan=0.0),
    ],
)
def test_weights_within_the_clip_are_taken(weights) -> None:
    oracle(weights).open([torch.zeros(3)])


def test_weights_that_are_put_on_an_instance_are_tried_too() -> None:
    mine = dp.oracles.Clipped(1.0, 1.0, 10)
    mine.weights = unguarded
    with pytest.raises(PrivacyError, match="weights of Clipped must be"):
        mine.open([torch.zeros(3)])
