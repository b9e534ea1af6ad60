"""Short ways to a diagnosis, for one mistake at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import torch_dpsco as dp
from tests.doctor.scripts import DIM, Parts, private, regression_data
from tests.doctor.scripts import with_opacus as opacus
from torch_dpsco.diagnosis import Diagnosis, Finding

RECORD = (torch.zeros(DIM), torch.zeros(1))


def find(diagnosis: Diagnosis, name: str) -> Finding:
    found = [finding for finding in diagnosis.findings if finding.name == name]
    assert len(found) == 1, str(diagnosis)
    return found[0]


def names(diagnosis: Diagnosis) -> list[str]:
    return [finding.name for finding in diagnosis.findings]


def ours(
    model: nn.Module, loss: Any = F.mse_loss, data: Any = None, **attached: Any
) -> Diagnosis:
    optimizer, loader = private(model, regression_data() if data is None else data)
    return dp.doctor(dp.attach(model, **attached), loss, loader, optimizer)


def theirs(
    model: nn.Module, loss: Any = F.mse_loss, data: Any = None, **keywords: Any
) -> Diagnosis:
    wrapped, optimizer, loader = opacus(
        model, regression_data() if data is None else data, **keywords
    )
    return dp.doctor(wrapped, loss, loader, optimizer)


def plain(model: nn.Module, loss: Any = F.mse_loss, record: Any = RECORD) -> Diagnosis:
    return dp.doctor(model, loss, None, None, record=record)


def ghost(model: nn.Module, criterion: Any, around: Any = None, **keywords: Any) -> Diagnosis:
    wrapped, optimizer, private_loss, loader = opacus(
        model, regression_data(), criterion=criterion, grad_sample_mode="ghost", **keywords
    )
    loss = private_loss if around is None else around(private_loss)
    return dp.doctor(model if wrapped is None else wrapped, loss, loader, optimizer)


def diagnose(parts: Parts, **changed: Any) -> Diagnosis:
    parts = parts._replace(**changed)
    return dp.doctor(*parts[:4], scaler=parts.scaler)
