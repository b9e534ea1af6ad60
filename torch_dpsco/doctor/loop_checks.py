"""Checks of loader, optimizer, accountant, seeds and scaler: what can be read off without a forward.

Where the optimizer needs no per-sample gradients, nothing is clipped and privacy rests on promises about the loss of
any record, so one synthetic record that breaks them shows that they do not hold.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from torch_dpsco.accounting.designs import Poisson, Undeclared
from torch_dpsco.accounting.events import NonPrivate
from torch_dpsco.accounting.identify import identify
from torch_dpsco.algorithms.output_sgd import BoltOnPSGD, HolderOutputSGD
from torch_dpsco.doctor.model_checks import coupled_records, excess, some
from torch_dpsco.doctor.probe import ROUNDING
from torch_dpsco.doctor.script import (
    Check,
    Evidence,
    Finding,
    Script,
    accounted,
    critical,
    error,
    is_split,
    poisson_rate,
    warning,
)
from torch_dpsco.errors import UnknownSamplerError
from torch_dpsco.sampling import BoundedLoader, PrivateLoader
from torch_dpsco.step.run import CommonOptimizer
from torch_dpsco.trial import HALF
from torch_dpsco.trial.undo import RandomStreams, attempt, same_values, seed_torch

_DEFAULT_SEED = (
    67_280_421_310_721  # of every torch.Generator() that nobody seeded: a constant of torch
)
_SMALL_SEED = 2**32  # who draws a seed from the operating system gets 53 bits or more
_USUAL_STEPS = 2000
_NO_ROUNDING = 1e-3


def not_private(script: Script, evidence: Evidence) -> Iterator[Finding]:
    """Somebody must clip and add noise."""
    private = script.ours or script.row_free or script.opacus_optimizer
    if script.optimizer is not None and private is None:
        yield critical(
            "not-private",
            f"{type(script.optimizer).__name__} takes the gradients as they are: no clip, no noise,"
            " nothing accounted",
            "model, optimizer, loader = dp.make_private(model, optimizer, loader, problem=...,"
            " budget=..., n=...)",
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


def unattached_model(script: Script, evidence: Evidence) -> Iterator[Finding]:
    """A private optimizer needs per-sample gradients."""
    private = script.ours is not None or script.opacus_optimizer is not None
    if private and not script.records_rows:
        fix = "dp.attach(model)" if script.ours is not None else "model = GradSampleModule(model)"
        yield error(
            "unattached-model",
            f"nothing records per-sample gradients of {type(script.model).__name__}: the first step"
            " will stop there",
            f"{fix}  # before the first forward",
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


def sampler_not_accounted(script: Script, evidence: Evidence) -> Iterator[Finding]:
    """Batches must be drawn by the design of the optimizer."""
    if script.loader is None or script.ours is None or isinstance(script.ours.design, Undeclared):
        return
    try:
        found: object = identify(script.source if script.sampler is None else script.sampler)
    except UnknownSamplerError:
        found = drawn(script)
    if found != script.ours.design:
        yield critical(
            "sampler-not-accounted",
            f"the optimizer accounts {script.ours.design}, but the loader draws by {found}",
            "loader = optimizer.loader(dataset)",
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
        size = _length(script.dataset)
        if size:
            said += f" ({rate * size:.6g} of {size} records on average)"
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


def expected_batch_size(script: Script, evidence: Evidence) -> Iterator[Finding]:
    """The divisor of Opacus' means should be the expected size of a batch."""
    optimizer = script.opacus_optimizer
    rate = poisson_rate(script.sampler)
    size = _length(script.dataset)
    if optimizer is None or optimizer.loss_reduction != "mean" or rate is None or not size:
        return
    expected = rate * size
    if abs(optimizer.expected_batch_size - expected) > 1 + 0.05 * expected:
        yield warning(
            "expected-batch-size",
            f"gradients are divided by {optimizer.expected_batch_size:.6g}, but batches have"
            f" {expected:.6g} records on average: the learning rate is off by"
            f" {expected / optimizer.expected_batch_size:.3g}",
            f"expected_batch_size={round(expected)}  # of a logical batch, not of a physical one",
        )


def split_with_workers(script: Script, evidence: Evidence) -> Iterator[Finding]:
    """BatchMemoryManager's queue of skip flags runs ahead with workers."""
    workers = getattr(script.source, "num_workers", 0)
    if is_split(script.loader) and workers:
        yield warning(
            "split-with-workers",
            f"BatchMemoryManager with num_workers={workers}: prefetched flags stay in the"
            " optimizer's queue when an epoch is broken off, and then parts of two batches are"
            " released together",
            "num_workers=0, or optimizer.loader(dataset, physical_batch_size=..., num_workers=...)"
            " of a dp optimizer",
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
            " with\ng = torch.Generator(); g.seed()  # and seed= or generator= of torch_dpsco in"
            " tests only",
        )


