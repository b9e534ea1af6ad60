"""Linear models in closed form: the same rows, steps and ledger as by a backward, and taken only where that holds."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer
from torch.utils.data import Dataset, TensorDataset

import torch_dpsco as dp
from tests.streams import picks
from torch_dpsco import native
from torch_dpsco.accounting.designs import Design, Disjoint, Fixed, Full, Poisson, Shuffled
from torch_dpsco.errors import SequenceError, UtilityWarning
from torch_dpsco.rows import closed_form as module
from torch_dpsco.rows.closed_form import closed_form
from torch_dpsco.sampling import PrivateLoader, samplers
from torch_dpsco.sampling import loader as loader_module

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{words}:torch_dpsco.errors.UtilityWarning")
    for words in ("generator=", "seed=")
]
N, D = 60, 4
LOSSES: dict[str, tuple[Any, int]] = {
    "Logistic": (dp.losses.Logistic(), 1),
    "Squared": (dp.losses.Squared(), 1),
    "Huber": (dp.losses.Huber(0.3), 1),
    "Softmax": (dp.losses.SoftmaxCrossEntropy(3), 3),
    "BCEWithLogitsLoss": (nn.BCEWithLogitsLoss(), 1),
    "MSELoss": (nn.MSELoss(), 1),
    "CrossEntropyLoss": (nn.CrossEntropyLoss(), 3),
}


@pytest.fixture(
    autouse=True,
    params=["torch", "C"],
)
def where(request: pytest.FixtureRequest) -> str:
    """Where rows are made: by torch, or by the accelerator."""
    if request.param == "torch":
        request.getfixturevalue("in_torch")
    elif not native.is_available():
        pytest.skip(f"the accelerator is {native.status()}")
    return str(request.param)


def targets_of(loss: Any, n: int = N) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    if "Softmax" in type(loss).__name__ or "Cross" in type(loss).__name__:
        return torch.randint(3, (n,), generator=generator)
    if isinstance(loss, dp.losses.Logistic):
        return torch.where(torch.rand(n, 1, generator=generator) < 0.5, -1.0, 1.0)
    return torch.rand(n, 1, generator=generator).round()


def records(loss: Any, n: int = N, dtype: torch.dtype = torch.float32) -> TensorDataset:
    features = torch.randn(n, D, generator=torch.Generator().manual_seed(1)).to(dtype)
    target = targets_of(loss, n)
    return TensorDataset(features, target.to(dtype) if target.is_floating_point() else target)


def linear(
    outputs: int = 1, *, bias: bool = True, dtype: torch.dtype = torch.float32
) -> nn.Linear:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Linear(D, outputs, bias=bias, dtype=dtype)


def optimizer_of(
    model: nn.Module, design: Design, *, noise: float = 0.5, clip: float = 0.7, **more: Any
) -> Any:
    parts: dict[str, Any] = {
        "oracle": dp.oracles.Clipped(clip, noise, design.batch_size),
        "rule": dp.rules.SGD(more.pop("average", "last")),
        "adjacency": "replace_one",
        "generator": torch.Generator().manual_seed(5),
    }
    return dp.PrivateOptimizer(model.parameters(), 0.3, design=design, **parts | more)


@pytest.fixture
def same_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samplers, "sampling_generator", lambda: picks(7))


class Passed(Dataset[Any]):
    """The records, one by one: no tensors in memory, so that fit makes a forward and a backward."""

    def __init__(self, dataset: TensorDataset) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[index]


def both(
    loss: Any,
    design: Design,
    *,
    outputs: int = 1,
    bias: bool = True,
    dtype: torch.dtype = torch.float32,
    **more: Any,
) -> tuple[list[Any], list[Any]]:
    """Returns (weights, optimizer) of a run in closed form, and of one by backwards."""
    runs = []
    physical = more.pop("physical_batch_size", None)
    for wrap in (lambda dataset: dataset, Passed):
        model = linear(outputs, bias=bias, dtype=dtype)
        optimizer = optimizer_of(model, design, **more)
        dataset = wrap(records(loss, design.n, dtype))
        dp.fit(
            model,
            optimizer,
            dataset,
            loss,
            steps=6,
            progress=False,
            physical_batch_size=physical,
        )
        runs.append(
            [torch.cat([p.detach().flatten() for p in model.parameters()]).double(), optimizer]
        )
    return runs[0], runs[1]


DESIGNS = [
    Full(N),
    Poisson(20, N),
    Fixed(20, N),
    Shuffled(10, N),
    Disjoint(10, N),
    Poisson(1, N),
]


@pytest.mark.cases(1, 1)
@pytest.mark.usefixtures("same_draws")
@pytest.mark.parametrize("design", DESIGNS, ids=repr)
@pytest.mark.parametrize("name", LOSSES)
def test_fit_in_closed_form_is_fit_by_backwards(name: str, design: Design) -> None:
    loss, outputs = LOSSES[name]
    fast, slow = both(loss, design, outputs=outputs)
    torch.testing.assert_close(fast[0], slow[0], rtol=1e-6, atol=1e-6)
    assert fast[1].accountant.ledger.digest() == slow[1].accountant.ledger.digest()
    assert fast[1].metrics == slow[1].metrics


@pytest.mark.cases(1, 1)
@pytest.mark.usefixtures("same_draws")
@pytest.mark.parametrize(
    "settings",
    [
        {"bias": False},
        {"dtype": torch.float64},
        {"physical_batch_size": 7},
        {"average": "uniform"},
        {"reg": 0.1},
        {"prox": dp.prox.Ball(0.2)},
        {"clip": 1e-3},
        {"clip": 100.0},
        {"oracle": dp.oracles.AutoClip},
    ],
    ids=str,
)
def test_settings_of_the_optimizer_hold_in_closed_form(settings: dict[str, Any]) -> None:
    if "oracle" in settings:
        settings = {"oracle": None}
        runs = []
        for wrap in (lambda dataset: dataset, Passed):
            model, loss = linear(), nn.BCEWithLogitsLoss()
            optimizer = optimizer_of(
                model, Poisson(20, N), oracle=dp.oracles.AutoClip(0.5, 0.5, 20, offset=0.1)
            )
            dp.fit(model, optimizer, wrap(records(loss)), loss, steps=6, progress=False)
            runs.append(model.weight.detach())
        torch.testing.assert_close(*runs, rtol=1e-6, atol=1e-6)
        return
    fast, slow = both(nn.BCEWithLogitsLoss(), Poisson(20, N), **settings)
    torch.testing.assert_close(fast[0], slow[0], rtol=1e-6, atol=1e-6)


@pytest.mark.cases(2, 1)
@pytest.mark.parametrize("name", ["observe", "weights"])
@pytest.mark.parametrize("of_instance", [False, True])
def test_an_oracle_that_looks_at_rows_itself_sees_them_in_closed_form(
    name: str, of_instance: bool
) -> None:
    seen = []

    def look(self: Any, *args: Any) -> Any:
        seen.append(args)
        return getattr(dp.oracles.Clipped, name)(self, *args)

    kind = (
        dp.oracles.Clipped if of_instance else type("Looks", (dp.oracles.Clipped,), {name: look})
    )
    oracle = kind(0.7, 0.5, N)
    if of_instance:
        setattr(oracle, name, functools.partial(look, oracle))
    model = linear()
    dp.fit(
        model,
        optimizer_of(model, Full(N), oracle=oracle),
        records(BCE),
        BCE,
        steps=3,
        progress=False,
    )
    assert len(seen) == 3 + (name == "weights")  # which are tried once before


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("dressed", [False, True], ids=["bare", "as the library's"])
@pytest.mark.parametrize("late", [False, True], ids=["in the class", "put there later"])
def test_a_step_of_a_subclass_is_called_after_a_backward(
    dressed: bool, late: bool, monkeypatch: Any
) -> None:
    def own(self: Any, *args: Any, **options: Any) -> Any:
        seen.append(self.outstanding_rows)
        return dp.PrivateOptimizer.step(self, *args, **options)

    def of(kind: type[dp.PrivateOptimizer]) -> Any:
        model = linear()
        parts = {"oracle": dp.oracles.Clipped(0.7, 0.5, N), "rule": dp.rules.SGD()}
        return model, kind(model.parameters(), 0.3, design=Full(N), **parts)

    seen: list[int] = []
    step = functools.wraps(dp.PrivateOptimizer.step)(own) if dressed else own
    kind = type("Mine", (dp.PrivateOptimizer,), {} if late else {"step": step})
    if late:
        of(kind)  # torch puts a function of its own around the step of a class with objects
        kind.step = step
    monkeypatch.setattr(module.ClosedForm, "batches", None)
    model, optimizer = of(kind)
    dp.fit(model, optimizer, records(BCE), BCE, steps=3, progress=False)
    assert seen == [N] * 3
    model, optimizer = of(type("Same", (dp.PrivateOptimizer,), {}))
    with pytest.raises(TypeError, match="not callable"):
        dp.fit(model, optimizer, records(BCE), BCE, steps=3, progress=False)


def test_hooks_of_the_optimizer_and_schedulers_see_each_step_of_a_fit_in_closed_form() -> None:
    """A schedule in a post-hook is how a rate is lowered within fit; steps past `step()` would not be counted."""
    model = linear()
    optimizer, calls = optimizer_of(model, Full(N), average="uniform"), []
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0, total_iters=1)
    optimizer.register_step_pre_hook(
        lambda opt, args, kwargs: calls.append((opt.steps, args[1:], kwargs))
    )
    optimizer.register_step_post_hook(lambda opt, args, kwargs: calls.append(opt.steps))
    optimizer.register_step_post_hook(lambda *_: scheduler.step())
    optimizer.register_step_post_hook(lambda *_: calls.append(model.weight.grad is not None))
    dp.fit(model, optimizer, records(BCE), BCE, steps=3, progress=False)
    assert calls == [(0, (), {}), 1, True, (1, (), {}), 2, True, (2, (), {}), 3, True]
    assert scheduler.last_epoch == 3


def test_a_profiler_sees_the_steps_of_a_fit_in_closed_form() -> None:
    model = linear()
    optimizer = optimizer_of(model, Full(N))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        dp.fit(model, optimizer, records(BCE), BCE, steps=3, progress=False)
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts[f"Optimizer.step#{type(optimizer).__name__}.step"] == 3


@pytest.mark.cases(1, 1)
def test_hooks_of_all_optimizers_are_called_by_fit_in_closed_form() -> None:
    calls: list[int] = []
    handles = [
        torch_optimizer.register_optimizer_step_pre_hook(
            lambda opt, args, kwargs: calls.append(opt.steps)
        ),
        torch_optimizer.register_optimizer_step_post_hook(
            lambda opt, args, kwargs: calls.append(opt.steps)
        ),
    ]
    model = linear()
    optimizer = optimizer_of(model, Full(N))
    try:
        dp.fit(model, optimizer, records(BCE), BCE, steps=1, progress=False)
        handles.pop(0).remove()
        other = linear()
        dp.fit(other, optimizer_of(other, Full(N)), records(BCE), BCE, steps=1, progress=False)
    finally:
        for handle in handles:
            handle.remove()
    assert calls == [0, 1, 1]


@pytest.mark.cases(1, 1)
def test_a_hook_that_steps_itself_uses_given_rows_once() -> None:
    model = linear()
    optimizer, entered = optimizer_of(model, Full(N)), []

    def step_first(opt: Any, args: Any, kwargs: Any) -> None:
        entered.append(opt.steps)
        if len(entered) == 1:
            opt.step()

    optimizer.register_step_pre_hook(step_first)
    with pytest.raises(SequenceError, match=r"outstanding|batch"):
        dp.fit(model, optimizer, records(BCE), BCE, steps=3, progress=False)
    assert (optimizer.steps, len(optimizer.accountant)) == (1, 1)


def taken(model: nn.Module, loss: Any, dataset: Dataset[Any], **loader: Any) -> bool:
    optimizer = optimizer_of(model, Full(len(dataset)))  # type: ignore[arg-type]
    return (
        closed_form(
            model, list(model.parameters()), loss, dataset, optimizer.loader(dataset, **loader)
        )
        is not None
    )


@pytest.mark.cases(1, 1)
def test_parameters_in_another_order_are_left_to_the_ordinary_path() -> None:
    model = dp.attach(linear())
    loader = optimizer_of(model, Full(N)).loader(records(BCE))
    assert closed_form(model, [model.bias, model.weight], BCE, records(BCE), loader) is None
    model = linear()
    optimizer = dp.PrivateOptimizer(
        [model.bias, model.weight],
        0.3,
        design=Full(N),
        oracle=dp.oracles.Clipped(0.7, 0.5, N),
        rule=dp.rules.SGD(),
        adjacency="replace_one",
    )
    assert dp.fit(model, optimizer, records(BCE), BCE, steps=2, progress=False) is model


def test_a_model_or_a_loss_that_is_called_in_another_way_is_left_to_the_ordinary_path() -> None:
    model, loss = dp.attach(linear()), nn.BCEWithLogitsLoss()
    model.forward = lambda input: input.sum(1, keepdim=True)  # type: ignore[method-assign]
    assert not taken(model, loss, records(BCE))
    hooked_loss, own_loss = nn.BCEWithLogitsLoss(), nn.BCEWithLogitsLoss()
    hooked_loss.register_forward_hook(lambda module, args, output: 2 * output)
    own_loss.forward = lambda output, target: (output - target).mean()  # type: ignore[method-assign]

    class Twice(dp.losses.Logistic):
        def __call__(self, output: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
            return 2 * super().__call__(output, target, reduction)

    for other in (hooked_loss, own_loss, Twice()):
        assert not taken(dp.attach(linear()), other, records(BCE))
    handle = torch.nn.modules.module.register_module_forward_hook(
        lambda module, args, output: output
    )
    try:
        assert not taken(dp.attach(linear()), loss, records(BCE))
    finally:
        handle.remove()
    assert taken(dp.attach(linear()), loss, records(BCE))


@pytest.mark.parametrize("name", LOSSES)
def test_linear_models_with_known_losses_are_taken(name: str) -> None:
    loss, outputs = LOSSES[name]
    assert taken(dp.attach(linear(outputs)), loss, records(loss))


def hooked() -> nn.Linear:
    model = linear()
    model.register_forward_hook(lambda module, args, output: 2 * output)
    return model


class Own(nn.Linear):
    """Another forward."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).exp()


