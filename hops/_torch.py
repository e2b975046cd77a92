"""The one module that knows torch versions.

Everything that differs between torch 2.6 and the newest release is found out
here, by probing for the capability rather than by comparing version numbers,
and offered to the rest of the code under one name; what concerns checkpoint, the
compilers and symbolic sizes is in modules of their own, and offered here too.  Names
that are private to torch and that more than one module needs are also imported here,
so that a torch that moves one of them is mended in one place.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable
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
    FakeTensor,
    FakeTensorMode,
)
from torch._subclasses.functional_tensor import (
    FunctionalTensor,
    FunctionalTensorMode,
    dispatch_functionalize,
)
from torch.autograd import forward_ad
from torch.fx import node as fx_node
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import (
    PreDispatchTorchFunctionMode,
    ProxyTorchDispatchMode,
    disable_proxy_modes_tracing,
    get_proxy_mode,
    track_tensor_tree,
)
from torch.utils._python_dispatch import (
    _get_current_dispatch_mode_stack,
    is_traceable_wrapper_subclass,
)

from hops._threads import captures_on_this_thread
from hops._torch_checkpoint import (
    CHECKPOINT_KEYWORDS,
    DETERMINISM_CHECKS,
    cache_earlier_output,
    checkpoint_function,
    checkpoint_takes_tuples,
    sac_context,
    sac_ignored_operations,
    selective_checkpoint_modes,
    selective_modes_pass_other_operators,
)
from hops._torch_compilers import (
    aot_entries,
    compiled_code_inlined,
    compiler_is_tracing,
    graph_capture_for_export,
    mark_saved_without_version_check,
    post_dispatch_proxy_mode,
    real_object,
    tag_for_partitioner,
)
from hops._torch_symbols import (
    SymbolicValues,
    fake_conversion_allowed,
    is_data_dependence,
    statically_known_true,
    unbacked_symbols_bound,
)

__all__ = [
    "CHECKPOINT_KEYWORDS",
    "DETERMINISM_CHECKS",
    "DispatchKey",
    "FakeTensor",
    "FakeTensorMode",
    "FUNCTIONALIZE",
    "FunctionalTensorMode",
    "HigherOrderOperator",
    "PreDispatchTorchFunctionMode",
    "ProxyTorchDispatchMode",
    "StockAutogradFunctionApply",
    "StockTagActivationCheckpoint",
    "SymbolicValues",
    "TRANSFORMS",
    "any_requires_grad",
    "aot_entries",
    "autocast_disabled",
    "below_autograd",
    "functions_with_effects",
    "functorch_is_active",
    "modes_are_active",
    "set_grad_enabled",
    "cache_earlier_output",
    "forward_mode_is_active",
    "post_dispatch_node",
    "view_tracking_active",
    "without_torch_functions",
    "checkpoint_function",
    "checkpoint_takes_tuples",
    "compiled_code_inlined",
    "compiler_is_tracing",
    "custom_function_call",
    "detect_fake_mode",
    "disable_proxy_modes_tracing",
    "dispatch_functionalize",
    "fake_conversion_allowed",
    "get_proxy_mode",
    "is_data_dependence",
    "graph_capture_for_export",
    "is_traceable_wrapper_subclass",
    "is_transformed",
    "mark_saved_without_version_check",
    "native_apply",
    "native_call",
    "non_strict_tracing",
    "pre_dispatch_tracer",
    "proxy_tensor",
    "python_apply",
    "real_object",
    "recompile_submodules",
    "reenter_make_fx",
    "reentrant_by_default",
    "sac_context",
    "sac_ignored_operations",
    "selective_checkpoint_modes",
    "selective_modes_pass_other_operators",
    "set_grad_enabled_silently",
    "stock_autograd_function_apply",
    "statically_known_true",
    "stock_tag_activation_checkpoint",
    "tag_for_partitioner",
    "torch_checkpoint",
    "top_saved_tensors_hooks",
    "trace_is_plain",
    "track_tensor_tree",
    "transform_functions",
    "transformed_tensor_requires_grad",
    "unbacked_symbols_bound",
    "writes_profiler_marks",
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


#: The transforms of ``torch.func`` under which an operator may be called.
TRANSFORMS = (
    torch._C._functorch.TransformType.Grad,
    torch._C._functorch.TransformType.Jvp,
    torch._C._functorch.TransformType.Vmap,
)

SYMBOLIC_TYPES = (torch.SymInt, torch.SymFloat, torch.SymBool)


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


def pre_dispatch_tracer() -> Any:
    """The tracer that records this thread's operations before dispatch, or None."""
    if not captures_on_this_thread():
        return None
    mode = get_proxy_mode()
    if mode is None or not mode.pre_dispatch or not mode.enable_tracing:
        return None
    return None if non_strict_tracing() else mode.tracer


def trace_is_plain(targets: Iterable[Any]) -> bool:
    """Whether a trace of these operations on fake tensors records them as they are: no mode of
    the user's looks on, and the trace decomposes none of them."""
    tracer = proxy_tensor._CURRENT_MAKE_FX_TRACER
    decomposed = tracer.decomposition_table
    modes = _get_current_dispatch_mode_stack()
    return (
        torch._C._len_torch_function_stack() == 0
        and all(isinstance(mode, FakeTensorMode) for mode in modes)
        and not any(target in decomposed for target in targets)
    )


