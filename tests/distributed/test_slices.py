"""The noise of a release in slices: what each rank draws, by which key, and what is left where one of them fails."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from multiprocessing import set_forkserver_preload
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing import start_processes
from torch.utils.data import TensorDataset

import torch_dpsco as dp
from tests.processes import (
    SECONDS,
    backward,
    full,
    launch,
    layer,
    message,
    numbers,
    released_by_one,
    run_rank,
)
from torch_dpsco.errors import PrivacyError, SequenceError
from torch_dpsco.noise import SliceStream, Stream
from torch_dpsco.step.distributed import Group
from torch_dpsco.step.oracle import Clipped, ClippedMean

INPUTS = 200_000  # and a bias: a slice for each of two or three ranks
RECORDS = 4
KINDS = {
    "float32": {"dtype": torch.float32},
    "float64": {"dtype": torch.float64},
    "exact": {"dtype": torch.float32, "secure": "exact"},
}

# -- what the ranks do ------------------------------------------------------------------------------------------------


def built(
    dtype: torch.dtype = torch.float32, inputs: int = INPUTS, **options: Any
) -> tuple[nn.Module, dp.ClippedSGD, TensorDataset]:
    x = torch.randn(RECORDS, inputs, generator=torch.Generator().manual_seed(1)).to(dtype)
    model = layer(inputs=inputs, dtype=dtype)
    return model, full(model, RECORDS, noise=1.0, **options), TensorDataset(x, x[:, :1])


class Watched:
    """Notes what the ranks say, what this one noises, which keys it held, and how many bytes it drew."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.keys: list[Tensor] = []
        self.memory: list[Tensor] = []
        self.said: list[tuple[str, int, str]] = []
        self.sums: list[Tensor] = []
        self.drawn = 0
        call, send, read, noised = Group._call, Group.send, SliceStream.read, ClippedMean.noised
        made = SliceStream.__init__

        def calling(group: Group, function: Callable[..., Any], *args: Any, **rest: Any) -> None:
            part = args[-1]
            self.said.append((function.__name__, part.numel(), str(part.dtype)[6:]))
            call(group, function, *args, **rest)

        def sending(group: Group, said: Tensor, of: int = 0) -> None:
            send(group, said, of)
            if said.dtype is torch.uint8:
                self.keys.append(said.clone())

        def reading(bits: SliceStream, size: int) -> bytes:
            self.drawn += size
            return read(bits, size)

        def noising(oracle: ClippedMean, part: Tensor, bits: Any) -> Tensor:
            self.sums.append(part.clone())
            return noised(oracle, part, bits)

        def making(bits: SliceStream, rank: int) -> None:
            made(bits, rank)
            self.memory.append(bits.key)

        patch.setattr(Group, "send", sending)
        patch.setattr(SliceStream, "read", reading)
        patch.setattr(SliceStream, "__init__", making)
        patch.setattr(ClippedMean, "noised", noising)
        patch.setattr(Group, "_call", calling)


