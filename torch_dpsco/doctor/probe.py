"""Forward and backward passes on synthetic batches. Everything is restored afterwards.

The passes run where the parameters are moved a little: at a start of all zeros the terms that couple records, and
those of a regularizer, would have no gradient. All passes use the same random numbers, so that dropout masks agree.

Synthetic batches have the shapes and dtypes of a data set's first record, and do not depend on data values. Inputs are
random in (0, 1), or 0 and 1 for integers; targets of (input, target) pairs are 1, or class 0. Alternative records have
other values, and other targets too if the loss takes them (0, or class 1). What is not a tensor after collating is the
first record's.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torch_dpsco.compat import hooks_made, tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch_dpsco.doctor.script import (
    Evidence,
    JointRows,
    Line,
    NotScalarError,
    OfBatch,
    Pass,
    Script,
    is_ghost_loss_value,
    movement,
    remembered,
    rows_of,
    rows_to_probe,
)
from torch_dpsco.rows import Tape, attachments, clear_rows
from torch_dpsco.rows.attach import attach, first_step_of
from torch_dpsco.rows.forwards import forget_uses
from torch_dpsco.trial import (
    Mixed,
    Rows,
    Variant,
    compare,
    isolation,
    outliers,
    quantile_moved,
)
from torch_dpsco.trial.undo import Refused, Untouched, attempt, seed_torch

ROUNDING = 1e-9  # relative, of sums in double precision in any order
_SEED = 1_000_003
_OTHER_SEED = 2_000_003
_Scales = Sequence[float] | None  # of the inputs, by record
_PLACES = (-3.0, -1.0, -0.3, 0.0, 0.3, 1.0, 3.0)  # of `Line`, for records of norm 1


def in_place(error: Exception) -> bool:
    """Returns whether torch refused to change a tensor that a hook or a backward still needs."""
    text = str(error).lower()
    return isinstance(error, RuntimeError) and ("inplace" in text or "in-place" in text)


class _Outliers:
    """Factors of the inputs of records, in place of batches of these.

    Args:
        size: number of records.
        nan: whether a record may be NaN. Rows of ghost clipping are gradients of single losses, in which the others are
            times 0.
    """

    def __init__(self, size: int, nan: bool) -> None:
        self._size = size
        self._nan = nan

    def batch(self, change: list[float] | None) -> list[float]:
        """Returns the factors."""
        return [1.0] * self._size if change is None else change

    def variants(self) -> Iterator[Variant]:
        """Yields outliers, then a median and a 0.9 quantile that move."""
        for found in outliers(self._size):
            if self._nan or not math.isnan(found[2][0]):
                yield Variant(*found)
        # PRIVACY: NaN need not reach others through a quantile; these move the median and the 0.9 quantile
        # (test_records_that_share_a_statistic_only_where_one_is_an_outlier_are_found)
        yield Variant(*quantile_moved(10, 1))


def examine(script: Script) -> Evidence:
    """Makes all passes that the script allows, and puts everything back."""
    evidence = Evidence()
    if not script.trainable or not script.has_record:
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
            synthetic = evidence.keep(_synthetic_records(script))
            if synthetic is not None:
                _examine(script, evidence, state, synthetic)
    finally:
        state.restore()
        if script.row_free is not None:
            script.row_free.overlook(hooks_made() - hooks)
    return evidence


def _synthetic_records(
    script: Script, *, other_targets: bool = True
) -> SyntheticRecords | Refused:
    def build() -> SyntheticRecords:
        device = next(iter(script.trainable.values())).device
        ignored = getattr(script.loss, "ignore_index", None)
        ignored = ignored if isinstance(ignored, int) else None
        return SyntheticRecords(
            script.first_record(),
            script.collate,
            device,
            other_targets=other_targets,
            ignored=ignored,
        )

    return attempt("making up a batch from the first record", build)


def _examine(
    script: Script, evidence: Evidence, state: Untouched, synthetic: SyntheticRecords
) -> None:
    evidence.size = synthetic.size
    generator = torch.Generator().manual_seed(_SEED)
    # PRIVACY: probes of secret iterates start at 0 (test_secret_iterates_have_no_say_in_the_findings)
    from_zero = script.row_free is not None
    start = {id(p): _moved(p, generator, from_zero) for p in script.trainable.values()}
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
        if not evidence.rows:  # layers without rows: what remains are sums
            kept = [refused for refused in evidence.refused if in_place(refused.error)]
            evidence.refused = kept if script.row_free is None else []  # only hooks in the way
            probe.look_at_sums()
        if script.row_free is not None:
            probe.look_at_single_records()
    if script.loss is not None and evidence.weight is None:
        _clear(state)
        probe.look_at_sizes()


class _Probe:
    """Passes over one script, each from the same state."""

    def __init__(
        self,
        script: Script,
        evidence: Evidence,
        state: Untouched,
        synthetic: SyntheticRecords,
        start: Mapping[int, Tensor],
    ) -> None:
        self.script = script
        self.evidence = evidence
        self.state = state
        self.synthetic = synthetic
        self.start = start
        self.records = list(range(synthetic.size))
        self.others = [i + synthetic.size for i in self.records]

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
        evidence.base = evidence.keep(self._pass(self.records))
        evidence.buffers = self.state.changed()
        if not evidence.rows:
            return
        again = evidence.keep(self._pass(self.records, start=False))
        changed = self._pass([self.others[0], *self.records[1:]])
        if isinstance(changed, Refused):  # the loss may not take the other targets
            self.synthetic = (
                evidence.keep(_synthetic_records(self.script, other_targets=False))
                or self.synthetic
            )
            changed = self._pass([self.others[0], *self.records[1:]])
        base = evidence.base
        size = self.synthetic.size
        kept = evidence.keep(changed)
        if base is not None and kept is not None:
            evidence.moved = movement(base, kept, size)[1:]
        other = evidence.keep(self._pass(self.others))
        after_other = (
            None if other is None else evidence.keep(self._pass(self.records, start=False))
        )
        if base is not None and again is not None and after_other is not None:
            evidence.drift = (
                float(movement(again, after_other, size).max()),
                float(movement(base, again, size).max()),
            )
        if self.synthetic.has_numbers:
            # only now: a model that remembers a batch may not take one of another size
            self._look_at_outliers()
        self._look_at_bits()

    def _look_at_bits(self) -> None:
        """Compares the bits of one row in batches of several sizes, places and companies."""
        rows = rows_to_probe(self.script)
        script = self.script
        if rows is None:
            return

        def row(records: list[int], places: list[int], other: bool) -> list[JointRows]:
            self._start(_OTHER_SEED if other else _SEED)
            found = self._gradients(records, only=torch.tensor(places)).rows
            each = [
                {name: made.at(k) for name, made in found.items()} for k in range(len(places))
            ]
            return [JointRows(rows, 1) for rows in each]

        device = next(iter(script.trainable.values())).device
        known = partial(
            remembered,
            script.module,
            device,
            rows,
            lambda: isolation(row, len(self.records), rows),
        )
        found = attempt("comparing bits of rows", known)
        if not isinstance(found, Refused):  # e.g. memory: then it is not known
            self.evidence.isolation = found

    def _look_at_outliers(self) -> None:
        """Makes record 0 an outlier of several sizes, and moves quantiles of the records from small to large ones."""

        def joint(scales: list[float]) -> list[JointRows]:
            records = [place % self.synthetic.size for place in range(len(scales))]
            self._start()
            return [JointRows(self._gradients(records, scales).rows, len(scales))]

        found = compare(joint, [_Outliers(self.synthetic.size, not self.script.ghost)])
        self.evidence.mixed = found if isinstance(found, Mixed) else None

    def look_at_sums(self) -> None:
        """Tests whether gradients of batches are sums over records: g(a,R) + g(b,S) = g(b,R) + g(a,S)."""
        evidence = self.evidence
        parts = [self.records[1:3], self.records[3:5]]
        evidence.base = evidence.keep(self._pass(self.records))
        evidence.buffers = self.state.changed()
        if evidence.base is None:
            return
        batches = [
            [first, *part] for first in (self.records[0], self.others[0]) for part in parts
        ]
        passes = [evidence.keep(self._pass(batch)) for batch in batches]
        totals = [_joined(p.totals) for p in passes if p is not None]
        if len(totals) == len(batches):
            gap = totals[0] - totals[1] - totals[2] + totals[3]
            evidence.mixing = float(
                gap.norm() / sum(total.norm() for total in totals).clamp_min(1e-30)
            )

    def look_at_single_records(self) -> None:
        """Compares the gradient of the batch with those of its records alone, and follows these along a line."""
        evidence = self.evidence
        batch = evidence.keep(self._pass(self.records))
        if batch is None or not bool((total := _joined(batch.totals)).any()):
            return
        length = total.norm()
        other = evidence.keep(self._pass(self.records, seed=_OTHER_SEED))
        evidence.randomness = (
            0.0 if other is None else float((_joined(other.totals) - total).norm() / length)
        )
        if evidence.randomness > ROUNDING:
            return  # each pass would have other noise: nothing below could be told apart from it
        alone = self._alone()
        if alone is not None:
            added = alone.sum(0)
            evidence.weight = float(total @ added / added.square().sum())
            gap = float((total - evidence.weight * added).norm() / length)
            evidence.mixing = max(gap, evidence.mixing or 0.0)
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
        passes = [self.evidence.keep(self._pass([record])) for record in self.records]
        made = [_joined(one.totals) for one in passes if one is not None]
        return torch.stack(made) if len(made) == len(passes) else None

    def look_at_sizes(self) -> None:
        """Computes the loss of the batch, of its double and of its triple, in evaluation mode."""

        def value(copies: int, seed: int = _SEED) -> float:
            self._start(seed, training=False)
            with torch.no_grad():
                result = self._loss(self.records * copies)
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
            first_step_of(
                self.script.module
            ).asked = False  # it would look at synthetic records of synthetic records
        for p in self.script.trainable.values():
            p.__dict__.pop("_norm_sample", None)
        # modules that the user keeps in evaluation mode stay there
        if self.script.module.training != training:
            self.script.module.train(training)
        seed_torch(seed)

    def _loss(self, records: Sequence[int], scales: _Scales = None) -> Any:
        script = self.script
        batch = script.bounded(self.synthetic.batch(records, scales))
        if script.loss is None:
            return _of_outputs(script.module(batch[0] if self.synthetic.is_pair else batch))
        if self.synthetic.is_pair and not isinstance(script.loss, OfBatch):
            return script.loss(script.module(batch[0]), batch[1])
        return script.loss(script.module, batch)

    def _pass(
        self,
        records: Sequence[int],
        scales: _Scales = None,
        seed: int = _SEED,
        *,
        start: bool = True,
    ) -> Pass | Refused:
        """Makes a pass from the start, or after the one before."""

        def run() -> Pass:
            if start:
                self._start(seed)
            seed_torch(seed)
            return self._gradients(records, scales)

        return attempt("a training pass over a made-up batch", run)

    def _forget_rows(self) -> None:
        for p in self.script.trainable.values():
            if getattr(p, "grad_sample", None) is not None:
                p.grad_sample = None  # type: ignore[attr-defined]
            if isinstance(tape := getattr(p, "grad_factors", None), Tape):
                tape.uses = []

    def _gradients(
        self, records: Sequence[int], scales: _Scales = None, only: Tensor | None = None
    ) -> Pass:
        value = self._loss(records, scales)
        if is_ghost_loss_value(value):
            return self._ghost_gradients(value)
        params = self.script.trainable
        # not backward(): it would call hooks on the parameters, and nothing may stay in p.grad
        grads = torch.autograd.grad(_scalar(value), list(params.values()), allow_unused=True)
        rows = {}
        factored = set()
        for name, p in params.items():
            tape = getattr(p, "grad_factors", None)
            if isinstance(tape, Tape) and tape.uses:
                block = tape.blocks(weight=p is tape.weight, bias=p is tape.bias)[0]
                rows[name] = rows_of(block if only is None else block.select(only))
                factored.add(name)
            elif isinstance(made := getattr(p, "grad_sample", None), Tensor):
                rows[name] = Rows(made.detach() if only is None else made.detach()[only])
        self._forget_rows()
        return Pass(value, dict(zip(params, grads, strict=True)), rows, frozenset(factored))

    def _ghost_gradients(self, value: Any) -> Pass:
        """Takes the norms from the hooks, and the gradient of each record's loss, which is what gets released."""
        params = self.script.trainable
        hooks = self.script.hooks
        losses = value.loss_per_sample
        every = list(params.values())
        reduced = losses.mean(0) if value.loss_reduction == "mean" else losses.sum(0)
        totals = torch.autograd.grad(reduced.sum(), every, retain_graph=True, allow_unused=True)
        found = dict(zip(params, totals, strict=True))
        normed = [name for name, p in params.items() if hasattr(p, "_norm_sample")]
        if hooks is None or losses.dim() != 1:
            return Pass(value, found, {})
        norms = hooks.get_norm_sample().detach() if len(normed) == len(params) else None
        hooks.disable_hooks()
        options: Any = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
        grads = [torch.autograd.grad(loss, every, **options) for loss in losses]
        hooks.enable_hooks()
        stacked = dict(zip(params, map(torch.stack, zip(*grads, strict=True)), strict=True))
        return Pass(value, found, {name: Rows(stacked[name]) for name in normed}, norms=norms)


