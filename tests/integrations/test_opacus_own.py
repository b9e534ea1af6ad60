"""Opacus' own tests, run with our engine in place of theirs: all pass but those that are listed here, by reason.

They come with the installed package (`opacus.tests`); nothing of them is copied. Where torchvision is not installed, a
stand-in gives them random images and three small nets.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
import unittest
import warnings
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatch
from types import ModuleType
from typing import Any, NamedTuple

import hypothesis
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import torch_dpsco.integrations.opacus as ours

NAMES = ("PrivacyEngine", "BatchMemoryManager", "DPOptimizer")
# of each module, how many tests pass at least
MODULES = {
    "privacy_engine_validation_test": 4,
    "privacy_engine_test": 114,
    "batch_memory_manager_test": 0,
    "gradient_accumulation_test": 0,
    "randomness_test": 2,
}


class Refused(NamedTuple):
    """Tests that fail, and what the error says.

    Args:
        error: a pattern of the error.
        tests: patterns of "Class.test".
    """

    error: str
    tests: tuple[str, ...]


REFUSED = {  # the first that names a test
    "batches whose second dimension is the record are not filled up": Refused(
        "first dimension is the records",
        tuple(
            f"PrivacyEngineText*.test_{name}"
            for name in ("basic", "noise_level", "deterministic_run")
        ),
    ),
    "a draw that is left out voids the sampling": Refused(
        "SequenceError: the previous batch was not used",
        (
            "PrivacyEngineValidationTest.test_supported_*",
            "PrivacyEngineValidationTest.test_custom_linear_ew",
            "PrivacyEngineValidationTest.test_extra_param_disabled_ew",
            "PrivacyEngineValidationTest.test_extra_param_hooks_no_requires_grad",
            "GradientAccumulationTest*.test_batch_splitter_zero_grad",
            "GradientAccumulationTest*.test_privacy_engine_*poisson_accumulation",
            "PrivacyEngineSecureModeTest.test_data_seed_consistency",
        ),
    ),
    "no seed repeats noise or batches": Refused(
        "AssertionError: False is not true|noise_generator must be None",
        (
            "PrivacyEngine*.test_deterministic_run",
            "BatchMemoryManagerTest*.test_equivalent_to_one_batch",
            "PrivacyEngineSecureModeTest.test_custom_and_global_seed",
            "PrivacyEngineSecureModeTest.test_dl_seed_no_noise",
            "PrivacyEngineSecureModeTest.test_global_seed",
            "PrivacyEngineSecureModeTest.test_seed",
        ),
    ),
    "passes are over records in an order of their own, not in the loader's": Refused(
        "Unexpected private/vanilla weight match", ("PrivacyEngine*.test_compare_to_vanilla",)
    ),
    "rows and sums of records are not shown": Refused(
        "has no attribute '(summed_grad|grad_sample|sum)'",
        ("PrivacyEngine*.test_flat_clipping", "PrivacyEngine*.test_sample_grad_aggregation"),
    ),
    "one clip is on the norm over all parameters": Refused(
        "max_grad_norm must be one number", ("PrivacyEngine*.test_per_layer_clipping",)
    ),
    "noise and clip are what was charged: no schedulers of them, no checkpoint of other ones": Refused(
        "unexpected keyword argument 'noise_scheduler'|is fixed at construction",
        ("PrivacyEngine*.test_checkpoints",),
    ),
    "attention over the batch dimension mixes records, which their engine does not see": Refused(
        "batch_first must be False", ("PrivacyEngineText*.test_make_private_with_epsilon",)
    ),
    "an optimizer without an engine has no ledger": Refused(
        "DPOptimizer has no noise_multiplier", ("OptimizerRandomnessTest.*",)
    ),
    "a loader counts draws: how many parts they have is private": Refused(
        "AssertionError: [0-9]+ != [0-9]+", ("BatchMemoryManagerTest*.test_basic",)
    ),
    "a step takes its rows, also where zero_grad is forgotten": Refused(
        "ValueError not raised", ("GradientAccumulationTest*.test_privacy_engine_zero_grad",)
    ),
    "the model is not wrapped, so that nothing is closed": Refused(
        "has no attribute '_close'",
        ("PrivacyEngineValidationTest.test_extra_param_hooks_requires_grad",),
    ),
}
# within 15 % of what is expected, of noise that is new each time
BY_CHANCE = "PrivacyEngine*.test_noise_level"
# these call nothing of ours
ALONE = (
    "DataLoader*Randomness*",
    "GradientAccumulationTest*.test_grad_sample_accumulation",
    "BatchMemoryManagerTestWithExpandedWeights.test_empty_batch",
)


class FakeData(Dataset[tuple[Tensor, int]]):
    """Random images, as torchvision's."""

    def __init__(
        self, size: int, image_size: tuple[int, ...], num_classes: int, **_: Any
    ) -> None:
        self.size, self.shape, self.classes = size, image_size, num_classes

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        bits = torch.Generator().manual_seed(index)
        return torch.randn(self.shape, generator=bits), index % self.classes


