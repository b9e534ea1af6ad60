"""The training script that the doctor looks at, and its findings: what checks ask, and what they say."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from textwrap import fill, indent
from types import FunctionType, MethodType
from typing import Any

from torch import nn
from torch.utils.data import default_collate

from torch_dpsco import _validate as check
from torch_dpsco._validate import check_fields, typed
from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.algorithms.row_free import BoundedLoader, RowFreeOptimizer, bounded
from torch_dpsco.compat import of_opacus
from torch_dpsco.errors import PrivacyError
from torch_dpsco.rows.attach import is_attached
from torch_dpsco.step.step import PrivateOptimizer

NO_RECORD = object()


@dataclass(frozen=True)
class OfBatch:
    """A loss that is called as loss(model, batch), also where records are (input, target) pairs.

    Args:
        loss: calls the model by itself.
    """

    loss: Callable[[nn.Module, Any], Any]

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        """Returns the loss of a batch."""
        return self.loss(model, batch)


@dataclass(frozen=True, eq=False)
class Script:
    """What the user trains with.

    Args:
        model: as it will be called in the loop.
        loss: loss(outputs, targets) or loss(model, batch); None if it is not known yet.
        loader: None if it is not known yet.
        optimizer: None if it is not known yet.
        scaler: gradient scaler of the loop, if there is one.
        record: stands for the first record of the loader's data set.
    """

    model: nn.Module
    loss: Any
    loader: Any
    optimizer: Any
    scaler: Any = None
    record: Any = NO_RECORD

    @cached_property
    def module(self) -> nn.Module:
        """The model to probe: not its compiled form, and without a wrapper that has no hooks."""
        model = getattr(self.model, "_orig_mod", self.model)
        wrapped = isinstance(model, of_opacus("grad_sample.AbstractGradSampleModule"))
        hooked = isinstance(model, of_opacus("grad_sample.GradSampleHooks"))
        inner: nn.Module = model._module if wrapped and not hooked else model  # type: ignore[assignment]
        return inner

    @cached_property
    def hooks(self) -> Any:
        """Opacus' hooks on the model, None without."""
        return grad_sample_hooks(self.module)

    @property
    def attached(self) -> bool:
        """Whether dp.attach was called on the model."""
        return is_attached(self.module)

    @property
    def ghost(self) -> bool:
        """Whether gradients are clipped by Opacus' ghost loss."""
        return is_ghost(self.hooks) or is_ghost(self.optimizer)

    @property
    def ours(self) -> PrivateOptimizer | None:
        """The optimizer, if it is one of torch_dpsco that takes per-sample gradients."""
        return self.optimizer if isinstance(self.optimizer, PrivateOptimizer) else None

    @property
    def row_free(self) -> RowFreeOptimizer | None:
        """The optimizer, if it is one of torch_dpsco that needs no per-sample gradients."""
        return self.optimizer if isinstance(self.optimizer, RowFreeOptimizer) else None

    @property
    def opacus_optimizer(self) -> Any:
        """The optimizer, if it is one of Opacus."""
        theirs = isinstance(self.optimizer, of_opacus("optimizers.DPOptimizer"))
        return self.optimizer if theirs else None

    @cached_property
    def trainable(self) -> Mapping[str, nn.Parameter]:
        """Trainable parameters of the model by name, each once."""
        return {name: p for name, p in self.module.named_parameters() if p.requires_grad}

    @cached_property
    def reductions(self) -> Mapping[str, str]:
        """How the loss reduces, as declared to each object."""
        declared = {}
        if self.attached:
            declared["dp.attach"] = "mean" if self.module._dpsco.mean else "sum"
        for part in (self.hooks, self.opacus_optimizer):
            if part is not None:
                declared[type(part).__name__] = part.loss_reduction
        if self.row_free is not None:
            declared[type(self.optimizer).__name__] = "mean" if self.row_free._mean else "sum"
        return declared

    @cached_property
    def source(self) -> Any:
        """The loader behind those that split or bound its batches."""
        loader = self.loader
        if isinstance(loader, BoundedLoader):
            loader = loader._loader
        return loader.data_loader if isinstance(loader, of_opacus(_SPLITS)) else loader

    @property
    def sampler(self) -> Any:
        """The loader's batch sampler, without the splitting of BatchMemoryManager; None without."""
        sampler = getattr(self.source, "batch_sampler", None)
        while isinstance(sampler, of_opacus(_PARTS)):
            sampler = sampler.sampler
        return sampler

    @property
    def dataset(self) -> Any:
        """The loader's data set, None without."""
        return getattr(self.source, "dataset", None)

    @property
    def has_record(self) -> bool:
        """Whether a record is known, to make up a batch from."""
        if self.record is not NO_RECORD:
            return True
        endless = not hasattr(self.dataset, "__len__")
        return self.dataset is not None and (endless or len(self.dataset) > 0)

    def first_record(self) -> Any:
        """Returns the record that shows shapes and dtypes."""
        return self.dataset[0] if self.record is NO_RECORD else self.record

    def collate(self, items: list[Any]) -> Any:
        """Joins records as the loader does."""
        own = getattr(self.source, "collate_fn", None)
        if isinstance(own, of_opacus("data_loader.CollateFnWithEmpty")):
            own = own.wrapped_collator_fn  # which would remember a synthetic batch
        return self.bounded((own or default_collate)(items))

    def bounded(self, batch: Any) -> Any:
        """Returns a batch as the optimizer's loader delivers it: in its precision, and within its bounds."""
        return batch if self.row_free is None else bounded(batch, *self.row_free.bounds)


