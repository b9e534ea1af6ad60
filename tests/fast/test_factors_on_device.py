"""Sequences, patches and embeddings by the kernels for CUDA: certified, each record rounded by itself, in one order.

Without a device the kernels run on the CPU, under the interpreter of Triton (tests/conftest.py).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import torch_dpsco as dp
from tests.rows.test_no_waits import Watch
from tests.streams import seeded
from torch_dpsco import native
from torch_dpsco.fast import rows_on_device
from torch_dpsco.fast.rows_on_device import Sequences, Vectors
from torch_dpsco.rows import FLOAT64, Block, GradBatch, ItemBlock, SequenceBlock, plan_summation
from torch_dpsco.rows.blocks import CANCELLATION, from_kernel
from torch_dpsco.rows.first_step import waiting_blocks
from torch_dpsco.rows.layers.kinds import coalesced
from torch_dpsco.step.oracle import Clipped, clip_weights

pytest.importorskip("triton", "3.8", "kernels were tried with triton 3.8")
DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
U = 2.0**-24
PLANNED = plan_summation(64, 100_000, in_c=True)


def switch(patch: pytest.MonkeyPatch, *, on: bool = True) -> None:
    """Has rows of the device of these tests read by the kernels, or by torch, and none in C."""
    patch.setattr(native, "_found", lambda: (None, "off"))
    patch.setattr(native, "DEVICES", (DEVICE.type,) if on else ())
    patch.setattr(rows_on_device, "usable", lambda device: device == DEVICE)
    patch.setattr(native, "have_kernels", lambda devices: on and devices == {DEVICE})


@pytest.fixture(autouse=True, scope="module")
def _kernels() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        switch(patch)
        yield


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Notes which kernels are called."""
    names: list[str] = []
    for name in ("_norms", "_summed", "_gram_norms", "_pair_sums", "_grouped"):
        known = getattr(rows_on_device, name)

        def noted(*given: Any, known: Any = known, name: str = name) -> Any:
            names.append(name)
            return known(*given)

        monkeypatch.setattr(rows_on_device, name, noted)
    return names


def normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def sequences(acts: Tensor, backprops: Tensor) -> Any:
    shape = torch.Size([backprops.shape[2], acts.shape[2]])
    return from_kernel("rows.sequences", acts, backprops, shape)


def rows_of(acts: Tensor, backprops: Tensor) -> Tensor:
    """Returns rows (B, out, in), in float64, whose rounding is far below what is declared of terms in float32."""
    return torch.einsum("bto,bti->boi", backprops.double(), acts.double())


def sizes(rows: Tensor) -> Tensor:
    return torch.linalg.vector_norm(rows.flatten(1), dim=1)


def terms(acts: Tensor, backprops: Tensor, more: float = 0.0) -> Tensor:
    """Returns sum_t |g_t| |a_t|, of squares that are so much larger for each number."""
    squares = [side.double().square().add(more).sum(2) for side in (acts, backprops)]
    return (squares[0].sqrt() * squares[1].sqrt()).sum(1)


def cancelling(n: int, times: int, width: int, out: int, left: float = 2.0**-8) -> list[Tensor]:
    """Returns records whose second half takes the first one back, but for a part of it."""
    acts, backprops = (normal(n, times, k, seed=k) for k in (width, out))
    half = times // 2
    acts[:, half : 2 * half] = acts[:, :half]
    backprops[:, half : 2 * half] = -backprops[:, :half] * (1.0 + left)
    backprops[:, 2 * half :] = 0.0
    return [acts, backprops]


