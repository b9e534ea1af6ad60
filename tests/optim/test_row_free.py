"""Optimizers of secret iterates: which calls in which order they take, what they charge, what they save and refuse.

`HolderOutputSGD` on 12 records in batches of 5: three steps an epoch, the last batch is short.
"""

from __future__ import annotations

import copy
import io
import itertools
import math
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import torch_dpsco as dp
from torch_dpsco.accounting.events import Gaussian

N, DIM, BATCH, EPOCH = 12, 3, 5, 3
LOSS = dp.losses.Hinge(power=1.5)
PROBLEM = LOSS.problem(bound_x=1.0, radius=1.0)
BUDGET = dp.Budget(1.0, 1e-3)


def records(n: int = N) -> TensorDataset:
    draw = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(n, DIM, generator=draw) / 2, torch.randn(n, 1, generator=draw).sign())


@dataclass
class Run:
    model: nn.Linear
    opt: dp.HolderOutputSGD

    def backward(self, batch: Any) -> float:
        features, labels = batch
        loss = LOSS(self.model(features), labels)
        loss.backward()
        return loss.item()

    def train(self, loader: Any = None, steps: int | None = None) -> Run:
        """Makes steps; all of an iteration if their number is not given."""
        for batch in itertools.islice(self.opt.loader(records()) if loader is None else loader, steps):
            self.backward(batch)
            self.opt.step()
        return self

    def averages(self) -> list[torch.Tensor]:
        return [self.opt.state[p]["average"].clone() for p in self.model.parameters()]

    def snapshot(self) -> tuple[Any, ...]:
        weights = [p.detach().double().numpy().tobytes() for p in self.model.parameters()]
        return (
            weights,
            self.opt.accountant.ledger.digest(),
            len(self.opt.accountant),
            self.opt.steps,
            self.opt.finalized,
        )


def make(
    model: nn.Module | None = None,
    *,
    accountant: dp.Accountant | None = None,
    generator: torch.Generator | None = None,
    **changes: Any,
) -> Run:
    """Returns a run that charges an accountant with any budget, by default with that of the plan."""
    model = nn.Linear(DIM, 1, bias=False).double() if model is None else model
    arguments = {"problem": PROBLEM, "n": N, "budget": BUDGET, "batch_size": BATCH, "epochs": 1, "lr": 0.1, **changes}
    plan = dp.HolderOutputSGD.plan(**arguments, dim=sum(p.numel() for p in model.parameters()))
    accountant = dp.Accountant(arguments["budget"]) if accountant is None else accountant
    opt = dp.HolderOutputSGD(
        model.parameters(), plan=plan, problem=arguments["problem"], accountant=accountant, generator=generator
    )
    return Run(model, opt)


@contextmanager
def refused(run: Run, error: type[Exception], match: str) -> Iterator[None]:
    """The block raises, and leaves parameters, ledger and step count as they were."""
    before = run.snapshot()
    with pytest.raises(error, match=match):
        yield
    assert run.snapshot() == before


class InOrder:
    """A source of permutations that are fixed in advance, one after another."""

    def __init__(self, orders: list[np.ndarray]) -> None:
        self.orders = list(orders)

    def permutation(self, size: int) -> np.ndarray:
        return self.orders.pop(0)


def ordered(run: Run, orders: list[np.ndarray]) -> Any:
    loader = run.opt.loader(records())
    loader._loader.batch_sampler.rng = InOrder(orders)
    return loader


# -- what is fixed ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["design", "prox", "accountant", "adjacency", "event", "noise_std", "planned_steps", "lrs", "bounds"]
)
def test_what_the_noise_was_calibrated_for_cannot_be_reassigned(name: str) -> None:
    run = make()
    kept = getattr(run.opt, name)
    for value in (kept, None):
        with refused(run, dp.PrivacyError, f"{name} is fixed at construction: make a new optimizer"):
            setattr(run.opt, name, value)
    assert getattr(run.opt, name) is kept


