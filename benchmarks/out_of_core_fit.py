"""Logistic regression on a Parquet table that is not held in memory, beside one plain pass of numpy over the same file.

    python benchmarks/out_of_core_fit.py                        # 10^7 rows x 20 float32: 0.8 GB on disk, some minutes
    python benchmarks/out_of_core_fit.py --rows 1e8 --folder /data   # 8 GB on disk, some 40 minutes
    python benchmarks/out_of_core_fit.py --smoke

Rows are made up, written by a process of its own, and removed afterwards. The pass sums the columns, as numpy reads
them from the file in the same batches. Fit and pass each run in a fresh process, on one core, so that the peak of
resident memory is theirs alone; it counts the interpreter and the libraries.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from torch_dpsco.estimators import LogisticRegression
from torch_dpsco.integrations.parquet import parquet_blocks

WIDTH, BATCH = 20, 2**17
GOAL = 1.5  # GiB
WEIGHT = np.linspace(-1, 1, WIDTH, dtype=np.float32) * 4


def batch(place: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns made-up rows in [0, 1] and labels of a logistic model."""
    draws = np.random.default_rng([7, place])
    rows = draws.random((count, WIDTH), dtype=np.float32)
    chance = 1 / (1 + np.exp(-(rows - 0.5) @ WEIGHT))
    return rows, (draws.random(count, dtype=np.float32) < chance).astype(np.int8)


def write(path: str, count: int) -> None:
    """Writes the table."""
    fields = [(f"x{place}", pa.float32()) for place in range(WIDTH)]
    with pq.ParquetWriter(
        path,
        pa.schema([*fields, ("label", pa.int8())]),
        compression="none",
        use_dictionary=False,
    ) as file:
        for start in range(0, count, BATCH):
            rows, labels = batch(start, min(BATCH, count - start))
            file.write_table(
                pa.table([*np.ascontiguousarray(rows.T), labels], schema=file.schema)
            )


def read_once(path: str, count: int) -> str:
    """Sums the columns: what a reading costs at least."""
    total = sum(
        rows.sum(0, dtype=np.float64) for rows, _ in parquet_blocks(path, "label", rows=BATCH)()
    )
    return f"a plain pass, mean of the first column {total[0] / count:.3f}"


def fit(path: str, count: int) -> str:
    """Fits; the private number of readings is shown here, since the rows are made up."""
    torch.set_num_threads(1)
    source, readings = parquet_blocks(path, "label", rows=BATCH), []

    def read() -> object:
        readings.append(time.perf_counter())
        return source()

    model = LogisticRegression(
        epsilon=1.0,
        adjacency="add_remove",
        n=count,
        n_max=count + count // 5,
        bound_x=WIDTH**0.5,
        classes=(0, 1),
        mechanism="objective",
    ).fit(read)
    rows, labels = batch(count, 100_000)
    accuracy, best = (
        np.mean(model.predict(rows) == labels),
        np.mean(((rows - 0.5) @ WEIGHT > 0) == labels),
    )
    return f"LogisticRegression.fit, {len(readings)} readings, accuracy {accuracy:.4f} (the true model: {best:.4f})"


def measured(pipe: object, run: Callable[[str, int], str], path: str, count: int) -> None:
    """Sends what a run says, its seconds, and the peak of its memory in GiB."""
    start = time.perf_counter()
    words = run(path, count)
    spent = time.perf_counter() - start
    pipe.send((words, spent, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20))


def alone(run: Callable[[str, int], object], path: str, count: int) -> tuple[str, float, float]:
    """Returns what a run in a fresh process says, its seconds, and its peak of resident memory."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=measured, args=(there, run, path, count))
    process.start()
    there.close()
    answer = here.recv()
    process.join()
    return answer


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Writes the table, reads it once, fits, and prints seconds and memory."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=float, default=1e7)
    parser.add_argument("--folder", help="where the table is written; default a temporary one")
    parser.add_argument("--smoke", action="store_true", help="20,000 rows")
    args = parser.parse_args(argv)
    count, found = 20_000 if args.smoke else int(args.rows), {}
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        path = str(Path(folder) / "table.parquet")
        _, spent, _ = alone(write_and_say, path, count)
        print(
            f"{count:.0e} rows x {WIDTH} float32, {Path(path).stat().st_size / 1e9:.2f} GB, written in {spent:.0f} s"
        )
        for name, run in (("pass", read_once), ("fit", fit)):
            words, spent, memory = alone(run, path, count)
            print(f"{spent:8.1f} s {memory:6.2f} GiB  {words}")
            found |= {f"{name}_seconds": spent, f"{name}_gib": memory}
    print(f"peak of the fit: {'within' if found['fit_gib'] <= GOAL else 'ABOVE'} {GOAL} GiB")
    return found


def write_and_say(path: str, count: int) -> str:
    """`write`, as a run."""
    write(path, count)
    return ""


if __name__ == "__main__":
    main()
