"""Checks of a training script: what the passes over made-up batches show, and what can be read off its objects.

A check stays here where nothing else refuses: what `attach`, `make_private`, an optimizer or torch refuse by themselves
is not looked for a second time.

The last three are of optimizers that need no per-sample gradients. Nothing is clipped there, and privacy rests on
promises about the loss of any record, so one synthetic record that breaks them shows that they do not hold.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from torch_dpsco.accounting.designs import Poisson
from torch_dpsco.accounting.events import NonPrivate
from torch_dpsco.algorithms.output_sgd import BoltOnPSGD, HolderOutputSGD
from torch_dpsco.compat import BatchNorm
from torch_dpsco.diagnosis.probe import ROUNDING, Check, Evidence, NotScalarError
from torch_dpsco.diagnosis.script import (
    Finding,
    Script,
    accounted,
    critical,
    error,
    is_ghost_loss_value,
    poisson_rate,
    warning,
)
from torch_dpsco.errors import PrivacyError
from torch_dpsco.sampling import PrivateLoader
from torch_dpsco.step.oracle import ClippedMean
from torch_dpsco.step.run import CommonOptimizer

_NAMED = 4  # names listed in an evidence
_DEFAULT_SEED = (
    67_280_421_310_721  # of every torch.Generator() that nobody seeded: a constant of torch
)
_SMALL_SEED = 2**32  # who draws a seed from the operating system gets 53 bits or more
_USUAL_STEPS = 2000
_NO_ROUNDING = 1e-3
CLOSE = 1e-6  # relative, in double precision


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
            "model = dp.private_layers(model)  # GroupNorm; before optimizer and attach",
        )


def coupled_records(script: Script, evidence: Evidence) -> Iterator[Finding]:
    """Another record 0 must not move the gradients of the others."""
    found = ""
    consequence = "many rows, which clipping one row at a time does not bound"
    if script.row_free is not None:
        consequence = "the gradients of many, which the noise does not cover"
    if evidence.mixing > CLOSE:
        found = (
            "the gradient of a made-up batch is no sum over records (by"
            f" {evidence.mixing:.2g} of its norm)"
        )
    mixed = evidence.mixed
    if mixed is not None:
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
    if script.row_free is not None:
        return
    wrong = {
        name: len(rows.numbers)
        for name, rows in evidence.rows.items()
        if len(rows.numbers) != evidence.size
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
    if evidence.remembers and not evidence.buffers:
        yield critical(
            "stateful-model",
            "after another batch, the same records gave other gradients: records of one step are in"
            " the rows of later ones, which nothing accounts for",
            "remove what a forward remembers of its inputs (moving averages, caches, memory banks)",
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
    if script.row_free is not None and any(coupled_records(script, evidence)):
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
    # PRIVACY: of row-free steps (test_another_reduction_than_the_optimizers_is_critical)
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
    found = excess(evidence)
    if not found:
        return
    said = (
        f"the gradient of {some(found)} is not that of the per-sample gradients: a term of the"
        " loss on the weights, or a weight used outside of its layer"
    )
    if script.row_free is not None:
        fix = "remove the term from the loss; loss.problem(..., radius=...) keeps weights small"
        yield critical(
            "regularizer-in-loss", f"{said}, for which the noise is not calibrated", fix
        )
        return
    yield error(
        "regularizer-in-loss",
        f"{said} (under Opacus also padding_idx of an Embedding); it is in no row, so that training"
        " leaves it out",
        "remove the term from the loss and give reg= or prox= to the private optimizer"
        " (weight_decay= to a torch optimizer under Opacus)",
    )


def excess(evidence: Evidence) -> list[str]:
    """Returns the parameters whose total is not the sum of their rows (factored: that have a total at all)."""
    base = evidence.base
    if base is None or not base.rows:
        return []
    gaps = {}
    sizes = {}
    for name, rows in base.rows.items():
        total = base.totals[name]
        records = len(rows.numbers)
        scale = 1 / records if evidence.mean_rows and records else 1.0
        gap = torch.zeros(1) if total is None else total.double().flatten().cpu()
        if name not in base.factored:
            gap = gap - rows.numbers.sum(0) * scale
        gaps[name] = float(gap.norm())
        sizes[name] = float(rows.norms().sum()) * scale
    joint = math.hypot(*sizes.values())
    # three digits above rounding, but for half precision
    coarsest = max(rows.tolerance for rows in base.rows.values())
    slack = {1e-8: 1e-6, 1e-4: 1e-3, 3e-2: 3e-2}[coarsest]
    # against the joint size too: rows that are zero up to rounding (keys' bias in attention) are no scale
    return [name for name, gap in gaps.items() if gap > slack * max(sizes[name], 1e-2 * joint)]


def ghost_loss(script: Script, evidence: Evidence) -> Iterator[Finding]:
    """Ghost clipping happens inside of its own loss, and needs one number per record."""
    if not script.ghost or evidence.size == 0:
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
    """Says what could not be looked at, and what will be refused in training too."""
    fix = (
        "run the doctor where one forward and backward work; record= gives it another record to"
        " imitate"
    )
    for refused in evidence.refused:
        ours = isinstance(refused.error, PrivacyError)  # training would be refused too
        told = isinstance(refused.error, NotScalarError) or (ours and evidence.buffers)
        if not told:
            yield Finding("error" if ours else "warning", "not-probed", str(refused), fix)
    if evidence.rows and not evidence.moving:
        yield warning(
            "not-probed", "all gradients of the made-up batch are zero: they show nothing", fix
        )


def some(names: list[str]) -> str:
    """Returns the first few names, and how many more there are."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def not_private(script: Script, evidence: Evidence) -> Iterator[Finding]:
    """Somebody must clip and add noise."""
    private = script.ours or script.row_free or script.opacus_optimizer
    if script.optimizer is not None and private is None:
        yield critical(
            "not-private",
            f"{type(script.optimizer).__name__} takes the gradients as they are: no clip, no noise,"
            " nothing accounted",
            "model, optimizer, loader = dp.make_private(model, optimizer, loader, epsilon=...,"
            " delta=..., epochs=...)",
        )


