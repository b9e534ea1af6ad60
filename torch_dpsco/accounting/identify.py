"""Which design a loader draws by: only samplers that say so are believed.

Amplification by sampling is granted for the samplers of `torch_dpsco.sampling`, which carry their design. Everything
else is refused: a shuffled or fixed-size loader accounted as Poisson under-reports epsilon by more than 10 times.

Source: spec accounting.md section 6.
"""

from __future__ import annotations

from typing import Any

from torch_dpsco.accounting.designs import Design
from torch_dpsco.errors import UnknownSamplerError

__all__ = ["identify"]


def identify(loader: Any) -> Design:
    """Returns the design of a loader, of its batch sampler, or of a sampler itself.

    A sampler of torch_dpsco given as `sampler=` is not believed: the loader would join several draws into a batch.

    Raises:
        UnknownSamplerError: the sampler is not one of torch_dpsco.
    """
    # PRIVACY: (test_a_design_sampler_under_another_batch_sampler_is_refused)
    for source in (loader, getattr(loader, "batch_sampler", None)):
        design = getattr(source, "design", None)
        if isinstance(design, Design):
            return design
    names = [type(loader).__name__]
    parts = [getattr(loader, name, None) for name in ("batch_sampler", "sampler")]
    names += [type(part).__name__ for part in parts if part is not None]
    raise UnknownSamplerError(
        f"loader must draw by a sampler of torch_dpsco (got {' > '.join(names)}). Ways out: optimizer.loader(dataset) "
        f"draws Poisson batches; DataLoader(dataset, batch_sampler=PoissonSampler(...)) keeps your own loader; or "
        f"build the optimizer without n= and design=, which claims no amplification"
    )
