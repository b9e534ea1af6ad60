"""Recurrent layers made of Linear ones, whose rows are recorded, and what all layers in place of torch's share.

Each Linear layer sees (B, ...), and a state beyond the length of its record is the one before it, so that records of a
`PackedSequence` need not be sorted and do not meet. The Linear layer on the input runs once for all times, the one on
the state at each time: uses of one forward, whose rows are added. State dicts have torch's names in both directions.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence


class OfTorch(nn.Module):
    """A layer in place of one of torch's, with its state dicts.

    Attributes:
        theirs: torch's name of each parameter, and which third of that tensor it is, or that it is turned over.
    """

    def __init__(self) -> None:
        super().__init__()
        self.theirs: dict[str, tuple[str, int | str | None]] = {}
        # torch gives them no types
        self.register_load_state_dict_pre_hook(_read)  # type: ignore[no-untyped-call]
        self.register_state_dict_post_hook(_write)  # type: ignore[no-untyped-call]

    def linear(
        self, name: str, width: int, out: int, weight: str, bias: str, part: int | None = None
    ) -> None:
        """Adds a Linear layer whose rows are recorded, with a bias if that has a name."""
        layer = nn.Linear(width, out, bias=bool(bias))
        layer.batch_comes_first = True  # type: ignore[assignment]
        self.add_module(name, layer)
        self.theirs[f"{name}.weight"] = weight, part if weight == "in_proj_weight" else None
        if bias:
            self.theirs[f"{name}.bias"] = bias, part

    def like(self, old: nn.Module) -> Any:
        """Returns itself with weights, device and mode of a layer of torch."""
        first = next(old.parameters())
        self.to(first.device, first.dtype).load_state_dict(old.state_dict())
        for name, p in self.named_parameters():
            p.requires_grad_(old.get_parameter(self.theirs[name][0]).requires_grad)
        return self.train(old.training)


def _read(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Turns torch's names in a state dict that is about to be loaded into ours."""
    found = {
        prefix + name: _ours(state[prefix + theirs], part)
        for name, (theirs, part) in module.theirs.items()
        if prefix + theirs in state
    }
    for theirs, _ in module.theirs.values():
        state.pop(prefix + theirs, None)
    state.update(found)


def _ours(tensor: Tensor, part: int | str | None) -> Tensor:
    if part == "turned":
        return tensor.t()
    if isinstance(part, int):
        tensor = tensor.chunk(3)[part]
    return tensor.flatten(0, 1) if tensor.dim() == 3 else tensor


