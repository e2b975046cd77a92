"""The table at the end of ``nox -s matrix``, and the count of what a torch lacks."""

import subprocess
import sys

import torch
from suite_summary import Outcome, outcome, table
from version_differences import FEATURES, PREFIX, counted

TESTS = """
import pytest

def test_passes():
    pass

def test_fails():
    assert not {fails}

@pytest.mark.skip
def test_skipped():
    pass

@pytest.mark.xfail
def test_xfails():
    assert False

@pytest.fixture
def broken():
    assert not {fails}

def test_error(broken):
    pass
"""


def report(directory, fails):
    (directory / "test_it.py").write_text(TESTS.format(fails=fails))
    path = directory / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={path}"]
    return subprocess.run(command, cwd=directory, capture_output=True).returncode, path


def test_what_a_report_says(tmp_path):
    status, path = report(tmp_path, fails=True)
    assert outcome("2.9.1", status, 90, path) == Outcome("2.9.1", False, 90, 1, 2, 1, 1)
    status, path = report(tmp_path, fails=False)
    assert outcome("2.9.1", status, 90, path) == Outcome("2.9.1", True, 90, 3, 0, 1, 1)
    assert not outcome("2.9.1", 1, 90, path).good


def test_a_run_without_a_test_has_failed(tmp_path):
    assert outcome("2.6.0", 0, 1, tmp_path / "none.xml") == Outcome("2.6.0", False, 1)


def test_the_table():
    outcomes = [Outcome("2.6.0", True, 400, 700, 0, 12, 3), Outcome("2.10.0", False, 12)]
    lines = [line.split() for line in table(outcomes).split("\n")]
    assert lines == [
        ["version", "passed", "failed", "skipped", "xfailed", "minutes"],
        ["2.6.0", "700", "0", "12", "3", "6.7", "good"],
        ["2.10.0", "0", "0", "0", "0", "0.2", "FAILED"],
    ]


def test_what_a_torch_lacks_is_counted_by_name():
    name = next(iter(FEATURES))
    head, line = counted([f"Skipped: {PREFIX}{name}: so", f"{PREFIX}{name}: so", "another"])
    assert head.startswith("2 tests") and torch.__version__ in head
    assert line.split()[:2] == ["2", f"{name}:"]
    assert len(counted(["another"])) == 1
