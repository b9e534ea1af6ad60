"""AcceleratedSGD and ProximalSGD against the paper's steps, their ledgers, batches, checkpoints and refusals."""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torch_dpsco as dp
from tests.algorithms.heavy_runs import (
    DELTA,
    DTYPES,
    LOSS,
    PROBLEM,
    Run,
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
    sampler_of,
    saved,
)
from tests.reference import heavy_tailed_literal as literal
from tests.streams import seeded_sampler
from torch_dpsco.errors import (
    AdjacencyError,
    MissingConstantError,
    PrivacyError,
    SequenceError,
    UnitError,
    UnknownSamplerError,
    UtilityWarning,
)
from torch_dpsco.sampling import PrivateLoader, make_sampler

# Seeds warn in every test here.
CLASSES = [dp.AcceleratedSGD, dp.ProximalSGD]
N = 26  # 4 batches of 6, and one of 2


def build(
    cls: type[dp.PrivateOptimizer] = dp.AcceleratedSGD,
    *,
    lr: float = 0.05,
    clip: float = 1.5,
    noise: float = 0.0,
    n: int = N,
    batch: int = 6,
    dtype: torch.dtype = torch.float32,
    groups: bool = False,
    **changes: Any,
) -> Run:
    layer = model(dtype)
    params = [{"params": [p]} for p in layer.parameters()] if groups else layer.parameters()
    kind = {
        "lr": lr,
        "clip": clip,
        "noise_multiplier": noise,
        "batch_size": batch,
        "n": n,
        **changes,
    }
    return Run(layer, made(cls, params, **kind))


def calibrated(
    cls: type[dp.PrivateOptimizer] = dp.AcceleratedSGD,
    adjacency: str = "replace_one",
    n: int = 120,
    **changes: Any,
) -> Run:
    layer = model()
    arguments: dict[str, Any] = {
        "problem": PROBLEM,
        "clip": 2.0,
        "steps": 4,
        "dim": layer,
        **changes,
    }
    budget = dp.Budget(1.0, DELTA, adjacency)
    return Run(layer, made(cls, layer.parameters(), n=n, budget=budget, **arguments))


# -- the paper, line by line ------------------------------------------------------------------------------------------


