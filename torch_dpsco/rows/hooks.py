"""Opacus' hooks for dense rows, where what they would get wrong in silence is right or an error.

This module, which a first `attach` needs, imports Opacus.

Differs from Opacus' GradSampleHooks in:

1. layers that are factored are left out;
2. rows of `Embedding` leave the padding out; those of `EmbeddingBag` count each use of an item, and take 2-D input;
3. a layer that is run again for its rows ("whole": it has parameters of its own and no grad sampler) must take one
   tensor and return one, since the second run would not get anything else but keywords that are no tensors;
4. inputs by keyword, parameters from elsewhere, backward passes without a forward, half-precision means and in-place
   layers on hooked outputs raise an error that names the way out;
5. a layer that a (non-reentrant) checkpoint runs again keeps the rows of its first run;
6. options of layers that Opacus' samplers ignore raise: padding that is not zeros, weights of a bag's items;
7. a packed batch that is not sorted raises: its rows would be of other records than the rows of the other layers.
"""

from __future__ import annotations

import copy
from collections import ChainMap
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any, ClassVar, NoReturn

import torch
from opacus.grad_sample.functorch import prepare_layer
from opacus.grad_sample.grad_sample_module import GradSampleHooks
from opacus.layers import DPGRU, DPLSTM, DPRNN
from opacus.layers.dp_multihead_attention import SequenceBias
from opacus.layers.dp_rnn import RNNLinear
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from torch_dpsco import compat
from torch_dpsco.errors import SequenceError
from torch_dpsco.native import require_full_precision
from torch_dpsco.rows.attach import trainable_layers
from torch_dpsco.rows.forwards import NO_FORWARD, PassCounter
from torch_dpsco.rows.layers.recorded import refuse_unknown

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_RECURRENT = (DPRNN, DPLSTM, DPGRU)
# inside of Opacus' own layers, whose inputs are laid out in another way
_OWN_LAYOUT = (RNNLinear, SequenceBias)


def _embedding_rows(
    layer: nn.Embedding, inputs: list[Tensor], backprops: Tensor
) -> dict[Tensor, Tensor]:
    """Rows of an Embedding, for ids (B, ...): each use of an item adds its gradient; the padding item has none."""
    ids = inputs[0].reshape(len(inputs[0]), inputs[0][:1].numel() if len(inputs[0]) else 0)
    records = torch.arange(len(ids), device=ids.device)[:, None].expand_as(ids)
    uses = backprops.reshape(-1, layer.embedding_dim)
    rows = _summed(layer.weight, records.flatten(), ids.flatten(), uses, len(ids))
    if layer.padding_idx is not None:
        rows[:, layer.padding_idx] = 0.0
    return {layer.weight: rows}


def _bag_rows(
    layer: nn.EmbeddingBag, inputs: list[Tensor], backprops: Tensor
) -> dict[Tensor, Tensor]:
    """Rows of an EmbeddingBag of mode sum or mean, for ids (B, T), or flat ids with offsets (B,)."""
    ids = inputs[0]
    n_records = len(backprops)
    if len(inputs) == 1:
        counts = ids.new_full((n_records,), ids.shape[1])
    else:
        counts = torch.diff(inputs[1], append=inputs[1].new_tensor([len(ids)]))
    records = torch.arange(n_records, device=ids.device).repeat_interleave(counts)
    if layer.mode == "mean":
        backprops = backprops / counts.clamp(min=1)[:, None]
    return {
        layer.weight: _summed(
            layer.weight, records, ids.flatten(), backprops[records], n_records
        )
    }


def _summed(
    weight: Tensor, records: Tensor, items: Tensor, uses: Tensor, n_records: int
) -> Tensor:
    rows = uses.new_zeros(n_records, *weight.shape)
    return rows.index_put_((records, items), uses, accumulate=True)


