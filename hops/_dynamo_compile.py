"""Functions under ``torch.compile`` that stock Dynamo misreads.

Stock's own reading of a Function, and the text of the graph that a backend
sees, stay as they are wherever they are right.  What is watched for while stock
reads a call, and what is done then:

- ``ctx.set_materialize_grads(False)`` and more than one output that may get a
  gradient: stock's backward takes a gradient for every output for granted.
  The call is captured by running it (:mod:`hops._dynamo_functions`), which
  gives a backward for each set of absent gradients.
- one tensor for several inputs: some torch (2.12) writes one operand for all of them, which
  gets the gradient of the last.  Captured by running, too.
- an internal error of stock's, such as the one on a lone output that is marked
  non-differentiable: captured by running, too.
- a transform of ``torch.func`` around the call, before torch 2.15: stock takes
  the wrapped tensors for tensors without gradients and inlines the forward.
  It is told that they have gradients.
- whatever stock refuses, where a capture is going on
  (``dynamo_graph_capture_for_export``): captured by running, as under export.
  Compiled code that stock refuses stays out of the graph: a reading that was
  broken off has not made all guards.
- a backward that reads the layout of its gradient: stock makes the gradient
  contiguous and believes the answer.  The backward is read again for other
  layouts; if something else than layout comes of it, the Function runs outside
  of the graph, as an error under ``fullgraph=True`` says.
"""

from __future__ import annotations

import copy
import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._dynamo import _trace_wrapped_higher_order_op as backward_rewriting
from torch._dynamo.exc import SkipFrame, TorchDynamoException, Unsupported
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.variables.base import (
    AttributeMutationExisting,
    ValueMutationExisting,
    VariableTracker,
)
from torch._dynamo.variables.misc import AutogradFunctionContextVariable
from torch._dynamo.variables.tensor import TensorVariable

from hops._capture_function import function_name
from hops._changes import Changes
from hops._dynamo_changes import NotPython
from hops._dynamo_functions import capture_by_running
from hops._gradient_layouts import LAYOUTS, same_but_for_layout
from hops._torch import (
    functorch_is_active,
    stock_autograd_function_apply,
    transformed_tensor_requires_grad,
)
from hops._whole_capture import whole_capture_is_active
from hops.autograd_function_apply import FUNCTION_NAME
from hops.errors import CaptureError


class _Reading:
    """What stock met while it read one call."""

    def __init__(self) -> None:
        self.materialize_grads = True
        self.reads_layout = False
        self.has_side_effects = False
        #: The layout in which the backward is to get its gradients.
        self.layout: Callable[..., Any] | None = None


_readings: list[_Reading] = []


