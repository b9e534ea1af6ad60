"""Fits to a table on a real engine and to the same rows in memory, under one stream of noise; prints what came out.

python -m tests.integrations.engine_fits dask|ray|spark
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import pandas as pd
import torch

from torch_dpsco.errors import NotCertifiedError
from torch_dpsco.estimators import LogisticRegression, Ridge
from torch_dpsco.integrations import engines

N = 3000
PARTS = 3


def table() -> pd.DataFrame:
    """Rows with missing numbers, an infinity and a label that is none of the classes."""
    draws = np.random.default_rng(0)
    frame = pd.DataFrame(
        {"a": draws.random(N), "b": draws.integers(0, 2, N).astype(float), "w": draws.random(N)}
    )
    frame["real"] = frame.a - 0.5 * frame.b
    frame["label"] = np.where(frame.a + 0.2 * frame.b > 0.6, "yes", "no")
    frame.loc[5, "a"], frame.loc[2000, "b"], frame.loc[11, "label"] = np.nan, np.inf, "neither"
    return frame


def moved(frame: pd.DataFrame) -> pd.DataFrame:
    """Other numbers at each call."""
    return frame.assign(a=np.random.default_rng().random(len(frame)))


@contextmanager
def dask_tables() -> Iterator[tuple[Any, Any]]:
    import dask
    import dask.dataframe as dd

    pool = ProcessPoolExecutor(2, multiprocessing.get_context("spawn"))
    with pool, dask.config.set(scheduler="processes", pool=pool):
        whole = dd.from_pandas(table(), npartitions=PARTS)
        yield dd.concat([whole, whole[whole.a > 9]]), whole.map_partitions(moved)


@contextmanager
def ray_tables() -> Iterator[tuple[Any, Any]]:
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    whole = ray.data.from_pandas(
        [table().iloc[start : start + N // PARTS] for start in range(0, N + 1, N // PARTS)]
    )
    yield whole, None  # a data set is materialized: it does not change
    ray.shutdown()


@contextmanager
def spark_tables() -> Iterator[tuple[Any, Any]]:
    from pyspark.sql import SparkSession
    from pyspark.sql import functions as F

    session = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.showConsoleProgress", "false")
        .getOrCreate()
    )
    whole = (
        session.createDataFrame(table()).repartition(5, F.col("w") > 0.5).persist()
    )  # two have records
    changes = F.udf(lambda a: np.random.default_rng().random(), "double").asNondeterministic()
    yield whole, whole.withColumn("a", changes(F.col("a")))
    session.stop()


KINDS = {
    "dask": (dask_tables, engines.dask_partitions),
    "ray": (ray_tables, engines.ray_partitions),
    "spark": (spark_tables, engines.spark_partitions),
}


def same_noise(device: torch.device, given: Any) -> torch.Generator:
    return torch.Generator().manual_seed(0)


def main(kind: str) -> None:
    tables, adapter = KINDS[kind]
    frame, features = table(), ["a", "b"]
    models = {
        "label": LogisticRegression(
            epsilon=8.0, n=N, bound_x=2.0, classes=("no", "yes"), reg=5.0
        ),
        "real": Ridge(epsilon=8.0, n=N, bound_x=2.0, bound_y=2.0, mechanism="adassp"),
    }
    said: dict[str, Any] = {}
    noise = mock.patch("torch_dpsco.estimators.fits.noise_generator", same_noise)
    with noise, tables() as (whole, moving):
        for target, model in models.items():
            memory = model.fit(
                frame[features].to_numpy(), frame[target].tolist(), frame.w.to_numpy()
            ).coef_
            there = adapter(whole, target, features, sample_weight="w")
            said[target] = float(
                np.abs(model.fit(there).coef_ - memory).max() / np.abs(memory).max()
            )
            said[f"{target} partitions"] = [
                sum(len(X) for X, *_ in part) for part in there.run(list)
            ]
        try:
            if moving is not None:
                models["label"].fit(adapter(moving, "label", features))
        except NotCertifiedError:
            said["refused"] = True
        try:
            adapter(whole, "a", ["label"])
        except TypeError as refusal:
            said["text"] = str(refusal)
        try:
            models["label"].fit(whole)
        except ValueError as refusal:
            said["as it is"] = str(refusal)
    print(json.dumps(said))


if __name__ == "__main__":
    main(sys.argv[1])
