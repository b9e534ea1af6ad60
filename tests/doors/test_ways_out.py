"""Refusals that name a way that works, for the mistakes that people make most."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.data import DataLoader, TensorDataset

import torch_dpsco as dp
from tests.problems import make_optimizer
from torch_dpsco.accounting.designs import Full, Undeclared
from torch_dpsco.errors import InfeasibleError, PrivacyError, SequenceError

N = 6


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


class Both(nn.Module):
    """Makes all forwards of a loss inside of its own."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, real: Tensor, fake: Tensor) -> Tensor:
        return self.inner(real) - self.inner(fake)


@pytest.mark.parametrize("design", [Full(N), Undeclared(N)])
@pytest.mark.parametrize("rows", ["auto", "dense"])
def test_several_forwards_are_made_by_one_module(design: Any, rows: str) -> None:
    def step(model: nn.Module, together: bool) -> int:
        opt, real, fake = make_optimizer(model, design), torch.randn(N, 3), torch.randn(N, 3)
        for (x,) in (
            [(real,)] if isinstance(design, Undeclared) else opt.loader(TensorDataset(real))
        ):
            score = model(x, fake) if together else model(x) - model(fake)
            score.square().mean().backward()
            opt.step()
        return opt.steps

    with pytest.raises(SequenceError, match=r"real and generated.*one module.*inside"):
        step(dp.attach(net(), rows=rows), together=False)
    assert step(dp.attach(Both(net()), rows=rows), together=True) == 1


def penalty(model: nn.Module, x: Tensor) -> Tensor:
    mix = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(mix).sum(), mix, create_graph=True)
    return model(x).mean() + (slope.norm(dim=1) - 1).square().mean()


def in_eval_mode(model: nn.Module, x: Tensor) -> Tensor:
    return model.eval()(x).mean()


def with_a_part_in_eval_mode(model: nn.Module, x: Tensor) -> Tensor:
    model[0].eval()
    return model(x).mean()


def weight_in_the_loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).mean() + model[0].weight.square().sum()


@pytest.mark.parametrize(
    ("loss", "match"),
    [
        (penalty, "double backward.*gradient penalty.*weight clipping"),
        (in_eval_mode, r"eval mode.*model\.train\(\)"),
        (with_a_part_in_eval_mode, r"eval mode.*model\.train\(\)"),
        (weight_in_the_loss, r"reg=, prox=.*module of their own"),
    ],
)
@pytest.mark.parametrize("made", [net, lambda: nn.Sequential(nn.Linear(3, 1))])
def test_each_gradient_that_is_in_no_row_has_its_own_message(
    loss: Callable[..., Tensor], match: str, made: Callable[[], nn.Module]
) -> None:
    model = dp.attach(made())
    with pytest.raises(SequenceError, match=match):
        loss(model, torch.randn(N, 3)).backward()
    model.train()
    opt = make_optimizer(model, Undeclared(N))
    opt.discard()
    model(torch.randn(N, 3)).mean().backward()
    opt.step()


class Lengths(nn.Module):
    def __init__(self, error: type[Exception], *args: Any) -> None:
        super().__init__()
        self.layer, self.error, self.args = nn.Linear(1, 1), error, args

    def forward(self, x: Tensor) -> Tensor:
        if bool((x == 0).any()):
            raise self.error(*self.args)
        return self.layer(x)


@pytest.mark.parametrize(
    ("error", "args"),
    [(ValueError, ("length 0",)), (KeyError, ()), (ArithmeticError, (3, "none"))],
)
def test_an_exception_over_filled_rows_tells_of_the_filling(
    error: type[Exception], args: tuple[Any, ...]
) -> None:
    def train(model: nn.Module, **options: Any) -> int:
        plan = dp.ClippedSGD.plan(
            clip=1.0,
            noise_multiplier=1.0,
            n=40,
            batch_size=8,
            steps=1,
            lr=0.1,
            adjacency="add_remove",
        )
        opt = dp.ClippedSGD(model.parameters(), plan)
        for (x,) in opt.loader(TensorDataset(torch.ones(40, 1)), steps=1, **options):
            model(x).sum().backward()
            opt.step()
        return opt.steps

    model = dp.attach(Lengths(error, *args), loss_reduction="sum")
    with pytest.raises(error) as caught:
        train(model)
    told = f"{caught.value} {getattr(caught.value, '__notes__', '')}"
    assert "rows of this batch some may be filling" in told
    assert "isolation='none'" in told
    assert type(caught.value) is error
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert (
            train(dp.attach(Lengths(error, *args), loss_reduction="sum"), isolation="none") == 1
        )


