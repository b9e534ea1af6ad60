"""Checks of model and loss, most of them on the evidence of the probes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from torch_dpsco.compat import BatchNorm
from torch_dpsco.doctor.probe import in_place
from torch_dpsco.doctor.script import (
    Check,
    Evidence,
    Finding,
    JointRows,
    NotScalarError,
    Script,
    critical,
    error,
    is_ghost_loss_value,
    tolerance,
    warning,
)
from torch_dpsco.errors import PrivacyError
from torch_dpsco.native import coarse_setting
from torch_dpsco.rows.forwards import CarriedStateError
from torch_dpsco.step.oracle import ClippedMean
from torch_dpsco.trial import HALF

_NAMED = 4  # names listed in an evidence
_NO_MIX = 1e-4  # relative gap of sums, where rounding is different in each of four batches


def batch_norm(script: Script, evidence: Evidence) -> Iterator[Finding]:
    """Layers that normalize by statistics of the batch."""
    layers = []
    for name, m in script.module.named_modules():
        if isinstance(m, BatchNorm) or getattr(m, "track_running_stats", False):
            layers.append(f"{type(m).__name__} {name!r}")
    if layers:
        yield critical(
            "batch-norm",
            f"{some(layers)} normalize{'s' if len(layers) == 1 else ''} by statistics of the batch,"
            " so that every record is in the gradient of every other, and running statistics leave"
            " with the model",
            "model = opacus.validators.ModuleValidator.fix(model)  # GroupNorm; before optimizer"
            " and attach",
        )


def coupled_records(script: Script, evidence: Evidence) -> Iterator[Finding]:
    """Another record 0 must not move the rows of the others; without rows, gradients must be sums over records."""
    found = ""
    consequence = "many rows, which clipping one row at a time does not bound"
    limit = _NO_MIX
    if script.row_free is not None:
        consequence = "the gradients of many, which the noise does not cover"
        limit = 1e-6  # in double precision
    if evidence.mixing is not None and evidence.mixing > limit:
        found = (
            f"gradients of made-up batches are no sums over records (by {evidence.mixing:.2g} of"
            " their norm)"
        )
    moved = evidence.moved
    limit = tolerance(evidence.rows)
    if moved.numel() and float(moved.max()) > limit:
        found = (
            f"with another record 0, the gradients of {int((moved > limit).sum())} of the"
            f" {evidence.size - 1} other records moved, by up to {float(moved.max()):.2g} of the"
            " largest row"
        )
    mixed = evidence.mixed
    if mixed is not None and not found:
        found = f"with {mixed.what} as record 0, the gradients of {mixed.moved} of the other records moved"
    if found:
        yield critical(
            "coupled-records",
            f"{found}: one record is in {consequence}",
            "compute loss and features from one record at a time: replace statistics of the batch"
            " (x.mean(0), logsumexp over records, contrastive pairs) by constants or by functions"
            " of the record alone",
        )


def rows_are_not_records(script: Script, evidence: Evidence) -> Iterator[Finding]:
    """There must be one row per record."""
    wrong = {
        name: len(rows) for name, rows in evidence.rows.items() if len(rows) != evidence.size
    }
    if wrong:
        known = {getattr(m, "batch_first", None) for m in script.module.modules()}
        flags = [str(flag) for flag in (False, True) if flag in known]
        layers = f"; layers with batch_first={' and '.join(flags)}" if flags else ""
        yield critical(
            "rows-are-not-records",
            f"{evidence.size} records gave"
            f" {some([f'{count} rows of {name}' for name, count in wrong.items()])}{layers}: each"
            " row is clipped by itself, so that a record with several counts several times",
            "keep the batch in the first dimension of every layer's input: batch_first=True, no"
            " view(-1, dim) that folds time into it, position embeddings expanded to the batch",
        )


def changing_buffers(script: Script, evidence: Evidence) -> Iterator[Finding]:
    """A training forward must not write what leaves with the model."""
    if evidence.buffers:
        yield critical(
            "changing-buffers",
            f"a training forward changed {some(evidence.buffers)}, which is part of the model and"
            " gets no noise",
            "use layers without running statistics (GroupNorm), or model.eval() for the layer that"
            " has them",
        )


def stateful_model(script: Script, evidence: Evidence) -> Iterator[Finding]:
    """The same batch must give the same rows whatever was seen before."""
    carried = next(
        (refused for refused in evidence.refused if isinstance(refused.error, CarriedStateError)),
        None,
    )
    if carried is not None:
        yield critical(
            "stateful-model",
            "the loss gave outputs of one batch to the forward of the next one: records of one step"
            " are in the rows of later ones, which nothing accounts for",
            "begin each batch with a fresh state, or give whole sequences to one forward",
        )
    if evidence.drift is None or evidence.buffers:
        return
    limit, (of_data, of_calls) = tolerance(evidence.rows), evidence.drift
    if of_data > limit:
        yield critical(
            "stateful-model",
            f"after another batch, the same records gave other gradients (by {of_data:.2g} of the"
            " largest row): records of one step are in the rows of later ones, which nothing"
            " accounts for",
            "remove what a forward remembers of its inputs (moving averages, caches, memory banks)",
        )
    elif of_calls > limit:
        yield warning(
            "stateful-model",
            f"the same batch gave other gradients the second time (by {of_calls:.2g} of the largest"
            " row), but whatever is remembered did not depend on the records",
            "make what changes from call to call (a counter, power iterations) a function of the"
            " step number outside of forward",
        )


def loss_reduction(script: Script, evidence: Evidence) -> Iterator[Finding]:
    """The loss must reduce as declared, and all objects must agree."""
    if len(set(script.reductions.values())) > 1:
        said = ", ".join(f"{name} {value!r}" for name, value in script.reductions.items())
        yield _reduction(script, f"the objects do not agree on it: {said}")
    for refused in evidence.refused:
        if isinstance(refused.error, NotScalarError):
            yield _reduction(script, str(refused.error), "return loss.mean()")
            return
    if evidence.losses is None or script.ghost:  # the ghost loss reduces by itself, as declared
        return
    once, twice, thrice = evidence.losses
    if not all(map(math.isfinite, evidence.losses)) or max(map(abs, evidence.losses)) == 0.0:
        return
    close = 0.3 if evidence.random_loss else 1e-2
    kind = ""
    if math.isclose(twice, once, rel_tol=close, abs_tol=1e-6):
        kind = "mean"
    elif math.isclose(thrice - twice, twice - once, rel_tol=2 * close, abs_tol=1e-6):
        kind = "sum"
    measured = (
        f"a made-up batch has loss {once:.6g}, its double {twice:.6g}, its triple {thrice:.6g}"
    )
    declared = set(script.reductions.values())
    if not kind and not evidence.random_loss:
        yield _reduction(script, f"{measured}: this is neither a mean nor a sum over records")
    elif kind and declared and kind not in declared:
        said = ", ".join(
            f"{name}(loss_reduction={value!r})" for name, value in script.reductions.items()
        )
        yield _reduction(
            script,
            f"{measured}: this is a {kind}, and {said}",
            f"declare loss_reduction={kind!r}",
        )


def _reduction(
    script: Script, evidence: str, fix: str = "reduce the loss by .mean() or .sum() over records"
) -> Finding:
    clips = script.row_free is None and (
        script.ours is None or isinstance(script.ours.oracle, ClippedMean)
    )
    return Finding("error" if clips else "critical", "loss-reduction", evidence, fix)


def regularizer_in_loss(script: Script, evidence: Evidence) -> Iterator[Finding]:
    """The gradient of the loss must be that of the rows."""
    found = [name for name in excess(evidence) if name not in _padded(script)]
    if found:
        severity = "error"
        effect = "it is in no row, so that training leaves it out"
        if script.ghost:
            severity = "critical"
            effect = "it enters after the clip, weighted by the secret size of the batch"
        yield Finding(
            severity,
            "regularizer-in-loss",
            f"the gradient of {some(found)} is not that of the per-sample gradients: a term of the"
            f" loss on the weights, or a weight used outside of its layer; {effect}",
            "remove the term from the loss and give reg= or prox= to the private optimizer"
            " (weight_decay= to a torch optimizer under Opacus)",
        )


def padding_trained(script: Script, evidence: Evidence) -> Iterator[Finding]:
    """Opacus' rows of an Embedding hold the gradient of the padding vector, which torch leaves out."""
    found = [name for name in excess(evidence) if name in _padded(script)]
    if found:
        yield error(
            "padding-trained",
            f"the rows of {some(found)} train the vector of padding_idx, whose gradient torch"
            " leaves out",
            "nn.Embedding(..., padding_idx=None), and h = h * (tokens != 0)[..., None] in forward",
        )


