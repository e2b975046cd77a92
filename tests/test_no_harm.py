"""Outside of a capture, and where stock captures right, nothing changes with hops imported.

Each program of the ``no_harm_*`` modules runs in two processes, with hops and
where ``HOPS_DISABLE=1``, and prints the same: values, gradients, graphs that backends of
``torch.compile`` see, errors, warnings, what classes and functions look like.
"""

import ast
import functools
import json

import pytest
from fresh import TESTS, run
from version_differences import needs

SCRIPTS = ("no_harm_eager", "no_harm_classes", "no_harm_capture")

pytestmark = pytest.mark.xdist_group("no_harm")


def programs(script):
    for definition in ast.parse((TESTS / f"{script}.py").read_text()).body:
        names = [getattr(d, "id", "") for d in getattr(definition, "decorator_list", ())]
        if "shows" in names:
            yield definition.name


@functools.cache
def seen(script, disabled):
    path = str(TESTS / f"{script}.py")
    program = f"import runpy; runpy.run_path({path!r}, run_name='__main__')"
    environment = {"HOPS_DISABLE": str(int(disabled)), "GLOO_SOCKET_IFNAME": "lo"}
    # The last line: gloo writes there too, on some torch.
    printed = json.loads(run(program, environment=environment).splitlines()[-1])
    assert printed["installed"] is not disabled
    return printed["seen"]


#: Their model has a grad mode inside another.
NESTED = ("exports_of_other_models", "exports_with_symbols_and_refusals")


def cases():
    for script in SCRIPTS:
        for name in programs(script):
            marks = [needs("nested_grad_modes")] if name in NESTED else []
            yield pytest.param(script, name, marks=marks)


@pytest.mark.parametrize(("script", "name"), list(cases()))
def test_is_seen_with_hops_as_without(script, name):
    stock = seen(script, disabled=True)[name]
    assert stock and not any(line.startswith("failed: ") for line in stock), "\n".join(stock)
    assert seen(script, disabled=False)[name] == stock