def test_parameters_cannot_be_added_after_construction() -> None:
    run = make()
    with refused(run, dp.SequenceError, "params are fixed at construction"):
        run.opt.add_param_group({"params": [nn.Parameter(torch.ones(2, dtype=torch.float64))]})
    assert len(run.opt.param_groups) == 1


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps, lambda opt: torch.save(opt, io.BytesIO())])
@pytest.mark.parametrize("steps", [0, 1, EPOCH])
def test_a_run_cannot_be_copied(copied: Callable[[Any], Any], steps: int) -> None:
    run = make().train(steps=steps)
    with refused(run, dp.SequenceError, "must not be copied: it has one release; make a new optimizer"):
        copied(run.opt)
    with refused(run, dp.SequenceError, "must not be copied"):
        copy.deepcopy((run.model, run.opt))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_single_precision_is_refused(dtype: torch.dtype) -> None:
    model = nn.Linear(DIM, 1, bias=False, dtype=dtype)
    kept = model.weight.detach().clone()
    with pytest.raises(ValueError, match=rf"params must be torch.float64 .*\(got {dtype}\).*model.double\(\)"):
        make(model)
    assert torch.equal(model.weight, kept)
    mixed = nn.Linear(DIM, 1).double()
    mixed.bias = nn.Parameter(mixed.bias.detach().to(dtype))
    with pytest.raises(ValueError, match=r"params must be torch.float64"):
        make(mixed, problem=LOSS.problem(bound_x=2.0, radius=1.0))
    run = make()
    for batch in run.opt.loader(records()):
        run.backward(batch)
        run.model.to(dtype)
        with refused(run, dp.SequenceError, "parameters torch.float64"):
            run.opt.step()
        break


def test_frozen_parameters_are_refused() -> None:
    model = nn.Linear(DIM, 1).double()
    model.bias.requires_grad_(False)
    with pytest.raises(ValueError, match="all trained"):
        make(model, problem=LOSS.problem(bound_x=2.0, radius=1.0))
    with pytest.raises(ValueError, match="params must hold a parameter that requires a gradient"):
        make(model.requires_grad_(False), problem=LOSS.problem(bound_x=2.0, radius=1.0))


def test_construction_sets_the_parameters_to_the_planned_start_only_if_it_succeeds() -> None:
    model = nn.Linear(DIM, 1, bias=False).double()
    kept = model.weight.detach().clone()
    spent = dp.Accountant(BUDGET)
    spent.authorize(Gaussian(1.0, {"replace_one": 0.1}))
    with pytest.raises(dp.InfeasibleError, match=r"epsilon must be >= 1\.\d+ for one step with this noise"):
        make(model, accountant=spent)
    assert torch.equal(model.weight, kept)
    assert len(spent) == 1
    assert not make(model).model.weight.any()


def test_a_run_that_does_not_start_at_the_planned_start_is_refused() -> None:
    run = make()
    with torch.no_grad():
        run.model.weight.fill_(0.5)
    for batch in run.opt.loader(records()):
        run.backward(batch)
        with refused(run, dp.SequenceError, "parameters must be 0, the planned start"):
            run.opt.step()
        break
    with torch.no_grad():
        run.model.weight.zero_()
    run.opt.zero_grad()
    run.train()
    assert run.opt.steps == EPOCH


# -- batches ----------------------------------------------------------------------------------------------------------


def test_a_permutation_is_used_to_its_end() -> None:
    run = make(epochs=2)
    loader = run.opt.loader(records())
    run.train(loader, steps=1)
    for again in (lambda: loader, lambda: run.opt.loader(records())):
        with refused(run, dp.SequenceError, "step 1 must use batch 1 of a permutation that is used to its end"):
            run.train(again())
    run = make(epochs=2)
    run.train(ordered(run, [np.arange(N)]), steps=1)
    with refused(run, dp.SequenceError, r"\(got batch 0\)"):  # an equal permutation, from its start
        run.train(ordered(run, [np.arange(N)]))
    run = make(epochs=2)
    run.train(steps=EPOCH)  # between epochs a loop may be broken off
    run.train(steps=EPOCH)
    run.opt.finalize()


