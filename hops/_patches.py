"""The import-time patch: every site of torch that hops changes, in one table.

:data:`SITES` lists what is patched for as long as hops is installed;
:mod:`hops._capture_hooks` holds what is patched only while a pre-dispatch
capture runs, so that eager training never meets it.
"""

from __future__ import annotations

import functools
import os
import sys
from typing import Any

from torch import fx

from dispatch_rules.autograd import is_captured_function
from hops import _capture_function, _capture_hooks, _native, _tracing
from hops import autograd_function_apply as function_operator
from hops import tag_activation_checkpoint as checkpoint_operator
from hops._aot_metadata import keeping_node_metadata
from hops._aot_views import hiding_views
from hops._changes import Changes
from hops._export_files import (
    forgets_frozen_parameters,
    keeping_frozen,
    reading_empty_inputs,
)
from hops._export_names import naming_the_wrapped
from hops._export_passes import EXPORT_PASSES, mend_export_pass
from hops._operators import own_operator
from hops._sites import Installation, Site
from hops._threads import annotating_own_capture, one_at_a_time
from hops._torch import (
    ProxyTorchDispatchMode,
    aot_entries,
    custom_function_call,
    functions_with_effects,
    proxy_tensor,
    stock_autograd_function_apply,
    stock_tag_activation_checkpoint,
    transform_functions,
)
from hops._whole_capture import noting_captures
from hops.errors import CaptureError


def _patch_function_operator(changes: Changes) -> str | None:
    own = function_operator.AutogradFunctionApply
    return own_operator(changes, stock_autograd_function_apply, function_operator, own)


def _patch_checkpoint_operator(changes: Changes) -> str | None:
    own = checkpoint_operator.TagActivationCheckpoint
    return own_operator(changes, stock_tag_activation_checkpoint, checkpoint_operator, own)


def _patch_tracing(changes: Changes) -> str | None:
    for hook, captured_by_torch in _native.FRONT_ENDS.items():
        if captured_by_torch():
            changes.members(_capture_hooks.native_hooks, {hook})
            changes.native.append(f"capture of each {hook}")
    if _capture_hooks.native_hooks >= _native.FRONT_ENDS.keys():
        return "torch catches Functions and checkpoints itself"
    changes.attribute(proxy_tensor._MakefxTracer, "_trace_inner", _tracing.with_capture_hooks)
    return None


def _patch_function_mode(changes: Changes) -> None:
    mode = proxy_tensor.PreDispatchTorchFunctionMode
    changes.attribute(mode, "__torch_function__", _tracing.minding_autograd)


