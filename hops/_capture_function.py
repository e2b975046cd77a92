"""From a call of ``Function.apply`` to ``autograd_function_apply``.

[Note: where a Function is caught]
``Function.apply`` may have been bound to a name before hops was imported, and
from torch 2.14 it is native code.  What every torch does, whatever name
``apply`` goes by, is to look up ``setup_context`` and ``forward`` on the class
and to call what it finds.  While a capture runs, the metaclass answers these
two look-ups with functions that call the user's own and record them
(``hops._patches`` installs the metaclass hook for that time only).  All else
that ``apply`` does — checks, ``mark_dirty``, requires_grad of the outputs, the
autograd node — stays torch's own, so it equals eager by construction.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx

from hops._aliases import Replaced
from hops._assigned_buffers import AssignedBuffers
from hops._body import drop_grad_switches
from hops._capture_backward import BackwardCapture
from hops._context import RecordedContext
from hops._effects import Watch
from hops._refusals import refuse_saved_tensors_hooks, running_as_a_graph
from hops._subgraph import (
    ClosedBody,
    Recording,
    add_output,
    close_body,
    emit,
    leaf_tensors,
    node_of,
    owner_of,
)
from hops._torch import (
    SYMBOLIC_TYPES,
    functorch_is_active,
    is_traceable_wrapper_subclass,
    pre_dispatch_tracer,
)
from hops.autograd_function_apply import autograd_function_apply, node_options
from hops.errors import CaptureError

_BASE_SETUP_CONTEXT = torch.autograd.function._SingleLevelFunction.setup_context

_state = threading.local()


def function_name(function: type) -> str:
    """The identity of a Function on its node: module and qualified name."""
    return f"{function.__module__}.{function.__qualname__}"


def answer_lookup(function: type, attribute: str, found: Any) -> Any:
    """What the metaclass gives for ``function.<attribute>`` during a capture.

    torch looks up ``setup_context`` while grad mode is still the caller's, and
    ``forward`` after it has switched grad mode off; so a ``forward`` that is
    looked up at any other time, by the user say, is given as it is.
    """
    if not issubclass(function, torch.autograd.Function):
        return found
    if attribute == "setup_context":
        _state.failed = _state.call = None
        _state.pending = (function, torch.is_grad_enabled())
        if _is_defined(found) and torch.is_grad_enabled() and _may_record(function):
            return functools.partial(_replay_setup_context, function, found)
        return found
    failed, _state.failed = getattr(_state, "failed", None), None
    if failed is not None:
        raise failed
    pending, _state.pending = getattr(_state, "pending", None), None
    if pending != (function, True) or torch.is_grad_enabled():
        if pending is not None and torch.is_grad_enabled():
            _state.pending = pending
        return found
    if not _may_record(function):
        return found
    setup_context = type.__getattribute__(function, "setup_context")
    if _is_defined(setup_context):
        return functools.partial(_record_new_style, function, found, setup_context)
    return functools.partial(_record_old_style, function, found)


def postponed(attribute: str, found: Any, error: BaseException) -> Any:
    """What a look-up gives that ended in an error (an interrupt, say): the error
    is raised when ``forward`` is called, where ``apply`` expects one."""
    if attribute == "setup_context":
        _state.failed = error
        return found

    def forward(*args: Any) -> Any:
        raise error

    return forward


def forget_lookups() -> None:
    """Nothing of a trace that an error ended serves the next one."""
    _state.__dict__.clear()


def _is_defined(setup_context: Any) -> bool:
    return setup_context is not _BASE_SETUP_CONTEXT


def _may_record(function: type) -> bool:
    return (
        not functorch_is_active()
        and function is not torch.utils.checkpoint.CheckpointFunction
        and pre_dispatch_tracer() is not None
    )


def _record_old_style(function: type, forward: Callable[..., Any], ctx: Any, *args: Any) -> Any:
    recorded = RecordedContext(function, tuple(ctx.needs_input_grad))
    outputs = _Capture(function, recorded, args).run(lambda: forward(recorded, *args))
    recorded.copy_to(ctx)
    return outputs


def _record_new_style(
    function: type,
    forward: Callable[..., Any],
    setup_context: Callable[..., Any],
    *args: Any,
) -> Any:
    needs = tuple(isinstance(a, torch.Tensor) and a.requires_grad for a in args)
    recorded = RecordedContext(function, needs)

    def run() -> Any:
        outputs = forward(*args)
        setup_context(recorded, args, outputs)
        return outputs

    outputs = _Capture(function, recorded, args).run(run)
    _state.call = (function, recorded)
    return outputs


def _replay_setup_context(
    function: type, setup_context: Callable[..., Any], ctx: Any, inputs: Any, output: Any
) -> Any:
    """``setup_context`` has been run and recorded along with ``forward``."""
    call, _state.call = getattr(_state, "call", None), None
    if call is None or call[0] is not function:
        return setup_context(ctx, inputs, output)
    return call[1].copy_to(ctx)


class _Capture:
    """One call of a Function being captured."""

    def __init__(self, function: type, ctx: RecordedContext, args: tuple[Any, ...]) -> None:
        self.function = function
        self.name = function_name(function)
        self.ctx = ctx
        self.args = args
        self.tracer = pre_dispatch_tracer()
        self.forward = Recording(self.tracer, self.name)
        self.tensor_args = [a for a in args if isinstance(a, torch.Tensor)]
        self.num_inputs = 0

    def run(self, forward: Callable[[], Any]) -> Any:
        """Record the call, and give what ``forward`` gave.

        A tensor argument that ``forward`` returns untouched is replaced by an
        alias, as ``apply`` itself does with it, so that the operator's output
        and its operand have nodes of their own.
        """
        for leaf in self._leaves(self.tensor_args):
            self.forward.add_operand(node_of(leaf, self.tracer))
            self.num_inputs += 1
        refuse_saved_tensors_hooks(self.forward)
        with self.tracer.tensor_tracker.recording(self.forward.graph) as replaced:
            watch = self.watch("forward", self._user_forward(), self.args)
            with self.forward.active(), AssignedBuffers() as assigned:
                with running_as_a_graph(self.name, watch.reachable):
                    returned = forward()
                watch.report()
                slots = list(returned) if isinstance(returned, tuple) else [returned]
                untouched = self._alias_untouched(slots)
            if not self._records_gradient():
                self.forward.lift_free_values()
                if not self._uses_trainable_values():
                    self.forward.splice()
                    assigned.assign_outside(self.tracer)
                    return returned
            self._write(slots, untouched, replaced)
            assigned.assign_outside(self.tracer)
        return tuple(slots) if isinstance(returned, tuple) else slots[0]

    def watch(self, method: str, functions: list[Any], values: Iterable[Any]) -> Watch:
        """Look for side effects of a method of the Function, on these values among others."""
        return Watch(f"{self.name}.{method}", functions, (self.function, *values))

    def _user_forward(self) -> list[Any]:
        names = ("forward", "setup_context")
        return [type.__getattribute__(self.function, name) for name in names]

    def _leaves(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return [leaf for t in tensors for leaf in leaf_tensors(t, self.tracer)]

    def _records_gradient(self) -> bool:
        return any(t.requires_grad for t in self.tensor_args)

    def _uses_trainable_values(self) -> bool:
        used = set(self.forward.operands)
        for node in used:
            if node.op == "get_attr":
                attribute = getattr(self.tracer.root, str(node.target))
                if getattr(attribute, "requires_grad", False):
                    return True
        return any(
            tensor.requires_grad and slot.proxy.node in used
            for tensor, slot in self.tracer.tensor_tracker.items()
        )

    def _alias_untouched(self, slots: list[Any]) -> dict[int, fx.Node]:
        """Give untouched inputs among the outputs an alias; the node of the input by slot."""
        dirty = self.ctx.said("dirty_tensors", ())
        untouched = {}
        for position, value in enumerate(slots):
            if not isinstance(value, torch.Tensor) or any(value is d for d in dirty):
                continue
            if any(value is a for a in self.tensor_args):
                untouched[position] = node_of(value, self.tracer)
                slots[position] = value.view_as(value)
                self._follow_marks(value, slots[position])
        return untouched

    def _follow_marks(self, before: torch.Tensor, after: torch.Tensor) -> None:
        """``mark_non_differentiable`` said of an output holds for its alias."""
        marked = self.ctx.said("non_differentiable", ())
        if any(before is m for m in marked):
            self.ctx.non_differentiable = tuple(after if m is before else m for m in marked)

    def _write(self, slots: list[Any], untouched: dict[int, fx.Node], replaced: Replaced) -> None:
        tracer, forward = self.tracer, self.forward
        self._refuse_own_subclass(slots)
        out_nodes: list[Any] = []
        for position, value in enumerate(slots):
            node = self._value_node(value)
            if position in untouched and isinstance(node, fx.Node):
                alias, node = node, forward.lift(untouched[position])
                alias.replace_all_uses_with(node)
                forward.graph.erase_node(alias)
            elif isinstance(node, fx.Node):
                node = forward.lift(node)
            out_nodes.append(node)
        backward = BackwardCapture(self, slots)
        options = self._options(slots)
        bodies, saved, saved_idx = backward.run(options)
        forward.lift_free_values()
        options["saved_for_backward_idx"] = saved_idx
        drop_grad_switches(forward.graph, recording=False)
        fwd = forward.finish((*out_nodes, *saved), "fwd_body_")
        captured = [None] * (len(forward.operands) - self.num_inputs)
        bwd_nodes = {
            key: body.finish((*gradients, *captured), "bwd_body_")
            for key, body, gradients in bodies
        }
        bwd = bwd_nodes.pop("bwd")
        visible = tuple(
            value if isinstance(value, (torch.Tensor, *SYMBOLIC_TYPES)) else None for value in slots
        )
        options.update(bwd_nodes)
        replaced.restore()
        node = emit(
            tracer,
            autograd_function_apply,
            (fwd, bwd, *forward.operands),
            node_options({"name": self.name, "num_outputs": len(slots), **options}),
            visible,
        )
        add = functools.partial(_add_output, tracer)
        close_body(tracer, forward.graph, ClosedBody(node, add))
        for _, recording, _ in bodies:
            close_body(tracer, recording.graph, ClosedBody(None))

    def _refuse_own_subclass(self, slots: list[Any]) -> None:
        """Refuse a wrapper subclass that the forward makes of plain tensors: a graph has no
        operation for that, so that its inner tensors would be constants of the graph."""
        given = {type(tensor) for tensor in self.tensor_args}
        for value in slots:
            if is_traceable_wrapper_subclass(value) and type(value) not in given:
                raise CaptureError(
                    f"hops: {self.name} returns a {type(value).__name__} that it makes itself, "
                    "which a graph cannot hold. Return its inner tensors, and make the "
                    f"{type(value).__name__} of them outside of the Function."
                )

    def _value_node(self, value: Any) -> Any:
        if isinstance(value, (torch.Tensor, *SYMBOLIC_TYPES)):
            with self.forward.active():
                return node_of(value, self.tracer)
        return None

    def _positions(self, slots: list[Any], tensors: Any) -> list[int]:
        return [
            position
            for position, value in enumerate(slots)
            if any(value is t for t in tensors if isinstance(t, torch.Tensor))
        ]

    def _options(self, slots: list[Any]) -> dict[str, Any]:
        options: dict[str, Any] = {"num_inputs": self.num_inputs}
        non_differentiable = self._positions(slots, self.ctx.said("non_differentiable", ()))
        options["non_differentiable_idx"] = non_differentiable
        dirty = self._positions(slots, self.ctx.said("dirty_tensors", ()))
        if dirty:
            options["dirty_idx"] = dirty
        if not self.ctx.said("materialize_grads", True):
            options["materialize_grads"] = False
        return options


def _add_output(tracer: Any, call: fx.Node, inner: fx.Node) -> fx.Node:
    """One more output of a captured call, for a value that left its forward.

    In eager such a value is a plain result of operations in no-grad mode, so
    the output is marked non-differentiable.
    """
    position = call.kwargs["num_outputs"]
    owner = owner_of(call, tracer)
    if isinstance(inner.meta.get("val"), torch.Tensor):
        gradients = sum(isinstance(v, torch.Tensor) for v in call.meta["val"][:position])
        for body in (call.args[1], *call.kwargs.values()):
            if isinstance(body, fx.Node) and body.op == "get_attr":
                _insert_placeholder(getattr(owner, str(body.target)), gradients, inner)
    call.kwargs = {
        **call.kwargs,
        "num_outputs": position + 1,
        "non_differentiable_idx": [*call.kwargs.get("non_differentiable_idx", ()), position],
    }
    forward = getattr(owner, str(call.args[0].target))
    return add_output(call, forward, inner, position)


def _insert_placeholder(body: fx.GraphModule, position: int, like: fx.Node) -> None:
    placeholders = body.graph.find_nodes(op="placeholder")
    if position < len(placeholders):
        where = body.graph.inserting_before(placeholders[position])
    elif placeholders:
        where = body.graph.inserting_after(placeholders[-1])
    else:
        where = body.graph.inserting_before(next(iter(body.graph.nodes)))
    with where:
        placeholder = body.graph.placeholder(f"escaped_{position}")
    placeholder.meta["val"] = like.meta.get("val")
    body.recompile()
