"""The coordinate-wise median of means: groups, medians, noise on either side, and how far one record moves it."""

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
from tests.reference.papers.heavy_tailed import median_of_means
from torch_dpsco.accounting.events import ADD_REMOVE, REPLACE_ONE, ZERO_OUT
from torch_dpsco.algorithms.oracles import Coordinatewise, clipped_rows, medians
from torch_dpsco.errors import AdjacencyError, PrivacyError, SequenceError
from torch_dpsco.rows import DenseBlock, FactoredBlock, GradBatch
from torch_dpsco.rules import SGD

CLIP = 1.5
NOISES = ["before_median", "after_median"]
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
    7.0,
]


def batch(*blocks):
    return GradBatch([DenseBlock(block) for block in blocks])


def answer(rows, groups, *, size=None, noise="before_median", splits=(), clip=CLIP):
    """Returns what an oracle without noise releases for rows (B, d) of one parameter."""
    oracle = Coordinatewise(clip, 0.0, len(rows) if size is None else size, groups, noise=noise)
    parts = rows.tensor_split(splits) if splits else [rows]
    return released(oracle, [torch.zeros(rows.shape[1])], [batch(part) for part in parts])


def literal(rows, groups, clip=CLIP):
    """The definition, by Python's own arithmetic."""
    size = len(rows) // groups
    clean = [
        [0.0] * len(row) if not all(map(math.isfinite, row)) else row
        for row in rows.double().tolist()
    ]
    out = []
    for column in zip(*clean, strict=True):
        means = sorted(
            math.fsum(min(max(v, -clip), clip) for v in column[g * size : (g + 1) * size]) / size
            for g in range(groups)
        )
        middle = means[(groups - 1) // 2 : groups // 2 + 1]
        out.append(sum(middle) / len(middle))
    return torch.tensor(out, dtype=torch.float64)


# -- what is released -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=60)
@given(st.integers(1, 13), st.integers(1, 4), st.data())
def test_groups_are_consecutive_and_medians_those_of_the_definition(rows, dim, data):
    groups = data.draw(st.integers(1, rows))
    value = st.one_of(st.floats(-3, 3), st.sampled_from(ADVERSARIAL))
    table = data.draw(
        st.lists(st.lists(value, min_size=dim, max_size=dim), min_size=rows, max_size=rows)
    )
    given_rows = torch.tensor(table, dtype=torch.float64)
    expected = literal(given_rows, groups)
    for noise in NOISES:
        torch.testing.assert_close(
            answer(given_rows, groups, noise=noise), expected, rtol=1e-13, atol=1e-15
        )
    torch.testing.assert_close(
        median_of_means(table, groups, CLIP), expected, rtol=1e-13, atol=1e-15
    )


@given(st.integers(0, 10), st.integers(0, 10), st.integers(1, 10))
def test_physical_batches_do_not_change_the_groups(first, second, groups):
    rows = torch.randn(10, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    splits = sorted((first, second))
    torch.testing.assert_close(
        answer(rows, groups, splits=splits), answer(rows, groups), rtol=1e-14, atol=1e-16
    )


def test_a_tail_that_fills_no_group_is_left_out_and_the_divisor_stays():
    rows = torch.tensor([[1.0], [0.5], [0.25], [0.75], [CLIP]])
    assert answer(rows, 2).item() == pytest.approx((0.75 + 0.5) / 2)
    assert torch.equal(answer(rows[:4], 2, size=5), answer(rows, 2))
    # fewer rows than planned: missing ones are zeros, the divisor is public
    assert answer(rows[:1], 1, size=5).item() == pytest.approx(0.2)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_is_dropped_whole(bad):
    rows = torch.tensor([[1.0, bad], [1.0, 1.0]])
    assert answer(rows, 1).tolist() == [0.5, 0.5]
    two = batch(torch.tensor([[1.0], [1.0]]), torch.tensor([[bad], [1.0]]))
    oracle = Coordinatewise(CLIP, 0.0, 2, 1)
    assert released(oracle, [torch.zeros(1), torch.zeros(1)], [two]).tolist() == [0.5, 0.5]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_huge_rows_of_every_precision_are_clipped(dtype):
    rows = torch.tensor([[torch.finfo(dtype).max, -torch.finfo(dtype).max]], dtype=dtype)
    assert answer(rows, 1).tolist() == [CLIP, -CLIP]


def test_factored_rows_are_clipped_by_coordinate_too():
    acts, backprops = torch.tensor([[2.0, -0.25], [0.5, 0.0]]), torch.tensor([[1.0], [2.0]])
    block = FactoredBlock(acts, backprops, bias=False)
    got = released(Coordinatewise(1.0, 0.0, 2, 2), [torch.zeros(1, 2)], [GradBatch([block])])
    assert got.tolist() == [1.0, -0.125]


def test_unscaled_rows_are_clipped_after_the_scale_is_removed():
    oracle = Coordinatewise(1.0, 0.0, 1, 1)
    assert (
        released(oracle, [torch.zeros(1)], [batch(torch.tensor([[4.0]])).unscaled(8.0)]).item()
        == 0.5
    )


def test_medians_of_large_numbers_do_not_overflow():
    assert medians(torch.tensor([1.7e308, 1.7e308], dtype=torch.float64)).item() == 1.7e308
    assert clipped_rows([torch.full((1, 1), 3e38)], 1e200).item() == pytest.approx(3e38)


# -- one record -------------------------------------------------------------------------------------------------------


def moves(one, other, groups, noise, clip=CLIP):
    return float(
        torch.linalg.vector_norm(
            answer(one, groups, noise=noise, clip=clip)
            - answer(other, groups, noise=noise, clip=clip)
        )
    )


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("noise", NOISES)
@settings(max_examples=120)
@given(
    st.integers(1, 9),
    st.integers(1, 3),
    st.integers(0, 10**6),
    st.sampled_from(ADVERSARIAL),
    st.sampled_from(ADVERSARIAL),
    st.sampled_from([1e-190, 1e-3, CLIP, 1e30]),
    st.data(),
)
def test_no_neighbor_moves_the_release_past_the_sensitivity(
    noise, size, dim, seed, one, other, clip, data
):
    groups = data.draw(st.integers(1, size))
    rows = clip * (
        3
        * torch.randn(
            size, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
        )
    )
    place = data.draw(st.integers(0, size - 1))
    pair = [rows.clone(), rows.clone()]
    pair[0][place], pair[1][place] = one, other
    oracle = Coordinatewise(clip, 0.0, size, groups, noise=noise)
    oracle.open([torch.zeros(dim)])
    assert moves(*pair, groups, noise, clip) <= oracle.sensitivity(REPLACE_ONE)
    zeroed = rows.clone()
    zeroed[place] = 0.0
    assert moves(pair[0], zeroed, groups, noise, clip) <= oracle.sensitivity(ZERO_OUT)


@pytest.mark.parametrize("groups", [1, 3, 5])
def test_the_sensitivity_is_attained(groups):
    rows = torch.zeros(15, 4)
    size = 15 // groups
    # half of the other groups lie above, half below: the group of the record is the median
    for g in range(1, groups):
        rows[g * size : (g + 1) * size] = CLIP * (-1) ** g
    pair = [rows.clone(), rows.clone()]
    pair[0][0], pair[1][0] = 1e9, -1e9
    oracle = Coordinatewise(CLIP, 0.0, 15, groups)
    oracle.open([torch.zeros(4)])
    bound = oracle.sensitivity(REPLACE_ONE)
    assert bound == pytest.approx(2 * CLIP * groups * 2 / 15, rel=1e-12)
    assert moves(*pair, groups, "before_median") == pytest.approx(bound, rel=1e-12)


def test_a_record_touches_one_group_only():
    """The premise of noise before the median: of the vector of group means one moves."""
    rows = torch.randn(12, 3, generator=torch.Generator().manual_seed(1))
    for place in range(12):
        other = rows.clone()
        other[place] = math.inf
        sums = []
        for table in (rows, other):
            oracle = Coordinatewise(CLIP, 0.0, 12, 4)
            oracle.open([torch.zeros(3)])
            for part in table.split(5):
                oracle.observe(batch(part))
            sums.append(oracle._sums.clone())
        changed = (sums[0] != sums[1]).any(dim=1)
        assert changed.tolist() == [g == place // 3 for g in range(4)]


def test_more_rows_than_the_batch_size_are_refused():
    oracle = Coordinatewise(CLIP, 0.0, 4, 2)
    oracle.open([torch.zeros(1)])
    oracle.observe(batch(torch.ones(3, 1)))
    with pytest.raises(SequenceError, match="at most 4 rows"):
        oracle.observe(batch(torch.ones(2, 1)))


# -- noise ------------------------------------------------------------------------------------------------------------


def noise_of(oracle, dim, runs=1):
    oracle.open([torch.zeros(dim, dtype=torch.float64)])
    generator = torch.Generator().manual_seed(2)
    return torch.stack([oracle.release(generator).mean[0].clone() for _ in range(runs)])


@pytest.mark.parametrize("groups", [1, 5])
@pytest.mark.parametrize("noise", NOISES)
def test_noise_has_the_scale_that_the_ledger_was_told(groups, noise):
    oracle = Coordinatewise(CLIP, 2.0, 10, groups, noise=noise)
    draws = noise_of(oracle, 200_000)
    expected = oracle.noise_std
    if noise == "before_median" and groups == 5:
        expected *= math.sqrt(0.2868)  # variance of the median of five normal numbers
    assert draws.std().item() == pytest.approx(expected, rel=0.02)
    event = oracle.event()
    for adjacency in (ZERO_OUT, REPLACE_ONE):
        assert oracle.noise_std / oracle.sensitivity(adjacency) == pytest.approx(
            event.sigma / event.sensitivity(adjacency), rel=1e-12
        )
        assert oracle.noise_std / oracle.sensitivity(
            adjacency
        ) >= event.sigma / event.sensitivity(adjacency)


def test_halved_noise_of_group_means_is_caught(monkeypatch):
    def ratio():
        oracle = Coordinatewise(CLIP, 2.0, 4, 1)
        return noise_of(oracle, 100_000).std().item() / oracle.sensitivity(ZERO_OUT)

    assert ratio() == pytest.approx(2.0, rel=0.02)
    std = Coordinatewise.noise_std.fget
    monkeypatch.setattr(Coordinatewise, "noise_std", property(lambda self: std(self) / 2))
    assert ratio() == pytest.approx(1.0, rel=0.02)


@pytest.mark.slow
def test_each_group_and_coordinate_has_noise_of_its_own():
    draws = noise_of(Coordinatewise(CLIP, 1.0, 6, 3), 4, runs=4000)
    correlations = torch.corrcoef(draws.t())
    assert (correlations - torch.eye(4, dtype=torch.float64)).abs().max() < 0.1
    one_group = noise_of(Coordinatewise(CLIP, 1.0, 2, 1), 4, runs=4000).var()
    assert draws.var() / one_group == pytest.approx(
        0.4487, rel=0.1
    )  # the median of three normal numbers


def test_add_remove_is_refused_since_groups_are_positional():
    oracle = Coordinatewise(CLIP, 1.0, 4, 2)
    oracle.open([torch.zeros(1)])
    for refused in (oracle.sensitivity, oracle.event().sensitivity):
        with pytest.raises(AdjacencyError):
            refused(ADD_REMOVE)


def optimizer(model, design, oracle):
    return dp.PrivateOptimizer(model.parameters(), 0.1, oracle=oracle, rule=SGD(), design=design)


def test_samplers_that_reorder_batches_are_refused():
    """Fixed-size samples are sorted: a swap shifts the rows between, and with them several groups."""
    for design in (dp.Fixed(4, 8), dp.Poisson(4, 8)):
        with pytest.raises(AdjacencyError):
            optimizer(nn.Linear(2, 1), design, Coordinatewise(CLIP, 1.0, 4, 2))


def test_one_pass_costs_one_gaussian():
    model = dp.attach(nn.Linear(2, 1))
    opt = optimizer(model, dp.Disjoint(4, 8), Coordinatewise(CLIP, 3.0, 4, 2))
    for x, y in opt.loader(TensorDataset(torch.randn(8, 2), torch.randn(8, 1))):
        opt.zero_grad()
        (model(x) - y).square().mean().backward()
        opt.step()
    assert opt.accountant.get_mu(adjacency="replace_one") == pytest.approx(2 / 3)


# -- contract ---------------------------------------------------------------------------------------------------------


def test_settings_metrics_and_copies():
    oracle = Coordinatewise(CLIP, 2.0, 4, 2)
    assert oracle.metrics() == {}
    expected = {
        "oracle": "Coordinatewise",
        "clip": CLIP,
        "noise_multiplier": 2.0,
        "groups": 2,
        "noise": "before_median",
    }
    assert oracle.settings() == expected
    oracle.open([torch.zeros(3)])
    assert oracle.metrics() == {"clip": CLIP, "noise_std": oracle.noise_std}
    oracle.observe(batch(torch.ones(4, 3)))
    twin = copy.deepcopy(oracle)
    twin.discard()
    assert oracle._n_rows == 4
    assert twin._n_rows == 0
    for name in ("clip", "groups", "noise_multiplier", "noise", "group_size"):
        with pytest.raises(PrivacyError, match="fixed at construction"):
            setattr(oracle, name, 1)


def test_calls_before_open_and_foreign_shapes_are_refused():
    oracle = Coordinatewise(CLIP, 1.0, 4, 2)
    for early in (
        lambda: oracle.observe(batch(torch.ones(1, 1))),
        lambda: oracle.release(torch.Generator()),
    ):
        with pytest.raises(SequenceError, match="no logical batch was opened"):
            early()
    with pytest.raises(SequenceError, match="no logical batch was opened"):
        oracle.sensitivity(ZERO_OUT)
    oracle.open([torch.zeros(2)])
    with pytest.raises(ValueError, match="rows must be of shapes"):
        oracle.observe(batch(torch.ones(1, 3)))


def test_releases_forget_the_batch_and_keep_shapes_and_precision():
    oracle = Coordinatewise(CLIP, 0.0, 1, 1)
    oracle.open([torch.zeros(2, 1), torch.zeros(())])
    oracle.observe(batch(torch.ones(1, 2, 1), torch.ones(1)))
    means = oracle.release(torch.Generator()).mean
    assert [part.shape for part in means] == [(2, 1), ()]
    assert {part.dtype for part in means} == {torch.float32}
    assert all(part.eq(1).all() for part in means)
    assert not any(part.any() for part in oracle.release(torch.Generator()).mean)
    oracle.open([torch.zeros(1, dtype=torch.float64)])
    assert oracle.release(torch.Generator()).mean[0].dtype == torch.float64


def test_clips_that_would_overflow_are_refused():
    for clip in (1.01e200, 0.99e-200):
        with pytest.raises(ValueError, match="clip must be in"):
            Coordinatewise(clip, 1.0, 4, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0.0, 1.0, 4, 2), "clip must be > 0"),
        ((1.0, -1.0, 4, 2), "noise_multiplier must be >= 0"),
        ((1.0, 1.0, 0, 1), "batch_size must be"),
        ((1.0, 1.0, 4, 0), "groups must be"),
        ((1.0, 1.0, 4, 5), "groups must be <= batch_size=4"),
    ],
)
def test_bad_numbers_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        Coordinatewise(*arguments)
    with pytest.raises(ValueError, match="noise must be one of"):
        Coordinatewise(1.0, 1.0, 4, 2, noise="median")
