"""What does not equal eager, or is not captured, on which torch: the one table.

A test that an entry names must fail there (``xfail``, strict), so that the table
holds nothing that has come to work; pytest counts them as ``xfailed``.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch


@dataclass(frozen=True)
class Difference:
    """Tests of one case that fail for one reason.

    Attributes:
        case: name of the case, or of the test where it has none.
        reason: why, and what a user sees instead.
        runs: patterns of ``front_end-replay``, or of ``front_end`` for a test without replays.
        since, before: versions of torch between which it holds.
        test: name of the test function.
    """

    case: str
    reason: str
    runs: tuple[str, ...] = ("*",)
    since: str = "2.6"
    before: str = "99"
    test: str = "*"

    def holds_for(self, test: str, case: str, run: str) -> bool:
        return (
            self.case == case
            and fnmatchcase(test, self.test)
            and any(fnmatchcase(run, pattern) for pattern in self.runs)
            and self.since <= torch.__version__ < self.before
        )


DIFFERENCES: tuple[Difference, ...] = (
    Difference(
        "a_buffer_assigned_within_forward",
        "make_fx over functional_call loses what is assigned to a buffer, as functional_call does",
        runs=("make_fx-*",),
        test="test_equals_eager",
    ),
)


def reasons(test: str, case: str, run: str) -> list[str]:
    """Why this run of this case is expected to fail; empty where it is not."""
    return [entry.reason for entry in DIFFERENCES if entry.holds_for(test, case, run)]