def _write(module: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Turns our names in a state dict into torch's."""
    found: dict[str, list[Tensor]] = {}
    for name, (theirs, part) in module.theirs.items():
        tensor = state.pop(prefix + name)
        found.setdefault(theirs, []).append(tensor.t() if part == "turned" else tensor)
    for theirs, parts in found.items():
        tensor = parts[0] if len(parts) == 1 else torch.cat(parts)
        state[prefix + theirs] = tensor[None] if theirs in ("bias_k", "bias_v") else tensor


def advance(mode: str, x: Tensor, y: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Returns the next state of a cell, from what its two Linear layers make of input and state."""
    if mode == "LSTM":
        into, forget, new, out = (x + y).chunk(4, 1)
        cell = forget.sigmoid() * state[1] + into.sigmoid() * new.tanh()
        return out.sigmoid() * cell.tanh(), cell
    if mode == "GRU":
        reset, keep, new = x.chunk(3, 1)
        resets, keeps, news = y.chunk(3, 1)
        share = (keep + keeps).sigmoid()
        made = (new + (reset + resets).sigmoid() * news).tanh()
        return ((1 - share) * made + share * state[0],)
    return ((x + y).relu() if mode == "RNN_RELU" else (x + y).tanh(),)


GATES = {"LSTM": 4, "GRU": 3}


class Recurrent(OfTorch):
    """torch's `LSTM`, `GRU` or `RNN` for batches, and for packed ones in any order.

    Args:
        old: layer of torch whose options and weights it takes.
    """

    def __init__(self, old: nn.RNNBase) -> None:
        super().__init__()
        self.mode = old.mode
        self.input_size = old.input_size
        self.hidden_size = old.hidden_size
        self.num_layers = old.num_layers
        self.batch_first = old.batch_first
        self.dropout = old.dropout
        self.bidirectional = old.bidirectional
        self.proj_size = old.proj_size
        sides = ("", "_reverse") if old.bidirectional else ("",)
        self.places = [[f"l{k}{side}" for side in sides] for k in range(old.num_layers)]
        gates = GATES.get(old.mode, 1) * old.hidden_size
        out = old.proj_size or old.hidden_size
        for k, places in enumerate(self.places):
            for place in places:
                for name, width in (
                    ("ih", out * len(sides) if k else old.input_size),
                    ("hh", out),
                ):
                    own = f"{name}_{place}"
                    self.linear(
                        own, width, gates, f"weight_{own}", f"bias_{own}" if old.bias else ""
                    )
                if old.proj_size:
                    self.linear(f"hr_{place}", old.hidden_size, out, f"weight_hr_{place}", "")
        self.like(old)

    def flatten_parameters(self) -> None:
        """Does nothing: there is no such memory."""

    def forward(self, input: Any, hx: Any = None) -> tuple[Any, Any]:
        """Returns outputs and last states as torch's layer does."""
        x: Any
        lengths = None
        if isinstance(input, PackedSequence):
            x, lengths = pad_packed_sequence(input, batch_first=True)
            lengths = lengths.to(x.device)
        elif input.dim() == 3:
            x = input if self.batch_first else input.transpose(0, 1)
        else:
            raise ValueError(f"input must be a batch, of 3 dimensions (got {input.dim()})")
        starts = None if hx is None else (hx if isinstance(hx, tuple) else (hx,))
        ends: list[tuple[Tensor, ...]] = []
        for k, places in enumerate(self.places):
            outs = []
            for place in places:
                state = (
                    self._start(x)
                    if starts is None
                    else tuple(part[len(ends)] for part in starts)
                )
                out, end = self._run(place, x, state, lengths)
                outs.append(out)
                ends.append(end)
            x = torch.cat(outs, 2)
            if k + 1 < self.num_layers:
                x = F.dropout(x, self.dropout, self.training)
        states = tuple(torch.stack(parts) for parts in zip(*ends, strict=True))
        if lengths is not None:
            x = _packed(x, lengths, input)
        elif not self.batch_first:
            x = x.transpose(0, 1)
        return x, states if self.mode == "LSTM" else states[0]

    def _start(self, x: Tensor) -> tuple[Tensor, ...]:
        sizes = (self.proj_size or self.hidden_size, self.hidden_size)
        return tuple(x.new_zeros(len(x), size) for size in sizes[: 1 + (self.mode == "LSTM")])

    def _run(
        self, place: str, x: Tensor, state: tuple[Tensor, ...], lengths: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Returns outputs (B, T, H) and the last state of one direction of a layer."""
        seen = getattr(self, f"ih_{place}")(x).unbind(1)
        recur = getattr(self, f"hh_{place}")
        order = range(len(seen))
        outs = [state[0]] * len(seen)
        for t in reversed(order) if place.endswith("_reverse") else order:
            new = advance(self.mode, seen[t], recur(state[0]), state)
            if self.proj_size:
                new = (getattr(self, f"hr_{place}")(new[0]), *new[1:])
            if lengths is not None:
                # a record that is over keeps its state
                runs = (t < lengths)[:, None]
                new = tuple(torch.where(runs, a, b) for a, b in zip(new, state, strict=True))
            state = new
            outs[t] = new[0]
        return torch.stack(outs, 1), state


def _packed(x: Tensor, lengths: Tensor, like: PackedSequence) -> PackedSequence:
    """Returns a batch packed as another one is."""
    order = like.sorted_indices
    if order is not None:
        x = x[order]
        lengths = lengths[order]
    data = pack_padded_sequence(x, lengths.cpu(), batch_first=True).data
    return PackedSequence(data, like.batch_sizes, order, like.unsorted_indices)
