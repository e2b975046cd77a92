"""What became of the suite on several versions of torch, from the reports that pytest writes.

Imported by ``noxfile.py``: only what Python has.
"""

from __future__ import annotations

import dataclasses
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path

COLUMNS = ("version", "passed", "failed", "skipped", "xfailed", "minutes", "")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One run of the suite.

    Attributes:
        version: of torch.
        good: whether the run ended well; a run may fail outside of all tests.
        seconds: what it took, with the installation.
    """

    version: str
    good: bool
    seconds: float
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    xfailed: int = 0

    def row(self) -> tuple[str, ...]:
        counts = (self.passed, self.failed, self.skipped, self.xfailed)
        verdict = "good" if self.good else "FAILED"
        return (self.version, *map(str, counts), f"{self.seconds / 60:.1f}", verdict)


def outcome(version: str, status: int, seconds: float, report: Path) -> Outcome:
    """What the JUnit report of pytest says.  Without a report, or with one that holds no test,
    the run has failed, whatever its exit status was."""
    counts = {"passed": 0, "failed": 0, "skipped": 0, "xfailed": 0}
    if report.exists():
        for case in ElementTree.parse(report).iter("testcase"):
            counts[_of(case)] += 1
    good = status == 0 and counts["failed"] == 0 and counts["passed"] > 0
    return Outcome(version, good, seconds, **counts)


def _of(case: ElementTree.Element) -> str:
    if case.find("failure") is not None or case.find("error") is not None:
        return "failed"
    skipped = case.find("skipped")
    if skipped is None:
        return "passed"
    return "xfailed" if skipped.get("type") == "pytest.xfail" else "skipped"


def table(outcomes: Sequence[Outcome]) -> str:
    """One row for each run."""
    rows = [COLUMNS, *(o.row() for o in outcomes)]
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ("  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)
