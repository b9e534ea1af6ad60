"""Runs whose clip comes from a pilot group: ledger, disjointness, still steps, checkpoints."""

from __future__ import annotations

import copy
import math
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import torch_dpsco as dp
from tests.algorithms.heavy_runs import (
    DELTA,
    LOSS,
    PROBLEM,
    Run,
    assert_disjoint,
    check_interrupted_fit,
    check_ledger,
    check_other_plans,
    check_resumption,
    gradient_of,
    joint,
    model,
    parts_used,
    records,
    reloaded,
)
from tests.reference import heavy_tailed_literal as literal
from torch_dpsco.accounting.events import ADJACENCIES, Pure, clipped_gaussian
from torch_dpsco.accounting.ledger import Ledger
from torch_dpsco.algorithms.clips import C_MAX, C_MIN
from torch_dpsco.algorithms.heavy_tailed_numbers import PilotPlan
from torch_dpsco.algorithms.localized_numbers import LocalizedPhase, LocalizedSchedule
from torch_dpsco.algorithms.mechanisms import geometric_grid
from torch_dpsco.errors import AdjacencyError, InfeasibleError, SequenceError

# Seeds warn in every test here, and pilots that are too small to resolve their quantile.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{words}:torch_dpsco.errors.UtilityWarning")
    for words in (
        "generator=",
        "a pilot of",
        "noise dominates",
        "the clip is at an end",
        "the private threshold",
    )
]
N, SIZE = 150, 30
PILOT = dp.Pilot(size=SIZE)
CLASSES = [dp.AcceleratedSGD, dp.ClippedSGD, dp.ProximalSGD]


def calibrated(
    cls: Any = dp.AcceleratedSGD, adjacency: str = "replace_one", n: int = N, **changes: Any
) -> Run:
    # batches of a private size that are not filled up, as those of a seeded sampler, take a loss that sums
    layer = model(reduction="sum" if changes.get("sampling") == "poisson" else "mean")
    localized = cls is dp.LocalizedSGD
    arguments: dict[str, Any] = {
        "clip": PILOT,
        "problem": dp.Problem() if localized else PROBLEM,
        "dim": layer,
    }
    arguments |= (
        {"reg": 0.1, "max_steps": 4} if localized else {"steps": 4, "sampling": "shuffled"}
    )
    plan = cls.plan(n=n, budget=dp.Budget(1.0, DELTA, adjacency), **{**arguments, **changes})
    return Run(layer, cls(layer.parameters(), plan))


def quiet(
    cls: Any = dp.AcceleratedSGD,
    *,
    dtype: torch.dtype = torch.float32,
    epsilon: float = 1e6,
    **changes: Any,
) -> Run:
    """Returns a run without noise; the pilot takes the threshold of the exact rank."""
    layer = model(dtype)
    generator = torch.Generator().manual_seed(5)  # several thresholds have one rank
    return Run(
        layer, cls(layer.parameters(), quiet_plan(cls, epsilon, **changes), generator=generator)
    )


def quiet_plan(cls: Any, epsilon: float = 1e6, quantile: float = 0.8, **changes: Any) -> Any:
    def pilot(size: int) -> PilotPlan:
        return PilotPlan(size, epsilon, quantile, C_MIN, C_MAX)

    if cls is dp.LocalizedSGD:
        phases = [
            LocalizedPhase(
                index=i, n=n, batch_size=n, clip=1.0, steps=T, reg=2.0 * i, noise_std=0.0, error=None,
                pilot=None if size is None else pilot(size),
            )
            for i, (n, T, size) in enumerate([(20, 3, 30), (20, 2, 20), (5, 2, None)], start=1)
        ]  # fmt: skip
        return cls.plan(n=N, phases=LocalizedSchedule(phases=tuple(phases), rho=None), **changes)
    kind = {
        "batch_size": 30,
        "steps": 4,
        "average": None if cls is dp.AcceleratedSGD else "last",
        **changes,
    }
    plan = cls.plan(
        n=N - SIZE, lr=0.05, clip=1.0, noise_multiplier=0.0, **{"sampling": "shuffled"} | kind
    )
    parts = dp.Parts(((dp.Full(SIZE), 1), (plan.design, 4)), N)
    return replace(plan, clip=None, pilot=pilot(SIZE), design=parts, steps=5)


# -- ledger -----------------------------------------------------------------------------------------------------------


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("adjacency", ["replace_one", "zero_out"])
@pytest.mark.parametrize("cls", [*CLASSES, dp.LocalizedSGD])
def test_the_budget_is_spent_to_a_thousandth_and_known_all_along(
    cls: Any, adjacency: str
) -> None:
    check_ledger(partial(calibrated, cls, adjacency), dp.Budget(1.0, DELTA, adjacency))


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(
    "changes",
    [
        {"sampling": "poisson", "batch_size": 30, "epochs": 2, "steps": None},
        {"sampling": "fixed", "batch_size": 30, "epochs": 2, "steps": None},
        {"sampling": "full"},
    ],
)
def test_many_passes_after_a_pilot_spend_the_budget(changes: dict[str, Any]) -> None:
    check_ledger(
        partial(calibrated, dp.ClippedSGD, **changes), dp.Budget(1.0, DELTA, "replace_one")
    )


