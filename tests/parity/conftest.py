"""Marks the tests that ``expected_differences`` lists, keeps a case on one worker, and
compares the README's table with what passed."""

import pytest
import torch
from expected_differences import reasons
from feature_table import SUITES, TORCH, Table, update

_table = Table()


def pytest_collection_modifyitems(config, items):
    chosen = config.getoption("parity_replays")
    if chosen is not None:
        left_out = [item for item in items if not _is_replayed_by(item, chosen.split(","))]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]
    for item in items:
        if "parity" not in item.path.parts or not hasattr(item, "callspec"):
            continue
        params = item.callspec.params
        case = params.get("case", params.get("name", item.originalname))
        case = getattr(case, "name", case)
        run = "-".join(str(params[key]) for key in ("front_end", "replay") if key in params)
        for reason in reasons(item.originalname, case, run):
            item.add_marker(pytest.mark.xfail(reason=reason, strict=True))
        # What was captured and what eager gives are kept from test to test.
        item.add_marker(pytest.mark.xdist_group(case))


def _is_replayed_by(item, replays):
    if "parity" not in item.path.parts or not hasattr(item, "callspec"):
        return True
    return item.callspec.params.get("replay", replays[0]) in replays


def pytest_runtest_logreport(report):
    _table.add(report)


def _all_runs():
    import test_checkpoint_parity
    import test_function_parity

    grids = (test_function_parity.grid(), test_checkpoint_parity.combinations())
    return {
        (suite, *parameter.id.rsplit("-", 2))
        for suite, grid in zip(SUITES, grids)
        for parameter in grid
    }


def pytest_sessionfinish(session, exitstatus):
    is_worker = hasattr(session.config, "workerinput")
    if is_worker or exitstatus != 0 or not str(torch.__version__).startswith(TORCH):
        return
    if _table.is_complete(_all_runs()) and not update(_table.text()):
        print("\nREADME.md does not show what passed; EXPECTTEST_ACCEPT=1 make test rewrites it")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
