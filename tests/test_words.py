"""Keywords of other libraries are answered with ours, before anything runs; missing settings are named together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.base import clone
from torch import nn

import torch_dpsco as dp
from tests.estimators.models import SETTINGS, make
from torch_dpsco import _validate as _words
from torch_dpsco.estimators import LogisticRegression, Ridge

PROBLEM = dp.losses.Logistic().problem(bound_x=1.0)
ANSWERS: dict[str, tuple[Callable[[], Any], str]] = {
    "C": (
        lambda: LogisticRegression(C=0.1),
        "LogisticRegression has no C: take reg .reg = 1 / C",
    ),
    "two": (
        lambda: LogisticRegression(penalty="l2", max_iter=9),
        "no penalty: take reg .*; no max_iter: leave it out",
    ),
    "diffprivlib": (lambda: LogisticRegression(data_norm=1.0), "no data_norm: take bound_x"),
    "budget": (
        lambda: dp.Budget(target_epsilon=1.0, target_delta=1e-5),
        "no target_epsilon: take epsilon; .* delta",
    ),
    "accountant": (lambda: dp.Accountant(target_epsilon=1.0), "no target_epsilon: take budget"),
    "plan": (
        lambda: dp.ClippedSGD.plan(n=9, max_grad_norm=1.0, eps=1.0),
        "no max_grad_norm: take clip .*no eps: take epsilon",
    ),
    "make_private": (
        lambda: dp.make_private(
            nn.Linear(1, 1), None, None, noise_multiplier=1.0, max_grad_norm=1.0
        ),
        "no noise_multiplier: take budget .*no max_grad_norm: take clip",
    ),
    "fit": (
        lambda: dp.fit(nn.Linear(1, 1), None, None, None, epochs=3),
        r"no epochs: the plan has it: dp.NetSGD.plan\(",
    ),
    "learning_rate": (
        lambda: dp.fit(nn.Linear(1, 1), None, None, None, learning_rate=0.1),
        "no learning_rate: the plan has it",
    ),
    "learning_rate of a plan": (
        lambda: dp.ClippedSGD.plan(n=9, learning_rate=0.1),
        "no learning_rate: take lr",
    ),
    "groups": (
        lambda: dp.fit(nn.Linear(1, 1), None, None, None, groups=[1]),
        "no groups: take users",
    ),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_words_of_others_are_answered_with_ours(name: str) -> None:
    call, words = ANSWERS[name]
    with pytest.raises(TypeError, match=words):
        call()


def test_words_that_nobody_uses_are_left_to_python() -> None:
    for call in (lambda: LogisticRegression(colour=1), lambda: dp.Budget(1.0, 1e-5, colour=1)):
        with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
            call()
    with pytest.raises(TypeError, match="unexpected keyword argument 'batch_size'"):
        LogisticRegression(batch_size=10)  # which has no plan with batches


def test_no_word_of_ours_is_taken_for_another() -> None:
    """A keyword that a callable takes is never answered."""
    for name in SETTINGS:
        settings = set(type(make(name)).__dataclass_fields__)
        _words.require_ours(name, settings, settings)
        copied = clone(make(name))
        assert copied.get_params() == make(name).get_params()


def test_c_and_reg_are_one_penalty() -> None:
    """C sum l + |w|^2 / 2 has the minimizer of sum l + reg/2 |w|^2 at reg = 1 / C, and alpha that of reg = alpha."""
    from sklearn.linear_model import LogisticRegression as Sklearn
    from sklearn.linear_model import Ridge as SklearnRidge

    draws = np.random.default_rng(0)
    X = draws.uniform(-1, 1, (300, 2))
    y = np.where(draws.random(300) < 1 / (1 + np.exp(-3 * X[:, 0])), 1, 0)
    w = torch.from_numpy(Sklearn(C=0.2, fit_intercept=False, tol=1e-10).fit(X, y).coef_[0])
    slopes = -torch.sigmoid(
        -torch.from_numpy(2 * y - 1) * (torch.from_numpy(X) @ w)
    ) * torch.from_numpy(2 * y - 1)
    assert torch.allclose(
        slopes @ torch.from_numpy(X) + w / 0.2, torch.zeros(2, dtype=torch.float64), atol=1e-5
    )
    w = torch.from_numpy(SklearnRidge(alpha=3.0, fit_intercept=False).fit(X, X[:, 0]).coef_)
    residuals = torch.from_numpy(X) @ w - torch.from_numpy(X[:, 0])
    assert torch.allclose(
        residuals @ torch.from_numpy(X) + 3.0 * w, torch.zeros(2, dtype=torch.float64), atol=1e-9
    )


def test_all_missing_settings_are_named_at_once() -> None:
    with pytest.raises(
        ValueError, match=r"n, bound_x and classes must be given: n, a public number"
    ):
        LogisticRegression(adjacency="add_remove").fit(np.zeros((3, 2)), [0, 1, 0])
    with pytest.raises(ValueError, match=r"^bound_x and classes must be given: "):
        LogisticRegression().fit(np.zeros((3, 2)), [0, 1, 0])  # n is that of the table
    with pytest.raises(ValueError, match="n, bound_x and bound_y must be given"):
        Ridge().plan(2)
    with pytest.raises(ValueError, match=r"^n must be given: "):
        Ridge(bound_x=1.0, bound_y=1.0).plan(2)
