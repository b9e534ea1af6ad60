"""Outputs of one batch are no inputs of a later one, whatever carries them: the loop, or the model itself."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import TensorDataset

import torch_dpsco as dp
from tests.problems import make_optimizer
from torch_dpsco.accounting.designs import Undeclared
from torch_dpsco.errors import PrivacyError
from torch_dpsco.rows import carried
from torch_dpsco.rows.attach import first_step_of

B, DIM = 8, 4
State = Any


class Cell(nn.Module):
    """A recurrent cell; `inputs` and `outputs` say in which form its state comes and goes."""

    def __init__(
        self,
        inputs: Callable[[State], Any] = lambda s: s,
        outputs: Callable[[Tensor], Any] = lambda s: s,
    ):
        super().__init__()
        self.cell, self.head = nn.Linear(3 + DIM, DIM), nn.Linear(DIM, 1)
        self.inputs, self.outputs = inputs, outputs

    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        state = x.new_zeros(len(x), DIM) if state is None else self.inputs(state)
        state = torch.tanh(self.cell(torch.cat([x, state], 1)))
        return self.head(state), self.outputs(state)


class Loop:
    """Steps of an optimizer without noise and without a declared sampling, batch by batch."""

    def __init__(self, model: nn.Module | None = None, **attached: Any) -> None:
        torch.manual_seed(0)
        self.model = dp.attach(Cell() if model is None else model, **attached)
        self.opt = make_optimizer(self.model, Undeclared(B))

    def step(self, x: Tensor, state: Any = None, weight: float | Tensor = 1.0) -> Any:
        self.opt.zero_grad()
        out, state = self.model(x, state)
        (weight * functional.softplus(out)).mean().backward()
        self.opt.step()
        return state


def batch(k: int) -> Tensor:
    return torch.randn(B, 3, generator=torch.Generator().manual_seed(k))


def detached(state: Tensor) -> Tensor:
    return state.detach()


IN_MEMORY: dict[str, Callable[[Tensor], Any]] = {
    "detached": detached,
    "still in its graph": lambda s: s,
    "a view": lambda s: s.detach().view(2, -1)[:, :16].reshape(B, DIM),
    "transposed": lambda s: s.detach().T,
    "changed in place": lambda s: s.detach().mul_(0.5),
}
COPIES: dict[str, Callable[[Tensor], Any]] = {
    "a clone": lambda s: s.detach().clone(),
    "in another precision and back": lambda s: s.detach().double().float(),
    "copied into a tensor of the loop": lambda s: torch.zeros(B, DIM).copy_(s.detach()),
    "through numpy": lambda s: torch.from_numpy(s.detach().numpy().copy()),
    "through python": lambda s: torch.tensor(s.tolist()),
    "reshaped": lambda s: s.detach().reshape(2, -1).clone().reshape(B, DIM),
}


@pytest.mark.parametrize("name", IN_MEMORY)
def test_state_that_a_loop_carries_is_refused(name: str) -> None:
    loop = Loop(Cell(inputs=lambda s: s.T if s.shape[0] == DIM else s))
    state = IN_MEMORY[name](loop.step(batch(0)))
    with pytest.raises(PrivacyError, match=r"earlier batch.*same memory.*fresh state"):
        loop.step(batch(1), state)
    assert loop.opt.steps == 1
    assert len(loop.opt.accountant) == 1
    loop.opt.discard()
    loop.step(batch(1))
    assert loop.opt.steps == 2


@pytest.mark.parametrize("name", COPIES)
def test_copies_of_state_that_a_loop_carries_are_refused(name: str) -> None:
    loop = Loop()
    state = COPIES[name](loop.step(batch(0)))
    with pytest.raises(PrivacyError, match=r"earlier batch.*a copy of one"):
        loop.step(batch(1), state)


def test_a_record_moves_no_batch_that_it_is_not_in(monkeypatch: pytest.MonkeyPatch) -> None:
    def later_sum(first: float) -> Tensor:
        """Returns the clipped sum of a batch after one whose record 0 has weight 0, so that it moves nothing there."""
        loop, x, weight = Loop(), batch(0), torch.ones(B, 1)
        x[0], weight[0] = first, 0.0
        state = loop.step(x, weight=weight)
        before = [p.detach().clone() for p in loop.model.parameters()]
        loop.step(batch(1), detached(state))
        return B * torch.cat(
            [
                (b - p.detach()).flatten()
                for b, p in zip(before, loop.model.parameters(), strict=True)
            ]
        )

    with pytest.raises(PrivacyError):
        later_sum(50.0)
    monkeypatch.setattr(
        dp.rows.carried.CarriedState,
        "begin",
        lambda self, args, kwargs, leaves_rows: ([], args, kwargs),
    )
    assert (
        float((later_sum(50.0) - later_sum(-50.0)).norm()) > 1.0
    )  # clips; its charge covers none


FORMS: dict[str, tuple[Callable[[Any], Tensor], Callable[[Tensor], Any]]] = {
    "in a dictionary": (lambda s: s["h"], lambda s: {"h": s.detach()}),
    "in lists": (lambda s: s[0][1], lambda s: [(1, s.detach())]),
    "in an object": (lambda s: s.h, lambda s: SimpleNamespace(h=s.detach())),
    "as integers": (lambda s: s / 100, lambda s: (100 * s.detach()).long()),
    "packed": (lambda s: s.data.view(B, DIM), lambda s: pack_sequence(list(s.detach()))),
}


@pytest.mark.parametrize("form", FORMS)
def test_state_is_found_in_all_forms(form: str) -> None:
    loop = Loop(Cell(*FORMS[form]))
    state = loop.step(batch(0))
    with pytest.raises(PrivacyError, match="earlier batch"):
        loop.step(batch(1), state)


def writers() -> tuple[Loop, Loop]:
    """Loops whose models write their state to an input, and append it to one."""

    def overwrite(state: Tensor) -> Tensor:
        kept.append(state)
        return state.clone()

    def grow(cache: list[Tensor]) -> Tensor:
        caches.append(cache)
        return cache[-1]

    kept: list[Tensor] = []
    caches: list[list[Tensor]] = []
    loop = Loop(
        Cell(inputs=overwrite, outputs=lambda s: kept[-1].copy_(s.detach())),
        check_first_step=False,
    )
    grown = Loop(
        Cell(inputs=grow, outputs=lambda s: caches[-1].append(s.detach())),
        check_first_step=False,
    )
    return loop, grown


def test_what_a_forward_writes_to_its_inputs_does_not_reach_the_loop() -> None:
    """They are copies: of tensors, and of the lists that hold them."""
    loop, grown = writers()
    buffer = torch.randn(B, DIM)
    cache, before = [buffer], buffer.clone()
    for k in range(2):
        loop.step(batch(k), buffer)
        grown.step(batch(k), cache)
    assert torch.equal(buffer, before)
    assert cache == [buffer]


def test_state_that_a_forward_writes_to_a_copied_input_and_gives_back_is_refused() -> None:
    loop, _ = writers()
    state = loop.step(batch(0), torch.randn(B, DIM))
    with pytest.raises(PrivacyError, match="same memory"):
        loop.step(batch(1), state)
    with pytest.raises(PrivacyError, match="a copy of one"):
        loop.step(batch(1), state.clone())


def test_state_that_a_forward_writes_to_inputs_that_are_not_copied_is_refused() -> None:
    """Those in objects of the loop's own kind, and those of a forward without gradients."""
    loop, grown = writers()
    loop.model.inputs, overwrite = (lambda s: overwrite(s.tensor)), loop.model.inputs
    held = SimpleNamespace(tensor=torch.randn(B, DIM))
    loop.step(batch(0), held)
    with pytest.raises(PrivacyError, match="a copy of one"):
        loop.step(batch(1), held)
    held.tensor.copy_(
        torch.randn(B, DIM)
    )  # a buffer of the loop that is filled again is no state
    loop.step(batch(1), held)

    grown.model.inputs, grow = (lambda s: grow(s.cache)), grown.model.inputs
    held = SimpleNamespace(cache=[torch.randn(B, DIM)])
    grown.step(batch(0), held)
    with pytest.raises(PrivacyError, match="same memory"):
        grown.step(batch(1), held)

    loop, _ = writers()
    buffer = torch.randn(B, DIM)
    with torch.no_grad():
        loop.model(batch(0), buffer)
    loop.step(batch(1), torch.randn(B, DIM))
    with pytest.raises(PrivacyError, match="a copy of one"):
        loop.step(batch(2), buffer)


