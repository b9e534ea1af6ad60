"""What users install: one version number, typed, with a README whose commands CI runs."""

from __future__ import annotations

import configparser
import os
import re
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import pytest

import torch_dpsco

ROOT = Path(__file__).parents[1]
TEST_COMMAND = (
    "python -m venv .venv && .venv/bin/pip install -e '.[test]' && .venv/bin/python -m pytest"
)
JOB_COMMAND = "python -m venv .venv && .venv/bin/pip install . && .venv/bin/python examples/logistic_regression.py"


@pytest.fixture(scope="module")
def config():
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg", encoding="utf-8")
    return parser


def _marked_command(name: str) -> str:
    """Returns the code block after the comment `<!-- ci:NAME -->` of the README, as .ci/run reads it."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(
        rf"^<!-- ci:{name} -->\n+```\w*\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL
    )
    assert len(blocks) == 1, (
        f"README.md needs exactly one code block after <!-- ci:{name} --> (got {len(blocks)})"
    )
    return blocks[0].strip()


def test_the_package_and_setup_cfg_have_the_same_version(config):
    assert torch_dpsco.__version__ == config["metadata"]["version"]


@pytest.mark.parametrize("home", ["", "https://example.org/we/torch_dpsco"])
def test_the_description_of_a_wheel_has_no_link_that_needs_the_repository_beside_it(home):
    said = subprocess.run(
        [sys.executable, "setup.py", "-q", "--long-description"],
        cwd=ROOT,
        env={**os.environ, "HOME_PAGE": home},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    links = re.findall(r"\]\(([^)]*)\)", said)
    assert all(link.startswith("https://") for link in links)
    assert "<!--" not in said
    assert "A table" in said
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(links) == (len(re.findall(r"\]\(", readme)) if home else 0)


def test_the_changelog_has_an_entry_for_the_version(config):
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## .*$", changelog, flags=re.MULTILINE)
    assert any(config["metadata"]["version"] in heading for heading in headings)


def test_the_type_marker_is_shipped(config):
    assert (ROOT / "torch_dpsco" / "py.typed").is_file()
    assert "py.typed" in config["options.package_data"]["torch_dpsco"].split()


def test_files_of_data_beside_the_modules_are_shipped(config):
    shipped = config["options.package_data"]["torch_dpsco"].split()
    found = (ROOT / "torch_dpsco").rglob("*.toml")
    assert {str(path.relative_to(ROOT / "torch_dpsco")) for path in found} <= {*shipped}


def test_every_folder_with_modules_is_a_package_and_so_is_installed():
    # find: takes folders with an __init__.py only; a folder without one would be missing from the wheel.
    folders = {path.parent for path in (ROOT / "torch_dpsco").rglob("*.py")}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").is_file()] == []


def test_the_dev_extra_contains_the_test_extra(config):
    extras = config["options.extras_require"]
    assert set(extras["test"].split()) <= set(extras["dev"].split())


def test_the_lowest_versions_that_are_run_are_those_that_are_declared(config):
    pinned = dict(
        re.findall(
            r"^([\w-]+)==(\d+\.\d+)",
            (ROOT / ".ci" / "lowest.txt").read_text(encoding="utf-8"),
            re.MULTILINE,
        )
    )
    extras = config["options.extras_require"]
    names = (
        "examples",
        "logging",
        "sklearn",
        "accelerate",
        "lightning",
        "parquet",
        "tables",
        "transformers",
    )
    wanted = "\n".join([config["options"]["install_requires"], *map(extras.get, names)])
    assert pinned == dict(re.findall(r"^([\w-]+)>=(\d+\.\d+)$", wanted, re.MULTILINE))
    assert {"torch", "opacus", "numpy", "scipy", "scikit-learn", "matplotlib", "wandb"} < set(
        pinned
    )


def test_the_oldest_python_that_is_declared_is_the_one_that_the_weekly_run_takes(config):
    oldest = config["options"]["python_requires"].removeprefix(">=")
    assert f"OLDEST:-python{oldest}" in (ROOT / ".ci" / "weekly").read_text(encoding="utf-8")
    assert f"Programming Language :: Python :: {oldest}" in config["metadata"]["classifiers"]


def test_the_licence_is_the_full_apache_text(config):
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert config["metadata"]["license"] == "Apache-2.0"
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text


def test_the_readme_states_the_command_that_ci_runs_as_the_tests():
    assert _marked_command("test") == TEST_COMMAND


def test_the_readme_states_the_command_that_ci_runs_as_the_main_job():
    assert _marked_command("job") == JOB_COMMAND
    assert (ROOT / "examples" / "logistic_regression.py").is_file()


def test_the_tiers_are_marks_at_the_tests(tmp_path):
    loader = SourceFileLoader("tiers", str(ROOT / ".ci" / "tiers"))
    tiers = module_from_spec(spec_from_loader("tiers", loader))
    loader.exec_module(tiers)
    assert tiers.mark(*tiers.tier([0.01] * 3), 3) == ""
    assert tiers.mark(*tiers.tier([2.0]), 1) == "@pytest.mark.slow"
    assert tiers.mark(*tiers.tier([9.0] * 4), 4) == "@pytest.mark.weekly"
    several = tiers.mark(*tiers.tier([0.05] * 9), 9)
    assert several == "@pytest.mark.cases(4, 2)"
    file = tmp_path / "test_it.py"
    file.write_text(
        '"""It."""\n\nimport os\n\n\n@pytest.mark.slow\n@given(1)\ndef test_a(x):\n    pass\n'
    )
    tiers.write(file, {"test_a": several})
    assert f"\n\n\n{several}\n@given(1)\ndef test_a(x):\n" in file.read_text()
    assert "\nimport pytest\n" in file.read_text()
    tiers.write(file, {"test_a": ""})
    assert "\n\n\n@given(1)\ndef test_a(x):\n" in file.read_text()


@pytest.mark.weekly
def test_the_size_counts_lines_of_code_only(tmp_path):
    docstrings = '"""Of no\n\nlines."""\n\n# a comment\n'
    code = (
        'X = """\n\nthree"""\n\n\ndef f():\n    """None."""\n    return [\n        X,\n    ]\n'
    )
    (tmp_path / "few.py").write_text(docstrings + code)
    size = [sys.executable, str(ROOT / ".ci" / "size")]
    of_few = subprocess.run(
        [*size, str(tmp_path)], capture_output=True, text=True, check=True
    ).stdout
    assert of_few.splitlines()[:2] == ["7 lines of code, 13 tokens in 1 files", "     7 few.py"]
    of_package = subprocess.run(
        [*size, "--largest", "3"], capture_output=True, text=True, check=True
    ).stdout
    assert re.match(
        r"\d+ lines of code, \d+ tokens in \d+ files\n( +\d+ [\w/]+\.py\n){3} +\d\.\d+ tokens a line",
        of_package,
    )
