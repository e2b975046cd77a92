"""ProxyTorchDispatchMode: before dispatch, re-trace the bodies to ATen and write the node.

After dispatch these rules are not reached by code that records gradients:
the Autograd rules have run the bodies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from dispatch_rules import autograd, torch_func
from hops import autograd_function_apply as function_operator
from hops import tag_activation_checkpoint as checkpoint_operator
from hops._aliases import has_storage
from hops._body import drop_grad_switches, tidy_body
from hops._capture_checkpoint import capture_body
from hops._decompose import is_kept
from hops._mutation import mutated_operands, writes
from hops._policy_record import carry_policy, numbered, record_policy
from hops._subgraph import emit
from hops._torch import (
    PreDispatchTorchFunctionMode,
    ProxyTorchDispatchMode,
    autocast_disabled,
    detect_fake_mode,
    dispatch_functionalize,
    functorch_is_active,
    reenter_make_fx,
    set_grad_enabled_silently,
    unbacked_symbols_bound,
)
from hops._traced_bodies import copied_if_traced
from hops.autograd_function_apply import CallForm, node_options
from hops.errors import CaptureError
from hops.tag_activation_checkpoint import CONTEXT_FN


def autograd_function_apply(mode: Any, fwd: Any, bwd: Any, *operands: Any, **options: Any) -> Any:
    if functorch_is_active():
        # Refused by name, as a Function in the user's code is.
        with mode:
            return torch_func.autograd_function_apply(None, fwd, bwd, *operands, **options)
    versions = _versions(operands)
    with unbacked_symbols_bound(detect_fake_mode(operands)):
        result = autograd.autograd_function_apply(fwd, bwd, *operands, **options)
    if not mode.enable_tracing:
        return result
    operands, actual = _with_written_copied(operands, versions), operands
    form = CallForm(fwd, bwd, operands, options)
    num_outputs, bodies = _copied_bodies(form, operands) or _traced_bodies(form, operands)
    tracer = mode.tracer
    nodes = {
        key: _register(tracer, "fwd_body_" if key == "fwd" else "bwd_body_", body)
        for key, body in bodies.items()
    }
    arguments = (nodes.pop("fwd"), nodes.pop("bwd"), *map(_argument(tracer), actual))
    others = {k: v for k, v in options.items() if k != "args_tensor_mask"}
    keywords = {
        "name": form.name,
        "num_outputs": num_outputs,
        "num_inputs": form.num_inputs,
        **others,
        **nodes,
    }
    visible = result if isinstance(result, tuple) else (result,)
    emit(
        tracer,
        function_operator.autograd_function_apply,
        arguments,
        node_options(keywords),
        visible,
    )
    return result


def _copied_bodies(
    form: CallForm, operands: Sequence[Any]
) -> tuple[int, dict[str, fx.GraphModule]] | None:
    """What :func:`_traced_bodies` gives, where the bodies are that already."""
    if form.num_outputs is None or is_kept(function_operator.autograd_function_apply):
        return None
    bodies = {"fwd": form.fwd, **_backwards(form)}
    copies = copied_if_traced(bodies.values(), operands)
    return None if copies is None else (form.num_outputs, dict(zip(bodies, copies)))


def _traced_bodies(
    form: CallForm, operands: Sequence[Any]
) -> tuple[int, dict[str, fx.GraphModule]]:
    """The number of outputs, and the bodies in ATen form by the keywords of the operator."""
    if form.num_outputs is None:
        form.run = _run_dynamo_body
    with unbacked_symbols_bound(detect_fake_mode(operands)), set_grad_enabled_silently(False):
        outputs, saved = form.forward(operands)
    bodies = {"fwd": _retrace(_flat_forward(form), operands, grad_mode=False)}
    gradients = [torch.ones_like(v) for v in outputs if isinstance(v, torch.Tensor)]
    for key, body in _backwards(form).items():
        with autocast_disabled():
            backward = _flat_backward(form, body, outputs, len(operands))
            bodies[key] = _retrace_backward(backward, (*gradients, *saved))
    if is_kept(function_operator.autograd_function_apply):
        for key, traced in bodies.items():
            if key != "fwd":
                _refuse_writes_into_saved(form.name, traced, len(gradients))
            values = operands if key == "fwd" else (*gradients, *saved)
            bodies[key] = _functional(traced, values, grad_mode=key != "fwd")
    return len(outputs), bodies


def _backwards(form: CallForm) -> dict[str, Any]:
    others = {k: v for k, v in form.options.items() if k.startswith("bwd_without_")}
    return {"bwd": form.bwd, **others}


def _versions(operands: Sequence[Any]) -> list[int | None]:
    """How often each tensor has been written into; inference tensors do not count that."""
    return [
        v._version if isinstance(v, torch.Tensor) and not v.is_inference() else None
        for v in operands
    ]


def _with_written_copied(
    operands: Sequence[Any], versions: Sequence[int | None]
) -> tuple[Any, ...]:
    """The operands for another run of a forward that has just run on them.

    A second write would change a real tensor twice, and make autograd refuse an output
    that is an alias of it.
    """
    return tuple(
        value if before == after else _copied(value)
        for value, before, after in zip(operands, versions, _versions(operands))
    )


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same values and layout, in memory of its own."""
    if not has_storage(tensor):
        return tensor.detach().clone()
    copy = tensor.new_empty_strided(tensor.size(), tensor.stride())
    return copy.copy_(tensor.detach())


