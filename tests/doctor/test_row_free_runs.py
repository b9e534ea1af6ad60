"""Optimizers that need no per-sample gradients: the doctor changes nothing and tells nothing secret; `fit` asks it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import torch_dpsco as dp
from tests.doctor.row_free import HINGE, Around, N, data, linear, output, pairs, tilted
from tests.streams import count_noise
from torch_dpsco.errors import PrivacyError, SequenceError, UtilityWarning


class InOrder:
    def permutation(self, size: int) -> Any:
        return torch.arange(size).numpy()


def backward_inside(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    """A loss whose passes run the optimizer's hooks."""

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        value = HINGE(outputs, targets)
        value.backward(retain_graph=True)
        return value

    return loss


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("when", ["first", "before backward", "before step", "after step"])
@pytest.mark.parametrize("nasty", [False, True])
def test_a_run_goes_on_as_if_the_doctor_had_not_been_there(when, nasty):
    records = data()

    def released(consult: str) -> list[Tensor]:
        model = linear()
        with pytest.warns(UtilityWarning):
            optimizer = output(model, generator=torch.Generator().manual_seed(3))
        loader = optimizer.loader(records)
        loader._loader.batch_sampler.rng = InOrder()
        loss = backward_inside(model) if nasty else HINGE

        def doctor(now: str) -> None:
            if now == consult:
                dp.doctor(model, loss, loader, optimizer)

        doctor("first")
        with optimizer:
            for x, y in loader:
                value = HINGE(model(x), y)
                doctor("before backward")
                value.backward()
                before = [p.grad for p in model.parameters()], optimizer._backwards._counts[:]
                doctor("before step")
                assert all(
                    p.grad is kept for p, kept in zip(model.parameters(), before[0], strict=True)
                )
                assert optimizer._backwards._counts == before[1]
                optimizer.step()
                doctor("after step")
        return [p.detach().clone() for p in model.parameters()]

    assert all(map(torch.equal, released(when), released("never")))


def test_nothing_is_drawn_or_charged():
    model = linear()
    optimizer = output(model)
    loader = optimizer.loader(data())
    streams, noise = torch.get_rng_state(), count_noise(optimizer)
    assert dp.doctor(model, HINGE, loader, optimizer).healthy
    assert (optimizer.outstanding_rows, optimizer.steps, len(optimizer.accountant)) == (
        None,
        0,
        0,
    )
    assert torch.equal(torch.get_rng_state(), streams)
    assert not noise.drawn
    assert not any(p.detach().any() for p in model.parameters())


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e3])
def test_secret_iterates_have_no_say_in_the_findings(scale):
    def said(secret: bool) -> str:
        model = Around(lambda layer, x: (2 * layer(x - x.mean(0))).tanh()).double()
        optimizer = output(model)
        if secret:
            with torch.no_grad():
                for p in model.parameters():
                    p.normal_(std=scale)
        return str(dp.doctor(model, pairs, optimizer.loader(data()), optimizer))

    assert said(True) == said(False)
    assert "coupled" in said(True)


# -- fit and make_private ----------------------------------------------------------------------------------------------


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize(
    "loss",
    [tilted, pairs, lambda o, y: HINGE(o, y, reduction="sum"), lambda o, y: 4 * HINGE(o, y)],
)
def test_fit_refuses_what_the_doctor_finds_before_the_first_step(loss):
    model = linear()
    optimizer = output(model)
    with pytest.raises(PrivacyError, match=r"docs/mistakes\.md#"):
        dp.fit(model, optimizer, data(), loss, progress=False)
    assert (optimizer.steps, optimizer.finalized, len(optimizer.accountant)) == (0, False, 0)
    dp.fit(
        model, optimizer, data(), HINGE, progress=False
    )  # nothing is in the way of the sound run
    assert (optimizer.steps, optimizer.finalized) == (6, True)


def test_fit_lets_tests_repeat_the_noise():
    model = linear()
    with pytest.warns(UtilityWarning):
        optimizer = output(model, generator=torch.Generator().manual_seed(1))
    dp.fit(model, optimizer, data(), HINGE, progress=False)
    assert optimizer.finalized


def test_fit_says_how_to_get_rid_of_an_attachment():
    model = linear()
    optimizer = output(model)
    with pytest.raises(SequenceError, match=r"not attached \(dp.detach\(model\)\)"):
        dp.fit(dp.attach(model), optimizer, data(), HINGE, progress=False)
    dp.detach(model)
    dp.fit(model, optimizer, data(), HINGE, progress=False)
    assert optimizer.finalized


def test_make_private_says_that_the_optimizer_has_a_loader_of_its_own():
    model = linear()
    optimizer = output(model)
    kind = {
        "problem": HINGE.problem(bound_x=1.5, radius=2.0),
        "budget": dp.Budget(1.0, 1e-3),
        "n": N,
    }
    with pytest.raises(
        SequenceError, match=r"iterate over optimizer.loader\(dataset\), or call dp.fit\("
    ):
        dp.make_private(
            model, optimizer, DataLoader(data(), batch_size=10, shuffle=True), **kind
        )
    assert not hasattr(model, "_dpsco")