def _padded(script: Script) -> set[str]:
    layers = [m for m in script.module.modules() if getattr(m, "padding_idx", None) is not None]
    weights = {id(p) for m in layers for p in m.parameters(recurse=False)}
    return {name for name, p in script.trainable.items() if id(p) in weights}


def excess(evidence: Evidence) -> list[str]:
    """Returns the parameters whose total is not the sum of their rows (factored: that have a total at all).

    In ghost mode: whether the norms that clip are not those of the gradients that are released.
    """
    base = evidence.base
    gaps = {}
    sizes = {}
    if base is None or not base.rows:
        return []
    if base.norms is not None:
        released = JointRows(base.rows, len(base.norms)).norms()
        gap = float((released - base.norms.double().cpu()).abs().max())
        wrong = gap > 1e-2 * float(released.max().clamp_min(1e-30))
        return ["the loss of each record"] if wrong else []
    for name, rows in base.rows.items():
        total = base.totals[name]
        scale = 1 / len(rows) if evidence.mean_rows and len(rows) else 1.0
        expected = torch.zeros(())
        if name not in base.factored:
            expected = rows.left.sum(0, dtype=torch.float64) * scale
        gaps[name] = float((expected if total is None else total.double() - expected).norm())
        sizes[name] = float(rows.norms().sum()) * scale
    joint = math.hypot(*sizes.values())
    # three digits above rounding, but for half precision
    slack = {1e-9: 1e-6, 1e-5: 1e-3, 3e-2: 3e-2}[tolerance(base.rows)]
    # against the joint size too: rows that are zero up to rounding (keys' bias in attention) are no scale
    return [name for name, gap in gaps.items() if gap > slack * max(sizes[name], 1e-2 * joint)]