def _run_dynamo_body(body: Any, arguments: Sequence[Any]) -> Any:
    return function_operator.BodyInterpreter(body).run(*arguments)


def _flat_forward(form: CallForm) -> Callable[..., Any]:
    def forward(*operands: Any) -> tuple[Any, ...]:
        outputs, saved = form.forward(operands)
        return (*outputs, *saved)

    return forward


def _flat_backward(
    form: CallForm, body: Any, outputs: Sequence[Any], num_operands: int
) -> Callable[..., Any]:
    """A backward body as the ATen form has it: it takes the gradients of tensors only."""

    def backward(*values: Any) -> tuple[Any, ...]:
        if form.tensor_slots is None:
            remaining = iter(values)
            every = [next(remaining) if isinstance(o, torch.Tensor) else None for o in outputs]
            values = (*every, *remaining)
        lead = (None,) if "args_tensor_mask" in form.options else ()
        result = form.run(body, (*lead, *values))
        gradients = tuple(result) if isinstance(result, (tuple, list)) else (result,)
        return (*gradients, *[None] * (num_operands - len(gradients)))

    return backward


def tag_activation_checkpoint(mode: Any, body: Any, *operands: Any, **options: Any) -> Any:
    if mode.pre_dispatch:
        with mode, PreDispatchTorchFunctionMode(mode.tracer), fx.traceback.preserve_node_meta():
            return capture_body(body, operands, options)
    with unbacked_symbols_bound(detect_fake_mode(operands)):
        result = autograd.tag_activation_checkpoint(body, *operands, **options)
    if not mode.enable_tracing:
        return result
    tracer = mode.tracer
    read = numbered(body, options, operands)
    traced = _retrace(lambda *v: function_operator.run_body(read, v), operands, grad_mode=True)
    if is_kept(checkpoint_operator.tag_activation_checkpoint):
        traced = _functional(traced, operands, grad_mode=True)
    if "policy" in options:
        options = carry_policy(body, options, traced, operands)
    elif CONTEXT_FN in body.meta:
        options = {**options, **record_policy(body.meta[CONTEXT_FN], traced, operands)}
    node = _register(tracer, "wrap_body_", traced)
    arguments = (node, *map(_argument(tracer), operands))
    visible = tuple(result) if isinstance(result, (tuple, list)) else (result,)
    emit(
        tracer,
        checkpoint_operator.tag_activation_checkpoint,
        arguments,
        checkpoint_operator.node_options(options),
        visible,
    )
    return result


def _retrace(body: Callable[..., Any], arguments: Sequence[Any], grad_mode: bool) -> fx.GraphModule:
    """Trace a body to ATen with the settings of the trace that runs."""
    with set_grad_enabled_silently(grad_mode), fx.traceback.preserve_node_meta():
        traced = reenter_make_fx(body)(*arguments)
    drop_grad_switches(traced.graph, recording=grad_mode)
    tidy_body(traced)
    return traced


def _retrace_backward(body: Callable[..., Any], arguments: Sequence[Any]) -> fx.GraphModule:
    """Trace a backward anew: such that it can be differentiated, unless it runs only as eager
    runs it without ``create_graph`` (it writes with ``out=``, say).  Capture does the same."""
    try:
        return _retrace(body, arguments, grad_mode=True)
    except CaptureError:
        raise
    except Exception:
        return _retrace(body, arguments, grad_mode=False)


def _functional(
    traced: fx.GraphModule, arguments: Sequence[Any], grad_mode: bool
) -> fx.GraphModule:
    """A body that writes to new tensors what it wrote in place: a decomposed program must."""
    if not writes(traced):
        return traced

    def body(*values: Any) -> Any:
        return function_operator.run_body(traced, values)

    functional = dispatch_functionalize(body)
    if grad_mode:
        return _retrace_backward(functional, arguments)
    return _retrace(functional, arguments, grad_mode)


def _refuse_writes_into_saved(name: str, body: fx.GraphModule, num_gradients: int) -> None:
    """A functional backward has no place for the new value of what its forward saved."""
    for position in mutated_operands(body):
        if position >= num_gradients:
            raise CaptureError(
                f"hops: the backward of {name} writes into a tensor that its forward saved or that "
                "is a buffer, which has no place in a decomposed program. Write the result to a "
                "new tensor, or do not keep autograd_function_apply."
            )


def _register(tracer: Any, prefix: str, body: fx.GraphModule) -> fx.Node:
    name = tracer.get_fresh_qualname(prefix)
    tracer.root.register_module(name, body)
    return tracer.create_node("get_attr", name, (), {})


def _argument(tracer: Any) -> Callable[[Any], Any]:
    return lambda value: tracer.create_arg(tracer.unwrap_proxy(value))


RULES = {
    "autograd_function_apply": {ProxyTorchDispatchMode: autograd_function_apply},
    "tag_activation_checkpoint": {ProxyTorchDispatchMode: tag_activation_checkpoint},
}
