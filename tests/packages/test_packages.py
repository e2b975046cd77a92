"""Functions of real packages: every front end finds every call, and equals eager.

Compared are outputs, gradients of all parameters and inputs (None stays None),
buffers, and the number of operators in the graph with the number of nodes that
eager's autograd graph has for Functions.  What is compared, and how, is shared
with ``tests/parity``.  Run it with ``make packages``.
"""

from __future__ import annotations

import functools
import io
import re
import warnings
from typing import Any

import pytest
import torch
from packages_cases import CASES, fresh
from test_function_parity import Run, Traced, assert_equal, count_operators, run
from torch.autograd.function import BackwardCFunction
from torch.fx.experimental.proxy_tensor import make_fx

import hops

FRONT_ENDS = ("nonstrict", "strict", "make_fx", "make_fx_fake")
REFUSALS = (hops.CaptureError, hops.ReplayError)


@functools.cache
def eager(name: str) -> Run:
    module, args = fresh(name)
    found = run(module, module, args, CASES[name])
    for buffer in CASES[name].assigned:
        del found.buffers[buffer]
    return found


@functools.cache
def calls_in_eager(name: str) -> int:
    """How many Functions a forward puts into the autograd graph, used in the loss or not.

    torch makes an instance of ``BackwardCFunction`` for each call of ``apply``, and gives
    it edges to its inputs where the call records a gradient.
    """
    module, args = fresh(name)
    contexts: list[Any] = []
    BackwardCFunction.__init__ = lambda ctx, *_: contexts.append(ctx)
    try:
        torch.manual_seed(7)
        outputs = module(*args)
    finally:
        del BackwardCFunction.__init__
    found = sum(bool(ctx.next_functions) for ctx in contexts)
    del outputs
    return found


@functools.cache
def capture(name: str, front_end: str) -> Any:
    """The captured program, or the error of the capture."""
    with CASES[name].following_constants():
        return _capture(name, front_end)


def _capture(name: str, front_end: str) -> Any:
    module, args = fresh(name)
    torch.manual_seed(7)
    try:
        if not front_end.startswith("make_fx"):
            return torch.export.export(module, args, strict=front_end == "strict")

        def call(state: dict[str, torch.Tensor], *args: Any) -> Any:
            return torch.func.functional_call(module, state, args)

        state = dict(module.named_parameters()) | dict(module.named_buffers())
        mode = "fake" if front_end == "make_fx_fake" else "real"
        # Tensors in a package's closures are no inputs, and so not fake.
        trace = make_fx(
            call, pre_dispatch=True, tracing_mode=mode, _allow_non_fake_inputs=mode == "fake"
        )
        return trace(state, *args)
    except Exception as error:
        return error


def program(name: str, front_end: str, saved: bool = False) -> Any:
    """A module to run and its graph, with buffers as they are before any run."""
    captured = capture(name, front_end)
    if isinstance(captured, Exception):
        raise captured.with_traceback(None)
    if front_end.startswith("make_fx"):
        return Traced(captured, fresh(name)[0]), captured
    before = fresh(name)[0].state_dict()
    with torch.no_grad():
        for key, value in captured.state_dict.items():
            if key in before:
                value.copy_(before[key])
    if saved:
        file = io.BytesIO()
        torch.export.save(captured, file)
        file.seek(0)
        captured = torch.export.load(file)
    return captured.module(), captured.graph_module


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.parametrize("name", CASES)
def test_equals_eager(name: str, front_end: str) -> None:
    case = CASES[name]
    if front_end in case.torch_cannot:
        error = capture(name, front_end)
        assert isinstance(error, Exception) and not isinstance(error, REFUSALS)
        assert re.search(case.torch_cannot[front_end], str(error)), error
        return
    refusal = case.refused.get(front_end, case.refused.get("*"))
    if refusal is not None:
        with pytest.raises(REFUSALS, match=refusal):
            module, _ = program(name, front_end)
            run(module, module, fresh(name)[1], case)
        return
    module, graph = program(name, front_end)
    want = eager(name)
    calls = calls_in_eager(name) if case.calls is None else case.calls
    assert calls > 0, "the case calls no Function"
    assert count_operators(graph) == calls
    assert_equal(run(module, module, fresh(name)[1], case), want)
    if front_end == "nonstrict" and case.unsaveable is None:
        module, _ = program(name, front_end, saved=True)
        assert_equal(run(module, module, fresh(name)[1], case), want)
