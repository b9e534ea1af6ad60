"""Shuffled means: the law of their bits, what one record moves, and what the ledger is told."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import TensorDataset

import torch_dpsco as dp
from tests.problems import released
from tests.reference.papers.heavy_tailed import median_of_means, scalar_sum_variance, vector_sum
from tests.shuffle_model.exact_shuffle import delta_bounds
from torch_dpsco.accounting.analysis.rdp import zcdp_epsilon
from torch_dpsco.accounting.events import (
    ADD_REMOVE,
    REPLACE_ONE,
    ZCDP,
    ZERO_OUT,
    NonPrivate,
)
from torch_dpsco.errors import AdjacencyError, PrivacyError, SequenceError
from torch_dpsco.rows import DenseBlock, GradBatch
from torch_dpsco.rules import SGD
from torch_dpsco.shuffle_model import (
    COORDINATES,
    VECTORS,
    ShuffledClipped,
    ShuffledMedian,
    ShuffleParameters,
    oracles,
    shuffle_cost,
)
from torch_dpsco.shuffle_model.oracles import binomial_noise

CLIP = 1.5
ADVERSARIAL = [
    math.nan,
    math.inf,
    -math.inf,
    3e38,
    -3e38,
    1e-45,
    -1e-45,
    0.0,
    CLIP,
    -CLIP,
    1e30,
    0.7,
]
SILENT = ShuffleParameters(7, 0)


def batch(*blocks):
    return GradBatch([DenseBlock(block) for block in blocks])


def make(kind, parameters=SILENT, size=6, dim=3, groups=2, clip=CLIP, **more):
    if kind == "clipped":
        return ShuffledClipped(clip, parameters, size, dim, **more)
    return ShuffledMedian(clip, parameters, size, dim, groups, **more)


def counts_of(oracle, rows, seed=0):
    """Returns the counts that a shuffler delivers, with the generator's seed."""
    oracle.open([torch.zeros(rows.shape[1])])
    for part in rows.split(4):
        oracle.observe(batch(part))
    return oracle.counts(torch.Generator().manual_seed(seed))


# -- what is released -------------------------------------------------------------------------------------------------


def test_the_clipped_mean_is_the_vector_sum_of_clipped_rows():
    rows = torch.tensor(
        [[0.5, -0.25], [0.75, 1.0], [30.0, 40.0], [math.inf, 0.0]], dtype=torch.float64
    )
    clipped = torch.tensor([[0.5, -0.25], [0.75, 1.0], [0.9, 1.2], [0.0, 0.0]])
    oracle = make("clipped", ShuffleParameters(2**40, 0), 4, 2)
    got = counts_of(oracle, rows).double() / 2**40
    expected = (
        vector_sum(clipped, CLIP, ShuffleParameters(2**40, 0), torch.Generator()) / (2 * CLIP)
        + 4 / 2
    )
    torch.testing.assert_close(got[0], expected, rtol=1e-3, atol=0)
    oracle.open([torch.zeros(2, dtype=torch.float64)])
    oracle.observe(batch(rows))
    mean = oracle.release(torch.Generator()).mean[0]
    torch.testing.assert_close(mean, clipped.double().mean(0), rtol=1e-3, atol=1e-9)


