"""Copies, files, devices and dtypes: what is saved, loaded, moved or detached, and goes on or says why it cannot."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import torch_dpsco as dp
from tests.compat.harness import (
    DIM,
    LR,
    RECORDS,
    Case,
    Wired,
    assert_rows,
    assert_same_model,
    clipped_means,
    dataset,
    network,
    numbers,
    private_optimizer,
    replayed,
    rows_alone,
    rows_recorded,
    squared,
    trained,
)
from tests.compat.test_loops import BATCH, STEPS, N, Run
from torch_dpsco.errors import PrivacyError, SequenceError
from torch_dpsco.rows import GradBatch, has_rows

ROWS = pytest.mark.parametrize("rows", ["auto", "dense"])
CASE = Case(network, lambda: (numbers(2),))


def through_file(value: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


# -- copies and files -------------------------------------------------------------------------------------------------


@pytest.mark.cases(3, 1)
@ROWS
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), through_file]
)
def test_copies_of_an_attached_model_record_right_rows(copied, rows):
    model = CASE.attach(rows, "mean")
    rows_recorded(CASE, model, CASE.batch(), "mean")
    expected = rows_alone(CASE, CASE.model(), CASE.batch())
    for each in (copied(model), model, copied(copied(model))):
        assert_rows(rows_recorded(CASE, each, CASE.batch(), "mean"), expected, CASE.tolerance())


@ROWS
def test_a_model_is_neither_saved_nor_copied_with_rows_in_it(rows):
    model = CASE.attach(rows, "sum")
    optimizer = private_optimizer(model, dp.Full(RECORDS))
    for held in ("a forward", "a backward"):
        loss = CASE.losses(model, CASE.batch()).sum()
        if held == "a backward":
            loss.backward()
        elif rows == "auto":
            model[2](torch.randn(RECORDS, 3).double())  # of the dense layer
        for take in (copy.deepcopy, pickle.dumps, through_file):
            with pytest.raises(SequenceError, match=r"between steps.*discard\(\)"):
                take(model)
        assert (
            model.state_dict().keys() == network().state_dict().keys()
        )  # holds parameters only
        optimizer.discard()
    assert dp.detach(copy.deepcopy(model)) is not model


def test_a_part_of_a_model_is_neither_saved_nor_copied_with_rows_in_it():
    model = dp.attach(nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 1)))
    optimizer = private_optimizer(model, dp.Full(RECORDS))
    model(torch.randn(RECORDS, 3)).sum().backward()
    for part in model:
        for take in (copy.deepcopy, pickle.dumps, through_file):
            with pytest.raises(SequenceError, match=r"between steps.*discard\(\)"):
                take(part)
    optimizer.discard()
    for part in model:
        assert type(copy.deepcopy(part)) is type(part)


def test_a_copied_pair_trains_by_itself_and_shares_the_ledger():
    run = Run()
    run.train(run.loader(2))
    twin = Run()
    twin.model, twin.optimizer = copy.deepcopy((run.model, run.optimizer))
    twin.draws = list(run.draws)
    twin.train(twin.loader(3))
    assert_same_model(twin.model, replayed(twin.draws, BATCH))
    assert_same_model(run.model, replayed(run.draws, BATCH))
    assert (run.optimizer.steps, twin.optimizer.steps) == (2, 5)
    assert len(run.optimizer.accountant) == len(twin.optimizer.accountant) == 5


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("together", [False, True])
def test_an_optimizer_is_not_pickled_but_saved_by_its_state(together):
    run = Run()
    run.train(run.loader(2))
    with pytest.raises(PrivacyError, match=r"save state_dict\(\)"):
        pickle.dumps((run.model, run.optimizer) if together else run.optimizer)
    fresh = Run()
    fresh.model.load_state_dict(run.model.state_dict())
    fresh.optimizer.load_state_dict(run.optimizer.state_dict())
    fresh.draws = list(run.draws)
    fresh.train(fresh.loader(3))
    fresh.check(5)


# -- state dicts ------------------------------------------------------------------------------------------------------


@ROWS
def test_names_and_state_dicts_are_those_of_the_plain_model(rows):
    model, plain = dp.attach(network(), rows=rows), network()
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert list(model.state_dict()) == list(plain.state_dict())
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
    plain.load_state_dict(model.state_dict())
    assert_same_model(plain, model)
    assert torch.equal(plain(numbers(2)), model(numbers(2)))


def test_weights_can_be_loaded_in_mid_run():
    run = Run()
    run.train(run.loader(2))
    run.model.load_state_dict(network().state_dict())
    run.draws = []
    run.train(run.loader(3))
    assert_same_model(run.model, replayed(run.draws, BATCH))
    assert run.optimizer.steps == len(run.optimizer.accountant) == 5


def test_buffers_can_be_loaded_between_attaching_and_training():
    def scaled(m: Wired, x: torch.Tensor) -> torch.Tensor:
        return m.layer(x) * m.scale

    model = Wired(scaled, layer=nn.Linear(DIM, 1))
    model.register_buffer("scale", torch.ones(()))
    dp.attach(model)
    model.load_state_dict(model.state_dict() | {"scale": torch.tensor(2.0)})
    model(numbers(DIM).float()).mean().backward()
    assert len(GradBatch.consume(trained(model))) == RECORDS


@ROWS
def test_parameters_that_are_exchanged_after_attach_are_refused(rows):
    model = CASE.attach(rows, "sum")
    optimizer = private_optimizer(model, dp.Full(RECORDS))
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    with pytest.raises(SequenceError, match="assign=True"):
        CASE.losses(model, CASE.batch())
    assert len(optimizer.accountant) == 0
    model = dp.attach(nn.Linear(DIM, 1), loss_reduction="sum")
    optimizer = private_optimizer(model, dp.Full(RECORDS))
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    for (x,) in optimizer.loader(
        torch.utils.data.TensorDataset(numbers(DIM).float()), steps=1, isolation="none"
    ):
        with pytest.raises(SequenceError, match="assign=True"):
            model(x)
    assert len(optimizer.accountant) == 0


# -- dtypes and devices -----------------------------------------------------------------------------------------------


@pytest.mark.cases(2, 1)
@ROWS
@pytest.mark.parametrize(
    "move", [lambda m: m.double(), lambda m: m.to("cpu"), lambda m: m.to(torch.float64)]
)
def test_a_model_moved_after_attach_trains_the_same_parameters(move, rows):
    model = dp.attach(network().float(), rows=rows, loss_reduction="sum")
    optimizer = private_optimizer(model, dp.Full(N))
    kept = list(model.parameters())
    move(model)
    assert all(p is q for p, q in zip(model.parameters(), kept, strict=True))
    dtype = kept[0].dtype
    start = copy.deepcopy(dp.detach(copy.deepcopy(model)))
    for x, y in optimizer.loader(dataset(), steps=1, isolation="none"):
        squared(model(x.to(dtype)), y.to(dtype)).backward()
        optimizer.step()
        expected = clipped_means(start, (x.to(dtype), y.to(dtype)), N)
    for p, old, mean in zip(kept, start.parameters(), expected, strict=True):
        torch.testing.assert_close(p, old - LR * mean, rtol=1e-4, atol=1e-5)


@ROWS
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_rows_on_another_device_are_right(rows):
    expected = rows_alone(CASE, CASE.model(), CASE.batch())
    model = dp.attach(CASE.model().cuda(), rows=rows)
    found = rows_recorded(CASE, model, tuple(t.cuda() for t in CASE.batch()), "mean")
    assert_rows([part.cpu() for part in found], expected, CASE.tolerance())


# -- detached, functional, replicated ---------------------------------------------------------------------------------


@ROWS
def test_a_detached_model_trains_as_any_other(rows):
    run = Run()
    run.model = dp.attach(dp.detach(run.model), rows=rows, loss_reduction="sum")
    run.train(run.loader(2))
    plain = network()
    plain.load_state_dict(dp.detach(run.model).state_dict())
    for model in (run.model, plain):
        inner = torch.optim.Adam(model.parameters(), lr=0.1)
        for _ in range(2):
            inner.zero_grad()
            squared(model(dataset().tensors[0]), dataset().tensors[1]).backward()
            inner.step()
    assert_same_model(run.model, plain, tolerance=0.0)
    assert not has_rows(list(run.model.parameters()))


@ROWS
def test_functional_calls_are_right_or_refused(rows):
    model = CASE.attach(rows, "sum")
    own = dict(model.named_parameters())
    batch, plain = CASE.batch(), CASE.model()
    CASE.losses(
        Wired(lambda m, x: torch.func.functional_call(model, own, (x,))), batch
    ).sum().backward()
    assert_rows(
        GradBatch.consume(trained(model)).dense(),
        rows_alone(CASE, plain, batch),
        CASE.tolerance(),
    )

    others = {name: p.detach().clone().requires_grad_() for name, p in own.items()}
    with pytest.raises(SequenceError, match="functional_call"):
        torch.func.functional_call(model, others, batch)
    with pytest.raises((SequenceError, RuntimeError), match=r"functional_call|setup_context"):
        torch.func.grad(lambda params: torch.func.functional_call(model, params, batch).sum())(
            others
        )
    assert not has_rows(list(model.parameters()))
    assert not has_rows(list(others.values()))


def test_functional_gradients_of_a_detached_copy_are_right():
    model = CASE.attach("auto", "sum")
    free, (x,) = dp.detach(copy.deepcopy(model)), CASE.batch()
    slopes = torch.func.grad(
        lambda params: torch.func.functional_call(free, params, (x,)).sum()
    )({name: p.detach() for name, p in free.named_parameters()})
    plain = CASE.model()
    plain(x).sum().backward()
    for name, p in plain.named_parameters():
        torch.testing.assert_close(slopes[name], p.grad)


def test_a_run_in_eval_mode_makes_no_step():
    run = Run(dp.Full(N))
    run.model.eval()
    for batch in run.loader(1):
        with pytest.raises(SequenceError, match=r"model.train\(\)"):
            run.backward(batch)
        with pytest.raises(SequenceError, match="missing"):
            run.optimizer.step()
    assert run.optimizer.steps == len(run.optimizer.accountant) == 0


def test_nothing_here_warns_but_about_seeds():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "Full backward hook is firing", UserWarning)
        run = Run()
        run.train(run.loader(STEPS))
    run.check()