SEVERITIES = ("critical", "error", "warning", "advice")
"""critical: the guarantee is broken or void; error: silently wrong, or will crash; warning: works, but risky; advice:
nothing is wrong, and more accuracy is to be had."""

_WIDTH = 100


@dataclass(frozen=True)
class Finding:
    """One mistake in a training script.

    Args:
        severity: one of `SEVERITIES`.
        name: slug of the mistake's heading in docs/mistakes.md.
        evidence: what was measured or read, with its numbers; computed from a synthetic batch, never from data.
        fix: the line or lines to change.

    Example:
        >>> print(Finding("warning", "no-accountant", "step_hook is None", "do not replace step_hook").link)
        docs/mistakes.md#no-accountant
    """

    severity: str
    name: str
    evidence: str
    fix: str

    def __post_init__(self) -> None:
        check_fields(self)
        check.choice(SEVERITIES, severity=self.severity)

    @property
    def link(self) -> str:
        """Where the mistake is explained."""
        return f"docs/mistakes.md#{self.name}"

    def __str__(self) -> str:
        found = fill(self.evidence, _WIDTH, break_long_words=False, break_on_hyphens=False)
        # a fix is code, which keeps its lines
        parts = {"found": found, "fix": self.fix, "see": self.link}
        lines = [
            f"  {key:<6} " + text.replace("\n", "\n" + 9 * " ") for key, text in parts.items()
        ]
        return "\n".join([f"{self.severity.upper()}: {self.name.replace('-', ' ')}", *lines])


critical, error, warning, advice = (partial(Finding, severity) for severity in SEVERITIES)


