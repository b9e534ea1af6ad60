"""A mean loss is refused wherever products round its 1/B to fewer bits than float32 has."""

from __future__ import annotations

import ast
import operator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import torch_dpsco as dp
from tests.problems import gradients
from torch_dpsco import native as precision
from torch_dpsco.errors import SequenceError
from torch_dpsco.rows import GradBatch

B = 3927  # between it and the next, 1/B crosses the middle of two bfloat16 numbers


@pytest.fixture(autouse=True)
def _as_before():
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def _rounded(self: Tensor, other: Tensor) -> Tensor:
    return (
        torch.mm(self.bfloat16().float(), other.bfloat16().float())
        if self.dim() == 2
        else torch.matmul(self, other)
    )


def _two_layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 64, bias=False), nn.Linear(64, 64, bias=False))


def _rows(size: int, reduction: str, rows: str) -> Tensor:
    """Returns the rows of equal records."""
    model = dp.attach(_two_layers(), loss_reduction=reduction, rows=rows)
    losses = (model(torch.ones(size, 8)) * torch.ones(64)).sum(1)
    (losses.mean() if reduction == "mean" else losses.sum()).backward()
    return GradBatch.consume(list(model.parameters())).dense()[0].double().flatten(1)


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(
    ("rows", "emulated"), [("auto", True), ("auto", False), ("dense", False)]
)
def test_one_record_more_moves_the_sum_by_one_clip_in_medium_precision(
    monkeypatch, rows, emulated
):
    """The counterexample: on a CPU with bfloat16 products the sum moved by 27 clips at B = 3927."""
    torch.set_float32_matmul_precision("medium")
    if emulated:
        monkeypatch.setattr(Tensor, "__matmul__", _rounded)
    for reduction in ("mean", "sum"):
        try:
            more, fewer = _rows(B + 1, reduction, rows), _rows(B, reduction, rows)
        except SequenceError:
            assert reduction == "mean"
            continue
        clip = torch.linalg.vector_norm(
            torch.cat([more, fewer]), dim=1
        ).max()  # so that none is shortened
        assert torch.linalg.vector_norm(more.sum(0) - fewer.sum(0)) <= 1.01 * clip


@pytest.mark.parametrize("rows", ["auto", "dense"])
@pytest.mark.parametrize("setting", ["medium", "high"])
def test_a_mean_loss_in_reduced_matmul_precision_is_refused(rows, setting):
    model, x = dp.attach(_two_layers(), rows=rows), torch.ones(4, 8)
    gradients(model, x, "mean")
    torch.set_float32_matmul_precision(setting)
    with pytest.raises(
        SequenceError, match=r"full precision.*rounds its 1/B.*loss_reduction='sum'"
    ):
        model(x).mean().backward()
    torch.set_float32_matmul_precision("highest")
    gradients(model, x, "mean")


@pytest.mark.parametrize("variable", ["ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE"])
def test_a_variable_that_lets_cpu_kernels_round_counts_like_a_switch(monkeypatch, variable):
    model = dp.attach(_two_layers())
    monkeypatch.setenv(variable, "strict")
    gradients(model, torch.ones(4, 8), "mean")
    monkeypatch.setenv(variable, "BF16")
    assert not precision.products_are_exact()
    with pytest.raises(
        SequenceError, match=f"variable {variable}=BF16 rounds its 1/B.*unset {variable}"
    ):
        model(torch.ones(4, 8)).mean().backward()


def test_a_sum_loss_in_reduced_matmul_precision_trains():
    torch.set_float32_matmul_precision("medium")
    assert (
        len(gradients(dp.attach(_two_layers(), loss_reduction="sum"), torch.ones(4, 8), "sum"))
        == 4
    )


def test_a_mean_loss_in_double_precision_has_no_shortcut():
    torch.set_float32_matmul_precision("medium")
    assert (
        len(gradients(dp.attach(_two_layers().double()), torch.ones(4, 8).double(), "mean")) == 4
    )


def test_a_backward_of_a_mean_inside_of_autocast_is_refused():
    model = dp.attach(_two_layers())
    out = model(torch.ones(4, 8))
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(SequenceError, match="autocast"):
        out.mean().backward()


@pytest.mark.parametrize("seen", [False, True])
def test_a_mean_of_a_part_in_reduced_precision_is_refused(seen):
    """A loss of what a layer has left does not pass the model's output, whose backward looks at the switches."""
    model, parts = dp.attach(_two_layers(), check_first_step=False), []
    model[0].register_forward_hook(lambda *args: parts.append(args[2]))
    out = model(torch.ones(4, 8))
    if seen:  # that one backward was in full precision says nothing of the next
        out.mean().backward(retain_graph=True)
    torch.set_float32_matmul_precision("medium")
    with pytest.raises(SequenceError, match="full precision"):
        parts[0].mean().backward()


def test_rows_of_foreign_hooks_are_refused_in_reduced_precision():
    """Opacus' own modules do not say how a loss was reduced: a mean is assumed."""
    weight = nn.Parameter(torch.zeros(2))
    weight.grad_sample = torch.ones(3, 2)
    torch.set_float32_matmul_precision("high")
    with pytest.raises(SequenceError, match="full precision"):
        GradBatch.consume([weight])


