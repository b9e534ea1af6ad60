"""The pilot: norms only, one draw of exact law, nothing moves; then rows are clipped at what it chose."""

from __future__ import annotations

import copy
import itertools
import math

import numpy as np
import pytest
import torch

import torch_dpsco as dp
from tests.algorithms.test_exponential import assert_keeps_epsilon
from torch_dpsco.accounting.events import ADJACENCIES, Pure, clipped_gaussian
from torch_dpsco.algorithms import clips as module
from torch_dpsco.algorithms.clips import PilotClipped, QuantilePilot
from torch_dpsco.algorithms.mechanisms import geometric_grid, quantile_law
from torch_dpsco.errors import AdjacencyError, SequenceError, UtilityWarning
from torch_dpsco.rows import DenseBlock, FactoredBlock, GradBatch
from torch_dpsco.step.oracle import Phased

LENGTHS = [0.0, 1e-45, 1e-20, 1e-4, 1.0, 50.0, 1e19, 3e38, math.inf, -math.inf, math.nan]


def batch(lengths: list[float], dim: int = 1) -> GradBatch:
    return GradBatch(
        [DenseBlock(torch.tensor(lengths)[:, None].expand(-1, dim) / math.sqrt(dim))]
    )


def ran(
    pilot: QuantilePilot, *batches: GradBatch, query: torch.Tensor | None = None
) -> dp.oracles.Release:
    pilot.open([torch.zeros(1) if query is None else query])
    for rows in batches:
        pilot.observe(rows)
    return pilot.release(torch.Generator().manual_seed(0))


def law_of(monkeypatch, pilot: QuantilePilot, rows: GradBatch) -> np.ndarray:
    """Returns the law from which a fresh pilot draws."""
    laws = []

    def draw(*arguments):
        laws.append(quantile_law(*arguments[:-1]))
        return 1e-4 * 2**0.25

    with monkeypatch.context() as patch:
        patch.setattr(module, "draw_quantile", draw)
        ran(copy.deepcopy(pilot), rows)
    return laws[0]


@pytest.mark.parametrize("dim", [1, 300])
@pytest.mark.parametrize("epsilon", [0.2, 3.0])
def test_no_replaced_row_breaks_epsilon(monkeypatch, epsilon, dim):
    common = [0.1, 1.0, 3.0, 1e30, math.nan] * 8
    pilot = QuantilePilot(41, epsilon, quantile=0.7)
    laws = [law_of(monkeypatch, pilot, batch([length, *common], dim)) for length in LENGTHS]
    for first, second in itertools.combinations(laws, 2):
        assert_keeps_epsilon(first, second, epsilon)
    assert not all(np.array_equal(laws[0], law) for law in laws)


@pytest.mark.parametrize("epsilon", [0.2, 3.0])
def test_no_row_more_breaks_epsilon(monkeypatch, epsilon):
    common = [0.1, 1.0, 3.0, 1e30, math.nan] * 8
    pilot = QuantilePilot(41, epsilon, quantile=0.7)
    without = law_of(monkeypatch, pilot, batch(common))
    laws = [law_of(monkeypatch, pilot, batch([length, *common])) for length in LENGTHS]
    for law in laws:
        assert_keeps_epsilon(law, without, epsilon)
    assert not all(np.array_equal(without, law) for law in laws)


def test_a_row_without_a_norm_counts_as_above(monkeypatch):
    pilot = QuantilePilot(3, 1.0)
    laws = [
        law_of(monkeypatch, pilot, batch([1.0, 2.0, bad]))
        for bad in (math.inf, math.nan, -math.inf, 3e38)
    ]
    assert all(np.array_equal(laws[0], law) for law in laws)
    assert np.array_equal(
        laws[0], quantile_law([1.0001, 2.0001, math.inf], geometric_grid(1e-4, 1e4), 0.9, 1.0, 3)
    )


def test_the_rank_is_that_of_the_announced_size(monkeypatch):
    pilot, grid = QuantilePilot(100, 1.0, quantile=0.5), geometric_grid(1e-4, 1e4)
    assert np.array_equal(
        law_of(monkeypatch, pilot, batch([1.1])), quantile_law([1.1], grid, 0.5, 1.0, 100)
    )


def test_the_release_moves_nothing():
    for dtype, expected in ((torch.float64, torch.float64), (torch.bfloat16, torch.float32)):
        release = ran(QuantilePilot(4, 1.0), batch([5.0] * 4), query=torch.ones(1, dtype=dtype))
        assert release.still
        assert not release.halted
        assert [mean.tolist() for mean in release.mean] == [[0.0]]
        assert release.mean[0].dtype == expected


def test_only_norms_enter_the_release(monkeypatch):
    drawn = []
    monkeypatch.setattr(
        module, "draw_quantile", lambda *arguments: drawn.append(arguments[0].tolist()) or 1.0
    )
    acts = torch.tensor([[3.0, 4.0], [0.6, 0.8]])
    pilot = QuantilePilot(6, 1.0)
    dense = GradBatch([DenseBlock(torch.tensor([[5.0, 0.0]])), DenseBlock(torch.tensor([12.0]))])
    ran(pilot, dense, GradBatch([FactoredBlock(acts, torch.ones(2, 1), bias=False)]))
    assert drawn == [pytest.approx([13.0, 5.0, 1.0], rel=3e-4)]
    assert all(norm >= true for norm, true in zip(drawn[0], [13.0, 5.0, 1.0], strict=True))
    assert pilot._norms == []


