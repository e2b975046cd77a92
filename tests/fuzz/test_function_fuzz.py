"""Random Functions equal eager on every front end; a failure prints a script that shows it.

The budget is ``HOPS_FUZZ_EXAMPLES`` programs (``make fuzz`` sets more), drawn
from the same seed every time unless ``HOPS_FUZZ_RANDOM=1``.
"""

import os
from pathlib import Path

import comparison
import pytest
from function_programs import programs
from hypothesis import HealthCheck, assume, given, note, settings

EXAMPLES = int(os.environ.get("HOPS_FUZZ_EXAMPLES", "150"))
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


def check(program):
    namespace = dict(vars(comparison))
    exec(compile(program.source, "<program>", "exec"), namespace)
    build = namespace["build"]
    with comparison.quiet():
        try:
            module, args = build(4)
            module(*args)
        except Exception:
            assume(False)  # eager does not run it
    note(script(program))
    return comparison.compare(
        build, program.front_end, program.replay, program.dynamic, program.double
    )


def report(name, seen, refused):
    print(f"{name}: {len(seen)} distinct programs, {len(refused)} of them refused by name")


@pytest.mark.parametrize("front_end", ["nonstrict", "make_fx", "strict"])
def test_random_functions(front_end, capsys):
    seen, refused = set(), []

    @SETTINGS
    @given(programs((front_end,)))
    def equals_eager(program):
        refusal = check(program)
        seen.add(program.source)
        if refusal is not None:
            refused.append(refusal)

    equals_eager()
    with capsys.disabled():
        report(f"functions, {front_end}", seen, refused)
    assert len(refused) <= len(seen) / 10
