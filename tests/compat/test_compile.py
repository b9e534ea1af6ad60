"""torch.compile: rows of compiled models are right, or an error is raised; they are never wrong in silence.

Layers whose rows are recorded run eagerly inside of a compiled model (the compiler breaks its graph there), the rest is
compiled. `fullgraph=True` therefore raises.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torch_dpsco as dp
from tests.compat.harness import (
    TIMES,
    Case,
    Wired,
    assert_rows,
    assert_same_model,
    dataset,
    network,
    numbers,
    private_optimizer,
    replayed,
    rows_recorded,
    squared,
    trained,
)
from torch_dpsco.errors import PrivacyError, SequenceError
from torch_dpsco.rows import GradBatch

# torch's compiler looks at `.grad` of tensors between layers and is then warned by torch.
pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)
# sizes change, so that graphs for one size, for any size and for none are all used; more steps than recompilations
SIZES = (3, 4, 1, 0, 2, 7, 5, 3, 6, 8, 9, 4, 2)
SLOW = pytest.mark.slow  # a compilation takes a second
SLOWEST = {("inductor", "before attach"), ("inductor", "in place")}  # ten
WHEN = pytest.mark.parametrize(
    "when", ["before attach", "after attach", pytest.param("in place", marks=SLOW)]
)
# refused there too, by an internal error of dynamo or a warning of torch.fx in the place of what the test expects
EARLY_DYNAMO = pytest.mark.skipif(
    torch.__version__.startswith("2.6."), reason="torch 2.6 fails with errors of its own"
)
ROWS = pytest.mark.parametrize("rows", ["auto", "dense"])
# its compiled code takes no tensor subclass, by which the first step looks at a loss (torch 2.15 does)
LOOKED_AT = not torch.__version__.startswith("2.14.")


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def wire_twice(m: Wired, x: Tensor) -> Tensor:
    return m.head(torch.tanh(m.body(torch.tanh(m.body(x)))))


def build() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(
            nn.Linear(2, 3),
            nn.Tanh(),
            Wired(wire_twice, body=nn.Linear(3, 3), head=nn.Linear(3, 4)),
        ),
        *(nn.LayerNorm(4), nn.RMSNorm(4)),
    )
    return model.double()


def compiled(
    model: nn.Module, when: str, rows: str, reduction: str, **options: Any
) -> nn.Module:
    """Returns the callable model, attached and compiled."""
    if when == "before attach":
        return dp.attach(torch.compile(model, **options), rows=rows, loss_reduction=reduction)
    dp.attach(model, rows=rows, loss_reduction=reduction)
    if when == "in place":
        model.compile(**options)
        return model
    return torch.compile(model, **options)


def rows_of(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Returns each record's gradient by plain autograd on a model that was never attached."""
    alone = []
    for record in x:
        twin = copy.deepcopy(model)
        Case(build, tuple).losses(twin, (record[None],)).sum().backward()
        alone.append([p.grad for p in trained(twin)])
    return [torch.stack(parts) for parts in zip(*alone, strict=True)]


@pytest.mark.cases(0, 1)
@ROWS
@pytest.mark.parametrize(
    ("backend", "when"),
    [
        pytest.param(
            backend, when, marks=pytest.mark.weekly if (backend, when) in SLOWEST else SLOW
        )
        for backend in ("eager", "aot_eager", "inductor")
        for when in ("before attach", "after attach", "in place")
    ],
)
def test_rows_of_compiled_models_are_right_for_many_sizes(when, rows, backend):
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("inductor needs a C++ compiler")
    case = Case(build, tuple)
    run = compiled(build(), when, rows, "sum", backend=backend)
    for k, size in enumerate(
        SIZES if backend == "eager" else SIZES[:6]
    ):  # recompilations are dynamo's choice alone
        x = numbers(2, seed=k, n=size)
        if k == 1:
            run.eval()
            run(x)
            run.train()
            with torch.no_grad():
                run(x)
        found = rows_recorded(case, run, (x,), "sum")
        if size:
            assert_rows(found, rows_of(build(), x), 1e-9)
        else:
            assert {len(part) for part in found} == {0}


