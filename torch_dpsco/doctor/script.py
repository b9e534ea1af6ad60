"""The training script that the doctor looks at, and its findings: what checks ask, and what they say.

What probing a script shows is its evidence: records in the gradients of others, bits that depend on other rows.

The guarantee assumes that for batches of ONE size a row is computed from its own record alone (docs/guarantees.md).
Here that is looked at: synthetic records, the model's own weights, threads and device as they are. It is no proof.
Rows are compared without forming those of Linear layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from textwrap import fill, indent
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

import torch_dpsco
from torch_dpsco import _validate as check
from torch_dpsco._doors import check_fields, typed
from torch_dpsco._loaded import of_opacus
from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.algorithms.row_free import RowFreeOptimizer
from torch_dpsco.errors import PrivacyError
from torch_dpsco.native import switches
from torch_dpsco.rows.attach import is_attached
from torch_dpsco.rows.blocks import Block, FactoredBlock
from torch_dpsco.sampling import BoundedLoader, PhysicalBatches, PrivateLoader, bounded
from torch_dpsco.step.step import PrivateOptimizer
from torch_dpsco.trial import HALF, Isolation, Mixed, Rows
from torch_dpsco.trial.undo import Refused

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
        return inner_module(self._uncompiled)

    @cached_property
    def hooks(self) -> Any:
        """Opacus' hooks on the model, None without."""
        return grad_sample_hooks(self.module)

    @property
    def attached(self) -> bool:
        """Whether dp.attach was called on the model."""
        return is_attached(self.module)

    @property
    def records_rows(self) -> bool:
        """Whether something makes per-sample gradients of the model."""
        return self.attached or self.hooks is not None or self.module is not self._uncompiled

    @property
    def _uncompiled(self) -> nn.Module:
        return getattr(self.model, "_orig_mod", self.model)

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
        return self.optimizer if is_opacus_optimizer(self.optimizer) else None

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
        if isinstance(loader, (BoundedLoader, PhysicalBatches)):
            loader = loader._loader
        return underlying_loader(loader)

    @property
    def sampler(self) -> Any:
        """The loader's batch sampler, None without."""
        return batch_sampler(self.source)

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
        own = bare_collate(getattr(self.source, "collate_fn", None))
        return self.bounded((own or default_collate)(items))

    def bounded(self, batch: Any) -> Any:
        """Returns a batch as the optimizer's loader delivers it: in its precision, and within its bounds."""
        return batch if self.row_free is None else bounded(batch, *self.row_free.bounds)


SEVERITIES = ("critical", "error", "warning")
"""critical: the guarantee is broken or void; error: silently wrong, or will crash; warning: works, but risky."""

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


critical, error, warning = (partial(Finding, severity) for severity in SEVERITIES)


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
        """Whether nothing was found. No proof of privacy: the doctor knows the mistakes it looks for."""
        return not self.findings

    @property
    def critical(self) -> tuple[Finding, ...]:
        """The findings that break or void the guarantee."""
        return tuple(finding for finding in self.findings if finding.severity == "critical")

    def plot(self) -> Figure:
        """Returns a picture: what was found, and how bad it is.

        Raises:
            ImportError: matplotlib is not installed.

        Example:
            >>> finding = Finding("critical", "no-accountant", "step_hook is None", "leave it alone")
            >>> [axes.get_title() for axes in Diagnosis.of([finding]).plot().axes]
            ['1 critical']
        """
        plots = torch_dpsco.plots  # show/ is the outer ring: looked up, not imported
        if self.healthy:
            return plots.figure("", plots.words("The doctor", "healthy: nothing found"))
        names = [finding.name for finding in self.findings]
        places = [SEVERITIES.index(finding.severity) for finding in self.findings]
        return plots.figure("", plots.marks(self._counts(), names, SEVERITIES, places))

    def _counts(self) -> str:
        severities = [finding.severity for finding in self.findings]
        counts = {severity: severities.count(severity) for severity in SEVERITIES}
        return ", ".join(f"{count} {severity}" for severity, count in counts.items() if count)

    def __str__(self) -> str:
        if self.healthy:
            return "healthy: nothing found"
        return "\n\n".join([self._counts(), *map(str, self.findings)])

    @typed
    def raise_if(self, severities: Iterable[str] = ("critical", "error")) -> None:
        """Raises for the worst finding of the given severities, naming evidence, fix and how many more there are.

        Raises:
            PrivacyError: the worst one is critical.
            ValueError: the worst one is an error or a warning; or an unknown severity.
        """
        wanted = [check.choice(SEVERITIES, severities=severity) for severity in severities]
        found = [finding for finding in self.findings if finding.severity in wanted]
        if found:
            more = f"\n(and {len(found) - 1} more: print the diagnosis)" if len(found) > 1 else ""
            kind = PrivacyError if found[0].severity == "critical" else ValueError
            raise kind(f"the training script has a mistake:\n{indent(str(found[0]), '  ')}{more}")


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
_MAX_DEPTH = 4


