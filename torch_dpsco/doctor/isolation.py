"""Whether the bits of a record's row depend on how many rows a batch has, on its place among them, and on the others.

The guarantee assumes that for batches of ONE size a row is computed from its own record alone (docs/guarantees.md).
Here that is looked at: made-up records, the model's own weights, threads and device as they are. It is no proof.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from torch_dpsco.doctor.findings import Finding
from torch_dpsco.gradbatch.precision import switches
from torch_dpsco.sampling import PrivateLoader

if TYPE_CHECKING:
    from torch_dpsco.doctor.evidence import Evidence
    from torch_dpsco.doctor.script import Script

_MOST = 256  # rows of a probed batch: more would make the start of `fit` slow
_NO_ROUNDING = 1e-3
_SIZES = (2, 15, 16)  # where libraries change kernels

_Key = tuple[int, str, int, tuple[object, ...]]
_known: WeakKeyDictionary[nn.Module, dict[_Key, Isolation]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Isolation:
    """What moves the bits of a row of a model; None where it could not be seen.

    Args:
        rows: of the batch of fixed size that was looked at.
        size: another number of rows does.
        place: another place in the batch does.
        company: how far other records beside it do, in a batch of the same size, relative; 0.0 for no bit.
    """

    rows: int
    size: bool | None = None
    place: bool | None = None
    company: float | None = None

    def __str__(self) -> str:
        if self.company is None:
            return "it could not be checked on made-up records, since the model is random"
        verdict = "does NOT hold" if self.company else "holds"
        others = [text for seen, text in ((self.size, "the number of rows"), (self.place, "their place")) if seen]
        moved = f"; bits depend on {' and '.join(others)}" if others else ""
        return f"it {verdict} for made-up records in batches of {self.rows} rows{moved}"


def rows_to_probe(script: Script) -> int | None:
    """Returns the number of rows of the batches of a script, as far as they are probed; None if it has no fixed one."""
    if not script.attached or not isinstance(script.source, PrivateLoader):
        return None
    slots, design = script.source.slots, script.source.design
    most = script.source.physical_batch_size or design.batch_size
    return max(2, min(_MOST, most if slots is None else slots.block))


def remembered(model: nn.Module, device: torch.device, rows: int, probe: Callable[[], Isolation]) -> Isolation:
    """Returns what is known of a model with these threads, device, rows and kernels; probes it once."""
    findings = _known.setdefault(model, {})
    # PRIVACY: other kernels, another finding (test_a_finding_is_of_the_kernels_that_were_looked_at)
    kernels = torch.are_deterministic_algorithms_enabled(), *switches()
    key = torch.get_num_threads(), str(device), rows, kernels
    if key not in findings:
        findings[key] = probe()
    return findings[key]


def look(row: Callable[[list[int], int, bool], Tensor], pool: int, rows: int) -> Isolation:
    """Compares bits of the row of one record.

    Args:
        row: row(records, place, other_randomness) -> the row at that place of a batch of records of the pool.
        pool: records there are, >= 4; the first is the one that is looked at.
        rows: of the batches.
    """

    def filled(size: int, place: int, first: int = 1) -> list[int]:
        own = range(first, first + (pool - 1) // 2)
        batch = [own[k % len(own)] for k in range(size)]
        batch[place] = 0
        return batch

    base = row(filled(rows, 0), 0, False)
    if not torch.equal(base, row(filled(rows, 0), 0, True)):
        return Isolation(rows)
    places = {place for place in (1, rows // 2, rows - 1) if 0 < place < rows}
    return Isolation(
        rows,
        size=any(not torch.equal(base, row(filled(size, 0), 0, False)) for size in _SIZES if size != rows),
        place=any(not torch.equal(base, row(filled(rows, place), place, False)) for place in sorted(places)),
        company=_gap(base, row(filled(rows, 0, 1 + (pool - 1) // 2), 0, False)),
    )


def _gap(first: Tensor, second: Tensor) -> float:
    if torch.equal(first, second):
        return 0.0
    return float(torch.linalg.vector_norm(first - second) / torch.linalg.vector_norm(first).clamp(min=1e-30))


def note(script: Script, evidence: Evidence) -> None:
    """Lets the reports of the loader's optimizer quote what was found."""
    if evidence.isolation is not None and isinstance(script.source, PrivateLoader):
        script.source.isolation.checked = str(evidence.isolation)


def isolated_rows(script: Script, evidence: Evidence) -> Iterator[Finding]:
    """Rows must depend on their own record alone, to the last bit, for a kink makes of a bit what it likes."""
    found = evidence.isolation
    if found is None:
        return
    if found.company and found.company < _NO_ROUNDING:  # more is coupling, which has a finding of its own
        yield Finding(
            "warning",
            "rows-not-isolated",
            f"in batches of {found.rows} rows the last bits of a row depend on the other records, which a kink of the "
            f"loss can make as large as it likes",
            "torch.set_num_threads(1)  # or other kernels: torch.use_deterministic_algorithms(True)",
        )
    loader, optimizer = script.source, script.ours
    private = optimizer is not None and optimizer.sizes_are_private
    if private and found.size and isinstance(loader, PrivateLoader) and loader.slots is None:
        yield Finding(
            "warning",
            "batches-not-filled-up",
            "the last bits of a row depend on the number of rows in its batch, which is private and differs between "
            "neighboring data sets",
            "optimizer.loader(dataset)  # without padding=False",
        )
