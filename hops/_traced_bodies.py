"""Bodies that need no second trace.

torch.export under ``strict`` traces a model twice: Dynamo first, then to ATen what Dynamo wrote.
The bodies of a Function are in ATen form after the first (``hops._dynamo_functions`` runs the
call), and the second would write the same operations again if it runs on values of the same form.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from hops._body import Body, tidy_graph
from hops._mutation import writes
from hops._torch import SYMBOLIC_TYPES, FakeTensor, trace_is_plain

_UNBACKED = "unbacked_bindings"


def copied_if_traced(
    bodies: Iterable[fx.GraphModule], operands: Sequence[Any]
) -> list[fx.GraphModule] | None:
    """Copies of the bodies of a call, or None where they have to be traced.

    Args:
        bodies: the forward first; the others take what it gives out.
        operands: the values that the forward takes now.
    """
    bodies = list(bodies)
    if all(map(_is_plain, bodies)) and _fits(bodies[0], operands):
        return [_copy(body) for body in bodies]
    return None


def _is_plain(body: fx.GraphModule) -> bool:
    """Whether every node is an operation that writes nothing and binds no new size."""
    nodes = body.graph.nodes
    return (
        isinstance(body, Body)
        and not body.meta
        and all(map(_is_plain_node, nodes))
        and not writes(body)
        and trace_is_plain(node.target for node in nodes)
    )


def _is_plain_node(node: fx.Node) -> bool:
    if node.op in ("placeholder", "output"):
        return True
    is_operation = isinstance(node.target, torch._ops.OpOverload) or (
        getattr(node.target, "__module__", None) == operator.__name__
    )
    return node.op == "call_function" and is_operation and _UNBACKED not in node.meta


def _fits(forward: fx.GraphModule, operands: Sequence[Any]) -> bool:
    placeholders = forward.graph.find_nodes(op="placeholder")
    return len(placeholders) == len(operands) and all(
        _same_form(node.meta.get("val"), value) for node, value in zip(placeholders, operands)
    )


def _same_form(then: Any, now: Any) -> bool:
    if isinstance(then, torch.Tensor):
        return (
            isinstance(then, FakeTensor)
            and isinstance(now, FakeTensor)
            and then.fake_mode is now.fake_mode
            and _layout(then) == _layout(now)
        )
    return type(then) is type(now) and _number(then) == _number(now)


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    numbers = [*tensor.shape, tensor.storage_offset()]
    if tensor.layout is torch.strided:
        numbers += tensor.stride()
    marks = (tensor.dtype, tensor.device, tensor.layout, tensor.is_conj(), tensor.is_neg())
    return (*marks, *map(_number, numbers))


def _number(value: Any) -> Any:
    """A number such that comparing it guards on nothing."""
    return value.node.expr if isinstance(value, SYMBOLIC_TYPES) else value


def _copy(body: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(graph.graph_copy(body.graph, {}))
    tidy_graph(graph)
    return Body({}, graph)