@pytest.mark.parametrize("rows", ["auto", "dense"])
def test_state_is_not_carried_between_the_parts_of_a_draw(rows: str) -> None:
    def train() -> None:
        state = None
        for x, _ in opt.loader(data, physical_batch_size=16):
            out, state = model(x, state)
            out.mean().backward()
            opt.step()
            state = state.detach()

    model = dp.attach(Cell(), rows=rows)
    plan = dp.ClippedSGD.plan(
        clip=1.0, noise_multiplier=1.0, n=64, batch_size=64, sampling="full", steps=2, lr=0.1
    )
    opt, data = (
        dp.ClippedSGD(model.parameters(), plan),
        TensorDataset(torch.randn(64, 3), torch.zeros(64)),
    )
    with pytest.raises(PrivacyError, match="earlier batch"):
        train()
    opt.discard()
    (x, _) = next(iter(opt.loader(data)))
    out, state = model(x[:32])  # a part that the loop makes; one step takes the rows of all
    out.mean().backward()
    with pytest.raises(PrivacyError, match="earlier batch"):
        model(x[32:], state.detach())


def test_state_of_a_forward_after_a_step_is_of_its_batch() -> None:
    def train() -> None:
        state = None
        for x, _ in opt.loader(TensorDataset(torch.randn(64, 3), torch.zeros(64))):
            out, _ = model(x, state)
            out.mean().backward()
            opt.step()
            with torch.no_grad():
                _, state = model(x)

    model = dp.attach(Cell())
    plan = dp.ClippedSGD.plan(
        clip=1.0, noise_multiplier=1.0, n=64, batch_size=B, steps=3, lr=0.1
    )
    opt = dp.ClippedSGD(model.parameters(), plan)
    with pytest.raises(PrivacyError, match="earlier batch"):
        train()
    assert opt.steps == 1


