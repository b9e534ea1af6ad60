"""Every test starts with random streams as the operating system seeds them: a small seed is a finding."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _seeded_as_by_the_system():
    state = torch.get_rng_state()
    torch.manual_seed(2**40 + 1)
    yield
    torch.set_rng_state(state)