@pytest.mark.weekly
@pytest.mark.parametrize("sampling", ["full", "poisson"])
def test_localized_minibatches_after_pilots_spend_the_budget(sampling: str) -> None:
    check_ledger(
        partial(calibrated, dp.LocalizedSGD, sampling=sampling, max_steps=12),
        dp.Budget(1.0, DELTA, "replace_one"),
    )


@pytest.mark.cases(3, 1)
@pytest.mark.parametrize("cls", [*CLASSES, dp.LocalizedSGD])
def test_epsilon_is_the_largest_of_those_of_the_parts(cls: Any) -> None:
    run = calibrated(cls)
    run.train(run.seeded())
    own = {}
    for _, part, event, times in run.opt.accountant.ledger.entries():
        own.setdefault(part, Ledger()).add(event, times)
    epsilons = {part: ledger.epsilon(DELTA, "replace_one") for part, ledger in own.items()}
    assert run.opt.report().epsilon == pytest.approx(max(epsilons.values()), rel=1e-9)
    assert 1 - 1e-3 < min(epsilons.values()) <= max(epsilons.values()) <= 1  # "0" is the pilot's


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("sampling", ["poisson"])
@pytest.mark.parametrize("size", [20, 60])
def test_pilots_of_phases_keep_the_budget(sampling: str, size: int) -> None:
    """One coefficient, so that minibatches of a single record are planned."""
    budget = dp.Budget(1.0, DELTA, "replace_one")
    layer = dp.attach(torch.nn.Linear(1, 1, bias=False))
    plan = dp.LocalizedSGD.plan(
        n=400,
        dim=layer,
        budget=budget,
        clip=dp.Pilot(size=size),
        reg=0.1,
        max_steps=5000,
        sampling=sampling,
    )
    opt = dp.LocalizedSGD(layer.parameters(), plan)
    assert Ledger([opt.ahead()]).epsilon(DELTA, "replace_one") <= 1.0


# -- what the pilot does ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [*CLASSES, dp.LocalizedSGD])
def test_a_pilot_reads_norms_at_the_start_and_moves_nothing(cls: Any) -> None:
    run = quiet(cls)
    start = joint(run.model)
    run.train(run.seeded(), 1)
    np.testing.assert_array_equal(joint(run.model), start)
    np.testing.assert_array_equal(run.answer(), start)
    assert not run.opt.state
    assert all(p.grad is None for p in run.model.parameters())
    norms = sorted(np.linalg.norm(gradient_of(records(N))(start, i)) for i in run.batches[0])
    ranks = [0, *(sum(norm <= c for norm in norms) for c in geometric_grid(1e-4, 1e4))]
    place = [float(c) for c in geometric_grid(1e-4, 1e4)].index(run.opt.metrics["clip"])
    assert (
        ranks[place] <= 0.8 * 30 - 0.5 <= ranks[place + 1]
    )  # the quantile is among the norms of its cell


@pytest.mark.parametrize("cls", CLASSES)
def test_the_steps_after_a_pilot_are_those_of_the_paper_with_its_clip(cls: Any) -> None:
    run = quiet(cls, dtype=torch.float64)
    start = joint(run.model)
    run.train(run.seeded())
    clip = run.opt.metrics["clip"]
    gradient, batches = gradient_of(records(N, torch.float64)), run.batches[1:]
    if cls is dp.AcceleratedSGD:
        expected = literal.algorithm_2(gradient, start, batches, clip, 1 / (2 * 0.05))[0][-1]
    else:
        expected = literal.algorithm_8(gradient, start, batches, clip, 0.05, lambda v, eta: v)
    np.testing.assert_allclose(run.answer(), expected, rtol=0, atol=1e-12)


def test_each_large_phase_chooses_its_clip_at_its_center() -> None:
    run = quiet(dp.LocalizedSGD, dtype=torch.float64)
    w, clips = joint(run.model), []
    for batch in run.seeded():
        run.train([batch])
        clips.append(run.opt.metrics["clip"])
    gradient, members, k = gradient_of(records(N, torch.float64)), [], 0
    for _, draws in run.opt.design.parts:
        members.append(run.batches[k])
        k += draws
    assert clips == [clips[0]] * 4 + [clips[4]] * 5
    own = [
        literal.Phase(clips[0], 3, 2.0),
        literal.Phase(clips[4], 2, 4.0),
        literal.Phase(clips[4], 2, 6.0),
    ]
    w = literal.algorithm_3(gradient, w, members[1], own[0])
    norms = [np.linalg.norm(gradient(w, i)) for i in members[2]]
    assert sum(norm <= clips[4] for norm in norms) == pytest.approx(0.8 * 20, abs=2)
    w = literal.algorithm_3(gradient, w, members[3], own[1])
    w = literal.algorithm_3(gradient, w, members[4], own[2])
    np.testing.assert_allclose(run.answer(), w, rtol=0, atol=1e-12)


