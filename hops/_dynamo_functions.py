"""Capturing a Function that Dynamo meets under export by running it.

Dynamo's own tracing of a Function refuses or misreads much that eager accepts
(duplicate inputs, set_materialize_grads(False), a lone non-differentiable
output, autograd.grad inside backward, ...), differently in each release.  So
under export the call is run for real, on Dynamo's fake tensors and on the
Python objects that its variables stand for (``hops._dynamo_python``), with the
recording that non-strict capture uses, and the operator that comes out is
written into Dynamo's graph.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx
from torch._dynamo.exc import Unsupported
from torch._dynamo.utils import set_example_value
from torch._dynamo.variables.base import ValueMutationNew, VariableTracker
from torch._dynamo.variables.builder import wrap_fx_proxy
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.lists import ListVariable, SizeVariable, TupleVariable
from torch.fx.experimental.proxy_tensor import make_fx, maybe_enable_thunkify

from hops._capture_function import function_name
from hops._dynamo_changes import NotPython, new_dict
from hops._dynamo_python import PythonView
from hops._dynamo_variables import attribute, module_of, proxy_of
from hops._effects import effects_told_at_the_end
from hops._source_lines import add_lines, lines_recorded
from hops._torch import (
    SYMBOLIC_TYPES,
    FakeTensor,
    fake_conversion_allowed,
    functorch_is_active,
    pre_dispatch_tracer,
    unbacked_symbols_bound,
)
from hops.errors import CaptureError


def capture_by_running(tx: Any, function: type, args: Any, kwargs: Any) -> Any:
    """Run ``function.apply(*args, **kwargs)`` on fake values and write what was captured.

    Raises:
        CaptureError: an argument, a free value or a result has no counterpart on the
            other side.
    """
    name = function_name(function)
    if functorch_is_active():
        raise CaptureError(
            f"hops: {name} is applied under a torch.func transform (vmap, grad, jvp, ...), "
            "which cannot be captured before dispatch. Apply the transform outside of the "
            "captured model, or use torch.compile."
        )
    with effects_told_at_the_end():
        try:
            return _Call(tx, name, function).run(args, kwargs)
        except NotPython as error:
            raise CaptureError(
                f"hops: strict capture cannot hand {error} over between Dynamo and {name}. "
                "Capture with strict=False, which runs the model's Python as it is."
            ) from error


class _Call:
    """One call of a Function, run between Dynamo's variables and back."""

    def __init__(self, tx: Any, name: str, function: Any) -> None:
        self.tx = tx
        self.name = name
        self.function = function
        self.view = PythonView(tx)
        self.returned: Any = None
        #: Each tensor and number that came out, once, and later the variable of each.
        self.values: list[Any] = []
        self.built: dict[int, Any] = {}

    def run(self, args: Any, kwargs: Any) -> Any:
        traced = self._trace(args, kwargs)
        inputs = [proxy_of(variable) for _, variable in self.view.tensors.values()]
        outputs = self._splice(traced, iter(inputs))
        for value, proxy in zip(self.values, outputs):
            proxy.node.meta.pop("example_value", None)
            variable = wrap_fx_proxy(tx=self.tx, proxy=proxy, example_value=value)
            self.built[id(value)] = variable
        for watched in self.view.watched:
            watched.write(self.tx, self._build)
        return self._build(self.returned)

    def _trace(self, args: Any, kwargs: Any) -> fx.GraphModule:
        mode = self.tx.output.fake_mode
        try:
            self.view.put_pending_in_place()
            real_args = [self.view.object_of(a) for a in args]
            real_kwargs = {k: self.view.object_of(v) for k, v in kwargs.items()}

            modes = self.view.function_modes()
            self.view.watch_modules()

            def call(*values: Any) -> list[Any]:
                # The size of a view's base is in no operand: arithmetic on it, which autograd does
                # where the view is written to, is recorded only where an operation uses it.
                with maybe_enable_thunkify(), ExitStack() as around:
                    for function_mode in modes:
                        around.enter_context(function_mode)
                    tracer = pre_dispatch_tracer()
                    around.enter_context(lines_recorded(tracer, sys._getframe(), always=True))
                    self.returned = self.function.apply(*real_args, **real_kwargs)
                return self._look()

            known = [value for value, _ in self.view.tensors.values()]
            with mode, fake_conversion_allowed(mode), unbacked_symbols_bound(mode):
                return make_fx(call, pre_dispatch=True)(*known)
        finally:
            self.view.restore()

    def _look(self) -> list[Any]:
        """What came out: by being returned, or through an object that was changed."""
        changed = [value for watched in self.view.watched for value in watched.look()]
        leaves = pytree.tree_leaves([self.returned, changed])
        new = {id(v): v for v in leaves if _is_graph_value(v) and id(v) not in self.view.tensors}
        self.values = list(new.values())
        return self.values

    # ----------------------------------------------------------------------- the graph

    def _splice(self, traced: fx.GraphModule, inputs: Iterator[Any]) -> list[Any]:
        """Write the nodes of a traced graph into Dynamo's; the proxies of its outputs."""
        create_proxy = self.tx.output.create_proxy
        proxies: dict[fx.Node, Any] = {}
        for node in traced.graph.nodes:
            if node.op == "placeholder":
                proxies[node] = next(inputs)
            elif node.op == "get_attr":
                proxies[node] = self._attribute(node, getattr(traced, str(node.target)))
            elif node.op == "output":
                return [proxies[leaf] for leaf in pytree.tree_leaves(node.args[0])]
            else:
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), proxies.__getitem__)
                proxies[node] = create_proxy(node.op, node.target, args, kwargs)
                set_example_value(proxies[node].node, node.meta["val"])
                for body in _bodies(traced, node):
                    _place(body, proxies[node].node)
        return []

    def _attribute(self, node: fx.Node, value: Any) -> Any:
        """Dynamo's proxy of a body, or of a value that was not handed to the call."""
        prefix = str(node.target).rstrip("0123456789")
        if isinstance(value, fx.GraphModule):
            name = installed_name(self.tx, value, prefix.rstrip("_"))
            return self.tx.output.create_proxy("get_attr", name, (), {})
        if isinstance(value, torch.ScriptObject):
            raise CaptureError(
                f"hops: {self.name} uses a {_kind(value)}, which strict capture cannot write "
                "into its graph. Capture with strict=False."
            )
        if not isinstance(value, torch.Tensor):
            return _constant(self.tx, value)
        return self._free_tensor(value)

    def _free_tensor(self, value: torch.Tensor) -> Any:
        if id(value) in self.view.parts:
            return attribute(self.tx, *self.view.parts[id(value)]).as_proxy()
        found = _of_a_module(self.tx, value)
        if found is not None:
            return found.as_proxy()
        for tracer in _tracers(self.tx.output.current_tracer):
            for node in tracer.graph.nodes:
                if node.meta.get("example_value") is value:
                    return fx.Proxy(node, tracer)
        if isinstance(value, FakeTensor):
            raise NotPython("a tensor that the model keeps in a Python object")
        return _constant(self.tx, value)

    # ---------------------------------------------------------------------- the results

    def _build(self, value: Any) -> Any:
        """A value as one of Dynamo's variables, the same one each time."""
        known = self.built.get(id(value)) or self.view.variable_of(value)
        if known is not None:
            return known
        if ConstantVariable.is_literal(value):
            return ConstantVariable.create(value)
        variable = self._new(value)
        self.built[id(value)] = variable
        return variable

    def _new(self, value: Any) -> Any:
        if type(value) is tuple:
            return TupleVariable([self._build(v) for v in value])
        if type(value) is torch.Size:
            return SizeVariable([self._build(v) for v in value])
        if type(value) is list:
            items = [self._build(v) for v in value]
            return ListVariable(items, mutation_type=ValueMutationNew())
        if type(value) is dict:
            return new_dict({k: self._build(v) for k, v in value.items()}, self._build)
        try:
            return VariableTracker.build(self.tx, value)
        except (Unsupported, AssertionError):
            raise NotPython(f"a {_kind(value)}") from None


