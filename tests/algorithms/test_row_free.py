"""Optimizers of secret iterates: which calls in which order they take and refuse."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import torch_dpsco as dp
from tests.algorithms.row_free_runs import (
    BATCH,
    BUDGET,
    DIM,
    EPOCH,
    LOSS,
    PROBLEM,
    InOrder,
    N,
    hold,
    make,
    ordered,
    records,
    refused,
)
from torch_dpsco.accounting.events import Gaussian
from torch_dpsco.errors import InfeasibleError, PrivacyError, SequenceError, UnitError

# -- what is fixed ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "design",
        "prox",
        "accountant",
        "adjacency",
        "event",
        "noise_std",
        "planned_steps",
        "lrs",
        "bounds",
    ],
)
def test_what_the_noise_was_calibrated_for_cannot_be_reassigned(name: str) -> None:
    run = make()
    kept = getattr(run.opt, name)
    for value in (kept, None):
        with refused(
            run, PrivacyError, f"{name} is fixed at construction: make a new optimizer"
        ):
            setattr(run.opt, name, value)
    assert getattr(run.opt, name) is kept


def test_parameters_cannot_be_added_after_construction() -> None:
    run = make()
    with refused(run, SequenceError, "params are fixed at construction"):
        run.opt.add_param_group({"params": [nn.Parameter(torch.ones(2, dtype=torch.float64))]})
    assert len(run.opt.param_groups) == 1


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, pickle.dumps, lambda opt: torch.save(opt, io.BytesIO())]
)
@pytest.mark.parametrize("steps", [0, 1, EPOCH])
def test_a_run_cannot_be_copied(copied: Callable[[Any], Any], steps: int) -> None:
    run = make().train(steps=steps)
    with refused(
        run, SequenceError, "must not be copied: it has one release; make a new optimizer"
    ):
        copied(run.opt)
    with refused(run, SequenceError, "must not be copied"):
        copy.deepcopy((run.model, run.opt))
    assert run.opt.steps == steps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_single_precision_is_refused(dtype: torch.dtype) -> None:
    model = nn.Linear(DIM, 1, bias=False, dtype=dtype)
    kept = model.weight.detach().clone()
    with pytest.raises(
        ValueError, match=rf"params must be torch.float64 .*\(got {dtype}\).*model.double\(\)"
    ):
        make(model)
    assert torch.equal(model.weight, kept)
    mixed = nn.Linear(DIM, 1).double()
    mixed.bias = nn.Parameter(mixed.bias.detach().to(dtype))
    with pytest.raises(ValueError, match=r"params must be torch.float64"):
        make(mixed, problem=LOSS.problem(bound_x=2.0, radius=1.0))
    frozen = nn.Linear(DIM, 1).double()
    frozen.bias.requires_grad_(False)
    with pytest.raises(ValueError, match=r"params must be torch.float64 and all trained"):
        make(frozen, problem=LOSS.problem(bound_x=2.0, radius=1.0))
    run = make()
    for batch in run.opt.loader(records()):
        run.backward(batch)
        run.model.to(dtype)
        with refused(run, SequenceError, "parameters torch.float64"):
            run.opt.step()
        break


def test_frozen_parameters_are_refused() -> None:
    model = nn.Linear(DIM, 1).double()
    model.bias.requires_grad_(False)
    with pytest.raises(ValueError, match="all trained"):
        make(model, problem=LOSS.problem(bound_x=2.0, radius=1.0))
    with pytest.raises(
        ValueError, match="params must hold a parameter that requires a gradient"
    ):
        make(model.requires_grad_(False), problem=LOSS.problem(bound_x=2.0, radius=1.0))


def test_construction_sets_the_parameters_to_the_planned_start_only_if_it_succeeds() -> None:
    model = nn.Linear(DIM, 1, bias=False).double()
    kept = model.weight.detach().clone()
    spent = dp.Accountant(BUDGET)
    spent.authorize(Gaussian(1.0, {"replace_one": 0.1}))
    with pytest.raises(
        InfeasibleError,
        match=r"this ledger holds 1 event of a run .* epsilon 0\.\d+ of 1 spent",
    ):
        make(model, accountant=spent)
    assert torch.equal(model.weight, kept)
    assert len(spent) == 1
    assert not make(model).model.weight.any()


def test_a_run_that_does_not_start_at_the_planned_start_is_refused() -> None:
    run = make()
    with torch.no_grad():
        run.model.weight.fill_(0.5)
    loader = run.opt.loader(records())
    run.backward(next(iter(loader)))
    with pytest.raises(SequenceError, match="parameters must be 0, the planned start"):
        run.opt.step()
    with pytest.raises(SequenceError, match="make a new optimizer"):
        run.opt.step()
    assert run.opt.steps == 0


# -- batches ----------------------------------------------------------------------------------------------------------


def test_a_permutation_is_used_to_its_end() -> None:
    run = make(epochs=2)
    loader = run.opt.loader(records())
    run.train(loader, steps=1)
    for again in (lambda: loader, lambda: run.opt.loader(records())):
        with refused(
            run,
            SequenceError,
            "step 1 must use batch 1 of a permutation that is used to its end",
        ):
            run.train(again())
        run.opt.discard()
    run = make(epochs=2)
    run.train(ordered(run, [np.arange(N)]), steps=1)
    with refused(run, SequenceError, r"\(got batch 0\)"):  # an equal permutation, from its start
        run.train(ordered(run, [np.arange(N)]))
    run = make(epochs=2)
    run.train(steps=EPOCH)  # between epochs a loop may be broken off
    run.train(steps=EPOCH)
    run.opt.finalize()
    assert run.opt.finalized


@pytest.mark.parametrize("used", [0, 1])
def test_a_permutation_that_was_begun_goes_on_in_its_own_loader_only(used: int) -> None:
    """Another data set could hold a record that was used at a place that is still to come."""
    run = make(epochs=2)
    for k, batch in enumerate(run.opt.loader(records())):
        run.backward(batch)
        if k == used:
            break
        run.opt.step()
    run.opt.discard()
    if not used:
        run.train()
        assert run.opt.steps == 2 * EPOCH
        return
    with pytest.raises(SequenceError, match="goes on with the same dataset object"):
        run.train()
    assert (run.opt.steps, len(run.opt.accountant)) == (1, 0)


def test_a_step_of_an_equal_but_new_permutation_is_refused() -> None:
    run = make(epochs=2)
    first, second = np.arange(N), np.arange(N)[::-1].copy()
    run.train(ordered(run, [first]), steps=1)
    loader = ordered(run, [second])
    log = loader._loader.batch_sampler.log
    for batch in loader:
        run.backward(batch)
        chunk = log.waiting[0]
        log.waiting[0] = chunk._replace(
            draw=replace(chunk.draw, part="1")
        )  # the right place, of another permutation
        with refused(run, SequenceError, "do not break a loop off within an epoch"):
            run.opt.step()
        break
    assert run.opt.steps == 1


def test_a_skipped_batch_is_noticed() -> None:
    run = make()
    with refused(run, SequenceError, "the previous batch was not used"):
        for _ in run.opt.loader(records()):
            pass
    with refused(run, SequenceError, "the previous batch was not used"):
        run.train(itertools.islice(run.opt.loader(records()), 1, None))
    assert (run.opt.steps, len(run.opt.accountant)) == (0, 0)


def test_a_batch_is_used_once_and_only_one_of_the_own_loader() -> None:
    run, other = make(), make()
    foreign = DataLoader(records(), batch_size=BATCH)
    model = dp.attach(nn.Linear(DIM, 1))
    poisson = dp.HolderSGD(
        model.parameters(),
        dp.HolderSGD.plan(lr=0.1, problem=PROBLEM, noise_multiplier=1.0, batch_size=BATCH, n=N),
    ).loader(records())
    for loader in (foreign, poisson, other.opt.loader(records())):
        for features, labels in loader:
            run.backward((features.double(), labels.double()))
            with refused(
                run, SequenceError, r"no batch is outstanding: .*optimizer.loader\(dataset\)"
            ):
                run.opt.step()
            break
    run.opt.zero_grad()
    for batch in run.opt.loader(records()):
        assert run.opt.outstanding_rows == len(batch[0])
        run.backward(batch)
        run.opt.step()
        assert run.opt.outstanding_rows is None
        run.backward(batch)
        with refused(
            run,
            SequenceError,
            "can use it once" if run.opt.steps < EPOCH else "all 3 planned steps",
        ):
            run.opt.step()
        run.opt.zero_grad()
    assert run.opt.steps == EPOCH


@pytest.mark.parametrize("size", [N - 1, N + 1, 0])
def test_a_data_set_of_another_size_is_refused(size: int) -> None:
    run = make()
    with refused(run, UnitError, rf"declared {N}, the data set has {size}"):
        run.opt.loader(records(size))
    assert (run.opt.steps, len(run.opt.accountant)) == (0, 0)


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        return iter(records())


class Items(Dataset):
    def __init__(self, item: Any) -> None:
        self.item = item

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        return self.item


@pytest.mark.parametrize(
    "item",
    [
        torch.zeros(DIM),
        {"x": torch.zeros(DIM), "y": 1.0},
        (torch.zeros(DIM), 1.0, 2.0),
        (torch.zeros(DIM),),
    ],
)
def test_a_data_set_that_is_no_map_of_pairs_is_refused(item: Any) -> None:
    run = make()
    with refused(run, ValueError, r"dataset must be map-style, to be sampled from \(got Stream"):
        run.opt.loader(Stream())
    with refused(run, ValueError, r"dataset must give \(features, target\) pairs"):
        next(iter(run.opt.loader(Items(item))))
    assert (run.opt.steps, len(run.opt.accountant)) == (0, 0)


def test_other_data_sets_and_collate_functions_deliver_the_same_batches() -> None:
    features, labels = records().tensors
    listed = [(features[k].tolist(), float(labels[k])) for k in range(N)]

    def collate(items: list[Any]) -> Any:
        x, y = zip(*items, strict=True)
        return torch.tensor(x), torch.tensor(y)

    order = np.random.default_rng(1).permutation(N)
    plain, own = hold(make()), hold(make())
    plain.train(ordered(plain, [order]))
    loader = own.opt.loader(listed, collate_fn=collate)
    loader._loader.batch_sampler.rng = InOrder([order])
    assert (len(loader), loader.dataset.source, loader.design) == (
        EPOCH,
        listed,
        dp.Shuffled(BATCH, N),
    )
    own.train(loader)
    torch.testing.assert_close(own.averages(), plain.averages(), rtol=0, atol=1e-12)


# -- gradients --------------------------------------------------------------------------------------------------------


def test_gradients_of_two_passes_are_refused() -> None:
    run = make()
    for batch in run.opt.loader(records()):
        run.backward(batch)
        run.backward(batch)
        with refused(
            run, SequenceError, r"exactly one backward pass over its batch \(got \[2\]\)"
        ):
            run.opt.step()
        assert run.model.weight.grad is None
        run.backward(batch)
        run.opt.step()
    whole = make()
    whole.train()
    assert run.opt.steps == whole.opt.steps == EPOCH


def test_gradients_put_there_by_hand_are_refused() -> None:
    run = make()
    for batch in run.opt.loader(records()):
        with refused(run, SequenceError, "p.grad must hold the gradient of the batch"):
            run.opt.step()
        run.model.weight.grad = torch.ones_like(run.model.weight)
        with refused(
            run, SequenceError, r"exactly one backward pass over its batch \(got \[0\]\)"
        ):
            run.opt.step()
        run.backward(batch)
        run.opt.zero_grad()
        with refused(run, SequenceError, r"got None"):
            run.opt.step()
        break
    assert (run.opt.steps, len(run.opt.accountant)) == (0, 0)


def add_decay(weight: nn.Parameter) -> None:
    weight.grad.add_(torch.ones_like(weight))


def replace_gradient(weight: nn.Parameter) -> None:
    weight.grad = 2 * weight.grad


@pytest.mark.parametrize(
    "change",
    [lambda weight: nn.utils.clip_grad_norm_(weight, 1e-3), add_decay, replace_gradient],
    ids=range(3),
)
def test_a_gradient_changed_after_its_backward_is_refused(
    change: Callable[[nn.Parameter], Any],
) -> None:
    run = make()
    for batch in run.opt.loader(records()):
        run.backward(batch)
        change(run.model.weight)
        with refused(run, SequenceError, r"p.grad must be what backward\(\) left there"):
            run.opt.step()
        run.backward(batch)
        run.opt.step()
    assert run.opt.steps == EPOCH


def test_gradients_from_before_the_batch_do_not_count() -> None:
    run, clean = hold(make()), hold(make())
    order = np.arange(N)
    run.backward([t.double() for t in records().tensors])  # a look at the data before training
    run.train(ordered(run, [order]))
    clean.train(ordered(clean, [order]))
    assert torch.equal(run.averages()[0], clean.averages()[0])


def test_an_attached_model_is_refused() -> None:
    run = make(dp.attach(nn.Linear(DIM, 1, bias=False).double()))
    for batch in run.opt.loader(records()):
        run.backward(batch)
        with refused(run, SequenceError, "not attached"):
            run.opt.step()
        break
    assert (run.opt.steps, len(run.opt.accountant)) == (0, 0)


def test_another_step_size_is_refused() -> None:
    run = make(epochs=2)
    group = run.opt.param_groups[0]
    for batch in run.opt.loader(records()):
        run.backward(batch)
        group["lr"] = 0.2
        with refused(
            run, SequenceError, r"lr must be 0.1, that of the plan, .*\(got 0.2\).*lr=\[...\]"
        ):
            run.opt.step()
        group["lr"] = 0.1
        run.opt.step()  # nothing was lost
    assert run.opt.steps == 2 * EPOCH


def test_a_scheduler_is_refused_as_soon_as_it_changes_the_step_size() -> None:
    run = make()
    scheduler = torch.optim.lr_scheduler.StepLR(run.opt, 2, gamma=0.5)
    batches = iter(run.opt.loader(records()))
    for _ in range(2):
        run.backward(next(batches))
        run.opt.step()
        scheduler.step()
    run.backward(next(batches))
    with refused(run, SequenceError, r"lr must be 0.1, that of the plan.*\(got 0.05\)"):
        run.opt.step()
    assert run.opt.steps == 2


def test_a_schedule_fixed_in_advance_is_followed() -> None:
    lrs = [0.3, 0.2, 0.1]
    run = make(lr=lrs)
    seen = []
    for batch in run.opt.loader(records()):
        seen.append(run.opt.param_groups[0]["lr"])
        run.backward(batch)
        run.opt.step()
    assert seen == lrs == list(run.opt.lrs)


def test_closures_are_called_once_with_gradients_on_and_their_loss_is_returned() -> None:
    order = np.arange(N)
    plain, closed, calls = hold(make()), hold(make()), []
    plain.train(ordered(plain, [order]))
    for batch in ordered(closed, [order]):

        def closure(batch: Any = batch) -> float:
            closed.opt.zero_grad()
            calls.append(closed.backward(batch))
            return calls[-1]

        with torch.no_grad():
            assert closed.opt.step(closure) == calls[-1]
    assert len(calls) == EPOCH
    assert torch.equal(closed.averages()[0], plain.averages()[0])
    with refused(closed, SequenceError, "all 3 planned steps are made"):
        closed.opt.step(closure)
    assert len(calls) == EPOCH