def test_the_median_is_that_of_the_means_of_groups():
    rows = torch.randn(11, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for groups in (1, 2, 3, 5, 11):
        oracle = make("median", ShuffleParameters(2**40, 0), 11, 4, groups)
        got = released(oracle, [torch.zeros(4)], [batch(part) for part in rows.split(4)])
        torch.testing.assert_close(
            got, median_of_means(rows, groups, CLIP), rtol=1e-9, atol=1e-10
        )


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("kind", ["clipped", "median"])
def test_the_mean_is_unbiased_with_the_variance_of_the_protocol(kind):
    size, runs = 6, 3000
    rows = torch.tensor([0.3, -0.2, 0.9, 0.0, 1.0, -1.0], dtype=torch.float64)[:, None]
    parameters = ShuffleParameters(3, 20)
    oracle, generator = make(kind, parameters, size, 1, 1), torch.Generator().manual_seed(3)
    means = []
    for _ in range(runs):
        oracle.open([torch.zeros(1, dtype=torch.float64)])
        oracle.observe(batch(rows))
        means.append(oracle.release(generator).mean[0].item())
    draws = torch.tensor(means, dtype=torch.float64)
    bound = scalar_sum_variance(size, 3, 20, 0.5, 2 * CLIP) / size**2
    assert abs(draws.mean().item() - rows.mean().item()) < 6.5 * math.sqrt(bound / runs)
    assert oracle.noise_std**2 <= bound
    assert oracle.noise_std**2 * 0.8 < draws.var().item() < bound * 1.2


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", ["clipped", "median"])
def test_a_row_that_is_not_finite_is_dropped_whole(kind, bad):
    rows = torch.ones(6, 3)
    zeroed = rows.clone()
    rows[2, 1], zeroed[2] = bad, 0.0
    assert torch.equal(counts_of(make(kind), rows), counts_of(make(kind), zeroed))


@pytest.mark.parametrize("kind", ["clipped", "median"])
def test_rounding_and_noise_come_from_the_generator(kind):
    rows = torch.full((6, 3), 0.1)
    parameters = ShuffleParameters(2, 50)
    same = [counts_of(make(kind, parameters), rows, seed=5) for _ in range(2)]
    assert torch.equal(*same)
    assert not torch.equal(same[0], counts_of(make(kind, parameters), rows, seed=6))
    assert not torch.equal(
        counts_of(make(kind), rows, seed=5), counts_of(make(kind), rows, seed=7)
    )


# -- one record -------------------------------------------------------------------------------------------------------


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("kind", ["clipped", "median"])
@settings(max_examples=150)
@given(
    st.integers(1, 8),
    st.integers(1, 4),
    st.integers(0, 10**6),
    st.integers(1, 40),
    st.data(),
    st.sampled_from([1e-190, 1e-3, CLIP, 1e30]),
)
def test_no_neighbor_moves_a_count_past_the_budget(kind, size, dim, seed, grid, data, clip):
    """With rounding coupled, as in the proof: |s|_2 <= g + sqrt(d) or g sqrt(d), |s_j| <= g, in one group."""
    groups = data.draw(st.integers(1, size)) if kind == "median" else 1
    entry = st.one_of(st.sampled_from(ADVERSARIAL), st.floats(-4, 4).map(lambda x: x * clip))
    rows = clip * torch.randn(
        size, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    place = data.draw(st.integers(0, size - 1))
    pair = [rows.clone(), rows.clone()]
    for table in pair:
        table[place] = torch.tensor(
            data.draw(st.lists(entry, min_size=dim, max_size=dim)), dtype=torch.float64
        )
    make_one = lambda: make(kind, ShuffleParameters(grid, 0), size, dim, groups, clip)  # noqa: E731
    steps = (
        counts_of(make_one(), pair[0], seed) - counts_of(make_one(), pair[1], seed)
    ).double()
    assert steps.abs().max() <= grid
    assert int(steps.any(dim=1).sum()) <= 1
    budget = grid + math.sqrt(dim) if kind == "clipped" else grid * math.sqrt(dim)
    assert torch.linalg.vector_norm(steps) <= budget
    oracle = make_one()
    moved = []
    for table in pair:
        oracle.open([torch.zeros(dim, dtype=torch.float64)])
        oracle.observe(batch(table))
        moved.append(oracle.release(torch.Generator().manual_seed(seed)).mean[0].clone())
    assert torch.linalg.vector_norm(moved[0] - moved[1]) <= oracle.sensitivity(REPLACE_ONE)
    rows[place] = 0.0
    oracle.open([torch.zeros(dim, dtype=torch.float64)])
    oracle.observe(batch(rows))
    nulled = oracle.release(torch.Generator().manual_seed(seed)).mean[0]
    assert torch.linalg.vector_norm(moved[0] - nulled) <= oracle.sensitivity(ZERO_OUT)


def test_opposite_rows_use_the_whole_budget():
    one, other = torch.full((1, 4), 1e9), torch.full((1, 4), -1e9)
    boxes = [
        counts_of(make("median", ShuffleParameters(8, 0), 1, 4, 1), rows)
        for rows in (one, other)
    ]
    assert (boxes[0] - boxes[1]).tolist() == [[8] * 4]
    balls = [
        counts_of(make("clipped", ShuffleParameters(8, 0), 1, 4), rows, seed=1)
        for rows in (one, other)
    ]
    assert torch.linalg.vector_norm((balls[0] - balls[1]).double()) <= 8 + 2
    assert (balls[0] - balls[1]).min() >= 3


def test_a_record_is_hidden_by_the_noise_of_its_group_alone():
    parameters = ShuffleParameters(4, 3000)
    event = make("median", parameters, 12, 3, 4).event()
    assert event.rho == shuffle_cost(COORDINATES, parameters, 3, 3).rho
    assert event.rho > 3.9 * shuffle_cost(COORDINATES, parameters, 12, 3).rho


# -- noise and cost ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["clipped", "median"])
def test_halved_noise_bits_are_caught(kind, monkeypatch):
    parameters, dim = ShuffleParameters(4, 1000), 20_000

    def ratio():
        monkeypatch.setattr(
            ShuffledClipped, "cost", lambda self: shuffle_cost(VECTORS, parameters, 6, 1)
        )
        monkeypatch.setattr(
            ShuffledMedian, "cost", lambda self: shuffle_cost(VECTORS, parameters, 6, 1)
        )
        oracle = make(kind, parameters, 6, dim, 2)
        counts = counts_of(oracle, torch.zeros(6, dim)).double()
        return counts.var(dim=1) / (oracle.group_size * 1000 / 4)

    assert (ratio() - 1).abs().max() < 0.05
    monkeypatch.setattr(
        oracles, "binomial_noise", lambda trials, *a: binomial_noise(trials // 2, *a)
    )
    assert (ratio() - 0.5).abs().max() < 0.05


def test_calibrated_oracles_meet_their_target_exactly():
    for oracle, shifts in (
        (
            ShuffledClipped.calibrated(1.0, 200, 3, epsilon=1.0, delta=1e-5, grid=8),
            [[8, 4, 4], [5, 5, 5]],
        ),
        (
            ShuffledMedian.calibrated(1.0, 200, 3, 4, epsilon=1.0, delta=1e-5, grid=8),
            [[8, 8, 8]],
        ),
    ):
        event = oracle.event()
        assert zcdp_epsilon(event.rho, (1e-5 - event.delta) / (1 - event.delta)) <= 1.0
        accountant = dp.Accountant()
        accountant.record(event)
        for adjacency in (REPLACE_ONE, ZERO_OUT):
            assert accountant.get_epsilon(1e-5, adjacency=adjacency) <= 1.0
        trials = oracle.group_size * oracle.parameters.noise_bits
        for moved in shifts:
            lower, upper = delta_bounds(trials, 0.5, moved, 1.0, step=1e-4)
            assert 0 < lower <= upper <= 1e-5


def test_the_event_is_approximate_zcdp_and_without_bits_no_privacy():
    for kind in ("clipped", "median"):
        event = make(kind, ShuffleParameters(4, 500)).event()
        assert isinstance(event, ZCDP)
        assert set(event.adjacencies) == {REPLACE_ONE, ZERO_OUT}
        assert isinstance(make(kind).event(), NonPrivate)
        oracle = make(kind)
        oracle.open([torch.zeros(3)])
        with pytest.raises(AdjacencyError):
            oracle.sensitivity(ADD_REMOVE)
    accountant = dp.Accountant()
    accountant.record(make("clipped", ShuffleParameters(4, 500)).event())
    with pytest.raises(AdjacencyError):
        accountant.get_epsilon(1e-5, adjacency=ADD_REMOVE)


def test_dishonest_users_cost_privacy():
    parameters = ShuffleParameters(4, 1000)
    for kind in ("clipped", "median"):
        honest, half = (
            make(kind, parameters, 8, honest_fraction=share).event() for share in (1.0, 0.5)
        )
        assert half.rho == pytest.approx(2 * honest.rho, rel=0.02)


def optimizer(model, design, oracle):
    return dp.PrivateOptimizer(model.parameters(), 0.1, oracle=oracle, rule=SGD(), design=design)


@pytest.mark.parametrize("kind", ["clipped", "median"])
def test_one_pass_costs_one_release(kind):
    oracle = make(kind, ShuffleParameters(4, 3000), 4, 3)
    event = oracle.event()
    model = dp.attach(nn.Linear(2, 1))
    opt = optimizer(model, dp.Disjoint(4, 12), oracle)
    for x, y in opt.loader(TensorDataset(torch.randn(12, 2), torch.randn(12, 1))):
        opt.zero_grad()
        (model(x) - y).square().mean().backward()
        opt.step()
    assert opt.accountant.get_epsilon(1e-5) == pytest.approx(
        zcdp_epsilon(event.rho, 1e-5), rel=1e-4
    )


@pytest.mark.parametrize("kind", ["clipped", "median"])
def test_no_amplification_by_sampling_is_claimed(kind):
    for design in (dp.Fixed(6, 12), dp.Poisson(6, 12)):
        with pytest.raises(AdjacencyError):
            optimizer(nn.Linear(2, 1), design, make(kind, ShuffleParameters(4, 500)))


# -- contract ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["clipped", "median"])
@pytest.mark.parametrize("size", [0, 5, 7])
def test_a_batch_of_another_size_is_refused(kind, size):
    oracle = make(kind, ShuffleParameters(4, 500))
    oracle.open([torch.zeros(3)])

    def whole_batch():
        if size:
            oracle.observe(batch(torch.ones(size, 3)))
        oracle.release(torch.Generator())

    with pytest.raises(SequenceError, match="exactly 6 rows"):
        whole_batch()
    oracle.discard()
    oracle.observe(batch(torch.ones(6, 3)))
    assert oracle.release(torch.Generator()).mean[0].shape == (3,)


def test_a_query_of_another_dimension_is_refused():
    with pytest.raises(ValueError, match="dim must be 4"):
        make("clipped").open([torch.zeros(2, 2)])
    oracle = make("clipped")
    with pytest.raises(SequenceError, match="no logical batch was opened"):
        oracle.observe(batch(torch.ones(1, 3)))
    oracle.open([torch.zeros(3)])
    with pytest.raises(ValueError, match="rows must be of shapes"):
        oracle.observe(batch(torch.ones(1, 2)))


@pytest.mark.parametrize("kind", ["clipped", "median"])
def test_settings_say_that_the_model_is_simulated(kind):
    oracle = make(kind, ShuffleParameters(4, 500, 0.25), honest_fraction=0.9)
    assert oracle.settings() == {
        "oracle": {"clipped": "ShuffledClipped", "median": "ShuffledMedian"}[kind],
        "clip": CLIP,
        "grid": 4,
        "noise_bits": 500,
        "noise_probability": 0.25,
        "dim": 3,
        "groups": {"clipped": 1, "median": 2}[kind],
        "failure": 1e-10,
        "honest_fraction": 0.9,
        "model": "shuffle model, simulated centrally; honest users assumed",
    }
    assert oracle.metrics() == {"clip": CLIP, "noise_std": oracle.noise_std}
    for name in (
        "clip",
        "parameters",
        "groups",
        "dim",
        "failure",
        "honest_fraction",
        "group_size",
        "noise_std",
    ):
        with pytest.raises(PrivacyError, match="fixed at construction"):
            setattr(oracle, name, 1)


@pytest.mark.parametrize("kind", ["clipped", "median"])
def test_copies_have_batches_of_their_own(kind):
    oracle = make(kind)
    oracle.open([torch.zeros(3)])
    oracle.observe(batch(torch.ones(6, 3)))
    twin = copy.deepcopy(oracle)
    twin.discard()
    assert oracle.counts(torch.Generator()).any()
    with pytest.raises(SequenceError, match="exactly 6 rows"):
        twin.counts(torch.Generator())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"clip": 0.0}, "clip must be > 0"),
        ({"clip": 1e300}, "clip must be in"),
        ({"size": 0}, "batch_size must be"),
        ({"dim": 0}, "dim must be"),
        ({"groups": 7}, "groups must be <= batch_size=6"),
        ({"failure": 0.0}, "failure must be"),
        ({"honest_fraction": 1.5}, "honest_fraction must be"),
        ({"parameters": ShuffleParameters(4, 2**53)}, "counts below 2"),
    ],
)
def test_bad_numbers_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        make("median", **arguments)
