"""Warnings about utility are given once, and only where there is a theorem to void; those about privacy each time."""

from __future__ import annotations

import ast
import re
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torch_dpsco as dp
from torch_dpsco.accounting.ledger_file import LedgerFile
from torch_dpsco.errors import UtilityWarning

ROOT = Path(__file__).parents[1]
N, BATCH, DIM = 60, 12, 3
LOSS = dp.losses.Logistic()
PROBLEM = LOSS.problem(bound_x=2.0, radius=1.0)
BUDGET = dp.Budget(1.0, 1e-3)


def caught(work: Callable[[], Any]) -> Counter[str]:
    """Returns the first words of what is warned of, with Python's own filter for repetitions off."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        work()
    assert all(
        issubclass(one.category, UtilityWarning)
        for one in found
        if "torch_dpsco" in str(one.category)
    )
    return Counter(
        " ".join(str(one.message).split()[:3])
        for one in found
        if issubclass(one.category, UtilityWarning)
    )


def records() -> TensorDataset:
    return TensorDataset(
        torch.randn(N, DIM, generator=torch.Generator().manual_seed(0)), torch.ones(N, 1)
    )


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(DIM, 4), nn.Tanh(), nn.Linear(4, 1))


def optimizer(model: nn.Module, *, theorem: bool, inner: Any = None) -> dp.HolderSGD:
    """Returns an optimizer whose plan states a bound on the risk, or does not."""
    stated = {"dim": DIM + 1, "average": "uniform"} if theorem else {}
    plan = dp.HolderSGD.plan(
        problem=PROBLEM, n=N, batch_size=BATCH, steps=6, noise_multiplier=1.0, lr=0.1, **stated
    )
    assert (plan.risk_bound is not None) == theorem
    if inner is None:
        return dp.HolderSGD(model.parameters(), plan)
    made = inner(model.parameters(), lr=0.1)
    return dp.HolderSGD(made.param_groups, plan, rule=dp.rules.TorchRule(made, "uniform"))


def run(
    made: dp.HolderSGD, model: nn.Module, lr: Callable[[int], float] = lambda step: 0.1
) -> None:
    dp.attach(model)
    for inputs, targets in made.loader(records(), steps=6):
        made.zero_grad()
        LOSS(model(inputs), targets).backward()
        made.step()
        made.param_groups[0]["lr"] = lr(made.steps)


# -- utility ----------------------------------------------------------------------------------------------------------


def test_a_step_size_that_changes_in_every_step_is_said_once_per_optimizer() -> None:
    def train() -> None:
        model = nn.Linear(DIM, 1)
        run(optimizer(model, theorem=True), model, lambda step: 0.1 / step)

    assert caught(train) == {"lr is not": 1}
    assert caught(lambda: (train(), train())) == {"lr is not": 2}


@pytest.mark.cases(3, 1)
@pytest.mark.parametrize("inner", [torch.optim.Adam, torch.optim.SGD])
@pytest.mark.parametrize("theorem", [True, False])
def test_adam_is_said_to_void_a_theorem_where_there_is_one(inner: Any, theorem: bool) -> None:
    model = nn.Linear(DIM, 1)
    found = caught(lambda: run(optimizer(model, theorem=theorem, inner=inner), model))
    assert found == ({"Adam on private": 1} if theorem and inner is torch.optim.Adam else {})


@pytest.mark.slow
def test_a_net_under_adam_with_a_schedule_is_trained_without_a_warning() -> None:
    def train() -> None:
        model, inner = net(), None
        inner = torch.optim.Adam(model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.ExponentialLR(inner, 0.9)
        kind = {"problem": LOSS.problem(bound_x=2.0), "budget": BUDGET, "n": N, "epochs": 1}
        model, private, loader = dp.make_private(
            model, inner, DataLoader(records(), batch_size=BATCH, shuffle=True), **kind
        )
        for inputs, targets in loader:
            private.zero_grad()
            LOSS(model(inputs), targets).backward()
            private.step()
            schedule.step()

    assert caught(train) == {}


# -- privacy ----------------------------------------------------------------------------------------------------------


def with_generator() -> None:
    plan = dp.HolderSGD.plan(
        problem=PROBLEM, n=N, batch_size=BATCH, steps=6, noise_multiplier=1.0, lr=0.1
    )
    dp.HolderSGD(nn.Linear(DIM, 1).parameters(), plan, generator=torch.Generator())


def with_a_large_delta() -> None:
    dp.HolderSGD.plan(problem=PROBLEM, n=N, budget=dp.Budget(1.0, 0.1), batch_size=BATCH)


def with_a_large_delta_at_the_end() -> None:
    dp.HolderOutputSGD.plan(
        problem=PROBLEM,
        n=N,
        dim=DIM,
        budget=dp.Budget(1.0, 0.1),
        batch_size=BATCH,
        epochs=1,
        lr=0.01,
    )


@pytest.mark.cases(2, 1)
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (with_generator, "generator= makes the"),
        (with_a_large_delta, "delta must be"),
        (with_a_large_delta_at_the_end, "delta must be"),
    ],
)
def test_what_concerns_privacy_is_said_each_time(make: Callable[[], Any], words: str) -> None:
    assert caught(lambda: [make() for _ in range(3)])[words] == 3


def test_a_ledger_file_without_its_mark_is_said_each_time(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    accountant = dp.Accountant(ledger_path=path)
    accountant.record(dp.oracles.Clipped(1.0, 2.0, 4).event())
    accountant.close()

    def reopen() -> None:
        for mark in tmp_path.glob("ledger?*"):
            mark.unlink()
        LedgerFile(str(path)).close()

    assert sum(caught(lambda: [reopen() for _ in range(3)]).values()) == 3


# What concerns privacy; `errors.UtilityWarning` names it, and the tests above hold it to being said each time.
ABOUT_PRIVACY = {
    "the noise repeatable",
    "satisfies such a budget",
    "whether it is the newest copy is not known",
}


@pytest.mark.slow
def test_no_warning_about_privacy_depends_on_whether_it_was_given() -> None:
    """Reads every warning of the package: those under a condition that remembers (`_told...`) are about utility."""
    remembered, found = [], set()
    for path in (ROOT / "torch_dpsco").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in (
                "warn",
                "warnings.warn",
            ):
                text = ast.unparse(node.args[0])
                found |= {words for words in ABOUT_PRIVACY if words in text}
            if isinstance(node, ast.If) and re.search(r"_told|_warned", ast.unparse(node.test)):
                remembered.append(ast.unparse(node))
    assert found == ABOUT_PRIVACY
    assert (
        len(remembered) == 2
    )  # one of step sizes, one of training losses, which are left out of logs each time
    assert not [code for code in remembered for words in ABOUT_PRIVACY if words in code]
