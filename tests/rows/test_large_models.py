"""Large models of which little is trained: draws in a public number of batches, no copies of frozen weights, memory."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import torch_dpsco as dp
from tests.memory import peak
from tests.problems import make_optimizer
from torch_dpsco import trial
from torch_dpsco.accounting.designs import Poisson
from torch_dpsco.errors import PrivacyError, UtilityWarning
from torch_dpsco.sampling import Slots
from torch_dpsco.sampling import loader as loaders
from torch_dpsco.sampling.loader import Isolation, Sizes, torch_settings
from torch_dpsco.trial import Refused, Untouched, attempt, fingerprint

N = 256
B = 16
MOST = 20  # rows of a batch of a draw of 16: a quarter more

quiet = pytest.mark.filterwarnings("ignore:a draw for a large model")


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every model counts as a large one."""
    monkeypatch.setattr(loaders, "_LARGE", 0)


class Place(nn.Module):
    """Adds a number times the place of a record."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 1e-5 * torch.arange(len(x))[:, None]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 16))


def records(n: int = N) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(n, 20, generator=generator), torch.randint(0, 16, (n,), generator=generator)
    )


def looped(
    model: nn.Module, steps: int, batch: int = B, **options: object
) -> tuple[dp.PrivateOptimizer, loaders.PrivateLoader, list[list[int]]]:
    """Returns the optimizer and loader of a loop, and the sizes of the batches of each of its draws."""
    dp.attach(model)
    optimizer = make_optimizer(model, Poisson(batch, N), noise=1.0, adjacency="add_remove")
    loader = optimizer.loader(records(), steps=steps, **options)
    return optimizer, loader, list(draws(model, optimizer, loader))


def draws(
    model: nn.Module, optimizer: dp.PrivateOptimizer, loader: loaders.PrivateLoader
) -> Iterator[list[int]]:
    sizes: list[int] = []
    for x, y in loader:
        sizes.append(len(x))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        before = optimizer.steps
        optimizer.step()
        if optimizer.steps > before:
            yield sizes
            sizes = []


# -- draws in parts ---------------------------------------------------------------------------------------------------


# of one record on average a draw is often empty
@pytest.mark.parametrize("batch", [pytest.param(1, marks=pytest.mark.slow), B])
def test_draws_of_a_large_model_come_in_a_public_number_of_batches(
    large: None, batch: int
) -> None:
    with pytest.warns(UtilityWarning, match=r"move schedules by optimizer\.steps"):
        optimizer, loader, seen = looped(net(), steps=24, batch=batch)
    assert loader.isolation.level == "rounded"
    assert optimizer.steps == len(seen) == 24
    blocks = -(-loader.slots.capacity // loader.slots.block)
    assert seen[0] == [loader.slots.block] * blocks
    assert {len(sizes) for sizes in seen[1:]} == {2}
    assert max(map(max, seen)) <= max(8, batch + batch // 4 + 2)


@quiet
def test_a_model_that_keeps_slots_has_as_many_blocks_in_every_draw(large: None) -> None:
    model = nn.Sequential(net(), Place())
    _, loader, seen = looped(model, steps=6)
    assert loader.isolation.level == "slots"
    assert all(
        sizes == [loader.slots.block] * loader.slots.parts and len(sizes) > 1 for sizes in seen
    )


def test_the_blocks_of_a_draw_hold_each_record_in_the_slot_of_its_place(large: None) -> None:
    slots = Slots(Poisson(B, 4096))
    slots.part()
    assert slots.block <= MOST
    for units in (0, 1, 2, B, slots.capacity - 1, slots.capacity):
        places = slots.places(units)
        blocks = slots.of_records(places)
        assert len(blocks) == slots.parts == -(-slots.capacity // slots.block)
        held = np.concatenate([part for part, _ in blocks])
        assert sorted(held) == list(range(units))
        for part, found in blocks:
            assert np.array_equal(found, places[part] % slots.block)
            assert len(set(found)) == len(found)
    # records past the capacity take more blocks
    assert len(slots.of_records(slots.places(2 * slots.capacity + 1))) > slots.parts


@pytest.mark.parametrize("batch", [3, 6, 7, 9, 10, B, 64, 256])
def test_two_batches_have_room_for_what_one_had(batch: int) -> None:
    """Else as many as 1 draw in 1,000 of small batches come in three."""
    slots = Slots(Poisson(batch, 4096))
    one = slots.most
    slots.part()
    assert 2 * slots.most >= one
    assert slots.block <= slots.most <= max(13, batch + batch // 4)
    again = slots.most, slots.block, slots.parts
    slots.part()
    assert (slots.most, slots.block, slots.parts) == again


@pytest.mark.parametrize("largest", [12, MOST])
def test_as_many_batches_hold_draws_of_any_number_of_rows(largest: int) -> None:
    slots = Slots(Poisson(B, 4096))
    slots.part()
    isolation = Isolation(slots=slots)
    isolation.tested = Sizes([8, 12, 16, 20][: 2 if largest == 12 else 4], torch_settings(), 700)
    for rows in range(2 * largest + 1):
        found = isolation.rounded(rows)
        assert found is not None
        assert len(found) == 2
        parts = [part for part, _, _ in found]
        assert [parts[0].start, parts[0].stop, parts[1].stop] == [0, parts[1].start, rows]
        assert all(part.stop - part.start == own.stop <= size for part, own, size in found)
    assert len(isolation.rounded(2 * largest + 1) or ()) == 3  # that no draw of this law has


@pytest.mark.parametrize("own", ["size", "slots", "users"])
def test_who_asks_for_something_else_has_it(large: None, own: str) -> None:
    options = {"size": {"physical_batch_size": 80}, "slots": {"isolation": "slots"}}.get(own, {})
    if own == "users":
        slots = Slots(Poisson(B, 4096), of_users=True)
        block = slots.block
        slots.part()
        assert (slots.block, slots.parts) == (block, 1)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("error", UtilityWarning)
        _, loader, seen = looped(net(), steps=3, **options)
    assert [len(sizes) for sizes in seen] == [1, 1, 1]
    assert loader.slots.parts == 1


def test_small_models_come_in_one_batch_a_draw() -> None:
    _, loader, seen = looped(net(), steps=3)
    assert [len(sizes) for sizes in seen] == [1, 1, 1]
    assert loader.slots.block == loader.slots.capacity


@quiet
def test_another_loader_of_a_large_model_knows_what_was_found(large: None) -> None:
    model = net()
    dp.attach(model)
    optimizer = make_optimizer(model, Poisson(B, N), noise=1.0, adjacency="add_remove")
    list(draws(model, optimizer, optimizer.loader(records(), steps=2)))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UtilityWarning)
        loader = optimizer.loader(records(), steps=2)
        assert loader.isolation.level == "rounded"
        assert [len(sizes) for sizes in draws(model, optimizer, loader)] == [2, 2]


def test_make_private_and_fit_have_parts_too(large: None) -> None:
    model = net()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    plain = torch.utils.data.DataLoader(records(), batch_size=B, shuffle=True)
    budget = dp.Budget(2.0, 1e-5, adjacency="add_remove")
    _, _, loader = dp.make_private(model, sgd, plain, budget=budget, n=N, verbose=False)
    assert loader.slots.parts > 1
    model = net()
    plan = dp.ClippedSGD.plan(
        lr=0.1,
        clip=1.0,
        noise_multiplier=1.0,
        n=N,
        batch_size=B,
        steps=2,
        adjacency="add_remove",
    )
    optimizer = dp.ClippedSGD(model.parameters(), plan)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UtilityWarning)  # nothing of yours counts batches there
        dp.fit(model, optimizer, records(), nn.CrossEntropyLoss(), progress=False)
    assert optimizer.steps == 2
    assert optimizer._isolation.slots.parts > 1
    assert optimizer._isolation.tested.sizes[-1] <= MOST


class Kink(nn.Module):
    """Passes on what an exact 0 becomes by the number of rows: all of it in blocks of 16 and more, nothing in fewer."""

    def forward(self, x: Tensor) -> Tensor:
        return x + (1e-7 if len(x) >= B else -1e-7)


@quiet
@pytest.mark.parametrize("parted", [True, False])
def test_a_record_more_moves_the_sum_of_a_kinked_net_by_one_clip_in_parts(
    monkeypatch: pytest.MonkeyPatch, parted: bool
) -> None:
    """Without filling up the same records are moved by many clips."""
    monkeypatch.setattr(loaders, "_LARGE", 0 if parted else 2**60)
    moved = []
    for size in (B - 1, B):
        model = nn.Sequential(nn.Linear(4, 1, bias=False), Kink(), nn.ReLU(), nn.Linear(1, 1))
        nn.init.zeros_(model[0].weight)
        nn.init.constant_(model[3].weight, 100.0)
        dp.attach(model, loss_reduction="sum")
        optimizer = make_optimizer(model, Poisson(B, B), adjacency="add_remove")
        before = torch.cat([p.detach().flatten().double() for p in model.parameters()])
        options = {} if parted else {"isolation": "none"}
        for (x,) in optimizer.loader(TensorDataset(torch.ones(size, 4)), steps=1, **options):
            model(x).sum().backward()
            optimizer.step()
        after = torch.cat([p.detach().flatten().double() for p in model.parameters()])
        moved.append(B * (before - after))
    gap = float(torch.linalg.vector_norm(moved[1] - moved[0]))
    assert gap <= 1.01 if parted else gap > 10.0


# -- what the first step keeps ----------------------------------------------------------------------------------------


def test_an_exception_that_is_kept_holds_no_tensors() -> None:
    held = []

    def fails() -> None:
        graph = torch.ones(3, requires_grad=True) * 2.0
        held.append(weakref.ref(graph))
        raise ValueError("records")

    found = attempt("a pass", fails)
    assert isinstance(found, Refused)
    assert found.error.__traceback__ is not None  # where it was raised
    assert held[0]() is None


class Writes(nn.Module):
    """Writes to a frozen weight, past what torch counts, once it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(20, 20).requires_grad_(False)
        self.head = nn.Linear(20, 16)
        self.writes = False

    def forward(self, x: Tensor) -> Tensor:
        if self.writes and bool((x > 0.2).all()):  # only made-up records are so
            self.frozen.weight.data[3, 4] += 1e-3
        return self.head(self.frozen(x))


