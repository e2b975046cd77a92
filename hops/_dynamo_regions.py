"""Checkpointed regions that Dynamo meets under export.

[Note: regions are traced in place]
Stock Dynamo traces the function of a region apart, as it does the branches of a
``cond``: what the region does to Python objects is refused, a function mode
around it is not applied, and what the region leaves on a list is lost.  None of
that is a property of a region.  So under export the function is traced in
place, as if it were called without ``checkpoint``, between two marks in
Dynamo's graph.  When the graph is complete the nodes between two marks become
the body of an operator: values from outside that they use are its operands,
values that are used outside, however they got there, its outputs.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._dynamo.variables.functions import FunctoolsPartialVariable, UserFunctionVariable
from torch._dynamo.variables.lists import TupleVariable
from torch._dynamo.variables.tensor import TensorVariable

from hops._capture_checkpoint import opaque_detached, resolve_use_reentrant
from hops._capture_hooks import call_original
from hops._dynamo_changes import NotPython
from hops._dynamo_errors import CaptureErrorInDynamo, naming
from hops._dynamo_python import lasting_object
from hops._dynamo_variables import items_of, module_of
from hops._torch import (
    CHECKPOINT_KEYWORDS,
    SYMBOLIC_TYPES,
    stock_tag_activation_checkpoint,
    torch_checkpoint,
)
from hops.tag_activation_checkpoint import CONTEXT_FN

_REGION = "hops_region"
_RETURNED = "hops_returned"


@dataclass(frozen=True)
class _Region:
    """What a mark says of its region: name, arguments of ``checkpoint``, selective policy."""

    name: str
    options: dict[str, Any]
    context_fn: Callable[[], Any] | None


def region_entered() -> None:
    """Mark in Dynamo's graph: the region that is closed by the matching mark starts here."""


def region_left(entered: None) -> None:
    """Mark in Dynamo's graph: the region that ``entered`` opened ends here."""


MARKS = (region_entered, region_left)


