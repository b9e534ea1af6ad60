"""Opacus' interface: a script written for Opacus (1.6) moves over by changing what it imports.

    from torch_dpsco.integrations.opacus import BatchMemoryManager, PrivacyEngine

Keywords, batches per epoch, expected batch size, noise and clip are those of Opacus. But each step is charged before
its noise is drawn, a target is a limit, and what would be unsound raises and says what to write.

Errors are of Opacus' classes too: UnsupportedModuleError where a module is refused, ValueError where calls come in an
order, or objects in a combination, that is not covered.

Opacus has no word for a public number of records: it computes rate, divisor and number of steps from len(dataset),
which its add/remove accounting takes for secret. Here `n=` is such a number, for reference, and then epsilon is about
one record that is added or removed (add_remove). Without it len(dataset) counts as public, with a warning, and epsilon
is about one record that is replaced by an empty one (zero_out); the figure is the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from opacus.grad_sample import AbstractGradSampleModule
from opacus.optimizers import DPOptimizer as _OpacusOptimizer
from opacus.validators import ModuleValidator
from opacus.validators.errors import UnsupportedModuleError
from torch import nn
from torch.optim.optimizer import Optimizer
from torch.utils.data import DataLoader

from torch_dpsco import _validate as check
from torch_dpsco._validate import typed
from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.accounting.budgets import Budget
from torch_dpsco.accounting.designs import Poisson, Shuffled
from torch_dpsco.accounting.events import ADD_REMOVE, ZERO_OUT
from torch_dpsco.algorithms.heavy_plan import ClippedPlan
from torch_dpsco.algorithms.heavy_tailed import ClippedSGD
from torch_dpsco.diagnosis.script import grad_sample_hooks
from torch_dpsco.errors import AdjacencyError, PrivacyError, SequenceError, warn
from torch_dpsco.private_loop import attach_sound, require_replaceable
from torch_dpsco.problem import Phase
from torch_dpsco.rows.attach import require_supported
from torch_dpsco.rules import Groups, State, TorchRule, trained
from torch_dpsco.sampling import PrivateLoader
from torch_dpsco.step.checks import number_of_records, require_same_parameters
from torch_dpsco.step.run import CommonOptimizer

# ghost clipping saves memory, and so do the two factors of rows that "auto" keeps of common layers, in one backward
_ROWS = {"hooks": "auto", "ew": "auto", "ghost": "auto", "functorch": "dense"}


_SIZE_READ = (
    "n is not given: the number of records was read off the data set and counts as public, so that"
    " epsilon is about a record replaced by an empty one; give n=, a public number, for one added or"
    " removed"
)
_PASSES = (
    "poisson_sampling=False makes passes over shuffled records, which are charged as such: nothing is"
    " amplified, and epsilon may be many times what Opacus says, which charges Poisson batches;"
    " dp.make_private(..., sampling='allocated') makes secret passes, at about their price"
)


class DPOptimizer(ClippedSGD):
    """A torch optimizer on private means, or sums, with the attributes of Opacus' class of this name.

    Args:
        optimizer: makes the updates.
        plan: from `DPOptimizer.plan`, which is that of `ClippedSGD`.
        loss_reduction: "mean"; or "sum", where updates are made by the sum, which is batch_size times the mean.
        accountant: ledger to charge.
    """

    # PRIVACY: schedulers of noise or clip would change what was charged (test_schedulers_of_noise_and_clip_are_refused)
    _fixed = ClippedSGD._fixed | {"noise_multiplier", "max_grad_norm", "expected_batch_size"}

    def __init__(
        self,
        optimizer: Optimizer,
        plan: ClippedPlan,
        *,
        loss_reduction: str = "mean",
        accountant: Accountant | None = None,
    ) -> None:
        factor = (
            plan.batch_size
            if check.choice(("mean", "sum"), loss_reduction=loss_reduction) == "sum"
            else 1
        )
        super().__init__(
            optimizer.param_groups, plan, rule=_Scaled(optimizer, factor), accountant=accountant
        )
        self.noise_multiplier = plan.noise_multiplier
        self.max_grad_norm = plan.clip
        self.expected_batch_size = plan.batch_size
        self.original_optimizer = optimizer


class OrderError(SequenceError, ValueError):
    """A `SequenceError` of an engine, where Opacus' engine raises ValueError."""


