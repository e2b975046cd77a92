"""The import-time patch: every site of torch that hops changes, in one table.

:data:`SITES` lists what is patched for as long as hops is installed;
:mod:`hops._capture_hooks` holds what is patched only while a pre-dispatch
capture runs, so that eager training never meets it.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from dispatch_rules import TABLE
from hops import _capture_function
from hops._aliases import knowing_aliases
from hops._aot_metadata import keeping_node_metadata
from hops._capture_hooks import capture_hooks
from hops._effects import effects_told_at_the_end
from hops._export_files import (
    forgets_frozen_parameters,
    keeping_frozen,
    reading_empty_inputs,
)
from hops._export_names import naming_the_wrapped
from hops._export_passes import EXPORT_PASSES, mend_export_pass
from hops._import_hook import after_import
from hops._refusals import refuse_read_of_values
from hops._shared_bodies import share_bodies
from hops._subgraph import settle
from hops._torch import (
    FUNCTIONALIZE,
    ProxyTorchDispatchMode,
    capture_on_this_thread,
    compiled_code_inlined,
    custom_function_call,
    functions_with_effects,
    proxy_tensor,
    set_grad_enabled,
    stock_autograd_function_apply,
    stock_tag_activation_checkpoint,
    transform_functions,
)
from hops._whole_capture import noting_captures
from hops.autograd_function_apply import AutogradFunctionApply
from hops.errors import CaptureError
from hops.tag_activation_checkpoint import TagActivationCheckpoint

_lock = threading.RLock()


@dataclass
class Site:
    """One place of torch that is changed.

    Attributes:
        where: its name in torch.
        why: the torch behaviour that forces the change.
        install: makes the change, and gives the function that takes it back.
    """

    where: str
    why: str
    install: Callable[[], Callable[[], None]]


def _operator(instance: Any, own_class: type) -> Callable[[], None]:
    """Turn a stock operator into the project's, on the very same object.

    Whoever holds the operator — Dynamo, a set of known operators inside torch,
    a user — keeps holding the right one, and isinstance checks on the stock
    class stay true.
    """
    stock = {
        "__class__": instance.__class__,
        "non_fallthrough_keys": instance.non_fallthrough_keys,
        "_cacheable": instance._cacheable,
    }
    tables = ("py_kernels", "python_key_table", "functorch_table", "_dispatch_cache")
    copies = {name: dict(getattr(instance, name)) for name in tables}
    instance.__class__ = own_class
    for key, rule in TABLE[instance.__name__].items():
        if key is FUNCTIONALIZE:
            instance.py_functionalize_impl(rule)
        else:
            instance.python_key_table.pop(key, None)
            instance.py_kernels.pop(key, None)
            instance.functorch_table.pop(key, None)
            instance.py_impl(key)(rule)
    instance._dispatch_cache.clear()

    def restore() -> None:
        for name, value in stock.items():
            setattr(instance, name, value)
        for name, content in copies.items():
            table = getattr(instance, name)
            table.clear()
            table.update(content)

    return restore


def _attribute(owner: Any, name: str, wrap: Callable[[Any], Any]) -> Callable[[], None]:
    before = owner.__dict__[name]
    setattr(owner, name, wrap(before))
    return lambda: setattr(owner, name, before)


def _with_capture_hooks(trace_inner: Callable[..., Any]) -> Callable[..., Any]:
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


def _minding_autograd(torch_function: Callable[..., Any]) -> Callable[..., Any]:
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

    def trace_and_settle(*args: Any, **kwargs: Any) -> Any:
        graph = trace(*args, **kwargs)
        settle(graph, tracer)
        share_bodies(graph, tracer.root)
        return graph

    tracer.trace = trace_and_settle
    tracer.create_arg = knowing_aliases(tracer, tracer.create_arg)
    try:
        yield
    finally:
        del tracer.trace
        del tracer.create_arg


def _refuse_transforms_by_name() -> Callable[[], None]:
    def refuse(mode: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        raise CaptureError(
            f"hops: {_capture_function.function_name(function)} is applied under a torch.func "
            "transform (vmap, grad, jvp, ...), which cannot be captured before dispatch. Apply "
            "the transform outside of the captured model, or use torch.compile."
        )

    table = custom_function_call.python_key_table
    table[ProxyTorchDispatchMode] = refuse
    return lambda: table.pop(ProxyTorchDispatchMode)


def _declare_effects() -> Callable[[], None]:
    effects = functions_with_effects()
    operators = (stock_autograd_function_apply, stock_tag_activation_checkpoint)
    added = {*operators, *transform_functions()} - effects
    effects |= added
    return lambda: effects.difference_update(added)


def _once_imported(module: str, patch: Callable[[], Callable[[], None]]) -> Callable[[], None]:
    """Patch a heavy module of torch when it is there: now, or after its import.

    The import is seen through an import hook, so that it does not matter which
    of the two came first, and ``import hops`` does not pay for it.
    """
    undo: list[Callable[[], None]] = []
    stop = after_import(module, lambda: undo.append(patch()))

    def restore() -> None:
        stop()
        while undo:
            undo.pop()()

    return restore


def _patch_dynamo() -> Callable[[], None]:
    from hops import _dynamo_rules

    return _dynamo_rules.install()


def _patch_functional_export() -> Callable[[], None]:
    functional_export = sys.modules["torch._dynamo.functional_export"]
    if not hasattr(functional_export, "fullgraph_capture"):
        return lambda: None
    return _attribute(functional_export, "fullgraph_capture", noting_captures)


def _patch_aot_autograd() -> Callable[[], None]:
    aot_autograd = sys.modules["torch._functorch.aot_autograd"]
    return _attribute(aot_autograd, "_aot_export_function", keeping_node_metadata)


def _patch_export() -> Callable[[], None]:
    trace = sys.modules["torch.export._trace"]
    return _attribute(trace, "_export_for_training", naming_the_wrapped)


def _patch_archive() -> Callable[[], None]:
    package = sys.modules["torch.export.pt2_archive._package"]
    if not forgets_frozen_parameters(package):
        return lambda: None
    return _attribute(package, "_load_state_dict", keeping_frozen(package))


def _patch_export_pass(name: str) -> Callable[[], None]:
    return mend_export_pass(sys.modules[name])


def _patch_reading_of_files() -> Callable[[], None]:
    reader = sys.modules["torch._export.serde.serialize"].GraphModuleDeserializer
    return _attribute(reader, "deserialize_graph", reading_empty_inputs)


def _patch_deserializer() -> Callable[[], None]:
    from hops import _file_checks

    deserializer = sys.modules["torch._export.serde.serialize"].GraphModuleDeserializer
    return _attribute(deserializer, "deserialize", _file_checks.checking_the_operators)


SITES = (
    Site(
        "torch.ops.higher_order.autograd_function_apply",
        "stock has no dispatch rules, so no tracer keeps it, and makes a class per call",
        lambda: _operator(stock_autograd_function_apply, AutogradFunctionApply),
    ),
    Site(
        "torch.ops.higher_order.tag_activation_checkpoint",
        "stock runs without checkpointing in eager (<= 2.9), draws another random mask in "
        "recompute (2.13 on), and raises KeyError before dispatch for a plain region",
        lambda: _operator(stock_tag_activation_checkpoint, TagActivationCheckpoint),
    ),
    Site(
        "torch.fx.experimental.proxy_tensor._MakefxTracer._trace_inner",
        "pre-dispatch tracing inlines Function.apply and checkpoint; the hooks that catch "
        "them (FunctionMeta.__getattribute__, checkpoint.__code__) act during a trace only",
        lambda: _attribute(proxy_tensor._MakefxTracer, "_trace_inner", _with_capture_hooks),
    ),
    Site(
        "torch.fx.experimental.proxy_tensor.PreDispatchTorchFunctionMode.__torch_function__",
        "torch 2.6 records a switch of grad mode without applying it, so that a Function in the "
        "model's no_grad block looks as if it recorded gradients; a hook on a tensor is lost "
        "without a word on every torch",
        lambda: _attribute(
            proxy_tensor.PreDispatchTorchFunctionMode, "__torch_function__", _minding_autograd
        ),
    ),
    Site(
        "torch._functorch.autograd_function.custom_function_call",
        "a Function under torch.func transforms fails before dispatch with a message that "
        "names neither the Function nor a way out",
        _refuse_transforms_by_name,
    ),
    Site(
        "torch.fx.node._side_effectful_functions",
        "dead code elimination drops a call whose output nothing uses, though it may update a "
        "buffer or draw random numbers, and the beginning and end of a vmap",
        _declare_effects,
    ),
    Site(
        "torch._dynamo: TorchHigherOrderOperatorVariable.make, "
        "AutogradFunctionVariable.call_apply, OutputGraph.call_user_compiler, "
        "SideEffects.store_attr and mutation, autograd_function_backward_rewritten, list of "
        "files to inline",
        "Dynamo cannot read a graph that holds autograd_function_apply, traces the body of a "
        "captured region anew, refuses or misreads many Functions and regions under export "
        "(what happened in a region is cut out of the complete graph), some Functions under "
        "torch.compile too (it is watched while it reads them), and skips "
        "checkpoint_sequential",
        lambda: _once_imported("torch._dynamo", _patch_dynamo),
    ),
    Site(
        "torch._dynamo.functional_export.fullgraph_capture",
        "dynamo_graph_capture_for_export looks to Dynamo like a compilation, and fails on every "
        "Function that Dynamo does not read itself",
        lambda: _once_imported("torch._dynamo.functional_export", _patch_functional_export),
    ),
    Site(
        "torch._functorch.aot_autograd._aot_export_function",
        "aot_export_module traces its joint graph a second time and drops what the first "
        "trace wrote on the nodes: recompute, ac_graph_id",
        lambda: _once_imported("torch._functorch.aot_autograd", _patch_aot_autograd),
    ),
    *(
        Site(
            f"{name}: nodes_first, node_inline_, sequential_split",
            "where operators hold bodies, it overlooks switches of grad mode and autocast, and "
            "deletes bodies inside bodies and the metadata of those with a switch in them",
            functools.partial(_once_imported, name, functools.partial(_patch_export_pass, name)),
        )
        for name in EXPORT_PASSES
    ),
    Site(
        "torch.export._trace._export_for_training",
        "names below a CheckpointWrapper show the wrapper: placeholders, state_dict keys, "
        "module paths",
        lambda: _once_imported("torch.export._trace", _patch_export),
    ),
    Site(
        "torch.export.pt2_archive._package._load_state_dict",
        "torch 2.9 loads a frozen parameter as one that requires grad",
        lambda: _once_imported("torch.export.pt2_archive._package", _patch_archive),
    ),
    Site(
        "torch._export.serde.serialize.GraphModuleDeserializer.deserialize_graph",
        "a file does not load if a body has more inputs than the program and one is None",
        lambda: _once_imported("torch._export.serde.serialize", _patch_reading_of_files),
    ),
    Site(
        "torch._export.serde.serialize.GraphModuleDeserializer.deserialize",
        "a file whose counts, bodies or keywords were damaged loads without a word and fails "
        "later, or gives other gradients; it is refused by the name of the node",
        lambda: _once_imported("torch._export.serde.serialize", _patch_deserializer),
    ),
    Site(
        "torch._export.serde.serialize.GraphModuleDeserializer.deserialize",
        "a file whose counts, bodies or keywords were damaged loads without a word and fails "
        "later, or gives other gradients; it is refused by the name of the node",
        lambda: _once_imported("torch._export.serde.serialize", _patch_deserializer),
    ),
)

_restore: list[Callable[[], None]] = []


def install() -> None:
    """Patch torch.  Doing it twice is doing it once.

    With ``HOPS_DISABLE=1`` in the environment nothing is patched.
    """
    with _lock:
        if _restore or os.environ.get("HOPS_DISABLE") == "1":
            return
        for site in SITES:
            _restore.append(site.install())


def uninstall() -> None:
    """Give torch back everything that :func:`install` changed."""
    with _lock:
        while _restore:
            _restore.pop()()


def installed() -> bool:
    return bool(_restore)


def doctor() -> str:
    """A table of the patched sites, for people."""
    lines = [f"torch {torch.__version__}   hops {'installed' if installed() else 'not installed'}"]
    for site in SITES:
        lines += [f"  {site.where}", f"      {site.why}"]
    return "\n".join(lines)