def test_state_is_not_carried_from_one_model_to_another() -> None:
    first, second = dp.attach(nn.Linear(3, DIM)), dp.attach(nn.Linear(DIM, DIM))
    opt = make_optimizer(nn.ModuleList([first, second]), Undeclared(B))
    state = first(batch(0))
    second(state).square().mean().backward()
    opt.step()
    with pytest.raises(PrivacyError, match="earlier batch"):
        second(state.detach())


# -- what is no state --------------------------------------------------------------------------------------------------


FRESH: dict[str, Callable[[Tensor], Any]] = {
    "none": lambda s: None,
    "zeros": torch.zeros_like,
    "ones": torch.ones_like,
    "public noise": lambda s: torch.randn(B, DIM),
    "a mask": lambda s: (s.detach() > 0).float(),
}


@pytest.mark.parametrize("name", FRESH)
def test_a_state_that_is_reset_is_not_refused(name: str) -> None:
    loop, state = Loop(), torch.zeros(B, DIM)
    for k in range(4):
        state = FRESH[name](loop.step(batch(k), state))
    assert loop.opt.steps == 4


def test_an_output_that_is_the_constant_of_a_fresh_state_ends_no_run() -> None:
    def dead(s: Tensor) -> Tensor:
        return torch.relu(s - 2.0)  # zeros, which records have decided

    loop = Loop(Cell(outputs=dead))
    for k in range(3):
        loop.step(batch(k), torch.zeros(B, DIM))
    assert loop.opt.steps == 3


def test_memory_that_is_used_again_is_no_state() -> None:
    loop, places, seen = Loop(), set(), 0
    for _ in range(200):
        x = torch.randn(B, 3)
        state = torch.randn(B, DIM)
        seen += state.data_ptr() in places
        places.add(loop.step(x, state).data_ptr())
        del x, state
        if seen:
            break
    assert seen


def test_forwards_of_one_batch_may_use_each_other() -> None:
    loop = Loop()
    for k in range(3):
        with torch.no_grad():  # self-conditioning
            _, guess = loop.model(batch(k))
        loop.step(batch(k), guess)
    for k in range(3):
        _, guess = loop.model(batch(k))  # whose backward never runs
        loop.step(batch(k), guess.detach())
    assert loop.opt.steps == 6


def test_evaluation_is_no_training() -> None:
    loop = Loop()
    loop.model.eval()
    with torch.no_grad():
        _, prototypes = loop.model(torch.ones(B, 3))  # of public data
    loop.model.train()
    for k in range(3):
        state = loop.step(batch(k), prototypes)
        loop.model.eval()
        with torch.no_grad():
            loop.model(batch(k + 9), state.detach())
        loop.model.train()
    assert loop.opt.steps == 3


@pytest.mark.parametrize("same", [lambda s: s, lambda s: s.clone()])
def test_what_a_forward_gives_back_as_it_came_is_no_output(
    same: Callable[[Tensor], Tensor],
) -> None:
    kept: list[Tensor] = []
    cell = Cell(inputs=lambda s: kept.append(s) or s, outputs=lambda _: same(kept[-1]))
    loop, x, places = Loop(cell, check_first_step=False), torch.randn(B, 3), torch.rand(B, DIM)
    for _ in range(3):  # all records in each step, say
        given = loop.step(x, places)
    assert loop.opt.steps == 3
    if given is kept[-1]:
        loop.step(x, given)
        assert loop.opt.steps == 4


def test_parameters_may_be_inputs() -> None:
    weight = torch.empty(0)
    loop = Loop(
        Cell(inputs=lambda s: s[:, :DIM].repeat(2, 1), outputs=lambda s: weight.detach())
    )
    weight = loop.model.cell.weight
    for k in range(3):
        loop.step(batch(k), weight.detach())
    assert loop.opt.steps == 3