def _clear(state: Untouched, moved: Mapping[int, Tensor] | None = None) -> None:
    """Puts everything back, and then forgets rows, gradients and forwards in progress, as at a fresh start."""
    state.restore(moved or {})
    for attachment in attachments(state.params):
        attachment.reset()
    forget_uses([p for p in state.params if hasattr(p, "_forward_counter")], state.modules)
    clear_rows(state.params)


def _scalar(value: Any) -> Tensor:
    if not isinstance(value, Tensor) or value.numel() != 1:
        got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise NotScalarError(f"the loss must be a tensor with one number (got {got})")
    return value.reshape(())


def _of_outputs(outputs: Any) -> Tensor:
    """Returns a stand-in for a loss that is not known: a sum over everything that the model puts out."""
    leaves = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
    numbers = [leaf for leaf in leaves if leaf.is_floating_point()]
    return torch.stack([(leaf + leaf.square() / 2).sum() for leaf in numbers]).sum()


def _moved(p: Tensor, generator: torch.Generator, from_zero: bool) -> Tensor:
    """Returns a parameter, or zeros, moved a little."""
    start = torch.zeros_like(p.data) if from_zero else p.detach()
    scale = float(torch.linalg.vector_norm(start, dtype=torch.float64)) / max(p.numel(), 1) ** 0.5
    size = 0.065 * max(scale, p.shape[-1] ** -0.5 if p.dim() else 1.0)
    moves = torch.rand(p.shape, generator=generator).mul_(2.0).sub_(1.0)
    return start + moves.add_(moves.sign()).mul_(size).to(
        p.device, p.dtype
    )  # none of them near 0


