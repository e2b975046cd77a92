"""Marks the tests that ``expected_differences`` lists, and keeps a case on one worker."""

import pytest
from expected_differences import reasons


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
