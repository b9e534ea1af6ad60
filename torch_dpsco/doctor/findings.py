"""What the doctor reports: findings, and the diagnosis that combines them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from textwrap import fill, indent

from torch_dpsco import _validate as check
from torch_dpsco._doors import check_fields, typed
from torch_dpsco.errors import PrivacyError

SEVERITIES = ("critical", "error", "warning")
"""critical: the guarantee is broken or void; error: silently wrong, or will crash; warning: works, but risky."""

_PAGE = "docs/pitfalls.md"
_WIDTH = 100


@dataclass(frozen=True)
class Finding:
    """One mistake in a training script.

    Args:
        severity: one of `SEVERITIES`.
        name: slug of the mistake's heading in docs/pitfalls.md.
        evidence: what was measured or read, with its numbers; computed from a synthetic batch, never from data.
        fix: the line or lines to change.

    Example:
        >>> print(Finding("warning", "no-accountant", "step_hook is None", "do not replace step_hook").link)
        docs/pitfalls.md#no-accountant
    """

    severity: str
    name: str
    evidence: str
    fix: str

    def __post_init__(self) -> None:
        check_fields(self)
        check.choice(SEVERITIES, severity=self.severity)

    @property
    def link(self) -> str:
        """Where the mistake is explained."""
        return f"{_PAGE}#{self.name}"

    def __str__(self) -> str:
        found = fill(self.evidence, _WIDTH, break_long_words=False, break_on_hyphens=False)
        parts = {"found": found, "fix": self.fix, "see": self.link}  # a fix is code, which keeps its lines
        lines = [f"  {key:<6} " + text.replace("\n", "\n" + 9 * " ") for key, text in parts.items()]
        return "\n".join([f"{self.severity.upper()}: {self.name.replace('-', ' ')}", *lines])


@dataclass(frozen=True)
class Diagnosis:
    """All findings about a training script, the worst first.

    Args:
        findings: sorted by severity when built by `Diagnosis.of`.

    Example:
        >>> diagnosis = Diagnosis.of([Finding("critical", "no-accountant", "step_hook is None", "leave it alone")])
        >>> diagnosis.healthy, len(diagnosis.critical)
        (False, 1)
        >>> print(Diagnosis.of([]))
        healthy: nothing found
    """

    findings: tuple[Finding, ...]

    @classmethod
    @typed
    def of(cls, findings: Iterable[Finding]) -> Diagnosis:
        """Returns the diagnosis of findings in any order; equal ones are kept once."""
        return cls(tuple(sorted(dict.fromkeys(findings), key=lambda finding: SEVERITIES.index(finding.severity))))

    @property
    def healthy(self) -> bool:
        """Whether nothing was found. No proof of privacy: the doctor knows the mistakes it looks for."""
        return not self.findings

    @property
    def critical(self) -> tuple[Finding, ...]:
        """The findings that break or void the guarantee."""
        return tuple(finding for finding in self.findings if finding.severity == "critical")

    def __str__(self) -> str:
        if self.healthy:
            return "healthy: nothing found"
        counts = {severity: sum(f.severity == severity for f in self.findings) for severity in SEVERITIES}
        title = ", ".join(f"{count} {severity}" for severity, count in counts.items() if count)
        return "\n\n".join([title, *map(str, self.findings)])

    @typed
    def raise_if(self, severities: Iterable[str] = ("critical", "error")) -> None:
        """Raises for the worst finding of the given severities, naming evidence, fix and how many more there are.

        Raises:
            PrivacyError: the worst one is critical.
            ValueError: the worst one is an error or a warning; or an unknown severity.
        """
        wanted = [check.choice(SEVERITIES, severities=severity) for severity in severities]
        found = [finding for finding in self.findings if finding.severity in wanted]
        if found:
            more = f"\n(and {len(found) - 1} more: print the diagnosis)" if len(found) > 1 else ""
            kind = PrivacyError if found[0].severity == "critical" else ValueError
            raise kind(f"the training script has a mistake:\n{indent(str(found[0]), '  ')}{more}")
