"""Autograd: a Function runs as a real ``autograd.Function``, a region really checkpoints.

This is also where both operators end under AOTAutograd and every other
post-dispatch tracer: the forward body, the backward body and the recomputation
are then operations like any other.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx
from torch.autograd.function import once_differentiable

from hops import autograd_function_apply as function_operator
from hops import tag_activation_checkpoint as checkpoint_operator
from hops._decompose import is_kept
from hops._policy import context_fn_of
from hops._torch import (
    CHECKPOINT_KEYWORDS,
    DispatchKey,
    below_autograd,
    compiler_is_tracing,
    mark_saved_without_version_check,
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
    form = CallForm(fwd, bwd, operands, options)
    inputs = operands[: form.num_inputs]
    if not torch.is_grad_enabled():
        return form.visible(form.forward(operands)[0])
    if not any(map(_requires_grad, inputs)):
        with set_grad_enabled_silently(False):
            return form.visible(form.forward(operands)[0])
    if "needs_input_grad" in options:
        check_needs_input_grad(form, map(_requires_grad, inputs))
    node = _node_class(form.name, "once_differentiable" in options)
    outputs = node.apply(form, operands[form.num_inputs :], *inputs)
    return form.visible(outputs)


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
    def forward(ctx: Any, form: CallForm, captured: Sequence[Any], *inputs: Any) -> Any:
        outputs, saved = form.forward((*inputs, *captured))
        ctx.form = form
        options = form.options
        checked = form.saved_for_backward
        if checked:
            ctx.save_for_backward(*[saved[i] for i in checked])
            ctx.kept = [None if i in checked else v for i, v in enumerate(saved)]
        else:
            ctx.kept = saved
        if len(checked) < len(saved):
            mark_saved_without_version_check(ctx.kept)
        if not form.materialize_grads:
            ctx.set_materialize_grads(False)
        if options.get("non_differentiable_idx"):
            marked = [outputs[i] for i in options["non_differentiable_idx"]]
            ctx.mark_non_differentiable(*[v for v in marked if isinstance(v, torch.Tensor)])
        if options.get("dirty_idx"):
            ctx.mark_dirty(*[outputs[i] for i in options["dirty_idx"]])
        ctx.strides = unusual_strides(outputs)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        form = ctx.form
        if "no_backward" in form.options:
            raise NotImplementedError(
                f"You must implement either the backward or vjp method for {form.name} to use "
                "it with backward mode AD."
            )
        saved = ctx.kept
        if form.saved_for_backward:
            saved = list(saved)
            for position, value in zip(form.saved_for_backward, ctx.saved_tensors):
                saved[position] = value
        arrived = [laid_out(g, ctx.strides, i) for i, g in enumerate(gradients)]
        results = form.backward(arrived, saved)
        return (None, None, *results[: form.num_inputs])


class _CapturedOnceDifferentiableFunction(_CapturedFunction):
    backward = staticmethod(once_differentiable(_CapturedFunction.backward))  # type: ignore[assignment]


@functools.cache
def _node_class(name: str, once: bool) -> type[torch.autograd.Function]:
    """The class of a Function's node, made once: ``grad_fn`` shows the user's class name."""
    base = _CapturedOnceDifferentiableFunction if once else _CapturedFunction
    return type(name.rpartition(".")[2], (base,), {"__module__": name.rpartition(".")[0]})


# [Note: layout of incoming gradients]
# A backward is traced with gradients laid out like the outputs.  What arrives
# may be an expanded scalar or a slice; code that read strides while it was
# traced (or a kernel that trusts them) would then be silently wrong, so a
# gradient of another layout is copied into the traced one.


def unusual_strides(outputs: Sequence[Any]) -> dict[int, tuple[int, ...]] | None:
    """Strides of the outputs that are not contiguous, by position."""
    unusual = {
        i: v.stride()
        for i, v in enumerate(outputs)
        if isinstance(v, torch.Tensor) and v.layout is torch.strided and not v.is_contiguous()
    }
    return unusual or None


def laid_out(gradient: Any, strides: dict[int, tuple[int, ...]] | None, position: int) -> Any:
    if not isinstance(gradient, torch.Tensor) or gradient.layout is not torch.strided:
        return gradient
    if strides is None or position not in strides:
        return gradient if gradient.is_contiguous() else gradient.contiguous()
    wanted = strides[position]
    if gradient.stride() == wanted:
        return gradient
    order = sorted(range(gradient.dim()), key=lambda d: wanted[d], reverse=True)
    back = sorted(range(gradient.dim()), key=order.__getitem__)
    return gradient.permute(order).contiguous().permute(back)


def tag_activation_checkpoint(body: Any, *operands: Any, **options: Any) -> Any:
    """Run a region without keeping its intermediates, and again in backward.

    Under AOTAutograd the region is run once and its nodes are tagged, so that
    the partitioner recomputes them.
    """
    operator = checkpoint_operator.tag_activation_checkpoint
    if is_kept(operator) and compiler_is_tracing():
        with below_autograd():
            return operator(body, *operands, **options)
    context_fn = context_fn_of(body, options)
    if compiler_is_tracing():
        return tag_for_partitioner(body, *operands, **options)
    if not records_gradient(body, operands):
        return run_body(body, operands)
    known = {k: v for k, v in options.items() if k in CHECKPOINT_KEYWORDS}
    known["use_reentrant"] = False
    if context_fn is not None:
        known["context_fn"] = context_fn
    region = _Region(body, operands)
    return torch_checkpoint.checkpoint(region, *region.arguments(operands), **known)


class _Region:
    """The function that is checkpointed.  It holds the body, leaf tensors and constants,
    and nothing of one run: an Interpreter here would keep the outputs alive until backward.

    Intermediates are arguments of ``checkpoint``, which saves them as autograd
    saves tensors, so that a region around this one can drop them.  Leaves are
    not: a buffer that the region itself updates would fail the check for later
    writes that comes with saving.
    """

    __slots__ = ("body", "held")

    def __init__(self, body: fx.GraphModule, operands: Sequence[Any]) -> None:
        self.body = body
        self.held = [_ARGUMENT if _is_intermediate(v) else v for v in operands]

    def arguments(self, operands: Sequence[Any]) -> list[torch.Tensor]:
        return [v for v in operands if _is_intermediate(v)]

    def __call__(self, *arguments: Any) -> Any:
        remaining = iter(arguments)
        operands = [next(remaining) if v is _ARGUMENT else v for v in self.held]
        return run_body(self.body, operands)


_ARGUMENT = object()


def _is_intermediate(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.is_leaf


def records_gradient(body: fx.GraphModule, operands: Sequence[Any]) -> bool:
    """Whether a region on these operands has anything to recompute in backward."""
    return torch.is_grad_enabled() and (
        any(map(_requires_grad, operands)) or any(p.requires_grad for p in body.parameters())
    )


function_operator._plain_rule = autograd_function_apply
checkpoint_operator._plain_rule = tag_activation_checkpoint

RULES = {
    "autograd_function_apply": {DispatchKey.Autograd: autograd_function_apply},
    "tag_activation_checkpoint": {DispatchKey.Autograd: tag_activation_checkpoint},
}
