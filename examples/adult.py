"""The UCI Adult data set as 65 bounded features, read from `examples/data` (nothing is downloaded).

    train_x, train_y, test_x, test_y = load_adult()     # (32561, 65), (32561,), (16281, 65), (16281,), float32

The loader is part of the privacy argument: every bound, scale and level below is a public constant (the code book of
the data set and the range a field can take), never a minimum, mean or set of levels read off the data. So the map from
record to row touches one record at a time, preserves adjacency, and bounds the row norm for EVERY record:

| column of the file | features | in |
|---|---|---|
| 0 age | clip(age, 17, 90) / 90 | [0, 1] |
| 4 education-num | clip(education-num, 1, 16) / 16 | [0, 1] |
| 10 capital-gain | log(1 + clip(gain, 0, 99999)) / log(1e5) | [0, 1] |
| 11 capital-loss | log(1 + clip(loss, 0, 5000)) / log(5001) | [0, 1] |
| 12 hours-per-week | clip(hours, 1, 99) / 99 | [0, 1] |
| 1, 3, 5, 6, 7, 8, 9 | one-hot of 9 + 16 + 7 + 15 + 6 + 5 + 2 levels; an unlisted level is all zeros | norm 0 or 1 |

With a constant-1 bias feature the row norm is at most sqrt(5 + 7 + 1) < 3.61 = `ROW_NORM_BOUND`. Columns 2 (a survey
weight) and 13 (country) are not used.
"""

from __future__ import annotations

import csv
import lzma
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from scipy.stats import rankdata

__all__ = ["LEVELS", "NUM_FEATURES", "ROW_NORM_BOUND", "Adult", "accuracy", "auc", "fit_baseline", "load_adult"]

DATA_FOLDER = Path(__file__).parent / "data"
ROW_NORM_BOUND = 3.61

# The levels of the code book, in its order; '?' marks a missing value.
LEVELS: dict[int, tuple[str, ...]] = {
    1: (  # workclass
        *("Private", "Self-emp-not-inc", "Self-emp-inc", "Federal-gov", "Local-gov", "State-gov"),
        *("Without-pay", "Never-worked", "?"),
    ),
    3: (  # education
        *("Bachelors", "Some-college", "11th", "HS-grad", "Prof-school", "Assoc-acdm", "Assoc-voc", "9th"),
        *("7th-8th", "12th", "Masters", "1st-4th", "10th", "Doctorate", "5th-6th", "Preschool"),
    ),
    5: (  # marital-status
        *("Married-civ-spouse", "Divorced", "Never-married", "Separated", "Widowed"),
        *("Married-spouse-absent", "Married-AF-spouse"),
    ),
    6: (  # occupation
        *("Tech-support", "Craft-repair", "Other-service", "Sales", "Exec-managerial", "Prof-specialty"),
        *("Handlers-cleaners", "Machine-op-inspct", "Adm-clerical", "Farming-fishing", "Transport-moving"),
        *("Priv-house-serv", "Protective-serv", "Armed-Forces", "?"),
    ),
    7: ("Wife", "Own-child", "Husband", "Not-in-family", "Other-relative", "Unmarried"),  # relationship
    8: ("White", "Asian-Pac-Islander", "Amer-Indian-Eskimo", "Other", "Black"),  # race
    9: ("Female", "Male"),  # sex
}
NUM_NUMERIC = 5
NUM_FEATURES = NUM_NUMERIC + sum(map(len, LEVELS.values()))


class Adult(NamedTuple):
    """The fixed split: features of shape (rows, 65), labels of shape (rows,) in {0, 1} (1: income > 50K), float32."""

    train_features: torch.Tensor
    train_labels: torch.Tensor
    test_features: torch.Tensor
    test_labels: torch.Tensor


def load_adult(folder: str | Path = DATA_FOLDER) -> Adult:
    """Returns the training and test records of `adult.data.xz` and `adult.test.xz` in `folder`."""
    train_features, train_labels = _table(_records(Path(folder) / "adult.data.xz"))
    # The first line of the test file is a remark ("|1x3 Cross validator"), not a record.
    test_features, test_labels = _table(_records(Path(folder) / "adult.test.xz", skip_lines=1))
    return Adult(train_features, train_labels, test_features, test_labels)


