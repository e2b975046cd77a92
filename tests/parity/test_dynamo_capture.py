"""``dynamo_graph_capture_for_export`` of every case of ``function_cases`` equals eager, and
so does the ATen form that re-tracing its graph gives.

Dynamo itself keeps some models from coming as far as the Function; what it says then is
stock's, and the table of expected differences has them.
"""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import pytest
import torch
from function_cases import CASES, fresh
from test_function_parity import REFUSED, assert_equal, count_operators, eager, run
from torch._dynamo.exc import TorchDynamoException
from torch.fx.experimental.proxy_tensor import make_fx
from version_differences import needs

from hops._torch import graph_capture_for_export

pytestmark = needs("dynamo_graph_capture")

REPLAYS = ("module", "retrace")

KEY = torch._C._functorch.TransformType
LEAVE = {
    KEY.Grad: torch._C._functorch._grad_decrement_nesting,
    KEY.Vmap: torch._C._functorch._vmap_decrement_nesting,
}


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    # A graph with torch.func.grad or vmap in it that fails half-way leaves what that began.
    while (level := torch._C._functorch.peek_interpreter_stack()) is not None:
        LEAVE[level.key()]()
    torch._C._autograd._saved_tensors_hooks_enable()


def captured(module: Any, args: tuple[Any, ...]) -> Any:
    return graph_capture_for_export()(module)(*args)


def retraced(graph: Any, module: Any, args: tuple[Any, ...]) -> tuple[Any, Any]:
    """``(program, ATen graph)`` of a captured graph, which runs on the state of ``module``."""

    def call(state: dict[str, torch.Tensor], *args: Any) -> Any:
        return torch.func.functional_call(graph, state, args)

    state = dict(graph.named_parameters()) | dict(graph.named_buffers())
    aten = make_fx(call, pre_dispatch=True, tracing_mode="fake")(state, *args)
    own = dict(module.named_parameters()) | dict(module.named_buffers())
    return lambda *args: aten({name: own[name] for name in state}, *args), aten


@pytest.mark.parametrize("front_end", ["dynamo_capture"])
@pytest.mark.parametrize("replay", REPLAYS)
@pytest.mark.parametrize("name", CASES)
def test_equals_eager(name: str, front_end: str, replay: str) -> None:
    case = dataclasses.replace(CASES[name], double=False)
    module, args = fresh(name)
    try:
        program = graph = captured(module, args)
        if replay == "retrace":
            program, graph = retraced(graph, module, args)
        got = run(program, module, fresh(name)[1], case)
    except REFUSED as error:
        assert case.refusal is not None and case.refusal in str(error)
        return
    except TorchDynamoException as error:
        if case.refusal is None or case.refusal not in str(error):
            raise
        return
    assert_equal(got, eager(name, False))
    wanted = got.calls if case.calls is None else case.calls
    if replay == "retrace" and wanted != -1:
        assert count_operators(graph) == wanted