def is_opacus_optimizer(optimizer: Any) -> bool:
    """Returns whether it is a DPOptimizer of any kind."""
    return isinstance(optimizer, of_opacus("optimizers.DPOptimizer"))


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


def inner_module(model: nn.Module) -> nn.Module:
    """Returns the model without a wrapper that has no hooks (expanded weights, no_op); else the model itself."""
    wrapped = isinstance(model, of_opacus("grad_sample.AbstractGradSampleModule"))
    if wrapped and not isinstance(model, of_opacus("grad_sample.GradSampleHooks")):
        inner: nn.Module = model._module  # type: ignore[assignment]
        return inner
    return model


def is_ghost_loss_value(value: Any) -> bool:
    """Returns whether it is what that criterion returns."""
    return isinstance(
        value, of_opacus("utils.fast_gradient_clipping_utils.DPTensorFastGradientClipping")
    )


def _held(function: Any) -> Iterator[tuple[str, Any]]:
    """Yields what a callable carries: its closure, its object, its arguments."""
    if isinstance(function, MethodType):
        yield "self", function.__self__
        yield from _held(function.__func__)
    elif isinstance(function, FunctionType):
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            try:
                yield name, cell.cell_contents
            except ValueError:  # a variable that is not assigned yet
                continue
    elif isinstance(function, partial):
        yield from [("", function.func), *function.keywords.items()]
        yield from ((f"{place}", value) for place, value in enumerate(function.args))
    elif not isinstance(function, nn.Module):
        yield from getattr(function, "__dict__", {}).items()


def accounted(hook: Any, depth: int = 0) -> tuple[Any, float | None]:
    """Returns (accountant, sampling rate) of a step hook, (None, None) if no accountant can be found in it.

    Opacus' own hook is a closure over the two; a user's hook that calls it carries it in its own closure.
    """
    if isinstance(hook, (Accountant, *of_opacus("accountants.accountant.IAccountant"))):
        return hook, None
    if depth > _MAX_DEPTH or not callable(hook):
        return None, None
    held = dict(_held(hook))
    rate = held.get("sample_rate")
    for value in held.values():
        accountant, inner = accounted(value, depth + 1)
        if accountant is not None:
            return accountant, inner if rate is None else float(rate)
    return None, None


def underlying_loader(loader: Any) -> Any:
    """Returns the loader behind a BatchMemoryManager that was not entered."""
    return loader.data_loader if isinstance(loader, of_opacus(_SPLITS)) else loader


def is_split(loader: Any) -> bool:
    """Returns whether the loader is one that BatchMemoryManager made, or such a manager."""
    sampler = getattr(loader, "batch_sampler", None)
    return isinstance(sampler, of_opacus(_PARTS)) or isinstance(loader, of_opacus(_SPLITS))


def batch_sampler(loader: Any) -> Any:
    """Returns the batch sampler of a loader, without the splitting of BatchMemoryManager."""
    sampler = getattr(loader, "batch_sampler", None)
    while isinstance(sampler, of_opacus(_PARTS)):
        sampler = sampler.sampler
    return sampler


def poisson_rate(sampler: Any) -> float | None:
    """Returns the rate of Opacus' Poisson samplers, None for other samplers."""
    return float(sampler.sample_rate) if isinstance(sampler, of_opacus(*_POISSON)) else None


def bare_collate(collate: Any) -> Any:
    """Returns the collate function without DPDataLoader's wrapper, which would remember a synthetic batch."""
    wrapped = isinstance(collate, of_opacus("data_loader.CollateFnWithEmpty"))
    return collate.wrapped_collator_fn if wrapped else collate


class JointRows:
    """The rows of records over all parameters, as one answer.

    Args:
        rows: by parameter; those of another number of records do not count.
        size: number of records.
    """

    def __init__(self, rows: Mapping[str, Rows], size: int) -> None:
        self._rows = {name: made for name, made in rows.items() if len(made) == size}
        self.shape = (size,)
        self.tolerance = 10 * tolerance(rows)

    def norms(self) -> Tensor:
        """Returns the joint length for each record, (size,) float64."""
        squares = [made.norms().square() for made in self._rows.values()]
        return sum(squares, torch.zeros(self.shape, dtype=torch.float64)).sqrt()

    def gaps(self, other: JointRows) -> Tensor:
        """Returns how far other rows are for each record, (size,) float64."""
        gaps = torch.zeros(self.shape, dtype=torch.float64)
        for name, made in self._rows.items():
            others = other._rows.get(name)
            if others is not None:
                # PRIVACY: what was finite and is not any more has moved, however it compares
                # (test_rows_that_are_not_finite_any_more_have_moved)
                gap = made.gaps(others).nan_to_num(math.inf).where(made.norms().isfinite(), 0.0)
                gaps += gap.square()
        return gaps.sqrt()


def rows_of(block: Block) -> Rows:
    """Returns the rows of the first parameter of a block."""
    if not isinstance(block, FactoredBlock):
        return Rows(block.dense()[0].detach())
    # PRIVACY: copies: the next batch may be written over them
    # (test_records_that_meet_in_memory_that_is_used_again_are_found)
    left = block.backprops.detach() * block.scale
    return Rows(left, block.acts.detach().to(left.dtype, copy=True) if block.weight else None)


