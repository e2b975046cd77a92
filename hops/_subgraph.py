"""Recording part of a running pre-dispatch trace into a body of its own.

[Note: recording by changing the tracer's graph]
While a tracer records, each tensor knows its node.  To give a region of user
code a graph of its own it is enough to let the same tracer write into another
``fx.Graph`` for a while: the region runs as it would anyway, on the very same
tensors, whatever Python it is made of.  What crosses the border shows itself:

- a node of the body whose argument lies in another graph uses a free value:
  it becomes a placeholder of the body and an operand of the operator
  (:meth:`Recording.lift`), be it an argument, a parameter, a buffer, a closure
  or a global;
- a node outside whose argument lies in a body that is closed uses a value that
  escaped: the operator gets one more output for it (``ClosedBody.export``).

The alternative, a nested ``make_fx`` as other operators use, sees only what is
handed to it: closures turn into constants, and a context object with tensors
somewhere inside cannot be handed over at all.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from hops._body import (
    Body,
    crosses_as_tensor,
    holds_body,
    number_bodies,
    pack_number,
    tidy_graph,
)
from hops._mode_switches import simplify_mode_switches
from hops._torch import (
    SymbolicValues,
    disable_proxy_modes_tracing,
    is_traceable_wrapper_subclass,
    pre_dispatch_tracer,
    top_saved_tensors_hooks,
    track_tensor_tree,
    without_torch_functions,
)
from hops.errors import CaptureError

_BODIES = "_hops_closed_bodies"
_RECORDINGS = "_hops_recordings"


def leaf_tensors(tensor: torch.Tensor, tracer: Any) -> list[torch.Tensor]:
    """The tensors by which the tracer knows ``tensor``: itself, or the inner
    tensors of a wrapper subclass."""
    if tensor in tracer.tensor_tracker or not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    attributes, _ = tensor.__tensor_flatten__()
    inner = [getattr(tensor, attribute) for attribute in attributes]
    return [leaf for t in inner if isinstance(t, torch.Tensor) for leaf in leaf_tensors(t, tracer)]


def node_of(value: Any, tracer: Any) -> Any:
    """The node of a tensor or symbolic number; a new ``get_attr`` node for a
    tensor that the tracer does not know; a constant as it is."""
    return tracer.create_arg(tracer.unwrap_proxy(value))


class ClosedBody:
    """A body whose operator has been written into the enclosing graph.

    Args:
        call: the operator's node, or None for a body that gives nothing out.
        add_output: makes one more output of ``call`` for a node of the body,
            and gives its node in the enclosing graph.
    """

    def __init__(
        self,
        call: fx.Node | None,
        add_output: Callable[[fx.Node, fx.Node], fx.Node] | None = None,
    ) -> None:
        self.call = call
        self._add_output = add_output
        self._exported: dict[fx.Node, fx.Node] = {}

    def publish(self, inner: fx.Node, outer: fx.Node) -> None:
        """Note that ``outer`` in the enclosing graph stands for ``inner``."""
        self._exported[inner] = outer

    def export(self, inner: fx.Node) -> fx.Node:
        """The node of the enclosing graph that stands for ``inner``."""
        if inner not in self._exported:
            if self.call is None or self._add_output is None:
                raise CaptureError(
                    f"hops: the value of node {inner.name!r} left the backward of an "
                    "autograd.Function while it was being captured; a backward must "
                    "hand out its results by returning them."
                )
            self._exported[inner] = self._add_output(self.call, inner)
        return self._exported[inner]


def _closed_bodies(tracer: Any) -> dict[fx.Graph, ClosedBody]:
    bodies = getattr(tracer, _BODIES, None)
    if bodies is None:
        bodies = {}
        setattr(tracer, _BODIES, bodies)
    return bodies


def _recordings(tracer: Any) -> list[Recording]:
    recordings = getattr(tracer, _RECORDINGS, None)
    if recordings is None:
        recordings = []
        setattr(tracer, _RECORDINGS, recordings)
    return recordings


def saved_tensors_hooks() -> Any:
    """The hooks that act on what is saved for backward right now, or None; also where torch
    cannot tell (2.6), so that there they are not refused."""
    return None if top_saved_tensors_hooks is None else top_saved_tensors_hooks(True)


def recording_on_this_thread() -> Recording | None:
    """The innermost body that is being recorded."""
    tracer = pre_dispatch_tracer()
    recordings = _recordings(tracer) if tracer is not None else ()
    return recordings[-1] if recordings else None


def close_body(tracer: Any, graph: fx.Graph, body: ClosedBody) -> None:
    _closed_bodies(tracer)[graph] = body


def surface(node: fx.Node, tracer: Any) -> fx.Node:
    """Follow ``node`` out of the closed bodies that it lies in."""
    bodies = _closed_bodies(tracer)
    while node.graph in bodies:
        node = bodies[node.graph].export(node)
    return node


def settle(graph: fx.Graph, tracer: Any) -> None:
    """Replace every use of a value that escaped from a closed body of ``graph``, and drop
    the tensors that code around a body no longer uses."""
    if not _closed_bodies(tracer):
        return
    for node in list(graph.nodes):
        for source in node.all_input_nodes:
            if source.graph is not graph:
                node.replace_input_with(source, surface(source, tracer))
    for node in graph.find_nodes(op="get_attr"):
        if not node.users:
            graph.erase_node(node)


class Recording:
    """One body while it is being recorded.

    Args:
        tracer: the ``PythonKeyTracer`` whose pre-dispatch trace is running.
        name: of the code that is recorded, for messages.
    """

    def __init__(self, tracer: Any, name: str) -> None:
        self.tracer = tracer
        self.name = name
        self.graph = fx.Graph()
        self.parent = tracer.graph
        self.random_state_set_at: Any = None
        self.saved_tensors_hooks = saved_tensors_hooks()
        self.operands: list[fx.Node] = []
        self._placeholder_of: dict[fx.Node, fx.Node] = {}
        self._last_placeholder: fx.Node | None = None
        self._num_placeholders = 0
        self._attributes: dict[str, fx.Node] = {}

    @contextmanager
    def active(self) -> Iterator[None]:
        """Let the tracer write into this body."""
        before, symbols = self.tracer.graph, SymbolicValues(self.tracer)
        recordings = _recordings(self.tracer)
        recordings.append(self)
        self.tracer.graph = self.graph
        try:
            yield
        finally:
            self.tracer.graph = before
            recordings.pop()
            symbols.restore()

    def made(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is known by a node of this body."""
        proxy = self.tracer.unwrap_proxy(tensor)
        return isinstance(proxy, fx.Proxy) and proxy.node.graph is self.graph

    def add_placeholder(self, like: fx.Node | None = None) -> fx.Node:
        """A new placeholder after those that there are, named as make_fx names them."""
        name = f"arg{self._num_placeholders}_1"
        self._num_placeholders += 1
        if self._last_placeholder is not None:
            position = self.graph.inserting_after(self._last_placeholder)
        else:
            first = next(iter(self.graph.nodes), None)
            position = self.graph.inserting_before(first)
        with position:
            placeholder = self.graph.placeholder(name)
        placeholder.meta["val"] = None if like is None else like.meta.get("val")
        self._last_placeholder = placeholder
        return placeholder

    def add_operand(self, outer: fx.Node) -> fx.Node:
        """One more operand, also where the same value is one already."""
        placeholder = self.add_placeholder(outer)
        self.operands.append(outer)
        self._placeholder_of.setdefault(outer, placeholder)
        return placeholder

    def lift(self, node: fx.Node) -> fx.Node:
        """What stands for ``node`` inside this body."""
        if node.graph is self.graph:
            return self._own(node)
        node = surface(node, self.tracer)
        if node.graph is self.graph:
            return node
        if node not in self._placeholder_of:
            self._add_free_value(node)
        return self._placeholder_of[node]

    def _add_free_value(self, node: fx.Node) -> None:
        if not crosses_as_tensor(node):
            self.add_operand(node)
            return
        packed = pack_number(node, self.tracer.create_node)
        self._placeholder_of[node] = self.unpack_number(self.add_operand(packed), node)

    def unpack_number(self, placeholder: fx.Node, like: fx.Node) -> fx.Node:
        """The number in a placeholder that stands for ``like``, see [Note: numbers cross as
        tensors]."""
        with self.graph.inserting_after(self._last_placeholder):
            number = self.graph.call_function(torch.ops.aten.item.default, (placeholder,))
        number.meta["val"] = like.meta["val"]
        return number

    def _own(self, node: fx.Node) -> fx.Node:
        if node.op != "get_attr" or self._is_body(node):
            return node
        return self.lift_attribute(str(node.target))

    def lift_attribute(self, target: str) -> fx.Node:
        """What stands for a tensor attribute of the root inside this body."""
        if target not in self._attributes:
            outer = self.tracer.create_node("get_attr", target, (), {})
            self._attributes[target] = self.add_operand(outer)
        return self._attributes[target]

    def _is_body(self, node: fx.Node) -> bool:
        return holds_body(self.tracer.root, node)

    def lift_free_values(self) -> None:
        """Make operands of all values from outside that this body uses.

        Call it while the tracer records the enclosing graph: a tensor that is
        an attribute of the root becomes an operand by a ``get_attr`` there.
        """
        for node in list(self.graph.nodes):
            for source in node.all_input_nodes:
                inner = self.lift(source)
                if inner is not source:
                    node.replace_input_with(source, inner)

    def finish(self, outputs: tuple[Any, ...], prefix: str) -> fx.Node:
        """Write the output, move nested bodies in, register the body on the
        root of the trace, and give its ``get_attr`` node."""
        self.graph.output(outputs)
        for node in reversed(list(self.graph.nodes)):
            if not node.users and (node.op == "get_attr" or _is_size_of(node)):
                self.graph.erase_node(node)
        simplify_mode_switches(self.graph)
        root = self.tracer.root
        renamed = number_bodies(self.graph, root)
        tidy_graph(self.graph)
        module = Body({new: getattr(root, old) for old, new in renamed.items()}, self.graph)
        for target in renamed:
            delattr(root, target)
        name = self.tracer.get_fresh_qualname(prefix)
        root.register_module(name, module)
        with _no_stack_traces(self.tracer):
            return self.tracer.create_node("get_attr", name, (), {})

    def splice(self) -> None:
        """Write the recorded nodes into the enclosing graph, with no operator."""
        body = ClosedBody(None)
        inner_of = {p: o for o, p in self._placeholder_of.items()}

        def outer(node: fx.Node) -> fx.Node:
            if node in inner_of:
                return inner_of[node]
            if node.graph is self.graph:
                return body.export(node)
            return surface(node, self.tracer)

        for node in self.graph.nodes:
            if node.op != "placeholder":
                body.publish(node, self.parent.node_copy(node, outer))
        for nested in _closed_bodies(self.tracer).values():
            if nested.call is not None and nested.call.graph is self.graph:
                nested.call = body.export(nested.call)
        close_body(self.tracer, self.graph, body)


