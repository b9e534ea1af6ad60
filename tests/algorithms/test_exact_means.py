"""`secure="exact"` for means of clipped rows: what is charged, what can come out, who refuses, what a report says."""

from __future__ import annotations

import copy
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn
from torch.utils.data import TensorDataset

import torch_dpsco as dp
from tests.reference.absolute import HolderAbsolute
from tests.reference.exact import Exact
from torch_dpsco import oracles
from torch_dpsco.accounting.designs import Fixed, Full, Poisson
from torch_dpsco.algorithms.clips import AdaptiveClipped, PilotClipped, QuantilePilot
from torch_dpsco.errors import ConditionError
from torch_dpsco.losses import Squared
from torch_dpsco.noise import Keystream
from torch_dpsco.rows import DenseBlock, GradBatch
from torch_dpsco.step import oracle as clipped_module
from torch_dpsco.step.exact_noise import on_grid

IDEAL = "floating-point attacks on the noise are out of scope"
GRID = 1.0 + 2.0**-12
CLIP, BATCH, DIM = 1.0, 8, 5
PROBLEM = Squared().problem(bound_x=2.0)
MEANS = {
    "clipped": lambda: oracles.Clipped(CLIP, 2.0, BATCH),
    "holder": lambda: oracles.HolderClipped(PROBLEM, 2.0, BATCH),
    "absolute": lambda: HolderAbsolute(PROBLEM, (0.5, 0.25), BATCH),
    "auto": lambda: oracles.AutoClip(CLIP, 2.0, BATCH),
    "adaptive": lambda: AdaptiveClipped(CLIP, 2.0, BATCH, count_noise=4.0),
}


def said(report: object) -> str:
    return " ".join(str(report).split())


def batch(rows: torch.Tensor) -> GradBatch:
    return GradBatch([DenseBlock(rows)])


def opened(make, exact: bool, step: int = 0, dtype: torch.dtype = torch.float32):
    oracle = make()
    if exact:
        oracle.use_exact_noise()
    oracle.open([torch.zeros(DIM, dtype=dtype)], step)
    return oracle


@pytest.mark.parametrize("name", MEANS)
def test_the_grid_is_in_the_sensitivity_and_the_noise_of_exact_means(name):
    plain, exact = opened(MEANS[name], False), opened(MEANS[name], True)
    for adjacency in ("add_remove", "zero_out", "replace_one"):
        assert exact.sensitivity(adjacency) == plain.sensitivity(adjacency) * GRID
    assert exact.event().exact
    assert not plain.event().exact
    # noise over sensitivity is no less than what is charged, in units of the clip
    charged = exact.event().sigma
    assert exact.noise_std / exact.sensitivity("zero_out") >= charged * (1 - 1e-15)
    if name != "absolute":
        assert charged == plain.event().sigma


def rounded_sum(oracle, rows: torch.Tensor, monkeypatch) -> torch.Tensor:
    seen = []

    def released(value, grid, source=None):
        seen.append((on_grid(value, grid), grid.spacing))
        return value

    with monkeypatch.context() as patch:
        patch.setattr(clipped_module, "release_on_grid", released)
        oracle.open([torch.zeros(DIM)])
        oracle.observe(batch(rows))
        oracle.release(torch.Generator())
    return seen[0]


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("name", ["clipped", "holder", "auto"])
def test_exact_means_of_neighbors_stay_within_the_sensitivity(name, monkeypatch):
    oracle = opened(MEANS[name], True)
    generator, worst = torch.Generator().manual_seed(3), 0.0
    for trial in range(40):
        common = torch.randn(3 + trial, DIM, generator=generator) * (10.0 if trial % 2 else 1e-3)
        for odd in (
            1e9 * torch.ones(1, DIM),
            torch.eye(DIM)[:1] * 1.0000001,
            -torch.ones(1, DIM) / 3,
        ):
            more, spacing = rounded_sum(oracle, torch.cat([common, odd]), monkeypatch)
            less, _ = rounded_sum(oracle, common, monkeypatch)
            other, _ = rounded_sum(oracle, torch.cat([common, -odd]), monkeypatch)
            moved = spacing * math.sqrt(int(((more - less) ** 2).sum()))
            assert moved <= oracle.sensitivity("add_remove")
            assert spacing * math.sqrt(int(((more - other) ** 2).sum())) <= oracle.sensitivity(
                "replace_one"
            )
            worst = max(worst, moved)
    assert worst > 0.9 * oracle.sensitivity("add_remove")


