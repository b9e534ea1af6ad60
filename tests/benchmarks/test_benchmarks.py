"""The benchmarks run, measure what they say, compare equal work, and have a place in the document. No test times."""

from __future__ import annotations

import argparse
import importlib
import itertools
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).parents[2]
FOLDER, DOC = ROOT / "benchmarks", ROOT / "docs" / "performance.md"
SCRIPTS = {path.stem for path in FOLDER.glob("*.py")}
ACCURACY = {
    "views",
    "breakdown",
    "causes",
    "accuracy",
    "banded",
    "correlated",
    "estimators",
    "front_door",
    "heads",
    "heavy_tailed",
    "holder",
    "interval_coverage",
    "least_squares",
    "ledger_file",
    "mapped_sgd",
    "near_linear",
    "nets",
    "papers",
    "public_data",
    "sparse",
    "steps",
    "user_level_risk",
}
# tests/examples/test_output_examples.py, tests/benchmarks/test_tables.py, tests/integrations, tests/docs/test_papers.py
# run all of them
ELSEWHERE = {"linear_models", "tables", "out_of_core_sgd", "out_of_core_fit", "paper_items"}
PARTS = {
    "blocks",
    "cases",
    "defaults",
    "timing",
    "variants",
    "peers",
    "anchors",
    "ours",
    "paper_adult",
    "paper_drawing",
    "paper_heavy",
    "paper_hoelder",
    "paper_output",
    "paper_users",
    "table_parts",
    "table_rows",
    "table_unseen",
    "table_users",
}
FOREIGN = {"peer_jax", "peer_fastdp"}  # run by interpreters of other environments


@pytest.fixture(scope="module")
def performance() -> Iterator[ModuleType]:
    """Imports the command; the scripts find each other beside themselves, as they do when they are run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "examples"))
        patch.syspath_prepend(str(FOLDER))
        before = set(sys.modules)
        import performance as module

        yield module
        for name in (SCRIPTS | {"adult"}) & (set(sys.modules) - before):
            del sys.modules[name]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


# -- they run ---------------------------------------------------------------------------------------------------------


def run(script: str, *options: str) -> str:
    """Runs a script as a user does, in another folder, and returns what it prints."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(FOLDER / f"{script}.py"), *options]
    return subprocess.run(
        command, check=True, capture_output=True, text=True, env=environment, cwd="/"
    ).stdout


@pytest.mark.weekly
def test_one_command_prints_every_table_of_the_document_and_replaces_them(
    tmp_path: Path,
) -> None:
    copy = tmp_path / "performance.md"
    copy.write_text(DOC.read_text(encoding="utf-8"), encoding="utf-8")
    printed = run(
        "performance",
        "--smoke",
        "--update",
        str(copy),
        "--python-jax",
        "",
        "--python-fastdp",
        "",
    )
    old, new = (dict(blocks(path.read_text(encoding="utf-8"))) for path in (DOC, copy))
    assert list(old) == list(new)
    for name, table in new.items():
        assert table in printed
        assert table != old[name]
    assert "not installed" in new["step-peers"]
    for name in ("step", "memory", "draws"):
        assert re.search(r"\| <= \d", old[name]), f"no goal is shown in {name}"


def blocks(text: str) -> list[tuple[str, str]]:
    return re.findall(r"<!-- table: (\S+) -->\n(.*?)\n<!-- end -->", text, re.DOTALL)