BCE = nn.BCEWithLogitsLoss()
OTHERS: dict[str, Callable[[], tuple[nn.Module, Any, Dataset[Any]]]] = {
    "a hook": lambda: (hooked(), BCE, records(BCE)),
    "a subclass": lambda: (Own(D, 1), BCE, records(BCE)),
    "more layers": lambda: (nn.Sequential(linear()), BCE, records(BCE)),
    "a function": lambda: (linear(), lambda a, b: BCE(a, b), records(BCE)),
    "a weighted loss": lambda: (
        linear(),
        nn.BCEWithLogitsLoss(pos_weight=torch.ones(1)),
        records(BCE),
    ),
    "a smoothed loss": lambda: (
        linear(3),
        nn.CrossEntropyLoss(label_smoothing=0.1),
        records(nn.CrossEntropyLoss()),
    ),
    "another reduction": lambda: (linear(), nn.BCEWithLogitsLoss(reduction="sum"), records(BCE)),
    "targets (n,)": lambda: (linear(), BCE, TensorDataset(torch.zeros(N, D), torch.zeros(N))),
    "data of another dtype": lambda: (linear(), BCE, records(BCE, dtype=torch.float64)),
    "data not in memory": lambda: (linear(), BCE, Passed(records(BCE))),
    "sequences": lambda: (
        linear(),
        BCE,
        TensorDataset(torch.zeros(N, 2, D), torch.zeros(N, 2, 1)),
    ),
    "another ignored class": lambda: (
        linear(3),
        nn.CrossEntropyLoss(ignore_index=0),
        records(nn.CrossEntropyLoss()),
    ),
    "an ignored class": lambda: (
        linear(3),
        nn.CrossEntropyLoss(),
        TensorDataset(torch.zeros(N, D), torch.full((N,), -100)),
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_everything_else_is_left_to_the_ordinary_path(name: str) -> None:
    model, loss, dataset = OTHERS[name]()
    assert not taken(dp.attach(model), loss, dataset)


def test_a_collate_function_is_left_to_the_ordinary_path() -> None:
    assert not taken(dp.attach(linear()), BCE, records(BCE), collate_fn=lambda items: items)


def neighbors(x: Tensor) -> Iterator[tuple[Tensor, str]]:
    """Yields the features with one record changed, and the relation."""
    for value in (1e6, -1e-6, math.nan, math.inf, 0.0):
        changed = x.clone()
        changed[3] = value
        yield changed, "replace_one"
    yield torch.cat([x[:3], x[4:]]), "add_remove"
    yield torch.cat([x, torch.full((1, D), 1e8)]), "add_remove"


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_no_record_moves_a_step_by_more_than_the_sensitivity(scale: float) -> None:
    def moved(features: Tensor) -> tuple[Tensor, Any]:
        model = linear(dtype=torch.float64)
        optimizer = optimizer_of(
            model,
            Full(N),
            noise=0.0,
            adjacency="add_remove",
            oracle=dp.oracles.Clipped(0.7, 0.0, N),
        )
        data = TensorDataset(
            features.double(), torch.ones(len(features), 1, dtype=torch.float64)
        )
        dp.fit(model, optimizer, data, BCE, steps=1, progress=False)
        return torch.cat(
            [p.detach().flatten() for p in model.parameters()]
        ) / 0.3, optimizer.oracle

    x = torch.randn(N, D, generator=torch.Generator().manual_seed(4)) * scale
    start, oracle = moved(x)
    distances = []
    for changed, relation in neighbors(x):
        distances.append(
            float((moved(changed)[0] - start).norm()) / oracle.sensitivity(relation)
        )
    assert max(distances) <= 1 + 1e-9
    assert max(distances) > (0.4 if scale >= 1 else 0.0)


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("physical", [None, 7])
@pytest.mark.parametrize("where", ["features", "label"])
def test_a_record_that_is_not_finite_is_left_out_of_a_fused_fit(
    bad: float, physical: int | None, where: str
) -> None:
    loss, (features, labels) = dp.losses.Logistic(), records(dp.losses.Logistic()).tensors

    def trained(x: Tensor, y: Tensor) -> Tensor:
        model = linear()
        optimizer = optimizer_of(model, Full(N), noise=0.0)
        dp.fit(
            model,
            optimizer,
            TensorDataset(x, y),
            loss,
            steps=4,
            progress=False,
            physical_batch_size=physical,
        )
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    x, y, none = features.clone(), labels.clone(), labels.clone()
    (x if where == "features" else y)[7, 0] = bad
    none[7] = math.nan  # a null record
    torch.testing.assert_close(trained(x, y), trained(features, none), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["Logistic", "Huber", "BCEWithLogitsLoss", "MSELoss"])
def test_targets_that_are_a_column_of_a_table_are_those_of_their_records(name: str) -> None:
    loss = LOSSES[name][0]
    features, targets = records(loss).tensors
    table = torch.cat([features, targets, 100.0 + features], dim=1)

    def trained(column: Tensor) -> Tensor:
        model = linear()
        dp.fit(model, optimizer_of(model, Full(N), noise=0.0), TensorDataset(features, column), loss, steps=3,
               progress=False)  # fmt: skip
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    assert not table[:, D : D + 1].is_contiguous()
    assert torch.equal(trained(table[:, D : D + 1]), trained(targets))


def test_empty_draws_are_steps_of_noise() -> None:
    model = linear()
    optimizer = optimizer_of(model, Poisson(1, 10**6), adjacency="add_remove")
    before = model.weight.detach().clone()
    dp.fit(model, optimizer, records(BCE), BCE, steps=5, progress=False)
    assert optimizer.steps == 5
    assert not torch.equal(model.weight, before)


def test_no_oracle_is_shown_the_rows_of_an_empty_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[int] = []
    monkeypatch.setattr(
        dp.oracles.Clipped, "observe", lambda self, rows, users=None: shown.append(len(rows))
    )
    model = linear()
    optimizer = optimizer_of(model, Poisson(1, 10**6), adjacency="add_remove")
    dp.fit(model, optimizer, records(BCE), BCE, steps=5, progress=False)
    assert optimizer.steps == 5
    assert 0 not in shown


def test_the_data_are_not_written_to_and_no_gradient_is_left() -> None:
    dataset = records(BCE)
    before = [t.clone() for t in dataset.tensors]
    model = linear()
    dp.fit(model, optimizer_of(model, Full(N)), dataset, BCE, steps=3, progress=False)
    for old, new in zip(before, dataset.tensors, strict=True):
        assert torch.equal(old, new)
    assert torch.is_grad_enabled()
    assert model.weight.requires_grad


def test_a_budget_that_is_used_up_ends_a_run_in_closed_form_as_any_other() -> None:
    model = linear()
    budget = dp.Budget(1.0, 1e-3)
    plan = dp.ClippedSGD.plan(n=N, budget=budget, clip=0.5, steps=4, sampling="full", lr=0.1)
    optimizer = dp.ClippedSGD(model.parameters(), plan)
    dp.fit(model, optimizer, records(BCE), BCE, progress=False)
    assert optimizer.report().epsilon == pytest.approx(1.0, rel=1e-3)
    with pytest.raises(dp.errors.SequenceError, match="finalized"):
        dp.fit(model, optimizer, records(BCE), BCE, progress=False)


@pytest.mark.cases(1, 1)
def test_an_interrupted_run_keeps_its_steps_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    model = linear()
    optimizer = optimizer_of(model, Full(N))
    release, calls = optimizer.oracle.release, itertools.count()

    def interrupted(generator: torch.Generator) -> Any:
        if next(calls) == 2:
            raise KeyboardInterrupt
        return release(generator)

    monkeypatch.setitem(optimizer.oracle.__dict__, "release", interrupted)
    with (
        pytest.warns(UtilityWarning, match="step 3 was charged and did not end"),
        pytest.raises(KeyboardInterrupt),
    ):
        dp.fit(model, optimizer, records(BCE), BCE, steps=5, progress=False)
    assert optimizer.steps == 3  # the third is lost: it was charged
    assert len(optimizer.accountant) == 3  # before the noise
    assert torch.is_grad_enabled()
    dp.fit(model, optimizer, records(BCE), BCE, steps=5, progress=False)
    assert optimizer.steps == 8


def test_whole_draws_are_shared_only_with_who_reads() -> None:
    data = TensorDataset(torch.zeros(N, D), torch.zeros(N, 1))
    loader = optimizer_of(dp.attach(linear()), Full(N)).loader(data, steps=1)
    assert isinstance(loader, PrivateLoader)
    [batch] = loader.read_only(data.tensors)
    assert batch[0] is data.tensors[0]
    order = torch.arange(N, dtype=torch.float32)[:, None]
    loader = optimizer_of(dp.attach(linear()), Shuffled(N, N)).loader(data, steps=1)
    [[shuffled]] = loader.read_only([order])
    assert not torch.equal(shuffled, order)
    assert torch.equal(shuffled.sort(dim=0).values, order)
    loader = optimizer_of(dp.attach(linear()), Full(N)).loader(data, steps=1)
    [batch] = loader
    assert batch[0].data_ptr() != data.tensors[0].data_ptr()


def test_given_rows_are_refused_beside_those_of_a_backward() -> None:
    """Else the rows of this draw would wait, and be taken for those of the next one."""
    model, dataset = dp.attach(linear()), records(BCE)
    optimizer = optimizer_of(model, Fixed(20, N))
    loader = optimizer.loader(dataset, steps=2)
    form = closed_form(model, list(model.parameters()), BCE, dataset, loader)
    assert form is not None
    batches = form.batches(loader)
    with torch.no_grad():
        rows = next(batches)
    BCE(model(dataset.tensors[0][:20]), dataset.tensors[1][:20]).backward()
    with pytest.raises(SequenceError, match="rows of a backward are waiting"):
        optimizer.step_on(rows)
    assert len(optimizer.accountant) == optimizer.steps == 0
    with torch.no_grad():
        optimizer.step_on(next(form.batches(loader)))
    assert len(optimizer.accountant) == optimizer.steps == 1


def row_of(others: int, oracle: type[dp.oracles.Clipped], d: int = 300) -> list[Tensor]:
    """Returns the norm and the slope of one record as an oracle of one's own sees them, and its row, in a fit."""
    generator = torch.Generator().manual_seed(others)
    features = torch.randn(others + 1, d, generator=generator)
    features[others // 2] = torch.linspace(-1.0, 1.1, d)
    seen: list[Tensor] = []

    class Looks(oracle):  # type: ignore[misc, valid-type]
        def observe(self, rows: Any, users: Any = None) -> None:
            one = rows.blocks[0].select(torch.tensor([others // 2]))
            seen.extend(
                [
                    rows.norms()[others // 2],
                    one._factored().backprops[0, 0],
                    one.clipped_sum(0.5, 1.0),
                ]
            )
            super().observe(rows, users)

    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = nn.Linear(d, 1)
    n = others + 1
    data = TensorDataset(features, torch.ones(n, 1))
    looks = optimizer_of(model, Full(n), oracle=Looks(0.7, 0.5, n))
    dp.fit(model, looks, data, BCE, steps=1, progress=False)
    return seen


def test_rows_of_a_fit_in_c_are_the_same_beside_any_others(where: str) -> None:
    """Norm, slope and clipped row, to the last bit: torch's products round by the number of rows."""
    if where != "C":
        pytest.skip("rows in torch stand in blocks of one size")
    alone = row_of(0, dp.oracles.Clipped)
    for others in (1, 2, 3, 4, 15, 31, 64, 200, 999):
        for mine, theirs in zip(row_of(others, dp.oracles.Clipped), alone, strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.cases(1, 1)
def test_a_fit_in_c_draws_no_places_and_a_draw_that_comes_again_has_one_set_of_them(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, dataset = linear(), records(BCE)
    optimizer = optimizer_of(model, Poisson(20, N))
    monkeypatch.setitem(optimizer.oracle.__dict__, "observe", lambda rows, users: 1 / 0)
    drawn: list[int] = []
    places = loader_module.Slots.places
    monkeypatch.setattr(
        loader_module.Slots,
        "places",
        lambda self, units: drawn.append(units) or places(self, units),
    )
    with pytest.raises(ZeroDivisionError):
        dp.fit(model, optimizer, dataset, BCE, steps=1, progress=False, isolation="slots")
    assert len(drawn) == (0 if where == "C" else 1)
    found = []
    for _ in range(3):  # nobody chooses places by having them drawn anew
        [features, _] = next(iter(optimizer.loader(dataset, steps=1, resume=True)))
        found.append(features)
        optimizer.discard()
    assert len(drawn) == 1
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