def unused_parameters(script: Script, evidence: Evidence) -> Iterator[Finding]:
    """Every trainable parameter must get rows, be they zero."""
    base = evidence.base
    if base is None or not (script.records_rows or base.rows):
        return
    if script.ghost and base.norms is None and not base.rows:
        return  # the shape of the loss was wrong
    missing = [name for name in script.trainable if name not in base.rows]
    used = [name for name in missing if base.totals.get(name) is not None]
    idle = [name for name in missing if name not in used]
    said = "no per-sample gradients for {}: {}, and the first step will stop there"
    if idle:
        yield error(
            "unused-parameters",
            said.format(some(idle), "no gradient reaches them"),
            "freeze them with requires_grad_(False) before attach or make_private, or use them"
            " in the loss",
        )
    if used:
        yield error(
            "unused-parameters",
            said.format(some(used), "they are used, but nothing records their rows"),
            "change the model (LoRA, new heads, unfreezing) before attach or make_private; use"
            " layers, no functions of a bare weight",
        )


def in_place_layers(script: Script, evidence: Evidence) -> Iterator[Finding]:
    """Layers that write over what a hook has seen."""
    refused = next((refused for refused in evidence.refused if in_place(refused.error)), None)
    if refused is not None:
        layers = [
            name for name, m in script.module.named_modules() if getattr(m, "inplace", False)
        ]
        where = "no layer has inplace=True: look for x += y"
        if layers:
            where = f"layers with inplace=True: {some(layers)}"
        yield error(
            "in-place-layers",
            f"{refused}; {where}",
            "nn.ReLU(inplace=False), and x = x + y instead of x += y",
        )


