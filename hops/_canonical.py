"""One form for the operators of every torch: graphs that Dynamo wrote, brought to it.

Dynamo writes ``autograd_function_apply`` differently in each range of torch
versions (see ``hops.autograd_function_apply``), and neither operator as the
captures of hops do.  :func:`canonicalize` rewrites calls, not operations: bodies
keep what Dynamo recorded, torch functions or ATen.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from hops._body import drop_grad_switches
from hops._torch import (
    set_grad_enabled,
    stock_autograd_function_apply,
    stock_tag_activation_checkpoint,
)
from hops._validation import FUNCTION_KEYWORDS
from hops.autograd_function_apply import FUNCTION_NAME, node_options
from hops.errors import OperatorCallError
from hops.tag_activation_checkpoint import node_options as region_options


def canonicalize(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Give a graph in which both operators have their one canonical form.

    Made for the graphs that a backend of ``torch.compile`` gets and those of files and tools
    that kept them: bodies with a leading placeholder for ``ctx`` and ``args_tensor_mask``
    (torch 2.6 to 2.10), or a nested output and no count of outputs (2.11 on).  Afterwards
    every ``autograd_function_apply`` has ``name``, ``num_outputs`` and ``num_inputs``, gives a
    tuple, and has bodies without ctx that give flat tuples; every
    ``tag_activation_checkpoint`` has ``form`` and all options.  Bodies inside bodies too.

    Args:
        graph_module: is not changed.  Calls in canonical form already are kept.

    Returns:
        A new GraphModule with the same parameters and buffers.

    Raises:
        OperatorCallError: a call that no torch writes; names its node.
        TypeError: something else than a GraphModule.
    """
    if not isinstance(graph_module, fx.GraphModule):
        raise TypeError(
            f"hops.canonicalize: expected a GraphModule, got {type(graph_module).__name__}; of an "
            "exported program give its graph_module"
        )
    module = _copied(graph_module)
    bodies = {
        str(node.target): canonicalize(getattr(module, str(node.target)))
        for node in module.graph.find_nodes(op="get_attr")
        if isinstance(getattr(module, str(node.target).partition(".")[0], None), fx.GraphModule)
    }
    for name, body in bodies.items():
        setattr(module, name, body)
    for node in list(module.graph.nodes):
        if node.target is stock_autograd_function_apply and "num_outputs" not in node.kwargs:
            _rewrite_function(module, node)
        elif node.target is stock_tag_activation_checkpoint and "form" not in node.kwargs:
            node.kwargs = region_options(dict(node.kwargs))
    module.recompile()
    return module


