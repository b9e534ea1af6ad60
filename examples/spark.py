"""Private logistic regression on UCI Adult by two processes of Spark's TorchDistributor, which make one run.

    python examples/spark.py            # eps = 1 on 32,561 people; pip install '.[spark]', and Java
    python examples/spark.py --quick    # a tenth of an epoch, for a smoke test

Spark starts the processes by torchrun; the training function is that of `torchrun.py`, unchanged. Here they are on the
driver (`local_mode`). With `local_mode=False` they are tasks of the cluster, and each must be able to import it, and to
read the whole data set.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist
from pyspark.ml.torch.distributor import TorchDistributor
from pyspark.sql import SparkSession
from torchrun import EPOCHS, QUICK_EPOCHS, show, train

PROCESSES = 2


def work(epochs: float) -> dict[str, float]:
    """What each process does: it joins the group, and trains."""
    dist.init_process_group("gloo")
    figures = train(epochs)
    dist.destroy_process_group()
    return figures


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Starts the processes, and returns the figures of the first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of an epoch")
    args = parser.parse_args(argv)
    here = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    spark = SparkSession.builder.master(f"local[{PROCESSES}]").config("spark.ui.enabled", "false").getOrCreate()
    distributor = TorchDistributor(num_processes=PROCESSES, local_mode=True, use_gpu=False)
    figures: dict[str, float] = distributor.run(work, QUICK_EPOCHS if args.quick else EPOCHS)
    spark.stop()
    show(figures, PROCESSES)
    return figures


if __name__ == "__main__":
    main()