def test_a_generator_beside_its_critic_is_not_refused() -> None:
    torch.manual_seed(0)
    makes, critic = nn.Linear(2, 3), dp.attach(nn.Linear(3, 1))
    opt, plain = (
        make_optimizer(critic, Undeclared(2 * B)),
        torch.optim.SGD(makes.parameters(), lr=0.1),
    )
    for k in range(3):
        fake = makes(torch.randn(B, 2))
        opt.zero_grad()
        functional.softplus(critic(torch.cat([batch(k), fake.detach()]))).mean().backward()
        opt.step()
        judge = dp.detach(copy.deepcopy(critic))
        plain.zero_grad()
        judge(fake).mean().backward()
        plain.step()
    assert opt.steps == 3


def test_a_file_of_a_model_holds_no_outputs() -> None:
    loop = Loop()
    state = loop.step(batch(0))
    del state
    assert loop.model._dpsco.carried._kept
    loop.model.inputs = loop.model.outputs = torch.Tensor.clone  # which pickle knows
    for twin in (copy.deepcopy(loop.model), pickle.loads(pickle.dumps(loop.model))):
        assert not twin._dpsco.carried._kept


def test_little_is_kept_of_outputs() -> None:
    loop = Loop()
    for k in range(40):
        loop.step(batch(k))
    kept = loop.model._dpsco.carried._kept
    assert len(kept) <= 16
    assert all(len(numbers) <= 8 * 64 for *_, numbers in kept)


# -- what a model keeps ------------------------------------------------------------------------------------------------


class Keeper(nn.Module):
    """A cell that keeps its state by itself."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.cell, self.calls = how, nn.Linear(3 + DIM, DIM), 0
        self.state: Tensor | None = None
        self.bank: list[Tensor] = []
        self.fixed, self.box = torch.zeros(B, DIM), SimpleNamespace(state=None)

    def forward(self, x: Tensor) -> Tensor:
        kept = {
            "attribute": self.state,
            "list": (self.bank or [None])[-1],
            "in place": self.fixed,
        }
        state = kept.get(self.how, self.box.state if self.how == "object" else None)
        state = x.new_zeros(len(x), DIM) if state is None else state
        out = torch.tanh(self.cell(torch.cat([x, state], 1)))
        self.calls += 1
        self._keep(out.detach())
        return out * (1 + self.calls if self.how == "counter" else 1)

    def _keep(self, state: Tensor) -> None:
        if self.how in ("attribute", "only looked at"):
            self.state = state
        elif self.how == "list":
            self.bank.append(state)
        elif self.how == "in place":
            self.fixed.copy_(state)
        elif self.how == "object":
            self.box.state = state


@pytest.mark.parametrize("how", ["attribute", "list", "in place", "object"])
@pytest.mark.parametrize("rows", ["auto", "dense"])
def test_a_model_that_remembers_batches_is_found_at_the_first_step(how: str, rows: str) -> None:
    model = dp.attach(Keeper(how), rows=rows)
    opt = make_optimizer(model, Undeclared(B))
    for _ in range(2):
        with pytest.raises(PrivacyError, match=r"must not remember earlier batches.*look at"):
            model(batch(0)).mean().backward()
    assert not len(opt.accountant)


@pytest.mark.parametrize("how", ["only looked at", "counter", "none"])
def test_a_model_may_keep_what_no_later_batch_uses(how: str) -> None:
    model = dp.attach(Keeper(how))
    out = model(batch(0))
    assert first_step_of(model).verdicts["model"].startswith("checked")
    assert model.calls == 1
    if how == "only looked at":
        torch.testing.assert_close(model.state, out.as_subclass(Tensor).detach())


def test_the_doctor_finds_a_loss_that_carries_state() -> None:
    def loss(model: nn.Module, record: dict[str, Tensor]) -> Tensor:
        out, state = model(record["x"], states[-1])
        states.append(state.detach())
        return out.mean()

    states: list[Any] = [None]
    diagnosis = dp.doctor(dp.attach(Cell()), loss, None, None, record={"x": torch.zeros(3)})
    assert next((f.name, f.severity) for f in diagnosis.findings) == ("not-probed", "error")


def test_tensors_are_found_at_any_depth_of_containers_that_may_hold_themselves() -> None:
    """Else an input that is no tensor of the loader would pass where it lies deep enough."""
    deep: Any = torch.ones(3)
    for k in range(20):
        deep = {"inner": [deep]} if k % 2 else (deep,)
    ring: list[Any] = [deep]
    ring.append(ring)
    assert [tuple(t.shape) for t, _, _ in carried._tensors(ring)] == [(3,)]
