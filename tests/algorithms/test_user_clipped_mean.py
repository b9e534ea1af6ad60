"""User-level clipping: clip by user, votes of users."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import torch_dpsco as dp
from tests.algorithms.users import observe, released
from torch_dpsco.accounting.designs import Draw, Full
from torch_dpsco.accounting.events import ADD_REMOVE, CLIP_UNITS, REPLACE_ONE, Gaussian
from torch_dpsco.algorithms.clips import AdaptiveClipped
from torch_dpsco.algorithms.oracles import UserClipped
from torch_dpsco.errors import SequenceError
from torch_dpsco.losses import Squared
from torch_dpsco.rows import DenseBlock, GradBatch
from torch_dpsco.step.oracle import Clipped, HolderClipped

CLIP = 0.5
BAD = [math.nan, math.inf, -math.inf, 3e38, 1e300, 5e-324]


def make(n=4, noise=0.0, **others):
    return UserClipped(Clipped(CLIP, noise, batch_size=n), n_users=100, **others)


def exactly(oracle, rows, users=None):
    return released(oracle, rows, users).mean[0].double().clone()


def test_the_answer_is_the_mean_of_clipped_means():
    generator = torch.Generator().manual_seed(0)
    rows, users = (
        torch.randn(20, 3, generator=generator).double(),
        torch.randint(4, (20,), generator=generator),
    )
    got = exactly(make(), rows, users)
    means = torch.stack([rows[users == user].mean(0) for user in range(4)])
    factors = (CLIP / torch.linalg.vector_norm(means, dim=1)).clamp(max=1.0)
    torch.testing.assert_close(got, (factors[:, None] * means).sum(0) / 4, rtol=1e-3, atol=1e-3)
    assert (factors < 1).any()


values = st.one_of(st.floats(-3, 3), st.sampled_from([*BAD, CLIP, -CLIP, 0.0]))


@pytest.mark.slow
@settings(max_examples=120, deadline=None)
@given(st.integers(1, 3), st.integers(0, 3), st.data())
def test_no_user_moves_the_mean_past_the_sensitivity(dim, more, data):
    def rows(n):
        return torch.tensor(
            data.draw(
                st.lists(st.lists(values, min_size=dim, max_size=dim), min_size=n, max_size=n)
            )
        )

    common = torch.rand(6, dim, generator=torch.Generator().manual_seed(0)).double()
    ids = torch.tensor([1, 1, 2, 2, 2, 3])
    answers = []
    for size in (more, data.draw(st.integers(1, 3))):  # rows of user 0; none with size 0
        own = rows(size).double().reshape(size, dim)
        both = torch.cat([own, common])
        answers.append(
            exactly(make(), both, torch.cat([torch.zeros(size, dtype=torch.int64), ids]))
        )
    moved = float(torch.linalg.vector_norm(answers[0] - answers[1]))
    oracle = make()
    observe(oracle, common[:1])
    assert moved <= oracle.sensitivity(REPLACE_ONE if more else ADD_REMOVE)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("adjacency", "others"), [(ADD_REMOVE, ()), (REPLACE_ONE, (-9.0,))])
def test_the_sensitivity_is_reached(dtype, adjacency, others):
    oracle = make()
    full = exactly(oracle, torch.tensor([[9.0], [0.25]], dtype=dtype))
    rest = exactly(oracle, torch.tensor([[0.25], *[[v] for v in others]], dtype=dtype))
    moved = float((full - rest).abs())
    assert 0.999 < moved / oracle.sensitivity(adjacency) <= 1.0


def test_many_rows_of_one_user_count_as_one_user():
    rows = torch.full((500, 1), 40.0, dtype=torch.float64)
    users = torch.zeros(500, dtype=torch.int64)
    moved = exactly(make(), rows, users)
    assert moved.item() == pytest.approx(CLIP / 4, rel=1e-3)
    assert (
        exactly(make(), rows, torch.arange(500) % 100).item() > 20 * CLIP / 4
    )  # told apart from 100 users


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e300])
def test_users_without_a_usable_mean_contribute_nothing(value):
    rows = torch.tensor([[0.25], [value], [0.25]], dtype=torch.float64)
    assert torch.equal(
        exactly(make(), rows, torch.tensor([0, 1, 1])),
        exactly(make(), rows[:1], torch.tensor([0])),
    )
    few = make(min_items=2)
    assert exactly(
        few, torch.full((3, 1), 0.25).double(), torch.tensor([0, 0, 1])
    ).item() == pytest.approx(0.0625, rel=1e-3)
    assert exactly(make(), torch.zeros(0, 1)).item() == 0.0


def test_an_adaptive_clip_gets_one_vote_of_each_user_and_its_event():
    clipping = AdaptiveClipped(1.0, 1.0, batch_size=40, lr=0.2, count_noise=10.0)
    event, oracle = clipping.event(), UserClipped(clipping, 40)
    design = Full(40)
    assert (
        oracle.charge(design, Draw(40)) == clipping.charge(design, Draw(40)) == (event, 1, False)
    )
    assert (oracle.event(), oracle.batch_size) == (event, 40)
    assert event.sigma == pytest.approx((1.0 + 1.0 / (2 * 10.0) ** 2) ** -0.5)

    def after(items):
        quiet = UserClipped(AdaptiveClipped(1.0, 0.0, batch_size=40, count_noise=0.0), 40)
        rows = torch.tensor([[5.0]] * items + [[0.1]] * 39, dtype=torch.float64)
        released(quiet, rows, torch.tensor([0] * items + list(range(1, 40))))
        return quiet.state()["clip"]

    assert (
        after(1)
        == pytest.approx(after(1000))
        == pytest.approx(math.exp(-0.2 * (19.5 - 0.5) / 40))
    )


def test_a_bound_that_follows_the_iterate_works_for_users():
    oracle = UserClipped(HolderClipped(Squared().problem(bound_x=1.0), 1.0, 4), 10)
    observe(oracle, torch.zeros(4, 1))
    assert oracle.metrics()["clip"] == pytest.approx(1.0)


@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_halved_noise_of_users_is_caught(factor, monkeypatch):
    oracle = make(noise=2.0)
    right = Clipped.noise_std.fget
    monkeypatch.setattr(Clipped, "noise_std", property(lambda self: factor * right(self)))
    noise = released(oracle, torch.zeros(4, 20_000)).mean[0]
    statistic = float((noise.double() / (2.0 * CLIP / 4)).square().sum())
    low, high = stats.chi2.ppf([5e-7, 1 - 5e-7], noise.numel())
    assert bool(low <= statistic <= high) is (factor == 1.0)


def test_the_event_is_in_users_and_amplified_by_their_sampling():
    oracle = make(noise=2.0)
    assert (oracle.unit, oracle.event()) == ("user", Gaussian(2.0, CLIP_UNITS))
    assert dp.Poisson(4, 100).event(oracle.event(), 3).event.q == 0.04


def test_what_cannot_work_is_refused():
    with pytest.raises(ValueError, match="min_items must be"):
        make(min_items=0)
    oracle, clipping = make(), Clipped(1.0, 1.0, 4)
    oracle.open([torch.zeros(1)])
    with pytest.raises(SequenceError, match="users must be given"):
        oracle.observe(GradBatch([DenseBlock(torch.zeros(1, 1))]))
    UserClipped(clipping, 4)
    with pytest.raises(SequenceError, match="another optimizer"):
        UserClipped(clipping, 4)
