"""Forward and backward passes on synthetic batches. Everything is restored afterwards.

The passes run at random parameters: at a start of all zeros the terms that couple records, and those of a regularizer,
would have no gradient, and where a run is may be secret. All passes use the same random numbers, so that dropout masks
agree.

Synthetic batches (`trial`) have the shapes and dtypes of a data set's first record, and do not depend on data values.
Targets of (input, target) pairs are 1, or class 1; 0 if the loss refuses these. What is not a tensor after collating is
the first record's.

The guarantee assumes that for batches of ONE size a row is computed from its own record alone (docs/guarantees.md).
Here that is looked at: synthetic records, the model's own weights, threads and device as they are. It is no proof.
Rows are compared without forming those of Linear layers. Ghost clipping makes no rows, and only its loss is looked at.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from torch_dpsco.compat import hooks_made, tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch_dpsco.diagnosis.script import Finding, OfBatch, Script, is_ghost_loss_value
from torch_dpsco.rows import Tape, clear_rows
from torch_dpsco.rows.attach import attach
from torch_dpsco.rows.batch import attachments
from torch_dpsco.rows.blocks import Block, FactoredBlock
from torch_dpsco.rows.first_step import (
    COMPILED,
    random_parameters,
    rows_of_a_pass,
)
from torch_dpsco.rows.forwards import forget_uses
from torch_dpsco.sampling import PrivateLoader
from torch_dpsco.sampling.loader import Sizes, is_compiled
from torch_dpsco.trial import (
    CHECKED,
    LOOKED_AT,
    Answer,
    Isolation,
    Leaf,
    Mixed,
    Refused,
    SyntheticBatches,
    Untouched,
    attempt,
    both_fills,
    changed,
    compare,
    isolation,
    joined,
    random_like,
    rows_first,
    seed_torch,
)
from torch_dpsco.trial.sizes import Trial

ROUNDING = 1e-9  # relative, of sums in double precision in any order
_SEED = 1_000_003
_OTHER_SEED = 2_000_003
_PLACES = (-3.0, -1.0, -0.3, 0.0, 0.3, 1.0, 3.0)  # of `Line`, for records of norm 1
_MOST = 256  # rows of a batch whose bits are compared: more would make the start of `fit` slow
_T = TypeVar("_T")


class NotScalarError(ValueError):
    """The loss did not return one number."""


def rows_of(block: Block) -> Answer:
    """Returns the rows of the first parameter of a block.

    Of outer products the factors, each times the length of the other: as long as the rows, and not much closer.
    """
    if not isinstance(block, FactoredBlock):
        return rows_first(block.dense()[0], 0)
    left = rows_first(block.backprops * block.scale, 0)
    if not block.weight:
        return left
    right = rows_first(block.acts, 0)
    sides = [
        one.numbers * (other.norms()[:, None] / math.sqrt(2.0))
        for one, other in ((left, right), (right, left))
    ]
    return Answer(torch.cat(sides, dim=1), max(left.tolerance, right.tolerance))


@dataclass(frozen=True)
class Pass:
    """One forward and backward in training mode.

    Args:
        value: what the loss returned.
        totals: gradient of the loss by parameter, None for parameters that it does not reach; of a parameter with
            factored rows only what comes from outside of its layer.
        rows: per-sample gradients by parameter, of the parameters that have some.
        factored: parameters whose total is not that of their rows.
    """

    value: Any
    totals: Mapping[str, Tensor | None]
    rows: Mapping[str, Answer]
    factored: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Line:
    """Gradients of single synthetic records at parameters on a line through 0.

    Args:
        places: (points,), increasing, where on the line.
        direction: (dim,), of the line, of length 1.
        grads: (records, points, dim).
    """

    places: Tensor
    direction: Tensor
    grads: Tensor


@dataclass
class Evidence:
    """What the passes show; None or empty where they were not made.

    Args:
        size: records of the synthetic batch.
        base: the batch.
        mixed: with which other record 0 the gradients of others moved.
        compared: whether rows were compared with other records beside them.
        remembers: whether rows moved after another batch in place of the same one.
        buffers: names of buffers and frozen parameters that a training forward changed.
        losses: loss of the batch, of its double and of its triple, in evaluation mode.
        random_loss: whether other random numbers give another loss in evaluation mode.
        mixing: how far the gradient of the batch is from the sum of those of its records, relative.
        mean_rows: whether rows were scaled by the size of the batch.
        randomness: how far other random numbers move the gradient of the batch, relative.
        line: gradients of single records.
        refused: what could not be probed.
        isolation: what moves the bits of a row.
    """

    size: int = 0
    base: Pass | None = None
    mixed: Mixed | None = None
    compared: bool = False
    remembers: bool = False
    buffers: list[str] = field(default_factory=list)
    losses: tuple[float, float, float] | None = None
    random_loss: bool = False
    mixing: float = 0.0
    mean_rows: bool = False
    randomness: float = 0.0
    line: Line | None = None
    refused: list[Refused] = field(default_factory=list)
    isolation: Isolation | None = None

    @property
    def rows(self) -> Mapping[str, Answer]:
        """The per-sample gradients of the batch by parameter, if there are any."""
        return {} if self.base is None else self.base.rows

    @property
    def moving(self) -> bool:
        """Whether there are rows that are not all zero."""
        return any(bool(made.numbers.any()) for made in self.rows.values())

    def keep(self, outcome: _T | Refused) -> _T | None:
        """Returns an outcome; notes it and returns None if it is a refusal."""
        if isinstance(outcome, Refused):
            self.refused.append(outcome)
            return None
        return outcome


Check = Callable[[Script, Evidence], Iterator[Finding]]


def examine(script: Script) -> Evidence:
    """Makes all passes that the script allows, and puts everything back."""
    evidence = Evidence()
    if script.loss is None or not script.trainable or not script.has_record:
        return evidence
    # a criterion is switched to reduction="none" by Opacus while it runs
    criterion = getattr(script.loss, "criterion", None)
    optimizer = script.opacus_optimizer or script.row_free
    others = [script.loss, criterion, optimizer, script.hooks]
    state = Untouched(script.module, [thing for thing in others if hasattr(thing, "__dict__")])
    hooks = hooks_made()
    try:
        with warnings.catch_warnings(), torch.enable_grad():
            warnings.simplefilter("ignore")  # what warns here warns in training too
            made = attempt(
                "making up a batch from the first record", lambda: SyntheticRecords(script)
            )
            synthetic = evidence.keep(made)
            if synthetic is not None:
                _examine(script, evidence, state, synthetic)
    finally:
        state.restore()
        if script.row_free is not None:
            script.row_free.overlook(hooks_made() - hooks)
    return evidence


def _examine(
    script: Script, evidence: Evidence, state: Untouched, synthetic: SyntheticRecords
) -> None:
    evidence.size = synthetic.size
    generator = torch.Generator().manual_seed(_SEED)
    # PRIVACY: iterates may be secret (test_secret_iterates_have_no_say_in_the_findings)
    start = {id(p): random_like(p, generator) for p in script.trainable.values()}
    probe = _Probe(script, evidence, state, synthetic, start)
    if script.attached or script.hooks is not None:
        probe.look_at_rows()
    else:
        attached = attempt(
            "dp.attach",
            lambda: attach(script.module, loss_reduction="sum", check_first_step=False),
        )
        if not isinstance(attached, Refused):
            _Probe(script, evidence, Untouched(script.module), synthetic, start).look_at_rows()
        elif script.row_free is None:
            evidence.keep(attached)
        if script.row_free is not None:
            if not evidence.rows:
                evidence.refused = []  # only rows were
            probe.look_at_single_records()
    _clear(state)
    probe.look_at_sizes()


@dataclass
class _Probe:
    """Passes over one script, each from the same state.

    Args:
        script: it.
        evidence: takes what they show.
        state: from which each starts.
        synthetic: its records.
        start: values of parameters, by the id of each.
    """

    script: Script
    evidence: Evidence
    state: Untouched
    synthetic: SyntheticRecords
    start: Mapping[int, Tensor]

    @property
    def records(self) -> list[int]:
        """All of a batch."""
        return list(range(self.synthetic.size))

    # -- what is looked at --------------------------------------------------------------------------------------------

    def look_at_rows(self) -> None:
        """Compares the rows of a batch with those after changes that must not move them."""
        evidence = self.evidence
        module = self.script.module
        # a model that was plain is attached for the probe, with sums: not what `reductions` says
        attached: Any = module._dpsco if self.script.attached else None
        evidence.mean_rows = (
            attached.mean if attached else self.script.hooks.loss_reduction == "mean"
        )
        size = self.synthetic.size
        found: Any = None
        for pool in both_fills(self.synthetic.leaves, size):
            self.synthetic.pool = pool
            found = self._pass(self.records)
            if not isinstance(found, Refused):
                break
        evidence.base = evidence.keep(found)
        evidence.buffers = self.state.changed()
        if not evidence.rows:
            return
        again = evidence.keep(self._pass(self.records, start=False))
        leaves = enumerate(self.synthetic.leaves)
        inputs = {
            k: [-1.0 if leaf.is_number else 0.0] * size for k, leaf in leaves if not leaf.label
        }
        other = evidence.keep(self._pass(self.records, inputs))
        after = None if other is None else evidence.keep(self._pass(self.records, start=False))
        if again is not None and after is not None:
            first, second = (joined(one.rows.values(), size) for one in (again, after))
            evidence.remembers = bool(changed([first], [second]))
        # only now: a model that remembers a batch may not take one of another size
        found = compare(self._joint, both_fills(self.synthetic.leaves, size, any_size=True))
        evidence.mixed = found if isinstance(found, Mixed) else None
        evidence.compared = found == CHECKED and evidence.moving
        self._look_at_bits()

    def _joint(self, made: list[Tensor]) -> list[Answer]:
        self._start()
        rows = self._gradients(made).rows
        return [joined(rows.values(), self.synthetic.records_in(made))]

    def _look_at_bits(self) -> None:
        """Compares the bits of one row in batches of several sizes and companies."""
        source = self.script.source
        if not self.script.attached or not isinstance(source, PrivateLoader):
            return
        most = source.physical_batch_size or source.design.batch_size
        rows = max(2, min(_MOST, most if source.slots is None else source.slots.block))

        pool = SyntheticBatches(self.synthetic.leaves, 10, None)

        def row(records: list[int], other: bool) -> Tensor:
            self._start(_OTHER_SEED if other else _SEED)
            places = torch.arange(0, min(LOOKED_AT, len(records)), 2)
            found = self._gradients(pool.batch(records=records), only=places).rows
            return joined(found.values(), len(places)).numbers

        found = attempt("comparing bits of rows", lambda: isolation(row, rows))
        if not isinstance(found, Refused):  # e.g. memory: then it is not known
            self.evidence.isolation = found

    def look_at_single_records(self) -> None:
        """Compares the gradient of the batch with those of its records alone, and follows these along a line."""
        evidence = self.evidence
        wide = self._wide(len(self.records))
        batch = evidence.keep(self._pass(self.records, wide))
        evidence.buffers = self.state.changed()
        if batch is None or not bool((total := _joined(batch.totals)).any()):
            return
        length = total.norm()
        other = evidence.keep(self._pass(self.records, wide, _OTHER_SEED))
        evidence.randomness = (
            0.0 if other is None else float((_joined(other.totals) - total).norm() / length)
        )
        if evidence.randomness > ROUNDING:
            return  # each pass would have other noise: nothing below could be told apart from it
        alone = self._alone()
        if alone is not None:
            added = alone.sum(0)
            weight = float(total @ added / added.square().sum())
            evidence.mixing = float((total - weight * added).norm() / length)
        self._follow(
            {name: None if g is None else g / length for name, g in batch.totals.items()}
        )

    def _follow(self, direction: Mapping[str, Tensor | None]) -> None:
        optimizer = self.script.row_free
        found = []
        start = self.start
        bound = optimizer.bounds[0] if optimizer is not None else None
        places = torch.tensor(_PLACES, dtype=torch.float64) * max(1.0, 1 / (bound or 1.0))
        for place in places.tolist():
            self.start = {}
            for name, p in self.script.trainable.items():
                along = direction[name]
                self.start[id(p)] = torch.zeros_like(p) if along is None else place * along
            found.append(self._alone())
        self.start = start
        grads = [made for made in found if made is not None]
        if len(grads) == len(found):
            self.evidence.line = Line(places, _joined(direction), torch.stack(grads, dim=1))

    def _alone(self) -> Tensor | None:
        """Returns the gradient of each record by itself, (records, dim)."""
        passes = [self.evidence.keep(self._pass([k], self._wide(1))) for k in self.records]
        made = [_joined(one.totals) for one in passes if one is not None]
        return torch.stack(made) if len(made) == len(passes) else None

    def _wide(self, records: int) -> dict[int, list[float]]:
        """Returns factors by which records of a few numbers come to their bounds."""
        leaves = enumerate(self.synthetic.leaves)
        return {k: [2.0] * records for k, leaf in leaves if leaf.is_number}

    def look_at_sizes(self) -> None:
        """Computes the loss of the batch, of its double and of its triple, in evaluation mode."""

        def value(copies: int, seed: int = _SEED) -> float:
            self._start(seed, training=False)
            with torch.no_grad():
                result = self.synthetic.loss(
                    self.synthetic.pool.batch(records=self.records * copies)
                )
            return float(result.detach() if is_ghost_loss_value(result) else _scalar(result))

        def values() -> tuple[tuple[float, float, float], bool]:
            once = value(1)
            return (once, value(2), value(3)), value(1, _OTHER_SEED) != once

        found = attempt("the loss of a made-up batch in evaluation mode", values)
        if not isinstance(found, Refused):
            self.evidence.losses, self.evidence.random_loss = found
        elif self.evidence.base is not None:
            self.evidence.keep(found)

    # -- one pass -----------------------------------------------------------------------------------------------------

    def _start(self, seed: int = _SEED, *, training: bool = True) -> None:
        _clear(self.state, self.start)
        if self.script.attached:
            # it would look at synthetic records of synthetic records
            self.script.module._dpsco.looks = False  # type: ignore[union-attr]
        for p in self.script.trainable.values():
            p.__dict__.pop("_norm_sample", None)
        # modules that the user keeps in evaluation mode stay there
        if self.script.module.training != training:
            self.script.module.train(training)
        seed_torch(seed)

    def _pass(
        self,
        records: Sequence[int],
        change: Mapping[int, Sequence[float]] | None = None,
        seed: int = _SEED,
        *,
        start: bool = True,
    ) -> Pass | Refused:
        """Makes a pass from the start, or after the one before."""

        def run() -> Pass:
            if start:
                self._start(seed)
            seed_torch(seed)
            return self._gradients(self.synthetic.pool.batch(change, records))

        return attempt("a training pass over a made-up batch", run)

    def _gradients(self, made: list[Tensor], only: Tensor | None = None) -> Pass:
        value = self.synthetic.loss(made)
        if is_ghost_loss_value(value):
            return Pass(value, {}, {})
        params = self.script.trainable
        # not backward(): it would call hooks on the parameters, and nothing may stay in p.grad
        grads = torch.autograd.grad(_scalar(value), list(params.values()), allow_unused=True)
        rows = {}
        factored = set()
        for name, p in params.items():
            tape = getattr(p, "grad_factors", None)
            if isinstance(tape, Tape) and tape.uses:
                block = tape.joined().blocks(weight=p is tape.weight, bias=p is tape.bias)[0]
                rows[name] = rows_of(block if only is None else block.select(only))
                factored.add(name)
            elif isinstance(dense := getattr(p, "grad_sample", None), Tensor):
                rows[name] = rows_first(dense if only is None else dense[only], 0)
        clear_rows(list(params.values()))
        return Pass(value, dict(zip(params, grads, strict=True)), rows, frozenset(factored))


def settle_sizes(model: nn.Module, loss: Any, loader: PrivateLoader) -> None:
    """Tests in what sizes a loader may deliver draws, and lets it, unless that is known.

    Args:
        model: attached, with no rows waiting.
        loss: what the run computes, as `doctor` takes it.
        loader: of the run.
    """
    if not loader.isolation.open:
        return
    loader._part(model)
    script = Script(model, loss, loader, None)
    attachment: Any = model._dpsco
    found: Any = COMPILED
    if not any(map(is_compiled, model.modules())):
        found = attempt("making up a batch from the first record", partial(_sizes, script))
    found = str(found) if isinstance(found, Refused) else found
    loader.isolation.settle(found)
    attachment.isolation = loader.isolation
    attachment.get_ready(found)


def _sizes(script: Script) -> Sizes | str:
    synthetic = SyntheticRecords(script)
    slots = script.source.slots
    params = list(script.trainable.values())
    module = script.module
    attachment: Any = module._dpsco

    def answers(made: list[Tensor]) -> list[Tensor]:
        return rows_of_a_pass(params, [], _scalar(synthetic.loss(made)))

    with random_parameters(module):
        attachment.looks = False
        module.train()
        found = Trial(
            answers,
            synthetic.leaves,
            slots.usual,
            slots.most,
            attachment.passes,
        ).sizes()
    return replace(found, whole_step=True) if isinstance(found, Sizes) else found


def _clear(state: Untouched, moved: Mapping[int, Tensor] | None = None) -> None:
    """Puts everything back, and then forgets rows, gradients and forwards in progress, as at a fresh start."""
    state.restore(moved or {})
    for attachment in attachments(state.params):
        attachment.reset()
    forget_uses([p for p in state.params if hasattr(p, "_forward_counter")], state.modules)
    clear_rows(state.params)


def _scalar(value: Any) -> Tensor:
    if not isinstance(value, Tensor) or value.numel() != 1:
        got = (
            f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        )
        raise NotScalarError(f"the loss must be a tensor with one number (got {got})")
    return value.reshape(())


def _joined(totals: Any) -> Tensor:
    return torch.cat(
        [total.detach().double().flatten() for total in totals.values() if total is not None]
    )


_SIZES = (5, 7, 11, 13, 17, 19)


class SyntheticRecords:
    """What a batch of synthetic records looks like, and how tensors become one.

    Args:
        script: whose first record gives number of tensors, shapes and dtypes.

    Raises:
        ValueError: the collated batch has no tensor with a dimension for the records.
    """

    def __init__(self, script: Script) -> None:
        # a record of a TensorDataset is a view, whose deepcopy copies ALL records: cut the views off once
        self._record = tree_map(
            lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf,
            script.first_record(),
        )
        self._script = script
        device = next(iter(script.trainable.values())).device
        found, structure = self._template(2)
        more = self._template(3)[0]
        # where all is made up, and for any number of records alike, the collate function is not asked again
        alike = len(more) == len(found) and all(isinstance(leaf, Tensor) for leaf in found)
        self._structure = structure if alike else None
        dims = list(map(_batch_dim, found, more))
        if all(dim is None for dim in dims):
            raise ValueError("a batch must hold a tensor with one entry per record (got none)")
        lengths = {n for leaf in found if isinstance(leaf, Tensor) for n in leaf.shape}
        self.size = next((size for size in _SIZES if size not in lengths), _SIZES[0])
        batch = tree_unflatten(found, structure)
        self.is_pair = isinstance(batch, (tuple, list)) and len(batch) == 2
        inputs = len(tree_leaves(batch[0])) if self.is_pair else len(found)
        ignored = getattr(script.loss, "ignore_index", None)
        self._places = [k for k, leaf in enumerate(found) if isinstance(leaf, Tensor)]
        self.leaves = []
        for k in self._places:
            whole = not found[k].is_floating_point() and k >= inputs and isinstance(ignored, int)
            own = ignored if whole else None
            leaf = Leaf(
                tuple(found[k].shape),
                found[k].dtype,
                device,
                dims[k],
                label=k >= inputs,
                ignored=own,
            )
            self.leaves.append(leaf)
        self.pool = SyntheticBatches(self.leaves, self.size, 1)

    def _template(self, size: int) -> tuple[list[Any], Any]:
        batch = self._script.collate([copy.deepcopy(self._record) for _ in range(size)])
        if isinstance(batch, Mapping) and not isinstance(batch, dict):
            batch = dict(batch)  # e.g. a tokenizer's own mapping
        flat: tuple[list[Any], Any] = tree_flatten(batch)
        return flat

    def loss(self, made: Sequence[Tensor]) -> Any:
        """Returns the loss of a batch of tensors."""
        script = self._script
        batch = script.bounded(self.batch(made))
        if self.is_pair and not isinstance(script.loss, OfBatch):
            return script.loss(script.module(batch[0]), batch[1])
        return script.loss(script.module, batch)

    def records_in(self, made: Sequence[Tensor]) -> int:
        """Returns the number of records of tensors."""
        pairs = zip(made, self.leaves, strict=True)
        return next(t.shape[leaf.dim] for t, leaf in pairs if leaf.dim is not None)

    def batch(self, made: Sequence[Tensor]) -> Any:
        """Returns the batch of tensors."""
        if self._structure is not None:
            return tree_unflatten(list(made), self._structure)
        out, structure = self._template(self.records_in(made))
        for place, t in zip(self._places, made, strict=True):
            out[place] = t
        return tree_unflatten(out, structure)


def _batch_dim(leaf: Any, other: Any) -> int | None:
    """Returns the dimension that grows with the number of records."""
    if not isinstance(leaf, Tensor) or not isinstance(other, Tensor):
        return None
    differing = [
        d for d, (a, b) in enumerate(zip(leaf.shape, other.shape, strict=False)) if a != b
    ]
    return differing[0] if len(differing) == 1 else None
