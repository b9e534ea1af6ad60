"""The adaptive clip: votes and clipped rows move by no more than the one event says, and the clip finds its target."""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
from scipy import stats
from torch import nn

import torch_dpsco as dp
from tests.problems import gradients, release_in_float64
from torch_dpsco.accounting.events import ADJACENCIES, CLIP_UNITS, clipped_gaussian
from torch_dpsco.algorithms import clips as adaptive
from torch_dpsco.algorithms.clips import AdaptiveClipped, votes
from torch_dpsco.errors import InfeasibleError, UtilityWarning
from torch_dpsco.rows import DenseBlock, GradBatch

LENGTHS = [
    0.0,
    1e-45,
    1e-13,
    1e-5,
    0.5,
    0.9,
    1.0,
    1.1,
    2.0,
    1e19,
    3e38,
    math.inf,
    -math.inf,
    math.nan,
]
TARGETS = [0.1, 0.5, 0.9]


def batch(lengths: list[float], dim: int = 1) -> GradBatch:
    direction = torch.ones(dim) / math.sqrt(dim)
    return GradBatch(
        [DenseBlock(torch.tensor(lengths, dtype=torch.float32)[:, None] * direction)]
    )


def exact(size: int = 4, target: float = 0.5, **settings: float) -> AdaptiveClipped:
    """An oracle without noise."""
    return AdaptiveClipped(1.0, 0.0, size, target, **({"count_noise": 0.0} | settings))


def sums(oracle: AdaptiveClipped, rows: GradBatch, dim: int = 1) -> tuple[torch.Tensor, float]:
    """Returns the noiseless sum of clipped rows, and that of the votes as the next clip shows it."""
    oracle.restore({"clip": 1.0})
    oracle.open([torch.zeros(dim)])
    if len(rows):
        oracle.observe(rows)
    release_in_float64(oracle)
    mean = oracle.release(torch.Generator()).mean[0].clone()
    return mean * oracle.batch_size, -math.log(
        oracle.state()["clip"]
    ) / oracle.lr * oracle.batch_size


def joint_moves(
    adjacency: str, target: float, dim: int = 1, z: float = 0.7, s: float = 1.3
) -> list[float]:
    """Returns by how many noise standard deviations the joint release moves, over what the event says."""
    noisy = AdaptiveClipped(1.0, z, 4, target, count_noise=s)
    noisy.open([torch.zeros(dim)])
    mean_std = noisy.noise_std * noisy.batch_size
    votes_std = s / noisy._unit * noisy.count_sensitivity
    oracle = exact(target=target)

    def with_record(length: float | None) -> tuple[torch.Tensor, float]:
        return sums(
            oracle,
            batch([*([] if length is None else [length]), 0.3, -1.0, 5.0, math.nan], dim),
            dim,
        )

    records = [*LENGTHS, *(-length for length in LENGTHS)]
    base = {"add_remove": [None], "zero_out": [0.0], "replace_one": records}[adjacency]
    limit = noisy.event().sensitivity(adjacency) / noisy.event().sigma
    found = []
    for a, b in itertools.product(map(with_record, base), map(with_record, records)):
        distance = math.hypot(float((a[0] - b[0]).norm()) / mean_std, (a[1] - b[1]) / votes_std)
        found.append(distance / limit)
    return found


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("adjacency", ADJACENCIES)
def test_the_event_is_that_of_mean_and_votes_together(adjacency, target):
    for dim, z, s in ((1, 0.7, 1.3), (500, 0.7, 1.3), (1, 2.0, 2.1), (1, 0.7, 50.0)):
        worst = max(joint_moves(adjacency, target, dim, z, s))
        assert worst <= 1.0
        assert worst > 0.75


@pytest.mark.parametrize("adjacency", ADJACENCIES)
def test_at_the_median_the_event_is_tight(adjacency):
    assert max(joint_moves(adjacency, 0.5)) > 0.97


@pytest.mark.parametrize(
    ("name", "spoiled"),
    [
        # counts of 0 and 1 that are not centered; null rows that count as short ones; no charge for the votes
        ("votes", lambda norms, clip, target, null: (norms <= clip).double()),
        ("votes", lambda norms, clip, target, null: votes(norms, clip, target, 1e-300)),
        ("clipped_gaussian", lambda total: clipped_gaussian(0.7)),
    ],
)
def test_a_spoiled_count_is_caught(monkeypatch, name, spoiled):
    monkeypatch.setattr(adaptive, name, spoiled)
    assert max(joint_moves("zero_out", 0.5)) > 1.0


