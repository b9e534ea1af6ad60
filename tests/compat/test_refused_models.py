"""What cannot have right rows raises an error that says how to mend it, and leaves the model as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from opacus.validators import ModuleValidator
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.data import TensorDataset

import torch_dpsco as dp
from tests.compat.harness import (
    DIM,
    RECORDS,
    TIMES,
    Wired,
    items,
    numbers,
    parameter,
    private_optimizer,
    trained,
)
from torch_dpsco.errors import PrivacyError, SequenceError
from torch_dpsco.rows import GradBatch


def chain(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(*layers)


def attention(**options: Any) -> nn.Module:
    return ModuleValidator.fix(
        chain(nn.TransformerEncoderLayer(DIM, 2, 8, dropout=0.0, **options))
    )


def second_run(m: Wired, x: Tensor, scale: float = 1.0) -> Tensor:
    return m.drop(scale * (x @ m.w)) if hasattr(m, "drop") else scale * (x @ m.w)


def shard() -> nn.Module:
    layer = nn.Linear(DIM, 2)
    layer.weight._fsdp_flattened = True  # the mark of FSDP 1
    return layer


AT_ATTACH = {
    "BatchNorm": (lambda: nn.BatchNorm1d(DIM), "private_layers"),
    "InstanceNorm with statistics": (
        lambda: nn.InstanceNorm1d(DIM, track_running_stats=True),
        "private_layers",
    ),
    "MultiheadAttention": (lambda: nn.MultiheadAttention(DIM, 2), "private_layers"),
    "TransformerEncoderLayer": (lambda: nn.TransformerEncoderLayer(DIM, 2, 8), "private_layers"),
    "TransformerEncoderLayer over the batch": (attention, "batch_first=True"),
    "our TransformerEncoderLayer over the batch": (
        lambda: dp.private_layers(nn.TransformerEncoderLayer(DIM, 2, 8)),
        "batch_first=True",
    ),
    "LSTM": (lambda: nn.LSTM(DIM, 2), "private_layers"),
    "RNN": (lambda: nn.RNN(DIM, 2), "private_layers"),
    "LSTMCell": (lambda: nn.LSTMCell(DIM, 2), "private_layers"),
    "Embedding with max_norm": (lambda: nn.Embedding(5, 2, max_norm=1.0), "max_norm=None"),
    "Embedding scaled by frequency": (
        lambda: nn.Embedding(5, 2, scale_grad_by_freq=True),
        "scale_grad_by_freq=False",
    ),
    "sparse EmbeddingBag": (lambda: nn.EmbeddingBag(5, 2, sparse=True), "sparse=False"),
    "complex weights": (lambda: nn.Linear(DIM, 2, dtype=torch.complex64), "view_as_real"),
    "EmbeddingBag max": (lambda: nn.EmbeddingBag(5, 2, mode="max"), "mode='sum' or 'mean'"),
    "EmbeddingBag with padding": (
        lambda: nn.EmbeddingBag(5, 2, padding_idx=0),
        "padding_idx=None",
    ),
    "spectral_norm": (lambda: spectral_norm(nn.Linear(DIM, 2)), "without buffers"),
    "ParameterList": (
        lambda: nn.ParameterList([parameter(2)]),
        "attributes of the module that uses them",
    ),
    "dropout beside a bare parameter": (
        lambda: Wired(second_run, w=parameter(DIM, 2), drop=nn.Dropout(0.5)),
        "a module of their own",
    ),
    "a shard": (shard, "must not be sharded"),
    "DataParallel": (lambda: nn.DataParallel(nn.Linear(DIM, 2)), "the module inside"),
}


@pytest.mark.cases(29, 7)
@pytest.mark.parametrize("name", AT_ATTACH)
@pytest.mark.parametrize("rows", ["auto", "dense"])
def test_layers_without_right_rows_are_refused_by_name_and_nothing_is_left(name, rows):
    build, way_out = AT_ATTACH[name]
    model = chain(nn.Linear(DIM, DIM), chain(build()))
    before = [(type(m), set(vars(m))) for m in model.modules()]
    with pytest.raises(ValueError, match=way_out) as caught:
        dp.attach(model, rows=rows)
    assert "'1.0" in str(caught.value)
    assert [(type(m), set(vars(m))) for m in model.modules()] == before
    assert not any(
        m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in model.modules()
    )
    model[1] = nn.Linear(DIM, 1)
    dp.attach(model, rows=rows)  # and can be attached once it is mended


def run(model: nn.Module, *inputs: Any) -> GradBatch:
    leaves = model(*inputs)
    leaves.square().sum().backward()
    return GradBatch.consume(trained(model))


def x2() -> tuple[Tensor]:
    return (numbers(DIM).float(),)


def x3() -> tuple[Tensor]:
    return (numbers(TIMES + 1, DIM).float(),)


def pair_out(m: Wired, x: Tensor) -> tuple[Tensor, Tensor]:
    return x @ m.w, x


def sum_of_pair(m: Wired, x: Tensor) -> Tensor:
    first, second = m.body(x)
    return first.sum(1) + second.sum(1)


def scaled_body(m: Wired, x: Tensor) -> Tensor:
    return m.body(x, scale=torch.tensor(2.0))


def by_keyword(m: Wired, x: Tensor) -> Tensor:
    return m.body(input=x)


def two_scales(m: Wired, x: Tensor) -> Tensor:
    return m.body(x, scale=2.0) + m.body(x, scale=3.0)


def bilinear(m: Wired, x: Tensor) -> Tensor:
    return m.body(x, x)


def weight_outside(m: Wired, x: Tensor) -> Tensor:
    return x @ m.body.weight.t()


def unused(m: Wired, x: Tensor) -> Tensor:
    return m.body(x)


def positions(m: Wired, ids: Tensor) -> Tensor:
    return m.body(ids) + m.places(torch.arange(ids.shape[1]))


def all_in_one(m: Wired, ids: Tensor) -> Tensor:
    return m.body(ids.reshape(1, -1))[0].view(*ids.shape, -1)


def time_first(m: Wired, x: Tensor) -> Tensor:
    return m.body(x.transpose(0, 1))


def folded(m: Wired, x: Tensor) -> Tensor:
    return m.body(x.reshape(-1, DIM)).view(len(x), -1)


def one_by_one(m: Wired, x: Tensor) -> Tensor:
    return torch.cat([m.body(record[None]) for record in x])


def weighted_bag(m: Wired, ids: Tensor) -> Tensor:
    return m.body(ids.flatten(), torch.arange(len(ids)) * 2, torch.ones(ids.numel()))


def constant(m: Wired, x: Tensor) -> Tensor:
    return m.body(x) + m.places(torch.ones(1, DIM))


def unsorted(m: Wired, x: Tensor, lengths: Tensor) -> Tensor:
    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    return m.head(m.body(packed)[1][0][-1])


IN_TRAINING: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], str]] = {
    "bare parameter with two outputs": (
        lambda: Wired(sum_of_pair, body=Wired(pair_out, w=parameter(DIM, 2))),
        x2,
        "a module of their own",
    ),
    "bare parameter with a keyword": (
        lambda: Wired(scaled_body, body=Wired(second_run, w=parameter(DIM, 2))),
        x2,
        "by position",
    ),
    "bare parameter with two keywords": (
        lambda: Wired(two_scales, body=Wired(second_run, w=parameter(DIM, 2))),
        x2,
        "all its uses in a forward have the same",
    ),
    "Bilinear": (
        lambda: Wired(bilinear, body=nn.Bilinear(DIM, DIM, 2)),
        x2,
        "one tensor by position",
    ),
    "dense layer by keyword": (
        lambda: Wired(by_keyword, body=nn.RMSNorm(DIM)),
        x2,
        "by position",
    ),
    "weight used outside of its layer": (
        lambda: Wired(weight_outside, body=nn.Linear(DIM, 2)),
        x2,
        "outside of the layer|own module",
    ),
    "unused parameter": (
        lambda: Wired(unused, body=nn.Linear(DIM, 2), spare=nn.RMSNorm(DIM)),
        x2,
        r"requires_grad_\(False\)",
    ),
    "in-place activation of a dense output": (
        lambda: chain(nn.Linear(DIM, DIM), nn.RMSNorm(DIM), nn.ReLU(inplace=True)),
        x2,
        "inplace=False",
    ),
    "positions looked up once": (
        lambda: Wired(positions, body=nn.Embedding(5, 2), places=nn.Embedding(TIMES + 1, 2)),
        lambda: (items(TIMES + 1),),
        "expand constants",
    ),
    "items of all records in one row": (
        lambda: Wired(all_in_one, body=nn.Embedding(5, 2)),
        lambda: (items(TIMES + 1),),
        "expand constants",
    ),
    "time first": (lambda: Wired(time_first, body=nn.Linear(DIM, 2)), x3, "batch_first"),
    "time folded into the batch": (
        lambda: Wired(folded, body=nn.Linear(DIM, 2)),
        x3,
        "leave time out",
    ),
    "record by record": (
        lambda: Wired(one_by_one, body=nn.Linear(DIM, 2)),
        x2,
        "do not cut the batch up",
    ),
    "bag with weights": (
        lambda: Wired(weighted_bag, body=nn.EmbeddingBag(5, 2, mode="sum")),
        lambda: (items(2),),
        "weigh the vectors",
    ),
    "layer on a constant": (
        lambda: Wired(constant, body=nn.Linear(DIM, 2), places=nn.Linear(DIM, 2)),
        x2,
        "expand constants",
    ),
}


@pytest.mark.cases(25, 1)
@pytest.mark.parametrize("name", IN_TRAINING)
@pytest.mark.parametrize("rows", ["auto", "dense"])
def test_uses_without_right_rows_are_refused_with_a_way_out(name, rows):
    build, inputs, way_out = IN_TRAINING[name]
    model = dp.attach(build(), rows=rows)
    with pytest.raises(SequenceError, match=way_out):
        run(model, *inputs())


@pytest.mark.parametrize("rows", ["auto", "dense"])
def test_items_of_all_records_in_one_row_are_refused(rows):
    # only ids that are positions may be taken once for every record: these would move the row of record 0 alone
    model = dp.attach(Wired(all_in_one, body=nn.Embedding(9, 2)), rows=rows)
    with pytest.raises(SequenceError, match="expand constants"):
        run(model, torch.tensor([[0, 1], [2, 4], [5, 6]]))


@pytest.mark.parametrize("rows", ["auto", "dense"])
def test_private_layers_that_share_weights_are_refused_on_time_first(rows):
    model = dp.private_layers(chain(nn.LSTM(DIM, DIM), nn.LSTM(DIM, DIM)))
    model[1].hh_l0.weight = model[0].hh_l0.weight
    with pytest.raises(ValueError, match="weights of their own"):
        dp.attach(model, rows=rows, batch_first=False)


@pytest.mark.parametrize(
    ("layer", "inputs"),
    [
        (nn.Conv1d(2, 3, 3, padding=1, padding_mode="circular"), numbers(2, 5).float()),
        (nn.LayerNorm(DIM, bias=False), numbers(DIM).float()),
    ],
    ids=["circular", "bias"],
)
def test_options_that_opacus_ignores_are_refused_for_dense_rows_alone(layer, inputs):
    model = dp.attach(layer, rows="dense")
    with pytest.raises(SequenceError, match="rows='auto'"):
        model(inputs)
    dp.detach(model)
    assert len(run(dp.attach(model, loss_reduction="sum"), inputs)) == RECORDS


def test_a_layer_that_sees_no_batch_is_refused():
    # whatever the loss reduction: rows would be of times, each of them a function of all records
    for reduction in ("mean", "sum"):
        model = dp.attach(Wired(time_first, body=nn.Linear(DIM, 2)), loss_reduction=reduction)
        with pytest.raises(SequenceError, match="must be the batch"):
            model(x3()[0])


@pytest.mark.parametrize("lengths", [(1, 3, 2), (3, 2, 1)])
def test_packed_sequences_that_are_not_sorted_are_refused(lengths):
    # also those that happen to be sorted: whether training stops must not depend on the records
    model = ModuleValidator.fix(
        Wired(unsorted, body=nn.LSTM(DIM, DIM, batch_first=True), head=nn.Linear(DIM, 2))
    )
    batch = (numbers(TIMES, DIM).float(), torch.tensor(lengths))
    for rows in ("auto", "dense"):
        with pytest.raises(SequenceError, match="enforce_sorted=True"):
            run(dp.attach(model, rows=rows), *batch)
        model.eval()(*batch)  # evaluation is not affected
        dp.detach(model.train())


class Renormalizes(nn.Module):
    """Writes to a trained weight in its forward, by the items that occur (as Embedding(max_norm=) does)."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(DIM, 2)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.layer.weight.mul_(0.5)
        return self.layer(x)