def test_the_support_of_an_exact_mean_does_not_depend_on_the_rows():
    oracle = opened(MEANS["clipped"], True, dtype=torch.float64)
    spacing = Fraction(oracle._grid.spacing)
    plain = opened(MEANS["clipped"], False, dtype=torch.float64)
    for value in (0.0, 0.1, 1 / 3, 1e5):
        on = []
        for one in (oracle, plain):
            one.open([torch.zeros(DIM, dtype=torch.float64)])
            one.observe(batch(torch.full((4, DIM), value, dtype=torch.float64)))
            mean = one.release(torch.Generator()).mean[0]
            on.append(
                [round(Fraction(x) / spacing) * float(spacing) == x for x in mean.tolist()]
            )
        assert all(on[0])
        assert not all(on[1])


@pytest.mark.parametrize("name", MEANS)
def test_exact_means_have_the_noise_that_they_say(name):
    oracle = opened(MEANS[name], True)
    dim = 40_000
    oracle.open([torch.zeros(dim)])
    oracle.observe(batch(torch.zeros(2, dim)))
    noise = oracle.release(torch.Generator()).mean[0].double().numpy() / oracle.noise_std
    assert stats.kstest(noise, "norm").pvalue > 1e-6
    assert abs(noise.std() - 1.0) < 5 / math.sqrt(2 * dim)


def test_the_noise_of_an_absolute_oracle_follows_its_steps():
    oracle = opened(MEANS["absolute"], True)
    for step, std in ((0, 0.5), (1, 0.25), (9, 0.25)):
        oracle.open([torch.zeros(DIM)], step)
        assert oracle._grid.spacing * 2**oracle._grid.bits == pytest.approx(std, rel=1e-4)
        assert oracle._grid.spacing * 2**oracle._grid.bits > std


def test_votes_are_released_on_a_grid_of_their_own(monkeypatch):
    oracle = opened(MEANS["adaptive"], True)
    plain = opened(MEANS["adaptive"], False)
    assert oracle.count_sensitivity == plain.count_sensitivity * GRID
    seen = []

    def released(value, grid, source=None):
        seen.append((value.clone(), grid))
        return value

    monkeypatch.setattr("torch_dpsco.algorithms.clips.release_on_grid", released)
    oracle.observe(batch(torch.full((6, DIM), 9.0)))
    oracle.release(torch.Generator())
    ((total, grid),) = seen
    assert total.tolist() == [-3.0]  # 6 rows above the clip, at the median
    std = 4.0 / 0.5 * oracle.count_sensitivity
    assert std < grid.spacing * 2**grid.bits < std * (1 + 2.0**-16)
    assert oracle.state()["clip"] == pytest.approx(math.exp(0.2 * 3.0 / BATCH))


def test_pilots_and_phases_become_exact_together():
    pilot = QuantilePilot(300, epsilon=1.0)
    inner = PilotClipped(pilot, 2.0, BATCH)
    phased = oracles.Phased([(pilot, 1), (inner, 3)])
    phased.use_exact_noise()
    assert inner.event().exact
    users = oracles.UserClipped(oracles.Clipped(CLIP, 1.0, BATCH), 50)
    users.use_exact_noise()
    assert users.event().exact


# -- optimizers -------------------------------------------------------------------------------------------------------


def data() -> TensorDataset:
    draw = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(60, 3, generator=draw) / 2, torch.randn(60, 1, generator=draw)
    )


OPTIMIZERS = {
    "holder": (dp.HolderSGD, {"problem": PROBLEM, "batch_size": 10, "epochs": 1}),
    "clipped one pass": (
        dp.ClippedSGD,
        {"problem": dp.Problem(smoothness=2.0), "clip": 1.0, "steps": 3},
    ),
    "clipped poisson": (
        dp.ClippedSGD,
        {
            "problem": dp.Problem(smoothness=2.0),
            "clip": 1.0,
            "steps": 3,
            "sampling": "poisson",
            "batch_size": 10,
        },
    ),
    "accelerated": (
        dp.AcceleratedSGD,
        {"problem": dp.Problem(smoothness=2.0, radius=3.0), "clip": 1.0, "steps": 3},
    ),
    "localized": (
        dp.LocalizedSGD,
        {"dim": 4, "clip": 1.0, "reg": 0.1, "max_steps": 3, "min_phase": 9},
    ),
}


def made(name: str, secure: str | None, **changes: object):
    kind, arguments = OPTIMIZERS[name]
    model = dp.attach(nn.Linear(3, 1))
    given = {"n": 60, "budget": dp.Budget(2.0, 1e-3)} | arguments | changes
    return model, kind(model.parameters(), kind.plan(**given, secure=secure))


