"""How the demo and the benchmarks talk: tables, progress lines, comparisons that fail loudly."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lay `rows` out under `header`; columns that start with a figure go to the right."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    right = [bool(rows) and rows[0][i][:1].isdigit() for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        cells = (
            cell.rjust(w) if r else cell.ljust(w)
            for cell, w, r in zip(row, widths, right, strict=True)
        )
        return "  ".join(cells).rstrip()

    return "\n".join([line(header), "  ".join("-" * width for width in widths), *map(line, rows)])


def print_section(title: str) -> None:
    """Print a heading."""
    print(f"\n== {title}", flush=True)


@contextlib.contextmanager
def progress(what: str) -> Iterator[None]:
    """Say what is being done, and when it is done how long it took."""
    print(f"   {what} ... ", end="", flush=True)
    start = time.perf_counter()
    try:
        yield
    except BaseException:
        print("failed", flush=True)
        raise
    print(f"{time.perf_counter() - start:.1f} s", flush=True)


@dataclass
class Comparisons:
    """The comparisons of one run, and which of them failed."""

    passed: int = 0
    failures: list[str] = field(default_factory=list)

    def check(self, what: str, holds: bool, found: str = "") -> None:
        """Record one comparison; print it at once when it fails."""
        if holds:
            self.passed += 1
            return
        self.failures.append(f"{what}: {found}" if found else what)
        print(f"   FAILED: {self.failures[-1]}", file=sys.stderr, flush=True)

    def exit_status(self) -> int:
        """Print the verdict; return 0 when everything held and 1 otherwise."""
        print_section("verdict")
        if not self.failures:
            print(f"   all {self.passed} comparisons with eager hold")
            return 0
        total = self.passed + len(self.failures)
        print(f"   {len(self.failures)} of {total} comparisons with eager FAILED:")
        for failure in self.failures:
            print(f"   - {failure}")
        return 1