def _joined(totals: Any) -> Tensor:
    return torch.cat(
        [total.detach().double().flatten() for total in totals.values() if total is not None]
    )


_VALUES = 20_240_229
_SIZES = (5, 7, 11, 13, 17, 19)


class SyntheticRecords:
    """A pool of synthetic records, from which batches are collated.

    Record i < size and record i + size are two versions of the same position.

    Args:
        record: gives number of tensors, shapes and dtypes.
        collate: makes a batch of a list of records.
        device: where the batches go.
        other_targets: whether the second versions have other targets too.
        ignored: class number that the loss ignores; the second versions of records with several targets have it.

    Raises:
        ValueError: the collated batch has no tensor with a dimension for the records.
    """

    def __init__(
        self,
        record: Any,
        collate: Callable[[list[Any]], Any],
        device: torch.device,
        *,
        other_targets: bool = True,
        ignored: int | None = None,
    ) -> None:
        # a record of a TensorDataset is a view, whose deepcopy copies ALL records: cut the views off once
        self._record = tree_map(
            lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, record
        )
        self._collate = collate
        self._device = device
        leaves, structure = self._template(2)
        more = self._template(3)[0]
        # where all is made up, and for any number of records alike, the collate function is not asked again
        alike = len(more) == len(leaves) and all(isinstance(leaf, Tensor) for leaf in leaves)
        self._structure = structure if alike else None
        self._dims = list(map(_batch_dim, leaves, more))
        if all(dim is None for dim in self._dims):
            raise ValueError("a batch must hold a tensor with one entry per record (got none)")
        lengths = {n for leaf in leaves if isinstance(leaf, Tensor) for n in leaf.shape}
        self.size = next((size for size in _SIZES if size not in lengths), _SIZES[0])
        batch = tree_unflatten(leaves, structure)
        self.is_pair = isinstance(batch, (tuple, list)) and len(batch) == 2
        n_inputs = len(tree_leaves(batch[0])) if self.is_pair else len(leaves)
        generator = torch.Generator().manual_seed(_VALUES)
        self._pools: list[Tensor | None] = []
        self._scaled = set()  # the places of inputs that are numbers, which can be large or small
        for place, (leaf, dim) in enumerate(zip(leaves, self._dims, strict=True)):
            if not isinstance(leaf, Tensor):
                self._pools.append(None)
                continue
            shape = [2 * self.size if d == dim else n for d, n in enumerate(leaf.shape)]
            if place < n_inputs:
                self._pools.append(_values(shape, leaf.dtype, generator))
                if dim is not None and leaf.is_floating_point():
                    self._scaled.add(place)
            else:
                self._pools.append(
                    _targets(
                        shape, leaf.dtype, dim if other_targets else None, self.size, ignored
                    )
                )

    def _template(self, size: int) -> tuple[list[Any], Any]:
        batch = self._collate([copy.deepcopy(self._record) for _ in range(size)])
        if isinstance(batch, Mapping) and not isinstance(batch, dict):
            batch = dict(batch)  # e.g. a tokenizer's own mapping
        flat: tuple[list[Any], Any] = tree_flatten(batch)
        return flat

    @property
    def has_numbers(self) -> bool:
        """Whether inputs are numbers that can be large or small."""
        return bool(self._scaled)

    def batch(self, records: Sequence[int], scales: Sequence[float] | None = None) -> Any:
        """Returns the batch of some records of the pool; `scales`: times a number for the inputs of each."""
        index = torch.tensor(list(records))
        made_up = list(self._pools), self._structure
        out, structure = self._template(len(records)) if self._structure is None else made_up
        for place, (pool, dim) in enumerate(zip(self._pools, self._dims, strict=True)):
            if pool is not None:
                values = pool if dim is None else pool.index_select(dim, index)
                if scales is not None and dim is not None and place in self._scaled:
                    shape = [1] * values.dim()
                    shape[dim] = len(records)
                    values = values * torch.tensor(scales, dtype=values.dtype).view(shape)
                out[place] = values.to(self._device)
        return tree_unflatten(out, structure)