def trace_region(tx: Any, checkpoint: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Trace a call of ``checkpoint`` as eager would run its forward.

    Args:
        checkpoint: Dynamo's variable for ``checkpoint`` itself.
    """
    if not args:
        return UserFunctionVariable(_curried).call_function(tx, [checkpoint], kwargs)
    function, *inputs = args
    name = _name_of(function)
    keywords = {k: v for k, v in kwargs.items() if k not in CHECKPOINT_KEYWORDS}
    with naming(f"the checkpointed region of {name}"):
        options = _options(tx, name, kwargs)
        reentrant = resolve_use_reentrant(call_original, options, dict.fromkeys(keywords))
        if not torch.is_grad_enabled():
            return function.call_function(tx, inputs, keywords)
        if reentrant and not any(map(_requires_grad, inputs)):
            warnings.warn(
                "None of the inputs have requires_grad=True. Gradients will be None",
                stacklevel=2,
            )
            without = UserFunctionVariable(_without_gradient)
            return without.call_function(tx, args, keywords)
        context_fn = options.pop("context_fn", torch_checkpoint.noop_context_fn)
        if context_fn is torch_checkpoint.noop_context_fn:
            context_fn = None
        region = _Region(name, {**options, "use_reentrant": reentrant}, context_fn)
        entered = tx.output.create_proxy("call_function", region_entered, (), {})
        assigned = _assigned_buffers(tx)
        with _own_leaves(tx.output):
            result = function.call_function(tx, inputs, keywords)
        _refuse_assigned_buffers(name, assigned, _assigned_buffers(tx))
        left = tx.output.create_proxy("call_function", region_left, (entered,), {})
        left.node.meta[_REGION] = region
        if not reentrant:
            return result
        left.node.meta[_RETURNED] = _returned(result)
        return UserFunctionVariable(opaque_detached).call_function(tx, [result], {})


def _returned(result: Any) -> set[fx.Node]:
    """The nodes of the tensors that are outputs of the Function that a reentrant region is."""
    result = result.realize()
    values = result.items if isinstance(result, TupleVariable) else [result]
    tensors = [v for v in (value.realize() for value in values) if isinstance(v, TensorVariable)]
    return {v.as_proxy().node for v in tensors}


def _assigned_buffers(tx: Any) -> dict[tuple[int, str], Any]:
    """What has been assigned to buffers so far; Dynamo only remembers it, for the module
    or (2.13 on) for the dict in which the module keeps its buffers."""
    effects, assigned = tx.output.side_effects, {}
    for variable, pending in effects.store_attr_mutations.items():
        module = module_of(tx, variable)
        buffers = {} if module is None else module._buffers
        for name in pending:
            if name in buffers:
                assigned[id(variable), name] = pending[name]
    for item in effects.keepalive:
        variable = effects.id_to_variable.get(id(item))
        if isinstance(item, dict) and _holds_buffers(variable) and effects.is_modified(variable):
            for key, value in items_of(variable).items():
                assigned[id(variable), key.vt.as_python_constant()] = value
    return assigned


def _holds_buffers(variable: Any) -> bool:
    source = getattr(variable, "source", None)
    return source is not None and "_buffers" in str(getattr(source, "member", ""))


def _refuse_assigned_buffers(name: str, before: Any, after: Any) -> None:
    for (owner, buffer), value in after.items():
        if before.get((owner, buffer)) is not value:
            raise CaptureErrorInDynamo(
                f"hops: the checkpointed region of {name} assigns the buffer {buffer!r}, which "
                "strict export loses. Write into it, self.{0}.copy_(...), or capture with "
                "strict=False.".format(buffer)
            )


@contextmanager
def _own_leaves(output: Any) -> Iterator[None]:
    """Dynamo (2.11 on) refuses a program whose outputs depend on an intermediate that was
    made a leaf, which AOTAutograd would forget; not so inside of an operator."""
    leaves = getattr(output, "leaf_var_creation_order", [])
    before = len(leaves)
    yield
    del leaves[before:]


def _options(tx: Any, name: str, kwargs: dict[str, Any]) -> dict[str, Any]:
    known = {k: v for k, v in kwargs.items() if k in CHECKPOINT_KEYWORDS}
    try:
        return {k: lasting_object(tx, v) for k, v in known.items()}
    except NotPython as error:
        raise CaptureErrorInDynamo(
            f"hops: strict capture cannot keep {error} as an argument of checkpoint, for the "
            f"region of {name}. Capture with strict=False."
        ) from error


def _curried(checkpoint: Any, **options: Any) -> Any:
    """``checkpoint`` without a function gives a decorator (torch 2.14 on)."""

    def decorator(function: Any) -> Any:
        def checkpointed(*args: Any, **kwargs: Any) -> Any:
            return checkpoint(function, *args, **options, **kwargs)

        return checkpointed

    return decorator


def _without_gradient(function: Any, *args: Any, **kwargs: Any) -> Any:
    """What eager makes of a reentrant region none of whose arguments requires grad."""
    with torch.no_grad():
        return function(*args, **kwargs)


def _requires_grad(variable: Any) -> bool:
    variable = variable.realize()
    if not isinstance(variable, TensorVariable):
        return False
    return bool(variable.as_proxy().node.meta["example_value"].requires_grad)


def _name_of(function: Any) -> str:
    """A region as an error names it: by what it runs, whatever is wrapped around that."""
    variable = function.realize()
    while isinstance(variable, FunctoolsPartialVariable):
        variable = variable.func.realize()
    written: Any = getattr(variable, "fn", getattr(variable, "value", None))
    if hasattr(written, "__qualname__"):
        return str(written.__qualname__)
    try:
        return str(variable.get_name())
    except (AttributeError, NotImplementedError):
        return type(variable if written is None else written).__name__


def fold_regions(module: fx.GraphModule) -> None:
    """Make an operator of all that lies between two marks, here and in subgraphs.

    Raises:
        CaptureError: a value that is no tensor or number crosses the border of a region.
    """
    for child in module.children():
        if isinstance(child, fx.GraphModule):
            fold_regions(child)
    marks = [n for n in module.graph.nodes if n.target is region_left]
    for left in marks:
        _Fold(module, left.args[0], left).run()
    if marks:
        module.graph.lint()
        module.recompile()


class _Fold:
    """Turns the nodes between two marks into a call of the operator."""

    def __init__(self, module: fx.GraphModule, entered: fx.Node, left: fx.Node) -> None:
        self.module = module
        self.graph = module.graph
        self.entered = entered
        self.left = left
        self.region: _Region = left.meta[_REGION]

    def run(self) -> None:
        inside = self._nodes_inside()
        if inside:
            self._settle_outputs(inside)
            outputs = [n for n in inside if self._leaves(n, inside)]
            body, operands = self._body(inside, outputs)
            self._write(body, operands, outputs, inside)
        for node in reversed([self.entered, *inside, self.left]):
            self.graph.erase_node(node)
        if inside:
            self._drop_moved(body)

    def _nodes_inside(self) -> dict[fx.Node, None]:
        """The nodes of the region; tensors that are attributes stay outside, where
        Dynamo may have used them again."""
        inside: dict[fx.Node, None] = {}
        node = self.entered.next
        while node is not self.left:
            following = node.next
            if node.op == "get_attr" and isinstance(self._attribute(node), torch.Tensor):
                self.entered.prepend(node)
            else:
                inside[node] = None
            node = following
        return inside

    def _attribute(self, node: fx.Node) -> Any:
        return operator.attrgetter(str(node.target))(self.module)

    def _leaves(self, node: fx.Node, inside: dict[fx.Node, None]) -> bool:
        return any(user not in inside for user in node.users)

    def _settle_outputs(self, inside: dict[fx.Node, None]) -> None:
        """Take what picks a value out of a tuple into the region where the tuple is."""
        for node in list(inside):
            if not self._leaves(node, inside) or _crosses(node):
                continue
            for user in [u for u in node.users if u not in inside]:
                if user.target is not operator.getitem:
                    raise CaptureErrorInDynamo(
                        f"hops: {node.name!r}, which is no tensor or number, leaves the "
                        f"checkpointed region of {self.region.name}, which strict capture "
                        "cannot write down. Capture with strict=False."
                    )
                self.left.prepend(user)
                inside[user] = None

    def _body(
        self, inside: dict[fx.Node, None], outputs: list[fx.Node]
    ) -> tuple[fx.GraphModule, list[fx.Node]]:
        graph, inner = fx.Graph(), {}
        free = dict.fromkeys(s for n in inside for s in n.all_input_nodes if s not in inside)
        for position, node in enumerate(free):
            inner[node] = graph.placeholder(f"arg{position}_1")
            inner[node].meta.update(node.meta)
        for node in inside:
            inner[node] = graph.node_copy(node, inner.__getitem__)
        graph.output(tuple(inner[node] for node in outputs))
        attributes = {
            str(n.target): self._attribute(n) for n in inside if n.op in ("get_attr", "call_module")
        }
        body = fx.GraphModule(attributes, graph)
        if self.region.context_fn is not None:
            body.meta[CONTEXT_FN] = self.region.context_fn
        return body, list(free)

    def _write(
        self,
        body: fx.GraphModule,
        operands: list[fx.Node],
        outputs: list[fx.Node],
        inside: dict[fx.Node, None],
    ) -> None:
        name = next(n for n in _names("wrap_body_") if not hasattr(self.module, n))
        self.module.register_module(name, body)
        kept = {k: v for k, v in self.left.meta.items() if k not in (_REGION, _RETURNED)}
        with self.graph.inserting_before(self.left):
            reference = self.graph.get_attr(name)
            call = self.graph.call_function(
                stock_tag_activation_checkpoint, (reference, *operands), self.region.options
            )
            call.meta.update(kept)
            call.meta["example_value"] = tuple(n.meta["example_value"] for n in outputs)
            for position, node in enumerate(outputs):
                slot = self.graph.call_function(operator.getitem, (call, position))
                slot.meta.update(kept)
                slot.meta["example_value"] = node.meta["example_value"]
                if self._is_opaque(node):
                    slot = self.graph.call_method("detach", (slot,))
                    slot.meta.update(kept)
                    slot.meta["example_value"] = node.meta["example_value"]
                self._returned_by_others(node, slot)
                node.replace_all_uses_with(slot, delete_user_cb=lambda u: u not in inside)

    def _returned_by_others(self, node: fx.Node, slot: fx.Node) -> None:
        """What a region around this one returns of it, it returns by the new node."""
        for mark in self.graph.find_nodes(op="call_function", target=region_left):
            if node in mark.meta.get(_RETURNED, ()):
                mark.meta[_RETURNED].add(slot)

    def _is_opaque(self, node: fx.Node) -> bool:
        """Whether a tensor leaves a reentrant region, which eager runs without gradients,
        in another way than by being returned."""
        returned = self.left.meta.get(_RETURNED)
        is_tensor = isinstance(node.meta["example_value"], torch.Tensor)
        return returned is not None and is_tensor and node not in returned

    def _drop_moved(self, body: fx.GraphModule) -> None:
        """What only the body uses is no longer an attribute of the module around."""
        used = {str(n.target) for n in self.graph.nodes if n.op in ("get_attr", "call_module")}
        for name, _ in list(body.named_children()):
            if name not in used and hasattr(self.module, name):
                delattr(self.module, name)


def _crosses(node: fx.Node) -> bool:
    return isinstance(node.meta.get("example_value"), (torch.Tensor, *SYMBOLIC_TYPES))


def _names(prefix: str) -> Iterator[str]:
    number = 0
    while True:
        yield f"{prefix}{number}"
        number += 1