@pytest.mark.weekly
@pytest.mark.parametrize("when", [pytest.param("before attach", marks=SLOW), "after attach"])
@ROWS
def test_two_backward_passes_of_a_compiled_model_stay_apart(when, rows):
    # a number of the pass that is compiled in as a constant would add rows of different records
    run = compiled(build(), when, rows, "sum", backend="aot_eager")
    case = Case(build, tuple)
    for k in range(2):
        x = numbers(2, seed=k, n=6)
        for half in x.chunk(2):
            case.losses(run, (half,)).sum().backward()
        rows_found = GradBatch.consume(trained(run))
        assert rows_found.passes == 2
        assert_rows(rows_found.dense(), rows_of(build(), x), 1e-9)


@pytest.mark.weekly
@pytest.mark.parametrize("rows", ["auto", pytest.param("dense", marks=SLOW)])
def test_a_compiled_loss_has_right_rows(rows):
    model = dp.attach(build(), rows=rows, check_first_step=LOOKED_AT)
    case = Case(build, tuple)
    loss = torch.compile(lambda x: case.losses(model, (x,)).mean(), backend="aot_eager")
    for k in range(2):
        x = numbers(2, seed=k)
        loss(x).backward()
        assert_rows(GradBatch.consume(trained(model)).dense(), rows_of(build(), x), 1e-9)


@pytest.mark.cases(0, 1)
@ROWS
@EARLY_DYNAMO
def test_one_graph_for_a_whole_attached_model_is_refused(rows):
    run = compiled(build(), "after attach", rows, "sum", backend="aot_eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        run(numbers(2))


@pytest.mark.weekly
@pytest.mark.parametrize("when", [pytest.param("before attach", marks=SLOW), "after attach"])
@EARLY_DYNAMO
def test_a_compiled_forward_that_changes_buffers_is_refused(when):
    def count(m: Wired, x: Tensor) -> Tensor:
        m.seen.add_(x.detach().mean())
        return m.layer(x)

    model = Wired(count, layer=nn.Linear(2, 1)).double()
    model.register_buffer("seen", torch.zeros((), dtype=torch.float64))
    run = compiled(model, when, "auto", "mean", backend="aot_eager")
    with pytest.raises(PrivacyError, match="seen"):
        run(numbers(2))


def recorded_kinds() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(
            nn.Embedding(5, 4),
            nn.Linear(4, 3),
            nn.Tanh(),
            nn.Conv1d(TIMES, 4, 2),
            nn.ReLU(inplace=True),
        ),
        *(nn.GroupNorm(2, 4), nn.LayerNorm(2), nn.Flatten(), nn.Linear(8, 2)),
    )
    return model.double()


@pytest.mark.weekly
@WHEN
def test_all_layers_that_record_their_rows_do_so_in_compiled_models(when):
    run = compiled(recorded_kinds(), when, "auto", "mean", backend="aot_eager")
    for size in SIZES[:3]:
        x = torch.randint(5, (size, TIMES), generator=torch.Generator().manual_seed(size))
        found = rows_recorded(Case(recorded_kinds, tuple), run, (x,), "mean")
        assert_rows(found, rows_of(recorded_kinds(), x), 1e-9)


@pytest.mark.weekly
@pytest.mark.parametrize("what", ["model", pytest.param("step", marks=SLOW)])
def test_compiled_training_makes_the_steps_of_a_plain_loop(what):
    model = dp.attach(network(), loss_reduction="sum")
    optimizer = private_optimizer(model, dp.Poisson(4, 12))
    run: Callable[..., Any] = (
        torch.compile(model, backend="aot_eager") if what == "model" else model
    )
    step = torch.compile(optimizer.step, backend="eager") if what == "step" else optimizer.step
    draws = []
    for x, y in optimizer.loader(dataset(), steps=4, isolation="none"):
        draws.append((x, y))
        optimizer.zero_grad()
        squared(run(x), y).backward()
        step()
    assert_same_model(model, replayed(draws, 4))
    assert optimizer.steps == len(optimizer.accountant) == 4


@pytest.mark.weekly
@ROWS
@EARLY_DYNAMO
def test_compiled_autograd_is_right_or_refused(rows):
    model = dp.attach(build(), rows=rows)
    case, x = Case(build, tuple), numbers(2)
    expected = rows_of(build(), x)
    loss = case.losses(model, (x,)).mean()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        try:
            loss.backward()
        except (RuntimeError, SequenceError, TypeError):
            return  # the compiler cannot trace Opacus' hooks, nor weights of two uses without gradients; none released
    assert_rows(GradBatch.consume(trained(model)).dense(), expected, 1e-9)
