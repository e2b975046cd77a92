"""The one module that knows torch versions.

Everything that differs between torch 2.6 and the newest release is found out
here, by probing for the capability rather than by comparing version numbers,
and offered to the rest of the code under one name.  Names that are private to
torch and that more than one module needs are also imported here, so that a
torch that moves one of them is mended in one place.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch._C import DispatchKey
from torch._functorch import autograd_function as stock_autograd_function
from torch._guards import detect_fake_mode
from torch._higher_order_ops import wrap as stock_wrap
from torch._higher_order_ops.utils import reenter_make_fx
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensor,
    FakeTensorMode,
)
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import (
    PreDispatchTorchFunctionMode,
    ProxyTorchDispatchMode,
    disable_proxy_modes_tracing,
    get_proxy_mode,
    track_tensor_tree,
)
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = [
    "CHECKPOINT_KEYWORDS",
    "DispatchKey",
    "FakeTensor",
    "FakeTensorMode",
    "FUNCTIONALIZE",
    "HigherOrderOperator",
    "PreDispatchTorchFunctionMode",
    "ProxyTorchDispatchMode",
    "StockAutogradFunctionApply",
    "StockTagActivationCheckpoint",
    "SymbolicValues",
    "below_autograd",
    "functorch_is_active",
    "modes_are_active",
    "set_grad_enabled",
    "without_torch_functions",
    "capture_on_this_thread",
    "checkpoint_function",
    "checkpoint_takes_tuples",
    "compiled_code_inlined",
    "compiler_is_tracing",
    "custom_function_call",
    "detect_fake_mode",
    "disable_proxy_modes_tracing",
    "fake_conversion_allowed",
    "get_proxy_mode",
    "is_data_dependence",
    "is_traceable_wrapper_subclass",
    "mark_saved_without_version_check",
    "non_strict_tracing",
    "pre_dispatch_tracer",
    "proxy_tensor",
    "reenter_make_fx",
    "reentrant_by_default",
    "sac_context",
    "sac_ignored_operations",
    "selective_checkpoint_modes",
    "set_grad_enabled_silently",
    "stock_autograd_function_apply",
    "statically_known_true",
    "stock_tag_activation_checkpoint",
    "tag_for_partitioner",
    "torch_checkpoint",
    "track_tensor_tree",
    "unbacked_symbols_bound",
]

StockAutogradFunctionApply = stock_autograd_function.AutogradFunctionApply
StockTagActivationCheckpoint = stock_wrap.TagActivationCheckpoint
stock_autograd_function_apply = stock_autograd_function.autograd_function_apply
custom_function_call = stock_autograd_function.custom_function_call
stock_tag_activation_checkpoint = stock_wrap.tag_activation_checkpoint


class FUNCTIONALIZE:
    """Stands for functionalization in the rule table.

    It is several keys in torch (a mode, a dispatch key, a transform), which
    ``HigherOrderOperator.py_functionalize_impl`` registers together.
    """


SYMBOLIC_TYPES = (torch.SymInt, torch.SymFloat, torch.SymBool)

#: Keyword arguments of ``torch.utils.checkpoint.checkpoint`` itself, with the
#: default of each; everything else goes to the checkpointed function.
#: ``early_stop`` came with torch 2.9, ``respect_saved_tensors_hooks`` with 2.14.
CHECKPOINT_KEYWORDS: dict[str, Any] = {
    name: parameter.default
    for name, parameter in inspect.signature(
        inspect.unwrap(torch_checkpoint.checkpoint)
    ).parameters.items()
    if parameter.kind is inspect.Parameter.KEYWORD_ONLY
}
CHECKPOINT_KEYWORDS.setdefault("preserve_rng_state", True)


def _checkpoint_function() -> Any:
    function = getattr(torch_checkpoint, "_checkpoint_impl", torch_checkpoint.checkpoint)
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


#: The function that runs a region, however ``checkpoint`` was called.  From torch 2.14
#: on that is ``_checkpoint_impl(function, args, kwargs, *, ...)``, to which the curried
#: form ``checkpoint(use_reentrant=False)(function)`` goes directly.
checkpoint_function = _checkpoint_function()
checkpoint_takes_tuples = checkpoint_function.__name__ != "checkpoint"

#: The dispatch modes by which ``torch.utils.checkpoint`` carries out a
#: selective policy: (forward, recompute).
selective_checkpoint_modes = (
    torch_checkpoint._CachingTorchDispatchMode,
    torch_checkpoint._CachedTorchDispatchMode,
)

#: Operations that a selective policy is not asked about.
sac_ignored_operations = torch_checkpoint.SAC_IGNORED_OPS


def sac_context(is_recompute: bool, output: Any) -> Any:
    """What a policy is told about a call; ``op_output`` came with torch 2.10."""
    parameters = inspect.signature(torch_checkpoint.SelectiveCheckpointContext).parameters
    if "op_output" in parameters:
        return torch_checkpoint.SelectiveCheckpointContext(
            is_recompute=is_recompute, op_output=output
        )
    return torch_checkpoint.SelectiveCheckpointContext(is_recompute=is_recompute)


@functools.cache
def reentrant_by_default() -> bool:
    """Which implementation ``checkpoint`` takes when ``use_reentrant`` is not given."""
    grad_modes: list[bool] = []
    with torch._C.DisableTorchFunction(), set_grad_enabled_silently(True):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch_checkpoint.checkpoint(lambda: grad_modes.append(torch.is_grad_enabled()))
    return not grad_modes[0]


_non_strict_flag = getattr(torch.compiler, "_is_non_strict_tracing", None)


def non_strict_tracing() -> bool:
    """Whether ``torch.compiler._non_strict_tracing_context`` is active (2.13 on)."""
    return bool(_non_strict_flag is not None and _non_strict_flag())


_this_thread = threading.local()


@contextmanager
def capture_on_this_thread() -> Iterator[None]:
    """Note that a pre-dispatch trace runs here.

    torch keeps the stack of pre-dispatch modes in one place for all threads, so
    the mode alone does not tell whose trace it belongs to.
    """
    depth = getattr(_this_thread, "captures", 0)
    _this_thread.captures = depth + 1
    try:
        yield
    finally:
        _this_thread.captures = depth


def compiled_code_inlined() -> Any:
    """Let captured code call what went through ``torch.compile``: it runs as it was written.

    torch.export does so by itself; ``make_fx`` would raise.
    """
    config = sys.modules.get("torch._dynamo.config")
    return nullcontext() if config is None else config.patch(error_on_nested_fx_trace=False)


def pre_dispatch_tracer() -> Any:
    """The tracer that records this thread's operations before dispatch, or None."""
    if not getattr(_this_thread, "captures", 0):
        return None
    mode = get_proxy_mode()
    if mode is None or not mode.pre_dispatch or not mode.enable_tracing:
        return None
    return None if non_strict_tracing() else mode.tracer


