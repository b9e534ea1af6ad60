"""Time and memory of one call of the user-level filter, beside torch.cdist and a float32 Gram matrix in tiles.

    python benchmarks/user_level.py --counts                       # about a minute
    python benchmarks/user_level.py --counts --sizes 1000x100,5000x1000
    python benchmarks/user_level.py --smoke                        # seconds

Every figure is that of a process of its own with one thread: CPU seconds (the least of some repeats) and the growth of
the peak resident memory over what was there with the rows in place. The variants:

* filter: `UserFiltered.release`: test, filter, weighted mean and noise, on float64 neighbor counts
* counts: `neighbor_counts` alone
* gram32: symmetric tiles of a float32 Gram matrix, counted: the fastest that is not exact
* cdist: torch.cdist and a comparison, whole, in float32
"""

from __future__ import annotations

import argparse
import multiprocessing
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import timing
import torch
from torch import Tensor

from torch_dpsco.algorithms.oracles import UserFiltered
from torch_dpsco.algorithms.user_numbers import UserFilter
from torch_dpsco.rows import DenseBlock, GradBatch
from torch_dpsco.rows.neighbors import neighbor_counts

SIZES = "1000x100,5000x100,20000x100,1000x1000,5000x1000,20000x1000"
SMALL_SIZES = "100x10"
VARIANTS = ("gram32", "counts", "filter", "cdist")
SPREAD, TILE = 0.1, 1024


def rows_of(n: int, dim: int) -> tuple[Tensor, float]:
    """Returns float32 rows around one point, and a radius that about half of the pairs are within."""
    rows = 0.3 + SPREAD * torch.randn(n, dim, generator=torch.Generator().manual_seed(0))
    return rows, SPREAD * (2 * dim) ** 0.5


def gram32(rows: Tensor, tau: float) -> Tensor:
    counts, norms = torch.zeros(len(rows), dtype=torch.int64), rows.square().sum(1)
    for i in range(0, len(rows), TILE):
        for j in range(i, len(rows), TILE):
            near = (rows[i : i + TILE] @ rows[j : j + TILE].t()).mul_(-2.0)
            near.add_(norms[i : i + TILE, None]).add_(norms[j : j + TILE]).le_(tau * tau)
            counts[i : i + TILE] += near.sum(1).long()
            if i != j:
                counts[j : j + TILE] += near.sum(0).long()
    return counts


def variant(name: str, n: int, dim: int) -> Callable[[], object]:
    """Returns a call to be measured, with its rows in memory."""
    rows, tau = rows_of(n, dim)
    if name == "gram32":
        return lambda: gram32(rows, tau)
    if name == "cdist":
        return lambda: (torch.cdist(rows, rows) <= tau).sum(1)
    if name == "counts":
        return lambda: neighbor_counts(rows, tau)
    return filter_call(rows, tau)


def filter_call(rows: Tensor, tau: float) -> Callable[[], None]:
    (n, dim), generator = rows.shape, torch.Generator().manual_seed(0)
    own = UserFilter(
        n_users=n, steps=99, pair_radius=1.2 * tau, threshold=0.95 * n, threshold_scale=1.0, query_scale=2.0,
        score_floor=0.9 * n, ramp_end=3 * n // 4, noise_std=1.0,
    )  # fmt: skip
    oracle = UserFiltered(own)
    oracle.open([torch.zeros(dim)])
    oracle.observe(GradBatch([DenseBlock(rows)]), users=torch.arange(n))

    def call() -> None:
        kept = oracle._users.__dict__.copy()  # the rows are used up by a release: put them back
        oracle.release(generator)
        oracle._users.__dict__.update(kept)

    return call


def memory(field: str) -> float:
    """Returns resident memory in MiB: VmRSS now, VmHWM at its peak (Linux)."""
    line = next(
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith(field)
    )
    return int(line.split()[1]) / 1024


def measure(name: str, n: int, dim: int) -> tuple[float, float]:
    torch.set_num_threads(1)
    variant(name, 8, 2)()  # the libraries' own memory
    call = variant(name, n, dim)
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text(
        "5"
    )  # the peak starts anew: making the rows took more
    best = float("inf")
    for _ in range(3 if n * dim < 10**7 else 1):
        start = time.process_time()
        call()
        best = min(best, time.process_time() - start)
    return best, memory("VmHWM") - before


def in_own_process(name: str, n: int, dim: int) -> tuple[float, float]:
    with multiprocessing.get_context("fork").Pool(
        1
    ) as pool:  # what one leaves in memory is not there for the next
        return pool.apply(measure, (name, n, dim))


def tables(*, sizes: str) -> dict[str, str]:
    """Returns the table "users": CPU seconds and memory per size and variant."""
    rows = []
    for size in sizes.split(","):
        n, dim = map(int, size.split("x"))
        found = [in_own_process(name, n, dim) for name in VARIANTS]
        cells = [
            f"{timing.digits(seconds)} s, {timing.digits(mebibytes)} MiB"
            for seconds, mebibytes in found
        ]
        rows.append([f"{n:,}, {dim:,}", *cells, timing.digits(found[1][0] / found[0][0])])
    return {"users": timing.table(["users, d", *VARIANTS, "counts / gram32"], rows)}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--counts", action="store_true", help="time and memory of one oracle call"
    )
    parser.add_argument("--sizes", default=SIZES, help="users x dimension, separated by commas")
    parser.add_argument("--smoke", action="store_true", help="few users")
    args = parser.parse_args(argv)
    if args.smoke:
        args.counts, args.sizes = True, SMALL_SIZES
    if not args.counts:
        parser.error("give --counts")
    print(
        f"torch {torch.__version__}, {platform.machine()}, one thread; CPU seconds, MiB above the rows, x gram32"
    )
    for size in args.sizes.split(","):
        n, dim = map(int, size.split("x"))
        found = {name: in_own_process(name, n, dim) for name in VARIANTS}
        for name, (seconds, mebibytes) in found.items():
            ratio = seconds / found["gram32"][0]
            print(
                f"n={n:<6} d={dim:<5} {name:<8}{seconds:9.3f} s {mebibytes:9.1f} MiB {ratio:7.2f} x"
            )


if __name__ == "__main__":
    main()
