"""Autograd: a Function runs as a real ``autograd.Function``, a region really checkpoints.

This is also where both operators end under AOTAutograd and every other
post-dispatch tracer: the forward body, the backward body and the recomputation
are then operations like any other.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import TorchDispatchMode

from hops import autograd_function_apply as function_operator
from hops import tag_activation_checkpoint as checkpoint_operator
from hops._decompose import is_kept
from hops._policy import OPAQUE, policy_of, region_name
from hops._prepared import PreparedForm, prepared_form
from hops._torch import (
    CHECKPOINT_KEYWORDS,
    DispatchKey,
    any_requires_grad,
    below_autograd,
    compiler_is_tracing,
    mark_saved_without_version_check,
    native_apply,
    selective_modes_pass_other_operators,
    set_grad_enabled_silently,
    tag_for_partitioner,
    torch_checkpoint,
)
from hops.autograd_function_apply import CallForm, run_body
from hops.errors import ReplayError


def autograd_function_apply(fwd: Any, bwd: Any, *operands: Any, **options: Any) -> Any:
    """Run one call of a captured Function, so that autograd records it as one node.

    Raises:
        ReplayError: an operand requires grad that did not when a backward
            that looks at ``ctx.needs_input_grad`` was captured.
    """
    operator = function_operator.autograd_function_apply
    if is_kept(operator) and compiler_is_tracing():
        with below_autograd():
            return operator(fwd, bwd, *operands, **options)
    return replay(CallForm(fwd, bwd, operands, options), operands)


def replay(form: CallForm, operands: tuple[Any, ...]) -> Any:
    """Run a call, so that autograd records it as one node if anything requires grad."""
    if not torch.is_grad_enabled():
        return form.visible(form.forward(operands)[0])
    inputs = operands[: form.num_inputs]
    if not any_requires_grad(*inputs):
        with set_grad_enabled_silently(False):
            return form.visible(form.forward(operands)[0])
    if "needs_input_grad" in form.options:
        check_needs_input_grad(form, map(_requires_grad, inputs))
    if form.apply is None:
        form.apply = _node_class(form.name, "once_differentiable" in form.options).apply
    # The inputs come first, so that errors of the engine count them as eager's do.
    outputs = form.apply(*inputs, form, operands[form.num_inputs :])
    return outputs[0] if form.single else outputs


def replay_plainly(fwd: Any, bwd: Any, operands: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """:func:`autograd_function_apply` where no tracer, mode or transform looks at the call."""
    form = prepared_form(fwd, bwd, operands, options)
    if form.is_simple and torch.is_grad_enabled():
        if form.apply is None:
            form.apply = native_apply(_simple_function(form))
        return form.apply(*operands)
    return replay(form, operands)


def _requires_grad(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def check_needs_input_grad(form: CallForm, required: Iterable[bool]) -> None:
    """Refuse inputs that require grad now and did not when ``form`` was captured."""
    for position, (now, then) in enumerate(zip(required, form.options["needs_input_grad"])):
        if now and not then:
            raise ReplayError(
                f"hops: input {position} of {form.name} requires grad, but did not when it was "
                "captured, and its backward looks at ctx.needs_input_grad. Capture the model "
                "again with this input requiring grad."
            )


class _CapturedFunction(torch.autograd.Function):
    """The autograd node of a replayed call; :func:`_node_class` gives it its name."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        *inputs, form, captured = arguments
        outputs, saved = form.forward((*inputs, *captured))
        ctx.form = form
        ctx.orders = unusual_orders(outputs)
        ctx.kept = None
        checked = form.saved_for_backward
        if len(checked) == len(saved):
            ctx.save_for_backward(*saved)
        else:
            ctx.save_for_backward(*[saved[i] for i in checked])
            ctx.kept = [None if i in checked else v for i, v in enumerate(saved)]
            mark_saved_without_version_check(ctx.kept)
        if form.marks:
            _mark(ctx, form, outputs)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        form = ctx.form
        if "no_backward" in form.options:
            raise NotImplementedError(
                f"You must implement either the backward or vjp method for {form.name} to use "
                "it with backward mode AD."
            )
        saved = ctx.saved_tensors if ctx.kept is None else _joined(ctx)
        arrived = [laid_out(g, ctx.orders, i) for i, g in enumerate(gradients)]
        results = form.backward(arrived, saved)
        return (*results[: form.num_inputs], None, None)


def is_captured_function(node: Any) -> bool:
    """Whether a node of autograd is that of a replayed call."""
    function = getattr(type(node), "_forward_cls", None)
    return isinstance(function, type) and issubclass(function, _CapturedFunction)