@pytest.mark.cases(3, 1)
@pytest.mark.parametrize("cls", [*CLASSES, dp.LocalizedSGD])
def test_pilot_and_training_records_are_disjoint_and_each_is_used_as_planned(cls: Any) -> None:
    run = calibrated(cls)
    run.train(run.seeded())
    used = parts_used(run)
    assert_disjoint(used)
    for (design, draws), counts in zip(run.opt.design.parts, used, strict=True):
        assert set(counts.values()) == {1 if isinstance(design, dp.Disjoint) else draws}
    assert sum(map(len, used)) <= N


def test_a_still_step_neither_shows_nor_keeps_a_stale_gradient() -> None:
    run = calibrated()
    for x, y, _ in run.seeded():
        LOSS(run.model(x), y).backward()
        for p in run.model.parameters():
            p.grad = torch.full_like(
                p, 1234.5
            )  # what a backward without dp.attach would leave there
        run.opt.step()
        assert all(p.grad is None or not p.grad.any() for p in run.model.parameters())
        break


def test_metrics_have_the_same_names_at_every_step() -> None:
    run = calibrated()
    names = []
    for batch in run.seeded():
        run.train([batch])
        names.append(set(run.opt.metrics))
    assert names == [{"step", "clip"}] + [{"step", "clip", "noise_std"}] * 4


@pytest.mark.filterwarnings(
    "ignore::torch_dpsco.errors.UtilityWarning"
)  # Adam, and changed rates
def test_schedulers_and_adam_pass_a_still_step() -> None:
    layer = model()
    inner = torch.optim.Adam(layer.parameters(), lr=0.1)
    plan = replace(quiet_plan(dp.ClippedSGD), lr=0.1)
    opt = dp.ClippedSGD(inner.param_groups, plan, rule=dp.rules.TorchRule(inner))
    scheduler = torch.optim.lr_scheduler.StepLR(opt, step_size=1, gamma=0.5)
    run, moved = Run(layer, opt), []
    for batch in run.seeded():
        before = joint(layer)
        run.train([batch])
        scheduler.step()
        moved.append(float(np.abs(joint(layer) - before).max()))
    assert moved[0] == 0.0
    # step t of Adam at lr 0.1/2^t: the first one that moves has the full length
    assert moved[1] == pytest.approx(0.05, rel=1e-3)
    assert all(0 < length < 0.05 for length in moved[2:])


def test_a_pilot_sees_no_later_group() -> None:
    run = quiet()
    loader = iter(run.seeded())
    run.train([next(loader)])
    chosen = run.opt.metrics["clip"]
    run.train(loader)
    assert run.opt.metrics["clip"] == chosen
    assert run.opt.oracle.phases[0][0].chosen == chosen


# -- checkpoints ------------------------------------------------------------------------------------------------------

BUILDS = {
    "accelerated": quiet,
    "clipped": partial(quiet, dp.ClippedSGD, average="uniform"),
    "full": partial(quiet, dp.ClippedSGD, sampling="full", batch_size=None),
    "localized": partial(quiet, dp.LocalizedSGD),
}


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("name", BUILDS)
def test_a_saved_run_goes_on_with_the_unused_records_to_the_same_answer(name: str) -> None:
    check_resumption(BUILDS[name])


def sentences(run: Run) -> list[str]:
    """Returns what the report of a run says."""
    report = run.opt.report()
    return [
        report.headline,
        *(text for section in report.sections for text in section.sentences),
    ]


def test_a_loaded_pilot_knows_its_clip_and_is_not_asked_again() -> None:
    run = calibrated()
    run.train(run.seeded(), 2)
    other = reloaded(run, calibrated)
    assert other.opt.oracle.phases[0][0].chosen == run.opt.oracle.phases[0][0].chosen
    assert [text for text in sentences(other) if "reach each other" not in text] == [
        text for text in sentences(run) if "reach each other" not in text
    ]  # a first step is looked at by the process that makes it
    assert other.opt.metrics["clip"] == run.opt.metrics["clip"]
    other.train(other.resumed())
    assert other.opt.metrics["clip"] == run.opt.metrics["clip"]


def test_a_checkpoint_of_another_plan_is_refused() -> None:
    check_other_plans(
        quiet,
        {"epsilon": 2.0},
        {"quantile": 0.7},
        {"sampling": dp.Full(120), "batch_size": None, "cls": dp.ClippedSGD},
        {"cls": dp.ProximalSGD},
        {"adjacency": "replace_one"},
    )


