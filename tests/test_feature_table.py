"""The README's table is made of what passed, by the process that sees all reports."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import feature_table
import torch

ROOT = Path(__file__).parents[1]


def report(run, outcome="passed", refused=False, path="tests/parity/test_function_parity.py"):
    return SimpleNamespace(
        when="call",
        nodeid=f"{path}::test_equals_eager[{run}]@case",
        outcome=outcome,
        passed=outcome == "passed",
        user_properties=[("refused", True)] if refused else [],
    )


def finish(watch):
    session = SimpleNamespace(config=SimpleNamespace(), exitstatus=0)
    watch.pytest_sessionfinish(session, 0)
    return session.exitstatus


def filled(monkeypatch, tmp_path, readme):
    """A watch that has seen all there is, two cases, beside a README."""
    cases = [SimpleNamespace(name=name, section="calls") for name in ("one", "two")]
    suite = "test_function_parity.py"
    monkeypatch.setattr(feature_table, "cases_of_suites", lambda: [cases, []])
    runs = {(suite, name, "strict", "module") for name in ("one", "two")}
    monkeypatch.setattr(feature_table, "all_runs", lambda: runs)
    monkeypatch.setattr(feature_table, "TORCH", str(torch.__version__))
    path = tmp_path / "README.md"
    path.write_text(readme)
    monkeypatch.setattr(feature_table, "README", path)
    watch = feature_table.TableWatch()
    watch.pytest_runtest_logreport(report("one-strict-module", refused=True))
    watch.pytest_runtest_logreport(report("two-strict-module"))
    watch.pytest_runtest_logreport(report("other-eager", path="tests/test_compile.py"))
    return watch, path


def test_a_table_that_does_not_show_what_passed_fails_the_run(monkeypatch, tmp_path):
    monkeypatch.delenv("EXPECTTEST_ACCEPT", raising=False)
    readme = f"before\n{feature_table.BEGIN}old\n{feature_table.END}after\n"
    watch, path = filled(monkeypatch, tmp_path, readme)
    assert finish(watch) == 1 and path.read_text() == readme


def test_accepting_writes_the_table(monkeypatch, tmp_path):
    monkeypatch.setenv("EXPECTTEST_ACCEPT", "1")
    readme = f"before\n{feature_table.BEGIN}old\n{feature_table.END}after\n"
    watch, path = filled(monkeypatch, tmp_path, readme)
    assert finish(watch) == 0
    written = path.read_text()
    assert "| calls | 0 of 0 | 1 of 2, 1 refused |" in written
    assert written.startswith("before\n") and written.endswith("after\n")
    monkeypatch.delenv("EXPECTTEST_ACCEPT")
    assert finish(watch) == 0 and path.read_text() == written


def test_a_part_of_the_suite_says_nothing_of_the_table(monkeypatch, tmp_path):
    watch, _ = filled(monkeypatch, tmp_path, "no table")
    watch.table.outcomes.popitem()
    assert finish(watch) == 0


def test_the_process_that_only_hands_out_tests_watches_too():
    """With workers it collects nothing, and reads the outermost conftest only."""
    script = (
        "import pytest, feature_table;"
        "feature_table.Table.add = lambda table, report: print('seen', report.nodeid);"
        "pytest.main(['-n', '1', '-p', 'no:cacheprovider', 'tests/test_suite_summary.py'])"
    )
    result = subprocess.run(
        [sys.executable, "-c", "import sys; sys.path.insert(0, 'tests');" + script],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert "seen tests/" in result.stdout, result.stdout + result.stderr
