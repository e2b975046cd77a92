"""Tensors that autograd makes below the tracer, known by the memory that they show.

[Note: aliases made below the tracer]
``torch.autograd.grad`` inside captured code (reversible blocks, adjoint
solvers) hands the tracer tensors that it has never seen: autograd keeps the
output of an operation (exp, tanh, ...) as a detached alias, when the output
itself may be gone long since, and composites are decomposed (the transpose
inside linear) below the tracer.  A tracer takes a tensor that it does not know
for a constant.  So each tensor that it learns is noted under its storage, and an
unknown tensor is looked up there.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakTensorKeyDictionary

from hops._subgraph import track
from hops._torch import (
    FakeTensor,
    HigherOrderOperator,
    disable_proxy_modes_tracing,
    is_transformed,
    statically_known_true,
    stock_autograd_function_apply,
    stock_tag_activation_checkpoint,
    without_torch_functions,
)

#: Their rules say what requires grad.
_OWN = (stock_autograd_function_apply, stock_tag_activation_checkpoint)


@dataclass(frozen=True)
class _View:
    """A tensor that the tracer knows: how it lies in its storage, and what it is in the
    graph: a proxy, or the tensor itself where it is a constant.

    The storage is held weakly: its memory may go, but not its identity.
    """

    storage: StorageWeakRef
    dtype: torch.dtype
    layout: tuple[Any, ...]
    source: Any = None

    @staticmethod
    def of(tensor: torch.Tensor, source: Any = None) -> _View:
        with without_torch_functions():
            return _View(
                StorageWeakRef(tensor.untyped_storage()),
                tensor.dtype,
                (tuple(tensor.shape), tensor.stride(), tensor.storage_offset()),
                source,
            )

    def shows_the_same(self, other: _View) -> bool:
        (shape, stride, offset), (shape2, stride2, offset2) = self.layout, other.layout
        if len(shape) != len(shape2):
            return False
        pairs = zip((*shape, *stride, offset), (*shape2, *stride2, offset2))
        return all(statically_known_true(one == two) for one, two in pairs)


class KnownTensors(WeakTensorKeyDictionary):
    """A tracer's table of tensors, which notes them under their storages too."""

    def __init__(self, known: Any) -> None:
        self._views: dict[int, list[_View]] = {}
        self._bodies: list[Replaced] = []
        self._differentiable: set[fx.Node] = set()
        super().__init__()
        for tensor, slot in known.items():
            self[tensor] = slot

    def __setitem__(self, tensor: torch.Tensor, slot: Any) -> None:
        for body in self._bodies:
            body.replacing(tensor, self.get(tensor))
        super().__setitem__(tensor, slot)
        node = slot.proxy.node
        if not tensor.requires_grad and self._loses_gradient(tensor, node):
            with without_torch_functions():
                tensor.requires_grad_()
        self.differentiable(tensor, node)
        if has_storage(tensor):
            self.note(tensor, slot.proxy)

    def differentiable(self, tensor: torch.Tensor, node: fx.Node) -> fx.Node:
        """``node``, which stands for ``tensor``, noted if it requires grad."""
        if tensor.requires_grad:
            self._differentiable.add(node)
        return node

    def _loses_gradient(self, tensor: torch.Tensor, node: fx.Node) -> bool:
        """Whether an operator of torch gave out, in the trace, a tensor that requires grad in
        eager and not here: ``scan`` does.  A Function on it would be taken for one that records
        nothing."""
        call = node.args[0] if node.target is operator.getitem else node
        return (
            isinstance(call, fx.Node)
            and isinstance(call.target, HigherOrderOperator)
            and call.target not in _OWN
            and torch.is_grad_enabled()
            and (tensor.is_floating_point() or tensor.is_complex())
            and not self._differentiable.isdisjoint(call.all_input_nodes)
        )

    @contextmanager
    def recording(self, graph: fx.Graph) -> Iterator[Replaced]:
        """Note which tensors of the code around a body get another node inside it."""
        body = Replaced(self, graph)
        self._bodies.append(body)
        try:
            yield body
        finally:
            self._bodies.remove(body)

    def note_constant(self, tensor: torch.Tensor) -> None:
        for body in self._bodies:
            body.reading(tensor)
        self.note(tensor, tensor)

    def note(self, tensor: torch.Tensor, source: Any) -> None:
        view = _View.of(tensor, source)
        self._views.setdefault(view.storage.cdata, []).append(view)

    def find(self, tensor: torch.Tensor) -> tuple[Any, Any]:
        """The source of the same view of the same storage, the latest; else the source of
        another view of it and the layout that makes ``tensor`` out of it."""
        wanted = _View.of(tensor)
        known = self._views.get(wanted.storage.cdata, ())
        same_type = [view for view in reversed(known) if view.dtype == wanted.dtype]
        for view in same_type:
            if view.shows_the_same(wanted):
                return view.source, None
        return (same_type[0].source, wanted.layout) if same_type else (None, None)