def _post_dispatch_proxy_mode() -> Any:
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)


def compiler_is_tracing() -> bool:
    """Whether AOTAutograd (or a post-dispatch ``make_fx``) looks at this call.

    True in both phases of AOTAutograd: while it collects metadata (a
    functionalization mode is active) and while it records the joint graph.
    """
    if _post_dispatch_proxy_mode() is not None:
        return True
    key = torch._C._TorchDispatchModeKey.FUNCTIONAL
    return torch._C._get_dispatch_mode(key) is not None


below_autograd = torch._C._AutoDispatchBelowAutograd
without_torch_functions = torch._C.DisableTorchFunction
set_grad_enabled = torch._C._set_grad_enabled
functorch_is_active = torch._C._are_functorch_transforms_active


def modes_are_active() -> bool:
    """Whether a dispatch mode, a function mode or a torch.func transform sees the next call."""
    return bool(
        torch._C._len_torch_dispatch_stack()
        or torch._C._are_functorch_transforms_active()
        or torch._C._is_torch_function_mode_enabled()
    )


class set_grad_enabled_silently:
    """Set grad mode without a pre-dispatch tracer writing it into the graph.

    ``torch.no_grad`` ends in ``torch._C._set_grad_enabled``, which
    ``PreDispatchTorchFunctionMode`` records.  With torch functions disabled
    the mode does not see the call.
    """

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled

    def __enter__(self) -> None:
        self.before = torch.is_grad_enabled()
        with torch._C.DisableTorchFunction():
            torch._C._set_grad_enabled(self.enabled)

    def __exit__(self, *exc_info: object) -> None:
        with torch._C.DisableTorchFunction():
            torch._C._set_grad_enabled(self.before)


@contextmanager
def fake_conversion_allowed(mode: Any) -> Iterator[None]:
    """Let operations on fake tensors meet real ones (parameters in a closure)."""
    before = mode.allow_non_fake_inputs
    mode.allow_non_fake_inputs = True
    try:
        yield
    finally:
        mode.allow_non_fake_inputs = before


