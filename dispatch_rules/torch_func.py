"""The transforms of ``torch.func`` (grad, vjp, vmap, ...) around an operator.

A captured Function goes to the transforms as a new-style ``autograd.Function``
with a generated vmap rule, which is what its bodies allow: they are made of
operations that every transform knows.  A region runs its body; eager's
``checkpoint`` cannot run under a transform at all, and nothing is saved there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.autograd.function import once_differentiable

from dispatch_rules.autograd import check_needs_input_grad, laid_out, unusual_orders
from hops._torch import TRANSFORMS, custom_function_call, set_grad_enabled
from hops.autograd_function_apply import BodyInterpreter, CallForm, run_body


def autograd_function_apply(
    interpreter: Any, fwd: Any, bwd: Any, *operands: Any, **options: Any
) -> Any:
    """Run one call of a captured Function under the innermost transform."""
    form = CallForm(fwd, bwd, operands, options)
    form.run = _run_differentiably
    call = _Call(form)
    results = custom_function_call(_node_class(call), *operands)
    return call.form.visible(call.slots(results))


def tag_activation_checkpoint(interpreter: Any, body: Any, *operands: Any, **options: Any) -> Any:
    return run_body(body, operands)


def _run_differentiably(body: fx.GraphModule, arguments: Sequence[Any]) -> Any:
    """Run a body without the one pair of grad-mode switches that Dynamo puts around it,
    which would hide a backward from the transforms further out."""
    if len(body.graph.find_nodes(op="call_function", target=set_grad_enabled)) == 2:
        return BodyInterpreter(body).run(*arguments)
    return run_body(body, arguments)


class _Call:
    """What the forward of one call tells its backward.

    Under a transform every tensor that goes from forward to backward must be an
    input or an output of the node.  So intermediates that the backward needs
    become more outputs; whatever is not a tensor is kept here.
    """

    def __init__(self, form: CallForm) -> None:
        self.form = form
        self.constants: list[Any] = []
        self.positions: list[int] = []
        self.saved: list[tuple[str, Any]] = []
        self.orders: Any = None

    def forward(self, operands: Sequence[Any]) -> tuple[torch.Tensor, ...]:
        outputs, saved = self.form.forward(operands)
        self.constants = [None if isinstance(v, torch.Tensor) else v for v in outputs]
        self.positions = [i for i, v in enumerate(outputs) if isinstance(v, torch.Tensor)]
        self.orders = unusual_orders(outputs)
        results = [outputs[i] for i in self.positions]
        self.saved = [self._keep(value, operands, results) for value in saved]
        return tuple(results)

    def _keep(self, value: Any, operands: Sequence[Any], results: list[Any]) -> tuple[str, Any]:
        if not isinstance(value, torch.Tensor):
            return "constant", value
        for place, values in (("input", operands), ("output", results)):
            for position, known in enumerate(values):
                if known is value:
                    return place, position
        results.append(value)
        return "output", len(results) - 1

    def slots(self, results: Sequence[Any]) -> list[Any]:
        """Values of tensor results, at the positions of the Function's own outputs."""
        slots = list(self.constants)
        for position, value in zip(self.positions, results):
            slots[position] = value
        return slots

    def to_save(self, inputs: Any, results: Any) -> list[torch.Tensor]:
        places = {"input": inputs, "output": results}
        return [places[place][at] for place, at in self.saved if place != "constant"]

    def saved_values(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        """In eager an intermediate was computed without gradients, so it hands none on."""
        remaining = iter(tensors)
        values: list[Any] = []
        for place, at in self.saved:
            if place == "constant":
                values.append(at)
            elif place == "output" and at >= len(self.positions):
                values.append(next(remaining).detach())
            else:
                values.append(next(remaining))
        return values


def _node_class(call: _Call) -> type[torch.autograd.Function]:
    form, options = call.form, call.form.options

    def forward(*operands: Any) -> Any:
        return call.forward(operands)

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        if not form.materialize_grads:
            ctx.set_materialize_grads(False)
        slots = call.slots(output)
        if options.get("non_differentiable_idx"):
            ctx.mark_non_differentiable(*[slots[i] for i in options["non_differentiable_idx"]])
        if options.get("dirty_idx"):
            ctx.mark_dirty(*[slots[i] for i in options["dirty_idx"]])
        ctx.save_for_backward(*call.to_save(inputs, output))
        ctx.num_operands = len(inputs)

    def backward(ctx: Any, *gradients: Any) -> Any:
        if "needs_input_grad" in options:
            check_needs_input_grad(form, ctx.needs_input_grad)
        slots = [None] * len(call.constants)
        for position, gradient in zip(call.positions, gradients):
            slots[position] = laid_out(gradient, call.orders, position)
        results = form.backward(slots, call.saved_values(ctx.saved_tensors))
        results = list(results[: form.num_inputs])
        return (*results, *[None] * (ctx.num_operands - len(results)))

    if "once_differentiable" in options:
        backward = once_differentiable(backward)
    module, _, name = form.name.rpartition(".")
    members = {
        "forward": staticmethod(forward),
        "setup_context": staticmethod(setup_context),
        "backward": staticmethod(backward),
        "generate_vmap_rule": True,
        "__module__": module,
    }
    if "no_backward" in options:
        del members["backward"]
    return type(name, (torch.autograd.Function,), members)


RULES = {
    "autograd_function_apply": dict.fromkeys(TRANSFORMS, autograd_function_apply),
    "tag_activation_checkpoint": dict.fromkeys(TRANSFORMS, tag_activation_checkpoint),
}
