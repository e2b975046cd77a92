"""``detach`` and no-grad blocks, kept through a decomposition that keeps operators.

torch decomposes a program for inference: what stops a gradient is dropped, a
``detach`` becomes an ``alias`` and a no-grad block dissolves.  A program whose operators
are kept can still be trained, and gradients would flow where eager has none.

Nodes that compute without gradients hand a mark on to the nodes that they become;
afterwards each value that such a node gives to another is detached.  Bodies of torch's
other operators (``cond``, an autocast block) hand nothing on: what is lost there is told.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import fx
from torch.export import ExportedProgram

from hops._source_lines import last_line
from hops._torch import set_grad_enabled
from hops.errors import HopsWarning

#: Where in ``node.meta["custom"]`` the mark is: a number of its own for each node.
_MARK = "hops_computes_without_gradients"

_NO_GRAD_BLOCK = torch.ops.higher_order.wrap_with_set_grad_enabled


@contextmanager
def gradient_stops_marked(ep: ExportedProgram) -> Iterator[dict[int, fx.Node]]:
    """Mark the nodes of a program, and its bodies, that compute without gradients."""
    marked: dict[int, fx.Node] = {}
    _mark(ep.graph_module, False, marked)
    try:
        yield marked
    finally:
        for node in marked.values():
            _take_mark(node)


def _mark(module: fx.GraphModule, stopped: bool, marked: dict[int, fx.Node]) -> None:
    for node in module.graph.nodes:
        if node.op != "call_function":
            continue
        switched_off = node.target is _NO_GRAD_BLOCK and not node.args[0]
        if node.target is set_grad_enabled:
            stopped = not node.args[0]
        elif stopped or switched_off or node.target is torch.ops.aten.detach.default:
            number = len(marked)
            node.meta["custom"] = {**(node.meta.get("custom") or {}), _MARK: number}
            marked[number] = node
        else:
            for source in node.all_input_nodes:
                body = getattr(module, str(source.target), None)
                if source.op == "get_attr" and isinstance(body, fx.GraphModule):
                    _mark(body, False, marked)


def _take_mark(node: fx.Node) -> int | None:
    custom = dict(node.meta.get("custom") or {})
    number: int | None = custom.pop(_MARK, None)
    if number is not None:
        node.meta["custom"] = custom
        if not custom:
            del node.meta["custom"]
    return number


def detach_marked(ep: ExportedProgram, marked: dict[int, fx.Node]) -> None:
    """Detach, in the decomposed program, what came of the marked nodes.

    Warns:
        HopsWarning: nothing came of one that has a result; says where it is.
    """
    names: dict[str, str] = {}
    lost = {number for number, node in marked.items() if node.users}
    for module in ep.graph_module.modules():
        if isinstance(module, fx.GraphModule):
            numbers = {node: _take_mark(node) for node in module.graph.nodes}
            lost.difference_update(numbers.values())
            names.update(_detach_in(module.graph, {n for n in numbers if numbers[n] is not None}))
            module.recompile()
    for spec in ep.graph_signature.output_specs:
        if getattr(spec.arg, "name", None) in names:
            spec.arg.name = names[spec.arg.name]
    for number in sorted(lost):
        _tell_loss(marked[number])


def _tell_loss(node: fx.Node) -> None:
    place = last_line(node.meta.get("stack_trace") or "") or node.name
    warnings.warn(
        f"hops: the decomposed program does not hold what stops gradients at {place} ({node.name})"
        "; gradients flow through it, unlike in eager. Train the program as it was before.",
        HopsWarning,
        stacklevel=4,
    )


def _detach_in(graph: fx.Graph, stopped: set[fx.Node]) -> dict[str, str]:
    """Detach what nodes give to others; new names of the values that go out."""
    names = {}
    for node in [n for n in graph.nodes if n in stopped]:
        users = [user for user in node.users if user not in stopped]
        value = node.meta.get("val")
        if not users or not isinstance(value, torch.Tensor):
            continue
        with graph.inserting_after(node):
            detached = graph.call_function(torch.ops.aten.detach.default, (node,))
        detached.meta = dict(node.meta)
        for user in users:
            user.replace_input_with(node, detached)
        if any(user.op == "output" for user in users):
            names[node.name] = detached.name
    return names
