"""Which design a loader draws by: only samplers with a known law are accepted.

Amplification by sampling is granted for the samplers of `torch_dpsco.sampling`, which carry their design, and, where no
draw log is needed, for Opacus' Poisson sampler. A shuffled or sequential loader is known too, but claims nothing: each
of its steps is an unsampled one. Everything else is refused: a shuffled or fixed-size loader accounted as Poisson
under-reports epsilon by more than 10 times.

What a step of an Opacus optimizer costs follows from the design. Facts of Opacus 1.6 that give the accountant's
interface to it its shape: `create_accountant` calls the class without arguments. Noise is calibrated by assigning
`accountant.history` in a loop. The hook runs after noise is added and before the parameters move, so that an exception
in it prevents the release. Opacus multiplies the rate by the number of accumulated batches; that is wrong (a record may
be in several of them), so that accumulated batches are refused.

Source: docs/proofs/accounting.md#sampling-designs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np

from torch_dpsco import _validate as check
from torch_dpsco._loaded import of_opacus, of_torch
from torch_dpsco.accounting.designs import (
    BaseEvent,
    Design,
    Draw,
    Poisson,
    Shuffled,
    poisson_event,
)
from torch_dpsco.accounting.events import (
    REPLACE_ONE,
    ZERO_OUT,
    Event,
    PoissonGaussian,
    clipped_gaussian,
)
from torch_dpsco.errors import SequenceError, UnknownSamplerError

_UNIFORMS = 2**24  # values of a float32 from torch.rand


@dataclass(frozen=True)
class RatePoisson(Design):
    """Poisson sampling by a rate instead of an expected size, as in Opacus' sampler.

    Args:
        sample_rate: probability with which each record is in each batch, in [0, 1].
        n: records of the loader's data set.

    Example:
        >>> RatePoisson(sample_rate=0.25, n=10).batch_size
        3
    """

    sample_rate: float
    n: int

    def __post_init__(self) -> None:
        check.fields(self, n=check.positive_count, sample_rate=partial(check.between, 0.0, 1.0))

    @property
    def batch_size(self) -> int:  # type: ignore[override]
        """Expected size of a batch, rounded up."""
        return max(1, math.ceil(self.sample_rate * self.n))

    @property
    def batches(self) -> int:
        """Draws that touch each record once on average: ceil(1 / rate); n if the rate is 0."""
        # not n / batch_size: the drawn rate is rounded up, so that batches of 1 would count as 2
        # (test_an_epoch_of_a_recognized_loader_has_no_step_too_few)
        return math.ceil(1.0 / self.sample_rate - 1e-9) if self.sample_rate else self.n

    def draw_event(self, base: BaseEvent, draw: Draw) -> Event:
        """Returns the event of one draw."""
        return poisson_event(base, self.sample_rate)


def identify(loader: Any) -> Design:
    """Returns the design of a loader, of its batch sampler, or of a sampler itself, if it is one of torch_dpsco.

    The optimizers of torch_dpsco ask here: they need the draw log that only these samplers keep. A sampler of
    torch_dpsco given as `sampler=` is not believed: the loader would join several draws into a batch.

    Raises:
        UnknownSamplerError: the sampler is not one of torch_dpsco.
    """
    design = _own_design(loader)
    if design is None:
        raise UnknownSamplerError(
            f"loader must draw by a sampler of torch_dpsco (got {_names(loader)}). Ways out:"
            " optimizer.loader(dataset) draws Poisson batches; DataLoader(dataset,"
            " batch_sampler=PoissonSampler(...)) keeps your own loader; or build the optimizer"
            " without n= and design=, which claims no amplification"
        )
    return design


def recognize(loader: Any) -> Design:
    """Returns the design of a loader whose law of drawing is known, foreign ones included.

    Known besides the samplers of torch_dpsco, under a plain DataLoader or Opacus' own: Opacus' Poisson sampler (also
    behind its BatchMemoryManager), and torch's shuffled or sequential batches without replacement. The latter give
    `Shuffled`, in the sense that each record is in one batch of each pass; no amplification is claimed for them.

    Raises:
        UnknownSamplerError: the law is not known, or not one that any accounting here covers; names the ways out.
    """
    design = _own_design(loader)
    # a subclass that iterates in its own way may drop, repeat or join batches
    plain = of_torch("utils.data.DataLoader")
    if (
        design is None
        and plain is not None
        and isinstance(loader, plain)
        and type(loader).__iter__ is plain.__iter__
    ):
        design = _foreign_design(loader.batch_sampler)
    if design is None:
        raise UnknownSamplerError(
            f"loader must draw in a known way (got {_names(loader)}). Ways out: draw Poisson"
            " batches, by make_private(..., poisson_sampling=True) or DataLoader(dataset,"
            " batch_sampler=PoissonSampler(...)); declare the events yourself by"
            " accountant.record(event) instead of the hook; or claim no amplification with"
            " DataLoader(dataset, batch_size=..., shuffle=True), whose steps count as unsampled"
        )
    return design


def _own_design(loader: Any) -> Design | None:
    # PRIVACY: (test_a_design_sampler_under_another_batch_sampler_is_refused)
    for source in (loader, getattr(loader, "batch_sampler", None)):
        design = getattr(source, "design", None)
        if isinstance(design, Design):
            return design
    return None


def _foreign_design(sampler: Any) -> Design | None:
    # physical parts of the draws of another sampler
    if type(sampler) in of_opacus("utils.batch_memory_manager.BatchSplittingSampler"):
        sampler = sampler.sampler
        if isinstance(getattr(sampler, "design", None), Design):
            return _own_design(sampler)
    # exact types: a subclass may draw in another way (test_a_subclass_of_a_known_sampler_is_refused)
    if type(sampler) in of_opacus("utils.uniform_sampler.UniformWithReplacementSampler"):
        return RatePoisson(_drawn_rate(sampler.sample_rate), sampler.num_samples)
    if type(sampler) in of_opacus(
        "utils.uniform_sampler.DistributedUniformWithReplacementSampler"
    ):
        raise UnknownSamplerError(
            "loader must draw in one process (got DistributedUniformWithReplacementSampler, which"
            " leaves empty batches out, so that the number of steps tells about the data); use a"
            " world of size 1"
        )
    if type(sampler) is of_torch("utils.data.BatchSampler"):
        return _pass_design(sampler)
    return None


def _drawn_rate(rate: float) -> float:
    """Returns the rate with which torch.rand(n) < rate selects, rounded up.

    torch.rand has 2^24 values in float32, and the rate itself is compared in float32: P(U < q) = ceil(q 2^24) 2^-24.
    """
    rate = check.between(0.0, 1.0, sample_rate=rate)
    # PRIVACY: rounding must only enlarge the cost (test_opacus_rate_is_the_one_that_its_sampler_draws_with)
    return min(1.0, math.ceil(max(rate, float(np.float32(rate))) * _UNIFORMS) / _UNIFORMS)


def _pass_design(sampler: Any) -> Design | None:
    """Returns the design of batches cut from one pass without replacement."""
    inner = sampler.sampler
    batch_size = sampler.batch_size
    if type(inner) is of_torch("utils.data.SequentialSampler"):
        n = len(inner)
    elif type(inner) is of_torch("utils.data.RandomSampler"):
        n = len(inner.data_source)
        if (
            inner.replacement or inner.num_samples != n
        ):  # another number joins parts of two permutations
            return None
    else:
        return None
    return Shuffled(min(batch_size, n), n) if n else None


def _names(loader: Any) -> str:
    parts = [getattr(loader, name, None) for name in ("batch_sampler", "sampler")]
    return " > ".join(
        [type(loader).__name__, *(type(part).__name__ for part in parts if part is not None)]
    )


_poisson = lru_cache(maxsize=64)(PoissonGaussian)


def opacus_step(design: Design | None, noise: float, rate: float, batches: int = 1) -> Event:
    """Returns the event of a step that an Opacus optimizer makes.

    Args:
        design: of the loader that was seen; None takes Opacus' word for the sampling.
        noise: noise std on the sum over the clip norm, >= 0.
        rate: Poisson rate that Opacus says, in [0, 1].
        batches: accumulated.

    Raises:
        SequenceError: several batches.
    """
    rate = check.between(0.0, 1.0, sample_rate=rate)
    if check.positive_count(accumulated_iterations=batches) > 1:
        # PRIVACY: a record may be in several of them (test_accumulated_batches_are_refused)
        raise SequenceError(
            f"accumulated batches must be 1 (got {batches}): a record could be in two of them; split one large batch"
            " by BatchMemoryManager"
        )
    if design is None:
        # the same plain numbers are checked once; a tensor could change its value
        return _poisson(noise, rate) if type(noise) is float else PoissonGaussian(noise, rate)
    if isinstance(design, (Poisson, RatePoisson)):
        # PRIVACY: the loader knows its rate better (test_a_bound_loader_corrects_a_smaller_rate)
        return PoissonGaussian(noise, max(rate, design.sample_rate))
    base = clipped_gaussian(noise)
    if design.positional or design.one_pass:
        # PRIVACY: one pass costs one Gaussian, but where passes begin cannot be seen from here, so that each step
        # counts (test_a_bound_shuffled_loader_is_never_accounted_as_poisson)
        return base.only(ZERO_OUT, REPLACE_ONE)
    return design.draw_event(base, Draw(design.batch_size))