@pytest.mark.parametrize("rows", ["auto", "dense"])
def test_a_forward_must_not_write_to_trained_weights(rows):
    model = dp.attach(Renormalizes(), rows=rows)
    with pytest.raises(PrivacyError, match=r"buffers or weights.*weight"):
        model(x2()[0])


@pytest.mark.parametrize("rows", ["auto", "dense"])
def test_fewer_rows_than_drawn_are_refused(rows):
    model = dp.attach(nn.Linear(DIM, 2).double(), rows=rows, loss_reduction="sum")
    optimizer = private_optimizer(model, dp.Full(4))
    before = [p.clone() for p in model.parameters()]
    for (x,) in optimizer.loader(
        TensorDataset(numbers(TIMES, DIM, n=4)), steps=1, isolation="none"
    ):
        model(
            x.transpose(0, 1)
        ).sum().backward()  # batch_first says otherwise: three rows, each of all four records
        with pytest.raises(SequenceError, match="one row per record"):
            optimizer.step()
    assert len(optimizer.accountant) == optimizer.steps == 0
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("rows", ["auto", "dense"])
def test_a_part_called_twice_by_itself_makes_no_step(rows):
    model = dp.attach(chain(nn.Linear(DIM, 2)).double(), rows=rows, loss_reduction="sum")
    optimizer = private_optimizer(model, dp.Full(4))

    def halves(x: Tensor) -> None:
        (model[0](x[:2]).sum() + model[0](x[2:]).sum()).backward()
        optimizer.step()

    for (x,) in optimizer.loader(TensorDataset(numbers(DIM, n=4)), steps=1, isolation="none"):
        with pytest.raises(SequenceError, match=r"attached model itself|one row per record"):
            halves(x)
    assert len(optimizer.accountant) == 0