def read_call(stock: Callable[..., Any], variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    """``AutogradFunctionVariable.call_apply`` for a call that is compiled."""
    call = _CompiledCall(stock, variable, tx, args, kwargs)
    if functorch_is_active():
        return call.read_under_transforms()
    return call.read()


class _CompiledCall:
    def __init__(
        self, stock: Callable[..., Any], variable: Any, tx: Any, args: Any, kwargs: Any
    ) -> None:
        self.stock = stock
        self.variable = variable
        self.function = variable.fn_cls
        self.tx = tx
        self.args = args
        self.kwargs = kwargs

    def read(self) -> Any:
        start = _Start(self.tx)
        try:
            result, reading = self._by_stock()
        except AssertionError:
            # A call of stock's that fails so would fail the whole compilation.
            start.go_back()
            return self._by_running("Dynamo fails on it with an internal error")
        except (TorchDynamoException, RuntimeError) as error:
            if not whole_capture_is_active() or isinstance(error, SkipFrame):
                raise
            start.go_back()
            return self._by_running("is refused by Dynamo", error)
        if not reading.materialize_grads and _count_differentiable(result) > 1:
            start.go_back()
            reason = "calls ctx.set_materialize_grads(False)"
            if reading.has_side_effects:
                self._break_graph(f"{reason} and changes Python objects in forward")
            return self._by_running(reason)
        if start.merged(self.args):
            start.go_back()
            return self._by_running("is given one tensor for several inputs")
        if reading.reads_layout and self._layout_matters(start):
            reason = (
                "has a backward that does different things for gradients of different memory "
                "layout (it looks at stride(), is_contiguous() or storage_offset())"
            )
            if not whole_capture_is_active():
                self._break_graph(reason)
            start.go_back()
            return self._by_running(reason)
        start.name_the_call(self.function)
        return result

    def read_under_transforms(self) -> Any:
        """Read a call under vmap, grad, ... with the tensors said to require grad that do."""
        tensors = _tensors(self.args, self.kwargs)
        if self.function.vmap is not torch.autograd.Function.vmap:
            self._leave_frame("has a vmap rule of its own and is called under a transform")
        required = [v for v in tensors if transformed_tensor_requires_grad(_example(v))]
        before = [v.requires_grad for v in required]
        for v in required:
            v.requires_grad = True
        try:
            return self.read()
        except Unsupported as error:
            self._leave_frame("is called under a transform and cannot be compiled", error)
        finally:
            for v, value in zip(required, before):
                v.requires_grad = value

    def _by_stock(self, layout: Callable[..., Any] | None = None) -> tuple[Any, _Reading]:
        reading = _Reading()
        reading.layout = layout
        _readings.append(reading)
        try:
            return self.stock(self.variable, self.tx, self.args, self.kwargs), reading
        except Unsupported as error:
            if reading.reads_layout or "in strict mode" in str(error):
                self._break_graph("has a backward that looks at the layout of its gradient", error)
            raise
        finally:
            _readings.pop()

    def _by_running(self, reason: str, cause: Exception | None = None) -> Any:
        """Capture the call by running it; stock has read it, so that all guards are there."""
        if functorch_is_active():
            self._break_graph(f"{reason}, under a transform")
        try:
            return capture_by_running(self.tx, self.function, self.args, self.kwargs)
        except NotPython as error:
            self._break_graph(reason, cause or error)
        except CaptureError as error:
            if whole_capture_is_active():
                raise
            self._break_graph(reason, error)

    def _layout_matters(self, start: _Start) -> bool:
        """Whether the backward does other things for gradients of another layout."""
        reference = start.backward_body()
        after = _Start(self.tx)
        for layout in LAYOUTS:
            try:
                _, reading = self._by_stock(layout)
                body = after.backward_body()
            except (TorchDynamoException, RuntimeError):
                # No backward for this layout, in eager neither.
                continue
            finally:
                after.go_back()
            if reading.reads_layout and not same_but_for_layout(reference, body):
                return True
        return False

    def _leave_frame(self, reason: str, cause: Exception | None = None) -> Any:
        """Run the frame in eager: what comes after a graph break under a transform has
        wrapped tensors for inputs, on which Dynamo fails."""
        if _graph_is_whole(self.tx):
            self._break_graph(reason, cause)
        raise SkipFrame(f"hops: {function_name(self.function)} {reason}.") from cause

    def _break_graph(self, reason: str, cause: Exception | None = None) -> Any:
        raise Unsupported(
            f"hops: {function_name(self.function)} {reason}, which cannot be compiled as eager "
            "runs it. It runs in eager, outside of the graph; with fullgraph=True, change the "
            "Function or call it through torch.compiler.disable."
        ) from cause


class _Start:
    """Where a reading began, to go back to.  Guards that it made stay."""

    def __init__(self, tx: Any) -> None:
        self.output = tx.output
        self.graph = tx.output.current_tracer.graph
        self.nodes = set(self.graph.nodes)
        self.names = _names(self.graph)
        self.modules = set(tx.output.nn_modules)
        self.side_effects = tx.output.side_effects.clone()
        self.grad_mode = torch.is_grad_enabled()

    def go_back(self) -> None:
        for node in reversed(self.graph.nodes):
            if node not in self.nodes and node.op != "placeholder":
                self.graph.erase_node(node)
        for name in set(self.output.nn_modules) - self.modules:
            del self.output.nn_modules[name]
        # Names count up, and Dynamo wants the node of a body to be called as the body.
        self.names["_used_names"].update(node.name for node in self.graph.nodes)
        self.names["_obj_to_name"].update({node: node.name for node in self.graph.nodes})
        vars(self.graph._graph_namespace).update(self.names)
        self.names = _names(self.graph)
        # Dynamo really switches grad mode as it reads; a reading broken off leaves it so.
        torch._C._set_grad_enabled(self.grad_mode)
        self.output.side_effects = self.side_effects
        self.side_effects = self.side_effects.clone()

    def backward_body(self) -> fx.Graph:
        """The backward of the call that was written since."""
        return self._bodies()[1].graph

    def name_the_call(self, function: type) -> None:
        """Note the name of the Function on the call that was written since, if one was."""
        for forward in self._bodies()[:1]:
            forward.meta[FUNCTION_NAME] = function_name(function)

    def merged(self, args: Any) -> bool:
        """Whether the call that was written since takes a tensor less often than it was given."""
        given = Counter(
            id(_example(v))
            for v in (a.realize() for a in args)
            if isinstance(v, TensorVariable) and v.requires_grad
        )
        call = self._call()
        operands = () if call is None else call.args[2:]
        taken = Counter(id(o.meta.get("example_value")) for o in operands if isinstance(o, fx.Node))
        return any(0 < taken[tensor] < times for tensor, times in given.items())

    def _bodies(self) -> list[fx.GraphModule]:
        call = self._call()
        bodies: Any = () if call is None else call.args[:2]
        return [self.output.nn_modules[body.target] for body in bodies]

    def _call(self) -> fx.Node | None:
        for node in reversed(self.graph.nodes):
            if node in self.nodes:
                break
            if node.target is stock_autograd_function_apply:
                return node
        return None


def _names(graph: fx.Graph) -> dict[str, Any]:
    """The names that a graph has given so far."""
    state = vars(graph._graph_namespace)
    return {name: copy.copy(v) for name, v in state.items() if isinstance(v, (dict, set))}


def _graph_is_whole(tx: Any) -> bool:
    return bool(tx.one_graph or getattr(tx, "error_on_graph_break", False))


def _tensors(args: Any, kwargs: Any) -> list[Any]:
    found: list[Any] = []

    def visit(variable: Any) -> None:
        if isinstance(variable, TensorVariable):
            found.append(variable)

    VariableTracker.visit(visit, (args, kwargs))
    return found


def _example(variable: Any) -> Any:
    return variable.as_proxy().node.meta["example_value"]


def _count_differentiable(result: Any) -> int:
    return sum(bool(v.requires_grad) for v in _tensors([result], {}))


# ------------------------------------------------------------------------------- Watching stock


def _watching_stores(store_attr: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(store_attr)
    def watched(self: Any, item: Any, name: str, value: Any, *args: Any, **kwargs: Any) -> Any:
        if _readings:
            if name == "materialize_grads" and isinstance(item, AutogradFunctionContextVariable):
                _readings[-1].materialize_grads = _truth(value)
            _readings[-1].has_side_effects |= _is_the_users(item)
        return store_attr(self, item, name, value, *args, **kwargs)

    return watched


def _is_the_users(item: Any) -> bool:
    """Whether an object that is changed was there before the compiled code ran."""
    return isinstance(item.mutation_type, (AttributeMutationExisting, ValueMutationExisting))


def _truth(variable: Any) -> bool:
    return not variable.is_python_constant() or bool(variable.as_python_constant())


def _watching_mutations(mutation: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(mutation)
    def watched(self: Any, item: Any) -> Any:
        if _readings:
            _readings[-1].has_side_effects |= _is_the_users(item)
        return mutation(self, item)

    return watched


def _watching_rewriting(rewritten: Callable[..., Any]) -> Callable[..., Any]:
    """Stock makes gradients contiguous in a second reading, once a first one met a read
    of their layout (torch 2.7 on; before that, such a read ends the graph)."""

    @functools.wraps(rewritten)
    def watched(original_backward: Any) -> Any:
        if not _readings:
            return rewritten(original_backward)
        _readings[-1].reads_layout = True
        return (_readings[-1].layout or rewritten)(original_backward)

    return watched


def patch(changes: Changes) -> None:
    changes.attribute(SideEffects, "store_attr", _watching_stores)
    changes.attribute(SideEffects, "mutation", _watching_mutations)
    rewriting = "autograd_function_backward_rewritten"
    if hasattr(backward_rewriting, rewriting):
        changes.attribute(backward_rewriting, rewriting, _watching_rewriting)
