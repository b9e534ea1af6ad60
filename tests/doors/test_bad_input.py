"""A table of bad input: every public callable, every argument, values of every kind.

Each bad call must raise an error of the library that names the argument, its value or its type, or be in the table of
values that are fine (`accepted.py`); and it must leave parameters and ledgers alone. The table is made from signatures,
so that a new public callable fails here until it has a good call, and a new argument is tried at once.
"""

from __future__ import annotations

import inspect
import types
import warnings
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import torch_dpsco as dp
from tests.doors.accepted import accepted
from tests.doors.bad import VALUES, arguments_of, fits, judge
from tests.doors.calls import CALLS, DIM, LOSS
from torch_dpsco import clip_selection, estimators
from torch_dpsco.accounting import events
from torch_dpsco.linear import objectives, solvers
from torch_dpsco.optim.common import CommonOptimizer
from torch_dpsco.optim.planned import FromPlan

FEW = 5  # values per argument in the default run
PLACES = {
    "dp": dp,
    "clip_selection": clip_selection,
    "estimators": estimators,
    "objectives": objectives,
    "solvers": solvers,
}
# what nobody calls with arguments of their own: results, bases, and parts that plans make
EXEMPT = {
    "Audit",
    "Diagnosis",
    "Finding",
    "PrivacyReport",
    "Statement",
    "objectives.Objective",
    "solvers.Certificate",
    "solvers.Solution",
    "dp.losses.Loss",
    "dp.losses.TableLoss",
    "dp.losses.MarginLoss",
    "dp.losses.ResidualLoss",
    "dp.oracles.MeanOracle",
    "dp.oracles.clip_weights",
    "dp.oracles.joint_norm",
    "dp.oracles.ClippedMean",
    "dp.oracles.PoissonTest",
    "dp.oracles.Charge",
    "dp.oracles.Release",
    "dp.oracles.ShuffledMedian",
    "dp.oracles.UserFiltered",
    "dp.oracles.UserPoissonFiltered",
    "dp.oracles.UserSearched",
    "dp.prox.Prox",
    "dp.prox.project_on_two_balls_",
    "dp.rules.UpdateRule",
    "clip_selection.warn_at_grid_end",
    "Audit.contradicts",
    "dp.UserFilteredSGD.loader",
    "dp.LocalizedUserSGD.loader",
    # what loaders of the library are made of
    *(f"dp.sampling.{kind}Sampler" for kind in ("Assigned", "Design", "OnePass", "Parts", "Rank", "RankAssigned")),
    *(
        f"dp.sampling.{name}"
        for name in ("BoundedLoader", "Chunk", "DrawLog", "Isolation", "Partition", "Slots", "Spilled")
    ),
    *(f"dp.sampling.{name}" for name in ("UserLoader", "adapt", "bounded", "fingerprint", "make_sampler")),
    *(f"dp.sampling.{name}" for name in ("partition_name", "poisson_positions", "records_of", "require_divisible")),
    "dp.sampling.user_ids",
}


def public(prefix: str, place: Any) -> Iterator[tuple[str, Any]]:
    for name in getattr(place, "__all__", ()):  # `errors` has no list: exceptions, and `warn`
        value = getattr(place, name)
        if isinstance(value, types.ModuleType):
            yield from public(f"{prefix}.{name}", value)
        elif callable(value) and not (isinstance(value, type) and issubclass(value, (Exception, Warning))):
            yield f"{prefix}.{name}", value


def test_every_public_callable_has_a_good_call() -> None:
    names = [name for prefix, place in PLACES.items() for name, _ in public(prefix, place)]
    known = {*CALLS, *EXEMPT, *(name.rpartition(".")[0] for name in CALLS)}
    assert len(names) > 100
    assert not [name for name in names if name not in known]


def test_the_plans_of_every_optimizer_are_in_the_table() -> None:
    wanted = [
        f"dp{name}.plan" for name, value in public("", dp) if inspect.isclass(value) and issubclass(value, FromPlan)
    ]
    assert len(wanted) == 14
    assert not [name for name in wanted if name not in CALLS]


@pytest.fixture(autouse=True)
def _quietly() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("name", CALLS)
def test_each_good_call_is_good(name: str) -> None:
    function, arguments = CALLS[name]()
    function(**arguments)