def test_a_step_of_an_equal_but_new_permutation_is_refused() -> None:
    run = make(epochs=2)
    first, second = np.arange(N), np.arange(N)[::-1].copy()
    run.train(ordered(run, [first]), steps=1)
    loader = ordered(run, [second])
    log = loader._loader.batch_sampler.log
    for batch in loader:
        run.backward(batch)
        chunk = log.waiting[0]
        log.waiting[0] = replace(chunk, draw=replace(chunk.draw, part="1"))  # the right place, of another permutation
        with refused(run, dp.SequenceError, "do not break a loop off within an epoch"):
            run.opt.step()
        break


def test_a_skipped_batch_is_noticed() -> None:
    run = make()
    with refused(run, dp.SequenceError, "the previous batch was not used"):
        for _ in run.opt.loader(records()):
            pass
    with refused(run, dp.SequenceError, "the previous batch was not used"):
        run.train(itertools.islice(run.opt.loader(records()), 1, None))


def test_a_batch_is_used_once_and_only_one_of_the_own_loader() -> None:
    run, other = make(), make()
    foreign = DataLoader(records(), batch_size=BATCH)
    model = dp.attach(nn.Linear(DIM, 1))
    poisson = dp.HolderSGD(
        model.parameters(), 0.1, problem=PROBLEM, noise_multiplier=1.0, batch_size=BATCH, n=N
    ).loader(records())
    for loader in (foreign, poisson, other.opt.loader(records())):
        for features, labels in loader:
            run.backward((features.double(), labels.double()))
            with refused(run, dp.SequenceError, r"no batch is outstanding: .*optimizer.loader\(dataset\)"):
                run.opt.step()
            break
    run.opt.zero_grad()
    for batch in run.opt.loader(records()):
        assert run.opt.outstanding_rows == len(batch[0])
        run.backward(batch)
        run.opt.step()
        assert run.opt.outstanding_rows is None
        run.backward(batch)
        with refused(run, dp.SequenceError, "can use it once" if run.opt.steps < EPOCH else "all 3 planned steps"):
            run.opt.step()
        run.opt.zero_grad()
    assert run.opt.steps == EPOCH


@pytest.mark.parametrize("size", [N - 1, N + 1, 0])
def test_a_data_set_of_another_size_is_refused(size: int) -> None:
    run = make()
    with refused(run, dp.UnitError, rf"declared {N}, the data set has {size}"):
        run.opt.loader(records(size))


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
    "item", [torch.zeros(DIM), {"x": torch.zeros(DIM), "y": 1.0}, (torch.zeros(DIM), 1.0, 2.0), (torch.zeros(DIM),)]
)
def test_a_data_set_that_is_no_map_of_pairs_is_refused(item: Any) -> None:
    run = make()
    with refused(run, ValueError, r"dataset must be map-style, to be sampled from \(got Stream"):
        run.opt.loader(Stream())
    with refused(run, ValueError, r"dataset must give \(features, target\) pairs"):
        next(iter(run.opt.loader(Items(item))))


def test_physical_batches_are_refused() -> None:
    run = make()
    with refused(run, dp.PrivacyError, r"whole batches.*\(got BoundedLoader\)"):
        dp.PhysicalBatches(run.opt.loader(records()), 2)


def test_other_data_sets_and_collate_functions_deliver_the_same_batches() -> None:
    features, labels = records().tensors
    listed = [(features[k].tolist(), float(labels[k])) for k in range(N)]

    def collate(items: list[Any]) -> Any:
        x, y = zip(*items, strict=True)
        return torch.tensor(x), torch.tensor(y)

    order = np.random.default_rng(1).permutation(N)
    plain, own = make(), make()
    plain.train(ordered(plain, [order]))
    loader = own.opt.loader(listed, collate_fn=collate)
    loader._loader.batch_sampler.rng = InOrder([order])
    assert (len(loader), loader.dataset, loader.design) == (EPOCH, listed, dp.Shuffled(BATCH, N))
    own.train(loader)
    torch.testing.assert_close(own.averages(), plain.averages(), rtol=0, atol=1e-12)


