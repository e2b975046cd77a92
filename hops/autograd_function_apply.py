"""The operator ``autograd_function_apply``: one call of a ``torch.autograd.Function``.

    autograd_function_apply(fwd, bwd, *operands, name=..., num_outputs=..., ...)

``fwd(*operands)`` gives the outputs of the Function and then the values saved
for its backward, as one flat tuple; ``bwd(*grad_outputs, *saved)`` takes one
gradient for each output that is a tensor (a file of torch.export cannot hold a
body with an input that is no value), and gives one gradient or None for each
operand.  Keywords of this, the ATen form:

``name``
    module-qualified name of the Function.
``num_outputs``
    how many of the values of ``fwd`` are outputs; the rest is saved.  A slot
    where eager returns something that is not a tensor or symbolic number holds
    None, so that every output keeps its position.
``num_inputs``
    how many operands are tensor arguments of ``apply``; those after them are
    free values of the Function (closures, globals), which get no gradient.
``non_differentiable_idx``, ``dirty_idx``
    outputs that went through ``ctx.mark_non_differentiable`` / ``ctx.mark_dirty``.
``saved_for_backward_idx``
    saved values that went through ``ctx.save_for_backward`` (and are checked
    against later writes); the others were kept on ``ctx``.
``materialize_grads=False``
    ``ctx.set_materialize_grads(False)``; then ``bwd_without_I_J`` is the
    backward for a call in which outputs I and J got no gradient.
``needs_input_grad``
    present when the backward looked at ``ctx.needs_input_grad``: what it saw.
``once_differentiable``, ``no_backward``
    the backward is not differentiable / there is none.

The forms that Dynamo writes on the supported torch versions are run as well:
``args_tensor_mask`` (2.6 to 2.10: both bodies start with a placeholder for
``ctx``, ``fwd`` gives ``(output, saved)``), and ``saved_for_backward_idx``
without ``num_outputs`` (later: no ``ctx``, ``fwd`` gives ``(output, saved)``).

Upstream: the operator is pytorch#106388's wish before dispatch; the Dynamo
forms are ``torch/_functorch/autograd_function.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from hops._torch import (
    StockAutogradFunctionApply,
    modes_are_active,
    set_grad_enabled,
    stock_autograd_function_apply,
)
from hops._validation import FUNCTION_KEYWORDS, check_function_call, is_checked
from hops.errors import ReplayError

#: Where the forward body of a call that stock Dynamo wrote keeps the name of the Function:
#: on the node it would change the text that backends of ``torch.compile`` see.
FUNCTION_NAME = "hops_function_name"

#: Installed by ``dispatch_rules.autograd``; called directly where nothing but
#: autograd looks at the call, since dispatch through Python costs more than a
#: whole ``Function.apply``.
_plain_rule: Callable[..., Any] | None = None

_PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter, int, float, bool, type(None)})


class AutogradFunctionApply(StockAutogradFunctionApply):
    """See the module's documentation.

    Raises:
        OperatorCallError: bodies, operands or keywords that do not fit together
            (``hops._validation``).
    """

    def __call__(self, fwd: Any, bwd: Any, *operands: Any, **options: Any) -> Any:
        if _plain_rule is not None and nothing_but_autograd(operands):
            return _plain_rule(fwd, bwd, operands, options)
        if not is_checked(fwd, bwd, len(operands), options):
            check_function_call(fwd, bwd, operands, options)
        return super(StockAutogradFunctionApply, self).__call__(fwd, bwd, *operands, **options)


autograd_function_apply = stock_autograd_function_apply


def nothing_but_autograd(operands: Sequence[Any]) -> bool:
    """Whether a call on ``operands`` meets no mode, transform or tensor subclass."""
    return _PLAIN_TYPES.issuperset(map(type, operands)) and not modes_are_active()


def node_options(options: dict[str, Any]) -> dict[str, Any]:
    """The keywords of a node in ATen form, in their order; empty lists are left
    out, since torch.export cannot tell what they are lists of."""
    order = [k for k in FUNCTION_KEYWORDS if k in options]
    order += sorted(k for k in options if k.startswith("bwd_without_"))
    return {k: options[k] for k in order if options[k] != []}


class CallForm:
    """One way of writing a call, made uniform.

    Attributes:
        num_inputs: operands before this position are arguments of ``apply``.
        run: how a body is run, :func:`run_body` unless a tracer wants another way.
        forward: ``(operands) -> (outputs, saved)``, outputs a list of slots.
        backward: ``(gradients, saved) -> gradients of the operands``.
        single: the operator gives its one output itself, not a tuple.
        tensor_slots: the outputs that are tensors, once :attr:`forward` has run;
            None in a form whose backward takes a gradient for every output.
        apply: ``apply`` of the Function that autograd records, set by the Autograd rule.
        marks: the user said something of outputs or gradients on ``ctx``.
    """

    __slots__ = (
        "name", "num_inputs", "fwd", "bwd", "options", "num_outputs", "single",
        "saved_for_backward", "materialize_grads", "run", "tensor_slots", "marks", "apply",
    )  # fmt: skip

    def __init__(self, fwd: Any, bwd: Any, operands: Sequence[Any], options: dict[str, Any]):
        self.fwd = fwd
        self.bwd = bwd
        self.options = options
        self.name = options.get("name") or fwd.meta.get(FUNCTION_NAME, "autograd_function_apply")
        self.num_outputs = options.get("num_outputs")
        self.single = False
        self.apply: Any = None
        self.run = run_body
        self.tensor_slots: list[int] | None = None
        self.saved_for_backward = options.get("saved_for_backward_idx", ())
        self.materialize_grads = options.get("materialize_grads", True)
        self.marks = not self.materialize_grads or any(
            options.get(k) for k in ("non_differentiable_idx", "dirty_idx")
        )
        mask = options.get("args_tensor_mask")
        if mask is not None:
            self.num_inputs = sum(mask)
        else:
            self.num_inputs = options.get("num_inputs", len(operands))

    def forward(self, operands: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        if self.num_outputs is not None:
            values = self.run(self.fwd, operands)
            outputs = values[: self.num_outputs]
            self.tensor_slots = tensor_slots(outputs)
            return outputs, values[self.num_outputs :]
        if "args_tensor_mask" in self.options:
            output, saved = self.run(self.fwd, (None, *operands))
        else:
            output, saved = self.run(self.fwd, operands)
        self.single = not isinstance(output, (tuple, list))
        return ([output] if self.single else output), saved

    def backward(self, gradients: Sequence[Any], saved: Sequence[Any]) -> Sequence[Any]:
        body = self.bwd
        if not self.materialize_grads:
            body = self._backward_for(gradients)
        gradients = self.of_tensors(gradients)
        if "args_tensor_mask" in self.options:
            result = self.run(body, (None, *gradients, *saved))
        else:
            result = self.run(body, (*gradients, *saved))
        return result if isinstance(result, (tuple, list)) else (result,)

    def of_tensors(self, gradients: Sequence[Any]) -> Sequence[Any]:
        """Of one gradient for each output, those that the backward body takes."""
        if self.tensor_slots is None or len(self.tensor_slots) == len(gradients):
            return gradients
        return [gradients[i] for i in self.tensor_slots]

    def _backward_for(self, gradients: Sequence[Any]) -> Any:
        never = set(self.options.get("non_differentiable_idx", ()))
        values = self.fwd.graph.find_nodes(op="output")[0].args[0]
        missing = [
            i
            for i, g in enumerate(gradients)
            if g is None and i not in never and values[i] is not None and _differentiable(values[i])
        ]
        if not missing:
            return self.bwd
        key = "bwd_without_" + "_".join(map(str, missing))
        if key not in self.options:
            raise ReplayError(
                f"hops: {self.name} was captured with set_materialize_grads(False), and its "
                f"backward was not traced for a call in which outputs {missing} get no "
                "gradient. Use all of its outputs, or drop set_materialize_grads(False)."
            )
        return self.options[key]

    def visible(self, outputs: Sequence[Any]) -> Any:
        return outputs[0] if self.single else tuple(outputs)


def tensor_slots(outputs: Sequence[Any]) -> list[int]:
    """Positions of the outputs that are tensors, which alone have a gradient."""
    return [i for i, v in enumerate(outputs) if isinstance(v, torch.Tensor)]


def _differentiable(node: Any) -> bool:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    if not isinstance(value, torch.Tensor):
        return isinstance(node, fx.Node) and value is None
    return value.is_floating_point() or value.is_complex()


def run_body(body: fx.GraphModule, arguments: Sequence[Any]) -> Any:
    """Run a body: as compiled code, or node by node where the tracer that
    watches wants each node's metadata (stack trace, module, annotations)."""
    if fx.traceback.has_preserved_node_meta():
        return MarkingInterpreter(body).run(*arguments)
    return body.forward(*arguments)


