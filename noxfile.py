"""The test suite on every supported torch: ``nox -s tests-2.15.0``, or ``nox -s matrix`` for all.

All but one of these are CUDA builds of 5 to 7 GB once installed, so ``matrix`` deletes each
environment when its session is done, as every session does where ``CI`` is set. A session run by
hand keeps its environment, for another look with ``nox -R``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import nox

sys.path.insert(0, str(Path(__file__).parent / "tests"))
import suite_summary  # noqa: E402

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "venv"

TORCH_VERSIONS = (
    "2.6.0",
    "2.7.1",
    "2.8.0",
    "2.9.1",
    "2.10.0",
    "2.11.0",
    "2.12.1",
    "2.13.0",
    "2.14.1",
    "2.15.0",
)

# Hops catches user code by what Python looks up and calls; see `nox -s python-3.12`.
PYTHON_VERSIONS = ("3.10", "3.11", "3.12", "3.13")

# The version that `make test` uses. It is installed with the user's own pip configuration, which
# may point at a CPU build of it.
DEFAULT_TORCH_VERSION = "2.13.0"

# The others come from the default index: a constraint in the user's pip configuration may rule out
# the version asked for. pip's environment variables still apply.
NO_PIP_CONFIGURATION = {"PIP_CONFIG_FILE": os.devnull}

# Two workers; all tests of one parity case on one of them.
PARALLEL = ["-n", "2", "--dist", "loadgroup"]

# tests/parity/expected_differences.py lists what these torch versions cannot do; the lists of the
# others are not complete.
PARITY_VERSIONS = (DEFAULT_TORCH_VERSION, "2.15.0")
WITHOUT_PARITY = ["--ignore=tests/parity"]
# On a submission the versions other than the default replay each case directly only: the copies,
# files and compilations take most of the time.
ONLY_DIRECTLY = ["--parity-replays=module"]

# timm needs torchvision, each of which goes with one torch; the registry has one for this torch,
# and none for the build of 2.13.0 that `make packages` uses.
TIMM_TORCH_VERSION = "2.14.1"
TIMM_CASES = ["tests/packages/test_models.py", "-k", "timm"]

nox.options.sessions = [f"tests-{DEFAULT_TORCH_VERSION}"]

remove_environments = bool(os.environ.get("CI"))


def run_suite(
    session: nox.Session, torch_version: str, *options: str, extras: str = "test"
) -> None:
    """Install torch ``torch_version`` and this package, run pytest with the session's arguments."""
    environment = Path(session.virtualenv.location)
    pip_env = {} if torch_version == DEFAULT_TORCH_VERSION else NO_PIP_CONFIGURATION
    try:
        # Without a cache: it would keep some 3 GB for each version.
        session.install("--no-cache-dir", f"torch=={torch_version}", env=pip_env, silent=False)
        # setuptools packs what an earlier build left there, also files deleted since.
        shutil.rmtree("build", ignore_errors=True)
        session.install(f"torch=={torch_version}", f".[{extras}]", env=pip_env)
        # -I: the installed packages, not those in the current directory.
        session.run(
            "python",
            "-I",
            "-c",
            "import torch, hops, dispatch_rules;"
            "print('torch', torch.__version__, 'with hops', hops.__version__)",
        )
        session.run(
            "python",
            "-m",
            "pytest",
            *PARALLEL,
            *options,
            *session.posargs,
            env={
                "OMP_NUM_THREADS": "1",
                "TORCHINDUCTOR_CACHE_DIR": str(environment.resolve() / "inductor-cache"),
            },
        )
    finally:
        if remove_environments:
            shutil.rmtree(environment, ignore_errors=True)


def parity_options(torch_version: str) -> list[str]:
    """How much of tests/parity a session runs."""
    if torch_version not in PARITY_VERSIONS:
        return WITHOUT_PARITY
    is_short = torch_version != DEFAULT_TORCH_VERSION and os.environ.get("HOPS_SHORT_PARITY")
    return ONLY_DIRECTLY if is_short else []


def add_session(torch_version: str) -> None:
    @nox.session(name=f"tests-{torch_version}")
    def tests(session: nox.Session) -> None:
        run_suite(session, torch_version, *parity_options(torch_version))

    tests.__doc__ = f"Run the suite on torch {torch_version}."


for version in TORCH_VERSIONS:
    add_session(version)


@nox.session(name=f"timm-{TIMM_TORCH_VERSION}")
def timm(session: nox.Session) -> None:
    """Run the cases of tests/packages with timm's models, on the torch that torchvision needs."""
    session.env["PYTHONPATH"] = os.pathsep.join(["tests", "tests/parity"])
    run_suite(session, TIMM_TORCH_VERSION, *TIMM_CASES, extras="test,timm")


def add_python_session(python: str) -> None:
    @nox.session(name=f"python-{python}", python=python)
    def tests(session: nox.Session) -> None:
        run_suite(session, DEFAULT_TORCH_VERSION, *WITHOUT_PARITY)

    tests.__doc__ = (
        f"Run the suite but tests/parity on Python {python}, torch {DEFAULT_TORCH_VERSION}."
    )


for python in PYTHON_VERSIONS:
    add_python_session(python)


@nox.session(venv_backend="none")
def matrix(session: nox.Session) -> None:
    """Run the suite on every supported torch in turn, then print one table of the outcomes."""
    outcomes = []
    with tempfile.TemporaryDirectory() as directory:
        for version in TORCH_VERSIONS:
            report = Path(directory) / f"{version}.xml"
            status, seconds = run_alone(
                f"tests-{version}", f"--junitxml={report}", *session.posargs
            )
            outcomes.append(suite_summary.outcome(version, status, seconds, report))
    print(suite_summary.table(outcomes))
    failed = [o.version for o in outcomes if not o.good]
    if failed:
        session.error(f"the suite failed on torch {', '.join(failed)}")


def run_alone(name: str, *posargs: str) -> tuple[int, float]:
    """Run one session in a nox of its own, which deletes its environment whatever happens."""
    began = time.monotonic()
    command = [sys.executable, "-m", "nox", "-s", name, "--", *posargs]
    status = subprocess.call(command, env={**os.environ, "CI": "1"})
    return status, time.monotonic() - began
