"""What a body is, once its nodes are recorded: tidy, and such that a file can hold it."""

from __future__ import annotations

import operator
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import fx

from hops._mutation import mutated_operands
from hops._torch import (
    detect_fake_mode,
    disable_proxy_modes_tracing,
    recompile_submodules,
    set_grad_enabled,
    transform_functions,
    writes_profiler_marks,
)

_TRANSFORM_FUNCTIONS = frozenset(transform_functions())


_GENERATED = "_hops_generated"


class Body(fx.GraphModule):
    """A GraphModule that writes its code only when its graph has changed.

    The passes of torch.export recompile every body again and again, from 2.13 on
    with each recompilation of the module around it: some fourteen times a body
    in one export, which was a quarter of the time of a capture.
    """

    def recompile(self) -> Any:
        own_class = type(self)
        graph = self.graph
        if type(graph._codegen) is not fx.graph.CodeGen or writes_profiler_marks():
            return super().recompile()
        described = _described(graph)
        made = own_class.__dict__.get(_GENERATED)
        if made is not None:
            before, forward, code = made
            if forward is own_class.forward and _same(before, described):
                recompile_submodules(self)
                return code
        code = super().recompile()
        setattr(own_class, _GENERATED, (described, own_class.forward, code))
        return code


def _described(graph: fx.Graph) -> list[Any]:
    """All that the code of a graph is made from.  Arguments are immutable containers,
    so that a changed one is another object."""
    described: list[Any] = [getattr(graph, "_co_fields", None), graph._codegen._body_transformer]
    for n in graph.nodes:
        described += (n, n.name, n.op, n.target, n.args, n.kwargs, n.type)
    return described


def _same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(map(operator.is_, one, other))


class BodyGraph(fx.Graph):
    """The graph of a body: what eager would notice is not dead code.

    torch.export removes dead code from the graphs of bodies by a rule of its own
    for them, by which random numbers that nothing uses are not drawn.  Where a body writes
    into a buffer nothing is dead: recompute ends at the last tensor that was saved for
    backward, used or not, and so a buffer is updated once more or not.
    """

    def eliminate_dead_code(self, is_impure_node: Callable[[fx.Node], bool] | None = None) -> bool:
        if self.owning_module is not None and mutated_operands(self.owning_module):
            return False
        return super().eliminate_dead_code(is_impure_node or fx.Node.is_impure)


# [Note: numbers cross as tensors]
# A file of torch.export cannot hold a body that takes a SymFloat or SymBool; its
# maker did not foresee them among the inputs of a graph.  Such a number (what
# ``x.item()`` gives) goes into a body as a tensor of one element, and is taken out
# of it inside.  SymInts go as they are.


def crosses_as_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), (torch.SymFloat, torch.SymBool))


def pack_number(node: fx.Node, create_node: Callable[..., fx.Node]) -> fx.Node:
    """A node for the tensor that holds the number of ``node``.

    Args:
        create_node: of the tracer, or of the graph that ``node`` lies in.
    """
    wide = torch.float64 if isinstance(node.meta["val"], torch.SymFloat) else torch.bool
    target = torch.ops.aten.scalar_tensor.default
    packed = create_node("call_function", target, (node,), {"dtype": wide})
    with disable_proxy_modes_tracing(), detect_fake_mode() or nullcontext():
        packed.meta["val"] = torch.empty((), dtype=wide)
    return packed


def drop_grad_switches(graph: fx.Graph, recording: bool) -> None:
    """Erase the switches of grad mode that change nothing in a body.

    Args:
        recording: whether the body may be run so that autograd records it.  Where
            not (a forward, a once differentiable backward), no switch counts:
            autograd gives the body's outputs its own node, or none.  torch.export
            would make operators of such switches, some without any output, which
            can be saved but not loaded.
    """
    enabled = True
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not set_grad_enabled:
            continue
        if not recording or node.args[0] == enabled:
            graph.erase_node(node)
        else:
            enabled = bool(node.args[0])