# -- gradients --------------------------------------------------------------------------------------------------------


def test_gradients_of_two_passes_are_refused() -> None:
    run = make()
    for batch in run.opt.loader(records()):
        run.backward(batch)
        run.backward(batch)
        with refused(run, dp.SequenceError, r"exactly one backward pass over its batch \(got \[2\]\)"):
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
        with refused(run, dp.SequenceError, "p.grad must hold the gradient of the batch"):
            run.opt.step()
        run.model.weight.grad = torch.ones_like(run.model.weight)
        with refused(run, dp.SequenceError, r"exactly one backward pass over its batch \(got \[0\]\)"):
            run.opt.step()
        run.backward(batch)
        run.opt.zero_grad()
        with refused(run, dp.SequenceError, r"got None"):
            run.opt.step()
        break


def add_decay(weight: nn.Parameter) -> None:
    weight.grad.add_(torch.ones_like(weight))


def replace_gradient(weight: nn.Parameter) -> None:
    weight.grad = 2 * weight.grad


@pytest.mark.parametrize(
    "change", [lambda weight: nn.utils.clip_grad_norm_(weight, 1e-3), add_decay, replace_gradient], ids=range(3)
)
def test_a_gradient_changed_after_its_backward_is_refused(change: Callable[[nn.Parameter], Any]) -> None:
    run = make()
    for batch in run.opt.loader(records()):
        run.backward(batch)
        change(run.model.weight)
        with refused(run, dp.SequenceError, r"p.grad must be what backward\(\) left there"):
            run.opt.step()
        run.backward(batch)
        run.opt.step()
    assert run.opt.steps == EPOCH


def test_gradients_from_before_the_batch_do_not_count() -> None:
    run, clean = make(), make()
    order = np.arange(N)
    run.backward([t.double() for t in records().tensors])  # a look at the data before training
    run.train(ordered(run, [order]))
    clean.train(ordered(clean, [order]))
    assert torch.equal(run.averages()[0], clean.averages()[0])


def test_an_attached_model_is_refused() -> None:
    run = make(dp.attach(nn.Linear(DIM, 1, bias=False).double()))
    for batch in run.opt.loader(records()):
        run.backward(batch)
        with refused(run, dp.SequenceError, "not attached"):
            run.opt.step()
        break


def test_another_step_size_is_refused() -> None:
    run = make(epochs=2)
    group = run.opt.param_groups[0]
    for batch in run.opt.loader(records()):
        run.backward(batch)
        group["lr"] = 0.2
        with refused(run, dp.SequenceError, r"lr must be 0.1, that of the plan, .*\(got 0.2\).*lr=\[...\]"):
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
    with refused(run, dp.SequenceError, r"lr must be 0.1, that of the plan.*\(got 0.05\)"):
        run.opt.step()


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
    plain, closed, calls = make(), make(), []
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
    with refused(closed, dp.SequenceError, "all 3 planned steps are made"):
        closed.opt.step(closure)
    assert len(calls) == EPOCH


# -- the release ------------------------------------------------------------------------------------------------------


def test_nothing_is_released_before_all_planned_steps_are_made() -> None:
    run = make()
    for done in range(EPOCH):
        with refused(run, dp.SequenceError, rf"{EPOCH - done} of {EPOCH} planned steps are missing: nothing is"):
            run.opt.finalize()
        with refused(run, dp.SequenceError, r"nothing is released before finalize\(\)"), run.opt.released():
            raise AssertionError("released() showed secret iterates")
        if not done:
            batches = iter(run.opt.loader(records()))
        run.backward(next(batches))
        run.opt.step()
    with refused(run, dp.SequenceError, r"nothing is released before finalize\(\)"), run.opt.released():
        raise AssertionError("released() showed secret iterates")
    with pytest.raises(dp.SequenceError, match="planned steps are missing"), make().opt:
        pass
    assert run.opt.metrics == {"step": EPOCH, "noise_std": run.opt.noise_std}


