"""The first step of an attached model finds records that reach each other, on made-up records, and changes nothing.

It is the default of `attach`: in a loop of one's own nothing else stands between a coupled loss and the noise.
"""

from __future__ import annotations

import copy
import gc
import io
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from opacus.layers import DPLSTM, DPMultiheadAttention
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.data import TensorDataset

import torch_dpsco as dp
from torch_dpsco import acts, trial
from torch_dpsco.diagnosis.probe import Evidence
from torch_dpsco.errors import PrivacyError, SequenceError
from torch_dpsco.rows import GradBatch, clear_rows, first_step
from torch_dpsco.rows.attach import first_step_of
from torch_dpsco.trial import loss as loss_trace

B = 9
Loss = Callable[[Tensor, Tensor], Tensor]
CHECKED = (
    "checked at the first step on made-up records, some of them far out: none reaches another"
)

EARLY_DYNAMO = pytest.mark.skipif(
    torch.__version__.startswith("2.6."), reason="torch 2.6 compiles no attached model"
)
LOOKED_AT = (
    CHECKED + "; what cannot be told to be a record's was taken for a constant"
)  # a loss with targets


def dropped(out: Tensor, y: Tensor) -> Tensor:
    losses = (out - y).square().sum(1)
    return (losses * (losses < 5 * losses.median())).sum()


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "softmax over the batch": lambda out, y: -(out.softmax(0) * y).sum(),
    "by the largest": lambda out, y: (out / out.abs().max() - y).square().sum(),
    "by the largest, if it is large": lambda out, y: (
        (out / out.abs().max().clamp(min=50) - y).square().sum()
    ),
    "outliers dropped by a median": dropped,
    "centered": lambda out, y: ((out - out.mean(0)) * y).sum(),
    "a column against a row": lambda out, y: (out - y[:, 0]).square().sum(),
    "a row of targets": lambda out, y: functional.mse_loss(out, y[:, 0], reduction="sum"),
    "logsumexp": lambda out, y: (out - y).square().logsumexp(0).sum(),
    "a root of the mean": lambda out, y: (out - y).square().mean().sqrt(),
    "weights of classes": lambda out, y: (
        3
        * functional.cross_entropy(  # not "mean" for its own
            torch.cat([out, -out], 1), (y[:, 0] > 0).long(), weight=torch.tensor([1.0, 2.0])
        )
    ),
    "before per_record": lambda out, y: dp.per_record(nn.MSELoss, reduction="sum")(
        out.softmax(0), y
    ),
    "beside per_record": lambda out, y: (
        dp.per_record(nn.MSELoss, reduction="sum")(out, y) + out.std(0).sum()
    ),
}
SOUND: dict[str, Loss] = {
    "mse": nn.MSELoss(reduction="sum"),
    "bce": lambda out, y: nn.BCEWithLogitsLoss(reduction="sum")(out, (y > 0).float()),
    "classes": lambda out, y: functional.cross_entropy(
        torch.cat([out, -out], 1), (y[:, 0] > 0).long(), reduction="sum"
    ),
    "logistic": lambda out, y: dp.losses.Logistic()(out, y.sign(), reduction="sum"),
    "a sum": lambda out, y: (out - y).abs().sum(),
    "in place": lambda out, y: (out - y).square_().clamp_(max=3).mean(),
    "in place on outputs": lambda out, y: out.sub_(y).square().sum(),
    "masked within records": lambda out, y: ((out - y) * (y > 0)).square().sum(),
    "weights of records": lambda out, y: nn.BCEWithLogitsLoss(weight=y.abs(), reduction="sum")(
        out, (y > 0).float()
    ),
    "picked by numbers": lambda out, y: (
        -torch.cat([out, -out], 1)[torch.arange(B), (y[:, 0] > 0).long()].sum()
    ),
    "picked by a gather": lambda out, y: (
        -torch.cat([out, -out], 1).gather(1, (y > 0).long()).sum()
    ),
    "picked by a mask": lambda out, y: out[y[:, 0] > 0].square().sum(),
    "picked in another order": lambda out, y: (
        (out[y[:, 0].argsort()] - y[y[:, 0].argsort()]).square().sum()
    ),
    "a per_record loss scaled": lambda out, y: (
        3 * dp.per_record(nn.MSELoss, reduction="sum")(out, y)
    ),
}
MODELS: dict[str, Callable[[Tensor], Tensor]] = {
    "by the largest": lambda x: x / x.abs().max(),
    "by the largest, if it is large": lambda x: x / x.abs().max().clamp(min=50),
    "centered": lambda x: x - x.mean(0),
    "by the median": lambda x: x * (x < 9 * x.median()),
    "softmax over the batch": lambda x: x.softmax(0),
    "one record lower": lambda x: x + 1e-3 * x.roll(1, 0),
}