class SmallNet(nn.Sequential):
    """A net with BatchNorm and a classifier."""

    def __init__(self, **_: Any) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
        self.classifier = nn.Linear(4, 10)


def stand_in() -> dict[str, ModuleType]:
    names = (
        "torchvision",
        "torchvision.datasets",
        "torchvision.transforms",
        "torchvision.models",
    )
    top, *parts = modules = [ModuleType(name) for name in names]
    data, transforms, models = parts
    data.FakeData = FakeData
    for name in ("Compose", "ToTensor", "Normalize"):
        setattr(transforms, name, lambda *_: None)
    for name in ("resnet18", "densenet121", "mobilenet_v3_small"):
        setattr(models, name, SmallNet)
    for part in parts:
        setattr(top, part.__name__.rpartition(".")[2], part)
    return dict(zip(names, modules, strict=True))


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Returns a function that imports a module of their tests, with our names in it, and few examples."""
    if importlib.util.find_spec("opacus.tests") is None:
        pytest.skip("this build of opacus has no tests")
    if importlib.util.find_spec("torchvision") is None:
        for name, module in stand_in().items():
            monkeypatch.setitem(sys.modules, name, module)
    hypothesis.settings.register_profile("few", max_examples=4, database=None)
    before = hypothesis.settings.get_current_profile_name()
    hypothesis.settings.load_profile("few")

    def load(name: str) -> ModuleType:
        monkeypatch.delitem(sys.modules, f"opacus.tests.{name}", raising=False)
        module = importlib.import_module(f"opacus.tests.{name}")
        for known in NAMES:
            if hasattr(module, known):
                monkeypatch.setattr(module, known, getattr(ours, known))
        return module

    yield load
    hypothesis.settings.load_profile(before)


def cases(suite: Any) -> Iterator[unittest.TestCase]:
    for test in suite:
        if isinstance(test, unittest.TestSuite):
            yield from cases(test)
        else:
            yield test


def reason(name: str) -> str | None:
    named = (why for why, (_, tests) in REFUSED.items() if any(fnmatch(name, t) for t in tests))
    return next(named, None)


@pytest.mark.weekly
@pytest.mark.parametrize("name", MODULES)
def test_their_tests_pass_but_for_what_is_refused(name: str, theirs: Any) -> None:
    counts: Counter[str] = Counter()
    wrong = []
    for test in cases(unittest.defaultTestLoader.loadTestsFromModule(theirs(name))):
        result, known = unittest.TestResult(), ".".join(test.id().split(".")[-2:])
        if any(fnmatch(known, alone) for alone in ALONE):
            continue
        with warnings.catch_warnings(), torch.random.fork_rng():
            warnings.simplefilter("ignore")
            test.run(result)
        said = "\n".join(text for _, text in result.errors + result.failures)
        why = reason(known)
        if result.skipped or (said and not why and fnmatch(known, BY_CHANCE)):
            counts["skipped"] += 1
        elif not said:
            counts["passed"] += 1
            if why:
                wrong.append(f"{known} passes, and is listed: {why}")
        elif why is None or not re.search(REFUSED[why].error, said):
            wrong.append(f"{known} ({why}): {said[-500:]}")
    assert not wrong, "\n".join(wrong)
    assert counts["passed"] >= MODULES[name], counts