def slices(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, kind in KINDS.items():
        model, optimizer, data = built(**kind)
        loader = optimizer.loader(data, steps=2)
        released = []
        with pytest.MonkeyPatch.context() as patch:
            seen = Watched(patch)
            for features, target in loader:
                backward(model, optimizer, features, target)
                optimizer.step()
                released.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        found[name] = {
            "keys": seen.keys,
            "left": any(bool(memory.any()) for memory in seen.memory),
            "held": len(seen.memory),
            "said": seen.said,
            "sums": seen.sums,
            "drawn": seen.drawn,
            "released": released,
        }
    return found | {"small": small(rank)}


def small(rank: int) -> tuple[int, list[tuple[str, int, str]]]:
    """A vector that is not worth cutting: rank 0 draws all of it."""
    with pytest.MonkeyPatch.context() as patch:
        model, optimizer, data = built(inputs=60_000)
        loader = optimizer.loader(data, steps=1)
        seen = Watched(patch)
        for features, target in loader:
            backward(model, optimizer, features, target)
            optimizer.step()
        return seen.drawn, seen.said


FAULTS = ("noise of rank 1", "key", "half of the key", "charge of rank 1", "rows")


def spoil(name: str, rank: int, optimizer: dp.ClippedSGD, patch: pytest.MonkeyPatch) -> None:
    """Makes a part of the step fail on one rank."""

    def refuse(*args: Any, **options: Any) -> Any:
        raise SequenceError(f"no {name}")

    class Broken(Stream):
        def read(self, size: int) -> bytes:
            return refuse()

    class Half(Broken):
        def fill(self, memory: memoryview) -> None:
            memory[:16] = bytes(range(16))
            refuse()

    if name == "key":
        optimizer._noise = Broken()  # which only rank 0 asks
    elif name == "half of the key":
        optimizer._noise = Half()
    elif name == "rows" and not rank:
        patch.setattr(Clipped, "require_rows", lambda self, rows: rows <= 4 or refuse())
        patch.setattr(Clipped, "write_sum", lambda self, out: 5)
    elif name == "noise of rank 1" and rank == 1:
        patch.setattr(ClippedMean, "noised", refuse)
    elif name == "charge of rank 1" and rank == 1:
        patch.setattr(optimizer.accountant, "authorize", refuse)


def failing(rank: int, folder: str) -> dict[str, Any]:
    warnings.filterwarnings("ignore", ".*was charged and did not end")
    found = {}
    for name in FAULTS:
        path = Path(f"{folder}/{name}")
        accountant = dp.Accountant(ledger_path=path if rank == 0 else None)
        model, optimizer, data = built(accountant=accountant)
        before = numbers(model)
        ((features, target),) = optimizer.loader(data, steps=1)
        backward(model, optimizer, features, target)
        with pytest.MonkeyPatch.context() as patch:
            seen = Watched(patch)
            spoil(name, rank, optimizer, patch)
            said = message((SequenceError, PrivacyError), optimizer.step)
        found[name] = {
            "said": said,
            "charged": len(accountant),
            "moved": not torch.equal(before, numbers(model)),
            "noised": len(seen.sums),
            "left": any(bool(memory.any()) for memory in seen.memory),
            "keys": seen.keys,
            "grads": [p.grad is None or not p.grad.any() for p in model.parameters()],
        }
        accountant.close()
        if rank == 0:
            again = dp.Accountant(ledger_path=path)
            found[name]["filed"] = len(again)
            again.close()
    return found


def dying(rank: int, folder: str) -> dict[str, Any]:
    """Rank 1 ends while it draws its slice: charged everywhere, its slice awaited by the others."""
    path = Path(f"{folder}/spent")
    accountant = dp.Accountant(ledger_path=path if rank == 0 else None)
    model, optimizer, data = built(accountant=accountant)
    before = numbers(model)
    ((features, target),) = optimizer.loader(data, steps=1)
    backward(model, optimizer, features, target)
    if rank == 1:
        SliceStream.read = lambda self, size: os._exit(0)  # type: ignore[method-assign]
    warnings.filterwarnings("ignore", ".*was charged and did not end")
    said = message(SequenceError, optimizer.step)
    charged = len(accountant)
    accountant.close()
    filed = len(dp.Accountant(ledger_path=path)) if rank == 0 else charged
    return {
        "said": said,
        "charged": charged,
        "filed": filed,
        "moved": not torch.equal(before, numbers(model)),
    }


# -- slices -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[2, 3], ids=["two", "three"])
def cut(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    return launch(slices, request.param, tmp_path_factory.mktemp("slices"))


@pytest.mark.parametrize("kind", KINDS)
def test_slices_of_all_ranks_are_what_one_process_draws_by_the_key(
    kind: str, cut: list[dict[str, Any]]
) -> None:
    """Bit by bit, in each step and on each rank."""
    _, optimizer, _ = built(**KINDS[kind])
    oracle = optimizer.oracle
    oracle.share(len(cut))
    for k in range(2):
        oracle.open([torch.zeros(1, INPUTS, dtype=KINDS[kind]["dtype"]), torch.zeros(1)])
        total = torch.cat([rank[kind]["sums"][k] for rank in cut])[2:]
        assert len(total) == INPUTS + 1
        key = Given(cut[0][kind]["keys"][k])
        one = released_by_one(oracle, total, RECORDS, key, len(cut)).mean
        expected = torch.cat([part.flatten() for part in one])
        assert not torch.equal(expected.double(), total)  # there is noise
        for rank in cut:
            assert torch.equal(rank[kind]["released"][k], expected)


class Given(Stream):
    """Gives one key."""

    def __init__(self, key: Tensor) -> None:
        self.key = key

    def read(self, size: int) -> bytes:
        assert size == 32
        return bytes(self.key.tolist())


@pytest.mark.parametrize("kind", ["float32", "float64"])
def test_each_rank_draws_its_own_slice_and_no_more(kind: str, cut: list[dict[str, Any]]) -> None:
    width = -(-(INPUTS + 3) // len(cut))
    size = {"float32": 6, "float64": 8}[kind]  # bytes of a number
    for rank in cut:
        numbers_drawn = [len(part) for part in rank[kind]["sums"]]
        assert width - 3 <= numbers_drawn[0] == numbers_drawn[1] <= width
        most = sum(numbers_drawn) * size
        assert most - 8 <= rank[kind]["drawn"] <= 1.001 * most + 24 * 20  # edges: 24 bytes each


@pytest.mark.parametrize("kind", KINDS)
def test_a_key_serves_one_release_and_is_left_nowhere(
    kind: str, cut: list[dict[str, Any]]
) -> None:
    keys = [tuple(key.tolist()) for rank in cut for key in rank[kind]["keys"]]
    assert keys == keys[:2] * len(cut)  # the same on all ranks
    assert keys[0] != keys[1]
    assert all(len(set(key)) > 8 for key in keys)
    assert [(rank[kind]["held"], rank[kind]["left"]) for rank in cut] == [(2, False)] * len(cut)


def test_a_step_adds_each_number_up_once_and_sends_it_once(cut: list[dict[str, Any]]) -> None:
    """In float64 on the way to a sum, in the precision of the release on the way back: 12 bytes a number, once 16."""
    for rank in cut:
        for kind, real in (("float32", "float32"), ("float64", "float64"), ("exact", "float32")):
            said = rank[kind]["said"]
            assert len(said) == 2 * (1 + 2 * len(cut) + 1)
            total = {}
            for name, count, dtype in said:
                total[name, dtype] = total.get((name, dtype), 0) + count
            assert total.pop(("all_gather", "int64")) < 30
            assert total == {
                ("reduce", "float64"): 2 * (INPUTS + 3),
                ("broadcast", "uint8"): 2 * 32,
                ("broadcast", real): 2 * (INPUTS + 3),
            }


def test_how_many_rows_there_are_is_told_to_nobody_but_rank_0(cut: list[dict[str, Any]]) -> None:
    """Whose noise on the mean would hide no number of rows."""
    for kind in KINDS:
        assert all(part[:2].tolist() == [0.0, 0.0] for part in cut[0][kind]["sums"])


def test_small_vectors_are_not_cut(cut: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(cut):
        drawn, said = found["small"]
        assert (drawn > 0) == (rank == 0)
        assert [name for name, *_ in said] == ["all_gather", "reduce", "broadcast", "broadcast"]


# -- failures ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("failing")
    return launch(failing, 2, folder, str(folder))


@pytest.mark.parametrize("name", FAULTS)
def test_a_rank_that_fails_after_the_charge_leaves_it_charged_and_nothing_released(
    name: str, failed: list[dict[str, Any]]
) -> None:
    at = {"noise of rank 1": 1, "charge of rank 1": 1}.get(name, 0)
    for rank, found in enumerate(failed):
        told = f"no {name}" if rank == at else "a rank could not charge or release this step"
        assert told in found[name]["said"]
        assert not found[name]["moved"]
        assert all(found[name]["grads"])
        assert not found[name]["left"]
        assert found[name]["charged"] == int((rank, name) != (1, "charge of rank 1"))
    assert failed[0][name]["filed"] == 1


@pytest.mark.parametrize("name", ["key", "half of the key", "charge of rank 1", "rows"])
def test_without_a_key_of_rank_0_nobody_draws(name: str, failed: list[dict[str, Any]]) -> None:
    for rank in failed:
        assert rank[name]["keys"][0].tolist() == [0] * 32
        assert rank[name]["noised"] == 0


@pytest.mark.slow
def test_a_rank_that_dies_while_it_draws_leaves_the_ledger_at_the_truth(tmp_path: Path) -> None:
    set_forkserver_preload(["torch_dpsco", "pytest", "scipy.stats"])
    running = start_processes(
        run_rank,
        (dying, 3, str(tmp_path), (str(tmp_path),)),
        nprocs=3,
        join=False,
        start_method="forkserver",
    )
    for process in running.processes:
        process.join(SECONDS)
        assert process.exitcode == 0
    for rank in (0, 2):
        found = torch.load(tmp_path / str(rank))
        assert "the other ranks cannot be reached" in found["said"]
        assert (found["charged"], found["filed"], found["moved"]) == (1, 1, False)
