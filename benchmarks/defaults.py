"""Private training at default settings, as its users run it, beside plain torch and Opacus with its own loader.

All draw records from a data set of tensors in memory:

* plain: torch SGD, batches of a fixed size gathered by random numbers
* DataLoader: torch SGD, `DataLoader(dataset, shuffle=True)`; in whole runs
* ours, mean and ours, sum: `ClippedSGD` with `optimizer.loader(dataset)`: Poisson batches under add_remove; by the
  reduction of the loss
* make_private: the same by `dp.make_private`, with a noise for a budget; where the library has the loss
* fit: `dp.fit`, for linear models, with draws: closed-form gradients, no autograd
* Opacus, Opacus ghost: `PrivacyEngine().make_private`, which makes a DPDataLoader: Poisson batches, not filled up;
  ghost by its own criterion, with losses of shape (B,)

`OURS` has the keywords of each of ours: a level of isolation, or another mode, is a line there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from cases import Case
from opacus import PrivacyEngine
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from variants import Ends, PerRecord, Setting

import torch_dpsco as dp

__all__ = ["OURS", "UNFILLED", "WAYS", "Own", "Way", "ours", "steps_of_fit"]

Steps = Iterator[None]  # each item that is asked for makes a step; ends with the run


@dataclass(frozen=True)
class Own:
    """Keywords that differ from the defaults.

    Attributes:
        plan: of the plan.
        loader: of the loader.
        reduction: of the loss.
    """

    plan: Mapping[str, Any] = field(default_factory=dict)
    loader: Mapping[str, Any] = field(default_factory=dict)
    reduction: str = "mean"


OURS = {
    "ours, mean": Own(),
    "ours, sum": Own(reduction="sum"),
    "ours, slots": Own(loader={"isolation": "slots"}),
}
UNFILLED = Own(
    loader={"isolation": "none"}, reduction="sum"
)  # for who may know how many were drawn


@dataclass(frozen=True)
class Way:
    """A way to train.

    Attributes:
        start: from a case, its model, a data set, the setting and a number of steps to the steps.
        suits: whether a case can be trained so.
    """

    start: Callable[[Case, nn.Module, TensorDataset, Setting, int], Steps]
    suits: Callable[[Case], bool] = lambda case: True


def trained(model: nn.Module) -> list[nn.Parameter]:
    """Returns the parameters that are trained."""
    return [p for p in model.parameters() if p.requires_grad]


def reduced(case: Case, reduction: str) -> nn.Module:
    """Returns the loss of a case with a reduction."""
    loss = type(case.loss)(reduction=reduction)
    assert isinstance(loss, nn.Module)
    return loss


def looped(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[..., Any], batches: Any
) -> Steps:
    """Makes a step for each batch."""
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()
        optimizer.step()
        yield


def _gathered(data: TensorDataset, size: int, steps: int) -> Iterator[tuple[Tensor, ...]]:
    for _ in range(steps):
        index = torch.randint(len(data), (size,), device=data.tensors[0].device)
        yield tuple(part.index_select(0, index) for part in data.tensors)


def _repeated(loader: DataLoader[Any], steps: int) -> Iterator[Any]:
    made = 0
    while made < steps:
        for batch in loader:
            yield batch
            made += 1
            if made == steps:
                return


def plain(
    case: Case, model: nn.Module, data: TensorDataset, setting: Setting, steps: int
) -> Steps:
    optimizer = torch.optim.SGD(trained(model), lr=setting.lr)
    return looped(model, optimizer, case.loss, _gathered(data, case.size, steps))


def by_data_loader(
    case: Case, model: nn.Module, data: TensorDataset, setting: Setting, steps: int
) -> Steps:
    optimizer = torch.optim.SGD(trained(model), lr=setting.lr)
    batches = _repeated(DataLoader(data, batch_size=case.size, shuffle=True), steps)
    return looped(model, optimizer, case.loss, batches)


def _plan(case: Case, data: TensorDataset, setting: Setting, steps: int, own: Own) -> Any:
    usual = {"adjacency": "add_remove", "batch_size": case.size, "n": len(data), "steps": steps}
    noise = {"clip": setting.clip, "noise_multiplier": setting.noise_multiplier}
    return dp.ClippedSGD.plan(lr=setting.lr, **noise, **(usual | own.plan))


def ours(own: Own) -> Way:
    """Returns a loop of a user's own, with our optimizer and loader."""

    def start(
        case: Case, model: nn.Module, data: TensorDataset, setting: Setting, steps: int
    ) -> Steps:
        dp.attach(model, loss_reduction=own.reduction)
        optimizer = dp.ClippedSGD(trained(model), _plan(case, data, setting, steps, own))
        batches = optimizer.loader(data, steps=steps, **own.loader)
        return looped(model, optimizer, reduced(case, own.reduction), batches)

    return Way(start)