@contextmanager
def _refusals() -> Iterator[None]:
    """Gives errors about a module, or about what goes with it, the classes that Opacus' engine raises."""
    try:
        yield
    except (SequenceError, ValueError) as error:
        kind = OrderError if isinstance(error, SequenceError) else UnsupportedModuleError
        raise kind(str(error)) from error


class PrivacyEngine:
    """Makes a model, a torch optimizer and a loader private, by Opacus' keywords; see the module's docstring.

    Args:
        accountant: "prv" or "rdp", one ledger here: tight numerical accounting, and Renyi accounting where that cannot
            be; "gdp", a limit that may lie below the truth, is refused. Or an `Accountant`, as with a ledger file.
        secure_mode: whether noise is drawn in integers on a public grid ("exact"). Bits of noise and batches come from
            a cryptographic stream in any case.

    Example:
        >>> import torch, torch_dpsco as dp
        >>> data = torch.utils.data.TensorDataset(torch.randn(64, 3), torch.ones(64, 1))
        >>> model, engine = torch.nn.Linear(3, 1), PrivacyEngine()
        >>> model, optimizer, loader = engine.make_private(
        ...     module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), n=64, noise_multiplier=1.0,
        ...     data_loader=torch.utils.data.DataLoader(data, 16, shuffle=True), max_grad_norm=1.0)
        >>> for x, y in loader:
        ...     optimizer.zero_grad()
        ...     torch.nn.functional.mse_loss(model(x), y).backward()
        ...     optimizer.step()
        >>> optimizer.expected_batch_size, round(engine.get_epsilon(1e-3), 2)
        (16, 2.51)
    """

    @typed
    def __init__(
        self, *, accountant: str | Accountant = "prv", secure_mode: bool = False
    ) -> None:
        self.accountant: Accountant | None = None  # made by the first run
        if isinstance(accountant, Accountant):
            self.accountant = accountant
        elif accountant == "gdp":
            raise PrivacyError(
                "accountant must be 'prv' or 'rdp' (got 'gdp', whose central limit may lie below"
                " the truth)"
            )
        else:
            check.choice(("prv", "rdp"), accountant=accountant)
        self.secure_mode = secure_mode
        self.plan: ClippedPlan | None = None  # of the newest run; it prints

    def _charged(self) -> Accountant:
        if self.accountant is None:
            raise OrderError("make_private must be called first: it makes the accountant")
        return self.accountant

    def _ledger(self, plan: ClippedPlan) -> Accountant:
        if self.accountant is None:
            self.accountant = plan.ledger()
        elif plan.budget is not None and self.accountant.budget != plan.budget:
            # PRIVACY: the noise of a whole target on top of other runs (test_a_target_is_that_of_all_runs_of_an_engine)
            raise PrivacyError(
                "this engine's accountant has another budget, or none, and all its runs count"
                " together: make a new PrivacyEngine(), or"
                " PrivacyEngine(accountant=Accountant(budget)) with the target of all runs"
            )
        return self.accountant

    @typed
    def get_epsilon(self, delta: float) -> float:
        """Returns the epsilon spent so far by all that this engine made private; see the module's docstring."""
        return self._charged().get_epsilon(delta)

    @typed
    def make_private(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        criterion: Callable[..., Any] | None = None,
        data_loader: DataLoader[Any],
        noise_multiplier: float,
        max_grad_norm: float | Sequence[float],
        batch_first: bool = True,
        loss_reduction: str = "mean",
        poisson_sampling: bool = True,
        clipping: str = "flat",
        noise_generator: Any = None,
        grad_sample_mode: str = "hooks",
        wrap_model: bool = True,
        rand_on_empty: bool = False,
        n: int | None = None,
    ) -> Any:
        """Returns (module, optimizer, loader), or (module, optimizer, criterion, loader) in mode "ghost".

        Args:
            module: in training mode; is attached in place (`dp.attach`), and keeps its class and its names.
            optimizer: any torch optimizer but LBFGS, on the module's trainable parameters.
            criterion: the training loss; probed, with the model, for records that reach each other.
            data_loader: with a fixed batch_size; its data set, workers and collate function are kept.
            noise_multiplier: noise std on the sum over max_grad_norm.
            max_grad_norm: clip on the norm of a record's gradient over all parameters.
            batch_first: see `attach`.
            loss_reduction: see `DPOptimizer`.
            poisson_sampling: False makes passes over shuffled records, charged as such: nothing is amplified. Opacus
                charges them like Poisson batches, which may lie many times below the truth.
            clipping: must be "flat".
            noise_generator: must be None.
            grad_sample_mode: "hooks", "ew", "functorch", or "ghost", which here makes norms of factors in one backward.
            wrap_model: whether `module._module` is to be known, which is the module itself.
            rand_on_empty: must be False; empty batches are steps of noise.
            n: PUBLIC number of records, near the true one; see the module's docstring. Opacus has no such keyword.

        Raises:
            PrivacyError: a choice would be unsound; says what to write instead.
            UnsupportedModuleError: the module has no per-sample gradients, or is in evaluation mode.
            OrderError: module and optimizer do not go together, or are private already; a ValueError too.
        """
        _require_sound(
            grad_sample_mode,
            clipping,
            max_grad_norm,
            noise_generator,
            rand_on_empty,
        )
        form = {
            "batch_first": batch_first,
            "loss_reduction": loss_reduction,
            "wrap_model": wrap_model,
            "poisson": poisson_sampling,
        }
        noise = {"noise_multiplier": noise_multiplier}
        return self._make(
            module,
            optimizer,
            criterion,
            data_loader,
            n,
            max_grad_norm,
            noise,
            grad_sample_mode,
            form,
        )

    @typed
    def make_private_with_epsilon(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        criterion: Callable[..., Any] | None = None,
        data_loader: DataLoader[Any],
        target_epsilon: float,
        target_delta: float,
        epochs: float,
        max_grad_norm: float | Sequence[float],
        batch_first: bool = True,
        loss_reduction: str = "mean",
        poisson_sampling: bool = True,
        clipping: str = "flat",
        noise_generator: Any = None,
        grad_sample_mode: str = "hooks",
        wrap_model: bool = True,
        n: int | None = None,
    ) -> Any:
        """Returns what `make_private` does, with the least noise for so many epochs; a step past them raises.

        Args:
            module: as there, as all that follow.
            optimizer: the torch optimizer.
            criterion: the training loss.
            data_loader: with a fixed batch_size.
            target_epsilon: what all steps together may spend; the ledger refuses more.
            target_delta: in (0, 1).
            epochs: passes over the data on average.
            max_grad_norm: clip.
            batch_first: see `attach`.
            loss_reduction: "mean" or "sum".
            poisson_sampling: as there.
            clipping: must be "flat".
            noise_generator: must be None.
            grad_sample_mode: as in `make_private`.
            wrap_model: as there.
            n: PUBLIC number of records.

        Raises:
            PrivacyError: a choice would be unsound, or this engine has runs without this target.
        """
        _require_sound(grad_sample_mode, clipping, max_grad_norm, noise_generator)
        form = {
            "batch_first": batch_first,
            "loss_reduction": loss_reduction,
            "wrap_model": wrap_model,
            "poisson": poisson_sampling,
        }
        adjacency = ZERO_OUT if n is None else ADD_REMOVE
        draws = _design_of(data_loader, n, poisson=poisson_sampling)[1]
        steps = math.ceil(check.positive(epochs=epochs) * draws)
        epsilon = check.positive(target_epsilon=target_epsilon)
        delta = check.open_interval(0.0, 1.0, target_delta=target_delta)
        target = {"budget": Budget(epsilon, delta, adjacency=adjacency), "steps": steps}
        return self._make(
            module,
            optimizer,
            criterion,
            data_loader,
            n,
            max_grad_norm,
            target,
            grad_sample_mode,
            form,
        )

    def _make(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        criterion: Callable[..., Any] | None,
        loader: DataLoader[Any],
        n: int | None,
        clip: Any,
        noise: dict[str, Any],
        mode: str,
        form: dict[str, Any],
    ) -> Any:
        with _refusals():
            _require_plain(module, optimizer, loader)
            ModuleValidator.validate(module, strict=True)
        wrapped = form.pop("wrap_model")
        design, draws = _design_of(loader, n, poisson=form.pop("poisson"))
        self.plan = DPOptimizer.plan(
            **noise,
            sampling=design,
            clip=clip,
            lr=float(optimizer.param_groups[0]["lr"]),
            average="last",
            adjacency=ZERO_OUT if n is None else ADD_REMOVE,
            secure="exact" if self.secure_mode else None,
        )
        private = DPOptimizer(
            optimizer,
            self.plan,
            loss_reduction=form["loss_reduction"],
            accountant=self._ledger(self.plan),
        )
        batches = private.loader(
            loader.dataset,
            steps=draws,
            collate_fn=loader.collate_fn,
            num_workers=loader.num_workers,
            pin_memory=loader.pin_memory,
        )
        if mode == "ghost":
            criterion = criterion or nn.CrossEntropyLoss()
        with _refusals():
            attach_sound(module, criterion, batches, rows=_ROWS[mode], **form)
        if wrapped:
            module.__dict__["_module"] = module  # an attribute, no part of it
        if n is None:
            warn(_SIZE_READ, stacklevel=4)
        if isinstance(design, Shuffled):
            warn(_PASSES, stacklevel=4)
        if mode != "ghost":
            return module, private, batches
        return module, private, criterion, batches

    @typed
    def is_compatible(
        self, *, module: nn.Module, optimizer: Any = None, data_loader: Any = None
    ) -> bool:
        """Returns whether `validate` passes."""
        try:
            self.validate(module=module)
        except UnsupportedModuleError:
            return False
        return True

    @typed
    def validate(
        self, *, module: nn.Module, optimizer: Any = None, data_loader: Any = None
    ) -> None:
        """Raises Opacus' UnsupportedModuleError for a module without per-sample gradients, or in evaluation mode.

        The others are not looked at, as in Opacus.
        """
        ModuleValidator.validate(module, strict=True)
        first = all(getattr(layer, "batch_first", True) for layer in module.modules())
        with _refusals():
            require_supported(module, batch_first=first)

    @classmethod
    @typed
    def get_compatible_module(cls, module: nn.Module) -> nn.Module:
        """Returns a copy of a module with layers replaced by near ones that have per-sample gradients."""
        fixed: nn.Module = ModuleValidator.fix(module)
        cls().validate(module=fixed)
        return fixed

    @typed
    def save_checkpoint(
        self,
        *,
        path: Any,
        module: nn.Module,
        optimizer: DPOptimizer | None = None,
        checkpoint_dict: Mapping[str, Any] | None = None,
    ) -> None:
        """Saves module, ledger and optimizer, whose state holds mechanism and ledger, too; all is public."""
        _require_file(path)
        state = {
            **(checkpoint_dict or {}),
            "module_state_dict": module.state_dict(),
            "privacy_accountant_state_dict": self._charged().state_dict(),
        }
        if optimizer is not None:
            state["optimizer_state_dict"] = optimizer.state_dict()
        torch.save(state, path)

    @typed
    def load_checkpoint(
        self, *, path: Any, module: nn.Module, optimizer: DPOptimizer | None = None
    ) -> dict[str, Any]:
        """Restores what `save_checkpoint` saved, and returns it; of two states of a ledger the later one stays."""
        _require_file(path)
        state: dict[str, Any] = torch.load(path, weights_only=True)
        if optimizer is not None and "optimizer_state_dict" not in state:
            raise ValueError(
                "optimizer must be None for a checkpoint that was saved without one"
            )
        self._charged().load_state_dict(state["privacy_accountant_state_dict"])
        if optimizer is not None:
            optimizer.load_state_dict(state["optimizer_state_dict"])
        module.load_state_dict(state["module_state_dict"])
        return state