def watched(function: Any, arguments: dict[str, Any]) -> tuple[list[torch.Tensor], list[dp.Accountant]]:
    """Returns the parameters and ledgers that a call can reach."""
    tensors, ledgers = [], []
    for value in (*arguments.values(), getattr(function, "__self__", None)):
        if isinstance(value, torch.nn.Module):
            tensors += list(value.parameters())
        elif isinstance(value, CommonOptimizer):
            tensors += value.param_groups[0]["params"]
            ledgers.append(value.accountant)
        elif isinstance(value, list) and value and isinstance(value[0], torch.nn.Parameter):
            tensors += value
        elif isinstance(value, dp.Accountant):
            ledgers.append(value)
        elif isinstance(getattr(value, "accountant", None), dp.Accountant):
            ledgers.append(value.accountant)
    return tensors, ledgers


def mistakes(name: str, labels: Any) -> list[str]:
    """Returns what is wrong with the refusals of one callable; `labels(argument)` are the values to try."""
    function, _ = CALLS[name]()
    found = []
    for argument, annotation in arguments_of(function):
        for label in labels(argument):
            if accepted(name, argument, label, annotation, fits(label, annotation)):
                continue
            function, arguments = CALLS[name]()
            arguments[argument] = VALUES[label]()
            tensors, ledgers = watched(function, arguments)
            before = [p.detach().clone() for p in tensors], [len(ledger) for ledger in ledgers]
            verdict = judge(function, arguments, argument)
            if verdict.outcome:
                found.append(f"{name}({argument}={label}): {verdict.outcome} {verdict.detail[:200]}")
            moved = not all(map(torch.equal, before[0], tensors)) or before[1] != [len(ledger) for ledger in ledgers]
            if moved and verdict.outcome != "accepted":
                found.append(f"{name}({argument}={label}): a refused call has moved or charged something")
    return found


