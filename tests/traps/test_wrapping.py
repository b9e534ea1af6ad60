"""Traps of optimizers around optimizers: T1, T2, T10, T11, T14. Each test shows plain Opacus 1.6 first, then ours."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from opacus import PrivacyEngine
from opacus.optimizers import DPOptimizer
from torch import Tensor, nn
from torch.utils.data import DataLoader

import torch_dpsco as dp
from tests.checks import scores, step
from tests.problems import column, make_optimizer
from tests.traps.naive import opacus_script, plain
from torch_dpsco.accounting.designs import Undeclared
from torch_dpsco.errors import PrivacyError, SequenceError

RECORD = torch.tensor([[100.0]])
ROWS = pytest.mark.parametrize("rows", ["auto", "dense"])


def assert_nothing_happened(model: nn.Module, optimizer: dp.PrivateOptimizer) -> None:
    assert all(not p.any() for p in model.parameters())  # they start at 0
    assert (optimizer.steps, len(optimizer.accountant)) == (0, 0)


# -- T1 ---------------------------------------------------------------------------------------------------------------


class RowReader(torch.optim.SGD):
    """An optimizer that does its own clipping, or means to: it reads the per-sample gradients."""

    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.data -= p.grad_sample.sum(0)


def backward_and_step(model: nn.Module, optimizer: Any) -> None:
    model(RECORD).sum().backward()
    optimizer.step()


def wrapped_by_make_private(design: Any) -> tuple[nn.Module, dp.PrivateOptimizer, DPOptimizer]:
    model = plain()
    ours = make_optimizer(model, design, noise=1.0)
    loader = DataLoader(column(100.0), batch_size=1)
    model, wrapped, _ = PrivacyEngine().make_private(
        module=model, optimizer=ours, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0
    )
    return model, ours, wrapped


def wrapped_by_hand(
    rows: str,
) -> Callable[[Any], tuple[nn.Module, dp.PrivateOptimizer, DPOptimizer]]:
    def wrap(design: Any) -> tuple[nn.Module, dp.PrivateOptimizer, DPOptimizer]:
        model = scores(1, rows)
        ours = make_optimizer(model, design, noise=1.0)
        return (
            model,
            ours,
            DPOptimizer(ours, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=1),
        )

    return wrap


@pytest.mark.parametrize(
    "design", [Undeclared(1), dp.Full(1)], ids=["no sampling", "own sampling"]
)
@pytest.mark.parametrize(
    "wrap",
    [wrapped_by_make_private, wrapped_by_hand("auto"), wrapped_by_hand("dense")],
    ids=["make_private", "auto", "dense"],
)
def test_t01_a_private_optimizer_cannot_be_wrapped_by_opacus(wrap: Any, design: Any) -> None:
    """T1: an optimizer that reads per-sample gradients is given to make_private.

    Opacus 1.6: its step runs on the raw rows: a record of norm 100 moves the parameters by 100 (clip 1, noise 1), and
    the accountant notes an ordinary step of epsilon 4.73.

    Here: the first backward or step raises SequenceError; parameters and ledger are as before.
    """
    naive = opacus_script(RECORD, noise=1.0, optimizer=lambda params: RowReader(params, lr=1.0))
    assert naive.step(RECORD).item() == -100.0
    assert naive.epsilon == pytest.approx(4.73, abs=0.01)

    model, ours, wrapped = wrap(design)
    if not isinstance(design, Undeclared):
        next(iter(ours.loader(column(100.0))))
    with pytest.raises(
        SequenceError,
        match=r"Opacus DPOptimizer.*must not wrap.*use optimizer.loader\(dataset\)",
    ):
        backward_and_step(model, wrapped)
    assert_nothing_happened(model, ours)


# -- T2 ---------------------------------------------------------------------------------------------------------------


@ROWS
def test_t02_no_hook_takes_the_place_of_the_accountant(rows: str) -> None:
    """T2: the user attaches a hook, e.g. for logging, by `optimizer.attach_step_hook`.

    Opacus 1.6: there is one slot for hooks and the accountant sits in it: 8 noisy steps later epsilon is 0.

    Here: hooks are torch's and do not touch the accounting: 8 steps, 8 charges; another accountant is refused.
    """
    naive = opacus_script(torch.ones(8, 1), batch_size=1, noise=1.0)
    naive.optimizer.attach_step_hook(lambda optimizer: None)
    assert len(naive.epoch()) == 8
    assert naive.epsilon == 0.0

    model, calls = scores(1, rows), []
    ours = make_optimizer(model, dp.Full(8), noise=1.0)
    ours.register_step_pre_hook(lambda *args: calls.append("before"))
    ours.register_step_post_hook(lambda *args: calls.append("after"))
    assert not hasattr(ours, "attach_step_hook")
    for (x,) in ours.loader(column(*[1.0] * 8), steps=8):
        step(model, ours, x)
    assert calls == ["before", "after"] * 8
    assert len(ours.accountant) == ours.steps == 8
    assert ours.accountant.get_mu() == pytest.approx(
        2 * 8**0.5
    )  # noise 1, sensitivity 2 (replace_one), 8 steps
    with pytest.raises(PrivacyError, match="accountant is fixed at construction"):
        ours.accountant = dp.Accountant()


# -- T10 --------------------------------------------------------------------------------------------------------------


@ROWS
def test_t10_copies_of_an_optimizer_work_and_harm_no_other(
    rows: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T10: `copy.deepcopy(optimizer)`, pickle, and torch's hooks of optimizers.

    Opacus 1.6: the copy fails, and from then on `step()` of EVERY DPOptimizer in the process raises AttributeError; so
    does `register_step_post_hook`.

    Here: copy and original continue, each with its own noise, and both charge one ledger; pickling raises
    PrivacyError, since a copy elsewhere would spend unseen; torch's hooks are called.
    """
    monkeypatch.setattr(DPOptimizer, "step", DPOptimizer.step)  # undoes the harm after the test
    naive, bystander = opacus_script(RECORD), opacus_script(RECORD)
    with pytest.raises(AttributeError, match="original_optimizer"):
        copy.deepcopy(naive.optimizer)
    with pytest.raises(AttributeError, match="_optimizer_step_pre_hooks"):
        bystander.step(RECORD)
    with pytest.raises(AttributeError, match="_optimizer_step_post_hooks"):
        bystander.optimizer.register_step_post_hook(print)

    model = scores(1000, rows)
    ours = make_optimizer(model, Undeclared(1), noise=1.0)
    runs = [(model, ours), copy.deepcopy((model, ours))]
    noises = [step(*run, torch.zeros(1, 1000)) for run in runs]
    assert abs(torch.corrcoef(torch.stack(noises))[0, 1]) < 5 / 1000**0.5
    assert [optimizer.steps for _, optimizer in runs] == [1, 1]
    assert [len(optimizer.accountant) for _, optimizer in runs] == [2, 2]
    with pytest.raises(PrivacyError, match="must not be pickled"):
        pickle.dumps(ours)
    ours.register_state_dict_post_hook(lambda optimizer, state: state | {"note": "of mine"})
    assert ours.state_dict()["note"] == "of mine"
    step(model, ours, torch.zeros(1, 1000))  # the original is none the worse
    assert len(runs[1][1].accountant) == 3


