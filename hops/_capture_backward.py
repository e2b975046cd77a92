"""The backward of a Function that is being captured.

Its forward is recorded in ``hops._capture_function``; the backward is traced
right after it, from the very values that the forward left on its context.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from hops._body import crosses_as_tensor, drop_grad_switches, pack_number
from hops._random_state import own_random_states
from hops._refusals import running_as_a_graph
from hops._source_lines import lines_recorded
from hops._subgraph import (
    Recording,
    leaf_tensors,
    node_of,
    track,
)
from hops._torch import (
    FakeTensor,
    autocast_disabled,
    disable_proxy_modes_tracing,
    set_grad_enabled_silently,
)
from hops.errors import CaptureError

_ONCE_DIFFERENTIABLE = torch.autograd.function.once_differentiable(lambda ctx: None).__code__


class _BackwardFailed(CaptureError):
    """The user's backward raised; ``call`` is the call that it belongs to."""

    def __init__(self, call: Any, message: str) -> None:
        super().__init__(message)
        self.call = call


class BackwardCapture:
    """The backward of a captured call, traced from the values that its forward left.

    It is traced as autograd would run it with ``create_graph``: gradients and
    saved values that require grad, so that a Function used inside is captured
    too.  A backward that only works without (it writes into a parameter, say)
    is traced again in no-grad mode.
    """

    def __init__(self, call: Any, slots: list[Any]) -> None:
        self.call = call
        self.slots = slots
        self.tracer = call.tracer
        self.kept = call.ctx.with_own_containers()
        self.first = self.fresh = True
        self._packed: dict[fx.Node, fx.Node] = {}

    def run(self, options: dict[str, Any]) -> tuple[list[Any], list[Any], list[int]]:
        """Trace all forms of the backward that the operator needs.

        Returns:
            ``(key, body, outputs)`` for each, the saved values as nodes of the
            forward, and which of them went through ``save_for_backward``.
        """
        traced = [("bwd", *self._trace(options, frozenset()))]
        self.first = False
        if not options.get("materialize_grads", True):
            for missing in self._absent_gradients(options):
                key = "bwd_without_" + "_".join(map(str, sorted(missing)))
                traced.append((key, *self._trace(options, missing)))
        saved: dict[fx.Node, None] = {}
        for _, body, gradients in traced:
            for node in self._free_nodes(body, gradients):
                saved.setdefault(self._crossing(self._in_forward(body, node)))
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
        except _BackwardFailed as failed:
            if once or failed.call is not self.call:
                raise
            return self._trace_in(False, backward, options, missing)

    def _empty_body(self) -> Recording:
        body = Recording(self.tracer, f"{self.call.name}.backward")
        for value in self.slots:
            if isinstance(value, torch.Tensor):
                self._gradient(body, value, False)
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
        return chosen, _is_once_differentiable(target)

    def _trace_in(
        self,
        grad_mode: bool,
        backward: Callable[..., Any],
        options: dict[str, Any],
        missing: frozenset[int],
    ) -> tuple[Any, list[Any]]:
        body = Recording(self.tracer, f"{self.call.name}.backward")
        ctx = self.call.ctx.for_backward() if self.fresh else self.kept.with_own_containers()
        self.fresh = False
        values = (*self.call.args, *ctx.__dict__.values())
        watch = self.call.watch("backward", [backward], values)
        recording = self.tracer.tensor_tracker.recording(body.graph)
        with recording as replaced, body.active(), _as_in_backward(grad_mode, self.slots):
            try:
                gradients = self._gradients(body, options, missing, grad_mode)
                returned = self._run(backward, ctx, gradients, watch)
                outputs = [node_of(g, self.tracer) for g in self._checked(returned)]
            finally:
                if grad_mode:
                    replaced.forget_gradients(self.call.forward.graph)
                replaced.restore()
        drop_grad_switches(body.graph, recording=grad_mode)
        if ctx.read_needs_input_grad:
            options["needs_input_grad"] = self._needs_input_grad()
        return body, outputs

    def _run(self, backward: Callable[..., Any], ctx: Any, gradients: list[Any], watch: Any) -> Any:
        try:
            lines = lines_recorded(self.tracer, sys._getframe(), always=False)
            with running_as_a_graph(f"{self.call.name}.backward", watch.reachable), lines:
                returned = backward(ctx, *gradients)
        except (CaptureError, KeyboardInterrupt, MemoryError, torch.OutOfMemoryError):
            watch.undo()
            raise
        except Exception as error:
            watch.undo()
            raise _BackwardFailed(
                self.call,
                f"hops: the backward of {self.call.name} could not be captured: "
                f"{type(error).__name__}: {error}\n"
                "It must run on gradients of the shape, dtype and layout of the outputs.",
            ) from error
        if self.first:
            watch.report()
        else:
            watch.undo()
        return returned

    def _needs_input_grad(self) -> list[bool]:
        return [
            tensor.requires_grad
            for tensor in self.call.tensor_args
            for _ in leaf_tensors(tensor, self.tracer)
        ]

    def _gradients(
        self, body: Recording, options: dict[str, Any], missing: frozenset[int], grad_mode: bool
    ) -> list[Any]:
        """A gradient for each output slot, as autograd would hand it over; those of
        tensors come in by a placeholder, used or not."""
        differentiable = set(self._differentiable(options))
        materialize = options.get("materialize_grads", True)
        gradients: list[Any] = []
        for position, value in enumerate(self.slots):
            if not isinstance(value, torch.Tensor):
                gradients.append(None)
                continue
            gradient = self._gradient(body, value, grad_mode and position in differentiable)
            made_up = position not in differentiable and not materialize
            gradients.append(None if position in missing or made_up else gradient)
        return gradients

    def _gradient(self, body: Recording, value: torch.Tensor, requires_grad: bool) -> torch.Tensor:
        """A gradient of an output, and its placeholder."""
        placeholder = body.add_placeholder()
        with disable_proxy_modes_tracing():
            gradient = torch.ones_like(value)
            if requires_grad:
                gradient = gradient.requires_grad_().view_as(gradient)
        track(gradient, fx.Proxy(placeholder, self.tracer), self.tracer)
        return gradient

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

    def _crossing(self, node: fx.Node) -> fx.Node:
        """What is saved for ``node`` of the forward, see [Note: numbers cross as tensors]."""
        if not crosses_as_tensor(node):
            return node
        if node not in self._packed:
            self._packed[node] = pack_number(node, node.graph.create_node)
        return self._packed[node]

    def _bind(self, body: Recording, gradients: list[Any], saved: list[fx.Node]) -> tuple[Any, ...]:
        """Make the saved values the last placeholders of the body, in this order.

        Returns:
            The outputs of the body: a node or None for each operand.
        """
        inner = {node: body.add_placeholder(node) for node in saved}
        for number, packed in self._packed.items():
            inner[packed] = body.unpack_number(inner[packed], number)

        def bound(node: Any) -> Any:
            if isinstance(node, fx.Node) and self._is_free(body, node):
                return inner[self._crossing(self._in_forward(body, node))]
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