def no_noise(script: Script, evidence: Evidence) -> Iterator[Finding]:
    """What is released without noise is not private."""
    if script.ours is not None:
        event = script.ours.oracle.event()
        silent = isinstance(event, NonPrivate) or getattr(event, "sigma", None) == 0
    elif script.row_free is not None:
        silent = script.row_free.noise_std == 0
    else:
        silent = script.opacus_optimizer is not None and script.optimizer.noise_multiplier == 0
    if silent:
        yield critical(
            "no-noise",
            f"{type(script.optimizer).__name__} adds no noise: what it releases is not private"
            " at all",
            "noise_multiplier > 0, or .plan(..., budget=dp.Budget(epsilon, delta))",
        )


def stale_parameters(script: Script, evidence: Evidence) -> Iterator[Finding]:
    """Model and optimizer must mean the same tensors."""
    if script.optimizer is None:
        return
    owned = {id(p): p for group in script.optimizer.param_groups for p in group["params"]}
    missing = [name for name, p in script.trainable.items() if id(p) not in owned]
    in_model = {id(p) for p in script.module.parameters()}
    stale = [
        tuple(p.shape) for key, p in owned.items() if key not in in_model and p.requires_grad
    ]
    parts = []
    if missing:
        parts.append(
            f"the optimizer does not train {len(missing)} trainable parameters of the model"
            f" ({missing[0]}, ...)"
        )
    if stale:
        parts.append(
            f"it holds {len(stale)} parameters that are not the model's (the first of shape"
            f" {stale[0]})"
        )
    if not script.trainable:
        parts.append("the model has no trainable parameter")
    if parts:
        yield error(
            "stale-parameters",
            "; ".join(parts)
            + ": they were replaced or unfrozen after the optimizer was built, or never given"
            " to it",
            "change the model first (LoRA, new heads, freezing), then build the optimizer on the"
            " parameters that require gradients, then attach or make_private",
        )


def rate_not_accounted(script: Script, evidence: Evidence) -> Iterator[Finding]:
    """Batches must be drawn at the rate of Opacus' accountant, at most."""
    if script.loader is None or script.opacus_optimizer is None:
        return
    _, rate = accounted(script.optimizer.step_hook)
    if rate is None or rate >= 1:  # a rate of 1 claims no amplification
        return
    sampler = script.sampler
    design = getattr(sampler, "design", None)
    drawn_rate = design.sample_rate if isinstance(design, Poisson) else poisson_rate(sampler)
    said = f"the step hook accounts Poisson sampling at rate {rate:.6g}"
    if drawn_rate is None:
        yield critical(
            "sampler-not-accounted",
            f"{said}, but the loader draws by {drawn(script)}: amplification by Poisson sampling"
            " does not hold for it",
            "make_private(..., poisson_sampling=True), and iterate over the loader that it returns;"
            " or\noptimizer = dp.HolderSGD(model.parameters(), dp.HolderSGD.plan(n=...,"
            " ...))\nloader = optimizer.loader(dataset)",
        )
    elif rate < drawn_rate * (1 - 1e-6):
        yield critical(
            "sampler-not-accounted",
            f"{said}, but the loader draws each record at rate {drawn_rate:.6g}",
            f"optimizer.attach_step_hook(accountant.get_optimizer_hook_fn(sample_rate={drawn_rate:.6g}))",
        )