class Model(nn.Module):
    def __init__(self, features: Callable[..., Any] = lambda x: x, **layers: nn.Module) -> None:
        super().__init__()
        self.features, self.layer, self.calls = features, nn.Linear(3, 1), 0
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(self.features(x))


class Wired(nn.Module):
    """A model of any layers, wired by a function."""

    def __init__(self, wire: Callable[..., Any], **layers: nn.Module) -> None:
        super().__init__()
        self.wire = wire
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.wire(self, *args, **kwargs)


class Largest(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / x.abs().max().clamp(min=50)


def step(loss: Any, model: nn.Module | None = None, scale: float = 1.0) -> nn.Module:
    model = dp.attach(Model() if model is None else model, loss_reduction="sum")
    loss(model(scale * torch.randn(B, 3)), scale * torch.randn(B, 1)).backward()
    return model


def verdicts(model: nn.Module) -> tuple[str, str]:
    found = first_step_of(model).verdicts
    return found["model"], found["loss"]


# -- what is found ----------------------------------------------------------------------------------------------------


@pytest.mark.cases(9, 3)
@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("name", list(LOSSES))
def test_records_that_reach_each_other_are_found_at_the_first_step(name: str) -> None:
    with pytest.raises(PrivacyError, match=r"in the loss .*\(with .*dp.per_record"):
        step(LOSSES[name])


@pytest.mark.parametrize("name", list(MODELS))
def test_a_model_that_couples_records_is_found_at_the_first_step(name: str) -> None:
    with pytest.raises(
        PrivacyError,
        match=r"in the model \(with .*functions of one record",
    ):
        step(nn.MSELoss(reduction="sum"), Model(MODELS[name]))


def test_hooks_of_the_model_are_a_part_of_it() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    model[0].register_forward_hook(lambda module, args, out: out - out.mean(0))
    with pytest.raises(PrivacyError, match="in the model"):
        step(nn.MSELoss(reduction="sum"), model)


def test_integers_and_times_are_looked_at() -> None:
    tokens = Wired(
        lambda m, i: m.layer(m.table(i).mean(1).softmax(0)),
        table=nn.Embedding(50, 4),
        layer=nn.Linear(4, 1),
    )
    with pytest.raises(PrivacyError, match=r"in the model .*another integer"):
        dp.attach(tokens)(torch.randint(0, 50, (B, 6)))
    times = Wired(lambda m, x: m.layer(m.lstm(x)[0]), lstm=DPLSTM(3, 5), layer=nn.Linear(5, 2))
    dp.attach(times, batch_first=False)
    with pytest.raises(PrivacyError, match="in the loss"):
        times(torch.randn(4, B, 3)).softmax(1).square().mean().backward()


@pytest.mark.parametrize("rows", ["auto", "dense"])
def test_all_kinds_of_rows_are_looked_at(rows: str) -> None:
    for mix in (False, True):
        model = dp.attach(nn.Linear(3, 2), rows=rows)
        out = model(torch.randn(B, 3))
        loss = functional.cross_entropy(out.softmax(0) if mix else out, torch.zeros(B).long())
        if mix:
            with pytest.raises(PrivacyError, match="in the loss"):
                loss.backward()
        else:
            loss.backward()
            assert verdicts(model) == (CHECKED, LOOKED_AT)


def test_a_coupled_model_or_loss_is_refused_again_and_again() -> None:
    model = dp.attach(Model(MODELS["centered"]))
    for _ in range(2):
        with pytest.raises(PrivacyError, match="in the model"):
            model(torch.randn(B, 3))
    assert verdicts(model)[0] == "records REACH each other"
    model = dp.attach(Model())
    for _ in range(2):
        loss = model(torch.randn(B, 3)).softmax(0).square().mean()
        for _ in range(2):
            with pytest.raises(PrivacyError, match="in the loss"):
                loss.backward()
        assert all(p.grad is None for p in model.parameters())


def test_a_release_follows_no_coupled_loss() -> None:
    data = TensorDataset(torch.randn(40, 3), torch.randn(40, 1))
    model = dp.attach(nn.Linear(3, 1))
    opt = optimizer_of(model)
    x, y = next(iter(opt.loader(data, steps=2)))
    with pytest.raises(PrivacyError):
        LOSSES["centered"](model(x), y).backward()
    with pytest.raises(SequenceError):
        opt.step()
    assert opt.steps == len(opt.accountant) == 0


@pytest.mark.slow
def test_make_private_leaves_model_and_loss_to_the_first_step() -> None:
    data = TensorDataset(torch.randn(64, 3), torch.ones(64, 1))
    model = nn.Linear(3, 1)
    loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True)
    problem, budget = dp.losses.Logistic().problem(bound_x=2.0), dp.Budget(1.0, 1e-3)
    model, opt, loader = dp.make_private(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        loader,
        problem=problem,
        budget=budget,
        n=64,
        epochs=1,
    )
    said = " ".join(str(opt.report()).split())
    assert "in the model: not checked, no training forward of a batch was seen" in said
    assert "in the loss: not checked, no loss.backward() of a batch was seen" in said
    x, y = next(batch for batch in loader if len(batch[0]) > 1)
    with pytest.raises(PrivacyError, match="in the loss"):
        LOSSES["centered"](model(x), y).backward()