#: Where in ``node.meta["custom"]`` the decisions of a selective policy are (``hops._decisions``).
MARK = "checkpoint_policy"

_MARKS = ("partitioner_tag", "autograd_backward", "grad_fn_seq_nr", "in_grad_fn")


class MarkingInterpreter(fx.Interpreter):
    """Runs a body node by node, each under what autograd and AOTAutograd say of the
    call: whether it is forward or backward, and the ``seq_nr`` of its forward.

    A plain Interpreter replaces these by the node's own metadata, so that the
    nodes of a custom backward look like forward ones to the partitioner.
    """

    def __init__(self, body: fx.GraphModule) -> None:
        super().__init__(body)
        around = fx.traceback.current_meta
        self._marks = {name: around[name] for name in _MARKS if name in around}

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        self._mark()
        return super().call_function(target, args, kwargs)

    def call_method(self, target: Any, args: Any, kwargs: Any) -> Any:
        self._mark()
        return super().call_method(target, args, kwargs)

    def _mark(self) -> None:
        current = fx.traceback.current_meta
        current.update(self._marks)
        if MARK in (current.get("custom") or {}):
            # Decisions are for the body that they are written in.
            current["custom"] = {k: v for k, v in current["custom"].items() if k != MARK}


class BodyInterpreter(MarkingInterpreter):
    """Runs a body that Dynamo traced, leaving out the grad-mode switches that it wrote.

    Dynamo traces ``forward`` and ``backward`` inside ``torch.no_grad`` of its
    own; what ran in no-grad mode does so anyway, since the operator is a
    Function.
    """

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is set_grad_enabled:
            return None
        return super().call_function(target, args, kwargs)