def test_a_copy_has_a_pilot_of_its_own() -> None:
    run = quiet()
    run.train(run.seeded(), 1)
    layer, opt = copy.deepcopy((run.model, run.opt))
    assert opt.oracle.phases[0][0] is not run.opt.oracle.phases[0][0]
    assert opt.oracle.phases[1][0].pilot is opt.oracle.phases[0][0]
    assert opt.metrics == run.opt.metrics
    assert layer is not run.model


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("cls", [*CLASSES, dp.LocalizedSGD])
@pytest.mark.parametrize("at", [0, 1, 3])
def test_an_interrupted_fit_goes_on(cls: Any, at: int) -> None:
    check_interrupted_fit(partial(calibrated, cls), at=at)


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("adjacency", ["add_remove", "zero_out", "replace_one"])
@pytest.mark.parametrize("sampling", ["assigned", "poisson", "full"])
@pytest.mark.parametrize("cls", CLASSES)
def test_a_pilot_under_add_remove_is_private(cls: Any, sampling: str, adjacency: str) -> None:
    if sampling != "assigned" and cls is not dp.ClippedSGD:
        pytest.skip("one pass")
    made = calibrated(
        cls, "add_remove", sampling=sampling, batch_size=30 if sampling == "poisson" else None
    )
    plan = made.opt._plan
    assert type(plan.design).__name__ == "AssignedParts"
    training = plan.design.parts[1][0].event(
        clipped_gaussian(plan.noise_multiplier), plan.steps - 1
    )
    alone = [
        Ledger([event]).epsilon(DELTA, adjacency) for event in (Pure(1.0, ADJACENCIES), training)
    ]
    assert plan.epsilon(adjacency=adjacency) == pytest.approx(max(alone), rel=1e-6)
    assert plan.epsilon() <= 1.0
    made.train(
        made.opt.loader(records(N + 3))
    )  # their number is not the declared one, and private
    assert made.opt.report().epsilon == plan.epsilon()


def test_a_pilot_refuses_means_of_a_private_number() -> None:
    for padding, reduction, raises in (
        (False, "mean", True),
        (False, "sum", False),
        (True, "mean", False),
    ):
        made = calibrated(dp.ClippedSGD, "add_remove", sampling="assigned")
        layer = dp.attach(dp.detach(made.model), loss_reduction=reduction)
        x, y, _ = next(
            iter(made.opt.loader(records(N), isolation="slots" if padding else "none"))
        )
        (getattr((layer(x) - y).square(), reduction)()).backward()
        with pytest.raises(SequenceError, match="must be a sum") if raises else nullcontext():
            made.opt.step()


def test_phases_that_are_cut_by_position_refuse_add_remove() -> None:
    with pytest.raises(AdjacencyError, match="replace_one or zero_out"):
        calibrated(dp.LocalizedSGD, "add_remove")


@pytest.mark.parametrize("cls", [*CLASSES, dp.LocalizedSGD])
@pytest.mark.parametrize("n", [2, 16, 30])
@pytest.mark.filterwarnings("ignore:noise buries the signal")  # which is said before
def test_too_few_records_are_refused_by_name(cls: Any, n: int) -> None:
    with pytest.raises((InfeasibleError, ValueError), match=r"n must be|size"):
        calibrated(cls, n=n)


@pytest.mark.parametrize("n", [60, 61])
@pytest.mark.filterwarnings("ignore:noise buries the signal")  # which is said before
def test_a_phase_that_its_pilot_uses_up_is_refused_by_name(n: int) -> None:
    problem = dp.Problem(moment=3.0, moment_order=4.0, second_moment=3.0)
    with pytest.raises((InfeasibleError, ValueError), match=r"[Pp]ilot"):
        calibrated(dp.LocalizedSGD, n=n, problem=problem, distance=1.0, reg=None)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rule": "best"}, "rule must be"),
        ({"size": 0}, "size must be"),
        ({"size": 1.5}, "size must be an integer"),
        ({"c_min": 0.0}, "c_min must be > 0"),
        ({"c_min": 2.0, "c_max": 1.0}, "c_max must be"),
        ({"c_max": math.inf}, "c_max must be"),
    ],
)
def test_what_a_pilot_cannot_be_is_refused_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        calibrated(clip=dp.Pilot(**{"size": SIZE, **changes}))


@pytest.mark.parametrize("changes", [{"steps": 0}, {"steps": 121}, {"lr": -0.1}, {"n": 2.5}])
def test_what_cannot_be_planned_is_refused_by_name(changes: dict[str, Any]) -> None:
    (name,) = changes
    with pytest.raises(ValueError, match=f"{name} must be"):
        calibrated(**changes)
