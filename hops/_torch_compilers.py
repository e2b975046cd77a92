"""What differs between torch versions in Dynamo and AOTAutograd: a part of :mod:`hops._torch`,
which the rest of the code imports it from."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from typing import Any

import torch
from torch._higher_order_ops import wrap as stock_wrap
from torch._library.fake_class_registry import FakeScriptObject
from torch.fx.experimental import proxy_tensor

from hops._torch_checkpoint import CHECKPOINT_KEYWORDS

_stock_tag_call = stock_wrap.TagActivationCheckpoint.__call__


def compiled_code_inlined() -> Any:
    """Let captured code call what went through ``torch.compile``: it runs as it was written.

    torch.export does so by itself; ``make_fx`` would raise.
    """
    config = sys.modules.get("torch._dynamo.config")
    return nullcontext() if config is None else config.patch(error_on_nested_fx_trace=False)


def real_object(value: Any) -> Any:
    """What a fake object of Dynamo's stands for, a process group or a generator say, or None.

    Not an object of TorchScript, whose methods a trace records as operations.
    """
    real = getattr(value, "real_obj", None) if isinstance(value, FakeScriptObject) else None
    return None if isinstance(real, torch.ScriptObject) else real


def aot_entries(aot_autograd: Any) -> list[tuple[str, int]]:
    """The functions of AOTAutograd that are handed what it compiles, to analyse or to trace it,
    and the position of that among their arguments."""
    if hasattr(aot_autograd, "create_aot_state"):
        return [("create_aot_state", 1), ("aot_stage1_graph_capture", 1)]
    return [("create_aot_dispatcher_function", 0)]


def post_dispatch_proxy_mode() -> Any:
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)


def compiler_is_tracing() -> bool:
    """Whether AOTAutograd (or a post-dispatch ``make_fx``) looks at this call.

    True in both phases of AOTAutograd: while it collects metadata (a
    functionalization mode is active) and while it records the joint graph.
    """
    if post_dispatch_proxy_mode() is not None:
        return True
    key = torch._C._TorchDispatchModeKey.FUNCTIONAL
    return torch._C._get_dispatch_mode(key) is not None


def graph_capture_for_export() -> Any:
    """``dynamo_graph_capture_for_export``, which came with torch 2.10; None before."""
    import torch._dynamo

    module = getattr(torch._dynamo, "functional_export", None)
    return getattr(module, "dynamo_graph_capture_for_export", None)


_tag_implementation = getattr(stock_wrap, "tag_activation_checkpoint_impl", None)


def tag_for_partitioner(body: Any, context_fn: Any, *operands: Any, **options: Any) -> Any:
    """Run a checkpoint body under AOTAutograd, with a policy or None, as stock torch does.

    The nodes that it records carry ``recompute`` and ``ac_graph_id``; how
    they get them changed in 2.10 (from tags on the body to a dispatch mode),
    so this calls the installed torch's own code.
    """
    # Stock's dispatch mode cannot go together with debug, which asks eager for a trace.
    options = {k: v for k, v in options.items() if k in CHECKPOINT_KEYWORDS and k != "debug"}
    if context_fn is not None:
        body.meta["_checkpoint_context_fn"] = context_fn
    if _tag_implementation is not None:
        return _tag_implementation(body, *operands, **options)
    return _stock_tag_call(stock_wrap.tag_activation_checkpoint, body, *operands, **options)


_get_proxies = getattr(proxy_tensor, "_get_proxies", None)


def mark_saved_without_version_check(values: Any) -> None:
    """Tell AOTAutograd that these values were kept on ``ctx``, not saved (2.10 on)."""
    if _get_proxies is None or post_dispatch_proxy_mode() is None:
        return
    for value in values:
        if isinstance(value, torch.Tensor):
            for proxy in _get_proxies(value):
                proxy.node.meta["saved_tensor_with_no_vc_check"] = True
