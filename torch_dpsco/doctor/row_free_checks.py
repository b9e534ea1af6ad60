"""Checks of scripts whose optimizer needs no per-sample gradients: nothing is clipped, and privacy rests on promises.

The promises are about the loss of any record, so one synthetic record that breaks them shows that they do not hold.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from torch_dpsco.doctor.evidence import Check, Evidence, coupled_records
from torch_dpsco.doctor.loop_checks import drawn
from torch_dpsco.doctor.model_checks import excess, some
from torch_dpsco.doctor.probe import ROUNDING
from torch_dpsco.doctor.script import Finding, Script, critical, error, warning
from torch_dpsco.optim.output_sgd import BoltOnPSGD, HolderOutputSGD
from torch_dpsco.sampling import BoundedLoader

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
        kind = next(
            (
                k
                for k, weight in weights.items()
                if math.isclose(evidence.weight, weight, rel_tol=_CLOSE)
            ),
            "",
        )
        # PRIVACY: (test_another_reduction_than_the_optimizers_is_critical)
        yield critical(
            "loss-reduction",
            f"the gradient of a made-up batch of {evidence.size} is {evidence.weight:.6g} times the"
            " sum of those of its records, which is"
            f" {f'a {kind}' if kind else 'neither a mean nor a sum'}, and the optimizer was made"
            f" with loss_reduction={declared!r}",
            (
                f"declare loss_reduction={kind!r}"
                if kind
                else "reduce the loss by .mean() or .sum() over records"
            ),
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
    if (
        optimizer.bounds[0] is not None
    ):  # otherwise synthetic records may be beyond bounds that nobody enforces
        apart = (
            line.places[:, None] - line.places
        ).abs() ** promises.holder_exponent * promises.holder_constant
        change = (line.grads[:, :, None] - line.grads[:, None]).norm(dim=3) / apart.clamp_min(1e-30)
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


ROW_FREE_CHECKS: tuple[Check, ...] = (
    random_gradients,
    term_on_the_weights,
    reduction_of_gradients,
    broken_promise,
    single_precision,
    foreign_loader,
    attached_model,
)
