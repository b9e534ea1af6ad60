"""The checks of the privacy core can fail: each passes on the package and fails on a package with one line spoiled.

Also: every test that a comment of the package names is there.
"""

from __future__ import annotations

import ast
import re
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import torch_dpsco as dp
from tests import checks
from tests.streams import seeded
from torch_dpsco import native
from torch_dpsco.accounting.designs import Poisson
from torch_dpsco.rows import batch
from torch_dpsco.step import oracle as clipped
from torch_dpsco.step import step as holding
from torch_dpsco.step.batch import LogicalBatch

ROOT = Path(__file__).parent.parent
Patch = pytest.MonkeyPatch
Oracle = clipped.ClippedMean


def assert_caught(check: Callable[[], None], mutate: Callable[[Patch], None]) -> None:
    check()
    with Patch.context() as patch:
        mutate(patch)
        with pytest.raises(AssertionError):
            check()
    check()


def nothing(*args: object, **kwargs: object) -> None:
    """What a removed call does."""


def test_removed_clip_is_caught():
    def mutate(patch: Patch) -> None:
        patch.setattr(clipped, "clip_weights", lambda norms, clip: torch.ones_like(norms))

    assert_caught(checks.check_that_no_row_passes_the_clip, mutate)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["in C", "in torch"])
def test_removed_clip_of_linear_rows_is_caught(where, request):
    if where == "in torch":
        request.getfixturevalue("in_torch")
    elif not native.is_available():
        pytest.skip(f"the accelerator is {native.status()}")
    in_c = native.Linear.sum

    def mutate(patch: Patch) -> None:
        if where == "in C":  # where the rows are clipped, if they are in C
            patch.setattr(
                native.Linear, "sum", lambda self, limit, *more: in_c(self, 1e9, *more)
            )
        else:
            patch.setattr(clipped, "_ROUNDED", 1e9)

    assert_caught(checks.check_that_no_row_of_a_fused_fit_passes_the_clip, mutate)


def test_a_clip_of_parts_instead_of_rows_is_caught():
    def mutate(patch: Patch) -> None:
        clip_weights = clipped.clip_weights
        patch.setattr(
            clipped, "clip_weights", lambda norms, clip: clip_weights(norms.sqrt(), clip)
        )

    assert_caught(checks.check_that_no_row_passes_the_clip, mutate)


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("factor", [0.5, 0.95, 1.05])
def test_halved_noise_is_caught(factor):
    def mutate(patch: Patch) -> None:
        noise_std = Oracle.noise_std.fget
        patch.setattr(Oracle, "noise_std", property(lambda self: factor * noise_std(self)))

    assert_caught(checks.check_that_the_noise_is_what_the_ledger_says, mutate)


def test_skipped_charge_is_caught():
    assert_caught(
        checks.check_that_every_release_is_charged,
        lambda patch: patch.setattr(dp.Accountant, "authorize", nothing),
    )


def test_kept_refused_batch_is_caught():
    def discards_nothing(patch: Patch) -> None:
        patch.setattr(Oracle, "discard", nothing)
        patch.setattr(LogicalBatch, "drop", nothing)

    for mutate in (
        discards_nothing,
        lambda patch: patch.setattr(dp.PrivateOptimizer, "_give_up", nothing),
    ):
        assert_caught(checks.check_that_a_refused_batch_is_forgotten, mutate)


def test_copies_draw_fresh_noise():
    def mutate(patch: Patch) -> None:
        set_state = dp.PrivateOptimizer.__setstate__

        def from_stream(self, state):
            set_state(self, state)
            self._noise = seeded(0)

        patch.setattr(dp.PrivateOptimizer, "__setstate__", from_stream)

    assert_caught(checks.check_that_copies_draw_noise_of_their_own, mutate)


def test_noise_before_the_charge_is_caught():
    def charges_afterwards(patch: Patch) -> None:
        authorize, release = dp.Accountant.authorize, Oracle.release
        owed = []

        def charge_last(self, generator):
            answer = release(self, generator)
            authorize(*owed.pop())
            return answer

        patch.setattr(dp.Accountant, "authorize", lambda *args, **_: owed.append(args))
        patch.setattr(Oracle, "release", charge_last)

    def draws_first(patch: Patch) -> None:
        observe = dp.PrivateOptimizer._observe

        def with_noise(self, *args, **options):
            self._noise.read(1)
            return observe(self, *args, **options)

        patch.setattr(dp.PrivateOptimizer, "_observe", with_noise)

    for mutate in (charges_afterwards, draws_first):
        assert_caught(checks.check_that_the_charge_precedes_the_noise, mutate)


def test_unmasked_rows_are_caught(in_torch):  # in C: `test_native.test_a_wrong_kernel_is_caught`
    assert_caught(
        checks.check_that_dropped_rows_are_masked,
        lambda patch: patch.setattr(batch, "_LEAST_NORMAL", -1.0),
    )