def check_that_couplings_are_found() -> None:
    cases = [(name, loss, None) for name, loss in LOSSES.items()]
    cases += [
        (name, nn.MSELoss(reduction="sum"), Model(features)) for name, features in MODELS.items()
    ]
    missed = []
    for name, loss, model in cases:
        try:
            step(loss, model)
        except PrivacyError:
            continue
        missed.append(name)
    assert missed == []


def only(*kinds: str) -> Callable[..., Any]:
    """Returns variants of records of some kinds only."""
    variants = trial.SyntheticBatches.variants
    return lambda self: (variant for variant in variants(self) if variant[0] in kinds)


MUTATIONS: dict[str, tuple[Any, str, Any]] = {
    "nothing is ever different": (trial, "changed", lambda before, after: 0),
    "no large records": (
        trial.SyntheticBatches,
        "variants",
        only("a record 1000 times as small", "another record", "a record with another target"),
    ),
    "no other targets": (
        trial.SyntheticBatches,
        "variants",
        only(
            "a record 1000 times as small",
            "a record 10,000 times as large",
            "a record of NaN",
            "another record",
        ),
    ),
    "losses are not traced": (first_step, "trace_outputs", lambda first, output, dims: output),
    "models are not called": (first_step.FirstStep, "_look_at", lambda *args: None),
    "gradients are not compared": (
        loss_trace.RepeatedLoss,
        "_gradients",
        lambda self, made: [trial.rows_first(t, 0) for t in made[: len(self._outputs)]],
    ),
}


@pytest.mark.cases(0, 1)
@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("name", list(MUTATIONS))
def test_a_check_that_looks_at_less_is_caught(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_that_couplings_are_found()
    monkeypatch.setattr(*MUTATIONS[name])
    with pytest.raises(AssertionError):
        check_that_couplings_are_found()


# -- what is sound ----------------------------------------------------------------------------------------------------


@pytest.mark.cases(8, 4)
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6, float("nan")])
@pytest.mark.parametrize("name", list(SOUND))
def test_sound_losses_pass_whatever_the_records_are(name: str, scale: float) -> None:
    assert verdicts(step(SOUND[name], scale=scale))[1].startswith(CHECKED)


def steps_back(m: Wired, x: Tensor, lengths: Tensor) -> Tensor:
    packed = pack_padded_sequence(x, lengths, batch_first=True)
    return m.layer(pad_packed_sequence(m.lstm(packed)[0], batch_first=True)[0][:, 0])