def _is_graph_value(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, *SYMBOLIC_TYPES))


def _bodies(owner: torch.nn.Module, node: fx.Node) -> list[fx.GraphModule]:
    """The bodies that a call is given."""
    sources = [n for n in node.all_input_nodes if n.op == "get_attr"]
    values = [getattr(owner, str(n.target)) for n in sources]
    return [v for v in values if isinstance(v, fx.GraphModule)]


def _place(body: fx.GraphModule, call: fx.Node) -> None:
    """Let the nodes of a body tell where in the model its call stands."""
    for node in body.graph.nodes:
        if node.op == "call_function":
            add_lines(node, before=call.stack_trace or "")
            node.meta["nn_module_stack"] = dict(call.meta.get("nn_module_stack", {}))
            for nested in _bodies(body, node):
                _place(nested, call)


def _kind(value: Any) -> str:
    text = str(value._type()) if isinstance(value, torch.ScriptObject) else type(value).__name__
    return text.rpartition(".")[2]


def _tracers(tracer: Any) -> Iterator[Any]:
    while tracer is not None:
        yield tracer
        tracer = tracer.parent


def _of_a_module(tx: Any, tensor: torch.Tensor) -> Any:
    """A parameter or buffer of a module that the model's forward can name."""
    frame = tx.output.root_tx
    for variable in list(frame.symbolic_locals.values()):
        if not isinstance(variable, VariableTracker):
            continue
        module = module_of(tx, variable.realize())
        if module is None:
            continue
        for name, value in [*module.named_parameters(), *module.named_buffers()]:
            if value is tensor:
                return attribute(frame, variable.realize(), name)
    return None


def _constant(tx: Any, value: Any) -> Any:
    """A tensor that belongs to no module, or an object that is none (a generator), as an
    attribute of Dynamo's graph."""
    modules = tx.output.nn_modules
    names = (name for name, known in modules.items() if known is value)
    name = next(names, None)
    if name is None:
        name = f"captured_constant_{len(modules)}"
        modules[name] = value
    proxy = tx.output.root_tracer.create_proxy("get_attr", name, (), {})
    if isinstance(value, torch.Tensor):
        set_example_value(proxy.node, tx.output.fake_mode.from_tensor(value, static_shapes=True))
    else:
        # torch.export takes an attribute without a value for a tensor.
        proxy.node.meta["val"] = value
    return proxy


def installed_name(tx: Any, body: fx.GraphModule, prefix: str = "captured_body") -> str:
    """The name of a body in the new graph: Dynamo gives one module one name, so a
    body that is a submodule of what it reads has one already."""
    modules = tx.output.nn_modules
    for name, module in modules.items():
        if module is body:
            return name
    return tx.output.install_subgraph(prefix, body)