def _batch_dim(leaf: Any, other: Any) -> int | None:
    """Returns the dimension that grows with the number of records."""
    if not isinstance(leaf, Tensor) or not isinstance(other, Tensor):
        return None
    differing = [
        d for d, (a, b) in enumerate(zip(leaf.shape, other.shape, strict=False)) if a != b
    ]
    return differing[0] if len(differing) == 1 else None


def _values(shape: list[int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    if dtype.is_floating_point or dtype.is_complex:
        return torch.rand(shape, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(0, 2, shape, generator=generator).to(dtype)


def _targets(
    shape: list[int], dtype: torch.dtype, dim: int | None, size: int, ignored: int | None
) -> Tensor:
    # 1 is a legal target of every loss that knows labels +-1, labels 0 and 1, or real numbers
    first = 1 if dtype.is_floating_point else 0
    targets = torch.full(shape, first).to(dtype)
    if dim is not None:
        others = targets.narrow(dim, size, size).fill_(1 - first)
        # a mean over the targets that are not ignored couples the records; where a record has one target only, `fit`
        # looks at the batches themselves, for the loss's default would be refused everywhere
        several = [d for d, n in enumerate(others.shape) if d != dim and n > 1]
        if ignored is not None and several and not dtype.is_floating_point:
            others.select(several[0], 0).fill_(ignored)
    return targets
