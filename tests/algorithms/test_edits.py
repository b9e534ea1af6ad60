"""Row-free runs see it when gradients, iterates or averages are edited, and when a gradient breaks its promise."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torch_dpsco as dp
from tests.algorithms.row_free_runs import (
    BATCH,
    BUDGET,
    DIM,
    LOSS,
    PROBLEM,
    N,
    Run,
    hold,
    make,
    records,
    refused,
    release,
)
from torch_dpsco.errors import PrivacyError, SequenceError

LOGISTIC = dp.losses.Logistic()


class BoltOn(Run):
    def backward(self, batch: Any) -> float:
        loss = LOGISTIC(self.model(batch[0]), batch[1])
        loss.backward()
        return loss.item()


def bolt_on(average: str = "uniform") -> Run:
    model = nn.Linear(DIM, 1, bias=False).double()
    problem = LOGISTIC.problem(bound_x=1.0, radius=1.0)
    plan = dp.BoltOnPSGD.plan(
        problem=problem, n=N, dim=DIM, budget=BUDGET, batch_size=BATCH, average=average
    )
    return BoltOn(model, dp.BoltOnPSGD(model.parameters(), plan))


def by_100(gradient: Tensor) -> Tensor:
    return 100 * gradient


def in_place(p: Tensor) -> None:
    p.grad.data.mul_(100)


def outputs_by_100(module: nn.Module, grad_input: Any, grad_output: Any) -> Any:
    return tuple(None if g is None else 100 * g for g in grad_input)


def first_batch(run: Run) -> Any:
    return next(iter(run.opt.loader(records())))


# -- hooks ------------------------------------------------------------------------------------------------------------


def on_the_output(model: nn.Module, loss: nn.Module) -> Any:
    """A hook on a tensor of the loop."""
    return model.register_forward_hook(lambda m, args, out: out.register_hook(by_100) and None)


HOOKS: dict[str, Callable[[nn.Module, nn.Module], Any]] = {
    "on the parameter": lambda model, loss: model.weight.register_hook(by_100),
    "after accumulation": lambda model, loss: model.weight.register_post_accumulate_grad_hook(
        in_place
    ),
    "on the layer": lambda model, loss: model.register_full_backward_hook(outputs_by_100),
    "before the layer": lambda model, loss: model.register_full_backward_pre_hook(
        lambda m, g: (100 * g[0],)
    ),
    "on an output": on_the_output,
    "without inputs": lambda model, loss: model.register_backward_hook(outputs_by_100),
    "on the loss": lambda model, loss: loss.register_full_backward_hook(outputs_by_100),
}


class Loss(nn.Module):
    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return LOSS(output, target)


@pytest.mark.filterwarnings("ignore:Using a non-full backward hook:FutureWarning")
@pytest.mark.parametrize("where", list(HOOKS))
def test_a_hook_that_could_change_gradients_is_refused(where: str) -> None:
    """One of `lambda g: 100 * g` moved the answer by 50 to 100 declared sensitivities."""
    run, loss = make(), Loss()
    handle = HOOKS[where](run.model, loss)
    x, y = first_batch(run)
    loss(run.model(x), y).backward()
    with refused(run, SequenceError, "hooks, which could change|hooks of others"):
        run.opt.step()
    handle.remove()
    loss(run.model(x), y).backward()
    run.opt.step()
    assert run.opt.steps == 1


@pytest.mark.parametrize("where", ["on the layer", "on the loss", "on an output"])
def test_a_hook_that_is_removed_before_the_backward_is_seen(where: str) -> None:
    run, loss = make(), Loss()
    x, y = first_batch(run)
    handle = HOOKS[where](run.model, loss)
    value = loss(run.model(x), y)
    handle.remove()
    run.opt.zero_grad()
    value.backward()
    with refused(run, SequenceError, "hooks, which could change"):
        run.opt.step()
    assert run.opt.steps == 0


def test_a_hook_put_there_before_the_optimizer_was_made_is_refused_too() -> None:
    model = nn.Linear(DIM, 1, bias=False).double()
    model.weight.register_post_accumulate_grad_hook(in_place)
    run = make(model)
    run.backward(first_batch(run))
    with refused(run, SequenceError, "hooks of others"):
        run.opt.step()
    assert run.opt.steps == 0


@pytest.mark.slow
def test_the_hooks_of_a_run_are_gone_with_it() -> None:
    finished, dropped = make(), make()
    finished.train()
    finished.opt.finalize()
    gone = weakref.ref(dropped.opt)
    weight = dropped.model.weight
    del dropped
    gc.collect()
    assert gone() is None
    assert not finished.model.weight._post_accumulate_grad_hooks
    assert not weight._post_accumulate_grad_hooks


# -- edits ------------------------------------------------------------------------------------------------------------


def test_a_gradient_edited_behind_the_back_of_its_version_is_refused() -> None:
    run = make()
    run.backward(first_batch(run))
    run.model.weight.grad.data.mul_(1.0 + 1e-15)
    with refused(run, SequenceError, "p.grad must be what backward"):
        run.opt.step()
    assert run.opt.steps == 0


EDITS: dict[str, Callable[[Run], Any]] = {
    "iterate": lambda run: run.model.weight.detach().add_(1e-9),
    "iterate.data": lambda run: run.model.weight.data.mul_(-1.0),
    "new data": lambda run: setattr(run.model.weight, "data", run.model.weight.data + 1.0),
    "average": lambda run: run.opt.state[run.model.weight]["average"].mul_(100),
    "average.data": lambda run: run.opt.state[run.model.weight]["average"].data.add_(1e-9),
    "no average": lambda run: run.opt.state.clear(),
    "another average": lambda run: run.opt.state[run.model.weight].update(
        average=torch.ones(1, DIM).double()
    ),
}


@pytest.mark.cases(12, 6)
@pytest.mark.parametrize("kind", [make, bolt_on], ids=["HolderOutputSGD", "BoltOnPSGD"])
@pytest.mark.parametrize("at_the_end", [False, True], ids=["step", "finalize"])
@pytest.mark.parametrize("edit", list(EDITS))
def test_iterates_and_averages_that_were_edited_are_refused(
    edit: str, at_the_end: bool, kind: Callable[[], Run]
) -> None:
    run = hold(kind())
    before = run.opt.accountant.ledger.digest()
    for batch in run.opt.loader(records()):
        if run.opt.steps == 2 and not at_the_end:
            EDITS[edit](run)
            for _ in range(2):  # there is no way back
                run.backward(batch)
                with pytest.raises(
                    SequenceError, match=r"got edited ones.*make a new optimizer"
                ):
                    run.opt.step()
            assert run.opt.steps == 2
            break
        run.backward(batch)
        run.opt.step()
    if at_the_end:
        EDITS[edit](run)
        with pytest.raises(SequenceError, match=r"got edited ones.*make a new optimizer"):
            release(run)
    assert run.opt.accountant.ledger.digest() == before


# -- promises ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1.01, 100.0, float("nan"), float("inf")])
def test_a_gradient_above_the_promised_bound_ends_the_run_and_charges_it(scale: float) -> None:
    run = make()
    x, y = torch.zeros(BATCH, DIM).double(), torch.ones(BATCH, 1).double()
    x[:, 0] = 1.0
    loader = iter(run.opt.loader(records()))
    next(loader)
    (
        scale * LOSS(run.model(x), y)
    ).backward()  # at w = 0 each record has the largest gradient, 1.5
    with pytest.raises(PrivacyError, match="longer than the problem promises") as caught:
        run.opt.step()
    assert not any(sign.isdigit() for sign in str(caught.value).replace("are 0 again", ""))
    assert len(run.opt.accountant) == 1
    assert run.opt.accountant.get_epsilon(BUDGET.delta) == pytest.approx(
        BUDGET.epsilon, rel=1e-3
    )
    assert not run.model.weight.any()
    assert not run.opt.state
    for call in (run.opt.step, run.opt.finalize, lambda: run.opt.loader(records())):
        with refused(run, SequenceError, "the run has ended without an answer"):
            call()


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_largest_gradient_that_is_promised_is_admitted(reduction: str) -> None:
    """An abort of a sound run would spend its budget for nothing."""
    features = torch.zeros(N, DIM).double()
    features[:, 0] = 1.0
    data = torch.utils.data.TensorDataset(features, torch.ones(N, 1).double())
    model = nn.Linear(DIM, 1, bias=False).double()
    run = {"batch_size": BATCH, "epochs": 40, "lr": 0.1}
    plan = dp.HolderOutputSGD.plan(
        problem=PROBLEM, n=N, budget=dp.Budget(30.0, 1e-3), dim=DIM, **run
    )
    opt = dp.HolderOutputSGD(model.parameters(), plan, loss_reduction=reduction)
    for x, y in opt.loader(data):
        LOSS(model(x), y, reduction=reduction).backward()
        opt.step()
    opt.finalize()
    assert (opt.steps, opt.finalized) == (plan.steps, True)


def test_a_sum_that_was_declared_a_mean_breaks_the_promise() -> None:
    run = make()
    x, y = torch.zeros(BATCH, DIM).double(), torch.ones(BATCH, 1).double()
    x[:, 0] = 1.0
    next(iter(run.opt.loader(records())))
    LOSS(run.model(x), y, reduction="sum").backward()
    with pytest.raises(PrivacyError, match="longer than the problem promises"):
        run.opt.step()
