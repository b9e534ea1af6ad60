"""LocalizedSGD against the paper's steps, its phases, ledger, checkpoints and refusals."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torch_dpsco as dp
from tests.algorithms.heavy_runs import (
    DELTA,
    DTYPES,
    Run,
    assert_disjoint,
    check_chunks,
    check_interrupted_fit,
    check_ledger,
    check_other_plans,
    check_resumption,
    gradient_of,
    joint,
    made,
    model,
    parts_used,
    records,
    reloaded,
)
from tests.reference import heavy_tailed_literal as literal
from tests.reference.papers.heavy_tailed import localized_schedule_paper
from torch_dpsco.accounting.ledger import Ledger
from torch_dpsco.algorithms.localized_numbers import LocalizedPhase, LocalizedSchedule
from torch_dpsco.errors import (
    AdjacencyError,
    ConditionError,
    MissingConstantError,
)

# Seeds warn in every test here.
N = 40


def phase(**changes: Any) -> LocalizedPhase:
    """Returns a phase without noise."""
    settings = {
        "index": 1, "n": 12, "clip": 1.5, "steps": 4, "reg": 2.0, "noise_std": 0.0, "error": None,
        **changes,
    }  # fmt: skip
    settings.setdefault("batch_size", settings["n"])
    return LocalizedPhase(**settings)


PHASES = (
    phase(),
    phase(index=2, n=6, steps=3, reg=4.0, clip=1.0),
    phase(index=3, n=3, steps=2, reg=16.0, clip=0.5),
)


def build(
    phases: tuple[LocalizedPhase, ...] = PHASES,
    *,
    noise: float = 0.0,
    dtype: torch.dtype = torch.float32,
    groups: bool = False,
    n: int = N,
    **changes: Any,
) -> Run:
    layer = model(dtype)
    params = [{"params": [p]} for p in layer.parameters()] if groups else layer.parameters()
    phases = tuple(replace(p, noise_std=noise * p.clip / p.batch_size) for p in phases)
    schedule = LocalizedSchedule(phases=phases, rho=None)
    return Run(layer, made(dp.LocalizedSGD, params, phases=schedule, n=n, **changes))


def calibrated(adjacency: str = "replace_one", n: int = 120, **changes: Any) -> Run:
    layer = model()
    kind: dict[str, Any] = {"dim": layer, "clip": 2.0, "reg": 0.1, "max_steps": 4, **changes}
    own = {
        name: kind.pop(name) for name in ("prox", "accountant") if name in kind
    }  # reg is the plan's
    plan = dp.LocalizedSGD.plan(n=n, budget=dp.Budget(1.0, DELTA, adjacency), **kind)
    return Run(layer, dp.LocalizedSGD(layer.parameters(), plan, **own))


def literal_phases(phases: tuple[LocalizedPhase, ...]) -> list[literal.Phase]:
    def kind(p: LocalizedPhase) -> str | float:
        return "ballfree" if p.lr is None else p.lr

    return [literal.Phase(p.clip, p.steps, p.reg, math.inf, kind(p)) for p in phases]


def batches_of(run: Run) -> list[list[int]]:
    """Returns the records of each part, in the order of the loader."""
    first, members = 0, []
    for _, draws in run.opt.design.parts:
        steps = run.batches[first : first + draws]
        assert all(sorted(step) == sorted(steps[0]) for step in steps)
        members.append(steps[0])
        first += draws
    return members


# -- the paper, line by line ------------------------------------------------------------------------------------------


@pytest.mark.cases(3, 1)
@pytest.mark.parametrize("groups", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["ballfree", "projected"])
def test_phases_are_those_of_algorithms_3_and_4(
    kind: str, dtype: torch.dtype, groups: bool
) -> None:
    phases, prox, project = PHASES, None, literal.identity
    if kind == "projected":
        prox, project = dp.prox.Ball(0.5), literal.ball(0.5)
    run = build(phases, dtype=dtype, groups=groups, prox=prox)
    start = project(joint(run.model))
    np.testing.assert_allclose(joint(run.model), start, rtol=1e-6)
    run.train(run.seeded())
    expected = literal.algorithm_4(
        gradient_of(records(N, dtype)), start, batches_of(run), literal_phases(phases), project
    )
    np.testing.assert_allclose(run.answer(), expected[-1], rtol=0, atol=DTYPES[dtype])
    free = literal.algorithm_4(
        gradient_of(records(N)), start, batches_of(run), literal_phases(PHASES)
    )
    assert (kind == "ballfree") == np.allclose(run.answer(), free[-1], atol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_step_of_a_phase_is_that_of_algorithm_3(dtype: torch.dtype) -> None:
    run = build(dtype=dtype)
    start, queries = joint(run.model), []
    for batch in run.seeded():
        queries.append(joint(run.model))
        run.train([batch])
    gradient, center, k = gradient_of(records(N, dtype)), start, 0
    for part, own in zip(batches_of(run), literal_phases(PHASES), strict=True):
        for steps in range(1, own.steps):
            done = literal.algorithm_3(gradient, center, part, replace(own, steps=steps))
            np.testing.assert_allclose(queries[k + steps], done, rtol=0, atol=DTYPES[dtype])
        center = literal.algorithm_3(gradient, center, part, own)
        k += own.steps


def test_the_constant_steps_of_the_paper_are_taken() -> None:
    lr, own = 0.07, phase(lr=0.07, reg=0.5, steps=3)
    run = build((own,), dtype=torch.float64)
    start = joint(run.model)
    run.train(run.seeded())
    expected = literal.algorithm_3(
        gradient_of(records(N)), start, run.batches[0], literal_phases((own,))[0]
    )
    assert literal_phases((own,))[0].lr(2) == lr
    np.testing.assert_allclose(run.answer(), expected, rtol=0, atol=1e-6)


def test_the_schedule_of_the_paper_can_be_run() -> None:
    published = localized_schedule_paper(
        n=16, dim=4, paper_epsilon=1.0, moment_order=2.0, moment_2k=2.0, lr=0.1
    )
    own = [field.name for field in fields(LocalizedPhase)]  # all but the balls, which are wide
    phases = tuple(
        LocalizedPhase(**{name: getattr(one, name) for name in own}) for one in published
    )
    run = build(phases, dtype=torch.float64, n=16)
    start = joint(run.model)
    run.train(run.seeded())
    expected = literal.algorithm_4(
        gradient_of(records(16)), start, batches_of(run), literal_phases(phases)
    )
    np.testing.assert_allclose(run.answer(), expected[-1], rtol=0, atol=1e-6)


def test_the_first_step_of_a_phase_goes_to_the_center_minus_the_mean_over_lambda() -> None:
    own = phase(reg=1e30, steps=1)
    run = build((own, replace(own, reg=1e38, n=6, batch_size=6)))
    start = joint(run.model)
    run.train(run.seeded())
    np.testing.assert_allclose(run.answer(), start, rtol=1e-6)  # and no overflow


def test_the_regularizer_is_not_clipped() -> None:
    """Rows of a perfect fit are 0: only the pull to the center is left, which a clip of 1e-9 would stop."""
    own = phase(reg=0.01, steps=2, clip=1e-9, n=12)
    run = build((own,), dtype=torch.float64)
    center = joint(run.model)
    loader = iter(run.seeded())
    run.train([next(loader)])
    with torch.no_grad():
        for p in run.model.parameters():
            p.add_(8.0)  # as if the first step had gone far
    run.train([next(loader)])
    np.testing.assert_allclose(joint(run.model), center + 4.0, atol=1e-6)  # half of the way back


# -- ledger -----------------------------------------------------------------------------------------------------------


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("adjacency", ["replace_one", "zero_out"])
@pytest.mark.parametrize("sampling", ["full", "poisson"])
def test_the_budget_is_spent_to_a_thousandth_and_known_all_along(
    adjacency: str, sampling: str
) -> None:
    check_ledger(
        partial(calibrated, adjacency, sampling=sampling), dp.Budget(1.0, DELTA, adjacency)
    )


PROMISED = dp.Problem(moment=3.0, moment_order=2.0, second_moment=3.0)
METHODS = {
    "localized": {"problem": replace(PROMISED, moment_order=4.0, radius=1.0), "clip": None, "reg": None},
    "reduction": {
        "problem": replace(PROMISED, moment_order=4.0, strong_convexity=0.5),
        "distance": 1.0, "clip": None, "reg": None, "method": "reduction",
    },
}  # fmt: skip


@pytest.mark.cases(1, 1)
@pytest.mark.filterwarnings("ignore:max_steps=:torch_dpsco.errors.UtilityWarning")
@pytest.mark.parametrize("method", METHODS)
def test_every_method_spends_its_budget(method: str) -> None:
    check_ledger(partial(calibrated, **METHODS[method]), dp.Budget(1.0, DELTA, "replace_one"))


@pytest.mark.parametrize("adjacency", ["replace_one", "zero_out"])
@pytest.mark.parametrize("sampling", ["full", "poisson"])
def test_phases_cost_the_same(adjacency: str, sampling: str) -> None:
    opt = calibrated(adjacency, sampling=sampling).opt
    costs = []
    for (design, draws), member in zip(opt.design.parts, opt.oracle.members, strict=True):
        base = member.event()
        costs.append(Ledger([design.event(base, draws)]).epsilon(DELTA, adjacency))
    assert len(costs) > 3
    assert costs == pytest.approx([1.0] * len(costs), rel=1e-3)
    assert max(costs) <= 1.0


def test_a_plan_of_one_event_never_costs_less_than_the_ledger_holds() -> None:
    for phases in (PHASES, (phase(batch_size=3), *PHASES[1:])):
        run = build(phases, noise=5.0)
        for k, batch in enumerate(run.seeded(), start=1):
            run.train([batch])
            planned = Ledger([run.opt.design.event(run.opt.oracle.event(), k)]).epsilon(
                DELTA, "replace_one"
            )
            assert run.opt.accountant.get_epsilon(DELTA) <= planned * (1 + 1e-12)


def test_add_remove_has_no_bound() -> None:
    with pytest.raises(AdjacencyError, match="replace_one or zero_out"):
        calibrated("add_remove")
    for phases in (PHASES, (phase(batch_size=3),)):
        with pytest.raises(AdjacencyError, match="add_remove"):
            build(phases, noise=1.0, adjacency="add_remove")


# -- records ----------------------------------------------------------------------------------------------------------


@pytest.mark.cases(2, 1)
@pytest.mark.parametrize("sampling", ["full", "poisson"])
def test_phases_use_records_of_their_own_and_full_ones_all_of_them(sampling: str) -> None:
    run = calibrated(sampling=sampling)
    run.train(run.seeded())
    used = parts_used(run)
    assert_disjoint(used)
    for (design, draws), counts in zip(run.opt.design.parts, used, strict=True):
        if isinstance(design, dp.Full):
            assert set(counts.values()) == {draws}
            assert len(counts) == design.n
        assert len(counts) <= design.n


@pytest.mark.weekly
@settings(derandomize=True, max_examples=25)
@given(st.data())
def test_a_resumed_run_uses_each_record_in_one_phase_only(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    phases = tuple(
        phase(
            index=i,
            n=size,
            batch_size=data.draw(st.integers(1, size)),
            steps=data.draw(st.integers(1, 3)),
        )
        for i, size in enumerate(sizes, start=1)
    )
    sampling = data.draw(st.sampled_from(["poisson"]))
    make = partial(
        build, phases, noise=1.0, sampling=sampling, n=sum(sizes) + data.draw(st.integers(0, 3))
    )
    run = make()
    stops = data.draw(
        st.lists(st.integers(0, run.opt.schedule.steps - 1), max_size=3).map(sorted)
    )
    loader: Any = run.seeded()
    for stop in stops:
        run.train(loader, stop - run.opt.steps)
        run = reloaded(run, make)
        loader = run.resumed()
    run.train(loader)
    assert run.opt.steps == run.opt.schedule.steps == len(run.batches)
    used = parts_used(run)
    assert_disjoint(used)
    assert all(len(counts) <= p.n for counts, p in zip(used, phases, strict=True))
    whole = make()
    whole.train(whole.seeded())
    assert run.opt.accountant.get_epsilon(DELTA) == pytest.approx(
        whole.opt.accountant.get_epsilon(DELTA), rel=1e-12
    )


def test_a_second_loader_in_mid_run_does_not_start_the_phases_again() -> None:
    run = build()
    run.train(run.seeded(), 5)  # in the second phase, of 6 records
    run.train(run.opt.loader(records(N)), 1)
    assert len(run.opt.accountant) == run.opt.steps == 6
    run.train(run.resumed())
    assert_disjoint(parts_used(run))
    assert run.opt.steps == 9


# -- checkpoints ------------------------------------------------------------------------------------------------------

BUILDS = {
    "localized": build,
    "float64": partial(build, dtype=torch.float64, groups=True),
    "poisson": partial(build, (phase(batch_size=3), *PHASES[1:])),
}


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("name", BUILDS)
def test_a_saved_run_goes_on_with_the_unused_records_to_the_same_answer(name: str) -> None:
    if name == "poisson":
        make = BUILDS[name]
        for k in range(1, 9):
            run = make()
            run.train(run.seeded(), k)
            other = reloaded(run, make)
            other.train(other.resumed())
            assert_disjoint(parts_used(other))
            assert len(other.opt.accountant) == other.opt.steps == 9
        return
    check_resumption(BUILDS[name])


@pytest.mark.cases(1, 1)
def test_chunks_make_the_steps_of_whole_draws() -> None:
    check_chunks(build)


def test_a_checkpoint_of_another_plan_is_refused() -> None:
    check_other_plans(
        build,
        {"noise": 0.5},
        {"n": 41},
        {"phases": PHASES[:2]},
        {"phases": (replace(PHASES[0], reg=3.0), *PHASES[1:])},
        {"phases": (replace(PHASES[0], clip=3.0), *PHASES[1:])},
        {"phases": (replace(PHASES[0], batch_size=3), *PHASES[1:])},
        {"prox": dp.prox.Ball(1.0)},
        {"adjacency": "replace_one"},
    )


@pytest.mark.slow
def test_an_interrupted_fit_goes_on() -> None:
    check_interrupted_fit(calibrated, at=5)
    check_interrupted_fit(partial(calibrated, **METHODS["reduction"]), at=5)


def test_a_run_that_ends_early_answers_with_what_it_has() -> None:
    run = build()
    run.train(run.seeded(), 5)
    here = joint(run.model)
    run.opt.finalize()
    np.testing.assert_array_equal(joint(run.model), here)


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"n": 20}, "at most n=20 records"),
        ({"sampling": "shuffled"}, "sampling must be"),
        ({"method": "reduction"}, "must not be given beside phases"),
        ({"clip": 1.0}, "must not be given beside phases"),
        ({"adjacency": "bounded"}, "adjacency must be"),
        ({"prox": 1}, "prox must be"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        build(**changes)


def test_a_schedule_of_another_kind_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="phases must be a LocalizedSchedule"):
        dp.LocalizedSGD.plan(phases=dp.Schedule((dp.Phase(3),)), n=30)
    with pytest.raises(
        ValueError, match="budget, dim must be given for phases to be chosen, or phases="
    ):
        dp.LocalizedSGD.plan(n=30)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"n": 1}, "n must be"),
        ({"clip": 0.0}, "clip must be > 0"),
        ({"clip": math.nan}, "clip must be > 0"),
        ({"reg": -1.0}, "reg must be > 0"),
        ({"reg": 0.0}, "reg must be > 0"),
        ({"max_steps": 0}, "max_steps must be"),
        ({"min_phase": 0}, "min_phase must be"),
        ({"method": "balls"}, "method must be"),
        ({"sampling": "shuffle"}, "sampling must be"),
        ({"method": "reduction", "sampling": "poisson"}, "sampling must be 'full'"),
        ({"reg": None}, r"Problem\(moment=..., moment_order=...\).*reg="),
        ({"reg": None, "problem": PROMISED}, "distance=.*or promise a radius"),
        ({"distance": -1.0}, "distance must be > 0"),
        ({"prox": 1}, "prox must be"),
    ],
)
def test_what_cannot_be_planned_is_refused_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises((ValueError, MissingConstantError), match=words):
        calibrated(**changes)


def test_low_moments_are_refused_with_the_way_out() -> None:
    promised = {"problem": PROMISED, "distance": 1.0, "clip": None, "reg": None}
    with pytest.raises(ConditionError, match=r"moment_order must be >= 4.*clip= and reg="):
        calibrated(**promised)
    with pytest.raises(MissingConstantError, match="strong_convexity"):
        calibrated(
            **{**promised, "problem": replace(PROMISED, moment_order=4.0)}, method="reduction"
        )
