"""The check of an attached model's first step: do records reach each other, in the model or in the loss?

It runs on synthetic records of the first batch's shape (`trial`). The model is called without gradients, after its
first training forward, as it was before it, and restored (`trial`); outputs of the other records must stay, and
those of a batch whatever the records of the batch before it were. What the loop computes
from its outputs is noted, and looked at before the backward (`trial.loss`). It does not see what is done to a batch
before the model, statistics of targets alone, nor what later steps compute; hooks of the model and what it writes to
outside of itself are called and written some sixteen times more.

Training passes of an attached model over made-up records: what its kernels give for each of them, bit by bit.

They ask in what sizes batches may come (`trial.sizes`). The model is called as it was in its first step, and what the
loop computed from its outputs is repeated (`trial.loss`). Of that step shapes are kept, and no tensor. Parameters are
random: those of the run may be secret, or zeros, at which no bit depends on anything.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from torch_dpsco.compat import tree_flatten, tree_leaves, tree_unflatten
from torch_dpsco.errors import PrivacyError, SequenceError
from torch_dpsco.rows.batch import attachments, batch_sizes, clear_rows
from torch_dpsco.rows.blocks import Block, DenseBlock, FactoredBlock
from torch_dpsco.rows.layers.kinds import ItemBlock
from torch_dpsco.rows.means import NO_MEAN, Averaged
from torch_dpsco.sampling import Slots
from torch_dpsco.sampling.loader import Sizes
from torch_dpsco.trial import (
    SEED,
    Answer,
    Leaf,
    Memory,
    Mixed,
    Refused,
    SyntheticBatches,
    Untouched,
    attempt,
    both_fills,
    changed,
    compare,
    random_like,
    rows_first,
    seed_torch,
)
from torch_dpsco.trial.loss import BLOCK, RepeatedLoss, Trace, plain, trace_outputs
from torch_dpsco.trial.sizes import Trial

# of synthetic batches: the first that is no other size of the model's tensors
_SIZES = (7, 5, 11, 13, 17, 19, 23)
_CPU = torch.device("cpu")
_SAFE = ("cpu",)  # devices on which a wrong index is an error
_MOST_COPIED = 2**24  # parameters of a model that is copied to the CPU
_OFF = "not checked, switched off by dp.attach(check_first_step=False)"
_UNSEEN = {
    "model": "not checked, no training forward of a batch was seen",
    "loss": "not checked, no loss.backward() of a batch was seen",
}
_PROBED = "checked by the probes of dp.doctor on made-up records: none reaches another"
_FOUND = (
    "records must not reach each other in the model (with {what} as one of several made-up records,"
    " the outputs of others changed): clipping one row at a time does not bound"
    " one record then; replace statistics of the batch (x.mean(0), x.abs().max(), medians) by"
    " constants or by functions of one record (docs/mistakes.md, coupled records)"
)
_REMEMBERS = (
    "model must not remember earlier batches (after a batch of other made-up records its outputs"
    " for the same records changed; look at {kept}): records of one batch would be in the rows of"
    " later ones, which no charge covers; begin each forward with a fresh state, and take whole"
    " sequences in one forward (docs/mistakes.md, stateful model)"
)


class FirstStep:
    """What is known about records that reach each other in an attached model; checked in its first step.

    Args:
        asked: whether to look.
        reduction: of the loss, "mean" or "sum".
        dim: where the batch is in the inputs.
    """

    def __init__(self, asked: bool, reduction: str, dim: int) -> None:
        self.verdicts = dict(_UNSEEN) if asked else dict.fromkeys(_UNSEEN, _OFF)
        self.reduction = reduction
        self.forwards = 0
        self.asked, self.probed = asked, False  # the doctor says whether it has compared rows
        self.hooked = False  # whether hooks on the model may change the gradients of its outputs
        self._open = dict.fromkeys(_UNSEEN, True)
        self._before: Memory | None = (
            None  # what the model kept before the forward that is looked at
        )
        self._dim = dim
        self._dims: list[int | None] | None = (
            None  # of the model's outputs, as far as that was seen
        )
        self._memory: frozenset[tuple[int, int]] = (
            frozenset()
        )  # of its inputs, numbers that are not whole
        self.delivered: frozenset[tuple[int, int]] = frozenset()  # memory of the batch then
        self.autocast = False  # whether its first forward ran under autocast
        self.compiled = False  # whether the model is called through torch.compile
        self.replay: Replay | None = None  # how it was called, without data
        self.sizes: tuple[Any, Sizes | str] | None = None  # what was found for which draws
        self.block: Any = None  # what runs in a block of several forwards, if that is looked at

    @property
    def waits(self) -> bool:
        """Whether a part is to be looked at in the next step."""
        return self.asked and (any(self._open.values()) or self.block is not None)

    def settle(self, part: str, verdict: str) -> None:
        """Notes what is known about "model" or "loss", which is not looked at any more."""
        self.verdicts[part], self._open[part] = verdict, False

    def open_block(self) -> Any:
        """Returns what notes all that a block of several forwards computes; None if it is not looked at."""
        self.verdicts.setdefault(BLOCK, _UNSEEN["loss"] if self.asked else _OFF)
        if self.asked and self._open.get(BLOCK, True):
            self.forwards += 1
            self.block = Trace(self)
        return self.block

    def keep(self, loss: RepeatedLoss) -> None:
        """Keeps what the loop computes from the outputs of the model, without data."""
        if self.replay is not None and self.block is None:
            self.replay.loss = loss

    def settle_probed(self, part: str) -> None:
        """Notes that the probes of the doctor were about this part, if they have shown anything."""
        if self.probed:
            self.settle(part, _PROBED)

    def take(self, other: FirstStep) -> None:
        """Takes over what is known of the same model."""
        self.verdicts.update(other.verdicts)
        self._open.update(other._open)

    def begin(
        self, layers: Sequence[nn.Module], memory: frozenset[tuple[int, int]], isolation: Any
    ) -> None:
        """Notes what a model keeps before a training forward, after which it may be looked at, and inputs' memory."""
        if not self.waits:
            return
        if isolation is not None:
            self.delivered = isolation.delivered
        self.autocast = torch.is_autocast_enabled("cpu")
        self._memory = memory
        if self._open["model"]:
            with _without_collector():
                self._before = Memory(layers)

    def look(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        """Looks at a model, after a training forward; returns its output, traced for a look at the loss.

        Raises:
            PrivacyError: a synthetic record moves the outputs of others.
        """
        self.forwards += self.block is None
        self.hooked = not all(map(_only_looks, model._backward_hooks.values()))
        call = _Call(model, args, kwargs, output)
        before = self._before
        self._before = None
        if self._open["model"] and before is not None:
            self._look_at(call, before)
        if not self._open["loss"] and self.block is None:
            return None
        dims = self._dims
        leaves = tree_leaves(output)
        if dims is None or len(dims) != len(leaves):
            sizes = [len(t) if isinstance(t, Tensor) and t.dim() else None for t in leaves]
            one = self._dim == 0 and len({*sizes} - {None}) == 1
            dims = [0 if one and size is not None else None for size in sizes]
        rows = call.sizes(self._dim)
        if self.replay is None and rows is not None and len(rows) == 1:
            # others have looked at the model
            calls = _Calls(call, min(rows), self._dim, Memory([]))
            calls.dims = dims
            self.replay = calls.replay(self._memory)
        return trace_outputs(self, output, dims)

    def _look_at(self, call: _Call, before: Memory) -> None:
        inputs = call.args, call.kwargs
        leaves = tree_leaves(inputs)
        tensors = [t for t in leaves if isinstance(t, Tensor) and t.dim() > self._dim]
        sizes = dict.fromkeys(t.shape[self._dim] for t in tensors)
        unknown = call.sizes(self._dim) is None
        packed = any(isinstance(leaf, PackedSequence) for leaf in leaves)
        if not sizes or unknown or packed or _has_lists(inputs):
            self.settle(
                "model", "not checked, its inputs are no tensors with a row for each record"
            )
            return
        verdict = ""
        for batch in (size for size in sizes if size):
            # the batch is the size that the outputs follow
            calls = _Calls(call, batch, self._dim, before)
            # PrivacyError leaves the part open: it comes again
            verdict = calls.problem or self._compared(calls)
            if any(dim is not None for dim in calls.dims):
                self._dims = calls.dims
                self.replay = calls.replay(self._memory)
                break
        if verdict:  # else the batch was empty
            self.settle("model", verdict)

    def _compared(self, calls: _Calls) -> str:
        found = attempt("calling the model on made-up records", calls.compared)
        if isinstance(found, Refused):  # e.g. memory
            return f"not checked, {type(found.error).__name__} was raised"
        if isinstance(found, str):
            return found
        self.verdicts["model"] = "records REACH each other"
        # PRIVACY: one would be in many rows (test_a_model_that_couples_records_is_found_at_the_first_step,
        # test_a_model_that_remembers_batches_is_found_at_the_first_step)
        raise found


class _Call(NamedTuple):
    """A forward of an attached model."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any

    def sizes(self, dim: int) -> frozenset[int] | None:
        """Returns the sizes that its batch may have, see `batch_sizes`."""
        return batch_sizes((*self.args, *self.kwargs.values()), dim)


class _Calls:
    """Calls of a model on synthetic records, for one guess at the size of its batch.

    Args:
        call: its first forward.
        batch: the guess.
        dim: where the batch is in the inputs.
        before: what the model kept before that forward.
    """

    def __init__(self, call: _Call, batch: int, dim: int, before: Memory) -> None:
        self._model = call.model
        self._batch = batch
        self._dim = dim
        self._before = before
        self._inputs, self._structure = tree_flatten(plain((call.args, call.kwargs)))
        self._real = tree_leaves(call.output)
        self.dims: list[int | None] = [None] * len(self._real)  # where outputs have the batch
        sizes = {
            n for t in (*self._inputs, *self._real) if isinstance(t, Tensor) for n in t.shape
        }
        self.rows = next(n for n in _SIZES if n not in sizes or n == _SIZES[-1])
        self._places = [
            k
            for k, t in enumerate(self._inputs)
            if isinstance(t, Tensor) and t.dim() > dim and t.shape[dim] == batch
        ]
        made = [self._inputs[k] for k in self._places]
        # a wrong index on an accelerator ends the process
        self._on_cpu = any(
            not t.is_floating_point() and t.device.type not in _SAFE for t in made
        )
        self.problem = ""
        if self._on_cpu and sum(p.numel() for p in call.model.parameters()) > _MOST_COPIED:
            self.problem = (
                "not checked, integers are made up on the CPU, where the model is too large to be"
                " copied"
            )
        self.leaves = [
            Leaf(tuple(t.shape), t.dtype, _CPU if self._on_cpu else t.device, dim) for t in made
        ]

    def replay(self, memory: frozenset[tuple[int, int]]) -> Replay:
        """Returns how the model is called, without data."""
        inputs = [self._without_data(k, t) for k, t in enumerate(self._inputs)]
        return Replay(self._structure, inputs, self.dims, memory)

    def _without_data(self, place: int, t: Any) -> Any:
        if not isinstance(t, Tensor):
            return t
        dim = self._dim if place in self._places else None
        return Leaf(tuple(t.shape), t.dtype, t.device, dim)

    def compared(self) -> str | PrivacyError:
        """Returns what was checked, or how and where records reach each other; puts everything back."""
        with _without_collector(), self._open():
            found = compare(self, both_fills(self.leaves, self.rows))
            if isinstance(found, Mixed):
                return PrivacyError(_FOUND.format(what=found.what))
            if not self._remembers():
                return found
            kept = ", ".join(self._before.attributes.new_tensors()) or "what a forward writes to"
            return PrivacyError(_REMEMBERS.format(kept=kept))

    def _remembers(self) -> bool:
        """Returns whether outputs depend on the records of the batch before."""
        for rows in (
            self.rows,
            self._batch,
        ):  # what a module keeps may have the size of the batch
            for pool in both_fills(self.leaves, rows):
                first, again, other = (self._second(pool, scale) for scale in (1.0, 1.0, 0.0))
                if first and again and other:  # else it takes no such batches
                    return not changed(first, again) and bool(changed(first, other))
        return False

    def _second(self, pool: SyntheticBatches, scale: float) -> list[Answer]:
        """Returns the outputs for a batch after another one, whose records are times a number; none if it raises."""

        def run() -> list[Any]:
            self._rewind()
            self._outputs(pool.batch({k: [scale] * pool.rows for k in range(len(pool.leaves))}))
            return self._outputs(pool.batch())

        found = attempt("two batches", run)
        outputs = [] if isinstance(found, Refused) else found
        return [rows_first(t, 0) for t in outputs if isinstance(t, Tensor) and t.dim()]

    def _rewind(self) -> None:
        self._state.rewind()
        self._before.rewind()

    @contextmanager
    def _open(self) -> Iterator[None]:
        self._state, after = Untouched(self._model), Memory(list(self._model.modules()))
        self._copy: dict[str, Tensor] = {}
        if self._on_cpu:
            tensors = (*self._model.named_parameters(), *self._model.named_buffers())
            self._copy = {name: t.detach().cpu() for name, t in tensors}
        try:
            with (
                torch.no_grad(),
                warnings.catch_warnings(),
                torch.compiler.set_stance("force_eager"),
            ):
                warnings.simplefilter("ignore")
                yield
        finally:
            self._state.restore()
            after.rewind()

    def __call__(self, made: list[Tensor]) -> list[Answer]:
        """Returns the outputs for synthetic records, records first."""
        self._rewind()
        found = self._outputs(made)
        self.dims = [self._dim_of(*pair) for pair in zip(found, self._real, strict=True)]
        return [rows_first(t, d) for t, d in zip(found, self.dims, strict=True) if d is not None]

    def _outputs(self, made: list[Tensor]) -> list[Any]:
        leaves = [t.cpu() if self._on_cpu and isinstance(t, Tensor) else t for t in self._inputs]
        for k, t in zip(self._places, made, strict=True):
            leaves[k] = t
        args, kwargs = tree_unflatten(leaves, self._structure)
        seed_torch(SEED)
        if not self._copy:
            return list(tree_leaves(self._model(*args, **kwargs)))
        return list(
            tree_leaves(torch.func.functional_call(self._model, self._copy, args, kwargs))
        )

    def _dim_of(self, made: Any, real: Any) -> int | None:
        """Returns where an output has the batch: there alone it has changed its size."""
        if (
            not isinstance(made, Tensor)
            or not isinstance(real, Tensor)
            or made.dim() != real.dim()
        ):
            return None
        pairs = list(zip(made.shape, real.shape, strict=True))
        differing = [d for d, (ours, theirs) in enumerate(pairs) if ours != theirs]
        if len(differing) != 1 or differing[0] > self._dim:
            return None
        (d,) = differing
        return d if pairs[d] == (self.rows, self._batch) else None


@contextmanager
def _without_collector() -> Iterator[None]:
    """Stops the search for garbage, which would look through copies of thousands of attributes many times."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _only_looks(hook: Any) -> bool:
    """Returns whether a hook is one of those that make rows."""
    return str(getattr(hook, "func", hook).__module__).split(".")[0] in ("opacus", "torch_dpsco")


def _has_lists(tree: Any) -> bool:
    """Returns whether there are lists of tensors in the inputs: a record for each entry."""
    if isinstance(tree, (tuple, dict)):
        return any(map(_has_lists, tree.values() if isinstance(tree, dict) else tree))
    return isinstance(tree, list) and any(isinstance(leaf, Tensor) for leaf in tree_leaves(tree))


COMPILED = "kernels of a compiled model depend on the sizes that came before"


@dataclass
class Replay:
    """How a model was called in its first step, and what its loss was.

    Args:
        structure: of the arguments.
        inputs: of the model: what tensors look like, and all else as it was.
        dims: where its outputs have the records, None where they have none.
        memory: where that of the inputs was.
        loss: it, once all of its operations were seen.
    """

    structure: Any
    inputs: list[Any]
    dims: Sequence[int | None]
    memory: frozenset[tuple[int, int]]
    loss: RepeatedLoss | None = None

    def sizes(
        self, model: nn.Module, slots: Slots, delivered: frozenset[tuple[int, int]]
    ) -> Sizes | str:
        """Returns in what sizes batches may come; see `trial.sizes.Trial`.

        Args:
            model: attached, with no rows waiting.
            slots: of the draws.
            delivered: where the memory of the batch of that step was.
        """
        loss = self.loss
        if loss is None:
            return "not all that the loop computes of the outputs was seen"
        if loss.names_rows():
            # PRIVACY: repeated it is a constant (test_a_loss_that_names_the_number_of_rows_keeps_slots)
            return "the loss of the loop uses the number of rows"
        if not self.memory <= delivered:
            # PRIVACY: what a loop computes for all records at once (test_what_a_loop_does_to_inputs_keeps_slots)
            return (
                "inputs of the model are not the tensors of the loader: do what the loop does to them in the model,"
                " or in the data set"
            )
        places = [k for k, leaf in enumerate(self.inputs) if isinstance(leaf, Leaf)]
        leaves = [*(self.inputs[k] for k in places), *loss.leaves_of_any_size]
        params = [p for p in model.parameters() if p.requires_grad]

        def outputs(made: list[Tensor]) -> list[Tensor]:
            filled = list(self.inputs)
            for k in places:
                filled[k] = made.pop(0)  # its memory goes as soon as the model has a copy
            args, kwargs = tree_unflatten(filled, self.structure)
            found = tree_leaves(model(*args, **kwargs))
            known = (t for t, d in zip(found, self.dims, strict=True) if d is not None)
            return [t for t in known if isinstance(t, Tensor) and t.requires_grad]

        def answers(made: list[Tensor]) -> list[Tensor]:
            known = outputs(made)
            return rows_of_a_pass(params, known, loss.of(known, made))

        with random_parameters(model):
            return Trial(
                answers,
                leaves,
                slots.usual,
                slots.most,
                model._dpsco.passes,  # type: ignore[union-attr]
                loss.made_before(delivered),
            ).sizes()


def _picked(t: Any, dim: int | None) -> bool:
    return dim is not None and isinstance(t, Tensor) and t.requires_grad


def rows_of_a_pass(
    params: Sequence[nn.Parameter], outputs: Sequence[Tensor], loss: Tensor
) -> list[Tensor]:
    """Returns all that a backward makes for each record, and takes it from the parameters.

    Args:
        params: of an attached model.
        outputs: of its forward.
        loss: computed from them.
    """
    if isinstance(loss, Averaged):
        raise SequenceError(NO_MEAN)
    # not backward(): it would call hooks on the parameters
    torch.autograd.grad(loss, list(params), allow_unused=True)
    found = [t.detach() for t in outputs]
    for block in waiting_blocks(params):
        if isinstance(block, FactoredBlock):
            found += [block.acts, block.backprops * block.scale]
        elif not isinstance(
            block, ItemBlock
        ):  # whose vectors are not in the order of the records
            found += [t for t in tree_leaves(vars(block)) if isinstance(t, Tensor)]
        found.append(block.norms())
    clear_rows(params)
    for attachment in attachments(params):
        attachment.reset()
    return found


def waiting_blocks(params: Sequence[nn.Parameter]) -> Iterator[Block]:
    """Yields the rows that a backward has left on the parameters."""
    tapes = [getattr(p, "grad_factors", None) for p in params]
    for tape in dict.fromkeys(tape for tape in tapes if tape is not None and tape.uses):
        yield from tape.joined().blocks(
            weight=tape.weight is not None, bias=tape.bias is not None
        )
    for p in params:
        if isinstance(dense := getattr(p, "grad_sample", None), Tensor):
            yield DenseBlock(dense.detach())


@contextmanager
def random_parameters(model: nn.Module) -> Iterator[None]:
    """Gives an attached model random parameters for a block, and puts back what passes change in it.

    Args:
        model: with no rows waiting.
    """
    state = Untouched(model)
    params = list(model.parameters())
    generator = torch.Generator().manual_seed(SEED)
    try:
        with warnings.catch_warnings(), torch.enable_grad():
            warnings.simplefilter("ignore")
            seed_torch(SEED)
            for p in params:
                if p.requires_grad:
                    # PRIVACY: not those of the run, which may be secret, or zeros
                    # (test_a_start_at_zero_does_not_hide_a_dependence, test_a_trial_puts_parameters_back)
                    p.data.copy_(random_like(p, generator))
            yield
    finally:
        for attachment in attachments(params):
            attachment.reset()
        clear_rows(params)
        state.restore()
