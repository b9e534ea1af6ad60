"""Private logistic regression on UCI Adult by two workers of Ray Train, which make one run.

    python examples/ray_train.py            # eps = 1 on 32,561 people; pip install '.[ray]'
    python examples/ray_train.py --quick    # a tenth of an epoch, for a smoke test

Ray starts the workers and their process group; the training function is that of `torchrun.py`, unchanged. On a cluster
each worker must be able to import it, and to read the whole data set.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from torchrun import EPOCHS, QUICK_EPOCHS, show, train

WORKERS = 2


def work(config: dict[str, Any]) -> dict[str, float]:
    """What each worker does; Ray keeps what the first returns."""
    return train(config["epochs"])


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Starts the workers, and returns the figures of the first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of an epoch")
    args = parser.parse_args(argv)
    here = str(Path(__file__).parent)
    ray.init(num_cpus=WORKERS, include_dashboard=False, runtime_env={"env_vars": {"PYTHONPATH": here}})
    with tempfile.TemporaryDirectory() as folder:
        trainer = TorchTrainer(
            work,
            train_loop_config={"epochs": QUICK_EPOCHS if args.quick else EPOCHS},
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=ScalingConfig(num_workers=WORKERS),
            run_config=RunConfig(storage_path=folder),
        )
        figures: dict[str, float] = trainer.fit().return_value
    ray.shutdown()
    show(figures, WORKERS)
    return figures


if __name__ == "__main__":
    main()
