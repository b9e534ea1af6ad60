"""Findings and diagnoses: order, text, exceptions; and the page that explains every mistake."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from torch_dpsco.diagnosis import Diagnosis, Finding
from torch_dpsco.errors import PrivacyError

ROOT = Path(__file__).parents[2]
WARNING = Finding("warning", "not-probed", "no design", "give n=")
ERROR = Finding("error", "loss-reduction", "2 against 1", "use mean\nor sum")
CRITICAL = Finding("critical", "no-accountant", "step_hook is None", "leave the hook alone")


def names_in_the_code() -> set[str]:
    """Returns the names of all findings that the checks build."""
    place, found = {"Finding": 1, "critical": 0, "error": 0, "warning": 0, "advice": 0}, set()
    folder = ROOT / "torch_dpsco" / "diagnosis"
    texts = [(folder / name).read_text(encoding="utf-8") for name in ("checks.py", "advice.py")]
    for node in ast.walk(
        ast.parse("\n".join(texts).replace("from __future__ import annotations", ""))
    ):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in place
        ):
            found.add(ast.literal_eval(node.args[place[node.func.id]]))
    return found


def headings() -> list[str]:
    return re.findall(
        r"^### (.*)$",
        (ROOT / "docs" / "mistakes.md").read_text(encoding="utf-8"),
        flags=re.MULTILINE,
    )


def anchor(heading: str) -> str:
    """Returns the anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_every_finding_has_its_heading_and_every_heading_its_finding():
    assert sorted(anchor(heading) for heading in headings()) == sorted(names_in_the_code())


def test_findings_are_sorted_by_severity_and_kept_once():
    diagnosis = Diagnosis.of([WARNING, ERROR, CRITICAL, WARNING])
    assert diagnosis.findings == (CRITICAL, ERROR, WARNING)
    assert diagnosis.critical == (CRITICAL,)
    assert not diagnosis.healthy


def test_a_report_has_a_block_per_finding_with_evidence_fix_and_link():
    blocks = str(Diagnosis.of([ERROR, CRITICAL])).split("\n\n")
    assert blocks[0] == "1 critical, 1 error"
    assert blocks[1].splitlines() == [
        "CRITICAL: no accountant",
        "  found  step_hook is None",
        "  fix    leave the hook alone",
        "  see    docs/mistakes.md#no-accountant",
    ]
    assert blocks[2].splitlines()[2:4] == ["  fix    use mean", "         or sum"]


def test_raise_if_names_the_worst_finding_and_its_fix():
    with pytest.raises(PrivacyError, match="step_hook is None") as caught:
        Diagnosis.of([WARNING, ERROR, CRITICAL]).raise_if()
    assert "leave the hook alone" in str(caught.value)
    assert "and 1 more" in str(caught.value)


def test_raise_if_overlooks_warnings():
    found = Diagnosis.of([WARNING])
    found.raise_if()
    assert found.findings == (WARNING,)


def test_advice_comes_last_and_leaves_a_script_healthy():
    advice = Finding("advice", "no-norm", "2 convolutions", "GroupNorm")
    assert Diagnosis.of([advice, WARNING]).findings == (WARNING, advice)
    assert Diagnosis.of([advice]).healthy
    assert "ADVICE: no norm" in str(Diagnosis.of([advice]))
    Diagnosis.of([advice]).raise_if()


def test_raise_if_raises_value_errors_for_what_leaves_the_guarantee_intact():
    with pytest.raises(ValueError, match="2 against 1"):
        Diagnosis.of([ERROR, WARNING]).raise_if()


def test_unknown_severities_are_refused():
    with pytest.raises(ValueError, match="severity must be one of"):
        Finding("fatal", "no-noise", "x", "y")