def test_frozen_layers_in_half_precision_are_refused_under_a_mean():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).bfloat16().requires_grad_(False))
    with pytest.raises(ValueError, match="half-precision"):
        dp.attach(model)


def _switch(monkeypatch: pytest.MonkeyPatch, library: str, kernels: str, value: str) -> None:
    """Sets the switch of one kind of kernels; torch < 2.9 gets the switches for the time of a test."""
    backend = getattr(torch.backends, library)
    monkeypatch.setattr(backend, kernels, SimpleNamespace(fp32_precision=value), raising=False)
    if not hasattr(backend, "fp32_precision"):
        monkeypatch.setattr(backend, "fp32_precision", "none", raising=False)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("kernels", "layer"), [("conv", nn.Conv1d(1, 1, 1)), ("rnn", nn.GRU(1, 1))]
)
def test_switches_of_convolutions_count_where_there_are_some(
    monkeypatch, device, kernels, layer
):
    library = "cudnn" if device == "cuda" else "mkldnn"
    on_device = SimpleNamespace(dtype=torch.float32, device=torch.device(device))
    for value, coarse in (("tf32", True), ("bf16", True), ("ieee", False), ("none", False)):
        _switch(monkeypatch, library, kernels, value)
        assert (precision.inexact_mean([layer], [on_device]) is not None) == coarse
        assert precision.inexact_mean([nn.Linear(1, 1)], [on_device]) is None


def test_a_refusal_names_what_switches_it_off(monkeypatch):
    """On CUDA convolutions are in TF32 by default."""
    conv, weight = (
        nn.Conv2d(1, 1, 1),
        SimpleNamespace(dtype=torch.float32, device=torch.device("cuda")),
    )
    _switch(monkeypatch, "cudnn", "conv", "tf32")
    text = precision.inexact_mean([conv], [weight])
    assert "torch.backends.cudnn.conv.fp32_precision='tf32' rounds its 1/B" in text
    assert text.endswith("switch it off: torch.backends.cudnn.allow_tf32 = False")
    assert "dp.attach(model, loss_reduction='sum')" in text
    _switch(monkeypatch, "cudnn", "conv", "bf16")
    assert (
        "switch it off: torch.backends.cudnn.conv.fp32_precision = 'ieee'"
        in precision.inexact_mean([conv], [weight])
    )
    monkeypatch.delattr(torch.backends.cudnn, "conv")  # torch < 2.9
    for allowed in (True, False):
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", allowed)
        assert bool(precision.inexact_mean([conv], [weight])) is allowed
    torch.set_float32_matmul_precision("high")
    found = precision.inexact_mean([conv], [weight])
    assert found.endswith("switch it off: torch.set_float32_matmul_precision('highest')")


@pytest.mark.skipif(
    not hasattr(torch.backends.cudnn, "conv"), reason="torch < 2.9 has one switch"
)
@pytest.mark.parametrize("name", ["cudnn.conv", "cudnn", ""])
def test_what_switches_a_setting_off_does(name):
    """With the switches of this torch, which inherit from each other in a way of their own."""
    conv, weight = (
        nn.Conv2d(1, 1, 1),
        SimpleNamespace(dtype=torch.float32, device=torch.device("cuda")),
    )
    asked = operator.attrgetter(name)(torch.backends) if name else torch.backends
    kept = [
        torch.backends,
        torch.backends.cudnn,
        torch.backends.cudnn.conv,
        torch.backends.cudnn.rnn,
    ]
    before = [switch.fp32_precision for switch in kept]
    try:
        asked.fp32_precision = "tf32"
        where, value = (
            precision.inexact_mean([conv], [weight]).split("switch it off: ")[1].split(" = ")
        )
        *path, field = where.split(".")[2:]
        setattr(
            operator.attrgetter(".".join(path))(torch.backends), field, ast.literal_eval(value)
        )
        assert precision.inexact_mean([conv], [weight]) is None
    finally:
        for switch, value in zip(kept, before, strict=True):
            switch.fp32_precision = value


def test_a_mean_loss_through_coarse_convolutions_is_refused(monkeypatch):
    model = dp.attach(nn.Sequential(nn.Conv1d(1, 2, 2), nn.Flatten(), nn.Linear(4, 1)))
    _switch(monkeypatch, "mkldnn", "conv", "bf16")
    with pytest.raises(SequenceError, match=r"mkldnn\.conv"):
        model(torch.ones(2, 1, 3)).mean().backward()


@pytest.mark.parametrize("setting", ["highest", "medium"])
def test_frozen_single_precision_counts_for_a_mean_loss(setting):
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trained, self.frozen = (
                nn.Linear(8, 4).double(),
                nn.Linear(4, 4).requires_grad_(False),
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.frozen(self.trained(x).float())

    model, x = dp.attach(Mixed()), torch.ones(4, 8, dtype=torch.float64)
    torch.set_float32_matmul_precision(setting)
    loss = model(x).square().sum(1).mean()
    if setting == "highest":
        loss.backward()
        return
    with pytest.raises(SequenceError, match="a mean loss needs products in full precision"):
        loss.backward()
