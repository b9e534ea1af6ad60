"""Random legal and illegal orders of calls; the machine that makes them is in `call_orders`.

Mutations show that it can fail: the library is broken in one place, and the machine must find that.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from opacus.optimizers import DPOptimizer
from torch import nn
from torch.utils.data import TensorDataset

import torch_dpsco as dp
from tests.contract.call_orders import CallOrders
from tests.problems import make_optimizer
from torch_dpsco.accounting.events import clipped_gaussian
from torch_dpsco.accounting.journal import Journal
from torch_dpsco.errors import PrivacyError, SequenceError
from torch_dpsco.rows import forwards
from torch_dpsco.rows.forwards import Attachment
from torch_dpsco.sampling import DrawLog
from torch_dpsco.step import oracle as clipped
from torch_dpsco.step.batch import LogicalBatch
from torch_dpsco.step.oracle import Clipped

# Momentum, Adam and another lr warn about utility.
pytestmark = pytest.mark.filterwarnings("ignore::torch_dpsco.errors.UtilityWarning")
Patch = pytest.MonkeyPatch
SETTINGS = settings(
    stateful_step_count=25, suppress_health_check=list(HealthCheck), database=None
)
HUNT = settings(
    SETTINGS,
    max_examples=300,
    derandomize=True,
    phases=[Phase.generate],
    report_multiple_bugs=False,
)


@pytest.mark.slow
def test_the_ledger_is_never_under_the_truth_in_random_orders() -> None:
    run_state_machine_as_test(CallOrders, settings=settings(SETTINGS, max_examples=25))


@pytest.mark.weekly
def test_the_ledger_is_never_under_the_truth_in_many_random_orders() -> None:
    run_state_machine_as_test(CallOrders, settings=settings(SETTINGS, max_examples=500))


# -- the machine can fail ---------------------------------------------------------------------------------------------


def nothing(*args: object, **kwargs: object) -> None:
    """What a removed call does."""


def charges_nothing(patch: Patch) -> None:
    patch.setattr(dp.Accountant, "authorize", nothing)


def charges_afterwards(patch: Patch) -> None:
    authorize, release, owed = dp.Accountant.authorize, clipped.ClippedMean.release, []

    def charge_last(self: clipped.ClippedMean, generator: torch.Generator) -> object:
        answer = release(self, generator)
        authorize(*owed.pop())
        return answer

    patch.setattr(dp.Accountant, "authorize", lambda *args, **_: owed.append(args))
    patch.setattr(clipped.ClippedMean, "release", charge_last)


def charges_for_more_noise(patch: Patch) -> None:
    patch.setattr(
        clipped.ClippedMean, "event", lambda self: clipped_gaussian(1.1 * self.noise_multiplier)
    )


def charges_forgotten_by_loading(patch: Patch) -> None:
    patch.setattr(Journal, "load", Journal.replace)


def copies_with_a_ledger_of_their_own(patch: Patch) -> None:
    patch.setattr(
        dp.Accountant,
        "__deepcopy__",
        lambda self, memo: dp.Accountant(self.budget, adjacency=self.adjacency),
    )


def keeps_a_refused_batch(patch: Patch) -> None:
    patch.setattr(clipped.ClippedMean, "discard", nothing)
    patch.setattr(LogicalBatch, "drop", nothing)


def aborts_nothing(patch: Patch) -> None:
    patch.setattr(dp.PrivateOptimizer, "_give_up", nothing)


def a_second_step_on_one_draw(patch: Patch) -> None:
    finish = LogicalBatch.finish

    def keep(self: LogicalBatch, *, used: bool = False) -> None:
        taken = self._log.taken
        finish(self, used=used)
        self._log.taken = taken

    patch.setattr(LogicalBatch, "finish", keep)


def no_discard_on_restart(patch: Patch) -> None:
    restart = DrawLog.restart

    def quiet(self: DrawLog, **options: bool) -> None:
        self.on_restart = nothing
        restart(self, **options)

    patch.setattr(DrawLog, "restart", quiet)


def joins_two_draws(patch: Patch) -> None:
    deliver = DrawLog.deliver

    def join(self: DrawLog, chunk: Any) -> None:
        self.waiting.clear()
        self.taken = None
        deliver(self, chunk)

    patch.setattr(DrawLog, "deliver", join)


def counts_no_rows(patch: Patch) -> None:
    def admit(
        self: LogicalBatch, rows: Any, *_: object, **__: object
    ) -> tuple[torch.Tensor | None, None]:
        count = 0 if rows is None else len(rows)
        return self._log.taken.records(0, count) if self.declared else None, None

    patch.setattr(LogicalBatch, "admit", admit)


def clips_nothing(patch: Patch) -> None:
    patch.setattr(clipped, "clip_weights", lambda norms, clip: torch.ones_like(norms))
    patch.setattr(clipped, "_ROUNDED", 1e9)


def keeps_raw_gradients(patch: Patch) -> None:
    def keep(self: forwards._Drop, p: Any) -> None:
        if hasattr(p, "dpsco_passes"):
            p.dpsco_passes.append(self._held().passes.number)

    patch.setattr(forwards._Drop, "__call__", keep)


def steps_at_any_time(patch: Patch) -> None:
    patch.setattr(dp.PrivateOptimizer, "_require_open", nothing)


def late_backwards(patch: Patch) -> None:
    patch.setattr(Attachment, "require_fresh", nothing)


def copies_with_rows(patch: Patch) -> None:
    patch.setattr(Attachment, "__getstate__", lambda self: self.__dict__ | {"hooked": False})


FOUND_BY = {
    charges_nothing: "not charged before",
    charges_afterwards: "not charged before",
    charges_for_more_noise: "under the truth",
    charges_forgotten_by_loading: ".",
    copies_with_a_ledger_of_their_own: ".",
    keeps_a_refused_batch: "counts twice|of another draw",  # as the next draw has a record in common or not
    aborts_nothing: ".",
    a_second_step_on_one_draw: ".",
    no_discard_on_restart: ".",
    joins_two_draws: ".",
    counts_no_rows: ".",
    clips_nothing: "counts twice",
    keeps_raw_gradients: "never released",
    steps_at_any_time: ".",
    late_backwards: ".",
    copies_with_rows: ".",
}
LONG = (late_backwards, copies_with_rows)  # hundreds of sequences
MUTATIONS = [
    pytest.param(m, id=m.__name__, marks=[pytest.mark.slow] if m in LONG else [])
    for m in FOUND_BY
]


@pytest.mark.weekly
def test_the_machine_finds_nothing_in_what_is_not_broken() -> None:
    """Else it could find that in every mutation."""
    run_state_machine_as_test(CallOrders, settings=HUNT)


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("mutate", MUTATIONS)
def test_the_machine_finds(mutate: Callable[[Patch], None], monkeypatch: Patch) -> None:
    mutate(monkeypatch)
    # a legal call that is refused is a failure of the machine as well
    failures = (AssertionError, pytest.fail.Exception, PrivacyError, ValueError)
    hunt = (
        settings(HUNT, max_examples=1000) if mutate in LONG else HUNT
    )  # it ends at the first find
    with pytest.raises(failures, match=FOUND_BY[mutate]):
        run_state_machine_as_test(CallOrders, settings=hunt)


# -- what the machine has found ---------------------------------------------------------------------------------------


def run(
    rows: str = "auto", size: int = 6
) -> tuple[nn.Linear, dp.PrivateOptimizer, TensorDataset]:
    """Returns a model whose rows are the records e_0, e_1, ..., and whose batches are all of them."""
    model = nn.Linear(size, 1, bias=False)
    nn.init.zeros_(model.weight)
    dp.attach(model, rows=rows, loss_reduction="sum")
    return model, make_optimizer(model, dp.Full(size)), TensorDataset(torch.eye(size))


def uses(model: nn.Linear) -> list[int]:
    """Returns how often each record is in the last release."""
    assert model.weight.grad is not None
    return (model.weight.grad.flatten() * model.in_features).round().int().tolist()


@pytest.mark.parametrize("rows", ["auto", "dense"])
def test_a_backward_of_an_earlier_batch_is_refused(rows: str) -> None:
    model, opt, data = run(rows)
    chunks = iter(opt.loader(data, steps=2).in_parts(3))
    loss = model(next(chunks)[0]).sum()
    loss.backward(retain_graph=True)
    opt.step()  # adds a part of the draw
    next(chunks)
    with pytest.raises(SequenceError, match="a backward must follow"):
        loss.backward()  # its records would be in the release twice
    assert len(opt.accountant) == 0


@pytest.mark.parametrize("rows", ["auto", "dense"])
def test_a_backward_of_a_batch_that_was_given_up_is_refused(rows: str) -> None:
    model, opt, data = run(rows)
    loader = opt.loader(data, steps=2)
    loss = model(next(iter(loader))[0]).sum()
    opt.discard()
    (x,) = next(iter(loader))
    model(x)
    with pytest.raises(SequenceError, match="a backward must follow"):
        loss.backward()
    model(x).sum().backward()
    opt.step()
    assert uses(model) == [1] * 6


@pytest.mark.parametrize("rows", ["auto", "dense"])
def test_a_copy_keeps_no_raw_gradient_of_a_backward_in_eval_mode(rows: str) -> None:
    model = copy.deepcopy(run(rows)[0]).eval()
    with pytest.raises(SequenceError, match=r"in eval mode|in training mode"):
        model(torch.eye(6)).sum().backward()
    assert model.weight.grad is None


def test_a_backward_in_eval_mode_never_joins_a_forward_that_waits() -> None:
    model, opt, data = run("dense")
    (x,) = next(iter(opt.loader(data)))
    model(x[:3])
    model.eval()
    loss = model(2.0 * x[3:]).sum()
    model.train()
    with pytest.raises(SequenceError, match="in training mode"):
        loss.backward()
    with pytest.raises(SequenceError, match="missing"):
        opt.step()


def test_a_copy_of_a_partly_frozen_model_trains() -> None:
    model = dp.attach(nn.Linear(6, 1), loss_reduction="sum")
    model.bias.requires_grad_(False)
    copied = copy.deepcopy(model)
    copied(torch.eye(6)).sum().backward()
    assert copied.weight.grad is None


def test_a_step_inside_of_nested_released_blocks_is_refused() -> None:
    model, opt, data = run()
    model(next(iter(opt.loader(data)))[0]).sum().backward()
    with opt.released():
        with opt.released():
            pass
        with pytest.raises(SequenceError, match="released"):
            opt.step()
    assert len(opt.accountant) == 0
    opt.step()


def test_a_mean_left_by_an_earlier_step_is_no_loss_term() -> None:
    model, opt, data = run("dense")
    for k, (x,) in enumerate(
        opt.loader(data, steps=2)
    ):  # no zero_grad: the first two backwards are not compared
        for part in (x[:3], x[3:]) if k == 0 else (x,):
            model(part).sum().backward()
        opt.step()
    assert opt.steps == 2


@pytest.mark.parametrize("average", ["uniform", "weighted"])
def test_a_parameter_that_is_unfrozen_later_joins_the_average(average: str) -> None:
    model = dp.attach(nn.Linear(6, 1), loss_reduction="sum")
    oracle, rule = Clipped(1.0, 0.0, 6), dp.rules.SGD(average)
    opt = dp.PrivateOptimizer(
        model.parameters(), 1.0, oracle=oracle, rule=rule, design=dp.Full(6)
    )
    start = model.bias.item()
    for k, (x,) in enumerate(opt.loader(TensorDataset(torch.eye(6)), steps=2)):
        model.bias.requires_grad_(k > 0)
        model(x).sum().backward()
        opt.step()
    assert model.bias.item() != start
    with opt.released():  # averages are of the iterates before their updates
        assert model.bias.item() == start


def test_a_refused_opacus_wrapper_leaves_no_sum_of_rows() -> None:
    model, opt, data = run("dense")
    model(next(iter(opt.loader(data)))[0]).sum().backward()
    wrapper = DPOptimizer(
        opt, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=6, loss_reduction="sum"
    )
    with pytest.raises(SequenceError, match="Opacus"):
        wrapper.step()
    assert model.weight.grad is None
    assert model.weight.summed_grad is None


def test_an_optimizer_that_cannot_be_built_does_not_forget_a_wrapper() -> None:
    model, opt, _ = run()
    DPOptimizer(
        opt, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=6, loss_reduction="sum"
    )
    with pytest.raises(ValueError, match="batch_size"):
        dp.PrivateOptimizer(
            model.parameters(),
            1.0,
            oracle=Clipped(1.0, 1.0, 5),
            rule=dp.rules.SGD(),
            design=dp.Full(6),
        )
    with pytest.raises(SequenceError, match="Opacus"):
        opt.step()