@pytest.mark.weekly
@pytest.mark.parametrize("script", sorted(ACCURACY))
def test_a_benchmark_of_accuracy_runs_in_smoke_mode(
    script: str, performance: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    module = importlib.import_module(script)
    module.main(["--smoke"])
    numbers = [
        float(word) for word in re.findall(r"(?<![\w.])\d+\.\d+", capsys.readouterr().out)
    ]
    assert len(numbers) > 4
    assert all(math.isfinite(number) for number in numbers)


def test_every_benchmark_is_run_by_a_test() -> None:
    suites = {
        "performance",
        "memory",
        "user_level",
        "equality",
        "step_time",
        "default_time",
        "loaders",
        "accountant",
        "noise",
        "gpu",
    }
    assert suites | ACCURACY | ELSEWHERE | PARTS | FOREIGN == SCRIPTS
    for script in suites | ACCURACY:
        assert "--smoke" in (FOLDER / f"{script}.py").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_script_for_a_gpu_prints_its_tables_and_names_what_fails() -> None:
    """On the CPU, under the interpreter; what is over time is left out by name."""
    printed = run("gpu", "--cpu", "--cases", "logistic")
    assert "noise on the device: in use" in printed
    assert re.search(r"^\| 100 \| [\d.]+ \| [\d.]+ \| [\d.]+ \|$", printed, re.MULTILINE)
    rows = re.findall(r"^\| logistic 20/32 \|.*", printed, re.MULTILINE)
    for algorithms in ("as they are", "deterministic"):
        known = rf"\| logistic 20/32 \| {algorithms} \| 32 \| 0 \| 0 \| \d+ \| \d+ \| \w+"
        assert re.match(known, rows.pop(0))
    assert len(rows) == 3
    assert "<= 2.5 | <= 1.0" in rows[0]
    assert rows[1].endswith("| - |")  # nothing is captured on the CPU
    assert "failed" not in printed
    late = run("gpu", "--cpu", "--cases", "logistic", "--minutes", "0")
    for part in (
        "noise for 10 numbers",
        "steps of logistic 20/32",
        "graphs of logistic 20/32",
        "memory of logistic 20/32",
    ):
        assert f"{part} was left out: its share of the time is over" in late


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_script_for_a_gpu_says_that_there_is_none() -> None:
    with pytest.raises(subprocess.CalledProcessError) as ended:
        run("gpu")
    assert ended.value.stderr == (
        "no CUDA device: nothing was run (--cpu shows that the script runs)\n"
    )


# -- equal work -------------------------------------------------------------------------------------------------------


def test_a_variant_that_does_not_clip_is_found_out(
    performance: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    equality = performance.equality
    monkeypatch.setitem(equality.VARIANTS, "hooks", equality.VARIANTS["plain"])
    monkeypatch.setattr(equality, "few", lambda chosen: chosen[:1])
    with pytest.raises(
        AssertionError, match=r"other work than the reference: \[\('logistic 20/32', 'hooks'"
    ):
        equality.tables(smoke=True)


@pytest.mark.parametrize("name", ["ours, mean", "ours, sum", "fit", "Opacus", "Opacus ghost"])
def test_a_default_that_does_not_clip_is_found_out(
    performance: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    equality = performance.equality
    case = sys.modules["cases"].everyday(smoke=True)[0]
    errors = equality.default_errors(case)
    assert max(errors.values()) <= equality.TOLERANCE, errors
    monkeypatch.setitem(equality.WAYS, name, equality.WAYS["plain"])
    with pytest.raises(AssertionError, match=re.escape(f"[('logistic 20/32', '{name}'")):
        equality.checked({case.name: equality.default_errors(case)})


def test_who_does_not_train_a_case_is_left_out_but_for_ours(
    performance: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    bench, case = performance.default_time, sys.modules["cases"].everyday(smoke=True)[0]
    ways = {"plain": bench.WAYS["plain"], "Opacus": bench.WAYS["fit"], "fit": bench.WAYS["fit"]}

    def slot(name: str, way: object) -> object:
        if name == "Opacus":
            raise NotImplementedError("no such layer")
        return performance.step_time.Slot(lambda repeats: 1.0)

    assert list(bench.measured(ways, case, slot, 1)) == ["plain", "fit"]
    assert f"Opacus refuses {case.name}: no such layer" in capsys.readouterr().err
    with pytest.raises(NotImplementedError):
        bench.measured({"fit": ways["fit"]}, case, lambda name, way: slot("Opacus", way), 1)


def test_a_run_is_made_to_its_last_step(performance: ModuleType) -> None:
    bench, made = performance.default_time, []

    def start(
        case: object, model: object, data: object, setting: object, steps: int
    ) -> Iterator:
        return (made.append(step) for step in range(steps))

    case, starts = sys.modules["cases"].everyday(smoke=True)[0], {"ours": []}
    bench.run_slot(case, range(700), starts, "ours", bench.Way(start)).run(1)
    assert made == [0, *range(21)]  # one step warms up
    bench.run_slot(case, range(64), starts, "ours", bench.Way(start)).run(1)
    assert len(made) == 23 + bench.LEAST_STEPS
    assert len(starts["ours"]) == 2


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.filterwarnings("ignore:In CPU autocast")
@pytest.mark.parametrize("place", [0, 1])
def test_further_cases_do_the_work_of_the_reference(performance: ModuleType, place: int) -> None:
    equality = performance.equality
    errors = equality.errors(sys.modules["cases"].more(smoke=True)[place])
    assert max(errors.values()) <= equality.TOLERANCE, errors


def test_the_reference_clips_half_of_the_records(performance: ModuleType) -> None:
    equality = performance.equality
    case = equality.cases(smoke=True)[0]
    model = case.model()
    clip, mean = equality.clip_and_reference(case, model)
    inputs, targets = case.batch
    rows = []
    for x, y in zip(inputs.double(), targets.double(), strict=True):
        model = case.model().double()
        case.loss(model(x[None]), y[None]).backward()
        rows.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    norms = torch.stack(rows).norm(dim=1)
    assert int((norms > clip).sum()) == len(rows) // 2
    expected = sum(
        row * min(1.0, clip / float(norm)) for row, norm in zip(rows, norms, strict=True)
    ) / len(rows)
    torch.testing.assert_close(mean, expected)


# -- what a figure is -------------------------------------------------------------------------------------------------


def test_a_ratio_is_taken_within_its_round(performance: ModuleType) -> None:
    timing = sys.modules["timing"]
    seconds = {
        "plain": [1.0, 10.0, 2.0],
        "other": [3.0, 20.0, 2.0],
    }  # a busy second round slows both
    ratio, milliseconds = timing.figures(seconds, "plain")["other"]
    assert (ratio.low, ratio.median, ratio.high) == (1.5, 2.0, 2.5)
    assert milliseconds == 3000.0
    assert timing.cell(ratio) == "2 [1.5, 2.5]"


def test_every_variant_takes_its_turn_in_every_round(performance: ModuleType) -> None:
    timing, turns = sys.modules["timing"], []

    def slot(name: str, seconds: float) -> object:
        return timing.Slot(
            lambda repeats: turns.append((name, repeats)) or seconds, seconds=1.0, most=7
        )

    found = timing.interleaved(
        {"a": slot("a", 0.5), "b": slot("b", 0.01), "c": slot("c", 3.0)}, rounds=4
    )
    assert found == {"a": [0.5] * 4, "b": [0.01] * 4, "c": [3.0] * 4}
    assert [sorted(turns[3 + 3 * k : 6 + 3 * k]) for k in range(4)] == [
        [("a", 2), ("b", 7), ("c", 1)]
    ] * 4


def test_setup_is_taken_out_of_the_time_of_fit(performance: ModuleType) -> None:
    variants, ends = sys.modules["variants"], itertools.count(5.0, 0.25)
    slot = variants.fit_slot(
        sys.modules["cases"].cases(smoke=True)[0], variants.Setting(), lambda: next(ends)
    )
    assert slot.run(10) == 0.25


def test_the_peak_counts_what_is_in_use_at_once(performance: ModuleType) -> None:
    def work() -> torch.Tensor:
        first = torch.empty(2**20)
        del first
        second, third = torch.empty(2**19), torch.empty(2**19)
        del second
        return third

    assert performance.memory.peak(work) == 2**22


def test_the_memory_of_dense_rows_is_seen(performance: ModuleType) -> None:
    case = sys.modules["cases"].everyday(smoke=True)[1]
    case = replace(case, records=case.size)  # all are drawn
    rows = 4 * case.size * sum(p.numel() for p in case.model().parameters())
    assert performance.memory.step_peak(case, "Opacus") >= rows
    assert performance.memory.step_peak(case, "plain") < rows / 2


# -- peers and document -----------------------------------------------------------------------------------------------


def test_a_peer_that_does_not_start_is_left_out(
    performance: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    peers, ends = sys.modules["peers"], tmp_path / "python"
    ends.write_text("#!/bin/sh\nexit 1\n", encoding="ascii")
    ends.chmod(0o700)
    args = argparse.Namespace(python_jax=str(tmp_path / "absent"), python_fastdp=str(ends))
    with peers.started(args) as found:
        assert list(found) == []
    assert re.findall(r"^(\w+) is left out", capsys.readouterr().out, re.MULTILINE) == [
        "jax",
        "fastdp",
    ]


def test_a_peer_takes_turns_and_says_its_update_in_a_process_of_its_own(
    performance: ModuleType, tmp_path: Path
) -> None:
    peers, case = sys.modules["peers"], sys.modules["cases"].cases(smoke=True)[0]
    talks = (
        tmp_path / "python"
    )  # in place of an interpreter: it is given the script of the peer, and runs this
    talks.write_text(
        f"#!/bin/sh\nexec {sys.executable} -S {tmp_path / 'stand_in.py'}\n", encoding="utf-8"
    )
    talks.chmod(0o700)
    (tmp_path / "stand_in.py").write_text(STAND_IN, encoding="utf-8")
    with peers.started(argparse.Namespace(python_jax="", python_fastdp=str(talks))) as (peer,):
        assert peer.versions == "stand-in"
        assert peer.slot(case, "fastDP", sys.modules["variants"].Setting()).run(4) == 0.5
        with pytest.raises(OSError, match="fastdp: no update"):
            peer.update(case, "fastDP", sys.modules["variants"].Setting())


STAND_IN = """
import json, os, sys
print(json.dumps({"versions": "stand-in"}), flush=True)
for line in sys.stdin:
    ask = json.loads(line)
    if ask["do"] == "prepare":
        found = {} if os.path.exists(ask["path"]) and ask["setting"]["clip"] == 1.0 else {"error": "no case"}
    else:
        found = {"seconds": 2.0 / ask["repeats"]} if ask["do"] == "time" else {"error": "no update"}
    print(json.dumps(found), flush=True)
"""


def test_a_table_is_put_in_its_place_only(performance: ModuleType) -> None:
    text = "a\n<!-- table: step -->\nold\n<!-- end -->\nb\n<!-- table: step-peers -->\nkept\n<!-- end -->\n"
    assert performance.replaced(text, "step", "| \\1 |") == text.replace("old", "| \\1 |")
    with pytest.raises(ValueError, match="must have one block"):
        performance.replaced(text, "memory", "")


def test_the_document_says_how_its_figures_were_made() -> None:
    text = DOC.read_text(encoding="utf-8")
    for fact in (
        "python benchmarks/performance.py --update docs/performance.md",
        "same round",
        "CPU time",
        "(B, 1)",
    ):
        assert fact in text
    for link in re.findall(r"\]\(([\w./]+)\)", text):
        assert (ROOT / "docs" / link).exists(), link