def _copied(module: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    result = graph.graph_copy(module.graph, values)
    output = graph.output(result)
    output.meta = copy.copy(module.graph.find_nodes(op="output")[0].meta)
    # Not a deep copy: what writes the code of a lean capture holds the whole model.
    graph._codegen = copy.copy(module.graph._codegen)
    copied = fx.GraphModule(module, graph, type(module).__name__)
    copied.meta = dict(module.meta)
    # A lean capture reaches parameters by functions on itself, not by nodes of its graph.
    for name, value in vars(module).items():
        copied.__dict__.setdefault(name, value)
    for registry in ("_parameters", "_buffers", "_modules"):
        for name, value in vars(module)[registry].items():
            if not hasattr(copied, name):
                vars(copied)[registry][name] = value
    return copied


def _rewrite_function(module: fx.GraphModule, node: fx.Node) -> None:
    forward_name, backward_name = (str(body.target) for body in node.args[:2])  # type: ignore[union-attr]
    forward, backward = _own(module, node, forward_name), _own(module, node, backward_name)
    if "args_tensor_mask" in node.kwargs:
        for label, body in (("forward", forward), ("backward", backward)):
            _drop_context(node, label, body)
    outputs, single = _flatten_forward(node, forward)
    operands = node.args[2:]
    mask = node.kwargs.get("args_tensor_mask")
    num_inputs = len(operands) if mask is None else sum(mask)  # type: ignore[arg-type]
    _flatten_backward(backward, outputs, num_inputs, len(operands))
    kept = {k: v for k, v in node.kwargs.items() if k in FUNCTION_KEYWORDS}
    node.kwargs = node_options(
        {
            **{k: list(v) if isinstance(v, (list, tuple)) else v for k, v in kept.items()},
            "name": forward.meta.get(FUNCTION_NAME, stock_autograd_function_apply.__name__),
            "num_outputs": len(outputs),
            "num_inputs": num_inputs,
        }
    )
    if single:
        _take_out_of_tuple(node)


def _own(module: fx.GraphModule, node: fx.Node, name: str) -> fx.GraphModule:
    """A body to rewrite; one that another call uses too is copied for this one."""
    body = getattr(module, name)
    references = [n for n in module.graph.find_nodes(op="get_attr") if n.target == name]
    users = {user for reference in references for user in reference.users}
    if users <= {node}:
        return body  # type: ignore[no-any-return]
    own_name = f"{name}_of_{node.name}"
    setattr(module, own_name, _copied(body))
    with module.graph.inserting_before(node):
        reference = module.graph.get_attr(own_name)
    arguments = [reference if isinstance(a, fx.Node) and a.target == name else a for a in node.args]
    node.args = tuple(arguments)
    return getattr(module, own_name)  # type: ignore[no-any-return]


def _drop_context(node: fx.Node, label: str, body: fx.GraphModule) -> None:
    placeholders = body.graph.find_nodes(op="placeholder")
    if not placeholders or placeholders[0].users:
        raise OperatorCallError(
            f"{node.name}: the {label} body of a call with args_tensor_mask begins with a "
            "placeholder for ctx that nothing uses; this one does not"
        )
    body.graph.erase_node(placeholders[0])


def _flatten_forward(node: fx.Node, body: fx.GraphModule) -> tuple[Sequence[Any], bool]:
    """Give the outputs of the Function, and whether it gives one that is in no tuple."""
    end = body.graph.find_nodes(op="output")[0]
    values = end.args[0]
    if not isinstance(values, (tuple, list)) or len(values) != 2:
        raise OperatorCallError(
            f"{node.name}: without num_outputs, the forward body gives (output, saved values)"
        )
    first, saved = values
    single = not isinstance(first, (tuple, list))
    outputs = (first,) if single else tuple(first)  # type: ignore[arg-type]
    end.args = ((*outputs, *saved),)  # type: ignore[misc]
    drop_grad_switches(body.graph, recording=False)
    _finish(body)
    return outputs, single


def _flatten_backward(
    body: fx.GraphModule, outputs: Sequence[Any], num_inputs: int, num_operands: int
) -> None:
    placeholders = body.graph.find_nodes(op="placeholder")
    for gradient, output in zip(placeholders, outputs):
        if not _is_tensor(output) and not gradient.users:
            body.graph.erase_node(gradient)
    end = body.graph.find_nodes(op="output")[0]
    given = end.args[0]
    gradients = list(given) if isinstance(given, (tuple, list)) else [given]
    gradients += [None] * (num_inputs - len(gradients))
    end.args = (tuple(gradients[:num_operands]),)
    _drop_outer_switches(body.graph)
    drop_grad_switches(body.graph, recording=True)
    _finish(body)


def _is_tensor(value: Any) -> bool:
    if not isinstance(value, fx.Node):
        return False
    example = value.meta.get("val", value.meta.get("example_value"))
    return example is None or isinstance(example, torch.Tensor)


def _drop_outer_switches(graph: fx.Graph) -> None:
    """Dynamo reads a backward inside of ``no_grad``; eager's is differentiable."""
    calls = [n for n in graph.nodes if n.op not in ("placeholder", "get_attr", "output")]
    ends = calls[:1] + calls[1:][-1:]
    if len(ends) == 2 and all(n.target is set_grad_enabled for n in ends):
        if ends[0].args[0] is False:
            for node in ends:
                graph.erase_node(node)


def _finish(body: fx.GraphModule) -> None:
    for node in body.graph.nodes:
        if "example_value" in node.meta:
            node.meta.setdefault("val", node.meta["example_value"])
    body.recompile()


def _take_out_of_tuple(node: fx.Node) -> None:
    users = list(node.users)
    with node.graph.inserting_after(node):
        only = node.graph.call_function(operator.getitem, (node, 0))
    only.meta = copy.copy(node.meta)
    if "example_value" in node.meta:
        node.meta["example_value"] = (node.meta["example_value"],)
    if "val" in node.meta:
        node.meta["val"] = (node.meta["val"],)
    for user in users:
        user.replace_input_with(node, only)
