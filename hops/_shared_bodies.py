"""One body for equal calls, so that a graph does not grow with repetition.

Bodies are compared once the trace is complete, since until then a value that
escapes may give a body one more output.  Equal are two bodies that run the same
operations on operands of the same form and tell the same of them: source lines,
module paths, annotations.  A module that is called again has the same path but
for torch's count of its calls.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from hops._body import BodyGraph, holds_body

_TOLD = ("stack_trace", "custom", "partitioner_tag")


def share_bodies(graph: fx.Graph, owner: torch.nn.Module) -> bool:
    """Let equal bodies of ``owner``, and of the bodies in it, be one.

    Returns:
        Whether the graph was changed.
    """
    kept: dict[Any, str] = {}
    replaced: dict[str, str] = {}
    looked_at: set[str] = set()
    for node in graph.find_nodes(op="get_attr"):
        name = str(node.target)
        if name in looked_at or not holds_body(owner, node):
            continue
        if name not in replaced:
            body: Any = getattr(owner, name)
            if not isinstance(body.graph, BodyGraph):
                continue
            if share_bodies(body.graph, body):
                body.recompile()
            kept_name = kept.setdefault((name.rstrip("0123456789"), _key(body)), name)
            if kept_name == name:
                looked_at.add(name)
                continue
            replaced[name] = kept_name
        node.target = replaced[name]
    for name in replaced:
        delattr(owner, name)
    return bool(replaced)


def _key(body: fx.GraphModule) -> Any:
    """What two bodies have in common if and only if they are equal."""
    position = {node: index for index, node in enumerate(body.graph.nodes)}
    nodes = tuple(_node_key(body, node, position.__getitem__) for node in body.graph.nodes)
    policy = tuple((name, _policy_key(value)) for name, value in sorted(body.meta.items()))
    return nodes, policy


def _node_key(body: fx.GraphModule, node: fx.Node, position: Callable[[fx.Node], int]) -> Any:
    meta = node.meta
    told = tuple(repr(meta.get(name)) for name in _TOLD)
    paths = [re.sub(r"@\d+", "", str(path)) for path, _ in meta.get("nn_module_stack", {}).values()]
    target: Any = node.target
    if node.op == "get_attr":
        attribute = getattr(body, str(target))
        target = _key(attribute) if isinstance(attribute, fx.GraphModule) else id(attribute)
    elif node.op == "placeholder":
        target = _form(meta.get("val"))
    arguments = _argument_key((node.args, node.kwargs), position)
    return node.op, target, arguments, told, tuple(paths)


def _argument_key(value: Any, position: Callable[[fx.Node], int]) -> Any:
    if isinstance(value, fx.Node):
        return fx.Node, position(value)
    if isinstance(value, (tuple, list)):
        return type(value).__name__, tuple(_argument_key(v, position) for v in value)
    if isinstance(value, dict):
        return "dict", tuple((k, _argument_key(v, position)) for k, v in value.items())
    if isinstance(value, slice):
        return _argument_key((slice, value.start, value.stop, value.step), position)
    # 1, 1.0 and True are equal in Python, as are 0.0 and -0.0.
    return type(value), repr(value) if isinstance(value, (float, complex)) else _itself(value)


def _form(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return type(value), str(value)
    described = [type(value), value.dtype, value.device, value.layout, value.requires_grad]
    sizes = (str(tuple(value.shape)), value.is_sparse or str(value.stride()))
    return (*described, *sizes)


def _policy_key(value: Any) -> Any:
    if isinstance(value, functools.partial):
        keywords = tuple((k, _policy_key(v)) for k, v in sorted(value.keywords.items()))
        return _itself(value.func), tuple(map(_policy_key, value.args)), keywords
    return _itself(value)


def _itself(value: Any) -> Any:
    """The value where it can be compared by a hash, else its identity."""
    try:
        hash(value)
    except TypeError:
        return id, id(value)
    return value
