"""Values that no caller should get away with, and what counts as a proper refusal."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torch_dpsco as dp
from torch_dpsco.errors import DpscoError

__all__ = ["VALUES", "arguments_of", "fits", "judge"]

# label: how to make it. Labels in small letters are plain values, the others are objects.
VALUES: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "word": lambda: "abc",
    "true": lambda: True,
    "zero": lambda: 0,
    "minus": lambda: -1,
    "part": lambda: 1.5,
    "negative": lambda: -0.5,
    "nan": lambda: math.nan,
    "inf": lambda: math.inf,
    "huge": lambda: 1e308,
    "vast": lambda: 10**400,
    "numpy": lambda: np.float64(-2.0),
    "complex": lambda: 1j,
    "tuple": lambda: (1.0, 1e-5),
    "list": lambda: [1],
    "dict": lambda: {"a": 1},
    "set": lambda: {1.0},
    "Function": lambda: lambda *_: "abc",
    "Object": object,
    "Class": lambda: dp.Budget,
    "Tensor": lambda: torch.tensor([[0.5, 0.5], [0.5, 0.5]]),
    "Array": lambda: np.array(["a", "b"]),
    "Generator": lambda: np.random.default_rng(0),
    "Meta": lambda: torch.Generator(device="cpu"),
    "Model": lambda: nn.Linear(2, 1),
    "DataSet": lambda: TensorDataset(torch.ones(5)),
    "Loader": lambda: DataLoader(
        TensorDataset(torch.ones(4, 3), torch.ones(4, 1)), batch_size=2
    ),
    "TorchSGD": lambda: torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1),
    "Budget": lambda: dp.Budget(1.0, 1e-5),
    "Accountant": lambda: dp.Accountant(),
    "Loss": lambda: dp.losses.Logistic(),
    "Problem": lambda: dp.Problem(lipschitz=1.0),
    "Prox": lambda: dp.prox.Ball(1.0),
    "Rule": lambda: dp.rules.SGD(),
    "Design": lambda: dp.Poisson(6, 24),
    "Schedule": lambda: dp.Schedule((dp.Phase(2),)),
    "Phase": lambda: dp.Phase(2),
    "Oracle": lambda: dp.oracles.Clipped(1.0, 1.0, 6),
    "Pilot": lambda: dp.Pilot(size=50),
    "Event": lambda: dp.accounting.events.clipped_gaussian(1.0),
}
del VALUES["Meta"]
TYPES: dict[
    str, tuple[str, ...]
] = {  # words of an annotation: labels of values that have the type
    "None": ("none",),
    "str": ("word",),
    "bool": ("true",),
    "int": ("zero", "minus", "vast"),
    "float": ("zero", "minus", "part", "negative", "nan", "inf", "huge", "vast", "numpy"),
    "Callable": ("Function", "Class", "Loss", "Model"),
    "LossFn": ("Function", "Class", "Loss", "Model"),
    "Sequence": ("tuple", "list"),
    "Iterable": ("tuple", "list", "set", "dict"),
    "Mapping": ("dict",),
    "dict": ("dict",),
    "tuple": ("tuple",),
    "list": ("list",),
    "ArrayLike": ("Array", "Tensor", "tuple", "list"),
    "Tensor": ("Tensor",),
    "Module": ("Model",),
    "Model": ("Model",),
    "Dataset": ("DataSet",),
    "DataLoader": ("Loader",),
    "Optimizer": ("TorchSGD",),
    "Budget": ("Budget",),
    "Accountant": ("Accountant",),
    "TableLoss": ("Loss",),
    "Loss": ("Loss",),
    "MarginLoss": ("Loss",),
    "ScalarLoss": ("Loss",),
    "Logistic": ("Loss",),
    "Problem": ("Problem",),
    "Prox": ("Prox",),
    "UpdateRule": ("Rule",),
    "Design": ("Design",),
    "Schedule": ("Schedule",),
    "MeanOracle": ("Oracle",),
    "Pilot": ("Pilot",),
    "Event": ("Event",),
    "Any": tuple(VALUES),
    "object": tuple(VALUES),
}
LIBRARY = (
    ValueError,
    TypeError,
    *(vars(dp.errors)[name] for name in dir(dp.errors) if name.endswith(("Error", "Exceeded"))),
)
# how messages call an argument that has another name inside
ALIASES = {
    "X": r"\bX\b|features|2D",
    "y": r"\by\b|targets",
    "X_like": r"X_like|\bX\b|2D",
    "y_like": r"y_like|\by\b",
    "groups": "groups|users",
    "sens": "sens|adjacency",
    "kind": "kind|filter",
    "adjacencies": "adjacenc",
    "n_users": r"\bn_users\b|\bn must",
    "state_dict": "state|version",
    "loss_fn": "loss",
    "loss": "loss|score",
    "mechanism": "mechanism|outputs",
    "sampling": "sampling|design",
    "users": "users|optimizer",
    "dataset": r"\bdataset|data set",
    "row": r"\brow\b|saved plan",
    "state": r"\bstate\b|columns|schema",
}
CONSTANTS = {
    "problem",
    "dataset",
    "data_loader",
    "design",
    "budget",
    "accountant",
    "schedule",
    "score_share",
    "plan",
    "typical_score",
    "checkpoint",
}
CALLED = {
    "inner",
    "closure",
    "mechanism",
    "score",
    "make",
    "loss",
    "collate_fn",
    "backend",
    "exact_grad_bound",
}


@dataclass(frozen=True)
class Verdict:
    """What came of a call: "" if it was refused as it should be, else what is wrong with it."""

    outcome: str
    detail: str = ""


def arguments_of(function: Callable[..., Any]) -> Iterator[tuple[str, str]]:
    """Yields names and annotations of the arguments that can be given by name."""
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind not in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        ) and name not in (
            "self",
            "cls",
        ):
            text = (
                parameter.annotation
                if isinstance(parameter.annotation, str)
                else str(parameter.annotation)
            )
            yield name, "Any" if parameter.annotation is parameter.empty else text


def fits(label: str, annotation: str) -> bool:
    """Returns whether a value has a type that an annotation names."""
    words = re.findall(
        r"\w+",
        annotation.replace("torch.Generator", "TorchGenerator")
        .replace("_LossFn", "LossFn")
        .replace("_Model", "Model"),
    )
    return any(label in TYPES.get(word, ()) for word in words)


def judge(function: Callable[..., Any], arguments: dict[str, Any], name: str) -> Verdict:
    """Makes a call whose argument `name` is bad."""
    value = arguments[name]
    try:
        function(**arguments)
    except (DpscoError, ValueError, TypeError) as error:
        text = str(error)
        if isinstance(error, TypeError) and not text.startswith("X must"):  # scikit-learn's rule
            return _raised(error, value, name)
        if isinstance(error, DpscoError) and name in CONSTANTS:
            return Verdict(
                ""
            )  # of a proper type: what is missing from it, or does not fit, is named instead
        if type(error) not in LIBRARY or not re.search(
            ALIASES.get(name, rf"\b{name.removesuffix('s')}s?\b"), text
        ):
            return Verdict("unnamed", f"{type(error).__name__}: {text}")
        return Verdict("") if _shows(text, value) else Verdict("no value", text)
    except OSError as error:  # of a file that is not there, or is there already
        return Verdict("") if str(value) in str(error) else _raised(error, value, name)
    except Exception as error:
        return _raised(error, value, name)
    return Verdict("accepted")


def _raised(error: Exception, value: Any, name: str) -> Verdict:
    if callable(value) and name in CALLED:
        return Verdict("")  # by the function that was given
    return Verdict("raw", f"{type(error).__name__}: {error}")


def _shows(text: str, value: Any) -> bool:
    shown = {repr(value), str(value), type(value).__name__}
    if isinstance(value, (int, float)):
        shown |= {"inf", "nan", f"{float(min(max(value, -1e308), 1e308)):g}"}
    missing = value is None and ("given" in text or "give " in text or "needs" in text)
    return (
        missing
        or "got " in text
        or any(word in text for word in ("shape", "not supported", "expecting"))
        or any(item in text for item in shown)
    )
