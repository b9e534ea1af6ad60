"""What the keywords of Opacus may say here: what is mapped, and what would be unsound."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from opacus.grad_sample import AbstractGradSampleModule
from opacus.optimizers import DPOptimizer
from torch import nn
from torch.optim.optimizer import Optimizer
from torch.utils.data import DataLoader

from torch_dpsco import _validate as check
from torch_dpsco.accounting.designs import Poisson
from torch_dpsco.doctor.script import grad_sample_hooks
from torch_dpsco.errors import PrivacyError, SequenceError, UnknownSamplerError
from torch_dpsco.make_private import require_replaceable
from torch_dpsco.step.checks import number_of_records, require_same_parameters
from torch_dpsco.step.run import CommonOptimizer

# ghost clipping saves memory, and so do the two factors of rows that "auto" keeps of common layers, in one backward
ROWS = {"hooks": "auto", "ew": "auto", "ghost": "auto", "functorch": "dense"}


@dataclass(frozen=True)
class Form:
    """How rows are computed, and what is returned."""

    grad_sample_mode: str
    batch_first: bool
    loss_reduction: str
    wrap_model: bool

    def require_sound(
        self,
        poisson_sampling: bool,
        clipping: str,
        norm: Any,
        generator: Any,
        rand_on_empty: bool = False,
    ) -> None:
        """Raises for choices that would be unsound, or that have no counterpart; says what to write."""
        check.choice(ROWS, grad_sample_mode=self.grad_sample_mode)
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
                f" for {clipping!r}): math.hypot(*norms) takes the noise, and the epsilon, of clips"
                " for each layer"
            )
        check.open_interval(0.0, 1e100, max_grad_norm=norm)
        if not poisson_sampling:
            # PRIVACY: (test_a_loader_that_is_not_poisson_is_refused)
            raise UnknownSamplerError(
                "poisson_sampling must be True: Opacus charges any other loader as if it were"
                " Poisson, which may lie many times below the truth; dp.make_private(...,"
                " sampling='assigned') makes passes"
            )
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


def require_plain(module: nn.Module, optimizer: Optimizer, loader: DataLoader[Any]) -> None:
    """Raises for what is private already, and for batches whose sampler would be replaced."""
    wrapped = (
        isinstance(module, AbstractGradSampleModule) or grad_sample_hooks(module) is not None
    )
    if wrapped or isinstance(optimizer, (CommonOptimizer, DPOptimizer)):
        raise SequenceError(
            "module and optimizer must be plain (got private ones): make them anew, or take"
            " dp.detach(module) and optimizer.original_optimizer"
        )
    require_same_parameters(module, optimizer)
    require_replaceable(loader)


def design_of(loader: DataLoader[Any], n: int | None) -> tuple[Poisson, int]:
    """Returns Poisson batches of Opacus' expected size, and the number of batches of an epoch."""
    records = number_of_records(loader.dataset) if n is None else check.positive_count(n=n)
    size = loader.batch_size or 1
    draws = records // size if loader.drop_last else math.ceil(records / size)
    if draws < 1:
        raise ValueError(
            f"batch_size must be at most the number of records, for drop_last (got {size})"
        )
    return Poisson(records // draws, records), draws