def no_accountant(script: Script, evidence: Evidence) -> Iterator[Finding]:
    """Opacus' optimizer has one step hook, and the accountant needs it."""
    optimizer = script.opacus_optimizer
    if optimizer is not None and accounted(optimizer.step_hook)[0] is None:
        hook = optimizer.step_hook
        held = "step_hook is None"
        if hook is not None:
            held = f"the step hook is {getattr(hook, '__qualname__', hook)!s}"
        yield critical(
            "no-accountant",
            f"{held}: no step is accounted, and epsilon stays 0 whatever is released (there is one"
            " hook; attaching another removes the accountant)",
            "hook = optimizer.step_hook\noptimizer.attach_step_hook(lambda opt: (hook(opt),"
            " mine(opt)))",
        )


def fixed_seed(script: Script, evidence: Evidence) -> Iterator[Finding]:
    """Anybody who knows the seed of the noise can subtract it."""
    sources = list(_seeds(script))
    if sources:
        yield critical(
            "fixed-seed",
            "; ".join(sources)
            + ": noise or batches can be drawn again and subtracted; seeding again in each epoch "
            "repeats the same noise",
            "remove torch.manual_seed before training, or give make_private noise_generator=g"
            " with\ng = torch.Generator(); g.seed()  # and generator= of torch_dpsco in"
            " tests only",
        )


def _seeds(script: Script) -> Iterator[str]:
    sampler = script.sampler
    if isinstance(script.optimizer, CommonOptimizer) and script.optimizer.seeded:
        yield "the optimizer's noise has a generator of the user's"
    optimizer = script.opacus_optimizer
    if optimizer is None or optimizer.secure_mode:
        return
    device = next((p.device for p in optimizer.params), torch.device("cpu"))
    yield from _weak("the noise", optimizer.generator, device)
    if poisson_rate(sampler) is not None:
        yield from _weak("the sampler", sampler.generator, torch.device("cpu"))


def _weak(user: str, generator: torch.Generator | None, device: torch.device) -> Iterator[str]:
    source = "torch's global generator" if generator is None else "a torch.Generator"
    default = torch.default_generator
    if device.type == "cuda":
        default = torch.cuda.default_generators[device.index or 0]
    seed = (generator or default).initial_seed()
    if seed == _DEFAULT_SEED and generator is not None:
        yield f"{user} comes from {source} that was never seeded: its seed is the constant {seed}"
    elif 0 <= seed < _SMALL_SEED:
        yield f"{user} comes from {source} with seed {seed}, given by hand"


def grad_scaler(script: Script, evidence: Evidence) -> Iterator[Finding]:
    """A loss scale must be gone before the clip, and must not depend on the data."""
    scaler = script.scaler
    if scaler is None or not scaler.is_enabled():
        return
    if script.row_free is not None:
        yield critical(
            "grad-scaler",
            f"the loss is multiplied by {scaler.get_scale():.6g}, and the noise is calibrated for"
            " the loss itself; steps that the scaler skips depend on the data",
            "loss.backward(); optimizer.step()  # double precision needs no scaler",
        )
    elif script.opacus_optimizer is not None:
        yield critical(
            "grad-scaler",
            f"rows come to the clip multiplied by the scale, {scaler.get_scale():.6g}, so that all"
            " are clipped; and whether a step is skipped depends on infinities in the private"
            " gradients",
            "leave the scaler out under Opacus: loss.backward(); optimizer.step()\nor use an"
            " optimizer of torch_dpsco, which takes the scale out of each row before the clip",
        )
    elif script.ours is not None:
        steps = script.ours.schedule.steps or _USUAL_STEPS
        if scaler.get_growth_interval() < steps:
            yield warning(
                "grad-scaler",
                f"the scale will grow every {scaler.get_growth_interval()} steps of {steps}:"
                " infinities are never reported to it (that would be private), so that nothing"
                " makes it smaller again",
                f"torch.amp.GradScaler(growth_interval={steps + 1})",
            )