HEALTHY: dict[
    str, tuple[Callable[[], nn.Module], Callable[[], tuple[Any, ...]], dict[str, Any]]
] = {
    "cnn": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.ReLU(), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(4 * 36, 3)
        ),
        lambda: (torch.randn(B, 1, 8, 8),),
        {},
    ),
    "lstm": (
        lambda: Wired(
            lambda m, x: m.layer(m.lstm(x)[0][:, -1]),
            lstm=DPLSTM(3, 5, batch_first=True),
            layer=nn.Linear(5, 2),
        ),
        lambda: (torch.randn(B, 4, 3),),
        {},
    ),
    "lstm, times first, as many as records": (
        lambda: Wired(
            lambda m, x: m.layer(m.lstm(x)[0])[-1], lstm=DPLSTM(3, 5), layer=nn.Linear(5, 2)
        ),
        lambda: (torch.randn(B, B, 3),),
        {"batch_first": False},
    ),
    "lengths": (
        lambda: Wired(steps_back, lstm=DPLSTM(3, 5, batch_first=True), layer=nn.Linear(5, 2)),
        lambda: (torch.randn(3, 4, 3), torch.tensor([4, 3, 1])),
        {},
    ),
    "attention": (
        lambda: Wired(
            lambda m, x: m.layer(m.attention(x, x, x)[0].mean(1)),
            attention=DPMultiheadAttention(4, 2, batch_first=True),
            layer=nn.Linear(4, 2),
        ),
        lambda: (torch.randn(B, 5, 4),),
        {},
    ),
    "tokens, and kinds of which there is one": (
        lambda: Wired(
            lambda m, i, k: m.layer((m.table(i) + m.kinds(k)).mean(1)),
            table=nn.Embedding(50, 4),
            kinds=nn.Embedding(1, 4),
            layer=nn.Linear(4, 2),
        ),
        lambda: (torch.randint(0, 50, (B, 6)), torch.zeros(B, 6, dtype=torch.long)),
        {},
    ),
    "a mask of all": (
        lambda: Wired(
            lambda m, x, mask: m.layer(
                x * x.sum(-1).masked_fill(mask, -torch.inf).softmax(1)[..., None]
            ).sum(1),
            layer=nn.Linear(3, 2),
        ),
        lambda: (torch.randn(B, 6, 3), torch.rand(B, 6) > 2),
        {},
    ),
    "dropout": (
        lambda: nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 2)),
        lambda: (torch.randn(B, 3),),
        {},
    ),
    "a constant first": (
        lambda: Wired(lambda m, c, x: m.layer(torch.cdist(x, c)), layer=nn.Linear(12, 2)),
        lambda: (torch.randn(12, 3), torch.randn(B, 3)),
        {},
    ),
    "noise of numpy": (
        lambda: Wired(
            lambda m, x: m.layer(x + float(np.random.standard_normal())),  # noqa: NPY002
            layer=nn.Linear(3, 2),
        ),
        lambda: (torch.randn(B, 3),),
        {},
    ),
    "as many classes as records": (lambda: nn.Linear(3, B), lambda: (torch.randn(B, 3),), {}),
    "a dictionary": (
        lambda: Wired(lambda m, batch, n: m.layer(batch["x"])[..., :n], layer=nn.Linear(3, 2)),
        lambda: ({"x": torch.randn(B, 3), "id": None}, 2),
        {},
    ),
    "half precision": (
        lambda: nn.Linear(3, 2, dtype=torch.bfloat16),
        lambda: (torch.randn(B, 3, dtype=torch.bfloat16),),
        {"loss_reduction": "sum"},
    ),
}


@pytest.mark.cases(6, 3)
@pytest.mark.parametrize("name", list(HEALTHY))
def test_healthy_models_pass(name: str) -> None:
    build, inputs, options = HEALTHY[name]
    model = dp.attach(build(), **options)
    out = model(*inputs())
    weight = torch.rand(out.shape[1], dtype=out.dtype)  # of classes, as many as there are
    loss = functional.cross_entropy(
        out, torch.zeros(len(out), dtype=torch.long), weight=weight, reduction="sum"
    )
    (loss if options.get("loss_reduction") == "sum" else loss / len(out)).backward()
    of_model, of_loss = verdicts(model)
    assert of_model == CHECKED
    assert of_loss.startswith(CHECKED)


@pytest.mark.cases(0, 1)
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)
@pytest.mark.parametrize(
    "what", [pytest.param("model", marks=EARLY_DYNAMO), "loss", "before attach"]
)
def test_compiled_models_and_losses_are_looked_at(what: str) -> None:
    gc.collect()  # row-free optimizers of other tests, whose hooks torch warns of
    torch._dynamo.reset()
    for features, sound in ((nn.ReLU(), True), (Largest(), False)):
        model: nn.Module = nn.Sequential(nn.Linear(3, 3), features, nn.Linear(3, 1))
        compiled = torch.compile(model, backend="eager") if what == "before attach" else model
        dp.attach(compiled)
        run = torch.compile(model, backend="eager") if what == "model" else compiled
        loss: Any = (
            torch.compile(nn.MSELoss(), backend="eager") if what == "loss" else nn.MSELoss()
        )
        for k in range(2):
            if not sound:
                with pytest.raises(PrivacyError, match="in the model"):
                    run(torch.randn(B, 3))
                continue
            loss(run(torch.randn(B, 3)), torch.randn(B, 1)).backward()
            assert verdicts(compiled) == (CHECKED, LOOKED_AT), k
            clear_rows(list(model.parameters()))
    torch._dynamo.reset()