def holds_body(owner: torch.nn.Module, node: fx.Node) -> bool:
    return isinstance(getattr(owner, str(node.target)), fx.GraphModule)


def _spell_out_sums(graph: fx.Graph) -> None:
    """Write ``torch.sym_sum``, which tracers make of sums of sizes and files cannot
    hold, as additions.  torch.export does so for the outer graph only."""
    for node in graph.find_nodes(op="call_function", target=torch.sym_sum):
        terms = list(node.args[0]) if isinstance(node.args[0], (list, tuple)) else list(node.args)
        total = terms[0]
        with graph.inserting_before(node):
            for term in terms[1:]:
                values = [t.meta["val"] if isinstance(t, fx.Node) else t for t in (total, term)]
                total = graph.call_function(operator.add, (total, term))
                with disable_proxy_modes_tracing():
                    total.meta = {**node.meta, "val": operator.add(*values)}
        node.replace_all_uses_with(total)
        graph.erase_node(node)


def tidy_body(module: fx.GraphModule) -> None:
    """Bring a body that is a module already into the form that recorded ones have."""
    renamed = number_bodies(module.graph, module)
    moved = {new: getattr(module, old) for old, new in renamed.items()}
    for target in renamed:
        delattr(module, target)
    for target, nested in moved.items():
        module.register_module(target, nested)
    tidy_graph(module.graph)
    # Each GraphModule has a class of its own, with its code; this is how it gets one that
    # keeps the code.  A second module for the graph would take it from its owner.
    module.__class__ = type(Body.__new__(Body))
    module.recompile()


def number_bodies(graph: fx.Graph, owner: torch.nn.Module) -> dict[str, str]:
    """Number the bodies that ``graph`` uses from 0, so that its text does not depend
    on what was captured before it.

    Args:
        owner: the module that has them.

    Returns:
        The new name of each by its old one.
    """
    counts: dict[str, int] = {}
    renamed: dict[str, str] = {}
    for node in [n for n in graph.find_nodes(op="get_attr") if holds_body(owner, n)]:
        old = str(node.target)
        if old not in renamed:
            prefix = old.rstrip("0123456789")
            renamed[old] = f"{prefix}{counts.setdefault(prefix, 0)}"
            counts[prefix] += 1
        node.target = renamed[old]
        node._rename(renamed[old])
    return renamed


def tidy_graph(graph: fx.Graph) -> None:
    """Write what files hold, and give the nodes the module paths of the user's model, as
    torch.export does for the nodes of the outer graph."""
    graph.__class__ = BodyGraph
    _spell_out_sums(graph)
    for node in graph.nodes:
        if node.op == "placeholder" or node.target in _TRANSFORM_FUNCTIONS:
            node.meta.setdefault("val", None)
        stack = node.meta.get("nn_module_stack")
        if stack:
            named = {key: (path, _class_name(kind)) for key, (path, kind) in stack.items()}
            node.meta["nn_module_stack"] = _without_export_root(named)


def _class_name(kind: Any) -> str:
    """A class as the module stacks of exported programs name it."""
    return f"{kind.__module__}.{kind.__qualname__}" if isinstance(kind, type) else kind


_EXPORT_ROOT = "_export_root"


def _without_export_root(stack: dict[str, Any]) -> dict[str, Any]:
    """A module stack without the wrapper that torch.export puts around the model."""
    if not any(path.split(".")[0] == _EXPORT_ROOT for path, _ in stack.values()):
        return stack
    cleaned = {}
    for key, (path, kind) in stack.items():
        if not path.startswith(_EXPORT_ROOT):
            continue
        path = path.removeprefix(_EXPORT_ROOT).removeprefix(".")
        if not path:
            key = "L__self__"
        elif key.startswith(_EXPORT_ROOT):
            key = "L__self__" + key.removeprefix(_EXPORT_ROOT).removeprefix(".")
        cleaned[key] = (path, kind)
    return cleaned