def test_realized_batch_size_as_divisor_is_caught():
    def mutate(patch: Patch) -> None:
        observe = Oracle.observe

        def with_realized_size(self, rows, users=None):
            self.__dict__["batch_size"] = len(rows)
            observe(self, rows, users)

        patch.setattr(Oracle, "observe", with_realized_size)

    assert_caught(checks.check_that_the_divisor_is_public, mutate)


def _without_step(patch: Patch) -> None:
    close = LogicalBatch.close
    patch.setattr(
        LogicalBatch,
        "close",
        lambda self, chunk: close(self, chunk) if chunk.rows else self.finish(),
    )


def _without_charge(patch: Patch) -> None:
    authorize, draw_event = dp.Accountant.authorize, Poisson.draw_event
    last = []
    patch.setattr(
        Poisson,
        "draw_event",
        lambda self, base, draw: last.append(draw) or draw_event(self, base, draw),
    )
    patch.setattr(
        dp.Accountant,
        "authorize",
        lambda self, event, **_: authorize(self, event, min(last[-1].size, 1)),
    )


def _without_noise(patch: Patch) -> None:
    release = Oracle.release

    def quiet(self, generator):
        answer = release(self, generator) if self._means else None
        return answer or clipped.Release([torch.zeros(shape) for shape in self._shapes])

    patch.setattr(Oracle, "release", quiet)


@pytest.mark.cases(2, 1)
@pytest.mark.parametrize("mutate", [_without_step, _without_charge, _without_noise])
def test_a_free_empty_batch_is_caught(mutate):
    assert_caught(checks.check_that_an_empty_batch_is_like_any_other, mutate)


def test_rows_kept_by_zero_grad_are_caught():
    assert_caught(
        checks.check_that_zero_grad_forgets_rows,
        lambda patch: patch.setattr(holding, "clear_rows", nothing),
    )


def test_rows_kept_by_a_step_are_caught():
    assert_caught(
        checks.check_that_a_step_uses_up_its_rows,
        lambda patch: patch.setattr(batch, "clear_rows", nothing),
    )


# -- comments that name tests -----------------------------------------------------------------------------------------


def comment_blocks(path: Path) -> Iterator[str]:
    """Yields the comments of a file, those on lines of their own joined with the ones right below."""
    block, last = "", -1
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type != tokenize.COMMENT:
                continue
            row, text = token.start[0], token.string.lstrip("# ")
            alone = token.line.strip().startswith("#")
            if alone and row == last + 1 and not text.startswith("PRIVACY:"):
                block += " " + text
            else:
                yield block
                block = text
            last = row if alone else -1
    yield block


COMMENTS = [
    (f"{path.relative_to(ROOT)}", block)
    for path in sorted((ROOT / "torch_dpsco").rglob("*.py"))
    for block in comment_blocks(path)
]
PRIVACY = [(where, block) for where, block in COMMENTS if block.startswith("PRIVACY:")]


def names_of_tests() -> set[str]:
    """Test functions, and test files without their ending."""
    paths = list((ROOT / "tests").rglob("test_*.py"))
    nodes = (
        node for path in paths for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    )
    return {path.stem for path in paths} | {
        node.name for node in nodes if isinstance(node, ast.FunctionDef)
    }


@pytest.mark.slow
def test_every_test_that_a_comment_names_exists():
    named = {
        (where, name) for where, block in COMMENTS for name in re.findall(r"\btest_\w+", block)
    }
    assert len(named) >= 30
    existing = names_of_tests()
    assert not sorted((where, name) for where, name in named if name not in existing)


def test_every_test_that_a_page_names_exists():
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    named = {
        (f"{page.relative_to(ROOT)}", name)
        for page in pages
        for name in re.findall(r"`(test_\w+)`", page.read_text(encoding="utf-8"))
    }
    assert len(named) >= 300
    existing = names_of_tests()
    assert not sorted((page, name) for page, name in named if name not in existing)


def test_every_privacy_comment_names_its_test():
    assert len(PRIVACY) >= 30
    assert not [
        (where, block) for where, block in PRIVACY if not re.search(r"\btest_\w+", block)
    ]


def test_every_margin_names_its_lemma():
    """A comment that says "margin" names a section of the proofs, and the section is there."""
    margins = [
        (where, block) for where, block in COMMENTS if re.search(r"^margin:|; margin of", block)
    ]
    assert len(margins) >= 30
    for where, block in margins:
        cited = re.findall(r"docs/proofs/(\w+\.md)#([\w-]+)", block)
        assert cited, (where, block)
        for page, anchor in cited:
            text = (ROOT / "docs" / "proofs" / page).read_text(encoding="utf-8")
            headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
            assert anchor in {
                re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings
            }, where


def test_comments_are_joined_over_lines(tmp_path):
    path = tmp_path / "module.py"
    path.write_text(
        "x = 1\n# PRIVACY: one\n# two (test_a)\n# PRIVACY: three\ny = 2  # PRIVACY: (test_b)\n# four\n"
    )
    found = [block for block in comment_blocks(path) if block]
    assert found == ["PRIVACY: one two (test_a)", "PRIVACY: three", "PRIVACY: (test_b)", "four"]