# -- votes ------------------------------------------------------------------------------------------------------------


def vote(*norms: float, target: float = 0.75) -> list[float]:
    return votes(torch.tensor(norms, dtype=torch.float64), 1.0, target, 1e-12).tolist()


def test_short_rows_vote_for_less_and_long_ones_for_more():
    assert vote(1e-3, 0.5, 0.875, 1.125, 7.0, 1e300) == [0.25, 0.25, 0.25, -0.75, -0.75, -0.75]
    assert vote(1.0) == [pytest.approx(-0.25)]


def test_a_row_without_a_norm_votes_as_a_long_one():
    assert vote(math.nan, math.inf) == [-0.75, -0.75]
    assert sums(exact(target=0.75), batch([math.nan, math.inf, 1e39]))[1] == pytest.approx(-2.25)


@pytest.mark.parametrize("dim", [1, 100_000])
@pytest.mark.parametrize("scale", [1.0, 2.0**-40])
def test_a_null_row_has_no_vote(dim, scale):
    oracle = exact(target=0.75)
    rows = GradBatch([DenseBlock(torch.zeros(3, dim))])
    mean, count = sums(oracle, rows if scale == 1.0 else rows.unscaled(scale), dim)
    assert count == 0.0
    assert not mean.any()


def test_votes_are_continuous_where_the_mean_loss_rounds():
    for at in (1e-12, 2e-12, 0.875, 1.0, 1.125):
        values = vote(*(at * (1 + k * 2.0**-24) for k in range(-4, 5)))
        assert max(values) - min(values) <= 4.5 * 8 * 2.0**-24 * 1.01


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_one_record_more_moves_the_votes_by_at_most_their_sensitivity(reduction):
    # equal records exactly at the clip: if 1/B rounds, all their norms move together when B changes
    def rows(size: int) -> GradBatch:
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        return gradients(
            dp.attach(model, loss_reduction=reduction), torch.full((size, 1), 0.37), reduction
        )

    oracle = AdaptiveClipped(1.0, 0.0, 256, count_noise=0.0)
    moved, moved_steps = [], []
    for size in (93, 163, 187, 300):
        for clip in {float(rows(n).norms().max()) for n in (size, size + 1)}:
            found = [
                float(votes(rows(n).norms(), clip, 0.5, 1e-12).sum()) for n in (size, size + 1)
            ]
            moved.append(abs(found[0] - found[1]))
            found = [
                float((rows(n).norms() <= clip).double().sub(0.5).sum())
                for n in (size, size + 1)
            ]
            moved_steps.append(abs(found[0] - found[1]))
    assert max(moved) <= oracle.count_sensitivity
    assert (max(moved_steps) > 50) is (
        reduction == "mean"
    )  # what a count by a step function would do


def test_refused_rows_have_no_vote():
    oracle = exact()
    oracle.open([torch.zeros(1)])
    with pytest.raises(ValueError, match="shapes"):
        oracle.observe(batch([5.0], dim=2))
    oracle.release(torch.Generator())
    assert oracle.state() == {"clip": 1.0}
    oracle.open([torch.zeros(1)])
    oracle.observe(batch([5.0]))
    oracle.release(torch.Generator())
    assert oracle.state()["clip"] > 1.0


@pytest.mark.parametrize(
    "forget", [AdaptiveClipped.discard, lambda oracle: oracle.open([torch.zeros(1)])]
)
def test_discarded_rows_have_no_vote(forget):
    oracle = exact()
    oracle.open([torch.zeros(1)])
    oracle.observe(batch([5.0, 5.0]))
    forget(oracle)
    assert not oracle.release(torch.Generator()).mean[0].any()
    assert oracle.state() == {"clip": 1.0}


def test_physical_batches_vote_together():
    whole, parts = exact(), exact()
    assert sums(whole, batch([0.2, 5.0, 3.0, 2.0]))[1] == pytest.approx(-1.0)
    parts.open([torch.zeros(1)])
    for part in ([0.2, 5.0], [3.0, 2.0]):
        parts.observe(batch(part))
    parts.release(torch.Generator())
    assert parts.state() == whole.state()


# -- the clip ---------------------------------------------------------------------------------------------------------