def _seeds(script: Script) -> Iterator[str]:
    sampler = script.sampler
    if isinstance(script.optimizer, CommonOptimizer) and script.optimizer.seeded:
        yield "the optimizer's noise has a generator of the user's"
    if getattr(sampler, "seeded", False):
        yield "the sampler has a seed of the user's"
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


def half_precision_noise(script: Script, evidence: Evidence) -> Iterator[Finding]:
    """Opacus draws noise in the dtype of the parameters."""
    kinds = sorted({str(p.dtype) for p in script.trainable.values() if p.dtype in HALF})
    if kinds and script.opacus_optimizer is not None:
        yield warning(
            "half-precision-noise",
            f"parameters are {', '.join(kinds)}: Opacus draws the noise and adds it in that"
            " precision, which the Gaussian analysis does not cover",
            "keep the parameters in float32 (autocast for the forward only)",
        )


def undeclared_sampling(script: Script, evidence: Evidence) -> Iterator[Finding]:
    """Without a declared sampling nothing is amplified."""
    if script.ours is not None and isinstance(script.ours.design, Undeclared):
        yield warning(
            "undeclared-sampling",
            "the optimizer knows no sampling: each step is accounted as if it used all records,"
            " under replace_one only",
            "give n= (Poisson batches) or sampling= to the plan, and loader ="
            " optimizer.loader(dataset)",
        )


def finalized_optimizer(script: Script, evidence: Evidence) -> Iterator[Finding]:
    """After finalize() no step is possible."""
    optimizer = script.optimizer
    if isinstance(optimizer, CommonOptimizer) and optimizer.finalized:
        yield error(
            "finalized-optimizer",
            f"the optimizer is finalized after {optimizer.steps} steps: its answer is installed, a"
            " step raises",
            "make a new optimizer on the same accountant (accountant=optimizer.accountant)",
        )


def private_optimizer_inside_opacus(script: Script, evidence: Evidence) -> Iterator[Finding]:
    """The optimizer inside of DPOptimizer must use the private gradient and nothing else."""
    if script.opacus_optimizer is None:
        return
    inner = script.optimizer.original_optimizer
    how = ""
    if isinstance(inner, CommonOptimizer):
        how = "it is an optimizer of torch_dpsco, which takes the raw gradients"
    elif attempt("a step of a copy", lambda: _reads_rows(inner)) is True:
        how = (
            "two steps with the same p.grad and other p.grad_sample differ: it reads raw per-sample"
            " gradients"
        )
    if how:
        yield critical(
            "private-optimizer-inside-opacus",
            f"DPOptimizer wraps {type(inner).__name__}; {how}, while the accountant records a"
            " private step",
            "give make_private a plain torch optimizer; or use the private optimizer alone, with"
            " dp.attach(model)",
        )


def _reads_rows(optimizer: Optimizer) -> bool:
    """Steps two copies that differ in nothing but the rows on their parameters."""
    streams = RandomStreams()
    try:
        first, second = (_stepped(copy.deepcopy(optimizer), rows) for rows in (1.0, 3.0))
    finally:
        streams.restore()
    return not all(map(same_values, first, second))


def _stepped(optimizer: Optimizer, rows: float) -> list[Tensor]:
    params = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    for p in params:
        p.grad = torch.full_like(p, 0.5)
        p.grad_sample = rows * torch.ones((2, *p.shape), dtype=p.dtype, device=p.device)
    seed_torch(0)
    optimizer.step()
    return [p.detach() for p in params]


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
            "optimizer.loader(dataset)  # without padding=False, and in place of a loader of yours",
        )


def drawn(script: Script) -> str:
    """Returns the names of what draws."""
    sampler = script.sampler
    inner = getattr(script.source if sampler is None else sampler, "sampler", None)
    size = getattr(sampler, "batch_size", None)
    name = type(
        next((part for part in (inner, sampler) if part is not None), script.source)
    ).__name__
    return f"{name} in batches of {size}" if isinstance(size, int) else name


def _length(dataset: Any) -> int:
    return len(dataset) if hasattr(dataset, "__len__") else 0


_CLOSE = 1e-6  # relative, in double precision


def foreign_loader(script: Script, evidence: Evidence) -> Iterator[Finding]:
    """Batches must come from the optimizer's own loader, which maps records into their bounds."""
    optimizer = script.row_free
    loader = script.loader
    if optimizer is None or loader is None:
        return
    if not isinstance(loader, BoundedLoader) or script.sampler.log is not optimizer._log:
        # PRIVACY: (test_another_loader_than_the_optimizers_last_one_is_critical)
        yield critical(
            "sampler-not-accounted",
            f"the loader ({type(loader).__name__}, which draws by {drawn(script)}) is not the last"
            " one that the optimizer made: the noise covers records within their bounds, in"
            f" batches of {optimizer.design}",
            "loader = optimizer.loader(dataset)",
        )


