"""Learning rates, groups, momentum, Adam, averages, mixed precision, hooks: what happens around a release."""

from __future__ import annotations

import warnings
from dataclasses import replace
from itertools import groupby
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

import torch_dpsco as dp
from tests.compat.harness import (
    LR,
    assert_same_model,
    clipped_means,
    dataset,
    network,
    numbers,
    private_optimizer,
    replayed,
    squared,
)
from tests.compat.test_loops import BATCH, STEPS, N, Run
from torch_dpsco.errors import SequenceError, UtilityWarning

PLAIN: Any = torch.optim.SGD

SCHEDULERS = {
    "StepLR": lambda opt: lr_scheduler.StepLR(opt, 2, 0.5),
    "LambdaLR": lambda opt: lr_scheduler.LambdaLR(opt, lambda k: 1 / (1 + k)),
    "CosineAnnealingLR": lambda opt: lr_scheduler.CosineAnnealingLR(opt, STEPS),
    "CosineAnnealingWarmRestarts": lambda opt: lr_scheduler.CosineAnnealingWarmRestarts(opt, 2),
    "OneCycleLR": lambda opt: lr_scheduler.OneCycleLR(
        opt, 0.2, total_steps=STEPS + 1, cycle_momentum=False
    ),
    "CyclicLR": lambda opt: lr_scheduler.CyclicLR(opt, 0.01, 0.1, cycle_momentum=False),
    "SequentialLR": lambda opt: lr_scheduler.SequentialLR(
        opt, [lr_scheduler.ConstantLR(opt, 0.5), lr_scheduler.ExponentialLR(opt, 0.9)], [2]
    ),
    "SWALR": lambda opt: SWALR(opt, 0.05, anneal_epochs=2),
}


# SequentialLR of older versions of torch calls `step` of its own schedulers in a way that torch deprecates
@pytest.mark.cases(2, 1)
@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step:UserWarning")
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_sets_the_rates_of_a_plain_optimizer(name):
    run = Run()
    scheduler = SCHEDULERS[name](run.optimizer)
    plain = network()
    reference = PLAIN(plain.parameters(), lr=LR)
    pace = SCHEDULERS[name](reference)
    for batch in run.loader():
        run.optimizer.zero_grad()
        run.backward(batch)
        run.optimizer.step()
        scheduler.step()
        for p, mean in zip(plain.parameters(), clipped_means(plain, batch, BATCH), strict=True):
            p.grad = mean
        reference.step()
        pace.step()
        assert run.optimizer.param_groups[0]["lr"] == pytest.approx(
            reference.param_groups[0]["lr"]
        )
    assert run.optimizer.steps == len(run.optimizer.accountant) == STEPS
    assert_same_model(run.model, plain)


def test_a_changed_rate_warns_once_where_it_voids_a_theorem():
    run = Run()
    problem = dp.losses.Logistic().problem(bound_x=2.0, radius=1.0)
    params, dim = list(run.model.parameters()), sum(p.numel() for p in run.model.parameters())
    plan = dp.HolderSGD.plan(
        problem=problem,
        n=N,
        batch_size=BATCH,
        steps=4,
        noise_multiplier=1.0,
        lr=0.1,
        average="uniform",
        dim=dim,
    )
    assert plan.risk_bound is not None
    for expected in (
        [[], [], [UtilityWarning], []],
        [[], [], [], []],
    ):  # with the theorem, and without
        run.optimizer = dp.HolderSGD(params, plan)
        scheduler = lr_scheduler.ExponentialLR(run.optimizer, 0.9)
        found = []
        for batch in run.loader(4):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                run.train([batch])
            found.append([w.category for w in caught])
            if run.optimizer.steps > 1:
                scheduler.step()
        assert found == expected
        plan = replace(plan, risk_bound=None)


def test_one_cycle_without_momentum_says_what_to_do():
    with pytest.raises(ValueError, match="cycle_momentum"):
        lr_scheduler.OneCycleLR(Run().optimizer, 0.2, total_steps=4)


def test_a_rate_of_another_group_voids_a_theorem_too():
    run, problem = Run(), dp.losses.Logistic().problem(bound_x=2.0, radius=1.0)
    made = {"problem": problem, "n": N, "batch_size": BATCH, "steps": 2, "noise_multiplier": 1.0}
    made |= {"average": "uniform", "dim": run.model}
    assert dp.HolderSGD.plan(lr=0.0, **made).risk_bound is None  # nothing moves
    plan = dp.HolderSGD.plan(lr=0.1, **made)
    groups = [{"params": [p], "lr": 0.1 * k} for k, p in enumerate(run.model.parameters())]
    run.optimizer = dp.HolderSGD(groups, plan)
    with pytest.warns(UtilityWarning, match="lr is not that of the plan"):
        run.train(run.loader(1))