def test_large_frozen_weights_that_made_up_records_change_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trial, "_LARGE", 50)
    model = Writes()
    model.writes = True
    with pytest.raises(PrivacyError, match="must not change frozen weights"):
        looped(model, steps=1)
    monkeypatch.undo()
    model = Writes()
    model.writes = True
    before = model.frozen.weight.detach().clone()
    looped(model, steps=1)
    assert torch.equal(model.frozen.weight, before)  # small ones are put back


@pytest.mark.parametrize("way", ["exchanged", "written"])
def test_a_large_frozen_weight_that_a_forward_changes_is_told_of(
    monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setattr(trial, "_LARGE", 50)
    model = Writes()
    state = Untouched(model)
    assert state.changed() == []
    if way == "exchanged":  # by memory of its own, which is put back
        model.frozen.weight = nn.Parameter(model.frozen.weight + 1.0, requires_grad=False)
    else:
        model.frozen.weight.data.neg_()
    assert state.changed() == ["Linear.weight"]


def test_of_large_frozen_weights_no_copy_is_made() -> None:
    model = nn.Sequential(nn.Linear(1000, 2000).requires_grad_(False), nn.Linear(2000, 10))
    weight = 4 * 2_000_000  # bytes
    assert peak(lambda: Untouched(model).restore()) < 0.6 * weight
    model.requires_grad_(True)
    assert peak(lambda: Untouched(model).restore()) > weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_fingerprints_tell_values_apart(dtype: torch.dtype) -> None:
    t = torch.zeros(3, 7).to(dtype)
    same = fingerprint(t)
    assert same == fingerprint(t.clone()) == fingerprint(t.T.contiguous().T)  # columns in memory
    t[2, 5] = 1
    assert fingerprint(t) != same
    assert fingerprint(t.to_sparse()) != fingerprint(torch.zeros(3, 7).to(dtype).to_sparse())
    assert fingerprint(t.to_sparse()) == fingerprint(t.clone().to_sparse())
    nan = torch.full((2,), torch.nan)
    assert fingerprint(nan) == fingerprint(nan.clone())


class Fixed(nn.Module):
    """Multiplies by a constant of another kind than rows of numbers."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        same = torch.eye(20)
        self.register_buffer(
            "by", same.to_sparse() if kind == "sparse" else same.cfloat().conj()
        )

    def forward(self, x: Tensor) -> Tensor:
        return (self.by @ x.T.to(self.by.dtype)).T.abs()


@pytest.mark.parametrize("kind", ["sparse", "conjugate"])
def test_buffers_that_are_no_plain_numbers_are_compared_too(kind: str) -> None:
    model = nn.Sequential(Fixed(kind), net())
    optimizer, _, _ = looped(model, steps=2)
    assert optimizer.steps == 2
    before = fingerprint(model[0].by)
    with torch.no_grad():
        (model[0].by._values() if kind == "sparse" else model[0].by).mul_(2.0)
    assert fingerprint(model[0].by) != before


# -- memory -----------------------------------------------------------------------------------------------------------


class Deep(nn.Module):
    """A frozen stack whose activations are most of the memory, of which little is trained."""

    def __init__(self, *, last: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(16))
        self.adapters = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 2, bias=False), nn.Linear(2, 64, bias=False))
            for _ in range(2)
        )
        self.head = nn.Linear(64, 16)
        self.layers.requires_grad_(False)
        self.adapters.requires_grad_(not last)

    def forward(self, x: Tensor) -> Tensor:
        h = x[:, :, None].expand(-1, -1, 64)
        for adapter in self.adapters:
            h = h + adapter(h)
        for layer in self.layers:
            h = torch.relu(layer(h)) * 1.1 + h
        return self.head(h.mean(1))


@pytest.mark.parametrize("last", [False, True], ids=["adapters", "last layer"])
@quiet
def test_steps_of_a_large_model_take_the_memory_of_plain_ones(
    monkeypatch: pytest.MonkeyPatch, last: bool
) -> None:
    """With rows, noise, and the tests of the first step; without the model, which would hide half of it."""
    monkeypatch.setattr(loaders, "_LARGE", 0)
    monkeypatch.setattr(trial, "_LARGE", 1000)
    x, y = records().tensors

    def plain() -> None:
        model = Deep(last=last)
        for _ in range(3):
            nn.functional.cross_entropy(model(x[:B]), y[:B]).backward()

    usual = peak(plain)
    private = peak(lambda: looped(Deep(last=last), steps=3))
    assert private <= 1.4 * usual