# -- norms of sequences -----------------------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(
    st.integers(0, 2**31),
    st.sampled_from([1, 2, 5, 31, 33]),
    st.sampled_from([(2, 3), (33, 2), (4, 40)]),
    st.sampled_from([1e-38, 1e-25, 1e-19, 1.0, 1e18]),
    st.sampled_from([1e-38, 1e-19, 1.0, 1e18]),
    st.booleans(),
)
def test_norms_of_sequences_by_the_kernel_are_never_below_the_exact_norm(
    seed, times, widths, large, small, cancels
):
    acts, backprops = (normal(2, times, k, seed=seed + k) for k in widths)
    if cancels and times > 1:
        half = times // 2
        acts[:, half : 2 * half] = acts[:, :half]
        backprops[:, half : 2 * half] = -backprops[:, :half]
    acts = acts * large
    backprops = backprops * small
    acts[0, times // 2] = 0.0
    block = sequences(acts, backprops)
    bounds = block.norms()
    exact, size = sizes(rows_of(acts, backprops)), terms(acts, backprops, 2.0**-101)
    assert type(block) is Sequences
    assert bounds.dtype == torch.float64
    most = (exact.square() + 71 * U * size.square()).sqrt() + (times + 5) * U * size
    most = most * (1.0 + 2.0**-13)
    assert bool((bounds >= exact).all())
    assert bool((bounds >= size / CANCELLATION).all())
    assert bool((bounds <= most).all())


def test_products_that_are_lost_in_float32_are_in_the_norm():
    """Squares of 1e-23 are 0 in float32: rows of 1e-23 times 1e18 would have no norm at all."""
    acts, backprops = torch.full((1, 2, 3), 1e18), torch.full((1, 2, 2), 1e-23)
    assert float(backprops.square().sum()) == 0.0
    for left, right in (acts, backprops), (backprops, acts):
        bound = float(sequences(left.to(DEVICE), right.to(DEVICE)).norms())
        assert bound >= float(sizes(rows_of(left, right))) > 1e-6


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3e38])
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("other", [0.0, 1.0])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter
def test_a_sequence_without_a_finite_norm_has_none_and_moves_no_other(value, side, other):
    """Not even where the other factor is 0, or where it hides below the diagonal."""
    given = [torch.ones(3, 40, 4, device=DEVICE), torch.ones(3, 40, 5, device=DEVICE)]
    clean = sequences(*given).norms()
    given[side][1, 35, 2] = value
    given[1 - side][1, 35] = other
    bounds = sequences(*given).norms()
    assert not math.isfinite(bounds[1])
    assert torch.equal(bounds[[0, 2]], clean[[0, 2]])
    assert float(clip_weights(bounds, 1.0)[1]) == 0.0


def test_a_norm_of_a_sequence_has_the_same_bits_beside_any_other_records():
    acts, backprops = normal(5, 70, 35), normal(5, 70, 3)
    whole = sequences(acts, backprops)
    norms = whole.norms()
    for index in (slice(0, 1), slice(3, 4), slice(1, 5), torch.tensor([4, 0])):
        assert torch.equal(whole.select(index).norms(), norms[index])
    turned = acts.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(sequences(turned, backprops).norms(), norms)


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (0, 0)])
def test_sequences_of_nothing_are_0(shape):
    acts, backprops = (torch.ones(*shape, k, device=DEVICE) for k in (4, 5))
    block = sequences(acts, backprops)
    assert block.norms().tolist() == [0.0] * shape[0]
    weights = torch.ones(shape[0], dtype=torch.float64, device=DEVICE)
    assert not block.weighted_sum(weights, PLANNED)[0].any()


# -- sums of sequences ------------------------------------------------------------------------------------------------


def pair_sum(acts: Tensor, backprops: Tensor, weights: Tensor) -> Tensor:
    [total] = sequences(acts, backprops).weighted_sum(weights, PLANNED)
    return total


@pytest.mark.parametrize("times", [1, 2, 15, 16, 17, 33, 100])
@pytest.mark.parametrize(("n", "width", "out"), [(1, 3, 2), (7, 65, 33)])
def test_sums_of_sequences_err_by_at_most_a_chain_of_each_record(times, n, width, out, called):
    acts, backprops = normal(n, times, width), normal(n, times, out, seed=2)
    weights = torch.linspace(0.1, 1.0, n, dtype=torch.float64, device=DEVICE)
    total = pair_sum(acts, backprops, weights)
    exact = torch.tensordot(weights, rows_of(acts, backprops), 1)
    size = torch.tensordot(weights, rows_of(acts.abs(), backprops.abs()), 1)
    assert called == ["_pair_sums", "_summed"]
    assert total.dtype == torch.float64
    assert bool(((total - exact).abs() <= (times + 3) * U * size).all())


@pytest.mark.parametrize("programs", [1, 4, 1000])
def test_records_are_divided_among_programs_whole(programs, monkeypatch):
    monkeypatch.setattr(rows_on_device, "_PROGRAMS", programs)
    acts, backprops = cancelling(40, 6, 5, 3)
    weights = torch.linspace(0.1, 1.0, 40, dtype=torch.float64, device=DEVICE)
    alone = [
        pair_sum(acts[i : i + 1], backprops[i : i + 1], weights[i : i + 1]) for i in range(40)
    ]
    # float64 is left with sums of 40 numbers; a tile of two halves would be off by U
    total = pair_sum(acts, backprops, weights)
    torch.testing.assert_close(total, torch.stack(alone).sum(0), rtol=0.0, atol=1e-15)


