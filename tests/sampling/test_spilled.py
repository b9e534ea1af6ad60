"""Streams that are read once into private files: what is in them, who can see it, and a run on one."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import torch_dpsco as dp
from torch_dpsco.errors import PrivacyError, UnitError
from torch_dpsco.sampling import Spilled

N = 40


class Stream(IterableDataset[Any]):
    read = 0

    def __iter__(self) -> Iterator[Any]:
        self.read += 1
        for k in range(N):
            yield torch.full((2,), float(k)), torch.ones(1)


def test_a_stream_is_read_once_and_gives_its_records_again_and_again(tmp_path: Path) -> None:
    stream = Stream()
    data = Spilled(stream, tmp_path)
    assert (len(data), stream.read) == (N, 1)
    for k in (0, N - 1, 7, 7):
        assert data[k][0].tolist() == [k, k]
    for wrong in (-1, N):
        with pytest.raises(IndexError, match="index must be that of a record"):
            data[wrong]
    assert len(Spilled([])) == 0


def test_threads_read_side_by_side_where_files_are_read_by_seeking(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(os, "pread")  # as on Windows
    data = Spilled(Stream())
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(data.__getitem__, [k % N for k in range(50 * N)]))
    assert [row[0].tolist() for row in found] == 50 * [[k, k] for k in range(N)]


def test_nobody_finds_its_files(tmp_path: Path) -> None:
    data = Spilled(Stream(), tmp_path)
    assert os.listdir(tmp_path) == []
    assert repr(data) == "Spilled(SECRET)"
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(PrivacyError, match="must not be pickled"):
            copied(data)


class Inside(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield len(Spilled(range(3)))


def test_a_worker_spills_no_part_of_a_stream() -> None:
    with pytest.raises(UnitError, match="must be read in the main process"):
        list(DataLoader(Inside(), num_workers=1))


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("workers", [0, 1])
def test_passes_over_a_stream_hold_each_record_once(workers: int) -> None:
    """No other change of a loop: passes of secret draws, over records that came in a stream."""
    plan = dp.HolderSGD.plan(
        problem=dp.losses.Logistic().problem(bound_x=2.0), n=N, noise_multiplier=2.0, sampling="allocated",
        batch_size=10, epochs=2, adjacency="add_remove",
    )  # fmt: skip
    model = dp.attach(nn.Linear(2, 1), loss_reduction="sum")
    optimizer, stream = dp.HolderSGD(model.parameters(), plan), Stream()
    loader = optimizer.loader(Spilled(stream), num_workers=workers, isolation="none")
    for _ in range(2):
        seen = []
        for x, y in loader:
            seen += x[:, 0].tolist()
            optimizer.zero_grad()
            dp.losses.Logistic()(model(x), y, reduction="sum").backward()
            optimizer.step()
        assert sorted(seen) == list(range(N))
    assert stream.read == 1
    assert len(optimizer.accountant) == 2