def make_private(
    case: Case, model: nn.Module, data: TensorDataset, setting: Setting, steps: int
) -> Steps:
    made = dp.make_private(
        model,
        torch.optim.SGD(trained(model), lr=setting.lr),
        DataLoader(data, batch_size=case.size, shuffle=True),
        problem=dp.Problem(lipschitz=setting.clip),
        budget=dp.Budget(1.0, 1e-5, adjacency="add_remove"),
        n=len(data),
        epochs=steps * case.size / len(data),
        verbose=False,
    )
    return looped(made[0], made[1], case.loss, _repeated(made[2], steps))


def opacus(mode: str, batches: Callable[[TensorDataset, int, int], Any] | None = None) -> Way:
    """Returns a loop with what Opacus' engine makes, of its loader too.

    Args:
        mode: of its rows.
        batches: a function of data set, size and steps, in place of its loader, for timings of the step alone.
    """

    def start(
        case: Case, model: nn.Module, data: TensorDataset, setting: Setting, steps: int
    ) -> Steps:
        model.train()
        sgd = torch.optim.SGD(trained(model), lr=setting.lr)
        numbers = {
            "noise_multiplier": setting.noise_multiplier,
            "max_grad_norm": setting.clip,
            "grad_sample_mode": mode,
        }
        given: dict[str, Any] = {"criterion": PerRecord(case.loss)} if mode == "ghost" else {}
        usual = DataLoader(data, batch_size=case.size)
        wrapped, optimizer, *loss, loader = PrivacyEngine().make_private(
            module=model, optimizer=sgd, data_loader=usual, **numbers, **given
        )
        taken = batches(data, case.size, steps) if batches else _repeated(loader, steps)
        return looped(wrapped, optimizer, *(loss or [case.loss]), taken)

    return Way(start)


def steps_of_fit(
    case: Case,
    model: nn.Module,
    data: TensorDataset,
    setting: Setting,
    steps: int,
    clock: Callable[[], float],
) -> list[float]:
    """Trains by `dp.fit` and returns the times at the ends of its steps.

    The loss is the library's own, with the targets that it takes: of known derivative, it needs no autograd.
    """
    inputs, targets = data.tensors
    ends = Ends(clock)
    optimizer = dp.ClippedSGD(trained(model), _plan(case, data, setting, steps, Own()))
    signed = TensorDataset(inputs, 2 * targets - 1)
    dp.fit(model, optimizer, signed, dp.losses.Logistic(), progress=False, log=ends)
    return ends.seconds[:steps]


def fit(
    case: Case, model: nn.Module, data: TensorDataset, setting: Setting, steps: int
) -> Steps:
    for _ in steps_of_fit(case, model, data, setting, steps, float):
        yield


def is_logistic(case: Case) -> bool:
    """Whether a case is logistic regression."""
    return case.is_linear and isinstance(case.loss, nn.BCEWithLogitsLoss)


WAYS: dict[str, Way] = {
    "plain": Way(plain),
    "DataLoader": Way(by_data_loader),
    **{name: ours(own) for name, own in OURS.items()},
    "make_private": Way(make_private),
    "fit": Way(fit, is_logistic),
    "Opacus": opacus("hooks"),
    "Opacus ghost": opacus("ghost"),
}