def isolated_rows(script: Script, evidence: Evidence) -> Iterator[Finding]:
    """Rows must depend on their own record alone, to the last bit, since a kink can turn a bit into any difference."""
    found = evidence.isolation
    if found is None:
        return
    if found.company and found.company < _NO_ROUNDING:
        # more is coupling, which has a finding of its own
        yield warning(
            "rows-not-isolated",
            f"in batches of {found.rows} rows the last bits of a row depend on the other records,"
            " which a kink of the loss can make as large as it likes",
            "torch.set_num_threads(1)  # or other kernels:"
            " torch.use_deterministic_algorithms(True)",
        )
    loader = script.source
    optimizer = script.ours
    private = optimizer is not None and optimizer.sizes_are_private
    if private and found.size and isinstance(loader, PrivateLoader) and loader.slots is None:
        yield warning(
            "batches-not-filled-up",
            "the last bits of a row depend on the number of rows in its batch, which is private:"
            " who is in a batch moves the others",
            "optimizer.loader(dataset)  # without isolation='none', and in place of a loader of yours",
        )


def drawn(script: Script) -> str:
    """Returns the name of what draws, and how many."""
    sampler = script.sampler
    inner = getattr(sampler, "sampler", sampler) or script.source
    size = getattr(sampler, "batch_size", None)
    return f"{type(inner).__name__} in batches of {size}" if size else type(inner).__name__


def single_precision(script: Script, evidence: Evidence) -> Iterator[Finding]:
    """Where nothing is clipped, the noise covers the roundings of double precision."""
    if script.row_free is None:
        return
    kinds = {name: p.dtype for name, p in script.trainable.items()}
    if evidence.base is not None and isinstance(evidence.base.value, Tensor):
        kinds["the loss"] = evidence.base.value.dtype
    found = [f"{name} ({dtype})" for name, dtype in kinds.items() if dtype != torch.float64]
    if found:
        yield critical(
            "single-precision",
            f"not in double precision: {some(found)}; the noise covers one record's effect and that"
            " of rounding in double precision, no larger one",
            "model = model.double(), and no .float() or .half() in model and loss",
        )


def random_gradients(script: Script, evidence: Evidence) -> Iterator[Finding]:
    """The loss of a record must be one function of the weights."""
    if evidence.randomness > ROUNDING:
        yield critical(
            "random-gradients",
            "other random numbers moved the gradient of a made-up batch (by"
            f" {evidence.randomness:.2g} of its norm): what is promised is one convex loss per"
            " record, and dropout scales features beyond their bound",
            "remove dropout, and noise on features or loss",
        )


def broken_promise(script: Script, evidence: Evidence) -> Iterator[Finding]:
    """Convexity, and the size and change of gradients, must be as promised."""
    optimizer = script.optimizer
    line = evidence.line
    if line is None or not isinstance(optimizer, (BoltOnPSGD, HolderOutputSGD)):
        return
    promises = optimizer._plan.promises
    slopes = line.grads @ line.direction
    norms = line.grads.norm(dim=2)
    broken = []
    falls = slopes[:, :-1] - slopes[:, 1:]
    if float(falls.max()) > CLOSE * float(norms.max()):
        broken.append("is not convex")
    if optimizer.bounds[0] is not None:
        # otherwise synthetic records may be beyond bounds that nobody enforces
        apart = (line.places[:, None] - line.places).abs() ** promises.holder_exponent
        change = (line.grads[:, :, None] - line.grads[:, None]).norm(dim=3)
        if bool((change > (1 + CLOSE) * promises.holder_constant * apart + 1e-30).any()):
            broken.append("bends more than holder_constant promises")
    if None not in optimizer.bounds:
        bounds = [promises.grad_bound(abs(place)) for place in line.places.tolist()]
        if bool((norms > (1 + CLOSE) * torch.tensor(bounds)).any()):
            broken.append("is steeper than grad_bound promises")
    if broken:
        # PRIVACY: (test_a_model_that_is_not_what_was_promised_is_critical)
        yield critical(
            "broken-promise",
            f"for made-up records within their bounds the loss {', and '.join(broken)}: the noise is"
            " too small",
            "one Linear layer on the features as they are, and the loss whose .problem(...) the"
            " optimizer got",
        )


CHECKS: tuple[Check, ...] = (
    batch_norm,
    coupled_records,
    changing_buffers,
    stateful_model,
    loss_reduction,
    regularizer_in_loss,
    rows_are_not_records,
    ghost_loss,
    not_probed,
    not_private,
    no_accountant,
    no_noise,
    rate_not_accounted,
    fixed_seed,
    grad_scaler,
    stale_parameters,
    isolated_rows,
    random_gradients,
    broken_promise,
    single_precision,
)