def run(model, optimizer):
    for x, y in optimizer.loader(data(), steps=optimizer.schedule.steps):
        optimizer.zero_grad()
        dp.losses.Squared()(model(x), y).backward()
        optimizer.step()
    optimizer.finalize()
    return optimizer


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_reports_of_exact_optimizers_lose_the_sentence_and_spend_what_others_do(name):
    plain, exact = (run(*made(name, secure)) for secure in (None, "exact"))
    assert IDEAL in said(plain.report())
    assert IDEAL not in said(exact.report())
    assert "xact discrete Gaussian noise on a public grid" in said(exact.report())
    assert exact.report().epsilon == plain.report().epsilon
    assert exact.settings()["secure"] == "exact"
    assert "secure" not in plain.settings()


def test_a_run_that_goes_on_in_floating_point_has_the_sentence():
    accountant = dp.Accountant()
    for secure in ("exact", None):
        model = dp.attach(nn.Linear(3, 1))
        plan = dp.ClippedSGD.plan(
            lr=0.1,
            clip=1.0,
            noise_multiplier=3.0,
            sampling=Fixed(10, 60),
            steps=6,
            secure=secure,
        )
        optimizer = dp.ClippedSGD(model.parameters(), plan, accountant=accountant)
        said_before = said(run(model, optimizer).report(1e-3))
        assert (IDEAL in said_before) is (secure is None)


def test_closed_form_fits_draw_exact_noise_too(monkeypatch):
    drawn = []
    real = clipped_module.release_on_grid
    monkeypatch.setattr(
        clipped_module, "release_on_grid", lambda *given: drawn.append(1) or real(*given)
    )
    model, optimizer = made("clipped poisson", "exact")
    dp.fit(model, optimizer, data(), dp.losses.Squared())
    assert len(drawn) == 3
    assert IDEAL not in said(optimizer.report())


def test_copies_and_checkpoints_stay_exact():
    model, optimizer = made("clipped poisson", "exact")
    twin_model, twin = copy.deepcopy((model, optimizer))
    assert IDEAL not in said(run(twin_model, twin).report())
    state = optimizer.state_dict()
    _, plain = made("clipped poisson", None)
    with pytest.raises(ValueError, match="secure"):
        plain.load_state_dict(state)
    _, same = made("clipped poisson", "exact")
    same.load_state_dict(state)


def test_oracles_that_have_no_exact_form_refuse_by_name():
    for oracle in (Exact(60), oracles.Coordinatewise(1.0, 1.0, 60, 1)):
        with pytest.raises(
            ConditionError, match=f"secure must be None for {type(oracle).__name__}"
        ):
            dp.PrivateOptimizer(
                nn.Linear(3, 1).parameters(),
                0.1,
                oracle=oracle,
                rule=dp.rules.SGD(),
                design=Full(60),
                secure="exact",
            )


def test_no_noise_too_much_noise_and_late_calls_are_refused_before_a_charge():
    with pytest.raises(ConditionError, match="secure='exact' needs noise"):
        oracles.Clipped(1.0, 0.0, BATCH).use_exact_noise()
    late = opened(MEANS["clipped"], False)
    with pytest.raises(ConditionError, match="before the first batch"):
        late.use_exact_noise()
    with pytest.raises(ConditionError, match="64 bits"):
        AdaptiveClipped(CLIP, 2.0, BATCH, count_noise=2.0**80).use_exact_noise()
    loud = oracles.Clipped(1.0, 2.0**30, BATCH)
    loud.use_exact_noise()
    with pytest.raises(ConditionError, match="64 bits"):
        loud.open([torch.zeros(DIM)])
    with pytest.raises(ValueError, match="secure must be one of None, exact"):
        made("holder", "yes")


def test_exact_noise_is_drawn_from_the_stream_that_the_optimizer_gives():
    means = []
    for source in (
        Keystream(),
        Keystream(),
        torch.Generator().manual_seed(0),
        torch.Generator().manual_seed(0),
    ):
        oracle = opened(MEANS["clipped"], True)
        means.append(oracle.release(source).mean[0].tolist())
    assert means[0] != means[1]
    assert means[2] == means[3]  # repeatable, for tests


def test_amplification_is_that_of_the_noise_charged():
    exact = opened(MEANS["clipped"], True).event()
    assert Poisson(5, 100).event(exact, 1).event.exact
    assert np.isclose(Poisson(5, 100).event(exact, 1).event.noise_multiplier, 2.0)