def _is_size_of(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target in (
        torch.ops.aten.sym_size.int,
        torch.ops.aten.sym_stride.int,
        torch.ops.aten.sym_numel.default,
        torch.ops.aten.sym_storage_offset.default,
    )


def emit(
    tracer: Any,
    target: Any,
    arguments: tuple[Any, ...],
    options: dict[str, Any],
    outputs: tuple[Any, ...],
) -> fx.Node:
    """Write a call of an operator and tie its outputs to their values.

    Args:
        outputs: one entry a slot of the operator's output; a tensor or
            symbolic number is from now on known by the slot's node, anything
            else leaves its slot empty.
    """
    node = tracer.create_node("call_function", target, arguments, options)
    proxy = fx.Proxy(node, tracer)
    metadata: list[Any] = []
    parts = [n for n in node.all_input_nodes if n.op == "get_attr"]
    with _no_stack_traces(tracer):
        for position, value in enumerate(outputs):
            if value is None:
                metadata.append(None)
                continue
            slot = proxy[position]
            track(value, slot, tracer)
            metadata.append(slot.node.meta["val"])
            parts.append(slot.node)
    node.meta["val"] = tuple(metadata)
    for part in parts:
        if node.stack_trace and not part.stack_trace:
            part.stack_trace = node.stack_trace
    return node


@contextmanager
def _no_stack_traces(tracer: Any) -> Iterator[None]:
    """Nodes that belong to a call have the stack trace of the call, which costs more to
    take than all else that is done for such a node."""
    before = tracer.record_stack_traces
    tracer.record_stack_traces = False
    try:
        yield
    finally:
        tracer.record_stack_traces = before


def owner_of(node: fx.Node, tracer: Any) -> torch.nn.Module:
    """The module whose graph ``node`` lies in."""
    owner = node.graph.owning_module
    return tracer.root if owner is None else owner


def track(value: Any, proxy: fx.Proxy, tracer: Any) -> None:
    """Let the tracer know ``value`` by ``proxy`` from now on."""
    with disable_proxy_modes_tracing(), without_torch_functions():
        track_tensor_tree(value, proxy, constant=None, tracer=tracer)


def add_output(node: fx.Node, body: fx.GraphModule, inner: fx.Node, position: int) -> fx.Node:
    """Give a call of an operator one more output, at ``position`` of its body's
    output tuple, and return the node of it in the enclosing graph.

    Slots of the node from ``position`` on move up by one.
    """
    (output,) = body.graph.find_nodes(op="output")
    values = list(output.args[0])
    values.insert(position, inner)
    output.args = (tuple(values),)
    body.recompile()
    vals = list(node.meta["val"])
    vals.insert(position, inner.meta.get("val"))
    node.meta["val"] = tuple(vals)
    with node.graph.inserting_after(node):
        getitem = node.graph.call_function(operator.getitem, (node, position))
    getitem.meta.update(
        {k: node.meta[k] for k in ("nn_module_stack", "stack_trace") if k in node.meta}
    )
    getitem.meta["val"] = inner.meta.get("val")
    return getitem
