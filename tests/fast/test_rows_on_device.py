"""Norms and sums by the kernels for CUDA: never below, within what is declared, and only of rows that suit.

Without a device the kernels run on the CPU, under the interpreter of Triton (tests/conftest.py).
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.streams import seeded
from torch_dpsco import native
from torch_dpsco.fast import rows_on_device
from torch_dpsco.rows import DenseBlock, FactoredBlock, GradBatch, plan_summation, row_norms
from torch_dpsco.step.oracle import Clipped

pytest.importorskip("triton", "3.8", "kernels were tried with triton 3.8")
DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
U = 2.0**-24


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Rows of the device of these tests are read by the kernels, and none in C."""
    monkeypatch.setattr(native, "_found", lambda: (None, "off"))
    monkeypatch.setattr(native, "DEVICES", (DEVICE.type,))
    known = rows_on_device.usable
    known.cache_clear()
    yield
    known.cache_clear()


@pytest.fixture
def usable(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Kernels that are taken to have passed their trial, and notes which are called."""
    called: list[str] = []
    for name in ("_norms", "_summed"):
        known = getattr(rows_on_device, name)

        def noted(*given: Any, known: Any = known, name: str = name) -> Any:
            called.append(name)
            return known(*given)

        monkeypatch.setattr(rows_on_device, name, noted)
    monkeypatch.setattr(rows_on_device, "usable", lambda device: device == DEVICE)
    monkeypatch.setattr(native, "have_kernels", lambda devices: devices == {DEVICE})
    return called


def normal(n: int, width: int) -> Tensor:
    return torch.randn(n, width, generator=torch.Generator().manual_seed(n * width)).to(DEVICE)


# -- norms ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1e-38, 1e-20, 1.0, 1e15])
@pytest.mark.parametrize("width", [2, 3, 1024, 1025, 3000])
def test_norms_of_the_kernel_are_never_below_the_exact_norm(usable, scale, width):
    rows = (
        torch.cat([normal(2, width), torch.full((1, width), 1.0000077, device=DEVICE)]) * scale
    )
    bounds = rows_on_device.norms(rows)
    exact = torch.linalg.vector_norm(rows.double() / scale, dim=1) * scale
    assert bounds is not None
    assert bounds.dtype == torch.float64
    assert torch.equal(row_norms(rows), bounds)
    assert bool((bounds >= exact * (1.0 - 1e-12)).all())
    assert bool((bounds <= exact * (1.0 + 2.0**-13) + 2.0**-62 * width**0.5).all())


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # of the interpreter
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3e38])
def test_rows_without_a_finite_norm_have_none_and_move_no_other(usable, value):
    rows = torch.ones(3, 40, device=DEVICE)
    rows[1, 39] = value
    bounds = row_norms(rows)
    assert not math.isfinite(bounds[1])
    assert bool((bounds[[0, 2]] < 6.33).all())


def test_rows_too_long_for_one_program_are_left_to_torch(usable, monkeypatch):
    monkeypatch.setattr(rows_on_device, "_WIDEST", 100)
    assert rows_on_device.norms(normal(3, 100)) is not None
    assert rows_on_device.norms(normal(3, 101)) is None


def test_a_norm_has_the_same_bits_beside_any_other_rows(usable):
    rows = normal(9, 1500)
    whole = row_norms(rows)
    for part in (slice(0, 1), slice(4, 5), slice(2, 9), slice(0, 8, 2)):
        assert torch.equal(row_norms(rows[part]), whole[part])
    assert torch.equal(row_norms(torch.cat([rows, rows], 1)[:, :1500]), whole)
    assert len(row_norms(rows[:0])) == 0
    assert usable.count("_norms") == 7


# -- sums -------------------------------------------------------------------------------------------------------------


def summed(left: Tensor, right: Tensor, weights: Tensor, tile: int) -> tuple[Tensor, Tensor]:
    return rows_on_device.outer_sums(left, right, weights, tile)


def check(left: Tensor, right: Tensor, weights: Tensor, tile: int) -> None:
    """Compares with float64, to what a chain of tile + 4 roundings may err by; the bias has one of float64."""
    matrix, vector = summed(left, right, weights, tile)
    scaled = left.double() * weights[:, None]
    terms = scaled.abs().t() @ right.double().abs()
    error = (matrix.double() - scaled.t() @ right.double()).abs()
    assert bool((error <= (tile + 4) * U * terms * (1.0 + 1e-6)).all())
    assert bool(((vector - scaled.sum(0)).abs() <= 1e-13 * scaled.abs().sum(0)).all())


@pytest.mark.parametrize("n", [1, 15, 16, 17, 65])
@pytest.mark.parametrize(("out", "width", "tile"), [(2, 2, 4), (33, 65, 16), (5, 130, 64)])
def test_sums_of_the_kernel_err_by_at_most_their_chain(usable, n, out, width, tile):
    weights = torch.linspace(0.1, 1.0, n, dtype=torch.float64, device=DEVICE)
    check(normal(n, out), normal(n, width), weights, tile)


@pytest.mark.parametrize(("n", "programs"), [(63, 8), (64, 8), (65, 8), (200, 1), (200, 3)])
def test_rows_that_are_divided_among_programs_are_all_counted_once(
    usable, monkeypatch, n, programs
):
    monkeypatch.setattr(rows_on_device, "_PROGRAMS", programs)
    weights = torch.linspace(0.1, 1.0, n, dtype=torch.float64, device=DEVICE)
    check(normal(n, 3), normal(n, 5), weights, 16)


@pytest.mark.parametrize("tile", [8, 16])
def test_sums_of_equal_rows_err_by_no_more_than_a_tile(usable, tile):
    """All roundings are in one direction: one chain of all rows would err by more than is declared."""
    rows = torch.full((1200, 3), 1.0000077, device=DEVICE)
    weights = torch.full((1200,), 0.7, dtype=torch.float64, device=DEVICE)
    check(rows[:, :2], rows, weights, tile)
    term = np.float32(0.7) * np.float32(1.0000077) ** 2
    chain = np.add.accumulate(np.full(1200, term))[-1]  # one after the other
    assert abs(float(chain) - 1200 * float(term)) > (tile + 4) * U * float(chain)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_rows_of_weight_0_are_not_read(usable, value):
    left, right = normal(20, 4), normal(20, 6)
    weights = torch.ones(20, dtype=torch.float64, device=DEVICE)
    weights[[3, 17]] = 0.0
    kept = weights.nonzero()[:, 0]
    want = summed(left[kept].contiguous(), right[kept].contiguous(), weights[kept], 64)
    left[3], right[17] = value, value
    for found, expected in zip(summed(left, right, weights, 64), want, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_rows_that_are_cut_out_of_others_are_read_at_their_places(usable):
    left, right = normal(10, 12)[:, 3:8], normal(10, 20)[:, 7:]
    check(left, right, torch.ones(10, dtype=torch.float64, device=DEVICE), 16)


def test_sums_of_unequal_numbers_are_refused(usable):
    left, right = normal(4, 3), normal(5, 3)
    weights = torch.ones(4, dtype=torch.float64, device=DEVICE)
    for given in (
        (left, right, weights, 4),
        (left, left, weights[:3], 4),
        (left, left, weights, 0),
    ):
        with pytest.raises(ValueError, match="rows and weights must be as many as backprops"):
            rows_on_device.outer_sums(*given)


# -- when they are used -----------------------------------------------------------------------------------------------


OTHERS = {
    "float64": torch.ones(3, 4, dtype=torch.float64, device=DEVICE),
    "bfloat16": torch.ones(3, 4, dtype=torch.bfloat16, device=DEVICE),
    "float16": torch.ones(3, 4, dtype=torch.float16, device=DEVICE),
    "turned": torch.ones(4, 3, device=DEVICE).t(),
    "gaps": torch.ones(3, 8, device=DEVICE)[:, ::2],
    "single": torch.ones(3, 1, device=DEVICE),
    "elsewhere": torch.ones(3, 4, device="meta"),
    "vector": torch.ones(12, device=DEVICE),
    "parameter": torch.nn.Parameter(torch.ones(3, 4, device=DEVICE)),
    "negated": torch.ones(3, 4, dtype=torch.complex64, device=DEVICE).conj().imag,
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_rows_are_left_to_torch(usable, kind):
    rows, good = OTHERS[kind], torch.ones(3, 4, device=DEVICE)
    weights = torch.ones(3, dtype=torch.float64, device=DEVICE)
    assert not rows_on_device.suits(rows)
    assert rows_on_device.norms(rows) is None
    planned = plan_summation(3, 100_000, in_c=True)
    assert FactoredBlock(good, good).leaves_out(planned)
    for left, right in (good, rows), (rows, good):
        with pytest.raises(ValueError, match="rows and backprops must be float32"):
            rows_on_device.outer_sums(left, right, weights, 4)
        if rows.dim() == 2:
            assert not FactoredBlock(left, right).leaves_out(planned)
    assert usable == []


def test_rows_of_weight_0_are_copied_where_no_kernel_leaves_them_out(usable, monkeypatch):
    masked: list[type] = []
    known = FactoredBlock.masked

    def noted(self: FactoredBlock, kept: Tensor) -> FactoredBlock:
        masked.append(self.acts.dtype)
        return known(self, kept)

    monkeypatch.setattr(FactoredBlock, "masked", noted)
    monkeypatch.setattr("torch_dpsco.rows.batch.is_queued", lambda tensor: True)
    left, right = normal(20, 4), normal(20, 6)
    left[3], right[7] = math.nan, math.inf
    weights = torch.ones(20, dtype=torch.float64, device=DEVICE)
    weights[[3, 7]] = 0.0
    planned = plan_summation(20, 100_000, in_c=True)
    sums = [
        GradBatch([FactoredBlock(part, left)]).weighted_sum(weights, planned)
        for part in (right, right.double())
    ]
    assert masked == [torch.float64]
    for one, other in zip(*sums, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)


def test_kernels_are_tried_before_they_are_used():
    assert rows_on_device.usable(DEVICE)
    assert not rows_on_device.usable(torch.device("meta"))
    assert native.have_kernels({DEVICE})
    assert not native.have_kernels({DEVICE, torch.device("meta")})
    assert not native.have_kernels(set())


@pytest.mark.parametrize("part", ["_gram_norms", "_pair_sums", "_grouped"])
@pytest.mark.parametrize("factor", [1.0 - 2.0**-6, 1.0 + 2.0**-6, math.nan])
def test_kernels_of_other_factors_are_not_used(monkeypatch, part, factor):
    known = getattr(rows_on_device, part)
    monkeypatch.setattr(rows_on_device, part, lambda *given: known(*given) * factor)
    assert not rows_on_device.usable(DEVICE)


@pytest.mark.parametrize("wrong", ["sums", "biases", "norms", "nan", "missing", "off"])
def test_kernels_of_other_sums_are_not_used(monkeypatch, wrong):
    assert rows_on_device.usable(DEVICE)
    rows_on_device.usable.cache_clear()
    summed, norms = rows_on_device._summed, rows_on_device._norms

    def other(*given: Any) -> tuple[Tensor, Tensor]:
        matrix, vector = summed(*given)
        if wrong == "nan":
            return matrix * math.nan, vector
        return matrix + 0.01 * (wrong == "sums"), vector + 0.01 * (wrong == "biases")

    monkeypatch.setattr(rows_on_device, "_summed", other)
    if wrong == "norms":
        monkeypatch.setattr(rows_on_device, "_norms", lambda rows: norms(rows) * (1.0 - 1e-3))
    if wrong == "missing":
        monkeypatch.setitem(sys.modules, "torch_dpsco.fast.kernels", None)
    if wrong == "off":
        monkeypatch.setenv("TORCH_DPSCO_NATIVE", "off")
    assert not rows_on_device.usable(DEVICE)
    assert not native.have_kernels({DEVICE})
    assert rows_on_device.norms(torch.ones(3, 4, device=DEVICE)) is None


def test_the_sum_of_a_layer_is_that_of_the_kernel_and_within_what_is_declared(usable):
    """One record more moves it by at most the sensitivity, which has the tiles of the accelerator in C."""
    size, width = 48, 900
    left, right = (
        torch.full((size + 1, 4), 0.7, device=DEVICE),
        normal(1, width).repeat(size + 1, 1),
    )
    query, moved = [torch.zeros(4, width, device=DEVICE), torch.zeros(4, device=DEVICE)], []
    for part in (slice(0, size + 1), slice(1, size + 1)):
        oracle = Clipped(1.0, 0.0, size)
        oracle.open(query)
        oracle.observe(GradBatch([FactoredBlock(right[part], left[part])]))
        released = oracle.release(seeded(1)).mean
        moved.append(torch.cat([mean.double().flatten() for mean in released]))
    assert usable == ["_norms", "_norms", "_summed"] * 2
    planned = plan_summation(size, 4 * width + 4, in_c=True)
    assert oracle.sensitivity("add_remove") == (1.0 + planned.error) / size
    room = U * float(moved[0].norm())
    assert (
        0.9 / size
        < float((moved[0] - moved[1]).norm())
        <= oracle.sensitivity("add_remove") + room
    )


def test_what_no_kernel_reads_is_summed_by_torch(usable):
    oracle = Clipped(1.0, 0.0, 40)
    width = 4000
    query = [torch.zeros(4, width, device=DEVICE), torch.zeros(6, device=DEVICE)]
    oracle.open(query)
    acts, backprops = normal(40, width).bfloat16(), normal(40, 4)
    block = FactoredBlock(acts, backprops, bias=False)
    oracle.observe(GradBatch([block, DenseBlock(normal(40, 6))]))
    found = oracle.release(seeded(1)).mean
    assert "_summed" not in usable
    scale = (
        1.0 / block.norms().square().add(normal(40, 6).double().square().sum(1)).sqrt()
    ).clamp(max=1.0)
    want = (backprops.double() * scale[:, None]).t() @ acts.double() / 40
    torch.testing.assert_close(found[0].double(), want, rtol=1e-3, atol=1e-5)


def test_several_processes_declare_what_torch_errs_by(usable):
    alone, spread = Clipped(1.0, 1.0, 256), Clipped(1.0, 1.0, 256)
    spread.share(2)
    for oracle in (alone, spread):
        oracle.open([torch.zeros(40, 500, device=DEVICE)])
    assert alone.sensitivity("add_remove") < spread.sensitivity("add_remove")


# -- the code that a device runs --------------------------------------------------------------------------------------

COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from torch_dpsco.fast.kernels import gram, group_sums, outer_sums, squares
types = {"left": "*fp32", "left_step": "i32", "right": "*fp32", "right_step": "i32", "weights": "*fp64"}
types |= {"n": "i32", "out": "i32", "width": "i32", "share": "i32", "tile": "i32"}
pairs = {"left": "*fp32", "out": "i32", "right": "*fp32", "width": "i32", "times": "i32", "found": "*fp64"}
groups = {"rows": "*fp32", "width": "i32", "order": "*i64", "starts": "*i64", "weights": "*fp64"}
vectors = {"rows": "*fp32", "step": "i32", "width": "i32", "found": "*fp64"}
sizes = {"ROWS": 16, "HIGH": 32, "BROAD": 64}
for kernel, signature, constants in (
    (outer_sums, types | {"matrix": "*fp32", "vector": "*fp64"}, sizes),
    (outer_sums, types | {"matrix": "*fp64", "vector": "*fp64"}, sizes),
    (gram, pairs, {"TIMES": 32, "PIECE": 32}),
    (group_sums, groups | {"found": "*fp32"}, {"ROWS": 32, "BROAD": 64}),
    (squares, vectors, {"PIECE": 1024}),
):
    signature = signature | dict.fromkeys(constants, "constexpr")
    source = ASTSource(kernel, signature=signature, constexprs=constants)
    for capability in (80, 90):
        print(triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["ptx"])
"""


@pytest.mark.slow
def test_products_are_compiled_for_cuda_in_float32(tmp_path: Path):
    """No tensor core, which would round products to fewer bits, and no flushing to zero."""
    place = {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-c", COMPILED]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env=os.environ | place
    )
    code = done.stdout
    assert code.count(".entry") == 10
    assert {"fma.rn.f32", "add.f64", "sqrt.rn.f64"} <= {
        word.replace("add.rn.f64", "add.f64") for word in code.split()
    }
    for word in ("mma", ".tf32", ".bf16", ".ftz", "approx", "st.local"):
        assert word not in code