def half_precision_rows(script: Script, evidence: Evidence) -> Iterator[Finding]:
    """Where products round to 8 or 11 bits, so does 1/B, in the same way in all rows."""
    coarse = coarse_setting(script.module.modules(), list(script.trainable.values()))
    halves = [name for name, made in evidence.rows.items() if made.dtype in HALF]
    if "mean" in script.reductions.values() and (halves or coarse is not None):
        seen = f"rows of {some(halves)} are in half precision"
        off = "train them in float32"
        if coarse is not None and not halves:
            seen = f"{coarse.setting} is in effect"
            off = coarse.cure
        yield critical(
            "half-precision-rows",
            f"{seen} and the loss is a mean: the rounding of 1/B moves all rows when one record"
            " comes or goes",
            f"use a loss that sums and loss_reduction='sum', or: {off}",
        )


def ghost_loss(script: Script, evidence: Evidence) -> Iterator[Finding]:
    """Ghost clipping happens inside of its own loss, and needs one number per record."""
    if not script.ghost or script.loss is None or evidence.size == 0:
        return
    value: Any = evidence.base.value if evidence.base is not None else None
    if not is_ghost_loss_value(value):
        scalars = any(isinstance(refused.error, NotScalarError) for refused in evidence.refused)
        if value is not None or scalars or not evidence.refused:
            yield critical(
                "ghost-without-ghost-loss",
                "in ghost mode the loss must be the criterion that make_private returns (it"
                f" returns {type(value).__name__}): no gradient is clipped, and the noise hides"
                " nothing",
                "model, optimizer, criterion, loader = "
                "engine.make_private(..., criterion=criterion, grad_sample_mode='ghost')\n"
                "loss = criterion(outputs, targets)",
            )
        return
    shape = tuple(value.loss_per_sample.shape)
    if shape != (evidence.size,):
        yield critical(
            "ghost-loss-shape",
            f"the criterion gives losses of shape {shape} for {evidence.size} records: multiplied"
            f" by {evidence.size} clip factors they broadcast, and no record is clipped by its own"
            " factor",
            "return one loss per record, shape (B,): loss.flatten(1).mean(1), or outputs.squeeze(1)"
            " before it",
        )


def not_probed(script: Script, evidence: Evidence) -> Iterator[Finding]:
    """Says what could not be looked at."""
    fix = (
        "run the doctor where one forward and backward work; record= gives it another record to"
        " imitate"
    )
    half = any(half_precision_rows(script, evidence))
    for refused in evidence.refused:
        ours = isinstance(refused.error, PrivacyError)  # training would be refused too
        explained = in_place(refused.error) or isinstance(
            refused.error, (NotScalarError, CarriedStateError)
        )
        if not explained and not (ours and (evidence.buffers or half)):
            yield Finding("error" if ours else "warning", "not-probed", str(refused), fix)
    if evidence.rows and not any(bool(rows.norms().any()) for rows in evidence.rows.values()):
        yield warning(
            "not-probed", "all gradients of the made-up batch are zero: they show nothing", fix
        )


def some(names: list[str]) -> str:
    """Returns the first few names, and how many more there are."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


MODEL_CHECKS: tuple[Check, ...] = (
    batch_norm,
    coupled_records,
    changing_buffers,
    stateful_model,
    loss_reduction,
    in_place_layers,
    not_probed,
)
ROW_CHECKS: tuple[Check, ...] = (
    rows_are_not_records,
    ghost_loss,
    half_precision_rows,
    regularizer_in_loss,
    padding_trained,
    unused_parameters,
)