def by_layer(model: nn.Module) -> list[dict[str, Any]]:
    return [
        {"params": list(layer.parameters()), "lr": LR / (k + 1)}
        for k, layer in enumerate(model)
        if k != 1
    ]


def test_groups_have_their_own_rates():
    model = dp.attach(network(), loss_reduction="sum")
    run = Run()
    run.model, run.optimizer = (
        model,
        private_optimizer(model, dp.Poisson(BATCH, N), params=by_layer(model)),
    )
    run.train(run.loader())
    plain = network()
    reference = PLAIN(by_layer(plain), lr=LR)
    for draw in run.draws:
        for p, mean in zip(plain.parameters(), clipped_means(plain, draw, BATCH), strict=True):
            p.grad = mean  # clipped over all groups at once
        reference.step()
    assert_same_model(model, plain)


def test_groups_cannot_be_added_after_construction():
    run = Run()
    before = run.optimizer.param_groups[0]["params"][:]
    with pytest.raises(SequenceError, match="make a new optimizer"):
        run.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    assert len(run.optimizer.param_groups) == 1
    assert all(
        p is q for p, q in zip(run.optimizer.param_groups[0]["params"], before, strict=True)
    )


class Lion(torch.optim.Optimizer):
    """Chen and others 2023, Algorithm 2."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                p.mul_(1.0 - group["lr"] * group["weight_decay"])
                p.sub_(mean.lerp(p.grad, 1.0 - first).sign(), alpha=group["lr"])
                mean.lerp_(p.grad, 1.0 - second)


INNER = {
    "SGD with momentum": lambda params: torch.optim.SGD(
        params, lr=0.1, momentum=0.9, nesterov=True
    ),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.1),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.1, weight_decay=0.1),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=0.1),
    "Lion": lambda params: Lion(params, lr=0.1),
}
CYCLES = {
    "OneCycleLR": lambda opt: lr_scheduler.OneCycleLR(opt, 0.2, total_steps=STEPS + 1),
    "CyclicLR": lambda opt: lr_scheduler.CyclicLR(opt, 0.0, 0.1, step_size_up=2),
    "LambdaLR": lambda opt: lr_scheduler.LambdaLR(opt, lambda k: min(1.0, k / 3)),
    "LinearLR": lambda opt: lr_scheduler.LinearLR(opt, 0.1, total_iters=3),
}


def with_inner(name: str, schedule: Any = None) -> tuple[Run, Any]:
    run = Run()
    inner = INNER[name](run.model.parameters())
    scheduler = schedule and schedule(inner)
    rule = dp.rules.TorchRule(inner)
    run.optimizer = private_optimizer(
        run.model, dp.Poisson(BATCH, N), params=inner.param_groups, lr=0.1, rule=rule
    )
    return run, scheduler


@pytest.mark.cases(2, 1)
@pytest.mark.parametrize("name", INNER)
def test_torch_optimizers_work_on_the_private_mean(name):
    run, _ = with_inner(name)
    run.train(run.loader())
    run.check(optimizer=INNER[name])


def test_a_scheduler_reaches_the_optimizer_inside_of_a_rule():
    run, _ = with_inner("Adam")
    scheduler = SCHEDULERS["LambdaLR"](run.optimizer)
    for batch in run.loader(3):
        run.train([batch])
        scheduler.step()
    assert run.optimizer.rule.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 / 4)


@pytest.mark.cases(3, 1)
@pytest.mark.parametrize("scheduler", CYCLES)
@pytest.mark.parametrize("name", ["SGD with momentum", "AdamW", "RMSprop", "Lion"])
def test_schedulers_cycle_rate_and_momentum_as_in_a_plain_loop(name, scheduler):
    """Warm-ups from 0 too: of the private optimizer, or of the inner one before there is a private one."""
    for before in (False, True):
        run, made = with_inner(name, CYCLES[scheduler] if before else None)
        pace = made or CYCLES[scheduler](run.optimizer)
        plain = network()
        reference = INNER[name](plain.parameters())
        their_pace = CYCLES[scheduler](reference)
        for batch in run.loader():
            run.optimizer.zero_grad()
            run.backward(batch)
            run.optimizer.step()
            pace.step()
            for p, mean in zip(
                plain.parameters(), clipped_means(plain, batch, BATCH), strict=True
            ):
                p.grad = mean
            reference.step()
            their_pace.step()
            for ours, theirs in zip(
                run.optimizer.param_groups, reference.param_groups, strict=True
            ):
                for key in {"lr", "momentum", "betas"} & theirs.keys():
                    assert ours[key] == theirs[key]
        assert_same_model(run.model, plain)
        assert len(run.optimizer.accountant) == STEPS


def test_a_step_of_size_0_is_charged_and_moves_nothing():
    run = Run(lr=0.0)
    before = [p.detach().clone() for p in run.model.parameters()]
    run.train(run.loader(2))
    assert all(map(torch.equal, before, run.model.parameters()))
    assert run.optimizer.steps == len(run.optimizer.accountant) == 2


def test_maximize_goes_uphill_against_reg_and_warns_of_the_theorem():
    moves = []
    for uphill in (False, True):
        run = Run()
        start = torch.cat([p.detach().flatten() for p in run.model.parameters()])
        inner = torch.optim.SGD(run.model.parameters(), lr=0.1, maximize=uphill)
        rule = dp.rules.TorchRule(inner)
        assert rule.plain is not uphill
        run.optimizer = private_optimizer(
            run.model, dp.Full(N), params=inner.param_groups, lr=0.1, rule=rule, reg=0.5
        )
        run.train(run.loader(1))
        moves.append(torch.cat([p.detach().flatten() for p in run.model.parameters()]) - start)
    torch.testing.assert_close(moves[0] + moves[1], -2 * 0.1 * 0.5 * start)
    problem = dp.losses.Logistic().problem(bound_x=2.0, radius=1.0)
    plan = dp.HolderSGD.plan(
        problem=problem, n=N, batch_size=BATCH, steps=4, noise_multiplier=1.0, lr=0.1,
        average="uniform", dim=run.model,
    )  # fmt: skip
    assert plan.risk_bound is not None
    with pytest.warns(UtilityWarning, match="SGD on private means is post-processing"):
        dp.HolderSGD(inner.param_groups, plan, rule=dp.rules.TorchRule(inner))
    with pytest.raises(ValueError, match=r"rule must be rules.TorchRule.*maximize=True"):
        dp.HolderSGD(inner.param_groups, plan)
    with pytest.raises(ValueError, match=r"maximize must be given .*rule=dp.rules.TorchRule"):
        dp.HolderSGD(run.model.parameters(), plan, maximize=True)


@pytest.mark.parametrize("kind", ["mean", "ema"])
def test_averaged_models_average_the_iterates(kind):
    run, iterates = Run(), []
    average = AveragedModel(
        run.model, multi_avg_fn=get_ema_multi_avg_fn(0.5) if kind == "ema" else None
    )
    for batch in run.loader():
        run.train([batch])
        average.update_parameters(run.model)
        iterates.append([p.detach().clone() for p in run.model.parameters()])
    run.check()
    expected = iterates[0]
    for k, iterate in enumerate(iterates[1:], start=2):
        share = 0.5 if kind == "ema" else 1 / k
        expected = [e + share * (new - e) for e, new in zip(expected, iterate, strict=True)]
    for found, e in zip(average.module.parameters(), expected, strict=True):
        torch.testing.assert_close(found, e)
    average.eval()
    assert average(dataset().tensors[0]).shape == (N, 1)


# -- mixed precision --------------------------------------------------------------------------------------------------


def test_a_gradient_scaler_changes_nothing():
    run = Run()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=10**9)
    for batch in run.loader():
        run.draws.append(tuple(batch))
        run.optimizer.zero_grad()
        scaler.scale(squared(run.model(batch[0]), batch[1])).backward()
        scaler.step(run.optimizer)
        scaler.update()
    run.check()
    assert scaler.get_scale() == 1024.0


@pytest.mark.filterwarnings(
    "ignore:Mismatch dtype between input and weight:UserWarning"
)  # RMSNorm says so
@pytest.mark.parametrize("rows", ["auto", "dense"])
def test_autocast_needs_a_loss_that_sums(rows):
    """Rows are those of the records alone in autocast, whose own rounding differs between versions of torch."""
    for reduction in ("mean", "sum"):
        model = dp.attach(network().float(), rows=rows, loss_reduction=reduction)
        optimizer = private_optimizer(model, dp.Full(N))
        before = [p.detach().clone() for p in model.parameters()]
        for x, y in optimizer.loader(dataset(), steps=1, isolation="none"):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = squared(model(x.float()), y.float())
            if reduction == "mean":
                with pytest.raises(SequenceError, match="reduction='sum'"):
                    (loss / N).backward()
                break
            loss.backward()
            optimizer.step()
            alone = network().float()
            alone.forward = torch.autocast("cpu", dtype=torch.bfloat16)(alone.forward)
            expected = clipped_means(alone, (x.float(), y.float()), N)
            for p, old, mean in zip(model.parameters(), before, expected, strict=True):
                torch.testing.assert_close((old - p) / LR, mean, rtol=0.01, atol=0.001)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models_need_a_loss_that_sums(dtype):
    with pytest.raises(ValueError, match="loss_reduction must be 'sum'"):
        dp.attach(network().to(dtype))
    model = dp.attach(network()).to(dtype)  # converted afterwards
    with pytest.raises(SequenceError, match="reduction='sum'"):
        model(numbers(2).to(dtype)).mean().backward()
    model = dp.attach(network().to(dtype), loss_reduction="sum")
    optimizer = private_optimizer(model, dp.Full(N))
    for x, y in optimizer.loader(dataset(), steps=1, isolation="none"):
        squared(model(x.to(dtype)), y.to(dtype)).backward()
        optimizer.step()
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert optimizer.steps == 1


# -- hooks ------------------------------------------------------------------------------------------------------------


def test_hooks_of_optimizer_and_model_are_called_and_change_nothing():
    run, calls = Run(), []

    def note(name: str) -> Any:
        return lambda *args, **kwargs: calls.append(name)

    run.optimizer.register_step_pre_hook(note("before step"))
    run.optimizer.register_step_post_hook(note("after step"))
    run.optimizer.register_state_dict_pre_hook(note("before save"))
    run.optimizer.register_load_state_dict_post_hook(note("after load"))
    run.model.register_state_dict_pre_hook(note("model save"))
    run.model.register_load_state_dict_pre_hook(note("model load"))
    run.model.register_load_state_dict_post_hook(note("model loaded"))
    run.model[0].register_forward_hook(note("forward"))
    run.model[2].register_full_backward_hook(note("backward"))
    run.train(run.loader(2))
    run.check(2)
    # in the first step made-up records go through the model too, hooks of its layers included
    assert [name for name, _ in groupby(calls)] == [
        "forward",
        "backward",
        "before step",
        "after step",
    ] * 2
    assert calls[-4:] == ["forward", "backward", "before step", "after step"]
    calls.clear()
    run.optimizer.load_state_dict(run.optimizer.state_dict())
    run.model.load_state_dict(run.model.state_dict())
    assert calls == ["before save", "after load", "model save", "model load", "model loaded"]


def test_a_step_hook_sees_the_private_mean_only():
    run, seen = Run(dp.Full(N)), []

    def look(optimizer: Any, args: Any, kwargs: Any) -> None:
        seen.append([p.grad for p in run.model.parameters()])

    run.optimizer.register_step_pre_hook(look)
    run.optimizer.register_step_post_hook(look)
    run.train(run.loader(1))
    before, after = seen
    assert before == [None] * len(before)
    for found, mean in zip(after, clipped_means(network(), run.draws[0], N), strict=True):
        torch.testing.assert_close(found, mean)


def test_frozen_parameters_stay_and_the_others_learn():
    run = Run()
    run.model = dp.detach(run.model)
    run.model[0].requires_grad_(False)
    dp.attach(run.model, loss_reduction="sum")
    run.optimizer = private_optimizer(run.model, dp.Poisson(BATCH, N))
    run.train(run.loader())
    plain = network()
    plain[0].requires_grad_(False)
    for draw in run.draws:
        for p, mean in zip(
            list(plain.parameters())[2:], means_of_the_rest(plain, draw), strict=True
        ):
            with torch.no_grad():
                p -= LR * mean
    assert_same_model(run.model, plain)
    assert run.optimizer.steps == len(run.optimizer.accountant) == STEPS


def means_of_the_rest(plain: nn.Sequential, draw: tuple[Tensor, Tensor]) -> list[Tensor]:
    """Returns the clipped means of what follows the frozen layer, as if its output were the data."""
    with torch.no_grad():
        hidden = plain[0](draw[0])
    return clipped_means(plain[1:], (hidden, draw[1]), BATCH)


def test_fine_tuning_can_freeze_a_layer_in_mid_run():
    run = Run()
    run.train(run.loader(2))
    run.model[0].requires_grad_(False)
    kept = run.model[0].weight.detach().clone()
    run.train(run.loader(2), record=False)
    assert torch.equal(run.model[0].weight, kept)
    assert not torch.equal(run.model[3].weight, replayed(run.draws, BATCH)[3].weight)
    assert run.optimizer.steps == len(run.optimizer.accountant) == 4
