"""`dp.private_layers`: the layers in place of torch's compute what those do, and their weights go in and out."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.data import TensorDataset

import torch_dpsco as dp
from tests.compat.harness import CLIP, LR, private_optimizer
from torch_dpsco.errors import SequenceError

DIM = 4
TIMES = 5
PADDING = torch.tensor([[0, 0, 0, 1, 1], [0, 1, 1, 1, 1], [0, 0, 0, 0, 0]]).bool()
LENGTHS = torch.tensor([2, 5, 1])
KINDS = {
    "attention": lambda: nn.MultiheadAttention(DIM, 2, batch_first=True),
    "attention of another width": lambda: nn.MultiheadAttention(
        DIM, 2, bias=False, add_bias_kv=True, add_zero_attn=True, kdim=DIM, vdim=DIM
    ),
    "attention with biases of keys": lambda: nn.MultiheadAttention(DIM, 2, add_bias_kv=True),
    "LSTM": lambda: nn.LSTM(DIM, 3, 2, bidirectional=True),
    "LSTM with projections": lambda: nn.LSTM(DIM, 3, batch_first=True, proj_size=2),
    "GRU": lambda: nn.GRU(DIM, 3, 2, bias=False, batch_first=True),
    "RNN": lambda: nn.RNN(DIM, 3, bidirectional=True),
    "RNN with relu": lambda: nn.RNN(DIM, 3, nonlinearity="relu"),
    "LSTMCell": lambda: nn.LSTMCell(DIM, 3),
    "GRUCell": lambda: nn.GRUCell(DIM, 3),
    "RNNCell": lambda: nn.RNNCell(DIM, 3, nonlinearity="relu"),
    "Transformer": lambda: nn.Transformer(DIM, 2, 2, 1, 8, 0.0, batch_first=True),
}


def made(name: str) -> Any:
    torch.manual_seed(0)
    return KINDS[name]().double()


def sequences() -> Tensor:
    return torch.randn(3, TIMES, DIM, generator=torch.Generator().manual_seed(1)).double()


def flat(found: Any) -> list[Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(found) if isinstance(t, Tensor)]


def outputs(name: str, model: Any) -> list[Tensor]:
    x = sequences()
    over = torch.ones(TIMES, TIMES).triu(1).bool()
    if "attention" in name:
        first = x if model.batch_first else x.transpose(0, 1)
        by_record = torch.randn(
            6, TIMES, TIMES, generator=torch.Generator().manual_seed(2)
        ).double()
        masks = [
            {},
            {"attn_mask": over, "key_padding_mask": PADDING, "need_weights": False},
            {"attn_mask": over, "is_causal": True, "average_attn_weights": False},
            {"attn_mask": by_record, "key_padding_mask": PADDING.double() * -2},
        ]
        return [t for options in masks for t in flat(model(first, first, first, **options))]
    if name == "Transformer":
        padding = {"src_key_padding_mask": PADDING, "memory_key_padding_mask": PADDING}
        return [model(x, x, tgt_mask=over, **padding)]
    if "Cell" in name:
        state = model(x[:, 0])
        return flat(state) + flat(model(x[:, 1], state))
    found = flat(model(x)) + flat(model(x, model(x)[1]))
    for rows, lengths, is_sorted in (
        (x, LENGTHS, False),
        (x, LENGTHS.sort().values.flip(0), True),
    ):
        packed = pack_padded_sequence(rows, lengths, True, enforce_sorted=is_sorted)
        out, state = model(packed)
        found += [out.data, *flat(state)]
    return found


@pytest.mark.filterwarnings(
    "ignore:The PyTorch API of nested tensors"
)  # torch's own, in evaluation
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("training", [True, False])
def test_private_layers_compute_what_those_of_torch_do(name, training):
    model = made(name).train(training)
    ours = dp.private_layers(model)
    with torch.no_grad():
        expected = outputs(name, model)
        found = outputs(name, ours)
    assert len(expected) == len(found)
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", KINDS)
def test_state_dicts_of_private_layers_are_those_of_torch(name):
    model = made(name)
    ours = dp.private_layers(model)
    state = ours.state_dict()
    assert {k: v.shape for k, v in state.items()} == {
        k: v.shape for k, v in model.state_dict().items()
    }
    assert all(torch.equal(state[k], v) for k, v in model.state_dict().items())
    other = pickle.loads(pickle.dumps(copy.deepcopy(ours)))
    other.load_state_dict({k: v + 1 for k, v in state.items()})
    model.load_state_dict(other.state_dict())
    assert all(torch.equal(v, state[k] + 1) for k, v in model.state_dict().items())
    del state[next(iter(state))]
    with pytest.raises(RuntimeError, match="Missing key"):
        ours.load_state_dict(state)


def test_private_layers_leave_the_model_as_it_was():
    lstm = nn.LSTM(DIM, DIM)
    lstm.weight_hh_l0.requires_grad_(False)
    model = nn.Sequential(
        nn.Conv1d(2, DIM, 1),
        nn.BatchNorm1d(DIM),
        lstm,
        lstm,
        nn.InstanceNorm1d(DIM, track_running_stats=True),
    ).eval()
    before = pickle.dumps(model)
    ours = dp.private_layers(model)
    assert pickle.dumps(model) == before
    assert ours[2] is ours[3] is not lstm
    assert not any(m.training for m in ours.modules())
    assert [name for name, p in ours.named_parameters() if not p.requires_grad] == [
        "2.hh_l0.weight"
    ]
    assert not list(ours.buffers())
    assert {type(m).__name__ for m in ours} == {
        "Conv1d",
        "GroupNorm",
        "Recurrent",
        "InstanceNorm1d",
    }
    assert not (ours[1](torch.randn(3, DIM)) == 0).all()  # as of a group per channel
    dp.attach(ours.train())
    with pytest.raises(SequenceError, match=r"before dp\.attach"):
        dp.private_layers(ours)


def test_masks_of_another_shape_and_inputs_that_are_no_batch_are_refused():
    x = sequences()
    ours = dp.private_layers(made("attention"))
    for options, what in (
        ({"attn_mask": torch.zeros(3, TIMES).bool()}, "attn_mask"),
        ({"attn_mask": torch.zeros(TIMES, TIMES).int()}, "attn_mask"),
        ({"key_padding_mask": torch.zeros(TIMES, 3).bool()}, "key_padding_mask"),
        ({"is_causal": True}, "attn_mask"),
    ):
        with pytest.raises(ValueError, match=what):
            ours(x, x, x, **options)
    with pytest.raises(ValueError, match="3 dimensions"):
        ours(x[0], x[0], x[0])
    with pytest.raises(ValueError, match="3 dimensions"):
        dp.private_layers(made("GRU"))(x[0])


def test_attention_of_private_layers_drops_weights_in_training_alone():
    model = nn.MultiheadAttention(DIM, 2, dropout=0.5, batch_first=True).double()
    ours = dp.private_layers(model)
    x = sequences()
    for need in (True, False):
        torch.manual_seed(3)
        first = ours(x, x, x, need_weights=need)[0]
        assert not torch.equal(first, ours(x, x, x, need_weights=need)[0])
    ours.eval()
    assert torch.equal(ours(x, x, x)[0], ours(x, x, x)[0])


def test_pruned_weights_stay_zero():
    torch.manual_seed(0)
    plain = nn.Linear(DIM, 3)
    prune.random_unstructured(plain, "weight", 0.5)
    mask = plain.weight_mask.clone()
    with pytest.raises(ValueError, match="private_layers"):
        dp.attach(plain)
    model = dp.private_layers(plain)
    assert torch.equal(model.weight, plain.weight)
    dp.attach(model)
    oracle = dp.oracles.Clipped(1.0, 1.0, 5)
    optimizer = dp.PrivateOptimizer(
        [p for p in model.parameters() if p.requires_grad],
        lr=1.0,
        oracle=oracle,
        design=dp.Poisson(5, 20),
        rule=dp.rules.SGD(),
        adjacency="add_remove",
    )
    for (x,) in optimizer.loader(TensorDataset(torch.randn(20, DIM)), steps=2):
        model(x).square().sum(1).mean().backward()
        optimizer.step()
    assert not model.weight[mask == 0].any()
    assert (model.weight != plain.weight).any()
    parametrize.remove_parametrizations(dp.detach(model), "weight")
    assert not model.weight[mask == 0].any()


class Packs(nn.Module):
    """The mean output of an LSTM on packed sequences in the order of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(DIM, 3, batch_first=True, bidirectional=True)
        self.head = nn.Linear(6, 1)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths.clamp(min=1).cpu(), True, enforce_sorted=False)
        padded, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        return self.head(padded.sum(1) / lengths.clamp(min=1)[:, None])


def test_packed_sequences_in_filled_batches_make_the_step_of_a_loop_by_hand():
    torch.manual_seed(0)
    model = dp.private_layers(Packs()).double()
    start = copy.deepcopy(model)
    data = TensorDataset(torch.randn(20, TIMES, DIM).double(), torch.arange(20) % TIMES + 1)
    dp.attach(model, loss_reduction="sum")
    optimizer = private_optimizer(model, dp.Poisson(8, 20))
    total = [torch.zeros_like(p) for p in start.parameters()]
    for x, lengths in optimizer.loader(data, steps=1):
        assert (lengths == 0).any()  # the filling
        model(x, lengths).square().sum().backward()
        optimizer.step()
        for i in lengths.nonzero().flatten().tolist():
            loss = start(x[i : i + 1], lengths[i : i + 1]).square().sum()
            row = torch.autograd.grad(loss, list(start.parameters()))
            norm = torch.cat([part.flatten() for part in row]).norm()
            for mean, part in zip(total, row, strict=True):
                mean += part * min(1.0, CLIP / float(norm)) / 8
    for p, q, mean in zip(model.parameters(), start.parameters(), total, strict=True):
        torch.testing.assert_close(p, q - LR * mean, rtol=1e-9, atol=1e-9)
