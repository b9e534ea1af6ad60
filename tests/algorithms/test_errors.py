"""Bad input: each is a clear error that names field, value and way out, before anything is spent."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from opacus.optimizers import DPOptimizer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torch_dpsco as dp
from torch_dpsco.accounting.events import NonPrivate, clipped_gaussian
from torch_dpsco.errors import (
    AdjacencyError,
    InfeasibleError,
    MissingConstantError,
    PrivacyError,
    SequenceError,
    UnitError,
    UnknownSamplerError,
    UtilityWarning,
)
from torch_dpsco.step import checks

INF, NAN = math.inf, math.nan
N, BATCH, DIM, DELTA = 40, 8, 3, 1e-3
LOSS = dp.losses.Logistic()
PROBLEM = LOSS.problem(bound_x=2.0)
ADD_REMOVE = dp.Budget(1.0, DELTA, adjacency="add_remove")


def records(n: int = N) -> TensorDataset:
    return TensorDataset(torch.ones(n, DIM), torch.ones(n, 1))


def parameter(
    dtype: torch.dtype = torch.float32, device: str = "cpu", **kind: Any
) -> nn.Parameter:
    return nn.Parameter(torch.zeros(DIM, dtype=dtype, device=device), **kind)


def holder(
    accountant: dp.Accountant | None = None, params: Any = None, **changes: Any
) -> dp.HolderSGD:
    """Returns a good optimizer, but for the changes."""
    kind = {
        "lr": 0.1,
        "problem": PROBLEM,
        "noise_multiplier": 2.0,
        "batch_size": BATCH,
        "n": N,
        **changes,
    }
    own = {name: kind.pop(name) for name in ("prox", "rule", "reg") if name in kind}
    if accountant is not None:
        kind.setdefault("adjacency", accountant.adjacency)
    plan = dp.HolderSGD.plan(**kind)
    return dp.HolderSGD(
        [parameter()] if params is None else params, plan, accountant=accountant, **own
    )


def calibrated(accountant: dp.Accountant, **changes: Any) -> dp.HolderSGD:
    kind = {
        "problem": PROBLEM,
        "n": N,
        "budget": dp.Budget(1.0, DELTA),
        "batch_size": BATCH,
        **changes,
    }
    return dp.HolderSGD([parameter()], dp.HolderSGD.plan(**kind), accountant=accountant)


def built(accountant: dp.Accountant, attached: bool = True) -> tuple[nn.Linear, dp.HolderSGD]:
    """Returns a model and its optimizer, without anything wrong."""
    model = nn.Linear(DIM, 1)
    return dp.attach(model) if attached else model, holder(accountant, model.parameters())


def backward(model: nn.Module, batch: Any) -> None:
    LOSS(model(batch[0]), batch[1]).backward()


def train(model: nn.Module, optimizer: dp.PrivateOptimizer) -> None:
    """Makes steps on batches that have rows: an empty draw needs none."""
    for batch in optimizer.loader(records(), steps=20):
        if not len(batch[0]):
            optimizer.discard()
            continue
        backward(model, batch)
        optimizer.step()


class Partly(nn.Module):
    """Has a layer that its forward does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Linear(DIM, 1), nn.Linear(DIM, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


def train_with_an_idle_layer(accountant: dp.Accountant, rows: str) -> None:
    model = dp.attach(Partly(), rows=rows)
    train(model, holder(accountant, model.parameters()))


def train_without_attach(accountant: dp.Accountant) -> None:
    train(*built(accountant, attached=False))


def train_in_eval_mode(accountant: dp.Accountant) -> None:
    model, optimizer = built(accountant)
    train(model.eval(), optimizer)


def fit(
    accountant: dp.Accountant, attach_as: str | None = None, loss: Any = LOSS, **kind: Any
) -> None:
    model, optimizer = built(accountant, attached=False)
    if attach_as:
        dp.attach(model, loss_reduction=attach_as)
    dp.fit(model, optimizer, records(), loss, **{"steps": 2, "progress": False, **kind})


def summed(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return LOSS(output, target, reduction="sum")


# what is wrong: (misuse, exception, message)
Misuse = tuple[Callable[[dp.Accountant], Any], type[Exception], str]

RECORDS: dict[str, Misuse] = {
    "unbounded features": (
        lambda a: holder(a, problem=LOSS.problem(bound_x=INF)),
        ValueError,
        r"bound_x must be finite \(got inf\)",
    ),
    "features of no norm": (
        lambda a: LOSS.problem(bound_x=NAN),
        ValueError,
        r"bound_x must be > 0 \(got nan\)",
    ),
    "unbounded labels": (
        lambda a: holder(a, problem=dp.losses.Squared().problem(bound_x=1.0, bound_y=INF)),
        ValueError,
        r"bound_y must be finite \(got inf\)",
    ),
    "alpha above 1": (
        lambda a: holder(a, problem=dp.Problem(holder_exponent=1.5, holder_constant=1.0)),
        ValueError,
        r"holder_exponent must be in \[0, 1\] \(got 1.5\)",
    ),
    "alpha below 0": (
        lambda a: holder(a, problem=dp.Problem(holder_exponent=-0.1, holder_constant=1.0)),
        ValueError,
        r"holder_exponent must be in \[0, 1\] \(got -0.1\)",
    ),
    "Hoelder constant 0": (
        lambda a: holder(a, problem=dp.Problem(holder_exponent=0.5, holder_constant=0)),
        ValueError,
        r"holder_constant must be > 0 \(got 0.0\)",
    ),
    "negative Lipschitz constant": (
        lambda a: holder(a, problem=dp.Problem(lipschitz=-1)),
        ValueError,
        r"lipschitz must be > 0 \(got -1.0\)",
    ),
    "radius 0": (
        lambda a: holder(a, problem=LOSS.problem(bound_x=1.0, radius=0)),
        ValueError,
        r"radius must be > 0 \(got 0.0\)",
    ),
    "no gradient bound": (
        lambda a: holder(a, problem=dp.Problem(smoothness=1.0)),
        MissingConstantError,
        r"give Problem a lipschitz constant",
    ),
    "no scale to choose lr by": (
        lambda a: calibrated(a, problem=dp.Problem(lipschitz=2.0)),
        MissingConstantError,
        r"lr cannot be chosen .*give distance=",
    ),
}

TARGETS: dict[str, Misuse] = {
    "epsilon 0": (
        lambda a: dp.Budget(0.0, DELTA),
        ValueError,
        r"epsilon must be > 0 \(got 0.0\)",
    ),
    "negative epsilon": (
        lambda a: dp.Budget(-1.0, DELTA),
        ValueError,
        r"epsilon must be > 0 \(got -1.0\)",
    ),
    "epsilon inf": (
        lambda a: dp.Budget(INF, DELTA),
        ValueError,
        r"epsilon must be finite \(got inf\)",
    ),
    "negative delta": (
        lambda a: dp.Budget(1.0, -1e-9),
        ValueError,
        r"delta must be >= 0 \(got -1e-09\)",
    ),
    "delta 1": (
        lambda a: dp.Budget(1.0, 1.0),
        ValueError,
        r"delta must be in \[0, 1\) \(got 1.0\)",
    ),
    "Gaussian noise at delta 0": (
        lambda a: holder(dp.Accountant(dp.Budget(1.0, 0.0))),
        InfeasibleError,
        r"delta must be > 0 \(got 0.0\): .* \(delta = 0 has no Gaussian noise",
    ),
    "a Gaussian plan at delta 0": (
        lambda a: calibrated(a, budget=dp.Budget(1.0, 0.0)),
        ValueError,
        r"delta must be in \(0, 1\) \(got 0.0\)",
    ),
    "n below the batch": (
        lambda a: holder(a, n=7),
        ValueError,
        r"batch_size must be <= n=7 \(got 8\)",
    ),
    "n below the batch of a plan": (
        lambda a: calibrated(a, n=7),
        ValueError,
        r"batch_size must be <= n=7 \(got 8\)",
    ),
    "n 0": (lambda a: calibrated(a, n=0), ValueError, r"n must be an integer >= 1 \(got 0\)"),
    "a share of a record": (
        lambda a: calibrated(a, n=40.5),
        ValueError,
        r"n must be an integer \(got 40.5\)",
    ),
    "no epoch": (
        lambda a: calibrated(a, epochs=0),
        ValueError,
        r"epochs must be > 0 \(got 0.0\)",
    ),
    "negative noise": (
        lambda a: holder(a, noise_multiplier=-1),
        ValueError,
        r"noise_multiplier must be >= 0 \(got -1.0\)",
    ),
    "an undeclared n": (
        lambda a: holder(a).loader(records(39)),
        UnitError,
        r"n must be the number of records under zero_out \(declared 40, the data set has 39\); declare the right "
        r"one, or use adjacency='add_remove'",
    ),
    "fixed batches under add_remove": (
        lambda a: holder(dp.Accountant(ADD_REMOVE), n=None, sampling=dp.Fixed(BATCH, N)),
        AdjacencyError,
        r"not defined under add_remove: its batch size depends on the data set size",
    ),
}

PARAMETERS: dict[str, Misuse] = {
    "lr nan": (lambda a: holder(a, lr=NAN), ValueError, r"lr must be >= 0 \(got nan\)"),
    "negative lr of a plan": (
        lambda a: calibrated(a, lr=-1),
        ValueError,
        r"lr must be >= 0 \(got -1.0\)",
    ),
    "negative lr of a group": (
        lambda a: holder(a, [{"params": [parameter()]}, {"params": [parameter()], "lr": -0.1}]),
        ValueError,
        r"lr must be >= 0 \(got -0.1\)",
    ),
    "meta": (
        lambda a: holder(a, [parameter(device="meta")]),
        ValueError,
        r"params must hold values .*meta device",
    ),
    "complex": (
        lambda a: holder(a, [parameter(torch.complex64)]),
        ValueError,
        r"params must be real floating tensors \(got torch.complex64\)",
    ),
    "integer": (
        lambda a: holder(a, [parameter(), parameter(torch.int64, requires_grad=False)]),
        ValueError,
        r"params must be real floating tensors \(got torch.int64\)",
    ),
    "all frozen": (
        lambda a: holder(a, [parameter(requires_grad=False)]),
        ValueError,
        r"params must hold a parameter that requires a gradient \(got none\)",
    ),
    "none": (
        lambda a: holder(a, []),
        ValueError,
        r"params must hold a parameter .*\(got none\)",
    ),
    "no parameter": (
        lambda a: holder(a, [None]),
        ValueError,
        r"params must hold tensors, as model.parameters\(\) does \(got None\)",
    ),
    "0 not feasible": (
        lambda a: holder(a, prox=dp.prox.Box(1.0, 2.0)),
        ValueError,
        r"prox must have a feasible set that contains 0 \(got Box\(low=1.0, high=2.0\)\)",
    ),
}

TRAINING: dict[str, Misuse] = {
    "not attached": (
        train_without_attach,
        SequenceError,
        r"gradients are missing for parameter 0 .*dp.attach",
    ),
    "eval mode": (
        train_in_eval_mode,
        SequenceError,
        r"eval mode, which records no rows: call model.train\(\)",
    ),
    "an idle layer": (
        lambda a: train_with_an_idle_layer(a, "auto"),
        SequenceError,
        r"missing for parameter 2 of shape \(1, 3\): .*freeze parameters that the loss does not use",
    ),
    "an idle dense layer": (
        lambda a: train_with_an_idle_layer(a, "dense"),
        SequenceError,
        r"missing for parameter 2 of shape \(1, 3\): .*requires_grad_\(False\)",
    ),
    "an unknown loss_reduction": (
        lambda a: dp.attach(nn.Linear(DIM, 1), loss_reduction="none"),
        ValueError,
        r"loss_reduction must be one of mean, sum \(got 'none'\)",
    ),
    "an unknown loss_reduction of fit": (
        lambda a: fit(a, loss_reduction="none"),
        ValueError,
        r"loss_reduction must be one of mean, sum \(got 'none'\)",
    ),
    "a sum taken for a mean": (
        lambda a: fit(a, loss=summed),
        ValueError,
        r"this is a sum, and\s+dp.attach\(loss_reduction='mean'\)",
    ),
    "a mean taken for a sum": (
        lambda a: fit(a, loss_reduction="sum"),
        ValueError,
        r"this is a mean, and\s+dp.attach\(loss_reduction='sum'\)",
    ),
    "a mean for a model attached for sums": (
        lambda a: fit(a, attach_as="sum"),
        ValueError,
        r"this is a mean, and\s+dp.attach\(loss_reduction='sum'\)",
    ),
    "two loss_reductions": (
        lambda a: fit(a, attach_as="sum", loss=summed, loss_reduction="mean"),
        ValueError,
        r"loss_reduction must be 'sum', as the model was attached \(got 'mean'\); dp.detach\(model\)",
    ),
    "no sampling declared": (
        lambda a: holder(
            a,
            n=None,
            sampling=dp.accounting.designs.Undeclared(BATCH),
            adjacency="replace_one",
        ),
        ValueError,
        r"n was not declared: give n= \(Poisson sampling\) or sampling= to the plan \(design= to a PrivateOptimizer\)",
    ),
}


@pytest.mark.cases(13, 6)
@pytest.mark.parametrize(
    "misuse",
    [
        pytest.param(m, id=name)
        for d in (RECORDS, TARGETS, PARAMETERS, TRAINING)
        for name, m in d.items()
    ],
)
def test_bad_input_is_a_clear_error_before_anything_is_spent(misuse: Misuse) -> None:
    call, kind, message = misuse
    accountant = dp.Accountant()
    with pytest.raises(kind, match=message):
        call(accountant)
    assert len(accountant) == 0


@pytest.mark.slow
def test_the_good_input_that_each_case_changes_trains() -> None:
    accountant = dp.Accountant()
    train(*built(accountant))
    assert len(accountant) > 0
    for kind in ({}, {"attach_as": "mean"}, {"attach_as": "sum", "loss": summed}):
        fit(accountant := dp.Accountant(), **kind)
        assert len(accountant) == 2
    assert calibrated(dp.Accountant()).accountant.budget is None


# -- budgets ----------------------------------------------------------------------------------------------------------


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
def test_the_epsilon_named_for_one_step_works_and_less_does_not(adjacency: str) -> None:
    def one_step(epsilon: float) -> dp.HolderSGD:
        model = dp.attach(nn.Linear(DIM, 1))
        optimizer = holder(
            dp.Accountant(dp.Budget(epsilon, DELTA, adjacency=adjacency)), model.parameters()
        )
        for batch in optimizer.loader(records(), steps=1):
            if len(batch[0]):
                backward(model, batch)
            optimizer.step()
        return optimizer

    with pytest.raises(
        InfeasibleError, match=rf"delta=0.001 \({adjacency}; got 0.05\); raise epsilon"
    ) as caught:
        one_step(0.05)
    named = re.search(r"epsilon must be >= (\S+) for one step", str(caught.value))
    assert named
    optimizer = one_step(float(named[1]))
    assert optimizer.report().epsilon <= float(named[1])
    with pytest.raises(InfeasibleError):
        one_step(float(named[1]) * (1 - 1e-5))


@pytest.mark.slow
def test_the_epsilon_named_by_a_plan_works() -> None:
    def plan(epsilon: float) -> Any:
        return dp.HolderSGD.plan(
            problem=PROBLEM, n=N, budget=dp.Budget(epsilon, 1e-12), batch_size=BATCH, lr=0.1
        )

    with pytest.raises(
        InfeasibleError, match=r"with any noise up to 1e\+08 \(got 1e-09\); take fewer"
    ) as caught:
        plan(1e-9)
    named = re.search(r"epsilon must be >= (\S+),", str(caught.value))
    assert named
    assert plan(float(named[1])).epsilon() <= float(named[1])


@pytest.mark.parametrize("delta", [1 / N, 0.1])
def test_a_delta_that_allows_to_publish_a_record_warns(delta: float) -> None:
    with pytest.warns(
        UtilityWarning, match=rf"delta must be far below 1/n=0.025 \(got {delta:g}\)"
    ):
        dp.HolderSGD.plan(problem=PROBLEM, n=N, budget=dp.Budget(1.0, delta))


# -- calls out of order -----------------------------------------------------------------------------------------------


def test_a_step_after_finalize_is_refused() -> None:
    model, optimizer = built(accountant := dp.Accountant())
    optimizer.finalize()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(SequenceError, match=r"finalized.*make a new optimizer"):
        train(model, optimizer)
    assert len(accountant) == 0
    assert all(map(torch.equal, before, model.parameters()))


def test_batches_of_a_foreign_loader_are_refused() -> None:
    model, optimizer = built(accountant := dp.Accountant())
    for batch in DataLoader(records(), batch_size=BATCH):
        backward(model, batch)
        with pytest.raises(
            SequenceError, match=r"own loader \(made by optimizer.loader\(dataset\)"
        ):
            optimizer.step()
    with pytest.raises(
        UnknownSamplerError, match=r"got DataLoader > BatchSampler .*Ways out: optimizer.loader"
    ):
        optimizer.bind(DataLoader(records(), batch_size=BATCH, shuffle=True))
    assert len(accountant) == 0


def test_an_exhausted_loader_spends_nothing_more() -> None:
    model = dp.attach(nn.Linear(DIM, 1))
    oracle = dp.oracles.Clipped(clip=1.0, noise_multiplier=1.0, batch_size=BATCH)
    optimizer = dp.PrivateOptimizer(
        model.parameters(), 0.1, oracle=oracle, rule=dp.rules.SGD(), design=dp.Disjoint(BATCH, N)
    )
    loader = optimizer.loader(records())
    for batch in loader:
        backward(model, batch)
        optimizer.step()
    ledger = optimizer.accountant.ledger.digest()
    backward(model, batch)
    with pytest.raises(SequenceError, match="no batch is outstanding"):
        optimizer.step()
    with pytest.raises(
        SequenceError, match=r"one-pass loader is exhausted.*make a new optimizer"
    ):
        next(iter(loader))
    assert optimizer.accountant.ledger.digest() == ledger


@pytest.mark.parametrize("rows", ["auto", "dense"])
@pytest.mark.parametrize("late", [False, True])
def test_an_opacus_optimizer_around_ours_cannot_step(rows: str, late: bool) -> None:
    model = dp.attach(nn.Linear(DIM, 1), rows=rows)
    optimizer = holder(
        accountant := dp.Accountant(), model.parameters(), batch_size=N
    )  # rate 1: no empty draw
    before = [p.detach().clone() for p in model.parameters()]
    batch = next(iter(optimizer.loader(records())))
    if late:
        backward(model, batch)
    wrapped = DPOptimizer(
        optimizer, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=N
    )
    refused = pytest.raises(SequenceError, match="belong to an Opacus DPOptimizer")
    with refused:
        optimizer.step() if late else backward(model, batch)
    if rows == "dense" and late:  # Opacus has clipped and noised the rows before it calls ours
        with pytest.raises(SequenceError, match="belong to an Opacus DPOptimizer"):
            wrapped.step()
    assert len(accountant) == 0
    assert all(map(torch.equal, before, model.parameters()))


def test_a_retry_says_what_is_on_the_ledger(tmp_path):
    """And not that epsilon must be raised."""
    budget = dp.Budget(1.0, 1e-5)
    problem = dp.losses.Logistic().problem(bound_x=1.0)
    plan = dp.HolderSGD.plan(problem=problem, n=100, budget=budget, batch_size=20, steps=3)
    x = torch.randn(100, 2)
    data = torch.utils.data.TensorDataset(x / x.norm(dim=1, keepdim=True), torch.ones(100, 1))

    def script() -> None:
        with_file = dp.Accountant(budget, ledger_path=tmp_path / "ledger")
        try:
            model = torch.nn.Linear(2, 1)
            optimizer = dp.HolderSGD(model.parameters(), plan, accountant=with_file)
            dp.fit(model, optimizer, data, dp.losses.Logistic(), progress=False)
        finally:
            with_file.close()

    script()
    with pytest.raises(InfeasibleError, match=r"this ledger holds 3 events of a run") as caught:
        script()
    assert re.search(r"epsilon [\d.]+ of 1 spent", str(caught.value))
    assert "raise epsilon" not in str(caught.value)
    accountant = dp.Accountant(dp.Budget(1.0, 1e-5))
    silent = NonPrivate()
    for charged in (False, True):
        if charged:
            accountant.authorize(clipped_gaussian(30.0))
        with pytest.raises((InfeasibleError, PrivacyError)) as caught:
            checks.require_one_step(accountant, "zero_out", silent)
        assert "inf" not in str(caught.value)
