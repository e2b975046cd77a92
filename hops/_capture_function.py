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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from hops._context import RecordedContext
from hops._subgraph import (
    ClosedBody,
    Recording,
    add_output,
    close_body,
    emit,
    leaf_tensors,
    node_of,
    owner_of,
    track,
)
from hops._torch import (
    SYMBOLIC_TYPES,
    FakeTensor,
    disable_proxy_modes_tracing,
    pre_dispatch_tracer,
    set_grad_enabled_silently,
)
from hops.autograd_function_apply import autograd_function_apply, node_options
from hops.errors import CaptureError

_BASE_SETUP_CONTEXT = torch.autograd.function._SingleLevelFunction.setup_context
_ONCE_DIFFERENTIABLE = torch.autograd.function.once_differentiable(lambda ctx: None).__code__

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
        _state.pending = (function, torch.is_grad_enabled())
        _state.call = None
        if _is_defined(found) and torch.is_grad_enabled() and _may_record(function):
            return functools.partial(_replay_setup_context, function, found)
        return found
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


def _is_defined(setup_context: Any) -> bool:
    return setup_context is not _BASE_SETUP_CONTEXT


def _may_record(function: type) -> bool:
    return (
        not torch._C._are_functorch_transforms_active()
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
        self.forward = Recording(self.tracer)
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
        with self.forward.active():
            returned = forward()
            slots = list(returned) if isinstance(returned, tuple) else [returned]
            untouched = self._alias_untouched(slots)
        if not self._records_gradient():
            self.forward.lift_free_values()
            if not self._uses_trainable_values():
                self.forward.splice()
                return returned
        self._write(slots, untouched)
        return tuple(slots) if isinstance(returned, tuple) else slots[0]

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

    def _write(self, slots: list[Any], untouched: dict[int, fx.Node]) -> None:
        tracer, forward = self.tracer, self.forward
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
        backward = _BackwardCapture(self, slots)
        options = self._options(slots)
        bodies, saved, saved_idx = backward.run(options)
        forward.lift_free_values()
        options["saved_for_backward_idx"] = saved_idx
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
    for body in (call.args[1], *call.kwargs.values()):
        if isinstance(body, fx.Node) and body.op == "get_attr":
            _insert_placeholder(getattr(owner, str(body.target)), position, inner)
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


class _BackwardCapture:
    """The backward of a captured call, traced from the values that its forward left.

    It is traced as autograd would run it with ``create_graph``: gradients and
    saved values that require grad, so that a Function used inside is captured
    too.  A backward that only works without (it writes into a parameter, say)
    is traced again in no-grad mode.
    """

    def __init__(self, call: _Capture, slots: list[Any]) -> None:
        self.call = call
        self.slots = slots
        self.tracer = call.tracer

    def run(self, options: dict[str, Any]) -> tuple[list[Any], list[Any], list[int]]:
        """Trace all forms of the backward that the operator needs.

        Returns:
            ``(key, body, outputs)`` for each, the saved values as nodes of the
            forward, and which of them went through ``save_for_backward``.
        """
        traced = [("bwd", *self._trace(options, frozenset()))]
        if not options.get("materialize_grads", True):
            for missing in self._absent_gradients(options):
                key = "bwd_without_" + "_".join(map(str, sorted(missing)))
                traced.append((key, *self._trace(options, missing)))
        saved: dict[fx.Node, None] = {}
        for _, body, gradients in traced:
            for node in self._free_nodes(body, gradients):
                saved.setdefault(self._in_forward(body, node))
        bodies = [
            (key, body, self._bind(body, gradients, list(saved))) for key, body, gradients in traced
        ]
        return bodies, list(saved), self._through_save_for_backward(list(saved))

    def _absent_gradients(self, options: dict[str, Any]) -> list[frozenset[int]]:
        """Which outputs may be left without a gradient when none is made up for them."""
        outputs = self._differentiable(options)
        if len(outputs) > 4:
            return [frozenset({i}) for i in outputs]
        subsets = [frozenset[int]()]
        for position in outputs:
            subsets += [s | {position} for s in subsets]
        return [s for s in subsets if s and len(s) < len(outputs)]

    def _differentiable(self, options: dict[str, Any]) -> list[int]:
        return [
            i
            for i, value in enumerate(self.slots)
            if isinstance(value, torch.Tensor)
            and (value.is_floating_point() or value.is_complex())
            and i not in options["non_differentiable_idx"]
        ]

    def _trace(self, options: dict[str, Any], missing: frozenset[int]) -> tuple[Any, list[Any]]:
        backward, once = self._user_backward()
        if backward is None:
            options["no_backward"] = True
            return self._empty_body(), []
        if once:
            options["once_differentiable"] = True
        try:
            return self._trace_in(not once, backward, options, missing)
        except RuntimeError:
            if once:
                raise
            return self._trace_in(False, backward, options, missing)

    def _empty_body(self) -> Recording:
        body = Recording(self.tracer)
        for _ in self.slots:
            body.add_placeholder()
        return body

    def _user_backward(self) -> tuple[Callable[..., Any] | None, bool]:
        function = self.call.function
        base = torch.autograd.Function
        vjp = type.__getattribute__(function, "vjp")
        backward = type.__getattribute__(function, "backward")
        chosen = backward if vjp is base.vjp else vjp
        if chosen is base.backward:
            return None, False
        target = getattr(chosen, "__func__", chosen)
        if getattr(target, "__code__", None) is _ONCE_DIFFERENTIABLE:
            wrapped = target.__wrapped__
            if chosen is not target:
                wrapped = wrapped.__get__(function)
            return wrapped, True
        return chosen, False

    def _trace_in(
        self,
        grad_mode: bool,
        backward: Callable[..., Any],
        options: dict[str, Any],
        missing: frozenset[int],
    ) -> tuple[Any, list[Any]]:
        body = Recording(self.tracer)
        ctx = self.call.ctx.for_backward()
        with body.active(), set_grad_enabled_silently(grad_mode), _random_state_kept(self.slots):
            gradients = self._gradients(body, options, missing, grad_mode)
            try:
                returned = backward(ctx, *gradients)
            except (CaptureError, KeyboardInterrupt):
                raise
            except Exception as error:
                raise CaptureError(
                    f"hops: the backward of {self.call.name} could not be captured: "
                    f"{type(error).__name__}: {error}\n"
                    "It must run on gradients of the shape, dtype and layout of the outputs, "
                    "without looking at their values."
                ) from error
            outputs = [node_of(g, self.tracer) for g in self._checked(returned)]
        if ctx.read_needs_input_grad:
            options["needs_input_grad"] = self._needs_input_grad()
        return body, outputs

    def _needs_input_grad(self) -> list[bool]:
        return [
            tensor.requires_grad
            for tensor in self.call.tensor_args
            for _ in leaf_tensors(tensor, self.tracer)
        ]

    def _gradients(
        self, body: Recording, options: dict[str, Any], missing: frozenset[int], grad_mode: bool
    ) -> list[Any]:
        """A gradient for each output slot, as autograd would hand it over."""
        differentiable = set(self._differentiable(options))
        materialize = options.get("materialize_grads", True)
        gradients: list[Any] = []
        for position, value in enumerate(self.slots):
            placeholder = body.add_placeholder()
            made_up = position not in differentiable and not materialize
            if not isinstance(value, torch.Tensor) or position in missing or made_up:
                gradients.append(None)
                continue
            with disable_proxy_modes_tracing():
                gradient = torch.ones_like(value.detach())
                if grad_mode and position in differentiable:
                    gradient = gradient.requires_grad_().view_as(gradient)
            track(gradient, fx.Proxy(placeholder, self.tracer), self.tracer)
            gradients.append(gradient)
        return gradients

    def _checked(self, returned: Any) -> list[Any]:
        """The gradients of the tensor arguments, after the checks that autograd makes."""
        values = list(returned) if isinstance(returned, tuple) else [returned]
        args, name = self.call.args, self.call.name
        extra = values[len(args) :]
        if len(values) < len(args) or any(e is not None for e in extra):
            raise CaptureError(
                f"hops: function {name}Backward returned an incorrect number of gradients "
                f"(expected {len(args)}, got {len(values)})"
            )
        gradients: list[Any] = []
        for position, (arg, value) in enumerate(zip(args, values)):
            if not isinstance(arg, torch.Tensor):
                if value is not None:
                    raise CaptureError(
                        f"hops: function {name}Backward returned a gradient different from "
                        f"None at position {position + 1}, but the corresponding forward "
                        "input was not a Variable"
                    )
                continue
            leaves = leaf_tensors(arg, self.tracer)
            if value is None:
                gradients += [None] * len(leaves)
            else:
                gradients += leaf_tensors(value, self.tracer)
        return gradients

    def _free_nodes(self, body: Recording, gradients: list[Any]) -> list[fx.Node]:
        """Values that the backward takes from outside itself, in order of use."""
        used = [source for node in body.graph.nodes for source in node.all_input_nodes]
        used += [g for g in gradients if isinstance(g, fx.Node)]
        return list(dict.fromkeys(n for n in used if self._is_free(body, n)))

    def _is_free(self, body: Recording, node: fx.Node) -> bool:
        if node.graph is not body.graph:
            return True
        if node.op != "get_attr":
            return False
        attribute = getattr(self.tracer.root, str(node.target))
        return not isinstance(attribute, fx.GraphModule)

    def _in_forward(self, body: Recording, node: fx.Node) -> fx.Node:
        if node.graph is body.graph:
            return self.call.forward.lift_attribute(str(node.target))
        return self.call.forward.lift(node)

    def _bind(self, body: Recording, gradients: list[Any], saved: list[fx.Node]) -> tuple[Any, ...]:
        """Make the saved values the last placeholders of the body, in this order.

        Returns:
            The outputs of the body: a node or None for each operand.
        """
        inner = {node: body.add_placeholder(node) for node in saved}

        def bound(node: Any) -> Any:
            if isinstance(node, fx.Node) and self._is_free(body, node):
                return inner[self._in_forward(body, node)]
            return node

        for node in list(body.graph.nodes):
            for source in node.all_input_nodes:
                if self._is_free(body, source):
                    node.replace_input_with(source, bound(source))
        outputs = [bound(gradient) for gradient in gradients]
        outputs = outputs or [None] * self.call.num_inputs
        body.lift_free_values()
        return tuple(outputs)

    def _through_save_for_backward(self, saved: list[fx.Node]) -> list[int]:
        forward = self.call.forward
        with forward.active():
            tensors = [t for t in self.call.ctx.saved_tensors if isinstance(t, torch.Tensor)]
            leaves = [leaf for t in tensors for leaf in leaf_tensors(t, self.tracer)]
            known = [n for n in map(self._known_node, leaves) if n is not None]
        checked = {forward.lift(node) for node in known}
        return [position for position, node in enumerate(saved) if node in checked]

    def _known_node(self, tensor: torch.Tensor) -> fx.Node | None:
        proxy = self.tracer.unwrap_proxy(tensor)
        return proxy.node if isinstance(proxy, fx.Proxy) else None


@contextmanager
def _random_state_kept(values: list[Any]) -> Iterator[None]:
    """Tracing a backward on real tensors draws random numbers that eager does not draw yet."""
    if any(isinstance(v, FakeTensor) for v in values):
        yield
        return
    with torch.random.fork_rng(devices=_devices(values)):
        yield


def _devices(values: list[Any]) -> list[torch.device]:
    return [v.device for v in values if isinstance(v, torch.Tensor) and v.device.type == "cuda"]
