"""What hops adds to a pre-dispatch trace: the hooks that catch user code, and what is
settled between recording and the GraphModule."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hops import _capture_function
from hops._aliases import knowing_aliases
from hops._capture_hooks import capture_hooks
from hops._effects import effects_told_at_the_end
from hops._refusals import HOOKS_BEFORE, refuse_read_of_values
from hops._shared_bodies import share_bodies
from hops._subgraph import saved_tensors_hooks, settle
from hops._threads import capture_on_this_thread
from hops._torch import compiled_code_inlined, set_grad_enabled, without_torch_functions
from hops.errors import CaptureError


def with_capture_hooks(trace_inner: Callable[..., Any]) -> Callable[..., Any]:
    """``_MakefxTracer._trace_inner``, before dispatch with user code caught."""

    @functools.wraps(trace_inner)
    def _trace_inner(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.pre_dispatch:
            return trace_inner(self, *args, **kwargs)
        with capture_on_this_thread(), effects_told_at_the_end(), capture_hooks():
            with _settled_afterwards(self.fx_tracer), compiled_code_inlined():
                try:
                    return trace_inner(self, *args, **kwargs)
                finally:
                    _capture_function.forget_lookups()

    return _trace_inner


_HOOKS = (torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook)


def minding_autograd(torch_function: Callable[..., Any]) -> Callable[..., Any]:
    """Apply a recorded switch of grad mode, and refuse hooks on tensors of the trace
    and reads of their values in a Function."""

    @functools.wraps(torch_function)
    def __torch_function__(
        self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        refuse_read_of_values(func, args)
        if func in _HOOKS:
            node = getattr(args[0], "grad_fn", None)
            raise CaptureError(
                f"hops: {func.__name__} is called on an output of "
                f"{'the captured code' if node is None else node.name()} during a capture. A "
                "graph does not hold hooks, so the gradient would silently differ from eager. "
                "Do the hook's work in an autograd.Function around the tensor."
            )
        result = torch_function(self, func, types, args, kwargs)
        if func is set_grad_enabled and torch.is_grad_enabled() != args[0]:
            func(args[0])
        return result

    return __torch_function__


@contextmanager
def _settled_afterwards(tracer: Any) -> Iterator[None]:
    """Between recording and the GraphModule, tie up the values that escaped from bodies,
    and let equal bodies be one."""
    trace = tracer.trace
    setattr(tracer, HOOKS_BEFORE, saved_tensors_hooks())

    def trace_and_settle(*args: Any, **kwargs: Any) -> Any:
        graph = trace(*args, **kwargs)
        settle(graph, tracer)
        with without_torch_functions():
            share_bodies(graph, tracer.root)
        return graph

    tracer.trace = trace_and_settle
    tracer.create_arg = knowing_aliases(tracer, tracer.create_arg)
    try:
        yield
    finally:
        del tracer.trace
        del tracer.create_arg
