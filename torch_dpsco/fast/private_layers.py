"""`dp.private_layers`: a copy of a model in which layers without per-sample gradients are replaced, weights kept.

    model = dp.private_layers(model)   # before dp.attach, and before an optimizer is made of its parameters

| layer of torch | becomes |
|---|---|
| `BatchNorm`, `SyncBatchNorm` | `GroupNorm`: of gcd(32, channels) groups as Opacus does it, of 1 for `BatchNorm1d` |
| `InstanceNorm` with running statistics | itself without them |
| `MultiheadAttention`, also in `nn.Transformer` and its layers | `Attention` |
| a layer that `nn.utils.prune` has pruned | itself, times a frozen mask, by a parametrization |
| `Conv1D` of transformers (GPT-2), whose rows would be formed, slower | a `Linear` layer |
| `LSTM`, `GRU`, `RNN` and their cells | `Recurrent` of `rows.layers.recurrent`, `Cell` |

The new layers are made of `Linear` ones, whose rows are recorded, and take the inputs of torch's, batches alone. Their
state dicts have torch's names in both directions, so that what is trained can be loaded into the plain model.
"""

from __future__ import annotations

import copy
import math
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.nn.utils.parametrize import register_parametrization

from torch_dpsco._validate import typed
from torch_dpsco.compat import BatchNorm
from torch_dpsco.errors import SequenceError
from torch_dpsco.rows.attach import is_attached
from torch_dpsco.rows.layers.recurrent import GATES, OfTorch, Recurrent, advance


class Attention(OfTorch):
    """torch's `MultiheadAttention` for batches, with all of its options and masks.

    Args:
        old: layer of torch whose options and weights it takes.
    """

    in_proj_bias = None  # so layers of nn.Transformer do not run past it, in evaluation
    _qkv_same_embed_dim = False
    q_proj: Any
    k_proj: Any
    v_proj: Any
    out_proj: Any
    bias_k: Any
    bias_v: Any

    def __init__(self, old: nn.MultiheadAttention) -> None:
        super().__init__()
        self.embed_dim = old.embed_dim
        self.num_heads = old.num_heads
        self.dropout = old.dropout
        self.batch_first = self.attends_batch_first = old.batch_first
        self.add_zero_attn = old.add_zero_attn
        same = old._qkv_same_embed_dim
        bias = "in_proj_bias" if "in_proj_bias" in old.state_dict() else ""
        for part, (name, width) in enumerate(
            zip("qkv", (old.embed_dim, old.kdim, old.vdim), strict=True)
        ):
            weight = "in_proj_weight" if same else f"{name}_proj_weight"
            self.linear(f"{name}_proj", width, old.embed_dim, weight, bias, part)
        out_bias = bias and "out_proj.bias"
        self.linear("out_proj", old.embed_dim, old.embed_dim, "out_proj.weight", out_bias)
        self.has_bias = old.bias_k is not None
        for name in ("bias_k", "bias_v") if self.has_bias else ():
            layer = nn.Embedding(1, old.embed_dim)
            layer.batch_comes_first = True  # type: ignore[assignment]
            self.add_module(name, layer)
            self.theirs[f"{name}.weight"] = name, None
        self.like(old)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Returns outputs and weights as torch's layer does, see there; inputs are batches."""
        if query.dim() != 3:
            raise ValueError(f"query must be a batch, of 3 dimensions (got {query.dim()})")
        if is_causal and attn_mask is None:
            raise ValueError("attn_mask must be given where is_causal is, which is a hint")
        if not self.batch_first:
            query, key, value = (t.transpose(0, 1) for t in (query, key, value))
        keys = key.shape[1]
        q = self.q_proj(query)
        k = self.k_proj(key)
        v = self.v_proj(value)
        if self.has_bias:
            one = torch.zeros(len(k), 1, dtype=torch.long, device=k.device)
            k = torch.cat([k, self.bias_k(one)], 1)
            v = torch.cat([v, self.bias_v(one)], 1)
        q, k, v = (t.unflatten(2, (self.num_heads, -1)) for t in (q, k, v))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        if self.add_zero_attn:
            k, v = (F.pad(t, (0, 0, 0, 1)) for t in (k, v))
        mask = _mask(attn_mask, key_padding_mask, q, keys)
        if mask is not None:
            mask = F.pad(mask, (0, k.shape[2] - keys))
        drop = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[3])
            weights = F.dropout((scores if mask is None else scores + mask).softmax(3), drop)
            out = weights @ v
            weights = weights.mean(1) if average_attn_weights else weights
        else:
            out = F.scaled_dot_product_attention(q, k, v, mask, drop)
        out = self.out_proj(out.transpose(1, 2).flatten(2))
        return out if self.batch_first else out.transpose(0, 1), weights


def _mask(over: Tensor | None, padding: Tensor | None, q: Tensor, keys: int) -> Any:
    """Returns what is added to the scores (B, heads, T, S), None for nothing."""
    records, heads, times, _ = q.shape
    found: Any = None
    if over is not None:
        found = _numbers("attn_mask", over, q, [(times, keys), (records * heads, times, keys)])
        found = found if found.dim() == 2 else found.unflatten(0, (records, heads))
    if padding is not None:
        added = _numbers("key_padding_mask", padding, q, [(records, keys)])[:, None, None]
        found = added if found is None else found + added
    return found


