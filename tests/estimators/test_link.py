"""Log-odds of clipped gradients: the map undoes the clip, keeps order and sign, and is what models answer with."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torch_dpsco.estimators import LogisticRegression
from torch_dpsco.estimators.link import Link, log_odds
from torch_dpsco.estimators.preparation import Preparation
from torch_dpsco.losses import Logistic
from torch_dpsco.losses.table import ResidualClipped

SCORES = st.floats(-30.0, 30.0)
LIMITS = st.floats(0.5, 2.0)


@given(score=SCORES, limit=LIMITS)
def test_the_share_of_the_log_odds_is_where_the_clipped_loss_is_least(
    score: float, limit: float
) -> None:
    """Of records alike, a share p of which is +1, the slopes at the score cancel."""
    loss = ResidualClipped(Logistic(), clip=0.7).of_norms(torch.full((2,), 0.7 / limit).double())
    scores = torch.full((2,), score).double()
    yes, no = loss.derivative(scores, torch.tensor([1.0, -1.0]).double()).tolist()
    odds = float(log_odds(np.array([score]), np.array([limit]))[0])
    share = 1 / (1 + math.exp(-odds))
    assert share * yes + (1 - share) * no == pytest.approx(0.0, abs=1e-7 * max(abs(yes), no))


@given(first=SCORES, second=SCORES, limit=st.floats(0.0, 2.0))
def test_order_and_sign_are_kept_and_odds_are_between_half_the_score_and_all_of_it(
    first: float, second: float, limit: float
) -> None:
    one, other = log_odds(np.array([first, second]), np.array([limit, limit]))
    low, high = sorted((abs(first) / 2, abs(first)))
    assert low * (1 - 1e-12) - 1e-12 <= abs(one) <= high * (1 + 1e-12) + 1e-12
    assert one * first >= 0
    if first < second - 1e-6:
        assert one < other


def test_shares_of_records_alike_come_back_and_scores_are_further_out() -> None:
    X = np.repeat([[-1.0], [1.0]], 10_000, axis=0)
    y = np.r_[np.arange(10_000) % 10 == 0, np.arange(10_000) % 10 != 0].astype(int)
    model = LogisticRegression(
        epsilon=20.0,
        delta=1e-5,
        bound_x=1.0,
        classes=(0, 1),
        residual_clip=0.5,
        prepare=None,
        fit_intercept=False,
        mechanism="objective",
    ).fit(X, y)
    assert model.predict_proba([[1.0]])[0, 1] == pytest.approx(0.9, abs=0.01)
    assert model.decision_function([[1.0]])[0] == pytest.approx(math.log(9), abs=0.1)
    assert model.coef_[0, 0] > math.log(9) + 0.4


@pytest.mark.parametrize("how", ["clip", "groups"])
def test_without_a_clip_log_odds_are_scores(how: str) -> None:
    X = np.linspace(-1, 1, 400).reshape(-1, 1)
    y = (X[:, 0] > 0).astype(int)
    clip = {"residual_clip": None} if how == "clip" else {}
    model = LogisticRegression(epsilon=5.0, bound_x=1.0, classes=(0, 1), **clip)
    model.fit(X, y, groups=None if how == "clip" else np.arange(400))
    scores = X @ model.coef_[0] + model.intercept_
    np.testing.assert_allclose(model.decision_function(X), scores, rtol=1e-9, atol=1e-12)


def test_rows_are_as_long_as_the_fit_saw_them() -> None:
    """A row beyond the radius is shrunk, constant and all; at the center no slope was cut."""
    units = Preparation(1.0, center=(2.0,), scale=(0.5,), intercept=0.3, whole=True, before=9.0)
    link = Link(0.5 * units.bound, units)
    odds = link(np.full((3, 1), 2.0), np.array([[2.0], [2.5], [7.0]]))[:, 0]
    beyond = 0.5 * units.bound / math.hypot(1.0, 0.03)  # ten radii away: a tenth is left
    cut = log_odds(np.full(2, 2.0), np.array([0.5, beyond]))
    assert odds == pytest.approx([2.0, *cut], rel=1e-9)


@pytest.mark.parametrize("before", [3.0, math.inf])
def test_a_link_comes_back_from_its_numbers(before: float) -> None:
    link = Link(0.5, Preparation(1.0, center=(2.0, 1.0), intercept=0.3, before=before))
    assert Link.from_dict(link.to_dict()) == link
