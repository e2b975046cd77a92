"""The README's table of what equals eager, made of what passed in the run of the suite."""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

README = Path(__file__).parents[1] / "README.md"
PARITY = str(Path(__file__).with_name("parity"))
BEGIN, END = "<!-- feature table -->\n", "<!-- end of feature table -->\n"
#: The README shows the torch that `make test` uses.
TORCH = "2.13.0"
SUITES = {
    "test_function_parity.py": "Functions",
    "test_checkpoint_parity.py": "Checkpointed regions",
}
FRONT_ENDS = ("nonstrict", "strict", "make_fx", "dynamo_export")


def cases_of_suites() -> list[list[Any]]:
    """The cases of each suite."""
    import checkpoint_cases
    import function_cases
    import function_edge_cases  # noqa: F401, it adds to the cases of the other

    return [list(function_cases.CASES.values()), checkpoint_cases.CASES]


def all_runs() -> set[tuple[str, str, str, str]]:
    """Suite, case, front end and replay of each run that the table is made of."""
    import test_checkpoint_parity
    import test_function_parity

    grids = (test_function_parity.grid(), test_checkpoint_parity.combinations())
    return {
        (suite, *parameter.id.rsplit("-", 2))
        for suite, grid in zip(SUITES, grids)
        for parameter in grid
    }


class Table:
    """Outcomes of ``test_equals_eager``, by suite, case and front end."""

    def __init__(self) -> None:
        self.outcomes: dict[tuple[str, str, str], dict[str, str]] = defaultdict(dict)

    def add(self, report: Any) -> None:
        path, _, rest = report.nodeid.partition("::")
        is_of_table = Path(path).name in SUITES and rest.startswith("test_equals_eager[")
        if report.when != "call" or not is_of_table:
            return
        run = rest.rpartition("@")[0] or rest  # xdist writes the group after the name
        case, front_end, replay = run[run.index("[") + 1 : run.rindex("]")].rsplit("-", 2)
        refused = ("refused", True) in report.user_properties
        outcome = "refused" if refused and report.passed else report.outcome
        self.outcomes[Path(path).name, case, front_end][replay] = outcome

    def is_complete(self, expected: set[tuple[str, str, str, str]]) -> bool:
        seen = {(*key, replay) for key, replays in self.outcomes.items() for replay in replays}
        return expected <= seen

    def text(self) -> str:
        """In Markdown: a line for each section, a column for each front end."""
        lines = ["| | " + " | ".join(FRONT_ENDS) + " |", "|---" * (1 + len(FRONT_ENDS)) + "|"]
        for (suite, title), cases in zip(SUITES.items(), cases_of_suites()):
            lines.append(f"| **{title}** |" + " |" * len(FRONT_ENDS))
            sections: dict[str, list[str]] = {}
            for case in cases:
                sections.setdefault(case.section, []).append(case.name)
            for section, names in sections.items():
                cells = [self._cell(suite, names, front_end) for front_end in FRONT_ENDS]
                lines.append(f"| {section} | " + " | ".join(cells) + " |")
        return "\n".join(lines) + "\n"

    def _cell(self, suite: str, names: list[str], front_end: str) -> str:
        runs = [self.outcomes.get((suite, name, front_end), {}) for name in names]
        runs = [replays for replays in runs if replays]
        good = [r for r in runs if set(r.values()) <= {"passed", "refused"}]
        refused = sum("refused" in r.values() for r in good)
        cell = f"{len(good) - refused} of {len(runs)}"
        return cell + (f", {refused} refused" if refused else "")


def update(text: str) -> bool:
    """Write the table into the README where ``EXPECTTEST_ACCEPT=1``; whether it is there now."""
    before = README.read_text()
    head, _, rest = before.partition(BEGIN)
    current, _, tail = rest.partition(END)
    if current == text:
        return True
    if os.environ.get("EXPECTTEST_ACCEPT") != "1":
        return False
    README.write_text(head + BEGIN + text + END + tail)
    return True


class TableWatch:
    """A plugin for the process that sees the reports of all tests: it compares the README's
    table with what passed, if all of it ran."""

    def __init__(self) -> None:
        self.table = Table()

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.table.add(report)

    def pytest_sessionfinish(self, session: Any, exitstatus: int) -> None:
        is_worker = hasattr(session.config, "workerinput")
        is_of_readme = str(torch.__version__).startswith(TORCH)
        if is_worker or exitstatus != 0 or not is_of_readme or not self.table.outcomes:
            return
        # It need not have collected them itself.
        sys.path.append(PARITY)
        if self.table.is_complete(all_runs()) and not update(self.table.text()):
            print(
                "\nREADME.md does not show what passed; EXPECTTEST_ACCEPT=1 make test rewrites it"
            )
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