def test_an_in_place_operation_on_a_dense_output_is_refused_by_torch():
    model = dp.attach(nn.RMSNorm(DIM))
    with pytest.raises(RuntimeError, match="modified inplace"):
        model(x2()[0]).add_(1.0)


def test_dropout_masks_differ_between_records_and_rows_keep_them():
    torch.manual_seed(0)
    model = dp.attach(
        chain(nn.Linear(DIM, 64), nn.Dropout(0.5), nn.Linear(64, 1)), loss_reduction="sum"
    )
    weight = run(model, numbers(DIM).float()[:1].expand(RECORDS, -1)).dense()[2]
    used = weight[:, 0] != 0
    assert 0.2 < float(used.float().mean()) < 0.8
    assert not torch.equal(used[0], used[1])


class Swaps(nn.Module):
    """Exchanges two buffers in its forward, without writing to either."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(DIM, 2)
        self.register_buffer("a", torch.zeros(1))
        self.register_buffer("b", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        self.a, self.b = self.b, self.a
        return self.layer(x)


def test_a_forward_must_not_exchange_buffers():
    model = dp.attach(Swaps())
    model.a, model.b = model.b, model.a  # outside of a forward they may
    for _ in range(2):
        with pytest.raises(PrivacyError, match="buffers"):
            model(x2()[0])