def _numbers(name: str, mask: Tensor, like: Tensor, shapes: list[tuple[int, ...]]) -> Tensor:
    """Returns a mask as numbers to add; raises ValueError for one of another shape."""
    if mask.shape not in shapes or not (mask.dtype is torch.bool or mask.is_floating_point()):
        raise ValueError(
            f"{name} must be bool or floating, of shape {' or '.join(map(str, shapes))} (got"
            f" {mask.dtype}, {tuple(mask.shape)})"
        )
    if mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=like.dtype).masked_fill_(mask, -math.inf)
    return mask.to(like.dtype)


class Cell(OfTorch):
    """torch's `LSTMCell`, `GRUCell` or `RNNCell` for batches.

    Args:
        old: layer of torch whose weights it takes.
    """

    ih: Any
    hh: Any

    def __init__(self, old: nn.RNNCellBase) -> None:
        super().__init__()
        self.hidden_size = old.hidden_size
        kind = type(old).__name__.removesuffix("Cell")
        self.mode = f"RNN_{old.nonlinearity}".upper() if kind == "RNN" else kind
        gates = GATES.get(kind, 1) * old.hidden_size
        for name, width in (("ih", old.input_size), ("hh", old.hidden_size)):
            self.linear(name, width, gates, f"weight_{name}", f"bias_{name}" if old.bias else "")
        self.like(old)

    def forward(self, input: Tensor, hx: Any = None) -> Any:
        """Returns the next state as torch's layer does."""
        state = hx if isinstance(hx, tuple) else (hx,)
        if hx is None:
            state = (input.new_zeros(len(input), self.hidden_size),) * 2
        found = advance(self.mode, self.ih(input), self.hh(state[0]), state)
        return found if self.mode == "LSTM" else found[0]


class Turned(OfTorch):
    """The `Conv1D` of transformers, a Linear layer whose weight is turned over.

    Args:
        old: it.
    """

    inner: Any

    def __init__(self, old: Any) -> None:
        super().__init__()
        self.linear("inner", old.nx, old.nf, "weight", "bias")
        self.theirs["inner.weight"] = "weight", "turned"
        self.like(old)

    def forward(self, x: Tensor) -> Tensor:
        """Returns what the layer does."""
        found: Tensor = self.inner(x)
        return found


class _Mask(nn.Module):
    """A parametrization: times a mask."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.mask = nn.Parameter(mask, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.mask


def _keep_pruned(layer: nn.Module) -> None:
    """Turns the hooks of pruning on a layer into parametrizations."""
    for hook in list(layer._forward_pre_hooks.values()):
        if isinstance(hook, prune.BasePruningMethod):
            name = hook._tensor_name
            mask = layer.get_buffer(f"{name}_mask")
            prune.remove(layer, name)
            register_parametrization(layer, name, _Mask(mask))


def _group_norm(old: Any) -> nn.Module:
    groups = 1 if isinstance(old, nn.BatchNorm1d) else math.gcd(32, old.num_features)
    new = nn.GroupNorm(groups, old.num_features, old.eps, old.affine)
    for name, p in old.named_parameters():
        setattr(new, name, p)
    return new.train(old.training)


_REPLACED: dict[type[nn.Module], Any] = {
    **dict.fromkeys(BatchNorm, _group_norm),
    nn.MultiheadAttention: Attention,
    **dict.fromkeys((nn.LSTM, nn.GRU, nn.RNN), Recurrent),
    **dict.fromkeys((nn.LSTMCell, nn.GRUCell, nn.RNNCell), Cell),
}


@typed
def private_layers(model: nn.Module) -> Any:
    """Returns a copy of a model in which layers without per-sample gradients are replaced; see the table above.

    Subclasses of torch's layers stay, and `attach` says which.

    Args:
        model: not attached; stays as it is.

    Raises:
        SequenceError: the model is attached.

    Example:
        >>> model = private_layers(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)))
        >>> type(model[1]).__name__, model[1].num_groups
        ('GroupNorm', 8)
    """
    if any(map(is_attached, model.modules())):
        raise SequenceError("model must not be attached: call private_layers before dp.attach")
    parts = (t for m in model.modules() for t in vars(m).values() if isinstance(t, Tensor))
    # what a hook makes of weights, as pruning does, is no leaf, and has no copy
    holder = nn.ModuleList([copy.deepcopy(model, {id(t): t.detach() for t in parts})])
    turned = getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", Turned)
    replaced = {**_REPLACED, turned: Turned}
    made: dict[nn.Module, nn.Module] = {}  # a layer that is in several places stays one
    for parent in list(holder.modules()):
        _keep_pruned(parent)
        if isinstance(parent, nn.TransformerEncoder):
            parent.use_nested_tensor = False
        if isinstance(parent, (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)):
            parent.track_running_stats = False
            parent.running_mean = parent.running_var = parent.num_batches_tracked = None
        for name, child in parent._modules.items():
            if child is not None and type(child) in replaced:
                if child not in made:
                    made[child] = replaced[type(child)](child)
                parent._modules[name] = made[child]
    return holder[0]
