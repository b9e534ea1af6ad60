"""A logistic model on a Parquet file that is not held in memory: time and peak resident memory, beside plain numpy.

    python benchmarks/out_of_core_sgd.py                 # 10,000,000 rows x 20 float32 columns, about 2 minutes
    python benchmarks/out_of_core_sgd.py --rows 100000   # a try

Each line is a process of its own. "plain numpy pass": the logistic gradient of all rows at one point, row group by row
group. "ParquetRows": the columns into the private file. "fit": that, and `dp.fit` on Poisson batches.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

NAMES = [f"x{j}" for j in range(20)]
GROUP = 250_000  # rows of a group
GIB = 2.0**30


def generate(path: Path, rows: int) -> None:
    """Writes features in the unit ball, and labels -1 and 1 of a logistic model."""
    rng, writer = np.random.default_rng(0), None
    true = rng.standard_normal(len(NAMES))
    for start in range(0, rows, GROUP):
        x = rng.standard_normal((min(GROUP, rows - start), len(NAMES)), dtype=np.float32)
        x /= (
            np.maximum(1.0, np.linalg.norm(x, axis=1, keepdims=True) / 6.0).astype(np.float32)
            * 6.0
        )
        y = rng.random(len(x)) < 1.0 / (1.0 + np.exp(-6.0 * (x @ true)))
        table = pa.table([*x.T, np.where(y, np.float32(1), np.float32(-1))], names=[*NAMES, "y"])
        writer = writer or pq.ParquetWriter(path, table.schema, compression="zstd")
        writer.write_table(table)
    assert writer is not None
    writer.close()


def plain(path: Path, rows: int) -> dict[str, float]:
    """One gradient by numpy."""
    gradient, point = np.zeros(len(NAMES)), np.full(len(NAMES), 0.1, dtype=np.float32)
    file = pq.ParquetFile(path)
    for group in range(file.num_row_groups):
        *x, y = (
            column.to_numpy()
            for column in file.read_row_group(group, columns=[*NAMES, "y"]).columns
        )
        features = np.stack(x, axis=1)
        gradient += features.T @ (1.0 / (1.0 + np.exp(-features @ point)) - (y + 1) / 2)
    return {}


def rows_only(path: Path, rows: int) -> dict[str, float]:
    """The private file."""
    from torch_dpsco.integrations.parquet import ParquetRows

    assert len(ParquetRows(path, NAMES, "y")) == rows
    return {}


def fit(path: Path, rows: int) -> dict[str, float]:
    """Private training; the accuracy is that of the first rows of the file."""
    import torch

    import torch_dpsco as dp
    from torch_dpsco.integrations.parquet import ParquetRows

    torch.manual_seed(0)
    data, model, loss = (
        ParquetRows(path, NAMES, "y"),
        torch.nn.Linear(len(NAMES), 1),
        dp.losses.Logistic(),
    )
    budget = dp.Budget(1.0, min(1e-8, 0.1 / rows), "replace_one")
    plan = dp.HolderSGD.plan(
        problem=loss.problem(bound_x=1.0),
        n=rows,
        budget=budget,
        batch_size=min(8192, rows // 10),
        epochs=1,
    )
    optimizer = dp.HolderSGD(model.parameters(), plan)
    dp.fit(model, optimizer, data, loss, progress=False)
    x, y = data.gather(np.arange(min(rows, 100_000)))
    with torch.no_grad():
        right = ((model(x) > 0) == (y > 0)).double().mean()
    return {"steps": optimizer.steps, "accuracy": round(float(right), 3)}


PARTS = {"plain numpy pass": plain, "ParquetRows": rows_only, "fit": fit}


def measure(part: str, path: Path, rows: int) -> None:
    """Prints what a part has taken, as JSON."""
    start = time.perf_counter()
    found = PARTS[part](path, rows)
    found["seconds"] = round(time.perf_counter() - start, 1)
    found["peak GiB"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB, 2)
    print(json.dumps(found))


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes the file and measures each part in a process of its own."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--part", choices=PARTS)
    parser.add_argument("--path", type=Path)
    given = parser.parse_args(arguments)
    if given.part:
        measure(given.part, given.path, given.rows)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.parquet"
        generate(path, given.rows)
        print(
            f"{given.rows:,} rows x {len(NAMES)} columns, {path.stat().st_size / GIB:.2f} GiB of Parquet"
        )
        for part in PARTS:
            call = [
                sys.executable,
                __file__,
                "--rows",
                str(given.rows),
                "--part",
                part,
                "--path",
                str(path),
            ]
            print(
                f"{part}: {subprocess.run(call, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()}"
            )


if __name__ == "__main__":
    main()