# -- T11 --------------------------------------------------------------------------------------------------------------


@ROWS
def test_t11_the_loss_of_a_closure_is_returned(rows: str) -> None:
    """T11: `loss = optimizer.step(closure)`.

    Opacus 1.6: it returns None, and LBFGS fails in its first step.

    Here: the loss is returned; LBFGS, which evaluates the loss itself, is refused at construction.
    """

    def closure_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], Tensor]:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = (model(RECORD) + 3.0).sum()
            loss.backward()
            return loss

        return closure

    naive = opacus_script(RECORD)
    assert naive.optimizer.step(closure_of(naive.model, naive.optimizer)) is None
    lbfgs = opacus_script(RECORD, optimizer=torch.optim.LBFGS)
    with pytest.raises(TypeError, match="closure"):
        lbfgs.optimizer.step(closure_of(lbfgs.model, lbfgs.optimizer))

    model = scores(1, rows)
    ours = make_optimizer(model, Undeclared(1))
    assert ours.step(closure_of(model, ours)).item() == 3.0
    assert model.weight.item() == pytest.approx(-1.0, abs=1e-3)
    with pytest.raises(ValueError, match="LBFGS, which evaluates the loss itself"):
        dp.rules.TorchRule(torch.optim.LBFGS(model.parameters()))