def test_more_steps_than_planned_are_refused() -> None:
    run = make().train()
    with refused(run, dp.SequenceError, r"all 3 planned steps are made: call finalize\(\)"):
        run.opt.step()
    with refused(run, dp.SequenceError, r"all 3 planned steps are made: call finalize\(\)"):
        run.opt.loader(records())
    run = make()
    loader = run.opt.loader(records())
    run.train(loader)
    with refused(run, dp.SequenceError, "all 3 planned steps are made"):
        run.train(loader)


def test_nothing_follows_the_release() -> None:
    run = make().train()
    run.opt.finalize()
    answer = run.model.weight.detach().clone()
    with refused(run, dp.SequenceError, r"finalize\(\) must be called once"):
        run.opt.finalize()
    with refused(run, dp.SequenceError, "the optimizer is finalized"):
        run.opt.step()
    with refused(run, dp.SequenceError, "the optimizer is finalized"):
        run.opt.loader(records())
    with run.opt.released():
        assert torch.equal(run.model.weight, answer)
    assert not run.opt.state
    assert not run.model.weight._post_accumulate_grad_hooks
    with run.opt:
        pass  # leaving again releases nothing
    assert len(run.opt.accountant) == 1


def test_leaving_the_block_releases_the_answer_unless_it_is_left_by_an_exception() -> None:
    run = make()
    with run.opt as opt:
        run.train()
        assert not opt.finalized
    assert opt.finalized
    assert len(opt.accountant) == 1
    run = make()
    with refused(run, KeyError, "mine"), run.opt:
        raise KeyError("mine")
    run.train()
    with refused(run, KeyError, "mine"), run.opt:
        raise KeyError("mine")
    assert not run.opt.finalized


def test_the_release_is_charged_before_its_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    run = make().train()
    undrawn, secret = run.opt._noise.get_state(), run.model.weight.detach().clone()
    authorize, seen = run.opt.accountant.authorize, []

    def watched(event: Any, **details: Any) -> None:
        assert torch.equal(run.opt._noise.get_state(), undrawn)
        assert torch.equal(run.model.weight, secret)
        seen.append(event)
        authorize(event, **details)

    monkeypatch.setattr(run.opt.accountant, "authorize", watched)
    run.opt.finalize()
    assert not torch.equal(run.opt._noise.get_state(), undrawn)
    assert seen == [run.opt.event] == [event for _, _, event, _ in run.opt.accountant.ledger.entries()]
    crashed = make().train()
    monkeypatch.setattr(type(crashed.opt.prox), "apply_", lambda *_: math.log(-1.0))
    secret = crashed.model.weight.detach().clone()
    with pytest.raises(ValueError, match=r"math domain error|expected a"):
        crashed.opt.finalize()
    assert len(crashed.opt.accountant) == 1  # a crash over-counts
    assert torch.equal(crashed.model.weight, secret)


def test_a_release_that_the_budget_does_not_admit_any_more_is_refused() -> None:
    accountant = dp.Accountant(BUDGET)
    first, second = (make(accountant=accountant).train() for _ in range(2))
    first.opt.finalize()
    drawn = second.opt._noise.get_state()
    for _ in range(2):
        with refused(second, dp.BudgetExceeded, "epsilon"):
            second.opt.finalize()
    assert torch.equal(second.opt._noise.get_state(), drawn)
    with pytest.raises(dp.BudgetExceeded, match="epsilon"), second.opt:
        pass
    accountant.budget = dp.Budget(2.0, 1e-3)
    second.opt.finalize()
    assert second.opt.finalized
    assert len(accountant) == 2


def test_runs_that_share_an_accountant_add_up_as_one_gaussian() -> None:
    accountant = dp.Accountant(dp.Budget(3.0, 1e-3))
    runs = [make(accountant=accountant, epochs=epochs).train() for epochs in (1, 2)]
    assert len(accountant) == 0  # nothing is charged before a release
    for run in runs:
        run.opt.finalize()
    assert len(accountant) == 2
    for run in runs:
        assert isinstance(run.opt.event, Gaussian)
    mu = math.sqrt(sum((dict(run.opt.event.sens)["replace_one"] / run.opt.noise_std) ** 2 for run in runs))
    assert accountant.get_mu() == pytest.approx(mu, rel=1e-9)
    assert 1.0 < runs[0].opt.privacy_spent().epsilon == runs[1].opt.privacy_spent().epsilon < 2.0


