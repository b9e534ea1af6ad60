"""Checks of optimizers that need no per-sample gradients: is the loss of a record what was promised about it?

Nothing is clipped there, and privacy rests on promises about the loss of any record, so one synthetic record that
breaks them shows that they do not hold.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from torch_dpsco.algorithms.output_sgd import BoltOnPSGD, HolderOutputSGD
from torch_dpsco.diagnosis.checks import CLOSE, some
from torch_dpsco.diagnosis.probe import ROUNDING, Check, Evidence
from torch_dpsco.diagnosis.script import Finding, Script, critical


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
    if float((slopes[:, :-1] - slopes[:, 1:]).max()) > CLOSE * float(norms.max()):
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


ROW_FREE_CHECKS: tuple[Check, ...] = (random_gradients, broken_promise, single_precision)