@dataclass(frozen=True)
class Diagnosis:
    """All findings about a training script, the worst first.

    Args:
        findings: sorted by severity when built by `Diagnosis.of`.

    Example:
        >>> diagnosis = Diagnosis.of([Finding("critical", "no-accountant", "step_hook is None", "leave it alone")])
        >>> diagnosis.healthy, len(diagnosis.critical)
        (False, 1)
        >>> print(Diagnosis.of([]))
        healthy: nothing found
    """

    findings: tuple[Finding, ...]

    @classmethod
    @typed
    def of(cls, findings: Iterable[Finding]) -> Diagnosis:
        """Returns the diagnosis of findings in any order; equal ones are kept once."""
        unique = dict.fromkeys(findings)
        return cls(tuple(sorted(unique, key=lambda found: SEVERITIES.index(found.severity))))

    @property
    def healthy(self) -> bool:
        """Whether nothing but advice was found. No proof of privacy: the doctor knows the mistakes it looks for."""
        return all(finding.severity == "advice" for finding in self.findings)

    @property
    def critical(self) -> tuple[Finding, ...]:
        """The findings that break or void the guarantee."""
        return tuple(finding for finding in self.findings if finding.severity == "critical")

    def __str__(self) -> str:
        if not self.findings:
            return "healthy: nothing found"
        severities = [finding.severity for finding in self.findings]
        counts = [f"{severities.count(one)} {one}" for one in SEVERITIES if one in severities]
        return "\n\n".join([", ".join(counts), *map(str, self.findings)])

    @typed
    def raise_if(self) -> None:
        """Raises for the worst finding but warnings and advice, naming evidence, fix and how many more there are.

        Raises:
            PrivacyError: the worst one is critical.
            ValueError: the worst one is an error.
        """
        found = [
            finding for finding in self.findings if finding.severity in ("critical", "error")
        ]
        if found:
            more = (
                f"\n(and {len(found) - 1} more: print the diagnosis)" if len(found) > 1 else ""
            )
            kind = PrivacyError if found[0].severity == "critical" else ValueError
            raise kind(
                f"the training script has a mistake:\n{indent(str(found[0]), '  ')}{more}"
            )


_POISSON = (
    "utils.uniform_sampler.UniformWithReplacementSampler",
    "utils.uniform_sampler.DistributedUniformWithReplacementSampler",
)
_GHOST = (
    "grad_sample.GradSampleHooksFastGradientClipping",
    "optimizers.DPOptimizerFastGradientClipping",
)
_SPLITS = "utils.batch_memory_manager.BatchMemoryManager"
_PARTS = "utils.batch_memory_manager.BatchSplittingSampler"


def grad_sample_hooks(model: nn.Module) -> Any:
    """Returns the object that hooks the model: a GradSampleModule, or the GradSampleHooks of `wrap_model=False`."""
    if isinstance(model, of_opacus("grad_sample.GradSampleHooks")):
        return model
    if hasattr(model, "autograd_grad_sample_hooks") and not hasattr(model, "_dpsco"):
        for module in model.modules():
            for hook in module._forward_hooks.values():
                owner = getattr(hook, "__self__", None)
                if isinstance(owner, of_opacus("grad_sample.GradSampleHooks")):
                    return owner
    return None


def is_ghost(part: Any) -> bool:
    """Returns whether hooks compute norms of rows and no rows, or an optimizer wants gradients clipped by the loss."""
    return isinstance(part, of_opacus(*_GHOST))


def is_ghost_loss_value(value: Any) -> bool:
    """Returns whether it is what that criterion returns."""
    return isinstance(
        value, of_opacus("utils.fast_gradient_clipping_utils.DPTensorFastGradientClipping")
    )


def poisson_rate(sampler: Any) -> float | None:
    """Returns the rate of Opacus' Poisson samplers, None for other samplers."""
    return float(sampler.sample_rate) if isinstance(sampler, of_opacus(*_POISSON)) else None


_MAX_DEPTH = 4


def accounted(hook: Any, depth: int = 0) -> tuple[Any, float | None]:
    """Returns (accountant, sampling rate) of a step hook, (None, None) if no accountant can be found in it.

    Opacus' own hook is a closure over the two; a user's hook that calls it carries it.
    """
    if isinstance(hook, (Accountant, *of_opacus("accountants.accountant.IAccountant"))):
        return hook, None
    if depth > _MAX_DEPTH or not callable(hook):
        return None, None
    held: dict[Any, Any] = dict(getattr(hook, "__dict__", {}))
    if isinstance(hook, (FunctionType, MethodType)):
        variables = inspect.getclosurevars(hook)
        held |= variables.nonlocals
        held |= {} if depth else variables.globals
    if isinstance(hook, MethodType):
        held["self"] = hook.__self__
    if isinstance(hook, partial):
        held |= hook.keywords
        held |= dict(enumerate((hook.func, *hook.args)))
    rate = held.get("sample_rate")
    for value in held.values():
        accountant, inner = accounted(value, depth + 1)
        if accountant is not None:
            return accountant, inner if rate is None else float(rate)
    return None, None