def test_the_release_spends_the_whole_budget_and_no_more() -> None:
    for sampling in ("shuffle", "uniform"):
        run = make(sampling=sampling)
        with run.opt:
            run.train()
        assert 0.999 < run.opt.privacy_spent().epsilon <= 1.0
        assert len(run.opt.accountant) == 1


@pytest.mark.parametrize(
    ("accountant", "error"),
    [
        (dp.Accountant(dp.Budget(1.0, 1e-3, "add_remove")), dp.AdjacencyError),
        (dp.Accountant(dp.Budget(1.0, 1e-3, "zero_out")), dp.AdjacencyError),
        (dp.Accountant(adjacency="add_remove"), dp.AdjacencyError),
        (dp.Accountant(dp.Budget(1.0, 1e-3, unit="user")), dp.UnitError),
    ],
    ids=["add_remove", "zero_out", "no budget", "user"],
)
def test_an_accountant_of_another_adjacency_or_unit_is_refused(accountant: dp.Accountant, error: Any) -> None:
    with pytest.raises(error, match=r"adjacency|unit"):
        make(accountant=accountant)
    assert not len(accountant)


def test_the_noise_is_fresh_unless_a_generator_is_given_which_warns() -> None:
    answers = []
    for _ in range(2):
        run = make()
        run.train(ordered(run, [np.arange(N)]))
        run.opt.finalize()
        answers.append(run.model.weight.detach())
        assert not run.opt.seeded
    assert not torch.equal(*answers)
    with pytest.warns(dp.UtilityWarning, match="repeatable"):
        assert make(generator=torch.Generator().manual_seed(1)).opt.seeded


def test_one_planned_step_releases_the_start_and_costs_nothing() -> None:
    run = make(batch_size=N)
    assert (run.opt.planned_steps, run.opt.noise_std) == (1, 0.0)
    assert run.opt.event == Gaussian(0.0, {"replace_one": 0.0})
    with run.opt:
        run.train()
    assert not run.model.weight.any()
    assert run.opt.privacy_spent().epsilon == 0.0
    assert "without any privacy" not in str(run.opt.report())


def test_a_distributed_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("is_available", True), ("is_initialized", True), ("get_world_size", 2)):
        monkeypatch.setattr(torch.distributed, name, lambda *_, value=value: value)
    with pytest.raises(dp.SequenceError, match="world_size must be 1"):
        make()


# -- checkpoints ------------------------------------------------------------------------------------------------------


