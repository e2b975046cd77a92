"""Random Functions and random trees of regions equal eager on every front end.

A failure shrinks to a small program and prints a script that shows it.  The
budget is ``HOPS_FUZZ_EXAMPLES`` programs for each test, the same every time: some
120 distinct programs by default, which run 61 % of the lines and branches of ``hops/``
and ``dispatch_rules/`` (``coverage run --branch``).  ``make fuzz`` draws more, and
others each time.
"""

import os
import sys
import types
from pathlib import Path

import comparison
import function_programs
import pytest
import region_programs
from hypothesis import HealthCheck, assume, given, note, settings

import hops

EXAMPLES = int(os.environ.get("HOPS_FUZZ_EXAMPLES", "30"))
SETTINGS = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=os.environ.get("HOPS_FUZZ_RANDOM") != "1",
    database=None,
    suppress_health_check=list(HealthCheck),
    print_blob=False,
)


def script(program):
    """A file that can be run by itself."""
    start = Path(comparison.__file__).read_text()
    return f"{start}\n{program.source}\n\nprint(compare(build, {program.options()}))\n"


def builder(program):
    # Dynamo finds the globals of a function in the module that it says it is of.
    module = sys.modules["random_program"] = types.ModuleType("random_program")
    namespace = vars(module)
    namespace.update({k: v for k, v in vars(comparison).items() if not k.startswith("__")})
    exec(compile(program.source, "<program>", "exec"), namespace)
    return namespace["build"]


def runs_in_eager(build):
    """Whether eager runs it, forward and backward, or fails in a way that a graph can have too."""
    try:
        with comparison.quiet():
            module, args = build(4)
            error = comparison.run(module, module, args, False)["error"]
    except Exception:
        return False
    return error is None or "modified by an inplace operation" in error


def fails_in_stock(program, error):
    """Whether the same program fails in the same way without hops."""
    hops.uninstall()
    try:
        comparison.compare(builder(program), *arguments(program))
    except Exception as without:
        return type(without) is type(error)
    finally:
        hops.install()
    return False


def arguments(program):
    return program.front_end, program.replay, program.dynamic, program.double


def check(program):
    """None, or why the program is refused."""
    assume(runs_in_eager(builder(program)))
    note(script(program))
    try:
        return comparison.compare(builder(program), *arguments(program))
    except AssertionError:
        raise
    except Exception as error:
        assume(not fails_in_stock(program, error))
        raise


@pytest.mark.parametrize("front_end", ["nonstrict", "make_fx", "strict"])
@pytest.mark.parametrize("programs", [function_programs, region_programs])
def test_random_programs(programs, front_end, capsys):
    # Dynamo takes a second or more for each.
    budget = EXAMPLES // 4 if front_end == "strict" else EXAMPLES
    seen, refused = set(), []

    @settings(SETTINGS, max_examples=budget)
    @given(programs.programs((front_end,)))
    def equals_eager(program):
        refusal = check(program)
        seen.add(program.source)
        if refusal is not None:
            refused.append(refusal)

    equals_eager()
    with capsys.disabled():
        print(
            f"\n{programs.__name__}, {front_end}: {len(seen)} distinct programs, "
            f"{len(refused)} of them refused by name"
        )
    assert len(refused) <= max(1, len(seen) / 10), refused