def test_what_a_record_adds_has_the_same_bits_beside_any_others():
    acts, backprops = normal(9, 21, 5), normal(9, 21, 3)
    for i in range(9):
        one = torch.zeros(9, dtype=torch.float64, device=DEVICE)
        one[i] = 0.3
        alone = pair_sum(acts[i : i + 1], backprops[i : i + 1], one[i : i + 1])
        assert torch.equal(pair_sum(acts, backprops, one), alone)


def test_a_row_as_it_is_summed_is_not_above_its_norm(monkeypatch):
    """What a row is added as is rounded by itself: norms have room for it beside that of their own products."""
    monkeypatch.setattr(rows_on_device, "NORM_ERROR", {torch.float32: 0.0})
    one = torch.ones(1, dtype=torch.float64, device=DEVICE)
    for acts, backprops in (
        (torch.full((1, 200, 2), 1.0000077), torch.full((1, 200, 2), 0.7)),
        cancelling(1, 40, 3, 5),
        cancelling(1, 7, 3, 5, left=2.0**-20),
    ):
        given = acts.to(DEVICE), backprops.to(DEVICE)
        bound = float(sequences(*given).norms())
        assert float(pair_sum(*given, one).norm()) <= bound
        exact, size = float(sizes(rows_of(*given))), float(terms(*given))
        products = math.sqrt(exact**2 + 68 * U * size**2)
        assert bound >= (products + (acts.shape[1] + 3) * U * size) * (1.0 - 1e-9)
        assert float((pair_sum(*given, one) - rows_of(*given)[0]).norm()) > 1e-9 * size


@pytest.mark.parametrize("left", [2.0**-4, 2.0**-9])
def test_one_sequence_more_moves_the_sum_by_at_most_what_is_declared(left, called):
    """Terms are up to 1,000 times as long as the clip: float32 sums of several records would err by far more."""
    acts, backprops = cancelling(41, 10, 70, 50, left=left)
    query, moved = [torch.zeros(50, 70, device=DEVICE)], []
    for part in (slice(0, 41), slice(1, 41)):
        oracle = Clipped(1.0, 0.0, 40)
        oracle.open(query)
        oracle.observe(GradBatch([sequences(acts[part], backprops[part])]))
        moved.append(oracle.release(seeded(1)).mean[0].double())
    assert called == ["_gram_norms", "_pair_sums", "_summed"] * 2
    assert float((terms(acts, backprops) / sizes(rows_of(acts, backprops))).min()) > 1.5 / left
    room = U * float(moved[0].norm())  # what is released is rounded to float32
    assert float((moved[0] - moved[1]).norm()) <= oracle.sensitivity("add_remove") + room
    [own] = sequences(acts, backprops).weighted_sum(weights_of(acts, backprops), PLANNED)
    [other] = sequences(acts[1:], backprops[1:]).weighted_sum(
        weights_of(acts, backprops)[1:], PLANNED
    )
    assert float((own - other).norm()) <= 1.0 + 1e-13  # no error but that of float64


def weights_of(acts: Tensor, backprops: Tensor) -> Tensor:
    return clip_weights(sequences(acts, backprops).norms(), 1.0)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_sequences_of_weight_0_are_not_read(value):
    acts, backprops = normal(6, 20, 5), normal(6, 20, 3)
    weights = torch.linspace(0.1, 1.0, 6, dtype=torch.float64, device=DEVICE)
    weights[[1, 4]] = 0.0
    want = pair_sum(acts[[0, 2, 3, 5]], backprops[[0, 2, 3, 5]], weights[[0, 2, 3, 5]])
    acts[1, 19], backprops[4, 0] = value, value
    torch.testing.assert_close(pair_sum(acts, backprops, weights), want, rtol=0.0, atol=1e-14)
    block = sequences(acts, backprops)
    assert block.leaves_out(PLANNED)
    masked = block.masked(weights > 0)
    assert type(masked) is type(block.select(slice(2))) is Sequences
    torch.testing.assert_close(
        masked.weighted_sum(weights, FLOAT64)[0], want, rtol=1e-5, atol=1e-5
    )