def saved(run: Run) -> Any:
    """Returns what a file gives back, read without trusting it."""
    file = io.BytesIO()
    torch.save((run.opt.state_dict(), run.model.state_dict()), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def resumed(run: Run, **changes: Any) -> Run:
    again = make(epochs=3, **changes)
    opt_state, model_state = saved(run)
    again.opt.load_state_dict(opt_state)
    again.model.load_state_dict(model_state)
    return again


@pytest.mark.parametrize("lrs", [0.1, [0.3 / (1 + k) for k in range(3 * EPOCH)]])
def test_a_run_resumed_between_epochs_ends_like_one_that_was_never_interrupted(lrs: Any) -> None:
    orders = [np.random.default_rng(k).permutation(N) for k in range(3)]
    whole = make(epochs=3, lr=lrs)
    whole.train(ordered(whole, orders))
    parted = make(epochs=3, lr=lrs)
    parted.train(ordered(parted, orders), steps=EPOCH)
    for done in (1, 2):
        parted = resumed(parted, lr=lrs)
        parted.train(ordered(parted, orders[done:]), steps=EPOCH)
    assert parted.opt.steps == whole.opt.steps == 3 * EPOCH
    assert torch.equal(parted.model.weight, whole.model.weight)
    assert torch.equal(parted.averages()[0], whole.averages()[0])
    parted.opt.finalize()
    assert len(parted.opt.accountant) == 1


def test_a_run_with_independent_batches_cannot_be_resumed() -> None:
    for steps in (1, EPOCH, 3 * EPOCH):
        state, _ = saved(make(epochs=3, sampling="uniform").train(steps=steps))
        again = make(epochs=3, sampling="uniform")
        with refused(again, dp.SequenceError, "independent batches must be made in one go.*use sampling='shuffle'"):
            again.opt.load_state_dict(state)
    resumed(make(epochs=3, sampling="uniform"), sampling="uniform").train()  # nothing was drawn yet
    run = make(epochs=3, sampling="uniform").train()
    run.opt.finalize()
    assert resumed(run, sampling="uniform").opt.finalized


def test_a_checkpoint_within_an_epoch_cannot_be_resumed() -> None:
    run = resumed(make(epochs=3).train(steps=EPOCH + 1))
    with refused(run, dp.SequenceError, "must use batch 1 of a permutation .*save checkpoints between epochs"):
        run.train()


def test_a_checkpoint_is_marked_confidential_until_the_release() -> None:
    run = make()
    assert run.opt.state_dict()["dpsco"]["confidential"] is True
    run.train()
    assert run.opt.state_dict()["dpsco"]["confidential"] is True
    run.opt.finalize()
    state = run.opt.state_dict()
    assert state["dpsco"]["confidential"] is False
    assert not state["state"]  # no average without noise


def test_a_checkpoint_holds_no_noise() -> None:
    run = make()
    state = run.opt._noise.get_state()
    text = repr(run.opt.state_dict())
    assert "generator" not in text
    again = resumed(make(epochs=3))
    assert not torch.equal(again.opt._noise.get_state(), state)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"lr": 0.2}, "lrs"),
        ({"epochs": 2}, "steps"),
        ({"batch_size": 4}, "design"),
        ({"budget": dp.Budget(2.0, 1e-3)}, "noise_std"),
        ({"sampling": "uniform"}, "event"),
        ({"problem": LOSS.problem(bound_x=1.0, radius=0.5)}, "prox"),
        ({"problem": LOSS.problem(bound_x=0.5, radius=1.0)}, "bounds"),
        ({"budget": dp.Budget(1.0, 1e-3, "zero_out")}, "adjacency"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_checkpoint_of_another_plan_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    state = make().opt.state_dict()
    other = make(**changes)
    with refused(other, ValueError, rf"of the same plan.*\b{named}: "):
        other.opt.load_state_dict(state)


def test_a_foreign_state_is_refused() -> None:
    run = make()
    with refused(run, ValueError, "must be a private optimizer's"):
        run.opt.load_state_dict(torch.optim.SGD(run.model.parameters(), 0.1).state_dict())


def test_a_finalized_checkpoint_stays_finalized() -> None:
    run = make(epochs=3).train()
    run.opt.finalize()
    again = resumed(run)
    assert torch.equal(again.model.weight, run.model.weight)
    assert (again.opt.finalized, len(again.opt.accountant)) == (True, 1)
    with refused(again, dp.SequenceError, "must be called once"):
        again.opt.finalize()


def test_a_checkpoint_never_forgets_what_was_charged_since() -> None:
    accountant = dp.Accountant(dp.Budget(4.0, 1e-3))
    run = make(epochs=3, accountant=accountant).train(steps=EPOCH)
    accountant.authorize(run.opt.event)
    state, _ = saved(run)
    make(accountant=accountant).train().opt.finalize()
    assert len(accountant) == 2
    again = make(epochs=3, accountant=accountant)
    again.opt.load_state_dict(state)
    assert len(accountant) == 2  # the later state of one history wins
    stranger = make(epochs=3, accountant=dp.Accountant(dp.Budget(4.0, 1e-3)))
    stranger.opt.accountant.authorize(run.opt.event)
    with refused(stranger, dp.PrivacyError, "histor"):
        stranger.opt.load_state_dict(state)