def _mark(ctx: Any, form: CallForm, outputs: Sequence[Any]) -> None:
    """What the user told ``ctx`` of outputs and gradients."""
    options = form.options
    if not form.materialize_grads:
        ctx.set_materialize_grads(False)
    if options.get("non_differentiable_idx"):
        marked = [outputs[i] for i in options["non_differentiable_idx"]]
        ctx.mark_non_differentiable(*[v for v in marked if isinstance(v, torch.Tensor)])
    if options.get("dirty_idx"):
        ctx.mark_dirty(*[outputs[i] for i in options["dirty_idx"]])


def _joined(ctx: Any) -> Sequence[Any]:
    """Saved values in their order, of which some went through ``save_for_backward``."""
    checked = ctx.form.saved_for_backward
    if not checked:
        return ctx.kept
    saved = list(ctx.kept)
    for position, value in zip(checked, ctx.saved_tensors):
        saved[position] = value
    return saved


class _CapturedOnceDifferentiableFunction(_CapturedFunction):
    backward = staticmethod(once_differentiable(_CapturedFunction.backward))  # type: ignore[assignment]


@functools.cache
def _node_class(name: str, once: bool) -> type[torch.autograd.Function]:
    """The class of a Function's node, made once: ``grad_fn`` shows the user's class name."""
    base = _CapturedOnceDifferentiableFunction if once else _CapturedFunction
    return type(name.rpartition(".")[2], (base,), {"__module__": name.rpartition(".")[0]})


def _simple_function(form: PreparedForm) -> type[torch.autograd.Function]:
    """The same as :class:`_CapturedFunction` in fewer steps, for the calls of one simple form.

    In a small Function, these steps are what a call costs.
    """
    run, body, num_outputs = form.run_forward, form.fwd, form.num_outputs

    def forward(ctx: Any, *operands: Any) -> Any:
        values = run(body, *operands)
        outputs = values[:num_outputs]
        ctx.save_for_backward(*values[num_outputs:])
        ctx.orders = None if _all_contiguous(outputs) else unusual_orders(outputs)
        return outputs

    def backward(ctx: Any, *gradients: Any) -> Any:
        orders = ctx.orders
        if orders is not None or not _all_contiguous(gradients):
            gradients = tuple(laid_out(g, orders, i) for i, g in enumerate(gradients))
        return form.run(form.bwd, gradients + ctx.saved_tensors)

    if "once_differentiable" in form.options:
        backward = once_differentiable(backward)
    module, _, name = form.name.rpartition(".")
    members = {"forward": forward, "backward": backward}
    return type(
        name,
        (torch.autograd.Function,),
        {"__module__": module, **{k: staticmethod(v) for k, v in members.items()}},
    )


# [Note: layout of incoming gradients]
# A backward is traced with gradients laid out like the outputs.  What arrives
# may be an expanded scalar or a slice; code that read strides while it was
# traced (or a kernel that trusts them) would then be silently wrong, so a
# gradient of another layout is copied into the traced one.


def unusual_orders(outputs: Sequence[Any]) -> dict[int, list[int]] | None:
    """How the outputs that are not contiguous are laid out, by position: their
    dimensions from the outermost in memory to the innermost."""
    unusual = {
        i: _order(v)
        for i, v in enumerate(outputs)
        if isinstance(v, torch.Tensor) and v.layout is torch.strided and not v.is_contiguous()
    }
    return unusual or None


def _all_contiguous(tensors: Sequence[Any]) -> bool:
    try:
        return all(map(torch.Tensor.is_contiguous, tensors))
    except (TypeError, RuntimeError):  # an empty slot; a layout without strides
        return False


def _order(tensor: torch.Tensor) -> list[int]:
    """The order of dimensions in ``torch.ones_like(tensor)``, with which a backward is traced.

    An insertion sort by stride, as torch's own for such tensors: a dimension
    that is expanded (stride 0) moves past none, and none stops at it.
    """
    strides, sizes = tensor.stride(), tensor.shape
    inwards = [*reversed(range(tensor.dim()))]
    for place in range(1, len(inwards)):
        moving = place
        for other in range(place - 1, -1, -1):
            ours, theirs = inwards[moving], inwards[other]
            if strides[ours] == 0 or strides[theirs] == 0:
                continue
            if strides[theirs] < strides[ours]:
                break
            if strides[theirs] > strides[ours] or sizes[theirs] > sizes[ours]:
                inwards[moving], inwards[other] = theirs, ours
                moving = other
    return inwards[::-1]


