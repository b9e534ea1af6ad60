"""Whether records are in the gradients of others: the check on what probes have found, and how rows are compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from torch_dpsco.doctor.evidence import Evidence, Pass
from torch_dpsco.doctor.findings import Finding
from torch_dpsco.doctor.script import Script

_HALF = (torch.float16, torch.bfloat16)
_NO_MIX = 1e-4  # relative gap of sums, where rounding is different in each of four batches


def coupled_records(script: Script, evidence: Evidence) -> Iterator[Finding]:
    """Another record 0 must not move the rows of the others; without rows, gradients must be sums over records."""
    found = ""
    consequence, limit = "many rows, which clipping one row at a time does not bound", _NO_MIX
    if script.row_free is not None:
        consequence, limit = "the gradients of many, which the noise does not cover", 1e-6  # in double precision
    if evidence.mixing is not None and evidence.mixing > limit:
        found = f"gradients of made-up batches are no sums over records (by {evidence.mixing:.2g} of their norm)"
    base, changed = evidence.base, evidence.changed
    if base is not None and changed is not None:
        moved = movement(base, changed, evidence.size)[1:]
        if moved.numel() and float(moved.max()) > tolerance(base.rows):
            count = int((moved > tolerance(base.rows)).sum())
            found = (
                f"with another record 0, the gradients of {count} of the {evidence.size - 1} other records moved, by "
                f"up to {float(moved.max()):.2g} of the largest row"
            )
    for (reference, other), what in zip(evidence.outliers, evidence.outlier_kinds, strict=True):
        count = jumps(reference, other, evidence.size)
        if count and not found:
            found = f"with {what} as record 0, the gradients of {count} of the other records moved"
    if found:
        yield Finding(
            "critical",
            "coupled-records",
            f"{found}: one record is in {consequence}",
            "compute loss and features from one record at a time: replace statistics of the batch (x.mean(0), "
            "logsumexp over records, contrastive pairs) by constants or by functions of the record alone",
        )


def movement(first: Pass, second: Pass, size: int) -> Tensor:
    """Returns how far each record's rows moved, relative to the largest joint row; (size,) float64."""
    squares, scale = torch.zeros(size, dtype=torch.float64), 0.0
    for name, rows in first.rows.items():
        others = second.rows.get(name)
        if len(rows) != size or others is None or others.shape != rows.shape:
            continue
        gap = (others.double() - rows.double()).reshape(size, -1).norm(dim=1).cpu()
        squares += torch.where(gap.isnan(), torch.zeros_like(gap), gap).square()
    norms = joint_norms({name: rows for name, rows in first.rows.items() if len(rows) == size})
    if norms.numel():
        scale = float(norms.nan_to_num(0.0, 0.0, 0.0).max())
    return squares.sqrt() / max(scale, 1e-30)


def joint_norms(rows: Mapping[str, Tensor]) -> Tensor:
    """Returns the norms of rows over all parameters, (size,) float64."""
    squares = [made.double().reshape(len(made), -1).square().sum(1).cpu() for made in rows.values()]
    return torch.stack(squares).sum(0).sqrt() if squares else torch.empty(0, dtype=torch.float64)


def tolerance(rows: Mapping[str, Tensor]) -> float:
    """Returns the relative difference of rows that rounding explains."""
    dtypes = {made.dtype for made in rows.values()}
    if dtypes & set(_HALF):
        return 3e-2
    return 1e-5 if torch.float32 in dtypes else 1e-9


def jumps(first: Pass, second: Pass, size: int) -> int:
    """Returns how many rows of records 1, 2, ... differ, or are not finite any more, after another record 0.

    Each is compared with its own length, or the usual one: the rows of outliers are longer than all others.
    """
    names = [name for name, rows in first.rows.items() if len(rows) == size and name in second.rows]
    if size < 2 or not names:
        return 0
    flat = [torch.cat([p.rows[n].double().reshape(size, -1).cpu() for n in names], dim=1)[1:] for p in (first, second)]
    known = flat[0].isfinite().all(1)
    norms = flat[0][known].norm(dim=1)
    if not len(norms):
        return 0
    gaps = (flat[1][known] - flat[0][known]).norm(dim=1) / norms.clamp_min(float(norms.median()) + 1e-30)
    return int((~(gaps <= 10 * tolerance(first.rows))).sum())