def test_sums_in_float64_are_those_of_torch(called):
    """For clips and draws that are too large or small for float32, of which subnormal numbers may be lost."""
    acts, backprops = normal(6, 20, 5), normal(6, 20, 3)
    weights = torch.ones(6, dtype=torch.float64, device=DEVICE)
    block = sequences(acts, backprops)
    for precision in (FLOAT64, PLANNED.for_rows(10**6), plan_summation(64, 100_000)):
        assert not block.leaves_out(precision)
        [total] = block.weighted_sum(weights, precision)
        torch.testing.assert_close(
            total, rows_of(acts, backprops).sum(0), rtol=1e-12, atol=1e-12
        )
    assert torch.equal(block.dense()[0], block._rows.dense()[0])
    assert called == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sequences_of_half_precision_are_left_to_torch(dtype, called):
    acts, backprops = normal(3, 4, 5), normal(3, 4, 3)
    for pair in (acts.to(dtype), backprops), (acts, backprops.to(dtype)):
        assert sequences(*pair) is None
    assert sequences(acts, backprops[:, :, :1]) is None
    assert called == []


# -- embeddings -------------------------------------------------------------------------------------------------------


def grouped(rows: Tensor, groups: Tensor, count: int, *given: Any) -> Any:
    return from_kernel("rows.grouped", rows, groups, count, *given)


def added(rows: Tensor, groups: Tensor, count: int, weights: Tensor | None = None) -> Tensor:
    """Returns the sums of groups, in float64."""
    weights = torch.ones(len(rows), dtype=torch.float64) if weights is None else weights
    own = (groups.cpu() == torch.arange(count)[:, None]) * weights.cpu()
    found = [(w[w > 0, None] * rows.cpu().double()[w > 0]).sum(0) for w in own]
    return torch.stack(found).to(rows.device)


@pytest.mark.parametrize("longest", [0, 1, 31, 32, 33, 70])
@pytest.mark.parametrize("width", [1, 2, 65])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_of_groups_are_those_of_their_rows(longest, width, dtype):
    counts = torch.tensor([0, longest, 1, 0, 2, 3])  # of which the last group is left out
    groups = torch.arange(6).repeat_interleave(counts)
    groups = groups[torch.randperm(len(groups), generator=torch.Generator().manual_seed(1))]
    rows = normal(len(groups), width).to(dtype)
    groups = groups.to(DEVICE)
    weights = torch.linspace(0.5, 1.0, len(groups), dtype=torch.float64, device=DEVICE)
    exact = added(rows, groups, 5, weights)
    found = grouped(rows, groups, 5, weights, torch.float64)
    torch.testing.assert_close(found, exact, rtol=1e-14, atol=1e-14)
    own = grouped(rows, groups, 5)
    assert own.dtype == dtype
    torch.testing.assert_close(own, added(rows, groups, 5).to(dtype), rtol=2 * U, atol=1e-14)
    assert torch.equal(grouped(rows[:, 0], groups, 5), grouped(rows[:, :1], groups, 5)[:, 0])


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_vectors_of_weight_0_are_not_read(value):
    rows, groups = normal(40, 3), torch.arange(40, device=DEVICE) % 4
    weights = torch.ones(40, dtype=torch.float64, device=DEVICE)
    weights[[3, 16]] = 0.0
    want = grouped(rows.index_fill(0, torch.tensor([3, 16], device=DEVICE), 0.0), groups, 4)
    rows[3], rows[16], groups[39], rows[39] = value, value, 4, value
    found = grouped(rows, groups, 4, weights)
    assert torch.isfinite(found).all()
    torch.testing.assert_close(found[:3], want[:3])
    rows[0], rows[2] = value, value
    finite = torch.isfinite(grouped(rows, groups, 4, weights)).all(1)
    assert finite.tolist() == [False, True, False, True]


def test_a_sum_of_a_group_has_the_same_bits_beside_any_others():
    rows = normal(90, 3)
    groups = torch.arange(90, device=DEVICE) // 30 % 2  # 60 rows and 30
    whole = grouped(rows, groups, 2)
    own = torch.cat([rows[:30], rows[60:]])
    assert torch.equal(grouped(own, torch.zeros_like(groups[:60]), 1), whole[:1])
    assert torch.equal(grouped(rows[30:60], torch.zeros_like(groups[:30]), 3)[0], whole[1])