@pytest.mark.cases(6, 2)
@pytest.mark.parametrize("groups", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("radius", [math.inf, 0.6])
def test_accelerated_steps_are_those_of_algorithm_2(
    radius: float, dtype: torch.dtype, groups: bool
) -> None:
    prox = dp.prox.Ball(radius) if radius < math.inf else None
    lr, n = 0.05, 24
    run = build(n=n, lr=lr, dtype=dtype, groups=groups, prox=prox)
    start, queries, answers = joint(run.model), [], []
    for batch in run.seeded():
        queries.append(joint(run.model))
        run.train([batch])
        answers.append(run.answer())
    clipped = [math.hypot(*gradient_of(records(n))(start, i)) > 1.5 for i in range(n)]
    assert any(clipped)
    assert not all(clipped)
    expected, points = literal.algorithm_2(
        gradient_of(records(n, dtype)),
        start,
        run.batches,
        1.5,
        1 / (2 * lr),
        literal.ball(radius),
    )
    np.testing.assert_allclose(queries, points, rtol=0, atol=DTYPES[dtype])
    np.testing.assert_allclose(answers, expected, rtol=0, atol=DTYPES[dtype])
    if radius < math.inf:
        assert math.hypot(*answers[-1]) <= radius * (1 + 1e-6)
        assert not np.allclose(
            answers,
            literal.algorithm_2(
                gradient_of(records(n, dtype)), start, run.batches, 1.5, 1 / (2 * lr)
            )[0],
            atol=1e-3,
        )
    run.opt.finalize()
    np.testing.assert_array_equal(joint(run.model), answers[-1])


@pytest.mark.cases(6, 3)
@pytest.mark.parametrize("groups", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("prox", "plain"),
    [
        (dp.prox.L1(0.4), literal.soft_threshold(0.4)),
        (dp.prox.Ball(0.4), lambda v, eta: literal.ball(0.4)(v)),
        (dp.prox.L2(0.3), lambda v, eta: v * max(0.0, 1 - 0.3 * eta / np.linalg.norm(v))),
        (None, lambda v, eta: v),
    ],
    ids=["L1", "Ball", "L2", "none"],
)
def test_proximal_steps_are_those_of_algorithm_8(
    prox: Any, plain: Any, dtype: torch.dtype, groups: bool
) -> None:
    run = build(dp.ProximalSGD, n=24, lr=0.2, dtype=dtype, groups=groups, prox=prox)
    start, answers = joint(run.model), []
    for batch in run.seeded():
        run.train([batch])
        answers.append(run.answer())
        assert np.array_equal(joint(run.model), answers[-1])
    for k in range(1, len(answers) + 1):
        expected = literal.algorithm_8(
            gradient_of(records(24, dtype)), start, run.batches[:k], 1.5, 0.2, plain
        )
        np.testing.assert_allclose(answers[k - 1], expected, rtol=0, atol=DTYPES[dtype])


def test_the_planned_step_size_and_steps_are_those_of_the_theorem() -> None:
    problem = dp.Problem(smoothness=2.0, moment=3.0, moment_order=4.0, pl_constant=0.5)
    run = calibrated(problem=problem, clip=None, steps=None, distance=1.0, n=2000)
    budget = dp.Budget(1.0, DELTA, "replace_one")
    plan = dp.AcceleratedSGD.plan(problem=problem, n=2000, budget=budget, dim=4, distance=1.0)
    assert (run.opt.schedule.steps, run.opt.oracle.fixed_clip) == (plan.steps, plan.clip)
    assert run.opt.param_groups[0]["lr"] == plan.lr <= 1 / (4 * 2.0)
    assert run.opt.design == dp.Disjoint(2000 // plan.steps, 2000)
    assert plan.risk_bound > 0
    proximal = dp.ProximalSGD.plan(problem=problem, n=2000, budget=budget, dim=4, distance=1.0)
    assert proximal.lr == 1 / (2 * 2.0)


def test_a_risk_bound_is_given_only_where_the_theorem_covers_the_run() -> None:
    law = dp.Problem(
        smoothness=2.0,
        moment=3.0,
        moment_order=4.0,
        strong_convexity=0.5,
        pl_constant=0.5,
        radius=1.0,
    )
    kind = {"problem": law, "n": 2000, "dim": 4}
    for cls in (*CLASSES, dp.ClippedSGD):
        plan = cls.plan(**kind, budget=dp.Budget(1.0, DELTA))
        assert plan.risk_bound is not None
        assert "excess risk of the answer at most" in str(plan)
        own = cls.plan(**kind, noise_multiplier=plan.noise_multiplier)
        assert (own.steps, own.clip, own.risk_bound) == (plan.steps, plan.clip, plan.risk_bound)
        for change in ({"lr": plan.lr}, {"batch_size": 7}, {"sampling": "assigned"}):
            assert (
                cls.plan(**kind, noise_multiplier=own.noise_multiplier, **change).risk_bound
                is None
            )
    assert dp.ClippedSGD.plan(**kind, noise_multiplier=5.0, average="last").risk_bound is None


def test_the_noise_is_that_of_one_batch_on_the_clipped_sum() -> None:
    run = calibrated()
    run.train(steps=1)
    std = run.opt.oracle.noise_multiplier * 2.0 / 30
    assert (
        std <= run.opt.metrics["noise_std"] <= 1.01 * std
    )  # rounding is part of the sensitivity


# -- ledger -----------------------------------------------------------------------------------------------------------


@pytest.mark.cases(3, 1)
@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("adjacency", ["replace_one", "zero_out", "add_remove"])
def test_the_budget_is_spent_to_a_thousandth_and_known_all_along(
    cls: Any, adjacency: str
) -> None:
    check_ledger(partial(calibrated, cls, adjacency), dp.Budget(1.0, DELTA, adjacency))


@pytest.mark.parametrize("adjacency", ["replace_one", "zero_out", "add_remove"])
def test_a_plan_never_costs_less_than_the_ledger_holds(adjacency: str) -> None:
    run = build(n=26, noise=3.0, adjacency=adjacency)
    for k, batch in enumerate(run.seeded(), start=1):
        run.train([batch])
        planned = dp.Accountant(adjacency=adjacency)
        planned.record(run.opt.design.event(run.opt.oracle.event(), k))
        spent = run.opt.accountant.get_epsilon(DELTA)
        assert spent == pytest.approx(planned.get_epsilon(DELTA), rel=1e-12)
        assert spent <= planned.get_epsilon(DELTA) * (1 + 1e-12)


def test_one_more_pass_composes_and_does_not_hide_in_the_first() -> None:
    accountant = dp.Accountant()
    epsilons = []
    for _ in range(2):
        build(noise=3.0, accountant=accountant).train()
        epsilons.append(accountant.get_epsilon(DELTA))
    assert epsilons[1] > 1.3 * epsilons[0]


# -- batches ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("adjacency", ["replace_one", "add_remove"])
def test_each_record_is_used_once(cls: Any, adjacency: str) -> None:
    run = build(cls, adjacency=adjacency).train()
    (used,) = parts_used(run)
    assert set(used.values()) == {1}
    assert len(used) == N
    if adjacency == "replace_one":
        assert [len(batch) for batch in run.batches] == [6, 6, 6, 6, 2]


def test_add_remove_is_refused_with_batches_that_are_cut_by_position() -> None:
    for sampling in ("shuffled", dp.Disjoint(6, N)):
        with pytest.raises(AdjacencyError, match="add_remove"):
            build(sampling=sampling, adjacency="add_remove")


def test_batches_that_may_repeat_a_record_are_refused() -> None:
    run = build()
    data = records(N)
    for design in (
        dp.Poisson(6, N),
        dp.Fixed(6, N),
        dp.Shuffled(6, N),
        dp.Assigned(6, N),
        dp.Disjoint(5, N),
    ):
        sampler = make_sampler(design, size=N)
        for loader in (
            PrivateLoader(data, sampler),
            DataLoader(data, batch_sampler=make_sampler(design, size=N)),
        ):
            with pytest.raises(AdjacencyError, match="this optimizer's design"):
                run.opt.bind(loader)
    for foreign in (
        DataLoader(data, batch_size=6),
        DataLoader(data, batch_size=6, shuffle=True),
    ):
        with pytest.raises(UnknownSamplerError):
            run.opt.bind(foreign)
    assert len(run.opt.accountant) == 0


@pytest.mark.parametrize("adjacency", ["replace_one", "add_remove"])
def test_a_second_epoch_of_a_loader_raises(adjacency: str) -> None:
    run = build(adjacency=adjacency)
    loader = run.seeded()
    run.train(loader, 2)
    with pytest.raises(SequenceError, match="each record may be used once"):
        run.train(loader)
    assert run.opt.steps == 2


def test_the_last_ragged_batch_is_divided_by_the_public_size() -> None:
    run = build(dp.ProximalSGD, n=8, batch=6, clip=1e6, lr=0.1)
    run.train(steps=1)
    before = joint(run.model)
    run = build(dp.ProximalSGD, n=8, batch=6, clip=1e6, lr=0.1).train()
    assert [len(batch) for batch in run.batches] == [6, 2]
    rows = [gradient_of(records(8))(before, i) for i in run.batches[1]]
    np.testing.assert_allclose(
        joint(run.model), before - 0.1 * np.sum(rows, axis=0) / 6, rtol=1e-4
    )


@pytest.mark.parametrize("adjacency", ["replace_one", "add_remove"])
def test_the_order_of_records_cannot_depend_on_the_data(adjacency: str) -> None:
    run = build(adjacency=adjacency)
    orders = []
    for data in (
        records(N),
        TensorDataset(*(torch.flip(t, [0]) for t in records(N).tensors[:2]), torch.arange(N)),
    ):
        sampler = seeded_sampler(run.opt.design, size=N, seed=7)
        orders.append([batch[2].tolist() for batch in _unlogged(PrivateLoader(data, sampler))])
    assert orders[0] == orders[1]
    for wrong in ("shuffle", "sampler", "key", "sort"):
        with pytest.raises(TypeError):
            run.opt.loader(records(N), **{wrong: True})


def _unlogged(loader: PrivateLoader) -> Any:
    for batch in loader:
        loader.batch_sampler.log.take()
        loader.batch_sampler.log.use_up()
        yield batch


def test_an_empty_batch_of_assigned_records_is_a_step_of_noise() -> None:
    """40 batches for 40 records: some are empty, with any of the seeds up to 1e-14."""
    run = build(n=40, batch=1, adjacency="add_remove", noise=1.0)
    run.train()
    sizes = [len(batch) for batch in run.batches]
    assert 0 in sizes
    assert len(sizes) == run.opt.steps == len(run.opt.accountant) == 40
    assert sum(sizes) == 40


def test_all_of_the_records_train_under_add_remove_too() -> None:
    run = calibrated(adjacency="add_remove", n=100, steps=60)
    assert run.opt.design.steps_per_epoch <= 60, (
        "some records are assigned to batches that no step uses"
    )


def test_a_true_size_that_is_private_is_in_no_public_checkpoint() -> None:
    layer = model()
    plan = dp.AcceleratedSGD.plan(
        n=N, lr=0.1, clip=1.0, noise_multiplier=1.0, batch_size=6, adjacency="add_remove"
    )
    opt = dp.AcceleratedSGD(layer.parameters(), plan)
    for x, y, _ in opt.loader(records(N + 3)):
        LOSS(layer(x), y).backward()
        opt.step()
        break
    state = opt.state_dict()["dpsco"]
    sizes = {
        tensor.numel()
        for tensor in state.get("partition", {}).values()
        if isinstance(tensor, torch.Tensor)
    }
    assert state["confidential"] or N + 3 not in sizes


def test_the_keys_of_records_are_secret_where_removing_one_moves_the_others() -> None:
    """Keys go with positions: who knows them sees every later record change its batch when one is removed."""
    run = build(adjacency="add_remove")
    run.train(run.seeded(), 2)
    assert run.opt.state_dict()["dpsco"]["confidential"]
    run.opt.finalize()
    state = run.opt.state_dict()["dpsco"]
    assert not state["confidential"]
    assert "partition" not in state


# -- checkpoints ------------------------------------------------------------------------------------------------------

BUILDS = {
    "accelerated": build,
    "accelerated-ball": partial(build, prox=dp.prox.Ball(0.6)),
    "accelerated-assigned": partial(build, adjacency="add_remove"),
    "proximal": partial(build, dp.ProximalSGD, prox=dp.prox.L1(0.1)),
    "proximal-float64": partial(build, dp.ProximalSGD, dtype=torch.float64, groups=True),
}


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("name", BUILDS)
def test_a_saved_run_goes_on_with_the_unused_records_to_the_same_answer(name: str) -> None:
    check_resumption(BUILDS[name])


@pytest.mark.cases(3, 1)
@pytest.mark.parametrize("name", BUILDS)
def test_chunks_make_the_steps_of_whole_draws(name: str) -> None:
    changes = dict(BUILDS[name].keywords) if isinstance(BUILDS[name], partial) else {}
    changes.pop("dtype", None)
    cls = BUILDS[name].args if isinstance(BUILDS[name], partial) else ()
    check_chunks(partial(build, *cls, **changes))


def test_a_checkpoint_of_another_plan_is_refused() -> None:
    check_other_plans(
        build,
        {"clip": 2.0},
        {"noise": 0.5},
        {"batch": 5},
        {"n": 27},
        {"steps": 3},
        {"reg": 0.1},
        {"prox": dp.prox.Ball(1.0)},
        {"adjacency": "replace_one"},
        {"adjacency": "add_remove"},
    )


def test_a_draw_that_was_given_up_is_the_next_one_again_and_none_is_used_twice() -> None:
    run = build()
    loader = iter(run.seeded())
    run.train([next(loader)])
    given_up = next(loader)
    run.opt.discard()
    with pytest.raises(SequenceError, match="the draw was given up"):
        next(loader)
    again = next(iter(run.resumed()))
    assert again[2].tolist() == given_up[2].tolist()
    run.train([again])
    other = reloaded(run, build)
    for batch in other.resumed():
        other.train([batch])
    (used,) = parts_used(other)
    assert max(used.values()) == 1
    events = [times for _, _, _, times in other.opt.accountant.ledger.entries()]
    assert set(events) == {1}


def test_binding_a_loader_again_does_not_forget_what_was_used() -> None:
    run = build()
    loader = run.seeded()
    run.train(loader, 2)
    run.opt.bind(loader)
    run.train(run.resumed())
    (used,) = parts_used(run)
    assert max(used.values()) == 1


def test_a_copy_goes_on_with_the_unused_records_or_refuses_to() -> None:
    run = build()
    run.train(run.seeded(), 2)
    twin = Run(*copy.deepcopy((run.model, run.opt)), [list(batch) for batch in run.batches])
    try:
        loader = twin.resumed()
    except SequenceError:
        return
    twin.train(loader)
    (used,) = parts_used(twin)
    assert max(used.values()) == 1


def test_a_finished_run_can_be_loaded() -> None:
    run = build().train()
    other = reloaded(run, build)
    assert (other.opt.finalized, other.opt.steps) == (True, run.opt.steps)
    np.testing.assert_array_equal(other.answer(), run.answer())
    with pytest.warns(UtilityWarning, match="this loop has no batches"):
        other.train(other.resumed())
    assert other.opt.steps == run.opt.steps


def test_resuming_a_data_set_of_another_size_is_refused() -> None:
    run = build(adjacency="add_remove")
    run.train(run.seeded(), 2)
    for size in (N - 1, N + 1):
        with pytest.raises(ValueError, match=r"data set.*(size|got)"):
            run.opt.loader(records(size), resume=True)
    other = reloaded(run, partial(build, adjacency="add_remove"))
    with pytest.raises(ValueError, match=r"data set.*(size|got)"):
        other.opt.loader(records(N - 1), resume=True)
    with pytest.raises(UnitError, match="26"):
        build().opt.loader(records(N + 1))


def test_a_partition_is_random_and_that_of_a_resumed_run_is_not_new() -> None:
    first, second = (sampler_of(build().opt.loader(records(N))) for _ in range(2))
    orders = [
        [indices.tolist() for _, indices in sampler.draws()] for sampler in (first, second)
    ]
    assert orders[0] != orders[1]  # 1 in 26! that they agree
    run = build()
    run.train(run.seeded(), 1)
    name = run.opt.state_dict()["dpsco"]["partition"]
    again = reloaded(run, build).opt.state_dict()["dpsco"]["partition"]
    assert torch.equal(name["cut"], again["cut"])
    assert name["made"] == again["made"] == 1


# -- fit, closures, groups, frozen parameters -------------------------------------------------------------------------


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("adjacency", ["replace_one", "add_remove"])
def test_an_interrupted_fit_goes_on(cls: Any, adjacency: str) -> None:
    check_interrupted_fit(partial(calibrated, cls, adjacency), at=2)


@pytest.mark.parametrize("cls", CLASSES)
def test_a_closure_makes_the_same_steps(cls: Any) -> None:
    plain, closed = build(cls).train(), build(cls)
    for x, y, _ in closed.seeded():

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            closed.opt.zero_grad()
            loss = LOSS(closed.model(x), y)
            loss.backward()
            return loss

        closed.opt.step(closure)
    np.testing.assert_array_equal(closed.answer(), plain.answer())


@pytest.mark.parametrize("cls", CLASSES)
def test_frozen_parameters_stay_and_are_no_part_of_the_constraint(cls: Any) -> None:
    layer = model()
    layer.bias.requires_grad_(False)
    with torch.no_grad():
        layer.bias.fill_(5.0)
    plan = cls.plan(
        n=N, lr=0.05, clip=1.5, noise_multiplier=0.0, batch_size=6, sampling="shuffled"
    )
    opt = cls(layer.parameters(), plan, prox=dp.prox.Ball(0.3))
    run = Run(layer, opt).train()
    assert layer.bias.item() == 5.0
    norm = float(layer.weight.detach().double().norm())
    assert 0.25 < norm <= 0.3
    other = Run(model(), None)  # type: ignore[arg-type]
    other.model.bias.requires_grad_(False)
    other.opt = cls(other.model.parameters(), plan, prox=dp.prox.Ball(0.3))
    run = Run(run.model, run.opt)
    state = saved(run)
    other.model.load_state_dict(state["model"])
    other.opt.load_state_dict(state["opt"])
    np.testing.assert_array_equal(other.answer(), run.answer())


# -- the regularizer --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", CLASSES)
def test_the_regularizer_is_added_after_the_clip(cls: Any) -> None:
    """Zero rows and a huge regularizer: if it passed the clip, the step would be at most clip * lr."""
    layer = nn.Linear(3, 1, dtype=torch.float64)
    nn.init.constant_(layer.weight, 100.0)
    nn.init.constant_(layer.bias, 0.0)
    dp.attach(layer)
    opt = cls(
        layer.parameters(),
        cls.plan(
            n=4, lr=0.1, clip=1e-3, noise_multiplier=0.0, batch_size=2, sampling="shuffled"
        ),
        reg=5.0,
    )
    for (x,) in opt.loader(TensorDataset(torch.zeros(4, 3, dtype=torch.float64))):
        (0 * layer(x)).mean().backward()
        opt.step()
        torch.testing.assert_close(
            layer.weight.detach(), torch.full((1, 3), 50.0, dtype=torch.float64)
        )
        break


@pytest.mark.parametrize("cls", CLASSES)
def test_weight_decay_in_the_loss_or_in_the_arguments_is_refused(cls: Any) -> None:
    run = calibrated(cls)
    pairs = TensorDataset(*records(120).tensors[:2])

    def decayed(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return LOSS(scores, targets) + 0.1 * sum(
            p.square().sum() for p in run.model.parameters()
        )

    with pytest.raises((PrivacyError, ValueError), match="reg"):
        dp.fit(run.model, run.opt, pairs, decayed, progress=False)
    assert len(run.opt.accountant) == 0
    for wrong in ("weight_decay", "momentum"):
        with pytest.raises(TypeError, match=wrong):
            build(cls, **{wrong: 0.1})


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lr": -0.1}, "lr must be >= 0"),
        ({"clip": 0.0}, "clip must be > 0"),
        ({"clip": math.inf}, "clip must be"),
        ({"clip": math.nan}, "clip must be"),
        ({"noise": -1.0}, "noise_multiplier must be >= 0"),
        ({"noise": None}, "budget or noise_multiplier must be given"),
        ({"clip": None}, "clip or pilot must be given"),
        ({"batch": 0}, "batch_size must be"),
        ({"batch": 27}, "batch_size must be <= n=26"),
        ({"n": 0}, "n must be"),
        ({"n": 2.5}, "n must be an integer"),
        ({"steps": 0}, "steps must be"),
        ({"reg": -1.0}, "reg must be >= 0"),
        ({"prox": dp.prox.L1(0.1)}, "prox must be a projection.*ProximalSGD"),
        ({"sampling": dp.Disjoint(6, 25)}, "n must be 25, that of the design"),
        ({"sampling": dp.Disjoint(5, N)}, "batch_size must be 5"),
        ({"sampling": dp.Poisson(6, N)}, "sampling must be one pass"),
        ({"sampling": "poisson"}, "sampling must be one of shuffled, assigned"),
        ({"n": None}, "n must be given"),
        ({"epochs": 2}, "epochs must be 1 for one pass"),
        ({"steps": 6}, "steps must be <= 5, one pass"),
        ({"adjacency": "bounded"}, "adjacency must be"),
        ({"average": "last"}, "average must be one of weighted"),
        ({"prox": 1}, "prox must be"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        build(**changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"steps": 0}, "steps must be"),
        ({"steps": 121}, "steps must be <= "),
        ({"n": 0}, "n must be"),
        ({"clip": -1.0}, "clip must be > 0"),
        ({"clip": "2"}, "clip must be a number"),
        ({"lr": -1.0}, "lr must be >= 0"),
        ({"distance": -1.0}, "distance must be > 0"),
        ({"problem": dp.Problem()}, r"needs smoothness.*Problem\(smoothness=...\)"),
        ({"clip": None}, r"needs moment, moment_order.*Problem\(moment="),
        (
            {"clip": None, "problem": dp.Problem(smoothness=1.0, moment=1.0, moment_order=4.0)},
            "distance=.*or promise a radius",
        ),
        ({"prox": 1}, "prox must be"),
    ],
)
def test_what_cannot_be_planned_is_refused_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises((ValueError, MissingConstantError), match=words):
        calibrated(**changes)


def test_a_promised_moment_does_not_take_a_chosen_clip_away() -> None:
    for cls in (dp.ClippedSGD, dp.ProximalSGD):
        problem = dp.Problem(smoothness=1.0, moment=1.0, moment_order=4.0)
        assert calibrated(cls, problem=problem, clip=1.0).opt.oracle.fixed_clip == 1.0


def test_an_accountant_with_another_budget_or_adjacency_is_refused() -> None:
    with pytest.raises(AdjacencyError, match="budget"):
        calibrated(accountant=dp.Accountant(dp.Budget(2.0, DELTA)))
    with pytest.raises(AdjacencyError, match="adjacency"):
        calibrated(accountant=dp.Accountant(adjacency="zero_out"))


def test_a_budget_that_is_not_planned_is_refused() -> None:
    budget = dp.Budget(1.0, DELTA, mode="gdp")
    with pytest.raises(ValueError, match="budget must be of mode 'planned'"):
        dp.AcceleratedSGD.plan(problem=PROBLEM, n=100, budget=budget, dim=4, clip=1.0)


def test_a_penalty_over_all_parameters_with_several_rates_is_refused_before_anything_is_spent() -> (
    None
):
    layer = model()
    groups = [{"params": [layer.weight], "lr": 0.1}, {"params": [layer.bias], "lr": 0.2}]
    accountant = dp.Accountant()
    plan = dp.ProximalSGD.plan(n=N, lr=0.1, clip=1.0, noise_multiplier=1.0, batch_size=6)
    with pytest.raises(ValueError, match="lr must be the same"):
        Run(
            layer, dp.ProximalSGD(groups, plan, prox=dp.prox.L2(0.1), accountant=accountant)
        ).train()
    assert len(accountant) == 0
