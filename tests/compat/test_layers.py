"""Rows of every kind of layer and wiring are the gradients of each record alone, and no record moves another's row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from opacus.layers import DPRNN
from opacus.validators import ModuleValidator
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

import torch_dpsco as dp
from tests.compat.harness import (
    DIM,
    RECORDS,
    TIMES,
    Case,
    Wired,
    altered,
    assert_rows,
    items,
    numbers,
    parameter,
    rows_alone,
    rows_recorded,
)

# torch says so for reentrant checkpoints whose input needs no gradient; the hooked layers then are given one that does.
pytestmark = pytest.mark.filterwarnings(
    "ignore:None of the inputs have requires_grad=True:UserWarning"
)


def wire_twice(m: Wired, x: Tensor) -> Tensor:
    return m.head(torch.tanh(m.body(torch.tanh(m.body(x)))).flatten(1))


def wire_sequence_twice(m: Wired, x: Tensor) -> Tensor:
    return m.head(torch.tanh(m.body(x))).sum(1) + m.head(torch.tanh(m.body(x[:, 0])))


def wire_bare(m: Wired, x: Tensor) -> Tensor:
    return torch.tanh(x @ m.w)


def switched(m: Wired, x: Tensor, scale: float = 1.0) -> Tensor:
    return torch.tanh(scale * (x @ m.w))


def wire_switched(m: Wired, x: Tensor) -> Tensor:
    return m.head(m.body(x, scale=m.scale))


def wire_scale(m: Wired, x: Tensor) -> Tensor:
    return x * m.w


def wire_positions(m: Wired, x: Tensor) -> Tensor:
    return m.head(m.body(x) + m.places(torch.arange(x.shape[1]).expand(len(x), -1)))


def wire_attention(m: Wired, x: Tensor, mask: Tensor | None = None) -> Tensor:
    return m.head(m.body(x, x, x, key_padding_mask=mask)[0])


def wire_masked(m: Wired, x: Tensor, *masks: Tensor) -> Tensor:
    time = x.shape[m.body.batch_first]
    records = x.shape[not m.body.batch_first]
    over = torch.ones(time, time).triu(1).bool()
    if m.mask == "added":
        over = torch.linspace(-1, 1, time**2, dtype=x.dtype).view(time, time)
    if m.mask == "by record":
        over = masks[0].repeat_interleave(2, 0)
        assert len(over) == 2 * records
    padding = masks[-1] if m.mask == "padding" else None
    over = None if m.mask == "padding" else over
    found, _ = m.body(x, x, x, attn_mask=over, key_padding_mask=padding)
    return m.head(found)


def wire_cross(m: Wired, x: Tensor, y: Tensor) -> Tensor:
    return m.head(m.body(x, y, y, need_weights=False)[0])


def wire_translate(m: Wired, x: Tensor, y: Tensor) -> Tensor:
    mask = torch.ones(TIMES, TIMES).triu(1).bool()
    return m.head(m.body(x, y, tgt_mask=mask, tgt_is_causal=True))


def wire_grouped(m: Wired, x: Tensor) -> Tensor:
    q, k, v = (layer(x).unflatten(2, (-1, 2)).transpose(1, 2) for layer in (m.q, m.k, m.v))
    found = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return m.head(found.transpose(1, 2).flatten(2))


def wire_any_order(m: Wired, x: Tensor, lengths: Tensor) -> Tensor:
    packed = pack_padded_sequence(m.first(x), lengths.clamp(min=1), True, enforce_sorted=False)
    output, state = m.body(packed)
    padded, _ = pad_packed_sequence(output, batch_first=True)
    state = state[0] if isinstance(state, tuple) else state
    return m.head(padded.sum(1)) * (lengths > 0)[:, None] + state.sum((0, 2))[:, None]


def wire_held(m: Wired, x: Tensor) -> Tensor:
    return m.body(m.norm(x))


def wire_cell(m: Wired, x: Tensor) -> Tensor:
    state = None
    for t in range(TIMES):
        state = m.body(x[:, t], state)
    return m.head(state[0] if isinstance(state, tuple) else state)


def wire_positions_once(m: Wired, x: Tensor) -> Tensor:
    return m.head(m.body(x) + m.places(torch.arange(x.shape[1])[None]))


def wire_attention_by_keyword(m: Wired, x: Tensor) -> Tensor:
    return m.head(m.body(query=x, key=x, value=x)[0])


def wire_recurrent(m: Wired, x: Tensor) -> Tensor:
    return m.head(m.body(x)[0])


def wire_last_state(m: Wired, x: Tensor) -> Tensor:
    return m.head(m.body(x)[0][:, -1])


def wire_first_state(m: Wired, x: Tensor) -> Tensor:
    start = torch.tanh(x[:, 0])[None]
    return m.head(m.body(x, (start, start))[0])


def wire_time_inside(m: Wired, x: Tensor) -> Tensor:
    return m.head(m.body(x.transpose(0, 1))[0].transpose(0, 1))


def wire_packed(m: Wired, x: Tensor, lengths: Tensor) -> Tensor:
    output, _ = m.body(pack_padded_sequence(m.first(x), lengths, batch_first=True))
    padded, _ = pad_packed_sequence(output, batch_first=True)
    return (m.head(padded) * (torch.arange(padded.shape[1]) < lengths[:, None])[..., None]).sum(
        1
    )


def wire_outputs(m: Wired, x: Tensor) -> dict[str, Any]:
    return {"scores": m.head(x), "states": (m.norm(x), x)}


def wire_parts(m: Wired, x: Tensor) -> Tensor:
    parts = m.body(x)
    return m.head(parts["scores"]) + parts["states"][0].sum(1, keepdim=True)


def wire_keywords(
    m: Wired, *, input_ids: Tensor, attention_mask: Tensor | None = None
) -> Tensor:
    states = m.norm(m.body(input_ids))
    if attention_mask is not None:
        states = states * attention_mask[..., None]
    return m.head(states)


def wire_two_inputs(m: Wired, x: Tensor, y: Tensor) -> Tensor:
    return m.head(x) * m.norm(y).sum(1, keepdim=True)


def wire_unused_use(m: Wired, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = m.body(x).square().mean(1, keepdim=True)
    return m.head(m.body(x)) * (1 + scale)


def wire_checkpoint(m: Wired, x: Tensor) -> Tensor:
    return m.head(checkpoint(m.body, x, use_reentrant=False))


def wire_reentrant(m: Wired, x: Tensor) -> Tensor:
    return m.head(checkpoint(m.body, m.first(x), use_reentrant=True))


def wire_body_by_keyword(m: Wired, x: Tensor) -> Tensor:
    return m.head(input=m.body(input=x))


def wire_bag(m: Wired, ids: Tensor, offsets: Tensor | None = None) -> Tensor:
    return m.head(m.bag(ids) if offsets is None else m.bag(ids, offsets))


def wire_list(m: Wired, records: list[Tensor]) -> Tensor:
    return m.head(torch.stack([record.mean(0) for record in records]))


def chain(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(*layers)


def tied() -> nn.Module:
    model = chain(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, DIM))
    model[2].weight = model[0].weight
    return model


def pruned(layer: nn.Module) -> nn.Module:
    return prune.l1_unstructured(layer, "weight", 0.5)


def held_twice() -> nn.Module:
    model = Wired(wire_held, body=nn.Linear(DIM, 2), norm=nn.LayerNorm(DIM))
    model.bias = model.body.bias
    return model


def tied_embedding() -> nn.Module:
    model = chain(nn.Embedding(5, DIM), nn.Tanh(), nn.Linear(DIM, 5, bias=False))
    model[2].weight = model[0].weight
    return model


def frozen(model: nn.Module, *names: str) -> nn.Module:
    for name in names:
        model.get_parameter(name).requires_grad_(False)
    return model


def fixed(wiring: Any, body: nn.Module, width: int = DIM, **parts: nn.Module) -> nn.Module:
    return ModuleValidator.fix(Wired(wiring, body=body, head=nn.Linear(width, 2), **parts))


def recurrent(kind: type[nn.RNNBase], wiring: Any = wire_recurrent, **options: Any) -> nn.Module:
    width = DIM * (2 if options.get("bidirectional") else 1)
    return fixed(wiring, kind(DIM, DIM, **{"batch_first": True} | options), width)


def ours(wiring: Any, body: nn.Module, width: int = DIM, **parts: Any) -> nn.Module:
    return dp.private_layers(Wired(wiring, body=body, head=nn.Linear(width, 2), **parts))


def attention(mask: str, **options: Any) -> nn.Module:
    return ours(wire_masked, nn.MultiheadAttention(DIM, 2, **options), mask=mask)


def vector() -> tuple[Tensor]:
    return (numbers(DIM),)


def sequence() -> tuple[Tensor]:
    return (numbers(TIMES, DIM),)


def image() -> tuple[Tensor]:
    return (numbers(3, 3, 3),)


def tokens() -> tuple[Tensor]:
    return (items(TIMES, below=2),)  # repeated ones, and many of item 0


CASES = {
    "Linear": Case(
        lambda: chain(nn.Linear(DIM, 5), nn.Tanh(), nn.Linear(5, 2, bias=False)), vector
    ),
    "Linear on sequences": Case(
        lambda: chain(nn.Linear(DIM, 5), nn.Tanh(), nn.Linear(5, 2)), sequence
    ),
    "Linear on time first": Case(
        lambda: chain(nn.Linear(DIM, 5), nn.Tanh(), nn.Linear(5, 2)), sequence, batch_dim=1
    ),
    "Conv1d": Case(
        lambda: chain(nn.Conv1d(3, 4, 2), nn.Flatten(), nn.Linear(8, 2)),
        lambda: (numbers(3, 3),),
    ),
    "Conv2d": Case(
        lambda: chain(nn.Conv2d(3, 4, 2, padding=1, stride=2), nn.Flatten(), nn.Linear(16, 2)),
        image,
    ),
    "Conv2d, padded to the same size": Case(
        lambda: chain(nn.Conv2d(3, 4, 3, padding="same"), nn.Flatten(), nn.Linear(36, 2)), image
    ),
    "Conv3d": Case(
        lambda: chain(nn.Conv3d(2, 3, 2), nn.Flatten(), nn.Linear(12, 2)),
        lambda: (numbers(2, 3, 3, 2),),
    ),
    "Conv2d in groups": Case(
        lambda: chain(nn.Conv2d(3, 3, 2, groups=3), nn.Flatten(), nn.Linear(12, 2)), image
    ),
    "ConvTranspose2d": Case(
        lambda: chain(nn.ConvTranspose2d(3, 2, 2), nn.Flatten(), nn.Linear(32, 2)), image
    ),
    "GroupNorm": Case(
        lambda: chain(nn.Conv2d(3, 4, 1), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(36, 2)),
        image,
    ),
    "InstanceNorm": Case(
        lambda: chain(
            nn.Conv2d(3, 4, 1), nn.InstanceNorm2d(4, affine=True), nn.Flatten(), nn.Linear(36, 2)
        ),
        image,
    ),
    "LayerNorm": Case(
        lambda: chain(nn.Linear(DIM, 6), nn.LayerNorm([TIMES, 6]), nn.Linear(6, 2)), sequence
    ),
    "RMSNorm": Case(lambda: chain(nn.Linear(DIM, 6), nn.RMSNorm(6), nn.Linear(6, 2)), sequence),
    "PReLU": Case(lambda: chain(nn.Linear(DIM, 4), nn.PReLU(4), nn.Linear(4, 2)), vector),
    "weight_norm": Case(
        lambda: chain(weight_norm(nn.Linear(DIM, 4)), nn.Tanh(), nn.Linear(4, 2)), vector
    ),
    "Embedding": Case(lambda: chain(nn.Embedding(5, DIM), nn.Linear(DIM, 2)), tokens),
    "Embedding of one item": Case(
        lambda: chain(nn.Embedding(5, DIM), nn.Linear(DIM, 2)), lambda: (items(),)
    ),
    "Embedding with padding": Case(
        lambda: chain(nn.Embedding(5, DIM, padding_idx=0), nn.Linear(DIM, 2)), tokens
    ),
    "Embedding of positions": Case(
        lambda: Wired(
            wire_positions,
            body=nn.Embedding(5, DIM),
            places=nn.Embedding(TIMES, DIM),
            head=nn.Linear(DIM, 2),
        ),
        tokens,
    ),
    "EmbeddingBag sum": Case(
        lambda: Wired(wire_bag, bag=nn.EmbeddingBag(5, DIM, mode="sum"), head=nn.Linear(DIM, 2)),
        tokens,
    ),
    "EmbeddingBag mean": Case(
        lambda: Wired(
            wire_bag, bag=nn.EmbeddingBag(5, DIM, mode="mean"), head=nn.Linear(DIM, 2)
        ),
        tokens,
    ),
    "MultiheadAttention": Case(
        lambda: fixed(wire_attention, nn.MultiheadAttention(DIM, 2, batch_first=True)),
        lambda: (*sequence(), torch.tensor([[0, 0, 1], [0, 1, 1], [0, 0, 0]]).bool()),
    ),
    "MultiheadAttention by keyword": Case(
        lambda: fixed(
            wire_attention_by_keyword, nn.MultiheadAttention(DIM, 2, batch_first=True)
        ),
        sequence,
    ),
    "MultiheadAttention on time first": Case(
        lambda: fixed(wire_attention, nn.MultiheadAttention(DIM, 2)), sequence, batch_dim=1
    ),
    "TransformerEncoderLayer": Case(
        lambda: ModuleValidator.fix(
            chain(
                nn.TransformerEncoderLayer(DIM, 2, 8, dropout=0.0, batch_first=True),
                nn.Linear(DIM, 2),
            )
        ),
        sequence,
    ),
    "LSTM": Case(lambda: recurrent(nn.LSTM), sequence),
    "LSTM, last state": Case(lambda: recurrent(nn.LSTM, wire_last_state), sequence),
    "LSTM with a first state": Case(lambda: recurrent(nn.LSTM, wire_first_state), sequence),
    "LSTM of two layers, both ways": Case(
        lambda: recurrent(nn.LSTM, num_layers=2, bidirectional=True), sequence
    ),
    "LSTM with time first inside": Case(
        lambda: recurrent(nn.LSTM, wire_time_inside, batch_first=False), sequence
    ),
    "LSTM on time first": Case(
        lambda: recurrent(nn.LSTM, batch_first=False), sequence, batch_dim=1
    ),
    "GRU": Case(lambda: recurrent(nn.GRU), sequence),
    "GRU of two layers, both ways": Case(
        lambda: recurrent(nn.GRU, num_layers=2, bidirectional=True), sequence
    ),
    "RNN as DPRNN": Case(
        lambda: Wired(
            wire_recurrent, body=DPRNN(DIM, DIM, batch_first=True), head=nn.Linear(DIM, 2)
        ),
        sequence,
    ),
    "LSTM on packed sequences": Case(
        lambda: fixed(
            wire_packed, nn.LSTM(DIM, DIM, batch_first=True), first=nn.Linear(DIM, DIM)
        ),
        lambda: (*sequence(), torch.tensor([3, 2, 1])),
        dtype=torch.float32,  # Opacus starts packed runs from float32 states
    ),
    "bare parameter": Case(lambda: Wired(wire_bare, w=parameter(DIM, 2)), vector),
    "bare parameter in a layer": Case(
        lambda: chain(nn.Linear(DIM, 3), Wired(wire_scale, w=parameter(3)), nn.Linear(3, 2)),
        sequence,
    ),
    "bare parameter with a switch": Case(
        lambda: Wired(
            wire_switched,
            body=Wired(switched, w=parameter(DIM, 3)),
            head=nn.Linear(3, 2),
            scale=2.0,
        ),
        vector,
    ),
    "tied weights": Case(tied, vector),
    "bias of a layer that its parent holds too": Case(held_twice, vector),
    "tied embedding": Case(tied_embedding, tokens),
    "module used twice": Case(
        lambda: Wired(wire_twice, body=nn.Linear(DIM, DIM), head=nn.Linear(DIM, 2)), vector
    ),
    "Conv1d used twice": Case(
        lambda: Wired(wire_twice, body=nn.Conv1d(3, 3, 1), head=nn.Linear(9, 2)),
        lambda: (numbers(3, 3),),
    ),
    "module used on a sequence and on a part": Case(
        lambda: Wired(wire_sequence_twice, body=nn.Linear(DIM, DIM), head=nn.Linear(DIM, 2)),
        sequence,
    ),
    "module used under no_grad too": Case(
        lambda: Wired(wire_unused_use, body=nn.LayerNorm(DIM), head=nn.Linear(DIM, 2)), vector
    ),
    "frozen layer": Case(
        lambda: frozen(
            chain(nn.Linear(DIM, 4), nn.Tanh(), nn.Linear(4, 2)), "0.weight", "0.bias"
        ),
        vector,
    ),
    "frozen weight and bias": Case(
        lambda: frozen(
            chain(nn.Linear(DIM, 4), nn.LayerNorm(4), nn.Linear(4, 2)), "0.bias", "1.weight"
        ),
        vector,
    ),
    "nested outputs": Case(
        lambda: Wired(wire_outputs, head=nn.Linear(DIM, 2), norm=nn.LayerNorm(DIM)), vector
    ),
    "parts with nested outputs": Case(
        lambda: Wired(
            wire_parts,
            body=Wired(wire_outputs, head=nn.Linear(DIM, DIM), norm=nn.LayerNorm(DIM)),
            head=nn.Linear(DIM, 2),
        ),
        vector,
    ),
    "forward by keyword": Case(
        lambda: Wired(
            wire_keywords,
            body=nn.Embedding(5, DIM),
            norm=nn.LayerNorm(DIM),
            head=nn.Linear(DIM, 2),
        ),
        lambda: {
            "input_ids": tokens()[0],
            "attention_mask": torch.tensor([[1.0, 1, 0], [1, 0, 0], [1, 1, 1]]),
        },
    ),
    "two inputs": Case(
        lambda: Wired(wire_two_inputs, head=nn.Linear(DIM, 2), norm=nn.LayerNorm(2)),
        lambda: (numbers(DIM), numbers(2, seed=7)),
    ),
    "checkpoint": Case(
        lambda: Wired(
            wire_checkpoint,
            body=chain(nn.Linear(DIM, DIM), nn.LayerNorm(DIM), nn.Tanh()),
            head=nn.Linear(DIM, 2),
        ),
        vector,
    ),
    "checkpoint of everything": Case(
        lambda: Wired(
            wire_checkpoint,
            body=chain(nn.Linear(DIM, DIM), nn.LayerNorm(DIM)),
            head=nn.Identity(),
        ),
        vector,
    ),
    "checkpoint of convolutions": Case(
        lambda: Wired(
            wire_checkpoint,
            body=chain(nn.Conv1d(3, 4, 2), nn.GroupNorm(2, 4), nn.Tanh()),
            head=nn.Linear(2, 2),
        ),
        lambda: (numbers(3, 3),),
    ),
    "reentrant checkpoint": Case(
        lambda: Wired(
            wire_reentrant,
            first=nn.Linear(DIM, DIM),
            body=chain(nn.Linear(DIM, DIM), nn.LayerNorm(DIM)),
            head=nn.Linear(DIM, 2),
        ),
        vector,
    ),
}
MASKS = {
    "by record": lambda: (*sequence(), numbers(TIMES, TIMES, seed=3)),
    "padding": lambda: (
        *sequence(),
        torch.tensor([[0, 0, 1], [0, 1, 1], [0, 0, 0]]).bool(),
    ),
}
OURS = {
    **{
        f"our attention, mask {mask}": Case(
            lambda mask=mask: attention(mask, batch_first=True), MASKS.get(mask, sequence)
        )
        for mask in ("causal", "added", "by record", "padding")
    },
    "our attention, time first": Case(lambda: attention("causal"), sequence, batch_dim=1),
    "our attention, biases of keys": Case(
        lambda: attention("causal", batch_first=True, add_bias_kv=True, add_zero_attn=True),
        sequence,
    ),
    "our attention, biases of keys, time first": Case(
        lambda: attention("added", add_bias_kv=True), sequence, batch_dim=1
    ),
    "our attention, keys of another width": Case(
        lambda: ours(
            wire_cross,
            nn.MultiheadAttention(DIM, 2, kdim=2, vdim=2, bias=False, batch_first=True),
        ),
        lambda: (*sequence(), numbers(5, 2, seed=4)),
    ),
    "grouped heads": Case(
        lambda: Wired(
            wire_grouped,
            q=nn.Linear(DIM, 8),
            k=nn.Linear(DIM, 4),
            v=nn.Linear(DIM, 4),
            head=nn.Linear(8, 2),
        ),
        sequence,
    ),
    "our TransformerEncoder": Case(
        lambda: dp.private_layers(
            nn.TransformerEncoder(
                nn.TransformerEncoderLayer(DIM, 2, 8, dropout=0.0, batch_first=True), 2
            )
        ),
        sequence,
    ),
    "our Transformer": Case(
        lambda: ours(wire_translate, nn.Transformer(DIM, 2, 1, 1, 8, 0.0, batch_first=True)),
        lambda: (*sequence(), numbers(TIMES, DIM, seed=4)),
    ),
    **{
        f"our {kind.__name__}": Case(
            lambda kind=kind: ours(
                wire_recurrent,
                kind(DIM, DIM, 2, batch_first=True, bidirectional=True),
                width=2 * DIM,
            ),
            sequence,
        )
        for kind in (nn.LSTM, nn.GRU, nn.RNN)
    },
    "our LSTM, time first": Case(
        lambda: ours(wire_recurrent, nn.LSTM(DIM, DIM, proj_size=2), width=2),
        sequence,
        batch_dim=1,
    ),
    "our LSTM, time first inside": Case(
        lambda: ours(wire_time_inside, nn.LSTM(DIM, DIM)), sequence
    ),
    **{
        f"our {kind.__name__}": Case(lambda kind=kind: ours(wire_cell, kind(DIM, DIM)), sequence)
        for kind in (nn.LSTMCell, nn.GRUCell, nn.RNNCell)
    },
    "GroupNorm for BatchNorm": Case(
        lambda: dp.private_layers(
            chain(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(36, 2))
        ),
        image,
    ),
    "InstanceNorm without statistics": Case(
        lambda: dp.private_layers(
            chain(
                nn.InstanceNorm2d(3, affine=True, track_running_stats=True), nn.Conv2d(3, 2, 1)
            )
        ),
        image,
    ),
    "pruned weights": Case(
        lambda: dp.private_layers(
            chain(pruned(nn.Linear(DIM, 4)), nn.Tanh(), pruned(nn.Conv1d(4, 2, 1)))
        ),
        lambda: (numbers(DIM, DIM),),
    ),
    "positions (1, T)": Case(
        lambda: Wired(
            wire_positions_once,
            body=nn.Embedding(5, DIM),
            places=nn.Embedding(TIMES, DIM),
            head=nn.Linear(DIM, 2),
        ),
        tokens,
    ),
    "sparse Embedding": Case(
        lambda: chain(nn.Embedding(5, DIM, sparse=True), nn.Linear(DIM, 2)), tokens
    ),
}
CASES |= OURS
# right where all layers are factored, refused where one is dense (or, without bias, where Opacus has no rows)
FACTORED_CASES = {
    "in-place activation": Case(
        lambda: chain(nn.Linear(DIM, DIM), nn.ReLU(inplace=True), nn.Linear(DIM, 2)), vector
    ),
    "in-place activation of a convolution": Case(
        lambda: chain(
            nn.Conv2d(3, 4, 2),
            nn.GroupNorm(2, 4),
            nn.ReLU(inplace=True),
            nn.Flatten(),
            nn.Linear(16, 2),
        ),
        image,
    ),
    "padding that is not zeros": Case(
        lambda: chain(
            nn.Conv2d(3, 2, 2, padding=1, padding_mode="reflect"), nn.Flatten(), nn.Linear(32, 2)
        ),
        image,
    ),
    "LayerNorm without bias": Case(
        lambda: chain(nn.Linear(DIM, 6), nn.LayerNorm(6, bias=False), nn.Linear(6, 2)), sequence
    ),
    "layers by keyword": Case(
        lambda: Wired(wire_body_by_keyword, body=nn.LayerNorm(DIM), head=nn.Linear(DIM, 2)),
        sequence,
    ),
}


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("rows", ["auto", "dense"])
def test_rows_are_those_of_the_records_alone(name, rows):
    case = CASES[name]
    assert_sound(case, rows)


@pytest.mark.cases(2, 1)
@pytest.mark.parametrize("name", FACTORED_CASES)
def test_rows_of_factored_layers_are_those_of_the_records_alone(name):
    assert_sound(FACTORED_CASES[name], "auto")


def assert_sound(case: Case, rows: str) -> None:
    batch = case.batch()
    expected = rows_alone(case, case.model(), batch)
    assert all(bool((part != 0).any()) for part in expected)
    for reduction in ("mean", "sum"):
        model = case.attach(rows, reduction)
        for _ in range(2):
            found = rows_recorded(case, model, batch, reduction)
            assert_rows(found, expected, case.tolerance())
        if case.dtype == torch.float32:
            continue  # lengths cannot be altered freely
        for record in range(RECORDS):
            moved = rows_recorded(case, model, altered(batch, record, case.batch_dim), reduction)
            others = [i for i in range(RECORDS) if i != record]
            assert_rows(
                [part[others] for part in moved],
                [part[others] for part in found],
                case.tolerance(),
            )
            assert any(
                not torch.equal(a[record], b[record]) for a, b in zip(moved, found, strict=True)
            )


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("lengths", [(3, 2, 1), (3, 3, 1), (2, 2, 2), (1, 1, 1)])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_rows_of_packed_sequences_of_any_lengths_are_right(kind, lengths):
    case = Case(
        lambda: fixed(
            wire_packed,
            kind(DIM, DIM, num_layers=2, batch_first=True),
            first=nn.Linear(DIM, DIM),
        ),
        lambda: (*sequence(), torch.tensor(lengths)),
        dtype=torch.float32,
    )
    expected = rows_alone(case, case.model(), case.batch())
    for rows in ("auto", "dense"):
        found = rows_recorded(case, case.attach(rows, "mean"), case.batch(), "mean")
        assert_rows(found, expected, case.tolerance())


@pytest.mark.parametrize("lengths", [(1, 3, 2), (0, 1, 3)])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_rows_of_packed_sequences_in_any_order_are_right_with_private_layers(kind, lengths):
    case = Case(
        lambda: ours(
            wire_any_order,
            kind(DIM, DIM, 2, batch_first=True, bidirectional=True),
            width=2 * DIM,
            first=nn.Linear(DIM, DIM),
        ),
        lambda: (*sequence(), torch.tensor(lengths)),
    )
    expected = rows_alone(case, case.model(), case.batch())
    for rows in ("auto", "dense"):
        found = rows_recorded(case, case.attach(rows, "mean"), case.batch(), "mean")
        assert_rows(found, expected, case.tolerance())


def test_rows_of_layers_with_switches_follow_them():
    case = Case(CASES["bare parameter with a switch"].build, vector)
    model = case.attach("auto", "sum")
    for scale in (2.0, 0.5, 2.0):
        twin = case.model()
        model.scale = twin.scale = scale
        expected = rows_alone(case, twin, case.batch())
        assert_rows(rows_recorded(case, model, case.batch(), "sum"), expected, case.tolerance())


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_rows_of_bags_with_offsets_count_each_use_of_an_item(mode):
    flat, offsets = (
        torch.tensor([1, 1, 4, 2, 2, 2]),
        torch.tensor([0, 3, 3]),
    )  # the second bag is empty
    bags = [flat[:3], flat[3:3], flat[3:]]
    case = Case(
        lambda: Wired(wire_bag, bag=nn.EmbeddingBag(5, DIM, mode=mode), head=nn.Linear(DIM, 2)),
        tuple,
    )
    alone = [rows_of_one(case, bag, torch.tensor([0])) for bag in bags]
    expected = [torch.stack(parts) for parts in zip(*alone, strict=True)]
    for reduction in ("mean", "sum"):
        found = rows_recorded(case, case.attach("auto", reduction), (flat, offsets), reduction)
        assert_rows(found, expected, case.tolerance())


def rows_of_one(case: Case, *batch: Tensor) -> list[Tensor]:
    model = case.model()
    case.losses(model, batch).sum().backward()
    return [p.grad for p in model.parameters()]


def test_a_list_of_sequences_of_different_lengths_keeps_records_apart():
    records = [numbers(DIM, n=length, seed=length) for length in (5, 2, 4)]
    case = Case(lambda: Wired(wire_list, head=nn.Linear(DIM, 2)), tuple)
    alone = [rows_of_one(case, [record]) for record in records]
    found = rows_recorded(case, case.attach("auto", "mean"), (records,), "mean")
    assert_rows(
        found, [torch.stack(parts) for parts in zip(*alone, strict=True)], case.tolerance()
    )
