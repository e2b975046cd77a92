import logging
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from feature_table import TableWatch
from version_differences import counted

import hops  # noqa: F401


def pytest_addoption(parser):
    # Here, and not beside what it acts on: pytest reads options from the outermost conftest only.
    parser.addoption(
        "--parity-replays",
        help="only these replays of the cases of tests/parity, with commas between; all by default",
    )


def pytest_configure(config):
    # Likewise: with workers, the process that gets their reports reads no other conftest.
    config.pluginmanager.register(TableWatch(), "feature_table")


def _fits_its_message(record):
    """What checkpoint(debug=True) logs does not, at which pytest's handlers raise."""
    return record.name != "LoggingTensor"


@pytest.fixture(autouse=True)
def _fresh_state():
    torch.set_num_threads(1)
    torch._dynamo.reset()
    for handler in logging.getLogger().handlers:
        handler.addFilter(_fits_its_message)
    yield
    assert torch.is_grad_enabled(), "a test left grad mode off"
    assert torch._C._functorch.maybe_current_level() is None, "a test left a transform on"
    assert torch._C._autograd._saved_tensors_hooks_is_enabled(), "a test left hooks refused"


def pytest_terminal_summary(terminalreporter):
    skipped = terminalreporter.stats.get("skipped", [])
    for line in counted(r.longrepr[2] for r in skipped if isinstance(r.longrepr, tuple)):
        terminalreporter.write_line(line)
