"""Capturing a Function that Dynamo meets under export by running it.

Dynamo's own tracing of a Function refuses or misreads much that eager accepts
(duplicate inputs, set_materialize_grads(False), a lone non-differentiable
output, autograd.grad inside backward, ...), differently in each release.  So
under export the call is run for real, on Dynamo's fake tensors, with the
recording that non-strict capture uses, and the operator that comes out is
written into Dynamo's graph.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx
from torch._dynamo.utils import set_example_value
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builder import wrap_fx_proxy
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.lists import ListVariable, TupleVariable
from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable
from torch.fx.experimental.proxy_tensor import make_fx

from hops._torch import fake_conversion_allowed, unbacked_symbols_bound


class NotPython(Exception):
    """A value of Dynamo's cannot be given to real Python code."""


def capture_by_running(tx: Any, function: Any, args: Any, kwargs: Any) -> Any:
    """Run ``function.apply(*args, **kwargs)`` on fake values and write what was captured.

    Raises:
        NotPython: an argument, a free value or a result has no counterpart on
            the other side; nothing has been written then.
    """
    inputs = _Inputs()
    real_args = [inputs.convert(a) for a in args]
    real_kwargs = {k: inputs.convert(v) for k, v in kwargs.items()}
    returned: list[Any] = []

    def run(*values: Any) -> Any:
        fill = _filler(values)
        filled = [fill(a) for a in real_args]
        result = function.apply(*filled, **{k: fill(v) for k, v in real_kwargs.items()})
        returned.append(result)
        return [leaf for leaf in pytree.tree_leaves(result) if _is_graph_value(leaf)]

    with tx.output.fake_mode, fake_conversion_allowed(tx.output.fake_mode):
        with unbacked_symbols_bound(tx.output.fake_mode):
            traced = make_fx(run, pre_dispatch=True)(*inputs.values)
    free = _free_values(tx, traced)
    outputs = _splice(tx, traced, inputs.proxies, free)
    return _rebuild(tx, returned[0], outputs)


def _is_graph_value(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool))


class _Placeholder:
    """Stands for graph input ``position`` among the real arguments."""

    def __init__(self, position: int) -> None:
        self.position = position


class _Inputs:
    """Graph values among the arguments of the call, each once."""

    def __init__(self) -> None:
        self.proxies: list[Any] = []
        self.values: list[Any] = []

    def convert(self, variable: Any) -> Any:
        variable = variable.realize()
        if isinstance(variable, (TensorVariable, SymNodeVariable)):
            return self._add(variable.as_proxy())
        if isinstance(variable, TupleVariable) and variable.python_type() is tuple:
            return tuple(self.convert(item) for item in variable.items)
        if isinstance(variable, ListVariable) and variable.python_type() is list:
            return [self.convert(item) for item in variable.items]
        return _python_value(variable)

    def _add(self, proxy: Any) -> _Placeholder:
        if not isinstance(proxy, fx.Proxy):
            raise NotPython
        for position, known in enumerate(self.proxies):
            if known.node is proxy.node:
                return _Placeholder(position)
        self.proxies.append(proxy)
        self.values.append(proxy.node.meta["example_value"])
        return _Placeholder(len(self.proxies) - 1)


def _python_value(variable: Any) -> Any:
    try:
        if variable.is_python_constant():
            return variable.as_python_constant()
    except NotImplementedError:
        raise NotPython from None
    value = getattr(variable, "value", None)
    if value is None or isinstance(value, torch.Tensor) or variable.source is None:
        raise NotPython
    return value


def _filler(values: Any) -> Any:
    def fill(value: Any) -> Any:
        if isinstance(value, _Placeholder):
            return values[value.position]
        if type(value) in (tuple, list):
            return type(value)(fill(v) for v in value)
        return value

    return fill


def _free_values(tx: Any, traced: fx.GraphModule) -> dict[str, Any]:
    """Dynamo's proxy of each tensor that the Function took from a closure or a global."""
    free = {}
    for node in traced.graph.find_nodes(op="get_attr"):
        value = getattr(traced, node.target)
        if isinstance(value, torch.Tensor) and node.target not in free:
            free[node.target] = _find_tensor(tx, value).as_proxy()
    return free


def _find_tensor(tx: Any, tensor: torch.Tensor) -> Any:
    """A tensor of a module that the traced code can reach, as Dynamo knows it."""
    frame = tx.output.root_tx
    for variable in list(frame.symbolic_locals.values()):
        if not isinstance(variable, VariableTracker):
            continue
        module = _module_of(tx, variable.realize())
        if module is None:
            continue
        for name, value in [*module.named_parameters(), *module.named_buffers()]:
            if value is tensor:
                return _attribute(frame, variable.realize(), name)
    raise NotPython


def _module_of(tx: Any, variable: Any) -> torch.nn.Module | None:
    value = getattr(variable, "value", None)
    if value is None and getattr(variable, "module_key", None) is not None:
        value = tx.output.get_submodule(variable.module_key)
    return value if isinstance(value, torch.nn.Module) else None


def _attribute(tx: Any, variable: Any, path: str) -> Any:
    for name in path.split("."):
        variable = variable.var_getattr(tx, name).realize()
    return variable


def _splice(tx: Any, traced: fx.GraphModule, inputs: Any, free: dict[str, Any]) -> list[Any]:
    """Write the nodes of a traced graph into Dynamo's; the proxies of its outputs."""
    proxies: dict[fx.Node, Any] = {}
    remaining = iter(inputs)
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            proxies[node] = next(remaining)
        elif node.op == "get_attr":
            found = node.target in free
            proxies[node] = free[node.target] if found else _body_proxy(tx, traced, node)
        elif node.op == "output":
            return [proxies[leaf] for leaf in pytree.tree_leaves(node.args[0])]
        else:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), proxies.__getitem__)
            proxies[node] = tx.output.create_proxy(node.op, node.target, args, kwargs)
            set_example_value(proxies[node].node, node.meta["val"])
    return []


def _body_proxy(tx: Any, traced: fx.GraphModule, node: fx.Node) -> Any:
    name = installed_name(tx, getattr(traced, node.target), node.target.rstrip("0123456789_"))
    return tx.output.create_proxy("get_attr", name, (), {})


def installed_name(tx: Any, body: fx.GraphModule, prefix: str = "captured_body") -> str:
    """The name of a body in the new graph: Dynamo gives one module one name, so a
    body that is a submodule of what it reads has one already."""
    modules = tx.output.nn_modules
    for name, module in modules.items():
        if module is body:
            return name
    return tx.output.install_subgraph(prefix, body)


def _rebuild(tx: Any, result: Any, outputs: list[Any]) -> Any:
    """What ``apply`` returned, as Dynamo's variables."""
    remaining = iter(outputs)

    def build(value: Any) -> Any:
        if _is_graph_value(value):
            proxy = next(remaining)
            proxy.node.meta.pop("example_value", None)
            return wrap_fx_proxy(tx=tx, proxy=proxy, example_value=value)
        if type(value) is tuple:
            return TupleVariable([build(v) for v in value])
        if type(value) is list:
            return ListVariable([build(v) for v in value])
        if ConstantVariable.is_literal(value):
            return ConstantVariable.create(value)
        raise NotPython

    return build(result)