def test_the_clip_of_a_batch_is_fixed_before_its_rows():
    oracle = exact()
    oracle.open([torch.zeros(1)])
    oracle.observe(batch([100.0] * 4))
    assert oracle.clip == 1.0
    assert oracle.release(torch.Generator()).mean[0].item() == pytest.approx(1.0, rel=1e-3)
    assert oracle.clip == 1.0  # of the last batch
    oracle.open([torch.zeros(1)])
    assert oracle.clip == pytest.approx(math.exp(0.2 * 0.5))


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("zeros", [0, 3])
def test_the_clip_finds_the_quantile_of_the_rows_that_are_not_null(target, zeros):
    generator, size = torch.Generator().manual_seed(3), 400
    oracle = AdaptiveClipped(3.0, 1.0, size * (1 + zeros), target)
    clips = []
    for _ in range(400):
        lengths = torch.empty(size).exponential_(generator=generator)
        oracle.open([torch.zeros(1)])
        oracle.observe(batch([*lengths.tolist(), *[0.0] * (zeros * size)]))
        oracle.release(generator)
        clips.append(oracle.state()["clip"])
    fraction = 1 - math.exp(-sum(clips[200:]) / 200)
    assert abs(fraction - target) < 0.05


def test_empty_batches_leave_the_clip_where_it_is_up_to_noise():
    oracle = exact(target=0.9)
    assert sums(oracle, batch([]))[1] == 0.0


@pytest.mark.parametrize(("length", "end"), [(1e30, 2.0**39), (1e-12, 2.0**-30)])
def test_the_clip_stays_in_its_range(length, end):
    oracle = exact(lr=10.0, target=0.5)
    for _ in range(20):
        oracle.open([torch.zeros(1)])
        oracle.observe(batch([length] * 4))
        oracle.release(torch.Generator())
    assert oracle.state() == {"clip": end}


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("target", [0.5, 0.9])
def test_the_votes_have_their_noise(target):
    oracle, generator = (
        AdaptiveClipped(1.0, 0.5, 40, target, count_noise=3.0),
        torch.Generator().manual_seed(5),
    )
    drawn = []
    for _ in range(3000):
        oracle.restore({"clip": 1.0})
        oracle.open([torch.zeros(1)])
        oracle.release(generator)
        drawn.append(-math.log(oracle.state()["clip"]) / 0.2 * 40)
    std = 3.0 / max(target, 1 - target) * oracle.count_sensitivity
    assert 3.0 <= std < 3.2
    low, high = stats.chi2.ppf([5e-7, 1 - 5e-7], 3000)
    assert low <= sum((value / std) ** 2 for value in drawn) <= high


def test_the_mean_has_the_noise_of_its_own_multiplier():
    oracle = AdaptiveClipped(0.5, 1.3, 10, count_noise=5.0)
    oracle.open([torch.zeros(20_000)])
    noise = oracle.release(torch.Generator().manual_seed(6)).mean[0].double()
    low, high = stats.chi2.ppf([5e-7, 1 - 5e-7], 20_000)
    assert low <= float((noise / (1.3 * oracle.sensitivity("zero_out"))).square().sum()) <= high


# -- numbers ----------------------------------------------------------------------------------------------------------


def test_at_the_median_the_noise_multiplier_is_that_of_the_paper():
    for z, s in ((1.0, 25.6), (0.3, 1.0), (5.0, 5.0)):
        event = AdaptiveClipped(1.0, z, 512, count_noise=s).event()
        assert event.sigma == pytest.approx((z**-2 + (2 * s) ** -2) ** -0.5, rel=1e-14)
        assert event.sigma <= (z**-2 + (2 * s) ** -2) ** -0.5
        assert dict(event.sens) == dict(CLIP_UNITS)
    assert AdaptiveClipped(1.0, 1.0, 512).count_noise == 25.6


@pytest.mark.parametrize("target", TARGETS)
def test_a_total_gives_the_multiplier_of_the_mean_back(target):
    for total, s in ((1.0, 25.0), (2.0, 3.0), (0.6, 0.8)):
        made = AdaptiveClipped(
            1.0, None, 500, target, count_noise=s, total_noise_multiplier=total
        )
        assert made.event() == clipped_gaussian(total)
        again = (
            AdaptiveClipped(1.0, made.noise_multiplier, 500, target, count_noise=s).event().sigma
        )
        assert total <= again <= total * (1 + 1e-9)


def test_a_total_that_the_votes_exceed_is_refused_with_the_least_count_noise():
    with pytest.raises(InfeasibleError, match=r"count_noise must be >= 1.01 for"):
        AdaptiveClipped(1.0, None, 100, count_noise=1.0, total_noise_multiplier=2.0)


