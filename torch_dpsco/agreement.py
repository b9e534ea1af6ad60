"""What the ranks of a run tell each other: one call of torch.distributed for each thing, compared before it is used.

Every rank makes the same calls in the same order. Each comparison starts with the name of the call, so that ranks at
different places of a script find out instead of taking one message for another.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

from torch_dpsco.errors import SequenceError

_READ_ROWS = 1024  # of a data set in memory are compared over the ranks, at equal distances

# what is compared in each collective call, and what to do where it differs
_CALLS: dict[str, dict[str, str]] = {
    "construction": {
        "settings": "make the optimizer with the same arguments on every rank",
        "parameters": "build the model after the same torch.manual_seed on every rank, or load the same weights",
        "ledger": "give every rank a new Accountant with the same arguments, rank 0 alone one with a ledger file",
    },
    "loader": {
        "steps": "give the same steps= on every rank",
        "data": "give every rank the whole data set, its records in the same order",
    },
    "step": {
        "settings": "make the optimizer with the same arguments on every rank",
        "steps": "call optimizer.step() for every batch on every rank, and load a checkpoint on all of them",
        "draw": "iterate over the loader and call optimizer.discard() in the same way on every rank",
        "charges": "charge nothing on some ranks only",
        "mechanism": "set lr in the same way on every rank, and write to the parameters on all of them or none",
    },
    "finalize": {
        "settings": "make the optimizer with the same arguments on every rank",
        "steps": "make the same steps on every rank",
        "parameters": "write to the parameters on all ranks or none",
        "ledger": "charge nothing on some ranks only",
    },
}
_WIDTH = 2 + max(map(len, _CALLS.values()))

_AVAILABLE = dist.is_available()  # a property of the build of torch


def world_size() -> int:
    """Returns the number of processes of the default process group, 1 without one."""
    return dist.get_world_size() if _AVAILABLE and dist.is_initialized() else 1


class Group:
    """The default process group, seen from one of its ranks.

    Args:
        device: of the parameters.

    Raises:
        SequenceError: the group cannot send tensors of that device, nor of the CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.rank, self.processes = dist.get_rank(), dist.get_world_size()
        self.first = self.rank == 0
        self.device = _device_of_messages(device)

    def compare(self, call: str, problem: str = "", **values: int) -> None:
        """Raises SequenceError, on all ranks, unless all make this call, are ready for it and give the same values.

        Args:
            call: its name, see `_CALLS`.
            problem: why this rank is not ready, if it is not.
            values: 64-bit integers, by the names in `_CALLS`.
        """
        table = self.exchange(call, ready=not problem, values=[values[name] for name in _CALLS[call]])
        if problem:
            raise SequenceError(problem)
        names = list(_CALLS)
        for rank, row in enumerate(table):
            if names[row[0]] != call:
                raise SequenceError(
                    f"all ranks must make the same calls in the same order (rank {rank} is in a {names[row[0]]}, rank "
                    f"{self.rank} in a {call}): run the same script on every rank"
                )
        for rank, row in enumerate(table):
            if not row[1]:
                raise SequenceError(f"rank {rank} has given this {call} up, so that no rank makes it: see its error")
        for place, (name, advice) in enumerate(_CALLS[call].items(), start=2):
            others = [rank for rank, row in enumerate(table) if row[place] != table[0][place]]
            if others:
                raise SequenceError(f"{name} must be equal on all ranks (rank {others[0]} differs from 0): {advice}")

    def exchange(self, call: str, *, ready: bool, values: Sequence[int] = ()) -> list[list[int]]:
        """Returns what each rank says: the number of the call, whether it is ready, and the values to compare."""
        said = [list(_CALLS).index(call), int(ready), *values]
        message = torch.tensor(said + [0] * (_WIDTH - len(said)), dtype=torch.int64, device=self.device)
        table = [torch.empty_like(message) for _ in range(self.processes)]
        self._call(dist.all_gather, table, message)
        return [row.tolist() for row in table]

    def send(self, message: Tensor) -> None:
        """Overwrites a message by that of rank 0."""
        self._call(dist.broadcast, message, src=0)

    def send_object(self, thing: Any) -> Any:
        """Returns the thing of rank 0."""
        things = [thing]
        self._call(dist.broadcast_object_list, things, src=0, device=self.device)
        return things[0]

    def add_up(self, message: Tensor) -> None:
        """Leaves the sum of the messages of all ranks on rank 0, and nothing of use on the others."""
        self._call(dist.reduce, message, dst=0)

    def _call(self, function: Callable[..., Any], *args: Any, **options: Any) -> None:
        if world_size() != self.processes:
            raise SequenceError(f"the process group must be that of the optimizer, of {self.processes} ranks")
        try:
            function(*args, **options)
        except RuntimeError as error:
            raise SequenceError(f"the other ranks cannot be reached, one may have ended or failed: {error}") from error


def _device_of_messages(device: torch.device) -> torch.device:
    backends = dict(part.split(":") for part in str(dist.get_backend_config()).split(","))
    if device.type != "cpu" and backends.get(device.type, "gloo") != "gloo":
        return device
    if "cpu" not in backends or backends["cpu"] == "nccl":
        raise SequenceError(f"the process group must have a backend for {device.type} tensors, e.g. gloo")
    return torch.device("cpu")


def digest(*things: Any) -> int:
    """Returns 64 bits of the SHA-256 of bytes, and of other things as they print, as a signed integer."""
    found = hashlib.sha256()
    for thing in things:
        content = thing if isinstance(thing, bytes) else repr(thing).encode()
        found.update(len(content).to_bytes(8, "little") + content)
    return int.from_bytes(found.digest()[:8], "little", signed=True)


def read_bytes(tensor: Tensor) -> bytes:
    """Returns the numbers of a tensor, bit by bit."""
    flat = tensor.detach().cpu().reshape(-1).clone()  # one number after the other
    numbers: bytes = flat.view(torch.uint8).numpy().tobytes()
    return numbers


def sight(dataset: Dataset[Any]) -> Iterator[Any]:
    """Yields what shows the order of records without reading many: rows in memory, positions of a Subset, the size."""
    yield type(dataset).__name__
    yield len(dataset)  # type: ignore[arg-type]
    if isinstance(dataset, Subset):
        yield np.asarray(dataset.indices).tobytes()
        yield from sight(dataset.dataset)
    elif isinstance(dataset, TensorDataset):
        for tensor in dataset.tensors:
            yield tensor.shape
            yield read_bytes(tensor[:: max(1, len(tensor) // _READ_ROWS)])