# -- nothing is changed -----------------------------------------------------------------------------------------------


class Restless(nn.Module):
    """A model that changes whatever it can in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(3, 1), nn.Dropout(0.5)
        self.generator = torch.Generator().manual_seed(1)
        self.calls, self.log = 0, []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.log.append(len(x))
        x = (
            x
            + torch.rand(3, generator=self.generator)
            + float(np.random.random())  # noqa: NPY002
            + random.random()
        )
        return self.layer(self.drop(x))


def traces_of(check: bool, rows: str) -> list[Any]:
    torch.manual_seed(3)
    np.random.seed(3)  # noqa: NPY002
    random.seed(3)
    model = dp.attach(Restless(), loss_reduction="sum", rows=rows, check_first_step=check)
    x, y = torch.randn(B, 3), torch.randn(B, 1)
    own = torch.Generator().manual_seed(5)
    scores = model(x)
    noisy = scores * torch.bernoulli(torch.full_like(scores, 0.5), generator=own)
    functional.dropout(noisy - y, 0.5).square().sum().backward()
    params = list(model.parameters())
    versions = [p._version for p in params]
    made = GradBatch.consume(params).dense()
    noise = [
        torch.rand(3),
        torch.rand(3, generator=own),
        torch.rand(3, generator=model.generator),
    ]
    numbers = [
        float(np.random.random()),  # noqa: NPY002
        random.random(),
        model.calls,
        model.log,
        versions,
        model.training,
    ]
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    return [
        *made,
        *noise,
        *(p.detach() for p in params),
        *numbers,
        hooks,
        [p.grad for p in params],
    ]


@pytest.mark.parametrize("rows", ["auto", "dense"])
def test_the_check_leaves_model_rows_and_random_numbers_as_they_are(rows: str) -> None:
    for first, second in zip(traces_of(False, rows), traces_of(True, rows), strict=True):
        assert torch.equal(first, second) if isinstance(first, Tensor) else first == second


def test_no_buffer_of_a_layer_in_evaluation_mode_is_touched() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    model.register_buffer("scale", torch.tensor([float("nan"), 2.0]))
    step(nn.MSELoss(reduction="sum"), model)
    assert model.scale.isnan().tolist() == [True, False]
    assert model.scale._version == 0


def test_later_steps_are_not_traced() -> None:
    model = dp.attach(Model(), loss_reduction="sum")
    for k in range(3):
        out = model(torch.randn(B, 3))
        assert (type(out) is Tensor) == (k > 0)
        loss = out.square().sum()
        loss.backward()
        clear_rows(list(model.parameters()))
    assert model.calls == 3


def test_what_was_traced_is_plain_in_files_copies_and_later_sums() -> None:
    model = dp.attach(Model())
    loss = model(torch.randn(B, 3)).square().mean()
    file = io.BytesIO()
    torch.save(loss.detach(), file)
    file.seek(0)
    assert type(torch.load(file)) is type(copy.deepcopy(loss.detach())) is Tensor
    assert repr(loss.detach()).startswith("tensor(")
    loss.backward()
    total = torch.zeros(()) + loss.detach()
    assert type(total) is type(total * 2) is Tensor
    assert (total * 2 / 2).item() == loss.item()
    with pytest.raises(RuntimeError, match="graph leaves"):
        copy.deepcopy(loss)


def test_neither_the_model_nor_a_file_of_it_holds_records() -> None:
    model = dp.attach(Model())
    x = torch.full((B, 3), 123456.0)
    loss = (model(x) - x[:, :1]).square().mean()
    copied = copy.deepcopy(
        model
    )  # between forward and backward, where factored rows do not wait yet
    for one in (model, copied):
        assert not [
            v
            for v in vars(first_step_of(one)).values()
            if isinstance(v, (Tensor, loss_trace.Trace))
        ]
    loss.backward()


# -- what is not checked is said --------------------------------------------------------------------------------------


class OddError(Exception):
    """What no list of exceptions has."""


def refuse(m: Wired, x: Tensor) -> Tensor:
    if len(x) != B:
        raise OddError("not my batch")
    return m.layer(x)


RNG = np.random.default_rng(0)  # of nobody's model

UNSEEN: dict[str, tuple[Callable[..., Any], Any, str]] = {
    "refused": (refuse, torch.randn(B, 3), "not checked, made-up records raise OddError"),
    "random": (
        lambda m, x: m.layer(x + float(RNG.standard_normal())),
        torch.randn(B, 3),
        "not checked, the same made-up records give two answers",
    ),
    "a scalar": (
        lambda m, x: m.layer(x).square().mean(),
        torch.randn(B, 3),
        "not checked, made-up records give nothing that belongs to one of them",
    ),
    "an object": (
        lambda m, batch: m.layer(batch.x),
        SimpleNamespace(x=torch.randn(B, 3)),
        "not checked, its inputs are no tensors with a row for each record",
    ),
    "a list": (
        lambda m, x: m.layer(torch.stack(x)),
        [torch.randn(3) for _ in range(B)],
        "not checked, its inputs are no tensors with a row for each record",
    ),
}


@pytest.mark.parametrize("name", list(UNSEEN))
def test_a_model_that_cannot_be_looked_at_works_and_that_is_said(name: str) -> None:
    wire, inputs, reason = UNSEEN[name]
    model = dp.attach(Wired(wire, layer=nn.Linear(3, 1)))
    for _ in range(2):
        model(inputs).square().mean().backward()
        assert verdicts(model)[0] == reason
        clear_rows(list(model.parameters()))


def test_where_a_wrong_index_ends_the_process_integers_are_made_up_on_a_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(first_step, "_SAFE", ())

    large = (
        "not checked, integers are made up on the CPU, where the model is too large to be copied"
    )
    for most, known in ((100, CHECKED), (10, large)):
        monkeypatch.setattr(first_step, "_MOST_COPIED", most)
        model = Wired(
            lambda m, i: m.layer(m.table(i)).sum(1),
            table=nn.Embedding(5, 4),
            layer=nn.Linear(4, 1),
        )
        dp.attach(model)(torch.randint(0, 5, (B, 6))).square().mean().backward()
        assert verdicts(model)[0] == known


def test_a_forward_that_raises_is_not_looked_at() -> None:
    model = dp.attach(Model(lambda x: x.reshape(7, 3)))
    with pytest.raises(RuntimeError, match="shape"):
        model(torch.randn(B, 3))
    assert model.calls == 1


def test_an_index_that_may_pick_records_raises_nothing_and_is_said() -> None:
    order = torch.randperm(B)
    model = step(lambda out, y: (out.index_select(0, order) * y[order]).sum())
    assert verdicts(model)[1] == LOOKED_AT + ", an index of records for their own numbers"
    model = step(lambda out, y: (out[torch.stack([order, order], 1)] * y[order][:, None]).sum())
    assert verdicts(model)[1] == "not checked, records may be picked by an index"


def test_statistics_of_targets_alone_are_not_seen_and_that_is_said() -> None:
    model = step(lambda out, y: (out * y).sum() / y.abs().sum())
    assert verdicts(model)[1] == LOOKED_AT


def test_numbers_that_leave_torch_are_said() -> None:
    model = step(lambda out, y: (out - y).square().sum() / float((out - y).detach().abs().max()))
    assert "out of sight (['__float__'])" in verdicts(model)[1]


class _ByTheLargest(torch.autograd.Function):
    """Couples records in its backward, which no repeated operation shows."""

    @staticmethod
    def forward(ctx, scores):
        ctx.save_for_backward(scores)
        return scores.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * (ctx.saved_tensors[0].abs().max() > 3)


def _hooked(scores):
    scores.register_hook(lambda g: g / g.abs().max())
    return scores


def _untracked(scores):
    return torch.from_numpy(scores.detach().numpy().max(0)) * scores


OUT_OF_SIGHT = {"function": _ByTheLargest.apply, "hook": _hooked, "numpy": _untracked}


@pytest.mark.parametrize("name", list(OUT_OF_SIGHT))
def test_what_happens_out_of_sight_is_not_called_checked(name):
    model = dp.attach(nn.Linear(3, 1))
    OUT_OF_SIGHT[name](model(torch.randn(8, 3))).square().mean().backward()
    words = verdicts(model)[1]
    assert "out of sight" in words or words.startswith("not checked")


def test_a_gradient_given_to_backward_is_out_of_sight() -> None:
    model = dp.attach(nn.Linear(3, 1), loss_reduction="sum")
    losses = model(torch.randn(B, 3)).square().sum(1)
    losses.backward(torch.ones(B))
    assert "a gradient given to backward()" in verdicts(model)[1]


def test_another_backward_is_not_seen_and_the_next_step_is_looked_at() -> None:
    model = dp.attach(Model())
    torch.autograd.backward(model(torch.randn(B, 3)).square().mean())
    assert verdicts(model) == (CHECKED, "not checked, no loss.backward() of a batch was seen")
    clear_rows(list(model.parameters()))
    model(torch.randn(B, 3))  # nobody uses it
    with pytest.raises(PrivacyError, match="in the loss"):
        model(torch.randn(B, 3)).softmax(0).square().mean().backward()


def test_no_verdict_tells_whether_there_were_as_many_records_as_classes() -> None:
    seen = set()
    for size in (B, B + 1):
        model = dp.attach(nn.Linear(3, B))
        functional.cross_entropy(
            model(torch.randn(size, 3)), torch.zeros(size).long(), label_smoothing=0.1
        ).backward()
        seen.add(verdicts(model))
    assert seen == {(CHECKED, LOOKED_AT)}


@pytest.mark.parametrize("size", [0, 1])
def test_a_small_batch_is_followed_by_another_look_and_its_size_is_in_no_verdict(
    size: int,
) -> None:
    model = dp.attach(Model(), loss_reduction="sum")
    model(torch.randn(size, 3)).softmax(0).sum().backward()
    assert verdicts(model)[1] == verdicts(dp.attach(Model()))[1]
    clear_rows(list(model.parameters()))
    with pytest.raises(PrivacyError, match="in the loss"):
        model(torch.randn(2, 3)).softmax(0).square().sum().backward()


def test_two_forwards_of_one_loss_and_two_models_in_a_row_are_said() -> None:
    model = dp.attach(nn.Linear(3, 1))
    (model(torch.randn(B, 3)) - model(torch.randn(B, 3))).square().mean().backward()
    assert "out of sight" in verdicts(model)[1]
    encoder, decoder = dp.attach(nn.Linear(3, 4)), dp.attach(nn.Linear(4, 1))
    decoder(encoder(torch.randn(B, 3)).relu()).square().mean().backward()
    assert verdicts(decoder) == (CHECKED, CHECKED)
    assert verdicts(encoder) == (CHECKED, "not checked, no loss.backward() of a batch was seen")


def test_a_huge_loss_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_trace, "_MOST_NUMBERS", 10)
    assert (
        verdicts(step(nn.MSELoss(reduction="sum")))[1]
        == "not checked, it is of too many numbers"
    )
    monkeypatch.undo()
    monkeypatch.setattr(loss_trace, "_MOST_CALLS", 2)
    assert (
        verdicts(step(SOUND["masked within records"]))[1]
        == "not checked, it is of too many operations"
    )


# -- reductions -------------------------------------------------------------------------------------------------------

BY_RECORD = {
    "per_record": lambda reduction: dp.per_record(nn.BCEWithLogitsLoss, reduction=reduction),
    "a loss of the library": lambda reduction: (
        lambda out, y: dp.losses.Logistic()(out, y, reduction=reduction)
    ),
    "a criterion of torch": lambda reduction: nn.BCEWithLogitsLoss(reduction=reduction),
    "a function of torch": lambda reduction: (
        lambda out, y: functional.mse_loss(out, y, reduction=reduction)
    ),
}


@pytest.mark.parametrize("kind", list(BY_RECORD))
@pytest.mark.parametrize(("attached", "reduction"), [("mean", "sum"), ("sum", "mean")])
def test_a_loss_by_record_must_reduce_as_the_model_was_attached(
    kind: str, attached: str, reduction: str
) -> None:
    model = dp.attach(nn.Linear(3, 1), loss_reduction=attached)
    y, make = torch.ones(B, 1), BY_RECORD[kind]
    with pytest.raises(
        ValueError,
        match=rf"must be '{attached}', as the model was attached \(got '{reduction}'\)",
    ):
        make(reduction)(model(torch.randn(B, 3)), y).backward()
    make(attached)(model(torch.randn(B, 3)), y).backward()
    clear_rows(list(model.parameters()))
    other = make(reduction)(
        model(torch.randn(B, 3)), y
    )  # no error in the next step, once it was looked at
    other.backward()


def test_a_reduction_of_ones_own_is_left_alone() -> None:
    model = dp.attach(nn.Linear(3, 1))
    (
        dp.per_record(nn.MSELoss, reduction="sum")(model(torch.randn(B, 3)), torch.ones(B, 1))
        / B
    ).backward()
    assert verdicts(model)[1].startswith(CHECKED)
    model = dp.attach(nn.Linear(3, 1))
    dp.per_record(nn.MSELoss)(
        model(torch.randn(B, 3)), torch.ones(B, 1), reduction="none"
    ).mean().backward()
    assert verdicts(model)[1].startswith(CHECKED)


# -- what reports say -------------------------------------------------------------------------------------------------


def optimizer_of(model: nn.Module) -> dp.ClippedSGD:
    plan = dp.ClippedSGD.plan(lr=0.1, clip=1.0, noise_multiplier=2.0, n=40, sampling="full")
    return dp.ClippedSGD(model.parameters(), plan)


def said(opt: Any, part: str) -> str:
    text = " ".join(str(opt.report(1e-5)).split())
    start = text.index(f"Whether records reach each other in the {part}: ")
    return text[start:].split(": ", 1)[1].split(". ", 1)[0]


DATA = TensorDataset(torch.randn(40, 3), torch.randn(40, 1))


@pytest.mark.parametrize(
    ("loss", "known"),
    [(nn.MSELoss(), LOOKED_AT), (dp.per_record(nn.MSELoss), LOOKED_AT)],
)
def test_the_report_says_what_was_checked_before_and_after_detach(loss: Any, known: str) -> None:
    model = dp.attach(nn.Linear(3, 1))
    opt = optimizer_of(model)
    assert said(opt, "model") == "not checked, no training forward of a batch was seen"
    assert said(opt, "loss") == "not checked, no loss.backward() of a batch was seen"
    for x, y in opt.loader(DATA, steps=2):
        loss(model(x), y).backward()
        opt.step()
    assert (said(opt, "model"), said(opt, "loss")) == (CHECKED, known)
    dp.detach(model)
    assert (said(opt, "model"), said(opt, "loss")) == (CHECKED, known)


def test_the_report_says_that_the_check_is_off_or_that_nothing_is_attached() -> None:
    model = dp.attach(nn.Linear(3, 1), check_first_step=False)
    for x, y in (opt := optimizer_of(model)).loader(DATA, steps=1):
        LOSSES["centered"](model(x), y).backward()
        opt.step()
    off = "not checked, switched off by dp.attach(check_first_step=False)"
    assert {said(opt, part) for part in ("model", "loss")} == {off}
    assert {said(optimizer_of(nn.Linear(3, 1)), part) for part in ("model", "loss")} == {
        "not checked, no model is attached"
    }


@pytest.mark.cases(1, 1)
@pytest.mark.filterwarnings("ignore:compile=True")
@pytest.mark.parametrize("how", ["closed form", "attached here", "attached before", "compile"])
def test_fit_looks_once_by_its_probes_and_reports_that(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = []
    monkeypatch.setattr(first_step.FirstStep, "_look_at", lambda *args: looks.append("model"))
    monkeypatch.setattr(first_step, "trace_outputs", lambda *args: looks.append("loss"))
    model: nn.Module = (
        nn.Linear(3, 1)
        if how == "closed form"
        else nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    )
    if how == "attached before":
        dp.attach(model)
    monkeypatch.setitem(acts._KNOWN, "rows.compiled", lambda *args: "not now")
    opt = optimizer_of(model)
    dp.fit(model, opt, DATA, nn.MSELoss(), steps=2, progress=False, compile=how == "compile")
    known = "checked by the probes of dp.doctor on made-up records: none reaches another"
    assert ({said(opt, part) for part in ("model", "loss")}, looks) == ({known}, [])


def test_rows_by_record_are_looked_at_too() -> None:
    model = nn.Linear(3, 1)
    opt, rows = optimizer_of(model), dp.CompiledRows(model, nn.MSELoss(), backend=None)
    for x, y in opt.loader(DATA, steps=1):
        rows.step(opt, x, y)
    assert {said(opt, part) for part in ("model", "loss")} == {CHECKED}


def test_fit_looks_at_the_first_step_where_its_probes_saw_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Evidence, "moving", property(lambda self: False))
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    opt = optimizer_of(model)
    dp.fit(model, opt, DATA, nn.MSELoss(), steps=2, progress=False)
    assert (said(opt, "model"), said(opt, "loss")) == (CHECKED, LOOKED_AT)


def test_the_doctor_finds_what_it_finds_in_an_attached_model_and_the_first_step_looks_by_itself() -> (
    None
):
    model = dp.attach(Model(MODELS["centered"]))
    opt = optimizer_of(model)
    found = dp.doctor(model, nn.MSELoss(), opt.loader(DATA), opt)
    assert [finding.name for finding in found.critical] == ["coupled-records"]
    with pytest.raises(PrivacyError, match="in the model"):
        model(torch.randn(B, 3))
