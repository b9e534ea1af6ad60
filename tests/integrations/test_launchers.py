"""Launchers of others: an unchanged `dp.fit` script is one run on the two processes that they start."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.launched import KILLED_AT, STEPS

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SECONDS = 180  # a hang must fail
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
LAUNCHERS = {
    "torchrun": TORCHRUN,
    "accelerate": TORCHRUN,
    "fabric": (),
    "ray": (),
    "ray_data": (),
    "spark": (),
}
PACKAGES = {
    "fabric": "lightning",
    "accelerate": "accelerate",
    "ray": "ray",
    "ray_data": "ray",
    "spark": "pyspark",
}


def skip_without(kind: str) -> None:
    package = PACKAGES.get(kind)
    if package is not None and importlib.util.find_spec(package) is None:
        pytest.skip(
            f"{package} is not installed: pip install '.[{package.removeprefix('py')}]', or .ci/weekly engines"
        )
    if kind == "spark" and shutil.which("java") is None:
        pytest.skip("Spark needs Java, which is not there: apt-get install default-jre-headless")


def run(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    there = (
        os.environ
        | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYSPARK_PYTHON": sys.executable}
        | variables
    )
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, *command], env=there, cwd=ROOT, **pipes) as process:
        try:
            output, errors = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun then ends its own processes
            pytest.fail(f"{command} hangs: {process.communicate()[1][-3000:]}")
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def launch(
    kind: str, folder: Path, *launcher: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    return run(*launcher, "-m", "tests.integrations.launched", kind, str(folder), **variables)


def ranks(folder: Path) -> list[dict[str, Any]]:
    return [
        json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("rank-*"))
    ]


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("kind", LAUNCHERS)
def test_two_processes_of_a_launcher_make_one_run(kind: str, tmp_path: Path) -> None:
    skip_without(kind)
    done = launch(kind, tmp_path, *LAUNCHERS[kind])
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = ranks(tmp_path)
    assert first["processes"] == 2
    assert first["steps"] == first["charged"] == STEPS
    assert 1.9 < first["epsilon"] <= 2.0
    assert (first.pop("drawn"), second.pop("drawn")) == (STEPS, 0)  # noise, once per step
    assert first == second


def test_the_ways_of_ray_to_split_are_as_the_page_says(tmp_path: Path) -> None:
    """docs/integrations/parquet.md: equal shards leave records out, and which is decided by how many there are."""
    skip_without("ray_data")
    done = launch("ray_splits", tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    (ways,) = ranks(tmp_path)
    flat = {name: [k for shard in shards for k in shard] for name, shards in ways.items()}
    assert flat["split"] == flat["indices"] == sorted(flat["streaming"]) == list(range(20))
    for name in ("equal", "streaming equal"):
        assert [len(shard) for shard in ways[name]] == [6, 6, 6], name


@pytest.mark.weekly
def test_a_killed_rank_ends_the_others_with_an_error(tmp_path: Path) -> None:
    """Rank 0 finds out by itself: torchrun would look after it only a minute later."""
    done = launch("killed", tmp_path, *TORCHRUN, "--monitor-interval", "15")
    assert done.returncode != 0
    (only,) = ranks(tmp_path)
    assert only["error"].startswith(
        "the other ranks cannot be reached, one may have ended or failed"
    )
    assert "SequenceError" in done.stderr


@pytest.mark.slow
def test_a_run_of_two_processes_goes_on_after_a_crash(tmp_path: Path) -> None:
    """The step of the crash was charged, and may have been released: all ranks lose it, and none is charged again."""
    # else torch 2.14 looks for the ranks at the addresses that they had before
    new_addresses = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    done = launch(
        "restarted", tmp_path, *TORCHRUN, "--standalone", "--max-restarts", "1", **new_addresses
    )
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = ranks(tmp_path)
    assert first == second
    assert first["lost"] == KILLED_AT + 1 - 3  # the checkpoint is of step 3
    assert first["since"] == KILLED_AT + 1
    assert first["steps"] == first["charged"] == STEPS
    assert 1.9 < first["epsilon"] <= 2.0


@pytest.mark.weekly
@pytest.mark.parametrize("name", ["torchrun", "ray_train", "spark"])
def test_an_example_trains_one_model_on_two_processes(name: str) -> None:
    kind = name.removesuffix("_train")
    skip_without(kind)
    path = ROOT / "examples" / f"{name}.py"
    assert len(path.read_text(encoding="utf-8").splitlines()) < 100
    done = run(*LAUNCHERS[kind], str(path), "--quick")
    assert done.returncode == 0, done.stderr[-3000:]
    said = done.stdout[done.stdout.index("2 processes, 192 steps") :].splitlines()
    accuracy, auc = map(float, said[2].removeprefix("private").split())
    baseline = tuple(map(float, said[3].removeprefix("not private").split()))
    assert baseline == (0.8468, 0.8990)
    assert 0.7 < auc < 0.91
    assert accuracy > 0.7
    assert 0.99 < float(said[4].split()[2]) <= 1.0


@pytest.mark.weekly
def test_the_torchrun_example_needs_no_launcher() -> None:
    done = run(str(ROOT / "examples" / "torchrun.py"), "--quick")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "\n1 processes, 192 steps\n" in done.stdout


def test_the_example_of_shards_starts_its_own_processes() -> None:
    done = run(str(ROOT / "examples" / "shards.py"), "--quick")
    assert done.returncode == 0, done.stderr[-3000:]
    processes, weights, accuracy, spent = done.stdout.splitlines()
    assert processes == "2 processes, 1 of 1 steps"
    whole, held = (int(n.replace(",", "")) for n in (weights.split()[1], weights.split()[-1]))
    assert 0.5 * whole <= held < 0.51 * whole
    assert float(accuracy.split()[-1]) > 0.7
    assert 0.99 < float(spent.split()[2]) <= 1.0
