"""`make_private`: one line on the model, optimizer and loader that somebody has already."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import torch_dpsco as dp
from tests.streams import picks, seeded
from torch_dpsco.errors import (
    AdjacencyError,
    InfeasibleError,
    MissingConstantError,
    SequenceError,
    UnitError,
    UnknownSamplerError,
    UtilityWarning,
)
from torch_dpsco.private_loop import make_private
from torch_dpsco.rows.attach import is_attached

N, BATCH, DIM = 60, 12, 3
BUDGET = dp.Budget(1.0, 1e-3)
LOSS = dp.losses.Logistic()
PROBLEM = LOSS.problem(bound_x=2.0)

Inner = Callable[[Any], torch.optim.Optimizer]
INNER: dict[str, Inner] = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "adam": partial(torch.optim.Adam, lr=0.01),
}


def records(n: int = N, shape: tuple[int, ...] = (DIM,)) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(n, *shape, generator=generator), torch.ones(n, 1))


def linear() -> nn.Linear:
    return nn.Linear(DIM, 1)


def conv() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(8, 1))


def private(
    model: nn.Module,
    inner: str | torch.optim.Optimizer = "sgd",
    loader: Any = None,
    **changes: Any,
) -> tuple[nn.Module, Any, Any]:
    """Calls make_private with good arguments, but for the changes."""
    optimizer = INNER[inner](model.parameters()) if isinstance(inner, str) else inner
    loader = DataLoader(records(), batch_size=BATCH, shuffle=True) if loader is None else loader
    return make_private(
        model, optimizer, loader, **{"problem": PROBLEM, "budget": BUDGET, "n": N, **changes}
    )


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: Any,
    epochs: int = 1,
    loss: Any = LOSS,
) -> None:
    """An ordinary loop."""
    for _ in range(epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss(model(inputs), targets).backward()
            optimizer.step()


def replay(optimizer: Any, loader: Any) -> None:
    """Makes noise and draws repeatable."""
    optimizer._noise = seeded(5)
    loader.batch_sampler.rng = picks(5)


def values(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


# -- training ---------------------------------------------------------------------------------------------------------


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize(
    ("build", "shape"), [(linear, (DIM,)), (conv, (1, 4, 4))], ids=["linear", "conv"]
)
def test_one_line_makes_an_ordinary_loop_private(
    build: Any, shape: tuple[int, ...], inner: str
) -> None:
    own = build()
    before = values(own)
    plain = DataLoader(records(shape=shape), batch_size=BATCH, shuffle=True)
    model, optimizer, loader = private(own, inner, plain, epochs=3)
    assert model is own
    assert is_attached(model)
    assert len(loader) == 5
    train(model, optimizer, loader, epochs=3, loss=nn.BCEWithLogitsLoss())
    with pytest.warns(UtilityWarning, match="all planned steps are made: this loop has no"):
        train(model, optimizer, loader, loss=nn.BCEWithLogitsLoss())
    optimizer.finalize()
    assert optimizer.steps == len(optimizer.accountant) == 15
    assert 0.99 < optimizer.report().epsilon <= BUDGET.epsilon
    for old, new in zip(before, values(model), strict=True):
        assert bool(new.isfinite().all())
        assert not torch.equal(old, new)


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(
    ("build", "shape"), [(linear, (DIM,)), (conv, (1, 4, 4))], ids=["linear", "conv"]
)
def test_the_loop_need_not_know_that_draws_can_be_empty(
    build: Any, shape: tuple[int, ...]
) -> None:
    records_of, sizes = [], set()
    model, optimizer, loader = private(
        build(), loader=DataLoader(records(shape=shape), batch_size=1, shuffle=True), epochs=1
    )
    for inputs, targets in loader:
        records_of.append(int(inputs.flatten(1).any(dim=1).sum()))
        sizes.add(len(inputs))
        nn.functional.binary_cross_entropy_with_logits(model(inputs), targets).backward()
        optimizer.step()
    assert optimizer.steps == len(records_of) == 60
    assert 0 in records_of  # each draw is empty with probability 0.36
    # all are filled up
    assert sizes <= {loader.slots.block, *loader.isolation.tested.sizes}
    assert all(bool(value.isfinite().all()) for value in values(model))


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("inner", INNER)
def test_the_result_is_that_of_the_calibrated_optimizer(inner: str) -> None:
    model = linear()
    twin = copy.deepcopy(model)
    model, optimizer, loader = private(model, inner, epochs=2)
    other = INNER[inner](twin.parameters())
    rule = {} if inner == "sgd" else {"rule": dp.rules.TorchRule(other)}
    reference = dp.HolderSGD(
        other.param_groups if rule else twin.parameters(),
        dp.HolderSGD.plan(
            problem=PROBLEM,
            n=N,
            budget=BUDGET,
            batch_size=BATCH,
            epochs=2,
            lr=other.param_groups[0]["lr"],
        ),
        **rule,
    )
    assert optimizer.oracle.settings() == reference.oracle.settings()
    assert (optimizer.design, optimizer.schedule) == (reference.design, reference.schedule)
    other_loader = reference.loader(records())
    dp.attach(twin)
    for pair in ((optimizer, loader), (reference, other_loader)):
        replay(*pair)
    train(model, optimizer, loader, epochs=2)
    train(twin, reference, other_loader, epochs=2)
    assert all(map(torch.equal, values(model), values(twin)))
    assert optimizer.accountant.ledger.digest() == reference.accountant.ledger.digest()


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("inner", INNER)
def test_the_torch_optimizer_moves_as_it_does_on_any_gradient(inner: str) -> None:
    model = linear()
    shadow = copy.deepcopy(model)
    reference = INNER[inner](shadow.parameters())
    model, optimizer, loader = private(model, inner, epochs=2)
    for inputs, targets in loader:
        LOSS(model(inputs), targets).backward()
        optimizer.step()
        for p, q in zip(shadow.parameters(), model.parameters(), strict=True):
            p.grad = q.grad.clone()  # the private mean
        reference.step()
        assert all(map(torch.equal, values(shadow), values(model)))


def test_groups_keep_their_learning_rates_and_follow_a_scheduler_of_the_torch_optimizer() -> (
    None
):
    model = linear()
    groups = [{"params": [model.weight], "lr": 0.2}, {"params": [model.bias], "lr": 0.05}]
    inner = torch.optim.SGD(groups, lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(inner, 1, gamma=0.5)
    model, optimizer, loader = private(
        model, inner, DataLoader(records(), batch_size=N), epochs=2
    )
    for rates in ((0.2, 0.05), (0.1, 0.025)):
        before = values(model)
        train(model, optimizer, loader)
        for old, p, rate in zip(before, model.parameters(), rates, strict=True):
            torch.testing.assert_close(p.detach(), old - rate * p.grad)
        scheduler.step()


def test_the_learning_rate_of_the_torch_optimizer_needs_no_scale_of_the_problem() -> None:
    kink = dp.losses.Hinge().problem(bound_x=2.0)  # for which HolderSGD could not choose one
    _, optimizer, _ = private(linear(), problem=kink)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1]


@pytest.mark.parametrize(
    "problem", [None, dp.losses.Logistic().problem(bound_x=2.0, radius=1.0)]
)
def test_a_warm_up_may_begin_at_0(problem: dp.Problem | None) -> None:
    inner = torch.optim.SGD((model := linear()).parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(inner, lambda epoch: epoch / 2)
    model, optimizer, loader = private(model, inner, problem=problem, epochs=2)
    start = values(model)
    train(model, optimizer, loader)
    assert all(map(torch.equal, start, model.parameters()))
    scheduler.step()
    train(model, optimizer, loader)
    assert not any(map(torch.equal, start, model.parameters()))


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("average", ["uniform", "weighted"])
def test_the_average_asked_for_is_the_answer(average: str) -> None:
    model, optimizer, loader = private(linear(), average=average, epochs=2)
    for problem in (PROBLEM, None):
        assert private(linear(), problem=problem)[1].plan.average == "last"
        assert private(linear(), problem=problem, average=average)[1].plan.average == average
    seen = []
    for inputs, targets in loader:
        seen.append(values(model)[0].double())
        LOSS(model(inputs), targets).backward()
        optimizer.step()
    optimizer.finalize()
    shares = torch.tensor(
        [1.0 if average == "uniform" else k + 1.0 for k in range(len(seen))], dtype=torch.float64
    )
    expected = sum(w * s for w, s in zip(shares / shares.sum(), seen, strict=True))
    torch.testing.assert_close(model.weight.detach().double(), expected, rtol=1e-6, atol=1e-7)


def test_constraint_and_ridge_reach_the_optimizer() -> None:
    model, optimizer, loader = private(linear(), prox=dp.prox.Ball(0.01), reg=0.25, rows="dense")
    train(model, optimizer, loader)
    optimizer.finalize()
    assert float(nn.utils.parameters_to_vector(model.parameters()).detach().norm()) <= 0.01 * (
        1 + 1e-6
    )
    assert optimizer.reg == 0.25
    assert type(model) is nn.Linear  # rows="dense" leaves the layer to Opacus


@pytest.mark.slow
def test_a_loss_that_sums_trains_as_one_that_averages() -> None:
    first, second = linear(), linear()
    second.load_state_dict(first.state_dict())
    for model, reduction in ((first, "mean"), (second, "sum")):
        _, optimizer, loader = private(
            model, loader=DataLoader(records(), batch_size=N), loss_reduction=reduction
        )
        replay(optimizer, loader)
        train(model, optimizer, loader, loss=partial(LOSS, reduction=reduction))
    torch.testing.assert_close(values(first), values(second))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_reduction_of_a_probed_criterion_is_read_from_it(reduction: str) -> None:
    model, _, _ = private(linear(), loss=nn.BCEWithLogitsLoss(reduction=reduction))
    assert model._dpsco.mean is (reduction == "mean")
    other = {"mean": "sum", "sum": "mean"}[reduction]
    with pytest.raises(
        ValueError, match=f"loss_reduction must be {reduction!r}, that of the loss"
    ):
        private(linear(), loss=nn.BCEWithLogitsLoss(reduction=reduction), loss_reduction=other)


# -- the loader -------------------------------------------------------------------------------------------------------


def doubled(items: list[Any]) -> list[torch.Tensor]:
    features, labels = zip(*items, strict=True)
    return [2 * torch.stack(features), torch.stack(labels)]


@pytest.mark.slow
def test_the_loader_keeps_data_set_collate_function_and_workers() -> None:
    plain = DataLoader(
        records(), batch_size=BATCH, shuffle=True, collate_fn=doubled, num_workers=1
    )
    model, optimizer, loader = private(linear(), loader=plain)
    assert loader.dataset is plain.dataset
    assert (loader.collate_fn.collate, loader.num_workers, loader.pin_memory) == (
        doubled,
        1,
        False,
    )
    known = {tuple(row.tolist()) for row in 2 * plain.dataset.tensors[0]}
    for inputs, targets in loader:
        assert {
            tuple(row.tolist()) for row in inputs if row.any()
        } <= known  # zeros fill the batch up
        LOSS(model(inputs), targets).backward()
        optimizer.step()
    assert optimizer.steps == 5
    memory = DataLoader(records(), batch_size=BATCH, shuffle=True)
    assert private(linear(), loader=memory)[2].gathers  # tensors in memory are gathered at once


def test_the_order_of_the_old_loader_is_replaced_by_the_accounted_sampler() -> None:
    for drop_last in (False, True):
        plain = DataLoader(records(), batch_size=BATCH, drop_last=drop_last, shuffle=True)
        _, optimizer, loader = private(linear(), loader=plain)
        assert loader.design == optimizer.design == dp.Poisson(BATCH, N)
        assert isinstance(loader.batch_sampler, dp.sampling.PoissonSampler)


@pytest.mark.slow
def test_under_add_remove_n_is_a_reference_and_not_read_from_the_data() -> None:
    budget = dp.Budget(1.0, 1e-3, adjacency="add_remove")
    for size in (N - 1, N, 2 * N):
        plain = DataLoader(records(size), batch_size=BATCH, shuffle=True)
        _, optimizer, loader = private(linear(), loader=plain, budget=budget)
        assert (optimizer.design, len(loader), optimizer.schedule.steps) == (
            dp.Poisson(BATCH, N),
            5,
            50,
        )


# -- budgets ----------------------------------------------------------------------------------------------------------


def test_a_shared_accountant_is_charged_and_its_budget_respected() -> None:
    accountant = dp.Accountant(BUDGET)
    model, optimizer, loader = private(linear(), accountant=accountant, epochs=1)
    train(model, optimizer, loader)
    assert optimizer.accountant is accountant
    assert len(accountant) == 5
    with pytest.raises(
        InfeasibleError,
        match=r"budget left for one step with this noise: this ledger holds 5 events",
    ):
        private(linear(), accountant=accountant, epochs=1)
    assert len(accountant) == 5
    assert accountant.get_epsilon(BUDGET.delta) <= BUDGET.epsilon


# -- refused ----------------------------------------------------------------------------------------------------------


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter([])


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"n": N + 1}, UnitError, r"declared 61, the data set has 60\); declare the right one"),
        ({"n": 5}, ValueError, r"batch_size must be <= n=5 \(got 12\)"),
        ({"epochs": 0}, ValueError, r"epochs must be > 0 \(got 0.0\)"),
        ({"reg": -1}, ValueError, r"reg must be >= 0 \(got -1.0\)"),
        (
            {"average": "best"},
            ValueError,
            r"average must be one of last, uniform, weighted, ema \(got 'best'\)",
        ),
        (
            {"rows": "sparse"},
            ValueError,
            r"rows must be one of auto, dense \(got 'sparse'\)",
        ),
        (
            {"loss_reduction": "none"},
            ValueError,
            r"loss_reduction must be one of mean, sum \(got 'none'\)",
        ),
        (
            {"accountant": dp.Accountant(dp.Budget(2.0, 1e-3))},
            AdjacencyError,
            r"must have the budget",
        ),
        (
            {"budget": dp.Budget(1e-9, 1e-12)},
            InfeasibleError,
            r"epsilon must be >= .*take fewer steps",
        ),
        ({"problem": dp.Problem()}, MissingConstantError, r"give Problem a lipschitz constant"),
        (
            {"loader": DataLoader(records(), batch_size=None)},
            UnknownSamplerError,
            r"fixed batch_size",
        ),
        (
            {"loader": DataLoader(Stream(), batch_size=BATCH)},
            ValueError,
            r"map-style, to be sampled from \(got Stream",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_arguments_are_refused_and_leave_the_model_as_it_was(
    changes: dict[str, Any], kind: type[Exception], message: str
) -> None:
    model = linear()
    before = values(model)
    with pytest.raises(kind, match=message):
        private(model, **changes)
    assert not is_attached(model)
    assert all(map(torch.equal, before, values(model)))
    model, optimizer, loader = private(model)  # a second try works
    train(model, optimizer, loader)


def test_what_is_private_already_is_refused() -> None:
    model, optimizer, loader = private(linear())
    with pytest.raises(
        SequenceError, match=r"private already: iterate over optimizer.loader\(dataset\)"
    ):
        private(model, optimizer)
    with pytest.raises(
        ValueError, match=r"data_loader must be a DataLoader \(got PrivateLoader\)"
    ):
        private(linear(), loader=loader)
    with pytest.raises(SequenceError, match=r"attached already: call dp.detach\(model\) first"):
        private(model)
    assert len(optimizer.accountant) == 0


def test_an_optimizer_of_other_parameters_or_one_that_evaluates_the_loss_is_refused() -> None:
    model = conv()
    with pytest.raises(
        SequenceError,
        match=r"model 4, optimizer 2, in common 2\): make the optimizer after .* freeze the others",
    ):
        private(model, torch.optim.SGD(model[3].parameters(), lr=0.1))
    with pytest.raises(ValueError, match=r"one gradient per step \(got LBFGS"):
        private(model, torch.optim.LBFGS(model.parameters()))
    model[0].requires_grad_(False)
    data = DataLoader(records(shape=(1, 4, 4)), batch_size=BATCH, shuffle=True)
    model, optimizer, loader = private(
        model, torch.optim.SGD(model[3].parameters(), lr=0.1), data
    )
    frozen = values(model[0])
    train(model, optimizer, loader)
    assert all(map(torch.equal, frozen, values(model[0])))


# -- nothing but a budget ---------------------------------------------------------------------------------------------


def loop_of_a_net() -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    data = TensorDataset(torch.randn(60, 4), torch.arange(60) % 2)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    return net, optimizer, DataLoader(data, batch_size=12, shuffle=True)


@pytest.mark.parametrize(
    "target", [{"epsilon": 2.0, "delta": 1e-4}, {"budget": dp.Budget(2.0, 1e-4)}]
)
def test_a_budget_in_either_form_is_enough(
    target: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    net, optimizer, loader = loop_of_a_net()
    net, private, loader = dp.make_private(net, optimizer, loader, **target)
    plan = private.plan
    assert (plan.n, plan.batch_size, plan.steps, plan.lr) == (60, 12, 50, 0.05)
    assert isinstance(private, dp.NetSGD)
    assert private.rule.optimizer is optimizer
    assert capsys.readouterr().out == f"{plan}\n"
    loss = nn.CrossEntropyLoss()
    for _ in range(10):
        for x, y in loader:
            private.zero_grad()
            loss(net(x), y).backward()
            private.step()
    assert private.finalized
    assert 1.99 < private.report().epsilon <= 2.0


def test_the_recipe_replaces_batch_size_step_size_and_rule() -> None:
    loop = loop_of_a_net()
    net, private, loader = dp.make_private(
        *loop, epsilon=2.0, delta=1e-4, recipe=True, verbose=False
    )
    assert private.plan == dp.NetSGD.plan(n=60, budget=dp.Budget(2.0, 1e-4), dim=net)
    assert private.plan.average == "ema"
    assert private.param_groups[0]["lr"] == private.plan.lr != 0.05
    assert loader.batch_sampler.design.batch_size == 10


def test_clip_and_epochs_are_kept_where_they_are_given() -> None:
    _, private, _ = dp.make_private(
        *loop_of_a_net(), epsilon=2.0, delta=1e-4, clip=0.5, epochs=3, verbose=False
    )
    assert (private.plan.clip, private.plan.offset, private.plan.steps) == (0.5, None, 15)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({}, "epsilon and delta must be given"),
        ({"budget": dp.Budget(1.0, 1e-4), "epsilon": 1.0}, "in their place"),
        ({"budget": dp.Budget(1.0, 1e-4, "add_remove")}, "n must be given under add_remove"),
        ({"epsilon": 1.0, "delta": 1e-4, "epochs": 0}, "epochs must be > 0"),
        ({"epsilon": 1.0, "delta": 1e-4, "recipe": True, "epochs": 0}, "epochs must be > 0"),
        ({"epsilon": 1.0, "delta": 1e-4, "recipe": True, "problem": dp.Problem(lipschitz=1.0)},
         "recipe and clip must be left out beside problem"),
        ({"epsilon": 1.0, "delta": 1e-4, "clip": 1.0, "problem": dp.Problem(lipschitz=1.0)},
         "recipe and clip must be left out beside problem"),
    ],
)  # fmt: skip
def test_what_is_missing_or_given_twice_is_named(given: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        dp.make_private(*loop_of_a_net(), **given, verbose=False)
