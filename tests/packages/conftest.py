"""Keeps all tests of a case on one worker: what was captured and what eager gives are kept."""

import pytest


def pytest_collection_modifyitems(items):
    for item in items:
        if "packages" in item.path.parts and hasattr(item, "callspec"):
            item.add_marker(pytest.mark.xdist_group(item.callspec.params["name"]))