def test_an_exception_over_rows_that_are_not_filled_is_left_alone() -> None:
    model = dp.attach(Lengths(ValueError, "length 0"))
    with pytest.raises(ValueError, match=r"^length 0$"):
        model(torch.zeros(2, 1))


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "pruned": (
        lambda: nn.Sequential(prune.l1_unstructured(nn.Linear(3, 2), "weight", 0.5)),
        r"private_layers",
    ),
    "old weight norm": (
        lambda: nn.Sequential(torch.nn.utils.spectral_norm(nn.Linear(3, 2))),
        "spectral_norm: its weight.*clamping",
    ),
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(2)), r"lazy.*model\(torch\.zeros"),
    "traced": (lambda: torch.jit.trace(nn.Linear(3, 2), torch.ones(1, 3)), r"before torch\.jit"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("rows", ["auto", "dense"])
def test_models_that_have_no_rows_are_refused_in_a_sentence(name: str, rows: str) -> None:
    made, match = MODELS[name]
    with pytest.raises(ValueError, match=match):
        dp.attach(made(), rows=rows)


@pytest.mark.filterwarnings("ignore")
def test_an_optimizer_of_a_lazy_model_is_refused_in_a_sentence() -> None:
    with pytest.raises(ValueError, match=r"lazy module.*run the model once"):
        make_optimizer(nn.LazyLinear(2), Undeclared(N))
    lazy, data = nn.LazyLinear(2), TensorDataset(torch.ones(N, 3))
    torch_optimizer = torch.optim.SGD(lazy.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"a lazy layer has none before its first forward"):
        dp.make_private(lazy, torch_optimizer, DataLoader(data, 2), epsilon=1.0, delta=1e-3)


@pytest.mark.parametrize("rows", ["auto", "dense"])
@pytest.mark.parametrize("made", [net, lambda: nn.Sequential(nn.Linear(3, 1))])
def test_sparse_inputs_are_refused_in_a_sentence(
    rows: str, made: Callable[[], nn.Module]
) -> None:
    model = dp.attach(made(), rows=rows)
    with pytest.raises(SequenceError, match=r"dense.*sparse_coo.*to_dense"):
        model(torch.ones(N, 3).to_sparse())


def test_a_spent_ledger_says_so() -> None:
    plan = dp.ClippedSGD.plan(
        clip=1.0, budget=dp.Budget(1.0, 1e-5), n=64, batch_size=16, steps=2, lr=0.1
    )
    opt, data = (
        dp.ClippedSGD((model := dp.attach(net())).parameters(), plan),
        TensorDataset(torch.randn(64, 3)),
    )
    for (x,) in opt.loader(data, steps=2):
        model(x).mean().backward()
        opt.step()
    with pytest.raises(
        InfeasibleError,
        match=r"this ledger holds 2 events of a run of .* epsilon 1 of 1 spent at delta 1e-05",
    ):
        dp.ClippedSGD(net().parameters(), plan, accountant=opt.accountant)


def test_the_plan_of_an_optimizer_is_the_one_that_it_was_made_from() -> None:
    budget, logistic = dp.Budget(1.0, 1e-5), dp.losses.Logistic().problem(bound_x=1.0)
    promised = {"problem": logistic, "n": 1000, "budget": budget}
    for kind, options in (
        (
            dp.ClippedSGD,
            {"clip": 1.0, "n": 1000, "budget": budget, "batch_size": 50, "steps": 2, "lr": 0.1},
        ),
        (dp.HolderSGD, promised | {"batch_size": 50, "epochs": 1}),
        (dp.HolderOutputSGD, promised | {"dim": 2, "distance": 1.0}),
    ):
        plan = kind.plan(**options)
        opt = kind(nn.Linear(2, 1, bias=False, dtype=torch.float64).parameters(), plan)
        assert opt.plan is plan
        assert kind.plan(**options) == plan
        with pytest.raises(PrivacyError, match="plan is fixed"):
            opt.plan = plan
