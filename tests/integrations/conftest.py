"""Trainers of others write into the environment, where the next one takes it for that of a launcher."""

from __future__ import annotations

import os
from collections.abc import Iterator
from unittest import mock

import pytest
import torch.distributed as dist


@pytest.fixture(autouse=True)
def _environment_of_its_own() -> Iterator[None]:
    with mock.patch.dict(os.environ):
        yield
    assert not dist.is_initialized(), "a process group was left to the tests that follow"