@contextmanager
def unbacked_symbols_bound(mode: Any) -> Iterator[None]:
    """Data-dependent sizes made inside are bound by the nodes of the trace inside;
    the tracer around must not look for them among the outputs of its own nodes."""
    shape_env = getattr(mode, "shape_env", None)
    pending = getattr(shape_env, "pending_fresh_unbacked_symbols", None)
    before = list(pending or ())
    yield
    if pending is not None:
        pending[:] = before


class SymbolicValues:
    """What a tracer knows of symbolic sizes, kept while it records elsewhere.

    A tracer caches the node of each symbolic expression, lazily: the node of
    ``x.shape[0]`` is made on first use, in whichever graph is being recorded.
    A node made while a body is recorded must not serve the enclosing graph, so
    the caches go back to their state before the body; only values that the
    body itself brought into being (unbacked symbols) stay.
    """

    def __init__(self, tracer: Any) -> None:
        self._tracer = tracer
        entries = tracer.symnode_tracker.sym_node_dict
        self._entries = dict(entries)
        self._expressions = dict(getattr(tracer, "sympy_expr_tracker", ()))
        self._pending = [
            (thunk, thunk.f) for thunk in entries.values() if getattr(thunk, "f", None) is not None
        ]

    def restore(self) -> None:
        entries = self._tracer.symnode_tracker.sym_node_dict
        born_inside = {
            key: value
            for key, value in entries.items()
            if key not in self._entries and _is_unbacked(key)
        }
        entries.clear()
        entries.update(self._entries)
        entries.update(born_inside)
        if hasattr(self._tracer, "sympy_expr_tracker"):
            kept = {
                symbol: value
                for symbol, value in self._tracer.sympy_expr_tracker.items()
                if symbol in self._expressions or _has_unbacked_symbols(symbol)
            }
            self._tracer.sympy_expr_tracker.clear()
            self._tracer.sympy_expr_tracker.update(kept)
            self._tracer.sympy_expr_tracker.update(self._expressions)
        for thunk, pending in self._pending:
            if thunk.f is None:
                thunk.f, thunk.r = pending, None


def is_data_dependence(error: Exception) -> bool:
    """Whether torch says that tracing stopped at the value of a tensor."""
    # Imported late: it brings sympy, which costs more than all of hops.
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    if isinstance(error, (GuardOnDataDependentSymNode, DataDependentOutputException)):
        return True
    return any(message in str(error) for message in _DATA_DEPENDENCE)


#: An item of a real tensor; numpy() and the memory of a fake one.
_DATA_DEPENDENCE = (
    "trying to get a value out of symbolic",
    "trying to get value out of a tracing tensor",
    "is not supported for tensor subclasses",
    "Cannot access data pointer of Tensor",
)


def _is_unbacked(sym_node: Any) -> bool:
    expression = getattr(sym_node, "expr", None)
    return expression is not None and _has_unbacked_symbols(expression)


def _has_unbacked_symbols(expression: Any) -> bool:
    # Imported late: it brings sympy, which costs more than all of hops.
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return bool(free_unbacked_symbols(expression))


def statically_known_true(condition: Any) -> bool:
    """``symbolic_shapes.statically_known_true``, whose module is too heavy to import early."""
    if isinstance(condition, bool):
        return condition
    from torch.fx.experimental import symbolic_shapes

    return symbolic_shapes.statically_known_true(condition)


_tag_implementation = getattr(stock_wrap, "tag_activation_checkpoint_impl", None)


def tag_for_partitioner(body: Any, *operands: Any, **options: Any) -> Any:
    """Run a checkpoint body under AOTAutograd, as stock torch does.

    The nodes that it records carry ``recompute`` and ``ac_graph_id``; how
    they get them changed in 2.10 (from tags on the body to a dispatch mode),
    so this calls the installed torch's own code.
    """
    options = {k: v for k, v in options.items() if k in CHECKPOINT_KEYWORDS}
    if _tag_implementation is not None:
        return _tag_implementation(body, *operands, **options)
    return _stock_tag_call(stock_tag_activation_checkpoint, body, *operands, **options)


_get_proxies = getattr(proxy_tensor, "_get_proxies", None)


def mark_saved_without_version_check(values: Any) -> None:
    """Tell AOTAutograd that these values were kept on ``ctx``, not saved (2.10 on)."""
    if _get_proxies is None or _post_dispatch_proxy_mode() is None:
        return
    for value in values:
        if isinstance(value, torch.Tensor):
            for proxy in _get_proxies(value):
                proxy.node.meta["saved_tensor_with_no_vc_check"] = True


_stock_tag_call = StockTagActivationCheckpoint.__call__
