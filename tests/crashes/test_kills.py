"""Kills, full disks, Ctrl-C and damage, in numbers: the tables of docs/accounting.md."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.crashes import damage, kills
from tests.crashes.kills import Count, Kind, Output, chain


def table(*arguments: str) -> dict[str, dict[str, int]]:
    """Returns the rows of a table, which a process of its own prints, since it forks."""
    command = [sys.executable, "-W", "ignore", "-m", *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]
    )
    found: dict[str, dict[str, int]] = {}
    for line in done.stdout.splitlines():
        name, *numbers = line.split("  ")
        assert numbers, done.stdout  # an error of a run
        found[name] = {
            what: int(number) for what, number in (pair.split(" ") for pair in numbers)
        }
    return found


WRONG = ("under_charged", "not_resumable", "unclear")


@pytest.mark.weekly
@pytest.mark.parametrize(
    ("how", "tries"), [("kill", 10_000), ("full", 1_000), ("interrupt", 1_000)]
)
def test_whatever_ends_a_run_it_goes_on_and_nothing_is_lost_without_a_word(
    how: str, tries: int
) -> None:
    """10,000 kills at every call that writes, of all kinds: 0.3 s of a core each, 50 minutes; the others a tenth."""
    found = table("tests.crashes.kills", "--how", how, "--tries", str(tries))
    assert set(kills.kinds()) < set(found)
    assert found["all"]["tries"] >= tries
    for name, row in found.items():
        assert not any(row[what] for what in WRONG), (name, row)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "full", "interrupt"])
def test_some_ends_of_two_kinds(how: str) -> None:
    found = table(
        "tests.crashes.kills", "--how", how, "--tries", "12", "holder-poisson", "blocks"
    )
    assert found["all"]["tries"] >= 12
    assert not any(found["all"][what] for what in WRONG), found


class Forgetful(Kind):
    """Shows another answer each time it is run, and charges nothing."""

    def run(self, folder: Path) -> None:
        """Shows how often it was run."""
        output = Output(folder)
        output.add(shown=len(output.all("shown")))

    def check(self, folder: Path, output: Output, count: Count) -> None:
        """As of paid releases."""
        count.under_charged += len(set(output.all("shown"))) > 1


class Failing(Kind):
    """Ends with an error that is none of ours."""

    def run(self, folder: Path) -> None:
        """Fails."""
        raise ZeroDivisionError

    def check(self, folder: Path, output: Output, count: Count) -> None:
        """Nothing is to be checked."""


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_what_is_wrong_is_counted() -> None:
    forgetful, failing = Count(), Count()
    chain(Forgetful("forgetful"), "kill", 10**6, random.Random(1), forgetful)
    assert forgetful.under_charged == 1
    chain(Failing("failing"), "kill", 10**6, random.Random(1), failing)
    assert (failing.not_resumable, failing.unclear) == (1, 1)


@pytest.mark.slow
def test_damage_is_found_or_harmless_but_where_all_copies_are_gone() -> None:
    found = table("tests.crashes.damage", "--every", "199")
    documented = {name for name in found if name.startswith("DOCUMENTED")}
    assert len(documented) == 2
    for name in set(found) - documented:
        assert not any(found[name][what] for what in WRONG), (name, found[name])
    for name in documented:
        assert found[name]["under_charged"] == found[name]["opened"] == found[name]["tries"]
    assert set(damage.kinds(1)) <= set(found)


@pytest.mark.weekly
def test_every_bit_of_a_ledger_file_is_found_or_harmless() -> None:
    """About two minutes."""
    found = table("tests.crashes.damage")
    assert found["a bit of the file"]["tries"] > 10_000
    for name in ("a bit of the file", "a bit of the file, no mark", "a bit of the mark"):
        assert not any(found[name][what] for what in WRONG), (name, found[name])