@pytest.mark.parametrize("settings", [{"noise_multiplier": 0.0}, {"count_noise": 0.0}])
def test_without_noise_on_either_there_is_no_privacy(settings):
    oracle = AdaptiveClipped(
        1.0, **({"noise_multiplier": 1.0, "batch_size": 10, "count_noise": 1.0} | settings)
    )
    assert oracle.event() == clipped_gaussian(0.0)
    total = AdaptiveClipped(1.0, None, 10, total_noise_multiplier=0.0)
    assert total.event() == clipped_gaussian(0.0)


def test_votes_that_cost_more_than_the_mean_warn():
    with pytest.warns(UtilityWarning, match="votes take more of the budget"):
        AdaptiveClipped(1.0, 1.0, 8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clip0": 0.0}, "clip0 must be in"),
        ({"clip0": 1e13}, "clip0 must be in"),
        ({"noise_multiplier": -1.0}, "noise_multiplier must be >= 0"),
        ({"noise_multiplier": None}, "noise_multiplier or total_noise_multiplier must be given"),
        ({"total_noise_multiplier": 1.0}, "and not both"),
        (
            {"noise_multiplier": None, "total_noise_multiplier": -1.0},
            "total_noise_multiplier must be >= 0",
        ),
        ({"batch_size": 0}, "batch_size must be"),
        ({"target": 1.0}, "target must be in"),
        ({"lr": 0.0}, "lr must be > 0"),
        ({"count_noise": -1.0}, "count_noise must be in"),
        ({"count_noise": 1e300}, "count_noise must be in"),
    ],
)
def test_wrong_numbers_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        AdaptiveClipped(**({"clip0": 1.0, "noise_multiplier": 1.0, "batch_size": 100} | changes))


def test_state_goes_round_and_copies_go_their_own_way():
    oracle = exact()
    oracle.open([torch.zeros(1)])
    oracle.observe(batch([9.0, 9.0]))
    twin = copy.deepcopy(oracle)
    oracle.release(torch.Generator())
    assert twin.state() == {"clip": 1.0}
    twin.restore(oracle.state())
    twin.open([torch.zeros(1)])
    assert twin.clip == oracle.state()["clip"] > 1.0
    assert not twin.release(torch.Generator()).mean[0].any()
    with pytest.raises(ValueError, match="clip must be in"):
        twin.restore({"clip": math.nan})
    assert oracle.settings() == twin.settings()
    assert oracle.settings()["clip_lr"] == 0.2


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("design", [dp.Poisson(20, 60), dp.Full(60), dp.Fixed(20, 60)])
def test_a_run_charges_the_joint_event_in_each_step(design):
    model = nn.Linear(2, 1)
    oracle = AdaptiveClipped(1.0, 1.0, design.batch_size, count_noise=5.0)
    opt = dp.PrivateOptimizer(
        dp.attach(model).parameters(),
        0.1,
        oracle=oracle,
        rule=dp.rules.SGD(),
        design=design,
        adjacency="zero_out",
    )
    data = torch.utils.data.TensorDataset(
        torch.randn(60, 2, generator=torch.Generator().manual_seed(7)), torch.ones(60, 1)
    )
    clips = []
    for x, y in opt.loader(data, steps=3):
        opt.zero_grad()
        (model(x) - y).square().mean().backward()
        opt.step()
        clips.append(opt.metrics["clip"])
    assert len(set(clips)) == 3
    expected = dp.Accountant(adjacency="zero_out")
    expected.record(design.event(clipped_gaussian(oracle.event().sigma), 3))
    assert opt.accountant.get_epsilon(1e-5) == expected.get_epsilon(1e-5)


@pytest.mark.parametrize(
    "settings",
    [{"lr": 20.0, "count_noise": 1e3}, {"lr": 1e308, "count_noise": 2.0**256}],
    ids=str,
)
def test_steps_of_the_threshold_that_leave_floating_point_end_at_its_bounds(settings):
    """exp(-lr (fraction - target)) overflowed after the charge: an event was paid for and nothing was released."""
    model = nn.Linear(2, 1)
    oracle = AdaptiveClipped(1.0, 1.0, 20, **settings)
    opt = dp.PrivateOptimizer(
        dp.attach(model).parameters(),
        0.1,
        oracle=oracle,
        rule=dp.rules.SGD(),
        design=dp.Full(20),
    )
    data = torch.utils.data.TensorDataset(torch.ones(20, 2), torch.ones(20, 1))
    clips = []
    for x, y in opt.loader(data, steps=30):
        opt.zero_grad()
        (model(x) - y).square().mean().backward()
        opt.step()
        clips.append(oracle.state()["clip"])
    assert opt.steps == len(opt.accountant) == 30
    assert all(adaptive._LEAST <= clip <= adaptive._LARGEST for clip in clips)