def few(name: str) -> Any:
    """Returns a choice of values for each argument of a callable, another one for each."""
    every = list(VALUES)
    return lambda argument: every[zlib.crc32(f"{name}.{argument}".encode()) % 8 :: len(every) // FEW]


@pytest.mark.parametrize("name", CALLS)
def test_some_bad_values_of_every_argument_are_refused(name: str) -> None:
    assert not mistakes(name, few(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_all_bad_values_of_every_argument_are_refused(name: str) -> None:
    assert not mistakes(name, lambda argument: VALUES)


def a_model() -> torch.nn.Linear:
    return torch.nn.Linear(DIM, 1)


def fits_on(data: Any, loss: Any = LOSS, **changes: Any) -> Any:
    """Makes a fit of a fresh run, with another data set, loss or argument."""
    function, arguments = CALLS["dp.fit"]()
    return function(**arguments | {"dataset": data, "loss_fn": loss} | changes)


def changed(name: str, **arguments: Any) -> Any:
    function, good = CALLS[name]()
    return function(**good | arguments)


X, Y = torch.randn(24, DIM), torch.ones(24, 1)
TO_BE_NAMED = {
    "a budget that is a number": (
        lambda: changed("dp.HolderSGD.plan", budget=1.0),
        r"budget must be a Budget, as Budget\(1.0, 1e-5\) \(got 1.0\)",
    ),
    "a budget that is a tuple": (
        lambda: changed("dp.BoltOnPSGD.plan", budget=(1.0, 1e-5)),
        r"budget must be a Budget.*\(got \(1.0, 1e-05\)\)",
    ),
    "a loss for a problem": (
        lambda: changed("dp.HolderSGD.plan", problem=LOSS),
        r"problem must be a Problem, as losses.Logistic\(\).problem\(bound_x=...\) \(got Logistic\)",
    ),
    "a budget for an accountant": (
        lambda: changed("dp.ClippedSGD", accountant=dp.Budget(1.0, 1e-5)),
        r"accountant must be an Accountant, .*\(got Budget\)",
    ),
    "a prox": (lambda: changed("dp.ClippedSGD", prox=3), r"prox must be a Prox of torch_dpsco.prox.*\(got 3\)"),
    "a rule": (
        lambda: changed("dp.ClippedSGD", rule="sgd"),
        r"rule must be an UpdateRule of torch_dpsco.rules.*\(got 'sgd'\)",
    ),
    "a design": (
        lambda: changed("dp.ClippedSGD.plan", sampling=6),
        r"sampling must be text or a Design of torch_dpsco.*\(got 6\)",
    ),
    "a design of an oracle": (
        lambda: changed("dp.PrivateOptimizer", design=6),
        r"design must be a Design of torch_dpsco.*\(got 6\)",
    ),
    "a schedule": (
        lambda: changed("dp.PrivateOptimizer", schedule=[dp.Phase(2)]),
        r"schedule must be a Schedule.*\(got list\)",
    ),
    "a generator of numpy": (
        lambda: changed("dp.ClippedSGD", generator=np.random.default_rng(0)),
        r"generator must be a Generator of torch.*\(got Generator\)",
    ),
    "a loader given to fit": (
        lambda: fits_on(DataLoader(TensorDataset(X, Y))),
        r"dataset must be a map-style data set.*\(got DataLoader\)",
    ),
    "a torch optimizer given to fit": (
        lambda: fits_on(TensorDataset(X, Y), optimizer=torch.optim.SGD(a_model().parameters(), lr=0.1)),
        r"optimizer must be a PrivateOptimizer.*\(got SGD\)",
    ),
    "a model for parameters": (
        lambda: changed("dp.HolderSGD", params=a_model()),
        r"params must be parameters.*as model.parameters\(\) \(got Linear\)",
    ),
    "a loss of make_private": (lambda: changed("dp.make_private", loss=3), r"loss must be a function \(got 3\)"),
    "steps left of no event": (
        lambda: changed("dp.Accountant.max_steps", event=None),
        r"event must be a value of torch_dpsco.accounting.events \(got None\)",
    ),
    "steps past the pass": (
        lambda: dp.AcceleratedSGD.plan(n=64, lr=0.1, clip=1.0, noise_multiplier=2.0, batch_size=8, steps=9),
        r"steps must be <= 8, one pass of Disjoint\(batch_size=8, n=64\) \(got 9\)",
    ),
    "thresholds of a pilot": (lambda: dp.Pilot(c_min=2.0, c_max=1.0), r"c_max must be > c_min=2 \(got 1\)"),
    "a threshold of a pilot": (lambda: dp.Pilot(c_min=-1.0), r"c_min must be > 0 \(got -1.0\)"),
    "a dimension": (lambda: changed("dp.HolderSGD.plan", dim=-1), r"dim must be an integer >= 0 \(got -1\)"),
    "a flag": (lambda: dp.attach(a_model(), batch_first=3), r"batch_first must be True or False \(got 3\)"),
    "a repeated number": (
        lambda: events.Repeat(3, 2),
        r"event must be a value of torch_dpsco.accounting.events \(got 3\)",
    ),
    "double data": (
        lambda: fits_on(TensorDataset(X.double(), Y)),
        r"got inputs float64\[3\] and targets float32\[1\], where parameters are float32.*match dtypes",
    ),
    "wide labels": (lambda: fits_on(TensorDataset(X, Y.expand(24, 2))), r"targets float32\[2\]"),
    "flat labels": (
        lambda: fits_on(TensorDataset(X, Y.view(-1)), torch.nn.BCEWithLogitsLoss()),
        r"targets float32\[\]",
    ),
    "labels of integers": (
        lambda: fits_on(TensorDataset(X, Y.long()), torch.nn.BCEWithLogitsLoss()),
        r"targets int64\[1\]",
    ),
    "a class of losses": (
        lambda: fits_on(TensorDataset(X, Y), torch.nn.MSELoss),
        r"loss_fn must be made first, as MSELoss\(\) \(got class MSELoss\)",
    ),
    "records that are no pairs": (
        lambda: fits_on(TensorDataset(X)),
        r"dataset must give \(input, target\) pairs \(got tuple of 1\)",
    ),
}


@pytest.mark.parametrize("case", TO_BE_NAMED)
def test_what_is_meant_otherwise_is_said(case: str) -> None:
    make, message = TO_BE_NAMED[case]
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("name", ["dp.BoltOnPSGD.plan", "dp.make_private"])
def test_missing_arguments_are_named_together(name: str) -> None:
    function, arguments = CALLS[name]()
    positional = [arguments[first] for first in ("params", "model", "optimizer", "data_loader") if first in arguments]
    with pytest.raises(TypeError, match=r"missing [34] required keyword-only arguments: .*'problem'.*'(budget|dim)'"):
        function(*positional)


def test_records_that_do_not_fit_are_described() -> None:
    function, arguments = CALLS["dp.fit"]()
    before = [p.detach().clone() for p in arguments["model"].parameters()]
    with pytest.raises(ValueError, match="must go together") as caught:
        function(**arguments | {"dataset": TensorDataset(X.double(), Y)})
    assert "24" not in str(caught.value)  # nor the number of rows of a draw
    assert len(arguments["optimizer"].accountant) == 0
    assert all(map(torch.equal, before, arguments["model"].parameters()))


@pytest.mark.parametrize(
    ("value", "words"), [(np.float64(0.5), 0.5), (torch.tensor(0.5), 0.5), (np.int64(2), 2.0), (1, 1.0)]
)
def test_numbers_of_numpy_and_torch_are_numbers(value: Any, words: float) -> None:
    plan = changed("dp.ClippedSGD.plan", lr=value)
    optimizer = changed("dp.ClippedSGD", plan=plan)
    assert optimizer.param_groups[0]["lr"] == words
