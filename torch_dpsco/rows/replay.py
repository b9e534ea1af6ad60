"""Training passes of an attached model over made-up records: what its kernels give for each of them, bit by bit.

They ask in what sizes batches may come (`trial.sizes`). The model is called as it was in its first step, and what the
loop computed from its outputs is repeated (`trial.loss`). Of that step shapes are kept, and no tensor. Parameters are
random: those of the run may be secret, or zeros, at which no bit depends on anything.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torch_dpsco.compat import tree_leaves, tree_unflatten
from torch_dpsco.errors import SequenceError
from torch_dpsco.rows.batch import attachments, clear_rows
from torch_dpsco.rows.blocks import Block, DenseBlock, FactoredBlock
from torch_dpsco.rows.layers.kinds import ItemBlock
from torch_dpsco.rows.means import NO_MEAN, Averaged
from torch_dpsco.sampling.loader import Sizes
from torch_dpsco.trial import SEED, Leaf, Untouched, random_like, seed_torch
from torch_dpsco.trial.loss import RepeatedLoss
from torch_dpsco.trial.sizes import Trial

COMPILED = "kernels of a compiled model depend on the sizes that came before"


@dataclass
class Replay:
    """How a model was called in its first step, and what its loss was.

    Args:
        structure: of the arguments.
        inputs: of the model: what tensors look like, and all else as it was.
        dims: where its outputs have the records, None where they have none.
        mean: whether the loss is a mean over the batch.
        memory: where that of the inputs was.
        loss: it, once all of its operations were seen.
    """

    structure: Any
    inputs: list[Any]
    dims: Sequence[int | None]
    mean: bool
    memory: frozenset[tuple[int, int]]
    loss: RepeatedLoss | None = None

    def sizes(
        self, model: nn.Module, usual: int, most: int, delivered: frozenset[tuple[int, int]]
    ) -> Sizes | str:
        """Returns in what sizes batches may come; see `trial.sizes.Trial`.

        Args:
            model: attached, with no rows waiting.
            usual: rows of a usual draw.
            most: rows of a draw at most.
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
        leaves = [*(self.inputs[k] for k in places), *loss.leaves]
        params = [p for p in model.parameters() if p.requires_grad]

        def answers(made: list[Tensor]) -> list[Tensor]:
            filled = list(self.inputs)
            for k, t in zip(places, made, strict=False):
                filled[k] = t
            args, kwargs = tree_unflatten(filled, self.structure)
            outputs = tree_leaves(model(*args, **kwargs))
            known = [t for t, d in zip(outputs, self.dims, strict=True) if _picked(t, d)]
            return rows_of_a_pass(params, known, loss.of(known, made[len(places) :]))

        with random_parameters(model):
            return Trial(
                answers,
                leaves,
                usual,
                most,
                self.mean,
                *of_passes(model),
                loss.made_before(delivered),
            ).sizes()


def of_passes(model: nn.Module) -> tuple[Callable[[bool], None], Callable[[], bool]]:
    """Returns what makes means exact in forwards of an attached model, and whether one runs; see `Trial`."""
    attachment: Any = model._dpsco
    passes = attachment.passes

    def use_exact_means(exact: bool) -> None:
        passes.exact_means = exact

    def in_forward() -> bool:
        return passes.tag is not None

    return use_exact_means, in_forward


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
            found += _tensors(block)
        found.append(block.norms())
    clear_rows(params)
    for attachment in attachments(params):
        attachment.reset()
    return found


def waiting_blocks(params: Sequence[nn.Parameter]) -> Iterator[Block]:
    """Yields the rows that a backward has left on the parameters."""
    for p in params:
        tape = getattr(p, "grad_factors", None)
        dense = getattr(p, "grad_sample", None)
        if tape is not None and tape.uses:
            first = p is tape.weight or tape.weight is None
            if first or not tape.weight.requires_grad:
                trained = [q is not None and q.requires_grad for q in (tape.weight, tape.bias)]
                yield from tape.blocks(weight=trained[0], bias=trained[1])
        elif isinstance(dense, Tensor):
            yield DenseBlock(dense.detach())


def _tensors(block: Block) -> Iterator[Tensor]:
    for value in vars(block).values():
        for t in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(t, Tensor):
                yield t


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
                    # (test_a_start_at_zero_does_not_hide_a_dependence)
                    p.data.copy_(random_like(p, generator))
            yield
    finally:
        for attachment in attachments(params):
            attachment.reset()
        clear_rows(params)
        state.restore()