def test_groups_of_unequal_numbers_are_refused():
    rows, groups = normal(4, 3), torch.zeros(4, dtype=torch.int64, device=DEVICE)
    weights = torch.ones(4, dtype=torch.float64, device=DEVICE)
    for case in ((rows, groups[:3], 2, weights), (rows, groups, 2, weights[:3])):
        with pytest.raises(ValueError, match="groups and weights must be as many as rows"):
            grouped(*case)


def test_other_vectors_are_left_to_torch(called):
    groups = torch.zeros(4, dtype=torch.int64, device=DEVICE)
    rows = normal(4, 3)
    for part in (rows.bfloat16(), torch.nn.Parameter(rows)):
        assert grouped(part, groups, 1) is None
    block = coalesced(groups, groups, rows.double(), 1, 1)
    for vectors in (block.vectors, block.vectors[:, :1].float()):
        assert from_kernel("rows.items", vectors, block) is None


N_RECORDS, N_ITEMS = 6, 9


def embedded(seed: int, uses: int, size: float = 1.0, width: int = 3) -> tuple[Any, Tensor]:
    """Returns rows by the kernels, and as one tensor in float64; record 4 and item 7 are never used."""
    numbers = torch.Generator().manual_seed(seed)
    records = torch.tensor([0, 1, 2, 3, 5])[torch.randint(5, (uses,), generator=numbers)]
    items = torch.randint(7, (uses,), generator=numbers)
    vectors = torch.randn(uses, width, generator=numbers) * size
    rows = torch.zeros(N_RECORDS, N_ITEMS, width, dtype=torch.float64)
    rows = rows.index_put((records, items), vectors.double(), accumulate=True)
    block = coalesced(*(t.to(DEVICE) for t in (records, items, vectors)), N_RECORDS, N_ITEMS)
    return from_kernel("rows.items", block.vectors, block), rows.to(DEVICE)


@settings(max_examples=20, deadline=None)
@given(
    st.integers(0, 2**31),
    st.sampled_from([1, 20, 90]),
    st.sampled_from([1e-44, 1e-20, 1.0, 1e17]),
    st.booleans(),
)
def test_norms_of_embeddings_by_the_kernel_are_never_below_the_exact_norm(
    seed, uses, size, queued
):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch_dpsco.rows.layers.kinds.is_queued", lambda tensor: queued)
        block, rows = embedded(seed, uses, size)
    assert type(block) is Vectors
    assert len(block) == N_RECORDS
    bounds = block.norms()
    held = sizes(block.dense()[0].double() / size) * size
    assert bool((bounds >= held * (1.0 - 1e-12)).all())
    assert bool((bounds <= held * (1.0 + 2.0**-13) + 2.0**-60).all())
    # equal ids of a record are added in float64, and rounded once
    assert bool(
        ((block.dense()[0].double() - rows).abs() <= 1.01 * U * rows.abs() + 2.0**-149).all()
    )


@pytest.mark.parametrize("queued", [False, True])
@pytest.mark.parametrize("uses", [0, 1, 20, 200])
def test_sums_of_embeddings_are_those_of_their_rows(uses, queued, monkeypatch, called):
    monkeypatch.setattr("torch_dpsco.rows.layers.kinds.is_queued", lambda tensor: queued)
    block, _ = embedded(uses, uses, width=5)
    weights = torch.linspace(0.1, 1.0, N_RECORDS, dtype=torch.float64, device=DEVICE)
    weights[2] = 0.0
    exact = torch.tensordot(weights, block.dense()[0].double(), 1)
    for plan, dtype in ((PLANNED, torch.float32), (FLOAT64, torch.float64)):
        assert block.leaves_out(plan)
        [total] = block.weighted_sum(weights, plan)
        assert total.dtype == dtype
        slack = U if dtype == torch.float32 else 1e-14
        assert bool(((total.double() - exact).abs() <= slack * exact.abs() + 1e-14).all())
    index = torch.tensor([5, 0, 3], device=DEVICE)
    [some] = block.select(index).weighted_sum(weights[index], FLOAT64)
    expected = torch.tensordot(weights[index], block.dense()[0][index].double(), 1)
    torch.testing.assert_close(some, expected, rtol=1e-12, atol=1e-12)
    kept = weights > 0.5
    [some] = block.masked(kept).weighted_sum(weights, FLOAT64)
    expected = torch.tensordot(weights * kept, block.dense()[0].double(), 1)
    torch.testing.assert_close(some, expected, rtol=1e-12, atol=1e-12)
    assert called.count("_grouped") == 5