def movement(first: Pass, second: Pass, size: int) -> Tensor:
    """Returns how far each record's rows moved, relative to the largest joint row; (size,) float64."""
    before = JointRows(first.rows, size)
    largest = float(before.norms().nan_to_num(0.0, 0.0, 0.0).max())
    return before.gaps(JointRows(second.rows, size)) / max(largest, 1e-30)


def tolerance(rows: Mapping[str, Rows]) -> float:
    """Returns the relative difference of rows that rounding explains."""
    dtypes = {made.dtype for made in rows.values()}
    if dtypes & set(HALF):
        return 3e-2
    return 1e-5 if torch.float32 in dtypes else 1e-9


_MOST = 256  # rows of a probed batch: more would make the start of `fit` slow

_Key = tuple[int, str, int, tuple[object, ...]]
_known: WeakKeyDictionary[nn.Module, dict[_Key, Isolation]] = WeakKeyDictionary()


def rows_to_probe(script: Script) -> int | None:
    """Returns the number of rows of the batches of a script, as far as they are probed; None if it has no fixed one."""
    if not script.attached or not isinstance(script.source, PrivateLoader):
        return None
    slots = script.source.slots
    design = script.source.design
    most = script.source.physical_batch_size or design.batch_size
    return max(2, min(_MOST, most if slots is None else slots.block))


def remembered(
    model: nn.Module, device: torch.device, rows: int, probe: Callable[[], Isolation]
) -> Isolation:
    """Returns what is known of a model with these threads, device, rows and kernels; probes it once."""
    findings = _known.setdefault(model, {})
    # PRIVACY: other kernels, another finding (test_a_finding_is_of_the_kernels_that_were_looked_at)
    kernels = torch.are_deterministic_algorithms_enabled(), *switches()
    key = torch.get_num_threads(), str(device), rows, kernels
    if key not in findings:
        findings[key] = probe()
    return findings[key]


def note(script: Script, evidence: Evidence) -> None:
    """Lets the reports of the loader's optimizer quote what was found."""
    if evidence.isolation is not None and isinstance(script.source, PrivateLoader):
        script.source.isolation.checked = str(evidence.isolation)


_T = TypeVar("_T")


class NotScalarError(ValueError):
    """The loss did not return one number."""


@dataclass(frozen=True)
class Pass:
    """One forward and backward in training mode.

    Args:
        value: what the loss returned.
        totals: gradient of the loss by parameter, None for parameters that it does not reach; of a parameter with
            factored rows only what comes from outside of its layer.
        rows: per-sample gradients by parameter, of the parameters that have some.
        factored: parameters whose total is not that of their rows.
        norms: of the rows as ghost clipping sees them, None in other modes.
    """

    value: Any
    totals: Mapping[str, Tensor | None]
    rows: Mapping[str, Rows]
    factored: frozenset[str] = frozenset()
    norms: Tensor | None = None


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
        moved: how far the rows of the others moved, relative, with another record 0; empty where that is not known.
        mixed: with which other record 0 the rows of others moved.
        drift: how far rows moved, relative, after another batch in place of the same one, and after that one.
        buffers: names of buffers and frozen parameters that a training forward changed.
        losses: loss of the batch, of its double and of its triple, in evaluation mode.
        random_loss: whether other random numbers give another loss in evaluation mode.
        mixing: how far gradients of batches are from sums over records, relative, where rows could not be had.
        mean_rows: whether rows were scaled by the size of the batch.
        weight: what a batch multiplies the gradients of its records by (1/size for a mean, 1 for a sum).
        randomness: how far other random numbers move the gradient of the batch, relative.
        line: gradients of single records.
        refused: what could not be probed.
        isolation: what moves the bits of a row.
    """

    size: int = 0
    base: Pass | None = None
    moved: Tensor = field(default_factory=lambda: torch.empty(0))
    mixed: Mixed | None = None
    drift: tuple[float, float] | None = None
    buffers: list[str] = field(default_factory=list)
    losses: tuple[float, float, float] | None = None
    random_loss: bool = False
    mixing: float | None = None
    mean_rows: bool = False
    weight: float | None = None
    randomness: float = 0.0
    line: Line | None = None
    refused: list[Refused] = field(default_factory=list)
    isolation: Isolation | None = None

    @property
    def rows(self) -> Mapping[str, Rows]:
        """The per-sample gradients of the batch by parameter, if there are any."""
        return {} if self.base is None else self.base.rows

    @property
    def shows_rows(self) -> bool:
        """Whether rows were compared, with another record 0, that are not all zero."""
        moving = any(bool(made.norms().any()) for made in self.rows.values())
        return bool(self.moved.numel()) and moving

    def keep(self, outcome: _T | Refused) -> _T | None:
        """Returns an outcome; notes it and returns None if it is a refusal."""
        if isinstance(outcome, Refused):
            self.refused.append(outcome)
            return None
        return outcome


Check = Callable[[Script, Evidence], Iterator[Finding]]
