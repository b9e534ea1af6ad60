"""What the doctor says of the bits of rows: how many there are, and what is beside them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import torch_dpsco as dp
from tests.problems import make_optimizer
from torch_dpsco.accounting.designs import Design, Fixed, Poisson
from torch_dpsco.accounting.events import ADJACENCIES
from torch_dpsco.diagnosis import Diagnosis
from torch_dpsco.trial import LOOKED_AT, Isolation, isolation

DATA = TensorDataset(torch.ones(32, 3), torch.ones(32, 2))


class Moved(nn.Module):
    """Numbers whose last bits depend on something else than their record."""

    forwards = 0  # of the class, since the doctor puts back what objects hold

    def __init__(self, by: str) -> None:
        super().__init__()
        self.by = by

    def forward(self, x: Tensor) -> Tensor:
        Moved.forwards += 1
        bits = {
            "nothing": torch.zeros(len(x)),
            "size": torch.full((len(x),), float(len(x) % 2)),
            "place": torch.arange(len(x)) % 2,
            "company": (x.detach() - x.detach()[:1]).abs().sum() % 1.0 + torch.zeros(len(x)),
        }[self.by]
        return x * (1.0 + 2.0**-20 * bits[:, None])


def diagnosed(
    by: str, adjacency: str = "add_remove", design: Design | None = None, **loader: object
) -> tuple[Diagnosis, dp.PrivateOptimizer]:
    torch.manual_seed(2**40 + 1)
    model = dp.attach(nn.Sequential(nn.Linear(3, 2), Moved(by)), loss_reduction="sum")
    optimizer = make_optimizer(model, design or Poisson(8, 32), adjacency=adjacency, noise=1.0)
    return dp.doctor(
        model, nn.MSELoss(reduction="sum"), optimizer.loader(DATA, **loader), optimizer
    ), optimizer


def isolation_names(diagnosis: Diagnosis) -> list[str]:
    names = {"rows-not-isolated", "batches-not-filled-up"}
    return [finding.name for finding in diagnosis.findings if finding.name in names]


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("by", ["nothing", "size", "place"])
def test_what_filled_batches_take_care_of_is_no_finding(by):
    assert isolation_names(diagnosed(by)[0]) == []


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("adjacency", ADJACENCIES)
def test_rows_that_depend_on_the_number_of_rows_need_filled_batches(adjacency):
    diagnosis, _ = diagnosed("size", adjacency, isolation="none")
    assert isolation_names(diagnosis) == ["batches-not-filled-up"]
    assert diagnosis.findings[0].severity == "warning"
    if adjacency == "replace_one":  # all draws are of one size
        assert (
            isolation_names(diagnosed("size", adjacency, Fixed(8, 32), isolation="none")[0])
            == []
        )


@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
def test_rows_that_depend_on_others_to_the_last_bit_are_found(adjacency):
    assert isolation_names(diagnosed("company", adjacency)[0]) == ["rows-not-isolated"]


def test_the_report_quotes_what_was_found():
    _, optimizer = diagnosed("size")
    text = " ".join(str(optimizer.report(1e-5)).split())
    rows = min(256, optimizer._isolation.slots.block)
    assert (
        f"batches of {optimizer._isolation.slots.block} rows, to which all are filled up" in text
    )
    assert (
        f"it holds for made-up records in batches of {rows} rows; bits depend on the number of rows"
        in text
    )
    _, optimizer = diagnosed("company")
    assert "it does NOT hold for made-up records" in " ".join(
        str(optimizer.report(1e-5)).split()
    )


def test_a_report_says_what_was_not_checked_and_what_was_not_filled_up():
    optimizer = make_optimizer(
        dp.attach(nn.Linear(3, 2)), Poisson(8, 32), adjacency="add_remove", noise=1.0
    )
    optimizer.loader(DATA, isolation="none")
    text = " ".join(str(optimizer.report(1e-5)).split())
    assert "Batches are not filled up to a public size" in text
    assert "it was not checked" in text


def test_random_models_are_said_to_be_unknown():
    assert "could not be checked" in str(Isolation(8))
    model = dp.attach(nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5)), loss_reduction="sum")
    optimizer = make_optimizer(model, Poisson(8, 32), adjacency="add_remove", noise=1.0)
    diagnosis = dp.doctor(model, nn.MSELoss(reduction="sum"), optimizer.loader(DATA), optimizer)
    assert isolation_names(diagnosis) == []
    assert "since the model is random" in " ".join(str(optimizer.report(1e-5)).split())


@pytest.mark.parametrize("rows", [2, 3, 8, 20])
@pytest.mark.parametrize(
    ("by", "found"),
    [("nothing", (0, 0)), ("size", (1, 0)), ("place", (0, 0)), ("company", (0, 1))],
)
def test_bits_are_told_apart_by_what_moves_them(by, found, rows):
    def row(records: list[int], other: bool) -> Tensor:
        places = range(0, min(LOOKED_AT, len(records)), 2)
        moved = {"nothing": 0, "size": len(records), "company": sum(k**3 for k in records) % 101}
        return torch.tensor([[1.0 + 2.0**-20 * moved.get(by, place)] for place in places])

    seen = isolation(row, rows)
    size, company = found
    assert bool(seen.company) == bool(company)
    if by != "company":
        assert seen.size == bool(size)