# -- T14 --------------------------------------------------------------------------------------------------------------


def naive_run_with_a_smaller_noise(record: float) -> tuple[float, float]:
    """Returns where a ghost-clipping run of seed 0 ends, and its epsilon; its noise is made 1000 times smaller."""
    naive = opacus_script(torch.tensor([[record]]), noise=1.0, reduction="mean", mode="ghost")
    naive.optimizer.max_grad_norm = 0.001
    torch.manual_seed(0)
    return naive.step(torch.tensor([[record]])).item(), naive.epsilon


FIXED_ATTRIBUTES = [
    "oracle",
    "design",
    "accountant",
    "adjacency",
    "schedule",
    "rule",
    "prox",
    "reg",
]
FIXED_NUMBERS = ["noise_multiplier", "batch_size", "clip", "fixed_clip"]


@ROWS
def test_t14_neither_the_inner_optimizer_nor_an_attribute_goes_past_the_ledger(
    rows: str,
) -> None:
    """T14: the torch optimizer inside is stepped, or the clip is changed during a run.

    Opacus 1.6: `original_optimizer.step()` applies the raw gradient (moved by 100, clip 1) and charges nothing;
    `max_grad_norm = 0.001` in ghost mode divides the noise by 1000 but not the clip: one record moves the release by
    1.000 = 1000 standard deviations of the noise, epsilon stays 4.73.

    Here: no raw gradient survives a backward, and the inner step raises; all that the ledger relies on is fixed at
    construction: assigning it raises.
    """
    naive = opacus_script(RECORD, noise=1.0)
    naive.backward(RECORD)
    naive.optimizer.original_optimizer.step()
    assert (naive.weight.item(), naive.epsilon) == (-100.0, 0.0)
    (there, epsilon), (without, _) = (
        naive_run_with_a_smaller_noise(1.0),
        naive_run_with_a_smaller_noise(0.0),
    )
    assert without - there == pytest.approx(1.0, abs=1e-4)
    assert epsilon == pytest.approx(4.73, abs=0.01)

    model = scores(1, rows)
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    oracle = dp.oracles.Clipped(clip=1.0, noise_multiplier=1.0, batch_size=1)
    rule = dp.rules.TorchRule(inner)
    ours = dp.PrivateOptimizer(
        inner.param_groups, 1.0, oracle=oracle, rule=rule, design=Undeclared(1)
    )
    model(RECORD).sum().backward()
    assert model.weight.grad is None
    with pytest.raises(
        SequenceError, match="a plain optimizer must not step on an attached model"
    ):
        inner.step()
    assert_nothing_happened(model, ours)
    ours.zero_grad()
    step(model, ours, RECORD)
    ledger = ours.accountant.ledger.digest()
    for owner, names in ((ours, FIXED_ATTRIBUTES), (oracle, FIXED_NUMBERS)):
        for name in names:
            with pytest.raises((PrivacyError, AttributeError)):
                setattr(owner, name, getattr(owner, name))
    assert (ours.steps, ours.accountant.ledger.digest()) == (1, ledger)
