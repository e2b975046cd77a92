"""What a loaded file says of the two operators must fit together.

A file is data: nothing that it holds is imported or run, and identities of
Functions stay text.  These checks are made once, right after torch.export has
built the graph, so that a damaged or edited file fails when it is loaded, by
the name of the node.  (torch.export.load hides a RuntimeError behind one that
says nothing; an :class:`OperatorCallError` is none.)
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from hops._torch import stock_autograd_function_apply, stock_tag_activation_checkpoint
from hops._validation import check_function_call, check_region_call
from hops.errors import OperatorCallError

_REQUIRED = {
    stock_autograd_function_apply: ("name", "num_outputs", "num_inputs"),
    stock_tag_activation_checkpoint: ("form",),
}
_TARGETS = {
    f"torch.ops.higher_order.{operator.__name__}": operator
    for operator in (stock_autograd_function_apply, stock_tag_activation_checkpoint)
}


def checking_the_operators(deserialize: Callable[..., Any]) -> Callable[..., Any]:
    """``GraphModuleDeserializer.deserialize``, followed by the checks of this module."""

    @functools.wraps(deserialize)
    def checked(self: Any, serialized_graph_module: Any, *args: Any, **kwargs: Any) -> Any:
        graph = serialized_graph_module.graph
        ours = _holds_operators(graph)
        if ours:
            for spec in serialized_graph_module.signature.input_specs:
                _check_name("an input", getattr(getattr(spec.value, "arg", None), "name", ""))
            _check_names(graph)
        result = deserialize(self, serialized_graph_module, *args, **kwargs)
        if ours:
            check_graph_module(result.graph_module)
        return result

    return checked


def _bodies(node: Any) -> list[Any]:
    return [a.arg.as_graph for a in node.inputs if a.arg.type == "as_graph"]


def _holds_operators(graph: Any) -> bool:
    return any(
        node.target in _TARGETS or any(_holds_operators(body.graph) for body in _bodies(node))
        for node in graph.nodes
    )


def _check_names(graph: Any) -> None:
    """fx writes names as they are into the code that it generates and runs, and two
    bodies of one name would replace each other on the module, without a word."""
    bodies: dict[str, Any] = {}
    for value in graph.inputs:
        _check_name("an input", _name_of(value))
    for node in graph.nodes:
        _check_name("a node", getattr(node, "name", None) or "")
        for argument in node.inputs:
            _check_name("a keyword", argument.name)
        for output in node.outputs:
            values = output.value if isinstance(output.value, list) else [output]
            for value in values:
                _check_name("a value", _name_of(value))
        for body in _bodies(node):
            _check_name("a body", body.name or "(nothing)")
            if bodies.setdefault(body.name, body.graph) != body.graph:
                raise OperatorCallError(
                    f"hops: the file holds two different bodies of the name {body.name!a} for "
                    f"{node.target}; it is damaged."
                )
            _check_names(body.graph)


def _name_of(argument: Any) -> Any:
    value = getattr(argument, "value", argument)
    kind = getattr(value, "type", None)
    return getattr(value, "as_name" if kind == "as_name" else "name", "")


def _check_name(what: str, name: Any) -> None:
    if name != "" and not (isinstance(name, str) and name.isidentifier()):
        raise OperatorCallError(
            f"hops: the file calls {what} {name!a:.80}, which is not a name that torch.export "
            "writes; it is damaged."
        )


def check_graph_module(graph_module: fx.GraphModule) -> None:
    """Check every call of the two operators in a graph and in the graphs below it.

    Raises:
        OperatorCallError: names the node, and what does not fit.
    """
    for module in graph_module.modules():
        if not isinstance(module, fx.GraphModule):
            continue
        for node in module.graph.nodes:
            if node.op == "call_function" and node.target in _REQUIRED:
                try:
                    _check_node(module, node)
                except OperatorCallError as error:
                    message = f"hops: node {node.name!a} of the file: {error}"
                    raise OperatorCallError(message) from None


def _check_node(owner: fx.GraphModule, node: fx.Node) -> None:
    for key in _REQUIRED[node.target]:
        if key not in node.kwargs:
            raise OperatorCallError(f"{node.target.__name__}: keyword {key!r} is missing")
    options = {key: _resolved(owner, value) for key, value in node.kwargs.items()}
    if node.target is stock_autograd_function_apply:
        fwd, bwd, *operands = _arguments(owner, node, 2)
        check_function_call(fwd, bwd, operands, options)
        outputs = _output(fwd)[: options["num_outputs"]]
        _check_values(node, "value", _placeholders(bwd), _output(fwd))
    else:
        fwd, *operands = _arguments(owner, node, 1)
        check_region_call(fwd, operands, options)
        outputs = _output(fwd)
    _check_values(node, "operand", _placeholders(fwd), operands)
    _check_outputs(node, outputs)


def _arguments(owner: fx.GraphModule, node: fx.Node, bodies: int) -> list[Any]:
    if len(node.args) < bodies:
        raise OperatorCallError(f"{node.target.__name__}: {bodies} bodies are needed")
    return [
        _resolved(owner, argument) if position < bodies else argument
        for position, argument in enumerate(node.args)
    ]


def _resolved(owner: fx.GraphModule, value: Any) -> Any:
    if isinstance(value, fx.Node) and value.op == "get_attr":
        return getattr(owner, str(value.target), None)
    return value


def _placeholders(body: fx.GraphModule) -> list[fx.Node]:
    return body.graph.find_nodes(op="placeholder")


def _output(body: fx.GraphModule) -> tuple[Any, ...]:
    return tuple(body.graph.find_nodes(op="output")[0].args[0])


def _value(node: Any) -> Any:
    return node.meta.get("val") if isinstance(node, fx.Node) else node


def _check_values(node: fx.Node, what: str, inside: Any, outside: Any) -> None:
    """What a body takes must be of the kind, dtype and (where known) shape that it is given."""
    for position, (taken, given) in enumerate(zip(inside, outside)):
        taken, given = _value(taken), _value(given)
        if not isinstance(taken, torch.Tensor) or not isinstance(given, torch.Tensor):
            continue
        if not _fits(taken, given):
            raise OperatorCallError(
                f"{node.target.__name__}: {what} {position} is {_kind(given)} outside of the "
                f"body and {_kind(taken)} inside"
            )


def _fits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype or one.dim() != other.dim():
        return False
    return all(a == b for a, b in zip(one.shape, other.shape) if type(a) is int and type(b) is int)


def _kind(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def _check_outputs(node: fx.Node, outputs: tuple[Any, ...]) -> None:
    recorded = node.meta.get("val")
    if recorded is not None:
        count = len(recorded) if isinstance(recorded, (tuple, list)) else "an untupled value of"
        if count != len(outputs):
            raise OperatorCallError(
                f"{node.target.__name__}: the node has {count} outputs, its body "
                f"gives {len(outputs)}"
            )
        _check_values(node, "output", recorded, outputs)
    for user in node.users:
        if user.target is operator.getitem and user.args[1] not in range(len(outputs)):
            raise OperatorCallError(
                f"{node.target.__name__}: output {user.args[1]} is used, there are {len(outputs)}"
            )