def test_the_chosen_clip_is_near_the_quantile():
    generator = torch.Generator().manual_seed(1)
    lengths = torch.empty(2000).exponential_(generator=generator)
    for quantile in (0.5, 0.9):
        pilot = QuantilePilot(2000, 1.0, quantile=quantile)
        ran(pilot, *(batch(part.tolist()) for part in lengths.split(300)))
        assert abs(float((lengths <= pilot.chosen).double().mean()) - quantile) < 0.08


def test_the_event_is_pure_under_every_adjacency():
    pilot = QuantilePilot(10, 0.7)
    assert pilot.event() == Pure(0.7, ADJACENCIES)
    assert all(pilot.sensitivity(adjacency) == 0.0 for adjacency in ADJACENCIES)


def test_an_end_of_the_grid_warns_by_the_output_alone():
    with pytest.warns(UtilityWarning, match="c_max is probably wrong"):
        ran(QuantilePilot(400, 5.0, c_max=2.0), batch(torch.linspace(0.1, 50, 400).tolist()))
    pilot = QuantilePilot(400, 5.0, c_min=1.0)
    with pytest.warns(UtilityWarning, match="c_min is probably wrong"):
        ran(pilot, batch([*[1e-3] * 362, *torch.linspace(1.05, 1.18, 38).tolist()]))
    assert pilot.chosen == 1.0


def test_discarded_rows_are_in_no_draw(monkeypatch):
    monkeypatch.setattr(module, "draw_quantile", lambda *arguments: float(len(arguments[0])))
    pilot = QuantilePilot(4, 1.0)
    for forget in (pilot.discard, lambda: pilot.open([torch.zeros(1)])):
        pilot.open([torch.zeros(1)])
        pilot.observe(batch([1.0, 2.0]))
        forget()
    pilot.open([torch.zeros(1)])
    pilot.observe(batch([1.0]))
    pilot.release(torch.Generator())
    assert pilot.chosen == 1.0


def test_calls_out_of_order_are_refused():
    pilot = QuantilePilot(2, 1.0)
    for call in (
        lambda: pilot.observe(batch([1.0])),
        lambda: pilot.release(torch.Generator()),
        lambda: pilot.chosen,
    ):
        with pytest.raises(SequenceError):
            call()
    ran(pilot, batch([1.0, 2.0]))
    with pytest.raises(SequenceError, match="has released"):
        pilot.open([torch.zeros(1)])


def test_rows_are_clipped_at_what_the_pilot_chose():
    pilot = QuantilePilot(100, 5.0, quantile=0.5)
    later = PilotClipped(pilot, 1.5, 2)
    with pytest.raises(SequenceError, match="its step comes first"):
        later.open([torch.zeros(1)])
    ran(pilot, batch(torch.linspace(1, 9, 100).tolist()))
    later.open([torch.zeros(1)])
    assert later.clip == pilot.chosen
    assert later.noise_std == pytest.approx(1.5 * pilot.chosen / 2, rel=1e-3)
    assert later.event().sigma == 1.5
    assert later.settings()["pilot"] == pilot.settings()
    assert pilot.metrics() == {"clip": pilot.chosen}


def test_a_run_with_a_pilot_moves_nothing_in_its_step_and_costs_the_larger_group():
    model = torch.nn.Linear(2, 1)
    before = [p.detach().clone() for p in model.parameters()]
    pilot = QuantilePilot(200, 1.0, quantile=0.5)
    design = dp.Parts(((dp.Full(200), 1), (dp.Disjoint(100, 400), 4)), n=600)
    opt = dp.PrivateOptimizer(
        dp.attach(model).parameters(),
        0.1,
        oracle=Phased([(pilot, 1), (PilotClipped(pilot, 4.0, 100), 4)]),
        rule=dp.rules.SGD(),
        design=design,
        adjacency="replace_one",
    )
    generator = torch.Generator().manual_seed(8)
    data = torch.utils.data.TensorDataset(
        torch.randn(600, 2, generator=generator), torch.ones(600, 1)
    )
    for x, y in opt.loader(data):
        opt.zero_grad()
        (model(x) - y).square().mean().backward()
        opt.step()
        still = all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
        assert still is (opt.steps == 1)
        assert opt.metrics["clip"] == pilot.chosen
    assert opt.steps == 5
    assert opt.accountant.get_epsilon(1e-9) == pytest.approx(
        max(
            1.0,
            dp.Accountant()
            .ledger.evaluate(1e-9, "replace_one", extra=clipped_gaussian(4.0))
            .epsilon,
        ),
        rel=1e-6,
    )
    assert opt.accountant.get_epsilon(1e-2) == pytest.approx(1.0, rel=0.1)
    with pytest.raises(AdjacencyError):
        opt.accountant.get_epsilon(1e-5, adjacency="add_remove")


def test_state_goes_round():
    pilot, twin = QuantilePilot(100, 5.0), QuantilePilot(100, 5.0)
    assert pilot.state() == {"chosen": None}
    assert pilot.metrics() == {}
    ran(pilot, batch(torch.linspace(1, 9, 100).tolist()))
    twin.restore(pilot.state())
    assert twin.chosen == pilot.chosen
    twin.restore({"chosen": None})
    assert not twin.released
    with pytest.raises(ValueError, match="chosen must be on the grid"):
        twin.restore({"chosen": 1.0 + 1e-9})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 0}, "batch_size must be"),
        ({"epsilon": 0.0}, "epsilon must be > 0"),
        ({"epsilon": 1e-8}, "epsilon must be > .* on a grid of 107 points"),
        ({"quantile": -0.1}, "quantile must be in"),
        ({"c_min": 0.0}, "c_min must be > 0"),
        ({"c_max": 1e-5}, "c_max must be >"),
    ],
)
def test_wrong_numbers_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        QuantilePilot(**({"batch_size": 10, "epsilon": 1.0} | changes))
