"""``dynamo_graph_capture_for_export`` of every case of ``function_cases`` equals eager, and
so does the ATen form that re-tracing its graph gives.

Dynamo itself keeps some models from coming as far as the Function; what it says then is
stock's.  Those are listed in :data:`REFUSED_BY_DYNAMO`.
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

#: Cases in which Dynamo fails before or after the call, and why.
REFUSED_BY_DYNAMO = {
    "a_function_defined_in_forward": "a class in forward",
    "a_parameter_through_a_closure": "a class in forward",
    "only_a_captured_parameter_requires_grad": "a class in forward",
    "an_intermediate_and_a_buffer_through_a_closure": "a class in forward",
    "dict_output": "an exception in the model",
    "mutable_class_state": "an attribute set on a class",
    "outputs_that_the_model_asks_about": "grad_fn of a tensor",
    "vmap_with_a_generated_rule": "vmap of a method",
}


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    # A graph with torch.func.grad in it that fails half-way leaves what grad began.
    while torch._C._functorch.maybe_current_level() is not None:
        torch._C._functorch._grad_decrement_nesting()
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
        assert name in REFUSED_BY_DYNAMO or (case.refusal or "function_") in str(error)
        return
    assert name not in REFUSED_BY_DYNAMO
    assert_equal(got, eager(name, False))
    wanted = got.calls if case.calls is None else case.calls
    if replay == "retrace" and wanted != -1:
        assert count_operators(graph) == wanted