class DenseHooks(GradSampleHooks):  # type: ignore[misc]
    """Opacus' hooks on all trainable layers that are not factored.

    Args:
        model: to hook.
        factored: layers to leave out.
        passes: counter of the model's forwards, which knows their batch sizes.
        loss_reduction: see `attach`.
        batch_first: see `attach`.
    """

    # Opacus' own table is left alone, and what is registered there later is seen
    GRAD_SAMPLERS: ClassVar[Any] = ChainMap(
        {nn.Embedding: _embedding_rows, nn.EmbeddingBag: _bag_rows},
        GradSampleHooks.GRAD_SAMPLERS,
    )

    refuse: Callable[[str], NoReturn]  # drops the rows that wait, and raises; set by `attach`

    def __init__(
        self,
        model: nn.Module,
        factored: Collection[nn.Module],
        passes: PassCounter,
        *,
        loss_reduction: str,
        batch_first: bool,
    ) -> None:
        self._left_out = {id(layer) for layer in factored}
        self._passes = passes
        self._keywords: dict[
            nn.Module, dict[str, Any]
        ] = {}  # switches of layers that are run again
        self._seen: dict[int, int] = {}  # layer: number of the last forward that kept its input
        super().__init__(model, batch_first=batch_first, loss_reduction=loss_reduction)

    def iterate_submodules(self, module: nn.Module) -> Iterable[nn.Module]:
        """Yields the layers to hook."""
        for _, layer in trainable_layers(module):
            if id(layer) not in self._left_out:
                yield layer

    def add_hooks(self, **options: Any) -> None:
        """Adds Opacus' hooks and those that check inputs; all or none."""
        try:
            super().add_hooks(**options)
            handles = self._module.autograd_grad_sample_hooks
            for layer in self.iterate_submodules(self._module):
                if type(layer) not in _RECURRENT:
                    handles.append(
                        layer.register_forward_pre_hook(self._take_keywords, with_kwargs=True)
                    )
                if type(layer) is nn.Embedding and self.batch_first:
                    handles.append(layer.register_forward_pre_hook(self._spread))
            for module in self._module.modules():
                if type(module) in _RECURRENT:
                    handles.append(
                        module.register_forward_pre_hook(_require_sorted, with_kwargs=True)
                    )
                elif getattr(module, "inplace", False) is True:
                    handles.append(module.register_forward_pre_hook(_refuse_in_place))
        except BaseException:
            self.cleanup()
            raise

    def _take_keywords(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if not module.training or not torch.is_grad_enabled():
            return
        whole = type(module) not in self.GRAD_SAMPLERS
        switches = whole and not any(isinstance(x, Tensor) for x in compat.tree_leaves(kwargs))
        changed = self._keywords.get(module, {}) != kwargs
        # PRIVACY: an earlier use in this forward would get the rows of another one
        # (test_uses_without_right_rows_are_refused_with_a_way_out)
        if changed and (not switches or getattr(module, "activations", None)):
            raise SequenceError(
                f"layer {type(module).__name__} must get its inputs by position (got"
                f" {sorted(kwargs)} by keyword), because Opacus' hooks do not see keywords; keywords"
                " of the whole model are fine, and those that are no tensors of a module with parameters"
                " of its own, if all its uses in a forward have the same"
            )
        if changed:
            self._keywords[module] = kwargs
            bare = copy.copy(module)  # without the hooks
            vars(bare).update({name: {} for name in _HOOKS})
            bare.forward = partial(type(module).forward, bare, **kwargs)
            prepare_layer(bare, batch_first=self.batch_first)
            module.ft_compute_sample_grad = bare.ft_compute_sample_grad

    def _spread(self, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        return (self._passes.spread(args[0]),) if args and module.training else None

    def capture_activations_hook(
        self, module: nn.Module, forward_input: Any, forward_output: Any
    ) -> None:
        """Keeps the input of a layer, after checking that rows can be made from it."""
        if self.hooks_enabled and module.training and torch.is_grad_enabled():
            in_backward = compat.backward_number() != -1
            if in_backward and self._seen.get(id(module)) == self._passes.number:
                return  # a checkpoint runs it again, but rows come from the first run
            self._seen[id(module)] = -1 if in_backward else self._passes.number
            self._check_use(module, forward_input, forward_output)
        super().capture_activations_hook(module, forward_input, forward_output)

    def _check_use(self, module: nn.Module, inputs: Any, output: Any) -> None:
        name = type(module).__name__
        if any(p.requires_grad and "dpsco" not in p.__dict__ for p in module.parameters()):
            refuse_unknown(module)
        tensors = [t for t in inputs if isinstance(t, Tensor)]
        whole = type(module) not in self.GRAD_SAMPLERS
        wrong = whole and (len(inputs) != 1 or not isinstance(output, Tensor))
        if wrong or not inputs or len(tensors) != len(inputs):
            raise SequenceError(
                f"layer {name} must take one tensor by position and return one (got {len(inputs)}"
                f" inputs and {type(output).__name__}), because only that is seen when its rows are"
                " computed: move its parameters into a module of their own"
            )
        if not whole and (unknown := _unknown_option(module, tensors)):
            raise SequenceError(
                f"rows of {name} with {unknown} are not known where its rows are dense"
            )
        if not isinstance(module, _OWN_LAYOUT):
            self._passes.require_batch(module, tensors[-1], 0 if self.batch_first else 1)

    def capture_backprops_hook(
        self,
        module: nn.Module,
        _forward_input: Any,
        forward_output: Any,
        loss_reduction: str,
        batch_first: bool,
    ) -> None:
        """Does what Opacus does, and says what is wrong where the forward recorded nothing."""
        if self.hooks_enabled:
            if not getattr(module, "activations", None):
                self.refuse(NO_FORWARD)
            self._passes.require_called()
            if loss_reduction == "mean":
                # PRIVACY: autocast rounds the 1/B of a mean to 8 or 11 bits
                # (test_a_mean_loss_under_autocast_is_refused)
                require_full_precision(forward_output[0])
        if self._passes.exact_means:
            loss_reduction = "sum"  # means that divide by no number of rows, see `rows.means`
        super().capture_backprops_hook(
            module, _forward_input, forward_output, loss_reduction, batch_first
        )


def _unknown_option(module: nn.Module, tensors: list[Tensor]) -> str:
    """Returns the option of a layer that its grad sampler ignores or stumbles on; empty if there is none."""
    if getattr(module, "padding_mode", "zeros") != "zeros":
        return f"padding_mode={module.padding_mode!r} (dp.attach(model, rows='auto') has them)"
    if isinstance(module, nn.LayerNorm) and module._parameters["bias"] is None:
        return "bias=False (dp.attach(model, rows='auto') has them)"
    if isinstance(module, nn.EmbeddingBag) and len(tensors) > 2:
        return "per_sample_weights (weigh the vectors of an Embedding instead)"
    return ""


def _require_sorted(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    packed = args[0] if args else kwargs.get("input")
    if (
        module.training
        and isinstance(packed, PackedSequence)
        and packed.sorted_indices is not None
    ):
        # PRIVACY: rows of this layer would be in the order of lengths, those of the others in that of the batch, so
        # that a record is in two rows (test_packed_sequences_that_are_not_sorted_are_refused)
        raise SequenceError(
            "packed sequences must be made with enforce_sorted=True: sort the records of a batch by"
            " length, longest first, in the collate function, or use dp.private_layers, which take"
            " them in any order"
        )


def _refuse_in_place(module: nn.Module, args: Any) -> None:
    node = args[0].grad_fn if args and isinstance(args[0], Tensor) else None
    if type(node).__name__ == "BackwardHookFunctionBackward":
        raise SequenceError(
            f"{type(module).__name__}(inplace=True) would overwrite the output of a layer whose"
            " rows are recorded: use inplace=False"
        )
