"""Which operands a body writes into."""

from __future__ import annotations

import torch
from torch import fx


def mutated_operands(body: fx.GraphModule) -> list[int]:
    """Positions of the operands that ``body`` changes in place, itself or through a view.

    Operations say in their schema what they write to and what they alias.
    """
    source: dict[fx.Node, int] = {}
    for position, placeholder in enumerate(body.graph.find_nodes(op="placeholder")):
        source[placeholder] = position
    mutated: set[int] = set()
    for node in body.graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        for argument, value in zip(node.target._schema.arguments, node.args):
            alias = argument.alias_info
            if alias is None or not isinstance(value, fx.Node) or value not in source:
                continue
            source[node] = source[value]
            if alias.is_write:
                mutated.add(source[value])
    return sorted(mutated)


def writes_into_operands(body: fx.GraphModule) -> bool:
    """Whether ``body``, or a body in it, changes an operand in place."""
    inside = (child for child in body.children() if isinstance(child, fx.GraphModule))
    return bool(mutated_operands(body)) or any(map(writes_into_operands, inside))