def _refuse_transforms_by_name(changes: Changes) -> str | None:
    def refuse(mode: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        raise CaptureError(
            f"hops: {_capture_function.function_name(function)} is applied under a torch.func "
            "transform (vmap, grad, jvp, ...), which cannot be captured before dispatch. Apply "
            "the transform outside of the captured model, or use torch.compile."
        )

    table = custom_function_call.python_key_table
    if ProxyTorchDispatchMode in table:
        return "torch has a rule for it"
    shown = "custom_function_call.python_key_table[ProxyTorchDispatchMode]"
    changes.entry(table, ProxyTorchDispatchMode, refuse, shown)
    return None


def _patch_annotations(changes: Changes) -> str | None:
    if not hasattr(fx.traceback, "annotate"):
        return "this torch does not annotate"
    changes.attribute(fx.traceback, "annotate", annotating_own_capture)
    return None


def _declare_effects(changes: Changes) -> None:
    operators = (stock_autograd_function_apply, stock_tag_activation_checkpoint)
    changes.members(functions_with_effects(), {*operators, *transform_functions()})


def _patch_dynamo(changes: Changes) -> None:
    from hops import _dynamo_rules

    _dynamo_rules.patch(changes)


def _patch_functional_export(changes: Changes) -> None:
    functional_export = sys.modules["torch._dynamo.functional_export"]
    changes.attribute(functional_export, "fullgraph_capture", noting_captures)


def _patch_aot_autograd(changes: Changes) -> None:
    aot_autograd = sys.modules["torch._functorch.aot_autograd"]
    changes.attribute(aot_autograd, "_aot_export_function", keeping_node_metadata)


def _patch_aot_entries(changes: Changes) -> None:
    aot_autograd = sys.modules["torch._functorch.aot_autograd"]
    for entry, position in aot_entries(aot_autograd):
        changes.attribute(aot_autograd, entry, hiding_views(position, is_captured_function))


def _patch_export(changes: Changes) -> None:
    trace = sys.modules["torch.export._trace"]
    changes.attribute(trace, "_export_for_training", naming_the_wrapped)
    changes.attribute(trace, "_export", one_at_a_time)


def _patch_archive(changes: Changes) -> str | None:
    package = sys.modules["torch.export.pt2_archive._package"]
    if not forgets_frozen_parameters(package):
        return "this torch keeps them frozen"
    changes.attribute(package, "_load_state_dict", keeping_frozen(package))
    return None


def _patch_export_pass(name: str, changes: Changes) -> None:
    mend_export_pass(sys.modules[name], changes)


def _patch_reading_of_files(changes: Changes) -> None:
    reader = sys.modules["torch._export.serde.serialize"].GraphModuleDeserializer
    changes.attribute(reader, "deserialize_graph", reading_empty_inputs)


def _patch_deserializer(changes: Changes) -> None:
    from hops import _file_checks

    deserializer = sys.modules["torch._export.serde.serialize"].GraphModuleDeserializer
    changes.attribute(deserializer, "deserialize", _file_checks.checking_the_operators)


SITES = (
    # Before the operators get our rules: it asks what torch has natively.
    Site(
        "torch.fx.experimental.proxy_tensor._MakefxTracer._trace_inner",
        "pre-dispatch tracing inlines Function.apply and checkpoint; the hooks that catch "
        "them (FunctionMeta.__getattribute__, checkpoint.__code__, and the code of what reads "
        "and sets random states) act during a trace only",
        _patch_tracing,
        core=True,
    ),
    Site(
        "torch.ops.higher_order.autograd_function_apply",
        "stock has no dispatch rules, so no tracer keeps it, and makes a class per call",
        _patch_function_operator,
        core=True,
    ),
    Site(
        "torch.ops.higher_order.tag_activation_checkpoint",
        "stock runs without checkpointing in eager (<= 2.9), draws another random mask in "
        "recompute (2.13 on), and raises KeyError before dispatch for a plain region",
        _patch_checkpoint_operator,
        core=True,
    ),
    Site(
        "torch.fx.experimental.proxy_tensor.PreDispatchTorchFunctionMode.__torch_function__",
        "torch 2.6 records a switch of grad mode without applying it, so that a Function in the "
        "model's no_grad block looks as if it recorded gradients; a hook on a tensor is lost "
        "without a word on every torch",
        _patch_function_mode,
        core=True,
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
        core=True,
    ),
    Site(
        "torch.fx.traceback.annotate",
        "a checkpoint in eager on one thread writes into, and fails on, what an export on "
        "another notes (2.10 on)",
        _patch_annotations,
    ),
    Site(
        "torch._dynamo: TorchHigherOrderOperatorVariable.make, "
        "AutogradFunctionVariable.call_apply, UserMethodVariable.call_function, "
        "UserDefinedClassVariable.call_method and call_function, OutputGraph.call_user_compiler, "
        "SideEffects.store_attr and mutation, autograd_function_backward_rewritten, "
        "is_torch_inline_allowed",
        "Dynamo cannot read a graph that holds autograd_function_apply, traces the body of a "
        "captured region anew, refuses or misreads many Functions and regions under export "
        "(what happened in a region is cut out of the complete graph), some Functions under "
        "torch.compile too (it is watched while it reads them), and skips "
        "checkpoint_sequential",
        _patch_dynamo,
        module="torch._dynamo",
    ),
    Site(
        "torch._dynamo.functional_export.fullgraph_capture",
        "dynamo_graph_capture_for_export looks to Dynamo like a compilation, and fails on every "
        "Function that Dynamo does not read itself",
        _patch_functional_export,
        module="torch._dynamo.functional_export",
    ),
    Site(
        "torch._functorch.aot_autograd._aot_export_function",
        "aot_export_module traces its joint graph a second time and drops what the first "
        "trace wrote on the nodes: recompute, ac_graph_id",
        _patch_aot_autograd,
        module="torch._functorch.aot_autograd",
    ),
    Site(
        "torch._functorch.aot_autograd: create_aot_state and aot_stage1_graph_capture, or "
        "create_aot_dispatcher_function",
        "compiled code makes an output that is a view anew from its base, by which it loses the "
        "backward of the Function that returned it",
        _patch_aot_entries,
        module="torch._functorch.aot_autograd",
    ),
    *(
        Site(
            f"{name}: nodes_first, node_inline_, sequential_split",
            "where operators hold bodies, it overlooks switches of grad mode and autocast, and "
            "deletes bodies inside bodies and the metadata of those with a switch in them",
            functools.partial(_patch_export_pass, name),
            module=name,
        )
        for name in EXPORT_PASSES
    ),
    Site(
        "torch.export._trace: _export_for_training, _export",
        "names below a CheckpointWrapper show the wrapper: placeholders, state_dict keys, "
        "module paths; exports on two threads at once exchange what they know of their models",
        _patch_export,
        module="torch.export._trace",
    ),
    Site(
        "torch.export.pt2_archive._package._load_state_dict",
        "torch 2.9 loads a frozen parameter as one that requires grad",
        _patch_archive,
        module="torch.export.pt2_archive._package",
    ),
    Site(
        "torch._export.serde.serialize.GraphModuleDeserializer.deserialize_graph",
        "a file does not load if a body has more inputs than the program and one is None",
        _patch_reading_of_files,
        module="torch._export.serde.serialize",
    ),
    Site(
        "torch._export.serde.serialize.GraphModuleDeserializer.deserialize",
        "a file whose counts, bodies or keywords were damaged loads without a word and fails "
        "later, or gives other gradients; it is refused by the name of the node",
        _patch_deserializer,
        module="torch._export.serde.serialize",
    ),
)

installation = Installation(SITES)


def install() -> None:
    """Patch torch.  Doing it twice is doing it once.

    With ``HOPS_DISABLE=1`` in the environment nothing is patched.

    Warns:
        HopsWarning: this torch lacks something that hops changes; says what, and what
            is left as in stock torch.
    """
    if os.environ.get("HOPS_DISABLE") != "1":
        installation.install()


def uninstall() -> None:
    """Give torch back everything that :func:`install` changed.

    Warns:
        HopsWarning: other code has patched the same place after hops did; names it.
    """
    installation.uninstall()
