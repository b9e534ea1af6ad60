"""Options, hypothesis profile and the table of test vectors."""

from __future__ import annotations

import importlib
import os
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable

import hypothesis
import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    # kernels for CUDA run on the CPU then; triton reads it when it is imported, which torch.compile may do
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Whole and first: pytest's importlib mode would otherwise load the module it collects doctests from a second time when
# the package's own file imports it, and a class would no longer be the class.
dp = importlib.import_module("torch_dpsco")
for _name in sorted(
    {*dp.__all__} - {"score", "study"}
):  # now, and not while something is patched
    getattr(dp, _name)
rng = importlib.import_module("torch_dpsco.noise")
native = importlib.import_module("torch_dpsco.native")

# No test may depend on the speed of the machine; CI must not fail on a draw that nobody can repeat (without CI every
# run draws anew, so that what a fixed draw hides is found).
hypothesis.settings.register_profile(
    "torch_dpsco", deadline=None, derandomize="CI" in os.environ
)
hypothesis.settings.load_profile("torch_dpsco")

_VECTORS = "tests/test_vectors.py::test_the_package_agrees_with_the_vector"


def pytest_addoption(parser):
    parser.addoption(
        "--vectors",
        metavar="DIR",
        default=None,
        help="folder of vector files FAMILY.json for tests/test_vectors.py (default: tests/vectors)",
    )


def pytest_configure(config):
    """Gives each of several processes one thread; those that pytest-xdist starts inherit it."""
    if getattr(config.option, "numprocesses", None):
        os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """Returns how many processes `-n auto` of setup.cfg means: none for named files, which are run while at work."""
    named = any("::" in argument or argument.endswith(".py") for argument in config.args)
    return 0 if named else min(os.cpu_count() or 1, 8)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Marks cases slow and weekly where their test has a mark `cases`, in the order of a hash.

    Vectors from elsewhere are all run.
    """
    if unlike := [item.nodeid for item in items if " at 0x" in item.nodeid]:
        raise pytest.UsageError(
            f"names of cases must be the same in all processes: give ids= (got {unlike[0]})"
        )
    cases = defaultdict(list)
    for item in items:
        if item.get_closest_marker("cases"):
            cases[item.nodeid.split("[")[0]].append(item)
    if config.getoption("--vectors"):
        cases.pop(_VECTORS, None)
    for several in cases.values():
        by_default, more = several[0].get_closest_marker("cases").args
        # those that have a mark of their own come last
        several.sort(key=lambda item: (_is_marked(item), zlib.crc32(item.nodeid.encode())))
        for item in several[by_default : by_default + more]:
            item.add_marker("slow")
        for item in several[by_default + more :]:
            item.add_marker("weekly")


def _is_marked(item):
    return any(item.get_closest_marker(name) for name in ("slow", "weekly"))


def _entropy_of(words: str) -> Callable[[int], bytes]:
    """Returns what replaces the entropy of `noise`: bytes that depend on the words alone, fresh in forks."""
    process, stream = os.getpid(), np.random.default_rng(list(words.encode()))
    return lambda size: (stream.bytes if os.getpid() == process else os.urandom)(size)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Draws noise and batches from a stream of the test's own name in CI; everywhere else every run is fresh."""
    if "CI" not in os.environ or item.get_closest_marker("real_entropy"):
        return (yield)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rng, "_random_bytes", _entropy_of(item.nodeid))
        return (yield)


def pytest_terminal_summary(terminalreporter, config):
    """Prints how the vectors of each function fared: nothing that is not built yet goes unnoticed."""
    counts = Counter()
    for outcome, column in {"passed": 0, "failed": 1, "skipped": 2}.items():
        for report in terminalreporter.stats.get(outcome, []):
            for name, value in report.user_properties:
                if name == "vector":
                    counts[value, column] += 1
    functions = sorted({function for function, _ in counts})
    if not functions:
        return
    terminalreporter.section("vectors: family function passed/failed/not built")
    for family in sorted({function.split(":")[0] for function in functions}):
        own = [function for function in functions if function.startswith(f"{family}:")]
        whole = [
            function for function in own if not counts[function, 1] and not counts[function, 2]
        ]
        listed = (
            own
            if config.get_verbosity() > 0
            else [function for function in own if function not in whole]
        )
        for function in listed:
            terminalreporter.line(
                f"{family:<10} {function.split(':')[1]:<40} {_cell(counts, [function])}"
            )
        total = f"all ({len(whole)} of {len(own)} functions pass)"
        terminalreporter.line(f"{family:<10} {total:<40} {_cell(counts, own)}")


def _cell(counts, functions):
    return "/".join(
        f"{sum(counts[function, column] for function in functions):>4}" for column in range(3)
    )


@pytest.fixture
def in_torch(monkeypatch):
    """Runs a test without the accelerator."""
    monkeypatch.setattr(native, "_found", lambda: (None, "off"))


@pytest.fixture(scope="module", params=["C", "torch"])
def arithmetic(request):
    """Runs all tests of a module with the accelerator, and without it: what is set lasts from one to the next."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setattr(native, "_found", lambda: (None, "off"))
        elif not native.is_available():
            pytest.skip(f"the accelerator is {native.status()}")
        yield request.param