def _require_file(path: Any) -> None:
    if not (check.is_path(path) or hasattr(path, "seek")):
        raise ValueError(f"path must be a path, or a binary file (got {check.shown(path)})")


class BatchMemoryManager:
    """Delivers the draws of a private loader in parts of at most so many rows, of which `step` makes one release.

    Args:
        data_loader: that an engine made.
        max_physical_batch_size: most rows of a part.
        optimizer: of the same engine.
    """

    @typed
    def __init__(
        self, *, data_loader: PrivateLoader, max_physical_batch_size: int, optimizer: DPOptimizer
    ) -> None:
        most = check.positive_count(max_physical_batch_size=max_physical_batch_size)
        self._parts = data_loader.in_parts(most)

    def __enter__(self) -> PrivateLoader:
        return self._parts

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Ends nothing."""


class _Scaled(TorchRule):
    """A torch optimizer on a multiple of the private mean."""

    def __init__(self, optimizer: Optimizer, factor: int) -> None:
        super().__init__(optimizer)
        self.factor = factor

    def update(self, groups: Groups, state: State, k: int, phase: Phase) -> None:
        for p in (
            p
            for group in groups
            for p in trained(group)
            if p.grad is not None and self.factor != 1
        ):
            p.grad.mul_(self.factor)  # type: ignore[union-attr]
        super().update(groups, state, k, phase)

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "factor": self.factor}


def _require_sound(
    mode: str,
    clipping: str,
    norm: Any,
    generator: Any,
    rand_on_empty: bool = False,
) -> None:
    """Raises for choices that would be unsound, or that have no counterpart; says what to write."""
    check.choice(_ROWS, grad_sample_mode=mode)
    check.choice(("flat", "per_layer", "adaptive"), clipping=clipping)
    if clipping == "adaptive":
        raise PrivacyError(
            "clipping must be 'flat' (got 'adaptive', which counts clipped rows):"
            " dp.ClippedSGD.plan(clip=dp.Pilot()) chooses a clip privately, and dp.HolderSGD"
            " takes that of the loss"
        )
    if clipping == "per_layer" or not isinstance(norm, (int, float)):
        raise ValueError(
            f"max_grad_norm must be one number, for clipping='flat' (got {check.shown(norm)}"
            f" for {clipping!r}): of the clips of layers take math.hypot(*norms), which has the same"
            " noise and epsilon"
        )
    check.open_interval(0.0, 1e100, max_grad_norm=norm)
    if generator is not None:
        # PRIVACY: (test_noise_that_can_be_repeated_is_refused)
        raise PrivacyError(
            f"noise_generator must be None (got {check.shown(generator)}): who knows its seed"
            " can subtract the noise; for tests, dp.ClippedSGD(..., generator=)"
        )
    if rand_on_empty:
        # PRIVACY: the sum moves by two clips (test_made_up_records_are_refused)
        raise PrivacyError(
            "rand_on_empty must be False: a record takes the place of a made-up one, where"
            " Opacus charges for its own gradient only; here a step on an empty batch is noise"
            " only"
        )


def _require_plain(module: nn.Module, optimizer: Optimizer, loader: DataLoader[Any]) -> None:
    """Raises for what is private already, and for batches whose sampler would be replaced."""
    wrapped = (
        isinstance(module, AbstractGradSampleModule) or grad_sample_hooks(module) is not None
    )
    if wrapped or isinstance(optimizer, (CommonOptimizer, _OpacusOptimizer)):
        raise SequenceError(
            "module and optimizer must be plain (got private ones): make them anew, or take"
            " dp.detach(module) and optimizer.original_optimizer"
        )
    try:
        require_same_parameters(module, optimizer)
    except SequenceError as error:
        found = "Module parameters are different than optimizer Parameters"  # in Opacus' words
        raise SequenceError(f"{found}: {error}") from error
    require_replaceable(loader)


def _design_of(
    loader: DataLoader[Any], n: int | None, *, poisson: bool
) -> tuple[Poisson | Shuffled, int]:
    """Returns Poisson batches of Opacus' expected size, or shuffled ones, and the number of batches of an epoch."""
    records = number_of_records(loader.dataset) if n is None else check.positive_count(n=n)
    size = loader.batch_size or 1
    if not poisson:
        if n is not None:
            # PRIVACY: a record less would shift all later batches (test_passes_are_not_for_records_that_are_removed)
            raise AdjacencyError(
                "poisson_sampling must be True with n=, for records that are added or removed;"
                " dp.make_private(..., sampling='allocated') makes passes for those"
            )
        # PRIVACY: of passes, which cost more than Poisson batches (test_passes_are_charged_as_passes)
        shuffled = Shuffled(min(size, records), records)
        return shuffled, shuffled.batches
    draws = records // size if loader.drop_last else math.ceil(records / size)
    if draws < 1:
        raise ValueError(
            f"batch_size must be at most the number of records, for drop_last (got {size})"
        )
    return Poisson(records // draws, records), draws
