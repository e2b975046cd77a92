"""What the nodes of the two operators are made of, in any form that torch writes."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from hops._policy import shown_context_fn
from hops._torch import stock_autograd_function_apply, stock_tag_activation_checkpoint


@dataclass(frozen=True)
class FunctionParts:
    """A call of ``autograd_function_apply``.

    Attributes:
        name: module-qualified name of the Function, "" where the form has none.
        forward, backward: the bodies.
        operands: nodes and constants that the call is given.
        num_outputs: number of the Function's outputs.
        outputs: for each output, the value of ``forward``'s graph that it is.
        saved: the values of ``forward``'s graph that the backward gets.
        getitems: nodes around the call that take its outputs, by position.
    """

    name: str
    forward: fx.GraphModule
    backward: fx.GraphModule
    operands: tuple[Any, ...]
    num_outputs: int
    outputs: tuple[Any, ...]
    saved: tuple[Any, ...]
    getitems: dict[int, fx.Node] = field(default_factory=dict)


@dataclass(frozen=True)
class CheckpointParts:
    """A call of ``tag_activation_checkpoint``.

    Attributes:
        body: the region.
        operands: nodes and constants that the call is given.
        outputs: the values of the body's graph that the region gives out.
        options: arguments of ``checkpoint`` as the user gave them.
        context_fn: the selective policy, or None: the user's ``context_fn`` while the process
            lives, a policy of ``hops.policies`` also after a file.
        getitems: nodes around the call that take its outputs, by position.
    """

    body: fx.GraphModule
    operands: tuple[Any, ...]
    outputs: tuple[Any, ...]
    options: dict[str, Any]
    context_fn: Any = None
    getitems: dict[int, fx.Node] = field(default_factory=dict)


def function_parts(node: fx.Node) -> FunctionParts:
    """Take a call of ``autograd_function_apply`` apart.

    Works on the ATen form and on those that Dynamo writes on torch 2.6 to the newest.

    Raises:
        TypeError: ``node`` is not such a call.
    """
    _check(node, stock_autograd_function_apply)
    forward, backward = _module(node, node.args[0]), _module(node, node.args[1])
    values = forward.graph.find_nodes(op="output")[0].args[0]
    num_outputs = node.kwargs.get("num_outputs")
    if num_outputs is not None:
        outputs, saved = values[:num_outputs], values[num_outputs:]
    else:
        first, saved = values
        outputs = tuple(first) if isinstance(first, (tuple, list)) else (first,)
    return FunctionParts(
        name=str(node.kwargs.get("name", "")),
        forward=forward,
        backward=backward,
        operands=tuple(node.args[2:]),
        num_outputs=len(outputs),
        outputs=tuple(outputs),
        saved=tuple(saved),
        getitems=_getitems(node),
    )


def checkpoint_parts(node: fx.Node) -> CheckpointParts:
    """Take a call of ``tag_activation_checkpoint`` apart.

    Raises:
        TypeError: ``node`` is not such a call.
    """
    _check(node, stock_tag_activation_checkpoint)
    body = _module(node, node.args[0])
    outputs = body.graph.find_nodes(op="output")[0].args[0]
    return CheckpointParts(
        body=body,
        operands=tuple(node.args[1:]),
        outputs=tuple(outputs) if isinstance(outputs, (tuple, list)) else (outputs,),
        options=dict(node.kwargs),
        context_fn=shown_context_fn(body, dict(node.kwargs)),
        getitems=_getitems(node),
    )


def _check(node: fx.Node, expected: Any) -> None:
    if not isinstance(node, fx.Node) or node.target is not expected:
        raise TypeError(f"expected a call of {expected.__name__}, got {node!r}")


def _module(node: fx.Node, reference: Any) -> fx.GraphModule:
    owner = node.graph.owning_module
    if not isinstance(owner, torch.nn.Module):
        raise TypeError(f"the graph of {node.name} belongs to no module")
    found = owner
    for part in str(reference.target).split("."):
        found = getattr(found, part)
    return found  # type: ignore[return-value]


def _getitems(node: fx.Node) -> dict[int, fx.Node]:
    return {
        user.args[1]: user  # type: ignore[misc]
        for user in node.users
        if user.target is operator.getitem
    }
