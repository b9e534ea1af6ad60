"""Advice of the doctor: what is private and right, but would be more accurate in another way, by public numbers."""

from __future__ import annotations

from collections.abc import Iterator

from torch_dpsco.accounting.designs import Undeclared
from torch_dpsco.compat import ConvNd
from torch_dpsco.diagnosis.probe import Check, Evidence
from torch_dpsco.diagnosis.script import Finding, Script, advice
from torch_dpsco.step.chooser import loudness, noise_of_mean
from torch_dpsco.step.oracle import ClippedMean

_LOUD = 0.1  # noise over the clip, from which it matters that larger batches have less
_LESS = 1.5  # times less of it, to be worth a word


def no_norm(script: Script, evidence: Evidence) -> Iterator[Finding]:
    """Convolutions learn more under noise with a norm between them."""
    layers = list(script.module.modules())
    found = [m for m in layers if isinstance(m, ConvNd) and m.weight.requires_grad]
    normed = any("Norm" in type(m).__name__ for m in layers)
    if found and not normed and script.row_free is None:
        yield advice(
            "no-norm",
            f"{len(found)} convolutions, and no layer that normalizes: under noise the same net with"
            " GroupNorm is more accurate",
            "model = dp.private_layers(model)  # GroupNorm; before optimizer and attach",
        )


def loud_noise(script: Script, evidence: Evidence) -> Iterator[Finding]:
    """The noise of the mean of all steps should be far less than a gradient can be, see `checks.warn_if_buried`."""
    optimizer = script.ours
    if optimizer is None or not isinstance(optimizer.oracle, ClippedMean):
        return
    budget = optimizer.accountant.budget
    steps = optimizer.schedule.steps
    design = optimizer.design
    if budget is None or budget.adaptive or not budget.delta or budget.unit != "example":
        return
    if not steps or isinstance(design, Undeclared):
        return
    n = design.n
    dim = sum(p.numel() for p in script.trainable.values())
    size = design.batch_size
    noise = noise_of_mean(
        optimizer.oracle.noise_multiplier, 1.0, size, steps, min(dim, n), sampled=False
    )
    if noise <= _LOUD:
        return
    least = loudness(n, budget, min(dim, n))
    ways = []
    if noise > _LESS * least:
        ways.append(
            f"a larger batch_size for as many epochs: down to {least:.2g} times the clip"
        )
    if noise > 1.0:
        ways.append("fewer parameters (a smaller net, LoRA), more records or a larger epsilon")
    if ways:
        yield advice(
            "loud-noise",
            f"the mean of all {steps} steps has noise of {noise:.2g} times the clip, the longest"
            f" signal, by {dim} parameters and batches of {size} of {n} records",
            "\n".join(ways),
        )


ADVICE: tuple[Check, ...] = (no_norm, loud_noise)
