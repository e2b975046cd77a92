"""Passes of torch.export that misread a graph in which operators hold bodies.

torch.export turns switches of grad mode and autocast into operators of their own
(``wrap_with_set_grad_enabled``, ``wrap_with_autocast``), in the bodies of other
operators too, since the switches themselves can neither be checked nor saved.
It splits the graph at the switches, wraps the parts that a switch governs, and
puts the others back.  On the way it

- knows a part that a switch governs by the switch being its first node, but the
  ``get_attr`` of a body that the part uses comes before it;
- deletes what it takes for unused modules after putting a part back: the bodies
  that lie in other bodies;
- makes a new module of each body that has a switch in it, without the metadata
  of the old one, and with it goes a selective policy;
- makes an operator without outputs of a part that nothing uses a value of (it
  writes into a buffer, or dead code elimination has emptied it), and then cannot
  save the program, or not load it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakSet

import torch
from torch import fx

from hops._body import BodyGraph
from hops._changes import Changes
from hops._mode_switches import drop_empty_regions
from hops.autograd_function_apply import autograd_function_apply
from hops.tag_activation_checkpoint import tag_activation_checkpoint

#: The modules of torch that have such a pass, and the names in them that are exchanged.
EXPORT_PASSES = (
    "torch._export.passes.replace_autocast_with_hop_pass",
    "torch._export.passes.replace_set_grad_with_hop_pass",
)


def mend_export_pass(module: Any, changes: Changes) -> None:
    """Exchange what the pass uses of torch's helpers."""
    for name, mend in _MENDED.items():
        changes.attribute(module, name, mend)


def _looking_past_bodies(nodes_first: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(nodes_first)
    def first(nodes: Iterable[fx.Node], wanted: Any = None) -> Any:
        return nodes_first([n for n in nodes if n.op != "get_attr"], wanted)

    return first


def _deleting_only_itself(node_inline_: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(node_inline_)
    def inline(node: fx.Node) -> Any:
        module: Any = node.graph.owning_module
        target = str(node.target)
        module.delete_all_unused_submodules = lambda: module.delete_submodule(target)
        try:
            return node_inline_(node)
        finally:
            del module.delete_all_unused_submodules

    return inline


def _keeping_metadata(sequential_split: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(sequential_split)
    def split(module: fx.GraphModule, *args: Any, **kwargs: Any) -> fx.GraphModule:
        is_captured = isinstance(module.graph, BodyGraph) or _holds_operators(module)
        if is_captured:
            drop_empty_regions(module.graph)
        parts: fx.GraphModule = sequential_split(module, *args, **kwargs)
        parts.meta = {**parts.meta, **module.meta}
        if is_captured:
            _captured.add(parts)
        return parts

    return split


#: Split modules that are bodies or hold operators; of others torch makes what it always does.
_captured: WeakSet[fx.GraphModule] = WeakSet()


def _holds_operators(module: fx.GraphModule) -> bool:
    return any(
        node.target in (autograd_function_apply, tag_activation_checkpoint)
        for part in module.modules()
        if isinstance(part, fx.GraphModule)
        for node in part.graph.nodes
    )


def _with_an_output(replace: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(replace)
    def _replace_with_hop_helper(node: fx.Node, *args: Any) -> None:
        if node.graph.owning_module in _captured:
            _give_output(getattr(node.graph.owning_module, str(node.target)))
        replace(node, *args)

    return _replace_with_hop_helper


def _give_output(part: fx.GraphModule) -> None:
    """Let a part that gives out nothing give out its last tensor."""
    nodes = list(part.graph.nodes)
    output = nodes.pop() if nodes[-1].op == "output" else None
    tensors = [n for n in nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    if not tensors or output is not None and output.args[0] not in (None, (), []):
        return
    if output is None:
        part.graph.output((tensors[-1],))
    else:
        output.args = ((tensors[-1],),)
    part.recompile()


_MENDED: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "nodes_first": _looking_past_bodies,
    "node_inline_": _deleting_only_itself,
    "sequential_split": _keeping_metadata,
    "_replace_with_hop_helper": _with_an_output,
}
