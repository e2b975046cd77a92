"""Programs that run in a Python of their own, where hops has not been imported yet."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

TESTS = Path(__file__).parent


def run(program, *arguments, environment=None):
    """Run a program and give what it printed; a failure shows what it wrote."""
    paths = [str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(program), *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **(environment or {})},
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
