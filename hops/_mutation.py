"""Whether a body writes in place, and which operands it writes into."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves


def mutated_operands(body: fx.GraphModule) -> list[int]:
    """Positions of the operands that ``body`` changes in place, itself, through a view or in a
    body inside it.

    Operations say in their schema what they write to and what they alias.
    """
    return sorted(_effects(body)[0])


def _effects(body: fx.GraphModule) -> tuple[set[int], list[int | None]]:
    """The operands that a body writes into, and for each output the operand that it aliases."""
    source: dict[Any, int] = {}
    outputs_of: dict[fx.Node, list[int | None]] = {}
    mutated: set[int] = set()
    for position, placeholder in enumerate(body.graph.find_nodes(op="placeholder")):
        source[placeholder] = position
    for node in body.graph.nodes:
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            for value, is_write in _aliased(node):
                if value in source:
                    source.setdefault(node, source[value])
                    if is_write:
                        mutated.add(source[value])
        elif node.target is operator.getitem and node.args[0] in outputs_of:
            alias = outputs_of[node.args[0]][node.args[1]]
            if alias is not None:
                source[node] = alias
        elif node.op == "call_function":
            operands = [source.get(v) if isinstance(v, fx.Node) else None for v in _operands(node)]
            for inner in _bodies(body, node):
                written, outputs = _effects(inner)
                known = dict(enumerate(operands))
                mutated.update(p for i in written if (p := known.get(i)) is not None)
                outputs_of[node] = [None if i is None else known.get(i) for i in outputs]
    (output,) = body.graph.find_nodes(op="output")
    returned = output.args[0] if isinstance(output.args[0], (tuple, list)) else output.args
    return mutated, [source.get(v) if isinstance(v, fx.Node) else None for v in returned]


def _aliased(node: fx.Node) -> Iterator[tuple[Any, bool]]:
    """What an operation's result aliases, or what it writes into, and whether it does."""
    for position, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if argument.alias_info is None:
            continue
        value = node.kwargs.get(argument.name)
        if position < len(node.args):
            value = node.args[position]
        for one in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(one, fx.Node):
                yield one, argument.alias_info.is_write


def _bodies(module: fx.GraphModule, node: fx.Node) -> list[fx.GraphModule]:
    """The bodies that an operator runs on its operands when it is called."""
    held = [
        getattr(module, str(v.target), None)
        for v in node.args
        if isinstance(v, fx.Node) and v.op == "get_attr"
    ]
    bodies = [body for body in held if isinstance(body, fx.GraphModule)]
    if node.target is torch.ops.higher_order.autograd_function_apply:
        return bodies[:1]  # the others are for backward
    return bodies


def _operands(node: fx.Node) -> list[Any]:
    """What an operator hands to its bodies: all that comes after the last of them."""
    after = max((i for i, v in enumerate(node.args) if _is_attribute(v)), default=-1)
    return tree_leaves(node.args[after + 1 :], is_leaf=lambda v: v is None)


def _is_attribute(value: Any) -> bool:
    return isinstance(value, fx.Node) and value.op == "get_attr"


def writes(body: fx.GraphModule) -> bool:
    """Whether anything is written in place in ``body`` or the bodies inside it."""
    return any(
        isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
        for module in body.modules()
        if isinstance(module, fx.GraphModule)
        for node in module.graph.nodes
    )
