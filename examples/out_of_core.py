"""A table that no memory holds: private logistic regression on Parquet, read batch by batch, and on sparse rows.

    python examples/out_of_core.py                # income on UCI Adult, 32,561 people, in batches of 4,096 rows
    python examples/out_of_core.py --batch 1000
    python examples/out_of_core.py --quick        # 4,000 people, for a smoke test

The table is written into a temporary folder first; a table of yours is there already. Whatever the size of the batches,
the fit is that of the same rows in memory, to the last bit for the same noise. Needs pyarrow, for sparse rows scipy.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import scipy.sparse
import torch
from adult import ROW_NORM_BOUND, auc, fit_baseline, load_adult
from pictures import bars

import torch_dpsco as dp
from torch_dpsco.estimators import LogisticRegression
from torch_dpsco.integrations.parquet import parquet_blocks

EPSILON, DELTA = 1.0, 1e-5
QUICK_ROWS = 4000


def model(n: int, ledger: dp.Accountant) -> LogisticRegression:
    """Returns a model with public settings; both fits are charged to one ledger."""
    return LogisticRegression(
        epsilon=EPSILON,
        delta=DELTA,
        adjacency=ledger.adjacency,
        n=n,
        bound_x=ROW_NORM_BOUND,
        classes=(0, 1),
        accountant=ledger,
    )


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Fits, prints private beside non-private scores, and returns the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=4096, help="rows in memory at a time")
    parser.add_argument("--quick", action="store_true", help="4,000 people only")
    args = parser.parse_args(argv)
    data, n = load_adult(), QUICK_ROWS if args.quick else 32_561
    rows, labels = data.train_features[:n].numpy(), data.train_labels[:n].numpy().astype(np.int8)
    ledger = dp.Accountant(adjacency="add_remove")
    figures = {}

    def scored(fitted: LogisticRegression) -> float:
        return auc(torch.from_numpy(fitted.decision_function(data.test_features)), data.test_labels)

    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "adult.parquet")
        names = [f"x{place}" for place in range(rows.shape[1])]
        pq.write_table(pa.table([*np.ascontiguousarray(rows.T), labels], names=[*names, "income"]), path)
        blocks = parquet_blocks(path, target="income", rows=args.batch)
        figures["parquet"] = scored(model(n, ledger).fit(blocks))
    figures["sparse"] = scored(model(n, ledger).fit(scipy.sparse.csr_matrix(rows), labels))
    with torch.no_grad():
        figures["baseline"] = auc(
            fit_baseline(data.train_features[:n], data.train_labels[:n])(data.test_features), data.test_labels
        )
    print(f"AUC on {len(data.test_labels):,} people")
    for name, words in (
        ("parquet", f"private, Parquet in batches of {args.batch}"),
        ("sparse", "private, sparse rows"),
        ("baseline", "not private"),
    ):
        print(f"{words:<44}{figures[name]:.4f}")
    bars("AUC on the test set", figures)
    figures["epsilon"] = ledger.get_epsilon(2 * DELTA)
    print(f"publishing both: epsilon {figures['epsilon']:.3g} at delta {2 * DELTA:g}")
    return figures


if __name__ == "__main__":
    main()