def encode(record: Sequence[str]) -> list[float]:
    """Returns the 65 features of one record (15 fields, or 14 without the label); no other record has a say."""
    row = [
        _clip(record[0], 17, 90) / 90,
        _clip(record[4], 1, 16) / 16,
        math.log1p(_clip(record[10], 0, 99_999)) / math.log(100_000),
        math.log1p(_clip(record[11], 0, 5_000)) / math.log(5_001),
        _clip(record[12], 1, 99) / 99,
    ]
    for column, levels in LEVELS.items():
        row.extend(float(record[column] == level) for level in levels)
    return row


def accuracy(scores: torch.Tensor, labels: torch.Tensor) -> float:
    """Returns the share of records whose score has the sign of their label: > 0 means label 1.

    Args:
        scores: Real-valued scores (logits), any shape with one value a record.
        labels: Labels in {0, 1}, as many.
    """
    predictions, truth = (scores.reshape(-1) > 0), (labels.reshape(-1) > 0.5)
    if predictions.shape != truth.shape:
        raise ValueError(f"scores and labels must be equally many (got {len(predictions)} and {len(truth)})")
    return float((predictions == truth).double().mean())


def auc(scores: torch.Tensor, labels: torch.Tensor) -> float:
    """Returns the area under the ROC curve, the rank statistic with ties counted one half.

    P[score of a random positive > score of a random negative] + P[equal]/2
    = (sum of the positives' average ranks - P (P + 1) / 2) / (P N).

    Args:
        scores: Real-valued scores, any shape with one value a record.
        labels: Labels in {0, 1}, as many, both present.
    """
    values = scores.detach().double().reshape(-1).numpy()
    positive = labels.reshape(-1).numpy() > 0.5
    if values.shape != positive.shape:
        raise ValueError(f"scores and labels must be equally many (got {len(values)} and {len(positive)})")
    num_positive = int(positive.sum())
    num_negative = len(positive) - num_positive
    if num_positive == 0 or num_negative == 0:
        raise ValueError("auc needs records of both labels")
    ranks = rankdata(values)
    return float((ranks[positive].sum() - num_positive * (num_positive + 1) / 2) / (num_positive * num_negative))


def fit_baseline(features: torch.Tensor, labels: torch.Tensor, *, reg: float = 1e-4) -> torch.nn.Linear:
    """Returns NON-PRIVATE logistic regression: what the private examples are compared with.

    Minimizes mean log-loss + reg/2 |(weight, bias)|^2 by full-batch L-BFGS in float64 from zero: no randomness, so
    equal inputs give equal models on one machine. The small `reg` makes the minimizer unique (the one-hot columns of
    a field sum to one, so without it whole lines of weights fit equally well).

    On Adult: test accuracy 0.8468, AUC 0.8990, log-loss 0.3292 (always "no": accuracy 0.7638).

    Args:
        features: Float tensor of shape (rows, dim).
        labels: Labels in {0, 1} of shape (rows,).
        reg: Strength of the ridge penalty, > 0; the bias is penalized like the weight of a constant-1 feature.
    """
    inputs, targets = features.double(), labels.double().reshape(-1, 1)
    model = torch.nn.utils.skip_init(torch.nn.Linear, features.shape[1], 1, dtype=torch.float64)
    torch.nn.init.zeros_(model.weight)
    torch.nn.init.zeros_(model.bias)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=200, tolerance_grad=1e-8, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(inputs), targets)
        loss = loss + 0.5 * reg * (model.weight.square().sum() + model.bias.square().sum())
        loss.backward()
        return loss

    optimizer.step(closure)
    return model.to(features.dtype).requires_grad_(False)


def _records(path: Path, skip_lines: int = 0) -> list[list[str]]:
    with lzma.open(path, "rt", encoding="ascii", newline="") as file:
        for _ in range(skip_lines):
            next(file)
        return [record for record in csv.reader(file, skipinitialspace=True) if record]


def _table(records: Iterable[Sequence[str]]) -> tuple[torch.Tensor, torch.Tensor]:
    features, labels = [], []
    for record in records:
        features.append(encode(record))
        labels.append(float(record[14].rstrip(".") == ">50K"))  # labels of the test file end in a full stop
    return torch.from_numpy(np.asarray(features, dtype=np.float32)), torch.tensor(labels)


def _clip(field: str, low: float, high: float) -> float:
    return min(max(float(field), low), high)