def attached_model(script: Script, evidence: Evidence) -> Iterator[Finding]:
    """Per-sample gradients are of no use."""
    taken = (
        f"per-sample gradients of {type(script.model).__name__} are made at each step, and "
        f"{type(script.optimizer).__name__} takes none"
    )
    if script.attached:
        stops = "the first step will stop, because an attached model has no plain gradient"
        yield error("attached-model", f"{taken}; {stops}", "dp.detach(model)")
    elif script.records_rows:
        yield warning("attached-model", taken, "give the loop the plain model")


def single_precision(script: Script, evidence: Evidence) -> Iterator[Finding]:
    """The noise covers the roundings of double precision."""
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


def reduction_of_gradients(script: Script, evidence: Evidence) -> Iterator[Finding]:
    """A batch must weigh its records as the step size assumes."""
    if evidence.weight is None or any(coupled_records(script, evidence)):
        return
    weights = {"mean": 1 / evidence.size, "sum": 1.0}
    declared = script.reductions[type(script.optimizer).__name__]
    if not math.isclose(evidence.weight, weights[declared], rel_tol=_CLOSE):
        what = "neither a mean nor a sum"
        fix = "reduce the loss by .mean() or .sum() over records"
        for kind, weight in weights.items():
            if math.isclose(evidence.weight, weight, rel_tol=_CLOSE):
                what = f"a {kind}"
                fix = f"declare loss_reduction={kind!r}"
        # PRIVACY: (test_another_reduction_than_the_optimizers_is_critical)
        yield critical(
            "loss-reduction",
            f"the gradient of a made-up batch of {evidence.size} is {evidence.weight:.6g} times the"
            " sum of those of its records, which is"
            f" {what}, and the optimizer was made with loss_reduction={declared!r}",
            fix,
        )


def term_on_the_weights(script: Script, evidence: Evidence) -> Iterator[Finding]:
    """The gradient of the loss must be that of its records."""
    found = excess(evidence)
    if found:
        yield critical(
            "regularizer-in-loss",
            f"the gradient of {some(found)} is not the sum of those of the records: a term of the"
            " loss on the weights, or a weight used outside of its layer, for which the noise is"
            " not calibrated",
            "remove the term from the loss; loss.problem(..., radius=...) keeps weights small",
        )


def broken_promise(script: Script, evidence: Evidence) -> Iterator[Finding]:
    """Convexity, and the size and change of gradients, must be as promised."""
    optimizer = script.optimizer
    line = evidence.line
    if line is None or not isinstance(optimizer, (BoltOnPSGD, HolderOutputSGD)):
        return
    promises = optimizer._plan.promises
    parts = []
    slopes = line.grads @ line.direction
    norms = line.grads.norm(dim=2)
    fall = float((slopes[:, :-1] - slopes[:, 1:]).max() / norms.max().clamp_min(1e-30))
    if fall > _CLOSE:
        parts.append(
            f"the loss is not convex: along a line its slope falls by {fall:.2g} of the largest"
            " gradient"
        )
    if optimizer.bounds[0] is not None:
        # otherwise synthetic records may be beyond bounds that nobody enforces
        apart = (
            line.places[:, None] - line.places
        ).abs() ** promises.holder_exponent * promises.holder_constant
        change = (line.grads[:, :, None] - line.grads[:, None]).norm(dim=3) / apart.clamp_min(
            1e-30
        )
        parts += _too_large(
            "changes of the gradient are", float(change.max()), "what holder_constant promises"
        )
    if None not in optimizer.bounds:
        bounds = torch.tensor([promises.grad_bound(abs(place)) for place in line.places.tolist()])
        parts += _too_large(
            "gradients are", float((norms / bounds).max()), "what grad_bound promises"
        )
    if parts:
        # PRIVACY: (test_a_model_that_is_not_what_was_promised_is_critical)
        yield critical(
            "broken-promise",
            "; ".join(parts)
            + ": for made-up records within their bounds, so that the noise is too small",
            "one Linear layer on the features as they are, and the loss whose .problem(...) the"
            " optimizer got",
        )


def _too_large(what: str, ratio: float, promise: str) -> list[str]:
    return [f"{what} up to {ratio:.3g} times {promise}"] if ratio > 1 + _CLOSE else []


LOOP_CHECKS: tuple[Check, ...] = (
    not_private,
    private_optimizer_inside_opacus,
    no_accountant,
    no_noise,
    sampler_not_accounted,
    rate_not_accounted,
    fixed_seed,
    grad_scaler,
    half_precision_noise,
    stale_parameters,
    unattached_model,
    finalized_optimizer,
    expected_batch_size,
    split_with_workers,
    undeclared_sampling,
    isolated_rows,
)
ROW_FREE_CHECKS: tuple[Check, ...] = (
    random_gradients,
    term_on_the_weights,
    reduction_of_gradients,
    broken_promise,
    single_precision,
    foreign_loader,
    attached_model,
)
