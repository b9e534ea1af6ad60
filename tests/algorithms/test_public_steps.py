"""Plain optimizers on attached models: refused, but in `dp.public`, whose moves private steps keep."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer
from torch.utils.data import DataLoader, TensorDataset

import torch_dpsco as dp
from tests.contract.registry import having
from tests.contract.runs import Row, Run, same
from torch_dpsco.errors import SequenceError, UtilityWarning
from torch_dpsco.prox import Identity
from torch_dpsco.rows.batch import leave_rows

pytestmark = pytest.mark.filterwarnings("ignore::torch_dpsco.errors.UtilityWarning")
N, DIM = 24, 3
DATA = TensorDataset(
    torch.randn(N, DIM, generator=torch.Generator().manual_seed(0)), torch.ones(N, 1)
)
LOSS = nn.MSELoss()


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(DIM, 4), nn.Tanh(), nn.Linear(4, 1))


def private(model: nn.Module, **changes: Any) -> dp.ClippedSGD:
    numbers = {
        "n": N,
        "clip": 1.0,
        "noise_multiplier": 0.0,
        "sampling": "full",
        "steps": 4,
        "lr": 0.1,
        **changes,
    }
    return dp.ClippedSGD(model.parameters(), dp.ClippedSGD.plan(**numbers))


def step(model: nn.Module, optimizer: Any, steps: int = 1) -> None:
    """Private steps, and no more of the loader."""
    for _ in range(steps):
        for x, y in optimizer.loader(DATA, steps=1):
            optimizer.zero_grad()
            LOSS(model(x), y).backward()
            optimizer.step()


def moved_and_broken(model: Any) -> None:
    model.weight.add_(1.0)
    raise ZeroDivisionError


def values(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def watchers() -> int:
    """Returns how many hooks there are, once those that models have left are gone."""
    gc.collect()
    dp.detach(dp.attach(nn.Linear(1, 1)))
    return len(torch_optimizer._global_optimizer_pre_hooks)


# -- plain steps ------------------------------------------------------------------------------------------------------

PLAIN: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "fused adam": lambda model: torch.optim.Adam(model.parameters(), fused=True),
    "with others": lambda model: torch.optim.SGD(
        [nn.Parameter(torch.zeros(1)), *model.parameters()], lr=0.1
    ),
    "groups": lambda model: torch.optim.SGD(
        [{"params": [nn.Parameter(torch.zeros(1))]}, {"params": list(model.parameters())}],
        lr=0.1,
    ),
}


@pytest.mark.parametrize("rows", ["auto", "dense"])
@pytest.mark.parametrize("kind", PLAIN)
def test_a_plain_step_on_an_attached_model_is_refused(kind: str, rows: str) -> None:
    model = dp.attach(net(), rows=rows)
    before, plain = values(model), PLAIN[kind](model)
    torch.optim.lr_scheduler.StepLR(plain, 1)  # which wraps the step
    LOSS(model(DATA.tensors[0]), DATA.tensors[1]).backward()
    with pytest.raises(
        SequenceError, match=r"got (SGD|Adam)\).*private optimizer.*with dp.public\(model\)"
    ):
        plain.step()
    assert same(values(model), before)


def test_the_optimizer_that_make_private_was_given_does_not_step_by_itself() -> None:
    model = nn.Linear(DIM, 1)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = dp.make_private(
        model,
        plain,
        DataLoader(DATA, 8, shuffle=True),
        problem=dp.losses.Logistic().problem(bound_x=2.0),
        budget=dp.Budget(1.0, 1e-3),
        n=N,
    )
    with dp.public(model):  # before the first private step too
        LOSS(model(DATA.tensors[0]), DATA.tensors[1]).backward()
        plain.step()
    for x, y in loader:
        optimizer.zero_grad()
        LOSS(model(x), y).backward()
        with pytest.raises(SequenceError, match=r"that of dp\.make_private"):
            plain.step()
        optimizer.step()  # which steps it on the private mean
        break
    assert optimizer.steps == 1


def test_other_models_have_plain_steps() -> None:
    model, other = dp.attach(net()), net()
    before, plain = values(other), torch.optim.SGD(other.parameters(), lr=0.1)
    (model(DATA.tensors[0]).detach() * other(DATA.tensors[0])).mean().backward()
    plain.step()
    assert not same(values(other), before)


def test_the_hook_is_there_while_a_model_is_attached_and_goes_with_it() -> None:
    start = watchers()
    model = dp.attach(net())
    assert watchers() == 1
    twin = copy.deepcopy(model)
    dp.detach(model)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    LOSS(model(DATA.tensors[0]), DATA.tensors[1]).backward()
    plain.step()
    assert watchers() == start
    twin(DATA.tensors[0])
    assert watchers() == 1
    with pytest.raises(SequenceError, match="plain optimizer"):
        torch.optim.SGD(twin.parameters(), lr=0.1).step()
    del twin
    assert watchers() == start


def test_a_model_may_be_gone_while_hooks_of_a_step_run() -> None:
    """Torch goes through its hooks, which none that is collected then may change."""
    start = watchers()
    models = [dp.attach(net()) for _ in range(3)]

    def collect(*_: Any) -> None:
        models.clear()
        gc.collect()

    hooks = [torch_optimizer.register_optimizer_step_pre_hook(collect) for _ in range(2)]
    try:
        torch.optim.SGD(net().parameters(), lr=0.1).step()
    finally:
        for hook in hooks:
            hook.remove()
    assert not models
    assert watchers() == start


def test_a_private_step_that_somebody_watches_is_none_of_a_plain_optimizer() -> None:
    model = dp.attach(net())
    seen: list[Any] = []
    watch = torch_optimizer.register_optimizer_step_pre_hook(
        lambda optimizer, *_: seen.append(optimizer)
    )
    try:
        optimizer = private(model)
        step(model, optimizer)
    finally:
        watch.remove()
    assert seen == [optimizer]


# -- public steps -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", ["auto", "dense"])
def test_public_steps_are_those_of_the_plain_model(rows: str) -> None:
    model = net()
    plain = copy.deepcopy(model)
    dp.attach(model, rows=rows)
    optimizer = private(model)
    x, y = DATA.tensors[0] * 2.0, DATA.tensors[1] - 1.0
    with dp.public(model):
        ours, theirs = (
            torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, plain)
        )
        for _ in range(3):
            for m, sgd in ((model, ours), (plain, theirs)):
                sgd.zero_grad()
                LOSS(m(x), y).backward()
                sgd.step()
    for p, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, expected)
        assert p.grad is None
    dp.attach(plain, rows=rows)
    twin = private(plain)
    step(model, optimizer)
    step(plain, twin)
    for p, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, expected)
    assert len(optimizer.accountant) == 1


def batches(run: Run, seed: int) -> Iterator[Any]:
    return iter(run.loader(seed, steps=1))


def steady(run: Run, seed: int) -> None:
    """A private step whose gradients do not depend on the parameters."""
    for features, labels, *_ in batches(run, seed):
        run.opt.zero_grad()
        weighed = run.model(features) * labels
        (weighed.mean() if run.model._dpsco.mean else weighed.sum()).backward()
        run.opt.step()


@having()
def test_a_public_move_survives_the_private_steps_after_it(row: Row) -> None:
    moved, still = row.make(noise=0.0, scale=100.0), row.make(noise=0.0, scale=100.0)
    for run in (moved, still):
        steady(run, 1)
        steady(run, 2)
    if "shared" not in row.lacks:  # a pilot of its own would choose another clip
        still = moved.copy()
    if moved.opt.undisturbed:
        with (
            pytest.raises(
                SequenceError, match=f"{type(moved.opt).__name__} takes no public steps"
            ),
            dp.public(moved.model),
        ):
            raise AssertionError
        return
    with dp.public(moved.model), torch.no_grad():
        for p in moved.model.parameters():
            p.add_(0.125)
    if "quiet" in row.lacks or not isinstance(moved.opt.prox, Identity):
        return  # releases have noise of their own, or the move was projected
    for seed in (3, 4) if "moving" not in row.lacks else ():
        steady(moved, seed)
        steady(still, seed)
    for p, other in zip(moved.model.parameters(), still.model.parameters(), strict=True):
        torch.testing.assert_close(
            p, other + 0.125, rtol=0, atol=2e-2 if p.dtype == torch.bfloat16 else 1e-5
        )


def test_momentum_and_average_are_moved_exactly() -> None:
    model = dp.attach(nn.Linear(DIM, 1, bias=False))
    plan = dp.ClippedSGD.plan(
        n=N, clip=1.0, noise_multiplier=0.0, sampling="full", steps=4, lr=0.1
    )
    optimizer = dp.ClippedSGD(model.parameters(), plan, rule=dp.rules.Momentum("uniform", 0.5))
    step(model, optimizer, 2)
    state = {name: value.clone() for name, value in optimizer.state[model.weight].items()}
    weight = model.weight.detach().clone()
    with dp.public(model), torch.no_grad():
        model.weight.add_(1.0)
    assert torch.equal(model.weight, weight + 1.0)
    assert set(state) == {"average", "inner"}
    for name, value in state.items():
        torch.testing.assert_close(optimizer.state[model.weight][name], value + 1.0)


def test_a_public_move_ends_in_the_feasible_set() -> None:
    model = dp.attach(nn.Linear(DIM, 1, bias=False))
    plan = dp.ClippedSGD.plan(
        n=N, clip=1.0, noise_multiplier=0.0, sampling="full", steps=4, lr=0.1, average="uniform"
    )
    optimizer = dp.ClippedSGD(model.parameters(), plan, prox=dp.prox.Ball(0.5))
    step(model, optimizer, 2)
    with dp.public(model), torch.no_grad():
        model.weight.add_(5.0)
    assert float(model.weight.detach().norm()) == pytest.approx(0.5)
    assert float(optimizer.state[model.weight]["average"].norm()) <= 0.5 + 1e-6


def test_an_error_in_the_block_leaves_a_run_that_goes_on() -> None:
    model = dp.attach(nn.Linear(DIM, 1))
    optimizer = private(model, average="uniform")
    step(model, optimizer, 2)
    average = optimizer.state[model.weight]["average"].clone()
    with pytest.raises(ZeroDivisionError), dp.public(model), torch.no_grad():
        moved_and_broken(model)
    torch.testing.assert_close(optimizer.state[model.weight]["average"], average + 1.0)
    with pytest.raises(SequenceError, match="plain optimizer"):
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    step(model, optimizer, 2)
    assert optimizer.finalized


def test_the_report_says_that_there_were_public_steps_and_so_does_a_copy_and_a_resumed_run() -> (
    None
):
    model = dp.attach(nn.Linear(DIM, 1))
    optimizer = private(model)
    step(model, optimizer)
    with dp.public(model):
        pass  # moves nothing
    assert "Public steps" not in str(optimizer.report(1e-3))
    with dp.public(model), torch.no_grad():
        model.weight.add_(1.0)
    again = private(dp.attach(nn.Linear(DIM, 1)))
    again.load_state_dict(optimizer.state_dict())
    _, twin = copy.deepcopy((model, optimizer))
    for run in (optimizer, again, twin):
        text = " ".join(str(run.report(1e-3)).split())
        assert "Public steps were made between private ones, in 1 blocks of dp.public" in text


def test_a_copy_has_its_own_moves() -> None:
    model = dp.attach(nn.Linear(DIM, 1))
    optimizer = private(model, average="uniform")
    step(model, optimizer, 2)
    twin, its = copy.deepcopy((model, optimizer))
    kept = optimizer.state[model.weight]["average"].clone()
    with dp.public(twin), torch.no_grad():
        twin.weight.add_(1.0)
    torch.testing.assert_close(its.state[twin.weight]["average"], kept + 1.0)
    assert torch.equal(optimizer.state[model.weight]["average"], kept)


def test_a_void_theorem_is_told_once() -> None:
    model = dp.attach(nn.Linear(DIM, 1))
    problem = dp.losses.Logistic().problem(bound_x=2.0, radius=1.0)
    plan = dp.HolderSGD.plan(
        problem=problem, n=N, budget=dp.Budget(1.0, 1e-3), batch_size=8, dim=model
    )
    optimizer = dp.HolderSGD(model.parameters(), plan)
    assert (plan.risk_bound is None) == (optimizer._lrs is None)
    told = (
        nullcontext()
        if plan.risk_bound is None
        else pytest.warns(UtilityWarning, match="public data moved")
    )
    with told, dp.public(model), torch.no_grad():
        model.weight.add_(0.1)


# -- refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", ["auto", "dense"])
def test_public_steps_within_a_private_batch_are_refused(rows: str) -> None:
    model = dp.attach(net(), rows=rows)
    optimizer = private(model)
    for x, y in optimizer.loader(DATA, steps=1):
        loss = LOSS(model(x), y)
        for act in (lambda: None, loss.backward):
            act()
            with pytest.raises(
                SequenceError, match=r"within a private batch.*step\(\) or optimizer.discard\(\)"
            ):
                dp.public(model).__enter__()
        optimizer.step()
    with dp.public(model):
        pass


def test_public_steps_beside_rows_that_were_left_are_refused() -> None:
    model = dp.attach(nn.Linear(DIM, 1, bias=False))
    optimizer = private(model)
    leave_rows(list(model.parameters()), [torch.ones(4, 1, DIM)])
    with pytest.raises(SequenceError, match="within a private batch"):
        dp.public(model).__enter__()
    optimizer.discard()
    with dp.public(model):
        pass


def test_public_steps_between_the_parts_of_a_draw_are_refused() -> None:
    model = dp.attach(nn.Linear(DIM, 1))
    optimizer = private(model)
    for x, y in optimizer.loader(DATA, steps=1, physical_batch_size=8):
        LOSS(model(x), y).backward()
        optimizer.step()
        if optimizer.in_draw:
            with (
                pytest.raises(SequenceError, match="between the parts of a private batch"),
                dp.public(model),
            ):
                raise AssertionError
    assert optimizer.steps == 1


def test_in_the_block_nothing_private_is_done() -> None:
    model = dp.attach(nn.Linear(DIM, 1))
    optimizer = private(model)
    step(model, optimizer)
    calls: list[Callable[[], Any]] = [
        optimizer.step,
        optimizer.finalize,
        optimizer.state_dict,
        lambda: copy.deepcopy(optimizer),
        lambda: optimizer.released().__enter__(),
        lambda: dp.public(model).__enter__(),
    ]
    with dp.public(model):
        for call in calls:
            with pytest.raises(SequenceError, match=r"dp\.public"):
                call()
    with optimizer.released(), pytest.raises(SequenceError, match="inside of released"):
        dp.public(model).__enter__()
    step(model, optimizer, 3)
    assert optimizer.finalized


def test_runs_of_secret_iterates_take_no_public_steps() -> None:
    model = nn.Linear(DIM, 1, bias=False).double()
    problem = dp.losses.Logistic().problem(bound_x=1.0, radius=1.0)
    plan = dp.BoltOnPSGD.plan(
        problem=problem, n=N, dim=model, budget=dp.Budget(1.0, 1e-3), batch_size=8
    )
    optimizer = dp.BoltOnPSGD(model.parameters(), plan)
    with (
        pytest.raises(SequenceError, match="BoltOnPSGD takes no public steps between its own"),
        dp.public(model),
    ):
        raise AssertionError
    assert not optimizer.finalized


def test_a_model_that_is_not_attached_needs_no_block() -> None:
    with (
        pytest.raises(SequenceError, match="model must be attached"),
        dp.public(nn.Linear(1, 1)),
    ):
        raise AssertionError
    with pytest.raises(ValueError, match="model must be a Module"):
        dp.public("model")