#: Operations that have a native function of the same arguments and one meaning.
_ELEMENTWISE = frozenset(
    """
    abs.default add.Tensor bitwise_and.Tensor bitwise_not.default bitwise_or.Tensor ceil.default
    clamp.default cos.default div.Tensor eq.Scalar eq.Tensor erf.default exp.default expm1.default
    floor.default ge.Scalar ge.Tensor gt.Scalar gt.Tensor le.Scalar le.Tensor log.default
    log1p.default logical_and.default logical_not.default logical_or.default lt.Scalar lt.Tensor
    maximum.default minimum.default mul.Tensor ne.Scalar ne.Tensor neg.default
    pow.Tensor_Scalar reciprocal.default relu.default round.default rsqrt.default rsub.Scalar
    rsub.Tensor sigmoid.default sign.default sin.default sqrt.default square.default sub.Tensor
    tanh.default where.self
    """.split()
)


def native_call(operation: Any) -> Any:
    """The native function that calling an operation comes down to, where it has one.

    The functions of ``torch`` cost less than ``OpOverload``s, whose arguments go
    through boxes; both end in the same entry of the dispatcher.
    """
    if type(operation) is not torch._ops.OpOverload:
        return operation
    namespace, _, name = str(operation).partition(".")
    if namespace == "aten" and name in _ELEMENTWISE:
        return getattr(torch._C._VariableFunctions, name.partition(".")[0])
    return operation._op


def native_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``function.apply`` for a Function without ``setup_context``, outside of torch.func.

    Up to 2.13 ``apply`` is Python that costs as much as the native call inside.
    """
    if "apply" not in torch.autograd.Function.__dict__:
        return function.apply
    apply = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    unwrap_if_dead = torch._C._functorch.unwrap_if_dead

    def apply_unwrapped(*args: Any) -> Any:
        # What a finished transform left behind is not the tensor that autograd knows.
        return apply(*[unwrap_if_dead(a) if isinstance(a, torch.Tensor) else a for a in args])

    return apply_unwrapped


#: What ``apply`` runs where it is Python (up to 2.13), else None.
python_apply = getattr(vars(torch.autograd.Function).get("apply"), "__func__", None)

below_autograd = torch._C._AutoDispatchBelowAutograd
autocast_disabled = torch._C._DisableAutocast


def post_dispatch_node(tensor: Any) -> Any:
    """The node of a tensor in the trace that runs after dispatch, or None."""
    mode = post_dispatch_proxy_mode()
    if mode is None:
        return None
    if isinstance(tensor, FunctionalTensor):
        tensor = torch._from_functional_tensor(tensor.elem)
    slot = proxy_tensor.get_proxy_slot(tensor, mode.tracer, None)
    return None if slot is None else slot.proxy.node


def view_tracking_active() -> Any:
    """Below autograd: views share the version counter of their base, as above it."""
    return torch._C._SetExcludeDispatchKeyGuard(DispatchKey.ADInplaceOrView, False)


def forward_mode_is_active() -> bool:
    """Whether a forward-mode AD level is entered on this thread."""
    return forward_ad._current_level >= 0


is_transformed = torch._C._functorch.is_functorch_wrapped_tensor
without_torch_functions = torch._C.DisableTorchFunction
#: Torch 2.6 has no such function.
top_saved_tensors_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
set_grad_enabled = torch._C._set_grad_enabled
functorch_is_active = torch._C._are_functorch_transforms_active


def transformed_tensor_requires_grad(tensor: Any) -> bool:
    """Whether a tensor that transforms of ``torch.func`` may have wrapped is differentiated,
    by a transform or by the autograd outside of all of them."""
    functorch = torch._C._functorch
    while isinstance(tensor, torch.Tensor):
        if tensor.requires_grad or functorch.is_gradtrackingtensor(tensor):
            return True
        if not functorch.is_functorch_wrapped_tensor(tensor):
            break
        tensor = functorch.get_unwrapped(tensor)
    return False


_len_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_mode_is_enabled = torch._C._is_torch_function_mode_enabled


def modes_are_active() -> bool:
    """Whether a dispatch mode, a function mode or a torch.func transform sees the next call."""
    return _len_dispatch_modes() > 0 or functorch_is_active() or _function_mode_is_enabled()


def _any_requires_grad(*values: Any) -> bool:
    return any(isinstance(v, torch.Tensor) and v.requires_grad for v in values)


#: Native on newer torch.
any_requires_grad = getattr(torch._C, "_any_requires_grad", _any_requires_grad)


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
        try:
            self._restore()
        except BaseException:  # an interrupt in the middle of restoring
            self._restore()
            raise

    def _restore(self) -> None:
        with torch._C.DisableTorchFunction():
            torch._C._set_grad_enabled(self.before)


def functions_with_effects() -> set[Any]:
    """The functions that fx never takes for dead code."""
    return fx_node._side_effectful_functions


def transform_functions() -> list[Any]:
    """Functions by which torch records a transform (``vmap``) in a pre-dispatch graph
    and which give nothing that another node would use; none before 2.9."""
    predispatch = getattr(torch._functorch, "predispatch", None)
    names = ("_vmap_increment_nesting", "_vmap_decrement_nesting", "lazy_load_decompositions")
    return [getattr(predispatch, name) for name in names if hasattr(predispatch, name)]


def recompile_submodules(module: torch.fx.GraphModule) -> None:
    """What recompiling a GraphModule does to the ones inside it (2.13 on)."""
    recompile = getattr(module, "_recompile_submodules", None)
    if recompile is not None:
        recompile()


def writes_profiler_marks() -> bool:
    """Whether generated code holds marks for the profiler, made from more than its graph."""
    config = getattr(torch.fx.experimental, "_config", None)
    return bool(getattr(config, "enrich_profiler_metadata", False))