def _is_once_differentiable(function: Any) -> bool:
    """Whether ``once_differentiable`` is below another decorator, such as ``custom_bwd``."""
    while function is not None:
        if getattr(function, "__code__", None) is _ONCE_DIFFERENTIABLE:
            return True
        function = getattr(function, "__wrapped__", None)
    return False


@contextmanager
def _as_in_backward(grad_mode: bool, values: list[Any]) -> Iterator[None]:
    """The state in which eager runs a backward: autocast of the forward has ended.

    Operations are recorded above autocast, so a backward that is run under
    autocast after all is cast then, as in eager.
    """
    with autocast_disabled(), set_grad_enabled_silently(grad_mode), _random_state_kept(values):
        yield


@contextmanager
def _random_state_kept(values: list[Any]) -> Iterator[None]:
    """Tracing a backward on real tensors draws random numbers that eager does not draw yet."""
    if any(isinstance(v, FakeTensor) for v in values):
        yield
        return
    with own_random_states():
        states = torch.random.fork_rng(devices=_devices(values))
        states.__enter__()
    try:
        yield
    finally:
        with own_random_states():
            states.__exit__(None, None, None)


def _devices(values: list[Any]) -> list[torch.device]:
    return [v.device for v in values if isinstance(v, torch.Tensor) and v.device.type == "cuda"]