def laid_out(gradient: Any, orders: dict[int, list[int]] | None, position: int) -> Any:
    if not isinstance(gradient, torch.Tensor) or gradient.layout is not torch.strided:
        return gradient
    if orders is None or position not in orders:
        return gradient if gradient.is_contiguous() else gradient.contiguous()
    order = orders[position]
    permuted = gradient.permute(order)
    if permuted.is_contiguous():
        return gradient
    return permuted.contiguous().permute([order.index(d) for d in range(len(order))])


def tag_activation_checkpoint(body: Any, *operands: Any, **options: Any) -> Any:
    """Run a region without keeping its intermediates, and again in backward.

    Under AOTAutograd the region is run once and its nodes are tagged, so that
    the partitioner recomputes them.
    """
    operator = checkpoint_operator.tag_activation_checkpoint
    if is_kept(operator) and compiler_is_tracing():
        with below_autograd():
            return operator(body, *operands, **options)
    if compiler_is_tracing():
        return _tagged(body, operands, options)
    selective = policy_of(body, options)
    if not records_gradient(body, operands):
        return run_body(body, operands)
    known = {k: v for k, v in options.items() if k in CHECKPOINT_KEYWORDS}
    known["use_reentrant"] = False
    if selective is not None and not getattr(_state, "in_reentrant_region", False):
        body = selective.body
        known["context_fn"] = selective.context_fn
    region = _Region(body, operands, bool(options.get("use_reentrant")))
    return torch_checkpoint.checkpoint(region, *region.arguments(operands), **known)


def _tagged(body: Any, operands: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Run a region once, for a graph in which the partitioner finds what to recompute."""
    if not torch.is_grad_enabled():
        return run_body(body, operands)
    selective = policy_of(body, options)
    if selective is not None and OPAQUE in options.get("policy", ()):
        _refuse_other_contexts(body, selective.context_fn())
    with selective_modes_pass_other_operators():
        if selective is None:
            return tag_for_partitioner(body, None, *operands, **options)
        return tag_for_partitioner(selective.body, selective.context_fn, *operands, **options)


def _refuse_other_contexts(body: Any, contexts: Any) -> None:
    if not all(isinstance(c, TorchDispatchMode) for c in contexts):
        raise ReplayError(
            f"hops: {region_name(body)} has a context_fn that gives "
            f"{type(contexts[0]).__name__}, by which a compiler cannot tell what to recompute. "
            "Run the captured program without compiling it, or give the policy by "
            "torch.utils.checkpoint.create_selective_checkpoint_contexts."
        )


class _Region:
    """The function that is checkpointed.  It holds the body, leaf tensors and constants,
    and nothing of one run: an Interpreter here would keep the outputs alive until backward.

    Intermediates are arguments of ``checkpoint``, which saves them as autograd
    saves tensors, so that a region around this one can drop them.  Leaves are
    not: a buffer that the region itself updates would fail the check for later
    writes that comes with saving.
    """

    __slots__ = ("body", "held", "reentrant")

    def __init__(self, body: fx.GraphModule, operands: Sequence[Any], reentrant: bool) -> None:
        self.body = body
        self.reentrant = reentrant
        self.held = [_ARGUMENT if _is_intermediate(v) else v for v in operands]

    def arguments(self, operands: Sequence[Any]) -> list[torch.Tensor]:
        return [v for v in operands if _is_intermediate(v)]

    def __call__(self, *arguments: Any) -> Any:
        remaining = iter(arguments)
        operands = [next(remaining) if v is _ARGUMENT else v for v in self.held]
        if not self.reentrant:
            return run_body(self.body, operands)
        with _in_reentrant_region():
            return run_body(self.body, operands)


_ARGUMENT = object()

_state = threading.local()


@contextmanager
def _in_reentrant_region() -> Iterator[None]:
    """Let selective regions inside keep nothing, as in eager, where a reentrant region
    runs its forward, and all that is inside, without gradients."""
    before = getattr(_state, "in_reentrant_region", False)
    _state.in_reentrant_region = True
    try:
        yield
    finally:
        _state.in_reentrant_region = before


def _is_intermediate(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.is_leaf


def records_gradient(body: fx.GraphModule, operands: Sequence[Any]) -> bool:
    """Whether a region on these operands has anything to recompute in backward."""
    return torch.is_grad_enabled() and (
        any(map(_requires_grad, operands)) or any(p.requires_grad for p in body.parameters())
    )


function_operator._plain_rule = replay_plainly
checkpoint_operator._plain_rule = tag_activation_checkpoint

RULES = {
    "autograd_function_apply": {DispatchKey.Autograd: autograd_function_apply},
    "tag_activation_checkpoint": {DispatchKey.Autograd: tag_activation_checkpoint},
}