class Replaced:
    """Tensors from outside of a Function's body that got a node inside it.

    An operation that gives back its argument (``x.to(x.dtype)``, ``x.contiguous()``) or
    writes into it makes the tracer know the same tensor by another node, that of a body;
    for the code after the Function it must stay what it was.
    """

    def __init__(self, known: KnownTensors, graph: fx.Graph) -> None:
        self._known = known
        self._graph = graph
        self._before: dict[int, tuple[torch.Tensor, Any]] = {}
        self._constants: list[torch.Tensor] = []

    def reading(self, constant: torch.Tensor) -> None:
        """A tensor that no node stands for yet, a buffer say, is about to be used."""
        if not constant.requires_grad:
            self._constants.append(constant)

    def forget_gradients(self, without: fx.Graph) -> None:
        """Take away what a backward, traced with gradients, did to tensors that have none.

        A buffer that it writes a gradient into would require grad from now on: in the rest of
        the trace, and in the user's model.  Eager runs the backward in no-grad mode.

        Args:
            without: the graph of the forward, which was recorded in no-grad mode.
        """
        written = [
            tensor
            for tensor, slot in self._before.values()
            if slot.proxy.node.graph is without or slot.proxy.node.op in ("placeholder", "get_attr")
        ]
        for tensor in (*written, *self._constants):
            if tensor.grad_fn is not None and not tensor._is_view():
                with disable_proxy_modes_tracing(), without_torch_functions():
                    tensor.detach_()

    def replacing(self, tensor: torch.Tensor, slot: Any) -> None:
        self._note(tensor, slot)
        if tensor.requires_grad and tensor._is_view():
            # A write through a view changes its base.
            self._note(tensor._base, self._known.get(tensor._base))

    def _note(self, tensor: Any, slot: Any) -> None:
        if slot is not None and slot.proxy.node.graph is not self._graph:
            self._before.setdefault(id(tensor), (tensor, slot))

    def restore(self) -> None:
        before, self._before = self._before, {}
        for tensor, slot in before.values():
            self._known[tensor] = slot


def has_storage(tensor: Any) -> bool:
    """Whether it is a plain tensor, whose storage tells what it aliases."""
    plain = isinstance(tensor, FakeTensor) or type(tensor) in (torch.Tensor, torch.nn.Parameter)
    if not plain:
        return False
    with without_torch_functions():
        return tensor.layout is torch.strided and not is_transformed(tensor)


def knowing_aliases(tracer: Any, create_arg: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """``tracer.create_arg`` that finds aliases made below the tracer."""
    tracer.tensor_tracker = known = KnownTensors(tracer.tensor_tracker)

    def create_arg_of_alias(value: Any) -> Any:
        if not has_storage(value) or value in known:
            return create_arg(value)
        # Outside of autograd a real tensor that is not known is a constant of the user's.
        if not isinstance(value, FakeTensor) and torch._C._current_graph_task_id() == -1:
            known.note_constant(value)
            return known.differentiable(value, create_arg(value))
        source, layout = known.find(value)
        if source is None:
            known.note_constant(value)
            return create_arg(value)
        if layout is None:
            return create_arg(source)
        arguments = fx.node.map_aggregate((source, *layout), tracer.unwrap_proxy)
        target = torch.ops.aten.as_strided.default
        view = tracer.create_proxy("call_function", target, arguments, {})
        track(value, view, tracer)
        return create_arg(view)

    return create_arg_of_alias