def test_an_embedding_that_is_not_finite_moves_no_other(called):
    block, _ = embedded(3, 60)
    rows = block._rows
    rows.vectors[rows.records == 2] = math.nan
    norms = block.norms()
    assert torch.isfinite(norms).tolist() == [True, True, False, True, True, True]
    [total] = block.weighted_sum(clip_weights(norms, 1.0), PLANNED)
    assert torch.isfinite(total).all()


# -- whole models -----------------------------------------------------------------------------------------------------


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(30, 48, padding_idx=0)
        self.mixed = nn.Linear(48, 48)
        self.out = nn.Linear(48, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.mixed(self.table(ids)).relu().mean(1))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor], set[type]]] = {
    "words": (
        Words,
        lambda n: torch.randint(30, (n, 5), generator=torch.Generator().manual_seed(n)),
        {Vectors, Sequences},
    ),
    "patches": (
        lambda: nn.Sequential(nn.Conv2d(8, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 12)),
        lambda n: normal(n, 8, 4, 4).cpu(),
        {Sequences},
    ),
}


def moved(name: str, patch: pytest.MonkeyPatch, *, on: bool) -> tuple[list[Tensor], list[Block]]:
    """Returns the clipped mean of a batch of 40, two of whose records are not finite or long, and its rows."""
    switch(patch, on=on)
    torch.manual_seed(1)
    make, inputs, _ = MODELS[name]
    model = make().to(DEVICE)
    dp.attach(model)
    x = inputs(40).to(DEVICE)
    losses = nn.functional.cross_entropy(
        model(x), torch.arange(40, device=DEVICE) % 4, reduction="none"
    )
    losses = losses * torch.linspace(0.1, 30.0, 40, device=DEVICE)
    losses[7] = losses[7] * math.nan
    losses.sum().backward()
    params = list(model.parameters())
    blocks = list(waiting_blocks(params))
    oracle = Clipped(1.0, 0.0, 40)
    oracle.open(params)
    oracle.observe(GradBatch.consume(params))
    return oracle.release(seeded(1)).mean, blocks


@pytest.mark.parametrize("name", MODELS)
def test_a_model_on_a_device_moves_as_without_kernels(name, monkeypatch, called):
    for module in ("rows.batch", "rows.layers.kinds", "step.oracle"):
        monkeypatch.setattr(f"torch_dpsco.{module}.is_queued", lambda tensor: True)
    want, plain = moved(name, monkeypatch, on=False)
    assert called == []
    found, blocks = moved(name, monkeypatch, on=True)
    wanted = MODELS[name][2]
    assert wanted <= {type(block) for block in blocks}
    assert not wanted & {type(block) for block in plain}
    assert "_grouped" in called or name != "words"
    assert {"_norms", "_gram_norms", "_pair_sums"} <= set(called)
    for one, other in zip(found, want, strict=True):
        assert float(one.abs().max()) > 1e-4
        torch.testing.assert_close(one.double(), other.double(), rtol=1e-2, atol=2e-5)


def test_the_test_of_the_sizes_of_batches_sees_the_factors_of_sequences(monkeypatch):
    """It compares all tensors of a block, but for those of items, which are in no order of records."""
    switch(monkeypatch)
    block = sequences(normal(3, 4, 5), normal(3, 4, 6))
    assert sum(isinstance(part, Tensor) for part in vars(block).values()) == 2
    items, _ = embedded(1, 9)
    assert not any(isinstance(part, Tensor) for part in vars(items).values())


def test_kernels_of_factors_wait_for_nothing():
    acts, backprops = normal(3, 4, 5), normal(3, 4, 6)
    weights = torch.ones(3, dtype=torch.float64, device=DEVICE)
    groups = torch.tensor([0, 2, 0], device=DEVICE)
    with Watch() as watch:
        block = sequences(acts, backprops)
        block.norms()
        block.weighted_sum(weights, PLANNED)
        grouped(acts.flatten(1), groups, 3, weights)
    assert watch.calls > 10
    assert not watch.found


def test_copies_of_blocks_are_blocks():
    block = sequences(normal(3, 4, 5), normal(3, 4, 6))
    assert torch.equal(copy.copy(block).norms(), block.norms())
    assert isinstance(block._rows, SequenceBlock)
    assert isinstance(embedded(1, 9)[0]._rows, ItemBlock)
